"""Scalar conversion of all weight formats, against the `gguf` package and numpy, bit for bit."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import quants

from tests.core import capi

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

# Where the half-precision scales of a block stand. That of IQ1_M is spread over its last eight bytes.
HALVES = {
    Kind.Q4_0: (0,),
    Kind.Q4_1: (0, 2),
    Kind.Q5_0: (0,),
    Kind.Q5_1: (0, 2),
    Kind.Q8_0: (0,),
    Kind.Q2_K: (80, 82),
    Kind.Q3_K: (108,),
    Kind.Q4_K: (0, 2),
    Kind.Q5_K: (0, 2),
    Kind.Q6_K: (208,),
    Kind.TQ1_0: (52,),
    Kind.TQ2_0: (64,),
    Kind.IQ1_S: (0,),
    Kind.IQ2_XXS: (0,),
    Kind.IQ2_XS: (0,),
    Kind.IQ2_S: (0,),
    Kind.IQ3_XXS: (0,),
    Kind.IQ3_S: (0,),
    Kind.IQ4_NL: (0,),
    Kind.IQ4_XS: (0,),
}
PACKAGE_KINDS = sorted([*quants._type_traits, Kind.F32, Kind.F16])
QUANTIZED_BY_US = (Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0, Kind.MXFP4)
# Those that test_quant_write.py is about.
SEARCHED = (Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_NL)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Random bytes hold infinities and NaNs; numpy's warnings about them mean nothing here."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        yield


def dequantize(kind: int, raw: Bytes, n: int) -> Floats:
    """Our result for n weights. The source has an odd address; what surrounds the result must not change."""
    ffi, lib = capi.load()
    source = np.empty(raw.size + 1, np.uint8)
    source[1:] = raw.ravel()
    out = np.full(n + 32, 77.0, np.float32)
    target = ffi.cast("float *", ffi.from_buffer(out)) + 16
    lib.te_dequantize_row(kind, ffi.cast("uint8_t *", ffi.from_buffer(source)) + 1, target, n)
    assert (out[:16] == 77).all()
    assert (out[n + 16 :] == 77).all()
    return out[16 : n + 16]


def quantize(kind: int, weights: Floats) -> Bytes:
    ffi, lib = capi.load()
    n_bytes = lib.te_row_bytes(kind, weights.size)
    out = np.full(n_bytes + 32, 0xA5, np.uint8)
    lib.te_quantize_row(
        kind, ffi.from_buffer("float[]", weights), ffi.from_buffer("uint8_t[]", out) + 16, weights.size
    )
    assert (out[:16] == 0xA5).all()
    assert (out[n_bytes + 16 :] == 0xA5).all()
    return out[16 : n_bytes + 16]


def assert_same_bits(got: Floats, wanted: Floats) -> None:
    """Equal in every bit; a NaN equals any other."""
    wanted = np.ascontiguousarray(wanted).ravel()
    both_nan = np.isnan(got) & np.isnan(wanted)
    np.testing.assert_array_equal(
        np.where(both_nan, 0, got.view(np.uint32)), np.where(both_nan, 0, wanted.view(np.uint32))
    )


def random_blocks(kind: Kind, n_blocks: int, *, finite: bool) -> Bytes:
    rng = np.random.default_rng(int(kind))
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (n_blocks, block_bytes), dtype=np.uint8)
    if finite:
        for at in HALVES.get(kind, ()):
            blocks[:, at + 1] &= 0xBF  # an exponent below the largest, which means infinity or NaN
        if kind == Kind.IQ1_M:
            blocks[:, 55] &= 0xBF
    return blocks


@pytest.mark.parametrize("kind", PACKAGE_KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("finite", [True, False], ids=["finite", "any"])
def test_dequantize_equals_the_package(kind: Kind, finite: bool) -> None:
    block, _ = gguf.GGML_QUANT_SIZES[kind]
    for n_blocks in (1, 2, 67):
        raw = random_blocks(kind, n_blocks, finite=finite)
        wanted = quants.dequantize(raw, kind)
        if finite and kind in HALVES:
            assert np.isfinite(wanted).all()
            assert np.unique(wanted).size > 2
        assert_same_bits(dequantize(kind, raw, n_blocks * block), wanted)


@pytest.mark.parametrize("kind", [Kind.MXFP4, Kind.NVFP4], ids=lambda kind: kind.name)
def test_every_scale_byte_of_the_four_bit_floats(kind: Kind) -> None:
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    raw = np.zeros((256, block_bytes), np.uint8)
    raw[:] = np.arange(256, dtype=np.uint8)[:, None]
    raw[:, -16:] = np.arange(16, dtype=np.uint8) * 0x11
    assert_same_bits(dequantize(kind, raw, 256 * block), quants.dequantize(raw, kind))


@pytest.mark.parametrize(
    "kind",
    [Kind.IQ1_S, Kind.IQ2_XXS, Kind.IQ2_XS, Kind.IQ2_S, Kind.IQ3_XXS, Kind.IQ3_S],
    ids=lambda kind: kind.name,
)
def test_every_entry_of_a_code_book(kind: Kind) -> None:
    """Enough random blocks to meet all of up to 2048 entries: the chance to miss one is below 1e-6."""
    block, _ = gguf.GGML_QUANT_SIZES[kind]
    raw = random_blocks(kind, 2048, finite=True)
    assert_same_bits(dequantize(kind, raw, 2048 * block), quants.dequantize(raw, kind))


def test_q1_0_is_plus_or_minus_the_scale() -> None:
    rng = np.random.default_rng(41)
    raw = rng.integers(0, 256, (9, 18), dtype=np.uint8)
    raw[:, 1] &= 0xBF
    scale = raw[:, :2].copy().view(np.float16).astype(np.float32)
    bits = np.unpackbits(raw[:, 2:], axis=1, bitorder="little")
    assert_same_bits(dequantize(Kind.Q1_0, raw, 9 * 128), np.where(bits, scale, -scale))


def test_f64_rounds_once() -> None:
    values = np.concatenate(
        [
            np.random.default_rng(28).standard_normal(1000),
            [1e300, -1e-300, np.inf, np.nan, 1 + 2**-24, 1 + 3 * 2**-24],
        ]
    )
    assert_same_bits(dequantize(Kind.F64, values.view(np.uint8), values.size), values.astype(np.float32))


def test_types_are_those_of_the_package() -> None:
    ffi, lib = capi.load()
    for number in range(-5, 80):
        info = lib.te_type_get(number)
        if number not in list(Kind):
            assert info == ffi.NULL
            assert not lib.te_can_dequantize(number)
            continue
        kind = Kind(number)
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if kind == Kind.Q8_1:
            block_bytes = 36  # two halves and 32 codes; the package's table counts the halves as floats
        assert ffi.string(info.name).decode() == kind.name
        assert (info.block_weights, info.block_bytes) == (block, block_bytes)
        assert lib.te_row_bytes(number, 6 * block) == 6 * block_bytes
        assert lib.te_can_dequantize(number) == (kind in PACKAGE_KINDS or kind in (Kind.Q1_0, Kind.F64))
        writable = (*QUANTIZED_BY_US, *SEARCHED, Kind.F32, Kind.F16, Kind.BF16)
        assert lib.te_can_quantize(number) == (kind in writable)
    assert lib.te_row_bytes(4, 32) == 0
    assert not lib.te_can_quantize(1000)


# ---- 16-bit floats ----

HALF_BITS = np.arange(65536, dtype=np.uint16)


def edge_floats(exact: Floats) -> Floats:
    """Around every value of a 16-bit format: it, the middle to the next, and a float bit to either side."""
    finite = np.unique(exact[np.isfinite(exact)].astype(np.float64))
    middles = ((finite[1:] + finite[:-1]) / 2).astype(np.float32)
    points = np.concatenate([finite.astype(np.float32), middles])
    around = [points, np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(-np.inf))]
    extra = np.array(
        [0.0, -0.0, np.inf, -np.inf, 65519.996, 65520, 65536, 3.4e38, -3.4e38, 1e-45, -1e-45], np.float32
    )
    return np.concatenate([*around, extra])


def test_every_half_and_bfloat_becomes_its_float() -> None:
    assert_same_bits(
        dequantize(Kind.F16, HALF_BITS.view(np.uint8), 65536), HALF_BITS.view(np.float16).astype(np.float32)
    )
    assert_same_bits(
        dequantize(Kind.BF16, HALF_BITS.view(np.uint8), 65536),
        (HALF_BITS.astype(np.uint32) << 16).view(np.float32),
    )


def test_floats_round_to_the_nearest_half() -> None:
    weights = edge_floats(HALF_BITS.view(np.float16).astype(np.float32))
    random = np.random.default_rng(1).integers(0, 2**32, 200_000, dtype=np.uint32).view(np.float32)
    weights = np.concatenate([weights, random[~np.isnan(random)]])
    np.testing.assert_array_equal(
        quantize(Kind.F16, weights).view(np.uint16), weights.astype(np.float16).view(np.uint16)
    )


def test_floats_round_to_the_nearest_bfloat() -> None:
    weights = edge_floats((HALF_BITS.astype(np.uint32) << 16).view(np.float32))
    random = np.random.default_rng(2).integers(0, 2**32, 200_000, dtype=np.uint32).view(np.float32)
    weights = np.concatenate([weights, random, np.array([np.nan, -np.nan], np.float32)])
    wanted = quants.quantize(weights, Kind.BF16)
    np.testing.assert_array_equal(quantize(Kind.BF16, weights), wanted.view(np.uint8))


def test_a_nan_stays_one_in_every_payload() -> None:
    rng = np.random.default_rng(3)
    bits = (
        rng.integers(1, 2**23, 5000, dtype=np.uint32)
        | np.uint32(0x7F800000)
        | (rng.integers(0, 2, 5000, dtype=np.uint32) << 31)
    )
    bits = np.concatenate([bits, np.array([0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF], np.uint32)])
    half = quantize(Kind.F16, bits.view(np.float32)).view(np.float16)
    assert np.isnan(half).all()
    np.testing.assert_array_equal(np.signbit(half), bits >> 31 == 1)
    bfloat = quantize(Kind.BF16, bits.view(np.float32)).view(np.uint16)
    assert np.isnan((bfloat.astype(np.uint32) << 16).view(np.float32)).all()


# ---- quantising ----


def weight_rows() -> Floats:
    """Blocks of many kinds, 32 weights each."""
    rng = np.random.default_rng(5)
    normal = rng.standard_normal((400, 32), dtype=np.float32)
    return np.concatenate(
        [
            normal,
            normal[:50] * np.float32(1e-6),
            normal[:50] * np.float32(1e6),
            normal[:50] * np.float32(1e30),
            normal[:50] * np.float32(1e-30),
            np.round(normal[:50] * 4) / 4,  # many ties, in the extreme as well as in the rounding
            np.abs(normal[:20]),
            -np.abs(normal[:20]),
            np.zeros((2, 32), np.float32),
            -np.zeros((1, 32), np.float32),
            np.ones((1, 32), np.float32),
            np.tile(np.array([[1, -1]], np.float32), (1, 16)),
            np.tile(np.array([[-1, 1]], np.float32), (1, 16)),
            np.arange(-16, 16, dtype=np.float32)[None] * np.float32(0.5),
            np.arange(32, dtype=np.float32)[None] - np.float32(0.5),
            np.eye(32, dtype=np.float32),
            np.append(127, np.arange(-15, 16) + 0.5)[None],  # halves exactly, when the largest is 127 steps
        ]
    ).astype(np.float32)


@pytest.mark.parametrize(
    "kind", [Kind.F32, Kind.F16, Kind.BF16, *QUANTIZED_BY_US], ids=lambda kind: kind.name
)
def test_quantize_equals_the_package(kind: Kind) -> None:
    weights = weight_rows()
    wanted = quants.quantize(weights, kind)
    np.testing.assert_array_equal(
        quantize(kind, weights), np.ascontiguousarray(wanted).view(np.uint8).ravel()
    )


@pytest.mark.parametrize("kind", QUANTIZED_BY_US, ids=lambda kind: kind.name)
def test_quantize_survives_any_floats(kind: Kind) -> None:
    """Infinities, NaNs, denormals: the codes may be any, but a scale that is finite gives finite weights."""
    rng = np.random.default_rng(6)
    bits = rng.integers(0, 2**32, (500, 32), dtype=np.uint32)
    special = np.array(
        [0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000, 1, 0x80000001, 0x7F7FFFFF, 0xFF7FFFFF, 0], np.uint32
    )
    bits[250:] = special[rng.integers(0, special.size, (250, 32))]
    weights = bits.view(np.float32)
    weights[400:] = rng.standard_normal((100, 32)).astype(np.float32) * np.float32(1e-44)
    raw = quantize(kind, weights)
    if kind == Kind.MXFP4:
        scales = np.zeros((500, 1), np.float16)  # powers of two: all are finite
    else:
        n_scales = 2 if kind in (Kind.Q4_1, Kind.Q5_1) else 1
        scales = raw.reshape(500, -1)[:, : 2 * n_scales].copy().view(np.float16)
    back = dequantize(kind, raw, weights.size).reshape(500, 32)
    assert np.isfinite(back[np.isfinite(scales).all(axis=1)]).all()


def test_code_books_are_those_of_the_package() -> None:
    script = capi.ROOT / "scripts" / "make_iq_tables.py"
    done: Any = subprocess.run(
        [sys.executable, str(script), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
