"""Products for many tokens (te_gemm_kernels) of every table against doubles: odd shapes, shares, borders."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.cpu import kernels as cpu
from tests.cpu.kernels import CANARY, EPS, FLOATS, TABLES, Bytes, Doubles, Floats, ffi, fp, lib
from tests.cpu.team import Team

NAMES = (*FLOATS, *cpu.INT8, "TQ2_0")


def int8_of(table: str, name: str) -> Any:
    """The table's te_int8_kernels for many tokens with this format; None: it has none."""
    return next((k for k in TABLES[table].gemm.int8 if k.types >> cpu.TYPES[name] & 1), None)


def is_int8(table: str, name: str) -> bool:
    """Whether the table multiplies many tokens with this format in 8-bit integers."""
    return int8_of(table, name) is not None


def in_256(table: str, name: str) -> bool:
    """Whether that product's activations are rounded per 256."""
    return bool(TABLES[table].gemm.int8[1].types >> cpu.TYPES[name] & 1)


def seen(table: str, name: str, way: str, x: Floats) -> Doubles:
    """Activations as that product sees them."""
    if way != "int8":
        return x.astype(np.float64)
    return cpu.quantised_in_256(x) if in_256(table, name) else cpu.quantised(x)


# gemm, gemm_t, gemm of int8
WAYS = ("rows", "columns", "int8")
CASES = [(t, n, way) for t in TABLES for n in NAMES for way in WAYS if way != "int8" or is_int8(t, n)]
INT8_CASES = [(t, n) for t, n, way in CASES if way == "int8"]
# A format for each way.
EXAMPLES = [
    (t, w, "Q6_K" if w == "int8" else "F16")
    for t in TABLES
    for w in WAYS
    if w != "int8" or is_int8(t, "Q6_K")
]
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


def packed(gemm: Any, int8: Any, x: Floats, way: str) -> Floats:
    """What pack makes of the activations x [n_tok][k], given at an odd row pitch, the last share first.

    An odd number of tokens is given in another order, as routes of an expert are.
    """
    n_tok, k = x.shape
    pitch = k + 3
    spread = np.full(n_tok * pitch, np.nan, dtype=np.float32)
    row = np.arange(n_tok, dtype=np.int32)
    if n_tok % 2:
        row = row[::-1].copy()
    for t in range(n_tok):
        spread[row[t] * pitch : row[t] * pitch + k] = x[t]
    places = ffi.cast("const int32_t *", row.ctypes.data) if n_tok % 2 else ffi.NULL
    px = poisoned((int8 if way == "int8" else gemm).pack_bytes(n_tok, k))
    pack = {"rows": gemm.pack, "columns": gemm.pack_t, "int8": int8 and int8.pack}[way]
    middle = n_tok // 2 // gemm.pack_unit * gemm.pack_unit
    for t0, t1 in ((middle, n_tok), (0, middle)):
        if t0 < t1:
            pack(fp(spread), pitch, places, n_tok, k, t0, t1, void(px))
    return px


def run(
    table: str,
    name: str,
    data: Bytes,
    x: Floats,
    share: tuple[int, int],
    *,
    way: str,
    bias: Floats | None = None,
    before: Floats | None = None,
) -> Floats:
    """y [n_tok][share], from rows of weights as bytes. `before` is y at the start, to be added to.

    Checks that nothing else is written.
    """
    gemm, int8 = TABLES[table].gemm, int8_of(table, name)
    weights, size = cpu.block(name)
    n_rows, cols = len(data), data.shape[1] // size * weights
    n_tok, k = x.shape
    width = cols if way == "columns" else n_rows
    lo, hi = share
    pitch = width + 5
    y = cpu.floats(n_tok * pitch + 16, float(CANARY))
    rows = y[: n_tok * pitch].reshape(n_tok, pitch)
    if before is not None:
        rows[:, lo:hi] = before
    px = packed(gemm, int8, x, way)
    scratch = poisoned(gemm.scratch_bytes(n_tok, k))
    # Exact size, so that a sanitizer sees a read past the last element.
    b = ffi.NULL if bias is None else ffi.new("float[]", [float(v) for v in bias])
    with cpu.Guarded(data) as memory:
        m = cpu.matrix(name, memory.pointer, n_rows, cols)
        product = {"rows": gemm.gemm, "columns": gemm.gemm_t, "int8": int8 and int8.gemm}[way]
        gemm.begin()
        product(m, lo, hi, void(px), n_tok, fp(y), pitch, b, before is not None, void(scratch))
        gemm.end()
    assert np.all(y[n_tok * pitch :] == CANARY)
    assert np.all(rows[:, :lo] == CANARY)
    assert np.all(rows[:, hi:] == CANARY)
    return rows[:, lo:hi].copy()


def check(table: str, way: str, y: Floats, x: Doubles, w: Doubles, extra: Doubles | float) -> None:
    """y [n_tok][n] against x [n_tok][k] times w [k][n] plus extra."""
    reference = x @ w + extra
    size = np.abs(x) @ np.abs(w)
    error = np.abs(y - reference)
    limit = 8 * EPS * np.sqrt(x.shape[1]) * size + 4 * EPS * np.abs(extra)
    rounds = table in ("amx", "avx512_bf16") and way != "int8"
    if rounds:
        # Both operands are rounded to bf16: steps of 2^-7 of the leading bit, so each is off by 2^-8 at most.
        limit += (2 * 2.0**-8 + 2.0**-16) * size
    assert np.all(error <= limit), (error / limit).max()
    if rounds and y.size >= 1000:
        # On average a rounding is off by 0.16 %, two by 0.23 %.
        assert np.sqrt((error**2).sum() / ((x**2) @ (w**2)).sum()) <= 0.004


@pytest.mark.sampled(4)
@pytest.mark.parametrize("table, name, way", CASES)
def test_product(table: str, name: str, way: str) -> None:
    rng = np.random.default_rng(11)
    transposed = way == "columns"
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
        y = run(table, name, data, x, (lo, hi), way=way, bias=bias, before=before)
        extra = np.zeros((n_tok, hi - lo))
        if bias is not None:
            extra = extra + bias[lo:hi]
        if before is not None:
            extra = extra + before
        x64 = seen(table, name, way, x)
        check(table, way, y, x64, w[:, lo:hi] if transposed else w[lo:hi].T, extra)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("table, way, name", EXAMPLES)
def test_every_length(table: str, way: str, name: str) -> None:
    """Every remainder of tokens, rows and columns."""
    rng = np.random.default_rng(12)
    transposed = way == "columns"
    for n in range(1, 67):
        n_tok, n_rows, cols = n, 1 + n * 5 % 67, 1 + n * 7 % 71
        if way == "int8":
            name, cols = ("Q6_K", 256 + 256 * (n % 3)) if n % 2 else ("Q4_0", 32 + 32 * (n % 23))
        data, w = cpu.random_rows(name, n_rows, cols, 4)
        x = rng.standard_normal((n_tok, n_rows if transposed else cols)).astype(np.float32)
        y = run(table, name, data, x, (0, cols if transposed else n_rows), way=way)
        x64 = seen(table, name, way, x)
        check(table, way, y, x64, w if transposed else w.T, 0.0)


@pytest.mark.parametrize("table, name", INT8_CASES)
def test_largest_integers(table: str, name: str) -> None:
    """Activations of the largest size against weights of the largest integers: no partial sum overflows."""
    n_tok, n_rows, cols = 50, 9, 512
    data, _ = cpu.random_rows(name, n_rows, cols, 9)
    size = cpu.block(name)[1]
    blocks = data.reshape(-1, size).copy()
    scales = [at + i for at in cpu.HALVES[name] for i in (0, 1)] if name in cpu.HALVES else [0]
    blocks[:, [i for i in range(size) if i not in scales]] = 0x77 if name == "MXFP4" else 0xFF
    data = blocks.reshape(data.shape)
    w = cpu.gguf.quants.dequantize(data, cpu.Kind[name]).astype(np.float64)
    for sign in (1, -1):
        x = np.full((n_tok, cols), sign * 3.0, dtype=np.float32)
        x[1::2, ::2] *= -1
        y = run(table, name, data, x, (0, n_rows), way="int8")
        reference = seen(table, name, "int8", x) @ w.T
        # A weight of a format with minima is the difference of two numbers, the larger up to twice its size.
        limit = 16 * EPS * np.sqrt(cols) * (np.abs(x).astype(np.float64) @ np.abs(w).T)
        assert np.all(np.abs(y - reference) <= limit)


def spread(kind: str, shape: tuple[int, int]) -> Floats:
    """Random activations: normal, of a heavy tail, or with a channel in 300 that is 100 times as large."""
    rng = np.random.default_rng(17)
    x = rng.standard_t(2, shape) if kind == "tail" else rng.standard_normal(shape)
    if kind == "outliers":
        x[:, ::300] *= 100
    return x.astype(np.float32)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", ["normal", "tail", "outliers"])
@pytest.mark.parametrize("table, name", [(t, n) for t, n in INT8_CASES if cpu.block(n)[0] == 256])
def test_rounding_in_256(table: str, name: str, kind: str) -> None:
    """Products of formats of 256 weights are no further from those of unrounded activations than with one
    step for 256 activations, as Q8_K has, and with outliers far nearer."""
    x = spread(kind, (64, 2048))
    data, w = cpu.random_rows(name, 96, x.shape[1], 18)
    exact = x.astype(np.float64) @ w.T
    blocks = x.astype(np.float64).reshape(-1, 256)
    step = np.abs(blocks).max(axis=1, keepdims=True) / 127
    q8_k = (np.rint(blocks / step) * step).reshape(x.shape) @ w.T
    y = run(table, name, data, x, (0, 96), way="int8")
    ours, theirs = (np.sqrt(((z - exact) ** 2).mean()) for z in (y, q8_k))
    # Some steps are halved in normal numbers, too; 6144 errors let a root mean square vary by 1 %.
    assert ours <= {"normal": 1.03, "tail": 0.8, "outliers": 0.5}[kind] * theirs


@pytest.mark.parametrize("table, name", INT8_CASES)
def test_int8_small_beside_large(table: str, name: str) -> None:
    """Groups beside others 500 times as large, which cancel, are not rounded with the step of these."""
    x = spread("normal", (50, 512))
    x[:, 64:96] *= 500
    data, w = cpu.random_rows(name, 40, 512, 19)
    x[:, 256:] = x[:, :256]
    x[:, 320:352] *= -1  # the large groups cancel where the weights of both halves are the same
    size = cpu.block(name)[1] * (256 // cpu.block(name)[0])
    data = data.copy()
    data[:, size:] = data[:, :size]
    w = cpu.gguf.quants.dequantize(data, cpu.Kind[name]).astype(np.float64)
    y = run(table, name, data, x, (0, 40), way="int8")
    exact = x.astype(np.float64) @ w.T
    error = np.sqrt(((y - exact) ** 2).mean() / (exact**2).mean())
    assert error <= 0.02


# Where the codes of the formats with integer minima stand in a block, and the weights that share a minimum.
CODES = {"Q2_K": (slice(16, 80), 16), "Q4_K": (slice(16, 144), 32), "Q5_K": (slice(16, 176), 32)}


@pytest.mark.parametrize("kind", ["normal", "large", "cancelling", "lone"])
@pytest.mark.parametrize("table, name", [(t, n) for t, n in INT8_CASES if n in CODES])
def test_minima_beside_outliers(table: str, name: str, kind: str) -> None:
    """The sums that minima are multiplied with are off by 2^-15 of a block's largest at most."""
    x = np.abs(spread("normal", (50, 512)))
    if kind != "normal":
        x[:, 37::256] = 1e6
    if kind == "cancelling":
        x[:, 38::256] = -1e6
    if kind == "lone":
        x[:, 38::256], x[:, 70::256] = 1e6, -1e6
    data, w = cpu.random_rows(name, 40, 512, 20)
    codes, group = CODES[name]
    blocks = data.reshape(-1, cpu.block(name)[1]).copy()
    blocks[:, codes] = 0
    minima = cpu.gguf.quants.dequantize(blocks.reshape(data.shape), cpu.Kind[name]).astype(np.float64)
    x64 = seen(table, name, "int8", x)
    largest = np.abs(x).reshape(50, -1, 256).max(axis=2).astype(np.float64) / 127
    for n in (16, 32):
        sums = np.abs(x64.reshape(50, -1, 256 // n, n).sum(axis=3)).max(axis=2)
        largest = np.maximum(largest, sums)
    off = 2.0**-15 * largest @ np.abs(minima).reshape(40, -1, 256).sum(axis=2).T / group
    y = run(table, name, data, x, (0, 40), way="int8")
    limit = off + 8 * EPS * np.sqrt(512) * (np.abs(x64) @ np.abs(w).T)
    assert np.all(np.abs(y - x64 @ w.T) <= limit)


@pytest.mark.parametrize("table, name", [(t, n) for t, n in INT8_CASES if n in CODES and in_256(t, n)])
def test_minima_of_short_sums(table: str, name: str) -> None:
    """Sums of activations that 15 bits hold, beside one of them that needs no more, are not rounded."""
    x = np.zeros((50, 16, 16), dtype=np.float32)
    x[:, :2] = 127  # the block's step is 1, its largest sum 127 * 32
    x[:, 2:14:2, 0] = 7.125  # step 1 / 16; the sums are in eighths
    x[:, 3:14:2, 0] = 7  # and the last 32 are zero
    x = x.reshape(50, 256)
    assert np.array_equal(cpu.quantised_in_256(x), x)
    data, w = cpu.random_rows(name, 40, 256, 21)
    check(table, "int8", run(table, name, data, x, (0, 40), way="int8"), x.astype(np.float64), w.T, 0.0)


@pytest.mark.parametrize("table, name", INT8_CASES)
def test_int8_not_finite(table: str, name: str) -> None:
    """A token with an activation that is not a number has no finite result; the others are what they were."""
    rng = np.random.default_rng(16)
    data, w = cpu.random_rows(name, 20, 512, 5)
    x = rng.standard_normal((70, 512)).astype(np.float32)
    x64 = seen(table, name, "int8", x)
    x[4, 33], x[5, 400], x[69, 0] = np.nan, np.inf, -np.inf
    bad = [4, 5, 69]
    y = run(table, name, data, x, (0, 20), way="int8")
    assert np.isnan(y[bad]).all()
    check(table, "int8", np.delete(y, bad, axis=0), np.delete(x64, bad, axis=0), w.T, 0.0)
    x[6] = 0
    assert not run(table, name, data, x, (0, 20), way="int8")[6].any()


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
        way = "columns" if transposed else "rows"
        y = run(table, name, data, x, (0, cols if transposed else n_rows), way=way)
        bad = np.zeros(y.shape, dtype=bool)
        bad[[4, 5, 18]] = True
        bad[:, [69, 3] if transposed else [11, 20]] = True
        assert np.array_equal(~np.isfinite(y), bad)
        assert np.isnan(y[4]).all()
        assert np.isnan(y[:, 3 if transposed else 20]).all()
        assert np.isinf(y[0, 69 if transposed else 11])


@pytest.mark.parametrize("table, way, name", EXAMPLES)
def test_shares_give_the_same_bits(table: str, way: str, name: str) -> None:
    """Which member computes a row or column, and how many tokens come with a token, changes no bit of it."""
    rng = np.random.default_rng(14)
    transposed = way == "columns"
    n_rows, cols = 200, 768
    data, _ = cpu.random_rows(name, n_rows, cols, 6)
    x = rng.standard_normal((40, n_rows if transposed else cols)).astype(np.float32)
    width = cols if transposed else n_rows
    whole = run(table, name, data, x, (0, width), way=way)
    # Formats of small blocks take smaller shares of the columns.
    for cut in (64, 256) if transposed else (TABLES[table].gemm.row_unit,):
        parts = [run(table, name, data, x, share, way=way) for share in ((0, cut), (cut, width))]
        assert np.array_equal(whole, np.concatenate(parts, axis=1))
    assert np.array_equal(whole[:7], run(table, name, data, x[:7], (0, width), way=way))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("n_threads", [1, 3, 7])
@pytest.mark.parametrize("table", TABLES)
def test_team(table: str, n_threads: int) -> None:
    """te_op_linear and te_op_linear_t with enough tokens: packed in shares, panels handed out to who is free.

    The products are of formats that are packed differently, and one is left to the row kernels.
    """
    rng = np.random.default_rng(15)
    n_tok, cols = 50, 768
    gemm = TABLES[table].gemm
    formats = {"Q4_K": 330, "F16": 70, "Q8_0": 1, "BF16": 513}
    assert n_tok >= max(gemm.min_tok, *(gemm.linear_min_tok[cpu.TYPES[name]] for name in formats))
    x = rng.standard_normal((n_tok, cols)).astype(np.float32)
    products = ffi.new("te_linear[]", len(formats) + 1)
    outputs = []
    y3 = np.full((n_tok, cols), CANARY, dtype=np.float32)
    rows = [*formats.items(), ("F16", 66)]
    weights = [cpu.random_rows(name, n, cols, 7 + i) for i, (name, n) in enumerate(rows)]
    biases = [rng.standard_normal(n).astype(np.float32) for _, n in rows]
    memories = [cpu.Guarded(data) for data, _ in weights]
    for i, (name, n) in enumerate(rows):
        outputs.append(rng.standard_normal((n_tok, n)).astype(np.float32))
        products[i].w = cpu.matrix(name, memories[i].pointer, n, cols)[0]
        products[i].y, products[i].ldy = fp(outputs[i]), n
        products[i].bias, products[i].add = fp(biases[i]), i % 2 == 1
    products[len(formats)].way = lib.TE_BY_ROWS
    before = [y.astype(np.float64) for y in outputs]
    t_name, n_rows = rows[0]
    y1 = rng.standard_normal((n_tok, n_rows)).astype(np.float32)
    max_rows = max(n for _, n in rows)
    with Team(TABLES[table], n_threads, max_tok=n_tok, max_cols=cols, max_rows=max_rows) as team:
        m = cpu.matrix(t_name, memories[0].pointer, n_rows, cols)

        def member(t: Any, ws: Any) -> None:
            lib.te_op_linear(t, ws, products, len(rows), fp(x), cols, n_tok)
            lib.te_barrier(t)
            lib.te_op_linear_t(t, ws, m, fp(y1), n_rows, n_tok, ffi.NULL, fp(y3), cols, False, False)

        team.run(member)
    for i, (name, _) in enumerate(rows):
        way = "int8" if is_int8(table, name) else "rows"
        x64 = seen(table, name, way, x)
        check(
            table, way, outputs[i], x64, weights[i][1].T, biases[i] + (before[i] if i % 2 else 0 * before[i])
        )
    check(table, "columns", y3, y1.astype(np.float64), weights[0][1], 0.0)
    for memory in memories:
        memory.close()


@pytest.mark.parametrize("table", TABLES)
def test_int8_formats(table: str) -> None:
    """Which formats a table multiplies in 8-bit integers, each in one way: AVX2 not those of 8 bits."""
    wide = {"Q8_0", "IQ4_NL", "IQ4_XS"}
    expected = {
        "avx2": {*cpu.INT8} - wide,
        "avx2_vnni": {*cpu.INT8} - wide,
        "avx512": {*cpu.INT8},
        "avx512_bf16": {*cpu.INT8},
    }
    found = [n for k in TABLES[table].gemm.int8 for n, i in cpu.TYPES.items() if k.types >> i & 1]
    assert sorted(found) == sorted(expected.get(table, ()))


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
    assert all(gemm.linear_min_tok[i] >= 1 for i in range(len(gemm.linear_min_tok)))
    for int8 in gemm.int8:
        if not int8.types:
            continue
        found = np.array([[int8.pack_bytes(t, 32 * k) for k in (1, 2, 8, 9, 896)] for t in tokens])
        assert np.all(np.diff(found, axis=0) >= 0)
        assert np.all(np.diff(found, axis=1) >= 0)
        assert found.max() <= 2048 * 28672 * 2
    assert gemm.min_tok >= 1
    assert gemm.row_unit >= 1
