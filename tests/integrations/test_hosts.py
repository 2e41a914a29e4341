"""Each fact that hosts are told: what goes wrong in the plain host, which does not know it.

A test here fails once a host no longer needs the fact; the tests of the trainers show that all is
well with it.
"""

from __future__ import annotations

import functools
import importlib
import re
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from families import tiny_config
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    DataCollatorWithPadding,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    default_data_collator,
)
from transformers.integrations import peft as mixin_of_peft
from transformers.models.auto import auto_factory
from transformers.utils import import_utils
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import dpo_trainer, sft_trainer
from trl_world import LORA, World, pairs, texts, words
from trl_world import QUIET as OF_TRL
from words import tokenizer

import adapterzoo
import adapterzoo.hosts
import adapterzoo.peft as library
from adapterzoo import AutoAdapterModel
from adapterzoo.errors import CheckpointError
from adapterzoo.model.training_checkpoints import save_trained
from adapterzoo.peft_arguments import PEFT_VERSION

QUIET: dict[str, Any] = {
    "report_to": "none", "use_cpu": True, "disable_tqdm": True, "dataloader_pin_memory": False,
    "logging_strategy": "no", "save_strategy": "no", "per_device_train_batch_size": 4,
}  # fmt: skip
ROWS = [{"input_ids": [1, 5, 9], "labels": i % 2} for i in range(8)]


@pytest.fixture
def forget(monkeypatch):
    """Gives a host back what it had before it was told."""

    def give_back(owner: Any, name: str) -> None:
        monkeypatch.setattr(owner, name, vars(owner)[name]._unpatched)

    return give_back


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def named(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = AutoAdapterModel.from_config(tiny_config("bert"))
    for name in ("a", "b"):
        model.add_adapter(name, "lora[r=2]")
    model.add_classification_head("task", num_labels=2)
    model.train_adapter("a")
    return model


def trainer(model: Any, folder: Path, rows: Any = ROWS, collator: Any = None, **own: Any) -> Any:
    arguments = TrainingArguments(str(folder), **{**QUIET, "max_steps": 2, **own})
    return Trainer(model, arguments, collator, train_dataset=rows, eval_dataset=rows)


SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1}


def test_every_fact_is_told_and_shown():
    """Each function of the room that tells a host is named by a test of this file."""
    room, here = (Path(f).read_text() for f in (adapterzoo.hosts.__file__, __file__))
    facts = re.findall(
        r"^def ((?:trainer|trl|transformers|accelerator|deepspeed)s?_\w+)", room, re.M
    )
    assert len(facts) == 28
    shown = set(re.findall(r"# (\w+)$", here, re.M))
    assert shown == {*facts}
    # each says with which releases it was tested
    for fact in facts:
        assert "ested with" in getattr(adapterzoo.hosts, fact).__doc__, fact


# --- transformers ---


def test_trainer_takes_no_quantized_model_and_the_labels_of_all_heads(tmp_path, forget):
    # trainer_starts
    model = named()
    model.add_qa_head("answers")
    model.active_head = "answers"
    told = trainer(model, tmp_path).label_names
    forget(Trainer, "__init__")
    assert trainer(model, tmp_path).label_names != told == ["start_positions", "end_positions"]
    model.is_quantized = True
    with pytest.raises(ValueError, match="purely quantized"):
        trainer(model, tmp_path)


def test_collators_lose_texts(tmp_path, forget):
    # trainer_keeps_texts
    rows = [{**row, "adapter_names": "ab"[i % 2]} for i, row in enumerate(ROWS)]
    padding = DataCollatorWithPadding(tokenizer())
    made = [trainer(named(), tmp_path, rows, each) for each in (default_data_collator, padding)]
    for each in made:
        assert next(iter(each.get_train_dataloader()))["adapter_names"][0] in "ab"
    forget(Trainer, "_get_dataloader")
    assert "adapter_names" not in next(iter(made[0].get_train_dataloader()))
    with pytest.raises(ValueError, match="tensor"):
        next(iter(made[1].get_train_dataloader()))


def test_a_checkpoint_would_be_the_whole_model(tmp_path, forget):
    # trainer_saves_adapters
    trainer(named(), tmp_path / "told", **SAVING).train()
    assert not (tmp_path / "told" / "checkpoint-1" / "model.safetensors").exists()
    forget(Trainer, "_save")
    trainer(named(), tmp_path / "plain", **SAVING).train()
    assert (tmp_path / "plain" / "checkpoint-1" / "model.safetensors").exists()


@pytest.mark.parametrize("engine", ["is_fsdp_enabled", "is_deepspeed_enabled"])
def test_the_whole_model_would_be_gathered(tmp_path, forget, monkeypatch, engine):
    # trainer_gathers_adapters
    made = trainer(named(), tmp_path)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    plugin.set_state_dict_type("FULL_STATE_DICT")
    monkeypatch.setattr(type(made.accelerator.state), "fsdp_plugin", plugin, raising=False)
    asked = []
    monkeypatch.setattr(made.accelerator, "get_state_dict", lambda m: asked.append(m) or {})
    setattr(made, engine, True)
    made.model_wrapped = made.deepspeed = Engine(made.model)
    made.deepspeed.config = {}
    made.save_model(str(tmp_path / "told"))
    assert not asked
    assert (tmp_path / "told" / "a" / "adapter.safetensors").is_file()
    forget(Trainer, "save_model")
    made.save_model(str(tmp_path / "plain"))
    assert len(asked) == 1


@pytest.mark.parametrize("told", [False, True])
def test_fsdp_would_save_the_base_beside_it(tmp_path, forget, told):
    # trainer_saves_no_base
    if not told:
        forget(transformers.trainer, "save_fsdp_model")
    plugin, accelerator = FullyShardedDataParallelPlugin(fsdp_version=2), Accelerator(cpu=True)
    plugin.set_state_dict_type("FULL_STATE_DICT")
    transformers.trainer.save_fsdp_model(plugin, accelerator, named(), str(tmp_path))
    assert [*tmp_path.iterdir()] == [tmp_path / "pytorch_model_fsdp.bin"] * (not told)


def test_a_tied_parameter_would_be_saved_twice(tmp_path):
    # transformers_saves_ties_once
    config = tiny_config("llama")
    config.tie_word_embeddings = True
    model = AutoAdapterModel.from_config(config)
    model.add_causal_lm_head("task")
    # of a model that is split, each tensor is gathered; test_tensor_parallel.py does that
    options = {"state_dict": {key: t.clone() for key, t in model.state_dict().items()}}
    PreTrainedModel.save_pretrained(model, tmp_path / "plain", **options)
    adapterzoo.hosts.transformers_saves_ties_once(model, options)
    PreTrainedModel.save_pretrained(model, tmp_path / "told", **options)
    both = {*load_file(tmp_path / "plain" / "model.safetensors")}
    assert both - {*load_file(tmp_path / "told" / "model.safetensors")} == {"heads.task.3.weight"}


def test_a_checkpoint_of_adapters_would_not_be_found(tmp_path, forget):
    # trainer_resumes_adapters
    trainer(named(), tmp_path, **SAVING).train()
    forget(Trainer, "_load_from_checkpoint")
    with pytest.raises(ValueError, match="valid checkpoint"):
        trainer(named(), tmp_path, max_steps=3).train(resume_from_checkpoint=True)


def test_the_best_adapters_would_not_be_loaded(tmp_path, forget):
    # trainer_loads_the_best_adapters
    forget(Trainer, "_load_best_model")
    model = named()
    best = trainer(
        model, tmp_path, **SAVING, eval_strategy="steps", eval_steps=1, learning_rate=0.1,
        load_best_model_at_end=True, metric_for_best_model="made_up", greater_is_better=True,
    )  # fmt: skip
    scores = iter([0.9, 0.1])
    best.compute_metrics = lambda _: {"made_up": next(scores)}
    best.train()
    first = named()
    first.load_adapter(Path(best.state.best_model_checkpoint, "a"), load_as="a", overwrite_ok=True)
    own, kept = (dict(m.adapter_modules("a")) for m in (model, first))
    same = [torch.equal(own[path].lora_B, module.lora_B) for path, module in kept.items()]
    assert best.state.best_global_step == 1
    assert not any(same)


def test_accelerate_would_divide_the_loss_again(tmp_path):
    # accelerator_divides_no_loss
    plain = trainer(named(), tmp_path, gradient_accumulation_steps=3).accelerator
    if plain.gradient_accumulation_steps == 1:
        pytest.skip("this release of transformers tells accelerate itself")
    adapterzoo.hosts.accelerator_divides_no_loss(plain)
    assert plain.gradient_accumulation_steps == 1


def test_arguments_would_empty_the_state_of_another_trainer(tmp_path):
    # accelerator_states
    first = trainer(named(), tmp_path / "first")
    kept = [(cls, dict(cls._shared_state)) for cls in adapterzoo.hosts.accelerator_states()]
    TrainingArguments(str(tmp_path / "second"), **QUIET)
    with pytest.raises(AttributeError, match="_reset_state"):
        first.evaluate()
    for cls, values in kept:
        cls._shared_state.update(values)
    assert first.evaluate()["eval_loss"] > 0


# --- DeepSpeed ---


class Engine:
    """Notes how it is called, as DeepSpeed's engine is."""

    def __init__(self, module: Any) -> None:
        self.module, self.noted = module, {}

    def module_state_dict(self) -> Any:
        return self.module.state_dict()

    def save_checkpoint(self, folder: str, exclude_frozen_parameters: bool = False) -> None:
        frozen = exclude_frozen_parameters
        self.noted = {"without frozen": frozen, "keys": [*self.module_state_dict()]}

    def load_checkpoint(self, folder: str, load_module_strict: bool = True, **more: Any) -> Any:
        self.noted = {"strict": load_module_strict}
        return folder, None


def under_deepspeed(tmp_path, monkeypatch, model):
    """Return a trainer of a model with the state of an engine of DeepSpeed, and the engine."""
    # a class of DeepSpeed, which need not be here
    monkeypatch.setattr(
        transformers.trainer, "DeepSpeedSchedulerWrapper", type(None), raising=False
    )
    made = trainer(model, tmp_path)
    made.is_deepspeed_enabled = True
    made.model_wrapped = engine = Engine(made.model)
    return made, engine


def test_deepspeed_would_save_the_base(tmp_path, monkeypatch, forget):
    # trainer_saves_no_base_of_deepspeed
    plain, engine = under_deepspeed(tmp_path, monkeypatch, named())
    trained = {n for n, p in plain.model.named_parameters() if p.requires_grad}
    plain._save_optimizer_and_scheduler(str(tmp_path))
    assert engine.noted["without frozen"]
    assert {*engine.noted["keys"]} == trained
    forget(Trainer, "_save_optimizer_and_scheduler")
    plain._save_optimizer_and_scheduler(str(tmp_path))
    assert not engine.noted["without frozen"]


def test_scales_of_packed_weights_are_not_saved_without_them(tmp_path, monkeypatch):
    plain, engine = under_deepspeed(tmp_path, monkeypatch, named())
    state = engine.module.state_dict()
    frozen = next(n for n, p in engine.module.named_parameters() if not p.requires_grad)
    engine.module.state_dict = lambda: {**state, f"{frozen}.quant_state.made_up": None}
    plain._save_optimizer_and_scheduler(str(tmp_path))
    assert not any(key.startswith(frozen) for key in engine.noted["keys"])


def test_deepspeed_would_look_for_the_base(tmp_path, forget):
    # trainer_loads_no_base_of_deepspeed
    engine = Engine(named())
    with pytest.raises(CheckpointError, match="not saved under DeepSpeed"):
        transformers.trainer.deepspeed_load_checkpoint(engine, str(tmp_path))
    (tmp_path / "global_step2").mkdir()
    transformers.trainer.deepspeed_load_checkpoint(engine, str(tmp_path))
    assert engine.noted == {"strict": False}
    forget(transformers.trainer, "deepspeed_load_checkpoint")
    transformers.trainer.deepspeed_load_checkpoint(engine, str(tmp_path))
    assert engine.noted == {"strict": True}


def test_deepspeed_would_get_several_dtypes(tmp_path, forget):
    # deepspeed_gets_one_dtype
    model = named()
    model.add_adapter("d", "dora[r=2]")
    model.train_adapter("d")
    model.to(torch.bfloat16)
    made = trainer(model, tmp_path)
    dtypes = {p.dtype for p in model.parameters() if p.requires_grad}
    assert dtypes == {torch.bfloat16, torch.float32}
    told = transformers.trainer.deepspeed_init
    forget(transformers.trainer, "deepspeed_init")
    for init, expected in ((transformers.trainer.deepspeed_init, dtypes), (told, {torch.float32})):
        # there is no config of DeepSpeed
        with pytest.raises((AttributeError, ImportError)):
            init(made, 1)
        assert {p.dtype for p in model.parameters() if p.requires_grad} == expected


def test_deepspeed_would_leave_another_adapter_as_it_is(tmp_path):
    (tmp_path / "global_step2").mkdir()
    saved = named()
    save_trained(saved, tmp_path)
    (tmp_path / "trainer_state.json").write_text("{}")
    engine = Engine(named(1))
    transformers.trainer.deepspeed_load_checkpoint(engine, str(tmp_path))
    trained = dict(saved.named_parameters())
    for name, parameter in engine.module.named_parameters():
        assert not parameter.requires_grad or torch.equal(parameter, trained[name])
    engine = Engine(named())
    engine.module.add_adapter("another", "lora")
    with pytest.raises(CheckpointError, match="another"):
        transformers.trainer.deepspeed_load_checkpoint(engine, str(tmp_path))


# --- transformers: folders with adapters ---


@pytest.fixture
def adapter(tmp_path):
    """The folder of an adapter with a head; its base model and its tokenizer are beside it."""
    AutoAdapterModel.from_config(tiny_config("bert")).base_model.save_pretrained(tmp_path / "base")
    tokenizer().save_pretrained(tmp_path / "base")
    model = AutoAdapterModel.from_pretrained(tmp_path / "base")
    model.add_adapter("a", "lora[r=2]")
    model.add_classification_head("a", num_labels=3, layers=1, use_pooler=True)
    model.save_adapter(tmp_path / "a", "a")
    model.save_pretrained(tmp_path / "whole")
    return tmp_path / "a"


def test_transformers_would_take_each_folder_for_one_of_peft(adapter, forget):
    # transformers_reads_only_files_of_peft
    task = transformers.AutoModelForSequenceClassification
    assert task.from_pretrained(adapter).active_adapters == adapterzoo.Stack("a")
    forget(auto_factory, "find_adapter_config_file")
    with pytest.raises(KeyError, match="base_model_name_or_path"):
        task.from_pretrained(adapter)


def test_an_adapter_would_have_no_config_and_no_tokenizer(adapter, forget):
    # transformers_takes_files_of_the_base
    words = transformers.AutoTokenizer.from_pretrained(adapter)
    assert words("a bad plot").input_ids == tokenizer()("a bad plot").input_ids
    assert transformers.AutoConfig.from_pretrained(adapter).num_labels == 3
    for cls in (transformers.AutoConfig, transformers.AutoTokenizer):
        forget(cls, "from_pretrained")
        with pytest.raises(ValueError, match=r"model_type|tokenizer"):
            cls.from_pretrained(adapter)


def test_the_adapters_of_a_saved_model_would_be_lost(adapter, forget):
    # transformers_loads_adapters
    whole = adapter.parent / "whole"
    assert transformers.BertModel.from_pretrained(whole).has_adapters()
    by_name = {"pretrained_model_name_or_path": whole}
    assert transformers.BertModel.from_pretrained(**by_name).has_adapters()
    assert transformers.AutoConfig.from_pretrained(**by_name).model_type == "bert"
    forget(PreTrainedModel, "from_pretrained")
    assert not hasattr(transformers.BertModel.from_pretrained(whole), "has_adapters")


def test_a_pipeline_would_lose_named_heads(adapter, forget):
    # transformers_loads_heads
    make = functools.partial(transformers.pipeline, "text-classification", model=str(adapter))
    assert list(make().model.heads) == ["a"]
    forget(transformers.pipelines, "load_model")
    assert not hasattr(make().model, "heads")


# --- transformers and PEFT ---


@pytest.mark.needs("transformers<5.24", "mended there")
def test_an_adapter_above_the_subfolder_would_be_found(world):
    # transformers_looks_in_folders
    adapter = world.trained()
    (adapter / "model").mkdir()
    search = mixin_of_peft.find_adapter_config_file
    assert search(str(adapter), subfolder="model") is None
    assert search.__wrapped__(str(adapter), subfolder="model") is not None


def test_transformers_would_not_look_again(monkeypatch):
    # transformers_looks_again
    found = import_utils.is_peft_available()
    monkeypatch.setattr(import_utils, "_is_package_available", lambda *_, **__: (not found, "1"))
    assert import_utils.is_peft_available() == found
    adapterzoo.hosts.transformers_looks_again()
    assert import_utils.is_peft_available() != found
    monkeypatch.undo()
    adapterzoo.hosts.transformers_looks_again()
    assert import_utils.is_peft_available() == found


def test_trainer_would_know_the_models_of_peft_alone(world, monkeypatch):
    # trainers_know_models
    models = importlib.import_module("transformers.trainer_utils")
    for module in (models, transformers.trainer):
        for name in ("PeftModel", "PeftMixedModel"):
            monkeypatch.setattr(module, name, getattr(peft, name), raising=False)
    model = library.get_peft_model(world.plain(), library.LoraConfig(**LORA))
    assert not models._is_peft_model(model)
    adapterzoo.hosts.trainers_know_models(
        PeftModel=library.PeftModel, PeftMixedModel=library.PeftMixedModel
    )
    assert models._is_peft_model(model)


def test_transformers_would_ask_for_a_later_release(monkeypatch):
    # transformers_takes_this_release
    monkeypatch.setattr(mixin_of_peft, "MIN_PEFT_VERSION", "99.0")
    adapterzoo.hosts.transformers_takes_this_release(PEFT_VERSION)
    assert mixin_of_peft.MIN_PEFT_VERSION == PEFT_VERSION


@pytest.mark.needs("peft>=0.18", "transformers asks for it")
def test_transformers_would_wrap_layers(world, monkeypatch):
    # transformers_adds_adapters
    monkeypatch.setattr(mixin_of_peft, "MIN_PEFT_VERSION", peft.__version__)
    for name in ("add_adapter", "load_adapter"):
        # put back after the test
        monkeypatch.setattr(
            mixin_of_peft.PeftAdapterMixin, name, getattr(mixin_of_peft.PeftAdapterMixin, name)
        )
    wrapped = world.plain()
    wrapped.add_adapter(peft.LoraConfig(**LORA))
    assert any(isinstance(module, BaseTunerLayer) for module in wrapped.modules())
    from adapterzoo.compat.peft.transformers_model import add_first, load_first

    adapterzoo.hosts.transformers_adds_adapters(add_first, load_first)
    mine = world.plain()
    mine.add_adapter(library.LoraConfig(**LORA))
    assert isinstance(mine, adapterzoo.AdapterModelMixin)
    assert not any(isinstance(module, BaseTunerLayer) for module in mine.modules())


# --- TRL ---


def supervised(model: Any, folder: Path, **more: Any) -> Any:
    return SFTTrainer(
        model, args=SFTConfig(str(folder), **OF_TRL), train_dataset=texts(),
        processing_class=words(), **more,
    )  # fmt: skip


def preferred(model: Any, folder: Path) -> Any:
    return DPOTrainer(
        model, args=DPOConfig(str(folder), **OF_TRL), train_dataset=pairs(),
        processing_class=words(),
    )  # fmt: skip


@pytest.mark.parametrize("config", [lambda: library.LoraConfig(**LORA), lambda: "lora[r=4]"])
def test_trl_would_refuse_configs(world, forget, config):
    # trl_knows_configs
    forget(sft_trainer, "PeftConfig")
    with pytest.raises(TypeError, match="PeftConfig"):
        supervised(world.plain(), world.folder, peft_config=config())


def test_peft_would_add_the_adapter(world, forget):
    # trl_adds_adapters
    forget(sft_trainer, "get_peft_model")
    with pytest.raises((AttributeError, KeyError, TypeError)):
        supervised(world.plain(), world.folder, peft_config="lora[r=4]")
    try:
        made = supervised(world.plain(), world.folder, peft_config=library.LoraConfig(**LORA)).model
    except (AttributeError, KeyError, TypeError):
        return
    assert not isinstance(made, adapterzoo.AdapterModelMixin)


def test_trl_would_load_a_second_base_and_compare_with_it(world, forget, monkeypatch):
    # trl_has_a_reference
    model = world.named(world.trained())
    forget(dpo_trainer, "create_model_from_path")
    made = preferred(model, world.folder)
    assert isinstance(made.ref_model, PreTrainedModel)
    assert made.ref_model is not model
    batch = {"input_ids": torch.tensor([[5, 6, 7]])}
    with torch.no_grad():
        assert not torch.allclose(made.ref_model(**batch).logits, model(**batch).logits)


def test_trl_would_leave_out_layers_of_the_head(world, forget):
    # trl_leaves_out_no_layer
    forget(sft_trainer, "add_fused_lm_head")
    model = world.with_heads(world.trained())
    model.add_causal_lm_head("style", layers=2)
    model.train_adapter("style")
    before = {key: t.clone() for key, t in model.get_head("style").state_dict().items()}
    supervised(model, world.folder).train()
    now = model.get_head("style").state_dict()
    assert any(torch.equal(now[key], t) for key, t in before.items()), "each layer is trained"


def test_trl_would_round_the_magnitudes_of_dora(world, forget):
    # trl_rounds_as_modules_do
    pytest.importorskip("bitsandbytes")
    forget(SFTTrainer, "__init__")
    model = adapterzoo.init(
        AutoModelForCausalLM.from_pretrained(
            world.base, quantization_config=BitsAndBytesConfig(load_in_8bit=True)
        )
    )
    model.add_adapter("style", "dora[r=4]")
    model.train_adapter("style")
    supervised(model, world.folder)
    own = {p.dtype for name, p in model.named_parameters() if name.endswith(".style.m")}
    assert own == {torch.bfloat16}


def test_trl_would_send_the_weights_of_adapters_to_vllm(world, forget):
    # trl_sends_merged_weights
    model = world.named(world.trained())
    run = supervised(model, world.folder)
    engine = VLLMGeneration.__new__(VLLMGeneration)
    engine.model, engine.accelerator = model, run.accelerator
    engine._dist = importlib.import_module("trl.distributed").DistributedBackend(run.accelerator)
    merged = {name: tensor.clone() for name, tensor in engine._iter_named_params()}
    forget(VLLMGeneration, "_iter_named_params")
    sent = dict(engine._iter_named_params())
    assert any(".style." in name for name in sent)
    assert not any(".style." in name for name in merged)
    changed = [name for name, tensor in merged.items() if not torch.equal(sent[name], tensor)]
    assert changed


def test_other_models_are_left_to_the_hosts(world):
    run = supervised(world.plain(), world.folder)
    run.train()
    run.save_model(str(world.folder / "end"))
    assert (world.folder / "end" / "model.safetensors").is_file()
