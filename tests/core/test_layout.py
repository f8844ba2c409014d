"""Layouts of rows in the memory of devices: where each byte of a block goes."""

from __future__ import annotations

import re

import pytest
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Kind

from tests.core import capi

# The fields of blocks that stand apart, as bytes of a block; of other formats rows are as in the file.
APART = {
    Kind.Q8_0: [(2, 32), (0, 2)],
    Kind.Q4_0: [(2, 16), (0, 2)],
    Kind.Q4_1: [(4, 16), (0, 4)],
    Kind.Q5_0: [(6, 16), (2, 4), (0, 2)],
    Kind.Q5_1: [(8, 16), (4, 4), (0, 4)],
    Kind.IQ4_NL: [(2, 16), (0, 2)],
    Kind.IQ4_XS: [(8, 128), (0, 8)],
    Kind.MXFP4: [(1, 16), (0, 1)],
    Kind.Q2_K: [(16, 64), (0, 16), (80, 4)],
    Kind.Q3_K: [(32, 64), (0, 32), (96, 14)],
    Kind.Q6_K: [(0, 128), (128, 64), (192, 16), (208, 2)],
}


def planes(kind: int) -> list[tuple[int, int]] | None:
    ffi, lib = capi.load()
    layout = lib.te_layout_get(kind)
    return None if layout == ffi.NULL else [(p.at, p.n_bytes) for p in layout.plane[0 : layout.n_planes]]


@pytest.mark.parametrize("kind", list(Kind), ids=lambda kind: str(kind.name))
def test_planes_hold_each_byte_of_a_block_once(kind: Kind) -> None:
    have = planes(kind)
    if have is None:
        assert kind not in APART
        return
    n_bytes = GGML_QUANT_SIZES[kind][1]
    assert have == APART.get(kind, [(0, n_bytes)])
    assert sorted(i for at, n in have for i in range(at, at + n)) == list(range(n_bytes))
    # A plane of all blocks of a row begins at a multiple of 16 bytes if rows are of 256 weights.
    assert all(n * 256 // GGML_QUANT_SIZES[kind][0] % 16 == 0 for _, n in have[:-1])


def test_rows_of_files_are_read_where_there_is_a_codec_for_them() -> None:
    ffi, lib = capi.load()
    text = (capi.ROOT / "vendor/cuda/formats.cuh").read_text()
    listed = re.search(r"formats<([^>]*)>\s+formats_file;", text)
    assert listed
    have = {name.removeprefix("file_").upper() for name in re.findall(r"\w+", listed[1])}
    for kind in Kind:
        layout = lib.te_layout_get(kind)
        if layout != ffi.NULL:
            assert layout.in_file == (layout.n_planes == 1 or kind.name in have), kind.name


def test_unknown_formats_have_none() -> None:
    assert [planes(kind) for kind in (-1, 4, 63, 64, 1 << 20)] == [None] * 5


def test_every_format_that_gpus_have_kernels_for_has_a_layout() -> None:
    text = (capi.ROOT / "vendor/cuda/formats.cuh").read_text()
    listed = re.search(r"formats<([^>]*)>\s+formats_all;", text)
    assert listed
    names = {name.removeprefix("codec_").upper() for name in re.findall(r"\w+", listed[1])}
    assert names == {kind.name for kind in Kind if planes(kind) is not None}
