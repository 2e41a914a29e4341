"""Savers that are killed, run by tests/checkpoint/test_crash.py: python killed_saver.py FOLDER.

Forks of one process that has a model save its two adapters in turn to one folder, and are killed.
After each the folder is looked at twice: as a library that knows nothing of our folders sees it,
and as ours does. Prints how often the old and the new checkpoint was found.
"""

from __future__ import annotations

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

import torch
from families import tiny_config

from adapterzoo import AutoAdapterModel, LoRAConfig
from adapterzoo.checkpoint import files, folders
from adapterzoo.checkpoint.formats import formats
from adapterzoo.errors import CheckpointError

NAMES = ("old", "new")
KILLS = 201
# what changes a folder, as Python reports it; bytes that are written are met by chance
STEPS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "fcntl.flock"}
Content = dict[str, bytes]


def seen(folder: Path) -> Content:
    """All files that are not hidden."""
    there = folder.iterdir() if folder.is_dir() else ()
    return {p.name: p.read_bytes() for p in there if p.is_file() and not p.name.startswith(".")}


def check_others(found: Content, versions: list[Content]) -> None:
    """What another library sees: where a config is, everything is that of its save."""
    configs = {name: data for name, data in found.items() if name.endswith(".json")}
    tensors = {name: data for name, data in found.items() if name not in configs}
    if configs:
        wholes = [
            version
            for version in versions
            if configs.items() <= version.items() and tensors.items() <= version.items()
            and tensors.keys() == {name for name in version if not name.endswith(".json")}
        ]  # fmt: skip
        assert wholes, sorted(found)


def check_ours(folder: Path, versions: list[Content]) -> int:
    """What this library sees; the number of the version."""
    check_others(seen(folder), versions)
    with folders.reading("reading", folder):
        found = seen(folder)
        assert not (folder / ".adapterzoo-ready").exists()
    assert found in versions, sorted(found)
    return versions.index(found)


def killed(work: Callable[[], object], after: float | None = None) -> bool:
    """Whether a fork that works was killed, after some time or by itself."""
    child = os.fork()
    if not child:
        try:
            work()
        finally:
            os._exit(7)
    if after is not None:
        time.sleep(after)
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    assert status == signal.SIGKILL or os.waitstatus_to_exitcode(status) == 7
    return bool(status == signal.SIGKILL)


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


def at_every_step(folder: Path, versions: list[Content], owned: tuple[str, ...]) -> Counter[str]:
    """Kill a save before each of its steps, over nothing and over each version."""
    found: Counter[str] = Counter()
    for start, end in ((None, 0), (0, 1), (1, 0)):
        for step in itertools.count():
            shutil.rmtree(folder, ignore_errors=True)
            if start is not None:
                files.write_all(folder, versions[start])
            before: Content = {} if start is None else versions[start]
            work = lambda: files.write_all(folder, versions[end], owned)  # noqa: B023, E731
            if not killed(dying_at(step, work)):
                break
            kind = ("old", "new")[check_ours(folder, [before, versions[end]])]
            found[kind] += 1
            # what a killed save left is in nobody's way, and does not stay
            files.write_all(folder, versions[end], owned)
            assert seen(folder) == versions[end]
            assert not [p.name for p in folder.iterdir() if p.name.startswith(".")]
    return found


def at_any_moment(folder: Path, versions: list[Content], save: Callable[..., None], draw: random.Random) -> Counter[str]:  # noqa: E501
    """Kill savers that save in turn, wherever they are."""
    found: Counter[str] = Counter()
    save(folder, "old")
    start = time.perf_counter()
    save(folder, "new")
    longest = 3 * (time.perf_counter() - start)
    for _ in range(KILLS // 3):

        def work() -> None:
            for name in itertools.cycle(NAMES):
                save(folder, name)

        killed(work, draw.uniform(0, longest))
        found[NAMES[check_ours(folder, versions)]] += 1
    save(folder, "old")
    assert not [p.name for p in folder.iterdir() if p.name.startswith(".")]
    return found


def at_once(folder: Path, versions: list[Content], save: Callable[..., None]) -> int:
    """Two processes save to one folder while this one reads; how often it read each."""
    children = []
    for name in NAMES:
        child = os.fork()
        if not child:
            for _ in range(25):
                save(folder, name)
            os._exit(0)
        children.append(child)
    found: Counter[int] = Counter()
    while children:
        with folders.reading("reading", folder):
            found[versions.index(seen(folder))] += 1
        children = [c for c in children if os.waitpid(c, os.WNOHANG) == (0, 0)]
    return min(found[0], found[1])


def in_two_formats(folder: Path, save: Callable[..., None]) -> list[str]:
    """Two processes save to one new folder in two formats: the error of the second."""
    errors = []
    for child in [_saver(folder, save, kind) for kind in ("peft", "adapterhub")]:
        errors.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    return sorted(errors)


def _saver(folder: Path, save: Callable[..., None], kind: str) -> int:
    child = os.fork()
    if child:
        return child
    try:
        save(folder, "old", kind)
    except CheckpointError as error:
        os._exit(3 if "files of both would be mixed" in str(error) else 4)
    os._exit(0)


def main(base: Path) -> None:
    """Every format, every way of dying."""
    torch.manual_seed(0)
    model = AutoAdapterModel.from_config(tiny_config("bert")).eval()
    model.add_adapter("old", LoRAConfig(r=4, alpha=8))
    model.add_classification_head("old", num_labels=3)
    # another size, and no head: files of the old one have to go
    model.add_adapter("new", LoRAConfig(r=2, alpha=5))
    draw = random.Random(0)
    said: dict[str, dict[str, object]] = {}
    for kind in formats:

        def save(folder: Path, name: str, kind: str = kind) -> None:
            model.save_adapter(folder, name, format=kind)

        versions = []
        for name in NAMES:
            save(base / kind / name, name)
            versions.append(seen(base / kind / name))
        assert versions[0] != versions[1]
        owned = formats[kind].owned("adapter")
        said[kind] = {
            "steps": at_every_step(base / kind / "steps", versions, owned),
            "moments": at_any_moment(base / kind / "moments", versions, save, draw),
            "at once": at_once(base / kind / "moments", versions, save),
        }
        assert model.load_adapter(base / kind / "moments", load_as=f"{kind}_back")
    said["mixed"] = {"errors": [in_two_formats(base / f"two{i}", save) for i in range(5)]}
    print(json.dumps(said))  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]))
