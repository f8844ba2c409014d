"""What stands before the endpoints: which hosts, whose keys, how large, how many.

A web page that somebody visits can send requests to a server on his machine. It cannot read the answers
(no CORS headers), it cannot send JSON unasked (that needs a preflight), and a name that it lets point at
this machine (DNS rebinding) is refused by the Host header.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import sys
from collections import Counter
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .._engine.turn import give_way
from .connections import address_of
from .dialects import path_of
from .json_body import IS_SHORT, SMALL_BYTES, VALUE, parsed
from .problems import Problem, problem_of, shown
from .settings import LOOPBACK, Settings

OPEN = ("/health", "/v1/health", "/openapi.json")
"""Paths that need no key, and so does the page."""

_ARRIVING = 256  # bodies that arrive, beyond the requests that are computed
_BODIES = 4  # of the largest size, that are held at the same time


def _hash(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class Guard:
    """An ASGI layer around the application."""

    def __init__(
        self,
        app: ASGIApp,
        settings: Settings,
        *,
        open_paths: set[str],
        post_paths: set[str],
        max_requests: int,
    ) -> None:
        """open_paths: need no key. post_paths: take a body. max_requests: with a body, at the same time."""
        self._app = app
        self._settings = settings
        self._open = open_paths
        self._post = post_paths
        self._max_requests = max_requests
        self._n_requests = 0  # that have arrived
        self._n_open = 0  # and those that arrive
        self._n_bytes = 0  # of their bodies
        self._of: Counter[str] = Counter()
        self._most_of_one = settings.most_of_one(max_requests)
        self._keys = [_hash(key.encode()) for key in settings.api_keys]
        self._hosts: set[str] | None = {*LOOPBACK, *(name.lower() for name in settings.allowed_hosts)}
        if "*" in settings.allowed_hosts or not (settings.is_loopback or settings.allowed_hosts):
            self._hosts = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        give_way()
        headers = {name.lower(): value for name, value in scope["headers"]}
        path = path_of(scope)
        try:
            self._check_host(headers)
            # A preflight carries no key; what it asks about does.
            if scope["method"] != "OPTIONS":
                self._check_key(path, headers)
            if scope["method"] != "POST" or path not in self._post:
                await self._app(scope, receive, send)
                return
            self._check_type(headers)
        except Problem as problem:
            await problem.response()(scope, receive, send)
            return
        body = _Body()
        try:
            with self._place(scope):
                try:
                    await _within(self._settings.body_timeout_s, self._read(body, headers, receive))
                except asyncio.TimeoutError:
                    closes = {"Connection": "close"}  # the rest of the body may never come
                    said = "the body did not arrive in time"
                    raise Problem(408, said, code="timeout", headers=closes) from None
                self._check_free()
                self._n_requests += 1
                try:
                    data = body.whole()
                    scope = {**scope, VALUE: await parsed(data), IS_SHORT: len(data) <= SMALL_BYTES}
                    await self._app(scope, _replay(data, receive), send)
                finally:
                    self._n_requests -= 1
        except _GoneError:
            pass
        except Problem as problem:
            await problem.response()(scope, receive, send)
        finally:
            self._n_bytes -= body.size

    def _check_free(self) -> None:
        if self._n_requests >= self._max_requests:
            raise _busy(f"the server is busy: {self._n_requests} requests are open")

    @contextmanager
    def _place(self, scope: Scope) -> Iterator[None]:
        """For a request of this client, from its headers on."""
        client = scope.get("client")
        address = address_of(client[0]) if client and self._most_of_one is not None else None
        self._check_free()
        if self._n_open >= self._max_requests + _ARRIVING:
            raise _busy(f"the server is busy: {self._n_open - self._n_requests} bodies arrive")
        if address is not None and self._of[address] >= (self._most_of_one or 0):
            raise _busy(f"{self._of[address]} requests of {address} are open, which is all that it may have")
        self._n_open += 1
        if address is not None:
            self._of[address] += 1
        try:
            yield
        finally:
            self._n_open -= 1
            if address is not None:
                self._of[address] -= 1
                if not self._of[address]:
                    del self._of[address]

    def _check_host(self, headers: dict[bytes, bytes]) -> None:
        # Browsers, which other sites could lead here, always name one. Health checks of proxies may not.
        if self._hosts is None or b"host" not in headers:
            return
        host = headers.get(b"host", b"").decode("latin-1").strip().lower()
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        if name not in self._hosts:
            said = f"this server does not answer to the host name {shown(name, 100)!r}"
            raise Problem(403, said, code="host_not_allowed")

    def _check_key(self, path: str, headers: dict[bytes, bytes]) -> None:
        if not self._keys or path in self._open:
            return
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        key = key if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
        given = _hash(key.strip()) if key else b""
        # All of them, always: how long it takes says nothing about which one was nearly right.
        found = [hmac.compare_digest(given, key) for key in self._keys]
        if not any(found):
            message = "the API key is wrong" if given else "an API key is needed: Authorization: Bearer KEY"
            raise Problem(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    def _check_type(self, headers: dict[bytes, bytes]) -> None:
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if kind != b"application/json" and not kind.endswith(b"+json"):
            said = shown(kind.decode("latin-1"), 100) or "none"
            raise Problem(
                415, f"the Content-Type must be application/json, not {said}", code="unsupported_media_type"
            )
        coding = headers.get(b"content-encoding", b"identity").strip().lower()
        if coding != b"identity":
            said = shown(coding.decode("latin-1"), 100)
            raise Problem(
                415,
                f"compressed bodies (Content-Encoding: {said}) are not read",
                code="unsupported_media_type",
            )

    async def _read(self, body: _Body, headers: dict[bytes, bytes], receive: Receive) -> None:
        """What is too large is not read, but the connection stays: uvicorn takes the rest and forgets it, and
        the client can read why."""
        limit = self._settings.max_body_bytes
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > limit:
            self._too_large()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _GoneError
            part = message.get("body", b"")
            body.add(part)
            self._n_bytes += len(part)
            if body.size > limit:
                self._too_large()
            if self._n_bytes > _BODIES * limit:
                raise _busy(f"the server is busy: it holds bodies of {self._n_bytes} bytes")
            if not message.get("more_body", False):
                return

    def _too_large(self) -> NoReturn:
        raise Problem(
            413, f"the body is larger than {self._settings.max_body_bytes} bytes", code="body_too_large"
        )


async def _within(seconds: float, work: Awaitable[None]) -> None:
    """As asyncio.wait_for() but in this task: most bodies are there, and nothing is to be waited for. Raises
    TimeoutError."""
    task, is_late = asyncio.current_task(), False
    assert task is not None

    def end() -> None:
        nonlocal is_late
        is_late = True
        task.cancel()

    timer = asyncio.get_running_loop().call_later(seconds, end)
    try:
        await work
    except asyncio.CancelledError:
        # Python 3.10 does not count who has cancelled it.
        if not is_late or (sys.version_info >= (3, 11) and task.uncancel()):
            raise
        raise asyncio.TimeoutError from None
    finally:
        timer.cancel()


class _Body:
    """The parts that have come."""

    def __init__(self) -> None:
        self.size = 0
        self._parts: list[bytes] = []

    def add(self, part: bytes) -> None:
        self.size += len(part)
        self._parts.append(part)

    def whole(self) -> bytes:
        """All of it, which is given once."""
        parts, self._parts = self._parts, []
        return b"".join(parts)


class _GoneError(Exception):
    """The client has closed the connection."""


def _busy(said: str) -> Problem:
    return Problem(429, said, code="server_busy", headers={"Retry-After": "1"})


def _replay(body: bytes, receive: Receive) -> Receive:
    """Gives the body once more, then what comes after it."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


class LastResort:
    """Outermost: an error that nothing else has answered becomes a body like all others."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def watch(message: Message) -> None:
            nonlocal begun
            begun = begun or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watch)
        except Exception as error:
            if scope["type"] == "http" and not begun:
                await problem_of(error).response()(scope, receive, send)
            raise
