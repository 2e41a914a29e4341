"""Starts `adapterzoo serve` in a process of its own, with what each adapter answers."""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from contextlib import closing

import pytest
import tokenizers
import torch
from families import tiny_config
from snapshots import stir
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

from adapterzoo import init

MARKS = [
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("fastapi", "openai", "uvicorn")),
        reason="pip install 'adapterzoo[serve]' has not been run",
    ),
    pytest.mark.needs("transformers>=5.24", "older ones are refused by name"),
]

POSITIONS = 128
WORDS = 90
# two of one kind
ADAPTERS = {"a": "lora[r=4]", "b": "seq_bn", "c": "dora[r=4]", "d": "lora[r=8,alpha=4]"}


def words(*numbers):
    return " ".join(f"w{n}" for n in numbers)


def tokenizer():
    """One token for each word."""
    special = {0: "<pad>", 1: "<eos>", 2: "<unk>"}
    table = {special.get(i, f"w{i}"): i for i in range(WORDS)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(table, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    )
    made.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    return made


def free_port():
    with closing(socket.socket()) as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class Server:
    """A server in another process."""

    def __init__(self, folder, *args):
        self.port = free_port()
        command = [sys.executable, "-m", "adapterzoo", "serve", str(folder), *args]
        sizes = ["--num-blocks", "128", "--page-size", "8", "--max-batch-tokens", "64"]
        self.log = folder.parent / "log.txt"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, "--port", str(self.port), *sizes], stdout=log, stderr=log,
                env={**os.environ, "HF_HUB_OFFLINE": "1"},
            )  # fmt: skip
        self.wait()

    def is_running(self):
        return self.process.poll() is None

    def wait(self):
        """Wait until it answers."""
        end = time.monotonic() + 120
        while True:
            try:
                assert self.get("/health")[0] == 200
                return
            except OSError:
                assert self.is_running(), self.log.read_text()
                assert time.monotonic() < end, self.log.read_text()
                time.sleep(0.05)

    def ask(self, method, path, body=None, headers=()):
        """The status and the text of an answer."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            data = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
            kinds = {"content-type": "application/json", **dict(headers)}
            connection.request(method, path, data, kinds)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

    def get(self, path):
        return self.ask("GET", path)

    def complete(self, model, prompt, **fields):
        given = {"model": model, "prompt": prompt, "max_tokens": 6, **fields}
        return self.ask("POST", "/v1/completions", given)

    def stop(self):
        self.process.terminate()
        assert self.process.wait(30) is not None


def written(folder, family="llama", adapters=ADAPTERS):
    """A base model and adapters in folders beside each other, and what each prompt gives with each.

    Returns the folder of the base model, the arguments of the command for the adapters, and the
    prompt and tokens of each model that a request can name.
    """
    folder = folder / "tiny"
    torch.manual_seed(0)
    config = tiny_config(family)
    config.max_position_embeddings = POSITIONS
    model = init(AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval())
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=1, pad_token_id=0)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    args = []
    for seed, (name, text) in enumerate(adapters.items()):
        model.add_adapter(name, text)
        stir(model, name, seed=seed + 1, std=0.5)
        model.save_adapter(folder.parent / name, name)
        args += ["--adapters", str(folder.parent / name)]
    wants = {}
    for number, name in enumerate([None, *adapters]):
        ids = list(range(10 + 7 * number, 16 + 9 * number))
        model.set_active_adapters(name)
        out = model.generate(torch.tensor([ids]), max_new_tokens=6)[0, len(ids) :].tolist()
        wants["tiny" if name is None else f"tiny:{name}"] = (
            words(*ids),
            [t for t in out if 2 < t < WORDS],
        )
    assert len({tuple(tokens) for _, tokens in wants.values()}) == len(wants)
    return folder, args, wants


def numbers(text):
    return [int(word) for word in text.replace("w", " ").split() if word.isdigit()]


def completed(answer):
    status, text = answer
    assert status == 200, text
    return numbers(json.loads(text)["choices"][0]["text"])


def streamed(answer):
    status, text = answer
    assert status == 200, text
    chunks = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
    choices = [json.loads(chunk)["choices"][0] for chunk in chunks]
    assert choices[-1]["finish_reason"] in ("length", "stop")
    return numbers(
        "".join(c.get("text") or c.get("delta", {}).get("content") or "" for c in choices)
    )


def is_well(server, wants):
    """Whether the next request is answered rightly."""
    return all(completed(server.complete(m, p)) == want for m, (p, want) in wants.items())
