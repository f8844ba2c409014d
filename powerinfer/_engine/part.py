"""Parts of prompts whose layers are computed a few at a time, in front of the rounds of those who generate:
so a round takes longer by as much as it may, whatever the part takes in all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .batch import Part, rooms
from .request import Request

LEAST = 64  # tokens; a shorter rest of a prompt takes nearly as long
BESIDE = 64  # tokens of a step that may stand between layers of a part


@dataclass
class Seen:
    """Of its rounds so far."""

    seconds: float = 0.0
    part_s: float = 0.0
    """Of these what the device took for its layers."""
    waited_s: float = 0.0
    """Until it was begun."""
    n_steps: int = 0
    is_alike: bool = True
    """As many generated in all of them."""

    def add(self, seconds: float, part_s: float, waited_s: float, n_steps: int, *, is_alike: bool) -> None:
        self.is_alike &= is_alike
        if not self.n_steps:
            self.waited_s = waited_s
        self.seconds += seconds
        self.part_s += part_s
        self.n_steps += n_steps


@dataclass(frozen=True)
class UnderWay:
    """A part that the session has begun."""

    parts: list[Part]
    n: int
    """Its tokens."""
    n_generating: int
    layers: int
    """Of each round."""
    seen: Seen = field(default_factory=Seen)


def left_to_read(reading: Sequence[Request]) -> int:
    """Tokens that can be read by parts; 0 where somebody else wants to see or to change what is computed."""
    left = 0
    for request in reading:
        if request.is_text or request.scored or request.draft is not None or request.sequence is None:
            return 0
        left += max(request.generated_from - request.sequence.n, 0)
    return left


def next_part(reading: Sequence[Request], room: int) -> list[Part]:
    """Of whose prompts the next part has how many tokens, `room` in all."""
    parts: list[Part] = []
    for request, most in rooms(reading, room):
        assert request.sequence is not None
        left = max(request.generated_from - request.sequence.n, 0)
        n = min(room, most, left)
        if n < left < n + LEAST < 2 * n:  # what is then left is a part of its own
            n = max(left - LEAST, left // 2)
        n = min(request.part(n, 0), left) if n > 0 else 0
        if 0 < n <= room:
            parts.append((request, n))
            room -= n
    return parts
