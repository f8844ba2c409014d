"""Devices with experts that fail: each failure ends in an exception, and the next step works."""

from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from powerinfer import DeviceError
from powerinfer._engine.session import Model, Session
from tests.native import test_hybrid_mixtures as mixtures
from tests.native.faults import (
    LIBRARY,
    Faults,
    every_allocation_fails,
    every_copy_fails,
    with_faults,
    with_the_library,
)
from tests.native.hybrid import IDS

test_with_the_test_library = with_the_library(__file__)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path = tmp_path_factory.mktemp("mixture") / "m.gguf"
    with Model(mixtures.write(path, "qwen2moe")) as m:
        yield m


def open_mixture(model: Model, **more: Any) -> Session:
    return mixtures.opened(model, mixtures.place(model, "one", 64, [0, 0, 0, 1, 1]), **more)


@with_faults
def test_every_allocation_of_a_mixture_can_fail(mixture: Model, faults: Faults) -> None:
    every_allocation_fails(faults, lambda: open_mixture(mixture))


@with_faults
def test_every_copy_of_an_upload_can_fail(mixture: Model, faults: Faults) -> None:
    every_copy_fails(faults, lambda: open_mixture(mixture))


@with_faults
@pytest.mark.parametrize("n_tok", [1, 5, 40])
@pytest.mark.parametrize("kind", ["die", "vanish"])
def test_a_mixture_s_device_that_fails_at_any_operation(
    mixture: Model, faults: Faults, kind: str, n_tok: int
) -> None:
    """An exception, and the next step gives what it gives without the failure."""
    with open_mixture(mixture, live_experts=False) as s, open_mixture(mixture, live_experts=False) as other:
        other.feed(IDS[:n_tok])
        for n in (1, 2, 5, 9, 14, 20, 33):
            setattr(faults, kind, n)
            with pytest.raises(DeviceError, match="asked for"):
                s.feed(IDS[:n_tok])
            setattr(faults, kind, 0)
            assert not s.length()
        s.feed(IDS[:n_tok])
        assert np.array_equal(s.logits(), other.logits())


@with_faults
@pytest.mark.parametrize("n_tok", [1, 5, 40])
def test_a_mixture_s_device_that_is_late_changes_no_bits(mixture: Model, faults: Faults, n_tok: int) -> None:
    got = []
    for late_us in (0, 400):
        faults.late_us = late_us
        with open_mixture(mixture, live_experts=False) as s:
            for _ in range(3):
                s.feed(IDS[:n_tok])
            got.append(s.logits().copy())
    assert np.array_equal(*got)


RARE = {  # experts that lie where the file's counts say that nobody uses them
    "powerinfer.expert.counts": np.ones(mixtures.N_LAYER * mixtures.SPEC.n_expert, np.uint32),
    "powerinfer.expert.tokens": 1000,
}


@with_faults
@pytest.mark.parametrize("name", ["qwen2moe", "smallthinker"])
def test_a_short_prompt_brings_the_experts_that_it_wants(tmp_path: Path, name: str) -> None:
    """It gives the bits that all give. A stand-in leaves no numbers where nothing was wanted."""
    left_out = ctypes.c_int32.in_dll(ctypes.CDLL(LIBRARY), "pi_host_left_out")
    with Model(mixtures.write(tmp_path / "m.gguf", name, more=RARE)) as m:
        for ids in (IDS[:9], [5] * 12, [7] * 30):
            rows, n = [], []
            n_routes = 3 * ((mixtures.N_LAYER - 1) * len(ids) + 9)  # the last layer's of nine tokens
            for pinned in (True, False):
                left_out.value = 0
                plan = mixtures.place(m, "one", 64)
                with mixtures.opened(m, plan, pin_weights=pinned, live_experts=False) as s:
                    s.feed(ids)
                    rows.append(s.logits().copy())
                    n.append(left_out.value)
                    assert sum(layer.n_routes for layer in s.experts()) == n_routes
            assert np.array_equal(*rows) and np.isfinite(rows[0]).all()
            assert (n[0] > 0 or len(set(ids)) > 1) and n[1] == 0


@with_faults
def test_a_copy_of_an_expert_that_fails(mixture: Model, faults: Faults) -> None:
    """No answer is made with what did not arrive: the device is not used any more."""
    with open_mixture(mixture) as s:
        faults.fetch = 3
        with pytest.raises(DeviceError, match="asked for: a fetch"):
            for token in IDS * 4:
                s.feed([token])
        n = s.length()
        with pytest.raises(DeviceError, match="asked for: a fetch"):
            s.feed(IDS[:3])
        assert s.length() == n


def churned(s: Session, cpu: Session, ids: list[int]) -> None:
    """Feeds them one by one, and the answers are those of the CPU alone."""
    for token in ids:
        for x in (s, cpu):
            if x.length() == mixtures.N_CTX:
                x.drop()
            x.feed([token])
        a, b = s.logits(), cpu.logits()
        assert np.linalg.norm(a - b) < 1e-5 * np.linalg.norm(b)


@with_faults
@pytest.mark.parametrize("kind", ["die", "vanish"])
def test_a_device_that_fails_while_experts_move(mixture: Model, faults: Faults, kind: str) -> None:
    """A step that fails leaves experts where they were, and copies on their way to arrive."""
    with (
        open_mixture(mixture) as s,
        Session(mixture, n_threads=1, n_ctx=mixtures.N_CTX, **mixtures.F32) as cpu,
    ):
        for n in (2, 9, 20, 33, 40, 52):
            churned(s, cpu, IDS[n : n + 1] * 12)  # what is used changes
            copies = sum(layer.n_copies for layer in s.experts())
            setattr(faults, kind, n)
            with pytest.raises(DeviceError, match="asked for"):
                s.feed([7])
            setattr(faults, kind, 0)
            assert sum(layer.n_copies for layer in s.experts()) == copies
        assert copies > mixtures.N_LAYER
        churned(s, cpu, IDS)


def test_an_interrupt_while_experts_move(mixture: Model) -> None:
    """It is raised between steps; the session goes on, or is closed with copies on their way."""
    with Session(mixture, n_threads=1, n_ctx=mixtures.N_CTX, **mixtures.F32) as cpu:
        for _ in range(2):
            with open_mixture(mixture) as s:
                cpu.drop()
                fed = 0
                timer = threading.Timer(0.02, signal.raise_signal, [signal.SIGINT])
                with pytest.raises(KeyboardInterrupt):
                    timer.start()
                    while True:
                        s.feed([IDS[fed // 10 % 50]])
                        fed += 1
                        if s.length() == mixtures.N_CTX:
                            s.drop()
                timer.join()
                s.drop()
                n_bytes = s.info.n_device_bytes
                churned(s, cpu, IDS)
                assert s.info.n_device_bytes == n_bytes
