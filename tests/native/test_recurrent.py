"""Models with recurrent layers: how their sequences are fed, shared, cut, saved and gone on with.

That they answer as transformers does is test_logits.py's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from powerinfer import ArgumentError, FormatError, Llama, UnsupportedError
from powerinfer._engine.session import Model, Session
from powerinfer._engine.types import TokenKind
from tests import models, reference, rounding

NAMES = sorted(name for name, spec in models.SPECS.items() if spec.layers)
CHOSEN = [name if name == "lfm2" else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
"""One in the default run; what differs between kinds of blocks is in one test of all below."""
GENERATED, PROMPT = TokenKind.GENERATED, TokenKind.PROMPT


@pytest.fixture(scope="module", params=CHOSEN)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path = tmp_path_factory.mktemp("m") / "m.gguf"
    with Model(models.write_dense(path, models.SPECS[request.param])) as m:
        yield m


def tokens(n: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(3, 291, n)]


def session(model: Model, **options: Any) -> Session:
    return Session(model, **{"n_ctx": 256, "n_threads": 2, **options})


def fed(s: Session, ids: list[int], seq: int = 0) -> bytes:
    """The logits behind ids, which are fed one by one."""
    for t in ids:
        s.feed([t], seq=seq)
    return s.logits().tobytes()


def answer(model: Model, prompt: list[int], more: list[int], **options: Any) -> bytes:
    """The logits behind a prompt and generated tokens, in a session of their own."""
    with session(model, **options) as s:
        s.feed(prompt)
        return fed(s, more) if more else s.logits().tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_bits_of_a_token(name: str, tmp_path: Path) -> None:
    """They depend neither on where a prompt is cut, nor on other sequences, nor on the order of a batch."""
    ids, other, more = tokens(93), tokens(50, 1), tokens(5, 2)
    with Model(models.write_dense(tmp_path / "m.gguf", models.SPECS[name])) as m:
        expected = answer(m, ids, more)
        for cuts in ((16,), (40, 64), (24, 48, 72)):
            with session(m, n_seq=3, n_pool=768) as s:
                s.feed(other, seq=2)
                for a, b in zip((0, *cuts), (*cuts, len(ids)), strict=True):
                    kinds = [GENERATED if i + 1 == len(ids) else PROMPT for i in range(a, b)]
                    s.feed([*ids[a:b], other[0]], seq=[0] * (b - a) + [2], want_logits=[*kinds, GENERATED])
                for i, t in enumerate(more):
                    s.feed([other[i], t, other[-1]], seq=[1, 0, 2], want_logits=[GENERATED] * 3)
                assert s.logits(1).tobytes() == expected
        with session(m, n_seq=2, n_pool=512) as s:  # two prompts, their tokens by turns
            turns = [(t, q) for pair in zip(ids[:48], other[:48], strict=True) for q, t in enumerate(pair)]
            s.feed([t for t, _ in turns], seq=[q for _, q in turns], want_logits=[PROMPT] * 96)
            s.feed(ids[48:])
            assert fed(s, more) == expected
        for n_batch in (32, 64):
            assert answer(m, ids, more, n_batch=n_batch) == expected


@pytest.mark.parametrize("name", ["nemotron_h", "nemotron_h_moe"])
def test_exact_is_dense(name: str, tmp_path: Path) -> None:
    """Bit for bit, of squared ReLU; what silent neurons leave out are rows of down that are not experts'."""
    answers, n_rows = [], []
    with Model(models.write_dense(tmp_path / "m.gguf", models.SPECS[name])) as m:
        assert m.info.can_skip_down == (name == "nemotron_h")  # beside layers without a feed-forward
        for sparsity in ("auto", "dense"):
            with session(m, sparsity=sparsity) as s:
                s.feed(tokens(20))
                answers.append(fed(s, tokens(5, 1)))
                n_rows.append(sum(step.n_rows for step in s.last_step))
    assert answers[0] == answers[1]
    assert n_rows[0] < n_rows[1] if name == "nemotron_h" else n_rows[0] == n_rows[1]


@pytest.mark.parametrize("n_threads", [1, 3])
def test_same_input_same_bits(model: Model, n_threads: int) -> None:
    runs = {answer(model, tokens(40), tokens(4, 1), n_threads=n_threads) for _ in range(3)}
    assert len(runs) == 1


def test_sequences_go_back_to_checkpoints(model: Model) -> None:
    ids, more, other = tokens(60), tokens(20, 1), tokens(9, 2)
    with session(model) as s:
        s.feed(ids)
        fed(s, more)
        # Matrix products take the prompt's first 59 tokens, the last is computed as a generated one.
        for n, reachable in ((80, 80), (79, 59), (60, 59), (59, 59), (58, 0), (0, 0)):
            assert s.reachable(n) == reachable
        for n in (79, 60, 58, 1):
            with pytest.raises(UnsupportedError, match=r"can go back to (59|0) only"):
                s.cut(n)
        with pytest.raises(ArgumentError, match="which has 80"):
            s.cut(81)
        with pytest.raises(ArgumentError):
            s.reachable(-1)
        assert s.length() == 80
        s.cut(59)
        assert s.reachable(58) == 0
        s.feed(ids[59:], want_logits=[GENERATED])
        assert fed(s, other) == answer(model, ids, other)
        s.drop()
        s.feed(ids[:40])
        assert fed(s, other) == answer(model, ids[:40], other)
        assert s.reachable(47) == 39  # the checkpoint of what was dropped is none


def test_guesses_are_taken_back(model: Model) -> None:
    """A feed of several generated tokens begins with a checkpoint, and each has the bits it has alone."""
    ids, more = tokens(41), tokens(6, 1)
    with session(model) as s:
        s.feed(ids)
        fed(s, more[:2])
        for right in (1, 2, 3):
            s.feed([*more[2 : 2 + right], 7, 8], want_logits=[GENERATED] * (right + 2))
            assert s.reachable(43 + right) == 43
            s.cut(43)
        s.feed(more[2:], want_logits=[GENERATED] * 4)
        assert s.logits(3).tobytes() == answer(model, ids, more)
        assert s.reachable(44) == 43
        s.feed([5, 6], want_logits=[GENERATED] * 2)
        assert s.reachable(48) == 47
        assert s.reachable(46) == 40  # which took the place of the guess before it, not the prompt's


def test_sequences_go_back_to_between_guesses(model: Model) -> None:
    """Where there are places for the states behind them: of the last tokens, of all sequences together."""
    ids, more, wrong = tokens(41), tokens(8, 1), [7, 8, 9]
    with session(model, n_seq=2, n_pool=512, n_guesses=3) as s:
        assert s.info.n_kv_bytes >= (6 + 3) * model.info.n_state_bytes
        for right in (0, 1, 2, 3):  # of three guesses behind the token that was chosen
            s.drop()
            s.feed(ids)
            s.feed([*more[: right + 1], *wrong[right:]], want_logits=[GENERATED] * 4)
            assert [s.reachable(n) for n in (41, 42, 43, 44, 45)] == [40, 42, 43, 44, 45]
            s.cut(42 + right)
            s.feed(more[right + 1 :], want_logits=[GENERATED] * (7 - right))
            assert s.logits(6 - right).tobytes() == answer(model, ids, more)
        # More tokens than places: the last ones have them, and there is a checkpoint at the beginning.
        s.drop()
        s.feed(ids)
        s.feed([*more[:3], *wrong], want_logits=[GENERATED] * 6)
        assert [s.reachable(n) for n in (41, 43, 44, 45, 46)] == [41, 41, 44, 45, 46]
        s.cut(44)
        assert fed(s, more[3:]) == answer(model, ids, more)
        # Two sequences, side by side; a place is taken from an earlier feed alone.
        s.drop()
        for q in (0, 1):
            s.feed(ids, seq=q)
        s.feed([more[0], more[0], 7, 8, more[1]], seq=[0, 1, 0, 0, 1], want_logits=[GENERATED] * 5)
        assert [s.reachable(n, seq=0) for n in (42, 43)] == [42, 43] and s.reachable(42, seq=1) == 42
        s.cut(42)
        s.feed([more[1], 8], want_logits=[GENERATED] * 2)
        s.cut(43)
        assert fed(s, more[2:]) == answer(model, ids, more)
        assert fed(s, more[2:], 1) == answer(model, ids, more)


def test_copies(model: Model) -> None:
    ids, left, right = tokens(60), tokens(12, 1), tokens(12, 2)
    with session(model, n_seq=3, n_pool=768) as s:
        s.feed(ids)
        s.copy(1, 0)
        a, b = fed(s, left, 0), fed(s, right, 1)
        assert a == answer(model, ids, left)
        assert b == answer(model, ids, right)
        s.copy(2, 0, 59)
        with pytest.raises(UnsupportedError, match="cannot copy 58"):
            s.copy(2, 0, 58)
        assert s.length(2) == 59
        s.feed(ids[59:], seq=2, want_logits=[GENERATED])
        assert fed(s, right, 2) == b
        assert s.reachable(60, seq=1) == 0  # a copy has none of the other's checkpoints
        s.copy(0, 0, 59)
        assert s.length(0) == 59


def test_the_oldest_checkpoint_gives_way(model: Model) -> None:
    ids = tokens(200)
    with session(model, n_batch=32) as s:
        s.feed(ids)
        assert [s.reachable(n) for n in (199, 198, 191, 159)] == [199, 192, 0, 0]
        assert s.info.n_kv_bytes >= 3 * model.info.n_state_bytes


def test_saved_states(model: Model) -> None:
    ids, more = tokens(45), tokens(7, 1)
    with session(model) as s:
        s.feed(ids)
        saved = s.save()
        expected = fed(s, more)
        fed(s, tokens(30, 3))
        s.load(saved)
        assert (s.length(), s.reachable(44)) == (45, 0)
        assert fed(s, more) == expected
        s.drop()
        assert len(s.save()) < 100
        s.load(s.save())
        with pytest.raises(FormatError):
            s.load(saved[:-4])
    with session(model, n_seq=2, n_pool=512) as s:
        s.load(saved, seq=1)
        assert fed(s, more, 1) == expected


def test_the_context_is_not_shifted(model: Model) -> None:
    with session(model) as s:
        s.feed(tokens(40))
        with pytest.raises(UnsupportedError, match="recurrent layers"):
            s.shift(4, 10)
        assert s.length() == 40


def generated(llm: Llama, prompt: list[int], n: int, **options: Any) -> list[int]:
    steps = llm.generate(prompt, temp=0.0, repeat_penalty=1.0, **options)
    return [token for token, _ in zip(steps, range(n), strict=False)]


def test_prefixes_and_guesses_change_no_answer(model: Model) -> None:
    """A conversation's next turn, the same prompt again, an edited one; a draft that is wrong at times."""
    first, path = tokens(70), model.file.path

    def opened(**options: Any) -> Llama:
        return Llama(path, n_ctx=256, n_threads=2, verbose=False, **options)

    with opened() as llm:
        told = generated(llm, first, 20)
        prompts = [first, first + told + tokens(20, 1), first[:66] + tokens(30, 2), first]
        answers = []
        for prompt in prompts:
            llm.reset()
            answers.append(generated(llm, prompt, 12))
    with opened() as llm:
        generated(llm, first, 20)
        assert [generated(llm, prompt, 12) for prompt in prompts] == answers
    calls = iter(range(1000))

    def draft(ids: Any, **_: Any) -> Any:
        at, i = len(ids) - len(first), next(calls)
        return np.array(told[at : at + i % 4] + [5] * (i % 3), np.int32)

    with opened(draft_model=draft) as llm:
        assert generated(llm, first, 20) == told


def test_a_long_prompt(tmp_path: Path) -> None:
    """Pieces of attention are dealt from a counter, which each layer resets for the next, also where it does
    not attend."""
    spec = replace(models.SPECS["lfm2"], name="lfm2-long", n_layer=6, n_ctx=512, layers="rarara")
    ids = tokens(420)
    with Model(models.write_dense(tmp_path / "m.gguf", spec)) as m:
        rows = [answer(m, ids, [], n_ctx=512, n_batch=n) for n in (512, 32)]
    assert rows[0] == rows[1]
    row = np.frombuffer(rows[0], np.float32)
    expected = reference.forward(reference.load(tmp_path / "m.gguf"), ids)[-1]
    assert reference.relative_error(row, expected) < (4e-2 if rounding.BF16 else 2e-3)


def test_a_full_context_is_computed_anew(model: Model) -> None:
    """What a shift keeps is a prompt like any other."""
    prompt = tokens(50)
    with Llama(model.file.path, n_ctx=64, n_threads=2, verbose=False, n_keep=8, context_shift=True) as llm:
        told = generated(llm, prompt, 30)
        assert len(told) == 30
        # The context was full with 64 tokens, of which the first 8 and the younger half of the others stayed.
        held = (prompt + told)[:65]
        kept = held[:8] + held[8 + 28 :]
        # The last but one passes a product of a prompt here, of a token there: they differ most in bf16.
        n = 5 if rounding.BF16 else 10
        with Llama(model.file.path, n_ctx=64, n_threads=2, verbose=False) as other:
            assert generated(other, kept, n) == told[15 : 15 + n]
