"""`AdapterTrainer` and `Seq2SeqAdapterTrainer`: transformers' trainers for adapters and heads.

A checkpoint holds adapters, heads and the state of the training; the base model is not in it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Seq2SeqTrainer, Trainer, modeling_outputs
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer import TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from transformers.utils.generic import find_labels

from .checkpoint import files, native
from .configs import AdapterConfig
from .errors import CheckpointError, ConfigError, StateError, listing
from .heads import LMHead, PredictionHead
from .model.heads import HeadsMixin
from .model.inputs import labels_of, shift_labels
from .model.mixin import AdapterModelMixin
from .model.storing import ADAPTER_STEM, HEAD_STEM

_UNFROZEN = "unfrozen.safetensors"
_IGNORED = -100
# whatever a base model can answer besides the scores of a head
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

    Each adapter lies in the sub-folder of its name, with the head of the same name in one file,
    as `load_adapter` reads it; a head of another name lies in a sub-folder of its own, as
    `load_head` reads it. Parameters of the base model that were made trainable on purpose
    (`train_embeddings=True`) are in one more file.

    Differs from AdapterHub: resuming and loading the best model fill the parameters that are
    there, so an optimizer made before keeps training them; the losses of accumulated batches are
    weighted by their labels, also for models with a static head.
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
        **kwargs: Any,
    ) -> None:
        """Check the model and start the `Trainer`.

        Args:
            model: with adapters, one of them active.
            args: `TrainingArguments`.
            data_collator: makes a batch of a list of rows.
            train_dataset: rows to train on.
            eval_dataset: rows to judge by, or a dict of several such.
            tokenizer: other name of `processing_class`, as in AdapterHub.
            processing_class: saved beside the adapters.
            model_init: makes the model, instead of `model`.
            adapter_names: what `set_active_adapters` shall be called with.
            **kwargs: as `Trainer` takes them.

        Raises:
            StateError: the model has no adapters, none is active, or it is sharded.
        """
        self._adapter_names = adapter_names
        self._usual_count: float | None = None
        if model is not None:
            self._take(model)
        with _trainable_when_quantised(model):
            super().__init__(
                cast("Any", model),
                args,
                data_collator,
                train_dataset,
                eval_dataset,
                processing_class=processing_class or tokenizer,
                model_init=cast("Any", model_init),
                **kwargs,
            )
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise StateError(
                f"{type(self).__name__}: with FSDP or DeepSpeed each process has a part of each "
                f"parameter, and these checkpoints hold whole ones. Leave out fsdp=… and "
                f"deepspeed=…, or write Trainer(…)."
            )
        heads = self._heads()
        if heads:
            # all named heads take it, whatever the classes of the family say
            self.model_accepts_loss_kwargs = True
            self._loss_shifts_labels = False
            if self.args.label_names is None:
                names = [n for head in heads.values() for n in head.config.label_names]
                self.label_names = list(dict.fromkeys(names))

    # --- the model ---

    @property
    def _adapted(self) -> Any:
        return _unwrapped(self.model)

    def _heads(self) -> dict[str, PredictionHead]:
        """The named heads that answer; none for a model with a static head."""
        model = self._adapted
        return model._used_heads(None) if isinstance(model, HeadsMixin) else {}

    def _take(self, model: nn.Module) -> None:
        adapted = _unwrapped(model)
        name = type(self).__name__
        if not isinstance(adapted, AdapterModelMixin):
            raise StateError(
                f"{name}({type(adapted).__name__}): the model has no adapters. Write "
                f"AutoAdapterModel.from_pretrained(…) or adapterzoo.init(model), or train all of "
                f"it with Trainer(…)."
            )
        if self._adapter_names is not None:
            adapted.set_active_adapters(self._adapter_names)
        if adapted.active_adapters is None:
            raise StateError(
                f"{name}({type(adapted).__name__}): no adapter is active; there are "
                f"{listing(adapted.adapters_config)}. {_cure(adapted)}"
            )

    def call_model_init(self, trial: Any = None) -> Any:
        """A fresh model, with `adapter_names` active.

        Raises:
            StateError: it has no adapters, or none is active.
        """
        model = super().call_model_init(trial)
        self._take(model)
        return model

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """The optimizer, as `Trainer` makes it, of a model that is ready to be trained.

        Raises:
            StateError: the base model is not frozen, no active adapter is trained, or nothing
                gives a loss.
        """
        self._check_ready()
        return super().create_optimizer(*args, **kwargs)

    def _check_ready(self) -> None:
        model = self._adapted
        call = f"{type(self).__name__}.train()"
        active = tuple(model.active_adapters or ())
        if not any(p.requires_grad for name in active for p in model._parameters_of(name)):
            raise StateError(
                f"{call}: no parameter of the active adapters {listing(active)} is trained. "
                f"{_cure(model)}"
            )
        if not _frozen(model):
            raise StateError(
                f"{call}: the base model is not frozen, so all of it would be trained. "
                f"{_cure(model)} To train all of it write Trainer(…)."
            )
        own_loss = self.compute_loss_func is not None
        own_loss |= type(self).compute_loss not in _OUR_LOSSES
        named = isinstance(model, HeadsMixin)
        if not own_loss and not (self._heads() if named else find_labels(type(model))):
            heads = f"; there are {listing(model.heads)}" if named else ""
            cure = (
                "add_classification_head('my_task') and train_adapter(…) after it, or "
                "model.active_head = 'my_task'"
                if named
                else "AutoAdapterModel.from_pretrained(…), which has named heads"
            )
            raise StateError(
                f"{call}: {type(model).__name__} has no active head, so there is no loss{heads}. "
                f"Write {cure}."
            )

    # --- losses ---

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        counted = [self._counted(batch) for batch in batch_samples]
        known = [labels for labels in counted if labels is not None]
        self._usual_count = None
        if not known or len(known) < len(counted):
            return None
        if self._heads() and self.label_smoother is None:
            batches = [{"labels": labels} for labels in known]
            number = super()._get_num_items_in_batch(batches, device)
            # at least 1: labels that are all ignored give the loss 0
            return number.clamp(min=1) if isinstance(number, Tensor) else number
        # what computes the mean over a batch by itself gets its share in compute_loss
        self._usual_count = sum(map(_count, known)) / len(known)
        return None

    def _counted(self, batch: Mapping[str, Any]) -> Tensor | None:
        """The labels by whose number a batch's loss is divided, −100 for those that do not count.

        None where that is not one number: several heads that differ in it, or spans and trees.
        """
        model = self._adapted
        heads = self._heads()
        if not heads:
            labels = batch.get("labels")
            if not isinstance(labels, Tensor):
                return None
            causal = type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
            return _shifted(labels) if causal else labels
        prefix = "decoder_" if model.config.is_encoder_decoder else ""
        mask = batch.get(f"{prefix}attention_mask")
        found = []
        for name, head in heads.items():
            if len(head.config.label_names) > 1 or (l := labels_of(head, name, batch)) is None:
                return None
            if head.config.token_labels and mask is not None and mask.shape == l.shape:
                l = l.masked_fill(mask == 0, _IGNORED)
            found.append(
                _shifted(l) if isinstance(head, LMHead) and head.config.shift_labels else l
            )
        return found[0] if len({_count(labels) for labels in found}) == 1 else None

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The loss of a batch, as its share of the batches that are accumulated.

        Args:
            model: perhaps wrapped.
            inputs: of `forward`.
            return_outputs: whether the outputs are returned as well.
            num_items_in_batch: number of labels that count in all of these batches.

        Raises:
            ConfigError: label smoothing, and labels that are no class numbers.
        """
        inputs = dict(inputs)
        share = self._share(inputs) if model.training and num_items_in_batch is None else 1.0
        replaced = self.label_smoother is not None or self.compute_loss_func is not None
        if replaced and self._heads():
            # Trainer takes the labels away, from which the decoder's inputs are made
            if self._adapted.config.is_encoder_decoder:
                shift_labels(self._adapted, inputs, inputs.get("labels"))
            if self.compute_loss_func is None:
                inputs["labels"] = self._smoothed_labels(inputs)
        loss, outputs = super().compute_loss(
            model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
        )
        loss = loss * share if share != 1.0 else loss
        return (loss, outputs) if return_outputs else loss

    def _share(self, inputs: Mapping[str, Any]) -> float:
        labels = None if self._usual_count is None else self._counted(inputs)
        return (
            1.0 if labels is None or not self._usual_count else _count(labels) / self._usual_count
        )

    def _smoothed_labels(self, inputs: Mapping[str, Any]) -> Tensor:
        labels = self._counted(inputs) if len(self._heads()) == 1 else None
        if labels is None or labels.is_floating_point():
            raise ConfigError(
                f"label_smoothing_factor={self.args.label_smoothing_factor}: smoothing is for one "
                f"head whose labels are class numbers; active are {listing(self._heads())}. "
                f"Write label_smoothing_factor=0."
            )
        return labels

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **kwargs: Any,
    ) -> tuple[Any, Any, Any]:
        """Loss, scores and labels of a batch; the scores of several heads one after the other.

        Args:
            model: perhaps wrapped.
            inputs: of `forward`.
            prediction_loss_only: whether only the loss is wanted.
            ignore_keys: fields of the outputs that are no predictions; None: all but the scores
                of named heads.
            **kwargs: of `generate`, in `Seq2SeqAdapterTrainer`.
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
            logits = tuple(
                answer[name] for head, answer in answers for name in head.config.logit_names
            )
        return loss, logits, labels

    # --- checkpoints ---

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if not self.args.should_save:
            return
        folder = Path(output_dir or cast("str", self.args.output_dir))
        model = self._adapted
        heads = model.known_heads()
        for name in model.adapters_config:
            # a static head has no name, and goes with each adapter
            model.save_adapter(folder / name, name, with_head=not heads or name in heads)
        for name in heads:
            if name not in model.adapters_config:
                model.save_head(folder / name, name)
        if unfrozen := _unfrozen(model):
            document = {"format": native.FORMAT, "version": native.VERSION}
            files.write_tensors(folder / _UNFROZEN, document, unfrozen)
        processing = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if processing is not None:
            processing.save_pretrained(str(folder))
        torch.save(self.args, folder / TRAINING_ARGS_NAME)

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        folder = Path(resume_from_checkpoint)
        if not (folder / TRAINER_STATE_NAME).is_file():
            whole = [p.parent for p in folder.parent.glob(f"checkpoint-*/{TRAINER_STATE_NAME}")]
            whole.sort(key=lambda p: p.stat().st_mtime)
            cure = f"resume_from_checkpoint={str(whole[-1])!r}" if whole else "train()"
            raise CheckpointError(
                f"resume from {resume_from_checkpoint!r}: there is no {TRAINER_STATE_NAME}, which "
                f"is written last, so this is no whole checkpoint. Write {cure}."
            )
        self._restore(folder)

    def _load_best_model(self) -> None:
        self._restore(Path(cast("str", self.state.best_model_checkpoint)))

    def _restore(self, folder: Path) -> None:
        """Fill adapters and heads in place; when anything does not fit, nothing is filled."""
        call = f"resume from {str(folder)!r}"
        pairs = list(_pairs(self._adapted, folder, call))
        for theirs, mine, kind in pairs:
            native.check_fit(f"{call}, {kind}", type(self._adapted).__name__, theirs, mine, None)
        with torch.no_grad():
            for theirs, mine, _ in pairs:
                for key, tensor in theirs.items():
                    mine[key].copy_(tensor)


class Seq2SeqAdapterTrainer(AdapterTrainer, Seq2SeqTrainer):
    """An `AdapterTrainer` that can judge by generated text: `predict_with_generate=True`."""


_OUR_LOSSES = (AdapterTrainer.compute_loss, Seq2SeqAdapterTrainer.compute_loss)


def _unwrapped(model: Any) -> Any:
    # torch.compile(model) keeps the model there
    return getattr(model, "_orig_mod", model)


def _cure(model: Any) -> str:
    names = list(model.active_adapters or model.adapters_config)
    if names:
        return f"Write model.train_adapter({names[0]!r})."
    return "Write model.add_adapter('my_task', 'seq_bn') and model.train_adapter('my_task')."


@contextlib.contextmanager
def _trainable_when_quantised(model: Any) -> Iterator[None]:
    """Let Trainer take a quantised model: it knows only peft's adapters on one."""
    quantised = getattr(model, "is_quantized", False)
    if quantised:
        model.is_quantized = False
    try:
        yield
    finally:
        if quantised:
            model.is_quantized = True


def _shifted(labels: Tensor) -> Tensor:
    """The label of the next token at each."""
    return F.pad(labels[..., 1:], (0, 1), value=_IGNORED)


def _count(labels: Tensor) -> int:
    return int((labels != _IGNORED).sum())


def _frozen(model: Any) -> bool:
    """Whether any matrix of the base model, embeddings aside, is frozen."""
    own = {id(p) for name in model.adapters_config for p in model._parameters_of(name)}
    return any(
        not p.requires_grad
        for module in model._backbone.modules()
        if not isinstance(module, nn.Embedding)
        for p in module._parameters.values()
        if p is not None and p.dim() > 1 and id(p) not in own
    )


def _unfrozen(model: Any) -> dict[str, Tensor]:
    """Trained parameters by name that belong to no adapter and no head."""
    kept = {id(p) for name in model.adapters_config for p in model._parameters_of(name)}
    for name in model.known_heads() or (None,):
        record = model._head_record(name)
        kept |= set() if record is None else {id(t) for t in record.tensors.values()}
    return {n: p for n, p in model.named_parameters() if p.requires_grad and id(p) not in kept}


def _pairs(
    model: Any, folder: Path, call: str
) -> Iterator[tuple[Mapping[str, Tensor], Mapping[str, Tensor], str]]:
    """(tensors of a file, tensors of the model, what they belong to) of a checkpoint.

    Raises:
        CheckpointError: the checkpoint has other adapters, heads or configs.
    """
    heads = model.known_heads()
    alone = [name for name in heads if name not in model.adapters_config]
    for stem, names in ((ADAPTER_STEM, list(model.adapters_config)), (HEAD_STEM, alone)):
        there = sorted(p.parent.name for p in folder.glob(f"*/{stem}.safetensors"))
        if there != sorted(names):
            raise CheckpointError(
                f"{call}: the checkpoint has the {stem}s {listing(there)}, the model "
                f"{listing(sorted(names))}; nothing has been loaded. Add and delete {stem}s as "
                f"they were when it was saved."
            )
    for name, config in model.adapters_config.items():
        stored = native.load(folder / name, ADAPTER_STEM)
        theirs = AdapterConfig.from_dict(stored.document["config"])
        if theirs != config:
            raise _other_config(call, "adapter", name, theirs, config)
        mine = {
            f"{path}/{key}": tensor
            for path, module in model.adapter_modules(name)
            for key, tensor in module.state_dict(keep_vars=True).items()
        }
        yield stored.adapter, mine, f"adapter {name!r}"
        if not heads or name in heads:
            yield _head_pair(model, name if heads else None, stored, call)
    for name in alone:
        yield _head_pair(model, name, native.load(folder / name, HEAD_STEM), call)
    unfrozen = _unfrozen(model)
    file = folder / _UNFROZEN
    if unfrozen or file.is_file():
        tensors = files.read_tensors(file)[1] if file.is_file() else {}
        yield tensors, unfrozen, "parameters of the base model that are not frozen"


def _head_pair(
    model: Any, name: str | None, stored: native.Stored, call: str
) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor], str]:
    record = model._head_record(name)
    theirs = stored.document.get("head")
    if name is not None and theirs is not None:
        saved = model._config_from(theirs["config"], call)
        if saved != model.get_head(name).config:
            raise _other_config(call, "head", name, saved, model.get_head(name).config)
    return stored.head, {} if record is None else record.tensors, f"head {name or 'of the model'!r}"


def _other_config(call: str, kind: str, name: str, theirs: Any, mine: Any) -> CheckpointError:
    return CheckpointError(
        f"{call}: the {kind} {name!r} of the checkpoint is a {theirs!r}, that of the model a "
        f"{mine!r}; nothing has been loaded. Add it with the config of the checkpoint."
    )
