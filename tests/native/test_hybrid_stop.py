"""A prompt that devices compute is ended before its time: between the CPU's layers, and while a device is at
work. Nothing of it is left, and the next one has the answers that it has anyway."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from powerinfer._engine import _native
from powerinfer._engine.session import Model, Session
from tests import models
from tests.native.faults import Faults, with_faults, with_the_library
from tests.native.hybrid import DEEP, IDS, options, place

N = 40
"""Tokens, which are one chunk."""


class Feed:
    """Of sequence 0, whose stop function says so when it is asked for the n-th time."""

    def __init__(self, s: Session, n: int, n_tokens: int = N) -> None:
        self.n_asked = 0
        ffi = _native.ffi

        def stop(_ctx: Any) -> int:
            self.n_asked += 1
            return self.n_asked >= n

        ids, callback = ffi.new("int32_t[]", IDS[:N]), ffi.callback("int32_t(void *)", stop)
        batch = ffi.new("pi_batch *", {"n_tokens": n_tokens, "token": ids, "stop": callback, "stop_ms": 0})
        self.status = _native.lib.pi_session_feed(s.handle, batch)


def opened(model: Model, split: str, **more: Any) -> Session:
    plan = place(model, split, "dense", n_devices=more.pop("n_devices", 1), **more)
    return Session(model, plan=plan, device="host", **options("dense"))


def check(s: Session, n: int) -> int:
    """Returns how often it was asked."""
    feed = Feed(s, n)
    assert s.length() == (N if feed.status == _native.lib.PI_OK else 0)
    if feed.status != _native.lib.PI_OK:
        assert feed.status == _native.lib.PI_ERROR_STOPPED and feed.n_asked == n
    return feed.n_asked


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return Model(models.write_dense(tmp_path / "m.gguf", DEEP))


@pytest.mark.parametrize(
    "more",
    [
        {"split": "mixed"},
        {"split": "cpu"},
        {"split": "some", "devices": [-1, 0, 0, -1, -1, 1], "n_devices": 2, "head": -1},
        {"split": "some", "devices": [0, 1, -1, -1, 1, 1], "n_devices": 2, "head": 1},
    ],
)
def test_between_layers_of_the_cpu(model: Model, more: dict[str, Any]) -> None:
    with model, opened(model, **more) as s:
        s.feed(IDS[:N])
        want = s.logits().copy()
        s.drop(0)
        most = check(s, 1000)
        assert most > 2 and s.length() == N
        for n in range(1, most + 1):
            s.drop(0)
            # Also where it was asked in front of the last layer. A wait that is long asks, too.
            is_ended = check(s, n) == n
            assert s.length() == (0 if is_ended else N) and (is_ended or n > 2)
            s.drop(0)
            s.feed(IDS[:N])
            assert np.array_equal(s.logits(), want)


@with_faults
@pytest.mark.parametrize(
    "more",
    [{"split": "all"}, {"split": "some"}, {"split": "some", "devices": [0, 0, 0, 0, 0, -1], "head": -1}],
)
def test_while_a_device_is_at_work(model: Model, more: dict[str, Any], faults: Faults) -> None:
    """Which would take a while."""
    with model, opened(model, **more) as s:
        s.feed(IDS[:N])
        want = s.logits().copy()
        s.drop(0)
        faults.late_us = 600000  # of which one is longer than many looks
        try:
            check(s, 2)  # the first time is in front of the chunk
        finally:
            faults.late_us = 0
        assert s.length() == 0
        s.feed(IDS[:N])
        assert np.array_equal(s.logits(), want)


@with_faults
def test_while_the_cpu_waits_for_a_device(model: Model, faults: Faults) -> None:
    """With few tokens, in front of its only layer, for which it is asked once."""
    with model, opened(model, split="some", devices=[0, 0, 0, 0, 0, -1], head=-1) as s:
        faults.late_us = 600000
        try:
            feed = Feed(s, 5, 4)
        finally:
            faults.late_us = 0
        assert feed.status == _native.lib.PI_ERROR_STOPPED and s.length() == 0


test_with_the_test_library = with_the_library(__file__)
