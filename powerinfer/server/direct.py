"""Endpoints that take a body, called without FastAPI between.

What stands in FastAPI and Starlette between a request and its endpoint takes longer than the endpoint's own
checks, and many requests come at once. So a body that is right goes to its endpoint here; one that is wrong,
and all else, takes FastAPI's way, which says what is wrong with it.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.types import Receive, Scope, Send

from .dialects import path_of
from .json_body import IS_SHORT, VALUE
from .schemas import Body, validated

Call = Callable[..., Awaitable[Response]]


class Direct:
    """An ASGI layer around FastAPI, which it asks for its routes when it is made."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        self._calls: dict[str, tuple[Call, str, str, type[Body]]] = {}
        for route in app.routes:
            if isinstance(route, APIRoute) and route.methods == {"POST"}:
                signature = inspect.signature(route.endpoint)
                if signature.return_annotation is not Response:  # which FastAPI would make one of
                    continue
                kinds = {each.annotation: name for name, each in signature.parameters.items()}
                takes = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Body)]
                if len(kinds) == 2 and Request in kinds and takes:
                    self._calls[route.path] = route.endpoint, kinds[Request], kinds[takes[0]], takes[0]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_post = scope["type"] == "http" and scope["method"] == "POST" and scope.get(IS_SHORT)
        found = self._calls.get(path_of(scope)) if is_post else None
        body = None
        if found is not None and isinstance(scope[VALUE], dict):
            with suppress(ValidationError):
                body = validated(found[3], scope[VALUE])
        if found is None or body is None:
            await self._app(scope, receive, send)
            return
        call, request_name, body_name, _ = found
        request = Request(scope, receive)
        try:
            response = await call(**{request_name: request, body_name: body})
        except Exception as error:
            handlers: dict[Any, Any] = self._app.exception_handlers
            handle = next((handlers[kind] for kind in type(error).__mro__ if kind in handlers), None)
            if handle is None:
                raise
            response = await handle(request, error)
        # Nothing in an answer fails before its head is sent, and what fails later nobody can answer.
        await response(scope, receive, send)
