"""AdapterHub's paths: from its keys to places in a model and back.

Its keys are paths of modules in transformers 4.57, with its own names for the modules that it adds
to blocks. Reading finds a layer by the number of its block and its role; a path that exists in the
model is used unchanged. Writing supports the families that `adapters` supports.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from adapterzoo.anatomy import Block, Role, Site, SubLayer, SubLayerKind
from adapterzoo.anatomy.patterns import ATTENTION_IN, CROSS, MLP
from adapterzoo.formats.checkpoint import Place, inexpressible
from adapterzoo.spelling import Container

if TYPE_CHECKING:
    from adapterzoo.model.hf.info import ModelInfo

BlockLocation = tuple[int, str]
"""The number of a block and the location in it; or -1 and the path of a layer."""

PART_ORDER: tuple[Role, ...] = ("query", "key", "value")


@dataclass(frozen=True, slots=True)
class Layout:
    """The names that `adapters` gives to the places of one family.

    Attributes:
        sublayers: kind → name below the block; missing kinds have no adapters.
        block: the path of block `{}` in transformers 4.57, if it differs from today's.
        layers: role → path below the block in 4.57, if it differs from today's.
        swapped: whether `intermediate_lora` means the last layer of the feed-forward part, and
            `output_lora` the first.
        entry: path of the module with the tensors of the entry, if that is neither the model nor
            its encoder.
        locations: our location → the one in its files, for tensors that are stored by location.
        is_base: whether such a model has no base model in 4.57, although it has one today.
        crosses: whether layers of cross-attention can have adapters.
    """

    sublayers: Mapping[SubLayerKind, str]
    block: str | None = None
    layers: Mapping[Role, str] = field(default_factory=dict)
    swapped: bool = False
    entry: str = ""
    locations: Mapping[str, str] = field(default_factory=dict)
    is_base: bool = False
    crosses: bool = True


_ADDED = Layout(
    {
        "attention": "attention_adapters",
        "cross": "cross_attention_adapters",
        "mlp": "output_adapters",
    }
)
_LLAMA = Layout(_ADDED.sublayers, swapped=True)
_BERT = Layout({"attention": "attention.output", "mlp": "output"})
_VIT_LAYERS: Mapping[Role, str] = {
    "query": "attention.attention.query",
    "key": "attention.attention.key",
    "value": "attention.attention.value",
    "mlp_in": "intermediate.dense",
    "mlp_out": "output.dense",
}

_TOWERS = "text_model", "vision_model"


def _tower(name: str) -> Layout:
    """Return the names in one tower of CLIP, whose modules are one level deeper in 4.57."""
    block = f"{name}.encoder.layers.{{}}"
    locations = {"self_prefix": f"clip_{name}_self_prefix"}
    return Layout(_ADDED.sublayers, block, entry=name, locations=locations, is_base=True)


# T5 numbers the sub-layers of a block; the numbers are their names
_T5 = Layout({"attention": "", "cross": "", "mlp": ""})
_NUMBERED = re.compile(r"layer\.\d+")

_ALIKE: Mapping[str, Layout] = {
    "bart gemma2 gemma3_text gptj mbart modernbert plbart qwen2 qwen3 whisper": _ADDED,
    "bert bert-generation deberta deberta-v2 electra roberta xlm-roberta xmod": _BERT,
    "llama mistral": _LLAMA,
    "mt5 t5": _T5,
}
LAYOUTS: Mapping[str, Layout] = {
    **{family: layout for families, layout in _ALIKE.items() for family in families.split()},
    **{f"clip_{tower}": _tower(tower) for tower in _TOWERS},
    "albert": Layout({"attention": "attention.attention_adapters", "mlp": "output_adapters"}),
    "beit": Layout(_ADDED.sublayers, "encoder.layer.{}", _VIT_LAYERS),
    "clip": Layout(
        _ADDED.sublayers,
        entry="text_model",
        locations={f"{t}_self_prefix": f"clip_{t}_self_prefix" for t in _TOWERS},
    ),
    "distilbert": Layout(_ADDED.sublayers, locations={"self_prefix": "self"}),
    "gpt2": Layout(_ADDED.sublayers, crosses=False),
    "vit": Layout(
        {"attention": "attention_adapters", "mlp": "output.output_adapters"},
        "encoder.layer.{}",
        _VIT_LAYERS,
    ),
}

_KINDS: Mapping[str, SubLayerKind] = {
    "attention_adapters": "attention",
    "cross_attention_adapters": "cross",
    "output_adapters": "mlp",
}
_NUMBER = re.compile(r"(?:^|\.)(\d{1,9})(?=\.|$)")
_INSIDE_ATTENTION = re.compile(r"(^|\.)\w*att(ention|n)\w*\.", re.IGNORECASE)


def layout_of(info: ModelInfo) -> Layout:
    """Return the names that `adapters` gives to the places of a model.

    Raises:
        CheckpointError: `adapters` does not support the family.
    """
    layout = LAYOUTS.get(info.model_type)
    if layout is None:
        raise inexpressible(f"AdapterHub has no names for models of type {info.model_type!r}")
    return layout


def prefix_of(info: ModelInfo) -> str:
    """Return the prefix of AdapterHub's paths in a model with a base model, or ""."""
    layout = LAYOUTS.get(info.model_type)
    return "" if layout is not None and layout.is_base else info.prefix


def to_location(info: ModelInfo, parameter: str) -> str:
    """Return our key of an adapter-wide tensor of AdapterHub."""
    layout = LAYOUTS.get(info.model_type)
    location, dot, rest = parameter.partition(".")
    theirs = {} if layout is None else {theirs: ours for ours, theirs in layout.locations.items()}
    return f"{theirs.get(location, location)}{dot}{rest}"


def from_location(layout: Layout, parameter: str) -> str:
    """Return AdapterHub's key of one of our adapter-wide tensors; the inverse of `to_location`.

    Raises:
        CheckpointError: the location has no name in such models.
    """
    location, dot, rest = parameter.partition(".")
    if location == "self_prefix" and location not in layout.locations and layout.locations:
        raise inexpressible("AdapterHub has prefixes in both towers, this adapter only in one")
    return f"{layout.locations.get(location, location)}{dot}{rest}"


def location_of(container: Container, place: Place) -> BlockLocation | None:
    """Return the location of a place; None if the container does not hold such places."""
    site = place.placement.site
    match container.at:
        case "layer" if site.kind in ("linear", "embedding", "experts"):
            return -1, place.path
        case "sublayer" if place.placement.location in container.locations.values():
            return site.layer, place.placement.location
        case "block" | "attention" if site.kind == container.at:
            return site.layer, "cross" if site.cross else container.at
    return None


def find_location(info: ModelInfo, container: Container, path: str) -> BlockLocation | None:
    """Return the location that a path of AdapterHub leads to; None if the model has none."""
    if container.at == "model":
        inside = path.removeprefix(prefix_of(info)).removeprefix(".")
        return (-1, "") if inside == below_model(info, container) else None
    located = find_block(info, path)
    if located is None:
        return None
    block, rest = located
    if container.at == "layer":
        site = find_layer(block, rest)
        return None if site is None else (-1, site.path)
    if container.at == "sublayer":
        sub = find_sublayer(block, rest)
        location = None if sub is None else container.locations.get(sub.kind)
        return None if location is None else (block.layer, location)
    if container.at == "block":
        return (block.layer, "block") if rest == container.below else None
    module = rest.removesuffix(f".{container.below}")
    if module in ("", rest):
        return None
    return block.layer, "cross" if CROSS.search(f"{module}.") else "attention"


def find_layer_site(info: ModelInfo, path: str) -> Site | None:
    """Return the linear layer that a path of AdapterHub leads to."""
    located = find_block(info, path)
    return None if located is None else find_layer(*located)


def below_model(info: ModelInfo, container: Container) -> str:
    """Return AdapterHub's path of the module with adapter-wide tensors, without the prefix."""
    entry = ""
    if container.in_encoder:
        own = LAYOUTS.get(info.model_type)
        entry = "encoder" if info.config.get("is_encoder_decoder") else own.entry if own else ""
    return ".".join(filter(None, (entry, container.below)))


def name_of(info: ModelInfo, container: Container, place: Place, layout: Layout) -> str:
    """Return AdapterHub's path of the module with a place's tensors, without the prefix.

    Raises:
        CheckpointError: AdapterHub has none.
    """
    site, location, below = place.placement.site, place.placement.location, None
    block = next((b for b in info.anatomy.blocks if b.layer == site.layer), None)
    start = "" if block is None else f"{block.path}."

    def name_of_layer(layer: Site) -> str:
        return layout.layers.get(layer.role, layer.path.removeprefix(start))

    if block is not None and container.at == "sublayer":
        sub = next(s for s in block.sublayers if container.locations.get(s.kind) == location)
        below = layout.sublayers.get(sub.kind)
        if below == "":
            match = _NUMBERED.match(sub.out.removeprefix(start))
            below = match[0] if match else None
    elif block is not None and container.at == "layer":
        below = name_of_layer(site) if layout.crosses or not site.cross else None
    elif block is not None and container.at == "block":
        below = container.below
    elif block is not None:
        asked = [s for s in block.sites if s.role in ("query", "qkv") and s.cross == site.cross]
        if asked:
            module = name_of_layer(asked[0]).rpartition(".")[0]
            below = f"{module}.{container.below}".removeprefix(".")
    if block is None or below is None:
        raise inexpressible(f"AdapterHub has no name for an adapter at {place.path!r}")
    # families with a path of their own in 4.57 have one stack
    path = block.path if layout.block is None else layout.block.format(block.layer)
    return f"{path}.{below}"


def find_block(info: ModelInfo, path: str) -> tuple[Block, str] | None:
    """Return the block that a path of AdapterHub leads into, and the rest of the path.

    Args:
        info: the model's info.
        path: the path, with or without the prefix of the base model.
    """
    prefix = prefix_of(info)
    inside = path.removeprefix(f"{prefix}.") if prefix else path
    for candidate in dict.fromkeys((inside, path)):
        for block in info.anatomy.blocks:
            if candidate == block.path or candidate.startswith(f"{block.path}."):
                return block, candidate[len(block.path) + 1 :]
    match = _NUMBER.search(inside)
    layout = LAYOUTS.get(info.model_type)
    if layout is not None and layout.is_base and not inside.startswith(f"{layout.entry}."):
        return None
    if match is None:
        return None
    stacks = info.anatomy.stacks
    if len(stacks) > 1:
        # the block whose words the path contains
        words = {stack: {*stack.split(".")} for stack in stacks}
        shared = set.intersection(*words.values())
        before = {*inside[: match.start()].split(".")}
        stacks = tuple(s for s, own in words.items() if set() < own - shared <= before)
    blocks = [block for block in info.anatomy.blocks if [block.stack] == [*stacks]]
    number = int(match[1])
    return (blocks[number], inside[match.end() + 1 :]) if number < len(blocks) else None


def find_sublayer(block: Block, rest: str) -> SubLayer | None:
    """Return the sub-layer of a block whose bottleneck has this path below the block."""
    kind = _KINDS.get(rest.rpartition(".")[2])
    if kind is None:
        # the module that returns the sub-layer's output is below the one that AdapterHub names
        root = f"{block.path}.{rest}"
        found = [s for s in block.sublayers if s.out == root or s.out.startswith(f"{root}.")]
        return found[0] if len(found) == 1 else None
    return next((sub for sub in block.sublayers if sub.kind == kind), None)


def find_layer(block: Block, rest: str) -> Site | None:
    """Return the layer of a block that has, or had, this path below the block."""
    for site in block.sites:
        if site.path == f"{block.path}.{rest}" and site.parameter is None:
            return site
    role = next((role for role, pattern in ATTENTION_IN if pattern.search(rest)), None)
    if role is None and not _INSIDE_ATTENTION.search(rest):
        role = next((role for role, pattern in MLP if pattern.search(rest)), None)
    if role is None:
        return None
    in_mlp = role in ("mlp_in", "mlp_gate", "mlp_out")
    cross = None if in_mlp else CROSS.search(rest) is not None
    found = [site for site in block.sites if site.role == role and cross in (None, site.cross)]
    return found[0] if len(found) == 1 else None
