"""Plain models of transformers out of models with named heads."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from adapterzoo.checkpoint.stored import Stored
from adapterzoo.errors import CheckpointError, StateError, listing

from .hf.info import facts_of
from .hf.task_classes import class_for, task_class, with_labels
from .shelf import ShelfMixin


class UnloadingHeadsMixin(ShelfMixin):
    """`merge_and_unload` and `unload` of models with named heads."""

    def merge_and_unload(
        self,
        adapter_names: Sequence[str] | None = None,
        safe_merge: bool = True,
        *,
        architecture: str | None = None,
    ) -> Any:
        """Merge adapters and give a plain model: a new one, of a class of transformers.

        It has the active head as its own, `BertForSequenceClassification` for a classification
        head; the class is that of the base model's checkpoint where it has such a head. Without
        an active head it is the base model alone. `save_pretrained` writes what transformers
        loads alone, with the same outputs. This model stays as it is.

        Args:
            adapter_names: which ones, in the order in which they act; None: the active ones.
                Those that are merged already stay so.
            safe_merge: PEFT's switch; weights that are not finite are refused in any case.
            architecture: name of the class, where there are several or none is found.

        Raises:
            CheckpointError: transformers has no class with such a head, or not the one asked for.
            CompositionError: `adapter_names` are no names.
            ConfigError: transformers has no class of the name.
            StateError: nothing is active, the active composition is no stack, an adapter is no
                change of a weight, several heads are active, or as `merge_adapter`.
            UnknownNameError: there is no adapter of a name.
        """
        call = "merge_and_unload()"
        self._refuse_unloading(call)
        names = self._to_merge(adapter_names, call)
        head = self._head_to_keep(call, architecture)
        # the weights of this model stay what they are
        twin = copy.deepcopy(self)
        twin._merge(names, call)
        return twin._as_plain(call, *head)

    def unload(self, *, architecture: str | None = None) -> Any:
        """Give a plain model without adapters: a new one, see `merge_and_unload`.

        Args:
            architecture: name of the class, where there are several or none is found.

        Raises:
            CheckpointError: transformers has no class with such a head, or not the one asked for.
            ConfigError: transformers has no class of the name.
            StateError: several heads are active, an `AdapterSetup` of this thread holds, the
                model is sharded, or merged weights came from a file.
        """
        call = "unload()"
        self._refuse_unloading(call)
        head = self._head_to_keep(call, architecture)
        twin = copy.deepcopy(self)
        twin.reset_adapter()
        return twin._as_plain(call, *head)

    def _class_alone(self) -> type[nn.Module] | None:
        return cast("Any", self).backbone_class if "backbone_class" in dir(type(self)) else None

    def _head_to_keep(
        self, call: str, architecture: str | None
    ) -> tuple[str | None, str | None, Mapping[str, Tensor]]:
        """Name of the active head, of the class that has such a one, and its tensors by key there.

        All of them are empty for the base model alone.
        """
        names = self._active.default.plan.heads
        if len(names) > 1:
            raise StateError(
                f"{call}: the heads {listing(names)} are active, and a plain model has one. Write "
                f"model.active_head = {names[0]!r}, or None for the base model alone."
            )
        if not names:
            if architecture is not None:
                raise StateError(
                    f"{call}: no head is active that could be that of a {architecture}. Write "
                    f"model.active_head = '…'; heads: {listing(self.heads)}."
                )
            return None, None, {}
        record = cast("Any", self)._head_record(names[0])
        stored = Stored({"head": record.document}, {}, record.tensors)
        facts = facts_of(self, call)
        try:
            if architecture is not None:
                task_class(call, architecture)
                tensors = facts.to_static(architecture, record.document, record.tensors)
                return names[0], architecture, tensors
            own = next(iter(self.config.architectures or ()), None)
            return names[0], *class_for(stored, facts, own)
        except CheckpointError as error:
            # what it says of files is not what a user can write here
            reason = str(error).replace(" Write with_head=False.", "")
            raise CheckpointError(
                f"{reason} Write architecture='…' with a class that has such a head, or "
                f"model.active_head = None for the base model alone."
            ) from error

    def _as_plain(
        self, call: str, head: str | None, name: str | None, tensors: Mapping[str, Tensor]
    ) -> Any:
        """A plain model that takes over this one's weights.

        Args:
            call: what the user wrote, for messages.
            head: name of the head that it has; None: it has none.
            name: of its class; None: the base model's.
            tensors: of the head, by key in that class.

        Raises:
            CheckpointError: the class has tensors that are not here.
        """
        cls: Any = self._class_alone() if name is None else task_class(call, name)
        config = copy.deepcopy(self.config)
        del config.prediction_heads
        if head is not None:
            config = with_labels(config, self.get_head(head).config)
        self._take_all()
        with torch.device("meta"):
            empty = cls(config)
        inner = empty.base_model
        prefix = "" if inner is empty else f"{empty.base_model_prefix}."
        keys = empty.state_dict().keys()
        own = {f"{prefix}{key}": t for key, t in self._backbone.state_dict().items()}
        # those of the head are the first model's own
        heads = {key: t.detach().clone() for key, t in tensors.items()}
        state = {key: t for key, t in {**own, **heads}.items() if key in keys}
        model: Any = self
        plain, info = cls.from_pretrained(
            None, config=config, state_dict=state, dtype=model.dtype, output_loading_info=True,
            attn_implementation=config._attn_implementation,
        )  # fmt: skip
        if missing := sorted(info["missing_keys"]):
            raise CheckpointError(
                f"{call}: a {cls.__name__} has {listing(missing)}, which this model has not. Write "
                f"architecture='…' with another class, or model.active_head = None."
            )
        plain.config.name_or_path = self.config.name_or_path
        if plain.can_generate():
            plain.generation_config = copy.deepcopy(model.generation_config)
        return plain.to(model.device).train(model.training)
