"""What type checkers read of `adapterzoo` and `adapterzoo.peft`: the stubs beside their files.

Both packages make much of what they offer when it is asked for: the config classes take the
peers' fields, methods are added to models, and `adapterzoo.peft` has classes made of tables. A
type checker sees none of this, so that it is declared in stubs, which are made of the tables and
signatures of the running library. `python -m fixed names --write` writes them; `test_types`
compares.

A config takes any collection and keeps a tuple: the stubs say `Collection` where a field says
`tuple`.
The methods of a model are those of the mixin, with PEFT's and those of `adapters`, and of the base
class of transformers' models. `__getattr__` of `nn.Module` is hidden: by it, every misspelled name
would be a `Tensor | Module`.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from transformers import GenerationMixin, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

import adapterzoo
from adapterzoo import peft
from adapterzoo.auto import AutoAdapterModel
from adapterzoo.compat.peft import methods
from adapterzoo.compat.peft import model as peft_model
from adapterzoo.compat.peft.classes import (
    NOT_MADE,
    PeftConfig,
    PeftType,
    PromptLearningConfig,
    TaskType,
    config_classes,
    field_classes,
)
from adapterzoo.compat.peft.standins import LAYER_CLASSES
from adapterzoo.config import Config, ConfigUnion, variants
from adapterzoo.heads import add_methods
from adapterzoo.model.hf import factory
from adapterzoo.peft_arguments import COMMON, PeftArgument, classes_of_peft

ROOT = Path(adapterzoo.__file__).parent
WRITTEN = '''"""What type checkers read; `make fixed ARGS="names --write"` writes it."""

# methods of transformers' models have other signatures, and `__getattr__` is hidden
# mypy: disable-error-code="assignment, misc, override"

'''
_BUILTIN = {*dir(__import__("builtins"))}


class Imports:
    """The imports of a stub, found by the names in annotations."""

    def __init__(self, *lines: str) -> None:
        self.lines = {*lines}

    def __str__(self) -> str:
        return "\n".join(sorted(self.lines)) + "\n"

    def text(self, annotation: object, module: str, widens: bool = False) -> str:
        """An annotation of a module as the stub writes it; `tuple` may become `Collection`."""
        if annotation is inspect.Parameter.empty:
            return "Any"
        given = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
        tree = ast.parse(given or str(annotation), mode="eval").body
        if isinstance(tree, ast.Constant) and isinstance(tree.value, str):
            tree = ast.parse(tree.value, mode="eval").body
        if widens:
            tree = _Widened().visit(tree)
            if "Collection" in ast.unparse(tree):
                self.lines.add("from collections.abc import Collection")
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and node.id not in _BUILTIN | {"Collection"}:
                self.lines.add(_import_of(node.id, module))
        return ast.unparse(tree)

    def parameters(self, function: Any, skip: int = 0) -> str:
        """The parameters of a function, without the first ones."""
        plain = inspect.unwrap(function)
        module = plain.__globals__["__name__"]
        found, kind = [], None
        for p in [*inspect.signature(plain).parameters.values()][skip:]:
            if p.kind is p.KEYWORD_ONLY and kind not in (p.KEYWORD_ONLY, p.VAR_POSITIONAL):
                found.append("*")
            star = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
            default = "" if p.default is p.empty else " = ..."
            found.append(f"{star}{p.name}: {self.text(p.annotation, module)}{default}")
            kind = p.kind
        return ", ".join(found)


class _Widened(ast.NodeTransformer):
    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        """`tuple[X, ...]` as `Collection[X]`."""
        self.generic_visit(node)
        if isinstance(node.value, ast.Name) and node.value.id == "tuple":
            inner = node.slice
            assert isinstance(inner, ast.Tuple)
            return ast.Subscript(ast.Name("Collection"), inner.elts[0])
        return node


def _import_of(name: str, module: str) -> str:
    """The line that imports a name which a module uses."""
    tree = ast.parse(Path(str(sys.modules[module].__file__)).read_text("utf-8"))
    for node in ast.walk(tree):
        for alias in node.names if isinstance(node, (ast.Import, ast.ImportFrom)) else ():
            if (alias.asname or alias.name) != name:
                continue
            if isinstance(node, ast.Import):
                return f"import {alias.name}"
            above = module.split(".")
            is_package = Path(str(sys.modules[module].__file__)).name == "__init__.py"
            above = above[: len(above) - node.level + is_package] if node.level else []
            return f"from {'.'.join([*above, *filter(None, [node.module])])} import {name}"
    return f"from {module} import {name}"


# --- the fields of configs ---


def own_fields(cls: type, imports: Imports) -> dict[str, str]:
    """The fields of a config class of ours, as its constructor takes them."""
    found = {}
    for field in dataclasses.fields(cls):
        home = next(c for c in cls.__mro__ if field.name in vars(c).get("__annotations__", {}))
        found[field.name] = imports.text(field.type, home.__module__, widens=True)
    return found


def type_of(argument: PeftArgument, ours: Mapping[str, str]) -> str:
    """The type of a field of PEFT: that of our field, or of its default and its legal values."""
    if argument.parts is not None:
        # an object, or its dict
        return "object"
    kinds = {type(value).__name__ for value in argument.values or ()} - {"NoneType"}
    known = ours.get(argument.ours or "")
    if known is not None:
        kinds.update(map(ast.unparse, _joined(ast.parse(known, mode="eval").body)))
    elif argument.default is not None:
        kinds.add(type(argument.default).__name__)
    if not kinds:
        return "object"
    if argument.default is None:
        kinds.add("None")
    return " | ".join(sorted(kinds, key=lambda kind: (kind == "None", kind)))


def _joined(tree: ast.expr) -> list[ast.expr]:
    """The members of a union."""
    if isinstance(tree, ast.BinOp):
        return [*_joined(tree.left), *_joined(tree.right)]
    return [tree]


def peft_fields(cls: type, ours: Mapping[str, str]) -> dict[str, str]:
    """The fields of PEFT that a config class of ours takes besides its own."""
    arguments = classes_of_peft.get(cls)
    if arguments is None:
        return {}
    table = {**COMMON, **arguments.fields}
    return {n: type_of(a, ours) for n, a in table.items() if n not in ours} | {
        n: type(v).__name__ for n, v in arguments.fixed.items() if n not in ours
    }


def fields_of_adapters(cls: type, ours: Mapping[str, str]) -> dict[str, str]:
    """The fields by which the one class of `adapters` for several methods tells them apart."""
    own = variants.get(cls)
    if own is None:
        return {}
    group = [v for v in variants.values() if v.architecture[0] == own.architecture[0]]
    names = sorted({n for variant in group for n in variant.identifying} - ours.keys())
    return dict.fromkeys(names, "object")


def config_stub(cls: type, imports: Imports) -> str:
    """The class of a config, with its constructor."""
    ours = own_fields(cls, imports)
    every = {**ours, **fields_of_adapters(cls, ours), **peft_fields(cls, ours)}
    needed = {f.name for f in dataclasses.fields(cls) if is_needed(f)}
    text = ", ".join(f"{n}: {t}{'' if n in needed else ' = ...'}" for n, t in every.items())
    above = [c.__name__ for c in cls.__mro__[1:] if is_declared(c)]
    imports.lines.add(f"from {cls.__module__} import {cls.__name__} as _{cls.__name__}")
    bases = ", ".join([*above[:1], f"_{cls.__name__}"])
    return f"class {cls.__name__}({bases}):\n    def __init__(self, *, {text}) -> None: ...\n"


def is_needed(field: dataclasses.Field[Any]) -> bool:
    return field.default is field.default_factory is dataclasses.MISSING


def is_declared(cls: type) -> bool:
    """Whether a public class has a stub of its own for its constructor."""
    is_public = getattr(adapterzoo, cls.__name__, None) is cls if is_config(cls) else False
    # unions have a constructor of their own
    return is_public and bool(dataclasses.fields(cls)) and not issubclass(cls, ConfigUnion)


def is_config(cls: object) -> bool:
    return isinstance(cls, type) and issubclass(cls, Config) and cls.__name__ in adapterzoo.__all__


# --- adapterzoo ---

_MODEL = """
class _PeftConfig(Protocol):
    peft_type: Any
    def to_dict(self) -> dict[str, Any]: ...

class AdapterModelMixin(
    _Mixin, AdaptersMethods, PeftMethods, PreTrainedModel, GenerationMixin
):
    __getattr__: None
    @overload
    def add_adapter(self, {add}) -> None: ...
    @overload
    def add_adapter(self, adapter_config: _PeftConfig, adapter_name: str = ...) -> None: ...
{untyped}

class AdapterModel(AdapterModelMixin, _AdapterModel):
    __getattr__: None
    @overload
    @classmethod
    def from_pretrained(
        cls, {load}, output_loading_info: Literal[False] = ..., **kwargs: Any
    ) -> Self: ...
    @overload
    @classmethod
    def from_pretrained(
        cls, {load}, output_loading_info: Literal[True], **kwargs: Any
    ) -> tuple[Self, dict[str, Any]]: ...
{heads}
class AutoAdapterModel(_AutoAdapterModel):
    @overload
    @classmethod
    def from_pretrained(
        cls, {load}, output_loading_info: Literal[False] = ..., **kwargs: Any
    ) -> AdapterModel: ...
    @overload
    @classmethod
    def from_pretrained(
        cls, {load}, output_loading_info: Literal[True], **kwargs: Any
    ) -> tuple[AdapterModel, dict[str, Any]]: ...
    @classmethod
    def from_config(cls, {config}) -> AdapterModel: ...

def init({init}) -> AdapterModelMixin: ...
@overload
def load_model(
    path: {path}, model_class: type[_AutoAdapterModel], interface: None = ..., **kwargs: Any
) -> AdapterModel: ...
@overload
def load_model({load_model}) -> AdapterModelMixin: ...
"""
_PATH = "str | os.PathLike[str]"
# methods of transformers' models that return the model
_ANY = "*args: Any, **kwargs: Any"
_SELF = "to", "cuda", "half", "float", "eval"


def model_names() -> list[str]:
    """The names of the classes that `AutoAdapterModel` chooses from, in this transformers."""
    every = (n for v in MODEL_MAPPING_NAMES.values() for n in ((v,) if isinstance(v, str) else v))
    return sorted({f"{name.removesuffix('Model')}AdapterModel" for name in every})


def untyped() -> str:
    """The methods of transformers' models that a strict project could not call."""
    found = []
    for cls in (PreTrainedModel, GenerationMixin):
        for name in sorted(n for n in dir(cls) if not n.startswith("_")):
            function = inspect.unwrap(getattr(cls, name))
            home = next(c for c in cls.__mro__ if name in vars(c))
            is_theirs = home.__module__.startswith("transformers.")
            is_ours = name in dir(adapterzoo.AdapterModelMixin) or name in _SELF
            if not inspect.isfunction(vars(home)[name]) or is_ours or not is_theirs:
                continue
            if not function.__annotations__ or function is not getattr(cls, name):
                found.append(f"    def {name}(self, {_ANY}) -> Any: ...\n")
    returning = (f"    def {name}(self, {_ANY}) -> Self: ...\n" for name in _SELF)
    return "".join([*returning, *found])


def package_stub() -> str:
    """The stub of `adapterzoo`."""
    imports = Imports(
        "import os",
        "from typing import Any, Literal, Protocol, Self, overload",
        "from transformers import PreTrainedModel",
        "from transformers.generation.utils import GenerationMixin",
        "from adapterzoo.auto import AutoAdapterModel as _AutoAdapterModel",
        "from adapterzoo.compat.adapters import AdaptersMethods",
        "from adapterzoo.compat.peft.methods import PeftMethods",
        "from adapterzoo.model.heads.model import AdapterModel as _AdapterModel",
        "from adapterzoo.model.mixin import AdapterModelMixin as _Mixin",
    )
    heads = "".join(
        f"    def {name}(self, {imports.parameters(add, 1)}) -> None: ...\n"
        for name, add in sorted(add_methods.items())
    )
    own = {"AdapterModelMixin", "AdapterModel", "AutoAdapterModel", "init", "load_model"}
    body = _MODEL.format(
        add=imports.parameters(methods._own_add, 1).replace(
            "Mapping[str, Any]", "Mapping[str, Any] | _PeftConfig"
        ),
        untyped=untyped(),
        load=f"pretrained_model_name_or_path: {_PATH}, *args: Any",
        heads=heads,
        config=imports.parameters(AutoAdapterModel.from_config),
        init=imports.parameters(factory.init).replace("model: M", "model: nn.Module"),
        path=_PATH,
        load_model=imports.parameters(factory.load_model).replace("type[M]", "type[Any]"),
    )
    imports.lines.discard("from adapterzoo.model.hf.factory import M")
    imports.lines.add("from torch import nn")
    configs = []
    for cls in sorted(
        (getattr(adapterzoo, n) for n in adapterzoo.__all__ if is_config(getattr(adapterzoo, n))),
        key=lambda c: (len(c.__mro__), c.__name__),
    ):
        if is_declared(cls):
            configs.append(config_stub(cls, imports))
            own.add(cls.__name__)
    for name in sorted({*adapterzoo.__all__}.union(*adapterzoo._OF_ADAPTERS.values()) - own):
        homes = {**adapterzoo._HOMES, **adapterzoo._OF_ADAPTERS}
        home = next((m for m, names in homes.items() if name in names), None)
        home = home or getattr(adapterzoo, name).__module__.removeprefix("adapterzoo.")
        imports.lines.add(f"from .{home} import {name} as {name}")
        imports.lines.discard(f"from adapterzoo.{home} import {name}")
    for name in adapterzoo._MODULES:
        imports.lines.add(f"from . import {name} as {name}")
    models = "".join(f"class {name}(AdapterModel): ...\n" for name in model_names())
    names = "".join(f"    {name!r},\n" for name in adapterzoo.__all__)
    listed = f"__version__: str\n__all__ = [\n{names}]\n"
    return f"{WRITTEN}{imports}\n{listed}{body}\n{''.join(configs)}\n{models}"


# --- adapterzoo.peft ---

_PEFT_MODEL = """
class PeftModel(_PeftModel, AdapterModelMixin):
    __getattr__: None
    base_model: Any
    model: Any
    def __new__(cls, {get}) -> PeftModel: ...
    @classmethod
    def from_pretrained(cls, {load}) -> PeftModel: ...
    def add_adapter(
        self, adapter_name: str, peft_config: _Config, low_cpu_mem_usage: bool = ...,
        autocast_adapter_dtype: bool = ...,
    ) -> None: ...

def get_peft_model({get}) -> PeftModel: ...
"""
_AUTO = """
class AutoPeftModel(_AutoPeftModel):
    @classmethod
    def from_pretrained(cls, {load}) -> PeftModel: ...
"""


def enum_stub(name: str, enum: Iterable[StrEnum]) -> str:
    members = "".join(f"    {m.name} = {m.value!r}\n" for m in enum)
    return f"class {name}(StrEnum):\n{members}"


def peft_stub() -> str:
    """The stub of `adapterzoo.peft`."""
    imports = Imports(
        "from enum import StrEnum",
        "from typing import Any, Literal, NoReturn, TypeAlias",
        "from torch import nn",
        "from adapterzoo import AdapterConfig, AdapterModelMixin, _PeftConfig",
        "from adapterzoo.compat.peft.classes import PeftConfig as PeftConfig",
        "from adapterzoo.compat.peft.classes import PromptLearningConfig as PromptLearningConfig",
        "from adapterzoo.compat.peft.model import PeftModel as _PeftModel",
        "from adapterzoo.compat.peft.model import AutoPeftModel as _AutoPeftModel",
    )
    parts = [
        enum_stub("TaskType", TaskType),
        enum_stub("PeftType", PeftType),
        "_Config: TypeAlias = PeftConfig | AdapterConfig | _PeftConfig\n",
        _PEFT_MODEL.format(
            get=imports.parameters(peft.get_peft_model).replace(
                "peft_config: Any", "peft_config: _Config"
            ),
            load=imports.parameters(vars(peft.PeftModel)["from_pretrained"].__func__, 1),
        ),
        "class PeftMixedModel(PeftModel): ...\n",
        *(f"class {name}(PeftModel): ...\n" for name in sorted(peft_model.TASK_CLASSES)),
        _AUTO.format(
            load=imports.parameters(vars(peft.AutoPeftModel)["from_pretrained"].__func__, 1)
        ),
        *(
            f"class {cls.__name__}(AutoPeftModel): ...\n"
            for cls in peft.AutoPeftModel.__subclasses__()
        ),
        *(f"class {name}(nn.Module): ...\n" for name in sorted(LAYER_CLASSES)),
        *(
            f"class {name}:\n    def __new__(cls, *args: Any, **kwargs: Any) -> NoReturn: ...\n"
            for name in sorted(NOT_MADE)
        ),
    ]
    for name, cls in sorted(field_classes().items()):
        if issubclass(cls, StrEnum):
            parts.append(enum_stub(name, cls))
            continue
        kinds = {f.name: plain_type(f.default_factory()) for f in dataclasses.fields(cls)}
        parts.append(dataclass_stub(name, "", kinds))
    for name, cls in sorted(config_classes().items()):
        ours: dict[str, str] = {}
        fields: dict[str, str] = {}
        for own, arguments in classes_of_peft.items():
            if arguments.class_name == name:
                ours = {**own_fields(own, imports), **ours}
                known = {n: type_of(a, ours) for n, a in arguments.fields.items()}
                fields |= dict.fromkeys(arguments.fixed, "bool")
                fields |= {n: t for n, t in known.items() if fields.get(n) in (None, "object")}
        order = [f.name for f in dataclasses.fields(cls)]
        common = {
            "task_type": f"TaskType | Literal[{', '.join(repr(str(t)) for t in TaskType)}] | None",
            **dict.fromkeys(("peft_type", "peft_version", "revision"), "str | None"),
            "auto_mapping": "object",
            "base_model_name_or_path": "str | None",
            "inference_mode": "bool",
            "runtime_config": "LoraRuntimeConfig",
        }
        kinds = {n: common.get(n) or fields[n] for n in order}
        base = next(c for c in cls.__mro__[1:] if c in (PeftConfig, PromptLearningConfig))
        parts.append(dataclass_stub(name, base.__name__, kinds))
    stubbed = {"PeftModel", "get_peft_model", "PeftMixedModel", "TaskType", "PeftType"}
    stubbed |= {"PeftConfig", "PromptLearningConfig", "__version__"}
    stubbed |= {c.__name__ for c in (peft.AutoPeftModel, *peft.AutoPeftModel.__subclasses__())}
    for name in sorted({*peft.__all__} - stubbed):
        home = inspect.unwrap(getattr(peft, name)).__module__
        imports.lines.add(f"from {home} import {name} as {name}")
    names = "".join(f"    {name!r},\n" for name in peft.__all__)
    return f"{WRITTEN}{imports}\n__version__: str\n__all__ = [\n{names}]\n\n" + "\n".join(parts)


def plain_type(value: object) -> str:
    return "object" if value is None else type(value).__name__


def dataclass_stub(name: str, base: str, kinds: Mapping[str, str]) -> str:
    """A class with attributes and a constructor for them."""
    above = {f.name for f in dataclasses.fields(PeftConfig)} if base else set()
    held = "".join(f"    {n}: {t}\n" for n, t in kinds.items() if n not in above)
    given = ", ".join(f"{n}: {t} = ..." for n, t in kinds.items())
    return f"class {name}({base}):\n{held}    def __init__(self, {given}) -> None: ...\n"


def formatted(text: str) -> str:
    """The text as the linter writes it."""
    for command in ("check --select I --fix", "format"):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command.split(), "-q", "--stdin-filename=a.pyi", "-"],
            input=text, capture_output=True, text=True, check=True, cwd=ROOT,
        )  # fmt: skip
        text = done.stdout
    return text


def declared(path: Path, name: str) -> list[str] | None:
    """The arguments of the constructor of a class in a stub; None: the stub does not declare it."""
    classes = [n for n in ast.parse(path.read_text("utf-8")).body if isinstance(n, ast.ClassDef)]
    found = next((c.body for c in classes if c.name == name), [])
    made = [n for n in found if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
    each = [arg.arg for n in made for arg in (*n.args.args, *n.args.kwonlyargs)]
    return each[1:] if made else None


STUBS: dict[Path, Callable[[], str]] = {
    ROOT / "__init__.pyi": package_stub,
    ROOT / "peft" / "__init__.pyi": peft_stub,
}


def write() -> None:
    """Write the stubs."""
    for path, make in STUBS.items():
        path.write_text(formatted(make()), "utf-8")
