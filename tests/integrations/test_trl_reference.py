"""The reference of TRL's losses: no second base, and the scores of PEFT's copy of an adapter."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from transformers import PreTrainedModel
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, KTOConfig, KTOTrainer
from trl_world import LORA, PAIRS, QUIET, World, logged, pairs, words

import adapterzoo
import adapterzoo.model.reference
import adapterzoo.peft as library
from adapterzoo.errors import ConfigError, StateError

OURS = ["of_library", "named", "with_heads"]
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


@pytest.fixture
def loaded(monkeypatch):
    """The models that are loaded from a folder."""
    seen: list[Any] = []
    load = PreTrainedModel.from_pretrained.__func__
    monkeypatch.setattr(
        PreTrainedModel, "from_pretrained",
        classmethod(lambda cls, *args, **more: seen.append(args) or load(cls, *args, **more)),
    )  # fmt: skip
    return seen


def preferred(model: Any, folder: Any, **chosen: Any) -> Any:
    config = {k: chosen.pop(k) for k in [*chosen] if k not in ("peft_config", "ref_model")}
    return DPOTrainer(
        model,
        args=DPOConfig(str(folder / "dpo"), **QUIET, **config),
        train_dataset=pairs(),
        processing_class=words(),
        **chosen,
    )


def reference(trainer: Any) -> torch.Tensor:
    batch = next(iter(trainer.get_train_dataloader()))
    own = trainer.model if trainer.ref_model is None else trainer.ref_model
    return torch.cat(trainer.compute_ref_log_probs(own, batch))


SEEN = ("loss", "logps/chosen", "rewards/chosen", "rewards/margins")


@pytest.mark.parametrize("kind", OURS)
@pytest.mark.parametrize("fields", [{}, {"use_dora": True, "target_modules": ["q_proj"]}])
def test_a_trained_adapter_is_compared_with_a_copy_of_it_as_on_peft(world, kind, fields, loaded):
    adapter = world.trained(**fields)
    expected = preferred(world.of_peft(adapter), world.folder)
    before = reference(expected)
    expected.train()
    model = getattr(world, kind)(adapter)
    names = {*model.adapters_config}
    loaded.clear()
    found = preferred(model, world.folder)
    assert not loaded, "a second base"
    torch.testing.assert_close(reference(found), before, **CLOSE)
    found.train()
    # it has not learned
    torch.testing.assert_close(reference(found), before, **CLOSE)
    for mine, theirs in zip(logged(found, *SEEN), logged(expected, *SEEN), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3, abs=1e-4)
    base = preferred(world.plain(), world.folder, ref_model=world.plain())
    assert not torch.allclose(reference(base), before, rtol=1e-3), "the bare base"
    assert {*model.adapters_config} == names


def test_a_trained_head_is_compared_with_a_copy_of_it(world):
    """PEFT copies `modules_to_save` too; here a named head, without the adapter's file."""
    adapter = world.trained()
    model = world.with_heads(adapter)
    model.get_head("default").requires_grad_(True)
    own = {key: t.clone() for key, t in model.get_head("default").state_dict().items()}
    found = preferred(model, world.folder)
    before = reference(found)
    found.train()
    changed = model.get_head("default").state_dict()
    assert any(not torch.equal(changed[key], t) for key, t in own.items())
    torch.testing.assert_close(reference(found), before, **CLOSE)
    # the policy has its own values again, and so has its mode
    assert all(p.requires_grad for p in model.get_head("default").parameters())


@pytest.mark.parametrize(
    "make", [lambda: library.LoraConfig(**LORA), lambda: adapterzoo.LoRAConfig(r=4, alpha=6)]
)
def test_a_new_adapter_is_compared_with_the_base(world, make, loaded):
    loaded.clear()
    found = preferred(world.plain(), world.folder, peft_config=make())
    loaded.pop(0)
    assert not loaded, "a second base"
    expected = reference(preferred(world.plain(), world.folder, ref_model=world.plain()))
    torch.testing.assert_close(reference(found), expected, **CLOSE)
    found.train()
    torch.testing.assert_close(reference(found), expected, **CLOSE)


def test_dropout_is_off_in_the_reference_and_on_again_in_the_policy(world):
    adapter = world.trained(lora_dropout=0.5)
    model = world.named(adapter)
    found = preferred(model, world.folder, disable_dropout=False)
    model.train()
    torch.testing.assert_close(reference(found), reference(found))
    assert all(module.training for module in model.modules())


def good(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(text.split()))) for text in completions]


def grouped(model: Any, world: World, **chosen: Any) -> Any:
    config = {k: chosen.pop(k) for k in [*chosen] if k != "peft_config"}
    own = {**QUIET, "max_steps": 2, "per_device_train_batch_size": 2, **config}
    return GRPOTrainer(
        model,
        reward_funcs=good,
        args=GRPOConfig(
            str(world.folder / "grpo"), num_generations=2, max_completion_length=4, beta=0.1, **own
        ),
        train_dataset=pairs().select_columns("prompt"),
        processing_class=words(),
        **chosen,
    )


@pytest.mark.parametrize("kind", OURS[:2])
def test_grpo_compares_with_the_copy_too(world, kind, loaded):
    adapter = world.trained()
    runs = []
    for make in (world.of_peft, getattr(world, kind)):
        model = make(adapter)
        loaded.clear()
        run = grouped(model, world, temperature=1.0)
        assert not loaded, "a second base"
        run.train()
        runs.append(logged(run, "loss", "kl", "reward"))
    assert runs[0][0][1] == pytest.approx(0.0, abs=1e-6)
    for mine, theirs in zip(runs[1], runs[0], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-2, abs=1e-4)


@pytest.mark.parametrize("kind", OURS[:2])
def test_kto_compares_with_the_copy_too(world, kind, loaded):
    adapter = world.trained()
    rows = {
        "prompt": PAIRS["prompt"], "completion": [" good .", " bad ."] * 4,
        "label": [True, False] * 4,
    }  # fmt: skip
    runs = []
    for make in (world.of_peft, getattr(world, kind)):
        model = make(adapter)
        loaded.clear()
        run = KTOTrainer(
            model,
            args=KTOConfig(str(world.folder / "kto"), **QUIET),
            train_dataset=type(pairs()).from_dict(rows),
            processing_class=words(),
        )
        assert not loaded, "a second base"
        run.train()
        runs.append(logged(run, "loss"))
    for mine, theirs in zip(runs[1], runs[0], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3, abs=1e-4)


def test_a_reference_that_follows_is_refused(world):
    model = world.named(world.trained())
    with pytest.raises(ConfigError, match="sync_ref_model=False"):
        preferred(model, world.folder, sync_ref_model=True)
    # as the message says
    preferred(model, world.folder, sync_ref_model=False)


def test_a_reference_of_a_sharded_model_is_a_model_of_its_own(world, monkeypatch):
    """Its parameters are other objects then, whose places no copy can take."""
    adapter = world.trained()
    model = world.named(adapter)
    found = preferred(model, world.folder)
    monkeypatch.setattr(adapterzoo.model.reference, "groups_of", lambda _: ["a group"])
    with pytest.raises(StateError, match="ref_model"):
        reference(found)
    # as the message says
    own = world.named(adapter)
    torch.testing.assert_close(
        reference(preferred(model, world.folder, ref_model=own)), reference_of(world, adapter)
    )


def reference_of(world: World, adapter: Any) -> torch.Tensor:
    return reference(preferred(world.of_peft(adapter), world.folder))


def test_other_models_get_a_reference_as_ever(world, loaded):
    loaded.clear()
    model = world.plain()
    loaded.clear()
    trainer = preferred(model, world.folder)
    assert len(loaded) == 1
    assert type(trainer.ref_model) is type(model)
    assert isinstance(preferred(peft.get_peft_model(world.plain(), peft.LoraConfig(**LORA)),
                                world.folder).model, peft.PeftModel)  # fmt: skip
