"""The tokens that a sequence holds: feeding in chunks, reuse of a common beginning, context shift.

Every operation leaves an honest state when it is interrupted (Ctrl-C): how many positions are held is always
asked from the engine, and ids are written down before they are fed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..errors import ContextError, FormatError, PowerInferError
from ._native import chunk_end, reusable_prefix
from .sampling import Sampler
from .session import Session, Want

VISIT_PART = 32
"""Tokens of a text whose logits are all wanted are computed so many at a time: each takes memory."""

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


def visits(visited: range, first: int, end: int) -> list[Want]:
    """What is wanted of tokens first..end-1 of such a text."""
    return [Want.VISIT if i in visited else Want.NOTHING for i in range(first, end)]


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
        self._cells = self._ids.data  # the same, for single ids
        self._rows = np.empty((0, self.n_vocab), np.float32) if logits_all else None
        self._last: Logits | None = None
        self._is_fresh = False  # the session's last feed has the last token's logits, not fetched yet
        self.n_changes = 0
        """Rises whenever other ids are held than before."""
        self._n_prompt = 0  # of the prompt that hold() began with
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
            if not self._is_fresh:
                raise ContextError("there are no logits: evaluate a token first")
            self._last = self.session.logits(-1)
        return self._last

    @property
    def _has_logits(self) -> bool:
        return self._last is not None or self._is_fresh

    def _forget_logits(self) -> None:
        self._last, self._is_fresh = None, False

    def draw(self, sampler: Sampler) -> int:
        """What the sampler chooses after the last token; its logits are not copied for that. Raises
        ContextError if there are none."""
        if self._last is None and self._is_fresh:
            return self.session.draw(sampler)
        return sampler.sample(self.logits)

    @property
    def scores(self) -> Logits:
        """Logits [n_tokens, n_vocab]: without logits_all the last token's in every row."""
        if self._rows is not None:
            return self._rows[: self.n_tokens]
        if not self._has_logits:
            return np.empty((0, self.n_vocab), np.float32)
        return np.broadcast_to(self.logits.copy(), (self.n_tokens, self.n_vocab))

    def clear(self) -> None:
        """Forgets everything."""
        self.n_changes += 1
        self._forget_logits()
        self.session.drop()
        self._torn = False
        self._n_prompt = 0

    def cut(self, n: int) -> None:
        """Keeps the first n tokens."""
        if n < self.n_tokens:
            self.n_changes += 1
            self._forget_logits()
            self.session.cut(n)

    def next(self, token: int, at: int, sampler: Sampler) -> int:
        """feed() of one id behind the `at` that are held, where it must fit, draw(), and accept()."""
        self.n_changes += 1
        self._forget_logits()
        self._cells[at] = token
        try:
            chosen = self.session.next(token, at, sampler)
        except PowerInferError:  # not Ctrl-C, after which the session may not know of them
            self._is_fresh = self.n_tokens > at  # the engine has them if it is the choice that failed
            raise
        self._is_fresh = True
        return chosen

    def feed(
        self,
        ids: Ids,
        *,
        n_next: int = 1,
        report: Callable[[int], None] | None = None,
    ) -> None:
        """Appends ids, which must fit, in parts of about n_batch.

        n_next: of so many last ones logits are wanted, which are computed as one by one. report: called with
        the number of ids that are done.
        """
        if not ids.size:
            return
        self.n_changes += 1
        self._forget_logits()
        wants = np.full(ids.size, Want.NOTHING if self._rows is None else Want.VISIT, np.uint8)
        wants[ids.size - n_next :] = Want.NEXT
        begin, end = self.n_tokens, 0
        while end < ids.size:
            first, at = end, begin + end
            end = begin + ids.size
            end = chunk_end(at, end, self.n_batch, generated_from=end - n_next) - begin
            chunk = ids[first:end]
            self._ids[at : at + chunk.size] = chunk
            if self._rows is not None:
                self._reserve_rows(at + chunk.size)
                self.session.feed(chunk, want_logits=wants[first:end])
                for i in range(chunk.size):
                    self._rows[at + i] = self.session.logits(i)
            else:
                self.session.feed(chunk, want_logits=wants[first:end])
            if report is not None:
                report(end)
        if self._rows is not None:
            self._last = self._rows[self.n_tokens - 1].copy()
        else:
            self._is_fresh = n_next > 0

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
        self.n_changes += 1
        was_torn, self._torn = self._torn, True
        try:
            self.session.shift(keep, drop)
        except PowerInferError:
            self._torn = was_torn
            raise
        self._n_prompt = min(self._n_prompt, keep)
        self._ids[keep : held - drop] = self._ids[keep + drop : held].copy()
        if self._rows is not None:
            self._rows[keep : held - drop] = self._rows[keep + drop : held].copy()
        self._torn = False

    def hold(
        self, ids: Ids, *, goes_on: bool = False, ahead: Ids | None = None, report: Report | None = None
    ) -> int:
        """Makes the sequence hold ids (at least one), with logits for the last; returns how many it reused.

        The last id is always computed as if alone, and of what another prompt left only that is reused which
        was computed as for this one: so a prompt gives the same logits to the bit, whether or not some of it
        was held before.

        goes_on: ids are the prompt that was held last, and what followed it. ahead: ids that are guessed to
        follow, computed in the same step; `session.logits(i)` are then those after i of them.

        Raises ContextError before anything is computed.
        """
        if ids.size > self.n_ctx:
            raise ContextError(f"the prompt has {ids.size} tokens and n_ctx is {self.n_ctx}")
        held = self.ids
        reused = min(common_prefix(held, ids), ids.size - 1)
        if not goes_on or reused < self._n_prompt:  # others may have replaced what was held
            reused = reusable_prefix(reused, self._n_prompt, ids.size)
        if reused < held.size:
            self.cut(reused)
        if reused < max(self._n_prompt, 1):
            self._n_prompt = ids.size
        todo = ids.size - reused
        each = None if report is None else lambda done: report(done, todo)
        if ahead is None:
            self.feed(ids[reused:], report=each)
        else:
            self.feed(ids[reused:-1], n_next=0, report=each)
            self.feed(np.concatenate([ids[-1:], ahead]), n_next=1 + ahead.size)
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
                    self.feed(ids[:n], n_next=n)
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
        end = 0
        while end < ids.size:
            first, end = end, chunk_end(end, ids.size, VISIT_PART)
            self._ids[first:end] = ids[first:end]
            self.session.feed(ids[first:end], want_logits=[Want.VISIT] * (end - first))
            for i in range(first, end):
                seen(i, self.session.logits(i - first))

    def save(self) -> ContextState:
        """A copy of everything that is held."""
        n = self.n_tokens
        if self._rows is not None:
            rows = self._rows[:n].copy()
        else:
            rows = self.logits.copy()[None] if self._has_logits else np.empty((0, self.n_vocab), np.float32)
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
        self.n_changes += 1
        was_torn, self._torn = self._torn, True
        try:
            self.session.load(state.kv)
        except PowerInferError:
            self._torn = was_torn
            raise
        if self.session.length() != n:
            raise FormatError(f"the saved state holds {self.session.length()} positions for {n} tokens")
        self._n_prompt = 0  # all of it may be gone on with
        self._ids[:n] = state.ids
        if self._rows is not None:
            self._reserve_rows(n)
            self._rows[:n] = state.rows
        self._last, self._is_fresh = state.rows[-1].copy() if len(state.rows) else None, False
        self._torn = False
