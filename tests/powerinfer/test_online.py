"""Statistics gathered while a model answers: hot neurons come to the device, answers stay as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader

from powerinfer import ArgumentError, Llama, OutOfMemoryError
from powerinfer._engine import online
from powerinfer.models.plan import Settings, make_plan
from powerinfer.models.plan.rates import HOST_RATES
from tests import models
from tests.native.hybrid import beyond_rounding


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of which a third of the neurons, the last ones, can fire: the gates of the others are zeros."""
    path = tmp_path_factory.mktemp("online") / "m.gguf"
    models.write_dense(path, models.SPECS["llama-relu-gqa"])
    reader = GGUFReader(path, "r+")
    for tensor in reader.tensors:
        if "ffn_gate" in tensor.name:
            tensor.data[: 2 * len(tensor.data) // 3] = 0
    del reader
    return path


def some_gib(path: Path, share: float, **more: Any) -> float:
    """A budget that holds about a part of the neurons."""
    settings = Settings(overhead_bytes=0, group=1, n_batch=16, n_ctx=128, count_neurons=True, **more)
    plan = make_plan(path, vram_budget=0, rates=HOST_RATES, settings=settings)
    return (plan.min_bytes + share * (plan.full_bytes - plan.min_bytes)) / 2**30


def open_llama(path: Path, **options: Any) -> Llama:
    return Llama(
        path,
        vram_budget=some_gib(path, 0.85),
        devices="host",
        n_ctx=128,
        n_batch=16,
        verbose=False,
        **options,
    )


def answer(llm: Llama, seed: int, n: int = 50) -> tuple[list[int], float]:
    """Tokens, and the share of active neurons that were on the device."""
    prompt = [int(t) for t in np.random.default_rng(seed).integers(3, 290, 70)]
    ids, active, on_device = [], 0, 0
    for token in llm.generate(prompt, temp=0):
        ids.append(token)
        active += sum(step.n_active for step in llm.last_step)
        on_device += sum(step.n_active_device for step in llm.last_step)
        if len(ids) == n:
            break
    assert 0 <= on_device <= active
    return ids, on_device / active


def test_the_hit_rate_rises(path: Path) -> None:
    with open_llama(path, online_statistics=True) as llm, open_llama(path) as still:
        assert llm.plan is not None and llm.plan.statistics_kind == "heuristic"
        rates = []
        for seed in range(6):
            ids, rate = answer(llm, seed)
            rates.append(rate)
            assert ids == answer(still, seed)[0]  # greedy answers do not change
        assert rates[0] < 0.2 and rates[-1] > 0.6, rates
        assert llm._online is not None and llm._online.n_changes == 1
        assert llm.plan.statistics_kind == "given" and "while it answered" in llm.plan.statistics_source
        assert answer(still, 1)[1] < 0.2


def test_what_the_context_holds_stays(path: Path) -> None:
    with open_llama(path, online_statistics=True) as llm, open_llama(path) as still:
        llm._online = online.OnlineStatistics(llm._loader, every=20)  # type: ignore[arg-type]
        for one in (llm, still):
            one.eval(list(range(3, 53)))
        before = llm.session
        assert llm._online.improve(llm._ctx.engine)
        assert llm.session is not before and llm.n_tokens == 50
        for one in (llm, still):
            one.eval([7, 8])
        assert beyond_rounding([still.scores[-1]], [llm.scores[-1]], llm.session.model.info.n_layer) < 1
        assert not llm._online.improve(llm._ctx.engine)  # too little was counted since


def test_other_sequences_stay(path: Path) -> None:
    """While one holds something the session is not replaced."""
    with open_llama(path, online_statistics=True, n_seq=2, n_pool=256) as llm:
        llm._online = online.OnlineStatistics(llm._loader, every=20)  # type: ignore[arg-type]
        llm.eval(list(range(3, 53)))
        llm.session.copy(1, 0)
        before = llm.session
        assert not llm._online.improve(llm._ctx.engine) and llm.session is before and before.length(1) == 50
        before.drop(1)
        assert llm._online.improve(llm._ctx.engine) and llm.session is not before and llm.n_tokens == 50


def test_thresholds_stay(path: Path) -> None:
    with open_llama(path, online_statistics=True, threshold=0.25) as llm:
        llm._online = online.OnlineStatistics(llm._loader, every=20)  # type: ignore[arg-type]
        llm.eval(list(range(3, 53)))
        assert llm._online.improve(llm._ctx.engine)
        assert llm.session.info.sparse_threshold == 0.25


def test_a_session_that_cannot_be_opened(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The placement before stays."""
    with open_llama(path, online_statistics=True) as llm:
        llm._online = online.OnlineStatistics(llm._loader, every=20)  # type: ignore[arg-type]
        llm.eval(list(range(3, 53)))
        plan, loader = llm.plan, llm._loader
        assert loader is not None
        real = loader.session

        problem: BaseException = OutOfMemoryError("no")

        def session(*args: Any, **more: Any) -> Any:
            if loader.plan is not plan:
                assert more["strict"]  # not on the CPU, where a session of the plan before is possible
                raise problem
            return real(*args, **more)

        monkeypatch.setattr(loader, "session", session)
        assert not llm._online.improve(llm._ctx.engine) and llm._online.n_changes == 0
        assert llm.plan is plan and llm.n_tokens == 50
        llm.eval([3] * 20)
        problem = KeyboardInterrupt()
        with pytest.raises(KeyboardInterrupt):
            llm._online.improve(llm._ctx.engine)
        assert llm.plan is plan and llm.n_tokens == 70
        llm.eval([3])


def test_off_by_default(path: Path) -> None:
    with open_llama(path) as llm:
        answer(llm, 0, 3)
        with pytest.raises(ArgumentError, match="count_neurons"):
            llm.session.counted_tokens()
    with Llama(path, n_ctx=128, verbose=False, online_statistics=True) as llm:  # the CPU has nothing to place
        answer(llm, 0, 3)
        assert llm.plan is None


def test_old_counts_fade(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(online, "MOST_TOKENS", 60)
    with open_llama(path, online_statistics=True) as llm:
        own = online.OnlineStatistics(llm._loader, every=1)  # type: ignore[arg-type]
        for _ in range(3):
            llm.reset()
            llm.eval(list(range(3, 53)))
            own.improve(llm._ctx.engine)
        assert own.n_tokens <= 60 and own.counts.max() <= own.n_tokens
        found = own.statistics()
        assert found.counts is not None and found.counts.max() <= found.n_tokens
