"""Generation of models with adapters, by `generate` and by continuous batching."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from adapterzoo.errors import names_call
from adapterzoo.model import batches
from adapterzoo.model.batches import RowNames

from .continuous_batching import refuse_names, refuse_other_than_default, watch


class GeneratesWithAdapters:
    """Stands before transformers' `GenerationMixin` in the bases of a class."""

    def generate(self, *args: Any, adapter_names: RowNames | None = None, **kwargs: Any) -> Any:
        """As `GenerationMixin.generate`, each row with an adapter of its own where names are given.

        Args:
            *args: as `generate` of transformers takes them, the prompt first.
            adapter_names: for each row of the prompt the adapter, or a composition, that acts on
                it, None for the base model; in place of the active ones. Beams and several
                returned sequences of a row take the same.
            **kwargs: as `generate` of transformers takes them.

        Raises:
            CompositionError: the rows do not fit the prompt.
            StateError: an adapter is merged or an `AdapterSetup` holds, and there are names; or
                no named head is active.
            UnknownNameError: there is no adapter of a name.
        """
        model: Any = self
        run = cast("Any", super()).generate
        if not batches.starts(model, adapter_names):
            model._head_strategy.check_generation(kwargs)
            with model._active.call.generating():
                return run(*args, **kwargs)
        prompt = args[0] if args else kwargs.get("inputs")
        given = kwargs if prompt is None else {model.main_input_name: prompt, **kwargs}
        copies = _sequences(kwargs, model.generation_config)
        plan, times = batches.plan_of_call(
            model, given, adapter_names, generates=True, copies=copies
        )
        if times > 1:
            batch = batches.batch_size(given)
            args = batches.repeated(args, times, batch)
            kwargs = batches.repeated(kwargs, times, batch)
        with model._active.overridden(plan), model._active.call.generating():
            model._head_strategy.check_generation(kwargs)
            return run(*args, **kwargs)

    @names_call
    def generate_batch(self, *args: Any, adapter_names: Any = None, **kwargs: Any) -> Any:
        """As `generate_batch` of transformers, with the adapters that are active for all threads.

        Args:
            *args: as `generate_batch` of transformers takes them.
            adapter_names: not supported; it is refused, where transformers would ignore it.
            **kwargs: as `generate_batch` of transformers takes them.

        Raises:
            StateError: there are names, an `AdapterSetup` holds, the active composition divides
                the batch, or a manager that was kept has the cache of other adapters.
        """
        refuse_names(adapter_names)
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


def _sequences(given: Mapping[str, Any], default: Any) -> int:
    """Return how many sequences `generate` works on for each row of the prompt."""
    config = given.get("generation_config") or default
    names = ("num_beams", "num_return_sequences")
    return max(given.get(name) or getattr(config, name, None) or 1 for name in names)
