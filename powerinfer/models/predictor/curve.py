"""What a threshold costs and what it keeps: one layer's scores against what its neurons contributed.

    curve = Curve()
    curve.add(scores, mass)          # [n_tokens, n_ff] each, as often as there is data
    threshold = curve.threshold(0.99)
    curve.at(threshold).computed     # share of the neurons whose score reaches it

The mass of neuron j for a token is what it adds to the residual, |h_j| * ||row j of down||; it is 0 where the
neuron is silent. Scores are sorted into bins whose edges are floats with 8 bits of fraction, so a curve has a
fixed size, needs no range in advance, and is exact at every edge.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...errors import FormatError

_SHIFT = 15  # of the 32 bits of a float, sign and exponent and 8 bits of fraction stay
N_BINS = 1 << (32 - _SHIFT)
_SIGN = np.uint32(1 << 31)

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Point:
    """What one threshold does. Shares are of (token, neuron) pairs."""

    threshold: float
    computed: float
    """Share of the pairs that are predicted."""
    active: float
    """Share of the pairs that are active, predicted or not."""
    recall: float
    """Share of the active pairs that are predicted; 1 if none is active."""
    precision: float
    """Share of the predicted pairs that are active; 1 if none is predicted."""
    mass: float
    """Share of the activation mass that the predicted pairs carry; 1 if there is none."""

    @property
    def accuracy(self) -> float:
        """Share of the pairs that are rightly predicted or rightly left out."""
        hits = self.recall * self.active
        return 1 - (self.active - hits) - (self.computed - hits)

    @property
    def active_computed(self) -> float:
        """Share of the pairs that are active and predicted."""
        return self.recall * self.active


def bins_of(scores: Floats) -> npt.NDArray[np.uint32]:
    """The bin of each score; a higher score is never in a lower bin. Raises FormatError for infinities
    and NaN."""
    values = np.ascontiguousarray(scores, np.float32)
    if not np.isfinite(values).all():
        raise FormatError(
            "a predictor's scores are not finite: its weights, or those of the model, are broken"
        )
    bits = (values + np.float32(0)).view(np.uint32)  # -0 is 0
    return np.asarray(np.where(bits & _SIGN, ~bits, bits | _SIGN) >> np.uint32(_SHIFT))


def edges(bins: npt.NDArray[np.integer]) -> Floats:
    """The lowest float of each bin: exactly the scores of this bin and those above are at least that."""
    ordered = bins.astype(np.uint32) << np.uint32(_SHIFT)
    bits = np.where(ordered & _SIGN, ordered ^ _SIGN, ~ordered)
    return np.ascontiguousarray(bits, np.uint32).view(np.float32)


class Curve:
    """Pairs, active pairs and mass by score."""

    def __init__(self) -> None:
        self.n_tokens = 0
        self.count = np.zeros(N_BINS, np.int64)
        self.active = np.zeros(N_BINS, np.int64)
        self.mass = np.zeros(N_BINS, np.float64)

    def add(self, scores: Floats, mass: Floats) -> None:
        """scores, mass [n_tokens, n_ff]; a pair is active where its mass is above 0."""
        bins = bins_of(scores).reshape(-1)
        weight = mass.reshape(-1)
        self.n_tokens += len(scores)
        self.count += np.bincount(bins, minlength=N_BINS)
        fired = np.flatnonzero(weight > 0)
        bins = bins[fired]
        self.active += np.bincount(bins, minlength=N_BINS)
        self.mass += np.bincount(bins, weights=weight[fired], minlength=N_BINS)

    def steps(self) -> Steps:
        """The curve as sums over the scores from above."""
        used = np.flatnonzero(self.count)[::-1]
        return Steps(
            threshold=edges(used).astype(np.float64),
            count=np.cumsum(self.count[used]),
            active=np.cumsum(self.active[used]),
            mass=np.cumsum(self.mass[used]),
        )

    def threshold(self, target: float) -> float:
        """The highest edge that keeps this share of the mass."""
        steps = self.steps()
        return float(steps.threshold[steps.index(target)])

    def at(self, threshold: float) -> Point:
        """What a threshold does. Exact if it is an edge, as those of `threshold` are; else the bin that it
        lies in counts as predicted."""
        first = int(bins_of(np.array([threshold], np.float32))[0])
        count, active = int(self.count[first:].sum()), int(self.active[first:].sum())
        mass = float(self.mass[first:].sum())
        n, n_active, n_mass = int(self.count.sum()), int(self.active.sum()), float(self.mass.sum())
        return make_point(threshold, n, count, n_active, active, n_mass, mass)


def make_point(
    threshold: float, n: int, computed: int, n_active: int, hits: int, n_mass: float, mass: float
) -> Point:
    """From counts: pairs, predicted pairs, active pairs, pairs that are both; mass in all and predicted."""
    return Point(
        threshold=threshold,
        computed=computed / n if n else 0.0,
        active=n_active / n if n else 0.0,
        recall=hits / n_active if n_active else 1.0,
        precision=hits / computed if computed else 1.0,
        mass=mass / n_mass if n_mass > 0 else 1.0,
    )


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Thresholds from high to low, and what is predicted at each: pairs, active pairs, mass."""

    threshold: npt.NDArray[np.float64]
    count: npt.NDArray[np.int64]
    active: npt.NDArray[np.int64]
    mass: npt.NDArray[np.float64]

    def index(self, target: float) -> int:
        """The first step that keeps this share of the mass."""
        return min(int(np.searchsorted(self.mass, target * self.mass[-1])), len(self.mass) - 1)
