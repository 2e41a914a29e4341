"""(IA)³ — Infused Adapter by Inhibiting and Amplifying Inner Activations.

Paper: Liu et al. 2022, arXiv:2205.05638, §3.3: k ← ℓ_k ⊙ k, v ← ℓ_v ⊙ v, and h ← ℓ_ff ⊙ h for the
inner states of the feed-forward part after the non-linearity, at the input of the last layer.
y = (W x + b) ⊙ ℓ · alpha at a layer's output, y = W (x ⊙ ℓ · alpha) + b at its input.

Differs from the paper: nothing with alpha = 1. Differs from PEFT: nothing; its files have alpha in
ℓ. Differs from adapters: `convention="adapterhub"` scales the first feed-forward layer's output,
before the non-linearity; merging also scales the bias.
Cost per site: d_out parameters, or d_in if the input is scaled; one product per activation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from adapterzoo.anatomy import Anatomy, Role, Site
from adapterzoo.config import (
    FACTOR,
    SEED,
    AdapterConfig,
    Choice,
    Maybe,
    Placement,
    field,
    method_config,
)
from adapterzoo.contracts import BaseLayer, WeightAdapter
from adapterzoo.errors import CheckpointError, ConfigError, argument
from adapterzoo.kernels.grouped import RowGroups
from adapterzoo.patterns import Targets, matches
from adapterzoo.peft_arguments import PeftArgument, PeftArguments
from adapterzoo.spelling import (
    CHANNEL,
    AdapterHubSpelling,
    Container,
    ConvolutionShape,
    PeftLayer,
    PeftPart,
    PeftSpelling,
    Tensors,
    same,
    spelled,
)

from ._init import DTYPE, constant, drawn, dtype_named, generator, normal
from ._peft import EXCLUDED, STORED, TARGETS, ours, rows_of, whole_width
from ._targets import FEED_FORWARD, FLAGS, TargetedConfig, as_flags, place


@method_config("ia3")
class IA3Config(TargetedConfig):
    """Config of (IA)³; `TargetedConfig` selects the layers.

    Attributes:
        r: must be 1.
        alpha: a factor of every vector.
        convention: "paper": the feed-forward vector scales the input of the last layer;
            "adapterhub": the output of the first; None: "adapterhub" with `output_lora`, which only
            exists there, otherwise "paper". The field then holds the chosen one.
        dropout: must be 0: there is no low-rank path on which features could be dropped.
        init_weights: "ia3": ones, so that a new adapter changes nothing; "bert": normal with
            deviation 0.02; "random": normal with deviation 1; "lora": zeros.
        init_weights_seed: makes the initial values reproducible, whatever was drawn before.
        feedforward_modules: the layers of `target_modules` whose input is scaled, by names or a
            regular expression, as in PEFT; an empty list: none.
        dtype: dtype of the parameters, by name ("float32"); None for that of the layer.
    """

    choosing: ClassVar[frozenset[str]] = TargetedConfig.choosing | {"feedforward_modules"}
    attn_matrices: tuple[str, ...] = ("k", "v")
    intermediate_lora: bool = True
    r: int = field(1, Choice(1))
    alpha: float = field(1, FACTOR)
    dropout: float = field(0.0, Choice(0.0))
    init_weights: str = field("ia3", Choice("ia3", "bert", "random", "lora"))
    init_weights_seed: int | None = field(None, SEED)
    convention: str | None = field(None, Maybe(Choice("paper", "adapterhub")))
    feedforward_modules: str | tuple[str, ...] | None = field(None, Targets())
    dtype: str | None = field(None, DTYPE)

    def __post_init__(self) -> None:
        """Check the fields.

        Raises:
            ConfigError: a value is invalid, or the paper's convention has no `output_lora`.
        """
        super().__post_init__()
        if self.convention is None:
            object.__setattr__(self, "convention", "adapterhub" if self.output_lora else "paper")
        if self.output_lora and self.convention == "paper":
            raise ConfigError(
                f"{type(self).__name__}(output_lora=True, convention='paper'): the paper scales "
                f"the input of that layer. Write convention='adapterhub'."
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

    def _stands_in(self, role: Role) -> bool:
        # the inner states of a mixer are the input of its last layer too
        return role in ("mixer_out", "mlp_out") if self.convention == "paper" else "_in" in role

    def acts(self, anatomy: Anatomy) -> set[tuple[Site, str]]:
        """Return where an adapter acts, and whether it scales the input."""
        found = super().acts(anatomy)
        return {(s, f"{place} {'input' * self.scales_input(s)}") for s, place in found}

    def scales_input(self, site: Site) -> bool:
        """Return whether the vector of a layer scales its input."""
        if self.feedforward_modules is not None:
            return matches(site.path, self.feedforward_modules)
        by_role = self.target_modules is None and (
            self.intermediate_lora or self.target_parameters is None
        )
        return by_role and site.role in ("mixer_out", "mlp_out") and self.convention == "paper"


class IA3(WeightAdapter):
    """y = base(x) ⊙ ℓ · alpha, or base(x ⊙ ℓ · alpha).

    Attributes:
        ia3_l: ℓ `[*experts, d_out]`, or `[*experts, d_in]` if it scales the input.
        acts_on: "input" if it scales the input.
        alpha: a factor.
    """

    container = "loras"
    adapts_convolutions = True
    splits = frozenset({"in", "out"})

    def __init__(
        self, config: IA3Config, site: Site, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Make the vector.

        Args:
            config: the adapter's config.
            site: the site, which sets the widths.
            device: device of the vector.
            dtype: the layer's dtype.

        Raises:
            ConfigError: it would scale the input of an embedding.
        """
        super().__init__()
        self.scales_input = config.scales_input(site)
        if self.scales_input and site.kind == "embedding":
            raise ConfigError(
                f"IA3Config(feedforward_modules=…): {site.path!r} reads token numbers, which "
                f"cannot be scaled. Leave it out there."
            )
        self.acts_on = "input" if self.scales_input else "output"  # type: ignore[misc]
        width = site.channels if self.scales_input else site.d_out
        source = generator(config.init_weights_seed, f"{site.path}{site.role}")
        fresh = {
            "ia3": constant(1.0),
            "bert": normal(0.02, source),
            "random": normal(1.0, source),
            "lora": constant(0.0),
        }[config.init_weights]
        dtype = dtype_named(config.dtype, dtype)
        self.ia3_l = drawn((*site.lead, width), fresh, device, dtype)
        self.alpha, self.groups = config.alpha, site.groups
        self.split_dims = {"ia3_l": ("in" if self.scales_input else "out",)}

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

    @property
    def row_options(self) -> Hashable | None:
        """Dtype and what is scaled; None with experts."""
        return None if self.ia3_l.dim() > 1 else (self.ia3_l.dtype, self.scales_input)

    def row_tensors(self, base: BaseLayer, dtype: torch.dtype) -> Mapping[str, Tensor | float]:
        """Return ℓ · alpha."""
        return {"scale": self.scale(dtype)}

    def forward_rows(
        self, stacks: Mapping[str, Any], groups: RowGroups, x: Tensor, base: BaseLayer
    ) -> Tensor:
        """Return each row of the batch with its own scale. `x` `[rows, *tokens, d_in]`."""
        if self.scales_input:
            return base(_scaled_rows(stacks["scale"], groups, x))
        return _scaled_rows(stacks["scale"], groups, base(x))

    def convolved(self, x: Tensor, base: BaseLayer) -> Tensor:
        """Return the scaled convolution, `[*rows, d_out, *places]`."""
        if self.scales_input:
            return base(x * base.by_channel(self.scale(x.dtype)))
        y = base(x)
        return y * base.by_channel(self.scale(y.dtype))

    def merged_weight(self, w: Tensor, base: BaseLayer) -> Tensor:
        """Return the merged weight diag(ℓ · alpha) w, or w diag(ℓ · alpha), `[d_out, d_in]`."""
        scale = self.scale(w.dtype)
        if not self.scales_input:
            return w * scale.unsqueeze(-1)
        if self.groups > 1:
            # each group of outputs reads its own channels
            rows = scale.view(self.groups, -1).repeat_interleave(len(w) // self.groups, 0)
            scaled: Tensor = w.unflatten(-1, (rows.shape[1], -1)) * rows.unsqueeze(-1)
            return scaled.flatten(-2)
        # a convolution has several inputs per channel
        return w * scale.repeat_interleave(w.shape[-1] // scale.shape[-1], -1).unsqueeze(-2)

    def merged_bias(self, b: Tensor, base: BaseLayer) -> Tensor:
        """Return the merged bias b ⊙ ℓ · alpha `[d_out]`; scaling the input does not change it."""
        return b if self.scales_input else b * self.scale(b.dtype)

    def identity_values(self, base: BaseLayer) -> dict[str, Tensor]:
        """Return the vector 1 / alpha, for which the adapter changes nothing."""
        return {"ia3_l": torch.full_like(self.ia3_l, 1.0 / self.alpha)}


IA3Config.adapter_class = IA3


def _scaled_rows(stack: Tensor, groups: RowGroups, t: Tensor) -> Tensor:
    """Return `[rows, …, width]` with each row times its adapter's vector, of `[n, width]`."""
    scale, own = groups.taken(stack.to(t.dtype)), groups.acting(t)
    return groups.placed(
        own * scale.view(len(scale), *(1 for _ in own.shape[2:]), scale.shape[1]), t
    )


# --- in the peers' files ---

_FIXED = {
    "composition_mode": "scale", "use_dora": False, "use_gating": False,
    "vera_b": None, "vera_d": None,
}  # fmt: skip
_ARGUMENTS = PeftArguments(
    class_name="IA3Config",
    fields={
        **{n: a for n, a in TARGETS.items() if not n.startswith("layers")},
        **EXCLUDED,
        **STORED,
        "feedforward_modules": ours(None, "feedforward_modules", Targets()),
        "init_ia3_weights": PeftArgument(
            True,
            "init_weights",
            {True: "ia3", False: "random"},
        ),
    },
    subsets={"feedforward_modules": lambda config, site: config.scales_input(site)},
)


def _read(tensors: Tensors, _config: AdapterConfig) -> Tensors:
    vectors, rest = dict(tensors), {}
    if vectors["lora_B"].dim() > 1:
        rest = {"ia3_l": vectors.pop("lora_B").squeeze(-1)}
    # the comparison with the model finds surplus tensors
    return vectors | rest


def _write(tensors: Tensors, _config: AdapterConfig) -> Tensors:
    return {"lora_B": tensors["ia3_l"].unsqueeze(-1)}


def _scales_input(tensors: Tensors) -> bool:
    return tensors["ia3_l"].shape[0] == 1


def _from_peft(layer: PeftLayer) -> Tensors:
    return {"ia3_l": layer.tensors["ia3_l"].squeeze(0 if _scales_input(layer.tensors) else 1)}


def _of_convolution(vector: Tensor, layer: PeftLayer) -> Tensor:
    """Return PEFT's vector of a convolution as that of a linear layer, `[d_out, 1]` or `[1, d]`."""
    site, named = layer.site, layer.fields.get("feedforward_modules") or ()
    inputs = vector.numel() == site.channels
    if site.channels == site.d_out:
        whole = isinstance(named, str) and re.fullmatch(named, layer.name) is not None
        inputs = whole or any(layer.name.endswith(name) for name in named)
    return vector.reshape((1, -1) if inputs else (-1, 1))


def _unsayable(placement: Placement) -> str | None:
    site = placement.site
    if site.parameter is not None:
        return f"an adapter at the parameter {site.parameter!r} of {site.path!r}"
    if site.kind == "embedding":
        return f"a vector at {site.path!r}, an embedding, where PEFT has no IA3"
    if len(site.kernel) == 1:
        return f"a vector at {site.path!r}, a 1-D convolution, where PEFT has no IA3"
    if site.output_slice is not None and cast("IA3Config", placement.config).scales_input(site):
        return f"a vector at {site.path!r} that scales the input of one part of the layer"
    return None


def _join(parts: Sequence[PeftPart], _weight: Callable[[], Tensor | None]) -> Tensors:
    """Return the product of all vectors, with 1 for features without one.

    Raises:
        CheckpointError: some adapters scale the layer's input and others its output.
    """
    site = parts[0].placement.site
    inputs = [cast("IA3Config", part.placement.config).scales_input(site) for part in parts]
    if len({*inputs}) > 1:
        raise CheckpointError(
            f"at {site.path!r} one adapter scales the input and another the output, but PEFT has "
            f"one vector. Write {argument('format', 'native')}."
        )
    vector = parts[0].tensors["ia3_l"].new_ones(site.channels if inputs[0] else whole_width(site))
    for part in parts:
        mine = slice(None) if inputs[0] else rows_of(part.placement.site)
        vector[mine] *= part.tensors["ia3_l"] * cast("IA3Config", part.placement.config).alpha
    return {"ia3_l": vector.unsqueeze(0 if inputs[0] else 1)}


# AdapterHub: LoRA with one vector that scales the output; PEFT: ℓ `[d_out, 1]` for outputs and
# `[1, d_in]` for inputs, of which alpha becomes a part
spelled(
    lambda config: AdapterHubSpelling(
        config=config,
        architecture=("lora",),
        fixed=_FIXED,
        implied={"convention": "adapterhub"},
        # LoRAConfig(composition_mode="scale") names the layers whose outputs are scaled
        as_another={"convention": "adapterhub", "init_weights": "ia3"},
        fields=FLAGS | same("r", "alpha", "dropout", "init_weights", "init_weights_seed", "dtype"),
        containers=(Container("loras", "layer", read=_read, write=_write),),
        feed_forward=FEED_FORWARD,
        place=place,
        as_flags=as_flags,
    ),
    lambda config: PeftSpelling(
        config=config,
        peft_type="IA3",
        arguments=_ARGUMENTS,
        tensors={"ia3_l": ("ia3_l",)},
        convolution_shapes={"ia3_l": ConvolutionShape(_of_convolution, CHANNEL.write)},
        subsets={"feedforward_modules": _scales_input},
        read=_from_peft,
        unsayable=_unsayable,
        write=lambda part: _join([part], lambda: None),
        join=_join,
        write_layers=lambda layers, _said: [{"init_ia3_weights": True} for _ in layers],
    ),
)(IA3Config)
