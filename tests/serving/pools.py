"""Many threads that ask for adapters of a pool, by Zipf's law, and check what they get.

`PYTHONPATH=tests python tests/serving/pools.py --seconds 600` runs it by hand.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import threading
import time
from pathlib import Path

import torch
from families import tiny_config
from snapshots import stir
from transformers import AutoModelForCausalLM

from adapterzoo import init
from adapterzoo.serving import AdapterPool

KINDS = ("lora[r=4]", "lora[r=8,alpha=4]", "dora[r=4]", "boft", "seq_bn")
ROWS = 3


@torch.no_grad()
def zipf(folder: Path, adapters: int, slots: int, threads: int, seconds: float) -> dict[str, float]:
    """Let threads run batches for a while; return what was wrong, lost and kept.

    Each batch is three rows with adapters of their own, on the plain and on the compiled model.
    """
    torch.manual_seed(0)
    config = tiny_config("llama")
    model = init(
        AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").double().eval()
    )
    ids = torch.randint(3, 60, (ROWS, 6))
    # the likeliest next token of each row, with each adapter
    want = {None: model(ids)[0][:, -1].argmax(-1).tolist()}
    folders = {}
    for number in range(adapters):
        name = f"a{number}"
        model.add_adapter(name, KINDS[number % len(KINDS)], set_active=True)
        stir(model, name, seed=number + 1, std=0.5)
        want[name] = model(ids)[0][:, -1].argmax(-1).tolist()
        folders[name] = folder / name
        model.save_adapter(folders[name], name)
        model.delete_adapter(name)
    assert len({tuple(tokens) for tokens in want.values()}) > adapters // 2
    names, weights = [*want], [1.0, *(1 / (rank + 1) for rank in range(adapters))]
    probe = AdapterPool(model, folders, slots=slots)
    bound = probe.nbytes * 2
    probe.close()
    pool = AdapterPool(model, folders, slots=slots, max_bytes=bound)
    graphs: list[object] = []

    def counting(module, inputs):
        graphs.append(module)
        return module.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=counting)
    with pool.use([None] * ROWS):
        compiled(ids)
    counts = {"asked": 0, "answered": 0, "wrong": 0, "most_bytes": 0}
    lock, end = threading.Lock(), time.monotonic() + seconds

    def ask(seed: int) -> None:
        source = random.Random(seed)
        run = compiled if seed % 2 else model
        with torch.no_grad():
            while time.monotonic() < end:
                asked = source.choices(names, weights, k=ROWS)
                with lock:
                    counts["asked"] += 1
                with pool.use(asked):
                    found = run(ids)[0][:, -1].argmax(-1).tolist()
                right = [want[name][row] for row, name in enumerate(asked)]
                with lock:
                    counts["answered"] += 1
                    counts["wrong"] += found != right
                    counts["most_bytes"] = max(counts["most_bytes"], pool.nbytes)

    running = [threading.Thread(target=ask, args=(seed,)) for seed in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(seconds + 120)
    alive = sum(thread.is_alive() for thread in running)
    metrics = pool.metrics()
    pool.close()
    lost = counts["asked"] - counts["answered"] + alive
    return {**metrics, **counts, "lost": lost, "bound": bound, "graphs": len(graphs)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--adapters", type=int, default=300)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=600)
    with tempfile.TemporaryDirectory() as made:
        print(json.dumps(zipf(Path(made), **vars(parser.parse_args())), indent=1))  # noqa: T201
