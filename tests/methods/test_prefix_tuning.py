"""Prefix tuning: the formula, row by row, with caches and beams; files are in test_golden_zoo."""

import copy
import json

import pytest
import torch
from families import has_sdpa, tiny_config, tiny_inputs
from snapshots import of_adapter, output, refused, stir
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from adapterzoo import (
    AdapterConfig,
    AutoAdapterModel,
    Average,
    BatchSplit,
    ConfigUnion,
    Parallel,
    Split,
    Stack,
    init,
)
from adapterzoo.errors import CompositionError, SiteError, StateError, UnknownNameError
from adapterzoo.methods.prompt.prefix_tuning import PrefixTuningConfig

GATED = PrefixTuningConfig(prefix_length=3, bottleneck_size=4, use_gating=True, shared_gating=False)
FLAT = PrefixTuningConfig(prefix_length=5, flat=True)
SHIFTED = FLAT.replace(positions="shifted")


def made(family, auto=AutoModel, dtype=torch.float64, attention="sdpa", **configs):
    if not has_sdpa(family):
        pytest.skip(f"this version of transformers computes the attention of {family} inline")
    torch.manual_seed(0)
    model = auto.from_config(tiny_config(family), attn_implementation=attention)
    model = init(model.to(dtype).eval())
    for number, (name, config) in enumerate(configs.items()):
        model.add_adapter(name, config)
        stir(model, name, number)
    return model


def in_float64(inputs):
    return {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}


def hidden(model, inputs, **kwargs):
    with torch.no_grad():
        return model(**inputs, **kwargs)[0]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("flat", [True, False])
def test_keys_and_values_stand_before_those_of_the_layer(attention, flat):
    """Softmax over [Tk; K] by hand, in the first attention of a LLaMA with grouped heads."""
    config = PrefixTuningConfig(prefix_length=3, bottleneck_size=4, flat=flat)
    model = made("llama", attention=attention, a=config)
    model.set_active_adapters("a")
    layer, seen = model.layers[0], {}
    layer.self_attn.o_proj.register_forward_pre_hook(lambda _, args: seen.update(out=args[0]))
    layer.self_attn.register_forward_pre_hook(
        lambda _, args, kwargs: seen.update(kwargs), with_kwargs=True
    )
    hidden(model, {"input_ids": tiny_inputs("llama", batch=2)["input_ids"]})
    attn, x = layer.self_attn, seen["hidden_states"]
    table = model.prefix_tunings["a"]["self_prefix"]
    T = table.table
    if not flat:
        inner = torch.tanh(table.wte @ table.down.weight.T + table.down.bias)
        T = inner @ table.up.weight.T + table.up.bias
    e, kv = attn.head_dim, attn.k_proj.out_features // attn.head_dim
    prefix = T[:, : 2 * kv * e].unflatten(1, (2, kv, e)).permute(1, 2, 0, 3)  # [2, kv, P, e]
    rows, tokens = x.shape[:2]

    def rotated(t):
        cos, sin = (p.unsqueeze(1) for p in seen["position_embeddings"])
        half = torch.cat([-t[..., e // 2 :], t[..., : e // 2]], -1)
        return t * cos + half * sin

    q, k, v = (
        f(x).unflatten(-1, (-1, e)).transpose(1, 2) for f in (attn.q_proj, attn.k_proj, attn.v_proj)
    )
    q, k = rotated(q), rotated(k)
    keys = torch.cat([prefix[0].expand(rows, -1, -1, -1), k], 2)
    values = torch.cat([prefix[1].expand(rows, -1, -1, -1), v], 2)
    groups = q.shape[1] // kv
    keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
    scores = q @ keys.mT / e**0.5
    causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    visible = torch.cat([torch.ones(tokens, 3, dtype=torch.bool), causal], 1)
    expected = scores.masked_fill(~visible, -torch.inf).softmax(-1) @ values
    torch.testing.assert_close(seen["out"], expected.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("config", [GATED, FLAT, SHIFTED], ids=["gated", "flat", "shifted"])
@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "t5", "vit"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_rows_of_other_lengths_are_the_rows_alone(config, family, attention):
    """Prefixes of lengths 3 and 5 and none in one batch, its rows padded."""
    if (family, config) == ("vit", SHIFTED):
        pytest.skip("images have no positions to shift")
    other = config.replace(prefix_length=2, positions="kept")
    model = made(family, attention=attention, a=config, b=other)
    inputs = in_float64(tiny_inputs(family, batch=4))
    names = ["b", "a", None, "a"]
    mixed = hidden(model, inputs, adapter_names=names)
    # the eager attention of these two computes its softmax in float32, also of float64
    near = 1e-6 if attention == "eager" and family in ("llama", "vit") else 1e-9
    for row, name in enumerate(names):
        model.set_active_adapters(name)
        alone = hidden(model, {k: v[row : row + 1] for k, v in inputs.items()})[0]
        torch.testing.assert_close(mixed[row], alone, rtol=near, atol=near)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", ["gpt2", "llama", "bert"])
def test_a_padded_row_is_the_row_alone(family, side):
    model = made(family, a=GATED)
    model.set_active_adapters("a")
    ids = torch.randint(5, 50, (2, 7))
    mask = torch.ones_like(ids)
    real = slice(3, None) if side == "left" else slice(0, 4)
    mask[1] = 0
    mask[1, real] = 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    both = hidden(model, {"input_ids": ids, "attention_mask": mask, "position_ids": positions})
    alone = hidden(model, {"input_ids": ids[1:, real]})
    torch.testing.assert_close(both[1:, real], alone, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("family", ["gpt2", "llama", "t5"])
@pytest.mark.parametrize("config", [GATED, SHIFTED], ids=["gated", "shifted"])
@pytest.mark.parametrize("beams", [1, 3])
def test_a_cache_changes_nothing(family, config, beams):
    auto = AutoModelForSeq2SeqLM if family == "t5" else AutoModelForCausalLM
    model = made(family, auto, a=config)
    model.set_active_adapters("a")
    inputs = {k: v for k, v in tiny_inputs(family, batch=2).items() if not k.startswith("decoder")}
    options = {"max_new_tokens": 5, "num_beams": beams, "do_sample": False, "pad_token_id": 0}
    options |= {"eos_token_id": None, "output_scores": True, "return_dict_in_generate": True}
    cached = model.generate(**inputs, **options, use_cache=True)
    uncached = model.generate(**inputs, **options, use_cache=False)
    assert torch.equal(cached.sequences, uncached.sequences)
    torch.testing.assert_close(cached.scores, uncached.scores, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_shifted_positions_are_those_behind_the_prefix(family):
    """As if the caller had numbered the tokens from P on; behind two prefixes of a stack twice."""
    kept = FLAT.replace(positions="kept")
    model = made(family, a=SHIFTED, b=SHIFTED, kept_a=kept, kept_b=kept)
    tables = {name: model.prefix_tunings[name]["self_prefix"] for name in model.prefix_tunings}
    for name in "ab":
        tables[f"kept_{name}"].load_state_dict(tables[name].state_dict())
    ids = tiny_inputs(family, batch=2)["input_ids"]
    numbers = torch.arange(ids.shape[1])[None]
    for setup, plain, shift in (("a", "kept_a", 5), (Stack(*"ab"), Stack("kept_a", "kept_b"), 10)):
        model.set_active_adapters(plain)
        expected = hidden(model, {"input_ids": ids, "position_ids": numbers + shift})
        model.set_active_adapters(setup)
        torch.testing.assert_close(hidden(model, {"input_ids": ids}), expected)
        found = hidden(model, {"input_ids": ids, "position_ids": numbers})
        torch.testing.assert_close(found, expected)


def test_a_stack_concatenates():
    model = made(
        "llama", a=FLAT, b=FLAT.replace(prefix_length=2), both=FLAT.replace(prefix_length=7)
    )
    inputs = tiny_inputs("llama", batch=2)
    one, two, both = (model.prefix_tunings[n]["self_prefix"].table for n in ("a", "b", "both"))
    with torch.no_grad():
        both.copy_(torch.cat([one, two]))
    found = []
    for setup in (Stack("a", "b"), "both"):
        model.set_active_adapters(setup)
        found.append(hidden(model, inputs))
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("config", [FLAT, SHIFTED, GATED], ids=["kept", "shifted", "an MLP, gated"])
def test_parameters_are_averaged(config):
    """Those of an MLP too, as in `adapters`; the prefixes themselves after ejecting them."""
    model = made("llama", a=config, b=config)
    model.average_adapter("c", ["a", "b"], weights=[0.25, 0.75])
    assert model.adapters_config["c"] == model.adapters_config["a"]
    every = dict(model.named_parameters())
    keys = [key for key in every if ".c." in key]
    assert len(keys) == len([key for key in every if ".a." in key])
    for key in keys:
        one, two, parameter = (every[key.replace(".c.", f".{n}.")] for n in "abc")
        torch.testing.assert_close(parameter, 0.25 * one + 0.75 * two, rtol=0, atol=1e-12)
    model.set_active_adapters("c")
    assert hidden(model, tiny_inputs("llama", batch=2)).isfinite().all()


def test_parallel_answers_one_after_the_other():
    model = made("bert", a=FLAT, b=GATED)
    inputs = tiny_inputs("bert", batch=2)
    model.set_active_adapters(Parallel("a", "b"))
    parallel = hidden(model, inputs)
    for number, name in enumerate("ab"):
        model.set_active_adapters(name)
        expected = hidden(model, inputs)
        torch.testing.assert_close(parallel[2 * number : 2 * number + 2], expected)


def test_checkpointed_gradients_are_the_gradients():
    found = []
    for use in (None, True, False):
        model = made("llama", a=GATED)
        model.train_adapter("a")
        if use is not None:
            model.gradient_checkpointing_enable({"use_reentrant": use})
        model(**tiny_inputs("llama", batch=2))[0].square().sum().backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.requires_grad})
        assert all(grad is not None and grad.abs().max() > 0 for grad in found[-1].values())
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


def test_the_table_is_there_once():
    model = made("bert", a=GATED)
    keys = [key for key in model.state_dict() if "wte" in key]
    assert keys == ["prefix_tunings.a.self_prefix.wte"]
    other = copy.deepcopy(model)
    assert (
        other.prefix_tunings["a"]["self_prefix"].wte
        is not model.prefix_tunings["a"]["self_prefix"].wte
    )
    model.set_active_adapters("a")
    other.set_active_adapters("a")
    with torch.no_grad():
        other.prefix_tunings["a"]["self_prefix"].wte.add_(1.0)
    inputs = tiny_inputs("bert")
    assert not torch.equal(hidden(model, inputs), hidden(other, inputs))
    model.delete_adapter("a")
    assert not any(of_adapter(key) for key in model.state_dict())


def test_what_cannot_be_is_refused():
    model = made("bert", a=FLAT, b=FLAT)
    for setup in (Average("a", "b"), Split("a", None, splits=[3, 4])):
        with pytest.raises(CompositionError, match=r"cannot be averaged, fused.*Stack\('a'"):
            model.set_active_adapters(setup)
    model.set_active_adapters(BatchSplit("a", None, batch_sizes=[1, 1]))
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(StateError, match=r"flash_attention_2.*set_attn_implementation\('sdpa'\)"):
        hidden(model, tiny_inputs("bert", batch=2))
    with pytest.raises(SiteError, match=r"computes scores by itself.*LoRAConfig"):
        made("deberta-v2", attention="eager", a=FLAT)
    with pytest.raises(SiteError, match=r"BartLearnedPositionalEmbedding, counts.*'kept'"):
        made("bart", a=SHIFTED)
    with pytest.raises(SiteError, match=r"no module is known that takes.*positions='kept'"):
        made("vit", a=SHIFTED)


def test_shifted_tokens_must_have_a_position():
    model = made("gpt2", a=SHIFTED)
    model.set_active_adapters("a")
    ids = torch.ones(1, 60, dtype=torch.long)
    with pytest.raises(IndexError, match="out of range"):
        hidden(model, {"input_ids": ids})
    hidden(model, {"input_ids": ids[:, 1:]})


def test_a_sliding_window_that_would_hide_the_prefix_is_refused():
    model = made("gemma2", attention="eager", a=SHIFTED, b=FLAT)
    ids = torch.ones(1, 12, dtype=torch.long)
    model.set_active_adapters("b")
    hidden(model, {"input_ids": ids})
    model.set_active_adapters("a")
    with pytest.raises(StateError, match=r"12 tokens after a prefix of 5.*window of 16.*most 11"):
        hidden(model, {"input_ids": ids})
    hidden(model, {"input_ids": ids[:, 1:]})


EJECTED = {
    "bert": "prefix_tuning[prefix_length=3]", "gpt2": "unipelt", "t5": "mam",
    # grouped queries, where adapters crashes
    "llama": "prefix_tuning[prefix_length=3,non_linearity='relu',leave_out=[0]]",
}  # fmt: skip


@pytest.mark.parametrize("family", EJECTED)
@pytest.mark.parametrize("format", ["native", "adapterhub"])
def test_an_ejected_prefix_computes_the_same_and_is_saved_as_flat(family, format, tmp_path):
    if not has_sdpa(family):
        pytest.skip(f"this version of transformers computes the attention of {family} inline")
    config = tiny_config(family)
    torch.manual_seed(0)
    model = AutoAdapterModel.from_config(config).double().eval()
    asked = EJECTED[family]
    if format == "adapterhub":
        both = AdapterConfig.load(asked)
        parts = [
            c.replace(convention="adapterhub") if "flat" in c or c["use_gating"] else c
            for c in both.members
        ]
        asked = ConfigUnion(*parts) if len(parts) > 1 else parts[0]
    model.add_adapter("a", asked, set_active=True)
    stir(model, "a", std=0.3)
    before, plain = output(model), [p.requires_grad for p in model.parameters()]
    model.eject_prefix_tuning("a")
    torch.testing.assert_close(output(model), before, rtol=0, atol=1e-12)
    assert plain[0] == next(model.parameters()).requires_grad
    flat = [c for c in model.adapters_config["a"].members if c.architecture == "prefix_tuning"]
    assert [c.flat for c in flat] == [True]
    _, shared = next((path, m) for path, m in model.adapter_modules("a") if not path)
    assert not any("wte" in key or "down" in key or "up." in key for key in shared.state_dict())
    model.save_adapter(tmp_path, "a", format=format)
    if format == "adapterhub":
        written = json.loads((tmp_path / "adapter_config.json").read_text())["config"]
        assert [c["flat"] for c in written.get("configs", [written]) if "flat" in c] == [True]
    model.load_adapter(tmp_path, load_as="b", set_active=True)
    assert torch.equal(output(model), output_of(model, "a"))
    with refused(model, StateError, "'a'", "flat=False"):
        model.eject_prefix_tuning("a")
    model.train_adapter("a")
    output_of(model, "a")
    with refused(model, UnknownNameError, "'c'", "'a'"):
        model.eject_prefix_tuning("c")


def output_of(model, name):
    model.eval().set_active_adapters(name)
    return output(model)
