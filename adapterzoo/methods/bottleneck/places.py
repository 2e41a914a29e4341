"""Where bottlenecks act: sub-layers of a block, as documented or as `adapters` 1.3 places them.

`site_convention` of a config names a row of `PLACES`: a model type in which `adapters` puts
bottlenecks elsewhere than it documents. Paths are relative to a block, except `entry`. With h the
output of the adapted module and inp the first input of another, `adapters` computes

    n = h, or LN(h + inp), or with is_parallel inp        R = f(n) + (h, h + inp or n)

and R replaces h. A row says which modules these are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from adapterzoo.anatomy import Anatomy, Block, Kind, Role, Site, SubLayer, SubLayerKind
from adapterzoo.config import AdapterConfig, Choice, Placement, check_blocks
from adapterzoo.errors import SiteError

from .languages import check_languages

LOCATIONS: Mapping[SubLayerKind, str] = {
    "attention": "mh_adapter",
    "mixer": "mh_adapter",
    "cross": "cross_adapter",
    "mlp": "output_adapter",
}
"""Kind of a sub-layer → field of a bottleneck's config."""

# sub-layer → role of a layer that shows its presence in a block, and whether in cross-attention
_SIGN: Mapping[SubLayerKind, tuple[Role, bool | None]] = {
    "attention": ("attention_out", False),
    "mixer": ("mixer_out", None),
    "cross": ("attention_out", True),
    "mlp": ("mlp_out", None),
}


# --- the documented places ---


def sublayers(
    anatomy: Anatomy,
    wanted: Mapping[SubLayerKind, str],
    leave_out: Collection[int],
    config: str,
    everywhere: bool,
) -> list[tuple[Block, SubLayer]]:
    """Return the sub-layers of the wanted kinds, block after block, each with its block.

    Args:
        anatomy: the model's anatomy.
        wanted: kind → the field that requests it.
        leave_out: numbers of blocks to skip.
        config: name of the config, for messages.
        everywhere: whether a block with only one sub-layer, such as Mamba's, has an adapter there
            for any wanted kind.

    Raises:
        SiteError: it is unknown where a sub-layer joins the residual stream, or no block has one.
    """
    check_blocks(anatomy, config)
    blocks = [block for block in anatomy.blocks if block.layer not in leave_out]
    found: list[tuple[Block, SubLayer]] = []
    single = False
    for block in blocks:
        here = {sub.kind for sub in block.sublayers}
        for kind, name in wanted.items():
            # a mixer next to attention, as in Falcon-H1, is part of the same sub-layer
            beside = kind == "mixer" and block.has("attention_out")
            if kind not in here and not beside and block.has(*_SIGN[kind]):
                raise SiteError(
                    f"{config}, {name}=True: where that part of {block.path!r} meets the residual "
                    f"stream is not known ({block.note}). Write leave_out=[{block.layer}]."
                )
        is_alone = everywhere and len(block.sublayers) == 1 and "cross" not in here
        found += [(block, sub) for sub in block.sublayers if is_alone or sub.kind in wanted]
        single = single or is_alone
    for name in dict.fromkeys(wanted.values()):
        among = any(LOCATIONS[sub.kind] == name for _, sub in found)
        if not among and (name == LOCATIONS["cross"] or not single):
            raise SiteError(
                f"{config}, {name}=True: none of the {len(blocks)} blocks left by leave_out has "
                f"such a part. Write {name}=False, or a shorter leave_out."
            )
    return found


def stream_site(block: Block, sub: SubLayer, kind: Kind, *, captures: bool) -> Site:
    """Return the site of a sub-layer's adapter.

    Args:
        block: block of the sub-layer.
        sub: the sub-layer.
        kind: "output" for the module that returns h, "norm" for the norm after the addition,
            "block" for the block's output.
        captures: whether the adapter needs the residual stream before the sub-layer.

    Raises:
        SiteError: the sub-layer reads another number of features than the stream has.
    """
    path = {"output": sub.out, "norm": sub.norm, "block": block.path}[kind]
    role, width = _SIGN[sub.kind][0], block.d_model
    if kind != "block":
        # a second stream may be narrower than the text's (the layout's in LiLT)
        ways_out = (s for s in block.sites if s.path == sub.out and s.role == role)
        width = next((site.d_out for site in ways_out), width)
    reads = next((site.d_in for site in block.sites if site.path == sub.source), width)
    if captures and reads != width:
        raise SiteError(
            f"{sub.source!r} reads {reads} features, but the residual stream has {width} "
            f"({block.note}). Write {LOCATIONS[sub.kind]}=False, or LoRAConfig()."
        )
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


def entry_placement(config: AdapterConfig, anatomy: Anatomy) -> Placement:
    """Return the placement of the invertible function of a bottleneck's config.

    Raises:
        SiteError: the first block cannot have an adapter at its input.
    """
    row = PLACES.get(config["site_convention"])
    if row is not None and row.moves_entry:
        tokens = anatomy.tokens
        embeds = tokens is not None and row.entry == tokens.embeddings
        first = anatomy.blocks[0]
        width = tokens.width if tokens is not None and embeds else first.d_model
        scale = "embed_scale" if row.is_unscaled else None
        site = Site(
            row.entry, "other", -1, first.stack, "entry", width, width, is_placed=True, factor=scale
        )
        return Placement(site, config, "invertible")
    if anatomy.entry is None:
        raise SiteError(
            f"{type(config).__name__}: the first block cannot have an adapter at its input "
            f"({anatomy.no_entry}). Write inv_adapter=None."
        )
    return Placement(anatomy.entry, config, "invertible")


# --- the places of `adapters` ---


@dataclass(frozen=True, slots=True)
class Insertion:
    """The modules where a bottleneck is inserted; empty fields mean the documented ones.

    Attributes:
        out: the module whose output is h.
        inp: the module whose first input is inp.
        also: a module whose first input is added to inp.
        norm: LN; a leading "last:" means that of the last block, in all blocks. Empty: none.
        factor: a parameter of the block that the model multiplies h by, before the bottleneck.
            Features whose factor is exactly 0 stay as in the base model.
        swapped: whether h and inp are exchanged.
        languages: whether this is the place of the block's language adapters, which do not act
            (`languages`). LN is the norm before them.
    """

    out: str = ""
    inp: str = ""
    also: str = ""
    norm: str = ""
    factor: str = ""
    swapped: bool = False
    languages: bool = False

    def differs(self, config: Mapping[str, object], kind: SubLayerKind) -> bool:
        """Return whether the place computes another function than the documented one.

        Args:
            config: the bottleneck's config.
            kind: kind of the sub-layer.
        """
        reads_sum, parallel = config["original_ln_before"], config["is_parallel"]
        adds_to_h = config["residual_before_ln"] is True
        inside = config["adapter_residual_before_ln"]
        # if R is a function of h + inp alone, so is that of the whole block
        of_sum = not config["original_ln_after"] or (adds_to_h and not inside)
        if self.also:
            return bool(parallel or (reads_sum and not of_sum))
        if self.swapped:
            return not (reads_sum and of_sum)
        if self.factor:
            return not (kind == "mlp" and reads_sum and of_sum)
        return bool(self.out or self.languages or reads_sum or parallel)


@dataclass(frozen=True, slots=True)
class Places:
    """The places in models of one type.

    Attributes:
        sublayers: kind of a sub-layer → its place; others are as documented.
        entry: the module whose output the invertible function changes; empty: the documented
            place. "none": there is no such function, whatever the config says.
        is_unscaled: whether the function reads embeddings before they are scaled.
    """

    sublayers: Mapping[SubLayerKind, Insertion] = field(default_factory=dict)
    entry: str = ""
    is_unscaled: bool = False

    @property
    def moves_entry(self) -> bool:
        """Whether an invertible function is placed elsewhere."""
        return self.entry not in ("", "none")


_GEMMA: Mapping[SubLayerKind, Insertion] = {
    "attention": Insertion(
        "self_attn.o_proj", "input_layernorm", norm="last:post_attention_layernorm"
    ),
    "mlp": Insertion(
        "mlp.down_proj", "pre_feedforward_layernorm", norm="last:post_feedforward_layernorm"
    ),
}

PLACES: Mapping[str, Places] = {
    "albert": Places(
        {"attention": Insertion(norm="attention.LayerNorm", swapped=True)}, entry="embeddings"
    ),
    "beit": Places(
        {"attention": Insertion(factor="lambda_1"), "mlp": Insertion(factor="lambda_2")},
        entry="none",
    ),
    "clip_vision_model": Places(entry="none"),
    "electra": Places(entry="embeddings"),
    "gemma2": Places(_GEMMA, entry="embed_tokens", is_unscaled=True),
    "gemma3_text": Places(_GEMMA),
    "gptj": Places({"mlp": Insertion(also="attn.resid_dropout")}),
    # both hooks before a sub-layer see its input after the norm
    "modernbert": Places(
        {
            "attention": Insertion(inp="attn", norm="last:mlp_norm"),
            "mlp": Insertion(inp="mlp"),
        }
    ),
    "vit": Places(entry="none"),
    "whisper": Places(entry="encoder.layer_norm"),
    "xmod": Places({"attention": Insertion(), "mlp": Insertion(languages=True)}),
}

SITE_CONVENTION = Choice(
    "paper", *sorted(name for name, row in PLACES.items() if row.sublayers or row.moves_entry)
)
"""The check of the field `site_convention`."""


def site_convention_in(model_type: str, config: Mapping[str, object]) -> str:
    """Return the row for a config in models of a type; "paper" if it is as documented."""
    row = PLACES.get(model_type)
    if row is None:
        return "paper"
    used = [kind for kind, name in LOCATIONS.items() if config[name]]
    differs = any(
        row.sublayers[kind].differs(config, kind) for kind in used if kind in row.sublayers
    )
    moved = row.moves_entry and config["inv_adapter"] is not None
    return model_type if differs or moved else "paper"


def placed_site(anatomy: Anatomy, block: Block, sub: SubLayer, convention: str) -> Site | None:
    """Return the site that a row declares for a sub-layer; None for the documented one.

    Args:
        anatomy: the model's anatomy.
        block: block of the sub-layer.
        sub: the sub-layer.
        convention: name of the row, or "paper".

    Raises:
        SiteError: the block has no such layer.
    """
    row = PLACES.get(convention)
    place = None if row is None else row.sublayers.get(sub.kind)
    if place is None:
        return None
    last = next(b for b in reversed(anatomy.blocks) if b.stack == block.stack)

    def full(path: str) -> str | None:
        owner = last if path.startswith("last:") else block
        return f"{owner.path}.{path.removeprefix('last:')}" if path else None

    if place.languages:
        check_languages(anatomy, f"site_convention={convention!r}")
    out = block.languages if place.languages else full(place.out) or sub.out
    if place.out and not any(site.path == out for site in block.sites):
        raise SiteError(
            f"site_convention={convention!r}: the block at {block.path!r} has no layer "
            f"{place.out!r}, where adapters puts a bottleneck. Write site_convention='paper'."
        )
    return dataclasses.replace(
        stream_site(block, sub, "output", captures=True),
        path=out,
        source=full(place.inp) or sub.source,
        also=full(place.also),
        norm=full(place.norm),
        factor=full(place.factor),
        is_placed=True,
        is_swapped=place.swapped,
        is_language=place.languages,
    )
