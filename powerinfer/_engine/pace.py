"""How much of prompts a step reads while others generate: their tokens should take at most twice as long, or
longer only as far as more wait for their prompts than generate.

What a step takes is measured: with nothing to read, and how much more with a part of each size. Where no
size is short enough, because a device must be brought all weights for a part, or is slower with a few tokens
of a prompt than with many sequences, those are read that are nearly as fast as the best, and steps without
any follow, so that others' tokens take twice as long on average.

A GPU that has all of the model computes a part with the tokens of those who generate while both together are
few (n_mixed), and reads weights once for them. A size that would be just beyond that is cut to it.
"""

from __future__ import annotations

SIZES = (16, 32, 64, 128, 256, 512)
_FIRST = 128
_DOWN, _UP = 0.5, 0.2  # how soon a measured time counts, where it is less than what was known, or more
_NEARLY = 0.6
_MOST_REST = 64
_TRIES = 256  # parts, after which the sizes beside the one in use are tried again; those seen once sooner
_TILE = 8  # a part beside others is of whole tiles of tokens


class Pace:
    """Of one engine, by its thread alone."""

    def __init__(self, fixed: int | None = None, *, n_mixed: int = 0) -> None:
        """fixed: tokens of each part; None: as many as others allow. n_mixed: SessionInfo's."""
        self.n_mixed = n_mixed
        self._fixed = fixed
        self._quiet: dict[int, float] = {}  # seconds of a step with nothing to read, by log2 of who generate
        self._more: list[float | None] = [None] * len(SIZES)  # seconds that a part of this size adds
        self._n_seen = [0] * len(SIZES)
        self._n_parts = 0
        self._allowed = 0.0  # seconds for the part of the step under way
        self._rest = 0  # steps that read nothing

    def part(self, n_reading: int, n_generating: int) -> int:
        """Tokens of prompts for the next step; 0: others have it for themselves."""
        if self._fixed is not None:
            return self._fixed
        quiet = self._quiet_of(n_generating)
        if quiet is None or all(more is None for more in self._more):
            return _FIRST
        self._allowed = allowed = quiet * max(1.0, n_reading / n_generating)
        if self._rest > 0:
            return 0
        more = [self._expected(i) for i in range(len(SIZES))]
        sizes = [self._beside(n_generating, size) for size in SIZES]
        known = zip(sizes, more, self._more, strict=True)
        fitting = [(size, seen is None) for size, seconds, seen in known if seconds <= allowed]
        # Of those that were never tried the smallest: larger ones may take much longer.
        fitting = fitting[: next((i + 1 for i, (_, is_new) in enumerate(fitting) if is_new), None)]
        if fitting:
            return fitting[-1][0]
        rates = [(size, size / seconds) for size, seconds in zip(sizes, more, strict=True)]
        best = max(rate for _, rate in rates)
        return next(size for size, rate in rates if rate >= _NEARLY * best)

    def saw(self, n_read: int, n_generating: int, seconds: float, *, n_steps: int = 1) -> None:
        """A step of so many tokens of prompts, and one of each that generate; or several such steps, of which
        one takes so long."""
        if not n_generating or self._fixed is not None:
            return
        if not n_read:
            self._rest = max(self._rest - n_steps, 0)
            key = n_generating.bit_length()
            self._quiet[key] = _mean(self._quiet.get(key), seconds)
            return
        quiet = self._quiet_of(n_generating)
        if quiet is None:
            return
        i = next((i for i, size in enumerate(SIZES) if size / 2 < n_read <= size), None)
        if i is None:
            return
        more = max(seconds - quiet, 1e-6)
        self._rest = min(round(more / max(self._allowed, quiet)) - 1, _MOST_REST)
        self._more[i] = _mean(self._more[i], more)
        self._n_seen[i] += 1
        self._n_parts += 1
        if self._n_parts % _TRIES == 0 or self._n_parts in (8, 16, 32, 64, 128):
            for beside in (i - 1, i + 1):
                if 0 <= beside < len(SIZES) and (self._n_seen[beside] < 2 or self._n_parts % _TRIES == 0):
                    self._more[beside] = None

    def _quiet_of(self, n_generating: int) -> float | None:
        """Of as many, or of the number next to it that was seen."""
        key = n_generating.bit_length()
        near = min(self._quiet, key=lambda known: abs(known - key), default=None)
        return None if near is None else self._quiet[near]

    def _expected(self, i: int) -> float:
        """Of a size that was never tried the least that it may take, so that it is."""
        known = [(j, more) for j, more in enumerate(self._more) if more is not None]
        below = [more for j, more in known if j <= i]
        if below:
            return below[-1]
        j, more = known[0]
        return more * SIZES[i] / SIZES[j]

    def _beside(self, n_generating: int, size: int) -> int:
        """Tokens of a part of that size, or fewer where these are computed with the others'."""
        most = (self.n_mixed - n_generating) // _TILE * _TILE
        return most if size / 2 < most < size else size


def _mean(before: float | None, now: float) -> float:
    if before is None:
        return now
    return before + (now - before) * (_DOWN if now < before else _UP)
