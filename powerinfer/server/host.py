"""What the endpoints of a protocol use of the server: Endpoints in app.py."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol

from fastapi import Request
from fastapi.responses import Response

from ..async_llama import AsyncStream
from .events import EVENTS
from .models import Models, ServedModel
from .schemas import ChatRequest, CompletionRequest, EmbeddingRequest
from .settings import Settings

Add = Callable[..., None]
"""Adds an endpoint: (path, function, model of its answer, streams=the type of its streams)."""


class Host(Protocol):
    models: Models
    settings: Settings

    async def use(
        self, request: Request, name: str | None, lora: Sequence[Any] | None = None
    ) -> ServedModel: ...

    def name(self, request: Request) -> str: ...

    async def run_chat(self, request: Request, body: ChatRequest) -> dict[str, Any] | AsyncStream: ...

    async def run_completion(
        self, request: Request, body: CompletionRequest
    ) -> dict[str, Any] | AsyncStream: ...

    def stream(
        self,
        request: Request,
        stream: AsyncStream,
        frames: AsyncIterator[bytes],
        media_type: str = EVENTS,
    ) -> Response: ...

    def check_length(self, model: ServedModel, text: Any) -> None: ...

    async def prompt_ids(self, request: Request, body: ChatRequest) -> list[int]: ...

    async def prompt_text(self, request: Request, body: ChatRequest) -> str: ...

    async def mixed_ids(
        self, request: Request, model: ServedModel, parts: Sequence[str | int]
    ) -> list[int]: ...

    async def vectors(
        self, request: Request, body: EmbeddingRequest, *, normalize: bool | None = None
    ) -> dict[str, Any]: ...

    # Endpoints that have more than one path.

    async def chat(self, request: Request, body: ChatRequest) -> Response: ...

    async def embeddings(self, request: Request, body: EmbeddingRequest) -> Response: ...

    async def list_models(self) -> Response: ...

    async def health(self) -> Response: ...
