"""The tokens that a sequence holds: feeding in chunks, reuse of a common beginning, context shift.

Every operation leaves an honest state when it is interrupted (Ctrl-C): how many positions are held is always
asked from the engine, and ids are written down before they are fed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .errors import ContextError, FormatError, PowerInferError
from .session import Session

Ids = npt.NDArray[np.int32]
Logits = npt.NDArray[np.float32]
Report = Callable[[int, int], None]


@dataclass(frozen=True)
class ContextState:
    """What a context held: ids [n], their K and V, and logits (of all tokens, of the last one, or none)."""

    ids: Ids
    kv: bytes
    rows: Logits


def common_prefix(a: Ids, b: Ids) -> int:
    """How many ids at the beginning are the same."""
    n = min(a.size, b.size)
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if different.size else n


def n_dropped(held: int, keep: int, n: int, n_ctx: int) -> int:
    """How many of the positions behind the first `keep` a shift drops, so that n more fit: about half of
    them, or more. keep + n must fit."""
    left = held - keep
    while keep + left + n > n_ctx:
        left //= 2
    return held - keep - left


class Context:
    """Sequence 0 of a session and the ids in it. Not thread-safe: Llama holds a lock."""

    def __init__(self, session: Session, *, logits_all: bool, shift: bool, n_keep: int) -> None:
        """
        logits_all: keep the logits of every token.
        shift: when the context is full, forget the older half of what follows the first n_keep tokens.
        """
        info = session.info
        self.session = session
        self.n_ctx = info.n_ctx
        self.n_batch = info.n_batch
        self.n_vocab = session.model.info.n_vocab
        self.shift = shift
        self.n_keep = n_keep
        self._ids = np.zeros(self.n_ctx, np.int32)
        self._rows = np.empty((0, self.n_vocab), np.float32) if logits_all else None
        self._last: Logits | None = None
        self._wide: int | None = None  # of find_wide_step()
        self._torn = False  # ids and engine were changed together, and that was interrupted

    @property
    def n_tokens(self) -> int:
        """Positions held."""
        if self._torn:
            self.clear()
        return self.session.length()

    @property
    def keeps_all(self) -> bool:
        """Whether the logits of every token are kept."""
        return self._rows is not None

    @property
    def ids(self) -> Ids:
        """The ids held; a view."""
        return self._ids[: self.n_tokens]

    @property
    def logits(self) -> Logits:
        """Logits [n_vocab] of the last token, writable. Raises ContextError if there are none."""
        if self._last is None:
            raise ContextError("there are no logits: evaluate a token first")
        return self._last

    @property
    def scores(self) -> Logits:
        """Logits [n_tokens, n_vocab]: without logits_all the last token's in every row."""
        if self._rows is not None:
            return self._rows[: self.n_tokens]
        if self._last is None:
            return np.empty((0, self.n_vocab), np.float32)
        return np.broadcast_to(self._last.copy(), (self.n_tokens, self.n_vocab))

    def clear(self) -> None:
        """Forgets everything."""
        self._last = None
        self.session.drop()
        self._torn = False

    def cut(self, n: int) -> None:
        """Keeps the first n tokens."""
        if n < self.n_tokens:
            self._last = None
            self.session.cut(n)

    def feed(
        self,
        ids: Ids,
        *,
        want_logits: bool = True,
        want_all: bool = False,
        report: Callable[[int], None] | None = None,
    ) -> None:
        """Appends ids, which must fit, in chunks.

        want_logits: of the last one. want_all: of all of them, which must fit in one chunk. report: called
        with the number of ids that are done.
        """
        if not ids.size:
            return
        self._last = None
        for first in range(0, ids.size, self.n_batch):
            chunk = ids[first : first + self.n_batch]
            at, end = self.n_tokens, first + chunk.size
            self._ids[at : at + chunk.size] = chunk
            if self._rows is not None:
                self._reserve_rows(at + chunk.size)
                self.session.feed(chunk, want_logits=True)
                for i in range(chunk.size):
                    self._rows[at + i] = self.session.logits(i)
            else:
                wants = want_all or (None if want_logits and end == ids.size else False)
                self.session.feed(chunk, want_logits=wants)
            if report is not None:
                report(end)
        if self._rows is not None:
            self._last = self._rows[self.n_tokens - 1].copy()
        elif want_logits:
            self._last = self.session.logits(-1)

    def _reserve_rows(self, n: int) -> None:
        assert self._rows is not None
        if len(self._rows) < n:
            rows = np.empty((min(self.n_ctx, max(n, 2 * len(self._rows), 64)), self.n_vocab), np.float32)
            rows[: len(self._rows)] = self._rows
            self._rows = rows

    def make_room(self, n: int) -> None:
        """Makes n more tokens fit. Raises ContextError if they cannot; then nothing has changed."""
        held = self.n_tokens
        if held + n <= self.n_ctx:
            return
        keep = min(self.n_keep, held)
        if not self.shift or keep + n > self.n_ctx:
            raise ContextError(
                f"the context is full: {held} tokens are held, {n} more were given and n_ctx is {self.n_ctx}"
            )
        drop = n_dropped(held, keep, n, self.n_ctx)
        was_torn, self._torn = self._torn, True
        try:
            self.session.shift(keep, drop)
        except PowerInferError:
            self._torn = was_torn
            raise
        self._ids[keep : held - drop] = self._ids[keep + drop : held].copy()
        if self._rows is not None:
            self._rows[keep : held - drop] = self._rows[keep + drop : held].copy()
        self._torn = False

    def hold(self, ids: Ids, *, ahead: Ids | None = None, report: Report | None = None) -> int:
        """Makes the sequence hold ids (at least one), with logits for the last; returns how many it reused.

        The last id is always computed alone: so the same ids give the same logits to the bit, whether or
        not the others were held before. ahead: ids that are guessed to follow, computed in the same step;
        `session.logits(i)` are then those after i of them. Raises ContextError before anything is computed.
        """
        if ids.size > self.n_ctx:
            raise ContextError(f"the prompt has {ids.size} tokens and n_ctx is {self.n_ctx}")
        reused = min(common_prefix(self.ids, ids), ids.size - 1)
        self.cut(reused)
        todo = ids.size - reused
        if todo > 1:
            each = None if report is None else lambda done: report(done, todo)
            self.feed(ids[reused:-1], want_logits=False, report=each)
        self.feed(
            ids[-1:] if ahead is None else np.concatenate([ids[-1:], ahead]), want_all=ahead is not None
        )
        if report is not None:
            report(todo, todo)
        return reused

    def find_wide_step(self) -> int:
        """Most ids, beyond the first, that a step can take and still give each the very logits it has alone.

        Kernels for many tokens round otherwise than those for one, so wider steps could change answers; in
        predicted mode there may be none. It is measured, once: a few steps, and the context is forgotten.
        """
        if self._wide is None:
            self._wide = 0
            widths = [n for n in (16, 8, 5, 4, 3, 2) if n <= min(self.n_batch, self.n_ctx)]
            ids = np.arange(1, max(widths, default=0) + 1, dtype=np.int32) * 7 % self.n_vocab
            alone: list[Logits] = []
            try:
                self.clear()
                for i in range(ids.size):
                    self.feed(ids[i : i + 1])
                    alone.append(self.logits.copy())
                for n in widths:
                    self.clear()
                    self.feed(ids[:n], want_all=True)
                    rows = [self.session.logits(i) for i in range(n)]
                    if all(np.array_equal(a, b) for a, b in zip(alone, rows, strict=False)):
                        self._wide = n - 1
                        break
            finally:
                self.clear()
        return self._wide

    def settle(self, n: int, logits: Logits) -> None:
        """Forgets what was computed ahead of the first n ids, whose last one has these logits."""
        if n < self.n_tokens:
            self.cut(n)
            self._last = logits

    def visit(self, ids: Ids, seen: Callable[[int, Logits], None]) -> None:
        """Holds ids and calls seen(i, logits) for each of them; memory is that of a few rows."""
        self.clear()
        for first in range(0, ids.size, n := min(32, self.n_batch)):
            chunk = ids[first : first + n]
            self.feed(chunk, want_all=True)
            for i in range(chunk.size):
                seen(first + i, self.session.logits(i))

    def save(self) -> ContextState:
        """A copy of everything that is held."""
        n = self.n_tokens
        if self._rows is not None:
            rows = self._rows[:n].copy()
        else:
            rows = np.empty((0, self.n_vocab), np.float32) if self._last is None else self._last.copy()[None]
        return ContextState(self._ids[:n].copy(), self.session.save(), rows)

    def load(self, state: ContextState) -> None:
        """Replaces everything that is held. Raises FormatError for another model's state, or other mode's."""
        n = state.ids.size
        sizes = (n,) if self._rows is not None else (0, 1)
        if state.rows.dtype != np.float32 or state.rows.ndim != 2 or state.rows.shape[1] != self.n_vocab:
            raise FormatError(f"the saved logits have shape {state.rows.shape}, n_vocab is {self.n_vocab}")
        if len(state.rows) not in sizes:
            raise FormatError(
                f"the state has logits of {len(state.rows)} of {n} tokens: logits_all was different"
            )
        was_torn, self._torn = self._torn, True
        try:
            self.session.load(state.kv)
        except PowerInferError:
            self._torn = was_torn
            raise
        if self.session.length() != n:
            raise FormatError(f"the saved state holds {self.session.length()} positions for {n} tokens")
        self._ids[:n] = state.ids
        if self._rows is not None:
            self._reserve_rows(n)
            self._rows[:n] = state.rows
        self._last = state.rows[-1].copy() if len(state.rows) else None
        self._torn = False
