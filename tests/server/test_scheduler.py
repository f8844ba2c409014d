"""Continuous batching: answers are those of running alone, prefixes are shared, nobody is left waiting."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from powerinfer import (
    Llama,
    LogitsProcessorList,
    StoppingCriteriaList,
)
from powerinfer._engine.choice import Choice
from powerinfer._engine.engine import Engine
from powerinfer._engine.sampling import Sampler, Sampling
from powerinfer._engine.scheduler import Scheduler
from powerinfer._engine.session import Session
from tests.server.scheduling import N_VOCAB, Ids, MakeScheduler, blocked, choice, prompt


@pytest.fixture(scope="module")
def alone(relu_path: Path) -> Callable[[Ids, int], list[int]]:
    """What Llama answers."""
    llm = Llama(relu_path, n_threads=1, verbose=False, type_k="f32", type_v="f32")
    return lambda ids, n: list(islice(llm.generate(ids.tolist(), temp=0.0), n))


# -- the same answers


@pytest.mark.parametrize("sparsity", ["exact", "predicted", "dense"])
def test_answers_are_those_of_running_alone(make: MakeScheduler, sparse_path: Path, sparsity: Any) -> None:
    scheduler = make(sparse_path, n_seq=12, max_running=6, sparsity=sparsity, prompt_part=16)
    prompts = [prompt(n, n) for n in (1, 2, 7, 40, 63, 64, 65, 100, 130)]
    with scheduler.engine.changed:  # none begins before all are there
        streams = [scheduler.submit(ids, choice(), limit=24) for ids in prompts]
    got = [list(stream) for stream in streams]
    kv = {"type_k": "f32", "type_v": "f32"}
    llm = Llama(sparse_path, n_threads=1, verbose=False, sparsity=sparsity, **kv)
    for ids, answer in zip(prompts, got, strict=True):
        want = list(islice(llm.generate(ids.tolist(), temp=0.0), 24))
        assert answer == want
    stats = scheduler.stats()
    assert stats.n_generated_tokens == 24 * len(prompts)
    assert stats.n_steps < 24 * len(prompts) / 2  # they were computed together
    assert {stream.reason for stream in streams} == {"length"}


def test_random_choices_do_not_depend_on_the_company(make: MakeScheduler) -> None:
    scheduler = make()
    lonely = list(scheduler.submit(prompt(9), choice(5), limit=20))
    with scheduler.engine.changed:  # none begins before all are there
        streams = [scheduler.submit(prompt(9, i), choice(5), limit=20) for i in range(4)]
    assert list(streams[0]) == lonely


def test_penalties_see_what_was_chosen(make: MakeScheduler, relu_path: Path) -> None:
    """Also where nobody but the sampler looks at the logits."""
    sampling = {"temperature": 0.0, "repeat_penalty": 1.9, "frequency_penalty": 0.5}
    sampler = Sampler(Sampling(**sampling), N_VOCAB)  # type: ignore[arg-type]
    plain = Choice(sampler=sampler)
    assert plain.is_plain
    stream = make().submit(prompt(9), plain, limit=30)
    llm = Llama(relu_path, n_threads=1, verbose=False, type_k="f32", type_v="f32")
    assert list(stream) == list(islice(llm.generate(prompt(9).tolist(), **sampling), 30))


def test_ends(make: MakeScheduler, alone: Callable[[Ids, int], list[int]]) -> None:
    scheduler = make()
    want = alone(prompt(5), 8)
    stream = scheduler.submit(prompt(5), choice(ends={want[3]}))
    assert list(stream) == want[: want.index(want[3]) + 1]
    assert (stream.reason, stream.n_given, stream.n_prompt) == ("stop", want.index(want[3]), 5)
    criteria = StoppingCriteriaList([lambda ids, _: ids.size == 7])
    assert list(scheduler.submit(prompt(5), choice(criteria=criteria))) == want[:2]
    full = scheduler.submit(prompt(250), choice())
    assert len(list(full)) == 7 and full.reason == "length"  # n_ctx is 256, the last token is not computed
    with pytest.raises(StopIteration):
        next(full)


def test_processors_and_watch(make: MakeScheduler) -> None:
    seen: list[tuple[int, int]] = []
    rows: list[tuple[int, float]] = []

    def only_seven(ids: Ids, logits: npt.NDArray[np.float32]) -> None:
        seen.append((ids.size, int(ids[-1])))
        logits[np.arange(N_VOCAB) != 7] = -np.inf

    own = choice(
        processors=LogitsProcessorList([only_seven]),
        watch=lambda row, token: rows.append((token, float(np.exp(row).sum()))),
    )
    assert list(make().submit(prompt(4), own, limit=3)) == [7, 7, 7]
    assert [size for size, _ in seen] == [4, 5, 6] and seen[-1][1] == 7
    assert [token for token, _ in rows] == [7, 7, 7]
    assert all(abs(total - 1) < 1e-3 for _, total in rows)  # the model's own probabilities


# -- one step for all


def record(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The sequences of each feed, a number for each token."""
    feeds: list[list[int]] = []
    feed = Session.feed

    def recorded(self: Session, tokens: Any, **options: Any) -> list[int]:
        chosen = feed(self, tokens, **options)
        feeds.append(list(options["seq"]))
        return chosen

    monkeypatch.setattr(Session, "feed", recorded)
    return feeds


def test_prompts_are_read_between_tokens(make: MakeScheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make(prompt_part=16)
    feeds = record(scheduler, monkeypatch)
    (talking,), go = blocked(scheduler, 1)
    owner = feeds[0][0]
    reading = scheduler.submit(prompt(200, 1), choice(), limit=1)
    go.set()
    list(reading)
    long = [feed for feed in feeds if len(feed) > 1 and set(feed) != {owner}]
    assert len(long) >= 200 // 16
    assert all(feed.count(owner) == 1 for feed in long)
    lengths = sorted(map(len, long))
    assert lengths[-2] <= 17 and lengths[-1] < 33  # the last part is less than two
    talking.cancel()
    parts = Counter(scheduler.engine.parts)
    del parts[0]
    assert parts == Counter(len(feed) - 1 for feed in long if len(feed) > 2)  # a single token is a next one


def test_a_short_prompt_does_not_wait_for_a_long_one(
    make: MakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor the long one until no short ones come: of each step it has half."""
    scheduler = make(prompt_part=64)
    feeds = record(scheduler, monkeypatch)
    (talking,), go = blocked(scheduler, 1)
    owner = feeds[0][0]
    with scheduler.engine.changed:
        streams = [scheduler.submit(prompt(n, n), choice(), limit=1) for n in (200, 90, 9)]
    go.set()
    for stream in streams:
        list(stream)
    talking.cancel()
    first = Counter(next(feed for feed in feeds if len(set(feed)) > 1))
    del first[owner]
    assert sorted(first.values()) == [9, 23, 32]
    lengths = [Counter(feed) for feed in feeds]
    long = next(seq for seq in first if sum(n[seq] for n in lengths) == 200)
    assert first[long] == 32 and len([n for n in lengths if n[long]]) <= 5


def test_what_generates_stands_behind_prompts(make: MakeScheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a device reads them together, and decodes the others in one step."""
    scheduler = make(prompt_part=64)
    kinds: list[list[int]] = []
    feed = Session.feed

    def recorded(self: Session, tokens: Any, **options: Any) -> list[int]:
        kinds.append(list(options["want_logits"]))
        return feed(self, tokens, **options)

    monkeypatch.setattr(Session, "feed", recorded)
    with scheduler.engine.changed:  # none begins before all are there
        streams = [scheduler.submit(prompt(n, n), choice(), limit=8) for n in (7, 90, 5, 70, 3)]
    for stream in streams:
        assert len(list(stream)) == 8
    assert all(fed == sorted(fed) for fed in kinds)
    assert any(0 < sum(fed) < len(fed) for fed in kinds)


def test_alone_a_prompt_is_read_at_once(make: MakeScheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make(prompt_part=16)
    feeds = record(scheduler, monkeypatch)
    list(scheduler.submit(prompt(200), choice(), limit=1))
    assert [len(feed) for feed in feeds] == [200]


# -- shared beginnings


def test_a_common_beginning_is_computed_once(make: MakeScheduler) -> None:
    scheduler = make(n_seq=16, max_running=8)
    system = prompt(130)
    prompts = [np.concatenate([system, prompt(10, i + 1)]) for i in range(6)]
    with scheduler.engine.changed:  # none begins before all are there
        streams = [scheduler.submit(ids, choice(), limit=5) for ids in prompts]
    answers = [list(stream) for stream in streams]
    assert [stream.n_reused for stream in streams] == [0] + [123] * 5  # 16 are left for matrix products
    stats = scheduler.stats()
    assert stats.n_computed_tokens == 140 + 5 * 17 + 6 * 4
    assert (stats.n_prompt_tokens, stats.n_reused_tokens) == (6 * 140, 5 * 123)
    fresh = make(n_seq=1)
    for ids, answer in zip(prompts, answers, strict=True):
        fresh_answer = list(fresh.submit(ids, choice(), limit=5))
        assert fresh_answer == answer


def test_a_conversation_goes_on_where_it_ended(make: MakeScheduler) -> None:
    scheduler = make(n_seq=2)
    first = scheduler.submit(prompt(50), choice(), limit=10)
    ids = np.concatenate([prompt(50), np.array(list(first), np.int32), prompt(20, 1)])
    second = scheduler.submit(ids, choice(), limit=2)
    list(second)
    assert second.n_reused == 59  # the last token of the answer had not been computed
    assert scheduler.stats().n_evicted == 0


def test_the_whole_prompt_again(make: MakeScheduler) -> None:
    scheduler = make()
    first = list(scheduler.submit(prompt(40), choice(), limit=5))
    again = scheduler.submit(prompt(40), choice(), limit=5)
    assert list(again) == first and again.n_reused == 39


def test_idle_sequences_are_forgotten_oldest_first(make: MakeScheduler) -> None:
    scheduler = make(n_seq=3, max_running=1)
    for i in range(5):
        list(scheduler.submit(prompt(40, i), choice(), limit=2))
    assert scheduler.stats().n_evicted == 2
    latest = scheduler.submit(prompt(40, 4), choice(), limit=2)
    list(latest)
    oldest = scheduler.submit(prompt(40, 0), choice(), limit=2)
    list(oldest)
    assert (latest.n_reused, oldest.n_reused) == (39, 0)


# -- too little memory


def test_memory_of_idle_sequences_is_taken(make: MakeScheduler) -> None:
    scheduler = make(n_pool=256, n_seq=8)
    for i in range(6):
        assert len(list(scheduler.submit(prompt(100, i), choice(), limit=30))) == 30
    assert scheduler.stats().n_evicted >= 4


def test_memory_is_taken_from_the_oldest_but_not_from_what_is_wanted(make: MakeScheduler) -> None:
    scheduler = make(n_pool=256, n_seq=8)  # four blocks, two for each of these
    for i in range(2):
        list(scheduler.submit(prompt(100, i), choice(), limit=2))
    list(scheduler.submit(prompt(70, 2), choice(), limit=2))  # forgets the first
    second = scheduler.submit(np.concatenate([prompt(100, 1), prompt(60, 3)]), choice(), limit=2)
    list(second)
    assert second.n_reused == 99  # the third was forgotten for it
    assert scheduler.stats().n_evicted == 2


def test_the_youngest_gives_way(
    make: MakeScheduler,
    alone: Callable[[Ids, int], list[int]],
    relu_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generated: list[bool] = []  # of tokens that were generated, whether they were computed as such
    feed = Session.feed

    def observed(self: Session, tokens: Any, **options: Any) -> list[int]:
        lengths = {seq: self.length(seq) for seq in set(options["seq"])}
        chosen = feed(self, tokens, **options)
        for seq, wants in zip(options["seq"], options["want_logits"], strict=True):
            if lengths[seq] >= 30:
                generated.append(wants)
            lengths[seq] += 1
        return chosen

    monkeypatch.setattr(Session, "feed", observed)
    scheduler = make(n_pool=4 * 64, n_seq=8, max_running=4)
    with scheduler.engine.changed:  # none begins before all are there
        streams = [scheduler.submit(prompt(30, i), choice(), limit=100) for i in range(4)]
    answers = [list(stream) for stream in streams]
    monkeypatch.setattr(Session, "feed", feed)
    stats = scheduler.stats()
    assert stats.n_preempted >= 1 and stats.n_ended == {"length": 4}
    for i, answer in enumerate(answers):
        assert answer == alone(prompt(30, i), 100)
    # Whoever gave way computes his answer again as it was the first time, with the predictor's neurons.
    assert len(generated) > 4 * 99 and all(generated)


def test_who_gave_way_is_the_next_to_go_on(make: MakeScheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    first_in_line: list[bool] = []
    preempt = Engine._preempt

    def observed(self: Engine) -> None:
        youngest = self._running[-1]
        preempt(self)
        first_in_line.append(self.queue.waiting[0] is youngest)

    monkeypatch.setattr(Engine, "_preempt", observed)
    scheduler = make(n_pool=4 * 64, n_seq=8, max_running=4, max_waiting=20)
    with scheduler.engine.changed:  # none begins before all are there
        streams = [scheduler.submit(prompt(30, i), choice(), limit=100) for i in range(8)]
    assert [len(list(stream)) for stream in streams] == [100] * 8
    assert first_in_line and all(first_in_line)


def test_one_alone_always_fits(make: MakeScheduler) -> None:
    scheduler = make(n_pool=256, n_ctx=256, n_seq=4)
    for i in range(3):
        list(scheduler.submit(prompt(100, i), choice(), limit=3))
    assert len(list(scheduler.submit(prompt(60), choice()))) == 256 - 60 + 1


def test_a_text_that_is_visited_gives_way(make: MakeScheduler) -> None:
    scheduler = make(n_pool=256, n_seq=4)
    talking = scheduler.submit(prompt(100), choice(), limit=150)
    next(talking)
    rows = scheduler.embed(prompt(180, 1), pooling="none")
    assert rows.shape == (180, 64)
    assert len(list(talking)) == 149


# -- many threads


def test_many_threads(make: MakeScheduler) -> None:
    scheduler = make(n_pool=512, n_seq=10, max_running=6, max_waiting=100, prompt_part=8)
    rng = np.random.default_rng(1)
    plans = [
        (int(rng.integers(1, 120)), int(rng.integers(1, 60)), bool(rng.random() < 0.3)) for _ in range(60)
    ]
    wrong: list[Any] = []

    def client(i: int) -> None:
        n_prompt, limit, leaves = plans[i]
        stream = scheduler.submit(prompt(n_prompt, i % 7), choice(i), limit=limit)
        if leaves:
            next(stream)
            stream.cancel()
        got = len(list(stream))
        if not leaves and got != limit:
            wrong.append((i, plans[i], got, stream.reason))

    threads = [threading.Thread(target=client, args=(i,)) for i in range(60)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    stats = scheduler.stats()
    assert (stats.running, stats.waiting) == (0, 0) and sum(stats.n_ended.values()) == 60
