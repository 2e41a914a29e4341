"""Adapters of a model by name: add, delete, activate, train, copy."""

from __future__ import annotations

import pytest
import torch
from families import tiny_config, tiny_inputs
from snapshots import adapter_bits, changes, of_adapter, output, same_bits, snapshot, stir
from transformers import AutoModelForSequenceClassification

from adapterzoo import (
    AdapterConfig,
    ConfigUnion,
    LoRAConfig,
    PrefixTuningConfig,
    SeqBnConfig,
    SeqBnInvConfig,
    Stack,
    init,
)
from adapterzoo.contracts import Adapter
from adapterzoo.inject.adapted import adapters_of


@pytest.fixture
def model(tiny):
    return tiny()


@pytest.mark.parametrize("config", ["par_bn", "seq_bn|lora"])
def test_what_is_added_is_deleted_without_a_trace(model, config):
    before = snapshot(model)
    model.add_adapter("a", config, set_active=True)
    stir(model, "a")
    model.train_adapter("a")
    loss = model(**tiny_inputs("bert"))[0].square().sum()
    loss.backward()
    model.delete_adapter("a")
    model.eval()
    model.base_model.requires_grad_(True)
    model.zero_grad()
    assert not changes(before, snapshot(model))
    assert not model.has_adapters()


def test_deleting_keeps_what_was_active_beside_it(model):
    for name in "abc":
        model.add_adapter(name, "lora")
        stir(model, name, seed=ord(name))
    model.set_active_adapters(Stack("a", "c"), skip_layers=[1])
    expected = output(model)
    model.set_active_adapters(Stack("a", "b", "c"), skip_layers=[1])
    assert not same_bits(expected, output(model))
    model.delete_adapter("b")
    assert model.active_adapters == Stack("a", "c")
    assert same_bits(expected, output(model))
    model.delete_adapter("a")
    model.delete_adapter("c")
    assert model.active_adapters is None
    model.add_adapter("b", "seq_bn")
    assert list(model.adapters_config) == ["b"]


def test_overwriting_makes_a_fresh_adapter_of_the_new_config(model):
    base = output(model)
    model.add_adapter("a", "lora", set_active=True)
    stir(model, "a")
    model.add_adapter("a", "par_bn", overwrite_ok=True)
    assert model.adapters_config["a"].architecture == "bottleneck"
    assert same_bits(base, output(model))
    assert not [k for k in model.state_dict() if "lora_A" in k]


def test_what_is_known_of_adapters(model):
    assert not model.has_adapters()
    assert len(model.adapters_config) == 0
    model.add_adapter("a")
    model.add_adapter("b", LoRAConfig(r=3))
    assert model.has_adapters()
    assert list(model.adapters_config) == ["a", "b"]
    assert model.adapters_config["a"] == SeqBnConfig()
    assert model.adapters_config.get("b") == LoRAConfig(r=3)
    assert model.adapters_config.get("c") is None
    view = model.adapters_config
    assert {name: view.config_map[key] for name, key in view.adapters.items()} == dict(view)


def test_modules_are_found_by_block_and_location(model):
    model.add_adapter("a", "double_seq_bn")
    model.add_adapter("b", LoRAConfig(output_lora=True, layers_to_transform=[1]))
    model.add_adapter("e", LoRAConfig(target_modules=["word_embeddings"]))
    found = model.get_adapter("a")
    assert {layer: set(at) for layer, at in found.items()} == {
        0: {"mh_adapter", "output_adapter"}, 1: {"mh_adapter", "output_adapter"}
    }  # fmt: skip
    found = model.get_adapter("b")
    assert {layer: set(at) for layer, at in found.items()} == {1: {"selfattn_lora", "output_lora"}}
    dense = model.base_model.encoder.layer[1].output.dense
    assert found[1]["output_lora"] is adapters_of(dense)["b"]
    attention = model.base_model.encoder.layer[1].attention.self
    query_and_value = [adapters_of(attention.query)["b"], adapters_of(attention.value)["b"]]
    assert [*found[1]["selfattn_lora"]] == query_and_value
    assert list(model.get_adapter("e")) == [-1]
    model.add_adapter("u", ConfigUnion(PrefixTuningConfig(), SeqBnInvConfig(leave_out=[0])))
    found = model.get_adapter("u")
    assert {layer: set(at) for layer, at in found.items()} == {
        -1: {"self_prefix", "invertible"}, 1: {"output_adapter"}
    }  # fmt: skip
    assert found[-1]["invertible"] is model.invertible_adapters["u"].get_submodule("1.invertible")
    model.delete_adapter("u")
    modules = dict(model.adapter_modules("b"))
    assert modules["encoder.layer.1.output.dense"] is adapters_of(dense)["b"]
    assert all(isinstance(module, Adapter) for module in modules.values())
    names = {n for n, _ in model.named_parameters() if of_adapter(n, "b")}
    assert "bert.encoder.layer.1.output.dense.loras.b.lora_A" in names
    assert len(names) == 6
    with pytest.warns(UserWarning, match=r"no adapter 'c'\. Known adapters: 'a', 'b', 'e'"):
        assert model.get_adapter("c") == {}


def test_blocks_come_in_model_order(model, tiny):
    encoder = model.base_model.encoder
    assert list(model.iter_layers()) == list(enumerate(encoder.layer))
    bart = tiny("bart")
    blocks = [*bart.base_model.encoder.layers, *bart.base_model.decoder.layers]
    assert list(bart.iter_layers()) == list(enumerate(blocks))


def test_switching_back_gives_the_same_bits(model):
    model.add_adapter("a", "lora")
    model.add_adapter("b", "seq_bn")
    for name in "ab":
        stir(model, name, seed=ord(name))
    seen = {}
    for setup in ("a", "b", ["a", "b"], None) * 2:
        model.set_active_adapters(setup)
        seen.setdefault(str(setup), []).append(output(model))
    assert all(same_bits(*outputs) for outputs in seen.values())
    firsts = [outputs[0] for outputs in seen.values()]
    assert not any(torch.equal(x, y) for i, x in enumerate(firsts) for y in firsts[:i])
    model.active_adapters = "a"
    assert model.active_adapters == Stack("a")
    assert model.active_adapters.flatten() == ("a",)
    model.set_active_adapters([])
    assert model.active_adapters is None


@pytest.mark.parametrize(("config", "identity"), [
    ("lora", True), ("par_bn", True), ("dora", True), ("boft", True), ("seq_bn", False),
    ("double_seq_bn", False), ("adapter_plus", False), ('lora[init_weights="bert"]', False),
])  # fmt: skip
def test_which_adapters_start_as_the_identity(config, identity):
    # the conformance suite compares their outputs with what is said here
    assert AdapterConfig.load(config).starts_as_identity == identity


# --- train ---


@pytest.mark.parametrize("config", ["lora", "double_seq_bn"])
def test_only_the_adapter_and_its_head_are_trained(model, config):
    for name in ("a", "b"):
        model.add_adapter(name, config)
        stir(model, name)
        model.add_classification_head(name)
    # what was trained before is frozen
    model.train_adapter("b")
    model.train_adapter("a")
    assert model.training
    assert (model.active_adapters, model.active_head) == (Stack("a"), "a")
    own = {n for n, _ in model.named_parameters() if of_adapter(n, "a") or n.startswith("heads.a.")}
    assert {n for n, p in model.named_parameters() if p.requires_grad} == own
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.eval()
    model(**tiny_inputs("bert"), labels=torch.tensor([0, 1])).loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert set(gradients) == own
    assert all(gradient.any() for gradient in gradients.values())
    # Adam's step is as large for small gradients, which the last bit would swallow
    torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 0.1, eps=1e-30).step()
    assert {n for n, p in model.named_parameters() if not same_bits(before[n], p)} == own


def test_a_stack_is_trained_together(model):
    for name in ("a", "b", "c"):
        model.add_adapter(name, "par_bn")
    model.train_adapter(["a", "b"])
    names = {n.split(".adapters.")[1][0] for n, p in model.named_parameters() if p.requires_grad}
    assert names == {"a", "b"}


def test_embeddings_are_trained_on_request(model):
    # another adapter there stays frozen
    model.add_adapter("e", "lora[target_modules=['word_embeddings']]")
    model.add_adapter("a", "lora")
    model.train_adapter("a", train_embeddings=True)
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    table = "bert.embeddings.word_embeddings.modules_to_save.a.table.weight"
    assert {n for n in trained if ".loras.a." not in n} == {table}


def test_freezing_and_thawing_the_base_model(model):
    model.add_adapter("a", "lora")
    model.freeze_model(True)
    assert not any(p.requires_grad for p in model.parameters())
    model.freeze_model(False)
    frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {n for n, _ in model.named_parameters() if of_adapter(n, "a")}


def test_the_labels_of_the_trained_head_are_shown(model):
    model.add_adapter("a", "lora")
    model.add_classification_head("a", num_labels=2, id2label={0: "no", 1: "yes"})
    model.add_classification_head("b", num_labels=3)
    assert model.config.id2label == {0: "LABEL_0", 1: "LABEL_1", 2: "LABEL_2"}
    model.train_adapter("a")
    assert model.config.id2label == {0: "no", 1: "yes"}
    assert model.config.label2id == {"no": 0, "yes": 1}


def test_the_labels_of_a_replaced_active_head_are_shown(model):
    model.add_classification_head("a", num_labels=2)
    config = {"head_type": "classification", "num_labels": 3}
    model.add_prediction_head_from_config("a", config, overwrite_ok=True, set_active=False)
    assert model.active_head == "a"
    assert model.config.id2label == {0: "LABEL_0", 1: "LABEL_1", 2: "LABEL_2"}


def test_a_static_head_is_trained_with_the_adapter():
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model = init(AutoModelForSequenceClassification.from_config(tiny_config("bert")))
    model.add_adapter("a", "lora")
    model.train_adapter("a")
    names = {n for n, p in model.named_parameters() if p.requires_grad and "lora" not in n}
    assert names == {"classifier.adapters.a.weight", "classifier.adapters.a.bias"}


# --- dtype ---


def test_an_adapter_and_its_head_are_cast_alone(model):
    model.add_adapter("a", "lora")
    model.add_classification_head("a")
    model.adapter_to("a", dtype=torch.float64)
    wide = {n for n, p in model.named_parameters() if p.dtype is torch.float64}
    assert wide == {n for n, _ in model.named_parameters() if of_adapter(n, "a") or "heads.a" in n}
    places = [p for _, m in model.adapter_modules("a") for p in m.parameters()]
    kept = adapter_bits(model, "a")
    # adding another one does not touch it
    model.add_adapter("b", "lora")
    model.add_adapter("c", "seq_bn")
    assert adapter_bits(model, "a") == kept
    now = [p for _, m in model.adapter_modules("a") for p in m.parameters()]
    assert all(x is y for x, y in zip(places, now, strict=True))


# --- init ---


def test_init_keeps_the_object_and_its_class_name(tiny):
    static = tiny().base_model
    before = {k: v.clone() for k, v in static.state_dict().items()}
    name = type(static).__name__
    assert init(static) is static
    assert init(static) is static
    assert type(static).__name__ == name
    assert isinstance(static, type(static).__mro__[2])
    assert list(static.state_dict()) == list(before)
    assert all(same_bits(before[k], v) for k, v in static.state_dict().items())
    static.add_adapter("a", "lora", set_active=True)
    static.delete_adapter("a")
    assert list(static.state_dict()) == list(before)


def test_no_name_meets_another_or_a_path(tiny):
    names = ("lora", "lor", "lora_A", "adapters", "trains", "head", "query", "bert", "0", "weight")
    model, plain = tiny(), tiny()
    plain.add_adapter("x", "lora", set_active=True)
    for i, name in enumerate(names):
        model.add_adapter(name, "lora")
        stir(model, name, seed=i)
        model.add_classification_head(name)
    for i, name in enumerate(names):
        stir(plain, "x", seed=i)
        model.set_active_adapters(name)
        model.active_head = None
        assert same_bits(output(plain), output(model))
    before = {name: adapter_bits(model, name) for name in names}
    model.delete_adapter(names[0])
    model.delete_head(names[0])
    assert all(adapter_bits(model, name) == before[name] for name in names[1:])
    assert list(model.heads) == list(names[1:])
    assert not [k for k in model.state_dict() if of_adapter(k, names[0])]
