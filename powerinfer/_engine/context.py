"""The tokens that a Llama's own sequence holds, between its requests.

Every operation leaves an honest state when it is interrupted (Ctrl-C): how many positions are held is always
asked from the session, and ids are written down before they are fed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import ArgumentError, ContextError, FormatError, PowerInferError, UnsupportedError
from .arrays import Ids, Logits
from .choice import Choice
from .engine import Engine
from .prefix_cache import Sequence
from .request import Request, Stream, text_request
from .session import Session


@dataclass(frozen=True)
class ContextState:
    """What a context held: ids [n], their K and V, and logits (of all tokens, of the last one, or none)."""

    ids: Ids
    kv: bytes
    rows: Logits


class Context:
    """Sequence 0 of an engine and the ids in it. Not thread-safe: Llama holds a lock."""

    def __init__(self, engine: Engine, *, logits_all: bool = False) -> None:
        """logits_all: keep the logits of every token."""
        self.engine = engine
        self.n_ctx = engine.n_ctx
        self.n_batch = engine.session.info.n_batch
        self.n_vocab = engine.session.model.info.n_vocab
        self._rows = np.empty((0, self.n_vocab), np.float32) if logits_all else None
        self._loaded: Logits | None = None  # of the last token, by load()
        self._loaded_at = (-1, 0)  # feeds of the engine and tokens held then

    @property
    def session(self) -> Session:
        return self.engine.session

    @property
    def shift(self) -> bool:
        """When the context is full the older half of it is forgotten."""
        return self.engine.n_keep is not None

    @property
    def _sequence(self) -> Sequence:
        sequence = self.engine.cache.all[0]
        if sequence.is_torn:
            self.engine.cache.drop(sequence)
        return sequence

    @property
    def n_tokens(self) -> int:
        """Positions held."""
        sequence = self._sequence
        n = self.session.length(sequence.number)
        n = n if n <= sequence.ids.size else sequence.n  # others may have fed the session
        return max(n - self.engine.n_unchecked(sequence), 0)

    @property
    def keeps_all(self) -> bool:
        """Whether the logits of every token are kept."""
        return self._rows is not None

    @property
    def ids(self) -> Ids:
        """The ids held; a view."""
        return self._sequence.ids[: self.n_tokens]

    @property
    def _last(self) -> Logits | None:
        """Logits of the last token, if there are any."""
        sequence, n_feeds = self._sequence, self.engine.n_feeds
        if sequence.row is not None and sequence.row[0] == n_feeds:
            return self.session.logits(sequence.row[1])
        return self._loaded if self._loaded_at == (n_feeds, sequence.n) else None

    @property
    def logits(self) -> Logits:
        """Logits [n_vocab] of the last token, writable. Raises ContextError if there are none."""
        last = self._last
        if last is None:
            raise ContextError("there are no logits: evaluate a token first")
        return last

    @property
    def scores(self) -> Logits:
        """Logits [n_tokens, n_vocab]: without logits_all the last token's in every row."""
        if self._rows is not None:
            return self._rows[: self.n_tokens]
        last = self._last
        if last is None:
            return np.empty((0, self.n_vocab), np.float32)
        return np.broadcast_to(last.copy(), (self.n_tokens, self.n_vocab))

    # -- requests of this sequence

    def generation(
        self, prompt: Ids, choice: Choice, *, is_continued: bool = False, **options: Any
    ) -> Request:
        """A request for the tokens that follow a prompt, one a step. Raises what Engine.check() does."""
        self.engine.check(prompt)
        choice.begin(prompt)
        return self._request(prompt, choice, is_continued=is_continued, is_stepwise=True, **options)

    def _request(self, ids: Ids, choice: Choice | None = None, **options: Any) -> Request:
        room = np.zeros(self.n_ctx + 1, np.int32)  # the last token is never computed itself
        room[: ids.size] = ids
        if self._rows is not None:
            options |= {"scored": range(ids.size), "show": self._keep_row, "moved": self._move_rows}
        return Request(
            stream=Stream(ids.size, self.engine.cancel),
            ids=room,
            n=ids.size,
            n_prompt=ids.size,
            choice=choice,
            place=self._sequence,
            **options,
        )

    def _keep_row(self, i: int, row: int) -> None:
        assert self._rows is not None
        if len(self._rows) <= i:
            rows = np.empty((min(self.n_ctx, max(i + 1, 2 * len(self._rows), 64)), self.n_vocab), np.float32)
            rows[: len(self._rows)] = self._rows
            self._rows = rows
        self._rows[i] = self.session.logits(row)

    def _move_rows(self, n: int, keep: int, n_drop: int) -> None:
        if self._rows is not None:
            self._rows[keep : n - n_drop] = self._rows[keep + n_drop : n].copy()

    def append(self, ids: Ids, *, report: Callable[[int, int], None] | None = None) -> None:
        """Computes ids behind what is held. Raises ContextError before anything is computed if they do not
        fit. report: called as report(done, total)."""
        if not ids.size:
            return
        self.engine.suspend()
        sequence = self._sequence
        n = sequence.n
        kept = self.engine.shift.make_room(self.session, sequence, ids.size)
        if kept < n:
            self._move_rows(n, sequence.n_shared or 0, n - kept)
        request = self._request(np.concatenate([sequence.ids[:kept], ids]), is_continued=True, report=report)
        self.engine.run([request])

    def score(self, ids: Ids, seen: Callable[[int, Logits], None]) -> None:
        """Calls seen(i, logits) for each of ids; memory is that of a few rows. The context is forgotten."""

        def show(i: int, row: int) -> None:
            seen(i, self.session.logits(row))

        self.engine.check(ids)
        self.clear()
        self.engine.run([text_request(ids, range(ids.size), show, self.engine.cancel)])

    # -- what is held

    def clear(self) -> None:
        """Forgets everything."""
        self.engine.suspend()
        self.engine.cache.drop(self._sequence)

    def shorten(self, n: int) -> None:
        """Forgets all but the first n tokens. Raises ArgumentError (more than are held), UnsupportedError
        (layers with states or windows cannot go back so far)."""
        self.engine.suspend()
        sequence, held = self._sequence, self.n_tokens
        if not 0 <= n <= held:
            raise ArgumentError(f"n_tokens is {n}, and the context holds {held} tokens: it must be 0..{held}")
        if n == held:
            return
        if n == 0:
            self.clear()
            return
        at = self.session.reachable(n, seq=sequence.number)
        if at != n:
            raise UnsupportedError(
                f"the context cannot go back to {n} tokens, only to {at}: not all layers of this model keep "
                "what they would need"
            )
        self.engine.cache.cut(sequence, n)
        self._loaded = None if self._rows is None else self._rows[n - 1].copy()
        self._loaded_at = (self.engine.n_feeds, n)

    def save(self) -> ContextState:
        """A copy of everything that is held."""
        n = self.n_tokens
        last = self._last
        if self._rows is not None:
            rows = self._rows[:n].copy()
        else:
            rows = np.empty((0, self.n_vocab), np.float32) if last is None else last.copy()[None]
        return ContextState(self._sequence.ids[:n].copy(), self.session.save(), rows)

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
        self.engine.suspend()
        sequence = self._sequence
        sequence.is_torn = True
        try:
            self.session.load(state.kv)
        except PowerInferError:
            sequence.is_torn = False
            raise
        if self.session.length() < n:
            raise FormatError(f"the saved state holds {self.session.length()} positions for {n} tokens")
        self.session.cut(n)  # guesses that nobody had looked at
        sequence.ids = np.zeros(self.n_ctx + 1, np.int32)
        sequence.ids[:n] = state.ids
        sequence.n, sequence.n_prompt, sequence.n_shared = n, 0, None  # all of it may be gone on with
        sequence.row = None
        if self._rows is not None:
            self._rows = state.rows.copy()
        self._loaded = state.rows[-1].copy() if len(state.rows) else None
        self._loaded_at = (self.engine.n_feeds, n)
        sequence.is_torn = False
