"""The forward of a model with named heads: take the labels, run the base model and the heads.

Each head gets a record of the call, for all rows of the batch or for its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from transformers.utils.generic import ModelOutput

from adapterzoo import inject
from adapterzoo.composition import last_adapter
from adapterzoo.composition.rows import ActiveHeads, RowMap, parts_of
from adapterzoo.errors import (
    BatchError,
    CompositionError,
    ConfigError,
    StateError,
    argument,
    listing,
    unknown_name,
)
from adapterzoo.heads import Pooling, PredictionHead, head_types
from adapterzoo.inject.tokens import recorded_call
from adapterzoo.model.batches import batch_size, repeated, trunk_started
from adapterzoo.model.hf.task_classes import text_config

from . import named
from .named import HeadNames
from .outputs import MultiHeadOutput, head_output

Heads = Mapping[str, PredictionHead]
"""The active heads by name."""


# arguments of `forward` for heads of any type
COMMON = ("logits_to_keep", "num_items_in_batch")
# arguments that `Call.features` reads, for the tokens that have hidden states
_FEATURES = ("attention_mask", "input_ids")


# --- one call, as heads see it ---


class BaseCall:
    """The base model in one call; its other attributes are those of the base model.

    Attributes:
        outputs: the outputs of the last run; None before it.
    """

    def __init__(self, model: Any, outputs: ModelOutput | None = None) -> None:
        """Store the model.

        Args:
            model: a model with named heads.
            outputs: the outputs that every call returns; None: each call runs the base model.
        """
        self._model = model
        self._is_fixed = outputs is not None
        self.outputs = outputs

    def __call__(self, *args: Any, **kwargs: Any) -> ModelOutput:
        """Return the outputs of the base model."""
        if not self._is_fixed:
            self.outputs = self._model.base_model(*args, **{**kwargs, "return_dict": True})
        return cast("ModelOutput", self.outputs)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the base model."""
        return getattr(self._model.base_model, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a model as its heads see it; see `PredictionHead.answer`.

    Attributes:
        model: the model with named heads.
        name: name of the head; empty before a head is chosen.
        base: the base model, for the rows of this call.
        inputs: arguments of the base model, for all rows.
        given: labels and other arguments of heads.
        rows: the rows of the batch as the adapters divide them.
        part: the number of the head's part of the batch, and the batch; None: all rows.
    """

    model: Any
    name: str = ""
    base: BaseCall
    inputs: Mapping[str, Any]
    given: Mapping[str, Any]
    rows: RowMap | None
    part: tuple[int, RowMap] | None = None

    def on(self, part: int, name: str, rows: RowMap, own: set[str]) -> Call:
        """Return the call of a head on one part of the rows, after the base model has run.

        Args:
            part: number of the part.
            name: name of the head.
            rows: the rows of the batch.
            own: arguments that may be dicts from names of heads to tensors, each for the whole
                batch or for the head's rows.

        Raises:
            ConfigError: an argument has another number of rows.
        """
        given: dict[str, Any] = {}
        count, batch = rows.index.count(part), len(rows.index) // rows.copies
        for key, value in self.given.items():
            by_head = key in own and isinstance(value, Mapping)
            given[key] = mine = value.get(name) if by_head else value
            has_rows = isinstance(mine, Tensor) and mine.dim() and key not in COMMON
            if has_rows and not (by_head and mine.shape[0] == count):
                whole = repeated(mine, rows.copies, batch)
                if whole.shape[0] % len(rows.index):
                    raise ConfigError(
                        f"forward({key}=…) has shape {list(mine.shape)}. Write {batch} rows, those "
                        f"of the batch, or {key}={{{name!r}: …}} with the {count} of the head."
                    )
                given[key] = rows.take(part, whole)
        outputs = outputs_of(part, rows, cast("ModelOutput", self.base.outputs))
        return replace(
            self,
            name=name,
            base=BaseCall(self.model, outputs),
            given=given,
            rows=None if self.rows is None else self.rows.of(rows, part),
            part=(part, rows),
        )

    def of(self, name: str) -> Call:
        """Return the call of a head on all rows; `Parallel` has repeated the batch."""
        rows, given = self.rows, {**self.given}
        if rows is not None and rows.copies > 1:
            # tensors that already have all rows do not change
            batch = len(rows.index) // rows.copies
            given = {key: repeated(t, rows.copies, batch, key) for key, t in given.items()}
        return replace(self, name=name, given=given)

    # --- what heads read ---

    @property
    def at_exit(self) -> Callable[[Tensor], Tensor] | None:
        """The inverse of the active invertible adapters; None without any."""
        plan = self.model._active.plan
        if plan.exit is None:
            return None
        return lambda y: inject.leave(self.model.base_model, plan, y, self.rows)

    def features(self, pooling: Pooling | None) -> tuple[Tensor, Tensor | None]:
        """Return the hidden states and the mask for a head.

        The attention mask of the call is `[batch, tokens]`, or any other that the model takes, such
        as one for each kind of layer, which `generate` makes for a static cache.

        Args:
            pooling: the head's pooling, which decides what it reads.

        Raises:
            StateError: the model did not compute what the head needs.
        """
        mask, input_ids = (self.given[name] for name in _FEATURES)
        outputs = self.base(**self.inputs)
        needed = "pooler_output" if pooling == "pooler" else "last_hidden_state"
        if outputs.get(needed) is None:
            what = f"{type(self.model).__name__} computes no {needed}, which the head reads"
            raise StateError(f"{what}. Add a head with another pooling.")
        if pooling == "pooler":
            # that of a CNN has two more dimensions, of size 1
            return outputs["pooler_output"].flatten(1), None  # [batch, d_model]
        hidden = cast("Tensor", outputs["last_hidden_state"])
        if hidden.dim() == 4:
            hidden = hidden.flatten(2).transpose(1, 2)  # [batch, height · width, channels]
        if pooling not in ("mean", "last", "eos"):
            return hidden, _fitting(self.model, mask, hidden)
        text = text_config(self.model.config)
        pad, eos = (getattr(text, f"{name}_token_id", None) for name in ("pad", "eos"))
        if mask is None and input_ids is not None and pad is not None and pooling != "mean":
            mask = input_ids != pad
        is_one = mask is None or isinstance(mask, Tensor)
        if pooling == "eos" and input_ids is not None and eos not in (None, []) and is_one:
            ends = torch.isin(input_ids, torch.tensor(eos, device=input_ids.device))
            real = torch.ones_like(ends)
            if isinstance(mask, Tensor):
                real = mask.to(ends.device, torch.bool)
            if real.shape == ends.shape:
                ends = ends & real
                # a truncated sequence has no end token: use its last token
                mask = ends.where(ends.any(dim=1, keepdim=True), real)
        fitting = _fitting(self.model, mask, hidden)
        if mask is not None and fitting is None:
            raise StateError(
                f"pooling={pooling!r}: the mask does not show which of the {hidden.shape[1]} "
                f"hidden states are padding. Write {argument('pooling', 'cls')}."
            )
        return hidden, fitting

    def output(self, name: str, loss: Tensor | None, values: Mapping[str, Tensor]) -> ModelOutput:
        """Return an output in a class of transformers, with the base model's outputs.

        Args:
            name: name of the class.
            loss: the loss; None without labels.
            values: the other fields from the head.
        """
        outputs = cast("ModelOutput", self.base.outputs)
        return head_output(name, {"loss": loss, **values}, outputs)

    def arguments(self, function: Callable[..., Any]) -> dict[str, Any]:
        """Return the arguments for a task class.

        Args:
            function: the forward of the class.
        """
        known = inspect.signature(function).parameters
        anything = any(p.kind is p.VAR_KEYWORD for p in known.values())
        inputs = self.inputs
        if self.part is not None:
            part, rows = self.part
            inputs = {
                key: rows.take(part, value) if isinstance(value, Tensor) and value.dim() else value
                for key, value in inputs.items()
            }
        found = {**inputs, **{k: v for k, v in self.given.items() if k not in _FEATURES}}
        # a dict has labels of several heads; outputs of an encoder are mappings too
        own = {k: v.get(self.name) if type(v) is dict else v for k, v in found.items()}
        # a task class averages its loss itself
        return {
            key: value
            for key, value in own.items()
            if value is not None and key != "num_items_in_batch" and (anything or key in known)
        }


# --- forward ---


def forward(
    model: Any, inputs: dict[str, Any], head: HeadNames, return_dict: bool | None, times: int
) -> Any:
    """Run the base model and the heads; the plan of the call is already active.

    Args:
        model: a model with named heads.
        inputs: arguments of `forward` by name.
        head: the heads; None: the active ones.
        return_dict: False for tuples.
        times: number of copies of the batch.

    Raises:
        BatchError: the heads are for another number of rows.
        StateError: no head takes these labels, or one cannot count added tokens.
    """
    active = named.chosen(model, head)
    used = named.heads_by_name(model, active)
    legal, count = len(active.rows or ()), batch_size(inputs) * times
    # in `generate`, each row may have several beams
    in_generate = model._active.call.generation is not None
    if legal and (count % legal if in_generate else count != legal):
        raise BatchError(f"the heads are {active.setup!r}; a batch has {count} rows, not {legal}.")
    labels = _take_labels(model, inputs, used, active.names)
    if times > 1:
        inputs = repeated(inputs, times, batch_size(inputs))
    if not any(each.calls_base for each in used.values()):
        _prepare_inputs(model, inputs, labels, used, times)

    def run(inputs: dict[str, Any], labels: dict[str, Any]) -> Any:
        name = "decoder_attention_mask" if model.config.is_encoder_decoder else "attention_mask"
        given = {"input_ids": inputs.get("input_ids"), **labels, "attention_mask": inputs.get(name)}
        with trunk_started(model, inputs):
            return _answer(model, BaseCall(model), active, used, return_dict, inputs, given)

    if model._active.plan.prompts is None:
        return run(inputs, labels)
    # adapters add tokens to the sequences
    for each in used.values():
        if each.config.inputs:
            raise StateError(
                f"a {each.config.head_type} head reads {listing(each.config.inputs)}, which does "
                f"not count the tokens that an active adapter adds. Activate another head."
            )
    read = labels.pop("input_ids", None)
    call = recorded_call(model, (), model._active, "", (), {**labels, **inputs}, with_head=True)
    with call as (_, given):
        wide = {name: given[name] for name in given if name not in labels}
        labels |= {name: given[name] for name in labels}
        if read is not None:
            labels["input_ids"] = wide["input_ids"] if read is inputs.get("input_ids") else read
        return run(wide, labels)


def _check_owner(model: Any, names: tuple[str, ...]) -> None:
    """Refuse to use the head of one adapter in a `Parallel` for the other adapters too.

    Raises:
        CompositionError: a single head is active, and it has the name of one of the adapters.
    """
    plan = model._active.plan
    if len(names) > 1 or plan.rows is None or plan.rows.copies < 2:
        return
    owners = {last_adapter(part) for part in parts_of(plan.setup)[0]} - {None}
    if names[0] in owners and len(owners) > 1:
        raise CompositionError(
            f"{plan.setup!r}: only the head {names[0]!r} is active. Add heads with the other "
            f"names, or write active_head = {[*names] * plan.rows.copies!r} to use it for all."
        )


def label_arguments() -> tuple[str, ...]:
    """Return the arguments of `forward`, labels included, that heads of all known types take."""
    names = [n for cls in head_types.values() for n in (*cls.label_names, *cls.inputs)]
    return tuple(dict.fromkeys(names))


def _by_head(given: dict[str, Any], used: Heads, names: tuple[str, ...]) -> None:
    """Convert lists with a value for each active head to dicts, in place.

    Raises:
        ConfigError: a list does not fit the heads.
    """
    # task classes may take lists as they are, such as one dict for each image
    if any(head.calls_base for head in used.values()):
        return
    for field in {n for h in used.values() for n in (*h.config.label_names, *h.config.inputs)}:
        values = given.get(field)
        if not isinstance(values, (list, tuple)):
            continue
        given[field] = own = dict(zip(names, values, strict=False))
        fits = all(value is None or isinstance(value, Tensor) for value in values)
        alike = all(own[name] is value for name, value in zip(names, values, strict=False))
        if not fits or not alike or len(values) != len(names):
            raise ConfigError(
                f"forward({field}=[…]): a list has one tensor, or None, for each active head "
                f"({listing(names)}). Write {field}={{{names[0]!r}: torch.tensor(…)}}."
            )


def _take_labels(
    model: Any, inputs: dict[str, Any], used: Heads, names: tuple[str, ...]
) -> dict[str, Any]:
    """Remove the arguments of the heads from those of `forward`, and return them."""
    own = [n for h in used.values() for n in (*h.config.label_names, *h.config.inputs)]
    taken = {n: inputs.pop(n) for n in (*label_arguments(), *own, *COMMON) if n in inputs}
    _by_head(taken, used, names)
    for field, value in taken.items():
        # a misspelled name would silently leave a head untrained
        for name in value if isinstance(value, Mapping) else ():
            if name not in model.heads:
                what = f"forward({field}={{{name!r}: …}})"
                raise unknown_name(what, "head", name, model.heads)
    labels = {n for cls in head_types.values() for n in cls.label_names}
    given = [n for n in taken if taken[n] is not None and n not in COMMON]
    given = [n for n in given if n in labels or not used]
    legal = [n for h in used.values() for n in h.config.label_names]
    if given and not any(n in legal for n in given):
        hint = "model.active_head = '…'" if model.heads else "model.add_classification_head('…')"
        raise StateError(
            f"forward({', '.join(f'{n}=…' for n in given)}): no active head takes these. Write "
            f"{hint}; heads: {listing(model.heads)}, active: {listing(used)}."
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
    """Run heads on outputs of the base model.

    Args:
        model: a model with named heads.
        outputs: the outputs of the base model.
        head: the heads; None: the active ones.
        return_dict: False for tuples.
        given: the other arguments of `AdapterModel.forward_head`, and labels.
    """
    active = named.chosen(model, head)
    used = named.heads_by_name(model, active)
    _by_head(given, used, active.names)
    inputs = given.pop("inputs", None) or {n: given[n] for n in _FEATURES}
    return _answer(model, BaseCall(model, outputs), active, used, return_dict, inputs, given)


def _answer(
    model: Any,
    base: BaseCall,
    active: ActiveHeads,
    heads: Heads,
    return_dict: bool | None,
    inputs: Mapping[str, Any],
    given: Mapping[str, Any],
) -> Any:
    """Run the base model, unless it has run, and the heads.

    Args:
        model: a model with named heads.
        base: its base model.
        active: the heads of the call.
        heads: the same heads by name.
        return_dict: False for tuples.
        inputs: arguments of the base model.
        given: labels and other arguments of heads.
    """
    rows = model._active.plan.rows
    if not heads:
        outputs = base(**inputs)
        return outputs if return_dict is not False else outputs.to_tuple()
    _check_owner(model, active.names)
    call = Call(model=model, base=base, inputs=inputs, given=given, rows=rows)
    found = head_rows(active, rows, model._active.call.generation is not None)
    numbers: list[list[int]] | None = None
    if found is None and len(heads) == 1:
        ((name, only),) = heads.items()
        results = [only.answer(call.of(name))]
    else:
        if base.outputs is None:
            # a head that builds the arguments of the base model itself
            caller = next((name for name, head in heads.items() if head.calls_base), None)
            if caller is None:
                base(**inputs)
            else:
                heads[caller].answer(replace(call, name=caller, given={}))
        call = replace(call, base=BaseCall(model, base.outputs))
        if found is None:
            results = [each.answer(call.of(name)) for name, each in heads.items()]
        else:
            results, numbers = _answer_on_rows(call, heads, *found)
    if return_dict is False:
        tuples = [a.to_tuple() for a in results]
        return tuples[0] if len(tuples) == 1 else tuple(tuples)
    if len(results) == 1 and numbers is None:
        return results[0]
    loss = total([a.get("loss") for a in results])
    return MultiHeadOutput(head_outputs=results, loss=loss, rows=numbers)


def _answer_on_rows(
    call: Call, heads: Heads, names: tuple[str, ...], rows: RowMap
) -> tuple[list[ModelOutput], list[list[int]] | None]:
    """Run each head on its rows.

    Returns:
        One output if kinds and shapes agree; else one for each head, and the numbers of its rows.
    """
    own = {n for h in heads.values() for n in (*h.config.label_names, *h.config.inputs)}
    calls = [call.on(i, name, rows, own) for i, name in enumerate(names)]
    results = [heads[each.name].answer(each) for each in calls]
    parts = [cast("ModelOutput", each.base.outputs) for each in calls]
    idle = [p for n in heads.keys() - {*names} for p in heads[n].parameters() if p.requires_grad]
    if idle and torch.is_grad_enabled():
        # gives heads without rows a gradient of zeros, since DDP waits for one
        i = next((i for i, each in enumerate(results) if each.get("loss") is not None), 0)
        for key, value in [*results[i].items()]:
            if isinstance(value, Tensor) and value.is_floating_point() and key not in parts[i]:
                zero = torch.cat([p.flatten()[:0].to(value) for p in idle]).sum()
                results[i][key] = value + zero
    outputs = cast("ModelOutput", call.base.outputs)
    one = joined(results, parts, rows, outputs) if rows.together else None
    if one is not None:
        return [one], None
    return results, [[row for row, p in enumerate(rows.index) if p == i] for i in range(len(names))]


# --- inputs of decoders, and masks ---


def decoder_labels(
    heads: Mapping[str, PredictionHead], given: Mapping[str, Any], copies: int
) -> Tensor | None:
    """Return the labels from which a decoder's inputs are made; None if no head has any.

    Args:
        heads: the active heads by name.
        given: arguments of `forward`; an argument may be a dict from names of heads to labels.
        copies: number of copies of the batch, one for each head if `Parallel` is active.

    Returns:
        `[copies · batch, tokens]`.

    Raises:
        ConfigError: heads that share rows have different labels.
    """
    found: list[Tensor] = []
    for name, head in heads.items():
        value = given.get(head.config.decoder_inputs_from or "")
        value = value.get(name) if isinstance(value, Mapping) else value
        found += [] if value is None else [value]
    if not found:
        return None
    if len(found) == copies and len({labels.shape for labels in found}) == 1:
        return torch.cat(found)
    first, *others = found
    if any(labels is not first and not torch.equal(labels, first) for labels in others):
        raise ConfigError(
            f"labels={{…}}: the decoder reads those of {listing(heads)}, and they differ for the "
            f"same rows. Write the same for all, or decoder_input_ids=…."
        )
    return first.repeat(copies, *(1 for _ in first.shape[1:]))  # [copies · batch, tokens]


def shift_labels(model: Any, inputs: dict[str, Any], labels: Tensor | None) -> None:
    """Add the decoder's inputs, the labels shifted by one, in place, unless the caller gives them.

    Args:
        model: an encoder–decoder.
        inputs: arguments of the base model.
        labels: the labels `[rows, tokens]` of a sequence-to-sequence head; None: the encoder's
            tokens are shifted instead.
    """
    if labels is not None:
        inputs.setdefault("use_cache", False)
    source = inputs.get("input_ids") if labels is None else labels
    given = ("decoder_input_ids", "decoder_inputs_embeds", "decoder_input_values")
    if source is None or any(inputs.get(name) is not None for name in given):
        return
    # the family's own method, if its language model has one: mBART moves the language token first
    own = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    inputs["decoder_input_ids"] = _shifted(model.config, source) if own is None else own(source)


def _shifted(config: Any, ids: Tensor) -> Tensor:
    text = text_config(config)
    # a composite config may have a token of its own, since its parts are separate models
    asked = [(config, "decoder_start_token_id"), (text, "decoder_start_token_id"),
             (text, "bos_token_id")]  # fmt: skip
    found = (getattr(place, field, None) for place, field in asked)
    start = next((token for token in found if token is not None), None)
    if start is None:
        raise ConfigError(
            f"decoder_input_ids: {type(config).__name__} has no decoder_start_token_id. Set it, or "
            f"write model(…, decoder_input_ids=…)."
        )
    shifted = ids.roll(1, dims=-1)
    shifted[:, 0] = start
    pad = getattr(text, "pad_token_id", None)
    return shifted.masked_fill(shifted == -100, start if pad is None else pad)


def _fitting(model: Any, mask: object, hidden: Tensor) -> Tensor | None:
    """Return the mask for the tokens that have hidden states; None if it is unknown."""
    tokens = hidden.shape[1]
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return None
    if mask.shape[1] > tokens:
        # audio models shorten the sequence, and have a method that shortens the mask
        shortened = getattr(model.base_model, "_get_feature_vector_attention_mask", None)
        if shortened is not None:
            return cast("Tensor", shortened(tokens, mask))
        # with a cache the mask includes the past
        return mask[:, -tokens:]
    return mask if mask.shape[1] == tokens else None


# --- batches with different heads for different rows ---


def head_rows(
    heads: ActiveHeads, rows: RowMap | None, together: bool
) -> tuple[tuple[str, ...], RowMap] | None:
    """Return each head once, and the rows of each; None if every head gets all rows.

    Args:
        heads: a head for each part of the batch, one for each copy of it, or any number for all.
        rows: the rows of the batch as the adapters divide them.
        together: whether to join the outputs of a `BatchSplit` of heads.

    Raises:
        CompositionError: `Parallel` has repeated the batch, and the number of heads does not fit.
    """
    names, index = heads.names, heads.rows
    if index is not None:
        copies = 1 if rows is None else rows.copies
        rows = RowMap(index, exact=True, together=together, copies=copies, entered=True)
    elif rows is None or rows.heads not in (None, names):
        return None
    elif rows.copies > 1 and len(names) > 1 and len(names) != rows.parts:
        if len(names) != rows.copies:
            raise CompositionError(
                f"Parallel: the heads {listing(names)} are active, and they read {rows.copies} "
                f"copies of the batch. Write active_head = […] with {rows.copies} names, or 1."
            )
        # each head reads one copy of the batch
        batch = len(rows.index) // rows.copies
        rows = replace(rows, index=tuple(row // batch for row in range(len(rows.index))))
    elif rows.parts < 2 or len(names) != rows.parts:
        return None
    # a batch may lack rows of some tasks
    present = sorted(set(rows.index))
    answering = [names[part] for part in present]
    if not rows.together:
        numbers = {part: number for number, part in enumerate(present)}
    else:
        answering = list(dict.fromkeys(answering))
        numbers = {part: answering.index(names[part]) for part in present}
    return tuple(answering), rows.renumbered([numbers.get(p, 0) for p in range(len(names))])


def outputs_of(part: int, rows: RowMap, outputs: ModelOutput) -> ModelOutput:
    """Return the base model's outputs for the rows of one part.

    Args:
        part: number of the part.
        rows: the rows of the batch.
        outputs: the outputs of the base model. A cache cannot be divided: it stays whole if the
            heads' outputs are joined, and is left out if not.
    """
    taken: dict[str, Any] = {}
    for name, value in outputs.items():
        if isinstance(value, Tensor):
            taken[name] = rows.take(part, value) if value.dim() else value
        elif isinstance(value, tuple):
            # in memories, tokens may come before rows
            taken[name] = tuple(
                rows.take(part, t) if t.dim() and t.shape[0] % len(rows.index) == 0 else t
                for t in value
                if isinstance(t, Tensor)
            )
        elif rows.together:
            taken[name] = value
    return type(outputs)(**taken)


def joined(
    results: Sequence[ModelOutput],
    parts: Sequence[ModelOutput],
    rows: RowMap,
    outputs: ModelOutput,
) -> ModelOutput | None:
    """Return one output for the whole batch in row order; None if classes or shapes differ.

    Args:
        results: the output of each head on its rows.
        parts: the base model's outputs for the rows of each head.
        rows: the rows of the batch.
        outputs: the base model's outputs for all rows.
    """
    cls, keys = type(results[0]), [key for key in results[0] if key != "loss"]
    if any(type(each) is not cls or [k for k in each if k != "loss"] != keys for each in results):
        return None
    whole: dict[str, Any] = {}
    for key in keys:
        values = [each[key] for each in results]
        if all(value is part.get(key) for value, part in zip(values, parts, strict=True)):
            whole[key] = outputs[key]
            continue
        listed = [value if isinstance(value, tuple) else (value,) for value in values]
        columns = [*zip(*listed, strict=True)]
        if any(not isinstance(t, Tensor) or not t.dim() for column in columns for t in column):
            return None
        if any(len({(t.shape[1:], t.dtype) for t in column}) > 1 for column in columns):
            return None
        put = tuple(rows.put([*column]) for column in columns)
        whole[key] = put if isinstance(values[0], tuple) else put[0]
    return cls(loss=total([each.get("loss") for each in results]), **whole)


def total(losses: Sequence[Tensor | None]) -> Tensor | None:
    """Return the sum of the losses; None if all are None."""
    found = [loss for loss in losses if loss is not None]
    return torch.stack([loss.to(found[0].device) for loss in found]).sum() if found else None
