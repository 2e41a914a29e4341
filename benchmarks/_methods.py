"""The same adapter in adapterzoo's words and in PEFT's, and the check that both are the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import peft
import torch

import adapterzoo
from _models import BERT, LLAMA, Shape, plain, twin

_FACTORS = {"lora_A": "lora_A.default.weight", "lora_B": "lora_B.default.weight"}
_MAGNITUDE = {"m": "lora_magnitude_vector.default.weight"}
_ROTATION = {"boft_R": "boft_R.default", "boft_s": "boft_s.default"}

# of a step and of the saved bytes, on the Llama and on the BERT; None: no goal
_Goals: TypeAlias = tuple[tuple[float, float | None], tuple[float, float | None]]


@dataclass(frozen=True)
class Method:
    """One method with its options.

    Attributes:
        title: for tables.
        ours: class of adapterzoo's config.
        theirs: class of PEFT's config.
        fields: of ours.
        peft_fields: of theirs.
        parameters: ours to theirs, by name below the layer.
        goals: shape to the most that a step and the saved bytes may be, over the floor's.
    """

    title: str
    ours: Any
    theirs: Any
    fields: dict[str, Any]
    peft_fields: dict[str, Any]
    parameters: dict[str, str]
    goals: dict[str, tuple[float, float | None]]

    def put(self, shape: Shape, base: Any) -> Any:
        """Our model with a trained-for adapter, on the parameters of `base`."""
        model = adapterzoo.init(twin(base))
        model.add_adapter("a", self.ours(target_modules=shape.targets, **self.fields))
        model.train_adapter("a")
        return model.train()

    def put_peft(self, shape: Shape, base: Any, **keywords: Any) -> Any:
        """Their model likewise."""
        config = self.theirs(target_modules=shape.targets, **self.peft_fields)
        return peft.get_peft_model(twin(base), config, **keywords).train()

    def equalise(self, ours: Any, theirs: Any) -> list[tuple[Any, Any]]:
        """Fill both with the same random numbers; the pairs of parameters, ours first."""
        source = torch.Generator().manual_seed(2)
        named = dict(plain(theirs).base_model.named_parameters())
        pairs = []
        for path, adapter in ours.adapter_modules("a"):
            for name, peft_name in self.parameters.items():
                mine, other = adapter.get_parameter(name), named[f"{path}.{peft_name}"]
                with torch.no_grad():
                    mine.add_(0.02 * torch.randn(mine.shape, generator=source))
                    other.copy_(mine)
                pairs.append((mine, other))
        return pairs

    def difference(self, shape: Shape, base: Any) -> float:
        """The largest relative difference between ours and PEFT's in loss and gradients.

        Dropout is off: the two draw other numbers.
        """
        ours, theirs = self.put(shape, base).eval(), self.put_peft(shape, base).eval()
        pairs = self.equalise(ours, theirs)
        losses = [shape.loss(model) for model in (ours, theirs)]
        for loss in losses:
            loss.backward()
        compared = [(losses[0], losses[1]), *((p.grad, q.grad) for p, q in pairs)]
        return max(_relative(a, b) for a, b in compared)


def _relative(a: Any, b: Any) -> float:
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm().clamp_min(1e-12))


def _low_rank(
    title: str,
    ours: Any,
    dropout: float,
    goals: _Goals,
    **more: Any,
) -> Method:
    return Method(
        title,
        ours,
        peft.LoraConfig,
        {"r": 8, "alpha": 16, "dropout": dropout},
        {"r": 8, "lora_alpha": 16, "lora_dropout": dropout, **more},
        {**_FACTORS, **(_MAGNITUDE if more else {})},
        _of_shapes(goals),
    )


def _boft(b: int, m: int, goals: _Goals) -> Method:
    fields = {"boft_block_size": b, "boft_n_butterfly_factor": m}
    ours, theirs = adapterzoo.BOFTConfig, peft.BOFTConfig
    return Method(f"BOFT b={b} m={m}", ours, theirs, fields, fields, _ROTATION, _of_shapes(goals))


def _of_shapes(
    goals: _Goals,
) -> dict[str, tuple[float, float | None]]:
    return {LLAMA.title: goals[0], BERT.title: goals[1]}


# saved bytes of LoRA are its minimum: the layers' inputs, which it must keep
LORA, DORA = adapterzoo.LoRAConfig, adapterzoo.DoRAConfig
METHODS = [
    _low_rank("LoRA r=8", LORA, 0.0, ((1.07, 1.32), (1.07, 1.38))),
    _low_rank("LoRA r=8, dropout 0.05", LORA, 0.05, ((1.12, 1.36), (1.12, None))),
    _low_rank("DoRA r=8", DORA, 0.0, ((1.15, 1.60), (1.15, None)), use_dora=True),
    _low_rank("DoRA r=8, dropout 0.05", DORA, 0.05, ((1.32, 1.65), (1.32, None)), use_dora=True),
    _boft(4, 1, ((1.20, 1.60), (1.20, None))),
    _boft(8, 2, ((1.20, 1.65), (1.20, None))),
]
