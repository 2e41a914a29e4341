"""`push_adapter_setup_to_hub` and `load_adapter_setup` against the Hub on loopback."""

from __future__ import annotations

import pytest
from driver import ClientError

MAKE = """
import torch
from transformers import BertConfig
from adapterzoo import AutoAdapterModel, Fuse, Stack
config = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
                    intermediate_size=48, vocab_size=50)
def fresh():
    torch.manual_seed(0)
    return AutoAdapterModel.from_config(config).eval()
model = fresh()
for name in "abc":
    model.add_adapter(name, "seq_bn")
model.add_adapter_fusion(["a", "b"])
model.add_classification_head("c", num_labels=2)
setup = Stack(Fuse("a", "b"), "c")
"""
PUSH = "answer = model.push_adapter_setup_to_hub('ann/s', {}, format={!r})"
LOAD = """
again = fresh()
found = again.load_adapter_setup(*args, **kwargs)
answer = [repr(found), sorted(again.adapters_config), [again.adapter_fingerprint(n) for n in "abc"]]
"""


@pytest.mark.parametrize("format", ["native", "adapterhub"])
def test_a_setup_goes_to_the_hub_and_back(hub, client, format):
    client.run(MAKE)
    client.run(PUSH.format("setup", format))
    files = hub.repos["ann/s"].files()
    assert "adapter_setup.json" in files
    assert {name.partition("/")[0] for name in files if "/" in name} == {"a", "b", "c", "a,b"}
    assert b'load_adapter_setup("ann/s", set_active=True)' in files["README.md"]
    found = client.run(LOAD, args=("ann/s",), kwargs={"set_active": True})
    own = client.run("answer = [model.adapter_fingerprint(n) for n in 'abc']")
    assert found == ["(Stack(Fuse('a', 'b'), 'c'), None)", ["a", "b", "c"], own]
    # without a network
    hub.requests.clear()
    assert client.run(LOAD, args=("ann/s",), kwargs={"local_files_only": True})[2] == own
    assert not hub.requests
    # another one takes its place, and nothing of it is left
    client.run(PUSH.format("'c'", format))
    left = {name.partition("/")[0] for name in hub.repos["ann/s"].files() if "/" in name}
    assert left == {"c"}


def test_a_repository_without_a_setup(hub, client):
    client.run(MAKE)
    hub.repo("ann/a", {"adapter_config.json": b"{}"})
    with pytest.raises(ClientError, match=r"adapter_setup\.json' cannot be read"):
        client.run(LOAD, args=("ann/a",), kwargs={})
    with pytest.raises(ClientError, match="Repository Not Found"):
        client.run(LOAD, args=("ann/b",), kwargs={})
    with pytest.raises(ClientError, match="there is no adapter 'x'"):
        client.run(PUSH.format("'x'", "native"))
    assert "ann/s" not in hub.repos
