"""Row kernels of every table and format against doubles: dot, axpy, conversion both ways."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest

from tests.cpu import kernels as cpu
from tests.cpu.kernels import CANARY, EPS, FLOATS, INT8, TABLES, TYPES, ffi, fp, lib

OTHERS = tuple(name for name in TYPES if name not in FLOATS + INT8)


def widths(name: str) -> list[int]:
    """Row lengths: tails of every kind, head sizes, a real one, one that is walked in pieces."""
    if name in FLOATS:
        return [1, 5, 7, 16, 17, 31, 64, 80, 100, 128, 333, 1056, 8229]
    if name in cpu.INT8_32:
        return [32, 64, 96, 128, 160, 192, 256, 288, 416, 1056]
    unit = cpu.block(name)[0]
    return [256, 512, 768, 1024] if name in INT8 else [unit, 3 * unit, 5 * unit]


CASES = [(t, n) for t in TABLES for n in TYPES if n in FLOATS + INT8 or t in ("scalar", "avx2", "neon")]


@pytest.mark.parametrize("table, name", CASES)
def test_dot(table: str, name: str) -> None:
    k = TABLES[table].row[TYPES[name]]
    n_rows = 21
    rng = np.random.default_rng(5)
    for cols in widths(name):
        data, w = cpu.random_rows(name, n_rows, cols, 1)
        x = rng.standard_normal(cols).astype(np.float32)
        x64 = cpu.seen(name, x)
        act = cpu.packed(k, x)
        reference = w @ x64
        limit = 8 * EPS * np.sqrt(cols) * (np.abs(w) @ np.abs(x64))
        sparse = np.array([0, 3, 4, 11, 20], dtype=np.int32)
        with cpu.Guarded(data) as memory:
            m = cpu.matrix(name, memory.pointer, n_rows, cols)
            last_rows = ffi.new("te_ahead *", {"m": m, "rows": cpu.row_list(None, 18, 3)[0]})
            cases = [(None, 0, n_rows), (None, 6, 15), (None, 20, 1), (sparse, 0, 5), (sparse, 0, 0)]
            for rows, first, n in cases:
                for ahead in (cpu.NOTHING_AHEAD, last_rows):
                    y = cpu.floats(n + 16, float(CANARY))
                    cpu.dot(k, m, cpu.row_list(rows, first, n), act, y, ahead)
                    at = np.arange(first, first + n) if rows is None else rows[:n]
                    assert np.all(np.abs(y[:n] - reference[at]) <= limit[at]), (cols, n)
                    assert np.all(y[n:] == CANARY)


@pytest.mark.parametrize("table, name", CASES)
def test_axpy(table: str, name: str) -> None:
    k = TABLES[table].row[TYPES[name]]
    n_rows = 21
    rng = np.random.default_rng(6)
    for cols in widths(name):
        data, w = cpu.random_rows(name, n_rows, cols, 2)
        sparse = np.array([1, 2, 9, 10, 12, 20], dtype=np.int32)
        size = cpu.acc_floats(cols)
        with cpu.Guarded(data) as memory:
            m = cpu.matrix(name, memory.pointer, n_rows, cols)
            cases = [
                (None, 0, n_rows),
                (None, 5, 16),
                (None, 13, 8),
                (None, 20, 1),
                (sparse, 0, 6),
                (sparse, 0, 0),
            ]
            for rows, first, n in cases:
                at = np.arange(first, first + n) if rows is None else rows[:n]
                a = rng.standard_normal(n).astype(np.float32)
                acc = cpu.floats(size + 32)
                acc[size:] = CANARY
                cpu.axpy(k, m, cpu.row_list(rows, first, n), a, acc)
                assert np.all(acc[size:] == CANARY)
                before = rng.standard_normal(cols + 16).astype(np.float32)
                y = before.copy()
                for lo in range(0, cols, 80):
                    k.acc_add(fp(acc), cols, lo, min(lo + 80, cols), fp(y))
                terms = a[:, None].astype(np.float64) * w[at]
                limit = 8 * EPS * np.sqrt(max(n, 1)) * (np.abs(terms).sum(axis=0) + np.abs(before[:cols]))
                assert np.all(np.abs(y[:cols] - before[:cols] - terms.sum(axis=0)) <= limit), (cols, n)
                assert np.all(y[cols:] == before[cols:])


@pytest.mark.parametrize("table, name", CASES)
def test_no_list_is_read_past_its_end(table: str, name: str) -> None:
    """Kernels look ahead in their own list and in the one that the caller names."""
    k = TABLES[table].row[TYPES[name]]
    cols = 256
    listed = np.array([0, 3, 4, 11, 12, 13, 17, 19, 20], dtype=np.int32)
    data, _ = cpu.random_rows(name, 21, cols, 1)
    act = cpu.packed(k, np.random.default_rng(5).standard_normal(cols).astype(np.float32))
    acc = cpu.floats(cpu.acc_floats(cols))
    with cpu.Guarded(data) as memory, cpu.Guarded(listed.view(np.uint8)) as lists:
        m = cpu.matrix(name, memory.pointer, 21, cols)
        end = ffi.cast("int32_t *", lists.pointer) + len(listed)
        for n in range(1, len(listed) + 1):
            rows = ffi.new("te_rows *", {"row": end - n, "n": n})
            for n_next in range(len(listed) + 1):
                ahead = ffi.new("te_ahead *", {"m": m, "rows": {"row": end - n_next, "n": n_next}})
                for named in (ahead, cpu.NOTHING_AHEAD):
                    y = cpu.floats(n)
                    cpu.dot(k, m, rows, act, y, named)
                    cpu.axpy(k, m, rows, y, acc, named)


@pytest.mark.parametrize("name", sorted(cpu.HALVES.keys() & set(INT8)))
@pytest.mark.parametrize("table", TABLES)
def test_the_largest_products(table: str, name: str) -> None:
    """Sums in few bits hold codes and activations that are all as large as they can be, of either sign."""
    k = TABLES[table].row[TYPES[name]]
    size, n_rows, n_tokens = cpu.block(name)[1], 32, 6
    cols = 3 * max(cpu.block(name)[0], 256)
    blocks = np.zeros((n_rows, cols // cpu.block(name)[0], size), dtype=np.uint8)
    blocks[1::4] = 0xFF  # Q6_K's scales: 0, -1, 127 and -128
    blocks[2::4], blocks[3::4] = 0x7F, 0x80
    if name == "Q6_K":
        blocks[2::4, :, :192], blocks[3::4, :, :192] = 0xFF, 0
    for at in cpu.HALVES[name]:
        blocks[:, :, at : at + 2] = np.full(1, 2.0**-8, np.float16).view(np.uint8)
    data = blocks.reshape(n_rows, -1)
    w = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[name]).astype(np.float64)
    x = np.ones((n_tokens, cols), dtype=np.float32)
    x[1::2] = -1
    x[2:4, ::2] = 0
    act = np.stack([cpu.packed(k, own) for own in x])
    act = np.pad(act, ((0, 0), (0, -act.shape[1] % 16)))
    places = cpu.floats(act.size)
    places[:] = act.ravel()
    y = cpu.floats(n_tokens * n_rows)
    with cpu.Guarded(data) as memory:
        m = cpu.matrix(name, memory.pointer, n_rows, cols)
        rows, tokens = cpu.row_list(None, 0, n_rows), ffi.new("te_tokens *", {"n": n_tokens})
        act_p = ffi.cast("void *", places.ctypes.data)
        k.dot_batch(m, rows[0], cpu.NOTHING_AHEAD[0], tokens[0], act_p, 4 * act.shape[1], fp(y), n_rows)
        limit = 8 * EPS * np.sqrt(cols) * (np.abs(x.astype(np.float64)) @ np.abs(w).T) + 1e-30
        assert np.all(np.abs(y.reshape(n_tokens, n_rows) - x.astype(np.float64) @ w.T) <= limit)
        for t in range(n_tokens):
            alone = cpu.floats(n_rows)
            cpu.dot(k, m, rows, places[t * act.shape[1] :], alone)
            assert alone.tobytes() == y[t * n_rows : (t + 1) * n_rows].tobytes()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("table, name", CASES)
def test_a_batch_has_the_bits_of_one(table: str, name: str) -> None:
    """dot_batch and axpy_batch give what dot and axpy give for the rows a token wants, and write no more."""
    k = TABLES[table].row[TYPES[name]]
    n_rows, most = 39, 29
    rng = np.random.default_rng(9)
    wide = {1: 1300, 32: 2400}.get(cpu.block(name)[0], 11 * cpu.block(name)[0])
    for cols in (*widths(name)[-2:], wide):
        data, _ = cpu.random_rows(name, n_rows, cols, 5)
        stride, size = k.act_bytes(cols) // 4 + 16, cpu.acc_floats(cols) + 16
        stride += -stride % 16
        acts = cpu.floats(most * stride)
        for t in range(most):
            act = cpu.packed(k, rng.standard_normal(cols).astype(np.float32))
            acts[t * stride : t * stride + len(act)] = act
        a = rng.standard_normal((most, n_rows)).astype(np.float32)
        bits = np.array([rng.integers(0, 1 << 32) for _ in range(n_rows)], dtype=np.uint32)
        bits[3], bits[5] = 0, 0xFFFFFFFF
        same = np.full(n_rows, 0x5B6DD, dtype=np.uint32)
        nearly_all = np.full(n_rows, 0x1FFDBFFE, dtype=np.uint32)  # 26 of 29
        sparse = np.flatnonzero(rng.random(n_rows) < 0.6).astype(np.int32)
        with cpu.Guarded(data) as memory:
            m = cpu.matrix(name, memory.pointer, n_rows, cols)
            last_rows = ffi.new("te_ahead *", {"m": m, "rows": cpu.row_list(None, 30, 9)[0]})
            for n, rows, who in (
                (2, None, None),
                (8, sparse, bits),
                (17, sparse, None),
                (19, sparse, same),
                (most, None, bits),
                (most, sparse, None),
                (most, sparse, nearly_all),
            ):
                listed = np.arange(n_rows, dtype=np.int32) if rows is None else rows
                c_rows = cpu.row_list(rows, 0, len(listed))
                tokens = ffi.new("te_tokens *", {"n": n})
                if who is not None:
                    tokens.bits = ffi.cast("uint32_t *", who.ctypes.data)
                y = np.full((n, len(listed) + 3), CANARY, dtype=np.float32)
                act_p = ffi.cast("void *", acts.ctypes.data)
                k.dot_batch(m, c_rows[0], last_rows[0], tokens[0], act_p, 4 * stride, fp(y), len(listed) + 3)
                sums = cpu.floats(n * size)
                sums[:] = np.tile(rng.standard_normal(size).astype(np.float32), n)
                start = sums.reshape(n, size)[0].copy()
                k.axpy_batch(m, c_rows[0], last_rows[0], tokens[0], fp(a), n_rows, fp(sums), size)
                for t in range(n):
                    on = np.array([who is None or bool(who[i] >> t & 1) for i in range(len(listed))])
                    own = listed[on]
                    alone = cpu.floats(len(own))
                    cpu.dot(k, m, cpu.row_list(own, 0, len(own)), acts[t * stride :], alone)
                    assert y[t, : len(listed)][on].tobytes() == alone.tobytes(), (cols, n, t)
                    assert np.all(y[t, : len(listed)][~on] == CANARY) and np.all(
                        y[t, len(listed) :] == CANARY
                    )
                    acc = cpu.floats(size)
                    acc[:] = start
                    cpu.axpy(k, m, cpu.row_list(own, 0, len(own)), a[t, : len(listed)][on].copy(), acc)
                    assert sums[t * size : (t + 1) * size].tobytes() == acc.tobytes(), (cols, n, t)


@pytest.mark.parametrize("table, name", [c for c in CASES if c[1] in FLOATS + INT8])
def test_axpy_zero_rows_change_no_bit(table: str, name: str) -> None:
    k = TABLES[table].row[TYPES[name]]
    cols, n_rows = 512, 40
    data, _ = cpu.random_rows(name, n_rows, cols, 3)
    a = np.random.default_rng(7).standard_normal(n_rows).astype(np.float32)
    a[np.random.default_rng(8).random(n_rows) < 0.6] = 0
    left = np.flatnonzero(a).astype(np.int32)
    dense, sparse = (cpu.floats(cpu.acc_floats(cols)) for _ in range(2))
    m = cpu.matrix(name, ffi.cast("void *", data.ctypes.data), n_rows, cols)
    cpu.axpy(k, m, cpu.row_list(None, 0, n_rows), a, dense)
    cpu.axpy(k, m, cpu.row_list(left, 0, len(left)), a[left].copy(), sparse)
    assert dense.tobytes() == sparse.tobytes()
    assert np.any(dense != 0)


@pytest.mark.parametrize("table", TABLES)
def test_rows_may_lie_apart(table: str) -> None:
    """A stride that is longer than a row: K or V of one head among several."""
    k = TABLES[table].row[TYPES["F16"]]
    n_rows, cols, stride = 9, 80, 400
    data, w = cpu.random_rows("F16", n_rows, cols, 4)
    wide = np.zeros((n_rows, stride), dtype=np.uint8)
    wide[:, : 2 * cols] = data
    x = np.random.default_rng(1).standard_normal(cols).astype(np.float32)
    y = cpu.floats(n_rows)
    m = cpu.matrix("F16", ffi.cast("void *", wide.ctypes.data), n_rows, cols, stride)
    act = cpu.packed(k, x)
    cpu.dot(k, m, cpu.row_list(None, 0, n_rows), act, y)
    assert np.all(np.abs(y - w @ x) <= 8 * EPS * np.sqrt(cols) * (np.abs(w) @ np.abs(x)))


@pytest.mark.parametrize("table, name", CASES)
def test_to_f32(table: str, name: str) -> None:
    k = TABLES[table].row[TYPES[name]]
    unit = cpu.block(name)[0]
    for cols in widths(name):
        data, w = cpu.random_rows(name, 1, cols, 5)
        groups = np.abs(w).reshape(-1, unit).max(axis=1).repeat(unit)
        with cpu.Guarded(data) as memory:
            for start in {0, cols // unit // 2 * unit}:
                n = cols - start
                out = cpu.floats(n + 16, float(CANARY))
                k.to_f32(memory.pointer, start, n, fp(out))
                assert np.all(np.abs(out[:n] - w[0, start:]) <= 4 * EPS * groups[start:]), cols
                assert np.all(out[n:] == CANARY)


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q8_0"])
def test_from_f32_gives_the_reference_bits(table: str, name: str) -> None:
    k = TABLES[table].row[TYPES[name]]
    rng = np.random.default_rng(9)
    for n in (32, 64, 96) if name == "Q8_0" else (1, 5, 16, 33, 100):
        x = (rng.standard_normal(n) * 10.0 ** rng.integers(-6, 4, n)).astype(np.float32)
        # Ties, which are rounded away from zero in Q8_0: with a maximum of 127 the scale is 1.
        x[: n // 2] = rng.integers(-126, 126, n // 2) + np.float32(0.5)
        x[n // 2 :: 3] = 0
        if name == "Q8_0":
            x[::32] = 127
        size = cpu.row_bytes(name, n)
        out, reference = np.full(size + 8, 0xA5, dtype=np.uint8), np.full(size + 8, 0xA5, dtype=np.uint8)
        k.from_f32(fp(x), ffi.cast("void *", out.ctypes.data), n)
        lib.te_quantize_row(TYPES[name], fp(x), ffi.cast("void *", reference.ctypes.data), n)
        assert out.tobytes() == reference.tobytes()


@pytest.mark.parametrize("table", TABLES)
def test_from_f32_of_all_halves(table: str) -> None:
    every = np.arange(65536, dtype=np.uint16).view(np.float16)
    every = every[np.isfinite(every)]
    x = every.astype(np.float32)
    x = np.concatenate([x, x * np.float32(1 + 2**-11), x * np.float32(1 - 2**-12), x * np.float32(2**13)])
    out = np.zeros(len(x), dtype=np.uint16)
    TABLES[table].row[TYPES["F16"]].from_f32(fp(x), ffi.cast("void *", out.ctypes.data), len(x))
    with np.errstate(over="ignore"):
        assert np.array_equal(out, x.astype(np.float16).view(np.uint16))


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("name", INT8)
def test_activations_without_a_size(table: str, name: str) -> None:
    """All zeros, denormals and infinities: no crash, and zero stays zero."""
    k = TABLES[table].row[TYPES[name]]
    data, _ = cpu.random_rows(name, 2, 256, 6)
    m = cpu.matrix(name, ffi.cast("void *", data.ctypes.data), 2, 256)
    for fill, finite in ((0.0, True), (1e-42, True), (np.inf, False), (np.nan, False)):
        x = np.zeros(256, dtype=np.float32)
        x[::3] = fill
        act = cpu.packed(k, x)
        y = cpu.floats(2, 3.0)
        cpu.dot(k, m, cpu.row_list(None, 0, 2), act, y)
        assert np.all(y == 0) if finite else not np.any(np.isfinite(y))


def test_every_entry_is_filled() -> None:
    ids: dict[int, str] = ffi.typeof("te_type").elements
    for table in TABLES.values():
        for number in range(64):
            k: Any = table.row[number]
            fields = ("act_bytes", "act_pack", "dot", "axpy", "acc_add", "to_f32")
            filled = [getattr(k, field) != ffi.NULL for field in fields]
            assert all(filled) if number in ids and lib.te_can_dequantize(number) else not any(filled), number
            assert (k.from_f32 != ffi.NULL) == (ids.get(number) in ("TE_F32", "TE_F16", "TE_BF16", "TE_Q8_0"))
