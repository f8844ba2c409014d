"""Products for many tokens (te_gemm_kernels) of every table against doubles: odd shapes, shares, borders."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.cpu import kernels as cpu
from tests.cpu.kernels import CANARY, EPS, FLOATS, TABLES, Bytes, Doubles, Floats, ffi, fp, lib
from tests.cpu.team import Team

NAMES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q5_0", "IQ4_XS")
CASES = [(table, name) for table in TABLES for name in NAMES]
# n_tok, n_rows, cols, r0, r1 (a share of the rows; None: all)
SHAPES = [
    (1, 1, 5, 0, None),
    (5, 7, 32, 0, None),
    (16, 31, 80, 0, None),
    (17, 64, 96, 0, None),
    (33, 100, 256, 64, None),
    (130, 257, 256, 0, 64),
    (5, 257, 1024, 128, 200),
    (49, 7, 1024, 0, None),
    (130, 1, 1056, 0, None),
    (16, 300, 512, 0, None),
]
BIG = (600, 290, 544, 64, 290)  # more than one pass over tokens, rows and columns in every table


def poisoned(n_bytes: int) -> Floats:
    """Memory full of NaN, on a 64-byte boundary: what is read before it is written shows."""
    return cpu.floats(n_bytes // 4 + 16, float("nan"))


def void(array: Floats) -> Any:
    """The array as a void pointer."""
    return ffi.cast("void *", array.ctypes.data)


def packed(gemm: Any, x: Floats, transposed: bool) -> Floats:
    """What pack makes of the activations x [n_tok][k], given at an odd row pitch, the last share first."""
    n_tok, k = x.shape
    pitch = k + 3
    spread = np.full(n_tok * pitch, np.nan, dtype=np.float32)
    for t in range(n_tok):
        spread[t * pitch : t * pitch + k] = x[t]
    px = poisoned(gemm.pack_bytes(n_tok, k))
    pack = gemm.pack_t if transposed else gemm.pack
    middle = n_tok // 2 // gemm.pack_unit * gemm.pack_unit
    for t0, t1 in ((middle, n_tok), (0, middle)):
        if t0 < t1:
            pack(fp(spread), pitch, n_tok, k, t0, t1, void(px))
    return px


def run(
    table: str,
    name: str,
    data: Bytes,
    x: Floats,
    share: tuple[int, int],
    *,
    transposed: bool,
    bias: Floats | None = None,
    before: Floats | None = None,
) -> Floats:
    """y [n_tok][share], from rows of weights as bytes. `before` is y at the start, to be added to.

    Checks that nothing else is written.
    """
    gemm = TABLES[table].gemm
    weights, size = cpu.block(name)
    n_rows, cols = len(data), data.shape[1] // size * weights
    n_tok, k = x.shape
    width = cols if transposed else n_rows
    lo, hi = share
    pitch = width + 5
    y = cpu.floats(n_tok * pitch + 16, float(CANARY))
    rows = y[: n_tok * pitch].reshape(n_tok, pitch)
    if before is not None:
        rows[:, lo:hi] = before
    px = packed(gemm, x, transposed)
    scratch = poisoned(gemm.scratch_bytes(n_tok, k))
    # Exact size, so that a sanitizer sees a read past the last element.
    b = ffi.NULL if bias is None else ffi.new("float[]", [float(v) for v in bias])
    with cpu.Guarded(data) as memory:
        m = cpu.matrix(name, memory.pointer, n_rows, cols)
        product = gemm.gemm_t if transposed else gemm.gemm
        gemm.begin()
        product(m, lo, hi, void(px), n_tok, fp(y), pitch, b, before is not None, void(scratch))
        gemm.end()
    assert np.all(y[n_tok * pitch :] == CANARY)
    assert np.all(rows[:, :lo] == CANARY)
    assert np.all(rows[:, hi:] == CANARY)
    return rows[:, lo:hi].copy()


def check(table: str, y: Floats, x: Doubles, w: Doubles, extra: Doubles | float) -> None:
    """y [n_tok][n] against x [n_tok][k] times w [k][n] plus extra."""
    reference = x @ w + extra
    size = np.abs(x) @ np.abs(w)
    error = np.abs(y - reference)
    limit = 8 * EPS * np.sqrt(x.shape[1]) * size + 4 * EPS * np.abs(extra)
    if table == "amx":
        # Both operands are rounded to bf16: steps of 2^-7 of the leading bit, so each is off by 2^-8 at most.
        limit += (2 * 2.0**-8 + 2.0**-16) * size
    assert np.all(error <= limit), (error / limit).max()
    if table == "amx" and y.size >= 1000:
        # On average a rounding is off by 0.16 %, two by 0.23 %.
        assert np.sqrt((error**2).sum() / ((x**2) @ (w**2)).sum()) <= 0.004


@pytest.mark.parametrize("transposed", [False, True], ids=["gemm", "gemm_t"])
@pytest.mark.parametrize("table, name", CASES)
def test_product(table: str, name: str, transposed: bool) -> None:
    rng = np.random.default_rng(11)
    shapes = [s for s in (SHAPES if table == "scalar" else [*SHAPES, BIG]) if s[2] % cpu.block(name)[0] == 0]
    for i, (n_tok, n_rows, cols, r0, r1) in enumerate(shapes):
        data, w = cpu.random_rows(name, n_rows, cols, 3)
        # gemm_t shares out columns, in units of 256.
        lo, hi = r0, r1 or n_rows
        if transposed:
            lo, hi = 256 if cols > 512 else 0, 1024 if cols > 1024 else cols
        x = rng.standard_normal((n_tok, n_rows if transposed else cols)).astype(np.float32)
        bias = rng.standard_normal(cols if transposed else n_rows).astype(np.float32) if i % 2 else None
        before = rng.standard_normal((n_tok, hi - lo)).astype(np.float32) if i % 3 else None
        y = run(table, name, data, x, (lo, hi), transposed=transposed, bias=bias, before=before)
        extra = np.zeros((n_tok, hi - lo))
        if bias is not None:
            extra = extra + bias[lo:hi]
        if before is not None:
            extra = extra + before
        check(table, y, x.astype(np.float64), w[:, lo:hi] if transposed else w[lo:hi].T, extra)


@pytest.mark.parametrize("transposed", [False, True], ids=["gemm", "gemm_t"])
@pytest.mark.parametrize("table", TABLES)
def test_every_length(table: str, transposed: bool) -> None:
    """Every remainder of tokens, rows and columns."""
    rng = np.random.default_rng(12)
    name = "F16"
    for n in range(1, 67):
        n_tok, n_rows, cols = n, 1 + n * 5 % 67, 1 + n * 7 % 71
        data, w = cpu.random_rows(name, n_rows, cols, 4)
        x = rng.standard_normal((n_tok, n_rows if transposed else cols)).astype(np.float32)
        y = run(table, name, data, x, (0, cols if transposed else n_rows), transposed=transposed)
        check(table, y, x.astype(np.float64), w if transposed else w.T, 0.0)


@pytest.mark.parametrize("table, name", [(t, n) for t in TABLES for n in FLOATS])
def test_not_finite(table: str, name: str) -> None:
    """An infinity or NaN reaches the sums that it is part of, and no other."""
    rng = np.random.default_rng(13)
    n_tok, n_rows, cols = 19, 37, 70
    data, _ = cpu.random_rows(name, n_rows, cols, 5)
    data = data.copy()
    kind = {"F32": np.uint32, "F16": np.uint16, "BF16": np.uint16}[name]
    infinity = {"F32": 0x7F800000, "F16": 0x7C00, "BF16": 0x7F80}[name]
    data.view(kind)[11, 69] = infinity
    data.view(kind)[20, 3] = infinity + 1  # NaN
    for transposed in (False, True):
        x = rng.standard_normal((n_tok, n_rows if transposed else cols)).astype(np.float32)
        x[4, 33] = np.nan
        x[5, 34] = np.inf
        x[18, 0] = -np.inf
        y = run(table, name, data, x, (0, cols if transposed else n_rows), transposed=transposed)
        bad = np.zeros(y.shape, dtype=bool)
        bad[[4, 5, 18]] = True
        bad[:, [69, 3] if transposed else [11, 20]] = True
        assert np.array_equal(~np.isfinite(y), bad)
        assert np.isnan(y[4]).all()
        assert np.isnan(y[:, 3 if transposed else 20]).all()
        assert np.isinf(y[0, 69 if transposed else 11])


@pytest.mark.parametrize("transposed", [False, True], ids=["gemm", "gemm_t"])
@pytest.mark.parametrize("table", TABLES)
def test_shares_give_the_same_bits(table: str, transposed: bool) -> None:
    """Which member computes a row or column, and how many tokens come with a token, changes no bit of it."""
    rng = np.random.default_rng(14)
    n_rows, cols = 200, 600
    data, _ = cpu.random_rows("F16", n_rows, cols, 6)
    x = rng.standard_normal((40, n_rows if transposed else cols)).astype(np.float32)
    width = cols if transposed else n_rows
    cut = 256 if transposed else TABLES[table].gemm.row_unit
    whole = run(table, "F16", data, x, (0, width), transposed=transposed)
    parts = [run(table, "F16", data, x, share, transposed=transposed) for share in ((0, cut), (cut, width))]
    assert np.array_equal(whole, np.concatenate(parts, axis=1))
    assert np.array_equal(whole[:7], run(table, "F16", data, x[:7], (0, width), transposed=transposed))


@pytest.mark.parametrize("n_threads", [1, 3])
@pytest.mark.parametrize("table", TABLES)
def test_team(table: str, n_threads: int) -> None:
    """te_op_linear and te_op_linear_t with enough tokens: packed and computed in shares."""
    rng = np.random.default_rng(15)
    n_tok, n_rows, cols = 50, 330, 768
    assert n_tok >= TABLES[table].gemm.min_tok
    first, w = cpu.random_rows("Q8_0", n_rows, cols, 7)
    second, v = cpu.random_rows("F16", 70, cols, 8)
    x = rng.standard_normal((n_tok, cols)).astype(np.float32)
    bias = rng.standard_normal(70).astype(np.float32)
    y1 = np.full((n_tok, n_rows), CANARY, dtype=np.float32)
    y2 = rng.standard_normal((n_tok, 70)).astype(np.float32)
    y3 = np.full((n_tok, cols), CANARY, dtype=np.float32)
    before = y2.astype(np.float64)
    products = ffi.new("te_linear[2]")
    with (
        cpu.Guarded(first) as first_memory,
        cpu.Guarded(second) as second_memory,
        Team(TABLES[table], n_threads, max_tok=n_tok, max_cols=cols, max_rows=64) as team,
    ):
        m = cpu.matrix("Q8_0", first_memory.pointer, n_rows, cols)
        products[0].w, products[0].y, products[0].ldy = m[0], fp(y1), n_rows
        products[1].w = cpu.matrix("F16", second_memory.pointer, 70, cols)[0]
        products[1].y, products[1].ldy, products[1].bias, products[1].add = fp(y2), 70, fp(bias), True

        def member(t: Any, ws: Any) -> None:
            lib.te_op_linear(t, ws, products, 2, fp(x), cols, n_tok)
            lib.te_barrier(t)
            lib.te_op_linear_t(t, ws, m, fp(y1), n_rows, n_tok, ffi.NULL, fp(y3), cols, False)

        team.run(member)
    check(table, y1, x.astype(np.float64), w.T, 0.0)
    check(table, y2, x.astype(np.float64), v.T, before + bias)
    check(table, y3, y1.astype(np.float64), w, 0.0)


@pytest.mark.parametrize("table", TABLES)
def test_memory(table: str) -> None:
    """A workspace is sized for the largest operation: no size falls as shapes grow. Scratch is bounded."""
    gemm = TABLES[table].gemm
    tokens = [1, 2, 15, 16, 17, 47, 48, 49, 100, 511, 512, 513, 2048]
    widths = [1, 31, 32, 33, 255, 256, 257, 1000, 4096, 28672]
    for sizes in (gemm.pack_bytes, gemm.scratch_bytes):
        found = np.array([[sizes(t, k) for k in widths] for t in tokens])
        assert np.all(np.diff(found, axis=0) >= 0)
        assert np.all(np.diff(found, axis=1) >= 0)
    assert gemm.scratch_bytes(512, 28672) < 4 << 20
    assert gemm.scratch_bytes(2048, 28672) < 16 << 20
    assert gemm.pack_bytes(2048, 28672) <= 2048 * 28672 * 4 + 63
    assert gemm.min_tok >= 1
    assert gemm.row_unit >= 1
