"""The trainers: what they refuse, what they write, and that what they do is exact."""

from __future__ import annotations

import copy
import inspect
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from families import VOCABULARY, tiny_config
from safetensors.torch import load_file
from snapshots import of_adapter
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)

import adapterzoo
from adapterzoo import AdapterTrainer, AutoAdapterModel, Seq2SeqAdapterTrainer
from adapterzoo.errors import CheckpointError, ConfigError, StateError
from adapterzoo.model.heads.copies import table_of

TOKENS = 6
QUIET: dict[str, Any] = {
    "report_to": "none",
    "use_cpu": True,
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
    "logging_strategy": "no",
    "save_strategy": "no",
    "learning_rate": 1e-2,
}


def rows(count: int, labels: str = "class", seed: int = 0) -> list[dict[str, Tensor]]:
    """Rows of tokens with padding; labels of several kinds."""
    source = torch.Generator().manual_seed(seed)

    def draw(high: int, *shape: int) -> Tensor:
        return torch.randint(3, high, shape, generator=source)

    made = []
    for i in range(count):
        length = TOKENS - i % 3
        mask = (torch.arange(TOKENS) < length).long()
        row = {"input_ids": draw(VOCABULARY, TOKENS), "attention_mask": mask}
        tokens = row["input_ids"].masked_fill(mask == 0, -100)
        if labels == "class":
            row["labels"] = torch.tensor(i % 2)
        elif labels == "ignored":
            row["labels"] = torch.tensor(-100 if i % 3 else i % 2)
        elif labels == "number":
            row["labels"] = torch.tensor(float(i))
        elif labels == "several":
            row["labels"] = torch.tensor([i % 2, 1.0, 0.0])
        elif labels == "tokens":
            row["labels"] = tokens
        elif labels == "targets":
            row["labels"] = draw(VOCABULARY, TOKENS).masked_fill(mask == 0, -100)
        elif labels == "tags":
            # padded tags are labels too: the head leaves them out
            row["labels"] = row["input_ids"] % 3
        elif labels == "span":
            row["start_positions"] = torch.tensor(i % 2)
            row["end_positions"] = torch.tensor(2)
        made.append(row)
    return made


DROPOUTS = (
    "activation_dropout", "attention_dropout", "attention_probs_dropout_prob", "attn_pdrop",
    "dropout", "dropout_rate", "embd_pdrop", "hidden_dropout_prob", "resid_pdrop",
)  # fmt: skip


def without_dropout(family: str, dropout: float = 0.0):
    config = tiny_config(family)
    for name in DROPOUTS:
        if name in config.to_dict():
            setattr(config, name, dropout)
    if family == "llama":
        config.pad_token_id = 0
    return config


def named(family: str = "bert", head: str = "class", dropout: float = 0.0, **kwargs: Any):
    """A tiny model with an adapter "task" and a head of the same name, ready for training."""
    torch.manual_seed(0)
    model = AutoAdapterModel.from_config(without_dropout(family, dropout))
    model.add_adapter("task", kwargs.pop("config", "seq_bn"))
    add = {
        "class": model.add_classification_head,
        "several": partial(model.add_classification_head, multilabel=True),
        "tags": model.add_tagging_head,
        "span": model.add_qa_head,
        "causal": model.add_causal_lm_head,
        "masked": model.add_masked_lm_head,
        "seq2seq": model.add_seq2seq_lm_head,
        "number": model.add_classification_head,
    }
    given = {"several": {"num_labels": 3}, "tags": {"num_labels": 3}, "number": {"num_labels": 1}}
    add[head]("task", **given.get(head, {}), **kwargs)
    model.train_adapter("task")
    return model


def args(tmp_path: Path, **kwargs: Any) -> TrainingArguments:
    return TrainingArguments(str(tmp_path), **{**QUIET, **kwargs})


def bits(model) -> dict[str, Tensor]:
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def trained(model) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}


class Gradients(TrainerCallback):
    """The gradients before the first step of the optimizer."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if state.global_step == 0:
            named = model.named_parameters()
            self.found = {n: p.grad.clone() for n, p in named if p.grad is not None}


class Losses(TrainerCallback):
    def __init__(self):
        self.found = {}

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.found[state.global_step] = (logs["loss"], logs["grad_norm"])


class Stop(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == self.step


# --- what is refused ---


def test_a_model_without_adapters_is_refused(tmp_path):
    model = AutoModelForSequenceClassification.from_config(tiny_config("bert"))
    with pytest.raises(StateError, match=r"BertForSequenceClassification.*adapterzoo.init\(model"):
        AdapterTrainer(model, args(tmp_path))


def test_a_model_without_an_active_adapter_is_refused(tmp_path):
    model = named()
    model.set_active_adapters(None)
    with pytest.raises(StateError, match=r"there are 'task'. Write model.train_adapter\('task'\)"):
        AdapterTrainer(model, args(tmp_path))
    model = AutoAdapterModel.from_config(tiny_config("bert"))
    with pytest.raises(StateError, match=r"there are none. Write model.add_adapter"):
        AdapterTrainer(model, args(tmp_path))


def test_adapter_names_become_active_also_on_a_model_made_by_model_init(tmp_path):
    model = named()
    model.set_active_adapters(None)
    AdapterTrainer(model, args(tmp_path), adapter_names="task")
    assert model.active_adapters == adapterzoo.Stack("task")

    def init():
        fresh = named()
        fresh.set_active_adapters(None)
        return fresh

    trainer = AdapterTrainer(
        model_init=init,
        args=args(tmp_path, max_steps=1),
        train_dataset=rows(4),
        adapter_names="task",
    )
    trainer.train()
    assert trainer.model.active_adapters == adapterzoo.Stack("task")
    with pytest.raises(StateError, match="no adapter is active"):
        AdapterTrainer(model_init=init, args=args(tmp_path))


def test_a_base_model_that_is_not_frozen_is_refused_before_the_first_step(tmp_path):
    model = AutoAdapterModel.from_config(tiny_config("bert"))
    model.add_classification_head("task")
    model.add_adapter("task", set_active=True)
    before = bits(model)
    trainer = AdapterTrainer(model, args(tmp_path, max_steps=1), train_dataset=rows(4))
    with pytest.raises(StateError, match=r"not frozen.*Write model.train_adapter\('task'\)"):
        trainer.train()
    assert same(bits(model), before)


def test_an_active_adapter_that_is_not_trained_is_refused(tmp_path):
    model = named()
    model.add_adapter("other")
    model.train_adapter("other")
    model.set_active_adapters("task")
    trainer = AdapterTrainer(model, args(tmp_path, max_steps=1), train_dataset=rows(4))
    with pytest.raises(StateError, match=r"no active adapter is trained.*train_adapter\('ta"):
        trainer.train()


def test_a_loss_of_ones_own_needs_no_head(tmp_path):
    class Own(AdapterTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            inputs.pop("labels")
            return model(**inputs).last_hidden_state.square().mean()

    model = named()
    model.active_head = None
    before = trained(model)
    Own(model, args(tmp_path, max_steps=1), train_dataset=rows(4)).train()
    assert any(not torch.equal(p, before[n]) for n, p in trained(model).items() if of_adapter(n))


@pytest.mark.parametrize("trainer", [Trainer, AdapterTrainer])
def test_a_quantized_model_is_taken_and_keeps_its_mark(tmp_path, trainer):
    model = named()
    model.is_quantized = True
    trainer(model, args(tmp_path))
    assert model.is_quantized is True
    # without adapters there would be nothing to train
    bare = AutoAdapterModel.from_config(tiny_config("bert"))
    bare.is_quantized = True
    with pytest.raises(ValueError, match="purely quantized"):
        Trainer(bare, args(tmp_path))


# --- what training changes, and the loss it minimises ---


def test_training_changes_the_adapter_and_its_head_and_nothing_else(tmp_path):
    model = named()
    model.add_adapter("other", "lora")
    model.add_classification_head("other")
    model.train_adapter("task")
    before, names = bits(model), set(trained(model))
    AdapterTrainer(model, args(tmp_path, max_steps=2), train_dataset=rows(8)).train()
    changed = {key for key, value in bits(model).items() if not torch.equal(value, before[key])}
    assert changed == names
    assert all(of_adapter(n, "task") or n.startswith("heads.task.") for n in names)


HEADS = [
    ("bert", "class", "class"),
    ("bert", "class", "ignored"),
    ("bert", "number", "number"),
    ("bert", "several", "several"),
    ("bert", "tags", "tags"),
    ("bert", "masked", "tokens"),
    ("bert", "span", "span"),
    ("gpt2", "causal", "tokens"),
    ("bart", "seq2seq", "targets"),
]
STATIC = [
    (AutoModelForSequenceClassification, "bert", "class", "ignored"),
    (AutoModelForSequenceClassification, "llama", "class", "class"),
    (AutoModelForCausalLM, "gpt2", "causal", "tokens"),
    (AutoModelForSeq2SeqLM, "t5", "seq2seq", "targets"),
]


def truth(model, head: str, data: list[dict[str, Tensor]], smoothing: float = 0.0) -> Tensor:
    """The loss of all rows as one batch, from the logits alone."""
    batch = {key: torch.stack([row[key] for row in data]) for key in data[0]}
    labels = batch.pop("labels", None)
    if head == "span":
        starts, ends = batch.pop("start_positions"), batch.pop("end_positions")
        out = model(**batch)
        return (
            F.cross_entropy(out.start_logits, starts) + F.cross_entropy(out.end_logits, ends)
        ) / 2
    if head == "seq2seq":
        shifted = labels.roll(1, dims=1)
        shifted[:, 0] = model.config.decoder_start_token_id
        batch["decoder_input_ids"] = shifted.masked_fill(shifted == -100, model.config.pad_token_id)
    logits = model(**batch).logits
    if head == "number":
        return F.mse_loss(logits[:, 0], labels)
    if head == "several":
        return F.binary_cross_entropy_with_logits(logits, labels)
    if head == "causal":
        logits, labels = logits[:, :-1], labels[:, 1:]
    if head == "tags":
        labels = labels.masked_fill(batch["attention_mask"] == 0, -100)
    flat = logits.reshape(-1, logits.shape[-1])
    return F.cross_entropy(flat, labels.reshape(-1), label_smoothing=smoothing)


@pytest.mark.long
@pytest.mark.parametrize(
    ("cls", "family", "head", "labels"), [*((None, *case) for case in HEADS), *STATIC]
)
def test_accumulated_batches_have_the_loss_of_one_batch(tmp_path, cls, family, head, labels):
    """With a named head, and with the one of a class of transformers."""
    data = rows(6, labels)
    if cls is None:
        model = named(family, head)
    else:
        torch.manual_seed(0)
        model = adapterzoo.init(cls.from_config(without_dropout(family)))
        model.add_adapter("task")
        model.train_adapter("task")
    loss = truth(model.train(), head, data)
    loss.backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    gradients = Gradients()
    trainer = AdapterTrainer(
        model,
        args(tmp_path, max_steps=1, per_device_train_batch_size=2, gradient_accumulation_steps=3,
             max_grad_norm=0.0),
        train_dataset=data,
        callbacks=[gradients],
    )  # fmt: skip
    result = trainer.train()
    assert result.training_loss == pytest.approx(loss.item(), rel=1e-5)
    assert gradients.found.keys() == expected.keys()
    for name, gradient in gradients.found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)


def test_batches_without_labels_that_count_have_the_loss_0(tmp_path):
    data = [{**row, "labels": torch.tensor(-100)} for row in rows(4)]
    model = named()
    trainer = AdapterTrainer(
        model, args(tmp_path, max_steps=1, logging_nan_inf_filter=False), train_dataset=data
    )
    assert trainer.train().training_loss == 0.0
    assert all(bool(p.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize(
    ("family", "head", "labels"),
    [("bert", "class", "ignored"), ("gpt2", "causal", "tokens"), ("bart", "seq2seq", "targets")],
)
def test_label_smoothing_is_that_of_the_formula(tmp_path, family, head, labels):
    data = rows(6, labels)
    model = named(family, head)
    expected = truth(model, head, data, smoothing=0.2)
    trainer = AdapterTrainer(
        model,
        args(tmp_path, max_steps=1, per_device_train_batch_size=2, gradient_accumulation_steps=3,
             label_smoothing_factor=0.2),
        train_dataset=data,
    )  # fmt: skip
    assert trainer.train().training_loss == pytest.approx(expected.item(), rel=1e-5)


def test_label_smoothing_without_classes_is_refused(tmp_path):
    model = named(head="number")
    trainer = AdapterTrainer(
        model, args(tmp_path, label_smoothing_factor=0.1), train_dataset=rows(4, "number")
    )
    with pytest.raises(ConfigError, match=r"'task' is not one head with classes"):
        trainer.train()


def test_a_loss_function_of_ones_own_gets_what_the_decoder_made_of_the_labels(tmp_path):
    data = rows(4, "targets")
    model = named("bart", "seq2seq")
    expected = truth(model, "seq2seq", data)

    def loss(outputs, labels, num_items_in_batch):
        total = F.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return total / num_items_in_batch

    trainer = AdapterTrainer(
        model,
        args(tmp_path, max_steps=1, per_device_train_batch_size=2, gradient_accumulation_steps=2),
        train_dataset=data,
        compute_loss_func=loss,
    )
    assert trainer.train().training_loss == pytest.approx(expected.item(), rel=1e-5)


# --- checkpoints ---


def test_a_checkpoint_holds_adapters_and_heads_and_no_weight_of_the_base_model(tmp_path):
    model = named()
    model.add_adapter("second", "lora[r=2]")
    model.add_tagging_head("apart", num_labels=3)
    model.train_adapter("task")

    class Processing:
        def save_pretrained(self, folder):
            Path(folder, "processing.json").write_text("{}")

    trainer = AdapterTrainer(
        model,
        args(tmp_path, max_steps=1, save_strategy="steps", save_steps=1),
        train_dataset=rows(8),
        tokenizer=Processing(),
    )
    trainer.train()
    folder = tmp_path / "checkpoint-1"
    files = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    assert files == {
        "apart/head.safetensors", "apart/head_config.json",
        "second/adapter.safetensors", "second/adapter_config.json",
        "task/adapter.safetensors", "task/adapter_config.json",
        "optimizer.pt", "rng_state.pth", "scheduler.pt", "trainer_state.json", "training_args.bin",
        "processing.json",
    }  # fmt: skip
    stored = [t for p in folder.rglob("*.safetensors") for t in load_file(p).values()]
    own = [
        p for n in ("task", "second") for _, m in model.adapter_modules(n) for p in m.parameters()
    ]
    own += list(model.heads.parameters())
    assert sum(t.numel() for t in stored) == sum(p.numel() for p in own)
    base = {p.data_ptr() for p in own}
    frozen = [p for p in model.parameters() if p.data_ptr() not in base and p.dim() > 1]
    assert frozen
    assert not any(t.shape == p.shape and torch.equal(t, p) for t in stored for p in frozen)


def test_a_checkpoint_loads_by_load_adapter_and_load_head(tmp_path):
    model = named()
    model.add_tagging_head("apart", num_labels=3)
    model.active_head = "task"
    trainer = AdapterTrainer(model, args(tmp_path, max_steps=2), train_dataset=rows(8))
    trainer.train()
    trainer.save_model(str(tmp_path / "final"))
    torch.manual_seed(0)
    fresh = AutoAdapterModel.from_config(model.config)
    missing, unexpected = fresh.base_model.load_state_dict(
        {k: v for k, v in model.base_model.state_dict().items() if not of_adapter(k)},
        strict=False,
    )
    assert not missing
    assert not unexpected
    fresh.load_adapter(tmp_path / "final" / "task", overwrite_ok=True, set_active=True)
    fresh.load_head(tmp_path / "final" / "apart", overwrite_ok=True)
    batch = {key: torch.stack([row[key] for row in rows(4)]) for key in rows(4)[0]}
    for head in ("task", "apart"):
        batch["head"] = head
        inputs = {k: v for k, v in batch.items() if k != "labels"}
        with torch.no_grad():
            logits = model.eval()(**inputs).logits
            assert torch.equal(fresh.eval()(**inputs).logits, logits)


def shuffled(folder: Path, model, steps: int = 6, **kwargs: Any) -> AdapterTrainer:
    """A trainer with all that could go wrong on resuming: shuffling, accumulation, a schedule."""
    chosen = {
        "max_steps": steps, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
        "save_strategy": "steps", "save_steps": 2, "logging_strategy": "steps", "logging_steps": 1,
        "warmup_steps": 2, "weight_decay": 0.1, "lr_scheduler_type": "cosine",
    }  # fmt: skip
    callbacks = kwargs.pop("callbacks", [])
    data = kwargs.pop("train_dataset", None) or rows(13)
    chosen.update(kwargs)
    return AdapterTrainer(model, args(folder, **chosen), train_dataset=data, callbacks=callbacks)


@pytest.mark.parametrize(("stop", "given"), [(2, "path"), (4, True)])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path, stop, given):
    def start():
        return named(dropout=0.3, config="seq_bn[reduction_factor=4]")

    whole, resumed = Losses(), Losses()
    model = start()
    shuffled(tmp_path / "whole", model, callbacks=[whole]).train()

    shuffled(tmp_path / "cut", start(), callbacks=[Stop(stop)]).train()
    torch.manual_seed(99)
    again = start()
    with torch.no_grad():
        for parameter in trained(again).values():
            parameter.add_(1.0)
    trainer = shuffled(tmp_path / "cut", again, callbacks=[resumed])
    where = True if given is True else str(tmp_path / "cut" / f"checkpoint-{stop}")
    trainer.train(resume_from_checkpoint=where)

    assert sorted(whole.found) == [1, 2, 3, 4, 5, 6]
    assert resumed.found == {s: v for s, v in whole.found.items() if s > stop}
    assert same(bits(again), bits(model))
    last = [
        tmp_path / run / "checkpoint-6" / "task" / "adapter.safetensors" for run in ("whole", "cut")
    ]
    assert last[0].read_bytes() == last[1].read_bytes()


def test_resuming_fills_the_parameters_an_optimizer_already_has(tmp_path):
    model = named()
    shuffled(tmp_path, model, callbacks=[Stop(2)]).train()
    again = named()
    optimizer = torch.optim.AdamW([p for p in again.parameters() if p.requires_grad], lr=0.01)
    before = {id(p) for p in again.parameters()}
    trainer = AdapterTrainer(
        again,
        args(tmp_path, max_steps=4, save_only_model=True),
        train_dataset=rows(13),
        optimizers=(optimizer, None),
    )
    # the optimizer's own file has other groups: without it the new one goes on
    for name in ("optimizer.pt", "scheduler.pt"):
        (tmp_path / "checkpoint-2" / name).unlink()
    start = bits(model)
    trainer.train(resume_from_checkpoint=True)
    assert {id(p) for p in again.parameters()} == before
    changed = {n for n, p in again.named_parameters() if not torch.equal(p, start[n])}
    assert changed == set(trained(again))


def test_all_kinds_of_heads_come_back(tmp_path):
    def start():
        model = named(config="lora[r=2]")
        model.add_adapter("second", "par_bn")
        model.add_tagging_head("apart", num_labels=3)
        model.add_masked_lm_head("words")
        model.train_adapter(adapterzoo.Stack("second", "task"))
        return model

    model = start()
    with torch.no_grad():
        # also what is not trained now differs from what a fresh model has
        for parameter in model.heads.parameters():
            if parameter is not model.get_input_embeddings().weight:
                parameter.add_(0.5)
    cut = copy.deepcopy(model)
    shuffled(tmp_path / "whole", model, steps=4).train()
    shuffled(tmp_path, cut, steps=4, callbacks=[Stop(2)]).train()
    again = start()
    shuffled(tmp_path, again, steps=4).train(resume_from_checkpoint=True)
    assert same(bits(again), bits(model))
    assert again.active_head == "task"
    assert {n for n, p in again.named_parameters() if p.requires_grad} == set(trained(model))


def test_a_static_head_comes_back(tmp_path):
    def start():
        torch.manual_seed(0)
        config = tiny_config("bert")
        model = adapterzoo.init(AutoModelForSequenceClassification.from_config(config))
        model.add_adapter("task")
        model.train_adapter("task")
        return model

    model = start()
    shuffled(tmp_path, model, callbacks=[Stop(2)], steps=4).train()
    before = bits(start())
    again = start()
    whole = start()
    shuffled(tmp_path, again, steps=4).train(resume_from_checkpoint=True)
    shuffled(tmp_path / "whole", whole, steps=4).train()
    assert same(bits(again), bits(whole))
    own = "classifier.adapters.task.weight"
    assert same({own: bits(again)["classifier.weight"]}, {own: before["classifier.weight"]})
    assert not torch.equal(before[own], again.get_parameter(own))
    fresh = start()
    fresh.load_adapter(tmp_path / "checkpoint-4" / "task", overwrite_ok=True)
    assert torch.equal(fresh.get_parameter(own), again.get_parameter(own))


def test_trained_embeddings_come_back_too(tmp_path):
    def start():
        model = named("gpt2", "causal", dropout=0.1)
        model.train_adapter("task", train_embeddings=True)
        return model

    data = rows(13, "tokens")
    whole, again = start(), start()
    shuffled(tmp_path / "whole", whole, train_dataset=data, steps=4).train()
    cut = start()
    shuffled(tmp_path, cut, train_dataset=data, steps=4, callbacks=[Stop(2)]).train()
    shuffled(tmp_path, again, train_dataset=data, steps=4).train(resume_from_checkpoint=True)
    assert same(bits(again), bits(whole))
    assert not (tmp_path / "checkpoint-4" / "unfrozen.safetensors").exists()
    fresh = named("gpt2", "causal", dropout=0.1)
    fresh.load_adapter(tmp_path / "checkpoint-4" / "task", overwrite_ok=True)
    assert torch.equal(table_of(fresh, "task"), table_of(again, "task"))
    assert torch.equal(fresh.get_input_embeddings().weight, start().get_input_embeddings().weight)
    frozen = named("gpt2", "causal")
    start_bits = bits(frozen)
    trainer = shuffled(tmp_path, frozen, train_dataset=data, steps=4)
    with pytest.raises(CheckpointError, match=r"wte/table.weight   in the file only"):
        trainer.train(resume_from_checkpoint=True)
    assert same(bits(frozen), start_bits)


def test_a_checkpoint_that_does_not_fit_changes_nothing(tmp_path):
    shuffled(tmp_path, named(), steps=2).train()

    def refused(model, message):
        before = bits(model)
        with pytest.raises(CheckpointError, match=message):
            shuffled(tmp_path, model, steps=2).train(resume_from_checkpoint=True)
        assert same(bits(model), before)

    more = named()
    more.add_adapter("second")
    refused(more, r"has the adapters 'task', and the model has 'second', 'task'")
    head = named()
    head.add_tagging_head("apart")
    head.train_adapter("task")
    refused(head, r"has the heads none, and the model has 'apart'")
    refused(
        named(config=adapterzoo.SeqBnConfig(non_linearity="gelu")),
        r"checkpoint's adapter 'task' is .*re",
    )
    refused(named(layers=1), r"checkpoint's head 'task' is .*layers=1")
    half = named()
    half.adapter_to("task", dtype=torch.bfloat16)
    refused(half, r"file torch.float32   model torch.bfloat16")
    refused(named("roberta"), r"saved from a model of type 'bert'.*not into a 'roberta'")


def test_a_checkpoint_that_was_cut_off_is_refused(tmp_path):
    shuffled(tmp_path, named(), steps=4).train()
    (tmp_path / "checkpoint-4" / "trainer_state.json").unlink()
    trainer = shuffled(tmp_path, named(), steps=4)
    with pytest.raises(CheckpointError, match=r"checkpoint-4' has no complete trainer_state.json"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))


def test_a_checkpoint_with_a_long_log_and_a_gradient_of_nan_is_whole(tmp_path):
    shuffled(tmp_path, named(), steps=4).train()
    file = tmp_path / "checkpoint-4" / "trainer_state.json"
    state = json.loads(file.read_text())
    state["log_history"] += 20_000 * [{"step": 1, "grad_norm": float("nan"), "loss": 0.1}]
    file.write_text(json.dumps(state, indent=2))
    trainer = shuffled(tmp_path, named(), steps=6)
    begun = []

    class Begin(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            begun.append(state.global_step)

    trainer.add_callback(Begin())
    trainer.train(resume_from_checkpoint=True)
    assert begun == [4, 5]


def test_the_best_adapters_and_heads_come_back_bit_for_bit(tmp_path):
    model = named(config="lora[r=2]", dropout=0.1)
    scores = iter([0.1, 0.9, 0.3])
    seen = {}

    class Keep(TrainerCallback):
        def on_save(self, args, state, control, model=None, **kwargs):
            seen[state.global_step] = bits(model)

    trainer = AdapterTrainer(
        model,
        args(tmp_path, max_steps=3, eval_strategy="steps", eval_steps=1, save_strategy="steps",
             save_steps=1, load_best_model_at_end=True, metric_for_best_model="made_up",
             greater_is_better=True, save_total_limit=1),
        train_dataset=rows(8),
        eval_dataset=rows(4, seed=1),
        compute_metrics=lambda prediction: {"made_up": next(scores)},
        callbacks=[Keep()],
    )  # fmt: skip
    parameters = {id(p) for p in model.parameters()}
    trainer.train()
    assert not same(seen[2], seen[3])
    assert same(bits(model), seen[2])
    assert {id(p) for p in model.parameters()} == parameters
    assert [p.name for p in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]


def test_two_names_of_one_argument_hold_one_value(tmp_path):
    model, one, other = named(), object(), object()
    model.set_active_adapters(None)
    with pytest.raises(ConfigError, match=r"tokenizer=.*processing_class="):
        AdapterTrainer(
            model, args(tmp_path), tokenizer=one, processing_class=other, adapter_names="a"
        )
    assert model.active_adapters is None
    trainer = AdapterTrainer(
        named(), args(tmp_path), data_collator=default_data_collator, tokenizer=one,
        processing_class=one,
    )  # fmt: skip
    assert trainer.processing_class is one


# --- evaluation ---


@pytest.mark.parametrize(
    ("family", "head", "labels"), [case for case in HEADS if case[2] != "ignored"]
)
def test_predictions_are_the_logits_alone_and_there_is_a_loss(tmp_path, family, head, labels):
    model = named(family, head)
    data = rows(4, labels)
    model.config.output_hidden_states = True
    seen = []
    trainer = AdapterTrainer(
        model,
        args(tmp_path, per_device_eval_batch_size=4),
        eval_dataset=data,
        compute_metrics=lambda prediction: seen.append(prediction) or {"rows": 4},
    )
    metrics = trainer.evaluate()
    with torch.no_grad():
        batch = {key: torch.stack([row[key] for row in data]) for key in data[0]}
        outputs = model.eval()(**batch)
        expected = truth(model, head, data)
    assert metrics["eval_rows"] == 4
    assert metrics["eval_loss"] == pytest.approx(expected.item(), rel=1e-5)
    (prediction,) = seen
    if head == "span":
        assert len(prediction.predictions) == len(prediction.label_ids) == 2
        np.testing.assert_array_equal(prediction.predictions[1], outputs.end_logits.numpy())
        np.testing.assert_array_equal(prediction.label_ids[0], batch["start_positions"].numpy())
    else:
        np.testing.assert_array_equal(prediction.predictions, outputs.logits.numpy())
        np.testing.assert_array_equal(prediction.label_ids, batch["labels"].numpy())
    unlabelled = [{k: row[k] for k in ("input_ids", "attention_mask")} for row in data]
    if head != "seq2seq":
        found = trainer.predict(unlabelled)
        assert found.label_ids is None
        np.testing.assert_array_equal(
            np.asarray(found.predictions), np.asarray(prediction.predictions)
        )


@pytest.mark.parametrize("half", [False, True])
def test_several_heads_train_and_predict_one_after_the_other(tmp_path, half):
    model = named()
    model.add_classification_head("second", num_labels=4)
    model.active_head = ["task", "second"]
    model.train_adapter("task")
    model.active_head = ["task", "second"]
    data = rows(4)
    trainer = AdapterTrainer(
        model, args(tmp_path, max_steps=1, bf16=half), train_dataset=data, eval_dataset=data
    )
    trainer.train()
    found = trainer.predict(data)
    assert [p.shape for p in found.predictions] == [(4, 2), (4, 4)]
    batch = {key: torch.stack([row[key] for row in data]) for key in data[0]}
    if half:
        return
    with torch.no_grad():
        logits = [model.eval()(**batch, head=name).logits for name in ("task", "second")]
    for prediction, expected in zip(found.predictions, logits, strict=True):
        np.testing.assert_array_equal(prediction, expected.numpy())
    expected = sum(F.cross_entropy(x, batch["labels"]) for x in logits)
    assert found.metrics["test_loss"] == pytest.approx(expected.item(), rel=1e-5)


def test_the_labels_of_a_parser_are_found(tmp_path):
    model = named()
    model.add_dependency_parsing_head("parser", num_labels=3)
    model.train_adapter("task")
    model.active_head = "parser"
    for parameter in model.heads["parser"].parameters():
        parameter.requires_grad_(True)
    arcs = torch.tensor([0, 1, 1, -100, -100, -100])
    data = [
        {
            "input_ids": row["input_ids"],
            "word_starts": torch.tensor([1, 2, 3, -1, -1, -1]),
            "labels_arcs": arcs,
            "labels_rels": arcs,
        }
        for row in rows(4)
    ]
    trainer = AdapterTrainer(
        model, args(tmp_path, max_steps=1), train_dataset=data, eval_dataset=data
    )
    assert math.isfinite(trainer.train().training_loss)
    assert math.isfinite(trainer.evaluate()["eval_loss"])
    found = trainer.predict(data)
    assert len(found.predictions) == len(found.label_ids) == 2


# --- memory and precision ---


def pictures(count: int) -> list[dict[str, Tensor]]:
    source = torch.Generator().manual_seed(0)
    return [
        {"pixel_values": torch.randn(3, 8, 8, generator=source), "labels": torch.tensor(i % 2)}
        for i in range(count)
    ]


# the second is the name in older releases of transformers
CHECKPOINTING = next(
    name
    for name in ("activation_checkpointing", "gradient_checkpointing")
    if name in inspect.signature(TrainingArguments).parameters
)


# both kinds on every method: test_gradient_checkpointing.py
@pytest.mark.parametrize(("family", "reentrant"), [("bert", True), ("t5", False), ("vit", True)])
def test_gradient_checkpointing_gives_equal_gradients(tmp_path, family, reentrant):
    data = pictures(4) if family == "vit" else rows(4)
    found = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = named(family)
        model.add_adapter("low", adapterzoo.LoRAConfig(r=2, init_weights="bert"))
        model.train_adapter(adapterzoo.Stack("task", "low"))
        model.active_head = "task"
        for parameter in model.heads["task"].parameters():
            parameter.requires_grad_(True)
        gradients = Gradients()
        how = {CHECKPOINTING: True, f"{CHECKPOINTING}_kwargs": {"use_reentrant": reentrant}}
        trainer = AdapterTrainer(
            model,
            args(tmp_path, max_steps=1, max_grad_norm=0.0, **(how if checkpointing else {})),
            train_dataset=data,
            callbacks=[gradients],
        )
        trainer.train()
        assert gradients.found.keys() == {n for n, p in model.named_parameters() if p.requires_grad}
        found.append(gradients.found)
    for name, gradient in found[1].items():
        torch.testing.assert_close(gradient, found[0][name], rtol=0, atol=1e-7)


def test_bf16_runs_and_keeps_the_parameters_wide(tmp_path):
    model = named()
    before = trained(model)
    data = rows(4)
    trainer = AdapterTrainer(
        model, args(tmp_path, max_steps=2, bf16=True), train_dataset=data, eval_dataset=data
    )
    assert math.isfinite(trainer.train().training_loss)
    after = trained(model)
    assert all(p.dtype is torch.float32 for p in after.values())
    assert any(not torch.equal(after[n], before[n]) for n in after)
    assert math.isfinite(trainer.evaluate()["eval_loss"])


# --- generation ---


def test_predict_with_generate(tmp_path):
    model = named("bart", "seq2seq")
    data = rows(4, "targets")
    chosen = {**QUIET, "max_steps": 1, "predict_with_generate": True, "generation_max_length": 7}
    trainer = Seq2SeqAdapterTrainer(
        model,
        Seq2SeqTrainingArguments(str(tmp_path), **chosen),
        train_dataset=data,
        eval_dataset=data,
        compute_metrics=lambda p: {"width": p.predictions.shape[1]},
    )
    trainer.train()
    metrics = trainer.evaluate()
    # transformers fills up to the length that generate() has by default
    assert metrics["eval_width"] == 20
    with torch.no_grad():
        expected = truth(model.eval(), "seq2seq", data)
        ids = torch.stack([row["input_ids"] for row in data])
        mask = torch.stack([row["attention_mask"] for row in data])
        tokens = model.generate(input_ids=ids, attention_mask=mask, max_length=7)
    assert metrics["eval_loss"] == pytest.approx(expected.item(), rel=1e-5)
    found = trainer.predict(data, max_length=7).predictions
    np.testing.assert_array_equal(found[:, : tokens.shape[1]], tokens.numpy())
    assert (found[:, tokens.shape[1] :] == model.config.pad_token_id).all()


# --- without these trainers ---


def test_the_plain_trainer_counts_the_labels_that_causal_heads_use(tmp_path):
    data = rows(6, "tokens")
    model = named("gpt2", "causal")
    expected = truth(model, "causal", data)
    trainer = Trainer(
        model,
        args(tmp_path, max_steps=1, per_device_train_batch_size=2, gradient_accumulation_steps=3),
        train_dataset=data,
    )
    if "_loss_shifts_labels" not in vars(trainer):
        pytest.skip("this release of transformers counts the first label too")
    assert trainer.train().training_loss == pytest.approx(expected.item(), rel=1e-5)


def test_a_loop_by_hand_is_what_the_trainer_does(tmp_path):
    data = rows(8)
    model = named()
    by_hand = copy.deepcopy(model)
    trainer = AdapterTrainer(
        model,
        args(tmp_path, max_steps=4, per_device_train_batch_size=2, lr_scheduler_type="constant",
             train_sampling_strategy="sequential", max_grad_norm=0.0, optim="sgd"),
        train_dataset=data,
    )  # fmt: skip
    trainer.train()
    optimizer = torch.optim.SGD([p for p in by_hand.parameters() if p.requires_grad], lr=1e-2)
    by_hand.train()
    for i in range(0, 8, 2):
        batch = {key: torch.stack([row[key] for row in data[i : i + 2]]) for key in data[0]}
        by_hand(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for (name, mine), (_, theirs) in zip(
        trained(by_hand).items(), trained(model).items(), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7, msg=name)


def test_several_runs_of_one_trainer_go_on_with_the_same_parameters(tmp_path):
    model = AutoAdapterModel.from_config(tiny_config("bert"))
    model.add_adapter("task")
    model.add_qa_head("task")
    model.train_adapter("task")
    trainer = AdapterTrainer(model, args(tmp_path, max_steps=1), train_dataset=rows(4, "span"))
    trainer.train()
    before = trained(model)
    trainer.train()
    assert all(not torch.equal(p, before[n]) for n, p in trained(model).items() if "up" in n)
