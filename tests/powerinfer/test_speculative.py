"""Guessed tokens change nothing but the number of steps."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import pytest

from powerinfer import ArgumentError, Llama, LlamaDraftModel
from powerinfer._engine.request import Request
from powerinfer.compat.llama_speculative import LlamaPromptLookupDecoding

OpenLlama = Callable[..., Llama]
PROMPT = "the tree the tree the water the tree"


class Oracle(LlamaDraftModel):
    """Knows the answer, but each third guess is wrong, and some ids do not exist."""

    def __init__(self, answer: list[int]) -> None:
        self.answer = answer

    def __call__(self, input_ids: np.ndarray, /, **kwargs: Any) -> np.ndarray:
        guess = np.array(self.answer[len(input_ids) : len(input_ids) + 3])
        if len(input_ids) % 3 == 0 and guess.size:
            guess[-1] = (guess[-1] + 1) % 320
        return np.append(guess, 10**6 if len(input_ids) % 2 else -1)


def count_steps(llm: Llama) -> list[int]:
    """The sizes of the feeds from now on."""
    sizes: list[int] = []
    feed = llm.session.feed

    def counting(tokens: Any, **options: Any) -> list[int]:
        sizes.append(len(tokens))
        return feed(tokens, **options)

    llm.session.feed = counting  # type: ignore[method-assign]
    return sizes


@pytest.mark.parametrize("sparsity", ["dense", "exact"])
@pytest.mark.parametrize(
    "options", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "drawn"]
)
def test_answers_stay(llama: OpenLlama, sparsity: str, options: dict[str, Any]) -> None:
    llm = llama(sparsity=sparsity)
    text = llm(PROMPT, max_tokens=40, repeat_penalty=1.1, **options)["choices"][0]["text"]
    ids, n_tokens = llm.input_ids.tolist(), llm.n_tokens
    for draft in (Oracle(ids), LlamaPromptLookupDecoding(2, 4)):
        guessing = llama(sparsity=sparsity, draft_model=draft)
        guessing("x", max_tokens=1)  # how wide steps may be is measured here
        sizes = count_steps(guessing)
        result = guessing(PROMPT, max_tokens=40, repeat_penalty=1.1, **options)["choices"][0]["text"]
        assert result == text and guessing.input_ids.tolist() == ids and guessing.n_tokens == n_tokens
        if isinstance(draft, Oracle):
            assert max(sizes[1:]) > 1  # guesses were taken
            assert len(sizes) < 40
        parts = guessing(PROMPT, max_tokens=40, repeat_penalty=1.1, stream=True, **options)
        assert "".join(part["choices"][0]["text"] for part in parts) == text


@pytest.mark.parametrize("options", [{"logits_all": True}, {"n_batch": 8}])
def test_tokens_of_others_in_between(
    llama: OpenLlama, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a caller sends, and what another answer replaced, is computed before a guess is checked."""

    def answer(llm: Llama, ask_else: bool) -> list[int]:
        given = []
        stream = llm.generate(llm.tokenize(PROMPT), temp=0.0)
        sent = None
        for i in range(30):
            given.append(stream.send(sent))  # type: ignore[attr-defined]
            sent = given[-4:] if i % 4 == 3 else None
            if ask_else and i % 7 == 3:
                llm("the tree", max_tokens=2)
        return given

    plain, guessing = llama(**options), llama(draft_model=LlamaPromptLookupDecoding(2, 4), **options)
    wide = []
    guess = Request.take_guess

    def noting(self: Request, ids: Any) -> None:
        guess(self, ids)
        wide.append(self.guess.size > 0)

    monkeypatch.setattr(Request, "take_guess", noting)
    for ask_else in (False, True):
        assert answer(guessing, ask_else) == answer(plain, ask_else)
    assert sum(wide) > 10


def test_predicted_mode_too(llama: OpenLlama, sparse_path: Any) -> None:
    text = llama(sparse_path)(PROMPT, max_tokens=40, temperature=0.0)["choices"][0]["text"]
    guessing = llama(sparse_path, draft_model=LlamaPromptLookupDecoding(2, 4))
    assert guessing(PROMPT, max_tokens=40, temperature=0.0)["choices"][0]["text"] == text


def test_a_wide_step_is_never_wider_than_it_may_be(llama: OpenLlama) -> None:
    llm = llama(n_batch=4)
    wide = llm._ctx.engine.measure_guesses()
    assert 0 <= wide <= 3 and llm.n_tokens == 0
    ids = [1, 5, 9, 12][: wide + 1]
    alone = []
    for token in ids:
        llm.eval([token])
        alone.append(llm.scores[-1].copy())
    llm.reset()
    llm.session.feed(ids, want_logits=True)
    for i, row in enumerate(alone):
        assert np.array_equal(llm.session.logits(i), row)
    assert llama(n_batch=1)._ctx.engine.measure_guesses() == 0


def test_the_end_of_the_context(llama: OpenLlama) -> None:
    for shift in (False, True):
        plain = llama(n_ctx=48, context_shift=shift)
        text = plain(PROMPT, max_tokens=40, temperature=0.0)["choices"][0]["text"]
        guessing = llama(n_ctx=48, context_shift=shift, draft_model=lambda ids: [5, 5, 5])
        assert guessing(PROMPT, max_tokens=40, temperature=0.0)["choices"][0]["text"] == text


def test_a_stream_that_is_left_early_forgets_guesses(llama: OpenLlama) -> None:
    plain = llama()
    stream = plain.generate(plain.tokenize(PROMPT), temp=0.0)
    answer = plain.tokenize(PROMPT) + [next(stream) for _ in range(20)]
    llm = llama(draft_model=lambda ids: answer[len(ids) : len(ids) + 4])
    for n in range(1, 8):
        stream = llm.generate(llm.tokenize(PROMPT), temp=0.0)
        for _ in range(n):
            next(stream)
        stream.close()  # type: ignore[attr-defined]
        assert llm.input_ids.tolist() == answer[: len(llm.tokenize(PROMPT)) + n - 1]
        assert llm.scores.shape[0] == llm.n_tokens


def test_guesses_while_others_use_the_context(llama: OpenLlama) -> None:
    """What they leave in it is as long as what the generation held, and none of its own."""
    llm = llama()
    prompt = llm.tokenize(PROMPT)
    answer = list(islice(llm.generate(prompt, temp=0.0), 12))
    llm.draft_model = lambda ids: answer[2:5] if len(ids) == len(prompt) + 2 else []
    for n in range(1, 8):
        llm.reset()
        stream = llm.generate(prompt, temp=0.0)
        taken = [next(stream) for _ in range(4)]  # two more are known by the step with guesses
        llm.reset()
        llm.eval(range(50, 50 + len(prompt) + n))
        taken += islice(stream, 8)
        assert taken == answer


@pytest.mark.parametrize(
    ("ids", "guess"),
    [
        ([1, 2, 3, 1, 2], [3, 1, 2]),
        ([1, 2, 3, 9, 2], [3, 9, 2]),
        ([4, 4, 4], [4]),
        ([7, 1, 2, 8, 1, 5, 6, 1, 2], [8, 1, 5]),
        ([1, 2], []),
        ([5], []),
        ([], []),
    ],
)
def test_prompt_lookup(ids: list[int], guess: list[int]) -> None:
    assert LlamaPromptLookupDecoding(2, 3)(np.array(ids, np.int32)).tolist() == guess


def test_bad_sizes() -> None:
    for sizes in ((0, 1), (1, 0)):
        with pytest.raises(ArgumentError):
            LlamaPromptLookupDecoding(*sizes)


def test_guesses_are_not_the_context(llama: OpenLlama) -> None:
    """Between two tokens only that counts as held which was given, and a saved state goes on with it."""
    plain = llama(sparsity="exact")
    prompt = plain.tokenize(PROMPT.encode())
    alone = list(islice(plain.generate(prompt, temp=0), 30))

    def guess(ids: Any, /, **kwargs: Any) -> Any:
        return np.array([*(prompt + alone)[len(ids) : len(ids) + 2], 7, 7, 7])

    guessing = llama(sparsity="exact", draft_model=guess)
    tokens, given, kept = guessing.generate(prompt, temp=0), [], 0
    for _ in range(12):
        given.append(next(tokens))
        assert guessing.input_ids[: guessing.n_tokens].tolist() == [*prompt, *given][:-1]
        kept += guessing.session.length() > guessing.n_tokens  # guesses that are still looked at later
        state = guessing.save_state()
        plain.load_state(state)
        assert plain.n_tokens == guessing.n_tokens and plain.sample(temp=0) == given[-1]
    assert given == alone[:12] and kept > 2
