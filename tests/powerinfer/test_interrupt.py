"""Signals that come while the engine computes: handlers run between two layers, and may end the feed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from powerinfer import ArgumentError, ClosedError
from powerinfer._engine import _native, interrupt
from powerinfer._engine.choice import Choice
from powerinfer._engine.engine import Engine
from powerinfer._engine.interrupt import Interrupt
from powerinfer._engine.sampling import Sampler, Sampling
from powerinfer._engine.scheduler import Scheduler
from powerinfer._engine.session import Model, Session
from tests import models
from tests.native import hybrid
from tests.powerinfer.conftest import OpenLlama
from tests.powerinfer.greedy import greedy

HELD, N = 40, 100
NAMES = ["llama-relu", "falcon-7b", "lfm2", "gemma2", "olmoe"]
"""Blocks one after the other, and side by side; with states; with windows; experts."""


def tokens(n: int = N) -> list[int]:
    return [int(t) for t in np.random.default_rng(5).integers(3, 291, n)]


class Looks:
    """How often the engine let Python look, and the signal that comes at one of these times."""

    def __init__(self) -> None:
        self.n = 0
        self.at: int | None = None

    def look(self, _ctx: Any) -> int:
        self.n += 1
        if self.n - 1 == self.at:
            signal.raise_signal(signal.SIGINT)
        return 0


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    """Of sessions opened after this, in which that happens in front of each layer."""
    looks = Looks()
    monkeypatch.setattr(interrupt, "STOP_MS", 0)
    monkeypatch.setattr(Interrupt, "_look", lambda _self, ctx: looks.look(ctx))
    return looks


@contextmanager
def handled(handler: Callable[[], object]) -> Iterator[None]:
    before = signal.signal(signal.SIGINT, lambda _number, _frame: handler())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def ends_and_goes_on(s: Session, looks: Looks, ids: list[int], at: int | None) -> bytes:
    """The logits behind ids, of which HELD are fed before the feed that ends at a look."""
    s.drop(0)
    s.feed(ids[:HELD], want_logits=False)
    looks.n, looks.at = 0, at
    if at is not None:
        with pytest.raises(KeyboardInterrupt):
            s.feed(ids[HELD:])
        assert s.length(0) in (HELD, 0) and looks.n == at + 1  # a window's beginning may be given back
        assert s.n_logits == 0
        looks.at = None
    s.feed(ids[s.length(0) :])
    return s.logits().tobytes()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n_threads", [1, 3])
def test_a_feed_ends_in_front_of_each_layer(name: str, n_threads: int, looks: Looks, tmp_path: Path) -> None:
    """Then the sequence is as it was, and the same feed gives the same bits as if nothing had happened."""
    path = models.write_dense(tmp_path / "m.gguf", models.SPECS[name])
    with Model(path) as model, Session(model, n_ctx=256, n_batch=32, n_threads=n_threads) as s:
        expected = ends_and_goes_on(s, looks, tokens(), None)
        n_looks, n_chunks = looks.n, -(-(N - HELD) // 32)
        assert n_looks >= n_chunks * model.info.n_layer
        for at in range(n_looks):
            assert ends_and_goes_on(s, looks, tokens(), at) == expected


def test_between_chunks_of_a_device(looks: Looks, sparse_path: Path) -> None:
    options = hybrid.options("dense", 16)
    with (
        Model(sparse_path) as model,
        Session(model, plan=hybrid.place(model, "some", "dense", 16), device="host", **options) as s,
    ):
        expected = ends_and_goes_on(s, looks, tokens(), None)
        assert looks.n > 2
        for at in range(looks.n):
            assert ends_and_goes_on(s, looks, tokens(), at) == expected


def test_a_handler_that_raises_nothing(looks: Looks, relu_path: Path) -> None:
    """The feed goes on. What a handler wants of the session would wait for the feed, so it is refused."""
    problems: list[ArgumentError] = []
    with Model(relu_path) as model, Session(model, n_ctx=256) as s, Session(model, n_ctx=256) as other:

        def handle() -> None:
            other.feed([1, 2, 3])
            with pytest.raises(ArgumentError, match="signal handler") as caught:
                s.feed([1])
            problems.append(caught.value)
            with pytest.raises(ArgumentError, match="signal handler"):
                s.length(0)

        expected = ends_and_goes_on(s, looks, tokens(), None)
        s.drop(0)
        looks.n, looks.at = 0, 1
        with handled(handle):
            s.feed(tokens()[:HELD], want_logits=False)
        looks.at = None
        s.feed(tokens()[HELD:])
        assert len(problems) == 1 and other.length(0) == 3
        assert s.logits().tobytes() == expected


def test_a_feed_that_nobody_waits_for(relu_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any thread it ends with ClosedError."""
    monkeypatch.setattr(interrupt, "STOP_MS", 0)
    found: list[object] = []
    with Model(relu_path) as model, Session(model, n_ctx=256) as s:
        s.interrupt.is_over = lambda: True

        def feed() -> None:
            with pytest.raises(ClosedError) as caught:
                s.feed(tokens())
            found.extend([str(caught.value), s.length(0)])

        thread = threading.Thread(target=feed)
        thread.start()
        thread.join()
        assert found == ["the model is closed", 0]
        with pytest.raises(ClosedError):
            s.feed(tokens())
        s.interrupt.is_over = lambda: False
        s.feed(tokens())
        assert s.length(0) == N


def test_closing_ends_a_prompt(relu_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a scheduler whose time to end is over: within the prompt's chunk, and not behind it."""
    monkeypatch.setattr(interrupt, "STOP_MS", 0)
    with Model(relu_path) as model, Session(model, n_ctx=256) as s:
        scheduler = Scheduler(Engine(s))
        ends, n_looks = s.interrupt.is_over, 0

        def look() -> bool:
            nonlocal n_looks
            n_looks += 1
            if n_looks == 1:
                scheduler.begin_close()
            return ends()

        s.interrupt.is_over = look
        choice = Choice(sampler=Sampler(Sampling(seed=1), model.info.n_vocab))
        with pytest.raises(ClosedError):
            list(scheduler.submit(np.array(tokens(), np.int32), choice))
        scheduler.close()
        assert n_looks > 0 and s.length(0) == 0


def test_short_feeds_do_not_ask(relu_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupt, "STOP_MS", 600_000)
    monkeypatch.setattr(Interrupt, "_look", lambda _self, _ctx: pytest.fail("it was asked"))
    with Model(relu_path) as model, Session(model, n_ctx=256) as s:
        s.feed(tokens())


def test_a_system_that_refuses_callbacks(relu_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_args: object, **_options: object) -> None:
        raise MemoryError("Cannot allocate write+execute memory for ffi.callback()")

    monkeypatch.setattr(_native.ffi, "callback", refused)
    with Model(relu_path) as model, Session(model, n_ctx=256) as s:
        s.feed(tokens())
        assert s.length(0) == N


def test_counts_after_a_feed_that_ended(looks: Looks, relu_path: Path) -> None:
    """No neuron fired for more tokens than there were."""
    with Model(relu_path) as model, Session(model, n_ctx=256, count_neurons=True) as s:
        looks.at = 1
        with pytest.raises(KeyboardInterrupt):
            s.feed(tokens())
        counts = s.neuron_counts()
        assert counts.n_tokens == N and counts.counts[0].any() and not counts.counts[1].any()


def test_a_llama_goes_on(looks: Looks, llama: OpenLlama) -> None:
    llm = llama()
    looks.at = 1
    with pytest.raises(KeyboardInterrupt):
        next(llm.generate(tokens()))
    assert llm.n_tokens == 0
    looks.at = None
    assert greedy(llm, tokens(), 5) == greedy(llama(), tokens(), 5)
