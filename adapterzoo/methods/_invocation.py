"""aLoRA — Activated LoRA: acts on each row from its last invocation onward.

Paper: Greenewald et al. 2025, arXiv:2504.12397, §3. The invocation is a sequence of tokens. Tokens
before it, and rows without it, get the base layer, so that their keys and values are those of the
base model and need not be computed again. Its own tokens and all after it get the update.

Differs from the paper: nothing. Differs from PEFT: acts in models of every class, not only in a
`PeftModelForCausalLM`; padding is never a part of the invocation; `generate` with
`use_cache=False` keeps the place of the invocation, which in PEFT moves on with each new token;
beam search works; a call that does not show where the invocation is (`inputs_embeds`, a later part
of a sequence outside of `generate`) is refused instead of left to the base model.
Cost: LoRA's, also at tokens before the invocation. Cannot do: merging, encoders, routed experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from adapterzoo.anatomy import Anatomy, Site
from adapterzoo.anatomy.tree import below
from adapterzoo.config_base import config_class
from adapterzoo.configs import Placement
from adapterzoo.contracts import BaseLayer
from adapterzoo.errors import SiteError, listing
from adapterzoo.fields import Check, Maybe, field
from adapterzoo.kernels.grouped import Groups

from ._started_config import StartedConfig


class Invocation(Check):
    """The token ids of an invocation."""

    legal = "a list of token ids, as tokenizer.encode(text, add_special_tokens=False) returns it"

    def convert(self, value: object) -> object:
        """Return a list as a tuple."""
        return tuple(value) if isinstance(value, list) else value

    def fits(self, value: object) -> bool:
        """Return whether the value is legal."""
        ids = value if isinstance(value, list | tuple) else ()
        return bool(ids) and all(type(n) is int and n >= 0 for n in ids)

    def nearest(self, value: object, default: object) -> object:
        """Return some tokens."""
        return [5, 6]


INVOCATION = Maybe(Invocation(), "an adapter that acts at all tokens")
"""The legal values of `alora_invocation_tokens`."""


@config_class
class InvokedConfig(StartedConfig):
    """Base of the configs whose adapters may act only from an invocation on.

    Attributes:
        alora_invocation_tokens: ids of the tokens of the invocation, as a tokenizer without special
            tokens gives them (aLoRA); None: the adapter acts at all tokens.
    """

    alora_invocation_tokens: tuple[int, ...] | None = field(None, INVOCATION, ours=True)

    @property
    def invocation(self) -> tuple[int, ...] | None:
        """The tokens of the invocation."""
        tokens = self.alora_invocation_tokens
        # torch.compile cannot hash the tuple of a field
        return None if tokens is None else tuple(tokens)

    def placements(self, anatomy: Anatomy) -> list[Placement]:
        """Return one placement for each layer that the config names.

        Raises:
            SiteError: no layer matches, or the model cannot have the invocation there.
        """
        placements = super().placements(anatomy)
        if self.alora_invocation_tokens:
            name = f"{type(self).__name__}(alora_invocation_tokens="
            shown = f"{name}{list(self.alora_invocation_tokens)})"
            _check_model(shown, self.alora_invocation_tokens, anatomy)
            for placement in placements:
                _check_site(shown, placement.site, anatomy)
        return placements


def _check_model(shown: str, tokens: Sequence[int], anatomy: Anatomy) -> None:
    found = anatomy.tokens
    # blocks show where tokens come in; without them the model's own table of tokens must do
    table = found.table if found is not None else None if anatomy.blocks else anatomy.own_table
    why = ""
    if table is None:
        why = "this model reads no tokens"
    elif found is not None and (found.is_encoder or found.looks_ahead):
        why = "tokens before them see those after them in the encoder of this model"
    if why:
        raise SiteError(
            f"{shown}: the adapter acts only after these tokens, and {why}. Write "
            f"alora_invocation_tokens=None, or use a decoder-only model."
        )
    size = next(s.d_in for s in anatomy if s.path == table and s.kind == "embedding")
    if outside := [token for token in tokens if token >= size]:
        raise SiteError(
            f"{shown}: the model has the tokens 0 to {size - 1}, not {listing(outside)}. Write "
            f"the ids of its own tokenizer, or model.resize_token_embeddings({max(outside) + 1}) "
            f"first if they are new."
        )


def _check_site(shown: str, site: Site, anatomy: Anatomy) -> None:
    stack = "" if anatomy.tokens is None else anatomy.tokens.stack
    if site.is_only_read or site.is_routed or site.experts:
        why = "gets tokens of several rows, as experts do"
    elif site.role == "lm_head" or not below(site.path, stack):
        why = f"is outside of the model that reads the tokens, {stack or 'the base model'!r}"
    else:
        return
    raise SiteError(
        f"{shown} at {site.path!r}: the layer {why}, so it is unknown which of its inputs follow "
        f"these tokens. Write target_modules=[…] or exclude_modules=[{site.path!r}] without it."
    )


def invoked(t: Tensor, tokens: tuple[int, ...] | None, x: Tensor, base: BaseLayer) -> Tensor:
    """Return `t` `[*batch, width]`, zero at tokens before the invocation.

    Args:
        t: a part of the update that is zero where the update is.
        tokens: of the invocation; None: the adapter acts at all tokens.
        x: the input of the layer, `[*batch, d_in]`, or tokens `[*batch]`.
        base: the layer.
    """
    if tokens is None:
        return t
    after = base.call.after(tokens, x).unsqueeze(-1)  # [*batch, 1]
    return torch.where(after, t, 0.0)


def invoked_rows(
    t: Tensor,
    all_tokens: Sequence[tuple[int, ...] | None],
    groups: Groups,
    x: Tensor,
    base: BaseLayer,
) -> Tensor:
    """Return `invoked` for a mixed batch, each row with the invocation of its adapter.

    Args:
        t: `[rows, *tokens, width]`.
        all_tokens: the invocation of each adapter; None for all, or for none of them.
        groups: which adapter each row takes.
        x: the input of the layer, `[rows, *tokens, d_in]`.
        base: the layer.
    """
    own = [tokens for tokens in all_tokens if tokens is not None]
    if len(set(own)) < 2:
        return invoked(t, own[0] if own else None, x, base)
    each = torch.stack([base.call.after(tokens, x) for tokens in own])  # [n, rows, *tokens]
    numbers = groups.numbers("of_all", x.device)  # [rows]
    after = each[numbers, torch.arange(len(numbers), device=x.device)]  # [rows, *tokens]
    return torch.where(after.unsqueeze(-1), t, 0.0)
