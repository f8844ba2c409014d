"""Curves of thresholds against sorting and counting in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from powerinfer.errors import FormatError
from powerinfer.models.predictor.curve import N_BINS, Curve, bins_of, edges

Array = Any


def draw(seed: int, n_tokens: int = 64, n_ff: int = 96) -> tuple[Array, Array]:
    """Scores over many orders of magnitude, and a mass that is 0 for most pairs and goes with the score."""
    random = np.random.default_rng(seed)
    scores = random.standard_normal((n_tokens, n_ff)) * 10.0 ** random.integers(-6, 4, (n_tokens, n_ff))
    mass = np.where(
        scores + random.standard_normal(scores.shape) > 1, random.exponential(size=scores.shape), 0
    )
    return scores.astype(np.float32), mass.astype(np.float32)


def curve_of(scores: Array, mass: Array) -> Curve:
    curve = Curve()
    for at in range(0, len(scores), 7):
        curve.add(scores[at : at + 7], mass[at : at + 7])
    return curve


floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(arrays(np.float32, 8, elements=floats))
def test_bins_keep_the_order_and_edges_are_their_lowest(values: Array) -> None:
    bins = bins_of(values)
    order = np.argsort(values, kind="stable")
    assert (np.diff(bins[order].astype(np.int64)) >= 0).all()
    assert (bins < N_BINS).all()
    low = edges(bins)
    assert (low <= values).all()
    assert (bins_of(low) == bins).all()
    # 8 bits of fraction: what a bin holds is at most 1/256 apart.
    normal = np.abs(values) > 1e-30
    assert (np.abs(values[normal] - low[normal]) <= np.abs(values[normal]) / 256).all()


def test_zero_has_one_sign() -> None:
    assert bins_of(np.array([-0.0], np.float32)) == bins_of(np.array([0.0], np.float32))
    assert edges(bins_of(np.array([-0.0], np.float32))) == 0


@pytest.mark.parametrize("target", [0.5, 0.9, 0.99, 0.9999])
@pytest.mark.parametrize("seed", range(4))
def test_a_threshold_keeps_its_target_and_hardly_more(seed: int, target: float) -> None:
    scores, mass = draw(seed)
    threshold = np.float32(curve_of(scores, mass).threshold(target))
    total = mass.sum(dtype=np.float64)
    assert mass[scores >= threshold].sum(dtype=np.float64) >= target * total * (1 - 1e-12)
    higher = edges(bins_of(threshold[None]) + np.uint32(1))[0]  # the next edge
    while not ((scores >= threshold) & (scores < higher)).any():
        higher = edges(bins_of(higher[None]) + np.uint32(1))[0]
    assert mass[scores >= higher].sum(dtype=np.float64) < target * total


@pytest.mark.parametrize("seed", range(4))
def test_a_point_is_what_counting_says(seed: int) -> None:
    scores, mass = draw(seed)
    curve = curve_of(scores, mass)
    point = curve.at(curve.threshold(0.97))
    predicted, active = scores >= np.float32(point.threshold), mass > 0
    assert point.computed == predicted.mean()
    assert point.active == active.mean()
    assert point.recall == (predicted & active).sum() / active.sum()
    assert point.precision == (predicted & active).sum() / predicted.sum()
    assert point.mass == pytest.approx(mass[predicted].sum(dtype=np.float64) / mass.sum(dtype=np.float64))
    assert point.accuracy == pytest.approx((predicted == active).mean(), abs=1e-12)
    assert point.active_computed == pytest.approx((predicted & active).mean(), abs=1e-12)
    assert curve.n_tokens == len(scores)


def test_a_layer_that_never_fires_computes_next_to_nothing() -> None:
    scores, _ = draw(1)
    curve = curve_of(scores, np.zeros_like(scores))
    point = curve.at(curve.threshold(0.99))
    assert point.active == 0 and point.recall == 1 and point.mass == 1
    assert point.computed <= 2 / scores.size


def test_scores_that_are_no_numbers_are_refused() -> None:
    for wrong in (np.nan, np.inf, -np.inf):
        with pytest.raises(FormatError, match="not finite"):
            Curve().add(np.array([[0.0, wrong]], np.float32), np.ones((1, 2), np.float32))
