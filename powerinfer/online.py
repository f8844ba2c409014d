"""Statistics that are gathered while a model answers, and the placement that follows them between requests.

What was known before counts as PRIOR_TOKENS tokens. Once EVERY tokens more were counted, a plan is made from
the counts; if a token would take less time by GAIN with it, the session is opened anew after it: K and V of
what the context holds are carried over. Counts of long ago fade: at MOST_TOKENS all are halved.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from .context import Context
from .errors import PowerInferError
from .opening import Opening
from .session import Session

if TYPE_CHECKING:
    from .plan import Plan, Statistics

PRIOR_TOKENS = 64
EVERY = 256
GAIN = 0.03
MOST_TOKENS = 1 << 16


class OnlineStatistics:
    """Counts of one model's neurons."""

    def __init__(self, opening: Opening, *, every: int = EVERY) -> None:
        """every: tokens between two looks."""
        info = opening.model.info
        self.every = every
        self.counts = np.zeros((info.n_layer, info.n_ff))
        self.n_tokens = 0.0
        self.n_changes = 0
        """How often neurons were moved."""
        self._opening = opening

    def improve(self, context: Context) -> bool:
        """Between two requests: moves neurons if that pays. Raises what opening a session raises; then the
        context has a session of the plan before, or none could be opened."""
        plan = self._opening.plan
        if plan is None or not plan.uses_device or plan.settings.sparsity == "dense":
            return False
        if context.session.counted_tokens() < self.every:
            return False
        self._count(context.session)
        found = self._better(plan)
        if found is None:
            return False
        self._replace(context, found)
        self.n_changes += 1
        return True

    def _count(self, session: Session) -> None:
        new = session.neuron_counts(reset=True)
        self.counts += new.counts
        self.n_tokens += new.n_tokens
        while self.n_tokens > MOST_TOKENS:
            self.counts /= 2
            self.n_tokens /= 2

    def statistics(self) -> Statistics:
        """What is known by now."""
        from .plan import given

        before = self._opening.statistics
        prior: float | npt.NDArray[np.float64] = 0.0
        if before is not None and before.counts is not None:
            prior = before.counts / before.n_tokens
        elif self._opening.plan is not None:
            prior = self._opening.plan.settings.active_share
        scale = 1024  # counts are whole numbers
        mixed = ((self.counts + prior * PRIOR_TOKENS) * scale).astype(np.uint64)
        source = f"counted while it answered, over {self.n_tokens:,.0f} tokens"
        if before is not None:
            source += f"; before that: {before.source}"
        return given(mixed, int((self.n_tokens + PRIOR_TOKENS) * scale), source)

    def _better(self, plan: Plan) -> Plan | None:
        """The plan after what is known by now, if it is better enough."""
        devices = self._opening.devices
        assert devices is not None
        known = self.statistics()
        best = self._opening.planned(devices, known)
        now = plan.expected_after(self._opening.model, known)
        return best if best.expected.total_us < now.total_us * (1 - GAIN) else None

    def _replace(self, context: Context, plan: Plan) -> None:
        old, before = context.session, self._opening.plan
        state = old.save() if old.length() else None
        info, thresholds = old.info, old.thresholds
        context.session.close()  # its memory is needed
        del old
        self._opening.plan = plan
        try:
            session = self._opening.session()
        except PowerInferError:
            self._opening.plan = before
            session = self._opening.session()
        if thresholds is not None:
            session.set_thresholds(thresholds)
        session.set_sparsity(info.sparsity)  # type: ignore[arg-type]
        if state is not None:
            session.load(state)
        context.session = session
