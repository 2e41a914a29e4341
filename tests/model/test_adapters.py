"""Adapters of a model by name: add, delete, activate, train, copy."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from families import tiny_config, tiny_inputs
from snapshots import adapter_bits, changes, output, same_bits, snapshot, stir
from transformers import AutoModelForSequenceClassification

from adapterzoo import LoRAConfig, SeqBnConfig, Stack, init
from adapterzoo.contracts import Adapter

# a fresh adapter of these is the identity
IDENTITIES = ("lora", "par_bn")
OTHERS = ("seq_bn", "double_seq_bn", "adapter_plus", 'lora[init_weights="bert"]')


@pytest.fixture
def model(tiny):
    return tiny()


@pytest.mark.parametrize("family", ["bert", "gpt2", "t5"])
@pytest.mark.parametrize("config", [*IDENTITIES, *OTHERS])
def test_a_fresh_adapter_is_the_identity_or_is_not(tiny, family, config):
    model = tiny(family)
    base = output(model)
    model.add_adapter("a", config)
    assert same_bits(base, output(model))
    model.set_active_adapters("a")
    assert same_bits(base, output(model)) == (config in IDENTITIES)
    assert model.adapters_config["a"].starts_as_identity == (config in IDENTITIES)


@pytest.mark.parametrize("config", [*IDENTITIES, *OTHERS, "seq_bn|lora"])
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
    assert "b" in model.adapters_config
    assert "c" not in model.adapters_config
    assert model.adapters_config.adapters == {"a": "bottleneck", "b": "lora"}
    assert "LoRAConfig(" in repr(model.adapters_config)


def test_modules_are_found_by_block_and_location(model):
    model.add_adapter("a", "double_seq_bn")
    model.add_adapter("b", LoRAConfig(output_lora=True, layers_to_transform=[1]))
    model.add_adapter("e", LoRAConfig(target_modules=["word_embeddings"]))
    found = model.get_adapter("a")
    assert {layer: set(at) for layer, at in found.items()} == {
        0: {"mh_adapter", "output_adapter"}, 1: {"mh_adapter", "output_adapter"}
    }  # fmt: skip
    found = model.get_adapter("b")
    assert {layer: set(at) for layer, at in found.items()} == {1: {"query", "value", "mlp_out"}}
    dense = model.base_model.encoder.layer[1].output.dense
    assert found[1]["mlp_out"] is dense.adapters["b"]
    assert list(model.get_adapter("e")) == [-1]
    modules = dict(model.adapter_modules("b"))
    assert modules["encoder.layer.1.output.dense"] is dense.adapters["b"]
    assert all(isinstance(module, Adapter) for module in modules.values())
    names = {n for n, _ in model.named_parameters() if ".adapters.b." in n}
    assert "bert.encoder.layer.1.output.dense.adapters.b.lora_A" in names
    assert len(names) == 6


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


def test_train_is_eval_without_dropout(model):
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    for name in ("lora", "par_bn", "double_seq_bn"):
        model.add_adapter(name, name)
        stir(model, name)
        model.set_active_adapters(name)
        quiet = output(model.eval())
        assert same_bits(quiet, output(model.train()))


def test_skipped_layers_are_the_base_models(model):
    model.add_adapter("a", "double_seq_bn")
    stir(model, "a")
    model.set_active_adapters("a", skip_layers=[0, 1])
    whole = output(model)
    model.set_active_adapters(None)
    assert same_bits(whole, output(model))
    left_out = copy.deepcopy(model)
    left_out.delete_adapter("a")
    left_out.add_adapter("a", "double_seq_bn[leave_out=[0]]", set_active=True)
    values = model.get_adapter("a")[1]
    for location, module in left_out.get_adapter("a")[1].items():
        module.load_state_dict(values[location].state_dict())
    model.set_active_adapters("a", skip_layers=[0])
    assert same_bits(output(left_out), output(model))


# --- train ---


def step(model, **labels):
    """One step of SGD; the gradients that it used, and what it changed."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, 0.5)
    outputs = model(**tiny_inputs("bert"), **labels)
    loss = outputs.loss if labels else outputs[0].square().sum()
    loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    optimizer.step()
    changed = {n for n, p in model.named_parameters() if not same_bits(before[n], p)}
    return gradients, changed


@pytest.mark.parametrize("config", ["lora", "seq_bn", "double_seq_bn", "par_bn", "adapter_plus"])
def test_only_the_adapter_and_its_head_are_trained(model, config):
    for name in ("a", "b"):
        model.add_adapter(name, config)
        stir(model, name)
        model.add_classification_head(name)
    model.train_adapter("a")
    assert model.training
    assert model.active_adapters == Stack("a")
    assert model.active_head == "a"
    asked = {n for n, p in model.named_parameters() if p.requires_grad}
    own = {
        n for n, _ in model.named_parameters() if ".adapters.a." in n or n.startswith("heads.a.")
    }
    assert asked == own
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    gradients, changed = step(model, labels=torch.tensor([0, 1]))
    assert set(gradients) == own
    empty = {n for n, g in gradients.items() if not g.any()}
    assert not empty
    assert changed == own


def test_base_is_base_after_training(model):
    base = output(model)
    model.add_adapter("a", "seq_bn")
    model.train_adapter("a")
    step(model)
    model.eval()
    trained = output(model)
    model.set_active_adapters(None)
    assert same_bits(base, output(model))
    assert not same_bits(base, trained)


def test_a_stack_is_trained_together(model):
    for name in ("a", "b", "c"):
        model.add_adapter(name, "par_bn")
    model.train_adapter(["a", "b"])
    names = {n.split(".adapters.")[1][0] for n, p in model.named_parameters() if p.requires_grad}
    assert names == {"a", "b"}


def test_training_one_freezes_what_was_trained_before(model):
    model.add_adapter("a", "lora")
    model.add_adapter("b", "lora")
    model.train_adapter("a")
    model.train_adapter("b")
    names = {n for n, p in model.named_parameters() if p.requires_grad}
    assert names
    assert all(".adapters.b." in n for n in names)


def test_embeddings_are_trained_on_request(model):
    model.add_adapter("a", "lora")
    model.train_adapter("a", train_embeddings=True)
    names = {n for n, p in model.named_parameters() if p.requires_grad and ".adapters." not in n}
    assert names == set()
    names = {n for n, p in model.named_parameters() if p.requires_grad and "lora" not in n}
    assert names == {"bert.embeddings.word_embeddings.adapters.a.table.weight"}


def test_freezing_and_thawing_the_base_model(model):
    model.add_adapter("a", "lora")
    model.freeze_model(True)
    assert not any(p.requires_grad for p in model.parameters())
    model.freeze_model(False)
    frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {n for n, _ in model.named_parameters() if ".adapters.a." in n}


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


# --- dtype, copies ---


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("config", ["lora", "seq_bn", "par_bn"])
def test_adapters_are_born_in_the_dtype_of_their_layer(tiny, dtype, config):
    model = tiny().to(dtype)
    model.add_adapter("a", config, set_active=True)
    assert {p.dtype for _, m in model.adapter_modules("a") for p in m.parameters()} == {dtype}
    stir(model, "a")
    out = output(model)
    assert out.dtype is dtype
    assert out.isfinite().all()


def test_an_adapter_is_moved_and_cast_alone(model):
    model.add_adapter("a", "lora")
    model.add_adapter("b", "lora")
    model.add_classification_head("a")
    kept = adapter_bits(model, "b")
    model.adapter_to("a", dtype=torch.float64)
    assert {p.dtype for _, m in model.adapter_modules("a") for p in m.parameters()} == {
        torch.float64
    }
    assert {p.dtype for p in model.heads["a"].parameters()} == {torch.float64}
    assert adapter_bits(model, "b") == kept
    assert {p.dtype for p in model.base_model.embeddings.parameters()} == {torch.float32}


def test_adding_does_not_touch_those_that_are_there(model):
    model.add_adapter("a", "lora")
    stir(model, "a")
    model.adapter_to("a", dtype=torch.float64)
    kept, places = (
        adapter_bits(model, "a"),
        [p for _, m in model.adapter_modules("a") for p in m.parameters()],
    )
    model.add_adapter("b", "lora")
    model.add_adapter("c", "seq_bn")
    assert adapter_bits(model, "a") == kept
    now = [p for _, m in model.adapter_modules("a") for p in m.parameters()]
    assert all(x is y for x, y in zip(places, now, strict=True))


@pytest.mark.parametrize("how", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_are_equal_and_apart(model, how):
    model.add_adapter("a", "par_bn")
    model.add_adapter("b", "lora")
    for name in "ab":
        stir(model, name)
    model.add_classification_head("a")
    model.merge_adapter("b")
    model.set_active_adapters("a")
    made = how(model)
    assert type(made) is type(model)
    before, theirs = snapshot(model), snapshot(made)
    different = [k for k in changes(before, theirs) if not k.startswith("identity")]
    assert not different
    storages = {t.untyped_storage().data_ptr() for t in model.state_dict().values()}
    assert not storages & {t.untyped_storage().data_ptr() for t in made.state_dict().values()}
    made.reset_adapter()
    made.set_active_adapters(None)
    made.delete_head("a")
    made.delete_adapter("a")
    made.add_adapter("c", "lora")
    stir(made, "c")
    made.train_adapter("c")
    assert not changes(before, snapshot(model))


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


@pytest.mark.parametrize(
    "names",
    [
        ("lora", "lor", "lora_A"),
        ("adapters", "trains", "head"),
        ("query", "mlp", "encoder"),
        ("bert", "0", "weight"),
    ],
)
def test_no_name_meets_another_or_a_path(tiny, names):
    model, plain = tiny(), tiny()
    for i, name in enumerate(names):
        model.add_adapter(name, "lora")
        stir(model, name, seed=i)
        model.add_classification_head(name)
    plain.add_adapter("x", "lora", set_active=True)
    for i, name in enumerate(names):
        stir(plain, "x", seed=i)
        model.set_active_adapters(name)
        model.active_head = None
        assert same_bits(output(plain), output(model))
    before = {name: adapter_bits(model, name) for name in names}
    model.delete_adapter(names[0])
    model.delete_head(names[0])
    for name in names[1:]:
        assert adapter_bits(model, name) == before[name]
    assert list(model.heads) == list(names[1:])
    assert not [k for k in model.state_dict() if f"adapters.{names[0]}." in k]
