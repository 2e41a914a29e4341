"""How transformers lays out the tensors and modules of a model, and of its other task classes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key

from adapterzoo.inject import AdapterDict


def renamer(model: Any) -> Callable[[str], str]:
    """Return a function from names in older releases to the present ones.

    transformers renames modules, and its loader knows how: what it does to the keys of old
    checkpoints of the base model is done to those of old adapters.

    Args:
        model: a `PreTrainedModel`.
    """
    renamings: list[WeightRenaming] | None = None

    def renamed(name: str) -> str:
        nonlocal renamings
        # found on first use: it walks the whole model, and recent adapters do not need it
        if renamings is None:
            known = get_model_conversion_mapping(model)
            renamings = [renaming for renaming in known if isinstance(renaming, WeightRenaming)]
        # the patterns match keys of tensors: give the path an end that none of them names
        return rename_source_key(f"{name}._", renamings, [])[0].removesuffix("._")

    return renamed


def tensor_of(model: Any, key: str) -> Tensor | None:
    """Return a parameter or buffer of a model, None without one.

    Args:
        model: any module.
        key: as in its state dict.
    """
    path, _, name = key.rpartition(".")
    try:
        module: nn.Module = model.get_submodule(path)
    except AttributeError:
        return None
    found = module._parameters.get(name)
    return module._buffers.get(name) if found is None else found


def task_modules(model: Any, task_class: str) -> Mapping[str, tuple[str, ...]]:
    """Return the paths of all modules of a task class, with the tensors that each saves.

    Args:
        model: gives the config; where it is of the class itself, it gives the modules too.
        task_class: name of a class of transformers.
    """
    cls: Any = getattr(transformers, task_class, None)
    if not isinstance(model, cls or type(model)):
        config = copy.deepcopy(model.config)
        # kernels of attention do not run on the meta device
        config._attn_implementation = "eager"
        with torch.device("meta"):
            model = cls(config)
    found: dict[str, tuple[str, ...]] = {}
    dicts: tuple[str, ...] = ()
    # the container of adapters comes before them
    for path, module in model.named_modules():
        if isinstance(module, AdapterDict):
            dicts = (*dicts, f"{path}.")
        elif path and not path.startswith(dicts):
            kept = module._parameters | module._buffers
            skipped = module._non_persistent_buffers_set
            found[path] = tuple(n for n, t in kept.items() if t is not None and n not in skipped)
    return found
