"""Dtypes: every registered method in each of them, cast, mixed and under autocast, on the CPU.

How near is near: a model in a dtype is compared with its copy in float64, which holds the same
values. What the dtype costs the base model alone is the measure (the three-way tolerance): the
adapted model may be twice as far from its truth, and 8 roundings of the largest value. Gradients
of all parameters together may be 16 roundings off. Stored values are compared bit by bit.

Shown elsewhere: formulas of DoRA and BOFT, norms and Cayley transforms in each dtype (test_dora,
test_boft, kernels/), merging against a formula (test_merging, test_dora), heads and losses
(heads/), float64 down to the last digits (`gradcheck` of the conformance suite).
"""

import copy
import itertools
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from families import tiny_inputs
from snapshots import adapter_bits, of_adapter, refused, same_bits
from test_conformance import CONFIGS as REGISTERED
from torch import Tensor

from adapterzoo import BnConfig, BOFTConfig, ConfigUnion, ReftConfig
from adapterzoo.config import AdapterConfig
from adapterzoo.contracts import CopyAdapter, compute_dtype
from adapterzoo.errors import CheckpointError, StateError
from adapterzoo.inject.adapted import adapters_of
from adapterzoo.model.state import parameters_of, tensors_of
from adapterzoo.testing import cases

HALVES = (torch.float16, torch.bfloat16)
DTYPES = (*HALVES, torch.float32, torch.float64)
FAMILIES = ("bert", "gpt2")
LABELS = torch.tensor([0, 2])
Made = Callable[..., Any]


def smooth(config):
    """The config with a gradient everywhere, and without ReLU: rounding chooses its slope at 0."""
    if isinstance(config, ConfigUnion):
        return ConfigUnion(*map(smooth, config.configs))
    if isinstance(config, ReftConfig):
        # the head of a decoder reads the last token: elsewhere its last block has no gradient
        return config.replace(suffix_positions=1, tied_weights=True)
    return config.replace(non_linearity="gelu") if isinstance(config, BnConfig) else config


CONFIGS = {text: smooth(config) for text, config in REGISTERED.items()}
# what takes another path through the code; the others are tried in the sweep
QUICK = ("lora", "dora", "boft", "seq_bn", "par_bn", "loreft", "prefix_tuning", "ia3", "vera",
         "seq_bn_inv")  # fmt: skip


def swept(values, quick):
    """Values of parameters; those that are not quick are part of the sweep."""
    quick, marks = [*quick], pytest.mark.sweep
    each = ((v, v if isinstance(v, tuple) else (v,)) for v in values)
    return [pytest.param(*row, marks=() if v in quick else marks) for v, row in each]


every_method = pytest.mark.parametrize("text", swept(CONFIGS, QUICK))


@pytest.fixture(scope="module")
def hosts():
    return {}


@pytest.fixture
def base(tiny, hosts):
    """A tiny model of a family in a dtype, with a head; layers far from zero."""

    def make(family="bert", dtype=torch.float32):
        if (family, dtype) not in hosts:
            model = tiny(family)
            with torch.random.fork_rng(devices=()):
                torch.manual_seed(3)
                model.add_classification_head("a", num_labels=3)
            source = torch.Generator().manual_seed(2)
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if name.endswith("bias"):
                        parameter.copy_(0.3 * torch.randn(parameter.shape, generator=source))
                    elif parameter.dim() > 1:
                        parameter.mul_(20 if name.startswith("heads.") else 5)
            hosts[family, dtype] = model.to(dtype)
        return copy.deepcopy(hosts[family, dtype])

    return make


@pytest.fixture
def made(base):
    """The same with an active adapter that is not the identity."""

    def make(text, family="bert", dtype=torch.float32):
        model = base(family, dtype)
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(4)
            model.add_adapter("a", CONFIGS.get(text, text), set_active=True)
        moved(model)
        return model

    return make


@pytest.fixture
def default_dtype():
    before = torch.get_default_dtype()
    yield torch.set_default_dtype
    torch.set_default_dtype(before)


@torch.no_grad()
def moved(model, name="a"):
    source = torch.Generator().manual_seed(1)
    for parameter in parameters_of(model, name):
        noise = torch.randn(parameter.shape, generator=source, dtype=torch.float32)
        parameter.add_(0.1 * noise.to(parameter.dtype))


@torch.no_grad()
def outputs(model):
    """Hidden states and logits."""
    inputs = tiny_inputs(model.config.model_type)
    out = model(**inputs, output_hidden_states=True)
    return {"hidden": out.hidden_states[-1], "logits": out.logits}


def upcast(model):
    """The model with the same values in float64."""
    return copy.deepcopy(model).double()


def magnitudes(model):
    tensors = tensors_of(model, "a")
    return {k: t for k, t in tensors.items() if k.endswith(("/m", ".m"))}


def distance(one, other):
    return (one.double() - other.double()).abs().max().item()


def check_near(model, dtype, width=8):
    """The model's outputs have the dtype, are finite and as near to float64 as it allows.

    Returns:
        The outputs in float64.
    """
    exact = upcast(model)
    truth, found = outputs(exact), outputs(model)
    active = model.active_adapters
    for one in (model, exact):
        one.set_active_adapters(None)
    plain, of_plain = outputs(model), outputs(exact)
    model.set_active_adapters(active)
    for key, y in found.items():
        assert y.dtype is dtype, key
        assert y.isfinite().all(), key
        rounding = torch.finfo(dtype).eps * max(t.abs().max().item() for t in (y, plain[key]))
        error, allowed = distance(y, truth[key]), 2 * distance(plain[key], of_plain[key])
        assert error <= allowed + width * rounding, key
    return truth


def loss_of(model, training=False):
    """Of a model whose adapter and head are to be trained; without dropout, unless in training."""
    model.train_adapter("a")
    model.train(training)
    model.zero_grad()
    loss: Tensor = model(**tiny_inputs(model.config.model_type), labels=LABELS).loss
    return loss


def require_gradients(model):
    """Of all that is trained: finite and of its dtype."""
    found = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    for name, grad in found.items():
        assert grad is not None, name
        assert grad.dtype is model.get_parameter(name).dtype, name
        assert grad.isfinite().all(), name
    assert any(of_adapter(name) for name in found)
    return found


def gradients(model):
    """Of the adapter and the head, after a backward from the loss."""
    loss = loss_of(model)
    assert loss.dtype is compute_dtype(model.dtype)
    loss.backward()
    return require_gradients(model)


def check_gradients(model, dtype):
    found, exact = gradients(model), gradients(upcast(model))
    one, other = (torch.cat([g[k].double().flatten() for k in sorted(g)]) for g in (found, exact))
    assert other.norm() > 1e-3
    assert (one - other).norm() <= 16 * torch.finfo(dtype).eps * other.norm()


def check_step(model):
    """A step of AdamW moves all that is trained, and nothing else, by finite numbers."""
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        loss_of(model, training=True).backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    # the usual 1e-8 is zero in float16
    torch.optim.AdamW(trained, lr=0.05, eps=1e-4).step()
    model.zero_grad()
    model.eval()
    for name, parameter in model.named_parameters():
        assert parameter.dtype is before[name].dtype, name
        assert parameter.isfinite().all(), name
        assert same_bits(parameter, before[name]) != parameter.requires_grad, name


def check_dtypes(model, adapter_dtype, base_dtype):
    """As documented: parameters of adapters have their dtype, magnitudes are never a half."""
    for name, tensor in model.state_dict().items():
        expected = adapter_dtype if of_adapter(name) else base_dtype
        if of_adapter(name) and name.endswith(".m"):
            expected = compute_dtype(tensor.dtype)
        assert tensor.dtype is expected, name


def check_merge(model, dtype, truth):
    """Merged is as near to float64 as unmerged; a reset, or a refusal, leaves every bit."""
    before = {k: t.clone() for k, t in model.state_dict().items()}
    unmerged = outputs(model)
    try:
        model.merge_adapter("a")
    except StateError as error:
        assert "cannot be merged" in str(error)  # noqa: PT017  only some methods are refused
    else:
        merged = outputs(model)
        changed = [k for k, t in model.state_dict().items() if not same_bits(t, before[k])]
        assert changed
        for key, y in merged.items():
            assert y.dtype is dtype
            # float64 is its own truth, so its own error is none
            width = 32 if dtype is torch.float64 else 8
            near = width * torch.finfo(dtype).eps * truth[key].abs().max().item()
            assert distance(y, truth[key]) <= 2 * distance(unmerged[key], truth[key]) + near
        model.reset_adapter()
    after = model.state_dict()
    assert list(after) == list(before)
    assert not [k for k, t in after.items() if not same_bits(t, before[k])]
    for key, y in outputs(model).items():
        assert same_bits(y, unmerged[key])


def check_all(model, dtype):
    """Outputs, merging, gradients and a step."""
    check_merge(model, dtype, check_near(model, dtype))
    check_gradients(model, dtype)
    check_step(model)


def check_files(model, fresh, folder):
    """What is saved is loaded bit for bit, with its head."""
    model.save_adapter(folder, "a")
    fresh.delete_head("a")
    fresh.load_adapter(folder, load_as="b", set_active=True)
    assert adapter_bits(fresh, "b") == adapter_bits(model, "a")
    for key, y in outputs(fresh).items():
        assert same_bits(y, outputs(model)[key])


# --- born in a dtype ---


@every_method
@pytest.mark.parametrize(
    ("family", "dtype"),
    swept(itertools.product(FAMILIES, DTYPES), [("bert", torch.bfloat16), ("gpt2", torch.float32)]),
)
def test_a_method_lives_in_a_dtype(made, base, tmp_path, text, family, dtype):
    model = made(text, family, dtype)
    check_dtypes(model, dtype, dtype)
    check_all(model, dtype)
    check_dtypes(model, dtype, dtype)
    check_files(model, base(family, dtype), tmp_path)


@every_method
@pytest.mark.parametrize("there", swept(DTYPES[1:], DTYPES[1:2]))
def test_a_file_goes_to_a_model_of_another_dtype_and_back(made, base, tmp_path, text, there):
    here = torch.float16 if there is torch.float32 else torch.float32
    model, other = made(text, dtype=here), base(dtype=there)
    model.save_adapter(tmp_path / "one", "a")
    other.delete_head("a")
    # copies of layers get the dtype of their layer in any case
    if not all(isinstance(m, CopyAdapter) for _, m in model.adapter_modules("a")):
        with refused(other, CheckpointError, f"file {here}   model {there}", f"pass dtype={there}"):
            other.load_adapter(tmp_path / "one")
    other.load_adapter(tmp_path / "one", dtype=there, set_active=True)
    check_dtypes(other, there, there)
    check_near(other, there)
    own = tensors_of(model, "a")
    for key, tensor in tensors_of(other, "a").items():
        assert same_bits(tensor, own[key].to(tensor.dtype)), key
    other.save_adapter(tmp_path / "two", "a")
    model.load_adapter(tmp_path / "two", load_as="b", dtype=here)
    for key, tensor in tensors_of(model, "b").items():
        assert same_bits(tensor, own[key].to(there).to(here)) or key.endswith("/m"), key
    # a wider dtype has kept every bit
    if torch.finfo(there).eps < torch.finfo(here).eps:
        assert adapter_bits(model, "b") == adapter_bits(model, "a")


# --- autocast ---


def works_under_autocast(model, to):
    """Whether the base model alone does: norms refuse an input of another half."""
    active = model.active_adapters
    model.set_active_adapters(None)
    try:
        with torch.autocast("cpu", to):
            outputs(model)
    except RuntimeError as error:
        assert "mixed dtype" in str(error)  # noqa: PT017  of some models only
        return False
    finally:
        model.set_active_adapters(active)
    return True


# bottlenecks whose sums meet tensors of two dtypes under autocast
_SEQUENTIAL = BnConfig(
    mh_adapter=True, output_adapter=True, reduction_factor=4, non_linearity="relu",
    original_ln_before=True,
)  # fmt: skip
OPTIONS = {
    "after the sum": _SEQUENTIAL.replace(
        residual_before_ln="post_add", ln_before=True, ln_after=True, use_gating=True,
        scaling="learned",
    ),
    "without the norm": _SEQUENTIAL.replace(original_ln_after=False, residual_before_ln=False),
    "inside the norm": _SEQUENTIAL.replace(ln_after=True, adapter_residual_before_ln=True),
    "gated": AdapterConfig.load("lora[use_gating=True,lora_bias=True,output_lora=True]"),
    "adapterhub": AdapterConfig.load("dora[convention='adapterhub',output_lora=True]"),
    "factors": BOFTConfig(boft_n_butterfly_factor=3, output_lora=True, boft_dropout=0.3),
}  # fmt: skip
ALL = {**CONFIGS, **OPTIONS}


@contextmanager
def layers_of(model):
    """Dtypes of what all modules of the base model give, those of adapters left out."""
    found: dict[str, torch.dtype] = {}

    def keep(path):
        def hook(module, args, out):
            first = out[0] if isinstance(out, tuple) else out
            if isinstance(first, Tensor):
                found[path] = first.dtype

        return hook

    handles = [
        module.register_forward_hook(keep(path))
        for path, module in model.base_model.named_modules()
        if not of_adapter(path)
    ]
    yield found
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("text", swept(ALL, OPTIONS))
@pytest.mark.parametrize("family", FAMILIES)
def test_autocast_changes_what_it_changes_in_the_base(made, text, family):
    ran = []
    for dtype in DTYPES:
        model = made(ALL[text], family, dtype)
        truth = outputs(upcast(model))
        for to in HALVES:
            if not works_under_autocast(model, to):
                continue
            ran.append((dtype, to))
            seen = {}
            for setup in (None, "a"):
                model.set_active_adapters(setup)
                with torch.autocast("cpu", to), layers_of(model) as seen[setup]:
                    y = outputs(model)
            assert seen["a"] == seen[None]
            for key, tensor in y.items():
                assert tensor.isfinite().all()
                near = 32 * max(torch.finfo(d).eps for d in (dtype, to))
                assert distance(tensor, truth[key]) <= near * truth[key].abs().max()
            with torch.autocast("cpu", to):
                loss = loss_of(model, training=True)
            loss.backward()
            require_gradients(model)
            model.zero_grad()
            model.eval()
    assert {(d, to) for to in HALVES for d in (torch.float32, to)} <= set(ran)


@every_method
def test_autocast_rounds_nothing_that_is_stored(made, text):
    def done(model, to):
        with torch.autocast("cpu", to, enabled=to is not None), torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            model.add_adapter("b", CONFIGS[text])
            model.set_active_adapters(None)
            try:
                model.merge_adapter("a")
            except StateError as error:
                assert "cannot be merged" in str(error)  # noqa: PT017  only some are refused
        return model.state_dict()

    for family in FAMILIES:
        expected = done(made(text, family), None)
        for to in HALVES:
            found = done(made(text, family), to)
            assert not [k for k, t in expected.items() if not same_bits(t, found[k])], to


# --- another default dtype ---


@every_method
@pytest.mark.parametrize("other", swept([torch.float64, *HALVES], [torch.float64]))
def test_the_default_dtype_changes_nothing(
    made, base, tmp_path, text, other,
    default_dtype,
):  # fmt: skip
    own = torch.bfloat16 if other is torch.float16 else torch.float32
    expected = made(text, dtype=own)
    truth, grads = outputs(expected), gradients(expected)
    fresh = base(dtype=own)
    default_dtype(other)
    model = made(text, dtype=own)
    assert adapter_bits(model, "a") == adapter_bits(expected, "a")
    for found, wanted in ((outputs(model), truth), (gradients(model), grads)):
        assert not [key for key, tensor in found.items() if not same_bits(tensor, wanted[key])]
    check_step(model)
    check_merge(model, own, outputs(model))
    check_files(model, fresh, tmp_path)
    check_dtypes(fresh, own, own)


# --- cast after the adapter was added ---

CASTS: dict[str, tuple[str, torch.dtype, Callable[[Any], Any]]] = {
    "half": ("bert", torch.float16, lambda model: model.half()),
    "bfloat16": ("gpt2", torch.bfloat16, lambda model: model.bfloat16()),
    "double": ("bert", torch.float64, lambda model: model.double()),
    "to": ("gpt2", torch.float16, lambda model: model.to(torch.float16)),
    "there and back": ("bert", torch.float32, lambda model: model.half().float()),
}


@every_method
@pytest.mark.parametrize("how", swept(CASTS, ["bfloat16", "there and back"]))
def test_a_model_that_is_cast_afterwards(made, base, tmp_path, text, how):
    family, dtype, cast = CASTS[how]
    model = cast(made(text, family))
    check_dtypes(model, dtype, dtype)
    check_all(model, dtype)
    check_files(model, cast(base(family)), tmp_path)


@every_method
@pytest.mark.parametrize("how", CASTS)
def test_a_fresh_identity_stays_one_when_it_is_cast(base, text, how):
    if not CONFIGS[text].starts_as_identity:
        return
    family, dtype, cast = CASTS[how]
    model = base(family)
    model.add_adapter("a", CONFIGS[text])
    model = cast(model)
    plain = outputs(model)
    model.set_active_adapters("a")
    # magnitudes are the norms of the float32 rows, and the rows were rounded since
    coarse = {"double": torch.float32, "there and back": torch.float16}.get(how, dtype)
    near = 8 * torch.finfo(coarse).eps if magnitudes(model) else 0.0
    for key, y in outputs(model).items():
        assert distance(y, plain[key]) <= near * plain[key].abs().max()


# --- float32 adapters over a half-precision base ---


def kept_wide(config):
    if isinstance(config, ConfigUnion):
        return ConfigUnion(*map(kept_wide, config.configs))
    # copies of layers have the dtype of their layer, until `adapter_to`
    return config.replace(dtype="float32") if "dtype" in config.field_names() else config


@every_method
@pytest.mark.parametrize(("family", "dtype"), [*zip(FAMILIES, HALVES, strict=True)])
def test_adapters_in_float32_over_a_half_base(made, base, tmp_path, text, family, dtype):
    if kept_wide(CONFIGS[text]) == CONFIGS[text]:
        pytest.skip("its config has no dtype; `adapter_to` is in the next test")
    model = made(kept_wide(CONFIGS[text]), family, dtype)
    check_dtypes(model, torch.float32, dtype)
    with layers_of(model) as given:
        outputs(model)
    assert {d for d in given.values() if d.is_floating_point} == {dtype}
    check_all(model, dtype)
    check_dtypes(model, torch.float32, dtype)
    # the file says that they are wide: no word is needed to load it
    check_files(model, base(family, dtype), tmp_path)
    with torch.autocast("cpu", dtype):
        assert {y.dtype for y in outputs(model).values()} == {dtype}


@every_method
@pytest.mark.parametrize("dtype", swept(DTYPES, HALVES[:1]))
def test_an_adapter_is_cast_alone(made, text, dtype):
    for of_base in (torch.float32, torch.bfloat16):
        model = made(text, dtype=of_base)
        with torch.random.fork_rng(devices=()):
            model.add_adapter("other", CONFIGS[text])
        others = adapter_bits(model, "other")
        model.delete_head("a")
        model.add_classification_head("h", num_labels=3)
        model.adapter_to("a", dtype=dtype)
        assert adapter_bits(model, "other") == others
        model.delete_adapter("other")
        check_dtypes(model, dtype, of_base)
        # parameters in a half round what a wide base does not
        coarse = max((dtype, of_base), key=lambda d: torch.finfo(d).eps)
        width = 8 * torch.finfo(coarse).eps / torch.finfo(of_base).eps
        check_near(model, of_base, width=int(width))


@every_method
@pytest.mark.parametrize("dtypes", [(torch.float16, torch.float32), (torch.float32, torch.float16)])
def test_a_second_adapter_never_casts_the_first(made, tmp_path, text, dtypes):
    own, other = dtypes
    model = made(text, dtype=own)
    first, y = adapter_bits(model, "a"), outputs(model)
    stranger = made(text, dtype=other)
    stranger.save_adapter(tmp_path, "a")
    model.load_adapter(tmp_path, load_as="b", dtype=other, with_head=False)
    model.add_adapter("c", kept_wide(CONFIGS[text]))
    assert adapter_bits(model, "b") == adapter_bits(stranger, "a")
    assert adapter_bits(model, "a") == first
    for key, tensor in outputs(model).items():
        assert same_bits(tensor, y[key])


# --- DoRA's magnitudes ---


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("family", FAMILIES)
def test_no_cast_rounds_a_magnitude(made, base, tmp_path, family, dtype):
    model = made("dora", family)
    born = {key: t.clone() for key, t in magnitudes(model).items()}
    assert born
    assert all(t.dtype is torch.float32 for t in born.values())

    def check(one):
        found = magnitudes(one)
        assert found.keys() == born.keys()
        assert not [k for k, t in found.items() if not same_bits(t, born[k])]

    model.save_adapter(tmp_path / "one", "a")
    model.save_pretrained(tmp_path / "whole")
    check(model.to(dtype))
    model.adapter_to("a", dtype=dtype)
    check(model)
    check(copy.deepcopy(model).float())
    assert {t.dtype for t in magnitudes(model.double()).values()} == {torch.float64}
    check(model.to(dtype))
    for file, how in (("one", {"dtype": dtype}), ("two", {})):
        loaded = base(family, dtype)
        loaded.delete_head("a")
        loaded.load_adapter(tmp_path / file, **how)
        check(loaded)
        loaded.save_adapter(tmp_path / "two", "a")
    check(type(model).from_pretrained(tmp_path / "whole", dtype=dtype))


def test_a_gradient_of_a_magnitude_is_cast_like_it(made):
    model = made("dora")
    expected = gradients(model)
    expected = {name: grad.clone() for name, grad in expected.items()}
    model.half()
    for name, parameter in model.named_parameters():
        if name in expected:
            assert parameter.grad is not None
            assert parameter.grad.dtype is parameter.dtype
            assert same_bits(parameter.grad, expected[name].to(parameter.dtype))
    for t in magnitudes(model.to("meta")).values():
        assert t.is_meta
        assert t.dtype is torch.float32


# --- numbers that are large ---


@pytest.mark.parametrize("text", ["lora", "dora", "boft", "dora[convention='adapterhub']"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_merge_in_float16_of_a_large_weight_does_not_overflow(base, text, family):
    model = base(family, torch.float16)
    paths = {"bert": "encoder.layer.0.attention.self.query", "gpt2": "h.0.attn.c_attn"}
    layer = model.base_model.get_submodule(paths[family])
    with torch.no_grad():
        # rows of norm 60000 · √32, far above what float16 holds
        layer.weight.copy_(60000 * torch.sign(layer.weight))
        layer.bias.copy_(60000 * torch.sign(layer.bias))
    before = {k: t.clone() for k, t in model.state_dict().items()}
    model.add_adapter("a", AdapterConfig.load(text).replace(init_weights_seed=0))
    for part in adapters_of(layer)["a"].modules():
        if "m" in part._parameters:
            assert part.m.isfinite().all()
            near = 4 * torch.finfo(torch.float32).eps
            torch.testing.assert_close(part.m, part.m.new_full((32,), 60000 * 32**0.5),
                                       rtol=near, atol=0)  # fmt: skip
    model.merge_adapter("a")
    assert not [k for k, t in before.items() if not same_bits(model.state_dict()[k], t)]
    model.reset_adapter()
    moved(model)
    with torch.no_grad():
        for parameter in parameters_of(model, "a"):
            # half a step of float16 at 60000 is 16, that of LoRA's change shall be larger
            parameter.mul_(20)
        for part in adapters_of(layer)["a"].modules():
            # nothing may grow above 65504
            if "boft_s" in part._parameters:
                part.boft_s.copy_(0.4)
            if "m" in part._parameters:
                part.m.fill_(30000 * 32**0.5)
    exact = upcast(model)
    exact.merge_adapter("a")
    model.merge_adapter("a")
    truth = exact.base_model.get_submodule(paths[family])
    for found, expected in ((layer.weight, truth.weight), (layer.bias, truth.bias)):
        assert found.isfinite().all()
        # computed in float32 and rounded once
        near = torch.finfo(torch.float16).eps * 0.51 * expected.abs() + 0.01
        assert ((found.double() - expected).abs() <= near).all()
    assert not same_bits(layer.weight, before[f"{model.base_model_prefix}.{paths[family]}.weight"])
    model.reset_adapter()
    assert not [k for k, t in before.items() if not same_bits(model.state_dict()[k], t)]


# --- BOFT's rotations ---


# --- inputs without rows, and with what is no number ---


@pytest.mark.parametrize("text", swept(ALL, (*QUICK, *OPTIONS)))
def test_no_rows_and_no_tokens(text):
    for case in cases(ALL[text]):
        if case.kind == "attention":
            continue  # that of transformers refuses an empty batch
        model = case.trained("a")
        model.train_adapter("a")
        for batch in ((0, 3), (2, 0)):
            y = model(case.input(*batch))
            assert y.shape == (*batch, 32), str(case)
            assert y.dtype is case.dtype, str(case)
            if y.requires_grad:  # ReFT edits nothing where there are no tokens
                y.sum().backward()
        for name, parameter in model.named_parameters():
            grad = parameter.grad
            assert grad is None or (parameter.requires_grad and not grad.count_nonzero()), name


@pytest.mark.parametrize("text", swept(ALL, (*QUICK, *OPTIONS)))
def test_what_is_no_number_stays_in_its_row(text):
    for case in cases(ALL[text]):
        x = case.input(4, 3)
        if not x.is_floating_point():
            continue
        model = case.trained("a")
        model.set_active_adapters("a")
        with torch.no_grad():
            clean = model(x)
            x[1, :, 5] = float("nan")
            x[2, :, 7] = float("inf")
            y = model(x)
        assert same_bits(y[[0, 3]], clean[[0, 3]]), str(case)
        assert not y[1:3].isfinite().all(-1).any(), str(case)
