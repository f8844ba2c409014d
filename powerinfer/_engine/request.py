"""A request of the engine: what its caller holds of it, and what the engine does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Literal

import numpy as np
import numpy.typing as npt

from ..errors import ArgumentError, ContextError
from ._native import chunk_end
from .arrays import Ids, Logits
from .choice import Choice
from .drafting import Drafter
from .prefix_cache import Sequence, drop_ids
from .session import Session
from .types import TokenKind

Reason = Literal["stop", "length", "time", "cancelled", "error"]
Draft = Callable[[Ids], npt.ArrayLike]
"""A user's: ids that may follow those of its argument."""

_NO_IDS = np.empty(0, np.int32)


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
        self.begun_at: float | None = None
        """Of time.monotonic(), when it left those that wait; and when its first and its last token were
        chosen."""
        self.first_at: float | None = None
        self.last_at: float | None = None
        self.is_whole = False
        """Its tokens are given when it has ended: who wants nothing sooner is not woken for each."""
        self._held: list[tuple[int, bool]] = []
        self.on_more: Callable[[], object] | None = None
        """Called when there is more, or it has ended, by the thread that computes, or by the one that gives
        tokens meanwhile."""
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

    @property
    def has_more(self) -> bool:
        """Whether iterating would not wait."""
        return not self._queue.empty()

    @property
    def is_over(self) -> bool:
        """Whether its end was read."""
        return self._ended

    def cancel(self) -> None:
        """Ends the generation; its place is free before the next step. Does nothing after the end."""
        self._cancel(self)

    def close(self) -> None:
        """The same: what ends an iterator."""
        self.cancel()

    def put(self, token: int, is_end: bool, now: float) -> None:
        """now: of time.monotonic(), when it was chosen."""
        self.last_at = now
        if self.first_at is None:
            self.first_at = now
        if self.is_whole:
            self._held.append((token, is_end))
            return
        self._queue.put((token, is_end))
        if self.on_more is not None:
            self.on_more()

    def end(self, reason: Reason, error: BaseException | None = None) -> None:
        if self.reason is None:
            self.reason, self.error = reason, error
            for item in self._held:
                self._queue.put(item)
            self._queue.put(error)
            if self.on_more is not None:
                self.on_more()


def taken(stream: Stream) -> Iterator[int | None]:
    """The same tokens without waiting: None where there is none yet."""
    while True:
        while not stream.has_more and not stream.is_over:
            yield None
        try:
            yield next(stream)
        except StopIteration:
            return


@dataclass(eq=False, kw_only=True)
class Request:
    """A generation, which has a choice, or a text to compute, with or without looking at each token."""

    stream: Stream
    ids: Ids
    """The prompt and what follows, with room up to the limit."""
    n: int
    """Of those that count."""
    n_prompt: int
    """Of those the prompt's."""
    choice: Choice | None = None
    left_to_give: int = 1 << 62
    """Tokens until the limit."""
    scored: range = range(0)
    """Which tokens of the prompt have logits, beside the last one of a generation's."""
    show: Callable[[int, int], None] | None = None
    """Called as show(i, row) when the logits and the hidden state of ids[i] are in that row."""
    moved: Callable[[int, int, int], None] | None = None
    """Called as moved(n, keep, n_drop) when a context shift has dropped n_drop of n tokens behind `keep`."""
    report: Callable[[int, int], None] | None = None
    """Called as report(done, total) while the prompt is computed. What it raises ends the step."""
    draft: Draft | Drafter | None = None
    """Guesses ids that follow, which are computed together."""
    deadline: float | None = None
    """Of time.monotonic()."""
    place: Sequence | None = None
    """The sequence that it must have; None: any."""
    is_continued: bool = False
    """The prompt goes on with what its place holds, which is taken as it is."""
    is_text: bool = False
    """All of its tokens are a prompt's. It shares nothing with others, being computed otherwise."""
    is_stepwise: bool = False
    """A step chooses one token, even if more are known: what reads it may want to go on otherwise."""

    sequence: Sequence | None = None
    """It has one while it is running."""
    came_at: float = field(default_factory=time.monotonic)
    token_at: float | None = None
    """When its last token was chosen."""
    n_shown: int = 0
    """Tokens before this one were shown."""
    over: Reason | None = None
    """Why the last token of a stepwise request was the last."""
    is_counted: bool = False
    guess: Ids = field(default_factory=lambda: _NO_IDS)
    """Ids that may follow the n."""
    rows: list[int] = field(default_factory=list)
    """Rows of the logits after the last of the n and after each guess, while they are not looked at."""
    kept: list[Logits] = field(default_factory=list)
    """Copies of those rows, where later steps overwrite them: a grammar does not know yet what may follow."""
    branch: int = 0
    """Where other prompts part from this one; 0: nowhere."""
    before: Ids | None = None
    """What was there when the context was shifted last, of which the first `n_then` ids are left."""
    n_then: int = 0

    def __post_init__(self) -> None:
        self.is_plain = self.choice is not None and self.choice.is_plain and not (self.draft or self.show)
        """A step that only has its next token is a single call of the session."""

    @property
    def left(self) -> int:
        """Tokens to compute before something can be chosen."""
        return self.n - (self.sequence.n if self.sequence is not None else 0)

    @property
    def generated_from(self) -> int:
        """From here on tokens are computed as generated ones are: the last one of a prompt, too."""
        return self.n if self.is_text else self.n_prompt - 1

    @property
    def history(self) -> Ids:
        """The prompt and all that follows, also what a context shift has forgotten."""
        if self.before is None:
            return self.ids[: self.n]
        return np.concatenate([self.before, self.ids[self.n_then : self.n]])

    def append(self, tokens: Iterable[int]) -> None:
        """Ids follow that nobody chose."""
        for token in tokens:
            self.ids[self.n] = token
            self.n += 1

    @property
    def is_ready(self) -> bool:
        """Whether its next token can be chosen without waiting for its grammar."""
        return self.choice is None or self.choice.is_ready

    def keep(self, session: Session) -> None:
        """Copies the rows that are not looked at, for another step."""
        if not self.kept:
            self.kept = [session.logits(row).copy() for row in self.rows]

    def choose(self, session: Session, row: int) -> tuple[int, Reason | None]:
        """The next token, after the logits in that row of the session, and why it is the last, if it is. What
        hooks raise is their own."""
        choice = self.choice
        assert choice is not None
        if choice.is_plain:
            token = session.draw(choice.sampler, row)
            choice.accept(token)
            return token, self.append_chosen(token)
        logits = self.kept.pop(0) if self.kept else session.logits(row)
        token = choice.token(self.history, logits)
        reason = self.append_chosen(token)
        return token, "stop" if reason != "stop" and choice.stops(self.history, logits) else reason

    def append_chosen(self, token: int) -> Reason | None:
        """A token was chosen; why it is the last, if it is."""
        assert self.choice is not None
        self.ids[self.n] = token
        self.n += 1
        self.left_to_give -= 1
        return "stop" if self.choice.is_last(token) else "length" if not self.left_to_give else None

    def went_on(self, tokens: Ids) -> None:
        """These were chosen, none of which is the last."""
        self.ids[self.n : self.n + tokens.size] = tokens
        self.n += tokens.size
        self.left_to_give -= tokens.size

    @property
    def room_for_guesses(self) -> int:
        """The token after them needs some too."""
        return max(min(self.ids.size - self.n, self.left_to_give) - 1, 0)

    def take_guess(self, guess: Ids) -> None:
        """Writes a guess behind the ids, as much of it as has room."""
        self.guess = guess[: self.room_for_guesses]
        self.ids[self.n : self.n + self.guess.size] = self.guess

    def drop_guess(self) -> None:
        """What was guessed, and what is known after it, is no more."""
        self.guess = _NO_IDS
        self.rows.clear()
        self.kept.clear()

    def forget(self, keep: int, n_drop: int) -> None:
        """The context was shifted: of the first `keep` ids on n_drop are gone."""
        self.before = self.history.copy()
        drop_ids(self.ids, self.n, keep, n_drop)
        self.n -= n_drop
        self.n_then = self.n
        self.n_prompt -= max(min(self.n_prompt, keep + n_drop) - keep, 0)
        if self.sequence is not None:
            if self.moved is not None:
                self.moved(self.sequence.n, keep, n_drop)
            self.sequence.shifted(keep, n_drop)

    def part(self, n: int, n_scored: int) -> int:
        """Of how many tokens its next part is, which are to be n, or a few more; about n_scored of them
        scored."""
        first = self.sequence.n if self.sequence is not None else 0
        if not self.is_text:
            generated = self.generated_from
            return chunk_end(first, self.n, n, generated_from=generated, branch=self.branch) - first
        return chunk_end(first, self.n, n, scored=self.scored, max_scored=n_scored) - first

    def kinds(self, first: int, end: int) -> list[TokenKind]:
        """What ids[first:end] are. What was generated is computed as it was the first time."""
        generated, scored = self.generated_from, self.scored
        return [
            TokenKind.GENERATED if i >= generated else TokenKind.SCORED if i in scored else TokenKind.PROMPT
            for i in range(first, end)
        ]

    def show_rows(self, n: int, row: int) -> None:
        """Shows its last n tokens, which were just computed: their rows of logits begin with this one. What
        `show` raises is its own."""
        if self.show is None:
            return
        assert self.sequence is not None
        first, end = self.sequence.n - n, self.sequence.n
        for i, kind in enumerate(self.kinds(first, end), first):
            if kind:
                if not self.is_text or i >= self.n_shown:  # others were, before it gave way
                    self.show(i, row)
                    self.n_shown = i + 1
                row += 1

    def report_part(self, n: int) -> None:
        """Its last n tokens were just computed."""
        assert self.sequence is not None
        end, reused = self.sequence.n, self.stream.n_reused
        if self.report is not None and end - n < self.n_prompt:
            self.report(end - reused, self.n_prompt - reused)
            if end >= self.n_prompt:
                self.report = None


def check_prompt(ids: Ids, n_ctx: int, n_vocab: int) -> None:
    """Raises ArgumentError or ContextError for a prompt that cannot be computed."""
    if not ids.size:
        raise ArgumentError("the prompt has no tokens")
    if ids.size > n_ctx:
        raise ContextError(f"the prompt has {ids.size} tokens and n_ctx is {n_ctx}")
    if int(ids.min()) < 0 or int(ids.max()) >= n_vocab:
        raise ArgumentError(f"the prompt holds a token that is not in 0..{n_vocab - 1}")


def text_request(
    ids: Ids,
    scored: range,
    show: Callable[[int, int], None],
    cancel: Callable[[Stream], None],
    *,
    deadline: float | None = None,
) -> Request:
    """A text of which the `scored` tokens are shown, as show(i, row)."""
    return Request(
        stream=Stream(ids.size, cancel),
        ids=np.array(ids, np.int32),
        n=ids.size,
        n_prompt=ids.size,
        is_text=True,
        show=show,
        scored=scored,
        deadline=deadline,
    )
