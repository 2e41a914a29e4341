"""(IA)³ — Infused Adapter by Inhibiting and Amplifying Inner Activations.

Paper: Liu et al. 2022, arXiv:2205.05638, §3.3: k ← ℓ_k ⊙ k, v ← ℓ_v ⊙ v, and h ← ℓ_ff ⊙ h for the
inner states of the feed-forward part after the non-linearity, at the input of the last layer.
y = (W x + b) ⊙ ℓ · alpha at a layer's output, y = W (x ⊙ ℓ · alpha) + b at its input.

Differs from the paper: nothing with alpha = 1. Differs from PEFT: nothing; alpha becomes a part of
ℓ in its files. Differs from adapters: `convention="adapterhub"` scales the first feed-forward
layer's output, before the non-linearity; merging scales the bias too.
Cost per site: d_out parameters, or d_in if the input is scaled; one product per activation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Self

import torch
from torch import Tensor

from adapterzoo.anatomy import Role, Site
from adapterzoo.config_base import config_class
from adapterzoo.configs import architectures, config_strings
from adapterzoo.contracts import BaseLayer, WeightAdapter
from adapterzoo.errors import ConfigError
from adapterzoo.fields import FACTOR, SEED, Choice, Maybe, field
from adapterzoo.kernels.grouped import Groups
from adapterzoo.spelling import spelled

from . import _ia3_spelling
from ._init import DTYPE, DTYPES, constant, drawn, generator, normal
from ._patterns import Targets, matches
from ._rows import features, restored
from ._targets import TargetedConfig


@architectures.register("ia3")
@config_strings.register("ia3")
@spelled(_ia3_spelling.adapterhub, _ia3_spelling.peft)
@config_class
class IA3Config(TargetedConfig):
    """Config of (IA)³; `TargetedConfig` selects the layers.

    Attributes:
        r: must be 1.
        alpha: a factor of every vector.
        convention: "paper": the feed-forward vector scales the input of the last layer;
            "adapterhub": the output of the first; None: "adapterhub" with `output_lora`, which only
            that one has, otherwise "paper". Afterwards the field has the chosen one.
        dropout: must be 0: there is no low rank on whose way features could be dropped.
        init_weights: "ia3": ones, so that a fresh adapter changes nothing; "bert": normal values
            with deviation 0.02; "lora": zeros.
        init_weights_seed: makes the initial values reproducible, whatever was drawn before.
        feedforward_modules: the layers of `target_modules` whose input is scaled, by names or a
            regular expression, as in PEFT; an empty list: none.
        dtype: of the parameters, by name ("float32"); None for that of the layer.
    """

    architecture: ClassVar[str] = "ia3"

    attn_matrices: tuple[str, ...] = ("k", "v")
    intermediate_lora: bool = True
    r: int = field(1, Choice(1))
    alpha: float = field(1, FACTOR)
    dropout: float = field(0.0, Choice(0.0))
    init_weights: str = field("ia3", Choice("ia3", "bert", "lora"))
    init_weights_seed: int | None = field(None, SEED)
    convention: str | None = field(None, Maybe(Choice("paper", "adapterhub")))
    feedforward_modules: str | tuple[str, ...] | None = field(None, Targets())
    dtype: str | None = field(None, DTYPE)

    def __post_init__(self) -> None:
        """Check the fields.

        Raises:
            ConfigError: a value is not legal, or the paper's convention has no `output_lora`.
        """
        super().__post_init__()
        if self.convention is None:
            object.__setattr__(self, "convention", "adapterhub" if self.output_lora else "paper")
        if self.output_lora and self.convention == "paper":
            raise ConfigError(
                f"{type(self).__name__}(output_lora=True, convention='paper'): there the last "
                f"feed-forward layer has the vector of intermediate_lora at its input. Write "
                f"intermediate_lora=True, or convention='adapterhub'."
            )

    @property
    def starts_as_identity(self) -> bool:
        """Whether the vectors start as ones."""
        return self.init_weights == "ia3"

    def _roles(self) -> list[Role]:
        roles = super()._roles()
        # the output of the non-linearity is the input of the last layer
        read_by: Role = "mlp_out" if self.convention == "paper" else "mlp_in"
        return list(dict.fromkeys(read_by if role == "mlp_in" else role for role in roles))

    def scales_input(self, site: Site) -> bool:
        """Return whether the vector of a layer scales its input."""
        if self.feedforward_modules is not None:
            return matches(site.path, self.feedforward_modules)
        by_role = self.target_modules is None and self.intermediate_lora
        return by_role and site.role == "mlp_out" and self.convention == "paper"

    def build(self, site: Site, device: torch.device, dtype: torch.dtype) -> IA3:
        """Return a fresh adapter for the site."""
        return IA3(self, site, device, DTYPES[self.dtype] if self.dtype else dtype)


class IA3(WeightAdapter):
    """y = base(x) ⊙ ℓ · alpha, or base(x ⊙ ℓ · alpha).

    Attributes:
        ia3_l: ℓ `[*experts, d_out]`, or `[*experts, d_in]` if the input is scaled.
        acts_on: "input" if the input is scaled.
        alpha: a factor.
    """

    container = "loras"

    def __init__(
        self, config: IA3Config, site: Site, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Make the vector.

        Args:
            config: of the adapter.
            site: gives the widths.
            device: of the vector.
            dtype: of the vector.

        Raises:
            ConfigError: the input of an embedding is to be scaled.
        """
        super().__init__()
        self.scales_input = config.scales_input(site)
        if self.scales_input and site.kind == "embedding":
            raise ConfigError(
                f"IA3Config(feedforward_modules={config.feedforward_modules!r}) at {site.path!r}: "
                f"an embedding reads token numbers, which cannot be scaled. Leave it out there."
            )
        self.acts_on = "input" if self.scales_input else "output"  # type: ignore[misc]
        lead = (site.experts,) if site.experts else ()
        width = site.d_in if self.scales_input else site.d_out
        fresh = {
            "ia3": constant(1.0),
            "bert": normal(0.02, generator(config.init_weights_seed, f"{site.path}{site.role}")),
            "lora": constant(0.0),
        }[config.init_weights]
        self.ia3_l = drawn((*lead, width), fresh, device, dtype)
        self.alpha = config.alpha

    def scale(self, dtype: torch.dtype) -> Tensor:
        """Return ℓ · alpha in a dtype, `[*experts, width]`."""
        vector = self.ia3_l.to(dtype)
        return vector if self.alpha == 1.0 else vector * self.alpha

    def forward(self, x: Tensor, base: BaseLayer) -> Tensor:
        """Return the scaled layer. `x` `[*batch, d_in]` → `[*batch, d_out]`."""
        if self.scales_input:
            return base(x * self.scale(x.dtype))
        y = base(x)
        return y * self.scale(y.dtype)

    @classmethod
    def supports_batching(cls, adapters: Sequence[Self]) -> bool:
        """Return whether all scale the same side, of features."""
        return len({(a.scales_input, a.ia3_l.dtype, a.ia3_l.dim()) for a in adapters}) == 1 and (
            adapters[0].ia3_l.dim() == 1
        )

    @classmethod
    def forward_batched(
        cls, adapters: Sequence[Self], groups: Groups, x: Tensor, base: BaseLayer
    ) -> Tensor:
        """Return each row of the batch with its own scale. `x` `[rows, *tokens, d_in]`."""
        if not groups.rows:
            return base(x)
        to = x if adapters[0].scales_input else base(x)
        scales = features([a.scale(to.dtype) for a in adapters], groups, to.dim())
        scaled = restored(to * scales, to, groups)  # [rows, *tokens, width]
        return base(scaled) if adapters[0].scales_input else scaled

    def weight(self, w: Tensor, base: BaseLayer) -> Tensor:
        """Return the merged weight diag(ℓ · alpha) w, or w diag(ℓ · alpha), `[d_out, d_in]`."""
        scale = self.scale(w.dtype)
        return w * scale.unsqueeze(-2 if self.scales_input else -1)

    def bias(self, b: Tensor, base: BaseLayer) -> Tensor:
        """Return the merged bias b ⊙ ℓ · alpha `[d_out]`; the input's scale leaves it."""
        return b if self.scales_input else b * self.scale(b.dtype)

    def identity_values(self, base: BaseLayer) -> dict[str, Tensor]:
        """Return the vector that changes nothing at alpha = 1."""
        return {"ia3_l": torch.full_like(self.ia3_l, 1.0 / self.alpha)}
