"""Merging: the base weights become those with the adapter, and back, bit for bit."""

from __future__ import annotations

import copy
import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from architectures.tiny_models import tiny_model
from families import tiny_config
from snapshots import adapter_bits, bits, changes, output, refused, same_bits, snapshot, stir
from transformers import BertForSequenceClassification

from adapterzoo import AdapterSetup, AutoAdapterModel, LoRAConfig, Stack, init
from adapterzoo.errors import ConfigError, StateError, UnknownNameError
from adapterzoo.inject.adapted import adapters_of
from adapterzoo.model import merging
from adapterzoo.model.heads import copies

QKV = ("q", "k", "v")
CASES = {
    "bert-all": ("bert", LoRAConfig(target_modules="all-linear", r=4, alpha=8)),
    "bert-roles": ("bert", LoRAConfig(attn_matrices=("q", "k", "v", "o"), intermediate_lora=True,
                                      output_lora=True, use_rslora=True)),
    "bert-patterns": ("bert", LoRAConfig(rank_pattern={"query": 2}, alpha_pattern={"value": 3.5})),
    "bert-bias": ("bert", LoRAConfig(lora_bias=True, target_modules=["dense"])),
    "bert-embedding": ("bert", LoRAConfig(target_modules=["word_embeddings"])),
    "gpt2-qkv": ("gpt2", LoRAConfig(attn_matrices=QKV)),
    "gpt2-k": ("gpt2", LoRAConfig(attn_matrices=("k",), lora_bias=True)),
    "gpt2-all": ("gpt2", LoRAConfig(target_modules="all-linear")),
    "gpt_neox-qv": ("gpt_neox", LoRAConfig()),
    "gemma3-embedding": ("gemma3_text", LoRAConfig(target_modules=["embed_tokens"])),
    "mixtral-experts": ("mixtral", LoRAConfig(intermediate_lora=True, output_lora=True)),
    "t5-all": ("t5", LoRAConfig(target_modules="all-linear", attn_matrices=QKV)),
}  # fmt: skip


def made(tiny, case, std=0.1):
    family, config = CASES[case]
    model = tiny(family)
    model.add_adapter("a", config)
    stir(model, "a", std=std)
    return model


@pytest.mark.parametrize("case", CASES)
def test_merged_is_unmerged_and_reset_gives_the_bits_back(tiny, case):
    model = made(tiny, case)
    base = output(model)
    before = snapshot(model)
    model.set_active_adapters("a")
    unmerged = output(model)
    truth = output(copy.deepcopy(model).double())
    model.set_active_adapters(None)
    model.merge_adapter("a")
    merged = output(model)
    # it acts through the weights, be it active or not
    model.set_active_adapters("a")
    assert same_bits(merged, output(model))
    error, reference = (x.double().sub(truth).abs().max() for x in (merged, unmerged))
    assert error <= 2 * reference + 8 * torch.finfo(merged.dtype).eps * truth.abs().max()
    assert (merged - base).abs().max() > 1e-3
    model.reset_adapter()
    assert same_bits(unmerged, output(model))
    model.set_active_adapters(None)
    assert not changes(before, snapshot(model))
    model.reset_adapter()
    assert not changes(before, snapshot(model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_merged_weight_is_the_formula_rounded_once(tiny, dtype):
    """In half precision it is computed in float32: the error is half a step, not one for each."""
    model = tiny().to(dtype)
    model.add_adapter("a", LoRAConfig(r=16, alpha=24, lora_bias=True))
    stir(model, "a")
    before = snapshot(model)
    layer = model.base_model.encoder.layer[1].attention.self.query
    lora, eps = adapters_of(layer)["a"], torch.finfo(dtype).eps
    low_rank = lora.lora_B.double() @ lora.lora_A.double()
    exact = {
        "weight": (layer.weight + 24 / 16 * low_rank).detach(),
        "bias": (layer.bias + 24 / 16 * lora.lora_B_bias.double()).detach(),
    }
    # what float32 rounds on the way, of all that is added up
    terms = lora.lora_B.abs().double() @ lora.lora_A.abs().double() * 24 / 16 + layer.weight.abs()
    way = 32 * torch.finfo(torch.float32).eps * terms.max().item()
    model.merge_adapter("a")
    for name, expected in exact.items():
        error = (getattr(layer, name).double() - expected).abs()
        assert (error <= eps / 2 * expected.abs() + way).all()
    model.reset_adapter()
    assert not changes(before, snapshot(model))


def test_merging_one_after_the_other_is_merging_both(tiny):
    model = tiny("gpt2").double()
    for i, (name, config) in enumerate({"a": "lora", "b": 'lora[attn_matrices=["k","v"]]'}.items()):
        model.add_adapter(name, config)
        stir(model, name, seed=i)
    before = snapshot(model)
    model.set_active_adapters(Stack("a", "b"))
    both = output(model)
    model.merge_adapter("a")
    # one merged, one active
    torch.testing.assert_close(output(model), both, rtol=0, atol=1e-12)
    model.reset_adapter()
    model.set_active_adapters(None)
    for names in ("a", "b", "ab", "ba"):
        for name in names:
            model.merge_adapter(name)
        found = output(model)
        assert torch.allclose(found, both, rtol=0, atol=1e-12) == (len(names) == 2)
        model.reset_adapter()
        assert not changes(before, snapshot(model))


def test_merging_leaves_all_else_as_it_was(tiny):
    model = made(tiny, "bert-all")
    model.train_adapter("a")
    before, kept = snapshot(model), adapter_bits(model, "a")
    model.merge_adapter("a")
    touched = {k for k in changes(before, snapshot(model)) if not k.startswith("tensor ")}
    assert touched == {"default plan", "merged", "originals", "next forward"}
    weights = {k for k in changes(before, snapshot(model)) if k.startswith("tensor ")}
    assert weights == {
        f"tensor bert.{path}.weight" for path, _ in model.adapter_modules("a")
    }  # fmt: skip
    assert adapter_bits(model, "a") == kept


def test_what_a_merged_adapter_refuses(tiny):
    model = made(tiny, "bert-all")
    model.merge_adapter("a")
    for call, run in {
        "merge_adapter('a')": lambda: model.merge_adapter("a"),
        "delete_adapter('a')": lambda: model.delete_adapter("a"),
        "train_adapter('a')": lambda: model.train_adapter("a"),
        "add_adapter('a')": lambda: model.add_adapter("a", "lora", overwrite_ok=True),
    }.items():
        with refused(model, StateError, call, "Write reset_adapter() first"):
            run()


@pytest.mark.parametrize(("case", "value"), [
    ("bert-all", float("inf")), ("gpt2-qkv", float("nan")), ("mixtral-experts", float("nan")),
    ("bert-bias", float("nan")), ("bert-embedding", float("inf")),
])  # fmt: skip
def test_what_is_not_finite_is_refused(tiny, case, value):
    model = made(tiny, case)
    # the last one, so that others are written before it is found
    *_, (path, module) = model.adapter_modules("a")
    *_, parameter = module.parameters()
    with torch.no_grad():
        parameter.view(-1)[-1] = value
    what = "bias" if case == "bert-bias" else "the merged"
    says = (repr(path), what, "is not finite", "Look for NaN in the adapter")
    with refused(model, StateError, *says):
        model.merge_adapter("a")


@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
def test_a_merge_that_is_interrupted_leaves_no_trace(tiny, monkeypatch, error):
    model = made(tiny, "bert-all")
    before, out = snapshot(model), output(model)
    written = merging.write

    def interrupted(model, path, names):
        written(model, path, names)
        if len(model._adapter_state.originals) == 3:
            raise error

    monkeypatch.setattr(merging, "write", interrupted)
    with pytest.raises(error):
        model.merge_adapter("a")
    monkeypatch.undo()
    assert changes(before, snapshot(model)) == []
    assert model._adapter_state.originals == {}
    assert same_bits(output(model), out)


@pytest.mark.parametrize("merged_before", [True, False])
def test_an_overflow_of_float16_is_refused(tiny, merged_before):
    model = tiny()
    model.add_adapter("a", "lora")
    model.add_adapter("b", LoRAConfig(alpha=6e4))
    stir(model, "b", std=10.0)
    if merged_before:
        model.merge_adapter("a")
    model.half()
    with refused(model, StateError, "overflows in torch.float16", "model.float()"):
        model.merge_adapter("b")
    model.float().merge_adapter("b")


@pytest.mark.parametrize(("config", "says"), [
    ("par_bn", "cannot be merged"), ("adapter_plus", "cannot be merged"),
    ("lora|seq_bn", "cannot be merged"), ("seq_bn|lora", "cannot be merged"),
    ("lora[use_gating=True]", "use_gating=True"),
])  # fmt: skip
def test_what_is_no_weight_is_refused(tiny, config, says):
    model = tiny()
    model.add_adapter("a", config)
    with refused(model, StateError, says, "Keep it active instead"):
        model.merge_adapter("a")


def test_a_bias_where_the_layer_has_none_is_refused(tiny):
    model = tiny("llama")
    model.add_adapter("a", "lora[lora_bias=True]")
    # a bias of zero changes nothing
    model.merge_adapter("a")
    model.reset_adapter()
    stir(model, "a")
    with refused(model, StateError, "has no bias", "Keep it active"):
        model.merge_adapter("a")


def test_a_shared_weight_is_refused(tiny):
    model = tiny("gpt2")
    model.add_causal_lm_head("lm")
    model.add_adapter("a", LoRAConfig(target_modules=["wte"]))
    stir(model, "a")
    says = ("heads.lm.", "transformer.wte.weight", "Keep the adapter active")
    with refused(model, StateError, *says):
        model.merge_adapter("a")
    model.delete_head("lm")
    model.merge_adapter("a")
    model.reset_adapter()
    model = tiny("t5")
    model.add_adapter("a", LoRAConfig(target_modules=["encoder.embed_tokens"]))
    with refused(model, StateError, "'encoder.embed_tokens'", "shared", "Keep the adapter active"):
        model.merge_adapter("a")


def test_a_cast_model_is_reset_to_the_cast_originals(tiny):
    model = made(tiny, "bert-all")
    cast = copy.deepcopy(model).half()
    model.merge_adapter("a")
    model.half()
    model.reset_adapter()
    assert [
        k for k, t in cast.state_dict().items() if not same_bits(t, model.state_dict()[k])
    ] == []


# --- merged models and files ---


@pytest.mark.parametrize("case", ["bert-all", "mixtral-experts"])
def test_a_merged_model_is_saved_and_loaded(tiny, tmp_path, case):
    model = made(tiny, case)
    model.merge_adapter("a")
    merged = output(model)
    model.save_pretrained(tmp_path)
    loaded = AutoAdapterModel.from_pretrained(tmp_path).eval()
    assert same_bits(merged, output(loaded))
    assert adapter_bits(loaded, "a") == adapter_bits(model, "a")
    loaded.set_active_adapters("a")
    assert same_bits(merged, output(loaded))
    with refused(loaded, StateError, "the originals are not known", "Load the base model"):
        loaded.reset_adapter()
    with refused(loaded, StateError, "merge_adapter('a')", "reset_adapter()"):
        loaded.merge_adapter("a")
    loaded.add_adapter("b", CASES[case][1])
    stir(loaded, "b", seed=2)
    with refused(loaded, StateError, "the originals are not known", "Load the base model"):
        loaded.merge_adapter("b")
    loaded.set_active_adapters("b")
    assert not same_bits(merged, output(loaded))


def test_a_merged_adapter_is_saved_as_if_it_were_not(tiny, tmp_path):
    model = made(tiny, "bert-all")
    model.save_adapter(tmp_path / "before", "a")
    model.merge_adapter("a")
    model.save_adapter(tmp_path / "after", "a")
    files = [tmp_path / k / "adapter.safetensors" for k in ("before", "after")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_originals_are_kept_in_their_own_memory(tiny):
    """And a config is frozen: what happens to an adapter while it is merged has no effect."""
    model = made(tiny, "bert-all")
    weight = model.base_model.encoder.layer[0].output.dense.weight
    before = bits(weight)
    model.merge_adapter("a")
    with torch.no_grad():
        weight.fill_(7.0)
    stir(model, "a", seed=9)
    with pytest.raises(AttributeError):
        model.adapters_config["a"].alpha = 32
    for _, module in model.adapter_modules("a"):
        module.scaling *= 7
    model.reset_adapter()
    assert bits(weight) == before


def test_a_bias_beside_a_merged_parameter_stays():
    """An `nn.MultiheadAttention` reads the weight and the bias of its last layer by itself."""
    tiny = tiny_model("bridgetower")
    model = init(tiny.model)
    biases = [
        module.out_proj.bias
        for module in model.modules()
        if isinstance(module, torch.nn.MultiheadAttention)
    ]
    assert biases
    for bias in biases:
        torch.nn.init.normal_(bias)
    before = [bias.clone() for bias in biases]
    model.add_adapter("a", LoRAConfig(attn_matrices=("o",)))
    model.merge_adapter("a")
    assert all(torch.equal(*pair) for pair in zip(biases, before, strict=True))


# --- threads and interruptions ---


def in_a_thread(function):
    """Run a generator in a thread of its own, from `yield` to `yield`."""
    with ThreadPoolExecutor(1) as thread:
        running = function()
        while True:
            yield thread.submit(next, running).result()


@pytest.mark.parametrize(("before", "inside", "after"), [
    ([], "a", lambda model: model.merge_adapter("a")),
    ([], "b", lambda model: model.merge_adapter("a")),
    ([], None, lambda model: model.merge_adapter("a")),
    (["a"], "a", lambda model: model.reset_adapter()),
])  # fmt: skip
def test_a_block_of_another_thread_does_not_run_on_other_weights(tiny, before, inside, after):
    model = tiny()
    for seed, name in enumerate("ab"):
        model.add_adapter(name, "lora")
        stir(model, name, seed)
    for name in before:
        model.merge_adapter(name)

    def block():
        with AdapterSetup(inside) if inside else model.disable_adapter():
            yield output(model)
            with pytest.raises(StateError, match=r"'a' was (un)?merged\. Leave the block"):
                output(model)
        yield output(model)

    thread = in_a_thread(block)
    next(thread)
    after(model)
    assert same_bits(next(thread), output(model))


def test_a_block_of_another_thread_outlives_a_reset_of_nothing(tiny):
    model = tiny()
    model.add_adapter("a", "lora")
    stir(model, "a")

    def block():
        with AdapterSetup("a"):
            yield output(model)
            again = output(model)
        yield again

    thread = in_a_thread(block)
    expected = next(thread)
    model.reset_adapter()
    assert same_bits(next(thread), expected)


@pytest.mark.parametrize("stops", range(1, 4))
def test_a_merge_that_is_interrupted_changes_nothing(stops, monkeypatch):
    """Also by a copy of a head that overflows, or at the end."""
    model = init(BertForSequenceClassification(tiny_config("bert"))).eval()
    model.add_adapter("a", "lora")
    model.train_adapter("a")
    stir(model, "a")
    model.set_active_adapters("a")
    before, expected = copy.deepcopy(model.state_dict()), output(model)
    calls = itertools.count(1)
    parts = {1: (merging, "replan"), 2: (copies, "merge"), 3: (copies, "write_finite")}
    room, name = parts[stops]
    original = getattr(room, name)

    def interrupted(*args):
        if next(calls) == (2 if name == "write_finite" else 1):
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(room, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.merge_adapter("a")
    monkeypatch.undo()
    assert all(same_bits(before[key], tensor) for key, tensor in model.state_dict().items())
    assert same_bits(output(model), expected)
    model.merge_adapter("a")
    model.reset_adapter()
    assert same_bits(output(model), expected)


def test_a_head_that_overflows_is_refused():
    model = init(BertForSequenceClassification(tiny_config("bert"))).eval()
    model.add_adapter("a", "lora")
    model.train_adapter("a")
    own = next(layer for layer in copies.layers_with(model, "a").values())
    with torch.no_grad():
        own.weight.fill_(1e30)
    model.classifier.weight.data = model.classifier.weight.data.half()
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    with pytest.raises(StateError, match=r"weight at 'classifier' overflows in torch.float16"):
        model.merge_adapter("a")
    assert all(same_bits(before[key], tensor) for key, tensor in model.state_dict().items())


def test_a_second_name_is_no_switch(tiny):
    model = tiny()
    for name in "ab":
        model.add_adapter(name, "lora")
    with refused(model, ConfigError, "safe_merge='b'", "Write safe_merge=True"):
        model.merge_adapter("a", "b")
    # the order of a set depends on the process
    with refused(model, UnknownNameError, "{'a'}", "there is no adapter"):
        model.merge_adapter({"a"})
