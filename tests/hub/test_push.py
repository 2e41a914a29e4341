"""`push_adapter_to_hub` through the real client, and the card's own code run against the result."""

from __future__ import annotations

import json
import re

import pytest
import yaml
from driver import ClientError
from families import tiny_config
from safetensors.torch import save_file
from server import OWNER, READER, Fault
from test_faults import START, TESTS

from adapterzoo import AutoAdapterModel, Stack
from adapterzoo import hub as package
from adapterzoo.errors import CheckpointError, ConfigError

BASE = "ann/tiny-bert"
PUSH = "answer = source.push_adapter_to_hub(repo_id, 'a', **more)"


@pytest.fixture
def model(hub, client, tmp_path):
    """The client with the model `source`, its adapter `a`, and its base model on the Hub."""
    client.run(f"if 'source' not in dir():\n    exec({START!r})", tests=TESTS)
    client.run(
        "tiny().base_model.save_pretrained(folder); source.config._name_or_path = base",
        folder=str(tmp_path / "base"),
        base=BASE,
    )
    hub.repo(BASE, {path.name: path.read_bytes() for path in (tmp_path / "base").iterdir()})
    return client


def push(model, repo_id="ann/a", **more):
    return str(model.run(PUSH, repo_id=repo_id, more=more))


def card_of(hub, repo_id="ann/a", revision="main"):
    text = hub.repos[repo_id].files(revision)["README.md"].decode()
    _, data, body = text.split("---\n", 2)
    return yaml.safe_load(data), body


def code_of(body):
    return str(re.search(r"```python\n(.*?)```", body, re.DOTALL)[1])


def test_the_repository_gets_everything_in_one_commit(hub, model):
    url = push(model, commit_message="My adapter")
    repo = hub.repos["ann/a"]
    assert not repo.private
    assert set(repo.files()) == {
        ".gitattributes", "README.md", "adapter.safetensors", "adapter_config.json",
    }  # fmt: skip
    assert repo.messages == ["", "My adapter"]
    assert url == f"{hub.url}/ann/a/commit/{repo.branches['main']}"
    posts = [path for method, path, _ in hub.requests if method == "POST"]
    assert sum("/commit/" in path for path in posts) == 1


@pytest.mark.parametrize("head", [True, False])
def test_the_card_is_true(hub, model, head):
    push(
        model,
        datasets_tag="ann/reviews",
        metrics={"accuracy": 0.912345678, "f1|macro": 1},
        adapter_card_kwargs={"license": "mit", "language": "en", "tags": ["films"],
                             "citation": "@us", "architecture_training": "One epoch.",
                             "results": "On the test set.", "metrics": ["mcc"]},
        with_head=head,
    )  # fmt: skip
    data, body = card_of(hub)
    assert data == {
        "base_model": BASE,
        "base_model_relation": "adapter",
        "datasets": ["ann/reviews"],
        "language": "en",
        "library_name": "adapterzoo",
        "license": "mit",
        "metrics": ["accuracy", "f1|macro", "mcc"],
        "tags": ["adapterzoo", "adapter", "lora", "bert", "films"],
        **({"pipeline_tag": "text-classification"} if head else {}),
    }
    for line in ("| accuracy | 0.912346 |", "| f1\\|macro | 1 |", "One epoch.", "@us",
                 "On the test set."):  # fmt: skip
        assert line in body.splitlines()
    assert ("with a prediction head for classification" in body) == head
    config = json.loads(re.search(r"```json\n(.*?)```", body, re.DOTALL)[1])
    assert config == json.loads(hub.repos["ann/a"].files()["adapter_config.json"])["config"]
    # three lines that load it, run as they stand there, by the names that they use
    code = code_of(body)
    assert len(code.splitlines()) == 3
    same = model.run(
        "space = {}\nexec(lines, space)\nloaded = space['model']\n"
        "from snapshots import output\n"
        "source.set_active_adapters('a'); source.active_head = 'a' if head else None\n"
        # a product with one row rounds by where in memory it lies
        "near = {'rtol': 0, 'atol': 1e-5}\n"
        "answer = [torch.allclose(output(loaded), output(source), **near),"
        " adapter_bits(loaded, 'a') == adapter_bits(source, 'a'), list(loaded.heads)]\n"
        "source.set_active_adapters(None); source.active_head = None",
        lines=code,
        head=head,
    )
    assert same == [True, True, ["a"] * head]


def test_the_card_of_a_static_head_is_true(hub, model, tmp_path):
    model.run(
        "import adapterzoo, transformers\n"
        "torch.manual_seed(3)\n"
        "static = transformers.BertForSequenceClassification(tiny_config('bert')).eval()\n"
        "static.save_pretrained(folder); static.config._name_or_path = 'ann/static'\n"
        "adapterzoo.init(static).add_adapter('a', 'lora'); stir(static, 'a')\n",
        folder=str(tmp_path / "static"),
    )
    saved = {path.name: path.read_bytes() for path in (tmp_path / "static").iterdir()}
    hub.repo("ann/static", saved)
    model.run("static.push_adapter_to_hub('ann/b', 'a')")
    assert model.run(
        "space = {}\nexec(lines, space)\n"
        "static.set_active_adapters('a')\n"
        "near = {'rtol': 0, 'atol': 1e-5}\n"
        "answer = torch.allclose(output(space['model']), output(static), **near)",
        lines=code_of(card_of(hub, "ann/b")[1]),
    )


@pytest.mark.parametrize(
    ("format", "key", "head"),
    [("native", "model_name", True), ("adapterhub", "model_name", True),
     ("peft", "base_model_name_or_path", False)],
)  # fmt: skip
def test_a_base_model_that_lies_here_only_is_not_named(hub, model, tmp_path, format, key, head):
    path = str(tmp_path / "base")
    model.run("source.config._name_or_path = folder", folder=path)
    more = {"format": format, "with_head": head, "local_path": str(tmp_path / "mine")}
    push(model, **more)
    data, body = card_of(hub)
    assert "base_model" not in data
    assert "from_pretrained(base_model)" in body
    sent = hub.repos["ann/a"].files()
    assert not [name for name, content in sent.items() if str(tmp_path).encode() in content]
    assert json.loads(sent["adapter_config.json"])[key] is None
    assert json.loads((tmp_path / "mine" / "adapter_config.json").read_text())[key] == path
    push(model, base_model=BASE, overwrite_adapter_card=True, **more)
    assert card_of(hub)[0]["base_model"] == BASE
    sent = hub.repos["ann/a"].files()
    configs = {name: json.loads(sent[name]) for name in sent if name.endswith("_config.json")}
    assert {document[key] for document in configs.values()} == {BASE}
    assert ("head_config.json" in configs) == (head and format == "adapterhub")
    # what was written anew is whole
    model.run("tiny().load_adapter('ann/a', with_head=head)", head=head)


def test_an_adapter_that_is_damaged_is_not_made_whole_by_another_name(hub, model, tmp_path):
    model.run("source.save_adapter(folder, 'a')", folder=str(tmp_path / "mine"))
    file = tmp_path / "mine" / "adapter.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="not what was written"):
        package.push(tmp_path / "mine", "ann/a", text=package.CardText(base_model="ann/other"))
    assert "ann/a" not in hub.repos


def test_a_card_that_is_there_stays(hub, model):
    hub.repo("ann/a", {"README.md": b"by hand"})
    push(model)
    assert hub.repos["ann/a"].files()["README.md"] == b"by hand"
    push(model, overwrite_adapter_card=True)
    assert card_of(hub)[0]["library_name"] == "adapterzoo"


def test_a_card_in_the_folder_is_sent(hub, model, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "README.md").write_text("---\nlicense: mit\n---\nmine")
    (tmp_path / "mine" / "token.txt").write_text(OWNER)
    push(model, local_path=str(tmp_path / "mine"))
    assert card_of(hub) == ({"license": "mit"}, "mine")
    # what is not an adapter's stays here
    assert "token.txt" not in hub.repos["ann/a"].files()
    assert (tmp_path / "mine" / "adapter.safetensors").is_file()


def test_files_of_an_older_adapter_go(hub, model):
    old = {"pytorch_adapter.bin": b"o", "model_head.safetensors": b"o", "head_config.json": b"{}"}
    hub.repo("ann/a", {**old, "data.csv": b"1", "adapter_config.json": b"{}"})
    push(model)
    assert set(hub.repos["ann/a"].files()) == {
        "README.md", "adapter.safetensors", "adapter_config.json", "data.csv",
    }  # fmt: skip


def test_private_branch_and_pull_request(hub, model):
    push(model, private=True)
    repo = hub.repos["ann/a"]
    assert repo.private
    push(model, revision="dev", metrics={"f1": 0.5}, overwrite_adapter_card=True)
    assert 'revision="dev"' in code_of(card_of(hub, revision="dev")[1])
    assert "0.5" not in card_of(hub)[1]
    main = repo.branches["main"]
    model.run("stir(source, 'a', seed=9)")
    url = push(model, create_pr=True, commit_description="why")
    model.run("stir(source, 'a')")
    assert url == f"{hub.url}/ann/a/discussions/1"
    assert repo.branches["main"] == main
    proposed = repo.files("refs/pr/1")["adapter.safetensors"]
    assert proposed != repo.files()["adapter.safetensors"]


def test_a_name_without_a_user_is_the_tokens(hub, model):
    push(model, "mine")
    assert 'load_adapter("ann/mine"' in code_of(card_of(hub, "ann/mine")[1])


@pytest.mark.parametrize(
    ("repo_id", "more", "kind", "message"),
    [
        ("bob/a", {}, "HubError", "'bob/a': 403 Forbidden"),
        ("ann/a", {"token": READER}, "HubError", "'ann/a': 403 Forbidden"),
        ("ann/a", {"token": "hf_wrongWrongWrong"}, "HubError", "'ann/a': .*401"),
        ("a b", {}, "HubError", "Repo id must use .*'a b'"),
        ("ann/a", {"base_model": "/x/y"}, "ConfigError", "'/x/y' is not a name of the Hub"),
    ],
)  # fmt: skip
def test_what_cannot_be_pushed_says_so(hub, model, repo_id, more, kind, message):
    with pytest.raises(ClientError, match=message) as caught:
        push(model, repo_id, **more)
    assert caught.value.kind == kind
    assert str(caught.value).startswith(f"push_adapter_to_hub({repo_id!r}): ")
    with pytest.raises(ClientError, match=r"there is no adapter 'b'\. Known adapters: 'a'"):
        model.run("source.push_adapter_to_hub('ann/a', 'b')")
    assert list(hub.repos) == [BASE]


@pytest.mark.parametrize("kind", ["reset", "html"])
def test_a_commit_of_which_nobody_knows_is_not_made_again(hub, model, kind):
    with hub.broken(Fault("commit", kind)), pytest.raises(ClientError, match="'ann/a'"):
        push(model)
    assert len([path for _, path, _ in hub.requests if "/commit/" in path]) == 1


def test_a_save_during_the_upload_does_not_mix(hub, model, tmp_path):
    push(model)
    before = hub.repos["ann/a"].files()
    model.run("source.save_adapter(folder, 'a')", folder=str(tmp_path / "saved"))
    # the folder gets another adapter as soon as the Hub is asked
    model.run(
        """
from pathlib import Path
from huggingface_hub import HfApi
whole = HfApi.create_commit
def meanwhile(*args, **kwargs):
    for file in Path(folder).iterdir():
        file.write_bytes(b"other")
    return whole(*args, **kwargs)
HfApi.create_commit = meanwhile
try:
    answer = hub.push(folder, 'ann/b')
finally:
    HfApi.create_commit = whole
""",
        folder=str(tmp_path / "saved"),
    )
    found = hub.repos["ann/b"].files()
    for name in ("adapter.safetensors", "adapter_config.json"):
        assert found[name] == before[name]


@pytest.mark.parametrize("field", ["datasets", "metrics", "tags"])
def test_a_text_is_no_list_of_letters(tmp_path, field):
    with pytest.raises(ConfigError, match=rf"{field}='glue' is one text. Write {field}=\['glue'\]"):
        package.push(tmp_path, "ann/a", text=package.CardText(**{field: "glue"}))


@pytest.mark.parametrize("format", ["native", "adapterhub", "peft"])
def test_a_commit_belongs_to_the_name_of_the_base(hub, model, format):
    commit = "c" * 40
    model.run("source.config._commit_hash = commit", commit=commit)
    key = "revision" if format == "peft" else "base_revision"

    def config():
        return json.loads(hub.repos["ann/a"].files()["adapter_config.json"])

    push(model, format=format, with_head=False, overwrite_adapter_card=True)
    assert config()[key] == commit
    assert f"revision `{commit}`, digest `v1-" in card_of(hub)[1]
    push(model, format=format, with_head=False, overwrite_adapter_card=True, base_model="ann/other")
    assert config().get(key) is None
    assert commit not in card_of(hub)[1]
    assert "trained on: digest `v1-" in card_of(hub)[1]


def test_a_name_with_a_fingerprint_loads_only_that_adapter(model):
    push(model)
    load = """
import warnings
from adapterzoo import BaseModelWarning
try:
    with warnings.catch_warnings():
        # the two models have weights of their own
        warnings.simplefilter("ignore", BaseModelWarning)
        name = f"ann/a@{mark or source.adapter_fingerprint('a')[:16]}"
        model.load_adapter(name, load_as="pinned")
    answer = model.adapter_fingerprint("pinned") == source.adapter_fingerprint("a")
except ValueError as error:
    answer = [str(error), list(model.adapters_config)]
"""
    said, there = model.run(load, mark="0" * 8)
    assert "has the fingerprint" in said
    assert there == []
    assert model.run(load, mark=None) is True


@pytest.mark.parametrize(("content", "wrong"), [(b"{", "not JSON"), (b"[1]", "not an object")])
def test_no_damaged_config_is_sent(tmp_path, content, wrong):
    save_file({}, tmp_path / "adapter.safetensors")
    (tmp_path / "adapter_config.json").write_bytes(b"{}")
    (tmp_path / "adapter_fusion_config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"adapter_fusion_config\.json' .*{wrong}"):
        package.push(tmp_path, "ann/a")


def test_a_commit_that_fails_leaves_the_repository(hub, model):
    push(model)
    before = hub.repos["ann/a"].branches["main"]
    model.run("stir(source, 'a', seed=9)")
    fault = Fault("commit", "status", status=403)
    with hub.broken(fault), pytest.raises(ClientError, match="'ann/a': 403"):
        push(model)
    model.run("stir(source, 'a')")
    assert hub.repos["ann/a"].branches["main"] == before


def test_what_is_no_adapters_folder_is_refused_before_anyone_is_asked(tmp_path):
    with pytest.raises(CheckpointError, match=r"holds no adapter.*its files: none"):
        package.push(tmp_path, "ann/a")
    with pytest.raises(CheckpointError, match=r"there is no folder '.*nowhere'. Write the folder"):
        package.push(tmp_path / "nowhere", "ann/a")
    # in parts: no format has that, and who loads it would get some of it
    parts = tmp_path / "parts"
    parts.mkdir()
    for name in ("adapter_model-00001-of-00002", "adapter_model-00002-of-00002", "adapter-1-of-2"):
        (parts / f"{name}.safetensors").write_bytes(b"")
    (parts / "adapter_model.safetensors.index.json").write_text("{}")
    (parts / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"no adapter in one file.*00001-of-00002.*Write the"):
        package.push(parts, "ann/a")
    (tmp_path / "adapter.safetensors").write_bytes(b"")
    for content, wrong in [(None, "cannot be read"), (b"[1]", "not an object"), (b"{", "not JSON")]:
        if content is not None:
            (tmp_path / "adapter_config.json").write_bytes(content)
        with pytest.raises(CheckpointError, match=wrong):
            package.push(tmp_path, "ann/a")
    (tmp_path / "adapter_config.json").write_bytes(b"{}")
    with pytest.raises(ConfigError, match="is not a name of the Hub"):
        package.push(tmp_path, "a", text=package.CardText(base_model="../x"))


def test_a_setup_that_lacks_a_part_is_refused_before_anyone_is_asked(tmp_path):
    model = AutoAdapterModel.from_config(tiny_config("bert"))
    for name in "ab":
        model.add_adapter(name, "seq_bn")
    model.save_adapter_setup(tmp_path, Stack("a", "b"))
    for file in (tmp_path / "b").iterdir():
        file.unlink()
    with pytest.raises(CheckpointError, match=r"b' holds no adapter.*Save the setup again\."):
        package.push(tmp_path, "ann/a")
    (tmp_path / "b").rmdir()
    said = r"lacks the folder 'b', which its setup names\. Save the setup again\."
    with pytest.raises(CheckpointError, match=said):
        package.push(tmp_path, "ann/a")


@pytest.mark.parametrize("format", ["native", "adapterhub", "peft"])
def test_every_format_comes_back(hub, model, format):
    push(model, format=format, with_head=False)
    names = set(hub.repos["ann/a"].files()) - {".gitattributes", "README.md"}
    assert len(names) == 2
    code = code_of(card_of(hub)[1])
    name = model.run(
        "space = {}\nexec(lines, space)\nloaded = space['model']\n"
        "from snapshots import output\n"
        "source.set_active_adapters('a'); source.active_head = None\n"
        "[answer] = loaded.adapters_config\n"
        "torch.testing.assert_close(output(loaded), output(source), atol=1e-5, rtol=0)\n"
        "source.set_active_adapters(None)",
        lines=code,
    )
    assert name == "a"
    # one format takes the place of another
    push(model, format="native", with_head=False)
    assert set(hub.repos["ann/a"].files()) - {".gitattributes", "README.md"} == {
        "adapter.safetensors", "adapter_config.json",
    }  # fmt: skip
