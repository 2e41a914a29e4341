"""Draws the two pictures of report.md: a good adapter, and one with planted faults.

    python docs/report_pictures.py     writes docs/_static/report-good.svg and report-faults.svg

Tiny hybrid models with random weights: attention in blocks 2 and 5, state-space mixers elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import BambaConfig

from adapterzoo import AutoAdapterModel

STATIC = Path(__file__).parent / "_static"


def hybrid(config: str) -> Any:
    """A model of six blocks with an adapter and a head, set to be trained."""
    torch.manual_seed(0)
    sizes = BambaConfig(
        vocab_size=99, hidden_size=64, intermediate_size=128, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=2, attn_layer_indices=[2, 5], mamba_n_heads=8,
        mamba_d_head=16, mamba_d_state=16, mamba_n_groups=1, mamba_expand=2, mamba_chunk_size=8,
        pad_token_id=0, initializer_range=0.1,
    )  # fmt: skip
    model = AutoAdapterModel.from_config(sizes)
    model.add_adapter("reviews", config)
    model.add_classification_head("reviews", num_labels=2, layers=1)
    model.train_adapter("reviews")
    return model


def batch() -> dict[str, torch.Tensor]:
    """Rows whose first token is the label."""
    ids = torch.randint(1, 99, (8, 8))
    return {"input_ids": ids, "labels": ids[:, 0] % 2}


def trained(model: Any, loss_of: Callable[[], torch.Tensor]) -> None:
    """Train all that is to be trained, and keep the gradients of the last step."""
    own = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(own, lr=1e-2)
    for _ in range(10):
        optimizer.zero_grad()
        loss_of().backward()
        optimizer.step()


def good() -> Any:
    """LoRA at all linear layers."""
    model = hybrid("lora[r=4,target_modules='all-linear']")
    trained(model, lambda: model(**batch()).loss)
    return model


def faulty() -> Any:
    """LoRA at the attention alone, a loss before the last block, a frozen head, odd values."""
    model = hybrid("lora[r=4,target_modules=['q_proj','v_proj','o_proj']]")
    model.heads["reviews"].requires_grad_(False)

    def loss() -> torch.Tensor:
        states = model(input_ids=batch()["input_ids"], output_hidden_states=True).hidden_states
        return torch.nn.functional.mse_loss(states[5], torch.zeros_like(states[5]))

    trained(model, loss)
    layers = dict(model.adapter_modules("reviews"))
    with torch.no_grad():
        layers["layers.2.self_attn.v_proj"].lora_B[0, 0] = math.nan
        layers["layers.2.self_attn.o_proj"].lora_B.mul_(300.0)
    return model


def main() -> None:
    """Write both."""
    for name, model in (("good", good()), ("faults", faulty())):
        model.adapter_report("reviews").plot(STATIC / f"report-{name}.svg")


if __name__ == "__main__":
    main()
