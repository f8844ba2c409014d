"""A prompt that is read beside others layer by layer: all have the answers that they have without that,
whoever comes and goes meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from powerinfer import ContextError, DeviceError, LogitsProcessorList
from powerinfer._engine import one_call
from powerinfer._engine.choice import Choice
from powerinfer._engine.engine import Engine
from powerinfer._engine.pace import Pace
from powerinfer._engine.scheduler import Scheduler, Stream
from powerinfer._engine.session import Model, Session
from tests import models
from tests.native.test_hybrid_mixed import opened
from tests.server import scheduling
from tests.server.scheduling import Ids

PART = 40
Parts = list[tuple[int, int]]
"""Tokens of each part whose layers came beside rounds, and how many these were."""


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    """All of it is on a device, a stand-in."""
    path: Path = tmp_path_factory.mktemp("parts") / "m.gguf"
    with Model(models.write_dense(path, models.SPECS["llama-relu-gqa"])) as model, opened(model) as s:
        yield s


@pytest.fixture
def make(session: Session, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Scheduler]]:
    """Schedulers that read parts of PART tokens, a layer beside each round."""
    made: list[Scheduler] = []

    def choose(self: Pace, n_left: int, *_: int, **__: int) -> tuple[int, int]:
        return (min(n_left, PART), 1) if n_left >= 17 else (0, 0)

    monkeypatch.setattr(Pace, "part_in_layers", choose)
    monkeypatch.setattr(Pace, "rest", lambda self, n: 0)

    def begin(**options: Any) -> Scheduler:
        made.append(Scheduler(Engine(session, **({"n_seq": 8, "max_running": 4} | options))))
        return made[-1]

    yield begin
    for scheduler in made:
        scheduler.close()
    for q in range(8):
        session.drop(q)


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Parts:
    found: Parts = []

    def saw(self: Pace, n: int, n_generating: int, seconds: float, *, n_steps: int, **more: float) -> None:
        assert 0 < more["part_s"] < seconds and more["waited_s"] >= 0
        found.append((n, n_steps))

    monkeypatch.setattr(Pace, "saw_layers", saw)
    return found


def prompt(n: int, seed: int) -> Ids:
    return scheduling.prompt(n, seed) % 280


def choice(**more: Any) -> Choice:
    return scheduling.choice(n_vocab=291, **more)


def begun(scheduler: Scheduler, limit: int = 60, **more: Any) -> list[Stream]:
    """Two that generate, in the same steps from the first on."""
    with scheduler.engine.changed:
        streams = [scheduler.submit(prompt(6, 11 + q), choice(**more), limit=limit) for q in range(2)]
    return streams


@pytest.mark.parametrize("n_prompt", [18, 41, 100])
def test_as_read_at_once(make: Callable[..., Scheduler], parts: Parts, n_prompt: int) -> None:
    scheduler = make()
    wants = [list(stream) for stream in begun(scheduler)]
    want = list(scheduler.submit(prompt(n_prompt, 7), choice(), limit=5))
    scheduler.engine.vacate()
    assert not parts
    n_read = scheduler.engine.totals["read"]
    streams = begun(scheduler)
    first = [next(stream) for stream in streams]
    reader = scheduler.submit(prompt(n_prompt, 7), choice(), limit=5)
    assert [[t, *stream] for t, stream in zip(first, streams, strict=True)] == wants
    assert list(reader) == want
    assert [n for n, _ in parts] == [min(PART, n_prompt - 1 - at) for at in range(0, n_prompt - 1, PART)]
    assert all(n_steps == 3 for _, n_steps in parts)
    assert scheduler.engine.totals["read"] - n_read == 12 + n_prompt - 1


def rounds_of(
    monkeypatch: pytest.MonkeyPatch, acts: dict[int, Callable[[], object]]
) -> list[tuple[int, int]]:
    """What is to happen while the n-th rounds with a part's layers are under way; and of all rounds, how many
    layers each had and how many are left."""
    found: list[tuple[int, int]] = []
    run = Session.run_rounds

    def recorded(self: Session, native: Any, n: int) -> None:
        n_with = sum(layers > 0 for layers, _ in found)
        if native.part_layers and n_with in acts:
            native.stop = 1  # as somebody has it who comes or goes while a round is under way
            acts.pop(n_with)()
        run(self, native, n)
        found.append((native.part_layers, native.part_left))

    monkeypatch.setattr(Session, "run_rounds", recorded)
    return found


def feeds_of(monkeypatch: pytest.MonkeyPatch, scheduler: Scheduler) -> list[tuple[int, int, bool]]:
    """Of steps: tokens, those that have logits, and whether a part was under way behind them."""
    found: list[tuple[int, int, bool]] = []
    feed = Session.feed

    def recorded(self: Session, ids: Any, **more: Any) -> list[int]:
        chosen = feed(self, ids, **more)
        found.append((len(ids), sum(map(bool, more["want_logits"])), scheduler.engine._part is not None))
        return chosen

    monkeypatch.setattr(Session, "feed", recorded)
    return found


@pytest.mark.parametrize("n_new", [3, 62, 63])
def test_short_prompts_do_not_wait_for_a_part(
    make: Callable[..., Scheduler], parts: Parts, monkeypatch: pytest.MonkeyPatch, n_new: int
) -> None:
    """They are computed beside it, if they are a step with others' next tokens; it goes on behind that."""
    scheduler, came = make(), []
    wants = [list(stream) for stream in begun(scheduler)]
    late = list(scheduler.submit(prompt(n_new, 3), choice(), limit=5))
    want = list(scheduler.submit(prompt(100, 7), choice(), limit=5))
    scheduler.engine.vacate()
    streams = begun(scheduler)
    first = next(streams[0])
    feeds = feeds_of(monkeypatch, scheduler)
    rounds_of(monkeypatch, {1: lambda: came.append(scheduler.submit(prompt(n_new, 3), choice(), limit=5))})
    reader = scheduler.submit(prompt(100, 7), choice(), limit=5)
    got = [[first, *streams[0]], list(streams[1])]
    # Other kernels compute more than a few tokens: rounding may then decide what follows.
    assert got == wants if n_new == 3 else [len(own) for own in got] == [60, 60]
    assert list(reader) == want and [list(stream) for stream in came] == [late]
    assert ((n_new + 2, 3, True) in feeds) == (n_new <= 62)
    # Whoever waits is read with the rest of the long prompt.
    assert [n for n, _ in parts][:2] == [PART, PART] and (len(parts) == 3) == (n_new <= 62)
    for sequence in scheduler.engine.cache.all:
        assert scheduler.engine.session.length(sequence.number) == sequence.n


def test_newcomers_do_not_keep_a_prompt_from_being_read(
    make: Callable[..., Scheduler], parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a step with some of them is one with layers. Who comes between two rounds ends no part."""
    scheduler = make(n_seq=20, max_running=12)
    streams = begun(scheduler)
    next(streams[0])
    events: list[str] = []
    feed, run, begin, came = Session.feed, Session.run_rounds, one_call.Rounds, list[Stream]()

    def fed(self: Session, ids: Any, **more: Any) -> list[int]:
        events.append("newcomers" if scheduler.engine._part is not None else "step")
        return feed(self, ids, **more)

    def went_on(self: Session, native: Any, n: int) -> None:
        run(self, native, n)
        events.append("layers" if native.part_layers else "rounds")

    def began(*more: Any, **options: Any) -> Any:
        if options["part_layers"] and not came:
            with scheduler.engine.changed:
                came.extend(scheduler.submit(prompt(25, 3 + i), choice(), limit=3) for i in range(6))
        return begin(*more, **options)

    def ended(self: Session) -> None:
        raise AssertionError("a part is ended")

    monkeypatch.setattr(Session, "feed", fed)
    monkeypatch.setattr(Session, "run_rounds", went_on)
    monkeypatch.setattr(Session, "end_part", ended)
    monkeypatch.setattr(one_call, "Rounds", began)
    reader = scheduler.submit(prompt(100, 7), choice(), limit=5)
    assert [len(list(stream)) for stream in (*streams, reader)] == [59, 60, 5]
    assert [len(list(stream)) for stream in came] == [3] * 6
    assert events.count("newcomers") >= 2
    assert all(after == "layers" for at, after in pairwise(events) if at == "newcomers")


def test_a_beginning_that_is_shared_with_who_reads(
    make: Callable[..., Scheduler], parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole blocks of it, so that the part goes on."""
    scheduler, came = make(), []
    ids = np.concatenate([prompt(75, 7), prompt(8, 9)])
    want = list(scheduler.submit(ids, choice(), limit=5))
    scheduler.engine.vacate()
    streams = begun(scheduler)
    next(streams[0])
    feeds = feeds_of(monkeypatch, scheduler)
    rounds_of(monkeypatch, {2: lambda: came.append(scheduler.submit(ids, choice(), limit=5))})
    reader = scheduler.submit(prompt(100, 7), choice(), limit=5)
    assert [len(list(stream)) for stream in (*streams, reader)] == [59, 60, 5]
    assert [list(stream) for stream in came] == [want] and came[0].n_reused == 64
    assert (83 - 64 + 2, 3, True) in feeds and len(parts) == 3


def test_beside_many_prompts_wait_for_others(make: Callable[..., Scheduler]) -> None:
    engine = make().engine
    assert [engine._room_beside(n) for n in (1, 39, 40, 64)] == [63, 25, 0, 0]


def test_a_short_prompt_stands_in_front_of_a_long_one(
    make: Callable[..., Scheduler], parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where they come together."""
    scheduler = make()
    wants = [list(scheduler.submit(prompt(n, n), choice(), limit=5)) for n in (100, 20)]
    scheduler.engine.vacate()
    streams = begun(scheduler)
    next(streams[0])
    feeds = feeds_of(monkeypatch, scheduler)
    with scheduler.engine.changed:
        readers = [scheduler.submit(prompt(n, n), choice(), limit=5) for n in (100, 20)]
    assert [list(reader) for reader in readers] == wants
    assert (22, 3, False) in feeds and [n for n, _ in parts] == [PART, PART, 19]


@pytest.mark.parametrize("who", ["comes", "leaves", "reads no more", "wants a grammar"])
def test_who_comes_and_goes(
    who: str, make: Callable[..., Scheduler], parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is computed at once where somebody leaves; who wants a grammar waits until it is read."""
    scheduler, came = make(), []
    more = begun(scheduler, 90)
    wants = [list(stream) for stream in more]
    late = list(scheduler.submit(prompt(3, 3), choice(), limit=5))
    streams = begun(scheduler, 90)
    next(streams[0])

    def act() -> None:
        if who == "comes":
            came.append(scheduler.submit(prompt(3, 3), choice(), limit=5))
        elif who == "leaves":
            streams[1].cancel()
        elif who == "reads no more":
            reader.cancel()
        else:
            came.append(scheduler.submit(prompt(3, 3), choice(processors=hooks), limit=5))

    hooks = LogitsProcessorList([lambda ids, scores: scores])
    seen = rounds_of(monkeypatch, {1: act})
    reader = scheduler.submit(prompt(100, 7), choice(), limit=5)
    got = [list(stream) for stream in streams]
    read = list(reader)
    assert seen[[layers for layers, _ in seen].index(1)] == (1, 0)
    assert (1, 2) in seen  # then somebody came or left
    at = seen.index((1, 2))
    assert seen[at + 1][0] == (1 if who in ("comes", "wants a grammar") else 0) or who == "leaves"
    assert len(parts) == {"leaves": 2, "reads no more": 1}.get(who, 3)  # others' are computed at once
    assert got[0] == wants[0][1:] and (got[1] == wants[1] or who == "leaves")
    assert [list(stream) for stream in came] == [late] * len(came)
    assert reader.reason == ("cancelled" if who == "reads no more" else "length")
    assert len(read) == (0 if who == "reads no more" else 5)
    assert scheduler.engine._part is None
    # What the cache says of sequences is what the session has.
    for sequence in scheduler.engine.cache.all:
        assert scheduler.engine.session.length(sequence.number) == sequence.n


def test_an_end_of_one_stops_no_part(
    make: Callable[..., Scheduler], parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others go on with it."""
    scheduler = make()
    wants = [list(stream) for stream in begun(scheduler)]
    seen = rounds_of(monkeypatch, {})
    with scheduler.engine.changed:
        streams = [scheduler.submit(prompt(6, 11 + q), choice(), limit=4 + 56 * q) for q in range(2)]
    assert next(streams[0]) == wants[0][0]
    reader = scheduler.submit(prompt(100, 7), choice(), limit=5)
    assert [list(streams[0]), list(streams[1])] == [wants[0][1:4], wants[1]]
    assert len(list(reader)) == 5
    assert (1, 0) in seen and len(parts) == 3


def test_a_lost_device_ends_all(
    make: Callable[..., Scheduler], parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And those that come next are computed."""
    scheduler, run, came = make(), Session.run_rounds, list[Stream]()

    def failing(self: Session, native: Any, n: int) -> None:
        if native.part_layers:
            raise DeviceError("it is gone")
        if not came:
            native.stop = 1
            came.append(scheduler.submit(prompt(100, 7), choice(), limit=5))
        run(self, native, n)

    monkeypatch.setattr(Session, "run_rounds", failing)
    for stream in begun(scheduler):
        with pytest.raises(DeviceError):
            list(stream)
    with pytest.raises(DeviceError):
        list(came[0])
    monkeypatch.setattr(Session, "run_rounds", run)
    assert scheduler.engine._part is None
    assert len(list(scheduler.submit(prompt(100, 7), choice(), limit=5))) == 5


@pytest.mark.parametrize("why", ["there is no room", "nobody may have so little"])
def test_what_cannot_begin_is_read_in_a_step(
    why: str, make: Callable[..., Scheduler], parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: Session, *_: Any, **__: Any) -> None:
        raise ContextError("the KV pool is full")

    if why == "there is no room":
        monkeypatch.setattr(Session, "begin_part", refused)
    else:
        monkeypatch.setattr(one_call, "next_part", lambda reading, room: [])
    scheduler = make()
    streams = begun(scheduler)
    next(streams[0])
    reader = scheduler.submit(prompt(100, 7), choice(), limit=5)
    assert [len(list(stream)) for stream in streams] == [59, 60] and len(list(reader)) == 5
    at = reader.first_at
    assert not parts and at is not None and at < (streams[0].last_at or 0)  # it did not wait for their end
