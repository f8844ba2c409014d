"""How much of prompts a step reads: what a machine takes is made up here, nothing is timed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from powerinfer._engine.choice import Choice
from powerinfer._engine.engine import Engine
from powerinfer._engine.pace import Pace
from powerinfer._engine.request import Request, Stream
from powerinfer._engine.sampling import Sampler, Sampling
from powerinfer._engine.session import Model, Session
from powerinfer.models.plan import Settings, make_plan
from powerinfer.models.plan.rates import HOST_RATES
from tests import models

Cost = Callable[[int], float]


def resident(n: int) -> float:
    """Milliseconds of a part, all weights on a GPU: up to 64 tokens read them in their own format."""
    return 2 + 0.12 * n if n <= 64 else 10 + 0.055 * n


def streamed(n: int) -> float:
    return 250 + 0.1 * n


def processor(n: int) -> float:
    return 3.0 * n


def settled(pace: Pace, cost: Cost, quiet: float, n_reading: int = 1, n_generating: int = 8) -> list[int]:
    """The last of many parts."""
    for _ in range(20):
        pace.saw(0, n_generating, quiet)
    parts: list[int] = []
    while len(parts) < 200:
        if part := pace.part(n_reading, n_generating):
            parts.append(part)
        pace.saw(part, n_generating, quiet + (cost(part) if part else 0))
    return parts[-50:]


@pytest.mark.parametrize(
    ("cost", "quiet", "n_reading", "n_generating", "wanted"),
    [
        (resident, 6.2, 1, 8, {24}),
        (resident, 12.2, 1, 64, {64}),
        (resident, 12.2, 8, 32, {64}),
        (resident, 21.5, 1, 64, {128}),
        (resident, 5.0, 60, 4, {512}),  # nearly all wait for their prompts
        (resident, 2.0, 1, 1, {16}),  # none is so short
        (streamed, 24.0, 1, 8, {512}),
        (processor, 20.0, 1, 8, {16}),
    ],
)
def test_what_a_part_settles_at(
    cost: Cost, quiet: float, n_reading: int, n_generating: int, wanted: set[int]
) -> None:
    parts = settled(Pace(), cost, quiet, n_reading, n_generating)
    assert sum(part in wanted for part in parts) > 40
    assert max(parts) <= 2 * max(wanted)


@pytest.mark.parametrize(("cost", "quiet", "wanted"), [(resident, 12.2, 64), (processor, 250.0, 64)])
def test_where_nothing_is_read_once_for_both_parts_are_not_cut(cost: Cost, quiet: float, wanted: int) -> None:
    assert settled(Pace(), cost, quiet)[-1] == wanted


def test_others_take_twice_as_long_at_most() -> None:
    parts = settled(Pace(), resident, 6.0)
    assert sum(resident(part) <= 6.0 for part in parts) >= 48


@pytest.mark.parametrize(
    ("cost", "quiet", "n_reading", "times"),
    [(resident, 2.0, 1, 2), (streamed, 24.0, 1, 2), (streamed, 24.0, 32, 5), (processor, 20.0, 1, 2)],
)
def test_where_no_part_is_short_others_have_steps_for_themselves(
    cost: Cost, quiet: float, n_reading: int, times: int
) -> None:
    """Their tokens take twice as long on average, or longer where more read than generate."""
    pace = Pace()
    settled(pace, cost, quiet, n_reading)
    took = []
    for _ in range(2000):
        part = pace.part(n_reading, 8)
        took.append(quiet + (cost(part) if part else 0))
        pace.saw(part, 8, took[-1])
    assert np.mean(took) == pytest.approx(times * quiet, rel=0.25)


def test_what_took_long_once_is_tried_again() -> None:
    pace = Pace(n_mixed=64)
    assert settled(pace, lambda n: 100.0 * n, 10.0).count(16) > 45
    for _ in range(30):
        parts = settled(pace, resident, 10.0)
    assert parts.count(56) > 40


@pytest.mark.parametrize(
    ("n_generating", "wanted"), [(1, 56), (8, 56), (9, 48), (20, 40), (31, 32), (33, 24), (48, 16), (60, 16)]
)
def test_a_part_beside_others_in_one_program(n_generating: int, wanted: int) -> None:
    """A step of up to 64 tokens takes 7 ms instead of 4, others much more."""
    pace = Pace(n_mixed=64)
    for _ in range(20):
        pace.saw(0, n_generating, 4.0)
    parts = []
    for _ in range(600):
        if part := pace.part(1, n_generating):
            parts.append(part)
        seconds = 4.0 if not part else 7.0 if part + n_generating <= 64 or part <= 16 else 36.0
        pace.saw(part, n_generating, seconds)
    dear = sum(part + n_generating > 64 for part in parts)
    assert parts.count(wanted) > 540
    assert dear <= 5 or wanted + n_generating > 64


@pytest.mark.parametrize(
    ("n_generating", "dear", "wanted"),
    [(8, 0, 120), (8, 3, 56), (32, 0, 96), (32, 3, 32), (50, 0, 72), (60, 0, 64), (60, 3, 64)],
)
def test_a_part_in_a_program_of_up_to_128(n_generating: int, dear: float, wanted: int) -> None:
    """Where one of more than 64 takes much longer, those of 64 are known, too."""
    pace, parts = Pace(n_mixed=128), []
    for _ in range(600):
        parts.append(pace.part(1, n_generating))
        n = parts[-1] + n_generating
        seconds = 5.0 if not parts[-1] else 7.0 if n <= 64 else 8.0 + dear if n <= 128 else 30.0
        pace.saw(parts[-1], n_generating, seconds)
    assert parts.count(wanted) > 0.9 * sum(part > 0 for part in parts), Counter(parts)


def test_before_anything_is_known() -> None:
    pace = Pace()
    pace.saw(128, 0, 5.0)  # alone: nobody waits
    pace.saw(128, 1, 5.0)  # nor is it known what a token takes without it
    assert pace.part(1, 1) == 0  # the next step tells
    pace.saw(0, 1, 5.0)
    assert pace.part(1, 1) == 16
    pace.saw(1000, 1, 5.0)  # a text's
    assert pace.part(1, 1) == 16


def test_whoever_reads_gets_on_where_no_step_is_seen() -> None:
    """Steps with guesses are not."""
    pace = Pace()
    parts = [pace.part(1, 8) for _ in range(8)]
    assert sum(parts[4:]) >= 16
    pace.saw(0, 8, 1.0)
    pace.saw(pace.part(1, 8), 8, 20.0)  # so long that others have steps for themselves
    parts = [pace.part(1, 8) for _ in range(40)]
    assert not any(parts[:10]) and sum(parts) >= 16


@pytest.mark.parametrize("cost", [resident, streamed, processor])
def test_the_first_parts_are_short(cost: Cost) -> None:
    """Each is at most twice as long as one that was measured."""
    pace, longest = Pace(), 8
    for _ in range(100):
        part = pace.part(1, 8)
        assert part <= 2 * longest
        longest = max(longest, part)
        pace.saw(part, 8, 20.0 + (cost(part) if part else 0))


def test_a_first_time_that_was_long_does_not_count() -> None:
    """A device records programs when they come again."""
    pace, n_seen = Pace(n_mixed=64), Counter[int]()
    pace.saw(0, 8, 4.0)
    parts = []
    for _ in range(1000):
        part = pace.part(1, 8)
        parts.append(part)
        n_seen[part] += 1
        pace.saw(
            part, 8, (4.0 if not part else 7.0 if part <= 56 else 20.0) + (30.0 if n_seen[part] <= 2 else 0)
        )
    assert parts[-100:].count(56) > 95


def test_steps_that_are_held_up_now_and_then() -> None:
    """Others' programs do that: the size stays."""
    pace, parts = Pace(n_mixed=64), []
    for i in range(2000):
        part = pace.part(1, 8)
        if part:
            parts.append(part)
        seconds = 4.0 if not part else 7.0 if part <= 56 else 20.0
        pace.saw(part, 8, seconds * (5 if i % 40 == 39 else 1))
    assert parts[200:].count(56) > 0.95 * len(parts[200:])


def test_programs_that_are_recorded() -> None:
    """A step takes longer the first time, and when it is recorded, the second time; the last few are kept."""
    pace, kept, before, parts = Pace(n_mixed=64), list[int](), 0, []
    for _ in range(1500):
        part = pace.part(1, 8)
        parts.append(part)
        seconds = 4.2 if not part else 5.9 + 0.02 * part if part <= 56 else 16.0
        if part and part not in kept:
            seconds += 8.0 if part == before else 4.0
        if part and (part in kept or part == before):
            kept = [*[size for size in kept if size != part][-3:], part]
        before = part or before
        pace.saw(part, 8, seconds)
    assert parts[-500:].count(56) > 450


def test_a_quiet_step_that_was_held_up_allows_no_more() -> None:
    pace, n_quiet = Pace(), 0
    for _ in range(5):
        pace.saw(0, 8, 4.0)
    for _ in range(1000):
        part = pace.part(1, 8)
        n_quiet += not part
        pace.saw(
            part,
            8,
            (4.0 if part or n_quiet % 5 else 40.0)
            + (0.0 if not part else 3.0 if part <= 64 else 10.0 + 0.05 * part),
        )
        assert part <= 128
    assert n_quiet > 10


def test_the_first_quiet_step_may_have_been_held_up() -> None:
    """By what a server's first step does once: it is measured three times soon."""
    pace, parts = Pace(), []
    pace.saw(0, 8, 5.0)
    for _ in range(200):
        parts.append(pace.part(1, 8))
        pace.saw(parts[-1], 8, 0.004 + (0.003 if 0 < parts[-1] <= 64 else 0.03 if parts[-1] else 0.0))
    assert parts[8] == 0 and max(parts[100:]) <= 128


def test_much_too_long_parts_are_rare() -> None:
    pace, parts = Pace(), []
    for _ in range(1000):
        part = pace.part(1, 8)
        parts.append(part)
        pace.saw(part, 8, 4.0 + (3.0 if 0 < part <= 64 else 12.0 if part else 0.0))
    assert parts.count(64) > 900 and 0 < parts.count(128) <= 2


def test_what_a_step_takes_by_itself_is_measured_again() -> None:
    """Answers grow, and while parts are short no step is without one."""
    pace = Pace()
    for _ in range(5):
        pace.saw(0, 8, 3.0)
    for quiet in (3.0, 12.0):
        parts = []
        for _ in range(800):
            parts.append(pace.part(1, 8))
            pace.saw(parts[-1], 8, quiet + (0.06 * parts[-1]))
        assert parts[-200:].count(0) < 10
    assert parts[-1] == 128


def h100(part: int, n_generating: int, depth: int, n_mixed: int = 64) -> float:
    """About what a step takes with a model of 4 GB."""
    quiet = float(np.interp(n_generating, [1, 8, 32, 64], [2.0, 4.1, 5.5, 8.4]))
    if not part:
        return quiet
    deep = 1.4 * depth / 8000
    if part + n_generating > n_mixed:
        return quiet + float(np.interp(part, [16, 64, 128, 512], [4.6, 6.1, 12.0, 22.0])) + deep
    return (
        float(np.interp(part + n_generating, [16, 32, 64, 80, 96, 128, 256], [4.6, 6.0, 7.2, 9, 10, 12, 20]))
        + deep
    )


@pytest.mark.parametrize("n_mixed", [64, 128, 256])
@pytest.mark.parametrize("n_generating", range(1, 65))
def test_beside_any_number(n_generating: int, n_mixed: int) -> None:
    """Prompts of 8,000 tokens, one after the other: steps but few are at most twice as long as quiet ones.
    Where even the smallest part takes longer, others have steps between them."""
    pace, took, n_read = Pace(n_mixed=n_mixed), [], 0
    quiet = h100(0, n_generating, 0)
    while n_read < 4 * 8000:
        part = min(pace.part(1, n_generating), 8000 - n_read % 8000)
        seconds = h100(part, n_generating, n_read % 8000, n_mixed)
        pace.saw(part, n_generating, seconds)
        took.append(seconds / quiet)
        n_read += part
    took = took[len(took) // 4 :]
    smallest = h100(16, n_generating, 8000) / quiet
    assert np.mean(took) <= 2.02
    assert np.percentile(took, 96) <= max(2.0, smallest) * 1.1
    assert len(took) * quiet < 9000  # nine seconds for three of them


@pytest.mark.parametrize("n_generating", [1, 2, 8, 64])
@pytest.mark.parametrize("between", [0.0, 0.5, 1.0])
def test_what_is_between_steps_counts(n_generating: int, between: float) -> None:
    """Once before each part, and before the steps that others have in a row without any. So others take less
    than twice as long as steps that go on by themselves, from the first part to the last."""
    pace, quiet = Pace(n_mixed=64), h100(0, n_generating, 0)
    pace.saw(0, n_generating, quiet, n_steps=200)
    took: list[float] = []
    for i in range(3 * 8000 // 64):
        n_rest = pace.rest(n_generating)
        if n_rest > 1:
            n, seconds = n_rest, quiet + between / n_rest
            pace.saw(0, n_generating, seconds, n_steps=n)
        else:
            n, part = 1, pace.part(1, n_generating)
            seconds = between + h100(part, n_generating, 8000 * i // 375)
            pace.saw(part, n_generating, seconds)
        took += [seconds] * n
    assert np.mean(took) <= 1.9 * quiet
    for tenth in np.array_split(took, 10):
        assert np.mean(tenth) <= 2 * quiet


def test_a_part_that_was_held_up_counts_as_what_it_takes() -> None:
    """It was not the prompt's doing, unless it comes again and again."""
    pace = Pace(n_mixed=64)
    settled(pace, resident, 10.0)
    while not (part := pace.part(1, 8)):
        pace.saw(0, 8, 10.0)
    pace.saw(part, 8, 600.0)
    assert pace.rest(8) <= 1
    for _ in range(6):
        pace.saw(part, 8, 600.0)
    assert pace.rest(8) > 10


def test_a_part_that_nobody_asked_for() -> None:
    """Who reads all short prompts at once does not ask: what such steps may take is known all the same."""
    pace = Pace(n_mixed=64)
    pace.saw(0, 32, 5.0, n_steps=100)
    for _ in range(3):
        pace.saw(12, 32, 8.0)
    assert pace.rest(32) <= 1


@pytest.mark.parametrize("n_held_up", [0, 64, 128, 256, 512])
@pytest.mark.parametrize("longer", [1.2, 1.3, 1.45])
@pytest.mark.parametrize("of_many", [0.0, 60.0])
def test_streamed_parts_are_large(n_held_up: int, longer: float, of_many: float) -> None:
    """A part takes as long as its weights are on their way, nearly whatever its size: few are small, also
    where the first of a size is held up."""
    pace, first = Pace(), True
    parts: list[int] = []
    pace.saw(0, 1, 8.0, n_steps=50)
    while sum(parts) < 4 * 8000:
        if (n_rest := pace.rest(1)) > 1:
            pace.saw(0, 1, 8.0, n_steps=n_rest)
            continue
        part = pace.part(1, 1)
        seconds = 8.0 + (200 + 0.05 * part + of_many * (part > 64) if part else 0)
        if part == n_held_up and first:
            seconds, first = seconds * longer, False
        pace.saw(part, 1, seconds)
        parts += [part] if part else []
    assert len(parts) < 110, Counter(parts)
    assert parts[-20:].count(512) > 15


@pytest.mark.parametrize("seconds", [0.0, 1e-9])
def test_a_clock_that_stands_still(seconds: float) -> None:
    """Those of some systems go on every 16 ms."""
    pace, n_read = Pace(n_mixed=64), 0
    for _ in range(200):
        part = pace.part(1, 8)
        pace.saw(part, 8, seconds)
        n_read += part
    assert n_read > 16 * 200


def test_a_given_size_stays() -> None:
    pace = Pace(40)
    assert set(settled(pace, resident, 0.1)) == {40}


def test_the_number_that_generate_counts() -> None:
    pace = Pace()
    settled(pace, resident, 12.0, 1, 64)
    settled(pace, resident, 2.0, 1, 1)
    assert pace.part(1, 1) == 0  # others have not had their steps yet
    pace.saw(0, 1, 2.0, n_steps=100)
    assert pace.part(1, 64) == 64 == pace.part(1, 90)
    assert pace.part(1, 1) == 16
    assert pace.part(1, 30) == 0  # so many were never seen


def test_what_is_known_beside_twice_as_many_counts_until_it_is_measured() -> None:
    pace = Pace(n_mixed=128)
    settled(pace, lambda n: 1 + 0.02 * n, 7.0, 1, 64)
    for _ in range(3):
        pace.saw(0, 40, 6.0)
    parts = []
    for _ in range(200):
        parts.append(pace.part(8, 40))
        pace.saw(parts[-1], 40, 6.0 if not parts[-1] else 8.0 if parts[-1] <= 32 else 90.0)  # not so there
    assert parts[0] >= 64
    assert 0 < sum(part > 32 for part in parts) <= 4, parts
    for _ in range(3):
        pace.saw(0, 2, 2.0)
    assert pace.part(8, 2) == 16  # others are too many, or too few


def test_guesses_are_no_prompts(make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make(draft=lambda ids: [5, 6, 7], n_guesses=3)
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(Pace, "saw", lambda self, n_read, n, seconds: seen.append((n_read, n)))
    with scheduler.engine.changed:  # none begins before all are there
        streams = [
            scheduler.submit(
                np.array([i], np.int32), Choice(sampler=Sampler(Sampling(temperature=0), 320)), limit=12
            )
            for i in (5, 9, 30)
        ]
    for stream in streams:
        list(stream)
    assert scheduler.engine.totals["drafted"] > 0
    assert not any(n_read for n_read, _ in seen)


class Clock:
    """Goes on only where something takes time."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


def opened(model: Model, share: float | None = None, sparsity: Any = "dense") -> Session:
    """On the stand-in, with a share of what it could hold; None: on the CPU alone."""
    sizes: dict[str, Any] = {"n_ctx": 3100, "n_pool": 6400, "n_seq": 8, "n_batch": 512}
    own: dict[str, Any] = {**sizes, "sparsity": sparsity, "n_threads": 1}
    if share is None:
        return Session(model, **own)
    asked = Settings(**sizes, sparsity=sparsity, overhead_bytes=0, group=1)
    whole = make_plan(model, vram_budget=2, settings=asked, rates=HOST_RATES)
    n_bytes = whole.min_bytes + share * (whole.full_bytes - whole.min_bytes)
    plan = make_plan(model, vram_budget=n_bytes / 2**30, settings=asked, rates=HOST_RATES)
    return Session(model, plan=plan.native(model), device="host", **own)


WAYS: dict[str, tuple[dict[str, Any], Callable[[int, int], float], float, int]] = {
    # The session, milliseconds of a step by prompts' tokens and next ones, how many times a quiet one it may
    # take, and tokens of a part.
    "resident": ({"share": 1.0}, lambda n, g: max(4.0, 2.0 + 0.08 * (n + g)), 2.0, 56),
    "predicted": (
        {"share": 1.0, "sparsity": "predicted"},
        lambda n, g: 4.0 + (4.5 + 0.02 * n) * (n > 0),
        2.7,
        64,
    ),
    "streamed": ({"share": 0.5}, lambda n, g: 24.0 + (250 + 0.1 * n) * (n > 0), 14.0, 512),
    "cpu": ({}, lambda n, g: 20.0 + 3.0 * n, 4.6, 16),
}


@pytest.mark.parametrize("way", WAYS)
def test_an_engine_goes_by_it(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the stand-in, with times that are made up: while one reads a long prompt the others' steps take as
    long as they may, and the prompt comes to its end."""
    options, cost, most, wanted = WAYS[way]
    clock, n_streams, n_prompt = Clock(), 3, 3000
    steps: list[tuple[int, float]] = []
    feed = Session.feed

    def fed(self: Session, ids: Any, **more: Any) -> Any:
        n_next = min(n_streams, len(ids))
        seconds = cost(len(ids) - n_next, n_next) / 1000
        clock.now += seconds
        if len(ids) >= n_streams:
            steps.append((len(ids) - n_next, seconds))
        return feed(self, ids, **more)

    spec = models.SPECS["bamboo"]
    path = models.write_sparse(tmp_path / "m.gguf", spec, models.draw_predictor(spec))
    with Model(path) as model, opened(model, **options) as session:
        engine = Engine(session, max_running=4)
        for module in ("admission", "one_call"):
            monkeypatch.setattr(f"powerinfer._engine.{module}.time", clock)
        monkeypatch.setattr(Session, "feed", fed)
        rng = np.random.default_rng(3)

        def add(n: int, limit: int) -> Stream:
            ids = np.zeros(n + limit, np.int32)
            ids[:n] = rng.integers(3, 290, n)
            choice = Choice(sampler=Sampler(Sampling(temperature=0), model.info.n_vocab))
            stream = Stream(n, engine.cancel)
            engine.add(Request(stream=stream, ids=ids, n=n, n_prompt=n, left_to_give=limit, choice=choice))
            return stream

        for _ in range(n_streams):
            add(4, 900)
        for _ in range(10):
            engine.step()
        steps.clear()
        prompt = add(n_prompt, 1)
        while prompt.reason is None:
            engine.step()
        assert len(engine.queue.running) == n_streams  # nobody was over meanwhile
    quiet = cost(0, n_streams) / 1000
    steps = steps[:-2]  # a prompt's last part may have some more tokens
    assert sum(seconds for _, seconds in steps) <= (2 * len(steps) + most) * quiet
    steps = steps[len(steps) // 4 :]  # the others were to find out
    assert max(seconds for _, seconds in steps) <= most * quiet
    parts = [n for n, _ in steps if n]
    assert sum(n > wanted for n in parts) <= 2  # now and then a larger one is tried
    assert sum(n > wanted - 8 for n in parts[-4:]) >= 3
