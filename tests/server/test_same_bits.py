"""A request gets the logits of running alone, bit for bit: beside others, behind a prefix that it shares,
however its prompt was cut. On every instruction set of this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType as Kind

from powerinfer import Llama, LogitsProcessorList
from powerinfer._engine.embedding import hidden_states
from powerinfer._engine.engine import Engine
from powerinfer._engine.scheduler import Scheduler, Stream
from powerinfer._engine.session import Model, Session, TokenKind
from tests import models, other_isa
from tests.server.scheduling import choice

ISAS = ("scalar", "avx2", "avx2_vnni", "avx512", "avx512_bf16", "amx", "neon", "neon_dot")
SPEC = replace(models.SPECS["llama-relu"], name="wide", n_embd=256, n_head=8, n_ff=512, n_ctx=1024)
GROUPS = replace(SPEC, name="groups", n_head_kv=1, n_ff=768)
CASES = [
    (SPEC, None, "dense"),
    (SPEC, Kind.Q8_0, "exact"),
    (SPEC, Kind.Q4_0, "predicted"),
    (SPEC, None, "predicted"),
    (GROUPS, Kind.F16, "exact"),
    (GROUPS, Kind.BF16, "predicted"),
    (GROUPS, Kind.Q4_1, "dense"),
    (replace(models.SPECS["falcon-7b"], n_ctx=1024), None, "predicted"),
    (replace(models.SPECS["opt"], n_ctx=1024), Kind.Q8_0, "predicted"),
]
LENGTHS = (1, 2, 6, 8, 9, 10, 15, 17, 18, 24, 25, 40, 65, 72, 129, 200, 301)

Ids = npt.NDArray[np.int32]
each_case = pytest.mark.parametrize("spec, kind, sparsity", CASES)


def write(path: Path, spec: models.Spec, kind: Kind | None) -> Path:
    return models.write_sparse(path / "m.gguf", spec, models.draw_predictor(spec), kind=kind)


def prompt(n: int, seed: int = 0) -> Ids:
    return np.random.default_rng(seed).integers(3, 290, n).astype(np.int32)


# -- one session


def cut(rng: np.random.Generator, first: int, n: int, most: int) -> int:
    """Where a part of a prompt of n tokens may end, so that it has the values that it has whole."""
    last = n - 1
    ends = [end for end in range(first + 16, last + 1) if end == last or last - end >= 16]
    return int(rng.choice([end for end in ends if end - first <= most] or ends or [n]))


def rows_of(s: Session, ids: Ids, seq: int, n: int) -> list[bytes]:
    """The logits after a prompt of which all but n are held, and after three tokens more."""
    s.feed(ids[-n:], seq=seq, want_logits=[*[TokenKind.PROMPT] * (n - 1), TokenKind.GENERATED])
    rows = [s.logits().tobytes()]
    for token in (5, 6, 7):
        s.feed([token], seq=seq)
        rows.append(s.logits().tobytes())
    return rows


@each_case
def test_how_a_prompt_is_cut(tmp_path: Path, spec: models.Spec, kind: Kind | None, sparsity: Any) -> None:
    rng = np.random.default_rng(1)
    options: dict[str, Any] = {"n_ctx": 512, "n_threads": 2, "sparsity": sparsity}
    with (
        Model(write(tmp_path, spec, kind)) as model,
        Session(model, **options) as s,
        Session(model, n_batch=20, **options) as narrow,
        Session(model, n_seq=2 * len(LENGTHS), n_pool=64 * 256, **options) as wide,
    ):
        prompts = [prompt(n, n) for n in LENGTHS]
        alone = []
        for ids in prompts:
            s.drop()
            alone.append(rows_of(s, ids, 0, ids.size))
            narrow.drop()
            assert rows_of(narrow, ids, 0, ids.size) == alone[-1], ids.size
            s.drop()
            done = 0
            while ids.size - done > 16 and rng.random() < 0.8:
                n = cut(rng, done, ids.size, 1000) - done
                s.feed(ids[done : done + n], want_logits=False)
                done += n
                if done == ids.size - 1:
                    break
            assert rows_of(s, ids, 0, ids.size - done) == alone[-1], ids.size
        # All at the same time, in parts of their own, and in the order that chance makes of them.
        read = dict.fromkeys(range(len(prompts)), 0)
        got: dict[int, bytes] = {}
        while read:
            flat, owners, wants, last = [], list[int](), list[TokenKind](), list[int]()
            for seq in rng.permutation(list(read)).tolist():
                ids, first = prompts[seq], read[seq]
                end = cut(rng, first, ids.size, 80)
                flat.append(ids[first:end])
                owners += [seq] * (end - first)
                wants += [
                    TokenKind.GENERATED if i + 1 == ids.size else TokenKind.PROMPT for i in range(first, end)
                ]
                read[seq] = end
                if end == ids.size:
                    last.append(seq)
                    del read[seq]
            wide.feed(np.concatenate(flat), seq=owners, want_logits=wants)
            got |= {seq: wide.logits(i).tobytes() for i, seq in enumerate(last)}
        assert [got[seq] == rows[0] for seq, rows in enumerate(alone)] == [True] * len(alone)
        # Behind a beginning that another sequence holds.
        for seq, ids in enumerate(prompts):
            n = ids.size - 1
            wide.copy(len(prompts) + seq, seq, n)
            assert rows_of(wide, ids, len(prompts) + seq, ids.size - n) == alone[seq], ids.size


@each_case
def test_narrow_batches(tmp_path: Path, spec: models.Spec, kind: Kind | None, sparsity: Any) -> None:
    """With less than 16 tokens to a batch all of a prompt is computed as one by one."""
    options: dict[str, Any] = {"n_ctx": 64, "n_threads": 2, "sparsity": sparsity}
    ids = prompt(33)
    with Model(write(tmp_path, spec, kind)) as model:
        with Session(model, **options) as s:
            for token in ids[:-1].tolist():
                s.feed([token], want_logits=False)
            alone = rows_of(s, ids, 0, 1)
        for n_batch in (1, 7, 15):
            with Session(model, n_batch=n_batch, **options) as narrow:
                assert rows_of(narrow, ids, 0, ids.size) == alone, n_batch


# -- a scheduler


@contextmanager
def scheduler(model: Model, sparsity: Any, **options: Any) -> Iterator[Scheduler]:
    with Session(model, n_ctx=512, n_seq=16, n_pool=64 * 96, n_threads=2, sparsity=sparsity) as session:
        own = Scheduler(Engine(session, max_running=8, **options))
        try:
            yield own
        finally:
            own.close()


def noting(rows: list[bytes]) -> LogitsProcessorList:
    """Hooks that write down the logits."""

    def note(_: Ids, logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        rows.append(logits.tobytes())
        return logits

    return LogitsProcessorList([note])


def submit(own: Scheduler, ids: Ids, rows: list[bytes]) -> Stream:
    return own.submit(
        ids, choice(n_vocab=own.engine.session.model.info.n_vocab, processors=noting(rows)), limit=4
    )


def logits_alone(path: Path, prompts: list[Ids], sparsity: Any) -> list[list[bytes]]:
    """Of the four tokens behind each prompt, one prompt after the other."""
    alone: list[list[bytes]] = []
    with Llama(path, n_ctx=512, n_threads=2, sparsity=sparsity, verbose=False) as llm:
        for ids in prompts:
            rows: list[bytes] = []
            llm.reset()
            list(islice(llm.generate(ids.tolist(), temp=0.0, logits_processor=noting(rows)), 4))
            alone.append(rows)
    return alone


def reused_beside_others(
    model: Model, prompts: list[Ids], alone: list[list[bytes]], sparsity: Any, part: int
) -> int:
    """Tokens reused when all requests ran together, then one by one; each must get the logits of alone."""
    with scheduler(model, sparsity, prompt_part=part) as own:
        got: list[list[bytes]] = [[] for _ in prompts]
        streams = [submit(own, ids, rows) for ids, rows in zip(prompts, got, strict=True)]
        for stream in streams:
            list(stream)
        assert [a == b for a, b in zip(got, alone, strict=True)] == [True] * len(prompts), part
        again: list[list[bytes]] = [[] for _ in prompts]
        for ids, rows in zip(prompts, again, strict=True):
            list(submit(own, ids, rows))
        assert again == alone
        return own.stats().n_reused_tokens


@pytest.mark.sampled(2)
@each_case
def test_company_and_prefixes(tmp_path: Path, spec: models.Spec, kind: Kind | None, sparsity: Any) -> None:
    common = prompt(101, 7)
    prompts = [
        np.concatenate([common[:n], prompt(k, 10 + n + k)]) for n in (0, 43, 80, 101) for k in (3, 9, 60)
    ]
    prompts += [common, common[:50], common[:47], common[:48], common, prompt(5)]
    path = write(tmp_path, spec, kind)
    alone = logits_alone(path, prompts, sparsity)
    with Model(path) as model:
        for part in (8, 20, 128):
            assert reused_beside_others(model, prompts, alone, sparsity, part) > 1000
        # What is reused: all of the same prompt, of another one what was computed as for this one.
        with scheduler(model, sparsity) as own:
            for n, n_reused in ((101, 0), (101, 100), (60, 59), (101, 100)):
                stream = own.submit(common[:n], choice(n_vocab=spec.n_vocab), limit=1)
                list(stream)
                assert stream.n_reused == n_reused


@pytest.mark.sampled(2)
@each_case
def test_texts_beside_others(tmp_path: Path, spec: models.Spec, kind: Kind | None, sparsity: Any) -> None:
    texts = [prompt(n, n) for n in (3, 50, 1, 20, 7, 64, 12, 8, 90, 41)]
    with Model(write(tmp_path, spec, kind)) as model:
        with Session(model, n_ctx=512, n_threads=2, sparsity=sparsity) as session:
            alone = [hidden_states(Engine(session), [ids])[0] for ids in texts]
        with Session(model, n_ctx=512, n_seq=4, n_threads=2, sparsity=sparsity) as session:
            together = hidden_states(Engine(session, max_running=4), texts)
            assert session.info.n_blocks_free == session.info.n_blocks
        with scheduler(model, sparsity) as own:
            talking = [own.submit(prompt(n, n), choice(n_vocab=spec.n_vocab), limit=60) for n in (30, 5)]
            beside = own.embed_all(texts, pooling="none")
            for stream in talking:
                stream.cancel()
    for rows, a, b in zip(alone, together, beside, strict=True):
        assert np.array_equal(rows, a) and np.array_equal(rows, b), len(rows)


@pytest.mark.slow
@pytest.mark.skipif("POWERINFER_ISA" in os.environ, reason="one instruction set was asked for")
@pytest.mark.parametrize("isa", ISAS)
def test_every_instruction_set(isa: str) -> None:
    other_isa.run(isa, __file__)
