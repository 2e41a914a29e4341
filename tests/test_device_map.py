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


METHODS = ["lora[init_weights='bert']", "dora", "boft", "seq_bn", "par_bn"]


@pytest.mark.parametrize("config", METHODS)
def test_an_adapter_on_offloaded_layers_trains_and_is_saved_as_on_others(config, tmp_path):
    torch.manual_seed(0)
    base = AutoModel.from_config(tiny_config("llama")).eval()
    base.save_pretrained(tmp_path / "base")
    inputs = {**tiny_inputs("llama"), "labels": torch.tensor([0, 1])}

    def spread(folder):
        return AutoAdapterModel.from_pretrained(
            tmp_path / "base", device_map=SPREAD, offload_folder=tmp_path / folder
        )

    def trained(model):
        torch.manual_seed(1)
        model.add_adapter("a", config)
        model.add_classification_head("a", num_labels=2)
        model.train_adapter("a")
        model.eval()
        own = [p for p in model.parameters() if p.requires_grad]
        fresh = [p.detach().clone() for p in own]
        optimizer = torch.optim.SGD(own, lr=1.0)
        for _ in range(3):
            optimizer.zero_grad()
            model(**inputs).loss.backward()
            optimizer.step()
        assert all(not torch.equal(p, before) for p, before in zip(own, fresh, strict=True))
        return model

    whole = trained(AutoAdapterModel.from_pretrained(tmp_path / "base"))
    parted = trained(spread("first"))
    assert parted.model.layers[1].self_attn.q_proj.weight.is_meta
    own = [p for _, module in parted.adapter_modules("a") for p in module.parameters()]
    assert {p.device.type for p in own} == {"cpu"}
    assert parted.adapter_fingerprint("a") == whole.adapter_fingerprint("a")
    whole.save_adapter(tmp_path / "whole", "a")
    parted.save_adapter(tmp_path / "parted", "a")
    files = [(tmp_path / f / "adapter.safetensors").read_bytes() for f in ("whole", "parted")]
    assert files[0] == files[1]
    with torch.no_grad():
        expected = first_output(whole(**inputs))
        assert torch.equal(first_output(parted(**inputs)), expected)
        for model in (AutoAdapterModel.from_pretrained(tmp_path / "base"), spread("second")):
            model.load_adapter(tmp_path / "parted", set_active=True)
            model.eval()
            assert torch.equal(first_output(model(**inputs)), expected)
        for model in (whole, parted):
            model.delete_adapter("a")
            model.delete_head("a")
        del inputs["labels"]
        plain = first_output(base(**inputs))
        assert all(torch.equal(first_output(m(**inputs)), plain) for m in (whole, parted))
