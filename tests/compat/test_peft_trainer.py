"""transformers' own `Trainer` over models of `adapterzoo.peft`: stopped, resumed, the best kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from families import tiny_config
from peft_world import QUIET
from safetensors.torch import load_file
from transformers import BitsAndBytesConfig, Trainer, TrainingArguments, trainer_utils

import adapterzoo.peft as library
from adapterzoo.errors import CheckpointError

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]
STEPS, STOP = 6, 3
CONFIGS = {
    "lora": lambda: library.LoraConfig(r=4, lora_dropout=0.1),
    "lora_with_biases": lambda: library.LoraConfig(r=4, bias="all", lora_dropout=0.1),
    "vera": lambda: library.VeraConfig(r=4, save_projection=False),
    "prefix": lambda: library.PrefixTuningConfig(num_virtual_tokens=3),
    "tokens": lambda: library.LoraConfig(r=4, trainable_token_indices=[1, 2]),
}


def made(
    config: Any = None, auto: str = "AutoModelForSequenceClassification", family: str = "bert"
) -> Any:
    torch.manual_seed(0)
    base = getattr(transformers, auto).from_config(tiny_config(family))
    return library.get_peft_model(base, config or CONFIGS["lora"]())


def rows() -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 50, (12, 7), generator=draw)  # [rows, length]
    return [{"input_ids": row, "labels": n % 2} for n, row in enumerate(tokens)]


def trainer(model: Any, folder: Path, **more: Any) -> Trainer:
    arguments = TrainingArguments(
        str(folder), max_steps=STEPS, per_device_train_batch_size=2, logging_steps=1,
        save_steps=STOP, learning_rate=1e-2, use_cpu=True, report_to="none", disable_tqdm=True,
        **more,
    )  # fmt: skip
    return Trainer(model, arguments, train_dataset=rows(), eval_dataset=rows()[:4])


def losses(of: Trainer) -> list[float]:
    return [line["loss"] for line in of.state.log_history if "loss" in line]


@pytest.mark.long
@pytest.mark.parametrize("name", CONFIGS)
def test_a_stopped_training_goes_on_bit_for_bit(name, tmp_path):
    family = "llama" if name == "tokens" else "bert"
    whole = trainer(made(CONFIGS[name](), family=family), tmp_path / "whole")
    whole.model.config.pad_token_id = 0
    whole.train()
    stopped = tmp_path / "whole" / f"checkpoint-{STOP}"
    again = trainer(made(CONFIGS[name](), family=family), tmp_path / "again")
    again.model.config.pad_token_id = 0
    again.train(resume_from_checkpoint=str(stopped))
    assert losses(again) == losses(whole)
    assert len(losses(whole)) == STEPS
    expected = whole.model.state_dict()
    assert all(torch.equal(t, expected[key]) for key, t in again.model.state_dict().items())
    # the base model is not in it
    stored = load_file(stopped / "model.safetensors")
    trained = {n for n, p in whole.model.named_parameters() if p.requires_grad}
    assert trained <= stored.keys()
    assert sum(t.numel() for t in stored.values()) < sum(t.numel() for t in expected.values()) / 2
    # what a trainer saves at the end is PEFT's folder alone
    whole.save_model(str(tmp_path / "end"))
    assert not (tmp_path / "end" / "model.safetensors").exists()


@pytest.mark.parametrize("trains_base", [False, True])
def test_a_trainer_that_knows_models_has_files_of_adapters(trains_base, tmp_path, monkeypatch):
    for name in ("PeftModel", "PeftMixedModel"):
        for module in (trainer_utils, transformers.trainer):
            monkeypatch.setattr(module, name, getattr(library, name), raising=False)

    def fresh() -> Any:
        model = made()
        # PEFT's files have no place for it
        model.bert.pooler.requires_grad_(trains_base)
        return model

    whole = trainer(fresh(), tmp_path / "whole")
    whole.train()
    stopped = tmp_path / "whole" / f"checkpoint-{STOP}"
    assert (stopped / "model.safetensors").is_file() == trains_base
    again = trainer(fresh(), tmp_path / "again")
    again.train(resume_from_checkpoint=str(stopped))
    assert losses(again) == losses(whole)


def test_the_best_model_is_loaded(tmp_path):
    # the loss falls, so that the greatest one is the first
    best = trainer(
        made(), tmp_path, load_best_model_at_end=True, metric_for_best_model="loss",
        greater_is_better=True, eval_strategy="steps", eval_steps=STOP,
    )  # fmt: skip
    optimizer_sees = {id(p) for p in best.model.parameters()}
    best.train()
    seen = [line["eval_loss"] for line in best.state.log_history if "eval_loss" in line]
    assert seen[0] > seen[1]
    assert best.evaluate()["eval_loss"] == seen[0]
    assert {id(p) for p in best.model.parameters()} == optimizer_sees


def test_several_adapters_go_on(tmp_path):
    def two() -> Any:
        model = made()
        model.add_adapter("other", library.LoraConfig(r=2))
        model.set_adapter("other")
        return model

    whole = trainer(two(), tmp_path / "whole")
    whole.train()
    stopped = tmp_path / "whole" / f"checkpoint-{STOP}"
    assert (stopped / "other" / "adapter_model.safetensors").is_file()
    again = trainer(two(), tmp_path / "again")
    again.train(resume_from_checkpoint=str(stopped))
    assert losses(again) == losses(whole)


def test_peft_reads_a_checkpoint(tmp_path):
    whole = trainer(made(), tmp_path)
    whole.train()
    base = made().unload()
    read = peft.PeftModel.from_pretrained(base, tmp_path / f"checkpoint-{STEPS}")
    inputs = {"input_ids": torch.tensor([[5, 6, 7]])}
    expected = whole.model.eval()(**inputs).logits
    torch.testing.assert_close(read.eval()(**inputs).logits, expected, rtol=1e-5, atol=1e-6)


def test_a_checkpoint_of_another_adapter_changes_nothing(tmp_path):
    trainer(made(), tmp_path / "a").train()
    other = trainer(made(library.LoraConfig(r=8)), tmp_path / "b")
    before = {key: t.clone() for key, t in other.model.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"loras\.default\.lora_A .*file \[4, .*model \[8, "):
        other.train(resume_from_checkpoint=str(tmp_path / "a" / f"checkpoint-{STOP}"))
    assert all(torch.equal(t, before[key]) for key, t in other.model.state_dict().items())


def test_whole_models_load_as_before(tmp_path):
    model = made()
    tensors = {key: t + 1 for key, t in model.state_dict().items() if t.is_floating_point()}
    found = model.load_state_dict(tensors, strict=False)
    assert not found.unexpected_keys
    assert all(torch.equal(model.state_dict()[key], t) for key, t in tensors.items())
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({})


def test_a_quantized_base_is_trained(tmp_path):
    pytest.importorskip("bitsandbytes")
    transformers.LlamaForCausalLM(tiny_config("llama")).save_pretrained(tmp_path / "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", quantization_config=BitsAndBytesConfig(load_in_4bit=True)
    )
    model = library.get_peft_model(library.prepare_model_for_kbit_training(base), CONFIGS["lora"]())
    learned = trainer(model, tmp_path / "out")
    tokens = rows()[0]["input_ids"]
    learned.train_dataset = [{"input_ids": tokens, "labels": tokens}] * 2 * STEPS
    learned.train()
    assert losses(learned)[-1] < losses(learned)[0]
