"""Tokens of a Llama one after the other: reuse of beginnings, seeds, processors, interrupts, threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from powerinfer import (
    ArgumentError,
    ContextError,
    Llama,
    LogitsProcessorList,
    StoppingCriteriaList,
)
from powerinfer._engine.sampling import Sampler, Sampling
from powerinfer._engine.session import Model, Session
from tests.powerinfer.greedy import PROMPT, greedy

OpenLlama = Callable[..., Llama]


def test_greedy_generation_is_argmax_after_argmax(llama: OpenLlama, relu_path: Path) -> None:
    tokens = greedy(llama(), PROMPT, 12)
    session = Session(Model(relu_path), n_threads=1)
    session.feed(PROMPT[:-1], want_logits=False)
    expected, token = [], PROMPT[-1]
    for _ in range(12):
        session.feed([token])
        token = int(np.argmax(session.logits()))
        expected.append(token)
    assert tokens == expected


def test_the_beginning_is_reused(llama: OpenLlama) -> None:
    llm = llama()
    first = greedy(llm, PROMPT, 5)
    assert llm.timings.n_prompt == 7 and llm.timings.n_reused == 0 and llm.timings.n_generated == 4
    longer = [*PROMPT, *first, 33, 34]
    assert llm.n_tokens == 11  # the fifth token was given, not computed
    second = greedy(llm, longer, 5)
    assert llm.timings.n_reused == 11 and llm.timings.n_prompt == 14
    assert second == greedy(llama(), longer, 5)
    greedy(llm, PROMPT[:3], 2)
    assert llm.timings.n_reused == 2  # the last one is computed for its logits
    assert llm.timings.prompt_per_s > 0 and llm.timings.tokens_per_s > 0 and llm.timings.load_s > 0


@pytest.mark.parametrize("which", ["relu", "sparse", "bpe"])
def test_the_same_prompt_gives_the_same_bits(
    llama: OpenLlama, which: str, relu_path: Path, sparse_path: Path, bpe_path: Path
) -> None:
    """Also when all of it is held already."""
    prompt = [1 + i % 300 for i in range(70)]
    llm = llama({"relu": relu_path, "sparse": sparse_path, "bpe": bpe_path}[which])
    scores = []
    for _ in range(3):
        next(llm.generate(prompt))
        scores.append(llm.scores[-1].copy())
    assert np.array_equal(scores[0], scores[1]) and np.array_equal(scores[0], scores[2])


def test_generation_seeds(llama: OpenLlama) -> None:
    llm = llama()
    one = list(islice(llm.generate(PROMPT, temp=3.0, seed=3), 20))
    assert list(islice(llm.generate(PROMPT, temp=3.0, seed=3), 20)) == one
    assert list(islice(llm.generate(PROMPT, temp=3.0, seed=4), 20)) != one
    assert list(islice(llm.generate(PROMPT, temp=3.0), 20)) != list(
        islice(llm.generate(PROMPT, temp=3.0), 20)
    )


def test_generate_after_what_is_held(llama: OpenLlama) -> None:
    llm = llama()
    llm.eval(PROMPT[:4])
    tokens = list(islice(llm.generate(PROMPT[4:], reset=False, temp=0.0), 4))
    assert tokens == greedy(llama(), PROMPT, 4)


def test_generation_needs_a_prompt(llama: OpenLlama) -> None:
    with pytest.raises(ArgumentError, match="no tokens"):
        llama().generate([])


def test_streams_that_take_turns(llama: OpenLlama) -> None:
    """Each computes again what the other replaced."""
    llm = llama()
    other_prompt = [1, 200, 201, 202]
    expected = greedy(llm, PROMPT, 6), greedy(llm, other_prompt, 6)
    one, two = llm.generate(PROMPT, temp=0.0), llm.generate(other_prompt, temp=0.0)
    taken: tuple[list[int], list[int]] = ([], [])
    for _ in range(6):
        taken[0].append(next(one))
        taken[1].append(next(two))
    assert taken == expected


def test_what_others_do_between_tokens(llama: OpenLlama) -> None:
    """Whether they use the object or the session below it."""
    llm = llama()
    expected = greedy(llm, PROMPT, 12)

    llm.reset()
    llm.eval(range(50, 50 + len(PROMPT) + 5))
    as_long = llm.save_state()

    deeds = [
        lambda: None,
        lambda: llm.session.drop(),
        lambda: llm.session.cut(3),
        lambda: llm.session.feed([7, 8]),
        lambda: llm.reset(),
        lambda: llm.load_state(llm.save_state()),
        lambda: llm.load_state(as_long),
    ]
    for deed in deeds:
        stream = llm.generate(PROMPT, temp=0.0)
        taken = [next(stream) for _ in range(6)]
        deed()
        taken += [next(stream) for _ in range(6)]
        assert taken == expected


def test_the_array_of_a_prompt_may_be_used_for_something_else(llama: OpenLlama) -> None:
    prompt = np.array(PROMPT, np.int32)
    llm = llama()
    stream = llm.generate(prompt, temp=0.0)
    tokens = [next(stream) for _ in range(3)]
    prompt[:] = 50
    llm.reset()  # the prompt has to be computed again
    tokens.append(next(stream))
    assert llm.input_ids.tolist() == [*PROMPT, *tokens[:3]]


def test_a_choice_that_fails_leaves_the_logits(llama: OpenLlama) -> None:
    """As those of the token before it, which was computed."""
    llm = llama()
    stream = llm.generate(PROMPT, temp=0.0)
    first = next(stream)
    generator: Any = stream
    held = generator.gi_frame.f_locals["self"]
    held._request.choice.sampler = Sampler(
        Sampling(temperature=0), 320, logit_bias=dict.fromkeys(range(320), -np.inf)
    )
    with pytest.raises(ArgumentError, match="excluded"):
        next(stream)
    assert llm.input_ids.tolist() == [*PROMPT, first]
    assert llm.sample(temp=0.0) == greedy(llama(), PROMPT, 2)[1]


def test_timings_are_those_of_the_moment(llama: OpenLlama) -> None:
    llm = llama()
    stream = llm.generate(PROMPT, temp=0.0)
    next(stream)
    before = llm.timings
    next(stream)
    assert (before.n_generated, llm.timings.n_generated) == (0, 1)


def test_logits_processors(llama: OpenLlama) -> None:
    llm = llama()
    seen: list[tuple[list[int], tuple[int, ...], str, bool]] = []

    def only_even(ids: np.ndarray, scores: np.ndarray) -> np.ndarray:
        seen.append((ids.tolist(), scores.shape, f"{ids.dtype} {scores.dtype}", scores.flags.writeable))
        scores[1::2] = -np.inf
        return scores

    def not_ten(ids: np.ndarray, scores: np.ndarray) -> None:
        scores[10] = -np.inf

    def as_list(ids: np.ndarray, scores: np.ndarray) -> list[float]:
        return [float(score) for score in scores]

    processors = LogitsProcessorList([only_even, not_ten, as_list])
    tokens = list(islice(llm.generate(PROMPT, temp=100.0, top_k=0, logits_processor=processors), 30))
    assert all(token % 2 == 0 and token != 10 for token in tokens) and len(set(tokens)) > 3
    assert seen[0] == (PROMPT, (320,), "int32 float32", True)
    assert seen[5][0] == PROMPT + tokens[:5]
    assert next(llm.generate(PROMPT, temp=0, logits_processor=lambda ids, scores: -scores)) == int(
        np.argmin(llm_scores(llama, PROMPT))
    )
    with pytest.raises(ArgumentError, match="shape"):
        next(llm.generate(PROMPT, logits_processor=[lambda ids, scores: scores[:5]]))
    with pytest.raises(ArgumentError, match="-inf"):
        next(llm.generate(PROMPT, logits_processor=[lambda ids, scores: np.full(320, -np.inf)]))


def llm_scores(llama: OpenLlama, prompt: list[int]) -> np.ndarray[Any, Any]:
    llm = llama()
    next(llm.generate(prompt))
    result: np.ndarray[Any, Any] = llm.scores[-1]
    return result


def test_stopping_criteria(llama: OpenLlama) -> None:
    llm = llama()
    tokens = greedy(llm, PROMPT, 10)
    criteria = StoppingCriteriaList([lambda ids, logits: len(ids) >= 12, lambda ids, logits: False])
    assert list(llm.generate(PROMPT, temp=0.0, stopping_criteria=criteria)) == tokens[:5]
    last_seen = list(
        llm.generate(PROMPT, temp=0.0, stopping_criteria=lambda ids, logits: ids[-1] == tokens[2])
    )
    assert last_seen == tokens[: tokens.index(tokens[2]) + 1]


# -- interrupts and threads


def test_an_interrupt_while_a_prompt_is_read(llama: OpenLlama) -> None:
    prompt = [1 + i % 300 for i in range(100)]

    def interrupt(done: int, total: int) -> None:
        if done >= 32:
            raise KeyboardInterrupt

    llm = llama(n_batch=16, prompt_progress=interrupt)
    with pytest.raises(KeyboardInterrupt):
        next(llm.generate(prompt))
    assert llm.n_tokens == 32 and llm.input_ids.tolist() == prompt[:32]
    with pytest.raises(ContextError, match="evaluate"):
        llm.sample()
    llm.prompt_progress = None
    tokens = greedy(llm, prompt, 5)
    assert llm.timings.n_reused == 32
    assert tokens == greedy(llama(n_batch=16), prompt, 5)


def test_an_interrupt_in_a_processor(llama: OpenLlama) -> None:
    llm = llama()

    def interrupt(ids: np.ndarray, scores: np.ndarray) -> None:
        if len(ids) == 10:
            raise KeyboardInterrupt

    stream = llm.generate(PROMPT, temp=0.0, logits_processor=interrupt)
    tokens: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        tokens.extend(stream)
    assert len(tokens) == 3
    assert greedy(llm, PROMPT, 6)[:3] == tokens


def test_an_interrupt_between_the_engine_and_its_books(
    llama: OpenLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A context shift that was done below and not written down empties the context."""
    llm = llama(n_ctx=20, context_shift=True)
    llm.eval([1, *range(10, 29)])
    shift = Session.shift

    def interrupted(self: Session, *args: Any, **options: Any) -> None:
        shift(self, *args, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Session, "shift", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.eval([5])
    assert llm.n_tokens == 0 and llm.input_ids.size == 0
    assert greedy(llm, PROMPT, 5) == greedy(llama(n_ctx=20), PROMPT, 5)


def test_an_interrupt_while_a_token_is_computed(llama: OpenLlama, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes when the engine is done: the token is held, and no logits are shown that are not its own."""
    llm = llama()
    stream = llm.generate(PROMPT, temp=0.0)
    first = next(stream)
    assert len(llm.scores) == len(PROMPT)
    compute = Sampler.next_native

    def interrupted(self: Sampler, *args: Any) -> tuple[int, int]:
        compute(self, *args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Sampler, "next_native", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(stream)
    assert llm.input_ids.tolist() == [*PROMPT, first]
    assert len(llm.scores) == 0
    with pytest.raises(ContextError, match="no logits"):
        llm.sample()
    assert greedy(llm, PROMPT, 5) == greedy(llama(), PROMPT, 5)


@pytest.mark.parametrize("hook", ["logits_processor", "stopping_criteria", "prompt_progress"])
def test_a_hook_cannot_have_its_model_compute(llama: OpenLlama, hook: str) -> None:
    """It is told so, and the generation goes on: it ended with an AssertionError, or went on for ever."""
    expected = greedy(llama(), PROMPT, 4)
    llm = llama(embedding=True)
    calls: list[Callable[[], object]] = [
        lambda: llm.create_completion(PROMPT, max_tokens=1),
        lambda: next(iter(llm.generate(PROMPT))),
        lambda: llm.eval([5]),
        llm.reset,
        lambda: llm.load_state(state),
        lambda: llm.embed("a"),
    ]
    llm.eval(PROMPT[:2])
    state = llm.save_state()
    left = iter(calls)

    def meddle(*args: Any) -> Any:
        for call in left:
            with pytest.raises(ArgumentError, match="hook"):
                call()
        assert llm.n_tokens >= 0
        return args[-1] if hook == "logits_processor" else False

    if hook == "prompt_progress":
        llm.prompt_progress = meddle
        tokens = greedy(llm, PROMPT, 4)
    else:
        options: dict[str, Any] = {hook: meddle}
        tokens = list(islice(llm.generate(PROMPT, temp=0.0, **options), 4))
    assert next(left, None) is None and tokens == expected


def test_objects_in_parallel_threads(llama: OpenLlama) -> None:
    expected = greedy(llama(), PROMPT, 20)
    problems: list[BaseException] = []
    shared = llama()

    def work() -> None:
        try:
            with llama() as own:
                for _ in range(3):
                    assert greedy(own, PROMPT, 20) == expected
                    shared(PROMPT, max_tokens=5, temperature=0.0)
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems


def _full(llm: Llama, n: int = 64) -> Any:
    """A generation whose context is full."""
    tokens = llm.generate(PROMPT, temp=0)
    while llm.n_tokens < n:
        next(tokens)
    return tokens


@pytest.mark.parametrize("disturb", ["cut", "refused", "other"])
def test_a_full_context_that_was_disturbed_is_computed_again(llama: OpenLlama, disturb: str) -> None:
    """What a suspended generation forgets is not what its sequence holds: nothing wrong is found there."""
    llm = llama(n_ctx=64, context_shift=True)
    tokens = _full(llm)
    if disturb == "cut":
        llm.session.cut(60)
    elif disturb == "refused":
        with pytest.raises(ContextError):
            llm.eval([5] * 70)
    else:
        llm.eval([5])
    token, held = next(tokens), llm.input_ids[: llm.n_tokens].tolist()
    found = llm._ctx.logits.copy()
    fresh = llama(n_ctx=64, context_shift=True)
    fresh.eval(held)
    assert np.argmax(fresh._ctx.logits) == token
    assert np.linalg.norm(fresh._ctx.logits - found) < 0.1 * np.linalg.norm(found)


@pytest.mark.parametrize("n", [10, 20])
def test_a_generation_goes_on_after_a_text_that_shifts_the_context(llama: OpenLlama, n: int) -> None:
    llm = llama(n_ctx=64, context_shift=True)
    alone = list(islice(llm.generate(PROMPT, temp=0), 45))
    tokens = llm.generate(PROMPT, temp=0)
    given = [*islice(tokens, 40)]
    llm.eval([5] * n)
    given += islice(tokens, 5)
    assert llm.input_ids[: llm.n_tokens].tolist() == [*PROMPT, *given][:-1]
    assert given[:40] == alone[:40]


def test_tokens_that_are_sent_shift_the_context(llama: OpenLlama) -> None:
    llm = llama(n_ctx=64, context_shift=True)
    tokens = llm.generate(PROMPT, temp=0)
    while llm.n_tokens < 60:
        last = next(tokens)
    other = llama(n_ctx=64, context_shift=True)
    other.eval(llm.input_ids[:60].tolist())
    other.eval([last, *[5] * 10])
    next_one = tokens.send([5] * 10)
    assert llm.n_tokens == other.n_tokens < 60
    assert llm.input_ids[: llm.n_tokens].tolist() == other.input_ids[: other.n_tokens].tolist()
    logits = llm._ctx.logits
    assert np.linalg.norm(other._ctx.logits - logits) < 0.05 * np.linalg.norm(logits)
    assert next_one == np.argmax(logits)
    with pytest.raises(ContextError):
        tokens.send([5] * 65)


def test_tokens_that_are_sent_to_a_model_that_cannot_shift(llama: OpenLlama, opt_path: Path) -> None:
    """What stays of the context is computed anew, with what was sent behind it."""
    llm = llama(opt_path, n_ctx=64, context_shift=True)
    tokens, given = llm.generate(PROMPT, temp=0), list[int]()
    while llm.n_tokens < 60:
        given.append(next(tokens))
    next_one = tokens.send([5] * 10)
    held = llm.input_ids[: llm.n_tokens].tolist()
    assert held == [*PROMPT, *given, *[5] * 10][-len(held) :] and 30 < len(held) < 60
    other = llama(opt_path, n_ctx=128)
    other.eval(held)
    logits = other._ctx.logits
    assert np.linalg.norm(llm._ctx.logits - logits) < 0.01 * np.linalg.norm(logits)
    assert next_one == np.argmax(logits)
