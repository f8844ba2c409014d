"""Which protocol a request speaks, by its path: errors are told in its form."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from .problems import dialect

_OF_PATHS = {
    "/v1/messages": "anthropic",
    "/api/": "ollama",
    "/completion": "llama-server",
    "/infill": "llama-server",
    "/apply-template": "llama-server",
    "/props": "llama-server",
    "/slots": "llama-server",
}


class Dialects:
    """An ASGI layer around all others."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = str(scope.get("path", ""))
        dialect.set(next((name for begin, name in _OF_PATHS.items() if path.startswith(begin)), "openai"))
        await self._app(scope, receive, send)
