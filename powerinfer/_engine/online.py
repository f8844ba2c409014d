"""Statistics that are gathered while a model answers, and the placement that follows them between requests.

What was known before counts as PRIOR_TOKENS tokens. Once EVERY tokens more were counted, a plan is made from
the counts; if a token would take less time by GAIN with it, the session is opened anew after it: K and V of
what the context holds are carried over. Counts of long ago fade: at MOST_TOKENS all are halved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..errors import PowerInferError
from .engine import Engine
from .loader import Loader
from .session import Session

if TYPE_CHECKING:
    from ..models.plan import Plan, Statistics

PRIOR_TOKENS = 64
EVERY = 256
GAIN = 0.03
MOST_TOKENS = 1 << 16


class OnlineStatistics:
    """Counts of one model's neurons."""

    def __init__(self, loader: Loader, *, every: int = EVERY) -> None:
        """every: tokens between two looks."""
        info = loader.model.info
        self.every = every
        self.counts = np.zeros((info.n_layer, info.n_placed))
        self.n_tokens = 0.0
        self.n_changes = 0
        """How often neurons were moved."""
        self._loader = loader

    def improve(self, engine: Engine) -> bool:
        """Between two requests: moves neurons if that pays; whether they were moved."""
        session = engine.session
        if any(session.length(seq) for seq in range(1, session.info.n_seq)):
            return False  # only sequence 0 would be carried over
        plan = self.better_plan(session)
        return plan is not None and self.move(engine, plan)

    def better_plan(self, session: Session, *, patience: int = 1) -> Plan | None:
        """A plan with which a token would take less time, if enough was counted since the last look.

        patience: how many times as much is enough.
        """
        plan = self._loader.plan
        if plan is None or not plan.uses_device or plan.settings.sparsity == "dense":
            return None
        if session.counted_tokens() < self.every * patience:
            return None
        self._count(session)
        return self._better(plan)

    def move(self, engine: Engine, plan: Plan) -> bool:
        """Gives the engine a session of this plan, and its K and V of sequence 0. If that fails or is
        interrupted it has one of the plan before; whether it did not. Raises what opening that raises."""
        moved = self._replace(engine, plan)
        self.n_changes += moved
        return moved

    def _count(self, session: Session) -> None:
        new = session.neuron_counts(reset=True)
        self.counts += new.counts
        self.n_tokens += new.n_tokens
        while self.n_tokens > MOST_TOKENS:
            self.counts /= 2
            self.n_tokens /= 2

    def statistics(self) -> Statistics:
        """What is known by now."""
        from ..models.plan import given

        before = self._loader.statistics
        prior: float | npt.NDArray[np.float64] = 0.0
        if before is not None and before.counts is not None:
            prior = before.counts / before.n_tokens
        elif self._loader.plan is not None:
            prior = self._loader.plan.settings.active_share
        scale = 1024  # counts are whole numbers
        mixed = ((self.counts + prior * PRIOR_TOKENS) * scale).astype(np.uint64)
        source = f"counted while it answered, over {self.n_tokens:,.0f} tokens"
        if before is not None:
            source += f"; before that: {before.source}"
        return given(mixed, int((self.n_tokens + PRIOR_TOKENS) * scale), source)

    def _better(self, plan: Plan) -> Plan | None:
        """The plan after what is known by now, if it is better enough."""
        devices = self._loader.devices
        assert devices is not None
        known = self.statistics()
        best = self._loader.planned(devices, known)
        now = plan.expected_after(self._loader.model, known)
        return best if best.expected.total_us < now.total_us * (1 - GAIN) else None

    def _replace(self, engine: Engine, plan: Plan) -> bool:
        old, before = engine.session, self._loader.plan
        kept = _Kept(old.info.sparsity, old.thresholds, old.save() if old.length() else None)
        old.close()  # its memory is needed
        self._loader.plan = plan
        try:
            engine.use(kept.put_into(self._loader.session(strict=True)))
        except BaseException as error:  # Ctrl-C as well: what sequence 0 holds must not be lost
            self._loader.plan = before
            engine.use(kept.put_into(self._loader.session()))
            if not isinstance(error, PowerInferError):
                raise
            return False
        return True


@dataclass(frozen=True)
class _Kept:
    """What a session hands on to the one that takes its place."""

    sparsity: str
    thresholds: list[float] | None
    state: bytes | None

    def put_into(self, session: Session) -> Session:
        if self.thresholds is not None:
            session.set_thresholds(self.thresholds)
        session.set_sparsity(self.sparsity)  # type: ignore[arg-type]
        if self.state is not None:
            session.load(self.state)
        return session
