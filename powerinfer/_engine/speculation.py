"""Guesses at what follows: how many a step may check for nothing, and who makes them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ._native import chunk_end
from .arrays import Logits
from .batch import Part
from .drafting import Drafter
from .request import Request
from .session import Session
from .types import TokenKind

_ON_DEVICE = 8
"""Tokens of a step that devices have kernels of their own for."""


def free_guesses(session: Session) -> int:
    """Most tokens, beyond the first, that a step can take and still give each the very logits it has alone.

    Kernels for many tokens round otherwise than those for one, so wider steps could change answers; in
    predicted mode there may be none. It is measured: a few steps in sequence 0, which is empty before and
    after. With a device it is as many as it decodes together, which changes answers where two tokens are as
    good as equally likely.
    """
    info, n_vocab = session.info, session.model.info.n_vocab
    if info.n_device_bytes:
        return min(_ON_DEVICE, info.n_batch, info.n_ctx) - 1
    together = chunk_end(0, info.n_ctx, info.n_batch, generated_from=0)  # of generated tokens
    most = min(together, info.n_batch, info.n_ctx)
    ids = np.arange(1, most + 1, dtype=np.int32) * 7 % n_vocab
    alone: list[Logits] = []
    try:
        for i in range(most):
            session.feed(ids[i : i + 1])
            alone.append(session.logits().copy())
        n = most
        while n > 1:
            session.drop()
            session.feed(ids[:n], want_logits=[TokenKind.GENERATED] * n)
            if all(np.array_equal(alone[i], session.logits(i)) for i in range(n)):
                return n - 1
            n //= 2
    finally:
        session.drop()
    return 0


def take_guesses(running: Sequence[Request], n_guesses: int, n_vocab: int) -> list[tuple[Request, Exception]]:
    """Gives requests that have a draft ids that may follow, where the step is so narrow that each token has
    the logits it has alone. Returns those whose draft failed, and how, if it is the user's."""
    if any(r.sequence is None or r.sequence.n < r.generated_from for r in running):
        return []  # a prompt is computed otherwise
    room = n_guesses + 1 - sum(request.left for request in running)
    failed = []
    asked: dict[Drafter, list[tuple[Request, int]]] = {}
    for request in running:
        if room < 1 or request.draft is None:
            continue
        if isinstance(request.draft, Drafter):
            n = min(request.draft.n_draft, room, request.room_for_guesses)
            if n > 0:
                asked.setdefault(request.draft, []).append((request, n))
                room -= n
            continue
        try:
            ids = np.asarray(request.draft(request.history.copy())).ravel()[:room]
            bad = np.flatnonzero((ids < 0) | (ids >= n_vocab))
            request.take_guess(ids[: bad[0] if bad.size else ids.size].astype(np.int32))
        except Exception as error:
            failed.append((request, error))
        room -= request.guess.size
    for drafter, requests in asked.items():
        guesses = drafter.guess([(r.sequence.number, r.ids[: r.n], n) for r, n in requests if r.sequence])
        for (request, _), ids in zip(requests, guesses, strict=True):
            bad = np.flatnonzero(ids >= n_vocab)
            request.take_guess(ids[: bad[0] if bad.size else ids.size])
    return failed


def show_heads(session: Session, parts: Sequence[Part]) -> None:
    """Heads that draft are shown the hidden states of what was just computed."""
    drafters = [r.draft if isinstance(r.draft, Drafter) and r.draft.is_head else None for r, _ in parts]
    if not any(drafters):
        return
    hidden = session.all_hidden(sum(n for _, n in parts))
    first = 0
    for (request, n), drafter in zip(parts, drafters, strict=True):
        sequence = request.sequence
        if drafter is not None and sequence is not None:
            at, rows = sequence.n - n, hidden[first : first + n]
            drafter.saw(sequence.number, request.ids[: sequence.n], at, rows, min(sequence.n, request.n))
        first += n
