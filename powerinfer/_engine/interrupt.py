"""Signals that come while the engine computes.

Python runs their handlers in the main thread, between two of its own instructions. So Ctrl-C would wait for
the end of a prompt's chunk, which takes seconds on slow machines.
"""

from __future__ import annotations

import threading
from typing import Any

from ..errors import ArgumentError
from . import _native

STOP_MS = 200
"""How often the engine lets Python look, in feeds that take longer."""


class Interrupt:
    """Of a session: has the engine call Python between two layers of a feed, where handlers then run. What
    one raises ends it."""

    def __init__(self) -> None:
        self._native: Any = (
            None  # a system may refuse the memory for it, which only feeds of this thread need
        )
        self._error: BaseException | None = None
        self.batch: Any = None
        """What the main thread feeds just now. Who called watch() resets it himself: a signal could keep a
        method from that."""

    def watch(self, batch: Any) -> None:
        """Before a feed of this batch. In other threads than the main one nothing has to be looked for."""
        if threading.current_thread() is threading.main_thread():
            if self._native is None:
                self._native = self._callback()
            batch.stop, batch.stop_ms, self._error = self._native, STOP_MS, None
            self.batch = batch

    def _callback(self) -> Any:
        try:
            return _native.ffi.callback("int32_t(void *)", self._look, error=1, onerror=self._note)
        except MemoryError:  # none that is writable and executable: signals wait for the end of a feed
            return _native.ffi.NULL

    def check_error(self) -> None:
        """After it: raises what a handler did, even if the feed came to its end."""
        if threading.current_thread() is threading.main_thread() and self._error is not None:
            error, self._error = self._error, None
            raise error

    def check(self) -> None:
        """Raises ArgumentError in a handler that runs within a feed: the engine would wait for that."""
        if self.batch is not None and threading.current_thread() is threading.main_thread():
            raise ArgumentError("a signal handler cannot use the session that is just computing")

    def _look(self, _ctx: Any) -> int:
        return 0  # handlers run before this

    def _note(self, _kind: object, error: BaseException, _trace: object) -> None:
        """The engine's frames are no place for an exception."""
        self._error = error
