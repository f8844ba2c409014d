"""The HTTP server: OpenAI's endpoints over AsyncLlama. Needs the extra powerinfer[server].

    from powerinfer import AsyncLlama
    from powerinfer.server import Settings, create_app, serve

    serve(AsyncLlama("model.gguf"), Settings(port=8080))      # until SIGINT or SIGTERM
    app = create_app(AsyncLlama("model.gguf"))                # an ASGI application for a server of your own

schemas.py has the fields of requests and app.py the endpoints. guard.py checks hosts, keys and sizes first.
events.py writes streams, metrics.py and live.py report on the server, run.py is the process.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .._extras import how
from ..errors import UnsupportedError

if TYPE_CHECKING:
    from .app import create_app
    from .run import serve
    from .settings import Settings

__all__ = ["Settings", "create_app", "serve"]

_HOME = {"Settings": "settings", "create_app": "app", "serve": "run"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name != "Settings":
        need_extra()
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def need_extra() -> None:
    """Raises UnsupportedError with the way out if the extra is not installed."""
    try:
        import_module("fastapi")
        import_module("uvicorn")
    except ImportError as error:
        raise UnsupportedError(
            f"the server needs {error.name}, which is not installed: {how('server')}"
        ) from None
