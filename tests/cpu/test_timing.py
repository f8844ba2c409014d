"""Results do not depend on timing: late kernels and missing members change no bit."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from tests.cpu import kernels as cpu
from tests.cpu.kernels import TABLES, Floats, ffi, fp, lib
from tests.cpu.team import Team

BEST = list(TABLES)[-1]
TYPES = {name: cpu.type_ids()[name] for name in ("F16", "Q4_0")}
COLS, N_FF = 256, 700
RELU = 0


@contextmanager
def late_kernels(table: Any, seed: int) -> Iterator[Any]:
    """A copy of the table whose dot and axpy of TYPES sleep now and then before they work."""
    copy = ffi.new("te_kernels *", table[0])
    rng = random.Random(seed)
    keep = []

    def late(kernel: Any) -> Any:
        def call(*arguments: Any) -> None:
            if rng.random() < 0.05:
                time.sleep(rng.random() * 1e-3)
            kernel(*arguments)

        keep.append(ffi.callback(ffi.typeof(kernel), call))
        return keep[-1]

    for number in TYPES.values():
        copy.row[number].dot = late(table.row[number].dot)
        copy.row[number].axpy = late(table.row[number].axpy)
    copy.gemm.min_tok = 1 << 30
    yield copy


class Work:
    """One of each operation, always on the same data."""

    def __init__(self, name: str, n_tok: int) -> None:
        rng = np.random.default_rng(7)
        self.n_tok = n_tok
        self.memory = [cpu.Guarded(cpu.random_rows(name, N_FF, COLS, 50 + i)[0]) for i in range(3)]
        self.mats = [cpu.matrix(name, m.pointer, N_FF, COLS) for m in self.memory]
        self.x: Floats = (rng.standard_normal((n_tok, COLS)) * 0.3).astype(np.float32)
        self.start: Floats = rng.standard_normal((n_tok, COLS)).astype(np.float32)
        self.h: Floats = rng.standard_normal((n_tok, N_FF)).astype(np.float32)
        self.rows = np.flatnonzero(rng.random(N_FF) < 0.4).astype(np.int32)

    def run(self, team: Team, *, missing: bool) -> bytes:
        y, y_t = self.start.copy(), self.start.copy()
        out = np.zeros((2, self.n_tok, N_FF), dtype=np.float32)
        hidden = np.zeros((self.n_tok, N_FF), dtype=np.float32)
        products = ffi.new("te_linear[2]")
        for i in range(2):
            products[i].w, products[i].y, products[i].ldy = self.mats[i][0], fp(out[i]), N_FF
        f = ffi.new("te_ffn *")
        f.gate, f.up, f.down, f.act = self.mats[0][0], self.mats[1][0], self.mats[2][0], RELU
        io = ffi.new("te_ffn_io *")
        io.x, io.ldx, io.n_tok, io.y, io.ldy = fp(self.x), COLS, self.n_tok, fp(y), COLS
        open_only = ffi.new("te_ffn *", f[0])
        open_only.down = ffi.new("te_mat *")[0]
        to_hidden = ffi.new("te_ffn_io *", io[0])
        to_hidden.y, to_hidden.hidden, to_hidden.ld_hidden = ffi.NULL, fp(hidden), N_FF
        listed = cpu.row_list(self.rows, 0, len(self.rows))

        def body(t: Any, ws: Any) -> None:
            lib.te_op_linear(t, ws, products, 2, fp(self.x), COLS, self.n_tok)
            lib.te_op_ffn(t, ws, f, listed[0], True, io, ffi.NULL)
            lib.te_op_ffn(t, ws, open_only, listed[0], True, to_hidden, ffi.NULL)
            lib.te_op_linear_t(
                t, ws, self.mats[2], fp(self.h), N_FF, self.n_tok, ffi.NULL, fp(y_t), COLS, True, False
            )

        (team.run_without_last if missing else team.run)(body)
        return y.tobytes() + y_t.tobytes() + out.tobytes() + hidden.tobytes()

    def close(self) -> None:
        for m in self.memory:
            m.close()


@pytest.mark.parametrize("name", list(TYPES))
@pytest.mark.parametrize("n_tok", [1, 3])
@pytest.mark.parametrize("n_threads", [2, 4])
def test_no_bit_depends_on_timing(name: str, n_tok: int, n_threads: int) -> None:
    work = Work(name, n_tok)
    limits = {"max_tok": n_tok, "max_cols": COLS, "max_rows": N_FF}
    with late_kernels(TABLES[BEST], 0) as plain, Team(plain, n_threads, **limits) as team:
        expected = work.run(team, missing=False)
    for seed in range(1, 9):
        with late_kernels(TABLES[BEST], seed) as late, Team(late, n_threads, **limits) as team:
            assert work.run(team, missing=False) == expected
            assert work.run(team, missing=True) == expected
    work.close()
