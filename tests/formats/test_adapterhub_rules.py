"""What old AdapterHub checkpoints mean, and what none of them may get past.

Each test rewrites a checkpoint that the peer wrote, so that it is one of an older release.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from snapshots import adapter_bits, refused, stir
from transformers import DebertaConfig

from adapterzoo import AutoAdapterModel, BnConfig, LoRAConfig
from adapterzoo.config import AdapterConfig
from adapterzoo.errors import AdapterZooError, CheckpointError, SiteError
from adapterzoo.spelling import adapterhub_spellings

DATA = Path(__file__).resolve().parents[1] / "data" / "golden_adapterhub" / "bert"
NAMES = json.loads((DATA.parents[1] / "adapterhub_names.json").read_text())["families"]


@pytest.fixture
def model():
    return AutoAdapterModel.from_pretrained(DATA / "base")


@pytest.fixture
def golden(tmp_path):
    def copied(method):
        shutil.copytree(DATA / method, tmp_path / method)
        return tmp_path / method

    return copied


def document(folder, change, name="adapter"):
    file = folder / f"{name}_config.json"
    values = json.loads(file.read_text())
    change(values)
    file.write_text(json.dumps(values))


def tensors(folder, change):
    file = folder / "pytorch_adapter.bin"
    found = torch.load(file, weights_only=True)
    made = change(found)
    torch.save(found if made is None else made, file)


def config(**fields):
    return lambda values: values["config"].update(fields)


def renamed(old, new):
    def change(found):
        assert any(old in key for key in found)
        return {key.replace(old, new): tensor for key, tensor in found.items()}

    return change


# --- old releases ---


@pytest.mark.parametrize(
    ("version", "written", "means"),
    [(None, "gelu", "gelu_new"), (None, "gelu_orig", "gelu"), (None, "relu", "relu"),
     ("2.0.0", "gelu", "gelu")],
)  # fmt: skip
def test_names_of_activations(model, golden, version, written, means):
    folder = golden("double_seq_bn")
    document(folder, config(non_linearity=written))
    document(folder, lambda values: values.update(version=version))
    if version is None:
        document(folder, lambda values: values.pop("version"))
    model.load_adapter(folder)
    assert model.adapters_config["golden"].non_linearity == means


@pytest.mark.parametrize(
    ("version", "scaling"),
    [("adapters.1.0.1", 1.0), ("adapters.1.1.0.dev0", 1.0), ("adapters.1.1.0", 2.0),
     ("adapters.1.10.0", 2.0), ("3.2.1", 2.0), ("adapters." + "9" * 5000 + ".0", 2.0),
     (None, 2.0)],
)  # fmt: skip
def test_the_scaling_of_lora(model, golden, version, scaling):
    folder = golden("lora")
    document(folder, config(alpha=8, r=4))
    document(folder, lambda values: values.update(version=version))
    model.load_adapter(folder)
    found = {module.scaling for _, module in model.adapter_modules("golden")}
    assert found == {scaling}


@pytest.mark.parametrize(("kind", "prefix"), [("task", "bert."), ("lang", "")])
def test_names_of_adapter_transformers(model, golden, kind, prefix):
    folder = golden("double_seq_bn")
    model.load_adapter(folder, load_as="now")
    tensors(
        folder,
        renamed("attention.output.adapters", f"attention.output.attention_text_{kind}_adapters"),
    )
    tensors(folder, renamed("output.adapters", f"output.layer_text_{kind}_adapters"))
    tensors(folder, renamed("bert.", prefix))
    nested = {"block_type": "nice", "non_linearity": "relu", "reduction_factor": 2}
    forgotten = {"attention_type": "sentence-lvl-dynamic", "new_attention_norm": False}
    document(folder, config(invertible_adapter=nested, **forgotten))
    old = {"type": "text_task", "model_class": "BertModel", "version": "3.2.1"}
    document(folder, lambda values: values.update(old))
    document(folder, lambda values: values.update(model_class="BertModelWithHeads"), "head")
    model.load_adapter(folder, load_as="then")
    assert adapter_bits(model, "then") == adapter_bits(model, "now")
    assert model.adapters_config["then"] == model.adapters_config["now"]
    assert model.get_head("then").config == model.get_head("now").config


def test_a_config_that_is_a_name(model, golden):
    folder = golden("double_seq_bn")
    document(folder, lambda values: values.update(config="houlsby[reduction_factor=4]"))
    model.load_adapter(folder)
    assert model.adapters_config["golden"] == BnConfig(
        mh_adapter=True, output_adapter=True, reduction_factor=4, non_linearity="swish"
    )


def test_upper_case_and_fields_without_effect(model, golden):
    folder = golden("double_seq_bn")
    model.load_adapter(folder, load_as="now")

    def change(values):
        fields = values["config"]
        for old in ("LN_after", "LN_before", "MH_Adapter", "Output_Adapter"):
            fields[old] = fields.pop(old.lower())
        # nothing of it does anything where phm_layer, original_ln_before and ln_after are off
        fields.update(phm_dim=8, phm_c_init=None, residual_before_ln=False, leave_out=None)
        fields.update(adapter_residual_before_ln=True)

    document(folder, change)
    model.load_adapter(folder, load_as="then")
    assert model.adapters_config["then"] == model.adapters_config["now"]


def test_the_norm_before_a_bottleneck_stands_twice(model, tmp_path):
    gated = "use_gating=True,convention='adapterhub'"
    model.add_adapter("a", f"double_seq_bn[ln_before=True,{gated},scaling='learned']")
    model.save_adapter(tmp_path / "a", "a", with_head=False, format="adapterhub")
    file = tmp_path / "a" / "pytorch_adapter.bin"
    found = torch.load(file, weights_only=True)
    start = "bert.encoder.layer.0.output.adapters.a."
    names = sorted(key.removeprefix(start) for key in found if key.startswith(start))
    assert names == [
        "adapter_down.0.bias", "adapter_down.0.weight", "adapter_down.1.bias",
        "adapter_down.1.weight", "adapter_norm_before.bias", "adapter_norm_before.weight",
        "adapter_up.bias", "adapter_up.weight", "gate.bias", "gate.weight", "scaling",
    ]  # fmt: skip
    model.load_adapter(tmp_path / "a", load_as="b")
    assert adapter_bits(model, "b") == adapter_bits(model, "a")
    found[f"{start}adapter_norm_before.bias"] += 1
    torch.save(found, file)
    with refused(model, CheckpointError, "adapter_norm_before.bias", "Copy the file"):
        model.load_adapter(tmp_path / "a", load_as="c")


def test_a_union(model, tmp_path):
    model.add_adapter("a", "seq_bn[reduction_factor=4]|lora[r=2]")
    model.save_adapter(tmp_path / "a", "a", with_head=False, format="adapterhub")
    values = json.loads((tmp_path / "a" / "adapter_config.json").read_text())["config"]
    assert values["architecture"] == "union"
    assert ["architecture" in member for member in values["configs"]] == [False, True]
    model.load_adapter(tmp_path / "a", load_as="b")
    assert adapter_bits(model, "b") == adapter_bits(model, "a")
    assert model.adapters_config["b"] == model.adapters_config["a"]


def test_a_gated_lora_is_not_scaled_by_adapters(model, tmp_path):
    gated = LoRAConfig(use_gating=True, convention="adapterhub", r=4, alpha=4)
    model.add_adapter("a", gated)
    stir(model, "a")
    model.save_adapter(tmp_path / "a", "a", with_head=False, format="adapterhub")
    model.load_adapter(tmp_path / "a", load_as="b")
    assert adapter_bits(model, "b") == adapter_bits(model, "a")
    # whatever alpha its config says, there the gate alone multiplies the update
    document(tmp_path / "a", config(alpha=16))
    model.load_adapter(tmp_path / "a", load_as="c")
    assert model.adapters_config["c"].alpha == 4
    model.add_adapter("d", gated.replace(alpha=16))
    with refused(model, CheckpointError, "alpha / r = 16 / 4", "format='native'"):
        model.save_adapter(tmp_path / "d", "d", with_head=False, format="adapterhub")


def test_dora_in_a_fused_layer(tiny, tmp_path):
    # the peer makes and saves such adapters, though it cannot run them
    model = tiny("gpt2")
    matrices = "attn_matrices=['v','q','k']"
    model.add_adapter("a", f"dora[convention='adapterhub',{matrices}]")
    stir(model, "a")
    model.add_adapter("b", f"lora[{matrices}]")
    model.save_adapter(tmp_path, "b", format="adapterhub")

    def with_magnitudes(found):
        made = {}
        for path, parts in model.adapter_modules("a"):
            start = f"transformer.{path}.loras.b."
            assert f"{start}lora_A" in found
            each = [parts.get_submodule(role) for role in ("query", "key", "value")]
            made[f"{start}lora_A"] = torch.cat([part.lora_A.detach() for part in each])
            made[f"{start}lora_B"] = torch.cat([part.lora_B.detach() for part in each])
            made[f"{start}m.weight"] = torch.cat([part.m.detach() for part in each])[:, None]
        return made

    tensors(tmp_path, with_magnitudes)
    document(tmp_path, config(use_dora=True))
    model.load_adapter(tmp_path, load_as="c")
    assert adapter_bits(model, "c") == adapter_bits(model, "a")
    assert model.adapters_config["c"] == model.adapters_config["a"]


# --- other layers than those that the flags name ---


def test_the_keys_decide_which_feed_forward_layer_it_is(tiny, tmp_path):
    model = tiny("llama")
    model.add_adapter("a", "lora[selfattn_lora=False,output_lora=True]")
    model.save_adapter(tmp_path / "a", "a", format="adapterhub")
    for swapped in (True, False):
        # as the peer says it, and as a release without the swap would
        document(tmp_path / "a", config(intermediate_lora=swapped, output_lora=not swapped))
        model.load_adapter(tmp_path / "a", load_as="b", overwrite_ok=True)
        assert adapter_bits(model, "b") == adapter_bits(model, "a")
        assert all(path.endswith("down_proj") for path, _ in model.adapter_modules("b"))


def test_an_adapted_gate(tiny, tmp_path):
    model = tiny("llama")
    model.add_adapter("a", "lora[intermediate_lora=True]")
    model.save_adapter(tmp_path / "a", "a", format="adapterhub")
    tensors(tmp_path / "a", renamed(".mlp.up_proj.", ".mlp.gate_proj."))
    model.load_adapter(tmp_path / "a", load_as="b")
    ends = {path.rpartition(".")[2] for path, _ in model.adapter_modules("b")}
    assert ends == {"q_proj", "v_proj", "gate_proj"}
    tensors(tmp_path / "a", lambda t: {k: v for k, v in t.items() if "layers.1.mlp" not in k})
    with refused(model, CheckpointError, "2 differences", "mlp.gate_proj/lora_A   in the model"):
        model.load_adapter(tmp_path / "a", load_as="c")


def test_parts_that_are_interleaved_are_refused(tmp_path):
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = AutoAdapterModel.from_config(DebertaConfig(vocab_size=99, intermediate_size=8, **sizes))
    model.add_adapter("a", "lora[selfattn_lora=False,intermediate_lora=True]")
    model.save_adapter(tmp_path / "a", "a", format="adapterhub")
    model.add_adapter("b", "lora")
    with refused(model, CheckpointError, "uses other rows", "format='native'"):
        model.save_adapter(tmp_path / "b", "b", format="adapterhub")
    tensors(tmp_path / "a", renamed("intermediate.dense", "attention.self.in_proj"))
    document(tmp_path / "a", config(selfattn_lora=True, intermediate_lora=False))
    with refused(model, CheckpointError, "uses other rows", "format='native'"):
        model.load_adapter(tmp_path / "a", load_as="c")


# --- methods that do not exist here ---


@pytest.mark.parametrize(
    ("method", "fields", "feature"),
    [("double_seq_bn", {"architecture": "twist"}, "architecture='twist'"),
     ("lora", {"architecture": "twist"}, "architecture='twist'"),
     ("lora", {"composition_mode": "twist"}, "architecture='lora', composition_mode='twist'"),
     ("dora", {"use_gating": True}, "use_gating=True"),
     ("lora", {"architecture": "union", "configs": [{"architecture": "x"}]}, "architecture='x'")],
)  # fmt: skip
def test_a_method_that_does_not_exist_is_named(model, golden, method, fields, feature):
    folder = golden(method)
    document(folder, config(**fields))
    with refused(model, CheckpointError, "no such method here", feature, "Nothing has been"):
        model.load_adapter(folder)


@pytest.mark.parametrize(
    "key",
    ["bert.invertible_adapters.golden.F.0.weight", "invertible_lang_adapters.golden.F.0.weight",
     "bert.shared_parameters.golden.phm_rule", "bert.twists.golden.wte.weight",
     "bert.encoder.layer.0.refts.golden.units.0.projection.weight"],
)  # fmt: skip
def test_tensors_of_another_method_are_named(model, golden, key):
    folder = golden("double_seq_bn")
    tensors(folder, lambda found: found.update({key: torch.ones(2)}))
    with refused(model, CheckpointError, f"{key}   in the file only", "nothing has been"):
        model.load_adapter(folder)


def test_invertible_adapters_that_a_file_lacks(model, golden):
    folder = golden("double_seq_bn")
    document(folder, config(inv_adapter="nice", inv_adapter_reduction_factor=2))
    with refused(model, CheckpointError, "F.0.weight", "in the model only", "nothing has been"):
        model.load_adapter(folder)
    key = "bert.invertible_adapters.golden.F.0.weight"
    tensors(folder, lambda found: found.update({key: torch.ones(2)}))
    with refused(model, CheckpointError, "F.0.weight", "[2]", "G.2.bias", "nothing has been"):
        model.load_adapter(folder)


def test_task_adapters_of_old_files_name_invertible_adapters_that_they_lack(model, golden):
    folder = golden("double_seq_bn")
    model.load_adapter(folder, load_as="now")
    document(folder, config(inv_adapter="nice", inv_adapter_reduction_factor=2))
    document(folder, lambda values: values.update(version="2.3.0"))
    model.load_adapter(folder, load_as="then")
    assert model.adapters_config["then"] == model.adapters_config["now"]


@pytest.mark.parametrize(
    ("family", "method", "placement"),
    [("gemma2", "double_seq_bn", "gemma2"), ("modernbert", "par_bn", "modernbert"),
     ("modernbert", "double_seq_bn", "paper"), ("gptj", "par_bn", "gptj"),
     ("gptj", "double_seq_bn", "paper"), ("albert", "double_seq_bn", "albert"),
     ("albert", "seq_bn", "paper"), ("beit", "par_bn", "beit"), ("beit", "seq_bn", "paper"),
     ("bert", "double_seq_bn", "paper")],
)  # fmt: skip
def test_what_the_peer_puts_elsewhere_is_a_placement(family, method, placement):
    """The numbers are in test_adapterhub_places."""
    config = AdapterConfig.load(method)
    there = adapterhub_spellings["bottleneck"].convention(family, config)
    assert there == config.replace(site_convention=placement)


def test_a_bottleneck_is_written_only_with_its_placement_there(tiny, tmp_path):
    model = tiny("albert")
    model.add_adapter("a", "seq_bn")
    model.save_adapter(tmp_path / "a", "a", format="adapterhub")
    model.add_adapter("b", "double_seq_bn")
    with refused(model, CheckpointError, "site_convention='albert'", "Train it again"):
        model.save_adapter(tmp_path / "b", "b", format="adapterhub")
    assert not (tmp_path / "b").exists()
    model.add_adapter("c", "double_seq_bn[site_convention='albert']")
    model.save_adapter(tmp_path / "c", "c", format="adapterhub")
    other = tiny("bert")
    with pytest.raises(SiteError, match=r"site_convention='gemma2'.*self_attn.o_proj.*'paper'"):
        other.add_adapter("c", "double_seq_bn[site_convention='gemma2']")


def test_a_head_that_the_peer_scales_is_neither_read_nor_written(tiny, tmp_path):
    model = tiny("t5")
    model.add_adapter("a", "lora")
    model.add_classification_head("a")
    model.save_adapter(tmp_path / "a", "a", format="adapterhub")
    model.add_qa_head("a", overwrite_ok=True)
    with refused(model, CheckpointError, "'question_answering'", "with_head=False"):
        model.save_adapter(tmp_path / "b", "a", format="adapterhub")
    document(tmp_path / "a", config(head_type="question_answering"), "head")
    with refused(model, CheckpointError, "'question_answering'", "with_head=False"):
        model.load_adapter(tmp_path / "a", load_as="b")


# --- values that are wrong ---

WILD = (None, -1, 1e308, "../..", [[]], {"a": "b"})


@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "name"), [("double_seq_bn", "adapter"), ("lora", "adapter"), ("lora", "head")]
)
def test_every_field_with_wild_values_loads_or_is_refused(model, golden, method, name):
    folder = golden(method)
    file = folder / f"{name}_config.json"
    values = json.loads(file.read_text())
    fields = [(values, key) for key in values] + [(values["config"], k) for k in values["config"]]
    loaded = 0
    for owner, key in fields:
        kept = owner[key]
        for wild in WILD:
            owner[key] = wild
            file.write_text(json.dumps(values))
            try:
                model.load_adapter(folder, load_as="wild")
            except AdapterZooError:
                assert not model.adapters_config, (key, wild)
                assert not model.known_heads(), (key, wild)
            else:
                loaded += 1
                model.delete_adapter("wild")
                if model.known_heads():
                    model.delete_head("wild")
        owner[key] = kept
    assert 0 < loaded < len(fields) * len(WILD)
