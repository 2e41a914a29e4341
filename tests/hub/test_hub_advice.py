"""What a `HubError` says to write works: a call that fails, and its advice, run as code."""

# a row of the table is a line
# ruff: noqa: E501

from __future__ import annotations

import json
import re

import pytest
from driver import ClientError
from test_faults import START, TESTS
from test_old_ids import INDEX

# fails · the advice in the message, as a pattern · code that has it as {0}, {1}, … · replaced
ROWS = [
    # names
    ("hub.resolve('ann/deep')", r"Write ('user/repository/folder')", "hub.resolve({0})", ("user/repository/folder", "ann/deep/b")),
    # ids of AdapterHub
    ("old('a/b/c@ukp')", r"Write ('task/dataset@organization')", "old({0})", ("task/dataset@organization", "sentiment/sst-2@ukp")),
    ("old('sst-2@ukp', None)", r"or (model_name='bert-base-uncased')", "old('sst-2@ukp', {0})"),
    ("old('sst-2@ukp', 'gpt2')", r"or (model_name='bert-base-uncased')", "old('sst-2@ukp', {0})"),
    ("old('sst-2@ukp', 'gpt2')", r"Write the repository ('AdapterHub/…')", "hub.resolve({0})", ("…", "sst-2_usual")),
    ("old('imdb@ukp')", r"Write one of ('sentiment/imdb')", "old({0})"),
    ("old('sentiment/sst-2@other')", r"or (config='seq_bn')", "old('sentiment/sst-2@other', {0})"),
]  # fmt: skip
OLD = """
from adapterzoo.hub import old_ids
def old(old_id, model_name='bert', config=None):
    return old_ids.repository_of(old_id, model_name, config)
"""


@pytest.fixture
def full(hub, client, tmp_path):
    """The client, and a Hub that has what the code in the table loads."""
    client.run(f"if 'source' not in dir():\n    exec({START!r})", tests=TESTS)
    client.run(OLD)
    client.run("old_ids.INDEX = url", url=f"{hub.url}/index/{{}}.json")
    client.run(
        "model = tiny(); source.save_adapter(folder + '/a', 'a')\n"
        "source.base_model.save_pretrained(folder + '/base')",
        folder=str(tmp_path / "saved"),
    )
    adapter, base = (
        {path.name: path.read_bytes() for path in (tmp_path / "saved" / name).iterdir()}
        for name in ("a", "base")
    )
    for name, more in (
        ("ann/a", {}), ("AdapterHub/sst-2_usual", {}),
    ):  # fmt: skip
        hub.repo(name, adapter, **more)
    hub.repo("ann/deep", {f"b/{name}": content for name, content in adapter.items()})
    hub.repo("ann/base", base)
    for model in ("bert", "bert-base-uncased"):
        hub.indexes[model] = json.dumps(INDEX).encode()
    return client


@pytest.mark.parametrize("row", ROWS, ids=[f"{row[0][:50]} {row[1][-30:]}" for row in ROWS])
def test_the_advice_of_a_hub_error_works(row, full):
    fails, pattern, works, *replaced = row
    with pytest.raises(ClientError) as caught:
        full.run(fails)
    assert caught.value.kind == "HubError"
    found = re.search(pattern, str(caught.value))
    assert found is not None, str(caught.value)
    advice = list(found.groups())
    for old, new in replaced:
        advice = [part.replace(old, new) for part in advice]
    full.run(works.format(*advice))
