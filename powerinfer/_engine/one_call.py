"""Steps of an engine that are a single call of the session: of a request that is alone, or of all that are
under way, which then go on by themselves (rounds.py)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from ..errors import ContextError, PowerInferError
from .admission import Admission
from .batch import Part, parts_of
from .part import BESIDE, UnderWay, left_to_read, next_part
from .request import Request
from .rounds import Limits, Rounds, limits_of
from .session import Session


class OneCall(Admission):
    """The part of Engine that makes them."""

    _part: UnderWay | None = None
    """Of prompts, some of whose layers are computed."""
    _beside_at = -2
    """Which step was the last that had prompts of newcomers between a part's layers."""
    _newcomers: Sequence[Request] = ()
    """Whose prompts the next step computes beside that part, which goes on behind it."""
    _is_for_a_step = False
    """The next part, since it could not begin."""

    saw: Callable[[Session], bool] | None = None
    """Called after each step of one generated token; whether it wants to see the next one, too. If not it is
    called now and then."""
    _sees_each = True
    begin_rounds: Callable[[Rounds], object] | None = None
    """What has another thread call give() of rounds that begin; None: there are none, and steps are made when
    somebody asks for them."""
    _ended_at: float | None = None
    """When the last step did, if the next one follows by itself."""

    def _made_one_call(self) -> bool:
        """Whether that was all there was to do."""
        if self.begin_rounds is not None:
            if self._go_on(self.begin_rounds):
                return True
            self._give()
        request = self._alone()
        return request is not None and self._step_alone(request)

    def _alone(self) -> Request | None:
        """The only request, if all that the step has to do is to compute its next token."""
        if len(self.queue.running) != 1 or self.queue.waiting or self.queue.is_closing:
            return None
        request = self.queue.running[0]
        is_late = request.deadline is not None and time.monotonic() >= request.deadline
        is_over = request.stream.is_cancelled or is_late or request.over is not None
        is_next = request.is_plain and request.left == 1 and request.n <= self.n_ctx
        return request if is_next and not is_over else None

    def _step_alone(self, request: Request) -> bool:
        """A step of this one in a single call of the session; False where there is no room for it."""
        sequence, choice = request.sequence, request.choice
        assert sequence is not None and choice is not None
        at = sequence.n
        sequence.n_coming, sequence.row = at + 1, None
        self.n_feeds += 1
        error, begin = None, self._begins()
        try:
            token = self.session.next(int(request.ids[at]), at, choice.sampler, seq=sequence.number)
        except PowerInferError as failed:
            if self.session.length(sequence.number) == at:  # it was not the choice
                if isinstance(failed, ContextError):
                    return False
                raise
            error = failed
        self._pace.saw(0, 1, self._ends() - begin)
        sequence.n = at + 1
        sequence.row = self.n_feeds, 0
        self._see()
        self.totals["steps"] += 1
        self.totals["computed"] += 1
        if error is not None:
            self._finish(request, "error", error)
            return True
        self._took([(request, token)])
        self._give()
        return True

    def _see(self) -> None:
        """A step of one generated token is done."""
        if self.saw is not None:
            self._sees_each = self.saw(self.session)

    def _begins(self) -> float:
        """When a step does, for who waits for tokens: what is done between two steps counts, too."""
        return time.monotonic() if self._ended_at is None else self._ended_at

    def _ends(self) -> float:
        now = time.monotonic()
        self._ended_at = now if self.begin_rounds is not None else None
        return now

    def _may_go_on(self) -> tuple[list[Request], Limits] | None:
        """Who may have rounds: all that are under way, or, while prompts wait for their next part, or have it
        layer by layer, the others; None if there can be none."""
        running = self.queue.running
        limits = limits_of(running, self.n_ctx)
        if limits is not None:
            return running, limits
        reading, others = _apart(running)
        limits = limits_of(others, self.n_ctx) if reading else None
        if limits is None or any(r.rows or r.stream.is_cancelled for r in reading):
            return None
        limits = limits.before(request.deadline for request in reading)
        if self._part is not None:
            return others, limits
        n_rounds = self._pace.rest(len(others))
        if n_rounds >= 2:
            return others, replace(limits, most=min(limits.most, n_rounds))
        return (others, limits) if n_rounds == 0 and self._begin_part(reading, len(others)) else None

    def _in_layers(self, reading: Sequence[Request], n_generating: int) -> tuple[int, int]:
        """How many tokens the next part has that is computed layer by layer, and how many layers each round
        has; no tokens: a step reads."""
        can = self._n_part and self.begin_rounds is not None and not self._is_for_a_step
        left = left_to_read(reading) if can else 0
        if not left:
            return 0, 0
        n_layer = self.session.model.info.n_layer
        return self._pace.part_in_layers(
            left, len(reading), n_generating, n_most=self._n_part, n_layer=n_layer
        )

    def _let_in(self) -> bool:
        """Whether somebody who waits has a place while a part is under way, since others' next tokens and all
        of his prompt are a step that may stand between its layers."""
        found = self._may_go_on() if self.queue.waiting and self.queue.n_places else None
        room = self._room_beside(len(found[0])) if found is not None else 0
        self._newcomers = self._admit(room) if room > 0 else ()
        return bool(self._newcomers)

    def _parts_of_step(self, running: Sequence[Request]) -> list[Part]:
        """What the next step computes. Where prompts are read beside rounds it does not read them, but for
        short ones, which need not wait for the long ones."""
        newcomers, self._newcomers = self._newcomers, ()
        reading, others = _apart([request for request in running if request not in newcomers])
        if self._part is None:
            is_beside = (
                reading
                and limits_of(others, self.n_ctx) is not None
                and self._in_layers(reading, len(others))[0]
            )
            newcomers = self._short(reading, len(others)) if is_beside else ()
            if not newcomers and (not is_beside or self._pace.rest(len(others))):
                return parts_of(running, n_batch=self._n_batch, pace=self._pace)
        if newcomers:
            self._beside_at = self.totals["steps"]
        return [*((request, 1) for request in others), *((request, request.left) for request in newcomers)]

    def _room_beside(self, n_generating: int) -> int:
        """Tokens of prompts in that step; none where prompts wait for others, with which they are read, and
        behind another one: then the part has its turn."""
        may = not self._pace.n_patient(n_generating) and self.totals["steps"] >= self._beside_at + 2
        return BESIDE - n_generating if may else 0

    def _short(self, reading: Sequence[Request], n_generating: int) -> list[Request]:
        """Of those who read, whose prompts are a step beside so many, where others' are not."""
        found, room = [], self._room_beside(n_generating)
        if all(request.left <= room for request in reading):
            return []
        for request in reading:
            if request.is_plain and request.left <= room:
                found.append(request)
                room -= request.left
        return found

    def _begin_part(self, reading: Sequence[Request], n_generating: int) -> bool:
        """Whether a part begins whose layers come with rounds."""
        room, layers = self._in_layers(reading, n_generating)
        parts = next_part(reading, room) if room else []
        self._is_for_a_step = bool(room)
        if not parts:
            return False
        ids: list[int] = []
        owners: list[int] = []
        for request, n in parts:
            sequence = request.sequence
            assert sequence is not None
            sequence.n_coming, sequence.row = sequence.n + n, None
            ids.extend(request.ids[sequence.n : sequence.n + n].tolist())
            owners.extend([sequence.number] * n)
        try:
            self.session.begin_part(ids, seq=owners)
        except ContextError:  # a step makes room, and reads less
            return False
        self._is_for_a_step = False
        self._part = UnderWay(parts, len(ids), n_generating, layers)
        return True

    def _end_part(self) -> None:
        """Whoever does something else than rounds has all of a part computed first."""
        if self._part is not None:
            self.session.end_part()
            self._read_part(is_measured=False)

    def _read_part(self, *, is_measured: bool) -> None:
        """Notes that all of it is computed."""
        part, self._part = self._part, None
        assert part is not None
        for request, n in part.parts:
            if request.sequence is None:
                continue
            request.sequence.n += n
            if request.report is not None:
                request.report_part(n)
        self.totals.update(computed=part.n, read=part.n)
        if is_measured:
            seen = part.seen
            self._pace.saw_layers(
                part.n,
                part.n_generating,
                seen.seconds,
                part_s=seen.part_s,
                waited_s=seen.waited_s,
                n_steps=seen.n_steps,
                is_alike=seen.is_alike,
                n_layer=self.session.model.info.n_layer,
            )

    def _go_on(self, begin_rounds: Callable[[Rounds], object]) -> bool:
        """Rounds of all that may go on by themselves; False if there can be none."""
        waits_until = None
        if self.queue.waiting and self.queue.n_places and self._part is None:
            if self._pace.n_patient(len(self.queue.running)):
                waits_until = self.queue.together_until(self._pace.patience_s(len(self.queue.running)))
            if waits_until is None or waits_until <= time.monotonic():
                return False
        n_waiting = len(self.queue.waiting)
        if self._part is not None and self._let_in():
            return False
        found = self._may_go_on()
        if found is None:
            return False
        running, limits = found
        if len(running) == 1 and self.saw is not None and self._sees_each:
            return False
        limits = limits.before([waits_until, *(request.deadline for request in tuple(self.queue.waiting))])
        if limits.until <= time.monotonic():
            return False
        is_reading = len(running) < len(self.queue.running)  # who comes is read with them
        n_patient = 0 if is_reading else self._pace.n_patient(len(running))
        part = self._part
        if part is not None and n_waiting and self.totals["steps"] < self._beside_at + 2:
            limits = replace(limits, most=1)  # they may have the step behind it
        rounds = Rounds(
            running,
            limits,
            self._chosen,
            self.totals,
            self.times,
            n_patient=n_patient,
            part_layers=part.layers if part is not None else 0,
        )
        begin, may_wait = self._begins(), waits_until is not None
        with self.queue.undisturbed(
            rounds.disturb, may_wait=may_wait, n_later=n_waiting if part is not None else 0
        ) as is_undisturbed:
            if not is_undisturbed:
                return self._is_only_wanted(part)
            self._chosen = []
            began = time.monotonic()
            error = rounds.run(self.session, begin_rounds)
        n_rounds = len(rounds.chosen)
        if n_rounds:
            self.n_feeds += 1
            end = self._ends()
            if part is None:
                self._pace.saw(0, len(running), (end - begin) / n_rounds, n_steps=n_rounds)
            else:
                is_alike = len(running) == part.n_generating
                part.seen.add(end - began, rounds.part_s, began - begin, n_rounds, is_alike=is_alike)
            self._went_on(rounds)
            if part is not None and not rounds.part_left and error is None:
                self._read_part(is_measured=True)
        if error is not None and not isinstance(error, ContextError):
            raise error
        return n_rounds > 0

    def _is_only_wanted(self, part: UnderWay | None) -> bool:
        """Whether somebody came and nothing else happened while a part is under way: no reason to end it."""
        is_left = any(request.stream.is_cancelled for request in self.queue.running)
        return part is not None and not is_left and not self.queue.is_closing

    def _went_on(self, rounds: Rounds) -> None:
        """Notes what rounds have chosen. Somebody may be over with what the last one has."""
        n_rounds, n_given = len(rounds.chosen), rounds.n_given
        if n_given < n_rounds:
            self.totals.update(steps=1, computed=len(rounds.requests))
        given = np.ascontiguousarray(rounds.chosen[:n_given].T)
        for i, request in enumerate(rounds.requests):
            sequence = request.sequence
            assert sequence is not None
            sequence.n += n_rounds
            sequence.row = self.n_feeds, i
            if n_given:
                request.went_on(given[i])
        if len(rounds.requests) == 1:
            self._see()
        if n_given == n_rounds:
            return
        last = rounds.chosen[-1].tolist()
        for i, (request, token) in enumerate(zip(rounds.requests, last, strict=True)):
            if token < 0:
                request.rows = [i]
                self._choose(request)
        self._took([each for each in zip(rounds.requests, last, strict=True) if each[1] >= 0])


def _apart(running: Sequence[Request]) -> tuple[list[Request], list[Request]]:
    """Those whose prompts are read, and those who have their next tokens alone to compute."""
    reading = [request for request in running if request.left > 1]
    return reading, [request for request in running if request.left <= 1]
