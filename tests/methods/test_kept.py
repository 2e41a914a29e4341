"""Values computed from weights live for one call; `cached_adapters` and `generate` keep them."""

import copy
import threading
from unittest import mock

import pytest
import torch
from families import first_output, tiny_inputs
from made import made
from torch import nn
from transformers import LlamaForCausalLM

from adapterzoo.errors import StateError

METHODS = [
    "dora",
    "dora[convention='adapterhub']",
    "dvora[r=4]",
    "boft",
    "boft[boft_n_butterfly_factor=2]",
    "oft[oft_block_size=4]",
]


def adapted(method, family="bert"):
    model = made(family, torch.float32, a=method)
    model.set_active_adapters("a")
    return model


def parameters_of(model):
    return [p for _, m in model.adapter_modules("a") for p in m.parameters()]


@torch.no_grad()
def is_right(model, family="bert"):
    """The output, which is that of a copy."""
    found = first_output(model(**tiny_inputs(family)))
    # a copy has modules of its own, for which nothing is kept
    fresh = first_output(copy.deepcopy(model)(**tiny_inputs(family)))
    assert torch.equal(found, fresh)
    return found.clone()


@pytest.fixture(params=METHODS)
def model(request):
    return adapted(request.param)


@pytest.fixture
def computed(monkeypatch):
    """How often a norm or a rotation is computed."""
    seen = []
    for name in ("solve_ex", "vector_norm"):
        plain = getattr(torch.linalg, name)
        monkeypatch.setattr(
            torch.linalg, name, lambda *a, f=plain, **k: seen.append(1) or f(*a, **k)
        )
    return seen


def layer_of(model):
    path, _ = next(iter(model.adapter_modules("a")))
    return model.base_model.get_submodule(path)


def larger(model):
    """Another weight for the layer."""
    return nn.Parameter(layer_of(model).weight.detach() * 1.5)


def moved_a_little(model):
    with torch.no_grad():
        torch._foreach_add_(parameters_of(model), 0.1)


def load_state_dict(model, swap=False, times=1, **how):
    for _ in range(times):
        state = {k: v + 0.1 for k, v in model.state_dict().items() if v.is_floating_point()}
        swaps = "torch.__future__.get_swap_module_params_on_conversion"
        with mock.patch(swaps, return_value=swap):
            model.load_state_dict(state, strict=False, **how)


def a_step(model, **kind):
    """A step of AdamW in evaluation mode."""
    trained = parameters_of(model)
    for parameter in trained:
        parameter.requires_grad_(True)
    optimizer = torch.optim.AdamW(trained, 0.1, **kind)
    first_output(model(**tiny_inputs("bert")))[..., 0].sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def base_edit(model):
    with torch.no_grad():
        layer_of(model).weight[0].mul_(3.0)


def moved(model):
    layer = layer_of(model)
    state = {k: v.clone() for k, v in layer.state_dict().items()}
    layer.to("meta").to_empty(device="cpu")
    layer.load_state_dict({k: v * 1.1 for k, v in state.items()})


TRACKED = {
    "plain step": lambda m: a_step(m, foreach=False),
    "foreach step": lambda m: a_step(m, foreach=True),
    "moved a little": moved_a_little,
    "load_state_dict": load_state_dict,
    "load_state_dict, assigned": lambda m: load_state_dict(m, assign=True),
    # freed memory comes back under the address it had
    "load_state_dict, assigned twice": lambda m: load_state_dict(m, times=2, assign=True),
    "load_state_dict, swapped": lambda m: load_state_dict(m, swap=True),
    "swapped": lambda m: torch.utils.swap_tensors(layer_of(m).weight, larger(m)),
    "base edit": base_edit,
    "base edit below a detached": lambda m: layer_of(m).weight.detach()[0].mul_(3.0),
    "base replaced": lambda m: setattr(layer_of(m), "weight", larger(m)),
    "base replaced by data": lambda m: setattr(layer_of(m).weight, "data", larger(m).data),
    # the same memory, read by columns
    "base turned": lambda m: setattr(layer_of(m).weight, "data", layer_of(m).weight.data.mT),
    "cast there and back": lambda m: m.to(torch.bfloat16).to(torch.float32),
    "halved": lambda m: m.half(),
    "moved": moved,
}


@pytest.mark.parametrize("change", TRACKED.values(), ids=TRACKED)
def test_tracked_changes_drop_what_a_block_keeps(model, change):
    with model.cached_adapters():
        before = is_right(model)
        change(model)
        assert not torch.equal(before, is_right(model))


def data_copied(model):
    for p in parameters_of(model):
        p.data.copy_(p.data * 1.5)


def written_by_numpy(model):
    for p in parameters_of(model):
        p.detach().numpy()[...] *= 1.5


UNTRACKED = {
    "data": data_copied,
    "numpy": written_by_numpy,
    "fused step": lambda m: a_step(m, fused=True),
    "data of the base": lambda m: layer_of(m).weight.data[0].mul_(3.0),
}


@pytest.mark.parametrize("change", UNTRACKED.values(), ids=UNTRACKED)
def test_untracked_writes_are_seen_outside_of_a_block(model, change):
    before = is_right(model)
    change(model)
    assert not torch.equal(before, is_right(model))


def test_a_block_computes_once(model, computed):
    with torch.no_grad():
        expected = model(**tiny_inputs("bert"))[0]
        with model.cached_adapters():
            first = model(**tiny_inputs("bert"))[0]
            count = len(computed)
            with model.cached_adapters():
                second = model(**tiny_inputs("bert"))[0]
            third = model(**tiny_inputs("bert"))[0]
            assert len(computed) == count
    assert all(torch.equal(expected, found) for found in (first, second, third))


def test_rows_of_a_batch_are_kept_too(computed):
    model = made("bert", torch.float32, a="boft", b="boft")
    with torch.no_grad(), model.cached_adapters():
        names = ["a", "b"]
        first = model(**tiny_inputs("bert", 2), adapter_names=names)[0]
        count = len(computed)
        assert torch.equal(model(**tiny_inputs("bert", 2), adapter_names=names)[0], first)
    assert len(computed) == count > 0


def test_training_in_a_block_raises(model):
    model.train()
    with pytest.raises(StateError, match=r"Write model\.eval\(\)"), model.cached_adapters():
        pass
    model.eval()
    with model.cached_adapters():
        model.train()
        with pytest.raises(StateError, match=r"Write model\.eval\(\)"):
            model(**tiny_inputs("bert"))
    # the block leaves nothing behind
    assert not model._forward_pre_hooks
    model(**tiny_inputs("bert"))


def test_gradients_flow_in_a_block(model):
    trained = parameters_of(model)
    for parameter in trained:
        parameter.requires_grad_(True)

    def gradients():
        return torch.autograd.grad(
            model(**tiny_inputs("bert"))[0].sum(), trained, allow_unused=True
        )

    expected = gradients()
    with model.cached_adapters():
        is_right(model)
        for found in (gradients(), gradients()):
            for one, other in zip(found, expected, strict=True):
                assert (one is None) == (other is None)
                assert one is None or torch.equal(one, other)


def test_values_of_inference_mode_serve_no_gradients(model):
    inputs = tiny_inputs("bert")
    for parameter in parameters_of(model):
        parameter.requires_grad_(False)
    with model.cached_adapters():
        with torch.inference_mode():
            model(**inputs)
        embedded = model.get_input_embeddings()(inputs.pop("input_ids")).detach().requires_grad_()
        model(**inputs, inputs_embeds=embedded)[0].sum().backward()
    assert embedded.grad is not None


def test_a_block_holds_for_its_thread(model, computed):
    counts = []

    def run():
        with torch.no_grad():
            for _ in range(2):
                model(**tiny_inputs("bert"))
                counts.append(len(computed))

    with model.cached_adapters(), torch.no_grad():
        model(**tiny_inputs("bert"))
        computed.clear()
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert counts[1] == 2 * counts[0]


@pytest.mark.parametrize("method", ["dora", "boft"])
def test_generate_keeps_values_for_its_run(method, computed):
    model = made("llama", torch.float32, auto=_Causal, a=method)
    model.set_active_adapters("a")
    ids = torch.tensor([[1, 5, 9]])
    computed.clear()
    model(ids)
    one = len(computed)
    computed.clear()
    model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert len(computed) == one
    model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert len(computed) == 2 * one


class _Causal:
    from_config = LlamaForCausalLM


def test_compiled_code_follows_the_weights():
    model = adapted("dora")
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad(), model.cached_adapters():
        for _ in range(2):
            expected = first_output(model(**tiny_inputs("bert")))
            torch.testing.assert_close(first_output(compiled(**tiny_inputs("bert"))), expected)
            moved_a_little(model)
