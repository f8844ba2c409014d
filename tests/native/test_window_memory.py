"""K and V of layers with a window: what lies behind it is given back, and nothing else changes.

A session with chunks of 64 tokens holds the window and 64 positions more; one whose chunks are as long as its
context never gives anything back. Fed alike, both must give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from powerinfer import ContextError, FormatError, UnsupportedError
from powerinfer._engine.session import Model, Session
from powerinfer.models.plan import engine as plans
from tests.native.test_windows import SPEC, WINDOW, N, tokens, write

PART = 64
KEPT = WINDOW + PART
OF_A_BLOCK = 64 * 2 * 2 * SPEC.n_head_kv * SPEC.d_head  # K and V, F16
BLOCKS = (N + 63) // 64
NEAR_BLOCKS = (KEPT + 63) // 64 + 1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    with Model(write(tmp_path_factory.mktemp("m") / "m.gguf")) as model:
        yield model


def small(model: Model, **options: Any) -> Session:
    return Session(model, **({"n_ctx": N, "n_threads": 2, "n_batch": PART} | options))


def whole(model: Model, **options: Any) -> Session:
    return small(model, n_batch=N + 4, **options)


def feed(session: Session, ids: list[int], seq: int = 0) -> bytes:
    """The logits of the last one; the others are a prompt's."""
    for at in range(0, len(ids), PART):
        session.feed(ids[at : at + PART], seq=seq)
    return session.logits().tobytes()


@pytest.mark.parametrize("n_seq", [1, 3])
def test_memory(model: Model, n_seq: int) -> None:
    n_pool = n_seq * 704
    with small(model, n_seq=n_seq, n_pool=n_pool) as session:
        assert session.info.n_window == KEPT
        assert session.info.n_kv_bytes == (5 * NEAR_BLOCKS + BLOCKS) * n_seq * OF_A_BLOCK
    with whole(model, n_seq=n_seq, n_pool=n_pool) as session:
        assert session.info.n_kv_bytes == 6 * BLOCKS * n_seq * OF_A_BLOCK
    with small(model, n_seq=3) as session:  # one sequence's worth for three
        assert session.info.n_kv_bytes == (5 * min(3 * NEAR_BLOCKS, BLOCKS) + BLOCKS) * OF_A_BLOCK
    with small(model, n_ctx=WINDOW) as session:
        assert session.info.n_window == 0


def test_a_plan_counts_it(model: Model) -> None:
    fast = plans.Rates(cpu_bytes_per_s=1e6)

    def bytes_of(n_batch: int) -> list[int]:
        asked = plans.Settings(
            budget_bytes=1 << 34, n_ctx=N, n_pool=704, n_batch=n_batch, sparsity="dense", overhead_bytes=0
        )
        return [layer.kv_bytes for layer in plans.compute(model, asked, fast).layers]

    assert bytes_of(PART) == [NEAR_BLOCKS * OF_A_BLOCK] * 5 + [BLOCKS * OF_A_BLOCK]
    assert bytes_of(704) == [BLOCKS * OF_A_BLOCK] * 6


def test_a_state_has_what_is_held(model: Model) -> None:
    ids = tokens()
    with small(model) as near, whole(model) as far:
        for session in (near, far):
            feed(session, ids[:500])
        state, all_of_it = near.save(), far.save()
        held = (500 - KEPT) // 64 * 64
        assert len(all_of_it) - len(state) == 5 * held * OF_A_BLOCK // 64
        expected = feed(far, ids[500:600])
        for session, loaded in ((near, all_of_it), (far, state), (near, state)):
            session.drop()
            session.load(loaded)
            assert session.length() == 500
            assert feed(session, ids[500:600]) == expected
        far.drop()
        far.load(state)  # it never gives anything back, but has not got what the state lacks
        assert far.reachable(500) == 500
        assert far.reachable(held + WINDOW - 2) == 0
        assert int.from_bytes(state[36:40], "little") == held
        for wrong in (held + 1, held - 64, 2**31):
            with pytest.raises(FormatError):
                near.load(state[:36] + wrong.to_bytes(4, "little") + state[40:])
        with small(model, n_ctx=WINDOW) as short, pytest.raises(ContextError):
            short.load(state)
        assert near.length() == 600


def test_how_far_back(model: Model) -> None:
    ids = tokens()
    two = {"n_seq": 2, "n_pool": 1408}
    with small(model, **two) as near, whole(model, **two) as far:
        feed(near, ids[:500])
        feed(far, ids[:500])
        held = (500 - KEPT) // 64 * 64
        least = held + WINDOW - 1  # whose next token sees positions from `held` on
        assert [near.reachable(n) for n in (0, 1, least - 1, least, 500, 600)] == [0, 0, 0, least, 500, 500]
        for act in (near.cut, lambda n: near.copy(1, 0, n)):
            with pytest.raises(UnsupportedError, match=f"hold those from position {held} on"):
                act(least - 1)
        assert near.length() == 500
        for session in (near, far):
            session.copy(1, 0, least)
            session.cut(least)
        assert feed(near, ids[least:501]) == feed(far, ids[least:501])
        assert feed(near, ids[least:601], seq=1) == feed(far, ids[least:601], seq=1)


@pytest.mark.parametrize(
    ("n", "keep", "drop"), [(300, 0, 64), (500, 64, 201), (500, 200, 77), (600, 5, 450), (600, 5, 512)]
)
def test_a_shift(model: Model, n: int, keep: int, drop: int) -> None:
    """Blocks move by their numbers, and what is left within them; or as elsewhere, where all is held."""
    ids = tokens()
    with small(model) as near, whole(model) as far:
        answers = []
        for session in (near, far):
            feed(session, ids[:n])
            if session is near and n - drop + 1 - WINDOW < (keep + 63) // 64 * 64:
                with pytest.raises(UnsupportedError, match=f"see the last {WINDOW}"):
                    session.shift(keep, drop)
                assert session.length() == n
                return
            session.shift(keep, drop)
            answers.append(feed(session, ids[n : n + 90]))
            answers.append(feed(session, ids[3:4]))
        assert answers[:2] == answers[2:]


def test_a_shift_while_all_is_held(model: Model) -> None:
    ids = tokens()
    with small(model) as near, whole(model) as far:
        answers = []
        for session in (near, far):
            feed(session, ids[:130])
            session.shift(3, 20)
            answers.append(feed(session, ids[130:140]))
        assert answers[0] == answers[1]


def act_at_random(model: Model, seed: int, n_steps: int) -> None:
    """What one session does the other does, too; both hold the same bits whatever came before."""
    rng = np.random.default_rng(seed)
    n_seq = 4
    with small(model, n_seq=n_seq) as near, whole(model, n_seq=n_seq) as far:
        for _ in range(n_steps):
            what, seq, other = (
                rng.choice(["feed", "cut", "copy", "shift", "load"]),
                *rng.integers(0, n_seq, 2),
            )
            held = near.length(seq)
            assert held == far.length(seq)
            n = int(rng.integers(0, held + 1))
            try:
                if what == "feed":
                    ids = rng.integers(0, SPEC.n_vocab, min(int(rng.integers(1, 200)), N - held)).tolist()
                    if ids:
                        assert feed(near, ids, int(seq)) == feed(far, ids, int(seq))
                elif what in ("cut", "copy"):
                    n = near.reachable(n, seq=int(seq))
                    for session in (near, far):
                        session.cut(n, seq=int(seq)) if what == "cut" else session.copy(
                            int(other), int(seq), n
                        )
                elif what == "shift" and n < held:
                    near.shift(n, int(rng.integers(1, held - n + 1)), seq=int(seq))
                    drop = held - near.length(int(seq))
                    far.shift(n, drop, seq=int(seq))
                elif what == "load":
                    for session in (near, far):
                        session.load(session.save(seq=int(seq)), seq=int(other))
            except UnsupportedError:
                pass
            except ContextError:  # in the middle of a feed, of one of them first: both begin anew
                for session in (near, far):
                    for i in range(n_seq):
                        session.drop(i)
            for i in range(n_seq):
                if near.length(i) != far.length(i):
                    pytest.fail(f"{what}: {near.length(i)} and {far.length(i)} positions")
        for session in (near, far):
            for i in range(n_seq):
                session.drop(i)
            assert session.info.n_blocks_free == session.info.n_blocks


def test_at_random(model: Model) -> None:
    act_at_random(model, 0, 40)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 21))
def test_more_at_random(model: Model, seed: int) -> None:
    act_at_random(model, seed, 120)


@pytest.mark.parametrize("split", ["all", "layers"])
def test_on_a_device(model: Model, split: str) -> None:
    check_on_device(model, "host", split)


def check_on_device(model: Model, device: str, split: str) -> None:
    """The same operations there: sums are in another order, so the answers are near, not the same."""
    ids = tokens()

    def drive(session: Session) -> list[Any]:
        out = []
        feed(session, ids[:500])
        session.copy(1, 0, 480)
        feed(session, ids[480:560], seq=1)
        session.feed([ids[500], ids[560]], seq=[0, 1], want_logits=True)
        out += [session.logits(0).copy(), session.logits(1).copy()]
        session.shift(9, 300)
        feed(session, ids[:30])
        out.append(session.logits().copy())
        session.load(session.save(seq=1), seq=0)
        session.feed([7])
        return [*out, session.logits().copy()]

    sizes = {"n_seq": 2, "n_pool": 1408, "sparsity": "dense"}
    asked = plans.Settings(
        budget_bytes=1 << 34,
        n_ctx=N,
        n_pool=1408,
        n_seq=2,
        n_batch=PART,
        sparsity="dense",
        overhead_bytes=0,
        group=1,
    )
    on = [split == "all" or i % 2 == 0 for i in range(SPEC.n_layer)]
    ids_on = [np.arange(SPEC.n_ff if one else 0, dtype=np.int32) for one in on]
    none = [np.arange(0, dtype=np.int32)] * SPEC.n_layer
    plan = plans.native_plan(
        model, asked, plans.Rates(), on_device=on, hot=ids_on, pcie=none, head_on_device=split == "all"
    )
    with small(model, **sizes) as alone, small(model, plan=plan, device=device, **sizes) as hybrid:
        for a, b in zip(drive(alone), drive(hybrid), strict=True):
            assert np.linalg.norm(a - b) < 1e-2 * np.linalg.norm(a)
