"""What ends a feed before its time: signals, and that the model is closed.

Python runs handlers of signals in the main thread, between two of its own instructions. So Ctrl-C would wait
for the end of a prompt's chunk, which takes seconds on slow machines.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ..errors import ArgumentError, ClosedError
from . import _native

STOP_MS = 200
"""How often the engine lets Python look, in feeds that take longer."""


class Interrupt:
    """Of a session: has the engine call Python between two layers of a feed. In the main thread handlers then
    run, and what one raises ends the feed. In any thread is_over() does."""

    def __init__(self) -> None:
        self._native: Any = None
        self._error: BaseException | None = None
        self.is_over: Callable[[], bool] = bool
        """Whether nobody waits for the feed any more; False by itself."""
        self.batch: Any = None
        """What the main thread feeds just now. Who called watch() resets it himself: a signal could keep a
        method from that."""

    def watch(self, batch: Any) -> None:
        """Before a feed of this batch."""
        if self._native is None:
            self._native = self._callback()
        batch.stop, batch.stop_ms = self._native, STOP_MS
        if threading.current_thread() is threading.main_thread():
            self.batch, self._error = batch, None

    def check_status(self, status: int) -> None:
        """After it: raises what a handler did, even if the feed came to its end, and ClosedError if nobody
        waited for it."""
        if threading.current_thread() is threading.main_thread() and self._error is not None:
            error, self._error = self._error, None
            raise error
        if status == _native.lib.PI_ERROR_STOPPED and self.is_over():
            raise ClosedError("the model is closed")

    def check(self) -> None:
        """Raises ArgumentError in a handler that runs within a feed: the engine would wait for that."""
        if self.batch is not None and threading.current_thread() is threading.main_thread():
            raise ArgumentError("a signal handler cannot use the session that is just computing")

    def _callback(self) -> Any:
        try:
            return _native.ffi.callback("int32_t(void *)", self._look, error=1, onerror=self._note)
        except MemoryError:  # the system allows none that is executable: feeds go on to their ends
            return _native.ffi.NULL

    def _look(self, _ctx: Any) -> int:
        return int(self.is_over())  # handlers run before this

    def _note(self, _kind: object, error: BaseException, _trace: object) -> None:
        """The engine's frames are no place for an exception, which only handlers raise."""
        self._error = error
