"""LoftQ: initial values of LoRA from the weights before quantization, beside PEFT."""

from __future__ import annotations

import contextlib
import functools

import peft
import peft_world
import pytest
import safetensors.torch
import torch
from families import VOCABULARY
from snapshots import refused
from torch.overrides import TorchFunctionMode
from transformers import (
    BitsAndBytesConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    TorchAoConfig,
)

import adapterzoo
from adapterzoo import LoRAConfig
from adapterzoo import peft as names_of_peft
from adapterzoo.errors import ConfigError, StateError

pytest.importorskip("bitsandbytes")
pytestmark = [pytest.mark.filterwarnings(each) for each in peft_world.QUIET]
TARGETS = {"llama": ["q_proj", "down_proj"], "gpt2": ["c_attn", "c_proj"]}
CLASSES = {"llama": LlamaForCausalLM, "gpt2": GPT2LMHeadModel}
# blocks of 64 numbers have one scale
CONFIGS = {
    "llama": LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, pad_token_id=0,
    ),
    "gpt2": GPT2Config(vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=4, n_positions=32),
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a plain model of a family."""

    @functools.cache
    def folder(family="llama"):
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(3)
            model = CLASSES[family](CONFIGS[family])
            for parameter in model.parameters():
                if parameter.dim() == 2:
                    torch.nn.init.normal_(parameter, std=0.2)
        path = tmp_path_factory.mktemp(family)
        model.save_pretrained(path)
        return path

    return folder


def four_bits():
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")


def base(folder, family="llama", quantization=None):
    settings = quantization or four_bits()
    model = CLASSES[family].from_pretrained(folder, quantization_config=settings).eval()
    for module in model.modules():
        # some processors would have their own kernel, with less precision
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model


def ours(folder, family="llama", data=None, quantization=None, **fields):
    model = adapterzoo.init(base(folder, family, quantization))
    fields = {"r": 4, "alpha": 4, "target_modules": TARGETS[family], "init_weights": "loftq"} | (
        fields
    )
    model.add_adapter("default", LoRAConfig(**fields), set_active=True, init_data=data)
    model.train_adapter("default")
    return model.eval()


class OnCpu(TorchFunctionMode):
    """Runs on the CPU what PEFT has for a GPU only."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


def theirs(folder, callback=None):
    config = peft.LoraConfig(r=4, lora_alpha=4, target_modules=TARGETS["llama"])
    model = peft.get_peft_model(base(folder), config)
    with OnCpu():
        peft.replace_lora_weights_loftq(model, model_path=str(folder), callback=callback)
    return model.eval()


def logits(model):
    ids = torch.randint(3, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))
    return model(input_ids=ids).logits


def base_bits(model):
    found = {}
    for key, tensor in model.state_dict().items():
        parts = getattr(tensor, "__tensor_flatten__", None)
        # torchao's tensors consist of plain ones
        for name in parts()[0] if parts else [""]:
            found[key, name] = getattr(tensor, name) if name else tensor
    return {key: t for key, t in found.items() if "lora" not in key[0]}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in found)


def layers(model):
    found = {n: m for n, m in model.named_modules() if hasattr(m, "loras")}
    assert found
    return found


def errors(model, folder, family="llama"):
    """‖W − Q‖, ‖W − (Q + s B A)‖, and the least that a matrix of rank r can leave, per layer."""
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    for name, layer in layers(model).items():
        w = weights[f"{name}.weight"].double()
        w = w.mT if family == "gpt2" else w
        own = layer.loras["default"]
        with torch.no_grad():
            q = shown(layer).double()
            update = own.scaling * (own.lora_B.double() @ own.lora_A.double())
        tail = torch.linalg.svdvals(w - q)[own.lora_A.shape[0] :]
        yield (w - q).norm(), (w - q - update).norm(), tail.norm()


def shown(layer):
    """The weight that a layer multiplies with."""
    with adapterzoo.AdapterSetup(None):
        return (layer(torch.eye(layer.in_features)) - layer(torch.zeros(1, layer.in_features))).mT


def test_the_first_step_is_pefts(saved):
    own, other = ours(saved()), theirs(saved())
    expected, found = logits(other), logits(own)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    # it is not the one of the quantized model
    assert (expected - logits(base(saved()))).abs().max() > 1e-2
    for each in (expected, found):
        each.square().mean().backward()
    mine = {
        n.replace(".loras.default", ""): p.grad for n, p in own.named_parameters() if "lora_" in n
    }
    yours = {
        n.replace(".default.weight", "").removeprefix("base_model.model."): p.grad
        for n, p in other.named_parameters() if "lora_" in n
    }  # fmt: skip
    assert mine.keys() == yours.keys()
    for name, gradient in mine.items():
        largest = yours[name].abs().max()
        # singular vectors have no sign
        torch.testing.assert_close(
            gradient.abs(), yours[name].abs(), rtol=0, atol=float(1e-3 * largest)
        )


@pytest.mark.parametrize(
    ("family", "quantization"),
    [
        ("llama", None),
        ("gpt2", None),
        ("llama", lambda: BitsAndBytesConfig(load_in_8bit=True)),
        ("llama", "torchao"),
    ],
)
def test_the_update_makes_up_for_as_much_as_its_rank_can(saved, family, quantization):
    if quantization == "torchao":
        kind = pytest.importorskip("torchao.quantization").Int8WeightOnlyConfig
        quantization = lambda: TorchAoConfig(kind())  # noqa: E731
    settings = quantization and quantization()
    before = base_bits(base(saved(family), family, settings))
    more = {"alpha": 6, "rank_pattern": {TARGETS[family][0]: 2}}
    model = ours(saved(family), family, quantization=settings, **more)
    for plain, left, least in errors(model, saved(family), family):
        assert left < plain
        torch.testing.assert_close(left, least, rtol=1e-3, atol=1e-5)
    model.delete_adapter("default")
    assert_equal(base_bits(model), before)


def test_the_file_is_plain_lora_that_peft_loads(saved, tmp_path):
    model = ours(saved(), alpha=6)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.02)
    expected = logits(model).detach()
    model.save_adapter(tmp_path / "peft", "default", format="peft")
    assert peft.PeftConfig.from_pretrained(tmp_path / "peft").r == 4
    read = peft.PeftModel.from_pretrained(base(saved()), tmp_path / "peft").eval()
    torch.testing.assert_close(logits(read), expected, rtol=1e-5, atol=1e-5)
    model.save_adapter(tmp_path / "native", "default")
    other = adapterzoo.init(base(saved()))
    other.load_adapter(tmp_path / "native", set_active=True)
    torch.testing.assert_close(logits(other), expected, rtol=0, atol=0)
    assert other.adapters_config.get("default").init_weights == "loftq"


def sources(folder):
    plain = LlamaForCausalLM.from_pretrained(folder)
    plain.save_pretrained(folder / "shards", max_shard_size="100KB")
    assert len([*(folder / "shards").glob("*.safetensors")]) > 1
    return [
        folder,
        str(folder / "model.safetensors"),
        folder / "shards",
        plain.state_dict(),
        plain.model.state_dict(),
    ]


def test_the_weights_come_from_a_folder_a_file_shards_or_tensors(saved):
    expected = ours(saved()).get_adapter_state_dict("default")
    for source in sources(saved()):
        assert_equal(ours(saved(), data=source).get_adapter_state_dict("default"), expected)


def test_pefts_names(saved):
    expected = ours(saved(), alpha=6).get_adapter_state_dict("default")
    fields = {"r": 4, "lora_alpha": 6, "target_modules": TARGETS["llama"]}
    model = names_of_peft.get_peft_model(base(saved()), names_of_peft.LoraConfig(**fields))
    called = []
    names_of_peft.replace_lora_weights_loftq(
        model, callback=lambda own, name: called.append((own, name))
    )
    linear = {name for name, module in model.named_modules() if hasattr(module, "loras")}
    assert {name for _, name in called} == linear
    assert all(own is model for own, _ in called)
    # no answer is no: all values are as they were
    tensors = model.get_adapter_state_dict("default")
    assert not any(t.any() for key, t in tensors.items() if "lora_B" in key)
    names_of_peft.replace_lora_weights_loftq(model, str(saved()))
    assert_equal(model.get_adapter_state_dict("default"), expected)
    for library in (peft, names_of_peft):
        config = library.LoraConfig(
            **fields, init_lora_weights="loftq", loftq_config=library.LoftQConfig(loftq_iter=1)
        )
        made = names_of_peft.get_peft_model(base(saved()), config)
        assert_equal(made.get_adapter_state_dict("default"), expected)


def test_layers_that_are_not_quantized_start_as_usual(saved):
    settings = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", llm_int8_skip_modules=["down_proj"]
    )
    model = ours(saved(), quantization=settings)
    for name, layer in layers(model).items():
        assert bool(layer.loras["default"].lora_B.any()) == ("q_proj" in name)


@contextlib.contextmanager
def unchanged(model, *words):
    """The block raises a `ConfigError` with these words, and leaves a quantized model as it is."""
    before, names = base_bits(model), [*model.adapters_config]
    with pytest.raises(ConfigError) as caught:
        yield
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert_equal(base_bits(model), before)
    assert [*model.adapters_config] == names


def test_refused(saved, tmp_path):
    dense = adapterzoo.init(LlamaForCausalLM.from_pretrained(saved()))
    asked = LoRAConfig(r=4, target_modules=["q_proj"], init_weights="loftq")
    with refused(dense, ConfigError, "q_proj", "quantized", "BitsAndBytesConfig"):
        dense.add_adapter("a", asked)
    model = adapterzoo.init(base(saved()))
    plain = LlamaForCausalLM.from_pretrained(saved()).state_dict()
    other = {k: t[:, :32] for k, t in plain.items() if t.dim() == 2}
    packed = {k: t.char() for k, t in plain.items()}
    for data, words in [
        (tmp_path, (str(tmp_path), "has no weight of")),
        ("no/such-model", ("no/such-model", "has no weight of")),
        ({}, ("self_attn.q_proj", "state_dict()")),
        (other, ("[64, 64]", "before quantization")),
        (packed, ("before quantization",)),
    ]:
        with unchanged(model, *words):
            model.add_adapter("a", asked, init_data=data)
    with unchanged(model, "rank 65", "r=64"):
        model.add_adapter("a", asked.replace(r=65))
    with unchanged(model, "embed_tokens", "linear"):
        model.add_adapter("a", asked.replace(target_modules=["embed_tokens"]))
    with pytest.raises(ConfigError, match="loftq_iter=1"):
        model.add_adapter(
            "a",
            peft.LoraConfig(
                init_lora_weights="loftq", loftq_config=peft.LoftQConfig(loftq_iter=5),
                target_modules=["q_proj"],
            ),
        )  # fmt: skip
    model.add_adapter("b", LoRAConfig(r=4, target_modules=["q_proj"], init_weights="pissa"))
    with unchanged(model, "init_weights='lora'"):
        names_of_peft.replace_lora_weights_loftq(model, adapter_name="b")
    model.add_adapter("c", "ia3")
    with unchanged(model, "'c'", "LoRAConfig"):
        names_of_peft.replace_lora_weights_loftq(model, adapter_name="c")
    dense.add_adapter("merged", asked.replace(init_weights="bert"))
    dense.merge_adapter("merged")
    with refused(dense, StateError, "loftq(LlamaForCausalLM): ", "'merged'", "reset_adapter()"):
        names_of_peft.replace_lora_weights_loftq(dense, adapter_name="merged")


@pytest.mark.parametrize(
    "broken", [lambda t: t * float("nan"), lambda t: t.to("meta")], ids=["nan", "meta"]
)
def test_weights_without_finite_values_are_refused(saved, broken):
    weights = safetensors.torch.load_file(saved() / "model.safetensors")
    model = adapterzoo.init(base(saved()))
    config = LoRAConfig(r=4, target_modules=TARGETS["llama"], init_weights="loftq")
    with refused(model, ConfigError, "no finite weight", "init_data='folder'"):
        model.add_adapter("a", config, init_data={k: broken(t) for k, t in weights.items()})
