"""A program that runs the frameworks' own example scripts; `test_peft_scripts` runs it.

`peft_scripts.py WORLD FOLDER NAME …` runs the scripts of these names on the tiny models and data of
WORLD, each in a child process whose working directory is FOLDER/NAME: what a script saves is there.
A script starts from values of adapters that are drawn by their keys in PEFT's files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import json
import multiprocessing
import os
import re
import runpy
import shutil
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from adapterzoo import kernels

CHECKOUTS = "ADAPTERZOO_CHECKOUTS"
"""The variable with a folder of checkouts, each under the name of its repository."""
STOP, STEPS = 2, 4
TIMES = ("runtime", "_per_second", "_time")
"""How the names of what a log says of times end."""
_TEMPLATE = (
    "{% for m in messages %}{% generation %}{{ m.content }} {{ eos_token }}{% endgeneration %}"
    "{% endfor %}"
)
_TRAINER = (
    f"--output_dir out --max_steps {STEPS} --save_steps {STOP} --logging_steps 1 --report_to none "
    "--use_cpu --bf16 False --learning_rate 1e-2 --per_device_train_batch_size 4 "
    "--dataloader_pin_memory False --disable_tqdm True "
)
_TRL = (
    "--model_name_or_path WORLD/llama --dtype float32 --use_peft --lora_r 4 --lora_alpha 6 "
    "--lora_dropout 0.0 --lora_target_modules q_proj v_proj down_proj " + _TRAINER
)


@dataclasses.dataclass(frozen=True)
class Script:
    """A script of a framework, or a page whose blocks of code are one.

    Attributes:
        package: that it needs.
        file: its path in the package, or below the folder of checkouts.
        arguments: in which WORLD is the folder with models and data.
        changes: of its text: models, data, sizes and dropout.
        more: code that is run after it.
        drops: whether adapters have dropout. Kernels are computed by their definitions then, of
            which the masks are those of torch.
    """

    package: str
    file: str
    arguments: str = ""
    changes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    more: str = ""
    drops: bool = False

    def path(self) -> Path | None:
        """Where the script is, if it is there."""
        spec = importlib.util.find_spec(self.package)
        roots = [Path(spec.origin).parent] if spec and spec.origin else []
        if roots and CHECKOUTS in os.environ:
            roots.append(Path(os.environ[CHECKOUTS]))
        return next((root / self.file for root in roots if (root / self.file).is_file()), None)


_REWARDED = (
    "--dataset_name WORLD/prompts --reward_funcs peft_scripts.reward --num_generations 2 "
    "--max_completion_length 6 "
)
_DIFFUSION = (
    "--pretrained_model_name_or_path WORLD/diffusion --output_dir out --resolution 16 --seed 0 "
    f"--train_batch_size 2 --max_train_steps {STEPS} --checkpointing_steps {STOP} --rank 4 "
    "--learning_rate 1e-2 --validation_prompt film --num_validation_images 1 "
)
_NO_TRACKER = {"log_with=args.report_to": "log_with=None"}
_ENCODED = """
import torch
from safetensors.torch import save_file

found = SentenceTransformer(final_output_dir).encode(["a bad plot", "this film"])
save_file({"encoded": torch.tensor(found)}, "encoded.safetensors")
"""
_ANSWERED = """
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import save_file

again = AutoPeftModelForCausalLM.from_pretrained("out", dtype="float32")
logits = again(torch.tensor([[5, 6, 7, 8]])).logits
save_file({"logits": logits.detach()}, "logits.safetensors")
"""
_ADAPTED = """
    from peft import LoraConfig, get_peft_model
    model = get_peft_model(model, LoraConfig(r=4, task_type="SEQ_CLS", target_modules=["query"]))
"""
_SAVED = """
    accelerator.unwrap_model(model).save_pretrained("adapter")
    accelerator.end_training()
"""
_NAMED = {
    '"google/gemma-2-2b"': '"WORLD/llama"',
    '"google/gemma-7b"': '"WORLD/llama"',
    '"klcsp/gemma7b-lora-alpaca-11-v1"': '"my_adapter"',
    "lora_dropout=0.1": "lora_dropout=0.0",
    # what the page leaves open: the fields, the names, the data, and what is computed
    '"lm_head"],\n    ...': '"lm_head"], r=4',
    '"k_proj"],\n    ...': '"k_proj"], r=4, task_type=TaskType.CAUSAL_LM',
    # PEFT adds no adapter beside one with copies of layers
    "model.add_adapter(lora_config)": (
        'model = AutoModelForCausalLM.from_pretrained("WORLD/llama")\n'
        "model.add_adapter(lora_config)"
    ),
    "import Trainer, TrainingArguments": """import Trainer, TrainingArguments
import torch
from safetensors.torch import save_file

rows = torch.arange(48).view(12, 4) % 30 + 5
dataset = [{"input_ids": row, "labels": row} for row in rows]

def note(name):
    save_file({"logits": model(rows[:2]).logits.detach().clone()}, f"{name}.safetensors")

def save(name):
    for p in model.parameters():
        if p.requires_grad:
            p.data = (torch.arange(p.numel()) + len(name)).view(p.shape).sin() / 5
    model.save_pretrained(name)
    note(f"logits of {name}")
""",
    "num_train_epochs=3,": (
        f"max_steps={STEPS}, save_steps={STOP}, logging_steps=1, learning_rate=1e-2, "
        "report_to='none', use_cpu=True, dataloader_pin_memory=False, disable_tqdm=True,"
    ),
    # transformers looks for a whole model in such a checkpoint, on PEFT
    'trainer.train(resume_from_checkpoint="./output/checkpoint-1000")': "",
    'model.save_pretrained("./my_adapter")': 'save("my_adapter")',
    'load_in_8bit=True),\n    device_map="auto",\n)': "load_in_8bit=True),\n)\nnote('eight bits')",
    # transformers keeps the scaling, and the layers that the second adapter lacks
    "LoraConfig(r=16, lora_alpha=64)": "LoraConfig(r=4, target_modules=['q_proj', 'k_proj'])",
    'model.delete_adapter("adapter_1")': 'save("second"); model.delete_adapter("adapter_1")',
    "AutoModel.from_pretrained(...)": 'AutoModelForCausalLM.from_pretrained("WORLD/llama")',
    "adapter_path_1": '"my_adapter"',
    "adapter_path_2": '"second"',
    "# Generate outputs with adapter 1": "note('first')",
    "# Generate outputs with adapter 2": "note('swapped')",
    "max_rank = ...": "max_rank = 8",
    "torch.compile(model, ...)": 'torch.compile(model, backend="eager")',
    "output_1 = model(...)": "note('compiled')",
    "output_2 = model(...)": "note('swapped in compiled')",
}

SCRIPTS = {
    "page": Script("transformers", "transformers/docs/source/en/peft.md", changes=_NAMED),
    "sft": Script(
        "trl", "scripts/sft.py", _TRL + "--dataset_name WORLD/texts --max_length 16", more=_ANSWERED
    ),
    "sft with dropout": Script(
        "trl",
        "scripts/sft.py",
        _TRL.replace("_dropout 0.0", "_dropout 0.2") + "--dataset_name WORLD/texts --max_length 16",
        drops=True,
    ),
    "dpo": Script("trl", "scripts/dpo.py", _TRL + "--dataset_name WORLD/pairs"),
    "grpo": Script("trl", "scripts/grpo.py", _TRL + _REWARDED + "--beta 0.1"),
    "reward": Script(
        "trl", "scripts/reward.py", _TRL + "--dataset_name WORLD/pairs --lora_task_type SEQ_CLS"
    ),
    "kto": Script("trl", "scripts/kto.py", _TRL + "--dataset_name WORLD/pairs"),
    "rloo": Script("trl", "scripts/rloo.py", _TRL + _REWARDED),
    "reward_modeling": Script(
        "trl",
        "trl/examples/scripts/reward_modeling.py",
        _TRL + "--dataset_name WORLD/pairs --lora_task_type SEQ_CLS",
    ),
    "gooaq": Script(
        "sentence_transformers",
        "sentence-transformers/examples/sentence_transformer/training/peft/training_gooaq_lora.py",
        "WORLD/bert",
        changes={
            "lora_dropout=0.1": "lora_dropout=0.0",
            '"sentence-transformers/gooaq"': '"WORLD/questions"',
            "test_size=10_000": "test_size=4",
            "range(1_000_000)": "range(16)",
            "=1024": "=4",
            "mini_batch_size=32": "mini_batch_size=2",
            "bf16=True": "bf16=False, use_cpu=True, report_to='none', dataloader_pin_memory=False",
            "learning_rate=2e-5": "learning_rate=1e-2",
            "_steps=100": f"_steps={STOP}",
            "logging_steps=25": "logging_steps=1",
            "import NanoBEIREvaluator": "import EmbeddingSimilarityEvaluator",
            "NanoBEIREvaluator()": (
                "EmbeddingSimilarityEvaluator(['film', 'plot'], ['bad', 'good'], [0.1, 0.9])"
            ),
            "model.push_to_hub(run_name)": "pass",
        },
        more=_ENCODED,
    ),
    "text_to_image": Script(
        "diffusers",
        "diffusers/examples/text_to_image/train_text_to_image_lora.py",
        _DIFFUSION + "--train_data_dir WORLD/images",
        changes=_NO_TRACKER,
    ),
    "dreambooth": Script(
        "diffusers",
        "diffusers/examples/dreambooth/train_dreambooth_lora.py",
        _DIFFUSION + "--instance_data_dir WORLD/photos --instance_prompt film --train_text_encoder",
        changes=_NO_TRACKER,
    ),
    "checkpointing": Script(
        "accelerate",
        "accelerate/examples/by_feature/checkpointing.py",
        f"--cpu --checkpointing_steps {STOP} --output_dir out",
        changes={
            "import evaluate\n": "",
            'evaluate.load("glue", "mrpc")': (
                "type('M', (), {'add_batch': lambda *_, **__: None, 'compute': lambda _: {}})()"
            ),
            '"bert-base-cased"': '"WORLD/bert"',
            'load_dataset("nyu-mll/glue", "mrpc")': 'load_dataset("WORLD/glue")',
            "    model = model.to(accelerator.device)\n": _ADAPTED,
            "    accelerator.end_training()\n": _SAVED,
        },
    ),
}


def reward(completions: list[str], **_: Any) -> list[float]:
    """How many different words there are."""
    return [float(len(set(text.split()))) for text in completions]


def make_world(folder: Path) -> None:
    """Write the models and data that scripts take.

    Args:
        folder: for them.
    """
    from PIL import Image
    from transformers import AutoModel, AutoModelForCausalLM
    from words import SENTENCES, plain, tokenizer

    words, pairs = tokenizer(pairs=False), tokenizer()
    words.chat_template = _TEMPLATE
    plain(AutoModelForCausalLM, "llama").save_pretrained(folder / "llama")
    words.save_pretrained(folder / "llama")
    bert = plain(AutoModel, "bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    bert.save_pretrained(folder / "bert")
    pairs.save_pretrained(folder / "bert")
    texts = [f"{text} w{number}" for number in range(8) for text in SENTENCES]
    rows: dict[str, list[dict[str, Any]]] = {
        "texts": [{"text": text} for text in texts],
        "prompts": [{"prompt": text} for text in texts],
        "pairs": [
            {"prompt": "the film was", "chosen": f" good . {text}", "rejected": f" bad {text}"}
            for text in texts
        ],
        "questions": [{"question": text, "answer": f"a good {text}"} for text in texts],
        "glue": [
            {"sentence1": text, "sentence2": "a bad plot", "label": number % 2, "idx": number}
            for number, text in enumerate(texts)
        ],
        "images": [{"file_name": f"{number}.png", "text": "a film"} for number in range(8)],
    }
    for name, lines in rows.items():
        (folder / name).mkdir()
        file = folder / name / ("metadata.jsonl" if name == "images" else "train.jsonl")
        file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    shutil.copy(folder / "glue" / "train.jsonl", folder / "glue" / "validation.jsonl")
    (folder / "photos").mkdir()
    for number in range(8):
        image = Image.linear_gradient("L").resize((16, 16)).rotate(number * 40).convert("RGB")
        image.save(folder / "images" / f"{number}.png")
        image.save(folder / "photos" / f"{number}.png")
    if importlib.util.find_spec("diffusers"):
        make_diffusion(folder / "diffusion")


def make_diffusion(folder: Path) -> None:
    """Write a pipeline of Stable Diffusion.

    Args:
        folder: for it.
    """
    from diffusers import AutoencoderKL, DDPMScheduler, StableDiffusionPipeline
    from peft_frameworks import CLIP, VAE, fresh_unet
    from transformers import CLIPTextModel, CLIPTokenizer

    letters = "abcdefghijklmnopqrst"
    words = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{a}</w>" for a in letters)]
    torch.manual_seed(0)
    made = StableDiffusionPipeline(
        unet=fresh_unet(), vae=AutoencoderKL(**VAE), text_encoder=CLIPTextModel(CLIP),
        tokenizer=CLIPTokenizer({w: i for i, w in enumerate(words)}, [], model_max_length=12),
        scheduler=DDPMScheduler(), safety_checker=None, feature_extractor=None,
        requires_safety_checker=False,
    )  # fmt: skip
    made.save_pretrained(folder)


class Transforms(ModuleType):
    """Those of torchvision that scripts use, where it is not installed; nothing is random."""

    class InterpolationMode:
        LANCZOS, BILINEAR = "lanczos", "bilinear"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: lambda image: image

    def Compose(self, steps: list[Any]) -> Any:  # noqa: N802  torchvision's name
        return lambda image: functools.reduce(lambda found, step: step(found), steps, image)

    def ToTensor(self) -> Any:  # noqa: N802
        return lambda image: (
            torch.tensor(list(image.tobytes())).view(16, 16, 3).permute(2, 0, 1) / 255
        )


def draw_values() -> None:
    """Draw the values of each adapter that is added from now on, by their keys in PEFT's files."""
    import peft
    from transformers.integrations.peft import PeftAdapterMixin

    def drawn(model: Any) -> None:
        for name in model.peft_config:
            own = peft.get_peft_model_state_dict(model, adapter_name=name)
            for key, tensor in own.items():
                draws = torch.Generator().manual_seed(zlib.crc32(key.encode()))
                own[key] = (torch.randn(tensor.shape, generator=draws) / 5).to(tensor.dtype)
            peft.set_peft_model_state_dict(model, own, name)
        # the libraries have drawn other numbers
        torch.manual_seed(0)

    def wrapped(function: Any, is_method: bool) -> Any:
        @functools.wraps(function)
        def call(*given: Any, **options: Any) -> Any:
            result = function(*given, **options)
            drawn(given[0] if is_method else result)
            return result

        return call

    # transformers asks for a later release than there is
    importlib.import_module("transformers.integrations.peft").MIN_PEFT_VERSION = peft.__version__
    peft.get_peft_model = wrapped(peft.get_peft_model, False)
    # TRL's trainers are given this one
    if (ours := sys.modules.get("adapterzoo.compat.peft.model")) is not None:
        ours.get_peft_model = peft.get_peft_model
    mixins = [PeftAdapterMixin]
    if importlib.util.find_spec("diffusers"):
        mixins.append(importlib.import_module("diffusers.loaders.peft").PeftAdapterMixin)
    for mixin in mixins:
        mixin.add_adapter = wrapped(mixin.add_adapter, True)


def run(script: Script, world: Path, folder: Path) -> None:
    """Run a script in this process, which ends then.

    Args:
        script: what is run.
        world: from `make_world`.
        folder: its working directory.
    """
    os.chdir(folder)
    sink = os.open("printed.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(sink, 1), os.dup2(sink, 2)
    losses: list[float] = []
    backward = torch.Tensor.backward

    def seen(loss: Any, *given: Any, **options: Any) -> None:
        losses.append(float(loss.detach()))
        backward(loss, *given, **options)

    torch.Tensor.backward = seen
    path = script.path()
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        path = path.with_name("page.py")
        text = "\n".join(re.findall(r"^```py\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))
    for there, here in script.changes.items():
        if there not in text:
            raise ValueError(f"{path} has no {there!r}")
        text = text.replace(there, here)
    if script.changes or script.more:
        path = folder / path.name
        path.write_text((text + script.more).replace("WORLD", str(world)), encoding="utf-8")
    sys.argv = [str(path), *script.arguments.replace("WORLD", str(world)).split()]
    importlib.import_module("datasets")
    if not importlib.util.find_spec("torchvision"):
        sys.modules["torchvision"] = ModuleType("torchvision")
        sys.modules["torchvision.transforms"] = sys.modules["torchvision"].transforms = Transforms(
            "transforms"
        )
    torch.manual_seed(0)
    with kernels.use("reference") if script.drops else contextlib.nullcontext():
        runpy.run_path(str(path), run_name="__main__")
    Path("losses.json").write_text(json.dumps(losses))


def main() -> None:
    world, folder, *names = sys.argv[1:]
    draw_values()
    if not Path(world).exists():
        make_world(Path(world))
    for package in {SCRIPTS[name].package for name in names}:
        importlib.import_module(package)
    fork = multiprocessing.get_context("fork")
    for name in names:
        own = Path(folder, name).resolve()
        own.mkdir(parents=True)
        process = fork.Process(target=run, args=(SCRIPTS[name], Path(world).resolve(), own))
        process.start()
        process.join()
        if process.exitcode:
            sys.exit(f"{name}: {(own / 'printed.txt').read_text()[-4000:]}")


if __name__ == "__main__":
    main()
