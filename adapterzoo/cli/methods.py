"""The table of `methods`."""

from __future__ import annotations

import contextlib
from typing import Any

from adapterzoo.errors import AdapterZooError, FieldError


def table(base: str | None) -> list[dict[str, Any]]:
    """Return what is known of each method with its default config.

    Args:
        base: model for which parameters are counted and servers listed; None: BERT base for the
            parameters, and a Llama for the servers.

    Raises:
        CheckpointError: the config of the model cannot be loaded.
    """
    import torch
    from transformers import AutoConfig, BertConfig, LlamaConfig

    from adapterzoo.auto import AutoAdapterModel
    from adapterzoo.config import config_strings

    from .models import load

    strings: dict[Any, list[str]] = {}
    for name, make in config_strings.items():
        strings.setdefault(make, []).append(name)
    own_configs = (BertConfig(), LlamaConfig(num_hidden_layers=1))
    configs = own_configs if base is None else (load(AutoConfig, base),)
    with torch.device("meta"):
        models = [AutoAdapterModel.from_config(c, attn_implementation="eager") for c in configs]
        rows = [_row(models, make, own) for make, own in strings.items()]
    return [row for row in rows if row is not None]


def _row(models: list[Any], make: Any, own: list[str]) -> dict[str, Any] | None:
    """Return the row of a method; None for one that has no config without arguments.

    Parameters are counted in the first model; the servers are those of the last.
    """
    from adapterzoo.contracts import Adapter, WeightAdapter
    from adapterzoo.serving.export import readers

    row: dict[str, Any] = {"name": own[0], "aliases": own[1:], "formula": None, "parameters": None,
                           "merges": None, "servers": {}}  # fmt: skip
    with contextlib.ExitStack() as added:
        try:
            for each in models:
                each.add_adapter(own[0], config=make())
                added.callback(each.delete_adapter, own[0])
        except FieldError:
            return None
        except AdapterZooError as error:
            # the model has no place for it
            return {**row, "problem": str(error)}
        modules = [module for module in models[0].modules() if isinstance(module, Adapter)]
        formulas = [(type(module).__doc__ or "").partition("\n")[0] for module in modules]
        return row | {
            "formula": " ".join(dict.fromkeys(formulas)),
            "parameters": models[0].adapter_summary(as_dict=True)[0]["#param"],
            "merges": all(isinstance(module, WeightAdapter) for module in modules),
            "servers": readers(models[-1], own[0]),
        }
