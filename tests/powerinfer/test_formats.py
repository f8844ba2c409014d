"""Weight formats by name, and quantising on several threads, against the gguf package."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from powerinfer import ArgumentError, UnsupportedError
from powerinfer._engine import formats


def weights(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(shape, np.float32)


def test_names_and_sizes() -> None:
    assert formats.number("Q4_K") == formats.number("q4_k") == 12
    assert formats.canonical("iq4_nl") == "IQ4_NL"
    assert (formats.block("F32"), formats.block("Q8_0"), formats.block("Q6_K")) == (1, 32, 256)
    assert formats.row_bytes("Q4_0", 96) == 54
    assert formats.can_quantize("Q2_K") and not formats.can_quantize("IQ2_XS")


@pytest.mark.parametrize("name", ["", "Q4", "f32 ", "\udcff"])
def test_unknown_names(name: str) -> None:
    for function in (formats.number, formats.canonical, formats.block, formats.can_quantize):
        with pytest.raises(ArgumentError, match="not a weight format"):
            function(name)


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_equal_to_the_package(name: str) -> None:
    source = weights(3, 5, 64)
    kind = gguf.GGMLQuantizationType[name]
    expected = np.ascontiguousarray(gguf.quants.quantize(source, kind)).view(np.uint8)
    for n_threads in (1, 3):
        found = formats.quantize(source, name, n_threads=n_threads)
        assert found.shape == (3, 5, formats.row_bytes(name, 64))
        assert np.array_equal(found, expected)


@pytest.mark.parametrize("name", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL"])
def test_threads_do_not_change_bits(name: str) -> None:
    source = weights(7, 512)
    alone = formats.quantize(source, name, n_threads=1)
    assert np.array_equal(alone, formats.quantize(source, name, n_threads=4))
    rows = np.concatenate([formats.quantize(row, name)[None] for row in source])
    assert np.array_equal(alone, rows)


def test_any_layout_and_float_type() -> None:
    source = weights(8, 64)
    expected = formats.quantize(source, "Q8_0")
    assert np.array_equal(formats.quantize(np.asfortranarray(source), "Q8_0"), expected)
    read_only = source.astype(np.float64)
    read_only.flags.writeable = False
    assert np.array_equal(formats.quantize(read_only, "Q8_0"), expected)
    assert formats.quantize(source[:0], "Q8_0").shape == (0, 68)


def test_what_cannot_be_quantised() -> None:
    with pytest.raises(ArgumentError, match=r"rows of 40 .* 32 of Q4_0"):
        formats.quantize(weights(2, 40), "Q4_0")
    with pytest.raises(UnsupportedError, match="IQ2_XS"):
        formats.quantize(weights(1, 256), "IQ2_XS")
    with pytest.raises(ArgumentError, match="n_threads"):
        formats.quantize(weights(1, 32), "Q4_0", n_threads=-1)
