"""LoHa and LoKr in PEFT's files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from adapterzoo.configs import AdapterConfig, Placement
from adapterzoo.errors import CheckpointError, argument
from adapterzoo.fields import FACTOR, MAX_WIDTH, Range, Share
from adapterzoo.peft_arguments import PeftArguments
from adapterzoo.spelling import (
    Fields,
    PeftField,
    PeftLayer,
    PeftOutput,
    PeftPart,
    PeftSpelling,
    Tensors,
)

from ._lycoris import LycorisConfig
from ._peft_arguments import EXCLUDED, TARGETS, ours
from ._peft_sites import row_numbers, unsayable

_FIELDS = {
    "r": PeftField(8, Range(1, MAX_WIDTH)),
    "alpha": PeftField(8.0, FACTOR),
    "rank_dropout": PeftField(0.0, Share()),
    "module_dropout": PeftField(0.0, Share()),
}
_LOKR_FIELDS = {
    "decompose_both": PeftField(False),
    "decompose_factor": PeftField(-1, Range(-1, MAX_WIDTH)),
    "rank_dropout_scale": PeftField(False),
}


def loha(config: type[AdapterConfig]) -> PeftSpelling:
    """Return how PEFT spells LoHa."""
    names = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")
    return _spelling(config, "LOHA", "LoHaConfig", names, _FIELDS, join=_join)


def lokr(config: type[AdapterConfig]) -> PeftSpelling:
    """Return how PEFT spells LoKr."""
    forms = [((f"lokr_{w}",), (f"lokr_{w}_a", f"lokr_{w}_b")) for w in ("w1", "w2")]
    return _spelling(
        config,
        "LOKR",
        "LoKrConfig",
        [name for side in forms for form in side for name in form],
        _FIELDS | _LOKR_FIELDS,
        forms=tuple(frozenset((*w1, *w2)) for w1 in forms[0] for w2 in forms[1]),
    )


def _spelling(
    config: type[AdapterConfig],
    peft_type: str,
    class_name: str,
    names: Sequence[str],
    fields: Mapping[str, PeftField],
    forms: tuple[frozenset[str], ...] = (),
    join: Callable[[Sequence[PeftPart], Callable[[], Tensor | None]], Tensors] | None = None,
) -> PeftSpelling:
    def read(layers: Sequence[PeftLayer]) -> list[Fields]:
        return [{name: layer.fields[name] for name in fields} for layer in layers]

    def write(layers: Sequence[PeftOutput]) -> list[Fields]:
        return [_written(layer, [*fields]) for layer in layers]

    arguments = {
        **TARGETS,
        **EXCLUDED,
        **{name: ours(field.default, name) for name, field in fields.items()},
        "rank_pattern": ours({}, "rank_pattern"),
        "alpha_pattern": ours({}, "alpha_pattern"),
        "use_effective_conv2d": ours(False, "use_effective_conv2d"),
        "init_weights": ours(True, "init_weights"),
    }
    return PeftSpelling(
        config=config,
        peft_type=peft_type,
        arguments=PeftArguments(class_name=class_name, fields=arguments),
        tensors={name: (name,) for name in names},
        fields=fields,
        patterns={"rank_pattern": ("r", "r"), "alpha_pattern": ("alpha", "alpha")},
        # of convolutions, which are refused by their tensors
        inert=frozenset(("init_weights", "use_effective_conv2d")),
        read_layers=read,
        unsayable=_unsayable,
        write_layers=write,
        forms=forms,
        join=join,
    )


def _unsayable(placement: Placement) -> str | None:
    """Return why PEFT's format cannot express an adapter."""
    return unsayable(
        placement, f"a {type(placement.config).__name__}", "PEFT's method does not work"
    )


def _written(layer: PeftOutput, names: Sequence[str]) -> Fields:
    """Return the fields of PEFT's config for a layer; the scalings of its parts are equal."""
    placement = layer.parts[0].placement
    config, path = cast("LycorisConfig", placement.config), placement.site.path
    rank, alpha = config.rank_at(path), config.alpha_at(path)
    if len(layer.parts) > 1:
        # a joined adapter has the sum of the ranks
        rank = layer.tensors["hada_w1_a"].shape[1]
        alpha = config.scaling_at(path) * rank
    values = config.to_dict()
    return {
        **{name: values[name] for name in names},
        "r": rank,
        "alpha": int(alpha) if alpha == int(alpha) else alpha,
        "use_effective_conv2d": False,
        "init_weights": True,
    }


def _join(parts: Sequence[PeftPart], _weight: Callable[[], Tensor | None]) -> Tensors:
    """Return one LoHa of a whole layer that computes what those of its parts do.

    Each part has rows and ranks of its own: the others' products are zero there.

    Raises:
        CheckpointError: two parts share rows, or differ in scaling or dropout.
    """
    site = parts[0].placement.site
    configs = [cast("LycorisConfig", part.placement.config) for part in parts]
    said = {(c.scaling_at(site.path), c.rank_dropout, c.module_dropout) for c in configs}
    slices = [part.placement.site.output_slice for part in parts]
    numbers = [row_numbers(own) for own in slices if own is not None]
    used = torch.cat(numbers) if numbers else torch.empty(0)
    if len(numbers) < len(parts) or len(used.unique()) < len(used) or len(said) > 1:
        raise CheckpointError(
            f"at {site.path!r} {len(parts)} LoHa adapters share rows or differ in scaling or "
            f"dropout, and PEFT's one adapter of the layer cannot compute the same. Write "
            f"{argument('format', 'native')}."
        )
    whole = next(own.groups * own.width for own in slices if own is not None)
    ranks = [part.tensors["hada_w1_a"].shape[1] for part in parts]
    joined: Tensors = {}
    for w in ("hada_w1", "hada_w2"):
        joined[f"{w}_b"] = torch.cat([part.tensors[f"{w}_b"] for part in parts])  # [ranks, d_in]
        joined[f"{w}_a"] = joined[f"{w}_b"].new_zeros(whole, sum(ranks))  # [d_out, ranks]
        start = 0
        for part, rows, rank in zip(parts, numbers, ranks, strict=True):
            joined[f"{w}_a"][rows, start : start + rank] = part.tensors[f"{w}_a"]
            start += rank
    return joined
