"""What is done to one adapter takes as long with many others in the model as with few.

Times differ between machines; the lines of Python that a call runs do not.
"""

import gc
import sys
import types
from functools import partial

import pytest
import torch
from families import tiny_config, tiny_inputs
from transformers import BertForSequenceClassification, LlamaForCausalLM

from adapterzoo import AdapterSetup, AutoAdapterModel, Average, Parallel, Stack, init

# numbers of other adapters; all names have as many letters
FEW, MANY = 12, 42
# lines for each other head: the names of shared parameters are collected again
PER_HEAD = 80

MODELS = {
    "no head": lambda: AutoAdapterModel.from_config(tiny_config("bert")),
    "named heads": lambda: AutoAdapterModel.from_config(tiny_config("bert")),
    "static head": lambda: init(BertForSequenceClassification(tiny_config("bert"))),
    "language model": lambda: init(LlamaForCausalLM(tiny_config("llama"))),
}


def lines(call):
    """Run a call; return how many lines of Python it runs."""
    count = 0

    def trace(frame: types.FrameType, event: str, arg: object):
        nonlocal count
        count += event == "line"
        return trace

    # what other tests have left would be collected here, by lines of Python
    gc.disable()
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
        gc.enable()
    return count


def steps(model, folder, config):
    """Return what is done to an adapter, given its name, in this order."""
    inputs = tiny_inputs(model.config.model_type)

    def block(name):
        with AdapterSetup(name):
            model(**inputs)

    def delete(name):
        model.delete_adapter(name)
        if name in getattr(model, "heads", ()):
            model.delete_head(name)

    return {
        "load": lambda name: model.load_adapter(folder, load_as=name),
        "activate": model.set_active_adapters,
        "forward": lambda name: model(**inputs),
        "activate two": lambda name: model.set_active_adapters(Stack("a10", name)),
        "load beside active": lambda name: model.load_adapter(folder, load_as=f"d{name[1:]}"),
        "block": block,
        "save": lambda name: model.save_adapter(folder.parent / "saved", name),
        "deactivate": lambda name: model.set_active_adapters(None),
        "delete": delete,
        "add": lambda name: model.add_adapter(name, config),
        "delete again": delete,
        "delete the other": lambda name: delete(f"d{name[1:]}"),
    }


@pytest.mark.parametrize("config", ["lora", "seq_bn", "vera", "prompt_tuning"])
@pytest.mark.parametrize("kind", MODELS)
@torch.no_grad()
def test_the_next_adapter_costs_what_the_first_cost(kind, config, tmp_path):
    model, folder = MODELS[kind]().eval(), tmp_path / "one"
    model.add_adapter("x00", config)
    if kind == "named heads":
        model.add_classification_head("x00", num_labels=3)
    if kind == "static head":
        model.train_adapter("x00")
        model.eval()
    model.save_adapter(folder, "x00")
    counts: dict[str, list[int]] = {}
    number = 10
    for others in (FEW, MANY):
        while number < others + 10:
            model.load_adapter(folder, load_as=f"a{number}")
            number += 1
        # what is computed once and kept is computed in the first rounds
        for name in ("b00", "b01", "c00"):
            for step, call in steps(model, folder, config).items():
                count = lines(partial(call, name))
                if name == "c00":
                    counts.setdefault(step, []).append(count)
    allowed = PER_HEAD * (MANY - FEW) if kind == "named heads" else 0
    grown = {step: found for step, found in counts.items() if found[1] - found[0] > allowed}
    assert not grown
    assert all(few > 100 for step, (few, _) in counts.items() if step != "deactivate")


@pytest.mark.parametrize("node", [Stack, Average, Parallel])
def test_a_composition_costs_in_proportion_to_its_adapters(node):
    model = MODELS["language model"]()
    names = [f"a{number}" for number in range(10, 18)]
    for name in names:
        model.add_adapter(name, "lora")

    def cost(count):
        setup = node(*names[:count])
        model.set_active_adapters(setup)
        return lines(lambda: model.set_active_adapters(setup))

    two, four, eight = cost(2), cost(4), cost(8)
    assert eight - four == 2 * (four - two)


def test_the_counter_sees_growth():
    few, many = (lines(lambda n=n: [str(i) for i in range(n)]) for n in (3, 30))
    assert many > few
