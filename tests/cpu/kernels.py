"""What the tests of vendor/cpu share: kernel tables, random rows of every format, guarded memory."""

from __future__ import annotations

import ctypes
import mmap
from functools import lru_cache
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Kind

from tests.core import capi

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Bytes = npt.NDArray[np.uint8]

ffi, lib = capi.load()
EPS = float(np.finfo(np.float32).eps)
FLOATS = ("F32", "F16", "BF16")
INT8_32 = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "MXFP4")  # blocks of 32 weights
INT8 = (*INT8_32, "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")  # int8 activations per 32
CANARY = np.float32(-77.25)

# Where a block's half-precision scales stand. IQ1_M spreads its one over the top nibbles of four words.
HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82),
    "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ2_XXS": (0,), "IQ2_XS": (0,),
    "IQ2_S": (0,), "IQ3_XXS": (0,), "IQ3_S": (0,), "IQ1_S": (0,), "IQ4_NL": (0,), "IQ4_XS": (0,),
    "TQ1_0": (52,), "TQ2_0": (64,),
}  # fmt: skip


def tables() -> dict[str, Any]:
    """The kernel tables that this machine can run, by name."""
    names = ("scalar", "avx2", "avx2_vnni", "avx512", "avx512_bf16", "amx", "neon", "neon_dot")
    found = {name: lib.te_cpu_kernels_named(name.encode()) for name in names}
    return {name: table for name, table in found.items() if table != ffi.NULL}


def _gguf_knows(name: str) -> bool:
    if name in (*FLOATS, "F64"):
        return True
    if not hasattr(Kind, name):
        return False
    zeros = np.zeros((1, gguf.GGML_QUANT_SIZES[Kind[name]][1]), dtype=np.uint8)
    try:
        gguf.quants.dequantize(zeros, Kind[name])
    except NotImplementedError:
        return False
    return True


def type_ids() -> dict[str, int]:
    """Every weight format that can be dequantised and that gguf knows: name to number."""
    names = {number: text[3:] for number, text in ffi.typeof("te_type").elements.items()}
    return {name: i for i, name in names.items() if lib.te_can_dequantize(i) and _gguf_knows(name)}


TYPES = type_ids()
TABLES = tables()


def block(name: str) -> tuple[int, int]:
    """Weights and bytes of a block."""
    info = lib.te_type_get(TYPES[name])
    return info.block_weights, info.block_bytes


def row_bytes(name: str, cols: int) -> int:
    """Bytes of a row."""
    weights, size = block(name)
    assert cols % weights == 0
    return cols // weights * size


@lru_cache(maxsize=64)
def random_rows(name: str, n_rows: int, cols: int, seed: int) -> tuple[Bytes, Doubles]:
    """Random weights: the bytes [n_rows][row bytes], and their values [n_rows][cols] as gguf has them.

    Read-only: other cases get the same arrays.
    """
    data, values = _random_rows(name, n_rows, cols, seed)
    data.flags.writeable = values.flags.writeable = False
    return data, values


def _random_rows(name: str, n_rows: int, cols: int, seed: int) -> tuple[Bytes, Doubles]:
    rng = np.random.default_rng([seed, n_rows, cols, TYPES[name]])
    n_bytes = row_bytes(name, cols)
    if name in ("F32", "F64"):
        values = rng.standard_normal((n_rows, cols)).astype(np.float32 if name == "F32" else np.float64)
        return values.view(np.uint8).reshape(n_rows, n_bytes), values.astype(np.float32).astype(np.float64)
    if name == "F16":
        half = rng.standard_normal((n_rows, cols)).astype(np.float16)
        return half.view(np.uint8).reshape(n_rows, n_bytes), half.astype(np.float64)
    if name == "BF16":
        normal = rng.standard_normal((n_rows, cols)).astype(np.float32)
        words = (normal.view(np.uint32) >> 16).astype(np.uint16)
        single = (words.astype(np.uint32) << 16).view(np.float32)
        return words.view(np.uint8).reshape(n_rows, n_bytes), single.astype(np.float64)
    size = block(name)[1]
    data = rng.integers(0, 256, (n_rows * (n_bytes // size), size), dtype=np.uint8)
    scales = (rng.random(len(data)) * 0.02 + 0.005).astype(np.float16)
    for at in HALVES.get(name, ()):
        data[:, at : at + 2] = scales[:, None].view(np.uint8)
    if name == "IQ1_M":
        for i in range(4):
            digit = (scales.view(np.uint16) >> 4 * i & 15).astype(np.uint8)
            data[:, 49 + 2 * i] = data[:, 49 + 2 * i] & 15 | digit << 4
    if name == "MXFP4":
        data[:, 0] = rng.integers(118, 126, len(data))
    if name == "NVFP4":
        data[:, :4] = rng.integers(1, 0x60, (len(data), 4))
    data = data.reshape(n_rows, n_bytes)
    values = gguf.quants.dequantize(data, Kind[name])
    assert np.isfinite(values).all()
    return data, values.astype(np.float64)


def quantised(x: Floats) -> Doubles:
    """Activations as kernels of int8 formats see them: 127 steps to the largest of 32, ties to even."""
    groups = x.astype(np.float32).reshape(-1, 32)
    most = np.abs(groups).max(axis=1, keepdims=True)
    assert np.all(most > 0)
    scale = np.float32(127) / most
    q = np.rint((groups * scale).astype(np.float32))
    return (q.astype(np.float64) * (most / np.float32(127)).astype(np.float64)).reshape(x.shape)


def quantised_in_256(x: Floats) -> Doubles:
    """Activations as products of many tokens see them on AVX-512 for formats of 256 weights.

    127 steps to the largest of 256; groups of 32 whose largest is not above the half, quarter... of it have
    steps of a half, quarter... of these. Ties to even.
    """
    groups = x.astype(np.float32).reshape(-1, 8, 32)
    of32 = np.abs(groups).max(axis=2, keepdims=True)
    most = of32.max(axis=1, keepdims=True)
    assert np.all(most > 0)
    mantissa, exponent = np.frexp((of32 / most).astype(np.float32))
    power = np.maximum(np.where(mantissa == 0.5, exponent - 1, exponent), -64)
    q = np.rint(np.ldexp((groups * (np.float32(127) / most)).astype(np.float32), -power))
    assert np.abs(q).max() == 127
    step = np.ldexp((most / np.float32(127)).astype(np.float64), power)
    return (q.astype(np.float64) * step).reshape(x.shape)


def seen(name: str, x: Floats) -> Doubles:
    """Activations as the kernels of a format see them."""
    return quantised(x) if name in INT8 else x.astype(np.float64)


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Guarded:
    """A copy of some bytes whose last one is followed by a page that nobody may touch."""

    def __init__(self, data: Bytes) -> None:
        page = mmap.PAGESIZE
        pages = -(-data.size // page)
        self._map = mmap.mmap(-1, (pages + 1) * page)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        start = pages * page - data.size
        self._map[start : pages * page] = data.tobytes()
        self._end = self._base + pages * page
        assert _libc.mprotect(self._end, page, 0) == 0
        self.pointer = ffi.cast("void *", self._base + start)

    def close(self) -> None:
        assert _libc.mprotect(self._end, mmap.PAGESIZE, 3) == 0

    def __enter__(self) -> Guarded:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def floats(n: int, fill: float = 0.0) -> Floats:
    """n floats on a 64-byte boundary."""
    raw = np.empty(n + 16, dtype=np.float32)
    start = -(raw.ctypes.data // 4) % 16
    out = raw[start : start + n]
    out[:] = fill
    return out


def acc_floats(cols: int) -> int:
    """te_acc_floats: 256 columns have sixteen sums beside their own."""
    return -(-cols // 256) * 272


def fp(array: npt.NDArray[Any]) -> Any:
    """The array as a C pointer to its first element."""
    kinds = {"float32": "float *", "int32": "int32_t *", "uint8": "uint8_t *"}
    return ffi.cast(kinds[array.dtype.name], array.ctypes.data)


def matrix(name: str, pointer: Any, n_rows: int, cols: int, stride: int | None = None) -> Any:
    """A te_mat."""
    m = ffi.new("te_mat *")
    m.w, m.type, m.cols, m.n_rows = pointer, TYPES[name], cols, n_rows
    m.stride = row_bytes(name, cols) if stride is None else stride
    return m


def row_list(rows: npt.NDArray[np.int32] | None, first: int, n: int) -> Any:
    """A te_rows: of a list, or n rows from `first` on."""
    r = ffi.new("te_rows *")
    r.row = ffi.NULL if rows is None else fp(rows)
    r.first, r.n = first, n
    return r


def packed(kernels: Any, x: Floats) -> Floats:
    """x as a format's own activations."""
    act = floats(kernels.act_bytes(len(x)) // 4 + 1)
    kernels.act_pack(fp(x), len(x), ffi.cast("void *", act.ctypes.data))
    return act


NOTHING_AHEAD = ffi.new("te_ahead *")


def dot(k: Any, m: Any, rows: Any, act: Floats, y: Floats, ahead: Any = NOTHING_AHEAD) -> None:
    """k.dot over a te_rows *."""
    k.dot(m, rows[0], ahead[0], ffi.cast("void *", act.ctypes.data), fp(y))


def axpy(k: Any, m: Any, rows: Any, a: Floats, acc: Floats, ahead: Any = NOTHING_AHEAD) -> None:
    """k.axpy over a te_rows *."""
    k.axpy(m, rows[0], ahead[0], fp(a), fp(acc))
