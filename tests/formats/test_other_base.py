"""An adapter that is loaded onto other base weights than its own: a warning, and only then."""

from __future__ import annotations

import contextlib
import copy
import json
import warnings

import pytest
import torch
from families import tiny_config
from transformers import AutoModelForSequenceClassification, BertModel

from adapterzoo import AutoAdapterModel, BaseModelWarning, init
from adapterzoo.folders.formats import DIGEST

another = pytest.warns(BaseModelWarning, match="trained on other weights")


@contextlib.contextmanager
def the_same():
    """A block in which such a warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", BaseModelWarning)
        yield


def base(family: str = "bert", seed: int = 0, spread: float = 0.1):
    """A model whose vectors are not zeros and ones."""
    torch.manual_seed(seed)
    model = AutoAdapterModel.from_config(tiny_config(family)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * spread)
    return model


@pytest.fixture
def folder(tmp_path):
    model = base()
    model.add_adapter("a", "lora[r=2]")
    model.save_adapter(tmp_path, "a")
    return tmp_path


def rounded(bits: int, tensor: torch.Tensor) -> torch.Tensor:
    """The values of a quantized copy: 2^bits steps between the ends of each row."""
    top = tensor.abs().amax(-1, keepdim=True)
    step = 2 * top / (2**bits - 1)
    return ((tensor + top) / step).round() * step - top


CASTS = {
    "itself": lambda m: m,
    "a copy": copy.deepcopy,
    "bfloat16": lambda m: m.bfloat16(),
    "float16": lambda m: m.half(),
    "float64": lambda m: m.double(),
    "bfloat16, as float32": lambda m: m.bfloat16().float(),
    "float16, then bfloat16": lambda m: m.half().bfloat16(),
}


@pytest.mark.parametrize("stored", CASTS)
@pytest.mark.parametrize("loaded", CASTS)
def test_a_cast_copy_of_the_base_is_the_same(stored, loaded, tmp_path):
    model = CASTS[stored](base())
    model.add_adapter("a", "lora[r=2]")
    model.save_adapter(tmp_path, "a")
    same, other = (CASTS[loaded](base(seed=seed)) for seed in (0, 1))
    with the_same():
        same.load_adapter(tmp_path, dtype=same.dtype)
    with another:
        other.load_adapter(tmp_path, dtype=other.dtype)


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_a_quantized_copy_of_the_base_is_the_same(bits, folder):
    model = base()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(rounded(bits, parameter))
    with the_same():
        model.load_adapter(folder)


def test_a_base_that_was_trained_further_is_another(folder):
    # what is trained further moves its vectors more than a cast does
    model = base()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 1e-3)
    with another as found:
        model.load_adapter(folder)
    (only,) = found
    assert "'a'" in str(only.message)


def test_fresh_bases_of_two_seeds_differ_though_their_vectors_are_equal(tmp_path):
    first, second = (base(seed=seed, spread=0.0) for seed in (0, 1))
    first.add_adapter("a", "lora[r=2]")
    first.save_adapter(tmp_path, "a")
    with another:
        second.load_adapter(tmp_path)


def test_another_class_and_a_longer_table_of_the_same_base_are_the_same(folder, tmp_path):
    model = base()
    model.base_model.save_pretrained(tmp_path / "base")
    task = init(AutoModelForSequenceClassification.from_pretrained(tmp_path / "base"))
    with the_same():
        task.load_adapter(folder)
        init(BertModel.from_pretrained(tmp_path / "base")).load_adapter(folder)
        model.resize_token_embeddings(model.config.vocab_size + 7)
        model.load_adapter(folder)


def test_what_adapters_do_to_the_base_is_not_of_the_base(tmp_path):
    model = base()
    for name, method in (("a", "lora[r=2,bias='all']"), ("b", "ln_tuning"), ("c", "boft")):
        model.add_adapter(name, method)
        model.train_adapter(name)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.3)
        model.save_adapter(tmp_path / name, name)
    model.set_active_adapters(None)
    model.merge_adapter("a")
    model.save_adapter(tmp_path / "merged", "a")
    for file in ("adapter.safetensors", "adapter_config.json"):
        before, after = ((tmp_path / name / file).read_bytes() for name in ("a", "merged"))
        assert before == after
    with the_same():
        model.load_adapter(tmp_path / "a", load_as="again")
        base().load_adapter(tmp_path / "merged")


def test_weights_that_are_not_there_are_not_compared(folder, tmp_path):
    with torch.device("meta"):
        model = init(BertModel(tiny_config("bert")))
    model.add_adapter("b", "lora[r=2]")
    first = json.loads((folder / "adapter_config.json").read_text())
    assert len(first["base"]) == 16
    with the_same():
        model.load_adapter(folder)


def test_only_the_native_format_has_the_sample(folder, tmp_path):
    model = base()
    model.load_adapter(folder)
    for form in ("peft", "adapterhub"):
        model.save_adapter(tmp_path / form, "a", format=form)
        assert "base" not in json.loads((tmp_path / form / "adapter_config.json").read_text())
    model.save_adapter(tmp_path / "again", "a")
    for file in folder.glob("adapter[._]*"):
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes()


def test_files_without_it_load(folder, tmp_path, monkeypatch):
    from adapterzoo.formats import fit

    monkeypatch.setattr(fit, "base_sample", lambda tensors: {})
    monkeypatch.setattr("adapterzoo.model.base._digest", lambda model, weights: None)
    model = base()
    model.add_adapter("a", "lora[r=2]")
    model.save_adapter(tmp_path / "old", "a")
    assert (
        not {"base", DIGEST} & json.loads((tmp_path / "old/adapter_config.json").read_text()).keys()
    )
    monkeypatch.undo()
    with the_same():
        base(seed=1).load_adapter(tmp_path / "old")
