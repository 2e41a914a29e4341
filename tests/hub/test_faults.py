"""Faults between this machine and the Hub, met by a model that loads an adapter.

The adapter is loaded, or there is one error that names it; then the model is as it was and the
cache holds whole files only. When the fault is gone the same call works.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from server import OWNER, Fault, git, sha256
from swept import all_but

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

FAULTS = {
    "401: not logged in": Fault("info", "status", status=401),
    "403: no right": Fault("info", "status", status=403),
    "404: no such repository": Fault(
        "info", "status", status=404, headers={"X-Error-Code": "RepoNotFound"}),
    "404: the file is gone": Fault(
        "head", "status", status=404, headers={"X-Error-Code": "EntryNotFound"}),
    "429": Fault("info", "status", status=429, headers={"Retry-After": "3600"}),
    "500": Fault("info", "status", status=500),
    "500 for the file, then success": Fault("head", "status", 1, status=500),
    "500 for the content": Fault("body", "status", 1, status=500),
    "no answer in time": Fault("info", "slow"),
    "the connection is reset": Fault("info", "reset"),
    "another server answers, such as a hotel's login page": Fault("info", "html"),
    "cut in the middle of a download, once": Fault("body", "cut", 1),
    "a truncated body": Fault("body", "truncated"),
    "a slow body": Fault("body", "slow"),
}  # fmt: skip
# those that take seconds
LONG = {"no answer in time", "the connection is reset", "a slow body"}


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


@pytest.mark.parametrize("fault", all_but(FAULTS.keys() - LONG, FAULTS))
def test_a_fault_ends_in_the_adapter_or_in_one_error(hub, client, published, tmp_path, fault):
    with hub.broken(FAULTS[fault]):
        seen = client.run(LOAD)
    left = kept(tmp_path / "cache", published)
    if seen is None:
        assert left == sorted(published)
    else:
        assert len(left) < len(published)
        assert seen.startswith("load_adapter('ann/a'): 'ann/a': ")
        assert OWNER not in seen
    # the fault is gone: the same call works
    assert client.run(LOAD) is None
    assert kept(tmp_path / "cache", published) == sorted(published)
