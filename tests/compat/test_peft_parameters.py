"""LoRA of parameters, such as fused experts: PEFT's `target_parameters`, both ways."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from families import _MOE, tiny_config
from peft.utils import transformers_weight_conversion as conversion
from peft_world import CONFIG, QUIET, TENSORS, change
from safetensors.torch import load_file, save_file
from snapshots import snapshot
from torch import Tensor
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

import adapterzoo
import adapterzoo.peft
from adapterzoo import BOFTConfig, DoRAConfig, LoRAConfig, Stack
from adapterzoo.errors import CheckpointError, ConfigError, SiteError
from adapterzoo.methods._copies import all_placements
from adapterzoo.model.hf.info import split_experts

pytestmark = [
    pytest.mark.filterwarnings(line)
    for line in (*QUIET, "ignore:The following .*_pattern keys did not match:RuntimeWarning")
]

# stored [d_out, d_in]; [d_in, d_out] with biases; [d_in, d_out], of which the module says nothing;
# beside shared experts and dense blocks
MODELS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "qwen3_moe": ("Qwen3MoeForCausalLM", None),
    "mixtral": ("MixtralForCausalLM", None),
    "gpt_oss": ("GptOssForCausalLM", {"layer_types": ["full_attention"] * 2}),
    "llama4_text": (
        "Llama4ForCausalLM",
        {"intermediate_size_mlp": 48, "no_rope_layers": [1, 1], "interleave_moe_layer_step": 1,
         "attn_temperature_tuning": False, "layer_types": ["full_attention"] * 2},
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
         "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4,
         "qk_nope_head_dim": 4, "v_head_dim": 8, "num_key_value_heads": 4, "head_dim": 4},
    ),
}  # fmt: skip
BOTH = ["experts.gate_up_proj", "experts.down_proj"]
INPUTS = {"input_ids": torch.arange(3, 17).reshape(2, 7)}


@functools.cache
def _made(family: str) -> Any:
    name, more = MODELS[family]
    config = tiny_config(family) if more is None else AutoConfig.for_model(family, **_MOE | more)
    # the other ways to run experts have no float64
    config._experts_implementation = "eager"
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(3)
        model = getattr(transformers, name)(config).eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.2)
    return model.double()


def plain(family: str) -> Any:
    """A transformers model in float64, of the same weights each time."""
    return copy.deepcopy(_made(family))


def ours(family: str, config: Any = None) -> Any:
    model = plain(family)
    adapterzoo.init(model)
    if config is not None:
        model.add_adapter("a", config)
        model.set_active_adapters("a")
        stir(model)
    return model


def stir(model: Any) -> None:
    source = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn(parameter.shape, generator=source) * 0.1)


def theirs(family: str, **fields: Any) -> Any:
    """PEFT's model with random values."""
    fields = {"r": 2, "lora_alpha": 4, "task_type": "CAUSAL_LM", **fields}
    config = peft.LoraConfig(**fields)
    model = peft.get_peft_model(plain(family), config, autocast_adapter_dtype=False)
    stir(model)
    return model


def logits(model: Any, **more: Any) -> Tensor:
    with torch.no_grad():
        return model(**INPUTS, **more).logits


def near(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def loaded(family: str, folder: Path) -> Any:
    model = ours(family)
    model.load_adapter(folder, load_as="a", set_active=True)
    return model


def in_peft(family: str, folder: Path) -> Tensor:
    model = peft.PeftModel.from_pretrained(plain(family), folder, autocast_adapter_dtype=False)
    return logits(model)


CASES: dict[str, dict[str, Any]] = {
    "both": {"target_parameters": BOTH},
    "one, by its name": {"target_parameters": ["down_proj"], "target_modules": []},
    "beside layers": {"target_parameters": ["gate_up_proj"], "target_modules": ["o_proj"]},
    "named twice, in one block": {
        "target_parameters": [f"layers.1.mlp.{BOTH[0]}", f"model.layers.1.mlp.{BOTH[0]}"]
    },
    "ranks of their own": {
        "target_parameters": BOTH, "use_rslora": True, "rank_pattern": {"gate_up_proj": 3},
        "alpha_pattern": {r"experts\.down_proj": 5},
    },
    "a router": {"target_parameters": ["gate.weight", "experts.down_proj"]},
    "a layer and a table": {"target_parameters": ["o_proj.weight", "embed_tokens.weight"]},
    "trained beside": {"target_parameters": BOTH, "trainable_token_indices": [1, 2]},
}  # fmt: skip
ROWS = [(family, "both") for family in MODELS] + [
    *(("qwen3_moe", case) for case in CASES if case != "both"),
    ("gpt_oss", "ranks of their own"),
    ("llama4_text", "beside layers"),
]


@pytest.mark.parametrize(("family", "case"), ROWS)
def test_both_ways(family, case, tmp_path):
    model = theirs(family, **CASES[case])
    expected = logits(model)
    assert (expected - logits(plain(family))).abs().max() > 0.1
    model.save_pretrained(tmp_path / "theirs")
    mine = loaded(family, tmp_path / "theirs")
    near(logits(mine), expected)
    mine.save_adapter(tmp_path / "ours", "a", format="peft")
    near(in_peft(family, tmp_path / "ours"), expected)
    both = [load_file(tmp_path / name / TENSORS) for name in ("theirs", "ours")]
    if case != "a layer and a table":
        assert all(torch.equal(both[0][key], both[1][key]) for key in both[0])
        assert both[0].keys() == both[1].keys()
    mine.save_adapter(tmp_path / "native", "a")
    near(logits(loaded(family, tmp_path / "native")), expected)


@pytest.mark.parametrize("family", MODELS)
def test_a_config_adapts_what_it_adapts_in_peft(family):
    """PEFT's own objects, our spelling of them, and `adapterzoo.peft`."""
    fields = {"r": 2, "target_parameters": BOTH, "target_modules": ["o_proj"]}
    model = theirs(family, **fields)
    sizes = sorted(p.numel() for n, p in model.named_parameters() if "lora_" in n)
    base = plain(family)
    made = [
        ours(family, peft.LoraConfig(**fields)),
        ours(family, LoRAConfig(**fields)),
        adapterzoo.peft.get_peft_model(base, adapterzoo.peft.LoraConfig(**fields)),
    ]
    for each in made:
        own = [p for n, p in each.named_parameters() if "lora_" in n]
        assert sorted(p.numel() for p in own) == sizes
    for each in (made[0], made[1]):
        assert each.adapters_config["a"].target_parameters == tuple(sorted(BOTH)) or BOTH


# the names that layers had before transformers 5
FORMER: dict[str, tuple[str, Any]] = {
    "all linear": ("qwen3_moe", "all-linear"),
    "all linear, beside dense layers": ("deepseek_v3", "all-linear"),
    "all linear, of other types": ("gpt_oss", "all-linear"),
    "names": ("mixtral", ["q_proj", "w1", "w2", "w3"]),
    "names of dense layers too": ("deepseek_v3", ["gate_proj", "up_proj", "down_proj"]),
    "an expression": ("qwen3_moe", r".*\.(q_proj|gate_proj|up_proj)"),
    "a router": ("mixtral", ["q_proj", "gate"]),
}


@pytest.mark.parametrize("case", FORMER)
def test_former_names_of_experts_mean_their_parameters_as_in_peft(case, tmp_path):
    family, targets = FORMER[case]
    given = {"r": 2, "target_modules": targets}
    if family != "deepseek_v3":
        given["rank_pattern"] = {"q_proj": 3}
    model = theirs(family, **given)
    model.save_pretrained(tmp_path / "theirs")
    mine = ours(family, peft.LoraConfig(**given))
    mine.save_adapter(tmp_path / "ours", "a", format="peft")
    found, expected = (load_file(tmp_path / n / TENSORS) for n in ("ours", "theirs"))
    assert {k: t.shape for k, t in found.items()} == {k: t.shape for k, t in expected.items()}
    near(logits(loaded(family, tmp_path / "theirs")), logits(model))
    near(in_peft(family, tmp_path / "ours"), logits(mine))


def test_the_former_names_are_those_that_peft_knows():
    types = {*CONFIG_MAPPING_NAMES} & {*conversion._MODEL_TO_CONVERSION_PATTERN}
    assert {"mixtral", "qwen3_moe", "deepseek_v3"} <= types
    for kind in types | {"bert", "gpt_oss", "llama4", "qwen2_moe"}:
        alike = conversion._MODEL_TO_CONVERSION_PATTERN.get(kind)
        expected = conversion._MOE_TARGET_MODULE_MAPPING.get(alike, {})
        found = {layer: p for p, layers in split_experts(kind).items() for layer in layers}
        assert found == expected, kind
        for parameter, layers in conversion._MOE_FUSED_TARGETS.get(alike, {}).items():
            assert split_experts(kind)[parameter] == tuple(layers)


def test_one_of_two_former_layers_is_not_enough():
    model = ours("mixtral")
    with pytest.raises(ConfigError, match=r"\['q_proj', 'w1'\] lacks 'w3'"):
        model.add_adapter("a", peft.LoraConfig(target_modules=["w1", "q_proj"]))


@pytest.mark.parametrize("name", ["down_proj", "shared_experts.up_proj"])
def test_layers_whose_names_peft_takes_for_experts_are_written_as_parameters(name, tmp_path):
    """Under `target_modules` PEFT would adapt the experts instead, or nothing."""
    config = LoRAConfig(r=2, target_modules=[name, "o_proj"], rank_pattern={name: 3})
    model = ours("deepseek_v3", config)
    model.save_adapter(tmp_path, "a", format="peft")
    near(in_peft("deepseek_v3", tmp_path), logits(model))
    near(logits(loaded("deepseek_v3", tmp_path)), logits(model))
    for other in (config.replace(dropout=0.1), DoRAConfig(r=2, target_modules=[name])):
        model.add_adapter("b", other, overwrite_ok=True)
        with pytest.raises(CheckpointError, match=name.rpartition(".")[2]):
            model.save_adapter(tmp_path, "b", format="peft")


def test_only_the_parameters_are_adapted_without_names_of_layers():
    config = LoRAConfig(target_parameters=BOTH)
    assert LoRAConfig(target_parameters=BOTH, target_modules=[]) != config
    for given in (config, config.replace(target_modules=())):
        model = ours("qwen3_moe", given)
        names = {n.partition(".loras.")[0].rpartition(".")[2] for n, _ in named(model)}
        assert names == {"experts"}


def named(model: Any) -> list[tuple[str, Any]]:
    return [(n, p) for n, p in model.named_parameters() if "lora_" in n]


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "llama4_text"])
def test_gradients_and_a_step_are_those_of_peft(family, tmp_path):
    model = theirs(family, target_parameters=BOTH)
    model.save_pretrained(tmp_path / "start")
    mine = loaded(family, tmp_path / "start")
    mine.train_adapter("a")
    labels = {"labels": INPUTS["input_ids"]}
    losses = [each(**INPUTS, **labels).loss for each in (model, mine)]
    near(losses[0], losses[1])
    # both save gradients as they save values
    for loss, each in zip(losses, (model, mine), strict=True):
        loss.backward()
        optimizer = torch.optim.SGD((p for p in each.parameters() if p.requires_grad), lr=0.5)
        optimizer.step()
    model.save_pretrained(tmp_path / "theirs")
    mine.save_adapter(tmp_path / "ours", "a", format="peft")
    start, one, other = (load_file(tmp_path / n / TENSORS) for n in ("start", "theirs", "ours"))
    assert start.keys() == one.keys() == other.keys()
    for key in one:
        near(one[key], other[key])
        assert (one[key] - start[key]).abs().max() > 1e-6


@pytest.mark.parametrize("start", ["pissa", "olora", "orthogonal", "gaussian"])
def test_initial_values_of_experts_are_saved_as_a_plain_lora(start, tmp_path):
    """PEFT has only "gaussian" there; those that come from a weight are those of each expert."""
    config = LoRAConfig(r=2, init_weights=start, target_parameters=BOTH)
    model = plain("gpt_oss")
    adapterzoo.init(model)
    model.add_adapter("a", config, set_active=True)
    # values are drawn in float32
    torch.testing.assert_close(logits(model), logits(plain("gpt_oss")), rtol=0, atol=1e-5)
    stir(model)
    assert (logits(model) - logits(plain("gpt_oss"))).abs().max() > 0.1
    model.save_adapter(tmp_path, "a", format="peft")
    near(in_peft("gpt_oss", tmp_path), logits(model))


def test_roles_at_experts_are_written_as_parameters(tmp_path):
    """The up projection is a part of `gate_up_proj`: PEFT's B has zeros for the gate."""
    model = ours("mixtral", LoRAConfig(r=2, intermediate_lora=True, output_lora=True))
    model.save_adapter(tmp_path, "a", format="peft")
    near(in_peft("mixtral", tmp_path), logits(model))
    config = json.loads((tmp_path / CONFIG).read_text())
    assert config["target_parameters"] == ["down_proj", "gate_up_proj"]
    assert config["target_modules"] == ["q_proj", "v_proj"]
    near(logits(loaded("mixtral", tmp_path)), logits(model))


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "phi3"])
def test_the_up_projection_of_a_fused_layer_is_adapted_once(family, tiny):
    model = tiny(family) if family == "phi3" else ours(family)
    config = LoRAConfig(selfattn_lora=False, intermediate_lora=True)
    sites = [p.site for p in all_placements(config, model.anatomy)]
    assert len(sites) == len({s.path for s in sites}) == len(model.anatomy.blocks)
    assert all(s.output_slice is not None for s in sites)


def test_what_acts_on_adapters_acts_on_these(tmp_path):
    model = ours("qwen3_moe")
    first, base = snapshot(model), logits(model)
    config = LoRAConfig(r=2, target_parameters=BOTH, target_modules=["q_proj"])
    model.add_adapter("a", config, set_active=True)
    stir(model)
    before = logits(model)
    model.add_adapter("b", LoRAConfig(r=2, target_parameters=["down_proj"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".b." in name and "lora_" in name:
                parameter.normal_(std=0.2)
    # one at a time, both, none
    model.set_active_adapters(Stack("a", "b"))
    stacked = logits(model)
    model.set_active_adapters("b")
    alone = logits(model)
    assert min((x - y).abs().max() for x, y in ((stacked, before), (alone, base))) > 1e-3
    model.set_active_adapters(None)
    near(logits(model), base)
    # merged and reset
    model.set_active_adapters(Stack("a", "b"))
    model.merge_adapter(["a", "b"])
    near(logits(model), stacked)
    model.reset_adapter()
    near(logits(model), stacked)
    model.set_active_adapters(None)
    assert torch.equal(logits(model), base)
    # a sum of changes, of configs with other targets
    model.average_adapter(
        "sum", ["a", "b"], [1.0, 1.0], combine_strategy="cat", normalize_weights=False
    )
    model.set_active_adapters("sum")
    near(logits(model), stacked)
    model.save_adapter(tmp_path / "sum", "sum", format="peft")
    near(in_peft("qwen3_moe", tmp_path / "sum"), stacked)
    # slots
    model.save_adapter(tmp_path / "a", "a", format="peft")
    model.set_active_adapters(None)
    model.delete_adapter("sum")
    slot = ours("qwen3_moe", config.replace(r=4))
    slot.load_adapter(tmp_path / "a", load_as="a", hotswap=True)
    near(logits(slot), before)
    model.delete_adapter("a")
    model.delete_adapter("b")
    assert snapshot(model) == first


def test_rows_of_a_batch_take_their_own_adapters_at_experts():
    model = ours("qwen3_moe", LoRAConfig(r=2, target_parameters=BOTH))
    model.add_adapter("b", LoRAConfig(r=2, target_parameters=BOTH))
    stir(model)
    alone = []
    for row, name in enumerate(["a", "b"]):
        model.set_active_adapters(name)
        alone.append(logits(model)[row])
    near(logits(model, adapter_names=["a", "b"]), torch.stack(alone))
    assert not torch.allclose(*alone)


def test_other_methods_take_parameters_too_and_are_not_written_for_peft(tmp_path):
    for config in (DoRAConfig(r=2, target_parameters=BOTH), BOFTConfig(
        boft_block_size=4, target_parameters=["down_proj"]
    )):  # fmt: skip
        model = ours("qwen3_moe", config)
        with pytest.raises(CheckpointError, match=r"parameter '.*_proj'"):
            model.save_adapter(tmp_path, "a", format="peft")
        assert not [*tmp_path.iterdir()]


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no such name": (
        {"target_parameters": ["bogus", *BOTH]},
        SiteError,
        r"matches 'bogus'.*'experts.down_proj', 'experts.gate_up_proj', 'gate.weight'",
    ),
    "a vector": ({"target_parameters": ["norm.weight"]}, SiteError, "two or three dimensions"),
    "a text": ({"target_parameters": "down_proj"}, ConfigError, r"Write target_parameters=\['down"),
    "nothing": ({"target_modules": []}, ConfigError, "nothing is left to adapt"),
    "a layer in two ways": (
        {"target_parameters": ["q_proj.weight"], "target_modules": ["q_proj"]},
        SiteError,
        r"also has 'layers.0.self_attn.q_proj'",
    ),
    "dropout": ({"target_parameters": BOTH, "lora_dropout": 0.1}, ConfigError, "dropout=0.0"),
    "a bias of B": ({"target_parameters": BOTH, "lora_bias": True}, ConfigError, "lora_bias=False"),
    "eva": ({"target_parameters": BOTH, "init_lora_weights": "eva"}, ConfigError, "whole linear"),
    "a pattern": (
        {"target_parameters": BOTH, "rank_pattern": {"q_proj": 2}}, SiteError, "no adapted layer"
    ),
    "all left out": (
        {"target_parameters": BOTH, "exclude_modules": ["experts"]}, ConfigError, "field leaves out"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    fields, error, message = REFUSED[case]
    model = ours("qwen3_moe")
    before = snapshot(model)
    for cls in (adapterzoo.peft.LoraConfig, LoRAConfig):
        with pytest.raises(error, match=message):
            model.add_adapter("a", cls(**fields))
    assert snapshot(model) == before


def test_damaged_files_are_refused(tmp_path):
    theirs("qwen3_moe", target_parameters=BOTH).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / TENSORS)
    outer = {k: t for k, t in tensors.items() if ".base_layer." not in k}
    again = {k.replace(".base_layer.", ".base_layer.base_layer."): t for k, t in tensors.items()}
    odd = {k: t[:-1] if "lora_A" in k else t[:, :-1] for k, t in tensors.items()}
    for values, fields, message in (
        (outer, {}, "do not fit together: none"),
        (again, {}, "do not fit together: none"),
        (odd, {}, "do not fit together: lora_A"),
        (tensors, {"r": 3}, r"model \[4, 3, "),
        (tensors, {"target_parameters": ["down_proj"]}, "in the file only"),
        (tensors, {"target_parameters": None}, "in the file only"),
        (tensors, {"target_parameters": "down_proj"}, "a list of names"),
        (tensors, {"init_lora_weights": "pissa"}, "changed the weight"),
    ):
        config = json.loads((tmp_path / CONFIG).read_text())
        save_file({k: t.contiguous() for k, t in values.items()}, tmp_path / TENSORS)
        change(tmp_path, **fields)
        model = ours("qwen3_moe")
        before = snapshot(model)
        with pytest.raises(CheckpointError, match=message):
            model.load_adapter(tmp_path, load_as="a")
        assert snapshot(model) == before
        change(tmp_path, **config)
