"""Where `adapters` 1.3 puts bottlenecks in models in which it does otherwise than it documents.

`site_convention` of a config names a row. Paths are below a block, but for that of `entry`. With h
the output of the adapted module and inp the first input of another, `adapters` computes

    n = h, or LN(h + inp), or with is_parallel inp        R = f(n) + (h, h + inp or n)

and R takes the place of h. A row says which modules these are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from adapterzoo.anatomy import SubLayerKind
from adapterzoo.fields import Choice

from ._sublayers import LOCATIONS


@dataclass(frozen=True, slots=True)
class Place:
    """The modules of one kind of sub-layer; those left empty are the documented ones.

    Attributes:
        out: the module whose output is h.
        inp: the module whose first input is inp.
        also: a module whose first input is added to inp.
        norm: LN; "last:" in front means that of the last block, in all blocks. Empty: none.
        factor: a parameter of the block by which the model multiplies h, before the bottleneck.
            Features whose factor is exactly 0 stay those of the base model.
        swapped: whether h and inp are taken for each other.
        languages: whether it is the place of the block's language adapters, which do not act
            (`no_language_adapters`). LN is the norm in front of them.
    """

    out: str = ""
    inp: str = ""
    also: str = ""
    norm: str = ""
    factor: str = ""
    swapped: bool = False
    languages: bool = False

    def differs(self, config: Mapping[str, object], kind: SubLayerKind) -> bool:
        """Return whether it is another function than the documented one.

        Args:
            config: the fields.
            kind: of the sub-layer.
        """
        reads_sum, parallel = config["original_ln_before"], config["is_parallel"]
        adds_to_h = config["residual_before_ln"] is True
        inside = config["adapter_residual_before_ln"]
        # where R is a function of h + inp alone, that of the whole block is
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
    """One row.

    Attributes:
        sublayers: kind of a sub-layer to its place; others are as documented.
        entry: the module whose output the invertible function changes; empty: the documented
            place. "none": there is no such function, whatever the config says.
        is_unscaled: whether that function reads embeddings before they are scaled.
    """

    sublayers: Mapping[SubLayerKind, Place] = field(default_factory=lambda: MappingProxyType({}))
    entry: str = ""
    is_unscaled: bool = False

    @property
    def has_languages(self) -> bool:
        """Whether its base model has the language adapters that it is trained with, if any."""
        return not any(place.languages for place in self.sublayers.values())

    @property
    def moves_entry(self) -> bool:
        """Whether it puts an invertible function elsewhere."""
        return self.entry not in ("", "none")


_GEMMA: Mapping[SubLayerKind, Place] = MappingProxyType(
    {
        "attention": Place(
            "self_attn.o_proj", "input_layernorm", norm="last:post_attention_layernorm"
        ),
        "mlp": Place(
            "mlp.down_proj", "pre_feedforward_layernorm", norm="last:post_feedforward_layernorm"
        ),
    }
)

PLACES: Mapping[str, Places] = {
    "albert": Places(
        {"attention": Place(norm="attention.LayerNorm", swapped=True)}, entry="embeddings"
    ),
    "beit": Places(
        {"attention": Place(factor="lambda_1"), "mlp": Place(factor="lambda_2")}, entry="none"
    ),
    "clip_vision_model": Places(entry="none"),
    "electra": Places(entry="embeddings"),
    "gemma2": Places(_GEMMA, entry="embed_tokens", is_unscaled=True),
    "gemma3_text": Places(_GEMMA),
    "gptj": Places({"mlp": Place(also="attn.resid_dropout")}),
    # both hooks in front of a sub-layer see its input behind the norm
    "modernbert": Places(
        {"attention": Place(inp="attn", norm="last:mlp_norm"), "mlp": Place(inp="mlp")}
    ),
    "vit": Places(entry="none"),
    "whisper": Places(entry="encoder.layer_norm"),
    "xmod": Places({"attention": Place(), "mlp": Place(languages=True)}),
}


def site_convention_in(model_type: str, config: Mapping[str, object]) -> str:
    """Return the row for a config in models of a type; "paper" where it is as documented."""
    row = PLACES.get(model_type)
    if row is None:
        return "paper"
    used = [kind for kind, name in LOCATIONS.items() if config[name]]
    differs = any(
        row.sublayers[kind].differs(config, kind) for kind in used if kind in row.sublayers
    )
    moved = row.moves_entry and config["inv_adapter"] is not None
    return model_type if differs or moved else "paper"


SITE_CONVENTION = Choice(
    "paper", *sorted(name for name, row in PLACES.items() if row.sublayers or row.moves_entry)
)
"""The check of the field."""
