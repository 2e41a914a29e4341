"""`list_adapters` and `adapter_info` through the real client: what they find."""

from __future__ import annotations

import json

import pytest
from driver import ClientError
from server import READER, Fault


def card(**data):
    return f"---\n{json.dumps(data)}\n---\n".encode()


@pytest.fixture
def listed(hub, client):
    ours = {"library_name": "adapterzoo", "tags": ["adapterzoo", "adapter"], "license": "mit",
            "base_model_relation": "adapter", "datasets": ["ann/reviews"]}  # fmt: skip
    bert, text = {"base_model": "org/bert"}, {"pipeline_tag": "text-classification"}
    config = json.dumps({"name": "a", "model_name": "org/bert", "config": {"r": 8}}).encode()
    hub.repo("ann/a", {"README.md": card(**ours, **bert, **text), "adapter_config.json": config,
                       "adapter.safetensors": b"w"}, downloads=5)  # fmt: skip
    hub.repo("ann/b", {"README.md": card(**ours, base_model="org/gpt")}, downloads=7)
    hub.repo("ann/c", {"README.md": card(**ours, **bert)}, downloads=9, private=True)
    hub.repo("org/hub", {"README.md": card(tags=["adapter-transformers"]),
                         "adapter_config.json": config}, downloads=3)  # fmt: skip
    hub.repo("org/hub-gpt", {"README.md": card(tags=["adapter-transformers"])}, downloads=2)
    hub.repo("org/peft", {"README.md": card(library_name="peft", **bert, **text)}, downloads=8)
    hub.repo("org/bert", {"README.md": card(tags=["bert"])}, downloads=99)
    return client


def ids(client, written):
    code = f"answer = [i.adapter_id for i in adapterzoo.list_adapters({written})]"
    return list(client.run(f"import adapterzoo; {code}"))


@pytest.mark.parametrize(
    ("written", "found"),
    [("", ["ann/c", "org/peft", "ann/b", "ann/a", "org/hub", "org/hub-gpt"]),
     ("token=False", ["org/peft", "ann/b", "ann/a", "org/hub", "org/hub-gpt"]),
     ("base_model='org/bert'", ["ann/c", "org/peft", "ann/a", "org/hub"]),
     ("base_model='org/bert', token=False", ["org/peft", "ann/a", "org/hub"]),
     ("'org/bert', 'text-classification'", ["org/peft", "ann/a"]),
     ("task='text-classification', library='adapterzoo'", ["ann/a"]),
     ("library='adapters'", ["org/hub", "org/hub-gpt"]), ("library='peft'", ["org/peft"]),
     ("author='ann', limit=2", ["ann/c", "ann/b"]), ("limit=1", ["ann/c"]), ("limit=0", []),
     ("limit=None, search='hub'", ["org/hub", "org/hub-gpt"]), ("base_model='nobody'", [])],
)  # fmt: skip
def test_what_is_found(listed, written, found):
    assert ids(listed, written) == found


def test_the_facts_about_one(hub, listed):
    facts = listed.run(
        "import adapterzoo, dataclasses\n"
        "answer = dataclasses.asdict(adapterzoo.adapter_info('ann/a'))"
    )
    assert facts == {
        "adapter_id": "ann/a",
        "model_name": "org/bert",
        "task": "text-classification",
        "username": "ann",
        "source": "hf",
        "library": "adapterzoo",
        "tags": ["adapterzoo", "adapter", "base_model:org/bert", "base_model:adapter:org/bert",
                 "dataset:ann/reviews", "license:mit"],
        "datasets": ["ann/reviews"],
        "license": "mit",
        "downloads": 5,
        "likes": 0,
        "private": False,
        "gated": False,
        "revision": hub.repos["ann/a"].branches["main"],
        "files": ["README.md", "adapter.safetensors", "adapter_config.json"],
        "adapter_config": {"name": "a", "model_name": "org/bert", "config": {"r": 8}},
    }  # fmt: skip
    # the weights were not fetched
    assert not [path for _, path, _ in hub.requests if path.startswith("/objects/")]


@pytest.mark.parametrize(
    ("name", "model", "library"),
    [("org/hub", "org/bert", "adapters"), ("org/peft", "org/bert", "peft"),
     ("org/hub-gpt", None, "adapters"), ("org/bert", None, None)],
)  # fmt: skip
def test_the_facts_of_other_libraries(listed, name, model, library):
    code = "i = adapterzoo.adapter_info(name); answer = [i.model_name, i.library]"
    assert listed.run("import adapterzoo\n" + code, name=name) == [model, library]


@pytest.mark.parametrize(
    ("written", "kind", "message"),
    [
        ("list_adapters(library='lora')", "UnknownNameError", "no library 'lora'"),
        ("adapter_info('ann/zzz')", "HubError", "'ann/zzz': 404 .*Repository Not Found"),
        ("adapter_info('ann/c', token=reader)", "HubError", "'ann/c': 404 .*private"),
        ("adapter_info('a/b/c')", "HubError", "'a/b/c': Repo id must be "),
        ("adapter_info('ann/a', 'v9')", "HubError", "Revision Not Found"),
        ("adapter_info('ann/bad')", "CheckpointError", "is not JSON.*Tell its author"),
        ("adapter_info('ann/list')", "CheckpointError", "a list, not an object"),
    ],
)  # fmt: skip
def test_what_cannot_be_answered_says_so(hub, listed, written, kind, message):
    hub.repo("ann/bad", {"adapter_config.json": b"{"})
    hub.repo("ann/list", {"adapter_config.json": b"[]"})
    with pytest.raises(ClientError, match=message) as caught:
        listed.run("import adapterzoo\nadapterzoo." + written, reader=READER)
    assert caught.value.kind == kind
    # some of these stand beside others that work
    del hub.repos["ann/bad"], hub.repos["ann/list"]


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (Fault("search", "status", status=403), r"^list_adapters\(\): the Hub: .*Forbidden"),
        (Fault("search", "html"), "the Hub: "),
    ],
)
def test_faults_of_a_search(hub, listed, fault, says):
    with hub.broken(fault), pytest.raises(ClientError, match=says):
        ids(listed, "")
