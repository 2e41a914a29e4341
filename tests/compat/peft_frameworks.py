"""A program with the frameworks' own ways to use adapters; `test_peft_install` runs it.

`peft_frameworks.py FILE FOLDER NAME …` writes a JSON file of what the frameworks of these names
did: facts, and outputs. On PEFT itself it also writes the values of all adapters to the folder,
from which the other runs take them.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import torch
import transformers.integrations.peft
from datasets import Dataset, disable_progress_bars
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    CLIPTextConfig,
    CLIPTextModel,
    Trainer,
    TrainingArguments,
)
from transformers.utils import logging
from words import SENTENCES, plain, tokenizer

IS_PEFT = peft.LoraConfig.__module__.startswith("peft")
TOKENS = torch.tensor([[5, 6, 7, 8]])
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
UNET: dict[str, Any] = {
    "block_out_channels": (4, 8), "layers_per_block": 1, "sample_size": 8,
    "in_channels": 4, "out_channels": 4, "cross_attention_dim": 16, "norm_num_groups": 2,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
}  # fmt: skip
VAE: dict[str, Any] = {
    "block_out_channels": [4, 8], "latent_channels": 4, "norm_num_groups": 2,
    "down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2,
}  # fmt: skip
CLIP = CLIPTextConfig(
    vocab_size=50, hidden_size=16, intermediate_size=32, num_attention_heads=2,
    num_hidden_layers=2, bos_token_id=0, eos_token_id=2, pad_token_id=1,
)  # fmt: skip

Found = dict[str, dict[str, Any]]


def lora(*targets: str, **fields: Any) -> Any:
    return peft.LoraConfig(r=4, lora_alpha=6, target_modules=list(targets), **fields)


def give(model: Any, name: str, file: Path) -> None:
    """Give an adapter the values of a file, which PEFT itself writes."""
    if IS_PEFT:
        draws = torch.Generator().manual_seed(len(file.name))
        own = peft.get_peft_model_state_dict(model, adapter_name=name)
        save_file({k: torch.randn(t.shape, generator=draws) / 5 for k, t in own.items()}, file)
    peft.set_peft_model_state_dict(model, load_file(file), name)


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def refused(call: Callable[[], Any]) -> bool:
    """Whether a call raises a ValueError, or one below it."""
    try:
        call()
    except (ValueError, TypeError):
        return True
    return False


def trained(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


# --- transformers ---


def with_transformers(shared: Path, own: Path) -> Found:
    facts: dict[str, Any] = {}
    base = shared / "llama"
    if IS_PEFT:
        plain(AutoModelForCausalLM, "llama").save_pretrained(base)

    def fresh() -> Any:
        return AutoModelForCausalLM.from_pretrained(base)

    def logits(model: Any) -> Tensor:
        with torch.no_grad():
            return model(TOKENS).logits

    model = fresh()
    facts["plain"] = [
        refused(call)
        for call in (
            model.active_adapters, model.disable_adapters, model.get_adapter_state_dict,
            model.load_adapter, lambda: model.set_adapter("a"), lambda: model.delete_adapter("a"),
            lambda: fresh().add_adapter({"r": 8}),
        )
    ]  # fmt: skip
    model.add_adapter(lora("q_proj", "v_proj"))
    give(model, "default", shared / "llama.safetensors")
    outputs = {"added": logits(model)}
    facts["added"] = [model.active_adapters(), [*model.peft_config], trained(model), model.training]
    facts["again"] = refused(lambda: model.add_adapter(lora("q_proj")))
    model.add_adapter(lora("q_proj"), "b")
    give(model, "b", shared / "llama_b.safetensors")
    outputs["b"], facts["b"] = logits(model), model.active_adapters()
    facts["keys"] = sorted(model.get_adapter_state_dict())
    model.set_adapter(["default", "b"])
    outputs["both"], facts["both"] = logits(model), model.active_adapters()
    facts["unknown"] = [
        refused(call)
        for call in (
            lambda: model.set_adapter("c"), lambda: model.set_adapter(["c"]),
            lambda: model.delete_adapter(["c"]), lambda: model.save_pretrained(own / "two"),
        )
    ]  # fmt: skip
    model.disable_adapters()
    outputs["disabled"], facts["disabled"] = logits(model), model.active_adapters()
    model.enable_adapters()
    outputs["enabled"] = logits(model)
    for name in ("default", "b"):
        model.set_adapter(name)
        model.save_pretrained(own / name)
        facts[f"files of {name}"] = files_in(own / name)
        facts[f"tensors of {name}"] = sorted(load_file(own / name / "adapter_model.safetensors"))
    model.delete_adapter("b")
    outputs["deleted"], facts["deleted"] = logits(model), model.active_adapters()
    model.delete_adapter("default")
    outputs["plain again"] = logits(model)
    model.save_pretrained(own / "whole")
    facts["plain again"] = [refused(model.active_adapters), files_in(own / "whole")]

    model, info = AutoModelForCausalLM.from_pretrained(own / "default", output_loading_info=True)
    outputs["from a folder"] = logits(model)
    facts["from a folder"] = [model.active_adapters(), trained(model), model.training]
    facts["info"] = {key: sorted(value) for key, value in info.items()}
    model.load_adapter(own / "b", "b", is_trainable=True)
    outputs["loaded"], facts["loaded"] = logits(model), [model.active_adapters(), trained(model)]
    facts["taken"] = refused(lambda: model.load_adapter(own / "b", "b"))
    model.load_adapter(own / "b", adapter_name="b", hotswap=True)
    outputs["swapped"] = logits(model)
    model = fresh()
    tensors = load_file(own / "default" / "adapter_model.safetensors")
    model.load_adapter(peft_config=lora("q_proj", "v_proj"), adapter_state_dict=tensors)
    outputs["of tensors"] = logits(model)
    steps = trained_by_trainer(shared, own)
    return {"facts": facts | steps["facts"], "outputs": outputs | steps["outputs"]}


def trained_by_trainer(shared: Path, own: Path) -> Found:
    """Transformers' `Trainer` over a model with an adapter: its losses and its files."""
    rows = [{"input_ids": [5, 6, 7, 8 + n], "labels": [5, 6, 7, 8 + n]} for n in range(12)]

    def trainer(steps: int) -> Trainer:
        model = AutoModelForCausalLM.from_pretrained(shared / "llama")
        model.add_adapter(lora("q_proj", "v_proj"))
        give(model, "default", shared / "llama.safetensors")
        arguments = TrainingArguments(
            str(own / "run"), max_steps=steps, per_device_train_batch_size=2, logging_steps=1,
            save_steps=2, learning_rate=1e-2, use_cpu=True, report_to="none", disable_tqdm=True,
            dataloader_pin_memory=False,
        )  # fmt: skip
        return Trainer(model, arguments, train_dataset=rows)

    made = trainer(4)
    made.train()
    made.save_model(own / "saved")
    tensors = load_file(own / "saved" / "adapter_model.safetensors")
    outputs = {"losses": losses_of(made), **tensors}
    facts = {"files of a step": files_in(own / "run" / "checkpoint-2"),
             "saved": files_in(own / "saved")}  # fmt: skip
    # transformers finds no model in the files of a step
    step = str(own / "run" / "checkpoint-2")
    facts["resumed"] = refused(lambda: trainer(4).train(resume_from_checkpoint=step))
    return {"facts": facts, "outputs": outputs}


def losses_of(trainer: Any) -> Tensor:
    return torch.tensor([float(row["loss"]) for row in trainer.state.log_history if "loss" in row])


# --- accelerate ---


def with_accelerate(shared: Path, own: Path) -> Found:
    """A loop around a prepared model, whose state is saved and loaded."""
    from accelerate import Accelerator

    if IS_PEFT:
        plain(AutoModelForSequenceClassification, "bert", **STILL).save_pretrained(shared / "head")
    draws, facts, outputs = torch.Generator().manual_seed(5), {}, {}
    rows = [{"input_ids": torch.randint(5, 60, (7,), generator=draws), "labels": n % 2}
            for n in range(8)]  # fmt: skip

    def prepared() -> tuple[Any, ...]:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        base = AutoModelForSequenceClassification.from_pretrained(shared / "head")
        model = peft.get_peft_model(base, lora("query", "value", task_type="SEQ_CLS"))
        give(model, "default", shared / "head.safetensors")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=4)
        loader = torch.utils.data.DataLoader(rows, batch_size=2)
        return accelerator, *accelerator.prepare(model, optimizer, loader, schedule)

    def steps(accelerator: Any, model: Any, optimizer: Any, loader: Any, schedule: Any) -> Tensor:
        seen = []
        model.train()
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            seen.append(loss.detach())
        return torch.stack(seen)

    first = prepared()
    outputs["losses"] = steps(*first)
    first[0].save_state(own / "state")
    facts["state"] = files_in(own / "state")
    outputs["goes on"] = steps(*first)
    again = prepared()
    again[0].load_state(own / "state")
    outputs["again"] = steps(*again)
    unwrapped = again[0].unwrap_model(again[1])
    unwrapped.save_pretrained(own / "saved")
    facts["saved"] = files_in(own / "saved")
    facts["unwrapped"] = [isinstance(unwrapped, peft.PeftModel), trained(unwrapped)]
    outputs |= load_file(own / "saved" / "adapter_model.safetensors")
    base = AutoModelForSequenceClassification.from_pretrained(shared / "head")
    model = peft.PeftModel.from_pretrained(base, own / "saved")
    with torch.no_grad():
        outputs["loaded"] = model(TOKENS).logits
    return {"facts": facts, "outputs": outputs}


# --- sentence-transformers ---


def with_sentence_transformers(shared: Path, own: Path) -> Found:
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.losses import MultipleNegativesRankingLoss
    from sentence_transformers.models import Pooling, Transformer

    base = shared / "bert"
    if IS_PEFT:
        plain(AutoModel, "bert", **STILL).save_pretrained(base)
        tokenizer().save_pretrained(base)

    def fresh() -> Any:
        inner = Transformer(str(base))
        return SentenceTransformer(modules=[inner, Pooling(inner.model.config.hidden_size)])

    def encoded(model: Any) -> Tensor:
        return torch.tensor(model.encode(SENTENCES))

    facts: dict[str, Any] = {}
    model = fresh()
    outputs = {"plain": encoded(model)}
    for name in ("search", "topics"):
        model.add_adapter(lora("query", "value", task_type="FEATURE_EXTRACTION"), name)
        give(model.transformers_model, name, shared / f"bert_{name}.safetensors")
    for name in ("search", "topics"):
        model.set_adapter(name)
        outputs[name], facts[name] = encoded(model), model.active_adapters()
    model.disable_adapters()
    outputs["disabled"] = encoded(model)
    model.enable_adapters()
    model.delete_adapter("topics")
    model.set_adapter("search")
    trainer = SentenceTransformerTrainer(
        model,
        args=SentenceTransformerTrainingArguments(
            str(own / "run"), report_to="none", use_cpu=True, disable_tqdm=True, max_steps=3,
            logging_steps=1, learning_rate=0.1, optim="sgd", save_steps=2,
            dataloader_pin_memory=False,
        ),
        train_dataset=Dataset.from_dict({"anchor": SENTENCES * 4, "good": SENTENCES[::-1] * 4}),
        loss=MultipleNegativesRankingLoss(model),
    )  # fmt: skip
    trainer.train()
    outputs["losses"] = losses_of(trainer)
    outputs["trained"] = encoded(model)
    facts["checkpoint"] = files_in(own / "run" / "checkpoint-2")
    model.save_pretrained(str(own / "saved"))
    facts["saved"] = files_in(own / "saved")
    model = SentenceTransformer(str(own / "saved"))
    outputs["from a folder"], facts["from a folder"] = encoded(model), model.active_adapters()
    model = fresh()
    model.load_adapter(str(own / "saved"), "search")
    outputs["loaded"], facts["loaded"] = encoded(model), model.active_adapters()
    return {"facts": facts, "outputs": outputs}


# --- diffusers ---


def with_diffusers(shared: Path, own: Path) -> Found:
    found: Found = {"facts": {}, "outputs": {}}
    for part in (unet_alone, unet_trained, pipeline):
        for kind, values in part(shared, own).items():
            found[kind] |= {f"{part.__name__}: {name}": value for name, value in values.items()}
    return found


def fresh_unet() -> Any:
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    return UNet2DConditionModel(**UNET)


def denoised(unet: Any) -> Tensor:
    draws = torch.Generator().manual_seed(1)
    noise = torch.randn(1, 4, 8, 8, generator=draws)
    with torch.no_grad():
        return unet(noise, torch.tensor([3]), torch.randn(1, 5, 16, generator=draws)).sample


def unet_alone(shared: Path, own: Path) -> Found:
    """The methods of a model, and folders of one adapter, also of LoKr and for a hotswap."""
    from peft.tuners.lokr.layer import factorization

    facts: dict[str, Any] = {"factors": [factorization(n, k) for n in (36, 49) for k in (-1, 4, 8)]}
    unet, outputs = fresh_unet(), {}
    for name, targets in (("a", ["to_k", "to_v", "conv1"]), ("b", ["to_k", "conv1"])):
        unet.add_adapter(lora(*targets), name)
        give(unet, name, shared / f"unet_{name}.safetensors")
        facts[f"adds {name}"] = [unet.active_adapters(), trained(unet)]
        unet.save_lora_adapter(own / name, name)
        facts[f"tensors of {name}"] = sorted(load_file(own / name / FILE))
    for weights in ([0.5, 0.25], [1.0, {"mid": 0.3}]):
        unet.set_adapters(["a", "b"], weights)
        outputs[f"weights {weights}"] = denoised(unet)
    unet.disable_adapters()
    outputs["disabled"], facts["disabled"] = denoised(unet), unet.active_adapters()
    unet.enable_adapters()
    outputs["enabled"] = denoised(unet)
    unet.set_adapters("a")
    unet.fuse_lora(lora_scale=0.7)
    outputs["fused"] = denoised(unet)
    unet.unfuse_lora()
    outputs["unfused"] = denoised(unet)
    unet.delete_adapters("a")
    outputs["deleted"], facts["deleted"] = denoised(unet), [unet.active_adapters()]
    unet.unload_lora()
    outputs["unloaded"], facts["unloaded"] = denoised(unet), hasattr(unet, "peft_config")
    unet.add_adapter(peft.LoKrConfig(r=3, alpha=5, target_modules=["to_k"]), "k")
    give(unet, "k", shared / "lokr.safetensors")
    unet.set_adapters("k", 0.5)
    outputs["lokr"] = denoised(unet)
    unet.save_lora_adapter(own / "k", "k")
    unet = fresh_unet()
    unet.enable_layerwise_casting(storage_dtype=torch.float32, compute_dtype=torch.float32)
    unet.load_lora_adapter(own / "k", prefix=None, adapter_name="k", use_safetensors=True)
    outputs["lokr of a folder"], facts["name"] = denoised(unet), unet.active_adapters()
    unet = fresh_unet()
    unet.enable_lora_hotswap(target_rank=8)
    for is_swap in (False, True):
        options: dict[str, Any] = {"prefix": None, "adapter_name": "x", "use_safetensors": True}
        unet.load_lora_adapter(own / "b", hotswap=is_swap, **options)
        outputs[f"hotswap {is_swap}"] = denoised(unet)
    return {"facts": facts, "outputs": outputs}


def unet_trained(shared: Path, own: Path) -> Found:
    """A training loop as in diffusers' example for LoRA."""
    from accelerate import Accelerator
    from diffusers import DDPMScheduler, StableDiffusionPipeline
    from diffusers.training_utils import cast_training_params
    from diffusers.utils import convert_state_dict_to_diffusers

    accelerator, unet = Accelerator(cpu=True), fresh_unet()
    unet.requires_grad_(False)
    unet.to(dtype=torch.bfloat16)
    unet.add_adapter(lora("to_k", "to_q", "to_v", "to_out.0", init_lora_weights="gaussian"))
    cast_training_params(unet, dtype=torch.float32)
    give(unet, "default", shared / "start.safetensors")
    unet.enable_gradient_checkpointing()
    unet.train()
    layers = [p for p in unet.parameters() if p.requires_grad]
    facts = {"trained": sorted({str(p.dtype) for p in layers}), "numbers": trained(unet)}
    unet, optimizer = accelerator.prepare(unet, torch.optim.SGD(layers, lr=0.1))
    scheduler, draws, losses = DDPMScheduler(), torch.Generator().manual_seed(2), []
    for _ in range(3):
        latents, noise = torch.randn(2, 2, 4, 8, 8, generator=draws)
        steps = torch.randint(0, 1000, (2,), generator=draws)
        texts = torch.randn(2, 5, 16, generator=draws).bfloat16()
        with accelerator.accumulate(unet):
            noisy = scheduler.add_noise(latents, noise, steps).bfloat16()
            loss = (unet(noisy, steps, texts).sample.float() - noise).square().mean()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(layers, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    unwrapped = accelerator.unwrap_model(unet)
    layers_saved = convert_state_dict_to_diffusers(peft.get_peft_model_state_dict(unwrapped))
    StableDiffusionPipeline.save_lora_weights(own / "trained", unet_lora_layers=layers_saved)
    tensors = load_file(own / "trained" / FILE)
    facts["keys of the trained"] = sorted(tensors)
    return {"facts": facts, "outputs": {"losses": torch.stack(losses), **tensors}}


def pipeline(shared: Path, own: Path) -> Found:
    """Images of Stable Diffusion with files of adapters, by PEFT's keys and by kohya's."""
    from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline

    def fresh() -> Any:
        unet = fresh_unet()
        made = StableDiffusionPipeline(
            unet=unet, vae=AutoencoderKL(**VAE), text_encoder=CLIPTextModel(CLIP).eval(),
            tokenizer=None, scheduler=DDIMScheduler(steps_offset=1, clip_sample=False),
            safety_checker=None, feature_extractor=None, requires_safety_checker=False,
        )  # fmt: skip
        made.set_progress_bar_config(disable=True)
        return made

    def image(**options: Any) -> Tensor:
        with torch.no_grad():
            texts = pipe.text_encoder(TOKENS)[0]
        made = pipe(
            prompt_embeds=texts, negative_prompt_embeds=torch.zeros_like(texts), height=16,
            width=16, num_inference_steps=2, output_type="np",
            generator=torch.Generator().manual_seed(3), **options,
        )  # fmt: skip
        return torch.tensor(made.images[0])

    if IS_PEFT:
        for number, name in enumerate(("one", "two")):
            pipe = fresh()
            pipe.unet.add_adapter(lora("to_k", "to_q", "conv1"))
            pipe.text_encoder.add_adapter(lora("q_proj", "out_proj"))
            give(pipe.unet, "default", shared / f"{name}.safetensors")
            give(pipe.text_encoder, "default", shared / f"{name}_text.safetensors")
            StableDiffusionPipeline.save_lora_weights(
                shared, load_file(shared / f"{name}.safetensors"),
                load_file(shared / f"{name}_text.safetensors"),
                weight_name=f"pipe{number}.safetensors",
            )  # fmt: skip
        trained_ones = load_file(own / "trained" / FILE)
        kohya: dict[str, Tensor] = {}
        for key, tensor in trained_ones.items():
            layer, _, end = key.removeprefix("unet.").rpartition(".lora.")
            layer = f"lora_unet_{layer.replace('.', '_')}"
            kohya |= {f"{layer}.lora_{end}": tensor, f"{layer}.alpha": torch.tensor(2.0)}
        save_file(kohya, shared / "kohya.safetensors")

    facts: dict[str, Any] = {}
    pipe, parts = fresh(), ["unet", "text_encoder"]
    outputs = {"no adapter": image()}
    for step, call in {
        "load one": lambda: pipe.load_lora_weights(
            shared, weight_name="pipe0.safetensors", adapter_name="one"
        ),
        "load two": lambda: pipe.load_lora_weights(
            shared, weight_name="pipe1.safetensors", adapter_name="two"
        ),
        "weights": lambda: pipe.set_adapters(["one", "two"], [0.5, 0.8]),
        "by part": lambda: pipe.set_adapters(["one", "two"], [{"unet": 0.3, "text_encoder": 2}, 1]),
        "one": lambda: pipe.set_adapters("one"),
        "disabled": lambda: pipe.disable_lora(),
        "enabled": lambda: pipe.enable_lora(),
        "fused": lambda: pipe.fuse_lora(parts, lora_scale=0.7),
        "unfused": lambda: pipe.unfuse_lora(parts),
        "deleted": lambda: pipe.delete_adapters("one"),
        "fused again": lambda: pipe.fuse_lora(parts),
        "unloaded, but fused": lambda: pipe.unload_lora_weights(),
    }.items():
        call()
        outputs[step] = image()
        facts[step] = [pipe.get_active_adapters(), pipe.get_list_adapters(), [*pipe.fused_loras]]
    pipe = fresh()
    pipe.load_lora_weights(shared, weight_name="kohya.safetensors")
    outputs["kohya"] = image()
    outputs["scale"] = image(cross_attention_kwargs={"scale": 0.3})
    facts["kohya"] = [pipe.get_list_adapters(), pipe.unet.peft_config["default_0"].lora_alpha]
    pipe.unload_lora_weights()
    outputs["unloaded"], facts["unloaded"] = image(), pipe.get_list_adapters()
    return {"facts": facts, "outputs": outputs}


FILE = "pytorch_lora_weights.safetensors"
FRAMEWORKS = {
    "transformers": with_transformers,
    "accelerate": with_accelerate,
    "sentence_transformers": with_sentence_transformers,
    "diffusers": with_diffusers,
}


def main() -> None:
    file, shared, *names = sys.argv[1:]
    warnings.simplefilter("ignore")
    disable_progress_bars()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if IS_PEFT:
        # transformers asks for a later release than there is
        transformers.integrations.peft.MIN_PEFT_VERSION = peft.__version__
    found: dict[str, Any] = {}
    for name in names:
        with tempfile.TemporaryDirectory() as own:
            found[name] = FRAMEWORKS[name](Path(shared), Path(own))
    Path(file).write_text(json.dumps(found, default=lambda value: value.tolist()))


if __name__ == "__main__":
    main()
