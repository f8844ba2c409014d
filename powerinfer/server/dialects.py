"""Which protocol a request speaks, by its path: errors are told in its form."""

from __future__ import annotations

from pydantic import BaseModel
from starlette.types import ASGIApp, Receive, Scope, Send

from .problems import dialect
from .schemas import AnthropicError, Error, LlamaServerError, OllamaError

_OF_PATHS = {
    "/v1/messages": "anthropic",
    "/api/": "ollama",
    "/completion": "llama-server",
    "/infill": "llama-server",
    "/embeddings": "openai",
    "/embedding": "llama-server",
    "/apply-template": "llama-server",
    "/props": "llama-server",
    "/slots": "llama-server",
    "/lora-adapters": "llama-server",
}


_ERRORS: dict[str, type[BaseModel]] = {
    "anthropic": AnthropicError,
    "ollama": OllamaError,
    "llama-server": LlamaServerError,
}


def path_of(scope: Scope) -> str:
    """The path as the router reads it: without what a proxy has put before it."""
    path, root = str(scope.get("path", "")), str(scope.get("root_path", ""))
    return path[len(root) :] if root and path.startswith(f"{root}/") else path


def dialect_of(path: str) -> str:
    return next((name for begin, name in _OF_PATHS.items() if path.startswith(begin)), "openai")


def error_model(path: str) -> type[BaseModel]:
    """What errors at a path look like."""
    return _ERRORS.get(dialect_of(path), Error)


class Dialects:
    """An ASGI layer around all others."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        dialect.set(dialect_of(path_of(scope)))
        await self._app(scope, receive, send)
