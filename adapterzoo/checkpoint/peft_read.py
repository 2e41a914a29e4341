"""From PEFT's tensors to an adapter of this library, its config written from the tensors.

Where adapters sit, of which rank or with how many factors, the tensors say exactly; PEFT's config
says it by patterns that may match nothing, or by a number that PEFT did not keep to. Only what
tensors cannot say is taken from the config: scalings, dropout, and what kind of adapter it is.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor

from adapterzoo.anatomy import Site
from adapterzoo.configs import AdapterConfig, ConfigUnion, architectures
from adapterzoo.contracts import compute_dtype
from adapterzoo.errors import CheckpointError, ConfigError, listing

from .formats import Facts
from .peft_config import CONFIG, PeftConfig
from .peft_patterns import by_name, exactly, most_common, short_names, values_at

# PEFT's names of parameters to those here; it writes no name of the adapter, other tools do
_PARAMETERS: Mapping[str, str] = {
    "lora_A.weight": "lora_A",
    "lora_B.weight": "lora_B",
    "lora_B.bias": "lora_B_bias",
    "lora_embedding_A": "lora_A",
    "lora_embedding_B": "lora_B",
    "lora_magnitude_vector": "m",
    "lora_magnitude_vector.weight": "m",
    "boft_R": "boft_R",
    "boft_s": "boft_s",
}
_KEY = re.compile(
    r"(?P<path>.+)\.(?P<kind>lora_[AB]|lora_embedding_[AB]|lora_magnitude_vector|boft_[Rs])"
    r"(?:\.default)?(?P<end>\.weight|\.bias)?"
)
_OURS = re.compile(r"\.(lora|boft)_")
_PREFIX = "base_model.model."


@dataclass(slots=True)
class Layer:
    """The tensors of one adapted layer.

    Attributes:
        named: path of the layer as the file has it, without PEFT's prefix.
        site: where it is in this model.
        tensors: by the names of parameters here.
    """

    named: str
    site: Site
    tensors: dict[str, Tensor] = field(default_factory=dict)


def sorted_out(
    tensors: Mapping[str, Tensor], facts: Facts
) -> tuple[dict[str, Layer], dict[str, Tensor]]:
    """The tensors of adapters by path in this model, and all others by key in the file.

    Raises:
        CheckpointError: adapters sit where this model cannot have any.
    """
    sites = {site.path: site for site in facts.anatomy if site.parameter is None}
    layers: dict[str, Layer] = {}
    rest: dict[str, Tensor] = {}
    known: dict[str, str | None] = {}
    lost: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        place = key.removeprefix(_PREFIX)
        match = _KEY.fullmatch(place)
        parameter = _PARAMETERS.get(match["kind"] + (match["end"] or "")) if match else None
        if match is None or parameter is None:
            if _OURS.search(place):
                raise CheckpointError(
                    f"{facts.call}: the tensor {place!r} is of an adapter of no kind that is "
                    f"known: known are {listing(_PARAMETERS, limit=20)}. Save the adapter again "
                    f"by PEFT, alone."
                )
            rest[place] = tensor
            continue
        named = match["path"]
        if named not in known:
            known[named] = _here(named, sites, facts)
        path = known[named]
        if path is None:
            lost.setdefault(named, tensor)
            continue
        layer = layers.setdefault(path, Layer(named, sites[path]))
        if parameter in layer.tensors:
            raise CheckpointError(
                f"{facts.call}: the file has two tensors {parameter!r} for {path!r}. Save the "
                f"adapter again, alone."
            )
        layer.tensors[parameter] = tensor
    if lost:
        raise CheckpointError(f"{facts.call}: {_about(lost, sites, facts)}")
    if not layers:
        raise CheckpointError(
            f"{facts.call}: the file holds no tensors of LoRA, DoRA or BOFT; it holds "
            f"{listing(sorted(tensors))}. Copy the checkpoint again from where it was saved."
        )
    return layers, rest


def _here(named: str, sites: Mapping[str, Site], facts: Facts) -> str | None:
    """The path in this model of what a file names."""
    for path in _candidates(named, facts):
        if path in sites:
            return path
    # a release of transformers before this one named it
    return next((path for path in _candidates(facts.renamed(named), facts) if path in sites), None)


def _candidates(named: str, facts: Facts) -> Iterable[str]:
    yield named
    # the file may be of another task class: with a base model below it, or without
    cls = getattr(transformers, facts.model_class, None)
    prefix = facts.prefix or getattr(cls, "base_model_prefix", "")
    yield named.removeprefix(f"{prefix}.")


def _about(lost: Mapping[str, Tensor], sites: Mapping[str, Site], facts: Facts) -> str:
    shown = listing(sorted(lost))
    if any(tensor.dim() > 2 and not _rotates(tensor) for tensor in lost.values()):
        return (
            f"the adapters at {shown} are those of convolutions, which have none here. Train "
            f"without them: target_modules=[…]."
        )
    ends = listing(sorted({path.rpartition(".")[2] for path in sites}), limit=30)
    return (
        f"the file has adapters at {shown}, where this {facts.model_class} has no layers that "
        f"can have adapters. Its base model has layers named {ends}; layers of heads have no "
        f"adapters. Load the file into the model that it was trained on."
    )


def _rotates(tensor: Tensor) -> bool:
    return tensor.dim() == 4 and tensor.shape[-1] == tensor.shape[-2] > 1


def adapter_from(
    theirs: PeftConfig, layers: Mapping[str, Layer], facts: Facts
) -> tuple[AdapterConfig, dict[str, Tensor]]:
    """Config and tensors of the adapter.

    Raises:
        CheckpointError: tensors are missing, contradict each other or the config, or are more
            than this library has.
    """
    dtype, tensors = _in_one_dtype(layers, facts)
    make = _rotations if theirs.peft_type == "BOFT" else _low_rank
    try:
        members = make(theirs, layers, {"dtype": dtype}, facts)
        config = members[0] if len(members) == 1 else ConfigUnion(*members)
        # the widths of the sites are part of what is legal
        config.placements(facts.anatomy)
    except ConfigError as error:
        raise CheckpointError(f"{facts.call}: {error}") from error
    return config, tensors


def _in_one_dtype(
    layers: Mapping[str, Layer], facts: Facts
) -> tuple[str | None, dict[str, Tensor]]:
    """What the config shall say of the dtype, and the tensors in it; no bit is lost."""
    found = {t.dtype for layer in layers.values() for k, t in layer.tensors.items() if k != "m"}
    if wrong := [dtype for dtype in found if not dtype.is_floating_point]:
        raise CheckpointError(
            f"{facts.call}: the file has tensors of {wrong[0]}; those of adapters are of a "
            f"floating-point dtype. Save the adapter again in float32."
        )
    own, dtype = facts.dtype, torch.float32
    # widening is exact; over halves PEFT, too, keeps in float32 what is of another dtype
    if found == {own} or own is torch.float64:
        dtype = own
    elif torch.float64 in found:
        # more than the model has: loading asks whether to round
        dtype = torch.float64
    tensors = {
        f"{path}/{name}": tensor.to(compute_dtype(dtype) if name == "m" else dtype)
        for path, layer in layers.items()
        for name, tensor in layer.tensors.items()
    }
    return None if dtype in (own, torch.float64) else str(dtype).removeprefix("torch."), tensors


def _low_rank(
    theirs: PeftConfig, layers: Mapping[str, Layer], fields: dict[str, Any], facts: Facts
) -> list[AdapterConfig]:
    """LoRA or DoRA. Embeddings have no dropout: with it they get a config of their own."""
    has_m = _all_or_none("m", layers, facts)
    has_bias = _all_or_none("lora_B_bias", layers, facts)
    needed = {"lora_A", "lora_B"}
    _complete(needed, layers, needed | {"m", "lora_B_bias"}, facts)
    if has_m != theirs.use_dora or (has_m and has_bias):
        raise CheckpointError(
            f"{facts.call}: {CONFIG} says use_dora={theirs.use_dora}, and the file has "
            f"{'magnitudes' if has_m else 'no magnitudes'}{' and biases' if has_bias else ''}. "
            f"Copy both files again from where they were saved."
        )
    if has_bias != theirs.lora_bias:
        raise CheckpointError(
            f"{facts.call}: {CONFIG} says lora_bias={theirs.lora_bias}, and the file has "
            f"{'biases' if has_bias else 'no biases'}. Copy both files again from where they were "
            f"saved."
        )
    ranks: dict[str, int] = {}
    for path, layer in layers.items():
        a, b = layer.tensors["lora_A"], layer.tensors["lora_B"]
        if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1] or not a.shape[0]:
            raise CheckpointError(
                f"{facts.call}: at {layer.named!r} lora_A is {list(a.shape)} and lora_B "
                f"{list(b.shape)}; those of one adapter are [rank, d_in] and [d_out, rank]. Copy "
                f"the file again from where it was saved."
            )
        ranks[path] = a.shape[0]
    named = {layer.named: path for path, layer in layers.items()}
    asked = values_at(facts.call, "rank_pattern", theirs.rank_pattern, named)
    for name, path in named.items():
        if asked.get(name, theirs.r) != ranks[path]:
            raise CheckpointError(
                f"{facts.call}: {CONFIG} says rank {asked.get(name, theirs.r)} for {name!r}, and "
                f"the tensors have {ranks[path]}, so that it is not known how they are scaled. "
                f"Write the right one into 'r' or 'rank_pattern' of {CONFIG}."
            )
    patterned = values_at(facts.call, "alpha_pattern", theirs.alpha_pattern, named)
    alphas = {path: patterned.get(name, theirs.lora_alpha) for name, path in named.items()}
    fields |= {"use_rslora": theirs.use_rslora}
    if has_bias:
        fields["lora_bias"] = True
    make = _config_class("dora" if has_m else "lora")
    looking_up = [path for path, layer in layers.items() if layer.site.kind == "embedding"]
    groups = {theirs.dropout: list(layers)}
    if theirs.dropout and looking_up:
        linear = [path for path in layers if path not in looking_up]
        groups = {theirs.dropout: linear, 0.0: looking_up}
    configs = []
    for dropout, paths in groups.items():
        if not paths:
            continue
        own_ranks = {path: ranks[path] for path in paths}
        own_alphas = {path: alphas[path] for path in paths}
        r = most_common(own_ranks, theirs.r)
        alpha = most_common(own_alphas, theirs.lora_alpha)
        configs.append(
            make(
                r=r,
                alpha=alpha,
                rank_pattern=by_name(own_ranks, r),
                alpha_pattern=by_name(own_alphas, alpha),
                dropout=dropout,
                target_modules=_targets(paths, facts),
                **fields,
            )
        )
    return configs


def _rotations(
    theirs: PeftConfig, layers: Mapping[str, Layer], fields: dict[str, Any], facts: Facts
) -> list[AdapterConfig]:
    """BOFT; layers whose factors are not alike get configs of their own."""
    needed = {"boft_R", "boft_s"}
    _complete(needed, layers, needed, facts)
    groups: dict[tuple[int, int, int], list[str]] = {}
    shapes = {path: tuple(layer.tensors["boft_R"].shape) for path, layer in layers.items()}
    for path, shape in shapes.items():
        if len(shape) != 4 or shape[2] != shape[3]:
            raise CheckpointError(
                f"{facts.call}: at {layers[path].named!r} boft_R is {list(shape)}; it is "
                f"[factors, blocks, size, size]. Copy the file again from where it was saved."
            )
    one_number = len({shape[1] for shape in shapes.values()}) == 1
    by_number = one_number and theirs.boft_block_num > 0
    for path, (m, number, size, _) in shapes.items():
        alike = (m, 0, number) if by_number else (m, size, 0)
        groups.setdefault(alike, []).append(path)
    claimed = theirs.boft_n_butterfly_factor
    if odd := sorted({m for m, _, _ in groups} - {claimed}):
        warnings.warn(
            f"{facts.call}: {CONFIG} says boft_n_butterfly_factor={claimed}, and the tensors have "
            f"{odd[0]}. PEFT trains one factor where its CUDA extension does not build, and saves "
            f"the number that was asked for. The factors of the tensors are loaded.",
            stacklevel=2,
        )
    make = _config_class("boft")
    return [
        make(
            boft_block_size=size,
            boft_block_num=number,
            boft_n_butterfly_factor=m,
            boft_dropout=theirs.dropout,
            target_modules=_targets(paths, facts),
            **fields,
        )
        for (m, size, number), paths in groups.items()
    ]


def _config_class(architecture: str) -> Any:
    return architectures.find(architecture)


def _targets(paths: list[str], facts: Facts) -> str | tuple[str, ...]:
    every = (site.path for site in facts.anatomy if site.parameter is None)
    return short_names(paths, every) or exactly(paths)


def _all_or_none(name: str, layers: Mapping[str, Layer], facts: Facts) -> bool:
    have = [layer.named for layer in layers.values() if name in layer.tensors]
    if have and len(have) < len(layers):
        lacking = sorted(layer.named for layer in layers.values() if name not in layer.tensors)
        raise CheckpointError(
            f"{facts.call}: {listing(lacking)} lack the tensor {name!r} that other layers of the "
            f"file have. Copy the file again from where it was saved."
        )
    return bool(have)


def _complete(needed: set[str], layers: Mapping[str, Layer], legal: set[str], facts: Facts) -> None:
    for layer in layers.values():
        missing, surplus = needed - set(layer.tensors), set(layer.tensors) - legal
        if missing or surplus:
            which = f"no {listing(sorted(missing))}" if missing else listing(sorted(surplus))
            raise CheckpointError(
                f"{facts.call}: the file has {which} at {layer.named!r}; an adapter of this kind "
                f"has {listing(sorted(needed))}. Copy the file again from where it was saved."
            )
