"""Merged = unmerged: a cover of `docs/merged-sites.md`, and layers that are only read."""

from __future__ import annotations

import copy
from typing import Any

import merged_table as tables
import pytest
import torch
import transformers
from architectures.tiny_models import tiny_model
from families import tiny_config
from torch import nn
from transformers import (
    AutoModel,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

import adapterzoo
from adapterzoo import LoRAConfig
from adapterzoo.errors import ConfigError, SiteError
from adapterzoo.model import merging
from adapterzoo.testing._case import seeded

PAGE = tables.PAGE.read_text(encoding="utf-8")
COMMITTED = tables.read(PAGE)
# linear, embedding, norm; Conv1D and fused parts; read weights and conv1d; routers and experts;
# tied tables; conv2d; conv3d; torch's attention; an embedding with a norm; positions that count;
# modules with a parameter of their own whose output is no tensor
COVER = (
    "bert", "gpt2", "mamba", "mixtral", "t5", "vit", "videomae", "siglip", "inkling_text", "opt",
    "layoutlmv3", "swin", "xclip",
)  # fmt: skip
same_version = pytest.mark.skipif(
    PAGE.splitlines()[0].rpartition(" ")[2] != transformers.__version__,
    reason="docs/merged-sites.md was made with another transformers",
)


# --- the page ---


@same_version
@pytest.mark.parametrize("model_type", COVER)
def test_the_page_has_the_cells_of_the_cover(model_type):
    tiny = tiny_model(model_type)
    assert tables.cells(tiny) == COMMITTED[model_type], "docs/merged-sites.md: write `make merging`"


def test_the_cover_has_every_column():
    shown = {
        column for name in COVER for column, text in COMMITTED[name].items() if text == "right"
    }
    assert shown == {*COMMITTED["bert"]}


def test_the_page_is_what_is_rendered_of_its_cells_and_none_is_wrong():
    version = PAGE.splitlines()[0].rpartition(" ")[2]
    rendered = tables.render(COMMITTED, tables.left_out(PAGE), version)
    assert rendered == PAGE, "docs/merged-sites.md: write `make merging`"
    texts = {text for row in COMMITTED.values() for text in row.values()}
    assert texts == {tables.RIGHT, tables.REFUSED, tables.ABSENT}


@same_version
def test_each_model_type_is_in_the_table_or_has_a_reason():
    assert sorted([*COMMITTED, *tables.left_out(PAGE)]) == sorted(MODEL_MAPPING_NAMES)


def test_a_wrong_merge_is_seen(monkeypatch):
    original = merging.changed
    monkeypatch.setattr(merging, "changed", lambda *args: original(*args) * 1.01)
    found = tables.cells(tiny_model("bert"), ["lora", "modules_to_save"])
    assert all(text.startswith(tables.WRONG) for text in found.values())


@same_version
@pytest.mark.parametrize("model_type", COVER)
def test_anatomy_says_which_layers_a_model_calls_and_which_it_reads(model_type):
    assert tables.unknown(tiny_model(model_type)) == []


# --- layers whose weight the model reads ---


def mamba():
    return adapterzoo.init(tiny_model("mamba").model)


IDS = torch.arange(10, 24).reshape(2, 7)


def states(model, **inputs):
    return model(**(inputs or {"input_ids": IDS})).last_hidden_state


def stirred(model: Any) -> Any:
    source = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".a." in name:
                parameter.add_(torch.randn(parameter.shape, generator=source), alpha=0.2)
    return model.eval()


def test_lora_at_a_layer_that_mamba_only_reads_is_a_change_of_the_weight():
    model = mamba().eval()
    plain, before = copy.deepcopy(model), states(model)
    model.add_adapter("a", LoRAConfig(r=4, alpha=4, target_modules=["dt_proj"]), set_active=True)
    with torch.no_grad():
        # another product of matrices has other rounding where the weight has a gradient
        assert torch.equal(states(model), before)
    stirred(model)
    with torch.no_grad():
        for block, own in zip(plain.layers, model.layers, strict=True):
            lora = own.mixer.dt_proj.loras["a"]
            block.mixer.dt_proj.weight += lora.lora_B @ lora.lora_A
    expected = states(plain)
    assert (expected - before).abs().max() > 1e-3
    torch.testing.assert_close(states(model), expected)
    model.train_adapter("a")
    states(model).square().sum().backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    assert trained
    assert all(p.grad is not None and p.grad.count_nonzero() for p in trained)


def test_copies_and_biases_of_layers_that_are_read_act_and_merge():
    model = mamba()
    config = LoRAConfig(target_modules=["in_proj"], modules_to_save=["conv1d"], bias="all")
    model.add_adapter("a", config, set_active=True)
    before = states(stirred(model))
    model.merge_adapter("a")
    torch.testing.assert_close(states(model), before)
    model.reset_adapter()
    model.delete_adapter("a")
    assert all(
        type(m).__module__.startswith(("torch", "transformers")) for m in model.layers.modules()
    )


@torch.no_grad()
def test_a_matrix_named_bias_is_merged():
    plain, inputs = tables.exact(tiny_model("convbert"))
    name = "encoder.layer.0.attention.self.key_conv_attn_layer"
    model: Any = adapterzoo.init(copy.deepcopy(plain))
    config = LoRAConfig(r=2, alpha=2, target_parameters=[f"{name}.bias"])
    model.add_adapter("a", config, set_active=True)
    stirred(model)
    factors = [p for n, p in model.named_parameters() if ".a." in n]  # A [2, 1], B [d_out, 2]
    plain.get_submodule(name).bias += factors[1] @ factors[0]
    expected = seeded(plain, inputs)[0]
    torch.testing.assert_close(seeded(model, inputs)[0], expected)
    model.merge_adapter("a")
    torch.testing.assert_close(seeded(model, inputs)[0], expected)


@torch.no_grad()
def test_the_bias_of_a_norm_of_channels_is_added_to_channels():
    plain, inputs = tables.exact(tiny_model("squeezebert"))
    model: Any = adapterzoo.init(copy.deepcopy(plain))
    config = LoRAConfig(target_modules=["pooler.dense"], bias="all")
    model.add_adapter("a", config, set_active=True)
    stirred(model)
    own = dict(model.named_parameters())
    for name, p in plain.named_parameters():
        if name.endswith("bias"):
            p.copy_(own.get(f"{name.removesuffix('bias')}adapters.a.own", p))
    expected = seeded(plain, inputs).last_hidden_state
    torch.testing.assert_close(seeded(model, inputs).last_hidden_state, expected)


@pytest.mark.parametrize("field", ["dropout=0.1", "use_gating=True", "lora_bias=True"])
def test_what_needs_the_input_of_a_layer_is_refused_where_it_is_only_read(field):
    model = mamba()
    with pytest.raises(ConfigError, match="dt_proj"):
        model.add_adapter("a", f"lora[target_modules=['dt_proj'],{field}]")
    assert "a" not in model.adapters_config


def test_rows_with_different_adapters_are_refused_where_a_weight_is_read():
    model = mamba()
    model.add_adapter("a", LoRAConfig(target_modules=["dt_proj"]))
    with pytest.raises(adapterzoo.errors.CompositionError, match="computes with its parameters"):
        model(input_ids=IDS, adapter_names=["a", "__base__"])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.both, self.read = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        y = x @ self.read.weight.T + self.read.bias
        return self.both(y) + y @ self.both.weight


class Reader(PreTrainedModel):
    config_class = PreTrainedConfig

    def __init__(self, config):
        super().__init__(config)
        self.block = Block()
        self.post_init()

    def forward(self, x):
        return self.block(x)


def test_a_layer_that_is_called_and_read_acts_in_both_ways_compiled_too():
    torch.manual_seed(0)
    model = adapterzoo.init(Reader(PreTrainedConfig()).double())
    config = LoRAConfig(target_modules=["both", "read"], bias="all")
    model.add_adapter("a", config, set_active=True)
    x = torch.randn(2, 8, dtype=torch.double)
    acting = stirred(model)(x)
    compiled = torch.compile(model.block, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), acting)
    model.merge_adapter("a")
    torch.testing.assert_close(model(x), acting)


def test_peft_cannot_have_an_adapter_where_it_would_not_act(tmp_path):
    model = mamba()
    model.add_adapter("a", LoRAConfig(target_modules=["dt_proj"]))
    with pytest.raises(adapterzoo.errors.CheckpointError, match="would not act"):
        model.save_adapter(tmp_path / "peft", "a", format="peft")
    stirred(model).save_adapter(tmp_path / "native", "a")
    other = mamba().eval()
    other.load_adapter(tmp_path / "native", load_as="a", set_active=True)
    model.set_active_adapters("a")
    assert torch.equal(states(other), states(model))


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_a_table_that_only_others_use_is_refused(family):
    model = adapterzoo.init(AutoModel.from_config(tiny_config(family)))
    with pytest.raises(SiteError, match=r"no layer matches .*'embed_tokens'"):
        model.add_adapter("a", LoRAConfig(target_modules=["shared"]))
    model.add_adapter("a", LoRAConfig(target_modules=["embed_tokens"]))
    model.add_adapter("b", LoRAConfig(trainable_token_indices=[11]))


class Recurrent(PreTrainedModel):
    config_class = PreTrainedConfig

    def __init__(self, config):
        super().__init__(config)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.post_init()

    def forward(self, x):
        return self.lstm(x)[0]


def test_the_weights_of_a_recurrent_layer_of_torch_are_refused():
    model = adapterzoo.init(Recurrent(PreTrainedConfig()))
    with pytest.raises(SiteError, match="weight_ih_l0"):
        model.add_adapter("a", LoRAConfig(target_parameters=["lstm.weight_ih_l0"]))


def test_an_interpolated_table_of_positions_has_the_adapter():
    model = adapterzoo.init(AutoModel.from_config(tiny_config("clip")).vision_model.double())
    model.add_adapter("a", LoRAConfig(target_modules=["position_embedding"]), set_active=True)
    x = torch.randn(1, 3, 12, 12, dtype=torch.double)

    def run():
        return model(pixel_values=x, interpolate_pos_encoding=True).last_hidden_state

    plain = run()
    stirred(model)
    acting = run()
    assert (acting - plain).abs().max() > 1e-3
    model.merge_adapter("a")
    torch.testing.assert_close(run(), acting)


# --- torch's encoder ---


class Encoder(PreTrainedModel):
    config_class = PreTrainedConfig

    def __init__(self, config):
        super().__init__(config)
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.post_init()

    def forward(self, x, padding=None):
        return self.encoder(x, src_key_padding_mask=padding)


X = torch.randn(3, 7, 32, generator=torch.Generator().manual_seed(0), dtype=torch.double)
PADDING = torch.zeros(3, 7, dtype=torch.bool)
PADDING[1, 4:] = True


@torch.no_grad()
def test_an_invertible_adapter_acts_before_torchs_encoder():
    model = adapterzoo.init(Encoder(PreTrainedConfig()).double().eval())
    model.add_adapter("a", "seq_bn_inv", set_active=True)
    before = model.eval()(X)
    for name, parameter in model.named_parameters():
        if name.startswith("invertible_adapters."):
            parameter.add_(0.1)
    assert (model(X) - before).abs().max() > 1e-3
    model.delete_adapter("a")
    assert [*dict(model.named_modules())] == [*dict(Encoder(PreTrainedConfig()).named_modules())]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("padding", [None, PADDING], ids=["whole", "padded"])
@pytest.mark.parametrize(
    "config",
    ["lora[target_modules=['linear1','linear2']]", "lora[target_modules=['layers.1.linear1']]",
     "lora[target_modules=['linear1'],use_gating=True]", "lora[r=4]", "ln_tuning", "seq_bn",
     "boft[target_modules=['linear2'],boft_block_size=4]"],
)  # fmt: skip
def test_without_gradients_torchs_encoder_has_its_adapters(config, padding):
    torch.manual_seed(0)
    model = adapterzoo.init(Encoder(PreTrainedConfig()).double()).eval()
    tokens = slice(None) if padding is None else ~padding
    with torch.no_grad():
        plain = model(X, padding)
    model.add_adapter("a", config, set_active=True)
    with_gradients = stirred(model)(X, padding).detach()
    assert (with_gradients - plain).abs().max() > 1e-3
    with torch.no_grad():
        acting = model(X, padding)
        copied = copy.deepcopy(model)(X, padding)
        model.set_active_adapters(None)
        assert torch.equal(model(X, padding), plain)
    torch.testing.assert_close(acting[tokens], with_gradients[tokens])
    torch.testing.assert_close(copied[tokens], with_gradients[tokens])
    model.delete_adapter("a")
    assert type(model.encoder) is nn.TransformerEncoder
    assert type(model.encoder.layers[0]) is nn.TransformerEncoderLayer
