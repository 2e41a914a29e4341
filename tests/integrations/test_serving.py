"""`adapterzoo serve` in a process of its own, by HTTP, against `generate` here."""

from __future__ import annotations

import asyncio
import http.client
import importlib
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from families import tiny_config
from fuzzed_server import KINDS, fuzz
from served import (
    ADAPTERS,
    MARKS,
    POSITIONS,
    WORDS,
    Server,
    completed,
    is_well,
    numbers,
    streamed,
    tokenizer,
    words,
    written,
)
from snapshots import stir
from transformers import AutoModelForCausalLM
from waiting import until

from adapterzoo import init
from adapterzoo.serving import server

pytestmark = MARKS


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A server, and what each prompt gives with each adapter."""
    folder, args, wants = written(tmp_path_factory.mktemp("served"))
    server = Server(folder, *args, "--slots", "1")
    yield server, wants
    server.stop()


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
    # a prompt that long would keep all others waiting
    for data in (b" " * (17 * 2**20), {"model": "tiny", "prompt": "w5 " * 2**18}):
        assert server.ask("POST", "/v1/completions", data)[0] == 413
    body = {"model": "tiny:a", "prompt": PROMPT}
    for header in (("content-type", "text/plain"), ("content-encoding", "gzip")):
        assert server.ask("POST", "/v1/completions", body, [header])[0] == 415, header
    for method, path in (
        ("POST", "/reset"), ("POST", "/load_model"), ("GET", "/docs"), ("GET", "/openapi.json"),
        ("POST", "/v1/audio/transcriptions"), ("POST", "/v1/responses"), ("POST", "/v1/systemone"),
        ("POST", "/v1/models/../../reset"),
    ):  # fmt: skip
        assert server.ask(method, path, {"model": "tiny"})[0] == 404, path
    for method, path in (("GET", "/v1/completions"), ("DELETE", "/v1/models"), ("PUT", "/health")):
        assert server.ask(method, path, {"model": "tiny"})[0] == 405, path
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


@pytest.mark.sweep
def test_a_fuzz_of_requests(served):
    server, wants = served
    found, wrong = fuzz(server, wants, 400)
    assert not wrong, wrong[0]
    assert {kind for kind, _ in found} == {*KINDS}


def test_the_fuzz_bites(served):
    server, wants = served
    (name, (prompt, _)), (_, (_, tokens)) = [*wants.items()][:2]
    assert fuzz(server, {**wants, name: (prompt, tokens)}, 50)[1]


def test_a_body_that_does_not_come_is_not_waited_for(monkeypatch):
    server = importlib.import_module("adapterzoo.serving.server")
    monkeypatch.setattr(server, "_PATIENCE", 0.01)
    sent = []

    async def receive():
        await asyncio.sleep(60)

    async def send(message):
        sent.append(message)

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
    asyncio.run(server.RequestGate(None, SimpleNamespace(most_bytes=99))(scope, receive, send))
    assert sent[0]["status"] == 408


@pytest.mark.sweep(whole=True)
def test_adapters_of_experts_are_served_beside_others(tmp_path):
    experts = "selfattn_lora=False,intermediate_lora=True,output_lora=True"
    adapters = {"x": f"lora[r=4,{experts}]", "y": f"dora[r=4,{experts}]", "l": "lora[r=4]"}
    folder, args, wants = written(tmp_path, "mixtral", adapters)
    server = Server(folder, *args)
    try:
        with ThreadPoolExecutor(8) as pool:
            every = list(wants.items()) * 4
            ask = lambda item: completed(server.complete(item[0], item[1][0]))  # noqa: E731
            assert list(pool.map(ask, every)) == [want for _, (_, want) in every]
    finally:
        server.stop()


def test_on_a_cpu_the_cache_fits_into_what_is_free(tmp_path, monkeypatch):
    memory = SimpleNamespace(total=2**34, available=2**30)
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    loaded = server.load(str(written(tmp_path)[0]), [])
    _, requests = server.application(loaded)
    try:
        until(lambda: requests.batch_processor is not None)
        taken = requests.continuous_batching_config.max_memory_percent * memory.total
        assert taken == pytest.approx(0.6 * memory.available)
    finally:
        requests.stop(block=True)


@pytest.mark.sweep
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


def measured(server):
    status, text = server.get("/metrics")
    assert status == 200
    lines = (line.split() for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in lines}


def test_metrics_of_the_pool(served):
    server, wants = served
    for name in ("tiny:a", "tiny:d", "tiny:a"):
        prompt, tokens = wants[name]
        assert completed(server.complete(name, prompt)) == tokens
    values = measured(server)
    assert values["adapterzoo_pool_adapters"] == len(ADAPTERS)
    assert values["adapterzoo_pool_evicted_total"] >= 2
    # a slot is given back after its last token has been sent
    until(lambda: measured(server)["adapterzoo_pool_slots_in_use"] == 0)
    assert server.ask("POST", "/metrics", {})[0] == 405


@pytest.mark.sweep(whole=True)
def test_the_model_holds_adapters_that_cannot_act_in_slots(served, tmp_path):
    _, wants = served
    folder, own, _ = written(tmp_path / "other")
    model = init(AutoModelForCausalLM.from_pretrained(folder).eval())
    model.add_adapter("k", "loha")
    stir(model, "k", seed=7, std=1.0)
    model.save_adapter(tmp_path / "k", "k")
    model.set_active_adapters("k")
    ids = list(range(20, 27))
    want = model.generate(torch.tensor([ids]), max_new_tokens=6)[0, len(ids) :].tolist()
    adapters = ["--adapters", str(tmp_path / "k"), *own[:2]]
    other = Server(folder, *adapters)
    try:
        found = completed(other.complete("tiny:k", words(*ids)))
        # the others are no words
        assert found == [token for token in want if 2 < token < WORDS]
        prompt, tokens = wants["tiny:a"]
        assert completed(other.complete("tiny:a", prompt)) == tokens
        assert other.get("/metrics")[0] == 404
    finally:
        other.stop()
    command = [sys.executable, "-m", "adapterzoo", "serve", str(folder), *adapters, "--slots", "2"]
    refused = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert refused.returncode != 0
    assert "cannot act in a slot" in refused.stderr
