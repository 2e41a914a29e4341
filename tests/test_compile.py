"""`torch.compile(fullgraph=True)`: compiled equals eager, and nothing compiles twice."""

import shutil

import pytest
import torch
from families import first_output, tiny_config, tiny_inputs
from graphs import Counting
from snapshots import of_adapter, stir
from transformers import AutoModel
from variants import SWEPT, VARIANTS

from adapterzoo import AdapterSetup, AutoAdapterModel, init
from adapterzoo.inject.tokens import recorded_call


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    # one for each adapter that a test switches to: torch gives up after 8
    with torch._dynamo.config.patch(recompile_limit=32):
        yield
    torch._dynamo.reset()


def shallow(family):
    """A config with one block: what compiles twice does so there too."""
    config = tiny_config(family)
    setattr(config, "n_layer" if family == "gpt2" else "num_hidden_layers", 1)
    return config


def with_adapters(family="bert", **configs):
    torch.manual_seed(0)
    model = AutoAdapterModel.from_config(shallow(family)).eval()
    for i, (name, config) in enumerate(configs.items()):
        model.add_adapter(name, config)
        stir(model, name, seed=i + 1)
    return model


def one_of_each():
    """Architectures to the first variant of each; a union is made of others."""
    found = {}
    for config in VARIANTS.values():
        found.setdefault(config.architecture, config)
    del found["union"]
    return found


def outputs(run, inputs):
    """Without gradients, always of the same random numbers."""
    torch.manual_seed(0)
    with torch.no_grad():
        return first_output(run(**inputs))


def gradients(module, run, *inputs):
    """The output of a part of a model and its gradients, always of the same random numbers."""
    torch.manual_seed(0)
    module.zero_grad()
    y = run(*inputs)
    # a norm makes sums and squares constant
    y.exp().sum().backward()
    found = {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
    return {**found, "output": y.detach()}


def same(found, expected, rtol=0.0, atol=0.0):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=rtol, atol=atol, msg=name)


@pytest.mark.long
@pytest.mark.parametrize("variant", SWEPT)
def test_training_and_inference_compile_once_whatever_the_weights(variant, tmp_path):
    # float64, as the compiler may sum a gradient in another order
    if variant in ("prompt_tuning", "trainable_tokens"):
        pytest.skip("acts before the blocks")
    model = with_adapters(a=VARIANTS[variant]).double()
    # a config on disk does not tell SeqBnConfig from BnConfig
    model.save_adapter(tmp_path, "a")
    model.train_adapter("a")
    block, x = model.bert.encoder.layer[0], torch.randn(2, 7, 32, dtype=torch.float64)
    backend = Counting()
    compiled = torch.compile(block, fullgraph=True, backend=backend)
    seen = []

    def check():
        # a block is compiled in calls of its model
        with recorded_call(model.bert, (), model._active, "", (), {}):
            # with dropout, where there is any
            model.train()
            expected = gradients(block, block, x)
            # a prefix is below the base model
            in_block = any(of_adapter(name, "a") for name in expected)
            assert in_block or variant == "prefix_tuning"
            same(gradients(block, compiled, x), expected, rtol=1e-10, atol=1e-12)
            model.eval()
            with torch.no_grad():
                seen.append(block(x))
                assert torch.equal(compiled(x), seen[-1])
            assert backend.graphs == 2

    check()
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01).step()
    check()
    stir(model, "a", seed=5)
    check()
    state = {key: t * 1.5 if t.is_floating_point() else t for key, t in model.state_dict().items()}
    model.load_state_dict(state)
    check()
    model.load_adapter(tmp_path, load_as="a", set_active=True, overwrite_ok=True)
    model.train_adapter("a")
    check()
    for i, one in enumerate(seen):
        assert not any(torch.equal(one, other) for other in seen[:i])


def test_a_whole_training_step_of_all_methods_compiles():
    model = with_adapters(**one_of_each())
    model.add_classification_head("h", num_labels=3)
    model.train_adapter(list(one_of_each()))
    model.active_head = "h"
    inputs = {**tiny_inputs("bert"), "labels": torch.tensor([0, 2])}
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    # its random numbers in training are others than the eager ones
    model.eval()
    expected = gradients(model, lambda: model(**inputs).loss)
    found = gradients(model, lambda: compiled(**inputs).loss)
    same(found, expected, rtol=1e-4, atol=1e-6)
    for name in one_of_each():
        if name != "reft":
            # which sits at the output of the whole block
            assert any(of_adapter(key, name) for key in expected)


# a weight, a norm of it, a stream and a cache; the sweep takes one of each architecture
KINDS = ("boft", "dora", "bottleneck", "prefix_tuning")


@pytest.mark.parametrize("kinds", [KINDS, pytest.param(None, marks=pytest.mark.sweep(whole=True))])
def test_each_adapter_compiles_once_and_is_found_again(kinds):
    configs = {name: c for name, c in one_of_each().items() if kinds is None or name in kinds}
    assert len(configs) >= len(KINDS)
    model = with_adapters("gpt2", **configs)
    inputs = {**tiny_inputs("gpt2"), "use_cache": False}
    backend = Counting()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    seen = {}
    for name in (None, *configs):
        model.set_active_adapters(name)
        seen[name] = outputs(model, inputs)
        assert torch.equal(outputs(compiled, inputs), seen[name])
        assert backend.graphs == len(seen)
        assert name is None or not torch.equal(seen[name], seen[None])
    for name, expected in seen.items():
        model.set_active_adapters(name)
        assert torch.equal(outputs(compiled, inputs), expected)
    assert backend.graphs == len(seen)
    # what a thread has for itself compiles apart from what all have, and once too
    for _ in range(2):
        with AdapterSetup("boft"):
            assert torch.equal(outputs(compiled, inputs), seen["boft"])
        assert torch.equal(outputs(compiled, inputs), seen[name])
    assert backend.graphs == len(seen) + 1


def test_a_static_model_follows_setups_and_merging():
    torch.manual_seed(0)
    model = init(AutoModel.from_config(shallow("bert")).eval())
    model.add_adapter("a", "lora")
    stir(model, "a")
    inputs, backend = tiny_inputs("bert"), Counting()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    with AdapterSetup("a"):
        adapted = outputs(compiled, inputs)
        assert torch.equal(adapted, outputs(model, inputs))
    base = outputs(compiled, inputs)
    assert torch.equal(base, outputs(model, inputs))
    assert not torch.equal(base, adapted)
    model.merge_adapter("a")
    torch.testing.assert_close(outputs(compiled, inputs), adapted, rtol=1e-4, atol=1e-5)
    model.reset_adapter()
    assert torch.equal(outputs(compiled, inputs), base)
    assert backend.graphs == 2


@pytest.mark.long
def test_other_batch_sizes_compile_as_often_as_without_adapters():
    counts = []
    for configs in ({}, one_of_each()):
        model = with_adapters(**configs)
        model.set_active_adapters(list(configs))
        block, backend = model.bert.encoder.layer[0], Counting()
        torch._dynamo.reset()
        compiled = torch.compile(block, fullgraph=True, backend=backend)
        for batch in (2, 3, 5, 8):
            x = torch.randn(batch, 7, 32)
            with torch.no_grad(), recorded_call(model.bert, (), model._active, "", (), {}):
                torch.testing.assert_close(compiled(x), block(x), rtol=1e-5, atol=1e-5)
        counts.append(backend.graphs)
    assert counts == [2, 2]


def test_fused_experts_compile():
    targets = "selfattn_lora=False,intermediate_lora=True,output_lora=True"
    methods = ["lora", "dora", "boft"]
    model = with_adapters("mixtral", **{name: f"{name}[{targets}]" for name in methods})
    # the plain model's loop over experts does not compile in one graph either
    model.config._experts_implementation = "batched_mm"
    model.train_adapter(methods)
    block, x, backend = model.base_model.layers[0].mlp, torch.randn(2, 7, 32), Counting()
    compiled = torch.compile(block, fullgraph=True, backend=backend)
    seen = []
    for seed in (1, 2):
        stir(model, "dora", seed)
        seen.append(gradients(block, block, x))
        assert any(of_adapter(name, "dora") for name in seen[-1])
        same(gradients(block, compiled, x), seen[-1], rtol=1e-5, atol=1e-5)
    assert not torch.equal(seen[0]["output"], seen[1]["output"])
    assert backend.graphs == 1
    assert not model._active.call.reads


# half a minute; the quick part compiles all methods at once by aot_eager
@pytest.mark.sweep
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_gives_the_eager_gradients_for_all_methods_at_once():
    # (IA)³ sits there from its intermediate_lora on
    at_output = {"selfattn_lora": False, "output_lora": True}
    configs = {
        name: config.replace(**at_output)
        if "output_lora" in dir(config) and name != "ia3"
        else config
        for name, config in one_of_each().items()
    }
    model = with_adapters(**configs)
    model.train_adapter(list(configs))
    model.eval()
    # nearly all of them sit here; a whole model takes a minute to compile
    part = model.bert.encoder.layer[0].output
    inputs = torch.randn(2, 7, 64), torch.randn(2, 7, 32)
    expected = gradients(part, part, *inputs)
    # reft sits at the output of the whole block, prefixes at the attention, the others before it
    elsewhere = {"reft", "prefix_tuning", "prompt_tuning", "trainable_tokens"}
    for name in configs.keys() - elsewhere:
        assert any(of_adapter(key, name) for key in expected), name
    compiled = torch.compile(part, fullgraph=True, backend="inductor")
    same(gradients(part, compiled, *inputs), expected, rtol=1e-3, atol=1e-4)
