"""`push`, `list` and what reads from the Hub, against the Hub of tests/hub on loopback."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, load_file

CALL = """
from click.testing import CliRunner
from adapterzoo.cli import main
result = CliRunner().invoke(main, arguments, catch_exceptions=False)
answer = [result.exit_code, result.stdout, result.stderr]
"""


@pytest.fixture
def over_there(hub_client: tuple[Any, Any], tmp_path: Path) -> Callable[..., list[str]]:
    """Runs the command line in the process that reaches the Hub, with an empty cache."""
    hub, client = hub_client
    hub.repos.clear()
    hub.faults = []
    client.run(
        # what packages print when they are imported is not what a command prints
        "import transformers.modeling_utils; from huggingface_hub import constants; "
        "constants.HF_HUB_CACHE = cache",
        cache=str(tmp_path / "cache"),
    )

    def call(*arguments: object, code: int = 0) -> list[str]:
        found, out, err = client.run(CALL, arguments=[str(a) for a in arguments])
        assert found == code, f"{out}\n{err}"
        return [out, err]

    return call


def test_push_then_info_list_and_predict(over_there, run, hub_client, trained, base):
    hub, _ = hub_client
    options = ["--metric", "accuracy=0.91", "--license", "mit", "--language", "en"]
    options += ["--dataset", "ann/reviews", "--message", "Mine", "--base-model", "ann/tiny"]
    out, err = over_there("push", trained["folder"], "ann/films", *options)
    repo = hub.repos["ann/films"]
    assert out == f"{hub.url}/ann/films/commit/{repo.branches['main']}\n"
    assert err == ""
    assert repo.messages[-1] == "Mine"
    card = repo.files()["README.md"].decode()
    for said in ("license: mit", "- ann/reviews", "0.91", "base_model: ann/tiny", "language: en"):
        assert said in card
    name = "adapter.safetensors"
    pushed, kept = load(repo.files()[name]), load_file(trained["folder"] / name)
    assert pushed.keys() == kept.keys()
    assert all(torch.equal(tensor, kept[key]) for key, tensor in pushed.items())
    # a path of here would help nobody there
    assert str(base).encode() not in b"".join(repo.files().values())
    assert json.loads(repo.files()["adapter_config.json"])["model_name"] == "ann/tiny"
    # and what a reader sees
    found = json.loads(over_there("info", "ann/films", "--json")[0])
    assert found["fingerprint"] == trained["fingerprint"]
    over_there("verify", "ann/films", "--model", base)
    listed = json.loads(over_there("list", "--model", "ann/tiny", "--json")[0])
    assert [info["adapter_id"] for info in listed] == ["ann/films"]
    table = over_there("list", "--task", "text-classification", "--limit", 5)[0].splitlines()
    assert [line.split()[0] for line in table] == ["adapter", "ann/films"]
    assert over_there("list", "--author", "nobody")[0] == "No adapter found.\n"
    local = run("predict", trained["folder"], "--text", "a fine plot").stdout
    options = ["--text", "a fine plot", "--model", base]
    assert over_there("predict", "ann/films", *options)[0] == local


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["info", "ann/none"], "ann/none"),
        (["push", "{folder}", "bob/his"], "bob/his"),
        (["push", ".", "ann/a"], "holds no adapter"),
        (["push", "{folder}", "a//b"], "is not a name of the Hub"),
        (["list", "--library", "torch"], "no library 'torch'"),
    ],
)
def test_refusals(over_there, hub_client, trained, arguments, message):
    hub, _ = hub_client
    given = [a.replace("{folder}", str(trained["folder"])) for a in arguments]
    out, err = over_there(*given, code=1)
    assert err.startswith("adapterzoo: ")
    assert message in err
    assert out == ""
    assert "Traceback" not in err
    assert not hub.repos


@pytest.mark.parametrize("metric", ["good", "a="])
def test_a_metric_is_a_name_and_a_number(run, tmp_path, metric):
    said = run("push", tmp_path, "ann/a", "--metric", metric, code=2).stderr
    assert f"--metric {metric!r} is not NAME=NUMBER" in said


def test_an_adapter_without_a_name_gets_that_of_its_repository(over_there, tmp_path):
    """PEFT's files know no name, and the folder in the cache has that of a commit."""
    peft = Path(__file__).parents[1] / "data" / "golden_peft/bert"
    over_there("push", peft / "lora", "ann/films", "--base-model", "ann/tiny")
    options = ["--to", "native", "--model", peft / "base"]
    for more, name in (([], "films"), (["--name", "mine"], "mine")):
        over_there("convert", "ann/films", tmp_path / name, *options, *more)
        document = json.loads((tmp_path / name / "adapter_config.json").read_text())
        assert document["name"] == name


def test_a_private_branch_is_pushed_to_and_read(over_there, hub_client, trained, base):
    hub, _ = hub_client
    options = ["--revision", "v2", "--private", "--json"]
    found = json.loads(over_there("push", trained["folder"], "ann/two", *options)[0])
    assert (found["repo"], found["url"].startswith(f"{hub.url}/ann/two/")) == ("ann/two", True)
    assert hub.repos["ann/two"].private
    assert "adapter.safetensors" not in hub.repos["ann/two"].files("main")
    over_there("info", "ann/two", code=1)
    for command in (["info"], ["verify"], ["predict", "--text", "fine", "--model", base]):
        name, *options = command
        over_there(name, "ann/two", "--revision", "v2", *options)
