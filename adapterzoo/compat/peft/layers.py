"""PEFT's attributes of a layer with adapters, such as `layer.lora_A["default"].weight`.

Layers here are not wrapped: `adapter_modules` gives their adapters. Code written for PEFT's
wrappers finds what it reads there at the layer itself, unless the layer's class has an attribute of
the name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from adapterzoo.errors import StateError, unknown_name
from adapterzoo.inject import changes
from adapterzoo.inject.adapted import Adapted, adapters_of, asked_of_layers
from adapterzoo.inject.layers import ExpertAdapters, FusedAdapters, matrix, stores_transposed
from adapterzoo.methods._copies import TokenRows
from adapterzoo.methods.low_rank.dora import Magnitudes
from adapterzoo.methods.low_rank.factors import LowRank
from adapterzoo.model.activation import model_of


def parts_of(layer: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield the names and adapters of a layer, those of its parts one by one.

    Args:
        layer: any module; one without adapters has none.
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
    """A matrix of an adapter, as PEFT's layers hold one.

    Attributes:
        weight: the parameter itself; at a convolution its view as a convolution's weight.
        bias: of B; None if there is none.
    """

    weight: Tensor
    bias: Tensor | None = None


class ByAdapter(MutableMapping[str, Any]):
    """A value of each adapter of a layer, by name; assigning one changes the adapter.

    Attributes:
        found: name of an adapter → the adapter.
    """

    def __init__(self, layer: Any, kind: type[nn.Module], attribute: str) -> None:
        """Take the adapters of one kind.

        Args:
            layer: with adapters.
            kind: of the adapters.
            attribute: of an adapter, which has the value.
        """
        self.found = {name: part for name, part in parts_of(layer) if isinstance(part, kind)}
        self._layer, self._attribute = layer, attribute

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

    def __setitem__(self, name: str, value: Any) -> None:
        """Give an adapter another value, such as a scaling."""
        setattr(self.found[name], self._attribute, value)

    def __delitem__(self, name: str) -> None:
        """Refuse: `delete_adapter` deletes.

        Raises:
            StateError: always.
        """
        raise StateError(f"{self._attribute}[{name!r}] stays. Write delete_adapter({name!r}).")

    def __iter__(self) -> Iterator[str]:
        """Yield the names of the adapters."""
        return iter(self.found)

    def __len__(self) -> int:
        """Return how many adapters there are."""
        return len(self.found)


def active_in(layer: Any) -> list[str]:
    """Return the names of the active adapters, also of those that the layer does not have.

    Args:
        layer: with adapters.
    """
    setup = layer._link.active.plan.setup
    return [] if setup is None else list(setup.flatten())


def merged_in(layer: Any) -> list[str]:
    """Return the names of the adapters that are merged into a layer.

    Args:
        layer: with adapters.
    """
    merged = model_of(layer._link.active)._adapter_state.merged
    return [name for name in merged if name in adapters_of(layer)]


def delta_weight(layer: Any, name: str) -> Tensor:
    """Return the change of a layer's weight by an adapter, as the layer stores it.

    Args:
        layer: with the adapter.
        name: of the adapter.

    Raises:
        UnknownNameError: the layer does not have it.
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
class Tokens:
    """Rows of a table, as PEFT's layers hold them.

    Attributes:
        trainable_tokens_delta: name of an adapter → its rows `[tokens, d]`.
    """

    trainable_tokens_delta: ByAdapter


def _values(attribute: str, embedding: bool | None = None) -> Callable[[Any], ByAdapter]:
    def values(layer: Any) -> ByAdapter:
        found = ByAdapter(layer, LowRank, attribute)
        if embedding is not None:
            own = found.found.items()
            found.found = {n: p for n, p in own if getattr(p, "at_embedding", False) == embedding}
        return found

    return values


def _widths(layer: Any) -> tuple[int, int]:
    if isinstance(layer, nn.Embedding):
        return layer.num_embeddings, layer.embedding_dim
    if hasattr(layer, "in_channels"):
        return layer.in_channels, layer.out_channels
    w = matrix(layer)
    return w.shape[-1], w.shape[-2]


def _configs(layer: Any) -> Iterator[tuple[str, Any]]:
    records = model_of(layer._link.active)._adapter_state.records
    return ((name, records[name].config) for name in ByAdapter(layer, LowRank, "scaling"))


asked_of_layers.update(
    active_adapter=lambda layer: active_in(layer)[0] if active_in(layer) else [],
    active_adapters=active_in,
    disable_adapters=lambda layer: not active_in(layer),
    get_delta_weight=lambda layer: lambda name: delta_weight(layer, name),
    in_features=lambda layer: _widths(layer)[0],
    lora_A=_values("lora_A", False),
    lora_B=_values("lora_B", False),
    lora_alpha=lambda layer: {n: c.alpha_at(layer._link.path) for n, c in _configs(layer)},
    lora_embedding_A=_values("lora_A", True),
    lora_embedding_B=_values("lora_B", True),
    lora_magnitude_vector=lambda layer: ByAdapter(layer, Magnitudes, "m"),
    merged=lambda layer: bool(merged_in(layer)),
    merged_adapters=merged_in,
    out_features=lambda layer: _widths(layer)[1],
    r=lambda layer: {n: c.rank_at(layer._link.path) for n, c in _configs(layer)},
    scaling=_values("scaling"),
    token_adapter=lambda layer: Tokens(ByAdapter(layer, TokenRows, "rows")),
)
