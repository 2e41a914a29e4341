"""Mixed batches: `adapter_names`, and what else gives rows of a batch to different adapters."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from families import first_output, tiny_config, tiny_inputs
from snapshots import of_adapter, refused, stir
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BertModel,
    LlamaModel,
)
from variants import VARIANTS

from adapterzoo import (
    AdapterSetup,
    AutoAdapterModel,
    Average,
    BatchSplit,
    Fuse,
    Parallel,
    Split,
    Stack,
    init,
)
from adapterzoo.errors import CompositionError, ConfigError, StateError, UnknownNameError
from adapterzoo.inject.adapted import Adapted
from adapterzoo.model import batches

CONFIGS = {"a": "lora", "b": "lora[r=4,alpha=16]", "c": "double_seq_bn", "d": "boft", "e": "dora",
           "f": "par_bn", "g": "seq_bn", "h": "lora[use_gating=True]"}  # fmt: skip
# sorted by adapter the rows are in an order that is not its own inverse
MIXED = ["b", None, "a", "c", "b", Stack("f", "e")]


def with_adapters(family, configs=CONFIGS, auto=AutoModel, dtype=torch.float64, **sizes):
    torch.manual_seed(0)
    config = tiny_config(family)
    config.update(sizes)
    model = init(auto.from_config(config).to(dtype).eval())
    for i, (name, config) in enumerate(configs.items()):
        model.add_adapter(name, config)
        stir(model, name, seed=i, std=0.3)
    return model


def row(inputs, i, count=1):
    return {key: value[i : i + count] for key, value in inputs.items()}


def close(found, expected, atol=1e-12):
    """Rounding of float64: a product of one row may sum in another order than one of several."""
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


def alone(model, name, inputs, **kwargs):
    """What one adapter makes of one row."""
    with AdapterSetup(name):
        return first_output(model(**inputs, **kwargs))


def check_rows(model, inputs, names, atol=1e-12):
    """Each row of the mixed batch is that row alone, and no adapter does nothing."""
    with torch.no_grad():
        found = first_output(model(**inputs, adapter_names=names))
        plain = first_output(model(**inputs))
        for i, name in enumerate(names):
            expected = alone(model, name, row(inputs, i))
            # a row that gets fewer tokens of prompts than others is filled up
            close(found[i : i + 1, : expected.shape[1]], expected, atol)
            own = found[i, : plain.shape[1]]
            same = torch.allclose(own, plain[i], rtol=0, atol=max(atol, 1e-9))
            assert same == (name is None)


# --- rows are rows alone ---


@pytest.mark.parametrize("family", ["bert", "deberta-v2", "gpt2", "llama", "t5", "vit", "albert"])
def test_rows_with_different_methods_are_the_rows_alone(family):
    model = with_adapters(family)
    inputs = tiny_inputs(family, batch=6)
    wide = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    check_rows(model, wide, MIXED)


# Conv1D layers are tried by the conformance suite
@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_of_every_method_are_the_rows_alone(variant):
    model = with_adapters("bert", {"a": VARIANTS[variant], "b": VARIANTS[variant]})
    inputs = tiny_inputs("bert", batch=5)
    check_rows(model, inputs, ["b", None, "a", "b", "b"])
    check_rows(model, inputs, ["b", "a", Stack("a", "b"), "a", Stack("b", "a")])


def test_rows_at_experts_that_return_all_tokens_in_one_dimension():
    # Llama 4, which rotates and routes in float32
    text = {**tiny_config("llama").to_dict(), "model_type": "llama4_text", "num_local_experts": 2}
    config = AutoConfig.for_model(**text, intermediate_size_mlp=32, moe_layers=[0, 1])
    model = init(AutoModel.from_config(config).double().eval())
    for name, kind in (("a", "seq_bn"), ("b", "double_seq_bn"), ("c", "lora[r=2]")):
        model.add_adapter(name, kind)
        stir(model, name)
    check_rows(model, tiny_inputs("llama", batch=3), ["a", None, "b"], atol=1e-6)
    check_rows(model, tiny_inputs("llama", batch=3), ["b", "a", "c"], atol=1e-6)


def test_one_adapter_for_all_rows_is_that_adapter_active():
    model = with_adapters("bert")
    inputs = tiny_inputs("bert", batch=3)
    for name in (*CONFIGS, None):
        with AdapterSetup(name):
            expected = model(**inputs).last_hidden_state
        found = model(**inputs, adapter_names=[name] * 3).last_hidden_state
        close(found, expected, 0 if name is None else 1e-12)


def test_rows_may_take_compositions_and_peft_s_name_of_the_base_model():
    model = with_adapters("bert")
    inputs = tiny_inputs("bert", batch=4)
    names = [Average("a", "g"), Split("c", "b", splits=[3, 4]), Stack("d", "a", "e"), "__base__"]
    found = model(**inputs, adapter_names=names).last_hidden_state
    for i, name in enumerate([*names[:3], None]):
        expected = alone(model, name, row(inputs, i))
        close(found[i : i + 1], expected)


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_rows_without_adapter_have_the_bits_of_the_base_model(family):
    model = with_adapters(family, dtype=torch.float32)
    inputs = tiny_inputs(family, batch=4)
    with torch.no_grad():
        plain = first_output(model(**inputs))
        for names in ("ab", "ee", "dd", "ag", "cf"):
            mixed = [names[0], None, names[1], None]
            found = first_output(model(**inputs, adapter_names=mixed))
            assert torch.equal(found[1], plain[1])
            assert torch.equal(found[3], plain[3])
            assert not torch.equal(found[0], plain[0])


@pytest.mark.parametrize("family", ["bert", "gpt2"])
@pytest.mark.parametrize("names", [["a", None, "b"], ["e", "e2", None], [Stack("a", "e"), "b"]])
def test_adapters_of_one_class_act_in_one_call(family, names):
    model = with_adapters(family, {**CONFIGS, "e2": "dora[r=3]"})
    model(**tiny_inputs(family, batch=len(names)), adapter_names=names)
    (plan,) = model._adapter_state.plans.values()
    assert plan.sites
    # of a stack of different methods each layer is of one class
    assert all(site.step.layers is not None for site in plan.sites.values())
    check_rows(model, tiny_inputs(family, batch=len(names)), names)


def test_names_stand_in_the_place_of_what_is_active_and_leave_it_active():
    model = with_adapters("bert")
    inputs = tiny_inputs("bert", batch=2)
    expected = model(**inputs, adapter_names=["a", None]).last_hidden_state
    model.set_active_adapters("c")
    active = model(**inputs).last_hidden_state
    assert torch.equal(model(**inputs, adapter_names=["a", None]).last_hidden_state, expected)
    assert model.active_adapters == Stack("c")
    assert torch.equal(model(**inputs).last_hidden_state, active)


def test_an_adapter_that_comes_anew_under_an_old_name_acts():
    model = with_adapters("bert")
    inputs = tiny_inputs("bert", batch=2)
    for config in ("seq_bn", "lora[r=2]", "dora"):
        model.add_adapter("a", config, overwrite_ok=True, set_active=True)
        stir(model, "a", std=0.3)
        model.set_active_adapters(None)
        check_rows(model, inputs, ["a", "b"])


# --- training ---


@pytest.mark.parametrize("family", ["bert", "gpt2"])
@pytest.mark.parametrize("checkpointing", [None, True, False])
def test_gradients_of_a_mixed_batch_are_those_of_the_rows_alone(family, checkpointing):
    model = with_adapters(family)
    inputs = tiny_inputs(family, batch=6)
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        model.enable_input_require_grads()
        model.train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
    weight = torch.randn(6, 7, 32, dtype=torch.float64)

    def gradients(backward):
        model.zero_grad()
        backward()
        found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        return {n: g for n, g in found.items() if of_adapter(n) and g.count_nonzero()}

    def mixed():
        (first_output(model(**inputs, adapter_names=MIXED)) * weight).sum().backward()

    def one_by_one():
        for i, name in enumerate(MIXED):
            with AdapterSetup(name):
                (first_output(model(**row(inputs, i))) * weight[i]).sum().backward()

    found, expected = gradients(mixed), gradients(one_by_one)
    assert {name for name in "abcdef" if any(of_adapter(key, name) for key in found)} == {*"abcef"}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        close(found[name], gradient, 1e-9)


# --- one plan for a forward ---


def test_a_plan_is_made_once_for_a_set_of_adapters(monkeypatch):
    model = with_adapters("bert", {"a": "lora", "b": "lora"})
    inputs = tiny_inputs("bert", batch=4)
    made, plain = [], batches.make_plan
    monkeypatch.setattr(batches, "make_plan", lambda *a, **k: made.append(1) or plain(*a, **k))
    for names in (["a", "b", "a", None], ["a", "b", None, None], ["a", "a", "b", None]):
        model(**inputs, adapter_names=names)
    assert len(made) == 1
    model.delete_adapter("b")
    with pytest.raises(UnknownNameError):
        model(**inputs, adapter_names=["a", "b", "a", None])


def test_lora_takes_one_call_a_site_whatever_the_number_of_adapters(monkeypatch):
    from adapterzoo.methods.low_rank import lora

    configs = {f"l{i}": f"lora[r={2 + i},attn_matrices=['q']]" for i in range(5)}
    model = with_adapters("bert", configs)
    calls = []
    plain = lora.grouped_low_rank
    monkeypatch.setattr(lora, "grouped_low_rank", lambda *a, **k: calls.append(1) or plain(*a, **k))
    inputs = tiny_inputs("bert", batch=6)
    check_rows(model, inputs, [*configs, None])
    assert len(calls) == 2


# --- compiled ---


def test_a_mixed_forward_compiles_in_one_graph():
    torch._dynamo.reset()
    model = with_adapters("bert", {"a": "lora", "b": "seq_bn"}, num_hidden_layers=1)
    inputs = tiny_inputs("bert", batch=3)
    compiled = torch.compile(model, fullgraph=True, backend="eager")

    def check(names):
        with torch.no_grad():
            found = first_output(compiled(**inputs, adapter_names=names))
            close(found, first_output(model(**inputs, adapter_names=names)))

    # what was asked for before, what was not, and an adapter that came anew
    for names in (["a", "b", None], ["a", "b", None], [None, "b", "a"]):
        check(names)
    model.add_adapter("a", "seq_bn", overwrite_ok=True)
    stir(model, "a", std=0.3)
    check(["a", "b", None])
    torch._dynamo.reset()


# --- generation ---


HOW = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.mark.parametrize("family", ["gpt2", "llama", "t5", "bart"])
@pytest.mark.parametrize(
    "how", [{}, {"use_cache": False}, {"num_beams": 3, "num_return_sequences": 2}]
)
def test_a_mixed_batch_generates_what_its_rows_do_alone(family, how):
    is_decoder = family in ("gpt2", "llama")
    auto = AutoModelForCausalLM if is_decoder else AutoModelForSeq2SeqLM
    model = with_adapters(family, auto=auto)
    inputs = tiny_inputs(family, batch=6)
    inputs.pop("decoder_input_ids", None)
    if is_decoder:
        inputs["attention_mask"] = inputs["attention_mask"].flip(-1)
    how = HOW | how
    found = model.generate(**inputs, adapter_names=MIXED, **how).chunk(6)
    assert model.active_adapters is None
    for i, name in enumerate(MIXED):
        with AdapterSetup(name):
            assert torch.equal(found[i], model.generate(**row(inputs, i), **how))
    assert not torch.equal(torch.cat(found), model.generate(**inputs, **how))


def test_sampled_sequences_of_a_row_take_its_adapter():
    model = with_adapters("llama", auto=AutoModelForCausalLM)
    inputs = row(tiny_inputs("llama", batch=3), 0, 2)
    how = {"max_new_tokens": 4, "num_return_sequences": 3, "output_logits": True,
           "return_dict_in_generate": True, "pad_token_id": 0}  # fmt: skip
    torch.manual_seed(0)
    found = model.generate(**inputs, adapter_names=["a", "c"], do_sample=True, **how)
    for i, name in enumerate(["a", "a", "a", "c", "c", "c"]):
        with AdapterSetup(name), torch.no_grad():
            logits = model(found.sequences[i : i + 1, :-1]).logits[0, -4:]
        seen = torch.stack([step[i] for step in found.logits])
        close(seen, logits.to(seen.dtype), 1e-4)


# --- heads ---


def with_heads(family="bert", kind="classification", **labels):
    """Each head with an adapter of its name, but for x and y."""
    torch.manual_seed(0)
    model = AutoAdapterModel.from_config(tiny_config(family)).double().eval()
    for i, (name, count) in enumerate(labels.items()):
        if name not in "xy":
            model.add_adapter(name, ["lora", "seq_bn"][i % 2])
            stir(model, name, seed=i, std=0.3)
        sizes = {} if count is None else {"num_labels": count}
        getattr(model, f"add_{kind}_head")(name, **sizes)
    return model


def test_each_row_is_answered_by_the_head_of_its_adapter():
    model = with_heads(a=3, b=3, c=3, x=3)
    model.delete_head("c")
    assert model.active_head == "x"
    inputs, labels = tiny_inputs("bert", batch=5), torch.tensor([0, 2, 1, 1, 2])
    names = ["b", None, "a", "c", "b"]
    found = model(**inputs, labels=labels, adapter_names=names)
    losses = {}
    for i, name in enumerate(names):
        model.active_head = "x"
        with AdapterSetup(name):
            one = model(**row(inputs, i), labels=labels[i : i + 1])
        close(found.logits[i : i + 1], one.logits)
        losses.setdefault(name if name in ("a", "b") else "x", []).append(one.loss)
    # a mean for each head, and the sum of these
    close(found.loss, sum(torch.stack(each).mean() for each in losses.values()))
    assert type(found) is type(one)


def test_heads_that_answer_differently_give_one_output_each():
    model = with_heads(a=2, b=4)
    inputs = tiny_inputs("bert", batch=4)
    names = ["b", "a", "a", "b"]
    labels = {"a": torch.tensor([0, 1]), "b": torch.tensor([3, 2])}
    found = model(**inputs, adapter_names=names, labels=labels, output_hidden_states=True)
    assert found.rows == [[0, 3], [1, 2]]
    total = 0.0
    for output, rows, name in zip(found, found.rows, ["b", "a"], strict=True):
        part = {key: value[rows] for key, value in inputs.items()}
        with AdapterSetup(name):
            expected = model(**part, labels=labels[name], output_hidden_states=True)
        close(output.logits, expected.logits)
        close(output.loss, expected.loss)
        for seen, layer in zip(output.hidden_states, expected.hidden_states, strict=True):
            close(seen, layer)
        total = total + expected.loss
    close(found.loss, total)


def test_several_active_heads_answer_all_rows_without_heads_of_their_own():
    model = with_heads(a=3, b=3, x=2, y=4)
    model.delete_head("a")
    model.delete_head("b")
    model.active_head = ["x", "y"]
    inputs = tiny_inputs("bert", batch=2)
    for given in ({}, {"head": ["y", "x"]}):
        found = model(**inputs, adapter_names=["b", "a"], **given)
        for i, name in enumerate("ba"):
            with AdapterSetup(name, head_setup=["x", "y"]):
                expected = model(**row(inputs, i), **given)
            for output, one in zip(found, expected, strict=True):
                close(output.logits[i : i + 1], one.logits)


def test_a_row_that_no_head_answers_is_refused():
    model = with_heads(a=3, b=3)
    model.delete_head("b")
    model.active_head = None
    model.float()
    inputs = tiny_inputs("bert", batch=2)
    with refused(model, StateError, "'b' has no head of its name", "model.active_head = 'a'"):
        model(**inputs, adapter_names=["a", "b"])
    # a head that is named answers all
    found = model(**inputs, adapter_names=["b", "a"], head="a").logits
    for i, name in enumerate("ba"):
        with AdapterSetup(name, head_setup="a"):
            close(found[i : i + 1], model(**row(inputs, i)).logits, 1e-5)


def test_heads_on_tokens_and_choices_take_their_rows():
    model = with_heads(kind="tagging", a=3, b=3)
    inputs = tiny_inputs("bert", batch=4)
    labels = torch.randint(3, (4, 7))
    names = ["a", "b", "b", "a"]
    found = model(**inputs, labels=labels, adapter_names=names)
    total = 0.0
    for name, rows in (("a", [0, 3]), ("b", [1, 2])):
        with AdapterSetup(name):
            part = {key: value[rows] for key, value in inputs.items()}
            expected = model(**part, labels=labels[rows])
        close(found.logits[rows], expected.logits)
        total = total + expected.loss
    close(found.loss, total)
    for name in "ab":
        model.add_multiple_choice_head(name, num_choices=2, overwrite_ok=True)
    choices = {k: torch.stack([v, v.flip(0)], 1) for k, v in inputs.items()}
    found = model(**choices, labels=torch.tensor([0, 1, 1, 0]), adapter_names=names)
    for i, name in enumerate(names):
        with AdapterSetup(name):
            expected = model(**row(choices, i))
        close(found.logits[i : i + 1], expected.logits)


def test_rows_generate_with_heads_of_their_own():
    model = with_heads("llama", "causal_lm", a=None, b=None)
    inputs = row(tiny_inputs("llama", batch=4), 0, 3)
    how = HOW | {"num_beams": 2}
    found = model.generate(**inputs, adapter_names=["b", "a", "b"], **how)
    for i, name in enumerate(["b", "a", "b"]):
        with AdapterSetup(name):
            expected = model.generate(**row(inputs, i), **how)
        assert torch.equal(found[i : i + 1], expected)


# --- what is refused ---


def test_names_that_do_not_fit_are_refused_before_anything_happens():
    model = with_adapters("bert", {"a": "lora", "b": "seq_bn", "c": "seq_bn"}, dtype=torch.float32)
    inputs = tiny_inputs("bert", batch=2)
    cases = [
        (["a"], CompositionError, "names 1 row: the batch has 2", "one name, or None"),
        (["a", "b", None], CompositionError, "names 3 rows", "one name, or None, for each row"),
        (["a", "z"], UnknownNameError, "'z'", "Known adapters: 'a', 'b'"),
        ([None, 3], UnknownNameError, "no adapter 3", "Known adapters: 'a', 'b'"),
        ("ab", CompositionError, "adapter_names='ab'", "Write adapter_names=['a', None, 'b']"),
        ([Parallel("a", "b"), None], CompositionError, "Parallel('a', 'b') divides", "Write a"),
        ([Stack("a", "z"), None], UnknownNameError, "'z'", "Known adapters"),
        ([Fuse("b", "c"), None], StateError, "no fusion layers", "Write add_adapter_fusion"),
        ([Fuse("a", "b"), None], ConfigError, "only bottlenecks are fused", "'seq_bn'"),
        ([{"a": 1}, None], UnknownNameError, "{'a': 1}", "Known adapters"),
    ]
    for names, error, *says in cases:
        with refused(model, error, *says):
            model(**inputs, adapter_names=names)


def test_names_are_refused_in_a_merged_model_and_in_a_setup():
    model = with_adapters("bert", {"a": "lora", "b": "seq_bn"}, dtype=torch.float32)
    inputs = tiny_inputs("bert", batch=2)
    with AdapterSetup("b"), refused(model, StateError, "Stack('b')", "Leave the block"):
        model(**inputs, adapter_names=["a", "b"])
    model.merge_adapter("a")
    with refused(model, StateError, "'a' is merged", "Write reset_adapter() first"):
        model(**inputs, adapter_names=["b", None])


@pytest.mark.parametrize("fails", ["layer", "names", "input"])
def test_after_a_forward_that_failed_the_next_one_is_right(fails, monkeypatch):
    model = with_adapters("bert")
    inputs = tiny_inputs("bert", batch=2)
    expected = model(**inputs, adapter_names=["f", "c"]).last_hidden_state
    plain = model(**inputs).last_hidden_state
    names = ["f", "z"] if fails == "names" else ["f", "c"]
    more = {"input_ids": inputs["input_ids"] + 1000} if fails == "input" else {}
    with monkeypatch.context() as patch:
        if fails == "layer":
            layer = model.encoder.layer[1].output.dense
            patch.setattr(layer, "_parameters", {"weight": torch.zeros(3, 3), "bias": None})
        with pytest.raises((RuntimeError, LookupError)):
            model(**{**inputs, **more}, adapter_names=names)
    assert torch.equal(model(**inputs).last_hidden_state, plain)
    assert not model._active.call.captures
    assert torch.equal(model(**inputs, adapter_names=["f", "c"]).last_hidden_state, expected)


class Scaled(nn.Module):
    """Computes with a matrix of its own, like parts of models that are no layers."""

    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(torch.eye(width))

    def forward(self, x):
        return x @ self.scale


def test_parameters_that_all_rows_share_are_refused():
    torch.manual_seed(0)
    plain = AutoModel.from_config(tiny_config("llama")).double().eval()
    for layer in plain.layers:
        layer.mlp = nn.Sequential(layer.mlp, Scaled(plain.config.hidden_size)).double()
    model = init(plain)
    for name, kind in (("a", "lora"), ("m", "lora[target_parameters=['scale']]")):
        model.add_adapter(name, kind)
        stir(model, name, std=0.3)
    inputs = tiny_inputs("llama", batch=2)
    with refused(model, CompositionError, "'m' adapts", "exclude_modules"):
        model(**inputs, adapter_names=["m", "a"])
    check_rows(model, inputs, ["a", None], atol=1e-10)
    # all rows alike is no division
    with torch.no_grad():
        found = model(**inputs, adapter_names=["m", "m"]).last_hidden_state
        model.set_active_adapters("m")
        close(found, model(**inputs).last_hidden_state)


def test_a_layer_that_gets_no_rows_of_the_batch_is_refused():
    """DeBERTa may project relative positions, which no row has of its own, with the query."""
    config = tiny_config("deberta-v2")
    config.share_att_key = True
    torch.manual_seed(0)
    model = init(AutoModel.from_config(config).eval())
    model.add_adapter("a", "lora")
    inputs = tiny_inputs("deberta-v2", batch=4)
    with refused(model, CompositionError, "got 1 rows", "activate one adapter for all rows"):
        model(**inputs, adapter_names=["a", None, None, "a"])


# as many tokens as rows, and more
@pytest.mark.parametrize("tokens", [2, 8])
def test_a_layer_that_gets_tokens_before_rows_is_refused(tokens):
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "longformer", vocab_size=99, hidden_size=32, num_hidden_layers=1, num_attention_heads=4,
        intermediate_size=64, attention_window=4, max_position_embeddings=64,
    )  # fmt: skip
    model = init(AutoModel.from_config(config).eval())
    model.add_adapter("a", "lora")
    model.add_adapter("b", "seq_bn")
    inputs = {"input_ids": torch.randint(3, 99, (2, tokens))}
    with torch.no_grad(), pytest.raises(CompositionError, match="tokens before rows") as caught:
        model(**inputs, adapter_names=["a", None])
    assert "Activate one adapter for all rows" in str(caught.value)
    if tokens > 2:
        check_rows(model, inputs, ["b", None], atol=1e-5)


def test_what_accelerate_dispatched_before_takes_names_too():
    from accelerate import dispatch_model

    torch.manual_seed(0)
    plain = AutoModel.from_config(tiny_config("bert")).double().eval()
    model = init(dispatch_model(plain, {"": "cpu"}, force_hooks=True))
    model.add_adapter("a", "lora")
    stir(model, "a", std=0.3)
    assert "_old_forward" in vars(model)
    check_rows(model, tiny_inputs("bert", batch=2), ["a", None])


def test_rows_of_inputs_that_differ_are_refused():
    model = with_adapters("clip", {"a": "lora"}, dtype=torch.float32)
    inputs = tiny_inputs("clip", batch=2)
    inputs["pixel_values"] = inputs["pixel_values"].repeat(2, 1, 1, 1)
    with refused(model, CompositionError, "pixel_values: 4", "different numbers of rows"):
        model(**inputs, adapter_names=["a", None])


# --- BatchSplit and Parallel ---


@pytest.mark.parametrize("family", ["bert", "gpt2", "t5"])
def test_a_batch_split_gives_each_adapter_its_rows(family):
    model = with_adapters(family)
    inputs = tiny_inputs(family, batch=6)
    setups = [
        (BatchSplit("a", None, Stack("b", "f"), batch_sizes=2),
         ["a", "a", None, None, Stack("b", "f"), Stack("b", "f")]),
        (Stack("g", BatchSplit("a", "d", batch_sizes=[1, 5])),
         [Stack("g", "a")] + [Stack("g", "d")] * 5),
        (BatchSplit("e", BatchSplit("a", "b", batch_sizes=[1, 2]), batch_sizes=[3, 3]),
         ["e", "e", "e", "a", "b", "b"]),
        (Average("g", BatchSplit("a", "b", batch_sizes=3), weights=[1, 3]),
         [Average("g", "a", weights=[1, 3])] * 3 + [Average("g", "b", weights=[1, 3])] * 3),
    ]  # fmt: skip
    for setup, names in setups:
        found = alone(model, setup, inputs)
        for i, name in enumerate(names):
            close(found[i : i + 1], alone(model, name, row(inputs, i)))


@pytest.mark.parametrize("static", [True, False])
def test_parallel_is_each_adapter_on_the_whole_batch(static):
    model = with_adapters("bert") if static else with_heads(a=2, b=3, c=2)
    inputs = tiny_inputs("bert", batch=3)
    setup = Parallel("a", Stack("c", "b"), "c")
    model.set_active_adapters(setup)
    if not static:
        assert model.active_head == ["a", "b", "c"]
    with torch.no_grad():
        found = model(**inputs)
    found = found.last_hidden_state.chunk(3) if static else [o.logits for o in found]
    for part, name in zip(found, setup, strict=True):
        model.set_active_adapters(name)
        with torch.no_grad():
            expected = first_output(model(**inputs))
        close(part, expected)


@pytest.mark.parametrize(("setup", "count", "says"), [
    (BatchSplit("a", "b", batch_sizes=[1, 1]), 4, "add up to 2, and the batch has 4 rows"),
    (BatchSplit("a", "b", batch_sizes=[1, 1]), 1, "has 1 row. Give it 2 rows, or write other"),
    (Parallel("a", "b"), 0, "is active: the batch has no rows"),
])  # fmt: skip
def test_a_batch_of_another_size_is_refused(setup, count, says):
    model = with_heads(a=2, b=3)
    given = row(tiny_inputs("bert", batch=4), 0, count)
    with AdapterSetup(setup), pytest.raises(CompositionError, match=says):
        model(**given)


def test_a_part_of_the_model_refuses_what_only_the_model_can_repeat():
    model = with_heads(a=2, b=3)
    with AdapterSetup(Parallel("a", "b")), pytest.raises(StateError, match=r"Call model\(…\) its"):
        model.bert(**tiny_inputs("bert"))


def test_several_tasks_are_trained_in_one_pass():
    model = with_heads(a=2, b=3)
    inputs = tiny_inputs("bert", batch=4)
    labels = {"a": torch.tensor([0, 1, 1, 0]), "b": torch.tensor([2, 1, 0, 0])}

    def gradients(setup, given):
        model.train_adapter(setup)
        model.eval()
        model.zero_grad()
        model(**inputs, labels=given).loss.backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    found = gradients(Parallel("a", "b"), labels)
    assert {n for n, p in model.named_parameters() if p.requires_grad} == set(found)
    expected = {**gradients("a", labels["a"]), **gradients("b", labels["b"])}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        close(found[name], gradient)
    # labels that are no dict are those of every task
    loss = model(**inputs, labels=labels["a"], adapter_names=["a"] * 4).loss
    model.set_active_adapters(Parallel("a", "b"))
    both = model(**inputs, labels=labels["a"])
    close(both[0].loss, loss)


def test_labels_of_another_number_of_rows_are_refused():
    model = with_heads(a=2, b=3).float()
    inputs, labels = tiny_inputs("bert", batch=4), torch.tensor([0, 1, 1])
    for given in (labels, {"a": labels}):
        with refused(model, ConfigError, "Write 4 rows", "labels={'a'"):
            model(**inputs, adapter_names=["a", "b"] * 2, labels=given)
    says = r"shape \[3\]\. Write 4 rows"
    with AdapterSetup(Parallel("a", "b")), pytest.raises(ConfigError, match=says):
        model(**inputs, labels=labels)


@pytest.mark.parametrize("setup", [Parallel("a", "a"), Parallel("b", None)])
def test_one_head_answers_all_that_parallel_says(setup):
    model = with_heads(a=2, b=3)
    inputs, labels = tiny_inputs("bert", batch=4), torch.tensor([0, 1, 1, 0])
    with AdapterSetup(setup, head_setup="a"):
        found = model(**inputs, labels=labels)
        of_dict = model(**inputs, labels={"a": labels})
    losses = []
    for part, name in zip(found.logits.chunk(2), setup, strict=True):
        with AdapterSetup(name, head_setup="a"):
            expected = model(**inputs, labels=labels)
        close(part, expected.logits)
        losses.append(expected.loss)
    # the loss of a head is the mean of what it answers
    close(found.loss, sum(losses) / 2)
    close(of_dict.loss, found.loss, 0)


@pytest.mark.parametrize("how", [{}, {"num_beams": 2}])
def test_parallel_generates_with_each_adapter(how):
    model = with_adapters("llama", auto=AutoModelForCausalLM)
    inputs = row(tiny_inputs("llama", batch=3), 0, 2)
    how = HOW | how
    setup = Parallel("a", "c")
    model.set_active_adapters(setup)
    found = model.generate(**inputs, **how).chunk(2)
    for part, name in zip(found, setup, strict=True):
        model.set_active_adapters(name)
        assert torch.equal(part, model.generate(**inputs, **how))


def test_a_merged_adapter_cannot_act_on_a_part():
    model = with_adapters("bert", {"a": "lora", "b": "seq_bn"}, dtype=torch.float32)
    setup = BatchSplit("a", "b", batch_sizes=[1, 1])
    model.set_active_adapters(setup)
    with refused(model, StateError, "'a' is merged", "Write reset_adapter()"):
        model.merge_adapter("a")
    model.set_active_adapters(None)
    model.merge_adapter("a")
    with refused(model, StateError, "'a' is merged", "Stack('a', 'b')"):
        model.set_active_adapters(setup)


def test_compositions_are_saved_with_the_model(tmp_path):
    model = with_heads(a=2, b=3)
    split = BatchSplit("a", None, batch_sizes=[1, 2])
    for setup in (Parallel("a", "b"), split, Stack("a", Average("b", "a", weights=[1, 3]))):
        model.set_active_adapters(setup)
        model.save_pretrained(tmp_path)
        loaded = AutoAdapterModel.from_pretrained(tmp_path)
        assert loaded.active_adapters == setup
        assert loaded.active_head == model.active_head


@pytest.mark.parametrize(("family", "auto"), [("t5", AutoModelForSeq2SeqLM), ("bart", AutoModel)])
def test_encoders_and_decoders_refuse_what_only_the_whole_understands(family, auto):
    model = with_adapters(family, {"a": "lora", "b": "seq_bn"}, auto)
    inputs = tiny_inputs(family, batch=2)
    ids = {"input_ids": inputs["input_ids"]}
    for part in (model.get_encoder(), model.get_decoder()):
        assert part._forward_pre_hooks
        with refused(model, StateError, "adapter_names=…", "Write model(…, adapter_names=…)"):
            part(**ids, adapter_names=["a", None])
        part(**ids, adapter_names=None)
    check_rows(model, inputs, ["a", None])
    model.delete_adapter("a")
    assert part._forward_pre_hooks
    model.delete_adapter("b")
    assert not part._forward_pre_hooks
    assert not part._forward_pre_hooks_with_kwargs
    assert not [m for m in model.modules() if isinstance(m, Adapted)]


def test_adapters_belong_to_the_whole_or_to_its_part():
    """Those of the one would never act for the other."""
    model = AutoModelForCausalLM.from_config(tiny_config("llama"))
    part = model.base_model
    init(model).add_adapter("a", "lora")
    with refused(model, StateError, "init(LlamaModel): it is a part", "Write init(…) of that"):
        init(part)
    model.delete_adapter("a")
    init(part).add_adapter("b", "lora")
    with refused(model, StateError, "LlamaModel in this LlamaForCausalLM", "Write add_adapter"):
        model.add_adapter("a", "seq_bn")
    part.delete_adapter("b")
    assert not [m for m in model.modules() if isinstance(m, Adapted)]


def test_two_models_that_share_a_part_do_not_both_adapt_it():
    model, other = (AutoModelForCausalLM.from_config(tiny_config("llama")) for _ in range(2))
    other.model = model.model
    init(model).add_adapter("a", "lora")
    with refused(model, StateError, "of its own or of another model", "Write add_"):
        init(other).add_adapter("b", "lora")


@pytest.mark.parametrize("static", [True, False])
def test_a_part_of_the_model_refuses_what_only_the_whole_understands(static, tmp_path):
    """`**kwargs` of a base model would swallow it."""
    family, plain = ("llama", LlamaModel) if static else ("bert", BertModel)
    inputs = tiny_inputs(family, batch=2)
    model = (
        with_adapters(family, {"a": "lora"}, AutoModelForCausalLM) if static else with_heads(a=2)
    )
    base = model.base_model
    before = base(**inputs).last_hidden_state
    names = ("output_adapter_gating_scores", "output_adapter_fusion_attentions")
    for given in ({"adapter_names": ["a", None]}, *({name: True} for name in names)):
        (name,) = given
        with refused(model, StateError, f"{name}=…", f"Write model(…, {name}=…)"):
            base(**inputs, **given)
        assert torch.equal(base(**inputs, **{name: None}).last_hidden_state, before)
    assert isinstance(base, plain)
    assert type(base).__name__ == plain.__name__
    base.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).architectures == [plain.__name__]
    made = copy.deepcopy(model)
    with pytest.raises(StateError, match="a part of the model ignores"):
        made.base_model(**inputs, adapter_names=["a", None])
    model.delete_adapter("a")
    assert not isinstance(base, Adapted)


@pytest.mark.parametrize("rows", ["Parallel", "adapter_names"])
def test_an_input_given_twice_or_to_nobody_is_an_error(rows):
    model = with_adapters("bert")
    ids = tiny_inputs("bert")["input_ids"]
    given = {"adapter_names": ["a"] * len(ids)} if rows == "adapter_names" else {}
    model.set_active_adapters(Parallel("a", "b") if rows == "Parallel" else None)
    with refused(model, ConfigError, "'input_ids' by position and by name", "Write it once."):
        model(ids, input_ids=ids, **given)
    parameters = inspect.signature(BertModel.forward).parameters
    names = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD][1:]
    with refused(model, ConfigError, f"{len(names) + 1} inputs", "'input_ids'", "by position"):
        model(ids, *[None] * len(names), **given)
    whole = model(ids, None, **given)
    assert torch.equal(first_output(whole), first_output(model(input_ids=ids, **given)))


def test_two_merged_adapters_are_both_named():
    model = with_adapters("bert", {"a": "lora", "b": "lora"}, dtype=torch.float32)
    model.merge_adapter("a")
    model.merge_adapter("b")
    with refused(model, StateError, "'a', 'b' are merged and act", "Write reset_adapter() first"):
        model(**tiny_inputs("bert", batch=2), adapter_names=["a", "b"])


def test_splits_that_do_not_fit_are_refused_with_both_numbers():
    model = with_adapters("bert", {"a": "lora", "b": "lora"}, dtype=torch.float32)
    inputs = tiny_inputs("bert", batch=2)
    tokens = inputs["input_ids"].shape[1]
    model.set_active_adapters(Split("a", "b", splits=[tokens, 1]))
    said = f"have {tokens} tokens, and the splits add up to {tokens + 1}"
    with pytest.raises(CompositionError, match=said):
        model(**inputs)
