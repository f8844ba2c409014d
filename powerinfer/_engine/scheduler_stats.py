"""What a scheduler tells of itself."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from .expert_stats import ExpertStats, experts_together
from .request import Request
from .session import LayerStep

_RATE_S = 5.0  # speeds are those of the last seconds


SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0),
    *(10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)


@dataclass
class Times:
    """How many times were not above each of SECONDS but above the one before; the last: above all."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(SECONDS) + 1))
    sum_s: float = 0.0

    def add(self, seconds: float, n: int = 1) -> None:
        """n: how many were as long."""
        self.counts[bisect_left(SECONDS, seconds)] += n
        self.sum_s += n * seconds

    def copy(self) -> Times:
        return Times(list(self.counts), self.sum_s)

    @property
    def mean_s(self) -> float:
        n = sum(self.counts)
        return self.sum_s / n if n else 0.0


def _added(all_times: Iterable[Times]) -> Times:
    found = Times()
    for times in all_times:
        found.counts = [a + b for a, b in zip(found.counts, times.counts, strict=True)]
        found.sum_s += times.sum_s
    return found


class RequestTimes:
    """When requests had their places and their tokens."""

    def __init__(self) -> None:
        self.queue, self.first_token, self.between_tokens = Times(), Times(), Times()

    def placed(self, request: Request) -> None:
        self.queue.add(time.monotonic() - request.came_at)

    def given(self, requests: Iterable[Request], now: float) -> None:
        """A step's tokens, each of which one of these has."""
        before: dict[float, int] = {}  # most have had their last token at the same time
        for request in requests:
            at = request.token_at
            if at is None:
                self.first_token.add(now - request.came_at)
            else:
                before[at] = before.get(at, 0) + 1
            request.token_at = now
        for at, n in before.items():
            self.between_tokens.add(now - at, n)


@dataclass(frozen=True, kw_only=True)
class SchedulerStats:
    """What a scheduler does at the moment and has done since it was made."""

    running: int
    waiting: int
    max_running: int
    max_waiting: int
    n_ended: dict[str, int]
    """Requests by the reason why they ended."""
    n_prompt_tokens: int
    n_reused_tokens: int
    """Of the prompts' tokens those that were held already."""
    n_computed_tokens: int
    n_generated_tokens: int
    n_steps: int
    n_preempted: int
    """Times that a generation had to give its memory back and wait."""
    n_evicted: int
    """Idle sequences that were forgotten."""
    kv_used: float
    """Share of the memory for K and V that is taken, idle sequences included: 0 to 1."""
    tokens_per_s: float
    prompt_tokens_per_s: float
    queue: Times
    """That requests waited for a place."""
    first_token: Times
    """From when a generation came to its first token."""
    between_tokens: Times
    layers: tuple[LayerStep, ...]
    """What a step of the last quarter of a second did; empty before the first."""
    experts: ExpertStats | None = None
    """As of then; None: the model is no mixture."""
    n_replicas: int = 1
    """Sessions that compute."""


def together(all_stats: Sequence[SchedulerStats]) -> SchedulerStats:
    """Of several schedulers of one model; layers are the first one's."""
    ended: Counter[str] = Counter()
    for own in all_stats:
        ended.update(own.n_ended)
    values: dict[str, Any] = {"n_ended": dict(ended), "layers": all_stats[0].layers}
    for name in ("queue", "first_token", "between_tokens"):
        values[name] = _added(getattr(own, name) for own in all_stats)
    values["kv_used"] = sum(own.kv_used for own in all_stats) / len(all_stats)
    experts = [own.experts for own in all_stats if own.experts is not None]
    values["experts"] = experts_together(experts) if experts else None
    for each in fields(SchedulerStats):
        if each.name not in values:
            values[each.name] = sum(getattr(own, each.name) for own in all_stats)
    return SchedulerStats(**values)


class Rates:
    """Tokens per second over the last seconds."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, int, int]] = deque()

    def add(self, n_generated: int, n_prompt: int) -> None:
        now = time.monotonic()
        self._steps.append((now, n_generated, n_prompt))
        while self._steps[0][0] < now - _RATE_S:
            self._steps.popleft()

    def get(self) -> tuple[float, float]:
        now = time.monotonic()
        steps = [step for step in tuple(self._steps) if step[0] >= now - _RATE_S]
        if not steps:
            return 0.0, 0.0
        seconds = max(now - steps[0][0], 0.25)
        return sum(step[1] for step in steps) / seconds, sum(step[2] for step in steps) / seconds
