"""The public names, and how they are called.

Public is what the modules that scripts import list in `__all__`, what the reference of the
documentation lists, what a model gets from `init` and `AutoAdapterModel`, and what the command line
takes. Annotations may change: they are left out.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, get_origin

import click
from families import tiny_config
from transformers import BertForSequenceClassification

import adapterzoo
from adapterzoo.auto import AdapterModel
from adapterzoo.cli import main
from adapterzoo.config import AdapterConfig, config_strings

MODULES = (
    "adapterzoo", "adapterzoo.context", "adapterzoo.hub", "adapterzoo.loading", "adapterzoo.model",
    "adapterzoo.models", "adapterzoo.peft", "adapterzoo.peft.optimizers",
    "adapterzoo.peft.utils.hotswap", "adapterzoo.testing", "adapterzoo.training",
    "adapterzoo.utils", "adapterzoo.wrappers",
)  # fmt: skip
# of these, scripts import what the package has too
AGAIN = (
    "adapterzoo.auto", "adapterzoo.composition", "adapterzoo.configuration", "adapterzoo.heads",
    "adapterzoo.interface", "adapterzoo.trainer",
)  # fmt: skip
# the family decides on these
OF_FAMILIES = {"backbone_class", "config_class", "forward", "input_names"}
REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
_DIRECTIVE = re.compile(
    r"^\.\. (currentmodule|auto(?!module)\w+):: ([\w.]+)\n((?:   :.*\n)*)", re.MULTILINE
)
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_PLAIN = (str, int, float, bool, tuple, type(None))

_INHERITED = ":inherited-members:"

Lines = dict[str, str]


def rows() -> dict[str, Callable[[], Lines]]:
    """The sections of the table, computed."""
    return {section: functools.partial(dict, lines) for section, lines in compute().items()}


def compute() -> dict[str, Lines]:
    """Names by section, with how they are called."""
    plain = type(adapterzoo.init(BertForSequenceClassification(tiny_config("bert"))))
    static = _members(plain, _ours(plain))
    named = _members(adapterzoo.BertAdapterModel, _ours(adapterzoo.BertAdapterModel))
    found = {
        **_modules(),
        "other paths of modules": {
            path: module.__name__
            for path, module in sys.modules.items()
            if path.startswith("adapterzoo.") and getattr(module, "__name__", path) != path
        },
        "config strings": dict(_strings()),
        "a model after init": static,
        "BertAdapterModel, beyond that": {
            name: how for name, how in named.items() if static.get(name) != how
        },
        "command line": dict(_commands("adapterzoo", main)),
    }
    return {section: dict(sorted(lines.items())) for section, lines in found.items()}


def _modules() -> dict[str, Lines]:
    """The names of the modules; each object once, under its own name if it has it anywhere."""
    public, members = _public()
    entries = [(p, n, value) for p, names in public.items() for n, value in names.items()]
    homes: dict[int, tuple[str, str]] = {}
    for path, name, value in sorted(entries, key=lambda e: e[1] != getattr(e[2], "__name__", "")):
        homes.setdefault(id(value), (path, name))
    found: dict[str, Lines] = {path: {} for path in public}
    for path, name, value in entries:
        if isinstance(value, _PLAIN):
            found[path][name] = repr(value)
        elif homes[id(value)] != (path, name):
            found[path][name] = f"is {'.'.join(homes[id(value)])}"
        else:
            found[path][name] = called(value)
            if inspect.isclass(value):
                above = [
                    homes[id(c)][1] if id(c) in homes else c.__name__
                    for c in value.__mro__[1:-1]
                    if id(c) in homes or c.__module__ == "builtins"
                ]
                found[path][name] += f" below {', '.join(above)}" if above else ""
                for member, how in _members(value, members.get(value, ())).items():
                    found[path][f"{name}.{member}"] = how
    return found


def _public() -> tuple[dict[str, dict[str, Any]], dict[type, Iterable[str]]]:
    """Public objects by module and name, and the members of classes that the reference lists."""
    found: dict[str, dict[str, Any]] = {}
    for path in MODULES:
        module = importlib.import_module(path)
        # what is made when it is asked for stands in `__dir__` only
        made = {*dir(module)} if "__dir__" in vars(module) else set()
        names = sorted({*module.__all__, *made} - {"__version__"})
        every = {name: getattr(module, name) for name in names}
        found[path] = {name: v for name, v in every.items() if not inspect.ismodule(v)}
    for path in AGAIN:
        module = importlib.import_module(path)
        found[path] = {n: getattr(module, n) for n in found["adapterzoo"] if hasattr(module, n)}
    members: dict[type, Iterable[str]] = {}
    for path, name, listed in _reference():
        value = found.setdefault(path, {})[name] = getattr(importlib.import_module(path), name)
        if inspect.isclass(value):
            own = (n for n in vars(value) if not n.startswith("_"))
            every = {"": own, _INHERITED: _ours(value)}
            members[value] = every.get(listed[0], listed) if listed else []
    # these stand in the sections of models
    members |= {adapterzoo.AdapterModelMixin: (), AdapterModel: ()}
    return found, members


def _reference() -> Iterator[tuple[str, str, list[str]]]:
    """Module, name and listed members of each entry of the reference; `[""]` for all of its own.

    Entries of private modules explain what others inherit.
    """
    for page in sorted(REFERENCE.glob("*.md")):
        current = ""
        for directive, name, options in _DIRECTIVE.findall(page.read_text(encoding="utf-8")):
            if directive == "currentmodule":
                current = name
                continue
            path, _, last = (name if "." in name else f"{current}.{name}").rpartition(".")
            listed = re.search(r":members:(.*)", options)
            if "._" not in path and _INHERITED in options:
                yield path, last, [_INHERITED]
            elif "._" not in path:
                yield path, last, re.split(r",\s*", listed[1].strip()) if listed else []


def _ours(cls: type) -> Iterator[str]:
    """Public members of a class that this package defines."""
    for name in dir(cls):
        owner = next((c for c in cls.__mro__ if name in vars(c)), object)
        is_ours = owner.__module__.partition(".")[0] == "adapterzoo"
        if is_ours and not name.startswith("_") and name not in OF_FAMILIES:
            yield name


def _members(cls: type, names: Iterable[str]) -> Lines:
    """Methods and properties; fields of a dataclass are arguments."""
    found: Lines = {}
    for name in names:
        static = inspect.getattr_static(cls, name)
        if isinstance(static, property):
            found[name] = "property" if static.fset is None else "property that can be set"
        elif isinstance(static, functools.cached_property):
            found[name] = "property"
        elif callable(value := getattr(cls, name)):
            found[name] = called(value)
    return found


def called(function: Any) -> str:
    """A signature without annotations; of what is not called, the members or the type."""
    if hasattr(function, "__members__"):
        return f"one of {', '.join(function.__members__)}"
    if get_origin(function) is not None:
        return repr(function)
    kind = "class" if inspect.isclass(function) else ""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return kind or f"a {type(function).__name__}"
    empty = inspect.Parameter.empty
    plain = [p.replace(annotation=empty) for p in signature.parameters.values()]
    text = str(signature.replace(parameters=plain, return_annotation=empty))
    return kind + _ADDRESS.sub("", text)


def _strings() -> Iterator[tuple[str, str]]:
    """Config strings: the class, and the fields with other values than its defaults."""
    for text in config_strings:
        # a union is made of others
        config = None if text == "union" else AdapterConfig.load(text)
        if config is not None and type(config).__module__.startswith("adapterzoo."):
            members = config.members
            yield text, " | ".join(f"{type(m).__name__}({', '.join(_changed(m))})" for m in members)


def _changed(config: Any) -> Iterator[str]:
    for field in dataclasses.fields(config):
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if getattr(config, field.name) != default:
            yield f"{field.name}={getattr(config, field.name)!r}"


def _commands(path: str, command: click.Command) -> Iterator[tuple[str, str]]:
    parameters = []
    for parameter in command.params:
        kinds = {
            "required": parameter.required,
            "several": parameter.multiple,
            "flag": getattr(parameter, "is_flag", False),
        }
        names = "/".join([*parameter.opts, *parameter.secondary_opts])
        parameters.append(" ".join([names, *(kind for kind, holds in kinds.items() if holds)]))
    yield path, ", ".join(parameters)
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            if below is not None:
                yield from _commands(f"{path} {name}", below)
