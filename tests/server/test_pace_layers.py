"""The pace of parts whose layers are computed a few at a time, on clocks that are made up."""

from __future__ import annotations

import pytest

from powerinfer._engine.pace import LAYERED_FROM, Pace
from powerinfer._engine.pace_layers import LayerPace

N_LAYER, MOST = 32, 440
BESIDE = 0.1  # of a quiet step, which those beside layers take more


def layer_of(n: int, depth: int) -> float:
    """Seconds of a layer of n tokens on an H200, about: weights, read as they are or made F16 first, products
    and attention."""
    return 0.00008 + n * 0.9e-6 + (0.00025 if n > 192 else 0) + 3.3e-11 * n * depth + 3e-9 * depth


def quiet_of(n_generating: int) -> float:
    return 0.0016 if n_generating == 1 else 0.0034 + 3e-5 * n_generating


def read(pace: Pace, n_prompt: int, n_generating: int) -> tuple[list[float], list[int]]:
    """How many times the quiet step each step of a prompt takes, and the parts' tokens. What is done in front
    of a part takes some time for each token."""
    quiet, at, times, sizes = quiet_of(n_generating), 0, [], []
    while at < n_prompt:
        if n := pace.rest(n_generating):
            pace.saw(0, n_generating, quiet, n_steps=n)
            times += [1.0] * n
            continue
        n, layers = pace.part_in_layers(n_prompt - at, 1, n_generating, n_most=MOST, n_layer=N_LAYER)
        if not n:  # a step reads the rest
            return times, sizes
        each, waited = layer_of(n, at), n * 4e-6
        if times:
            times[-1] += waited / quiet
        saw(pace, n, n_generating, quiet, each, waited, -(-N_LAYER // layers))
        rounds = [min(layers, N_LAYER - done) for done in range(0, N_LAYER, layers)]
        times += [1 + BESIDE + n_layers * each / quiet for n_layers in rounds]
        sizes.append(n)
        at += n
    return times, sizes


def saw(
    pace: Pace,
    n: int,
    n_generating: int,
    quiet: float,
    each: float,
    waited: float,
    n_steps: int,
    n_layer: int = N_LAYER,
) -> None:
    pace.saw_layers(
        n,
        n_generating,
        n_steps * (1 + BESIDE) * quiet + n_layer * each,
        part_s=n_layer * each,
        waited_s=waited,
        n_steps=n_steps,
        n_layer=n_layer,
    )


@pytest.mark.parametrize("n_generating", [1, 16])
def test_first_runs_that_take_long(n_generating: int) -> None:
    """Of a program, whose code is loaded meanwhile: they say nothing of those that come."""
    pace, quiet, seen = Pace(n_mixed=192), quiet_of(n_generating), set()
    pace.saw(0, n_generating, quiet, n_steps=20)
    took = n_steps = 0
    for i in range(60):
        n, layers = pace.part_in_layers(8000, 1, n_generating, n_most=MOST, n_layer=N_LAYER)
        each, longer = layer_of(n, 100), 0.0 if n in seen else 0.02
        seen.add(n)
        n_rounds = -(-N_LAYER // layers)
        seconds = n_rounds * (1 + BESIDE) * quiet + N_LAYER * each
        part_s = N_LAYER * each + longer
        pace.saw_layers(
            n,
            n_generating,
            seconds + 2 * longer,
            part_s=part_s,
            waited_s=n * 4e-6,
            n_steps=n_rounds,
            n_layer=N_LAYER,
        )
        if i >= 20:
            took, n_steps = took + seconds, n_steps + n_rounds
        while rest := pace.rest(n_generating):
            pace.saw(0, n_generating, quiet, n_steps=rest)
    assert 1.5 < took / n_steps / quiet < 1.81


@pytest.mark.parametrize("n_generating", [1, 4, 16, 64])
def test_no_step_takes_twice_as_long(n_generating: int) -> None:
    """From the first part on, at any depth, for a prompt after another; and steps are made use of."""
    pace = Pace(n_mixed=192)
    pace.saw(0, n_generating, quiet_of(n_generating), n_steps=20)
    for _ in range(3):
        times, sizes = read(pace, 8000, n_generating)
        assert max(times) < 2.1 and sum(t > 2 for t in times) < 0.01 * len(times) and sum(sizes) > 7700
    assert sum(times) / len(times) > 1.5
    each = min(
        sum(layer_of(n, at) for at in range(0, 8000, n)) * N_LAYER for n in (64, 128, 192, MOST)
    )  # were steps not whole ones
    assert sum(times) * quiet_of(n_generating) < 1.6 * each * (1 + (1 + BESIDE) / (0.8 - BESIDE))


@pytest.mark.parametrize(
    ("times", "wanted"),
    [
        ({64: 1, 128: 1.8, 192: 5, 448: 9}, 128),
        ({64: 1, 128: 2, 192: 3, 448: 4}, MOST),
        ({64: 1, 128: 3, 192: 9, 448: 30}, 64),
    ],
)
def test_the_size_that_is_faster(times: dict[int, float], wanted: int) -> None:
    pace, sizes = LayerPace(), []
    for _ in range(40):
        n, layers = pace.choose(8000, MOST, 192, N_LAYER, 0.0034, 0.0029)
        assert layers >= 1
        pace.saw(n, N_LAYER, N_LAYER * times[-(-n // 64) * 64] * 1e-4, 0)
        sizes.append(n)
    assert sizes.count(wanted) >= 30


def test_a_layer_that_takes_longer_than_a_step_may() -> None:
    """Others then have steps for themselves between the parts."""
    pace, quiet = Pace(n_mixed=192), 0.001
    pace.saw(0, 1, quiet, n_steps=20)
    took, n_steps = 0.0, 0
    for _ in range(50):
        while n := pace.rest(1):
            pace.saw(0, 1, quiet, n_steps=n)
            took, n_steps = took + n * quiet, n_steps + n
        n, layers = pace.part_in_layers(8000, 1, 1, n_most=MOST, n_layer=4)
        saw(pace, n, 1, quiet, 0.003, 0, 4, n_layer=4)
        assert (n, layers) == (64, 1)
        took, n_steps = took + 4 * (quiet + 0.003), n_steps + 4
    assert took / n_steps < 2 * quiet


def test_what_a_step_takes_follows() -> None:
    """Where contexts grow, rounds tell it by themselves."""
    pace = Pace(n_mixed=192)
    pace.saw(0, 4, 0.003, n_steps=20)
    for i in range(60):
        assert not pace.rest(4)
        pace.part_in_layers(8000, 1, 4, n_most=MOST, n_layer=N_LAYER)
        saw(pace, 128, 4, 0.003 + min(i, 40) * 5e-5, 0.0002, 0, 8)
    assert 0.0048 < pace._times[3].last_quiet < 0.0053


def test_what_is_no_matter_of_layers() -> None:
    def choose(pace: Pace, n_left: int, n_generating: int, n_most: int = MOST) -> int:
        return pace.part_in_layers(n_left, 1, n_generating, n_most=n_most, n_layer=N_LAYER)[0]

    pace, fixed = Pace(n_mixed=192), Pace(64, n_mixed=192)
    assert not choose(pace, 8000, 8)  # it is not known yet what a step takes
    for n_generating in (1, 8, 50, 80):
        for each in (pace, fixed):
            each.saw(0, n_generating, 0.003, n_steps=20)
    assert choose(pace, 8000, 8) and choose(pace, LAYERED_FROM, 8) == LAYERED_FROM
    assert not choose(pace, LAYERED_FROM - 1, 8) and not choose(
        pace, 200, 50
    )  # one program with others' tokens
    assert choose(pace, 8000, 50)
    assert choose(pace, 40, 1) == 40 and not choose(pace, 16, 1)
    assert not choose(pace, 8000, 80)
    assert not choose(pace, 8000, 8, n_most=0) and not choose(fixed, 8000, 8)
