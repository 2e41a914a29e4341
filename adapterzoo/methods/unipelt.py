"""UniPELT — prefix tuning, a bottleneck and LoRA, each with a gate.

Paper: Mao et al. 2022, arXiv:2110.07577, §3.2: for each sequence, a gate scales each of the three.

Differs from the paper: nothing. Differs from adapters: gates read the real tokens of the prompt;
`"unipelt[convention='adapterhub']"` computes the same as adapters, in which a gate replaces LoRA's
alpha / r; alpha / r is 1 here. Not in PEFT.
Cost: that of the three methods, and d_model + 1 parameters for each gate.
"""

from __future__ import annotations

from adapterzoo.configs import AdapterConfig, ConfigUnion, config_strings


@config_strings.register("unipelt")
class UniPELTConfig(ConfigUnion):
    """A gated prefix of 10, `SeqBnConfig()` and `LoRAConfig(r=8, alpha=8)`; a union in files."""

    def __init__(
        self,
        prefix_tuning: AdapterConfig | None = None,
        adapter: AdapterConfig | None = None,
        lora: AdapterConfig | None = None,
    ) -> None:
        """Join the three, each with a gate.

        Args:
            prefix_tuning: another prefix.
            adapter: another bottleneck.
            lora: another LoRA, which keeps its scaling alpha / r.
        """
        members = (
            prefix_tuning or AdapterConfig.load("prefix_tuning", prefix_length=10),
            adapter or AdapterConfig.load("seq_bn"),
            lora or AdapterConfig.load("lora", r=8, alpha=8),
        )
        super().__init__(*(member.replace(use_gating=True) for member in members))

    @property
    def prefix_tuning(self) -> AdapterConfig:
        """The prefix."""
        return self.configs[0]

    @property
    def adapter(self) -> AdapterConfig:
        """The bottleneck."""
        return self.configs[1]

    @property
    def lora(self) -> AdapterConfig:
        """The LoRA."""
        return self.configs[2]
