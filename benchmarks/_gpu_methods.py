"""The methods that are measured on a GPU, in adapterzoo's words and in PEFT's.

PEFT is not needed: without it its columns stay empty. Its BOFT gets a stand-in for its CUDA
extension, one copy for all blocks, so that it computes all factors and loses no time to it.
"""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

import adapterzoo
from _models import stand_in

# title of the column to whether PEFT casts its adapters to float32
PEERS = {"PEFT bf16": False, "PEFT default": True}


@dataclass(frozen=True)
class Method:
    """One method with its options.

    Attributes:
        title: for tables.
        ours: class of adapterzoo's config.
        fields: of ours.
        theirs: name of PEFT's config; None: it has none.
        peft_fields: of theirs.
        layer: the most that forward and backward of a layer may take, over the layer's own.
        over_peft: title of the column to how many times faster than PEFT.
        kernels: names of those that it may use.
    """

    title: str
    ours: Any
    fields: Mapping[str, Any]
    theirs: str | None = None
    peft_fields: Mapping[str, Any] = field(default_factory=dict)
    layer: float | None = None
    over_peft: Mapping[str, float] = field(default_factory=dict)
    kernels: tuple[str, ...] = ()

    def put(self, base: Any, targets: str, name: str = "a") -> Any:
        """A model on the parameters of `base` with an adapter in training, as if trained."""
        model = adapterzoo.init(twin(base))
        model.add_adapter(name, self.ours(target_modules=targets, **self.fields))
        model.train_adapter(name)
        return stirred(model.train())

    def put_peft(self, base: Any, targets: str, cast: bool) -> Any:
        """Theirs likewise; None without PEFT."""
        if self.theirs is None or not has_peft():
            return None
        peft = importlib.import_module("peft")
        stand_in()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = getattr(peft, self.theirs)(target_modules=targets, **self.peft_fields)
            model = peft.get_peft_model(twin(base), config, autocast_adapter_dtype=cast)
        return stirred(model.train())


def has_peft() -> bool:
    """Whether PEFT is installed."""
    return find_spec("peft") is not None


def twin(model: Any) -> Any:
    """A copy of the modules that shares the parameters."""
    shared = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)


@torch.no_grad()
def stirred(model: Any) -> Any:
    """The model, with what it trains changed by random numbers: a fresh adapter is mostly zeros."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return model


def low_rank(r: int, dropout: float, dora: bool, **goals: Any) -> Method:
    """LoRA, or DoRA."""
    peft_fields = {"r": r, "lora_alpha": 2 * r, "lora_dropout": dropout}
    used: tuple[str, ...] = ("shrink, dropout" if dropout else "shrink", "expand")
    used += ("compose", "compose, no update", "row_norm", "row_norm, gain") if dora else ()
    return Method(
        f"{'DoRA' if dora else 'LoRA'} r={r}{f', dropout {dropout}' if dropout else ''}",
        adapterzoo.DoRAConfig if dora else adapterzoo.LoRAConfig,
        {"r": r, "alpha": 2 * r, "dropout": dropout},
        "LoraConfig",
        {**peft_fields, "use_dora": True} if dora else peft_fields,
        kernels=used,
        **goals,
    )


def boft(b: int, m: int, **goals: Any) -> Method:
    """BOFT."""
    fields = {"boft_block_size": b, "boft_n_butterfly_factor": m}
    used = ("rotate", "cayley_fold", "compose, no update")
    return Method(
        *(f"BOFT b={b} m={m}", adapterzoo.BOFTConfig, fields, "BOFTConfig", fields),
        kernels=used,
        **goals,
    )


def layer_methods(r: int) -> list[Method]:
    """For layers; the goals are those of rank 16."""
    of_lora = {"layer": 1.15} if r == 16 else {}
    of_dora = {"layer": 1.27, "over_peft": {"PEFT bf16": 1.6, "PEFT default": 2.5}}
    of_dora = of_dora if r == 16 else {}
    return [
        low_rank(r, 0.0, False, **of_lora),
        low_rank(r, 0.05, False, **of_lora),
        low_rank(r, 0.0, True, **of_dora),
        low_rank(r, 0.05, True, **of_dora),
    ]


def boft_methods(over_peft: float) -> list[Method]:
    """For layers, which have no rank."""
    return [
        boft(8, 2, layer=1.30, over_peft={"PEFT bf16": over_peft}),
        boft(4, 1),
    ]


def parameters_of(model: nn.Module) -> list[Tensor]:
    """Those that are trained."""
    return [p for p in model.parameters() if p.requires_grad]
