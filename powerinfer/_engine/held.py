"""The sequences of one session that a scheduler deals out: which are in use, and what the idle ones hold.

A sequence that is no longer used keeps its tokens until its number or its memory is wanted: a later prompt
that begins the same way shares their K and V instead of computing them again.
"""

from __future__ import annotations

import numpy as np

from ._native import KV_BLOCK, reusable_prefix
from .context import Ids, common_prefix
from .session import Session

_WORTH = 16
"""Fewer tokens are computed sooner than the block that they would share is copied."""


def blocks(n: int) -> int:
    """Blocks that n positions take."""
    return -(-n // KV_BLOCK)


class Sequence:
    """One sequence of the session: the first n of ids are held."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.ids: Ids = np.empty(0, np.int32)
        self.n = 0
        self.n_prompt = 0
        """Of the prompt that it began with."""
        self.n_shared: int | None = None
        """How many of these may be shared; None: all. What a context shift has moved was computed after
        tokens that are no longer there."""
        self.is_used = False
        self.last_used = 0


class HeldSequences:
    """The first n_seq sequences of a session. Not thread-safe."""

    def __init__(self, session: Session, *, n_seq: int, n_evicted: int = 0) -> None:
        self._session = session
        self._all = [Sequence(i) for i in range(n_seq)]
        self._clock = 0
        self.n_evicted = n_evicted
        """Idle sequences that were forgotten because their place was wanted."""

    def find(self, ids: Ids, n_prompt: int) -> tuple[Sequence | None, int]:
        """The sequence that holds most of the beginning of ids, whose first n_prompt are a prompt, and how
        many; fewer than all of them, since the last has to be computed. No more of a prompt than was
        computed as for this one."""
        best, most = None, _WORTH - 1
        for sequence in self._all:
            if sequence.n > most:
                same = common_prefix(sequence.ids[: sequence.n][: sequence.n_shared], ids)
                n = reusable_prefix(min(same, ids.size - 1), sequence.n_prompt, n_prompt)
                if n > most:
                    best, most = sequence, n
        return best, most if best is not None else 0

    def take(self, ids: Ids, n_prompt: int, source: Sequence | None, n: int) -> Sequence | None:
        """A sequence for ids that holds the first n of them, which source holds; None if all are in use.

        ids is kept, not copied: what is computed later is written to it before `n` says so.
        """
        if source is not None and not source.is_used and source.n == n:
            taken = source
        else:
            free = [s for s in self._all if not s.is_used and s is not source]
            if free:
                taken = min(free, key=lambda s: (s.n > 0, s.last_used))
                self.n_evicted += taken.n > 0
            elif source is not None and not source.is_used:
                taken = source
                self._session.cut(n, seq=taken.number)
            else:
                return None
        if taken is not source:
            if source is None:
                self._session.drop(taken.number)
            else:
                self._session.copy(taken.number, source.number, n)
        goes_on = source is not None and n >= source.n_prompt
        taken.n_prompt = source.n_prompt if source is not None and goes_on else n_prompt
        taken.ids, taken.n, taken.is_used = ids, n, True
        taken.n_shared = None
        return taken

    def release(self, sequence: Sequence) -> None:
        """The sequence is idle: it may be found, shared and forgotten."""
        self._clock += 1
        sequence.is_used, sequence.last_used = False, self._clock

    def drop(self, sequence: Sequence) -> None:
        """Forgets a sequence."""
        sequence.is_used, sequence.n = False, 0
        self._session.drop(sequence.number)

    def evict(self, *, keep: Sequence | None = None) -> bool:
        """Forgets the idle sequence that was used longest ago; False if there is none but `keep`."""
        idle = [s for s in self._all if not s.is_used and s.n and s is not keep]
        if not idle:
            return False
        self.drop(min(idle, key=lambda s: s.last_used))
        self.n_evicted += 1
        return True

    def drop_all(self) -> None:
        """Forgets everything."""
        for sequence in self._all:
            self.drop(sequence)
