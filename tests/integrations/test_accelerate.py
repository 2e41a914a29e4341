"""`accelerate` by hand: a loop of one's own around a model with adapters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import Accelerator, infer_auto_device_map
from accelerate.utils.dataclasses import get_module_class_from_name
from families import VOCABULARY, tiny_config
from torch import Tensor
from transformers import AutoModelForCausalLM

import adapterzoo
from adapterzoo import AutoAdapterModel


def ready(family: str = "bert") -> Any:
    torch.manual_seed(0)
    config = tiny_config(family)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    model = AutoAdapterModel.from_config(config)
    model.add_adapter("task", "seq_bn")
    model.add_classification_head("task")
    model.train_adapter("task")
    return model


def batches(count: int, size: int = 2) -> list[dict[str, Tensor]]:
    source = torch.Generator().manual_seed(0)
    return [
        {
            "input_ids": torch.randint(3, VOCABULARY, (size, 6), generator=source),
            "labels": torch.randint(0, 2, (size,), generator=source),
        }
        for _ in range(count)
    ]


def bits(model: Any) -> dict[str, Tensor]:
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


def prepared(accelerator: Accelerator, model: Any, optimizer: str = "AdamW") -> tuple[Any, Any]:
    trained = [p for p in model.parameters() if p.requires_grad]
    made = getattr(torch.optim, optimizer)(trained, lr=1e-2)
    return accelerator.prepare(model, made)


def steps(accelerator: Accelerator, model: Any, optimizer: Any, data: Any) -> None:
    for batch in data:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()


def test_accumulated_steps_are_one_step_on_the_whole_batch():
    data = batches(4)
    by_hand = ready().train()
    trained = [p for p in by_hand.parameters() if p.requires_grad]
    plain = torch.optim.SGD(trained, lr=1e-2)
    for pair in (data[:2], data[2:]):
        by_hand(**{k: torch.cat([batch[k] for batch in pair]) for k in pair[0]}).loss.backward()
        plain.step()
        plain.zero_grad()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = prepared(accelerator, ready().train(), "SGD")
    steps(accelerator, model, optimizer, data)
    found = bits(accelerator.unwrap_model(model))
    for key, tensor in bits(by_hand).items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-5, atol=1e-7, msg=key)


def test_bf16_computes_in_bf16_and_trains_parameters_in_float32():
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    start = ready().train()
    before, names = bits(start), {n for n, p in start.named_parameters() if p.requires_grad}
    model, optimizer = prepared(accelerator, start)
    seen = []
    hidden = start.base_model.encoder.layer[0].intermediate.dense
    hidden.register_forward_hook(lambda *given: seen.append(given[-1].dtype))
    steps(accelerator, model, optimizer, batches(2))
    assert seen == [torch.bfloat16] * 2
    assert model(**batches(1)[0]).logits.dtype == torch.float32
    own = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    assert own is start
    after = bits(own)
    assert {t.dtype for t in after.values() if t.is_floating_point()} == {torch.float32}
    assert {key for key in after if not torch.equal(after[key], before[key])} == names


def test_a_saved_state_goes_on_as_if_nothing_had_stopped(tmp_path):
    data = batches(4)
    accelerator = Accelerator(cpu=True)
    model, optimizer = prepared(accelerator, ready().train())
    steps(accelerator, model, optimizer, data[:2])
    accelerator.save_state(tmp_path / "state")
    steps(accelerator, model, optimizer, data[2:])
    whole = bits(accelerator.unwrap_model(model))
    accelerator.load_state(tmp_path / "state")
    assert any(not torch.equal(whole[k], t) for k, t in bits(model).items())
    steps(accelerator, model, optimizer, data[2:])
    assert all(torch.equal(whole[key], tensor) for key, tensor in bits(model).items())


@pytest.mark.parametrize(
    "method",
    ["lora", "seq_bn[leave_out=[0]]", "seq_bn_inv", "loreft", "prefix_tuning", "prompt_tuning"],
)
def test_modules_keep_the_names_of_their_classes(method):
    """By which accelerate finds blocks, for auto-wrap and for `device_map`."""
    model = adapterzoo.init(AutoModelForCausalLM.from_config(tiny_config("llama")))
    before = {path: type(module).__name__ for path, module in model.named_modules()}
    sizes = {0: "60KB", "cpu": "10GB"}
    no_split = list(model._no_split_modules)
    model.add_adapter("a", method)
    now = {path: type(module).__name__ for path, module in model.named_modules()}
    assert now | before == now
    for name in no_split:
        found = get_module_class_from_name(model, name)
        assert all(isinstance(block, found) for block in model.model.layers)
        assert sum(isinstance(module, found) for module in model.modules()) == 2
    placed = infer_auto_device_map(
        model, sizes, no_split_module_classes=no_split, offload_buffers=True
    )
    inside = [path for path in placed if path.startswith("model.layers.")]
    assert all(path.count(".") == 2 for path in inside), placed
