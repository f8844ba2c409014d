"""What is learned of a plan while a model answers, and the placement that follows it between requests.

The first FIRST tokens tell how many neurons a token computes and how long it takes. Statistics may say less:
they count those that fire, and a predictor names others, too. Where that is so, what is expected of the plan
is corrected, and if a plan that knows it gains FIRST_GAIN, the session is opened anew after that one: K and V
of what the context holds are carried over.

With online statistics neurons are counted one by one, and that goes on. What was known before counts as
PRIOR_TOKENS tokens. Once EVERY tokens more were counted, a plan is made from the counts, and followed if it
gains GAIN. Counts of long ago fade: at MOST_TOKENS all are halved.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from .._engine.engine import Engine
from .._engine.session import Session
from ..errors import PowerInferError
from .loader import Loader

if TYPE_CHECKING:
    from ..models.plan import Plan, Statistics

Floats = npt.NDArray[np.float64]

FIRST = 200
FIRST_GAIN = 0.05
FIRST_OFF = 0.1
"""By how much of what was expected the neurons of a token may differ before a plan is made anew."""
PRIOR_TOKENS = 64
EVERY = 256
GAIN = 0.03
MOST_TOKENS = 1 << 16


class Placement(ABC):
    """One model's plan, which is measured, and may give way to a better one between two requests."""

    def __init__(self, loader: Loader) -> None:
        self.n_changes = 0
        """How often neurons were moved."""
        self._loader = loader
        self._begin()

    def _begin(self) -> None:
        self.n_seen, self._us = 0, 0.0
        self.computed = np.zeros(self._loader.model.info.n_layer)
        """Neurons of each layer, of all tokens seen."""

    def saw(self, session: Session) -> bool:
        """After a step of one generated token: of the first FIRST ones it is noted what they took. Returns
        whether the next is one of these."""
        plan = self._loader.plan
        if plan is None or not plan.uses_device or self.n_seen >= FIRST:
            return False
        self.n_seen += 1
        self._us += session.last_total.us
        self.computed += [step.n_computed for step in session.last_step]
        if self.n_seen == FIRST:
            from ..models.plan import Measured

            measured = Measured(
                n_tokens=FIRST,
                tokens_per_s=FIRST * 1e6 / self._us if self._us else 0.0,
                computed=tuple(float(n) / FIRST for n in self.computed),
            )
            self._loader.plan = replace(plan, expected=replace(plan.expected, measured=measured))
        return self.n_seen < FIRST

    def is_due(self, session: Session, patience: int = 1) -> bool:
        """Whether there is a plan to improve, and enough was learned since the last look. patience: how many
        times as much is enough."""
        plan = self._loader.plan
        is_open = plan is not None and plan.uses_device and plan.settings.sparsity != "dense"
        return is_open and self._knows_enough(session, patience)

    @abstractmethod
    def _knows_enough(self, session: Session, patience: int) -> bool: ...

    @abstractmethod
    def _better(self, session: Session, plan: Plan) -> Plan | None:
        """A plan with which a token would take less time, by enough. If there is none, the plan that is
        followed says what is to be expected of it by what is known now."""

    def improve(self, engine: Engine) -> bool:
        """Between two requests: moves neurons if that pays; whether they were moved."""
        session = engine.session
        if any(session.length(seq) for seq in range(1, session.info.n_seq)):
            return False  # only sequence 0 would be carried over
        plan = self.better_plan(session)
        return plan is not None and self.move(engine, plan)

    def better_plan(self, session: Session, *, patience: int = 1) -> Plan | None:
        """A plan with which a token would take less time, if enough was learned since the last look."""
        plan = self._loader.plan
        return self._better(session, plan) if plan is not None and self.is_due(session, patience) else None

    def move(self, engine: Engine, plan: Plan) -> bool:
        """Gives the engine a session of this plan, and its K and V of sequence 0. If that fails or is
        interrupted it has one of the plan before; whether it did not. Raises what opening that raises."""
        moved = self._replace(engine, plan)
        self.n_changes += moved
        if moved:
            self._begin()
        return moved

    def _best(self, known: Statistics, plan: Plan, gain: float) -> Plan | None:
        """The plan after these, if it is better enough; else the one that is followed is judged anew."""
        devices = self._loader.devices
        assert devices is not None
        best = self._loader.planned(devices, known)
        now = plan.with_statistics(self._loader.model, known)
        if best.expected.total_us < now.expected.total_us * (1 - gain):
            return best
        self._loader.plan = now
        return None

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


class FirstTokens(Placement):
    """Corrects a plan, or what is expected of it, once: from how many neurons the first tokens computed, not
    from which."""

    def __init__(self, loader: Loader) -> None:
        super().__init__(loader)
        self._is_done = False

    def _knows_enough(self, session: Session, patience: int) -> bool:
        return not self._is_done and self.n_seen >= FIRST and patience == 1  # not while others wait

    def _better(self, session: Session, plan: Plan) -> Plan | None:
        self._is_done = True
        expected = np.array([y.active_hot + y.active_pcie + y.active_cold for y in plan.layers])
        seen = self.computed / self.n_seen
        before = self._loader.statistics
        if self._loader.model.info.n_expert or before is None:  # places of experts follow their use
            return None
        if abs(seen.sum() - expected.sum()) <= FIRST_OFF * expected.sum():
            return None
        n_ff = self._loader.model.info.n_placed
        chances = (
            np.broadcast_to(expected[:, None] / n_ff, (len(expected), n_ff))
            if before.counts is None
            else before.counts / before.n_tokens
        )
        overshoot = plan.settings.overshoot if plan.settings.sparsity == "predicted" else 1.0
        return self._best(corrected(chances, seen, before.source, overshoot), plan, FIRST_GAIN)


def corrected(chances: Floats, seen: Floats, source: str, overshoot: float = 1.0) -> Statistics:
    """Statistics that rank neurons as before, and of which each layer computes as many as were seen.

    chances: [n_layer, n_ff] that a token computes a neuron. seen: [n_layer] neurons a token. overshoot: how
    many are computed for each that fires, which is what statistics are of.
    """
    from ..models.plan import given

    n_ff = chances.shape[1]
    quiet = np.log1p(-np.clip(chances, 1e-9, 1 - 1e-9))  # of the chance to be silent, which becomes a power
    wanted = np.clip(seen, 1e-9 * n_ff, (1 - 1e-9) * n_ff)
    low, high = np.full(len(seen), -30.0), np.full(len(seen), 30.0)
    for _ in range(60):
        middle = (low + high) / 2
        chance = np.minimum(1, -np.expm1(np.exp(middle)[:, None] * quiet) * overshoot)
        more = chance.sum(axis=1) < wanted
        low, high = np.where(more, middle, low), np.where(more, high, middle)
    scaled = -np.expm1(np.exp((low + high) / 2)[:, None] * quiet)
    n = 1 << 20
    said = f"the first {FIRST} tokens computed {seen.mean() / n_ff:.0%} of the neurons; which: {source}"
    return given((scaled * n).astype(np.uint64), n, said)


class OnlineStatistics(Placement):
    """Counts of one model's neurons."""

    def __init__(self, loader: Loader, *, every: int = EVERY) -> None:
        """every: tokens between two looks."""
        super().__init__(loader)
        info = loader.model.info
        self.every = every
        self.counts = np.zeros((info.n_layer, info.n_placed))
        self.n_tokens = 0.0

    def _knows_enough(self, session: Session, patience: int) -> bool:
        return session.counted_tokens() >= self.every * patience

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

    def _better(self, session: Session, plan: Plan) -> Plan | None:
        self._count(session)
        return self._best(self.statistics(), plan, GAIN)


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
