"""The process: uvicorn, signals, a clean end."""

from __future__ import annotations

import asyncio
import socket
import sys
from contextlib import suppress
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from .._text.terminal import one_line
from ..async_llama import AsyncLlama
from ..errors import FileError
from .app import create_app
from .settings import Settings


class _Server(uvicorn.Server):
    """Ends answers under way in good order when it is told to end."""

    def __init__(self, config: uvicorn.Config, llm: AsyncLlama, settings: Settings) -> None:
        super().__init__(config)
        self._llm = llm
        self._settings = settings

    def begin_close(self) -> None:
        """New requests are refused from here on; streams have their time, then end with an error event."""
        self._llm.begin_close(grace_s=self._settings.shutdown_s)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.begin_close()
        await super().shutdown(sockets)


def quiet(app: ASGIApp) -> ASGIApp:
    """Without a traceback for each answer that is cut off because the server was told twice to end."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(asyncio.CancelledError):
            await app(scope, receive, send)

    return run


def _protocol(headers_timeout_s: float) -> Any:
    """uvicorn's, which also closes connections on which a request's headers do not come to an end."""
    base: Any = AutoHTTPProtocol

    class Impatient(base):  # type: ignore[misc]
        _patience: asyncio.TimerHandle | None = None
        _after: Any = None  # the request after which that began

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._wait()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._is_between() and (self._patience is None or self._after is not self.cycle):
                self._wait()

        def connection_lost(self, exc: Exception | None) -> None:
            if self._patience is not None:
                self._patience.cancel()
            super().connection_lost(exc)

        def _is_between(self) -> bool:
            return self.cycle is None or bool(self.cycle.response_complete)

        def _wait(self) -> None:
            if self._patience is not None:
                self._patience.cancel()
            self._after = self.cycle
            self._patience = self.loop.call_later(headers_timeout_s, self._look)

        def _look(self) -> None:
            self._patience = None
            if self.cycle is self._after and self._is_between() and not self.transport.is_closing():
                self.transport.close()

    return Impatient


def _listen(settings: Settings) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((settings.host, settings.port))
        sock.listen(1024)
        sock.set_inheritable(True)
        return sock
    except (OSError, OverflowError) as error:
        raise FileError(f"cannot listen on {settings.host} port {settings.port}: {error}") from None


def open_server(llm: AsyncLlama, settings: Settings) -> tuple[uvicorn.Server, socket.socket]:
    """A server that is not running yet, and its socket, which listens. Raises FileError if the address cannot
    be had, or the certificate not be used."""
    sock = _listen(settings)
    config = uvicorn.Config(
        quiet(create_app(llm, settings)),
        http=_protocol(settings.headers_timeout_s),
        log_level="info" if settings.access_log else "warning",
        access_log=settings.access_log,
        server_header=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=max(1, round(settings.shutdown_s + 5)),
        limit_concurrency=llm.n_parallel + llm.max_waiting + 256,
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
        lifespan="off",
    )
    try:
        config.load()
    except OSError as error:  # of the ssl module, too
        sock.close()
        raise FileError(f"the certificate or its key cannot be used: {error}") from None
    return _Server(config, llm, settings), sock


def serve(llm: AsyncLlama, settings: Settings) -> None:
    """Serves until SIGINT or SIGTERM, then closes `llm`.

    llm: the model.
    settings: address, keys and limits.

    Raises FileError if the address cannot be used.
    """
    try:
        server, sock = open_server(llm, settings)
        _say(f"{address(settings, sock)} serves {', '.join(settings.names)}")
        if not settings.is_loopback and not settings.api_keys:
            _say("everybody who reaches this address may use it (--api-key)")
        server.run(sockets=[sock])
    finally:
        llm.close()


def address(settings: Settings, sock: socket.socket) -> str:
    """Where the server is reached."""
    host, port = sock.getsockname()[:2]
    scheme = "https" if settings.ssl_certfile else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _say(text: str) -> None:
    print(f"powerinfer: {one_line(text)}", file=sys.stderr, flush=True)
