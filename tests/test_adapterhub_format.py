"""Checkpoints of AdapterHub's `adapters` 1.3.0 load by `load_adapter`, and are written back.

A small part of the golden ones lies in `data/golden_adapterhub`; the others are beside the
repository, and are left out where they are not there.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from snapshots import adapter_bits, output, refused, stir
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import adapterzoo
from adapterzoo import AutoAdapterModel, Stack
from adapterzoo.errors import (
    CheckpointError,
    ConfigError,
    DuplicateNameError,
    HubError,
    UnknownNameError,
)

HERE = Path(__file__).resolve().parent / "data" / "golden_adapterhub"
SHARED = Path(__file__).resolve().parents[2] / "shared" / "golden" / "adapterhub"
# the peer itself fails on DoRA in fused layers
GOLDEN = [
    pytest.param(place / family / method, id=f"{place.name}-{family}-{method}")
    for place in (HERE, SHARED)
    for family in ("bert", "roberta", "gpt2", "llama", "t5", "vit")
    for method in ("seq_bn", "double_seq_bn", "par_bn", "lora", "dora")
    if (place / family / method).is_dir()
]
TENSORS = ("pytorch_adapter.bin", "pytorch_model_head.bin")
CONFIGS = ("adapter_config.json", "head_config.json")


def base_of(folder):
    return AutoAdapterModel.from_pretrained(folder.parent / "base").eval()


def pickled(file):
    return torch.load(file, weights_only=True)


def check(model, folder):
    """Hidden state and logits are the golden ones, and not those of the base model."""
    expected = load_file(folder / "expected.safetensors")
    outputs = {key: expected.pop(key).double() for key in ("hidden", "hidden_base", "logits")}
    # in float64: how far the peer's float32 is from it is the same on every processor
    model.double()
    inputs = {k: t.double() if t.is_floating_point() else t for k, t in expected.items()}
    with torch.no_grad():
        found = {"hidden": model.base_model(**inputs)[0], "logits": model(**inputs).logits}
        model.set_active_adapters(None)
        found["hidden_base"] = model.base_model(**inputs)[0]
    torch.testing.assert_close(found, outputs, rtol=0, atol=1e-5)
    assert (outputs["hidden"] - outputs["hidden_base"]).abs().max() > 0.01


def check_same_files(written, golden):
    """All tensors, keys and configs are those of the golden folder, and there is nothing else."""
    names = {path.name for path in golden.iterdir()} - {"expected.safetensors"}
    assert {path.name for path in written.iterdir()} == names
    for name in names & set(TENSORS):
        theirs, ours = pickled(golden / name), pickled(written / name)
        assert theirs.keys() == ours.keys()
        for key, tensor in theirs.items():
            assert ours[key].dtype == tensor.dtype
            assert torch.equal(ours[key], tensor), key
    for name in names & set(CONFIGS):
        theirs, ours = (json.loads((f / name).read_text()) for f in (golden, written))
        # where the base model lay
        del theirs["model_name"], ours["model_name"]
        # which adapters ignores
        assert ("base_digest" in ours) == (name == "adapter_config.json")
        ours.pop("base_digest", None)
        assert json.dumps(ours, sort_keys=True) == json.dumps(theirs, sort_keys=True)


@pytest.mark.parametrize("folder", GOLDEN)
def test_golden_checkpoints_give_their_outputs_and_are_written_back(folder, tmp_path):
    model = base_of(folder)
    assert model.load_adapter(folder, set_active=True) == "golden"
    assert model.active_adapters == Stack("golden")
    assert model.active_head == "golden"
    model.save_adapter(tmp_path / "x", "golden", format="adapterhub")
    check_same_files(tmp_path / "x", folder)
    check(model, folder)


# --- the arguments of load_adapter ---

BERT = HERE / "bert" / "double_seq_bn"
LORA = HERE / "bert" / "lora"


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(BERT, tmp_path / "golden")
    return tmp_path / "golden"


@pytest.fixture
def model():
    return base_of(BERT)


def test_the_arguments_of_load_adapter(model):
    assert model.load_adapter(BERT, load_as="mine") == "mine"
    assert model.known_heads() == ("mine",)
    assert model.active_adapters is None
    assert model.get_labels("mine") == ["neg", "neu", "pos"]
    with refused(model, DuplicateNameError, "'mine'", "overwrite_ok=True"):
        model.load_adapter(BERT, load_as="mine", overwrite_ok=False)
    named = {0: "a", 1: "b", 2: "c"}
    model.load_adapter(BERT, load_as="mine", id2label=named, overwrite_ok=True, leave_out=[0])
    assert model.get_labels_dict("mine") == named
    assert sorted(model.get_adapter("mine")) == [1]
    model.load_adapter(LORA, with_head=False)
    assert model.known_heads() == ("mine",)
    model.to(torch.bfloat16)
    with refused(model, CheckpointError, "torch.float32", "pass dtype=torch.bfloat16"):
        model.load_adapter(BERT, load_as="other")
    model.load_adapter(BERT, load_as="other", dtype=torch.bfloat16)


def test_where_a_checkpoint_comes_from(model, monkeypatch):
    monkeypatch.setattr("socket.socket.connect", None)
    model.load_adapter(str(BERT), load_as="local", version="main", revision="main")
    with refused(model, ConfigError, "version='a'", "revision='b'", "Write only revision='b'"):
        model.load_adapter(BERT, load_as="other", version="a", revision="b")
    with refused(model, ConfigError, "source='a'", "'hf' (the Hub)"):
        model.load_adapter(BERT, load_as="other", source="a")
    with refused(model, HubError, "not an id of AdapterHub", "task/dataset@organization"):
        model.load_adapter(BERT, load_as="other", source="ah")
    with pytest.raises(TypeError, match="use_safetensor"):
        model.load_adapter(BERT, load_as="other", use_safetensor=True)


def test_a_head_alone(model, tmp_path):
    assert model.load_head(BERT) == "golden"
    assert model.active_head == "golden"
    model.save_head(tmp_path / "h", "golden", format="adapterhub")
    assert {p.name for p in (tmp_path / "h").iterdir()} == {TENSORS[1], CONFIGS[1]}
    other = base_of(BERT)
    assert other.load_head(tmp_path / "h", load_as="mine") == "mine"
    theirs, ours = other.heads["mine"].state_dict(), model.heads["golden"].state_dict()
    assert all(torch.equal(tensor, ours[key]) for key, tensor in theirs.items())


def test_the_head_of_an_adapter_keeps_its_own_name(model, tmp_path):
    """As `ner/conll2003@ukp` has it: the adapter "ner", and the head "ner_head"."""
    model.load_head(BERT, load_as="ner_head")
    model.save_head(tmp_path / "h", "ner_head", format="adapterhub")
    shutil.copytree(BERT, tmp_path / "x")
    shutil.copytree(tmp_path / "h", tmp_path / "x", dirs_exist_ok=True)
    other = base_of(BERT)
    assert other.load_adapter(tmp_path / "x") == "golden"
    assert [name for name in other.heads if name != "default"] == ["ner_head"]
    other.delete_adapter("golden")
    with pytest.warns(UserWarning, match="the head 'ner_head' of the model has been replaced"):
        other.load_adapter(tmp_path / "x")
    other.load_adapter(tmp_path / "x", load_as="mine")
    assert "mine" in other.heads


def test_the_static_head_of_a_task_class(tmp_path):
    def static_model():
        base = BERT.parent / "base"
        return AutoModelForSequenceClassification.from_pretrained(base, num_labels=3).eval()

    torch.manual_seed(3)
    task = adapterzoo.init(static_model())
    task.load_adapter(LORA, with_head=False, set_active=True)
    task.save_adapter(tmp_path / "x", "golden", format="adapterhub")
    document = json.loads((tmp_path / "x" / "head_config.json").read_text())
    assert document["config"] is None
    assert document["model_class"] == "BertForSequenceClassification"
    assert document["num_labels"] == 3
    assert sorted(pickled(tmp_path / "x" / TENSORS[1])) == ["classifier.bias", "classifier.weight"]
    reason = r"(?s)'other' has been loaded without its head.*layers: 2 here, 1 there"
    with pytest.warns(UserWarning, match=reason):
        task.load_adapter(LORA, load_as="other")
    task.delete_adapter("other")
    expected = load_file(LORA / "expected.safetensors")
    inputs = {key: expected[key] for key in ("input_ids", "attention_mask")}
    with torch.no_grad():
        logits = task.double()(**inputs).logits
        # into the same class, and as a named head
        again, named = adapterzoo.init(static_model()), base_of(LORA)
        for model in (again, named):
            # the pooler is the base model's, which the checkpoint does not have
            model.base_model.pooler.load_state_dict(task.base_model.pooler.state_dict())
            model.load_adapter(tmp_path / "x", set_active=True)
            torch.testing.assert_close(model.double()(**inputs).logits, logits, rtol=0, atol=1e-12)
        assert named.get_labels("golden") == ["LABEL_0", "LABEL_1", "LABEL_2"]


def test_an_output_layer_that_is_not_the_embedding(tmp_path):
    golden = HERE / "gpt2" / "lora"
    shutil.copytree(golden, tmp_path / "x")
    tensors = pickled(golden / TENSORS[1])
    tensors["heads.golden.3.weight"] = tensors["heads.golden.3.weight"] + 1
    torch.save(tensors, tmp_path / "x" / TENSORS[1])
    model = base_of(golden)
    before = model.get_input_embeddings().weight.detach().clone()
    model.load_adapter(tmp_path / "x")
    weight = model.get_head("golden").output_embeddings.weight
    assert torch.equal(weight, tensors["heads.golden.3.weight"])
    assert torch.equal(model.get_input_embeddings().weight, before)


def test_heads_whose_names_begin_alike(folder, model, tmp_path):
    model.load_head(BERT, load_as="task")
    model.add_tagging_head("task2")
    model.save_head(tmp_path / "h", "task", format="adapterhub")
    assert all(key.startswith("heads.task.") for key in pickled(tmp_path / "h" / TENSORS[1]))
    # as the peer writes a head "golden" beside a head "golden2"
    rewrite(folder, lambda t: t.update({"heads.golden2.1.weight": torch.ones(2)}), TENSORS[1])
    assert model.load_head(folder) == "golden"
    rewrite(folder, lambda t: t.update({"heads.other.1.weight": torch.ones(2)}), TENSORS[1])
    with refused(model, CheckpointError, "heads.other.1.weight   in the file only", "nothing has"):
        model.load_head(folder, load_as="again")


def test_a_language_model_is_saved_without_its_output_layer(tmp_path):
    golden = HERE / "gpt2" / "lora"
    model = AutoModelForCausalLM.from_pretrained(golden.parent / "base")
    model = adapterzoo.init(model.eval())
    model.load_adapter(golden, with_head=False)
    model.save_adapter(tmp_path / "x", "golden", format="adapterhub")
    assert {p.name for p in (tmp_path / "x").iterdir()} == {*TENSORS[:2], *CONFIGS[:2]}
    # which is the embedding: only its class is to be said
    assert pickled(tmp_path / "x" / TENSORS[1]) == {}
    assert json.loads((tmp_path / "x" / CONFIGS[1]).read_text())["model_class"] == "GPT2LMHeadModel"
    # the peer saves the layer with every adapter: it is compared, and left where it is
    shutil.copy(golden / CONFIGS[1], tmp_path / "x")
    document = json.loads((golden / CONFIGS[1]).read_text())
    document.update(config=None, model_class="GPT2LMHeadModel", name=None)
    (tmp_path / "x" / CONFIGS[1]).write_text(json.dumps(document))
    weight = model.lm_head.weight.detach().clone()
    torch.save({"lm_head.weight": weight}, tmp_path / "x" / TENSORS[1])
    model.load_adapter(tmp_path / "x", load_as="again")
    torch.save({"lm_head.weight": weight + 1}, tmp_path / "x" / TENSORS[1])
    with refused(model, CheckpointError, "'lm_head.weight'", "with_head=False"):
        model.load_adapter(tmp_path / "x", load_as="other")
    assert torch.equal(model.lm_head.weight, weight)


def test_safetensors_are_read_too(folder, model):
    for name, safe in zip(TENSORS, ("adapter.safetensors", "model_head.safetensors"), strict=True):
        save_file(pickled(folder / name), folder / safe)
        (folder / name).unlink()
    model.load_adapter(folder, set_active=True)
    check(model, BERT)


# --- checkpoints that do not fit ---


def rewrite(folder, change, name=TENSORS[0]):
    tensors = pickled(folder / name)
    change(tensors)
    torch.save(tensors, folder / name)


def test_every_difference_in_one_error(folder, model):
    def spoil(tensors):
        down, up = (k for k in tensors if "layer.0.output" in k and k.endswith("weight"))
        del tensors[down]
        tensors[up] = tensors[up][:-1]
        tensors["bert.encoder.layer.7.output.adapters.golden.adapter_up.bias"] = torch.ones(32)
        tensors["bert.encoder.layer.1.output.adapters.other.adapter_up.bias"] = torch.ones(32)

    rewrite(folder, spoil)
    with refused(
        model, CheckpointError, "4 differences from this BertAdapterModel", "nothing has been",
        "encoder.layer.0.output.dense/adapter_down.0.weight   in the model only",
        "encoder.layer.0.output.dense/adapter_up.weight   file [31, 8]   model [32, 8]",
        "bert.encoder.layer.7.output.adapters.golden.adapter_up.bias   in the file only",
        "bert.encoder.layer.1.output.adapters.other.adapter_up.bias   in the file only",
    ):  # fmt: skip
        model.load_adapter(folder)


def test_a_head_that_does_not_fit_keeps_the_adapter_out(folder, model):
    rewrite(folder, lambda tensors: tensors.pop("heads.golden.4.bias"), TENSORS[1])
    with refused(model, CheckpointError, "4.bias   in the model only", "nothing has been loaded"):
        model.load_adapter(folder)
    model.load_adapter(folder, with_head=False)


# --- what cannot be written ---


def unsayable(model, *says, folder, name="a", **kwargs):
    with refused(model, CheckpointError, *says):
        model.save_adapter(folder, name, format="adapterhub", **kwargs)
    assert not folder.exists()


@pytest.mark.parametrize(
    ("config", "says"),
    [("boft", ("is not a method of adapters", "format='native'")),
     ("dora", ("convention='adapterhub'", "format='native'")),
     ("lora[rank_pattern={'query': 4}]", ("rank_pattern={'query': 4}", "format='native'")),
     ("lora[attn_matrices=['q', 'o']]", ("attn_matrices=['o']", "format='native'")),
     ("lora[target_modules='all-linear']", ("names only queries", "format='native'")),
     ("seq_bn|lora[lora_bias=True]", ("lora_bias=True", "format='native'"))],
)  # fmt: skip
def test_what_the_format_cannot_say_is_an_error_before_anything_is_written(
    model, tmp_path, config, says
):
    model.add_adapter("a", config)
    unsayable(model, *says, folder=tmp_path / "x")


def test_meta_that_is_called_as_a_field_of_the_format_is_refused(model, tmp_path):
    model.add_adapter("a", "seq_bn")
    meta = {"name": "b", "version": 2, "fine": 1}
    says = ("'name', 'version'", "Rename these", "format='native'")
    unsayable(model, *says, folder=tmp_path / "x", meta_dict=meta)


def test_heads_and_families_that_the_format_does_not_know(model, tiny, tmp_path):
    model.load_adapter(BERT, load_as="a", with_head=False)
    model.add_classification_head("a", num_labels=3, pooling="mean")
    unsayable(model, "pooling='mean'", "with_head=False", folder=tmp_path / "x")
    model.save_adapter(tmp_path / "x", "a", with_head=False, format="adapterhub")
    mixtral = tiny("mixtral")
    mixtral.add_adapter("a", "double_seq_bn")
    unsayable(mixtral, "'mixtral'", "format='native'", folder=tmp_path / "y")
    gpt2 = tiny("gpt2")
    gpt2.add_adapter("a", "dora[convention='adapterhub']")
    unsayable(gpt2, "DoRA in a fused layer", "format='native'", folder=tmp_path / "y")


FORMATS = ("native", "adapterhub", "peft")


@pytest.mark.parametrize("new", FORMATS)
@pytest.mark.parametrize("old", FORMATS)
def test_an_adapter_replaces_one_of_another_format(model, tmp_path, old, new):
    model.add_adapter("old", "lora[r=2]")
    model.add_adapter("new", "lora[r=3]")
    model.add_classification_head("old", num_labels=2)
    model.save_adapter(tmp_path / "x", "old", with_head=old == "adapterhub", format=old)
    model.save_adapter(tmp_path / "x", "new", with_head=False, format=new)
    model.save_adapter(tmp_path / "fresh", "new", with_head=False, format=new)
    found, fresh = (
        {p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("x", "fresh")
    )
    # nothing of the old one is left
    assert found == fresh
    model.load_adapter(tmp_path / "x", load_as="again")
    assert model.adapters_config["again"].r == 3


def test_folders_are_not_mixed(model, tmp_path):
    model.load_adapter(BERT)
    model.save_adapter(tmp_path / "x", "golden")
    # a save replaces an adapter of any format, with all its files
    model.save_adapter(tmp_path / "x", "golden", format="adapterhub")
    assert {p.name for p in (tmp_path / "x").iterdir()} == {*TENSORS, *CONFIGS}
    model.save_adapter(tmp_path / "x", "golden", use_safetensors=True)
    safe = {"adapter.safetensors", "model_head.safetensors"}
    assert {p.name for p in (tmp_path / "x").iterdir()} == {*safe, *CONFIGS}
    model.load_adapter(tmp_path / "x", load_as="safe")
    assert adapter_bits(model, "safe") == adapter_bits(model, "golden")
    model.save_adapter(tmp_path / "x", "golden", use_safetensors=False)
    assert {p.name for p in (tmp_path / "x").iterdir()} == {*TENSORS, *CONFIGS}
    model.save_adapter(tmp_path / "x", "golden")
    native = {"adapter.safetensors", "adapter_config.json"}
    assert {p.name for p in (tmp_path / "x").iterdir()} == native
    before = {p.name: p.read_bytes() for p in (tmp_path / "x").iterdir()}
    with refused(model, UnknownNameError, "'adapterhubb'", "Did you mean 'adapterhub'?"):
        model.save_adapter(tmp_path / "x", "golden", format="adapterhubb")
    assert {p.name: p.read_bytes() for p in (tmp_path / "x").iterdir()} == before
    # both formats have a config of this name
    model.save_head(tmp_path / "h", "golden")
    with refused(model, CheckpointError, "a head in the format 'native'", "Write another folder"):
        model.save_adapter(tmp_path / "h", "golden", format="adapterhub")
    model.save_adapter(tmp_path / "a", "golden", with_head=False, format="adapterhub")
    with refused(model, CheckpointError, "format 'adapterhub'", "another folder"):
        model.save_head(tmp_path / "a", "golden")
    model.load_head(tmp_path / "h", load_as="again")
    model.load_adapter(tmp_path / "a", load_as="again")
    # PEFT's files and those of a native head have other names
    model.add_adapter("l", "lora[r=2]")
    model.save_adapter(tmp_path / "p", "l", with_head=False, format="peft")
    model.save_head(tmp_path / "p", "golden")
    # without its head the folder has none
    model.save_adapter(tmp_path / "y", "golden", format="adapterhub")
    model.save_adapter(tmp_path / "y", "golden", with_head=False, format="adapterhub")
    assert {p.name for p in (tmp_path / "y").iterdir()} == {TENSORS[0], CONFIGS[0]}


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("lora[use_rslora=True,r=4,alpha=6]", {"alpha": 12.0, "r": 4}),
        ("lora[layers_to_transform=[1]]", {"leave_out": [0]}),
        ("lora[target_modules=['query','output.dense'],exclude_modules=['attention.output.dense']]",
         {"attn_matrices": ["q"], "output_lora": True, "intermediate_lora": False}),
    ],
)  # fmt: skip
def test_what_the_format_says_in_other_words(model, tmp_path, written, said):
    model.add_adapter("a", written)
    stir(model, "a")
    model.save_adapter(tmp_path, "a", format="adapterhub")
    config = json.loads((tmp_path / CONFIGS[0]).read_text())["config"]
    assert {key: config[key] for key in said} == said
    other = base_of(BERT)
    other.load_adapter(tmp_path, set_active=True)
    model.set_active_adapters("a")
    found, expected = output(other.double()), output(model.double())
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_the_feed_forward_layers_have_each_others_names_in_llama(tiny, tmp_path):
    model = tiny("llama")
    model.add_adapter("a", "lora[intermediate_lora=True,selfattn_lora=False]")
    stir(model, "a")
    model.save_adapter(tmp_path, "a", format="adapterhub")
    config = json.loads((tmp_path / CONFIGS[0]).read_text())["config"]
    assert (config["intermediate_lora"], config["output_lora"]) == (False, True)
    assert all(".mlp.up_proj.loras.a." in key for key in pickled(tmp_path / TENSORS[0]))
    other = tiny("llama")
    other.load_adapter(tmp_path)
    assert adapter_bits(other, "a") == adapter_bits(model, "a")
    assert other.adapters_config["a"] == model.adapters_config["a"]


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_ia3_of_the_paper_cannot_be_said_in_any_family(tiny, tmp_path, family):
    model = tiny(family)
    model.add_adapter("a", "ia3")
    with refused(model, CheckpointError, "adapters has no convention='paper'", "format='native'"):
        model.save_adapter(tmp_path, "a", format="adapterhub")


# --- methods whose files the peer wrote with padded batches ---

ZOO = [
    pytest.param(SHARED / family / method, id=f"{family}-{method}")
    for family in ("bert", "roberta", "gpt2", "llama", "t5", "vit")
    for method in ("vera", "vera_kv", "dvora", "dvora_kv", "noreft", "loreft", "loreft_prefix")
    if (SHARED / family / method).is_dir()
]
INPUTS = {"attention_mask", "decoder_input_ids", "input_ids", "pixel_values"}


# tests/methods says when there is this warning
@pytest.mark.filterwarnings("ignore:adapter_config.json fits")
@pytest.mark.parametrize("folder", ZOO)
def test_golden_checkpoints_of_the_zoo(folder, tmp_path):
    model = base_of(folder)
    name = model.load_adapter(folder, with_head=False, set_active=True)
    model.save_adapter(tmp_path / "written", name, with_head=False, format="adapterhub")
    theirs, ours = (pickled(f / TENSORS[0]) for f in (folder, tmp_path / "written"))
    assert theirs.keys() == ours.keys()
    said = [json.loads((f / CONFIGS[0]).read_text()) for f in (folder, tmp_path / "written")]
    assert said[0]["config"] == said[1]["config"]
    again = base_of(folder)
    again.load_adapter(tmp_path / "written", set_active=True)
    expected = load_file(folder / "expected.safetensors")
    inputs = {k: t for k, t in expected.items() if k in INPUTS}
    counts = expected.get("compare", torch.ones(expected["hidden"].shape[:2])).bool()
    for each in (model.double(), again.double()):
        hidden = {k: t.double() if t.is_floating_point() else t for k, t in inputs.items()}
        with torch.no_grad():
            found = each.base_model(**hidden)[0]
        torch.testing.assert_close(
            found[counts], expected["hidden"].double()[counts], rtol=0, atol=1e-5
        )
