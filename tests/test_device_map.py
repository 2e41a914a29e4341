"""Models that accelerate has spread over devices or offloaded to disk."""

from __future__ import annotations

import pytest
import torch
from families import first_output, tiny_config, tiny_inputs
from transformers import AutoModel

from adapterzoo import AutoAdapterModel

SPREAD = {
    "model.embed_tokens": "cpu",
    "model.layers.0": "cpu",
    "model.layers.1": "disk",
    "model.norm": "cpu",
    "model.rotary_emb": "cpu",
}


@pytest.mark.parametrize("config", ["lora[init_weights='bert']", "seq_bn", "par_bn"])
def test_an_adapter_acts_on_offloaded_layers_as_on_others(config, tmp_path):
    torch.manual_seed(0)
    base = AutoModel.from_config(tiny_config("llama")).eval()
    base.save_pretrained(tmp_path)
    whole = AutoAdapterModel.from_pretrained(tmp_path)
    spread = AutoAdapterModel.from_pretrained(
        tmp_path, device_map=SPREAD, offload_folder=tmp_path / "offloaded"
    )
    assert spread.model.layers[1].self_attn.q_proj.weight.device.type == "meta"
    for model in (whole, spread):
        torch.manual_seed(1)
        model.add_adapter("a", config, set_active=True)
    assert all(
        p.device.type == "cpu" for _, m in spread.adapter_modules("a") for p in m.parameters()
    )
    inputs = tiny_inputs("llama")
    with torch.no_grad():
        plain = first_output(base(**inputs))
        expected = first_output(whole(**inputs))
        assert torch.equal(first_output(spread(**inputs)), expected)
        assert config == "par_bn" or not torch.equal(expected, plain)
        spread.delete_adapter("a")
        assert torch.equal(first_output(spread(**inputs)), plain)
