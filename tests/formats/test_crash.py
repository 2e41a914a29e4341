"""A save that fails or dies: the old checkpoint or the new one is there, whole."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from disks import full_disk

from adapterzoo import LoRAConfig
from adapterzoo.errors import CheckpointError
from adapterzoo.formats.checkpoint import formats

TESTS = Path(__file__).resolve().parents[1]
# the two of AdapterHub differ in the file of tensors alone
KINDS = [name for name in formats if name != "adapterhub-safetensors"]
NOBODY = 65_534


@pytest.mark.sweep
def test_kill_9_before_any_step_leaves_no_mixture_that_loads(tmp_path):
    ran = subprocess.run(
        [sys.executable, str(TESTS / "killed_saver.py"), str(tmp_path)],
        capture_output=True, text=True, timeout=600, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{TESTS.parent}:{TESTS}"},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    for kind, found in json.loads(ran.stdout).items():
        assert "not named" not in found, kind
        # deaths on all sides, so that the test can fail
        assert found["old"] > 5, kind
        assert found["refused"] > 5, kind


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


def check_refused(model, folder, kind, seen, *says, named=None):
    """A save that raises, says why and changes nothing."""
    before = content(seen)
    with pytest.raises(CheckpointError) as caught:
        model.save_adapter(folder, "new", format=kind)
    for word in ("save_adapter(", str(named or folder), *says, "still whole", "Write to a folder"):
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
    check_refused(model, tmp_path / "taken", kind, tmp_path, "is a file, not a folder")
    check_refused(
        model, tmp_path / "taken" / "below", kind, tmp_path, "is a file, not a folder",
        named=tmp_path / "taken",
    )  # fmt: skip
    model.save_adapter(tmp_path / "a" / "b" / "c", "old", format=kind)
    for name in sorted(p.name for p in (tmp_path / "a" / "b" / "c").iterdir()):
        (tmp_path / name / name).mkdir(parents=True)
        check_refused(model, tmp_path / name, kind, tmp_path, "is a folder", name)


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


def test_a_save_that_fails_late_does_not_say_that_the_old_is_there(model, tmp_path, monkeypatch):
    def fail(_file, _target):
        raise OSError(5, "Input/output error")

    model.save_adapter(tmp_path, "old", format="peft")
    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", fail)
        with pytest.raises(CheckpointError) as caught:
            model.save_adapter(tmp_path, "new", format="peft")
    assert "Input/output error" in str(caught.value)
    assert "Save again" in str(caught.value)
    assert "still whole" not in str(caught.value)
    with pytest.raises(CheckpointError, match=r"adapter_config\.json"):
        model.load_adapter(tmp_path, load_as="back")
    model.save_adapter(tmp_path, "new", format="peft")
    model.load_adapter(tmp_path, load_as="back")
    assert model.adapters_config["back"].r == 256


def test_litter_of_dead_savers_goes_and_links_are_not_followed(model, tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.json").write_text("mine")
    folder = tmp_path / "x"
    folder.mkdir()
    (folder / ".adapterzoo-part-abc").write_bytes(b"half")
    (folder / ".adapterzoo-part-link").symlink_to(precious)
    model.save_adapter(folder, "old")
    assert not (folder / ".adapterzoo-part-abc").exists()
    assert (precious / "thesis.json").read_text() == "mine"


# --- others at the same time ---


@pytest.mark.parametrize("kind", KINDS)
def test_of_two_saves_at_once_the_later_stays(model, tmp_path, kind, monkeypatch):
    """The other save happens when this one has written its files, before it moves them."""
    glob, calls = Path.glob, []

    def globbing(folder, pattern):
        if pattern.startswith(".adapterzoo-part"):
            calls.append(pattern)
            if len(calls) == 1:
                model.save_adapter(folder, "new", format=kind)
        return glob(folder, pattern)

    monkeypatch.setattr(Path, "glob", globbing)
    model.save_adapter(tmp_path, "old", format=kind)
    # this one, the other, and this one again
    assert len(calls) == 3
    model.load_adapter(tmp_path, load_as="back")
    assert model.adapters_config["back"].r == 2
    assert not [*glob(tmp_path, ".*")]


@pytest.mark.parametrize("kind", KINDS)
def test_a_reader_notices_a_save(model, tmp_path, kind, monkeypatch):
    model.save_adapter(tmp_path, "old", format=kind)
    whole = formats[kind]

    def reading(folder, *rest):
        found = whole.read(folder, *rest)
        model.save_adapter(folder, "new", format=kind)
        return found

    with monkeypatch.context() as patched:
        patched.setitem(formats._entries, kind, dataclasses.replace(whole, read=reading))
        with pytest.raises(CheckpointError, match="saved to while it was read"):
            model.load_adapter(tmp_path, load_as="back")
    assert "back" not in model.adapters_config
    model.load_adapter(tmp_path, load_as="back")
    assert model.adapters_config["back"].r == 256
