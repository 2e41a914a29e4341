"""`torch.export`: the program of a model with active adapters computes what the model does."""

from __future__ import annotations

import io

import pytest
import torch
from families import first_output, tiny_config, tiny_inputs
from snapshots import of_adapter, stir
from variants import VARIANTS

from adapterzoo import AdapterSetup, AutoAdapterModel

pytestmark = [
    # transformers' own, of a plain model too: strict export names every side effect
    pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects"),
    # torch's own, when it unflattens a program
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec:FutureWarning"),
]


def model_with(config, family="bert"):
    torch.manual_seed(0)
    shallow = tiny_config(family)
    shallow.num_hidden_layers = 1
    model = AutoAdapterModel.from_config(shallow).eval()
    for seed, name in enumerate("ab"):
        model.add_adapter(name, config)
        stir(model, name, seed)
    model.set_active_adapters("a")
    return model


def inputs_of(family, batch=2):
    caches = {} if family == "bert" else {"use_cache": False}
    return {**tiny_inputs(family, batch), **caches}


def exported(model, inputs, **kwargs):
    with torch.no_grad():
        return torch.export.export(model, (), inputs, **kwargs)


def outputs(run, inputs):
    with torch.no_grad():
        return first_output(run(**inputs))


def close(found, expected):
    """A program may have other operations than the model, which round differently."""
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def check(model, program, inputs):
    expected = outputs(model, inputs)
    close(outputs(program.module(), inputs), expected)
    # the export has left nothing of its own in the model
    assert not model._active.call.captures
    assert not model._active.call.reads
    assert torch.equal(outputs(model, inputs), expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_program_gives_the_eager_output(variant):
    model, inputs = model_with(VARIANTS[variant]), inputs_of("bert")
    program = exported(model, inputs, strict=False)
    check(model, program, inputs)
    own = {name: t for name, t in model.state_dict().items() if of_adapter(name)}
    mine = {name for name in program.state_dict if of_adapter(name, "a")}
    # the names of the model, for the adapter that acts and no other
    assert mine == {name for name in own if of_adapter(name, "a")}
    signature = program.graph_signature
    taken = (signature.inputs_to_parameters | signature.inputs_to_buffers).values()
    assert set(taken) >= mine
    for name in mine:
        assert torch.equal(program.state_dict[name], own[name])


def test_strict_export_does_as_well():
    model, inputs = model_with("boft|par_bn", "llama"), inputs_of("llama")
    check(model, exported(model, inputs, strict=True), inputs)


def test_fused_experts_are_exported():
    model = model_with("lora[intermediate_lora=True,output_lora=True]", "mixtral")
    # the plain model's loop over experts cannot be exported either
    model.config._experts_implementation = "batched_mm"
    inputs = inputs_of("mixtral")
    check(model, exported(model, inputs, strict=False), inputs)


def test_the_setup_of_the_thread_is_what_is_exported():
    model, inputs = model_with("lora"), inputs_of("bert")
    with AdapterSetup("b"):
        program = exported(model, inputs, strict=False)
        expected = outputs(model, inputs)
    # a program has no adapters to choose from
    close(outputs(program.module(), inputs), expected)
    assert (outputs(model, inputs) - expected).abs().max() > 1e-2
    model.set_active_adapters(None)
    close(outputs(program.module(), inputs), expected)


def test_a_program_is_saved_unflattened_and_takes_other_batches():
    model, inputs = model_with("boft|par_bn"), inputs_of("bert")
    batch = torch.export.Dim("batch", min=2, max=64)
    shapes = {name: {0: batch} for name in inputs}
    program = exported(model, inputs, strict=False, dynamic_shapes=shapes)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file)
    others = inputs_of("bert", batch=5)
    expected = outputs(model, others)
    for run in (loaded.module(), torch.export.unflatten(loaded)):
        close(outputs(run, others), expected)
    names = {n for n, _ in torch.export.unflatten(loaded).named_parameters()}
    assert {n for n, _ in model.named_parameters() if of_adapter(n, "a")} <= names
