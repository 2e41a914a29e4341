"""The figures by which the structure of the package is judged.

`python -m tests.figures` prints them. Those of `RULES` must be zero; the others are a report.

A code line holds a token that is not part of a comment or a docstring. Import cycles count what
annotations import too.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parent.parent / "adapterzoo"
# figures that must be zero
RULES = (
    "modules in import cycles",
    "functions and classes with `call`",
    "method names in formats, cli, model",
    "head types in cli, model, trainer",
)

# where no method may be named, and no type of head
BLIND_TO_METHODS = ("formats", "cli", "model")
BLIND_TO_HEADS = ("cli", "model", "trainer")
_NOT_CODE = {
    tokenize.COMMENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER, tokenize.INDENT,
    tokenize.NEWLINE, tokenize.NL,
}  # fmt: skip


@dataclass(frozen=True)
class Module:
    """A file of the package.

    Attributes:
        name: dotted, with that of the package.
        text: its source.
        is_package: whether it is an `__init__.py`.
    """

    name: str
    text: str
    is_package: bool = False

    @cached_property
    def tree(self) -> ast.Module:
        """Its syntax tree."""
        return ast.parse(self.text)

    @property
    def area(self) -> str:
        """The part of the package that it belongs to: `model`, `errors`."""
        return self.name.partition(".")[2].partition(".")[0]

    @property
    def lines(self) -> int:
        """All its lines."""
        return self.text.count("\n")

    @cached_property
    def docstrings(self) -> list[ast.Constant]:
        """The docstrings, those below attributes included."""
        return [
            node.value
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ]

    @cached_property
    def code_lines(self) -> int:
        """Its lines without blanks, comments and docstrings."""
        found: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type not in _NOT_CODE:
                found.update(range(token.start[0], token.end[0] + 1))
        for text in self.docstrings:
            found.difference_update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
        rows = self.text.splitlines()
        return sum(bool(rows[number - 1].strip()) for number in found)

    @property
    def literals(self) -> Iterator[str]:
        """The text of each string that is not a docstring."""
        documented = set(map(id, self.docstrings))
        for node in ast.walk(self.tree):
            is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
            if is_text and id(node) not in documented:
                yield node.value

    def imports(self, modules: Mapping[str, Module]) -> set[str]:
        """The modules that it imports, anywhere and for any reason."""
        found: set[str] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                source = self._source(node)
                inner = (f"{source}.{alias.name}" for alias in node.names)
                found.update(name if name in modules else source for name in inner)
        return (found & modules.keys()) - {self.name}

    def _source(self, node: ast.ImportFrom) -> str:
        parts = self.name.split(".")
        up = node.level - self.is_package
        base = parts[: len(parts) - up] if node.level else []
        return ".".join([*base, *([node.module] if node.module else [])])


def read(root: Path = ROOT) -> dict[str, Module]:
    """The modules of a package by name."""
    found = {}
    for file in sorted(root.rglob("*.py")):
        parts = (root.name, *file.relative_to(root).with_suffix("").parts)
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        found[name] = Module(name, file.read_text(encoding="utf-8"), is_package)
    return found


def cycles(modules: Mapping[str, Module]) -> list[list[str]]:
    """The sets of modules that import one another, by Tarjan's algorithm."""
    graph = {name: sorted(module.imports(modules)) for name, module in modules.items()}
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = low[name] = len(order)
        stack.append(name)
        for other in graph[name]:
            if other not in order:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], order[other])
        if low[name] == order[name]:
            at = stack.index(name)
            found.append(sorted(stack[at:]))
            del stack[at:]

    for name in graph:
        if name not in order:
            visit(name)
    return sorted(members for members in found if len(members) > 1)


def with_call(module: Module) -> Iterator[str]:
    """The functions and classes that are told who called them, by a text named `call`."""
    for node in ast.walk(module.tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            given = node.args
            named = [*given.posonlyargs, *given.args, *given.kwonlyargs]
            if any(x.arg == "call" and _is_text(x.annotation) for x in named):
                yield getattr(node, "name", "lambda")
        elif isinstance(node, ast.ClassDef):
            fields = (x for x in node.body if isinstance(x, ast.AnnAssign))
            if any(ast.unparse(x.target) == "call" and _is_text(x.annotation) for x in fields):
                yield node.name


def _is_text(annotation: ast.expr | None) -> bool:
    return annotation is not None and ast.unparse(annotation) in ("str", "str | None")


def naming(modules: Iterable[Module], words: Iterable[str], whole: Iterable[str]) -> list[str]:
    """The strings that contain one of the words, in any case, or are one of the whole texts.

    `_` parts words: `lora_A` contains `lora`.
    """
    among = "|".join(map(re.escape, sorted(words)))
    pattern = re.compile(rf"(?<![a-z0-9])(?:{among})(?![a-z0-9])", re.IGNORECASE)
    texts = {text.casefold() for text in whole}
    return [
        f"{module.name}: {text!r}"
        for module in modules
        for text in module.literals
        if (among and pattern.search(text)) or text.casefold() in texts
    ]


def uses_of_any(module: Module) -> int:
    """How often `Any` stands in annotations and casts."""
    names = (node for node in ast.walk(module.tree) if isinstance(node, ast.Name))
    return sum(node.id == "Any" for node in names)


@dataclass(frozen=True)
class Registered:
    """What the package has registered, and the classes of one of its models.

    Attributes:
        architectures: of methods.
        config_strings: of methods.
        head_types: of heads.
        mixins: our classes above a model class.
    """

    architectures: tuple[str, ...]
    config_strings: tuple[str, ...]
    head_types: tuple[str, ...]
    mixins: tuple[str, ...]


def registered() -> Registered:
    """Ask the package."""
    import adapterzoo
    import adapterzoo.methods  # registers the methods
    from adapterzoo.config import AdapterConfig, config_strings
    from adapterzoo.heads import head_types

    # a union is a config of several methods, and no method
    strings = [text for text in config_strings if text != "union"]
    names = {AdapterConfig.load(text).architecture for text in strings} - {"union"}
    ours = [x.__name__ for x in adapterzoo.BertAdapterModel.__mro__[1:] if _is_ours(x)]
    return Registered(tuple(sorted(names)), tuple(strings), tuple(head_types), tuple(ours))


def _is_ours(found: type) -> bool:
    return found.__module__.partition(".")[0] == ROOT.name


def details(modules: Mapping[str, Module], known: Registered) -> dict[str, list[str]]:
    """For each figure that counts things: the things."""
    found = modules.values()
    blind = [x for x in found if x.area in BLIND_TO_METHODS]
    headless = [x for x in found if x.area in BLIND_TO_HEADS]
    return {
        "modules in import cycles": [name for members in cycles(modules) for name in members],
        "functions and classes with `call`": [
            f"{x.name}: {name}" for x in found for name in with_call(x)
        ],
        "method names in formats, cli, model": naming(
            blind, known.architectures, known.config_strings
        ),
        "head types in cli, model, trainer": naming(headless, (), known.head_types),
        "files directly in model": [
            x.name
            for x in found
            if x.area == "model" and x.name.count(".") == 1 + (not x.is_package)
        ],
        "mixins of ours in BertAdapterModel": list(known.mixins),
    }


def figures(modules: Mapping[str, Module], known: Registered) -> dict[str, int]:
    """The figures by name."""
    return {
        "code lines": sum(x.code_lines for x in modules.values()),
        **{name: len(things) for name, things in details(modules, known).items()},
        "`Any`": sum(uses_of_any(x) for x in modules.values()),
    }


def main(arguments: list[str]) -> int:
    """Print the figures; 1 if one breaks a rule."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--show", metavar="WORD", help="list what figures with this word count")
    chosen = parser.parse_args(arguments)
    modules, known = read(), registered()
    found = figures(modules, known)
    if chosen.show:
        for name, things in details(modules, known).items():
            if chosen.show in name:
                print(f"{name}:", *things, sep="\n  ")
        return 0
    for name, value in found.items():
        print(f"{name:<48} {value:>7}", "must be 0" if value and name in RULES else "")
    by_area: dict[str, int] = {}
    for module in modules.values():
        by_area[module.area] = by_area.get(module.area, 0) + module.code_lines
    print("code lines by area:")
    for area, count in sorted(by_area.items(), key=lambda item: -item[1]):
        print(f"  {count:>6} {area or ROOT.name}")
    print("longest files:")
    for module in sorted(modules.values(), key=lambda x: -x.lines)[:10]:
        print(f"  {module.lines:>6} {module.name}")
    return int(any(found[name] for name in RULES))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
