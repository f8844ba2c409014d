"""How large a layer's predictor must be: the adaptive search of the PowerInfer paper (Song et al., SOSP'24,
section 5.1).

The search begins at a size that the layer's sparsity suggests (the more neurons are active, the more there is
to tell), made smaller where the activity is skewed to few neurons, and larger where it is not. Then it goes
up, size by size, until the predictor is accurate enough, or down as long as it stays so. The sizes are 32,
64, 96, 128, 192, 256, 384, 512 ...: multiples of 32, so that rows divide into the blocks of Q4_0 and Q8_0,
each at most half as large again as the one before.

An accurate predictor computes few neurons in vain, but is itself read for every token. Where that counts, on
a CPU, the search can look for the fewest bytes instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

UNIT = 32
RANK_PER_ACTIVE = 5.0
"""Rank of the first size over n_embd times the share of active neurons."""
MOST_OF_EMBD = 0.5
"""Of n_embd that the first size may be."""
HOTTEST = 0.2
"""Share of the neurons whose share of the activity is the skewness."""


@dataclass(frozen=True, kw_only=True)
class Activity:
    """How a layer's neurons fire."""

    active: float
    """Mean share of the neurons that are active for a token."""
    skewness: float
    """Share of all activity that the hottest fifth of the neurons has: 0.2 where all are equally busy, up
    to 1."""


def activity_of(counts: npt.NDArray[np.uint64], n_tokens: int) -> Activity:
    """From how often each of a layer's neurons [n_ff] fired in so many tokens."""
    fired = np.sort(counts.astype(np.float64))[::-1]
    total = float(fired.sum())
    hottest = float(fired[: max(1, round(HOTTEST * fired.size))].sum())
    return Activity(active=total / (fired.size * n_tokens), skewness=hottest / total if total else 1.0)


def sizes(most: int) -> list[int]:
    """All sizes up to `most`, ascending; at least the smallest."""
    out, step = [UNIT], UNIT
    while out[-1] + step <= most:
        out.append(out[-1] + step)
        if out[-1] & (out[-1] - 1) == 0 and out[-1] >= 4 * UNIT:  # a power of two: steps of half of it
            step = out[-1] // 2
    return out


def first_size(activity: Activity, n_embd: int, allowed: list[int]) -> int:
    """Where the search begins: the allowed size nearest to what sparsity and skewness suggest."""
    base = n_embd * min(RANK_PER_ACTIVE * activity.active, MOST_OF_EMBD)
    wanted = base * (1.5 - activity.skewness)
    return min(allowed, key=lambda size: (abs(np.log(size / max(wanted, 1.0))), size))


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One size that was tried."""

    rank: int
    accuracy: float
    bytes: float
    """That a token reads in the feed-forward, predictor included, over those of dense mode."""


Measure = Callable[[int], Trial]
"""Makes a predictor of a size and says what it does."""


def search(measure: Measure, *, first: int, allowed: list[int], target: float) -> list[Trial]:
    """Tries sizes until one reaches the accuracy and the next smaller one does not, or there are no more.

    allowed: sizes, ascending, `first` among them.
    """
    at = allowed.index(first)
    trials = [measure(first)]
    step = -1 if trials[0].accuracy >= target else 1
    while 0 <= at + step < len(allowed):
        at += step
        trials.append(measure(allowed[at]))
        if (trials[-1].accuracy >= target) == (step > 0):
            break
    return trials


def chosen(trials: list[Trial], target: float) -> Trial:
    """The smallest size that reached the accuracy; if none did, the most accurate."""
    enough = [trial for trial in trials if trial.accuracy >= target]
    if enough:
        return min(enough, key=lambda trial: trial.rank)
    return max(trials, key=lambda trial: (trial.accuracy, -trial.rank))


def search_least(measure: Measure, *, first: int, allowed: list[int]) -> list[Trial]:
    """Tries sizes until the neighbours of one, if there are any, read more bytes than it does. Smaller ones
    come first: they train faster, and are more often the better ones."""
    trials = [measure(first)]
    for step in (-1, 1):
        at, best = allowed.index(first), trials[0]
        while 0 <= at + step < len(allowed):
            at += step
            trials.append(measure(allowed[at]))
            if trials[-1].bytes >= best.bytes:
                break
            best = trials[-1]
        if best is not trials[0]:
            break
    return trials


def chosen_least(trials: list[Trial]) -> Trial:
    """The size that reads the fewest bytes."""
    return min(trials, key=lambda trial: (trial.bytes, trial.rank))
