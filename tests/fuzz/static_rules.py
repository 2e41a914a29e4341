"""Models of transformers' task classes beside the model: they start from its family."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import transformers
from families import tiny_config
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from snapshots import stir
from world import World, near, run, same

import adapterzoo
from adapterzoo import AdapterZooError, AutoAdapterModel

TASKS = {
    "bert": "BertForSequenceClassification",
    "gpt2": "GPT2ForSequenceClassification",
    "llama": "LlamaForSequenceClassification",
    "t5": "T5ForConditionalGeneration",
    "vit": "ViTForImageClassification",
}
LAYERS = {
    "bert": ["query"], "gpt2": ["c_attn"], "llama": ["q_proj"], "t5": ["q"], "vit": ["q_proj"],
}  # fmt: skip


class StaticRules(World):
    """Rules about heads that transformers brings."""

    def task_model(self) -> Any:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(1)
            config = tiny_config(self.family)
            config.pad_token_id = 0
            return getattr(transformers, TASKS[self.family])(config).eval()

    @precondition(lambda self: self.started)
    @rule(steps=st.integers(1, 2))
    def heads_of_a_task_model(self, steps: int) -> None:
        """Each adapter has a head of its own; without one the original answers, bit for bit."""
        if self.family == "t5":
            return
        plain = self.task_model()
        inputs = dict(self.inputs)
        before = run(plain, **inputs)
        model = adapterzoo.init(copy.deepcopy(plain))
        answers: dict[str, Any] = {}
        for number, name in enumerate(("a", "b")):
            model.add_adapter(name, "lora[r=2]")
            stir(model, name, number)
            model.train_adapter(name)
            trained = [p for p in model.parameters() if p.requires_grad]
            for _ in range(steps):
                model(**inputs, labels=torch.arange(3) % 2).loss.backward()
                with torch.no_grad():
                    for p in trained:
                        p -= 0.1 * (0 if p.grad is None else p.grad)
                model.zero_grad()
            model.eval()
            answers[name] = run(model, **inputs)
        for name in ("a", "b", "a"):
            model.set_active_adapters(name)
            same(run(model, **inputs), answers[name], f"{name!r} of a task model")
        model.set_active_adapters(None)
        same(run(model, **inputs), before, "a task model without adapters")
        folder: Path = self.new_folder()
        model.save_adapter(folder, "a")
        fresh = adapterzoo.init(copy.deepcopy(plain))
        fresh.load_adapter(folder, set_active=True)
        same(run(fresh, **inputs), answers["a"], "a loaded adapter of a task model")
        self.count("heads of a task model")

    @precondition(lambda self: self.started)
    @rule()
    def head_of_a_checkpoint(self) -> None:
        """The class of a family keeps the head of a task checkpoint, as `AutoAdapterModel` does."""
        plain = self.task_model()
        folder = self.new_folder()
        plain.save_pretrained(folder)
        auto = AutoAdapterModel.from_pretrained(folder)
        named = getattr(adapterzoo, type(auto).__name__).from_pretrained(folder)
        assert auto.known_heads() == ("default",), "AutoAdapterModel drops the head"
        assert named.known_heads() == auto.known_heads(), f"{type(named).__name__} drops the head"
        assert heads_like(named) == heads_like(auto), "another head"
        self.count("head of a checkpoint")

    @precondition(lambda self: self.started)
    @rule()
    def decoder_starts(self) -> None:
        """Labels are moved behind the start token that the model's own config names."""
        if self.family != "t5":
            return
        config = tiny_config("t5")
        config.pad_token_id, config.decoder_start_token_id = 0, 5
        config.tie_word_embeddings = True
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(1)
            plain = transformers.T5ForConditionalGeneration(config).eval()
        folder = self.new_folder()
        plain.save_pretrained(folder)
        model = AutoAdapterModel.from_pretrained(folder).eval()
        labels = torch.arange(3, 18).reshape(3, 5)
        given = {"input_ids": self.inputs["input_ids"], "labels": labels}
        same(run(model, **given)[:1], run(plain, **given)[:1], "labels behind the start token")
        self.count("start token")

    @precondition(lambda self: self.started)
    @rule()
    def wrapped_by_peft(self) -> None:
        """PEFT's wrapper around the model changes no answer, or is refused and changes nothing."""
        import peft

        # PEFT finds layers by the last name of their path, and an adapter may have that name
        if set(LAYERS[self.family]) & set(self.model.adapters_config):
            return
        twin = copy.deepcopy(self.model)
        before = self.snapshot(twin)
        config = peft.LoraConfig(
            r=2, target_modules=LAYERS[self.family], fan_in_fan_out=self.family == "gpt2"
        )
        try:
            wrapped = peft.get_peft_model(twin, config)
        except AdapterZooError:
            after = self.snapshot(twin)
            assert before["next forward"] == after["next forward"], "a refused wrapper"
            self.count("PEFT refused")
            return
        # layers below a wrapper do not share products of one input
        near(run(wrapped.eval(), **self.cast_inputs()), self.run(), "wrapped by PEFT")
        self.count("PEFT")


def heads_like(model: Any) -> list[Any]:
    return [
        (name, config, sorted(model.get_head(name).state_dict()))
        for name, config in model.get_prediction_heads_config().items()
    ]
