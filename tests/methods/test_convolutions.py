"""Adapters at convolutions, beside PEFT: outputs, gradients, files in both directions, merging."""

import copy
import math
import pickle
from contextlib import contextmanager

import peft as real
import pytest
import torch
from torch import nn

import adapterzoo
from adapterzoo import peft as ours
from adapterzoo.errors import CheckpointError, CompositionError, ConfigError, StateError

KINDS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
# rare arguments of the layer: PEFT's A pads with zeros and does not dilate
LAYERS = {"plain": {}, "strided": {"stride": 2, "padding": 1}}
METHODS = {
    "lora": ("LoraConfig", {"r": 4, "init_lora_weights": False}),
    "lora, bias": ("LoraConfig", {"r": 4, "init_lora_weights": False, "lora_bias": True}),
    "dora": ("LoraConfig", {"r": 4, "init_lora_weights": False, "use_dora": True}),
    "loha": ("LoHaConfig", {"r": 4, "init_weights": False}),
    "loha, third": ("LoHaConfig", {"r": 4, "init_weights": False, "use_effective_conv2d": True}),
    "lokr": ("LoKrConfig", {"r": 2, "init_weights": False}),
    "lokr, both": ("LoKrConfig", {"r": 1, "init_weights": False, "decompose_both": True}),
    "lokr, third": ("LoKrConfig", {"r": 1, "init_weights": False, "use_effective_conv2d": True}),
    "boft": ("BOFTConfig", {"boft_block_size": 4, "init_weights": False}),
    "ia3": ("IA3Config", {"init_ia3_weights": False, "feedforward_modules": []}),
    "ia3, input": ("IA3Config", {"init_ia3_weights": False, "feedforward_modules": ["conv"]}),
}
LYCORIS = [name for name in METHODS if name.startswith("lo") and not name.startswith("lora")]
# what PEFT has: it fails at `use_effective_conv2d` of LoKr in one dimension
CASES = [
    (name, dim, kind, 1)
    for name in METHODS
    for dim in KINDS
    for kind in LAYERS
    if not (dim == 3 and (name in LYCORIS or name == "boft"))
    and not (dim == 1 and name in ("boft", "ia3", "ia3, input", "lokr, third"))
]
CASES += [(name, 2, "plain", 2) for name in METHODS if name != "boft"]


class Net(nn.Module):
    def __init__(self, dim=2, groups=1, **options):
        super().__init__()
        self.conv = KINDS[dim](4, 8, 3, groups=groups, **options)
        self.point = KINDS[dim](8, 8, 1)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.point(self.conv(x).tanh()).tanh()
        return self.head(x.flatten(2).mean(2))


def net(dim=2, kind="plain", groups=1, dtype=torch.float32):
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return Net(dim, groups, **LAYERS[kind]).to(dtype).eval()


def images(dim=2, dtype=torch.float32):
    source = torch.Generator().manual_seed(1)
    return torch.randn(3, 4, *[6] * dim, generator=source).to(dtype)


def by_peft(folder, name, dim=2, kind="plain", groups=1):
    """Save an adapter of PEFT; its outputs, and the gradients of its parameters by key."""
    cls, fields = METHODS[name]
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(3)
        config = getattr(real, cls)(target_modules=["conv", "point"], **fields)
        model = real.get_peft_model(net(dim, kind, groups), config).eval()
        for key, parameter in model.named_parameters():
            if "ia3_l" in key or "boft_s" in key:
                nn.init.normal_(parameter, 1.0, 0.3)
    model.save_pretrained(folder)
    y = model(images(dim))
    y.square().sum().backward()
    keys = {id(p): key for key, p in model.named_parameters()}
    grads = {keys[id(p)]: p.grad.flatten() for p in model.parameters() if p.grad is not None}
    return y.detach(), grads


# PEFT takes a bias of B for a shard
@pytest.mark.filterwarnings("ignore:Adapter .default.:UserWarning", "ignore:LoRA adapter added")
@pytest.mark.filterwarnings("ignore:Failed to load the CUDA", "ignore:Setting boft_n_butterfly")
@pytest.mark.parametrize(("name", "dim", "kind", "groups"), CASES)
def test_beside_peft(tmp_path, name, dim, kind, groups):
    x = images(dim)
    y, grads = by_peft(tmp_path / "theirs", name, dim, kind, groups)
    plain = net(dim, kind, groups)
    assert (plain(x) - y).abs().max() > 1e-3
    model = ours.PeftModel.from_pretrained(plain, tmp_path / "theirs", is_trainable=True).eval()
    torch.testing.assert_close(model(x), y, rtol=1e-5, atol=2e-6)
    # the same numbers get the same gradients, whatever their shapes; PEFT's own backward of a third
    # factor is wrong for two of them, see below
    if name != "loha, third":
        model(x).square().sum().backward()
        got = [p.grad for p in model.parameters() if p.grad is not None]
        want = torch.stack(sorted((g.norm() for g in grads.values()), key=float))
        torch.testing.assert_close(
            torch.stack(sorted((g.norm() for g in got), key=float)), want, rtol=1e-3, atol=1e-5
        )
    model.save_pretrained(tmp_path / "ours")
    again = real.PeftModel.from_pretrained(net(dim, kind, groups), tmp_path / "ours").eval()
    torch.testing.assert_close(again(x), y, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(copy.deepcopy(pickle.loads(pickle.dumps(model)))(x), model(x))
    if groups > 1 and name in ("lora", "lora, bias", "dora"):
        with refused(model, StateError, "groups of the convolution", "Keep the adapter active"):
            model.merge_adapter()
        return
    model.merge_adapter()
    torch.testing.assert_close(model(x), y, rtol=1e-4, atol=1e-5)
    model.unmerge_adapter()
    torch.testing.assert_close(model(x), y, rtol=1e-5, atol=2e-6)
    assert all(torch.equal(a, b) for a, b in zip(
        model.unload().parameters(), net(dim, kind, groups).parameters(), strict=True))  # fmt: skip


# --- the formulas, in float64, also where PEFT has none ---

DILATED = {"dilation": 2, "padding": 2, "padding_mode": "reflect"}


@contextmanager
def refused(model, error, *says):
    """The block raises this error, whose message has all this, and no tensor or class changes."""
    before = copy.deepcopy(model.state_dict()), [type(m) for m in model.modules()]
    with pytest.raises(error) as caught:
        yield
    assert all(part in str(caught.value) for part in says), str(caught.value)
    assert [type(m) for m in model.modules()] == before[1]
    now = model.state_dict()
    assert now.keys() == before[0].keys()
    assert all(torch.equal(now[key], tensor) for key, tensor in before[0].items())


def configured(name):
    fields = {"target_modules": ("conv",), "init_weights_seed": 5}
    return {
        "lora": adapterzoo.LoRAConfig(r=2, alpha=3, init_weights="random", **fields),
        "dora": adapterzoo.DoRAConfig(r=2, alpha=3, init_weights="random", **fields),
        "loha": adapterzoo.LoHaConfig(r=2, init_weights=False, **fields),
        "lokr": adapterzoo.LoKrConfig(r=1, init_weights=False, **fields),
        "oft": adapterzoo.OFTConfig(oft_block_size=4, init_weights=False, **fields),
        "boft": adapterzoo.BOFTConfig(
            boft_block_size=4, boft_n_butterfly_factor=1, init_weights=False, **fields
        ),
        "ia3": adapterzoo.IA3Config(init_weights="random", **fields),
    }[name]


@pytest.mark.parametrize("dim", KINDS)
@pytest.mark.parametrize("name", ["lora", "dora", "loha", "oft", "boft", "ia3"])
def test_the_output_is_that_of_the_changed_weight(name, dim):
    """W' is built from the adapter at the linear layer of the same matrix."""
    config = configured(name)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        layer = KINDS[dim](4, 8, 3, **DILATED).double()
        x = torch.randn(2, 4, *[7] * dim, dtype=torch.float64)
    matrix = nn.Linear(4 * 3**dim, 8).double()
    matrix.load_state_dict({"weight": layer.weight.flatten(1), "bias": layer.bias})
    held = nn.ModuleDict({"conv": layer}), nn.ModuleDict({"conv": matrix})
    with torch.random.fork_rng(devices=()):
        for each in held:
            torch.manual_seed(7)
            adapterzoo.init(each).add_adapter("a", config, set_active=True)
        torch.manual_seed(7)
    tensors = dict(held[0].adapter_modules("a"))["conv"].state_dict()
    dict(held[1].adapter_modules("a"))["conv"].load_state_dict(tensors)
    held[1].merge_adapter("a")
    w, b = held[1]["conv"].weight.detach(), held[1]["conv"].bias.detach()
    want = KINDS[dim](4, 8, 3, **DILATED).double()
    want.load_state_dict({"weight": w.view_as(layer.weight), "bias": b})
    torch.testing.assert_close(held[0]["conv"](x), want(x), rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["lora", "dora"])
def test_dropout_reaches_the_update_alone(name):
    config = configured(name).replace(dropout=0.5)
    model = adapterzoo.init(net(dtype=torch.float64))
    model.add_adapter("a", config, set_active=True)
    model.train()
    x, conv = images(dtype=torch.float64), model.conv
    adapter = dict(model.adapter_modules("a"))["conv"]
    torch.manual_seed(0)
    y = conv(x)
    torch.manual_seed(0)
    dropped = nn.functional.dropout(x, 0.5, True)
    a = adapter.lora_A.view(2, 4, 3, 3)
    b = adapter.lora_B.view(8, 2, 1, 1)
    plain = nn.functional.conv2d(x, conv.weight, conv.bias)
    update = 1.5 * nn.functional.conv2d(nn.functional.conv2d(dropped, a), b)
    if name == "dora":
        w = conv.weight.flatten(1)
        g = adapter.m / (w + 1.5 * adapter.lora_B @ adapter.lora_A).norm(dim=1)
        bias = conv.bias.view(-1, 1, 1)
        want = g.view(-1, 1, 1) * (plain - bias + update) + bias
    else:
        want = plain + update
    torch.testing.assert_close(y, want, rtol=0, atol=1e-10)


def test_rows_and_stacks():
    model = adapterzoo.init(net())
    model.add_adapter("a", configured("lora"))
    model.add_adapter("b", configured("dora").replace(init_weights_seed=6))
    x = images()
    apart = {}
    for name in ("a", "b"):
        model.set_active_adapters(name)
        apart[name] = model(x)
    model.set_active_adapters(None)
    base = model(x)
    mixed = model(x, adapter_names=["a", None, "b"])
    for row, want in enumerate((apart["a"], base, apart["b"])):
        torch.testing.assert_close(mixed[row], want[row], rtol=1e-5, atol=1e-6)
    model.set_active_adapters(adapterzoo.Stack("a", "b"))
    active = model(x)
    model.merge_adapter(["a", "b"])
    torch.testing.assert_close(model(x), active, rtol=1e-4, atol=1e-5)


def test_what_a_convolution_cannot_have():
    model = adapterzoo.init(net())
    for config, words in (
        (adapterzoo.VeraConfig(target_modules=["conv"]), "Write exclude_modules"),
        (adapterzoo.LoRAConfig(target_modules=["conv"], use_gating=True), "use_gating=False"),
        (adapterzoo.LoRAConfig(target_modules=["conv"], init_weights="eva"), "init_weights='lora'"),
    ):
        data = [{"x": images()}] if config.get("init_weights") == "eva" else None
        with refused(model, ConfigError, "'conv'", words):
            model.add_adapter("a", config, init_data=data)
    grouped = adapterzoo.init(net(groups=2))
    config = adapterzoo.LoRAConfig(r=3, target_modules=["conv"])
    with refused(grouped, ConfigError, "r=3", "Write r=2"):
        grouped.add_adapter("a", config)


def test_a_rotation_after_another_adapter_is_refused():
    model = adapterzoo.init(net())
    model.add_adapter("a", configured("lora"))
    model.add_adapter("b", configured("oft"))
    model.set_active_adapters(adapterzoo.Stack("b", "a"))
    assert model(images()).isfinite().all()
    model.set_active_adapters(adapterzoo.Stack("a", "b"))
    with pytest.raises(CompositionError, match="OFT adapter first"):
        model(images())


def test_the_rotation_of_peft_adds_up_patches(tmp_path):
    """What PEFT merges is another function: it is not merged here."""
    config = real.OFTConfig(r=0, oft_block_size=4, target_modules=["conv"], init_weights=False)
    theirs = real.get_peft_model(net(), config).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    x = images()
    y = theirs(x)
    model = ours.PeftModel.from_pretrained(net(), tmp_path / "theirs")
    torch.testing.assert_close(model(x), y, rtol=1e-5, atol=2e-6)
    model.save_pretrained(tmp_path / "ours")
    again = real.PeftModel.from_pretrained(net(), tmp_path / "ours").eval()
    torch.testing.assert_close(again(x), y, rtol=1e-5, atol=2e-6)
    with refused(model, StateError, "sums patches", "Keep the adapter active"):
        model.merge_adapter()
    theirs.merge_adapter()
    assert (theirs(x) - y).abs().max() > 0.01
    # the weight that PEFT merges is that of the paper
    native = adapterzoo.init(net())
    paper = adapterzoo.OFTConfig(oft_block_size=4, target_modules=["conv"])
    native.add_adapter("a", paper, set_active=True)
    stored = real.get_peft_model_state_dict(theirs)
    rotation = {"oft_R": stored["base_model.model.conv.oft_R.weight"]}
    dict(native.adapter_modules("a"))["conv"].load_state_dict(rotation)
    torch.testing.assert_close(native(x), theirs(x), rtol=1e-4, atol=1e-5)
    with refused(native, CheckpointError, "convention='paper'", "'native'"):
        native.save_adapter(tmp_path / "no", "a", format="peft")


@pytest.mark.parametrize("name", ["loha, third", "lokr, third"])
def test_gradients_of_a_third_factor(name):
    cls, fields = METHODS[name]
    config = getattr(ours, cls)(target_modules=["conv"], **fields)
    model = ours.get_peft_model(net(dtype=torch.float64), config).double()
    x, keys = (
        images(dtype=torch.float64),
        [k for k, p in model.named_parameters() if p.requires_grad],
    )
    values = tuple(dict(model.named_parameters())[k].detach().requires_grad_() for k in keys)

    def output(*given):
        return torch.func.functional_call(model, dict(zip(keys, given, strict=True)), (x,))

    assert torch.autograd.gradcheck(output, values, atol=1e-6)


def test_a_file_of_a_third_factor_has_its_kernel(tmp_path):
    by_peft(tmp_path, "loha, third")
    model = ours.PeftModel.from_pretrained(net(), tmp_path)
    module = dict(model.adapter_modules("default"))["conv"]
    assert module.hada_t1.shape == (4, 4, math.prod((3, 3)))
    assert not hasattr(dict(model.adapter_modules("default"))["point"], "hada_t1")
