"""Prompt tuning in the peers' files: one table for the whole model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    return PeftSpelling(
        config=config,
        peft_type="PROMPT_TUNING",
        arguments=_ARGUMENTS,
        shared={_OURS: "prompt_embeddings"},
        fields={"num_virtual_tokens": PeftField(0, Range(1, MAX_WIDTH))},
        inert=frozenset(
            (
                "num_attention_heads", "num_layers", "num_transformer_submodules",
                "prompt_tuning_init", "prompt_tuning_init_text", "token_dim", "tokenizer_kwargs",
                "tokenizer_name_or_path",
            )
        ),
        read_model=_read_model,
        write_model=_write_model,
    )  # fmt: skip


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
