"""What the peers get wrong, line by line: the number in each docstring is that of the list.

Lines 1–14 are AdapterHub's `adapters` 1.3.0, 15–27 PEFT 0.21.2. Here are those that no other test
shows: most are promises of every method (`adapterzoo.testing`), or have their tests where what they
are about lives.
"""

from __future__ import annotations

import gc
import json
import pickle
import sys

import pytest
import torch
from cached import CACHE
from families import tiny_config, tiny_inputs
from safetensors.torch import load_file
from snapshots import adapter_bits, of_adapter, output, same_bits, stir
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.pytorch_utils import Conv1D

from adapterzoo import (
    LoRAConfig,
    ParBnConfig,
    SeqBnConfig,
    Stack,
    init,
)
from adapterzoo.formats import files
from adapterzoo.inject.adapted import Adapted, adapters_of

GATED = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3")


def static(auto, family, seed=0):
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        return auto.from_config(tiny_config(family)).eval()


def adapted_paths(model):
    # a module that only helps its layers is of a changed class too, and holds no adapter
    modules = model.base_model.named_modules()
    return {p for p, m in modules if isinstance(m, Adapted) and adapters_of(m)}


# --- adapters 1.3.0 ---


@pytest.mark.parametrize("family", ["mistral", "gpt2"])
def test_generation_keeps_the_cache(family):
    """1: `init` leaves the tokens and the KV cache of `generate` as they are."""
    plain, ours = (static(AutoModelForCausalLM, family).double() for _ in range(2))
    init(ours).add_adapter("a", "lora")
    stir(ours, "a")
    ids = torch.randint(3, 99, (2, 5), generator=torch.Generator().manual_seed(0))
    wanted = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False}
    with torch.no_grad():
        tokens = [m.generate(ids, use_cache=cached, **wanted) for m in (plain, ours)
                  for cached in (True, False)]  # fmt: skip
        assert all(torch.equal(tokens[0], other) for other in tokens)
        first = ours(ids, use_cache=True)
        step = ours(tokens[0][:, 5:6], **{CACHE: first[CACHE]}).logits[:, -1]
        whole = plain(tokens[0][:, :6]).logits[:, -1]
        torch.testing.assert_close(step, whole, atol=1e-12, rtol=0)


@pytest.mark.parametrize("family", ["gemma2", "bert"])
def test_each_bottleneck_uses_the_parts_of_its_own_layer(tiny, family):
    """5: an adapter of one block reads nothing of another block's parameters."""
    model = tiny(family)
    # one that reads a norm in post-LN blocks, or taps one in pre-LN blocks
    model.add_adapter("a", "seq_bn", set_active=True)
    model.add_adapter("p", "par_bn")
    model.set_active_adapters(Stack("a", "p"))
    for name in "ap":
        stir(model, name)
    plan = model._active.plan
    for path, module in (*model.adapter_modules("a"), *model.adapter_modules("p")):
        own = {id(m) for m in module.modules()}
        others = {
            id(m)
            for p, m in model.base_model.named_modules()
            if not (p.startswith(path) and of_adapter(p))
        }
        assert not own & others
    for source, readers in plan.captures.items():
        block = source.split(".")[:3]
        assert all(reader.split(".")[: len(block) - 1] == block[:-1] for reader in readers)
    # no closures: what is run depends on modules alone, so a pickled model runs the same
    assert same_bits(output(model), output(pickle.loads(pickle.dumps(model))))


def test_a_config_belongs_to_one_adapter(tiny):
    """6: adding an adapter of another config, however alike, changes no config."""
    model = tiny()
    configs = {"a": SeqBnConfig(), "b": SeqBnConfig(non_linearity="gelu"), "c": SeqBnConfig()}
    for name, config in configs.items():
        model.add_adapter(name, config)
    assert all(model.adapters_config[n] is c for n, c in configs.items())


def test_a_static_language_model_stays_where_it_is(tmp_path):
    """7: the output layer, which is the embedding, is not saved with an adapter."""
    for family in ("gpt2", "llama"):
        lm = init(static(AutoModelForCausalLM, family))
        lm.add_adapter("a", "lora[r=1]")
        lm.save_adapter(tmp_path / family, "a")
        assert set(load_file(tmp_path / family / "adapter.safetensors")) == set(
            adapter_bits(lm, "a")
        )


@pytest.mark.parametrize("family", GATED)
def test_the_same_request_finds_the_same_layers_everywhere(tiny, family):
    """8: intermediate is the up projection and output the down projection, gate and o exist."""
    model = tiny(family)
    fused = family == "phi3"

    def leaves(config):
        model.add_adapter("x", config)
        found = {path.rpartition(".")[2] for path in adapted_paths(model)}
        model.delete_adapter("x")
        return found

    nothing = {"selfattn_lora": False}
    up = leaves(LoRAConfig(**nothing, intermediate_lora=True))
    assert up == ({"gate_up_proj"} if fused else {"up_proj"})
    assert leaves(LoRAConfig(**nothing, output_lora=True)) == {"down_proj"}
    assert leaves(LoRAConfig(attn_matrices=("o",))) == {"o_proj"}
    if not fused:
        assert leaves(LoRAConfig(target_modules=["gate_proj"])) == {"gate_proj"}
    linears = {
        path
        for path, m in model.base_model.named_modules()
        if isinstance(m, (torch.nn.Linear, Conv1D))
    }
    model.add_adapter("all", LoRAConfig(target_modules="all-linear"))
    assert adapted_paths(model) == linears


def test_a_scaling_may_be_an_integer(tiny):
    """10: `scaling=4` is `scaling=4.0`."""
    outputs = []
    for scaling in (4, 4.0):
        model = tiny()
        model.add_adapter("a", ParBnConfig(scaling=scaling), set_active=True)
        stir(model, "a")
        outputs.append(output(model))
    assert same_bits(*outputs)


@pytest.mark.parametrize("config", ["lora", "double_seq_bn"])
def test_adapters_are_born_where_their_layers_are(tiny, config):
    """11: device and dtype follow each layer, not the process."""
    model = tiny()
    model.base_model.encoder.layer[1].to("meta", torch.bfloat16)
    model.add_adapter("a", config)
    for layer, modules in model.get_adapter("a").items():
        places = {(p.device.type, p.dtype) for m in modules.values() for p in m.parameters()}
        assert places == {("meta", torch.bfloat16) if layer == 1 else ("cpu", torch.float32)}


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_nothing_active_costs_nothing(family):
    """13: without adapters, a forward runs the functions of the plain model and one more.

    That one looks whether rows of the batch are to be told apart.
    """

    def calls(model):
        names = []

        def seen(frame, event, _argument):
            if event == "call":
                names.append(frame.f_code.co_qualname)

        inputs = tiny_inputs(family)
        with torch.no_grad():
            model(**inputs)
            gc.disable()
            sys.setprofile(seen)
            try:
                model(**inputs)
            finally:
                sys.setprofile(None)
                gc.enable()
        return names

    plain = static(AutoModelForSequenceClassification, family)
    plain.config.pad_token_id = 0
    expected = calls(plain)
    init(plain)
    entry = ["ActiveState.plan", "with_rows.<locals>.method"]
    found = calls(plain)
    assert [name for name in found if name not in entry] == expected
    assert sorted(name for name in found if name in entry) == entry
    plain.add_adapter("a", "lora")
    # one look at the plan for each layer that has an adapter, one at the base model's arguments
    found_more = calls(plain)
    more = sorted(set(found_more) - set(expected))
    hook = ["Module._call_impl.<locals>.inner", "_Guard.__call__"]
    assert more == sorted(["Adapted.forward", *hook, *entry])
    assert found_more.count("_Guard.__call__") == 1
    plain.delete_adapter("a")
    assert calls(plain) == found


# --- PEFT 0.21.2 ---


def test_a_file_is_read_on_the_cpu_whatever_wrote_it(tiny, tmp_path):
    """19: no device stands in the file."""
    model = tiny()
    model.add_adapter("a", "lora")
    model.save_adapter(tmp_path, "a")
    text = json.dumps(json.loads((tmp_path / "adapter_config.json").read_text()))
    assert "cpu" not in text
    assert "cuda" not in text
    with torch.device("meta"):
        read = files.read_tensors(tmp_path / "adapter.safetensors")
    assert {tensor.device.type for tensor in read.values()} == {"cpu"}


def test_two_dora_are_the_same_in_training_and_in_evaluation(tiny):
    """23: where dropout leaves out almost nothing, two active ones say what they say without."""
    model = tiny("bert").double()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    for i, name in enumerate("ab"):
        model.add_adapter(name, "dora[dropout=1e-12]")
        stir(model, name, seed=i)
    model.set_active_adapters(Stack("a", "b"))
    quiet = output(model.eval())
    torch.testing.assert_close(output(model.train()), quiet, rtol=0, atol=1e-9)
