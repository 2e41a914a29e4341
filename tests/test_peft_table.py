"""Every config class of PEFT in every family: the cells of `docs/peft-files.md`."""

from __future__ import annotations

import re

import peft_cells as cells
import peft_table as tables
import pytest
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft_cells import CANNOT, OK, REFUSED, WRONG
from peft_methods import CASES, FAMILIES
from peft_world import QUIET, TENSORS
from safetensors.torch import load_file, save_file
from swept import all_but

pytestmark = [pytest.mark.filterwarnings(warning) for warning in QUIET]

PAGE = tables.PAGE.read_text(encoding="utf-8")
HERE, ALONE = tables.read(PAGE)
BY_NAME = {case.name: case for case in CASES}
# in the quick part, one of each kind; all of them take minutes
QUICK = ("LORA", "P_TUNING", "HRA", "LILY")
# of a method that is here: what its files cannot have, and why
REFUSED_HERE = {
    "base weights that are unknown": (
        'init_lora_weights="pissa_niter_4"',
        'init_lora_weights="corda"',
        'init_lora_weights="lora_ga"',
        "kasa_config",
    ),
    "another function": (
        "layer_replication",
        "monteclora_config",
        "use_bdlora",
    ),
    # of vit: an adapter at the head
    "other layers": ('target_modules="all-linear"',),
}


def test_every_type_of_peft_has_a_row():
    assert {case.kind for case in CASES} == {kind.value for kind in PEFT_TYPE_TO_CONFIG_MAPPING}
    assert len(BY_NAME) == len(CASES)


def test_the_page_has_every_row_and_its_own_counts():
    known = [case.name for case in CASES if cells.is_known(case.kind)]
    assert list(HERE) == known
    assert list(ALONE) == [case.name for case in CASES if case.name not in known]
    assert "\n".join(tables.counts(HERE, ALONE)) in PAGE, "write `make peft-files`"
    assert {BY_NAME[name].kind for name in ALONE} >= tables.NEVER


def test_nothing_on_the_page_is_wrong_and_only_few_things_are_refused():
    every = [mark for row in (*HERE.values(), *ALONE.values()) for mark in row]
    assert not [mark for mark in every if WRONG in mark]
    assert {mark for row in ALONE.values() for mark in row} <= {OK, REFUSED, CANNOT}
    refused = {name for name, row in HERE.items() if any(mark[0] == REFUSED for mark in row)}
    assert refused <= {f"LORA {name}" for names in REFUSED_HERE.values() for name in names}
    # what loads also goes back
    for name, row in HERE.items():
        assert not [mark for mark in row if mark[0] == OK and REFUSED in mark], name


@pytest.mark.parametrize("name", all_but(QUICK, BY_NAME))
def test_the_cells_of_a_row_are_those_of_the_page(name):
    case = BY_NAME[name]
    row = cells.run(case)
    shown = HERE if cells.is_known(case.kind) else ALONE
    why = {f: [c.reason for c in found if c] for f, found in row.items()}
    assert tables.marks(row) == shown[name], f"{why}: make peft-files, if this is right"
    for family, (first, _, third) in row.items():
        if third is not None:
            # the message names the type, and what to write instead
            assert f"peft_type={case.kind!r}" in first.reason, family
            hint = "adapterzoo convert SRC DST --to lora" in first.reason
            assert hint is ("cannot become LoRA" not in first.reason), family
            # biases are more than it can say
            more = re.search(r"changes '[\w.]*bias'", third.reason)
            if hint:
                assert third.mark == OK or more is not None, family
            else:
                assert third.mark != OK, family


def test_another_file_is_seen(tmp_path):
    case = BY_NAME["LORA"]
    expected = cells.authored(case, "llama", tmp_path)
    assert cells.loaded(case, "llama", tmp_path, expected).mark == OK
    tensors = load_file(tmp_path / TENSORS)
    key = sorted(tensors)[0]
    tensors[key] = tensors[key] * (1 + 1e-6)
    save_file(tensors, tmp_path / TENSORS)
    assert cells.loaded(case, "llama", tmp_path, expected).mark == WRONG
    del tensors[key]
    save_file(tensors, tmp_path / TENSORS)
    assert cells.loaded(case, "llama", tmp_path, expected).mark == REFUSED


def test_an_adapter_that_does_nothing_is_seen(monkeypatch):
    monkeypatch.setattr(cells, "_fill", lambda *_arguments: 1)
    first, second, _ = cells.cells(BY_NAME["LORA"], "llama")
    assert (first.mark, first.reason) == (CANNOT, cells.NOTHING)
    assert (second.mark, second.reason) == (WRONG, f"ValueError: {cells.NOTHING}")


def test_a_lora_that_differs_from_the_file_is_seen(tmp_path, monkeypatch):
    case = BY_NAME["HRA"]
    expected = cells.authored(case, "llama", tmp_path / "theirs")
    folder = tmp_path / "theirs"
    assert cells.converted(case, "llama", folder, expected).mark == OK
    assert cells.converted(case, "llama", folder, expected * 1.01).mark == WRONG


def test_every_family_is_in_every_row():
    assert {len(row) for row in (*HERE.values(), *ALONE.values())} == {len(FAMILIES)}
