"""The tables of `docs/serving.md`: a part of the cells, run again; `make serving` runs all."""

from __future__ import annotations

import dataclasses

import pytest
import serving_table as table
from peft_world import QUIET

from adapterzoo.serving import servers as facts
from adapterzoo.serving.export import readers

pytestmark = [pytest.mark.filterwarnings(warning) for warning in QUIET]
PAGE = table.read(table.PAGE.read_text(encoding="utf-8"))
# one of each outcome, and options that a server reads otherwise
QUICK = {
    "lora[r=4]",
    "lora[r=16,use_rslora=True]",
    "lora[r=8,alpha_pattern={'q_proj':32}]",
    "lora[leave_out=[0]]",
    "lora[attn_matrices=['v']]",
    "lora[target_modules=['embed_tokens','q_proj','k_proj','v_proj']]",
    "dora[dropout=0.1]",
    "seq_bn",
}


def test_the_page_has_all_cells_and_none_is_wrong():
    assert {*PAGE} == {(*row, server) for row in table.rows() for server in table.ALL}
    assert {*PAGE.values()} == {table.EXACT, table.SVD, table.REFUSED}
    # the counts of the page are those of its cells
    assert table.render(PAGE) == table.PAGE.read_text(encoding="utf-8")


def check(row, server):
    assert table.cell(*row, server) == PAGE[(*row, server)], (row, server)


@pytest.mark.parametrize("text", sorted(QUICK))
def test_a_part_of_the_adapters(text):
    for server in table.ALL:
        check(("llama", text), server)


@pytest.mark.parametrize("family", table.FAMILIES[1:])
def test_a_part_of_the_models(family):
    servers = [s for s in table.SERVERS if PAGE[family, table.PARTS["attention"], s] == table.EXACT]
    check((family, table.PARTS["MLP or experts"]), servers[0])


@pytest.mark.sweep(whole=True)
@pytest.mark.parametrize("row", table.rows(), ids=str)
def test_every_cell(row):
    for server in table.ALL:
        check(row, server)


def test_the_readers_of_an_adapter_are_those_of_the_page():
    wrong = {}
    for family, text in table.rows():
        model = table.ours(family)
        model.add_adapter("a", table.TEXTS.get(text, text))
        table.stir(model, "a")
        cells = {server: PAGE[family, text, server] for server in table.SERVERS}
        expected = {server: cell for server, cell in cells.items() if cell != table.REFUSED}
        if (found := readers(model, "a")) != expected:
            wrong[family, text] = found
    assert not wrong


# --- the checks can fail ---


def changed(monkeypatch, server, **fields):
    """The writer's table says something else of a server."""
    monkeypatch.setitem(
        facts.servers._own, server, dataclasses.replace(facts.servers.find(server), **fields)
    )


def test_a_wrong_fact_of_the_writer_would_be_seen(monkeypatch):
    llama = facts.servers.find("vllm").layers["llama"]
    changed(monkeypatch, "tgi", layers={"llama": llama})
    text = "lora[target_modules=['lm_head','q_proj']]"
    said = table.cell("llama", text, "tgi")
    assert said.startswith(table.WRONG)
    assert "lm_head.weight" in said
    changed(monkeypatch, "vllm", layers={"gpt2": facts.servers.find("lorax").layers["gpt2"]})
    assert "refuses it" in table.cell("gpt2", "lora[r=4]", "vllm")


def test_a_wrong_scale_of_the_writer_would_be_seen(monkeypatch):
    scale = facts._scale
    monkeypatch.setattr(facts, "_scale", lambda *given: scale(*given) * 1.01)
    said = table.cell("llama", "lora[r=4]", "vllm")
    assert said.startswith(table.WRONG)
    assert "its change differs by 0.01 of the norm" in said
