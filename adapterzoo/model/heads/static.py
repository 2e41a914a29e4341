"""The static head of a task class: the original, or the copy that belongs to the last adapter.

An adapter gets its copy when it is trained or loaded with a head. The original is used for adapters
without a copy, and when no adapter is active.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from adapterzoo import inject
from adapterzoo.composition import Composition, SiteStep
from adapterzoo.configs import AdapterConfig
from adapterzoo.errors import CheckpointError, ConfigError, StateError, argument, in_python
from adapterzoo.formats import fit
from adapterzoo.formats.checkpoint import OWN_OUTPUT
from adapterzoo.formats.fit import digest, same_bits
from adapterzoo.heads import STATIC, next_labels
from adapterzoo.model import adapters
from adapterzoo.model.activation import unregister
from adapterzoo.model.hf.hosts import gives_loss
from adapterzoo.model.hf.info import ModelInfo, head_tensors
from adapterzoo.model.hf.owned import disown
from adapterzoo.model.hf.task_heads import MODEL_CONFIG, config_fields
from adapterzoo.model.sharding import class_name, refuse_if_sharded

from . import copies, embeddings, naming
from .interface import HeadRecord, HeadStrategy, LoadOptions
from .output_layers import FIELD, OUTPUT_KEY


class StaticHead(HeadStrategy):
    """The strategy of a model whose head is that of its class."""

    def saved_names(self) -> tuple[str, ...]:
        """Return the names of the adapters and fusions that have a copy."""
        return tuple(self.model._adapter_state.copies)

    def steps(self, parts: Sequence[Any]) -> Mapping[str, SiteStep]:
        """Return the copy that each layer of the head uses."""
        return copies.steps_of(self.model, parts)

    # --- adapters and fusions that are added, moved or removed ---

    def modules_with(self, name: str) -> Iterable[nn.Module]:
        """Return the layers of the adapter's copy."""
        return copies.layers_with(self.model, name).values()

    def without_head(self, config: AdapterConfig) -> tuple[AdapterConfig, bool]:
        """Return the config without names of the head, of which each adapter has its copy."""
        return naming.without_head(self.model, config)

    def output_tensors(self) -> Mapping[str, Tensor]:
        """Return the tensors of the output layer, of which an adapter may have a copy."""
        return copies.output_tensors(self.model)

    def save_output(self, name: str) -> None:
        """Give the adapter a copy of the head with the output layer."""
        copies.put(self.model, name, copies.made(self.model, with_output=True))

    def removing(self, owner: str) -> None:
        """Take out the owner's copy."""
        copies.take(self.model, owner)

    # --- train, merge, average ---

    def check_training(self, setup: Composition) -> None:
        """Check that adapters without a copy can get one."""
        owners = copies.owners_of(setup)
        missing = [o for o in owners if o is not None and o not in self.model._adapter_state.copies]
        if missing and copies.layers_of(self.model):
            refuse_if_sharded(self.model, "Write it before fully_shard(model).")

    def train(self, train_embeddings: bool) -> None:
        """Train the copies of the active adapters; make those that are missing."""
        trained = list(copies.trained(self.model, self.model._active.default.plan.setup))
        backbone = {id(p) for p in self.model._backbone.parameters()}
        for parameter in self.model.parameters():
            if id(parameter) not in backbone:
                parameter.requires_grad_(False)
        for parameter in trained:
            parameter.requires_grad_(True)

    def missing_loss(self) -> str | None:
        """Return a hint where the class takes no labels."""
        if gives_loss(type(self.model)):
            return None
        return ". Write AutoAdapterModel.from_pretrained(…), which has named heads."

    def counted_labels(self, batch: Mapping[str, Any]) -> Tensor | None:
        """Return the labels, shifted to the next token if the class is a causal language model."""
        labels = batch.get("labels")
        if not isinstance(labels, Tensor):
            return None
        causal = class_name(self.model) in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        return next_labels(labels) if causal else labels

    def check_merging(self, names: Sequence[str]) -> None:
        """Check that no tied output layer would change."""
        copies.check_merging(self.model, names)

    def merge(self) -> None:
        """Write the copy of the last merged adapter that has one into the original."""
        copies.merge(self.model)

    def reset(self) -> None:
        """Restore the original bit for bit."""
        copies.reset(self.model)

    def combined(self, names: Sequence[str], weights: Sequence[float]) -> Mapping[str, nn.Module]:
        """Return the average of the adapters' copies."""
        return copies.combined(self.model, names, weights)

    def give(self, name: str, head: Mapping[str, nn.Module]) -> None:
        """Make it the adapter's copy."""
        if head:
            copies.put(self.model, name, head)

    def plain_class(self) -> type[nn.Module] | None:
        """Return the class that `init` found."""
        return type(self.model).__dict__.get("_plain_class")

    def unloaded(self, change: Callable[[Any], None], architecture: str | None) -> Any:
        """Return this object, of its own class again.

        Raises:
            StateError: another class is asked for.
        """
        plain = cast("type[nn.Module]", self.plain_class())
        if architecture is not None:
            raise StateError(
                f"architecture={architecture!r}: a model with a static head becomes the "
                f"{plain.__name__} that it was. Leave architecture out."
            )
        embeddings.check_plain(self.model)
        change(self.model)
        embeddings.keep_active(self.model)
        adapters.remove_all(self.model)
        unregister(self.model)
        disown(self.model)
        del self.model._adapter_state, self.model._active
        inject.set_class(self.model, plain)
        return self.model

    # --- files ---

    def name_with(self, adapter: str) -> str | None:
        """Return the adapter's name, under which its copy is kept."""
        return adapter

    def active_name(self) -> str | None:
        """Return the owner of the active head, even if it has no copy yet; None: the original.

        Raises:
            StateError: different rows use different heads.
        """
        setup = self.model._active.plan.setup
        owners = copies.owners_of(setup)
        if len({o if o in self.model._adapter_state.copies else None for o in owners}) > 1:
            raise StateError(
                f"{setup!r} is active, and its rows use different heads, so the head is "
                f"ambiguous. Write set_active_adapters('a') first."
            )
        return next(iter(owners), None) if len(owners) == 1 else None

    def record(
        self, name: str | None, alone: bool = False, short: bool = False
    ) -> HeadRecord | None:
        """Return a copy, or the original, by its keys in the task class."""
        tensors, layer = copies.tensors_of(self.model, name), self.model.get_output_embeddings()
        rest = {key: t for key, t in head_tensors(self.model).items() if key not in tensors}
        weight = None if layer is None else cast("Tensor", layer.weight)
        large = {key: tensor for key, tensor in rest.items() if tensor is weight}
        if not tensors and not alone and (large or layer is None):
            return None
        if not (tensors or rest or layer is not None):
            return None
        config = self.model.config
        document: dict[str, Any] = {
            STATIC: class_name(self.model),
            "label2id": getattr(config, "label2id", None),
            MODEL_CONFIG: config_fields(config),
        }
        if copies.output_path(self.model) in copies.layers_with(self.model, name):
            document[OWN_OUTPUT] = True
        if large and not alone:
            (key,) = large
            document |= {FIELD: digest(large[key]), OUTPUT_KEY: key}
            rest.pop(key)
        return HeadRecord(document, {**tensors, **rest})

    def fitting(
        self, record: HeadRecord, name: str | None, asked: LoadOptions
    ) -> Callable[[], None]:
        """Check the head of the same class; return a function that makes it a copy.

        Raises:
            CheckpointError: it does not fit.
            ConfigError: there are labels for it.
        """
        if asked.id2label is not None:
            raise ConfigError(
                "id2label names the labels of a named head; this model's static head keeps them "
                "in model.config.id2label. Leave id2label out."
            )
        tensors = record.tensors
        if STATIC not in record.document:
            cls = class_name(self.model)
            tensors = ModelInfo(self.model).to_static(cls, record.document, tensors)
        mine = copies.tensors_of(self.model, None)
        rest = {key: t for key, t in head_tensors(self.model).items() if key not in mine}
        if name is None:
            # the original may get another output layer
            fits = mine | {key: rest[key] for key in rest.keys() & tensors.keys()}
            fit.check_fit(type(self.model).__name__, fit.converted(tensors, fits), fits, None)
            return lambda: fit.fill(self.model, tensors)
        output = copies.output_tensors(self.model)
        # a copy may still have the values of the original
        own_output = bool(record.document.get(OWN_OUTPUT)) or any(
            _differs(output[key], tensors[key]) for key in output if key in tensors
        )
        if own_output:
            mine |= output
            rest = {key: t for key, t in rest.items() if key not in output}
        _refuse_shared({**copies.rest_of(self.model), **rest}, tensors, self.model)
        tensors = {key: t for key, t in tensors.items() if key not in rest or key in mine}
        fit.check_fit(type(self.model).__name__, fit.converted(tensors, mine), mine, None)
        layers = copies.made(self.model, own_output)
        for path, layer in layers.items():
            inside = f"{path}."
            own = {k.removeprefix(inside): t for k, t in tensors.items() if k.startswith(inside)}
            fit.fill(layer, own)
        return lambda: copies.put(self.model, name, layers)

    def restore(self, owners: Iterable[str]) -> None:
        """Make a copy for each owner."""
        for owner in owners:
            copies.put(self.model, owner, copies.made(self.model))

    def all_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of all copies."""
        return {
            f"head of {owner}: {key}": tensor
            for owner in self.model._adapter_state.copies
            for key, tensor in copies.tensors_of(self.model, owner).items()
        }


def _differs(tensor: Tensor, theirs: Tensor) -> bool:
    if tensor.is_meta or theirs.shape != tensor.shape:
        return True
    return not same_bits(theirs.to(tensor.device, tensor.dtype), tensor)


def _refuse_shared(shared: Mapping[str, Tensor], tensors: Mapping[str, Tensor], model: Any) -> None:
    """Refuse a head with other values for tensors that all adapters share."""
    for key, tensor in shared.items():
        if key not in tensors or tensor.is_meta:
            continue
        if _differs(tensor, tensors[key]):
            raise CheckpointError(
                f"{key!r} of the checkpoint's head is not that of this {type(model).__name__}, and "
                f"all adapters share it: it is a tensor of the model itself. Write "
                f"{argument('with_head', False, 'load_adapter')}"
                f"{in_python(', or load_head(…) with no adapter active')}."
            )
