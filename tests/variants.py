"""Every registered method, with the options that take another path through its code."""

from __future__ import annotations

from swept import all_but

from adapterzoo import methods as _methods  # noqa: F401  registers the architectures
from adapterzoo.config import AdapterConfig, architectures

_OWN_RULES = "shared_phm_rule=False,learn_phm=False,shared_W_phm=True,factorized_phm_W=False"
# a method that is not here is tried with its defaults
_OPTIONS: dict[str, tuple[str, ...]] = {
    "lora": ("lora[dropout=0.1]", "lora[lora_bias=True,use_gating=True]"),
    "dora": ("dora[dropout=0.1]", "dora[convention='adapterhub']"),
    # as a series or exactly; constrained, with one block
    "oft": (
        "oft[oft_block_size=4]",
        "oft[r=4,oft_block_size=0,use_cayley_neumann=False,module_dropout=0.3]",
        "oft[oft_block_size=8,block_share=True,coft=True,eps=0.5]",
    ),
    "boft": ("boft", "boft[boft_n_butterfly_factor=2,boft_dropout=0.3]"),
    # one matrix for all shards, with a last one that is not full; narrower; one for each of rows
    "miss": (
        "miss[r=5,miss_dropout=0.1]",
        "miss[r=4,init_weights='mini',mini_r=2]",
        "miss[r=4,init_weights='bat']",
    ),
    "bottleneck": (
        "seq_bn[dropout=0.1]",
        "double_seq_bn[stochastic_depth=0.3,use_gating=True]",
        # reads the input of another module of the block
        "par_bn[scaling='learned',ln_before=True]",
        "adapter_plus[init_weights='bert']",
        # a function in front of the first block, and what it shares with heads
        "seq_bn_inv[non_linearity='tanh']",
        # a rule that all layers share, and matrices in two factors
        "compacter[reduction_factor=4]",
        # frozen rules of their own, W that all layers share, and a function in front
        f"compacter++[{_OWN_RULES},inv_adapter='nice',inv_adapter_reduction_factor=2]",
    ),
    # the weights of one up-projection are a constant
    "mtl_lora": ("mtl_lora[n_up_projection=2]",),
    "union": ("lora[dropout=0.1]|par_bn",),
}

VARIANTS: dict[str, AdapterConfig] = {}
for _name in architectures:
    if _name == "no_language_adapters":
        # only X-MOD has any: formats/test_adapterhub_xmod.py
        continue
    if _name in _OPTIONS:
        VARIANTS.update({text: AdapterConfig.load(text) for text in _OPTIONS[_name]})
    elif _name == "trainable_tokens":
        # most tokens, so that each row of a batch has some
        given = {"architecture": _name, "token_indices": [*range(60)]}
        VARIANTS[_name] = AdapterConfig.from_dict(given)
    else:
        VARIANTS[_name] = AdapterConfig.from_dict({"architecture": _name})

# one of each way to act: what takes seconds for each variant leaves the others to the sweep
_QUICK = {
    "lora[dropout=0.1]",
    "dora[dropout=0.1]",
    "seq_bn[dropout=0.1]",
    "compacter[reduction_factor=4]",
    "seq_bn_inv[non_linearity='tanh']",
    "mtl_lora[n_up_projection=2]",
    "boft",
    "reft",
    "prefix_tuning",
    "prompt_tuning",
}
SWEPT = all_but(_QUICK, VARIANTS)
