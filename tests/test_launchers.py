"""`AdapterTrainer` in several processes, and the example under both launchers."""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import trainer_rank
from safetensors.torch import load_file

import distributed

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join(
        map(str, (ROOT, ROOT / "tests", ROOT / "examples", os.environ.get("PYTHONPATH", "")))
    ),
}
TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ACCELERATE = [
    *("accelerate.commands.launch", "--num_processes", "2", "--num_machines", "1"),
    *("--mixed_precision", "no", "--dynamo_backend", "no"),
]
# --cpu would start one process: what it starts more of is --multi_gpu, also where there is no GPU
SEVERAL = ["--multi_gpu", "--main_process_port", "0"]
FSDP2 = [
    *("--use_fsdp", "--fsdp_version", "2", "--main_process_port", "0"),
    *("--fsdp_transformer_layer_cls_to_wrap", "BertLayer"),
]
TINY = ["--tiny", "--cpu", "--steps", "4", "--rows", "64"]
EXAMPLE = str(ROOT / "examples" / "distributed.py")
SHARDED = str(ROOT / "tests" / "launched_example.py")


def zero(stage: int) -> Any:
    """A launch under DeepSpeed, which takes no port 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    words = ["--use_deepspeed", "--zero_stage", str(stage), "--main_process_port", port]
    missing = importlib.util.find_spec("deepspeed") is None
    return pytest.param(
        [*ACCELERATE, *words, SHARDED, f"ZeRO-{stage}"],
        marks=pytest.mark.skipif(missing, reason="deepspeed is not installed"),
        id=f"accelerate ZeRO-{stage}",
    )


def same_tensors(folder, other):
    a, b = (load_file(path / "adapter.safetensors") for path in (folder, other))
    assert list(a) == list(b)
    for key, tensor in a.items():
        torch.testing.assert_close(tensor, b[key], rtol=1e-4, atol=1e-6, msg=key)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param([*TORCHRUN, EXAMPLE], id="torchrun"),
        pytest.param([*ACCELERATE, *SEVERAL, EXAMPLE], id="accelerate"),
    ],
)
def test_the_example_trains_in_two_processes_as_in_one(launcher, tmp_path, monkeypatch, capsys):
    check_example(launcher, tmp_path, monkeypatch, capsys)


@pytest.mark.sweep(whole=True)
@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param([*ACCELERATE, *FSDP2, SHARDED, "FSDP2"], id="accelerate FSDP2"),
        zero(2),
        zero(3),
    ],
)
def test_the_example_trains_under_engines_as_in_one(launcher, tmp_path, monkeypatch, capsys):
    check_example(launcher, tmp_path, monkeypatch, capsys)


def check_example(launcher, tmp_path, monkeypatch, capsys):
    """By the loss: AdamW makes large differences of small ones, see `trainer_rank`."""
    run = subprocess.run(
        [
            *(sys.executable, "-m", *launcher, *TINY),
            *("--batch-size", "4", "--output", tmp_path / "two"),
        ],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert "processes 2, steps 4" in run.stdout
    one = ["distributed.py", *TINY, "--batch-size", "8", "--output", str(tmp_path / "one")]
    monkeypatch.setattr(sys, "argv", one)
    distributed.main()
    printed = capsys.readouterr().out
    assert "processes 1, steps 4" in printed
    one, two = (float(re.search(r"mean loss (\S+)", x)[1]) for x in (printed, run.stdout))
    assert two == pytest.approx(one, abs=2e-4)
    for run_folder in ("one", "two"):
        assert (tmp_path / run_folder / "reviews" / "adapter.safetensors").is_file()


@pytest.mark.sweep
def test_labels_that_processes_have_in_other_numbers_count_alike(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "error", trainer_rank.__file__, tmp_path / "two"],
            env={**ENVIRONMENT, **group, "RANK": rank, "LOCAL_RANK": rank},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    try:
        errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], errors[0][-2000:] + errors[1][-2000:]
    for kind in ("static", "named"):
        trainer_rank.train(kind, tmp_path / "one", 8)
        same_tensors(tmp_path / "two" / kind, tmp_path / "one" / kind)
