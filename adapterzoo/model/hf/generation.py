"""Generation of models with adapters, by `generate` and by continuous batching."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, cast

from transformers import GenerationMixin

from adapterzoo.anatomy.tree import below
from adapterzoo.caches import CACHES, cached_tokens, values_kept
from adapterzoo.call import Generation
from adapterzoo.errors import StateError, listing, names_call
from adapterzoo.inject.adapted import positions_of
from adapterzoo.model import batches
from adapterzoo.model.batches import RowNames, TaskIds
from adapterzoo.model.heads.named import check_generation
from adapterzoo.model.state import anatomy_of

from . import batching


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
        # the arguments by name, the prompt by its own
        names = positions_of(GenerationMixin.generate)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if (prompt := given.pop("inputs", None)) is not None:
            given = {model.main_input_name: prompt, **given}
        context = model._active.call
        if context.generation is not None and _option(model, given, "is_assistant"):
            # drafts of a sequence, whose prompt is known
            return cast("Any", super()).generate(*args, **kwargs)
        if adapter_names is not None or task_ids is not None or model._active.plan.divides_batch:
            # how many sequences are computed for each row of the prompt
            names = ("num_beams", "num_return_sequences")
            copies = max(_option(model, kwargs, name) or 1 for name in names)
            plan, times = batches.plan_of_call(
                model, given, adapter_names, task_ids, generates=True, copies=copies
            )
            if times > 1:
                batch = batches.batch_size(given)
                args = batches.repeated(args, times, batch)
                kwargs = batches.repeated(kwargs, times, batch)
            with model._active.overridden(plan):
                return self.generate(*args, **kwargs)
        check_generation(model, kwargs)
        assistant = _option(model, given, "assistant_model")
        models: list[Any] = [m for m in (model, assistant) if isinstance(m, GeneratesWithAdapters)]
        for each in models:
            _check_added_tokens(each, given)
        with ExitStack() as records, values_kept():
            for each in {id(each): each for each in models}.values():
                own = each._active.call
                records.callback(setattr, own, "generation", own.generation)
                own.generation = _record(each, given if each is model else {})
            return cast("Any", super()).generate(*args, **kwargs)

    def _prepare_model_inputs(self, *args: Any, **kwargs: Any) -> Any:
        """Note the prompt, which transformers prepares here, and go on as it does."""
        found = inputs, name, given = cast("Any", super())._prepare_model_inputs(*args, **kwargs)
        generation = cast("Any", self)._active.call.generation
        if generation is not None:
            ids = inputs if name == "input_ids" else given.get("input_ids")
            # beside embeddings, transformers makes ids of no tokens where there are none
            has_ids = ids is not None and ids.numel() > 0
            generation.coming = {**given, "input_ids": ids if has_ids else None}
        return found

    def _prepare_generated_length(self, *args: Any, **kwargs: Any) -> Any:
        """Note the length of the prompt, which transformers passes here, and go on as it does."""
        context, tokens = cast("Any", self)._active.call, kwargs.get("input_ids_length")
        if context.generation is not None and tokens is not None:
            is_draft = getattr(kwargs.get("generation_config"), "is_assistant", False)
            # each round of drafts has those that were accepted before
            if not is_draft or context.generation.tokens is None:
                context.generation = context.generation.of_prompt(tokens)
        return cast("Any", super())._prepare_generated_length(*args, **kwargs)

    @names_call
    def generate_batch(
        self, *args: Any, adapter_names: Any = None, task_ids: Any = None, **kwargs: Any
    ) -> Any:
        """Run `generate_batch` of transformers, with an adapter for each request if they are named.

        Args:
            *args: as `generate_batch` of transformers takes them, the prompts first.
            adapter_names: for each prompt the adapter or composition that acts on it, None for the
                base model. Without it, what is active in the calling thread and task acts on all.
            task_ids: refused, as transformers would ignore it.
            **kwargs: as `generate_batch` of transformers takes them.

        Raises:
            CompositionError: adapters cannot act in one step.
            ConfigError: there are not as many names as prompts, or a prompt is empty or too long,
                or has unknown tokens.
            StateError: `task_ids` are given; an adapter does not act on each token by itself; names
                are given inside an `AdapterSetup` or with a merged adapter; or this transformers
                has not been tested.
            UnknownNameError: an adapter is unknown.
        """
        model: Any = self
        if task_ids is not None:
            raise StateError("continuous batching takes no task_ids. Write adapter_names=[…].")
        plain = cast("Any", super()).generate_batch
        names = positions_of(GenerationMixin.generate_batch)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if not model.has_adapters() and adapter_names is None:
            return plain(*args, **kwargs)
        batching.refuse_untested()
        new_tokens = _option(model, given, "max_new_tokens")
        prompts = batching.prompts_of(model, given.pop("inputs"), adapter_names, new_tokens)
        found = plain(prompts, **given)
        if prompts and prompts[0].errors:
            raise prompts[0].errors[0]
        return found

    @names_call
    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Run `init_continuous_batching` of transformers; requests may have adapters.

        `add_request(…, adapter_name=…)` of the manager names the adapter of a request, None for the
        base model. Without a name, what is active where the request is added acts on it.

        Args:
            *args: as transformers takes them.
            **kwargs: the same.

        Raises:
            StateError: this transformers has not been tested.
        """
        model: Any = self
        if not batching.is_tested() and not model.has_adapters():
            return cast("Any", super()).init_continuous_batching(*args, **kwargs)
        batching.refuse_untested()
        manager = cast("Any", super()).init_continuous_batching(*args, **kwargs)
        batching.adapt(model, manager)
        return manager


def counting(cls: Any) -> None:
    """Let the class note how many tokens each call of `generate` goes up to.

    `prepare_inputs_for_generation` gets them all, with the candidates of assisted decoding. It
    keeps its signature, which `generate` inspects.

    Args:
        cls: a class whose first base is `GeneratesWithAdapters`.
    """
    plain = cls.prepare_inputs_for_generation

    @functools.wraps(plain)
    def prepare_inputs_for_generation(self: Any, *args: Any, **kwargs: Any) -> Any:
        generation, trunk = self._active.call.generation, self._active.plan.trunk
        if trunk is not None:
            # before, encoders alone get the inputs of the call
            trunk.is_running = False
        if generation is not None:
            ids = args[0] if args else next(iter(kwargs.values()))
            name = "decoder_attention_mask" if self.config.is_encoder_decoder else "attention_mask"
            generation.step(ids.shape[1], kwargs.get(name))
        return plain(self, *args, **kwargs)

    cls.prepare_inputs_for_generation = prepare_inputs_for_generation


def _record(model: Any, given: Mapping[str, Any]) -> Generation:
    """Return the record of a `generate`.

    Args:
        model: that it runs.
        given: its arguments, by name.
    """
    stacks = model._active.plan.stacks
    if not stacks:
        return Generation()
    anatomy = anatomy_of(model)
    tokens = anatomy.tokens
    lists = dict.fromkeys(block.stack for block in anatomy.blocks)
    if model.config.is_encoder_decoder:
        writing = dict.fromkeys(b.stack for b in anatomy.blocks if any(s.cross for s in b.sites))
    else:
        writing = {path: None for path in lists if tokens and below(path, tokens.stack)}
    # the innermost model around the blocks records their calls
    paths = {max((p for p in stacks if below(path, p)), key=len) for path in writing or lists}
    filled = next((name for name in CACHES if given.get(name) is not None), "")
    partial = filled if cached_tokens(given) != 0 else ""
    names = (*_GUESSING, "prefill_chunk_size")
    guesses = tuple(name for name in names if _option(model, given, name) is not None)
    return Generation(paths or stacks, given, partial, guesses)


# options that count the tokens of the cache, which include tokens that adapters add
_GUESSING = ("assistant_model", "assistant_early_exit", "prompt_lookup_num_tokens")
_GROWING = (None, "dynamic", "dynamic_full", "offloaded", "quantized")


def _check_added_tokens(model: Any, given: Mapping[str, Any]) -> None:
    """Check that `generate` supports the tokens that adapters add.

    Raises:
        StateError: an option cannot handle added tokens.
    """
    prompts = model._active.plan.prompts
    if prompts is None or prompts.tokens.is_encoder:
        return
    asked = [name for name in _GUESSING if _option(model, given, name) is not None]
    if _option(model, given, "cache_implementation") not in _GROWING:
        asked.append("cache_implementation")
    if cached_tokens(given):
        asked.append("past_key_values")
    if asked:
        raise StateError(
            f"generate({listing(asked)}=…): an active adapter adds tokens to the sequence, which "
            f"would be mistaken for the model's own. Leave {listing(asked)} out."
        )


def _option(model: Any, given: Mapping[str, Any], name: str) -> Any:
    config = given.get("generation_config") or model.generation_config
    value = given.get(name)
    return getattr(config, name, None) if value is None else value
