"""Several active heads: which rows of the batch each of them reads, and what is refused."""

from __future__ import annotations

import json

import pytest
import torch
from families import tiny_config, tiny_inputs
from snapshots import refused, stir

from adapterzoo import (
    AdapterSetup,
    AutoAdapterModel,
    Average,
    BatchSplit,
    Fuse,
    MultiHeadOutput,
    MultiTask,
    Parallel,
    Split,
    Stack,
)
from adapterzoo.errors import BatchError, CompositionError, ConfigError, UnknownNameError

NOT_OF_HEADS = [
    Split("x", "y", splits=[3, 4]),
    Average("x", "y"),
    Fuse("x", "y"),
    MultiTask("x", "y"),
    BatchSplit(Stack("x", "y"), "x", batch_sizes=1),
    Parallel("x", None),
]
SPLIT = BatchSplit("x", "y", batch_sizes=[1, 2])


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = AutoAdapterModel.from_config(tiny_config("bert")).eval()
    for seed, name in enumerate("ab"):
        model.add_adapter(name, "lora")
        stir(model, name, seed=seed)
    model.add_classification_head("x", num_labels=3)
    model.add_classification_head("y", num_labels=2)
    return model


def alone(model, inputs, adapter, head, rows=slice(None), **labels):
    """What a head says of some rows, which take one adapter or composition."""
    part = {key: value[rows] for key, value in inputs.items()}
    with AdapterSetup(adapter, head_setup=head):
        return model(**part, **labels)


@pytest.mark.parametrize("heads", NOT_OF_HEADS, ids=repr)
def test_a_composition_that_heads_cannot_have_is_refused(model, heads):
    hint = "Write 'x', ["
    inputs = tiny_inputs("bert")
    kind = type(heads).__name__
    for active in (None, "a", BatchSplit("a", "b", batch_sizes=1)):
        model.set_active_adapters(active)
        with refused(model, CompositionError, kind, hint):
            model.active_head = heads
        with refused(model, CompositionError, kind, hint):
            model(**inputs, head=heads)
        with refused(model, CompositionError, kind, hint):
            AdapterSetup("a", head_setup=heads)


def test_what_is_no_name_is_refused(model):
    for heads in (3, ["x", 3]):
        setup = AdapterSetup("a", head_setup=heads)
        with refused(model, UnknownNameError, "3", "there is no"), setup:
            pass
    with refused(model, UnknownNameError, "'z'", "'x', 'y'"):
        model.active_head = BatchSplit("x", "z", batch_sizes=1)


@pytest.mark.parametrize("how", ["active_head", "head", "AdapterSetup"])
@pytest.mark.parametrize(
    "adapters", [None, "a", BatchSplit("a", "b", batch_sizes=[2, 1])], ids=repr
)
def test_a_batch_split_of_heads_divides_the_rows_whatever_the_adapters_do(model, adapters, how):
    inputs = tiny_inputs("bert", batch=3)
    labels = {"x": torch.tensor([2, 0, 0]), "y": torch.tensor([0, 1, 0])}
    model.set_active_adapters(adapters)
    if how == "active_head":
        model.active_head = SPLIT
        assert model.active_head == SPLIT
        found = model(**inputs, labels=labels)
    elif how == "head":
        found = model(**inputs, labels=labels, head=SPLIT)
    else:
        with AdapterSetup(adapters, head_setup=SPLIT):
            found = model(**inputs, labels=labels)
    assert isinstance(found, MultiHeadOutput)
    assert (len(found), found.rows) == (2, [[0], [1, 2]])
    of_row = [adapters] * 3 if adapters in (None, "a") else ["a", "a", "b"]
    losses = []
    for output, head, rows in zip(found, "xy", ([0], [1, 2]), strict=True):
        each = [
            alone(model, inputs, of_row[row], head, [row], labels=labels[head][[row]])
            for row in rows
        ]
        torch.testing.assert_close(output.logits, torch.cat([e.logits for e in each]))
        losses.append(torch.stack([e.loss for e in each]).mean())
        torch.testing.assert_close(output.loss, losses[-1])
    torch.testing.assert_close(found.loss, sum(losses))


def test_one_tensor_of_labels_is_divided_like_the_rows(model):
    inputs, labels = tiny_inputs("bert", batch=3), torch.tensor([2, 0, 1])
    model.active_head = SPLIT
    found = model(**inputs, labels=labels)
    for output, head, rows in zip(found, "xy", ([0], [1, 2]), strict=True):
        expected = alone(model, inputs, None, head, rows, labels=labels[rows])
        torch.testing.assert_close(output.loss, expected.loss)


def test_tokens_and_choices_are_divided_too(model):
    model.add_tagging_head("tags", num_labels=3)
    model.add_multiple_choice_head("choices", num_choices=2)
    inputs = tiny_inputs("bert", batch=3)
    found = model(**inputs, head=BatchSplit("tags", "x", batch_sizes=[2, 1]))
    torch.testing.assert_close(found[0].logits, alone(model, inputs, None, "tags", [0, 1]).logits)
    wide = {k: v.unflatten(0, (3, 2)) for k, v in tiny_inputs("bert", batch=6).items()}
    twice = BatchSplit("choices", "choices", batch_sizes=[2, 1])
    found = model(**wide, head=twice)
    expected = model(**wide, head="choices").logits
    torch.testing.assert_close(torch.cat([o.logits for o in found]), expected)


def test_a_batch_of_another_size_is_refused(model):
    for count in (2, 6):
        with refused(model, BatchError, f"{count} rows, not 3", "BatchSplit"):
            model(**tiny_inputs("bert", batch=count), head=SPLIT)


@pytest.mark.parametrize("kind", [Parallel, Stack])
def test_parallel_and_stack_of_heads_are_a_list(model, kind):
    inputs = tiny_inputs("bert", batch=2)
    model.active_head = kind("x", "y")
    assert model.active_head == kind("x", "y")
    for output, head in zip(model(**inputs), "xy", strict=True):
        torch.testing.assert_close(output.logits, alone(model, inputs, None, head).logits)
    model.active_head = Stack("x")
    assert model.active_head == "x"


def test_the_adapters_of_a_batch_split_bring_a_batch_split_of_their_heads(model):
    model.add_classification_head("a", num_labels=4)
    model.add_classification_head("b", num_labels=2)
    model.set_active_adapters(BatchSplit(Stack("b", "a"), "b", batch_sizes=[2, 1]))
    assert model.active_head == BatchSplit("a", "b", batch_sizes=[2, 1])
    inputs = tiny_inputs("bert", batch=3)
    found = model(**inputs)
    torch.testing.assert_close(
        found[0].logits, alone(model, inputs, Stack("b", "a"), "a", [0, 1]).logits
    )
    torch.testing.assert_close(found[1].logits, alone(model, inputs, "b", "b", [2]).logits)
    # with other sizes, the heads follow the adapters
    model.set_active_adapters(BatchSplit("a", "b", batch_sizes=[1, 2]))
    assert model.active_head == BatchSplit("a", "b", batch_sizes=[1, 2])
    model.set_active_adapters(Parallel("a", "b"))
    assert model.active_head == ["a", "b"]
    model.delete_head("b")
    assert model.active_head == "a"


@pytest.mark.parametrize("order", [["x", "y"], ["y", "x"]], ids=str)
def test_a_list_of_heads_answers_the_parts_of_the_batch_in_its_order(model, order):
    inputs = tiny_inputs("bert", batch=3)
    model.set_active_adapters(BatchSplit("a", "b", batch_sizes=[1, 2]))
    model.active_head = order
    found = model(**inputs)
    for output, adapter, head, rows in zip(found, "ab", order, ([0], [1, 2]), strict=True):
        expected = alone(model, inputs, adapter, head, rows).logits
        torch.testing.assert_close(output.logits, expected)


@pytest.mark.parametrize("order", [["x", "y"], ["y", "x"], ["x", "x"], Parallel("y", "x")], ids=str)
@pytest.mark.parametrize("adapters", [Parallel("a", "b"), Parallel("a", "a")], ids=repr)
def test_a_list_of_heads_answers_the_copies_of_the_batch_in_its_order(model, order, adapters):
    inputs = tiny_inputs("bert", batch=2)
    model.set_active_adapters(adapters)
    model.active_head = order
    assert model.active_head == order
    for output, adapter, head in zip(model(**inputs), adapters, order, strict=True):
        torch.testing.assert_close(output.logits, alone(model, inputs, adapter, head).logits)


def test_heads_of_a_parallel_that_divides_the_batch_answer_its_copies(model):
    inner = BatchSplit("b", None, batch_sizes=[1, 2])
    model.set_active_adapters(Parallel("a", inner))
    model.active_head = ["x", "y"]
    inputs = tiny_inputs("bert", batch=3)
    for output, adapter, head in zip(model(**inputs), ["a", inner], "xy", strict=True):
        torch.testing.assert_close(output.logits, alone(model, inputs, adapter, head).logits)


def test_a_number_of_heads_that_does_not_fit_parallel_is_refused(model):
    inputs = tiny_inputs("bert", batch=2)
    model.add_classification_head("z")
    setup = AdapterSetup(Parallel("a", "b"), head_setup=["x", "y", "z"])
    with refused(model, CompositionError, "'x', 'y', 'z'", "2 copies", "2 names, or 1"), setup:
        model(**inputs)


def test_the_head_of_one_adapter_does_not_answer_for_the_others_of_parallel(model):
    inputs = tiny_inputs("bert", batch=2)
    model.add_classification_head("a", num_labels=4)
    for heads in (None, "a", ["a"]):
        setup = AdapterSetup(Parallel("a", "b"), head_setup=heads)
        with refused(model, CompositionError, "only the head 'a' is active", "['a', 'a']"), setup:
            model(**inputs)
    model.set_active_adapters(Parallel("a", "b"))
    model.active_head = ["a", "a"]
    for output, adapter in zip(model(**inputs), "ab", strict=True):
        torch.testing.assert_close(output.logits, alone(model, inputs, adapter, "a").logits)
    # that of no adapter is for all
    model.active_head = "x"
    assert model(**inputs).logits.shape == (4, 3)


@pytest.mark.parametrize("how", [{}, {"num_beams": 2}], ids=str)
def test_rows_generate_with_the_heads_of_a_batch_split(how):
    torch.manual_seed(0)
    model = AutoAdapterModel.from_config(tiny_config("gpt2")).eval()
    for name in "xy":
        model.add_causal_lm_head(name)
        torch.nn.init.normal_(model.heads[name].output_embeddings.bias)
    inputs = {k: v for k, v in tiny_inputs("gpt2", batch=3).items() if k != "labels"}
    how = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, **how}
    model.active_head = SPLIT
    found = model.generate(**inputs, **how)
    for row, head in enumerate("xyy"):
        part = {k: v[row : row + 1] for k, v in inputs.items()}
        expected = model.generate(**part, **how, head=head)
        assert torch.equal(found[row : row + 1, : expected.shape[1]], expected)


def test_a_composition_of_heads_is_saved_with_the_model(model, tmp_path):
    model.active_head = SPLIT
    model.save_pretrained(tmp_path)
    again = AutoAdapterModel.from_pretrained(tmp_path)
    assert again.active_head == SPLIT
    inputs = tiny_inputs("bert", batch=3)
    for one, other in zip(model(**inputs), again(**inputs), strict=True):
        torch.testing.assert_close(one.logits, other.logits)
    assert "heads" in json.loads((tmp_path / "config.json").read_text())["adapters"]


@pytest.mark.parametrize("adapters", ["a", Parallel("a", "b"), BatchSplit("a", "b", batch_sizes=2)])
def test_labels_of_several_heads_are_a_list_a_dict_or_one_tensor(model, adapters):
    inputs = tiny_inputs("bert", batch=4)
    first, second = torch.tensor([2, 0, 1, 1]), torch.tensor([0, 1, 1, 0])
    setups = dict.fromkeys("xy", adapters) if adapters == "a" else {"x": "a", "y": "b"}
    rows = dict.fromkeys("xy", slice(None))
    if isinstance(adapters, BatchSplit):
        rows = {"x": slice(0, 2), "y": slice(2, 4)}
    expected = [
        alone(model, inputs, setups[head], head, rows[head], labels=labels[rows[head]]).loss
        for head, labels in (("x", first), ("y", second))
    ]
    model.set_active_adapters(adapters)
    model.active_head = ["x", "y"]
    for labels in ([first, second], (first, second), {"x": first, "y": second}):
        found = [output.loss for output in model(**inputs, labels=labels).head_outputs]
        torch.testing.assert_close(found, expected)
    found = model(**inputs, labels=[first, None]).head_outputs
    torch.testing.assert_close(found[0].loss, expected[0])
    assert found[1].loss is None
    both = model(**inputs, labels=second).head_outputs
    assert [output.loss is None for output in both] == [False, False]
    torch.testing.assert_close(both[1].loss, expected[1])
    for wrong in ([first], [first, second, first], [0, 1], []):
        with pytest.raises(ConfigError, match=r"'x', 'y'.*Write labels=.'x': torch.tensor"):
            model(**inputs, labels=wrong)


def test_a_list_of_labels_for_one_head_or_a_head_twice_is_refused_unless_it_fits(model):
    inputs, labels = tiny_inputs("bert", batch=3), torch.tensor([2, 0, 1])
    model.active_head = "x"
    one = model(**inputs, labels=labels).loss
    torch.testing.assert_close(model(**inputs, labels=[labels]).loss, one)
    with pytest.raises(ConfigError, match="one tensor, or None, for each active head"):
        model(**inputs, labels=[2, 0, 1])
    model.set_active_adapters(Parallel("a", "b"))
    model.active_head = ["x", "x"]
    assert all(o.loss is not None for o in model(**inputs, labels=[labels, labels]).head_outputs)
    with pytest.raises(ConfigError, match="one tensor, or None"):
        model(**inputs, labels=[labels, labels + 0])
