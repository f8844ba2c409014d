"""What a scheduler can do beside generating together: shifts, guesses, embeddings, neurons that move."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from powerinfer import (
    AsyncLlama,
    BusyError,
    ContextError,
    Llama,
    LogitsProcessorList,
)
from powerinfer._engine.arrays import Ids
from powerinfer._engine.embedding import embedding_request, hidden_states
from powerinfer._engine.engine import Engine
from powerinfer._engine.request import Request, Stream
from powerinfer._engine.scheduler import Scheduler
from powerinfer._engine.session import Model, Session
from powerinfer.compat.llama_speculative import LlamaPromptLookupDecoding
from tests import models
from tests.powerinfer.test_online import open_llama, some_gib
from tests.powerinfer.test_online import path as online_path
from tests.server.scheduling import blocked, choice, prompt

__all__ = ["online_path"]
MakeScheduler = Callable[..., Scheduler]
F32: dict[str, Any] = {"n_threads": 1, "verbose": False, "type_k": "f32", "type_v": "f32"}


def alone(path: Path, ids: Ids, n: int, **options: Any) -> list[int]:
    with Llama(path, **F32, **options) as llm:
        return list(islice(llm.generate(ids.tolist(), temp=0.0), n))


def test_times_of_tokens(make: MakeScheduler) -> None:
    scheduler = make(max_running=2)
    with scheduler.engine.changed:  # none begins before all are there
        streams = [scheduler.submit(prompt(5, i), choice(), limit=4 + i) for i in range(3)]
    assert [len(list(stream)) for stream in streams] == [4, 5, 6]
    stats = scheduler.stats()
    times = (stats.queue, stats.first_token, stats.between_tokens)
    assert [sum(own.counts) for own in times] == [3, 3, 3 + 4 + 5]
    # The third waited for the first.
    assert stats.queue.sum_s > stats.between_tokens.mean_s
    assert stats.first_token.sum_s >= stats.queue.sum_s


def test_texts_of_one_call_do_not_fill_the_queue(make: MakeScheduler) -> None:
    scheduler = make(max_running=4, max_waiting=20)
    streams, go = blocked(scheduler, 4)
    seen: list[int] = []

    def embed() -> None:
        texts = [prompt(3, i) for i in range(12)]
        seen.append(len(scheduler.embed_all(texts, begun=lambda _: seen.append(0))))

    threads = [threading.Thread(target=embed) for _ in range(5)]
    for thread in threads:
        thread.start()
    while len(seen) < 5:
        time.sleep(0.001)
    time.sleep(0.05)
    assert scheduler.stats().waiting <= 4 + 4  # one enters as many as there are places, each other one
    other = scheduler.submit(prompt(4), choice(), limit=2)
    go.set()
    assert len(list(other)) == 2 and all(len(list(stream)) == 29 for stream in streams)
    for thread in threads:
        thread.join(30)
    assert seen.count(12) == 5


# -- context shift


def test_a_full_context_is_shifted_as_llama_shifts_it(make: MakeScheduler, relu_path: Path) -> None:
    scheduler = make(n_ctx=64, n_keep=4)
    stream = scheduler.submit(prompt(40), choice(), limit=150)
    assert list(stream) == alone(relu_path, prompt(40), 150, n_ctx=64, context_shift=True, n_keep=4)
    assert (stream.reason, stream.n_prompt) == ("length", 40)
    unlimited = scheduler.submit(prompt(64, 1), choice())
    assert len(list(unlimited)) == 64


def test_hooks_see_what_a_shift_has_forgotten(make: MakeScheduler) -> None:
    seen: list[list[int]] = []
    hooks = LogitsProcessorList([lambda ids, _: seen.append(ids.tolist())])
    got = list(make(n_ctx=64, n_keep=0).submit(prompt(60), choice(processors=hooks), limit=100))
    assert seen == [[*prompt(60).tolist(), *got[:i]] for i in range(100)]


def test_what_was_shifted_is_not_shared(make: MakeScheduler) -> None:
    scheduler = make(n_ctx=64, n_keep=20, n_seq=2)
    list(scheduler.submit(prompt(50), choice(), limit=60))
    held = next(s for s in scheduler.engine.cache.all if s.n)
    assert held.n > 30
    stream = scheduler.submit(held.ids[: held.n].copy(), choice(), limit=2)
    list(stream)
    assert stream.n_reused == 19
    again = scheduler.submit(prompt(50), choice(), limit=2)
    list(again)
    assert again.n_reused == 20


def test_shifts_where_memory_is_short(make: MakeScheduler, relu_path: Path) -> None:
    """Beginnings are shared, which a shift must copy, and some give way in the middle of it."""
    scheduler = make(n_ctx=128, n_pool=5 * 64, n_seq=8, max_running=4, n_keep=2)
    common = prompt(30)
    prompts = [np.concatenate([common, prompt(5, i)]) for i in range(6)]
    with scheduler.engine.changed:  # none begins before all are there
        streams = [scheduler.submit(ids, choice(), limit=300) for ids in prompts]
    assert [len(list(stream)) for stream in streams] == [300] * 6
    stats = scheduler.stats()
    assert stats.n_preempted and stats.n_ended == {"length": 6}
    calm = make(n_ctx=128, n_keep=2)
    first = list(calm.submit(prompts[0], choice(), limit=300))
    options: dict[str, Any] = {"n_ctx": 128, "context_shift": True, "n_keep": 2}
    assert first == alone(relu_path, prompts[0], 300, **options)


def test_models_that_cannot_shift_compute_anew(make: MakeScheduler, tmp_path: Path) -> None:
    """What they say is what they say about the text that stayed."""
    path = models.write_dense(tmp_path / "opt.gguf", models.SPECS["opt"])
    ids, want = prompt(50) % 290, list[int]()
    for n, n_drop in ((15, 22), (22, 22), (22, 22), (22, 0)):  # 64 tokens and one more; 20 stay, then half
        more = alone(path, ids, n, n_ctx=128)
        want += more
        ids = np.concatenate([ids, np.array(more, np.int32)])
        ids = np.delete(ids, np.s_[20 : 20 + n_drop])
    scheduler = make(path, n_ctx=64, n_keep=20)
    first = prompt(50) % 290
    assert list(scheduler.submit(first, choice(n_vocab=301), limit=len(want))) == want
    with Llama(path, **F32, n_ctx=64, context_shift=True, n_keep=20) as llm:
        assert list(islice(llm.generate(first.tolist(), temp=0.0), len(want))) == want
    assert len(list(scheduler.submit(first, choice(n_vocab=301), limit=10))) == 10


def test_a_visited_text_is_not_shared(make: MakeScheduler) -> None:
    """Its tokens are computed otherwise than a prompt's, so a prompt beside it begins anew."""
    scheduler = make(n_ctx=128)
    ids, streams = prompt(80), []

    def seen(i: int, _: npt.NDArray[np.float32]) -> None:
        if i == 20:
            streams.append(scheduler.submit(ids, choice(), limit=2))

    scheduler.score(ids, seen)
    (stream,) = streams
    assert len(list(stream)) == 2 and stream.n_reused == 0


# -- guesses


class Oracle:
    """Guesses what will really come, up to a mistake after every so many."""

    def __init__(self, answers: list[tuple[Ids, list[int]]], right: int) -> None:
        self.answers, self.right, self.n_asked = answers, right, 0

    def __call__(self, ids: Ids) -> list[int]:
        self.n_asked += 1
        for begin, answer in self.answers:
            n = ids.size - begin.size
            if (
                n >= 0
                and np.array_equal(ids[: begin.size], begin)
                and ids[begin.size :].tolist() == answer[:n]
            ):
                return [*answer[n : n + self.right], 7, 7, 10**6]
        return [5, -3]


@pytest.mark.parametrize("right", [0, 1, 3])
def test_guesses_change_no_answer(make: MakeScheduler, relu_path: Path, right: int) -> None:
    prompts = [prompt(9, i) for i in range(3)]
    answers = [alone(relu_path, ids, 40) for ids in prompts]
    oracle = Oracle(list(zip(prompts, answers, strict=True)), right)
    scheduler = make(draft=oracle, n_guesses=15)
    with scheduler.engine.changed:  # none begins before all are there
        streams = [scheduler.submit(ids, choice(), limit=40) for ids in prompts]
    for stream, answer in zip(streams, answers, strict=True):
        assert list(stream) == answer
        assert stream.n_given == 40
    stats = scheduler.stats()
    assert oracle.n_asked and stats.n_generated_tokens == 120
    if right:
        assert stats.n_steps < 40 * 3 / (1 + right) + 20
    # What is held afterwards is what was chosen: a conversation goes on from it.
    longer = np.concatenate([prompts[0], np.array(answers[0][:30], np.int32)])
    stream = scheduler.submit(longer, choice(), limit=10)
    assert list(stream) == answers[0][30:]
    assert stream.n_reused == longer.size - 1


def test_guesses_beyond_the_end(make: MakeScheduler, relu_path: Path) -> None:
    want = alone(relu_path, prompt(9), 40)
    scheduler = make(draft=Oracle([(prompt(9), want)], 6), n_guesses=8, n_ctx=32)
    end = want.index(want[4])
    stopped = scheduler.submit(prompt(9), choice(ends={want[4]}), limit=40)
    assert list(stopped) == want[: end + 1] and stopped.reason == "stop"
    assert list(scheduler.submit(prompt(9), choice(), limit=5)) == want[:5]
    full = scheduler.submit(prompt(9), choice())
    assert list(full) == want[: 32 - 9 + 1] and full.reason == "length"


def test_where_many_generate_nobody_guesses(make: MakeScheduler) -> None:
    oracle = Oracle([], 0)
    scheduler = make(draft=oracle, n_guesses=0)
    list(scheduler.submit(prompt(9), choice(), limit=5))
    assert not oracle.n_asked


def test_a_draft_that_fails_ends_its_own(make: MakeScheduler) -> None:
    def draft(ids: Ids) -> Ids:
        if ids.size == 15:
            raise ZeroDivisionError("of the draft")
        return ids[:0]

    scheduler = make(draft=draft, n_guesses=15)
    good, bad = (scheduler.submit(prompt(n), choice(), limit=10) for n in (40, 9))
    with pytest.raises(ZeroDivisionError):
        list(bad)
    assert len(list(good)) == 10


def test_shifts_and_guesses_of_async_llama() -> None:
    options: dict[str, Any] = {"max_tokens": 150, "temperature": 0, "logit_bias": {}}

    async def main() -> None:
        async with AsyncLlama.demo(
            n_ctx=64,
            n_parallel=3,
            n_threads=1,
            verbose=False,
            context_shift=True,
            draft_model=LlamaPromptLookupDecoding(num_pred_tokens=3),
        ) as llm:
            options["logit_bias"] = dict.fromkeys(llm.llama.tokenizer.eog, -100.0)
            work = [llm.create_completion("Once upon a time", **options) for _ in range(3)]
            for result in await asyncio.gather(*work):
                assert result["usage"]["completion_tokens"] == 150
                assert result["choices"][0]["finish_reason"] == "length"

    asyncio.run(asyncio.wait_for(main(), 120))


# -- embeddings


def test_embeddings(make: MakeScheduler) -> None:
    scheduler = make()
    ids = prompt(100)
    with Session(
        scheduler.engine.session.model, n_ctx=256, n_threads=1, type_k="f32", type_v="f32"
    ) as session:
        rows = hidden_states(Engine(session), [ids])[0]
    assert np.array_equal(scheduler.embed(ids, pooling="none"), rows)
    assert np.array_equal(scheduler.embed(ids), rows.mean(axis=0, dtype=np.float64).astype(np.float32))
    assert np.array_equal(scheduler.embed(ids, pooling="cls"), rows[0])
    assert np.array_equal(scheduler.embed(ids, pooling="last"), rows[-1])


def test_what_was_visited_is_not_shared(make: MakeScheduler) -> None:
    scheduler = make()  # all of its tokens were computed as tokens that want logits are
    scheduler.embed(prompt(50))
    stream = scheduler.submit(prompt(50), choice(), limit=1)
    list(stream)
    assert stream.n_reused == 0


def test_embeddings_beside_a_generation(make: MakeScheduler) -> None:
    scheduler = make()
    talking = scheduler.submit(prompt(5), choice(), limit=100)
    assert scheduler.embed(prompt(90)).shape == (64,)
    assert len(list(talking)) == 100


def test_visits(make: MakeScheduler) -> None:
    scheduler = make()
    ids = prompt(70)
    seen: list[int] = []
    chosen: list[int] = []

    def note(i: int, logits: npt.NDArray[np.float32]) -> None:
        seen.append(i)
        chosen.append(int(logits.argmax()))

    scheduler.score(ids, note)
    assert seen == list(range(70))
    assert [chosen[-1]] == list(scheduler.submit(ids, choice(), limit=1))

    def fail(i: int, _: object) -> None:
        if i == 40:
            raise ZeroDivisionError("of the visitor")

    with pytest.raises(ZeroDivisionError):
        scheduler.score(ids, fail)
    assert scheduler.stats().running == 0


# -- several texts in one request


def test_texts_of_one_request_are_computed_together(make: MakeScheduler) -> None:
    scheduler = make(max_running=4, max_waiting=0)
    texts = [prompt(n, n) for n in (3, 50, 1, 20, 7, 64, 12, 5, 90, 2)]
    single = [scheduler.embed(ids, pooling="none") for ids in texts]
    before = scheduler.stats().n_steps
    for kind in ("none", "mean", "cls", "last"):
        found = scheduler.embed_all(texts, pooling=kind)
        for rows, vector in zip(single, found, strict=True):
            mean = rows.mean(axis=0, dtype=np.float64).astype(np.float32)
            want = {"none": rows, "mean": mean, "cls": rows[0], "last": rows[-1]}[kind]
            assert np.array_equal(vector, want)
        if kind == "none":
            assert scheduler.stats().n_steps - before < before
    assert scheduler.stats().running == 0
    assert scheduler.embed_all([]) == []
    with pytest.raises(ContextError):
        scheduler.embed_all([prompt(5), prompt(300)])


def test_the_last_token_of_a_text_beside_long_ones(make: MakeScheduler) -> None:
    """It is computed even where the step has no room for visits left; those after it wait."""
    scheduler = make(max_running=8)
    texts = [*(prompt(200, i) for i in range(3)), *(prompt(1, i) for i in range(4)), prompt(90)]
    single = [scheduler.embed(ids, pooling="none") for ids in texts]
    for want, got in zip(single, scheduler.embed_all(texts, pooling="none"), strict=True):
        assert np.array_equal(got, want)


def generation(engine: Engine, ids: Ids, limit: int) -> Request:
    room = np.zeros(ids.size + limit, np.int32)
    room[: ids.size] = ids
    stream = Stream(ids.size, engine.cancel)
    return Request(
        stream=stream, ids=room, n=ids.size, n_prompt=ids.size, left_to_give=limit, choice=choice()
    )


def test_texts_that_give_way(relu_path: Path) -> None:
    """What was seen before is not seen twice."""
    texts = [prompt(120, i) for i in range(2)]
    with Session(Model(relu_path), n_ctx=256, n_seq=4, n_pool=1024, n_threads=1) as session:
        engine = Engine(session)
        want = hidden_states(engine, texts)
        rows: list[list[Any]] = [[], []]
        for ids, own in zip(texts, rows, strict=True):
            engine.add(embedding_request(engine, ids, 0, own))
        for _ in range(2):
            engine.step()
        assert 0 < len(rows[1]) < 120
        engine._preempt()
        while engine.is_busy:
            engine.step()
        assert engine.totals["preempted"] == 1
        for got, wanted in zip(rows, want, strict=True):
            assert np.array_equal(np.stack(got), wanted)


def test_cancelled_while_others_are_admitted(relu_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A generation gave way with its context full; its client leaves while a step deals out places."""
    with Session(Model(relu_path), n_ctx=64, n_seq=4, n_pool=256, n_threads=1) as session:
        engine = Engine(session)
        first, full = (generation(engine, prompt(n, n), 1) for n in (9, 64))
        engine.add(first)
        engine.add(full)
        full.ids = np.append(full.ids, np.int32(5))
        full.n = 65
        take = engine.cache.take

        def take_and_cancel(*args: Any) -> Any:
            engine.cancel(full.stream)
            return take(*args)

        monkeypatch.setattr(engine.cache, "take", take_and_cancel)
        while engine.is_busy:
            engine.step()
        assert (first.stream.reason, full.stream.reason) == ("length", "cancelled")
        assert engine.ended == {"length": 1, "cancelled": 1}


def test_cancelling_ends_all_of_a_request(make: MakeScheduler) -> None:
    scheduler = make(max_running=2, max_waiting=0)
    streams: list[Any] = []

    def begun(stream: Any) -> None:
        streams.append(stream)
        if len(streams) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        scheduler.embed_all([prompt(250, i) for i in range(5)], begun=begun)
    for stream in streams:
        list(stream)
    assert streams[-1].reason == "cancelled"
    talking, go = blocked(scheduler, 2)
    with pytest.raises(BusyError):
        scheduler.embed_all([prompt(5)])
    go.set()
    assert [len(list(stream)) for stream in talking] == [29, 29]


# -- neurons that move


@pytest.mark.parametrize("busy", [False, True])
def test_neurons_move_between_requests(
    online_path: Path, monkeypatch: pytest.MonkeyPatch, busy: bool
) -> None:
    """And, where it is never quiet, while requests are under way: they are computed again."""
    monkeypatch.setattr("powerinfer.async_llama._PATIENCE", 1 if busy else 10**6)
    monkeypatch.setattr("powerinfer._engine.scheduler._LOOK_S", 0.0)
    with open_llama(online_path) as llm:
        want = list(islice(llm.generate((prompt(40) % 290).tolist(), temp=0), 25))
    llm = AsyncLlama(
        online_path,
        n_parallel=2,
        n_ctx=128,
        n_batch=16,
        n_threads=1,
        vram_budget=some_gib(online_path, 0.85, n_seq=2 + 16, n_pool=256),
        devices="host",
        online_statistics=True,
        verbose=False,
    )
    try:
        online, first = llm.llama._placement, llm.llama.session
        assert online is not None and llm.llama.plan is not None
        online.every = 50
        for i in range(4):
            ids = [prompt(40, i + 10 * k) % 290 for k in range(1 + busy)]
            with llm.scheduler.engine.changed:  # none begins before all are there
                streams = [llm.scheduler.submit(own, choice(n_vocab=291), limit=25) for own in ids]
            answers = [list(stream) for stream in streams]
            assert [len(answer) for answer in answers] == [25] * (1 + busy)
            assert answers[0] == want or i
        assert online.n_changes >= 1
        assert llm.llama.session is llm.scheduler.engine.session is not first
        assert llm.llama.plan.statistics_kind == "given"
        assert bool(llm.stats().n_preempted) == busy
    finally:
        llm.close()
    with pytest.raises(Exception, match="closed"):
        first.length()
