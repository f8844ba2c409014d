"""How requests end: cancelled, by a hook that fails, too late, with a session that fails, by close."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from powerinfer import (
    ArgumentError,
    BusyError,
    ClosedError,
    ContextError,
    DeadlineError,
    DeviceError,
    LogitsProcessorList,
)
from powerinfer._engine.engine import Engine
from powerinfer._engine.scheduler import Stream
from powerinfer._engine.session import Session
from tests.server.scheduling import N_VOCAB, Ids, MakeScheduler, blocked, choice, prompt, wait_until


def test_cancel(make: MakeScheduler) -> None:
    scheduler = make(max_running=1, max_waiting=2)
    (running,), go = blocked(scheduler, 1)
    waiting = [scheduler.submit(prompt(4), choice(), limit=2) for _ in range(2)]
    with pytest.raises(BusyError, match="1 requests are under way and 2 are waiting"):
        scheduler.submit(prompt(4), choice())
    waiting[0].cancel()
    assert list(waiting[0]) == [] and waiting[0].reason == "cancelled"
    third = scheduler.submit(prompt(4), choice(), limit=2)  # its place was free at once
    running.cancel()
    go.set()
    list(running)
    assert len(list(waiting[1])) == 2 and len(list(third)) == 2
    assert running.reason == "cancelled" and running.n_given < 30
    running.cancel()  # once more: nothing
    assert scheduler.stats().n_ended == {"cancelled": 2, "length": 2}


def test_a_hook_that_fails_is_its_own_misfortune(make: MakeScheduler) -> None:
    scheduler = make()

    def fail(ids: Ids, _: object) -> None:
        if ids.size > 6:
            raise ZeroDivisionError("of the hook")

    good = scheduler.submit(prompt(5), choice(), limit=20)
    bad = scheduler.submit(prompt(5, 1), choice(processors=LogitsProcessorList([fail])), limit=20)
    nan = choice(processors=LogitsProcessorList([lambda _, logits: logits * np.nan]))
    with pytest.raises(ZeroDivisionError, match="of the hook"):
        list(bad)
    with pytest.raises(ArgumentError):
        list(scheduler.submit(prompt(5, 2), nan))
    assert len(list(good)) == 20 and bad.n_given == 2
    assert scheduler.stats().n_ended == {"error": 2, "length": 1}


def test_a_hook_that_would_end_the_program(make: MakeScheduler) -> None:
    scheduler = make()

    def leave(*_: object) -> None:
        raise SystemExit("enough")

    with pytest.raises(RuntimeError, match="SystemExit: enough"):
        list(scheduler.submit(prompt(5), choice(processors=LogitsProcessorList([leave])), limit=5))

    def panic(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(RuntimeError, match="KeyboardInterrupt"):
        scheduler.score(prompt(5), panic)
    assert len(list(scheduler.submit(prompt(5), choice(), limit=5))) == 5


def test_a_visit_is_cancelled(make: MakeScheduler) -> None:
    scheduler = make(max_running=1)
    (running,), go = blocked(scheduler, 1)
    with pytest.raises(ClosedError, match="cancelled"):
        scheduler.embed(prompt(5, 1), begun=lambda stream: stream.cancel())
    go.set()
    list(running)


def test_who_is_cancelled_while_he_gives_way(make: MakeScheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    preempt = Engine._preempt
    cancelled: list[Stream] = []
    waited: list[bool] = []

    def observed(self: Engine) -> None:
        youngest = self._running[-1]
        preempt(self)
        if not cancelled:  # as if it came before the lock was taken
            youngest.stream.is_cancelled = True
            cancelled.append(youngest.stream)

    leave = Engine._leave

    def left(self: Engine) -> None:
        leave(self)
        waited.extend(job.stream in cancelled for job in self.queue.waiting)

    monkeypatch.setattr(Engine, "_preempt", observed)
    monkeypatch.setattr(Engine, "_leave", left)
    scheduler = make(n_pool=4 * 64, n_seq=8, max_running=4)
    with scheduler.engine.changed:  # none begins before all are there
        streams = [scheduler.submit(prompt(30, i), choice(), limit=100) for i in range(4)]
    for stream in streams:
        list(stream)
    assert cancelled[0].reason == "cancelled" and not any(waited)


def test_answers_computed_again_take_little_memory(
    make: MakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted: list[int] = []
    feed = Session.feed

    def observed(self: Session, tokens: Any, **options: Any) -> list[int]:
        wanted.append(sum(options["want_logits"]))
        return feed(self, tokens, **options)

    monkeypatch.setattr(Session, "feed", observed)
    scheduler = make(n_pool=4 * 64, n_seq=8, max_running=4)
    with scheduler.engine.changed:  # none begins before all are there
        streams = [scheduler.submit(prompt(30, i), choice(), limit=100) for i in range(4)]
    for stream in streams:
        list(stream)
    assert scheduler.stats().n_preempted >= 1
    assert max(wanted) <= 4 * 32


def test_an_engine_that_fails_leaves_nobody_waiting(
    make: MakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = make(max_running=1)
    (first,), go = blocked(scheduler, 1)
    second = scheduler.submit(prompt(5), choice(), limit=3)
    feed = Session.feed

    def broken(*_: object, **__: object) -> None:
        raise DeviceError("the device is gone")

    monkeypatch.setattr(Session, "feed", broken)
    go.set()
    for stream in (first, second):
        with pytest.raises(DeviceError):
            list(stream)
    assert isinstance(scheduler.last_error, DeviceError)
    monkeypatch.setattr(Session, "feed", feed)
    assert len(list(scheduler.submit(prompt(5), choice(), limit=3))) == 3
    wait_until(lambda: scheduler.last_error is None)


def test_an_engine_that_works_again_says_so_itself(
    make: MakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who only sends requests to healthy servers would never learn it otherwise."""
    scheduler = make()
    want = list(scheduler.submit(prompt(40), choice(), limit=3))
    feed, works, failed = Session.feed, threading.Event(), []

    def broken(self: Session, tokens: Any, **options: Any) -> list[int]:
        if not works.is_set():
            failed.append(1)
            if is_short:
                works.set()
            raise DeviceError("the device is gone")
        return feed(self, tokens, **options)

    monkeypatch.setattr(Session, "feed", broken)
    for is_short, probe_s in ((True, 60.0), (False, 0.02)):  # the second one meets what it tries now and then
        monkeypatch.setattr("powerinfer._engine.scheduler._PROBE_S", probe_s)
        works.clear()
        failed.clear()
        with pytest.raises(DeviceError):
            list(scheduler.submit(prompt(40), choice(), limit=3))
        if not is_short:
            wait_until(lambda: len(failed) >= 4)
            assert isinstance(scheduler.last_error, DeviceError)
            works.set()
        wait_until(lambda: scheduler.last_error is None)
    assert list(scheduler.submit(prompt(40), choice(), limit=3)) == want


def test_deadlines(make: MakeScheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make(max_running=1)
    late = time.monotonic() - 1
    stream = scheduler.submit(prompt(5), choice(), deadline=late)
    assert list(stream) == [] and stream.reason == "time"
    with pytest.raises(DeadlineError):
        scheduler.embed(prompt(5), deadline=late)
    calls: list[int] = []
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + 1000 * (len(calls) >= 3))
    monkeypatch.setattr("powerinfer._engine.admission.time", clock)
    count = LogitsProcessorList([lambda *_: calls.append(1)])
    stream = scheduler.submit(prompt(5), choice(processors=count), deadline=time.monotonic() + 500)
    assert len(list(stream)) == 3 and stream.reason == "time"


def test_close(make: MakeScheduler) -> None:
    scheduler = make(max_running=1)
    (running,), go = blocked(scheduler, 1)
    waiting = scheduler.submit(prompt(5), choice())
    scheduler.begin_close(grace_s=20)
    with pytest.raises(ClosedError):
        list(waiting)
    with pytest.raises(ClosedError):
        scheduler.submit(prompt(5), choice())
    go.set()
    assert len(list(running)) == 29  # it had time to end
    scheduler.close()


def test_close_at_once(make: MakeScheduler) -> None:
    scheduler = make(max_running=1)
    (running,), go = blocked(scheduler, 1)
    scheduler.begin_close()
    go.set()
    with pytest.raises(ClosedError):
        list(running)
    scheduler.close()
    scheduler.close()


def test_misuse(make: MakeScheduler) -> None:
    scheduler = make()
    for ids in (np.zeros(0, np.int32), np.array([N_VOCAB], np.int32), np.array([-1], np.int32)):
        with pytest.raises(ArgumentError):
            scheduler.submit(ids, choice())
    with pytest.raises(ContextError, match="257 tokens and n_ctx is 256"):
        scheduler.submit(prompt(257), choice())
    with pytest.raises(ArgumentError, match="pooling_type is 'max'"):
        scheduler.embed(prompt(3), pooling="max")
    for options in ({"max_running": 99}, {"max_waiting": -1}, {"prompt_part": 0}):
        with pytest.raises(ArgumentError):
            make(**options)
