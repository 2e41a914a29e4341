"""`torch.compile(fullgraph=True)`: compiled equals eager for every selection that is made."""

from __future__ import annotations

import pytest
import torch
from families import first_output, tiny_config, tiny_inputs
from transformers import AutoModel

from adapterzoo import AdapterSetup, AutoAdapterModel, init

CONFIGS = {"a": 'lora[init_weights="bert"]', "b": "double_seq_bn", "c": "par_bn[init_weights=bert]"}


class Counting:
    """A backend that runs the graph as it is and counts how often it was asked."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, example_inputs):
        self.graphs += 1
        return graph.forward


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_compiled_is_eager_and_each_selection_compiles_once(family):
    torch.manual_seed(0)
    model = init(AutoModel.from_config(tiny_config(family)).eval())
    for name, config in CONFIGS.items():
        model.add_adapter(name, config.replace("=bert]", '="bert"]'))
    inputs = tiny_inputs(family)
    backend = Counting()
    compiled = torch.compile(model, fullgraph=True, backend=backend)

    def check():
        with torch.no_grad():
            eager = first_output(model(**inputs))
            assert torch.equal(first_output(compiled(**inputs)), eager)
        return eager

    seen = {}
    for setup in (None, "a", "b", "c"):
        model.set_active_adapters(setup)
        seen[str(setup)] = check()
        assert backend.graphs == len(seen)
    assert not torch.equal(seen["a"], seen["None"])
    # what was compiled once is found again, and follows the weights
    model.set_active_adapters("a")
    with torch.no_grad():
        for _, module in model.adapter_modules("a"):
            for parameter in module.parameters():
                parameter.mul_(2.0)
    changed = check()
    assert not torch.equal(changed, seen["a"])
    assert backend.graphs == len(seen)
    with AdapterSetup("b"):
        assert torch.equal(check(), seen["b"])
    model.set_active_adapters(None)
    model.merge_adapter("a")
    torch.testing.assert_close(check(), changed, rtol=1e-4, atol=1e-5)


def test_a_compiled_training_step_gives_the_eager_gradients():
    torch.manual_seed(0)
    model = AutoAdapterModel.from_config(tiny_config("bert")).eval()
    model.add_adapter("a", 'lora[init_weights="bert"]')
    model.add_classification_head("a", num_labels=3)
    model.train_adapter("a")
    model.eval()
    inputs = {**tiny_inputs("bert"), "labels": torch.tensor([0, 2])}
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    gradients = []
    for run in (model, compiled):
        model.zero_grad()
        run(**inputs).loss.backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.requires_grad})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-5, atol=1e-7)
