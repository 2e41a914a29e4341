"""Named heads: the strategy of the models that `AutoAdapterModel` makes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from adapterzoo.composition import ActiveHeads, Composition, heads_of_rows, parts_of
from adapterzoo.errors import StateError, listing
from adapterzoo.formats import fit
from adapterzoo.heads import IGNORED, STATIC, PredictionHead, StaticConfig, labels_from
from adapterzoo.inject.building import plain_modules
from adapterzoo.model.hf.backbone import refuse_unreadable
from adapterzoo.model.hf.hosts import gives_loss
from adapterzoo.model.hf.info import ModelInfo
from adapterzoo.model.hf.task_heads import MODEL_CONFIG, other_fields, saved_fields

from . import store, tables
from .interface import HeadNames, HeadRecord, HeadStrategy, LoadOptions
from .output_layers import FIELD, OUTPUT_KEY, output_like, with_output, without_output
from .plain import as_plain, head_to_keep


class NamedHeads(HeadStrategy):
    """The strategy of a model whose heads have names."""

    is_named = True

    # --- find and activate ---

    def names(self) -> tuple[str, ...]:
        """Return the names of the heads."""
        return tuple(self.model.heads)

    def for_setup(
        self, setup: Composition | None, wanted: HeadNames, active: ActiveHeads
    ) -> ActiveHeads:
        """Return the wanted heads, those named like the last adapters, or the active ones."""
        if wanted is not None:
            return store.checked(self.model, wanted)
        if setup is None:
            return active
        parts, rows = parts_of(setup)
        names = store.heads_of_parts(self.model, parts, active.names)
        return active if names is active.names else heads_of_rows(names, rows)

    def for_rows(
        self, parts: tuple[Any, ...], one_head: bool
    ) -> tuple[ActiveHeads, tuple[str, ...]]:
        """Return the head of each part's adapter, or the active one for parts without a head.

        Raises:
            StateError: a part has no head of its own, and several are active.
        """
        active = self.model._active.default.plan.heads
        own = store.own_heads(self.model, parts)
        if None in own and any(own) and len(active.names) != 1 and not one_head:
            raise StateError(
                f"adapter_names=…: {parts[own.index(None)]!r} has no head of its name, and the "
                f"active heads are {listing(active.names)}, not one for such rows. Write "
                f"model.active_head = {next(filter(None, own))!r}, or head=… for all rows."
            )
        if not any(own):
            return active, ()
        names = store.heads_of_parts(self.model, parts, active.names)
        return ActiveHeads(names), names

    def activated(self) -> None:
        """Write the labels of the active head to the config."""
        store.show_labels(self.model)

    def chosen(self, heads: HeadNames = None) -> ActiveHeads:
        """Return the heads of a call, checked; None: the active ones."""
        return store.checked(self.model, heads) if heads else self.model._active.heads

    def active_heads(self, names: HeadNames = None) -> dict[str, PredictionHead]:
        """Return the heads of these names; None: the active ones."""
        return {name: store.find(self.model, name) for name in self.chosen(names).names}

    def check_generation(self, given: Mapping[str, Any]) -> None:
        """Check that a head is active.

        Raises:
            StateError: none is.
        """
        if not (given.get("head") or self.model._active.heads.names):
            raise StateError(
                f"generate(): no head is active, so nothing scores the next token. Heads: "
                f"{listing(self.model.heads)}. Write add_causal_lm_head('my_task'), on an "
                f"encoder–decoder add_seq2seq_lm_head('my_task'), or model.active_head = 'my_task'."
            )

    # --- adapters and fusions that are added, moved or removed ---

    def modules_with(self, name: str) -> Iterable[nn.Module]:
        """Return the head of the adapter's name."""
        return [self.model.heads[name]] if name in self.model.heads else []

    def installed(self, name: str) -> None:
        """Let the head of the adapter's name share its table."""
        head = self.model.heads._modules.get(name)
        if head is None or tables.table_of(self.model, name) is None:
            return
        # a head whose layer was replaced has one of its own
        if store.is_on(head, self.model.get_input_embeddings().weight):
            store.tie(self.model, head, name)

    def removing(self, owner: str) -> None:
        """Let the head of the adapter's name share the base model's table again."""
        head, table = self.model.heads._modules.get(owner), tables.table_of(self.model, owner)
        if table is not None and store.is_on(head, table):
            store.tie(self.model, head)

    def ties(self) -> dict[str, str]:
        """Return the keys of the heads' parameters that are the base model's or an adapter's."""
        names, found = tables.shared_with_heads(self.model), {}
        for name, head in self.model.heads.items():
            for path, module in plain_modules(head, f"heads.{name}"):
                for own, parameter in module._parameters.items():
                    key = f"{path}.{own}"
                    source = key if parameter is None else names.setdefault(id(parameter), key)
                    if source != key:
                        found[key] = source
        return found

    # --- train, merge ---

    def train(self, train_embeddings: bool) -> None:
        """Train the active heads; their output layers only where asked for."""
        backbone = {id(p) for p in self.model._backbone.parameters()}
        active = self.model._active.default.plan.heads.names
        for name, head in self.model.heads.items():
            for parameter in head.parameters():
                if id(parameter) not in backbone:
                    parameter.requires_grad_(name in active)
            layer = head.output_embeddings
            if layer is not None and not train_embeddings:
                layer.requires_grad_(False)

    def missing_loss(self) -> str | None:
        """Return a hint where no head is active."""
        if self.model._active.heads.names or gives_loss(self.model.backbone_class):
            return None
        return (
            f"; there are {listing(self.model.heads)}. Write add_classification_head('my_task') "
            f"and train_adapter(…) after it, or model.active_head = 'my_task'."
        )

    def counted_labels(self, batch: Mapping[str, Any]) -> Tensor | None:
        """Return the labels of the active heads, if all have the same count."""
        prefix = "decoder_" if self.model.config.is_encoder_decoder else ""
        mask = batch.get(f"{prefix}attention_mask")
        found = []
        for name, head in self.active_heads().items():
            labels = head.config.find_labels(name, batch)
            if labels is None or len(head.config.label_names) > 1:
                return None
            found.append(head.config.shift(head.config.mask_labels(labels, mask)))
        counts = {int((labels != IGNORED).sum()) for labels in found}
        return found[0] if len(counts) == 1 else None

    def plain_class(self) -> type[nn.Module] | None:
        """Return the class of the base model."""
        return cast("type[nn.Module] | None", getattr(type(self.model), "backbone_class", None))

    def unloaded(self, change: Callable[[Any], None], architecture: str | None) -> Any:
        """Return a new model of a class of transformers; this one stays as it is."""
        twin = copy.deepcopy(self.model)
        change(twin)
        # shared weights may have been given to each layer
        return as_plain(twin, *head_to_keep(twin, architecture))

    # --- files ---

    def name_with(self, adapter: str) -> str | None:
        """Return the head of the adapter's name, or the only active one, if no other owns it."""
        if adapter in self.model.heads:
            return adapter
        active, state = self.model._active.heads.names, self.model._adapter_state
        owned = any(name in state.records or name in state.fusions for name in active)
        return active[0] if len(active) == 1 and not owned else None

    def active_name(self) -> str | None:
        """Return the name of the one head that is active."""
        return store.active_name(self.model)

    def record(
        self, name: str | None, alone: bool = False, short: bool = False
    ) -> HeadRecord | None:
        """Return config and own tensors of a head.

        Alone, a table that it shares with its adapter is its own; short, the record lacks an output
        layer that the base model's checkpoint brought.
        """
        if name is None:
            return None
        head = store.find(self.model, name)
        config, table = head.config, tables.table_of(self.model, name) if alone else None
        if table is not None and store.is_on(head, table):
            config = config.replace(tie_word_embeddings=False)
        tensors = store.own_tensors(self.model, head, table)
        document: dict[str, Any] = {"config": config.to_dict()}
        if isinstance(config, StaticConfig):
            document[MODEL_CONFIG] = saved_fields(self.model.config, config)
        record = HeadRecord(document, tensors)
        return without_output(head, record) if short else record

    def completed(
        self, name: str, document: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        """Return the tensors of a file, with the output layer of the head.

        Raises:
            CheckpointError: the head has another config.
        """
        saved = store.config_from(self.model, document["config"])
        head = store.find(self.model, name)
        fit.check_same(f"head {name!r}", saved, head.config)
        return with_output(head, self.model.heads.values(), document, tensors)

    def fitting(
        self, record: HeadRecord, name: str | None, asked: LoadOptions
    ) -> Callable[[], None]:
        """Check a head of a checkpoint; return a function that puts it into the model.

        Raises:
            CheckpointError: it does not fit.
        """
        if not isinstance(record.document.get("config"), Mapping):
            record = self._translated(record)
        config = store.config_from(self.model, record.document["config"])
        saved = record.document.get(MODEL_CONFIG)
        if isinstance(config, StaticConfig) and isinstance(saved, Mapping):
            config = config.replace(fields=other_fields(self.model.config, saved) or None)
        if asked.id2label is not None:
            config = config.replace(label2id=labels_from(asked.id2label))
        checked = store.free_name(self.model, name, bool(asked.overwrite_ok))
        refuse_unreadable(self.model)
        # an untrusted config may ask for more memory than there is: compare before allocating
        empty = store.built(self.model, config, torch.device("meta"))
        heads = self.model.heads.values()
        tensors = with_output(empty, heads, record.document, record.tensors, asked.dtype)
        fits = store.own_tensors(self.model, empty)
        fit.check_fit(type(self.model).__name__, fit.converted(tensors, fits), fits, None)
        head = store.built(self.model, config)
        refuse_unreadable(self.model, head)
        if asked.dtype is not None:
            for tensor in store.own_tensors(self.model, head).values():
                tensor.data = tensor.data.to(asked.dtype)
        fit.fill(head, tensors)
        if asked.dtype is None:
            head.of_checkpoint = FIELD in record.document
        return lambda: store.enter(self.model, checked, head, asked.set_active)

    def _translated(self, record: HeadRecord) -> HeadRecord:
        """Return the head of a task class as a named one.

        Raises:
            CheckpointError: it cannot be one.
        """
        document, tensors = record.document, dict(record.tensors)
        if (key := document.get(OUTPUT_KEY)) is not None:
            tensors[key] = output_like(self.model.heads.values(), document[FIELD])
        given = document.get("label2id")
        saved = document.get(MODEL_CONFIG)
        named = ModelInfo(self.model).from_static(
            str(document.get(STATIC)),
            tensors,
            given if isinstance(given, Mapping) else None,
            saved if isinstance(saved, Mapping) else None,
        )
        return HeadRecord(*named)

    def all_tensors(self) -> dict[str, Tensor]:
        """Return the own tensors of all heads."""
        return {
            f"head {name}: {key}": tensor
            for name, head in self.model.heads.items()
            for key, tensor in store.own_tensors(self.model, head).items()
        }
