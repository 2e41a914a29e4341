"""What adapters cost, in counts that are the same on every machine.

Bytes kept for the backward pass, bytes on disk, products with the frozen weight, each against the
mathematics. A count that has changed on purpose is written down anew: `PYTHONPATH=benchmarks python
tests/test_costs.py` prints `WEIGHTS`, and `ruff format` arranges them; `make exact` writes the
table of all figures, which `test_exact.py` compares.
"""

import functools
import json
import re
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

import adapterzoo
from _measure import operators, saved_bytes
from _models import DENSE, PROJECTIONS, Shape, twin
from adapterzoo.config import AdapterConfig
from adapterzoo.methods.low_rank import LoRA

WIDTH, INNER, RANK, REDUCED = 64, 160, 4, 8

LOW_RANK = {
    "LoRA": f"lora[r={RANK}]",
    "LoRA + dropout": f"lora[r={RANK},dropout=0.1]",
    "DoRA": f"dora[r={RANK}]",
    "DoRA + dropout": f"dora[r={RANK},dropout=0.1]",
}
BOFT = {
    "BOFT b=4 m=1": "boft[boft_block_size=4]",
    "BOFT b=8 m=2": "boft[boft_block_size=8,boft_n_butterfly_factor=2]",
}
BOTTLENECKS = {
    name: f"{name}[reduction_factor={WIDTH // REDUCED}]" for name in ("seq_bn", "par_bn")
}
METHODS = {**LOW_RANK, **BOFT, **BOTTLENECKS}


def llama(dtype=torch.float32, width=WIDTH, vocabulary=97):
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=width * INNER // WIDTH,
        num_hidden_layers=2, num_attention_heads=4, attn_implementation="eager",
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype)


def bert(p):
    config = BertConfig(
        vocab_size=97, hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=2,
        num_attention_heads=4, hidden_dropout_prob=p, attention_probs_dropout_prob=p,
    )  # fmt: skip
    return BertModel(config, add_pooling_layer=False)


BASES = {
    "llama": (llama, PROJECTIONS),
    "llama, bfloat16": (functools.partial(llama, torch.bfloat16), PROJECTIONS),
    "bert": (functools.partial(bert, 0.0), DENSE),
    "bert + dropout": (functools.partial(bert, 0.1), DENSE),
}
EVERY = [(base, method) for base in BASES for method in METHODS]


@functools.cache
def made(base):
    torch.manual_seed(0)
    return BASES[base][0]().requires_grad_(False).train()


def shape(base, tokens=8):
    return Shape(base, BASES[base][1], 2, tokens)


def adapted(base, method):
    """Trained-for, in training, on the parameters of the base."""
    return put(made(base), method, BASES[base][1])


def put(base, method, targets):
    model = adapterzoo.init(twin(base))
    config = AdapterConfig.load(METHODS[method])
    # the bottlenecks know their places
    model.add_adapter(
        "a", config if method in BOTTLENECKS else replace(config, target_modules=targets)
    )
    model.train_adapter("a")
    return model.train()


def linears(base, model=None):
    named = (made(base) if model is None else model).named_modules()
    return {path: module for path, module in named if re.fullmatch(BASES[base][1], path)}


def kept_bytes(base, model, tokens):
    """Over those of the frozen base."""
    of = shape(base, tokens)
    floor = saved_bytes(made(base), lambda: of.loss(made(base)))
    return saved_bytes(model, lambda: of.loss(model)) - floor


class Keeping(torch.autograd.Function):
    """Keeps what goes through it, once, however often others do."""

    @staticmethod
    def forward(ctx, y):
        out = y.clone()
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx, dy):
        return dy


def input_bytes(base, tokens):
    """The layers' inputs, as far as the frozen base does not keep them: autograd's own answer."""
    model = twin(made(base))
    for layer in linears(base, model).values():
        # its gradient needs the input
        layer.weight = nn.Parameter(layer.weight.detach())
    return kept_bytes(base, model, tokens)


def output_bytes(base, tokens):
    """The layers' outputs, as far as the frozen base does not keep them."""
    model = twin(made(base))
    for layer in linears(base, model).values():
        layer.register_forward_hook(lambda layer, inputs, y: Keeping.apply(y))
    return kept_bytes(base, model, tokens)


def kept_by_tokens(base, method, tokens):
    """The bytes that a method needs for the backward pass and that grow with the tokens."""
    rows, size = 2 * tokens, made(base).dtype.itemsize
    if method == "par_bn":
        # the activation's input, and its own one where the base does not keep that
        own = {"llama": 0}.get(base, WIDTH)
        return 2 * rows * size * (own + REDUCED)
    if method == "seq_bn":
        # the same, and in BERT the norm of the layer runs twice: its input, mean and deviation
        norm = 4 * 2 + size * WIDTH if base.startswith("bert") else 0
        return 2 * rows * (size * (WIDTH + REDUCED) + norm)
    # the input once, whoever reads it
    found = input_bytes(base, tokens)
    if "LoRA" not in method:
        # the output, which the next operation often keeps anyway
        found += output_bytes(base, tokens)
    if method in LOW_RANK:
        # x Aᵀ
        found += rows * RANK * size * len(linears(base))
    if "dropout" in method:
        # a bit for each feature of an input
        found += rows * sum(layer.in_features for layer in linears(base).values()) // 8
    return found


@pytest.mark.parametrize(("base", "method"), EVERY)
def test_what_a_step_keeps(base, method):
    model = adapted(base, method)
    # 160 are enough for the operations that large inputs take
    for tokens in (8, 160):
        rest = kept_bytes(base, model, tokens) - kept_by_tokens(base, method, tokens)
        assert rest == weight_bytes(base, method)


def weight_bytes(base, method):
    """What a step keeps besides: it follows from weights alone."""
    if method in BOTTLENECKS:
        return 0
    if method in BOFT:
        return WEIGHTS[base.removesuffix(" + dropout"), method]
    found = 0
    if "DoRA" in method:
        # float32: the norms, and the factors g with a byte for each that says where the norms are
        # zero
        found += (4 + 4 + 1) * sum(layer.out_features for layer in linears(base).values())
    return found


# rotations: factors, what folds them, and the folded
WEIGHTS = {
    ("llama", "BOFT b=4 m=1"): 87936,
    ("llama", "BOFT b=8 m=2"): 139264,
    ("llama, bfloat16", "BOFT b=4 m=1"): 58240,
    ("llama, bfloat16", "BOFT b=8 m=2"): 179200,
    ("bert", "BOFT b=4 m=1"): 77568,
    ("bert", "BOFT b=8 m=2"): 122880,
}
# more than the frozen base has: of a training step, and of a forward in evaluation
_EXACT = json.loads((Path(__file__).parent / "data" / "exact.json").read_text())
OPERATORS = {tuple(k.rsplit(": ", 1)): tuple(v) for k, v in _EXACT["operators"].items()}


def counted(base, method):
    """How many operators more than the frozen base: in a training step, in an evaluation."""
    model, plain = adapted(base, method), made(base)
    steps = [operators(lambda m=m: shape(base).step(m)) for m in (model, plain)]
    return steps[0] - steps[1], forward_operators(model) - forward_operators(plain)


@torch.no_grad()
def forward_operators(model):
    mode = model.training
    model.eval()
    ids = torch.arange(8).expand(2, -1)
    # the first one computes what later ones keep
    for _ in range(2):
        found = operators(lambda: model(input_ids=ids))
    model.train(mode)
    return found


# --- over a base in bfloat16 ---


# where attention keeps its scores: without it the goals are 1.30 and 1.55
@pytest.mark.parametrize(("method", "most"), [("LoRA", 1.17), ("DoRA", 1.32)])
def test_nothing_is_promoted_over_half_precision(method, most):
    """On a model with the proportions of the large one it is meant for."""
    base = llama(torch.bfloat16, width=128, vocabulary=1024).requires_grad_(False).train()
    of = Shape("half", PROJECTIONS, 2, 128)
    model = put(base, method, PROJECTIONS)
    floor = saved_bytes(base, lambda: of.loss(base))
    assert saved_bytes(model, lambda: of.loss(model)) / floor <= most


# --- products with the frozen weight ---


class Products(TorchDispatchMode):
    """Counts matrix products by the weight that they read."""

    def __init__(self, weights):
        super().__init__()
        self.weights = {w.untyped_storage().data_ptr() for w in weights}
        self.found: Counter[int] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("mm", "bmm", "addmm", "linear"):
            # of addmm the first is what is added to
            for factor in args[name == "addmm" :][:2]:
                place = factor.untyped_storage().data_ptr()
                self.found[place] += place in self.weights
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("base", ["llama", "bert + dropout"])
def test_a_step_multiplies_by_each_weight_twice(base, method):
    """Forward and backward; dropout of the update asks for no product of its own."""
    weights = [layer.weight for layer in linears(base).values()]
    model = adapted(base, method)
    with Products(weights) as products:
        shape(base).step(model)
    assert [products.found[w.untyped_storage().data_ptr()] for w in weights] == [2] * len(weights)


# --- memory and files ---


def parameter_count(method):
    """Of the adapter on the Llama."""
    sizes = [(m.in_features, m.out_features) for m in linears("llama").values()]
    if method in BOTTLENECKS:
        return 2 * (2 * REDUCED * WIDTH + REDUCED + WIDTH)
    if method in LOW_RANK:
        own = sum(RANK * (d_in + d_out) for d_in, d_out in sizes)
        return own + ("DoRA" in method) * sum(d_out for _, d_out in sizes)
    b, m = (4, 1) if "m=1" in method else (8, 2)
    return sum(m * d_in * b + d_out for d_in, d_out in sizes)


@pytest.mark.parametrize("method", METHODS)
def test_a_file_has_the_parameters_and_little_else(tmp_path, method):
    model = adapted("llama", method)
    model.save_adapter(tmp_path, "a")
    (file,) = tmp_path.glob("*.safetensors")
    header = int.from_bytes(file.read_bytes()[:8], "little")
    assert file.stat().st_size == 8 + header + 4 * parameter_count(method)
    names = json.loads(file.read_bytes()[8 : 8 + header])
    # a path, a dtype, a shape and two offsets each, and the config
    assert header <= 256 * len(names) + 1024
    others = sum(f.stat().st_size for f in tmp_path.iterdir() if f != file)
    assert others <= 4096


# --- the checks can fail ---


def test_one_operator_more_in_each_forward_is_seen(monkeypatch):
    forward = LoRA.forward
    monkeypatch.setattr(LoRA, "forward", lambda self, x, base: forward(self, x, base) * 1)
    step, evaluation = OPERATORS["llama", "LoRA"]
    # of each of 14 sites, and one in its backward
    assert counted("llama", "LoRA") == (step + 2 * 14, evaluation + 14)


def test_one_tensor_more_that_is_kept_is_seen(monkeypatch):
    forward = LoRA.forward

    def promoted(self, x, base):
        y = forward(self, x, base)
        return Keeping.apply(y.float()).to(y.dtype)

    monkeypatch.setattr(LoRA, "forward", promoted)
    for base in ("llama", "bert"):
        with pytest.raises(AssertionError):
            test_what_a_step_keeps(base, "LoRA")
    with pytest.raises(AssertionError):
        test_nothing_is_promoted_over_half_precision("LoRA", 1.17)


def test_one_product_more_with_the_weight_is_seen(monkeypatch):
    forward = LoRA.forward

    def twice(self, x, base):
        return forward(self, x, base) + 0 * linear(x, base.weight)

    monkeypatch.setattr(LoRA, "forward", twice)
    with pytest.raises(AssertionError):
        test_a_step_multiplies_by_each_weight_twice("llama", "LoRA")


def main():
    """Write the table to stdout."""
    pairs = [(base, method) for base in BASES if "dropout" not in base for method in BOFT]
    weights = {(b, m): kept_bytes(b, adapted(b, m), 8) - kept_by_tokens(b, m, 8) for b, m in pairs}
    rows = [f"    {key}: {value},\n" for key, value in weights.items()]
    sys.stdout.write("".join(["WEIGHTS = {\n", *rows, "}\n"]))


if __name__ == "__main__":
    main()
