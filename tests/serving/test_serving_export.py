"""`save_adapter(…, serve=…)`: what is written, what is refused, and that each hint works."""

from __future__ import annotations

import json

import grimp
import peft
import pytest
import serving_table  # noqa: F401  adds classes of models
import torch
from families import FAMILIES, tiny_config
from peft_world import CONFIG, QUIET, TENSORS, built, ours, plain
from safetensors.torch import load_file
from snapshots import refused, stir
from transformers import AutoConfig

import adapterzoo
from adapterzoo import AdapterConfig
from adapterzoo.errors import CheckpointError, ConfigError, UnknownNameError
from adapterzoo.serving import Export, verify

pytestmark = [pytest.mark.filterwarnings(warning) for warning in QUIET]


def adapted(config, family="llama"):
    model = ours(family)
    model.add_adapter("a", config)
    stir(model, "a")
    return model


def served(model, folder, serve="any", **kwargs):
    return model.save_adapter(folder, "a", format="peft", serve=serve, **kwargs)


def test_the_folder_is_canonical(tmp_path):
    model = adapted("lora[r=24,alpha=5,attn_matrices=['q'],leave_out=[0]]")
    written = served(model, tmp_path)
    assert isinstance(written, Export)
    assert (written.rank, written.is_exact, written.rounding) == (32, True, 0.0)
    config = json.loads((tmp_path / CONFIG).read_text())
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (32, 32, False)
    assert config["rank_pattern"] == config["alpha_pattern"] == {}
    assert config["target_modules"] == ["k_proj", "q_proj", "v_proj"]
    tensors = load_file(tmp_path / TENSORS)
    assert len(tensors) == 2 * 3 * 2
    assert {t.shape[0] for key, t in tensors.items() if "lora_A" in key} == {32}
    acting = {key for key, t in tensors.items() if "lora_B" in key and t.any()}
    assert acting == {"base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"}


def test_peft_reads_it_too(tmp_path):
    model = adapted("lora[r=4,alpha=6,use_rslora=True,attn_matrices=['q'],leave_out=[1]]")
    model.set_active_adapters("a")
    served(model, tmp_path)
    theirs = peft.PeftModel.from_pretrained(plain("llama"), tmp_path).eval()
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, model.eval()(ids).logits, rtol=0, atol=1e-5)


def test_experts_have_the_names_of_the_checkpoint(tmp_path):
    config = "lora[selfattn_lora=False,output_lora=True]"
    for family, name in (
        ("mixtral", "block_sparse_moe.experts.3.w2"), ("qwen3_moe", "mlp.experts.3.down_proj")
    ):  # fmt: skip
        served(adapted(config, family), tmp_path / family, "vllm")
        tensors = load_file(tmp_path / family / TENSORS)
        # two blocks, four experts, three matrices, two factors
        assert len(tensors) == 2 * 4 * 3 * 2
        assert f"base_model.model.model.layers.1.{name}.lora_A.weight" in tensors
        targets = json.loads((tmp_path / family / CONFIG).read_text())["target_modules"]
        assert targets == ["down_proj", "gate_proj", "up_proj"]


def test_experts_are_counted_in_the_weights(tmp_path):
    # as the configs on the Hub are
    given = {k: v for k, v in FAMILIES["qwen3_moe"].items() if k != "num_local_experts"}
    config = AutoConfig.for_model("qwen3_moe", **given)
    config._experts_implementation = "eager"
    model = adapterzoo.init(built("Qwen3MoeForCausalLM", config))
    model.add_adapter("a", "lora[r=4,intermediate_lora=True,output_lora=True]")
    stir(model, "a")
    model.save_adapter(tmp_path / "a", "a")
    served(model, tmp_path / "served", "vllm")
    base = built("Qwen3MoeForCausalLM", config).double()
    assert verify(tmp_path / "served", "vllm", base, tmp_path / "a").is_equal


def test_a_model_with_named_heads_writes_the_same(tmp_path):
    plain("mixtral").save_pretrained(tmp_path / "base")
    model = adapterzoo.AutoAdapterModel.from_pretrained(tmp_path / "base")
    model.add_adapter("a", "lora[r=4,intermediate_lora=True,attn_matrices=['k'],leave_out=[0]]")
    stir(model, "a")
    with refused(model, CheckpointError, "copies of 'lm_head' would not", "with_head=False"):
        served(model, tmp_path / "served", "vllm")
    model.save_adapter(tmp_path / "a", "a", with_head=False)
    served(model, tmp_path / "served", "vllm", with_head=False)
    assert verify(tmp_path / "served", "vllm", tmp_path / "base", tmp_path / "a").is_equal


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_told(dtype, tmp_path):
    model = adapted("lora[r=4]")
    model.save_adapter(tmp_path / "a", "a")
    written = served(model, tmp_path / "served", dtype=dtype)
    tensors = load_file(tmp_path / "served" / TENSORS)
    assert {t.dtype for t in tensors.values()} == {dtype}
    # of two factors, each rounded to half a unit
    assert 0.1 * torch.finfo(dtype).eps < written.rounding < torch.finfo(dtype).eps
    assert f"rounding changes it by {written.rounding:.1e} of its norm" in str(written)
    proof = verify(tmp_path / "served", "vllm", plain("llama").double(), tmp_path / "a")
    assert proof.is_equal
    assert proof.difference > 0
    # what is told is what the file has
    exact = served(model, tmp_path / "exact")
    assert exact.rounding == 0
    there = load_file(tmp_path / "exact" / TENSORS)
    error = norm = 0.0
    for key in (key for key in there if "lora_A" in key):
        other = key.replace("lora_A", "lora_B")
        own = there[other].double() @ there[key].double()
        error += float((own - tensors[other].double() @ tensors[key].double()).square().sum())
        norm += float(own.square().sum())
    assert written.rounding == pytest.approx((error / norm) ** 0.5, rel=1e-3)


@pytest.mark.parametrize("config", ["dora[r=4]", "boft", "lora[r=8]"])
def test_a_limited_rank_is_the_conversion_with_its_errors(config, tmp_path):
    model = adapted(config)
    written = served(model, tmp_path / "served", rank=2)
    assert not written.is_exact
    certificate = model.convert_adapter("a", rank=2, new_name="nearest")
    model.save_adapter(tmp_path / "nearest", "nearest")
    assert [each.rank for each in written.layers] == [each.rank for each in certificate.layers]
    for mine, its in zip(written.layers, certificate.layers, strict=True):
        assert mine.error == pytest.approx(its.error, rel=1e-4)
        assert mine.relative > 1e-3
    base = plain("llama").double()
    assert verify(tmp_path / "served", "vllm", base, tmp_path / "nearest").is_equal
    assert "SVD" in str(written)


def test_methods_with_factors_are_exact(tmp_path):
    model = adapted("vera[r=4]")
    model.save_adapter(tmp_path / "a", "a")
    written = served(model, tmp_path / "served")
    assert written.is_exact
    assert {layer.rank for layer in written.layers} == {4}
    assert written.method == "vera"


def test_a_head_is_a_score(tmp_path):
    config = tiny_config("llama")
    config.num_labels = 3
    model = adapterzoo.init(built("LlamaForSequenceClassification", config))
    model.add_adapter("a", "lora[r=4]")
    stir(model, "a")
    with torch.no_grad():
        model.score.weight.add_(0.1)
    model.save_adapter(tmp_path / "a", "a")
    written = served(model, tmp_path / "served", "vllm")
    assert "--max-lora-cls-labels 3" in written.commands[0]
    base = built("LlamaForSequenceClassification", config).double()
    assert verify(tmp_path / "served", "vllm", base, tmp_path / "a").is_equal
    lost = verify(tmp_path / "served", "sglang", base, tmp_path / "a")
    assert lost.dropped == ("base_model.model.score.weight",)
    assert lost.without_effect == ("score.weight",)
    with refused(
        model, CheckpointError, "any server: trained copies of 'score'", "with_head=False"
    ):
        served(model, tmp_path / "any")
    served(model, tmp_path / "any", with_head=False)


def test_metadata_is_kept_and_options_are_printed(tmp_path):
    model = adapted("lora[r=4]")
    written = served(model, tmp_path, meta_dict={"note": 1})
    other = ours("llama")
    other.load_adapter(tmp_path, load_as="b")
    other.save_adapter(tmp_path / "again", "b")
    assert json.loads((tmp_path / "again" / "adapter_config.json").read_text())["meta"] == {
        "note": 1
    }
    assert len(written.commands) == 5
    assert f"a={tmp_path}" in written.commands[0]
    assert "--max-lora-rank 8" in written.commands[0]
    assert "--lora-target-modules k_proj q_proj v_proj" in written.commands[1]
    assert json.loads(json.dumps(written.to_dict()))["exact"]


# --- refused ---

TOKENS = AdapterConfig.from_dict({"architecture": "trainable_tokens", "token_indices": [5]})
TABLE = "lora[target_modules=['embed_tokens']]"
REFUSED = [
    ("dora", {}, "only LoRA is read, and the change of", {"rank": 16}),
    ("dora", {}, "DoRA's magnitudes", {"energy": 0.99}),
    ("ia3", {}, "PEFT's IA3", {"energy": 1.0}),
    (TABLE, {}, "'model.embed_tokens' would not be adapted", {"serve": "sglang"}),
    (TABLE, {"serve": "tgi"}, "'model.embed_tokens' would not be adapted", {"serve": "vllm"}),
    ("lora[modules_to_save=['lm_head']]", {}, "trained copies", {"with_head": False}),
    ("lora[modules_to_save=['norm']]", {"serve": "vllm"}, "trained copies of", "merge"),
    ("seq_bn", {}, "only LoRA is read", None),
    ("loreft", {}, "only LoRA is read", None),
    ("prefix_tuning", {}, "only LoRA is read", None),
    ("lora[lora_bias=True]", {}, "a bias of B", None),
    ("lora[alora_invocation_tokens=[5]]", {}, "an invocation", None),
    ("lora[use_gating=True]", {}, "use_gating", None),
    (TOKENS, {}, "only LoRA is read", None),
]


@pytest.mark.parametrize(("config", "given", "says", "instead"), REFUSED, ids=str)
def test_what_no_server_reads_is_refused_and_the_hint_works(config, given, says, instead, tmp_path):
    model = adapted(config)
    hint = "Write save_adapter(…) without serve"
    if instead == "merge":
        hint = "merge_and_unload(['a']).save_pretrained(…)"
    elif instead is not None:
        (name, value), *_ = instead.items()
        hint = f"{name}={value!r}" if name != "energy" else "energy=0.99"
    with refused(model, CheckpointError, says, hint, "Nothing has been written"):
        served(model, tmp_path / "served", **given)
    assert not (tmp_path / "served").exists()
    if instead is None:
        model.save_adapter(tmp_path / "served", "a")
    elif instead == "merge":
        model.merge_and_unload(["a"]).save_pretrained(tmp_path / "served")
    else:
        served(model, tmp_path / "served", **{**given, **instead})


def test_a_layer_that_no_server_adapts_can_be_merged(tmp_path):
    model = adapted("lora[target_modules=['wte']]", "gpt2")
    with refused(model, CheckpointError, "'transformer.wte' would not", "merge_and_unload(['a'])"):
        served(model, tmp_path / "served", "lorax")
    model.merge_and_unload(["a"]).save_pretrained(tmp_path / "merged")


def test_models_that_are_not_known_are_refused(tmp_path):
    model = adapted("lora", "gpt2")
    with refused(model, CheckpointError, "layers of 'gpt2' models are not known", "serve='lorax'"):
        served(model, tmp_path / "served", "vllm")
    assert served(model, tmp_path / "served", "lorax").is_exact


def test_trained_biases_are_refused(tmp_path):
    model = adapted("lora[bias='all']", "qwen2")
    with refused(model, CheckpointError, "v_proj.base_layer.bias' would not", "merge_and_unload"):
        served(model, tmp_path / "served")


def test_a_rank_that_is_too_large_is_refused(tmp_path):
    model = adapted("lora[r=600]")
    with refused(model, CheckpointError, "a rank of 600 is more than 512", "rank=512"):
        served(model, tmp_path / "served", "vllm")
    # the change of a layer of this size has no more than 32
    assert served(model, tmp_path / "served", "vllm", rank=512).rank == 32


def test_bad_arguments_say_what_to_write(tmp_path):
    model = adapted("lora")
    given = {"format": "peft", "serve": "vllm"}
    for error, kwargs, says in (
        (UnknownNameError, {**given, "serve": "vlm"}, "Did you mean 'vllm'"),
        (ConfigError, {"serve": "vllm"}, "Write format='peft'"),
        (ConfigError, {"format": "adapterhub", "serve": "vllm"}, "Write format='peft'"),
        (ConfigError, {"format": "peft", "rank": 4}, "rank=4 needs serve. Write serve='any', f"),
        (ConfigError, {"energy": 0.5}, "energy=0.5 needs serve"),
        (ConfigError, {"dtype": torch.float16}, "needs serve"),
        (ConfigError, {**given, "rank": 0}, "rank"),
        (ConfigError, {**given, "energy": 2.0}, "energy"),
        (ConfigError, {**given, "dtype": torch.int8}, "Write dtype=torch.bfloat16"),
    ):
        with refused(model, error, "save_adapter(", says):
            model.save_adapter(tmp_path / "served", "a", **kwargs)
    assert not (tmp_path / "served").exists()


def test_a_refused_export_leaves_the_folder_as_it_was(tmp_path):
    model = adapted("lora")
    served(model, tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    other = adapted("seq_bn")
    with pytest.raises(CheckpointError, match="only LoRA is read"):
        served(other, tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_writer_and_readers_share_nothing():
    graph = grimp.build_graph("adapterzoo", exclude_type_checking_imports=True, cache_dir=None)
    readers = "adapterzoo.serving.readers"
    for module in (readers, *graph.find_descendants(readers)):
        imported = graph.find_modules_directly_imported_by(module)
        outside = {name for name in imported if not name.startswith(readers)}
        assert outside <= {"adapterzoo.errors"}, module
    writers = ("adapterzoo.serving.servers", "adapterzoo.serving.export")
    for module in writers:
        upstream = graph.find_upstream_modules(module)
        assert not any(name.startswith((readers, "adapterzoo.serving.verify")) for name in upstream)
