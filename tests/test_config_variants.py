"""Configs of `adapters` that are another class here: LoRA with `use_dora` and its like."""

import pytest
import torch
from families import tiny_config, tiny_inputs
from transformers import AutoModel

from adapterzoo import (
    AdapterConfig,
    DoRAConfig,
    DvoRAConfig,
    IA3Config,
    LoRAConfig,
    VeraConfig,
    init,
)
from adapterzoo.errors import ConfigError

SCALE = IA3Config(
    attn_matrices=("q", "v"), intermediate_lora=False, alpha=1, convention="adapterhub"
)
MEANT = {
    "dora": (lambda: LoRAConfig(use_dora=True, r=4), DoRAConfig(r=4)),
    "dora of dora": (lambda: DoRAConfig(use_dora=True), DoRAConfig()),
    "lora of dora": (lambda: DoRAConfig(use_dora=False), LoRAConfig()),
    "lora": (lambda: LoRAConfig(use_dora=False, composition_mode="add", vera_d=None), LoRAConfig()),
    "vera": (lambda: LoRAConfig(vera_d=0.1, vera_b=0.0, init_weights="vera"), VeraConfig(r=8)),
    "dvora": (
        lambda: VeraConfig(init_weights="vera", use_dora=True, vera_b=1), DvoRAConfig(vera_b=1),
    ),
    "dvora of lora": (lambda: LoRAConfig(use_dora=True, vera_d=0.1, vera_b=0.0), DvoRAConfig(r=8)),
    "ia3": (lambda: IA3Config(composition_mode="scale", init_weights="ia3"), IA3Config()),
    # the fields that are not given are LoRA's: which layers, and alpha
    "scale": (
        lambda: LoRAConfig(composition_mode="scale", r=1, alpha=1, init_weights="ia3"), SCALE,
    ),
    "scale, alpha": (lambda: LoRAConfig(composition_mode="scale", r=1), SCALE.replace(alpha=8)),
    "string": (lambda: AdapterConfig.load("lora[use_dora=True,r=4]"), DoRAConfig(r=4)),
    "change": (
        lambda: AdapterConfig.load("lora", composition_mode="scale", r=1), SCALE.replace(alpha=8),
    ),
    "dict": (
        lambda: AdapterConfig.load({"architecture": "lora", "use_dora": True, "r": 4}),
        DoRAConfig(r=4),
    ),
    "replace": (lambda: LoRAConfig(r=4).replace(use_dora=True), DoRAConfig(r=4)),
}  # fmt: skip


@pytest.mark.parametrize("case", MEANT)
def test_a_config_of_theirs_is_one_of_ours(case):
    make, expected = MEANT[case]
    assert type(make()) is type(expected)
    assert make() == expected


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LoRAConfig(composition_mode="scale"), r"r=8.*Write r=1"),
        (lambda: IA3Config(use_dora=True), r"IA3Config\(use_dora=True\): there is no method"),
        (lambda: LoRAConfig(use_dora=True, use_gating=True), "no method with these fields"),
        (lambda: LoRAConfig(use_dora="yes"), r"use_dora='yes'.*'DoRAConfig'"),
        (lambda: LoRAConfig(use_dora=True, lora_bias=True), "no field 'lora_bias'"),
        (lambda: LoRAConfig(composition_mode="scale", r=1, dropout=0.5), r"dropout=0\.5.*Write"),
        (
            lambda: VeraConfig(init_weights="bert"),
            r"init_weights='bert'.*Write init_weights='vera'",
        ),
        (lambda: LoRAConfig(use_dorra=True), "no field 'use_dorra'"),
    ],
)
def test_what_is_no_method_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_scale_multiplies_the_output_of_each_named_layer():
    """With `output_lora` too, which the paper does not scale."""
    torch.manual_seed(0)
    model = init(AutoModel.from_config(tiny_config("bert")).double().eval())
    config = LoRAConfig(
        composition_mode="scale", r=1, alpha=2, attn_matrices=["k"], intermediate_lora=True,
        output_lora=True,
    )  # fmt: skip
    model.add_adapter("a", config)
    for _, module in model.adapter_modules("a"):
        torch.nn.init.normal_(module.ia3_l)
    ends = ("attention.self.key", "intermediate.dense", "output.dense")
    paths = [path for path, _ in model.adapter_modules("a")]
    assert sorted(paths) == sorted(f"encoder.layer.{n}.{end}" for n in range(2) for end in ends)
    modules, inputs = dict(model.adapter_modules("a")), tiny_inputs("bert")
    model.set_active_adapters("a")
    with torch.no_grad():
        found = model(**inputs)[0]
        model.set_active_adapters(None)
        for path in paths:
            layer, scale = model.get_submodule(path), 2 * modules[path].ia3_l
            layer.weight.mul_(scale[:, None])
            layer.bias.mul_(scale)
        torch.testing.assert_close(found, model(**inputs)[0], rtol=1e-10, atol=1e-10)
