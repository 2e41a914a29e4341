"""Prefix tuning and prompt tuning in the files of AdapterHub and PEFT."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from adapterzoo.activations import activation
from adapterzoo.anatomy import Anatomy, Site, usual_joins
from adapterzoo.config import MAX_WIDTH, AdapterConfig, Placement, Range
from adapterzoo.errors import CheckpointError
from adapterzoo.methods._peft import PROMPT, only_native, ours
from adapterzoo.peft_arguments import PeftArgument, PeftArguments
from adapterzoo.spelling import (
    AdapterHubSpelling,
    Container,
    Fields,
    PeftLayer,
    PeftSpelling,
    Tensors,
    same,
)

SELF = "self_prefix"
"""Location of self-attentions."""
TIED = "tied_self_prefix"
"""Location of the self-attentions of a decoder that share keys and values as in PEFT."""


# --- prefix tuning in AdapterHub's files: a table for each location, gates at each attention ---

_NAMES = {
    "wte.weight": "wte",
    "control_trans.0.weight": "down.weight",
    "control_trans.0.bias": "down.bias",
    "control_trans.2.weight": "up.weight",
    "control_trans.2.bias": "up.bias",
    "control_trans": "table",
}
# besides the gates, adapters saves another copy of all tables for each attention
_POOL = "prefix_tuning.pool"


def prefix_adapterhub(config: type[AdapterConfig]) -> AdapterHubSpelling:
    """Return how AdapterHub spells prefix tuning."""
    return AdapterHubSpelling(
        config=config,
        architecture=("prefix_tuning",),
        fields=same(
            "encoder_prefix", "cross_prefix", "leave_out", "flat", "prefix_length",
            "bottleneck_size", "non_linearity", "dropout", "use_gating", "shared_gating",
            "init_weights_seed",
        ),
        implied={"convention": "adapterhub"},
        containers=(
            Container(
                "prefix_tunings",
                "model",
                below="prefix_tuning",
                duplicates=(_POOL,),
                read=_read_table,
                write=_write_table,
            ),
            Container("prefix_gates", "attention", below="prefix_tuning", prefix="gate."),
        ),
    )  # fmt: skip


def _read_table(tensors: Tensors, config: AdapterConfig) -> Tensors:
    found: Tensors = {}
    for name, tensor in tensors.items():
        location, _, parameter = name.partition(".")
        ours = _NAMES.get(parameter, parameter)
        if ours == "table" and not tensor.numel() % config["prefix_length"]:
            tensor = tensor.view(config["prefix_length"], -1)  # [P, 2 N H e]
        found[f"{location}.{ours}"] = tensor
    return found


def _write_table(tensors: Tensors, config: AdapterConfig) -> Tensors:
    theirs = {ours: name for name, ours in _NAMES.items()}
    found: Tensors = {}
    for name, tensor in tensors.items():
        location, _, parameter = name.partition(".")
        flat = tensor.flatten() if parameter == "table" else tensor
        found[f"{location}.{theirs[parameter]}"] = flat
    return found


# --- prefix tuning in PEFT's files: one table, for self-attention of the model or its decoder ---


_PREFIX_ARGUMENTS = PeftArguments(
    class_name="PrefixTuningConfig",
    fields={
        **PROMPT,
        "num_virtual_tokens": ours(None, "prefix_length"),
        "encoder_hidden_size": ours(None, "bottleneck_size"),
        "prefix_projection": PeftArgument(
            False, "flat", {True: False, False: True}, "valid are True and False."
        ),
        "init_weights": ours(None, "init_weights"),
    },
    implied={
        "positions": "shifted",
        "encoder_prefix": False,
        "cross_prefix": False,
        "convention": "peft",
    },
    unsayable=lambda fields: (
        # PEFT takes its width from the model
        "prefix_projection=True: write encoder_hidden_size=768, the width of its MLP."
        if fields.get("prefix_projection") and fields.get("encoder_hidden_size") is None
        else None
    ),
)


def prefix_peft(config: type[AdapterConfig]) -> PeftSpelling:
    """Return how PEFT spells prefix tuning: T `[P, 2 N H e]`, the keys and values of a cache.

    The tokens follow the cache, so their positions start at P.
    """
    sizes = ("token_dim", "num_attention_heads", "num_layers", "num_virtual_tokens")
    return PeftSpelling(
        config=config,
        peft_type="PREFIX_TUNING",
        arguments=_PREFIX_ARGUMENTS,
        shared={"table": "prompt_embeddings"},
        fields={
            "num_transformer_submodules": PeftArgument(1, check=Range(1, 2)),
            # 0: not in the file
            **{name: PeftArgument(0, check=Range(0, MAX_WIDTH)) for name in sizes},
        },
        read_model=_from_peft,
        unsayable=_unsayable,
        write_model=_to_peft,
    )


def cartridge(config: type[AdapterConfig]) -> PeftSpelling:
    """Return how PEFT spells cartridges (Eyuboglu et al. 2025, arXiv:2506.06266), only read.

    A cartridge is the same table, trained from the cache of a text.
    """
    plain = prefix_peft(config)
    return replace(
        plain,
        peft_type="CARTRIDGE",
        becomes="a prefix that computes the same; training changes its frozen tokens too",
        arguments=None,
        inert=frozenset({*_PREFIX_ARGUMENTS.fields, "num_frozen_tokens"}),
    )


def _from_peft(
    fields: Mapping[str, Any], tensors: Tensors, _layers: Sequence[PeftLayer], anatomy: Anatomy
) -> tuple[Fields, Tensors]:
    table, attentions = tensors.get("table", torch.empty(0, 0)), _decoding(anatomy)
    expected = _sizes(attentions, anatomy) | {"num_virtual_tokens": table.shape[0]}
    width = sum(sum(a.head_widths) * a.heads for a in attentions)
    wrong = [f"{n}={fields[n]}, here {v}" for n, v in expected.items() if fields[n] not in (0, v)]
    if table.dim() != 2 or table.shape[1] != width:
        wrong.append(f"prompt_embeddings {list(table.shape)}, here [tokens, {width}]")
    if wrong:
        raise CheckpointError(
            f"the file has {'; '.join(wrong)}. Load it into the model that it was trained on, or "
            "copy both files again."
        )
    said = {**_PREFIX_ARGUMENTS.implied, "flat": True, "prefix_length": table.shape[0]}
    return said, {f"{_location(anatomy)}.table": table}


def _to_peft(config: AdapterConfig, tensors: Tensors, anatomy: Anatomy) -> tuple[Fields, Tensors]:
    attentions = _decoding(anatomy)
    at = _location(anatomy)
    if not all(name.startswith(f"{at}.") for name in tensors):
        if at == TIED:
            raise only_native(
                f"convention={config['convention']!r}, but PEFT's decoders share keys and values "
                f"(convention='peft')"
            )
        raise only_native("each of this model's towers has a prefix")
    if config["leave_out"] or len({(a.heads, a.head_widths) for a in attentions}) > 1:
        raise only_native(f"heads differ between blocks, or leave_out={list(config['leave_out'])}")
    if config["positions"] == "kept" and (anatomy.positions or anatomy.unmovable):
        raise only_native("positions='kept', but PEFT has positions='shifted'")
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
    """Return the attentions of PEFT's cache: self-attention, only the decoder's if there is one."""
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
        return f"{name}(use_gating=True), but PEFT's prefixes have no gate"
    if config["convention"] == "adapterhub":
        return f"{name}(convention='adapterhub'), which PEFT does not have"
    if placement.location in ("encoder_prefix", "cross_prefix"):
        return (
            f"a prefix at {placement.site.path!r}, but PEFT's are only in the self-attention of a "
            f"decoder (encoder_prefix=False, cross_prefix=False)"
        )
    return None


# --- prompt tuning: one table for the whole model ---

_OURS, _LENGTH = "prompt_embedding", "num_virtual_tokens"
_PROMPT_ARGUMENTS = PeftArguments(
    class_name="PromptTuningConfig",
    fields={
        **PROMPT,
        "num_virtual_tokens": ours(None, "prompt_length"),
        "prompt_tuning_init": PeftArgument(
            "RANDOM",
            "prompt_init",
            {"RANDOM": "random_uniform", "SAMPLE_VOCAB": "from_vocab", "TEXT": "from_string"},
            "valid are 'RANDOM', 'SAMPLE_VOCAB' and 'TEXT'. Write one of these.",
        ),
        "prompt_tuning_init_text": ours(None, "prompt_init_text"),
        "tokenizer_name_or_path": PeftArgument(
            hint="the tokenizer is that of the model's name. Leave it out."
        ),
        "tokenizer_kwargs": PeftArgument(
            hint="the tokenizer is that of the model's name. Leave it out."
        ),
    },
    implied={"joins": "inputs"},
)


def prompt_adapterhub(config: type[AdapterConfig]) -> AdapterHubSpelling:
    """Return how AdapterHub spells prompt tuning: rows that join the embedding module's output."""
    return AdapterHubSpelling(
        config=config,
        architecture=("prompt_tuning",),
        fields=same(
            "prompt_length", "prompt_init", "prompt_init_text", "combine", "init_weights_seed"
        ),
        implied={"joins": "embeddings"},
        as_flags=_resolved,
        containers=(
            Container(
                "prompt_tunings",
                "model",
                below="prompt_tuning",
                names={f"{_OURS}.weight": _OURS},
            ),
        ),
    )


def prompt_peft(config: type[AdapterConfig]) -> PeftSpelling:
    """Return how PEFT spells prompt tuning: rows that join the table's output."""
    rows = _rows(config, "PROMPT_TUNING", "")
    return replace(rows, write_model=_write_model, arguments=_PROMPT_ARGUMENTS)


def p_tuning(config: type[AdapterConfig]) -> PeftSpelling:
    """Return how PEFT spells p-tuning (Liu et al. 2021, arXiv:2103.10385), which can only be read.

    A network computes the rows in training; the file holds its output.
    """
    inert = """
        encoder_dropout encoder_hidden_size encoder_num_layers encoder_reparameterization_type
    """
    becomes = "a prompt that computes the same; the network that made it is not in the file"
    return replace(_rows(config, "P_TUNING", inert), becomes=becomes)


def cpt(config: type[AdapterConfig]) -> PeftSpelling:
    """Return how PEFT spells CPT (Blau et al. 2024, arXiv:2410.17222), which can only be read.

    The rows are token embeddings plus a bounded trained part; the file holds the sum.
    """
    inert = """
        cpt_mask cpt_token_ids cpt_tokens_type_mask opt_loss_decay_factor opt_projection_epsilon
        opt_projection_format_epsilon opt_weighted_loss_type
    """
    becomes = "a prompt that computes the same; training has neither its bounds nor its loss"
    return replace(_rows(config, "CPT", inert), becomes=becomes)


def _rows(config: type[AdapterConfig], peft_type: str, inert: str) -> PeftSpelling:
    """Return the spelling of a method whose file holds only the rows."""
    sizes = "num_attention_heads num_layers num_transformer_submodules token_dim"
    return PeftSpelling(
        config=config,
        peft_type=peft_type,
        shared={_OURS: "prompt_embeddings"},
        fields={_LENGTH: PeftArgument(0, check=Range(1, MAX_WIDTH))},
        inert=frozenset(f"{inert} {sizes} tokenizer_name_or_path".split()),
        # an encoder-decoder has a second table for the decoder, which PEFT never reads
        read_model=lambda fields, tensors, _layers, _anatomy: (
            {"prompt_length": fields[_LENGTH], "joins": "inputs"},
            {name: tensor[: fields[_LENGTH]] for name, tensor in tensors.items()},
        ),
    )


def _resolved(config: AdapterConfig, anatomy: Anatomy) -> AdapterConfig:
    return config.replace(joins=config.to_dict()["joins"] or usual_joins(anatomy.tokens))


def _write_model(
    config: AdapterConfig, tensors: Tensors, anatomy: Anatomy
) -> tuple[Fields, Tensors]:
    values = _resolved(config, anatomy).to_dict()
    if values["joins"] != "inputs" or values["combine"] != "prefix":
        raise only_native(f"joins={values['joins']!r}, combine={values['combine']!r}")
    length, width = tensors[_OURS].shape
    fields = {
        "num_virtual_tokens": length,
        "token_dim": width,
        "num_transformer_submodules": 1,
        "prompt_tuning_init": "RANDOM",
    }
    return fields, tensors
