"""Records the public signatures of `adapters` in tests/data/adapters_signatures.json.

Run it where that library is installed: python make_adapters_signatures.py
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from pathlib import Path
from typing import Any

import adapters
import transformers
from adapters import composition


def parameters(function: Any) -> list[list[str]]:
    """Name and default of each parameter; no default where it must be given, `*` where many may."""
    found = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        name = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}.get(parameter.kind.name, "")
        given = parameter.default is not parameter.empty
        found.append([name + parameter.name, *([repr(parameter.default)] if given else [])])
    return found


def methods(cls: type, without: type) -> dict[str, Any]:
    """Public methods and properties that a class has beyond those of another library."""
    found: dict[str, Any] = {}
    for name in sorted(set(dir(cls))):
        member = inspect.getattr_static(cls, name)
        if name.startswith("_") or (name in dir(without) and "adapter" not in name):
            continue
        if isinstance(member, property):
            found[name] = "property"
        elif getattr(getattr(cls, name), "__module__", "").startswith("adapters"):
            found[name] = parameters(getattr(cls, name))
    return found


def fields(cls: Any) -> list[list[str]]:
    """Names and defaults of the fields of a config."""
    found = []
    for field in dataclasses.fields(cls):
        if not field.init:
            continue
        if field.default_factory is not dataclasses.MISSING:
            found.append([field.name, repr(field.default_factory())])
        elif field.default is not dataclasses.MISSING:
            found.append([field.name, repr(field.default)])
        else:
            found.append([field.name])
    return found


def main() -> None:
    """Record."""
    configs = {
        name: fields(cls)
        for name in sorted(dir(adapters))
        if name.endswith("Config") and dataclasses.is_dataclass(cls := getattr(adapters, name))
    }
    blocks = {
        name: parameters(cls.__init__)
        for name, cls in sorted(vars(composition).items())
        if isinstance(cls, type) and issubclass(cls, composition.AdapterCompositionBlock)
    }
    functions = {
        name: parameters(getattr(adapters, name))
        for name in ("AdapterSetup", "AdapterTrainer", "Seq2SeqAdapterTrainer", "init",
                     "load_model", "list_adapters")
        if name in dir(adapters)
    }  # fmt: skip
    record = {
        "model": methods(adapters.BertAdapterModel, transformers.BertForMaskedLM),
        "configs": configs,
        "blocks": blocks,
        "functions": functions,
    }
    # one line for each signature
    parts = [
        f'"{part}": {{\n'
        + ",\n".join(f"{json.dumps(n)}: {json.dumps(v)}" for n, v in record[part].items())
        + "\n}"
        for part in record
    ]
    text = f'{{"version": "{adapters.__version__}",\n' + ",\n".join(parts) + "}\n"
    Path(__file__).with_name("adapters_signatures.json").write_text(text, "utf-8")


if __name__ == "__main__":
    main()
