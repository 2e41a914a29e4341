"""What a step keeps for the backward pass on a GPU, told by its decisions on this CPU.

Torch operations compute, and the mode "triton" decides, as on a GPU: what is kept has the same
sizes there, except dropout's bits, of which a GPU keeps a seed.
"""

from dataclasses import replace

import pytest
from swept import all_but

import adapterzoo
from _measure import saved_bytes
from _models import BERT, LLAMA, twin
from adapterzoo import kernels
from adapterzoo.config import AdapterConfig
from adapterzoo.kernels import ops

METHODS = {
    "LoRA": "lora[r=8]",
    "DoRA": "dora[r=8]",
    "DoRA + dropout": "dora[r=8,dropout=0.05]",
    "BOFT b=4 m=1": "boft[boft_block_size=4]",
    "BOFT b=8 m=2": "boft[boft_block_size=8,boft_n_butterfly_factor=2]",
}
# over those of the frozen model; BERT keeps its inputs of dropout, and so less of it is shared
MOST = {
    LLAMA: {"LoRA": 1.32, "DoRA": 1.58, "DoRA + dropout": 1.6, "BOFT b=4 m=1": 1.58},
    BERT: {"LoRA": 1.39, "DoRA": 1.66, "DoRA + dropout": 1.67, "BOFT b=4 m=1": 1.66},
}
MOST[LLAMA]["BOFT b=8 m=2"] = 1.61
MOST[BERT]["BOFT b=8 m=2"] = 1.69


@pytest.fixture
def as_cuda(monkeypatch):
    monkeypatch.setattr(ops, "INTERPRETED", True)
    monkeypatch.setattr(ops, "takes_triton", lambda *args, **options: False)
    with kernels.use("triton"):
        yield


@pytest.mark.usefixtures("as_cuda")
@pytest.mark.parametrize("shape", all_but([BERT], [LLAMA, BERT]), ids=["llama", "bert"])
def test_a_step_on_a_gpu_keeps_as_little_as_on_a_cpu(shape):
    base = shape.model()
    floor = saved_bytes(base, lambda: shape.loss(base))
    found = {}
    for name, text in METHODS.items():
        model = adapterzoo.init(twin(base))
        config = AdapterConfig.load(text)
        model.add_adapter("a", replace(config, target_modules=shape.targets))
        model.train_adapter("a")
        model.train()
        # the first step too, which decides how much memory must be there
        found[name] = saved_bytes(model, lambda m=model: shape.loss(m)) / floor
    assert all(found[name] <= most for name, most in MOST[shape].items()), found
