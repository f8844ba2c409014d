"""How much of prompts is a part whose layers are computed a few at a time (part.py), and how many of them a
round has: as many as fit into what it may take longer, by what a layer of such a part took before.

Of a few sizes the one is taken that reads prompts fastest; larger ones are tried when smaller ones are known,
as far as a layer of them should fit, and again now and then. The last round of a part, whose tokens others
have when the next part is begun, has fewer layers for that.
"""

from __future__ import annotations

from dataclasses import dataclass

SIZES = (64, 128, 192)  # tokens, beside the most: as many are multiplied with weights as they are, or fewer
_FIRST = 16  # rounds of the first part, of which nothing is known
_AGAIN = 32  # parts, after which another size is tried again
_GRAIN = 64  # tokens: sizes are measured as the next multiple
_NEW = 0.6  # how much the last part counts, for the next one is as deep
_LEAST = 1e-6  # seconds


@dataclass
class _Each:
    seconds: float
    """Of a layer."""
    at: int
    """Which part was the last."""
    n: int = 1
    """Parts."""


class LayerPace:
    """Of rounds in which about as many generate."""

    def __init__(self) -> None:
        self._each: dict[int, _Each] = {}  # by size
        self._n = 0
        self._waited = 0.0  # for each token

    def begin_like(self, other: LayerPace) -> None:
        """What layers take is no matter of who generates."""
        if not self._each and other._each:
            self._each = {size: _Each(known.seconds, self._n) for size, known in other._each.items()}
            self._waited = other._waited

    def choose(
        self, n_left: int, n_most: int, n_mixed: int, n_layer: int, base: float, allowed: float
    ) -> tuple[int, int]:
        """Tokens of the next part, and layers of each of its rounds.

        n_mixed: so many tokens are multiplied with weights as they are. base: seconds of a round but for the
        part's layers, which may take `allowed`.
        """
        found, best = (0, 0), 0.0
        for n in _sizes(n_left, n_most, n_mixed):
            each = self._expected(n)
            if each is None:
                return n, max(n_layer // _FIRST, 1)
            waited = self._waited * n
            if found[0] and max(each, waited) > allowed:
                break
            layers = _layers(n_layer, allowed / each, waited / each)
            if found[0] and self._is_due(n):
                return n, layers
            rate = n / (-(-n_layer // layers) * base + n_layer * each + waited)
            if rate > best:
                found, best = (n, layers), rate
        return found

    def saw(self, n: int, n_layer: int, seconds: float, waited: float) -> None:
        """What the layers of a part of n tokens took in all, and others' wait until it was begun."""
        self._n += 1
        each, size = max(seconds / n_layer, _LEAST), _size_of(n)
        known = self._each.get(size)
        if known is None:
            self._each[size] = _Each(each, self._n)
        else:
            # The first time a device loads code.
            new = 1 if known.n == 1 else _NEW
            known.seconds += new * (each - known.seconds)
            known.at, known.n = self._n, known.n + 1
        self._waited += (_NEW if self._waited else 1) * (waited / n - self._waited)

    def _is_due(self, n: int) -> bool:
        known = self._each.get(_size_of(n))
        return known is None or known.n == 1 or self._n - known.at >= _AGAIN

    def _expected(self, n: int) -> float | None:
        """Seconds of a layer. Of a size that was never seen as much as of the next larger one, or so much
        more than of the next smaller one as there are more tokens."""
        size = _size_of(n)
        if not self._each:
            return None
        larger = min((other for other in self._each if other >= size), default=None)
        if larger is None:
            smaller = max(self._each)
            return self._each[smaller].seconds * size / smaller
        known = self._each[larger]
        if self._n - known.at < _AGAIN:
            return known.seconds
        last = max(self._each, key=lambda other: self._each[other].at)  # prompts may have become longer since
        return max(known.seconds, self._each[last].seconds * min(size / last, 1))


def _layers(n_layer: int, most: float, waited: float) -> int:
    """Of each round: as many as there may be, if the last one has so many fewer; else what leaves it most."""

    def room(layers: int) -> float:
        return most - waited - (n_layer - (-(-n_layer // layers) - 1) * layers)

    tried = range(min(max(int(most), 1), n_layer), 0, -1)
    return next((layers for layers in tried if room(layers) >= 0), max(tried, key=room))


def _sizes(n_left: int, n_most: int, n_mixed: int) -> list[int]:
    """From the smallest on."""
    known = [n for n in SIZES if n <= min(max(n_mixed, SIZES[0]), n_most)]
    return sorted({min(n, n_left) for n in known} | ({n_most} if n_left >= n_most else set()))


def _size_of(n: int) -> int:
    return -(-n // _GRAIN) * _GRAIN
