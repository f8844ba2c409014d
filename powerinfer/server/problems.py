"""Errors as OpenAI's API words them, {"error": {"message", "type", "param", "code"}}, or as the request's
protocol does."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic_core import PydanticSerializationError, to_json
from starlette.exceptions import HTTPException

from ..errors import (
    BusyError,
    ClosedError,
    ContextError,
    OutOfMemoryError,
    PowerInferError,
    UnsupportedError,
)

_encoder = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))

dialect: ContextVar[str] = ContextVar("dialect", default="openai")
"""The protocol of the request under way."""


class Problem(Exception):
    """A request that is answered with an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = shown(message, 1000)
        self.code = code
        self.param = None if param is None else shown(param, 100)
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        kind = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}.get(
            self.status, "server_error" if self.status >= 500 else "invalid_request_error"
        )
        return _SHAPES.get(dialect.get(), _openai)(self, kind)

    def response(self) -> Response:
        # Others than OpenAI have one status for all that is wrong with a request.
        status = 400 if self.status == 422 and dialect.get() in _SHAPES else self.status
        return json_response(self.body, status=status, headers=self.headers)


def _openai(problem: Problem, kind: str) -> dict[str, Any]:
    error = {"message": problem.message, "type": kind, "param": problem.param, "code": problem.code}
    return {"error": error}


def _anthropic(problem: Problem, kind: str) -> dict[str, Any]:
    own = {404: "not_found_error", 413: "request_too_large", 503: "overloaded_error"}
    kind = own.get(problem.status, kind.replace("server_error", "api_error"))
    return {"type": "error", "error": {"type": kind, "message": problem.message}}


def _ollama(problem: Problem, _: str) -> dict[str, Any]:
    return {"error": problem.message}


def _llama_server(problem: Problem, kind: str) -> dict[str, Any]:
    code = 400 if problem.status == 422 else problem.status
    return {"error": {"code": code, "message": problem.message, "type": kind}}


_SHAPES: dict[str, Callable[[Problem, str], dict[str, Any]]] = {
    "anthropic": _anthropic,
    "ollama": _ollama,
    "llama-server": _llama_server,
}


def shown(text: str, most: int) -> str:
    """What a client wrote is not said back to it whole."""
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"


def encode(value: Any) -> bytes:
    """JSON. What is no character, half of a pair say, becomes "?"; a number that JSON has not is an error."""
    return _encoder.encode(value).encode("utf-8", "replace")


def encode_part(value: Any) -> bytes:
    """The same of a stream's part, four times as fast. It holds nothing but JSON's own types."""
    try:
        data: bytes = to_json(value)
    except PydanticSerializationError:  # half of a pair
        return encode(value)
    return encode(value) if b"NaN" in data or b"Infinity" in data else data


def json_response(value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(encode(value), status, headers, "application/json")


def problem_of(error: BaseException, *, retry_after_s: int = 1) -> Problem:
    """The answer to a request that an exception has ended."""
    again = {"Retry-After": str(retry_after_s)}
    message = str(error)
    if isinstance(error, Problem):
        return error
    if isinstance(error, BusyError):
        return Problem(429, f"the server is busy: {message}", code="server_busy", headers=again)
    if isinstance(error, ClosedError):
        return Problem(503, "the server is shutting down", code="shutting_down", headers=again)
    if isinstance(error, RecursionError):
        return Problem(400, "the request is nested too deeply", code="invalid_value")
    if isinstance(error, ContextError):
        return Problem(400, message, code="context_length_exceeded")
    if isinstance(error, UnsupportedError):
        return Problem(400, message, code="unsupported")
    if isinstance(error, PowerInferError) and isinstance(error, ValueError):
        return Problem(400, message, code="invalid_value")
    if isinstance(error, TimeoutError):
        return Problem(503, message, code="timeout", headers=again)
    if isinstance(error, OutOfMemoryError):
        return Problem(503, message, code="out_of_memory", headers=again)
    if isinstance(error, (MemoryError, PowerInferError)):
        return Problem(500, message or "out of memory", code="engine_error")
    return Problem(500, "the server made a mistake; its log says more", code="internal_error")


def _place(where: tuple[Any, ...]) -> str:
    """("body", "stop", "list[str]", 0) -> "stop.0": without the names of the kinds that were tried."""
    words = [str(word) for word in where[1:] if not (isinstance(word, str) and any(c in word for c in "[(-"))]
    return ".".join(word for word in words if word not in ("str", "int", "float", "bool")) or "body"


async def on_invalid(_: Request, error: Exception) -> Response:
    """A body that is JSON but not what the endpoint takes."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    param = _place(first["loc"])
    if first["type"] == "missing" and param == "body":
        return Problem(400, "the body is empty", code="invalid_json").response()
    said = f"{param}: {first['msg']}"
    return Problem(422, said, code=first["type"], param=param).response()


async def on_http(request: Request, error: Exception) -> Response:
    """What the router itself says: no such path, not with this method."""
    assert isinstance(error, HTTPException)
    message = {
        404: f"there is nothing at {shown(request.url.path, 100)}",
        405: f"{shown(request.url.path, 100)} does not take {request.method}",
    }.get(error.status_code, str(error.detail))
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    return Problem(error.status_code, message, code=code, headers=error.headers).response()


async def on_problem(_: Request, error: Exception) -> Response:
    return problem_of(error).response()
