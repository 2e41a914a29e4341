"""(IA)³ in the peers' files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, cast

from torch import Tensor

from adapterzoo.anatomy import Site
from adapterzoo.configs import AdapterConfig, Placement
from adapterzoo.errors import CheckpointError, argument
from adapterzoo.peft_arguments import PeftArgument, PeftArguments
from adapterzoo.spelling import (
    AdapterHubFile,
    AdapterHubSpelling,
    Container,
    Fields,
    PeftLayer,
    PeftPart,
    PeftSpelling,
    Tensors,
    same,
)

from . import _layer_flags
from ._peft_arguments import EXCLUDED, STORED, TARGETS, ours
from ._peft_sites import row_numbers, whole_width

_ARGUMENTS = PeftArguments(
    class_name="IA3Config",
    fields={
        **{n: a for n, a in TARGETS.items() if not n.startswith("layers")},
        **EXCLUDED,
        **STORED,
        "feedforward_modules": ours(None, "feedforward_modules"),
        "init_ia3_weights": PeftArgument(
            True,
            "init_weights",
            {True: "ia3"},
            "vectors start as ones, or with init_weights='bert' as normal values. Write "
            "init_ia3_weights=True.",
        ),
    },
    subsets={"feedforward_modules": lambda config, site: config.scales_input(site)},
)


class _IA3Config(Protocol):
    """The attributes that are read from the config."""

    alpha: float

    def scales_input(self, site: Site) -> bool: ...


def adapterhub(config: type[AdapterConfig]) -> AdapterHubSpelling:
    """Return how AdapterHub spells (IA)³: as LoRA with one vector that scales the output."""
    return AdapterHubSpelling(
        config=config,
        architecture=("lora",),
        fixed={
            "composition_mode": "scale", "use_dora": False, "use_gating": False,
            "vera_b": None, "vera_d": None,
        },
        implied={"convention": "adapterhub"},
        # LoRAConfig(composition_mode="scale") names the layers whose outputs are scaled
        as_another={"convention": "adapterhub", "init_weights": "ia3"},
        fields=_layer_flags.FLAGS
        | same("r", "alpha", "dropout", "init_weights", "init_weights_seed", "dtype"),
        containers=(Container("loras", "layer", read=_read, write=_write),),
        feed_forward=_layer_flags.FEED_FORWARD,
        read_fields=_read_fields,
        place=_layer_flags.place,
        as_flags=_layer_flags.as_flags,
    )  # fmt: skip


def _read_fields(fields: Fields, _file: AdapterHubFile) -> Fields:
    return fields | {"leave_out": fields.get("leave_out") or ()}


def _read(tensors: Tensors, _config: AdapterConfig) -> Tensors:
    vectors, rest = dict(tensors), {}
    if vectors["lora_B"].dim() > 1:
        rest = {"ia3_l": vectors.pop("lora_B").squeeze(-1)}
    # the comparison with the model finds surplus tensors
    return vectors | rest


def _write(tensors: Tensors, _config: AdapterConfig) -> Tensors:
    return {"lora_B": tensors["ia3_l"].unsqueeze(-1)}


def peft(config: type[AdapterConfig]) -> PeftSpelling:
    """Return PEFT's spelling of (IA)³: ℓ `[d_out, 1]` for outputs, `[1, d_in]` for inputs.

    PEFT has no alpha: it becomes a part of ℓ.
    """
    return PeftSpelling(
        config=config,
        peft_type="IA3",
        arguments=_ARGUMENTS,
        tensors={"ia3_l": ("ia3_l",)},
        subsets={"feedforward_modules": _scales_input},
        inert=frozenset(("init_ia3_weights",)),
        read=_from_peft,
        unsayable=_unsayable,
        write=lambda part: _join([part], lambda: None),
        join=_join,
        write_layers=lambda layers: [{"init_ia3_weights": True} for _ in layers],
    )


def _scales_input(tensors: Tensors) -> bool:
    return tensors["ia3_l"].shape[0] == 1


def _from_peft(layer: PeftLayer) -> Tensors:
    vector = layer.tensors["ia3_l"]
    if vector.dim() != 2 or 1 not in vector.shape:
        raise CheckpointError(
            f"at {layer.name!r} ia3_l is {list(vector.shape)}; it is [d_out, 1] or [1, d_in]. Copy "
            f"the file again from where it was saved."
        )
    return {"ia3_l": vector.flatten()}


def _unsayable(placement: Placement) -> str | None:
    site = placement.site
    if site.parameter is not None:
        return f"an adapter at the parameter {site.parameter!r} of {site.path!r}"
    if site.kind == "embedding":
        return f"a vector at {site.path!r}, an embedding, where PEFT has no IA3"
    if site.output_slice is not None and _config(placement).scales_input(site):
        return f"a vector at {site.path!r} that scales the input of one part of the layer"
    return None


def _join(parts: Sequence[PeftPart], _weight: Callable[[], Tensor | None]) -> Tensors:
    """Return the product of all vectors, with 1 for features without one.

    Raises:
        CheckpointError: some scale the input of the layer and others its output.
    """
    site = parts[0].placement.site
    inputs = [_config(part.placement).scales_input(site) for part in parts]
    if len({*inputs}) > 1:
        raise CheckpointError(
            f"at {site.path!r} one adapter scales the input and another the output, but PEFT has "
            f"one vector per layer. Write {argument('format', 'native')}."
        )
    d_out = whole_width(site)
    vector = parts[0].tensors["ia3_l"].new_ones(site.d_in if inputs[0] else d_out)
    for part in parts:
        own = part.placement.site.output_slice
        mine = slice(None) if own is None else row_numbers(own)
        vector[mine] *= part.tensors["ia3_l"] * _config(part.placement).alpha
    return {"ia3_l": vector.unsqueeze(0 if inputs[0] else 1)}


def _config(placement: Placement) -> _IA3Config:
    return cast("_IA3Config", placement.config)
