"""The sites of methods that act on the residual stream: sub-layers, blocks and the entry."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from adapterzoo.anatomy import Anatomy, Block, Kind, Role, Site, SubLayer, SubLayerKind
from adapterzoo.configs import AdapterConfig, Placement
from adapterzoo.errors import SiteError, listing

LOCATIONS: Mapping[SubLayerKind, str] = {
    "attention": "mh_adapter",
    "cross": "cross_adapter",
    "mlp": "output_adapter",
}
"""The kind of a sub-layer to the field of a bottleneck's config."""

_SHOWN: Mapping[SubLayerKind, str] = {
    "attention": "self-attention",
    "cross": "cross-attention",
    "mlp": "feed-forward part",
}
# sub-layer → the role of a layer that shows that a block has it, and whether in cross-attention
_SIGN: Mapping[SubLayerKind, tuple[Role, bool | None]] = {
    "attention": ("attention_out", False),
    "cross": ("attention_out", True),
    "mlp": ("mlp_out", None),
}


def sublayers(
    anatomy: Anatomy, wanted: Mapping[SubLayerKind, str], leave_out: Collection[int], config: str
) -> list[tuple[Block, SubLayer]]:
    """Return the sub-layers of the wanted kinds, block after block, each with its block.

    Blocks without the kind, such as Mamba layers without attention, are skipped.

    Args:
        anatomy: of the model.
        wanted: kind → the field that requests it.
        leave_out: numbers of blocks to skip.
        config: its name, for messages.

    Raises:
        SiteError: it is unknown where a sub-layer meets the residual stream, or no block has one.
    """
    _check_blocks(anatomy, config)
    blocks = [block for block in anatomy.blocks if block.layer not in leave_out]
    found: list[tuple[Block, SubLayer]] = []
    for block in blocks:
        here = {sub.kind for sub in block.sublayers}
        for kind, field in wanted.items():
            if kind not in here and block.has(*_SIGN[kind]):
                raise SiteError(_unreadable(block, kind, f"{config}, {field}=True"))
        found += [(block, sub) for sub in block.sublayers if sub.kind in wanted]
    for kind, field in wanted.items():
        if not any(sub.kind == kind for _, sub in found):
            raise SiteError(
                f"{config}, {field}=True: none of the {len(blocks)} blocks that leave_out="
                f"{sorted(leave_out)} leaves has a {_SHOWN[kind]}; the model's blocks are 0 to "
                f"{len(anatomy.blocks) - 1}. Write {field}=False, or a shorter leave_out."
            )
    return found


def entry_placement(config: AdapterConfig, anatomy: Anatomy) -> Placement:
    """Return the placement of an invertible function at the input of the first block.

    Args:
        config: of the adapter.
        anatomy: of the model.

    Raises:
        SiteError: the first block cannot have an adapter at its input.
    """
    if anatomy.entry is None:
        raise SiteError(
            f"{type(config).__name__}(inv_adapter={config['inv_adapter']!r}): the first block "
            f"cannot have an adapter at its input ({anatomy.no_entry}). Write "
            f"inv_adapter=None, inv_adapter_reduction_factor=None."
        )
    return Placement(anatomy.entry, config, "invertible")


def block_sites(anatomy: Anatomy, layers: Collection[int] | None, config: str) -> list[Site]:
    """Return the outputs of blocks.

    Args:
        anatomy: of the model.
        layers: numbers of blocks; None for all.
        config: its name, for messages.

    Raises:
        SiteError: the model has no blocks, none of a number, or one whose output is not one state
            of known width for each token.
    """
    _check_blocks(anatomy, config)
    numbers = [block.layer for block in anatomy.blocks]
    if unknown := sorted(set(layers or ()) - set(numbers)):
        raise SiteError(
            f"{config}: there are no blocks {listing(unknown)}; the model's are 0 to "
            f"{numbers[-1]}. Write layers='all' or numbers of these."
        )
    asked = [block for block in anatomy.blocks if layers is None or block.layer in layers]
    for block in asked:
        output = block.output
        why = f"the output of {block.path!r} is {block.states}" if block.states else ""
        if not output:
            why = f"the output of block {block.layer} cannot be reached"
        elif not block.d_model:
            why = f"the width of the states of {block.path!r} is unknown"
        if why:
            raise SiteError(f"{config}: {why}. Write layers=[…] with other blocks, if any differ.")
    return [
        Site(
            path=block.output or "",
            role="other",
            layer=block.layer,
            stack=block.stack,
            kind="block" if block.output == block.path else "norm",
            d_in=block.d_model,
            d_out=block.d_model,
        )
        for block in asked
    ]


def stream_site(block: Block, sub: SubLayer, kind: Kind, *, captures: bool) -> Site:
    """Return the site of a sub-layer's adapter.

    Args:
        block: of the sub-layer.
        sub: the sub-layer.
        kind: "output" for the module that makes h, "norm" for the norm after the addition,
            "block" for the block's output.
        captures: whether the adapter needs the residual stream before the sub-layer.
    """
    path = {"output": sub.out, "norm": sub.norm, "block": block.path}[kind]
    role, width = _SIGN[sub.kind][0], block.d_model
    if kind != "block":
        # a second stream may be narrower than the text's (the layout's in LiLT)
        ways_out = (s for s in block.sites if s.path == sub.out and s.role == role)
        width = next((site.d_out for site in ways_out), width)
    return Site(
        path=path or sub.out,
        role=role,
        layer=block.layer,
        stack=block.stack,
        kind=kind,
        d_in=width,
        d_out=width,
        cross=sub.kind == "cross",
        source=sub.source if captures else None,
    )


def _check_blocks(anatomy: Anatomy, config: str) -> None:
    if not anatomy.blocks:
        raise SiteError(
            f"{config}: this model has no transformer blocks: {anatomy.reason}. Use a method with "
            f"target_modules, such as LoRAConfig(target_modules=[…])."
        )


def _unreadable(block: Block, kind: SubLayerKind, asked: str) -> str:
    layers = listing(site.path.removeprefix(f"{block.path}.") for site in block.sites)
    return (
        f"{asked}: where the {_SHOWN[kind]} of {block.path!r} meets the residual stream is not "
        f"known{f' ({block.note})' if block.note else ''}. Its layers: {layers}. Write "
        f"leave_out=[{block.layer}] to skip this block, or add the architecture to "
        f"adapterzoo/anatomy/patterns.py."
    )
