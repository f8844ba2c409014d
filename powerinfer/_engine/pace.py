"""How much of prompts a step reads while others generate: their tokens should take at most twice as long on
average, or longer only as far as more wait for their prompts than generate.

What a step takes is measured, by how many generate: with nothing to read, and how much more with a part of
each size. Sizes are tried from the smallest on, as long as the next one should be worth it by what smaller
ones take; one that was not is tried again now and then, the longer its steps the rarer. What parts add beside
twice or half as many counts until it is measured. Of those that are known the one is taken that reads prompts
fastest, where steps that are too long count more than they take: so there are neither long pauses nor prompts
that take for ever. Whenever steps were too long, others without any part follow, so that tokens take as long
as they may on average. A step is measured from the end of the one before, since others wait for what is done
between them, too.

A GPU that has all of the model computes a part with the tokens of those who generate while both together are
few (n_mixed), and reads weights once for them. A size that would be just beyond that is cut to it, and where
that is more than 64 or 128, others to so many together; of smaller ones, which take nearly as long, few are
tried.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from .pace_layers import LayerPace

SIZES = (16, 24, 32, 48, 64, 128, 256, 512)
# As long as with nothing to read: what is never measured, such as accidents, is in the rest of 2.
_TIMES = 1.8
_DOWN, _UP = 0.5, 0.2  # how soon a measured time counts, where it is less than what was known, or more
_SETTLED = 3  # times that something is measured before it is known: devices record a program meanwhile
_HIGH, _MOST_HIGH = 1.5, 2  # times as long as what is known; so often in a row that is an accident
_PAUSE = 2.5  # of a step that is too long: how much longer it counts, as a power of how much too long it is
# Where all parts are so many times as long as they may be, those up to twice the shortest are alike.
_FAR, _ALIKE = 8, 2
_MOST_REST = 128  # steps
_LEAST_DUE = -0.5  # steps, since they are whole
_LEAST_REST = 0.5  # that a step without any part gives back, though it took longer than what is known
_MOST_UNSEEN = 2  # steps that nothing is known of
_STALE = 64  # parts, after which a step without any is measured again
_UNUSED = 8  # parts, after which what a size took is old
_LONG_AGO = -_UNUSED - 1  # at which part
_ODD = 1.5  # so many times as long as expected is believed at once, what is less the third time
_LATER, _MOST = 64, 1024  # parts, after which a size that was too long is tried again
_MANY = 8  # steps without any in a row, which Python hardly makes longer
_LEAST = 1e-6  # seconds: clocks may stand still meanwhile
_TILE = 8  # a part beside others is of whole tiles of tokens,
_TILED = 128  # up to so many
_FEW = (16, 32)  # sizes that are tried below the largest that is one program with others' tokens
PATIENT = 4  # steps that a prompt waits for others
PATIENT_FROM = 40  # who generate; beside fewer nothing is gained
LAYERED_FROM = 64  # tokens to read,
_LAYERED_FROM_MANY = (
    256  # beside as many as prompts wait for others, since a program takes so many; or at most
)
_LAYERED_FEW = 4  # who generate, beside whom a step with any part at all takes too long; and that are
_LAYERED_LEAST = 17  # so many tokens
_MOST_BESIDE = 0.25  # of a quiet step, that others may take more beside layers, but for these
LAYERED_MOST = 64  # who generate beside parts by layers
_PARTS = (64, 128)  # tokens of programs that take less than one of the most


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

    @property
    def was_held_up(self) -> bool:
        """The last time, by something else, as far as is known."""
        return self.n > _SETTLED and 0 < self.n_high <= _MOST_HIGH

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
        self._alone_at: int | None = None  # parts that were read before many steps in a row were measured
        self._between: _Measured | None = None  # what is done once before steps
        self.layers = LayerPace()
        self.beside = 0.0
        """What steps beside layers of a part take more than quiet ones, but for these."""
        self._n_beside = 0  # parts that it is known from

    @property
    def quiet(self) -> float | None:
        """Seconds of a step with nothing to read; None if it is to be measured."""
        if self._quiet is None:
            return None
        is_known = self.n_parts - self._quiet.at < (_STALE if self._quiet.is_settled else _UNUSED)
        return self._quiet.seconds if is_known else None

    @property
    def last_quiet(self) -> float:
        """The same, however old; 0 if it was never measured."""
        return 0.0 if self._quiet is None else self._quiet.seconds

    def begin_like(self, other: _Times) -> None:
        """What parts add is what they add beside twice or half as many, until it is measured: as if it were
        old."""
        if not self.n_parts and other.n_parts:
            self._more = {size: _Measured(known.seconds, _LONG_AGO) for size, known in other._more.items()}

    def saw_quiet(self, seconds: float, n_steps: int) -> None:
        """One of so many steps that went on by themselves. What is done once before them is not the quiet
        step's: it is known from what single ones, or a few, take more than many in a row."""
        if n_steps >= _MANY:
            self._alone_at, self._n_beside = self.n_parts, 0
        elif self._quiet is not None and self._alone_at is not None:
            if self.n_parts - self._alone_at < _STALE:
                self._see_between(max(seconds - self._quiet.seconds, 0.0) * n_steps)
                seconds = min(seconds, self._quiet.seconds)
            elif self._between is not None:
                seconds -= min(self._between.seconds / n_steps, seconds / 2)
        if self._quiet is None:
            self._quiet = _Measured(seconds, self.n_parts)
        else:
            self._quiet.add(seconds, self.n_parts, ages=False)

    def _see_between(self, seconds: float) -> None:
        if self._between is None:
            self._between = _Measured(seconds, self.n_parts)
        else:
            self._between.add(seconds, self.n_parts, ages=False)

    def saw_between(self, seconds: float) -> None:
        """What steps beside layers of a part took, but for these. What the first parts' took more than quiet
        ones is no quiet step's (and some of it a program's first run); what comes to it is, since contexts
        grow."""
        if self._quiet is None:
            return
        quiet = self._quiet.seconds
        self._quiet.at = self.n_parts
        if self._n_beside == _SETTLED:
            self._quiet.seconds += (min(seconds - self.beside, _HIGH * quiet) - quiet) * _UP
            return
        more = min(max(seconds - quiet, 0.0), _MOST_BESIDE * quiet)
        self.beside = min(self.beside, more) if self._n_beside else more
        self._n_beside += 1

    def saw_part(self, n_read: int, seconds: float) -> float | None:
        """Returns how much longer that was than with nothing to read; of a step that something else held up,
        how long it should have been."""
        if self._quiet is None or n_read > SIZES[-1]:
            return None
        more = max(seconds - self._quiet.seconds, _LEAST)
        self.n_parts += 1
        size = self._last = _size_of(n_read)
        if size not in self._more:
            self._more[size] = _Measured(more, self.n_parts)
            return more
        known = self._more[size]
        known.add(more, self.n_parts, ages=True)
        return known.seconds if known.was_held_up else more

    def choose(self, sizes: Sequence[int], allowed: float, n_mixed: int) -> int:
        """Of sizes, from the smallest on, the one for the next step, which may take so much longer.

        n_mixed: up to this one parts are one program with others' tokens. Those are recorded when they come
        again, and are slow until then.
        """
        last = self._more.get(self._last)
        if self._last in sizes and self._last <= n_mixed and last is not None and not last.is_settled:
            return self._last
        more = self._expected(sizes, n_mixed)
        largest = max(self._more, default=0)  # that is known
        n_open = next((i + 1 for i, size in enumerate(sizes) if size > largest), len(sizes))
        shortest = min(more[:n_open])
        alike = _ALIKE * shortest if shortest > _FAR * allowed else allowed
        costs = [self._cost(sizes[i], more[i], allowed, alike) for i in range(n_open)]
        at = costs.index(min(costs))
        in_use = self._more.get(sizes[at])
        most, others = (allowed, [1]) if more[at] <= allowed else (more[at], [-1, 1])
        for i in (at + other for other in others):
            if in_use is not None and 0 <= i < n_open and self._is_due(sizes[i], more[i] / most, in_use.n):
                return sizes[i]
        return sizes[at]

    def _cost(self, size: int, more: float, allowed: float, alike: float) -> float:
        """Seconds for each token, with those of the steps between; more where it is longer than alike."""
        times, too_long = (max(more / max(most, _LEAST), 1.0) for most in (allowed, alike))
        return (self.last_quiet * times + more) / size * float(too_long**_PAUSE)

    def _expected(self, sizes: Sequence[int], n_mixed: int) -> list[float]:
        """Seconds that each adds. Of one that was never tried it is what the largest seen below it takes, and
        as much more for each token as from the smallest to that; but those that are no longer computed with
        others' tokens add a step. One that was just tried may have been held up by something else."""
        more: list[float] = []
        first = last = 0, 0.0
        for before, size in zip([0, *sizes], sizes, strict=False):
            if before <= n_mixed < size and before and self._quiet is not None:
                first = last = 0, max(last[1], self._quiet.seconds)
            each = max(last[1] - first[1], 0.0) / max(last[0] - first[0], 1)
            expected = max(last[1] + each * (size - last[0]), _LEAST)
            known = self._more.get(size)
            if known is None:
                more.append(expected)
                continue
            if known.at == _LONG_AGO:  # beside others: here it takes no less than what is smaller
                more.append(max(known.seconds, last[1]))
                continue
            may_be_held_up = last[0] > 0 and not known.is_settled and known.seconds < _ODD * expected
            more.append(min(known.seconds, expected) if may_be_held_up else known.seconds)
            last = size, known.seconds
            first = first if first[0] else last
        return more

    def _is_due(self, size: int, times: float, n: int) -> bool:
        """Whether another size is tried than the one in use, which was so n times.

        times: as long as it may take, so often.
        """
        wait, seen = min(_LATER * max(times, 1.0) ** 4, _MOST), self._more.get(size)
        return n >= wait if seen is None else self.n_parts - seen.at >= wait


class Pace:
    """Of one engine, by its thread alone."""

    def __init__(self, fixed: int | None = None, *, n_mixed: int = 0) -> None:
        """fixed: tokens of each part; None: as many as others allow. n_mixed: SessionInfo's."""
        self.n_mixed = n_mixed
        self.parts: Counter[int] = Counter()
        """Steps in which somebody generated, by how many tokens of prompts they read."""
        self.in_layers: Counter[int] = Counter()
        """Steps beside which some layers of a part were computed, by its tokens."""
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
        self._allowed = _allowed(quiet or 0.0, n_reading, n_generating)
        if self.rest(n_generating):
            self._n_without += 1
            return 0
        if quiet is None:  # steps with guesses do not tell
            return SIZES[0]
        for near in (-1, 1):
            times.begin_like(self._times[n_generating.bit_length() + near])
        return times.choose(self._sizes(n_generating), self._allowed, self.n_mixed - n_generating)

    def part_in_layers(
        self, n_left: int, n_reading: int, n_generating: int, *, n_most: int, n_layer: int
    ) -> tuple[int, int]:
        """Tokens of a part whose layers are computed a few at a time, and how many in front of each step; no
        tokens: parts are read in steps.

        n_left: that those who read have to read. n_most: SessionInfo's n_part.
        """
        times = self._times[n_generating.bit_length()]
        quiet = times.quiet
        least = LAYERED_FROM if n_generating < PATIENT_FROM else _LAYERED_FROM_MANY
        is_much = n_left >= (_LAYERED_LEAST if n_generating <= _LAYERED_FEW else least)
        is_known = self._fixed is None and quiet is not None
        if not is_known or not is_much or n_most < LAYERED_FROM or n_generating > LAYERED_MOST:
            return 0, 0
        for near in (-1, 1):
            times.layers.begin_like(self._times[n_generating.bit_length() + near].layers)
        self._allowed = _allowed(quiet or 0.0, n_reading, n_generating)
        base, allowed = (quiet or 0.0) + times.beside, max(self._allowed - times.beside, _LEAST)
        return times.layers.choose(n_left, n_most, self.n_mixed, n_layer, base, allowed)

    def saw_layers(
        self,
        n_read: int,
        n_generating: int,
        seconds: float,
        *,
        part_s: float,
        waited_s: float,
        n_steps: int,
        n_layer: int,
        is_alike: bool = True,
    ) -> None:
        """The layers of a part of so many tokens, which took part_s, came with so many steps, which took so
        long in all; others had waited so long until it was begun. is_alike: in all steps as many
        generated."""
        times = self._times[n_generating.bit_length()]
        self.in_layers[n_read] += n_steps
        times.layers.saw(n_read, n_layer, part_s, waited_s)
        if is_alike:
            times.saw_between((seconds - part_s) / n_steps)
        too_long = max(part_s / (n_steps * self._most(times)) - 1, 0.0) * n_steps
        self._rest = min(self._rest + too_long, _MOST_REST)

    def n_patient(self, n_generating: int) -> int:
        """For how many steps a prompt may wait for others, with which it is read in one."""
        return PATIENT if self.n_mixed and n_generating >= PATIENT_FROM else 0

    def patience_s(self, n_generating: int) -> float:
        """About how long these take; 0 where it is not known."""
        return self.n_patient(n_generating) * self._times[n_generating.bit_length()].last_quiet

    def rest(self, n_generating: int) -> int:
        """How many steps others have for themselves before the next part. Where it is not known what one
        takes, that tells."""
        if self._fixed is not None:
            return 0
        is_known = self._times[n_generating.bit_length()].quiet is not None
        return max((int(self._rest + 0.5) if is_known else _MOST_UNSEEN) - self._n_without, 0)

    def saw(self, n_read: int, n_generating: int, seconds: float, *, n_steps: int = 1) -> None:
        """A step of so many tokens of prompts, and one of each that generate; or several such steps, which
        went on by themselves, and of which one took so long."""
        if not n_generating:
            return
        self.parts[n_read] += n_steps
        if self._fixed is not None:
            return
        times, n_unseen = self._times[n_generating.bit_length()], self._n_without
        self._n_without = 0
        if not n_read:
            n_unseen -= n_steps
            longer = seconds - (times.quiet or seconds)
            self._rest -= min(max(1 - longer / self._most(times), _LEAST_REST), 1.0) * n_steps
            times.saw_quiet(seconds, n_steps)
        self._rest = max(self._rest - max(n_unseen, 0), _LEAST_DUE)
        more = times.saw_part(n_read, seconds) if n_read else None
        if more is not None:
            self._rest = min(self._rest + max(more / self._most(times) - 1, 0.0), _MOST_REST)

    def _most(self, times: _Times) -> float:
        """Seconds that the step under way may take longer; no less than beside one prompt, for it may be that
        nobody asked for its part, or that others did."""
        return max(self._allowed, _allowed(times.last_quiet, 1, 1), _LEAST)

    def _sizes(self, n_generating: int) -> list[int]:
        """From the smallest on."""
        largest = [min(self.n_mixed, n) for n in (*_PARTS, self.n_mixed)]
        own = {(n - n_generating) // _TILE * _TILE for n in largest}
        most, own = max(own), {size for size in own if size >= _FEW[0]}
        few = {size for size in _FEW if size <= max(most, _FEW[0])}
        return sorted(own | few | {size for size in SIZES if size >= max(2 * most, _FEW[0])})


def _allowed(quiet: float, n_reading: int, n_generating: int) -> float:
    """Seconds that a part may add to a step."""
    return (_TIMES - 1) * quiet * max(1.0, n_reading / n_generating)


def _size_of(n_read: int) -> int:
    """What so many tokens are measured as."""
    return -(-n_read // _TILE) * _TILE if n_read <= _TILED else 1 << (n_read - 1).bit_length()
