"""Methods that are unions of others: MAM and UniPELT; in files each is the union of its members.

MAM, the mix-and-match adapter (He et al. 2021, arXiv:2110.04366, §4.6): prefix tuning with a small
bottleneck at attention, a scaled parallel adapter at the feed-forward part. Differs from the paper:
prefix_length is 30 in both; the sizes are those of adapters. Differs from adapters: nothing.

UniPELT (Mao et al. 2022, arXiv:2110.07577, §3.2): for each sequence, a gate scales each of prefix
tuning, a bottleneck and LoRA. Differs from the paper: nothing. Differs from adapters: gates read
the real tokens of the prompt; `"unipelt[convention='adapterhub']"` computes the same as adapters,
where a gate replaces LoRA's alpha / r; alpha / r is 1 here.

Neither is in PEFT. Cost: that of the members, and d_model + 1 parameters for each gate.
"""

from __future__ import annotations

from adapterzoo.config import AdapterConfig, ConfigUnion, config_strings


def _member(number: int, what: str) -> property:
    return property(lambda union: union.configs[number], doc=what)


@config_strings.register("mam")
class MAMConfig(ConfigUnion):
    """`PrefixTuningConfig(bottleneck_size=800)` and `ParBnConfig()`; in files it is their union."""

    def __init__(
        self, prefix_tuning: AdapterConfig | None = None, adapter: AdapterConfig | None = None
    ) -> None:
        """Create the union.

        Args:
            prefix_tuning: a prefix other than the usual one.
            adapter: a bottleneck other than the usual one.
        """
        super().__init__(
            prefix_tuning or AdapterConfig.load("prefix_tuning", bottleneck_size=800),
            adapter or AdapterConfig.load("par_bn"),
        )

    prefix_tuning = _member(0, "The prefix.")
    adapter = _member(1, "The bottleneck.")


@config_strings.register("unipelt")
class UniPELTConfig(ConfigUnion):
    """A gated prefix of 10, `SeqBnConfig()` and `LoRAConfig(r=8, alpha=8)`; a union in files."""

    def __init__(
        self,
        prefix_tuning: AdapterConfig | None = None,
        adapter: AdapterConfig | None = None,
        lora: AdapterConfig | None = None,
    ) -> None:
        """Create the union of the three, each with a gate.

        Args:
            prefix_tuning: a prefix other than the usual one.
            adapter: a bottleneck other than the usual one.
            lora: a LoRA other than the usual one; it keeps its scaling alpha / r.
        """
        members = (
            prefix_tuning or AdapterConfig.load("prefix_tuning", prefix_length=10),
            adapter or AdapterConfig.load("seq_bn"),
            lora or AdapterConfig.load("lora", r=8, alpha=8),
        )
        super().__init__(*(member.replace(use_gating=True) for member in members))

    prefix_tuning = _member(0, "The prefix.")
    adapter = _member(1, "The bottleneck.")
    lora = _member(2, "The LoRA.")
