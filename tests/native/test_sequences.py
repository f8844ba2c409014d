"""Sequences of a session: what is cut, copied, shifted, saved or mixed answers as if computed alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from powerinfer import ArgumentError, ContextError, FormatError, UnsupportedError
from powerinfer._engine.session import Model, Session
from tests import models, reference, rounding

BLOCK = 64
ONE_LAYER = replace(models.SPECS["llama-relu-gqa"], name="one-layer", n_layer=1, predictor=())
# The sums of a row do not depend on its neighbours, so an answer may only change with the kernels that
# computed it: one token, or a prompt. F16 K and V round both to the same 11 bits.
TOLERANCE = 1e-2 if rounding.BF16 else 2e-3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path = tmp_path_factory.mktemp("m") / "m.gguf"
    with Model(models.write_dense(path, models.SPECS["llama-relu-gqa"])) as m:
        yield m


def tokens(n: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(3, 291, n)]


def session(model: Model, **options: Any) -> Session:
    return Session(model, **{"n_ctx": 256, "n_threads": 1, **options})


def answer(model: Model, ids: list[int], **options: Any) -> np.ndarray[Any, Any]:
    """Logits after ids, in a session of their own, one token at a time."""
    with session(model, **options) as s:
        for t in ids:
            s.feed([t])
        return s.logits().copy()


def fed(s: Session, ids: list[int], seq: int = 0) -> np.ndarray[Any, Any]:
    for t in ids:
        s.feed([t], seq=seq)
    return s.logits().copy()


def test_same_input_same_bits(model: Model) -> None:
    ids = tokens(40)
    for n_threads in (1, 2, 3):
        runs = []
        for _ in range(3):
            with session(model, n_threads=n_threads) as s:
                s.feed(ids[:30])
                runs.append(fed(s, ids[30:]).tobytes())
        assert len(set(runs)) == 1


def test_exact_and_dense_give_the_same_bits(model: Model) -> None:
    ids = tokens(30)
    assert answer(model, ids, sparsity="exact").tobytes() == answer(model, ids, sparsity="dense").tobytes()


@pytest.mark.parametrize("n_batch", [1, 5, 64, 512])
def test_chunks_do_not_matter(model: Model, n_batch: int) -> None:
    ids = tokens(150)
    with session(model, n_batch=n_batch) as s:
        s.feed(ids, want_logits=True)
        rows = np.stack([s.logits(i) for i in range(150)])
        expected = reference.forward(reference.load(model.file.path), ids)
    assert reference.relative_error(rows, expected) < TOLERANCE


def test_sequences_in_one_batch(model: Model) -> None:
    """Three conversations, their tokens interleaved, as a server feeds them."""
    talks = [tokens(n, seed) for seed, n in enumerate((70, 5, 33))]
    with session(model, n_seq=3, n_pool=512) as s:
        order = [(i, q) for i in range(70) for q in range(3) if i < len(talks[q])]
        for at in range(0, len(order), 4):
            part = order[at : at + 4]
            s.feed([talks[q][i] for i, q in part], seq=[q for _, q in part], pos=[i for i, _ in part])
        lengths = [s.length(q) for q in range(3)]
        assert lengths == [70, 5, 33]
        # One step decodes all three.
        s.feed([7, 8, 9], seq=[0, 1, 2], want_logits=True)
        rows = [s.logits(i).copy() for i in range(3)]
    for q, row in enumerate(rows):
        assert reference.relative_error(row, answer(model, [*talks[q], 7 + q])) < TOLERANCE


@pytest.mark.parametrize("n_keep", [0, 1, 63, 64, 65, 100])
def test_cut_goes_back(model: Model, n_keep: int) -> None:
    ids, other = tokens(130), tokens(20, 1)
    with session(model) as s:
        fed(s, ids)
        s.cut(n_keep)
        assert s.length() == n_keep
        got = fed(s, other)
    assert got.tobytes() == answer(model, ids[:n_keep] + other).tobytes()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("n", [0, 1, 63, 64, 65, 100, 130])
def test_a_copy_shares_until_it_is_written(model: Model, n: int) -> None:
    ids, left, right = tokens(130), tokens(70, 1), tokens(70, 2)
    with session(model, n_seq=2, n_pool=512) as s:
        fed(s, ids)
        before = s.info.n_blocks_free
        s.copy(1, 0, n)
        assert s.info.n_blocks_free == before
        assert s.length(1) == n
        a, b = fed(s, left, 0), fed(s, right, 1)
        assert a.tobytes() == answer(model, ids + left).tobytes()
        assert b.tobytes() == answer(model, ids[:n] + right).tobytes()
        s.drop(0)
        assert fed(s, left[:9], 1).tobytes() == answer(model, ids[:n] + right + left[:9]).tobytes()
        s.drop(1)
        assert s.info.n_blocks_free == s.info.n_blocks


def test_a_cut_copy_writes_into_its_own_block(model: Model) -> None:
    """Cut back into the middle of a shared block, then grown: the other sequence must not notice."""
    ids, more = tokens(100), tokens(10, 1)
    with session(model, n_seq=2, n_pool=512) as s:
        fed(s, ids)
        s.copy(1, 0)
        s.cut(30, seq=1)
        assert fed(s, more, 1).tobytes() == answer(model, ids[:30] + more).tobytes()
        assert fed(s, more, 0).tobytes() == answer(model, ids + more).tobytes()


def test_full_is_said_before_anything_changes(model: Model) -> None:
    ids = tokens(40)
    with session(model, n_ctx=64, n_pool=128, n_seq=3) as s:
        s.feed(ids)
        with pytest.raises(ContextError, match="n_ctx is 64"):
            s.feed(tokens(25))
        assert s.length() == 40
        s.feed(tokens(24, 1), seq=1)
        with pytest.raises(ContextError, match="KV pool is full"):
            s.feed([5], seq=2)
        assert [s.length(q) for q in range(3)] == [40, 24, 0]
        more = tokens(3, 5)
        assert fed(s, more).shape == (model.info.n_vocab,)


def test_wrong_batches(model: Model) -> None:
    with session(model, n_seq=2) as s:
        s.feed([5, 6])
        for wrong in ([-1], [model.info.n_vocab]):
            with pytest.raises(ArgumentError, match="out of range"):
                s.feed(wrong)
        with pytest.raises(ArgumentError, match="does not continue"):
            s.feed([5], pos=[3])
        with pytest.raises(ArgumentError, match="sequence 2"):
            s.feed([5], seq=2)
        with pytest.raises(ArgumentError, match="at least one token"):
            s.feed([])
        assert s.length() == 2


@pytest.mark.parametrize(("n_keep", "n_drop"), [(0, 1), (1, 64), (4, 70), (64, 3), (100, 50), (0, 150)])
def test_shift_equals_having_been_there(tmp_path: Path, n_keep: int, n_drop: int) -> None:
    """With one layer, K and V depend only on their token and position: a shift can be checked exactly."""
    ids = tokens(150)
    model = Model(models.write_dense(tmp_path / "m.gguf", ONE_LAYER))
    with model, session(model, type_k="f32", type_v="f32", n_seq=2, n_pool=512) as s:
        fed(s, ids)
        s.copy(1, 0)
        s.shift(n_keep, n_drop)
        assert s.length() == 150 - n_drop
        got = fed(s, [9])
        kept = ids[:n_keep] + ids[n_keep + n_drop :]
        expected = reference.forward(reference.load(model.file.path), [*kept, 9])[-1]
        assert reference.relative_error(got, expected) < 1e-4
        # The copy has not moved.
        expected = reference.forward(reference.load(model.file.path), [*ids, 9])[-1]
        assert reference.relative_error(fed(s, [9], 1), expected) < 1e-4


def test_a_shift_copies_only_what_it_writes(model: Model) -> None:
    """A copied sequence shifts in a pool with room for the blocks it keeps, not for those it drops."""
    ids = tokens(256)
    with session(model, n_ctx=256, n_pool=320, n_seq=2) as s:
        s.feed(ids)
        s.copy(1, 0)
        assert s.info.n_blocks_free == 1
        with pytest.raises(ContextError, match="must copy shared blocks"):
            s.shift(0, 128, seq=1)
        s.shift(10, 200, seq=1)  # 56 positions stay, in one block
        assert (s.length(0), s.length(1), s.info.n_blocks_free) == (256, 56, 0)
        s.drop(0)
        s.shift(0, 56, seq=1)
        assert (s.length(1), s.info.n_blocks_free) == (0, 5)


def test_learned_positions_cannot_shift(tmp_path: Path) -> None:
    with Model(models.write_dense(tmp_path / "m.gguf", models.SPECS["opt"])) as model, session(model) as s:
        s.feed(tokens(20))
        with pytest.raises(UnsupportedError, match="learned positions"):
            s.shift(0, 5)
        with pytest.raises(ArgumentError, match="learned positions"):
            Session(model, n_ctx=model.info.n_ctx_train + 1)


@pytest.mark.parametrize("kv", ["f32", "f16", "q8_0"])
def test_state_comes_back(model: Model, tmp_path: Path, kv: str) -> None:
    ids, more = tokens(100), tokens(10, 1)
    spec = replace(models.SPECS["llama-relu-gqa"], name="wide-heads", n_embd=128, n_head=4)
    with (
        Model(models.write_dense(tmp_path / "m.gguf", spec)) as wide,
        session(wide, type_k=kv, type_v=kv) as s,
    ):
        fed(s, ids)
        state = s.save()
        expected = fed(s, more)
        with session(wide, type_k=kv, type_v=kv, n_seq=2, n_pool=512) as other:
            other.feed(tokens(5), seq=1)
            other.load(state, seq=1)
            assert other.length(1) == 100
            assert fed(other, more, 1).tobytes() == expected.tobytes()
            for broken in (
                b"",
                state[:30],
                state[:-1],
                state + b"x",
                b"X" + state[1:],
                state[:16] + b"\xff" * 8 + state[24:],
            ):
                with pytest.raises((FormatError, ContextError)):
                    other.load(broken, seq=1)
                assert other.length(1) == 110
        with session(model) as narrow, pytest.raises(FormatError):
            narrow.load(state)
        with session(wide, type_k=kv, type_v=kv, n_ctx=64) as short, pytest.raises(ContextError):
            short.load(state)


@pytest.mark.parametrize(("kv", "bound"), [("f32", 1e-3), ("f16", 2e-3), ("q8_0", 3e-2)])
def test_kv_types(tmp_path: Path, kv: str, bound: float) -> None:
    spec = replace(models.SPECS["llama-relu-gqa"], name="wide-heads", n_embd=128, n_head=4)
    ids = tokens(100)
    with Model(models.write_dense(tmp_path / "m.gguf", spec)) as model:
        expected = reference.forward(reference.load(model.file.path), ids)[-1]
        assert reference.relative_error(answer(model, ids, type_k=kv, type_v=kv), expected) < bound


def test_q8_heads_must_fit(tmp_path: Path) -> None:
    model = Model(models.write_dense(tmp_path / "m.gguf", models.SPECS["mistral"]))
    with model, pytest.raises(ArgumentError, match="head size"):
        Session(model, type_k="q8_0")


def test_sessions_side_by_side(model: Model) -> None:
    """Threads with sessions of their own on one model, and threads that share one session."""
    talks = [tokens(40, seed) for seed in range(4)]
    expected = [answer(model, t).tobytes() for t in talks]
    got: dict[int, bytes] = {}

    def work(i: int) -> None:
        for _ in range(3):
            got[i] = answer(model, talks[i]).tobytes()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert [got[i] for i in range(4)] == expected

    with session(model, n_seq=4, n_pool=1024) as shared:
        threads = [threading.Thread(target=fed, args=(shared, talks[i], i)) for i in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        for i in range(4):
            assert shared.length(i) == 40
            assert reference.relative_error(fed(shared, [11], i), answer(model, [*talks[i], 11])) < TOLERANCE


def test_handles_in_any_order(tmp_path: Path) -> None:
    model = Model(models.write_dense(tmp_path / "m.gguf", ONE_LAYER))
    s = session(model)
    model.close()
    model.file.close()
    s.feed([5, 6, 7])
    assert np.isfinite(s.logits()).all()
    s.close()
