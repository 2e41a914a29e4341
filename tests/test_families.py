"""Every method on a real model of every family: inject, forward, backward, merge, save, take."""

from __future__ import annotations

import pytest
import torch
from families import FAMILIES, first_output, tiny_config, tiny_inputs
from snapshots import of_adapter, stir
from transformers import AutoModel

from adapterzoo import AutoAdapterModel, init

TOWERS = {"clip", "siglip"}
CONFIGS = (
    'lora[attn_matrices=["q","k","v","o"],intermediate_lora=True,output_lora=True]',
    'lora[target_modules="all-linear"]',
    # seq_bn and that behind attention
    "double_seq_bn[reduction_factor=4]",
    "par_bn[reduction_factor=4]",
    "adapter_plus[reduction_factor=4]",
)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    torch.manual_seed(0)
    # frozen, as it is in use: torch picks other attention kernels where gradients are asked for
    model = AutoModel.from_config(tiny_config(request.param)).eval().requires_grad_(False)
    keys = list(model.state_dict())
    classes = [type(m) for m in model.modules()]
    inputs = tiny_inputs(request.param)
    plain = first_output(model(**inputs))
    return init(model), inputs, plain, keys, classes


@pytest.mark.parametrize("config", CONFIGS)
def test_adapter_lives_and_leaves_no_trace(family, config, tmp_path):
    model, inputs, plain, keys, classes = family
    model.add_adapter("a", config)
    stir(model, "a")
    assert torch.equal(first_output(model(**inputs)), plain), "inactive, and yet it acts"

    model.set_active_adapters("a")
    adapted = first_output(model(**inputs))
    assert not torch.equal(adapted, plain)

    model.train_adapter("a")
    model.eval()
    out = first_output(model(**inputs))
    (out * torch.randn_like(out)).sum().backward()
    named = dict(model.named_parameters())
    trained = {n for n, p in named.items() if p.requires_grad}
    assert trained == {n for n in named if of_adapter(n, "a")}
    assert all(named[n].grad is not None for n in trained)
    # a ReLU in a narrow bottleneck may be off for all of a tiny batch
    silent = [n for n in trained if not named[n].grad.count_nonzero()]
    assert not silent or "lora" not in config
    assert len(silent) <= len(trained) // 2, silent

    if config.startswith("lora"):
        with torch.no_grad():
            model.merge_adapter("a")
            torch.testing.assert_close(first_output(model(**inputs)), adapted, rtol=1e-5, atol=1e-5)
            model.reset_adapter()
            assert torch.equal(first_output(model(**inputs)), adapted)

    model.save_adapter(tmp_path, "a")
    saved = {n: p.detach().clone() for n, p in named.items() if n in trained}
    model.delete_adapter("a")
    model.load_adapter(tmp_path, load_as="b")
    loaded = dict(model.named_parameters())
    for name, tensor in saved.items():
        assert torch.equal(loaded[name.replace(".a.", ".b.")], tensor)

    model.delete_adapter("b")
    assert list(model.state_dict()) == keys
    after = [type(m) for m in model.modules()]
    assert after[1:] == classes[1:]
    assert torch.equal(first_output(model(**inputs)), plain)


def close(found, expected):
    """Tensors of a file lie elsewhere in memory, and products round by where their operands lie."""
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family_name", FAMILIES)
def test_auto_model_takes_a_base_checkpoint_and_returns_from_its_own(family_name, tmp_path):
    torch.manual_seed(0)
    base = AutoModel.from_config(tiny_config(family_name)).eval()
    base.save_pretrained(tmp_path / "base")
    inputs = tiny_inputs(family_name)
    model, info = AutoAdapterModel.from_pretrained(tmp_path / "base", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    with torch.no_grad():
        close(first_output(model(**inputs)), first_output(base(**inputs)))

    model.add_adapter("a", "lora", set_active=True)
    model.add_adapter("b", "par_bn")
    stir(model, "a")
    if family_name not in TOWERS:
        model.add_classification_head("a", num_labels=3)
    model.save_pretrained(tmp_path / "whole")
    again, info = AutoAdapterModel.from_pretrained(tmp_path / "whole", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert dict(again.adapters_config) == dict(model.adapters_config)
    assert list(again.heads) == list(model.heads)
    ours, theirs = model.state_dict(), again.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    again.set_active_adapters("a")
    with torch.no_grad():
        close(first_output(again(**inputs)), first_output(model(**inputs)))


def test_the_families_are_those_that_are_promised():
    promised = (
        "bert roberta distilbert deberta-v2 electra albert modernbert xlm-roberta gpt2 gpt_neox "
        "llama mistral qwen2 qwen3 gemma2 gemma3_text phi3 mixtral qwen3_moe t5 mt5 bart mbart "
        "whisper vit beit dinov2 clip siglip wav2vec2"
    )
    assert set(promised.split()) == set(FAMILIES)
