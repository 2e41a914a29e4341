"""What is kept in evaluation is never stale: DoRA's gain and BOFT's rotation against fresh ones."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
from families import first_output, tiny_config, tiny_inputs
from snapshots import stir
from torch import nn
from transformers import AutoModel

from adapterzoo import init
from adapterzoo.kernels import use
from adapterzoo.methods._kept import Kept

METHODS = ["dora", "dora[convention='adapterhub']", "boft", "boft[boft_n_butterfly_factor=2]"]


def adapted(method, family="bert"):
    torch.manual_seed(0)
    model = init(AutoModel.from_config(tiny_config(family)).eval())
    model.add_adapter("a", method)
    model.set_active_adapters("a")
    stir(model, "a")
    return model


def kept(model):
    return [m for m in model.modules() if isinstance(m, Kept)]


def filled(model):
    return [m for m in kept(model) if m.value is not None]


@torch.no_grad()
def outputs(model, family="bert"):
    """The output, and that of the same weights with nothing kept."""
    inputs = tiny_inputs(family)
    found = first_output(model(**inputs)).clone()
    fresh = copy.deepcopy(model)
    assert not filled(fresh)
    return found, first_output(fresh(**inputs))


def is_right(model):
    found, fresh = outputs(model)
    assert torch.equal(found, fresh)
    return found


@pytest.fixture(params=METHODS)
def model(request):
    model = adapted(request.param)
    is_right(model)
    assert len(filled(model)) == len(kept(model)) > 0
    return model


def layer_of(model):
    path, _ = next(iter(model.adapter_modules("a")))
    return model.base_model.get_submodule(path)


def test_the_second_call_computes_nothing_anew(model, monkeypatch):
    # whatever is computed costs a solve or a norm
    for name in ("solve_ex", "vector_norm"):
        monkeypatch.setattr(torch.linalg, name, lambda *_, **__: pytest.fail("computed again"))
    with torch.no_grad():
        model(**tiny_inputs("bert"))
    with torch.inference_mode():
        model(**tiny_inputs("bert"))


def optimizer_step(model):
    model.train_adapter("a")
    model.eval()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 1.0)
    first_output(model(**tiny_inputs("bert")))[..., 0].sum().backward()
    optimizer.step()


def fused_steps(model):
    # the default of transformers' trainer; fused optimizers write without a new version
    model.train_adapter("a")
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, 0.1, fused=True)
    first_output(model(**tiny_inputs("bert")))[..., 0].sum().backward()
    optimizer.step()
    model.eval()


def fused_step_in_evaluation_mode(model):
    model.train_adapter("a")
    model.eval()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, 0.1, fused=True)
    loss = first_output(model(**tiny_inputs("bert")))[..., 0].sum()
    # a look at the model between a forward and its step
    outputs(model)
    loss.backward()
    outputs(model)
    optimizer.step()
    optimizer.zero_grad()


def foreach_step(model):
    parameters = [p for _, m in model.adapter_modules("a") for p in m.parameters()]
    with torch.no_grad():
        torch._foreach_add_(parameters, 0.1)


def load_state_dict(model):
    state = {k: v + 0.1 for k, v in model.state_dict().items() if v.is_floating_point()}
    model.load_state_dict(state, strict=False)


def assign_state_dict(model):
    state = {k: v + 0.1 for k, v in model.state_dict().items() if v.is_floating_point()}
    model.load_state_dict(state, strict=False, assign=True)


def base_edit(model):
    with torch.no_grad():
        layer_of(model).weight[0].mul_(3.0)


def base_replaced(model):
    layer = layer_of(model)
    layer.weight = nn.Parameter(layer.weight.detach() * 1.5)


def base_replaced_by_data(model):
    layer = layer_of(model)
    layer.weight.data = layer.weight.detach() * 1.5


def cast_there_and_back(model):
    model.to(torch.bfloat16).to(torch.float32)


def moved(model):
    layer = layer_of(model)
    state = {k: v.clone() for k, v in layer.state_dict().items()}
    layer.to("meta").to_empty(device="cpu")
    layer.load_state_dict({k: v * 1.1 for k, v in state.items()})


def scaled_below_autograd(model):
    with torch.inference_mode():
        for _, module in model.adapter_modules("a"):
            for parameter in module.parameters():
                parameter.mul_(1.5)


CHANGES = [
    fused_steps,
    fused_step_in_evaluation_mode,
    optimizer_step,
    foreach_step,
    load_state_dict,
    assign_state_dict,
    base_edit,
    base_replaced,
    base_replaced_by_data,
    cast_there_and_back,
    moved,
    scaled_below_autograd,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_every_change_is_seen(model, change):
    before = is_right(model)
    change(model)
    after = is_right(model)
    assert not torch.equal(before, after)


def test_a_changed_scaling_is_seen():
    model = adapted("dora")
    before = is_right(model)
    for _, module in model.adapter_modules("a"):
        module.scaling *= 3.0
    assert not torch.equal(is_right(model), before)


@torch.no_grad()
def test_parameters_that_torch_func_puts_in_place(model):
    layer = layer_of(model)
    x = torch.randn(3, layer.weight.shape[1])
    stacked = {name: torch.stack([p, p * 1.1]) for name, p in layer.named_parameters()}
    found = torch.func.vmap(lambda own: torch.func.functional_call(layer, own, (x,)))(stacked)
    torch.testing.assert_close(found[0], layer(x))
    torch._foreach_mul_(list(layer.parameters()), 1.1)
    torch.testing.assert_close(found[1], layer(x))


def test_requires_grad_and_modes_change_nothing(model):
    before = is_right(model)
    model.requires_grad_(False)
    assert torch.equal(is_right(model), before)
    model.requires_grad_(True)
    model.train().eval()
    assert torch.equal(is_right(model), before)


def test_merging_and_another_adapter_beside_it(model):
    before = is_right(model)
    model.add_adapter("b", "lora[init_weights='bert']")
    model.set_active_adapters(["a", "b"])
    is_right(model)
    model.set_active_adapters("b")
    model.merge_adapter("b")
    model.reset_adapter()
    model.set_active_adapters("a")
    assert torch.equal(is_right(model), before)


def test_gradients_flow_after_an_evaluation_in_inference_mode(model):
    with torch.inference_mode():
        model(**tiny_inputs("bert"))
    model.train_adapter("a")
    model.eval()
    y = first_output(model(**tiny_inputs("bert")))
    y[..., 0].sum().backward()
    for _, module in model.adapter_modules("a"):
        for name, parameter in module.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.count_nonzero(), name


def test_nothing_is_kept_in_training_or_with_gradients(model):
    fresh = copy.deepcopy(model)
    fresh(**tiny_inputs("bert"))
    assert not filled(fresh)
    with torch.no_grad():
        fresh.train()(**tiny_inputs("bert"))
    assert not filled(fresh)


def test_checkpoints_copies_and_pickles_do_not_have_it(model, tmp_path):
    assert not [k for k in model.state_dict() if "kept" in k]
    model.save_adapter(tmp_path, "a")
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not filled(other)
        assert torch.equal(is_right(other), is_right(model))


def test_compiled_code_follows_the_weights(model):
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for _ in range(3):
        with torch.no_grad():
            found = first_output(compiled(**tiny_inputs("bert")))
        torch.testing.assert_close(found, is_right(model), rtol=1e-5, atol=1e-5)
        foreach_step(model)


def test_threads_with_their_own_models_and_one_together(model):
    expected = is_right(model)
    wrong = []

    def run():
        for _ in range(5):
            with torch.no_grad():
                if not torch.equal(first_output(model(**tiny_inputs("bert"))), expected):
                    wrong.append(1)

    layer_of(model).weight.data = layer_of(model).weight.detach().clone()
    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("method", METHODS)
def test_views_of_other_layouts_and_fused_rows_are_followed(family, method):
    model = adapted(method, family)
    found, fresh = outputs(model, family)
    assert torch.equal(found, fresh)
    assert filled(model)
    base_edit(model)
    after, fresh = outputs(model, family)
    assert torch.equal(after, fresh)
    assert not torch.equal(after, found)


def test_the_definition_and_the_kept_agree(model):
    found = is_right(model)
    with use("reference"):
        torch.testing.assert_close(is_right(model), found, rtol=1e-5, atol=1e-5)
