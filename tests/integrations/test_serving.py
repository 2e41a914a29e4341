"""`adapterzoo serve` in a process of its own, by HTTP, against `generate` here."""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import random
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
import tokenizers
import torch
from families import tiny_config
from snapshots import stir
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

from adapterzoo import init

pytestmark = [
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("fastapi", "openai", "uvicorn")),
        reason="pip install 'adapterzoo[serve]' has not been run",
    ),
    pytest.mark.needs("transformers>=5.24", "older ones are refused by name"),
]

POSITIONS = 128
WORDS = 90
ADAPTERS = {"a": "lora[r=4]", "b": "seq_bn", "c": "dora[r=4]"}


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


class Server:
    """A server in another process."""

    def __init__(self, folder, *args):
        with closing(socket.socket()) as found:
            found.bind(("127.0.0.1", 0))
            self.port = found.getsockname()[1]
        command = [sys.executable, "-m", "adapterzoo", "serve", str(folder), *args]
        sizes = ["--num-blocks", "128", "--page-size", "8", "--max-batch-tokens", "64"]
        self.log = folder.parent / "log.txt"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, "--port", str(self.port), *sizes], stdout=log, stderr=log,
                env={**os.environ, "HF_HUB_OFFLINE": "1"},
            )  # fmt: skip
        end = time.monotonic() + 120
        while True:
            try:
                assert self.get("/health")[0] == 200
                return
            except OSError:
                assert self.process.poll() is None, self.log.read_text()
                assert time.monotonic() < end
                time.sleep(0.2)

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


def started(folder, family, adapters):
    """A server, and what each prompt gives with each adapter."""
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
    return Server(folder, *args), wants


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A server of a Llama; see `started`."""
    server, wants = started(tmp_path_factory.mktemp("served") / "tiny", "llama", ADAPTERS)
    yield server, wants
    server.stop()


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


def test_each_request_has_its_adapter(served):
    server, wants = served
    status, text = server.get("/v1/models")
    assert status == 200
    assert [each["id"] for each in json.loads(text)["data"]] == list(wants)
    every = list(wants.items()) * 8
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda item: completed(server.complete(item[0], item[1][0])), every))
        assert found == [want for _, (_, want) in every]
        stream = lambda item: streamed(server.complete(item[0], item[1][0], stream=True))  # noqa: E731
        assert list(pool.map(stream, every)) == found

    def chat(item, **fields):
        messages = [{"role": "user", "content": item[1][0]}]
        given = {"model": item[0], "messages": messages, "max_completion_tokens": 6, **fields}
        return server.ask("POST", "/v1/chat/completions", given)

    for item in wants.items():
        message = json.loads(chat(item)[1])["choices"][0]["message"]
        assert numbers(message["content"]) == item[1][1]
        assert streamed(chat(item, stream=True)) == item[1][1]


def test_a_request_without_a_length_has_the_rest_of_the_positions(served):
    server, wants = served
    prompt = words(*[20] * (POSITIONS - 4))
    status, text = server.complete("tiny:a", prompt, max_tokens=None)
    assert status == 200
    assert json.loads(text)["usage"]["completion_tokens"] <= 4
    assert is_well(server, wants)


def test_a_client_that_goes_leaves_the_others(served):
    server, wants = served
    for _ in range(5):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        body = {"model": "tiny:a", "prompt": words(20, 21), "max_tokens": 100, "stream": True}
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"}
        )
        connection.getresponse().read(10)
        connection.close()
    assert is_well(server, wants)


PROMPT = words(20, 21, 22)
OF_MODEL = {"/etc/passwd": 404, "../../x": 404, "other": 404, "tiny:nobody": 404, "tiny:": 404,
            "tiny:x.gguf": 404, "tiny:a.gguf": 404, "tiny:a:b": 404, "": 404, "tiny@main": 404,
            None: 400, 5: 400, True: 400, "\x00": 404}  # fmt: skip
FIELDS = [
    {"max_tokens": "many"}, {"max_tokens": 0}, {"max_tokens": -1}, {"max_tokens": 1.5},
    {"max_tokens": True}, {"max_tokens": 10**9}, {"max_tokens": POSITIONS},
    {"temperature": "hot"}, {"temperature": 0.7}, {"temperature": []}, {"top_p": "x"},
    {"n": 2}, {"best_of": 3}, {"echo": True}, {"logprobs": 5}, {"stop": ["w5"]}, {"seed": 1},
    {"frequency_penalty": 1}, {"generation_config": "{}"}, {"generation_config": "nonsense"},
    {"stream": "yes"}, {"unknown": 1}, {"suffix": "w5"},
    {"prompt": None}, {"prompt": 5}, {"prompt": ["w5"]}, {"prompt": [[5, 6]]}, {"prompt": ""},
    {"prompt": "\ud800"}, {"prompt": {"a": 1}}, {"prompt": words(*[20] * (POSITIONS + 1))},
    {"prompt": words(*[20] * POSITIONS)},
]  # fmt: skip
CHATS = [
    None, 5, "hello", [], [5], [{}], [{"role": "user"}], [{"role": 5, "content": "w5"}],
    [{"role": "user", "content": None}], [{"role": "user", "content": [{"type": "image_url"}]}],
    [{"role": "user", "content": [{"type": "text"}]}], [{"role": "user", "content": {"a": 1}}],
    [{"role": "user", "content": "w5", "tool_calls": [5]}], [{"role": "user", "content": "\ud800"}],
]  # fmt: skip


def test_bad_requests_are_answered_and_the_next_is_right(served):
    server, wants = served
    for name, status in OF_MODEL.items():
        assert server.complete(name, PROMPT)[0] == status, name
    for fields in FIELDS:
        body = {"model": "tiny:a", "prompt": PROMPT, "max_tokens": 6, **fields}
        status, text = server.ask("POST", "/v1/completions", body)
        assert (status, "error" in json.loads(text)) == (400, True), fields
    for messages in CHATS:
        body = {"model": "tiny:a", "messages": messages}
        assert server.ask("POST", "/v1/chat/completions", body)[0] == 400, messages
    for body in (b"", b"{nonsense", b"[]", b"5", b"null", b"[" * 10**5, b"\xff\xfe", b'"x"'):
        assert server.ask("POST", "/v1/completions", body)[0] == 400, body[:10]
    assert server.ask("POST", "/v1/completions", b" " * (17 * 2**20))[0] == 413
    for method, path in (
        ("POST", "/reset"), ("POST", "/load_model"), ("GET", "/v1/completions"), ("GET", "/docs"),
        ("POST", "/v1/audio/transcriptions"), ("POST", "/v1/responses"), ("POST", "/v1/systemone"),
        ("GET", "/openapi.json"), ("DELETE", "/v1/models"), ("POST", "/v1/models/../../reset"),
    ):  # fmt: skip
        assert server.ask(method, path, {"model": "tiny"})[0] == 404, path
    assert is_well(server, wants)


def test_the_id_of_a_client_takes_no_answer_of_another(served):
    server, wants = served
    same = [("x-request-id", "mine")]

    def ask(item):
        body = {"model": item[0], "prompt": item[1][0], "max_tokens": 6}
        return completed(server.ask("POST", "/v1/completions", body, same))

    with ThreadPoolExecutor(8) as pool:
        every = list(wants.items()) * 4
        assert list(pool.map(ask, every)) == [want for _, (_, want) in every]


@pytest.mark.long
def test_a_fuzz_of_requests(served):
    server, wants = served
    source = random.Random(0)
    values = [None, True, 0, 1, -1, 10**30, 1e308, "", "w5", "tiny", [], {}, [None], {"a": []}]
    names = ["model", "prompt", "messages", "max_tokens", "temperature", "stream", "n", "x"]

    def ask(number):
        own = random.Random(number)
        body = {n: own.choice(values) for n in own.sample(names, own.randrange(len(names)))}
        if own.random() < 0.7:
            body["model"] = own.choice([*wants, "tiny:nobody"])
        if own.random() < 0.5:
            body["prompt"] = PROMPT
        path = own.choice(["/v1/completions", "/v1/chat/completions"])
        data = json.dumps(body).encode()
        if own.random() < 0.2:
            data = data[: own.randrange(len(data))]
        return server.ask("POST", path, data)[0]

    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(ask, (source.randrange(10**9) for _ in range(400))))
    assert found <= {200, 400, 404}
    assert is_well(server, wants)


def test_adapters_of_experts_are_served_beside_others(tmp_path):
    experts = "selfattn_lora=False,intermediate_lora=True,output_lora=True"
    adapters = {"x": f"lora[r=4,{experts}]", "y": f"dora[r=4,{experts}]", "l": "lora[r=4]"}
    server, wants = started(tmp_path / "tiny", "mixtral", adapters)
    try:
        with ThreadPoolExecutor(8) as pool:
            every = list(wants.items()) * 4
            ask = lambda item: completed(server.complete(item[0], item[1][0]))  # noqa: E731
            assert list(pool.map(ask, every)) == [want for _, (_, want) in every]
    finally:
        server.stop()


def test_what_cannot_be_served_is_said_at_once(tmp_path):
    torch.manual_seed(0)
    model = init(AutoModelForCausalLM.from_config(tiny_config("llama")))
    model.save_pretrained(tmp_path / "tiny")
    tokenizer().save_pretrained(tmp_path / "tiny")
    model.add_adapter("r", "loreft")
    model.save_adapter(tmp_path / "r", "r")
    command = [sys.executable, "-m", "adapterzoo", "serve", str(tmp_path / "tiny")]
    for folder, says in ((tmp_path / "r", "reads the prompt"), (tmp_path / "no", "no")):
        ran = subprocess.run(
            [*command, "--adapters", str(folder)], capture_output=True, text=True, timeout=200,
            check=False,
        )  # fmt: skip
        assert ran.returncode == 1
        assert says in ran.stderr
        assert "Traceback" not in ran.stderr
