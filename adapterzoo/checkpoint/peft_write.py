"""From an adapter of this library to PEFT's config and tensors, exactly or not at all.

Parts of a fused layer, which PEFT has no word for, become one low-rank update of the whole layer:
their factors A lie below each other, their factors B beside each other in the rows of their part.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor

from adapterzoo.anatomy import OutputSlice, Site
from adapterzoo.configs import AdapterConfig, Placement
from adapterzoo.errors import CheckpointError, listing

from .formats import Facts
from .peft_heads import Task
from .peft_patterns import by_path, most_common, short_names
from .places import places_of
from .stored import Stored

# names that layers of heads have too: as ends of paths they would reach into one
_IN_HEADS = """
    classifier decoder dense fc lm_head out_proj pre_classifier proj projector qa_outputs score
    summary vocab_projector vocab_transform
"""
_HEADED = ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS")


@dataclass(slots=True)
class Part:
    """One adapter at a layer, or at some rows of it."""

    placement: Placement
    tensors: Mapping[str, Tensor]

    @property
    def config(self) -> dict[str, Any]:
        """The fields of its config."""
        return self.placement.config.to_dict()

    @property
    def site(self) -> Site:
        """Where it sits."""
        return self.placement.site


Layers = Mapping[str, list[Part]]


def layers_of(stored: Stored, facts: Facts) -> dict[str, list[Part]]:
    """The adapters of a checkpoint by path of the layer.

    Raises:
        CheckpointError: PEFT has no such adapter, or not there.
    """
    config = AdapterConfig.from_dict(stored.document["config"])
    layers: dict[str, list[Part]] = {}
    at: dict[str, dict[str, Tensor]] = {}
    for key, tensor in stored.adapter.items():
        at.setdefault(key.partition("/")[0], {})[key] = tensor
    for place in places_of(config, facts.anatomy):
        _check(place.placement, facts)
        start = place.key("")
        here = at[place.path].items()
        tensors = {key.removeprefix(start): t for key, t in here if key.startswith(start)}
        layers.setdefault(place.path, []).append(Part(place.placement, tensors))
    for path, parts in layers.items():
        _check_parts(path, parts, facts)
    return layers


def _check(placement: Placement, facts: Facts) -> None:
    config, site = placement.config, placement.site
    values = config.to_dict()
    name = type(config).__name__
    if values["architecture"] not in ("lora", "dora", "boft"):
        what = f"a {name}, which no method of PEFT is"
    elif values.get("use_gating"):
        what = f"{name}(use_gating=True), and PEFT's LoRA has no gate"
    elif values.get("convention") == "adapterhub":
        what = f"{name}(convention='adapterhub'), and PEFT's DoRA is that of the paper"
    elif site.parameter is not None:
        what = f"an adapter at the parameter {site.parameter!r} of {site.path!r}"
    elif values["architecture"] == "boft" and site.transposed:
        what = f"a {name} at {site.path!r}, a Conv1D, where PEFT has no BOFT"
    else:
        return
    raise CheckpointError(
        f"{facts.call}: the adapter has {what}. PEFT's format says LoRA, DoRA in the paper's "
        f"convention, and BOFT at linear layers. Write format='native'."
    )


def _check_parts(path: str, parts: list[Part], facts: Facts) -> None:
    """Updates of LoRA add; magnitudes are one layer's when no row has two; rotations never join."""
    kinds = {part.config["architecture"] for part in parts}
    rows = [part.site.output_slice for part in parts]
    if kinds == {"lora"} or (len(parts) == 1 and rows[0] is None):
        return
    if kinds == {"dora"}:
        numbers = [n for own in rows if own is not None for n in _row_numbers(own).tolist()]
        if None not in rows and len(set(numbers)) == len(numbers):
            return
    raise CheckpointError(
        f"{facts.call}: at {path!r} sit adapters of {listing(sorted(kinds))} for "
        f"{listing([str(part.site.role) for part in parts])}, and PEFT has one for the whole "
        f"layer, which cannot be the same. Write format='native', or train with "
        f"target_modules={[path.rpartition('.')[2]]!r}."
    )


def _with_norms(m: Tensor, path: str, parts: list[Part], facts: Facts) -> Tensor:
    """Magnitudes of a whole layer: rows that nobody adapts have the norms of the base weight."""
    site = parts[0].site
    key = f"{facts.prefix}.{path}.weight".removeprefix(".")
    weight = facts.tensor(key)
    covered = torch.cat(
        [_row_numbers(p.site.output_slice) for p in parts if p.site.output_slice is not None]
    )
    if len(covered) == len(m):
        return m
    # a part of a sharded weight has no norm of its own
    plain = type(weight) in (Tensor, torch.nn.Parameter)
    if weight is None or not plain or weight.dim() != 2 or not weight.is_floating_point():
        raise CheckpointError(
            f"{facts.call}: at {path!r} only some rows of a fused layer are adapted, and the "
            f"norms of the others cannot be had from a quantised or sharded weight. Write "
            f"format='native'."
        )
    rows = weight.detach().to(m) if not site.transposed else weight.detach().to(m).T
    whole: Tensor = torch.linalg.vector_norm(rows, dim=1)  # [d_out]
    whole[covered] = m[covered]
    return whole


def _row_numbers(rows: OutputSlice) -> Tensor:
    """The numbers of the output features that a part has."""
    every = torch.arange(rows.groups * rows.width)
    return every.view(rows.groups, rows.width)[:, rows.start : rows.stop].reshape(-1)


def tensors_for(layers: Layers, places: Mapping[str, str], facts: Facts) -> dict[str, Tensor]:
    """PEFT's tensors by key in the task class.

    Args:
        layers: the adapters by path here.
        places: paths here to those in the task class.
        facts: of the model.
    """
    found: dict[str, Tensor] = {}
    for path, parts in layers.items():
        joined = _joined(parts)
        if "m" in joined and len(parts) + (parts[0].site.output_slice is not None) > 1:
            joined["m"] = _with_norms(joined["m"], path, parts, facts)
        for name, tensor in joined.items():
            found[f"{places[path]}.{_name(name, parts[0].site)}"] = tensor
    return found


def _name(parameter: str, site: Site) -> str:
    if parameter in ("lora_A", "lora_B"):
        if site.kind == "embedding":
            return parameter.replace("lora_", "lora_embedding_")
        return f"{parameter}.weight"
    names = {"lora_B_bias": "lora_B.bias", "m": "lora_magnitude_vector"}
    return names.get(parameter, parameter)


def _joined(parts: list[Part]) -> dict[str, Tensor]:
    """One adapter for the whole layer that computes what its parts do."""
    if len(parts) == 1 and parts[0].site.output_slice is None:
        return dict(parts[0].tensors)
    rank = sum(part.tensors["lora_A"].shape[0] for part in parts)
    rows = parts[0].site.output_slice
    d_out = parts[0].site.d_out if rows is None else rows.groups * rows.width
    first = parts[0].tensors["lora_B"]
    joined = {
        "lora_A": torch.cat([part.tensors["lora_A"] for part in parts]),  # [rank, d_in]
        "lora_B": first.new_zeros(d_out, rank),
    }
    start = 0
    for part in parts:
        where = part.site.output_slice
        mine = slice(None) if where is None else _row_numbers(where).to(first.device)
        stop = start + part.tensors["lora_A"].shape[0]
        joined["lora_B"][mine, start:stop] = part.tensors["lora_B"]
        start = stop
        for name in part.tensors.keys() & {"m", "lora_B_bias"}:
            tensor = part.tensors[name]
            whole = joined.setdefault(name, tensor.new_zeros(d_out))
            # biases of several parts of one row add
            whole[mine] = whole[mine] + tensor
    return joined


def config_for(
    layers: Layers, head: Mapping[str, Tensor], task: Task, facts: Facts
) -> tuple[dict[str, Any], dict[str, str]]:
    """PEFT's config, and the paths here to those in the task class.

    Raises:
        CheckpointError: the layers differ in what PEFT's config says once for all.
    """
    modules = facts.modules(task.model_class)
    places = {path: _place(path, modules, facts, task) for path in layers}
    configs = [part.config for parts in layers.values() for part in parts]
    kind = configs[0]["architecture"]
    targets = short_names(places.values(), modules)
    if targets is None or any(name in _IN_HEADS.split() for name in targets):
        # only whole paths are sure to name nothing else
        targets = tuple(sorted(places.values()))
    task_type = task.task_type
    if not head and task_type in _HEADED:
        # PEFT looks for these tasks' heads in the file
        task_type = None
    config: dict[str, Any] = {
        "auto_mapping": None,
        "base_model_name_or_path": facts.model_name,
        "bias": "none",
        "fan_in_fan_out": any(p.site.transposed for parts in layers.values() for p in parts),
        "inference_mode": True,
        "modules_to_save": _modules_to_save(head, modules, facts) or None,
        "revision": None,
        "target_modules": list(targets),
        "task_type": task_type,
    }
    if task_type is None:
        library = getattr(getattr(transformers, task.model_class, None), "__module__", None)
        config["auto_mapping"] = {"base_model_class": task.model_class, "parent_library": library}
    if kind == "boft":
        return config | _boft_fields(layers, configs, facts), places
    return config | _low_rank_fields(layers, configs, places, facts), places


def _place(path: str, modules: Mapping[str, tuple[str, ...]], facts: Facts, task: Task) -> str:
    """The path in the task class of a layer that is at a path in the base model."""
    found = next((p for p in (f"{facts.prefix}.{path}", path) if p in modules), None)
    if found is None:
        raise CheckpointError(
            f"{facts.call}: a {task.model_class}, for which PEFT would load the adapter, has no "
            f"layer {path!r}. Write format='native', or with_head=False for the base model."
        )
    return found


def _modules_to_save(
    head: Mapping[str, Tensor], modules: Mapping[str, tuple[str, ...]], facts: Facts
) -> list[str]:
    names = sorted({key.partition(".")[0] for key in head})
    expected = {
        f"{path}.{name}"
        for path, own in modules.items()
        if path.partition(".")[0] in names
        for name in own
    }
    if wrong := sorted(expected ^ set(head)):
        raise CheckpointError(
            f"{facts.call}: PEFT saves the modules of a head whole, and {listing(wrong)} are not a "
            f"part of this head alone. Write with_head=False."
        )
    return names


def _same(name: str, values: Collection[Any], facts: Facts) -> Any:
    if len(set(values)) > 1:
        raise CheckpointError(
            f"{facts.call}: parts of the adapter differ in {name} ({listing(sorted(set(values)))}"
            f"), and PEFT's config says it once for all. Write format='native'."
        )
    return next(iter(values))


def _low_rank_fields(
    layers: Layers, configs: list[dict[str, Any]], places: Mapping[str, str], facts: Facts
) -> dict[str, Any]:
    linear = [c for c in configs if c["dropout"]] or configs
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    rslora = _same("use_rslora", [c["use_rslora"] for c in configs], facts)
    for path, parts in layers.items():
        rank = sum(part.tensors["lora_A"].shape[0] for part in parts)
        scalings = [_scaling(part) for part in parts]
        scaling = _same(f"the scaling at {path!r}", scalings, facts)
        ranks[places[path]] = rank
        alphas[places[path]] = _alpha(parts, rank, scaling, rslora)
    r, alpha = most_common(ranks, configs[0]["r"]), most_common(alphas, configs[0]["alpha"])
    return {
        "peft_type": "LORA",
        "r": r,
        "lora_alpha": alpha,
        "rank_pattern": by_path(ranks, r),
        "alpha_pattern": by_path(alphas, alpha),
        "lora_dropout": _same("dropout", [c["dropout"] for c in linear], facts),
        "use_rslora": rslora,
        "use_dora": _same("architecture", [c["architecture"] for c in configs], facts) == "dora",
        "lora_bias": _same("lora_bias", [c.get("lora_bias", False) for c in configs], facts),
        "init_lora_weights": True,
    }


def _scaling(part: Part) -> float:
    config: Any = part.placement.config
    scaling: float = config.scaling_at(part.site.path)
    return scaling


def _alpha(parts: list[Part], rank: int, scaling: float, rslora: bool) -> float:
    """The numerator of the scaling: the config's own where the rank is its own."""
    config: Any = parts[0].placement.config
    if len(parts) == 1:
        own: float = config.alpha_at(parts[0].site.path)
        return own
    alpha = scaling * (rank**0.5 if rslora else rank)
    return int(alpha) if alpha == int(alpha) else alpha


def _boft_fields(layers: Layers, configs: list[dict[str, Any]], facts: Facts) -> dict[str, Any]:
    shapes = [part.tensors["boft_R"].shape for parts in layers.values() for part in parts]
    m = _same("boft_n_butterfly_factor", [int(shape[0]) for shape in shapes], facts)
    sizes, numbers = {int(s[-1]) for s in shapes}, {int(s[1]) for s in shapes}
    by_number = bool(configs[0]["boft_block_num"]) and len(numbers) == 1
    if not by_number and len(sizes) > 1:
        by_number = True
        _same("boft_block_num", sorted(numbers), facts)
    return {
        "peft_type": "BOFT",
        "boft_block_size": 0 if by_number else sizes.pop(),
        "boft_block_num": numbers.pop() if by_number else 0,
        "boft_n_butterfly_factor": m,
        "boft_dropout": _same("boft_dropout", [c["boft_dropout"] for c in configs], facts),
        "init_weights": True,
    }
