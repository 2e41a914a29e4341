"""The structure breaks no rule, and each figure counts what it should."""

import textwrap

import figures
import pytest

NOTHING = figures.Registered((), (), (), ())


def package(tmp_path, **files):
    """The modules of a package `adapterzoo` with these files; `_in_` stands for `/`."""
    root = tmp_path / "adapterzoo"
    for name, text in {"__init__": "", **files}.items():
        file = root / f"{name.replace('_in_', '/')}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
    return figures.read(root)


def counted(modules, known=NOTHING):
    return {name: things for name, things in figures.details(modules, known).items() if things}


def test_no_figure_breaks_a_rule():
    found = figures.figures(figures.read(), figures.registered())
    broken = {name: found[name] for name in figures.RULES if found[name]}
    assert not broken, "python -m tests.figures --show WORD lists what is counted"


def test_code_lines_are_those_that_are_no_blanks_comments_and_docstrings(tmp_path):
    text = '''
        """A docstring
        of two lines."""

        # a comment
        A = """text

        of two lines that are not blank"""
        B: int = 1  # and a comment
        """A docstring below."""


        def f(
            x: int,
        ) -> int:
            """Another."""
            return x
        '''
    modules = package(tmp_path, core=text, methods_in_lora="A = 1")
    assert modules["adapterzoo.core"].code_lines == 7
    assert figures.figures(modules, NOTHING)["code lines"] == 8


@pytest.mark.parametrize(
    ("here", "there"),
    [
        ("from .b import thing", "from . import a"),
        ("from adapterzoo import b", "import adapterzoo.a"),
        ("if TYPE_CHECKING:\n    from .b import Thing", "def f():\n    from .a import g"),
        ("from .b import thing", "from .c_in import thing"),
    ],
)
def test_cycles_are_found_whatever_imports(tmp_path, here, there):
    found = package(tmp_path, a=here, b=there, c_in="from .a import thing", d="from .a import x")
    members = [["adapterzoo.a", "adapterzoo.b"]]
    if "c_in" in there:
        members = [["adapterzoo.a", "adapterzoo.b", "adapterzoo.c_in"]]
    assert figures.cycles(found) == members


def test_packages_and_their_modules_are_told_apart(tmp_path):
    modules = package(
        tmp_path,
        x_in___init__="from .inner import y",
        x_in_inner="from ..z import w",
        z="from .x import y",
    )
    assert figures.cycles(modules) == [["adapterzoo.x", "adapterzoo.x.inner", "adapterzoo.z"]]


def test_each_thing_that_is_counted_is_found(tmp_path):
    called = """
        class Asker:
            call: str

        def f(x: int, *, call: str | None = None) -> None: ...

        def g(call: CallContext) -> None: ...
        """
    engine = """
        '''A docstring may say lora.'''
        WORDS = "lora", "lora_A", "LoRA is", "flora", "colora_A", "seq_bn", "seq_bn_inv", "union"
        """
    modules = package(
        tmp_path,
        a=called,
        formats_in_peft=engine,
        methods_in_lora="NAME = 'lora'",
        model_in_mixin="TYPE = 'tagging'",
        model_in_heads_in_named="",
        trainer="A = 'seq_bn', 'tagging'",
    )
    known = figures.Registered(("lora",), ("seq_bn",), ("tagging",), ("AdapterModelMixin",))
    assert counted(modules, known) == {
        "functions and classes with `call`": ["adapterzoo.a: Asker", "adapterzoo.a: f"],
        "method names in formats, cli, model": [
            f"adapterzoo.formats.peft: {text!r}" for text in ("lora", "lora_A", "LoRA is", "seq_bn")
        ],
        "head types in cli, model, trainer": [
            "adapterzoo.model.mixin: 'tagging'",
            "adapterzoo.trainer: 'tagging'",
        ],
        "files directly in model": ["adapterzoo.model.mixin"],
        "mixins of ours in BertAdapterModel": ["AdapterModelMixin"],
    }


def test_uses_of_any_are_counted(tmp_path):
    modules = package(tmp_path, a="from typing import Any\nx: Any = cast('Any', 1)\ny: list[Any]")
    assert figures.uses_of_any(modules["adapterzoo.a"]) == 2
