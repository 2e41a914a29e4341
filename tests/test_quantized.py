"""Adapters over quantized layers of bitsandbytes, torchao, quanto and hqq, and of any library.

What a quantized layer computes is its library's affair; what the adapters add to it is compared
with formulas in float64, on the weight that the layer shows when it multiplies by the identity.
"""

import abc
import copy
import dataclasses
import functools
import types

import pytest
import quantized_bases as bases
import torch
from families import first_output, tiny_config
from quantized_bases import WIDTH, base_bits, bnb, four_bits, loaded_as
from snapshots import adapter_bits, of_adapter, stir
from swept import all_but
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    QuantoConfig,
    TrainingArguments,
)

import adapterzoo
from adapterzoo import AdapterTrainer, AutoAdapterModel
from adapterzoo.anatomy import find
from adapterzoo.errors import StateError
from adapterzoo.formats import native
from adapterzoo.inject import layers as quantized
from adapterzoo.inject.adapted import Adapted
from adapterzoo.inject.layers import matrix

FAMILIES = {
    "bert": {**WIDTH, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "llama": {**WIDTH, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0},
    # four linear layers of the class Conv1D, which store their weights transposed
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 99, "n_positions": 64},
}
METHODS = ["lora", "dora", "boft", "double_seq_bn"]


# of the libraries in the test extra
SCHEMES = {
    name: scheme
    for name, scheme in bases.SCHEMES.items()
    if scheme.package in ("bitsandbytes", "torchao", "optimum-quanto", "hqq")
}
UNCOPIED = [name for name, scheme in SCHEMES.items() if not scheme.copies]
UNSAVED = [name for name, scheme in SCHEMES.items() if not scheme.saves]
QUICK = ("bitsandbytes nf4", "torchao int8", "hqq 4 bits")
EACH = pytest.mark.parametrize("scheme", all_but(QUICK, SCHEMES))
FOUR_BITS = "bitsandbytes nf4"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a plain base model of a family."""

    @functools.cache
    def folder(family):
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            model = AutoModel.from_config(AutoConfig.for_model(family, **FAMILIES[family]))
            for parameter in model.parameters():
                # larger than fresh ones, biases too: errors shall be seen
                nn.init.normal_(parameter, 0.0 if parameter.dim() > 1 else 0.5, 0.1)
        path = tmp_path_factory.mktemp(family)
        model.save_pretrained(path)
        return str(path)

    return folder


@pytest.fixture(scope="module")
def load(saved):
    """The base model of a family, quantized as it was loaded: each time an equal one."""
    loaded = {}

    def from_disk(config, family, **settings):
        return loaded_as(AutoAdapterModel, saved(family), config, **settings)

    def make(scheme, family="llama", **settings):
        if not isinstance(scheme, str):
            return from_disk(scheme, family, **settings)
        if scheme in UNCOPIED:
            return from_disk(SCHEMES[scheme].make(), family)
        if (scheme, family) not in loaded:
            loaded[scheme, family] = from_disk(SCHEMES[scheme].make(), family)
        return copy.deepcopy(loaded[scheme, family])

    return make


def inputs():
    ids = torch.randint(3, 99, (2, 7), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def run(model):
    with torch.no_grad():
        return first_output(model(**inputs()))


def gradients(model):
    model.zero_grad()
    first_output(model(**inputs())).float().pow(2).mean().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def weight_of(layer, d_in):
    """The weight `[d_out, d_in]` in float64, as its products show it."""
    layer.train()
    # where a gradient is wanted bitsandbytes takes no short cut
    eye = torch.eye(d_in, requires_grad=True)
    return (layer(eye) - layer(torch.zeros_like(eye))).detach().double().T


def rotation(R):
    """The block-diagonal rotation of BOFT with one factor."""
    blocks = []
    for block in R[0].double():
        S = (block - block.T) / 2
        eye = torch.eye(len(S), dtype=S.dtype)
        blocks.append((eye - S) @ torch.linalg.inv(eye + S))
    return torch.block_diag(*blocks)


def adapted(method, adapter, layer, x):
    """What the formula of the paper makes of an untouched layer's output, in float64."""
    p = {name: tensor.double() for name, tensor in adapter.state_dict().items()}
    bias = 0.0 if layer.bias is None else layer.bias.detach().double()
    wide = x.detach().double()
    y = layer(x).detach().double()
    if method.startswith("miss"):
        W, D = weight_of(layer, x.shape[-1]), p["miss_block"]  # [1, 64, 64]
        shards = [(part @ D[0] + D[0]) for part in W.split(64, 1)]
        return y + wide @ torch.cat(shards, 1).T
    if method.startswith("oft"):
        i, j = torch.triu_indices(32, 32, 1)
        R = p["oft_R"].new_zeros(1, len(p["oft_R"]), 32, 32)
        R[0, :, i, j] = 2 * p["oft_R"]
        turned = (wide @ rotation(R)).to(x.dtype)
        return layer(turned.requires_grad_()).detach().double()
    if method == "boft":
        turned = (wide @ rotation(p["boft_R"])).to(x.dtype)
        y = layer(turned.requires_grad_()).detach().double()
        return p["boft_s"].squeeze(-1) * (y - bias) + bias
    if method == "double_seq_bn":
        inner = y @ p["adapter_down.0.weight"].T + p["adapter_down.0.bias"]
        inner = nn.functional.silu(inner)
        return y + inner @ p["adapter_up.weight"].T + p["adapter_up.bias"]
    delta = adapter.scaling * p["lora_B"] @ p["lora_A"]
    y = y + wide @ delta.T
    if method == "dora":
        norm = (weight_of(layer, x.shape[-1]) + delta).norm(dim=-1)
        y = p["m"] / norm * (y - bias) + bias
    return y


# --- where adapters sit ---


@EACH
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_the_anatomy_is_that_of_the_plain_model(scheme, family, load, saved):
    model = load(scheme, family)
    assert any(map(quantized.is_quantized, model.modules()))
    found, plain = find(model.base_model), find(AutoModel.from_pretrained(saved(family)))
    if scheme.startswith("hqq"):
        # its biases are no parameters
        found, plain = (dataclasses.replace(each, biases=()) for each in (found, plain))
    assert found == plain


def test_a_layer_that_turns_into_a_plain_linear_one_is_read_as_such(load, saved):
    plain = find(AutoModel.from_pretrained(saved("gpt2")))
    packed = find(load(FOUR_BITS, "gpt2").base_model)
    sites = [[s for block in found.blocks for s in block.sites] for found in (plain, packed)]
    for site, now in zip(*sites, strict=True):
        assert (site.transposed, now.transposed) == (True, False)
        assert dataclasses.replace(site, transposed=False) == now


def test_blocks_whose_packed_weights_look_alike_keep_their_widths(load):
    model = load(FOUR_BITS).base_model
    bnb = pytest.importorskip("bitsandbytes")
    for name in ("up_proj", "gate_proj"):
        layer = bnb.nn.Linear4bit(32, 128, bias=False).to("cpu")
        grown = bnb.nn.Linear4bit(64, 64, bias=False).to("cpu")
        old = getattr(model.layers[0].mlp, name)
        assert layer.weight.shape == grown.weight.shape != old.weight.shape
        setattr(model.layers[0].mlp, name, layer)
        setattr(model.layers[1].mlp, name, grown)
    sites = [s for b in find(model).blocks for s in b.sites if s.role == "mlp_in"]
    assert [(s.path, s.d_in, s.d_out) for s in sites] == [
        ("layers.0.mlp.up_proj", 32, 128),
        ("layers.1.mlp.up_proj", 64, 64),
    ]


# --- what they compute ---


@EACH
@pytest.mark.parametrize(
    "method", [*METHODS, "oft[use_cayley_neumann=False]", "miss[init_weights='bat']"]
)
def test_the_output_is_the_layers_own_with_the_change(method, scheme, load):
    # its layers have biases
    model = load(scheme, "bert")
    # the library's own layers, without adapters
    base = load(scheme, "bert").base_model
    model.add_adapter("a", method)
    model.train_adapter("a")
    stir(model, "a", std=0.3)
    places = list(model.adapter_modules("a"))
    assert len(places) == 4
    for path, module in places:
        layer, plain = model.base_model.get_submodule(path), base.get_submodule(path).train()
        x = torch.randn(2, 3, layer.in_features, requires_grad=True)
        y = layer(x)
        expected = adapted(method, module, plain, x)
        assert y.dtype == x.dtype
        torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
        assert (expected - plain(x).double()).abs().max() > 0.05


@EACH
def test_a_fresh_magnitude_is_the_norm_of_the_dequantized_row(scheme, load):
    model, base = load(scheme, "bert"), load(scheme, "bert").base_model
    model.add_adapter("a", "dora")
    for path, module in model.adapter_modules("a"):
        layer = base.get_submodule(path)
        norm = weight_of(layer, layer.in_features).norm(dim=-1)
        torch.testing.assert_close(module.m.double(), norm, rtol=1e-6, atol=0)
    model.train()
    before = run(model)
    model.set_active_adapters("a")
    torch.testing.assert_close(run(model), before, rtol=1e-5, atol=1e-5)


def test_fused_layers_are_read_once_a_call(load, monkeypatch):
    model = load(FOUR_BITS, "gpt2")
    model.add_adapter("a", "dora[attn_matrices=['q','k','v']]")
    model.add_adapter("b", "dora[attn_matrices=['q','k','v']]")
    model.set_active_adapters(["a", "b"])
    reads = []
    read = quantized.FourBit.read
    monkeypatch.setattr(
        quantized.FourBit, "read", lambda self, *args: reads.append(1) or read(self, *args)
    )
    for count in (2, 4):
        run(model)
        # two blocks; nothing is kept for the next forward
        assert len(reads) == count
    attributes = [value for module in model.modules() for value in vars(module).values()]
    assert not any(isinstance(value, Tensor) for value in attributes)


def test_quantized_in_place_by_torchao(saved):
    torchao = pytest.importorskip("torchao.quantization")
    model = AutoAdapterModel.from_pretrained(saved("llama"))
    model.add_adapter("before", "dora")
    torchao.quantize_(model.base_model.layers, torchao.Int8WeightOnlyConfig())
    model.add_adapter("after", "dora")
    for name in ("before", "after"):
        model.train_adapter(name)
        own = {n: p for n, p in model.named_parameters() if p.requires_grad}
        assert set(own) == set(gradients(model))
        assert set(own) == {n for n, _ in model.named_parameters() if of_adapter(n, name)}
        assert {(p.dtype, type(p)) for p in own.values()} == {(torch.float32, nn.Parameter)}


@pytest.mark.parametrize("forwards", [0, 1])
@pytest.mark.parametrize("method", METHODS)
def test_adapters_are_born_in_the_models_dtype(method, forwards, load):
    """Not in that of the bytes, nor in that to which bitsandbytes casts biases as it runs."""
    config = four_bits("nf4", bnb_4bit_compute_dtype=torch.float32)
    model = load(config, "bert", dtype=torch.bfloat16)
    model.train()
    for _ in range(forwards):
        run(model)
    query = model.base_model.encoder.layer[0].attention.self.query
    assert query.bias.dtype is (torch.float32 if forwards else torch.bfloat16)
    model.add_adapter("a", method)
    model.train_adapter("a")
    dtypes = {n: p.dtype for _, m in model.adapter_modules("a") for n, p in m.named_parameters()}
    # magnitudes are wider than their layer, quantized or not
    assert dtypes.pop("m", torch.float32) is torch.float32
    assert set(dtypes.values()) == {torch.bfloat16}
    assert run(model).dtype is torch.bfloat16
    assert gradients(model)


def test_bytes_stored_as_floats_are_no_weight(load):
    """FSDP wants one dtype for all parameters, so that bitsandbytes disguises its bytes."""
    plain = load(four_bits("nf4"))
    disguised = load(four_bits("nf4", bnb_4bit_quant_storage=torch.bfloat16))
    path = "layers.0.self_attn.q_proj"
    layers = [model.base_model.get_submodule(path) for model in (plain, disguised)]
    assert layers[1].weight.dtype is torch.bfloat16
    assert torch.equal(*map(matrix, layers))
    for model in (plain, disguised):
        model.add_adapter("a", "dora")
    bits_of = [adapter_bits(model, "a") for model in (plain, disguised)]
    assert bits_of[0].keys() == bits_of[1].keys()
    assert bits_of[0][f"{path}/m"] == bits_of[1][f"{path}/m"]
    assert plain.adapter_summary() == disguised.adapter_summary()


# --- layers that libraries make in their own way ---


class FixedScale(nn.Module):
    """Multiplies by a packed weight, its inputs rounded by a fixed scale; passes the gradient."""

    def __init__(self, scale=0.03):
        super().__init__()
        self.in_features, self.out_features, self.scale = 16, 8, scale
        self.register_buffer("qweight", torch.randint(-9, 9, (8, 16), dtype=torch.int8))

    def forward(self, x):
        if self.scale:
            x = x + ((x / self.scale).round() * self.scale - x).detach()
        return nn.functional.linear(x, self.qweight.to(x.dtype))


class Rounding(FixedScale):
    """The same by the largest input of each row, in a way that passes no gradient."""

    def forward(self, x):
        scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-5) / 127
        return nn.functional.linear((x / scale).round() * scale, self.qweight.to(x.dtype))


class Float8(nn.Linear):
    """Keeps its weight in float8, and a scale."""

    def __init__(self):
        super().__init__(16, 8)
        self.weight = nn.Parameter(self.weight.to(torch.float8_e4m3fn), requires_grad=False)
        self.weight_scale = nn.Parameter(torch.tensor(3.0))

    def forward(self, x):
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.weight_scale, self.bias)


def holding(layer):
    return adapterzoo.init(nn.Sequential(nn.Linear(4, 16), layer, nn.Linear(8, 2)))


def test_the_weight_of_any_layer_is_read_as_it_multiplies():
    for layer in (FixedScale(None), Rounding(), Float8()):
        assert quantized.is_quantized(layer)
        x = torch.randn(5, 16)
        bias = 0.0 if getattr(layer, "bias", None) is None else layer.bias
        expected = x @ matrix(layer).T + bias
        near = 0.02 if isinstance(layer, Rounding) else 1e-5
        torch.testing.assert_close(
            layer(x), expected, rtol=near, atol=near * expected.abs().max().item()
        )
        model = holding(layer)
        model.add_adapter("a", "dora[target_modules=['1']]", set_active=True)
        norm = matrix(layer).norm(dim=-1)
        torch.testing.assert_close(model[1].loras["a"].m.flatten(), norm, rtol=1e-5, atol=0.0)
        model.delete_adapter("a")


def test_a_weight_behind_a_fixed_scale_is_refused():
    """The row of the identity is rounded to something else than 1."""
    model = holding(FixedScale())
    with pytest.raises(StateError, match=r"fixed scale .* Write LoRAConfig\(\)"):
        model.add_adapter("a", "dora[target_modules=['1']]")
    model.add_adapter("a", "lora[target_modules=['1']]")
    model.train_adapter("a")
    model(torch.randn(3, 4)).sum().backward()
    assert model[1].loras["a"].lora_B.grad.any()


def test_a_layer_that_passes_no_gradient_is_refused_when_it_is_trained(tmp_path):
    model = holding(Rounding())
    model.add_adapter("a", "lora[target_modules=['0']]", set_active=True)
    frozen = [p.requires_grad for p in model.parameters()]
    with pytest.raises(StateError, match="the Rounding at '1' is for inference: no gradient"):
        model.train_adapter("a")
    assert [p.requires_grad for p in model.parameters()] == frozen
    # it may run adapters that another base has trained
    model.save_adapter(tmp_path, "a")
    model.load_adapter(tmp_path, load_as="b", set_active=True)


def test_experts_in_float8_are_refused():
    experts = pytest.importorskip("transformers.integrations.finegrained_fp8").FP8Experts
    config = AutoConfig.for_model(
        "gpt_oss", **WIDTH, num_key_value_heads=2, head_dim=16, num_local_experts=2
    )
    model = AutoModel.from_config(config)
    for layer in model.layers:
        layer.mlp.experts = experts(config, block_size=(32, 32))
    model = adapterzoo.init(model)
    name = "layers.0.mlp.experts.gate_up_proj"
    with pytest.raises(StateError, match="'gate_up_proj' is not a floating-point matrix"):
        model.add_adapter("a", f"lora[target_parameters=['{name}']]")


class Rooted(abc.ABC):  # noqa: B024  of quanto: its objects have another layout
    pass


def test_a_layer_whose_first_base_is_no_module_swaps_its_class():
    class Layer(Rooted, nn.Linear):
        pass

    model = holding(Layer(16, 8))
    x = torch.randn(3, 4)
    before = model(x)
    model.add_adapter("a", "lora[target_modules=['1'],init_weights='bert']", set_active=True)
    assert isinstance(model[1], Layer)
    assert type(model[1]).__mro__.index(Layer) > type(model[1]).__mro__.index(Adapted)
    assert not torch.equal(model(x), before)
    model.delete_adapter("a")
    assert type(model[1]) is Layer
    assert torch.equal(model(x), before)


def test_a_forward_of_the_instance_that_calls_that_of_its_class_stays():
    """As compressed-tensors rounds the weight around the forward of the class."""

    def forward(self, x):
        return type(self).forward(self, x) + 1

    layer = nn.Linear(16, 8)
    layer.forward = types.MethodType(forward, layer)
    model, x = holding(layer), torch.randn(3, 4)
    before = model(x)
    model.add_adapter("a", "lora[target_modules=['1'],init_weights='bert']", set_active=True)
    assert not torch.equal(model(x), before)
    model.set_active_adapters(None)
    assert torch.equal(model(x), before)
    model.delete_adapter("a")
    assert layer.forward.__func__ is forward
    assert torch.equal(model(x), before)


# --- training ---


@EACH
@pytest.mark.parametrize("method", METHODS)
def test_training_changes_the_adapter_and_no_bit_of_the_base(method, scheme, load):
    model = load(scheme)
    model.add_adapter("other", method)
    model.add_adapter("a", method)
    # the packed weights as they are before any forward
    before, other = base_bits(model), adapter_bits(model, "other")
    model.train_adapter("a")
    stir(model, "a", std=0.05)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert set(trained) == {n for n, _ in model.named_parameters() if of_adapter(n, "a")}
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2)
    losses = []
    for _ in range(4):
        found = gradients(model)
        assert set(found) == set(trained)
        assert all(g.count_nonzero() for g in found.values())
        optimizer.step()
        losses.append(first_output(model(**inputs())).float().pow(2).mean().item())
    assert losses[-1] < losses[0]
    assert base_bits(model) == before
    assert adapter_bits(model, "other") == other


@EACH
def test_an_evaluation_in_between_changes_no_gradient(scheme, load):
    """On some CPUs the first forward without gradients reorders bitsandbytes' 4 bits for good."""
    model = load(scheme)
    model.add_adapter("a", "lora[init_weights='bert']")
    model.train_adapter("a")
    expected, before = gradients(model), base_bits(model)
    model.eval()
    run(model)
    model.train()
    found = gradients(model)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name
    assert base_bits(model) == before


@EACH
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_gives_the_same_gradients(scheme, reentrant, load):
    model = load(scheme)
    model.add_adapter("a", "dora[init_weights='bert']")
    model.train_adapter("a")
    expected = gradients(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    found = gradients(model)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-7, msg=name)


@EACH
def test_unfreezing_leaves_out_what_cannot_be_trained(scheme, load):
    model = load(scheme)
    model.freeze_model(False)
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                packed = quantized.packing_of(parameter) is not None
                trains = parameter.is_floating_point() and not packed
                assert parameter.requires_grad is trains, f"{path}.{name}"


@pytest.mark.parametrize("scheme", [FOUR_BITS, "bitsandbytes int8", "torchao int4"])
def test_the_trainer_trains_and_evaluates(scheme, load, tmp_path):
    model = load(scheme, "bert")
    model.add_adapter("a", "lora")
    model.add_classification_head("a", num_labels=2)
    model.train_adapter("a")
    rows = [{"input_ids": [3, 4 + i, 5], "labels": i % 2} for i in range(4)]
    arguments = TrainingArguments(
        str(tmp_path), max_steps=3, per_device_train_batch_size=2, eval_strategy="steps",
        eval_steps=1, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    before, fresh = base_bits(model.base_model), adapter_bits(model, "a")
    AdapterTrainer(model, arguments, train_dataset=rows, eval_dataset=rows).train()
    now = adapter_bits(model, "a")
    assert all(now[key] != value for key, value in fresh.items())
    assert base_bits(model.base_model) == before


def test_the_trainer_trains_as_qlora_does(saved, tmp_path):
    """Scales quantized too, activations computed again, and an optimizer with states in 8 bits."""
    config = four_bits("nf4", double=True)
    task = AutoModelForCausalLM
    model = adapterzoo.init(loaded_as(task, saved("llama"), config))
    model.add_adapter("a", "lora[r=64,target_modules='all-linear']")
    model.train_adapter("a")
    before, fresh = base_bits(model), adapter_bits(model, "a")
    rows = [{"input_ids": [3, 4 + i, 5], "labels": [3, 4 + i, 5]} for i in range(4)]
    arguments = TrainingArguments(
        str(tmp_path), max_steps=8, per_device_train_batch_size=4, learning_rate=1e-2,
        optim="adamw_8bit", logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True,
        use_cpu=True,
    )  # fmt: skip
    model.gradient_checkpointing_enable({"use_reentrant": False})
    trainer = AdapterTrainer(model, arguments, train_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] - 0.2
    assert base_bits(model) == before
    now = adapter_bits(model, "a")
    assert all(now[key] != value for key, value in fresh.items())
    # large enough for 8 bits
    states = [state["state1"] for state in trainer.optimizer.optimizer.state.values()]
    assert any(state.dtype is torch.uint8 for state in states)


# --- coming and going ---


@EACH
@pytest.mark.parametrize("method", METHODS)
def test_saved_loaded_copied_and_deleted(method, scheme, load, saved, tmp_path):
    model = load(scheme).train()
    before, plain = base_bits(model), run(model)
    classes = [type(module) for module in model.modules()]
    model.add_adapter("a", method, set_active=True)
    stir(model, "a")
    expected = run(model)
    assert not torch.equal(expected, plain)
    model.save_adapter(tmp_path, "a")
    # one file serves quantized and plain models
    for other in (load(scheme).train(), AutoAdapterModel.from_pretrained(saved("llama"))):
        other.load_adapter(tmp_path, set_active=True)
        assert adapter_bits(other, "a") == adapter_bits(model, "a")
        assert other.adapter_fingerprint("a") == model.adapter_fingerprint("a")
        packed = any(map(quantized.is_quantized, other.modules()))
        assert torch.equal(run(other), expected) == packed
    if scheme not in UNCOPIED:
        twin = copy.deepcopy(model)
        assert torch.equal(run(twin), expected)
        stir(twin, "a", seed=2)
        twin.train_adapter("a")
        assert gradients(twin)
        assert torch.equal(run(model), expected)
    model.delete_adapter("a")
    assert [type(module) for module in model.modules()] == classes
    assert base_bits(model) == before
    assert torch.equal(run(model), plain)
    assert scheme in UNCOPIED or twin.active_adapters is not None


@pytest.mark.parametrize("scheme", all_but(QUICK, [s for s in SCHEMES if s not in UNSAVED]))
@pytest.mark.parametrize("already", [False, True])
def test_a_whole_model_saved_with_adapters_is_quantized_when_loaded(
    already, scheme, load, saved, tmp_path
):
    model = load(scheme) if already else AutoAdapterModel.from_pretrained(saved("llama"))
    model.add_adapter("a", "dora", set_active=True)
    stir(model, "a")
    model.save_pretrained(tmp_path)
    settings = {} if already else {"quantization_config": SCHEMES[scheme].make()}
    loaded = AutoAdapterModel.from_pretrained(tmp_path, **settings)
    assert repr(loaded.active_adapters) == "Stack('a')"
    assert adapter_bits(loaded, "a") == adapter_bits(model, "a")
    for path, module in load(scheme).named_modules():
        was = quantized.is_quantized(module)
        assert quantized.is_quantized(loaded.get_submodule(path)) is was, path
    if already:
        assert torch.equal(run(loaded.train()), run(model.train()))


@EACH
def test_a_static_head_is_saved_without_the_base(scheme, saved, tmp_path):
    config = SCHEMES[scheme].make()
    task = AutoModelForSequenceClassification
    model = adapterzoo.init(loaded_as(task, saved("bert"), config, num_labels=3))
    assert not quantized.is_quantized(model.classifier)
    model.add_adapter("a", "lora")
    model.save_adapter(tmp_path, "a")
    tensors = native.load(tmp_path, "adapter").head
    shapes = {key: tuple(t.shape) for key, t in tensors.items()}
    assert shapes == {"classifier.weight": (3, 64), "classifier.bias": (3,)}


@pytest.mark.parametrize(
    "config",
    [
        lambda skipped: bnb(load_in_4bit=True, llm_int8_skip_modules=skipped),
        lambda skipped: QuantoConfig(weights="int8", modules_to_not_convert=skipped),
    ],
    ids=["bitsandbytes", "quanto"],
)
def test_a_quantized_head_cannot_be_trained(config, saved, tmp_path):
    """Only its bias would be."""
    if config(["none"]).quant_method == "quanto":
        pytest.importorskip("optimum.quanto")
    task = AutoModelForSequenceClassification
    # a head that is not in the file stays plain
    task.from_pretrained(saved("bert"), num_labels=3).save_pretrained(tmp_path)

    def made(skipped):
        return adapterzoo.init(loaded_as(task, tmp_path, config(skipped)))

    model = made(["none"])
    model.add_adapter("a", "lora")
    with pytest.raises(StateError) as caught:
        model.train_adapter("a")
    assert "modules_to_not_convert=['classifier']" in str(caught.value)
    model = made(["classifier"])
    model.add_adapter("a", "lora")
    model.train_adapter("a")
    own = model.get_submodule("classifier.adapters.a")
    assert all(p.requires_grad for p in own.parameters())


# --- merging ---


@EACH
def test_merging_is_refused_and_changes_nothing(scheme, load, saved, tmp_path):
    model = load(scheme).train()
    model.add_adapter("a", "dora", set_active=True)
    stir(model, "a")
    before, expected = base_bits(model), run(model)
    with pytest.raises(StateError) as caught:
        model.merge_adapter("a")
    text = str(caught.value)
    assert "merge_adapter('a'): the weights at 'layers.0.self_attn.q_proj' are quantized" in text
    assert ("Write model.dequantize() first" in text) is scheme.startswith("bitsandbytes")
    assert base_bits(model) == before
    assert (model._adapter_state.merged, model._adapter_state.originals) == ((), {})
    assert torch.equal(run(model), expected)
    if "dequantize" not in text:
        assert "Load the plain model, then write load_adapter(…) and merge_adapter(…)" in text
        model.save_adapter(tmp_path, "a")
        other = AutoAdapterModel.from_pretrained(saved("llama"))
        other.load_adapter(tmp_path)
        other.merge_adapter("a")


@pytest.mark.parametrize("evaluated", [False, True])
@pytest.mark.parametrize(
    ("scheme", "method"),
    [
        ("bitsandbytes nf4", "dora"),
        ("bitsandbytes nf4", "double_seq_bn"),
        ("bitsandbytes nf4, scales quantized", "lora"),
        ("bitsandbytes fp4", "boft"),
        ("bitsandbytes fp4", "oft"),
        ("bitsandbytes int8", "miss[init_weights='bat']"),
        ("bitsandbytes int8", "dora"),
    ],
)
def test_a_dequantized_model_keeps_its_adapters_and_merges(scheme, method, evaluated, load):
    def made():
        model = load(scheme, "bert")
        model.add_adapter("a", method)
        model.add_adapter("b", "lora")
        stir(model, "a")
        return model

    model = made()
    model.train_adapter("a")
    expected = run(model)
    if evaluated:
        # may put the packed weights into another order
        model = made()
        model.set_active_adapters("a")
        run(model)

    def state():
        trained = {n: p.requires_grad for n, p in model.named_parameters() if of_adapter(n)}
        modes = {path: m.training for path, m in model.named_modules()}
        return modes, trained, adapter_bits(model, "a"), adapter_bits(model, "b")

    before = state()
    assert model.dequantize() is model
    assert not any(map(quantized.is_quantized, model.modules()))
    assert state() == before
    near = 0.02 if evaluated else 1e-4
    torch.testing.assert_close(run(model), expected, rtol=0.0, atol=near)
    if method == "double_seq_bn":
        return
    active = run(model)
    model.merge_adapter("a")
    model.set_active_adapters(None)
    torch.testing.assert_close(run(model), active, rtol=1e-4, atol=1e-4)
    model.reset_adapter()


def test_where_transformers_cannot_dequantize_nothing_changes(load):
    model = load("torchao int8").train()
    model.add_adapter("a", "dora", set_active=True)
    stir(model, "a")
    expected, before = run(model), base_bits(model)
    with pytest.raises(NotImplementedError, match="no implementation of `dequantize`"):
        model.dequantize()
    assert torch.equal(run(model), expected)
    assert base_bits(model) == before


# --- the order for inference on CPUs ---


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16])
def test_another_order_of_the_packed_weight_is_read_alike(double, storage, load):
    """What the first forward without gradients does where the CPU computes in bfloat16."""
    functional = pytest.importorskip("bitsandbytes").functional
    model = load(four_bits("nf4", double, bnb_4bit_quant_storage=storage))
    # two blocks of scales to a row
    layer = model.base_model.get_submodule("layers.0.mlp.down_proj")
    plain = matrix(layer)
    x = torch.randn(2, 128, requires_grad=True)
    model.train()
    expected = layer(x).detach()
    packed = layer.weight
    packed.data, packed.quant_state = functional._convert_weight_packed_for_cpu(
        packed.data, packed.quant_state
    )
    state, data = packed.quant_state, packed.data.clone()
    # the scales have been rounded to bfloat16, the numbers have not
    torch.testing.assert_close(matrix(layer), plain, rtol=2**-8, atol=0.0)
    # reading has not changed it
    assert state.packing_format_for_cpu
    assert torch.equal(packed.data, data)
    assert state.absmax.dtype is torch.bfloat16
    model.add_adapter("a", "lora")
    model.train_adapter("a")
    assert not packed.quant_state.packing_format_for_cpu
    torch.testing.assert_close(matrix(layer), plain, rtol=2**-8, atol=0.0)
    torch.testing.assert_close(layer(x).detach(), expected, rtol=0.0, atol=0.05)
    layer(x).sum().backward()
    assert x.grad is not None


# --- looking at it ---


@EACH
def test_percentages_are_of_the_numbers_that_weights_stand_for(scheme, load, saved):
    plain, model = AutoAdapterModel.from_pretrained(saved("llama")), load(scheme)
    total = plain.num_parameters()
    for each in (plain, model):
        each.add_adapter("a", "lora")
    assert model.adapter_summary() == plain.adapter_summary()
    assert model.adapter_summary(as_dict=True)[-1]["#param"] == total


def test_plain_layers_need_no_library(tiny, monkeypatch):
    """Nor does a weight of a class that only bears the name of one."""
    for packing in quantized.PACKINGS.values():
        monkeypatch.setattr(type(packing), "read", lambda *_: pytest.fail("read"))

    class Params4bit(nn.Parameter):
        pass

    assert quantized.packing_of(Params4bit(torch.zeros(2, 2))) is None
    model = tiny("bert")
    model.add_adapter("a", "dora", set_active=True)
    assert not any(map(quantized.is_quantized, model.modules()))
    assert tiny_config("bert").hidden_size == run(model).shape[-1]


def test_a_layer_that_is_not_quantized_yet_is_a_plain_one():
    bnb = pytest.importorskip("bitsandbytes")
    for layer in (bnb.nn.Linear4bit(64, 32), bnb.nn.Linear8bitLt(64, 32, has_fp16_weights=False)):
        assert not quantized.is_quantized(layer)
        assert matrix(layer).shape == (32, 64)
        layer.to("cpu")
