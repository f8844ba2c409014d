"""Fields that nobody here knows: left out of account and named in a header, or refused by a strict server."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from functools import wraps
from typing import Any
from urllib.parse import quote

from starlette.responses import Response

from .aside import aside_if
from .problems import Problem
from .schemas import PART, Body

HEADER = "X-Ignored-Fields"
SAID = "fields of requests are left out of account"

_MAX_NAMES = 16
_MAX_LENGTH = 48
_MAX_LOGGED = 64

_log = logging.getLogger("uvicorn.error")
_ignored: ContextVar[list[str]] = ContextVar("ignored")


def ignore(name: str) -> None:
    """Notes that a part of the request under way is left out of account."""
    _ignored.get([]).append(name)


def _strangers(body: Body, where: str = "") -> Iterator[str]:
    """Names of the fields that a body has and its endpoint does not know."""
    yield from (where + name for name in body.model_extra or ())
    for name, value in vars(body).items():  # by far the quickest way to thousands of messages
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, Body):
                yield from _strangers(part, f"{where}{name}.")


def _is_long(body: Body) -> bool:
    return any(isinstance(value, list) and len(value) > PART for value in vars(body).values())


def _all_strangers(bodies: list[Body]) -> list[str]:
    return [name for body in bodies for name in _strangers(body)]


def _told(names: list[str]) -> str:
    # An empty name needs a sign: a header's value must not end with a space.
    safe = "!#$&'()*+-./:;<=>?@[]^_`{|}~"
    shown = [quote(name[:_MAX_LENGTH], safe=safe) or '""' for name in names[:_MAX_NAMES]]
    return ", ".join(shown) + (f", and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else "")


def lenient(call: Callable[..., Awaitable[Response]], strict: bool) -> Callable[..., Awaitable[Response]]:
    """An endpoint whose answers name what was ignored. strict: such requests are refused instead."""
    logged: set[str] = set()

    @wraps(call)
    async def run(*args: Any, **kwargs: Any) -> Response:
        bodies = [
            part
            for value in kwargs.values()
            for part in (value if isinstance(value, list) else [value])
            if isinstance(part, Body)
        ]
        names = await aside_if(any(map(_is_long, bodies)), _all_strangers, bodies)
        if names and strict:
            name = names[0][:_MAX_LENGTH]
            raise Problem(422, f"{name}: there is no such field", code="extra_forbidden", param=name)
        _ignored.set(names)
        response = await call(*args, **kwargs)
        if names:
            told = response.headers[HEADER] = _told(names)
            if told not in logged and len(logged) < _MAX_LOGGED:
                logged.add(told)
                _log.warning("%s: %s", SAID, told)
        return response

    run.__signature__ = inspect.signature(call, eval_str=True)  # type: ignore[attr-defined]
    return run
