"""`MultiTask` and `task_ids`: each row by the adapter and the head of its task."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from families import first_output, tiny_config, tiny_inputs
from snapshots import stir
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, TrainingArguments

from adapterzoo import (
    AdapterSetup,
    AdapterTrainer,
    AutoAdapterModel,
    BatchSplit,
    Fuse,
    MultiTask,
    Parallel,
    Stack,
    init,
    load_model,
)
from adapterzoo.errors import CompositionError, StateError

SETUP = MultiTask("a", Stack("c", "b"), None)
IDS = [1, 0, 2, 1]
NAMES = ["b", "a", None, "b"]
EACH = [Stack("c", "b"), "a", None, Stack("c", "b")]


def filled(model, **configs):
    for number, (name, config) in enumerate(configs.items()):
        model.add_adapter(name, config)
        stir(model, name, number, std=0.3)
    return model


def static(auto=AutoModelForSequenceClassification, family="bert"):
    torch.manual_seed(0)
    model = init(auto.from_config(tiny_config(family)).double().eval())
    return filled(model, a="lora[r=4]", b="seq_bn", c="lora[r=2,alpha=3]")


def named(**labels):
    torch.manual_seed(0)
    model = AutoAdapterModel.from_config(tiny_config("bert")).double().eval()
    filled(model, a="lora[r=4]", b="seq_bn", c="lora[r=2,alpha=3]")
    for name, count in labels.items():
        model.add_classification_head(name, num_labels=count)
    return model


def row(inputs, i):
    return {key: value[i : i + 1] for key, value in inputs.items()}


@torch.no_grad()
def out(model, inputs, **kwargs):
    return first_output(model(**inputs, **kwargs))


def close(found, expected, atol=1e-12):
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


@contextmanager
def refused(error, *says):
    with pytest.raises(error) as caught:
        yield
    missing = [part for part in says if part not in str(caught.value)]
    assert not missing, str(caught.value)


GIVEN = [torch.tensor(IDS), IDS, NAMES, tuple(IDS), np.array(IDS), [1, "a", None, 1]]


@pytest.mark.parametrize(
    "task_ids", GIVEN, ids=["tensor", "list", "names", "tuple", "numpy", "mix"]
)
def test_each_row_is_that_of_its_task(task_ids):
    model, inputs = static(), tiny_inputs("bert", batch=4)
    model.set_active_adapters(SETUP)
    found = out(model, inputs, task_ids=task_ids)
    for i, setup in enumerate(EACH):
        with AdapterSetup(setup):
            close(found[i : i + 1], out(model, row(inputs, i)))


@pytest.mark.parametrize("ids", [[0, 0, 0, 0], [2, 2, 2, 2], [1, 1, 0, 0]])
def test_a_batch_may_lack_tasks(ids):
    model, inputs = static(), tiny_inputs("bert", batch=4)
    model.set_active_adapters(SETUP)
    found = out(model, inputs, task_ids=ids)
    names = ["a", Stack("c", "b"), None]
    close(found, out(model, inputs, adapter_names=[names[i] for i in ids]))


def test_a_block_may_have_tasks():
    model, inputs = static(), tiny_inputs("bert", batch=4)
    expected = out(model, inputs, adapter_names=EACH)
    with AdapterSetup(SETUP):
        close(out(model, inputs, task_ids=IDS), expected)


def test_layers_that_are_skipped_stay_skipped():
    model, inputs = static(), tiny_inputs("bert", batch=4)
    model.set_active_adapters(MultiTask("a", "b"), skip_layers=[0])
    found = out(model, inputs, task_ids=[0, 1, 1, 0])
    for name, rows in (("a", [0, 3]), ("b", [1, 2])):
        model.set_active_adapters(name, skip_layers=[0])
        close(found[rows], out(model, inputs)[rows])


def test_heads_of_the_tasks_answer_their_rows():
    model, inputs = named(a=3, b=3), tiny_inputs("bert", batch=4)
    model.set_active_adapters(MultiTask("a", "b"))
    labels = torch.tensor([0, 2, 1, 1])
    ids = torch.tensor([1, 0, 0, 1])
    found = model(**inputs, task_ids=ids, labels=labels)
    losses = []
    for number, name in enumerate("ab"):
        mine = ids == number
        model.set_active_adapters(name)
        assert model.active_head == name
        own = model(**{k: t[mine] for k, t in inputs.items()}, labels=labels[mine])
        close(found.logits[mine], own.logits)
        losses.append(own.loss)
    close(found.loss, sum(losses))


def test_heads_of_different_tasks_answer_apart_and_absent_tasks_not_at_all():
    model, inputs = named(a=2, b=3), tiny_inputs("bert", batch=4)
    model.set_active_adapters(MultiTask("a", "b"))
    found = model(**inputs, task_ids=[1, 0, 1, 1])
    assert [list(o.logits.shape) for o in found.head_outputs] == [[3, 3], [1, 2]] or [
        list(o.logits.shape) for o in found.head_outputs
    ] == [[1, 2], [3, 3]]
    rows = {tuple(r) for r in found.rows}
    assert rows == {(1,), (0, 2, 3)}
    only = model(**inputs, task_ids=["b"] * 4)
    assert list(only.logits.shape) == [4, 3]


def test_one_head_may_answer_all_tasks():
    model, inputs = named(x=2), tiny_inputs("bert", batch=4)
    model.set_active_adapters(MultiTask("a", "b"))
    model.active_head = "x"
    found = model(**inputs, task_ids=[1, 0, 1, 1])
    expected = model(**inputs, adapter_names=["b", "a", "b", "b"])
    close(found.logits, expected.logits)


def test_copies_of_the_batch_have_its_tasks():
    """Parallel repeats the batch; in the second copy each row has its task."""
    model, inputs = static(), tiny_inputs("bert", batch=3)
    model.set_active_adapters(Parallel("c", MultiTask("a", "b")))
    found = out(model, inputs, task_ids=[1, 0, 1])
    model.set_active_adapters("c")
    close(found[:3], out(model, inputs))
    close(found[3:], out(model, inputs, adapter_names=["b", "a", "b"]))


@pytest.mark.parametrize("beams", [1, 3])
def test_generation_takes_tasks(beams):
    model = static(AutoModelForCausalLM, "gpt2")
    model.set_active_adapters(MultiTask("a", "b"))
    ids = torch.randint(3, 50, (3, 5))
    asked = {"max_new_tokens": 5, "do_sample": False, "num_beams": beams, "pad_token_id": 0,
             "eos_token_id": None}  # fmt: skip
    found = model.generate(ids, task_ids=torch.tensor([1, 0, 1]), **asked)
    assert torch.equal(found, model.generate(ids, adapter_names=["b", "a", "b"], **asked))
    for name, rows in (("a", [1]), ("b", [0, 2])):
        model.set_active_adapters(name)
        assert torch.equal(found[rows], model.generate(ids[rows], **asked))


def test_a_saved_model_has_the_tasks_again(tmp_path):
    model, inputs = static(), tiny_inputs("bert", batch=4)
    model.set_active_adapters(SETUP)
    model.save_pretrained(tmp_path)
    again = load_model(tmp_path, AutoModelForSequenceClassification.from_config(
        tiny_config("bert")).__class__)  # fmt: skip
    assert again.active_adapters == SETUP
    close(out(again.double(), inputs, task_ids=IDS), out(model, inputs, task_ids=IDS))


@pytest.mark.parametrize("make", [static, lambda: named(a=2, b=2)], ids=["static", "named"])
def test_trainers_hand_on_the_column_of_tasks(make, tmp_path):
    model = make().float()
    model.train_adapter(MultiTask("a", "b"))
    rows = [{"input_ids": [5, 6, 7 + i], "labels": i % 2, "task_ids": i % 2} for i in range(8)]
    args = TrainingArguments(
        tmp_path, max_steps=2, per_device_train_batch_size=4, per_device_eval_batch_size=4,
        use_cpu=True, report_to=[], save_strategy="no",
    )  # fmt: skip
    before = {n: p.clone() for n, p in model.named_parameters() if p.requires_grad}
    data = pytest.importorskip("datasets").Dataset.from_list(rows)
    trainer = AdapterTrainer(model, args, train_dataset=data, eval_dataset=data)
    trainer.train()
    moved = [n for n, p in model.named_parameters() if n in before and not p.equal(before[n])]
    assert any(".a." in name for name in moved)
    assert any(".b." in name for name in moved)
    assert "eval_loss" in trainer.evaluate()


@pytest.mark.parametrize(
    ("task_ids", "error", "says"),
    [
        (None, CompositionError, ("needs the task of each row", "Write task_ids=[0, 1, …]")),
        ([0, 1], CompositionError, ("2 tasks for 4 rows", "one task for each")),
        ([0, 1, 2, 0], CompositionError, ("there is no task 2", "0 to 1, or 'a', 'b'")),
        ([0, -1, 0, 0], CompositionError, ("there is no task -1",)),
        (["a", "c", "a", "b"], CompositionError, ("there is no task 'c'", "'a', 'b'")),
        ([0, None, 0, 0], CompositionError, ("there is no task None",)),
        ([True, 0, 0, 0], CompositionError, ("there is no task True",)),
        ([0.0, 0, 0, 0], CompositionError, ("there is no task 0.0",)),
        (torch.zeros(4, 1), CompositionError, ("there is no task [0.0]",)),
        (torch.zeros(4), CompositionError, ("there is no task 0.0",)),
    ],
)  # fmt: skip
def test_what_says_no_task_is_refused(task_ids, error, says):
    model, inputs = static(), tiny_inputs("bert", batch=4)
    model.set_active_adapters(MultiTask("a", "b"))
    with refused(error, *says):
        model(**inputs, task_ids=task_ids)


@pytest.mark.parametrize(
    "setup", [None, "a", BatchSplit("a", "b", batch_sizes=1), "named"], ids=str
)
def test_tasks_have_no_effect_where_there_are_none(setup):
    model, inputs = static(), tiny_inputs("bert", batch=2)
    if setup == "named":
        model, setup = named(a=3), "a"
    model.set_active_adapters(setup)
    with pytest.warns(UserWarning, match=r"task_ids=… has no effect: .*MultiTask\('a', 'b'\)"):
        found = model(**inputs, task_ids=torch.tensor([0, 1]))
    assert torch.equal(first_output(found), first_output(model(**inputs)))


def test_generate_ignores_tasks_where_there_are_none():
    model = static(AutoModelForCausalLM, "gpt2")
    model.set_active_adapters("a")
    ids, asked = torch.tensor([[5, 6, 7]]), {"max_new_tokens": 3, "do_sample": False}
    with pytest.warns(UserWarning, match="task_ids=… has no effect"):
        found = model.generate(ids, task_ids=[0], **asked)
    assert torch.equal(found, model.generate(ids, **asked))


def test_tasks_and_names_of_rows_are_refused_together():
    model, inputs = static(), tiny_inputs("bert", batch=2)
    model.set_active_adapters(MultiTask("a", "b"))
    with refused(CompositionError, "are both given", "Write one of them"):
        model(**inputs, task_ids=[0, 1], adapter_names=["a", "b"])
    with refused(StateError, "task_ids=…", "a part of the model ignores this"):
        model.bert(**inputs, task_ids=[0, 1])
    with refused(StateError, "only the whole model knows the tasks of rows"):
        model.bert(**inputs)
    # names take the place of what is active
    out(model, inputs, adapter_names=["a", "c"])


# --- a fusion beside its adapters ---


def test_parallel_runs_a_fusion_beside_its_adapters():
    torch.manual_seed(0)
    model = init(
        AutoModelForSequenceClassification.from_config(tiny_config("bert")).double().eval()
    )
    filled(model, a="seq_bn", b="seq_bn[reduction_factor=4]")
    fuse = Fuse("a", "b")
    model.add_adapter_fusion(fuse)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "adapter_fusion_layer" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    inputs = tiny_inputs("bert", batch=2)
    model.set_active_adapters(Parallel("a", "b", fuse))
    found = out(model, inputs).chunk(3)
    rows = out(model, inputs, adapter_names=[fuse, "b"])
    for part, setup in zip(found, ("a", "b", fuse), strict=True):
        model.set_active_adapters(setup)
        close(part, out(model, inputs))
    close(rows, torch.stack([found[2][0], found[1][1]]))
    model.set_active_adapters(MultiTask("a", fuse))
    close(out(model, inputs, task_ids=[1, 0]), torch.stack([found[2][0], found[0][1]]))
