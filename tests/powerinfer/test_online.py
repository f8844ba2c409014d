"""Statistics gathered while a model answers: hot neurons come to the device, answers stay as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader

from powerinfer import ArgumentError, Llama, OutOfMemoryError
from powerinfer._llama import online
from powerinfer.models.plan import Settings, from_json, given, make_plan
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
        assert llm._placement is not None and llm._placement.n_changes == 1
        assert llm.plan.statistics_kind == "given" and "while it answered" in llm.plan.statistics
        assert answer(still, 1)[1] < 0.2


def test_what_the_context_holds_stays(path: Path) -> None:
    with open_llama(path, online_statistics=True) as llm, open_llama(path) as still:
        llm._placement = online.OnlineStatistics(llm._loader, every=20)  # type: ignore[arg-type]
        for one in (llm, still):
            one.eval(list(range(3, 53)))
        before = llm.session
        assert llm._placement.improve(llm._ctx.engine)
        assert llm.session is not before and llm.n_tokens == 50
        for one in (llm, still):
            one.eval([7, 8])
        assert beyond_rounding([still.scores[-1]], [llm.scores[-1]], llm.session.model.info.n_layer) < 1
        assert not llm._placement.improve(llm._ctx.engine)  # too little was counted since


def test_other_sequences_stay(path: Path) -> None:
    """While one holds something the session is not replaced."""
    with open_llama(path, online_statistics=True, n_seq=2, n_pool=256) as llm:
        llm._placement = online.OnlineStatistics(llm._loader, every=20)  # type: ignore[arg-type]
        llm.eval(list(range(3, 53)))
        llm.session.copy(1, 0)
        before = llm.session
        assert not llm._placement.improve(llm._ctx.engine)
        assert llm.session is before and before.length(1) == 50
        before.drop(1)
        assert llm._placement.improve(llm._ctx.engine) and llm.session is not before and llm.n_tokens == 50


def test_thresholds_stay(path: Path) -> None:
    with open_llama(path, online_statistics=True, threshold=0.25) as llm:
        llm._placement = online.OnlineStatistics(llm._loader, every=20)  # type: ignore[arg-type]
        llm.eval(list(range(3, 53)))
        assert llm._placement.improve(llm._ctx.engine)
        assert llm.session.info.sparse_threshold == 0.25


def test_a_session_that_cannot_be_opened(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The placement before stays."""
    with open_llama(path, online_statistics=True) as llm:
        llm._placement = online.OnlineStatistics(llm._loader, every=20)  # type: ignore[arg-type]
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
        assert not llm._placement.improve(llm._ctx.engine) and llm._placement.n_changes == 0
        assert llm.plan is plan and llm.n_tokens == 50
        llm.eval([3] * 20)
        problem = KeyboardInterrupt()
        with pytest.raises(KeyboardInterrupt):
            llm._placement.improve(llm._ctx.engine)
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


@pytest.mark.parametrize("overshoot", [1.0, 1.2])
@pytest.mark.parametrize("share", [0.3, 0.6])
def test_chances_become_what_was_seen(share: float, overshoot: float) -> None:
    rng = np.random.default_rng(1)
    chances = rng.random((3, 200)) ** 4
    seen = np.array([share, share / 2, 1.0]) * 200
    made = online.corrected(chances, seen, "a file", overshoot)
    assert made.counts is not None and "a file" in made.source and "computed" in made.source
    after = made.counts / made.n_tokens
    np.testing.assert_allclose(np.minimum(1, overshoot * after).sum(axis=1), seen, atol=0.1)
    for before, row in zip(chances, after, strict=True):
        assert (np.diff(row[np.argsort(before)]) >= 0).all()  # ranks stay


def test_the_first_tokens_correct_a_plan(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By statistics few neurons are computed, and a token computes many: what was measured stands in the
    plan, and between two requests one is made that knows it. Greedy answers stay."""
    monkeypatch.setattr(online, "FIRST", 20)
    monkeypatch.setattr(online, "FIRST_GAIN", -1.0)  # whatever it gains: rates of the stand-in say nothing
    n_layer, n_ff = models.SPECS["llama-relu-gqa"].n_layer, models.SPECS["llama-relu-gqa"].n_ff
    rare = given(np.ones((n_layer, n_ff), np.uint64), 100, "a test")
    with open_llama(path) as llm, open_llama(path) as still:
        loader, first = llm._loader, llm.session
        assert loader is not None and still._placement is not None and llm.plan is not None
        loader.statistics, loader.plan = rare, loader.planned(loader.devices, rare)  # type: ignore[arg-type]
        still._placement._is_done = True  # type: ignore[attr-defined]
        expected = sum(y.active_hot + y.active_pcie + y.active_cold for y in llm.plan.layers)
        assert llm.plan.measured is None
        assert answer(llm, 0, 30)[0] == answer(still, 0, 30)[0]
        measured = llm.plan.measured
        assert measured is not None and measured.n_tokens == 20 and measured.tokens_per_s > 0
        assert llm.plan.expected.measured is measured and llm.plan.expected.tokens_per_s > 0
        assert len(measured.computed) == n_layer
        assert sum(measured.computed) > 5 * expected  # all rows are computed on the way to what is zero
        assert llm.session is first
        assert answer(llm, 1)[0] == answer(still, 1)[0]
        assert llm.session is not first and llm._placement is not None and llm._placement.n_changes == 1
        now = sum(y.active_hot + y.active_pcie + y.active_cold for y in llm.plan.layers)
        assert now == pytest.approx(sum(measured.computed), rel=0.01)
        assert "the first 20 tokens" in llm.plan.statistics and "a test" in llm.plan.statistics
        again = llm.plan.measured
        assert again is not None and again is not measured  # of the new plan
        second = llm.session
        answer(llm, 2)
        assert llm.session is second  # once


def test_a_plan_that_holds_stays(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(online, "FIRST", 20)
    monkeypatch.setattr(online, "FIRST_GAIN", -1.0)
    monkeypatch.setattr(online, "FIRST_OFF", 1e9)
    with open_llama(path) as llm:
        first = llm.session
        for seed in range(2):
            answer(llm, seed)
        assert llm.session is first and llm.plan is not None and llm.plan.measured is not None


def test_what_is_expected_is_corrected_where_no_plan_is_better(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(online, "FIRST", 20)
    monkeypatch.setattr(online, "FIRST_GAIN", 1.0)
    spec = models.SPECS["llama-relu-gqa"]
    rare = given(np.ones((spec.n_layer, spec.n_ff), np.uint64), 100, "a test")
    with open_llama(path) as llm:
        loader, first = llm._loader, llm.session
        assert loader is not None
        loader.statistics, loader.plan = rare, loader.planned(loader.devices, rare)  # type: ignore[arg-type]
        answer(llm, 0, 30)
        before = llm.plan
        answer(llm, 1)
        after = llm.plan
        assert before is not None and after is not None and llm.session is first
        assert after.measured is before.measured is not None
        assert after.expected.total_us > before.expected.total_us
        now = sum(y.active_hot + y.active_pcie + y.active_cold for y in after.layers)
        assert now == pytest.approx(sum(after.measured.computed), rel=0.01)
        assert "the first 20 tokens" in after.statistics
        for old, new in zip(before.layers, after.layers, strict=True):
            assert (old.hot == new.hot).all() and (old.pcie == new.pcie).all()
        assert from_json(after.to_json()).to_json() == after.to_json()


def test_what_is_expected_in_predicted_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan reckons with more predicted neurons than fire, and the first tokens tell the predicted ones."""
    monkeypatch.setattr(online, "FIRST", 40)
    monkeypatch.setattr(online, "FIRST_GAIN", 1.0)
    with Llama.demo(devices="host", vram_budget=0.03, n_batch=64, n_ctx=256, verbose=False) as llm:
        loader = llm._loader
        assert loader is not None and loader.statistics is not None and loader.statistics.counts is not None
        known = loader.statistics
        rare = given(loader.statistics.counts // 3, known.n_tokens, "a test")
        loader.statistics, loader.plan = rare, loader.planned(loader.devices, rare)  # type: ignore[arg-type]
        llm("a", max_tokens=50, ignore_eos=True)
        llm("b", max_tokens=1)
        assert llm.plan is not None and llm.plan.measured is not None
        now = [y.active_hot + y.active_pcie + y.active_cold for y in llm.plan.layers]
        assert now == pytest.approx(list(llm.plan.measured.computed), rel=0.01)
