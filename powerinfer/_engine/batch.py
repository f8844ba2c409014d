"""What one step feeds: parts of requests, side by side in one batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from .arrays import Ids, common_prefix
from .pace import Pace
from .request import Request
from .sampling import Sampler
from .types import TokenKind

Part = tuple[Request, int]
"""A request that has a sequence, and how many of its tokens come next."""

_SCORED_PART = 32  # scored tokens of a request in one step: each has logits, which take memory
_SCORED = 2 * _SCORED_PART  # of all requests together


def coming(running: Sequence[Request], ids: Ids) -> int:
    """How many of ids' first tokens, all but the last, are about to be computed for another request."""
    shared = [
        min(common_prefix(request.ids[: request.n], ids), ids.size - 1)
        for request in running
        if request.left > 1 and not request.is_text
    ]
    return max(shared, default=0)


def parts_of(running: Sequence[Request], *, n_batch: int, pace: Pace) -> list[Part]:
    """What the next step computes of each: the next token of generations, with what is guessed to follow, and
    as much of prompts as there is room for, which the pace says where others generate."""
    n_next = sum(request.left == 1 for request in running)
    room = max(n_batch - n_next, 1)
    if n_next and len(running) > n_next:
        room = min(room, pace.part(len(running) - n_next, n_next))
    n_scored = _SCORED
    parts = []
    for request, most in _rooms(running, room):
        n = request.left
        if n > 1:
            n = request.part(min(room, most), min(n_scored, _SCORED_PART)) if min(room, most) > 0 else 0
            room -= n
            if n < request.left:
                request.drop_guess()
        if request.is_text and request.sequence is not None:
            n_scored -= np.count_nonzero(request.kinds(request.sequence.n, request.sequence.n + n))
        if n:
            parts.append((request, n + request.guess.size))
    return sorted(parts, key=lambda part: part[0].is_text)  # rows of logits of one kind stand together


def _rooms(running: Sequence[Request], room: int) -> Iterator[tuple[Request, int]]:
    """Who may read how much, in turn. Who came first has half of the room, so that it comes to its end, and
    what is left is for the shortest: a short prompt does not wait until a long one is read."""
    reading = [request for request in running if request.left > 1]
    first = reading[0] if len(reading) > 1 and reading[0].left > room else None
    for request in running:
        if request.left <= 1:
            yield request, 1
    if first is not None:
        others = sum(request.left for request in reading[1:])
        yield first, max(room - others, room // 2)
    for request in sorted(reading, key=lambda request: request.left):
        if request is not first:
            yield request, room


@dataclass(frozen=True)
class Joined:
    """The parts as Session.feed() takes them."""

    ids: list[int]
    owners: list[int]
    kinds: list[TokenKind]
    """The sequence of each token, and what it is."""
    rows: list[int]
    """The last row of logits of each part that is chosen from in the same call."""
    samplers: list[Sampler]
    ends: list[int]
    """Rows of logits up to each part's end."""


def joined(parts: Sequence[Part]) -> Joined:
    """What the engine is fed: tokens without logits first, for prompts are read together, and several that
    generate are a step of decoding. Where nobody but a sampler looks at logits the choice is a part of it."""
    found = Joined([], [], [], [], [], [])
    ids, owners, kinds = found.ids, found.owners, found.kinds
    later: list[tuple[int, int, TokenKind]] = []
    in_order = any(request.draft is not None for request, _ in parts)  # heads are shown all hidden states
    n_rows = 0
    for request, n in parts:
        sequence = request.sequence
        assert sequence is not None
        first, number = sequence.n, sequence.number
        if n == 1 and first + 1 == request.n and not request.is_text:  # the usual one, quickly
            later.append((int(request.ids[first]), number, TokenKind.GENERATED))
            n_rows += 1
        else:
            its_kinds = request.kinds(first, first + n)
            n_first = 0 if in_order else next((i for i, kind in enumerate(its_kinds) if kind), n)
            tokens = request.ids[first : first + n].tolist()
            ids.extend(tokens[:n_first])
            owners.extend([number] * n_first)
            kinds.extend(its_kinds[:n_first])
            later.extend(zip(tokens[n_first:], [number] * (n - n_first), its_kinds[n_first:], strict=True))
            n_rows += sum(map(bool, its_kinds))
        found.ends.append(n_rows)
        if request.is_plain and first + n == request.n:
            assert request.choice is not None
            found.rows.append(n_rows - 1)
            found.samplers.append(request.choice.sampler)
    for token, number, kind in later:
        ids.append(token)
        owners.append(number)
        kinds.append(kind)
    return found
