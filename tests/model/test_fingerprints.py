"""Fingerprints, digests in checkpoints, and processes that compare what they hold."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from families import tiny_config

from adapterzoo import AutoAdapterModel
from adapterzoo.errors import CheckpointError
from adapterzoo.formats.fit import digest, fingerprint

TESTS = Path(__file__).resolve().parents[1]


def model_with_adapter(seed=0):
    torch.manual_seed(seed)
    model = AutoAdapterModel.from_config(tiny_config("bert"))
    model.add_adapter("a", "lora[init_weights='bert']")
    model.add_classification_head("a", num_labels=3)
    return model


def test_a_digest_is_of_dtype_shape_and_bits_alone():
    x = torch.randn(3, 4)
    assert digest(x) == digest(x.T.contiguous().T) == digest(x.clone())
    others = [x.double(), x.reshape(4, 3), x.T, x + 1e-7, x.bfloat16()]
    assert digest(x) not in {digest(other) for other in others}
    assert digest(torch.tensor(0.0)) != digest(torch.tensor(-0.0))
    assert digest(torch.empty(0)) != digest(torch.empty(0, 1))


def test_a_fingerprint_is_of_config_and_bits_and_not_of_the_name(tmp_path):
    model = model_with_adapter()
    before = model.adapter_fingerprint("a")
    assert len(before) == 64
    model.save_adapter(tmp_path, "a")
    model.load_adapter(tmp_path, load_as="b", with_head=False)
    assert model.adapter_fingerprint("b") == before
    with torch.no_grad():
        _, module = next(model.adapter_modules("b"))
        module.lora_A.view(torch.int32)[0, 0] ^= 1
    assert model.adapter_fingerprint("b") != before
    tensors = {"x": torch.ones(2)}
    assert fingerprint({"r": 8}, tensors) != fingerprint({"r": 9}, tensors)


def test_one_flipped_bit_in_the_file_is_found(tmp_path):
    model = model_with_adapter()
    model.save_adapter(tmp_path, "a")
    file = tmp_path / "adapter.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    fresh = AutoAdapterModel.from_config(tiny_config("bert"))
    with pytest.raises(CheckpointError, match=r"not what was written.*Copy the checkpoint"):
        fresh.load_adapter(tmp_path)
    assert not fresh.has_adapters()


SCRIPT = """
import sys
import torch
import torch.distributed as dist

sys.path.insert(0, {tests!r})
from model.test_fingerprints import model_with_adapter
from adapterzoo.errors import StateError

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
model = model_with_adapter()
model.verify_replicas()
print("equal")
if rank == 1:
    with torch.no_grad():
        path, module = next(model.adapter_modules("a"))
        module.lora_A.view(torch.int32)[0, 0] ^= 1
try:
    model.verify_replicas()
except StateError as error:
    print(error)
dist.destroy_process_group()
"""


@pytest.mark.sweep
def test_one_flipped_bit_on_one_rank_is_found_by_all(tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(SCRIPT.format(tests=str(TESTS)))
    commands = [[sys.executable, script, str(r), tmp_path / "rendezvous"] for r in range(2)]
    ranks = [subprocess.Popen(c, stdout=subprocess.PIPE, text=True) for c in commands]
    for rank in ranks:
        out, _ = rank.communicate(timeout=300)
        assert rank.returncode == 0
        equal, error = out.strip().splitlines()
        assert equal == "equal"
        for part in ("1 of", "attention.self.query/lora_A", "(ranks [1])"):
            assert part in error
