"""Adapters of methods that exist only in PEFT, which computes how they change the weights.

PEFT is needed only here.
"""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adapterzoo.anatomy import in_whole
from adapterzoo.config import change_forms
from adapterzoo.contracts import widest
from adapterzoo.errors import AdapterZooError, CheckpointError, ConfigError, StateError
from adapterzoo.folders.names import NAMES
from adapterzoo.inject.layers import stores_transposed
from adapterzoo.model.activation import refuse_taken
from adapterzoo.model.adapters import bring_in
from adapterzoo.model.conversion import (
    Change,
    Size,
    difference,
    outputs,
    plain_outputs,
    with_changes,
)
from adapterzoo.model.conversion.certificate import Certificate
from adapterzoo.model.state import AdaptedModel, base_prefix, layer_in
from adapterzoo.names import check_name

_TENSORS = NAMES["adapter"].peft[0]


class Foreign(NamedTuple):
    """An adapter of another library on the same base model.

    Attributes:
        method: name of its method in that library.
        changes: key of each changed parameter → its change as the layer stores it, in the widest
            dtype.
        inputs: arguments of a call.
        outputs: outputs of the call.
        are_given: whether the user gave the inputs.
    """

    method: str
    changes: Mapping[str, Tensor]
    inputs: Mapping[str, Any]
    outputs: list[Tensor]
    are_given: bool


def changes_by_peft(
    plain: Any, folder: Path, method: str, inputs: Mapping[str, Any], are_given: bool
) -> Foreign:
    """Load an adapter with PEFT, and compare the merged weights with those of the base model.

    Args:
        plain: the base model of transformers, without adapters; it does not change.
        folder: folder of the adapter.
        method: name of the adapter's method in PEFT.
        inputs: arguments of a call.
        are_given: whether the user gave them.

    Raises:
        CheckpointError: PEFT cannot load or merge the adapter.
        ConfigError: PEFT is not installed.
    """
    try:
        peft = importlib.import_module("peft")
    except ImportError as error:
        raise ConfigError(f"{method!r} needs PEFT. Write pip install peft.") from error
    if not (folder / _TENSORS).is_file():
        raise CheckpointError(f"{str(folder)!r} has no {_TENSORS}. Save it again with PEFT.")
    base = copy.deepcopy(plain)
    # so that the difference of the weights is exact
    wide = widest(next(plain.parameters()).device)
    # a tied table counts under each of its names
    before = {key: p.detach().to(wide) for key, p in plain.named_parameters(remove_duplicate=False)}
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            theirs = peft.PeftModel.from_pretrained(base, folder).eval()
            found = plain_outputs(theirs, inputs)
            merged = theirs.to(wide).merge_and_unload()
    except AdapterZooError:
        raise
    # PEFT raises errors of every kind: for prompts, for layers that the model lacks, …
    except (
        ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError
    ) as error:  # fmt: skip
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(
            f"PEFT cannot merge the {method} adapter in {str(folder)!r} into this model "
            f"({type(error).__name__}: {reason}). Use it with PEFT in its own base model."
        ) from error
    after = dict(merged.named_parameters(remove_duplicate=False))
    changes = {
        key: p.detach().to(wide) - before[key]
        for key, p in after.items()
        if key in before and not torch.equal(p.to(wide), before[key])
    }
    if not changes:
        raise CheckpointError(
            f"the {method} adapter in {str(folder)!r} changes no weight of this model. "
            f"Write the base model that it was trained on."
        )
    return Foreign(method, changes, inputs, found, are_given)


@torch.no_grad()
def add_changes(
    model: AdaptedModel, name: str, foreign: Foreign, to: str, size: Size
) -> Certificate:
    """Add an adapter that makes the changes of an adapter of another library.

    Args:
        model: a model that can have adapters.
        name: name of the new adapter.
        foreign: the adapter of the other library.
        to: name of the new adapter's method.
        size: how much of the changes to keep.

    Raises:
        ConfigError: the name or the size is not legal.
        StateError: a changed parameter is not the weight of a layer that can have adapters.
    """
    form = change_forms.find(to)
    size.check()
    check_name(name)
    refuse_taken(model, name, overwrite_ok=False)
    layers = [site for site in model.anatomy if site.parameter is None]
    start = base_prefix(model)
    # when PEFT merges into a tied layer, the table changes too
    layers += [site for site in model.anatomy.named if site.path not in model.anatomy.tied]
    paths = {in_whole(site.path, start): site.path for site in layers}
    changes = []
    for key, value in foreign.changes.items():
        whole, _, parameter = key.rpartition(".")
        path = paths.get(whole)
        if parameter != "weight" or path is None:
            raise StateError(
                f"the adapter changes {key!r}, which is not the weight of a layer that can be "
                f"adapted. Write peft_model.merge_and_unload() instead."
            )
        transposed = stores_transposed(layer_in(model, path))
        changes.append(Change(path, None, value.mT if transposed else value))
    made, reports = with_changes(
        model, form.at_layers([change.path for change in changes]), lambda: changes, size
    )
    plain = outputs(model, None, None, foreign.inputs)
    bring_in(model, name, made, active=False)
    after = outputs(model, name, None, foreign.inputs)
    return Certificate(
        name, foreign.method, to, tuple(reports), "given" if foreign.are_given else "random",
        difference(foreign.outputs, after), difference(foreign.outputs, plain),
    )  # fmt: skip
