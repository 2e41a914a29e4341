"""`hub.resolve` through the real client: what it fetches, keeps, and takes from the cache."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from driver import Client, ClientError
from safetensors.torch import save
from server import OWNER, READER, Fault, git, sha256

from adapterzoo import hub as package
from adapterzoo.errors import CheckpointError, HubError

# their header is read before anything is sent
WEIGHTS, CONFIG = save({"a": torch.ones(999)}), json.dumps({"name": "a"}).encode()
FILES = {"adapter.safetensors": WEIGHTS, "adapter_config.json": CONFIG}
OTHER = {
    "README.md": b"# a card\n", "optimizer.pt": b"1", "model.safetensors": b"2",
    "../outside/adapter.safetensors": b"3", "logs/adapter.safetensors": b"4",
}  # fmt: skip

RESOLVE = "from adapterzoo import hub; answer = str(hub.resolve({}))"


def resolve(client, *args, **named):
    written = [*map(repr, args), *(f"{key}={value!r}" for key, value in named.items())]
    return Path(client.run(RESOLVE.format(", ".join(written))))


def names(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def asked(hub):
    return [f"{method} {path}" for method, path, _ in hub.requests]


def test_only_the_files_of_an_adapter_are_fetched(hub, client):
    hub.repo("ann/a", FILES | OTHER)
    folder = resolve(client, "ann/a")
    assert names(folder) == sorted(FILES)
    assert {name: (folder / name).read_bytes() for name in FILES} == FILES


def test_a_second_load_downloads_nothing(hub, client):
    commit = hub.repo("ann/a", FILES).branches["main"]
    first = resolve(client, "ann/a")
    for named in ({}, {"revision": commit}):
        hub.requests.clear()
        assert resolve(client, "ann/a", **named) == first
        assert not [line for line in asked(hub) if "/objects/" in line or "/resolve/" in line]
    resolve(client, "ann/a", force_download=True)
    assert f"GET /objects/{sha256(WEIGHTS)}" in asked(hub)


def test_revisions_are_told_apart(hub, client):
    repo = hub.repo("ann/a", FILES)
    first = repo.branches["main"]
    repo.commit(FILES | {"adapter.safetensors": b"tagged"}, branch="v1")
    for revision, content in [("v1", b"tagged"), (first, WEIGHTS), ("main", WEIGHTS)]:
        folder = resolve(client, "ann/a", revision)
        assert (folder / "adapter.safetensors").read_bytes() == content


def test_a_subfolder_of_a_repository(hub, client):
    inside = {f"runs/b/{name}": content for name, content in FILES.items()}
    hub.repo("ann/a", {"adapter.safetensors": b"root"} | inside)
    folder = resolve(client, "ann/a/runs/b")
    assert names(folder) == sorted(FILES)
    assert (folder / "adapter.safetensors").read_bytes() == WEIGHTS
    assert resolve(client, "ann/a/runs/b", local_files_only=True) == folder


def test_a_local_folder_is_itself_and_nobody_is_asked(hub, client, tmp_path):
    here = client.home / "ann" / "a"
    here.mkdir(parents=True)
    try:
        hub.repo("ann/a", FILES)
        assert resolve(client, "ann/a") == Path("ann/a")
        assert resolve(client, str(tmp_path)) == tmp_path
        assert asked(hub) == []
        assert names(resolve(client, "ann/a", source="hf")) == sorted(FILES)
    finally:
        here.rmdir()


def test_offline_takes_the_cache_and_asks_nobody(hub, client, tmp_path):
    hub.repo("ann/a", FILES)
    online = resolve(client, "ann/a")
    hub.requests.clear()
    client.run("constants.HF_HUB_OFFLINE = True")
    try:
        assert resolve(client, "ann/a") == online
        says = "offline mode"
        for call in ("hub.resolve('ann/b')", "hub.resolve('ann/a', 'v2')", "adapter_info('ann/a')",
                     "list_adapters()", f"hub.push({str(online)!r}, 'me/a')"):  # fmt: skip
            with pytest.raises(ClientError, match=says) as caught:
                client.run(f"from adapterzoo import adapter_info, hub, list_adapters; {call}")
            assert caught.value.kind == "HubError"
    finally:
        client.run("constants.HF_HUB_OFFLINE = False")
    assert asked(hub) == []


def test_a_cache_of_ones_own(hub, client, tmp_path):
    hub.repo("ann/a", FILES)
    folder = resolve(client, "ann/a", cache_dir=str(tmp_path / "mine"))
    assert folder.is_relative_to(tmp_path / "mine")
    assert not (tmp_path / "cache").exists()
    assert resolve(client, "ann/a", cache_dir=str(tmp_path / "mine"), local_files_only=True)
    with pytest.raises(ClientError, match="Cannot find an appropriate cached snapshot folder"):
        resolve(client, "ann/a", local_files_only=True)


@pytest.mark.parametrize("broken", [*FILES, "model_head.safetensors", "adapter_interface.json"])
def test_a_download_that_broke_off_is_not_taken_offline(hub, client, broken):
    more = {"adapter_interface.json": b"[]"}
    if broken not in more:
        more |= {"head_config.json": b"{}", "model_head.safetensors": b"head"}
    hub.repo("ann/a", FILES | more)
    fault = Fault("head", "status", status=403, path=broken)
    with hub.broken(fault), pytest.raises(ClientError, match="'ann/a': 403 Forbidden"):
        resolve(client, "ann/a")
    for revision in ("main", hub.repos["ann/a"].branches["main"]):
        with pytest.raises(ClientError) as caught:
            resolve(client, "ann/a", revision=revision, local_files_only=True)
        assert caught.value.kind == "HubError"
    assert names(resolve(client, "ann/a")) == sorted([*FILES, *more])


def test_the_cache_is_that_of_huggingface_hub(hub, client, tmp_path):
    commit = hub.repo("ann/a", FILES).branches["main"]
    folder = resolve(client, "ann/a")
    home = tmp_path / "cache" / "models--ann--a"
    assert folder == home / "snapshots" / commit
    assert (home / "refs" / "main").read_text() == commit
    blobs = {path.name for path in (home / "blobs").iterdir()}
    assert blobs == {sha256(WEIGHTS), git(CONFIG)}
    found = client.run(
        "from huggingface_hub import snapshot_download\n"
        "answer = snapshot_download('ann/a', local_files_only=True)"
    )
    assert Path(found) == folder


def test_a_private_repository_needs_its_token(hub, client):
    hub.repo("ann/secret", FILES, private=True)
    with pytest.raises(ClientError, match=r"404 .*private"):
        resolve(client, "ann/secret", token=READER)
    with pytest.raises(ClientError, match="401 "):
        resolve(client, "ann/secret", token=False)
    assert names(resolve(client, "ann/secret")) == sorted(FILES)
    assert names(resolve(client, "ann/secret", token=OWNER)) == sorted(FILES)
    # the store of large files got none
    sent = {token for _, path, token in hub.requests if path.startswith("/objects/")}
    assert sent == {None}


def test_a_gated_repository_needs_its_token(hub, client):
    hub.repo("ann/gated", FILES, gated=True)
    with pytest.raises(ClientError, match="'ann/gated': 403 "):
        resolve(client, "ann/gated", token=READER)
    assert names(resolve(client, "ann/gated")) == sorted(FILES)


@pytest.mark.parametrize(
    ("args", "kind", "message"),
    [
        (["ann/nobody"], "HubError", "'ann/nobody': 404 .*Repository Not Found"),
        (["ann/a", "v9"], "HubError", "'ann/a': 404 .*Revision Not Found"),
        (["ann/empty"], "HubError", "'ann/empty/' has no complete adapter: its files are none"),
        (["ann/a/none"], "HubError", "'ann/a/none' has no complete adapter"),
        (["ann/a..b"], "HubError", "Cannot have -- or .. in repo_id"),
        (["ann/a b"], "HubError", "Repo id must use alphanumeric"),
        (["ann/" + "x" * 200], "HubError", "the maximum length is 96"),
        (["runs/review"], "HubError", "Repository Not Found"),
        *(
            ([name], "CheckpointError", "there is no such folder.*'user/repository'")
            for name in ("nowhere", "./ann/a", "/no/such/folder", "~/ann/a", "C:\\ann\\a",
                         "https://x.y/ann/a", "x" * 300, "ann/a/../b", "a//b")
        ),
        (["log.txt"], "CheckpointError", "'log.txt' is a file. Write the folder of an adapter"),
    ],
)  # fmt: skip
def test_what_cannot_be_had_says_so(hub, client, args, kind, message):
    hub.repo("ann/a", FILES)
    hub.repo("ann/empty", {"README.md": b"hello"})
    with pytest.raises(ClientError, match=message) as caught:
        resolve(client, *args)
    assert caught.value.kind == kind
    # long arguments are cut
    assert str(caught.value).startswith(f"resolve({args[0]!r}"[:60])


def test_a_path_object_is_never_a_repository():
    with pytest.raises(CheckpointError, match="there is no such folder"):
        package.resolve(Path("ann/a"))
    with pytest.raises(HubError, match="cannot be a repository of the Hub"):
        package.resolve("/ann/a", source="hf")


@pytest.mark.long
def test_a_disk_that_is_full_or_closed_says_so(hub, tmp_path):
    hub.repo("ann/a", FILES | {"adapter.safetensors": bytes(99_999)})
    (tmp_path / "home").mkdir()
    (tmp_path / "file").touch()
    alone = Client(tmp_path / "home", hub.url)
    try:
        # as a full disk does, this lets a write begin and not end
        alone.run("import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))")
        with pytest.raises(ClientError, match=r"'ann/a': .*File too large"):
            resolve(alone, "ann/a")
        with pytest.raises(ClientError, match=r"'ann/a': .*Not a directory"):
            resolve(alone, "ann/a", cache_dir=str(tmp_path / "file" / "x"))
    finally:
        alone.close()
    large = [path for path in (tmp_path / "home").rglob("*") if path.stat().st_size > 9999]
    # where the first releases of huggingface_hub 1.x would go on
    assert {path.suffix for path in large} <= {".incomplete"}


@pytest.mark.parametrize("status", [401, 403, 500])
def test_a_hub_that_refuses_leaves_what_is_in_the_cache(hub, client, status):
    hub.repo("ann/a", FILES)
    folder = resolve(client, "ann/a")
    with hub.broken(Fault("info", "status", status=status)):
        assert resolve(client, "ann/a") == folder
