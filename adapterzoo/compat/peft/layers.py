"""PEFT's attributes of a layer with adapters, such as `layer.lora_A["default"].weight`.

Layers here are not wrapped: `adapter_modules` gives their adapters. Code written for PEFT's
wrappers finds their attributes on the layer itself, unless the layer's class has an attribute of
that name. Which adapters exist, are active or merged is a fact of the model: a layer's method that
changes it changes the model, or does nothing if that is already so, since frameworks call it at
every layer. Scalings are each layer's own.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from adapterzoo.contracts import Adapter
from adapterzoo.errors import StateError, unknown_name
from adapterzoo.inject import changes
from adapterzoo.inject.adapted import Adapted, adapters_of, answer_at_layers
from adapterzoo.inject.layers import ExpertAdapters, FusedAdapters, matrix, stores_transposed
from adapterzoo.methods._copies import LayerCopy, TokenRows
from adapterzoo.methods.low_rank.dora import Magnitudes
from adapterzoo.methods.low_rank.factors import LowRank
from adapterzoo.methods.lycoris.lycoris import Lycoris
from adapterzoo.model import merging
from adapterzoo.model.activation import model_of
from adapterzoo.model.state import AdapterState


def parts_of(layer: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield the names and adapters of a layer, part by part.

    Args:
        layer: any module; empty for one without adapters.
    """
    for name, adapter in adapters_of(layer).items() if isinstance(layer, Adapted) else ():
        yield from ((name, leaf) for leaf in _leaves(adapter))


def _leaves(adapter: nn.Module) -> Iterator[nn.Module]:
    if isinstance(adapter, (ExpertAdapters, FusedAdapters)):
        for part in adapter.children():
            yield from _leaves(part)
    else:
        yield adapter


@dataclass(frozen=True, slots=True)
class Factor:
    """A matrix of an adapter, in the form of PEFT's layers.

    Attributes:
        weight: the parameter itself; at a convolution its view as a convolution's weight.
        bias: bias of B; None if there is none.
    """

    weight: Tensor
    bias: Tensor | None = None


class ByAdapter(MutableMapping[str, Any]):
    """A value of each of a layer's adapters, by name; assigning one changes the adapter."""

    def __init__(
        self,
        layer: Any,
        kind: type[nn.Module] | tuple[type[nn.Module], ...],
        attribute: str,
        at_embedding: bool | None = None,
    ) -> None:
        """Select the adapters of one kind.

        Args:
            layer: a layer with adapters.
            kind: kind of the adapters, or several kinds.
            attribute: attribute of an adapter that holds the value.
            at_embedding: True: only adapters at an embedding; False: only others; None: all.
        """
        self._layer, self._kind, self._attribute = layer, kind, attribute
        self._at_embedding = at_embedding

    @property
    def found(self) -> dict[str, Any]:
        """The adapters by name."""
        parts = ((name, p) for name, p in parts_of(self._layer) if isinstance(p, self._kind))
        place = self._at_embedding
        return {n: p for n, p in parts if place in (None, getattr(p, "at_embedding", False))}

    def __getitem__(self, name: str) -> Any:
        """Return the value of an adapter."""
        part = self.found[name]
        value = getattr(part, self._attribute)
        if self._attribute not in ("lora_A", "lora_B") or part.at_embedding:
            return Factor(value) if self._attribute == "m" else value
        kernel = getattr(self._layer, "kernel_size", ())
        if kernel:
            ones = kernel if self._attribute == "lora_A" else (1,) * len(kernel)
            value = value.view(len(value), -1, *ones)
        bias = getattr(part, "lora_B_bias", None) if self._attribute == "lora_B" else None
        return Factor(value, bias)

    def __getattr__(self, name: str) -> Any:
        """Return the value of an adapter that is named like an attribute."""
        if name.startswith("_") or name not in self.found:
            raise AttributeError(name)
        return self[name]

    def __setitem__(self, name: str, value: Any) -> None:
        """Give an adapter another value, such as a scaling."""
        setattr(self.found[name], self._attribute, value)

    def __delitem__(self, name: str) -> None:
        """Refuse to delete; `delete_adapter` does that.

        Raises:
            StateError: always.
        """
        raise StateError(f"{self._attribute}[{name!r}] stays. Write delete_adapter({name!r}).")

    def __iter__(self) -> Iterator[str]:
        """Yield the names of the adapters."""
        return iter(self.found)

    def __len__(self) -> int:
        """Return the number of adapters."""
        return len(self.found)


def active_in(layer: Any) -> list[str]:
    """Return the names of the active adapters; for a copied layer, those that have a copy of it.

    For other layers, as in PEFT, include active adapters that the layer lacks.

    Args:
        layer: a layer with adapters.
    """
    active = layer._link.active
    setup = active.plan.setup
    if setup is None and active.default.plan.setup is None:
        names = disabled_in(_state(layer))
    else:
        names = [] if setup is None else list(setup.flatten())
    return names if is_tuned(layer) else [name for name in names if name in adapters_of(layer)]


def is_tuned(layer: object) -> bool:
    """Return whether a layer has adapters, and not only copies of itself or of its rows.

    Args:
        layer: any object.
    """
    copied = (LayerCopy, TokenRows)
    parts = (part for _, part in parts_of(layer))
    return any(isinstance(part, Adapter) and not isinstance(part, copied) for part in parts)


def disabled_in(state: AdapterState) -> list[str]:
    """Return the names that `disable_adapters` disabled, which PEFT counts among the active ones.

    Args:
        state: state of a model in which no adapter is active.
    """
    names = () if state.disabled is None else state.disabled[0].flatten()
    return [name for name in names if name in state.records]


def _state(layer: Any) -> AdapterState:
    found: AdapterState = model_of(layer._link.active)._adapter_state
    return found


def merged_in(layer: Any) -> list[str]:
    """Return the names of the adapters that are merged into a layer.

    Args:
        layer: a layer with adapters.
    """
    return [name for name in _state(layer).merged if name in adapters_of(layer)]


def delta_weight(layer: Any, name: str) -> Tensor:
    """Return the change of a layer's weight by an adapter, as the layer stores it.

    Args:
        layer: the layer with the adapter.
        name: the adapter's name.

    Raises:
        UnknownNameError: the layer does not have the adapter.
        StateError: the adapter is not a change of the weight alone.
    """
    there = adapters_of(layer)
    if name not in there:
        raise unknown_name("", "adapter", name, there)
    originals = model_of(layer._link.active)._adapter_state.originals.get(layer._link.path, {})
    parameter, change, _ = next(changes(layer, there[name], originals))
    change = change.mT if stores_transposed(layer, parameter or "weight") else change
    stored = layer._parameters[parameter or "weight"]
    return change.reshape(stored.shape).to(stored.dtype)


@dataclass(frozen=True, slots=True)
class TokensLayer:
    """Rows of a table, in the form of PEFT's layers.

    Attributes:
        trainable_tokens_delta: name of an adapter → its rows `[tokens, d]`.
    """

    trainable_tokens_delta: ByAdapter


class ByConfig(ByAdapter):
    """A number that the config of each adapter has for a layer, by name; it cannot be changed."""

    def __getitem__(self, name: str) -> Any:
        """Return the number of an adapter."""
        if name not in self.found:
            raise KeyError(name)
        link = self._layer._link
        config = model_of(link.active)._adapter_state.records[name].config
        return getattr(config, self._attribute)(link.path)

    def __setitem__(self, name: str, value: Any) -> None:
        """Refuse to change a config.

        Raises:
            StateError: always.
        """
        raise StateError(f"the config of {name!r} stays. Write scaling[{name!r}] = ….")


def _values(attribute: str, at_embedding: bool | None = None) -> Callable[[Any], ByAdapter]:
    return lambda layer: ByAdapter(layer, LowRank, attribute, at_embedding)


def _widths(layer: Any) -> tuple[int, int]:
    if isinstance(layer, nn.Embedding):
        return layer.num_embeddings, layer.embedding_dim
    if hasattr(layer, "in_channels"):
        return layer.in_channels, layer.out_channels
    if getattr(layer, "weight", None) is None:
        raise AttributeError("a layer of several weights has no width")
    w = matrix(layer)
    return w.shape[-1], w.shape[-2]


# --- methods that change the model ---


def set_adapter(
    layer: Any, adapter_names: str | Sequence[str], inference_mode: bool = False
) -> None:
    """Activate adapters in the model, and train only them; disabled adapters stay disabled.

    Args:
        layer: a layer with adapters.
        adapter_names: a name, or several; unknown ones are ignored.
        inference_mode: whether to train nothing.
    """
    model, own = model_of(layer._link.active), adapters_of(layer)
    given = [adapter_names] if isinstance(adapter_names, str) else adapter_names
    names = [name for name in given if name in model._adapter_state.records]
    trained = [p.requires_grad for n in names if n in own for p in own[n].parameters()]
    if names == active_in(layer) and all(each is not inference_mode for each in trained):
        return
    was_disabled = is_disabled(layer)
    if names:
        model.set_adapter(names, inference_mode=inference_mode)
    else:
        model.set_active_adapters(None)
    if was_disabled and names:
        model.disable_adapters()


def is_disabled(layer: Any) -> bool:
    """Return whether no adapter is active, because of `disable_adapters`.

    Args:
        layer: a layer with adapters.
    """
    return layer._link.active.default.plan.setup is None and bool(disabled_in(_state(layer)))


def enable_adapters(layer: Any, enabled: bool) -> None:
    """Disable the active adapters of the model, or enable them again.

    Args:
        layer: a layer with adapters.
        enabled: whether they act.
    """
    model = model_of(layer._link.active)
    if enabled and is_disabled(layer):
        model.enable_adapters()
    elif not enabled and layer._link.active.default.plan.setup is not None:
        unmerge(layer)
        model.disable_adapters()


def delete_adapter(layer: Any, adapter_name: str) -> None:
    """Delete an adapter of the model.

    Args:
        layer: a layer with adapters.
        adapter_name: name of the adapter; an unknown one is ignored.

    Raises:
        StateError: the adapter is in use.
    """
    model = model_of(layer._link.active)
    if adapter_name in model._adapter_state.records:
        model.delete_adapter(adapter_name)


def merge(layer: Any, safe_merge: bool = False, adapter_names: Sequence[str] | None = None) -> None:
    """Merge adapters into the weights of the model.

    A layer in which they are already merged is written again with its current scaling.

    Args:
        layer: a layer with adapters.
        safe_merge: has no effect: weights that are not finite are always refused.
        adapter_names: names in the order in which they act; None: the active ones.

    Raises:
        StateError: an adapter cannot be merged.
    """
    model, path = model_of(layer._link.active), layer._link.path
    state = model._adapter_state
    asked = active_in(layer) if adapter_names is None else adapter_names
    new = [n for n in asked if n in state.records and n not in state.merged]
    if new:
        merging.merge(model, new)
    elif path in state.originals:
        with torch.no_grad():
            merging.write(model, path, state.merged)


def unmerge(layer: Any) -> None:
    """Restore all weights of the model to their values before merging.

    Args:
        layer: a layer with adapters.
    """
    if _state(layer).merged:
        merging.reset(model_of(layer._link.active))


# --- methods of the layer alone ---

_SCALED = LowRank, Lycoris


def set_scale(layer: Any, adapter: str, scale: float) -> None:
    """Multiply the scaling that an adapter had in its config.

    Args:
        layer: a layer with adapters.
        adapter: name of the adapter; one that the layer lacks is ignored.
        scale: the factor.

    Raises:
        StateError: the adapter has no scaling, and the factor is not 1.
    """
    record, path = _state(layer).records.get(adapter), layer._link.path
    for name, part in parts_of(layer):
        if name == adapter and isinstance(part, _SCALED):
            # the parts of a layer share its name
            placement: Any = cast("Any", record).places[path][0]
            part.scaling = scale * placement.config.scaling_at(placement.site.name)
        elif name == adapter and scale != 1:
            raise StateError(f"{adapter!r} has no scaling. Write 1 in place of {scale!r}.")


def scale_layer(layer: Any, scale: float) -> None:
    """Multiply the scalings of the active adapters.

    Args:
        layer: a layer with adapters.
        scale: the factor.

    Raises:
        StateError: an adapter has no scaling, and the factor is not 1.
    """
    active = active_in(layer)
    for name, part in parts_of(layer):
        if name in active and isinstance(part, _SCALED):
            part.scaling *= scale
        elif name in active and scale != 1:
            raise StateError(f"{name!r} has no scaling. Write 1 in place of {scale!r}.")


def unscale_layer(layer: Any, scale: float | None = None) -> None:
    """Undo `scale_layer`.

    Args:
        layer: a layer with adapters.
        scale: the factor; None: that of all calls.

    Raises:
        StateError: an adapter has no scaling, and the factor is not 1.
    """
    if scale is not None:
        scale_layer(layer, 1 / scale)
        return
    for name in active_in(layer):
        set_scale(layer, name, 1)


_WHOLE = "_with_adapters"


def base_layer(layer: Any) -> nn.Module:
    """Return a layer without adapters with the parameters of this one.

    Args:
        layer: a layer with adapters.

    Raises:
        AttributeError: the model is not one of `adapterzoo.peft`. If PEFT itself has wrapped it,
            PEFT would mistake the layer for one of its own.
    """
    if not hasattr(type(model_of(layer._link.active)), "_mixin"):
        raise AttributeError("base_layer")
    plain: Any = layer._plain
    made: Any = plain.__new__(plain)
    vars(made).update(vars(layer))
    del vars(made)["_link"]
    containers = layer._link.containers
    made._modules = {key: m for key, m in layer._modules.items() if key not in containers}
    # diffusers' hooks run the layer itself
    if vars(made).pop("_diffusers_hook", None) is not None:
        vars(made).pop("forward", None)
    # accelerate's hooks run the module they are given
    for name in ("forward", "_old_forward"):
        kept = vars(made).get(name)
        if isinstance(kept, types.MethodType) and kept.__self__ is layer:
            is_own = kept.__func__ is cast("Any", type(layer)).forward
            own = plain.forward if is_own else kept.__func__
            setattr(made, name, types.MethodType(own, made))
        elif isinstance(kept, functools.partial) and kept.args == (layer,):
            setattr(made, name, functools.partial(kept.func, made))
    vars(made)[_WHOLE] = layer
    return cast("nn.Module", made)


def put_back(model: nn.Module) -> None:
    """Put a model's layers with adapters back where a framework has put their base layers.

    Args:
        model: a model with adapters.
    """
    for parent in [*model.modules()]:
        for name, child in parent._modules.items():
            if child is not None and _WHOLE in vars(child):
                parent._modules[name] = vars(child)[_WHOLE]


_METHODS = (
    delete_adapter, enable_adapters, merge, scale_layer, set_adapter, set_scale, unmerge,
    unscale_layer,
)  # fmt: skip


def _bound(method: Callable[..., Any]) -> Callable[[Any], Any]:
    return lambda layer: types.MethodType(method, layer)


_ANSWERS: Mapping[str, Callable[[Any], Any]] = dict(
    {method.__name__: _bound(method) for method in _METHODS},
    active_adapter=lambda layer: active_in(layer)[0] if active_in(layer) else [],
    active_adapters=active_in,
    base_layer=base_layer,
    disable_adapters=lambda layer: layer._link.active.plan.setup is None,
    get_base_layer=_bound(base_layer),
    get_delta_weight=lambda layer: lambda name: delta_weight(layer, name),
    in_features=lambda layer: _widths(layer)[0],
    lora_A=_values("lora_A", False),
    lora_B=_values("lora_B", False),
    lora_alpha=lambda layer: ByConfig(layer, LowRank, "alpha_at"),
    lora_embedding_A=_values("lora_A", True),
    lora_embedding_B=_values("lora_B", True),
    lora_magnitude_vector=lambda layer: ByAdapter(layer, Magnitudes, "m"),
    merged=lambda layer: bool(merged_in(layer)),
    merged_adapters=merged_in,
    out_features=lambda layer: _widths(layer)[1],
    r=lambda layer: ByConfig(layer, _SCALED, "rank_at"),
    scaling=lambda layer: ByAdapter(layer, _SCALED, "scaling"),
    token_adapter=lambda layer: TokensLayer(ByAdapter(layer, TokenRows, "rows")),
)
answer_at_layers(_ANSWERS)
