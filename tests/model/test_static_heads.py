"""Each adapter of a task model has its own copy of the head, and the original stays."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from families import tiny_config, tiny_inputs
from snapshots import bits, of_adapter, refused, same_bits, stir
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertForSequenceClassification,
)

from adapterzoo import Average, BatchSplit, Fuse, Stack, init, load_model
from adapterzoo.errors import CheckpointError, StateError
from adapterzoo.model import activation, training_checkpoints
from adapterzoo.model.heads import copies

# one layer, layers below a module, two roots, a module that gives a part of a tuple
CASES = {
    "bert": AutoModelForSequenceClassification,
    "roberta": AutoModelForSequenceClassification,
    "distilbert": AutoModelForSequenceClassification,
    "gpt2": AutoModelForSequenceClassification,
    "bart": AutoModelForSequenceClassification,
    "electra": AutoModelForTokenClassification,
    "deberta-v2": AutoModelForQuestionAnswering,
    "albert": AutoModelForMaskedLM,
}


def plain(family="bert", cls=AutoModelForSequenceClassification, seed=0):
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        return cls.from_config(tiny_config(family)).eval()


def inputs_of(model):
    inputs = tiny_inputs(model.config.model_type)
    if model.config.model_type == "bart":
        # its head reads the end of the sequence, and finds the decoder's inputs itself
        inputs = {"input_ids": inputs["input_ids"]}
        inputs["input_ids"][:, -1] = model.config.eos_token_id
    return inputs


def logits(model, **inputs):
    model.eval()
    with torch.no_grad():
        return model(**(inputs or inputs_of(model)))[0]


def head_of(model, name=None):
    return {key: t.detach().clone() for key, t in copies.tensors_of(model, name).items()}


def changed(model, name, seed):
    """Give an adapter a head of other values, as training would."""
    model.train_adapter(name)
    stir(model, name, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in copies.layers_with(model, name).values():
            for parameter in layer.parameters():
                parameter.normal_(generator=generator)
    return model.eval()


def two(tmp_path, family="bert", cls=AutoModelForSequenceClassification):
    """A model that has loaded two adapters with heads, and what each gave where it was trained."""
    answers = {}
    for seed, name in enumerate("ab", start=1):
        trained = init(plain(family, cls))
        trained.add_adapter(name, "lora")
        changed(trained, name, seed)
        answers[name] = logits(trained)
        trained.save_adapter(tmp_path / name, name)
    model = init(plain(family, cls))
    for name in "ab":
        model.load_adapter(tmp_path / name)
    return model, answers


@pytest.mark.parametrize("family", CASES)
def test_each_adapter_answers_by_its_own_head(tmp_path, family):
    base = plain(family, CASES[family])
    wanted, keys = logits(base), list(base.state_dict())
    model, answers = two(tmp_path, family, CASES[family])
    assert [k for k in model.state_dict() if not of_adapter(k)] == keys
    assert same_bits(logits(model), wanted)
    for name in "aba":
        model.set_active_adapters(name)
        assert same_bits(logits(model), answers[name])
        model.set_active_adapters(None)
        assert same_bits(logits(model), wanted)
    model.delete_adapter("a")
    model.set_active_adapters("b")
    assert same_bits(logits(model), answers["b"])
    model.delete_adapter("b")
    assert list(model.state_dict()) == keys
    assert same_bits(logits(model), wanted)


def test_unload_gives_the_original_head_back(tmp_path):
    base = plain()
    model, _ = two(tmp_path)
    back = model.unload()
    assert type(back) is type(base)
    assert list(back.state_dict()) == list(base.state_dict())
    assert all(same_bits(t, base.state_dict()[k]) for k, t in back.state_dict().items())
    assert type(back.classifier) is torch.nn.Linear


def test_training_changes_the_copy_alone():
    model = init(plain())
    before = {k: bits(t) for k, t in model.state_dict().items()}
    model.add_adapter("a", "lora")
    model.add_adapter("b", "lora")
    changed(model, "b", 1)
    other = head_of(model, "b")
    model.train_adapter("a")
    names = {n for n, p in model.named_parameters() if p.requires_grad and "lora" not in n}
    assert names == {"classifier.adapters.a.weight", "classifier.adapters.a.bias"}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    inputs = inputs_of(model)
    rows = next(iter(inputs.values())).shape[0]
    model(**inputs, labels=torch.ones(rows, dtype=torch.long)).loss.backward()
    assert all(
        p.grad is not None and p.grad.any() for p in model.classifier.adapters["a"].parameters()
    )
    optimizer.step()
    after = model.state_dict()
    assert all(bits(after[key]) == value for key, value in before.items())
    assert all(same_bits(t, other[key]) for key, t in head_of(model, "b").items())
    assert not same_bits(head_of(model, "a")["classifier.weight"], model.classifier.weight)


def test_what_is_saved_is_what_was_trained(tmp_path):
    model = init(plain())
    model.add_adapter("a", "lora")
    changed(model, "a", 1)
    wanted = logits(model)
    # neither the active adapter nor another format matters
    model.set_active_adapters(None)
    for format in ("native", "peft", "adapterhub"):
        model.save_adapter(tmp_path / format, "a", format=format)
        other = init(plain())
        name = other.load_adapter(tmp_path / format, load_as="x", set_active=True)
        assert same_bits(logits(other), wanted), format
        other.set_active_adapters(None)
        assert same_bits(logits(other), logits(plain())), format
        assert name == "x"


def test_a_head_alone_goes_to_the_active_adapter(tmp_path):
    model = init(plain())
    model.add_adapter("a", "lora", set_active=True)
    base = logits(model)
    changed(model, "a", 1)
    wanted = head_of(model, "a")
    model.save_head(tmp_path / "copy")
    model.set_active_adapters(None)
    model.save_head(tmp_path / "original")
    other = init(plain(seed=3))
    other.add_adapter("b", "lora", set_active=True)
    other.load_head(tmp_path / "copy")
    assert all(same_bits(t, wanted[key]) for key, t in head_of(other, "b").items())
    other.set_active_adapters(None)
    assert same_bits(logits(other), logits(plain(seed=3)))
    other.load_head(tmp_path / "original")
    assert all(same_bits(t, head_of(model)[k]) for k, t in head_of(other).items())
    assert base is not None


def test_rows_are_answered_by_their_own_heads(tmp_path):
    model, _ = two(tmp_path)
    inputs = inputs_of(model)
    inputs = {key: torch.cat([t, t])[:4] for key, t in inputs.items()}
    alone = {}
    for name in ("a", "b", None):
        model.set_active_adapters(name)
        alone[name] = logits(model, **inputs).double()
    rows = ["b", None, "a", "b"]
    model.set_active_adapters(None)
    with torch.no_grad():
        mixed = model(**inputs, adapter_names=rows).logits.double()
    for row, name in enumerate(rows):
        torch.testing.assert_close(mixed[row], alone[name][row], rtol=1e-5, atol=1e-5)
        others = [alone[other][row] for other in alone if other != name]
        assert all((mixed[row] - other).abs().max() > 1e-2 for other in others)
    model.set_active_adapters(BatchSplit("a", "b", batch_sizes=[1, 3]))
    split = logits(model, **inputs).double()
    torch.testing.assert_close(split[:1], alone["a"][:1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(split[1:], alone["b"][1:], rtol=1e-5, atol=1e-5)


def test_the_last_adapter_of_a_stack_brings_the_head(tmp_path):
    model, _ = two(tmp_path)
    model.add_adapter("c", "lora")
    model.set_active_adapters(Stack("c", "a"))
    with_c = logits(model)
    model.set_active_adapters("a")
    # a fresh adapter changes nothing
    assert same_bits(with_c, logits(model))
    model.set_active_adapters(Stack("a", "c"))
    assert copies.steps_of(model, (model.active_adapters,)) == {}


def test_whole_models_keep_their_heads(tmp_path):
    model, answers = two(tmp_path)
    model.set_active_adapters("b")
    model.save_pretrained(tmp_path / "whole")
    loaded = load_model(tmp_path / "whole", BertForSequenceClassification).eval()
    copies = [loaded, copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for other in copies:
        assert list(other.state_dict()) == list(model.state_dict())
        for name in "ba":
            assert same_bits(logits(other), answers[name])
            other.set_active_adapters("a")
        other.set_active_adapters(None)
        assert same_bits(logits(other), logits(plain()))
    # a copy shares nothing
    with torch.no_grad():
        copies[1].classifier.adapters["a"].weight.zero_()
    model.set_active_adapters("a")
    assert same_bits(logits(model), answers["a"])


def test_a_merged_adapter_brings_its_head(tmp_path):
    base = logits(plain())
    model, answers = two(tmp_path)
    model.merge_adapter("a")
    torch.testing.assert_close(logits(model), answers["a"], rtol=1e-4, atol=1e-4)
    model.reset_adapter()
    model.set_active_adapters(None)
    assert same_bits(logits(model), base)
    model.set_active_adapters("b")
    back = model.merge_and_unload()
    assert list(back.state_dict()) == list(plain().state_dict())
    torch.testing.assert_close(logits(back), answers["b"], rtol=1e-4, atol=1e-4)


def test_an_average_averages_the_heads(tmp_path):
    model, answers = two(tmp_path)
    model.average_adapter("only", ["a"], [1.0])
    model.set_active_adapters("only")
    assert same_bits(logits(model), answers["a"])
    model.average_adapter("c", ["a", "b"], [0.25, 0.75])
    a, b, c = (head_of(model, name)["classifier.weight"].double() for name in "abc")
    torch.testing.assert_close(c, 0.25 * a + 0.75 * b, rtol=1e-6, atol=1e-6)


def test_where_no_adapter_speaks_alone(tmp_path):
    model = init(plain())
    for name in "ab":
        model.add_adapter(name, "seq_bn")
    model.add_adapter_fusion(Fuse("a", "b"))
    model.train_adapter_fusion(Fuse("a", "b"))
    trained = {n for n, p in model.named_parameters() if p.requires_grad and "classifier" in n}
    assert trained == {
        "classifier.adapters.fusion:a,b.weight",
        "classifier.adapters.fusion:a,b.bias",
    }
    training_checkpoints.save_trained(model, tmp_path)
    with torch.no_grad():
        for parameter in model.classifier.adapters["fusion:a,b"].parameters():
            parameter.add_(1)
    expected = plain().classifier.weight
    training_checkpoints.restore_trained(model, tmp_path)
    assert same_bits(model.classifier.adapters["fusion:a,b"].weight, expected)
    model.delete_adapter_fusion(Fuse("a", "b"))
    assert list(model.state_dict()) == [k for k in model.state_dict() if "fusion" not in k]
    model.train_adapter(Average("a", "b"))
    trained = {n for n, p in model.named_parameters() if p.requires_grad and "classifier" in n}
    assert trained == {"classifier.weight", "classifier.bias"}


@pytest.mark.parametrize("family", ["bert", "albert", "gpt2", "t5"])
def test_no_copy_of_a_vocabulary(family):
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    cls = {"gpt2": AutoModelForCausalLM, "t5": AutoModelForSeq2SeqLM}.get(
        family, AutoModelForMaskedLM
    )
    model = init(plain(family, cls))
    model.add_adapter("a", "lora")
    model.train_adapter("a")
    copies = [t for k, t in model.state_dict().items() if of_adapter(k, "a") and "lora" not in k]
    assert all(99 not in t.shape for t in copies)
    assert bool(copies) is (family in ("bert", "albert"))


def test_a_failed_overwrite_keeps_the_head(tmp_path):
    model, answers = two(tmp_path)
    model.merge_adapter("b")
    before = list(model.state_dict())
    with refused(model, StateError, "hold 'b'", "reset_adapter()"):
        model.add_adapter("a", "boft", overwrite_ok=True, set_active=True)
    assert list(model.state_dict()) == before
    model.reset_adapter()
    model.set_active_adapters("a")
    assert same_bits(logits(model), answers["a"])
    model.add_adapter("a", "lora", overwrite_ok=True)
    assert same_bits(logits(model), logits(plain()))


def test_what_all_adapters_share_is_not_changed_by_one(tmp_path):
    from transformers import WavLMForSequenceClassification

    config = {**tiny_config("wav2vec2").to_dict(), "use_weighted_layer_sum": True}
    config.pop("model_type")
    made = []
    for seed in (0, 0, 1):
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            cls = WavLMForSequenceClassification
            made.append(init(cls(cls.config_class(**config)).eval().double()))
    first, second, third = made
    first.add_adapter("a", "lora")
    changed(first, "a", 1)
    first.save_adapter(tmp_path / "a", "a")
    second.load_adapter(tmp_path / "a", set_active=True)
    inputs = {k: v.double() for k, v in tiny_inputs("wav2vec2").items() if v.is_floating_point()}
    # products round by where their operands lie in memory
    torch.testing.assert_close(logits(first, **inputs), logits(second, **inputs))
    with torch.no_grad():
        third.layer_weights.add_(1)
    with pytest.raises(CheckpointError, match=r"'layer_weights' .* Write with_head=False"):
        third.load_adapter(tmp_path / "a")
    third.load_adapter(tmp_path / "a", with_head=False)


@pytest.mark.parametrize("rows", [None, ["a", "b"]])
def test_copies_compile_as_one_graph(tmp_path, rows):
    model, _ = two(tmp_path)
    model.set_active_adapters("a" if rows is None else None)
    inputs = inputs_of(model)
    kwargs = {} if rows is None else {"adapter_names": rows}
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(**inputs, **kwargs)[0], model(**inputs, **kwargs)[0])
    torch.compiler.reset()


def test_an_adapter_that_has_no_copy_is_planned_once(monkeypatch):
    model = init(AutoModelForCausalLM.from_config(tiny_config("llama")))
    model.add_adapter("a", "lora")
    plans, made = [], activation.make_plan
    monkeypatch.setattr(activation, "make_plan", lambda *args: plans.append(args) or made(*args))
    model.train_adapter("a")
    assert len(plans) == 1
