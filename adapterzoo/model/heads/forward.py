"""The forward of a model with named heads: take the labels, run the base model and the heads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

from transformers.utils.generic import ModelOutput

from adapterzoo import inject
from adapterzoo.composition import ActiveHeads, RowMap, last_adapter, parts_of
from adapterzoo.errors import (
    BatchError,
    CompositionError,
    StateError,
    listing,
    unknown_name,
)
from adapterzoo.heads import PredictionHead, by_head, head_types
from adapterzoo.model.batches import batch_size, repeated
from adapterzoo.model.state import anatomy_of

from . import store
from .calls import COMMON, Base, Call
from .inputs import decoder_labels, shift_labels
from .interface import HeadNames
from .outputs import MultiHeadOutput
from .rows import apart, head_rows, joined, total, with_copies

Heads = Mapping[str, PredictionHead]
"""The active heads by name."""


def forward(
    model: Any, inputs: dict[str, Any], head: HeadNames, return_dict: bool | None, times: int
) -> Any:
    """Run the base model and the heads; the plan of the call is already active.

    Args:
        model: with named heads.
        inputs: arguments of `forward` by name.
        head: which heads; None for the active ones.
        return_dict: False for tuples.
        times: how often the batch is repeated.
    """
    used = model._head_strategy.active_heads(head)
    _check_exit(model, used)
    _check_batch(model, model._head_strategy.chosen(head), batch_size(inputs) * times)
    labels = _take_labels(model, inputs, used, model._head_strategy.chosen(head).names)
    if times > 1:
        inputs = repeated(inputs, times, batch_size(inputs))
    if _caller_of_base(used) is None:
        _prepare_inputs(model, inputs, labels, used, times)

    def run(inputs: dict[str, Any], labels: dict[str, Any]) -> Any:
        name = "decoder_attention_mask" if model.config.is_encoder_decoder else "attention_mask"
        given = {"input_ids": inputs.get("input_ids"), **labels, "attention_mask": inputs.get(name)}
        return _answer(model, Base(model), head, return_dict, inputs, given)

    if model._active.plan.prompts is not None:
        return _with_prompts(model, inputs, labels, used, run)
    return run(inputs, labels)


def _with_prompts(
    model: Any, inputs: dict[str, Any], labels: dict[str, Any], used: Heads, run: Callable[..., Any]
) -> Any:
    """Run base model and heads on sequences that are longer by the tokens that adapters add."""
    for each in used.values():
        if each.config.inputs:
            raise StateError(
                f"a {each.config.head_type} head reads {listing(each.config.inputs)}, which does "
                f"not count the tokens that an active adapter adds. Activate another head, or an "
                f"adapter of another method."
            )
    read = labels.pop("input_ids", None)
    call = inject.recorded(model, (), model._active, "", (), {**labels, **inputs}, with_head=True)
    with call as (_, given):
        wide = {name: given[name] for name in given if name not in labels}
        for name in labels:
            labels[name] = given[name]
        if read is not None:
            labels["input_ids"] = wide["input_ids"] if read is inputs.get("input_ids") else read
        return run(wide, labels)


def _check_exit(model: Any, used: Heads) -> None:
    """Refuse heads to which the inverse of an invertible adapter cannot be applied.

    Raises:
        StateError: the last layer of a head reads another width.
    """
    plan = model._active.plan
    if plan.exit is None:
        return
    entry = anatomy_of(model).entry
    width = 0 if entry is None else entry.d_out
    for name, each in used.items():
        layer = each.output_embeddings if each.has_exit else None
        if layer is not None and layer.in_features != width:
            raise StateError(
                f"the last layer of the head {name!r} reads {layer.in_features} features, and the "
                f"invertible adapters of {plan.setup!r} have {width}: those of the blocks. Write "
                f"inv_adapter=None in their config, or use a head of the model's own width."
            )


def _check_batch(model: Any, heads: ActiveHeads, count: int) -> None:
    """Check that a batch has the rows that a `BatchSplit` of heads divides.

    Raises:
        BatchError: it has others.
    """
    legal = len(heads.rows or ())
    # in `generate` each row may stand for several beams
    rest = count % legal if legal and model._active.call.generation is not None else count - legal
    if legal and rest:
        raise BatchError(
            f"the heads are {heads.setup!r}: the batch has {count} rows, legal are {legal}. Write "
            f"other sizes."
        )


def _check_owner(model: Any, names: tuple[str, ...]) -> None:
    """Refuse the head of one adapter of a `Parallel` for the copies of the others.

    Raises:
        CompositionError: there is one head, and it has the name of one of several adapters.
    """
    plan = model._active.plan
    if len(names) > 1 or plan.rows is None or plan.rows.copies < 2:
        return
    owners = {last_adapter(part) for part in parts_of(plan.setup)[0]} - {None}
    if names[0] in owners and len(owners) > 1:
        raise CompositionError(
            f"{plan.setup!r}: {names[0]!r} is the only active head, and the others have none. Add "
            f"heads with their names, or write active_head = {[*names] * plan.rows.copies!r} to "
            f"use it for all."
        )


def label_arguments() -> tuple[str, ...]:
    """Return the arguments of `forward` that heads of the known types take, labels among them."""
    names = [n for cls in head_types.values() for n in (*cls.label_names, *cls.inputs)]
    return tuple(dict.fromkeys(names))


def _by_head(given: dict[str, Any], used: Heads, names: tuple[str, ...]) -> None:
    """Turn lists with a value for each active head into dicts, in place."""
    # task classes take lists themselves, such as one dict for each image
    if not used or any(head.calls_base for head in used.values()):
        return
    for argument in {n for h in used.values() for n in (*h.config.label_names, *h.config.inputs)}:
        if isinstance(given.get(argument), (list, tuple)):
            given[argument] = by_head(argument, given[argument], names)


def _take_labels(
    model: Any, inputs: dict[str, Any], used: Heads, names: tuple[str, ...]
) -> dict[str, Any]:
    """Remove the arguments of the heads from those of `forward`, and return them."""
    own = [n for h in used.values() for n in (*h.config.label_names, *h.config.inputs)]
    taken = {n: inputs.pop(n) for n in (*label_arguments(), *own, *COMMON) if n in inputs}
    _by_head(taken, used, names)
    for argument, value in taken.items():
        # a misspelled name would leave a head untrained without an error
        for name in value if isinstance(value, Mapping) else ():
            if name not in model.heads:
                what = f"forward({argument}={{{name!r}: …}})"
                raise unknown_name(what, "head", name, model.heads)
    given = [n for n in taken if taken[n] is not None and n not in COMMON]
    if given and not used:
        raise StateError(
            f"forward({', '.join(f'{n}=…' for n in given)}): no head is active, so there "
            f"is no use for labels. Heads: {listing(model.heads)}. "
            f"Write add_classification_head('my_task') or model.active_head = 'my_task'."
        )
    labels = [n for n in given if any(n in cls.label_names for cls in head_types.values())]
    legal = [n for h in used.values() for n in h.config.label_names]
    if labels and not any(n in legal for n in labels):
        raise StateError(
            f"forward({', '.join(f'{n}=…' for n in labels)}): the head {listing(used)} does "
            f"not take these labels, it takes {listing(legal)}. Write those, or "
            f"model.active_head = '…'; heads: {listing(model.heads)}."
        )
    return taken


def _prepare_inputs(
    model: Any, inputs: dict[str, Any], labels: dict[str, Any], used: Heads, times: int
) -> None:
    """Convert the base model's arguments to the form that it and the heads need, in place."""
    for each in used.values():
        each.config.prepare_inputs(inputs)
    ids = inputs.get("input_ids")
    if getattr(model.config, "is_encoder_decoder", False):
        given = inputs.get("decoder_input_ids")
        if given is not None and (ids is None or given.shape != ids.shape):
            ids = given
        shift_labels(model, inputs, decoder_labels(used, labels, times))
    if used:
        labels["input_ids"] = ids


def forward_head(
    model: Any,
    outputs: ModelOutput,
    head: HeadNames,
    return_dict: bool | None,
    given: dict[str, Any],
) -> Any:
    """Run heads on the outputs of the base model.

    Args:
        model: with named heads.
        outputs: of the base model.
        head: which heads; None for the active ones.
        return_dict: False for tuples.
        given: the other arguments of `AdapterModel.forward_head`, and labels.
    """
    used = model._head_strategy.active_heads(head)
    _by_head(given, used, model._head_strategy.chosen(head).names)
    inputs = given.pop("inputs", None) or {n: given[n] for n in ("attention_mask", "input_ids")}
    return _answer(model, Base(model, outputs), head, return_dict, inputs, given)


def _answer(
    model: Any,
    base: Base,
    head: HeadNames,
    return_dict: bool | None,
    inputs: Mapping[str, Any],
    given: Mapping[str, Any],
) -> Any:
    """Run the base model, unless it has run, and the heads.

    Args:
        model: with named heads.
        base: its base model.
        head: which heads; None for the active ones.
        return_dict: False for tuples.
        inputs: arguments of the base model.
        given: labels and other arguments of heads.
    """
    active, rows = model._head_strategy.chosen(head), model._active.plan.rows
    if not active.names:
        outputs = base(**inputs)
        return outputs if return_dict is not False else outputs.to_tuple()
    _check_owner(model, active.names)
    heads = {name: store.find(model, name) for name in active.names}
    call = Call(model=model, base=base, inputs=inputs, given=given, rows=rows)
    found = head_rows(active, rows, model._active.call.generation is not None)
    results: list[ModelOutput] | MultiHeadOutput
    if found is None and len(heads) == 1:
        ((name, only),) = heads.items()
        results = [only.answer(_for_all(call, name))]
    else:
        _run_base(call, heads)
        call = replace(call, base=Base(model, base.outputs))
        results = (
            [each.answer(_for_all(call, name)) for name, each in heads.items()]
            if found is None
            else _answer_on_rows(call, heads, *found)
        )
    if return_dict is False:
        tuples = [a.to_tuple() for a in results]
        return tuples[0] if len(tuples) == 1 else tuple(tuples)
    if isinstance(results, MultiHeadOutput):
        return results
    if len(results) == 1:
        return results[0]
    loss = total([a.get("loss") for a in results])
    return MultiHeadOutput(head_outputs=results, loss=loss)


def _for_all(call: Call, name: str) -> Call:
    """Return the call of a head on all rows."""
    return replace(call, name=name, given=with_copies(call.rows, {**call.given}))


def _caller_of_base(heads: Heads) -> str | None:
    """Return the first head that makes the arguments of the base model itself; None: none does."""
    return next((name for name, head in heads.items() if head.calls_base), None)


def _run_base(call: Call, heads: Heads) -> None:
    """Run the base model, unless it has run."""
    if call.base.outputs is not None:
        return
    name = _caller_of_base(heads)
    if name is None:
        call.base(**call.inputs)
    else:
        heads[name].answer(replace(call, name=name, given={}))


def _answer_on_rows(
    call: Call, heads: Heads, names: tuple[str, ...], rows: RowMap
) -> list[ModelOutput] | MultiHeadOutput:
    """Run each head on its rows; return one output if kinds and shapes agree, else several."""
    own = {n for h in heads.values() for n in (*h.config.label_names, *h.config.inputs)}
    calls = [call.on(i, name, rows, own) for i, name in enumerate(names)]
    results = [heads[each.name].answer(each) for each in calls]
    parts = [cast("ModelOutput", each.base.outputs) for each in calls]
    outputs = cast("ModelOutput", call.base.outputs)
    one = joined(results, parts, rows, outputs) if rows.together else None
    return apart(results, rows) if one is None else [one]
