"""Rounds: generations go on by themselves until one is over, or somebody comes or goes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from powerinfer import ClosedError, DeviceError, Llama
from powerinfer._engine import pace, rounds
from powerinfer._engine.pace import Pace
from powerinfer._engine.request import Request, Stream
from powerinfer._engine.rounds import Limits, Rounds
from powerinfer._engine.scheduler import Scheduler
from powerinfer._engine.session import Session
from tests.server.scheduling import MakeScheduler, choice, prompt

Calls = list[tuple[int, int]]
"""Of each call of the engine how many rounds it made, of how many generations."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Those that are made from here on. None ends because of its time."""
    found: Calls = []
    run = Session.run_rounds

    def recorded(self: Session, native: Any, n: int) -> None:
        try:
            run(self, native, n)
        finally:
            found.append((native.state >> 1, n))

    monkeypatch.setattr(Session, "run_rounds", recorded)
    monkeypatch.setattr(rounds, "LONGEST_S", 3600)
    return found


@pytest.fixture(scope="module")
def alone(relu_path: Path) -> Callable[[Any, int], list[int]]:
    """What Llama answers."""
    llm = Llama(relu_path, n_threads=1, verbose=False, type_k="f32", type_v="f32")
    return lambda ids, n: list(islice(llm.generate(ids.tolist(), temp=0.0), n))


def before_rounds(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """act() comes, once, when rounds are allowed and have not begun."""
    run, acts = Session.run_rounds, [act]

    def recorded(self: Session, native: Any, n: int) -> None:
        while acts:
            acts.pop()()
        run(self, native, n)

    monkeypatch.setattr(Session, "run_rounds", recorded)


def begun(scheduler: Scheduler, *prompts: Any, **options: Any) -> list[Any]:
    """Generations of which none begins before all are there."""
    with scheduler.engine.changed:
        return [scheduler.submit(ids, choice(), **options) for ids in prompts]


def test_one_alone_is_one_call(make: MakeScheduler, calls: Calls) -> None:
    """Also where there is a deadline, as every request of the server has."""
    scheduler = make()
    stream = scheduler.submit(prompt(9), choice(), limit=8, deadline=time.monotonic() + 600)
    assert len(list(stream)) == 8 and calls == [(7, 1)]
    late = scheduler.submit(prompt(9), choice(), deadline=time.monotonic() - 1)
    assert not list(late) and late.reason == "time"
    assert len(calls) == 1


def test_several_go_on_until_one_is_over(
    make: MakeScheduler, calls: Calls, alone: Callable[[Any, int], list[int]]
) -> None:
    scheduler = make()
    prompts = [prompt(n, n) for n in (5, 9, 14)]
    with scheduler.engine.changed:
        streams = [scheduler.submit(ids, choice(), limit=4 * n) for n, ids in enumerate(prompts, 3)]
    answers = [list(stream) for stream in streams]
    assert answers == [alone(ids, 4 * n) for n, ids in enumerate(prompts, 3)]
    assert calls == [(11, 3), (4, 2), (4, 1)]
    assert [stream.reason for stream in streams] == ["length"] * 3
    stats = scheduler.stats()
    assert stats.n_generated_tokens == 12 + 16 + 20 and stats.n_steps == 1 + 11 + 4 + 4
    assert sum(stats.between_tokens.counts) == stats.n_generated_tokens - 3


def test_an_end_token_ends_rounds(
    make: MakeScheduler, calls: Calls, alone: Callable[[Any, int], list[int]]
) -> None:
    expected = alone(prompt(6, 1), 12)
    end = next(i for i in range(2, 12) if expected[i] not in expected[:i])
    scheduler = make()
    with scheduler.engine.changed:
        ended = scheduler.submit(prompt(6, 1), choice(ends={expected[end]}), limit=12)
        other = scheduler.submit(prompt(7, 2), choice(), limit=20)
    assert list(ended) == expected[: end + 1] and ended.reason == "stop"
    assert ended.n_given == end
    assert list(other) == alone(prompt(7, 2), 20)
    assert calls == [(end, 2), (19 - end, 1)]


def test_who_comes_is_not_left_waiting(
    make: MakeScheduler, calls: Calls, monkeypatch: pytest.MonkeyPatch, alone: Callable[[Any, int], list[int]]
) -> None:
    scheduler, came = make(), []
    before_rounds(monkeypatch, lambda: came.append(scheduler.submit(prompt(4, 2), choice(), limit=3)))
    stream = scheduler.submit(prompt(9), choice(), limit=30)
    assert list(stream) == alone(prompt(9), 30)
    assert list(came[0]) == alone(prompt(4, 2), 3)
    assert calls == [(1, 1), (2, 2), (25, 1)]


def test_who_has_no_place_stops_nobody(
    make: MakeScheduler, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, came = make(max_running=1), []
    before_rounds(monkeypatch, lambda: came.append(scheduler.submit(prompt(4, 2), choice(), limit=3)))
    assert len(list(scheduler.submit(prompt(9), choice(), limit=30))) == 30
    assert len(list(came[0])) == 3
    assert calls == [(29, 1), (2, 1)]


def test_prompts_wait_for_each_other(
    make: MakeScheduler, calls: Calls, monkeypatch: pytest.MonkeyPatch, alone: Callable[[Any, int], list[int]]
) -> None:
    """A few steps, beside many on a GPU, which reads all weights for a prompt however short."""
    monkeypatch.setattr(pace, "PATIENT_FROM", 5)
    monkeypatch.setattr(Pace, "patience_s", lambda *_: 0.0)
    scheduler = make(prompt_part=64, max_running=8)
    scheduler.engine._pace.n_mixed = 64
    came: list[Any] = []

    def come(n: int) -> None:
        before_rounds(
            monkeypatch, lambda: came.extend(begun(scheduler, *map(prompt, range(4, 4 + n)), limit=3))
        )
        calls.clear()
        came.clear()

    for n, first in ((1, 1 + pace.PATIENT), (2, 1)):  # two are many
        come(n)
        streams = begun(scheduler, *(prompt(9, i) for i in range(5)), limit=20)
        assert [list(stream) for stream in streams] == [alone(prompt(9, i), 20) for i in range(5)]
        assert [list(stream) for stream in came] == [alone(prompt(4 + i), 3) for i in range(n)]
        assert calls[:2] == [(first, 5), (2, 5 + n)]
    come(1)  # beside few nobody waits
    assert [len(list(stream)) for stream in begun(scheduler, prompt(9), limit=20)] == [20]
    assert calls[:2] == [(1, 1), (2, 2)]
    monkeypatch.setattr(Pace, "patience_s", lambda *_: 3600.0)
    come(1)
    streams = begun(scheduler, *(prompt(9, i) for i in range(5)), limit=20)
    assert [len(list(stream)) for stream in streams] == [20] * 5
    assert [len(list(stream)) for stream in came] == [3]
    assert calls[:2] == [(1 + pace.PATIENT, 5), (19 - 1 - pace.PATIENT, 5)]


def test_who_goes_frees_its_place_before_the_next_round(
    make: MakeScheduler, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = make()
    streams: list[Any] = []
    before_rounds(monkeypatch, lambda: streams[0].cancel())
    with scheduler.engine.changed:
        streams += begun(scheduler, prompt(9), prompt(5, 1), limit=20)
    assert len(list(streams[1])) == 20
    assert len(list(streams[0])) == 2 and streams[0].reason == "cancelled"
    assert calls == [(1, 2), (17, 1)]


def test_close_does_not_wait_for_rounds(
    make: MakeScheduler, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = make()
    before_rounds(monkeypatch, scheduler.begin_close)
    stream = scheduler.submit(prompt(9), choice(), limit=60)
    with pytest.raises(ClosedError):
        list(stream)
    assert calls == [(1, 1)]
    scheduler.close()


def test_a_choice_that_failed_is_made_once_more(
    make: MakeScheduler, monkeypatch: pytest.MonkeyPatch, alone: Callable[[Any, int], list[int]]
) -> None:
    """It is then the one that says why."""
    run = Session.run_rounds

    def failing(self: Session, native: Any, n: int) -> None:
        run(self, native, n)
        native.chosen[(native.state >> 1) * n - 1] = -1

    monkeypatch.setattr(Session, "run_rounds", failing)
    streams = begun(make(), prompt(9), prompt(5, 1), limit=9)
    assert [list(stream) for stream in streams] == [alone(prompt(9), 9), alone(prompt(5, 1), 9)]


def test_rounds_that_fail(make: MakeScheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was chosen before is given, then the error."""
    run = Session.run_rounds

    def failing(self: Session, native: Any, n: int) -> None:
        native.most = 3
        run(self, native, n)
        raise DeviceError("the device is lost")

    scheduler = make()
    monkeypatch.setattr(Session, "run_rounds", failing)
    streams = begun(scheduler, prompt(9), prompt(5, 1), limit=20)
    for stream in streams:
        given = []
        with pytest.raises(DeviceError, match="lost"):
            given += list(islice(stream, 4))
            next(stream)
        assert len(given) == 4
    monkeypatch.undo()
    assert len(list(scheduler.submit(prompt(9), choice(), limit=3))) == 3


class FakeSession:
    """Its rounds last until what they chose was read."""

    def __init__(self, read: threading.Event) -> None:
        self._read = read

    def run_rounds(self, native: Any, n: int) -> None:
        native.chosen[0] = 7
        native.state = 2
        assert self._read.wait(60)
        raise ClosedError("the session is closed")


def test_tokens_are_given_while_rounds_go_on(make: MakeScheduler) -> None:
    """Not when they are over; and who gives them does not wait for more of rounds that failed."""
    engine, read = make().engine, threading.Event()
    request = Request(
        stream=Stream(1, engine.cancel), ids=np.arange(9, dtype=np.int32), n=1, n_prompt=1, choice=choice()
    )
    request.sequence = engine.cache.all[0]
    made = Rounds([request], Limits(4, time.monotonic() + 600), [], engine.totals, engine.times)

    def give() -> None:
        while made._native.state < 2:  # nobody is woken by what a FakeSession does
            time.sleep(0.001)
        made.give()

    giver = threading.Thread(target=give)
    runner = threading.Thread(
        target=made.run, args=(cast(Session, FakeSession(read)), lambda _: giver.start())
    )
    runner.start()
    assert next(request.stream) == 7
    read.set()
    runner.join()
    giver.join()
    assert made.chosen.tolist() == [[7]] and made.n_given == 1


def test_while_a_prompt_waits_for_its_next_part_others_go_on(
    make: MakeScheduler, calls: Calls, monkeypatch: pytest.MonkeyPatch, alone: Callable[[Any, int], list[int]]
) -> None:
    """By themselves, as long as the pace says; all have the answers that they have alone."""
    scheduler, came, rests, parts = make(), [], [5, 0, 1, 7, 0, 3], []

    def part(self: Pace, n_reading: int, n_generating: int) -> int:
        parts.append((n_reading, n_generating))
        return 16

    monkeypatch.setattr(Pace, "rest", lambda self, n: rests.pop(0) if rests else 0)
    monkeypatch.setattr(Pace, "part", part)
    before_rounds(monkeypatch, lambda: came.append(scheduler.submit(prompt(150, 4), choice(), limit=3)))
    streams = begun(scheduler, *(prompt(n, n) for n in (5, 9)), limit=60)
    assert [list(stream) for stream in streams] == [alone(prompt(n, n), 60) for n in (5, 9)]
    assert list(came[0]) == alone(prompt(150, 4), 3)
    assert calls[:4] == [(1, 2), (5, 2), (7, 2), (3, 2)]
    assert not rests and parts[:6] == [(1, 2)] * 6


def test_who_reads_may_leave_while_others_go_on(
    make: MakeScheduler, calls: Calls, monkeypatch: pytest.MonkeyPatch, alone: Callable[[Any, int], list[int]]
) -> None:
    """Rounds end then, as they do when its time is over."""
    scheduler, readers, run, until = make(), [], Session.run_rounds, []
    deadline = time.monotonic() + 600
    acts = [
        lambda: readers.append(scheduler.submit(prompt(90, 4), choice(), deadline=deadline)),
        lambda: readers[0].cancel(),
    ]

    def acted(self: Session, native: Any, n: int) -> None:
        until.append(native.until_ns)
        if acts:
            acts.pop(0)()
        run(self, native, n)

    monkeypatch.setattr(Session, "run_rounds", acted)
    monkeypatch.setattr(Pace, "rest", lambda self, n: 1000)
    stream = scheduler.submit(prompt(5), choice(), limit=60)
    assert list(stream) == alone(prompt(5), 60)
    assert not list(readers[0]) and readers[0].reason == "cancelled"
    assert calls == [(1, 1), (1, 1), (55, 1)]
    assert until[1] <= deadline * 1e9 < until[0]


@pytest.mark.parametrize("max_running", [1, 2])
def test_whose_time_is_over_waits_for_no_rounds(
    make: MakeScheduler, calls: Calls, monkeypatch: pytest.MonkeyPatch, max_running: int
) -> None:
    """Neither without a place nor while its prompt waits for others' tokens: no more than one round."""
    scheduler, late, run = make(max_running=max_running), [], Session.run_rounds

    def submit() -> None:
        late.append(scheduler.submit(prompt(90, 4), choice(), deadline=time.monotonic() + 0.05))

    acts: list[Callable[[], object]] = [submit, lambda: time.sleep(0.1)]

    def acted(self: Session, native: Any, n: int) -> None:
        if acts:
            acts.pop(0)()
        run(self, native, n)

    monkeypatch.setattr(Session, "run_rounds", acted)
    monkeypatch.setattr(Pace, "rest", lambda self, n: 1000)
    with scheduler.engine.changed:
        stream = scheduler.submit(prompt(5), choice(), limit=100)
        if max_running == 1:
            acts.pop(0)()
    assert len(list(stream)) == 100
    assert not list(late[0]) and late[0].reason == "time"
    assert len(calls) <= 4 and calls[-1][0] > 80
