"""`AdapterTrainer` and `Seq2SeqAdapterTrainer`: transformers' trainers for adapters and heads.

A checkpoint holds adapters, heads and the training state, but not the base model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Seq2SeqTrainer, Trainer, modeling_outputs
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINING_ARGS_NAME

from . import hosts
from .anatomy import unwrapped
from .composition import fusions_of
from .errors import ConfigError, StateError, listing, naming
from .heads import IGNORED, PredictionHead, next_labels
from .loraplus import EMBEDDING_RATE, set_rates
from .model import sharding, training_checkpoints
from .model.heads import named
from .model.heads.forward import decoder_labels, shift_labels
from .model.mixin import AdapterModelMixin
from .model.report.callback import ReportCallback
from .model.state import own_parameters_of
from .names import one_of

# outputs of base models other than the scores of a head
_OUTPUTS = frozenset(
    field.name
    for cls in vars(modeling_outputs).values()
    if dataclasses.is_dataclass(cls)
    for field in dataclasses.fields(cls)
)


class AdapterTrainer(Trainer):
    """A `Trainer` whose checkpoints hold only adapters and heads.

    ```python
    model.train_adapter("reviews")
    trainer = AdapterTrainer(model, args, train_dataset=train, eval_dataset=test)
    trainer.train()
    ```

    Each adapter is in a sub-folder of its name that `load_adapter` reads, together with the head of
    the same name; any other head is in its own sub-folder, which `load_head` reads. Trained
    parameters of the base model are in a separate file.

    Differs from AdapterHub: resuming and loading the best model fill the existing parameters in
    place, so that an existing optimizer continues to train them; the losses of accumulated
    batches are weighted by their numbers of labels, for models with a static head too.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        args: Any = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        *,
        tokenizer: Any = None,
        processing_class: Any = None,
        model_init: Callable[..., nn.Module] | None = None,
        adapter_names: Any = None,
        loraplus_lr_ratio: float | None = None,
        loraplus_lr_embedding: float = EMBEDDING_RATE,
        report: bool = True,
        **kwargs: Any,
    ) -> None:
        """Check the model and start the `Trainer`.

        Args:
            model: a model with adapters, one of them active.
            args: `TrainingArguments`.
            data_collator: makes a batch from a list of rows.
            train_dataset: rows to train on.
            eval_dataset: rows to evaluate on, or a dict of several data sets.
            tokenizer: AdapterHub's name for `processing_class`.
            processing_class: saved with the adapters.
            model_init: a function that returns the model, instead of `model`.
            adapter_names: the argument for `set_active_adapters`.
            loraplus_lr_ratio: learning rate of LoRA's B divided by that of A (LoRA+); None: 1.
            loraplus_lr_embedding: learning rate of adapters at embeddings; needs a ratio.
            report: whether to print three lines on each adapter before the first step, and to warn
                about blocks and layers that are not trained; see `ReportCallback`.
            **kwargs: other arguments of `Trainer`.

        Raises:
            ConfigError: `tokenizer` and `processing_class` are two different objects, or an
                argument for LoRA+ would have no effect.
            StateError: the model has no adapters, or none is active.
        """
        processing_class = one_of(tokenizer=tokenizer, processing_class=processing_class)
        self._adapter_names = adapter_names
        self._ratio, self._embedding_rate = loraplus_lr_ratio, loraplus_lr_embedding
        if loraplus_lr_ratio is None and loraplus_lr_embedding != EMBEDDING_RATE:
            raise ConfigError("loraplus_lr_embedding needs a ratio. Write loraplus_lr_ratio=16.")
        if loraplus_lr_ratio is not None and any(kwargs.get("optimizers") or ()):
            raise ConfigError(
                "loraplus_lr_ratio and optimizers: write "
                "optimizers=(create_loraplus_optimizer(…), …)."
            )
        self._usual_count: float | None = None
        self._saves_checkpoint = False
        if model is not None:
            self._take(model)
        cast("Any", super()).__init__(
            model, args, data_collator, train_dataset, eval_dataset,
            processing_class=processing_class, model_init=model_init, **kwargs,
        )  # fmt: skip
        if report:
            self.add_callback(ReportCallback)
        # `_counted` shifts the labels
        self._loss_shifts_labels = False
        if self._heads():
            # all named heads take it, even if the model's own forward does not
            self.model_accepts_loss_kwargs = True

    # --- the model ---

    @property
    def _adapted(self) -> AdapterModelMixin:
        return cast("AdapterModelMixin", unwrapped(cast("nn.Module", self.model)))

    def _heads(self) -> dict[str, PredictionHead]:
        """Return the active named heads; none for a model with a static head."""
        return named.heads_by_name(self._adapted)

    def _take(self, model: nn.Module) -> None:
        name, adapted = type(self).__name__, with_adapters(type(self).__name__, model)
        if self._adapter_names is not None:
            adapted.set_active_adapters(self._adapter_names)
        if adapted.active_adapters is None:
            raise StateError(
                f"{name}({type(adapted).__name__}): no adapter is active; there are "
                f"{listing(adapted.adapters_config)}. {_hint(adapted)}"
            )

    def call_model_init(self, trial: Any = None) -> Any:
        """Create a new model, with `adapter_names` active.

        Raises:
            StateError: the model has no adapters, or none is active.
        """
        model = super().call_model_init(trial)
        self._take(model)
        return model

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator, as `Trainer` does."""
        super().create_accelerator_and_postprocess()
        hosts.accelerator_divides_no_loss(self.accelerator)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Check that the model is ready for training, then create the optimizer as `Trainer` does.

        With `loraplus_lr_ratio`, its groups get the learning rates of LoRA+.

        Raises:
            StateError: the base model is not frozen, or no active adapter is trained.
        """
        model, call = self._adapted, f"{type(self).__name__}.train()"
        active = () if model.active_adapters is None else model.active_adapters.flatten()
        fusions = [fuse.name for fuse in fusions_of(model.active_adapters)]
        if not any(p.requires_grad for p in own_parameters_of(model, active, fusions)):
            raise StateError(f"{call}: no active adapter is trained. {_hint(model)}")
        if not training_checkpoints.has_frozen_matrix(model):
            raise StateError(
                f"{call}: the base model is not frozen. {_hint(model)} To train all, write Trainer."
            )
        is_new, optimizer = self.optimizer is None, super().create_optimizer(*args, **kwargs)
        if is_new and self._ratio is not None:
            whole = cast("nn.Module", self.model)
            set_rates(whole, optimizer, self._ratio, self._embedding_rate)
        return optimizer

    # --- losses ---

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        counted = [self._counted(batch) for batch in batch_samples]
        known = [labels for labels in counted if labels is not None]
        self._usual_count = None
        numbers = [sum(map(_count, known)), len(known), len(counted) - len(known)]
        if self.args.world_size > 1 and self.args.average_tokens_across_devices:
            # over all processes, so that all of them take the same branch
            mine = torch.tensor([numbers], device=device)  # [1, numbers]
            everyone = cast("Tensor", self.accelerator.gather(mine))  # [processes, numbers]
            numbers = cast("list[int]", everyone.sum(0).tolist())
        number, batches, unknown = numbers
        if unknown or not batches:
            return None
        own_loss = self.compute_loss_func is not None
        averages = any(head.averages_itself for head in self._heads().values())
        if own_loss or (self._heads() and self.label_smoother is None and not averages):
            items = super()._get_num_items_in_batch([{"labels": each} for each in known], device)
            # at least 1: labels that are all ignored give the loss 0
            return items.clamp(min=1) if isinstance(items, Tensor) else items
        # a model that averages over the batch itself gets its share in compute_loss
        self._usual_count = number / batches
        return None

    def _counted(self, batch: Mapping[str, Any]) -> Tensor | None:
        """Return the labels whose number divides a batch's loss; −100 marks those not counted.

        None if there is no single number: several heads that differ in it, or spans and trees.
        """
        model: Any = self._adapted
        if not model._has_named_heads:
            labels = batch.get("labels")
            if not isinstance(labels, Tensor):
                return None
            causal = sharding.class_name(model) in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
            return next_labels(labels) if causal else labels
        prefix = "decoder_" if model.config.is_encoder_decoder else ""
        mask = batch.get(f"{prefix}attention_mask")
        found = []
        for name, head in self._heads().items():
            labels = head.config.find_labels(name, batch)
            if labels is None or len(head.config.label_names) > 1:
                return None
            found.append(head.config.shift(head.config.mask_labels(labels, mask)))
        counts = {int((labels != IGNORED).sum()) for labels in found}
        return found[0] if len(counts) == 1 else None

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Return the loss of a batch, as its share of the accumulated batches.

        Args:
            model: the model, possibly wrapped.
            inputs: arguments of `forward`.
            return_outputs: whether to return the outputs too.
            num_items_in_batch: number of counted labels in all accumulated batches.

        Raises:
            ConfigError: label smoothing with labels that are not class numbers.
        """
        inputs = dict(inputs)
        heads, share, usual = self._heads(), 1.0, self._usual_count
        if model.training and num_items_in_batch is None and usual is not None:
            labels = self._counted(inputs)
            if labels is not None:
                share = _count(labels) / usual if usual else 0.0
        if heads and (self.label_smoother is not None or self.compute_loss_func is not None):
            # Trainer removes the labels, but the decoder inputs are made from them
            if (labels := decoder_labels(heads, inputs, 1)) is not None:
                shift_labels(self._adapted, inputs, labels)
            if self.compute_loss_func is None:
                labels = self._counted(inputs) if len(heads) == 1 else None
                if labels is None or labels.is_floating_point():
                    raise ConfigError(
                        f"{listing(heads)} is not one head with classes. "
                        "Write label_smoothing_factor=0."
                    )
                inputs["labels"] = labels
        loss, outputs = super().compute_loss(
            model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
        )
        if share == 0.0 and "logits" in outputs:
            # the mean over no labels is NaN, and so is its gradient
            loss = outputs["logits"].sum() * 0.0
        elif share != 1.0:
            loss = loss * share
        penalty = self._adapted.get_fusion_regularization_loss() if model.training else None
        if penalty is not None:
            # once per step; Trainer itself divides a loss that is not a share
            is_share = num_items_in_batch is not None
            steps = self.current_gradient_accumulation_steps if is_share else 1
            loss = loss + penalty.to(loss.device, loss.dtype) / steps
        return (loss, outputs) if return_outputs else loss

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **kwargs: Any,
    ) -> tuple[Any, Any, Any]:
        """Return loss, scores and labels of a batch; scores of several heads in one tuple.

        Args:
            model: the model, possibly wrapped.
            inputs: arguments of `forward`.
            prediction_loss_only: whether to return only the loss.
            ignore_keys: fields of the outputs that are not predictions; None: all but the scores
                of named heads.
            **kwargs: arguments of `generate`, in `Seq2SeqAdapterTrainer`.
        """
        heads = self._heads()
        scores = [name for head in heads.values() for name in head.config.logit_names]
        if ignore_keys is None and heads:
            listed = getattr(self._adapted.config, "keys_to_ignore_at_inference", None) or ()
            ignore_keys = sorted((_OUTPUTS | set(listed)) - set(scores))
        loss, logits, labels = super().prediction_step(
            model, inputs, prediction_loss_only, ignore_keys=ignore_keys, **kwargs
        )
        if len(heads) > 1 and isinstance(logits, list):
            answers = zip(heads.values(), logits, strict=True)
            logits = tuple(answer[n] for head, answer in answers for n in head.config.logit_names)
        return loss, logits, labels

    # --- checkpoints ---

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Train, as `Trainer` does.

        Args:
            resume_from_checkpoint: a folder; True: the last complete checkpoint.
            *args: other arguments of `Trainer.train`.
            **kwargs: likewise.
        """
        if resume_from_checkpoint is True:
            found = training_checkpoints.whole_checkpoints(Path(cast("str", self.args.output_dir)))
            resume_from_checkpoint = str(found[-1]) if found else True
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save adapters and heads; call it in all processes.

        Args:
            output_dir: created if missing; None: that of the arguments.
            _internal_call: whether the caller is `Trainer` itself, which pushes later.
        """
        processes = self.args.world_size
        with sharding.raised_in_all(processes) if self._saves_checkpoint else nullcontext():
            # under FSDP and DeepSpeed, Trainer would gather the base model, or save nothing
            self._save(output_dir)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        folder = Path(output_dir or cast("str", self.args.output_dir))
        if self._saves_checkpoint:
            training_checkpoints.refuse_another(self._part(), folder)
        if self.args.should_save or sharding.groups_of(self._adapted):
            # all processes gather the shards, and the first one writes
            training_checkpoints.save_trained(self._adapted, folder, self._part())
        if not self.args.should_save:
            return
        processing = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if processing is not None:
            processing.save_pretrained(str(folder))
        torch.save(self.args, folder / TRAINING_ARGS_NAME)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        # in all processes, unlike save_model, which a user may call in the first one alone
        self._saves_checkpoint = True
        try:
            super()._save_checkpoint(*args, **kwargs)
        finally:
            self._saves_checkpoint = False

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        # the same file as from one process, so that any number of processes can resume
        is_sharded = not self.is_deepspeed_enabled and bool(sharding.groups_of(self._adapted))
        state = sharding.whole_state(self.optimizer) if is_sharded else None
        with sharding.raised_in_all(self.args.world_size):
            if state is None:
                super()._save_optimizer_and_scheduler(output_dir)
            elif self.args.should_save:
                torch.save(state, Path(output_dir, OPTIMIZER_NAME))
                schedule = cast("Any", self.lr_scheduler).state_dict()
                torch.save(schedule, Path(output_dir, SCHEDULER_NAME))

    def _save_rng_state(self, output_dir: str) -> None:
        # the trainer's state is written next, and marks the checkpoint as complete
        with sharding.raised_in_all(self.args.world_size):
            super()._save_rng_state(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        folder = None if checkpoint is None else Path(checkpoint)
        if folder is None or self.is_deepspeed_enabled:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        hosts.refuse_deepspeed(folder)
        if not sharding.groups_of(self._adapted):
            super()._load_optimizer_and_scheduler(checkpoint)
        elif (folder / OPTIMIZER_NAME).is_file():
            optimizer, scheduler = (
                torch.load(folder / name, "cpu", weights_only=True)
                for name in (OPTIMIZER_NAME, SCHEDULER_NAME)
            )
            sharding.load_state(self.optimizer, optimizer)
            cast("Any", self.lr_scheduler).load_state_dict(scheduler)

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        training_checkpoints.state_of(Path(resume_from_checkpoint))
        self._restore(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        self._restore(cast("str", self.state.best_model_checkpoint))

    def _restore(self, folder: str) -> None:
        with sharding.raised_in_all(self.args.world_size), naming(f"checkpoint {folder!r}"):
            training_checkpoints.restore_trained(self._adapted, Path(folder), self._part())

    def _part(self) -> training_checkpoints.Part:
        """Return the part of the model that a checkpoint holds."""
        return training_checkpoints.Part.whole(self._adapted)


class Seq2SeqAdapterTrainer(AdapterTrainer, Seq2SeqTrainer):
    """An `AdapterTrainer` that can evaluate generated text: `predict_with_generate=True`."""


def with_adapters(caller: str, model: nn.Module) -> AdapterModelMixin:
    """Return the model without its wrappers.

    Args:
        caller: name of the class that takes it.
        model: the model, possibly wrapped.

    Raises:
        StateError: the model has no adapters.
    """
    adapted = unwrapped(model)
    if not isinstance(adapted, AdapterModelMixin):
        raise StateError(
            f"{caller}({type(adapted).__name__}): the model has no adapters. Write "
            "AutoAdapterModel.from_pretrained(…) or adapterzoo.init(model)."
        )
    return adapted


def _count(labels: Tensor) -> int:
    """Return the number of labels that are not ignored."""
    return int((labels != IGNORED).sum())


def _hint(model: Any) -> str:
    setup = model.active_adapters
    names = list(model.adapters_config if setup is None else setup.flatten())
    if names:
        return f"Write model.train_adapter({names[0]!r})."
    return "Write model.add_adapter('my_task', 'seq_bn') and model.train_adapter('my_task')."
