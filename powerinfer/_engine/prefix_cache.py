"""The sequences of one session that an engine deals out: which are in use, and what the idle ones hold.

A sequence that is no longer used keeps its tokens until its number or its memory is wanted: a later prompt
that begins the same way shares their K and V instead of computing them again.
"""

from __future__ import annotations

from contextlib import suppress

import numpy as np

from ..errors import PowerInferError
from ._native import KV_BLOCK
from .arrays import Ids, common_prefix
from .session import Session

_WORTH = 16
"""Fewer tokens are computed sooner than the block that they would share is copied."""


def blocks(n: int) -> int:
    """Blocks that n positions take."""
    return -(-n // KV_BLOCK)


def drop_ids(ids: Ids, n: int, keep: int, n_drop: int) -> None:
    """Of the first n ids those at keep..keep+n_drop-1 go, and the rest moves down."""
    ids[keep : n - n_drop] = ids[keep + n_drop : n].copy()


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
        self.row: tuple[int, int] | None = None
        """The engine's step and the row of its logits that follow the last token; None: there are none."""
        self.n_coming = 0
        """While tokens are computed: how many it will hold then."""
        self.is_torn = False
        """Ids and session are being changed together."""

    def shifted(self, keep: int, n_drop: int) -> None:
        """A context shift has dropped n_drop tokens behind the first `keep`; ids are moved already."""
        self.n -= n_drop
        self.n_prompt = min(self.n_prompt, keep)
        self.n_shared = keep if self.n_shared is None else min(self.n_shared, keep)
        self.row = None


class PrefixCache:
    """The first n_seq sequences of a session. Not thread-safe."""

    def __init__(self, session: Session, *, n_seq: int, n_evicted: int = 0) -> None:
        self.session = session
        self.all = [Sequence(i) for i in range(n_seq)]
        self._clock = 0
        self.n_evicted = n_evicted
        """Idle sequences that were forgotten because their place was wanted."""

    def find(self, ids: Ids, n_prompt: int, place: Sequence | None = None) -> tuple[Sequence | None, int]:
        """The sequence that holds most of the beginning of ids, whose first n_prompt are a prompt, and how
        many; fewer than all of them, since the last has to be computed. No more of a prompt than was
        computed as for this one, and what layers with a window can go on from. place: the only one
        that is looked at."""
        best, most = None, _WORTH - 1 if place is None else 0
        if ids.size - 1 <= most:
            return None, 0
        for sequence in self.all if place is None else [place]:
            if min(sequence.n, ids.size - 1) <= most:
                continue
            same = common_prefix(sequence.ids[: sequence.n][: sequence.n_shared], ids[:-1])
            if same <= most:  # without a call of the engine: others would have Python's lock meanwhile
                continue
            n = self.session.reusable_prefix(same, sequence.n_prompt, n_prompt, seq=sequence.number)
            if n > most:
                best, most = sequence, n
        return best, most if best is not None else 0

    def branch(self, ids: Ids) -> int:
        """How many of ids are also the first of what some sequence holds, where layers have states: a
        checkpoint is wanted there. Elsewhere 0."""
        if not self.session.model.info.n_recurrent:
            return 0
        held = (sequence.ids[: sequence.n][: sequence.n_shared] for sequence in self.all)
        return max((common_prefix(own, ids) for own in held), default=0)

    def take(
        self, ids: Ids, n_prompt: int, source: Sequence | None, n: int, place: Sequence | None = None
    ) -> Sequence | None:
        """A sequence for ids that holds the first n of them, which source holds; None if all are in use.
        place: the one that it must be, and source.

        ids is kept, not copied: what is computed later is written to it before `n` says so.
        """
        if source is not None and not source.is_used and source.n == n:
            taken = source
        else:
            free = [s for s in self.all if not s.is_used and s is not source]
            if place is not None:
                taken = place
                self.session.cut(n, seq=taken.number)
            elif free:
                taken = next((s for s in free if not s.n), None) or min(free, key=lambda s: s.last_used)
                self.n_evicted += taken.n > 0
            elif source is not None and not source.is_used:
                taken = source
                self.session.cut(n, seq=taken.number)
            else:
                return None
        if taken is not source and place is None:
            if source is None:
                self.session.drop(taken.number)
            else:
                self.session.copy(taken.number, source.number, n)
        taken.n_prompt = n_prompt if source is None or n < source.n_prompt else source.n_prompt
        is_moved = source is not None and source.n_shared is not None and n > source.n_shared
        taken.n_shared = source.n_shared if source is not None and is_moved else None
        taken.ids, taken.n, taken.is_used, taken.row = ids, n, True, None
        return taken

    def release(self, sequence: Sequence) -> None:
        """The sequence is idle: it may be found, shared and forgotten. Its ids are its own now: a request
        that had it may go on in another one, and shift them."""
        self._clock += 1
        sequence.is_used, sequence.last_used = False, self._clock
        sequence.ids = sequence.ids.copy()

    def cut(self, sequence: Sequence, n: int) -> None:
        """Keeps the first n tokens, or as many of them as can be gone back to."""
        if n < sequence.n:
            sequence.row = None
            sequence.n = self.session.reachable(n, seq=sequence.number)
            self.session.cut(sequence.n, seq=sequence.number)

    def drop(self, sequence: Sequence) -> None:
        """Forgets a sequence."""
        sequence.is_used, sequence.n, sequence.n_prompt = False, 0, 0
        sequence.n_shared, sequence.row = None, None
        self.session.drop(sequence.number)
        sequence.is_torn = False

    def evict(self, *, keep: Sequence | None = None) -> bool:
        """Forgets the idle sequence that was used longest ago; False if there is none but `keep`."""
        idle = [s for s in self.all if not s.is_used and s.n and s is not keep]
        if not idle:
            return False
        self.drop(min(idle, key=lambda s: s.last_used))
        self.n_evicted += 1
        return True

    def drop_all(self) -> None:
        """Forgets everything."""
        for sequence in self.all:
            self.drop(sequence)

    def agree(self, sequence: Sequence) -> None:
        """After others used the session, or a step was interrupted: only that is held which the session has,
        and what it has beyond is forgotten."""
        if sequence.is_torn:
            self.drop(sequence)
            return
        n = self.session.length(sequence.number)
        if sequence.n < n <= sequence.n_coming:
            sequence.n = n
        elif n != sequence.n:
            sequence.n, sequence.row = min(n, sequence.n), None
            sequence.n = self.session.reachable(sequence.n, seq=sequence.number)
            self.session.cut(sequence.n, seq=sequence.number)
        sequence.n_coming = 0

    def agree_all(self) -> None:
        """The same of all; a session that is closed holds nothing. None is in use any more."""
        for sequence in self.all:
            with suppress(PowerInferError):
                self.agree(sequence)
            if sequence.is_used:
                self.release(sequence)
