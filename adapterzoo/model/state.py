"""The state of a model with adapters: records, and functions that look them up.

Tensors live in the modules of the model, except for the originals of merged weights.
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from adapterzoo.anatomy import (
    HEAD,
    Anatomy,
    find,
    in_whole,
    input_embeddings_of,
    output_site,
    tied_to,
    unwrapped,
    without_wrappers,
)
from adapterzoo.anatomy.tree import joined
from adapterzoo.composition import Composition, fusion_key
from adapterzoo.config import AdapterConfig, MultiTaskConfig, Placement
from adapterzoo.contracts import Adapter
from adapterzoo.errors import ConfigError, in_python, listing, unknown_name
from adapterzoo.inject.adapted import adapters_of, below_wrappers, container_of, shared_of
from adapterzoo.inject.building import layer_at, own_parameters, plain_modules
from adapterzoo.interface import AdapterModelInterface
from adapterzoo.methods.fusion import AdapterFusionConfig, Fusion
from adapterzoo.runtime import ActiveState, Plan

DEFAULT_EMBEDDINGS = "default"
"""The name of the model's own table of tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class AdapterRecord:
    """One named adapter; compared by identity.

    Attributes:
        config: its config.
        places: path of each adapted layer → its adapters.
        reads_calls: whether its layers use facts about calls, or shared modules.
        meta: JSON values from its checkpoint, which are saved again.
        trained_on: what its checkpoint records of the base model.
        coming: its modules by path, until they are in the model.
        located: location of the first adapter of a layer → paths of such layers.
        mixtures: path of a mixture with adapted experts → its `around`, see `anatomy.Mixture`.
    """

    config: AdapterConfig
    places: Mapping[str, tuple[Placement, ...]]
    reads_calls: bool = False
    meta: Mapping[str, Any] = field(default_factory=dict)
    trained_on: Mapping[str, Any] = field(default_factory=dict)
    coming: Mapping[str, Adapter] = field(default_factory=dict)
    located: Mapping[str, tuple[str, ...]] = field(init=False)
    mixtures: Mapping[str, str] = field(init=False)

    def __post_init__(self) -> None:
        """Collect the paths once: each adapter and head that is added later reads them."""
        sites = (placement.site for own in self.places.values() for placement in own)
        mixtures = {s.mixture.path: s.mixture.around for s in sites if s.mixture is not None}
        object.__setattr__(self, "mixtures", mixtures)
        found: dict[str, tuple[str, ...]] = {}
        for path, placements in self.places.items():
            if placements and (location := placements[0].location):
                found[location] = (*found.get(location, ()), path)
        object.__setattr__(self, "located", found)

    def sources(self) -> Iterator[tuple[str, str]]:
        """Yield (path of a captured module, path of the site that reads it), each pair once.

        "+" precedes the path of a site that adds the input to another captured one.
        """
        for path, placements in self.places.items():
            sites = [placement.site for placement in placements]
            yield from dict.fromkeys((s.source, path) for s in sites if s.source is not None)
            yield from dict.fromkeys((s.also, f"+{path}") for s in sites if s.also is not None)

    def helpers(self) -> Iterator[tuple[str, str]]:
        """Yield (path of a module that helps adapted layers, path of such a layer or mixture)."""
        yield from self.sources()
        for path, around in self.mixtures.items():
            yield from ((helper, path) for helper in {path: None, around: None})


@dataclass(frozen=True, slots=True)
class FusionRecord:
    """One fusion: its config, the adapters that it fuses, and the paths of its layers."""

    config: AdapterFusionConfig
    adapters: tuple[str, ...]
    paths: tuple[str, ...]


@dataclass(slots=True)
class AdapterState:
    """The state of one model with adapters.

    Attributes:
        records: the adapters by name.
        anatomy: the anatomy of the base model; cached.
        stacks: paths of the base model and of the models in it; cached.
        merged: names of the adapters in the base weights, in the order of merging.
        originals: path of a merged layer → its original parameters.
        fusions: the fusion layers by name.
        copies: owner of a copy of the static head, an adapter's name or the `fusion_key` of a
            fusion → paths of the copied layers.
        head: path of a layer of the static head with a merged copy → its original tensors.
        sharing: name of a group of adapters that share parameters → the adapters.
        plans: cached plans of mixed batches, by the compositions of their rows; cleared when
            adapters are added, removed or moved.
        outputs: (path of an output layer, adapter) where the layer is tied to a table, and the
            adapter has rows of this table.
        tied: keys of tied parameters → keys of those that they are tied to, as last listed for
            transformers.
        is_base: whether the model is its own base model; None: not known yet.
        embeddings: name of the active embeddings.
        coming_embeddings: those to activate once a model that is being loaded has its values.
        interface: names of layers that the user gave; None: none were given.
        disabled: the composition that `disable_adapters` deactivated, and its layers to skip.
        slot_rank: the rank that adapters get when they are loaded; None: their own.
        pool: the `AdapterPool` that fills the slots of the layers; None: there are none.
        trains: whether `train_adapter` or `train_adapter_fusion` chose what is trained.
        shares_trunk: whether blocks below the first adapter compute equal rows once.
    """

    records: dict[str, AdapterRecord] = field(default_factory=dict)
    anatomy: Anatomy | None = None
    stacks: tuple[str, ...] | None = None
    merged: tuple[str, ...] = ()
    originals: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    fusions: dict[str, FusionRecord] = field(default_factory=dict)
    copies: dict[str, tuple[str, ...]] = field(default_factory=dict)
    head: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    sharing: dict[str, tuple[str, ...]] = field(default_factory=dict)
    plans: dict[Any, Plan] = field(default_factory=dict)
    outputs: tuple[tuple[str, str], ...] = ()
    tied: dict[str, str] = field(default_factory=dict)
    is_base: bool | None = None
    embeddings: str = DEFAULT_EMBEDDINGS
    coming_embeddings: str | None = None
    interface: AdapterModelInterface | None = None
    disabled: tuple[Composition, tuple[int, ...]] | None = None
    slot_rank: int | None = None
    pool: Any = None
    trains: bool = False
    shares_trunk: bool = False

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        """Return the state of a copy: all but the pool, which fills the slots of one model."""
        values = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        return None, {**values, "pool": None}

    def find(self, name: object) -> AdapterRecord:
        """Return the record of an adapter.

        Raises:
            UnknownNameError: there is no adapter of this name.
        """
        if not isinstance(name, str) or name not in self.records:
            raise unknown_name("", "adapter", name, self.records)
        return self.records[name]

    def find_all(self, names: str | Sequence[str]) -> list[str]:
        """Return names as a list, after checking that there are adapters of these names.

        Raises:
            ConfigError: the list is empty.
            UnknownNameError: an adapter is unknown.
        """
        # anything else counts as one name, which is unknown
        listed = isinstance(names, (list, tuple))
        each: list[Any] = [*dict.fromkeys(names)] if listed else [names]
        if not each:
            raise ConfigError(f"no name is given. Adapters: {listing(self.records)}. Write one.")
        for name in each:
            self.find(name)
        return each

    def find_fusion(self, name: str) -> FusionRecord:
        """Return the record of a fusion.

        Raises:
            UnknownNameError: there is no fusion of this name.
        """
        if name not in self.fusions:
            raise unknown_name("", "fusion", name, self.fusions)
        return self.fusions[name]


class AdaptedModel(Protocol):
    """The attributes of a model that this package uses; the rest is a `PreTrainedModel`'s."""

    _active: ActiveState
    _adapter_state: AdapterState

    _has_named_heads: bool

    @property
    def _backbone(self) -> nn.Module:
        """The base model, see `backbone_of`."""

    @property
    def anatomy(self) -> Anatomy:
        """The sites for adapters in the base model."""

    def __getattr__(self, name: str) -> Any:
        """Find what a `PreTrainedModel` has."""


_FINGERPRINT = re.compile("[0-9a-fA-F]{8,64}")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadOptions:
    """Arguments of `load_adapter`, `load_head` and `load_adapter_fusion`; see there."""

    load_as: str | None = None
    with_head: bool = True
    leave_out: Iterable[int] | None = None
    id2label: Mapping[int, str] | None = None
    set_active: bool = False
    overwrite_ok: bool | None = False
    dtype: torch.dtype | None = None
    config: Any = None
    model_name: str | None = None
    loading_info: dict[str, Any] | None = None
    fingerprint: str | None = None
    loaders: Sequence[Any] = ()

    def __post_init__(self) -> None:
        """Check the dtype and the fingerprint.

        Raises:
            ConfigError: the value is not one.
        """
        if self.fingerprint is not None and not _FINGERPRINT.fullmatch(self.fingerprint):
            raise ConfigError(
                f"fingerprint={self.fingerprint!r} is not 8 to 64 hexadecimal digits. Write the "
                f"first ones of adapter_fingerprint(…)."
            )
        if self.dtype is not None and not isinstance(self.dtype, torch.dtype):
            raise ConfigError(
                f"dtype={self.dtype!r} is not a dtype{in_python('. Write dtype=torch.float32')}."
            )

    def overwriting(
        self, name: str, **there: Container[str]
    ) -> tuple[LoadOptions, Callable[[], None]]:
        """Return options that say whether to overwrite, and what warns after something is replaced.

        Args:
            name: the name of what is loaded.
            **there: the kinds of things that are loaded, and the model's names of each kind.
        """
        taken = [kind for kind, names in there.items() if name in names]
        if self.overwrite_ok is not None or not taken:
            return self, lambda: None
        has, one = ("has", "the one that was") if len(taken) == 1 else ("have", "those that were")
        text = (
            f"the {' and the '.join(taken)} {name!r} of the model {has} been replaced by {one} "
            f"loaded. Write overwrite_ok=True if that is intended, or load_as='another_name'."
        )
        asked = dataclasses.replace(self, overwrite_ok=True)
        return asked, lambda: warnings.warn(text, UserWarning, stacklevel=2)

    def compare(self, config: AdapterConfig, model_name: object) -> None:
        """Warn where a checkpoint has another config or base model than the user names.

        Args:
            config: the config in the checkpoint.
            model_name: the name of the base model in the checkpoint.

        Raises:
            ConfigError: what the user gives is not a config.
        """
        found = config.to_dict()
        wanted = found if self.config is None else AdapterConfig.load(self.config).to_dict()
        differing = sorted(k for k in wanted | found if wanted.get(k) != found.get(k))
        if differing:
            shown = ", ".join(f"{k}={found.get(k)!r} and not {wanted.get(k)!r}" for k in differing)
            warnings.warn(
                f"config=…: the checkpoint has its own config, with {shown}. Leave config out.",
                stacklevel=2,
            )
        if self.model_name is not None and model_name not in (None, self.model_name):
            warnings.warn(
                f"model_name={self.model_name!r}: the checkpoint was saved from {model_name!r}. "
                f"Leave model_name out.",
                stacklevel=2,
            )

    def report(self) -> None:
        """Fill the dict in which `adapters` lists what did not fit, which is an error here."""
        if self.loading_info is not None:
            for key in ("missing_keys", "unexpected_keys"):
                self.loading_info.setdefault(key, [])

    def load_weights(self, folder: Path, name: str) -> None:
        """Let each of the `custom_weights_loaders` load its weights.

        Args:
            folder: the folder of the adapter.
            name: the name under which it was loaded.
        """
        for loader in self.loaders:
            loader.load(
                folder, load_as=self.load_as, loading_info=self.loading_info, main_load_name=name
            )


def heads_of(model: AdaptedModel) -> Mapping[str, Any]:
    """Return the named heads; a model with the static head of its class has none."""
    return cast("Mapping[str, Any]", model.heads._modules) if model._has_named_heads else {}


class PlainConfig(PreTrainedConfig):
    """The config of a module that is not of transformers: it has no fields of its own."""

    model_type = "custom"


def is_plain(model: object) -> bool:
    """Return whether a model is a plain module of torch, and not a model of transformers."""
    return not hasattr(type(model), "base_model_prefix")


def config_of(model: Any) -> Any:
    """Return the config of a model of transformers; for other modules, one with only a name.

    Args:
        model: a model with or without adapters.
    """
    if not is_plain(model):
        return model.config
    # diffusers' config, which is not of transformers, knows where the model comes from
    known = vars(model).get("_internal_dict") or {}
    config = PlainConfig()
    config.name_or_path = known.get("_name_or_path") or ""
    return config


def dtype_of(model: Any) -> torch.dtype:
    """Return the dtype of the base model: that of its first floating-point parameter."""
    dtypes = (p.dtype for p in own_parameters(model) if p.is_floating_point())
    return next(dtypes, torch.get_default_dtype())


def output_embeddings_of(model: Any) -> nn.Module | None:
    """Return the layer that computes logits from hidden states; None if there is none."""
    found: nn.Module | None = None if is_plain(model) else model.get_output_embeddings()
    return found


def backbone_of(model: AdaptedModel) -> nn.Module:
    """Return the base model, which holds the adapters; a model without a head is its own base."""
    state = model._adapter_state
    if state.is_base is None:
        state.is_base = is_base(cast("nn.Module", model))
    return unwrapped(cast("nn.Module", model if state.is_base else model.base_model))


def base_prefix(model: Any) -> str:
    """Return what precedes the paths of the base model in the model, such as "bert.".

    Args:
        model: a model with or without adapters.
    """
    has_adapters = "_adapter_state" in vars(model)
    alone = model._backbone is model if has_adapters else is_base(model)
    return "" if alone else f"{model.base_model_prefix}."


def is_base(model: nn.Module) -> bool:
    """Return whether a model is its own base model.

    A part with the name of a base model need not be one: DINOv3's encoder has the name that other
    families give theirs. Whatever is outside a base model belongs to a head, and a head does not
    embed the inputs; so a part without the input embeddings is not the base model.

    Args:
        model: any model; one that is not of transformers is its own base model.
    """
    base = model if is_plain(model) else cast("Any", model).base_model
    if base is model:
        return True
    embeddings = input_embeddings_of(model)
    return embeddings is not None and all(embeddings is not m for m in base.modules())


def anatomy_of(model: AdaptedModel) -> Anatomy:
    """Return the sites for adapters in the base model, and the output layer of a static head."""
    state = model._adapter_state
    if state.anatomy is None:
        given = None if state.interface is None else state.interface.roles()
        found, path = find(backbone_of(model), given), output_path(model)
        output, tied = None, found.tied
        if path is not None:
            output = output_site(cast("nn.Module", model), path)
            if found.own_table is not None:
                table, own = layer_at(backbone_of(model), found.own_table), f"{HEAD}{path}"
                tied += (*tied_to(table, {own: layer_at(cast("nn.Module", model), path)}),)
        state.anatomy = dataclasses.replace(found, output=output, tied=tied)
    return state.anatomy


def output_path(model: AdaptedModel) -> str | None:
    """Return the path of a language model's output layer, if it is a layer of a static head."""
    if model._has_named_heads or model._backbone is cast("nn.Module", model):
        return None
    if (output := output_embeddings_of(model)) is None:
        return None
    return next((path for path, module in outside(model) if module is unwrapped(output)), None)


def outside(model: AdaptedModel) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules outside the base model with their paths, without adapters."""
    inside = {id(module) for _, module in plain_modules(model._backbone)}
    for path, module in plain_modules(cast("nn.Module", model)):
        if id(module) not in inside:
            yield path, module


def layer_in(model: AdaptedModel, path: str) -> nn.Module:
    """Return the layer at the path of a site; see `layer_at`."""
    if path.startswith(HEAD):
        return layer_at(cast("nn.Module", model), path.removeprefix(HEAD))
    return layer_at(backbone_of(model), path)


def token_table(model: AdaptedModel) -> nn.Embedding | None:
    """Return the module that embeds tokens by a table; None where there is none."""
    found = input_embeddings_of(model)
    return found if isinstance(found, nn.Embedding) else None


def stacks_of(model: AdaptedModel) -> Iterator[tuple[str, nn.Module]]:
    """Yield the base model and the models in it, such as encoder and decoder, but not `model`."""
    state, backbone = model._adapter_state, backbone_of(model)
    if state.stacks is None:
        state.stacks = tuple(
            without_wrappers(path)
            for path, module in backbone.named_modules()
            if isinstance(module, PreTrainedModel)
        )
    for path in state.stacks:
        module = layer_in(model, path)
        if module is not cast("nn.Module", model):
            yield path, module


def modules_of(model: AdaptedModel, name: str) -> Iterator[tuple[str, Adapter]]:
    """Return the modules of an adapter with the paths of their layers, in model order.

    Raises:
        UnknownNameError: there is no adapter of this name.
    """
    record = model._adapter_state.find(name)
    if record.coming:
        return iter(record.coming.items())

    def held(path: str) -> Mapping[str, Any]:
        # the path of the base model stands for the modules that its layers share
        if not path:
            return shared_of(backbone_of(model))
        return adapters_of(below_wrappers(layer_in(model, path)))

    return ((path, cast("Adapter", held(path)[name])) for path in record.places)


def by_location(model: AdaptedModel, name: str) -> dict[int, dict[str, nn.Module]]:
    """Return the modules of an adapter with tensors: `{block number: {location: module}}`."""
    records = model._adapter_state.records
    if isinstance(name, str) and name not in records:
        warnings.warn(str(unknown_name("", "adapter", name, records)), stacklevel=4)
        return {}
    record = model._adapter_state.find(name)
    found: dict[int, dict[str, dict[nn.Module, None]]] = {}
    for path, module in modules_of(model, name):
        listed: list[tuple[int, str, nn.Module]] = [
            (p.site.layer, p.location or str(p.site.role), module) for p in record.places[path]
        ]
        if not listed:
            for shared in module.children() if len(record.config.members) > 1 else [module]:
                named = shared if isinstance(shared, nn.ModuleDict) else {"shared": shared}
                listed += [(-1, key, part) for key, part in named.items()]
        for layer, location, part in listed:
            if part.state_dict(keep_vars=True):
                found.setdefault(layer, {}).setdefault(location, {})[part] = None
    return {
        layer: {
            at: next(iter(ms)) if len(ms) == 1 else nn.ModuleList(ms) for at, ms in block.items()
        }
        for layer, block in found.items()
    }


def prefixes_of(model: AdaptedModel, name: str) -> dict[str, str]:
    """Return what precedes the keys of an adapter's tensors in the model, by path."""
    start = base_prefix(model)
    return {
        path: in_whole(joined(path, f"{container_of(module)}.{name}."), start)
        for path, module in modules_of(model, name)
    }


def shareable_of(model: AdaptedModel, name: str) -> dict[tuple[str, str], nn.Parameter]:
    """Return the parameters that an adapter can share, by the path of the layer and their key."""
    config = model._adapter_state.find(name).config
    if not isinstance(config, MultiTaskConfig) or not config.shareable:
        return {}
    return {
        (path, key): parameter
        for path, module in modules_of(model, name)
        for key, parameter in module.named_parameters()
        if key.rpartition(".")[2] in config.shareable
    }


def parameters_of(model: AdaptedModel, name: str) -> Iterator[nn.Parameter]:
    """Yield the parameters of an adapter, each once."""
    for module in dict.fromkeys(module for _, module in modules_of(model, name)):
        yield from module.parameters()


def tensors_of(model: AdaptedModel, name: str) -> dict[str, Tensor]:
    """Return all tensors of an adapter by their keys in checkpoints."""
    return named_tensors(dict(modules_of(model, name)))


def named_tensors(modules: Mapping[str, nn.Module], keep_vars: bool = False) -> dict[str, Tensor]:
    """Return the tensors of modules by their keys in checkpoints, `<path>/<key>`."""
    return {
        f"{path}/{key}": tensor
        for path, module in modules.items()
        for key, tensor in module.state_dict(keep_vars=keep_vars).items()
    }


def fusion_modules(model: AdaptedModel, name: str) -> Iterator[tuple[str, Fusion]]:
    """Return the layers of a fusion with their paths, in model order.

    Raises:
        UnknownNameError: there is no fusion of this name.
    """
    paths = model._adapter_state.find_fusion(name).paths
    layers = ((path, layer_in(model, path)) for path in paths)
    key = fusion_key(name)
    return ((path, cast("Fusion", adapters_of(layer)[key])) for path, layer in layers)


def own_parameters_of(
    model: AdaptedModel, names: Iterable[str] | None = None, fusions: Iterable[str] | None = None
) -> Iterator[nn.Parameter]:
    """Yield the parameters of adapters and fusions, by default of all; some may come twice."""
    for name in model._adapter_state.records if names is None else names:
        yield from parameters_of(model, name)
    for name in model._adapter_state.fusions if fusions is None else fusions:
        for _, layer in fusion_modules(model, name):
            yield from layer.parameters()
