"""PEFT beside us: tiny transformers models, and adapters of both libraries on them."""

from __future__ import annotations

import copy
import functools
import inspect
import json
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from families import tiny_config, tiny_inputs
from peft.tuners.boft import layer as peft_boft
from torch import Tensor

import adapterzoo

TENSORS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
CLASSES = {
    "bart": "BartForSequenceClassification",
    "bert": "BertForSequenceClassification",
    "bloom": "BloomForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "roberta": "RobertaForSequenceClassification",
    "distilbert": "DistilBertForSequenceClassification",
    "gpt2": "GPT2LMHeadModel",
    "gpt_neox": "GPTNeoXForCausalLM",
    "llama": "LlamaForCausalLM",
    "mt5": "MT5ForConditionalGeneration",
    "phi3": "Phi3ForCausalLM",
    "t5": "T5ForConditionalGeneration",
    "vit": "ViTForImageClassification",
    "whisper": "WhisperForConditionalGeneration",
}
# what PEFT does by itself when it loads and saves, and would say again in each test
QUIET = (
    "ignore:unclosed file:ResourceWarning",
    "ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning",
    "ignore:.lora_bias=True. was passed but the targeted layer",
    "ignore:Setting .save_embedding_layers. to .True.",
    "ignore:Could not find a config file in",
    "ignore:Adapter 'default'. . LoRA tensor.s. have invalid shape",
    # PEFT calls models with the name that transformers before 5.24 has
    "ignore:`past_key_values` is deprecated:FutureWarning",
)


class BlockDiagonal:
    """What PEFT's CUDA extension computes, in plain torch."""

    @staticmethod
    def forward(blocks: Tensor) -> list[Tensor]:
        return [torch.stack([torch.block_diag(*factor) for factor in blocks])]

    @staticmethod
    def backward(grad: Tensor, blocks: Tensor) -> list[Tensor]:
        """The blocks' part of `grad` `[m, blocks · b, blocks · b]`."""
        m, n, b, _ = blocks.shape
        parts = grad.view(m, n, b, n, b).diagonal(dim1=1, dim2=3)  # [m, b, b, n]
        return [parts.permute(0, 3, 1, 2).contiguous()]  # [m, n, b, b]


def stand_in(monkeypatch: Any) -> None:
    """Give PEFT's BOFT its extension, so that it does not take one factor for several."""
    monkeypatch.setattr(peft_boft, "get_fbd_cuda", lambda: BlockDiagonal)


def built(architecture: str, config: Any) -> Any:
    """A transformers model of a class, of the same weights each time."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(3)
        model = getattr(transformers, architecture)(config).eval()
        for parameter in model.parameters():
            # what transformers draws is so small that no adapter shows in the logits
            if parameter.dim() == 2:
                torch.nn.init.normal_(parameter, std=0.2)
    return model


_plain: dict[str, Any] = {}


def plain(family: str) -> Any:
    """A transformers model, of the same weights each time."""
    if family not in _plain:
        config = tiny_config(family)
        # the other ways to run experts have no float64
        config._experts_implementation = "eager"
        _plain[family] = built(CLASSES[family], config)
    return copy.deepcopy(_plain[family])


def ours(family: str) -> Any:
    """The same model with our methods."""
    model = plain(family)
    adapterzoo.init(model)
    return model


def named(family: str, folder: Path) -> Any:
    """The same model with named heads, its static one among them."""
    plain(family).save_pretrained(folder)
    return adapterzoo.AutoAdapterModel.from_pretrained(folder).eval()


def inputs_of(family: str, batch: int = 2) -> dict[str, Tensor]:
    """The arguments of a call of the model with logits."""
    inputs = tiny_inputs(family, batch)
    if family in ("mt5", "t5"):
        inputs["decoder_input_ids"] = inputs["input_ids"][:, :3]
    return inputs


def logits(
    model: Any, family: str, dtype: torch.dtype | None = torch.float64, **more: Tensor
) -> Tensor:
    """Of a copy in float64, where two ways to compute the same differ by nothing that shows.

    Args:
        model: of either library.
        family: which inputs it takes.
        dtype: in which it computes; `None`, its own.
        more: further inputs.
    """
    inputs = inputs_of(family) | more
    if dtype is not None:
        model = copy.deepcopy(model).to(dtype)
        inputs = {k: t.to(dtype) if t.is_floating_point() else t for k, t in inputs.items()}
    with torch.no_grad():
        return model.eval()(**inputs).logits


def for_peft(model: Any) -> Any:
    """The model, whose base shows the old name of its cache, which PEFT looks for and it takes."""
    cls = type(model.base_model)
    signature = inspect.signature(cls.forward)
    if "cache" in signature.parameters and "past_key_values" not in signature.parameters:

        @functools.wraps(cls.forward)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            return cls.forward(self, *args, **kwargs)

        shown = [*signature.parameters.values()]
        old = inspect.Parameter("past_key_values", inspect.Parameter.KEYWORD_ONLY, default=None)
        at = len(shown) - (shown[-1].kind is inspect.Parameter.VAR_KEYWORD)
        forward.__signature__ = signature.replace(parameters=[*shown[:at], old, *shown[at:]])
        model.base_model.__class__ = type(cls.__name__, (cls,), {"forward": forward})
    return model


def trained(family: str, config: peft.PeftConfig, folder: Path, std: float = 0.1) -> Tensor:
    """Save an adapter of PEFT with random values, and its head; the logits with it."""
    model = peft.get_peft_model(for_peft(plain(family)), config)
    source = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=source) * std)
                if "lora_embedding_A" in name:
                    parameter.add_(torch.randn(parameter.shape, generator=source))
    model.save_pretrained(folder)
    return logits(model, family)


def reloaded(family: str, folder: Path) -> Tensor:
    """The logits of PEFT with a folder, on the plain model."""
    return logits(peft.PeftModel.from_pretrained(for_peft(plain(family)), folder), family)


def change(folder: Path, **fields: Any) -> None:
    """Write other values into a config."""
    file = folder / CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
