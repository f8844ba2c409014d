"""Replicas: several sessions of one model, over which requests are spread, on the stand-in "host"."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from powerinfer import ArgumentError, AsyncLlama, BusyError, DeviceError, UnsupportedError
from powerinfer._engine import machine
from powerinfer._engine.devices import GIB
from powerinfer._engine.replicas import Replicas, shares, threads_of_each
from powerinfer._engine.session import Session

GREEDY: dict[str, Any] = {"max_tokens": 12, "temperature": 0}
# Devices round otherwise where prompts are cut otherwise: parts of a given size, not as times come out.
HOSTS: dict[str, Any] = {"devices": ["host:0", "host:1"], "vram_budget": 0.02, "prompt_part": 128}


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 120))


def open_two(path: Path, **more: Any) -> AsyncLlama:
    options = {"n_ctx": 256, "n_parallel": 2, "n_threads": 2, "verbose": False} | HOSTS | more
    return AsyncLlama(path, replicas=2, **options)


@pytest.fixture
def two(relu_path: Path) -> Iterator[AsyncLlama]:
    llm = open_two(relu_path)
    yield llm
    llm.close()


def of(llm: AsyncLlama) -> Replicas:
    assert isinstance(llm.scheduler, Replicas)
    return llm.scheduler


def generated(llm: AsyncLlama) -> list[int]:
    return [each.stats().n_generated_tokens for each in of(llm).all]


def prompt(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 320, n).tolist()  # type: ignore[no-any-return]


def test_requests_are_spread_and_answers_stay(relu_path: Path, two: AsyncLlama) -> None:
    """Each on the device of its replica, with the bits that one device gives."""
    prompts = [prompt(n, n) for n in (5, 9, 70, 100)]

    async def answers(llm: AsyncLlama) -> list[Any]:
        results = await asyncio.gather(*(llm.create_completion(ids, **GREEDY) for ids in prompts))
        return [result["choices"][0]["text"] for result in results]

    async def main() -> None:
        options: dict[str, Any] = HOSTS | {"devices": "host"}
        async with AsyncLlama(
            relu_path, n_ctx=256, n_parallel=2, n_threads=1, verbose=False, **options
        ) as one:
            want = await answers(one)
        assert await answers(two) == want
        assert generated(two) == [24, 24]
        while sum((stats := two.stats()).n_ended.values()) < 4:  # who reads an answer may be sooner
            await asyncio.sleep(0.01)
        assert (stats.n_replicas, stats.n_generated_tokens, stats.max_running) == (2, 48, 4)
        assert stats.n_ended == {"length": 4} and sum(stats.queue.counts) == 4
        assert two.n_parallel == 4 and [plan is not None for plan in two.plans] == [True, True]

    run(main())
    devices = [each.engine.session for each in of(two).all]
    assert devices[0] is not devices[1] and devices[0].model is devices[1].model
    assert {session.info.n_threads for session in devices} == {1}


def test_a_conversation_finds_what_it_left(two: AsyncLlama) -> None:
    begin = prompt(130, 1)

    async def main() -> None:
        await two.create_completion(begin, **GREEDY)
        first = generated(two)
        for turn in range(3):
            for seed in range(2):  # these go to both in turn, so that the next would go to the other one
                await two.create_completion(prompt(5, seed), **GREEDY)
            again = await two.create_completion(begin + prompt(20 + turn, 2), **GREEDY)
            assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 128
        assert generated(two)[first.index(max(first))] >= 4 * 12

    run(main())


def test_one_with_much_to_do_is_spared(two: AsyncLlama, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if it has the beginning of the prompt."""
    monkeypatch.setattr("powerinfer._engine.replicas._MOST_AHEAD", 1)
    monkeypatch.setattr(Replicas, "_loads", lambda self: list(self._n_sent))  # as if none ended meanwhile
    begin = prompt(130, 1)

    async def main() -> None:
        await two.create_completion(begin, **GREEDY)
        results = await asyncio.gather(*(two.create_completion([*begin, i], **GREEDY) for i in range(5, 11)))
        assert len(results) == 6

    run(main())
    assert min(generated(two)) >= 2 * 12


def test_texts_are_spread_too(two: AsyncLlama) -> None:
    async def main() -> None:
        vectors = await asyncio.gather(*(two.embed(prompt(9, 1)) for _ in range(4)))
        assert vectors[0] == vectors[1] == vectors[2] == vectors[3]
        assert all(each.stats().n_computed_tokens for each in of(two).all)

    run(main())


def test_a_replica_that_failed_is_spared(two: AsyncLlama, monkeypatch: pytest.MonkeyPatch) -> None:
    feed, broken = Session.feed, of(two).all[0].engine.session

    def fails(self: Session, *args: Any, **options: Any) -> list[int]:
        if self is broken:
            raise DeviceError("the device is gone")
        return feed(self, *args, **options)

    monkeypatch.setattr(Session, "feed", fails)

    async def main() -> None:
        results = await asyncio.gather(
            *(two.create_completion(prompt(5, i), **GREEDY) for i in range(2)), return_exceptions=True
        )
        assert sum(isinstance(result, DeviceError) for result in results) == 1
        assert isinstance(of(two).last_error, DeviceError)
        for i in range(3):
            await two.create_completion(prompt(5, i), **GREEDY)

    run(main())


def test_who_finds_no_place(relu_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each replica computes one and lets one wait."""
    feed, go = Session.feed, threading.Event()

    def later(self: Session, *args: Any, **options: Any) -> list[int]:
        go.wait(60)
        return feed(self, *args, **options)

    monkeypatch.setattr(Session, "feed", later)

    async def main() -> None:
        async with open_two(relu_path, n_parallel=1, max_waiting=1) as llm:
            many = [asyncio.ensure_future(llm.create_completion(prompt(5, i), **GREEDY)) for i in range(6)]
            while sum(task.done() for task in many) < 2:
                await asyncio.sleep(0.01)
            go.set()
            results = await asyncio.gather(*many, return_exceptions=True)
            assert sum(isinstance(result, BusyError) for result in results) == 2
            assert min(generated(llm)) > 12

    run(main())


def test_what_the_server_tells(two: AsyncLlama) -> None:
    pytest.importorskip("fastapi", reason="the extra powerinfer[server] is not installed")
    from powerinfer.server.live import engine_view
    from powerinfer.server.metrics import Metrics
    from powerinfer.server.models import Models, of_one
    from powerinfer.server.schemas import EngineView

    run(two.create_completion(prompt(5), **GREEDY))
    view = engine_view(two, two.llama.info(), "m")
    EngineView.model_validate(view)
    assert view["replicas"] == 2
    assert view["vram"]["budget_bytes"] == 2 * int(0.02 * GIB)
    lines = Metrics().text(Models([of_one(two, ("m",))])).splitlines()
    assert "powerinfer_replicas 2" in lines and "powerinfer_generated_tokens_total 12" in lines


def test_without_devices_threads_are_shared(relu_path: Path) -> None:
    async def main() -> None:
        async with open_two(relu_path, devices=None, vram_budget=0, n_threads=3) as llm:
            await asyncio.gather(*(llm.create_completion(prompt(5, i), **GREEDY) for i in range(2)))
            assert generated(llm) == [12, 12] and llm.plans == [None, None]
            assert {each.engine.session.info.n_threads for each in of(llm).all} == {1}

    run(main())


def test_how_devices_are_dealt_out() -> None:
    names = [f"host:{i}" for i in range(4)]
    one, other = shares(2, [1, 2, 3, 4], names)
    assert one is not None and other is not None
    assert (one.names, one.budgets) == (names[:2], (GIB, 2 * GIB))
    assert (other.names, other.budgets) == (names[2:], (3 * GIB, 4 * GIB))
    assert [share and share.budgets for share in shares(4, 1, names)] == [(GIB,)] * 4
    assert shares(3, 0, None) == [None] * 3
    for n in (3, 5):
        with pytest.raises(ArgumentError, match=f"4 devices cannot be dealt out to {n} replicas"):
            shares(n, 1, names)


@pytest.mark.parametrize(
    "options",
    [{"plan": "plan.json"}, {"draft_model": "mtp"}, {"online_statistics": True}, {"n_gpu_layers": 3}],
    ids=lambda options: next(iter(options)),
)
def test_what_replicas_do_not_have(relu_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match=next(iter(options))):
        AsyncLlama(relu_path, replicas=2, verbose=False, **options)


def test_how_many_there_may_be(relu_path: Path) -> None:
    for n in (0, -1, True, 1.5):
        with pytest.raises(ArgumentError, match="replicas"):
            AsyncLlama(relu_path, replicas=n, vram_budget=0, verbose=False)  # type: ignore[arg-type]


def test_one_that_cannot_be_opened_frees_the_others(relu_path: Path) -> None:
    with pytest.raises(ArgumentError):
        open_two(relu_path, vram_budget=[0.02, 0.000001])


@pytest.mark.parametrize(
    ("cores", "n", "asked", "on_device", "each"),
    [
        (16, 2, None, True, 7),
        (16, 2, None, False, 8),
        (16, 4, None, True, 3),
        (8, 4, None, True, 2),
        (2, 4, None, True, 1),
        (16, 2, 16, True, 8),
        (16, 3, 2, True, 1),
    ],
)
def test_each_leaves_a_core_to_its_driver(
    monkeypatch: pytest.MonkeyPatch, cores: int, n: int, asked: int | None, on_device: bool, each: int
) -> None:
    """Of all cores, when nobody says how many threads; on the CPU there is no driver."""
    monkeypatch.setattr(machine, "cores", lambda: cores)
    share = shares(n, 1.0, [f"host:{i}" for i in range(n)])[0] if on_device else None
    assert threads_of_each(n, asked, share) == each
