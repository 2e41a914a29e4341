"""Models that exist already, PEFT's names, and serving."""

import torch
from torch import nn
from transformers import AutoModelForCausalLM, BertForSequenceClassification, PreTrainedModel

import adapterzoo
from adapterzoo import AutoAdapterModel, LoRAConfig, init, load_model
from adapterzoo.peft import (
    AutoPeftModelForCausalLM,
    EvaConfig,
    LoraConfig,
    PeftConfig,
    PeftModel,
    PromptTuningConfig,
    PromptTuningInit,
    TaskType,
    get_peft_model,
    get_peft_model_state_dict,
    prepare_model_for_kbit_training,
)
from adapterzoo.serving import AdapterPool, verify
from adapterzoo.testing import check_method


def adapt() -> None:
    bert = BertForSequenceClassification.from_pretrained("bert-base-uncased")
    model = init(bert)
    model.add_adapter("a", LoRAConfig(r=4), set_active=True)
    model.train_adapter("a")
    # the same object: the argument keeps its own type
    print(bert.num_labels, model(torch.ones(1, 2)).logits)
    plain: PreTrainedModel = model
    module: nn.Module = model
    print(plain.config, module.training)

    causal = adapterzoo.init(AutoModelForCausalLM.from_pretrained("gpt2"))
    causal.add_adapter("style", "dora")
    causal.generate(torch.ones(1, 2), adapter_names=["style"], max_new_tokens=3)
    causal.push_adapter_to_hub("user/style", "style", private=True)

    mlp = init(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    mlp.add_adapter("a", LoRAConfig(target_modules=["0"]))

    again = load_model("folder", BertForSequenceClassification)
    again.set_active_adapters("a")
    heads = load_model("folder", AutoAdapterModel)
    heads.add_classification_head("b", num_labels=3)


def with_peft() -> None:
    base = AutoModelForCausalLM.from_pretrained("gpt2")
    config = LoraConfig(
        r=16,
        lora_alpha=32,
        lora_dropout=0.05,
        target_modules=["c_attn"],
        task_type="CAUSAL_LM",
        bias="none",
        use_rslora=True,
        init_lora_weights="eva",
        eva_config=EvaConfig(rho=2.0),
        modules_to_save=["lm_head"],
    )
    config.r = 8
    model = get_peft_model(base, config)
    model.print_trainable_parameters()
    model.add_adapter("other", LoraConfig(task_type=TaskType.CAUSAL_LM))
    model.add_weighted_adapter(["default", "other"], [0.5, 0.5], "both", combination_type="svd")
    model.set_adapter("both")
    with model.disable_adapter():
        model(torch.ones(1, 2))
    model.save_pretrained("folder", selected_adapters=["both"])
    print(model.peft_config["both"], model.active_adapter, model.base_model.model)
    state = get_peft_model_state_dict(model)
    print(state["key"].shape)
    merged = model.merge_and_unload()
    merged.save_pretrained("merged")

    loaded = PeftModel.from_pretrained(base, "folder", is_trainable=True)
    loaded.load_adapter("folder", adapter_name="second")
    loaded.generate(torch.ones(1, 2))
    auto = AutoPeftModelForCausalLM.from_pretrained("folder")
    auto.unload()
    prepared: nn.Module = prepare_model_for_kbit_training(base)
    print(prepared, PeftConfig.from_pretrained("folder").peft_type)
    soft = PromptTuningConfig(num_virtual_tokens=8, prompt_tuning_init=PromptTuningInit.TEXT)
    adapted = init(base)
    adapted.add_adapter("soft", soft)
    adapted.add_adapter(LoraConfig(), adapter_name="first")
    print(adapterzoo.peft.LoraConfig(r=2))


def serve() -> None:
    model = init(AutoModelForCausalLM.from_pretrained("gpt2"))
    pool = AdapterPool(model, {"a": "runs/a", "b": "runs/b"}, slots=8, max_bytes=2**30)
    with pool.use(["a", None, "b"]):
        model.generate(torch.ones(3, 2))
    pool.add("c", "runs/c")
    print(pool.metrics(), pool.nbytes)
    model.save_adapter("served", "a", serve="vllm")
    print(verify("served", "vllm", model))
    check_method("lora")
