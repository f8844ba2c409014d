"""How much of prompts a step reads: what a machine takes is made up here, nothing is timed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from powerinfer._engine.pace import Pace

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
    parts = []
    for _ in range(200):
        parts.append(pace.part(n_reading, n_generating))
        pace.saw(parts[-1], n_generating, quiet + cost(parts[-1]))
    return parts[-50:]


@pytest.mark.parametrize(
    ("cost", "quiet", "n_reading", "n_generating", "wanted"),
    [
        (resident, 4.9, 1, 8, {16}),
        (resident, 10.0, 1, 64, {64}),
        (resident, 10.0, 8, 32, {64}),
        (resident, 17.1, 1, 64, {128}),
        (resident, 5.0, 60, 4, {512}),  # nearly all wait for their prompts
        (resident, 2.0, 1, 1, {32}),  # none is so short
        (streamed, 24.0, 1, 8, {128}),
        (processor, 20.0, 1, 8, {16}),
    ],
)
def test_what_a_part_settles_at(
    cost: Cost, quiet: float, n_reading: int, n_generating: int, wanted: set[int]
) -> None:
    parts = settled(Pace(), cost, quiet, n_reading, n_generating)
    assert set(parts) <= wanted | {parts[0]} and parts.count(parts[-1]) > 40
    assert parts[-1] in wanted


def test_others_take_twice_as_long_at_most() -> None:
    parts = settled(Pace(), resident, 6.0)
    assert sum(resident(part) <= 6.0 for part in parts) >= 48


def test_what_took_long_once_is_tried_again() -> None:
    pace = Pace()
    assert set(settled(pace, lambda n: 100.0 * n, 10.0)) == {16}
    for _ in range(30):
        parts = settled(pace, resident, 10.0)
    assert parts.count(64) > 40


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
    assert pace.part(1, 50) == 64 == pace.part(1, 90)
    assert pace.part(1, 1) < 64
