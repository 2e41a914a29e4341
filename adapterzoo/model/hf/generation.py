"""Generation of models with adapters, by `generate` and by continuous batching."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from adapterzoo.errors import StateError, listing, names_call
from adapterzoo.model import batches
from adapterzoo.model.batches import RowNames, TaskIds

from .continuous_batching import refuse_names, refuse_other_than_default, watch


class GeneratesWithAdapters:
    """Stands before transformers' `GenerationMixin` in the bases of a class."""

    def generate(
        self,
        *args: Any,
        adapter_names: RowNames | None = None,
        task_ids: TaskIds | None = None,
        **kwargs: Any,
    ) -> Any:
        """As `GenerationMixin.generate`, each row with an adapter of its own where names are given.

        Args:
            *args: as `generate` of transformers takes them, the prompt first.
            adapter_names: for each row of the prompt the adapter, or a composition, that acts on
                it, None for the base model; in place of the active ones. Beams and several
                returned sequences of a row take the same.
            task_ids: where a `MultiTask` is active, the task of each row of the prompt: a tensor
                `[batch]` of numbers, or a list of numbers or names of its children.
            **kwargs: as `generate` of transformers takes them.

        Raises:
            CompositionError: the rows do not fit the prompt, or a task is unknown.
            StateError: an adapter is merged or an `AdapterSetup` holds, and there are names; or
                no named head is active.
            UnknownNameError: there is no adapter of a name.
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
        with model._active.call.generating():
            return cast("Any", super()).generate(*args, **kwargs)

    @names_call
    def generate_batch(
        self, *args: Any, adapter_names: Any = None, task_ids: Any = None, **kwargs: Any
    ) -> Any:
        """As `generate_batch` of transformers, with the adapters that are active for all threads.

        Args:
            *args: as `generate_batch` of transformers takes them.
            adapter_names: not supported; it is refused, where transformers would ignore it.
            task_ids: the same.
            **kwargs: as `generate_batch` of transformers takes them.

        Raises:
            StateError: there are names, an `AdapterSetup` holds, the active composition divides
                the batch, or a manager that was kept has the cache of other adapters.
        """
        refuse_names(adapter_names=adapter_names, task_ids=task_ids)
        refuse_other_than_default(cast("Any", self))
        return cast("Any", super()).generate_batch(*args, **kwargs)

    @names_call
    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """As `init_continuous_batching` of transformers; the manager answers with these adapters.

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


# ways to generate that count the tokens of a cache, which are more where adapters add some
_COUNTING = ("assistant_model", "assistant_early_exit", "prompt_lookup_num_tokens")
_GROWING = (None, "dynamic", "dynamic_full", "offloaded", "quantized")


def _check_added_tokens(model: Any, given: Mapping[str, Any]) -> None:
    """Check that `generate` can go on behind the tokens that adapters add.

    Raises:
        StateError: it takes the cache for one of its own tokens, or the sequences get too long.
    """
    prompts = model._active.plan.prompts
    if prompts is None or prompts.tokens.is_encoder:
        return
    config = given.get("generation_config") or model.generation_config

    def option(name: str) -> Any:
        value = given.get(name)
        return getattr(config, name, None) if value is None else value

    asked = [name for name in _COUNTING if option(name) is not None]
    if option("cache_implementation") not in _GROWING:
        asked.append("cache_implementation")
    cache = given.get("past_key_values")
    if cache is not None and cache.get_seq_length():
        asked.append("past_key_values")
    if asked:
        raise StateError(
            f"generate({listing(asked)}=…): an active adapter adds tokens to the sequence, which "
            f"would be taken for the model's own. Leave {listing(asked)} out."
        )
    t = next((given[n] for n in ("input_ids", "inputs_embeds") if given.get(n) is not None), None)
    new, whole, legal = option("max_new_tokens"), option("max_length"), prompts.tokens.positions
    if t is None or legal is None or prompts.joins != "inputs" or (new or whole) is None:
        return
    rows = model._active.plan.rows
    added = prompts.longest(None if rows is None else rows.index)
    new = whole - t.shape[1] if new is None else new
    # the last token is not read again
    if added + t.shape[1] + new - 1 > legal:
        raise StateError(
            f"generate(): {added} tokens of an adapter, {t.shape[1]} of the prompt and {new} new "
            f"ones are too many: the model has positions for {legal}. Write "
            f"max_new_tokens={max(legal + 1 - added - t.shape[1], 0)} or less."
        )


def _sequences(given: Mapping[str, Any], default: Any) -> int:
    """Return how many sequences `generate` works on for each row of the prompt."""
    config = given.get("generation_config") or default
    names = ("num_beams", "num_return_sequences")
    return max(given.get(name) or getattr(config, name, None) or 1 for name in names)
