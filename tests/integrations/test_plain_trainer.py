"""transformers' own `Trainer`: it trains adapters, and its checkpoints hold them alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from families import tiny_config
from snapshots import of_adapter
from torch import Tensor
from transformers import (
    DataCollatorWithPadding,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    pipeline,
)
from transformers.pipelines.pt_utils import KeyDataset
from words import SENTENCES, tokenizer

from adapterzoo import AdapterTrainer, AutoAdapterModel
from adapterzoo.errors import CheckpointError

QUIET: dict[str, Any] = {
    "report_to": "none", "use_cpu": True, "disable_tqdm": True, "dataloader_pin_memory": False,
    "logging_strategy": "no", "save_strategy": "no", "learning_rate": 1e-2,
    "per_device_train_batch_size": 4,
}  # fmt: skip


@pytest.fixture
def table() -> Dataset:
    """Sentences as `datasets` holds them, tokenised by `map`, with columns that nobody takes."""
    words = [f"{text} w{i}" for i, text in enumerate(SENTENCES * 4)]
    made = Dataset.from_dict({"text": words, "label": [i % 2 for i in range(len(words))]})
    return made.map(lambda rows: tokenizer()(rows["text"]), batched=True).rename_column(
        "label", "labels"
    )


@pytest.fixture(autouse=True)
def quiet_progress():
    """No bars of `map`; the setting is the process's, so it is put back."""
    from datasets import disable_progress_bars, enable_progress_bars

    disable_progress_bars()
    yield
    enable_progress_bars()


def named(family: str = "bert", dropout: float | None = None) -> Any:
    config = tiny_config(family)
    if dropout is not None:
        config.hidden_dropout_prob = config.attention_probs_dropout_prob = dropout
    torch.manual_seed(0)
    model = AutoAdapterModel.from_config(config)
    model.add_adapter("other", "lora")
    model.add_adapter("task", "seq_bn")
    model.add_tagging_head("other", num_labels=3)
    model.add_classification_head("task", id2label={0: "sad", 1: "glad"})
    model.train_adapter("task")
    return model


def bits(model: Any) -> dict[str, Tensor]:
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


def files_in(folder: Path, pattern: str) -> list[str]:
    found = (p for p in folder.rglob(pattern) if "checkpoint" not in str(p.relative_to(folder)))
    return sorted(str(path.relative_to(folder).with_suffix("")) for path in found)


def differing(left: dict[str, Tensor], right: dict[str, Tensor]) -> set[str]:
    assert left.keys() == right.keys()
    return {key for key in left if not torch.equal(left[key], right[key])}


def trainer(model: Any, folder: Path, table: Dataset, **chosen: Any) -> Trainer:
    extra = {k: chosen.pop(k) for k in ("callbacks", "compute_metrics") if k in chosen}
    return Trainer(
        model,
        TrainingArguments(str(folder), **{**QUIET, **chosen}),
        DataCollatorWithPadding(tokenizer()),
        train_dataset=table,
        eval_dataset=table,
        processing_class=tokenizer(),
        **extra,
    )


def test_it_trains_the_adapter_and_its_head_alone(tmp_path, table):
    model = named()
    before = bits(model)
    wanted = {n for n, p in model.named_parameters() if p.requires_grad}
    run = trainer(model, tmp_path, table, max_steps=4)
    assert run.label_names == ["labels"]
    run.train()
    assert differing(before, bits(model)) == wanted
    assert all(of_adapter(n, "task") or n.startswith("heads.task.") for n in wanted)


def test_evaluation_is_the_forward_by_hand(tmp_path, table):
    model = named()
    seen = {}

    def judge(prediction: Any) -> dict[str, float]:
        seen["logits"], seen["labels"] = prediction
        return {"accuracy": float((prediction[0].argmax(-1) == prediction[1]).mean())}

    metrics = trainer(model, tmp_path, table, compute_metrics=judge).evaluate()
    batch = DataCollatorWithPadding(tokenizer())(
        [{k: row[k] for k in ("input_ids", "attention_mask", "labels")} for row in table]
    )
    with torch.no_grad():
        out = model.eval()(**batch)
    np.testing.assert_allclose(seen["logits"], out.logits.numpy(), rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(seen["labels"], batch["labels"].numpy())
    right = (out.logits.argmax(-1) == batch["labels"]).float().mean().item()
    assert metrics["eval_accuracy"] == pytest.approx(right)


class Stop(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == 2


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, table):
    chosen = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = named(dropout=0.1)
    trainer(whole, tmp_path / "whole", table, **chosen).train()
    trainer(named(dropout=0.1), tmp_path / "cut", table, callbacks=[Stop()], **chosen).train()
    resumed = named(dropout=0.1)
    resumed.get_head("task").load_state_dict(  # other weights
        {key: t + 1 for key, t in resumed.get_head("task").state_dict().items()}
    )
    trainer(resumed, tmp_path / "cut", table, **chosen).train(resume_from_checkpoint=True)
    assert not differing(bits(whole), bits(resumed))


def test_the_best_model_comes_back_and_its_adapters_load_alone(tmp_path, table):
    model = named()
    scores = iter([0.9, 0.1])
    seen = {}

    class Keep(TrainerCallback):
        def on_save(self, args, state, control, model=None, **kwargs):
            seen[state.global_step] = bits(model)

    run = trainer(
        model, tmp_path, table, max_steps=2, eval_strategy="steps", eval_steps=1,
        save_strategy="steps", save_steps=1, load_best_model_at_end=True,
        metric_for_best_model="made_up", greater_is_better=True, push_to_hub=False,
        compute_metrics=lambda _: {"made_up": next(scores)}, callbacks=[Keep()],
    )  # fmt: skip
    run.train()
    assert differing(seen[1], seen[2])
    assert not differing(bits(model), seen[1])
    run.save_model()
    assert files_in(tmp_path, "*.safetensors") == ["other/adapter", "task/adapter"]
    assert files_in(tmp_path / "checkpoint-1", "*.safetensors") == ["other/adapter", "task/adapter"]
    torch.manual_seed(0)
    again = AutoAdapterModel.from_config(tiny_config("bert"))
    for name in ("other", "task"):
        again.load_adapter(tmp_path / name, set_active=True)
    assert not differing(bits(model), bits(again))
    assert again.adapters_config == model.adapters_config
    assert again.known_heads() == ("other", "task")
    assert (repr(again.active_adapters), again.active_head) == ("Stack('task')", "task")
    assert again.config.id2label == {0: "sad", 1: "glad"}


@pytest.mark.parametrize("trains", ["all", "a part"])
def test_a_base_that_is_trained_is_in_the_checkpoint(tmp_path, table, trains):
    """All of it makes a whole model, which loads by itself; of a part the rest is not saved."""
    whole = named()
    (whole if trains == "all" else whole.base_model.pooler).requires_grad_(True)
    run = trainer(whole, tmp_path, table, max_steps=2, save_strategy="steps", save_steps=1)
    run.train()
    folder = tmp_path / "checkpoint-1"
    files = ["model"] if trains == "all" else ["other/adapter", "task/adapter", "unfrozen"]
    assert files_in(folder, "*.safetensors") == files
    resumed = named()
    (resumed if trains == "all" else resumed.base_model.pooler).requires_grad_(True)
    again = trainer(resumed, tmp_path, table, max_steps=2, save_strategy="steps", save_steps=1)
    again.train(resume_from_checkpoint=str(folder))
    assert not differing(bits(whole), bits(resumed))
    if trains == "all":
        run.save_model(tmp_path / "end")
        assert not differing(bits(whole), bits(AutoAdapterModel.from_pretrained(tmp_path / "end")))


def test_a_checkpoint_of_another_adapter_changes_nothing(tmp_path, table):
    trainer(named(), tmp_path, table, max_steps=1, save_strategy="steps", save_steps=1).train()
    other = named()
    other.add_adapter("task", "seq_bn[reduction_factor=4]", overwrite_ok=True)
    other.train_adapter("task")
    before = bits(other)
    run = trainer(other, tmp_path, table, max_steps=2)
    with pytest.raises(CheckpointError, match=r"checkpoint.*adapter 'task'"):
        run.train(resume_from_checkpoint=True)
    assert not differing(before, bits(other))


def test_labels_are_those_of_the_active_head(tmp_path, table):
    """The signature of the class has the labels of all heads."""
    model = named()
    model.add_qa_head("answers")
    model.active_head = "answers"
    assert trainer(model, tmp_path, table).label_names == ["start_positions", "end_positions"]
    assert trainer(model, tmp_path, table, label_names=["mine"]).label_names == ["mine"]


def test_a_trainer_of_text_to_text_does_so_too(tmp_path):
    def seq2seq(model: Any, steps: int) -> Seq2SeqTrainer:
        rows = [{"input_ids": [5, 6, 7, 1], "labels": [7 + i % 2, 6, 1]} for i in range(8)]
        arguments = Seq2SeqTrainingArguments(
            str(tmp_path), max_steps=steps, save_steps=2, predict_with_generate=True,
            **{**QUIET, "save_strategy": "steps"},
        )  # fmt: skip
        return Seq2SeqTrainer(
            model, arguments, train_dataset=rows, eval_dataset=rows,
            data_collator=lambda rows: {k: torch.tensor([r[k] for r in rows]) for k in rows[0]},
        )  # fmt: skip

    def writer() -> Any:
        torch.manual_seed(0)
        model = AutoAdapterModel.from_config(tiny_config("t5"))
        model.add_adapter("titles", "seq_bn[reduction_factor=4]")
        model.add_seq2seq_lm_head("titles")
        model.train_adapter("titles")
        return model

    whole = seq2seq(writer(), 4)
    assert whole.label_names == ["labels"]
    whole.train()
    assert files_in(tmp_path / "checkpoint-2", "*.safetensors") == ["titles/adapter"]
    resumed = seq2seq(writer(), 4)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert not differing(bits(whole.model), bits(resumed.model))
    assert resumed.predict(resumed.eval_dataset, max_length=5).predictions.shape[0] == 8


# --- datasets ---


def test_rows_as_tensors_train_as_rows_as_lists(tmp_path, table):
    """`with_format("torch")` and plain columns give the same adapter, in both trainers."""
    found = []
    for data in (table, table.with_format("torch")):
        model = named(dropout=0.0)
        # AdamW makes large differences of small ones
        trainer(model, tmp_path, data, max_steps=2, optim="sgd").train()
        found.append(bits(model))
        model = named(dropout=0.0)
        AdapterTrainer(
            model,
            TrainingArguments(str(tmp_path), **QUIET, max_steps=2, optim="sgd"),
            DataCollatorWithPadding(tokenizer()),
            train_dataset=data,
        ).train()
        found.append(bits(model))
    assert not differing(found[0], found[2])
    assert not differing(found[1], found[3])
    for key, tensor in found[0].items():
        torch.testing.assert_close(tensor, found[1][key], rtol=1e-4, atol=1e-5, msg=key)


def test_a_pipeline_goes_over_a_dataset_in_batches(table):
    model = named().eval()
    classify = pipeline("text-classification", model=model, tokenizer=tokenizer(), device="cpu")
    one_by_one = [classify(text) for text in table["text"]]
    batched = list(classify(KeyDataset(table, "text"), batch_size=4))
    assert [a["label"] for a in batched] == [a[0]["label"] for a in one_by_one]
    np.testing.assert_allclose(
        [a["score"] for a in batched], [a[0]["score"] for a in one_by_one], rtol=1e-5
    )
