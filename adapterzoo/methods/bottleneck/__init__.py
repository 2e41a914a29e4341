"""Bottleneck adapters, sequential and parallel.

Papers: Houlsby et al. 2019, arXiv:1902.00751 (`DoubleSeqBnConfig`); Pfeiffer et al. 2020,
arXiv:2005.00247 (`SeqBnConfig`); He et al. 2021, arXiv:2110.04366, eq. 7 (`ParBnConfig`);
Steitz & Roth 2024, arXiv:2406.06820 (`AdapterPlusConfig`).
f(x) = scaling · (W_up φ(W_down x + b_down) + b_up), with W_down `[width, d_model]`. With h a
sub-layer's output, inp the residual stream before it, and s = h + inp:

    sequential                  h ← h + f(h)
    original_ln_before, post-LN LN(s) ← LN(s + f(LN(s)))
    original_ln_before, pre-LN  s ← s + f(s)
    parallel                    h ← h + f(inp)

f and the four cases are in `layers.py`, the fields in `config.py`; `compacter.py` has other
matrices, `invertible.py` a function of the embeddings.

Differs from the papers: nothing. Differs from adapters: a seed gives each site its own values;
"post_add" also holds in pre-LN blocks, with the same meaning; a `Stack` of parallel bottlenecks
adds all of them, not the last.
Cost per site: 2 · width · d_model + width + d_model parameters.
Cannot do: configs that lose the model's own residual connection. A new adapter is not the identity,
except with "mam_adapter". If h is still scaled or dropped out on its way to the sum, f acts
before that.
"""

from __future__ import annotations

from collections.abc import Mapping

from adapterzoo.config import config_class, config_strings
from adapterzoo.spelling import spelled

from .config import BnConfig as BnConfig
from .formats import adapterhub
from .languages import NoLanguageAdaptersConfig as NoLanguageAdaptersConfig

spelled(adapterhub)(BnConfig)


@config_strings.register("seq_bn", "pfeiffer")
@config_class
class SeqBnConfig(BnConfig):
    """Pfeiffer et al. 2020: one bottleneck per block, after the feed-forward part."""

    mh_adapter: bool = False
    output_adapter: bool = True
    reduction_factor: float | Mapping[str, float] = 16
    non_linearity: str = "relu"
    original_ln_before: bool = True


@config_strings.register("double_seq_bn", "houlsby")
@config_class
class DoubleSeqBnConfig(BnConfig):
    """Houlsby et al. 2019: one bottleneck after attention and one after the feed-forward part."""

    mh_adapter: bool = True
    output_adapter: bool = True
    reduction_factor: float | Mapping[str, float] = 16
    non_linearity: str = "swish"


@config_strings.register("seq_bn_inv", "pfeiffer+inv")
@config_class
class SeqBnInvConfig(SeqBnConfig):
    """Pfeiffer et al. 2020 (MAD-X): one bottleneck per block, and an invertible function."""

    inv_adapter: str | None = "nice"
    inv_adapter_reduction_factor: float | None = 2


@config_strings.register("double_seq_bn_inv", "houlsby+inv")
@config_class
class DoubleSeqBnInvConfig(DoubleSeqBnConfig):
    """Two bottlenecks per block, and an invertible function."""

    inv_adapter: str | None = "nice"
    inv_adapter_reduction_factor: float | None = 2


@config_strings.register("par_bn", "parallel")
@config_class
class ParBnConfig(BnConfig):
    """He et al. 2021: a wide bottleneck, parallel to the feed-forward part; starts as identity."""

    mh_adapter: bool = False
    output_adapter: bool = True
    reduction_factor: float | Mapping[str, float] = 2
    non_linearity: str = "relu"
    init_weights: str = "mam_adapter"
    is_parallel: bool = True
    scaling: float | str = 4.0


@config_strings.register("scaled_par_bn", "scaled_parallel")
def scaled_par_bn() -> ParBnConfig:
    """He et al. 2021 with a learned scaling."""
    return ParBnConfig(scaling="learned")


@config_strings.register("adapter_plus")
@config_class
class AdapterPlusConfig(BnConfig):
    """Steitz & Roth 2024: after the block, a learned scaling per feature, stochastic depth."""

    mh_adapter: bool = False
    output_adapter: bool = True
    reduction_factor: float | Mapping[str, float] = 96
    non_linearity: str = "gelu"
    original_ln_before: bool = True
    original_ln_after: bool = False
    residual_before_ln: bool | str = False
    init_weights: str = "houlsby"
    scaling: float | str = "channel"
    stochastic_depth: float = 0.1


@config_strings.register("compacter")
@config_class
class CompacterConfig(BnConfig):
    """Mahabadi et al. 2021: after attention and after the feed-forward part."""

    mh_adapter: bool = True
    output_adapter: bool = True
    reduction_factor: float | Mapping[str, float] = 32
    non_linearity: str = "gelu"
    phm_layer: bool = True


@config_strings.register("compacter++")
@config_class
class CompacterPlusPlusConfig(CompacterConfig):
    """Mahabadi et al. 2021: after the feed-forward part only."""

    mh_adapter: bool = False
    original_ln_before: bool = True
