"""The shared trunk: blocks before the first adapter run once for equal rows."""

from __future__ import annotations

import copy
import inspect
from contextlib import nullcontext

import pytest
import torch
from architectures.tiny_models import tiny_model
from families import FAMILIES, VOCABULARY, tiny_config, tiny_inputs
from snapshots import stir
from swept import all_but
from torch import Tensor, nn
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
    XLMModel,
)

from adapterzoo import AdapterSetup, AutoAdapterModel, MultiTask, Parallel, Stack, init
from adapterzoo.errors import StateError

NAMES = "a", "b", "c"
THREE = Parallel(*NAMES)
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers", "encoder_layers",
          "decoder_layers")  # fmt: skip
GEMMA4 = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY,
          "global_head_dim": 8, "num_kv_shared_layers": 1, "sliding_window": 16,
          "layer_types": ["full_attention"] * 4}  # fmt: skip


def config_of(family, layers=4):
    if family == "gemma4_text":
        sizes = {**FAMILIES["llama"], "num_hidden_layers": layers, **GEMMA4}
        return AutoConfig.for_model(family, **sizes)
    config = tiny_config(family)
    for name in LAYERS:
        if hasattr(config, name):
            setattr(config, name, layers)
    if getattr(config, "layer_types", None):
        config.layer_types = [*config.layer_types, *config.layer_types][:layers]
    for name in ("attention_probs_dropout_prob", "hidden_dropout_prob", "dropout_rate"):
        if hasattr(config, name):
            setattr(config, name, 0.0)
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
    blocks = [f".{block.path}" for block in model.anatomy.blocks]
    return [sum(sum(n.values()) for at, n in counts.items() if at.endswith(b)) for b in blocks]


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
    # a sum alone would be that of a norm's outputs, which does not change
    out = model(inputs_embeds=embeds, adapter_names=names).last_hidden_state
    (out * torch.randn_like(out)).sum().backward()
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


# --- in generate and with a cache ---

GENERATING = {
    "gpt2": AutoModelForCausalLM,
    "llama": AutoModelForCausalLM,
    "bloom": AutoModelForCausalLM,
    "mixtral": AutoModelForCausalLM,
    "gemma3_text": AutoModelForCausalLM,
    "t5": AutoModelForSeq2SeqLM,
    "bart": AutoModelForSeq2SeqLM,
}
OPTIONS = {
    "cache": {},
    "static": {"cache_implementation": "static"},
    "none": {"use_cache": False},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "chunks": {"prefill_chunk_size": 3},
    "sampled": {"do_sample": True},
}


def generated(model, inputs, **kwargs):
    torch.manual_seed(2)
    given = {name: t for name, t in inputs.items() if name in ("input_ids", "attention_mask")}
    asked = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    asked |= {"return_dict_in_generate": True, "output_logits": True, **kwargs}
    with torch.no_grad(), Float64():
        return model.generate(**given, **asked)


@pytest.mark.parametrize(
    ("family", "option"),
    all_but(
        [("llama", "cache"), ("llama", "static"), ("gpt2", "beams"), ("t5", "cache")],
        [(family, option) for family in GENERATING for option in OPTIONS],
    ),
)
def test_generated_tokens_are_those_without(family, option):
    auto, options = GENERATING[family], OPTIONS[option]
    model = with_adapters(family, auto=auto)
    inputs = inputs_of(family, left=auto is AutoModelForCausalLM)
    expected = generated(model, inputs, **options)
    model.share_trunk()
    found = generated(model, inputs, **options)
    # the prompt alone has equal rows
    assert len(model.shared_blocks) == len(model.anatomy.blocks) - 2
    assert torch.equal(found.sequences, expected.sequences)
    first = found.logits[0]
    assert not torch.allclose(first[0], first[len(first) // 3])
    torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=1e-10)
    # one prompt, several adapters
    rows = {name: t[[0, 1, 0, 0]] for name, t in inputs.items()}
    names = ["a", "b", None, "c"]
    found = generated(model, rows, adapter_names=names, **options)
    assert len(model.shared_blocks) == len(model.anatomy.blocks) - 2
    model.share_trunk(False)
    expected = generated(model, rows, adapter_names=names, **options)
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=1e-10)


def test_an_adapted_encoder_ends_it_for_the_decoder_that_generates():
    model, inputs = with_adapters("t5", "lora", AutoModelForSeq2SeqLM, free=5), inputs_of("t5")
    expected = generated(model, inputs)
    model.share_trunk()
    found = generated(model, inputs)
    assert model.shared_blocks == (0, 1, 2)
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=1e-10)


def test_operations_of_a_prompt_are_divided_and_those_of_new_tokens_are_not():
    model, inputs = with_adapters("llama", auto=AutoModelForCausalLM), inputs_of("llama")
    prompt = operations(model.eval(), inputs)[:2]
    counts = []
    for share in (False, True):
        model.share_trunk(share)
        with FlopCounterMode(display=False) as counter:
            generated(model, inputs)
        counts.append(counter.get_total_flops())
    assert counts[0] - counts[1] == sum(prompt) * 2 // 3


@pytest.mark.parametrize("family", ["llama", "gpt2", "t5"])
def test_the_cache_of_the_trunk_has_all_rows(family):
    auto = GENERATING[family]
    model, inputs = with_adapters(family, auto=auto), inputs_of(family)
    asked = {"use_cache": True, "output_hidden_states": True}
    name = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"

    def passes():
        with torch.no_grad():
            first = model(**inputs, **asked)
            cache = first["past_key_values"]
            own = getattr(cache, "self_attention_cache", cache)
            kept = [t.clone() for layer in own.layers for t in (layer.keys, layer.values)]
            # two more tokens, of all copies
            more = {**inputs, name: torch.tensor([[5, 6], [7, 8]])}
            if name == "input_ids":
                more["attention_mask"] = torch.ones(2, 9, dtype=torch.long)
            names = inspect.signature(model.forward).parameters
            own = "cache" if "cache" in names else "past_key_values"
            second = model(**more, **{own: cache}, **asked)
        return [*kept, first.logits, second.logits]

    expected = passes()
    model.share_trunk()
    found = passes()
    # the second call goes on from a cache, whose rows may differ
    assert model.shared_blocks == ()
    assert all(t.shape[0] == 6 for t in found[:-2])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_states_without_tokens_are_cached_for_all_rows():
    # it caches keys, values, and the last values of each row, [rows, d]
    plain, inputs = tiny_model("zaya")
    model = init(plain)
    for seed, name in enumerate("ab"):
        model.add_adapter(name, "lora[leave_out=[0]]")
        stir(model, name, seed)
    model.set_active_adapters(Parallel("a", "b"))
    found = []
    for share in (False, True):
        model.share_trunk(share)
        with torch.no_grad():
            cache = model(**inputs, use_cache=True)["past_key_values"]
        own = [tree_leaves(vars(layer)) for layer in cache.layers]
        found.append([t for leaves in own for t in leaves if isinstance(t, Tensor)])
    assert model.shared_blocks == (0,)
    assert 2 in {t.dim() for t in found[0]}
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-5)


# --- training ---


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", ["bert", "llama", "t5"])
def test_gradient_checkpointing(family, reentrant):
    auto = AutoModelForSeq2SeqLM if family == "t5" else AutoModel
    found = []
    for share in (False, True):
        model = with_adapters(family, "lora", auto).train()
        model.train_adapter(THREE)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.share_trunk(share)
        kwargs = {"labels": inputs_of(family)["decoder_input_ids"]} if family == "t5" else {}
        loss = model(**inputs_of(family), use_cache=False, **kwargs)[0].square().sum()
        # the second time, too
        loss.backward(retain_graph=not reentrant)
        if not reentrant:
            loss.backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
        assert bool(model.shared_blocks) == share
    assert found[0]
    # many families compute norms in float32
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)


def test_heads_and_their_losses():
    torch.manual_seed(0)
    model = AutoAdapterModel.from_config(config_of("bert")).double().eval()
    for seed, name in enumerate(NAMES):
        model.add_adapter(name, "seq_bn[leave_out=[0,1]]")
        stir(model, name, seed, std=0.3)
    model.add_classification_head("a", num_labels=2)
    model.add_tagging_head("b", num_labels=3)
    model.add_classification_head("c", num_labels=4)
    model.set_active_adapters(THREE)
    labels = {"a": torch.tensor([0, 1]), "b": torch.ones(2, 7, dtype=torch.long)}
    labels["c"] = torch.tensor([3, 0])
    results = []
    for share in (False, True):
        model.share_trunk(share)
        model.zero_grad()
        outputs = model(**inputs_of("bert"), labels=labels)
        outputs.loss.backward()
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        results.append([*tensors(outputs), *grads])
    assert model.shared_blocks == (0, 1)
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-10)


def test_labels_of_each_head_are_inputs_of_a_decoder():
    torch.manual_seed(0)
    model = AutoAdapterModel.from_config(config_of("t5")).double().eval()
    for seed, name in enumerate("ab"):
        model.add_adapter(name, f"seq_bn[leave_out={[*range(6)]}]")
        stir(model, name, seed, std=0.3)
        model.add_seq2seq_lm_head(name)
    model.set_active_adapters(Parallel("a", "b"))
    inputs = inputs_of("t5")
    del inputs["decoder_input_ids"]
    labels = {"a": torch.tensor([[5, 6], [7, 8]]), "b": torch.tensor([[9, 3], [4, 2]])}
    with torch.no_grad(), Float64():
        expected = model(**inputs, labels=labels)
        model.share_trunk()
        found = model(**inputs, labels=labels)
        assert model.shared_blocks == ()
        torch.testing.assert_close(tensors(found), tensors(expected), rtol=0, atol=1e-12)
        same = dict.fromkeys("ab", labels["a"])
        # one tensor for both
        found = model(**inputs, labels=labels["a"])
        assert len(model.shared_blocks) == 6
        model.share_trunk(False)
        expected = model(**inputs, labels=same)
        torch.testing.assert_close(found.loss, expected.loss, rtol=0, atol=1e-12)


# --- the setting ---


def test_the_model_is_restored():
    model = with_adapters("bert")
    before = [type(module) for module in model.modules()]
    model.share_trunk()
    model.share_trunk()
    assert [type(module) for module in model.modules()] != before
    model.share_trunk(False)
    assert [type(module) for module in model.modules()] == before
    model.share_trunk()
    # copies, plain models
    twin = copy.deepcopy(model)
    with torch.no_grad():
        expected = model(**inputs_of("bert")).last_hidden_state
        assert torch.equal(twin(**inputs_of("bert")).last_hidden_state, expected)
    assert twin.shared_blocks == (0, 1)
    plain = model.unload()
    assert {type(module).__module__.partition(".")[0] for module in plain.modules()} <= {
        "torch", "transformers"
    }  # fmt: skip
    assert not any(hasattr(module, "_link") for module in plain.modules())


def test_it_is_off_by_default_and_one_adapter_shares_nothing():
    model, inputs = with_adapters("bert"), inputs_of("bert")
    with torch.no_grad():
        model(**inputs)
        assert model.shared_blocks == ()
        model.share_trunk()
        model(**inputs)
        assert model.shared_blocks == (0, 1)
        # all rows of a batch
        with AdapterSetup("a"):
            model(**{name: t[[0, 0]] for name, t in inputs.items()}, adapter_names=None)


def test_compiled_code_shares_the_copies_of_parallel():
    model, inputs = with_adapters("llama"), inputs_of("llama")
    del inputs["attention_mask"]
    model.share_trunk()
    with torch.no_grad():
        expected = model(**inputs, use_cache=False).last_hidden_state
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        found = compiled(**inputs, use_cache=False).last_hidden_state
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


# --- what is refused ---


def test_models_whose_blocks_are_no_modules_refuse():
    config = AutoConfig.for_model("xlm", vocab_size=VOCABULARY, emb_dim=32, n_layers=2, n_heads=4)
    model = init(XLMModel(config))
    with pytest.raises(StateError, match="Leave share_trunk out"):
        model.share_trunk()
    with pytest.raises(StateError, match="Leave share_trunk out"):
        init(nn.Sequential(nn.Linear(4, 4))).share_trunk()


def test_rows_at_another_dimension_are_refused_by_name():
    # its blocks get several streams, `[streams, rows, tokens, d]`
    plain, inputs = tiny_model("gemma3n_text")
    model = init(plain)
    for name in "ab":
        model.add_adapter(name, "lora[leave_out=[0]]")
    model.set_active_adapters(Parallel("a", "b"))
    with torch.no_grad():
        expected = model(**inputs).last_hidden_state
        model.share_trunk()
        refusal = r"the block 'layers.0' got .*Write (model.share_trunk\(False\))"
        with pytest.raises(StateError, match=refusal):
            model(**inputs)
        model.share_trunk(False)
        assert torch.equal(model(**inputs).last_hidden_state, expected)


def test_equal_rows_that_become_random_are_refused_unless_by_dropout():
    # it hides other patches of each copy
    plain, inputs = tiny_model("vit_mae")
    model = init(plain)
    for name in "ab":
        model.add_adapter(name, "lora[leave_out=[0]]")
    model.set_active_adapters(Parallel("a", "b"))
    model.share_trunk()
    with torch.no_grad(), pytest.raises(StateError, match="differ at random"):
        model(**inputs)
    model = init(AutoModel.from_config(tiny_config("bert"))).train()
    for name in "ab":
        model.add_adapter(name, "lora[leave_out=[0]]")
    model.set_active_adapters(Parallel("a", "b"))
    model.share_trunk()
    states = model(**inputs_of("bert"), output_hidden_states=True).hidden_states
    assert model.shared_blocks == (0,)
    assert torch.equal(*states[1].chunk(2))
    assert not torch.equal(*states[0].chunk(2))


def test_errors_of_a_block_remain_and_say_how_many_rows_it_got():
    model = with_adapters("bert")
    model.share_trunk()

    def fails(module, args):
        raise ValueError("the user's own")

    hook = model.encoder.layer[0].attention.register_forward_pre_hook(fails)
    with torch.no_grad(), pytest.raises(ValueError, match="the user's own") as caught:
        model(**inputs_of("bert"))
    assert type(caught.value) is ValueError
    (note,) = caught.value.__notes__
    assert "'encoder.layer.0' got 2 of 6 rows" in note
    assert "Write model.share_trunk(False)" in note
    hook.remove()
    # nothing remains of the call
    with torch.no_grad():
        model(**inputs_of("bert"))
    assert model.shared_blocks == (0, 1)
