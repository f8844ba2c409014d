"""A block of short rows against several vectors, and a softmax in parts, of every table against doubles."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.cpu import kernels as cpu
from tests.cpu.kernels import CANARY, EPS, TABLES, Doubles, ffi, fp, lib

WIDTHS = {
    "F32": (1, 5, 24, 128, 520),
    "F16": (1, 24, 64, 80, 128, 256, 1040),
    "BF16": (24, 128),
    "Q8_0": (32, 128, 256, 544),
    "Q4_K": (256, 768),
}
CASES = [(name, cols) for name, widths in WIDTHS.items() for cols in widths]
MOST = 64


def limit(terms: Doubles, n: int) -> Doubles:
    """The contract's tolerance; terms: absolute values, summed over the last axis."""
    return np.asarray(8 * EPS * math.sqrt(n) * terms.sum(axis=-1))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize(("name", "cols"), CASES)
def test_rows_against_vectors(table: str, name: str, cols: int) -> None:
    kernels = TABLES[table]
    data, w = cpu.random_rows(name, MOST, cols, 1)
    rng = np.random.default_rng(cols)
    pad = 16  # between two vectors, and behind the last
    for n_rows in (1, 3, 4, 37, MOST):
        for n in (1, 2, 3, 7, 16):
            x = np.full((n, cols + pad), np.nan, np.float32)
            x[:, :cols] = rng.standard_normal((n, cols))
            a = np.full((n, n_rows + pad), np.nan, np.float32)
            a[:, :n_rows] = rng.standard_normal((n, n_rows))
            y = np.full((n, n_rows + pad), CANARY, np.float32)
            z = np.full((n, cols + pad), CANARY, np.float32)
            z[:, :cols] = before = rng.standard_normal((n, cols)).astype(np.float32)
            with cpu.Guarded(data[:n_rows].reshape(-1)) as rows:
                m = cpu.matrix(name, rows.pointer, n_rows, cols)
                for following in (ffi.NULL, rows.pointer):
                    z[:, :cols] = before
                    kernels.rows_dot(m, following, fp(x), x.shape[1], n, fp(y), y.shape[1])
                    kernels.rows_sum(m, following, fp(a), a.shape[1], n, fp(z), z.shape[1])
            dots = x[:, None, :cols].astype(np.float64) * w[:n_rows]
            assert np.all(np.abs(y[:, :n_rows] - dots.sum(axis=-1)) <= limit(np.abs(dots), cols))
            sums = a[:, None, :n_rows].astype(np.float64) * w[:n_rows].T
            terms = np.concatenate([np.abs(sums), np.abs(before)[:, :, None]], axis=-1)
            assert np.all(np.abs(z[:, :cols] - before - sums.sum(axis=-1)) <= limit(terms, n_rows + 1))
            assert np.all(y[:, n_rows:] == CANARY)
            assert np.all(z[:, cols:] == CANARY)


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("n", [1, 7, 8, 17, 64, 255, 256])
def test_a_softmax_in_parts(table: str, n: int) -> None:
    rng = np.random.default_rng(n)
    for spread, scale, before in ((1.0, 1.0, -math.inf), (30.0, 0.125, 5.0), (0.1, 2.0, 1e4)):
        x = np.full(n + 16, CANARY, np.float32)
        x[:n] = rng.standard_normal(n) * spread
        if n > 3:
            x[1:n:5] = -np.inf
        top = ffi.new("float *", before)
        largest = max(float(x[:n].max()), before)
        s = (x[:n].astype(np.float64) - largest) * scale
        total = TABLES[table].exp_sum(fp(x), n, scale, top)
        assert top[0] == np.float32(largest)
        off = (1e-6 + EPS * np.abs(np.where(np.isfinite(s), s, 0))) * np.exp(s) + 1e-37
        assert np.all(np.abs(x[:n] - np.exp(s)) <= off)
        assert abs(total - np.exp(s).sum()) <= off.sum() + EPS * math.sqrt(n) * np.exp(s).sum()
        assert np.all(x[n:] == CANARY)


@pytest.mark.parametrize("table", TABLES)
def test_parts_of_nothing_and_of_nan(table: str) -> None:
    for n in (1, 8, 20):
        x = np.full(n, -np.inf, np.float32)
        top = ffi.new("float *", -math.inf)
        assert TABLES[table].exp_sum(fp(x), n, 1.0, top) == 0
        assert np.all(x == 0)
        assert top[0] == -math.inf
        x[n // 2] = np.nan
        assert math.isnan(TABLES[table].exp_sum(fp(x), n, 1.0, top))


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("n", [1, 7, 8, 17, 255])
def test_a_soft_cap(table: str, n: int) -> None:
    rng = np.random.default_rng(n)
    for spread, scale, cap in ((1.0, 0.125, 50.0), (100.0, 1.0, 30.0), (1e30, 1.0, 30.0)):
        x = np.full(n + 16, CANARY, np.float32)
        x[:n] = rng.standard_normal(n) * spread
        expected = cap * np.tanh(scale * x[:n].astype(np.float64) / cap)
        TABLES[table].soft_cap(fp(x), n, scale, cap)
        assert np.all(np.abs(x[:n] - expected) <= 4 * EPS * cap)
        assert np.all(x[n:] == CANARY)


def test_every_table_has_them() -> None:
    assert lib.te_cpu_kernels() != ffi.NULL
    for table in TABLES.values():
        assert ffi.NULL not in (table.rows_dot, table.rows_sum, table.exp_sum, table.soft_cap)
