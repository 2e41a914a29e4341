"""What is true of DoRA alone; what every method must do is in test_conformance.py."""

import copy
from typing import Any

import peft
import pytest
import torch
from families import first_output, tiny_config, tiny_inputs
from rounded import rounding
from snapshots import output, refused, same_bits
from torch import Tensor
from torch.nn.functional import linear
from transformers import AutoModel

import adapterzoo
from adapterzoo import DoRAConfig, Stack
from adapterzoo.composition.compile import evaluate
from adapterzoo.errors import ConfigError
from adapterzoo.inject.adapted import adapters_of, base_of
from adapterzoo.kernels import use
from adapterzoo.methods.low_rank import dora
from adapterzoo.testing import report

CONVENTIONS = ("paper", "adapterhub")
ALL = {"target_modules": "all-linear", "r": 4, "alpha": 12}
HALVES = (torch.float16, torch.bfloat16)


def stir(model, name, seed=1):
    """Move all values of an adapter: magnitudes by a few percent, factors off zero."""
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, module in model.adapter_modules(name):
            for parameter in module.parameters():
                noise = torch.randn(parameter.shape, generator=source).to(parameter)
                parameter.add_(0.1 * noise)


def with_biases(model):
    """The model with biases that are not the zeros of a fresh one."""
    source = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=source))
    return model


def adapted(tiny, family, config, dtype=torch.float32):
    model = with_biases(tiny(family)).to(dtype)
    model.add_adapter("a", config)
    stir(model, "a")
    return model


def first_of(model):
    """The first adapted layer and its adapter."""
    path, module = next(iter(model.adapter_modules("a")))
    return model.base_model.get_submodule(path), module


def explicit(x, w, bias, module, convention):
    """The formula of the convention, written out with a dense B A, in the dtype of its inputs."""
    delta = module.lora_B.to(w.dtype) @ module.lora_A.to(w.dtype)
    direction = w + module.scaling * delta
    if convention == "adapterhub":
        gain = module.m.to(w.dtype) / torch.linalg.norm(w + delta, dim=-1)
        return gain * linear(x, direction, bias)
    gain = module.m.to(w.dtype) / torch.linalg.norm(direction, dim=-1).detach()
    y = gain * linear(x, direction)
    return y if bias is None else y + bias


# --- the formula ---


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("bias", [True, False])
def test_outputs_and_gradients_are_those_of_the_formula(tiny, convention, bias):
    config = DoRAConfig(convention=convention, **ALL)
    layer, module = first_of(adapted(tiny, "bert" if bias else "llama", config, torch.float64))
    module.requires_grad_(True)
    assert (layer.bias is not None) == bias
    x = torch.randn(2, 5, layer.weight.shape[1], dtype=torch.float64, requires_grad=True)
    weights = torch.randn(2, 5, layer.weight.shape[0], dtype=torch.float64)
    wanted = [x, module.lora_A, module.lora_B, module.m]
    y = module(x, base_of(layer))
    expected = explicit(x, layer.weight, layer.bias, module, convention)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    assert (y - linear(x, layer.weight, layer.bias)).abs().max() > 0.01
    (other,) = set(CONVENTIONS) - {convention}
    assert (y - explicit(x, layer.weight, layer.bias, module, other)).abs().max() > 1e-3
    ours = torch.autograd.grad((y * weights).sum(), wanted)
    theirs = torch.autograd.grad((expected * weights).sum(), wanted)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_the_norm_of_the_paper_gets_no_gradient(tiny):
    layer, module = first_of(adapted(tiny, "bert", DoRAConfig(**ALL), torch.float64))
    module.requires_grad_(True)
    x = torch.randn(3, layer.weight.shape[1], dtype=torch.float64)
    direction = layer.weight + module.scaling * module.lora_B @ module.lora_A
    gain = module.m / torch.linalg.norm(direction, dim=-1)
    factors = [module.lora_A, module.lora_B]
    ours = torch.autograd.grad(module(x, base_of(layer)).square().sum(), factors)
    flowing = (gain * linear(x, direction) + layer.bias).square().sum()
    for one, other in zip(ours, torch.autograd.grad(flowing, factors), strict=True):
        assert (one - other).abs().max() > 0.01 * other.abs().max()


def test_dropout_touches_the_low_rank_path_alone(tiny):
    config = DoRAConfig(dropout=0.5, **ALL)
    layer, module = first_of(adapted(tiny, "bert", config, torch.float64).train())
    x = torch.randn(4, layer.weight.shape[1], dtype=torch.float64)
    calls: list[Tensor] = []

    def run(x):
        calls.append(x)
        return linear(x, layer.weight, layer.bias)

    base = type(base_of(layer))(layer, run)
    torch.manual_seed(3)
    # the definition draws the numbers that torch's dropout draws
    with use("reference"):
        y = module(x, base)
    assert len(calls) == 1
    assert calls[0] is x
    torch.manual_seed(3)
    dropped = torch.nn.functional.dropout(x, 0.5)
    update = module.scaling * module.lora_B @ module.lora_A
    gain = module.m / torch.linalg.norm(layer.weight + update, dim=-1)
    expected = gain * (x @ layer.weight.T + dropped @ update.T) + layer.bias
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    assert not torch.equal(dropped, x)


# --- birth ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALVES])
@pytest.mark.parametrize("family", ["bert", "gpt2", "mixtral", "t5"])
def test_magnitudes_are_born_as_the_norms_of_the_rows(tiny, family, dtype):
    model = with_biases(tiny(family)).to(dtype)
    base = output(model)
    # of the fused layers, gpt2's has rows without an adapter; experts keep one under its own name
    fields = {"intermediate_lora": family != "mixtral", "output_lora": True}
    model.add_adapter("a", DoRAConfig(attn_matrices="vq", **fields))
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    checked = 0
    for path, module in model.adapter_modules("a"):
        layer = model.base_model.get_submodule(path)
        weight = layer.down_proj if "down_proj" in module._modules else layer.weight
        norms = weight.double().norm(dim=0 if "Conv1D" in str(layer) else -1)
        parts = {name: m for name, m in module.named_modules() if "m" in m._parameters}
        rows = {"query": slice(32), "value": slice(64, 96)}
        for name, part in parts.items():
            assert part.m.dtype is wide
            truth = norms[rows.get(name, slice(None))]
            # of squares, whose sizes are their sum; the truth in float64 is rounded, too
            limit = rounding(2 * weight.shape[-1], wide)
            torch.testing.assert_close(part.m.double(), truth, rtol=limit, atol=0)
            checked += 1
    assert checked >= 8 or family == "mixtral"
    model.set_active_adapters("a")
    assert torch.equal(output(model), base)


def test_a_second_adapter_is_born_from_the_untouched_layer(tiny):
    model = adapted(tiny, "bert", DoRAConfig(**ALL))
    model.set_active_adapters("a")
    model.add_adapter("b", DoRAConfig(**ALL))
    for path, module in model.adapter_modules("b"):
        weight = model.base_model.get_submodule(path).weight
        torch.testing.assert_close(module.m, weight.norm(dim=1), rtol=1e-6, atol=0)


def test_offloaded_layers_give_their_norms(tmp_path):
    torch.manual_seed(0)
    AutoModel.from_config(tiny_config("llama")).save_pretrained(tmp_path)
    places = {
        "embed_tokens": "cpu", "layers.0": "cpu", "layers.1": "disk", "norm": "cpu",
        "rotary_emb": "cpu",
    }  # fmt: skip
    whole = adapterzoo.init(AutoModel.from_pretrained(tmp_path))
    spread = adapterzoo.init(
        AutoModel.from_pretrained(tmp_path, device_map=places, offload_folder=tmp_path / "off")
    )
    assert spread.layers[1].self_attn.q_proj.weight.is_meta
    for model in (whole, spread):
        torch.manual_seed(1)
        model.add_adapter("a", "dora")
    assert spread.layers[1].self_attn.q_proj.weight.is_meta
    for (_, one), (_, other) in zip(
        whole.adapter_modules("a"), spread.adapter_modules("a"), strict=True
    ):
        assert torch.equal(one.m, other.m)
    spread.set_active_adapters("a")
    assert torch.equal(output(spread), output(whole))


# --- numbers that are hard ---


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_a_row_of_zeros_is_the_identity_forward_and_backward(tiny, convention, dtype):
    model = with_biases(tiny("bert")).to(dtype)
    layer = model.base_model.encoder.layer[0].attention.self.query
    with torch.no_grad():
        layer.weight[3].zero_()
    model.add_adapter("a", DoRAConfig(convention=convention))
    model.train_adapter("a")
    module = adapters_of(layer)["a"]
    x = torch.randn(2, 5, 32, dtype=dtype, requires_grad=True)
    leaves = [x, module.lora_A, module.lora_B, module.m]
    y = module(x, base_of(layer))
    assert torch.equal(y, linear(x, layer.weight, layer.bias))
    grads = torch.autograd.grad(y.float().square().sum(), leaves)
    assert all(bool(g.isfinite().all()) for g in grads)
    assert grads[-1][3] == 0
    with torch.no_grad():
        merged = module.merged_weight(layer.weight.to(torch.float32), base_of(layer))
        assert torch.equal(merged, layer.weight.float())
        # and it can be trained: B moves, and the next steps stay finite
        module.lora_B.add_(0.1)
    y = module(x, base_of(layer))
    grads = torch.autograd.grad(y.float().square().sum(), leaves)
    assert all(bool(t.isfinite().all()) for t in (y, *grads))


@pytest.mark.parametrize("left", [1e-2, 1e-4])
def test_a_weight_that_the_update_cancels_keeps_its_digits(tiny, left):
    model = tiny("bert")
    model.add_adapter("a", DoRAConfig(r=4))
    layer, module = first_of(model)
    with torch.no_grad():
        module.lora_B.normal_()
        update = module.scaling * module.lora_B.double() @ module.lora_A.double()
        layer.weight.copy_(left * layer.weight.double() - update)
        x = torch.randn(8, 32)
        y = module(x, base_of(layer)).double()
    exact, wide = copy.deepcopy(module).double(), layer.weight.detach().double()
    truth = explicit(x.double(), wide, layer.bias.double(), exact, "paper").detach()
    # W x and s B A x cancel too: their rounding is what remains, blown up by g
    gain = exact.m / torch.linalg.norm(wide + update, dim=1)
    ulps = 16 * torch.finfo(torch.float32).eps
    size = wide.norm(dim=1) * x.double().norm(dim=1, keepdim=True)
    assert bool(((y - truth).abs() <= ulps * (gain * size + 1)).all())


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("adapter_dtype", [None, "float32"])
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_half_precision_rounds_the_output_once(tiny, dtype, adapter_dtype, convention):
    config = DoRAConfig(dtype=adapter_dtype, convention=convention, **ALL)
    layer, module = first_of(adapted(tiny, "bert", config, dtype))
    x = torch.randn(6, layer.weight.shape[1]).to(dtype)
    with torch.no_grad():
        y = module(x, base_of(layer))
        wide = (t.double() for t in (x, layer.weight, layer.bias))
        truth = explicit(*wide, copy.deepcopy(module).double(), convention)
    assert y.dtype is dtype
    # base output, the two products of the update, and the result: four roundings
    near = 4 * torch.finfo(dtype).eps * truth.abs().max().item()
    torch.testing.assert_close(y.double(), truth, rtol=0, atol=near)


def test_autocast_leaves_the_gain_in_float32(tiny):
    layer, module = first_of(adapted(tiny, "bert", DoRAConfig(**ALL)))
    expected = module.gain(base_of(layer))
    with torch.autocast("cpu", torch.bfloat16):
        gain = module.gain(base_of(layer))
        y = module(torch.randn(2, layer.weight.shape[1]), base_of(layer))
        merged = module.merged_weight(layer.weight, base_of(layer))
    assert torch.equal(gain, expected)
    assert y.dtype is torch.bfloat16
    assert torch.equal(merged, module.merged_weight(layer.weight, base_of(layer)))


# --- merging and stacks ---


@pytest.mark.parametrize("family", ["bert", "gpt2", "gpt_neox", "mixtral", "t5"])
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_rows_of_the_merged_weight_have_the_magnitudes(tiny, family, convention):
    # s = 1: the norm of both conventions is that of the merged direction
    config = DoRAConfig(convention=convention, attn_matrices="qkv", output_lora=True, alpha=8, r=8)
    model = adapted(tiny, family, config)
    model.merge_adapter("a")
    for path, module in model.adapter_modules("a"):
        layer = model.base_model.get_submodule(path)
        # experts keep their weight under the name that their adapters have
        weights = [p for n, p in layer.named_parameters(recurse=False) if n in module._modules]
        weight = weights[0] if weights else layer.weight
        norms = weight.norm(dim=0 if "Conv1D" in str(layer) else -1)
        magnitudes = [m.m.abs().flatten() for m in module.modules() if "m" in m._parameters]
        if "m" not in module._parameters:
            # the parts of a fused layer share its rows out among them: none is left
            norms = norms.flatten().sort().values
            magnitudes = [torch.cat(magnitudes).sort().values]
        torch.testing.assert_close(norms, magnitudes[0], rtol=1e-5, atol=1e-6)


# bert in every dtype is in the conformance suite, with the convention of the paper
@pytest.mark.parametrize(
    ("family", "convention", "dtype"),
    [
        *[("bert", "adapterhub", dtype) for dtype in (torch.float32, torch.float64, *HALVES)],
        ("gpt2", "adapterhub", torch.bfloat16),
        ("gemma3_text", "paper", torch.float32),
        ("gemma3_text", "adapterhub", torch.bfloat16),
        ("mixtral", "paper", torch.float16),
        ("mixtral", "adapterhub", torch.float32),
    ],
)
def test_merged_is_unmerged(tiny, family, convention, dtype):
    targets: dict[str, Any] = {"intermediate_lora": True, "output_lora": True}
    if family == "gemma3_text":
        # an embedding that multiplies its output
        targets = {"target_modules": ("embed_tokens",)}
    model = adapted(tiny, family, DoRAConfig(convention=convention, alpha=12, **targets), dtype)
    base = output(model)
    model.set_active_adapters("a")
    unmerged = output(model)
    truth = output(copy.deepcopy(model).double(), **doubled(model))
    model.merge_adapter("a")
    merged = output(model)
    eps = 8 * torch.finfo(dtype).eps * max(1.0, truth.abs().max().item())
    error = (merged.double() - truth).abs().max()
    assert error <= 2 * (unmerged.double() - truth).abs().max() + eps
    assert (truth - base.double()).abs().max() > 1e-3
    model.reset_adapter()
    model.set_active_adapters(None)
    assert same_bits(output(model), base)


def doubled(model):
    inputs = tiny_inputs(model.config.model_type)
    return {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("family", ["bert", "gpt2", "mixtral"])
def test_a_stack_adds_changes_of_the_original_weight(tiny, family, convention):
    config = DoRAConfig(convention=convention, intermediate_lora=True, alpha=12)
    model = adapted(tiny, family, config, torch.float64)
    model.add_adapter("b", config.replace(r=2))
    stir(model, "b", seed=7)
    for path, module in model.adapter_modules("a"):
        layer = model.base_model.get_submodule(path)
        if "m" not in module._parameters:
            continue
        base = base_of(layer)
        x = torch.randn(3, module.lora_A.shape[1], dtype=torch.float64)
        plain = base.original(x)
        pair = [adapters_of(layer)[name] for name in ("a", "b")]
        alone = [adapter(x, base_of(layer)) - plain for adapter in pair]
        both = evaluate((0, 1), pair, x, base)
        torch.testing.assert_close(both, plain + alone[0] + alone[1], rtol=1e-12, atol=1e-12)
    model.set_active_adapters(Stack("a", "b"))
    stacked = output(model, **doubled(model))
    model.set_active_adapters(Stack("b", "a"))
    torch.testing.assert_close(output(model, **doubled(model)), stacked, rtol=1e-10, atol=1e-10)
    model.set_active_adapters(None)
    model.merge_adapter("b")
    model.merge_adapter("a")
    torch.testing.assert_close(output(model, **doubled(model)), stacked, rtol=1e-9, atol=1e-9)


# --- the peer beside it ---


PEFT_TARGETS: dict[str, Any] = {
    "bert": r".*\.layer\.\d+\..*(query|value|dense)",
    "llama": ["q_proj", "v_proj", "up_proj", "down_proj"],
    "t5": ["q", "v", "wi", "wo"],
}


@pytest.mark.parametrize("family", PEFT_TARGETS)
def test_outputs_and_gradients_equal_pefts(family):
    torch.manual_seed(0)
    base = with_biases(AutoModel.from_config(tiny_config(family)).eval())
    ours = adapterzoo.init(copy.deepcopy(base))
    targets = PEFT_TARGETS[family]
    ours.add_adapter("a", DoRAConfig(target_modules=targets, r=4, alpha=12))
    config = peft.LoraConfig(use_dora=True, r=4, lora_alpha=12, target_modules=targets)
    theirs = peft.get_peft_model(copy.deepcopy(base), config)
    named = dict(theirs.named_parameters())
    keys = {
        "lora_A": "lora_A.default.weight",
        "lora_B": "lora_B.default.weight",
        "m": "lora_magnitude_vector.default.weight",
    }
    pairs: list[tuple[Tensor, Tensor]] = [
        (module.get_parameter(own), named.pop(f"base_model.model.{path}.{key}"))
        for path, module in ours.adapter_modules("a")
        for own, key in keys.items()
    ]
    assert not [n for n in named if "lora" in n]
    torch.testing.assert_close(*zip(*[p for p in pairs if p[0].dim() == 1], strict=True))
    source = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for mine, other in pairs:
            mine.add_(0.1 * torch.randn(mine.shape, generator=source))
            other.copy_(mine)
    ours.train_adapter("a")
    y, z, plain = (
        first_output(net.double().eval()(**tiny_inputs(family))) for net in (ours, theirs, base)
    )
    torch.testing.assert_close(y, z, rtol=0, atol=1e-10)
    assert (y - plain).abs().max() > 0.01
    weights = torch.randn(y.shape, generator=source) / y.numel() ** 0.5
    (y * weights).sum().backward()
    (z * weights).sum().backward()
    for mine, other in pairs:
        assert mine.grad.count_nonzero()
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-8, atol=1e-10)


# --- the config ---


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("dora[convention='peft']", ["convention='peft'", "'adapterhub'", "convention='paper'"]),
        ("dora[dropout=0.5,target_modules=['word_embeddings']]",
         ["DoRAConfig(dropout=0.5)", "dropout=0.0"]),
    ],
)  # fmt: skip
def test_what_is_not_legal_is_refused(tiny, config, says):
    model = tiny("bert")
    with refused(model, ConfigError, *says):
        model.add_adapter("a", config)


class SaysTooMuch(DoRAConfig):
    """A norm that is held constant, under a config that says nothing of it."""

    gradients_are_exact = True


class SaysTooLittle(DoRAConfig):
    """All gradients are right, and the config says that some are not."""

    gradients_are_exact = False


@pytest.mark.long
def test_what_the_config_says_of_gradients_is_checked():
    (failure, *_) = report(SaysTooMuch(), only=["gradcheck"], kinds=["linear"])
    assert "differ from central differences" in failure.message
    little = SaysTooLittle(convention="adapterhub")
    (failure, *_) = report(little, only=["gradcheck"], kinds=["linear"])
    assert "gradients_are_exact is False" in failure.message


def test_a_part_of_a_fused_layer_is_composed_as_a_layer_of_its_own(tiny, monkeypatch):
    model = tiny("gpt2")
    model.add_adapter("a", "dora", set_active=True)
    seen = []
    monkeypatch.setattr(dora, "compose", lambda y, *rest: seen.append(y) or y)
    model.bfloat16()(**tiny_inputs("gpt2"))
    # the wide detour is for what earlier adapters have changed
    assert seen
    assert {y.dtype for y in seen} == {torch.bfloat16}
