"""The models on which the checks run: two blocks each, one model for each way to store a layer.

Only the one with attention mixes tokens; the others take any leading shape. Their
weights are exact in float16, bfloat16, float32 and float64.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu
from torch.utils.checkpoint import checkpoint
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.pytorch_utils import Conv1D

from adapterzoo.inject.tokens import recorded_call
from adapterzoo.model import AdapterModelMixin

WIDTH = 32
INNER = 48
VOCABULARY = 11
KINDS = ("linear", "linear without bias", "conv1d", "embedding")
# tokens attend to one another: for methods that sit only at attention
ATTENTION = "attention"


class _Attention(nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, WIDTH, bias)
        self.k_proj = nn.Linear(WIDTH, WIDTH, bias)
        self.v_proj = nn.Linear(WIDTH, WIDTH, bias)
        self.out_proj = nn.Linear(WIDTH, WIDTH, bias)

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.q_proj(x)) * torch.tanh(self.k_proj(x))
        return cast("Tensor", self.out_proj(gate * self.v_proj(x)))


class _InterfaceAttention(_Attention):
    """Attention that transformers' functions compute, as in LLaMA; two heads."""

    head_dim = WIDTH // 2
    num_key_value_groups = 1
    is_causal = False

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(_attn_implementation="sdpa")

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        layers = self.q_proj, self.k_proj, self.v_proj
        # [rows, heads, tokens, head_dim] each
        heads = [f(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for f in layers]
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        seen = None if mask is None else mask[:, None, None].bool()  # [rows, 1, 1, tokens]
        out, _ = attend(self, *heads, seen, scaling=self.head_dim**-0.5)
        return cast("Tensor", self.out_proj(out.flatten(2)))


class _FusedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn = Conv1D(3 * WIDTH, WIDTH)
        self.c_proj = Conv1D(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.c_attn(x).chunk(3, -1)  # each [*batch, d_model]
        return cast("Tensor", self.c_proj(torch.sigmoid(q) * torch.tanh(k) * v))


class _PostNormBlock(nn.Module):
    """As in BERT and BART: each norm after its addition."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = _Attention(bias=True)
        self.self_attn_layer_norm = nn.LayerNorm(WIDTH)
        self.fc1 = nn.Linear(WIDTH, INNER)
        self.fc2 = nn.Linear(INNER, WIDTH)
        self.final_layer_norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.self_attn_layer_norm(x + self.self_attn(x))
        return cast("Tensor", self.final_layer_norm(x + self.fc2(gelu(self.fc1(x)))))


class _PreNormBlock(nn.Module):
    """As in LLaMA: each norm before its sub-layer, no biases."""

    def __init__(self, attention: Callable[[], nn.Module] = _Attention) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(WIDTH, bias=False)
        self.self_attn = attention()
        self.pre_feedforward_layernorm = nn.LayerNorm(WIDTH, bias=False)
        self.up_proj = nn.Linear(WIDTH, INNER, False)
        self.down_proj = nn.Linear(INNER, WIDTH, False)

    def forward(self, x: Tensor, **mask: Tensor | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), **mask)
        inner = gelu(self.up_proj(self.pre_feedforward_layernorm(x)))
        return cast("Tensor", x + self.down_proj(inner))


class _FusedBlock(nn.Module):
    """As in GPT-2: fused projections, and a tuple as result."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(WIDTH)
        self.attn = _FusedAttention()
        self.ln_2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential()
        self.mlp.c_fc = Conv1D(INNER, WIDTH)
        self.mlp.act = nn.GELU()
        self.mlp.c_proj = Conv1D(WIDTH, INNER)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x)), None


_BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "linear": _PostNormBlock,
    "linear without bias": _PreNormBlock,
    "conv1d": _FusedBlock,
    "embedding": _PreNormBlock,
    ATTENTION: functools.partial(_PreNormBlock, _InterfaceAttention),
}


class Host(AdapterModelMixin, nn.Module):
    """A small model with adapters; the weights depend only on its kind.

    Attributes:
        reentrant: the variant of gradient checkpointing of the blocks, or None.
    """

    base_model_prefix = ""

    def __init__(self, kind: str, device: torch.device | str, dtype: torch.dtype) -> None:
        """Create it.

        Args:
            kind: one of `KINDS`.
            device: of all parameters; on the meta device they have no values.
            dtype: of all parameters.
        """
        super().__init__()
        self.kind = kind
        with torch.device("cpu"):
            self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
            self.layers = nn.ModuleList(_BLOCKS[kind]() for _ in range(2))
            # only stacks of pre-LN blocks end in a norm
            self.norm = nn.LayerNorm(WIDTH) if kind != "linear" else None
        self.config = SimpleNamespace(model_type="conformance")
        self.reentrant: bool | None = None
        source = torch.Generator().manual_seed(20)
        for name, parameter in self.named_parameters():
            values = torch.empty(parameter.shape, device="cpu", dtype=torch.float32)
            values.normal_(0.0, 0.25, generator=source).clamp_(-0.9, 0.9)
            # multiples of 1/64 below 2 have 7 significant bits: exact in every dtype
            values = (values * 64).round() / 64
            is_norm = "norm.weight" in name or "ln_" in name
            parameter.data.copy_(values + 1.0 if is_norm else values)
        self.to(device=device, dtype=dtype)
        self._start_adapters()
        self.eval()

    @property
    def base_model(self) -> Host:
        """The model itself: it has no head."""
        return self

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return self.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters."""
        return self.embed_tokens.weight.dtype

    def get_output_embeddings(self) -> None:
        """There are none."""

    def get_input_embeddings(self) -> nn.Module:
        """Return the table of tokens, where tokens see each other."""
        if self.kind != ATTENTION:
            raise NotImplementedError
        return self.embed_tokens

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Token ids `[*batch]`, or hidden states `[*batch, d_model]`, → `[*batch, d_model]`.

        Adapters and attention read the mask `[rows, tokens]`. Tokens that adapters add are left out
        of the result.
        """
        if not self._active.plan.stacks:
            return self._run(x, attention_mask)
        name = "inputs_embeds" if x.is_floating_point() else "input_ids"
        given = {name: x, "attention_mask": attention_mask}
        with recorded_call(self, (), self._active, "", (), given) as (_, wide):
            y = self._run(wide[name], wide["attention_mask"])
            joined = self._active.call.joined
            return y if joined is None else joined.own(y)

    def _run(self, x: Tensor, mask: Tensor | None) -> Tensor:
        if not x.is_floating_point():
            x = self.embed_tokens(x)
        for layer in self.layers:
            run = functools.partial(layer, mask=mask) if self.kind == ATTENTION else layer
            out: Any = run(x) if self.reentrant is None else self._checkpointed(run, x)
            x = out[0] if isinstance(out, tuple) else out
        return cast("Tensor", x if self.norm is None else self.norm(x))

    def _checkpointed(self, layer: Callable[[Tensor], Any], x: Tensor) -> Any:
        resume = self._active.resumable() or nullcontext

        def run(x: Tensor) -> Any:
            with resume():
                return layer(x)

        return checkpoint(run, x, use_reentrant=bool(self.reentrant))
