"""What one step feeds: parts of requests, side by side in one batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .arrays import Ids, common_prefix
from .request import Request
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


def parts_of(running: Sequence[Request], *, n_batch: int, prompt_part: int) -> list[Part]:
    """What the next step computes of each: the next token of generations, with what is guessed to follow, and
    as much of prompts as there is room for, which is prompt_part where others generate."""
    n_next = sum(request.left == 1 for request in running)
    room = max(n_batch - n_next, 1)
    if n_next:
        room = min(room, prompt_part)
    n_scored = _SCORED
    parts = []
    for request in running:
        n = request.left
        if n > 1:
            n = request.part(room, min(n_scored, _SCORED_PART)) if room > 0 else 0
            room -= n
            if n < request.left:
                request.drop_guess()
        if request.is_text and request.sequence is not None:
            n_scored -= np.count_nonzero(request.kinds(request.sequence.n, request.sequence.n + n))
        if n:
            parts.append((request, n + request.guess.size))
    return sorted(parts, key=lambda part: part[0].is_text)  # rows of logits of one kind stand together


def joined(parts: Sequence[Part]) -> tuple[Ids, list[int], list[TokenKind]]:
    """Ids of the parts, the sequence of each and what it is, as Session.feed() takes them."""
    ids, owners, kinds = [], [], []
    for request, n in parts:
        assert request.sequence is not None
        first = request.sequence.n
        ids.append(request.ids[first : first + n])
        owners += [request.sequence.number] * n
        kinds += request.kinds(first, first + n)
    return np.concatenate(ids), owners, kinds
