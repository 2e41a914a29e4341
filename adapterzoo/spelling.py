"""How the peers' files spell a method, as data that its family declares.

`formats/adapterhub` and `formats/peft` do not name any method; they read these tables. A family
registers one spelling per peer with `spelled`, so that deleting the family deletes its formats.

Functions in a spelling raise `CheckpointError` without naming their caller. They may meet a file
that lacks any of its tensors: after a `KeyError` in `Container.read` names stay unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeVar

from torch import Tensor

from .anatomy import Anatomy, Site, SubLayerKind
from .config import METHODS, AdapterConfig, Placement, variants
from .peft_arguments import PeftArgument, PeftArguments, classes_of_peft
from .registry import Registry

Fields = dict[str, Any]
Tensors = dict[str, Tensor]
"""Names of parameters → tensors, at one place or adapter-wide."""

_RELEASE = re.compile(r"adapters\.(\d{1,9})\.(\d{1,9})(?:\.(\d{1,9}))?(.*)")


def same(*names: str) -> dict[str, str]:
    """Return a table of names that are the same in both."""
    return {name: name for name in names}


def unchanged(tensors: Tensors, _config: AdapterConfig) -> Tensors:
    """Return the tensors unchanged."""
    return tensors


# --- AdapterHub ---


@dataclass(frozen=True, slots=True)
class Container:
    """Tensors that AdapterHub keeps under `<path>.<name>.<adapter>.<parameter>`.

    Attributes:
        name: "loras", "adapters", "refts", "prefix_tunings", "shared_parameters", …
        at: what `<path>` leads to. "layer": a linear layer. "sublayer": the attention or
            feed-forward part of a block. "block": a block. "attention": an attention module.
            "model": the model; these are adapter-wide tensors, our parameters of
            `AdapterConfig.shared`.
        below: the rest of `<path>`, e.g. "reft_layer", "prefix_tuning".
        locations: at "sublayer": the kind of the sub-layer → `Placement.location`.
        aliases: names of the container in older files.
        duplicates: ends of paths under which the file repeats the tensors; ignored.
        in_encoder: at "model": encoder-decoder models keep them under `encoder.`.
        held_by: at "model": returns whether an adapter with a config has such tensors.
        prefix: the prefix of our names of its tensors; tensors without it are not in the container.
        names: AdapterHub's names → ours, without the prefix, where they differ.
        read: from the tensors of one place under these names, and the config, returns ours.
        write: undoes `read`.
    """

    name: str
    at: Literal["layer", "sublayer", "block", "attention", "model"]
    below: str = ""
    locations: Mapping[SubLayerKind, str] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    duplicates: tuple[str, ...] = ()
    in_encoder: bool = False
    held_by: Callable[[AdapterConfig], bool] = lambda _config: True
    prefix: str = ""
    names: Mapping[str, str] = field(default_factory=dict)
    read: Callable[[Tensors, AdapterConfig], Tensors] = unchanged
    write: Callable[[Tensors, AdapterConfig], Tensors] = unchanged

    def to_ours(self, tensors: Tensors, config: AdapterConfig) -> Tensors:
        """Return our tensors of AdapterHub's at one place."""
        named = {self.prefix + self.names.get(name, name): t for name, t in tensors.items()}
        try:
            return self.read(named, config)
        except KeyError:
            # the comparison with the model shows what is missing
            return named

    def to_theirs(self, tensors: Tensors, config: AdapterConfig) -> Tensors:
        """Return AdapterHub's tensors of ours at one place; undoes `to_ours`."""
        theirs = {ours: name for name, ours in self.names.items()}
        own = {n: t for n, t in self.write(tensors, config).items() if n.startswith(self.prefix)}
        short = {name.removeprefix(self.prefix): tensor for name, tensor in own.items()}
        return {theirs.get(name, name): tensor for name, tensor in short.items()}


@dataclass(frozen=True, slots=True)
class AdapterHubFile:
    """Facts about an AdapterHub file that its config does not give.

    Attributes:
        version: the release that wrote it; None in the oldest files.
        words: the parts of the keys of its tensors.
    """

    version: object
    words: frozenset[str] = frozenset()

    def is_before(self, *release: int) -> bool:
        """Return whether it was written by a release of `adapters` before this one."""
        match = _RELEASE.fullmatch(self.version) if isinstance(self.version, str) else None
        if match is None:
            return False
        number = tuple(int(part or 0) for part in match.groups()[:3])
        # 1.1.0.dev0 comes before 1.1.0
        return number < release or (number == release and bool(match[4]))


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterHubSpelling:
    """How AdapterHub's `adapters` spells a method.

    A file belongs to the method whose `architecture` it has, whose `fixed` fields it has with these
    values (or lacks), and whose `required` fields it has with a value other than None.

    Attributes:
        config: our config class.
        architecture: AdapterHub's names of the method. The first is written; None: no name.
        fields: AdapterHub's field names → ours. Other fields of ours must hold their defaults
            to be written; other fields of a file are passed to the config, which refuses them.
        fixed: fields whose values identify the method; written unchanged.
        required: fields that identify the method by having a value.
        constants: other fields, written unchanged and ignored when read.
        implied: fields of ours that every such file implies.
        omitted: fields of ours that need not be written, such as those that the tensors imply.
        containers: where its tensors are.
        fused: why a part of a fused layer cannot be written; None: it can, with parts concatenated.
        feed_forward: the fields that select the first and the last feed-forward layer; some
            families of AdapterHub swap the two.
        read_fields: from a file's fields under our names, returns those of our config; raises if
            they mean what does not exist here.
        place: returns the config with what only the file's keys show, from the sites there.
        unsayable: returns why AdapterHub's format cannot express a config; None: it can.
        joins: returns whether `adapters` accepts a union of two configs of one `architecture` that
            both adapt all blocks.
        as_flags: returns the config with AdapterHub's fields for its places; None: impossible.
        as_another: fields of ours for a config that users write as another class, with the `fixed`
            fields of this method, such as `LoRAConfig(use_dora=True)`.
        convention: model type and config → the config with the conventions by which `adapters`
            computes it in such a model.
        added: configs and anatomy → the config that `adapters` silently adds to an adapter with
            these configs, or None. Files do not name such a method; other methods have no `added`.
        fusion: returns the fields of a fusion's config, which AdapterHub's files lack, with which
            it computes what `adapters` does if the last fused adapter has this config.
    """

    config: type[AdapterConfig]
    architecture: tuple[str | None, ...]
    fields: Mapping[str, str]
    containers: tuple[Container, ...]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    constants: Mapping[str, Any] = field(default_factory=dict)
    implied: Mapping[str, Any] = field(default_factory=dict)
    omitted: tuple[str, ...] = ()
    fused: str | None = None
    feed_forward: tuple[str, str] | None = None
    read_fields: Callable[[Fields, AdapterHubFile], Fields] = lambda fields, _file: fields
    place: Callable[[AdapterConfig, Sequence[Site], Anatomy], AdapterConfig] = (
        lambda config, _sites, _anatomy: config
    )
    unsayable: Callable[[AdapterConfig], str | None] = lambda _config: None
    joins: Callable[[AdapterConfig, AdapterConfig], bool] = lambda _config, _other: False
    as_flags: Callable[[AdapterConfig, Anatomy], AdapterConfig | None] = lambda config, _anatomy: (
        config
    )
    as_another: Mapping[str, Any] = field(default_factory=dict)
    convention: Callable[[str, AdapterConfig], AdapterConfig] = lambda _model_type, config: config
    added: Callable[[Sequence[AdapterConfig], Anatomy], AdapterConfig | None] | None = None
    fusion: Callable[[AdapterConfig], Fields] = lambda _config: {}

    @property
    def strictness(self) -> tuple[int, int]:
        """The rank of the method among those that fit a file, which belongs to the highest."""
        return len(self.required), len(self.fixed)

    @property
    def identifying(self) -> set[str]:
        """The fields that tell the method from others, and those that have only one value."""
        return {*self.fixed, *self.required, *self.constants}

    def differing(self, values: Mapping[str, Any]) -> list[str]:
        """Return the fields by which a file's config belongs to another method."""
        there = {k: v for k, v in self.fixed.items() if k in values}
        # True equals 1
        wrong = [k for k, v in there.items() if (type(values[k]), values[k]) != (type(v), v)]
        return [*wrong, *(k for k in self.required if values.get(k) is None)]


# --- PEFT ---


@dataclass(slots=True)
class PeftLayer:
    """The contents of a PEFT file for one layer.

    Attributes:
        name: path of the layer in the file.
        site: the layer in this model.
        fields: the fields of PEFT's config; those of patterns have this layer's values.
        is_parameter: whether a parameter is adapted as its module stores it, not the module:
            PEFT's `target_parameters`.
        weight: returns the layer's weight in the model `[d_out, d_in]`; None if it has no values.
        tensors: the tensors in PEFT's layout, by our parameter names.
    """

    name: str
    site: Site
    fields: Mapping[str, Any]
    weight: Callable[[], Tensor | None]
    is_parameter: bool = False
    tensors: Tensors = field(default_factory=dict)


class ConvolutionShape(NamedTuple):
    """The shape of a parameter at a convolution, which PEFT stores as a convolution's weight.

    Attributes:
        read: from PEFT's tensor and the layer, returns the tensor as at a linear layer.
        write: undoes `read`, given the site.
    """

    read: Callable[[Tensor, PeftLayer], Tensor]
    write: Callable[[Tensor, Site], Tensor]


def _ones(site: Site) -> tuple[int, ...]:
    return tuple(1 for _ in site.kernel)


KERNEL = ConvolutionShape(
    lambda t, _layer: t.flatten(1),
    lambda t, site: t.unflatten(1, (-1, *site.kernel)),  # [rows, channels, *kernel]
)
"""`[rows, channels · kernel]`, in PEFT's files `[rows, channels, *kernel]`."""
POINT = ConvolutionShape(
    lambda t, _layer: t.flatten(1),
    lambda t, site: t.reshape(*t.shape, *_ones(site)),  # [rows, columns, 1, …]
)
"""`[rows, columns]`, in PEFT's files `[rows, columns, 1, …]`."""
CHANNEL = ConvolutionShape(
    lambda t, _layer: t.flatten(),
    lambda t, site: t.reshape(1, -1, *_ones(site)),  # [1, channels, 1, …]
)
"""`[channels]`, in PEFT's files `[1, channels, 1, …]`."""


@dataclass(frozen=True, slots=True)
class PeftPart:
    """One of our adapters at a layer, or at a part of a fused layer.

    Attributes:
        placement: its site and config.
        tensors: its tensors by our parameter names.
    """

    placement: Placement
    tensors: Tensors


@dataclass(frozen=True, slots=True)
class PeftOutput:
    """What is written for one layer.

    Attributes:
        parts: our adapters there.
        tensors: those of the joined adapter, in PEFT's layout, by our parameter names.
        is_parameter: as in `PeftLayer`.
    """

    parts: Sequence[PeftPart]
    tensors: Tensors
    is_parameter: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class PeftSpelling:
    """How PEFT spells a method.

    A file belongs to the method that has its `peft_type`, and whose `fixed` fields it has with
    these values (or lacks, if the value is False or None).

    Attributes:
        config: our config class.
        peft_type: PEFT's name of the method.
        arguments: the fields of PEFT's config class, as users write them; None: it is only read.
        tensors: our parameters → the ends of PEFT's keys, without the adapter's name. The first
            end is written, all are read. Empty where all tensors are adapter-wide.
        embedding_tensors: the same for embeddings, if the ends differ.
        transposes: our parameters at a layer that is tied to a table → the one at the table whose
            transpose it is.
        convolution_shapes: our parameters of a convolution → the shape in PEFT's files.
        shared: our adapter-wide parameters → PEFT's whole keys.
        fixed: fields whose values identify the method; written unchanged.
        fields: the fields that are read, besides those of `arguments` with a check.
        patterns: fields that map layer names to numbers (same name in PEFT and here) → PEFT's
            field with the number for all other layers.
        inert: fields that are not in `arguments` and do not change what an adapter computes.
        beside: the fields for what is trained besides the adapters, the same in PEFT and here.
        of_parameters: whether PEFT's method can adapt parameters, by `target_parameters`.
        of_norms: whether the layers are norms; otherwise they have a weight matrix.
        rows_field: the field with the ids of the tokens, if the method only trains rows of
            embeddings; else empty.
        becomes: what its adapters become, in words, if the method is only read; else empty.
        wide: parameters that stay in float32 over half-precision layers.
        subsets: fields that name some of the target modules (same name in PEFT and here) → a
            function that says whether a layer is among them, by its tensors in PEFT's layout.
        refuse: from the whole config, returns why it cannot be reproduced; None: it can.
        read: from PEFT's tensors of one layer, returns ours.
        read_fields: from a layer, and the values of `fields` there under our names, returns the
            fields of our config. Layers that differ in a field that is not one of `patterns` become
            members of a union.
        read_model: from PEFT's fields, its adapter-wide tensors by the names in `shared`, all
            layers and the model's anatomy, returns fields of our config and our adapter-wide
            tensors.
        unsayable: returns why PEFT's format cannot express an adapter; None: it can.
        write: from the only adapter at a layer, returns PEFT's tensors.
        join: from several adapters at one layer or at its parts, and a function that returns the
            layer's weight as it is stored, returns PEFT's tensors of one adapter of the layer that
            computes the same; raises if there is none. None: there never is.
        write_layers: from all layers, and the values of `fields` in the config at each, returns
            the fields of PEFT's config for each. A value of None is ignored. Fields of `patterns`
            may differ between layers.
        write_model: from the config, our adapter-wide tensors and the model's anatomy, returns
            PEFT's fields and its tensors by the names in `shared`; raises if PEFT's format cannot
            express them.
    """

    config: type[AdapterConfig]
    peft_type: str
    arguments: PeftArguments | None = None
    tensors: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    embedding_tensors: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    transposes: Mapping[str, str] = field(default_factory=dict)
    convolution_shapes: Mapping[str, ConvolutionShape] = field(default_factory=dict)
    shared: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, PeftArgument] = field(default_factory=dict)
    patterns: Mapping[str, str] = field(default_factory=dict)
    inert: frozenset[str] = frozenset()
    beside: frozenset[str] = frozenset()
    of_parameters: bool = False
    of_norms: bool = False
    rows_field: str = ""
    becomes: str = ""
    wide: tuple[str, ...] = ()
    subsets: Mapping[str, Callable[[Tensors], bool]] = field(default_factory=dict)
    refuse: Callable[[Mapping[str, Any]], str | None] = lambda _fields: None
    read: Callable[[PeftLayer], Tensors] = lambda layer: layer.tensors
    read_fields: Callable[[PeftLayer, Fields], Fields] = lambda _layer, fields: fields
    read_model: Callable[
        [Mapping[str, Any], Tensors, Sequence[PeftLayer], Anatomy], tuple[Fields, Tensors]
    ] = lambda _fields, tensors, _layers, _anatomy: ({}, tensors)
    unsayable: Callable[[Placement], str | None] = lambda _placement: None
    write: Callable[[PeftPart], Tensors] = lambda part: part.tensors
    join: Callable[[Sequence[PeftPart], Callable[[], Tensor | None]], Tensors] | None = None
    write_layers: Callable[[Sequence[PeftOutput], Sequence[Fields]], Sequence[Fields]] = (
        lambda _layers, said: said
    )
    write_model: Callable[[AdapterConfig, Tensors, Anatomy], tuple[Fields, Tensors]] = (
        lambda _config, tensors, _anatomy: ({}, tensors)
    )

    @property
    def has_layers(self) -> bool:
        """Whether some tensors belong to layers; otherwise all belong to the whole model."""
        return bool(self.tensors or self.rows_field)

    @property
    def prefix(self) -> str:
        """What precedes keys of the model's own tensors; PEFT wraps a model with layers twice."""
        return "base_model.model." if self.has_layers else "base_model."

    def differing(self, values: Mapping[str, Any]) -> list[str]:
        """Return the fields by which a file's config belongs to another method."""
        return [k for k, v in self.fixed.items() if (values.get(k) or False) != (v or False)]

    @property
    def strictness(self) -> tuple[int, int]:
        """See `AdapterHubSpelling.strictness`."""
        return 0, len(self.fixed)


adapterhub_spellings: Registry[AdapterHubSpelling] = Registry(
    "AdapterHub spelling", filled_by=METHODS
)
"""Our `architecture` → its AdapterHub spelling."""

peft_spellings: Registry[PeftSpelling] = Registry("PEFT spelling", filled_by=METHODS)
"""Our `architecture` → its PEFT spelling."""

peft_readers: Registry[PeftSpelling] = Registry("PEFT reader", filled_by=METHODS)
"""PEFT's methods that load as one of ours, but are not written → their spelling."""


def peft_readable() -> list[PeftSpelling]:
    """Return the spellings of all methods that can be loaded from PEFT's files, by PEFT's type."""
    found = [*peft_spellings.values(), *peft_readers.values()]
    return sorted(found, key=lambda spelling: spelling.peft_type)


_Config = TypeVar("_Config", bound=type[AdapterConfig])


def spelled(
    *makes: Callable[[type[AdapterConfig]], AdapterHubSpelling | PeftSpelling],
) -> Callable[[_Config], _Config]:
    """Return a decorator of a config class that declares how the peers spell its method.

    Args:
        makes: return the spellings for the class, see `docs/adding-a-method.md`.
    """

    def declared(config: _Config) -> _Config:
        for make in makes:
            spelling = make(config)
            if isinstance(spelling, AdapterHubSpelling):
                adapterhub_spellings.register(config.architecture)(spelling)
                if spelling.architecture[0] is not None and spelling.fixed:
                    variants[config] = spelling
            elif spelling.becomes:
                peft_readers.register(spelling.peft_type)(spelling)
            else:
                if (own := spelling.arguments) is not None:
                    own = replace(own, peft_type=spelling.peft_type, fixed=spelling.fixed)
                    classes_of_peft[config] = own
                    read = {n: a for n, a in own.fields.items() if a.check is not None}
                    spelling = replace(
                        spelling,
                        fields={**read, **spelling.fields},
                        inert=spelling.inert | own.fields.keys(),
                    )
                peft_spellings.register(config.architecture)(spelling)
        return config

    return declared
