"""What the peers get wrong, line by line: the number in each docstring is that of the list.

Lines 1–14 are AdapterHub's `adapters` 1.3.0, 15–27 PEFT 0.21.2. Those that belong to DoRA, BOFT,
fusion, mixed batches and kernels have their tests where these live.
"""

from __future__ import annotations

import copy
import gc
import json
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import transformers
from families import FAMILIES, tiny_config, tiny_inputs
from safetensors.torch import load_file
from snapshots import adapter_bits, changes, output, refused, same_bits, snapshot, stir
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.pytorch_utils import Conv1D

import adapterzoo
from adapterzoo import (
    AdapterSetup,
    AutoAdapterModel,
    BnConfig,
    LoRAConfig,
    ParBnConfig,
    SeqBnConfig,
    Stack,
    init,
)
from adapterzoo.checkpoint import files
from adapterzoo.errors import CheckpointError, CompositionError, ConfigError, UnknownNameError
from adapterzoo.inject import Adapted

GATED = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3")


def static(auto, family, seed=0):
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        return auto.from_config(tiny_config(family)).eval()


def adapted_paths(model):
    # a module that only helps its layers is of a changed class too, and holds no adapter
    modules = model.base_model.named_modules()
    return {p for p, m in modules if isinstance(m, Adapted) and "adapters" in m._modules}


# --- adapters 1.3.0 ---


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
@pytest.mark.parametrize("cached", [True, False])
def test_generation_keeps_the_cache(family, cached):
    """1: `init` leaves the tokens and the KV cache of `generate` as they are."""
    plain, ours = static(AutoModelForCausalLM, family), static(AutoModelForCausalLM, family)
    init(ours).add_adapter("a", "lora")
    stir(ours, "a")
    ids = torch.randint(3, 99, (2, 5), generator=torch.Generator().manual_seed(0))
    wanted = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False}
    with torch.no_grad():
        tokens = [m.generate(ids, use_cache=cached, **wanted) for m in (plain, ours)]
        assert torch.equal(*tokens)
        first = ours(ids, use_cache=True)
        assert first.past_key_values is not None
        step = ours(tokens[0][:, 5:6], past_key_values=first.past_key_values).logits[:, -1]
        torch.testing.assert_close(
            step, plain(tokens[0][:, :6]).logits[:, -1], atol=1e-5, rtol=1e-4
        )
        ours.set_active_adapters("a")
        with_cache, without = (ours.generate(ids, use_cache=c, **wanted) for c in (True, False))
        assert torch.equal(with_cache, without)


def test_a_stack_of_lora_adds_the_updates(tiny):
    """4: a fresh `b` on top of a trained `a` changes nothing; non-square layers work."""
    model = tiny()
    for name in "ab":
        model.add_adapter(name, LoRAConfig(intermediate_lora=True, output_lora=True))
    stir(model, "a")
    model.set_active_adapters("a")
    alone = output(model)
    for setup in (Stack("a", "b"), Stack("b", "a")):
        model.set_active_adapters(setup)
        assert same_bits(alone, output(model))
    stir(model, "b", seed=2)
    layer = model.base_model.encoder.layer[0].intermediate.dense
    x = torch.randn(3, 32)
    a, b = layer.adapters["a"], layer.adapters["b"]
    expected = x @ (layer.weight + a.lora_B @ a.lora_A + b.lora_B @ b.lora_A).T + layer.bias
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "modernbert", "bert"])
def test_each_bottleneck_uses_the_parts_of_its_own_layer(tiny, family):
    """5: an adapter of one block reads nothing of another block's parameters."""
    model = tiny(family)
    # one that reads a norm in post-LN blocks, or taps one in pre-LN blocks
    model.add_adapter("a", "seq_bn", set_active=True)
    model.add_adapter("p", "par_bn")
    model.set_active_adapters(Stack("a", "p"))
    for name in "ap":
        stir(model, name)
    plan = model._selection.plan
    for path, module in (*model.adapter_modules("a"), *model.adapter_modules("p")):
        own = {id(m) for m in module.modules()}
        others = {id(m) for p, m in model.base_model.named_modules() if f"{path}.adapters" not in p}
        assert not own & others
    for source, readers in plan.taps.items():
        block = source.split(".")[:3]
        assert all(reader.split(".")[: len(block) - 1] == block[:-1] for reader in readers)
    # no closures: what is run depends on modules alone, so a pickled model runs the same
    assert same_bits(output(model), output(pickle.loads(pickle.dumps(model))))


def test_a_config_belongs_to_one_adapter(tiny):
    """6: adding an adapter of another config, however alike, changes no config."""
    model = tiny()
    configs = {
        "a": SeqBnConfig(),
        "b": SeqBnConfig(non_linearity="gelu"),
        "c": SeqBnConfig(reduction_factor=16.0),
        "d": BnConfig(**{**ours(SeqBnConfig()), "scaling": 2.0}),
        "e": SeqBnConfig(init_weights_seed=0),
    }
    for name, config in configs.items():
        model.add_adapter(name, config)
    assert dict(model.adapters_config) == configs
    assert [model.adapters_config[n] is c for n, c in configs.items()] == [True] * 5


def ours(config):
    return {k: v for k, v in config.to_dict().items() if k != "architecture"}


def test_a_head_is_saved_alone(tiny, tmp_path):
    """7: the head "task" takes nothing of "task2" along; a static LM head stays where it is."""
    model = tiny()
    for name in ("task", "task2", "tas"):
        model.add_classification_head(name)
    model.save_head(tmp_path / "head", "task")
    assert len(load_file(tmp_path / "head" / "head.safetensors")) == len(
        model.heads["task"].state_dict()
    )
    for family in ("gpt2", "llama"):
        lm = init(static(AutoModelForCausalLM, family))
        lm.add_adapter("a", "lora[r=1]")
        lm.save_adapter(tmp_path / family, "a")
        tensors = load_file(tmp_path / family / "adapter.safetensors")
        assert set(tensors) == set(adapter_bits(lm, "a"))
        assert (tmp_path / family / "adapter.safetensors").stat().st_size < 20_000


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


# wav2vec2 has weight norm as a parametrisation, which torch itself does not pickle
@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "wav2vec2"])
def test_models_can_be_pickled(tiny, family):
    """9: those with heads and, after `init`, those of transformers' own classes."""
    model = tiny(family)
    for one in (model, init(copy.deepcopy(model.base_model))):
        one.add_adapter("a", "lora", set_active=True)
        stir(one, "a")
        for change in (lambda: None, lambda one=one: one.merge_adapter("a")):
            change()
            made = pickle.loads(pickle.dumps(one))
            assert type(made) is type(one)
            assert same_bits(output(one), output(made))


def test_a_thread_inside_a_setup_runs_what_it_says(tiny):
    """9: a worker thread runs what it is told itself, and the default where it is told nothing."""
    model = tiny()
    model.add_adapter("defect-9", "lora")
    stir(model, "defect-9")
    seen = {}

    def work():
        seen["told nothing"] = output(model)
        with AdapterSetup("defect-9"):
            seen["told"] = output(model)

    with AdapterSetup("defect-9"):
        inside = output(model)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(timeout=60)
    assert same_bits(seen["told"], inside)
    assert same_bits(seen["told nothing"], output(model))


def test_only_the_active_head_is_trained(tiny):
    """10: other heads are frozen by `train_adapter`."""
    model = tiny()
    for name in ("a", "b"):
        model.add_adapter(name, "lora")
        model.add_classification_head(name)
    for name in ("a", "b", "a"):
        model.train_adapter(name)
        trained = {n.split(".")[1] for n, p in model.named_parameters()
                   if p.requires_grad and n.startswith("heads.")}  # fmt: skip
        assert trained == {name}


@pytest.mark.parametrize("config", [LoRAConfig, SeqBnConfig, ParBnConfig])
def test_a_seed_is_a_seed(tiny, config):
    """10: 0 is a seed as any other; the same one gives the same values, other ones at each site."""
    made = {}
    for key, seed, before in ((0, 0, 1), ("again", 0, 2), (1, 1, 3), (None, None, 4)):
        model = tiny()
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(before)
            model.add_adapter("a", config(init_weights_seed=seed))
        made[key] = adapter_bits(model, "a")
    assert made[0] == made["again"]
    assert made[0] != made[1]
    assert made[0] != made[None]
    drawn = [v for k, v in made[0].items() if any(v) and not k.endswith("bias")]
    assert len(set(drawn)) == len(drawn) >= 2


def test_a_scaling_may_be_an_integer(tiny):
    """10: `scaling=4` is `scaling=4.0`."""
    outputs = []
    for scaling in (4, 4.0):
        model = tiny()
        model.add_adapter("a", ParBnConfig(scaling=scaling), set_active=True)
        stir(model, "a")
        outputs.append(output(model))
    assert same_bits(*outputs)


@pytest.mark.parametrize("config", ["lora", "seq_bn", "double_seq_bn", "par_bn", "adapter_plus"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_adapters_are_born_where_their_layers_are(tiny, config, dtype):
    """11: device and dtype follow each layer, not the process."""
    model = tiny()
    model.base_model.encoder.layer[1].to("meta", dtype)
    model.add_adapter("a", config)
    for layer, modules in model.get_adapter("a").items():
        places = {(p.device.type, p.dtype) for m in modules.values() for p in m.parameters()}
        assert places == {("meta", dtype) if layer == 1 else ("cpu", torch.float32)}


def test_a_forward_changes_nothing(tiny):
    """12: neither buffers nor inputs; the second forward gives the bits of the first."""
    for config in ("lora", "double_seq_bn", "par_bn", "adapter_plus[stochastic_depth=0.0]"):
        model = tiny()
        model.add_adapter("a", config, set_active=True)
        stir(model, "a")
        inputs = tiny_inputs("bert")
        kept = {k: t.clone() for k, t in inputs.items()}
        before = snapshot(model)
        for _ in range(2):
            model(**inputs)[0].sum().backward()
        assert all(torch.equal(kept[k], t) for k, t in inputs.items())
        assert not changes(before, snapshot(model))


def test_a_wrong_checkpoint_is_an_error(tiny, tmp_path):
    """12: missing and unexpected keys are no log message."""
    model = tiny()
    model.add_adapter("a", LoRAConfig(layers_to_transform=[0]))
    model.save_adapter(tmp_path, "a")
    other = AutoAdapterModel.from_config(tiny_config("gpt2")).eval()
    with refused(other, CheckpointError, "in the file only", "in the model only"):
        other.load_adapter(tmp_path)


def test_saving_the_whole_model_breaks_nothing(tiny, tmp_path):
    """12: training goes on after `save_pretrained`."""
    model = tiny()
    model.add_adapter("a", "seq_bn")
    model.train_adapter("a")
    model.eval()
    before = output(model)
    model.save_pretrained(tmp_path)
    assert same_bits(before, output(model))
    model(**tiny_inputs("bert"))[0].sum().backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    assert trained
    assert all(p.grad is not None for p in trained)


def test_compositions_are_equal_when_they_are_the_same():
    """12: a composition does not equal its own beginning."""
    assert Stack("a", "b") == Stack("a", "b")
    assert Stack("a", "b") != Stack("a")
    assert Stack("a") != Stack("a", "b")
    assert Stack("a", "b") != Stack("b", "a")
    assert len({Stack("a"), Stack("a"), Stack("b")}) == 2


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
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
    entry = ["Selection.plan", "_with_rows.<locals>.forward"]
    found = calls(plain)
    assert [name for name in found if name not in entry] == expected
    assert sorted(name for name in found if name in entry) == entry
    plain.add_adapter("a", "lora")
    # one look at the plan for each layer that has an adapter, one at the base model's arguments
    found_more = calls(plain)
    more = sorted(set(found_more) - set(expected))
    assert more == sorted(["Adapted.forward", "_refusing.<locals>.forward", *entry])
    assert found_more.count("_refusing.<locals>.forward") == 1
    plain.delete_adapter("a")
    assert calls(plain) == found


def test_it_runs_on_transformers_5():
    """14: the version that is installed here is one that has the security fixes."""
    assert int(transformers.__version__.split(".")[0]) >= 5
    assert set(adapterzoo.__all__) <= set(dir(adapterzoo))


# --- PEFT 0.21.2 ---


def test_half_precision_is_not_promoted(tiny):
    """16: adapters of a half-precision base compute in its dtype, and so does what follows."""
    model = tiny().to(torch.bfloat16)
    model.add_adapter("a", LoRAConfig(intermediate_lora=True), set_active=True)
    stir(model, "a")
    seen = set()
    for path, _ in model.adapter_modules("a"):
        model.base_model.get_submodule(path).register_forward_hook(
            lambda _m, args, out: seen.update({args[0].dtype, out.dtype})
        )
    assert output(model).dtype is torch.bfloat16
    assert seen == {torch.bfloat16}


def test_a_file_is_read_on_the_cpu_whatever_wrote_it(tiny, tmp_path):
    """19: no device stands in the file."""
    model = tiny()
    model.add_adapter("a", "lora")
    model.save_adapter(tmp_path, "a")
    text = json.dumps(json.loads((tmp_path / "adapter_config.json").read_text()))
    assert "cpu" not in text
    assert "cuda" not in text
    with torch.device("meta"):
        read = files.read_tensors(tmp_path / "adapter.safetensors")[1]
    assert {tensor.device.type for tensor in read.values()} == {"cpu"}


@pytest.mark.parametrize("second", ["mlp", "query", "lora", "lora_A", "encoder", "a", "bert", "0"])
def test_a_second_adapter_named_like_a_path_drops_nothing(tiny, tmp_path, second):
    """20: what is saved of an adapter does not depend on the name of another one."""
    model = tiny()
    model.add_adapter("adapter", LoRAConfig(target_modules="all-linear"))
    model.save_adapter(tmp_path / "before", "adapter")
    model.add_adapter(second, LoRAConfig(target_modules="all-linear"))
    model.save_adapter(tmp_path / "after", "adapter")
    before, after = (
        (tmp_path / when / "adapter.safetensors").read_bytes() for when in ("before", "after")
    )
    assert before == after
    assert set(load_file(tmp_path / "after" / "adapter.safetensors")) == set(
        adapter_bits(model, "adapter")
    )


def test_a_failed_call_changes_nothing_and_unknown_names_raise(tiny):
    """21: after a failed forward the next one is right; no method ignores a name."""
    model = tiny()
    for name, config in {"a": "lora", "b": "par_bn"}.items():
        model.add_adapter(name, config)
        stir(model, name)
    model.set_active_adapters(Stack("a", "b"))
    before = snapshot(model)
    for wrong in (torch.tensor([[1000]]), torch.ones(1, 2, 3, 4).long()):
        with pytest.raises((IndexError, ValueError, RuntimeError)):
            model(input_ids=wrong)
    assert not changes(before, snapshot(model))
    for setup in ("c", ["a", "c"]):
        with refused(model, UnknownNameError, "'c'", "Known adapters: 'a', 'b'"):
            model.set_active_adapters(setup)
    with refused(model, CompositionError, "adapters 3", "Write 'a' or Stack"):
        model.set_active_adapters(3)


def test_the_scale_cannot_change_under_a_merged_adapter(tiny):
    """23: a config is frozen, and reset gives back bits whatever happened in between."""
    model = tiny()
    model.add_adapter("a", "lora")
    stir(model, "a")
    before = snapshot(model)
    with pytest.raises(AttributeError):
        model.adapters_config["a"].alpha = 32
    model.merge_adapter("a")
    for _, module in model.adapter_modules("a"):
        module.scaling *= 7
    stir(model, "a", seed=9)
    model.reset_adapter()
    stir(model, "a")
    for _, module in model.adapter_modules("a"):
        module.scaling /= 7
    assert not changes(before, snapshot(model))


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


@pytest.mark.parametrize("combination_type", ["linear", "cat", "svd"])
def test_a_weighted_adapter_keeps_the_magnitudes_of_dora(tiny, combination_type):
    """23: weight 1 is the adapter itself."""
    model = tiny().double()
    model.add_adapter("a", "dora")
    stir(model, "a")
    model.add_weighted_adapter(["a"], [1.0], "c", combination_type)
    model.set_active_adapters("a")
    expected = output(model)
    model.set_active_adapters("c")
    torch.testing.assert_close(output(model), expected, rtol=1e-10, atol=1e-10)


def test_loading_walks_the_model_no_more_often_with_more_adapters(tiny, tmp_path, monkeypatch):
    """25: loading is linear in bytes: no walk over the module tree at all."""
    model = tiny()
    model.add_adapter("a", "lora")
    model.save_adapter(tmp_path, "a")
    model.load_adapter(tmp_path, load_as="warm")
    seen = []
    whole = torch.nn.Module.named_modules

    def named_modules(self, *args, **kwargs):
        for found in whole(self, *args, **kwargs):
            seen[-1] += self in (model, model.base_model)
            yield found

    monkeypatch.setattr(torch.nn.Module, "named_modules", named_modules)
    for i in range(5):
        seen.append(0)
        model.load_adapter(tmp_path, load_as=f"b{i}")
    # transformers looks for the first parameter when it is asked for the model's dtype
    assert max(seen) == min(seen) < len(list(whole(model)))


@pytest.mark.parametrize(
    "init_weights", ["pissa", "pissa_niter_4", "olora", "loftq", "corda", "eva"]
)
def test_initialisations_that_change_the_base_are_refused(tiny, tmp_path, init_weights):
    """27: a loader that does not know them does not load wrong outputs."""
    model = tiny()
    with refused(model, ConfigError, f"init_weights={init_weights!r}", "Write init_weights='lora'"):
        model.add_adapter("a", {"architecture": "lora", "init_weights": init_weights})


def test_importing_costs_neither_torch_nor_transformers():
    """13: `import adapterzoo` alone is cheap."""
    code = "import sys, adapterzoo; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "PYTHONPATH": str(Path(adapterzoo.__file__).parents[1])},
    )  # fmt: skip
    assert ran.stdout == "[]\n", ran.stderr
