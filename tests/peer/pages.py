"""The Python blocks of the peer's documentation, run one by one on tiny models.

Blocks are fragments: names that none of them sets are names of the peer, of transformers or torch,
or one of `_given`. A block that fails after the others of its page is run again by itself, with
what its page does in other words, as pages also add an adapter twice, or save what they deleted.
"""

from __future__ import annotations

import builtins
import dataclasses
import importlib
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_BLOCK = re.compile(r"```python[^\n]*\n(.*?)```", re.DOTALL)
# what stands for code that a reader has, a path that is not ours, what an adapter of the Hub
# predicts, and one argument that the peer does not have either
_PLACEHOLDERS = {
    "// ...": "", "model = ...\n": "model = _model()\n", "<ADAPTER_CONFIG>": "'seq_bn'",
    "/path/to/dir": "path/dir", "assert predicted == 1": "assert predicted in (0, 1)",
    "adapter_types=": "adapter_methods=",
}  # fmt: skip


def names(peer: Path) -> list[str]:
    """The pages with blocks."""
    pages = sorted((peer / "docs").glob("*.md"))
    return [page.stem for page in pages if _BLOCK.search(page.read_text(encoding="utf-8"))]


def run(page: Path) -> tuple[dict[str, int], dict[int, BaseException]]:
    """Run a page; return how many blocks ran, failed or are not code, and the errors by block."""
    counts, errors, shared = dict.fromkeys(("ran", "failed", "no code"), 0), {}, _given()
    for number, source in enumerate(_sources(page)):
        try:
            code = compile(source, f"{page.stem}, cell {number}", "exec")
        except SyntaxError:
            counts["no code"] += 1
            continue
        error = _error(code, shared)
        if error is not None and _error(code, _given() | _made()) is None:
            error = None
        counts["ran" if error is None else "failed"] += 1
        if error is not None:
            errors[number] = error
    return counts, errors


def _sources(page: Path) -> Iterator[str]:
    for block in _BLOCK.findall(page.read_text(encoding="utf-8")):
        for placeholder, code in _PLACEHOLDERS.items():
            block = block.replace(placeholder, code)
        yield textwrap.dedent(block)


def _error(code: Any, known: dict[str, Any]) -> BaseException | None:
    for name in code.co_names:
        if name not in known and not hasattr(builtins, name):
            known |= _found(name)
    try:
        exec(code, known)
    except (Exception, SystemExit) as error:  # noqa: BLE001  any may be a failure of the block
        return error
    return None


def _found(name: str) -> dict[str, Any]:
    """What a reader imports for a name, if it is such a one."""
    from .shim import Missing

    for home in ("adapters", "adapters.composition", "adapters.heads", "transformers", "torch"):
        found = getattr(importlib.import_module(home), name, None)
        if found is not None and not isinstance(found, Missing):
            return {name: found}
    return {name: importlib.import_module(name)} if name in ("adapters", "torch") else {}


def _given() -> dict[str, Any]:
    """What the pages say that a reader has: a model, inputs, arguments and data."""
    import torch
    from transformers import AutoTokenizer

    from adapterzoo import AdapterArguments
    from adapterzoo.loading import WeightsLoader

    class OfPooler(WeightsLoader):
        def __init__(self, model: Any) -> None:
            super().__init__(model, "pooler.bin", "pooler.json")

        def filter_func(self, name: str) -> Any:
            return lambda parameter: "pooler" in parameter

        def rename_func(self, old_name: str, new_name: str) -> Any:
            return lambda parameter: parameter

    sys.argv = ["script", "--output_dir", "out", "--train_adapter"]
    tokenizer = AutoTokenizer.from_pretrained("bert-base-uncased")
    arguments = dataclasses.make_dataclass("DataTrainingArguments", [("task_name", str, "task")])
    modelled = dataclasses.make_dataclass(
        "ModelArguments", [("model_name_or_path", str, "bert-base-uncased")]
    )
    return {
        "__name__": "__main__",
        "model": _model(), "tokenizer": tokenizer, "reference_tokenizer": tokenizer,
        "path": "embeddings", "task_name": "task", "num_labels": 2,
        "inputs": {"input_ids": torch.arange(15).view(3, 5)},  # [3, 5]
        "DataTrainingArguments": arguments, "ModelArguments": modelled,
        "data_args": SimpleNamespace(task_name="task"), "model_args": modelled(),
        "adapter_args": AdapterArguments(), "train_dataset": [], "eval_dataset": [],
        "data_collator": None, "MyCustomWeightsLoader": OfPooler, "_model": _model,
    }  # fmt: skip


def _model() -> Any:
    from adapterzoo import AutoAdapterModel

    return AutoAdapterModel.from_pretrained("bert-base-uncased")


def _made() -> dict[str, Any]:
    """What other blocks of a page make, for one that is run by itself."""
    model = _model()
    for name in ("adapter_name", "awesome_adapter", "a", "b", "c"):
        model.add_adapter(name)
    model.add_embeddings("name", _given()["tokenizer"])
    model.add_classification_head("adapter_name")
    model.set_active_adapters("adapter_name")
    return {"model": model, "config": model.config, "adapter_name": "adapter_name"}
