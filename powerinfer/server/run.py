"""The process: uvicorn, signals, a clean end."""

from __future__ import annotations

import asyncio
import gc
import math
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from .._engine.machine import give_back_memory
from .._text.terminal import one_line, sentence
from ..async_llama import AsyncLlama
from ..errors import FileError
from .app import create_app, models_of
from .aside import aside
from .connections import Connections
from .models import Models
from .settings import Settings

_SWITCH_S = 0.0005  # instead of 0.005: a step wants the lock several times
_TRIM_TICKS = 100  # of 0.1 s, between two times that free memory goes back to the system


class _Server(uvicorn.Server):
    """Ends answers under way in good order when it is told to end."""

    def __init__(self, config: uvicorn.Config, models: Models, settings: Settings) -> None:
        super().__init__(config)
        self._models = models
        self._settings = settings

    def begin_close(self) -> None:
        """New requests are refused from here on; streams have their time, then end with an error event."""
        self._models.begin_close(grace_s=self._settings.shutdown_s)

    async def on_tick(self, counter: int) -> bool:
        if counter % _TRIM_TICKS == 0:
            await aside(give_back_memory)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.begin_close()
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn ends by the signal that it was sent; a SIGTERM that was obeyed is no failure."""
        with super().capture_signals():
            yield
            if not self.force_exit:
                caught: list[int] = self._captured_signals
                self._captured_signals = [number for number in caught if number != signal.SIGTERM]


def quiet(app: ASGIApp) -> ASGIApp:
    """Without a traceback for each answer that is cut off because the server was told twice to end."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(asyncio.CancelledError):
            await app(scope, receive, send)

    return run


def _listen(settings: Settings) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        # asyncio sets TCP_NODELAY only where the protocol is named: else each answer waits for 40 ms.
        sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((settings.host, settings.port))
        sock.listen(1024)
        sock.set_inheritable(True)
        return sock
    except (OSError, OverflowError) as error:
        raise FileError(f"cannot listen on {settings.host} port {settings.port}: {sentence(error)}") from None


def open_server(llm: AsyncLlama | Models, settings: Settings) -> tuple[uvicorn.Server, socket.socket]:
    """A server that is not running yet, and its socket, which listens. Raises FileError if the address cannot
    be had, or the certificate not be used."""
    models = models_of(llm, settings)
    sock = _listen(settings)
    config = uvicorn.Config(
        quiet(create_app(models, settings)),
        http=Connections(
            most=_most_connections(settings),
            most_of_one=_most_connections(settings) // 2 if settings.max_per_address != 0 else None,
            proxies=settings.trusted_proxies,
            headers_timeout_s=settings.headers_timeout_s,
            write_timeout_s=settings.write_timeout_s,
        ).protocol(),
        ws="none",
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=",".join(settings.trusted_proxies),
        log_level="info" if settings.access_log else "warning",
        access_log=settings.access_log,
        server_header=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=math.ceil(settings.shutdown_s) + 2,  # for last events to be written
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
        lifespan="off",
    )
    try:
        config.load()
    except OSError as error:  # of the ssl module, too
        sock.close()
        raise FileError(f"the certificate or its key cannot be used: {sentence(error)}") from None
    return _Server(config, models, settings), sock


def _most_connections(settings: Settings) -> int:
    """Of the files that the process may have open some are for others."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = settings.max_connections
    return most if soft == resource.RLIM_INFINITY else min(most, max(soft - 128, soft // 2))


def serve(llm: AsyncLlama | Models, settings: Settings) -> None:
    """Serves until SIGINT or SIGTERM, then closes `llm`.

    llm: the model, or several (models.py).
    settings: address, keys and limits.

    Raises FileError if the address cannot be used.
    """
    try:
        server, sock = open_server(llm, settings)
        names = llm.names if isinstance(llm, Models) else settings.names
        say(f"{address(settings, sock)} serves {', '.join(names)}")
        if not settings.is_loopback and not settings.api_keys:
            say("everybody who reaches this address may use it (--api-key)")
        # Threads that hold Python's lock give it to the engine's sooner, and what is there for good is not
        # gone through again and again for garbage.
        sys.setswitchinterval(_SWITCH_S)
        gc.collect()
        gc.freeze()
        server.run(sockets=[sock])
    finally:
        llm.close()


def address(settings: Settings, sock: socket.socket) -> str:
    """Where the server is reached."""
    host, port = sock.getsockname()[:2]
    scheme = "https" if settings.ssl_certfile else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def say(text: str) -> None:
    print(f"powerinfer: {one_line(text)}", file=sys.stderr, flush=True)
