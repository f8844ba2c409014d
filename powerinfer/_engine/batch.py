"""What one step feeds: parts of requests, side by side in one batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ._native import KV_BLOCK
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
    """How many of ids' first tokens, all but the last, are about to be computed for another request; of a
    prompt that is no longer than a block of K and V 0."""
    if ids.size <= KV_BLOCK:  # which is too little for anybody to wait for it
        return 0
    shared = [
        min(common_prefix(request.ids[: request.n], ids), ids.size - 1)
        for request in running
        if request.left > 1 and not request.is_text
    ]
    return max(shared, default=0)


def parts_of(running: Sequence[Request], *, n_batch: int, pace: Pace) -> list[Part]:
    """What the next step computes of each: the next token of generations, with what is guessed to follow, and
    as much of prompts as there is room for, which the pace says where others generate."""
    reading: list[Request] = []
    parts: list[Part] = []
    n_scored = _SCORED
    for request in running:  # what stands here is done for each token, with a GPU waiting for it
        n = request.left
        if n > 1:
            reading.append(request)
            continue
        if request.is_text:
            n_scored -= _n_scored(request, n)
        if n:
            parts.append((request, n + request.guess.size))
    n_next = len(parts)
    room = max(n_batch - n_next, 1)
    if n_next and reading:
        room = min(room, pace.part(len(reading), n_next))
    for request, most in rooms(reading, room):
        n = request.part(min(room, most), min(n_scored, _SCORED_PART)) if min(room, most) > 0 else 0
        room -= n
        if n < request.left:
            request.drop_guess()
        if request.is_text:
            n_scored -= _n_scored(request, n)
        if n:
            parts.append((request, n + request.guess.size))
    if any(request.is_text for request, _ in parts):
        parts.sort(key=lambda part: part[0].is_text)  # rows of logits of one kind stand together
    return parts


def _n_scored(request: Request, n: int) -> int:
    """Of a text's next n tokens, how many have logits."""
    first = request.sequence.n if request.sequence is not None else 0
    return int(np.count_nonzero(request.kinds(first, first + n)))


def rooms(reading: Sequence[Request], room: int) -> Iterator[tuple[Request, int]]:
    """Which prompts may have how much, in turn. Who came first has half of the room, so that it comes to its
    end, and what is left is for the shortest: a short prompt does not wait until a long one is read."""
    first = reading[0] if len(reading) > 1 and reading[0].left > room else None
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
    kinds: list[int]
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
    later: tuple[list[int], list[int], list[int]] = [], [], []
    next_ids, next_owners, next_kinds = later
    generated = int(TokenKind.GENERATED)
    in_order = any(request.draft is not None for request, _ in parts)  # heads are shown all hidden states
    n_rows = 0
    for request, n in parts:
        sequence = request.sequence
        assert sequence is not None
        first, number = sequence.n, sequence.number
        if n == 1 and first + 1 == request.n and not request.is_text:  # the usual one, quickly
            next_ids.append(request.ids.item(first))
            next_owners.append(number)
            next_kinds.append(generated)
            n_rows += 1
        else:
            its_kinds = list(map(int, request.kinds(first, first + n)))
            n_first = 0 if in_order else next((i for i, kind in enumerate(its_kinds) if kind), n)
            tokens = request.ids[first : first + n].tolist()
            ids.extend(tokens[:n_first])
            owners.extend([number] * n_first)
            kinds.extend(its_kinds[:n_first])
            next_ids.extend(tokens[n_first:])
            next_owners.extend([number] * (n - n_first))
            next_kinds.extend(its_kinds[n_first:])
            n_rows += sum(map(bool, its_kinds))
        found.ends.append(n_rows)
        if request.is_plain and first + n == request.n:
            assert request.choice is not None
            found.rows.append(n_rows - 1)
            found.samplers.append(request.choice.sampler)
    for own, more in zip((ids, owners, kinds), later, strict=True):
        own.extend(more)
    return found
