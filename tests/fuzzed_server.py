"""Random bad requests to a server, mixed with good ones: python fuzzed_server.py --requests 5000.

Each request knows the answers that are right. integrations/test_serving.py sends a few hundred.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import random
import re
import socket
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from served import POSITIONS, Server, completed, is_well, streamed, words, written

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
JSON = ("content-type", "application/json")
# seconds after which a request counts as one that hangs
PATIENCE = 30.0
PROMPT = words(20, 21, 22)


@dataclass
class Request:
    """Bytes to send, and the answers that are right.

    Attributes:
        data: the whole request.
        statuses: of a right answer; 0: none.
        tokens: of a right answer with 200; None: any.
        stops: the client sends nothing more, and still reads.
        sent: the client is gone after so many bytes of the request; None: it stays.
        read: the client is gone after so many bytes of the answer; None: it reads all.
    """

    data: bytes
    statuses: tuple[int, ...]
    tokens: list[int] | None = None
    stops: bool = False
    sent: int | None = None
    read: int | None = None


def request(method, path, body=b"", headers=(JSON,), length=None):
    """Bytes of a request; a length of -1 leaves the header out."""
    lines = [f"{method} {path} HTTP/1.1", "host: here", "connection: close"]
    lines += [f"{name}: {value}" for name, value in headers]
    if length != -1:
        lines.append(f"content-length: {len(body) if length is None else length}")
    return "\r\n".join([*lines, "", ""]).encode() + body


def post(body, statuses, path=COMPLETIONS, **fields):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Request(request("POST", path, data), statuses, **fields)


def fine(own, **fields):
    """A body in which only `fields` may be wrong, and its path."""
    path = own.choice([COMPLETIONS, CHAT])
    if path == COMPLETIONS:
        text = {"prompt": PROMPT}
    else:
        text = {"messages": [{"role": "user", "content": PROMPT}]}
    model = own.choice(["tiny", "tiny:a", "tiny:b"])
    return {"model": model, "max_tokens": 6, **text, **fields}, path


def nested(depth, inside="", is_list=True):
    return "[" * depth + inside + "]" * depth if is_list else '{"a":' * depth + "1" + "}" * depth


# --- each kind of a request ---


def good(own, wants):
    model, (prompt, tokens) = own.choice([*wants.items()])
    body = {"model": model, "prompt": prompt, "max_tokens": 6, "stream": own.random() < 0.4}
    if own.random() < 0.3:
        body |= {"user": "me", "n": 1, "stop": None, "temperature": 0, "presence_penalty": 0.0}
    pairs = [*body.items()]
    own.shuffle(pairs)
    path, body = COMPLETIONS, dict(pairs)
    if own.random() < 0.3:
        path, text = CHAT, body.pop("prompt")
        body["messages"] = [{"role": "user", "content": text}]
    data = json.dumps(body, ensure_ascii=own.random() < 0.5).encode()
    if own.random() < 0.2:
        size = own.randrange(1, len(data))
        parts = [data[i : i + size] for i in range(0, len(data), size)]
        chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
        headers = (JSON, ("transfer-encoding", "chunked"))
        return Request(request("POST", path, chunks, headers, -1), (200,), tokens)
    if own.random() < 0.2:
        kind = own.choice(["application/json; charset=utf-8", "Application/JSON"])
        headers = (("Content-Type", kind), ("x-request-id", "same"), ("accept-encoding", "gzip"))
        return Request(request("POST", path, data, headers), (200,), tokens)
    return post(data, (200,), path, tokens=tokens)


def not_json(own, wants):
    body, path = fine(own)
    text = json.dumps(body)
    data = own.choice([
        lambda: text.encode()[: own.randrange(len(text))],
        lambda: own.randbytes(own.randrange(200)),
        lambda: own.choice(
            [b"[]", b"5", b"null", b"true", b'"x"', b"[{}]", b"NaN", b"", b" ", b"\xef\xbb\xbf{}"]),
        lambda: text.replace("6", own.choice(
            ["NaN", "-Infinity", "Infinity", "06", "+6", "0x6", "6.", ".6"])).encode(),
        lambda: text.replace("6", "9" * own.choice([4301, 10**5])).encode(),
        lambda: nested(own.choice([10, 500, 900, 40_000]), is_list=own.random() < 0.5).encode(),
        lambda: nested(own.randrange(10**5), '"').encode(),
        lambda: text.encode(own.choice(["utf-16", "utf-16-le", "utf-32", "utf-32-be"])),
        lambda: (text + own.choice(["x", "{}", ",", "\x00", "// a"])).encode(),
        lambda: text.replace('"', "'").encode(),
        lambda: text.replace("}", ",}").encode(),
        lambda: text.replace("w20", own.choice(["\n", "\x00", "\\x", "\\u12", "\\"])).encode(),
        lambda: text.encode().replace(b"w20", own.choice([b"\xff", b"\xed\xa0\x80", b"\xc0\x80"])),
        lambda: ("{" + text[1:-1] + "," + text[1:]).encode(),
        lambda: text.replace("{", '{"model": "tiny:c", ', 1).encode(),
    ])()  # fmt: skip
    return post(data, (400,), path)


def wrong_values(own):
    """A value of another type, or far beyond any range."""
    depth = own.choice([1, 3, 50, 200, 400, 600, 900])
    return own.choice([
        lambda: json.loads(nested(own.choice([1, 3, 50, 200]), is_list=own.random() < 0.5)),
        lambda: _Raw(nested(depth, is_list=own.random() < 0.5)),
        lambda: own.choice([True, False, [], {}, [None], {"a": []}, [[5]], [1, 2], {"": None}]),
        lambda: own.choice([-1, 0.5, -0.5, 10**30, -(10**30), 1e308, 2**31, 2**63, 5e-324, 1e16]),
        lambda: _Raw(own.choice(["1e400", "-1e999", "9" * 4300, "0." + "0" * 999 + "1"])),
        lambda: own.choice(["x", "\ud800", "w5" * 10**4, "a\x00b", "é", "𝕏", "{}", "null", "1"]),
    ])()  # fmt: skip


class _Raw(str):
    """Text that stands in JSON as it is."""

    __slots__ = ()


def dumped(body):
    raws = {f"@{i}@": value for i, value in enumerate(body.values()) if isinstance(value, _Raw)}
    names = {id(value): key for key, value in raws.items()}
    text = json.dumps({k: names.get(id(v), v) for k, v in body.items()})
    for key, value in raws.items():
        text = text.replace(f'"{key}"', value)
    return text.encode()


FIELDS = ["model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature",
          "top_p", "stream", "user", "n", "stop", "echo", "best_of", "logprobs", "seed", "suffix",
          "logit_bias", "tools", "stream_options", "presence_penalty", "generation_config",
          "chat_template_kwargs", "functions", "adapter", "x", "", "__class__", "a" * 5000,
          "\ud800", "model\x00"]  # fmt: skip


def wrong_field(own, wants):
    field, value = own.choice(FIELDS), wrong_values(own)
    body, path = fine(own)
    body[field] = value
    if field == "temperature" and value in (0, False) and not isinstance(value, (bool, _Raw)):
        return post(dumped(body), (200,), path)
    statuses = (400,)
    if isinstance(value, str) and not isinstance(value, _Raw):
        if field == "model":
            statuses = (404,)
        elif (field == "prompt" and path == COMPLETIONS and value != "\ud800") or (
            field == "user" and value != "\ud800"
        ):
            statuses = (200, 400) if value == "w5" * 10**4 else (200,)
    neutral = {"stream": (True, False), "echo": (False,), "logprobs": (False,), "stop": ([],),
               "logit_bias": ({},), "tools": ([],), "stream_options": ({},),
               "presence_penalty": (0,), "top_p": (0.5, 5e-324)}  # fmt: skip
    if isinstance(value, _Raw) and value.startswith("0."):
        # rounds to zero, as which it changes nothing
        statuses = (200, 400)
    if any(value == each and type(value) is type(each) for each in neutral.get(field, ())):
        statuses = (200,)
    if field == "top_p":
        # has no effect where tokens are not sampled
        statuses = (200, 400)
    return post(dumped(body), statuses, path)


def wrong_message(own, wants):
    value = wrong_values(own)
    message = {"role": "user", "content": PROMPT}
    field = own.choice(["role", "content", "tool_calls", "name", "x", "part", "type"])
    if field == "part":
        message["content"] = [value]
    elif field == "type":
        message["content"] = [{"type": value, "text": "w5"}]
    else:
        message[field] = value
    text = json.dumps({"role": "user", "content": ""})
    is_text = isinstance(value, str) and value != "\ud800" and not isinstance(value, _Raw)
    statuses = (200, 400) if is_text and field in ("role", "content", "name") else (400,)
    if field == "content" and value == []:
        statuses = (400,)
    inner = dumped(message) if "role" in message and field not in ("part", "type") else None
    if inner is None:
        if isinstance(value, _Raw):
            return post(b'{"model": "tiny", "messages": [%s]}' % value.encode(), (400,), CHAT)
        inner = json.dumps(message).encode()
    between = own.choice([b"", text.encode() + b", "])
    data = b'{"model": "tiny:a", "max_tokens": 6, "messages": [%s%s]}' % (between, inner)
    return post(data, statuses, CHAT)


NAMES = ["", "tiny:", ":a", "tiny:a:b", "tiny:a:", " tiny", "tiny ", "TINY", "Tiny:a", "tiny:A",
         "/etc/passwd", "../tiny", "./tiny", "tiny/../tiny", "tiny/a", "a", "b", "tiny@main",
         "tiny:a@main", "tiny:a.gguf", "tiny:x.gguf", "tiny.gguf", "tiny:a\x00", "tiny\n",
         # letters that look like these
         "\uff54iny", "tiny\uff1aa", "tiny:\u0430",
         "tiny:\u200ba", "tiny:a\u0301", "gpt2", "meta-llama/Llama-3.1-8B",
         "http://localhost:1/x", "file:///etc/passwd", "\\\\host\\share", "%2e%2e/tiny", "tiny%3Aa",
         "__base__", "tiny:None", "tiny:null", "None", "x" * 10**5, "\ud800", "tiny:\udfff",
         "hf://x/y", "tiny:Stack('a', 'b')", "tiny:['a']", "tiny:a,b", "tiny:*", "*",
         "\U0001f642" * 99]  # fmt: skip


def wrong_model(own, wants):
    body, path = fine(own, model=own.choice(NAMES), stream=own.random() < 0.5)
    return post(body, (404,), path)


KNOWN = {"/v1/models": "GET", "/health": "GET", COMPLETIONS: "POST", CHAT: "POST"}
PATHS = ["/", "//", "/v1", "/v1/", "/v1/models/", "/v1/models/tiny", "/v1/models/tiny:a",
         "/v1/models/../../reset", "/v1/../reset", "//v1/models", "/v1//models", "/./v1/models",
         "/v1/models/..%2f..%2freset", "/v1/models%00", "/v1/completions/", "/v1/Completions",
         "/reset", "/load_model", "/v1/responses", "/v1/systemone", "/v1/audio/transcriptions",
         "/docs", "/redoc", "/openapi.json", "/metrics/", "/v1/models;x",
         "/%2e%2e/%2e%2e/etc/passwd",
         "/v1%252Fmodels", "/v1/models%20", "/v1/models%0d%0ax:%20y", "/reset%3F", "/%72eset",
         "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "*", "/\ufffd", "/" + "a" * 9000,
         "/v1/models%ff", "/%", "/%zz", "/v1/models%2F..", "http://other/reset"]  # fmt: skip
METHODS = ["GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "get", "post", "X",
           "PROPFIND", "QUERY"]  # fmt: skip


def wrong_path(own, wants):
    body, _ = fine(own)
    data = json.dumps(body).encode()
    method = own.choice(METHODS)
    if own.random() < 0.3:
        path = own.choice([*KNOWN])
        is_right = KNOWN[path] == method
        statuses = (200,) if is_right and (path != CHAT) and (path != COMPLETIONS) else (405,)
        if is_right and path in (CHAT, COMPLETIONS):
            data, statuses = b"{}", (400,)
        return Request(request(method, path, data), statuses)
    path = own.choice(PATHS) + own.choice(["", "", "?x=1", "?model=tiny", "#a", "??"])
    # what HTTP does not allow in a target does not get as far as the application
    legal = re.fullmatch(r"[\x21-\x7e]+", path) is not None
    return Request(request(method, path, data), (404,) if legal else (400,))


def wrong_header(own, wants):
    body, path = fine(own)
    data = json.dumps(body).encode()
    make = own.choice([
        # what the body is
        lambda: Request(request("POST", path, data, (("content-type", own.choice(
            ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x",
             "application/xml", "", "json", "text/json", "application/jsonx", "*/*"])),)), (415,)),
        lambda: Request(request("POST", path, data, ()), (415,)),
        lambda: Request(request("POST", path, data, (JSON, ("content-encoding", own.choice(
            ["gzip", "br", "deflate", "zstd", "x", "gzip, gzip"])))), (415,)),
        # how long it is
        lambda: Request(request("POST", path, data, length=own.choice(
            ["-1", "x", "1e3", "0x5", "5.0", "", " ", "1,2", "9" * 99])), (400,)),
        lambda: Request(request("POST", path, data, (JSON, ("content-length", "5"))), (400,)),
        lambda: Request(request("POST", path, data, length=own.randrange(len(data))), (400,)),
        lambda: Request(request("POST", path, data, length=len(data) + own.randrange(1, 99)),
                        (400, 0), stops=True),
        lambda: Request(request("POST", path, data, length=-1), (400,)),
        # its parts
        lambda: Request(request("POST", path, own.choice(
            [b"x\r\n", b"-5\r\nhello\r\n", b"5\r\nhelloXX", b"f" * 99 + b"\r\n", b"\r\n", b"5;"]),
            (JSON, ("transfer-encoding", "chunked")), -1), (400, 0), stops=True),
        lambda: Request(request("POST", path, b"5\r\nhello\r\n0\r\n\r\n",
            (JSON, ("transfer-encoding", "chunked")), -1), (400,)),
        lambda: Request(request("POST", path, data,
            (JSON, ("transfer-encoding", own.choice(["gzip", "x", "chunked, gzip", ""]))), -1),
            (400, 501)),
        # others
        lambda: Request(request("POST", path, data, (JSON, (own.choice(
            ["a b", "é", "", "x\x00", "a(b", ":", "\ufffd"]), "x"))), (400,)),
        lambda: Request(request("POST", path, data, (JSON, ("x", own.choice(
            ["a\x00b", "a\rb"])))), (400,)),
        lambda: Request(request("POST", path, data, (JSON, ("x", "a" * 10**5))),
                        (200, 400, 431, 0)),
        lambda: Request(request("POST", path, data, (JSON, ("host", "other"))), (400,)),
        lambda: Request(b"POST %s HTTP/1.1\r\n\r\n" % path.encode(), (400,)),
        lambda: Request(own.choice(
            [b"", b"\r\n", b"\r\n" * 3, b"GET\r\n\r\n", b"GET /health\r\n\r\n",
             b"GET /health HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
             b"GET /health HTTP/2.0\r\n\r\nSM\r\n\r\n", own.randbytes(200),
             b"POST " + b"a" * 10**5]),
            (200, 400, 431, 0), stops=True),
        lambda: Request(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", (400, 404), stops=True),
        # right ones
        lambda: Request(
            request("POST", path, data, (("content-type", "text/plain"), JSON)), (200,)),
        lambda: Request(
            request("POST", path, data, (JSON, ("expect", "100-continue"))), (200,)),
        lambda: Request(request("GET", "/v1/models", data, (JSON, ("upgrade", own.choice(
            ["websocket", "h2c"])), ("connection", "upgrade"))), (200, 400, 403)),
    ])  # fmt: skip
    return make()


def goes(own, wants):
    """The client leaves before the request ends, or in the middle of the answer."""
    body, path = fine(own, stream=own.random() < 0.7, max_tokens=own.choice([6, 100]))
    data = request("POST", path, json.dumps(body).encode())
    if own.random() < 0.5:
        return Request(data, (), sent=own.randrange(len(data) + 1))
    return Request(data, (), read=own.choice([0, 1, 20, 200, 500]))


def wrong_length(own, wants):
    count = own.choice([POSITIONS, POSITIONS + 1, 500, 5000, 60_000])
    text, tokens = own.choice([
        ("", 6), (" ", 6), ("\t\n", 6), (words(*[20] * count), 6), (PROMPT, 10**9),
        (PROMPT, POSITIONS),
        (words(*[20] * (POSITIONS - 5)), 6), (PROMPT, 0), (PROMPT, -1), (PROMPT, 2**64),
    ])  # fmt: skip
    body, path = fine(own, max_tokens=tokens, stream=own.random() < 0.5)
    if path == COMPLETIONS:
        body["prompt"] = text
    else:
        body["messages"][0]["content"] = text
    return post(body, (400,), path)


KINDS: dict[str, Callable] = {
    "good": good, "not JSON": not_json, "wrong field": wrong_field, "wrong message": wrong_message,
    "wrong model": wrong_model, "wrong path": wrong_path, "wrong header": wrong_header,
    "client goes": goes, "wrong length": wrong_length,
}  # fmt: skip


# --- sending them ---


def answered(port, asked):
    """The status of the answer, and what is wrong with it; a status of 0: the server closes."""
    with contextlib.closing(socket.create_connection(("127.0.0.1", port), PATIENCE)) as connection:
        if asked.sent is not None or asked.read is not None:
            connection.sendall(asked.data[: asked.sent])
            if asked.read:
                connection.recv(asked.read)
            # a reset, not an end
            linger = struct.pack("ii", 1, 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            return 0, ""
        try:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                # a server may answer before it has read all
                connection.sendall(asked.data)
                if asked.stops:
                    connection.shutdown(socket.SHUT_WR)
            method = asked.data.partition(b" ")[0].decode("latin-1")
            found = http.client.HTTPResponse(connection, method=method)
            found.begin()
            status, text = found.status, found.read().decode()
        except TimeoutError:
            return -1, "hangs"
        except (http.client.HTTPException, ConnectionError, OSError):
            status, text = 0, ""
    if status not in asked.statuses:
        return status, f"{status}, not {asked.statuses}: {text[:200]}"
    if status in (404, 405, 415) and method != "HEAD" and "error" not in json.loads(text):
        return status, f"{status} without a reason: {text[:200]}"
    if len(text) > 5000:
        return status, f"an answer of {len(text)} characters"
    if asked.tokens is not None:
        own = streamed if text.startswith("data: ") else completed
        tokens = spoken(text) if '"message"' in text else own((status, text))
        if tokens != asked.tokens:
            return status, f"{tokens}, not {asked.tokens}"
    return status, ""


def spoken(text):
    message = json.loads(text)["choices"][0]["message"]["content"]
    return [int(word) for word in re.findall(r"w(\d+)", message)]


def fuzz(server, wants, count, seed=0, bunch=100, workers=8):
    """Send requests in bunches from threads; after each one, every model has to answer rightly.

    Returns how often each kind of request had each status, and what was wrong.
    """
    source, found, wrong = random.Random(seed), Counter(), []

    def send(number):
        own = random.Random(number)
        kind = "good" if own.random() < 0.2 else own.choice([*KINDS][1:])
        asked = KINDS[kind](own, wants)
        status, reason = answered(server.port, asked)
        return kind, status, reason and f"{kind}, seed {number}: {reason} to {asked.data[:300]!r}"

    with ThreadPoolExecutor(workers) as pool:
        for start in range(0, count, bunch):
            size = min(bunch, count - start)
            numbers = [source.randrange(10**9) for _ in range(size)]
            for kind, status, reason in pool.map(send, numbers):
                found[kind, status] += 1
                wrong += [reason] if reason else []
            if not is_well(server, wants) or server.get("/health")[0] != 200:
                wrong.append(f"no longer right after {start + size} requests")
    log = server.log.read_text()
    if "Traceback" in log:
        wrong.append(f"in the log: {log[log.index('Traceback') :][:3000]}")
    return found, wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        folder, args, wants = written(Path(folder))
        server = Server(folder, *args)
        try:
            start = time.monotonic()
            found, wrong = fuzz(server, wants, given.requests, given.seed)
            seconds = time.monotonic() - start
        finally:
            server.stop()
    lines = []
    for kind in KINDS:
        row = {status: n for (k, status), n in sorted(found.items()) if k == kind}
        lines.append(f"{kind:14} {sum(row.values()):5}  {row}")
    lines += [*wrong[:40], f"{found.total()} requests in {seconds:.0f} s, {len(wrong)} wrong", ""]
    sys.stdout.write("\n".join(lines))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
