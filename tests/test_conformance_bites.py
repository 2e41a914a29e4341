"""Each check of `adapterzoo.testing` bites: methods broken on purpose, and what catches them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout

from adapterzoo.anatomy import Site
from adapterzoo.configs import AdapterConfig, architectures
from adapterzoo.contracts import Base
from adapterzoo.inject.views import Layer, RowsOf
from adapterzoo.methods.lora import LoRA, LoRAConfig
from adapterzoo.testing import ConformanceError, check_method, checks, report


@dataclass(frozen=True, kw_only=True)
class Broken(LoRAConfig):
    """A right config around a layer that subclasses break."""

    architecture: ClassVar[str] = "broken"
    layer: ClassVar[Callable[..., LoRA]] = LoRA
    __hash__ = LoRAConfig.__hash__

    def build(self, site: Site, device: torch.device, dtype: torch.dtype) -> LoRA:
        return self.layer(self, site, device, dtype)


class Right(Broken):
    """Nothing is wrong with it."""


# --- first values ---


class NotIdentityLayer(LoRA):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        nn.init.constant_(self.lora_B, 0.01)


class NotIdentity(Broken):
    layer = NotIdentityLayer


class ContiguousInputLayer(LoRA):
    """Equal bits on many processors: a product of the same numbers in another layout."""

    def forward(self, x: Tensor, base: Base) -> Tensor:
        return super().forward(x.contiguous(), base)


class ContiguousInput(Broken):
    layer = ContiguousInputLayer


class PromisesTooLittle(Broken):
    @property
    def starts_as_identity(self) -> bool:
        return False


class DeviceRandomLayer(LoRA):
    """The peers' bug: drawn where and in what dtype the layer happens to be."""

    def __init__(self, config: LoRAConfig, site: Site, device: torch.device, dtype: Any) -> None:
        super().__init__(config, site, device, dtype)
        nn.init.kaiming_uniform_(self.lora_A)


class DeviceRandom(Broken):
    layer = DeviceRandomLayer


class EqualEverywhereLayer(LoRA):
    """The peer's bug: one seed gives all layers the same values."""

    def __init__(self, config: LoRAConfig, site: Site, device: torch.device, dtype: Any) -> None:
        super().__init__(config, site, device, dtype)
        if config.init_weights_seed and not self.lora_A.is_meta:
            source = torch.Generator().manual_seed(config.init_weights_seed)
            drawn = torch.rand(self.lora_A.shape, generator=source, device="cpu", dtype=torch.float)
            with torch.no_grad():
                self.lora_A.copy_(drawn)


class EqualEverywhere(Broken):
    layer = EqualEverywhereLayer


# --- what is computed ---


class WrongMergeLayer(LoRA):
    def weight(self, w: Tensor, base: Base) -> Tensor:
        return w + 1.01 * (super().weight(w, base) - w)


class WrongMerge(Broken):
    layer = WrongMergeLayer


class SwallowsNanLayer(LoRA):
    def weight(self, w: Tensor, base: Base) -> Tensor:
        return super().weight(w, base).nan_to_num()


class SwallowsNan(Broken):
    layer = SwallowsNanLayer


class ReplacesLayer(LoRA):
    """In a stack the last one wins: what acted before is not asked."""

    def forward(self, x: Tensor, base: Base) -> Tensor:
        return base.plain(x) + (super().forward(x, base) - base(x))


class Replaces(Broken):
    layer = ReplacesLayer


class MixesTheWrongLayer(LoRA):
    """In a mixed batch each row gets the adapter of another one."""

    @classmethod
    def mixed(cls, adapters: Any, groups: Any, x: Tensor, base: Base) -> Tensor:
        return super().mixed(adapters[::-1], groups, x, base)


class MixesTheWrong(Broken):
    layer = MixesTheWrongLayer


class UnusedParameterLayer(LoRA):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.unused = nn.Parameter(torch.ones_like(self.lora_A))


class UnusedParameter(Broken):
    layer = UnusedParameterLayer


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


class WrongGradientLayer(LoRA):
    def forward(self, x: Tensor, base: Base) -> Tensor:
        y = base(x)
        return y + Doubled.apply(super().forward(x, base) - y)


class WrongGradient(Broken):
    layer = WrongGradientLayer


class AlternatesLayer(LoRA):
    """The gradient of every second call is lost, as with a cache that recomputation meets."""

    calls = 0

    def forward(self, x: Tensor, base: Base) -> Tensor:
        self.calls += torch.is_grad_enabled()
        if self.calls % 2 or not torch.is_grad_enabled():
            return super().forward(x, base)
        with torch.no_grad():
            update = super().forward(x, base) - base(x)
        return base(x) + update


class Alternates(Broken):
    layer = AlternatesLayer


# --- shapes, dtypes, devices, modes ---


class NeedsContiguousLayer(LoRA):
    def forward(self, x: Tensor, base: Base) -> Tensor:
        return super().forward(x.view(x.numel()).view(x.shape), base)


class NeedsContiguous(Broken):
    layer = NeedsContiguousLayer


class NeedsThreeDimensionsLayer(LoRA):
    def forward(self, x: Tensor, base: Base) -> Tensor:
        if x.is_floating_point():
            _batch, _tokens, _features = x.shape
        return super().forward(x, base)


class NeedsThreeDimensions(Broken):
    layer = NeedsThreeDimensionsLayer


class RowsMeetLayer(LoRA):
    def forward(self, x: Tensor, base: Base) -> Tensor:
        y = base(x)
        update = super().forward(x, base) - y
        return y + (update - update.mean(0, keepdim=True) if update.dim() > 2 else update)


class RowsMeet(Broken):
    layer = RowsMeetLayer


class PromotesLayer(LoRA):
    """A magnitude of float32 in the chain."""

    def forward(self, x: Tensor, base: Base) -> Tensor:
        return super().forward(x, base) * torch.ones(1, dtype=torch.float32, device=x.device)


class Promotes(Broken):
    layer = PromotesLayer


class PlainAttributeLayer(LoRA):
    def __init__(self, config: LoRAConfig, site: Site, device: torch.device, dtype: Any) -> None:
        super().__init__(config, site, device, dtype)
        self.cache = {"ones": torch.ones(site.d_out, device=device, dtype=dtype)}

    def forward(self, x: Tensor, base: Base) -> Tensor:
        y = super().forward(x, base)
        return y * self.cache["ones"].to(y.dtype)


class PlainAttribute(Broken):
    layer = PlainAttributeLayer


class HiddenInClosureLayer(LoRA):
    def __init__(self, config: LoRAConfig, site: Site, device: torch.device, dtype: Any) -> None:
        super().__init__(config, site, device, dtype)
        ones = torch.ones(site.d_out, device=device, dtype=dtype)
        self.times = Closure(lambda: ones)


class Closure:
    """Holds a function that copies and pickles cannot look into."""

    def __init__(self, function: Callable[[], Tensor]) -> None:
        self.function = function

    def __reduce__(self) -> tuple[Any, ...]:
        return Closure, (len,)


class HiddenInClosure(Broken):
    layer = HiddenInClosureLayer


class CpuTemporaryLayer(LoRA):
    def forward(self, x: Tensor, base: Base) -> Tensor:
        y = super().forward(x, base)
        return y * torch.ones(y.shape[-1], dtype=y.dtype, device="cpu")


class CpuTemporary(Broken):
    layer = CpuTemporaryLayer


class ReadsParametersLayer(LoRA):
    """DataParallel's replicas have no parameters, only tensors in their places."""

    def forward(self, x: Tensor, base: Base) -> Tensor:
        return super().forward(x, base) + 0.0 * self._parameters["lora_B"].sum()


class ReadsParameters(Broken):
    layer = ReadsParametersLayer


class IgnoresEvalLayer(LoRA):
    def forward(self, x: Tensor, base: Base) -> Tensor:
        return super().forward(dropout(x, self.dropout, True) if self.dropout else x, base)


class IgnoresEval(Broken):
    layer = IgnoresEvalLayer


class NeverDropsLayer(LoRA):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.dropout = 0.0


class NeverDrops(Broken):
    layer = NeverDropsLayer


class BreaksGraphLayer(LoRA):
    def forward(self, x: Tensor, base: Base) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(x, base)


class BreaksGraph(Broken):
    layer = BreaksGraphLayer


# --- what is left behind ---


class ChangesInputLayer(LoRA):
    def forward(self, x: Tensor, base: Base) -> Tensor:
        y = super().forward(x, base)
        if not torch.is_grad_enabled() and x.is_floating_point():
            x.clamp_(-0.5, 0.5)
        return y


class ChangesInput(Broken):
    layer = ChangesInputLayer


class ChangesBaseLayer(LoRA):
    def forward(self, x: Tensor, base: Base) -> Tensor:
        with torch.no_grad():
            base.weight.mul_(1.001)
        return super().forward(x, base)


class ChangesBase(Broken):
    layer = ChangesBaseLayer


class LeavesMarkLayer(LoRA):
    def forward(self, x: Tensor, base: Any) -> Tensor:
        inner = base
        while not isinstance(inner, Layer):
            inner = inner._base if isinstance(inner, RowsOf) else inner._inner
        vars(inner._module)["mark"] = 1
        return super().forward(x, base)


class LeavesMark(Broken):
    layer = LeavesMarkLayer


class SharesWithOthersLayer(LoRA):
    """One piece of memory for all adapters of a model: the second corrupts the first."""

    memory: ClassVar[dict[object, nn.Parameter]] = {}

    def __init__(self, config: LoRAConfig, site: Site, device: torch.device, dtype: Any) -> None:
        super().__init__(config, site, device, dtype)
        key = (site.path, site.role, device.type, dtype)
        self.lora_A = self.memory.setdefault(key, self.lora_A)


class SharesWithOthers(Broken):
    layer = SharesWithOthersLayer


class SharesWithCopiesLayer(LoRA):
    def __deepcopy__(self, memo: dict[int, Any]) -> LoRA:
        return self


class SharesWithCopies(Broken):
    layer = SharesWithCopiesLayer


class ForgetsAtSaveLayer(LoRA):
    """A random projection that is not in the state dict."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        signs = torch.rand(self.lora_B.shape[:1], device="cpu", dtype=torch.float32) + 0.5
        self.register_buffer("signs", signs.to(self.lora_B), persistent=False)

    def forward(self, x: Tensor, base: Base) -> Tensor:
        y = base(x)
        return y + (super().forward(x, base) - y) * self.signs.to(y.dtype)

    def weight(self, w: Tensor, base: Base) -> Tensor:
        return w + (super().weight(w, base) - w) * self.signs[:, None]


class ForgetsAtSave(Broken):
    layer = ForgetsAtSaveLayer


_numbers = itertools.count()


class NumberedKeysLayer(LoRA):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.register_buffer(f"number_{next(_numbers)}", self.lora_B.detach().clone())


class NumberedKeys(Broken):
    layer = NumberedKeysLayer


class SmallerOnMetaLayer(LoRA):
    def __init__(self, config: LoRAConfig, site: Site, device: torch.device, dtype: Any) -> None:
        rank = config.replace(r=1) if device.type == "meta" else config
        super().__init__(rank, site, device, dtype)


class SmallerOnMeta(Broken):
    layer = SmallerOnMetaLayer


# --- configs ---


class NoCall(Broken):
    def __repr__(self) -> str:
        return f"NoCall(rank {self.r})"


class LosesField(Broken):
    def to_dict(self) -> dict[str, Any]:
        return {k: v for k, v in super().to_dict().items() if k != "init_weights_seed"}


class TakesAnything(Broken):
    @classmethod
    def _from_fields(cls, fields: dict[str, Any]) -> AdapterConfig:
        return super()._from_fields({k: v for k, v in fields.items() if k != "no_such_field"})


class ChangesItself(Broken):
    def build(self, site: Site, device: torch.device, dtype: torch.dtype) -> LoRA:
        object.__setattr__(self, "exclude_modules", ("embed_tokens", *(self.exclude_modules or ())))
        return super().build(site, device, dtype)


# what catches which: all of it, and nothing else. A second name in a line says that the same fault
# is seen from two sides (a wrong merge in a stack too)
TABLE: dict[type[Broken], set[str]] = {
    NotIdentity: {"identity_at_birth", "stacks"},
    ContiguousInput: {"identity_at_birth"},
    PromisesTooLittle: {"identity_at_birth"},
    DeviceRandom: {"initial_values"},
    EqualEverywhere: {"initial_values"},
    WrongMerge: {"merge_equals_forward", "stacks"},
    SwallowsNan: {"not_finite_refuses_to_merge"},
    Replaces: {"stacks"},
    MixesTheWrong: {"mixed_rows"},
    UnusedParameter: {"gradients"},
    WrongGradient: {"gradcheck"},
    NeedsContiguous: {"any_leading_shape", "identity_at_birth"},
    NeedsThreeDimensions: {"any_leading_shape"},
    RowsMeet: {"any_leading_shape", "merge_equals_forward", "mixed_rows", "stacks"},
    PlainAttribute: {"state_is_registered", "device_follows", "save_and_load"},
    HiddenInClosure: {"state_is_registered"},
    CpuTemporary: {"device_follows"},
    ReadsParameters: {"replicas_work"},
    IgnoresEval: {"modes_reach_dropout"},
    NeverDrops: {"modes_reach_dropout"},
    BreaksGraph: {"compiles"},
    LeavesMark: {"take_leaves_no_trace"},
    SharesWithCopies: {"copies_are_independent"},
    ForgetsAtSave: {"save_and_load"},
    # a file is compared with the shapes on the meta device before memory is taken for it
    SmallerOnMeta: {"counts_parameters", "save_and_load"},
    NoCall: {"repr_is_a_call"},
    LosesField: {"dict_round_trip"},
    TakesAnything: {"unknown_fields_raise"},
}

# faults that much of the suite trips over, with the check that is there for them
BROAD: dict[type[Broken], str] = {
    Alternates: "gradient_checkpointing",
    Promotes: "dtype_follows",
    ChangesInput: "leaves_input_alone",
    ChangesBase: "inactive_is_base",
    SharesWithOthers: "two_adapters_do_not_meet",
    NumberedKeys: "save_and_load",
    ChangesItself: "config_is_frozen",
}


@pytest.mark.parametrize("method", TABLE, ids=lambda method: method.__name__)
def test_a_broken_method_is_caught(method: type[Broken], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(architectures._entries, "broken", method)
    expected = TABLE[method]
    # compiling is slow: only where it is what shall fail
    names = [n for n in checks if n != "compiles" or n in expected]
    failures = report(method(), only=names, kinds=["linear"])
    assert {f.check for f in failures} == expected, "\n".join(map(str, failures))


@pytest.mark.parametrize("method", BROAD, ids=lambda method: method.__name__)
def test_a_method_broken_all_over_is_caught(
    method: type[Broken], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(architectures._entries, "broken", method)
    assert report(method(), only=[BROAD[method]])


def test_a_right_method_is_not_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(architectures._entries, "broken", Right)
    check_method(Right(), only=[name for name in checks if name != "compiles"])


class DoubledUpdateLayer(LoRA):
    """Right, but not what the `mixed` that it inherits computes."""

    def forward(self, x: Tensor, base: Base) -> Tensor:
        y = base(x)
        return y + 2 * (super().forward(x, base) - y)


class DoubledUpdate(Broken):
    layer = DoubledUpdateLayer


def test_a_forward_of_its_own_is_not_mixed_as_the_inherited_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(architectures._entries, "broken", DoubledUpdate)
    assert not report(DoubledUpdate(), only=["mixed_rows"])


def test_every_check_bites() -> None:
    assert set.union(*TABLE.values(), BROAD.values()) == set(checks)


def test_the_error_has_every_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(architectures._entries, "broken", NotIdentity)
    with pytest.raises(ConformanceError) as caught:
        check_method(NotIdentity(), only=["identity_at_birth", "stacks", "gradients"])
    message = str(caught.value)
    assert f"2 of {len(checks)} checks failed" in message
    assert "identity_at_birth [linear, float32]: a fresh adapter changes the output by" in message
    assert "stacks [conv1d, float32]" in message
    assert "gradients" not in message
