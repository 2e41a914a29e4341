"""PEFT's format: its own checkpoints give its own outputs, and it loads ours and agrees."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from families import tiny_inputs
from peft_world import (
    CONFIG,
    QUIET,
    TENSORS,
    change,
    logits,
    named,
    ours,
    plain,
    reloaded,
    stand_in,
    trained,
)
from safetensors.torch import load_file, save_file
from snapshots import adapter_bits, refused, same_bits, stir

import adapterzoo
from adapterzoo import AutoAdapterModel, BOFTConfig, ConfigUnion, DoRAConfig, IA3Config, LoRAConfig
from adapterzoo.errors import CheckpointError, SiteError

pytestmark = [pytest.mark.filterwarnings(warning) for warning in QUIET]

_SHARED = Path(__file__).resolve().parents[2] / "shared" / "golden" / "peft"
GOLDEN = _SHARED if _SHARED.is_dir() else Path(__file__).parent / "data" / "golden_peft"
CASES = sorted(file.parent.relative_to(GOLDEN).as_posix() for file in GOLDEN.rglob(CONFIG))


def close(found, expected, atol=1e-10):
    """In float64, as `peft_world.logits`: both sides are computed here, in ways that differ."""
    torch.testing.assert_close(found, expected.double(), rtol=0, atol=atol)


def golden(case):
    """Folder, inputs and logits of a case."""
    folder = GOLDEN / case
    inputs = load_file(folder / "expected.safetensors")
    expected, _ = inputs.pop("logits"), inputs.pop("logits_base")
    return folder, inputs, expected


def check_golden(model, inputs, expected):
    """In float64: how far PEFT's float32 is from it is the same on every processor."""
    inputs = {k: t.double() if t.is_floating_point() else t for k, t in inputs.items()}
    with torch.no_grad():
        close(model.double()(**inputs).logits, expected, 1e-5)


def named_golden(folder):
    return AutoAdapterModel.from_pretrained(folder.parent / "base").eval()


@pytest.mark.parametrize("case", CASES)
def test_a_layer_that_the_file_lacks_is_noticed(case, tmp_path):
    folder, _, _ = golden(case)
    model, tensors = named_golden(folder), load_file(folder / TENSORS)
    # the first layer in a block
    key = next(key for key in sorted(tensors) if re.search(r"\.\d+\.", key))
    layer = re.sub(r"\.(lora|hada|lokr|oft|boft|ia3|vera|miss)_.*", ".", key)
    shutil.copytree(folder, tmp_path / "cut")
    left = {k: t for k, t in tensors.items() if not k.startswith(layer)}
    assert {*left} < {*tensors}
    save_file(left, tmp_path / "cut" / TENSORS)
    name = layer.removeprefix("base_model.model.").removesuffix(".")
    with pytest.raises(CheckpointError, match=rf"lacks 1 of the layers of target_.*{name}"):
        model.load_adapter(tmp_path / "cut")
    assert not model.adapters_config
    # unless the config does not ask for it
    change(tmp_path / "cut", exclude_modules=[name])
    model.load_adapter(tmp_path / "cut")


# --- PEFT's checkpoints here ---


@pytest.mark.parametrize("case", CASES)
def test_golden_checkpoints_come_back_with_the_same_bytes(case, tmp_path):
    folder, inputs, expected = golden(case)
    model = named_golden(folder)
    name = model.load_adapter(folder, set_active=True)
    assert name == folder.name
    with_head = "vit" in case or "bert" in case
    model.save_adapter(tmp_path / "peft", name, format="peft", with_head=with_head)
    theirs, mine = load_file(folder / TENSORS), load_file(tmp_path / "peft" / TENSORS)
    assert sorted(theirs) == sorted(mine)
    assert all(same_bits(theirs[key], mine[key]) for key in theirs)
    before, after = (json.loads((f / CONFIG).read_text()) for f in (folder, tmp_path / "peft"))
    for key in after:
        if key in ("base_model_name_or_path", "parent_library"):
            continue
        if key in ("modules_to_save", "target_modules"):
            before[key] = sorted(set(before[key] or ()) - {"score"}) or None
        assert after[key] == before.get(key), key
    # and by way of our own format
    model.save_adapter(tmp_path / "own", name)
    other = named_golden(folder)
    other.load_adapter(tmp_path / "own", set_active=True)
    check_golden(model, inputs, expected)
    check_golden(other, inputs, expected)


TARGETED = {
    "a list": {"target_modules": ["query", "value"]},
    "names that match nothing": {"target_modules": ["query", "q_proj", "nothing"]},
    "an expression": {"target_modules": r".*\.(query|intermediate\.dense)"},
    "all-linear": {"target_modules": "all-linear"},
    "but some": {"target_modules": ["query", "dense"], "exclude_modules": ["pooler.dense"]},
    "but an expression": {"target_modules": ["key"], "exclude_modules": r".*layer\.0\..*"},
    "layers by name": {"target_modules": ["key"], "layers_to_transform": [0],
                       "layers_pattern": "layer"},
    "patterns": {
        "target_modules": "all-linear",
        "rank_pattern": {"layer.0.attention.self.query": 2, "^bert.encoder.*key": 3},
        "alpha_pattern": {r"layer\.\d+\.attention\.self\.(key|value)": 3, "query": 0.5},
    },
    "rsLoRA": {"target_modules": ["key"], "use_rslora": True, "r": 3, "lora_alpha": 5},
    "a bias": {"target_modules": ["key"], "lora_bias": True},
    "embeddings and dropout": {"target_modules": ["word_embeddings", "key"], "lora_dropout": 0.2},
    "DoRA of embeddings": {"target_modules": ["word_embeddings", "key"], "use_dora": True},
    "gaussian": {"target_modules": ["key"], "init_lora_weights": "gaussian"},
}  # fmt: skip


@pytest.mark.parametrize("kind", TARGETED)
def test_whatever_peft_trains_by_lora_loads(kind, tmp_path):
    config = peft.LoraConfig(task_type="SEQ_CLS", **TARGETED[kind])
    expected = trained("bert", config, tmp_path / "theirs")
    if kind == "patterns":
        # PEFT ignores what matches nothing
        change(tmp_path / "theirs", rank_pattern=TARGETED[kind]["rank_pattern"] | {"nope": 7})
    model = ours("bert")
    name = model.load_adapter(tmp_path / "theirs", set_active=True)
    close(logits(model, "bert"), expected)
    # our config says it as exactly: a checkpoint of ours, and PEFT's again
    model.save_adapter(tmp_path / "own", name)
    other = ours("bert")
    other.load_adapter(tmp_path / "own", set_active=True)
    close(logits(other, "bert"), expected)
    if "embeddings" not in kind:
        model.save_adapter(tmp_path / "back", name, format="peft")
        close(reloaded("bert", tmp_path / "back"), expected)


def test_blocks_can_be_left_out_whatever_the_patterns_say(tmp_path):
    kind = {"target_modules": ["key"], "rank_pattern": {"layer.0.attention.self.key": 2}}
    trained("bert", peft.LoraConfig(**kind), tmp_path)
    model = ours("bert")
    model.load_adapter(tmp_path, load_as="a", leave_out=[0])
    ((path, module),) = model.adapter_modules("a")
    assert path == "encoder.layer.1.attention.self.key"
    key = f"base_model.model.bert.{path}.lora_A.weight"
    assert torch.equal(module.lora_A, load_file(tmp_path / TENSORS)[key])


def test_dropout_reaches_the_linear_layers_alone(tmp_path):
    config = peft.LoraConfig(task_type="SEQ_CLS", **TARGETED["embeddings and dropout"])
    trained("bert", config, tmp_path)
    model = ours("bert")
    model.load_adapter(tmp_path, load_as="a")
    dropouts = {p.rpartition(".")[2]: m.dropout for p, m in model.adapter_modules("a")}
    assert dropouts == {"word_embeddings": 0.0, "key": 0.2}


def test_keys_of_older_releases_of_transformers_are_found(tmp_path):
    folder, inputs, expected = golden("vit/lora")
    shutil.copytree(folder, tmp_path / "old")
    renamed = {
        key.replace("vit.layers", "vit.encoder.layer")
        .replace("attention.q_proj", "attention.attention.query")
        .replace("attention.v_proj", "attention.attention.value"): tensor
        for key, tensor in load_file(folder / TENSORS).items()
    }
    assert any("encoder.layer.1.attention.attention.query" in key for key in renamed)
    save_file(renamed, tmp_path / "old" / TENSORS)
    model = named_golden(folder)
    model.load_adapter(tmp_path / "old", set_active=True)
    check_golden(model, inputs, expected)


def test_an_adapter_of_the_base_class_loads_below_any_head(tmp_path):
    model = transformers.AutoModel.from_pretrained(GOLDEN / "bert" / "base")
    theirs = peft.get_peft_model(model.eval(), peft.LoraConfig(target_modules=["query"]))
    stirred = [p for n, p in theirs.named_parameters() if "lora_" in n]
    with torch.no_grad():
        for parameter in stirred:
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    theirs.save_pretrained(tmp_path)
    folder, inputs, _ = golden("bert/lora")
    mine = named_golden(folder)
    mine.load_adapter(tmp_path, set_active=True)
    with torch.no_grad():
        expected = theirs.double()(**inputs).last_hidden_state
        close(mine.double().bert(**inputs).last_hidden_state, expected)


def test_an_adapter_of_a_task_class_loads_into_the_base_class(tmp_path):
    folder, inputs, _ = golden("bert/lora")
    cls = transformers.BertForSequenceClassification
    theirs = peft.PeftModel.from_pretrained(cls.from_pretrained(folder.parent / "base"), folder)
    model = transformers.AutoModel.from_pretrained(folder.parent / "base").eval()
    adapterzoo.init(model)
    model.load_adapter(folder, with_head=False, set_active=True)
    with torch.no_grad():
        expected = theirs.double().eval().base_model.model.bert(**inputs).last_hidden_state
        close(model.double()(**inputs).last_hidden_state, expected)


def test_pickles_of_older_releases_of_peft_load(tmp_path):
    folder, inputs, expected = golden("bert/lora")
    shutil.copy(folder / CONFIG, tmp_path)
    # PEFT up to 0.3 kept the name of the wrapper, and the untrained head beside the trained one
    tensors = {
        key.replace(".classifier.", ".classifier.modules_to_save."): tensor
        for key, tensor in load_file(folder / TENSORS).items()
    }
    tensors["base_model.model.classifier.original_module.bias"] = torch.ones(3)
    torch.save(tensors, tmp_path / "adapter_model.bin")
    model = named_golden(folder)
    model.load_adapter(tmp_path, load_as="old", set_active=True)
    check_golden(model, inputs, expected)


def test_boft_has_the_factors_that_its_tensors_have(tmp_path, monkeypatch):
    monkeypatch.setattr("peft.tuners.boft.layer.get_fbd_cuda", lambda: None)
    config = peft.BOFTConfig(
        task_type="SEQ_CLS", target_modules=["query"], boft_n_butterfly_factor=2
    )
    expected = trained("bert", config, tmp_path)
    model = ours("bert")
    with pytest.warns(UserWarning, match=r"has boft_n_butterfly_factor=2, .* tensors 1.*extension"):
        model.load_adapter(tmp_path, load_as="a", set_active=True)
    assert model.adapters_config["a"].boft_n_butterfly_factor == 1
    close(logits(model, "bert"), expected)


@pytest.mark.parametrize(
    "fields",
    [{"boft_block_size": 8, "boft_n_butterfly_factor": 2},
     {"boft_block_size": 0, "boft_block_num": 4}],
)  # fmt: skip
def test_boft_of_unlike_layers_loads(fields, tmp_path, monkeypatch):
    stand_in(monkeypatch)
    config = peft.BOFTConfig(
        task_type="SEQ_CLS", target_modules=["query", "output.dense"], **fields
    )
    expected = trained("bert", config, tmp_path / "theirs")
    model = ours("bert")
    model.load_adapter(tmp_path / "theirs", load_as="a", set_active=True)
    close(logits(model, "bert"), expected)
    model.save_adapter(tmp_path / "back", "a", format="peft")
    theirs, mine = (load_file(tmp_path / f / TENSORS) for f in ("theirs", "back"))
    assert sorted(theirs) == sorted(mine)
    assert all(same_bits(theirs[key], mine[key]) for key in theirs)


# BERT's and T5's defaults are PEFT's own; `output.dense` names two layers of each block of BERT
SCALED: dict[str, dict[str, Any]] = {
    "bert": {},
    "gpt2": {"fan_in_fan_out": True},
    "llama": {},
    "t5": {},
    "vit": {"target_modules": ["k_proj", "v_proj", "fc2"], "feedforward_modules": ["fc2"]},
    "roberta": {"target_modules": r".*\.(key|dense)", "feedforward_modules": r".*output\.dense",
                "exclude_modules": ["classifier.dense"]},
    "gpt_neox": {"target_modules": ["query_key_value", "dense"], "feedforward_modules": []},
}  # fmt: skip


@pytest.mark.parametrize("family", SCALED)
def test_ia3_of_peft_loads_and_goes_back(family, tmp_path):
    task = {"bert": "SEQ_CLS", "roberta": "SEQ_CLS"}.get(family)
    config = peft.IA3Config(task_type=task, **SCALED[family])
    expected = trained(family, config, tmp_path / "theirs", std=0.5)
    model = ours(family)
    model.load_adapter(tmp_path / "theirs", load_as="a", set_active=True)
    assert (expected - logits(plain(family), family)).abs().max() > 1e-2
    close(logits(model, family), expected)
    model.save_adapter(tmp_path / "back", "a", format="peft", with_head=task is not None)
    theirs, mine = (load_file(tmp_path / f / TENSORS) for f in ("theirs", "back"))
    assert sorted(theirs) == sorted(mine)
    assert all(same_bits(theirs[key], mine[key]) for key in theirs)
    close(reloaded(family, tmp_path / "back"), expected)
    model.save_adapter(tmp_path / "own", "a")
    other = ours(family)
    other.load_adapter(tmp_path / "own", set_active=True)
    close(logits(other, family), expected)


def test_both_layers_that_bert_calls_output_dense_are_scaled_at_their_input(tmp_path):
    trained("bert", peft.IA3Config(task_type="SEQ_CLS"), tmp_path / "theirs")
    model = ours("bert")
    model.load_adapter(tmp_path / "theirs", load_as="a")
    config = model.adapters_config["a"]
    assert config.target_modules == ("key", "output.dense", "value")
    assert config.feedforward_modules == ("dense",)
    at_input = {path for path, module in model.adapter_modules("a") if module.scales_input}
    assert at_input == {
        f"encoder.layer.{i}.{name}.dense"
        for i in range(2)
        for name in ("attention.output", "output")
    }


@pytest.mark.parametrize(
    ("file", "base", "kept"),
    [(torch.bfloat16, torch.float32, torch.float32),
     (torch.float32, torch.bfloat16, torch.float32),
     (torch.bfloat16, torch.bfloat16, torch.bfloat16)],
)  # fmt: skip
def test_no_bit_of_another_dtype_is_lost(file, base, kept, tmp_path):
    trained("bert", peft.LoraConfig(use_dora=True, target_modules=["key"]), tmp_path)
    tensors = {key: t.to(file) for key, t in load_file(tmp_path / TENSORS).items()}
    save_file(tensors, tmp_path / TENSORS)
    model = plain("bert").to(base)
    adapterzoo.init(model)
    model.load_adapter(tmp_path, load_as="a", set_active=True)
    for path, module in model.adapter_modules("a"):
        for mine, theirs in (("lora_A", "lora_A.weight"), ("m", "lora_magnitude_vector")):
            loaded = module.get_parameter(mine)
            # magnitudes stay in float32
            assert loaded.dtype is (torch.float32 if mine == "m" else kept)
            expected = tensors[f"base_model.model.bert.{path}.{theirs}"]
            assert torch.equal(loaded.double(), expected.double())
    assert logits(model, "bert", None).dtype is base


# --- heads ---


@pytest.mark.parametrize("family", ["roberta", "distilbert", "vit"])
@pytest.mark.parametrize("static", [True, False], ids=["static", "named"])
def test_heads_go_both_ways(family, static, tmp_path):
    model = ours(family) if static else named(family, tmp_path / "base")
    model.add_adapter("a", "lora[attn_matrices=['q','v','o']]")
    stir(model, "a")
    model.set_active_adapters("a")
    if not static:
        model.active_head = "default"
    expected = logits(model, family)
    model.save_adapter(tmp_path / "peft", "a", format="peft")
    close(reloaded(family, tmp_path / "peft"), expected)
    other = ours(family) if static else named(family, tmp_path / "base")
    fill = {k: torch.zeros_like(t) for k, t in other.state_dict().items() if "classifier" in k}
    other.load_state_dict(fill, strict=False)
    other.load_adapter(tmp_path / "peft", load_as="b", set_active=True)
    close(logits(other, family), expected)


def test_what_peft_leaves_out_of_a_head_stays(tmp_path):
    # older releases of PEFT trained the classifier, and not the layer before it
    config = peft.LoraConfig(task_type="SEQ_CLS", target_modules=["q_lin"])
    trained("distilbert", config, tmp_path)
    tensors = load_file(tmp_path / TENSORS)
    kept = {key: tensor for key, tensor in tensors.items() if "pre_classifier" not in key}
    assert len(kept) == len(tensors) - 2
    save_file(kept, tmp_path / TENSORS)
    model, untouched = ours("distilbert"), plain("distilbert")
    model.load_adapter(tmp_path, load_as="a")
    for key, tensor in untouched.pre_classifier.state_dict().items():
        assert torch.equal(model.pre_classifier.adapters["a"].state_dict()[key], tensor)
    for key, tensor in model.classifier.adapters["a"].state_dict().items():
        assert torch.equal(tensors[f"base_model.model.classifier.{key}"], tensor)


def test_a_static_model_without_its_head_loads_by_peft(tmp_path):
    model = ours("bert")
    model.add_adapter("a", "lora")
    stir(model, "a")
    model.set_active_adapters("a")
    model.save_adapter(tmp_path, "a", with_head=False, format="peft")
    close(reloaded("bert", tmp_path), logits(model, "bert"))


def test_weights_of_the_base_model_load_only_where_they_are_the_same(tmp_path):
    trained("bert", peft.LoraConfig(target_modules=["key"]), tmp_path)
    tensors = load_file(tmp_path / TENSORS)
    key = "bert.embeddings.word_embeddings.weight"
    tensors[f"base_model.model.{key}"] = ours("bert").get_parameter(key).detach().clone()
    save_file(tensors, tmp_path / TENSORS)
    ours("bert").load_adapter(tmp_path, load_as="a")
    tensors[f"base_model.model.{key}"] += 1
    save_file(tensors, tmp_path / TENSORS)
    says = rf"(?s)differ from those here.*{key}.*merge_and_unload"
    with pytest.raises(adapterzoo.AdapterZooError, match=says):
        ours("bert").load_adapter(tmp_path, load_as="a")


# --- ours in PEFT ---

EXPORTS: dict[str, Any] = {
    "lora": LoRAConfig(r=4, alpha=6),
    "all-linear": LoRAConfig(target_modules="all-linear", r=3, alpha=5),
    "rslora": LoRAConfig(r=3, alpha=7, use_rslora=True, attn_matrices=("q", "k", "v")),
    "feed-forward": LoRAConfig(intermediate_lora=True, output_lora=True, lora_bias=True),
    "one layer": LoRAConfig(layers_to_transform=(1,), target_modules="all-linear"),
    "patterns": LoRAConfig(
        target_modules="all-linear", rank_pattern={r".*\.1\..*": 3}, alpha_pattern={r".*\.0\..*": 2}
    ),
    "dora": DoRAConfig(alpha=3),
    "dora qkv": DoRAConfig(attn_matrices=("q", "k", "v"), output_lora=True),
    "boft": BOFTConfig(target_modules="all-linear", boft_n_butterfly_factor=2),
    "boft blocks": BOFTConfig(target_modules="all-linear", boft_block_num=4),
    "ia3": IA3Config(alpha=0.5),
    "ia3 outputs": IA3Config(convention="adapterhub", output_lora=True),
    "ia3 inputs": IA3Config(
        target_modules="all-linear", feedforward_modules=r".*\.(0|1)\..*(dense|proj|wo)"
    ),
    "two ia3": ConfigUnion(
        IA3Config(alpha=3.0), IA3Config(attn_matrices=("q", "k"), intermediate_lora=False)
    ),
    "two loras": ConfigUnion(LoRAConfig(), LoRAConfig(attn_matrices=("q",), r=2, alpha=2)),
}  # fmt: skip
EXPORTED = [("bert", kind) for kind in EXPORTS]
EXPORTED += [("gpt2", kind) for kind in EXPORTS if not kind.startswith("boft")]
EXPORTED += [(family, "ia3") for family in ("llama", "t5", "vit", "gpt_neox", "phi3")]
EXPORTED += [("llama", "all-linear"), ("t5", "boft blocks"), ("vit", "two loras")]
# other ways to fuse query, key and value: in turns for each head, and of unlike widths
EXPORTED += [(family, kind) for family in ("gpt_neox", "phi3") for kind in ("lora", "dora")]
# a feed-forward part with a gate
EXPORTED += [("mt5", kind) for kind in ("feed-forward", "dora qkv", "boft")]


@pytest.mark.parametrize(("family", "kind"), EXPORTED)
def test_peft_loads_ours_and_agrees(family, kind, tmp_path, monkeypatch):
    stand_in(monkeypatch)
    model = ours(family)
    model.add_adapter("a", EXPORTS[kind])
    stir(model, "a")
    model.set_active_adapters("a")
    expected = logits(model, family)
    assert not torch.allclose(expected, logits(plain(family), family), atol=1e-3)
    model.save_adapter(tmp_path, "a", format="peft")
    # rounded to float32: the magnitudes of rows of a fused layer that have no adapter, which are
    # norms, and the products of several vectors
    near = 1e-5 if kind.startswith(("dora", "two ia3")) else 1e-10
    close(reloaded(family, tmp_path), expected, near)
    other = ours(family)
    other.load_adapter(tmp_path, load_as="b", set_active=True)
    close(logits(other, family), expected, near)


@pytest.mark.parametrize("family", ["gpt2", "mt5", "whisper"])
def test_named_language_models_export_without_their_head(family, tmp_path):
    model = named(family, tmp_path / "base")
    model.add_adapter("a", "lora")
    stir(model, "a")
    model.set_active_adapters("a")
    model.active_head = "default"
    model.save_adapter(tmp_path / "peft", "a", with_head=False, format="peft")
    # what servers need: the adapter alone
    assert all("lora_" in key for key in load_file(tmp_path / "peft" / TENSORS))
    assert json.loads((tmp_path / "peft" / CONFIG).read_text())["modules_to_save"] is None
    close(reloaded(family, tmp_path / "peft"), logits(model, family))


def test_peft_generates_the_same_tokens(tmp_path):
    model = ours("llama")
    model.add_adapter("a", "lora[r=4,alpha=16]")
    stir(model, "a", std=0.3)
    model.set_active_adapters("a")
    model.save_adapter(tmp_path, "a", format="peft")
    theirs = peft.PeftModel.from_pretrained(plain("llama"), tmp_path).double().eval()
    asked = {**tiny_inputs("llama"), "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    expected = theirs.generate(**asked)
    assert torch.equal(model.double().generate(**asked), expected)
    assert not torch.equal(plain("llama").generate(**asked), expected)


@pytest.mark.parametrize("config", ["lora", "dora", "boft"])
def test_half_precision_is_written_as_it_is(config, tmp_path, monkeypatch):
    stand_in(monkeypatch)
    model = plain("llama").to(torch.bfloat16)
    adapterzoo.init(model)
    model.add_adapter("a", config)
    stir(model, "a")
    model.set_active_adapters("a")
    model.save_adapter(tmp_path, "a", format="peft")
    tensors = load_file(tmp_path / TENSORS)
    wide = {key for key, tensor in tensors.items() if tensor.dtype is not torch.bfloat16}
    assert all(key.endswith("lora_magnitude_vector") for key in wide)
    other = plain("llama").to(torch.bfloat16)
    adapterzoo.init(other)
    other.load_adapter(tmp_path, load_as="b", set_active=True)
    assert [*adapter_bits(other, "b").values()] == [*adapter_bits(model, "a").values()]
    theirs = peft.PeftModel.from_pretrained(plain("llama").to(torch.bfloat16), tmp_path)
    expected = logits(model, "llama")
    close(logits(theirs, "llama"), expected)
    assert (expected - logits(plain("llama").to(torch.bfloat16), "llama")).abs().max() > 1


def test_peft_never_sees_a_layer_of_a_head_as_a_target(tmp_path):
    # the head of RoBERTa has layers `dense` and `out_proj` too
    model = ours("roberta")
    model.add_adapter("a", LoRAConfig(selfattn_lora=False, output_lora=True))
    model.save_adapter(tmp_path, "a", format="peft")
    theirs = peft.PeftModel.from_pretrained(plain("roberta"), tmp_path)
    adapted = {n.partition(".lora_A")[0] for n, _ in theirs.named_parameters() if ".lora_A" in n}
    assert adapted == {f"base_model.model.roberta.encoder.layer.{i}.output.dense" for i in range(2)}


def test_nor_does_another_class_than_that_it_was_written_for(tiny, tmp_path):
    # written for BartForConditionalGeneration, where nothing but attention has an `out_proj`
    model = tiny("bart")
    model.add_adapter("a", LoRAConfig(target_modules=("out_proj",)))
    model.save_adapter(tmp_path, "a", format="peft")
    change(tmp_path, task_type=None)
    theirs = peft.PeftModel.from_pretrained(plain("bart"), tmp_path)
    adapted = {n.partition(".lora_A")[0] for n, _ in theirs.named_parameters() if ".lora_A" in n}
    assert len(adapted) == 6
    assert all(path.endswith("attn.out_proj") for path in adapted)


@pytest.mark.parametrize("family", ["t5", "mt5"])
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings")
def test_an_adapter_at_a_table_that_is_never_called_is_refused(tmp_path, family):
    """It changes nothing in PEFT, where the stacks look tokens up in tables of their own."""
    found = trained(family, peft.LoraConfig(r=2, target_modules=["shared"]), tmp_path / "a")
    assert torch.equal(found, logits(plain(family), family))
    model = ours(family)
    with refused(model, SiteError, "no layer matches ('shared',)", "'embed_tokens'"):
        model.load_adapter(tmp_path / "a")
    found = trained(family, peft.LoraConfig(r=2, target_modules=["embed_tokens"]), tmp_path / "b")
    assert not torch.equal(found, logits(plain(family), family))
    model.load_adapter(tmp_path / "b", set_active=True)
    close(logits(model, family), found)
