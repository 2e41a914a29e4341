"""A sweep trains each combination of its grid as alone, and shows them in order."""

from __future__ import annotations

import pytest
from families import tiny_config
from multi_runs import QUIET, collate, losses, rows_of, trained
from transformers import TrainingArguments

import adapterzoo
from adapterzoo import AdapterTrainer, AutoAdapterModel
from adapterzoo.errors import ConfigError


def bert():
    import torch

    torch.manual_seed(0)
    config = tiny_config("bert")
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    return AutoAdapterModel.from_config(config).double()


def arguments(folder, **options):
    return TrainingArguments(str(folder), **{**QUIET, "max_steps": 3, **options})


GRID = {"config": ["lora[r=2]", "seq_bn[reduction_factor=4]"], "learning_rate": [1e-3, 1e-2, 0.1]}


def head(model, name):
    model.add_classification_head(name, num_labels=2)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    rows = rows_of("bert", "a")
    return adapterzoo.sweep(
        bert(), arguments(tmp_path_factory.mktemp("sweep")), rows, rows[:5], grid=GRID,
        add_head=head, data_collator=collate,
    )  # fmt: skip


def test_each_combination_is_a_run_in_order_of_the_metric(found):
    assert {(row["config"], row["learning_rate"]) for row in found.rows} == {
        (config, rate) for config in GRID["config"] for rate in GRID["learning_rate"]
    }
    order = [row["eval_loss"] for row in found.rows]
    assert order == sorted(order)
    assert found.best == found.rows[0]["name"]
    assert all(row["steps"] == 3 and row["parameters"] > 0 for row in found.rows)
    run = found.trainer.runs[found.best]
    assert run.trainer.args.learning_rate == found.rows[0]["learning_rate"]


def test_a_run_of_a_sweep_is_that_of_the_same_arguments_alone(found, tmp_path):
    many = found.trainer.model
    row = next(row for row in found.rows if row["name"] == "sweep-6")
    state = {n: p for n, p in many.named_parameters() if "sweep-6" in n.split(".")}
    alone = bert()
    # random numbers of the other adapters come before its own
    for config in GRID["config"]:
        for _ in GRID["learning_rate"]:
            name = f"sweep-{len(alone.adapters_config) + 1}"
            alone.add_adapter(name, config)
            head(alone, name)
    alone.train_adapter("sweep-6")
    rows = rows_of("bert", "a")
    trainer = AdapterTrainer(
        alone, arguments(tmp_path, learning_rate=row["learning_rate"]), train_dataset=rows,
        eval_dataset=rows[:5], data_collator=collate,
    )  # fmt: skip
    trainer.train()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(row["eval_loss"], abs=1e-9)
    now = trained(alone, ["sweep-6"])
    assert now.keys() == state.keys()
    for key, value in now.items():
        assert (value - state[key]).abs().max() < 1e-9
    assert losses(found.trainer.runs["sweep-6"].trainer) == pytest.approx(losses(trainer))


def test_the_table_and_the_plot_show_all_runs(found, tmp_path):
    lines = str(found).splitlines()
    assert len(lines) == 7
    assert lines[1].startswith(found.best)
    assert "eval_loss" in lines[0]
    found.plot(tmp_path / "sweep.svg")
    drawn = (tmp_path / "sweep.svg").read_text(encoding="utf-8")
    assert "svg" in drawn
    axes = found.plot().axes[0]
    assert [len(line.get_xdata()) for line in axes.get_lines()] == [3, 3]
    assert axes.get_xscale() == "log"


@pytest.mark.parametrize(
    ("grid", "more", "says"),
    [
        ({}, {}, "the keys are"),
        ({"config": []}, {}, "the keys are"),
        ({"learning_rates": [1.0]}, {}, "not 'learning_rates'"),
    ],
)
def test_a_wrong_grid_is_refused_before_anything_is_added(grid, more, says, tmp_path):
    model = bert()
    with pytest.raises(ConfigError, match=says):
        adapterzoo.sweep(model, arguments(tmp_path), rows_of("bert", "a"), grid=grid, **more)
    assert not model.adapters_config
