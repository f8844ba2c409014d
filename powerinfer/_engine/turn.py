"""Who computes goes first.

Between two steps a GPU has nothing to do until Python has made the next one ready, and whoever has Python's
lock keeps that waiting. So the thread that steps an engine takes its turn from the end of one call of the
engine to the beginning of the next, and others, who know good moments for it, give way meanwhile.
"""

from __future__ import annotations

import threading
import time

LONGEST_S = 0.002  # between two steps; what takes longer is somebody's hooks, for which nobody waits


class Turn:
    """Of one thread, which is between two calls of the engine, but for `with turn:`, that is in one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # of the thread that has its turn; others only look at it
        self.is_taken = False
        self._until = 0.0

    def __enter__(self) -> None:
        self.leave()

    def __exit__(self, *exc: object) -> None:
        self._until = time.monotonic() + LONGEST_S
        while not self._lock.acquire(timeout=LONGEST_S):
            self._lock = (
                threading.Lock()
            )  # an exception in another thread's wait(), a signal's, left it locked
        self.is_taken = True

    def leave(self) -> None:
        """Nothing is to be computed next."""
        if self.is_taken:
            self.is_taken = False
            self._lock.release()

    def wait(self) -> None:
        """In another thread: until it is over, or takes too long."""
        lock = self._lock
        is_taken = lock.locked() and (left := self._until - time.monotonic()) > 0
        if is_taken and lock.acquire(timeout=left):
            lock.release()


_turns: tuple[Turn, ...] = ()
_changing = threading.Lock()


def begin() -> Turn:
    """One that others give way to from now on."""
    global _turns
    turn = Turn()
    with _changing:
        _turns = (*_turns, turn)
    return turn


def end(turn: Turn) -> None:
    """They do no longer."""
    global _turns
    turn.leave()
    with _changing:
        _turns = tuple(other for other in _turns if other is not turn)


def give_way() -> None:
    """Lets those go first whose turn it is. By no thread that others wait for, and with no lock held."""
    for turn in _turns:
        turn.wait()
