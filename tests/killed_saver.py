"""Savers that are killed before each of their steps: python killed_saver.py FOLDER.

Run by formats/test_crash.py. Prints for each format how often the old checkpoint, the new one and a
folder that cannot be loaded was found.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from families import tiny_config

from adapterzoo import AutoAdapterModel, LoRAConfig
from adapterzoo.errors import CheckpointError
from adapterzoo.model.state import tensors_of

KINDS = ("native", "adapterhub", "adapterhub-safetensors", "peft")
# what changes a folder, as Python reports it
STEPS = {"open", "os.mkdir", "os.rename", "os.remove"}


def killed_at(step: int, folder: Path, save: Callable[[], object]) -> bool:
    """Save in a process that is killed before its step of this number; False if it has fewer."""
    child = os.fork()
    if not child:
        left = itertools.count(step, -1)

        def count(event: str, arguments: tuple[Any, ...]) -> None:
            if event in STEPS and str(arguments[0]).startswith(str(folder)) and not next(left):
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        save()
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL), code
    return code != 0


def main(base: Path) -> None:
    """Every format in an empty folder, over itself and over another one."""
    torch.manual_seed(0)
    model: Any = AutoAdapterModel.from_config(tiny_config("bert")).eval()
    # one shape, so that files of two saves would fit each other
    model.add_adapter("old", LoRAConfig(r=4, alpha=8, init_weights="bert"))
    model.add_classification_head("old", layers=1, activation_function=None, use_pooler=True)
    model.add_adapter("new", LoRAConfig(r=4, alpha=5, init_weights="bert"))
    found = {kind: Counter[str]() for kind in KINDS}
    pairs = [(b, k) for i, k in enumerate(KINDS) for b in (None, k, KINDS[i - 1])]
    for before, kind in pairs:
        for step in itertools.count():
            folder = base / "x"
            shutil.rmtree(folder, ignore_errors=True)
            if before is not None:
                model.save_adapter(folder, "old", format=before)
            save = lambda: model.save_adapter(folder, "new", format=kind)  # noqa: B023, E731
            if not killed_at(step, folder, save):
                break
            found[kind][seen(model, folder)] += 1
            # what a killed save left is in nobody's way, and does not stay
            save()
            assert seen(model, folder) == "new"
            assert not [*folder.glob(".*")]
    print(json.dumps(found))  # noqa: T201


def seen(model: Any, folder: Path) -> str:
    """Load the adapter of a folder, and compare it with those that were saved."""
    try:
        model.load_adapter(folder, load_as="found", overwrite_ok=True)
    except CheckpointError as error:
        return "refused" if str(folder) in str(error) else "not named"
    config, tensors = model.adapters_config["found"], tensors_of(model, "found")
    for name in ("old", "new"):
        own = tensors_of(model, name)
        same = all(torch.equal(own[key], tensor) for key, tensor in tensors.items())
        if same and config.alpha == model.adapters_config[name].alpha:
            return name
    raise AssertionError(f"files of two saves: {sorted(folder.iterdir())}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
