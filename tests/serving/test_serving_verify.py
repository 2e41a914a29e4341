"""`verify`: what servers read otherwise, and faults planted into exported folders, are found."""

from __future__ import annotations

import json

import pytest
import torch
from families import tiny_config
from peft_world import CONFIG, QUIET, TENSORS, built, change, ours, plain
from safetensors.torch import load_file, save_file
from snapshots import stir

import adapterzoo
from adapterzoo.errors import CheckpointError, UnknownNameError
from adapterzoo.serving import readers, verify

pytestmark = [pytest.mark.filterwarnings(warning) for warning in QUIET]
SERVERS = tuple(readers.READERS)


@pytest.fixture(scope="module")
def base():
    return plain("llama").double()


def adapted(config, family="llama"):
    model = ours(family)
    model.add_adapter("a", config)
    stir(model, "a")
    return model


# E: exact; R: the server refuses it; S: silently different
PLAIN = {
    "lora[r=8]": "EEEEE",
    "lora[r=4]": "EESSE",
    "lora[r=16,use_rslora=True]": "ESEES",
    "lora[r=8,alpha_pattern={'q_proj':32}]": "ESSSS",
    "lora[r=8,rank_pattern={'q_proj':4}]": "ERSSE",
    "lora[leave_out=[0]]": "EESSE",
    "lora[attn_matrices=['v']]": "EREEE",
    "lora[target_modules=['embed_tokens','q_proj','k_proj','v_proj']]": "EESSE",
    "lora[lora_bias=True]": "RRSSR",
    "lora[alora_invocation_tokens=[5,6]]": "RSSSR",
    "dora[r=8]": "RRSSR",
    "vera[r=4]": "RRRRR",
    "boft": "RRRRR",
}
"""What PEFT's own files mean to vLLM, SGLang, LoRAX, TGI and llama.cpp; measured before there was
an export."""


@pytest.mark.parametrize("config", PLAIN)
def test_plain_files_of_peft_are_read_as_each_server_does(config, base, tmp_path):
    adapted(config).save_adapter(tmp_path, "a", format="peft")
    found = ""
    for server in SERVERS:
        proof = verify(tmp_path, server, base)
        found += "R" if proof.refused else "E" if proof.is_equal else "S"
    assert found == PLAIN[config]


@pytest.mark.parametrize(("family", "said"), [("mixtral", "SR"), ("qwen3_moe", "RR")])
def test_experts_in_peft_s_layout_are_not_served(family, said, tmp_path):
    import serving_table  # noqa: F401  adds the classes

    model = adapted("lora[intermediate_lora=True,output_lora=True]", family)
    model.save_adapter(tmp_path, "a", format="peft")
    proofs = [verify(tmp_path, server, plain(family).double()) for server in ("vllm", "gguf")]
    assert "".join("R" if proof.refused else "S" for proof in proofs) == said
    assert not any(proof.is_equal for proof in proofs)
    if said[0] == "S":
        assert any("experts" in key for key in proofs[0].dropped)
        assert "model.layers.0.mlp.experts.down_proj" in proofs[0].without_effect


# --- planted faults ---


@pytest.fixture
def folders(tmp_path):
    """An adapter, and its export to any server."""
    model = adapted("lora[r=4,alpha=6,intermediate_lora=True,output_lora=True]")
    model.save_adapter(tmp_path / "a", "a")
    model.save_adapter(tmp_path / "served", "a", format="peft", serve="any")
    return tmp_path / "a", tmp_path / "served"


def edit(folder, work):
    tensors = load_file(folder / TENSORS)
    work(tensors)
    save_file(tensors, folder / TENSORS)


KEY = "base_model.model.model.layers.1.self_attn.q_proj"
WEIGHT = "model.layers.1.self_attn.q_proj.weight"


def drop(tensors):
    for factor in "AB":
        del tensors[f"{KEY}.lora_{factor}.weight"]


def misname(tensors):
    for factor in "AB":
        wrong = f"{KEY.replace('q_proj', 'query')}.lora_{factor}.weight"
        tensors[wrong] = tensors.pop(f"{KEY}.lora_{factor}.weight")


def scale_one(tensors):
    tensors[f"{KEY}.lora_B.weight"] *= 1.01


@pytest.mark.parametrize("server", SERVERS)
def test_the_export_is_equal(server, base, folders):
    original, served = folders
    proof = verify(served, server, base, original)
    assert proof.is_equal
    # the scale times B is rounded to float32
    assert proof.difference < 1e-6 < 1e-2 < proof.change
    assert "computes what the adapter computes here" in str(proof)


@pytest.mark.parametrize("server", SERVERS)
def test_a_wrong_scale_is_found(server, base, folders):
    original, served = folders
    edit(served, scale_one)
    proof = verify(served, server, base, original)
    assert not proof.is_equal
    assert [(each.key, round(each.error, 6)) for each in proof.wrong] == [(WEIGHT, 0.01)]
    assert f"{WEIGHT}: its change differs by 0.01 of the norm" in str(proof)
    change(served, lora_alpha=16)
    proof = verify(served, server, base, original)
    assert len(proof.wrong) == 8
    assert not proof.is_equal


def test_a_scale_that_servers_read_otherwise_is_found_without_the_original(base, folders):
    _, served = folders
    change(served, use_rslora=True)
    assert verify(served, "vllm", base).is_equal
    for server in ("sglang", "gguf"):
        proof = verify(served, server, base)
        assert not proof.is_equal
        assert len(proof.wrong) == 8
        assert proof.difference > 0.1 * proof.change


@pytest.mark.parametrize("server", SERVERS)
def test_a_dropped_key_is_found(server, base, folders):
    original, served = folders
    edit(served, drop)
    proof = verify(served, server, base, original)
    assert not proof.is_equal
    assert proof.refused or WEIGHT in proof.without_effect
    # the other server's rules: all q_proj are gone, as not every block has one
    lost = {"lorax": 2, "tgi": 2, "sglang": 0}.get(server, 1)
    assert len(proof.without_effect) == lost
    alone = verify(served, server, base)
    assert not alone.is_equal
    assert "layers.1.self_attn.q_proj" in str(alone.here)


@pytest.mark.parametrize("server", SERVERS)
def test_a_misnamed_module_is_found(server, base, folders):
    original, served = folders
    edit(served, misname)
    proof = verify(served, server, base, original)
    assert not proof.is_equal
    if server in ("lorax", "tgi"):
        assert f"{KEY.replace('q_proj', 'query')}.lora_A.weight" in proof.dropped
        assert WEIGHT in proof.without_effect
    else:
        assert proof.refused
        assert "refuses it" in str(proof)
    assert not verify(served, server, base).is_equal


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize(
    "fields",
    [{"r": 0}, {"r": "8"}, {"lora_alpha": None}, {"target_modules": 3}, {"peft_type": "IA3"}],
    ids=str,
)
def test_a_config_of_nonsense_is_no_crash(server, fields, base, folders):
    original, served = folders
    change(served, **fields)
    proof = verify(served, server, base, original)
    # some servers do not look at a field, and are right in spite of it
    ignored = {"r": (), "lora_alpha": (), "target_modules": ("vllm", "lorax", "tgi", "gguf"),
               "peft_type": ("vllm", "gguf")}  # fmt: skip
    if "r" in fields and server == "gguf":
        assert proof.is_equal
    else:
        assert proof.is_equal == (server in ignored[next(iter(fields))])


def test_a_tensor_that_does_not_fit_is_refused(base, folders):
    original, served = folders
    edit(served, lambda tensors: tensors.update({f"{KEY}.lora_B.weight": torch.ones(31, 8)}))
    for server in SERVERS:
        proof = verify(served, server, base, original)
        assert not proof.is_equal
        assert proof.refused


# --- arguments ---


def test_what_is_needed_is_told(base, tmp_path):
    model = adapted("lora[r=24]")
    model.save_adapter(tmp_path, "a", format="peft", serve="vllm")
    proof = verify(tmp_path, "vllm", base)
    assert proof.needs == ("--max-lora-rank 32",)
    assert proof.is_equal
    assert json.loads(json.dumps(proof.to_dict()))["equal"]


def test_a_folder_of_the_base_model_will_do(folders, tmp_path):
    original, served = folders
    plain("llama").save_pretrained(tmp_path / "base")
    proof = verify(served, "vllm", tmp_path / "base", original)
    assert proof.is_equal
    assert proof.difference > 0


@pytest.mark.parametrize("tying", [False, True], ids=["alone", "with the output layer"])
def test_a_tied_table_is_adapted(tying, tmp_path):
    config = tiny_config("llama")
    config.tie_word_embeddings = True
    tied = built("LlamaForCausalLM", config)
    base = built("LlamaForCausalLM", config).double()
    model = adapterzoo.init(tied)
    model.add_adapter("a", f"lora[target_modules=['embed_tokens'],ensure_weight_tying={tying}]")
    stir(model, "a")
    model.save_adapter(tmp_path / "served", "a", format="peft", serve="vllm")
    model.save_adapter(tmp_path / "a", "a")
    proof = verify(tmp_path / "served", "vllm", base, tmp_path / "a")
    assert proof.is_equal
    found = {key for key in load_file(tmp_path / "served" / TENSORS) if "lm_head" in key}
    assert bool(found) is tying
    # the model that was given is as it was
    assert base.lm_head.weight is base.model.embed_tokens.weight


def test_bad_arguments_say_what_to_write(base, folders, tmp_path):
    _, served = folders
    with pytest.raises(UnknownNameError, match=r"there is no server 'vlm'. Did you mean 'vllm'"):
        verify(served, "vlm", base)
    with pytest.raises(CheckpointError, match=r"not a PEFT folder .* Write it with save_adapt"):
        verify(tmp_path, "vllm", base)
    with pytest.raises(CheckpointError, match=r"is not a plain model. Write the folder of"):
        verify(served, "vllm", ours("llama"))
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        verify(served, "vllm", tmp_path / "nothing")
    (served / CONFIG).write_text("[1]")
    with pytest.raises(CheckpointError, match="not an object"):
        verify(served, "vllm", base)
