"""A save that fails or dies: the old checkpoint or the new one is there, whole."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
import torch
from disks import full_disk

from adapterzoo import LoRAConfig
from adapterzoo.errors import CheckpointError
from adapterzoo.formats import folders
from adapterzoo.formats.checkpoint import formats
from adapterzoo.model.state import tensors_of

TESTS = Path(__file__).resolve().parents[1]
READY = ".adapterzoo-ready"
# the two of AdapterHub differ in the file of tensors alone
KINDS = [name for name in formats if name != "adapterhub-safetensors"]
NOBODY = 65_534


def killed(folder, *kinds):
    """What `killed_saver.py` prints."""
    ran = subprocess.run(
        [sys.executable, str(TESTS / "killed_saver.py"), str(folder), *kinds],
        capture_output=True, text=True, timeout=600, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{TESTS.parent}:{TESTS}"},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_kill_9_before_any_step_leaves_the_old_or_the_new(tmp_path):
    # deaths on both sides of the moment that decides, so that the test can fail
    assert min(killed(tmp_path, "adapterhub")["adapterhub"]["steps"].values()) > 20


@pytest.mark.sweep
def test_kill_9_leaves_the_old_or_the_new_of_every_format(tmp_path):
    said = killed(tmp_path)
    # while they save: the later one replaces the other's files
    assert said.pop("two formats") == [[0, 0]] * 5
    assert sorted(said) == sorted(KINDS)
    for kind in KINDS:
        # on which side a random moment falls is a matter of the machine's speed
        assert min(said[kind]["steps"].values()) > 20
        assert sum(said[kind]["moments"].values()) > 60


# --- saves that cannot be ---


@pytest.fixture
def model(tiny):
    """Two adapters of different size."""
    made = tiny("bert")
    made.add_adapter("old", LoRAConfig(r=2))
    # larger than the limit below
    made.add_adapter("new", LoRAConfig(r=256))
    return made


@pytest.fixture
def place():
    """A folder that others may see, unlike those of pytest."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def content(folder):
    return {
        str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None
        for p in sorted(folder.rglob("*"))
    }


@contextlib.contextmanager
def read_only(folder):
    """Nobody may write there; the superuser, who may anywhere, becomes somebody else."""
    is_root = not os.geteuid()
    folder.chmod(0o555)
    if is_root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)
        folder.chmod(0o755)


def check_refused(model, folder, kind, seen, *says):
    """A save that raises, says why and changes nothing."""
    before = content(seen)
    with pytest.raises(CheckpointError) as caught:
        model.save_adapter(folder, "new", format=kind)
    for word in ("save_adapter(", str(folder), *says, "still whole", "Write to a folder"):
        assert word in str(caught.value)
    assert content(seen) == before


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_disk(model, place, kind):
    model.save_adapter(place / "x", "old", format=kind)
    with full_disk():
        check_refused(model, place / "x", kind, place, "File too large")
    assert model.load_adapter(place / "x", load_as="back") == "back"
    # with space again the same call does
    model.save_adapter(place / "x", "new", format=kind)
    assert model.load_adapter(place / "x", load_as="new_again") == "new_again"


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_that_may_only_be_read(model, place, kind):
    model.save_adapter(place / "x", "old", format=kind)
    with read_only(place / "x"):
        check_refused(model, place / "x", kind, place, "Permission denied")
        assert model.load_adapter(place / "x", load_as="back") == "back"
    with read_only(place):
        check_refused(model, place / "y", kind, place, "Permission denied")


@pytest.mark.parametrize("kind", KINDS)
def test_files_and_folders_in_the_way(model, tmp_path, kind):
    (tmp_path / "taken").write_text("mine")
    check_refused(model, tmp_path / "taken", kind, tmp_path, "File exists")
    check_refused(model, tmp_path / "taken" / "below", kind, tmp_path, "Not a directory")
    model.save_adapter(tmp_path / "a" / "b" / "c", "old", format=kind)
    for name in sorted(p.name for p in (tmp_path / "a" / "b" / "c").iterdir()):
        (tmp_path / name / name).mkdir(parents=True)
        check_refused(model, tmp_path / name, kind, tmp_path, "in the place of the file", name)


@pytest.mark.parametrize("kind", KINDS)
def test_an_interruption_leaves_no_litter(model, tmp_path, kind, monkeypatch):
    model.save_adapter(tmp_path, "old", format=kind)
    before = content(tmp_path)

    def interrupt(_handle):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            model.save_adapter(tmp_path, "new", format=kind)
    assert content(tmp_path) == before


def test_what_others_put_into_the_folder_stays(model, tmp_path):
    (tmp_path / "README.md").write_text("mine")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("mine")
    for kind in KINDS:
        shutil.rmtree(tmp_path / "sub", ignore_errors=True)
        model.save_adapter(tmp_path / "sub", "old", format=kind)
        (tmp_path / "sub" / "README.md").write_text("mine")
        model.save_adapter(tmp_path / "sub", "new", format=kind)
        assert (tmp_path / "sub" / "README.md").read_text() == "mine"
    model.save_adapter(tmp_path, "old")
    assert (tmp_path / ".git" / "config").read_text() == "mine"


# --- saves that were interrupted ---


def interrupted(model, folder, kind, monkeypatch):
    """The folder of a save that died as soon as the new checkpoint was there."""
    model.save_adapter(folder, "old", format=kind)
    new = encoded(model, kind)

    def die(_folder):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(folders, "_finish", die)
        with pytest.raises(KeyboardInterrupt):
            folders.replace_files(folder, new)
    assert (folder / READY).is_dir()


def encoded(model, kind):
    with tempfile.TemporaryDirectory() as there:
        model.save_adapter(there, "new", format=kind)
        return {p.name: p.read_bytes() for p in Path(there).iterdir()}


@pytest.mark.parametrize("kind", KINDS)
def test_the_next_reader_finishes_a_save(model, tmp_path, kind, monkeypatch):
    interrupted(model, tmp_path, kind, monkeypatch)
    model.load_adapter(tmp_path, load_as="back")
    assert model.adapters_config.get("back").r == 256
    assert content(tmp_path) == encoded(model, kind)
    own, back = tensors_of(model, "new"), tensors_of(model, "back")
    assert own.keys() == back.keys()
    assert all(torch.equal(own[key], back[key]) for key in own)


def test_a_save_that_fails_late_does_not_say_that_the_old_is_there(model, tmp_path, monkeypatch):
    def fail(_file, _target):
        raise OSError(5, "Input/output error")

    model.save_adapter(tmp_path, "old")
    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", fail)
        with pytest.raises(CheckpointError) as caught:
            model.save_adapter(tmp_path, "new")
    assert "interrupted after its files were written" in str(caught.value)
    assert "Input/output error" in str(caught.value)
    assert "still whole" not in str(caught.value)
    model.load_adapter(tmp_path, load_as="back")
    assert model.adapters_config.get("back").r == 256


@pytest.mark.parametrize("kind", KINDS)
def test_a_save_that_cannot_be_finished_is_not_read(model, place, kind, monkeypatch):
    interrupted(model, place, kind, monkeypatch)
    before = content(place)
    with read_only(place), pytest.raises(CheckpointError) as caught:
        model.load_adapter(place, load_as="back")
    for word in ("load_adapter(", str(place), "interrupted", "Permission denied", "writable"):
        assert word in str(caught.value)
    assert content(place) == before
    assert "back" not in model.adapters_config
    model.load_adapter(place, load_as="back")
    assert model.adapters_config.get("back").r == 256


def test_litter_of_dead_savers_goes_and_links_are_not_followed(model, tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.json").write_text("mine")
    folder = tmp_path / "x"
    (folder / ".adapterzoo-part-abc").mkdir(parents=True)
    (folder / ".adapterzoo-part-abc" / "adapter.safetensors").write_bytes(b"half")
    (folder / ".adapterzoo-part-link").symlink_to(precious)
    model.save_adapter(folder, "old")
    assert not (folder / ".adapterzoo-part-abc").exists()
    assert (precious / "thesis.json").read_text() == "mine"


def test_a_strangers_folder_moves_nothing_in_or_out(model, tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.json").write_text("mine")
    (precious / "config.json").write_text("mine")
    model.save_adapter(tmp_path / "x", "old")
    # a link in the place of our hidden folder is none of ours
    (tmp_path / "x" / READY).symlink_to(precious)
    model.load_adapter(tmp_path / "x", load_as="one")
    with pytest.raises(CheckpointError, match="Not a directory"):
        model.save_adapter(tmp_path / "x", "new")
    (tmp_path / "x" / READY).unlink()
    # hidden files, folders and links in it are not moved
    ready = tmp_path / "x" / READY
    (ready / "sub").mkdir(parents=True)
    (ready / ".gitconfig").write_text("evil")
    (ready / "adapter.safetensors").symlink_to(precious / "config.json")
    before = {k: v for k, v in content(tmp_path).items() if READY not in k}
    model.load_adapter(tmp_path / "x", load_as="two")
    assert content(tmp_path) == before
    assert content(precious) == {"config.json": b"mine", "thesis.json": b"mine"}


# --- locks ---


def test_savers_and_readers_wait_for_each_other(model, tmp_path):
    model.save_adapter(tmp_path, "old")
    saved = threading.Event()

    def save():
        model.save_adapter(tmp_path, "new")
        saved.set()

    saver = threading.Thread(target=save, daemon=True)
    with folders.reading(tmp_path):
        # readers do not keep each other out
        assert model.load_adapter(tmp_path, load_as="back") == "back"
        saver.start()
        assert not saved.wait(0.2)
    assert saved.wait(60)
    saver.join()
    loaded = threading.Event()

    def load():
        with folders.reading(tmp_path):
            loaded.set()

    reader = threading.Thread(target=load, daemon=True)
    with folders.saving(tmp_path):
        reader.start()
        assert not loaded.wait(0.2)
    assert loaded.wait(60)
    # nobody keeps a folder after an error
    with pytest.raises(KeyboardInterrupt), folders.saving(tmp_path):
        raise KeyboardInterrupt
    model.save_adapter(tmp_path, "old")


@pytest.mark.parametrize("kind", KINDS)
def test_without_locks_a_save_is_as_whole(model, tmp_path, kind, monkeypatch):
    def refuse(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    interrupted(model, tmp_path, kind, monkeypatch)
    model.load_adapter(tmp_path, load_as="back")
    assert model.adapters_config.get("back").r == 256
    model.save_adapter(tmp_path, "old", format=kind)
    assert not list(tmp_path.glob(".*"))
