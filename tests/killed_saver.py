"""Savers that are killed: python killed_saver.py FOLDER [KIND…], run by formats/test_crash.py.

Forks of one process save two checkpoints in turn to one folder, and are killed. After each the
folder is looked at twice: as a library that knows nothing of our hidden folders sees it, and as
ours does. Prints how often the old and the new checkpoint was found. Of kinds that are named they
die before each step only, in a process without torch; of all at any moment and at once as well.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import adapterzoo
from adapterzoo.errors import CheckpointError

# without the package around it, which imports torch: a fork of a small process costs nothing
spec: Any = importlib.util.spec_from_file_location(
    "folders", Path(adapterzoo.__file__).parent / "formats" / "folders.py"
)
folders: Any = importlib.util.module_from_spec(spec)
spec.loader.exec_module(folders)

NAMES = ("old", "new")
KILLS = 201
# the files of each format in two saves: with a head and without, as a pickle and not
CONFIG = "adapter_config.json"
FILES = {
    "native": (["adapter.safetensors", CONFIG], ["adapter.safetensors", CONFIG]),
    "adapterhub": (
        ["pytorch_adapter.bin", CONFIG, "pytorch_model_head.bin", "head_config.json"],
        ["pytorch_adapter.bin", CONFIG],
    ),
    "peft": (["adapter_model.bin", CONFIG], ["adapter_model.safetensors", CONFIG]),
}
# what changes a folder, as Python reports it; bytes that are written are met by chance
STEPS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "fcntl.flock"}
Content = dict[str, bytes]


def replace(folder: Path, content: Content, stale: Any = ()) -> None:
    """What `formats.write` does when everything has been encoded."""
    with folders.saving(folder):
        folders.replace_files(folder, content, stale)


def seen(folder: Path) -> Content:
    """All files that are not hidden."""
    there = folder.iterdir() if folder.is_dir() else ()
    return {p.name: p.read_bytes() for p in there if p.is_file() and not p.name.startswith(".")}


def hidden(folder: Path) -> list[str]:
    """The names of all files that are."""
    return [p.name for p in folder.iterdir() if p.name.startswith(".")]


def check_others(found: Content, versions: list[Content]) -> None:
    """What another library sees: where a config is, everything is that of its save."""
    configs = {name: data for name, data in found.items() if name.endswith(".json")}
    tensors = {name: data for name, data in found.items() if name not in configs}
    if configs:
        wholes = [
            version
            for version in versions
            if configs.items() <= version.items()
            and tensors == {name: d for name, d in version.items() if not name.endswith(".json")}
        ]
        assert wholes, sorted(found)


def check_ours(folder: Path, versions: list[Content]) -> int:
    """What this library sees; the number of the version."""
    check_others(seen(folder), versions)
    with folders.reading(folder):
        found = seen(folder)
        assert not (folder / ".adapterzoo-ready").exists()
    assert found in versions, sorted(found)
    return versions.index(found)


def forked(work: Callable[[], object]) -> int:
    """The id of a process that works and ends."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        work()
        code = 0
    except CheckpointError as error:
        code = 3 if "files of both would be mixed" in str(error) else 4
    finally:
        os._exit(code)


def ended(child: int) -> int:
    """How a process ended: its exit code, or minus the signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def dying_at(step: int, work: Callable[[], object]) -> Callable[[], None]:
    """The work, killed before its step of this number."""

    def run() -> None:
        left = itertools.count(step, -1)

        def count(event: str, _: object) -> None:
            if event in STEPS and not next(left):
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        work()

    return run


def at_every_step(folder: Path, kind: str) -> Counter[str]:
    """Kill a save before each of its steps, over nothing and over each version."""
    versions = [
        {name: f"{i}{name}".encode() * 9 for name in names} for i, names in enumerate(FILES[kind])
    ]
    owned = sorted({*versions[0], *versions[1]})
    found: Counter[str] = Counter()
    for old, new in (({}, versions[0]), versions, versions[::-1]):
        for step in itertools.count():
            shutil.rmtree(folder, ignore_errors=True)
            if old:
                replace(folder, old)
            code = ended(forked(dying_at(step, lambda: replace(folder, new, owned))))  # noqa: B023
            if code != -signal.SIGKILL:
                assert not code
                break
            found[NAMES[check_ours(folder, [old, new])]] += 1
            # what a killed save left is in nobody's way, and does not stay
            replace(folder, new, owned)
            assert seen(folder) == new
            assert not hidden(folder)
    return found


def at_any_moment(
    folder: Path, versions: list[Content], save: Callable[..., None], draw: random.Random
) -> Counter[str]:
    """Kill savers that save in turn, wherever they are."""
    found: Counter[str] = Counter()
    start = time.perf_counter()
    for name in NAMES:
        save(folder, name)
    longest = 2 * (time.perf_counter() - start)

    def work() -> None:
        for name in itertools.cycle(NAMES):
            save(folder, name)

    for _ in range(KILLS // 3):
        child = forked(work)
        time.sleep(draw.uniform(0, longest))
        os.kill(child, signal.SIGKILL)
        assert ended(child) == -signal.SIGKILL
        found[NAMES[check_ours(folder, versions)]] += 1
    save(folder, "old")
    assert not hidden(folder)
    return found


def at_once(folder: Path, versions: list[Content], save: Callable[..., None]) -> None:
    """Two processes save to one folder until this one has read what each of them saves."""

    def work(name: str) -> None:
        while True:
            save(folder, name)

    children = [forked(lambda name=name: work(name)) for name in NAMES]
    found: set[int] = set()
    while len(found) < len(versions):
        with folders.reading(folder):
            found.add(versions.index(seen(folder)))
        # read often, but leave the processors to the savers
        time.sleep(0.002)
        assert all(os.waitpid(child, os.WNOHANG) == (0, 0) for child in children), "a saver ended"
    for child in children:
        os.kill(child, signal.SIGKILL)
        ended(child)


def main(base: Path, kinds: list[str]) -> None:
    """Every format, every way of dying."""
    # a process that dies takes nothing from the system's memory of files: only the power would
    os.fsync = lambda _: None
    said: dict[str, Any] = {k: {"steps": at_every_step(base / "steps", k)} for k in kinds or FILES}
    if kinds:
        print(json.dumps(said))  # noqa: T201
        return
    # from here on forks are large
    import torch
    from families import tiny_config

    from adapterzoo import AutoAdapterModel, LoRAConfig

    torch.manual_seed(0)
    model = AutoAdapterModel.from_config(tiny_config("bert")).eval()
    model.add_adapter("old", LoRAConfig(r=4, alpha=8))
    model.add_classification_head("old", layers=1, activation_function=None, use_pooler=True)
    # another size, and no head: files of the old one have to go
    model.add_adapter("new", LoRAConfig(r=2, alpha=5))
    draw = random.Random(0)
    for kind in FILES:

        def save(folder: Path, name: str, kind: str = kind) -> None:
            model.save_adapter(folder, name, format=kind)

        versions = []
        for name in NAMES:
            save(base / kind / name, name)
            versions.append(seen(base / kind / name))
        assert versions[0] != versions[1]
        folder = base / kind / "both"
        said[kind]["moments"] = at_any_moment(folder, versions, save, draw)
        at_once(folder, versions, save)
        # and what is found can be loaded
        model.load_adapter(folder, load_as=f"{kind}_again")
        model.delete_adapter(f"{kind}_again")
    codes = []
    for i in range(5):
        works = [
            lambda kind=kind, i=i: model.save_adapter(base / f"two{i}", "new", format=kind)
            for kind in ("peft", "adapterhub")
        ]
        codes.append(sorted(map(ended, map(forked, works))))
    said["two formats"] = codes
    print(json.dumps(said))  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
