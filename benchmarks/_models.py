"""The base models and batches that are measured; random weights, seeded."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

DENSE = r".*encoder\.layer\.\d+\..*(query|key|value|dense)"
PROJECTIONS = r".*layers\.\d+\..*_proj"


@dataclass(frozen=True)
class Shape:
    """A base model and what is fed to it.

    Attributes:
        title: of the shape, for tables.
        targets: of the layers to adapt, a regular expression for paths.
        rows: of the batch.
        tokens: of a row.
    """

    title: str
    targets: str
    rows: int
    tokens: int

    def model(self, dtype: torch.dtype = torch.float32) -> Any:
        """The frozen base model, in training mode: BERT with the dropout of its config."""
        torch.manual_seed(0)
        made: Any = _MAKERS[self.title]()
        return made.to(dtype).requires_grad_(False).train()

    def step(self, model: Any) -> None:
        """A training step without the optimizer's: forward and backward.

        Input embeddings require gradients, so that every activation of the model gets one.
        """
        model.zero_grad(set_to_none=True)
        self.loss(model).backward()

    def loss(self, model: Any) -> Tensor:
        """A scalar that depends on all outputs."""
        source = torch.Generator().manual_seed(1)
        base = plain(model)
        width = base.config.hidden_size
        shape = (self.rows, self.tokens, width)
        embeds = torch.randn(shape, generator=source).to(base.dtype).requires_grad_()
        extra: dict[str, Any] = {}
        if isinstance(base, LlamaForCausalLM):
            labels = torch.randint(base.config.vocab_size, shape[:2], generator=source)
            # a cache for generation copies keys and values
            extra = {"labels": labels, "use_cache": False}
        out = model(inputs_embeds=embeds, **extra)
        loss: Tensor
        if "loss" in out:
            loss = out.loss
        else:
            weights = torch.randn(shape, generator=source).to(base.dtype)
            loss = (out.last_hidden_state * weights).sum()
        return loss


def plain(model: Any) -> Any:
    """The transformers model, also where PEFT has wrapped it."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def twin(model: Any) -> Any:
    """A copy of the modules that shares the parameters."""
    shared = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)


def _llama(layers: int) -> Any:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=4096,
            hidden_size=512,
            intermediate_size=1408,
            num_hidden_layers=layers,
            num_attention_heads=8,
        )
    )


def _bert(**fields: Any) -> Any:
    return BertModel(BertConfig(**fields), add_pooling_layer=False)


LLAMA = Shape("Llama, 512 wide, 8 layers", PROJECTIONS, 8, 128)
SHALLOW = Shape("Llama, 512 wide, 2 layers", PROJECTIONS, 8, 128)
BERT = Shape("BERT-base, 2 of its 12 layers", DENSE, 8, 128)
TINY = Shape("BERT, 64 wide, 12 layers", DENSE, 1, 16)

_MAKERS: dict[str, Callable[[], Any]] = {
    LLAMA.title: lambda: _llama(8),
    SHALLOW.title: lambda: _llama(2),
    BERT.title: lambda: _bert(num_hidden_layers=2),
    TINY.title: lambda: _bert(
        vocab_size=1000, hidden_size=64, intermediate_size=256, num_attention_heads=4
    ),
}


# --- pEFT's BOFT without its CUDA extension ---


class BlockDiagonal:
    """What the extension computes, in plain torch: one copy for all blocks."""

    @staticmethod
    def forward(blocks: Tensor) -> list[Tensor]:
        """`[m, blocks, b, b]` → `[m, blocks · b, blocks · b]`."""
        m, n, b, _ = blocks.shape
        dense = blocks.new_zeros(m, n, b, n, b)
        dense.diagonal(dim1=1, dim2=3).copy_(blocks.permute(0, 2, 3, 1))  # [m, b, b, n]
        return [dense.view(m, n * b, n * b)]  # [m, n · b, n · b]

    @staticmethod
    def backward(grad: Tensor, blocks: Tensor) -> list[Tensor]:
        """The blocks' part of `grad` `[m, blocks · b, blocks · b]`."""
        m, n, b, _ = blocks.shape
        parts = grad.view(m, n, b, n, b).diagonal(dim1=1, dim2=3)  # [m, b, b, n]
        return [parts.permute(0, 3, 1, 2).contiguous()]  # [m, n, b, b]


def stand_in() -> None:
    """Give PEFT's BOFT the plain version of its extension, in this process.

    PEFT asks for it in each layer that it makes, and in each forward.
    """
    from peft.tuners.boft import layer

    layer.get_fbd_cuda = lambda: BlockDiagonal
