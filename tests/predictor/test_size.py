"""The search of sizes, on evaluators that need no training."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from powerinfer.models.predictor.size import (
    Activity,
    Measure,
    Trial,
    activity_of,
    chosen,
    chosen_least,
    first_size,
    search,
    search_least,
    sizes,
)

ALLOWED = sizes(1024)


def saturating(needed: int, calls: list[int]) -> Measure:
    """Accuracy that reaches 0.95 at a rank of `needed`; the fewest bytes are read there, too."""

    def measure(rank: int) -> Trial:
        calls.append(rank)
        accuracy = 1 - 0.05 * needed / rank
        return Trial(rank=rank, accuracy=accuracy, bytes=rank / needed + needed / rank)

    return measure


def test_sizes_fill_blocks_and_grow_by_half_at_most() -> None:
    assert ALLOWED[:8] == [32, 64, 96, 128, 192, 256, 384, 512]
    assert all(size % 32 == 0 for size in ALLOWED)
    assert all(b <= 1.5 * a for a, b in pairwise(ALLOWED[1:]))
    assert sizes(10) == [32] and sizes(100) == [32, 64, 96]


@pytest.mark.parametrize("needed", [20, 64, 100, 300, 900])
@pytest.mark.parametrize("first", [32, 128, 1024])
def test_the_target_is_just_reached_from_above_and_below(first: int, needed: int) -> None:
    calls: list[int] = []
    trials = search(saturating(needed, calls), first=first, allowed=ALLOWED, target=0.95)
    best = chosen(trials, 0.95).rank
    assert best == min(size for size in ALLOWED if size >= needed)
    assert [trial.rank for trial in trials] == calls
    below = [size for size in ALLOWED if size < best]
    assert not below or below[-1] in calls  # the next smaller one was seen to fail
    steps = np.diff(calls)
    assert (steps > 0).all() or (steps < 0).all()


def test_it_grows_when_the_target_is_missed_and_shrinks_when_it_is_overfulfilled() -> None:
    calls: list[int] = []
    search(saturating(300, calls), first=128, allowed=ALLOWED, target=0.95)
    assert calls == [128, 192, 256, 384]
    calls.clear()
    search(saturating(60, calls), first=128, allowed=ALLOWED, target=0.95)
    assert calls == [128, 96, 64, 32]


def test_the_budget_ends_the_search() -> None:
    calls: list[int] = []
    trials = search(saturating(5000, calls), first=96, allowed=sizes(200), target=0.95)
    assert calls == [96, 128, 192]
    assert chosen(trials, 0.95).rank == 192  # nothing reached it: the most accurate
    assert chosen([Trial(rank=r, accuracy=0.9, bytes=0) for r in (96, 64)], 0.95).rank == 64


@pytest.mark.parametrize("needed", [10, 100, 310, 5000])
@pytest.mark.parametrize("first", [32, 128, 1024])
def test_the_fewest_bytes_are_found_from_above_and_below(first: int, needed: int) -> None:
    calls: list[int] = []
    trials = search_least(saturating(needed, calls), first=first, allowed=ALLOWED)
    best = chosen_least(trials).rank
    assert best == min(ALLOWED, key=lambda rank: rank / needed + needed / rank)
    at = ALLOWED.index(best)
    assert {*ALLOWED[max(at - 1, 0) : at + 2]} <= {*calls}  # its neighbours were seen to read more
    assert len(calls) == len({*calls}) <= abs(at - ALLOWED.index(first)) + 3


def test_more_activity_begins_larger_and_more_skewness_smaller() -> None:
    def first(active: float, skewness: float) -> int:
        return first_size(Activity(active=active, skewness=skewness), 1024, ALLOWED)

    assert first(0.01, 0.5) < first(0.05, 0.5) < first(0.2, 0.5)
    assert first(0.05, 0.95) < first(0.05, 0.3)
    assert first(0.0, 1.0) == 32
    assert first(0.9, 0.2) <= 1024


def test_activity_is_counted() -> None:
    counts = np.array([100, 10, 0, 0, 0, 0, 0, 0, 0, 0], np.uint64)
    activity = activity_of(counts, 200)
    assert activity.active == 110 / 2000
    assert activity.skewness == 1.0  # the hottest fifth: two neurons
    even = activity_of(np.full(10, 7, np.uint64), 7)
    assert even == Activity(active=1.0, skewness=0.2)
    assert activity_of(np.zeros(10, np.uint64), 7).active == 0
