"""Norms, softmax, addition and activations of every table against doubles."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.cpu import kernels as cpu
from tests.cpu.kernels import CANARY, EPS, TABLES, Doubles, Floats, ffi, fp, lib

LENGTHS = (1, 3, 8, 15, 16, 33, 288, 1024, 4099)
RELU2 = lib.TE_RELU2
RELU, DRELU, SILU, GELU, TANH = lib.TE_RELU, lib.TE_DRELU, lib.TE_SILU, lib.TE_GELU, lib.TE_GELU_TANH


def sigmoid(x: Doubles) -> Doubles:
    with np.errstate(over="ignore"):
        return np.asarray(1 / (1 + np.exp(-x)))


def activation(act: int, x: Doubles, threshold: float) -> Doubles:
    """The five activations in doubles."""
    if act == RELU:
        return np.where(x > threshold, x, 0.0)
    if act == DRELU:
        return np.maximum(x, 0.0)
    if act == GELU:
        return x * np.array([0.5 * math.erfc(-v / math.sqrt(2)) for v in x])
    if act == RELU2:
        return np.square(np.maximum(x, 0))
    if act == SILU:
        return x * sigmoid(x)
    return x * sigmoid(
        2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    )  # (1 + tanh(u)) / 2 without cancellation


def guarded_output(n: int) -> Floats:
    return cpu.floats(n + 32, float(CANARY))


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("n", LENGTHS)
def test_rms_norm(table: str, n: int) -> None:
    rng = np.random.default_rng(n)
    for scale in (1e-3, 1.0, 1e4):
        x = (rng.standard_normal(n) * scale).astype(np.float32)
        w = rng.standard_normal(n).astype(np.float32)
        y = guarded_output(n)
        TABLES[table].rms_norm(fp(x), fp(w), 1e-5, n, fp(y))
        x64 = x.astype(np.float64)
        reference = x64 / np.sqrt(np.mean(x64**2) + np.float32(1e-5)) * w
        assert np.allclose(y[:n], reference, rtol=1e-6, atol=0)
        assert np.all(y[n:] == CANARY)
        TABLES[table].rms_norm(fp(x), fp(w), 1e-5, n, fp(x))
        assert x.tobytes() == y[:n].tobytes()


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_layer_norm(table: str, n: int, with_bias: bool) -> None:
    rng = np.random.default_rng(n)
    for mean in (0.0, 1000.0):  # the spread is small beside the mean: single-precision sums would show
        x = (rng.standard_normal(n) + mean).astype(np.float32)
        w, b = rng.standard_normal((2, n)).astype(np.float32)
        y = guarded_output(n)
        TABLES[table].layer_norm(fp(x), fp(w), fp(b) if with_bias else ffi.NULL, 1e-5, n, fp(y))
        d = x.astype(np.float64) - x.astype(np.float64).mean()
        reference = d / np.sqrt(np.mean(d**2) + np.float32(1e-5)) * w
        # The second rounding is that of x - mean in floats: exact to a few units of the difference.
        limit = 1e-6 * np.abs(reference) + 4 * EPS * np.abs(b) + 1e-6 * np.abs(w)
        assert np.all(np.abs(y[:n] - reference - (b if with_bias else 0)) <= limit)
        assert np.all(y[n:] == CANARY)


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("scale", [1.0, 0.125])
def test_softmax(table: str, n: int, scale: float) -> None:
    rng = np.random.default_rng(n)
    for spread in (0.0, 1.0, 30.0):
        x = np.full(n + 32, CANARY, dtype=np.float32)
        x[:n] = rng.standard_normal(n) * spread
        if n > 3:
            x[1:n:5] = -np.inf
        s = x[:n].astype(np.float64) * scale
        s -= s.max()
        reference = np.exp(s) / np.exp(s).sum()
        TABLES[table].softmax(fp(x), n, scale)
        # The exponent itself is rounded, to eps of its size.
        limit = (1e-6 + EPS * np.abs(np.where(np.isfinite(s), s, 0))) * reference + 1e-37
        assert np.all(np.abs(x[:n] - reference) <= limit)
        assert np.all(x[:n][np.isneginf(s)] == 0)
        assert np.all(x[n:] == CANARY)


@pytest.mark.parametrize("table", TABLES)
def test_softmax_of_nothing_and_of_nan(table: str) -> None:
    for n in (1, 8, 20):
        x = np.full(n, -np.inf, dtype=np.float32)
        TABLES[table].softmax(fp(x), n, 1.0)
        assert np.all(x == 0)
        x = np.zeros(n, dtype=np.float32)
        x[n // 2] = np.nan
        TABLES[table].softmax(fp(x), n, 1.0)
        assert np.isnan(x).any()


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("n", LENGTHS)
def test_add(table: str, n: int) -> None:
    x, before = np.random.default_rng(n).standard_normal((2, n + 9)).astype(np.float32)
    y = before.copy()
    TABLES[table].add(fp(x), n, fp(y))
    assert np.array_equal(y[:n], before[:n] + x[:n])
    assert np.array_equal(y[n:], before[n:])


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("act", [RELU, DRELU, RELU2, SILU, GELU, TANH])
@pytest.mark.parametrize("gated", [False, True])
def test_glu(table: str, act: int, gated: bool) -> None:
    rng = np.random.default_rng(act)
    extremes = [0.0, -0.0, 1e-20, -1e-20, 60.0, -60.0, 200.0, -200.0]
    wide = np.concatenate([np.linspace(-12, 12, 1999), extremes])
    for n in (1, 7, 8, 30, len(wide)):
        g = wide[:n].astype(np.float32) if n == len(wide) else rng.standard_normal(n).astype(np.float32)
        u = rng.standard_normal(n).astype(np.float32) if gated else g
        threshold = 0.25 if act == RELU else 0.0
        h = guarded_output(n)
        TABLES[table].glu(act, threshold, fp(g) if gated else ffi.NULL, fp(u), n, fp(h))
        a = activation(act, g.astype(np.float64), threshold)
        v = u.astype(np.float64)
        factor = (np.maximum(v, 0) if act == DRELU else v) if gated else np.ones(n)
        # 1e-6, and the rounded exponent of the tails: x^2 / 2 of GELU, 1.6 x + 0.08 x^3 of its tanh form.
        size = np.minimum(np.abs(g), 13.0).astype(np.float64)
        exponent = {GELU: size**2, TANH: 2 * size + size**3}.get(act, 2 * size)
        limit = (1e-6 + EPS * exponent) * np.abs(a * factor) + 1e-34
        assert np.all(np.abs(h[:n] - a * factor) <= limit)
        assert np.all(h[n:] == CANARY)


@pytest.mark.parametrize("table", TABLES)
def test_relu_passes_above_the_threshold_only(table: str) -> None:
    g = np.array([0.5, np.nextafter(np.float32(0.5), np.float32(1)), 0.4, -1, np.nan], dtype=np.float32)
    h = np.zeros(5, dtype=np.float32)
    TABLES[table].glu(RELU, 0.5, ffi.NULL, fp(g), 5, fp(h))
    assert h.tolist() == [0, float(g[1]), 0, 0, 0]


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("n", (1, 63, 64, 65, 384, 4099))
def test_signs(table: str, n: int) -> None:
    """Zeros and NaN count as positive; the share of differing signs is exact."""
    rng = np.random.default_rng(n)
    x = rng.standard_normal((6, n)).astype(np.float32)
    x[0, : n // 2] = 0.0
    x[1, : n // 2] = -0.0
    x[2, : n // 2] = np.nan
    words = (n + 63) // 64
    bits = np.full((6, words + 1), 0x5A5A5A5A5A5A5A5A, np.uint64)
    for row, out in zip(x, bits, strict=True):
        TABLES[table].sign_pack(fp(row), n, ffi.cast("uint64_t *", out.ctypes.data))
    assert np.all(bits[:, words] == 0x5A5A5A5A5A5A5A5A)
    expected = np.zeros((6, words * 64), np.uint8)
    expected[:, :n] = x < 0
    packed = np.packbits(expected, axis=1, bitorder="little").view(np.uint64)
    assert np.array_equal(bits[:, :words], packed)
    y = guarded_output(6)
    rows = np.ascontiguousarray(packed)
    TABLES[table].sign_dot(
        ffi.cast("uint64_t *", rows.ctypes.data), 6, ffi.cast("uint64_t *", rows[3].ctypes.data), n, fp(y)
    )
    signs = np.where(x < 0, -1.0, 1.0)
    assert np.array_equal(y[:6], (signs @ signs[3]).astype(np.float32) / np.float32(n))
    assert np.all(y[6:] == CANARY)
