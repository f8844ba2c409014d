"""Sequences that decode together get the logits that each of them gets alone, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from powerinfer._engine.session import Model, Session, TokenKind
from tests import models

# Lengths on both sides of a block of K and V, of a span of scores and of what is cut into parts.
LENGTHS = (3, 62, 63, 64, 65, 130, 255, 256, 257, 300, 1, 17, 511, 520, 40, 128)
WIDE = replace(models.SPECS["llama-relu"], name="wide", n_embd=256, n_head=8, n_ff=512, n_ctx=1024)
GROUPS = replace(WIDE, name="groups", n_head=8, n_head_kv=1, n_ff=768)  # of eight queries, which tiles take


def long(name: str) -> models.Spec:
    return replace(models.SPECS[name], n_ctx=1024)


DENSE = [
    (WIDE, None, "exact"),
    (WIDE, None, "dense"),
    (WIDE, Kind.Q4_0, "exact"),
    (replace(WIDE, act="silu"), Kind.Q8_0, "dense"),
    (replace(WIDE, act="silu"), Kind.Q5_1, "dense"),
    (GROUPS, Kind.Q4_1, "exact"),
    (long("falcon-gelu"), None, "dense"),
    (long("qwen3"), None, "dense"),
]
SPARSE = [
    (WIDE, None, "predicted"),
    (GROUPS, Kind.Q4_0, "predicted"),
    (WIDE, Kind.Q5_0, "predicted"),
    (WIDE, Kind.Q8_0, "exact"),
    (long("bamboo"), None, "predicted"),
    (long("falcon-7b"), None, "predicted"),
    (long("opt"), None, "predicted"),
]


def tokens(rng: np.random.Generator, n: int) -> list[int]:
    return [int(t) for t in rng.integers(3, 290, n)]


def check(path: Path, sparsity: str, n_threads: int, n: int = len(LENGTHS)) -> None:
    """Two copies of each of n conversations: one decodes with all others, one alone."""
    rng = np.random.default_rng(3)
    prompt = 2 * n  # a further sequence, read meanwhile
    with (
        Model(path) as model,
        Session(
            model, n_ctx=1024, n_pool=64 * 256, n_seq=prompt + 1, n_threads=n_threads, sparsity=sparsity
        ) as s,
    ):
        for q in range(n):
            s.feed(tokens(rng, LENGTHS[q % len(LENGTHS)]), seq=q)
            s.copy(n + q, q)

        def alone(ids: list[int], seq: int) -> list[bytes]:
            rows = []
            for t in ids:
                s.feed([t], seq=n + seq)
                rows.append(s.logits().tobytes())
            return rows

        def together(ids: list[list[int]], others: list[int], last: bool = False) -> list[list[bytes]]:
            """Feeds each sequence's tokens, and `others` to the prompt, whose last logits `last` wants."""
            flat = [(t, q) for q, own in enumerate(ids) for t in own]
            half = len(flat) // 2
            fed = [*flat[:half], *((t, prompt) for t in others), *flat[half:]]
            wants = [q != prompt for _, q in fed]
            if others:
                wants[half + len(others) - 1] = last
            s.feed([t for t, _ in fed], seq=[q for _, q in fed], want_logits=wants)
            owners = [q for (_, q), w in zip(fed, wants, strict=True) if w]
            return [[s.logits(i).tobytes() for i, o in enumerate(owners) if o == q] for q in range(len(ids))]

        # One token of each; beside a part of a prompt, and the last part.
        for others, last in (
            ([], False),
            (tokens(rng, 5), False),
            (tokens(rng, 70), False),
            (tokens(rng, 9), True),
        ):
            ids = [[t] for t in tokens(rng, n)]
            assert together(ids, others, last) == [alone(own, q) for q, own in enumerate(ids)], len(others)
        # Several tokens of some, as a draft is checked; across the end of a block.
        runs = [tokens(rng, k) for k in (1, 5, 3, 2, 4)][:n]
        assert together(runs, []) == [alone(own, q) for q, own in enumerate(runs)]
        runs = [tokens(rng, 7), tokens(rng, 6)][:n]
        assert together(runs, tokens(rng, 20)) == [alone(own, q) for q, own in enumerate(runs)]


@pytest.mark.parametrize("n_threads", [1, 3])
@pytest.mark.parametrize("spec, kind, sparsity", DENSE)
def test_ordinary_files(
    tmp_path: Path, spec: models.Spec, kind: Kind | None, sparsity: str, n_threads: int
) -> None:
    check(models.write_dense(tmp_path / "m.gguf", spec, kind=kind), sparsity, n_threads)


@pytest.mark.parametrize("n_threads", [1, 3])
@pytest.mark.parametrize("spec, kind, sparsity", SPARSE)
def test_sparse_files(
    tmp_path: Path, spec: models.Spec, kind: Kind | None, sparsity: str, n_threads: int
) -> None:
    predictor = models.draw_predictor(spec)
    path = models.write_sparse(tmp_path / "m.gguf", spec, predictor, kind=kind)
    check(path, sparsity, n_threads)


@pytest.mark.parametrize("n", [2, 8, 17, 40])
def test_fewer_and_more(tmp_path: Path, n: int) -> None:
    check(models.write_dense(tmp_path / "m.gguf", WIDE), "exact", 2, n)


@pytest.mark.parametrize("n", [32, 40])
def test_many_in_parts_and_masked(tmp_path: Path, n: int) -> None:
    """32 are taken together, whose positions are cut into parts and who want different neurons."""
    path = models.write_sparse(tmp_path / "m.gguf", GROUPS, models.draw_predictor(GROUPS), kind=Kind.Q4_0)
    check(path, "predicted", 3, n)


def test_beside_the_ends_of_many_prompts(tmp_path: Path) -> None:
    """More rows of logits than are taken as rows when nobody decodes."""
    rng = np.random.default_rng(4)
    n = 40
    with (
        Model(models.write_dense(tmp_path / "m.gguf", WIDE)) as model,
        Session(model, n_ctx=1024, n_pool=64 * 64, n_seq=n + 2, n_threads=2, sparsity="exact") as s,
    ):
        s.feed(tokens(rng, 10), seq=0)
        s.copy(1, 0)
        prompts = [q for q in range(2, n + 2) for _ in range(2)]
        s.feed([5, *tokens(rng, 2 * n)], seq=[0, *prompts], want_logits=[True, *[False, True] * n])
        together = s.logits(0).tobytes()
        s.feed([5], seq=1)
        assert s.logits().tobytes() == together


@pytest.mark.parametrize("name", ["llama-linear", "qwen3moe", "deepseek2-v3", "qwen35"])
def test_256_sequences(tmp_path: Path, name: str) -> None:
    """One token of each, some steps; four of them alone."""
    n, few = 256, (0, 17, 100, 255)
    rng = np.random.default_rng(5)
    with (
        Model(models.write_dense(tmp_path / "m.gguf", models.SPECS[name])) as model,
        Session(model, n_ctx=64, n_pool=64 * n, n_seq=n, n_batch=512, n_threads=2) as s,
        Session(model, n_ctx=64, n_pool=64 * 4, n_seq=4, n_threads=2) as alone,
    ):
        s.feed([7] * n, seq=list(range(n)))
        alone.feed([7] * 4, seq=list(range(4)))
        for _ in range(3):
            ids = tokens(rng, n)
            s.feed(ids, seq=list(range(n)), want_logits=[TokenKind.GENERATED] * n)
            together = [s.logits(q).tobytes() for q in few]
            for i, q in enumerate(few):
                alone.feed([ids[q]], seq=i)
                assert alone.logits().tobytes() == together[i], q
