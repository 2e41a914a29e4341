"""What is trained beside an adapter: copies of modules, rows of tokens, biases, and norms."""

from __future__ import annotations

import copy

import pytest
import torch
from families import tiny_inputs
from peft_world import logits, named, ours, plain
from snapshots import same_bits
from torch import nn

import adapterzoo
from adapterzoo import (
    AdapterConfig,
    Average,
    BatchSplit,
    ConfigUnion,
    LNTuningConfig,
    LoRAConfig,
    Parallel,
    PromptTuningConfig,
    SeqBnConfig,
    Stack,
)
from adapterzoo.contracts import CopyAdapter
from adapterzoo.errors import CheckpointError, CompositionError, ConfigError, SiteError, StateError
from adapterzoo.model.state import modules_of, parameters_of
from adapterzoo.testing import report

KINDS = {
    "modules": ("llama", {"modules_to_save": ["norm", "mlp"]}),
    "a table": ("llama", {"modules_to_save": ["embed_tokens"]}),
    "tokens": ("llama", {"trainable_token_indices": [5, 2, 11]}),
    "tied tokens": ("gpt2", {"trainable_token_indices": [5, 2, 11]}),
    "tokens of two stacks": ("t5", {"trainable_token_indices": [5, 2, 11]}),
    "biases": ("bert", {"bias": "all"}),
    "biases of adapted layers": ("bert", {"bias": "lora_only"}),
}


def changed(model, name, seed=0):
    """Change every value of an adapter, and its head's if it has one."""
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in parameters_of(model, name):
            parameter.add_(torch.randn(parameter.shape, generator=source) * 0.1)


def with_adapters(kind, *names):
    family, fields = KINDS[kind]
    model = ours(family)
    for seed, name in enumerate(names):
        model.add_adapter(name, LoRAConfig(**fields))
        changed(model, name, seed)
    return model, family


def active(model, family, setup):
    model.set_active_adapters(setup)
    return logits(model, family)


def close(found, expected, atol=1e-10):
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


@pytest.mark.parametrize("kind", KINDS)
def test_a_fresh_one_changes_nothing_and_leaves_nothing(kind):
    family, fields = KINDS[kind]
    model, untouched = ours(family), ours(family).state_dict()
    base = logits(model, family)
    model.add_adapter("a", LoRAConfig(**fields), set_active=True)
    close(logits(model, family), base)
    changed(model, "a")
    assert not torch.allclose(logits(model, family), base, atol=1e-4)
    assert same_bits(active(model, family, None), base)
    model.delete_adapter("a")
    assert model.state_dict().keys() == untouched.keys()
    assert all(same_bits(t, untouched[k]) for k, t in model.state_dict().items())


@pytest.mark.parametrize("kind", KINDS)
def test_training_moves_exactly_its_own_values(kind):
    model, family = with_adapters(kind, "a", "b")
    model.train_adapter("a")
    own = {id(p) for p in parameters_of(model, "a")}
    head = {id(p) for n, p in model.named_parameters() if n.startswith("classifier.adapters.a")}
    assert {id(p) for p in model.parameters() if p.requires_grad} == own | head
    model(**{**tiny_inputs(family), **_decoder(family)}).logits.square().sum().backward()
    assert all(p.grad is not None for p in parameters_of(model, "a"))
    assert all(p.grad is None for p in parameters_of(model, "b"))


def _decoder(family):
    inputs = tiny_inputs(family)
    return {"decoder_input_ids": inputs["input_ids"][:, :3]} if family == "t5" else {}


@pytest.mark.parametrize("kind", KINDS)
def test_merging_writes_the_values_and_reset_restores_every_bit(kind):
    model, family = with_adapters(kind, "a")
    model.double()
    before = {k: t.clone() for k, t in model.state_dict().items()}
    expected = active(model, family, "a")
    model.merge_adapter("a")
    close(logits(model, family), expected, 1e-9)
    model.reset_adapter()
    assert all(same_bits(t, before[k]) for k, t in model.state_dict().items())
    close(logits(model, family), expected)


METHODS = ["seq_bn", "par_bn", "compacter", "prefix_tuning", "prefix_tuning_flat", "prompt_tuning",
           "loreft", "ln_tuning", "ia3", "boft"]  # fmt: skip
FIELDS = {
    "bert": {
        "modules_to_save": ["attention.self.value", "attention.output.LayerNorm"],
        "trainable_token_indices": {"token_type_embeddings": [0]},
    },
    "llama": {"modules_to_save": ["k_proj", "embed_tokens"]},
}


@pytest.mark.parametrize("family", FIELDS)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_them(method, family, tmp_path):
    if (method, family) in {("ln_tuning", "bert"), ("prompt_tuning", "llama")}:
        pytest.skip("the method is at one of the layers itself")
    config, fields = AdapterConfig.load(method), FIELDS[family]
    model = ours(family)
    for seed, name in enumerate("ab"):
        model.add_adapter(name, config.replace(**fields))
        changed(model, name, seed)
    with_them = {name: active(model, family, name) for name in "ab"}
    # each in its batch's rows, and the base model without
    found = active(model, family, BatchSplit("a", "b", batch_sizes=[1, len(with_them["a"]) - 1]))
    close(found[:1], with_them["a"][:1])
    close(found[1:], with_them["b"][1:])
    assert same_bits(active(model, family, None), logits(ours(family), family))
    model.train_adapter("a")
    assert all(p.requires_grad for p in parameters_of(model, "a"))
    model.save_adapter(tmp_path, "a", with_head=False)
    other = ours(family)
    other.load_adapter(tmp_path, load_as="x")
    close(active(other, family, "x"), with_them["a"])
    # they act: with the layer's own values instead, the output is another one
    for path, module in modules_of(other, "x"):
        layer = other.base_model.get_submodule(path) if path else None
        if isinstance(module, CopyAdapter):
            own = {n: p.detach() for n, p in layer._parameters.items() if p is not None}
            module.layer.load_state_dict(own)
    assert not torch.allclose(active(other, family, "x"), with_them["a"], atol=1e-4)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (SeqBnConfig(modules_to_save=["LayerNorm"]), "Train the layer in one way"),
        (PromptTuningConfig(trainable_token_indices=[1]), "Train the layer in one way"),
    ],
)
def test_a_layer_is_changed_in_one_way(config, message):
    model = ours("bert")
    with pytest.raises(ConfigError, match=message):
        model.add_adapter("a", config)
    assert not model.has_adapters()


def test_a_merged_copy_has_the_bits_of_the_adapter():
    model = ours("llama")
    model.add_adapter("a", LNTuningConfig())
    changed(model, "a")
    model.merge_adapter("a")
    for path, module in modules_of(model, "a"):
        own, layer = module.layer.weight, model.base_model.get_submodule(path)
        assert same_bits(layer._parameters["weight"].detach(), own.detach())


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_batch_have_their_own(kind):
    model, family = with_adapters(kind, "a", "b")
    rows = len(next(iter(tiny_inputs(family).values())))
    alone = {name: active(model, family, name) for name in ("a", "b", None)}
    found = active(model, family, BatchSplit("a", "b", batch_sizes=[1, rows - 1]))
    close(found[:1], alone["a"][:1])
    close(found[1:], alone["b"][1:])
    if family == "bert":
        # Parallel repeats the batch and is one more way to assign rows
        found = active(model, family, Parallel("a", "b"))
        close(torch.as_tensor(found), torch.cat([alone["a"], alone["b"]]))


@pytest.mark.parametrize("kind", ["a table", "tokens", "tied tokens", "biases"])
def test_stacks_add_changes_and_averages_weigh_them(kind):
    """Of embeddings and biases, whose effect on a layer's output is linear."""
    model, family = with_adapters(kind, "a", "b")
    merged = copy.deepcopy(model).double()
    merged.merge_adapter("a")
    expected = active(model, family, Stack("a", "b"))
    # in either order
    close(active(model, family, Stack("b", "a")), expected, 1e-9)
    model.average_adapter("c", ["a", "b"], weights=[0.3, 0.7])
    for (_, c), (_, a), (_, b) in zip(*(modules_of(model, n) for n in "cab"), strict=True):
        names = [n for n, _ in c.named_parameters() if "lora" not in n]
        for name in names:
            mixed = 0.3 * a.get_parameter(name).double() + 0.7 * b.get_parameter(name).double()
            close(c.get_parameter(name).double(), mixed, 1e-6)
    average = active(model, family, Average("a", "b", weights=[1.0, 0.0]))
    close(average, active(model, family, "a"), 1e-9)


def test_one_row_is_looked_up_and_the_others_are_untouched():
    model = ours("llama")
    model.add_adapter("a", LoRAConfig(trainable_token_indices=[4, 9]), set_active=True)
    changed(model, "a")
    embed = model.get_input_embeddings()
    ids, own = torch.tensor([[3, 9, 4, 10]]), dict(modules_of(model, "a"))["embed_tokens"]
    found, weight = embed(ids)[0], embed._parameters["weight"]
    for place, expected in enumerate((weight[3], own.rows[1], own.rows[0], weight[10])):
        assert same_bits(found[place], expected)


def test_a_tied_head_that_comes_later_has_the_rows_too(tmp_path):
    model = named("gpt2", tmp_path / "base")
    model.add_adapter("a", LoRAConfig(trainable_token_indices=[4, 9]))
    changed(model, "a")
    model.add_causal_lm_head("late", layers=1)
    model.set_active_adapters("a")
    model.active_head = "late"
    reference = ours("gpt2")
    model.save_adapter(tmp_path / "a", "a", with_head=False)
    reference.load_adapter(tmp_path / "a", load_as="a", set_active=True)
    close(logits(model, "gpt2"), logits(reference, "gpt2"))
    # and it goes with its head
    model.delete_head("late")
    model.set_active_adapters("a")
    model.delete_adapter("a")


@pytest.mark.parametrize("kind", KINDS)
def test_whole_models_are_saved_with_them(kind, tmp_path):
    model, family = with_adapters(kind, "a", "b")
    expected = active(model, family, "a")
    model.save_pretrained(tmp_path)
    other = adapterzoo.load_model(tmp_path, type(plain(family)))
    close(active(other.eval(), family, "a"), expected)
    close(active(other, family, None), active(model, family, None))


@pytest.mark.parametrize("kind", KINDS)
def test_copies_of_a_model_are_independent(kind):
    model, family = with_adapters(kind, "a")
    expected = active(model, family, "a")
    twin = copy.deepcopy(model)
    changed(twin, "a", 7)
    close(logits(model, family), expected)
    assert not torch.allclose(logits(twin, family), expected, atol=1e-4)


def test_an_output_layer_belongs_to_one_adapter():
    model = ours("llama")
    base = logits(model, "llama")
    model.add_adapter("a", LoRAConfig(modules_to_save=["lm_head"]))
    model.add_adapter("b", LoRAConfig())
    with torch.no_grad():
        model.lm_head.adapters["a"].weight.add_(1.0)
    assert not torch.allclose(active(model, "llama", "a"), base)
    close(active(model, "llama", "b"), base)
    model.train_adapter("a")
    assert model.lm_head.adapters["a"].weight.requires_grad
    model.delete_adapter("a")
    assert type(model.lm_head) is nn.Linear
    assert same_bits(logits(model, "llama"), base)


def test_a_name_of_the_head_says_that_the_head_is_trained_anyway():
    model = ours("bert")
    model.add_adapter("a", LoRAConfig(modules_to_save=["classifier"]))
    assert model.adapters_config.get("a")["modules_to_save"] is None
    model.train_adapter("a")
    assert model.classifier.adapters["a"].weight.requires_grad


# --- what is refused ---

WRONG = {
    "no module": ({"modules_to_save": ["nope"]}, SiteError, "nope.*Write some of"),
    "negative": ({"trainable_token_indices": [1, -2]}, ConfigError, "different token ids"),
    "twice": ({"trainable_token_indices": [1, 1]}, ConfigError, "different token ids"),
    "none": ({"trainable_token_indices": []}, ConfigError, "different token ids"),
    "outside": ({"trainable_token_indices": [1, 10**6]}, SiteError, "resize_token_embeddings"),
    "no table": ({"trainable_token_indices": {"nope": [1]}}, SiteError, "no embedding 'nope'"),
    "another bias": ({"bias": "some"}, ConfigError, "lora_only"),
    "both ways": (
        {"trainable_token_indices": [1], "modules_to_save": ["embed_tokens"]},
        ConfigError, "Train the layer in one way"),
    "adapted": (
        {"trainable_token_indices": [1], "target_modules": ["embed_tokens"]},
        ConfigError, "Train the layer in one way"),
    "nothing left": (
        {"modules_to_save": ["self_attn"]}, ConfigError, "hold all layers"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_changes_nothing(case):
    fields, error, message = WRONG[case]
    model, before = ours("llama"), ours("llama").state_dict()
    with pytest.raises(error, match=message):
        model.add_adapter("a", LoRAConfig(**fields))
    assert model.state_dict().keys() == before.keys()
    assert not any(isinstance(m, adapterzoo.inject.Adapted) for m in model.modules())


def test_a_model_without_biases_has_none_to_train():
    model = ours("llama")
    with pytest.warns(UserWarning, match="no layer has a bias to train"):
        model.add_adapter("a", LoRAConfig(bias="all"))
    assert {path.rpartition(".")[2] for path, _ in model.adapter_modules("a")} == {
        "q_proj",
        "v_proj",
    }


def test_shared_tables_and_odd_layers_are_refused_by_name():
    with pytest.raises(SiteError, match=r"encoder.embed_tokens.*share the table"):
        ours("t5").add_adapter("a", LoRAConfig(modules_to_save=["shared"]))
    with pytest.raises(ConfigError, match=r"rows|replaces values"):
        ours("llama").add_adapter(
            "a", ConfigUnion(LNTuningConfig(), LoRAConfig(modules_to_save=["norm"]))
        )


def test_new_tokens_need_a_table_with_room_for_them(tmp_path):
    model = ours("llama")
    size = model.get_input_embeddings().num_embeddings
    model.resize_token_embeddings(size + 2)
    model.add_adapter("a", LoRAConfig(trainable_token_indices=[size, size + 1]), set_active=True)
    changed(model, "a")
    for format in ("native", "peft"):
        model.save_adapter(tmp_path / format, "a", format=format)
        with pytest.raises(SiteError, match=rf"resize_token_embeddings\({size + 2}\)"):
            ours("llama").load_adapter(tmp_path / format)
        other = ours("llama")
        other.resize_token_embeddings(size + 2)
        other.load_adapter(tmp_path / format, load_as="a", set_active=True)
        mine, theirs = (dict(modules_of(m, "a"))["embed_tokens"].rows for m in (model, other))
        assert same_bits(mine.detach(), theirs.detach())


@pytest.mark.parametrize("kind", KINDS)
def test_adapterhub_cannot_hold_them(kind, tmp_path):
    model, _ = with_adapters(kind, "a")
    field = next(iter(KINDS[kind][1]))
    with pytest.raises(CheckpointError, match=field):
        model.save_adapter(tmp_path, "a", format="adapterhub")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("method", ["seq_bn", "prefix_tuning", "prompt_tuning", "loreft"])
def test_adapterhub_cannot_hold_them_with_other_methods(method, tmp_path):
    model = ours("bert")
    fields = FIELDS["bert"]
    for field in fields:
        config = AdapterConfig.load(method).replace(**{field: fields[field]})
        model.add_adapter(field, config)
        with pytest.raises(CheckpointError, match=field):
            model.save_adapter(tmp_path, field, format="adapterhub")
    assert not any(tmp_path.iterdir())


def test_what_an_average_cannot_prune_is_refused():
    model, _ = with_adapters("biases", "a", "b")
    with pytest.raises(CompositionError, match="a bias has none"):
        model.average_adapter("c", ["a", "b"], combine_strategy="ties", density=0.5)


def test_a_tied_output_layer_cannot_be_merged():
    model = ours("gpt2")
    model.add_adapter("a", LoRAConfig(modules_to_save=["lm_head"]))
    changed(model, "a")
    before = {k: t.clone() for k, t in model.state_dict().items()}
    with pytest.raises(StateError, match="is tied to its embeddings"):
        model.merge_adapter("a")
    assert all(same_bits(t, before[k]) for k, t in model.state_dict().items())


# some layers of the suite have no bias
@pytest.mark.filterwarnings("ignore:bias. no layer has a bias to train")
@pytest.mark.long
@pytest.mark.parametrize(
    "text",
    [
        "lora[bias='lora_only']",
        "lora[modules_to_save=['q_proj']]",
        "seq_bn[modules_to_save=['q_proj']]",
    ],
)
def test_they_do_what_every_method_must(text):
    """Dtypes, devices, replicas, compilers, checkpointing, compositions, merging, files."""
    failures = report(text)
    assert not failures, "\n".join(map(str, failures))


@pytest.mark.parametrize("kind", ["tokens", "tied tokens", "modules"])
def test_compiled_and_checkpointed_they_compute_the_same(kind):
    model, family = with_adapters(kind, "a")
    model.train_adapter("a")
    model.eval()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    inputs = tiny_inputs(family)
    plain_logits = model(**inputs).logits
    plain_logits.square().sum().backward()
    expected = [p.grad.clone() for p in parameters_of(model, "a")]
    model.zero_grad()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    close(compiled(**inputs).logits.detach(), plain_logits.detach(), 1e-5)
    model.gradient_checkpointing_enable()
    model.train()
    model(**inputs).logits.square().sum().backward()
    for parameter, gradient in zip(parameters_of(model, "a"), expected, strict=True):
        close(parameter.grad, gradient, 1e-3)
