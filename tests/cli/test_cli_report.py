"""`report`: in processes of their own, as users start it."""

from __future__ import annotations

import json

import fresh
import pytest

from adapterzoo import AutoAdapterModel


def test_the_table_is_that_of_the_library(trained, base):
    model = AutoAdapterModel.from_pretrained(base)
    name = model.load_adapter(trained["folder"])
    report = model.adapter_report(name)
    said = fresh.command("report", base, trained["folder"])
    assert said.stdout == f"{report}\n"
    assert "encoder.layer.0" in said.stdout
    assert "head 'reviews'" in said.stdout


def test_json_and_a_picture(trained, base, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "report.svg"
    said = fresh.command("report", base, trained["folder"], "--json", "--plot", picture)
    found = json.loads(said.stdout)
    assert found["adapter"] == "reviews"
    sites = {site["path"]: site["relative"] for site in found["sites"]}
    assert len(sites) == 4
    assert all(0 < relative < 10 for relative in sites.values())
    assert f"{picture}: a heat map of 2 blocks" in said.stderr
    assert "encoder.layer.1" in picture.read_text("utf-8")


def test_a_folder_without_an_adapter_is_refused(base, tmp_path):
    said = fresh.command("report", base, tmp_path, code=1)
    assert "holds no adapter" in said.stderr
    assert said.stdout == ""


def test_a_picture_that_cannot_be_written_is_refused_before_the_work(run, trained, base, tmp_path):
    said = run("report", base, trained["folder"], "--plot", tmp_path / "none" / "a.svg", code=1)
    assert "none/a.svg" in said.stderr
    said = run("report", base, trained["folder"], "--plot", tmp_path / "a.txt", code=1)
    assert "Write one of these" in said.stderr


def test_a_head_alone_is_refused(run, trained, base, tmp_path):
    model = AutoAdapterModel.from_pretrained(base)
    model.load_adapter(trained["folder"])
    model.save_head(tmp_path / "head", "reviews")
    said = run("report", base, tmp_path / "head", code=1)
    assert "holds a head without an adapter" in said.stderr
