"""Streams: an answer while it is made. The client that goes away ends it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..async_llama import AsyncStream
from .problems import encode, problem_of

T = TypeVar("T")

EVENTS = "text/event-stream"

_log = logging.getLogger("uvicorn.error")


class Gone(Exception):
    """The client has closed the connection."""


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """What `work` gives; it is cancelled, and Gone raised, when the client goes away."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request.receive))
    task.add_done_callback(lambda task: task.cancelled() or task.exception())  # which nobody may ask for
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Gone
        return task.result()
    finally:
        gone.cancel()
        task.cancel()


async def openai_events(stream: AsyncStream, *, usage: bool) -> AsyncIterator[bytes]:
    """A stream as events, ended by [DONE], or by an error where one happens on the way. usage: as OpenAI's
    include_usage."""
    last = None
    try:
        async for chunk in stream:
            last = chunk
            yield event(chunk | {"usage": None} if usage else chunk)
        if usage and last is not None:
            yield event(last | {"choices": [], "usage": stream.usage})
    except Exception as error:
        yield event(problem_of(error).body)
    yield b"data: [DONE]\n\n"


def event(value: Any) -> bytes:
    return b"data: " + encode(value) + b"\n\n"


def named_event(value: dict[str, Any]) -> bytes:
    """With its type as the name."""
    return f"event: {value['type']}\n".encode() + event(value)


class EventStream(Response):
    """An answer while it is made, in the form of a protocol."""

    def __init__(
        self,
        stream: AsyncStream,
        frames: AsyncIterator[bytes],
        *,
        write_timeout_s: float,
        media_type: str = EVENTS,
        done: Callable[[], None] | None = None,
    ) -> None:
        """frames: what is written of the stream. done: called at the end."""
        super().__init__(media_type=media_type, headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._stream = stream
        self._frames = frames
        self._write_timeout_s = write_timeout_s
        self._done = done

    async def _write(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await asyncio.wait_for(send(start), self._write_timeout_s)
        async for data in self._frames:
            message = {"type": "http.response.body", "body": data, "more_body": True}
            # A client that does not read must not hold a connection for ever.
            await asyncio.wait_for(send(message), self._write_timeout_s)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        write, gone = asyncio.ensure_future(self._write(send)), asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({write, gone}, return_when=asyncio.FIRST_COMPLETED)
            if write.done():
                write.result()
        except asyncio.TimeoutError:
            _log.warning("a client has stopped reading its answer: the connection is closed")
        finally:
            self._stream.cancel()
            gone.cancel()
            write.cancel()
            if self._done is not None:
                self._done()
