"""What a user starts works in a process that has imported nothing yet, whatever is imported first.

Tests in one process cannot see a registry that an import fills: an earlier test has imported it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import fresh
import pytest
from run_readme import ENCODER, shown
from stand_ins import real, stand_in

from _data import packaged_model

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "adapterzoo"

# what an entry of each registry is found by; printed, so that processes can be compared
SHOWN = """
from adapterzoo import AdapterConfig
print(AdapterConfig.load("lora[r=8]").r, AdapterConfig.from_dict({"architecture": "lora"}).r)
from adapterzoo.config import architectures, change_forms, config_strings
from adapterzoo.spelling import adapterhub_spellings, peft_readers, peft_spellings
from adapterzoo.formats.checkpoint import formats
from adapterzoo.heads import add_methods, head_types
from adapterzoo.methods.fusion import fusion_configs
for registry in (
    architectures, change_forms, config_strings, adapterhub_spellings, peft_readers,
    peft_spellings, formats, add_methods, head_types, fusion_configs,
):
    print(registry.kind, list(registry))
"""

# each is the first line that a user writes
FIRST = {
    "config strings": "from adapterzoo import AdapterConfig; AdapterConfig.load('boft')",
    "config string of a union": "from adapterzoo import AdapterConfig; "
    "AdapterConfig.load('prefix_tuning|seq_bn')",
    "dicts": "from adapterzoo import AdapterConfig; "
    "AdapterConfig.from_dict({'architecture': 'vera'})",
    "one registry": "from adapterzoo.config import config_strings as s; assert 'lora' in s",
    "its length": "from adapterzoo.config import architectures; assert len(architectures) > 9",
    "the registry's names": "from adapterzoo.config import change_forms; list(change_forms)[0]",
    "spellings": "from adapterzoo.spelling import peft_readable; assert len(peft_readable()) > 9",
    "fusions": "from adapterzoo import AdapterFusionConfig; AdapterFusionConfig.load('dynamic')",
    "heads": "from adapterzoo.heads import HeadConfig; "
    "HeadConfig.from_dict({'head_type': 'tagging', 'num_labels': 2})",
    "activations": "from adapterzoo.activations import activation; activation('gelu')",
    "the map of adapters": "from adapterzoo.configuration import ADAPTER_CONFIG_MAP; "
    "ADAPTER_CONFIG_MAP['houlsby']",
    "hashes": "from adapterzoo import AdapterConfig; "
    "from adapterzoo.utils import get_adapter_config_hash; "
    "get_adapter_config_hash(AdapterConfig.load('pfeiffer'))",
    "classes of one model": "from adapterzoo import BertAdapterModel",
    "PEFT's configs": "from adapterzoo.peft import LoraConfig; LoraConfig(r=4)",
    "PEFT's functions": "from adapterzoo.peft import get_peft_config; "
    "get_peft_config({'peft_type': 'LORA'})",
    "conformance": "from adapterzoo.testing import cases; assert list(cases('lora'))",
    "a setup": "from adapterzoo.context import AdapterSetup; from adapterzoo import Stack; "
    "AdapterSetup(Stack('a', 'b'))",
}  # fmt: skip

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")


def modules(pattern: str) -> list[str]:
    """The modules of the package whose files fit the pattern."""
    files = sorted(PACKAGE.glob(pattern))
    parts = [f.relative_to(ROOT).with_suffix("").parts for f in files if f.name != "__main__.py"]
    return [".".join(p[:-1] if p[-1] == "__init__" else p) for p in parts]


def complete(first: list[str], folder: Path) -> None:
    """Fail if registries depend on the module that was imported first."""
    found = fresh.run([f"import {name}\n{SHOWN}" for name in first], folder)
    expected = fresh.run([SHOWN], folder)[0]
    assert expected[0] == 0, expected[1]
    assert "config string ['union', " in expected[1]
    assert "'lora'" in expected[1]
    other = {n: output for n, (s, output) in zip(first, found, strict=True) if s}
    assert not other
    differing = [
        n
        for n, result in zip(first, found, strict=True)
        if set_of(result[1]) != set_of(expected[1])
    ]
    assert not differing


def set_of(output: str) -> set[str]:
    """The names in the output; their order may depend on the order of imports."""
    return set(re.findall(r"\S+", output))


@pytest.mark.sweep
@needs_fork
@pytest.mark.parametrize("first", range(10))
def test_registries_are_complete_whichever_module_is_imported_first(first, tmp_path):
    every = [name for name in modules("**/*.py") if not name.endswith("_triton")]
    complete(every[first::10], tmp_path)


@needs_fork
def test_the_first_line_of_a_script_runs(tmp_path):
    found = fresh.run(list(FIRST.values()), tmp_path)
    failed = {name: output for name, (s, output) in zip(FIRST, found, strict=True) if s}
    assert not failed


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    stand_in(folder, "bert-base-uncased", "bert")
    real(folder, ENCODER, packaged_model())
    return {"HF_HUB_CACHE": str(folder), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}


def commands() -> list[list[str]]:
    """The documented commands; of those that need a Hub to write to, the help."""
    page = (ROOT / "docs" / "cli.md").read_text("utf-8")
    # those between need data of their own, see tests/test_docs.py
    first, last = page.partition("## Tasks")[0], page.partition("## All commands")[2]
    blocks = re.findall(r"```bash\n(.*?)```", first + last.partition("## Verify")[0], re.DOTALL)
    lines = "".join(blocks).replace("\\\n", "").splitlines()
    words = [["adapterzoo", *re.findall(r'"[^"]*"|\S+', line)[1:]] for line in lines]
    words = [[word.strip('"') for word in line] for line in words]
    return [[*line[:2], "--help"] if line[1] in ("push", "list") else line for line in words]


def rows(folder: Path) -> None:
    """Write the files that the page's commands read."""
    text = "text,label\n" + 4 * "a lovely film,fresh\nan awful film,rotten\n"
    for name in ("train.csv", "test.csv"):
        (folder / name).write_text(text)


@pytest.mark.sweep
@needs_fork
def test_every_documented_command_runs(cache, tmp_path):
    rows(tmp_path)
    pieces = [
        f"import sys, runpy; sys.argv = {line}; runpy.run_module('adapterzoo', run_name='__main__')"
        for line in commands()
    ]
    assert len(pieces) == 14
    results = fresh.run(pieces, tmp_path, **cache)
    failed = {p: output for p, (s, output) in zip(pieces, results, strict=True) if s}
    assert not failed
    assert "fresh" in results[1][1]


@pytest.mark.sweep(whole=True)
def test_documented_commands_run_as_programs(cache, tmp_path):
    rows(tmp_path)
    for line in commands():
        program = [sys.executable, "-m", *line]
        done = subprocess.run(
            program, cwd=tmp_path, env={**os.environ, **cache}, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr


@pytest.mark.sweep
@needs_fork
def test_the_readme_runs(cache, tmp_path):
    status, output = fresh.run([shown((ROOT / "README.md").read_text("utf-8"))], tmp_path, **cache)[
        0
    ]
    assert status == 0, output
