"""How often each neuron fired, or each expert of a mixture was used, and the keys of files that say so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ..errors import ArgumentError

COUNTS_KEY = "powerinfer.neuron.counts"
TOKENS_KEY = "powerinfer.neuron.tokens"
EXPERT_COUNTS_KEY = "powerinfer.expert.counts"
EXPERT_TOKENS_KEY = "powerinfer.expert.tokens"

Unit = Literal["neurons", "experts"]
KEYS: dict[str, tuple[str, str]] = {
    "neurons": (COUNTS_KEY, TOKENS_KEY),
    "experts": (EXPERT_COUNTS_KEY, EXPERT_TOKENS_KEY),
}

MOST = 1 << 40  # of tokens: sums over the neurons of a layer stay exact

Numbers = npt.NDArray[np.uint64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Counts:
    """How often each neuron fired, or each expert was used, over so many tokens."""

    counts: Numbers
    """uint64 [n_layer, n_ff], or [n_layer, n_expert], none above n_tokens."""
    n_tokens: int
    unit: Unit = "neurons"
    """What was counted."""

    def __post_init__(self) -> None:
        """Raises ArgumentError for counts that cannot be."""
        counts = self.counts
        if counts.ndim != 2 or not counts.size or counts.dtype != np.uint64:
            raise ArgumentError(f"counts are uint64 [n_layer, n_ff], not {counts.dtype} {counts.shape}")
        if not 0 < self.n_tokens <= MOST:
            raise ArgumentError(f"{self.unit} were counted over {self.n_tokens} tokens, which cannot be")
        if counts.max() > self.n_tokens:
            layer, index = np.unravel_index(counts.argmax(), counts.shape)
            raise ArgumentError(
                f"{self.unit[:-1]} {index} of layer {layer} {self._verb} {counts.max()} times in "
                f"{self.n_tokens} tokens, which cannot be"
            )

    @property
    def _verb(self) -> str:
        return "fired" if self.unit == "neurons" else "was used"

    @property
    def n_layer(self) -> int:
        return int(self.counts.shape[0])

    @property
    def n_ff(self) -> int:
        return int(self.counts.shape[1])

    @property
    def keys(self) -> dict[str, Any]:
        """The keys of a model's file and their values, as `rewrite.rewrite` takes them.

        Raises ArgumentError if one was counted more often than the file's 32 bits can say.
        """
        limit = np.iinfo(np.uint32).max
        if self.counts.max() > limit:
            raise ArgumentError(
                f"one of the {self.unit} {self._verb} {self.counts.max():,} times, but a file holds counts "
                f"up to {limit:,}: count over less text"
            )
        flat = self.counts.astype(np.uint32).reshape(-1)
        counts_key, tokens_key = KEYS[self.unit]
        return {counts_key: flat, tokens_key: ("u64", self.n_tokens)}
