"""Runs of many adapters: heads, metrics, resuming, joining, and what is refused."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import tiny_config
from multi_runs import QUIET, arguments, collate, losses, model_of, rows_of, together, trained
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    EarlyStoppingCallback,
    TrainerCallback,
    TrainingArguments,
)

import adapterzoo
from adapterzoo import AdapterTrainer, AutoAdapterModel, Fuse, MultiAdapterTrainer, Stack
from adapterzoo.errors import (
    CheckpointError,
    ConfigError,
    DuplicateNameError,
    StateError,
    UnknownNameError,
)

TWO = {"a": "lora[r=4]", "b": "seq_bn[reduction_factor=4]"}


def same(one: dict[str, Any], two: dict[str, Any]) -> None:
    assert one.keys() == two.keys()
    for key, value in one.items():
        # losses of language models round logits to float32
        torch.testing.assert_close(two[key], value, rtol=0, atol=1e-6, msg=key)


def equal(one: dict[str, Any], two: dict[str, Any]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


# --- what each run has of its own ---


def heads_model() -> Any:
    torch.manual_seed(0)
    config = tiny_config("bert")
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    model = AutoAdapterModel.from_config(config).double()
    for name in ("class", "tags", "span", "number"):
        model.add_adapter(name, "lora[r=2,init_weights='bert']")
    model.add_classification_head("class", num_labels=2)
    model.add_tagging_head("tags", num_labels=3)
    model.add_qa_head("span")
    model.add_classification_head("number", num_labels=1)
    return model


def heads_rows(name: str) -> list[dict[str, Any]]:
    source = torch.Generator().manual_seed(len(name))
    found = []
    for i in range(8):
        ids = torch.randint(3, 99, (5 + len(name) % 3,), generator=source)
        row: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if name == "class":
            row["labels"] = torch.tensor(i % 2)
        elif name == "tags":
            row["labels"] = ids % 3
        elif name == "span":
            row |= {"start_positions": torch.tensor(i % 2), "end_positions": torch.tensor(2)}
        else:
            row["labels"] = torch.tensor(float(i), dtype=torch.float64)
        found.append(row)
    return found


def accuracy(given: Any) -> dict[str, float]:
    return {"accuracy": float((np.argmax(given.predictions, -1) == given.label_ids).mean())}


def test_heads_losses_metrics_and_the_best_model_are_those_of_each_alone(tmp_path):
    def options(name: str, where: str) -> dict[str, Any]:
        args = TrainingArguments(
            str(tmp_path / where / name),
            **{**QUIET, "save_strategy": "steps"},
            max_steps=4, eval_strategy="steps", eval_steps=1, save_steps=1,
            per_device_train_batch_size=3, learning_rate=0.05, load_best_model_at_end=True,
            label_smoothing_factor=0.1 if name == "tags" else 0.0,
        )  # fmt: skip
        own: dict[str, Any] = {"compute_metrics": accuracy} if name == "class" else {}
        rows = heads_rows(name)
        return {"args": args, "train_dataset": rows, "eval_dataset": rows[:5], **own}

    model = heads_model()
    many = MultiAdapterTrainer(model)
    names = ("class", "tags", "span", "number")
    for name in names:
        many.add(name, **options(name, "many"))
    many.train()
    metrics = many.evaluate()
    assert all(run.is_mixed for run in many.runs.values())
    for name in names:
        other = heads_model()
        other.train_adapter(name)
        alone = AdapterTrainer(other, **options(name, "one"))
        alone.train()
        same(trained(other, [name]), trained(model, [name]))
        mine = many.runs[name].trainer
        assert losses(mine) == pytest.approx(losses(alone), abs=1e-6)
        assert mine.state.best_global_step == alone.state.best_global_step
        expected = alone.evaluate()
        assert metrics[name]["eval_loss"] == pytest.approx(expected["eval_loss"], abs=1e-6)
        files = [tmp_path / where / name / "checkpoint-2" for where in ("one", "many")]
        # the file of the other adapters is not in it
        assert {p.name for p in files[1].iterdir() if p.is_dir()} == {name}
        one, two = (load_file(f / name / "adapter.safetensors") for f in files)
        same(one, two)
    assert "eval_accuracy" in metrics["class"]


def test_compositions_and_fusions_are_trained_too(tmp_path):
    def make() -> Any:
        model = model_of("bert", {"language": "seq_bn", "x": "seq_bn", "y": "seq_bn", "z": "lora"})
        model.add_adapter_fusion(["x", "y"])
        model.add_classification_head("x,y", num_labels=2)
        return model

    setups = {"stack": Stack("language", "z"), "fused": Fuse("x", "y")}
    many = MultiAdapterTrainer(make())
    for name, setup in setups.items():
        many.add(
            name, arguments(tmp_path / name, 1), rows_of("bert", name), data_collator=collate,
            adapter_names=setup,
        )  # fmt: skip
    many.train()
    assert all(run.is_mixed for run in many.runs.values())
    mine = dict(many.model.named_parameters())
    for name, setup in setups.items():
        other = make()
        if name == "fused":
            other.train_adapter_fusion(setup)
        else:
            other.train_adapter(setup)
        own = {n: p for n, p in other.named_parameters() if p.requires_grad}
        assert own.keys() == many.runs[name].parameters.keys()
        AdapterTrainer(
            other, arguments(tmp_path / "one" / name, 1), train_dataset=rows_of("bert", name),
            data_collator=collate,
        ).train()  # fmt: skip
        same(own, {n: mine[n] for n in own})


@pytest.mark.parametrize("more", ["", ",intermediate_lora=True,output_lora=True"])
def test_router_losses_are_those_of_each_alone(more, tmp_path):
    def make() -> Any:
        torch.manual_seed(0)
        config = tiny_config("mixtral")
        config.output_router_logits, config.router_aux_loss_coef = True, 0.5
        model = adapterzoo.init(
            AutoModelForCausalLM.from_config(config, experts_implementation="eager")
        ).double()
        for name in TWO:
            model.add_adapter(name, f"lora[r=4,init_weights='bert'{more}]")
        return model

    many = MultiAdapterTrainer(make())
    for number, name in enumerate(TWO):
        many.add(name, arguments(tmp_path / name, number), rows_of("gpt_neox", name),
                 data_collator=collate)  # fmt: skip
    many.train()
    assert all(run.is_mixed for run in many.runs.values())
    for number, name in enumerate(TWO):
        other = make()
        other.train_adapter(name)
        alone = AdapterTrainer(
            other, arguments(tmp_path / "one" / name, number), data_collator=collate,
            train_dataset=rows_of("gpt_neox", name),
        )  # fmt: skip
        alone.train()
        same(trained(other, [name]), trained(many.model, [name]))
        assert losses(many.runs[name].trainer) == pytest.approx(losses(alone), abs=1e-6)


# --- when runs come and go ---


class Stop(TrainerCallback):
    """Raises after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("at_once", [None, 1])
def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(at_once, dropout, tmp_path):
    configs = {"a": f"lora[r=4,dropout={dropout}]", "b": f"seq_bn[dropout={dropout}]"}
    # one accumulates two batches: what both saved after four batches goes together
    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2}

    def make(where: str) -> MultiAdapterTrainer:
        made = together("gpt_neox", configs, tmp_path / where, **options)
        made.at_once = at_once
        return made

    whole = make("whole")
    whole.train()
    for name, step in (("a", 5), ("b", 3)):
        killed = make(f"killed {name}")
        killed.runs[name].trainer.add_callback(Stop(step))
        with pytest.raises(KeyboardInterrupt):
            killed.train()
        assert not equal(trained(whole.model, configs), trained(killed.model, configs))
        # nothing of it is left in the model
        assert "forward" not in vars(killed.model._backbone)
        # in a new process, or after the error in the same one
        again = make(f"killed {name}") if name == "a" else killed
        if again is killed:
            killed.runs[name].trainer.remove_callback(Stop)
        results = again.train(resume_from_checkpoint=True)
        assert {n: result.global_step for n, result in results.items()} == {"a": 6, "b": 6}
        assert equal(trained(whole.model, configs), trained(again.model, configs))


def test_a_checkpoint_is_that_of_the_adapter_alone(tmp_path):
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    many = together("gpt_neox", TWO, tmp_path / "many", **options)
    many.train()
    alone = model_of("gpt_neox", {"a": TWO["a"]})
    alone.train_adapter("a")
    trainer = AdapterTrainer(
        alone, arguments(tmp_path / "one", 0, **options), train_dataset=rows_of("gpt_neox", "a"),
        data_collator=collate,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=str(tmp_path / "many" / "a" / "checkpoint-2"))
    same(trained(alone, ["a"]), trained(many.model, ["a"]))


def test_a_checkpoint_that_was_not_finished_is_not_resumed(tmp_path):
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = together("gpt_neox", TWO, tmp_path, **options)
    whole.train()
    expected = trained(whole.model, TWO)
    (tmp_path / "a" / "checkpoint-4" / "trainer_state.json").write_text("{", encoding="utf-8")
    (tmp_path / "b" / "checkpoint-4" / "trainer_state.json").unlink()
    again = together("gpt_neox", TWO, tmp_path, **options)
    again.train(resume_from_checkpoint=True)
    # saved at different times: equal up to the order of sums
    same(expected, trained(again.model, TWO))
    with pytest.raises(CheckpointError, match=r"no complete trainer_state\.json"):
        again.train(resume_from_checkpoint={"a": str(tmp_path / "a" / "checkpoint-3")})


class Join(TrainerCallback):
    """Adds an adapter and its run after the second step of another."""

    def __init__(self, trainer: MultiAdapterTrainer, folder: Path) -> None:
        self.trainer, self.folder = trainer, folder

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            torch.manual_seed(12)
            self.trainer.model.add_adapter("c", "lora[r=2]")
            self.trainer.add("c", arguments(self.folder, 2), rows_of("gpt_neox", "c"),
                             data_collator=collate)  # fmt: skip


def test_an_adapter_joins_while_others_train(tmp_path):
    many = together("gpt_neox", TWO, tmp_path, max_steps=5)
    many.runs["a"].trainer.add_callback(Join(many, tmp_path / "c"))
    results = many.train()
    assert list(results) == ["a", "b", "c"]
    assert many.runs["c"].is_mixed
    whole = together("gpt_neox", {**TWO, "c": "lora[r=2]"}, tmp_path / "whole", max_steps=5)
    for name, run in whole.runs.items():
        run.trainer.args.max_steps = 4 if name == "c" else 5
    whole.train()
    same(trained(whole.model, ["a", "b", "c"]), trained(many.model, ["a", "b", "c"]))


def test_no_more_runs_than_asked_train_at_once(tmp_path):
    configs = dict.fromkeys("abcd", "lora[r=2]")
    seen: list[set[str]] = []

    class See(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            seen.append({run.name for run in many._running})

    many = together("gpt_neox", configs, tmp_path / "few")
    many.at_once = 2
    for run in many.runs.values():
        run.trainer.add_callback(See())
    many.train()
    assert max(map(len, seen)) == 2
    assert set().union(*seen) == {*configs}
    whole = together("gpt_neox", configs, tmp_path / "all")
    whole.train()
    same(trained(whole.model, configs), trained(many.model, configs))


def test_a_run_may_stop_early(tmp_path):
    many = together(
        "bert", TWO, tmp_path, max_steps=20, eval_strategy="steps", eval_steps=1,
        save_strategy="steps", save_steps=1, load_best_model_at_end=True, learning_rate=0.0,
    )  # fmt: skip
    stopped = many.runs["a"].trainer
    stopped.add_callback(EarlyStoppingCallback(early_stopping_patience=2))
    results = many.train()
    assert (results["a"].global_step, results["b"].global_step) == (3, 20)


@pytest.mark.parametrize("call", ["evaluate", "predict"])
def test_the_trainer_of_a_run_uses_its_adapter_whatever_is_active(call, tmp_path):
    many = together("bert", TWO, tmp_path)
    many.train()
    # new arguments empty what accelerate keeps, as any other trainer does
    arguments(tmp_path / "other", 0)
    many.model.set_active_adapters("a")
    many.model.active_head = "a"
    trainer = many.runs["b"].trainer
    rows = rows_of("bert", "b", 4)
    found = getattr(trainer, call)(rows)
    alone = model_of("bert", TWO)
    alone.load_state_dict(many.model.state_dict())
    alone.train_adapter("b")
    expected = getattr(
        AdapterTrainer(alone, trainer.args, data_collator=collate, eval_dataset=rows), call
    )(rows)
    found, expected = (getattr(each, "metrics", each) for each in (found, expected))
    key = "eval_loss" if call == "evaluate" else "test_loss"
    assert found[key] == pytest.approx(expected[key], abs=1e-6)
    assert str(many.model.active_adapters) == str(Stack("a"))


def test_random_numbers_of_a_run_do_not_depend_on_others(tmp_path):
    """With dropout the first run takes its turn alone, once with another run beside it."""
    rows = rows_of("gpt_neox", "a")
    found = []
    for configs in ({"a": "lora[dropout=0.3]"}, {"a": "lora[dropout=0.3]", "p": "prompt_tuning"}):
        many = together("gpt_neox", configs, tmp_path / str(len(configs)))
        many.train()
        found.append(trained(many.model, ["a"]))
    alone = model_of("gpt_neox", {"a": "lora[dropout=0.3]"})
    alone.train_adapter("a")
    AdapterTrainer(alone, arguments(tmp_path / "one", 0), train_dataset=rows,
                   data_collator=collate).train()  # fmt: skip
    assert all(equal(trained(alone, ["a"]), each) for each in found)


# --- what is refused ---


def test_what_would_be_wrong_is_refused_before_anything_changes(tmp_path):
    model = model_of("gpt_neox", TWO)
    many = MultiAdapterTrainer(model)
    add = functools.partial(many.add, train_dataset=rows_of("gpt_neox", "a"), data_collator=collate)
    add("a", arguments(tmp_path / "a", 0))
    flags = [p.requires_grad for p in model.parameters()]
    for error, says, call in (
        (DuplicateNameError, "a run 'a'", lambda: add("a", arguments(tmp_path / "b", 0))),
        (ConfigError, "writes into", lambda: add("b", arguments(tmp_path / "a", 0))),
        (UnknownNameError, "'x'", lambda: add("x", arguments(tmp_path / "b", 0))),
        (ConfigError, "bf16=True", lambda: add("b", arguments(tmp_path / "b", 0, bf16=True))),
        (
            ConfigError,
            "neftune_noise_alpha",
            lambda: add("b", arguments(tmp_path / "b", 0, neftune_noise_alpha=5.0)),
        ),
        (
            ConfigError,
            "already trains ",
            lambda: add("b", arguments(tmp_path / "b", 0), adapter_names=Stack("a", "b")),
        ),
        (CheckpointError, "no run has", lambda: many.train(resume_from_checkpoint=True)),
        (UnknownNameError, "'z'", lambda: many.train(resume_from_checkpoint={"z": "x"})),
        (StateError, "no runs", lambda: MultiAdapterTrainer(model).train()),
        (StateError, "run 'a'", lambda: many.runs["a"].trainer.train()),
        (ConfigError, "at_once=0", lambda: MultiAdapterTrainer(model, at_once=0)),
        (StateError, "no adapters", lambda: MultiAdapterTrainer(torch.nn.Linear(2, 2))),
    ):
        with pytest.raises(error, match=says):
            call()
    assert [p.requires_grad for p in model.parameters()] == flags
    assert list(many.runs) == ["a"]


def test_a_checkpoint_of_another_adapter_is_refused_by_name(tmp_path):
    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2}
    together("gpt_neox", TWO, tmp_path, **options).train()
    again = together("gpt_neox", TWO, tmp_path / "again", **options)
    with pytest.raises(CheckpointError, match="run 'a'"):
        again.train(resume_from_checkpoint={"a": str(tmp_path / "b" / "checkpoint-2")})


def test_an_error_in_one_run_ends_all_and_leaves_the_model_usable(tmp_path):
    many = together("gpt_neox", TWO, tmp_path)

    def broken(rows):
        raise ZeroDivisionError("in the data")

    many.runs["b"].trainer.data_collator = broken
    with pytest.raises(ZeroDivisionError, match="in the data"):
        many.train()
    ids = torch.tensor([[5, 6, 7]])
    many.model.set_active_adapters("a")
    assert many.model(input_ids=ids, labels=ids).loss > 0


def test_options_are_those_of_a_run():
    names = {field.name for field in dataclasses.fields(adapterzoo.multi.AdapterRun)}
    assert {"name", "setup", "trainer", "result", "is_mixed"} <= names
