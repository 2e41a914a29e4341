"""The bugs: what may be changed in a file, which changes are drawn, where they are in a tree."""

from __future__ import annotations

import ast
import copy
import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

PACKAGES = ("methods", "inject", "composition", "formats")
Bug = dict[str, Any]

# fmt: off
_OTHER = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE,
    ast.GtE: ast.Gt, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.And: ast.Or, ast.Or: ast.And,
}
# calls without which the value is almost the same
_DROPPED = {
    "detach", "contiguous", "clone", "to", "float", "double", "copy", "eval", "requires_grad_",
    "lower", "strip", "flatten", "transpose", "expand", "removeprefix", "removesuffix",
}
# fmt: on
_DROPPED_AROUND = {"sorted", "list", "tuple", "set", "dict", "deepcopy", "copy", "abs"}
# the order of their arguments is wrong at once
_UNSWAPPED = {"isinstance", "issubclass", "getattr", "setattr", "hasattr", "cast", "zip"}
# operators whose bugs often raise at once: drawn half as often as the others
_LOUD = {"return None", "swapped arguments"}
# names of functions and variables that hold the text of errors
_TEXT = re.compile(
    r"error|message|hint|refus|complain|raise|repr|__str__|describe|warn|wrong|differences|"
    r"^(hint|lines|text|legal|known|told|advice)$"
)


class Unit(NamedTuple):
    """What is replaced as a whole: a statement without a body, or the head of an if or a loop."""

    function: str
    kind: str
    node: Any
    returns_none: bool


def _name(node: Any) -> str:
    called = getattr(node, "func", None)
    return getattr(called, "attr", getattr(called, "id", ""))


def _units(body: list[ast.stmt], path: str = "", function: Any = None) -> Iterator[Unit]:
    """All units in the functions below; none of a block that raises or imports or checks."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            inside = function if isinstance(node, ast.ClassDef) else node
            yield from _units(node.body, f"{path}.{node.name}".lstrip("."), inside)
            continue
        if function:
            none = getattr(function.returns, "value", 0) is None
            if isinstance(node, ast.If | ast.While | ast.For):
                head = node.iter if isinstance(node, ast.For) else node.test
                yield Unit(path, "if" if isinstance(node, ast.If) else "loop", head, none)
            text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            skipped = ast.Raise | ast.Assert | ast.Pass | ast.Import | ast.ImportFrom
            if not hasattr(node, "body") and not isinstance(node, skipped) and not text:
                yield Unit(path, "statement", node, none)
        for inner in (node, *getattr(node, "handlers", ()), *getattr(node, "cases", ())):
            for field in ("body", "orelse", "finalbody"):
                block = getattr(inner, field, None) or []
                if block and not isinstance(block[-1], ast.Raise):
                    yield from _units(block, path, function)


def units(path: Path) -> Iterator[Unit]:
    """All units in the functions of a file."""
    return _units(ast.parse(path.read_text(encoding="utf-8")).body)


def _untouched(unit: ast.AST) -> set[ast.AST]:
    """Text of errors, formatted text, annotations, and `strict=` of a zip."""
    roots: list[Any] = []
    for node in ast.walk(unit):
        names = [_name(node), *(getattr(t, "id", "") for t in getattr(node, "targets", ()))]
        if isinstance(node, ast.JoinedStr) or any(_TEXT.search(name.lower()) for name in names):
            roots.append(node)
        roots += node.keywords if _name(node) == "zip" else []
        roots.append(getattr(node, "annotation", None) or ast.Pass())
    return {below for root in roots for below in ast.walk(root)}


def _operators(node: Any, unit: Unit) -> Iterator[tuple[str, Any]]:
    """The ways in which a node may be wrong, and what stands there then."""
    statement = unit.node if node is unit.node and unit.kind == "statement" else None
    if node is unit.node and unit.kind == "if":
        yield "negated if", ast.UnaryOp(ast.Not(), node)
    match node:
        case ast.Compare(left, [op, *ops], others):
            yield "comparison", ast.Compare(left, [_OTHER[type(op)](), *ops], others)
        case ast.BinOp(left, op, right) if type(op) in _OTHER:
            # on text, sequences and paths it raises at once
            loud = ast.Constant | ast.JoinedStr | ast.Tuple | ast.List | ast.Set
            quiet = all(_number(side) or not isinstance(side, loud) for side in (left, right))
            if quiet and not re.search("folder|path|file", ast.unparse(left)):
                yield "arithmetic", ast.BinOp(left, _OTHER[type(op)](), right)
        case ast.UnaryOp(ast.Not(), operand):
            yield "dropped not", operand
        case ast.IfExp(test, body, orelse):
            yield "negated if", ast.IfExp(ast.UnaryOp(ast.Not(), test), body, orelse)
        case ast.comprehension(target, source, [test, *tests], is_async):
            ifs = [ast.UnaryOp(ast.Not(), test), *tests]
            yield "negated if", ast.comprehension(target, source, ifs, is_async)
        case ast.Constant(int(value)) if value is not True and value is not False:
            yield "off by one", ast.Constant(value + 1)
        case ast.BoolOp(op, values):
            yield "and/or", ast.BoolOp(_OTHER[type(op)](), values)
        case ast.keyword(name, ast.Constant(bool(value))):
            yield "keyword", ast.keyword(name, ast.Constant(not value))
        case ast.Attribute(value, "T" | "mT"):
            yield "dropped call", value
        case ast.Call(called, args, keywords):
            if isinstance(called, ast.Attribute) and called.attr in _DROPPED:
                yield "dropped call", called.value
            if len(args) == 1 and not keywords and _name(node) in _DROPPED_AROUND:
                yield "dropped call", args[0]
            formatted = any(isinstance(a, ast.Starred | ast.JoinedStr) for a in args[:2])
            if len(args) > 1 and _name(node) not in _UNSWAPPED and not formatted:
                swapped = [args[1], args[0], *args[2:]]
                yield "swapped arguments", ast.Call(called, swapped, keywords)
    match statement:
        case ast.Return(value) if not isinstance(value, ast.Constant | None):
            yield "return None", ast.Return(ast.Constant(None))
        case (
            ast.AugAssign()
            | ast.Assign([ast.Attribute() | ast.Subscript(), *_])
            | ast.Expr(ast.Call())
        ) if _name(getattr(statement, "value", None)) != "__init__":
            yield "dropped statement", ast.Pass()
            if unit.returns_none:
                yield "return None", ast.Return(None)


def _number(node: Any) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)


def _with(unit: Any, place: int, new: Any) -> Any:
    """A copy of the unit with another node at a place in the order of `ast.walk`."""
    if place == 0:
        return new
    twin = copy.deepcopy(unit)
    nodes = list(ast.walk(twin))
    for parent in nodes:
        for field, value in ast.iter_fields(parent):
            if value is nodes[place]:
                setattr(parent, field, new)
            elif isinstance(value, list):
                value[:] = [new if v is nodes[place] else v for v in value]
    return twin


def _bugs_of(path: Path, file: str) -> Iterator[Bug]:
    seen: Counter[tuple[str, str]] = Counter()
    for unit in units(path):
        original, untouched = ast.unparse(unit.node), _untouched(unit.node)
        nth = seen[unit.function, original]
        seen[unit.function, original] += 1
        if _TEXT.search(unit.function.rsplit(".", 1)[-1].lower()):
            continue
        for place, node in enumerate(ast.walk(unit.node)):
            for operator, new in () if node in untouched else _operators(node, unit):
                mutated = ast.unparse(ast.fix_missing_locations(_with(unit.node, place, new)))
                bug = {"file": file, "function": unit.function, "operator": operator}
                lines = {"line": unit.node.lineno, "original": original, "nth": nth}
                yield bug | lines | {"mutated": mutated}


def draw(root: Path, seed: int, each: int) -> list[Bug]:
    """Draw bugs: as many in each package, an operator first, then a place; one in a function."""
    rng = random.Random(seed)
    drawn: list[Bug] = []
    for package in PACKAGES:
        by_operator: dict[str, list[Bug]] = defaultdict(list)
        for path in sorted((root / "adapterzoo" / package).rglob("*.py")):
            for bug in _bugs_of(path, path.relative_to(root).as_posix()):
                by_operator[bug["operator"]].append(bug)
        taken: set[tuple[str, str]] = set()
        while len(taken) < each:
            operator = rng.choice([*sorted(by_operator), *sorted(set(by_operator) - _LOUD)])
            bug = rng.choice(by_operator[operator])
            if (bug["file"], bug["function"]) not in taken:
                taken.add((bug["file"], bug["function"]))
                drawn.append({"number": len(drawn), **bug})
    return drawn


def locate(root: Path, bug: Bug) -> tuple[Path, Unit] | None:
    """Where a bug goes in a tree; None where its statement is gone from the function."""

    def found(path: Path) -> list[tuple[Path, Unit]]:
        named = [u for u in units(path) if u.function == bug["function"]]
        return [(path, u) for u in named if ast.unparse(u.node) == bug["original"]]

    home = root / bug["file"]
    if home.exists() and len(here := found(home)) > bug["nth"]:
        return here[bug["nth"]]
    # the function may have moved to another file
    moved = [place for path in (root / "adapterzoo").rglob("*.py") for place in found(path)]
    return moved[0] if len(moved) == 1 else None


def rewrite(path: Path, changes: list[tuple[Unit, Callable[[str], str]]]) -> None:
    """Write a file anew with the text of units changed; the rest keeps its lines and comments."""
    text = path.read_bytes()
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for (_, _, node, _), change in sorted(changes, key=lambda c: c[0].node.lineno, reverse=True):
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        text = text[:start] + change(text[start:end].decode()).encode() + text[end:]
    path.write_bytes(text)


def plant(root: Path, bug: Bug) -> bool:
    """Plant a bug in a tree; False where it no longer fits."""
    if (place := locate(root, bug)) is None:
        return False
    mutated = bug["mutated"] if place[1].kind == "statement" else f"({bug['mutated']})"
    rewrite(place[0], [(place[1], lambda _: mutated)])
    return True
