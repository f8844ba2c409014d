"""Bodies as JSON: what reading one costs is known before it is read.

Reading JSON holds Python's lock: nothing else happens meanwhile, no step of the engine either. A megabyte of
text takes a millisecond, a megabyte of brackets half a second. So the marks outside of strings are counted
first, by numpy, which holds no lock.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import ValidationError

from .aside import aside
from .problems import Problem
from .schemas import Body, validated

VALUE = "powerinfer.json"
"""Where the value of the body is in an ASGI scope."""

IS_SHORT = "powerinfer.short"
"""Whether the body is checked at once."""

MAX_DEPTH = 100
MAX_VALUES = 400_000
MAX_CONTAINERS = 10_000
SMALL_BYTES = 8 << 10  # read and checked at once
_PART = 1 << 18

Bytes = npt.NDArray[np.uint8]


async def parsed(body: bytes) -> Any:
    """The value of a body. Raises Problem unless it is JSON whose texts are Unicode."""
    return _parse(body) if len(body) <= SMALL_BYTES else await aside(_parse, body)


def _parse(body: bytes) -> Any:
    try:
        depth, n_values, n_containers = (0, 0, 0) if _is_small(body) else cost(body)
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested too deeply: {depth} levels, at most {MAX_DEPTH} are read")
        if n_values > MAX_VALUES or n_containers > MAX_CONTAINERS:
            raise ValueError(
                f"it has {n_values} values, {n_containers} of them lists or objects: too many "
                f"(at most {MAX_VALUES} and {MAX_CONTAINERS})"
            )
        value: Any = json.loads(body.decode("utf-8-sig"), parse_constant=_no_number)
        if b"\\u" in body:  # halves of surrogate pairs come in no other way
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        return value
    except (ValueError, RecursionError) as error:
        said = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise Problem(400, f"the body is not valid JSON: {said}", code="invalid_json") from None


def _is_small(body: bytes) -> bool:
    """Whether its cost is within the limits whatever it is."""
    return len(body) <= SMALL_BYTES and body.count(b"[") + body.count(b"{") <= MAX_DEPTH


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON number")


def cost(body: bytes) -> tuple[int, int, int]:
    """How deeply JSON is nested, how many values it has at most, and how many of them hold others. Of what is
    no JSON, anything."""
    deepest = depth = n_values = n_containers = 0
    in_string, n_backslashes = False, 0  # at the end of the part before
    for at in range(0, len(body), _PART):
        data = np.frombuffer(body, np.uint8, min(_PART, len(body) - at), at)
        inside, in_string, n_backslashes = _strings(data, in_string, n_backslashes)
        outside = ~inside
        opens = ((data == 0x5B) | (data == 0x7B)) & outside  # [ {
        closes = ((data == 0x5D) | (data == 0x7D)) & outside
        levels = np.cumsum(opens.astype(np.int32) - closes)
        deepest = max(deepest, depth + int(levels.max()))
        depth += int(levels[-1])
        n_containers += int(np.count_nonzero(opens))
        n_values += int(np.count_nonzero((data == 0x2C) & outside))
    return deepest, n_values + n_containers + 1, n_containers


def _strings(data: Bytes, in_string: bool, n_backslashes: int) -> tuple[npt.NDArray[np.bool_], bool, int]:
    """Which bytes are in strings, and the state at the end."""
    quotes = np.flatnonzero(data == 0x22)
    is_backslash = data == 0x5C
    if n_backslashes or is_backslash.any():
        # For each byte the last one before it that is no backslash: between them stand those that count.
        others = np.where(is_backslash, -1 - n_backslashes, np.arange(data.size))
        last = np.maximum.accumulate(others)
        before = np.concatenate([[-1 - n_backslashes], last[:-1]])
        escaped = (quotes - 1 - before[quotes]) % 2 == 1
        quotes = quotes[~escaped]
        n_backslashes = data.size - 1 - int(last[-1])
    else:
        n_backslashes = 0
    flips = np.zeros(data.size, np.uint8)
    flips[quotes] = 1
    inside = (np.cumsum(flips, dtype=np.int64) + in_string) % 2 == 1
    return inside, bool(inside[-1]), n_backslashes


class _Request(Request):
    made: Body | None = None
    """What the endpoint takes, if it was made already."""

    async def json(self) -> Any:
        if self.made is not None:
            return self.made
        return self.scope[VALUE] if VALUE in self.scope else await super().json()


def _made(kind: type[Body], value: Any) -> Body | None:
    """None where it is wrong, which FastAPI will say."""
    try:
        return validated(kind, value) if isinstance(value, dict) else None
    except ValidationError:
        return None


class Route(APIRoute):
    """A route that takes the value that was read already. A long one is checked beside the event loop."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        handle = super().get_route_handler()
        kind = self.body_field.field_info.annotation if self.body_field is not None else None

        async def with_value(request: Request) -> Response:
            own = _Request(request.scope, request.receive)
            takes_body = isinstance(kind, type) and issubclass(kind, Body) and VALUE in request.scope
            if takes_body and len(await own.body()) > SMALL_BYTES:
                own.made = await aside(_made, kind, request.scope[VALUE])
            response: Response = await handle(own)
            return response

        return with_value
