"""The config of LoRA with initial values from the base weight or from data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from adapterzoo.anatomy import Anatomy
from adapterzoo.averaging import Combination
from adapterzoo.config_base import config_class
from adapterzoo.configs import AdapterConfig
from adapterzoo.contracts import InputPlan, WeightPlan
from adapterzoo.errors import ConfigError, listing
from adapterzoo.fields import Check, field

from ._input_plans import OPTIONS, PLANS
from ._low_rank_config import LowRankConfig
from ._starts import Starts, replaces_weight


class Options(Check):
    """Options by name; `StartedConfig` checks them one by one."""

    legal = "a dict of options by name"

    def fits(self, value: object) -> bool:
        """Return whether it is a mapping from names."""
        return isinstance(value, Mapping) and all(isinstance(name, str) for name in value)

    def nearest(self, value: object, default: object) -> object:
        """Return no options."""
        return {}


@config_class
class StartedConfig(LowRankConfig):
    """Base of the configs whose initial values may replace a part of the base weight.

    Attributes:
        init_weights: also "pissa", the principal part of the weight, by an exact SVD;
            "pissa_niter_4", by that many iterations of a randomized one; "olora", by QR; "eva" and
            "corda", from the inputs of the layers, and "loftq", from the weights before
            quantization, see `add_adapter(init_data=…)`.
        init_options: of "eva": `rho`, `tau`, `use_label_mask`, `whiten` and
            `adjust_scaling_factors`; of "corda": `corda_method`; as in PEFT.
    """

    init_weights: str = field("lora", Starts())
    init_options: Mapping[str, Any] = field({}, Options(), ours=True)

    training_fields: ClassVar[frozenset[str]] = LowRankConfig.training_fields | {"init_options"}

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        legal = OPTIONS.get(self.init_weights, {})
        for name, value in self.init_options.items():
            if name not in legal:
                raise ConfigError(
                    f"{type(self).__name__}(init_weights={self.init_weights!r}, init_options="
                    f"{{{name!r}: …}}): there is no such option. Its options: "
                    f"{listing(legal) if legal else 'none'}. Write one of these."
                )
            default, check = legal[name]
            check(type(self).__name__, f"init_options[{name!r}]", value, default)

    @property
    def options(self) -> dict[str, Any]:
        """All options of the initial values."""
        defaults = {name: value for name, (value, _) in OPTIONS[self.init_weights].items()}
        return defaults | dict(self.init_options)

    def init_plan(self, anatomy: Anatomy) -> InputPlan | WeightPlan | None:
        """Return what EVA, CorDA and LoftQ need."""
        plan = PLANS.get(self.init_weights)
        return None if plan is None else cast("InputPlan", plan(self, self.options, anatomy))

    @property
    def plain(self) -> LowRankConfig:
        """The config of an equal adapter without a start, of rank 2r."""
        if self.init_weights in OPTIONS and not replaces_weight(self.init_weights):
            return self.replace(init_weights="lora", init_options={})
        if not replaces_weight(self.init_weights):
            return super().plain
        # the scaling stays as it is
        factor = math.sqrt(2) if self.use_rslora else 2
        return self.replace(
            init_weights="lora", init_options={}, r=2 * self.r, alpha=factor * self.alpha,
            rank_pattern={key: 2 * rank for key, rank in self.rank_pattern.items()},
            alpha_pattern={key: factor * alpha for key, alpha in self.alpha_pattern.items()},
        )  # fmt: skip

    def plain_tensors(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the tensors of the adapter of `plain`."""
        return joined(tensors) if replaces_weight(self.init_weights) else tensors

    def own_tensors(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the tensors of an adapter with a start from those of a LoRA of rank 2r."""
        if not replaces_weight(self.init_weights) or not {"lora_A", "lora_B"} <= tensors.keys():
            return tensors
        return divided(tensors)

    @classmethod
    def combined(
        cls, configs: Sequence[AdapterConfig], strategy: Combination, anatomy: Anatomy
    ) -> LowRankConfig:
        """Return the config of the combination, which has no start."""
        return super().combined([config.plain for config in configs], strategy, anatomy)


def joined(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of an adapter with [A; A₀] and [B, −B₀] as its factors."""
    found = dict(tensors)
    a, b = found.pop("start.lora_A"), found.pop("start.lora_B")
    found["lora_A"] = torch.cat([found["lora_A"], a.to(found["lora_A"])], -2)
    found["lora_B"] = torch.cat([found["lora_B"], -b.to(found["lora_B"])], -1)
    return found


def divided(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of an adapter with a start; undoes `joined`."""
    found = dict(tensors)
    found["lora_A"], found["start.lora_A"] = found["lora_A"].tensor_split(2, -2)
    found["lora_B"], b = found["lora_B"].tensor_split(2, -1)
    found["start.lora_B"] = -b
    return found
