"""Reports on adapters: what they reach, cost and change, against counts and merged weights."""

from __future__ import annotations

import json
import math
import re
import sys
import warnings

import pytest
import torch
from families import tiny_config, tiny_inputs
from ranks import run_ranks
from swept import all_but
from test_conformance import CONFIGS
from torch import nn
from transformers import (
    AutoModel,
    BambaConfig,
    BambaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    TrainingArguments,
)

import adapterzoo
from adapterzoo import AdapterTrainer, AutoAdapterModel, Fuse
from adapterzoo.contracts import WeightAdapter
from adapterzoo.errors import ConfigError, StateError, UnknownNameError
from adapterzoo.model.report.callback import ReportCallback

# an encoder, fused layers, two stacks, experts
FAMILIES = ("bert", "gpt2", "t5", "mixtral")
EACH = [(text, family) for text in CONFIGS for family in FAMILIES]
QUICK = [(text, family) for text, family in EACH if family in ("bert", "gpt2") or text == "lora"]
IDS = torch.arange(1, 9)[None]


def base_of(family, dtype=torch.float64):
    torch.manual_seed(0)
    config = tiny_config(family)
    # the other implementations do not take float64
    config._experts_implementation = "eager"
    return AutoModel.from_config(config).to(dtype).eval()


def hybrid(attention=(2,)):
    """Attention in some of four blocks, state-space mixers in the others."""
    torch.manual_seed(0)
    config = BambaConfig(
        vocab_size=99, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, attn_layer_indices=list(attention),
        mamba_n_heads=8, mamba_d_head=8, mamba_d_state=16, mamba_n_groups=1, mamba_expand=2,
        mamba_chunk_size=8,
    )  # fmt: skip
    return BambaForCausalLM(config)


def llama(layers=2):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=99, hidden_size=32, intermediate_size=64, num_hidden_layers=layers,
        num_attention_heads=4,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def adapted(base, config, name="a", trained=True):
    model = adapterzoo.init(base)
    torch.manual_seed(1)
    model.add_adapter(name, config)
    if trained:
        model.train_adapter(name)
        filled(model, name)
    return model


@torch.no_grad()
def filled(model, name):
    torch.manual_seed(1)
    for _, module in model.adapter_modules(name):
        for p in module.parameters():
            p.add_(0.02 * torch.randn_like(p))


def snapshot(model):
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return (
        {name: t.detach().clone() for name, t in tensors.items()},
        {name: p.requires_grad for name, p in model.named_parameters()},
        {name: p.grad for name, p in model.named_parameters()},
        {name: module.training for name, module in model.named_modules()},
    )


def same(one, other):
    return all(torch.equal(t, other[0][n]) for n, t in one[0].items()) and one[1:] == other[1:]


# --- every method, several models ---


@pytest.mark.parametrize(("text", "family"), all_but(QUICK, EACH))
def test_changes_are_those_of_merging_and_nothing_changes(text, family):
    model = adapted(base_of(family), CONFIGS[text])
    before = snapshot(model)
    report = model.adapter_report("a")
    assert same(before, snapshot(model))
    # no backward pass, so nothing is known
    assert all(site.is_dead is None for site in report.sites)
    modules = dict(model.adapter_modules("a"))
    own = {id(p): p.numel() for module in modules.values() for p in module.parameters()}
    assert report.parameters == sum(own.values()) == sum(s.parameters for s in report.sites)
    assert report.base_parameters == sum(p.numel() for p in base_of(family).parameters())
    assert report.bytes_per_token >= 0
    assert str(report)
    assert json.loads(json.dumps(report.to_dict()))["adapter"] == "a"
    weights = {n: p.detach().clone() for n, p in plain_parameters(model).items()}
    try:
        model.merge_adapter("a")
    except StateError:
        for path, module in modules.items():
            found = [s for s in report.sites if path and s.path == path]
            if not isinstance(module, WeightAdapter):
                assert all(site.change is None for site in found), path
        return
    merged = plain_parameters(model)
    sites = {s.path: s for s in report.sites if s.path}
    layers = {re.sub(r"\.(query|key|value)$", "", p) if "c_attn" in p else p for p in sites}
    for path in layers:
        names = [f"{path}.weight", *([f"{path}.bias"] if text == "ln_tuning" else [])]
        names = [path] if path in weights else [name for name in names if name in weights]
        found = [s for p, s in sites.items() if p.startswith(path)]
        change = math.hypot(*(float((merged[n] - weights[n]).norm()) for n in names))
        assert math.hypot(*(s.change for s in found)) == pytest.approx(change, rel=1e-9), path
        assert change > 0
        if [s.path for s in found] == [path]:
            weight = math.hypot(*(float(weights[n].norm()) for n in names))
            assert found[0].weight == pytest.approx(weight, rel=1e-9)
            assert found[0].relative == pytest.approx(change / weight, rel=1e-9)


def plain_parameters(model):
    """The base model's parameters by their names without the adapters."""
    return {
        n: p for n, p in model.named_parameters() if ".adapters." not in n and ".loras." not in n
    }


def test_a_part_of_a_fused_layer_is_compared_with_that_part():
    model = adapted(base_of("gpt2"), "lora[r=2]")
    report = model.adapter_report("a")
    layer = model.h[0].attn.c_attn
    before = layer.weight.detach().clone()  # [d, 3 d]
    model.merge_adapter("a")
    for role, columns in (("query", slice(0, 32)), ("value", slice(64, 96))):
        site = next(s for s in report.sites if s.path == f"h.0.attn.c_attn.{role}")
        change, weight = layer.weight[:, columns] - before[:, columns], before[:, columns]
        assert site.change == pytest.approx(float(change.norm()), rel=1e-9)
        assert site.weight == pytest.approx(float(weight.norm()), rel=1e-9)
    assert "key" in report.shown_kinds()
    assert "qkv" not in report.shown_kinds()


def test_experts_are_one_site_for_each_parameter():
    model = adapted(
        base_of("mixtral"),
        adapterzoo.LoRAConfig(r=2, target_parameters=["gate_up_proj", "down_proj"]),
    )
    report = model.adapter_report("a")
    experts = model.layers[0].mlp.experts
    names = "gate_up_proj", "down_proj"
    before = {n: experts._parameters[n].detach().clone() for n in names}
    model.merge_adapter("a")
    found = {s.path: s for s in report.sites if s.block == 0}
    assert len(found) == 2
    for name in names:
        (site,) = [s for path, s in found.items() if f"experts.{name}" in path]
        change = experts._parameters[name].detach() - before[name]
        assert site.change == pytest.approx(float(change.norm()), rel=1e-9)
        assert site.weight == pytest.approx(float(before[name].norm()), rel=1e-9)


def test_a_merged_adapter_is_compared_with_the_weights_before():
    model = adapted(base_of("bert"), "dora")
    before = {s.path: s.relative for s in model.adapter_report("a").sites}
    model.merge_adapter("a")
    after = model.adapter_report("a")
    assert {s.path: s.relative for s in after.sites} == pytest.approx(before, rel=1e-9)
    assert "merged" in after.note


def test_zero_change_is_zero():
    report = adapted(llama(), "lora", trained=False).adapter_report("a")
    assert {s.relative for s in report.sites} == {0.0}
    assert not report.faults()


# --- what it reaches ---


def test_blocks_that_nobody_chose_to_leave_out():
    model = adapted(hybrid(), "lora[target_modules=['q_proj','v_proj']]")
    report = model.adapter_report("a")
    assert report.blocks_left_out == report.blocks_of_other_kinds == (0, 1, 3)
    assert report.left_out == {}
    assert {s.block for s in report.sites} == {2}
    assert report.summary[1:] == (
        "it acts at 2 places, in 1 of 4 blocks (query, value in 1 of 1)",
        "left out: blocks 0, 1, 3",
    )
    (fault,) = report.faults()
    assert fault.startswith("no adapter in blocks 0, 1, 3, which have no query or value")
    # what it says to write
    (hint,) = re.findall(r"target_modules='all-linear'", fault)
    model.add_adapter("b", f"lora[{hint}]")
    report = model.adapter_report("b")
    assert report.blocks_left_out == ()
    assert not report.faults()
    assert report.summary[2] == "left out: nothing"
    kinds = {"query", "key", "value", "attention_out", "mlp_gate", "mlp_in", "mlp_out"}
    assert set(report.kinds) == kinds | {"mixer_in", "mixer_out"}


def test_what_a_config_leaves_out_is_no_fault():
    model = adapted(llama(4), "lora[target_modules=['q_proj','o_proj'],layers_to_transform=[1,2]]")
    model.add_adapter("b", "lora[target_modules=['q_proj','o_proj'],exclude_modules='.*1.*q_proj']")
    model.add_adapter("c", "seq_bn[leave_out=[0]]")
    one, two, three = (model.adapter_report(name) for name in "abc")
    assert one.left_out == {"query": (0, 3), "attention_out": (0, 3)}
    assert one.blocks_left_out == (0, 3)
    assert two.left_out == {"query": (1,)}
    assert two.blocks_left_out == ()
    assert two.summary[2] == "left out: query in block 1"
    assert three.left_out == {"output_adapter": (0,)}
    assert not any(report.faults() for report in (one, two, three))
    words = {(n, kind): str(cell) for n, kind, cell in two.cells()}
    assert words[1, "query"] == "left out"
    assert words[0, "query"] == words[0, "attention_out"] == "0"


def test_attention_alone_takes_a_prefix():
    report = adapted(hybrid(), "prefix_tuning").adapter_report("a")
    assert report.blocks_of_other_kinds == (0, 1, 3)
    assert report.kinds == ("self_prefix",)
    assert report.shown_kinds() == ("self_prefix",)


def test_places_outside_of_blocks():
    report = adapted(llama(), "lora[target_modules=['embed_tokens','lm_head']]").adapter_report("a")
    assert {s.path: s.block for s in report.sites} == {"embed_tokens": -1, "lm_head": -1}
    assert report.blocks_left_out == ()
    assert report.summary[1] == "it acts at 2 places, at 2 layers outside blocks"
    assert "embed_tokens" in str(report)


def test_heads_and_fusions():
    model = AutoAdapterModel.from_config(tiny_config("bert"))
    for name in "ab":
        model.add_adapter(name, "seq_bn")
    model.add_classification_head("a", num_labels=3, layers=1)
    model.train_adapter("a")
    (head,) = model.adapter_report("a").heads
    assert (head.name, head.parameters, head.is_trained) == ("a", 3 * 32 + 3, True)
    model.heads["a"].requires_grad_(False)
    assert "the head a is not trained" in model.adapter_report("a").faults()
    model.add_adapter_fusion(Fuse("a", "b"))
    report = model.adapter_report("a,b")
    assert report.method == "fusion"
    assert [s.block for s in report.sites] == [0, 1]
    layers = [m for _, m in model.named_modules() if type(m).__name__ == "Fusion"]
    assert report.parameters == sum(p.numel() for m in layers for p in m.parameters()) > 0
    assert report.bytes_per_token > 0
    with pytest.raises(UnknownNameError, match=r"adapter_report\('c'\): there is no adapter 'c'"):
        model.adapter_report("c")


# --- bytes ---


def test_bytes_of_lora_are_those_of_its_formula():
    """The input once for both layers that read it, and x Aᵀ of each, in 4 bytes."""
    model = adapted(llama(3), "lora[r=5,target_modules=['q_proj','v_proj']]")
    report = model.adapter_report("a")
    assert report.bytes_per_token == 3 * 4 * (32 + 5 + 5)
    given = {"input_ids": IDS.repeat(3, 1)}
    again = model.adapter_report("a", inputs=given)
    assert again.bytes_per_token == report.bytes_per_token
    assert again.unit == "token of rows of 8"


def test_bytes_of_a_bottleneck_on_pictures_are_counted_by_row():
    model = adapterzoo.init(AutoModel.from_config(tiny_config("vit")))
    model.add_adapter("a", "par_bn[reduction_factor=4]")
    report = model.adapter_report("a", inputs=tiny_inputs("vit"))
    assert report.unit == "row"
    # 4 patches and the class token: the input of the ReLU, 8 features in each of two blocks
    assert report.bytes_per_token >= 2 * 5 * 8 * 4


# --- gradients ---


def losing(model, upto=None):
    found = model(input_ids=IDS, output_hidden_states=True, use_cache=False)
    return found.hidden_states[-1 if upto is None else upto].pow(2).mean()


def test_sites_without_gradients_are_dead_after_a_backward_pass_only():
    model = adapted(llama(3), "lora")
    assert not model.adapter_report("a").dead
    # the output of the second block
    losing(model, 2).backward()
    report = model.adapter_report("a")
    assert report.dead == ("layers.2.self_attn.q_proj", "layers.2.self_attn.v_proj")
    assert report.faults() == (
        "no gradient at layers.2.self_attn.q_proj, layers.2.self_attn.v_proj",
    )
    assert "dead" in str(report)
    model.zero_grad(set_to_none=True)
    assert not model.adapter_report("a").dead


def test_a_start_of_zeros_is_not_dead():
    """The gradient of A is zero as long as B is, and that of a whole adapter under a head of 0."""
    model = adapted(llama(), "lora", trained=False)
    model.train_adapter("a")
    losing(model).backward()
    modules = [module for _, module in model.adapter_modules("a")]
    assert not any(bool(m.lora_A.grad.any()) for m in modules)
    report = model.adapter_report("a")
    assert {site.is_dead for site in report.sites} == {False}
    # zeros everywhere say nothing
    for module in modules:
        module.lora_B.grad.zero_()
    assert {site.is_dead for site in model.adapter_report("a").sites} == {None}
    # zeros at one of them do
    modules[0].lora_B.grad.fill_(1.0)
    assert len(model.adapter_report("a").dead) == 3


def test_shared_parameters_that_a_factor_of_zero_scales_are_not_dead():
    """The up-projections start at zero, and with them the gradient of all that layers share."""
    model = adapted(llama(), "compacter[init_weights='mam_adapter']", trained=False)
    model.train_adapter("a")
    losing(model).backward()
    report = model.adapter_report("a")
    assert {site.kind: site.is_dead for site in report.sites} == {
        "shared": None, "mh_adapter": False, "output_adapter": False
    }  # fmt: skip
    assert not report.faults()


def test_an_adapter_beside_the_loss_is_dead_as_a_whole():
    model = AutoAdapterModel.from_config(tiny_config("bert"))
    model.add_adapter("a", "lora")
    model.add_classification_head("a", num_labels=2)
    model.train_adapter("a")
    model.heads["a"](torch.randn(1, 4, 32)).sum().backward()
    report = model.adapter_report("a")
    assert len(report.dead) == len(report.sites) == 4
    assert [head.is_dead for head in report.heads] == [False]


def test_vision_layers_are_dead_in_a_batch_of_text():
    model = adapted(AutoModel.from_config(tiny_config("clip")), "lora", trained=False)
    model.train_adapter("a")
    text = {k: v for k, v in tiny_inputs("clip").items() if k != "pixel_values"}
    model.get_text_features(**text).pooler_output.sum().backward()
    report = model.adapter_report("a")
    assert report.dead
    assert all(path.startswith("vision_model") for path in report.dead)
    assert sum(s.path.startswith("vision_model") for s in report.sites) == len(report.dead)


# --- values ---


def test_nan_and_huge_changes_are_named():
    for config in ("lora", "boft", "dora", "loha"):
        model = adapted(llama(), config)
        modules = dict(model.adapter_modules("a"))
        first, second = list(modules)[:2]
        with torch.no_grad():
            next(p for p in modules[first].parameters() if p.requires_grad).fill_(math.nan)
        report = model.adapter_report("a")
        assert f"NaN or infinite values at {first}" in report.faults()
        found = {s.path: s.relative for s in report.sites}
        assert math.isnan(found[first])
        assert math.isfinite(found[second])
        assert json.loads(json.dumps(report.to_dict(), allow_nan=False))
    model = adapted(llama(), "lora")
    with torch.no_grad():
        next(model.adapter_modules("a"))[1].lora_B.mul_(1e3)
    (fault,) = model.adapter_report("a").faults()
    assert fault.startswith("a change larger than the weight itself at layers.0.self_attn.q_proj")


def test_nan_of_a_bottleneck_is_named():
    model = adapted(llama(), "seq_bn")
    with torch.no_grad():
        next(next(model.adapter_modules("a"))[1].parameters()).fill_(math.nan)
    assert any(fault.startswith("NaN") for fault in model.adapter_report("a").faults())


def test_half_precision_is_computed_in_float32():
    model = adapted(llama().to(torch.bfloat16), "lora")
    layer, module = model.model.layers[0].self_attn.q_proj, next(model.adapter_modules("a"))[1]
    a, b = module.lora_A.detach().double(), module.lora_B.detach().double()
    site = model.adapter_report("a").sites[0]
    assert site.change == pytest.approx(float((b @ a).norm()) * module.scaling, rel=1e-6)
    assert site.weight == pytest.approx(float(layer.weight.double().norm()), rel=1e-6)


def test_quantized_layers_are_read_one_by_one(tmp_path):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    llama().save_pretrained(tmp_path)
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    model = adapted(LlamaForCausalLM.from_pretrained(tmp_path, quantization_config=config), "lora")
    site = model.adapter_report("a").sites[0]
    weight = model.model.layers[0].self_attn.q_proj.weight
    plain = bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state)
    assert site.weight == pytest.approx(float(plain.double().norm()), rel=1e-6)
    assert site.relative > 0


def test_offloaded_layers_are_read_one_by_one(tmp_path):
    llama().save_pretrained(tmp_path / "base")
    whole = adapted(LlamaForCausalLM.from_pretrained(tmp_path / "base"), "lora")
    places = dict.fromkeys(
        ("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head"), "cpu"
    )
    parted = adapted(
        LlamaForCausalLM.from_pretrained(
            tmp_path / "base", device_map={**places, "model.layers.1": "disk"},
            offload_folder=tmp_path / "disk",
        ),
        "lora",
    )  # fmt: skip
    assert parted.model.layers[1].self_attn.q_proj.weight.is_meta
    one, other = (model.adapter_report("a") for model in (whole, parted))
    assert one.sites == other.sites
    assert parted.model.layers[1].self_attn.q_proj.weight.is_meta


def test_a_model_without_values_has_a_report_without_them():
    with torch.device("meta"):
        model = adapterzoo.init(LlamaForCausalLM(llama().config))
    model.add_adapter("a", "lora")
    report = model.adapter_report("a")
    assert len(report.sites) == 4
    assert {site.relative for site in report.sites} == {None}
    assert "bytes are not measured" in report.note


def test_any_module_of_torch_has_a_report():
    model = adapterzoo.init(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)))
    model.add_adapter("a", "lora[target_modules=['0','2'],r=2]")
    report = model.adapter_report("a", inputs={"input": torch.randn(3, 8)})
    assert [site.path for site in report.sites] == ["0", "2"]
    # Linear 0 gets x, Linear 2 what ReLU keeps anyway
    assert report.bytes_per_token == 4 * (8 + 2 + 2)
    assert "bytes are not measured" in model.adapter_report("a").note


@pytest.mark.sweep
def test_a_sharded_model_has_a_report_without_changes(tmp_path):
    ranks = run_ranks("report_rank.py", 2, tmp_path / "rendezvous", options=())
    assert ranks[0][-2:] == ranks[1][-2:]
    whole, sharded = map(json.loads, ranks[0][-2:])
    counted = ("adapter", "parameters", "base_parameters", "blocks", "blocks_left_out")
    assert {key: sharded[key] for key in counted} == {key: whole[key] for key in counted}
    assert whole["bytes_per_token"] > 0
    assert sharded["bytes_per_token"] is None
    assert sharded["note"].startswith("the model is sharded")
    assert {site["relative"] for site in sharded["sites"]} == {None}
    assert {site["relative"] for site in whole["sites"]} == {0.0}
    dead = [site["path"] for site in sharded["sites"] if site["dead"]]
    assert dead == ["layers.2.self_attn.q_proj", "layers.2.self_attn.v_proj"]


# --- the picture ---


def test_the_picture_says_what_the_table_says(tmp_path):
    pytest.importorskip("matplotlib")
    model = adapted(hybrid((2, 3)), "lora[target_modules=['q_proj','v_proj']]")
    losing(model, 3).backward()
    report = model.adapter_report("a")
    report.plot(tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text("utf-8")
    for word in ("layers.0 (left out)", ">dead<", "mixer", ">left out<", "fault: no gradient"):
        assert word in text, word
    assert all(line.split(" (")[0][:40] in text for line in report.summary)
    # the same bytes each time
    report.plot(tmp_path / "b.svg")
    assert (tmp_path / "b.svg").read_bytes() == (tmp_path / "a.svg").read_bytes()
    figure = report.plot()
    # what a notebook shows where pyplot has not been imported
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert figure.get_size_inches()[0] > 6
    with pytest.raises(ConfigError, match=r"no image suffix. Write 'report\.svg'"):
        report.plot(tmp_path / "report.txt")
    for config in ("seq_bn", "prompt_tuning"):
        adapted(llama(), config).adapter_report("a").plot(tmp_path / f"{config}.png")
    adapted(llama(70), "lora").adapter_report("a").plot(tmp_path / "many.png")


def test_a_picture_without_matplotlib_says_what_to_install(monkeypatch):
    report = adapted(llama(), "lora").adapter_report("a")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(StateError, match=r"Write pip install matplotlib\."):
        report.plot()


# --- the trainer ---


def rows():
    return [{"input_ids": IDS[0], "labels": IDS[0]} for _ in range(4)]


def trained(model, folder, cls=AdapterTrainer, **given):
    settings = TrainingArguments(
        folder, max_steps=2, use_cpu=True, report_to="none", save_strategy="no"
    )
    trainer = cls(model, settings, train_dataset=rows(), **given)
    trainer.train()
    return trainer


def test_the_trainer_prints_three_lines_once(tmp_path, capsys):
    model = adapted(llama(), "lora")
    trained(model, tmp_path)
    lines = list(model.adapter_report("a").summary)
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in printed if line in lines] == lines
    trained(model, tmp_path, report=False)
    assert not [line for line in capsys.readouterr().out.splitlines() if line in lines]


def test_another_trainer_takes_the_callback(tmp_path, capsys):
    from transformers import Trainer

    model = adapted(llama(), "lora")
    trained(model, tmp_path, Trainer, callbacks=[ReportCallback()])
    assert model.adapter_report("a").summary[0] in capsys.readouterr().out


def test_only_the_first_process_speaks(capsys):
    model = adapted(hybrid(), "lora[target_modules=['q_proj']]")

    class State:
        is_world_process_zero = False

    callback = ReportCallback()
    callback.on_train_begin(None, State, None, model=model)
    losing(model, 1)
    callback.on_pre_optimizer_step(None, State, None, model=model)
    assert not capsys.readouterr().out


def test_the_trainer_warns_of_blocks_left_out(tmp_path):
    model = adapted(hybrid(), "lora[target_modules=['q_proj','v_proj']]")
    with pytest.warns(UserWarning, match="adapter 'a': no adapter in blocks 0, 1, 3"):
        trained(model, tmp_path)


def test_the_trainer_warns_once_of_sites_without_gradients(tmp_path):
    model = adapted(llama(), "lora")
    model.model.layers[1].self_attn.v_proj.register_forward_hook(lambda m, i, y: y.detach())
    with pytest.warns(UserWarning, match=r"no gradient at .*layers\.1\.self_attn\.v_proj") as found:
        trained(model, tmp_path)
    assert len([w for w in found if "no gradient" in str(w.message)]) == 1


def test_the_trainer_says_nothing_of_a_good_adapter(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(adapted(hybrid(), "lora[target_modules='all-linear']"), tmp_path)
