"""The largest logits as a device finds them, of rows that are made for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from cffi import FFI

from tests.gpu.test_hybrid_devices_gpu import CDEF, VERSION

MOST = 128  # PI_LARGEST
Rows = npt.NDArray[np.float32]


def rows_of(n_cols: int) -> Rows:
    """Random ones, many equal ones, zeros of both signs, and what is no number."""
    rng = np.random.default_rng(n_cols)
    x = rng.normal(0, 3, (14, n_cols)).astype(np.float32)
    x[1] = np.round(x[1])
    x[2] = np.where(rng.random(n_cols) < 0.5, 0.0, -0.0)
    x[2, rng.permutation(n_cols)[: n_cols // 2]] = -1
    x[3] = -np.inf
    x[4, rng.permutation(n_cols)[: n_cols - 3]] = -np.inf
    x[5, n_cols // 2] = np.nan
    x[6, n_cols - 1] = np.inf
    x[7] = np.sort(x[7])
    x[8] = -np.abs(x[8]) * np.float32(1e-42)
    x[9] = x[9] * np.float32(1e37)
    x[10] = 5
    x[11, -1] = x[11, 0] = 50
    for i, n_more in ((12, 20), (13, 100)):  # above 50 equal ones
        at = rng.permutation(n_cols)[: n_more + 50]
        x[i, at] = 60
        x[i, at[:n_more]] = 70 + np.arange(min(n_more, n_cols))
    return x


def largest_of(row: Rows, n: int) -> list[tuple[float, int]] | None:
    """By sorting; None: the row is no choice's business."""
    if np.isnan(row).any() or (row == np.inf).any():
        return None
    order = np.lexsort((np.arange(row.size), -(row.astype(np.float64) + 0.0)))
    return [(float(row[i]), int(i)) for i in order[:n] if row[i] != -np.inf]


def check(library: str, open_name: str, n_cols: int, n: int) -> None:
    ffi = FFI()
    ffi.cdef(CDEF)
    ops: Any = getattr(ffi.dlopen(library), open_name)()
    assert ops.version == VERSION, "CDEF is of another version"
    out = ffi.new("pi_device **")
    assert ops.open(0, 0, out) == 0, ffi.string(ops.error())
    dev, x = out[0], rows_of(n_cols)
    on_device = ops.alloc(dev, x.nbytes)
    assert ops.upload(dev, on_device, ffi.from_buffer(x), x.nbytes) == 0
    wanted = ops.alloc(dev, 256)
    rows, largest, found = (ops.share(dev, size * len(x)) for size in (4 * n_cols, 8 * MOST, 4))
    a = ffi.new("pi_device_logits *", {"n_rows": len(x), "cols": n_cols})
    a.x, a.n_largest, a.rows = (ffi.cast("void *", p) for p in (on_device, wanted, rows))
    a.largest, a.n_found = ffi.cast("uint64_t *", largest), ffi.cast("int32_t *", found)
    program = ffi.callback("pi_device_program", lambda _ctx, device: ops.logits(device, a))
    for key in (1, 1, 0):  # a program that is kept finds them, brings rows, does both, finds them
        for k in (n, 0, -n):
            ffi.memmove(found, bytes(4 * len(x)), 4 * len(x))
            assert ops.upload(dev, wanted, ffi.new("int32_t *", k), 4) == 0
            ffi.memmove(rows, bytes(x.nbytes), x.nbytes)
            assert ops.launch(dev, program, ffi.NULL, key) == 0 and ops.finish(dev) == 0
            got = np.frombuffer(ffi.buffer(rows, x.nbytes), np.uint32).reshape(x.shape)
            assert np.array_equal(got, np.zeros_like(got) if k > 0 else x.view(np.uint32))
            if k:
                check_found(ffi, x, largest, found, n)
    ops.close(dev)


def check_found(ffi: FFI, x: Rows, largest: Any, found: Any, n: int) -> None:
    counts = np.frombuffer(ffi.buffer(found, 4 * len(x)), np.int32)
    words = np.frombuffer(ffi.buffer(largest, 8 * MOST * len(x)), np.uint64).reshape(len(x), MOST)
    for i, row in enumerate(x):
        want = largest_of(row, n)
        if counts[i] == -1:  # too many equal ones, too
            assert want is None or np.count_nonzero(row >= want[-1][0]) > 1024
            continue
        values = (words[i, : counts[i]] >> np.uint64(32)).astype(np.uint32).view(np.float32)
        columns = (words[i, : counts[i]] & np.uint64(0xFFFFFFFF)).astype(int)
        assert list(zip(values.tolist(), columns.tolist(), strict=True)) == want, i
