"""The fused feed-forward against doubles: activations, modes, lists, masks, threads; counts, repeats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.cpu import kernels as cpu
from tests.cpu.kernels import CANARY, EPS, TABLES, Doubles, Floats, ffi, fp, lib
from tests.cpu.team import Team
from tests.cpu.test_elem import DRELU, GELU, RELU, SILU, TANH, activation

BEST = list(TABLES)[-1]
Mask = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Layer:
    """Random weights of a feed-forward: bytes and values of gate, up and down (transposed)."""

    types: tuple[str, str, str]
    act: int
    cols: int
    n_ff: int
    gated: bool = True
    threshold: float = 0.0
    bias: bool = False

    def weights(self, which: int) -> tuple[cpu.Bytes, Doubles]:
        return cpu.random_rows(self.types[which], self.n_ff, self.cols, 40 + which)

    def up_bias(self) -> Floats:
        return np.random.default_rng(1).standard_normal(self.n_ff).astype(np.float32)


@dataclass(frozen=True)
class Result:
    y: Floats
    hidden: Floats
    counts: dict[str, int]


def inputs(
    layer: Layer, values: list[Doubles], listed: npt.NDArray[np.bool_]
) -> tuple[Floats, tuple[Doubles, Doubles, Doubles]]:
    """Activations x, and what follows from them: act(gate) (1 without gates), h, and how far h may be off.

    The x are the first that leave no gate so near to its threshold that rounding decides.
    """
    for seed in range(100):
        # Small enough that no SiLU or GELU falls to 0, which would count as not fired.
        normal = np.random.default_rng(seed).standard_normal((len(listed), layer.cols + 2))
        x = (normal * 0.3).astype(np.float32)

        def product(which: int, x: Floats = x) -> tuple[Doubles, Doubles]:
            seen = np.stack([cpu.seen(layer.types[which], row[: layer.cols]) for row in x])
            limit = 8 * EPS * np.sqrt(layer.cols) * (np.abs(seen) @ np.abs(values[which]).T)
            return seen @ values[which].T, limit

        def act(v: Doubles) -> Doubles:
            return activation(layer.act, v.ravel(), layer.threshold).reshape(v.shape)

        u, u_error = product(1)
        if layer.bias:
            u += layer.up_bias()
            u_error = u_error + 2 * EPS * np.abs(u)
        least = layer.threshold if layer.act == RELU else 0.0
        if layer.gated:
            pre, pre_error = product(0)
            g = act(pre)
            second = np.maximum(u, 0) if layer.act == DRELU else u
            h, h_error = g * second, 1.2 * pre_error * np.abs(second) + np.abs(g) * u_error
            clear = (np.abs(pre - least) > pre_error) & ((layer.act != DRELU) | (np.abs(u) > u_error))
        else:
            g, h, h_error = np.ones_like(u), act(u), 1.2 * u_error
            clear = np.abs(u - least) > u_error
        if layer.act not in (RELU, DRELU) or np.all(clear | ~listed):
            h = np.where(listed, h, 0)
            return x, (g, h, np.where(h != 0, h_error + 4e-6 * np.abs(h), 0))
    raise AssertionError("no inputs found")


def run(
    team: Team,
    layer: Layer,
    *,
    n_tok: int = 1,
    rows: npt.NDArray[np.int32] | None = None,
    n_of: tuple[int, ...] = (),
    mask: Mask | None = None,
    skip: bool = False,
    down: bool = True,
    repeats: int = 1,
) -> Result:
    """Runs te_op_ffn (`repeats` times in one parallel region, without barriers between) and checks it all.

    n_of: how many of the rows each member has; else equal shares.
    """
    cols, n_ff = layer.cols, layer.n_ff
    memories, values = [], []
    f = ffi.new("te_ffn *")
    for i, name in enumerate(("gate", "up", "down")):
        data, w = layer.weights(i)
        memories.append(cpu.Guarded(data))
        values.append(w)
        if (name != "gate" or layer.gated) and (name != "down" or down):
            setattr(f, name, cpu.matrix(layer.types[i], memories[-1].pointer, n_ff, cols)[0])
    bias = layer.up_bias()
    f.up_bias = fp(bias) if layer.bias else ffi.NULL
    f.act, f.threshold = layer.act, layer.threshold

    listed = np.zeros((n_tok, n_ff), dtype=bool)
    listed[:, slice(None) if rows is None else rows] = True
    if mask is not None:
        listed &= mask[:, :n_ff] != 0
    x, expected_h = inputs(layer, values, listed)
    rng = np.random.default_rng(17)
    y = np.full((n_tok, cols + 3), CANARY, dtype=np.float32)
    y[:, :cols] = rng.standard_normal((n_tok, cols))
    before = y.copy()
    hidden = np.full((n_tok, n_ff + 1), CANARY, dtype=np.float32)
    io = ffi.new("te_ffn_io *")
    io.x, io.ldx, io.n_tok = fp(x), cols + 2, n_tok
    if mask is not None:
        io.mask, io.ld_mask = fp(mask), mask.shape[1]
    if down:
        io.y, io.ldy = fp(y), cols + 3
    else:
        io.hidden, io.ld_hidden = fp(hidden), n_ff + 1
    counts = ffi.new("te_ffn_counts[]", team.n_threads)
    n_rows = n_ff if rows is None else len(rows)
    if rows is not None and n_of:
        io.room = max(n_of) + 1
        apart = np.full((len(n_of), io.room), 1 << 30, dtype=np.int32)  # no row where nobody may look
        for i, part in enumerate(np.split(rows, np.cumsum(n_of)[:-1])):
            apart[i, : len(part)] = part
        shares = np.array(n_of, dtype=np.int32)
        rows, io.n_of = apart.ravel(), ffi.cast("int32_t *", shares.ctypes.data)
    c_rows = cpu.row_list(rows, 0, n_rows)
    place = np.random.default_rng(6).permutation(n_rows).astype(np.int32)
    stored = np.full(n_rows, CANARY, dtype=np.float32)
    next_to_each_other = not down and n_tok == 1 and rows is not None and mask is None
    if next_to_each_other:
        io.listed, io.place = fp(stored), ffi.cast("int32_t *", place.ctypes.data)

    def body(t: Any, ws: Any) -> None:
        for _ in range(repeats):
            lib.te_op_ffn(t, ws, f, c_rows[0], skip, io, counts + t.ith)

    team.run(body)
    for memory in memories:
        memory.close()
    fields = ("listed", "computed", "fired", "rows", "bytes")
    sums = {field: sum(getattr(counts[i], field) for i in range(team.n_threads)) for field in fields}

    g, h, h_error = expected_h
    if down:
        w = values[2]
        reference = repeats * (h @ w)
        size = np.abs(h) @ np.abs(w) + np.abs(before[:, :cols])
        limit = repeats * (h_error @ np.abs(w) + 8 * EPS * np.sqrt(n_ff) * size)
        assert np.all(np.abs(y[:, :cols] - before[:, :cols] - reference) <= limit)
        assert np.all(y[:, cols:] == CANARY)
        assert np.all(hidden == CANARY)
    else:
        assert np.all(np.abs(hidden[:, :n_ff] - h)[listed] <= h_error[listed])
        assert np.all(hidden[:, :n_ff][~listed] == CANARY)
        assert not next_to_each_other or np.array_equal(stored[place], hidden[0, rows])
        assert np.all(hidden[:, n_ff:] == CANARY)
        assert np.array_equal(y, before)

    # The counts: pairs, and rows in each pass of up to 32 tokens.
    fires = (h != 0) & listed
    passes = (g != 0) & listed
    used = (passes if layer.gated else fires) if skip else listed
    expected = {"listed": listed.sum(), "computed": used.sum(), "fired": fires.sum(), "rows": 0, "bytes": 0}
    for first in range(0, n_tok, 32):
        tokens = slice(first, first + 32)
        needed = listed[tokens].any(axis=0)
        row_counts = [
            needed.sum() if layer.gated else 0,
            (passes[tokens].any(axis=0) if skip else needed).sum(),
            (fires[tokens].any(axis=0) if skip else needed).sum() if down else 0,
        ]
        expected["rows"] += sum(row_counts)
        sizes = [cpu.row_bytes(name, cols) for name in layer.types]
        expected["bytes"] += sum(n * size for n, size in zip(row_counts, sizes, strict=True))
    assert sums == expected
    return Result(y, hidden, sums)


def a_list(n_ff: int, share: float, seed: int = 3) -> npt.NDArray[np.int32]:
    chosen = np.random.default_rng(seed).random(n_ff) < share
    return np.flatnonzero(chosen).astype(np.int32)


def a_mask(n_tok: int, n_ff: int, share: float) -> Mask:
    on = np.random.default_rng(4).random((n_tok, n_ff + 7)) < share
    return (on * np.random.default_rng(5).integers(1, 256, on.shape)).astype(np.uint8)


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize(
    "types",
    [("F16",) * 3, ("Q4_0",) * 3, ("Q8_0", "Q8_0", "F16"), ("Q4_K", "Q6_K", "Q5_K"), ("F32", "Q4_1", "BF16")],
)
@pytest.mark.parametrize("n_threads", [1, 3])
def test_formats(table: str, types: tuple[str, str, str], n_threads: int) -> None:
    layer = Layer(types, RELU, 256, 150)
    with Team(TABLES[table], n_threads, max_tok=2, max_cols=256, max_rows=150) as team:
        for skip in (False, True):
            run(team, layer, skip=skip)
            run(team, layer, skip=skip, n_tok=2, rows=a_list(150, 0.3))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("act", [RELU, DRELU, SILU, GELU, TANH])
@pytest.mark.parametrize("n_threads", [1, 2, 3, 4])
@pytest.mark.parametrize("gated", [True, False])
def test_activations_lists_masks(act: int, n_threads: int, gated: bool) -> None:
    n_ff = 203
    threshold = 0.1 if act == RELU else 0.0
    layer = Layer(("F16",) * 3, act, 96, n_ff, gated=gated, bias=not gated, threshold=threshold)
    skips = (False, True) if act in (RELU, DRELU) else (False,)
    last = np.array([n_ff - 1], dtype=np.int32)
    lists = [None, a_list(n_ff, 0.1), a_list(n_ff, 0.0), a_list(n_ff, 1.0), last]
    with Team(TABLES[BEST], n_threads, max_tok=5, max_cols=96, max_rows=n_ff) as team:
        for skip in skips:
            for rows in lists:
                for n_tok in (1, 2, 5):
                    run(team, layer, n_tok=n_tok, rows=rows, skip=skip)
                    run(team, layer, n_tok=n_tok, rows=rows, skip=skip, down=False)
                    run(team, layer, n_tok=n_tok, rows=rows, skip=skip, mask=a_mask(n_tok, n_ff, 0.4))
                run(team, layer, n_tok=3, rows=rows, skip=skip, mask=a_mask(3, n_ff, 0.2), down=False)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("name", ["F16", "Q4_0", "Q8_0", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("act", [RELU, DRELU])
def test_skipping_changes_no_bit(table: str, name: str, act: int) -> None:
    layer = Layer((name,) * 3, act, 256, 333)
    for n_threads in (1, 2, 4):
        with Team(TABLES[table], n_threads, max_tok=3, max_cols=256, max_rows=333) as team:
            for n_tok in (1, 3):
                dense = run(team, layer, n_tok=n_tok)
                exact = run(team, layer, n_tok=n_tok, skip=True)
                assert dense.y.tobytes() == exact.y.tobytes()
                assert exact.counts["bytes"] < dense.counts["bytes"]
                assert run(team, layer, n_tok=n_tok, skip=True).y.tobytes() == exact.y.tobytes()


@pytest.mark.parametrize("name", ["F16", "Q4_0", "Q4_K"])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("n_threads", "last"), [(1, 3), (1, 60), (2, 3)])
def test_segments(name: str, gated: bool, n_threads: int, last: int) -> None:
    """Rows that are all looked at are a stream in segments of 1024, four times with so few behind them.

    Of two threads all segments are shorter.
    """
    n_ff = 4 * (1024 + last)
    layer = Layer((name,) * 3, RELU, 256, n_ff, gated=gated, bias=not gated, threshold=1.0)
    with Team(TABLES[BEST], n_threads, max_tok=1, max_cols=256, max_rows=n_ff) as team:
        dense, exact = run(team, layer), run(team, layer, skip=True)
        assert dense.y.tobytes() == exact.y.tobytes()
        assert exact.counts["rows"] < dense.counts["rows"] * 0.8
        run(team, layer, skip=True, repeats=3)
        run(team, layer, skip=True, down=False)


@pytest.mark.parametrize("skip", [False, True])
def test_neurons_dealt_beforehand(skip: bool) -> None:
    layer = Layer(("F16",) * 3, RELU, 96, 300)
    rows = a_list(300, 0.7)
    n = len(rows)
    with Team(TABLES[BEST], 3, max_tok=2, max_cols=96, max_rows=300) as team:
        for n_of in ((n, 0, 0), (0, 0, n), (n - 90, 7, 83), (1, n - 1, 0)):
            got = run(team, layer, rows=rows, n_of=n_of, skip=skip)
            assert np.array_equal(run(team, layer, rows=rows, n_of=n_of, skip=skip).y, got.y)
            run(team, layer, rows=rows, n_of=n_of, skip=skip, n_tok=2)
    with Team(TABLES[BEST], 3, max_tok=1, max_cols=96, max_rows=300) as team:
        run(team, layer, rows=rows, skip=skip, down=False)


def down_of(team: Team, name: str, cols: int, rows: npt.NDArray[np.int32], h: Floats) -> tuple[Floats, int]:
    """te_op_ffn_down of rows of 200 with hidden values h: the sum, and how many rows were read."""
    data, _ = cpu.random_rows(name, 200, cols, 42)
    y = np.full(cols + 1, CANARY, dtype=np.float32)

    @ffi.callback("void(void *, int32_t, int32_t, int32_t, float *)")
    def sink(_: Any, t: int, lo: int, hi: int, part: Any) -> None:
        assert t == 0 and np.all(y[lo:hi] == CANARY)
        y[lo:hi] = np.frombuffer(ffi.buffer(part + lo, 4 * (hi - lo)), dtype=np.float32)

    io, c_rows = ffi.new("te_ffn_io *"), cpu.row_list(rows, 0, len(rows))
    io.listed, io.sink = fp(h), ffi.cast("te_ffn_sink *", sink)
    counts = ffi.new("te_ffn_counts[]", team.n_threads)
    with cpu.Guarded(data) as memory:
        m = cpu.matrix(name, memory.pointer, 200, cols)
        team.run(lambda t, ws: lib.te_op_ffn_down(t, ws, m, c_rows[0], io, counts + t.ith))
    assert y[cols] == CANARY
    n_rows, n_bytes = (sum(getattr(c, name) for c in counts) for name in ("rows", "bytes"))
    assert n_bytes == n_rows * cpu.row_bytes(name, cols)
    return y[:cols], n_rows


@pytest.mark.sampled(3)
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_down_by_columns(table: str, name: str) -> None:
    for cols in (33, 352, 1025) if name in cpu.FLOATS else (64, 352, 1024):
        w = cpu.random_rows(name, 200, cols, 42)[1]
        h = np.random.default_rng(3).standard_normal(200).astype(np.float32)
        h[::3] = 0
        for rows in (a_list(200, 0.7), a_list(200, 0.0)):
            want, size = h[rows] @ w[rows], np.abs(h[rows]) @ np.abs(w[rows])
            results = []
            for n_threads in (1, 2, 5):
                with Team(TABLES[table], n_threads, max_tok=1, max_cols=cols, max_rows=200) as team:
                    y, n_rows = down_of(team, name, cols, rows, h[rows])
                assert n_rows == np.count_nonzero(h[rows])
                results.append(y)
            assert np.all(np.abs(results[0] - want) <= 8 * EPS * np.sqrt(200) * size + 1e-30)
            assert all(np.array_equal(y, results[0]) for y in results)


def test_down_by_columns_wants_small_blocks() -> None:
    lo, hi = ffi.new("int32_t *"), ffi.new("int32_t *")
    with Team(TABLES[BEST], 1, max_tok=1, max_cols=512, max_rows=8) as team:

        def ask(t: Any, _: Any) -> None:
            for name, can in (("F16", True), ("Q4_0", True), ("Q4_K", False), ("Q6_K", False)):
                assert lib.te_ffn_columns(t, cpu.matrix(name, ffi.NULL, 8, 512), lo, hi) == can
                assert (lo[0], hi[0]) == (0, 512)

        team.run(ask)


def test_many_times_without_barriers_between() -> None:
    """Sums of one operation must not be overwritten by the next while a slower member still reads them."""
    layer = Layer(("F16",) * 3, RELU, 512, 60)
    with Team(TABLES[BEST], 4, max_tok=2, max_cols=512, max_rows=60) as team:
        for _ in range(10):
            run(team, layer, n_tok=2, skip=True, repeats=40)


def test_more_tokens_than_one_pass_takes() -> None:
    n_ff = 50
    layer = Layer(("F16",) * 3, SILU, 64, n_ff)
    with Team(TABLES[BEST], 2, max_tok=70, max_cols=64, max_rows=n_ff) as team:
        run(team, layer, n_tok=70, mask=a_mask(70, n_ff, 0.05))
        run(team, layer, n_tok=33, down=False)
