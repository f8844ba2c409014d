"""Which experts of a mixture are used at the moment, and what became of their uses so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .session import Session

_HALF_LIFE = 128  # tokens after which a use counts half


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertStats:
    """Of a scheduler since it was made. A use is a token and one of its experts."""

    n_device: int = 0
    """Uses whose expert had a place on a device."""
    n_streamed: int = 0
    """Uses by a prompt, whose expert was brought to the device for them."""
    n_zero_copy: int = 0
    """Uses whose expert a device read in host memory."""
    n_cpu: int = 0
    n_copies: int = 0
    """Experts that moved to a place."""
    copied_bytes: int = 0
    resident: npt.NDArray[np.bool_]
    """[n_layer, n_expert] Those that have a place at the moment."""
    recent: npt.NDArray[np.float64]
    """[n_layer, n_expert] Share of the latest tokens that used each."""

    @property
    def hit_rate(self) -> float:
        """Share of the uses whose expert had a place; 0 where there was none."""
        return self.n_device / max(self.n_device + self.n_streamed + self.n_zero_copy + self.n_cpu, 1)


def experts_together(all_stats: Sequence[ExpertStats]) -> ExpertStats:
    """Of several sessions of one model. Experts that have a place have one in each."""
    names = ("n_device", "n_streamed", "n_zero_copy", "n_cpu", "n_copies", "copied_bytes")
    return ExpertStats(
        **{name: sum(getattr(own, name) for own in all_stats) for name in names},
        resident=np.logical_and.reduce([own.resident for own in all_stats]),
        recent=np.mean([own.recent for own in all_stats], axis=0),
    )


class ExpertWatch:
    """Adds up what sessions tell, one after the other where one takes another's place."""

    def __init__(self, session: Session) -> None:
        self._session: Session | None = None
        info = session.model.info
        self._n_used = info.n_expert_used
        self._known = np.zeros(6, np.int64)  # of the session, when it was looked at
        self._total = np.zeros(6, np.int64)
        self._uses = np.zeros((info.n_layer, info.n_expert))  # of the session
        self._recent = np.zeros((info.n_layer, info.n_expert))
        self._n_recent = np.zeros((info.n_layer, 1))  # tokens that these are of
        self.look(session)

    def look(self, session: Session) -> None:
        if session is not self._session:
            self._session = session
            self._known[:] = 0
            self._uses[:] = 0
        layers = session.experts()
        known = np.sum(
            [
                (y.n_resident, y.n_streamed, y.n_zero_copy, y.n_cpu, y.n_copies, y.copied_bytes)
                for y in layers
            ],
            axis=0,
        )
        self._total += known - self._known
        self._known = known
        uses = np.stack([y.uses for y in layers]).astype(np.float64)
        new, self._uses = uses - self._uses, uses
        n_tokens = new.sum(axis=1, keepdims=True) / self._n_used
        kept = 0.5 ** (n_tokens / _HALF_LIFE)
        self._recent = self._recent * kept + new
        self._n_recent = self._n_recent * kept + n_tokens
        names = ("n_device", "n_streamed", "n_zero_copy", "n_cpu", "n_copies", "copied_bytes")
        self.stats = ExpertStats(
            **dict(zip(names, self._total.tolist(), strict=True)),
            resident=np.stack([y.resident for y in layers]),
            recent=self._recent / np.maximum(self._n_recent, 1),
        )
