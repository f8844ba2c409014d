"""Who computes goes first: others wait between two steps, never for long, and never for one that is idle."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from powerinfer._engine import turn
from powerinfer._engine.session import Session
from tests.server.scheduling import MakeScheduler, choice, prompt, wait_until


@pytest.fixture
def own() -> Iterator[turn.Turn]:
    found = turn.begin()
    yield found
    turn.end(found)


def giving_way() -> threading.Thread:
    thread = threading.Thread(target=turn.give_way, daemon=True)
    thread.start()
    return thread


def test_others_wait_until_the_next_call(own: turn.Turn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn, "LONGEST_S", 3600)
    with own:
        turn.give_way()  # the engine computes: nobody is held up
    thread = giving_way()
    thread.join(0.05)
    assert thread.is_alive()
    with own:
        thread.join(10)
        assert not thread.is_alive()
    thread = giving_way()
    own.leave()
    thread.join(10)
    assert not thread.is_alive()
    turn.give_way()


def test_nobody_waits_for_long(own: turn.Turn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn, "LONGEST_S", 0.01)
    with own:
        pass
    turn.give_way()
    own.leave()


def test_who_has_ended_is_waited_for_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn, "LONGEST_S", 3600)
    own = turn.begin()
    with own:
        pass
    turn.end(own)
    turn.give_way()
    with own:  # its thread may still be in a call
        pass
    turn.give_way()


def test_a_scheduler_has_its_turn_only_between_steps(
    make: MakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, seen = make(), []
    own = scheduler.engine.session.call
    assert isinstance(own, turn.Turn)
    run = Session.run_rounds

    def recorded(self: Session, native: object, n: int) -> None:
        seen.append(own.is_taken)
        run(self, native, n)

    monkeypatch.setattr(Session, "run_rounds", recorded)
    assert len(list(scheduler.submit(prompt(9), choice(), limit=8))) == 8
    assert seen == [True]
    wait_until(lambda: not own.is_taken)  # nothing is under way


def test_another_session_takes_it_over(make: MakeScheduler) -> None:
    """What moves to a device while the engine runs is a session of its own."""
    one, other = make(), make()
    own, session = one.engine.session.call, other.engine.session
    one.engine.use(session)
    assert session.call is own


def test_a_lock_that_somebody_left_taken_holds_up_nobody(own: turn.Turn) -> None:
    own._lock.acquire()  # a signal's exception between two lines of wait()
    with own:
        pass
    assert own.is_taken
    own.leave()
    assert not own._lock.locked()
