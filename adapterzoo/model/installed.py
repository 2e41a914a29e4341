"""What a model knows of its adapters; tensors live in modules, but for kept originals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor, nn

from adapterzoo.anatomy import Anatomy
from adapterzoo.configs import AdapterConfig, Placement
from adapterzoo.errors import unknown_name
from adapterzoo.methods.fusion import AdapterFusionConfig
from adapterzoo.runtime import Plan


@dataclass(frozen=True, slots=True)
class AdapterRecord:
    """One named adapter.

    Attributes:
        config: its config.
        places: of its modules, by path.
        families: path of a module to those of its adapted layers that read one input.
        reads_calls: whether its layers read facts about calls, or what they share.
        meta: JSON values that came with it from a checkpoint, and go with it to the next.
    """

    config: AdapterConfig
    places: dict[str, tuple[Placement, ...]]
    families: dict[str, list[str]]
    reads_calls: bool = False
    meta: Mapping[str, Any] = field(default_factory=dict)

    def sources(self) -> Iterator[tuple[str, str]]:
        """(path of a tapped module, path of the site that reads it), each pair once."""
        for path, placements in self.places.items():
            for source in dict.fromkeys(p.site.source for p in placements):
                if source is not None:
                    yield source, path


def families_of(places: Mapping[str, tuple[Placement, ...]]) -> dict[str, list[str]]:
    """Path of a module to those of its layers that read one input, two at least.

    Args:
        places: path to what sits there.
    """
    found: dict[str, dict[str, list[str]]] = {}
    for path, placements in places.items():
        # what all layers share has a path and no placement
        if placements and (shared := placements[0].site.shared_input) is not None:
            found.setdefault(path.rpartition(".")[0], {}).setdefault(shared, []).append(path)
    # a block without modules of its own for its sub-layers has two families: the larger wins
    largest = {module: max(kinds.values(), key=len) for module, kinds in found.items()}
    return {module: paths for module, paths in largest.items() if len(paths) > 1}


@dataclass(frozen=True, slots=True)
class FusionRecord:
    """The fusion layers of one name: their config, the adapters they fuse, and where they are."""

    config: AdapterFusionConfig
    adapters: tuple[str, ...]
    paths: tuple[str, ...]


class AdaptersConfig(Mapping[str, AdapterConfig]):
    """The adapters of a model: names to configs, in the order of adding. Read-only."""

    def __init__(self, installed: Mapping[str, AdapterRecord]) -> None:
        """A live view.

        Args:
            installed: the model's adapters.
        """
        self._installed = installed

    @property
    def adapters(self) -> dict[str, str]:
        """Names to architectures."""
        return {name: config.architecture for name, config in self.items()}

    def __getitem__(self, name: str) -> AdapterConfig:
        """The config of the adapter."""
        if name not in self._installed:
            raise unknown_name(f"adapters_config[{name!r}]", "adapter", name, self._installed)
        return self._installed[name].config

    def __iter__(self) -> Iterator[str]:
        """The names."""
        return iter(self._installed)

    def __len__(self) -> int:
        """How many adapters there are."""
        return len(self._installed)

    def __repr__(self) -> str:
        """Names and configs."""
        return f"AdaptersConfig({dict(self)!r})"


def is_whole(model: nn.Module) -> bool:
    """Whether a model is the base model itself, although it has a part of its prefix's name.

    DINOv3 calls its encoder as other families call their base model. What is beside a base model
    is a head, and a head does not embed the inputs.

    Args:
        model: a `PreTrainedModel`.
    """
    base = cast("Any", model).base_model
    if base is model:
        return True
    try:
        embeddings = cast("Any", model).get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return False
    return embeddings is not None and all(embeddings is not m for m in base.modules())


@dataclass(slots=True)
class AdapterState:
    """What the library knows of one model.

    Attributes:
        records: the adapters by name.
        anatomy: of the base model, found once.
        models: paths of the base model and of the models in it, found once.
        merged: names of the adapters in the base weights, in the order of merging.
        originals: path of a merged layer to its parameters as they were before, bit for bit.
        fusions: the fusion layers by name.
        copies: paths of the layers of a static head of which an adapter has a copy, by the name
            under which the layers keep it: that of the adapter, or `fusion_key` of a fusion's.
        head: path of such a layer that holds a merged adapter's copy to its tensors as they were.
        plans: of mixed batches that came before, by what their rows take; dropped whenever
            adapters come, go or move.
        whole: whether the model is its own base model; None: not looked yet.
    """

    records: dict[str, AdapterRecord] = field(default_factory=dict)
    anatomy: Anatomy | None = None
    models: tuple[str, ...] | None = None
    merged: tuple[str, ...] = ()
    originals: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    fusions: dict[str, FusionRecord] = field(default_factory=dict)
    copies: dict[str, tuple[str, ...]] = field(default_factory=dict)
    head: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    plans: dict[Any, Plan] = field(default_factory=dict)
    whole: bool | None = None
