"""Streams: an answer while it is made. The client that goes away ends it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from .._engine.turn import give_way
from ..async_llama import AsyncStream
from .problems import encode_part, problem_of

T = TypeVar("T")

EVENTS = "text/event-stream"

_MOST_BYTES = 8 << 10  # that are written at once
_LOOKS = 4  # at a client that should read, in the time for it

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
    return b"data: " + encode_part(value) + b"\n\n"


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
        self._gathered = bytearray()
        self._n_sent = 0
        self._is_sending = False

    async def _send(self, send: Send, message: Message) -> None:
        self._is_sending = True
        await send(message)
        self._is_sending = False
        self._n_sent += 1

    async def _write(self, send: Send) -> None:
        """Frames are written as soon as no more are there, so several at once where the client or this
        process is slower than the answer."""

        async def flush() -> None:
            if self._gathered:
                data, self._gathered = bytes(self._gathered), bytearray()
                await self._send(send, {"type": "http.response.body", "body": data, "more_body": True})

        give_way()
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await self._send(send, start)
        self._stream.before_waiting = flush
        async for data in self._frames:
            self._gathered += data
            if len(self._gathered) >= _MOST_BYTES:
                await flush()
        body = bytes(self._gathered)
        await self._send(send, {"type": "http.response.body", "body": body, "more_body": False})

    async def _unread(self) -> None:
        """Until the client has read nothing for too long: it must not hold a connection for ever."""
        n_looks, n_sent = 0, 0
        while n_looks < _LOOKS:
            await asyncio.sleep(self._write_timeout_s / _LOOKS)
            n_looks = n_looks + 1 if self._is_sending and n_sent == self._n_sent else 0
            n_sent = self._n_sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        write, gone = asyncio.ensure_future(self._write(send)), asyncio.ensure_future(_gone(receive))
        unread = asyncio.ensure_future(self._unread())
        try:
            await asyncio.wait({write, gone, unread}, return_when=asyncio.FIRST_COMPLETED)
            if write.done():
                write.result()
            elif unread.done():
                _log.warning("a client has stopped reading its answer: the connection is closed")
        finally:
            self._stream.cancel()
            self._stream.before_waiting = None
            for task in (write, gone, unread):
                task.cancel()
            if self._done is not None:
                self._done()
