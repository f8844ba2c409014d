"""An answer while it is made, between the threads that make it and the task that reads it."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

from ..errors import ClosedError
from .served import Served

Chunk = dict[str, Any]

_UNREAD = 256  # parts that wait for their reader; then no more are made


Item = Chunk | BaseException | None


class _Post:
    """What threads have for an event loop. It is woken once for all that comes before it looks: waking it is
    a system call, for which a thread gives Python's lock away."""

    def __init__(self) -> None:
        self._items: deque[tuple[Parts, Item]] = deque()
        self._is_woken = False

    def put(self, loop: asyncio.AbstractEventLoop, parts: Parts, item: Item) -> None:
        """From any thread. Raises RuntimeError if the loop is closed."""
        self._items.append((parts, item))
        if loop.is_closed() or not self._is_woken:
            self._is_woken = True
            loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._is_woken = False  # first: what is put from here on wakes it again
        while self._items:
            parts, item = self._items.popleft()
            parts.arrived(item)


_posts: WeakKeyDictionary[asyncio.AbstractEventLoop, _Post] = WeakKeyDictionary()
"""One for each loop, and used there to make it."""


class Parts:
    """What threads have made of an answer and nobody has read yet."""

    def __init__(self, requests: Sequence[Served]) -> None:
        self.requests = requests
        self.ready: deque[Item] = deque()
        """Parts that reading does not wait for."""
        self._loop = asyncio.get_running_loop()
        self._post = _posts.setdefault(self._loop, _Post())
        self._reader: asyncio.Future[None] | None = None
        self._lock = threading.Lock()
        self._n_unread = 0
        self._paused: list[Callable[[], object]] = []
        self._gone = False

    def put(self, item: Item, go_on: Callable[[], object] | None = None) -> bool:
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
            self._post.put(self._loop, self, item)
        except RuntimeError:  # the loop is closed: nobody reads any more
            self.cancel()
        return has_room

    def arrived(self, item: Item) -> None:
        self.ready.append(item)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def get(self) -> Item:
        while not self.ready:
            self._reader = self._loop.create_future()
            await self._reader
        item = self.ready.popleft()
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

    def __anext__(self) -> Awaitable[Chunk]:
        return self._stream.__anext__()

    def __del__(self) -> None:
        self._stream.cancel()


class AsyncStream(AsyncIterator[Chunk]):
    """The parts of an answer; `async for` waits for them. Leaving it ends the answer."""

    def __init__(self, parts: Parts, usage: Callable[[], dict[str, Any]]) -> None:
        self._parts = parts
        self._usage = usage
        self._left = len(parts.requests)
        self.before_waiting: Callable[[], Awaitable[None]] | None = None
        """Called where reading would wait: what was gathered until then should go out."""

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
                if self.before_waiting is not None and not self._parts.ready:
                    await self.before_waiting()
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
