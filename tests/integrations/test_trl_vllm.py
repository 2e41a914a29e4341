"""What TRL sends to a colocated vLLM, which a stand-in records and loads into a plain model."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trl.trainer.grpo_trainer
from accelerate.state import AcceleratorState
from datasets import Dataset, disable_progress_bars, enable_progress_bars
from torch import Tensor
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer
from trl.generation import vllm_generation
from trl_world import LORA, PAIRS, QUIET, World, words

import adapterzoo
import adapterzoo.peft as library
from adapterzoo.errors import StateError

made: list[Engine] = []


class Engine:
    """vLLM's `LLM`: a plain model that takes weights by the names of a checkpoint, and generates.

    Attributes:
        sent: the weights of each synchronisation, by name.
    """

    def __init__(self, model: str, **_: Any) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model).eval()
        self.sent: list[dict[str, Tensor]] = [{}]
        runner = SimpleNamespace(model=SimpleNamespace(load_weights=self.load_weights))
        worker = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
        self.llm_engine = SimpleNamespace(
            model_executor=worker, model_config=SimpleNamespace(max_model_len=64)
        )
        made.append(self)

    def load_weights(self, weights: list[tuple[str, Tensor]]) -> None:
        own = dict(self.model.named_parameters())
        for name, tensor in weights:
            assert name not in self.sent[-1], f"{name} is sent twice"
            own[name].data.copy_(tensor)
            self.sent[-1][name] = tensor.clone()

    def reset_prefix_cache(self) -> None:
        assert self.sent[-1].keys() == dict(self.model.named_parameters()).keys()
        self.sent.append({})

    def generate(self, prompts: Any, sampling_params: Any, use_tqdm: bool) -> list[Any]:
        outputs = []
        for number, prompt in enumerate(prompts):
            ids = torch.tensor([prompt["prompt_token_ids"]])
            # other tokens in each row, or there is no advantage
            logits = self.model(ids).logits[0, -1]
            first = logits.topk(len(prompts)).indices[number].item()
            scores = logits.log_softmax(-1)[first].item()
            row = SimpleNamespace(
                token_ids=[first], logprobs=[{first: SimpleNamespace(logprob=scores, rank=1)}]
            )
            outputs.append(SimpleNamespace(prompt_token_ids=ids[0].tolist(), outputs=[row]))
        return outputs


@pytest.fixture
def world(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_generation, "is_vllm_available", lambda: True)
    monkeypatch.setattr(vllm_generation, "LLM", Engine, raising=False)
    monkeypatch.setattr(vllm_generation, "SamplingParams", SimpleNamespace, raising=False)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
        monkeypatch.delenv(name)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_PORT", str(free.getsockname()[1]))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(trl.trainer.grpo_trainer, "is_vllm_available", lambda: True, raising=False)
    disable_progress_bars()
    yield World(tmp_path)
    enable_progress_bars()
    made.clear()
    # what TRL has set of the environment makes a group of one process
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    AcceleratorState._reset_state(reset_partial_state=True)


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(ids[0]) for ids in completion_ids]


def synchronised(model: Any, world: World, **chosen: Any) -> list[dict[str, Tensor]]:
    """The weights that an engine was sent while a model was trained."""
    own = {**QUIET, "max_steps": 2, "per_device_train_batch_size": 2}
    GRPOTrainer(
        model,
        reward_funcs=reward,
        args=GRPOConfig(
            str(world.folder / "out"), num_generations=2, max_completion_length=1, use_vllm=True,
            vllm_mode="colocate", **own,
        ),
        train_dataset=Dataset.from_dict({"prompt": PAIRS["prompt"]}),
        processing_class=words(),
        **chosen,
    ).train()  # fmt: skip
    found = made.pop().sent[:-1]
    assert len(found) == 2
    return found


@pytest.mark.parametrize("kind", ["of_library", "named", "with_heads"])
@pytest.mark.parametrize(
    "fields", [{}, {"use_dora": True}, {"modules_to_save": ["input_layernorm"]}],
    ids=["lora", "dora", "copies"],
)  # fmt: skip
def test_the_weights_are_those_that_peft_sends(world, kind, fields):
    adapter = world.trained(**fields)
    expected = synchronised(world.of_peft(adapter), world)
    model = getattr(world, kind)(adapter)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    found = synchronised(model, world)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.keys() == theirs.keys()
        for name, tensor in theirs.items():
            torch.testing.assert_close(mine[name], tensor, rtol=1e-4, atol=1e-5, msg=name)
    base = dict(world.plain().named_parameters())
    assert any(not torch.equal(tensor, base[name]) for name, tensor in found[0].items())
    # the second time another adapter was merged, and the base is as it was, bit for bit
    assert any(not torch.equal(tensor, found[0][name]) for name, tensor in found[1].items())
    now = dict(model.named_parameters())
    assert all(torch.equal(now[n], t) for n, t in before.items() if not now[n].requires_grad)
    assert not model._adapter_state.merged


@pytest.mark.parametrize("make", [lambda: library.LoraConfig(**LORA), lambda: "lora[r=4]"])
def test_an_adapter_of_the_trainer_is_merged(world, make):
    found = synchronised(world.plain(), world, peft_config=make())
    base = dict(world.plain().named_parameters())
    # it begins as the identity
    assert all(torch.equal(tensor, base[name]) for name, tensor in found[0].items())
    assert any(not torch.equal(tensor, base[name]) for name, tensor in found[1].items())


def test_an_adapter_that_is_no_change_of_weights_is_refused(world):
    model = adapterzoo.init(world.plain())
    model.add_adapter("style", "seq_bn[reduction_factor=4]")
    model.train_adapter("style")
    with pytest.raises(StateError, match="merge"):
        synchronised(model, world)
