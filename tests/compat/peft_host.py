"""A program that imports PEFT, as frameworks do; `test_peft_install` runs it in fresh processes.

Writes a JSON file of what it found: `peft_host.py FILE [FOLDER | NAME …]`, with the folders of
packages whose imports of PEFT are tried, and names in PEFT.
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.util
import json
import pickle
import pickletools
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate.utils
import peft
import peft.tuners.lora.layer
import peft.utils.other
import torch
import transformers.integrations.peft
import transformers.utils
from datasets import Dataset, disable_progress_bars
from peft.optimizers import create_loraplus_optimizer
from peft.tuners.lora import LoraLayer
from peft.utils import save_and_load
from peft.utils.hotswap import hotswap_adapter
from transformers import AutoModelForCausalLM
from transformers.trainer_utils import _is_peft_model
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
from words import SENTENCES, plain, tokenizer

QUIET: dict[str, Any] = {
    "report_to": "none", "use_cpu": True, "bf16": False, "disable_tqdm": True,
    "dataloader_pin_memory": False, "logging_steps": 1, "save_strategy": "no",
    "learning_rate": 1e-2, "max_steps": 3, "gradient_checkpointing": False,
}  # fmt: skip
PAIRS = {"prompt": ["the film was"] * 8, "chosen": [" good ."] * 8, "rejected": [" bad ."] * 8}


def config() -> Any:
    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def packages() -> dict[str, Any]:
    """What a host asks before it imports anything."""
    return {
        "arguments": sys.argv[1:2],
        "folder": sys.path[0],
        "is found": importlib.util.find_spec("peft") is not None,
        "versions": [importlib.metadata.version("peft"), peft.__version__],
        "is available": [
            transformers.utils.is_peft_available(), accelerate.utils.is_peft_available(),
        ],
    }  # fmt: skip


def names() -> dict[str, Any]:
    """The modules of some objects of PEFT."""
    found = {
        "LoraConfig": peft.LoraConfig,
        "PeftModel": peft.PeftModel,
        "LoraLayer": LoraLayer,
        "LoraLayer of layer": peft.tuners.lora.layer.LoraLayer,
        "BaseTunerLayer": peft.tuners.tuners_utils.BaseTunerLayer,
        "ModulesToSaveWrapper": peft.utils.other.ModulesToSaveWrapper,
        "create_loraplus_optimizer": create_loraplus_optimizer,
        "hotswap_adapter": hotswap_adapter,
        "set_peft_model_state_dict": save_and_load.set_peft_model_state_dict,
    }
    return {name: value.__module__.partition(".")[0] for name, value in found.items()}


def others() -> dict[str, str]:
    """What comes of names that do not exist here."""
    found = {}
    for line in ("from peft import get_peft_modle", "from peft import VBLoRAConfig",
                 "from peft.tuners.vblora import VBLoRAConfig", "peft.VBLoRAConfig"):  # fmt: skip
        try:
            exec(line)
        except (AttributeError, ImportError) as error:
            found[line] = f"{type(error).__name__}: {error}"
        else:
            found[line] = "found"
    return found


def models() -> dict[str, Any]:
    """What hosts ask of models, with and without adapters, and transformers' own methods."""
    made = peft.get_peft_model(plain(AutoModelForCausalLM, "llama"), config())
    model, tokens = plain(AutoModelForCausalLM, "llama"), torch.tensor([[5, 6, 7]])
    before = model(tokens).logits
    # it asks for a later release than there is
    transformers.integrations.peft.MIN_PEFT_VERSION = "0.18.0"
    model.add_adapter(peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False), "a")
    changed = model(tokens).logits
    model.disable_adapters()
    stream = pickle.dumps(config())
    return {
        "with": [accelerate.utils.is_peft_model(made), _is_peft_model(made)],
        "without": [accelerate.utils.is_peft_model(model.model), _is_peft_model(model.model)],
        "changes": bool((changed - before).abs().max() > 1e-3),
        "returns": torch.equal(model(tokens).logits, before),
        "pickled": sorted({a for _, a, _ in pickletools.genops(stream) if f"{a}."[:5] == "peft."}),
    }


def trained(
    trainer: Any, arguments: Any, rows: dict[str, Any], folder: str
) -> tuple[list[float], list[str]]:
    """The losses of TRL's trainer, and the files of the adapter."""
    disable_progress_bars()
    made = trainer(
        plain(AutoModelForCausalLM, "llama"), args=arguments(folder, **QUIET), peft_config=config(),
        train_dataset=Dataset.from_dict(rows), processing_class=tokenizer(pairs=False),
    )  # fmt: skip
    draws = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in made.model.parameters():
            # A of each layer
            if parameter.requires_grad and parameter.any():
                parameter.normal_(generator=draws, std=0.2)
    made.train()
    made.save_model(folder)
    losses = [line["loss"] for line in made.state.log_history if "loss" in line]
    return losses, sorted(path.name for path in Path(folder).glob("adapter*"))


def imports(folder: Path) -> Iterator[str]:
    """The lines of a package that import from PEFT."""
    for file in folder.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "from peft" in text else ():
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "peft":
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def missing(asked: list[str]) -> list[str]:
    """The names that packages import from PEFT, and that are not there.

    Args:
        asked: folders of packages, and names.
    """
    found, names = set(), {name for name in asked if not Path(name).is_dir()}
    for name in names.union(*(imports(Path(path)) for path in asked if path not in names)):
        module, _, attribute = name.rpartition(".")
        try:
            getattr(importlib.import_module(module), attribute)
        except (AttributeError, ImportError):
            found.add(name)
    return sorted(found)


def main() -> None:
    found: dict[str, Any] = {
        "packages": packages(), "names": names(), "others": others(), "models": models(),
        "missing": missing(sys.argv[2:]),
    }  # fmt: skip
    for trainer, arguments, rows in (
        (SFTTrainer, SFTConfig, {"text": SENTENCES * 4}), (DPOTrainer, DPOConfig, PAIRS),
    ):  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            found[trainer.__name__] = trained(trainer, arguments, rows, folder)
    if found["names"]["LoraConfig"] == "peft":
        found["installed late"] = installed_late()
    Path(sys.argv[1]).write_text(json.dumps(found))


def installed_late() -> dict[str, Any]:
    """What `install()` does to a process that has imported the real PEFT."""
    before, theirs = peft, peft.get_peft_model(plain(AutoModelForCausalLM, "llama"), config())
    name = "adapterzoo.peft"
    importlib.import_module(name).install()
    ours = importlib.import_module("peft")
    vera = peft.VBLoRAConfig(num_vectors=4, vector_length=8, target_modules=["q_proj"], topk=2, r=2)
    wrapped = before.get_peft_model(plain(AutoModelForCausalLM, "llama"), vera)
    # a late import in code of PEFT, and of this library, which asks for what PEFT has wrapped
    late: list[dict[str, Any]] = [{"__name__": "peft.mapping"}, {"__name__": "adapterzoo.model"}]
    for namespace in late:
        exec("from peft import LoraConfig", namespace)
    return {
        "a view": ours.LoraConfig.__module__,
        "before": before.LoraConfig.__module__.partition(".")[0],
        "their model": isinstance(theirs, ours.PeftModel),
        "their layer": isinstance(
            theirs.base_model.model.model.layers[0].self_attn.q_proj, ours.tuners.lora.LoraLayer
        ),
        "own code": [namespace["LoraConfig"] is before.LoraConfig for namespace in late],
        "what is missing": ours.VBLoRAConfig is before.VBLoRAConfig,
        "their method": [type(wrapped).__module__.partition(".")[0], _is_peft_model(wrapped)],
    }


if __name__ == "__main__":
    main()
