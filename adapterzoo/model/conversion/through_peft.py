"""The changes that an adapter in PEFT's format makes, computed by PEFT itself.

For methods that do not exist here. PEFT is not required otherwise.
"""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from adapterzoo.contracts import widest
from adapterzoo.errors import AdapterZooError, CheckpointError, ConfigError

from .converting import Foreign
from .outputs import plain_outputs

_TENSORS = "adapter_model.safetensors"


def changes_by_peft(
    plain: Any, folder: Path, method: str, inputs: Mapping[str, Any], are_given: bool
) -> Foreign:
    """Load an adapter with PEFT, and compare the merged weights with those of the base model.

    Args:
        plain: the base model of transformers, without adapters; it does not change.
        folder: of the adapter.
        method: its name in PEFT.
        inputs: arguments of a call.
        are_given: whether the user gave them.

    Raises:
        CheckpointError: PEFT cannot load or merge the adapter.
        ConfigError: PEFT is not installed.
    """
    peft = _installed(method)
    if not (folder / _TENSORS).is_file():
        raise CheckpointError(
            f"there is no {_TENSORS} in {str(folder)!r}. Save the adapter again with PEFT."
        )
    base = copy.deepcopy(plain)
    # so that the difference of the weights is exact
    wide = widest(next(plain.parameters()).device)
    # a tied table by all its names
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
    except (ArithmeticError, LookupError, NotImplementedError, OSError, RuntimeError, TypeError,
            ValueError, AttributeError) as error:  # fmt: skip
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(
            f"PEFT cannot merge the {method} adapter in {str(folder)!r} into this model "
            f"({type(error).__name__}: {reason}), so that it cannot be converted. Load it with "
            f"PEFT into the model that it was trained on."
        ) from error
    after = dict(merged.named_parameters(remove_duplicate=False))
    changes = {
        key: p.detach().to(wide) - before[key]
        for key, p in after.items()
        if key in before and not torch.equal(p.to(wide), before[key])
    }
    if not changes:
        raise CheckpointError(
            f"the {method} adapter in {str(folder)!r} changes no weight of this model. Write the "
            f"base model that it was trained on."
        )
    return Foreign(method, changes, inputs, found, are_given)


def _installed(method: str) -> ModuleType:
    try:
        return importlib.import_module("peft")
    except ImportError as error:
        raise ConfigError(
            f"the method {method!r} does not exist here, and PEFT, which can compute its changes, "
            f"is not installed. Write pip install peft."
        ) from error
