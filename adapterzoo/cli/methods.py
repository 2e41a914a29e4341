"""The table of `methods`."""

from __future__ import annotations

from typing import Any

from adapterzoo.errors import AdapterZooError, FieldError


def table(base: str | None) -> list[dict[str, Any]]:
    """Return what is known of each method with its default config.

    Args:
        base: model in which the parameters are counted; None: BERT base, and for the servers a
            Llama.

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
    found = BertConfig() if base is None else load(AutoConfig, base)
    served = LlamaConfig(num_hidden_layers=1) if base is None else found
    with torch.device("meta"):
        model, other = (
            AutoAdapterModel.from_config(each, attn_implementation="eager")
            for each in (found, served)
        )
        rows = [_row(model, other, make, own) for make, own in strings.items()]
    return [row for row in rows if row is not None]


def _row(model: Any, served: Any, make: Any, own: list[str]) -> dict[str, Any] | None:
    """Return the row of a method; None for one that has no config without arguments."""
    from adapterzoo.contracts import Adapter, WeightAdapter
    from adapterzoo.serving.export import readers

    row: dict[str, Any] = {"name": own[0], "aliases": own[1:], "formula": None, "parameters": None,
                           "merges": None, "servers": {}}  # fmt: skip
    try:
        for each in (model, served):
            each.add_adapter(own[0], config=make())
    except FieldError:
        return None
    except AdapterZooError as error:
        # the model has no place for it
        return {**row, "problem": str(error)}
    modules = [module for module in model.modules() if isinstance(module, Adapter)]
    formulas = [(type(module).__doc__ or "").partition("\n")[0] for module in modules]
    row |= {
        "formula": " ".join(dict.fromkeys(formulas)),
        "parameters": model.adapter_summary(as_dict=True)[0]["#param"],
        "merges": all(isinstance(module, WeightAdapter) for module in modules),
        "servers": readers(served, own[0]),
    }
    for each in (model, served):
        each.delete_adapter(own[0])
    return row
