"""What a GPU does once for each kind of step, before anybody waits for it: its driver loads a kernel's code
when it is first used, work space grows to what the largest step needs, and programs of next tokens are
recorded. Otherwise the first requests wait for that, and those that are under way when somebody comes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from .sampling import Sampler, Sampling
from .session import Session
from .types import TokenKind

MOST_S = 1.0
"""No step begins later."""
_PROMPTS = (192, 128, 64, 32, 16)  # tokens, whose products have kernels of their own
_NEXT = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 32, 64)  # sequences that generate
_MIXED = ((16, 2), (56, 8))  # tokens of a prompt, and sequences that generate beside it


def warm_up(session: Session, n_parallel: int, most_s: float = MOST_S) -> int:
    """Computes a step of each kind, for most_s or a little longer, where a GPU has all of the model:
    elsewhere most of a prompt's time is spent each time anew. Sequences, which must be empty, are empty
    again. Returns how many steps.

    n_parallel: so many generate together at most.
    """
    info = session.info
    if not (info.n_mixed or info.n_part) or session.count_neurons:
        return 0
    until, n_steps = time.monotonic() + most_s, 0
    rng, n_vocab = np.random.default_rng(0), session.model.info.n_vocab
    samplers = [Sampler(Sampling(), n_vocab) for _ in range(min(n_parallel, _NEXT[-1]))]
    n_part = min(info.n_part, info.n_ctx)
    if n_part:
        session.begin_part(rng.integers(0, n_vocab, n_part).tolist(), seq=[0] * n_part)
        session.end_part()
        session.drop(0)
        n_steps += 1
    for n_prompt, n_next in _steps(session, len(samplers)):
        if time.monotonic() >= until:
            break
        n_rows = max(n_next, 1)
        ids = rng.integers(0, n_vocab, n_prompt + n_next, np.int32)
        owners = [0] * n_prompt + [*range(min(n_prompt, 1), n_next + min(n_prompt, 1))]
        kinds = [TokenKind.PROMPT] * (ids.size - n_rows) + [TokenKind.GENERATED] * n_rows
        session.feed(ids, seq=owners, want_logits=kinds, rows=[*range(n_rows)], samplers=samplers[:n_rows])
        for q in {*owners}:
            session.drop(q)
        n_steps += 1
    return n_steps


def _steps(session: Session, n_parallel: int) -> Iterator[tuple[int, int]]:
    """Tokens of a prompt, and next ones of other sequences: the largest first, for what is recorded holds the
    work space of its time."""
    info = session.info
    for n in sorted({min(n, info.n_batch, info.n_ctx) for n in (info.n_batch, *_PROMPTS)}, reverse=True):
        yield n, 0
    most = min(n_parallel, info.n_seq, info.n_blocks - 1)  # each has a block, and the prompt has one
    for n_prompt, n_next in _MIXED:
        if n_next < most and n_prompt + n_next <= info.n_mixed:
            yield n_prompt, n_next
    for n in _NEXT:
        if n <= most:
            yield 0, n
