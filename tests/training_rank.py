"""One process that trains cases of `training_table.py` with one engine, on the CPU.

`python training_rank.py ENGINE FOLDER WAY CASES…`; a launcher gives rank and number of processes by
the environment. WAY is `train`: four steps with checkpoints, saved, then resumed from the second
one; or `resume`: only that, from what another number of processes has written.
"""

from __future__ import annotations

import gc
import os
import re
import shutil
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from families import tiny_config
from transformers import TrainingArguments

import adapterzoo
from adapterzoo import AdapterTrainer, AutoAdapterModel, Seq2SeqAdapterTrainer


def world() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


ROWS, STEPS, STOP = 8, 4, 2
RATE = 0.2
METHODS = {
    "lora": "lora",
    "dora": "dora",
    # its class is that of the blocks, which FSDP2 looks for; the first block has none
    "seq_bn": "seq_bn[reduction_factor=4,leave_out=[0]]",
    "prefix_tuning": "prefix_tuning[prefix_length=3,bottleneck_size=8]",
    "loreft": "loreft[dropout=0.0]",
    "ia3": "ia3",
}
# how the base model is stored or computes → arguments of the trainer
BASES: dict[str, dict[str, Any]] = {
    "float": {},
    "4-bit": {},
    "checkpointed": {"gradient_checkpointing": True},
    "autocast": {"bf16": True},
    "offloaded": {},
}
# autocast is for float32, and the packed layers compute in it
OF_FLOAT32 = ("4-bit", "autocast")
# head, trainer and family
TRAINERS = {
    "Trainer": "llama",
    "AdapterTrainer": "bert",
    "Seq2SeqAdapterTrainer": "whisper",
    "SFTTrainer": "llama",
}
FSDP = {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
ENGINES: dict[str, dict[str, Any]] = {
    "1 process": {},
    "DDP": {"ddp_find_unused_parameters": False},
    "FSDP2": {"fsdp": True, "fsdp_config": FSDP},
    "FSDP2, sharded files": {
        "fsdp": True,
        "fsdp_config": {**FSDP, "state_dict_type": "SHARDED_STATE_DICT"},
    },
    "HSDP": {"fsdp": True, "fsdp_config": FSDP},
    "ZeRO-2": {"deepspeed": 2},
    "ZeRO-3": {"deepspeed": 3},
}
SHARDED = tuple(ENGINES)[2:]
# DeepSpeed computes in float32
IN_FLOAT32 = ("ZeRO-2", "ZeRO-3")


# --- what a machine without a GPU must be told ---


@contextmanager
def engine_on_a_cpu(engine: str) -> Iterator[None]:
    """Let accelerate 1.15 and DeepSpeed 0.19.8 shard on the CPU over gloo.

    Accelerate ignores both there without a word: it lists only kinds of GPUs, and takes the number
    of processes for 1 under DeepSpeed. transformers 5.24 asks for a GPU before it rounds.
    """
    if engine not in SHARDED:
        yield
        return
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    os.environ |= {"DS_ACCELERATOR": "cpu", "ACCELERATE_TORCH_DEVICE": "cpu"}
    if engine.startswith("ZeRO"):
        import deepspeed

        # would be compiled
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    gpus, replaced = ("gloo", DistributedType.MULTI_GPU), mock.patch.object
    with (
        replaced(PartialState, "_prepare_backend", return_value=gpus),
        replaced(transformers.training_args, "is_torch_bf16_gpu_available", return_value=True),
    ):
        yield


def deepspeed_config(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        # clipped at 1.0 unless it is said
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


# --- the case ---


def in_4_bits(cls: Any, config: Any, folder: Path, dtype: torch.dtype) -> dict[str, Any]:
    bits = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_compute_dtype=dtype, bnb_4bit_quant_storage=dtype
    )
    return {"quantization_config": bits, "device_map": {"": "cpu"}}


def offloaded(cls: Any, config: Any, folder: Path, dtype: torch.dtype) -> dict[str, Any]:
    """The last block on the disk, the rest in memory."""
    model = cls.from_config(config) if cls is AutoAdapterModel else cls(config)
    last = [name for name, _ in model.named_modules() if re.search(r"layers?\.\d+$", name)][-1]
    places = {last: "disk"}

    def visit(path: str) -> None:
        for name, _ in model.get_submodule(path).named_children():
            child = f"{path}.{name}".lstrip(".")
            if last.startswith(f"{child}."):
                visit(child)
            else:
                places.setdefault(child, "cpu")

    visit("")
    return {"device_map": places, "offload_folder": folder / "disk", "dtype": dtype}


# bases that are read from a folder → arguments of `from_pretrained`
LOADED = {"4-bit": in_4_bits, "offloaded": offloaded}


def plain_of(trainer: str) -> Any:
    """A tiny model without adapters."""
    torch.manual_seed(0)
    family = TRAINERS[trainer]
    config = tiny_config(family)
    # dropout draws other numbers in each process
    for name in ("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout"):
        setattr(config, name, 0.0)
    cls = {"llama": transformers.LlamaForCausalLM, "bert": transformers.BertModel,
           "whisper": transformers.WhisperForConditionalGeneration}[family]  # fmt: skip
    return cls(config)


def stored_at(trainer: str, folder: Path) -> Path:
    """Where each process wrote a tiny model before they joined; then, only the first one writes."""
    return folder / f"{TRAINERS[trainer]} of rank {rank()}"


def model_of(trainer: str, method: str, base: str, folder: Path, dtype: torch.dtype) -> Any:
    """A tiny model with a trained adapter `a`, the same in all processes."""
    # the arguments of an earlier ZeRO-3 run let models be partitioned when they are made
    transformers.integrations.deepspeed.unset_hf_deepspeed_config()
    plain = plain_of(trainer)
    own = AutoAdapterModel if trainer == "AdapterTrainer" else type(plain)
    if base in LOADED:
        at = stored_at(trainer, folder)
        model = own.from_pretrained(at, **LOADED[base](own, plain.config, at, dtype))
        model = model if trainer == "AdapterTrainer" else adapterzoo.init(model)
    elif trainer == "AdapterTrainer":
        model = AutoAdapterModel.from_config(plain.config)
    else:
        model = adapterzoo.init(plain)
    torch.manual_seed(1)
    model.add_adapter("a", METHODS[method])
    if trainer == "AdapterTrainer":
        model.add_classification_head("a", num_labels=3)
    for _, module in model.adapter_modules("a"):
        for p in module.parameters():
            if not p.any():
                torch.nn.init.normal_(p, std=0.1)
    # after all has been drawn: other dtypes draw other numbers
    model = model if base in LOADED else model.to(dtype)
    model.train_adapter("a")
    return model


def rows(trainer: str, dtype: torch.dtype) -> list[dict[str, Any]]:
    source = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 99, (ROWS * STEPS, 7), generator=source).tolist()
    if trainer == "AdapterTrainer":
        return [{"input_ids": row, "labels": row[0] % 3} for row in ids]
    if trainer == "SFTTrainer":
        return [{"input_ids": row} for row in ids]
    if trainer == "Seq2SeqAdapterTrainer":
        heard = torch.randn(len(ids), 8, 32, generator=source, dtype=torch.float64).to(dtype)
        return [{"input_features": x, "labels": row} for x, row in zip(heard, ids, strict=True)]
    return [{"input_ids": row, "labels": row} for row in ids]


def trainer_of(
    engine: str, trainer: str, model: Any, folder: Path, data: Any = None, **options: Any
) -> Any:
    """The trainer, told of the engine."""
    options = {**ENGINES[engine], **options}
    if stage := options.get("deepspeed"):
        options["deepspeed"] = deepspeed_config(stage)
    options = {
        "output_dir": str(folder), "max_steps": STEPS, "save_steps": STOP,
        "per_device_train_batch_size": ROWS // world(), "max_grad_norm": 0.0,
        "lr_scheduler_type": "linear", "learning_rate": RATE, "use_cpu": engine not in SHARDED,
        "dataloader_pin_memory": False, "report_to": "none", "disable_tqdm": True, **options,
    }  # fmt: skip
    if "fsdp" in options and TRAINERS[trainer] == "bert":
        # accelerate 1.15 shards BERT's embeddings twice, also without adapters
        wrapped = {"transformer_layer_cls_to_wrap": ["BertLayer"]}
        options["fsdp_config"] = {**options["fsdp_config"], **wrapped}
    data = rows(trainer, model.dtype) if data is None else data
    with engine_on_a_cpu(engine):
        args: Any
        if trainer == "SFTTrainer":
            import datasets
            from trl import SFTConfig, SFTTrainer

            args = SFTConfig(
                **options, bf16=False, dataset_kwargs={"skip_prepare_dataset": True},
                gradient_checkpointing=False,
            )  # fmt: skip
            data = datasets.Dataset.from_list(data)
            made = lambda: SFTTrainer(  # noqa: E731
                model, args, train_dataset=data, processing_class=tokenizer(),
            )  # fmt: skip
        else:
            args = TrainingArguments(**options)
            if trainer == "Seq2SeqAdapterTrainer":
                args = transformers.Seq2SeqTrainingArguments(**options)
            cls: Any = {"Trainer": transformers.Trainer, "AdapterTrainer": AdapterTrainer,
                        "Seq2SeqAdapterTrainer": Seq2SeqAdapterTrainer}[trainer]  # fmt: skip
            collate = transformers.default_data_collator
            made = lambda: cls(model, args, collate, data)  # noqa: E731
        if engine == "HSDP":
            from accelerate.utils import ParallelismConfig

            args.parallelism_config = ParallelismConfig(
                dp_replicate_size=world() // 2, dp_shard_size=2
            )
        own = made()
    # momentum is a state that a checkpoint must have; Adam would make much of small differences
    own.optimizer_cls_and_kwargs = (torch.optim.SGD, {"lr": RATE, "momentum": 0.9})
    return own


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models

    own = Tokenizer(models.WordLevel({f"{n}": n for n in range(99)}, unk_token="0"))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=own, pad_token="0", eos_token="2", unk_token="0"
    )


def check_sharded(engine: str, model: Any) -> None:
    """The engine has done what its name says, and nothing was ignored without a word."""
    from torch.distributed.tensor import DTensor

    parameters = [p for p in model.parameters() if p.is_floating_point()]
    if engine.startswith(("FSDP2", "HSDP")):
        kinds = {type(p) for p in parameters}
        dims = {p.device_mesh.ndim for p in parameters if isinstance(p, DTensor)}
        right = kinds == {DTensor} and dims == {1 + (engine == "HSDP")}
    elif engine == "ZeRO-3":
        right = all(hasattr(p, "ds_id") and p.numel() == 0 for p in parameters)
    elif engine == "ZeRO-2":
        trained = [p for p in parameters if p.requires_grad]
        right = all(hasattr(p, "_hp_mapping") for p in trained)
    else:
        right = world() == 1 or dist.is_initialized()
    if not right:
        raise RuntimeError(f"{engine} has not sharded")


def train(engine: str, case: str, folder: Path, way: str) -> None:
    """Run a case; the adapter goes to `folder/case/whole` and `folder/case/resumed`."""
    trainer, method, base = case.split("/")
    dtype = torch.float32 if engine in IN_FLOAT32 or base in OF_FLOAT32 else torch.float64
    at, runs = folder / case, folder / case / "trainer"
    if way == "train":
        model = model_of(trainer, method, base, folder, dtype)
        own = trainer_of(engine, trainer, model, runs, **BASES[base])
        own.train()
        check_sharded(engine, model)
        save(model, at / "whole")
        del own, model
        gc.collect()
    model = model_of(trainer, method, base, folder, dtype)
    with torch.no_grad():
        # the checkpoint, not the seed, decides
        for p in model.parameters():
            if p.requires_grad:
                p.mul_(0.5)
    own = trainer_of(engine, trainer, model, at / f"trainer of {way}", **BASES[base])
    own.train(resume_from_checkpoint=str(runs / f"checkpoint-{STOP}"))
    save(model, at / ("resumed" if way == "train" else "elsewhere"))


def save(model: Any, folder: Path) -> None:
    """In all processes, which have equal bits."""
    if world() > 1:
        model.verify_replicas()
    # the gather is collective where parameters are sharded
    model.save_adapter(folder if rank() == 0 else folder.with_name(f"{folder.name} {rank()}"), "a")


def main(engine: str, folder: Path, way: str, cases: list[str]) -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    for trainer, _, base in (case.split("/") for case in cases):
        if base in LOADED:
            plain_of(trainer).save_pretrained(stored_at(trainer, folder))
    for case in cases:
        if rank() == 0 and way == "train":
            shutil.rmtree(folder / case, ignore_errors=True)
        said = "done"
        try:
            train(engine, case, folder, way)
        except Exception as error:  # noqa: BLE001  of any kind, and the same in all processes
            said = f"{type(error).__name__}: {error}".replace("\n", " ")
            if "TRACE" in os.environ:
                traceback.print_exc()
        gc.collect()
        if rank() == 0:
            print("case", case, said, flush=True)  # noqa: T201  the table reads it
    # see examples/distributed.py
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], sys.argv[4:])
