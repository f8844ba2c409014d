"""Prompts and generations for the tests of the scheduler."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from powerinfer import LogitsProcessorList
from powerinfer._engine.choice import Choice
from powerinfer._engine.sampling import Sampler, Sampling
from powerinfer._engine.scheduler import Scheduler, Stream

Ids = npt.NDArray[np.int32]
MakeScheduler = Callable[..., Scheduler]
N_VOCAB = 320


def prompt(n: int, seed: int = 0) -> Ids:
    return np.random.default_rng(seed).integers(3, N_VOCAB, n).astype(np.int32)


def choice(seed: int | None = None, *, n_vocab: int = N_VOCAB, **more: Any) -> Choice:
    """Greedy, or drawn with a seed."""
    sampler = Sampler(Sampling(temperature=0.0 if seed is None else 1.0, top_k=0, top_p=1.0), n_vocab)
    sampler.reset(seed or 0)
    return Choice(sampler=sampler, **more)


def wait_until(true: Callable[[], bool]) -> None:
    for _ in range(24000):
        if true():
            return
        time.sleep(0.005)
    raise AssertionError("it did not happen in two minutes")


def blocked(scheduler: Scheduler, n: int) -> tuple[list[Stream], threading.Event]:
    """n generations under way that wait for an event after their first token."""
    go = threading.Event()

    def wait(ids: Ids, _: object) -> None:
        if ids.size > 5:
            go.wait(10)

    hooks = LogitsProcessorList([wait])
    with (
        scheduler.engine.changed
    ):  # in one step: the first one's second token would keep the others' first ones back
        streams = [scheduler.submit(prompt(5, i), choice(processors=hooks), limit=30) for i in range(n)]
    for stream in streams:
        next(stream)
    return streams, go
