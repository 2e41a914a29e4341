"""`convert_adapter`: exact where algebra allows, else by SVD, and a certificate that is true."""

from __future__ import annotations

import json
from typing import Any

import peft
import pytest
import torch
import transformers
from families import tiny_config, tiny_inputs
from peft_world import CLASSES, QUIET, ours
from snapshots import adapter_bits, refused, snapshot, state, stir

import adapterzoo
from adapterzoo import (
    AutoAdapterModel,
    BOFTConfig,
    DoRAConfig,
    IA3Config,
    LoHaConfig,
    LoKrConfig,
    LoRAConfig,
    MissConfig,
    MTLLoRAConfig,
    OFTConfig,
    VeraConfig,
)
from adapterzoo.errors import ConfigError, DuplicateNameError, StateError, UnknownNameError

pytestmark = [pytest.mark.filterwarnings(warning) for warning in QUIET]

ALL = {"target_modules": "all-linear"}
EXACT = {
    "lora": LoRAConfig(r=4, alpha=3, **ALL),
    "rslora": LoRAConfig(r=3, use_rslora=True),
    "pissa": LoRAConfig(r=4, init_weights="pissa"),
    "olora": LoRAConfig(r=4, alpha=5, init_weights="olora"),
    "vera": VeraConfig(r=6, **ALL),
    "vera of adapters": VeraConfig(r=6, convention="adapterhub"),
    "loha": LoHaConfig(r=2, alpha=3, init_weights=False, **ALL),
    "lokr": LoKrConfig(r=2, decompose_both=True, decompose_factor=4, init_weights=False),
    "miss": MissConfig(r=6),
    "miss mini": MissConfig(r=4, mini_r=8, init_weights="mini"),
    "mtl": MTLLoRAConfig(r=4, n_up_projection=3),
    "union": adapterzoo.ConfigUnion(LoRAConfig(r=4), VeraConfig(r=3, intermediate_lora=True)),
}
DENSE = {
    "dora": DoRAConfig(r=4, alpha=7),
    "boft": BOFTConfig(boft_block_size=4),
    "ia3": IA3Config(),
    "lokr": LoKrConfig(r=20, decompose_factor=8, init_weights=False),
    "miss bat": MissConfig(r=8, init_weights="bat"),
    "oft": OFTConfig(oft_block_size=8),
}


def with_adapter(family: str, config: Any, dtype: torch.dtype = torch.float64) -> Any:
    model = ours(family).to(dtype)
    model.add_adapter("a", config)
    stir(model, "a")
    return model


def deltas(model: Any, name: str) -> dict[str, torch.Tensor]:
    """The changes of all weights, by merging."""
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    model.merge_adapter(name)
    after = {n: p.detach().clone() for n, p in model.named_parameters()}
    model.reset_adapter()
    return {n: after[n] - before[n] for n in before if not torch.equal(after[n], before[n])}


def logits(model: Any, name: str | None, inputs: Any) -> torch.Tensor:
    model.set_active_adapters(name)
    with torch.no_grad():
        found = model.eval()(**inputs).logits
    model.set_active_adapters(None)
    return found


@pytest.mark.parametrize("family", ["bert", "gpt2"])
@pytest.mark.parametrize("config", EXACT.values(), ids=EXACT)
def test_exact_factors_are_exact_in_float64(family, config):
    model = with_adapter(family, config)
    certificate = model.convert_adapter("a")
    wanted, found = deltas(model, "a"), deltas(model, "a_lora")
    assert wanted
    assert wanted.keys() == found.keys()
    for key, own in found.items():
        torch.testing.assert_close(own, wanted[key], rtol=0, atol=1e-10)
    assert certificate.is_exact
    assert certificate.error < 1e-10
    inputs = tiny_inputs(family)
    expected = logits(model, "a", inputs)
    torch.testing.assert_close(logits(model, "a_lora", inputs), expected, rtol=0, atol=1e-10)
    config = model.adapters_config.get("a_lora")
    assert type(config) is LoRAConfig
    assert config.init_weights == "lora"


def test_a_table_of_tokens_and_a_tied_one():
    config = LoRAConfig(r=4, target_modules=r".*(word_embeddings|wte)")
    for family in ("bert", "gpt2"):
        model, inputs = with_adapter(family, config), tiny_inputs(family)
        certificate = model.convert_adapter("a", inputs=inputs)
        assert certificate.is_exact
        assert certificate.output_difference < 1e-10 < 1e-3 < certificate.output_change


def test_factors_of_started_lora_have_twice_the_rank():
    model = with_adapter("bert", EXACT["pissa"])
    assert {layer.rank for layer in model.convert_adapter("a").layers} == {8}


@pytest.mark.parametrize("config", DENSE.values(), ids=DENSE)
def test_other_changes_are_factorized_to_rounding(config):
    model = with_adapter("bert", config)
    certificate = model.convert_adapter("a")
    wanted, found = deltas(model, "a"), deltas(model, "a_lora")
    assert wanted.keys() == found.keys()
    for key, own in found.items():
        torch.testing.assert_close(own, wanted[key], rtol=0, atol=1e-10)
    assert not certificate.is_exact


@pytest.mark.parametrize("name", [*EXACT, *DENSE])
def test_the_error_is_the_tail_of_the_singular_values(name):
    """Eckart & Young: √Σ σᵢ² over the values left out."""
    model = with_adapter("bert", {**EXACT, **DENSE}[name])
    certificate = model.convert_adapter("a", rank=2)
    wanted = deltas(model, "a")
    assert len(certificate.layers) == len(wanted)
    for layer in certificate.layers:
        key = next(key for key in wanted if key.endswith(f"{layer.path}.weight"))
        values = torch.linalg.svdvals(wanted[key])
        assert layer.rank == 2
        assert layer.norm == pytest.approx(float(values.norm()), rel=1e-9)
        assert layer.error == pytest.approx(float(values[2:].norm()), rel=1e-9, abs=1e-12)
        assert layer.relative == pytest.approx(layer.error / layer.norm)
    total = sum(layer.error**2 for layer in certificate.layers) ** 0.5
    assert certificate.error == pytest.approx(total)


@pytest.mark.parametrize("energy", [0.5, 0.9, 0.999, 1.0])
def test_energy_keeps_the_smallest_rank_that_has_the_share(energy):
    model = with_adapter("bert", DENSE["dora"])
    certificate = model.convert_adapter("a", energy=energy)
    wanted = deltas(model, "a")
    for layer in certificate.layers:
        key = next(key for key in wanted if key.endswith(f"{layer.path}.weight"))
        squares = torch.linalg.svdvals(wanted[key]).square()
        shares = squares.cumsum(0) / squares.sum()
        needed = int((shares < energy - 1e-12).sum()) + 1
        assert layer.rank == needed
    config = model.adapters_config.get("a_lora")
    ranks = {layer.path: layer.rank for layer in certificate.layers}
    own = dict(model.adapter_modules("a_lora"))
    assert {path: module.lora_A.shape[0] for path, module in own.items()} == ranks
    assert config.r in ranks.values()
    both = model.convert_adapter("a", rank=2, energy=energy, new_name="both")
    assert {layer.path: layer.rank for layer in both.layers} == {
        path: min(rank, 2) for path, rank in ranks.items()
    }


def test_a_rank_above_that_of_the_change_changes_nothing():
    model = with_adapter("bert", EXACT["lora"])
    certificate = model.convert_adapter("a", rank=30)
    assert {layer.rank for layer in certificate.layers} == {4}
    assert certificate.is_exact


def test_an_adapter_that_changes_nothing_becomes_one_of_rank_1():
    model = ours("bert")
    model.add_adapter("a", LoRAConfig(r=4))
    certificate = model.convert_adapter("a")
    assert (certificate.norm, certificate.error, certificate.relative) == (0, 0, 0)
    assert model.adapters_config.get("a_lora").r == 1
    assert certificate.output_difference == 0


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "t5", "vit", "bart"])
def test_the_difference_of_the_logits_is_recomputed(family):
    model = with_adapter(family, LoRAConfig(r=4, **ALL))
    inputs = tiny_inputs(family)
    if family == "bart":
        # it classifies at the end of the text, and its inputs have a decoder's of other lengths
        inputs = {"input_ids": torch.tensor([[0, 5, 6, 7, 2], [0, 8, 9, 4, 2]])}
    certificate = model.convert_adapter("a", rank=2, inputs=inputs)
    plain, wanted, found = (logits(model, name, inputs) for name in (None, "a", "a_lora"))
    assert certificate.inputs == "given"
    # outputs such as keys and hidden states may differ by more
    assert certificate.output_difference >= float((wanted - found).abs().max()) > 0
    assert certificate.output_change >= float((wanted - plain).abs().max()) > 0
    if family in ("bert", "gpt2", "llama", "vit"):
        assert certificate.output_difference == float((wanted - found).abs().max())
        assert certificate.output_change == float((wanted - plain).abs().max())
    random = model.convert_adapter("a", rank=2, new_name="again")
    again = model.convert_adapter("a", rank=2, new_name="third")
    assert random.inputs == "random"
    assert random.output_difference == again.output_difference > 0


def test_with_the_head_of_the_adapter(tmp_path):
    model = AutoAdapterModel.from_config(tiny_config("bert")).double()
    model.add_adapter("a", VeraConfig(r=4))
    stir(model, "a")
    model.add_classification_head("a", num_labels=3)
    inputs = tiny_inputs("bert")
    certificate = model.convert_adapter("a", rank=2, inputs=inputs)
    with adapterzoo.AdapterSetup("a"), torch.no_grad():
        wanted = model.eval()(**inputs).logits
    with adapterzoo.AdapterSetup("a_lora", head_setup="a"), torch.no_grad():
        found = model(**inputs).logits
    assert wanted.shape == (2, 3)
    assert certificate.output_difference == float((wanted - found).abs().max())


def test_experts_and_their_parts():
    model = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=2, num_local_experts=3,
        )
    ).double()  # fmt: skip
    # the other implementations have no float64
    model.set_experts_implementation("eager")
    adapterzoo.init(model)
    model.add_adapter("a", VeraConfig(r=3, intermediate_lora=True, output_lora=True))
    stir(model, "a")
    inputs = {"input_ids": torch.arange(12).view(2, 6)}
    certificate = model.convert_adapter("a", inputs=inputs)
    assert certificate.is_exact
    assert certificate.error < 1e-10
    wanted = logits(model, "a", inputs)
    torch.testing.assert_close(logits(model, "a_lora", inputs), wanted, rtol=0, atol=1e-10)
    assert len({layer.path for layer in certificate.layers}) == len(certificate.layers)
    smaller = model.convert_adapter("a", rank=2, new_name="b", inputs=inputs)
    wanted = deltas(model, "a")
    for layer in smaller.layers:
        path = layer.path.removesuffix(".mlp_in")
        change = next(t for k, t in wanted.items() if k.removesuffix(".weight").endswith(path))
        if path != layer.path:
            # the up projection, the second half of the fused one
            change = change.chunk(2, -2)[1]
        # of each expert
        tails = torch.linalg.svdvals(change)[..., 2:]
        assert layer.error == pytest.approx(float(tails.norm()), rel=1e-9)


def test_nothing_else_changes_and_a_name_can_be_replaced():
    model = with_adapter("bert", EXACT["vera"])
    own, before = adapter_bits(model, "a"), state(model)
    model.convert_adapter("a", new_name="b")
    assert adapter_bits(model, "a") == own
    model.delete_adapter("b")
    assert state(model) == before
    expected = logits(model, "a", tiny_inputs("bert"))
    model.convert_adapter("a", new_name="a", overwrite_ok=True)
    assert type(model.adapters_config.get("a")) is LoRAConfig
    found = logits(model, "a", tiny_inputs("bert"))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_the_original_weight_counts_while_another_adapter_is_merged():
    model = with_adapter("bert", DENSE["dora"])
    expected = model.convert_adapter("a", new_name="before").to_dict()["layers"]
    model.add_adapter("m", LoRAConfig(r=2))
    stir(model, "m")
    model.merge_adapter("m")
    with pytest.raises(StateError, match="m"):
        # DoRA cannot act beside a merged adapter, so that outputs cannot be compared
        model.convert_adapter("a", new_name="after")
    model.reset_adapter()
    assert model.convert_adapter("a", new_name="after").to_dict()["layers"] == expected


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("seq_bn", "not a change of a weight"),
        ("prefix_tuning", "not a change of a weight"),
        ("prompt_tuning", "not a change of a weight"),
        ("loreft", "not a change of a weight"),
        ("seq_bn|lora", "not a change of a weight"),
        (LoRAConfig(use_gating=True), "depends on its input"),
        (LoRAConfig(lora_bias=True), "changes the bias"),
        (LoRAConfig(bias="lora_only"), "not a change of a weight"),
        (LoRAConfig(modules_to_save=("dense",)), "not a change of a weight"),
        (LoRAConfig(trainable_token_indices=(1, 2)), "not a change of a weight"),
        ("ln_tuning", "not a change of a weight"),
    ],
    ids=str,
)
def test_adapters_that_are_more_than_a_change_of_weights_are_refused(config, says):
    model = with_adapter("bert", config, torch.float32)
    with refused(model, StateError, "convert_adapter('a'", says):
        model.convert_adapter("a")


def test_bad_values_are_refused():
    model = with_adapter("bert", LoRAConfig(r=4), torch.float32)
    model.add_adapter("b", LoRAConfig(r=4))
    wrong: list[tuple[type[Any], dict[str, Any], str, str]] = [
        (ConfigError, {"rank": 0}, "rank=0", "Write rank=1"),
        (ConfigError, {"rank": 2.5}, "rank=2.5", "Write rank=8"),
        (ConfigError, {"rank": True}, "rank=True", "Write rank=8"),
        (ConfigError, {"energy": 0}, "energy=0", "Write energy=0.99"),
        (ConfigError, {"energy": 1.5}, "energy=1.5", "Write energy=0.99"),
        (ConfigError, {"energy": float("nan")}, "energy=nan", "Write energy=0.99"),
        (UnknownNameError, {"to": "seq_bn"}, "seq_bn", "lora"),
        (DuplicateNameError, {"new_name": "b"}, "b", "overwrite_ok=True"),
    ]
    for error, options, value, hint in wrong:
        with refused(model, error, value, hint):
            model.convert_adapter("a", **options)
    with refused(model, UnknownNameError, "nope", "b"):
        model.convert_adapter("nope")
    with torch.no_grad():
        next(iter(model.adapter_modules("a")))[1].lora_A[0, 0] = float("nan")
    with refused(model, StateError, "not finite", "Look for NaN"):
        model.convert_adapter("a")


def test_a_call_that_fails_changes_nothing():
    model = with_adapter("bert", LoRAConfig(r=4), torch.float32)
    before = snapshot(model)
    with pytest.raises(ValueError, match="input_ids"):
        model.convert_adapter("a", inputs={"nonsense": 1})
    assert snapshot(model) == before


def test_sounds_are_drawn_too():
    model = with_adapter("whisper", LoRAConfig(r=4), torch.float32)
    assert model.convert_adapter("a", rank=2).output_difference > 0


def test_a_model_that_reads_more_asks_for_inputs():
    model = transformers.CLIPModel(tiny_config("clip"))
    adapterzoo.init(model)
    model.add_adapter("a", LoRAConfig(r=4))
    with refused(model, ConfigError, "it reads input_ids", "Write inputs="):
        model.convert_adapter("a")
    inputs = tiny_inputs("clip")
    assert model.convert_adapter("a", inputs=inputs).output_difference == 0


def test_in_half_precision_the_error_is_that_of_the_stored_factors():
    model = with_adapter("bert", EXACT["lora"], torch.bfloat16)
    certificate = model.convert_adapter("a")
    assert certificate.is_exact
    model.requires_grad_(False)
    there, new = (dict(model.adapter_modules(name)) for name in ("a", "a_lora"))
    for layer in certificate.layers:
        own, made = there[layer.path], new[layer.path]
        assert made.lora_A.dtype is torch.bfloat16
        wanted = own.scaling * own.lora_B.double() @ own.lora_A.double()
        found = made.scaling * made.lora_B.double() @ made.lora_A.double()
        assert layer.error == pytest.approx(float((wanted - found).norm()), rel=1e-9)
        assert 0 < layer.relative < 2**-8


def test_a_copy_of_the_static_head_goes_along():
    model = with_adapter("bert", EXACT["vera"])
    model.train_adapter("a")
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.requires_grad and "classifier" in name:
                p.add_(1)
    inputs = tiny_inputs("bert")
    certificate = model.convert_adapter("a", inputs=inputs)
    assert certificate.output_difference < 1e-10 < 0.1 < certificate.output_change
    expected = logits(model, "a", inputs)
    torch.testing.assert_close(logits(model, "a_lora", inputs), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("tied", [False, True])
@torch.no_grad()
def test_an_output_layer_of_its_own_goes_along(tied):
    """Of a conversion and of averages: θ₀ + Σ wᵢ (θᵢ − θ₀)."""
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, tie_word_embeddings=tied,
    )  # fmt: skip
    torch.manual_seed(0)
    model = adapterzoo.init(transformers.LlamaForCausalLM(config)).double().eval()
    ids = {"input_ids": torch.tensor([[1, 5, 9]])}
    for name, saved in {"a": ["lm_head"], "b": None, "c": ["lm_head"]}.items():
        model.add_adapter(name, LoRAConfig(r=4, modules_to_save=saved))
        model.train_adapter(name)
        for p in model.parameters():
            if p.requires_grad:
                p.add_(torch.randn_like(p) * 0.1)
    model.eval().set_active_adapters("a")
    right = model(**ids).logits
    certificate = model.convert_adapter("a", "lora", new_name="d", set_active=True)
    torch.testing.assert_close(model(**ids).logits, right, rtol=0, atol=1e-12)
    assert certificate.output_difference < 1e-12
    heads = model.lm_head.adapters
    plain = model.lm_head.weight
    assert "b" not in heads
    for name, parts, weights in (("e", "a", [1.0]), ("f", "abc", [0.5, 1.5, -0.25])):
        model.average_adapter(name, [*parts], weights, normalize_weights=False)
        theirs = [heads[part].weight if part in heads else plain for part in parts]
        mean = sum((w * (own - plain) for w, own in zip(weights, theirs, strict=True)), plain)
        torch.testing.assert_close(heads[name].weight, mean, rtol=0, atol=1e-12)


def test_the_certificate_as_json_and_as_a_table():
    model = with_adapter("bert", EXACT["vera"], torch.float32)
    certificate = model.convert_adapter("a", rank=3)
    facts = json.loads(json.dumps(certificate.to_dict()))
    assert facts["adapter"] == "a_lora"
    assert (facts["method"], facts["to"], facts["exact"]) == ("vera", "lora", False)
    lines = str(certificate).splitlines()
    assert len(lines) == len(facts["layers"]) + 3
    for line, layer in zip(lines[1:], facts["layers"], strict=False):
        assert line.split()[:2] == [layer["path"], "3"]
        assert float(line.split()[3]) == pytest.approx(layer["error"], rel=1e-2)
    assert f"{certificate.output_difference:.2e}" in lines[-1]


@pytest.mark.parametrize(
    ("family", "config"), [("llama", VeraConfig(r=4)), ("gpt2", DoRAConfig(r=4))], ids=str
)
def test_peft_loads_the_result_with_equal_logits(tmp_path, family, config):
    model = with_adapter(family, config, torch.float32)
    certificate = model.convert_adapter("a", energy=0.9)
    model.save_adapter(tmp_path, "a_lora", format="peft")
    inputs = tiny_inputs(family)
    expected = logits(model, "a_lora", inputs)
    assert certificate.relative > 0 or certificate.is_exact
    plain = getattr(transformers, CLASSES[family])(model.config)
    keys = plain.state_dict().keys()
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if k in keys})
    theirs = peft.PeftModel.from_pretrained(plain.eval(), tmp_path)
    with torch.no_grad():
        found = theirs(**inputs).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
