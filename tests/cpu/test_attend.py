"""Attention of many queries by products (te_gemm_kernels.attend), where tables have it, against doubles."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.cpu import kernels as cpu
from tests.cpu.kernels import TABLES, Doubles, Floats, ffi, fp
from tests.cpu.test_gemm import packed, poisoned, void

BLOCK, SPAN = 64, 256
HAVE = [name for name, table in TABLES.items() if table.gemm.attend]
# n_rows, d, dv
SHAPES = [(1, 32, 32), (16, 80, 48), (40, 128, 128), (65, 288, 256), (9, 5, 7)]


def gather(
    table: str, kind: str, q: Floats, kv: tuple[Any, Any], seen: Any, *, scale: float, cap: float = 0.0
) -> tuple[Floats, Floats]:
    """Weighted means of V, and largest scores, of all queries; seen [n_rows][2]: positions lo..hi-1."""
    gemm, n_rows = TABLES[table].gemm, len(q)
    (k, n_pos, d), (v, _, dv) = kv
    memory = poisoned(gemm.attend_bytes(n_rows, d, dv, SPAN))
    px = packed(gemm, None, q, "rows")
    lo, hi = np.empty((2, n_rows), np.int32)
    a = ffi.new("te_attend *")
    a.block, a.span, a.n_rows, a.q, a.scale, a.cap = BLOCK, SPAN, n_rows, void(px), scale, cap
    a.lo, a.hi = (ffi.cast("const int32_t *", x.ctypes.data) for x in (lo, hi))
    a.memory, a.first = void(memory), True
    y = np.full((n_rows, dv + 3), np.nan, np.float32)
    top, total = np.empty((2, n_rows), np.float32)
    with cpu.Guarded(k) as of_k, cpu.Guarded(v) as of_v:
        gemm.begin()
        for first in range(0, n_pos, SPAN):
            end = min(first + SPAN, n_pos)
            blocks = range(first, end, BLOCK)
            mats = []
            for memory_of, data, cols in ((of_k, k, d), (of_v, v, dv)):
                own = ffi.new("te_mat[]", len(blocks))
                for i, p in enumerate(blocks):
                    row = data.shape[1] * p
                    own[i] = cpu.matrix(kind, memory_of.pointer + row, min(BLOCK, end - p), cols)[0]
                mats.append(own)
            a.k, a.v, a.n_blocks = mats[0], mats[1], len(blocks)
            lo[:] = np.clip(seen[:, 0] - first, 0, end - first)
            hi[:] = np.clip(seen[:, 1] - first, 0, end - first)
            gemm.attend(a)
            a.first = False
        gemm.attend_end(a, fp(y), dv + 3, fp(top), fp(total))
        gemm.end()
    assert np.all(np.isnan(y[:, dv:]))
    return y[:, :dv] / np.where(total == 0, 1, total)[:, None], top


def expected(
    q: Floats, k: Doubles, v: Doubles, seen: Any, scale: float, cap: float
) -> tuple[Doubles, Doubles]:
    """The same in doubles, and how far off it may be: all four factors are rounded to bf16."""
    at = np.arange(len(k))
    sees = (at >= seen[:, :1]) & (at < seen[:, 1:])
    score = q.astype(np.float64) @ k.T * scale
    off = np.abs(q.astype(np.float64)) @ np.abs(k).T * scale * 2.0**-8
    if cap > 0:
        score = cap * np.tanh(score / cap)
    score = np.where(sees, score, -1e9)
    w = np.where(sees, np.exp(score - score.max(axis=1, keepdims=True)), 0)
    w /= np.maximum(w.sum(axis=1, keepdims=True), 1e-300)
    off = np.where(sees, off, 0)
    worse = np.expm1(off) + np.expm1(off.max(axis=1, keepdims=True)) + 2.0**-7
    return w @ v, (w * worse) @ np.abs(v) + 1e-6


@pytest.mark.parametrize("table", HAVE)
@pytest.mark.parametrize("kind", ["F16", "F32", "Q8_0"])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_by_products(table: str, kind: str, shape: tuple[int, int, int]) -> None:
    n_rows, d, dv = shape
    if kind == "Q8_0" and (d % 32 or dv % 32):
        return
    n_pos = 2 * SPAN + 100
    rng = np.random.default_rng(n_rows)
    q = rng.standard_normal((n_rows, d)).astype(np.float32)
    (k, k64), (v, v64) = (cpu.random_rows(kind, n_pos, cols, i) for i, cols in enumerate((d, dv)))
    seen = np.stack([rng.integers(0, 300, n_rows), rng.integers(0, n_pos + 1, n_rows)], axis=1)
    seen[0] = 0, n_pos
    seen[-1] = 40, 41
    kv = ((k, n_pos, d), (v, n_pos, dv))
    for scale, cap in ((1 / np.sqrt(d), 0.0), (3 / np.sqrt(d), 2.0)):
        y, top = gather(table, kind, q, kv, seen, scale=scale, cap=cap)
        reference, limit = expected(q, k64, v64, seen, scale, cap)
        assert np.all(np.abs(y - reference) <= limit)
        none = seen[:, 1] <= seen[:, 0]
        assert np.array_equal(np.isneginf(top), none)
        assert np.all(y[none] == 0)
        for r in (0, n_rows // 2, n_rows - 1):
            alone, own = gather(table, kind, q[r : r + 1], kv, seen[r : r + 1], scale=scale, cap=cap)
            assert np.array_equal(alone[0], y[r])
            assert own[0] == top[r]


@pytest.mark.parametrize("table", HAVE)
def test_large_scores(table: str) -> None:
    """One position outweighs all others, by more than exponentials hold; then comes one that outweighs it."""
    n_pos, d = SPAN + 64, 32
    q = np.ones((3, d), np.float32)
    (k, _), (v, v64) = (cpu.random_rows("F32", n_pos, d, i) for i in range(2))
    k = k.copy()
    values = k.view(np.float32).reshape(n_pos, d)
    values[:] = -4096.0
    values[5], values[SPAN + 7] = 4096.0, 8192.0
    kv = ((k, n_pos, d), (v, n_pos, d))
    y, _ = gather(table, "F32", q, kv, np.array([[0, SPAN], [0, n_pos], [6, 8]]), scale=1.0)
    bf16 = 2.0**-8
    assert np.allclose(y[0], v64[5], rtol=bf16)
    assert np.allclose(y[1], v64[SPAN + 7], rtol=bf16)
    assert np.allclose(y[2], (v64[6] + v64[7]) / 2, rtol=2 * bf16, atol=2 * bf16)
    values[3, 0] = np.nan
    y, _ = gather(table, "F32", q, kv, np.array([[0, n_pos], [0, 3], [4, n_pos]]), scale=1.0)
    assert np.all(np.isnan(y[0]))
    assert not np.any(np.isnan(y[1:]))
