"""How much of prompts a step reads: what a machine takes is made up here, nothing is timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from powerinfer._engine.choice import Choice
from powerinfer._engine.pace import Pace
from powerinfer._engine.sampling import Sampler, Sampling

Cost = Callable[[int], float]


def resident(n: int) -> float:
    """Milliseconds of a part, all weights on a GPU: up to 64 tokens read them in their own format."""
    return 2 + 0.12 * n if n <= 64 else 10 + 0.055 * n


def streamed(n: int) -> float:
    return 250 + 0.1 * n


def processor(n: int) -> float:
    return 3.0 * n


def settled(pace: Pace, cost: Cost, quiet: float, n_reading: int = 1, n_generating: int = 8) -> list[int]:
    """The last of many parts."""
    for _ in range(20):
        pace.saw(0, n_generating, quiet)
    parts: list[int] = []
    while len(parts) < 200:
        if part := pace.part(n_reading, n_generating):
            parts.append(part)
        pace.saw(part, n_generating, quiet + (cost(part) if part else 0))
    return parts[-50:]


@pytest.mark.parametrize(
    ("cost", "quiet", "n_reading", "n_generating", "wanted"),
    [
        (resident, 4.9, 1, 8, {16}),
        (resident, 10.0, 1, 64, {64}),
        (resident, 10.0, 8, 32, {64}),
        (resident, 17.1, 1, 64, {128}),
        (resident, 5.0, 60, 4, {512}),  # nearly all wait for their prompts
        (resident, 2.0, 1, 1, {256}),  # none is so short
        (streamed, 24.0, 1, 8, {512}),
        (processor, 20.0, 1, 8, {16}),
    ],
)
def test_what_a_part_settles_at(
    cost: Cost, quiet: float, n_reading: int, n_generating: int, wanted: set[int]
) -> None:
    parts = settled(Pace(), cost, quiet, n_reading, n_generating)
    assert set(parts) <= wanted | {parts[0]} and parts.count(parts[-1]) > 40
    assert parts[-1] in wanted


@pytest.mark.parametrize(("cost", "quiet", "wanted"), [(resident, 10.0, 64), (processor, 200.0, 64)])
def test_where_nothing_is_read_once_for_both_parts_are_not_cut(cost: Cost, quiet: float, wanted: int) -> None:
    assert settled(Pace(), cost, quiet)[-1] == wanted


def test_others_take_twice_as_long_at_most() -> None:
    parts = settled(Pace(), resident, 6.0)
    assert sum(resident(part) <= 6.0 for part in parts) >= 48


@pytest.mark.parametrize(
    ("cost", "quiet", "n_reading", "times"),
    [(resident, 2.0, 1, 2), (streamed, 24.0, 1, 2), (streamed, 24.0, 32, 5), (processor, 20.0, 1, 2)],
)
def test_where_no_part_is_short_others_have_steps_for_themselves(
    cost: Cost, quiet: float, n_reading: int, times: int
) -> None:
    """Their tokens take twice as long on average, or longer where more read than generate."""
    pace = Pace()
    settled(pace, cost, quiet, n_reading)
    took = []
    for _ in range(2000):
        part = pace.part(n_reading, 8)
        took.append(quiet + (cost(part) if part else 0))
        pace.saw(part, 8, took[-1])
    assert np.mean(took) == pytest.approx(times * quiet, rel=0.25)


def test_what_took_long_once_is_tried_again() -> None:
    pace = Pace(n_mixed=64)
    assert set(settled(pace, lambda n: 100.0 * n, 10.0)) == {16}
    for _ in range(30):
        parts = settled(pace, resident, 10.0)
    assert parts.count(56) > 40


@pytest.mark.parametrize(
    ("n_generating", "wanted"), [(1, 56), (8, 56), (9, 48), (20, 40), (31, 32), (33, 24), (48, 16), (60, 16)]
)
def test_a_part_beside_others_in_one_program(n_generating: int, wanted: int) -> None:
    """A step of up to 64 tokens takes 7 ms instead of 4, others much more."""
    pace = Pace(n_mixed=64)
    for _ in range(20):
        pace.saw(0, n_generating, 4.0)
    parts = []
    for _ in range(600):
        if part := pace.part(1, n_generating):
            parts.append(part)
        seconds = 4.0 if not part else 7.0 if part + n_generating <= 64 else 7.5 if part <= 16 else 36.0
        pace.saw(part, n_generating, seconds)
    dear = sum(part + n_generating > 64 for part in parts)
    assert parts.count(wanted) > 540
    assert dear <= 5 or wanted + n_generating > 64


def test_before_anything_is_known() -> None:
    pace = Pace()
    assert pace.part(1, 1) == 128
    pace.saw(128, 0, 5.0)  # alone: nobody waits
    pace.saw(128, 1, 5.0)  # nor is it known what a token takes without it
    pace.saw(0, 1, 5.0)
    assert pace.part(1, 1) == 128
    pace.saw(1000, 1, 5.0)  # a text's
    assert pace.part(1, 1) == 128


def test_a_given_size_stays() -> None:
    pace = Pace(40)
    assert set(settled(pace, resident, 0.1)) == {40}


def test_the_number_that_generate_counts() -> None:
    """Others than those that were seen are taken for the nearest ones."""
    pace = Pace()
    settled(pace, resident, 12.0, 1, 64)
    settled(pace, resident, 2.0, 1, 1)
    assert pace.part(1, 1) == 0  # others have not had their steps yet
    pace.saw(0, 1, 2.0, n_steps=100)
    assert pace.part(1, 50) == 64 == pace.part(1, 90)
    assert pace.part(1, 1) == 256


def test_guesses_are_no_prompts(make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make(draft=lambda ids: [5, 6, 7], n_guesses=3)
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(Pace, "saw", lambda self, n_read, n, seconds: seen.append((n_read, n)))
    with scheduler.engine.changed:  # none begins before all are there
        streams = [
            scheduler.submit(
                np.array([i], np.int32), Choice(sampler=Sampler(Sampling(temperature=0), 320)), limit=12
            )
            for i in (5, 9, 30)
        ]
    for stream in streams:
        list(stream)
    assert scheduler.engine.totals["drafted"] > 0
    assert not any(n_read for n_read, _ in seen)
