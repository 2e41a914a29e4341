"""What goes wrong between here and the Hub, and what is left of it: the table of docs/hub.md.

Each fault meets a model that loads an adapter. It is loaded all the same, or there is one clear
error; the model is as it was, the cache holds whole files only, and when the fault is gone the
same call works.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from huggingface_hub import ModelInfo
from server import OWNER, Fault, git, sha256

from adapterzoo.errors import HubError
from adapterzoo.hub.client import Client as HubClient

LOADED = "the adapter is loaded"
DOCS = Path(__file__).parents[2] / "docs" / "hub.md"
TESTS = str(Path(__file__).parents[1])

START = """
import sys
sys.path[:0] = [tests]
import torch
from families import tiny_config
from snapshots import adapter_bits, snapshot, stir
from adapterzoo import AutoAdapterModel, hub
from adapterzoo.errors import HubError

def tiny():
    torch.manual_seed(0)
    return AutoAdapterModel.from_config(tiny_config("bert")).eval()

source = tiny()
source.add_adapter("a", "lora")
source.add_classification_head("a", num_labels=3)
stir(source, "a")
model = tiny()
"""
LOAD = """
before = snapshot(model)
try:
    model.load_adapter("ann/a")
    assert adapter_bits(model, "a") == adapter_bits(source, "a")
    model.delete_adapter("a")
    model.delete_head("a")
except HubError as error:
    answer = str(error)
    assert snapshot(model) == before
"""

BAD_TOKEN = "Invalid credentials in Authorization header"
FAULTS = {
    "401: not logged in": Fault("info", "status", status=401),
    "401: a bad token": Fault("info", "status", status=401, message=BAD_TOKEN),
    "403: no right": Fault("info", "status", status=403),
    "404: no such repository": Fault(
        "info", "status", status=404, headers={"X-Error-Code": "RepoNotFound"}),
    "404: the file has gone": Fault(
        "head", "status", status=404, headers={"X-Error-Code": "EntryNotFound"}),
    "429 with `Retry-After: 1`, once": Fault(
        "info", "status", 1, status=429, headers={"Retry-After": "1"}),
    "429 with `Retry-After: 3600`": Fault(
        "info", "status", status=429, headers={"Retry-After": "3600"}),
    "429 at each try": Fault("info", "status", status=429),
    "500, then success": Fault("info", "status", 1, status=500),
    "500 for the file, then success": Fault("head", "status", 1, status=500),
    "500 for the content, then success": Fault("body", "status", 1, status=500),
    "500 at each try": Fault("info", "status", status=500),
    "no answer in time": Fault("info", "slow"),
    "the connection is reset, once": Fault("info", "reset", 1),
    "the connection is reset": Fault("info", "reset"),
    "another server answers, such as a hotel's login page": Fault("info", "html"),
    "cut in the middle of a download, once": Fault("body", "cut", 1),
    "a truncated body, once": Fault("body", "truncated", 1),
    "a truncated body": Fault("body", "truncated"),
    "a corrupted body, once": Fault("body", "corrupted", 1),
    "a corrupted body": Fault("body", "corrupted"),
    "a corrupted config, once": Fault("text", "corrupted", 1),
    "a corrupted config": Fault("text", "corrupted"),
    "a slow body, once": Fault("body", "slow", 1),
    "a slow body": Fault("body", "slow"),
}  # fmt: skip
# those that are tried again until patience ends, but for one
LONG = {"429 at each try", "no answer in time", "the connection is reset", "a truncated body",
        "a slow body", "a slow body, once"}  # fmt: skip


@pytest.fixture
def published(hub, client, tmp_path):
    client.run(f"if 'source' not in dir():\n    exec({START!r})", tests=TESTS)
    client.run("source.save_adapter(folder, 'a')", folder=str(tmp_path / "saved"))
    files = {path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()}
    hub.repo("ann/a", files)
    return files


def kept(cache, files):
    """What the cache holds of the adapter; every file in it is whole."""
    digests = {sha256(content) for content in files.values()}
    digests |= {git(content) for content in files.values()}
    for blob in cache.glob("models--*/blobs/*"):
        # where the first releases of huggingface_hub 1.x would go on
        if blob.suffix == ".incomplete":
            continue
        assert blob.name in digests
        assert blob.name in {sha256(blob.read_bytes()), git(blob.read_bytes())}
    return sorted(path.name for path in cache.glob("models--*/snapshots/*/*"))


def row(fault, seen, left, hub):
    names = ", ".join(f"`{name}`, whole" for name in left) or "nothing"
    if seen == LOADED:
        names = "the adapter, whole"
    seen = seen.replace(hub.url, "https://huggingface.co").replace("|", "\\|")
    seen = re.sub(r"(?<=digest )[0-9a-f]+", "…", re.sub(r" \(\(…\)[0-9a-f]{40}\)\.", "", seen))
    seen = re.sub(r"size \d+", "size …", seen)
    return f"| {fault} | {seen} | {names} |"


@pytest.mark.parametrize(
    "fault", [pytest.param(f, marks=pytest.mark.sweep) if f in LONG else f for f in FAULTS]
)
def test_a_fault_ends_in_the_adapter_or_in_one_clear_error(hub, client, published, tmp_path, fault):
    with hub.broken(FAULTS[fault]):
        seen = client.run(LOAD)
    left = kept(tmp_path / "cache", published)
    if seen is None:
        assert left == sorted(published)
    else:
        assert len(left) < len(published)
        assert seen.startswith("load_adapter('ann/a'): ")
        assert OWNER not in seen
    text = LOADED if seen is None else f"`HubError`: {seen}"
    assert row(fault, text, left, hub) in DOCS.read_text(encoding="utf-8").splitlines()
    # the fault is gone: the same call works
    assert client.run(LOAD) is None
    assert kept(tmp_path / "cache", published) == sorted(published)


def test_the_table_has_no_other_rows():
    lines = DOCS.read_text(encoding="utf-8").splitlines()
    start = lines.index("| fault | what the user sees | what is on disk then |")
    named = [line.split(" | ")[0].removeprefix("| ") for line in lines[start + 2 :] if line]
    assert named == list(FAULTS)


@pytest.mark.parametrize("answer", [[], ["a"], None, 1])
def test_json_that_is_no_answer_is_told(answer):
    asked: list[object] = []

    def ask():
        asked.append(answer)
        return ModelInfo(**answer)  # type: ignore[arg-type]

    with pytest.raises(HubError, match=r"for 'ann/a' cannot be used \(TypeError: .*HF_ENDPOINT"):
        HubClient("ann/a").ask(ask)
    assert len(asked) == 1
