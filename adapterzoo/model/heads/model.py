"""`AdapterModel`: the methods of a model with named heads, and its forward."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils.generic import ModelOutput

from adapterzoo.composition import Composition
from adapterzoo.errors import ConfigError, names_call, names_calls, naming
from adapterzoo.heads import HeadConfig, PredictionHead, add_methods
from adapterzoo.inject.adapted import AdapterDict
from adapterzoo.model import batches
from adapterzoo.model.averaging import average_head
from adapterzoo.model.batches import RowNames, TaskIds
from adapterzoo.model.fusion import recorded
from adapterzoo.model.hf import adapter_folders, config_entry, static_checkpoints
from adapterzoo.model.mixin import AdapterModelMixin

from . import forward, named, store
from .named import HeadNames
from .tables import update_outputs


@names_calls
class AdapterModel(AdapterModelMixin, PreTrainedModel):  # type: ignore[misc]  # same names as PEFT's mixin
    """Base of all classes that `AutoAdapterModel` makes.

    All methods that add a head raise `ConfigError` for an illegal value or name and
    `DuplicateNameError` for a name that is taken; the model is then unchanged.

    Attributes:
        backbone_class: the transformers class of the base model.
        input_names: arguments of the base model's forward, in order.
        heads: the heads by name.
        custom_heads: head types that were registered for this model alone.
    """

    backbone_class: ClassVar[type[PreTrainedModel]]
    input_names: ClassVar[tuple[str, ...]]
    heads: AdapterDict
    custom_heads: dict[str, type[HeadConfig]]

    _has_named_heads = True

    def __init__(self, config: PreTrainedConfig) -> None:
        """Build the base model, and the adapters and heads that the config lists.

        Args:
            config: the config, of which the model has a deep copy.
        """
        # heads and labels are written into it
        super().__init__(copy.deepcopy(config))
        setattr(self, self.base_model_prefix, self.backbone_class(self.config))
        self._start_adapters()
        store.start(self)
        self.post_init()  # type: ignore[no-untyped-call]
        config_entry.restore(self)

    @classmethod
    @adapter_folders.or_adapter
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike[str] | None, *args: Any, **kwargs: Any
    ) -> Any:
        """Load a checkpoint of a base model, a model with a static head, or a model of this class.

        `AutoAdapterModel.from_pretrained` does the same, and finds the class by the config.

        Args:
            pretrained_model_name_or_path: a folder, or a name on the Hub.
            *args: arguments of `PreTrainedModel.from_pretrained`.
            **kwargs: the same by name: `dtype`, `device_map`, `quantization_config`, `revision`, …
        """
        wants_info = kwargs.pop("output_loading_info", False)
        hub = {k: kwargs[k] for k in static_checkpoints.HUB_ARGUMENTS if k in kwargs}
        # with PEFT installed, transformers would load an adapter in the model's folder
        kwargs.setdefault("adapter_kwargs", {"subfolder": "none"})
        model, info = cast("Any", super()).from_pretrained(
            pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs
        )
        info["unexpected_keys"] = vars(model).pop("_unused_keys", info["unexpected_keys"])
        if pretrained_model_name_or_path is not None:
            static_checkpoints.keep_static_head(model, pretrained_model_name_or_path, info, hub)
        static_checkpoints.report_unused(model, info)
        return (model, info) if wants_info else model

    def _adjust_missing_and_unexpected_keys(self, loading_info: Any) -> None:
        """Hide keys that the base model lacks from transformers' report: a head may use them."""
        super()._adjust_missing_and_unexpected_keys(loading_info)
        self._unused_keys, loading_info.unexpected_keys = loading_info.unexpected_keys, set()

    # --- find and activate ---

    def get_head(self, head_name: str) -> PredictionHead:
        """Return the head with this name.

        Raises:
            UnknownNameError: there is none.
        """
        return named.find(self, head_name)

    def get_prediction_heads_config(self) -> dict[str, dict[str, Any]]:
        """Return the dicts of the configs of all heads, by name."""
        return {name: named.find(self, name).config.to_dict() for name in self.heads}

    def get_labels_dict(self, head_name: str | None = None) -> dict[int, str] | None:
        """Return class numbers and names; None if the head has no classes.

        Args:
            head_name: name of the head; None: the active one.

        Raises:
            UnknownNameError: the head is unknown.
            StateError: no head is active, or several are.
        """
        return named.find(self, head_name or named.active_name(self)).config.id2label

    def get_labels(self, head_name: str | None = None) -> list[str] | None:
        """Return the names of the classes; arguments and errors are those of `get_labels_dict`."""
        labels = self.get_labels_dict(head_name)
        return None if labels is None else list(labels.values())

    @property
    def active_head(self) -> str | list[str] | Composition | None:
        """The active head; None without one; a list or a composition of several.

        Heads of a list read the whole batch, or the rows of the adapter in their position. A
        `BatchSplit` divides the batch among heads.

        Raises:
            CompositionError: on setting, it is a composition that heads cannot have.
            UnknownNameError: on setting, the head is unknown.
        """
        return self._active.heads.given

    @active_head.setter
    def active_head(self, head_name_or_list: HeadNames) -> None:
        with naming(lambda: f"active_head = {head_name_or_list!r}"):
            store.activate(self, head_name_or_list)

    # --- add and delete ---

    def add_prediction_head_from_config(
        self,
        head_name: str,
        config: Mapping[str, Any] | HeadConfig,
        overwrite_ok: bool = False,
        set_active: bool = True,
    ) -> None:
        """Add a head from the dict of its config, as in AdapterHub's `head_config.json`.

        Args:
            head_name: name of the head.
            config: the dict, with its `head_type`; or a config.
            overwrite_ok: whether a head of that name may be replaced.
            set_active: whether it becomes the active head.

        Raises:
            ConfigError: a value, a field or the name is not legal.
            DuplicateNameError: the name is taken.
            UnknownNameError: the head type is unknown.
        """
        if not isinstance(config, HeadConfig):
            config = named.config_from(self, config)
        store.add(self, head_name, config, overwrite_ok, set_active)

    def register_custom_head(self, head_type: str, cls: Any) -> None:
        """Register a head type of your own for this model.

        Args:
            head_type: name of the type in configs, `cls.head_type`.
            cls: a frozen keyword-only dataclass whose `build` returns the head. Register it in
                `adapterzoo.heads.head_types` instead to have it on all models.

        Raises:
            ConfigError: it is not a config class, or has another `head_type`.
        """
        is_config = isinstance(cls, type) and issubclass(cls, HeadConfig)
        if not is_config or getattr(cls, "head_type", None) != head_type:
            raise ConfigError(
                f"{cls!r}: derive the config class from adapterzoo.heads.HeadConfig, with "
                f"head_type = {head_type!r}, the name in files."
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
            head_type: name of the registered type.
            head_name: name of the head.
            overwrite_ok: whether a head of that name may be replaced.
            set_active: whether it becomes the active head.
            **kwargs: fields of its config.

        Raises:
            ConfigError: a value, a field or the name is not legal.
            DuplicateNameError: the name is taken.
            UnknownNameError: the head type is unknown.
        """
        config = {"head_type": head_type, **kwargs}
        self.add_prediction_head_from_config(head_name, config, overwrite_ok, set_active)

    def average_head(
        self,
        head_name: str,
        head_list: Sequence[str] | Mapping[str, float],
        weights: Sequence[float] | None = None,
        normalize_weights: bool = True,
        overwrite_ok: bool = False,
        set_active: bool = False,
    ) -> None:
        """Add a head with the parameters Σ wᵢ θᵢ of several others, which do not change.

        Args:
            head_name: name of the new head.
            head_list: names of the heads, or a dict from names to weights.
            weights: one weight for each head, of any sign; None: equal weights with the sum 1.
            normalize_weights: whether to divide the weights by their sum.
            overwrite_ok: whether a head of that name may be replaced, even one in the list.
            set_active: whether the new head becomes the active one.

        Raises:
            CompositionError: the heads differ in more than dropout, or the result is not finite.
            ConfigError: a value is not legal.
            DuplicateNameError: the name is taken.
            StateError: the model is sharded.
            UnknownNameError: a head is unknown.
        """
        average_head(
            self, head_name, head_list, weights, normalize_weights, overwrite_ok, set_active
        )

    def delete_head(self, head_name: str) -> None:
        """Delete a head; no other head becomes active.

        Raises:
            UnknownNameError: the head is unknown.
            StateError: the model is sharded.
        """
        store.delete(self, head_name)

    def forward(
        self,
        *args: Any,
        head: HeadNames = None,
        adapter_names: RowNames | None = None,
        task_ids: TaskIds | None = None,
        output_adapter_gating_scores: bool | None = None,
        output_adapter_fusion_attentions: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the base model, then the active heads.

        Args:
            *args: inputs of the base model by position; `input_ids` `[tokens]` is one row.
            head: the head, heads or composition of heads for this call; None: the active ones.
            adapter_names: the adapter or composition of each row, instead of the active ones; None
                for the base model. A row goes to the head with its adapter's name, if there is one.
            task_ids: with an active `MultiTask`, the task of each row: numbers `[batch]`, or a list
                of numbers or names of its children.
            output_adapter_gating_scores: whether the outputs get `adapter_gating_scores`, the
                values of gates: `{adapter: {block number: {location: [batch]}}}`.
            output_adapter_fusion_attentions: whether the outputs get `adapter_fusion_attentions`:
                `{fusion: {block number: {location: [batch, tokens, adapters]}}}`.
            return_dict: False for tuples.
            **kwargs: inputs of the base model by name, and the labels of the heads.

        Returns:
            The output class of the task; a `MultiHeadOutput` for several heads, or rows with heads
            of different kinds; the base model's own output if none is active.

        Raises:
            CompositionError: the rows do not fit the batch or the heads, or a task is unknown.
            ConfigError: too many inputs by position, or one given by position and by name.
            StateError: `adapter_names` with a merged adapter or inside an `AdapterSetup`.
            UnknownNameError: an adapter is unknown.
        """
        gates, fusions = output_adapter_gating_scores, output_adapter_fusion_attentions
        if gates or fusions:
            run = functools.partial(
                AdapterModel.forward, self, *args, head=head, adapter_names=adapter_names,
                task_ids=task_ids, return_dict=return_dict, **kwargs,
            )  # fmt: skip
            return recorded(self, run, adapter_names, bool(gates), bool(fusions))
        inputs = batches.named_inputs(self.input_names, args, kwargs)
        inputs = batches.with_batch(self.input_names, inputs)
        if adapter_names is None and task_ids is None and not self._active.plan.divides_batch:
            return forward.forward(self, inputs, head, return_dict, 1)
        one_head = head is not None
        plan, times = batches.plan_of_call(self, inputs, adapter_names, task_ids, one_head)
        with self._active.overridden(plan):
            return forward.forward(self, inputs, head, return_dict, times)

    def forward_head(
        self,
        all_outputs: ModelOutput,
        head_name: HeadNames = None,
        attention_mask: Tensor | None = None,
        return_dict: bool | None = True,
        input_ids: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run heads on the outputs of the base model.

        Args:
            all_outputs: the outputs of the base model.
            head_name: the head, heads or composition of heads; None: the active ones.
            attention_mask: `[batch, tokens]`, for the tokens with hidden states.
            return_dict: False for a tuple of loss, if any, logits, and the rest.
            input_ids: `[batch, tokens]`, in which pooling finds padding and ends of sequences.
            logits_to_keep: number of last tokens, or positions, to compute logits for; 0: all.
            num_items_in_batch: the divisor of the sum of losses; None: the number of labels here.
            **kwargs: arguments of heads, or dicts of them by head; `inputs`: those of `forward`.

        Returns:
            The output class of the task; a `MultiHeadOutput` for several heads; `all_outputs`
            when no head is active.

        Raises:
            CompositionError: the heads do not fit the rows.
            ConfigError: the labels do not fit.
            StateError: the base model did not compute what a head needs.
            UnknownNameError: the head is unknown.
        """
        inputs = dict(kwargs, attention_mask=attention_mask, input_ids=input_ids)
        given = dict(inputs, logits_to_keep=logits_to_keep, num_items_in_batch=num_items_in_batch)
        return forward.forward_head(self, all_outputs, head_name, return_dict, given)

    @property  # type: ignore[override]
    def loss_type(self) -> str | None:
        """The name of transformers' loss, by which Trainer counts labels; None if none shift."""
        types = (head.config.loss_type for head in named.heads_by_name(self).values())
        return next((name for name in types if name is not None), None)

    @loss_type.setter
    def loss_type(self, value: str | None) -> None:
        """Ignore the value that transformers derives from the class name: the heads decide."""

    def get_output_embeddings(self) -> nn.Module | None:
        """Return the last layer of the first active language modeling head, None without one."""
        head = self._language_modeling_head()
        return None if head is None else head.output_embeddings

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        """Replace the last layer of the first active language modeling head.

        Raises:
            ConfigError: it is not a linear layer.
        """
        if (head := self._language_modeling_head()) is not None:
            head.replace_output(new_embeddings)
            update_outputs(self)

    def _language_modeling_head(self) -> PredictionHead | None:
        heads = named.heads_by_name(self).values()
        return next((head for head in heads if head.output_embeddings is not None), None)

    def resize_token_embeddings(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> Any:
        """Resize the token embeddings and all language modeling heads, inactive ones too.

        A head whose config sets `vocab_size` keeps it, and no longer shares the table. Differs from
        transformers: inactive heads are resized, and new rows of a head are the exact mean.

        Args:
            new_num_tokens: rows of the embeddings; None: unchanged.
            pad_to_multiple_of: round the number up to a multiple of this.
            mean_resizing: whether new rows are the mean of the old ones; if not, they are random.

        Raises:
            StateError: an adapter adapts the embedding.
        """
        sizes = new_num_tokens, pad_to_multiple_of
        resize = functools.partial(super().resize_token_embeddings, *sizes, mean_resizing)
        return store.resize(self, resize, sizes == (None, None), mean_resizing)


# `add_classification_head` and so on, which are declared with their head types
for _name, _add_head in add_methods.items():
    setattr(AdapterModel, _name, names_call(_add_head))
