"""Bottlenecks that `adapters` 1.3.0 puts elsewhere than its own documentation says.

A checkpoint that was trained so gives other outputs here, and one that was trained here gives
other outputs there. Each row was seen by comparing outputs with those of `adapters`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from adapterzoo.errors import CheckpointError

from .formats import Facts
from .places import Place


def _always(place: Place) -> bool:
    return True


def _reads_norm(place: Place) -> bool:
    return bool(place.placement.config.to_dict()["original_ln_before"])


def _at_output(place: Place) -> bool:
    return place.placement.site.kind == "output"


def _in_attention(place: Place) -> bool:
    return _at_output(place) and place.placement.location == "mh_adapter"


def _is_parallel(place: Place) -> bool:
    return bool(place.placement.config.to_dict()["is_parallel"])


_LAST_NORMS = (_always, "with the norms of the last block in all blocks")

_QUIRKS: Mapping[str, tuple[Callable[[Place], bool], str]] = {
    "albert": (_in_attention, "behind attention on the residual stream instead of its output"),
    "beit": (_at_output, "behind the learned scaling of a sub-layer's output, not before it"),
    "gemma2": _LAST_NORMS,
    "gemma3": _LAST_NORMS,
    "gemma3_text": _LAST_NORMS,
    "gptj": (_is_parallel, "on the stream behind attention, which its blocks do not have"),
    "modernbert": _LAST_NORMS,
    "xmod": (_reads_norm, "without the norm behind the feed-forward part"),
}


def refuse_fusion_quirks(facts: Facts, places: list[Place]) -> None:
    """Raise where `adapters` computes another fusion of bottlenecks than that of its paper.

    Args:
        facts: of the model.
        places: of an adapter that is fused.

    Raises:
        CheckpointError: the bottlenecks are such ones.
    """
    refuse_quirks(facts, places)
    if any(place.placement.location and _is_parallel(place) for place in places):
        raise CheckpointError(
            f"{facts.call}: adapters adds the residual stream once more where it fuses parallel "
            f"bottlenecks (is_parallel=True): the same tensors give other outputs there than here. "
            f"Nothing has been done. Fuse others, such as 'seq_bn', or write format='native' to "
            f"save a fusion of this library."
        )


def refuse_quirks(facts: Facts, places: list[Place]) -> None:
    """Raise where `adapters` computes another thing than what the config says.

    Args:
        facts: of the model.
        places: of the adapter.

    Raises:
        CheckpointError: a bottleneck of this config in this family is such a one.
    """
    quirk = _QUIRKS.get(facts.model_type)
    if quirk is None:
        return
    applies, what = quirk
    if any(place.placement.location and applies(place) for place in places):
        raise CheckpointError(
            f"{facts.call}: in a {facts.model_type} adapters computes these bottlenecks {what}: "
            f"the same tensors give other outputs there than here. Nothing has been done. Train "
            f"it anew where it shall run, or write format='native' to save one of this library."
        )
