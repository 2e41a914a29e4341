"""The shared trunk: blocks before the first adapter run once for equal rows."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from families import VOCABULARY, tiny_config, tiny_inputs
from snapshots import stir
from swept import all_but
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
)

from adapterzoo import AdapterSetup, MultiTask, Parallel, Stack, init

NAMES = "a", "b", "c"
THREE = Parallel(*NAMES)
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers", "encoder_layers",
          "decoder_layers")  # fmt: skip
GEMMA4 = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY,
          "global_head_dim": 8, "num_kv_shared_layers": 1, "sliding_window": 16,
          "layer_types": ["full_attention"] * 4}  # fmt: skip


def config_of(family, layers=4):
    if family == "gemma4_text":
        text = {**tiny_config("llama").to_dict(), "model_type": family, "num_hidden_layers": layers}
        return AutoConfig.for_model(**{**text, **GEMMA4})
    config = tiny_config(family)
    for name in LAYERS:
        if hasattr(config, name):
            setattr(config, name, layers)
    if getattr(config, "layer_types", None):
        config.layer_types = [*config.layer_types, *config.layer_types][:layers]
    # torch has no grouped product of float64
    config._experts_implementation = "eager"
    return config


def with_adapters(family, method="seq_bn", auto=AutoModel, free=2, dtype=torch.float64, layers=4,
                  attention="sdpa"):  # fmt: skip
    """A model whose adapters leave out all blocks but the last `free`."""
    torch.manual_seed(0)
    config = config_of(family, layers)
    kind = auto._model_mapping[type(config)]
    config._attn_implementation = attention if kind._supports_sdpa else "eager"
    model = init(auto.from_config(config).to(dtype).eval())
    blocks = range(len(model.anatomy.blocks) - free)
    methods = [method] * 3 if isinstance(method, str) else method
    for seed, (name, own) in enumerate(zip(NAMES, methods, strict=True)):
        model.add_adapter(name, f"{own.removesuffix(']')}{',' if '[' in own else '['}"
                          f"leave_out={[*blocks]}]")  # fmt: skip
        stir(model, name, seed, std=0.3)
    model.set_active_adapters(THREE)
    return model


def inputs_of(family, batch=2, dtype=torch.float64, left=False):
    inputs = tiny_inputs("llama" if family == "gemma4_text" else family, batch)
    if left:
        inputs = {name: t.flip(1) for name, t in inputs.items()}
    return {n: t.to(dtype) if t.is_floating_point() else t for n, t in inputs.items()}


def tensors(outputs):
    return [t.detach() for t in tree_leaves(dict(outputs)) if isinstance(t, Tensor)]


class Float64(TorchFunctionMode):
    """Norms, rotations and the like, which many families compute in float32, are in float64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        def wide(value):
            return torch.float64 if value is torch.float32 else value

        func = Tensor.double if func is Tensor.float else func
        named = {name: wide(value) for name, value in (kwargs or {}).items()}
        return func(*map(wide, args), **named)


def check(found, expected, low):
    """Two results in float64 are equal up to what their sums in different orders round.

    The same computation in float32, `low`, shows how its roundings add up: in float64 each is
    smaller by the ratio of the units of rounding. Both results are off by that much; a factor of 8
    is for sums whose roundings cancel in float32, and a few roundings are of the result itself.
    """
    units = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    assert len(found) == len(expected) == len(low)
    for one, other, rough in zip(found, expected, low, strict=True):
        assert one.shape == other.shape
        error = (rough.double() - other).abs().max() if other.numel() else 0.0
        largest = float(other.abs().max()) if other.numel() else 0.0
        atol = 16 * units * float(error) + 4 * torch.finfo(torch.float64).eps * largest
        torch.testing.assert_close(one, other, rtol=0, atol=atol)


def results(model, inputs, labels=None, **kwargs):
    """Outputs and hidden states, and the gradients of all parameters."""
    model.zero_grad()
    asked = {"output_hidden_states": True, **kwargs}
    if labels is not None:
        asked["labels"] = labels
    with Float64() if model.dtype is torch.float64 else nullcontext():
        outputs = model(**inputs, **asked)
        loss, states = outputs[0], [t for t in tensors(outputs) if t.is_floating_point()]
        if labels is None:
            source = torch.Generator().manual_seed(1)
            loss = loss * torch.randn(loss.shape, generator=source).to(loss.dtype)
        loss.sum().backward()
    return [*states, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def check_call(family, model, low, labels=None, **kwargs):
    expected = results(model, inputs_of(family), labels, **kwargs)
    rough = results(low, inputs_of(family, dtype=torch.float32), labels, **kwargs)
    model.share_trunk()
    check(results(model, inputs_of(family), labels, **kwargs), expected, rough)


# family: blocks that are shared when the adapters are in the last two
BASES = {
    "bert": (0, 1), "roberta": (0, 1), "distilbert": (0, 1), "deberta-v2": (0, 1),
    "modernbert": (0, 1), "gpt2": (0, 1), "gpt_neox": (0, 1), "llama": (0, 1), "bloom": (0, 1),
    "gemma3_text": (0, 1), "gemma4_text": (0, 1), "mixtral": (0, 1), "qwen3_moe": (0, 1),
    "t5": range(6), "bart": range(6), "whisper": range(6), "vit": (0, 1), "wav2vec2": (0, 1),
}  # fmt: skip
QUICK = "bert", "llama", "t5", "gemma4_text", "mixtral"


@pytest.mark.parametrize("family", all_but(QUICK, BASES))
def test_states_and_gradients_are_those_without(family):
    model, low = with_adapters(family), with_adapters(family, dtype=torch.float32)
    check_call(family, model, low)
    assert model.shared_blocks == tuple(BASES[family])


@pytest.mark.parametrize("family", all_but(("bert", "t5"), BASES))
def test_attentions_have_all_rows(family):
    model, inputs = with_adapters(family, attention="eager"), inputs_of(family)
    with torch.no_grad():
        expected = tensors(model(**inputs, output_attentions=True))
        model.share_trunk()
        found = tensors(model(**inputs, output_attentions=True))
    assert model.shared_blocks
    assert any(t.dim() == 4 for t in found) or family in ("deberta-v2",)
    # many families compute this softmax in float32
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


METHODS = ("lora", "dora", "ia3", "boft", "seq_bn", "par_bn", "prefix_tuning",
           "vera")  # fmt: skip


@pytest.mark.parametrize(
    ("family", "method"),
    all_but(
        [("bert", "lora"), ("llama", "prefix_tuning")],
        [(f, m) for f in ("bert", "llama") for m in METHODS],
    ),
)
def test_methods(family, method):
    model, low = (with_adapters(family, method, dtype=d) for d in (torch.float64, torch.float32))
    check_call(family, model, low)
    assert model.shared_blocks == (0, 1)


def test_different_methods_and_compositions():
    methods = "lora", "seq_bn", "prefix_tuning"
    model, low = (with_adapters("llama", methods, dtype=d) for d in (torch.float64, torch.float32))
    for each in (model, low):
        each.set_active_adapters(Parallel("a", Stack("a", "b"), None, "c"))
    check_call("llama", model, low)
    assert model.shared_blocks == (0, 1)


@pytest.mark.parametrize("kind", ["causal", "seq2seq", "classes", "images", "routers"])
def test_losses_of_task_classes(kind):
    family, auto = {
        "causal": ("llama", AutoModelForCausalLM),
        "routers": ("mixtral", AutoModelForCausalLM),
        "seq2seq": ("t5", AutoModelForSeq2SeqLM),
        "classes": ("bert", AutoModelForSequenceClassification),
        "images": ("vit", AutoModelForImageClassification),
    }[kind]
    model, low = (with_adapters(family, auto=auto, dtype=d) for d in (torch.float64, torch.float32))
    labels = torch.tensor([0, 1])
    if auto in (AutoModelForCausalLM, AutoModelForSeq2SeqLM):
        name = "decoder_input_ids" if kind == "seq2seq" else "input_ids"
        labels = inputs_of(family)[name]
    # each router's logits count in the loss
    asked = {"output_router_logits": True} if kind == "routers" else {}
    check_call(family, model, low, labels, **asked)
    assert model.shared_blocks


# --- what it saves ---


def operations(model, inputs, **kwargs):
    """Floating-point operations of each block."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(**inputs, **kwargs)
    counts = counter.get_flop_counts()
    root = next(iter(name for name in counts if name != "Global"))
    return [
        sum(counts[f"{root.partition('.')[0]}.{block.path}"].values())
        for block in model.anatomy.blocks
    ]


@pytest.mark.parametrize("family", ["bert", "llama", "t5", "vit"])
def test_operations_of_the_trunk_are_divided_by_the_number_of_adapters(family):
    model, inputs = with_adapters(family), inputs_of(family)
    before = operations(model, inputs)
    model.share_trunk()
    after = operations(model, inputs)
    trunk = len(model.shared_blocks)
    assert trunk == len(before) - 2
    assert [3 * count for count in after[:trunk]] == before[:trunk]
    assert after[trunk:] == before[trunk:]


def test_operations_of_a_mixed_batch_are_those_of_its_distinct_rows():
    model, inputs = with_adapters("llama"), inputs_of("llama", batch=2)
    # prompts 0 1 0 0 1
    inputs = {name: t[[0, 1, 0, 0, 1]] for name, t in inputs.items()}
    names = ["a", "b", None, "c", "a"]
    before = operations(model, inputs, adapter_names=names)
    model.share_trunk()
    after = operations(model, inputs, adapter_names=names)
    assert [5 * count for count in after[:2]] == [2 * count for count in before[:2]]
    assert after[2:] == before[2:]


# --- mixed batches ---


@pytest.mark.parametrize("family", ["bert", "gpt2", "t5"])
def test_rows_with_equal_inputs(family):
    model, low = (with_adapters(family, dtype=d) for d in (torch.float64, torch.float32))
    inputs = inputs_of(family)
    names = ["b", "a", None, "c", Stack("a", "b")]
    mixed, rough = (
        {n: t[[1, 0, 1, 1, 0]].to(d) if t.is_floating_point() else t[[1, 0, 1, 1, 0]]
         for n, t in inputs.items()} for d in (torch.float64, torch.float32)
    )  # fmt: skip
    expected = results(model, mixed, adapter_names=names)
    low = results(low, rough, adapter_names=names)
    model.share_trunk()
    check(results(model, mixed, adapter_names=names), expected, low)
    assert len(model.shared_blocks) == len(model.anatomy.blocks) - 2


def test_tasks_of_equal_rows():
    model, low = (with_adapters("bert", dtype=d) for d in (torch.float64, torch.float32))
    for each in (model, low):
        each.set_active_adapters(MultiTask("a", "b", "c"))
    inputs = {name: t[[0, 0, 1, 1]] for name, t in inputs_of("bert").items()}
    tasks = [0, 2, 1, 0]
    expected = results(model, inputs, task_ids=tasks)
    rough = results(low, inputs, task_ids=tasks)
    model.share_trunk()
    check(results(model, inputs, task_ids=tasks), expected, rough)
    assert model.shared_blocks == (0, 1)


def test_rows_that_differ_do_not_share():
    model, inputs = with_adapters("bert"), inputs_of("bert", batch=3)
    names = ["a", "b", "c"]
    with torch.no_grad():
        expected = model(**inputs, adapter_names=names).last_hidden_state
        model.share_trunk()
        assert torch.equal(model(**inputs, adapter_names=names).last_hidden_state, expected)
        assert model.shared_blocks == ()
        # equal tokens and another mask
        same = {name: t[:1].repeat(3, 1) for name, t in inputs.items()}
        same["attention_mask"] = torch.tensor([[1] * 7, [1] * 6 + [0], [1] * 7])
        model.share_trunk(False)
        expected = model(**same, adapter_names=names).last_hidden_state
        model.share_trunk()
        found = model(**same, adapter_names=names).last_hidden_state
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
        assert model.shared_blocks == (0, 1)
    # each row's own gradient
    embeds = torch.randn(1, 4, 32, dtype=torch.float64).repeat(3, 1, 1).requires_grad_()
    model(inputs_embeds=embeds, adapter_names=names).last_hidden_state.sum().backward()
    assert all(row.count_nonzero() for row in embeds.grad)


# as many rows as tokens, heads and features of a head
@pytest.mark.parametrize("rows", [1, 2, 4, 7, 8])
@pytest.mark.parametrize("family", ["llama", "bert", "bloom", "deberta-v2", "modernbert"])
def test_shapes_that_could_be_mistaken(family, rows):
    model, low = (with_adapters(family, dtype=d) for d in (torch.float64, torch.float32))
    inputs = {name: t[:1].repeat(rows, 1) for name, t in inputs_of(family).items()}
    names = [[*NAMES, None][row % 4] for row in range(rows)]
    expected = results(model, inputs, adapter_names=names)
    rough = results(low, inputs, adapter_names=names)
    model.share_trunk()
    check(results(model, inputs, adapter_names=names), expected, rough)
    assert model.shared_blocks == ((0, 1) if rows > 1 else ())


# --- where it ends ---


@pytest.mark.parametrize(
    "method", ["prompt_tuning", "seq_bn_inv", "lora[target_modules=['word_embeddings']]"]
)
def test_adapters_before_the_first_block_share_nothing(method):
    torch.manual_seed(0)
    model = init(AutoModel.from_config(config_of("bert")).double().eval())
    for seed, name in enumerate(NAMES):
        model.add_adapter(name, method)
        stir(model, name, seed)
    model.set_active_adapters(THREE)
    with torch.no_grad():
        expected = model(**inputs_of("bert")).last_hidden_state
        model.share_trunk()
        assert torch.equal(model(**inputs_of("bert")).last_hidden_state, expected)
    assert model.shared_blocks == ()


def test_an_adapter_in_the_encoder_ends_it_for_the_decoder():
    model, low = (with_adapters("t5", "lora", free=5, dtype=d)
                  for d in (torch.float64, torch.float32))  # fmt: skip
    check_call("t5", model, low)
    # the decoder reads states that differ
    assert model.shared_blocks == (0, 1, 2)


def test_blocks_that_are_skipped_belong_to_it():
    # AdapterDrop
    model, low = (with_adapters("bert", free=4, dtype=d) for d in (torch.float64, torch.float32))
    check_call("bert", model, low)
    assert model.shared_blocks == ()
    with AdapterSetup(THREE, skip_layers=[0, 1]):
        model.share_trunk(False)
        expected = results(model, inputs_of("bert"))
        rough = results(low, inputs_of("bert"))
        model.share_trunk()
        check(results(model, inputs_of("bert")), expected, rough)
    assert model.shared_blocks == (0, 1)


def test_merged_adapters_belong_to_it():
    model = with_adapters("bert", "lora")
    model.add_adapter("m", "lora[leave_out=[1,2,3]]")
    stir(model, "m")
    model.merge_adapter("m")
    with torch.no_grad():
        expected = model(**inputs_of("bert")).last_hidden_state
        model.share_trunk()
        found = model(**inputs_of("bert")).last_hidden_state
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert model.shared_blocks == (0, 1)
