"""`verify(…, converter=…)`: the file that llama.cpp's converter writes, not its rules."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import serving_table as table
from peft_world import QUIET, change, ours, plain
from snapshots import stir

from adapterzoo.errors import ConfigError
from adapterzoo.serving import verify

pytestmark = [pytest.mark.filterwarnings(warning) for warning in QUIET]
STAND_IN = Path(__file__).parent / "converter.py"
# a checkout of llama.cpp on this machine
REAL = os.environ.get("LLAMA_CPP")


def exported(tmp_path, config):
    model = ours("llama")
    model.add_adapter("a", config)
    stir(model, "a")
    model.save_adapter(tmp_path / "a", "a")
    model.save_adapter(tmp_path / "served", "a", format="peft", serve="gguf")
    return tmp_path / "served", tmp_path / "a"


def test_the_file_is_what_is_compared(tmp_path):
    served, original = exported(tmp_path, "lora[r=4,alpha=6,attn_matrices=['q']]")
    base = plain("llama").double()
    proof = verify(served, "gguf", base, original, converter=STAND_IN)
    assert proof.is_equal
    assert proof.change > 1e-2
    change(served, lora_alpha=16)
    wrong = verify(served, "gguf", base, original, converter=STAND_IN)
    assert len(wrong.wrong) == 2


def test_layers_that_the_converter_leaves_out_are_found(tmp_path):
    served, original = exported(tmp_path, "lora[r=4,attn_matrices=['q','v']]")
    proof = verify(served, "gguf", plain("llama").double(), original, converter=STAND_IN)
    assert proof.without_effect == tuple(
        f"model.layers.{n}.self_attn.v_proj.weight" for n in range(2)
    )
    # its rules alone say that it takes them
    assert verify(served, "gguf", plain("llama").double(), original).is_equal


def test_a_converter_that_fails_refuses(tmp_path):
    served, original = exported(tmp_path, "lora[r=4,output_lora=True]")
    proof = verify(served, "gguf", plain("llama").double(), original, converter=STAND_IN)
    assert not proof.is_equal
    assert "cannot map tensor" in proof.refused[0]
    proof = verify(served, "gguf", plain("llama").double(), original, converter=tmp_path / "none")
    assert proof.refused


def test_other_servers_have_no_converter(tmp_path):
    served, _ = exported(tmp_path, "lora")
    with pytest.raises(ConfigError, match=r"reads PEFT's files. Leave converter out"):
        verify(served, "vllm", plain("llama"), converter=STAND_IN)


@pytest.mark.skipif(REAL is None, reason="LLAMA_CPP names no checkout of llama.cpp")
@pytest.mark.parametrize("family", table.FAMILIES)
def test_the_real_converter_agrees_with_its_rules(family, tmp_path):
    for text in table.PARTS.values():
        if table.cell(family, text, "gguf") == table.REFUSED:
            continue
        model, original = table._made(family, text)
        given = {"format": "peft", "serve": "gguf", "with_head": False}
        model.save_adapter(tmp_path, "a", **given)
        base = plain(family).double()
        base.config.architectures = [type(base).__name__]
        converter = Path(str(REAL)) / "convert_lora_to_gguf.py"
        assert verify(tmp_path, "gguf", base, original, converter=converter).is_equal
