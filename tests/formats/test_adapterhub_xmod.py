"""Adapters of X-MOD: `adapters` deletes its language adapters, and its files give its outputs.

The truth is `tests/data/xmod.safetensors`, made by `adapters` itself (`make_xmod.py`), in float64.
The models here have language adapters besides, which must not act there.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from snapshots import refused
from transformers import XmodConfig, XmodModel

from adapterzoo import (
    Average,
    BatchSplit,
    ConfigUnion,
    Fuse,
    LoRAConfig,
    NoLanguageAdaptersConfig,
    Stack,
    init,
)
from adapterzoo.errors import AdapterZooError, CheckpointError, CompositionError, SiteError

FILE = Path(__file__).parents[1] / "data" / "xmod.safetensors"
with safe_open(FILE, "pt") as _file:
    TRUTH = {key: _file.get_tensor(key) for key in _file.keys()}  # noqa: SIM118
    BASES, FOLDERS = (json.loads(_file.metadata()[name]) for name in ("bases", "folders"))
IDS = TRUTH["input_ids"]
COMPOSITIONS = {
    "language,seq": Stack("language", "seq"),
    "seq,language": Stack("seq", "language"),
    "language,lora": Stack("language", "lora"),
    "lora,left_out": Stack("lora", "left_out"),
    "fuse": Fuse("seq", "seq_too"),
}
CASES = [key for key in TRUTH if key.count("/") == 1 and not key.endswith("/none")]


def below(start):
    return {k.removeprefix(start): t for k, t in TRUTH.items() if k.startswith(start)}


def base(name):
    """The base model, with language adapters that the author's outputs do not contain."""
    torch.manual_seed(3)
    model = XmodModel(XmodConfig(**BASES[name]), add_pooling_layer=False).double().eval()
    wrong = model.load_state_dict(below(f"{name}/base/"), strict=False)
    assert all("adapter_modules" in key for key in wrong.missing_keys)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "adapter_modules" in key:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def folder(path, name, kind="adapter"):
    """Write a folder of `adapters`."""
    path.mkdir(parents=True)
    end = "_fusion" if kind == "fusion" else ""
    config = f"adapter{end}_config.json"
    tensors = f"pytorch_{'model_' if end else ''}adapter{end}.bin"
    (path / config).write_text(json.dumps(FOLDERS[name]))
    torch.save(below(f"{name}/"), path / tensors)
    return path


def loaded(tmp_path, name, *adapters):
    model = init(base(name))
    for adapter in adapters:
        model.load_adapter(folder(tmp_path / adapter, f"{name}/{adapter}"))
    return model


def out(model, **inputs):
    with torch.no_grad():
        return model(IDS, **inputs)[0]


def worst(found, expected):
    return (found - expected).abs().max().item()


@pytest.mark.parametrize("case", CASES)
def test_the_files_of_x_mod_give_their_authors_outputs(tmp_path, case):
    name, _, setup = case.partition("/")
    setup = COMPOSITIONS.get(setup, setup)
    names = [setup] if isinstance(setup, str) else setup.flatten()
    model = loaded(tmp_path, name, *names)
    before = out(model)
    if isinstance(setup, Fuse):
        model.load_adapter_fusion(folder(tmp_path / "fusion", f"{name}/fusion", "fusion"))
    model.set_active_adapters(setup)
    expected = TRUTH[case]
    assert worst(out(model), expected) < 1e-10
    assert worst(out(model, lang_ids=torch.tensor([1, 0])), expected) < 1e-10
    # back in both formats
    again, there = init(base(name)), init(base(name))
    for adapter in names:
        model.save_adapter(tmp_path / "native" / adapter, adapter)
        again.load_adapter(tmp_path / "native" / adapter)
        model.save_adapter(tmp_path / "theirs" / adapter, adapter, format="adapterhub")
        there.load_adapter(tmp_path / "theirs" / adapter)
        assert model.adapters_config[adapter] == again.adapters_config[adapter]
    if not isinstance(setup, Fuse):
        for copy in (again, there):
            copy.set_active_adapters(setup)
        assert torch.equal(out(again), out(model))
        assert worst(out(there), expected) < 1e-10
    # without an adapter the language adapters act again
    model.set_active_adapters(None)
    assert torch.equal(out(model), before)
    assert worst(before, TRUTH[f"{name}/none"]) > 1e-3
    if isinstance(setup, Fuse):
        model.delete_adapter_fusion(setup)
    for adapter in names:
        model.delete_adapter(adapter)
    assert type(model.encoder.layer[0].output).__name__ == "XmodOutput"


@pytest.mark.parametrize("name", ["seq", "language", "lora", "mam", "left_out"])
def test_rows_with_language_adapters_and_rows_without(tmp_path, name):
    model = loaded(tmp_path, "default", name)
    model.add_adapter("plain", LoRAConfig(r=2, init_weights="bert"))
    languages = torch.tensor([1, 0])
    model.set_active_adapters(name)
    free = out(model, lang_ids=languages)
    model.set_active_adapters("plain")
    plain = out(model, lang_ids=languages)
    model.set_active_adapters(BatchSplit("plain", name, batch_sizes=[1, 1]))
    assert worst(out(model, lang_ids=languages), torch.stack([plain[0], free[1]])) < 1e-12
    model.set_active_adapters(None)
    alone = out(model, lang_ids=languages)
    mixed = out(model, lang_ids=languages, adapter_names=[name, None])
    assert worst(mixed, torch.stack([free[0], alone[1]])) < 1e-12


def test_the_config_says_what_the_base_is(tmp_path):
    model = loaded(tmp_path, "default", "lora", "seq", "left_out")
    assert "NoLanguageAdaptersConfig()" in repr(model.adapters_config["lora"])
    assert model.adapters_config["seq"].site_convention == "xmod"
    assert "NoLanguageAdaptersConfig(leave_out=(1,))" in repr(model.adapters_config["left_out"])


def test_what_needs_another_base_is_refused_by_name(tmp_path):
    model = loaded(tmp_path, "default", "lora", "seq", "seq_too")
    model.add_adapter("plain", "lora")
    before = out(model)
    message = r"without its language adapters, 'plain'.*BatchSplit.*NoLanguageAdaptersConfig"
    for setup in (Stack("lora", "plain"), Stack("plain", "seq"), Average("seq", "plain")):
        with pytest.raises(CompositionError, match=message):
            model.set_active_adapters(setup)
    with pytest.raises(CompositionError, match=r"without its language adapters.*averaged"):
        model.set_active_adapters(Average("seq", "seq_too"))
    with pytest.raises(AdapterZooError, match=r"'lora'.*NoLanguageAdapters"):
        model.merge_adapter("lora")
    message = r"computes it with \[NoLanguageAdaptersConfig.*Train it again.*native"
    with pytest.raises(CheckpointError, match=message):
        model.save_adapter(tmp_path / "out", "plain", format="adapterhub")
    model.add_adapter("bottleneck", "seq_bn")
    with pytest.raises(CheckpointError, match=r"site_convention='xmod'.*Train it again"):
        model.save_adapter(tmp_path / "out", "bottleneck", format="adapterhub")
    assert not (tmp_path / "out").exists()
    assert torch.equal(out(model), before)


def test_new_adapters_for_that_base_train_and_are_written(tmp_path):
    model = loaded(tmp_path, "default", "language")
    model.add_adapter("task", ConfigUnion(LoRAConfig(), NoLanguageAdaptersConfig()))
    model.train_adapter("task")
    model.set_active_adapters(Stack("language", "task"))
    model(IDS)[0].square().sum().backward()
    trained = [k for k, p in model.named_parameters() if p.grad is not None and p.grad.abs().sum()]
    assert trained
    assert all(".task." in key for key in trained)
    model.save_adapter(tmp_path / "task", "task", format="adapterhub")
    config = json.loads((tmp_path / "task" / "adapter_config.json").read_text())["config"]
    assert config["architecture"] == "lora"


def test_only_models_with_language_adapters_can_do_without(tiny):
    model = tiny("bert")
    with refused(model, SiteError, "NoLanguageAdaptersConfig", "X-MOD", "without it"):
        model.add_adapter("a", ConfigUnion(LoRAConfig(), NoLanguageAdaptersConfig()))
    with refused(model, SiteError, "site_convention='xmod'", "X-MOD"):
        model.add_adapter("a", "seq_bn[site_convention='xmod']")


@pytest.mark.parametrize("pre_norm", [False, True])
def test_a_bottleneck_beside_language_adapters_acts_once(pre_norm):
    # they call the block's last norm besides the block itself
    model = XmodModel(XmodConfig(**BASES["default"] | {"pre_norm": pre_norm})).eval()
    init(model)
    model.add_adapter("a", "seq_bn", set_active=True)
    count = 0

    def counted(*_):
        nonlocal count
        count += 1

    modules = [module for _, module in model.adapter_modules("a")]
    for module in modules:
        module.register_forward_hook(counted)
    model(input_ids=IDS, lang_ids=torch.zeros(len(IDS), dtype=torch.long))
    assert count == len(modules) == model.config.num_hidden_layers
