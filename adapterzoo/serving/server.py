"""`adapterzoo serve`: transformers' own server, where `model="base:adapter"` names the adapter.

The routes, their handlers and the continuous batching are transformers' own. A gate in front of
them reads each request once: it finds the adapter, refuses what the handlers would ignore or fail
on, and passes on only the fields that they read. No name in a request reaches a disk or the Hub:
the base model and its adapters are loaded before the server starts.

This file holds all that the library knows about the internals of `transformers.cli.serving` in the
versions of `batching.TESTED`: `build_server`, `ModelManager`, `GenerationState.get_manager`,
`CBGenerateManager.init_cb` and `_cb`, the two handlers, and the fact that a handler adds its
request in the task in which the gate calls it.
"""

from __future__ import annotations

import asyncio
import json
import math
import reprlib
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

from adapterzoo.errors import (
    AdapterZooError,
    CheckpointError,
    ConfigError,
    DuplicateNameError,
    StateError,
    UnknownNameError,
)
from adapterzoo.model.hf import batching

from .pool import AdapterPool, find

Message: TypeAlias = "dict[str, Any]"
Receive: TypeAlias = "Callable[[], Awaitable[Message]]"
Send: TypeAlias = "Callable[[Message], Awaitable[None]]"

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
METRICS = "/metrics"
ROUTES = {
    "/v1/models": "GET", "/health": "GET", METRICS: "GET", COMPLETIONS: "POST", CHAT: "POST",
}  # fmt: skip
"""Served paths → their methods. Other routes of transformers unload the model, or load
one that a request names."""

# bytes of a body: minimum, maximum, and in between this many for each position of the model
_SMALL, _LARGE, _PER_POSITION = 2**18, 2**24, 64
# seconds to wait for the next part of a body
_PATIENCE = 60.0
_MOST_TOKENS = 2**31 - 1
# fields that every request may have
_FIELDS = {"model", "stream", "temperature", "top_p", "user"}
# values that change nothing; others would be ignored, or affect other requests
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "echo": (False,), "logprobs": (False,), "stop": ([], ""),
    "presence_penalty": (0, 0.0), "frequency_penalty": (0, 0.0), "logit_bias": ({},),
    "tools": ([],), "seed": (), "suffix": (), "generation_config": (),
    "stream_options": ({}, {"include_usage": False}, {"include_usage": True}),
}  # fmt: skip


class RefusedRequest(Exception):  # noqa: N818  not in the library's tree
    """The status and reason with which a request is refused."""

    def __init__(self, status: int, reason: str, allow: str | None = None) -> None:
        """Store the answer.

        Args:
            status: the answer's status.
            reason: what is wrong with the request.
            allow: the method that the path accepts; None: the method is right.
        """
        super().__init__(reason)
        self.status, self.allow = status, allow


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request asks for.

    Attributes:
        adapter: its name; None for the base model.
        new_tokens: the maximum number of tokens to generate; None: as many as fit.
    """

    adapter: str | None = None
    new_tokens: int | None = None


_asked: ContextVar[Asked] = ContextVar("_asked")


@dataclass(frozen=True, slots=True)
class Served:
    """A base model with adapters, under the names that requests use.

    Attributes:
        name: name of the base model.
        model: the model, with the adapters.
        tokenizer: tokenizer of the base model.
        settings: sampling settings for all requests.
        pool: pool of the adapters; None: the model holds them all.
    """

    name: str
    model: Any
    tokenizer: Any
    settings: Any
    pool: AdapterPool | None = None

    @property
    def names(self) -> list[str]:
        """The values that a request may give as its model."""
        adapters = self.model.adapters_config if self.pool is None else self.pool
        return [self.name, *(f"{self.name}:{each}" for each in adapters)]

    @property
    def most_bytes(self) -> int:
        """The maximum bytes of a body; all requests wait while a prompt is tokenized."""
        positions = batching.positions_of(self.model)
        return _LARGE if positions is None else min(max(_SMALL, _PER_POSITION * positions), _LARGE)

    def checked(self, path: str, body: object) -> Asked:
        """Return what a request asks for.

        Args:
            path: the route's path.
            body: the request's body.

        Raises:
            RefusedRequest: a field is wrong, or asks for something that is not supported.
        """
        if not isinstance(body, dict):
            raise RefusedRequest(400, "the body is not a JSON object. Write {…}.")
        name = body.get("model")
        if not isinstance(name, str):
            raise RefusedRequest(400, f"model={_shown(name)} is not a name. Write {self.name!r}.")
        if name not in self.names:
            raise RefusedRequest(404, f"there is no model {_shown(name)}. See GET /v1/models.")
        own = _text_field(path)
        lengths = ("max_completion_tokens", "max_tokens")[path != CHAT :]
        for field, value in body.items():
            neutral = (None, *_NEUTRAL.get(field, ()))
            is_neutral = any(value == each and type(value) is type(each) for each in neutral)
            if field not in {*_FIELDS, *lengths, own} and not (field in _NEUTRAL and is_neutral):
                raise RefusedRequest(400, f"{_shown(field)} has no effect here. Leave it out.")
        self._check_text(own, body.get(own))
        if not isinstance(body.get("stream"), (bool, type(None))):
            raise RefusedRequest(400, "stream must be true or false.")
        if not isinstance(body.get("user"), (str, type(None))):
            raise RefusedRequest(400, "user must be a string.")
        given = [body[field] for field in lengths if body.get(field) is not None]
        for tokens in given:
            if type(tokens) is not int or not 1 <= tokens <= _MOST_TOKENS:
                reason = f"max_tokens={_shown(tokens)} is not an integer from 1 to {_MOST_TOKENS}."
                raise RefusedRequest(400, reason)
        self._check_sampling(body)
        adapter = name.removeprefix(self.name).removeprefix(":")
        return Asked(adapter or None, given[0] if given else None)

    def _check_text(self, field: str, value: object) -> None:
        """Check the prompt or the messages of a request."""
        texts: list[object] = [value]
        if field == "messages":
            if self.tokenizer.chat_template is None:
                raise RefusedRequest(400, f"{self.name!r} has no chat template. Use {COMPLETIONS}.")
            messages = value if isinstance(value, list) else []
            if not messages or not all(isinstance(each, dict) for each in messages):
                raise RefusedRequest(400, "messages must be a list of {role, content}.")
            parts = [part for each in messages for part in _parts(each.get("content"))]
            texts = [*(each.get("role") for each in messages), *parts]
            texts += [each.get("name", "") for each in messages]
            if any(each.keys() - {"role", "content", "name"} for each in messages):
                raise RefusedRequest(400, "a message may have only role, content and name.")
        if not all(map(_is_text, texts)):
            raise RefusedRequest(400, f"{field} must be text, without lone surrogates.")

    def _check_sampling(self, body: Mapping[str, Any]) -> None:
        """Check that a request is sampled as all others are."""
        own = self.settings
        values = {
            "temperature": (own.temperature or 1.0) if own.do_sample else 0.0,
            "top_p": (own.top_p or 1.0) if own.do_sample else 1.0,
        }
        for field, value in values.items():
            asked = body.get(field)
            if asked is None:
                continue
            if type(asked) is not int and not (type(asked) is float and math.isfinite(asked)):
                raise RefusedRequest(400, f"{field}={_shown(asked)} is not a number.")
            if asked != value and (field == "temperature" or own.do_sample):
                reason = f"{field}={_shown(asked)}: all requests are sampled with {value}."
                raise RefusedRequest(400, f"{reason} Leave it out.")


def _text_field(path: str) -> str:
    return "messages" if path == CHAT else "prompt"


def _parts(content: object) -> list[object]:
    """Return the texts of a message, with None for a part that is not text."""
    if not isinstance(content, list) or not content:
        return [content]
    return [
        part["text"] if isinstance(part, dict) and {*part} == {"type", "text"}
        and part["type"] == "text" else None
        for part in content
    ]  # fmt: skip


def _is_text(value: object) -> bool:
    """Return whether a value is a string without lone surrogates, which JSON allows."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


# for values that may be long, or nested more deeply than `repr` can follow
_shortened = reprlib.Repr()
_shortened.maxstring = 200
_shown = _shortened.repr


class RequestGate:
    """ASGI middleware that checks each request, and answers those that it refuses."""

    def __init__(self, app: Any, served: Served) -> None:
        """Wrap an application.

        Args:
            app: the application of transformers.
            served: what it serves.
        """
        self.app, self.served = app, served

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        # transformers tells requests apart by their id, so a client must not choose one
        replaced, own = {b"x-request-id"}, []
        try:
            method, path = scope["method"], scope["path"]
            if path not in ROUTES:
                raise RefusedRequest(404, f"there is no {_shown(path)}.")
            if method != ROUTES[path]:
                reason = f"{path} has no method {_shown(method)}. Write {ROUTES[path]}."
                raise RefusedRequest(405, reason, allow=ROUTES[path])
            if path == METRICS:
                await _send(send, 200, self._metrics().encode(), b"text/plain; version=0.0.4")
                return
            if method == "POST":
                _check_headers(scope["headers"])
                fields: Any = _document(await _body(receive, self.served.most_bytes))
                asked = self.served.checked(path, fields)
                await self._prefetch(asked.adapter)
                _asked.set(asked)
                body = json.dumps(_read_by_handlers(path, fields, asked)).encode()
                receive = _again(body, receive)
                replaced |= {b"content-type", b"content-length", b"transfer-encoding"}
                own = [(b"content-type", b"application/json")]
        except RefusedRequest as error:
            await _answer(send, error)
            return
        headers = [*(each for each in scope["headers"] if each[0] not in replaced), *own]
        await self.app({**scope, "headers": headers}, receive, send)

    def _metrics(self) -> str:
        """Return the pool's metrics.

        Raises:
            RefusedRequest: there is no pool.
        """
        if self.served.pool is None:
            raise RefusedRequest(404, "there are no metrics: the model holds all adapters.")
        return self.served.pool.prometheus()

    async def _prefetch(self, adapter: str | None) -> None:
        """Read the files of an adapter while other requests go on.

        Raises:
            RefusedRequest: they cannot be read.
        """
        if self.served.pool is None or adapter is None:
            return
        try:
            await asyncio.to_thread(self.served.pool.prefetch, adapter)
        except AdapterZooError as error:
            raise RefusedRequest(_status(error), str(error)) from None


def _check_headers(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Check that the body is uncompressed JSON.

    Raises:
        RefusedRequest: the body has another type, or compressed.
    """
    given = dict(headers)
    kind = given.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if kind != b"application/json":
        raise RefusedRequest(415, "the body is not JSON. Write content-type: application/json.")
    if given.get(b"content-encoding", b"identity").strip().lower() != b"identity":
        raise RefusedRequest(415, "the body is compressed. Leave content-encoding out.")


async def _body(receive: Receive, most: int) -> bytes:
    """Return a request's body.

    Args:
        receive: the ASGI function that returns its parts.
        most: maximum number of bytes.

    Raises:
        RefusedRequest: the body is too long or stops arriving, or the client has left.
    """
    parts: list[bytes] = []
    size = 0
    while True:
        try:
            message = await asyncio.wait_for(receive(), _PATIENCE)
        except TimeoutError:
            raise RefusedRequest(408, f"no byte in {_PATIENCE:g} seconds.") from None
        if message["type"] != "http.request":
            raise RefusedRequest(400, "the body is incomplete.")
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > most:
            raise RefusedRequest(413, f"the body is longer than {most} bytes.")
        if not message.get("more_body", False):
            return b"".join(parts)


def _document(body: bytes) -> object:
    """Parse a JSON body.

    Raises:
        RefusedRequest: the body is not JSON, or a field appears twice.
    """
    try:
        return json.loads(body.decode(), object_pairs_hook=_fields, parse_constant=_no_number)
    except (ValueError, RecursionError):
        raise RefusedRequest(400, "the body is not JSON in UTF-8.") from None


def _fields(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        # another parser may keep the first of them, and Python keeps the last
        raise RefusedRequest(400, "a field appears twice. Write it once.")
    return found


def _no_number(name: str) -> object:
    raise RefusedRequest(400, f"{name} is not a number in JSON.")


def _read_by_handlers(path: str, fields: Mapping[str, Any], asked: Asked) -> dict[str, Any]:
    """Return the fields that a handler reads, all of which have been checked."""
    names = ("model", _text_field(path), "stream")
    length = {} if asked.new_tokens is None else {"max_tokens": asked.new_tokens}
    return {name: fields[name] for name in names if name in fields} | length


def _again(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that returns the body again, and then whatever follows."""
    parts = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def give() -> Message:
        return next(parts, None) or await receive()

    return give


async def _answer(send: Send, error: RefusedRequest) -> None:
    """Answer a request with an error in OpenAI's format."""
    more = [] if error.allow is None else [(b"allow", error.allow.encode())]
    body = json.dumps(_error(str(error))).encode()
    await _send(send, error.status, body, b"application/json", more)


async def _send(
    send: Send, status: int, body: bytes, kind: bytes, more: Iterable[tuple[bytes, bytes]] = ()
) -> None:
    """Send an answer."""
    headers = [(b"content-type", kind), *more]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _error(reason: str) -> dict[str, Any]:
    return {"error": {"message": reason, "type": "invalid_request_error", "code": None}}


def _status(error: AdapterZooError) -> int:
    """Return the HTTP status for an error of a request that has passed the gate."""
    if isinstance(error, UnknownNameError):
        return 404
    # for example an adapter that is being replaced, or has lost its files
    return 503 if isinstance(error, (CheckpointError, StateError)) else 400


def load(
    base: str, adapters: Sequence[str], *, name: str | None = None, device: str | None = None,
    dtype: str = "auto", temperature: float | None = None, slots: int | None = None,
    max_bytes: int | None = None,
) -> Served:  # fmt: skip
    """Load a base model and create a pool of its adapters.

    If an adapter cannot act in a pool, the model holds all of them.

    Args:
        base: folder or name on the Hub.
        adapters: folders or names on the Hub, or `NAME=FOLDER`.
        name: name of the base model for requests; None: the name of the folder or on the Hub.
        device: None: a GPU, if there is one.
        dtype: dtype of the base model; "auto": that of its file.
        temperature: for all requests; 0: always the likeliest token; None: that of the
            base model.
        slots: number of slots for adapters of one kind; None: one for each adapter, up to eight.
        max_bytes: see `AdapterPool`.

    Raises:
        ConfigError: the temperature is invalid; or slots or bytes are given, and an adapter cannot
            act in a pool.
        StateError: an adapter cannot share steps with others; or this version of transformers has
            not been tested.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from adapterzoo.model import init

    batching.refuse_untested()
    on = device or ("cuda" if torch.cuda.is_available() else "cpu")
    plain: Any = AutoModelForCausalLM.from_pretrained(base, dtype=dtype, trust_remote_code=False)
    model: Any = init(plain.to(on).eval())
    pool = None
    if adapters:
        try:
            pool = _pool(model, adapters, slots or min(len(adapters), 8), max_bytes)
        except ConfigError:
            if slots is not None or max_bytes is not None:
                raise
            _load_all(model, adapters)
    tokenizer = AutoTokenizer.from_pretrained(base, trust_remote_code=False)
    settings = model.generation_config
    if temperature is not None:
        if not math.isfinite(temperature) or temperature < 0:
            raise ConfigError(f"--temperature {temperature} is not legal. Write 0 or more.")
        settings.do_sample = temperature > 0
        settings.temperature = temperature or None
    shown = Path(base).name if Path(base).is_dir() else base
    return Served(name or shown, model, tokenizer, settings, pool)


def _pool(model: Any, adapters: Sequence[str], slots: int, max_bytes: int | None) -> AdapterPool:
    """Return a pool of adapters, each a folder, a name on the Hub, or `NAME=` and one of them."""
    named: dict[str, str] = {}
    for each in adapters:
        own, is_named, reference = each.partition("=")
        key = own if is_named else find(model, each)[0].name
        if key in named:
            raise DuplicateNameError(
                f"--adapters {each}: {named[key]!r} is also called {key!r}. Write NAME={each}."
            )
        named[key] = reference if is_named else each
    return AdapterPool(model, named, slots=slots, max_bytes=max_bytes)


def _load_all(model: Any, adapters: Sequence[str]) -> None:
    """Load adapters into a model.

    Raises:
        StateError: one cannot share steps with others.
    """
    for each in adapters:
        own, is_named, folder = each.partition("=")
        options = {"load_as": own} if is_named else {}
        loaded = model.load_adapter(folder if is_named else each, **options)
        variant = batching.variant_of(model, loaded)
        if variant.alone:
            raise StateError(
                f"--adapters {each}: {variant.alone}, so other requests cannot run alongside it. "
                "Serve it without others, merged: adapterzoo merge."
            )


def application(served: Served, **options: Any) -> tuple[Any, Any]:
    """Return a server's application, and the running manager of its requests.

    Args:
        served: the model.
        **options: options of `ContinuousBatchingConfig`.

    Raises:
        StateError: a package for serving is not installed.
    """
    try:
        from fastapi.responses import JSONResponse
        from transformers.cli.serving.chat_completion import ChatCompletionHandler
        from transformers.cli.serving.completion import CompletionHandler
        from transformers.cli.serving.model_manager import ModelManager
        from transformers.cli.serving.server import build_server
        from transformers.cli.serving.utils import GenerationState
        from transformers.utils.import_utils import is_serve_available
    except ImportError as error:
        raise StateError(f"{error}. Write pip install 'adapterzoo[serve]'.") from error
    if not is_serve_available():
        raise StateError("openai or uvicorn is missing. Write pip install 'adapterzoo[serve]'.")
    import psutil
    from jinja2 import TemplateError
    from transformers import ContinuousBatchingConfig

    if served.model.device.type == "cpu":
        # transformers takes 60 % of the machine's memory, also of what others use
        memory = psutil.virtual_memory()
        options = {"max_memory_percent": 0.6 * memory.available / memory.total, **options}

    class Manager(ModelManager):
        """Manager of a single model, which loads no other and unloads nothing."""

        def __init__(self) -> None:
            super().__init__(device=str(served.model.device), model_timeout=-1)

        @staticmethod
        def process_model_name(model_id: str) -> str:
            return model_id

        def load_model_and_processor(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            return served.model, served.tokenizer

        def list_models(self, cache_dir: str | None = None) -> list[dict[str, Any]]:
            shown = {"object": "model", "created": 0, "owned_by": ""}
            return [{"id": name, **shown} for name in served.names]

        def shutdown(self) -> None:
            pass

    class State(GenerationState):
        """State with one manager for all names that a request can use."""

        def get_manager(self, model_id: str, use_cb: bool = False) -> Any:
            return super().get_manager(served.name, use_cb=True)

    state = State(continuous_batching=True, cb_config=ContinuousBatchingConfig(**options))
    own = state.get_manager(served.name)
    own.init_cb(served.model, served.settings)
    requests = own._cb
    requests.__class__ = ServedRequests
    requests.forwards = {}
    models = Manager()
    # the gate lets no request through to the other handlers
    others: Any = dict.fromkeys(("response_handler", "transcription_handler", "systemone_handler"))
    app = build_server(
        models,
        ChatCompletionHandler(model_manager=models, generation_state=state),
        completion_handler=CompletionHandler(model_manager=models, generation_state=state),
        generation_state=state,
        **others,
    )

    async def refused(_: object, error: Any) -> JSONResponse:
        return JSONResponse(_error(str(error)), status_code=_status(error))

    async def no_chat(_: object, error: Any) -> JSONResponse:
        return JSONResponse(_error(f"the chat template: {error}"), status_code=400)

    app.add_exception_handler(AdapterZooError, refused)
    app.add_exception_handler(TemplateError, no_chat)
    app.add_middleware(RequestGate, served=served)
    return app, requests


# other versions of transformers are refused before a manager is created
_Manager: Any = batching.BatchingManager if batching.is_tested() else object


class ServedRequests(_Manager):  # type: ignore[misc]
    """A manager that finds the adapter of a request in the task that adds it.

    Attributes:
        forwards: id of a streamed request → the `Forward` that delivers its tokens.
    """

    forwards: dict[str, Forward]

    def add_request(
        self,
        input_ids: Sequence[int],
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> str | None:
        """Add a request with the adapter that it asks for.

        Args:
            input_ids: the prompt.
            request_id: its id.
            max_new_tokens: transformers' default, for a request that names no length.
            streaming: whether each token is delivered as soon as it is generated.
            *args: passed on to transformers.
            **kwargs: passed on to transformers.

        Raises:
            AdapterZooError: as for any manager.
        """
        asked, key = _asked.get(), str(request_id)
        if asked.new_tokens is None:
            most = [batching.positions_of(cast("Any", self.model)), self.longest]
            room = [each - len(input_ids) for each in most if each is not None]
            max_new_tokens = max(min([*room, *([max_new_tokens] if max_new_tokens else [])]), 1)
        if streaming:
            # transformers registers its receiver later, when the first token may already be there
            self.forwards[key] = Forward()
            super().register_result_handler(key, self.forwards[key])
        try:
            added = super().add_request(
                input_ids, request_id, max_new_tokens, streaming, *args,
                adapter_name=asked.adapter, **kwargs,
            )  # fmt: skip
            return cast("str | None", added)
        except AdapterZooError:
            self.forwards.pop(key, None)
            self.output_router.result_handlers.pop(key, None)
            raise

    def register_result_handler(self, request_id: str, callback: Callable[[Any], Any]) -> None:
        """Deliver the tokens of a request to a function, from the first one on."""
        forward = self.forwards.pop(request_id, None)
        if forward is None:
            super().register_result_handler(request_id, callback)
        else:
            forward.callback = callback


class Forward:
    """Delivers results to a function that is registered after the request has been added.

    The event loop delivers them, and cannot do so before the current task has registered it.
    """

    callback: Callable[[Any], Any] | None = None

    def __call__(self, result: Any) -> None:
        """Deliver a result."""
        if self.callback is not None:
            self.callback(result)


def run(served: Served, host: str, port: int, **options: Any) -> None:
    """Serve until the process is interrupted.

    Args:
        served: the model.
        host: address to listen on.
        port: the port to listen on.
        **options: options of `ContinuousBatchingConfig`.
    """
    app, requests = application(served, **options)
    import uvicorn

    try:
        # the worker creates the cache, without which no request can be admitted
        while requests.is_running() and requests.batch_processor is None:
            time.sleep(0.01)
        uvicorn.Server(uvicorn.Config(app, host=host, port=port, log_level="info")).run()
    finally:
        requests.stop(hard_stop=True)
        requests.destroy()
