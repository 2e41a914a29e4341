"""Adapters at every kind of site of every model type: columns of docs/architecture-table.md."""

from __future__ import annotations

import collections
import json
import subprocess
from pathlib import Path

import pytest
import torch
import transformers
from architectures import finder, survey
from architectures import table as tables
from architectures.tiny_models import NoTinyModelError, tiny_model
from swept import all_but

from adapterzoo import ConfigUnion, init
from adapterzoo.config import architectures as registered
from adapterzoo.errors import SiteError
from adapterzoo.model import training
from adapterzoo.model.state import is_base
from adapterzoo.testing import TinyModel, report_on

PAGE = (Path(__file__).parents[1] / "docs" / "architecture-table.md").read_text(encoding="utf-8")
COMMITTED = tables.read(PAGE)
COLUMNS = tables.columns()[:-1]
RAN = [name for name, row in COMMITTED.items() if any(row[c] for c in COLUMNS)]
same_version = pytest.mark.skipif(
    PAGE.splitlines()[0].rpartition(" ")[2] != transformers.__version__,
    reason="docs/architecture-table.md was made with another transformers",
)


# in the quick part, one of each kind: encoder, decoder, both, experts, images, sound
QUICK = ("bert", "gpt2", "t5", "mixtral", "swiftformer", "wav2vec2-conformer")


def each_of(names):
    return pytest.mark.parametrize("model_type", all_but(QUICK, names))


@pytest.mark.long
@same_version
@each_of(RAN)
def test_methods_do_on_the_model_what_the_page_says(model_type):
    ((_, found),) = tables.of_types([model_type])
    assert found == COMMITTED[model_type], (
        f"docs/architecture-table.md is stale: make architectures ARGS='--types {model_type}'"
    )


@same_version
@pytest.mark.sweep
@pytest.mark.parametrize("model_type", tables.WHOLE)
def test_all_methods_at_linear_layers_do_there_what_one_does(model_type):
    tiny, tried = tiny_model(model_type), tables.methods()
    # that one and another are run by the test above
    rest = set(tables.linear()) - {tables.LINEAR, tables.another(model_type)}
    found = {name: tables.cell(tiny, tried[name])[0] for name in sorted(rest)}
    assert found == dict.fromkeys(sorted(rest), COMMITTED[model_type][tables.LINEAR])


def test_every_method_at_linear_layers_is_run_on_many_types():
    named = collections.Counter(filter(None, map(tables.named, COMMITTED.values())))
    rest = set(tables.linear()) - {tables.LINEAR}
    assert set(named) == rest
    assert min(named.values()) >= len(RAN) / len(rest) / 2


def test_a_further_method_changes_the_choice_only_where_it_is_chosen(monkeypatch):
    before = {name: tables.another(name) for name in RAN}
    more = [*tables.linear(), "new"]
    monkeypatch.setattr(tables, "linear", lambda: more)
    after = {name: tables.another(name) for name in RAN}
    changed = {after[name] for name in RAN if after[name] != before[name]}
    assert changed == {"new"}


def test_the_page_has_the_promised_number_of_green_rows():
    green = [n for n in RAN if all(COMMITTED[n][c].startswith(tables.GREEN) for c in COLUMNS)]
    # prompts are only for the models that read tokens
    assert len(green) >= 280
    assert all(row["why not"] for n, row in COMMITTED.items() if n not in green)
    totals = tables.more(COMMITTED).totals
    assert [f"- {total}" for total in totals] == [
        x
        for x in PAGE.splitlines()
        if x.startswith(("- model types whose", "- of these with all c", "- types on which"))
    ]


def test_the_short_page_says_what_the_table_says():
    page = (Path(__file__).parents[1] / "docs" / "architectures.md").read_text(encoding="utf-8")
    shown = {c[1].rpartition("`")[0].rpartition("`")[2]: c for c in map(_cells, page.splitlines())}
    names = {"lora": "LoRA", "prefix_tuning": "prefixes", "prompt_tuning": "prompts"}
    for model_type, row in COMMITTED.items():
        found = shown[model_type][2]
        for column, name in names.items():
            said = (name in found) != found.startswith("all but") or found == "all"
            assert said == row[column].startswith(tables.GREEN), (model_type, column)
    for model_type in ("bert", "bamba", "llama"):
        layers = finder.targets(init(tiny_model(model_type).model).anatomy)
        assert shown[model_type][4] == " ".join(f"`{name}`" for name in layers)


def _cells(line):
    return [cell.strip() for cell in line.split("|")] if line.startswith("| ") else ["", ""]


def test_every_registered_method_has_a_column():
    shown = {*COLUMNS, *tables.linear()} - {tables.ANOTHER}
    # rows of a table, which each model has, are tested with what else is beside an adapter
    apart = {"union", "no_language_adapters", "trainable_tokens"}
    assert shown == set(registered) - apart | {"invertible"}
    assert isinstance(tables.methods()["bottleneck"][0], ConfigUnion)


def test_a_rendered_row_is_read_back():
    found = {"bert": tables.unrun("some reason"), "vit": dict.fromkeys(tables.columns(), "x")}
    lines = [survey.Line("bert", remark="a remark"), survey.Line("vit", blocks=2)]
    assert tables.read(survey.render(lines, "5", tables.more(found))) == found


@pytest.fixture(scope="module")
def bert():
    return tiny_model("bert")


def test_equal_calls_give_equal_models(bert):
    again = tiny_model("bert")
    ours, theirs = bert.model.state_dict(), again.model.state_dict()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert sum(t.numel() for t in ours.values()) < 500_000
    assert all(torch.equal(bert.inputs[key], again.inputs[key]) for key in bert.inputs)


def test_a_report_leaves_the_model_alone(bert):
    before = {k: v.clone() for k, v in bert.model.state_dict().items()}
    kind = type(bert.model)
    plain = TinyModel(bert.model, dict(bert.inputs))
    assert report_on(plain, "lora") == []
    assert type(bert.model) is kind
    after = bert.model.state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_a_place_that_the_model_lacks_is_an_error(bert):
    with pytest.raises(SiteError, match=r"no layer matches .*nowhere"):
        report_on(bert, "lora[target_modules=['nowhere']]")


def test_a_model_type_that_cannot_be_made_says_why():
    with pytest.raises(NoTinyModelError, match="needs a package"):
        tiny_model("timm_wrapper")


def failed(tiny: TinyModel, config: str) -> set[str]:
    return {failure.check for failure in report_on(tiny, config)}


def test_norms_that_are_changed_by_training_are_seen(monkeypatch):
    tiny = tiny_model("wav2vec2-conformer")
    assert failed(tiny, "lora") == set()
    monkeypatch.setattr(training, "hold_statistics", lambda model: None)
    assert failed(tiny, "lora") == {"inactive_is_base"}


def test_base_weights_that_are_taken_for_a_head_are_seen(monkeypatch):
    tiny = tiny_model("dinov3_vit")
    assert failed(tiny, "lora") == set()
    monkeypatch.setattr("adapterzoo.model.state.is_base", lambda model: False)
    assert is_base(tiny.model) is True
    assert "gradients" in failed(tiny, "lora")


def test_experts_in_another_memory_layout_are_seen(monkeypatch):
    tiny = tiny_model("aria_text")
    config = "lora[selfattn_lora=False,intermediate_lora=True,output_lora=True]"
    assert failed(tiny, config) == set()
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda self: self)
    assert failed(tiny, config) == {"identity_at_birth"}


def test_a_model_type_that_ends_its_process_costs_its_own_row(monkeypatch):
    def dies_at_b(command, **kwargs):
        types = command[command.index("--types") + 1 :]
        done = types[: types.index("b")] if "b" in types else types
        out = "".join(json.dumps([name, tables.unrun("ran")]) + "\n" for name in done)
        return subprocess.CompletedProcess(command, -11, stdout=out)

    monkeypatch.setattr(subprocess, "run", dies_at_b)
    found = tables.sweep(["a", "b", "c"], workers=1)
    reasons = {name: row["why not"] for name, row in found.items()}
    assert reasons == {"a": "ran", "b": "ends its process", "c": "ran"}


def test_a_model_type_that_takes_long_costs_its_own_row(monkeypatch):
    def endless(model_type):
        try:
            while model_type == "a":
                pass
        except Exception:  # noqa: BLE001  as checks do
            return tables.unrun("caught")
        return tables.unrun("ran")

    monkeypatch.setattr(tables, "cells", endless)
    monkeypatch.setattr(tables, "SECONDS", 0.05)
    reasons = {name: row["why not"] for name, row in tables.of_types(["a", "b"])}
    assert reasons == {"a": "takes more than 0.05 s", "b": "ran"}
