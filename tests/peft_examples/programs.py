"""Runs PEFT's pages, notebooks and scripts with one library, each in a process of its own."""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import multiprocessing
import os
import re
import sys
import tempfile
import textwrap
import time
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from peer.programs import _sources as cells_of
from peer.tiny import local_source

from .scripts import SCRIPTS

KINDS = ("pages", "notebooks", "scripts")
LIBRARIES = ("peft", "adapterzoo.peft")
_BLOCK = re.compile(r"```py(?:thon)?[^\n]*\n(.*?)```", re.DOTALL)
# what concerns neither library: devices, long runs, names of transformers 4, sizes of tiny data
_HERE = {
    "pin_memory=True": "pin_memory=False", "num_epochs = 20\n": "num_epochs = 2\n",
    "num_epochs = 50\n": "num_epochs = 2\n", "max_new_tokens=256": "max_new_tokens=8",
    "max_new_tokens=128": "max_new_tokens=8", "max_length = 128": "max_length = 24",
    "batch_size = 128": "batch_size = 4", "do_sample=True": "do_sample=False",
    "load_in_4bit=True, ": "", '.split("### Response:")[1]': "", ", max_length=None)": ")",
    '"./bert-finetuned-ner-lora"': '"./bert-finetuned-ner-lora/checkpoint-4"',
    # of ViT
    'target_modules=["query", "value"],\n    lora_dropout': (
        'target_modules=["q_proj", "v_proj"],\n    lora_dropout'
    ),
    # PEFT cannot generate with 4 bits on a CPU
    'model_kwargs["quantization_config"] = BitsAndBytesConfig(load_in_4bit=True)': "",
}  # fmt: skip
_PATTERNS = {
    r"dropout( ?= ?)0\.\d+": r"dropout\g<1>0.0",
    r"\bi = 1[03]\d?\b": "i = 0",
    r"\[1[03][79]\]": "[0]",
    # what stands for code that a reader has
    r"(?m)^(\w*model|config|dataset|dataloader) = \.\.\..*$": r"\1 = _has('\1')",
    r"(\w+Config)\(\.\.\.\)": r"\1(target_modules=['q_proj', 'v_proj'])",
    r"(\w+Config)\(\.\.\., ": r"\1(",
    r"from_pretrained\(\.\.\.": "from_pretrained('llama'",
    r", \.\.\.\)": ")",
}


def run(
    peft: Path,
    kind: str,
    results: Path,
    names: Iterable[str],
    seconds: int,
    libraries: Iterable[str] = LIBRARIES,
) -> None:
    """Write a line for each program and library.

    Args:
        peft: a checkout of PEFT.
        kind: "pages", "notebooks" or "scripts".
        results: the file to write.
        names: a part of the names of the programs, all if empty.
        seconds: after which a program is ended.
        libraries: that are imported in place of PEFT.
    """
    for module in ("torch", "transformers", "datasets", "trl", *libraries):
        importlib.import_module(module)
    results.parent.mkdir(parents=True, exist_ok=True)
    wanted = [n for n in _names(peft, kind) if not names or any(part in n for part in names)]
    with results.open("w", encoding="utf-8") as file:
        for name in wanted:
            for library in libraries:
                line = _child(peft, kind, name, library, seconds)
                # after install() it is another one than was asked for
                own = importlib.import_module(library).LoraConfig.__module__
                known_as = "peft" if own.startswith("peft.") else "adapterzoo.peft"
                file.write(json.dumps({"id": name, "library": known_as, **line}) + "\n")
                file.flush()


def _names(peft: Path, kind: str) -> list[str]:
    if kind == "scripts":
        return list(SCRIPTS)
    if kind == "notebooks":
        root = peft / "examples"
        return sorted(p.relative_to(root).as_posix() for p in root.glob("*/*.ipynb"))
    pages = [peft / "README.md", *sorted((peft / "docs" / "source").rglob("*.md"))]
    return [p.relative_to(peft).as_posix() for p in pages if _BLOCK.search(p.read_text("utf-8"))]


def _child(peft: Path, kind: str, name: str, library: str, seconds: int) -> dict[str, Any]:
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        outcome = Path(scratch, "outcome.json")
        # the libraries are imported once
        fork = multiprocessing.get_context("fork")
        process = fork.Process(target=_main, args=(peft, kind, name, library, outcome))
        process.start()
        process.join(seconds)
        if process.is_alive():
            process.kill()
            process.join()
        found = {"errors": {"-1": ["the process ended", ""]}, "seen": {}, "blocks": 0}
        if outcome.is_file():
            found = json.loads(outcome.read_text(encoding="utf-8"))
    return {**found, "seconds": round(time.monotonic() - start, 1)}


def changed(source: str, library: str) -> str:
    """Return the source of a program, with the import changed and nothing else.

    Args:
        source: of a cell, block or script.
        library: what `peft` becomes.
    """
    if library == "peft":
        return source
    source = re.sub(r"^(\s*)from peft\b", rf"\1from {library}", source, flags=re.M)
    return re.sub(r"^(\s*)import peft\b(?! as)", rf"\1import {library} as peft", source, flags=re.M)


# --- in the process of a program ---


def _main(peft: Path, kind: str, name: str, library: str, outcome: Path) -> None:
    os.chdir(outcome.parent)
    sink = os.open(outcome.parent / "printed.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(sink, 1), os.dup2(sink, 2)
    os.environ |= {"HF_HOME": str(outcome.parent / "cache"), "HF_HUB_OFFLINE": "1"}
    found: dict[str, Any] = {"errors": {}, "seen": {}, "blocks": 0}
    try:
        _watched(peft, kind, name, library, found)
    except BaseException as error:  # noqa: BLE001  a program may also exit
        if not (isinstance(error, SystemExit) and not error.code):
            found["errors"][found["blocks"]] = described(error)
    outcome.write_text(json.dumps(found), encoding="utf-8")
    os._exit(0)


def _watched(peft: Path, kind: str, name: str, library: str, found: dict[str, Any]) -> None:
    """Run a program, and fill in its errors, what was seen, and how many blocks ran."""
    from . import hub
    from .watch import Watch

    module = importlib.import_module(library)
    hub.install(hub.Hub(Path(tempfile.mkdtemp(dir=Path.cwd()))), module)
    watch = Watch(module)
    watch.install()
    found["seen"] = watch.seen
    if kind == "pages":
        blocks = _BLOCK.findall((peft / name).read_text("utf-8"))
        found["blocks"] = len(blocks)
        found["errors"] = _page(
            [changed(textwrap.dedent(b), library) for b in blocks], name, module
        )
        return
    path = peft / "examples" / name
    for number, source in enumerate(_cells(path, library), 1):
        found["blocks"] = number
        _execute(changed(source, library), f"{path.stem}, cell {number}")


def _cells(path: Path, library: str) -> Iterator[str]:
    # modules beside a script import the library too
    for module in path.parent.glob("*.py"):
        text = changed(module.read_text("utf-8"), library)
        Path(module.name).write_text(text, encoding="utf-8")
    sys.path.insert(0, str(Path.cwd()))
    if path.suffix == ".ipynb":
        yield from map(_short, cells_of(json.loads(path.read_text("utf-8"))))
        return
    sys.argv = [str(path), *SCRIPTS[path.relative_to(path.parents[1]).as_posix()].split()]
    yield _short(path.read_text("utf-8"))


def _short(source: str) -> str:
    source = local_source(source)
    for there, here in _HERE.items():
        source = source.replace(there, here)
    for pattern, here in _PATTERNS.items():
        source = re.sub(pattern, here, source)
    return source


def _execute(source: str, place: str) -> None:
    names = vars(sys.modules["__main__"])
    names["__name__"] = "__main__"
    exec(compile(source, place, "exec"), names)


def _page(sources: list[str], name: str, library: Any) -> dict[int, list[str]]:
    """Run the blocks one by one; one that fails again, by itself, with what a reader has."""
    errors: dict[int, list[str]] = {}
    shared = _given(library)
    for number, source in enumerate(sources):
        try:
            ast.parse(source)
        except SyntaxError:
            errors[number] = ["no code", ""]
            continue
        code = _short(source)
        found = _block(code, f"{name}, block {number}", shared)
        again = (_given(library), _given(library) | {"model": None})
        if found is not None and all(_block(code, name, known) is not None for known in again):
            errors[number] = found
    return errors


def _block(source: str, place: str, known: dict[str, Any]) -> list[str] | None:
    code = compile(source, place, "exec")
    for name in code.co_names:
        if name not in known and not hasattr(builtins, name):
            for home in (known["_library"], *map(importlib.import_module, _HOMES)):
                if hasattr(home, name):
                    known[name] = getattr(home, name)
                    break
    if known.get("model", 0) is None:
        known["model"] = known["peft_model"] = _adapted(known["_library"], known["base_model"])
    try:
        exec(code, known)
    except (Exception, SystemExit) as error:  # noqa: BLE001  any may be a failure of the block
        return described(error)
    return None


_HOMES = ("transformers", "trl", "torch")


def _adapted(library: Any, model: Any) -> Any:
    """A model with the adapters that blocks speak of."""
    config = library.LoraConfig(r=8, target_modules=["q_proj", "v_proj"])
    made = library.get_peft_model(model, config)
    for name in ("sft", "dpo", "adapter_1", "adapter_2", "adapter_fr", "adapter_de", "other"):
        made.add_adapter(name, config)
    return made


def _given(library: Any) -> dict[str, Any]:
    """What the pages say that a reader has."""
    import datasets
    import torch
    import transformers

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained("llama")
    tokenizer = transformers.AutoTokenizer.from_pretrained("llama")
    tokens = tokenizer(["a b c d e", "f g h i j"], return_tensors="pt")
    numbers = [list(range(5, 15))] * 8  # [rows, length]
    rows = datasets.Dataset.from_dict({"input_ids": numbers, "labels": numbers})
    config = library.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    found = {
        "__name__": "__main__", "_library": library, "torch": torch, "model": model,
        "base_model": model, "tokenizer": tokenizer, "inputs": tokens, "device": "cpu",
        "peft_config": config, "config": config, "output_path": "out", "N": 2,
        "save_dir_or_hfhub": "out", "peft_model_id": "user/adapter",
        "dataloader": [dict(tokens)] * 4,
        "train_dataset": rows, "eval_dataset": rows, "dataset": rows,
        "tokenized_datasets": {"train": rows, "test": rows}, "compute_metrics": None,
        "data_collator": transformers.default_data_collator, "device_map": "cpu",
        "lora_path_0": "user/adapter_0", "lora_path_1": "user/adapter_1",
        "training_args": transformers.TrainingArguments("out"), "nn": torch.nn,
        "use_quantization": False, "rank": 4,
    }  # fmt: skip
    return found | {"_has": found.get}


def described(error: BaseException) -> list[str]:
    """Return the type and message of an error, and the line of the program that led to it."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if ", cell " in f.filename or ", block " in f.filename]
    kind = type(error)
    text = f"{kind.__module__}.{kind.__qualname__}: {error}".removeprefix("builtins.")
    return [text[:600], str(own[-1].lineno) if own else ""]
