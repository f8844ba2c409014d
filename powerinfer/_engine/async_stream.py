"""An answer while it is made, between the threads that make it and the task that reads it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import Any

from ..errors import ClosedError
from .served import Served

Chunk = dict[str, Any]

_UNREAD = 256  # parts that wait for their reader; then no more are made


class Parts:
    """What threads have made of an answer and nobody has read yet."""

    def __init__(self, requests: Sequence[Served]) -> None:
        self.requests = requests
        self.queue: asyncio.Queue[Chunk | BaseException | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._n_unread = 0
        self._paused: list[Callable[[], object]] = []
        self._gone = False

    def put(self, item: Chunk | BaseException | None, go_on: Callable[[], object] | None = None) -> bool:
        """From another thread: a part; None: one of the answers is complete. False: enough are unread, and
        go_on is called when there is room for more, or they are not wanted any more."""
        with self._lock:
            if self._gone:
                return True
            self._n_unread += 1
            has_room = go_on is None or self._n_unread < _UNREAD
            if go_on is not None and not has_room:
                self._paused.append(go_on)
        try:
            self._loop.call_soon_threadsafe(self.queue.put_nowait, item)
        except RuntimeError:  # the loop is closed: nobody reads any more
            self.cancel()
        return has_room

    async def get(self) -> Chunk | BaseException | None:
        item = await self.queue.get()
        with self._lock:
            self._n_unread -= 1
            paused = self._paused if self._n_unread <= _UNREAD // 2 else []
            self._paused = [] if paused else self._paused
        self._resume(paused)
        return item

    def cancel(self) -> None:
        with self._lock:
            self._gone = True
            paused, self._paused = self._paused, []
        for request in self.requests:
            request.cancel()
        self._resume(paused)

    @staticmethod
    def _resume(paused: Sequence[Callable[[], object]]) -> None:
        for go_on in paused:
            with suppress(ClosedError):
                go_on()


class _Reader(AsyncIterator[Chunk]):
    """What `async for` holds, and drops when it is left."""

    def __init__(self, stream: AsyncStream) -> None:
        self._stream = stream

    async def __anext__(self) -> Chunk:
        return await self._stream.__anext__()

    def __del__(self) -> None:
        self._stream.cancel()


class AsyncStream(AsyncIterator[Chunk]):
    """The parts of an answer; `async for` waits for them. Leaving it ends the answer."""

    def __init__(self, parts: Parts, usage: Callable[[], dict[str, Any]]) -> None:
        self._parts = parts
        self._usage = usage
        self._left = len(parts.requests)

    @property
    def usage(self) -> dict[str, Any]:
        """Token counts so far, in OpenAI's shape."""
        return self._usage()

    @property
    def is_over(self) -> bool:
        """Nothing more comes."""
        return not self._left

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return _Reader(self)

    async def __anext__(self) -> Chunk:
        while self._left:
            try:
                item = await self._parts.get()
                if isinstance(item, BaseException):
                    raise item
            except BaseException:  # the task that reads was cancelled, or the answer failed
                self.cancel()
                raise
            if item is not None:
                return item
            self._left -= 1
        raise StopAsyncIteration

    def cancel(self) -> None:
        """Ends the answer: its place is free before the next step."""
        if self._left:
            self._left = 0
            self._parts.cancel()

    async def aclose(self) -> None:
        """The same: what ends an asynchronous iterator."""
        self.cancel()

    def __del__(self) -> None:
        self.cancel()
