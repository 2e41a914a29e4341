"""A family of methods is its folder: the library works without it and its formats."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import adapterzoo
from adapterzoo import methods
from adapterzoo.config import architectures, config_strings
from adapterzoo.heads import head_types

PACKAGE = Path(adapterzoo.__file__).parent
TESTS = Path(__file__).parent

SCRIPT = """
import sys
from pathlib import Path

import torch
from families import tiny_config

import adapterzoo
from adapterzoo import AutoAdapterModel, IA3Config
from adapterzoo.formats.checkpoint import formats
from adapterzoo.errors import AdapterZooError

folder = Path(sys.argv[1])
assert not {"dora", "lora"} & {*adapterzoo.config.architectures}
model = AutoAdapterModel.from_config(tiny_config("bert")).eval()
model.add_adapter("a", IA3Config(convention="adapterhub", init_weights="bert"))
model.add_adapter("b", "seq_bn")
x = torch.tensor([[1, 2, 3]])
model.set_active_adapters("a")
expected = model(x).last_hidden_state
for form in formats:
    model.save_adapter(folder / "ia3" / form, "a", format=form)
    model.load_adapter(folder / "ia3" / form, load_as=form, set_active=True)
    assert torch.equal(model(x).last_hidden_state, expected), form
    try:
        model.load_adapter(folder / "dora" / form, load_as="dora")
    except AdapterZooError as error:
        print(form, error)
    assert "dora" not in model.adapters_config
"""


@pytest.fixture
def without_dora(tmp_path):
    """A copy of the package without the family of DoRA, and what exports it."""
    copy = tmp_path / "package" / "adapterzoo"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(copy / "methods" / "low_rank")
    init = copy / "__init__.py"
    lines = init.read_text().splitlines(keepends=True)
    names = "|".join(name for name in methods.low_rank.__all__ if name.endswith("Config"))
    init.write_text("".join(line for line in lines if not re.search(rf"\b({names})\b", line)))
    return copy.parent


def test_without_its_folder_a_family_is_not_known(tiny, tmp_path, without_dora):
    model = tiny("bert")
    model.add_adapter("hub", "dora[r=4,convention='adapterhub']")
    model.add_adapter("paper", "dora[r=4]")
    for form, name in (("native", "paper"), ("peft", "paper"), ("adapterhub", "hub")):
        model.save_adapter(tmp_path / "dora" / form, name, format=form)
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, timeout=600,
        check=False, cwd=tmp_path, env={**os.environ, "PYTHONPATH": f"{without_dora}:{TESTS}"},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    said = dict(line.split(" ", 1) for line in ran.stdout.splitlines() if " " in line)
    assert "there is no architecture 'dora'" in said["native"]
    for form, fields in (
        ("adapterhub", "'lora', composition_mode='add', use_dora=True"),
        ("peft", "peft_type='LORA'"),
    ):
        # a long path is cut in the middle of a message
        assert said[form].startswith("load_adapter('")
        assert "): there is no such method" in said[form]
        assert fields in said[form]
        assert "that exist here: " in said[form]
        assert "'dora'" not in said[form]


def test_the_formats_contain_no_method_and_no_type_of_head():
    known = {*architectures, *config_strings, *head_types} - {"union", "fusion"}
    found = []
    for path in sorted((PACKAGE / "formats").rglob("*.py")):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                module = getattr(node, "module", None) or ""
                names = [module, *(alias.name for alias in node.names)]
                # machinery is `_name.py`
                families = [n for n in names if re.match(r"adapterzoo\.methods(?!\._)", n)]
                found += [(path.name, n) for n in families]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                said = known & {*re.findall(r"[a-z_0-9+]+", node.value)}
                # a docstring may give an example
                if said and not _is_docstring(tree, node):
                    found.append((path.name, node.value))
    assert found == []


def _is_docstring(tree, constant):
    return any(isinstance(n, ast.Expr) and n.value is constant for n in ast.walk(tree))
