"""Invertible bottlenecks: formula, inverse, heads, rows, generation; files in test_golden_zoo."""

import copy
import json
import math
from pathlib import Path

import pytest
import torch
from families import tiny_config, tiny_inputs
from snapshots import adapter_bits, of_adapter, same_bits, stir
from transformers import AutoModel, AutoModelForCausalLM

from adapterzoo import (
    AdapterFusionConfig,
    AutoAdapterModel,
    Average,
    BatchSplit,
    ConfigUnion,
    DoubleSeqBnInvConfig,
    Fuse,
    LoRAConfig,
    Parallel,
    SeqBnConfig,
    SeqBnInvConfig,
    Split,
    Stack,
    init,
)
from adapterzoo.errors import CheckpointError, CompositionError, ConfigError, SiteError, StateError
from adapterzoo.inject.adapted import adapters_of
from adapterzoo.methods.bottleneck.invertible import NiceBlock

GOLDEN = Path(__file__).resolve().parents[1] / "data/golden_adapterhub/gpt2/seq_bn_inv"
INV = SeqBnInvConfig(reduction_factor=4)
HEADS = {"bert": "masked_lm", "gpt2": "causal_lm", "llama": "causal_lm", "t5": "seq2seq_lm"}


def block(d=6, factor=1.5, seed=3, **fields):
    config = SeqBnInvConfig(
        inv_adapter_reduction_factor=factor, init_weights_seed=seed, non_linearity="tanh", **fields
    )
    made = NiceBlock(config, d, torch.device("cpu"), torch.float64)
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(generator=source)
    return made


def made(family, head=None, **configs):
    """A model of `AutoAdapterModel` in float64, with adapters and one head."""
    torch.manual_seed(0)
    model = AutoAdapterModel.from_config(tiny_config(family)).double().eval()
    kind = head or HEADS[family]
    options = {"num_labels": 3} if kind == "classification" else {}
    getattr(model, f"add_{kind}_head")("head", **options)
    for number, (name, config) in enumerate(configs.items()):
        model.add_adapter(name, config)
        stir(model, name, number)
    return model


def logits(model, inputs, **kwargs):
    with torch.no_grad():
        return model(**inputs, **kwargs).logits


def prompt(family, batch=2):
    return {k: v for k, v in tiny_inputs(family, batch=batch).items() if "decoder" not in k}


def test_the_formula():
    nice = block()
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    weights = {key: value.detach() for key, value in nice.named_parameters()}

    def net(name, t):
        inner = torch.tanh(t @ weights[f"{name}.0.weight"].T + weights[f"{name}.0.bias"])
        return inner @ weights[f"{name}.2.weight"].T + weights[f"{name}.2.bias"]

    assert weights["F.0.weight"].shape == (2, 3)
    y1 = x[..., :3] + net("F", x[..., 3:])
    y2 = x[..., 3:] + net("G", y1)
    torch.testing.assert_close(nice(x), torch.cat([y1, y2], -1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("d", "factor"), [(6, 1.5), (2, 1), (64, 2), (32, 16)])
def test_the_inverse_is_the_inverse(d, factor):
    nice, x = block(d, factor), torch.randn(3, 7, d, dtype=torch.float64)
    y = nice(x)
    assert (y - x).abs().max() > 0.1
    torch.testing.assert_close(nice.inverse(y), x, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(nice(nice.inverse(x)), x, rtol=1e-12, atol=1e-12)


def test_fresh_values_are_those_of_adapters():
    """N(0, 0.02) and zero biases, the same for one seed."""
    config = SeqBnInvConfig(init_weights_seed=5)
    one, two = (NiceBlock(config, 512, torch.device("cpu"), torch.float32) for _ in range(2))
    for name, parameter in one.named_parameters():
        assert same_bits(parameter, two.get_parameter(name))
        if name.endswith("bias"):
            assert not parameter.any()
        else:
            assert abs(parameter.std().item() / 0.02 - 1) < 5 / math.sqrt(parameter.numel())
    assert not torch.equal(one.get_parameter("F.0.weight"), one.get_parameter("G.0.weight"))


@pytest.mark.parametrize("family", HEADS)
def test_the_head_reads_the_inverse_of_what_it_read(family):
    """Entry and exit by hand, as hooks of the plain model beside the bottlenecks alone."""
    model = made(family, a=INV)
    model.add_adapter("plain", SeqBnConfig(reduction_factor=4))
    own = dict(model.adapter_modules("a"))
    for path, module in model.adapter_modules("plain"):
        module.load_state_dict(own[path].state_dict())
    nice, inputs = own[""]["invertible"], tiny_inputs(family, batch=2)
    model.set_active_adapters(
        "a",
    )
    found = logits(model, inputs, head="head")
    model.set_active_adapters("plain")
    first = model.base_model.get_submodule(next(iter(own)).removesuffix(".entry"))
    last = model.heads["head"].output_embeddings
    handles = [
        first.register_forward_pre_hook(lambda _, args: (nice(args[0]), *args[1:])),
        last.register_forward_pre_hook(lambda _, args: (nice.inverse(args[0]),)),
    ]
    expected = logits(model, inputs, head="head")
    for handle in handles:
        handle.remove()
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("family", HEADS)
@pytest.mark.parametrize("config", [INV, ConfigUnion(LoRAConfig(), INV)], ids=["inv", "union"])
def test_code_of_adapters_calls_and_hooks_the_function(family, config):
    model, inputs = made(family, a=config), tiny_inputs(family, batch=2)
    assert model.get_invertible_adapter() is None
    model.set_active_adapters("a")
    function = model.get_invertible_adapter()
    assert function is model.base_model.get_invertible_adapter()
    x = torch.randn(2, 3, 32, dtype=torch.float64)
    nice = next(m for m in function.modules() if isinstance(m, NiceBlock))
    assert same_bits(function(x), nice(x))
    assert (function(x) - x).abs().max() > 0.01
    torch.testing.assert_close(function(function(x), rev=True), x, rtol=1e-12, atol=1e-12)
    calls = []
    hook = function.register_forward_hook(
        lambda _, args, kwargs, y: calls.append((args[0], kwargs.get("rev", False), y)),
        with_kwargs=True,
    )
    logits(model, inputs, head="head")
    assert [rev for _, rev, _ in calls] == [False, True]
    for read, rev, y in calls:
        assert same_bits(y, nice.inverse(read) if rev else nice(read))
    hook.remove()
    # paths of parameters lead through the property
    held = dict(model.base_model.named_parameters())
    paths = [path for path in held if path.startswith("invertible_adapters.a.")]
    assert len(paths) == 8
    for path in paths:
        assert model.base_model.get_parameter(path) is held[path]


def test_without_blocks_the_inverse_undoes_the_function():
    """Where blocks change nothing, and the head has one layer, logits are the plain model's."""
    model = made("llama", a=INV, b=INV.replace(non_linearity="tanh"))
    model.add_causal_lm_head("head", layers=1, overwrite_ok=True)
    inputs = tiny_inputs("llama", batch=2)
    embedded = model.model.embed_tokens(inputs["input_ids"])
    with torch.no_grad():
        for name in ("a", "b"):
            for path, module in model.adapter_modules(name):
                for parameter in module.parameters() if path else ():
                    parameter.zero_()
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.norm = torch.nn.Identity()
    plain = logits(model, inputs)
    for setup in ("a", Stack("a", "b"), Stack("b", "a"), BatchSplit("a", "b", batch_sizes=[1, 1])):
        model.set_active_adapters(setup)
        with torch.no_grad():
            assert (model.model(**inputs)[0] - embedded).abs().max() > 0.01
        torch.testing.assert_close(logits(model, inputs, head="head"), plain, rtol=1e-9, atol=1e-9)


def test_a_head_without_an_exit_reads_what_the_blocks_give():
    model = made("bert", "classification", a=INV)
    inputs = tiny_inputs("bert", batch=2)
    model.set_active_adapters("a")
    with torch.no_grad():
        hidden = model.base_model(**inputs)[0]
        expected = model.heads["head"](hidden[:, 0], None)
    torch.testing.assert_close(logits(model, inputs), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("family", HEADS)
@pytest.mark.parametrize("own_heads", [False, True])
def test_rows_are_the_rows_alone(family, own_heads):
    """Different adapters and none in one batch, answered by one head, or each by its own."""
    model = made(family, a=INV, b=DoubleSeqBnInvConfig(reduction_factor=4), c=SeqBnConfig())
    if own_heads:
        for name in ("a", "b"):
            getattr(model, f"add_{HEADS[family]}_head")(name)
            torch.nn.init.normal_(model.heads[name].output_embeddings.weight, std=0.1)
        model.active_head = "head"
    inputs = tiny_inputs(family, batch=5)
    names = ["b", "a", None, "c", "a"]
    mixed = logits(model, inputs, adapter_names=names)
    for row, name in enumerate(names):
        model.set_active_adapters(name)
        head = name if own_heads and name in ("a", "b") else "head"
        alone = logits(model, {k: v[row : row + 1] for k, v in inputs.items()}, head=head)[0]
        torch.testing.assert_close(mixed[row], alone, rtol=1e-9, atol=1e-9)


def test_parallel_answers_one_after_the_other():
    model, inputs = made("gpt2", a=INV, b=INV), tiny_inputs("gpt2", batch=2)
    model.set_active_adapters(Parallel("a", "b"))
    parallel = logits(model, inputs, head="head")
    for number, name in enumerate("ab"):
        model.set_active_adapters(name)
        expected = logits(model, inputs, head="head")
        torch.testing.assert_close(parallel[2 * number : 2 * number + 2], expected)


@pytest.mark.parametrize("family", ["gpt2", "llama", "t5"])
@pytest.mark.parametrize("beams", [1, 3])
def test_a_cache_changes_nothing(family, beams):
    model = made(family, a=INV)
    model.set_active_adapters("a")
    options = {"max_new_tokens": 5, "num_beams": beams, "do_sample": False, "pad_token_id": 0}
    options |= {"eos_token_id": None, "output_scores": True, "return_dict_in_generate": True}
    cached = model.generate(**prompt(family), **options, use_cache=True)
    uncached = model.generate(**prompt(family), **options, use_cache=False)
    assert torch.equal(cached.sequences, uncached.sequences)
    torch.testing.assert_close(cached.scores, uncached.scores, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("beams", [1, 3])
def test_rows_generate_as_alone(beams):
    model, names = made("llama", a=INV, b=INV), ["b", None, "a"]
    options = {"max_new_tokens": 5, "num_beams": beams, "do_sample": False, "pad_token_id": 0}
    options["eos_token_id"] = None
    inputs = {"input_ids": torch.randint(5, 50, (3, 7))}
    mixed = model.generate(**inputs, **options, adapter_names=names)
    for row, name in enumerate(names):
        model.set_active_adapters(name)
        alone = model.generate(inputs["input_ids"][row : row + 1], **options)
        assert torch.equal(mixed[row], alone[0])


def test_checkpointed_gradients_are_the_gradients():
    found = []
    for use in (None, True, False):
        model = made("llama", a=INV)
        model.train_adapter("a")
        if use is not None:
            model.gradient_checkpointing_enable({"use_reentrant": use})
        logits = model(**tiny_inputs("llama", batch=2)).logits
        logits.square().sum().backward()
        adapters = {id(p) for _, m in model.adapter_modules("a") for p in m.parameters()}
        own = {n: p.grad for n, p in model.named_parameters() if id(p) in adapters}
        assert len(own) == 8 + 4 * 2
        assert all(grad is not None and grad.abs().max() > 0 for grad in own.values())
        found.append(own)
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


@pytest.mark.sweep
def test_entry_and_exit_compile():
    model, inputs = made("bert", a=INV, b=INV), tiny_inputs("bert", batch=2)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for setup in ("a", Stack("b", "a"), BatchSplit("b", "a", batch_sizes=[1, 1]), None):
        model.set_active_adapters(setup)
        expected = logits(model, inputs, head="head")
        with torch.no_grad():
            found = compiled(**inputs, head="head").logits
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_stays_half(dtype):
    """Near to float64 from embeddings to logits, with parameters in float32 too."""
    inputs = tiny_inputs("llama", batch=2)
    for own in (None, "float32"):
        model = made("llama", a=INV.replace(dtype=own)).to(dtype)
        if own:
            model.adapter_to("a", dtype=torch.float32)
        model.set_active_adapters("a")
        exact = copy.deepcopy(model).double()
        found, expected = logits(model, inputs, head="head"), logits(exact, inputs, head="head")
        assert found.dtype == dtype
        error = (found.double() - expected).abs().max()
        assert error <= 32 * torch.finfo(dtype).eps * expected.abs().max()


def test_its_parameters_are_there_once(tmp_path):
    model = made("t5", a=INV)
    keys = [key for key in model.state_dict() if ".F.0.weight" in key]
    assert keys == ["transformer.invertible_adapters.a.invertible.F.0.weight"]
    model.save_adapter(tmp_path, "a")
    other = copy.deepcopy(model)
    other.load_adapter(tmp_path, load_as="b")
    assert adapter_bits(other, "b") == adapter_bits(model, "a")
    inputs = tiny_inputs("t5", batch=2)
    found = []
    for each, name in ((model, "a"), (other, "b")):
        each.set_active_adapters(name)
        found.append(logits(each, inputs, head="head"))
    assert torch.equal(*found)
    model.delete_adapter("a")
    assert not any(of_adapter(key) for key in model.state_dict())


def test_it_is_averaged_as_bottlenecks_are():
    model = made("bert", a=INV, b=INV)
    model.average_adapter("c", ["a", "b"], weights=[0.25, 0.75])
    a, b, c = (dict(model.adapter_modules(name)) for name in "abc")
    for path, module in c.items():
        for key, value in module.named_parameters():
            expected = 0.25 * a[path].get_parameter(key) + 0.75 * b[path].get_parameter(key)
            torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)


def test_a_union_has_one():
    model = made("bert")
    model.add_adapter("u", "seq_bn_inv|lora[r=2]")
    stir(model, "u")
    model.set_active_adapters("u")
    assert logits(model, tiny_inputs("bert"), head="head").isfinite().all()
    with pytest.raises(ConfigError, match=r"one of them changes the input of.*Stack"):
        model.add_adapter("twice", "seq_bn_inv|double_seq_bn_inv")
    assert "twice" not in model.adapters_config


def test_the_head_of_a_task_class_has_no_inverse():
    """As in adapters: the class of transformers computes its logits itself."""
    torch.manual_seed(0)
    model = init(AutoModelForCausalLM.from_config(tiny_config("llama")).double().eval())
    model.add_adapter("a", INV, set_active=True)
    inputs = tiny_inputs("llama")
    with torch.no_grad():
        expected = model.lm_head(model.model(**inputs)[0])
    torch.testing.assert_close(logits(model, inputs), expected, rtol=1e-12, atol=1e-12)


def test_files_of_adapter_transformers(tmp_path):
    """The names of language adapters, and a config inside of the config."""
    for file in GOLDEN.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    document = json.loads((tmp_path / "adapter_config.json").read_text())
    values = document["config"]
    factor = values.pop("inv_adapter_reduction_factor")
    values["invertible_adapter"] = {
        "block_type": values.pop("inv_adapter"), "non_linearity": "relu", "reduction_factor": factor
    }  # fmt: skip
    document["version"] = "2.3.0"
    (tmp_path / "adapter_config.json").write_text(json.dumps(document))
    tensors = torch.load(tmp_path / "pytorch_adapter.bin", weights_only=True)
    old = {k.replace("invertible_adapters", "invertible_lang_adapters"): t
           for k, t in tensors.items()}  # fmt: skip
    assert old.keys() != tensors.keys()
    torch.save(old, tmp_path / "pytorch_adapter.bin")
    model = AutoAdapterModel.from_pretrained(GOLDEN.parent / "base")
    model.load_adapter(GOLDEN, load_as="now")
    model.load_adapter(tmp_path, load_as="then")
    assert adapter_bits(model, "then") == adapter_bits(model, "now")
    assert model.adapters_config["then"] == model.adapters_config["now"]
    assert model.adapters_config["now"]["inv_adapter"] == "nice"


def test_files_of_the_peer_hold_what_was_read(tmp_path):
    model = AutoAdapterModel.from_pretrained(GOLDEN.parent / "base")
    model.load_adapter(GOLDEN, load_as="golden")
    model.save_adapter(tmp_path, "golden", format="adapterhub")
    theirs, ours = (
        torch.load(folder / "pytorch_adapter.bin", weights_only=True)
        for folder in (GOLDEN, tmp_path)
    )
    assert ours.keys() == theirs.keys()
    assert all(same_bits(ours[key], tensor) for key, tensor in theirs.items())
    theirs, ours = (
        json.loads((folder / "adapter_config.json").read_text())["config"]
        for folder in (GOLDEN, tmp_path)
    )
    assert ours == theirs


@pytest.mark.parametrize(
    ("family", "words"), [("vit", "inv_adapter=None"), ("electra", "site_convention='electra'")]
)
def test_families_whose_files_mean_another_place_are_not_written(family, words, tmp_path):
    model = init(AutoModel.from_config(tiny_config(family)))
    model.add_adapter("a", INV)
    with pytest.raises(CheckpointError, match=f"{family} models adapters computes {words}"):
        model.save_adapter(tmp_path / "x", "a", format="adapterhub")
    assert not (tmp_path / "x").exists()


def test_a_saved_model_has_it(tmp_path):
    model, inputs = made("gpt2", a=INV), tiny_inputs("gpt2", batch=2)
    model.set_active_adapters("a")
    model.save_pretrained(tmp_path)
    again = AutoAdapterModel.from_pretrained(tmp_path, dtype=torch.float64).eval()
    assert adapter_bits(again, "a") == adapter_bits(model, "a")
    again.set_active_adapters("a")
    found, expected = (logits(each, inputs, head="head") for each in (again, model))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


# --- what is refused ---


@pytest.mark.parametrize("setup", [Average("a", "b"), Split("a", None, splits=[3, 4])], ids=repr)
def test_what_has_no_inverse_is_refused(setup):
    model = made("bert", a=INV, b=INV)
    with pytest.raises(CompositionError, match=r"'a' has an invertible function.*Stack\('a'"):
        model.set_active_adapters(setup)
    assert model.active_adapters is None


# --- fusion ---


def fused(invertible, family="bert"):
    model = made(family, a=INV, b=INV)
    model.add_adapter_fusion(Fuse("a", "b"), AdapterFusionConfig(entry=invertible))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "adapter_fusion_layer" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def seen_by(model, path, inputs):
    """What the module at a path is given."""
    seen = []
    hook = model.base_model.get_submodule(path).register_forward_hook(
        lambda module, args, out: seen.append(args[0])
    )
    with torch.no_grad():
        model.base_model(**inputs)
    hook.remove()
    return seen[0]


def test_a_fusion_attends_to_the_changes_of_invertible_functions():
    """The input of the first block, by plain torch from the parts."""
    model, inputs = fused("fused"), tiny_inputs("bert")
    query = "encoder.layer.0.attention.self.query"
    model.set_active_adapters(None)
    x = seen_by(model, query, inputs)
    changes = []
    for name in "ab":
        model.set_active_adapters(name)
        changes.append(seen_by(model, query, inputs) - x)
    model.set_active_adapters(Fuse("a", "b"))
    paths = model._adapter_state.fusions["a,b"].paths
    entry = next(path for path in paths if path == model.anatomy.entry.path)
    fusion = adapters_of(model.base_model.get_submodule(entry))["fusion:a,b"]
    z = torch.stack(changes, -2)  # [rows, tokens, 2, d]
    with torch.no_grad():
        scores = torch.einsum("rtd,rtnd->rtn", fusion.query(x), fusion.key(z)).softmax(-1)
        expected = x + torch.einsum("rtn,rtnd->rtd", scores, fusion.value(z))
    torch.testing.assert_close(seen_by(model, query, inputs), expected, rtol=1e-9, atol=1e-9)


def test_a_fusion_may_take_the_function_of_the_first():
    model, inputs = fused("first"), tiny_inputs("bert")
    query = "encoder.layer.0.attention.self.query"
    model.set_active_adapters(Fuse("a", "b"))
    found = seen_by(model, query, inputs)
    model.set_active_adapters("a")
    assert torch.equal(found, seen_by(model, query, inputs))


def test_only_the_function_of_the_first_has_an_inverse(tmp_path):
    for invertible in ("first", "fused"):
        torch.manual_seed(0)
        model = AutoAdapterModel.from_config(tiny_config("bert")).double().eval()
        for number, name in enumerate("ab"):
            model.add_adapter(name, INV)
            stir(model, name, number)
        model.add_masked_lm_head("head")
        fuse, config = Fuse("a", "b"), AdapterFusionConfig(entry=invertible)
        model.add_adapter_fusion(fuse, config, set_active=True)
        model.active_head = "head"
        inputs = tiny_inputs("bert")
        if invertible == "fused":
            with pytest.raises(CompositionError, match=r"no inverse.*entry='first'"):
                model(**inputs)
            with pytest.raises(CheckpointError, match="only the first one acts"):
                model.save_adapter_fusion(tmp_path / "x", fuse, format="adapterhub")
            continue
        with torch.no_grad():
            expected = model(**inputs).logits
        for form in ("native", "adapterhub"):
            model.save_adapter_fusion(tmp_path / form, fuse, format=form)
            model.delete_adapter_fusion(fuse)
            model.load_adapter_fusion(tmp_path / form, set_active=True)
            assert model._adapter_state.fusions["a,b"].config.entry == "first"
            model.active_head = "head"
            with torch.no_grad():
                assert torch.equal(model(**inputs).logits, expected)


@pytest.mark.parametrize(
    ("d", "factor", "parts"),
    [(33, 2, ["of a half of 16.5", "inv_adapter=None"]),
     (32, 17, ["inv_adapter_reduction_factor=17", "inv_adapter_reduction_factor=2"]),
     (32, 1e9, ["1.6e-08 features"])],
)  # fmt: skip
def test_widths_that_do_not_divide(d, factor, parts):
    with pytest.raises(ConfigError) as error:
        block(d, factor)
    for part in ("SeqBnInvConfig(inv_adapter_reduction_factor", *parts):
        assert part in str(error.value)


@pytest.mark.parametrize("factor", [0, -1, math.inf, math.nan, "2", True])
def test_a_factor_that_is_no_factor(factor):
    with pytest.raises(ConfigError, match="inv_adapter_reduction_factor is a number above 0"):
        SeqBnInvConfig(inv_adapter_reduction_factor=factor)


@pytest.mark.parametrize("name", ["glow", "NICE", "", 3])
def test_other_invertible_functions_do_not_exist(name):
    with pytest.raises(ConfigError, match="one of None, 'nice'"):
        SeqBnInvConfig(inv_adapter=name)


def test_a_model_without_an_entry_is_refused():
    model = init(AutoModel.from_config(tiny_config("albert")))
    before = list(model.state_dict())
    with pytest.raises(
        SiteError,
        match=r"cannot have an adapter at its input \(.*several times.*\).*inv_adapter=None",
    ):
        model.add_adapter("a", INV)
    assert list(model.state_dict()) == before
    model.add_adapter("a", INV.replace(inv_adapter=None, inv_adapter_reduction_factor=None))


def test_what_peft_cannot_say_is_refused(tmp_path):
    model = made("bert", a=INV)
    with pytest.raises(CheckpointError, match=r"BnConfig, which is not a method of PEFT"):
        model.save_adapter(tmp_path / "x", "a", format="peft", with_head=False)
    assert not (tmp_path / "x").exists()


def test_it_is_not_merged():
    model = made("bert", a=INV)
    with pytest.raises(StateError, match="merge"):
        model.merge_adapter("a")
