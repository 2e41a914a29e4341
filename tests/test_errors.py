"""The error tree, and what messages are made of."""

from __future__ import annotations

import ast
import builtins
import inspect
import re
from pathlib import Path

import pytest

import adapterzoo
from adapterzoo import errors
from adapterzoo.errors import (
    AdapterZooError,
    ConfigError,
    UnknownNameError,
    argument,
    counted,
    in_python,
    listing,
    names_call,
    naming,
    unknown_name,
)

PACKAGE = Path(adapterzoo.__file__).parent


def tree() -> dict[str, type]:
    return {
        name: cls
        for name, cls in vars(errors).items()
        if inspect.isclass(cls) and issubclass(cls, AdapterZooError)
    }


def test_the_tree_in_the_docstring_is_the_tree():
    found = re.findall(r"^([│ ]*)[├└]── (\w+)\(([\w, ]+)\)", errors.__doc__, re.MULTILINE)
    drawn, above = {}, "AdapterZooError"
    for indent, name, bases in found:
        above = above if indent else name
        drawn[name] = [above if indent else "AdapterZooError", *bases.split(", ")]
    below = {name: cls.__bases__ for name, cls in tree().items() if cls is not AdapterZooError}
    assert drawn == {name: [base.__name__ for base in bases] for name, bases in below.items()}


@pytest.mark.parametrize("cls", tree().values())
def test_a_message_is_shown_as_it_was_written(cls):
    text = "call('a'): line one\n  line 'two'"
    assert str(cls(text)) == text
    assert str(cls()) == ""


# Python's protocols: a mapping without a key, a method without a body; a folder in the place of a
# file, as the system says it; a reason that is caught where it is raised; a module without a name;
# `load_state_dict` where keys differ
BUILTINS = {
    # what is wrong with a cell, for the error of the row
    "cli/rows.py": "ValueError",
    # Ctrl-C, with a checkpoint
    "cli/training.py": "KeyboardInterrupt",
    "compat/peft/install.py": "ImportError",
    "compat/peft/layers.py": "KeyError",
    "compat/peft/model.py": "RuntimeError",
    "contracts.py": "NotImplementedError",
    "formats/files.py": "IsADirectoryError",
    "model/conversion/__init__.py": "ValueError",
    "models.py": "KeyError",
}


def test_everything_that_the_package_raises_is_in_the_tree():
    found = set()
    for file in sorted(PACKAGE.rglob("*.py")):
        path = file.relative_to(PACKAGE).as_posix()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                called = node.exc.func
                name = called.id if isinstance(called, ast.Name) else ""
                is_builtin = name in vars(builtins) and name not in tree()
                # AttributeError: what Python asks of __getattr__; testing/: findings of the suite
                if is_builtin and name != "AttributeError" and not path.startswith("testing/"):
                    found.add((path, name))
    assert found == set(BUILTINS.items())


@pytest.mark.parametrize(
    ("items", "limit", "shown"),
    [
        ([], 10, "none"),
        (["a"], 10, "'a'"),
        (["a", 1], 10, "'a', 1"),
        (range(10), 10, "0, 1, 2, 3, 4, 5, 6, 7, 8, 9"),
        (range(24), 10, "0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 14 more"),
        (iter("abc"), 2, "'a', 'b' and 1 more"),
    ],
)
def test_listing(items, limit, shown):
    assert listing(items, limit=limit) == shown


def test_an_unknown_name_is_met_with_the_nearest():
    error = unknown_name("delete_adapter('sts2')", "adapter", "sts2", {"sst2", "mnli"})
    assert type(error) is UnknownNameError
    assert str(error) == (
        "delete_adapter('sts2'): there is no adapter 'sts2'. Did you mean 'sst2'? "
        "Known adapters: 'mnli', 'sst2'."
    )


def test_a_name_in_other_case_is_near():
    assert "Did you mean 'lora'?" in str(unknown_name("f()", "method", "LoRA", ["lora", "seq_bn"]))


def test_an_unknown_name_is_met_with_all_names_sorted_and_cut():
    error = unknown_name("f()", "head", "zzz", (f"h{i:02}" for i in reversed(range(24))))
    names = ", ".join(f"'h{i:02}'" for i in range(10))
    assert str(error) == f"f(): there is no head 'zzz'. Known heads: {names} and 14 more."
    assert str(unknown_name("f()", "head", None, [])) == (
        "f(): there is no head None. Known heads: none."
    )


def test_an_unknown_name_of_two_kinds():
    error = unknown_name("", "adapter or head", "c", ["a", "b"], "adapters and heads")
    assert str(error) == "there is no adapter or head 'c'. Known adapters and heads: 'a', 'b'."


def test_a_number_with_its_noun():
    assert [counted(n, "row") for n in range(3)] == ["0 rows", "1 row", "2 rows"]


def test_errors_can_be_caught_as_the_builtins_they_are():
    with pytest.raises(KeyError, match="no adapter"):
        raise unknown_name("f()", "adapter", "a", [])
    for name, builtin in re.findall(r"[├└]── (\w+)\((\w+)\)", errors.__doc__):
        assert issubclass(tree()[name], getattr(builtins, builtin))


def test_the_outermost_public_call_is_named_once():
    @names_call
    def inner(name):
        raise ConfigError("this is wrong")

    @names_call
    def outer(path, *, name="b"):
        inner(name)

    with pytest.raises(ConfigError, match=r"^inner\('b'\): this is wrong$"):
        inner("b")
    with pytest.raises(ConfigError, match=r"^outer\('/x'\): this is wrong$"):
        outer(Path("/x"))
    with pytest.raises(ConfigError, match=r"^outer\(\): this is wrong$"), naming("outer()"):
        outer("a")
    # nothing is left over from a call that failed
    with pytest.raises(ConfigError, match=r"^inner\('c'\): "):
        inner(name="c")


def test_arguments_are_spelled_for_the_reader():
    def option(name, value):
        return f"--{name} {value}"

    assert (argument("format", "peft"), in_python("here", "there")) == ("format='peft'", "here")
    with naming("convert", option):
        assert (argument("format", "peft"), in_python("here", "there")) == (
            "--format peft", "there",
        )  # fmt: skip
        # an inner call has the same reader
        with naming("save_adapter('a')"):
            assert argument("format", "peft") == "--format peft"
    assert argument("format", "peft") == "format='peft'"


def _named(tree):
    """The functions of a file whose errors `names_call` prefixes."""
    for node in ast.walk(tree):
        decorators = [ast.unparse(d) for d in getattr(node, "decorator_list", ())]
        if "names_call" in decorators:
            yield node.name
        if "names_calls" in decorators:
            yield from (member.name for member in node.body if isinstance(member, ast.FunctionDef))


def test_no_message_names_the_public_function_that_the_decorator_names():
    """It would say the call twice."""
    trees = [ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")]
    public = {name for tree in trees for name in _named(tree)}
    assert {"add_adapter", "set_output_embeddings", "load_adapter"} <= public
    twice = []
    for call in (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)):
        if call.args and ast.unparse(call.func).endswith("Error"):
            text = ast.unparse(call.args[0]).lstrip("f'\"(")
            twice += [text] if text.partition("(")[0] in public and "(" in text else []
    assert not twice
