"""What stands before the endpoints: which hosts, whose keys, how large, how many.

A web page that somebody visits can send requests to a server on his machine. It cannot read the answers
(no CORS headers), it cannot send JSON unasked (that needs a preflight), and a name that it lets point at
this machine (DNS rebinding) is refused by the Host header.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
from typing import Any, NoReturn

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .problems import Problem, problem_of
from .settings import LOOPBACK, Settings

OPEN = ("/health", "/v1/health", "/openapi.json")
"""Paths that need no key, and so does the page."""


def _path(scope: Scope) -> str:
    """The path as the router reads it: without what a proxy has put before it."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path[len(root) :] if root and path.startswith(f"{root}/") else path


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
        self._n_requests = 0
        self._keys = [_hash(key.encode()) for key in settings.api_keys]
        self._hosts: set[str] | None = {*LOOPBACK, *(name.lower() for name in settings.allowed_hosts)}
        if "*" in settings.allowed_hosts or not (settings.is_loopback or settings.allowed_hosts):
            self._hosts = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        path = _path(scope)
        try:
            self._check_host(headers)
            # A preflight carries no key; what it asks about does.
            if scope["method"] != "OPTIONS":
                self._check_key(path, headers)
            if scope["method"] != "POST" or path not in self._post:
                await self._app(scope, receive, send)
                return
            if self._n_requests >= self._max_requests:
                raise Problem(
                    429,
                    f"the server is busy: {self._n_requests} requests are open",
                    code="server_busy",
                    headers={"Retry-After": "1"},
                )
        except Problem as problem:
            await problem.response()(scope, receive, send)
            return
        self._n_requests += 1
        try:
            try:
                body = await asyncio.wait_for(self._body(headers, receive), self._settings.body_timeout_s)
            except asyncio.TimeoutError:
                raise Problem(408, "the body did not arrive in time", code="timeout") from None
        except Problem as problem:
            problem.headers["Connection"] = "close"  # the rest of the body is not read
            await problem.response()(scope, receive, send)
        else:
            if body is not None:
                await self._app(scope, _replay(body, receive), send)
        finally:
            self._n_requests -= 1

    def _check_host(self, headers: dict[bytes, bytes]) -> None:
        if self._hosts is None:
            return
        host = headers.get(b"host", b"").decode("latin-1").strip().lower()
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        if name not in self._hosts:
            raise Problem(
                403, f"this server does not answer to the host name {name!r}", code="host_not_allowed"
            )

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

    async def _body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes | None:
        """The body, which is JSON, or None if the client went away. Raises Problem."""
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if kind != b"application/json" and not kind.endswith(b"+json"):
            said = kind.decode("latin-1") or "none"
            raise Problem(
                415, f"the Content-Type must be application/json, not {said}", code="unsupported_media_type"
            )
        limit = self._settings.max_body_bytes
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > limit:
            self._too_large()
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > limit:
                self._too_large()
            if not message.get("more_body", False):
                body = b"".join(parts)
                _check_json(body)
                return body

    def _too_large(self) -> NoReturn:
        raise Problem(
            413, f"the body is larger than {self._settings.max_body_bytes} bytes", code="body_too_large"
        )


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON number")


def _check_json(body: bytes) -> None:
    """Raises Problem unless it is JSON whose texts are Unicode."""
    try:
        value: Any = json.loads(body.decode("utf-8"), parse_constant=_no_number)
        if b"\\u" in body:  # halves of surrogate pairs come in no other way
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        said = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise Problem(400, f"the body is not valid JSON: {said}", code="invalid_json") from None


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
