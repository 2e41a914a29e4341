"""Where adapters of linear layers sit: the peers' two vocabularies, once for all such methods.

AdapterHub's: `selfattn_lora` with `attn_matrices`, `intermediate_lora`, `output_lora`,
`leave_out`. PEFT's: `target_modules`, `exclude_modules`, `layers_to_transform`.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from adapterzoo.anatomy import Anatomy, Role, Site
from adapterzoo.configs import AdapterConfig, Placement, require_layers
from adapterzoo.errors import ConfigError, SiteError, listing
from adapterzoo.expressions import steps

ALL_LINEAR = "all-linear"
MATRICES: dict[str, Role] = {"q": "query", "k": "key", "v": "value", "o": "attention_out"}
TARGETS = frozenset(
    {"selfattn_lora", "intermediate_lora", "output_lora", "attn_matrices", "leave_out",
     "target_modules", "exclude_modules", "layers_to_transform"}
)  # fmt: skip
"""The fields of a config that say where."""


# about a second for a layer, whose path has so many characters
_MAX_STEPS = 2e8
_PATH = 64


@dataclass(frozen=True, kw_only=True)
class TargetedConfig(AdapterConfig):
    """Base of the configs whose adapters sit at linear layers.

    Attributes:
        selfattn_lora: adapt the attention matrices named by `attn_matrices`; in cross-attention
            too. On a fused layer the parts are adapted one by one.
        intermediate_lora: adapt the first feed-forward layer (in gated ones the up projection).
        output_lora: adapt the second feed-forward layer.
        attn_matrices: any of "q", "k", "v", "o".
        leave_out: numbers of blocks that get no adapter; encoder blocks first, then decoder.
        target_modules: instead of the fields above: names or last parts of paths of layers, one
            regular expression for whole paths, or "all-linear" for every linear layer in blocks.
        exclude_modules: names or a regular expression, as above, of layers to leave alone; of
            what matches no layer a warning is given, as PEFT does.
        layers_to_transform: numbers of the only blocks that get adapters; None for all.
    """

    selfattn_lora: bool = True
    intermediate_lora: bool = False
    output_lora: bool = False
    attn_matrices: tuple[str, ...] = ("q", "v")
    leave_out: tuple[int, ...] = ()
    target_modules: str | tuple[str, ...] | None = None
    exclude_modules: str | tuple[str, ...] | None = None
    layers_to_transform: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Check the fields that say where.

        Raises:
            ConfigError: a value is not legal.
        """
        require_layers(self, "leave_out")
        require_layers(self, "layers_to_transform")
        asked = self.attn_matrices
        matrices = tuple(asked) if isinstance(asked, Iterable) else (asked,)
        object.__setattr__(self, "attn_matrices", matrices)
        if unknown := [m for m in matrices if not (isinstance(m, str) and m in MATRICES)]:
            raise ConfigError(
                f"{self._name}(attn_matrices={asked!r}): there is no attention "
                f"matrix {listing(unknown)}; legal are {listing(MATRICES)}. "
                f"Write attn_matrices=['q', 'v']."
            )
        for field in ("target_modules", "exclude_modules"):
            self._check_modules(field)
        if self.target_modules is None and not self._roles():
            raise ConfigError(
                f"{self._name}: nothing is left to adapt: selfattn_lora, intermediate_lora and "
                f"output_lora are off or attn_matrices is empty, and there are no target_modules. "
                f"Write target_modules='all-linear' or selfattn_lora=True."
            )

    def placements(self, anatomy: Anatomy) -> list[Placement]:
        """One placement for each layer, or part of a fused layer, that the config names.

        Raises:
            SiteError: nothing matches, or a block lacks what is asked for.

        Warns:
            UserWarning: a part of `exclude_modules` matches no layer.
        """
        if not anatomy.blocks and self.target_modules in (None, ALL_LINEAR):
            raise SiteError(
                f"{self._name}: this model has no transformer blocks: {anatomy.reason}. Write "
                f"target_modules=[…], with the names of the layers to adapt."
            )
        if self.target_modules is None:
            sites: Iterable[Site] = self._by_role(anatomy)
        else:
            sites = self._by_name(anatomy, self.target_modules)
        kept = [site for site in sites if self._wants(site)]
        if not kept:
            raise SiteError(
                f"{self._name}(leave_out={list(self.leave_out)!r}, layers_to_transform="
                f"{self.layers_to_transform!r}, exclude_modules={self.exclude_modules!r}): every "
                f"layer that matches is taken out again by these. The model has blocks 0 to "
                f"{len(anatomy.blocks) - 1}. Write fewer of them in leave_out or exclude_modules."
            )
        self._warn_of_idle(anatomy)
        return [Placement(site, self) for site in kept]

    def _roles(self) -> list[Role]:
        roles = [MATRICES[m] for m in self.attn_matrices] if self.selfattn_lora else []
        if self.intermediate_lora:
            roles.append("mlp_in")
        if self.output_lora:
            roles.append("mlp_out")
        return roles

    def _by_role(self, anatomy: Anatomy) -> Sequence[Site]:
        layers = [b.layer for b in anatomy.blocks if self._in_layers(b.layer)]
        if not layers:
            return ()
        return anatomy.select(*self._roles(), cross=None, layers=layers)

    def _by_name(self, anatomy: Anatomy, wanted: str | tuple[str, ...]) -> Iterator[Site]:
        if wanted == ALL_LINEAR:
            yield from (s for s in anatomy.linears() if s.layer >= 0)
            return
        sites = [s for s in anatomy if s.parameter is None]
        matching = [s for s in sites if matches(s.path, wanted)]
        # a lone string is a pattern as a whole, the names of a list are endings
        each = [wanted] if isinstance(wanted, str) else [(name,) for name in wanted]
        unmatched = [w for w in each if not any(matches(s.path, w) for s in sites)]
        missing = [w if isinstance(w, str) else w[0] for w in unmatched]
        if missing or not matching:
            raise SiteError(
                f"{self._name}(target_modules={wanted!r}): no layer matches "
                f"{listing(missing) if matching else repr(wanted)}. Names of layers in this model: "
                f"{listing(sorted({s.path.rpartition('.')[2] for s in sites}), limit=30)}. "
                f"Write some of them, or target_modules='all-linear'."
            )
        yield from matching

    def _wants(self, site: Site) -> bool:
        excluded = self.exclude_modules is not None and matches(site.path, self.exclude_modules)
        return self._in_layers(site.layer) and not excluded

    def _warn_of_idle(self, anatomy: Anatomy) -> None:
        """Say what is excluded in vain: no error, as PEFT saves such configs, with a warning."""
        asked = self.exclude_modules or ()
        each = [asked] if isinstance(asked, str) else [(name,) for name in asked]
        idle = [w for w in each if not any(matches(s.path, w) for s in anatomy)]
        if idle:
            missing = [w if isinstance(w, str) else w[0] for w in idle]
            warnings.warn(
                f"{self._name}(exclude_modules={asked!r}): no layer matches {listing(missing)}, so "
                f"that nothing is excluded by it. Names of layers in this model: "
                f"{listing(sorted({s.path.rpartition('.')[2] for s in anatomy}), limit=30)}. Write "
                f"some of them, or leave it out.",
                stacklevel=2,
            )

    def _in_layers(self, layer: int) -> bool:
        only = self.layers_to_transform
        return layer not in self.leave_out and (only is None or layer in only)

    def _check_modules(self, field: str) -> None:
        value = given = getattr(self, field)
        if value is None:
            return
        if not isinstance(value, str):
            value = tuple(value) if isinstance(value, Iterable) else (None,)
            object.__setattr__(self, field, value)
        names = _names(value)
        if not names or not all(isinstance(n, str) and n for n in names):
            raise ConfigError(
                f"{self._name}({field}={given!r}): {field} is a list of layer names, a regular "
                f"expression or 'all-linear'. Write {field}=['query', 'value']."
            )
        if isinstance(value, str):
            check_pattern(self, field, value)

    @property
    def _name(self) -> str:
        return type(self).__name__


def check_pattern(
    config: AdapterConfig, field: str, *patterns: str, names: str = "['query', 'value']"
) -> None:
    """Check that a field holds regular expressions, which come to an end soon.

    Args:
        config: that has the field.
        field: its name.
        patterns: the expressions.
        names: what to write without them.

    Raises:
        ConfigError: one does not compile, or they could search for hours.
    """
    total = 0.0
    for pattern in patterns:
        total += steps(pattern, _PATH)
        if total > _MAX_STEPS:
            raise ConfigError(
                f"{type(config).__name__}({field}={pattern[:80]!r}): the expression could search "
                f"for hours: it repeats a group, refers to one, or repeats too often. Write names "
                f"of layers instead: {field}={names}, or fewer of '*' and '+'."
            )
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise ConfigError(
                f"{type(config).__name__}({field}={pattern[:80]!r}): not a regular expression "
                f"({error}). Write names of layers instead: {field}={names}."
            ) from error


def matches(path: str, wanted: str | Iterable[str]) -> bool:
    """PEFT's rule: a string is a regular expression for the whole path, a list holds endings.

    A string may be the last name of a path as well.
    """
    if isinstance(wanted, str):
        return re.fullmatch(wanted, path) is not None or path.rpartition(".")[2] == wanted
    return any(path == name or path.endswith(f".{name}") for name in wanted)


def _names(wanted: str | tuple[str, ...]) -> tuple[str, ...]:
    return (wanted,) if isinstance(wanted, str) else wanted
