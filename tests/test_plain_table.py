"""The tables of `docs/plain-modules.md`: a part of the cells, run again; `make plain` runs all."""

from __future__ import annotations

import plain_table as table
import pytest
import torch

from adapterzoo.methods.low_rank.lora import LoRA

PAGE = table.read(table.PAGE.read_text(encoding="utf-8"))
# two processes take longer than all the other ways
ALONE = [way for way in table.WAYS if way != "DDP"]
pytestmark = pytest.mark.filterwarnings("ignore")


def skip_unless_installed(base):
    if not table.installed(base):
        pytest.skip(f"the module is one of {table.BASES[base].needs}, which is not installed")


def test_the_page_has_all_cells_and_none_is_wrong():
    assert {*PAGE} == {*table.rows()}
    for text in PAGE.values():
        said = [part.partition(": ")[0] for part in text.split("; ")]
        assert said[0] in (table.RIGHT, table.REFUSED)
        assert {*said[1:]} <= {table.REFUSED, table.NONE}
        assert said[0] == table.RIGHT or len(said) == 1
    # the counts and the order of the page are those of its cells
    assert table.render(PAGE) == table.PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("base", table.BASES)
def test_a_part_of_the_cells(base):
    """At each module two methods that act, others at the next one, and one that is refused."""
    skip_unless_installed(base)
    at = [*table.BASES].index(base)
    texts = [text for of, text in PAGE if of == base and "[" not in text]
    right = [text for text in texts if PAGE[base, text] != table.REFUSED]
    refused = [text for text in texts if text not in right]
    asked = {right[at % len(right)], right[(at + 3) % len(right)], refused[at % len(refused)]}
    for text in asked:
        assert table.cell(base, text, ALONE) == table.only(PAGE[base, text], ALONE), text


@pytest.mark.parametrize("base", table.WITH_OPTIONS)
def test_a_part_of_the_options(base):
    texts = [text for of, text in PAGE if of == base and "[" in text]
    for text in texts[[*table.BASES].index(base) :: 12]:
        assert table.cell(base, text, ALONE) == table.only(PAGE[base, text], ALONE), text


@pytest.mark.sweep(whole=True)
@pytest.mark.parametrize("base", table.BASES)
def test_every_cell(base):
    skip_unless_installed(base)
    for text in (text for of, text in PAGE if of == base):
        why = {}
        assert table.cell(base, text, why=why) == PAGE[base, text], why


# --- the checks can fail ---


def test_a_wrong_cell_would_be_seen(monkeypatch):
    """A merged weight that is too large, and an adapter that does nothing."""
    merged = LoRA.merged_weight
    monkeypatch.setattr(LoRA, "merged_weight", lambda *given: merged(*given) + 1e-5)
    assert table.cell("MLP", "lora", ["save", "merge"]) == "right; wrong: merge"
    monkeypatch.setattr(LoRA, "forward", lambda _self, x, base: base(x))
    assert table.cell("MLP", "lora", ["save"]) == table.WRONG


def test_a_wrong_gradient_would_be_seen(monkeypatch):
    def twice(self, x, base):
        update = x @ self.lora_A.mT @ self.lora_B.mT * self.scaling
        return base(x) + 2 * update - update.detach()

    monkeypatch.setattr(LoRA, "forward", twice)
    assert table.cell("MLP", "lora", ["train", "rows"]) == "right; wrong: train"


def test_a_base_that_training_changes_would_be_seen():
    case = table.Case("MLP", "lora")
    case.plain.head.bias = torch.nn.Parameter(case.plain.head.bias + 1)
    why = {}
    assert table.judged(lambda: table.WAYS["train"](case), why, "train") == table.WRONG
    assert "the base has changed" in why["train",]
