"""The state of a model with adapters: records, and functions that look them up.

Tensors live in the modules of the model, except for the originals of merged weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from torch import Tensor, nn
from transformers import PreTrainedModel

from adapterzoo import inject
from adapterzoo.anatomy import Anatomy, find, input_embeddings_of
from adapterzoo.composition import fusion_key
from adapterzoo.configs import AdapterConfig, Placement
from adapterzoo.contracts import Adapter
from adapterzoo.errors import unknown_name
from adapterzoo.inject.building import layer_at
from adapterzoo.methods.fusion import AdapterFusionConfig, Fusion
from adapterzoo.runtime import ActiveState, Plan

from .heads.interface import HeadStrategy


@dataclass(frozen=True, slots=True, eq=False)
class AdapterRecord:
    """One named adapter; no two are equal.

    Attributes:
        config: its config.
        places: path of each adapted layer → its adapters.
        shared_inputs: path of a module to those of its adapted layers that read one input.
        reads_calls: whether its layers read facts about calls, or what they share.
        meta: JSON values that came with it from a checkpoint and go with it to the next.
        coming: its modules by path, while they are not yet in the model.
    """

    config: AdapterConfig
    places: Mapping[str, tuple[Placement, ...]]
    shared_inputs: Mapping[str, list[str]] = field(default_factory=dict)
    reads_calls: bool = False
    meta: Mapping[str, Any] = field(default_factory=dict)
    coming: Mapping[str, Adapter] = field(default_factory=dict)

    def sources(self) -> Iterator[tuple[str, str]]:
        """Yield (path of a captured module, path of the site that reads it), each pair once.

        "+" precedes the path of the site where the input is added to another captured one.
        """
        for path, placements in self.places.items():
            for source in dict.fromkeys(p.site.source for p in placements):
                if source is not None:
                    yield source, path
            for source in dict.fromkeys(p.site.also for p in placements):
                if source is not None:
                    yield source, f"+{path}"


def shared_inputs(places: Mapping[str, tuple[Placement, ...]]) -> dict[str, list[str]]:
    """Return the path of a module to those of its layers that read one input, at least two."""
    found: dict[str, dict[str, list[str]]] = {}
    for path, placements in places.items():
        # a module that layers share has a path and no placement
        if placements and (shared := placements[0].site.shared_input) is not None:
            found.setdefault(path.rpartition(".")[0], {}).setdefault(shared, []).append(path)
    # a block whose sub-layers have no modules of their own has two such groups: the larger wins
    largest = {module: max(kinds.values(), key=len) for module, kinds in found.items()}
    return {module: paths for module, paths in largest.items() if len(paths) > 1}


@dataclass(frozen=True, slots=True)
class FusionRecord:
    """The fusion layers of one name: their config, the adapters they fuse, and their paths."""

    config: AdapterFusionConfig
    adapters: tuple[str, ...]
    paths: tuple[str, ...]


class AdaptersConfig(Mapping[str, AdapterConfig]):
    """The adapters of a model: names to configs, in the order of adding. Read-only."""

    def __init__(self, records: Mapping[str, AdapterRecord]) -> None:
        """Make a live view.

        Args:
            records: the model's adapters.
        """
        self._records = records

    @property
    def adapters(self) -> dict[str, str]:
        """Names to architectures."""
        return {name: config.architecture for name, config in self.items()}

    def __getitem__(self, name: str) -> AdapterConfig:
        """Return the config of the adapter."""
        if name not in self._records:
            raise unknown_name(f"adapters_config[{name!r}]", "adapter", name, self._records)
        return self._records[name].config

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self._records)

    def __len__(self) -> int:
        """Return how many adapters there are."""
        return len(self._records)

    def __repr__(self) -> str:
        """Show names and configs."""
        return f"AdaptersConfig({dict(self)!r})"


@dataclass(slots=True)
class AdapterState:
    """The state of one model with adapters.

    Attributes:
        records: the adapters by name.
        anatomy: of the base model, found once.
        stacks: paths of the base model and of the models in it, found once.
        merged: names of the adapters in the base weights, in the order of merging.
        originals: path of a merged layer to its parameters as they were before, bit for bit.
        fusions: the fusion layers by name.
        copies: paths of the layers of a static head of which an adapter has a copy, by the name
            under which the layers keep it: that of the adapter, or `fusion_key` of a fusion's.
        head: path of such a layer that holds a merged adapter's copy to its tensors as they were.
        plans: of mixed batches that came before, by what their rows take; dropped whenever
            adapters come, go or move.
        is_base: whether the model is its own base model; None: not looked yet.
    """

    records: dict[str, AdapterRecord] = field(default_factory=dict)
    anatomy: Anatomy | None = None
    stacks: tuple[str, ...] | None = None
    merged: tuple[str, ...] = ()
    originals: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    fusions: dict[str, FusionRecord] = field(default_factory=dict)
    copies: dict[str, tuple[str, ...]] = field(default_factory=dict)
    head: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    plans: dict[Any, Plan] = field(default_factory=dict)
    is_base: bool | None = None

    def find(self, name: object) -> AdapterRecord:
        """Return the record of an adapter.

        Raises:
            UnknownNameError: there is no adapter of this name.
        """
        if not isinstance(name, str) or name not in self.records:
            raise unknown_name("", "adapter", name, self.records)
        return self.records[name]

    def find_fusion(self, name: str) -> FusionRecord:
        """Return the record of a fusion.

        Raises:
            UnknownNameError: there is no fusion of this name.
        """
        if name not in self.fusions:
            raise unknown_name("", "fusion", name, self.fusions)
        return self.fusions[name]


class AdaptedModel(Protocol):
    """The part of a model that this package uses; the rest is a `PreTrainedModel`'s."""

    _active: ActiveState
    _adapter_state: AdapterState

    @property
    def _head_strategy(self) -> HeadStrategy:
        """What the model does with its heads."""

    @property
    def _backbone(self) -> nn.Module:
        """The base model, see `backbone_of`."""

    @property
    def anatomy(self) -> Anatomy:
        """Where adapters can sit in the base model."""

    def __getattr__(self, name: str) -> Any:
        """Find what a `PreTrainedModel` has."""


def backbone_of(model: AdaptedModel) -> nn.Module:
    """Return the base model, which has the adapters; a model without a head is its own."""
    state = model._adapter_state
    if state.is_base is None:
        state.is_base = is_base(cast("nn.Module", model))
    return cast("nn.Module", model if state.is_base else model.base_model)


def is_base(model: nn.Module) -> bool:
    """Return whether a model is the base model itself, although a part has its prefix's name.

    DINOv3 calls its encoder as other families call their base model. What is beside a base model
    is a head, and a head does not embed the inputs.

    Args:
        model: a `PreTrainedModel`.
    """
    base = cast("Any", model).base_model
    if base is model:
        return True
    embeddings = input_embeddings_of(model)
    return embeddings is not None and all(embeddings is not m for m in base.modules())


def anatomy_of(model: AdaptedModel) -> Anatomy:
    """Return where adapters can sit in the base model."""
    state = model._adapter_state
    if state.anatomy is None:
        state.anatomy = find(backbone_of(model))
    return state.anatomy


def stacks_of(model: AdaptedModel) -> Iterator[tuple[str, nn.Module]]:
    """Yield the base model and the models in it, such as encoder and decoder; not the whole."""
    state, backbone = model._adapter_state, backbone_of(model)
    if state.stacks is None:
        modules = backbone.named_modules()
        state.stacks = tuple(path for path, m in modules if isinstance(m, PreTrainedModel))
    for path in state.stacks:
        module = layer_at(backbone, path)
        if module is not cast("nn.Module", model):
            yield path, module


def modules_of(model: AdaptedModel, name: str) -> Iterator[tuple[str, Adapter]]:
    """Return the modules of an adapter with the paths of their layers, in model order.

    Raises:
        UnknownNameError: there is no adapter of this name.
    """
    backbone, record = backbone_of(model), model._adapter_state.find(name)
    if record.coming:
        return iter(record.coming.items())
    layers = ((path, inject.below_wrappers(backbone.get_submodule(path))) for path in record.places)
    return ((path, cast("Adapter", layer.adapters[name])) for path, layer in layers)


def parameters_of(model: AdaptedModel, name: str) -> Iterator[nn.Parameter]:
    """Yield the parameters of an adapter, each once."""
    for module in dict.fromkeys(module for _, module in modules_of(model, name)):
        yield from module.parameters()


def tensors_of(model: AdaptedModel, name: str) -> dict[str, Tensor]:
    """Return all tensors of an adapter, as checkpoints name them."""
    return named_tensors(dict(modules_of(model, name)))


def named_tensors(modules: Mapping[str, nn.Module], keep_vars: bool = False) -> dict[str, Tensor]:
    """Return the tensors of modules by path and key, as checkpoints name them."""
    return {
        f"{path}/{key}": tensor
        for path, module in modules.items()
        for key, tensor in module.state_dict(keep_vars=keep_vars).items()
    }


def fusion_modules(model: AdaptedModel, name: str) -> Iterator[tuple[str, Fusion]]:
    """Return the fusion layers of a name with the paths of their places, in model order.

    Raises:
        UnknownNameError: there is no fusion of this name.
    """
    backbone, paths = backbone_of(model), model._adapter_state.find_fusion(name).paths
    layers = ((path, cast("inject.Adapted", backbone.get_submodule(path))) for path in paths)
    return ((path, cast("Fusion", layer.adapters[fusion_key(name)])) for path, layer in layers)


def own_parameters_of(model: AdaptedModel) -> Iterator[nn.Parameter]:
    """Yield the parameters of all adapters and fusions; one that is shared comes twice."""
    for name in model._adapter_state.records:
        yield from parameters_of(model, name)
    for name in model._adapter_state.fusions:
        for _, layer in fusion_modules(model, name):
            yield from layer.parameters()
