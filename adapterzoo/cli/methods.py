"""Config strings: checked without importing a method, and the table of `methods`."""

from __future__ import annotations
import __future__

import ast
import contextlib
import functools
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.util import resolve_name
from pathlib import Path
from typing import Any

import adapterzoo
from adapterzoo import config
from adapterzoo.config import METHODS, AdapterConfig, fields_of
from adapterzoo.errors import (
    AdapterZooError,
    ConfigError,
    FieldError,
    UnknownNameError,
    listing,
)
from adapterzoo.registry import Registry

_FOLDER = Path(adapterzoo.__file__).parent
# modules with checks of fields, whose imports are slow too
_READ = (METHODS, "adapterzoo.patterns")
# statements that may declare a config, a check, or a value that one needs
_DECLARING = ast.ClassDef, ast.FunctionDef, ast.Assign, ast.AnnAssign, ast.Expr
_FLAGS = __future__.annotations.compiler_flag


def check_method(text: str | None) -> None:
    """Check a config string: the names in it, and each value by itself.

    Methods import torch, so their configs are made from the sources: from the fields that a class
    declares, without its methods. What those would refuse is left to `AdapterConfig.load`.

    Args:
        text: the config string; None: nothing to check.

    Raises:
        ConfigError: there is no such field, or its value is not legal.
        UnknownNameError: there is no such method.
    """
    if text is None:
        return
    if text.endswith(".json"):
        if not Path(text).is_file():
            raise ConfigError(f"there is no file {text!r}. Write a config string or its name.")
        return
    # a check may need more than the sources, which is a NameError
    with warnings.catch_warnings(action="ignore"), contextlib.suppress(NameError):
        try:
            _read(re.findall(r"(?:^|\|)\s*([\w+]+)", text))
            _Sketch.load(text)
        except UnknownNameError:
            # of a method that another one joins; or the message names all
            _read()
            # an installation may have no sources
            if _Sketch.strings:
                _Sketch.load(text)


def change_forms() -> list[str]:
    """Return the methods to which `convert` converts."""
    _read()
    return [*_forms]


def _read(names: Sequence[str] | None = None) -> None:
    """Read the sources that have one of these names of methods; None: those of all methods."""
    for file in sorted((_FOLDER / "methods").rglob("*.py")):
        source = file.read_text("utf-8")
        has_configs = "method_config" in source or "config_strings" in source
        if has_configs and (names is None or any(f'"{name}"' in source for name in names)):
            parts = file.relative_to(_FOLDER).with_suffix("").parts
            _sketched(".".join(["adapterzoo", *(part for part in parts if part != "__init__")]))


class _Sketch(AdapterConfig):
    """Stands for `AdapterConfig` in the sources."""

    strings = Registry("config string")

    @classmethod
    def _made(cls, shown: str, fields: Mapping[str, Any]) -> Any:
        # a field of the peers is translated by the method
        own = {n: v for n, v in fields.items() if n in fields_of(cls) or not _is_of_peers(n)}
        return super()._made(shown, own)

    def placements(self, anatomy: Any) -> Any:
        """Return nothing: a sketch has only fields.

        Args:
            anatomy: of a model.
        """
        return []


_forms: Registry[Any] = Registry("conversion method")


def _method_config(name: str) -> Callable[[Any], Any]:
    return lambda cls: _Sketch.strings.register(name)(config.config_class(cls))


@functools.cache
def _is_of_peers(field: str) -> bool:
    """Return whether the name of a field is quoted in the sources, as those of the peers are."""
    files = [*(_FOLDER / "methods").rglob("*.py"), _FOLDER / "peft_arguments.py"]
    return any(f'"{field}"' in file.read_text("utf-8") for file in files)


_modules: dict[str, dict[str, Any]] = {}


def _sketched(module: str) -> dict[str, Any]:
    """Return the names in a module that can be had without slow imports."""
    if module in _modules:
        return _modules[module]
    path = _FOLDER.joinpath(*module.split(".")[1:])
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    package = module if path.is_dir() else module.rpartition(".")[0]
    names: dict[str, Any] = {
        **vars(config), "listing": listing, "AdapterConfig": _Sketch, "MultiTaskConfig": _Sketch,
        "method_config": _method_config, "config_strings": _Sketch.strings,
        "change_forms": _forms, "architectures": Registry("architecture"),
    }  # fmt: skip
    _modules[module] = names
    for node in ast.parse(file.read_text("utf-8")).body:
        source = ""
        if isinstance(node, ast.ImportFrom):
            source = "." * node.level + (node.module or "")
            source = resolve_name(source, package) if node.level else source
        elif isinstance(node, ast.Import):
            source = node.names[0].name
        if isinstance(node, ast.ImportFrom) and source.startswith(_READ):
            known = _sketched(source)
            names |= {a.asname or a.name: known[a.name] for a in node.names if a.name in known}
        elif isinstance(node, _DECLARING) or source.partition(".")[0] in sys.stdlib_module_names:
            # what needs torch has no name here
            with contextlib.suppress(NameError, AttributeError, TypeError):
                _run(_without_methods(node, names), names)
    return names


def _run(node: ast.stmt, names: dict[str, Any]) -> None:
    # sources of this library
    exec(compile(ast.Module([node], []), "<sketch>", "exec", _FLAGS), names)


def _without_methods(node: ast.stmt, names: dict[str, Any]) -> ast.stmt:
    """Return the class of a config with nothing but its fields; another statement as it is."""
    texts = [ast.unparse(each) for each in getattr(node, "decorator_list", ())]
    if not isinstance(node, ast.ClassDef) or not any("config" in text for text in texts):
        return node
    node.decorator_list = [
        each for each, text in zip(node.decorator_list, texts, strict=True)
        if re.match(r"config_class|method_config|\w+\.register\(", text)
    ]  # fmt: skip
    fields: list[ast.stmt] = [ast.Pass(lineno=1, col_offset=0)]
    for each in node.body:
        # of a union
        if isinstance(each, ast.FunctionDef) and each.name == "__init__":
            fields.append(each)
        if isinstance(each, ast.AnnAssign) and each.value is not None:
            try:
                _run(each, dict(names))
            except (NameError, AttributeError, TypeError):
                if not isinstance(each.value, ast.Call):
                    continue
                # without its check, of which the sources tell too little
                each.value.args, each.value.keywords = each.value.args[:1], []
            fields.append(each)
    node.body = fields
    return node


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
