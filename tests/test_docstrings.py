"""Docstrings say what the code takes and raises: no argument left out, none that is gone.

They are read by programs too: what stands before a colon is a type to the pages' reader where a
result is described.
"""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

import adapterzoo
from adapterzoo import errors

PACKAGE = Path(adapterzoo.__file__).parent
# what a command says is its help text; machinery is for those who read it
FILES = sorted(
    path
    for path in PACKAGE.rglob("*.py")
    if "cli" not in path.parts and not re.match("_[a-z]", path.name)
)
SECTION = re.compile(r"^( *)(Args|Raises):\n((?:\1 +.*\n|\n)*)", re.MULTILINE)
RESULT = re.compile(r"^ *Returns:\n +(.*)$", re.MULTILINE)
# not a colon of a role (:class:`X`), and a type has no spaces outside its brackets
NO_TYPE = re.compile(r"(?!:)[^`:\[]* [^`:\[]*: ")
ERRORS = {name for name, cls in vars(errors).items() if isinstance(cls, type)}


def sections(text: str) -> dict[str, dict[str, str]]:
    """The entries of Args and Raises by their names."""
    found: dict[str, dict[str, str]] = {}
    for indent, title, body in SECTION.findall(inspect.cleandoc(text) + "\n"):
        entries = re.findall(rf"^{indent}    (\*{{0,2}}[\w.]+):(.*)$", body, re.MULTILINE)
        found[title] = dict(entries)
    return found


def public(tree: ast.AST, inside: str = "") -> list[tuple[str, ast.FunctionDef]]:
    """Public functions, and public methods of public classes; setters are told of by getters."""
    found = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            found += public(node, f"{inside}{node.name}.")
        elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            marks = [ast.unparse(d) for d in node.decorator_list]
            if not any(mark == "overload" or mark.endswith(".setter") for mark in marks):
                found.append((f"{inside}{node.name}", node))
    return found


def arguments(name: str, node: ast.FunctionDef) -> set[str]:
    given = node.args
    names = [a.arg for a in (*given.posonlyargs, *given.args)]
    # the first argument of a method is its object
    static = any("staticmethod" in ast.unparse(d) for d in node.decorator_list)
    found = {*names[1 if "." in name and not static else 0 :], *(a.arg for a in given.kwonlyargs)}
    return found | {a.arg for a in (given.vararg, given.kwarg) if a is not None}


def is_property(node: ast.FunctionDef) -> bool:
    return any(ast.unparse(mark).endswith("property") for mark in node.decorator_list)


def raised(node: ast.FunctionDef) -> set[str]:
    """Names of the package's errors that the function itself makes and raises."""
    return {
        inner.exc.func.id
        for inner in ast.walk(node)
        if isinstance(inner, ast.Raise)
        and isinstance(inner.exc, ast.Call)
        and isinstance(inner.exc.func, ast.Name)
        and inner.exc.func.id in ERRORS
    }


def complaints(name: str, node: ast.FunctionDef, told: dict[str, set[str]]) -> list[str]:
    """What is wrong with a docstring.

    Args:
        name: with that of its class.
        node: the function.
        told: names of methods to what some class says that they raise: who overrides need not.
    """
    text = ast.get_docstring(node) or ""
    parts = sections(text)
    found = [] if text else [f"{name}: no docstring"]
    if "Args" in parts:
        named, real = {n.lstrip("*") for n in parts["Args"]}, arguments(name, node)
        found += [f"{name}: Args names {n}, which is gone" for n in sorted(named - real)]
        found += [f"{name}: Args lacks {n}" for n in sorted(real - named)]
    inherited = told.get(name.rpartition(".")[2], set()) if "." in name else set()
    lines = RESULT.findall(inspect.cleandoc(text))
    lines += text.splitlines()[:1] if is_property(node) else []
    found += [
        f"{name}: {line!r} has no type before its colon" for line in lines if NO_TYPE.match(line)
    ]
    missing = raised(node) - set(parts.get("Raises", ())) - inherited
    return found + [f"{name}: Raises lacks {n}" for n in sorted(missing)]


FUNCTIONS = [
    (path, name, node)
    for path in FILES
    for name, node in public(ast.parse(path.read_text("utf-8")))
]


def told_of() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for _, name, node in FUNCTIONS:
        raises = sections(ast.get_docstring(node) or "").get("Raises", {})
        found.setdefault(name.rpartition(".")[2], set()).update(raises)
    return found


def test_docstrings_say_what_is_there():
    told = told_of()
    found = [
        f"{path.relative_to(PACKAGE)}: {line}"
        for path, name, node in FUNCTIONS
        for line in complaints(name, node, told)
    ]
    assert not found, "\n".join(found)


TAKES_B = '"""F.\n\n    Args:\n        {}b: of it.\n    """'
RAISES = '"""F.{}"""\n    raise ConfigError("no")'


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("def f(a): pass", ["f: no docstring"]),
        ("def f(a):\n    " + TAKES_B.format(""),
         ["f: Args names b, which is gone", "f: Args lacks a"]),
        ("def f(**b):\n    " + TAKES_B.format("**"), []),
        ("def f():\n    " + RAISES.format(""), ["f: Raises lacks ConfigError"]),
        ("def f():\n    " + RAISES.format("\n\n    Raises:\n        ConfigError: no.\n    "), []),
        ('@property\ndef f():\n    """A thing: it is."""',
         ["f: 'A thing: it is.' has no type before its colon"]),
        ('def f():\n    """A thing: it is."""', []),
        ('def f():\n    """F.\n\n    Returns:\n        bool: it is.\n    """', []),
        ('def f():\n    """F.\n\n    Returns:\n        What is: it.\n    """',
         ["f: 'What is: it.' has no type before its colon"]),
    ],
)  # fmt: skip
def test_the_check_of_docstrings_bites(source, says):
    ((name, node),) = public(ast.parse(source))
    assert complaints(name, node, {}) == says
