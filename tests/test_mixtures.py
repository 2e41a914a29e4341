"""Experts in batches whose rows take different adapters, against each row alone."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from architectures.tiny_models import tiny_model
from families import first_output, tiny_config, tiny_inputs
from snapshots import stir
from swept import all_but
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import model_type_to_module_name
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from adapterzoo import (
    AdapterConfig,
    AdapterSetup,
    Average,
    BatchSplit,
    LoRAConfig,
    MultiTask,
    Parallel,
    Split,
    Stack,
    init,
)
from adapterzoo.anatomy import find
from adapterzoo.config import config_strings
from adapterzoo.errors import AdapterZooError, CompositionError
from adapterzoo.inject.adapted import Adapted

# the model types with experts of which `tiny_model` makes one
TYPES = (
    "afmoe", "aria", "aria_text", "axk1", "axk2", "bailing_hybrid", "beam", "cohere2_moe",
    "deepseek_ocr2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "dots1",
    "dots3_note", "dots3_note_text", "ernie4_5_moe", "exaone_moe", "flex_olmo", "glm4_moe",
    "glm4_moe_lite", "glm4v_moe", "glm4v_moe_text", "glm5_next", "glm5_next_text", "glm_moe_dsa",
    "gpt_oss", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared",
    "hunyuan_v1_moe", "hy_v3", "hy_v4", "hy_v4_vl", "hy_v4_vl_text", "inkling2", "inkling2_loop",
    "inkling2_loop_text", "inkling2_text", "inkling_mm_model", "inkling_text", "jamba", "jetmoe",
    "kimi_linear", "kolibri1", "laguna", "lara_mini", "lfm2_moe", "llama4_text", "longcat_flash",
    "mellum", "mimo_v2_flash", "minimax", "minimax_m2", "minimax_m3_vl", "minimax_m3_vl_text",
    "mistral4", "mistral_large4", "mistral_large4_text", "mixtral", "muse_spark",
    "muse_spark_text", "nemotron_h", "nllb-moe", "olmoe", "openai_privacy_filter", "phimoe",
    "qwen2_moe", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next",
    "qwen3_omni_moe_thinker", "qwen3_vl_moe", "qwen3_vl_moe_text", "qwen4_exp", "qwen4_exp_text",
    "solar_open", "switch_transformers", "unlimited_ocr", "zaya",
)  # fmt: skip
QUICK = ("mixtral", "qwen3_moe", "gpt_oss", "llama4_text", "jetmoe", "switch_transformers")
# models that compute in float32 whatever their parameters are
NARROW = ("inkling2", "inkling2_loop", "inkling2_loop_text", "inkling2_text")
# padding at the start makes NaN of the tokens of the base model, or needs tokens of images
UNPADDED = ("granitemoe_swa", "qwen3_omni_moe_thinker")
# several residual streams
STREAMS = ("qwen4_exp", "qwen4_exp_text")
ROUNDED = {**dict.fromkeys(NARROW, 1e-5), "openai_privacy_filter": 1e-6}

# "c" adapts some of the layers only, and "d" none of the experts
ADAPTERS = {
    "a": "lora[r=4,selfattn_lora=False,intermediate_lora=True,output_lora=True]",
    "b": "dora[r=4,selfattn_lora=False,intermediate_lora=True,output_lora=True]",
    "c": "lora[r=2,selfattn_lora=False,output_lora=True]",
    "d": "seq_bn",
}
NAMES = ("b", None, "a", "c", "d", "b")


def adapted(model: nn.Module, adapters: Any = None) -> Any:
    """Return the model with adapters of random values, in evaluation mode."""
    made: Any = init(model)
    dtype = next(made.parameters()).dtype
    for seed, (name, config) in enumerate((adapters or ADAPTERS).items()):
        made.add_adapter(name, config)
        stir(made, name, seed=seed + 1, std=0.2)
    return made.to(dtype).eval()


def tiny(model_type: str, adapters: Any = None) -> tuple[Any, dict[str, Any]]:
    """Return a tiny model with adapters, and inputs for rows, two of which begin with padding."""
    made = tiny_model(model_type)
    dtype = torch.float32 if model_type in NARROW else torch.float64
    rows: dict[str, Any] = {}
    source = torch.Generator().manual_seed(0)
    for name, value in made.inputs.items():
        given = value
        if isinstance(value, Tensor) and value.dim() and value.shape[0] == 1:
            given = value.repeat(len(NAMES), *(1 for _ in value.shape[1:]))
        if name in ("input_ids", "decoder_input_ids"):
            given = torch.randint(10, 60, given.shape, generator=source)
        is_wide = isinstance(given, Tensor) and given.is_floating_point()
        rows[name] = given.to(dtype) if is_wide else given
    if model_type not in UNPADDED:
        rows["attention_mask"] = mask = torch.ones_like(rows["input_ids"])
        mask[2, :3] = mask[5, :5] = 0
    given = adapters or ADAPTERS
    if model_type in STREAMS:
        given = {**given, "d": "lora[r=2]"}
    return adapted(made.model.to(dtype), given), rows


def row(inputs: dict[str, Any], number: int) -> dict[str, Any]:
    return {
        name: value[number : number + 1] if isinstance(value, Tensor) and value.dim() else value
        for name, value in inputs.items()
    }


def real(states: Tensor, mask: Tensor | None) -> Tensor:
    """The states of real tokens: a model may leave NaN at others."""
    if mask is None or states.shape[:2] != mask.shape:
        return states
    return states[mask.bool()]


def near(found: Tensor, expected: Tensor, bound: float = 1e-10) -> None:
    assert found.isfinite().all()
    assert (found - expected).abs().max() <= bound * expected.abs().max()


def check_rows(model: Any, inputs: Any, names: Any = NAMES, bound: float = 1e-10) -> None:
    """Each row of the mixed batch is that row alone, and differs from the base model's."""
    with torch.no_grad():
        found = first_output(model(**inputs, adapter_names=list(names)))
        for number, name in enumerate(names):
            own = row(inputs, number)
            mask = own.get("attention_mask")
            with AdapterSetup(name):
                expected = real(first_output(model(**own)), mask)
            with AdapterSetup(None):
                plain = real(first_output(model(**own)), mask)
            near(real(found[number : number + 1], mask), expected, bound)
            if name is not None:
                assert (expected - plain).abs().max() > 1e3 * bound * plain.abs().max()


def experts_of(model: Any, name: str) -> list[str]:
    places = model._adapter_state.records[name].places
    return [path for path, own in places.items() if any(p.site.is_routed for p in own)]


# --- every model type with experts ---


@pytest.mark.parametrize("model_type", all_but(QUICK, TYPES))
def test_rows_are_the_rows_alone(model_type):
    model, inputs = tiny(model_type)
    assert experts_of(model, "a")
    assert experts_of(model, "b")
    check_rows(model, inputs, bound=ROUNDED.get(model_type, 1e-10))


@pytest.mark.parametrize("model_type", all_but(QUICK, TYPES))
def test_gradients_are_the_sum_of_those_of_the_rows_alone(model_type):
    model, inputs = tiny(model_type)
    own = {n: p for n, p in model.named_parameters() if any(f".{a}." in n for a in ADAPTERS)}
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for parameter in own.values():
        parameter.requires_grad_(True)

    def loss(given: dict[str, Any], **options: Any) -> Tensor:
        states = first_output(model(**given, **options))
        return (real(states, given.get("attention_mask")) ** 2).sum()

    loss(inputs, adapter_names=list(NAMES)).backward()
    found = {name: p.grad for name, p in own.items()}
    model.zero_grad()
    for number, name in enumerate(NAMES):
        if name is not None:
            with AdapterSetup(name):
                loss(row(inputs, number)).backward()
    for name, parameter in own.items():
        expected = parameter.grad
        # no token has reached an expert that is a module of its own
        assert (found[name] is None) == (expected is None), name
        if expected is not None and expected.any():
            near(found[name], expected, 10 * ROUNDED.get(model_type, 1e-9))


def mentions_experts(model_type: str) -> bool:
    name = model_type_to_module_name(model_type)
    sources = (Path(transformers.__file__).parent / "models" / name).glob("modeling_*.py")
    return any("Experts" in source.read_text() for source in sources)


@pytest.mark.sweep(whole=True)
def test_no_model_type_with_experts_is_missing():
    missing = []
    for model_type in sorted({*MODEL_MAPPING_NAMES} - {*TYPES}):
        if not mentions_experts(model_type):
            continue
        try:
            config = AutoConfig.for_model(model_type)
            with torch.device("meta"):
                model = AutoModel.from_config(config)
            sites = [site for block in find(model).blocks for site in block.sites]
        except Exception:  # noqa: BLE001  those that cannot be built are no matter here
            continue
        if any(site.mixture for site in sites):
            missing.append(model_type)
    # `tiny_model` makes none of them, or one without experts
    assert missing == ["ernie4_5_vl_moe", "flint", "llama4", "step3p7"]


# --- every method ---


def with_parameters(text: str, *names: str) -> AdapterConfig | None:
    config = AdapterConfig.load(text)
    if "target_parameters" not in config.field_names():
        return None
    return config.replace(target_parameters=list(names))


def of_family(family: str, adapters: Any = None, auto: Any = AutoModel, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = tiny_config(family)
    config.update(changes)
    model = auto.from_config(config, experts_implementation="eager")
    return adapted(model.double(), adapters)


@pytest.mark.parametrize("text", config_strings)
def test_every_method_at_experts_and_routers(text):
    config = None
    try:
        if text != "union":
            config = with_parameters(text, "experts.gate_up_proj", "down_proj", "gate.weight")
        if config is None:
            pytest.skip("it takes no parameters")
        model = of_family("mixtral", {"x": config, "y": config, "l": "lora[r=2]"})
    except AdapterZooError as error:
        pytest.skip(str(error))
    assert len(experts_of(model, "x")) == 4
    check_rows(model, tiny_inputs("mixtral", batch=4), ["y", "x", None, "l"])


@pytest.mark.parametrize(
    "names", [["gate.weight"], ["gate.weight", "experts.down_proj"]], ids=["router", "both"]
)
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_routers(family, names):
    model = of_family(family, {n: LoRAConfig(target_parameters=names, r=2) for n in "ab"})
    inputs = tiny_inputs(family, batch=4)
    check_rows(model, inputs, ["b", "a", None, "a"])
    # their outputs are recorded once for each layer, in the order of the batch
    with torch.no_grad():
        mixed = model(**inputs, adapter_names=["b", "a", None, "a"], output_router_logits=True)
        assert len(mixed.router_logits) == 2
        with AdapterSetup("a"):
            alone = model(**row(inputs, 1), output_router_logits=True)
    tokens = inputs["input_ids"].shape[1]
    for found, expected in zip(mixed.router_logits, alone.router_logits, strict=True):
        near(found[tokens : 2 * tokens], expected)


def test_experts_of_dbrx_whose_parameters_another_module_reads():
    sizes = {"moe_num_experts": 4, "moe_top_k": 2, "ffn_hidden_size": 16, "hidden_size": 32}
    config = AutoConfig.for_model(
        "dbrx", d_model=32, n_heads=4, n_layers=2, max_seq_len=64, vocab_size=99,
        attn_config={"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}, ffn_config=sizes,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModel.from_config(config).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    lora = LoRAConfig(target_parameters=["mlp.w1", "mlp.w2"], r=2)
    model = adapted(model, {"a": lora, "b": lora, "c": LoRAConfig(target_modules=["out_proj"])})
    inputs = tiny_inputs("llama", batch=4)
    check_rows(model, inputs, ["b", "c", None, "a"])


# --- compositions, and other features of a call ---


def test_compositions():
    model, inputs = tiny("mixtral")
    average = Average("a", "b", weights=[0.3, 0.7])
    names = [Stack("a", "c"), "a", average, None, Stack("d", "b"), Stack("a", "c")]
    check_rows(model, inputs, names)


def test_a_stream_that_is_read_outside_of_the_experts():
    """Llama 4: the module whose calls are divided has an adapter that reads the block's input."""
    model, inputs = tiny("llama4_text", {**ADAPTERS, "p": "par_bn", "q": "pfeiffer"})
    check_rows(model, inputs, [Stack("p", "a"), "a", Stack("q", "b"), "p", None, Stack("b", "p")])


def test_one_setup_for_all_outputs_of_a_batch_and_parts_of_it():
    model, inputs = tiny("mixtral")
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    with torch.no_grad():
        expected = []
        for name in ("a", "b"):
            model.set_active_adapters(name)
            expected.append(first_output(model(input_ids=ids, attention_mask=mask)))
        model.set_active_adapters(Parallel("a", "b"))
        near(real(first_output(model(input_ids=ids, attention_mask=mask)), mask.repeat(2, 1)),
             real(torch.cat(expected), mask.repeat(2, 1)))  # fmt: skip
        model.set_active_adapters(BatchSplit("a", "b", batch_sizes=[2, 4]))
        joined = torch.cat([expected[0][:2], expected[1][2:]])
        found = first_output(model(input_ids=ids, attention_mask=mask))
        near(real(found, mask), real(joined, mask))
        # a copy has its own adapters
        other = copy.deepcopy(model)
        stir(model, "a", seed=9)
        assert torch.equal(first_output(other(input_ids=ids, attention_mask=mask)), found)


def test_adapters_without_rows_get_zeros():
    model, inputs = tiny("mixtral")
    model.train_adapter(MultiTask("a", "b"))
    own = {n: p for n, p in model.named_parameters() if ".experts." in n and ".b." in n}
    assert own
    first_output(model(**inputs, task_ids=[0] * len(NAMES))).sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in own.values())
    first_output(model(**inputs, task_ids=[0, 1] * 3)).sum().backward()
    assert any(p.grad.any() for p in own.values())


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant):
    gradients = []
    for checkpointing in (False, True):
        model, inputs = tiny("mixtral")
        model.train_adapter("a")
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        model.train()
        first_output(model(**inputs, adapter_names=list(NAMES))).sum().backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    plain, again = gradients
    assert plain.keys() == again.keys()
    for name, expected in plain.items():
        near(again[name], expected, 1e-9)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_generated_tokens_are_those_of_each_alone(family):
    model = of_family(family, auto=AutoModelForCausalLM)
    ids = torch.randint(10, 90, (6, 7), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[1, :3] = mask[3, :2] = 0
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    found = model.generate(ids, attention_mask=mask, adapter_names=list(NAMES), **options)
    for number, name in enumerate(NAMES):
        with AdapterSetup(name):
            own = slice(number, number + 1)
            expected = model.generate(ids[own], attention_mask=mask[own], **options)
        assert found[number].tolist() == expected[0].tolist()
    beams = model.generate(
        ids, attention_mask=mask, adapter_names=list(NAMES), num_beams=3, **options
    )
    with AdapterSetup("b"):
        expected = model.generate(ids[5:], attention_mask=mask[5:], num_beams=3, **options)
    assert beams[5].tolist() == expected[0].tolist()


@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
def test_other_implementations_of_experts(implementation):
    torch.manual_seed(0)
    model = AutoModel.from_config(
        tiny_config("mixtral"), experts_implementation=implementation
    ).float()
    check_rows(adapted(model), tiny_inputs("mixtral", batch=6), bound=1e-5)


# --- what stays refused ---


def test_experts_whose_rows_no_module_knows():
    model, inputs = tiny("jetmoe", {"a": "lora[r=2]", "b": "lora[r=2]"})
    message = r"'a' adapts '.*self_attention\.experts.*the row of a token is unknown"
    with pytest.raises(CompositionError, match=message):
        model(**inputs, adapter_names=["a", "b", *[None] * 4])
    with AdapterSetup("a"):
        model(**inputs)


def test_parts_of_a_sequence():
    model, _ = tiny("mixtral")
    with pytest.raises(CompositionError, match=r"the place of a token is unknown"):
        model.set_active_adapters(Split("a", "b", splits=[8, 8]))


@pytest.mark.parametrize("model_type", ["llama4_text", "jetmoe"])
def test_outputs_of_routers_that_run_once_for_each_adapter(model_type):
    model, inputs = tiny(model_type)
    names = list(NAMES)
    with pytest.raises(CompositionError, match=r"output_router_logits=False, or activate one"):
        model(**inputs, adapter_names=names, output_router_logits=True)
    model(**inputs, adapter_names=names, output_router_logits=False)
    model(**inputs, adapter_names=["a"] * 6, output_router_logits=True)


def test_an_adapter_in_a_divided_block_that_reads_the_call():
    reads = LoRAConfig(target_modules=["shared_expert.up_proj"], alora_invocation_tokens=[20], r=2)
    model, inputs = tiny("llama4_text", {**ADAPTERS, "r": reads})
    with pytest.raises(CompositionError, match=r"'layers\.0\.feed_forward'.* reads the call"):
        model(**inputs, adapter_names=["a", "r", "b", None, "a", "r"])
    model(**inputs, adapter_names=["r", "d", "r", None, "d", "r"])


def test_a_block_that_is_called_alone_does_not_know_the_rows():
    model, _ = tiny("mixtral")
    model.set_active_adapters(BatchSplit("a", "b", batch_sizes=[3, 3]))
    with pytest.raises(CompositionError, match=r"'layers\.0\.mlp\.experts', which has experts"):
        model.layers[0].mlp.experts(
            torch.randn(12, 64).double(), torch.zeros(12, 2).long(), torch.ones(12, 2).double()
        )


class Chosen(nn.Module):
    """A mixture that is called with some of the tokens, as that of Ernie's images."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden_states: Tensor) -> Tensor:
        tokens = hidden_states.flatten(0, 1)
        # every second token of two rows is as many as one row has
        return self.inner(tokens[::2]).repeat_interleave(2, 0).view_as(hidden_states)


class Flat(nn.Module):
    """A mixture that takes tokens without their rows."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.gate, self.experts = inner.gate, inner.experts

    def forward(self, hidden_states: Tensor) -> Tensor:
        _, weights, index = self.gate(hidden_states)
        return self.experts(hidden_states, index, weights)


def test_experts_that_get_some_of_the_tokens():
    torch.manual_seed(0)
    model = AutoModel.from_config(tiny_config("mixtral"), experts_implementation="eager").double()
    for layer in model.layers:
        layer.mlp = Chosen(Flat(layer.mlp))
    model = adapted(model)
    inputs = tiny_inputs("mixtral", batch=2, tokens=8)
    with pytest.raises(CompositionError, match=r"gets some tokens of an input \[8, 32\]"):
        model(**inputs, adapter_names=["a", "b"])
    model(**inputs, adapter_names=["a", "a"])


# --- what is left behind ---


def test_deleted_adapters_leave_the_classes_of_all_modules():
    torch.manual_seed(0)
    plain = AutoModel.from_config(tiny_config("mixtral"))
    before = {path: type(module) for path, module in plain.named_modules()}
    model = adapted(plain)
    assert isinstance(model.layers[0].mlp, Adapted)
    for name in ADAPTERS:
        model.delete_adapter(name)
    assert {path: type(m) for path, m in model.named_modules() if path} == {
        path: cls for path, cls in before.items() if path
    }
