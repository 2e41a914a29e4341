"""Arguments of `adapterzoo.peft`: dtypes as PEFT has them, and wrong ones that change nothing."""

from __future__ import annotations

import json
from typing import Any

import peft
import pytest
import torch
import transformers
from families import tiny_config
from peft_world import QUIET, ours, plain

import adapterzoo.peft
from adapterzoo import AdapterConfig, ConfigUnion, LoRAConfig
from adapterzoo.errors import CheckpointError, ConfigError, StateError
from adapterzoo.loraplus import create_loraplus_optimizer
from adapterzoo.model.conversion import random_inputs

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]
HALF, WIDE = torch.bfloat16, torch.float32
INPUTS = {"input_ids": torch.tensor([[1, 2, 3, 4]])}

# --- dtypes ---

LAYERS = {"target_modules": ["q_proj"], "r": 4}
FIELDS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("LoraConfig", LAYERS),
    "dora": ("LoraConfig", {**LAYERS, "use_dora": True}),
    "beside": (
        "LoraConfig",
        {**LAYERS, "modules_to_save": ["norm"], "trainable_token_indices": [1, 2]},
    ),
    "norms": ("LNTuningConfig", {"target_modules": ["norm"]}),
    "ia3": ("IA3Config", {"target_modules": ["k_proj"], "feedforward_modules": ["k_proj"]}),
    "vera": ("VeraConfig", LAYERS),
    "oft": ("OFTConfig", {"target_modules": ["q_proj"], "oft_block_size": 4, "r": 0}),
    "loha": ("LoHaConfig", LAYERS),
}


def half() -> Any:
    return plain("llama").to(HALF)


def dtypes(model: Any) -> list[str]:
    """Sizes and dtypes of what is trained, which both libraries name differently."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return sorted(f"{p.numel()} {p.dtype}" for p in trained)


def base_dtypes(model: Any) -> set[torch.dtype]:
    return {p.dtype for p in model.parameters() if not p.requires_grad}


@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize("case", FIELDS)
@pytest.mark.filterwarnings("ignore:Unsupported layer type")
def test_new_and_loaded_adapters_have_the_dtypes_of_peft(case, on, tmp_path):
    name, fields = FIELDS[case]

    def made(library: Any, **options: Any) -> Any:
        config = getattr(library, name)(**fields)
        return library.get_peft_model(half(), config, **options)

    theirs = made(peft, autocast_adapter_dtype=on)
    model = made(adapterzoo.peft, autocast_adapter_dtype=on)
    # DoRA's magnitudes are always in float32 here
    if case != "dora" or on:
        assert dtypes(model) == dtypes(theirs)
    assert base_dtypes(model) == {HALF}
    if on:
        assert dtypes(made(adapterzoo.peft)) == dtypes(model)
        model.add_adapter("b", getattr(adapterzoo.peft, name)(**fields))
        model.set_adapter("b")
        assert dtypes(model) == dtypes(theirs)
    theirs.save_pretrained(tmp_path / "theirs")
    made(adapterzoo.peft, autocast_adapter_dtype=False).save_pretrained(tmp_path / "ours")
    for folder in ("theirs", "ours"):
        read = [
            library.PeftModel.from_pretrained(half(), tmp_path / folder, is_trainable=True)
            for library in (peft, adapterzoo.peft)
        ]
        assert dtypes(read[1]) == dtypes(read[0])
        assert read[1](**INPUTS).logits.dtype is HALF
    # the native format keeps them
    read[1].save_adapter(tmp_path / "native", "default")
    again = ours("llama").to(HALF)
    again.load_adapter(tmp_path / "native", load_as="default", is_trainable=True)
    assert again.get_adapter("default")
    for (_, a), (_, b) in zip(
        again.adapter_modules("default"), read[1].adapter_modules("default"), strict=True
    ):
        assert [t.dtype for t in a.state_dict().values()] == [
            t.dtype for t in b.state_dict().values()
        ]


def test_every_member_of_a_union_is_converted_and_a_dtype_is_kept():
    members = LoRAConfig(r=2), AdapterConfig.load("seq_bn"), LoRAConfig(r=3, dtype="bfloat16")
    model = adapterzoo.peft.get_peft_model(half(), ConfigUnion(*members))
    found = {m["dtype"] for m in model.adapters_config["default"].members}
    assert found == {"float32", "bfloat16"}
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {WIDE, HALF}
    model = adapterzoo.peft.get_peft_model(half(), LoRAConfig(dtype="bfloat16"))
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {HALF}
    model = adapterzoo.peft.get_peft_model(half(), ConfigUnion(*members[:2]))
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {WIDE}
    # a table in float32 does not make the model one in full precision
    base = half()
    base.get_input_embeddings().float()
    model = adapterzoo.peft.get_peft_model(base, LoRAConfig())
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {WIDE}


def test_a_slot_takes_values_of_a_narrower_dtype(tmp_path):
    model = adapterzoo.peft.get_peft_model(half(), LoRAConfig(), autocast_adapter_dtype=False)
    for _, module in model.adapter_modules("default"):
        torch.nn.init.normal_(module.lora_B)
    model.save_pretrained(tmp_path)
    other = adapterzoo.peft.get_peft_model(half(), LoRAConfig())
    other.load_adapter(tmp_path, "default", hotswap=True)
    pairs = zip(other.adapter_modules("default"), model.adapter_modules("default"), strict=True)
    for (_, a), (_, b) in pairs:
        assert a.lora_B.dtype is WIDE
        assert torch.equal(a.lora_B, b.lora_B.float())


# --- one argument under two names ---


@pytest.fixture
def two() -> Any:
    model = ours("llama")
    for name in ("a", "b"):
        model.add_adapter(name, "lora[r=2,init_weights='bert']")
    return model


def test_two_names_of_an_argument_must_not_differ(two, tmp_path):
    config = adapterzoo.peft.LoraConfig(r=2)
    two.save_adapter(tmp_path, "a")
    for call, message in {
        lambda: two.delete_adapter(adapter_name="a", adapter_names=["b"]): "adapter_names=['b']",
        lambda: two.merge_adapter(name="a", adapter_names=["b"]): "adapter_names=['b']",
        lambda: two.load_adapter(tmp_path, load_as="x", adapter_name="y"): "adapter_name='y'",
        lambda: two.add_adapter("x", config="lora", peft_config=config): "peft_config=",
        lambda: two.add_adapter(config, adapter_config=peft.LoraConfig(r=3)): "config=",
        lambda: two.add_adapter(config, "x", adapter_name="y"): "name='x'",
    }.items():
        with pytest.raises(ConfigError) as raised:
            call()
        assert "mean the same thing and differ. Write only " + message in str(raised.value)
        assert [*two.adapters_config] == ["a", "b"]
        assert not two._adapter_state.merged
    assert two.load_adapter(tmp_path, load_as="x", adapter_name="x") == "x"
    two.delete_adapter(adapter_name="x", adapter_names="x")


# --- all or nothing ---


def test_a_refused_activation_leaves_gradients_as_they_are():
    model = adapterzoo.peft.get_peft_model(plain("llama"), LoRAConfig(r=2))
    model.add_adapter("b", LoRAConfig(r=2))
    model.add_adapter("c", adapterzoo.peft.LoraConfig(r=2, inference_mode=True))
    model.merge_adapter("b")
    before = {n: p.requires_grad for n, p in model.named_parameters()}
    with pytest.raises(StateError, match=r"set_adapter\(.*'b' is merged"):
        model.set_adapter(["c", "b"])
    assert {n: p.requires_grad for n, p in model.named_parameters()} == before
    assert model.active_adapter == "default"
    # one that was frozen is trained when it is set
    model.set_adapter("c")
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert trained
    assert all(".loras.c." in name for name in trained)


def test_adapters_are_saved_all_or_none(tmp_path):
    model = adapterzoo.peft.get_peft_model(plain("llama"), LoRAConfig(r=2))
    model.add_adapter("z", "seq_bn")
    with pytest.raises(CheckpointError, match="not a method of PEFT"):
        model.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    # another adapter does not matter
    assert model.active_peft_config.r == 2
    model.save_pretrained(tmp_path / "out", selected_adapters=["default"])
    model.save_pretrained(tmp_path / "out", format="native")
    assert (tmp_path / "out" / "z" / "adapter.safetensors").is_file()


# --- wrong types ---

WRONG: list[Any] = [
    {"target_modules": {1}},
    # the order of a set differs from process to process
    pytest.param({"target_modules": {1, "q_proj"}}, id="a set"),
    {"target_modules": 5},
    {"target_modules": "("},
    {"exclude_modules": 5},
    {"exclude_modules": "("},
    {"modules_to_save": [["norm"]]},
    {"modules_to_save": 5},
    {"modules_to_save": "("},
    {"rank_pattern": {1: 2}},
    {"rank_pattern": 5},
    {"alpha_pattern": [1]},
    {"trainable_token_indices": {1: [2]}},
    {"task_type": ["CAUSAL_LM"]},
    {"task_type": {}},
    {"inference_mode": "yes"},
]


@pytest.mark.parametrize("fields", WRONG, ids=str)
def test_wrong_types_in_a_config_are_refused_by_name(fields):
    model = plain("llama")
    (name, value), *_ = fields.items()
    with pytest.raises(ConfigError) as raised:
        adapterzoo.peft.get_peft_model(model, adapterzoo.peft.LoraConfig(r=2, **fields))
    assert f"{name}={value!r}" in str(raised.value)
    assert "Write " in str(raised.value) or "legal are" in str(raised.value)
    assert type(model) is transformers.LlamaForCausalLM


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"ephemeral_gpu_offload": True}, "ephemeral_gpu_offload=True.*Leave it out"),
        ({"dtype": "float32"}, r"dtype='float32' is not a dtype\. Write dtype=torch.float32"),
    ],
    ids=str,
)
def test_wrong_arguments_for_loading_are_refused(wrong, message, tmp_path):
    adapterzoo.peft.get_peft_model(plain("llama"), LoRAConfig(r=2)).save_pretrained(tmp_path)
    model = plain("llama")
    with pytest.raises((ConfigError, TypeError), match=message):
        adapterzoo.peft.PeftModel.from_pretrained(model, tmp_path, **wrong)
    assert type(model) is transformers.LlamaForCausalLM


def test_arguments_of_peft_that_change_no_result_are_taken(tmp_path):
    adapterzoo.peft.get_peft_model(plain("llama"), LoRAConfig(r=2)).save_pretrained(tmp_path)
    adapterzoo.peft.PeftModel.from_pretrained(
        plain("llama"), tmp_path, torch_device="cpu", ephemeral_gpu_offload=False,
        low_cpu_mem_usage=True, key_mapping=None, config=None, max_memory={},
    )  # fmt: skip


@pytest.mark.parametrize(
    "name", ["logging", "Trainer", "pipeline", "LlamaConfig", "PreTrainedModel", "__class__", 5]
)
def test_a_base_model_must_be_a_model_of_transformers(name, tmp_path):
    base = transformers.LlamaForCausalLM(tiny_config("llama"))
    base.config._name_or_path = str(tmp_path / "base")
    adapterzoo.peft.get_peft_model(base, LoRAConfig(r=2)).save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    mapping = {"auto_mapping": {"base_model_class": name}, "task_type": None}
    file.write_text(json.dumps(json.loads(file.read_text()) | mapping))
    with pytest.raises(ConfigError, match=r"names .* not a model of trans"):
        adapterzoo.peft.AutoPeftModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("rate", ["x", None, [1], -1.0, float("nan"), True])
def test_a_learning_rate_is_a_number(two, rate):
    two.train_adapter("a")
    for name in ("lr", "loraplus_weight_decay"):
        with pytest.raises(ConfigError, match=f"{name} is a number from 0.0"):
            create_loraplus_optimizer(
                two, torch.optim.AdamW, loraplus_lr_ratio=16, **{"lr": 1e-3, name: rate}
            )


# --- values that are not finite ---


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora", "corda"])
def test_weights_that_are_not_finite_give_no_initial_values(init, value):
    model = ours("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight[0, 0] = value
    data = {"init_data": [INPUTS]} if init == "corda" else {}
    # torch refuses to decompose most of them itself
    with pytest.raises((ConfigError, torch.linalg.LinAlgError), match="finite"):
        model.add_adapter("a", LoRAConfig(r=2, init_weights=init), **data)
    assert not model.has_adapters()


def test_a_file_that_needs_the_weight_names_the_layer(tmp_path):
    theirs = peft.get_peft_model(plain("llama"), peft.LoraConfig(r=2, init_lora_weights="pissa"))
    theirs.save_pretrained(tmp_path)
    model = ours("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight[0, 0] = float("nan")
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.q_proj.*non-finite"):
        model.load_adapter(tmp_path)


def test_components_without_variance_cannot_be_whitened():
    model = ours("llama")
    # all tokens are the same, so that their inputs vary nowhere
    data = [{"input_ids": torch.full((2, 8), 5)}]
    config = LoRAConfig(r=2, init_weights="eva", init_options={"whiten": True, "rho": 1.0})
    with pytest.raises(ConfigError, match=r"at 'layers\.0.*only \d of 2 components.*'whiten': Fal"):
        model.add_adapter("a", config, init_data=data)
    model.add_adapter("a", config.replace(init_options={"rho": 1.0}), init_data=data)
    assert all(p.isfinite().all() for p in model.parameters())


# --- devices ---


def test_random_inputs_do_not_depend_on_the_default_device():
    expected = random_inputs(ours("llama"))
    images = random_inputs(ours("vit"))
    torch.set_default_device("meta")
    try:
        found, others = random_inputs(ours("llama")), random_inputs(ours("vit"))
    finally:
        torch.set_default_device(None)
    assert torch.equal(found["input_ids"], expected["input_ids"])
    assert torch.equal(others["pixel_values"], images["pixel_values"])


@pytest.mark.filterwarnings("ignore:.*was active")
def test_the_first_of_the_others_is_active_when_the_active_adapter_is_deleted() -> None:
    for library in (peft, adapterzoo.peft):
        config = library.LoraConfig(**LAYERS)
        model = library.get_peft_model(plain("llama"), config, adapter_name="three")
        for name in ("two", "one"):
            model.add_adapter(name, config)
        model.set_adapter("two")
        model.delete_adapter("two")
        assert model.active_adapter == "one"
        trained = [name for name, p in model.named_parameters() if p.requires_grad]
        assert trained
        assert all(".one." in name for name in trained)
