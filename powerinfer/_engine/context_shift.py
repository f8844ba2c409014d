"""What happens where a context is full: its older half is forgotten, or nothing more fits."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ContextError, PowerInferError, UnsupportedError
from .prefix_cache import Sequence, drop_ids
from .session import Session


@dataclass(frozen=True)
class ContextShift:
    """The rule of one engine."""

    n_ctx: int
    n_keep: int | None
    """Tokens at the beginning that stay; of those behind them the older half goes. None: nothing goes."""

    def sizes(self, held: int, n: int) -> tuple[int, int]:
        """How many of the tokens held stay at the beginning, and how many behind them go, so that n more fit:
        about half of them, or more."""
        keep = min(self.n_keep or 0, held, self.n_ctx - n)
        left = held - keep
        while keep + left + n > self.n_ctx:
            left //= 2
        return keep, held - keep - left

    def error(self, held: int, n: int) -> ContextError:
        return ContextError(
            f"the context is full: {held} tokens are held, {n} more were given and n_ctx is {self.n_ctx}"
        )

    def move(self, session: Session, sequence: Sequence, keep: int, n_drop: int) -> None:
        """The session's part. Until the ids are moved, too, the sequence is torn."""
        sequence.is_torn = True
        try:
            session.shift(keep, n_drop, seq=sequence.number)
        except PowerInferError:
            sequence.is_torn = False
            raise

    def make_room(self, session: Session, sequence: Sequence, n: int) -> int:
        """Makes n more tokens fit into an idle sequence; returns how many of its ids stay. Where the session
        cannot shift (windows reach into what is no longer held, states and learned positions), they are to be
        computed anew, and the sequence then holds none of them. Raises ContextError if they cannot fit; then
        nothing has changed."""
        held = sequence.n
        if held + n <= self.n_ctx:
            return held
        if self.n_keep is None or min(self.n_keep, held) + n > self.n_ctx:
            raise self.error(held, n)
        keep, n_drop = self.sizes(held, n)
        is_moved = True
        try:
            self.move(session, sequence, keep, n_drop)
        except UnsupportedError:
            sequence.is_torn, is_moved = True, False
            session.drop(sequence.number)
        drop_ids(sequence.ids, held, keep, n_drop)
        sequence.shifted(keep, n_drop)
        kept = sequence.n
        if not is_moved:
            sequence.n = sequence.n_prompt = 0
        sequence.is_torn = False
        return kept
