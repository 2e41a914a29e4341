"""Config strings: checked without importing a method, and the table of `methods`."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import adapterzoo
from adapterzoo.config import parse_string, split_string
from adapterzoo.errors import AdapterZooError, ConfigError, FieldError, unknown_name

_FOLDER = Path(adapterzoo.__file__).parent
# what is registered: its names, and its class if it is one
_REGISTERED = r'(?:%s)\(((?:\s*"[^"]+",?)+)\s*\)(?:(?:\s*@[^\n]*)*\s*class (\w+))?'
_STRINGS = _REGISTERED % r"config_strings\.register|method_config"
_FORMS = _REGISTERED % r"change_forms\.register"


def check_method(text: str | None) -> None:
    """Check the names in a config string without importing a method, which imports torch.

    `AdapterConfig.load` checks the values, once torch is imported.

    Args:
        text: the config string; None: nothing to check.

    Raises:
        ConfigError: the brackets do not hold fields and values, or there is no such file.
        FieldError: there is no such field.
        UnknownNameError: there is no such method.
    """
    if text is None:
        return
    if text.endswith(".json"):
        if not Path(text).is_file():
            raise ConfigError(f"there is no file {text!r}. Write a config string or its name.")
        return
    known = _registered(_STRINGS)
    for member in split_string(text):
        name, fields = parse_string(member)
        # an installation may have no sources
        if known and name not in known:
            raise unknown_name("--method", "config string", name, known)
        own = _fields().get(known.get(name, ""), ())
        for field in fields:
            if own and field not in own and not _is_of_peers(field):
                raise FieldError(str(unknown_name(f"--method {text!r}", "field", field, own)))


def change_forms() -> list[str]:
    """Return the methods to which `convert` converts."""
    return [*_registered(_FORMS)]


@functools.cache
def _registered(pattern: str) -> Mapping[str, str]:
    """Return the names that sources of methods register, and the class of each, or ""."""
    sources = (file.read_text("utf-8") for file in sorted((_FOLDER / "methods").rglob("*.py")))
    found = (match for source in sources for match in re.findall(pattern, source))
    return {name: made for names, made in found for name in re.findall(r'"([^"]+)"', names)}


@functools.cache
def _fields() -> Mapping[str, tuple[str, ...]]:
    """Return the fields of the public config classes, from the stubs of the library."""
    stubs = _FOLDER / "__init__.pyi"
    tree = ast.parse(stubs.read_text("utf-8")) if stubs.is_file() else ast.Module([], [])
    return {
        node.name: tuple(argument.arg for argument in init.args.kwonlyargs)
        for node in tree.body if isinstance(node, ast.ClassDef)
        for init in node.body if isinstance(init, ast.FunctionDef) and init.name == "__init__"
    }  # fmt: skip


@functools.cache
def _is_of_peers(field: str) -> bool:
    """Return whether the sources quote the name of a field, as they do with those of the peers."""
    files = [*(_FOLDER / "methods").rglob("*.py"), _FOLDER / "peft_arguments.py"]
    return any(f'"{field}"' in file.read_text("utf-8") for file in files)


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
