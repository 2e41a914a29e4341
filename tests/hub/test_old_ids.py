"""Ids of AdapterHub's own repository, found through its index; the server is a stand-in."""

from __future__ import annotations

import json

import pytest
from driver import ClientError
from server import Fault
from transformers import BertConfig

from adapterzoo import AdapterConfig, AutoAdapterModel, get_adapter_config_hash

# the hashes that the index of AdapterHub has for these two configs
PFEIFFER, HOULSBY = "9076f36a74755ac4", "b1017368d7a97b11"
AT = "https://adapterhub.example/adapters/"
INDEX = {
    "sentiment": {
        "sst-2": {
            "default": f"{AT}ukp/sst-2_usual.json",
            PFEIFFER: {
                "default": f"{AT}ukp/sst-2_usual.json",
                "versions": {
                    "ukp": f"{AT}ukp/sst-2_usual.json",
                    "other": f"{AT}other/sst-2_other.json",
                },
            },
            HOULSBY: {"versions": {"other": f"{AT}other/sst-2_houlsby.v2.json"}},
        },
        "imdb": {PFEIFFER: {"versions": {"ukp": f"{AT}ukp/imdb_ukp.json"}}},
    },
    "nli": {
        "rte": {
            PFEIFFER: {"versions": {"a": f"{AT}a/rte_a.json", "b": f"{AT}b/rte_b.json"}},
            HOULSBY: {"versions": {"b": f"{AT}b/rte_houlsby.json"}},
        },
        "imdb": {PFEIFFER: {"versions": {"ukp": f"{AT}ukp/nli_imdb.json"}}},
    },
}
FILES = {"adapter.safetensors": b"weights" * 99, "adapter_config.json": b"{}"}
FIND = "from adapterzoo.hub import old_ids; answer = old_ids.repository_of(*given)"
RESOLVE = "from adapterzoo import hub; answer = str(hub.resolve(*args, **kwargs))"


@pytest.fixture
def index(hub, client):
    """The stand-in of AdapterHub's server, with an index of "bert"."""
    client.run("from adapterzoo.hub import old_ids; old_ids.INDEX = url",
               url=f"{hub.url}/index/{{}}.json")  # fmt: skip
    hub.indexes["bert"] = json.dumps(INDEX).encode()
    return hub.indexes


def find(client, old_id, config=None, model="bert"):
    return client.run(FIND, given=(old_id, model, config))


@pytest.mark.parametrize(
    ("old_id", "config", "name"),
    [
        ("sentiment/sst-2@ukp", None, "sst-2_usual"),
        ("sentiment/sst-2", None, "sst-2_usual"),
        ("sentiment/sst-2", "pfeiffer", "sst-2_usual"),
        ("sentiment/sst-2@other", "pfeiffer", "sst-2_other"),
        ("nli/rte@a", None, "rte_a"),
        # what follows the first dot is no part of the name
        ("sentiment/sst-2", "houlsby", "sst-2_houlsby"),
        ("sst-2@ukp", "pfeiffer", "sst-2_usual"),
        ("sentiment/imdb@ukp", None, "imdb_ukp"),
        ("sentiment/imdb@ukp", {"architecture": None, "mh_adapter": False, "output_adapter": True,
                                "reduction_factor": 16, "non_linearity": "relu"}, "imdb_ukp"),
        # no adapter has this config: the usual one is loaded, and a warning says so
        ("sentiment/sst-2", "lora", "sst-2_usual"),
        ("@ukp/bert-base-uncased_sst-2", None, "bert-base-uncased_sst-2"),
        (" sentiment/sst-2@ukp ", None, "sst-2_usual"),
    ],
)  # fmt: skip
def test_an_id_is_a_repository(index, client, old_id, config, name):
    assert find(client, old_id, config) == f"AdapterHub/{name}"


@pytest.mark.parametrize(
    ("old_id", "config", "says"),
    [
        ("sentiment/sst3@ukp", None, r"sentiment/sst3@ukp' names 0 adapters. Write one of 'sent"),
        ("xyz@ukp", None, r"'xyz@ukp' names 0 adapters"),
        ("imdb@ukp", None, r"'imdb@ukp' names 2 adapters. Write one of 'sentiment/imdb', 'nli/"),
        ("nli/rte@b", None, r"has 2 adapters 'nli/rte@b'.*config='seq_bn'"),
        ("nli/rte", "pfeiffer", r"adapters of 'a', 'b'. Write 'nli/rte@organization'"),
        ("nli/rte@c", "pfeiffer", r"has 0 adapters 'nli/rte@c'; there are adapters of 'a', 'b'"),
        ("sentiment/sst-2@nobody", None, r"has 0 adapters.*config="),
        ("sentiment/imdb@a", None, r"there are adapters of 'ukp'"),
        ("a/b/c@ukp", None, r"not an id of AdapterHub"),
    ],
)
def test_what_is_not_one_adapter_is_an_error(index, client, old_id, config, says):
    with pytest.raises(ClientError, match=says) as caught:
        find(client, old_id, config)
    assert caught.value.kind == "HubError"


def test_the_hashes_are_those_of_the_index():
    assert get_adapter_config_hash(AdapterConfig.load("pfeiffer")) == PFEIFFER
    assert get_adapter_config_hash(AdapterConfig.load("houlsby")) == HOULSBY


def test_an_owner_on_the_hub_is_no_part_of_the_index(index, client, hub):
    assert find(client, "sst-2@ukp", model="google-bert/bert") == "AdapterHub/sst-2_usual"
    with pytest.raises(ClientError, match=r"no index for 'gpt2'.*model_name='bert-base-uncased'"):
        find(client, "sst-2@ukp", model="gpt2")
    for unknown in (None, "/home/me/bert", "../../x"):
        with pytest.raises(ClientError, match=r"no index for .*model_name="):
            find(client, "sst-2@ukp", model=unknown)
    # AdapterHub's server never sees a token
    asked = [token for method, path, token in hub.requests if path.startswith("/index/")]
    assert asked
    assert not any(asked)


def test_an_index_that_cannot_be_read_is_an_error(index, client, hub):
    fault = Fault("index", "status", status=500)
    with hub.broken(fault), pytest.raises(ClientError, match=r"index for 'bert': .*500"):
        find(client, "sst-2@ukp")
    index["bert"] = b"<html>"
    with pytest.raises(ClientError, match="Expecting") as caught:
        find(client, "sentiment/sst-2@ukp")
    assert caught.value.kind == "HubError"


def test_resolve_takes_old_ids(index, client, hub):
    hub.repo("AdapterHub/sst-2_usual", FILES).commit(
        FILES | {"adapter.safetensors": b"one"}, branch="1"
    )

    def weights(*args, **kwargs):
        folder = client.run(RESOLVE, args=args, kwargs={"model_name": "bert", **kwargs})
        return (client.home / folder / "adapter.safetensors").read_text()

    for old_id in ("sentiment/sst-2@ukp", "sst-2@ukp", "sentiment/sst-2", "@ukp/sst-2_usual"):
        assert weights(old_id) == "weights" * 99
        assert weights(old_id, "1") == "one"
    assert weights("sst-2", source="ah") == "weights" * 99
    # a repository of the Hub goes before an old id of its form
    hub.repo("sentiment/sst-2", FILES | {"adapter.safetensors": b"mine"})
    assert weights("sentiment/sst-2") == "mine"
    assert weights("sentiment/sst-2", source="ah") == "weights" * 99
    for source in (None, "hf"):
        with pytest.raises(ClientError, match="Repository Not Found"):
            weights("sentiment/sst3", source=source)
    # a folder goes before all
    here = client.home / "sst-2@ukp"
    here.mkdir()
    try:
        assert client.run(RESOLVE, args=("sst-2@ukp",), kwargs={}) == "sst-2@ukp"
    finally:
        here.rmdir()


LOAD = """
import warnings
from transformers import BertConfig
from adapterzoo import AutoAdapterModel, BaseModelWarning
config = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
                    intermediate_size=48, vocab_size=50)
model = AutoAdapterModel.from_config(config)
model.config.name_or_path = base
with warnings.catch_warnings():
    # its weights are other random ones
    warnings.simplefilter("ignore", BaseModelWarning)
    name = model.load_adapter(*args, **kwargs)
answer = [name, model.adapter_fingerprint(name)]
"""


def test_load_adapter_takes_old_ids(index, client, hub, tmp_path):
    config = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
                        intermediate_size=48, vocab_size=50)  # fmt: skip
    model = AutoAdapterModel.from_config(config)
    for name, kind in (("sst-2_usual", "pfeiffer"), ("sst-2_houlsby", "houlsby")):
        model.add_adapter(name, kind)
        model.save_adapter(tmp_path / name, name, format="adapterhub")
        files = {file.name: file.read_bytes() for file in (tmp_path / name).iterdir()}
        hub.repo(f"AdapterHub/{name}", files)

    def load(*args, base="bert", **kwargs):
        return client.run(LOAD, args=args, kwargs=kwargs, base=base)

    for name, kind in (("sst-2_usual", "pfeiffer"), ("sst-2_houlsby", "houlsby")):
        expected = [name, model.adapter_fingerprint(name)]
        assert load("sentiment/sst-2", config=kind) == expected
        assert load("sentiment/sst-2", kind, None, "bert", base="") == expected
    assert load("sentiment/sst-2@ukp", version="main", load_as="mine")[0] == "mine"
    # warnings are errors over there
    with pytest.raises(ClientError, match="the checkpoint has its own config"):
        load("sentiment/sst-2@ukp", "lora")
    with pytest.raises(ClientError, match=r"^load_adapter\('sst-2@ukp'\): .*model_name="):
        load("sst-2@ukp", base="")


def test_facts_and_lists_of_old_ids(index, client, hub):
    card = b"---\ntags: [adapter-transformers]\n---\n"
    hub.repo("AdapterHub/sst-2_usual", FILES | {"README.md": card})
    hub.repo("ann/a", FILES | {"README.md": card})
    code = "from adapterzoo import adapter_info; answer = adapter_info(*args, **kwargs).adapter_id"
    for args, kwargs in (
        (("@ukp/sst-2_usual",), {}),
        (("sst-2@ukp",), {"model_name": "bert"}),
        (("sentiment/sst-2",), {"model_name": "bert", "source": "ah"}),
        (("AdapterHub/sst-2_usual",), {}),
    ):
        assert client.run(code, args=args, kwargs=kwargs) == "AdapterHub/sst-2_usual"
    code = """from adapterzoo import list_adapters
answer = [i.adapter_id for i in list_adapters(**kwargs)]"""
    assert client.run(code, kwargs={"source": "ah"}) == ["AdapterHub/sst-2_usual"]
    for source in ("hf", None):
        assert len(client.run(code, kwargs={"source": source})) == 2
    for wrong in ({"source": "x"}, {"source": "ah", "author": "ann"}):
        with pytest.raises(ClientError, match="source="):
            client.run(code, kwargs=wrong)
