"""`HeadsMixin`: a model with named adapters and named heads; runs, trains and stores the heads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from transformers.utils.generic import ModelOutput

from adapterzoo.checkpoint import native
from adapterzoo.composition import Composition, RowMap
from adapterzoo.errors import CheckpointError, StateError, listing
from adapterzoo.heads import HeadConfig, PredictionHead, head_types, labels_from

from .averaging_heads import AveragingHeadsMixin
from .hf.backbone import describe
from .hf.towers import refuse_unreadable
from .inputs import decoder_labels, head_input, shift_labels
from .output_layers import FIELD, with_output, without_output
from .outputs import MultiHeadOutput, answer
from .records import HeadRecord
from .row_heads import (
    apart,
    given_to,
    head_rows,
    joined,
    outputs_of,
    take_rows,
    total,
    with_copies,
)
from .unloading_heads import UnloadingHeadsMixin
from .vocabulary import VocabularyMixin

# arguments of `forward` that belong to heads of any type
_COMMON = ("logits_to_keep", "num_items_in_batch")


class HeadsMixin(AveragingHeadsMixin, UnloadingHeadsMixin, VocabularyMixin):
    """Adapters and named heads for a `PreTrainedModel`; stands before it in a class's bases."""

    _has_named_heads: ClassVar[bool] = True

    # --- run ---

    @staticmethod
    def label_arguments() -> tuple[str, ...]:
        """The arguments of `forward` that heads of the known types take, labels among them."""
        names = [n for cls in head_types.values() for n in (*cls.label_names, *cls.inputs)]
        return tuple(dict.fromkeys(names))

    def _take_labels(
        self, inputs: dict[str, Any], head: str | list[str] | None = None
    ) -> dict[str, Any]:
        """Take what belongs to the heads out of the arguments of `forward`.

        Raises:
            StateError: there are labels and no head that could use them.
            UnknownNameError: there is no head of this name, or of one that a dict has labels for.
        """
        used = self._used_heads(head)
        own = [n for h in used.values() for n in (*h.config.label_names, *h.config.inputs)]
        taken = {n: inputs.pop(n) for n in (*self.label_arguments(), *own, *_COMMON) if n in inputs}
        for argument, value in taken.items():
            # a task whose name is misspelt would not be trained, and nobody would know
            for name in value if isinstance(value, Mapping) else ():
                self._find_head(name, f"forward({argument}={{{name!r}: …}})")
        given = [n for n in taken if taken[n] is not None and n not in _COMMON]
        if given and not used:
            raise StateError(
                f"forward({', '.join(f'{n}=…' for n in given)}): no head is active, so nothing "
                f"answers to labels. Heads: {listing(self.heads)}. "
                f"Write add_classification_head('my_task') or model.active_head = 'my_task'."
            )
        labels = [n for n in given if any(n in cls.label_names for cls in head_types.values())]
        answers = [n for h in used.values() for n in h.config.label_names]
        if labels and not any(n in answers for n in labels):
            raise StateError(
                f"forward({', '.join(f'{n}=…' for n in labels)}): the head {listing(used)} does "
                f"not take these labels, it takes {listing(answers)}. Write those, or "
                f"model.active_head = '…'; heads: {listing(self.heads)}."
            )
        return taken

    def _prepare_inputs(
        self, inputs: dict[str, Any], labels: dict[str, Any], head: str | list[str] | None = None
    ) -> None:
        """Bring the base model's arguments into the form that it and the heads need, in place."""
        used = self._used_heads(head)
        for head_used in used.values():
            head_used.config.prepare_inputs(inputs)
        ids = inputs.get("input_ids")
        if getattr(self.config, "is_encoder_decoder", False):
            given = inputs.get("decoder_input_ids")
            if given is not None and (ids is None or given.shape != ids.shape):
                ids = given
            shift_labels(self, inputs, decoder_labels(used.values(), labels))
        if used:
            labels["input_ids"] = ids

    def forward_head(
        self,
        all_outputs: ModelOutput,
        head_name: str | list[str] | None = None,
        attention_mask: Tensor | None = None,
        return_dict: bool | None = True,
        input_ids: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run heads on what the base model computed.

        Args:
            all_outputs: of the base model.
            head_name: which head or heads; None for the active ones.
            attention_mask: of the tokens with hidden states.
            return_dict: False for a tuple of loss, if any, logits, and the rest.
            input_ids: tokens in whose number the hidden states come; where padding and ends of
                sequences are looked for.
            logits_to_keep: of how many last tokens, or which, language models need logits; 0: all.
            num_items_in_batch: by what the sum of the losses is divided, instead of the number
                of labels in this batch.
            **kwargs: labels, and what else heads take. Instead of a tensor a dict from names of
                heads to tensors.

        Returns:
            The output class of the task; a `MultiHeadOutput` for several heads; `all_outputs`
            when no head is active.

        Raises:
            ConfigError: labels that do not fit.
            StateError: the base model did not compute what a head needs.
            UnknownNameError: there is no head of this name.
        """
        names = self._used_names(head_name)
        if not names:
            return all_outputs if return_dict is not False else all_outputs.to_tuple()
        extra = {
            **kwargs, "attention_mask": attention_mask, "input_ids": input_ids,
        }  # fmt: skip
        keep, count = logits_to_keep, num_items_in_batch
        found = head_rows(names, self._active.plan.rows)
        if found is not None:
            answers = self._answers_of_rows(*found, all_outputs, extra, keep, count)
        else:
            extra = with_copies(self._active.plan.rows, extra)
            answers = []
            for name in dict.fromkeys(names):
                logits, loss = self._run_head(name, all_outputs, extra, keep, count)
                answers.append(answer(self.get_head(name).config, loss, logits, all_outputs))
        if return_dict is False:
            tuples = [a.to_tuple() for a in answers]
            return tuples[0] if len(tuples) == 1 else tuple(tuples)
        if isinstance(answers, MultiHeadOutput):
            return answers
        if len(answers) == 1:
            return answers[0]
        loss = total([a.get("loss") for a in answers])
        return MultiHeadOutput(head_outputs=answers, loss=loss)

    def _run_head(
        self,
        name: str,
        outputs: ModelOutput,
        given: Mapping[str, Any],
        logits_to_keep: int | Tensor,
        count: Tensor | int | None,
    ) -> tuple[Tensor | tuple[Tensor, ...], Tensor | None]:
        """Logits and loss of a head; `given` are labels, masks and what else there is."""
        head = self.get_head(name)
        hidden, mask = head_input(self, head, outputs, given["attention_mask"], given["input_ids"])
        hidden = head.tokens_to_score(hidden, logits_to_keep)
        logits = head(hidden, mask, **{n: given.get(n) for n in head.config.inputs})
        labels = head.config.find_labels(name, given)
        if labels is None:
            return logits, None
        return logits, head.loss(logits, head.config.mask_labels(labels, mask), count)

    def _answers_of_rows(
        self,
        names: tuple[str, ...],
        rows: RowMap,
        outputs: ModelOutput,
        given: Mapping[str, Any],
        logits_to_keep: int | Tensor,
        count: Tensor | int | None,
    ) -> list[ModelOutput] | MultiHeadOutput:
        """The answers of heads that each answer some rows; one answer where they are alike."""
        heads = [self.get_head(name) for name in names]
        batch = len(rows.index) // rows.copies
        labelled = {n for h in heads for n in (*h.config.label_names, *h.config.inputs)}
        of_rows = [
            {
                **given_to(i, name, rows, {k: v for k, v in given.items() if k in labelled}, batch),
                **{k: take_rows(i, rows, v) for k, v in given.items() if k not in labelled},
            }
            for i, name in enumerate(names)
        ]
        parts = [outputs_of(i, rows, outputs, not rows.together) for i in range(len(names))]
        found = [
            self._run_head(name, part, mine, logits_to_keep, count)
            for name, part, mine in zip(names, parts, of_rows, strict=True)
        ]
        logits, losses = [f[0] for f in found], [f[1] for f in found]
        if rows.together:
            whole = joined(heads, rows, logits, total(losses), outputs)
            if whole is not None:
                return [whole]
            parts = [outputs_of(i, rows, outputs, True) for i in range(len(names))]
        return apart(
            [
                answer(head.config, loss, score, part)
                for head, (score, loss), part in zip(heads, found, parts, strict=True)
            ],
            rows,
        )

    def _used_heads(self, names: str | list[str] | None) -> dict[str, PredictionHead]:
        return {name: self.get_head(name) for name in self._used_names(names)}

    def _used_names(self, names: str | list[str] | None) -> tuple[str, ...]:
        return self._names(names, f"head={names!r}") if names else self._current_heads()

    # --- train and store ---

    def _prepare_heads(self, setup: Composition, call: str) -> None:
        """Nothing to prepare: named heads are there or not."""

    def _train_heads(self, train_embeddings: bool = False) -> None:
        """The active heads are trained, the others not; embeddings that a head shares neither.

        Args:
            train_embeddings: whether the matrix onto the vocabulary is trained too.
        """
        backbone = {id(p) for p in self._backbone.parameters()}
        active = self._active.default.plan.heads
        for name, head in self.heads.items():
            for parameter in head.parameters():
                if id(parameter) not in backbone:
                    parameter.requires_grad_(name in active)
            layer = cast("PredictionHead", head).output_embeddings
            if layer is not None and not train_embeddings:
                layer.weight.requires_grad_(False)

    def adapter_to(
        self,
        name: str,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Move or cast an adapter, and the head of the same name, alone.

        Args:
            name: of the adapter.
            device: None: where each of its parts is.
            dtype: None: what each of its parts has.

        Raises:
            UnknownNameError: there is no adapter of this name.
        """
        super().adapter_to(name, device, dtype)
        if name in self.heads:
            self.heads[name].to(device=device, dtype=dtype)

    def _head_of(self, adapter_name: str) -> str | None:
        if adapter_name in self.heads:
            return adapter_name
        active = self._current_heads()
        return active[0] if len(active) == 1 else None

    def _head_record(self, name: str | None) -> HeadRecord | None:
        if name is None:
            return None
        head = self._find_head(name, f"save_head({name!r})")
        return HeadRecord({"config": head.config.to_dict()}, self._own_tensors(head))

    def _head_alone(self, name: str | None) -> HeadRecord | None:
        table = None if name is None else self._table_of(name)
        if name is None or table is None:
            return self._head_record(name)
        head = self._find_head(name, f"save_head({name!r})")
        layer = head.output_embeddings
        if layer is None or layer.weight is not table:
            return self._head_record(name)
        # what it shares with its adapter is its own where that is not saved with it
        config = head.config.replace(tie_word_embeddings=False)
        backbone = {id(p) for p in self._backbone.parameters()} - {id(table)}
        tensors = head.state_dict(keep_vars=True)
        own = {key: t for key, t in tensors.items() if id(t) not in backbone}
        return HeadRecord({"config": config.to_dict()}, own)

    def _in_file(self, name: str | None, record: HeadRecord) -> HeadRecord:
        return record if name is None else without_output(self.get_head(name), record)

    def _head_tensors(self, name: str) -> dict[str, Tensor]:
        return self._own_tensors(self.get_head(name))

    def _own_tensors(self, head: PredictionHead) -> dict[str, Tensor]:
        """The tensors of a head without those that belong to the base model."""
        backbone = {id(p) for p in self._backbone.parameters()}
        tensors = head.state_dict(keep_vars=True)
        return {key: t for key, t in tensors.items() if id(t) not in backbone}

    def _fitting_head(
        self,
        call: str,
        record: HeadRecord,
        name: str | None,
        id2label: Mapping[int, str] | None,
        set_active: bool,
        overwrite_ok: bool,
        dtype: torch.dtype | None,
    ) -> Callable[[], None]:
        values = record.document.get("config")
        if not isinstance(values, Mapping):
            raise CheckpointError(
                f"{call}: the checkpoint has the head of a {record.document.get('static')}, this "
                f"model has named heads. Write with_head=False, or load into that class."
            )
        config = self._config_from(values, call)
        if id2label is not None:
            config = config.replace(label2id=labels_from(id2label))
        checked = self._free_head_name(call, name, overwrite_ok)
        refuse_unreadable(self, call)
        # a stranger's config may ask for more memory than there is: compare before any is taken
        empty = self._built(config, torch.device("meta"))
        fits = self._own_tensors(empty)
        tensors = with_output(
            call, empty, map(self.get_head, self.heads), record.document, record.tensors, dtype
        )
        native.check_fit(call, type(self).__name__, tensors, fits, dtype)
        head = self._built(config)
        refuse_unreadable(self, call, head)
        skeleton = self._own_tensors(head)
        if dtype is not None:
            for tensor in skeleton.values():
                tensor.data = tensor.data.to(dtype)
        native.fill(head, tensors)
        if dtype is None:
            head.of_checkpoint = FIELD in record.document
        return lambda: self._shelve(checked, head, set_active)

    def _built(self, config: HeadConfig, device: torch.device | None = None) -> PredictionHead:
        """A fresh head, tied where the model's are; None: on the model's device."""
        backbone = describe(self)
        if device is not None:
            backbone = dataclasses.replace(backbone, device=device)
        # initial values are overwritten: do not disturb the caller's random numbers
        with torch.random.fork_rng(devices=()):
            head = config.build(backbone)
        self._tie(head)
        return head
