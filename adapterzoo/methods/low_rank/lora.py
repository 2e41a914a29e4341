"""LoRA — Low-Rank Adaptation.

Paper: Hu et al. 2021, arXiv:2106.09685, eq. 3; rsLoRA: Kalajdzievski 2023, arXiv:2312.03732.
y = W x + b + s · B A x with A `[rank, d_in]`, B `[d_out, rank]` and s = alpha / rank, or
alpha / √rank with `use_rslora`.

With `alora_invocation_tokens` it is aLoRA (Greenewald et al. 2025, arXiv:2504.12397, §3): the
invocation is a sequence of tokens, and each row gets the update from its last invocation onward.
Earlier tokens, and rows without an invocation, get the base layer, so their keys and values are
those of the base model and need not be computed again.

Differs from the papers: dropout before A, as in all implementations. Differs from PEFT: parameters
have the dtype of their layer unless `dtype` says otherwise; PiSSA and OLoRA do not change the base
weight (`Start`); aLoRA acts in models of every class, padding is never part of the invocation,
`generate` with `use_cache=False` keeps the place of the invocation, beam search works, and a call
that does not show where the invocation is (`inputs_embeds`, a later part of a sequence outside
`generate`) is refused. Differs from adapters: a `Stack` adds the updates; a gated update is also
scaled by s; without `convention="adapterhub"` a gate does not read padding.
Cost per site: rank · (d_in + d_out) parameters, two products of that size, four with a start.
aLoRA cannot do: merging, encoders, routed experts.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from adapterzoo.anatomy import Anatomy, Site
from adapterzoo.anatomy.tree import below
from adapterzoo.averaging import Combination
from adapterzoo.config import (
    FLAG,
    AdapterConfig,
    Check,
    Choice,
    Layers,
    Maybe,
    Placement,
    change_forms,
    field,
    method_config,
)
from adapterzoo.contracts import (
    BaseLayer,
    InputPlan,
    LayerData,
    OriginalWeight,
    WeightPlan,
    compute_dtype,
)
from adapterzoo.errors import ConfigError, SiteError, StateError, listing
from adapterzoo.kernels.grouped import RowGroups, grouped_low_rank
from adapterzoo.kernels.low_rank import low_rank
from adapterzoo.methods._init import constant, drawn, generator
from adapterzoo.methods._parts import Gate
from adapterzoo.methods._targets import TARGETS, TargetedConfig, fields_at
from adapterzoo.tensor_parallel import LayerSplit

from .factors import SIDES, Factors, LowRank, LowRankConfig
from .starts import (
    OPTIONS,
    PLANS,
    Components,
    Covariance,
    Starts,
    factors,
    principal,
    replaces_weight,
    starts_from_weight,
)


class Options(Check):
    """Options by name; `LoRAConfig` checks them one by one."""

    legal = "a dict of options by name"
    example: ClassVar[object] = {}

    def fits(self, value: object) -> bool:
        """Return whether the value is a mapping from names."""
        return isinstance(value, Mapping) and all(isinstance(name, str) for name in value)


class Invocation(Layers):
    """The token ids of an invocation."""

    legal = "a list of token ids, as tokenizer.encode(text, add_special_tokens=False) returns it"

    def fits(self, value: object) -> bool:
        """Return whether the value is a non-empty list of integers from 0."""
        return bool(value) and super().fits(value)


@change_forms.register("lora")
@method_config("lora")
class LoRAConfig(LowRankConfig):
    """Config of LoRA; `TargetedConfig` chooses the layers, `LowRankConfig` how large they are.

    Attributes:
        init_weights: also "pissa", the principal part of the weight, by an exact SVD;
            "pissa_niter_4", by that many iterations of a randomized SVD; "olora", by QR; "eva" and
            "corda", from the layers' inputs, and "loftq", from the weights before quantization, see
            `add_adapter(init_data=…)`.
        init_options: options of "eva" (`rho`, `tau`, `use_label_mask`, `whiten` and
            `adjust_scaling_factors`) or "corda" (`corda_method`), as in PEFT.
        alora_invocation_tokens: token ids of the invocation, as a tokenizer without special tokens
            returns them (aLoRA); None: the adapter acts at all tokens.
        use_gating: scale the update by a learned gate, one number per sequence (UniPELT).
        convention: the gate averages the prompt's real tokens ("paper") or all ("adapterhub").
        lora_bias: give B a bias.
        ensure_weight_tying: if the token table, or an output layer tied to it, is adapted or
            copied, so are all layers with this weight, by one adapter.
    """

    training_fields: ClassVar[frozenset[str]] = LowRankConfig.training_fields | {"init_options"}

    init_weights: str = field("lora", Starts())
    init_options: Mapping[str, Any] = field({}, Options(), ours=True)
    alora_invocation_tokens: tuple[int, ...] | None = field(
        None, Maybe(Invocation(), "an adapter that acts at all tokens"), ours=True
    )
    use_gating: bool = False
    convention: str = field("paper", Choice("paper", "adapterhub"), needs="use_gating=True")
    lora_bias: bool = False
    ensure_weight_tying: bool = field(False, FLAG, ours=True)

    def __post_init__(self) -> None:
        """Check the fields.

        Raises:
            ConfigError: a value is invalid.
        """
        super().__post_init__()
        name = type(self).__name__
        legal = OPTIONS.get(self.init_weights, {})
        for option, value in self.init_options.items():
            if option not in legal:
                raise ConfigError(
                    f"{name}(init_weights={self.init_weights!r}, init_options={{{option!r}: …}}): "
                    f"there is no such option. Write one of {listing(legal)}."
                )
            default, check = legal[option]
            check(name, f"init_options[{option!r}]", value, default)

    def placements(self, anatomy: Anatomy) -> list[Placement]:
        """Return one placement for each layer that the config names.

        Raises:
            ConfigError: a convolution would have an option that depends on tokens.
            SiteError: no layer matches, or the model cannot have the invocation there.
        """
        placements = super().placements(anatomy)
        convolution = next((p.site for p in placements if p.site.kernel), None)
        asks = self.use_gating or self.alora_invocation_tokens or self.init_weights in PLANS
        if convolution is not None and asks:
            raise ConfigError(
                f"LoRAConfig at {convolution.path!r}: a convolution reads channels, not tokens. "
                f"Write use_gating=False, alora_invocation_tokens=None, init_weights='lora'."
            )
        if self.alora_invocation_tokens:
            _check_invocation(self, [placement.site for placement in placements], anatomy)
        return placements

    @property
    def slot_fields(self) -> frozenset[str]:
        """As in the base class, and whether tied layers have one adapter."""
        return super().slot_fields | {"ensure_weight_tying"}

    @property
    def options(self) -> dict[str, Any]:
        """All options for the initial values."""
        known = OPTIONS.get(self.init_weights, {})
        return {name: value for name, (value, _) in known.items()} | dict(self.init_options)

    def init_plan(self, anatomy: Anatomy) -> InputPlan | WeightPlan | None:
        """Return the data that EVA, CorDA and LoftQ need."""
        plan = PLANS.get(self.init_weights)
        return None if plan is None else cast("InputPlan", plan(self, self.options, anatomy))

    @property
    def plain(self) -> LowRankConfig:
        """The config of an equal adapter without a start, of rank 2r."""
        if not replaces_weight(self.init_weights):
            without = {"init_weights": "lora", "init_options": {}}
            return self.replace(**without) if self.init_options else super().plain
        # the scaling does not change
        factor = math.sqrt(2) if self.use_rslora else 2
        return self.replace(
            init_weights="lora", init_options={}, r=2 * self.r, alpha=factor * self.alpha,
            rank_pattern={key: 2 * rank for key, rank in self.rank_pattern.items()},
            alpha_pattern={key: factor * alpha for key, alpha in self.alpha_pattern.items()},
        )  # fmt: skip

    def plain_tensors(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the tensors for an adapter of `plain`."""
        return joined(tensors) if replaces_weight(self.init_weights) else tensors

    def own_tensors(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the tensors of an adapter with a start from those of a LoRA of rank 2r."""
        if not replaces_weight(self.init_weights) or not {"lora_A", "lora_B"} <= tensors.keys():
            return tensors
        found = dict(tensors)
        found["lora_A"], found["start.lora_A"] = found["lora_A"].tensor_split(2, -2)
        found["lora_B"], b = found["lora_B"].tensor_split(2, -1)
        return found | {"start.lora_B": -b}

    @classmethod
    def combined(
        cls, configs: Sequence[AdapterConfig], strategy: Combination, anatomy: Anatomy
    ) -> LowRankConfig:
        """Return the config of the combination, without a start."""
        return super().combined([config.plain for config in configs], strategy, anatomy)

    @classmethod
    def at_sites_of(cls, config: AdapterConfig, anatomy: Anatomy) -> Self:
        """Return a config with adapters at the layers of another config, or around its parts."""
        sites = [p.site for p in config.placements(anatomy)]
        fields = {**vars(config)} if isinstance(config, TargetedConfig) else {}
        own = {name: fields[name] for name in (*TARGETS, "dtype") if name in fields}
        if fields:
            made = cls(**own)
            if [p.site for p in made.placements(anatomy)] == sites:
                return made
        return cls(**fields_at(sites), dtype=own.get("dtype"))

    @classmethod
    def at_layers(cls, paths: Sequence[str]) -> Self:
        """Return a config with adapters at the layers of these paths."""
        return cls(target_modules=tuple(paths))


def _check_invocation(config: LoRAConfig, sites: Sequence[Site], anatomy: Anatomy) -> None:
    """Check that a model has the invocation's tokens, and that layers know where they are.

    Raises:
        SiteError: the model does not read these tokens, or a layer does not read their states.
    """
    tokens = config.alora_invocation_tokens or ()
    shown = f"{type(config).__name__}(alora_invocation_tokens={[*tokens]})"
    found = anatomy.tokens
    # blocks show where tokens enter; without blocks the model's own token table must do
    table = found.table if found is not None else None if anatomy.blocks else anatomy.own_table
    if table is None or (found is not None and (found.is_encoder or found.looks_ahead)):
        raise SiteError(
            f"{shown}: this model reads no tokens, or reads later tokens first. Write "
            f"alora_invocation_tokens=None, or use a decoder-only model."
        )
    size = next(s.d_in for s in anatomy if s.path == table and s.kind == "embedding")
    if outside := [token for token in tokens if token >= size]:
        raise SiteError(
            f"{shown}: the model has {size} tokens, but not {listing(outside)}. Write ids of its "
            f"tokenizer, or model.resize_token_embeddings({max(outside) + 1}) first."
        )
    stack = "" if found is None else found.stack
    for site in sites:
        # experts get tokens of several rows
        by_expert = site.is_only_read or site.is_routed or site.experts
        if by_expert or site.role == "lm_head" or not below(site.path, stack):
            raise SiteError(
                f"{shown} at {site.path!r}: it is unknown which inputs of the layer follow these "
                f"tokens. Write exclude_modules=[{site.path!r}]."
            )


class Start(nn.Module):
    """The frozen factors A₀ and B₀ of an adapter whose initial values replace a part of W.

    PEFT subtracts s · B₀ A₀ from the base weight. Here the base does not change and the adapter
    subtracts it: y = W x + s · (B A − B₀ A₀) x, which equals a LoRA of rank 2r with A' = [A; A₀]
    and B' = [B, −B₀]. The peers' files hold that LoRA.

    Attributes:
        lora_A: A₀ `[*experts, r, d_in]`.
        lora_B: B₀ `[*experts, d_out, r]`.
    """

    lora_A: Tensor  # noqa: N815  as in files
    lora_B: Tensor  # noqa: N815

    def __init__(self, a: Tensor, b: Tensor) -> None:
        """Create the factors, without values, for an adapter with A and B."""
        super().__init__()
        self.register_buffer("lora_A", torch.empty_like(a.detach()))
        self.register_buffer("lora_B", torch.empty_like(b.detach()))

    def forward(self, x: Tensor, split: LayerSplit | None) -> Tensor:
        """Return B₀ A₀ x, `[*batch, d_in]` → `[*batch, d_out]`, in the dtype of the factors."""
        t = linear(x.to(self.lora_A.dtype), self.lora_A)  # [*batch, r]
        return linear(t if split is None else split.joined(t), self.lora_B)


def joined(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of an adapter with [A; A₀] and [B, −B₀] as its factors."""
    found = dict(tensors)
    a, b = found.pop("start.lora_A"), found.pop("start.lora_B")
    found["lora_A"] = torch.cat([found["lora_A"], a.to(found["lora_A"])], -2)
    found["lora_B"] = torch.cat([found["lora_B"], -b.to(found["lora_B"])], -1)
    return found


class LoRA(LowRank):
    """y = base(x) + s · B A dropout(x) (+ s · B's bias).

    Attributes:
        lora_B_bias: `[d_out]`; None without one.
        invocation: the tokens of the invocation; None: the adapter acts at all tokens.
        gate: gate of the update; None without one.
        start: the part of the base weight that the factors replace; None without one.
    """

    is_additive = True
    adapts_convolutions = True
    splits = frozenset({"in", "out"})
    split_dims: Mapping[str, tuple[str, ...]] = MappingProxyType(
        SIDES
        | {f"start.{name}": dims for name, dims in SIDES.items()}
        | {"lora_B_bias": ("out",), "gate.weight": ("", "in")}
    )

    def __init__(
        self, config: LoRAConfig, site: Site, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Make the parameters.

        Raises:
            ConfigError: the site cannot have the bias, the gate, the dropout or the initial values.
        """
        super().__init__(config, site, device, dtype)
        if (site.is_only_read or self.at_embedding) and (config.use_gating or config.lora_bias):
            raise ConfigError(
                f"LoRAConfig at {site.path!r}: only its weight can be adapted. Write "
                f"use_gating=False, lora_bias=False."
            )
        self._drawing = config.init_weights, config.init_weights_seed, f"{site.path}{site.role}"
        self._options = config.options
        self.start: Start | None = None
        rank, s, width = config.rank_at(site.name), self.scaling, min(site.d_in, site.d_out)
        fits = not self.at_embedding and rank <= width and s > 0 and site.groups == 1
        if starts_from_weight(config.init_weights) and not fits:
            hint = f"r={width}" if rank > width else "init_weights='lora'" if s > 0 else "alpha=8"
            raise ConfigError(
                f"{type(config).__name__}(init_weights={config.init_weights!r}) at {site.path!r}: "
                f"it needs a layer of at least rank {rank}, and a scaling above 0. Write {hint}."
            )
        if replaces_weight(config.init_weights):
            self.start = Start(self.lora_A, self.lora_B)
        dtype = config.dtype_at(dtype)
        bias = drawn((site.d_out,), constant(0.0), device, dtype) if config.lora_bias else None
        self.lora_B_bias = bias
        tokens = config.alora_invocation_tokens
        # torch.compile cannot hash a tuple in a field
        self.invocation = None if tokens is None else tuple(tokens)
        self.reads_call = self.invocation is not None
        self.gate: Gate | None = None
        if config.use_gating:
            source = generator(config.init_weights_seed, f"{site.path}{site.role}/gate")
            self.gate = Gate(site, config.convention, source, device, dtype)
            self.reads_call |= self.gate.reads_call
            self.reads_prompt |= self.gate.reads_sequence
        options = self.gate, self.lora_B_bias, self.start, self.invocation
        self._is_plain = not self.at_embedding and all(option is None for option in options)

    def forward(self, x: Tensor, base: BaseLayer) -> Tensor:
        """Return the output `[*batch, d_out]` for `x` `[*batch, d_in]`, or tokens `[*batch]`.

        In an output layer that is tied to a table, return the logits for `x` `[*batch, d_out]`.
        """
        y, a, b = base(x), self.lora_A, self.lora_B
        if self._is_plain and base.split is None:
            return low_rank(y, x, a, b, self.scaling, self.dropout, self.training)
        if self.at_embedding and x.is_floating_point():
            # an output layer that is tied to the table
            return low_rank(y, x, b.mT, a.mT, self.scaling, self.dropout, self.training)
        update = linear(self.down(x, a, base), b, self.lora_B_bias)  # [*batch, d_out]
        if self.start is not None:
            update = update - self.start(x, base.split)
        update = update * self.scaling
        if self.invocation is not None:
            after = base.call.after(self.invocation, x)  # [*batch]
            update = torch.where(after.unsqueeze(-1), update, 0.0)
        if self.gate is not None:
            update = update * self.gate(x, base, base.split)
        return y + update.to(y.dtype)

    def convolved(self, x: Tensor, base: BaseLayer) -> Tensor:
        """Return the output of the convolution, `[*rows, d_out, *places]`."""
        y, update = base(x), self.across(x, self.lora_A, self.lora_B, base)
        if self.lora_B_bias is not None:
            update = update + base.by_channel(self.lora_B_bias)
        if self.start is not None:
            update = update - self.across(x, self.start.lora_A, self.start.lora_B, base)
        return y + (update * self.scaling).to(y.dtype)

    @property
    def row_options(self) -> Hashable | None:
        """Dtypes and dropout; None with an option that needs more than features."""
        if not self._is_plain:
            return None
        return self.lora_A.dtype, self.lora_B.dtype, self.dropout

    def row_tensors(self, base: BaseLayer, dtype: torch.dtype) -> Mapping[str, Tensor | float]:
        """Return A, B and s."""
        return {"lora_A": self.lora_A, "lora_B": self.lora_B, "scaling": self.scaling}

    def forward_rows(
        self, stacks: Mapping[str, Any], groups: RowGroups, x: Tensor, base: BaseLayer
    ) -> Tensor:
        """Return each row of the batch with its own update. `x` `[rows, *tokens, d_in]`."""
        a, b, scaling = stacks["lora_A"], stacks["lora_B"], stacks["scaling"]
        return grouped_low_rank(base(x), x, a, b, scaling, groups, self.dropout, self.training)

    def merged_weight(self, w: Tensor, base: BaseLayer) -> Tensor:
        """Return the merged weight w + s · B A, `[*experts, d_out, d_in]`.

        Raises:
            StateError: the update depends on the input.
        """
        if self.invocation is not None or self.gate is not None:
            name = "alora_invocation_tokens=[…]" if self.invocation else "use_gating=True"
            raise StateError(f"{name} depends on its input. Keep it active instead.")
        return super().merged_weight(w, base)

    def merged_bias(self, b: Tensor, base: BaseLayer) -> Tensor:
        """Return the merged bias b + s · B's bias, `[d_out]`."""
        return b if self.lora_B_bias is None else b + self.scaling * self.lora_B_bias.to(b.dtype)

    def whole_factors(self, like: Tensor) -> Factors:
        """Return A and B of the whole update, [A; A₀] and [B, −B₀]."""
        if self.start is None:
            return super().whole_factors(like)
        both = joined(self.state_dict(keep_vars=True))
        return both["lora_A"].to(like), both["lora_B"].to(like)

    def init_from_layer(self, base: BaseLayer) -> None:
        """Set the initial values that replace a part of the weight."""
        name, seed, place = self._drawing
        if self.start is not None and name not in OPTIONS:
            source, rank = generator(seed, f"{place}/start"), self.lora_A.shape[-2]
            self._begin(factors(name, _weight(base), rank, self.scaling, source))

    def init_from_data(self, data: LayerData, base: BaseLayer) -> None:
        """Set the initial values from the layer's inputs or original weight.

        Raises:
            ConfigError: values for the original weight are given together with a start.
        """
        rank, s = self.lora_A.shape[-2], self.scaling
        if isinstance(data, Components):
            self.lora_A.copy_(data.first(rank, self._options["whiten"]))
        elif isinstance(data, Covariance):
            keeps = self._options["corda_method"] == "kpm"
            self._begin(data.factors(_weight(base), rank, s, keeps))
        elif isinstance(data, OriginalWeight):
            if self.start is not None:
                raise ConfigError(
                    "the adapter replaces a part of the layer's current weight. Add it with "
                    "init_weights='lora'."
                )
            # the principal part of the weight removed by quantization
            w = _weight(base)
            self._begin(principal(data.read().to(w) - w, rank, s))

    def _begin(self, values: Factors) -> None:
        """Set the factors, and those of a start, to the same rounded values.

        Raises:
            ConfigError: the factors are not finite.
        """
        for name, value in zip(("lora_A", "lora_B"), values, strict=True):
            if not bool(value.isfinite().all()):
                raise ConfigError(
                    f"init_weights={self._drawing[0]!r}: the weight is not finite. Write "
                    f"init_weights='lora'."
                )
            factor = self.get_parameter(name)
            factor.copy_(value)
            if self.start is not None:
                self.start.get_buffer(name).copy_(factor)

    def in_slot(self, slot: Self) -> Mapping[str, Tensor]:
        """Return the tensors; a slot without a start gets the factors of the whole update."""
        tensors = dict(super().in_slot(slot))
        if self.start is not None and slot.start is None:
            return joined(tensors)
        if self.start is None and slot.start is not None:
            zeros = {key: torch.zeros_like(t) for key, t in slot.start.state_dict().items()}
            tensors |= {f"start.{key}": t for key, t in zeros.items()}
        return tensors

    def combine(
        self,
        adapters: Sequence[Self],
        weights: Sequence[float],
        strategy: Combination,
        base: BaseLayer,
    ) -> None:
        """Combine several adapters; s · B's bias is combined linearly."""
        if self.gate is not None and strategy.target != "parameters":
            raise strategy.refusal("the gate of a LoRA adapter with use_gating=True has none")
        super().combine(adapters, weights, strategy, base)
        if self.gate is not None:
            self.combine_linearly(["gate.weight", "gate.bias"], adapters, weights, strategy, base)
        if self.lora_B_bias is not None:
            if not strategy.keeps_scaling:
                pairs = zip(adapters, weights, strict=True)
                weights = [w * a.scaling / self.scaling for a, w in pairs]
            self.combine_linearly(["lora_B_bias"], adapters, weights, strategy, base)


LoRAConfig.adapter_class = LoRA


def _weight(base: BaseLayer) -> Tensor:
    w = base.weight.detach()
    return w.to(compute_dtype(w.dtype))
