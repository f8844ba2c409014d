"""An answer while it is made, between the thread that computes its tokens and the task that reads it.

Tokens wait until the task asks for parts; they become text in its event loop, as many as are there.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any

from .._engine.turn import give_way
from .served import Served
from .usage import say_why, timings, usage

Chunk = dict[str, Any]
Chunks = Iterator[Chunk | None]
"""None: there is nothing at the moment."""

_UNREAD = 256  # parts that a thread has made and nobody read; then it waits


class Pumped(Iterator["Chunk | None"]):
    """Chunks that a thread makes: of a maker that may wait for more than tokens."""

    def __init__(self, chunks: Iterator[Chunk]) -> None:
        self._chunks = chunks
        self._made: SimpleQueue[Chunk | BaseException | None] = SimpleQueue()
        self._room = threading.Semaphore(_UNREAD)
        self._more: Callable[[], object] = lambda: None
        self._is_gone = False

    def run(self) -> None:
        """In the thread."""
        end: BaseException | None = None
        try:
            for chunk in self._chunks:
                self._room.acquire()
                if self._is_gone:
                    break
                self._put(chunk)
        except BaseException as error:
            end = error
        self._put(end)

    def _put(self, item: Chunk | BaseException | None) -> None:
        self._made.put(item)
        self._more()

    def watch(self, more: Callable[[], object]) -> None:
        """more: called when there is some."""
        self._more = more

    def __next__(self) -> Chunk | None:
        if self._made.empty():
            return None
        item = self._made.get()
        if item is None:
            raise StopIteration
        if isinstance(item, BaseException):
            raise item
        self._room.release()
        return item

    def close(self) -> None:
        """Nobody reads any more."""
        self._is_gone = True
        self._room.release()


class _Post:
    """Whom other threads have something for, in an event loop. It is woken once for all who come before it
    looks, and by a thread of its own: that is a system call, for which Python's lock is given away, and the
    thread that computes would wait for it before its next step."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._waiting: deque[Parts] = deque()
        self._is_woken = False
        self._wake: SimpleQueue[asyncio.AbstractEventLoop | None] = SimpleQueue()
        threading.Thread(target=self._run, name="powerinfer-waker", daemon=True).start()
        weakref.finalize(loop, self._wake.put, None).atexit = False

    def put(self, loop: asyncio.AbstractEventLoop, parts: Parts) -> None:
        """From any thread."""
        self._waiting.append(parts)
        if not self._is_woken:
            self._is_woken = True
            self._wake.put(loop)

    def _run(self) -> None:
        while (loop := self._wake.get()) is not None:
            try:
                loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # it is closed: nobody reads any more
                self._is_woken = False
                while self._waiting:
                    self._waiting.popleft().end()
            del loop  # which is not kept by this

    def _deliver(self) -> None:
        self._is_woken = False  # first: what is put from here on wakes it again
        while self._waiting:
            self._waiting.popleft().arrived()


_posts: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Post] = weakref.WeakKeyDictionary()
"""One for each loop, and used there to make it."""


class Parts:
    """Answers, each from what has its parts; used in one event loop, but for end()."""

    def __init__(
        self,
        requests: Sequence[Served],
        answers: Sequence[Chunks],
        over: Callable[[Served], object],
    ) -> None:
        """over: called with each request at its end."""
        self._loop = asyncio.get_running_loop()
        self._post = _posts.get(self._loop) or _posts.setdefault(self._loop, _Post(self._loop))
        self._reader: asyncio.Future[None] | None = None
        self.has_come = False
        """Whether more came since take() looked, while nobody waited."""
        self._over = over
        self._requests = list(requests)
        self._left = deque(zip(range(len(requests)), requests, answers, strict=True))
        self._names: Chunk = {}  # the first answer's id and time, for all
        for request, chunks in zip(requests, answers, strict=True):
            (chunks if isinstance(chunks, Pumped) else request).watch(self._more)

    def _more(self) -> None:
        """From another thread."""
        self._post.put(self._loop, self)

    def arrived(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
        else:
            self.has_come = True

    @property
    def is_over(self) -> bool:
        """Nothing more comes."""
        return not self._left

    @property
    def usage(self) -> Chunk:
        return usage(self._requests)

    def take(self) -> Chunk | None:
        """A part, of one answer after the other; None: there is none yet, or all are over. Raises what an
        answer failed with."""
        give_way()
        self.has_come = False
        for _ in range(len(self._left)):
            i, request, chunks = self._left[0]
            try:
                chunk = next(chunks)
            except StopIteration:
                self._left.popleft()
                self._over(request)
                continue
            self._left.rotate(-1)
            if chunk is not None:
                return self._named(i, request, chunk)
        return None

    def _named(self, i: int, request: Served, chunk: Chunk) -> Chunk:
        """With what only all answers together know."""
        say_why(request, chunk)
        names = self._names
        if not names:
            names.update(id=chunk["id"], created=chunk["created"])
        chunk.update(names)
        for choice in chunk["choices"]:
            choice["index"] = i
            if choice["finish_reason"] is not None:
                chunk["timings"] = timings([request])
        return chunk

    async def wait(self) -> None:
        """Until there may be more than take() saw."""
        if self.has_come:
            return
        self._reader = self._loop.create_future()
        await self._reader

    def end(self) -> None:
        """Ends the answers: their places are free before the next step. From any thread."""
        left = self._left.copy()
        self._left.clear()
        for _, request, chunks in left:
            if isinstance(chunks, Pumped):
                chunks.close()
            self._over(request)


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

    def __init__(self, parts: Parts) -> None:
        self._parts = parts  # which does not know the stream: it ends where nobody has it any more
        self.before_waiting: Callable[[], Awaitable[None]] | None = None
        """Called where reading would wait: what was gathered until then should go out."""

    @property
    def usage(self) -> dict[str, Any]:
        """Token counts so far, in OpenAI's shape."""
        return self._parts.usage

    @property
    def is_over(self) -> bool:
        """Nothing more comes."""
        return self._parts.is_over

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return _Reader(self)

    async def __anext__(self) -> Chunk:
        parts = self._parts
        try:
            while not parts.is_over:
                chunk = parts.take()
                if chunk is not None:
                    return chunk
                if self.before_waiting is not None and not parts.is_over:
                    await self.before_waiting()
                if not parts.is_over:
                    await parts.wait()
        except BaseException:  # the task that reads was cancelled, or the answer failed
            self.cancel()
            raise
        raise StopAsyncIteration

    def cancel(self) -> None:
        """Ends the answer: its place is free before the next step."""
        if not self._parts.is_over:
            self._parts.end()

    async def aclose(self) -> None:
        """The same: what ends an asynchronous iterator."""
        self.cancel()

    def __del__(self) -> None:
        self.cancel()
