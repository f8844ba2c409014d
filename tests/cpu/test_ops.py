"""Products by a team with row kernels: te_op_linear, te_op_linear_t; sharing, bias, adding, repeatability."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.core.capi import CoreError
from tests.cpu import kernels as cpu
from tests.cpu.kernels import CANARY, EPS, TABLES, Floats, ffi, fp, lib
from tests.cpu.team import Team

TYPES = ("F32", "F16", "Q8_0", "Q4_0", "Q6_K", "Q4_1")
BEST = list(TABLES)[-1]


def rows_only(name: str) -> Any:
    """A table whose GEMM is out of reach: row kernels do it all."""
    table = ffi.new("te_kernels *", TABLES[name][0])
    table.gemm.min_tok = 1 << 30
    for i in range(len(table.gemm.linear_min_tok)):
        table.gemm.linear_min_tok[i] = 0xFFFF
    return table


Product = tuple[str, int, bool, bool]  # format, rows, bias, add


def linear(team: Team, products: list[Product], cols: int, n_tok: int, seed: int = 0) -> list[Floats]:
    """Runs one te_op_linear over random products and checks it. Returns the outputs."""
    rng = np.random.default_rng(seed)
    ldx = cols + 3
    x = rng.standard_normal((n_tok, ldx)).astype(np.float32)
    c_products = ffi.new("te_linear[]", len(products))
    outputs, references, keep = [], [], []
    for i, (name, n_rows, with_bias, add) in enumerate(products):
        data, w = cpu.random_rows(name, n_rows, cols, seed + i)
        memory = cpu.Guarded(data)
        y = np.full((n_tok, n_rows + 5), CANARY, dtype=np.float32)
        y[:, :n_rows] = rng.standard_normal((n_tok, n_rows))
        bias = rng.standard_normal(n_rows).astype(np.float32)
        reference = y.astype(np.float64)
        x64 = np.stack([cpu.seen(name, x[t, :cols]) for t in range(n_tok)])
        rest = (bias if with_bias else 0) + (y[:, :n_rows] if add else 0)
        reference[:, :n_rows] = x64 @ w.T + rest
        limit = 8 * EPS * np.sqrt(cols) * (np.abs(x64) @ np.abs(w).T) + 4 * EPS * np.abs(rest)
        p = c_products[i]
        p.w = cpu.matrix(name, memory.pointer, n_rows, cols)[0]
        p.bias, p.y, p.ldy, p.add = fp(bias) if with_bias else ffi.NULL, fp(y), n_rows + 5, add
        outputs.append(y)
        references.append((reference, limit))
        keep.append((memory, bias))
    team.run(lambda t, ws: lib.te_op_linear(t, ws, c_products, len(products), fp(x), ldx, n_tok))
    for (_, n_rows, _, _), y, (reference, limit) in zip(products, outputs, references, strict=True):
        assert np.all(np.abs(y[:, :n_rows] - reference[:, :n_rows]) <= limit)
        assert np.all(y[:, n_rows:] == CANARY)
    for memory, _ in keep:
        memory.close()
    return outputs


@pytest.mark.sampled(3)
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("n_threads", [1, 2, 3, 4])
def test_linear(table: str, n_threads: int) -> None:
    with Team(rows_only(table), n_threads, max_tok=5, max_cols=512, max_rows=64) as team:
        for n_tok in (1, 2, 5):
            for name in TYPES:
                # More rows than max_cols and max_rows (an output head), one row, formats that alternate.
                products = [(name, 77, True, False), (name, 600, False, True), ("F16", 33, True, True)]
                products.append((name, 1, False, False))
                linear(team, products, 512, n_tok)
            linear(team, [("F16", 50, False, False), ("F32", 7, True, True)], 83, n_tok)


def test_linear_repeats_bit_for_bit() -> None:
    for n_threads in (1, 3):
        with Team(rows_only(BEST), n_threads, max_tok=3, max_cols=512, max_rows=64) as team:
            products = [("Q4_0", 300, True, False), ("Q6_K", 90, False, True)]
            first = linear(team, products, 512, 3)
            for _ in range(3):
                assert [y.tobytes() for y in linear(team, products, 512, 3)] == [y.tobytes() for y in first]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("name", ["Q4_0", "Q8_0", "Q4_K", "F16"])
def test_a_token_has_its_bits_among_any_number(table: str, name: str) -> None:
    """From one to 33 tokens, by one member and by four, who pack what several tokens bring together."""
    cols, most, names = 2560, 33, (name, "Q6_K", "F32")
    x = np.random.default_rng(7).standard_normal((most, cols)).astype(np.float32)
    rows = (37, 21, 5)
    data = [cpu.random_rows(n, r, cols, 2)[0] for n, r in zip(names, rows, strict=True)]
    c_products = ffi.new("te_linear[]", len(names))
    y = [np.zeros((most, r), dtype=np.float32) for r in rows]
    for p, n, r, d, out in zip(c_products, names, rows, data, y, strict=True):
        p.w, p.y, p.ldy = cpu.matrix(n, ffi.from_buffer(d), r, cols)[0], fp(out), r
    alone: list[list[bytes]] = []
    for n_threads in (1, 4):
        with Team(rows_only(table), n_threads, max_tok=most, max_cols=cols, max_rows=64) as team:
            for t in range(most if n_threads == 1 else 0):
                at = fp(x[t])
                team.run(lambda m, ws, at=at: lib.te_op_linear(m, ws, c_products, 3, at, cols, 1))
                alone.append([out[0].tobytes() for out in y])
            for n_tok in range(2, most + 1):
                for out in y:
                    out[:] = CANARY
                team.run(lambda m, ws, n=n_tok: lib.te_op_linear(m, ws, c_products, 3, fp(x), cols, n))
                for t in range(n_tok):
                    assert [out[t].tobytes() for out in y] == alone[t], (n_threads, n_tok, t)
                assert all(np.all(out[n_tok:] == CANARY) for out in y)


def linear_t(team: Team, name: str, n_rows: int, cols: int, n_tok: int, with_bias: bool, add: bool) -> Floats:
    """Runs one te_op_linear_t and checks it."""
    rng = np.random.default_rng(n_rows)
    data, w = cpu.random_rows(name, n_rows, cols, 3)
    h = rng.standard_normal((n_tok, n_rows + 1)).astype(np.float32)
    h[:, ::3] = 0
    bias = rng.standard_normal(cols).astype(np.float32)
    y = np.full((n_tok, cols + 5), CANARY, dtype=np.float32)
    y[:, :cols] = rng.standard_normal((n_tok, cols))
    rest = (bias if with_bias else 0) + (y[:, :cols].astype(np.float64) if add else 0)
    reference = h[:, :n_rows].astype(np.float64) @ w + rest
    size = np.abs(h[:, :n_rows]) @ np.abs(w) + np.abs(bias) + np.abs(y[:, :cols])
    with cpu.Guarded(data) as memory:
        m = cpu.matrix(name, memory.pointer, n_rows, cols)
        b = fp(bias) if with_bias else ffi.NULL
        out = (b, fp(y), cols + 5, add, False)
        team.run(lambda t, ws: lib.te_op_linear_t(t, ws, m, fp(h), n_rows + 1, n_tok, *out))
    assert np.all(np.abs(y[:, :cols] - reference) <= 8 * EPS * np.sqrt(n_rows) * size)
    assert np.all(y[:, cols:] == CANARY)
    return y


@pytest.mark.sampled(2)
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("n_threads", [1, 2, 4])
def test_linear_t(table: str, n_threads: int) -> None:
    with Team(rows_only(table), n_threads, max_tok=4, max_cols=768, max_rows=64) as team:
        for name in TYPES:
            for case in ((1, False, False), (1, True, True), (4, True, False), (3, False, True)):
                linear_t(team, name, 200, 768, *case)
        linear_t(team, "F16", 3, 83, 2, True, True)
        linear_t(team, "Q8_0", 50, 96, 2, True, True)
        first = linear_t(team, "Q4_0", 100, 288, 2, True, True)
        assert linear_t(team, "Q4_0", 100, 288, 2, True, True).tobytes() == first.tobytes()


def test_more_tokens_than_one_pass_takes() -> None:
    with Team(rows_only(BEST), 2, max_tok=70, max_cols=256, max_rows=64) as team:
        linear(team, [("F16", 40, True, True), ("Q8_0", 33, False, False)], 256, 70)
        linear_t(team, "F16", 60, 96, 70, True, True)


def test_workspace_limits() -> None:
    table = TABLES[BEST]
    most = 2**31 - 1
    wrong: list[dict[str, int]] = [{"max_tok": 0}, {"max_cols": -1}, {"n_threads": 0}, {"max_rows": 0}]
    for limits in (*wrong, {"max_tok": most}, {"max_cols": most}, {"max_rows": most}, {"n_threads": most}):
        with pytest.raises(CoreError, match="TE_ARGUMENT"):
            _team(table, **limits)
    with pytest.raises(CoreError, match=r"TE_MEMORY.*(too large|no memory)"):
        _team(table, max_tok=most - 1000, max_cols=most - 1000)
    with Team(table, 2, max_tok=2, max_cols=100, max_rows=300) as team:
        size = lib.te_workspace_bytes(team.workspace)
        assert 2 * 300 * 4 < size < 64 << 20


@pytest.mark.parametrize("name", TABLES)
def test_room_for_more_is_enough_for_less(name: str) -> None:
    """A workspace has room for its limits, and operations take fewer tokens and columns of it."""
    table = TABLES[name]
    rng = np.random.default_rng(6)
    rooms = [
        table.gemm.pack_bytes,
        table.gemm.scratch_bytes,
        table.floats.pack_bytes,
        table.floats.scratch_bytes,
    ]
    rooms += [way.pack_bytes for way in table.gemm.int8 if way.types]
    for n_tok, cols in zip(
        rng.integers(1, 700, 200).tolist(), rng.integers(1, 9000, 200).tolist(), strict=True
    ):
        fewer, narrower = int(rng.integers(1, n_tok + 1)), int(rng.integers(1, cols + 1))
        assert all(room(fewer, narrower) <= room(n_tok, cols) for room in rooms), (
            fewer,
            n_tok,
            narrower,
            cols,
        )
        packs = [row.act_bytes for row in table.row if row.act_bytes]
        assert all(pack(narrower) <= pack(cols) for pack in packs), (narrower, cols)


def _team(table: object, n_threads: int = 1, max_tok: int = 1, max_cols: int = 1, max_rows: int = 1) -> Team:
    return Team(table, n_threads, max_tok=max_tok, max_cols=max_cols, max_rows=max_rows)


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0"])
def test_products_of_floats(name: str, kind: str) -> None:
    """Nothing of x is rounded; a token's bits do not depend on how many there are, nor on who shares them."""
    n_rows, cols, most = 133, 544, 150
    rng = np.random.default_rng(3)
    x = rng.standard_normal((most, cols)).astype(np.float32)
    data, w = cpu.random_rows(kind, n_rows, cols, 1)
    bias = rng.standard_normal(n_rows).astype(np.float32)
    limit = 8 * EPS * np.sqrt(cols) * (np.abs(x) @ np.abs(w).T) + 4 * EPS * np.abs(bias)
    first = None
    with cpu.Guarded(data) as memory:
        for n_threads in (1, 3):
            sizes = {"max_tok": most, "max_cols": cols, "max_rows": n_rows, "mixture": True}
            with Team(TABLES[name], n_threads, **sizes) as team:
                for n_tok in (most, 1, 7, 49):
                    y = np.full((n_tok, n_rows + 5), CANARY, np.float32)
                    one = ffi.new("te_linear *")
                    one.w = cpu.matrix(kind, memory.pointer, n_rows, cols)[0]
                    one.bias, one.y, one.ldy = fp(bias), fp(y), n_rows + 5
                    team.run(lambda t, ws, p=one, n=n_tok: lib.te_op_linear_floats(t, ws, p, fp(x), cols, n))
                    first = y if first is None else first
                    assert np.array_equal(y, first[:n_tok])
    assert np.all(np.abs(first[:, :n_rows] - (x.astype(np.float64) @ w.T + bias)) <= limit)
    assert np.all(first[:, n_rows:] == CANARY)
