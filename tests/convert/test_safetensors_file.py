"""Safetensors files: what is in them is read, and a file that lies about itself is refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from powerinfer.errors import FileError, FormatError, PowerInferError, UnsupportedError
from powerinfer.models.convert.safetensors_file import open_safetensors
from tests.convert import folders


def write(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(shape: Any = (2,), offsets: Any = (0, 8), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_all_types(tmp_path: Path) -> None:
    values = np.array([[1.5, -2.0, 0.25], [3.0, 100.0, 0.0]])
    arrays: dict[str, Any] = {
        "f64": values,
        "f32": values.astype(np.float32),
        "f16": values.astype(np.float16),
        "bf16": folders.bf16(values),
        "i64": np.arange(3),
        "i32": np.arange(3, dtype=np.int32),
        "bool": np.array([True, False]),
        "scalar": np.array(2.5, np.float32),
        "empty": np.zeros((0, 4), np.float32),
    }
    folders.write_safetensors(tmp_path / "x.safetensors", arrays, types={"bf16": "BF16"})
    tensors = open_safetensors(tmp_path / "x.safetensors")
    assert list(tensors) == list(arrays)
    for name, array in arrays.items():
        expected = values.astype(np.float32) if name == "bf16" else array
        back = tensors[name].read()
        assert back.dtype == expected.dtype and back.shape == expected.shape
        np.testing.assert_array_equal(back, expected)
    for name in ("f64", "f32", "f16", "bf16"):
        rows = tensors[name].floats(1, 1)
        assert rows.dtype == np.float32
        np.testing.assert_array_equal(rows, values[1:].astype(np.float32))


def test_chunks_are_all_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("powerinfer.models.convert.stored._CHUNK_BYTES", 1)
    array = np.arange(300, dtype=np.float16).reshape(100, 3)
    folders.write_safetensors(tmp_path / "x.safetensors", {"a": array})
    chunks = list(open_safetensors(tmp_path / "x.safetensors")["a"].chunks())
    assert [len(chunk) for chunk in chunks] == [32, 32, 32, 4]
    np.testing.assert_array_equal(np.concatenate(chunks), array)
    monkeypatch.setattr("powerinfer.models.convert.stored._CHUNK_BYTES", 12 * 70)  # 70 rows would cut a block
    assert [len(chunk) for chunk in open_safetensors(tmp_path / "x.safetensors")["a"].chunks()] == [64, 36]


def test_the_library_agrees(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    arrays = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(5, np.float16)}
    safetensors.save_file(arrays, tmp_path / "x.safetensors", metadata={"format": "pt"})
    tensors = open_safetensors(tmp_path / "x.safetensors")
    assert set(tensors) == set(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(tensors[name].read(), array)
    folders.write_safetensors(tmp_path / "y.safetensors", arrays)
    for name, array in safetensors.load_file(tmp_path / "y.safetensors").items():
        np.testing.assert_array_equal(arrays[name], array)


EIGHT = bytes(8)


@pytest.mark.parametrize(
    ("header", "data", "says"),
    [
        ({"a": entry(offsets=(0, 9))}, EIGHT, "cut off"),
        ({"a": entry(offsets=(4, 0))}, EIGHT, "cut off"),
        ({"a": entry(offsets=(0, 4))}, EIGHT, "cannot have 4 bytes"),
        ({"a": entry(shape=(3,))}, EIGHT, "cannot have 8 bytes"),
        ({"a": entry(shape=(1 << 61, 1 << 61))}, EIGHT, "shape"),
        ({"a": entry(shape=(0, 1 << 61), offsets=(0, 0))}, b"", "shape"),
        ({"a": entry(shape=(-1, -2))}, EIGHT, "shape"),
        ({"a": entry(shape=(2.0,))}, EIGHT, "shape"),
        ({"a": entry(shape=(True, 2))}, EIGHT, "shape"),
        ({"a": entry(shape="2")}, EIGHT, "shape"),
        ({"a": entry(shape=[1] * 9)}, EIGHT, "shape"),
        ({"a": entry(offsets=(0,))}, EIGHT, "offsets"),
        ({"a": entry(offsets=(-8, 0))}, EIGHT, "offsets"),
        ({"a": entry(offsets=None)}, EIGHT, "offsets"),
        ({"a": entry(dtype=7)}, EIGHT, "type 7"),
        ({"a": entry(), "b": entry()}, EIGHT, "overlaps"),
        ({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12), "overlaps"),
        ({"a": entry(), "b": entry(offsets=(12, 20))}, bytes(20), "gap"),
        ({"a": entry()}, bytes(12), "the file has 12"),
        ({"a": 5}, b"", "not described"),
        ([1], b"", "not an object"),
        (b'{"a": 1, "a": 2}', b"", "twice"),
        (b"{", b"", "not JSON"),
        (b"\xff\xfe", b"", "not JSON"),
        (b"[" * 200_000, b"", "not JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", b"", "JSON"),
        (b'{"\\ud800": 1}', b"", "not JSON"),
    ],
)
def test_files_that_lie(header: Any, data: bytes, says: str, tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", header, data)
    with pytest.raises(FormatError, match=says):
        open_safetensors(path)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "F4", "U16", "C64", "what\nelse"])
def test_types_that_are_not_read(dtype: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=dtype):
        open_safetensors(write(tmp_path / "x.safetensors", {"a": entry(dtype=dtype)}, EIGHT))


@pytest.mark.parametrize("length", [1, 9, 100_000_001, 1 << 63, (1 << 64) - 1])
def test_lengths_of_the_header(length: int, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"damaged|JSON"):
        open_safetensors(write(tmp_path / "x.safetensors", b"{}", b"", length))


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="cannot be read"):
        open_safetensors(tmp_path / "none.safetensors")
    for data in (b"", b"1234567"):
        (tmp_path / "x").write_bytes(data)
        with pytest.raises(FormatError, match="not a safetensors file"):
            open_safetensors(tmp_path / "x")


def test_every_cut_and_many_flips(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    folders.write_safetensors(path, {"a": np.arange(6, dtype=np.float32), "b": np.ones((2, 2), np.float16)})
    data = path.read_bytes()
    rng = np.random.default_rng(1)
    damaged = [data[:n] for n in range(len(data))]
    for _ in range(500):
        copy = bytearray(data)
        copy[rng.integers(len(copy))] = rng.integers(256)
        damaged.append(bytes(copy))
    for i, copy in enumerate(damaged):
        path.write_bytes(copy)
        try:
            for tensor in open_safetensors(path).values():
                tensor.read()
            assert i >= len(data), "a cut was not noticed"
        except PowerInferError:
            pass
