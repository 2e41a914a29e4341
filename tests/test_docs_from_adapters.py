"""docs/from-adapters.md, row by row: what it says happens here happens."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny_config
from safetensors.torch import load_file, save_file
from transformers import BertForMaskedLM, BertForSequenceClassification, TrainingArguments

import adapterzoo
from adapterzoo import (
    AdapterTrainer,
    Average,
    DoRAConfig,
    LoRAConfig,
    SeqBnConfig,
    Stack,
    errors,
    init,
)

PAGE = (Path(__file__).parents[1] / "docs" / "from-adapters.md").read_text("utf-8")
Check = Callable[[Any, Path], None]
CHECKS: dict[str, Check] = {}


def row(start: str) -> Callable[[Check], Check]:
    """The check of the row that begins so."""

    def enter(check: Check) -> Check:
        assert start not in CHECKS
        CHECKS[start] = check
        return check

    return enter


def rows(*headings: str) -> Iterator[str]:
    """First cells of the tables under these headings."""
    for heading in headings:
        section = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)
        assert section, heading
        lines = [line for line in section[1].splitlines() if line.startswith("| ")]
        yield from (line.split(" | ")[0].removeprefix("| ") for line in lines[2:])


ROWS = [*rows("What you have to change", "Where `adapters` logs and continues")]


def test_what_to_change_fits_on_a_screen():
    assert len([*rows("What you have to change")]) <= 14


def test_each_row_has_a_check():
    unchecked = [cell for cell in ROWS if not [key for key in CHECKS if cell.startswith(key)]]
    # what transformers 5 has removed is its own matter; two are shown by whole pages
    assert unchecked == [
        "arguments of transformers 4, such as `overwrite_output_dir`",
        "an `AdapterLayerBase` of your own",
    ]
    assert not [key for key in CHECKS if not [c for c in ROWS if c.startswith(key)]]


@pytest.mark.parametrize("start", CHECKS)
def test_a_row_is_true(start, tiny, tmp_path):
    CHECKS[start](tiny("bert"), tmp_path)


def other() -> Any:
    """A model of the same architecture."""
    return adapterzoo.AutoAdapterModel.from_config(tiny_config("bert"))


def with_head(model: Any, folder: Path, **options: Any) -> Path:
    """The folder of a saved adapter with a head of three labels."""
    model.add_adapter("a")
    model.add_classification_head("a", num_labels=3)
    model.save_adapter(folder, "a", **options)
    return folder


@row("unknown config fields")
def mistakes_raise(model, folder):
    with pytest.raises(ValueError, match="there is no field 'reduction'"):
        SeqBnConfig(reduction=2)
    with pytest.raises(KeyError, match="there is no adapter 'a'"):
        model.set_active_adapters("a")


@row("another head trained")
def other_heads_are_frozen(model, folder):
    for name in ("a", "b"):
        model.add_classification_head(name)
    model.add_adapter("a")
    model.train_adapter("a")
    assert not [p for p in model.heads["b"].parameters() if p.requires_grad]
    model.heads["b"].requires_grad_(True)
    model.active_head = ["a", "b"]
    model(torch.tensor([[1, 2]]))[1].logits.sum().backward()
    assert [p for p in model.heads["b"].parameters() if p.grad is not None]


@row("`AdapterTrainer`, base model not frozen")
def a_trainer_needs_a_frozen_base(model, folder):
    model.add_adapter("a", set_active=True)
    model.add_classification_head("a")
    arguments = TrainingArguments(folder, report_to="none", use_cpu=True)
    data = [{"input_ids": [1, 2], "labels": 0}]
    with pytest.raises(ValueError, match=r"the base model is not frozen.*train_adapter\('a'\)"):
        AdapterTrainer(model, arguments, train_dataset=data).train()
    model.train_adapter("a")
    AdapterTrainer(model, arguments, train_dataset=data).train()


@row("programs that read the saved files")
def files_have_their_names(model, folder):
    with_head(model, folder / "ours")
    assert (folder / "ours" / "adapter.safetensors").exists()
    for safe, name in ((True, "model_head.safetensors"), (False, "pytorch_adapter.bin")):
        model.save_adapter(folder / name, "a", use_safetensors=safe)
        assert (folder / name / name).exists()


@row("the head of another task class")
@row("a head of another task class")
def another_task_class(model, folder):
    sequences = init(BertForSequenceClassification(tiny_config("bert")))
    sequences.add_adapter("a")
    words = init(BertForMaskedLM(tiny_config("bert")))
    for options in ({}, {"use_safetensors": True}):
        sequences.save_adapter(folder / "a", "a", **options)
        with pytest.raises(ValueError, match="nothing has been loaded"):
            words.load_adapter(folder / "a")
        assert "a" not in words.adapters_config
        words.load_adapter(folder / "a", with_head=False)
        words.delete_adapter("a")


@row("an adapter with a named head, loaded")
def named_head_into_a_task_class(model, folder):
    with_head(model, folder)
    words = init(BertForMaskedLM(tiny_config("bert")))
    with pytest.warns(UserWarning, match="head"):
        words.load_adapter(folder)
    assert "a" in words.adapters_config


@row("names such as")
def names_are_folders(model, folder):
    for name in ("a.b", "a/b"):
        with pytest.raises(ValueError, match="Write 'a_b'"):
            model.add_adapter(name)


@row("`add_invertible_adapter")
def invertible(model, folder):
    model.add_adapter("a", "seq_bn_inv")
    model.set_active_adapters("a")
    assert model.get_invertible_adapter() is not None


@row("DoRA, (IA)³, VeRA, prefixes")
def conventions(model, folder):
    for config in ("dora", "ia3", "vera[r=8]", "dvora[r=8]", "prefix_tuning"):
        made = adapterzoo.AdapterConfig.load(config)
        assert made.convention != "adapterhub"
        theirs = made.replace(convention="adapterhub")
        model.add_adapter("a", theirs, overwrite_ok=True)
        model.save_adapter(folder, "a", use_safetensors=True)
        assert other().load_adapter(folder) == "a"
        loaded = other()
        loaded.load_adapter(folder)
        assert loaded.adapters_config.get("a").convention == "adapterhub"
    assert DoRAConfig(convention="adapterhub") != DoRAConfig()


@row("a `PredictionHead` of your own")
def own_heads(model, folder):
    class Mine(adapterzoo.PredictionHead):
        pass

    with pytest.raises(ValueError, match=r"adapterzoo\.heads\.HeadConfig"):
        model.register_custom_head("mine", Mine)


@row("`isinstance(module, LoRALayer)`")
def layers_with_adapters(model, folder):
    for config, kind in (("lora", "loras"), ("dora", "loras"), ("seq_bn", "adapters")):
        model.add_adapter("a", config, overwrite_ok=True)
        found = [getattr(m, kind)["a"] for m in model.modules() if hasattr(m, kind)]
        assert found == [module for _, module in model.adapter_modules("a")]
        for lora in found if kind == "loras" else ():
            torch.nn.init.normal_(lora.lora_B)
            torch.testing.assert_close(lora.delta_w, lora.lora_B @ lora.lora_A)


@row("`get_layer`")
def blocks(model, folder):
    assert not hasattr(model, "get_layer")
    assert len(model.anatomy.blocks) == model.config.num_hidden_layers


@row("a field that a config does not have")
def unknown_fields(model, folder):
    mistakes_raise(model, folder)
    path = with_head(model, folder, use_safetensors=True) / "adapter_config.json"
    text = path.read_text("utf-8")
    wrong = text.replace('"config": {', '"config": {"no_such_field": 1,')
    assert wrong != text
    path.write_text(wrong, "utf-8")
    with pytest.raises(ValueError, match="there is no field 'no_such_field'"):
        other().load_adapter(folder)


@row("a field without an effect")
def idle_fields(model, folder):
    with pytest.warns(UserWarning, match="has an effect only with phm_layer=True"):
        SeqBnConfig(phm_dim=2)


@row("missing or unexpected tensors")
def tensors(model, folder):
    path = with_head(model, folder, use_safetensors=True) / "adapter.safetensors"
    kept = load_file(path)
    missing = dict(list(kept.items())[1:])
    for wrong, said in ((missing, "model only"), ({**kept, "x": torch.ones(1)}, "file only")):
        save_file(wrong, path)
        loaded = other()
        with pytest.raises(errors.CheckpointError, match=said):
            loaded.load_adapter(folder)
        assert not loaded.adapters_config
    save_file(kept, path)
    info: dict[str, Any] = {}
    other().load_adapter(folder, loading_info=info)
    assert info == {"missing_keys": [], "unexpected_keys": []}


@row("labels that do not fit")
def labels(model, folder):
    with_head(model, folder)
    for wrong in ({"num_labels": 7}, {"id2label": dict(enumerate("wxyz"))}):
        with pytest.raises(ValueError, match="with 3 labels"):
            other().load_adapter(folder, **wrong)


@row("an adapter, fusion or head to delete")
def unknown_names(model, folder):
    for call in (
        model.delete_adapter, model.delete_adapter_fusion, model.delete_head,
        model.set_active_adapters, lambda name: model.save_adapter(folder, name),
        lambda name: model.save_head(folder, name),
        lambda name: setattr(model, "active_head", name),
    ):  # fmt: skip
        with pytest.raises(KeyError, match=r"there is no .* 'no'"):
            call("no")


@row("`get_adapter` of a name")
def unknown_adapter(model, folder):
    with pytest.warns(UserWarning, match="there is no adapter 'no'"):
        assert model.get_adapter("no") == {}


@row("a loaded adapter, fusion or head")
def taken_names(model, folder):
    with_head(model, folder)
    with pytest.warns(UserWarning, match="have been replaced"):
        model.load_adapter(folder)
    with pytest.raises(ValueError, match="is taken"):
        model.load_adapter(folder, overwrite_ok=False)


@row("`load_adapter(config=…)`")
def another_config(model, folder):
    with_head(model, folder)
    loaded = other()
    with pytest.warns(UserWarning, match=r"reduction_factor=16 and not 2"):
        loaded.load_adapter(folder, config="seq_bn[reduction_factor=2]")
    assert loaded.adapters_config.get("a").reduction_factor == 16


@row("`load_adapter(model_name=…)`")
def another_base(model, folder):
    model.config.name_or_path = "mine"
    with_head(model, folder)
    with pytest.warns(UserWarning, match="saved from 'mine'"):
        other().load_adapter(folder, model_name="theirs")


@row("an index or repository")
def no_hub(model, folder):
    with pytest.raises(OSError, match="Cannot find an appropriate cached snapshot"):
        model.load_adapter("user/no-such-repository", local_files_only=True)


@row("`task_ids` while no")
def no_tasks(model, folder):
    tokens = torch.tensor([[1, 2, 3]])
    expected = model(tokens).last_hidden_state
    with pytest.warns(UserWarning, match="task_ids=… has no effect"):
        assert torch.equal(model(tokens, task_ids=[1]).last_hidden_state, expected)


@row("adapters but none active")
def none_active(model, folder):
    tokens = torch.tensor([[1, 2, 3]])
    expected = model(tokens).last_hidden_state
    model.add_adapter("a")
    model.set_active_adapters(None)
    assert torch.equal(model(tokens).last_hidden_state, expected)


class TestResults:
    """Rows of the third table that no test of the methods, formats and golden files shows."""

    def test_a_stack_adds_and_weights_of_an_average_sum_to_1(self, tiny):
        model, states = tiny("bert"), torch.randn(1, 3, 32)
        layer = model.base_model.encoder.layer[0].attention.self.query
        for name in ("a", "b"):
            model.add_adapter(name, LoRAConfig(r=2, init_weights="bert"))

        def change(setup: object) -> torch.Tensor:
            model.set_active_adapters(None)
            plain = layer(states)
            model.set_active_adapters(setup)
            return layer(states) - plain

        a, b = change("a"), change("b")
        assert a.abs().max() > 1e-4
        torch.testing.assert_close(change(Stack("a", "b")), a + b)
        torch.testing.assert_close(change(Average("a", "b", weights=[0.3, 0.7])), 0.3 * a + 0.7 * b)

    def test_a_merge_is_undone_bit_for_bit(self, tiny):
        model = tiny("bert")
        model.add_adapter("a", LoRAConfig(r=2, init_weights="bert", use_dora=True))
        layer = model.base_model.encoder.layer[0].attention.self.query
        before = layer.weight.detach().clone()
        model.merge_adapter("a")
        assert not torch.equal(layer.weight, before)
        model.reset_adapter()
        assert torch.equal(layer.weight, before)

    def test_a_saved_head_is_one_head(self, tiny, tmp_path):
        model = tiny("bert")
        for name in ("task", "task2"):
            model.add_tagging_head(name)
        model.save_head(tmp_path, "task", use_safetensors=True)
        keys = load_file(tmp_path / "model_head.safetensors")
        assert keys
        assert not [key for key in keys if "task2" in key]
