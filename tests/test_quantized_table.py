"""The rows of `docs/quantized.md`: every quantization that transformers knows, real or stand-in."""

from __future__ import annotations

import dataclasses

import pytest
import quantized_bases as bases
import quantized_table as tables
import torch
from swept import all_but
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

PAGE = tables.PAGE.read_text(encoding="utf-8")
COMMITTED = tables.read(PAGE)
# packed by torchao, without a parameter, with buffers only, for inference, experts
QUICK = ("torchao int8", "hqq 4 bits", "gptq", "fbgemm_fp8", "mxfp4")


@pytest.fixture
def eager():
    """Layers of bitnet ask for a compiler."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("name", all_but(QUICK, bases.SCHEMES))
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_row_is_that_of_the_page(name):
    if package := tables.missing(name):
        pytest.skip(f"{package} is not installed")
    ((_, found),) = tables.run([name])
    # the layers of another version may do more
    assert found[1:] == COMMITTED[name][1:], "docs/quantized.md: write `make quantized`"


def test_every_key_of_transformers_has_a_row():
    keys = {scheme.key for scheme in bases.SCHEMES.values()}
    assert keys >= set(AUTO_QUANTIZER_MAPPING)
    assert list(COMMITTED) == list(bases.SCHEMES)


def test_the_page_is_what_is_rendered_of_its_rows():
    assert tables.render(PAGE, COMMITTED) == PAGE


@pytest.mark.usefixtures("eager")
def test_a_base_that_changes_is_seen(monkeypatch):
    """The check of a row can fail."""
    made = bases.StandIn.forward

    def forgetful(layer, x):
        layer._buffers[layer.codes].zero_()
        return made(layer, x)

    monkeypatch.setattr(bases.StandIn, "forward", forgetful)
    with pytest.raises(AssertionError, match="the base model has changed"):
        list(tables.run(["gptq"]))


def test_a_layer_without_a_gradient_is_not_trained(monkeypatch):
    scheme = bases.SCHEMES["gptq"]
    without = dataclasses.replace(scheme, make=lambda: bases.stand_in(trains=False, **bases.GPTQ))
    monkeypatch.setitem(bases.SCHEMES, "gptq", without)
    ((_, found),) = tables.run(["gptq"])
    assert found[1:-1] == ["–S–"] * len(tables.METHODS)
