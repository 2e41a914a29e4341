"""Prefix tuning in PEFT's files: one table, for self-attention of the model or its decoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.nn.functional import linear

from adapterzoo.activations import activation
from adapterzoo.anatomy import Anatomy, Site
from adapterzoo.configs import AdapterConfig, Placement
from adapterzoo.errors import CheckpointError, argument
from adapterzoo.fields import MAX_WIDTH, Range
from adapterzoo.peft_arguments import PeftArgument, PeftArguments
from adapterzoo.spelling import Fields, PeftField, PeftLayer, PeftSpelling, Tensors

from ._peft_arguments import PROMPT, ours
from ._prefix_table import SELF, TIED


def _unsized(fields: Mapping[str, Any]) -> str | None:
    """Return why the MLP cannot be made: PEFT takes its width from the model."""
    if fields.get("prefix_projection") and fields.get("encoder_hidden_size") is None:
        return (
            "prefix_projection=True needs the width of its MLP. Write encoder_hidden_size=768, "
            "which PEFT sets to the width of the model."
        )
    return None


_ARGUMENTS = PeftArguments(
    class_name="PrefixTuningConfig",
    fields={
        **PROMPT,
        "num_virtual_tokens": ours(None, "prefix_length"),
        "encoder_hidden_size": ours(None, "bottleneck_size"),
        "prefix_projection": PeftArgument(
            False, "flat", {True: False, False: True}, "legal are True and False."
        ),
        "init_weights": PeftArgument(hint="a prefix starts at random. Leave it out."),
    },
    implied={
        "positions": "shifted",
        "encoder_prefix": False,
        "cross_prefix": False,
        "convention": "peft",
    },
    unsayable=_unsized,
)


def peft(config: type[AdapterConfig]) -> PeftSpelling:
    """Return how PEFT spells prefix tuning: T `[P, 2 N H e]`, the keys and values of a cache.

    The tokens follow the cache, so their positions start at P.
    """
    sizes = ("token_dim", "num_attention_heads", "num_layers", "num_virtual_tokens")
    return PeftSpelling(
        config=config,
        peft_type="PREFIX_TUNING",
        arguments=_ARGUMENTS,
        shared={"table": "prompt_embeddings"},
        fields={
            "num_transformer_submodules": PeftField(1, Range(1, 2)),
            # 0: not in the file
            **{name: PeftField(0, Range(0, MAX_WIDTH)) for name in sizes},
        },
        # with a projection, the file holds its result
        inert=frozenset(("encoder_hidden_size", "init_weights", "prefix_projection")),
        read_model=_from_peft,
        unsayable=_unsayable,
        write_model=_to_peft,
    )


def cartridge(config: type[AdapterConfig]) -> PeftSpelling:
    """Return how PEFT spells cartridges (Eyuboglu et al. 2025, arXiv:2506.06266), only read.

    A cartridge is the same table, trained from the cache of a text.
    """
    plain = peft(config)
    return replace(
        plain,
        peft_type="CARTRIDGE",
        becomes="a prefix that computes the same; training changes its frozen tokens too",
        inert=plain.inert | {"num_frozen_tokens"},
    )


def _from_peft(
    fields: Mapping[str, Any], tensors: Tensors, _layers: Sequence[PeftLayer], anatomy: Anatomy
) -> tuple[Fields, Tensors]:
    table, attentions = tensors["table"], _decoding(anatomy)
    expected = _sizes(attentions, anatomy) | {"num_virtual_tokens": table.shape[0]}
    width = sum(sum(a.head_widths) * a.heads for a in attentions)
    wrong = [f"{n}={fields[n]}, here {v}" for n, v in expected.items() if fields[n] not in (0, v)]
    if table.dim() != 2 or table.shape[1] != width:
        wrong.append(f"prompt_embeddings {list(table.shape)}, here [tokens, {width}]")
    if wrong:
        raise CheckpointError(
            f"the file has {'; '.join(wrong)}. It is of another model, or damaged: load it into "
            f"the model that it was trained on, or copy both files again."
        )
    said = {
        "flat": True, "prefix_length": table.shape[0], "positions": "shifted",
        "encoder_prefix": False, "cross_prefix": False, "convention": "peft",
    }  # fmt: skip
    return said, {f"{_location(anatomy)}.table": table}


def _to_peft(config: AdapterConfig, tensors: Tensors, anatomy: Anatomy) -> tuple[Fields, Tensors]:
    attentions = _decoding(anatomy)
    at = _location(anatomy)
    if not all(name.startswith(f"{at}.") for name in tensors):
        if at == TIED:
            raise CheckpointError(
                f"convention={config['convention']!r}, and in PEFT layers of a decoder beside an "
                f"encoder share keys and values. Write {argument('format', 'native')}, or train "
                f"with convention='peft'."
            )
        raise CheckpointError(
            f"PEFT has one prefix for all blocks, and this model's towers have one each. Write "
            f"{argument('format', 'native')}."
        )
    if config["leave_out"] or len({(a.heads, a.head_widths) for a in attentions}) > 1:
        raise CheckpointError(
            f"PEFT has one prefix for all blocks, with heads of one shape, but this one has "
            f"leave_out={list(config['leave_out'])}, or the model's heads differ. Write "
            f"{argument('format', 'native')}."
        )
    if config["positions"] == "kept" and (anatomy.positions or anatomy.unmovable):
        raise CheckpointError(
            f"the prefix has positions='kept', but PEFT's shifts the positions of all tokens after "
            f"it, which this model reads. Write {argument('format', 'native')}, or train with "
            f"positions='shifted'."
        )
    table = _product({n.removeprefix(f"{at}."): t for n, t in tensors.items()}, config)
    sizes = _sizes(attentions, anatomy)
    return {
        **sizes,
        "num_virtual_tokens": table.shape[0],
        "prefix_projection": False,
        "encoder_hidden_size": sizes["token_dim"],
        "init_weights": None,
    }, {"table": table}


def _decoding(anatomy: Anatomy) -> list[Site]:
    """Return the attention modules of PEFT's cache: self-attention, only the decoder's if any."""
    crossed = {a.stack for a in anatomy.attentions if a.cross}
    return [a for a in anatomy.attentions if not a.cross and a.stack in (crossed or {a.stack})]


def _location(anatomy: Anatomy) -> str:
    """Return the location of PEFT's prefix."""
    return TIED if any(a.cross for a in anatomy.attentions) else SELF


def _sizes(attentions: Sequence[Site], anatomy: Anatomy) -> dict[str, int]:
    first = attentions[0]
    return {
        "num_transformer_submodules": 2 if any(a.cross for a in anatomy.attentions) else 1,
        "token_dim": first.heads * first.head_widths[0],
        "num_attention_heads": first.heads,
        "num_layers": len(attentions),
    }


def _product(tensors: Tensors, config: AdapterConfig) -> Tensor:
    """Return T `[P, 2 N H e]`, computed by the MLP if it is not flat."""
    if "table" in tensors:
        return tensors["table"]
    inner = linear(tensors["wte"], tensors["down.weight"], tensors["down.bias"])  # [P, m]
    inner = activation(config["non_linearity"])(inner)
    return linear(inner, tensors["up.weight"], tensors["up.bias"])  # [P, 2 N H e]


def _unsayable(placement: Placement) -> str | None:
    config, name = placement.config, type(placement.config).__name__
    if config["use_gating"]:
        return f"{name}(use_gating=True), and PEFT's prefixes have no gate"
    if config["convention"] == "adapterhub":
        return f"{name}(convention='adapterhub'), which PEFT does not have"
    if placement.location in ("encoder_prefix", "cross_prefix"):
        return (
            f"a prefix at {placement.site.path!r}, and PEFT's are only in the self-attention of a "
            f"decoder (encoder_prefix=False, cross_prefix=False)"
        )
    return None
