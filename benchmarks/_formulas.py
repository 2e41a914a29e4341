"""Methods against the best formula of their operations: plain modules, without any dispatch.

Each formula is the mathematics of a method in plain torch, in the order that costs least, written
by hand and put in place of the same layers. The gate requires equal outputs and gradients.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import peft
import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, scaled_dot_product_attention
from transformers import LlamaConfig, LlamaModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import adapterzoo
from _measure import Ratio, ratios, saved_bytes
from _models import PROJECTIONS, plain, twin
from _report import Figure

# the largest relative difference between a method and its formula, in float32
_GATE = 1e-4
_GOAL = 1.10
_SHAPE = "Llama, 512 wide, 2 layers"
_ROWS, _TOKENS, _WIDTH = 4, 128, 512


class Scaled(nn.Module):
    """(IA)³: W x ⊙ ℓ, or W (x ⊙ ℓ)."""

    def __init__(self, base: nn.Module, adapter: Any) -> None:
        super().__init__()
        self.base, self.ia3_l = base, adapter.ia3_l
        self.at_input = adapter.scales_input

    def forward(self, x: Tensor) -> Tensor:
        """`[*batch, d_in]` → `[*batch, d_out]`."""
        y: Tensor = self.base(x * self.ia3_l) if self.at_input else self.base(x) * self.ia3_l
        return y


class Projected(nn.Module):
    """VeRA: W x + (Λ_b B Λ_d) A x, which keeps A x alone."""

    A: Tensor
    B: Tensor

    def __init__(self, base: nn.Module, adapter: Any, shared: Any) -> None:
        super().__init__()
        self.base, self.d, self.b = base, adapter.lambda_d, adapter.lambda_b
        self.register_buffer("A", shared.lora_A[:, : adapter.d_in])
        self.register_buffer("B", shared.lora_B[: adapter.d_out])

    def forward(self, x: Tensor) -> Tensor:
        """`[*batch, d_in]` → `[*batch, d_out]`."""
        # the outer product first: autograd keeps neither it nor B twice
        scaled = self.B * torch.outer(self.b, self.d)  # [d_out, r]
        y = self.base(x)
        t = linear(x, self.A)
        return torch.addmm(y.flatten(0, -2), t.flatten(0, -2), scaled.T).view(y.shape)


class Rotated(nn.Module):
    """OFT: W (Q x) with Q = I + 2 S + … + S⁴ in each block."""

    places: Tensor
    eye: Tensor

    def __init__(self, base: nn.Module, adapter: Any) -> None:
        super().__init__()
        self.base, self.R = base, adapter.oft_R
        self.size, self.number = adapter.block_size, adapter.block_number
        self.register_buffer("places", torch.triu_indices(self.size, self.size, 1))
        self.register_buffer("eye", torch.eye(self.size))

    def forward(self, x: Tensor) -> Tensor:
        """`[*batch, d_in]` → `[*batch, d_out]`."""
        row, column = self.places
        upper = x.new_zeros(self.number, self.size, self.size)
        upper = upper.index_put((torch.arange(self.number)[:, None], row, column), self.R)
        S = upper - upper.mT
        Q = 2 * self.eye + S
        for _ in range(2):
            Q = 2 * self.eye + S @ Q
        Q = self.eye + S @ Q  # [blocks, b, b]
        parts = x.view(-1, self.number, self.size).transpose(0, 1)  # [blocks, rows, b]
        y: Tensor = self.base((parts @ Q).transpose(0, 1).reshape(x.shape))
        return y


class Sharded(nn.Module):
    """MiSS: W x + Dᵀ Σ_k x_k."""

    def __init__(self, base: nn.Module, adapter: Any) -> None:
        super().__init__()
        self.base, self.D = base, adapter.miss_block

    def forward(self, x: Tensor) -> Tensor:
        """`[*batch, d_in]` → `[*batch, d_out]`."""
        y, r = self.base(x), len(self.D)
        t = x.view(-1, x.shape[-1] // r, r).sum(1)  # [rows, r]
        return torch.addmm(y.flatten(0, -2), t, self.D).view(y.shape)


class Edited(nn.Module):
    """LoReFT: the first tokens become h + (A h + a − R h) R with orthonormal rows of R."""

    def __init__(self, base: nn.Module, adapter: Any) -> None:
        super().__init__()
        self.base, self.count = base, adapter.counts["0"]
        unit = adapter.units["0"]
        self.A, self.a, self.R = unit.source.weight, unit.source.bias, unit.projection

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The block's output `[rows, tokens, d_model]`."""
        states: Tensor = self.base(x, *args, **kwargs)
        first, rest = states[:, : self.count], states[:, self.count :]
        whole = torch.linalg.cholesky(self.R @ self.R.T)
        R = torch.linalg.solve_triangular(whole, self.R, upper=False)
        edit = (linear(first, self.A, self.a) - linear(first, R)) @ R
        return torch.cat([first + edit, rest], 1)


class Narrowed(nn.Module):
    """Compacter: y + H_up gelu(H_down y + b) + b with H = Σ Rᵢ ⊗ (lᵢ rᵢ), as two matrices."""

    def __init__(self, base: nn.Module, adapter: Any, shared: Any) -> None:
        super().__init__()
        down, up = adapter.adapter_down[0], adapter.adapter_up
        self.base, self.rule = base, shared["phm"].phm_rule
        self.factors = nn.ParameterList([down.W_left, down.W_right, up.W_left, up.W_right])
        self.down_bias, self.up_bias = down.b, up.b

    def forward(self, x: Tensor) -> Tensor:
        """`[*batch, d_in]` → `[*batch, d_model]`."""
        y = self.base(x)
        left, right, up_left, up_right = self.factors
        down = torch.einsum("iac,ibd->cdab", self.rule, left @ right)
        up = torch.einsum("iac,ibd->cdab", self.rule, up_left @ up_right)
        flat = y.flatten(0, -2)
        inner = linear(flat, down.reshape(-1, y.shape[-1]), self.down_bias)  # [rows, width]
        update = linear(gelu(inner), up.reshape(y.shape[-1], -1), self.up_bias)
        added: Tensor = flat + update
        return added.view(y.shape)


_NAME = "benchmark_prefix"


class Prefixed(nn.Module):
    """Prefix tuning: attention over [Tₖ; K] and [Tᵥ; V]."""

    def __init__(self, base: Any, table: Tensor, start: int) -> None:
        super().__init__()
        self.base, self.table, self.start = base, table, start
        base.config = type(base.config)(**{**base.config.to_dict(), "attn_implementation": _NAME})
        base.prefix = self.rows

    def rows(self, key: Tensor) -> tuple[Tensor, Tensor]:
        """The table's keys and values `[rows, heads, P, width]`."""
        batch, heads, _, width = key.shape
        size = heads * width
        own = self.table[:, self.start : self.start + 2 * size].unflatten(1, (2, heads, width))
        keys, values = own.permute(1, 2, 0, 3)[:, None].expand(-1, batch, -1, -1, -1)
        return keys, values

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The attention's own output."""
        return self.base(*args, **kwargs)


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    keys, values = module.prefix(key)
    tokens, length = query.shape[2], keys.shape[2]
    seen = torch.ones(tokens, length + tokens, dtype=torch.bool).tril(length)
    y = scaled_dot_product_attention(
        query, torch.cat([keys, key], 2), torch.cat([values, value], 2), seen,
        scale=kwargs.get("scaling"),
    )  # fmt: skip
    return y.transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register(_NAME, _attend)


class Prompted(nn.Module):
    """Prompt tuning: [E; x]."""

    def __init__(self, base: nn.Module, rows: Tensor) -> None:
        super().__init__()
        self.base, self.rows = base, rows

    def forward(self, inputs_embeds: Tensor, **kwargs: Any) -> Any:
        """The model's own output for the longer sequence."""
        rows = self.rows.expand(len(inputs_embeds), -1, -1)
        return self.base(inputs_embeds=torch.cat([rows, inputs_embeds], 1), **kwargs)


Put = Callable[[Any, Any, dict[str, Any]], Any]


def _at_layers(make: Callable[..., nn.Module], shares: bool = False) -> Put:
    """A model in which modules stand in place of the adapted layers."""

    def put(model: Any, ours: Any, adapters: dict[str, Any]) -> Any:
        shared = adapters.pop("", None)
        for path, adapter in adapters.items():
            owner, _, name = path.rpartition(".")
            base = model.get_submodule(path)
            made = make(base, adapter, shared) if shares else make(base, adapter)
            setattr(model.get_submodule(owner), name, made)
        return model

    return put


def _put_prefix(model: Any, ours: Any, adapters: dict[str, Any]) -> Any:
    table = adapters.pop("")["self_prefix"]
    for path in adapters:
        owner = model.get_submodule(path.rpartition(".")[0])
        owner.self_attn = Prefixed(owner.self_attn, table.table, table.places[path])
    return model


def _put_prompt(model: Any, ours: Any, adapters: dict[str, Any]) -> Any:
    return Prompted(model, adapters[""].prompt_embedding)


@dataclass(frozen=True)
class Formula:
    """A method and its formula.

    Attributes:
        title: for tables.
        config: adapterzoo's.
        put: puts the formula into a model, with our parameters.
        theirs: PEFT's config; None where it has none.
    """

    title: str
    config: Any
    put: Put
    theirs: Any = None

    def ours(self, base: Any) -> Any:
        """A model with an adapter that is trained, filled with random numbers."""
        model = adapterzoo.init(twin(base))
        model.add_adapter("a", self.config)
        model.train_adapter("a")
        source = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for p in own(model):
                p.add_(0.02 * torch.randn(p.shape, generator=source))
        return model.train()

    def formula(self, base: Any, ours: Any) -> Any:
        """The model with hand-written modules that have the same parameters."""
        return self.put(twin(base), ours, dict(ours.adapter_modules("a"))).train()

    def peft(self, base: Any) -> Any:
        """PEFT's model; None where it has no such method."""
        return self.theirs and peft.get_peft_model(twin(base), self.theirs).train()


_VERA: dict[str, Any] = {"r": 256, "target_modules": PROJECTIONS}
_OFT: dict[str, Any] = {"oft_block_size": 32, "target_modules": PROJECTIONS}
FORMULAS = [
    Formula("(IA)³", adapterzoo.IA3Config(), _at_layers(Scaled),
            peft.IA3Config(target_modules=["k_proj", "v_proj", "down_proj"],
                           feedforward_modules=["down_proj"])),
    Formula("VeRA r=256", adapterzoo.VeraConfig(**_VERA), _at_layers(Projected, shares=True),
            peft.VeraConfig(**_VERA)),
    Formula("OFT b=32", adapterzoo.OFTConfig(**_OFT), _at_layers(Rotated), peft.OFTConfig(**_OFT)),
    Formula("MiSS r=64", adapterzoo.MissConfig(r=64, target_modules=PROJECTIONS),
            _at_layers(Sharded), peft.MissConfig(r=64, target_modules=PROJECTIONS)),
    Formula("LoReFT r=4", adapterzoo.LoReftConfig(r=4, dropout=0.0), _at_layers(Edited)),
    Formula("Compacter", adapterzoo.CompacterConfig(), _at_layers(Narrowed, shares=True)),
    Formula("prefix tuning P=30", adapterzoo.PrefixTuningConfig(flat=True), _put_prefix,
            peft.PrefixTuningConfig(num_virtual_tokens=30, task_type="FEATURE_EXTRACTION")),
    Formula("prompt tuning P=10", adapterzoo.PromptTuningConfig(), _put_prompt,
            peft.PromptTuningConfig(num_virtual_tokens=10, task_type="FEATURE_EXTRACTION")),
]  # fmt: skip


def base_model(layers: int = 2, width: int = _WIDTH) -> Any:
    """The frozen model, in training mode."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=width, intermediate_size=width * 11 // 4,
        num_hidden_layers=layers, num_attention_heads=8,
    )  # fmt: skip
    made: Any = LlamaModel(config)
    return made.requires_grad_(False).train()


def own(model: Any) -> list[nn.Parameter]:
    """The trained parameters, each once."""
    return [p for p in model.parameters() if p.requires_grad]


def loss_of(model: Any, rows: int = _ROWS, tokens: int = _TOKENS) -> Tensor:
    """A scalar that depends on the states of all tokens of the call."""
    source = torch.Generator().manual_seed(1)
    inside = plain(model) if isinstance(model, PeftModel) else model
    config: Any = (inside.base if isinstance(inside, Prompted) else inside).config
    shape = (rows, tokens, config.hidden_size)
    embeds = torch.randn(shape, generator=source).requires_grad_()
    weights = torch.randn(shape, generator=source)
    out = model(inputs_embeds=embeds, use_cache=False).last_hidden_state
    loss: Tensor = (out[:, -tokens:] * weights).sum()
    return loss


def step(model: Any) -> None:
    """A training step without the optimizer's."""
    model.zero_grad(set_to_none=True)
    loss_of(model).backward()


def difference(ours: Any, formula: Any, **size: int) -> float:
    """The largest relative difference of loss and gradients; the parameters are the same."""
    found = []
    for model in (ours, formula):
        model.zero_grad(set_to_none=True)
        loss = loss_of(model, **size)
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in own(ours) if p.grad is not None)])
    pairs = zip(*found, strict=True)
    return max(float((a - b).norm() / b.norm().clamp_min(1e-12)) for a, b in pairs)


def kept(method: Formula, base: Any, **size: int) -> tuple[int, int]:
    """The bytes that a step keeps beyond the frozen model's: ours, the formula's."""
    ours = method.ours(base)
    models = ours, method.formula(base, ours), base
    a, b, floor = (saved_bytes(m, lambda m=m: loss_of(m, **size)) for m in models)  # type: ignore[misc]
    return a - floor, b - floor


def formulas(rounds: int) -> list[Figure]:
    """Steps and saved bytes over those of the formula.

    Raises:
        SystemExit: a method and its formula do not compute the same.
    """
    base, found = base_model(), []
    for method in FORMULAS:
        ours = method.ours(base)
        formula = method.formula(base, ours)
        if not (apart := difference(ours, formula, rows=2, tokens=32)) < _GATE:
            sys.exit(f"{method.title}: adapterzoo and its formula differ by {apart}")
        runs = {"ours": partial(step, ours)}
        theirs = method.peft(base)
        if theirs is not None:
            runs["PEFT"] = partial(step, theirs)
        floor = partial(step, formula)
        for run in (floor, *runs.values()):
            run()
        times = ratios(floor, runs, rounds, rivals=["PEFT"])
        name = f"{method.title} / its formula, {_SHAPE}"
        found.append(Figure(f"step: {name}", times["ours"], times.get("PEFT"), _GOAL))
        a, b = kept(method, base)
        size = Ratio(a / b, a / b, a / b)
        found.append(Figure(f"saved bytes beyond the base: {name}", size, None, 1.0))
    return found
