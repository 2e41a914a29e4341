"""The shelf of named heads: look, activate, add, delete, and share embeddings with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, cast

from torch import nn

from adapterzoo.composition import Composition, has_rows, last_adapter, numbered, rows_of
from adapterzoo.errors import ConfigError, DuplicateNameError, StateError, listing, unknown_name
from adapterzoo.heads import HeadConfig, PredictionHead, head_types
from adapterzoo.inject import AdapterDict
from adapterzoo.names import check_name
from adapterzoo.runtime import Plan

from .add_heads import AddHeadsMixin
from .batching import refuse_while_batching
from .hf.backbone import ties_output
from .hf.towers import fresh_head
from .output_layers import start_with
from .row_heads import refuse_composed
from .sharding import refuse_if_sharded
from .tied_heads import TiedHeadsMixin


class ShelfMixin(AddHeadsMixin, TiedHeadsMixin):
    """Named heads of a model, and which of them answer.

    Attributes:
        heads: the heads by name.
        custom_heads: head types that were registered for this model alone.
    """

    heads: AdapterDict
    custom_heads: dict[str, type[HeadConfig]]
    config: Any

    def _start_heads(self) -> None:
        """Called once, when the base model is there: makes the heads that the config lists."""
        self.heads = AdapterDict()
        self.custom_heads = {}
        listed = getattr(self.config, "prediction_heads", None) or {}
        self.config.prediction_heads = {}
        document = vars(self.config).get("adapters")
        ours = document if isinstance(document, Mapping) and "heads" in document else {}
        # transformers sorts the keys of objects: what `save_pretrained` here wrote has the order
        order = [name for name in ours.get("known_heads", ()) if name in listed]
        for name in dict.fromkeys([*order, *listed]):
            # which head is active is in our document, and its labels are in the config already
            self.add_prediction_head_from_config(name, listed[name], set_active=not ours)

    # --- what there is ---

    def known_heads(self) -> tuple[str, ...]:
        """The names of the heads."""
        return tuple(self.heads)

    def get_head(self, head_name: str) -> PredictionHead:
        """The head of this name.

        Raises:
            UnknownNameError: there is none.
        """
        return self._find_head(head_name, f"get_head({head_name!r})")

    def get_prediction_heads_config(self) -> dict[str, dict[str, Any]]:
        """Names of the heads to the dicts of their configs."""
        return {name: self.get_head(name).config.to_dict() for name in self.heads}

    def get_labels_dict(self, head_name: str | None = None) -> dict[int, str] | None:
        """Class numbers to their names; None where a head has no classes.

        Args:
            head_name: which head; None for the active one.

        Raises:
            UnknownNameError: there is no head of this name.
            StateError: it cannot be told which head is meant.
        """
        name = head_name or self._active_head_name("get_labels_dict()")
        return self._find_head(name, f"get_labels_dict({name!r})").config.id2label

    def get_labels(self, head_name: str | None = None) -> list[str] | None:
        """The names of the classes; arguments and errors as of `get_labels_dict`."""
        labels = self.get_labels_dict(head_name)
        return None if labels is None else list(labels.values())

    def _find_head(self, name: object, call: str) -> PredictionHead:
        if not isinstance(name, str) or name not in self.heads:
            raise unknown_name(call, "head", name, self.heads)
        return cast("PredictionHead", self.heads[name])

    # --- which answers ---

    @property
    def active_head(self) -> str | list[str] | None:
        """The head that answers, a list when several do, None when none does.

        As many heads as an active `BatchSplit` or `Parallel` has parts answer one part each.

        Raises:
            CompositionError: on setting, it is a composition, which only adapters have.
            UnknownNameError: on setting, there is no head of this name.
        """
        names = self._current_heads()
        if len(names) < 2:
            return names[0] if names else None
        return list(names)

    @active_head.setter
    def active_head(self, head_name_or_list: str | list[str] | None) -> None:
        names = self._names(head_name_or_list, f"active_head = {head_name_or_list!r}")
        refuse_while_batching(self, f"active_head = {head_name_or_list!r}")
        default = self._active.default
        default.plan = dataclasses.replace(default.plan, heads=names)
        self._show_labels(names)

    def set_active_adapters(self, adapter_setup: object, skip_layers: Any = None) -> None:
        """Choose the adapters of all threads, and with them the head of the same name, if any.

        Args:
            adapter_setup: a name, a list of names (a `Stack`), a composition, or None.
            skip_layers: numbers of blocks in which no adapter acts (AdapterDrop).

        Raises:
            CompositionError: it is no composition, or does not fit where the adapters sit.
            ConfigError: the model has no block of a number in `skip_layers`.
            StateError: there are no layers of a fusion, or it does not fit what is merged.
            UnknownNameError: there is no adapter of this name.
        """
        super().set_active_adapters(adapter_setup, skip_layers)
        self._show_labels(self._active.default.plan.heads)

    def _current_heads(self) -> tuple[str, ...]:
        return self._active.heads

    def _heads_for(
        self, setup: Composition | None, head_setup: str | list[str] | None
    ) -> tuple[str, ...]:
        if head_setup is not None:
            return self._names(head_setup, f"head_setup={head_setup!r}")
        return self._heads_named(setup, self._current_heads())

    def _heads_named(
        self, setup: Composition | None, otherwise: tuple[str, ...]
    ) -> tuple[str, ...]:
        if setup is None:
            return otherwise
        parts = numbered(rows_of(setup)[0])[0] if has_rows(setup) else (setup,)
        return self._heads_of_parts(parts, otherwise)

    def _heads_of_parts(
        self, parts: tuple[Any, ...], otherwise: tuple[str, ...]
    ) -> tuple[str, ...]:
        own = self._own_heads(parts)
        if all(name is None for name in own):
            return otherwise
        if len(parts) > 1 and None in own:
            if len(otherwise) != 1:
                return otherwise
            own = [otherwise[0] if name is None else name for name in own]
        names = tuple(name for name in own if name is not None)
        return names[:1] if len(set(names)) == 1 else names

    def _own_heads(self, parts: tuple[Any, ...]) -> list[str | None]:
        names = map(last_adapter, parts)
        return [name if name is not None and name in self.heads else None for name in names]

    def _names(self, setup: str | list[str] | None, call: str) -> tuple[str, ...]:
        if setup is None:
            return ()
        refuse_composed(setup, call)
        one = isinstance(setup, str) or not isinstance(setup, Iterable)
        given = cast("Iterable[str]", (setup,) if one else setup)
        names = tuple(name for name in given if name != "")
        for name in names:
            self._find_head(name, call)
        return names

    def _show_labels(self, names: tuple[str, ...]) -> None:
        # pipelines and Trainer read the labels from the config
        if len(names) != 1:
            return
        head = self.get_head(names[0]).config
        self.config.problem_type = head.problem_type
        if labels := head.id2label:
            self.config.id2label = labels
            self.config.label2id = {label: number for number, label in labels.items()}

    def _active_head_name(self, call: str) -> str | None:
        names = self._current_heads()
        if len(names) == 1:
            return names[0]
        raise StateError(
            f"{call}: {len(names)} heads are active, so it cannot be told which is meant. "
            f"Write its name; heads: {listing(self.heads)}."
        )

    # --- add and delete ---

    def add_prediction_head_from_config(
        self,
        head_name: str,
        config: Mapping[str, Any] | HeadConfig,
        overwrite_ok: bool = False,
        set_active: bool = True,
    ) -> None:
        """Add a head by the dict of its config, as `head_config.json` of AdapterHub holds it.

        Args:
            head_name: how it is called.
            config: the dict, with its `head_type`; or a config.
            overwrite_ok: whether a head of that name may be replaced.
            set_active: whether it becomes the active head.

        Raises:
            ConfigError: a value, a field or the name is not legal.
            DuplicateNameError: the name is taken.
            UnknownNameError: there is no such head type.
        """
        call = "add_prediction_head_from_config"
        if not isinstance(config, HeadConfig):
            config = self._config_from(config, call)
        self._add_head(call, head_name, config, overwrite_ok, set_active)

    def register_custom_head(self, head_type: str, cls: Any) -> None:
        """Let this model have heads of a type of your own.

        Args:
            head_type: name of the type in configs, `cls.head_type`.
            cls: a frozen keyword-only dataclass whose `build` makes the head. Enter it in
                `adapterzoo.heads.head_types` instead to have it on all models.

        Raises:
            ConfigError: it is no config class, or has another `head_type`.
        """
        if not (isinstance(cls, type) and issubclass(cls, HeadConfig)):
            raise ConfigError(
                f"register_custom_head({head_type!r}, {cls!r}): a head type is registered by its "
                f"config class. Derive one from adapterzoo.heads.HeadConfig whose build(backbone) "
                f"makes the head, an adapterzoo.heads.PredictionHead."
            )
        if cls.head_type != head_type:
            raise ConfigError(
                f"register_custom_head({head_type!r}): {cls.__name__}.head_type is "
                f"{cls.head_type!r}, the name in files. Write "
                f"register_custom_head({cls.head_type!r}, {cls.__name__})."
            )
        self.custom_heads[head_type] = cls

    def add_custom_head(
        self,
        head_type: str,
        head_name: str,
        overwrite_ok: bool = False,
        set_active: bool = True,
        **kwargs: Any,
    ) -> None:
        """Add a head of a registered type.

        Args:
            head_type: as it was registered.
            head_name: how it is called.
            overwrite_ok: whether a head of that name may be replaced.
            set_active: whether it becomes the active head.
            **kwargs: fields of its config.

        Raises:
            ConfigError: a value, a field or the name is not legal.
            DuplicateNameError: the name is taken.
            UnknownNameError: there is no such head type.
        """
        call = f"add_custom_head({head_type!r})"
        config = self._config_from({"head_type": head_type, **kwargs}, call)
        self._add_head("add_custom_head", head_name, config, overwrite_ok, set_active)

    def delete_head(self, head_name: str) -> None:
        """Delete a head; if it was active it is so no more.

        Raises:
            UnknownNameError: there is no head of this name.
            StateError: the model is sharded.
        """
        call = f"delete_head({head_name!r})"
        self._find_head(head_name, call)
        refuse_if_sharded(self, call, "Write model.active_head = None.")
        del self.heads[head_name]
        kept = {n: c for n, c in self.config.prediction_heads.items() if n != head_name}
        self.config.prediction_heads = kept
        selection = self._active
        selection.default.plan = _without(selection.default.plan, head_name)
        selection.change_overrides(lambda plan: _without(plan, head_name))
        self._list_tied()

    def _config_from(self, values: Mapping[str, Any], call: str) -> HeadConfig:
        if not isinstance(values, Mapping):
            raise ConfigError(
                f"{call}: the config of a head is a dict or a HeadConfig, not {values!r}. "
                f"Write {{'head_type': 'classification', 'num_labels': 2}}."
            )
        head_type = str(values.get("head_type"))
        cls = self.custom_heads.get(head_type)
        return (cls or head_types.find(head_type)).from_dict(values)

    def _add_head(
        self,
        call: str,
        name: object,
        config: HeadConfig,
        overwrite_ok: bool = False,
        set_active: bool = True,
    ) -> None:
        checked = self._free_head_name(call, name, overwrite_ok)
        head = fresh_head(self, f"{call}({checked!r})", config)
        if not ties_output(self.config, head.config):
            start_with(head, map(self.get_head, self.heads))
        self._shelve(checked, head, set_active)

    def _free_head_name(self, call: str, name: object, overwrite_ok: bool) -> str:
        checked = check_name(call, name)
        refuse_if_sharded(self, f"{call}({checked!r})", "Add it before fully_shard(model).")
        if checked in self.heads and not overwrite_ok:
            raise DuplicateNameError(
                f"{call}({checked!r}): there is a head of this name. Write another name, or "
                f"overwrite_ok=True to replace it."
            )
        return checked

    def _shelve(self, name: str, head: PredictionHead, set_active: bool) -> None:
        self.heads[name] = head.train(cast("nn.Module", self).training)
        listed = {**self.config.prediction_heads, name: head.config.to_dict()}
        self.config.prediction_heads = listed
        self._tie(head, name)
        self._list_tied()
        if set_active:
            self.active_head = name
        elif name in (active := self._active.default.plan.heads):
            # it has replaced one that answers
            self._show_labels(active)

    # --- language models ---

    @property
    def loss_type(self) -> str | None:
        """Name of the loss in transformers where the labels move by one token, else None.

        Trainer counts the labels of accumulated batches by it.
        """
        types = (self.get_head(name).config.loss_type for name in self._current_heads())
        return next((name for name in types if name is not None), None)

    @loss_type.setter
    def loss_type(self, value: str | None) -> None:
        """Ignore the one that transformers sets by the class's name; the heads say better."""

    def get_output_embeddings(self) -> nn.Module | None:
        """The last layer of the first active language modelling head, None without one."""
        for name in self._current_heads():
            if (layer := self.get_head(name).output_embeddings) is not None:
                return layer
        return None

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        """Replace the last layer of the first active language modelling head.

        Raises:
            ConfigError: it is no linear layer.
        """
        heads = map(self.get_head, self._current_heads())
        head = next((head for head in heads if head.output_embeddings is not None), None)
        if head is not None:
            head.replace_output(new_embeddings)
            self._list_tied()


def _without(plan: Plan, head_name: str) -> Plan:
    return dataclasses.replace(plan, heads=tuple(n for n in plan.heads if n != head_name))
