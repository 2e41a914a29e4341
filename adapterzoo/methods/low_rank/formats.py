"""Methods with low-rank factors in the files of PEFT and AdapterHub, and in PEFT's configs.

AdaLoRA (Zhang et al. 2023, arXiv:2303.10512, eq. 3) is read as LoRA: ΔW = P Λ Q with the trained
diagonal Λ, some entries of which training prunes. PEFT's lora_A, lora_E and lora_B are Q, Λ and P,
and ΔW is scaled by lora_alpha / (init_r + 1e-5), with the rank before pruning. That is a LoRA with
B = P Λ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from adapterzoo.anatomy import Anatomy, Site
from adapterzoo.config import FACTOR, FLAG, AdapterConfig, AnyValue, Items, Placement, Range, Share
from adapterzoo.contracts import compute_dtype
from adapterzoo.errors import CheckpointError, argument, listing
from adapterzoo.methods import _parts, _targets
from adapterzoo.methods._peft import (
    EXCLUDED,
    STORED,
    TARGETS,
    TOKENS,
    bias,
    ignored,
    only_native,
    ours,
    refuse_ignored,
    rows_of,
    whole_width,
)
from adapterzoo.methods._targets import COPIES, RANK
from adapterzoo.patterns import matches
from adapterzoo.peft_arguments import PeftArgument, PeftArguments
from adapterzoo.spelling import (
    CHANNEL,
    KERNEL,
    POINT,
    AdapterHubFile,
    AdapterHubSpelling,
    Container,
    Fields,
    PeftLayer,
    PeftOutput,
    PeftPart,
    PeftSpelling,
    Tensors,
    same,
    spelled,
)

from .dora import DoRAConfig
from .factors import LowRankConfig
from .lora import Invocation, LoRAConfig
from .mtl_lora import MTLLoRAConfig
from .starts import OPTIONS, factors
from .vera import DvoRAConfig, VeraConfig

# --- PEFT ---

# the field of aLoRA, which only LoRA has
_INVOCATION = "alora_invocation_tokens"

# fields without a counterpart here, and their effect
_REFUSED = {
    "use_qalora": "it pools the input of each group before A",
    _INVOCATION: "it acts only after certain tokens",
    "layer_replication": "it has more layers than the model",
    "use_bdlora": "its factors are block-diagonal and packed",
    "arrow_config": "it routes each token among several adapters",
    "kasa_config": "it removes singular values from the base weights",
    "monteclora_config": "it draws its factors at random in each forward",
    "megatron_config": "it belongs to layers that Megatron has split",
    "enable_lora": "it was written by PEFT before 0.3, for parts of fused layers",
}

_ARGUMENTS = PeftArguments(
    class_name="LoraConfig",
    fields={
        **TARGETS,
        **EXCLUDED,
        **STORED,
        **bias(),
        **TOKENS,
        "target_parameters": ours(None, "target_parameters"),
        "r": ours(8, "r", RANK),
        "lora_alpha": ours(8, "alpha", FACTOR),
        "lora_dropout": ours(0.0, "dropout", Share()),
        "use_rslora": ours(False, "use_rslora", FLAG),
        "rank_pattern": ours({}, "rank_pattern"),
        "alpha_pattern": ours({}, "alpha_pattern"),
        "init_lora_weights": PeftArgument(
            True,
            "init_weights",
            {True: "lora", False: "random", "OLoRA": "olora"},
            passes=True,
            check=AnyValue(),
        ),
        "megatron_core": PeftArgument("megatron.core"),
        "qalora_group_size": PeftArgument(16),
        **dict.fromkeys(
            ("corda_config", "eva_config", "loftq_config", "lora_ga_config", "velora_config"),
            PeftArgument(),
        ),
        "ensure_weight_tying": PeftArgument(
            False, hint="DoRA's magnitudes are those of one layer. Leave it out."
        ),
        **{
            name: PeftArgument(hint=f"{reason}, which is not supported here. Leave it out.")
            for name, reason in _REFUSED.items()
            if name != "enable_lora"
        },
    },
)

# fields of methods whose initial values may come from `init_data`
_FROM_DATA: Mapping[str, PeftArgument] = {
    "eva_config": PeftArgument(
        ours="init_options",
        part_class="EvaConfig",
        parts={
            **{name: ours(default, name) for name, (default, _) in OPTIONS["eva"].items()},
            "label_mask_value": PeftArgument(
                -100, hint="tokens to leave out have the label -100. Leave it out."
            ),
        },
    ),
    "corda_config": PeftArgument(
        ours="init_options",
        part_class="CordaConfig",
        parts={
            **{name: ours(default, name) for name, (default, _) in OPTIONS["corda"].items()},
            "cache_file": PeftArgument(),
            "covariance_file": PeftArgument(),
            "verbose": PeftArgument(False),
            "use_float16_for_covariance": PeftArgument(False),
            "prune_temporary_fields": PeftArgument(True),
        },
    ),
    "loftq_config": PeftArgument(
        part_class="LoftQConfig",
        parts={
            "loftq_bits": PeftArgument(
                4, hint="the base model is already quantized, in its own bits. Leave it out."
            ),
            "loftq_iter": PeftArgument(
                1,
                hint="further iterations quantize the base weights again, but here these stay as "
                "they are. Write loftq_iter=1.",
            ),
        },
    ),
}


def _unused_options(fields: Mapping[str, Any]) -> str | None:
    """Return what is wrong with options for initial values that the config does not use."""
    asked = fields.get("init_lora_weights", fields.get("init_weights"))
    for start in OPTIONS:
        name = f"{start}_config"
        if fields.get(name) and asked != start:
            return (
                f"{name}={fields[name]!r} with init_lora_weights={asked!r}: it has an effect only "
                f"with init_lora_weights={start!r}. Write that, and its data as init_data=… beside "
                f"the config; or leave it out."
            )
    return None


_TENSORS = {"lora_A": ("lora_A.weight",), "lora_B": ("lora_B.weight",)}
_MAGNITUDE = ("lora_magnitude_vector", "lora_magnitude_vector.weight")
# VeLoRA's fields, which only PEFT's backward pass reads
_UNREAD = {"velora_embed": ("lora_velora_embed",)}
# PEFT's files of these hold the trained factors; `pissa_niter_…` draws random numbers
_REPRODUCED = ("pissa", "olora")
# initial values that leave the base weights unchanged
_PURE_INITS = (None, True, False, "gaussian", "eva", "orthogonal", "mica")


def _refuse(fields: Mapping[str, Any]) -> str | None:
    """Return why a config of PEFT's LoRA cannot be reproduced."""
    for name, reason in _REFUSED.items():
        if fields.get(name) and (name != _INVOCATION or fields.get("use_dora")):
            return (
                f"it says {name}={str(fields[name])[:100]}: {reason}. Merge the adapter with PEFT: "
                f"peft_model.merge_and_unload().save_pretrained(…)."
            )
    init = fields.get("init_lora_weights")
    if any(init is pure or (isinstance(init, str) and init == pure) for pure in _PURE_INITS):
        return None
    if init in _REPRODUCED and not fields.get("use_dora"):
        return None
    return (
        f"it says init_lora_weights={str(init)[:80]!r}: that initialization changed the base "
        f"weights, so A and B belong to weights that this model does not have. Save it with PEFT "
        f"as a plain LoRA: peft_model.save_pretrained(…, "
        f"path_initial_model_for_weight_conversion=…)."
    )


# of a convolution, PEFT's LoRA and DoRA do not read these
_IGNORED = ("dilation", "padding_mode")


def _read_fields(layer: PeftLayer, fields: Fields) -> Fields:
    """Return the fields of our config at a layer."""
    init, site = fields["init_weights"], layer.site
    refuse_ignored(site, *_IGNORED)
    # embeddings and layers that are only read have no dropout
    drops = site.is_called and site.kind != "embedding"
    return {
        **fields,
        "init_weights": init if init in _REPRODUCED else "lora",
        "dropout": fields["dropout"] if drops else 0.0,
    }


def _unsayable(placement: Placement) -> str | None:
    """Return why PEFT's format cannot express an adapter."""
    config, site = placement.config, placement.site
    named = config.to_dict().get("target_modules") or ()
    if site.is_of_attention and matches(site.path, named):
        return None
    if not site.is_called or (site.parameter is not None and "." in site.parameter):
        return f"an adapter at {site.name!r}, where PEFT's would not act: no module there is called"
    if config.to_dict().get("use_gating"):
        return f"{type(config).__name__}(use_gating=True), but PEFT's LoRA has no gate"
    return ignored(site, *_IGNORED)


def _write_layer(layer: PeftOutput) -> Fields:
    """Return the fields of PEFT's config for a layer; its adapters must have equal scalings."""
    parts, site = layer.parts, layer.parts[0].placement.site
    rank = layer.tensors["lora_A"].shape[0] // (site.experts or 1)
    configs = [cast("LowRankConfig", part.placement.config) for part in parts]
    one = configs[0]
    # an invocation equals PEFT's list
    invoked = [Items(config.to_dict().get(_INVOCATION) or ()) for config in configs]
    said: dict[str, set[Any]] = {
        "scaling": {config.scaling_at(site.name) for config in configs},
        "use_rslora": {config.use_rslora for config in configs},
        "dropout": {config.dropout for config in configs},
        _INVOCATION: {*invoked},
    }
    for name, values in said.items():
        if len(values) > 1:
            differing = f"{name} ({listing(sorted(values))})"
            raise only_native(f"the adapters at {site.name!r} differ in {differing}")
    if layer.is_parameter and (one.dropout or "lora_B_bias" in layer.tensors):
        has = f"dropout={one.dropout} or a bias of B, which a parameter cannot have"
        raise only_native(f"the adapter at {site.name!r} has {has}")
    alpha = one.alpha_at(site.name)
    if len(parts) > 1:
        alpha = one.scaling_at(site.name) * (rank**0.5 if one.use_rslora else rank)
        alpha = int(alpha) if alpha == int(alpha) else alpha
    return {
        "r": rank,
        "lora_alpha": alpha,
        # embeddings have no dropout
        "lora_dropout": None if site.kind == "embedding" else one.dropout,
        "use_rslora": one.use_rslora,
        "init_lora_weights": True,
        "bias": "none",
        "lora_bias": "lora_B_bias" in layer.tensors,
        _INVOCATION: invoked[0],
    }


def _write_layers(layers: Sequence[PeftOutput], _said: Sequence[Fields]) -> list[Fields]:
    """Return the fields of PEFT's config for each layer, with the invocation if any has one."""
    written = [_write_layer(layer) for layer in layers]
    # an empty value is compared with those of other layers
    if not any(fields[_INVOCATION] for fields in written):
        for fields in written:
            del fields[_INVOCATION]
    return written


def _join(parts: Sequence[PeftPart], weight: Callable[[], Tensor | None]) -> Tensors:
    """Return one low-rank update of a whole layer that computes the same as its parts, for PEFT.

    The rows of the factors A are concatenated; each B fills its own columns in its part's rows.

    Raises:
        CheckpointError: a row has two magnitudes, or an unadapted row has none.
    """
    d_out = whole_width(parts[0].placement.site)
    a, b = parts[0].tensors["lora_A"], parts[0].tensors["lora_B"]
    rank = sum(part.tensors["lora_A"].shape[-2] for part in parts)
    joined = {
        "lora_A": torch.cat([part.tensors["lora_A"] for part in parts], -2),  # [*, rank, d_in]
        "lora_B": b.new_zeros(*a.shape[:-2], d_out, rank),
    }
    start = 0
    for part in parts:
        mine = rows_of(part.placement.site)
        stop = start + part.tensors["lora_A"].shape[-2]
        joined["lora_B"][..., mine, start:stop] = part.tensors["lora_B"]
        start = stop
        for name in part.tensors.keys() & {"lora_B_bias", "m"}:
            tensor = part.tensors[name]
            whole = joined.setdefault(name, tensor.new_zeros(d_out))
            # biases of several adapters on one row add up
            whole[mine] = whole[mine] + tensor
    return _as_parameter(parts[0].placement.site, joined)


def _read(layer: PeftLayer) -> Tensors:
    """Return our tensors `[*experts, rank, d_in]` and `[*experts, d_out, rank]` from PEFT's.

    For a parameter PEFT has lora_A `[experts · rank, d_in]`, experts first, and lora_B
    `[d_out, rank · experts]`, ranks first. It takes the last two dimensions of a parameter as d_out
    and d_in, unless it has three and its module says `is_transposed`; if the module does not, A
    belongs to the outputs.

    Raises:
        CheckpointError: PEFT has changed the weight in an unknown way.
    """
    if not layer.is_parameter:
        return _of_attention(layer.site, _read_start(layer), 2.0)
    init, site = layer.fields["init_lora_weights"], layer.site
    if init in _REPRODUCED:
        raise CheckpointError(
            f"init_lora_weights={init!r} changed the weight of {layer.name!r}. Merge it in PEFT."
        )
    a, b, count = layer.tensors["lora_A"], layer.tensors["lora_B"], site.experts or 1
    a = a.unflatten(0, (count, -1))  # [experts, rank, d_in]
    b = b.unflatten(1, (-1, count)).movedim(2, 0)  # [experts, d_out, rank]
    if _is_flipped(site):
        a, b = b.mT, a.mT
    if not site.experts:
        a, b = a[0], b[0]
    return {**layer.tensors, "lora_A": a.contiguous(), "lora_B": b.contiguous()}


def _as_parameter(site: Site, tensors: Tensors) -> Tensors:
    """Return PEFT's tensors from ours; undo `_read`, and leave those of layers unchanged.

    Args:
        site: the adapter's site.
        tensors: by our parameter names.
    """
    if site.parameter is None or site.is_of_attention:
        return _of_attention(site, tensors, 0.5)
    a, b = tensors["lora_A"], tensors["lora_B"]
    if not site.experts:
        a, b = a[None], b[None]
    if _is_flipped(site):
        a, b = b.mT, a.mT
    a = a.flatten(0, 1)  # [experts · rank, d_in]
    b = b.movedim(0, 2).flatten(1)  # [d_out, rank · experts]
    return {**tensors, "lora_A": a.contiguous(), "lora_B": b.contiguous()}


def _of_attention(site: Site, tensors: Tensors, factor: float) -> Tensors:
    """Return the tensors with a multiple of B at the output layer of `nn.MultiheadAttention`.

    PEFT 0.21.2 adds B A to the weight of that layer twice, both in each forward and in merging.
    """
    if not site.is_of_attention or site.parameter != "out_proj.weight":
        return tensors
    return {n: t * factor if n == "lora_B" else t for n, t in tensors.items()}


def _is_flipped(site: Site) -> bool:
    """Return whether PEFT's A belongs to the outputs of the weight."""
    if site.experts:
        return site.transposed != site.says_transposed
    return site.transposed or site.kind == "embedding"


def _read_start(layer: PeftLayer) -> Tensors:
    """Return the tensors of a layer, and the part that PEFT has subtracted from the weight.

    Raises:
        CheckpointError: the layer has no weight to compute the part from.
    """
    init, fields = layer.fields["init_lora_weights"], layer.fields
    if init not in _REPRODUCED:
        return layer.tensors
    w = layer.weight()
    if w is None:
        raise CheckpointError(
            f"init_lora_weights={init!r} changed the weight of {layer.name!r}, which is quantized "
            "here. Load it in the dtype of its training."
        )
    rank = layer.tensors["lora_A"].shape[0]
    s = fields["lora_alpha"] / (math.sqrt(rank) if fields["use_rslora"] else rank)
    a, b = factors(init, w.to(compute_dtype(w.dtype)), rank, s, None)
    like = layer.tensors["lora_A"]
    return layer.tensors | {"start.lora_A": a.to(like), "start.lora_B": b.to(like)}


# fields that PEFT's AdaLoRA does not read, and fields that only its training reads
_INERT_IN_ADALORA = frozenset(
    ("alpha_pattern", "beta1", "beta2", "deltaT", "init_lora_weights", "lora_bias",
     "orth_reg_weight", "r", "rank_pattern", "target_r", "tfinal", "tinit", "total_step",
     "use_dora", "use_rslora")
)  # fmt: skip


def _read_adalora_fields(layer: PeftLayer, fields: Fields) -> Fields:
    """Return our config fields at a layer; its tensor gives the rank left by training."""
    r, alpha = layer.tensors["lora_A"].shape[0], fields["alpha"]
    scaled = alpha if alpha > 0 else r
    # PEFT divides by this, also where ranks have been pruned
    return {
        **fields,
        "r": max(r, 1),
        "alpha": scaled * max(r, 1) / (layer.fields["init_r"] + 1e-5),
    }


def _read_adalora(layer: PeftLayer) -> Tensors:
    """Return A, and B = P Λ; a layer with nothing left gets zeros of rank 1."""
    a, b = layer.tensors["lora_A"], layer.tensors["lora_B"]
    if not len(a):
        return {"lora_A": a.new_zeros(1, a.shape[1]), "lora_B": b.new_zeros(b.shape[0], 1)}
    return {"lora_A": a, "lora_B": b * layer.tensors["lora_E"].view(1, len(a))}


def _unsayable_dora(placement: Placement) -> str | None:
    if placement.config.to_dict()["convention"] != "paper":
        return "DoRAConfig(convention='adapterhub'), but PEFT's DoRA is the paper's"
    if (parameter := placement.site.parameter) is not None:
        return f"DoRA at the parameter {parameter!r}, where PEFT has only LoRA"
    return _unsayable(placement)


def _join_dora(parts: Sequence[PeftPart], weight: Callable[[], Tensor | None]) -> Tensors:
    """Return one adapter of a whole layer; unadapted rows keep the norm of the base weight.

    Raises:
        CheckpointError: a row has two magnitudes, or the norm of an unadapted row is unknown.
    """
    site = parts[0].placement.site
    rows = torch.cat([rows_of(part.placement.site) for part in parts])
    if len(rows.unique()) < len(rows):
        raise only_native(f"at {site.path!r} {len(parts)} adapters with magnitudes share rows")
    joined = _join(parts, weight)
    m = joined["m"]
    if len(rows) == len(m):
        return joined
    # a part of a sharded weight does not have its own norm
    w = weight()
    plain = type(w) in (Tensor, torch.nn.Parameter)
    if w is None or not plain or w.dim() != 2 or not w.is_floating_point():
        why = "only some rows are adapted, and the others have no norm (quantized or sharded)"
        raise only_native(f"at {site.path!r} {why}")
    w = w.detach().to(m)
    norms = torch.linalg.vector_norm(w.T if site.transposed else w, dim=1)  # [d_out]
    norms[rows] = m[rows]
    return {**joined, "m": norms}


_VERA_ARGUMENTS = PeftArguments(
    class_name="VeraConfig",
    fields={
        **TARGETS,
        **STORED,
        **bias("vera_only"),
        "r": ours(256, "r", RANK),
        "projection_prng_key": ours(0, "projection_prng_key", Range(0, 2**63 - 1)),
        "save_projection": ours(True, "save_projection", FLAG),
        "vera_dropout": ours(0.0, "dropout", Share()),
        "d_initial": ours(0.1, "vera_d", FACTOR),
        "init_weights": PeftArgument(
            True,
            "init_weights",
            {True: "vera", False: "random"},
        ),
    },
)


def _read_vera(
    fields: Mapping[str, Any], tensors: Tensors, layers: Sequence[PeftLayer], _anatomy: Anatomy
) -> tuple[Fields, Tensors]:
    """Return A and B; in files with save_projection=False they are drawn again.

    Raises:
        CheckpointError: A or B is missing.
    """
    if len(tensors) == 2 or not layers:
        return {}, tensors
    if tensors or fields["save_projection"]:
        raise CheckpointError(
            "the file lacks vera_A or vera_B. Copy it again, or write 'save_projection': false in "
            "adapter_config.json, to draw them from its projection_prng_key."
        )
    own, weight = layers[0].tensors["lambda_d"].dtype, layers[0].weight()
    sites = [layer.site for layer in layers]
    a, b = _projections(fields["projection_prng_key"], fields["r"], sites)
    # as in PEFT, whose projections get the layers' dtype before the adapter's
    dtype = own if weight is None else weight.dtype
    return {}, {"lora_A": a.to(dtype).to(own), "lora_B": b.to(dtype).to(own)}


def _projections(key: int, r: int, sites: Sequence[Site]) -> tuple[Tensor, Tensor]:
    """Draw A `[r, widest d_in]`, then B `[widest d_out, r]`, as PEFT does."""
    source = torch.Generator().manual_seed(key)
    widest = max(site.d_in for site in sites), max(site.d_out for site in sites)
    # explicit: a caller's default device or dtype must not change the numbers
    where: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}
    a, b = torch.empty(r, widest[0], **where), torch.empty(widest[1], r, **where)
    for drawn in (a, b):
        torch.nn.init.kaiming_uniform_(drawn, generator=source)
    return a, b


def _write_vera(
    config: AdapterConfig, tensors: Tensors, anatomy: Anatomy
) -> tuple[Fields, Tensors]:
    """Return A and B, or nothing if PEFT is to draw them again.

    Raises:
        CheckpointError: PEFT would draw other matrices.
    """
    if config["save_projection"]:
        return {"save_projection": True}, tensors
    sites = [placement.site for placement in config.placements(anatomy)]
    again = _projections(_key(config), config["r"], sites)
    # whatever the layers' dtype, to which both libraries round
    dtypes = torch.float32, torch.bfloat16, torch.float16
    drawn = (tuple(t.to(dtype) for t in again) for dtype in dtypes)
    pair = tensors["lora_A"].cpu(), tensors["lora_B"].cpu()
    if not any(
        all(torch.equal(t.to(own.dtype), own) for t, own in zip(each, pair, strict=True))
        for each in drawn
    ):
        raise CheckpointError(
            f"VeraConfig(save_projection=False): PEFT would draw other A and B. Write "
            f"{argument('format', 'native')}, or give the adapter save_projection=True."
        )
    return {"save_projection": False}, {}


def _key(config: AdapterConfig) -> int:
    seed = config["init_weights_seed"]
    return cast("int", config["projection_prng_key"] if seed is None else seed)


def _peft_lora(config: type[AdapterConfig]) -> PeftSpelling:
    return PeftSpelling(
        config=config,
        peft_type="LORA",
        fixed={"use_dora": False},
        arguments=replace(
            _ARGUMENTS,
            fields={
                **_ARGUMENTS.fields,
                **_FROM_DATA,
                "lora_bias": ours(False, "lora_bias", FLAG),
                "ensure_weight_tying": ours(False, "ensure_weight_tying", FLAG),
                _INVOCATION: ours(None, _INVOCATION, Invocation()),
            },
            unsayable=_unused_options,
        ),
        tensors={**_TENSORS, "lora_B_bias": ("lora_B.bias",), **_UNREAD},
        embedding_tensors={"lora_A": ("lora_embedding_A",), "lora_B": ("lora_embedding_B",)},
        transposes={"lora_A": "lora_B", "lora_B": "lora_A"},
        convolution_shapes={"lora_A": KERNEL, "lora_B": POINT, "m": CHANNEL},
        patterns={"rank_pattern": "r", "alpha_pattern": "lora_alpha"},
        beside=COPIES,
        of_parameters=True,
        inert=frozenset(("merge_weights", "runtime_config")),
        refuse=_refuse,
        read=lambda layer: {k: t for k, t in _read(layer).items() if k not in _UNREAD},
        read_fields=_read_fields,
        unsayable=_unsayable,
        write=lambda part: _as_parameter(part.placement.site, part.tensors),
        join=_join,
        write_layers=_write_layers,
    )


def _unsayable_vera(placement: Placement) -> str | None:
    if placement.config["convention"] != "paper":
        return "VeraConfig(convention='adapterhub'), but PEFT's VeRA is the paper's"
    if (parameter := placement.site.parameter) is not None:
        return f"an adapter at the parameter {parameter!r}"
    return None


# --- AdapterHub: one architecture, told apart by fields ---

# fields of AdapterHub's LoRAConfig, except those that select another method
_ADAPTERHUB_FIELDS = _targets.FLAGS | same(
    "r", "alpha", "dropout", "init_weights", "init_weights_seed", "dtype"
)
# fields that every LoRA has, and VeRA lacks
_FIXED = {"composition_mode": "add", "vera_b": None, "vera_d": None}
# files of MTL-LoRA cannot hold a dense matrix Λ
_DIAGONAL = {"task_specific_matrix_type": "singular_values"}
_VERA_FIXED = {"composition_mode": "add", "use_gating": False}
_VERA_NAMES = {"vera_D": "lambda_d", "vera_B": "lambda_b"}


def _read_adapterhub_fields(fields: Fields, file: AdapterHubFile) -> Fields:
    """Return the fields of a file in our terms."""
    # the initialization does not matter for loaded values
    if fields.get("init_weights") not in ("lora", "bert"):
        fields.pop("init_weights", None)
    # adapters before 1.1 scaled by 1, and it multiplies a gated update only by the gate
    if (file.is_before(1, 1, 0) or fields.get("use_gating")) and "r" in fields:
        fields["alpha"] = fields["r"]
    if fields.get("use_gating"):
        fields["convention"] = "adapterhub"
    return fields


def _as_flags(config: AdapterConfig, anatomy: Anatomy) -> AdapterConfig | None:
    """Return the config with its sites and scaling in AdapterHub's fields."""
    config = cast("LowRankConfig", config)
    if config.use_rslora:
        config = config.replace(alpha=config.scaling_at("") * config.r, use_rslora=False)
    return _targets.as_flags(config, anatomy)


def _unsayable_in_adapterhub(config: AdapterConfig) -> str | None:
    """Return why AdapterHub's format cannot express the config."""
    values = config.to_dict()
    unknown = [m for m in values["attn_matrices"] if m not in _targets.THEIR_MATRICES.values()]
    if unknown:
        return f"adapters has no attn_matrices={unknown!r}"
    if values.get("use_gating") and values["convention"] == "paper":
        return _parts.UNSAYABLE
    if values.get("use_gating") and values["alpha"] != values["r"]:
        return (
            f"adapters does not scale a gated update, but this one is scaled by alpha / r = "
            f"{values['alpha']} / {values['r']}"
        )
    return None


def _unsayable_dora_in_adapterhub(config: AdapterConfig) -> str | None:
    if config["convention"] != "adapterhub":
        return (
            "adapters computes another DoRA, without the scaling in the norm and with a scaled "
            "bias: convention='adapterhub'"
        )
    return _unsayable_in_adapterhub(config)


def _read_magnitudes(tensors: Tensors, _config: AdapterConfig) -> Tensors:
    """Return a file's tensors with m `[d_out, 1]` as `[d_out]`."""
    m = tensors["m"]
    # the comparison with the model finds any other shape
    return {**tensors, "m": m.squeeze(1) if m.shape[1:] == (1,) else m.unsqueeze(0)}  # [d_out]


_MAGNITUDES = Container(
    "loras",
    "layer",
    names={"m.weight": "m"},
    read=_read_magnitudes,
    # undo it
    write=lambda tensors, config: {**tensors, "m": tensors["m"].unsqueeze(1)},  # [d_out, 1]
)
_PROJECTIONS = Container("shared_parameters", "model")


def _adapterhub_lora(config: type[AdapterConfig]) -> AdapterHubSpelling:
    return AdapterHubSpelling(
        config=config,
        architecture=("lora",),
        fixed={**_FIXED, "use_dora": False},
        fields=_ADAPTERHUB_FIELDS | same("use_gating"),
        omitted=("convention",),
        containers=(Container("loras", "layer"),),
        feed_forward=_targets.FEED_FORWARD,
        read_fields=_read_adapterhub_fields,
        place=_targets.place,
        unsayable=_unsayable_in_adapterhub,
        as_flags=_as_flags,
    )


def _adapterhub_vera(config: type[AdapterConfig]) -> AdapterHubSpelling:
    """Return how AdapterHub spells VeRA, with a single A and B for all layers."""
    return AdapterHubSpelling(
        config=config,
        architecture=("lora",),
        fixed={**_VERA_FIXED, "use_dora": False},
        constants={"init_weights": "vera"},
        required=("vera_d", "vera_b"),
        implied={"convention": "adapterhub"},
        fields=_targets.FLAGS
        | same("r", "alpha", "dropout", "vera_d", "vera_b", "dtype", "init_weights_seed"),
        omitted=("projection_prng_key",),
        containers=(Container("loras", "layer", names=_VERA_NAMES), _PROJECTIONS),
        fused="adapters cannot run VeRA in a fused layer",
        feed_forward=_targets.FEED_FORWARD,
        place=_targets.place,
        as_flags=_targets.as_flags,
    )


# --- the methods ---

spelled(
    _peft_lora,
    lambda config: PeftSpelling(
        config=config,
        peft_type="ADALORA",
        becomes="a LoRA adapter that computes the same; its ranks are no longer trained",
        tensors={"lora_A": ("lora_A",), "lora_B": ("lora_B",), "lora_E": ("lora_E",)},
        fields={
            "init_r": ours(12, "r", RANK),
            "lora_alpha": ours(8.0, "alpha", FACTOR),
            "lora_dropout": ours(0.0, "dropout", Share()),
        },
        inert=_INERT_IN_ADALORA,
        read_fields=_read_adalora_fields,
        read=_read_adalora,
    ),
    _adapterhub_lora,
)(LoRAConfig)

spelled(
    lambda config: replace(
        _peft_lora(config),
        fixed={"use_dora": True, "lora_bias": False},
        arguments=_ARGUMENTS,
        tensors={**_TENSORS, "m": _MAGNITUDE, **_UNREAD},
        of_parameters=False,
        wide=("m",),
        unsayable=_unsayable_dora,
        join=_join_dora,
    ),
    lambda config: replace(
        _adapterhub_lora(config),
        fixed={**_FIXED, "use_dora": True, "use_gating": False},
        fields=_ADAPTERHUB_FIELDS,
        implied={"convention": "adapterhub"},
        omitted=(),
        containers=(_MAGNITUDES,),
        fused="adapters cannot run DoRA in a fused layer",
        unsayable=_unsayable_dora_in_adapterhub,
    ),
)(DoRAConfig)

spelled(
    lambda config: replace(
        _adapterhub_lora(config),
        architecture=("mtl_lora",),
        fixed={**_FIXED, **_DIAGONAL, "use_dora": False, "use_gating": False},
        fields=_ADAPTERHUB_FIELDS | same("n_up_projection", "weights_sharpness"),
        omitted=(),
        fused="adapters cannot run MTL-LoRA in a fused layer",
    ),
)(MTLLoRAConfig)

spelled(
    lambda config: PeftSpelling(
        config=config,
        peft_type="VERA",
        beside=frozenset({"bias"}),
        arguments=_VERA_ARGUMENTS,
        tensors={"lambda_d": ("vera_lambda_d",), "lambda_b": ("vera_lambda_b",)},
        shared={"lora_A": "base_model.vera_A", "lora_B": "base_model.vera_B"},
        read_model=_read_vera,
        unsayable=_unsayable_vera,
        write_layers=lambda layers, said: [
            {**fields, "projection_prng_key": _key(layer.parts[0].placement.config)}
            for layer, fields in zip(layers, said, strict=True)
        ],
        write_model=_write_vera,
    ),
    _adapterhub_vera,
)(VeraConfig)

spelled(
    lambda config: replace(
        _adapterhub_vera(config),
        fixed={**_VERA_FIXED, "use_dora": True},
        containers=(replace(_MAGNITUDES, names={**_MAGNITUDES.names, **_VERA_NAMES}), _PROJECTIONS),
        fused="adapters cannot run DVoRA in a fused layer",
    ),
)(DvoRAConfig)
