"""Prompt tuning.

Paper: Lester et al. 2021, arXiv:2104.08691, §2.
P trained rows E `[P, d]` precede the embedded tokens: `[E; x]`, or `[x₀; E; x₁ …]` with
`combine="prefix_after_bos"`; in encoder-decoders, the encoder's tokens. The rest of the model sees
them as tokens: every query attends to them, other adapters count them, and outputs are P longer.
With `joins="inputs"`, as in the paper and in PEFT, the rows are embedded like words: positions,
types, norms and scales apply, and tokens have the positions P, P + 1, …. With
`joins="embeddings"`, as in adapters, they join the output of the embedding module, without any of
these, and tokens keep their positions; if a model adds positions in its attention, these include P
in both cases.

Differs from the paper: nothing. Differs from PEFT: in rows padded on the left, E directly precedes
the first token; T5's second table, which PEFT saves and never reads, is left out. Differs from
adapters: `joins`; padding is always masked; a stack concatenates.
Cost: P · d parameters, and P more tokens in each row. Cannot do: merging.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from adapterzoo.anatomy import Anatomy, Site, token_site, usual_joins, why_no_token_site
from adapterzoo.config import (
    MAX_WIDTH,
    SEED,
    AdapterConfig,
    Choice,
    Maybe,
    Placement,
    Range,
    Text,
    field,
    method_config,
)
from adapterzoo.contracts import BaseLayer, Contained, Joins, PromptAdapter
from adapterzoo.errors import ConfigError, SiteError
from adapterzoo.methods._copies import ConfigWithCopies
from adapterzoo.methods._init import DTYPE, drawn, dtype_named, generator, uniform
from adapterzoo.spelling import spelled

from .formats import cpt, p_tuning, prompt_adapterhub, prompt_peft


@spelled(prompt_adapterhub, prompt_peft, p_tuning, cpt)
@method_config("prompt_tuning")
class PromptTuningConfig(ConfigWithCopies):
    """Config of prompt tuning; the fields are those of adapters, and `joins`.

    Attributes:
        prompt_length: P, 1 to 65,536.
        prompt_init: "random_uniform", within ±0.5; "from_vocab": the embeddings of random tokens,
            as PEFT's "SAMPLE_VOCAB"; or "from_string": those of a text's tokens, repeated or
            cut to P.
        prompt_init_text: the text; its tokenizer is found by the model's name.
        combine: "prefix", before the first token; or "prefix_after_bos", after it.
        joins: what E joins, "inputs" or "embeddings"; None: "inputs" if the model has a table of
            tokens, else "embeddings".
        init_weights_seed: makes the initial values reproducible.
        dtype: dtype of E, by name ("float32"); None for that of the model.
    """

    training_fields: ClassVar[frozenset[str]] = AdapterConfig.training_fields | {
        "prompt_init", "prompt_init_text",
    }  # fmt: skip

    averages_shared = True
    starts_as_identity = False

    prompt_length: int = field(10, Range(1, MAX_WIDTH))
    prompt_init: str = field(
        "random_uniform", Choice("random_uniform", "from_string", "from_vocab")
    )
    prompt_init_text: str | None = field(None, Text(), needs="prompt_init='from_string'")
    combine: str = field("prefix", Choice("prefix", "prefix_after_bos"))
    joins: str | None = field(None, Maybe(Choice("inputs", "embeddings")))
    init_weights_seed: int | None = field(None, SEED)
    dtype: str | None = field(None, DTYPE)

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ConfigError: a value is invalid, or the text is missing.
        """
        super().__post_init__()
        if self.prompt_init == "from_string" and not self.prompt_init_text:
            raise ConfigError(
                "PromptTuningConfig(prompt_init='from_string'): no text is given. Write "
                "prompt_init_text='Classify the review:'."
            )

    def placements(self, anatomy: Anatomy) -> list[Placement]:
        """Return the place where the rows join the sequence.

        Raises:
            ConfigError: there are more rows than learned positions.
            SiteError: the model has no such place.
        """
        tokens, joins = anatomy.tokens, self.joins or usual_joins(anatomy.tokens)
        site = token_site(tokens, joins)
        if tokens is None or site is None:
            other: Joins = "embeddings" if joins == "inputs" else "inputs"
            why = why_no_token_site(tokens, joins)
            if anatomy.reason:
                why = f"has no transformer blocks: {anatomy.reason}"
            use = f"joins={other!r}" if token_site(tokens, other) else "LoRAConfig()"
            raise SiteError(f"PromptTuningConfig(joins={joins!r}): this model {why}. Write {use}.")
        legal = tokens.positions
        if joins == "inputs" and legal is not None and self.prompt_length >= legal:
            raise ConfigError(
                f"PromptTuningConfig(prompt_length={self.prompt_length}): the model has {legal} "
                f"positions. Write prompt_length={legal - 1} or less, or joins='embeddings'."
            )
        return [Placement(site, self, "prompt")]

    def shared(
        self, placements: Sequence[Placement], device: torch.device, dtype: torch.dtype
    ) -> Prompt:
        """Return the module that holds E."""
        return Prompt(self, placements[0].site.d_out, device, dtype)

    def init_from_text(self, shared: nn.Module, embedded: Callable[[str | int], Tensor]) -> None:
        """Copy the embeddings of the text, or of random tokens."""
        if self.prompt_init != "random_uniform":
            is_text = self.prompt_init == "from_string"
            rows = embedded((self.prompt_init_text or "") if is_text else self.prompt_length)
            prompt = cast("Prompt", shared).prompt_embedding
            # repeated if there are fewer than P
            steps = torch.arange(len(prompt), device=rows.device) % len(rows)
            with torch.no_grad():
                prompt.copy_(rows[steps])

    def build(self, site: Site, device: torch.device, dtype: torch.dtype) -> PromptTuning:
        """Return the adapter that inserts the rows."""
        return PromptTuning(self, "inputs" if site.role == "embedding" else "embeddings")


class Prompt(Contained):
    """E `[P, d]`."""

    container = "prompt_tunings"

    def __init__(
        self, config: PromptTuningConfig, width: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Draw the rows.

        Args:
            config: the adapter's config.
            width: d.
            device: device of E.
            dtype: dtype of E, if the config has none.
        """
        super().__init__()
        fresh = uniform(0.5, generator(config.init_weights_seed, "prompt"))
        dtype = dtype_named(config.dtype, dtype)
        self.prompt_embedding = drawn((config.prompt_length, width), fresh, device, dtype)


class PromptTuning(PromptAdapter):
    """Inserts the rows of E among the tokens."""

    container = Prompt.container

    def __init__(self, config: PromptTuningConfig, joins: Joins) -> None:
        """Record the number of rows, and where they join."""
        super().__init__()
        self.length = config.prompt_length
        self.after_first = config.combine == "prefix_after_bos"
        self.joins = joins

    def prompt(self, base: BaseLayer) -> Tensor:
        """Return E `[P, d]`."""
        return cast("Prompt", base.shared(self)).prompt_embedding
