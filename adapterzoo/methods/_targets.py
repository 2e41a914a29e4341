"""The choice of linear layers that get adapters: the fields of both peers.

AdapterHub's: `selfattn_lora` with `attn_matrices`, `intermediate_lora`, `output_lora`,
`leave_out`. PEFT's: `target_modules`, `target_parameters`, `exclude_modules`,
`layers_to_transform`.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self, cast

from torch import Tensor

from adapterzoo.anatomy import HEAD, Anatomy, Role, Site, in_whole, shown
from adapterzoo.anatomy.sites import MIXER_ROLES
from adapterzoo.averaging import Combination
from adapterzoo.config import (
    MAX_WIDTH,
    AdapterConfig,
    Check,
    Choice,
    Layers,
    Maybe,
    Placement,
    Range,
    StackLayers,
    checks,
    config_class,
    field,
)
from adapterzoo.contracts import upcast
from adapterzoo.errors import ConfigError, SiteError, listing
from adapterzoo.patterns import (
    ALL_LINEAR,
    Excluded,
    Parameters,
    Patterns,
    Saved,
    Targets,
    TokenIds,
    check_keys,
    matches,
)
from adapterzoo.spelling import same

MATRICES: dict[str, Role] = {"q": "query", "k": "key", "v": "value", "o": "attention_out"}
TARGETS = frozenset(
    {"selfattn_lora", "intermediate_lora", "output_lora", "attn_matrices", "leave_out",
     "mixers", "target_modules", "target_parameters", "exclude_modules", "layers_to_transform"}
)  # fmt: skip
"""The fields of a config that choose the layers."""
COPIES = frozenset({"modules_to_save", "trainable_token_indices", "bias"})
"""The fields that choose copies of parts of the base model, see `_copies`."""
PLACES = TARGETS | COPIES
"""The fields that choose everything that is trained."""
RANK = Range(1, MAX_WIDTH)
SIZES = frozenset({"r", "alpha", "rank_pattern", "alpha_pattern"})
"""The fields of ranks and scalings."""

# the first number after a name, by PEFT's rule
_NUMBER = re.compile(r"(?:.*?\.)??[^.]*\.(\d+)\.")

# keys of `get_adapter`, as in adapters
_LOCATIONS: dict[Role, str] = {
    "query": "selfattn_lora", "key": "selfattn_lora", "value": "selfattn_lora",
    "qkv": "selfattn_lora", "attention_out": "selfattn_lora", "mixer_in": "selfattn_lora",
    "mixer_out": "selfattn_lora", "mlp_in": "intermediate_lora", "mlp_gate": "intermediate_lora",
    "mlp_out": "output_lora",
}  # fmt: skip


class Matrices(Check):
    """Names of attention matrices."""

    legal = f"a list of any of {listing(MATRICES)}"
    example: ClassVar[object] = ["q", "v"]

    def convert(self, value: object) -> object:
        """Return a tuple."""
        return tuple(value) if isinstance(value, Iterable) else (value,)

    def fits(self, value: object) -> bool:
        """Return whether each is the name of a matrix."""
        names = value if isinstance(value, tuple) else (value,)
        return all(isinstance(name, str) and name in MATRICES for name in names)


@config_class
class TargetedConfig(AdapterConfig):
    """Base of the configs whose adapters adapt linear layers.

    Attributes:
        choosing: the fields that choose the layers, and which side of them.
        modules_to_save: names of modules, or a regular expression: the adapter has its own copy of
            each layer in them.
        trainable_token_indices: ids of the tokens whose rows in the table the adapter has for
            itself, also in a tied output layer; or a dict from names of embeddings to such ids.
        bias: "all": the adapter has its own copies of all biases of the base model; "lora_only": of
            those of the layers that it adapts; "none".
        selfattn_lora: adapt the attention matrices named by `attn_matrices`, also in
            cross-attention. The parts of a fused layer are adapted separately.
        intermediate_lora: adapt the first feed-forward layer (the up projection of gated ones).
        output_lora: adapt the second feed-forward layer.
        attn_matrices: any of "q", "k", "v", "o".
        mixers: in a block without attention, `selfattn_lora` adapts what it has instead: a
            state-space model, recurrence or convolution or, if nothing else is adapted there, the
            feed-forward part. Its projections from the stream count as "q", "k" and "v", the one
            back to the stream as "o".
        leave_out: numbers of blocks that get no adapter; encoder blocks come first.
        target_modules: instead of the fields above: names or last parts of paths of layers, one
            regular expression for whole paths, or "all-linear" for every linear layer in blocks.
        target_parameters: instead of the fields above, or with `target_modules`: names or last
            parts of paths of parameters, such as those of fused experts, "experts.gate_up_proj".
        exclude_modules: names or a regular expression, as above, of layers to leave out; a part
            that matches no layer gives a warning, as in PEFT.
        layers_to_transform: numbers of the blocks that get adapters, counted in each stack, as
            PEFT reads them: the first number in a layer's path. None for all.
    """

    gives_way: ClassVar[bool] = True
    choosing: ClassVar[frozenset[str]] = TARGETS

    modules_to_save: str | tuple[str, ...] | None = field(None, Saved(), ours=True)
    trainable_token_indices: tuple[int, ...] | Mapping[str, tuple[int, ...]] | None = field(
        None, TokenIds(), ours=True
    )
    bias: str = field("none", Choice("none", "all", "lora_only"), ours=True)
    selfattn_lora: bool = True
    intermediate_lora: bool = False
    output_lora: bool = False
    attn_matrices: tuple[str, ...] = field(("q", "v"), Matrices())
    mixers: bool = field(True, ours=True)
    leave_out: tuple[int, ...] = field((), Layers())
    target_modules: str | tuple[str, ...] | None = field(None, Targets())
    target_parameters: tuple[str, ...] | None = field(None, Parameters(), ours=True)
    exclude_modules: str | tuple[str, ...] | None = field(None, Excluded())
    layers_to_transform: tuple[int, ...] | None = field(None, Maybe(StackLayers()))

    @property
    def slot_fields(self) -> frozenset[str]:
        """The fields that choose what is trained, which is compared itself."""
        return PLACES

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ConfigError: a value is invalid.
        """
        super().__post_init__()
        by_role = self._roles() if self.target_modules is None else ()
        if not (self.target_modules or self.target_parameters or by_role):
            raise ConfigError(
                f"{self._name}: nothing is left to adapt: no target_modules, attn_matrices, "
                f"selfattn_lora, intermediate_lora, output_lora. Write target_modules='all-linear'."
            )

    def below(self, prefix: str, anatomy: Anatomy) -> Self:
        """Return the config with layer names relative to the base model.

        Raises:
            ConfigError: the fields would select other layers than in PEFT.
        """
        wanted, parameters = self.target_modules, self.target_parameters or ()
        if self.layers_to_transform is not None and isinstance(wanted, tuple):
            every = (*anatomy, *anatomy.named)
            whole = [site for site in every if in_whole(site.name, prefix) in wanted]
            if other := [site for site in whole if not self._in_layers(site)]:
                path = in_whole(other[0].path, prefix)
                raise ConfigError(
                    f"{self._name}: PEFT always adapts {path!r}, as it is a whole path. Write "
                    f"target_modules or layers_to_transform, not both."
                )
        found = super().below(prefix, anatomy)
        weights = anatomy.weights().items()
        named = [site for name, site in weights if matches(f"{prefix}{name}", parameters)]
        if other := [s for s in named if s.layer not in self.leave_out and not found._wants(s)]:
            raise ConfigError(
                f"{self._name}: in PEFT no other field leaves out parameters, such as "
                f"{other[0].name!r}. Write whole names in target_parameters."
            )
        return found

    def placements(self, anatomy: Anatomy) -> list[Placement]:
        """Return one placement for each layer, or part of a fused layer, that the config names.

        Raises:
            SiteError: no layer matches, or a block lacks one.

        Warns:
            UserWarning: a part of `exclude_modules` matches no layer.
        """
        every = [*anatomy, *anatomy.parameters, *anatomy.named]
        known = {_number(site) for site in every} - {None}
        asked = self.layers_to_transform or ()
        if missing := [number for number in asked if number not in known]:
            near = [n for n in asked if n in known] or sorted(known, key=str)[-1:]
            raise ConfigError(
                f"{self._name}(layers_to_transform={[*asked]}): there is no block "
                f"{listing(missing)} in any stack. Write layers_to_transform={near}."
            )
        by_role = self.target_modules is None and self.target_parameters is None
        if by_role and not anatomy.blocks:
            raise SiteError(
                f"{self._name}: this model has no transformer blocks: {anatomy.reason}. Write "
                f"target_modules='all-linear', or the names of the layers to adapt."
            )
        if by_role:
            blocks = [b.layer for b in anatomy.blocks if any(map(self._in_layers, b.sites))]
            sites: Sequence[Site] = self._by_role(anatomy, blocks)
        else:
            names, parameters = self.target_modules, self.target_parameters
            layers = layers_named(self._name, names, anatomy) if names else []
            sites = layers
            if parameters:
                sites = [*layers, *parameters_named(self._name, parameters, anatomy, layers)]
        kept = [site for site in sites if self._wants(site)]
        if not kept:
            raise SiteError(
                f"{self._name}: leave_out, layers_to_transform and exclude_modules exclude every "
                f"layer that matches in {len(anatomy.blocks)} blocks. Write fewer of them."
            )
        # a key may match a layer of an excluded block
        by_layer = self.leave_out or self.layers_to_transform is not None
        paths = [site.name for site in (every if by_layer else kept)]
        for name, (check, _) in checks(type(self)).items():
            if isinstance(check, Patterns):
                check_keys(self._name, name, getattr(self, name), paths)
        excluded = self.exclude_modules or ()
        if idle := unmatched(excluded, every):
            # PEFT saves such configs, with a warning
            warnings.warn(
                f"{self._name}(exclude_modules={excluded!r}): no layer matches {listing(idle)}. "
                f"Write some of these names, or leave it out: {names_of(anatomy)}.",
                stacklevel=2,
            )
        return [Placement(site, self, _LOCATIONS.get(site.role, "")) for site in kept]

    def acts(self, anatomy: Anatomy) -> set[tuple[Site, str]]:
        """Return where and how an adapter acts, in a form independent of the config's fields.

        Args:
            anatomy: the model's anatomy.
        """
        return {(placement.site, placement.location) for placement in self.placements(anatomy)}

    @classmethod
    def combined(
        cls, configs: Sequence[AdapterConfig], strategy: Combination, anatomy: Anatomy
    ) -> AdapterConfig:
        """Return the first config; the others may name the same layers in other ways.

        Raises:
            CompositionError: the configs differ in anything else.
        """
        dicts = [config.to_dict() for config in configs]
        alike = cls.alike([c for c in configs if isinstance(c, TargetedConfig)], anatomy)
        strategy.refuse_differing(dicts, cls.training_fields | alike)
        return configs[0]

    @classmethod
    def alike(cls, configs: Sequence[TargetedConfig], anatomy: Anatomy) -> frozenset[str]:
        """Return the fields that may differ, since all configs act in the same places; none if not.

        Args:
            configs: at least one, of this class.
            anatomy: the model's anatomy.
        """
        first, *others = [config.acts(anatomy) for config in configs]
        return cls.choosing if all(other == first for other in others) else frozenset()

    def _by_role(self, anatomy: Anatomy, layers: Collection[int]) -> Sequence[Site]:
        """Return the layers of the roles, and the substitutes in blocks without attention.

        Args:
            anatomy: the model's anatomy.
            layers: numbers of the blocks.

        Raises:
            SiteError: no block has a role, or one block lacks it.
        """
        roles = self._roles() if layers else []
        found: list[Site] = []
        if self.mixers and self.selfattn_lora:
            blocks = [block for block in anatomy.blocks if block.layer in layers]
            for block in blocks:
                mixes = any(block.named(role) for role in MIXER_ROLES)
                if mixes or not any(block.named(role) for role in roles):
                    found += [site for site in block.instead() if self._stands_in(site.role)]
            if found:
                # Mamba has neither attention nor a feed-forward part
                roles = [role for role in roles if any(block.has(role) for block in blocks)]
        # without roles, `select` reports what is missing
        if roles or not found:
            found += anatomy.select(*roles, cross=None, layers=layers)
        return sorted(found, key=lambda site: site.layer)

    def _stands_in(self, role: Role) -> bool:
        """Return whether a role of a mixer or of the feed-forward part replaces attention."""
        out = role in ("mixer_out", "mlp_out")
        return any((matrix == "o") == out for matrix in self.attn_matrices)

    def _roles(self) -> list[Role]:
        roles = [MATRICES[m] for m in self.attn_matrices] if self.selfattn_lora else []
        if self.intermediate_lora:
            roles.append("mlp_in")
        if self.output_lora:
            roles.append("mlp_out")
        return roles

    def _wants(self, site: Site) -> bool:
        excluded = self.exclude_modules is not None and any(
            matches(path, self.exclude_modules) for path in (site.path, site.name)
        )
        return self._in_layers(site) and not excluded

    def _in_layers(self, site: Site) -> bool:
        only, wanted = self.layers_to_transform, self.target_modules or ()
        # as in PEFT, a whole path is always adapted
        is_whole = site.path.startswith(HEAD) and shown(site.path) in wanted
        among = only is None or is_whole or _number(site) in only
        return site.layer not in self.leave_out and among

    @property
    def _name(self) -> str:
        return type(self).__name__


def _number(site: Site) -> int | None:
    """Return the number of a site's block in its stack, as PEFT reads it; None without one."""
    found = _NUMBER.match(site.name)
    return None if found is None else int(found[1])


# --- layers and parameters selected by name ---


def layers_named(config: str, wanted: str | tuple[str, ...], anatomy: Anatomy) -> list[Site]:
    """Return the layers that `target_modules` names.

    Args:
        config: name of the config's class.
        wanted: the names.
        anatomy: the model's anatomy.

    Raises:
        SiteError: a name matches no layer.
    """
    whole = [s for s in anatomy if s.parameter is None or s.is_of_attention]
    sites = [*(site for site in whole if site.is_used), *anatomy.named]
    linears = [site for site in anatomy.linears() if site.is_called]
    # without blocks, all but the output layer onto the vocabulary, as in PEFT
    inside = [s for s in linears if (s.layer >= 0 if anatomy.blocks else s.role != "lm_head")]
    if wanted == ALL_LINEAR and inside:
        return inside
    matching = [site for site in sites if matches(site.path, wanted)]
    missing = unmatched(wanted, sites)
    if missing or not matching:
        every = "target_modules='all-linear', or " if inside else ""
        hint = f"Write {every}some of these names: {names_of(sites)}."
        raise SiteError(
            f"{config}(target_modules={wanted!r}): no layer matches "
            f"{listing(missing) if matching else repr(wanted)}. "
            f"{hint if sites else _without_layers(anatomy)}"
        )
    return matching


def _without_layers(anatomy: Anatomy) -> str:
    """Return what to write for a model without nameable layers."""
    none = "This model has no linear layer, embedding or convolution of torch's own classes"
    if not anatomy.parameters:
        return f"{none}. Use one of them in its place."
    names = [site.name for site in anatomy.parameters]
    return f"{none}. Write target_parameters=[…], with some of {listing(names, limit=10)}."


def parameters_named(
    config: str, wanted: tuple[str, ...], anatomy: Anatomy, layers: Sequence[Site]
) -> list[Site]:
    """Return the sites of the parameters that `target_parameters` names.

    Args:
        config: name of the config's class.
        wanted: the names.
        anatomy: the model's anatomy.
        layers: the layers that `target_modules` names.

    Raises:
        SiteError: a name matches no parameter, or the weight of one of the layers.
    """
    weights = {name: site for name, site in anatomy.weights().items() if site.is_used}
    call = f"{config}(target_parameters={[*wanted]!r})"
    missing = [n for n in wanted if not any(matches(name, (n,)) for name in weights)]
    if missing:
        known = {".".join(n.split(".")[-2:]) for n, site in weights.items() if site.parameter}
        raise SiteError(
            f"{call}: no parameter with two or three dimensions matches {listing(missing)}. Write "
            f"target_modules=[…] for layers, or some of {listing(sorted(known))}."
        )
    found = [site for name, site in weights.items() if matches(name, wanted)]
    if twice := [site.path for site in found if site in layers]:
        raise SiteError(f"{call}: target_modules also has {twice[0]!r}. Leave it out of one.")
    return found


def fields_at(sites: Iterable[Site]) -> dict[str, Any]:
    """Return the fields that select only these sites, with parts of layers by their layer."""
    listed = [*sites]
    layers = dict.fromkeys(site.path for site in listed if site.parameter is None)
    parameters = dict.fromkeys(site.name for site in listed if site.parameter is not None)
    return {
        "target_modules": tuple(layers), "target_parameters": tuple(parameters) or None,
        "exclude_modules": None, "leave_out": (), "layers_to_transform": None,
    }  # fmt: skip


def unmatched(wanted: str | tuple[str, ...], sites: Sequence[Site]) -> list[str]:
    """Return the entries of a field that match no layer."""
    # a string is one pattern, a list holds endings
    parts = {wanted: wanted} if isinstance(wanted, str) else {name: (name,) for name in wanted}
    paths = {path for site in sites for path in (site.path, site.name)}
    return [n for n, part in parts.items() if not any(matches(path, part) for path in paths)]


def names_of(sites: Iterable[Site]) -> str:
    """Return the last names of layers, as text for messages."""
    return listing(sorted({site.path.rpartition(".")[2] for site in sites}), limit=30)


# --- checks of sites, ranks and scalings ---


def check_site(config: AdapterConfig, site: Site, *dropouts: str, embeddings: bool = False) -> None:
    """Check that a site has features for an adapter to read and drop.

    Args:
        config: the adapter's config.
        site: the adapter's site.
        *dropouts: the fields of the config that drop features or parts of the update.
        embeddings: whether the method can adapt embeddings, if nothing is dropped.

    Raises:
        ConfigError: it has none.
    """
    given = ", ".join(f"{name}={config[name]}" for name in dropouts)
    call = f"{type(config).__name__}({given}) at {site.path!r}"
    is_embedding = site.kind == "embedding"
    if is_embedding and not embeddings:
        raise ConfigError(
            f"{call}: it cannot adapt an embedding, which reads token numbers. Write "
            f"exclude_modules=[{site.path!r}]."
        )
    if (is_embedding or site.is_only_read) and any(config[name] for name in dropouts):
        zeros = ", ".join(f"{name}=0.0" for name in dropouts)
        raise ConfigError(f"{call}: there are no features to drop. Write {zeros}.")


def check_size(
    config: AdapterConfig,
    site: Site,
    name: str,
    asked: int,
    legal: Collection[int],
    rest: str = "",
    otherwise: str = "",
) -> None:
    """Check that a size fits the widths of a site.

    Args:
        config: the adapter's config.
        site: the adapter's site.
        name: name of the field with the size.
        asked: the size.
        legal: the valid sizes.
        rest: what to write together with another size.
        otherwise: what to write if no size fits; empty: exclude the site.

    Raises:
        ConfigError: the size does not fit.
    """
    if asked in legal:
        return
    near = sorted(sorted(legal, key=lambda size: abs(size - asked))[:2])
    hint = otherwise or f"exclude_modules=[{site.path!r}]"
    if near:
        hint = f"{name}={near[-1]}{rest}"
    raise ConfigError(
        f"{type(config).__name__}({name}={asked}) at {site.path!r}: not legal for d_in={site.d_in} "
        f"and d_out={site.d_out}; near it are {near}. Write {hint}."
    )


def refuse_larger(config: object, rank: int, ranks: Iterable[int]) -> None:
    """Refuse ranks larger than a slot's.

    Args:
        config: the config that has them.
        rank: the slot's rank.
        ranks: the adapter's ranks.

    Raises:
        ConfigError: a rank is larger.
    """
    if (most := max(ranks)) > rank:
        raise ConfigError(
            f"{type(config).__name__}(r={most}): the slot has rank {rank}. Write "
            f"enable_peft_hotswap(target_rank={most})."
        )


def rescaled(
    tensors: Mapping[str, Tensor], scaling: float, slot: float, keys: Container[str]
) -> dict[str, Tensor]:
    """Return the tensors, with the ratio of two scalings in some of them.

    Args:
        tensors: tensors of an adapter.
        scaling: the adapter's scaling.
        slot: the scaling of the adapter that takes the tensors.
        keys: keys of the tensors whose product with the scaling is the update.

    Raises:
        ConfigError: the slot multiplies by zero, but the adapter does not.
    """
    if scaling == slot:
        return dict(tensors)
    if slot == 0:
        raise ConfigError(f"the slot's scaling is 0, not {scaling:g}. Write another alpha there.")
    ratio = scaling / slot
    return {
        key: (upcast(t, t) * ratio).to(t.dtype) if key in keys else t for key, t in tensors.items()
    }


# --- in AdapterHub's fields: attention matrices and feed-forward layers ---

FLAGS = same("selfattn_lora", "intermediate_lora", "output_lora", "attn_matrices", "leave_out")
FEED_FORWARD = ("intermediate_lora", "output_lora")
THEIR_MATRICES: dict[Role, str] = {"query": "q", "key": "k", "value": "v"}
"""AdapterHub's attention matrices."""


def place(config: AdapterConfig, sites: Sequence[Site], anatomy: Anatomy) -> AdapterConfig:
    """Return the config with the layers that a file has tensors for.

    In some families `adapters` swaps the names of the first and last layer, or leaves out
    cross-attention, and some releases adapt the gate, so the keys decide.
    """
    config = cast("TargetedConfig", config)
    roles = {site.role for site in sites}
    crossing = {p.site.path for p in config.placements(anatomy) if p.site.cross}
    if crossing and sites and not any(site.cross for site in sites):
        config = config.replace(exclude_modules=tuple(sorted(crossing)))
    first, last = config.intermediate_lora, config.output_lora
    if first != last and roles & {"mlp_in", "mlp_out"} == {"mlp_out" if first else "mlp_in"}:
        return config.replace(intermediate_lora=last, output_lora=first)
    if (first or last) and "mlp_gate" in roles:
        blocks = {block.layer: f"{block.path}." for block in anatomy.blocks}
        below = sorted({site.path.removeprefix(blocks[site.layer]) for site in sites})
        return config.replace(target_modules=tuple(below))
    return config


def as_flags(config: AdapterConfig, anatomy: Anatomy) -> AdapterConfig | None:
    """Return the config with its sites in AdapterHub's fields; None if impossible."""
    config = cast("TargetedConfig", config)
    given = (config.target_modules, config.exclude_modules, config.layers_to_transform)
    if given == (None, None, None):
        return config
    sites = [placement.site for placement in config.placements(anatomy)]
    roles = {site.role for site in sites}
    if not roles & {*THEIR_MATRICES, "mlp_in", "mlp_out"}:
        return None
    matrices = tuple(letter for role, letter in THEIR_MATRICES.items() if role in roles)
    layers = {site.layer for site in sites}
    candidate = config.replace(
        selfattn_lora=bool(matrices),
        attn_matrices=matrices or ("q", "v"),
        intermediate_lora="mlp_in" in roles,
        output_lora="mlp_out" in roles,
        leave_out=tuple(b.layer for b in anatomy.blocks if b.layer not in layers),
        target_modules=None,
        exclude_modules=None,
        layers_to_transform=None,
    )
    found = {(p.site.path, p.site.role) for p in candidate.placements(anatomy)}
    return candidate if found == {(site.path, site.role) for site in sites} else None
