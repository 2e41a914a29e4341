"""The tables of `docs/plain-modules.md`: methods × modules that are not of transformers × ways.

`make plain` runs every cell and writes the page; `test_plain_table.py` runs a part and compares.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import inspect
import json
import pickle
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft as real
import torch
from peft_cells import CannotError, by_peft
from ranks import run_ranks
from torch import Tensor, nn

import adapterzoo
from adapterzoo import AdapterConfig
from adapterzoo import methods as _methods  # noqa: F401  registers the config strings
from adapterzoo.config import Choice, architectures, checks, config_strings
from adapterzoo.errors import AdapterZooError

PAGE = Path(__file__).parents[1] / "docs" / "plain-modules.md"
RIGHT, REFUSED, NONE, WRONG = "right", "refused", "–", "wrong"
ROWS = 4
# in float64; a wrong adapter changes the outputs by more than 1e-3
BOUND, ACTS = 1e-7, 1e-3
# a product that PEFT's file has in float32
ROUNDED = 1e-5


# --- modules ---


class Mlp(nn.Module):
    """Linear layers with a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.second = nn.Linear(16, 8, bias=False)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.norm(self.first(x)).tanh()).tanh())  # type: ignore[no-any-return]


class Convolutional(nn.Module):
    """Strided, grouped and dilated convolutions of one, two or three dimensions."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        conv: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dim - 1]
        norm: Any = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dim - 1]
        self.strided = conv(4, 8, 3, stride=2, padding=1)
        self.norm = norm(8)
        self.grouped = conv(8, 8, 3, padding=1, groups=2)
        self.dilated = conv(8, 8, 3, padding=2, dilation=2)
        self.point = conv(8, 8, 1, bias=False)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.strided(x)).tanh()
        x = self.point(self.dilated(self.grouped(x).tanh()).tanh())
        return self.head(x.flatten(2).mean(2))  # type: ignore[no-any-return]


class Uneven(nn.Module):
    """Convolutions that differ between the dimensions, or do not pad with zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.uneven = nn.Conv2d(4, 8, (3, 1), stride=(2, 1), padding=(1, 0))
        self.circular = nn.Conv2d(8, 8, 3, padding=1, padding_mode="circular")
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.circular(self.uneven(x).tanh()).tanh()
        return self.head(x.flatten(2).mean(2))  # type: ignore[no-any-return]


class BasicBlock(nn.Module):
    """Two convolutions, in the names of timm."""

    def __init__(self, d_in: int, d_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(d_in, d_out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(d_out)
        self.act1 = nn.ReLU()
        self.conv2 = nn.Conv2d(d_out, d_out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(d_out)
        self.act2 = nn.ReLU()
        self.downsample = None
        if d_in != d_out:
            layers = nn.Conv2d(d_in, d_out, 1, stride, bias=False), nn.BatchNorm2d(d_out)
            self.downsample = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.act1(self.bn1(self.conv1(x)))))
        return self.act2(y + (x if self.downsample is None else self.downsample(x)))  # type: ignore[no-any-return]


class ResNet(nn.Module):
    """`layer1.0.conv1`, in the names of timm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(4, 8, 3, 2, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.layer1 = nn.Sequential(BasicBlock(8, 8, 1))
        self.layer2 = nn.Sequential(BasicBlock(8, 16, 2))
        self.fc = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer2(self.layer1(self.bn1(self.conv1(x)).relu()))
        return self.fc(x.mean((2, 3)))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Self-attention, in the names of timm."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(d, 3 * d)
        self.proj = nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        split = self.qkv(x).unflatten(-1, (3, self.heads, -1))  # [rows, tokens, 3, heads, d_head]
        q, k, v = split.permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v)  # [rows, heads, tokens, d_head]
        return self.proj(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """Two layers, in the names of timm."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(d, 2 * d)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(2 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))  # type: ignore[no-any-return]


class VitBlock(nn.Module):
    """A block, in the names of timm."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(d)
        self.attn = Attention(d, 2)
        self.norm2 = nn.LayerNorm(d)
        self.mlp = FeedForward(d)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class PatchEmbed(nn.Module):
    """A convolution of patches, in the names of timm."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(4, d, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(2).mT  # type: ignore[no-any-return]


class Vit(nn.Module):
    """`blocks.0.attn.qkv`, in the names of timm."""

    def __init__(self) -> None:
        super().__init__()
        d = 8
        self.cls_token = nn.Parameter(torch.randn(1, 1, d))
        self.pos_embed = nn.Parameter(torch.randn(1, 10, d))
        self.patch_embed = PatchEmbed(d)
        self.blocks = nn.Sequential(*(VitBlock(d) for _ in range(2)))
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    """A table of tokens, an LSTM, and linear heads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.project = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.lstm(self.embed(x))
        return self.head(self.norm(self.project(states[:, -1])).tanh())  # type: ignore[no-any-return]


def _unet() -> nn.Module:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, layers_per_block=1, norm_num_groups=4,
        block_out_channels=(8, 16), cross_attention_dim=8, attention_head_dim=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), mid_block_type=None,
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip


def _dit() -> nn.Module:
    from diffusers import DiTTransformer2DModel

    return DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=4, in_channels=4, out_channels=4, num_layers=1,
        norm_num_groups=4, sample_size=4, patch_size=2, num_embeds_ada_norm=4,
    )  # fmt: skip


@dataclass(frozen=True)
class Base:
    """A module and a call of it.

    Attributes:
        make: the module, of random weights.
        shape: of the first argument.
        targets: names of the layers that are adapted.
        tokens: how many tokens the first argument can hold; 0: it holds numbers.
        more: the other arguments.
        needs: a package that may not be installed.
    """

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    targets: tuple[str, ...]
    tokens: int = 0
    more: Callable[[int], dict[str, Any]] = lambda _rows: {}
    needs: str = ""

    def new(self) -> Any:
        """The module, the same each time."""
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            model = self.make().double()
            for module in model.modules():
                # a fresh one does nothing
                if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)):
                    nn.init.normal_(module.running_mean, 0.0, 0.1)
                    nn.init.uniform_(module.running_var, 0.5, 1.5)
        return model.eval()

    @functools.cached_property
    def x(self) -> Tensor:
        """The first argument."""
        return self.drawn(ROWS)

    def drawn(self, rows: int) -> Tensor:
        """First arguments of other rows."""
        source = torch.Generator().manual_seed(rows)
        if self.tokens:
            return torch.randint(self.tokens, (rows, *self.shape), generator=source)
        return torch.randn(rows, *self.shape, generator=source, dtype=torch.float64)

    def call(self, model: Any, rows: slice = slice(None), **given: Any) -> Tensor:
        """The first output."""
        x = self.x[rows]
        y = model(x, **self.more(len(x)), **given)
        found: Tensor = y if isinstance(y, Tensor) else y[0]
        return found


def _conditioned(rows: int) -> dict[str, Any]:
    source = torch.Generator().manual_seed(2)
    states = torch.randn(1, 3, 8, generator=source, dtype=torch.float64)
    return {"timestep": 3, "encoder_hidden_states": states.expand(rows, -1, -1)}


def _labelled(rows: int) -> dict[str, Any]:
    return {"timestep": torch.full((rows,), 3), "class_labels": torch.ones(rows, dtype=torch.long)}


_UNET = functools.partial(Base, _unet, (4, 8, 8), more=_conditioned, needs="diffusers")
BASES = {
    "MLP": Base(Mlp, (8,), ("first", "second")),
    "Conv1d": Base(functools.partial(Convolutional, 1), (4, 9), ("strided", "point")),
    "Conv2d": Base(functools.partial(Convolutional, 2), (4, 7, 7), ("strided", "point")),
    "Conv2d, grouped": Base(functools.partial(Convolutional, 2), (4, 7, 7), ("grouped",)),
    "Conv2d, dilated": Base(functools.partial(Convolutional, 2), (4, 7, 7), ("dilated",)),
    "Conv2d, uneven": Base(Uneven, (4, 7, 7), ("uneven",)),
    "Conv2d, circular": Base(Uneven, (4, 7, 7), ("circular",)),
    "Conv3d": Base(functools.partial(Convolutional, 3), (4, 5, 5, 5), ("strided", "point")),
    "ResNet": Base(ResNet, (4, 8, 8), ("layer1.0.conv1", "layer2.0.conv2", "downsample.0")),
    "ViT": Base(Vit, (4, 6, 6), ("attn.qkv", "attn.proj", "mlp.fc2")),
    "LSTM": Base(Recurrent, (5,), ("project",), tokens=12),
    "UNet, attention": _UNET(targets=("to_q", "to_v")),
    "UNet, convolutions": _UNET(targets=("conv1", "conv_shortcut")),
    "DiT": Base(_dit, (4, 4, 4), ("to_q", "to_out.0"), more=_labelled, needs="diffusers"),
}
"""By the titles of the columns."""
# these have each option of each method, too
WITH_OPTIONS = ("MLP", "Conv2d", "Conv2d, grouped")


def installed(base: str) -> bool:
    """Whether the package of a base is there."""
    needs = BASES[base].needs
    return not needs or importlib.util.find_spec(needs) is not None


# --- methods ---

# sizes that the small layers have
_SIZES = {
    "r": 4, "oft_block_size": 4, "boft_block_size": 4, "boft_n_butterfly_factor": 1, "mini_r": 2,
    "reduction_factor": 2, "prefix_length": 2, "bottleneck_size": 4, "prompt_length": 2,
    "token_indices": (0, 3, 5), "eps": 0.5,
}  # fmt: skip
# names of the layers decide which are adapted, and a dtype is not what is computed
_ASIDE = {"selfattn_lora", "intermediate_lora", "output_lora", "mixers", "dtype"}
_TUPLES = {"alora_invocation_tokens": (1, 2)}


def _values(check: Any) -> tuple[Any, ...]:
    return check.values if isinstance(check, Choice) else ()


def _small(config: AdapterConfig) -> AdapterConfig:
    known = checks(type(config))
    fields = [n for n in config.field_names() if n not in known or not _values(known[n][0])]
    sizes = {name: size for name, size in _SIZES.items() if name in fields}
    if config.get("oft_block_size"):
        sizes.pop("r")
    return config.replace(**sizes)


@functools.cache
def configs() -> dict[str, AdapterConfig]:
    """Every method of the registry, and every value of the options of those that act on layers."""
    found: dict[str, AdapterConfig] = {}
    with warnings.catch_warnings():
        # some sizes have an effect with an option only
        warnings.simplefilter("ignore")
        # a union is of other methods
        loaded = {n: _small(AdapterConfig.load(n)) for n in config_strings if n != "union"}
        known = {"union", *(config.architecture for config in loaded.values())}
        for name in (name for name in architectures if name not in known):
            loaded[name] = _small(AdapterConfig.from_dict({"architecture": name}))
        for name, config in loaded.items():
            if config not in found.values():
                found[name] = config
        for name, config in [*found.items()]:
            found.update({f"{name}[{text}]": changed for text, changed in _options(config)})
    return found


def _options(config: AdapterConfig) -> Iterator[tuple[str, AdapterConfig]]:
    if not acts_on_layers(config):
        return
    for field, (check, _) in checks(type(config)).items():
        for value in (*_values(check), *((_TUPLES[field],) if field in _TUPLES else ())):
            if field in _ASIDE or value == config[field]:
                continue
            with contextlib.suppress(AdapterZooError):
                shown = [*value] if isinstance(value, tuple) else value
                yield f"{field}={shown!r}".replace(" ", ""), config.replace(**{field: value})


def acts_on_layers(config: AdapterConfig) -> bool:
    """Whether the config names the layers."""
    return "target_modules" in config.field_names()


def configured(base: str, text: str) -> AdapterConfig:
    """The config of a method for a base."""
    config = configs()[text]
    # norms and tables have names of their own
    named = acts_on_layers(config) and config.get("attn_matrices") is not None
    if text.partition("[")[0] == "trainable_tokens" and BASES[base].tokens:
        return config.replace(target_modules=("embed",))
    return config.replace(target_modules=BASES[base].targets) if named else config


def rows() -> Iterator[tuple[str, str]]:
    """The base and the method of each row."""
    for base in BASES:
        for text in configs():
            if base in WITH_OPTIONS or "[" not in text:
                yield base, text


# --- the ways ---


class Case:
    """A module with an adapter, and what it gives.

    Attributes:
        base: the module's.
        plain: the module without adapters.
        model: that with one, which is active.
        y: its output.
    """

    def __init__(self, base: str, text: str) -> None:
        """Add the adapter.

        Raises:
            AdapterZooError: it cannot be added.
        """
        self.name, self.text = base, text
        self.base = BASES[base]
        self.plain = self.base.new()
        self.model = self.fresh(text)
        moved(self.model.adapter_modules("a"))
        self.y = self.base.call(self.model).detach()
        off = (self.y - self.base.call(self.plain)).abs().max()
        assert off > ACTS, "the adapter does nothing"

    def fresh(self, text: str | None = None) -> Any:
        """The module with the library's methods, and with an adapter.

        Raises:
            AdapterZooError: it cannot be added.
        """
        model = adapterzoo.init(self.base.new())
        if text is not None:
            config = configured(self.name, text)
            try:
                with torch.random.fork_rng(devices=()):
                    torch.manual_seed(3)
                    model.add_adapter("a", config, set_active=True)
            except AdapterZooError as error:
                if "init_data" not in str(error):
                    unchanged(model, self.base)
                    raise
                first = next(iter(inspect.signature(model.forward).parameters))
                data = [{first: self.base.drawn(16), **self.base.more(16)}]
                model.add_adapter("a", config, init_data=data, set_active=True)
            model.eval()
        return model

    def near(self, y: Tensor, want: Tensor | None = None, bound: float = BOUND) -> bool:
        """Check that an output is that of the adapter, or another one."""
        want = self.y if want is None else want
        assert y.shape == want.shape, (y.shape, want.shape)
        off = float((y.double() - want).abs().max())
        assert off < bound, f"off by {off:.1e}"
        return True


def moved(modules: Any, scale: float = 0.3) -> None:
    """Add random numbers to every parameter: a fresh adapter may be the identity."""
    source = torch.Generator().manual_seed(5)
    with torch.no_grad():
        parameters = (p for _, module in modules for p in module.parameters())
        for parameter in dict.fromkeys(parameters):
            drawn = torch.randn(parameter.shape, generator=source, dtype=torch.float64)
            parameter.add_(drawn.to(parameter) * scale)


def unchanged(model: Any, base: Base) -> None:
    """Check that a refused adapter has changed nothing."""
    fresh = base.new()
    own, now = fresh.state_dict(), model.state_dict()
    assert own.keys() == now.keys(), "keys"
    assert all(torch.equal(own[key], now[key]) for key in own), "tensors"
    pairs = zip(fresh.modules(), model.modules(), strict=True)
    assert all(type(a) is type(b) for a, b in [*pairs][1:]), "classes"
    assert not model.adapters_config
    assert torch.equal(base.call(model), base.call(fresh)), "outputs"


def _same_base(case: Case, model: Any) -> None:
    own, now = case.plain.state_dict(), model.state_dict()
    assert all(torch.equal(own[key], now[key]) for key in own), "the base has changed"


def _gradient(case: Case, model: Any) -> dict[str, nn.Parameter]:
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    adapter = {id(p) for _, module in model.adapter_modules("a") for p in module.parameters()}
    assert {id(p) for p in trained.values()} <= adapter, "more than the adapter is trained"
    assert trained, "nothing is trained"
    case.base.call(model).square().sum().backward()
    return trained


def _slope(case: Case, model: Any, trained: dict[str, nn.Parameter]) -> None:
    """Compare the gradient with differences along a random direction."""
    source = torch.Generator().manual_seed(7)
    slope = 0.0
    directions = {}
    for name, parameter in trained.items():
        assert parameter.grad is not None, f"no gradient: {name}"
        drawn = torch.randn(parameter.shape, generator=source, dtype=parameter.dtype)
        directions[name] = drawn
        slope += float((parameter.grad * drawn).sum())
    losses, step = [], 1e-5
    # there, back to the other side, and home
    for times in (1, -2, 1):
        with torch.no_grad():
            for name, parameter in trained.items():
                parameter.add_(directions[name], alpha=times * step)
            losses.append(float(case.base.call(model).square().sum()))
    measured = (losses[0] - losses[1]) / (2 * step)
    assert abs(slope) > 1e-6, "the gradient is zero"
    assert abs(measured - slope) < 1e-5 * (1 + abs(slope)), (measured, slope)


TWINS = {"dora": "lora", "dvora": "vera"}
"""Methods with y = m / ‖V‖ · V x + b, and those with y = V x + b."""


def _by_formula(case: Case, model: Any) -> None:
    """Compare the gradient with that of m / ‖V‖ · V x + b, where ‖V‖ is a constant (DoRA, §4.3)."""
    given = configured(case.name, case.text)
    plain = AdapterConfig.load(TWINS[given.architecture])
    names = {*plain.field_names()} & {*given.field_names()} - {"architecture"}
    shared = {name: given[name] for name in names}
    twin = adapterzoo.init(case.base.new())
    twin.add_adapter("a", plain.replace(**shared), set_active=True)
    twin.train_adapter("a")
    twin.eval()
    own, others = dict(model.adapter_modules("a")), dict(twin.adapter_modules("a"))
    magnitudes: dict[str, Tensor] = {}

    def scaled(path: str) -> Callable[..., Tensor]:
        m = magnitudes[path] = own[path].m.detach().clone().requires_grad_()
        dim = -1 if isinstance(layer := twin.get_submodule(path), nn.Linear) else 1

        def hook(_layer: Any, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
            shape = [-1 if i == dim % out.dim() else 1 for i in range(out.dim())]
            bias = 0.0 if layer.bias is None else layer.bias.view(shape)
            with torch.no_grad():
                y = model.get_submodule(path)(*args)
                over_norm = (y - bias) / (out - bias) / m.view(shape)
            return m.view(shape) * over_norm * (out - bias) + bias

        return hook

    for path, module in others.items():
        if not path:
            # what the layers share
            continue
        module.load_state_dict({k: t for k, t in own[path].state_dict().items() if k != "m"})
        twin.get_submodule(path).register_forward_hook(scaled(path))
    case.base.call(twin).square().sum().backward()
    for path, m in magnitudes.items():
        want = {"m": m.grad, **{k: p.grad for k, p in others[path].named_parameters()}}
        got = {k: p.grad for k, p in own[path].named_parameters()}
        assert got.keys() == want.keys()
        for key, grad in got.items():
            torch.testing.assert_close(grad, want[key], rtol=1e-6, atol=1e-9)


def _train(case: Case) -> bool:
    """The gradient is the slope of the loss, and a step changes only the adapter."""
    model = copy.deepcopy(case.model)
    model.train_adapter("a")
    model.eval()
    trained = _gradient(case, model)
    config = configured(case.name, case.text)
    if config.gradients_are_exact:
        _slope(case, model, trained)
    elif config.architecture in TWINS and config["bias"] == "none":
        _by_formula(case, model)
    before = {n: p.detach().clone() for n, p in trained.items()}
    torch.optim.SGD(trained.values(), 0.1).step()
    _same_base(case, model)
    changed = [n for n, p in trained.items() if not torch.equal(p, before[n])]
    assert len(changed) == len(trained), {*trained} - {*changed}
    return True


def _save(case: Case) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        case.model.save_adapter(folder, "a")
        loaded = case.fresh()
        loaded.load_adapter(folder, set_active=True)
        loaded.eval()
    assert torch.equal(case.base.call(loaded), case.y)
    return True


@contextlib.contextmanager
def _file(case: Case) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        case.model.save_adapter(folder, "a", format="peft")
        yield Path(folder)


def _theirs(case: Case, folder: Path) -> Any:
    """PEFT's model of the config of a file, with random values.

    Raises:
        CannotError: PEFT has no such adapter.
    """
    with by_peft(), torch.random.fork_rng(devices=()):
        torch.manual_seed(11)
        config = real.PeftConfig.from_pretrained(str(folder))
        config.inference_mode = False
        model = real.get_peft_model(case.base.new(), config, autocast_adapter_dtype=False).eval()
        moved([("", Trained(model))])
        y = case.base.call(model)
        if (y - case.base.call(case.plain)).abs().max() < ACTS:
            raise CannotError("PEFT's adapter does nothing")
    return model


class Trained:
    """The parameters of a model that are trained."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield them."""
        return (p for p in self._model.parameters() if p.requires_grad)


def _norms(model: nn.Module) -> Tensor:
    """The norms of all gradients, which have other names and shapes in PEFT."""
    grads = (p.grad for p in model.parameters() if p.requires_grad)
    return torch.tensor(sorted(float(grad.norm()) for grad in grads if grad is not None))


def _to_peft(case: Case) -> bool:
    """PEFT loads the file, and has the same outputs."""
    with _file(case) as folder:
        _theirs(case, folder)
        try:
            with by_peft():
                theirs = real.PeftModel.from_pretrained(
                    case.base.new(), str(folder), autocast_adapter_dtype=False
                ).eval()
                y = case.base.call(theirs)
        except CannotError as error:
            # it can make such an adapter
            raise AssertionError(str(error)) from error
    return case.near(y, bound=ROUNDED)


def _from_peft(case: Case) -> bool:
    """An adapter of PEFT has PEFT's outputs here, and its gradients where they are no slope."""
    with _file(case) as folder, tempfile.TemporaryDirectory() as out:
        theirs = _theirs(case, folder)
        with by_peft():
            theirs.save_pretrained(out)
            want = case.base.call(theirs)
            want.square().sum().backward()
        loaded = case.fresh()
        loaded.load_adapter(out, load_as="a", set_active=True)
    loaded.train_adapter("a")
    loaded.eval()
    y = case.base.call(loaded)
    case.near(y, want.detach(), ROUNDED)
    if not configured(case.name, case.text).gradients_are_exact:
        y.square().sum().backward()
        torch.testing.assert_close(_norms(loaded), _norms(theirs), rtol=1e-4, atol=1e-5)
    return True


def _merge(case: Case) -> bool:
    model = copy.deepcopy(case.model)
    model.merge_adapter("a")
    case.near(case.base.call(model))
    model.reset_adapter()
    _same_base(case, model)
    assert torch.equal(case.base.call(model), case.y), "after reset"
    return True


def _compiled(base: Base, model: Any) -> Tensor:
    torch.compiler.reset()
    with torch._dynamo.config.patch(allow_rnn=True):
        return base.call(torch.compile(model, backend="eager", fullgraph=True))


@functools.cache
def _compiles(base: str) -> bool:
    """Whether the module alone compiles."""
    try:
        _compiled(BASES[base], BASES[base].new())
    except Exception:  # noqa: BLE001  whatever torch raises
        return False
    return True


def _compile(case: Case) -> bool:
    if not _compiles(case.name):
        raise CannotError("torch does not compile the module")
    return case.near(_compiled(case.base, case.model))


def _apart(case: Case, other: Any) -> bool:
    """A copy gives the same bits, and its adapter is another one."""
    assert torch.equal(case.base.call(other), case.y), "another output"
    moved(other.adapter_modules("a"), -0.5)
    assert not torch.equal(case.base.call(other), case.y), "its adapter does nothing"
    assert torch.equal(case.base.call(case.model), case.y), "its adapter is the same"
    return True


def _mixed(case: Case) -> bool:
    names = ["a", None, "a", None]
    y, plain = case.base.call(case.model, adapter_names=names), case.base.call(case.plain)
    mask = torch.tensor([name is not None for name in names]).view(-1, *(1 for _ in y.shape[1:]))
    return case.near(y, torch.where(mask, case.y, plain))


@functools.cache
def _processes(base: str) -> dict[str, str]:
    """What two processes say of each method at a base."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = run_ranks("plain_rank.py", 2, base, Path(folder) / "store", options=())
    found: list[dict[str, str]] = [json.loads(lines[-1]) for lines in outputs]
    return {
        text: said if said == found[1][text] else f"{said}, {found[1][text]}"
        for text, said in found[0].items()
    }


def _ddp(case: Case) -> bool:
    said = _processes(case.name)[case.text]
    assert said == RIGHT, said
    return True


def in_process(case: Case, rank: int, world: int) -> bool:
    """Train a part of the rows in each process; the gradients are those of all rows."""
    from torch.nn.parallel import DistributedDataParallel

    alone, model = copy.deepcopy(case.model), copy.deepcopy(case.model)
    for each in (alone, model):
        each.train_adapter("a")
        each.eval()
    case.base.call(alone).square().mean().backward()
    share = ROWS // world
    mine = slice(rank * share, (rank + 1) * share)
    # its hooks live as long as it does
    shared = DistributedDataParallel(model)
    case.base.call(shared, mine).square().mean().backward()
    want = dict(alone.named_parameters())
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.grad, want[name].grad, rtol=1e-9, atol=1e-12)
    return True


WAYS: dict[str, Callable[[Case], bool]] = {
    "train": _train,
    "save": _save,
    "to PEFT": _to_peft,
    "from PEFT": _from_peft,
    "merge": _merge,
    "compile": _compile,
    "deepcopy": lambda case: _apart(case, copy.deepcopy(case.model)),
    "pickle": lambda case: _apart(case, pickle.loads(pickle.dumps(case.model))),
    "rows": _mixed,
    "DDP": _ddp,
}

Why = dict[tuple[str, ...], str]
"""What was said, by base, method and way."""


def judged(run: Callable[[], object], why: Why, *at: str) -> str:
    """What comes of a run; the reason if it is not right."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            run()
        except AdapterZooError as error:
            # it says what to do instead
            said = REFUSED if re.search(r"Write|Leave|Keep|Add|Load", str(error)) else WRONG
            why[at] = f"{said}: {error}"
            return said
        except CannotError as error:
            why[at] = f"{NONE}: {error}"
            return NONE
        except Exception as error:  # noqa: BLE001  of any kind
            why[at] = f"{WRONG}: {type(error).__name__}: {error}"
            return WRONG
    return RIGHT


def cell(base: str, text: str, ways: Iterable[str] = WAYS, why: Why | None = None) -> str:
    """What a method does at a base: `refused`, or `right`, and the ways that are not.

    Args:
        base: the title.
        text: of the config.
        ways: some of them.
        why: gets the reasons.
    """
    why = {} if why is None else why
    made: list[Case] = []
    added = judged(lambda: made.append(Case(base, text)), why, base, text, "add")
    if added != RIGHT:
        return added
    found: dict[str, list[str]] = {}
    for way in ways:
        run = functools.partial(WAYS[way], made[0])
        found.setdefault(judged(run, why, base, text, way), []).append(way)
    found.pop(RIGHT, None)
    return "; ".join([RIGHT, *(f"{said}: {', '.join(names)}" for said, names in found.items())])


def only(text: str, ways: Container[str]) -> str:
    """A cell as `cell` gives it for some of the ways."""
    first, *others = text.split("; ")
    kept = [first]
    for part in others:
        said, _, names = part.partition(": ")
        if shown := [name for name in names.split(", ") if name in ways]:
            kept.append(f"{said}: {', '.join(shown)}")
    return "; ".join(kept)


# --- the page ---

Cells = dict[tuple[str, str], str]
"""By base and method."""


def render(found: Cells) -> str:
    """The page."""
    texts = [*dict.fromkeys(text for _, text in found)]
    parts = [part.partition(": ") for text in found.values() for part in text.split("; ")]
    alone = [said for said, _, ways in parts if not ways]
    of_ways = {
        kind: sum(len(ways.split(", ")) for said, _, ways in parts if ways and said == kind)
        for kind in (REFUSED, NONE, WRONG)
    }
    every = alone.count(RIGHT) * len(WAYS)
    total = (
        f"Of {len(found)} pairs of a module and a method or an option, {alone.count(RIGHT)} can be "
        f"added and {alone.count(REFUSED)} are refused by name. Of the {every} ways to use "
        f"those, {every - sum(of_ways.values())} are right, {of_ways[REFUSED]} are refused, and "
        f"{of_ways[NONE]} are not possible in PEFT or torch. Wrong: "
        f"{alone.count(WRONG) + of_ways[WRONG]}."
    )
    shown = [base for base in BASES if any(of == base for of, _ in found)]
    plain = _table("method", [t for t in texts if "[" not in t], shown, found)
    options = _table("option", [t for t in texts if "[" in t], WITH_OPTIONS, found)
    start, mark, _ = PAGE.read_text(encoding="utf-8").partition(MARK)
    assert mark, "the text of the page stands above the tables"
    return f"{start}{MARK}\n\n{total}\n\n{plain}\n{options}"


MARK = "<!-- `make plain` writes what follows -->"


def _table(title: str, texts: Iterable[str], bases: Iterable[str], found: Cells) -> str:
    lines = [[title, *bases], ["---", *("---" for _ in bases)]]
    lines += [[f"`{t}`", *(found.get((b, t), " ") for b in bases)] for t in texts]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def read(page: str) -> Cells:
    """The cells of a page."""
    cells: Cells = {}
    bases: list[str] = []
    for line in page.partition(MARK)[2].splitlines():
        first, *others = line[2:-2].split(" | ") if line.startswith("| ") else [""]
        if first in ("method", "option"):
            bases = others
        elif first.startswith("`"):
            pairs = zip(bases, others, strict=True)
            cells.update({(base, first.strip("`")): text for base, text in pairs if text.strip()})
    return cells


def main() -> int:
    """Run all cells, of the named bases or those that the page lacks; 1 if one is wrong."""
    is_new = sys.argv[1:] == ["--new"]
    asked = [*BASES] if is_new else sys.argv[1:] or [*BASES]
    known = read(PAGE.read_text(encoding="utf-8"))
    why: Why = {}
    for base, text in rows():
        if base in asked and installed(base) and not (is_new and (base, text) in known):
            known[base, text] = cell(base, text, why=why)
        # in the order of the rows; what was run stays if the rest is interrupted
        PAGE.write_text(render({row: known[row] for row in rows() if row in known}), "utf-8")
    wrong = {at: said for at, said in why.items() if said.startswith(WRONG)}
    sys.stderr.write("".join(f"{', '.join(at)}: {text}\n" for at, text in wrong.items()))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
