"""Attention over long contexts: positions cut into parts, on any number of threads, as float64 has it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from powerinfer._engine.session import Model, Session
from tests import models, other_isa, reference, rounding

ISAS = ("scalar", "avx2", "avx2_vnni", "avx512", "avx512_bf16", "amx", "neon", "neon_dot")
# Every query head its own KV head; four to one; all 24 to one; and with sinks.
SPECS = {
    name: models.Spec(f"long-{name}", family, n_layer=1, n_embd=64, n_head=n, n_head_kv=kv, n_ff=64, **more)
    for name, family, n, kv, more in (
        ("mha", "mistral", 4, 4, {}),
        ("gqa", "mistral", 8, 2, {"head_dim": 32}),
        ("mqa", "mistral", 24, 1, {"head_dim": 16}),
        ("sinks", "gpt-oss", 8, 2, {"head_dim": 32, "n_expert": 4, "n_used": 2, "n_ff_expert": 64}),
    )
}
N = 1100
# Where blocks of 64 and parts of 256 positions and more begin and end.
LENGTHS = (1, 2, 63, 64, 65, 255, 256, 257, 511, 512, 513, 575, 576, 768, 1023, 1024, 1025, 1090)
# Rounding of K and V to F16 is common to all; AMX rounds what a prompt's products take to bf16.
TOLERANCE = 1e-2 if rounding.BF16 else 2e-3


def tokens() -> list[int]:
    return [int(t) for t in np.arange(7, 7 + N) * 53 % 320]


@pytest.fixture(scope="module", params=SPECS)
def case(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Model, Any]]:
    """A model and the logits of every position."""
    path = models.write_dense(tmp_path_factory.mktemp("m") / "m.gguf", SPECS[request.param])
    with Model(path) as model:
        yield model, reference.forward(reference.load(path), tokens())


def decoded(session: Session, lengths: Any, seq: int = 0) -> list[Any]:
    """Logits after the last token of each length: that token is fed alone, those before as a prompt."""
    ids, rows = tokens(), []
    for n in lengths:
        held = session.length(seq)
        if n - 1 > held:
            session.feed(ids[held : n - 1], seq=[seq] * (n - 1 - held))
        session.feed([ids[n - 1]], seq=[seq])
        rows.append(session.logits().copy())
    return rows


@pytest.mark.parametrize("n_threads", [1, 2, 3, 16])
@pytest.mark.parametrize("type_kv", ["f16", "f32"])
def test_one_token_sees_every_part(case: tuple[Model, Any], n_threads: int, type_kv: Any) -> None:
    model, expected = case
    with Session(model, n_ctx=N, n_threads=n_threads, type_k=type_kv, type_v=type_kv) as session:
        rows = decoded(session, LENGTHS)
    for n, row in zip(LENGTHS, rows, strict=True):
        assert reference.relative_error(row, expected[n - 1]) < TOLERANCE, n


def test_kv_in_8_bits(tmp_path: Path) -> None:
    path = models.write_dense(tmp_path / "m.gguf", SPECS["gqa"])
    expected = reference.forward(reference.load(path), tokens())
    with Model(path) as model, Session(model, n_ctx=N, n_threads=3, type_k="q8_0", type_v="q8_0") as session:
        rows = decoded(session, LENGTHS)
    for n, row in zip(LENGTHS, rows, strict=True):
        assert reference.relative_error(row, expected[n - 1]) < 2e-2, n


@pytest.mark.parametrize("n_new", [2, 5, 17, 130])
def test_several_tokens_after_many(case: tuple[Model, Any], n_new: int) -> None:
    """Later tokens of a run see more than earlier ones, also where its positions are cut into parts."""
    model, expected = case
    ids = tokens()
    for held in (255, 700, 960):
        with Session(model, n_ctx=N, n_threads=3) as session:
            session.feed(ids[:held])
            session.feed(ids[held : held + n_new], want_logits=True)
            for i in range(n_new):
                error = reference.relative_error(session.logits(i), expected[held + i])
                assert error < TOLERANCE, (held, i)


@pytest.mark.parametrize("n_threads", [1, 3])
def test_together_as_alone(case: tuple[Model, Any], n_threads: int) -> None:
    """Sequences of any length that decode in one step get the bits that they get by themselves."""
    model, _ = case
    ids, lengths = tokens(), (40, 1024, 513)
    alone = []
    for n in lengths:
        with Session(model, n_ctx=N, n_threads=n_threads, sparsity="dense") as session:
            session.feed(ids[: n - 1])
            session.feed([ids[n - 1]])
            alone.append(session.logits().tobytes())
    options = {"n_ctx": N, "n_pool": 3 * 1152, "n_seq": 3, "n_threads": n_threads, "sparsity": "dense"}
    with Session(model, **options) as session:
        for seq, n in enumerate(lengths):
            session.feed(ids[: n - 1], seq=[seq] * (n - 1))
        session.feed([ids[n - 1] for n in lengths], seq=[0, 1, 2], want_logits=True)
        assert [session.logits(i).tobytes() for i in range(3)] == alone


def test_more_sequences_than_there_is_room_for_parts(case: tuple[Model, Any]) -> None:
    """Thirty sequences share a prefix; each goes on with a token of its own, and one with two tokens."""
    model, expected = case
    ids, held, n_seq = tokens(), 900, 30
    with Session(model, n_ctx=N, n_pool=N + 30 * 128, n_seq=n_seq, n_threads=3) as session:
        session.feed(ids[:held])
        lengths = [held - 13 * i for i in range(n_seq)]
        for seq in range(1, n_seq):
            session.copy(seq, 0, lengths[seq])
        order = [*range(n_seq), 4]
        at = [*lengths, lengths[4] + 1]
        session.feed([ids[n] for n in at], seq=order, pos=at, want_logits=True)
        for i, n in enumerate(at):
            assert reference.relative_error(session.logits(i), expected[n]) < TOLERANCE, (i, n)


def test_a_shifted_context(tmp_path: Path) -> None:
    """After a shift the parts are cut anew, on any number of threads."""
    path = models.write_dense(tmp_path / "m.gguf", SPECS["gqa"])
    rows = []
    with Model(path) as model:
        for n_threads in (1, 16):
            with Session(model, n_ctx=N, n_threads=n_threads) as session:
                session.feed(tokens()[:1000])
                session.shift(n_keep=4, n_drop=300)
                rows.append(np.stack([decode(session, t) for t in range(20)]))
    assert reference.relative_error(rows[1], rows[0]) < TOLERANCE


def decode(session: Session, token: int) -> Any:
    session.feed([token])
    return session.logits().copy()


def test_memory_does_not_grow_with_the_context(case: tuple[Model, Any]) -> None:
    """Scores are held for a span of positions: the buffers of a step are the same for any n_ctx."""
    model, _ = case
    work = []
    for n_ctx in (32768, 65536):
        with Session(model, n_ctx=n_ctx, n_threads=4) as session:
            work.append(session.info.n_work_bytes)
    assert work[0] == work[1]


@pytest.mark.slow
@pytest.mark.skipif("POWERINFER_ISA" in os.environ, reason="one instruction set was asked for")
@pytest.mark.parametrize("isa", ISAS)
def test_every_instruction_set(isa: str) -> None:
    other_isa.run(isa, __file__)


def test_bytes_of_k_and_v(case: tuple[Model, Any]) -> None:
    """A token reads all positions before it; a prompt's tokens that are taken together read them once."""
    model, _ = case
    info = model.info
    of_a_position = 2 * 2 * info.n_head_kv * info.n_embd_head  # F16
    read = {}
    with Session(model, n_ctx=N, n_threads=2, n_batch=512) as session:
        for n in (512, 1):
            session.feed(tokens()[:n])
            step = session.last_step[0]
            read[n] = step.bytes - step.ffn_bytes
        session.feed(tokens()[:1])
        last = session.last_step[0]
    assert last.bytes - last.ffn_bytes - read[1] == of_a_position
    weights = read[1] - 513 * of_a_position
    assert weights > 0
    assert 512 * of_a_position <= read[512] - weights < 512 * 513 // 2 * of_a_position // 2
