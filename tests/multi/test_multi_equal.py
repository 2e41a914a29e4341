"""Many adapters in one run train as each alone: over methods and families, in float64."""

from __future__ import annotations

import pytest
import torch
from multi_runs import losses, one_by_one, together, trained
from variants import VARIANTS

# it makes sequences longer
TURNS = {"prompt_tuning"}


def without_dropout(config):
    """The config without anything random in its forward."""
    if hasattr(config, "configs"):
        return type(config)(*map(without_dropout, config.configs))
    random = [n for n in config.field_names() if "dropout" in n or n == "stochastic_depth"]
    return config.replace(**{n: 0.0 for n in random if getattr(config, n)})


METHODS = {text: without_dropout(config) for text, config in VARIANTS.items()}


def same(found, trainer, family):
    # losses of language models round logits to float32, T5's norms too, and Adam enlarges that
    limit = {"bert": 1e-9, "gpt_neox": 1e-6, "t5": 1e-4}[family]
    for name, (tensors, logged) in found.items():
        now = trained(trainer.model, [name])
        assert now.keys() == tensors.keys()
        for key, value in tensors.items():
            torch.testing.assert_close(now[key], value, rtol=0, atol=limit, msg=key)
        assert losses(trainer.runs[name].trainer) == pytest.approx(logged, abs=limit)


@pytest.mark.parametrize("family", ["gpt_neox", "bert", "t5"])
def test_four_methods_train_as_alone(family, tmp_path):
    configs = {
        "a": "lora[r=4]", "b": "seq_bn[reduction_factor=4]", "c": "dora[r=2]",
        "d": "prefix_tuning[prefix_length=3]" if family != "t5" else "ia3",
    }  # fmt: skip
    if family == "bert":
        configs["d"] = "loreft[dropout=0.0]"
    trainer = together(family, configs, tmp_path / "many")
    before = trained(trainer.model, configs)
    trainer.train()
    assert all(run.is_mixed for run in trainer.runs.values())
    assert [run.trainer.state.global_step for run in trainer.runs.values()] == [2, 3, 4, 2]
    same(one_by_one(family, configs, tmp_path / "one"), trainer, family)
    after = trained(trainer.model, configs)
    assert any(not torch.equal(after[key], before[key]) for key in before)


@pytest.mark.sweep
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["gpt_neox", "bert", "t5"])
def test_each_method_trains_as_alone(family, method, tmp_path):
    """Beside another method, and another adapter of its own; what cannot be mixed takes turns."""
    configs = {"own": METHODS[method], "lora": "lora[r=4]", "twin": METHODS[method]}
    trainer = together(family, configs, tmp_path / "many")
    trainer.train()
    assert [run.is_mixed for run in trainer.runs.values()] == [
        method not in TURNS, True, method not in TURNS,
    ]  # fmt: skip
    same(one_by_one(family, configs, tmp_path / "one"), trainer, family)
