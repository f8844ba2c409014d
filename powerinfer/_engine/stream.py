"""A request of the scheduler: what its caller holds of it, and what the scheduler does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Literal

import numpy as np

from ._native import chunk_end
from .choice import Choice
from .context import Ids, visits
from .held import Sequence
from .session import Want

Reason = Literal["stop", "length", "time", "cancelled", "error"]


class Stream:
    """The tokens of one generation; iterating waits for them. The token that ends it is given like others."""

    def __init__(self, n_prompt: int, cancel: Callable[[Stream], None]) -> None:
        self.n_prompt = n_prompt
        self.n_reused = 0
        """Tokens of the prompt that were held already; known when the first token comes."""
        self.n_given = 0
        """Tokens that were taken out of the stream, without an end token."""
        self.reason: Reason | None = None
        """Why it ended: an end token or a criterion ("stop"), the limit or n_ctx ("length"), its deadline
        ("time"), cancel(), or an error, which iterating raises. None until then."""
        self.error: BaseException | None = None
        """What iterating raises, as it was raised."""
        self.is_cancelled = False
        self._queue: SimpleQueue[tuple[int, bool] | BaseException | None] = SimpleQueue()
        self._ended = False
        self._cancel = cancel

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self._ended:
            raise StopIteration
        item = self._queue.get()
        if isinstance(item, tuple):
            token, is_end = item
            self.n_given += not is_end
            return token
        self._ended = True
        if item is None:
            raise StopIteration
        if isinstance(item, Exception):
            raise item
        # What ends programs must not end that of the reader: a hook's exit, a panic of a grammar.
        raise RuntimeError(f"{type(item).__name__}: {item}")

    def cancel(self) -> None:
        """Ends the generation; its place is free before the next step. Does nothing after the end."""
        self._cancel(self)

    def close(self) -> None:
        """The same: what ends an iterator."""
        self.cancel()

    def put(self, token: int, is_end: bool) -> None:
        self._queue.put((token, is_end))

    def end(self, reason: Reason, error: BaseException | None = None) -> None:
        if self.reason is None:
            self.reason, self.error = reason, error
            self._queue.put(error)


@dataclass(eq=False, kw_only=True)
class Job:
    """A request on its way: a generation, which has a choice, or a visit to each token of a text."""

    stream: Stream
    ids: Ids
    """The prompt and what follows, with room up to the limit."""
    n: int
    """Of those that count."""
    n_prompt: int
    """Of those the prompt's."""
    left_to_give: int = 0
    """Tokens until the limit."""
    choice: Choice | None = None
    visit: Callable[[int, int], None] | None = None
    """Called as visit(i, row) when the logits and the hidden state of ids[i] are in that row."""
    visited: range = range(0)
    """Which tokens are visited."""
    n_seen: int = 0
    """Tokens before this one were."""
    deadline: float | None = None
    sequence: Sequence | None = None
    """It has one while it is running."""
    is_counted: bool = False
    guess: Ids = field(default_factory=lambda: np.empty(0, np.int32))
    """Ids that may follow the n, and are computed with the last of them."""
    before: Ids | None = None
    """What was there when the context was shifted last, of which the first `n_then` ids are left."""
    n_then: int = 0

    @property
    def left(self) -> int:
        """Tokens to compute before something can be chosen."""
        return self.n - (self.sequence.n if self.sequence is not None else 0)

    @property
    def history(self) -> Ids:
        """The prompt and all that follows, also what a context shift has forgotten."""
        if self.before is None:
            return self.ids[: self.n]
        return np.concatenate([self.before, self.ids[self.n_then : self.n]])

    def take_guess(self, guess: Ids) -> None:
        """Writes a guess behind the ids, as much of it as has room: the token after it needs some too."""
        room = min(self.ids.size - self.n, self.left_to_give) - 1
        self.guess = guess[: max(room, 0)]
        self.ids[self.n : self.n + self.guess.size] = self.guess

    def forget(self, keep: int, n_drop: int) -> None:
        """The context was shifted: of the first `keep` ids on n_drop are gone."""
        self.before = self.history.copy()
        self.ids[keep : self.n - n_drop] = self.ids[keep + n_drop : self.n].copy()
        self.n -= n_drop
        self.n_then = self.n
        self.n_prompt -= max(min(self.n_prompt, keep + n_drop) - keep, 0)
        if self.sequence is not None:
            own = self.sequence
            own.n -= n_drop
            own.n_shared = keep if own.n_shared is None else min(own.n_shared, keep)

    @property
    def is_visit(self) -> bool:
        return self.visit is not None

    def part(self, n: int, n_visits: int) -> int:
        """Of how many tokens its next part is, which are to be n, or a few more; about n_visits of them
        visited."""
        first = self.sequence.n if self.sequence is not None else 0
        if not self.is_visit:
            # What was generated, and computed one by one, is so again.
            return chunk_end(first, self.n, n, generated_from=self.n_prompt - 1) - first
        return chunk_end(first, self.n, n, scored=self.visited, max_scored=n_visits) - first

    def wants(self, first: int, end: int) -> list[Want]:
        """What is wanted of ids[first:end]."""
        if self.is_visit:
            return visits(self.visited, first, end)
        # What was generated is computed as it was the first time, with the predictor's neurons.
        return [Want.NEXT if i >= self.n_prompt - 1 else Want.NOTHING for i in range(first, end)]


def visit_job(
    ids: Ids,
    visited: range,
    visit: Callable[[int, int], None],
    cancel: Callable[[Stream], None],
    *,
    deadline: float | None = None,
) -> Job:
    """A text of which the `visited` tokens are shown, as visit(i, row)."""
    return Job(
        stream=Stream(ids.size, cancel),
        ids=np.array(ids, np.int32),
        n=ids.size,
        n_prompt=ids.size,
        visit=visit,
        visited=visited,
        deadline=deadline,
    )
