"""Each check of `adapterzoo.testing` bites: methods broken on purpose, and what catches them."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from swept import all_but
from torch import nn
from torch.nn.functional import dropout

from adapterzoo.config import architectures
from adapterzoo.inject.layers import LayerCall, SlicedLayer
from adapterzoo.methods.low_rank import LoRA, LoRAConfig
from adapterzoo.testing import ConformanceError, check_method, checks, report


@dataclass(frozen=True, kw_only=True)
class Broken(LoRAConfig):
    """A right config around a layer that subclasses break."""

    architecture: ClassVar[str] = "broken"
    layer: ClassVar[Callable[..., LoRA]] = LoRA
    __hash__ = LoRAConfig.__hash__

    def build(self, site, device, dtype):
        return self.layer(self, site, device, dtype)


class Right(Broken):
    """Nothing is wrong with it."""


# what catches which: all of it, and nothing else. A second name says that the same fault is seen
# from two sides (a wrong merge in a stack too)
TABLE: dict[type[Broken], set[str]] = {}
# faults that much of the suite trips over, with the check that is there for them
BROAD: dict[type[Broken], str] = {}


def breaks(*caught_by, broad=False):
    """Enter a broken config, or a broken layer with a config around it, into one of the tables."""

    def enter(made):
        config = made
        if issubclass(made, LoRA):
            config = type(made.__name__, (Broken,), {"layer": made, "__module__": __name__})
            # a pickled model finds both by their names
            made.__name__ = made.__qualname__ = f"{made.__name__}Layer"
            globals()[made.__name__] = made
        if broad:
            (BROAD[config],) = caught_by
        else:
            TABLE[config] = set(caught_by)
        return config

    return enter


# --- first values ---


@breaks("identity_at_birth", "stacks")
class NotIdentity(LoRA):
    def __init__(self, *args):
        super().__init__(*args)
        nn.init.constant_(self.lora_B, 0.01)


@breaks("identity_at_birth")
class ContiguousInput(LoRA):
    """Equal bits on many processors: a product of the same numbers in another layout."""

    def forward(self, x, base):
        return super().forward(x.contiguous(), base)


@breaks("identity_at_birth")
class PromisesTooLittle(Broken):
    @property
    def starts_as_identity(self):
        return False


@breaks("initial_values")
class DeviceRandom(LoRA):
    """The peers' bug: drawn where and in what dtype the layer happens to be."""

    def __init__(self, config, site, device, dtype):
        super().__init__(config, site, device, dtype)
        nn.init.kaiming_uniform_(self.lora_A)


@breaks("initial_values")
class EqualEverywhere(LoRA):
    """The peer's bug: one seed gives all layers the same values."""

    def __init__(self, config, site, device, dtype):
        super().__init__(config, site, device, dtype)
        if config.init_weights_seed and not self.lora_A.is_meta:
            source = torch.Generator().manual_seed(config.init_weights_seed)
            drawn = torch.rand(self.lora_A.shape, generator=source, device="cpu", dtype=torch.float)
            with torch.no_grad():
                self.lora_A.copy_(drawn)


# --- what is computed ---


@breaks("merge_equals_forward", "stacks")
class WrongMerge(LoRA):
    def merged_weight(self, w, base):
        return w + 1.01 * (super().merged_weight(w, base) - w)


@breaks("not_finite_refuses_to_merge")
class SwallowsNan(LoRA):
    def merged_weight(self, w, base):
        return super().merged_weight(w, base).nan_to_num()


@breaks("stacks")
class Replaces(LoRA):
    """In a stack the last one wins: what acted before is not asked."""

    def forward(self, x, base):
        return base.original(x) + (super().forward(x, base) - base(x))


@breaks("mixed_rows")
class MixesTheWrong(LoRA):
    """In a mixed batch each row gets the adapter of another one."""

    def forward_rows(self, stacks, groups, x, base):
        turned = {name: own.flip(0) if name == "lora_A" else own for name, own in stacks.items()}
        return super().forward_rows(turned, groups, x, base)


@breaks("gradients")
class UnusedParameter(LoRA):
    def __init__(self, *args):
        super().__init__(*args)
        self.unused = nn.Parameter(torch.ones_like(self.lora_A))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


@breaks("gradcheck")
class WrongGradient(LoRA):
    def forward(self, x, base):
        y = base(x)
        return y + Doubled.apply(super().forward(x, base) - y)


@breaks("gradient_checkpointing", broad=True)
class Alternates(LoRA):
    """The gradient of every second call is lost, as with a cache that recomputation meets."""

    calls = 0

    def forward(self, x, base):
        self.calls += torch.is_grad_enabled()
        if self.calls % 2 or not torch.is_grad_enabled():
            return super().forward(x, base)
        with torch.no_grad():
            update = super().forward(x, base) - base(x)
        return base(x) + update


# --- shapes, dtypes, devices, modes ---


@breaks("any_leading_shape", "identity_at_birth")
class NeedsContiguous(LoRA):
    def forward(self, x, base):
        return super().forward(x.view(x.numel()).view(x.shape), base)


@breaks("any_leading_shape")
class NeedsThreeDimensions(LoRA):
    def forward(self, x, base):
        if x.is_floating_point():
            _batch, _tokens, _features = x.shape
        return super().forward(x, base)


@breaks(
    "any_leading_shape", "merge_equals_forward", "mixed_rows", "padding_changes_nothing", "stacks"
)
class RowsMeet(LoRA):
    def forward(self, x, base):
        y = base(x)
        update = super().forward(x, base) - y
        return y + (update - update.mean(0, keepdim=True) if update.dim() > 2 else update)


@breaks("padding_changes_nothing", "merge_equals_forward", "stacks")
class ReadsPadding(LoRA):
    def forward(self, x, base):
        y = base(x)
        update = super().forward(x, base) - y
        gate = torch.sigmoid(update).mean(1, keepdim=True) if update.dim() == 3 else 1.0
        return y + update * gate


@breaks("dtype_follows", broad=True)
class Promotes(LoRA):
    """A magnitude of float32 in the chain."""

    def forward(self, x, base):
        return super().forward(x, base) * torch.ones(1, dtype=torch.float32, device=x.device)


@breaks("state_is_registered", "device_follows", "save_and_load")
class PlainAttribute(LoRA):
    def __init__(self, config, site, device, dtype):
        super().__init__(config, site, device, dtype)
        self.cache = {"ones": torch.ones(site.d_out, device=device, dtype=dtype)}

    def forward(self, x, base):
        y = super().forward(x, base)
        return y * self.cache["ones"].to(y.dtype)


@breaks("state_is_registered")
class HiddenInClosure(LoRA):
    def __init__(self, config, site, device, dtype):
        super().__init__(config, site, device, dtype)
        ones = torch.ones(site.d_out, device=device, dtype=dtype)
        self.times = Closure(lambda: ones)


class Closure:
    """Holds a function that copies and pickles cannot look into."""

    def __init__(self, function):
        self.function = function

    def __reduce__(self):
        return Closure, (len,)


@breaks("device_follows")
class CpuTemporary(LoRA):
    def forward(self, x, base):
        y = super().forward(x, base)
        return y * torch.ones(y.shape[-1], dtype=y.dtype, device="cpu")


@breaks("replicas_work")
class ReadsParameters(LoRA):
    """DataParallel's replicas have no parameters, only tensors in their places."""

    def forward(self, x, base):
        return super().forward(x, base) + 0.0 * self._parameters["lora_B"].sum()


@breaks("modes_reach_dropout")
class IgnoresEval(LoRA):
    def forward(self, x, base):
        return super().forward(dropout(x, self.dropout, True) if self.dropout else x, base)


@breaks("modes_reach_dropout")
class NeverDrops(LoRA):
    def __init__(self, *args):
        super().__init__(*args)
        self.dropout = 0.0


@breaks("compiles")
class BreaksGraph(LoRA):
    def forward(self, x, base):
        torch._dynamo.graph_break()
        return super().forward(x, base)


# --- what is left behind ---


@breaks("leaves_input_alone", broad=True)
class ChangesInput(LoRA):
    def forward(self, x, base):
        y = super().forward(x, base)
        if not torch.is_grad_enabled() and x.is_floating_point():
            x.clamp_(-0.5, 0.5)
        return y


@breaks("inactive_is_base", broad=True)
class ChangesBase(LoRA):
    def forward(self, x, base):
        with torch.no_grad():
            base.weight.mul_(1.001)
        return super().forward(x, base)


@breaks("take_leaves_no_trace")
class LeavesMark(LoRA):
    def forward(self, x, base):
        inner = base
        while not isinstance(inner, LayerCall):
            inner = inner._base if isinstance(inner, SlicedLayer) else inner._inner
        vars(inner._module)["mark"] = 1
        return super().forward(x, base)


@breaks("two_adapters_do_not_meet", broad=True)
class SharesWithOthers(LoRA):
    """One piece of memory for all adapters of a model: the second corrupts the first."""

    memory: ClassVar[dict[object, nn.Parameter]] = {}

    def __init__(self, config, site, device, dtype):
        super().__init__(config, site, device, dtype)
        key = (site.path, site.role, device.type, dtype)
        self.lora_A = self.memory.setdefault(key, self.lora_A)


@breaks("copies_are_independent")
class SharesWithCopies(LoRA):
    def __deepcopy__(self, memo):
        return self


@breaks("save_and_load")
class ForgetsAtSave(LoRA):
    """A random projection that is not in the state dict."""

    def __init__(self, *args):
        super().__init__(*args)
        signs = torch.rand(self.lora_B.shape[:1], device="cpu", dtype=torch.float32) + 0.5
        self.register_buffer("signs", signs.to(self.lora_B), persistent=False)

    def forward(self, x, base):
        y = base(x)
        return y + (super().forward(x, base) - y) * self.signs.to(y.dtype)

    def merged_weight(self, w, base):
        return w + (super().merged_weight(w, base) - w) * self.signs[:, None]


_numbers = itertools.count()


@breaks("save_and_load", broad=True)
class NumberedKeys(LoRA):
    def __init__(self, *args):
        super().__init__(*args)
        self.register_buffer(f"number_{next(_numbers)}", self.lora_B.detach().clone())


@breaks("counts_parameters", "save_and_load")
class SmallerOnMeta(LoRA):
    def __init__(self, config, site, device, dtype):
        rank = config.replace(r=1) if device.type == "meta" else config
        super().__init__(rank, site, device, dtype)


# --- configs ---


@breaks("repr_is_a_call")
class NoCall(Broken):
    def __repr__(self):
        return f"NoCall(rank {self.r})"


@breaks("dict_round_trip")
class LosesField(Broken):
    def to_dict(self):
        return {k: v for k, v in super().to_dict().items() if k != "init_weights_seed"}


@breaks("unknown_fields_raise")
class TakesAnything(Broken):
    @classmethod
    def _from_fields(cls, fields):
        return super()._from_fields({k: v for k, v in fields.items() if k != "no_such_field"})


@breaks("config_is_frozen", broad=True)
class ChangesItself(Broken):
    def build(self, site, device, dtype):
        object.__setattr__(self, "init_weights_seed", (self.init_weights_seed or 0) + 1)
        return super().build(site, device, dtype)


@pytest.fixture
def enter(monkeypatch):
    """Registers a config class for the time of the test, and makes one of it."""

    def registered(method):
        monkeypatch.setitem(architectures._entries, "broken", method)
        return method()

    return registered


@pytest.mark.parametrize(
    "method", all_but([*TABLE][::5], TABLE), ids=lambda method: method.__name__
)
def test_a_broken_method_is_caught(method, enter):
    expected = TABLE[method]
    # compiling is slow: only where it is what shall fail
    names = [n for n in checks if n != "compiles" or n in expected]
    failures = report(enter(method), only=names, kinds=["linear"])
    assert {f.check for f in failures} == expected, "\n".join(map(str, failures))


@pytest.mark.parametrize("method", BROAD, ids=lambda method: method.__name__)
def test_a_method_broken_all_over_is_caught(method, enter):
    assert report(enter(method), only=[BROAD[method]])


def test_a_right_method_is_not_caught(enter):
    check_method(enter(Right), only=[name for name in checks if name != "compiles"])


class DoubledUpdateLayer(LoRA):
    """Right, but not what the `forward_rows` that it inherits computes."""

    def forward(self, x, base):
        y = base(x)
        return y + 2 * (super().forward(x, base) - y)


class DoubledUpdate(Broken):
    layer = DoubledUpdateLayer


def test_a_forward_of_its_own_is_not_mixed_as_the_inherited_one(enter):
    assert not report(enter(DoubledUpdate), only=["mixed_rows"])


def test_every_check_bites():
    assert set.union(*TABLE.values(), BROAD.values()) == set(checks)


def test_the_error_has_every_failure(enter):
    with pytest.raises(ConformanceError) as caught:
        check_method(enter(NotIdentity), only=["identity_at_birth", "stacks", "gradients"])
    message = str(caught.value)
    assert f"2 of {len(checks)} checks failed" in message
    assert "identity_at_birth [linear, float32]: a fresh adapter changes the output by" in message
    assert "stacks [conv1d, float32]" in message
    assert "gradients" not in message
