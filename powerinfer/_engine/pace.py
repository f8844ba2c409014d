"""How much of prompts a step reads while others generate: their tokens should take at most twice as long, or
longer only as far as more wait for their prompts than generate.

What a step takes is measured, by how many generate: with nothing to read, and how much more with a part of
each size. Sizes are tried from the smallest on, as long as the next one should be short enough by what
smaller ones take; one that was too long is tried again now and then, the longer the rarer. Where none is
short enough, because a device must be brought all weights for a part, or reads all of them for few tokens, a
size is taken that makes neither long pauses nor prompts that take for ever. Whenever steps were too long,
others without any part follow, so that tokens take twice as long on average.

A GPU that has all of the model computes a part with the tokens of those who generate while both together are
few (n_mixed), and reads weights once for them. A size that would be just beyond that is cut to it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

SIZES = (16, 24, 32, 48, 64, 128, 256, 512)
_DOWN, _UP = 0.5, 0.2  # how soon a measured time counts, where it is less than what was known, or more
_SETTLED = 3  # times that something is measured before it is known: devices record a program meanwhile
_HIGH, _MOST_HIGH = 1.5, 2  # times as long as what is known; so often in a row that is an accident
_PAUSE = 4  # where no size is short enough: a part's seconds count so often beside what it reads in them
_MOST_REST = 64  # steps
_MOST_UNSEEN = 2  # steps that nothing is known of
_STALE = 64  # parts, after which a step without any is measured again
_UNUSED = 8  # parts, after which what a size took is old
_LATER, _MOST = 64, 1024  # parts, after which a size that was too long is tried again
_LEAST = 1e-6  # seconds: clocks may stand still meanwhile
_TILE = 8  # a part beside others is of whole tiles of tokens


@dataclass
class _Measured:
    seconds: float
    at: int
    """Parts that were read before."""
    n: int = 1
    """Times."""
    n_high: int = 0
    """The last ones, which took much longer."""

    @property
    def is_settled(self) -> bool:
        return self.n >= _SETTLED

    def add(self, seconds: float, at: int, *, ages: bool) -> None:
        """ages: what was not measured for long counts no more."""
        if ages and at - self.at > _UNUSED:
            self.seconds, self.n, self.n_high = seconds, 0, 0
        self.at = at
        self.n += 1
        self.n_high = self.n_high + 1 if seconds > _HIGH * self.seconds else 0
        if self.n <= _SETTLED:
            self.seconds = min(self.seconds, seconds)
        elif self.n_high == 0 or self.n_high > _MOST_HIGH:
            self.seconds += (seconds - self.seconds) * (_DOWN if seconds < self.seconds else _UP)


class _Times:
    """Of steps in which about as many generate."""

    def __init__(self) -> None:
        self.n_parts = 0
        self._quiet: _Measured | None = None
        self._more: dict[int, _Measured] = {}  # what a part of a size adds
        self._last = 0  # size

    @property
    def quiet(self) -> float | None:
        """Seconds of a step with nothing to read; None if it is to be measured."""
        if self._quiet is None:
            return None
        is_known = self.n_parts - self._quiet.at < (_STALE if self._quiet.is_settled else _UNUSED)
        return self._quiet.seconds if is_known else None

    def saw_quiet(self, seconds: float) -> None:
        if self._quiet is None:
            self._quiet = _Measured(seconds, self.n_parts)
        else:
            self._quiet.add(seconds, self.n_parts, ages=False)

    def saw_part(self, n_read: int, seconds: float) -> float | None:
        """Returns how much longer that was than with nothing to read."""
        if self._quiet is None or n_read > SIZES[-1]:
            return None
        more = max(seconds - self._quiet.seconds, _LEAST)
        self.n_parts += 1
        size = self._last = _size_of(n_read)
        if size in self._more:
            self._more[size].add(more, self.n_parts, ages=True)
        else:
            self._more[size] = _Measured(more, self.n_parts)
        return more

    def choose(self, sizes: Sequence[int], allowed: float, n_recorded: int) -> int:
        """Of sizes, from the smallest on, the one for the next step, which may take so much longer.

        n_recorded: up to this one programs are recorded when they come again, and are slow until then.
        """
        last = self._more.get(self._last)
        if self._last in sizes and self._last <= n_recorded and last is not None and not last.is_settled:
            return self._last
        more = self._expected(sizes)
        n_open = next((i + 1 for i, size in enumerate(sizes) if size not in self._more), len(sizes))
        fitting = [i for i in range(n_open) if more[i] <= allowed]
        if fitting:
            at, most, others = fitting[-1], allowed, [1]
        else:
            costs = [seconds**_PAUSE / size for size, seconds in zip(sizes, more, strict=True)]
            at = min(costs.index(min(costs)), n_open - 1)
            most, others = more[at], [-1, 1]
        in_use = self._more.get(sizes[at])
        for i in (at + other for other in others):
            if in_use is not None and 0 <= i < n_open and self._is_due(sizes[i], more[i] / most, in_use.n):
                return sizes[i]
        return sizes[at]

    def _expected(self, sizes: Sequence[int]) -> list[float]:
        """Seconds that each adds. Of one that was never tried it is what the largest seen below it takes, and
        as much more for each token as from the smallest to that."""
        more: list[float] = []
        first = last = 0, 0.0
        for size in sizes:
            if size in self._more:
                last = size, self._more[size].seconds
                first = first if first[0] else last
                more.append(last[1])
            else:
                each = max(last[1] - first[1], 0.0) / max(last[0] - first[0], 1)
                more.append(max(last[1] + each * (size - last[0]), _LEAST))
        return more

    def _is_due(self, size: int, times: float, n: int) -> bool:
        """Whether another size is tried than the one in use, which was so n times.

        times: as long as it may take, so often.
        """
        wait, seen = min(_LATER * times**4, _MOST), self._more.get(size)
        return n >= wait if seen is None else self.n_parts - seen.at >= wait


class Pace:
    """Of one engine, by its thread alone."""

    def __init__(self, fixed: int | None = None, *, n_mixed: int = 0) -> None:
        """fixed: tokens of each part; None: as many as others allow. n_mixed: SessionInfo's."""
        self.n_mixed = n_mixed
        self._fixed = fixed
        self._times: defaultdict[int, _Times] = defaultdict(_Times)  # by log2 of how many generate
        self._allowed = 0.0  # seconds for the part of the step under way
        self._rest = 0.0  # steps that are to read nothing, since others took too long
        self._n_without = 0  # steps that were to read nothing, and were not seen yet

    def part(self, n_reading: int, n_generating: int) -> int:
        """Tokens of prompts for the next step; 0: others have it for themselves."""
        if self._fixed is not None:
            return self._fixed
        times = self._times[n_generating.bit_length()]
        quiet = times.quiet
        if quiet is None:  # the next step tells, but for one with guesses, which is none of these
            self._n_without += 1
            return 0 if self._n_without <= _MOST_UNSEEN else SIZES[0]
        self._allowed = quiet * max(1.0, n_reading / n_generating)
        if self._rest >= 0.5:
            self._rest = max(self._rest - 1, 0.0)
            self._n_without += 1
            return 0
        return times.choose(self._sizes(n_generating), self._allowed, self.n_mixed - n_generating)

    def saw(self, n_read: int, n_generating: int, seconds: float, *, n_steps: int = 1) -> None:
        """A step of so many tokens of prompts, and one of each that generate; or several such steps, of which
        one takes so long."""
        if not n_generating or self._fixed is not None:
            return
        times, n_counted = self._times[n_generating.bit_length()], self._n_without
        self._n_without = 0
        if not n_read:
            self._rest = max(self._rest - max(n_steps - n_counted, 0), 0.0)
            times.saw_quiet(seconds)
            return
        more = times.saw_part(n_read, seconds)
        if more is not None:
            too_long = more / max(self._allowed, seconds - more, _LEAST) - 1
            self._rest = min(max(self._rest + too_long, 0.0), _MOST_REST)

    def _sizes(self, n_generating: int) -> list[int]:
        """From the smallest on."""
        most = (self.n_mixed - n_generating) // _TILE * _TILE
        return sorted({most if size / 2 < most < size else size for size in SIZES})


def _size_of(n_read: int) -> int:
    """What so many tokens are measured as."""
    return -(-n_read // _TILE) * _TILE if n_read <= 64 else 1 << (n_read - 1).bit_length()
