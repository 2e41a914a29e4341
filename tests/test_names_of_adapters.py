"""What code for `adapters` imports is here under its names, and raises what it catches."""

from __future__ import annotations

import dataclasses
import itertools
import json
from dataclasses import FrozenInstanceError, dataclass
from importlib import import_module
from pathlib import Path

import pytest
import torch
from families import tiny_config
from snapshots import of_adapter
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    HfArgumentParser,
    PreTrainedConfig,
    PreTrainedModel,
    T5Config,
)

import adapterzoo
from adapterzoo import (
    AdapterConfig,
    AdapterFusionConfig,
    BatchSplit,
    ConfigUnion,
    Fuse,
    LoRAConfig,
    MAMConfig,
    SeqBnConfig,
    Stack,
    errors,
    init,
    load_model,
)

PEER = json.loads((Path(__file__).parent / "data" / "adapters_signatures.json").read_text())

# a path of `adapters`, and names that scripts, notebooks and tests import from there
PATHS = {
    "composition": ("Fuse", "Stack", "parse_composition", "validate_composition"),
    "configuration": ("ADAPTER_CONFIG_MAP", "AdapterConfig", "LoRAConfig", "ModelAdaptersConfig"),
    "configuration.adapter_config": ("LoRAConfig", "SeqBnConfig"),
    "context": ("AdapterSetup",),
    "heads": ("CausalLMHead", "ClassificationHead", "PredictionHead"),
    "heads.language_modeling": ("CausalLMHead",),
    "interface": ("AdapterMethod", "AdapterModelInterface"),
    "models": ("ADAPTER_MODEL_MAPPING", "AutoAdapterModel", "BertAdapterModel"),
    "models.auto.adapter_model": ("ADAPTER_MODEL_MAPPING", "AutoAdapterModel"),
    "trainer": ("AdapterTrainer", "Seq2SeqAdapterTrainer"),
    "loading": ("WeightsLoader",),
    "training": ("AdapterArguments", "setup_adapter_training"),
    "utils": (
        "ADAPTERFUSION_WEIGHTS_NAME", "INTERFACE_CONFIG_NAME", "SAFE_HEAD_WEIGHTS_NAME",
        "SETUP_CONFIG_NAME", "WEIGHTS_NAME",
    ),
    "wrappers": ("init", "load_model"),
}  # fmt: skip

# exported there, and absent here: the reasons are in docs/from-adapters.md
ABSENT = {
    "ADAPTER_CACHE", "AdapterLayerBase", "ComposableAdapterLayerBase", "EmbeddingAdaptersMixin",
    "ForwardContext", "InvertibleAdaptersMixin", "InvertibleAdaptersWrapperMixin",
    "init_adapters_config",
}  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
def test_a_path_of_theirs_has_its_names(path):
    module = import_module(f"adapterzoo.{path}")
    for name in PATHS[path]:
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError):
        _ = module.no_such_name


def test_every_name_of_theirs_resolves():
    for name in itertools.chain(*adapterzoo._OF_ADAPTERS.values()):
        assert getattr(adapterzoo, name) is not None
    assert not ABSENT & {*dir(adapterzoo)}


def test_the_maps_hold_what_load_takes():
    from adapterzoo.configuration import ADAPTER_CONFIG_MAP, ADAPTERFUSION_CONFIG_MAP

    assert ADAPTER_CONFIG_MAP["houlsby"] == AdapterConfig.load("double_seq_bn")
    assert all(isinstance(config, AdapterConfig) for config in ADAPTER_CONFIG_MAP.values())
    assert set(ADAPTERFUSION_CONFIG_MAP) == {"static", "dynamic"}
    assert len(ADAPTER_CONFIG_MAP) == len(list(ADAPTER_CONFIG_MAP))
    assert adapterzoo.ADAPTER_MODEL_MAPPING[BertConfig] is adapterzoo.BertAdapterModel
    assert T5Config in adapterzoo.ADAPTER_MODEL_MAPPING
    assert "bert" not in adapterzoo.ADAPTER_MODEL_MAPPING
    types = {n: getattr(adapterzoo, f"{n}AdapterModel").head_types for n in ("Bert", "T5", "ViT")}
    assert {"classification", "masked_lm", "dependency_parsing"} <= {*types["Bert"]}
    assert "seq2seq_lm" in types["T5"]
    assert "causal_lm" not in types["T5"]
    assert types["ViT"] == ["image_classification"]


# of AdapterHub's index
@pytest.mark.parametrize(
    ("config", "hashed"), [("pfeiffer", "9076f36a74755ac4"), ("houlsby", "b1017368d7a97b11")]
)
def test_a_config_has_the_hash_of_the_index(config, hashed):
    assert adapterzoo.get_adapter_config_hash(AdapterConfig.load(config)) == hashed


# --- configs ---


@dataclass
class WarmConfig(SeqBnConfig):
    warmth: str = "mild"


def test_a_config_class_need_not_be_frozen():
    config = AdapterConfig.load(WarmConfig(reduction_factor=4), warmth="hot")
    assert type(config) is WarmConfig
    assert (config["warmth"], config.reduction_factor) == ("hot", 4)
    assert config.to_dict()["warmth"] == "hot"
    assert {config: 1}[config.replace()] == 1
    for name in ("warmth", "reduction_factor", "other"):
        with pytest.raises(FrozenInstanceError, match=r"config\.replace"):
            setattr(config, name, 2)
    with pytest.raises(FrozenInstanceError):
        del config.warmth

    @dataclass(frozen=True, kw_only=True)
    class Frozen(WarmConfig):
        degrees: int = 3

    assert Frozen(degrees=5).degrees == 5
    with pytest.raises(errors.FieldError):
        WarmConfig(no_such_field=1)


def test_a_config_is_a_mapping():
    config = LoRAConfig(r=4, leave_out=[1])
    assert {**config}["r"] == config.get("r") == 4
    assert "r" in config
    assert "no_such_field" not in config
    assert len(config) == len(list(config)) == len(config.items())
    assert config.leave_out == [1] == config.leave_out
    assert config.attn_matrices == ["q", "v"]
    assert config.leave_out != [2]
    assert config.leave_out == (1,)


def test_a_union_has_members():
    union = ConfigUnion(LoRAConfig(r=2), SeqBnConfig())
    assert union[0] == LoRAConfig(r=2)
    assert union["1.reduction_factor"] == 16
    with pytest.raises(IndexError):
        _ = union[2]


def test_none_leaves_a_field_as_it_is(tmp_path):
    assert AdapterConfig.load("seq_bn", reduction_factor=None) == SeqBnConfig()
    assert AdapterFusionConfig.load("static", temperature=True).temperature is True
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"architecture": "lora", "r": 3}))
    assert AdapterConfig.load(str(file), alpha=5) == LoRAConfig(r=3, alpha=5)


def test_names_in_a_composition_are_a_set_too():
    names = Stack("a", Fuse("b", "c")).flatten()
    assert names == {"a", "b", "c"}
    assert {"a", "b", "c"} == names
    assert names == ("a", "b", "c")
    assert names != {"a"}
    assert adapterzoo.Parallel("a", Stack("b", "c")).parallel_channels == 2
    assert Stack("a", Fuse("b", "c")).first() == "a"


# --- errors ---


def tiny():
    return adapterzoo.AutoAdapterModel.from_config(tiny_config("bert"))


CALLS = {
    "an unknown field": (TypeError, lambda m: AdapterConfig.load("seq_bn[no_such_field=2]")),
    "a class in a union": (TypeError, lambda m: ConfigUnion(MAMConfig(), SeqBnConfig)),
    "an unknown config": (ValueError, lambda m: AdapterConfig.load("lora[r=8]|no_such_name")),
    "an unknown adapter": (ValueError, lambda m: m.set_active_adapters("no_such_name")),
    "no composition": (TypeError, lambda m: m.set_active_adapters(5)),
    "a nesting": (ValueError, lambda m: adapterzoo.parse_composition(Fuse(Fuse("a", "b"), "c"))),
    "a fusion of an unknown adapter": (ValueError, lambda m: m.add_adapter_fusion(["a", "c"])),
    "a folder that is not there": (OSError, lambda m: m.load_adapter("/no/such/folder")),
    "an unknown head": (ValueError, lambda m: m.save_head("/tmp/no", "no_such_head")),
}


@pytest.mark.parametrize("what", CALLS)
def test_an_error_is_one_of_theirs(what):
    model = tiny()
    model.add_adapter("a")
    expected, call = CALLS[what]
    with pytest.raises(expected) as caught:
        call(model)
    assert isinstance(caught.value, errors.AdapterZooError)


def test_a_batch_of_another_size_is_an_index_error():
    model = tiny()
    model.add_adapter("a")
    model.add_adapter("b")
    model.set_active_adapters(BatchSplit("a", "b", batch_sizes=[1, 2]))
    with pytest.raises(IndexError):
        model(input_ids=torch.ones(2, 4, dtype=torch.long))


# --- scripts ---


def arguments(*line):
    return HfArgumentParser(adapterzoo.AdapterArguments).parse_args_into_dataclasses([*line])[0]


def test_a_script_trains_an_adapter(tmp_path):
    model = tiny()
    asked = arguments("--train_adapter", "--adapter_config", "lora[r=2]")
    names = adapterzoo.setup_adapter_training(model, asked, "task", {"alpha": 4})
    assert names == ("task", None)
    assert model.adapters_config["task"] == LoRAConfig(r=2, alpha=4)
    assert model.active_adapters == Stack("task")
    model.save_adapter(tmp_path, "task")
    # again, and from the file
    assert adapterzoo.setup_adapter_training(model, asked, "task") == ("task", None)
    other = tiny()
    other.add_adapter("de")
    other.save_adapter(tmp_path / "de", "de")
    loads = ("--load_adapter", str(tmp_path), "--load_lang_adapter", str(tmp_path / "de"))
    asked = arguments("--train_adapter", "--adapter_config", "lora[r=2,alpha=4]", *loads)
    model = tiny()
    assert adapterzoo.setup_adapter_training(model, asked, "task") == ("task", "de")
    assert model.active_adapters == Stack("de", "task")
    trained = {
        name
        for name in ("task", "de")
        for n, p in model.named_parameters()
        if p.requires_grad and of_adapter(n, name)
    }
    assert trained == {"task"}


def test_a_script_that_trains_no_adapter_loads_none():
    assert adapterzoo.setup_adapter_training(tiny(), arguments(), "task") == (None, None)
    with pytest.raises(ValueError, match="--train_adapter"):
        adapterzoo.setup_adapter_training(tiny(), arguments("--load_adapter", "x"), "task")


def test_the_arguments_are_theirs():
    fields = {f.name: f.default for f in dataclasses.fields(adapterzoo.AdapterArguments)}
    assert fields == {
        "train_adapter": False,
        "load_adapter": "",
        "adapter_config": "seq_bn",
        "load_lang_adapter": None,
        "lang_adapter_config": None,
    }


# --- the plug-in interface ---

INTERFACE = {
    "adapter_methods": ["bottleneck", "lora", "invertible"],
    "model_embeddings": "embed_tokens",
    "model_layers": "layers",
    "layer_self_attn": "self_attn",
    "layer_cross_attn": None,
    "attn_k_proj": "k_proj",
    "attn_q_proj": "q_proj",
    "attn_v_proj": "v_proj",
    "attn_o_proj": "o_proj",
    "layer_intermediate_proj": "mlp.up_proj",
    "layer_output_proj": "mlp.down_proj",
    "layer_pre_self_attn": "input_layernorm",
    "layer_pre_ffn": "post_attention_layernorm",
}


def llama():
    return AutoModelForCausalLM.from_config(tiny_config("llama"))


def interface(**changes):
    return adapterzoo.AdapterModelInterface(**{**INTERFACE, **changes})


def test_an_interface_that_fits_changes_nothing():
    model, plain = init(llama(), interface=interface()), init(llama())
    assert model.anatomy == plain.anatomy
    model.add_adapter("a", "lora")
    with pytest.raises(ValueError, match=r"allows.*'prefix_tuning'.*adapter_methods"):
        model.add_adapter("b", "unipelt")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"attn_k_proj": "no_such_layer"}, "no_such_layer"),
        ({"model_layers": "blocks"}, "blocks"),
        ({"model_embeddings": "wte"}, "wte"),
        ({"attn_k_proj": "v_proj", "attn_v_proj": "k_proj"}, "k_proj' is 'key', not 'value'"),
        ({"attn_k_proj": "v_proj"}, "names two layers"),
        ({"attn_qkv_proj": "qkv"}, "or attn_qkv_proj"),
        ({"attn_q_proj": None}, "or attn_qkv_proj"),
    ],
)
def test_an_interface_that_does_not_fit_is_refused(changes, says):
    model = llama()
    plain = type(model)
    with pytest.raises((AttributeError, ValueError), match=says):
        init(model, interface=interface(**changes))
    assert type(model) is plain
    assert init(model).has_adapters() is False


class OwlConfig(PreTrainedConfig):
    model_type = "owl"

    def __init__(self, hidden_size=16, **kwargs):
        super().__init__(**kwargs)
        self.hidden_size = hidden_size


class OwlAttention(nn.Module):
    def __init__(self, width):
        super().__init__()
        # [q | k | v], under a name that no pattern knows
        self.triple = nn.Linear(width, 3 * width)
        self.out_proj = nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.triple(x).chunk(3, -1)
        return self.out_proj(nn.functional.scaled_dot_product_attention(q, k, v))


class OwlBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.attention = OwlAttention(width)
        self.widen = nn.Linear(width, 2 * width)
        self.narrow = nn.Linear(2 * width, width)

    def forward(self, x):
        x = x + self.attention(x)
        return x + self.narrow(torch.relu(self.widen(x)))


class OwlModel(PreTrainedModel):
    config_class = OwlConfig
    base_model_prefix = "model"

    def __init__(self, config):
        super().__init__(config)
        self.embedding = nn.Embedding(50, config.hidden_size)
        self.blocks = nn.ModuleList(OwlBlock(config.hidden_size) for _ in range(2))
        self.post_init()

    def forward(self, input_ids, **kwargs):
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return (x,)


OWL = adapterzoo.AdapterModelInterface(
    adapter_methods=["lora"],
    model_embeddings="embedding",
    model_layers="blocks",
    layer_self_attn="attention",
    layer_cross_attn=None,
    attn_qkv_proj="triple",
    attn_o_proj="out_proj",
    layer_intermediate_proj="widen",
    layer_output_proj="narrow",
)
LORA = LoRAConfig(r=2, intermediate_lora=True, output_lora=True, attn_matrices=["q", "v", "o"])


def test_an_interface_names_what_anatomy_does_not_find(tmp_path):
    with pytest.raises(errors.SiteError):
        init(OwlModel(OwlConfig())).add_adapter("a", LORA)
    model = init(OwlModel(OwlConfig()), interface=OWL)
    model.add_adapter("a", LORA, set_active=True)
    block = model.anatomy.blocks[1]
    roles = {site.role: site.path for site in (*block.sites, *block.parts)}
    assert roles["query"] == roles["value"] == "blocks.1.attention.triple"
    assert roles["mlp_in"] == "blocks.1.widen"
    for _, module in model.adapter_modules("a"):
        for parameter in module.parameters():
            nn.init.normal_(parameter)
    ids = torch.arange(6).view(2, 3)
    model.save_pretrained(tmp_path)
    again = load_model(tmp_path, OwlModel).eval()
    torch.testing.assert_close(again(ids)[0], model.eval()(ids)[0])
    plain = OwlModel(OwlConfig())
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if not of_adapter(k)})
    assert not torch.allclose(plain(ids)[0], model(ids)[0])


def test_an_interface_is_saved_with_the_model(tmp_path):
    model = init(llama(), interface=interface())
    model.add_adapter("a", "lora[r=2]")
    model.save_pretrained(tmp_path)
    again = load_model(tmp_path, type(model))
    with pytest.raises(ValueError, match="allows"):
        again.add_adapter("b", "unipelt")
    assert {*again.adapters_config} == {"a"}


def test_an_interface_is_read_from_the_folder_of_adapters(tmp_path):
    document = {"model_type": "llama", "interface": INTERFACE, "version": "adapters.1.3.0"}
    (tmp_path / "adapter_interface.json").write_text(json.dumps(document))
    for given in (tmp_path, str(tmp_path / "adapter_interface.json")):
        with pytest.raises(ValueError, match="allows"):
            init(llama(), interface=given).add_adapter("b", "unipelt")
    llama().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="allows"):
        load_model(tmp_path, type(llama())).add_adapter("b", "unipelt")


def test_init_adds_the_adapters_of_another_model():
    first = init(llama())
    for name in ("a", "b"):
        first.add_adapter(name, "seq_bn")
    first.add_adapter_fusion(["a", "b"], "static", name="both")
    second = init(llama(), first.adapters_config)
    assert dict(second.adapters_config) == dict(first.adapters_config)
    second.set_active_adapters(Fuse("a", "b", name="both"))
    with pytest.raises(errors.StateError, match="has adapters already"):
        init(second, first.adapters_config)
