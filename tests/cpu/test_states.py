"""Convolutions and states of every table against doubles, token after token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.cpu.kernels import CANARY, EPS, TABLES, Doubles, Floats, ffi, fp


def values(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> Floats:
    return (rng.standard_normal(shape) * scale).astype(np.float32)


def silu(x: Doubles) -> Doubles:
    return np.asarray(x / (1 + np.exp(-x)))


def convolve(table: str, x: Floats, last: Floats, w: Floats, row: Any, **given: Any) -> Floats:
    """x [rows, n] convolved in the order of row; last is changed."""
    y = np.full((len(x), x.shape[1]), CANARY, np.float32)
    numbers = ffi.new("int32_t[]", list(row))
    c = ffi.new("te_conv *")
    c.w, c.last, c.x, c.y = fp(w), fp(last), fp(x), fp(y)
    c.ld = c.ldx = c.ldy = x.shape[1]
    c.width, c.n_channels, c.row, c.n = len(w), x.shape[1], numbers, len(row)
    for name, value in given.items():
        setattr(c, name, value if name == "silu" else fp(value))
    TABLES[table].conv(c)
    return y


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("width", [2, 3, 4, 8])
@pytest.mark.parametrize("n", [1, 8, 37])
def test_convolution(table: str, width: int, n: int) -> None:
    rng = np.random.default_rng(width * 100 + n)
    n_tok, row = 9, [7, 0, 3, 8, 1]
    x, before, after = (values(rng, n_tok, n) for _ in range(3))
    w, b, last = values(rng, width, n), values(rng, n), values(rng, width - 1, n)
    for given in ({}, {"b": b, "silu": True}, {"before": before, "after": after}):
        own = last.copy()
        y = convolve(table, x, own, w, row, **given)
        seen = x.astype(np.float64) * (before if "before" in given else 1)
        line = np.concatenate([last, seen[row]])
        expected = sum(w[j] * line[j : j + len(row)] for j in range(width)) + (b if "b" in given else 0)
        room = 2 * width * EPS * (np.abs(line).max() * np.abs(w).max() * width + 1)
        expected = silu(expected) if "silu" in given else expected
        expected = expected * after[row] if "after" in given else expected
        assert np.all(np.abs(y[row] - expected) <= room * (1 + np.abs(after).max()))
        assert np.all(y[[i for i in range(n_tok) if i not in row]] == CANARY)
        assert np.allclose(own, line[len(row) :], rtol=1e-6)
        # Cut into two, and channel by channel: the same bits.
        again, parts = last.copy(), np.full_like(y, CANARY)
        for part in (row[:2], row[2:]):
            parts[part] = convolve(table, x, again, w, part, **given)[part]
        assert parts.tobytes() == y.tobytes()
        assert again.tobytes() == own.tobytes()


def scan(
    table: str, state: Floats, x: dict[str, Floats], row: Any, *, delta: bool, skip: float, to: Any
) -> None:
    """Of x the columns of v and y from..to-1; state is changed."""
    numbers, s = ffi.new("int32_t[]", list(row)), ffi.new("te_scan *")
    first, end = to
    s.state = fp(state) + first
    s.ld_state, s.n_k, s.n_v = state.shape[1], state.shape[0], end - first
    s.ldx, s.ldy, s.ld_gate = x["x"].shape[1], state.shape[1], 2
    n_k = state.shape[0]
    s.q, s.k, s.v = fp(x["x"]), fp(x["x"]) + n_k, fp(x["x"]) + 2 * n_k + first
    s.decay, s.rate = fp(x["gate"]), fp(x["gate"]) + 1
    s.y, s.skip, s.delta, s.row, s.n = fp(x["y"]) + first, skip, delta, numbers, len(row)
    TABLES[table].scan(s)


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize(("n_k", "n_v"), [(1, 1), (16, 32), (20, 37), (33, 104)])
@pytest.mark.parametrize("delta", [False, True])
def test_scan(table: str, n_k: int, n_v: int, delta: bool) -> None:
    rng = np.random.default_rng(n_k * n_v)
    n_tok, row, skip = 8, [6, 1, 2, 7, 4], 0.0 if delta else 0.75
    x = values(rng, n_tok, 2 * n_k + n_v)
    x[:, : 2 * n_k] /= np.sqrt(n_k)
    gate = rng.uniform(0.2, 0.95, (n_tok, 2)).astype(np.float32)
    state = values(rng, n_k, n_v)

    def run(cuts: Any, columns: Any) -> tuple[Floats, Floats]:
        own, y = state.copy(), np.full((n_tok, n_v), CANARY, np.float32)
        for part in cuts:
            for to in columns:
                scan(table, own, {"x": x, "gate": gate, "y": y}, part, delta=delta, skip=skip, to=to)
        return own, y

    own, y = run([row], [(0, n_v)])
    expected, seen = state.astype(np.float64), np.zeros((len(row), n_v))
    for i, t in enumerate(row):
        q, k, v = x[t, :n_k].astype(float), x[t, n_k : 2 * n_k].astype(float), x[t, 2 * n_k :].astype(float)
        expected = expected * gate[t, 0]
        expected = expected + np.outer(k, gate[t, 1] * (v - k @ expected if delta else v))
        seen[i] = q @ expected + skip * v
    # A few additions for each row of the state and token, of numbers of about 1.
    room = 8 * EPS * np.sqrt(n_k) * len(row) * (1 + np.abs(expected).max())
    assert np.all(np.abs(own - expected) <= room)
    assert np.all(np.abs(y[row] - seen) <= room)
    assert np.all(y[[i for i in range(n_tok) if i not in row]] == CANARY)
    half = n_v // 2
    for cuts, columns in (([row[:1], row[1:3], row[3:]], [(0, n_v)]), ([row], [(0, half), (half, n_v)])):
        if columns[0] == (0, 0):
            continue
        parts, again = run(cuts, columns)
        assert (parts.tobytes(), again.tobytes()) == (own.tobytes(), y.tobytes())
