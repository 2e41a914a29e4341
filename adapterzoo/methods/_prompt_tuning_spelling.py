"""Prompt tuning in the peers' files: one table for the whole model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from adapterzoo.anatomy import Anatomy, usual_joins
from adapterzoo.configs import AdapterConfig
from adapterzoo.errors import CheckpointError
from adapterzoo.fields import MAX_WIDTH, Range
from adapterzoo.peft_arguments import PeftArgument, PeftArguments
from adapterzoo.spelling import (
    AdapterHubSpelling,
    Container,
    Fields,
    PeftField,
    PeftLayer,
    PeftSpelling,
    Tensors,
    same,
)

from ._peft_arguments import PROMPT, ours

_OURS = "prompt_embedding"
_ARGUMENTS = PeftArguments(
    class_name="PromptTuningConfig",
    fields={
        **PROMPT,
        "num_virtual_tokens": ours(None, "prompt_length"),
        "prompt_tuning_init": PeftArgument(
            "RANDOM",
            "prompt_init",
            {"RANDOM": "random_uniform", "TEXT": "from_string"},
            "legal are 'RANDOM' and 'TEXT'. Write one of these.",
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


def adapterhub(config: type[AdapterConfig]) -> AdapterHubSpelling:
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
            Container("prompt_tunings", "model", below="prompt_tuning", read=_read, write=_write),
        ),
    )


def peft(config: type[AdapterConfig]) -> PeftSpelling:
    """Return how PEFT spells prompt tuning: rows that join the table's output."""
    inert = "prompt_tuning_init prompt_tuning_init_text tokenizer_kwargs"
    rows = _rows(config, "PROMPT_TUNING", inert)
    return replace(rows, write_model=_write_model, arguments=_ARGUMENTS)


def p_tuning(config: type[AdapterConfig]) -> PeftSpelling:
    """Return how PEFT spells p-tuning (Liu et al. 2021, arXiv:2103.10385), which is only read.

    A network computes the rows in training; the file holds its output.
    """
    inert = """
        encoder_dropout encoder_hidden_size encoder_num_layers encoder_reparameterization_type
    """
    becomes = "a prompt that computes the same; the network that made it is not in the file"
    return replace(_rows(config, "P_TUNING", inert), becomes=becomes)


def cpt(config: type[AdapterConfig]) -> PeftSpelling:
    """Return how PEFT spells CPT (Blau et al. 2024, arXiv:2410.17222), which is only read.

    The rows are those of tokens plus a bounded trained part; the file holds the sum.
    """
    inert = """
        cpt_mask cpt_token_ids cpt_tokens_type_mask opt_loss_decay_factor opt_projection_epsilon
        opt_projection_format_epsilon opt_weighted_loss_type
    """
    becomes = "a prompt that computes the same; training has neither its bounds nor its loss"
    return replace(_rows(config, "CPT", inert), becomes=becomes)


def _rows(config: type[AdapterConfig], peft_type: str, inert: str) -> PeftSpelling:
    """Return the spelling of a method whose file holds the rows."""
    sizes = "num_attention_heads num_layers num_transformer_submodules token_dim"
    return PeftSpelling(
        config=config,
        peft_type=peft_type,
        shared={_OURS: "prompt_embeddings"},
        fields={"num_virtual_tokens": PeftField(0, Range(1, MAX_WIDTH))},
        inert=frozenset(f"{inert} {sizes} tokenizer_name_or_path".split()),
        read_model=_read_model,
    )


def _resolved(config: AdapterConfig, anatomy: Anatomy) -> AdapterConfig:
    return config.replace(joins=config.to_dict()["joins"] or usual_joins(anatomy.tokens))


def _read(tensors: Tensors, _config: AdapterConfig) -> Tensors:
    return {_OURS: tensors[f"{_OURS}.weight"]}


def _write(tensors: Tensors, _config: AdapterConfig) -> Tensors:
    return {f"{_OURS}.weight": tensors[_OURS]}


def _read_model(
    fields: Mapping[str, Any], tensors: Tensors, _layers: Sequence[PeftLayer], _anatomy: Anatomy
) -> tuple[Fields, Tensors]:
    length = fields["num_virtual_tokens"]
    # an encoder-decoder has a second table for the decoder, which PEFT never reads
    rows = {name: tensor[:length] for name, tensor in tensors.items()}
    return {"prompt_length": length, "joins": "inputs"}, rows


def _write_model(
    config: AdapterConfig, tensors: Tensors, anatomy: Anatomy
) -> tuple[Fields, Tensors]:
    values = _resolved(config, anatomy).to_dict()
    if values["joins"] != "inputs" or values["combine"] != "prefix":
        raise CheckpointError(
            f"PromptTuningConfig(joins={values['joins']!r}, combine={values['combine']!r}): PEFT's "
            f"prompts precede the first token and join the inputs. Write format='native'."
        )
    length, width = tensors[_OURS].shape
    fields = {
        "num_virtual_tokens": length,
        "token_dim": width,
        "num_transformer_submodules": 1,
        "prompt_tuning_init": "RANDOM",
    }
    return fields, tensors
