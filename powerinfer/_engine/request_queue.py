"""Who is under way and who waits for a place: what any thread may ask an engine, and the lock for it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..errors import BusyError, ClosedError
from .request import Reason, Request, Stream

_MANY = 4  # times as many generate


class RequestQueue:
    """The requests of one engine. Any thread may call its methods."""

    def __init__(self, max_running: int, max_waiting: int | None) -> None:
        """max_waiting: more are refused; None: any number may wait."""
        self.max_running = max_running
        self.max_waiting = max_waiting
        self.changed = threading.Condition()
        """Notified when a request comes or is cancelled, and when the engine is closed."""
        self.waiting: deque[Request] = deque()  # with the lock
        self.running: list[Request] = []  # of who steps; others read its length
        self.is_closing = False
        """No new requests are taken."""
        self._ends_at = 0.0
        self._disturbed: Callable[[bool], object] | None = None

    @property
    def n_places(self) -> int:
        """That nobody has."""
        return max(self.max_running - len(self.running), 0)

    @property
    def has_room(self) -> bool:
        """Whether add() takes another request at the moment."""
        return self.max_waiting is None or len(self.waiting) < self.max_waiting + self.n_places

    @property
    def is_over(self) -> bool:
        """Whether those under way have had the time that close() gave them."""
        return self.is_closing and time.monotonic() >= self._ends_at

    def add(self, request: Request) -> None:
        """Takes a request, which waits for its place. Raises ClosedError, BusyError."""
        with self.changed:
            if self.is_closing:
                raise ClosedError("the model is closed")
            if not self.has_room:
                raise BusyError(
                    f"{len(self.running)} requests are under way and {len(self.waiting)} are waiting"
                )
            self.waiting.append(request)
            if self._disturbed is not None and self.n_places:
                self._disturbed(request.is_text or self._are_many)
            self.changed.notify_all()

    @contextmanager
    def undisturbed(
        self, disturbed: Callable[[bool], object], *, may_wait: bool, n_later: int = 0
    ) -> Iterator[bool]:
        """Whether nobody who waits is to have a place, and nobody under way is to leave. From then on, until
        the `with` ends, disturbed() is called when that changes; deadlines are left out of account.

        may_wait: those who wait now do it for others who come, until they are many.
        n_later: so many of those who wait do it until a part of a prompt is read.
        disturbed: its argument is whether that is over, too, or somebody has left.
        """
        with self.changed:
            is_left = any(request.stream.is_cancelled for request in self.running)
            is_wanted = len(self.waiting) > n_later and self.n_places and (not may_wait or self._are_many)
            is_undisturbed = not (self.is_closing or is_left or is_wanted)
            self._disturbed = disturbed if is_undisturbed else None
        try:
            yield is_undisturbed
        finally:
            with self.changed:
                self._disturbed = None

    @property
    def _are_many(self) -> bool:
        """Whether those who wait could do more meanwhile than is gained where all are read together."""
        return len(self.waiting) * _MANY >= len(self.running)

    def together_until(self, patience_s: float) -> float:
        """Of time.monotonic(): until when those who wait for a place do it for others, so that their prompts
        are read together, each for so many seconds; 0: they do not."""
        with self.changed:
            if self._are_many or any(request.is_text or request.is_counted for request in self.waiting):
                return 0.0
            return min((request.came_at for request in self.waiting), default=0.0) + patience_s

    def start(self, request: Request) -> bool:
        """It leaves those that wait for those under way; False if it was cancelled meanwhile."""
        with self.changed:
            if request not in self.waiting:
                return False
            self.waiting.remove(request)
            self.running.append(request)
            return True

    def put_back(self, request: Request) -> bool:
        """One that is under way waits again, at the head of the line; False where no more are taken."""
        self.running.remove(request)
        with self.changed:
            if not self.is_closing:
                self.waiting.appendleft(request)
            return not self.is_closing

    def cancel(self, stream: Stream) -> Request | None:
        """Marks a request, which is returned if it was waiting and waits no more."""
        with self.changed:
            if stream.reason is not None:
                return None
            stream.is_cancelled = True
            request = next((request for request in self.waiting if request.stream is stream), None)
            if request is not None:
                self.waiting.remove(request)
            elif self._disturbed is not None:
                self._disturbed(True)
            self.changed.notify_all()
            return request

    def take_late(self, now: float) -> list[tuple[Request, Reason]]:
        """Of those that wait, the ones whose time is over, and those that were cancelled while they gave way
        to others; they wait no more."""
        with self.changed:
            late = [r for r in self.waiting if r.deadline is not None and now >= r.deadline]
            left = [r for r in self.waiting if r.stream.is_cancelled and r not in late]
            for request in (*late, *left):
                self.waiting.remove(request)
        return [*((request, "time") for request in late), *((request, "cancelled") for request in left)]

    def take_waiting(self) -> list[Request]:
        """All that wait, and wait no more."""
        with self.changed:
            waiting = list(self.waiting)
            self.waiting.clear()
            return waiting

    def close(self, grace_s: float) -> list[Request]:
        """Takes no more. Returns those that waited."""
        with self.changed:
            if not self.is_closing or time.monotonic() + grace_s < self._ends_at:
                self._ends_at = time.monotonic() + grace_s
            self.is_closing = True
            if self._disturbed is not None:
                self._disturbed(True)
            self.changed.notify_all()
            return self.take_waiting()
