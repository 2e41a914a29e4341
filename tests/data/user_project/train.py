"""The README, the tour, heads, compositions and trainers, as a user writes them."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoTokenizer, DataCollatorWithPadding, TrainingArguments

import adapterzoo
from adapterzoo import (
    AdapterConfig,
    AdapterModel,
    AdapterModelMixin,
    AdapterSetup,
    AdapterTrainer,
    AutoAdapterModel,
    Average,
    BatchSplit,
    BertAdapterModel,
    BOFTConfig,
    ConfigUnion,
    DoRAConfig,
    Fuse,
    LoRAConfig,
    MultiAdapterTrainer,
    MultiTask,
    Parallel,
    PrefixTuningConfig,
    SeqBnConfig,
    Split,
    Stack,
    sweep,
)
from adapterzoo.errors import AdapterZooError, ConfigError

NAME = "sentence-transformers/all-MiniLM-L6-v2"
tokenizer = AutoTokenizer.from_pretrained(NAME)

CONFIGS: list[AdapterConfig | str] = [
    LoRAConfig(r=8, alpha=16, attn_matrices=["q", "k", "v", "o"], leave_out=range(2)),
    LoRAConfig(r=8, lora_alpha=16, lora_dropout=0.1, target_modules={"q_proj", "v_proj"}),
    LoRAConfig(target_modules="all-linear", rank_pattern={"query": 4}, task_type="SEQ_CLS"),
    LoRAConfig(use_dora=True, init_lora_weights="gaussian"),
    DoRAConfig(r=4, modules_to_save=["classifier"], layers_to_transform=[0, 1]),
    BOFTConfig(boft_block_size=8, target_modules=["query"]),
    SeqBnConfig(reduction_factor={"1": 8, "default": 16}, non_linearity="gelu"),
    PrefixTuningConfig(num_virtual_tokens=10),
    ConfigUnion(LoRAConfig(), SeqBnConfig()),
    "lora[r=8,alpha=16]|par_bn",
]


def rows(texts: Mapping[str, int]) -> list[dict[str, Any]]:
    return [{**tokenizer(text), "labels": label} for text, label in texts.items()]


def train() -> None:
    model = AutoAdapterModel.from_pretrained(NAME, dtype=torch.float32)
    model.add_adapter("reviews", config=LoRAConfig(r=8, alpha=16))
    model.add_classification_head(
        "reviews", num_labels=2, id2label={0: "rotten", 1: "fresh"}, pooling="mean", layers=1
    )
    text: str = model.adapter_summary()
    table: list[dict[str, Any]] = model.adapter_summary(as_dict=True)
    print(text, table, model.adapter_report("reviews"))
    model.train_adapter("reviews")
    arguments = TrainingArguments("runs", num_train_epochs=20, report_to="none")
    trainer = AdapterTrainer(
        model,
        arguments,
        train_dataset=rows({"A film to remember.": 1}),
        processing_class=tokenizer,
    )
    trainer.train()
    model.save_adapter("reviews-adapter", "reviews")
    model.save_pretrained("whole")
    name: str = model.load_adapter("reviews-adapter", load_as="other", set_active=True)
    loaded, info = AutoAdapterModel.from_pretrained("whole", output_loading_info=True)
    loaded.delete_adapter(name)
    print(info["missing_keys"])


def use(model: AdapterModel) -> None:
    model.eval()
    model.to("cpu").train_adapter(["a", "b"])
    batch = tokenizer(["What a film!"], padding=True, return_tensors="pt")
    logits = model(**batch, adapter_names=["reviews", None]).logits
    ids = model.generate(**batch, max_new_tokens=8)
    print(logits, ids, model.config.id2label, model.device, model.dtype, model.known_heads())
    model.active_head = "reviews"
    model.active_adapters = Stack("style", "reviews")
    print(model.active_head, model.active_adapters, model.adapters_config)
    for setup in (
        None,
        "reviews",
        ["style", "reviews"],
        Stack("style", Fuse("a", "b")),
        Parallel("a", None),
        Split("a", "b", splits=[32, 96]),
        BatchSplit("a", "b", batch_sizes=[2, 6]),
        MultiTask("a", Stack("c", "b")),
        Average("a", "b", weights=[1, 3]),
    ):
        model.set_active_adapters(setup, skip_layers=[0])
    with AdapterSetup("reviews"), torch.no_grad():
        model(**batch)
    model.add_adapter_fusion(["a", "b"], "dynamic")
    model.train_adapter_fusion(Fuse("a", "b"))
    model.add_tagging_head("tags", num_labels=9)
    model.add_qa_head("answers")
    model.add_causal_lm_head("lm", overwrite_ok=True)
    model.delete_head("lm")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer.step()


def merge(model: AdapterModelMixin) -> None:
    model.average_adapter("both", ["a", "b"], [0.5, 0.5], combine_strategy="cat")
    model.average_adapter("mix", {"a": 0.3, "b": 0.7})
    certificate = model.convert_adapter("a", "lora", rank=4)
    print(certificate)
    model.merge_adapter("a")
    model.reset_adapter()
    model.save_adapter("for-peft", "a", format="peft", with_head=False)
    plain = model.merge_and_unload()
    plain.save_pretrained("merged")


def many(model: AdapterModel) -> None:
    trainer = MultiAdapterTrainer(model, at_once=8)
    trainer.add(
        "reviews",
        TrainingArguments("runs/reviews", max_steps=4),
        rows({"Lovely.": 1}),
        data_collator=DataCollatorWithPadding(tokenizer),
    )
    results = trainer.train()
    print({name: result.global_step for name, result in results.items()}, trainer.evaluate())
    found = sweep(
        model,
        TrainingArguments("runs/sweep"),
        rows({"Lovely.": 1}),
        grid={"config": ["lora[r=4]", "seq_bn"], "learning_rate": [1e-4, 1e-3]},
    )
    model.set_active_adapters(found.best)


def by_name() -> BertAdapterModel:
    model = BertAdapterModel.from_pretrained("bert-base-uncased")
    model.add_masked_lm_head("mlm")
    many(model)
    merge(model)
    return model


def names() -> None:
    try:
        adapterzoo.LoRAConfig(r=0)
    except ConfigError as error:
        print(error)
    except AdapterZooError:
        raise
    print(adapterzoo.__version__, LoRAConfig(r=3).r)
