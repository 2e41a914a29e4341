"""What the pages of docs/ say of names: all of them are there, and none that is not."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import adapterzoo
from adapterzoo import (
    LoRAConfig,
    composition,
    configs,
    contracts,
    errors,
    heads,
    model,
    peft,
    trainer,
)
from adapterzoo.auto import AdapterModel
from adapterzoo.config import AdapterConfig, config_strings
from adapterzoo.methods.fusion import fusion_configs
from adapterzoo.model.heads import outputs
from adapterzoo.peft.utils import hotswap

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS))
try:
    from check_links import broken
finally:
    sys.path.pop(0)

HERE = (
    adapterzoo, composition, configs, contracts, errors, heads, hotswap, model, outputs, peft,
    trainer,
)  # fmt: skip
CODE = re.compile(r"`([^`]+)`")
CELL = re.compile(r"(?<!\\)\|")


def table(page: str) -> Iterator[list[str]]:
    """The cells of all rows of the tables of a page."""
    for line in (DOCS / page).read_text().splitlines():
        if line.startswith("|") and not line.startswith("| ---"):
            yield [cell.strip() for cell in CELL.split(line)[1:-1]]


def code_of(cell: str) -> list[str]:
    """What stands between backticks, without arguments."""
    return [re.sub(r"\(.*", "", text) for text in CODE.findall(cell)]


def is_here(name: str) -> bool:
    """Whether a user finds the name in the library, on a model or among the config strings."""
    last = name.rpartition(".")[2]
    places = (*HERE, AdapterModel, adapterzoo.BertAdapterModel, peft.PeftModel)
    strings = {*config_strings, *fusion_configs}
    return name.strip('"') in strings or any(hasattr(place, last) for place in places)


PEER = json.loads((ROOT / "tests" / "data" / "adapters_api.json").read_text())


NAMES = "from-adapters-names.md"


def names_of_adapters() -> tuple[set[str], set[str]]:
    """Those that the page says are here, and those that it says are not."""
    same = re.findall(
        r"^The same: (.*?)(?:\. (?:New|All)\b|\n\n)", (DOCS / NAMES).read_text(), re.S | re.M
    )
    here, absent = {name for text in same for name in code_of(text)}, set()
    for names, what in table(NAMES):
        if names != "name":
            (absent if what.startswith("not here") else here).update(code_of(names))
    return here - {"…Model"}, absent


@pytest.mark.parametrize("kind", sorted(PEER))
def test_every_name_of_adapters_is_on_the_page(kind):
    here, absent = names_of_adapters()
    assert set(PEER[kind]) <= here | absent
    assert not here & absent


def test_names_of_adapters_are_here_or_not_as_the_page_says():
    here, absent = names_of_adapters()
    assert len(here) > 200
    assert [name for name in sorted(here) if not is_here(name)] == []
    assert [name for name in sorted(absent) if is_here(name)] == []


def test_what_is_said_to_be_here_for_peft_is():
    checked, fields = 0, {field.name for field in dataclasses.fields(LoRAConfig)}
    fields.update(dir(peft.PrefixTuningConfig(num_virtual_tokens=1)))
    for row in table("from-peft.md"):
        theirs, ours, *_ = row
        if ours in ("here", "always", "not needed", "not here"):
            continue
        for name in code_of(theirs) if ours.startswith("the same") else code_of(ours):
            if name.removeprefix("model.").isidentifier():
                checked += 1
                assert is_here(name) or name in fields, (row, name)
    assert checked > 40


def test_every_public_name_has_a_place_in_the_reference():
    text = "".join(path.read_text() for path in (DOCS / "reference").glob("*.md"))
    named = {n.rpartition(".")[2] for n in re.findall(r"\.\. auto\w+:: ([\w.]+)", text)}
    assert set(adapterzoo.__all__) <= named


def defined() -> set[str]:
    """Names of all classes, functions and type aliases of the package."""
    found: set[str] = set()
    for file in Path(adapterzoo.__file__).parent.rglob("*.py"):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                found.add(node.name)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found.update(ast.unparse(target) for target in targets)
    return found


def test_the_glossary_names_what_is_in_the_code():
    rows = [row for row in table("glossary.md") if row[0] != "term"]
    assert len({row[0] for row in rows}) == len(rows) > 30
    named = [name for row in rows for name in code_of(row[2])]
    assert len(named) > 25
    assert set(named) <= defined()


LINK = re.compile(r"\]\(([^)#\s]+)(#[\w-]+)?\)")


def test_links_of_the_readme_lead_somewhere():
    links = [link for link, _ in LINK.findall((ROOT / "README.md").read_text())]
    assert len(links) > 10
    assert [link for link in links if "://" not in link and not (ROOT / link).exists()] == []


def test_figures_of_the_readme_are_those_of_the_benchmark():
    shape = "Llama, 512 wide, 8 layers, 8 × 128 tokens"
    titles = {
        "step, LoRA with dropout": f"step: LoRA r=8, dropout 0.05, {shape}",
        "step, DoRA": f"step: DoRA r=8, {shape}",
        "step, BOFT": f"step: BOFT b=4 m=1, {shape}",
        "memory, LoRA with dropout": f"saved bytes: LoRA r=8, dropout 0.05, {shape}",
        "loading 50 adapters": "loading 50 LoRA adapters",
    }
    sections = json.loads((ROOT / "benchmarks/results/cpu.json").read_text())["sections"].values()
    measured = {f["name"]: f for section in sections for f in section["figures"]}
    rows = {row[0]: row[1:3] for row in table("../README.md")}
    for title, name in titles.items():
        figures = [measured[name][side]["median"] for side in ("ours", "theirs")]
        form = "{:.1f} s" if name.startswith("loading") else "{:.2f}"
        assert rows[title] == [form.format(figure) for figure in figures], title


def test_methods_that_the_readme_counts():
    said = re.search(r"with (\d+) methods", (ROOT / "README.md").read_text())
    names = {AdapterConfig.load(name) for name in config_strings if name != "union"}
    assert said
    assert int(said[1]) == len(names)


def test_the_check_of_the_built_site_bites(tmp_path):
    (tmp_path / "a.html").write_text('<h1 id="top"></h1><a href="b.html#there">b</a>')
    (tmp_path / "b.html").write_text('<p id="there"></p><a href="https://example.org">out</a>')
    assert broken(tmp_path) == ([], 1, 1)
    (tmp_path / "b.html").write_text('<a href="a.html#nowhere">a</a><img src="gone.png">')
    expected = ["a.html: b.html#there", "b.html: a.html#nowhere", "b.html: gone.png"]
    assert broken(tmp_path)[0] == expected
