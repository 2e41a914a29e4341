"""A model and its checkpoints: what formats know of the model, and what they say about it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import conversion_mapping
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key

from adapterzoo.anatomy import HEAD, Anatomy, in_whole
from adapterzoo.config import AdapterConfig
from adapterzoo.errors import (
    CheckpointError,
    ConfigError,
    UnknownNameError,
    argument,
    listing,
)
from adapterzoo.formats.fit import same_values
from adapterzoo.heads import HeadConfig, InexpressibleError, StaticConfig, StaticHead
from adapterzoo.inject.building import layer_at, plain_modules
from adapterzoo.model.heads import copies, named
from adapterzoo.model.sharding import class_name, split_over
from adapterzoo.model.state import AdaptedModel, base_prefix, config_of, dtype_of, heads_of
from adapterzoo.tensor_parallel import is_part, whole_tensor

from . import task_classes
from .backbone import describe


def name_of(model: Any) -> str | None:
    """Return the name or path that a model was loaded from; None if it was not."""
    return getattr(config_of(model), "_name_or_path", "") or None


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {key: tuple(tensor.shape) for key, tensor in tensors.items()}


class ModelInfo:
    """A model as the formats of checkpoints see it: its names, tensors, modules and heads.

    Attributes:
        anatomy: of the base model; its paths are those of `Checkpoint.adapter`.
        prefix: of the base model's keys in the whole model, such as "bert"; empty when the model
            has no base model below it.
        model_type: as in its config.
        model_class: name of its class.
        model_name: the name or path that it was loaded from.
        named_heads: whether it has heads by name, or one static head.
        with_head: whether the user wants the head too; without it formats need not look at one.
        dtype: of its parameters.
        config: the dict of the model's config, with that of the text part on top.
        split_experts: names that PEFT takes for the former layers of fused experts, wherever they
            are.
        renamed: maps a path or key of the model in older releases of transformers to the present
            one.
    """

    def __init__(self, model: Any, with_head: bool = True) -> None:
        """Keep the model.

        Args:
            model: with adapters.
            with_head: whether the user wants the head too.
        """
        self._model = model
        self._is_split = split_over(model) is not None
        self._gathered: dict[Tensor, Tensor] = {}
        self.anatomy: Anatomy = model.anatomy
        self.prefix = base_prefix(model).removesuffix(".")
        self.model_type: str = config_of(model).model_type
        self.model_class = class_name(model)
        self.model_name = name_of(model)
        self.named_heads: bool = model._has_named_heads
        self.with_head = with_head
        self.dtype: torch.dtype = dtype_of(model)
        layers = split_experts(self.model_type).values()
        self.split_experts = frozenset(name for names in layers for name in names)
        self.renamed = renamer(model)

    def whole(self, path: str) -> str:
        """Return the path in the whole model of a path below the base model."""
        return in_whole(path, f"{self.prefix}." if self.prefix else "")

    @functools.cached_property
    def config(self) -> Mapping[str, Any]:
        """The fields of its config and of that of its text model."""
        fields: dict[str, Any] = {}
        for config in (config_of(self._model), task_classes.text_config(config_of(self._model))):
            # configs of other libraries' classes may have no `to_dict`
            fields |= config.to_dict() if hasattr(config, "to_dict") else vars(config)
        return fields

    @functools.cached_property
    def static_head(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the static head's tensors by key."""
        record = named.record_of(self._model, None)
        return {} if record is None else _shapes(record.tensors)

    @functools.cached_property
    def output(self) -> frozenset[str]:
        """The keys of the output layer of the static head, if it is a language model's."""
        return frozenset(copies.output_tensors(self._model))

    def tensor(self, key: str) -> Tensor | None:
        """Return a parameter or buffer, whole, without merged adapters; None if there is none.

        A collective call if a `tp_plan` has split the model.

        Args:
            key: as in the state dict of the whole model.
        """
        path, _, name = key.rpartition(".")
        merged = self._model._adapter_state.originals
        start = base_prefix(self._model)
        layer = path.removeprefix(start) if path.startswith(start) else f"{HEAD}{path}"
        if name in merged.get(layer, {}):
            return self._gathering(merged[layer][name])
        try:
            module = layer_at(self._model, path)
        except KeyError:
            return None
        own: Tensor | None = module._parameters.get(name)
        found = module._buffers.get(name) if own is None else own
        return None if found is None else self._gathering(found)

    def _gathering(self, tensor: Tensor) -> Tensor:
        # one object for one tensor: formats compare objects to find tied weights
        if self._is_split and is_part(tensor):
            if tensor not in self._gathered:
                self._gathered[tensor] = whole_tensor(tensor)
            return self._gathered[tensor]
        return tensor

    def fused_configs(self, names: Sequence[str]) -> list[AdapterConfig]:
        """Return the configs of the adapters that a fusion takes.

        Raises:
            UnknownNameError: the model lacks one of them.
        """
        records = self._model._adapter_state.records
        if missing := [name for name in names if name not in records]:
            calls = " and ".join(f"model.load_adapter(…, load_as={name!r})" for name in missing)
            raise UnknownNameError(
                f"the fusion takes the adapters {listing(names)}, and the model lacks "
                f"{listing(missing)}. Write {calls} first."
            )
        return [records[name].config for name in names]

    def modules(self, task_class: str) -> Mapping[str, tuple[str, ...]]:
        """Return the paths of all modules of a task class, with the tensors that each saves.

        Args:
            task_class: name of a class of transformers.
        """
        model, cls = self._model, getattr(transformers, task_class, None)
        if not isinstance(model, cls or type(model)):
            model = task_classes.on_meta(cls, config_of(model))
        paths: dict[nn.Module, str] = {}
        for path, module in plain_modules(model):
            paths.setdefault(module, path)
        return {
            path: tuple(name for name, _ in copies.saved_tensors(module))
            for module, path in paths.items()
            if path
        }

    def equal_head(
        self,
        architecture: str,
        tensors: Mapping[str, Tensor],
        label2id: Mapping[str, int] | None,
        pooler: bool,
        fields: Mapping[str, Any] | None = None,
        lenient: bool = False,
    ) -> StaticHead:
        """Return the named head that equals a static head.

        If no other type equals it, the head is of the type "static".

        Args:
            architecture: name of the task class.
            tensors: of its head.
            label2id: the labels.
            pooler: whether the base model has the pooler of the checkpoint.
            fields: of its config, where it differs from that of the model.
            lenient: whether to leave out tensors that the class does not have.

        Raises:
            InexpressibleError: the class does not compute around such a base model, or has other
                tensors.
        """
        shapes, backbone = _shapes(tensors), describe(self._model)
        config = {**self.config, **(fields or {}), "label2id": label2id}
        with contextlib.suppress(InexpressibleError):
            return task_classes.from_static(architecture, shapes, config, backbone, pooler)
        try:
            static = task_classes.static_head(
                self._model, architecture, shapes, label2id, fields or {}
            )
        except ConfigError as error:
            raise InexpressibleError(str(error)) from error
        if more := shapes.keys() - static.keys.keys():
            if not lenient:
                raise InexpressibleError(f"{architecture}: its head has no {listing(sorted(more))}")
            # tensors that the class does not have may have hidden that another type equals it
            known = {key: shapes[key] for key in static.keys}
            with contextlib.suppress(InexpressibleError):
                return task_classes.from_static(architecture, known, config, backbone, pooler)
        return static

    def values_of(
        self, head: StaticHead, tensors: Mapping[str, Tensor]
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return config and own tensors of the named head that equals a static head.

        Args:
            head: from `equal_head`.
            tensors: of the static head.
        """
        named = {mine: tensors[theirs] for theirs, mine in head.keys.items()}
        # a checkpoint may have its own output layer even if the family ties its embeddings
        return self.untied(head.config.to_dict(), named)

    def from_static(
        self,
        architecture: str,
        tensors: Mapping[str, Tensor],
        label2id: Mapping[str, int] | None,
        saved: Mapping[str, Any] | None = None,
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return a static head's tensors as document and tensors of a named head.

        Args:
            architecture: name of the task class.
            tensors: of its head.
            label2id: the labels.
            saved: fields of the config that it had; None: those of the model.

        Raises:
            CheckpointError: no named head equals it.
        """
        fields = task_classes.other_fields(config_of(self._model), saved or {})
        try:
            pooler, whole = self._has_pooler(), self._whole(architecture, tensors)
            head = self.equal_head(architecture, whole, label2id, pooler, fields)
        except InexpressibleError as error:
            raise CheckpointError(
                f"the checkpoint's head has no equivalent among named heads: {error}. Write "
                f"{argument('with_head', False, 'load_adapter')}."
            ) from error
        config, own = self.values_of(head, whole)
        return {"config": config}, own

    def _whole(self, architecture: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return all tensors of a static head of which a file has a part.

        PEFT saves the last layers of a head. The others come from the checkpoint of the model,
        and belong to a head here.

        Raises:
            InexpressibleError: no head has them.
        """
        cls: Any = getattr(transformers, architecture, None)
        if cls is None or not task_classes.is_task(architecture):
            return dict(tensors)
        needed = task_classes.head_tensors(task_classes.on_meta(cls, config_of(self._model)))
        there = {id(t) for key, t in needed.items() if key in tensors}
        lacking = [key for key, t in needed.items() if id(t) not in there]
        if not lacking:
            return dict(tensors)
        found = dict[str, Tensor]()
        for name in heads_of(self._model):
            record = named.of_named(self._model, name)
            for kind in (architecture, *(config_of(self._model).architectures or ())):
                with contextlib.suppress(CheckpointError):
                    whole = self.to_static(kind, record.document, record.tensors)
                    found = {k: t.detach() for k, t in whole.items() if k in lacking} | found
        lost = [k for k in lacking if k not in found or found[k].shape != needed[k].shape]
        if lost:
            raise InexpressibleError(
                f"{architecture}: the file lacks {listing(lost)}, and so do the heads of this model"
            )
        return {**found, **tensors}

    def to_static(
        self, architecture: str, document: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return a named head's tensors as those of a task class.

        Raises:
            CheckpointError: the class has no such head.
        """
        config = HeadConfig.from_dict(document["config"])
        cls: Any = getattr(transformers, architecture, None)
        try:
            if isinstance(config, StaticConfig):
                if config.model_class != architecture:
                    raise InexpressibleError(f"it is that of a {config.model_class}")
                return dict(tensors)
            if cls is None or not task_classes.is_task(architecture):
                raise InexpressibleError(f"transformers has no {architecture}")
            shapes, fields = self._shapes(cls, config), {**self.config, "label2id": config.label2id}
            backbone, pooler = describe(self._model), self._has_pooler()
            static = task_classes.from_static(architecture, shapes, fields, backbone, pooler)
            keys = task_classes.to_static(static, config)
        except InexpressibleError as error:
            raise CheckpointError(
                f"the head, a {config.head_type!r}, cannot be that of a "
                f"{architecture}: {error}. Write {argument('with_head', False)}."
            ) from error
        if rest := sorted(set(tensors) - set(keys.values())):
            raise CheckpointError(
                f"the head has {listing(rest)}, and a {architecture} takes these "
                f"from its embeddings. Write {argument('with_head', False)}."
            )
        return {theirs: tensors[mine] for theirs, mine in keys.items() if mine in tensors}

    def tied(self, document: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return what a head shares with the base model, whole, by the names in the head."""
        values = document.get("config")
        if not isinstance(values, Mapping):
            return {}
        config = named.config_from(self._model, values)
        head = named.built(self._model, config, torch.device("meta"))
        return {
            key: self._gathering(tensor).detach()
            for key, tensor in head.state_dict(keep_vars=True).items()
            if not tensor.is_meta
        }

    def untied(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return config and own tensors of a named head, untied if its output layer differs."""
        tied = self.tied({"config": config})
        own = {
            key: tensor
            for key, tensor in tensors.items()
            if key not in tied or not same_values(tensor, tied[key])
        }
        changed = {"tie_word_embeddings": False} if own.keys() & tied.keys() else {}
        return {**config, **changed}, own

    def _has_pooler(self) -> bool:
        return "pooler" in dict(self._model._backbone.named_children())

    def _shapes(self, cls: Any, config: HeadConfig) -> dict[str, tuple[int, ...]]:
        labels = config.id2label or {0: ""}
        theirs = type(config_of(self._model)).from_dict(
            {**config_of(self._model).to_dict(), "id2label": labels, "label2id": config.label2id}
        )
        if getattr(config, "tie_word_embeddings", None) is not None:
            task_classes.text_config(theirs).tie_word_embeddings = config.get("tie_word_embeddings")
        return _shapes(task_classes.head_tensors(task_classes.on_meta(cls, theirs)))


# --- The layers that experts had before transformers 5 fused them into parameters ---

# types whose checkpoints are converted alike → parameter now → its layers before, row after row
_LAYERS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "mixtral": {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",), "gate.weight": ("gate",)},
    "qwen2_moe": {
        "gate_up_proj": ("gate_proj", "up_proj"),
        "down_proj": ("down_proj",),
        "gate.weight": ("gate",),
    },
}


def split_experts(model_type: str) -> Mapping[str, tuple[str, ...]]:
    """Return the former layers of each parameter, for the types of models where PEFT knows them.

    Args:
        model_type: of the model's config.
    """
    known: Mapping[str, str] = getattr(conversion_mapping, "_MODEL_TO_CONVERSION_PATTERN", {})
    # PEFT looks the type up in the same table, to which it adds Mixtral only
    alike = "mixtral" if model_type == "mixtral" else known.get(model_type, "")
    return _LAYERS.get(alike, MappingProxyType({}))


# --- Names of modules in older releases of transformers ---


def renamer(model: Any) -> Callable[[str], str]:
    """Return a function from names of modules in older releases to the present names.

    It applies the renamings of transformers' loader for old checkpoints of the base model.

    Args:
        model: a `PreTrainedModel`.
    """

    # on first use only: it walks the whole model, and recent adapters do not need it
    @functools.cache
    def renamings() -> list[WeightRenaming]:
        known = get_model_conversion_mapping(model)
        return [renaming for renaming in known if isinstance(renaming, WeightRenaming)]

    def renamed(name: str) -> str:
        # the patterns match keys of tensors: add an end to the path that no pattern matches
        return rename_source_key(f"{name}._", renamings(), [])[0].removesuffix("._")

    return renamed


def provenance(model: AdaptedModel, name: str) -> dict[str, Any]:
    """Return what a checkpoint says about the model.

    Args:
        model: that it is taken from.
        name: of what is saved.
    """
    return {
        "name": name,
        "model_type": config_of(model).model_type,
        "model_class": class_name(model),
        "model_name": name_of(model),
        "hidden_size": getattr(task_classes.text_config(config_of(model)), "hidden_size", None),
    }
