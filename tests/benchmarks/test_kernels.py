"""How fast the kernels of each weight format and instruction set are, one thread each.

    pytest tests/benchmarks --benchmark-columns=min,median --benchmark-group-by=func,param:isa
    pytest tests/benchmarks --benchmark-json=before.json ... pytest-benchmark compare before.json after.json

Rows are read from memory (64 MiB of them, which is more than a core's own caches); extra_info has bytes or
operations per second of the fastest round. Nothing is asserted about time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from powerinfer._engine import machine
from powerinfer._engine.session import Model, Session
from scripts import make_model
from tests.cpu.kernels import (
    TABLES,
    TYPES,
    axpy,
    dot,
    ffi,
    floats,
    fp,
    lib,
    matrix,
    packed,
    random_rows,
    row_bytes,
    row_list,
)
from tests.cpu.team import Team

pytest.importorskip("pytest_benchmark")

FORMATS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "IQ4_NL")
FORMATS += ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
COLS = 4096
N_BYTES = 64 << 20
N_TOKENS = 512
ROUNDS = {"rounds": 7, "iterations": 1, "warmup_rounds": 1}


def own_rows(entry: str) -> list[Any]:
    """(isa, format) whose row kernel is this set's own, not one that it takes from a lower set. The scalar
    set is there for its results, not for speed."""
    out, seen = [], set()
    for name in TABLES:
        for type in FORMATS:
            kernel = getattr(TABLES[name].row[TYPES[type]], entry)
            if name != "scalar" and (type, kernel) not in seen:
                out.append(pytest.param(name, type, id=f"{name}-{type}"))
            seen.add((type, kernel))
    return out


@pytest.fixture(scope="module")
def weights() -> Any:
    """Makes matrices: the same few random rows over and over. Keeps the last one."""
    kept: dict[tuple[str, int], Any] = {}

    def make(type: str, n_bytes: int) -> Any:
        if (type, n_bytes) not in kept:
            kept.clear()
            few = random_rows(type, 64, COLS, seed=1)[0]
            data = np.tile(few, (max(1, n_bytes // few.nbytes), 1))
            pointer = ffi.cast("void *", data.ctypes.data)
            kept[type, n_bytes] = data, matrix(type, pointer, len(data), COLS)
        return kept[type, n_bytes]

    return make


@pytest.fixture
def note(benchmark: Any, record_property: Any) -> Any:
    """Call it as note("GB/s", bytes) to keep the rate of the fastest round."""

    def keep(name: str, amount: float) -> None:
        if benchmark.stats is not None:  # None with --benchmark-disable
            rate = round(amount / benchmark.stats.stats.min / 1e9, 2)
            benchmark.extra_info[name] = rate
            record_property(name, rate)

    return keep


@pytest.mark.parametrize(("isa", "type"), own_rows("dot"))
def test_dot(benchmark: Any, note: Any, weights: Any, isa: str, type: str) -> None:
    data, m = weights(type, N_BYTES)
    kernel = TABLES[isa].row[TYPES[type]]
    act = packed(kernel, np.random.default_rng(1).standard_normal(COLS).astype(np.float32))
    y, rows = floats(len(data)), row_list(None, 0, len(data))
    benchmark.pedantic(dot, (kernel, m, rows, act, y), **ROUNDS)
    note("GB/s", data.nbytes)
    assert np.isfinite(y).all() and y.any()


@pytest.mark.parametrize(("isa", "type"), own_rows("axpy"))
def test_axpy(benchmark: Any, note: Any, weights: Any, isa: str, type: str) -> None:
    data, m = weights(type, N_BYTES)
    kernel = TABLES[isa].row[TYPES[type]]
    a = floats(len(data))
    a[:] = np.random.default_rng(1).standard_normal(len(data))
    acc, rows = floats(COLS), row_list(None, 0, len(data))
    benchmark.pedantic(axpy, (kernel, m, rows, a, acc), **ROUNDS)
    note("GB/s", data.nbytes)
    assert np.isfinite(acc).all() and acc.any()


@pytest.mark.parametrize(("isa", "type"), own_rows("dot"))
def test_sparse_ffn(benchmark: Any, note: Any, weights: Any, isa: str, type: str) -> None:
    """The fused operator over a tenth of the neurons, which all fire."""
    data, _ = weights(type, N_BYTES)
    n_ff = len(data) // 3
    parts = []
    for i in range(3):
        pointer = ffi.cast("void *", data.ctypes.data + i * n_ff * row_bytes(type, COLS))
        parts.append(matrix(type, pointer, n_ff, COLS))
    f = ffi.new("te_ffn *", {"act": lib.TE_RELU, "threshold": -1e30})
    f.gate, f.up, f.down = (part[0] for part in parts)
    rng = np.random.default_rng(1)
    listed = np.sort(rng.permutation(n_ff)[: n_ff // 10]).astype(np.int32)
    x, y = floats(COLS), floats(COLS)
    x[:] = rng.standard_normal(COLS)
    io = ffi.new("te_ffn_io *", {"x": fp(x), "ldx": COLS, "n_tok": 1, "y": fp(y), "ldy": COLS})
    counts = ffi.new("te_ffn_counts *")
    with Team(TABLES[isa], 1, max_tok=1, max_cols=max(COLS, n_ff), max_rows=n_ff) as team:

        def run(t: Any, ws: Any) -> None:
            lib.te_op_ffn(t, ws, f, row_list(listed, 0, len(listed))[0], True, io, counts)

        benchmark.pedantic(team.run, (run,), **ROUNDS)
    note("GB/s", counts.bytes)
    assert counts.fired == len(listed) and counts.bytes == 3 * len(listed) * row_bytes(type, COLS)


@pytest.mark.parametrize("type", FORMATS)
@pytest.mark.parametrize("isa", [name for name in TABLES if name != "scalar"])
def test_gemm(benchmark: Any, note: Any, weights: Any, isa: str, type: str) -> None:
    """A product of 512 tokens with 1024 rows."""
    data, m = weights(type, 1024 * row_bytes(type, COLS))
    x = floats(N_TOKENS * COLS)
    x[:] = np.random.default_rng(1).standard_normal(len(x))
    y = floats(N_TOKENS * len(data))
    product = ffi.new("te_linear[1]")
    product[0].w, product[0].y, product[0].ldy = m[0], fp(y), len(data)
    with Team(TABLES[isa], 1, max_tok=N_TOKENS, max_cols=COLS, max_rows=COLS) as team:

        def run(t: Any, ws: Any) -> None:
            lib.te_op_linear(t, ws, product, 1, fp(x), COLS, N_TOKENS)

        benchmark.pedantic(team.run, (run,), **ROUNDS)
    note("GFLOP/s", 2 * N_TOKENS * len(data) * COLS)
    assert np.isfinite(y).all() and y.any()


@pytest.mark.parametrize("kv", ["f16", "q8_0"])
def test_attention_of_one_token(benchmark: Any, note: Any, tmp_path_factory: Any, kv: str) -> None:
    """A step of a layer whose weights are small beside K and V of 8192 positions; instruction set: the best,
    or what POWERINFER_ISA names."""
    path: Path = tmp_path_factory.mktemp("attention") / "m.gguf"
    shape = make_model.Shape("llama", 1, 512, 8, 8, 256, 320, 16384)
    make_model.write({"gguf": path}, shape, "attention", "Q4_0", rank=65)
    depth = 8192
    tokens = np.random.default_rng(1).integers(3, 320, depth, dtype=np.int32)
    with Model(path) as model:
        session = Session(model, n_ctx=depth + 64, n_threads=1, sparsity="dense", type_k=kv, type_v=kv)
        with session:
            session.feed(tokens, want_logits=False)
            benchmark.pedantic(
                session.feed, ([5],), setup=lambda: session.cut(depth), rounds=20, iterations=1
            )
            note("GB/s", session.last_step[0].bytes)
    benchmark.extra_info["isa"] = machine.isa()
