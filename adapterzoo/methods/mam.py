"""MAM — the mix-and-match adapter: a prefix in attention, a parallel bottleneck beside the MLP.

Paper: He et al. 2022, arXiv:2110.04366, §4.6: prefix tuning with a small bottleneck at attention,
a scaled parallel adapter at the feed-forward part.

Differs from the paper: prefix_length is 30 in both; the sizes are those of adapters. Differs from
adapters: nothing. Not in PEFT.
Cost: that of prefix tuning plus that of a parallel bottleneck.
"""

from __future__ import annotations

from adapterzoo.configs import AdapterConfig, ConfigUnion, config_strings


@config_strings.register("mam")
class MAMConfig(ConfigUnion):
    """`PrefixTuningConfig(bottleneck_size=800)` and `ParBnConfig()`; in files it is their union."""

    def __init__(
        self, prefix_tuning: AdapterConfig | None = None, adapter: AdapterConfig | None = None
    ) -> None:
        """Join the two.

        Args:
            prefix_tuning: another prefix.
            adapter: another bottleneck.
        """
        super().__init__(
            prefix_tuning or AdapterConfig.load("prefix_tuning", bottleneck_size=800),
            adapter or AdapterConfig.load("par_bn"),
        )

    @property
    def prefix_tuning(self) -> AdapterConfig:
        """The prefix."""
        return self.configs[0]

    @property
    def adapter(self) -> AdapterConfig:
        """The bottleneck."""
        return self.configs[1]
