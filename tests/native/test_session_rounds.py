"""Rounds choose what a feed and a choice of each would, one after the other, wherever logits are made."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from powerinfer._engine import _native
from powerinfer._engine.sampling import Sampler, Sampling
from powerinfer._engine.session import Model, Session
from powerinfer._engine.types import TokenKind
from tests import models
from tests.native import hybrid

ffi, lib = _native.ffi, _native.lib
FOREVER = 1 << 62
CUTS = ("all", "some", "mixed")
PROMPTS = ([5, 6, 7], [8, 9], [10, 11, 12, 13], [14])


def samplers(n: int, n_vocab: int) -> list[Sampler]:
    found = [Sampler(Sampling(temperature=1.0), n_vocab) for _ in range(n)]
    for i, sampler in enumerate(found):
        sampler.reset(i)
    return found


def begin(session: Session, n: int) -> list[int]:
    """Feeds n prompts, and returns the first token behind each."""
    found = []
    for seq, ids in enumerate(PROMPTS[:n]):
        session.drop(seq)
        session.feed(ids, seq=seq)
        found.append(int(session.logits().argmax()))
    return found


def struct(first: list[int], own: list[Sampler], most: int, **more: Any) -> tuple[Any, Any]:
    n = len(first)
    kept = [ffi.new("int32_t[]", first), ffi.new("int32_t[]", [*range(n)])]
    kept += [ffi.new("pi_sampler *[]", [s.handle for s in own]), ffi.new("int32_t[]", [-2] * (most * n))]
    fields = {"n": n, "most": most, "token": kept[0], "seq": kept[1], "sampler": kept[2], "chosen": kept[3]}
    return ffi.new("pi_rounds *", {"until_ns": FOREVER, **fields, **more}), [*kept, own]


def one_by_one(session: Session, n: int, most: int) -> tuple[list[list[int]], Any]:
    """Steps of feed(), and the logits of the last one."""
    tokens, own = begin(session, n), samplers(n, session.model.info.n_vocab)
    found = []
    for _ in range(most):
        tokens = session.feed(
            tokens, seq=[*range(n)], want_logits=[TokenKind.GENERATED] * n, rows=[*range(n)], samplers=own
        )
        found.append(tokens)
    return found, np.stack([session.logits(i) for i in range(n)])


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("where", ["llama-relu-gqa", *(f"llama-relu-gqa {s}" for s in CUTS), "gemma2 all"])
def test_what_is_chosen_and_left(tmp_path: Path, where: str, n: int) -> None:
    """On the CPU, and on a device with all of the model or some; Gemma 2 caps its logits."""
    name, _, split = where.partition(" ")
    path = hybrid.write(tmp_path, models.SPECS[name], "dense")
    with Model(path) as model:
        more: dict[str, Any] = {}
        if split:
            more = {"plan": hybrid.place(model, split, "dense"), "device": "host"}
        with Session(model, **hybrid.options("dense"), **more) as session:
            expected, logits = one_by_one(session, n, 9)
            first, own = begin(session, n), samplers(n, model.info.n_vocab)
            native, kept = struct(first, own, 9)
            session.run_rounds(native, n)
            assert native.state == 2 * 9 + 1 and lib.pi_rounds_wait(native, 9) == 9
            assert np.array_equal(np.reshape(ffi.unpack(kept[3], 9 * n), (9, n)), expected)
            assert np.array_equal([session.logits(i) for i in range(n)], logits)
            assert [session.length(seq) for seq in range(n)] == [len(ids) + 9 for ids in PROMPTS[:n]]


@pytest.fixture
def session(tmp_path: Path) -> Any:
    path = hybrid.write(tmp_path, models.SPECS["llama-relu-gqa"], "dense")
    with Model(path) as model, Session(model, **hybrid.options("dense")) as session:
        yield session


def test_what_ends_rounds(session: Session) -> None:
    expected, _ = one_by_one(session, 2, 9)
    n_vocab = session.model.info.n_vocab
    end = ffi.new("int32_t[]", [n_vocab, expected[3][1]])
    at = next(i for i, tokens in enumerate(expected) if expected[3][1] in tokens)
    for more, n_done in (
        ({"end": end, "n_end": 2}, at + 1),
        ({"stop": 1}, 1),
        ({"stop": 2}, 2),
        ({"until_ns": 0}, 1),
    ):
        native, kept = struct(begin(session, 2), samplers(2, n_vocab), 9, **more)
        session.run_rounds(native, 2)
        assert native.state == 2 * n_done + 1
        chosen = ffi.unpack(kept[3], 18)
        assert chosen == [token for tokens in expected[:n_done] for token in tokens] + [-2] * (
            18 - 2 * n_done
        )


def test_a_round_that_fails_leaves_those_before(session: Session) -> None:
    """The sequence is full."""
    expected, _ = one_by_one(session, 1, 9)
    native, kept = struct(begin(session, 1), samplers(1, session.model.info.n_vocab), 200)
    with pytest.raises(_native._ERRORS[6], match="full"):
        session.run_rounds(native, 1)
    n_done = hybrid.N_CTX - len(PROMPTS[0])
    assert native.state == 2 * n_done + 1
    assert ffi.unpack(kept[3], 9) == [token for (token,) in expected]
    assert kept[3][n_done - 1] >= 0 and kept[3][n_done] == -2
    assert session.logits().shape == (session.model.info.n_vocab,)


def test_a_choice_that_fails_is_the_last(session: Session) -> None:
    """Nothing is left to choose from."""
    n_vocab = session.model.info.n_vocab
    own = samplers(2, n_vocab)
    own[1] = Sampler(Sampling(temperature=1.0), n_vocab, logit_bias=dict.fromkeys(range(n_vocab), -np.inf))
    native, kept = struct(begin(session, 2), own, 9)
    session.run_rounds(native, 2)
    assert native.state == 3 and kept[3][0] >= 0 and kept[3][1] == -1


def test_who_waits_is_told_of_each(session: Session) -> None:
    seen, native = [], None
    native, kept = struct(begin(session, 2), samplers(2, session.model.info.n_vocab), 9)

    def wait() -> None:
        while not seen or seen[-1] < 9:
            seen.append(lib.pi_rounds_wait(native, seen[-1] if seen else 0))

    waiting = threading.Thread(target=wait)
    waiting.start()
    session.run_rounds(native, 2)
    waiting.join()
    assert seen == sorted(set(seen)) and seen[-1] == 9
    assert kept
