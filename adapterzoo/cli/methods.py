"""The config strings of all methods: their names without an import, and the table of `methods`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import adapterzoo
from adapterzoo.errors import AdapterZooError, FieldError, unknown_name

_REGISTERED = re.compile(r'(?:config_strings\.register|method_config)\(((?:\s*"[^"]+",?)+)\s*\)')
_QUOTED = re.compile(r"""(["'])(?:\\.|(?!\1).)*\1""")


def names() -> list[str]:
    """Return the names of all config strings, read from the sources: methods import torch."""
    files = sorted((Path(adapterzoo.__file__).parent / "methods").rglob("*.py"))
    found = (match for file in files for match in _REGISTERED.findall(file.read_text("utf-8")))
    return [name for text in found for name in re.findall(r'"([^"]+)"', text)]


def check_method(method: str | None) -> None:
    """Check the names in a config string, before anything is imported.

    Args:
        method: the string; None: nothing to check.

    Raises:
        UnknownNameError: a name is not known.
    """
    # fields, and texts in them, may have any characters
    plain = re.sub(r"\[[^\[\]]*\]", "", re.sub(r"\[[^\[\]]*\]", "", _QUOTED.sub("", method or "")))
    known = names()
    for name in plain.split("|") if method and not method.endswith(".json") else ():
        if known and re.fullmatch(r"[\w+]+", name.strip()) and name.strip() not in known:
            raise unknown_name("--method", "config string", name.strip(), known)


def table(base: str | None) -> list[dict[str, Any]]:
    """Return what is known of each method with its default config.

    Args:
        base: model in which the parameters are counted; None: BERT base.

    Raises:
        CheckpointError: the config of the model cannot be loaded.
    """
    import torch
    from transformers import AutoConfig, BertConfig

    from adapterzoo.auto import AutoAdapterModel
    from adapterzoo.config import config_strings
    from adapterzoo.contracts import Adapter, WeightAdapter

    from .models import load

    strings: dict[Any, list[str]] = {}
    for name, config in config_strings.items():
        strings.setdefault(config, []).append(name)
    with torch.device("meta"):
        model: Any = AutoAdapterModel.from_config(
            BertConfig() if base is None else load(AutoConfig, base), attn_implementation="eager"
        )
        return [
            row
            for config, own in strings.items()
            if (row := _row(model, config, own, Adapter, WeightAdapter)) is not None
        ]


def _row(
    model: Any, config: Any, own: list[str], adapter: type[Any], weight: type[Any]
) -> dict[str, Any] | None:
    """Return the row of a method; None for one that has no config without arguments."""
    try:
        model.add_adapter(own[0], config=config())
    except FieldError:
        return None
    except AdapterZooError as error:
        # the model has no place for it
        return {"name": own[0], "aliases": own[1:], "formula": None, "parameters": None,
                "merges": None, "problem": str(error)}  # fmt: skip
    modules = [module for module in model.modules() if isinstance(module, adapter)]
    formulas = [(type(module).__doc__ or "").partition("\n")[0] for module in modules]
    found = {
        "name": own[0],
        "aliases": own[1:],
        "formula": " ".join(dict.fromkeys(formulas)),
        "parameters": model.adapter_summary(as_dict=True)[0]["#param"],
        "merges": all(isinstance(module, weight) for module in modules),
    }
    model.delete_adapter(own[0])
    return found
