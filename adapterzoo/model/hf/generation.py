"""Generation of models with adapters, by `generate` and by continuous batching."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from adapterzoo.caches import cached_tokens
from adapterzoo.errors import StateError, listing, names_call
from adapterzoo.inject.positions import check_positions
from adapterzoo.model import batches
from adapterzoo.model.batches import RowNames, TaskIds
from adapterzoo.model.state import anatomy_of, backbone_of

from .continuous_batching import refuse_names, refuse_other_than_default, watch


class GeneratesWithAdapters:
    """Precedes transformers' `GenerationMixin` among the bases of a class."""

    def generate(
        self,
        *args: Any,
        adapter_names: RowNames | None = None,
        task_ids: TaskIds | None = None,
        **kwargs: Any,
    ) -> Any:
        """Generate as `GenerationMixin.generate`, with an adapter for each row if names are given.

        Args:
            *args: as `generate` of transformers takes them, the prompt first.
            adapter_names: for each row of the prompt the adapter or composition that acts on it,
                None for the base model; replaces the active ones. All beams and returned sequences
                of a row use the same.
            task_ids: if a `MultiTask` is active, the task of each row: a tensor of numbers
                `[batch]`, or a list of numbers or names of its children.
            **kwargs: as `generate` of transformers takes them.

        Raises:
            CompositionError: the rows do not fit the prompt, or a task is unknown.
            StateError: `adapter_names` with a merged adapter or inside an `AdapterSetup`; or no
                named head is active.
            UnknownNameError: an adapter is unknown.
        """
        model: Any = self
        prompt = args[0] if args else kwargs.get("inputs")
        given = kwargs if prompt is None else {model.main_input_name: prompt, **kwargs}
        if batches.starts(model, adapter_names, task_ids):
            copies = _sequences(kwargs, model.generation_config)
            plan, times = batches.plan_of_call(
                model, given, adapter_names, task_ids, generates=True, copies=copies
            )
            if times > 1:
                batch = batches.batch_size(given)
                args = batches.repeated(args, times, batch)
                kwargs = batches.repeated(kwargs, times, batch)
            with model._active.overridden(plan):
                return self.generate(*args, **kwargs)
        model._head_strategy.check_generation(kwargs)
        _check_added_tokens(model, given)
        _check_positions(model, given)
        with model._active.call.generating(given):
            return cast("Any", super()).generate(*args, **kwargs)

    @names_call
    def generate_batch(
        self, *args: Any, adapter_names: Any = None, task_ids: Any = None, **kwargs: Any
    ) -> Any:
        """Run `generate_batch` of transformers with the adapters that are active in all threads.

        Args:
            *args: as `generate_batch` of transformers takes them.
            adapter_names: refused, as transformers would ignore it.
            task_ids: the same.
            **kwargs: as `generate_batch` of transformers takes them.

        Raises:
            StateError: `adapter_names` are given, an `AdapterSetup` is active, the active
                composition divides the batch, or a kept manager has the cache of other adapters.
        """
        refuse_names(adapter_names=adapter_names, task_ids=task_ids)
        refuse_other_than_default(cast("Any", self))
        return cast("Any", super()).generate_batch(*args, **kwargs)

    @names_call
    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Run `init_continuous_batching` of transformers; the manager uses the active adapters.

        Args:
            *args: as transformers takes them.
            **kwargs: the same.

        Raises:
            StateError: as `generate_batch`.
        """
        refuse_other_than_default(cast("Any", self))
        manager = cast("Any", super()).init_continuous_batching(*args, **kwargs)
        watch(cast("Any", self), manager)
        return manager


# options that count the tokens of the cache, which include tokens that adapters add
_COUNTING = ("assistant_model", "assistant_early_exit", "prompt_lookup_num_tokens")
_GROWING = (None, "dynamic", "dynamic_full", "offloaded", "quantized")


def _check_added_tokens(model: Any, given: Mapping[str, Any]) -> None:
    """Check that `generate` supports the tokens that adapters add.

    Raises:
        StateError: an option cannot handle added tokens, or sequences become too long.
    """
    prompts = model._active.plan.prompts
    if prompts is None or prompts.tokens.is_encoder:
        return
    asked = [name for name in _COUNTING if _option(model, given, name) is not None]
    if _option(model, given, "cache_implementation") not in _GROWING:
        asked.append("cache_implementation")
    if cached_tokens(given):
        asked.append("past_key_values")
    if asked:
        raise StateError(
            f"generate({listing(asked)}=…): an active adapter adds tokens to the sequence, which "
            f"would be mistaken for the model's own. Leave {listing(asked)} out."
        )
    length, legal = _length(model, given), prompts.tokens.positions
    if length is None or legal is None or prompts.joins != "inputs":
        return
    own, new = length
    rows = model._active.plan.rows
    added = prompts.longest(None if rows is None else rows.index)
    # the last token is not read again
    if added + own + new - 1 > legal:
        raise StateError(
            f"generate(): {added} tokens of an adapter, {own} of the prompt and {new} new "
            f"ones are too many: the model has positions for {legal}. Write "
            f"max_new_tokens={max(legal + 1 - added - own, 0)} or less."
        )


def _check_positions(model: Any, given: Mapping[str, Any]) -> None:
    """Check that adapters leave a position for each token of the sequences.

    Raises:
        StateError: the sequences get too long.
    """
    plan = model._active.plan
    tokens = anatomy_of(model).tokens if plan.sites else None
    length = _length(model, given)
    if length is None or tokens is None or tokens.is_encoder or tokens.positions is None:
        return
    own, new = length
    mask = given.get("attention_mask")
    longest = own if mask is None or mask.dim() != 2 else int((mask != 0).sum(1).max())
    check_positions(backbone_of(model), plan, longest + new - 1, tokens.positions)


def _option(model: Any, given: Mapping[str, Any], name: str) -> Any:
    config = given.get("generation_config") or model.generation_config
    value = given.get(name)
    return getattr(config, name, None) if value is None else value


def _length(model: Any, given: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the tokens of the prompt, and how many will follow; None if that is unknown."""
    t = next((given[n] for n in ("input_ids", "inputs_embeds") if given.get(n) is not None), None)
    new, whole = (_option(model, given, name) for name in ("max_new_tokens", "max_length"))
    if t is None or (new or whole) is None:
        return None
    return t.shape[1], whole - t.shape[1] if new is None else new


def _sequences(given: Mapping[str, Any], default: Any) -> int:
    """Return the number of sequences that `generate` computes for each row of the prompt."""
    config = given.get("generation_config") or default
    names = ("num_beams", "num_return_sequences")
    return max(given.get(name) or getattr(config, name, None) or 1 for name in names)
