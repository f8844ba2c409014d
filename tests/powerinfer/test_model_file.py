"""What a file holds, against what was written into it and against gguf's own reader."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from powerinfer import ArgumentError, ClosedError, FileError, FormatError, ModelFile
from powerinfer._engine.file import find_model

SCALARS: dict[str, tuple[str, Any]] = {
    "t.u8": ("uint8", 200),
    "t.i8": ("int8", -100),
    "t.u16": ("uint16", 60000),
    "t.i16": ("int16", -30000),
    "t.u32": ("uint32", 4_000_000_000),
    "t.i32": ("int32", -2_000_000_000),
    "t.u64": ("uint64", 2**63 + 5),
    "t.i64": ("int64", -(2**62)),
    "t.f32": ("float32", 0.5),
    "t.f64": ("float64", 1e300),
    "t.yes": ("bool", True),
    "t.no": ("bool", False),
    "t.text": ("string", "naïve 🙂 text"),
}
WORDS = [b"", b"a", b"\xff\xfe not utf-8", "Größe".encode(), b"x" * 5000, b"a\0b"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key, (kind, value) in SCALARS.items():
        getattr(writer, f"add_{kind}")(key, value)
    writer.add_array("a.words", WORDS)
    writer.add_array("a.ints", [1, -2, 3])
    writer.add_array("a.floats", [0.25, -1.5])
    writer.add_array("a.bools", [True, False, True])
    numbers = np.random.default_rng(0)
    writer.add_tensor("plain", numbers.normal(size=(3, 5, 8)).astype(np.float32))
    writer.add_tensor("half", numbers.normal(size=(7, 4)).astype(np.float16))
    packed = gguf.quants.quantize(
        numbers.normal(size=(6, 64)).astype(np.float32), gguf.GGMLQuantizationType.Q4_0
    )
    writer.add_tensor("packed", packed, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata(path: Path) -> None:
    with ModelFile(path) as file:
        meta = file.metadata
        for key, (_, value) in SCALARS.items():
            assert meta[key] == value and type(meta[key]) is type(value), key
        assert meta["a.words"] == WORDS
        assert meta["a.ints"].tolist() == [1, -2, 3]
        assert meta["a.floats"].tolist() == [0.25, -1.5]
        assert meta["a.bools"].tolist() == [True, False, True]
        assert list(meta) == ["general.architecture", *SCALARS, "a.words", "a.ints", "a.floats", "a.bools"]
        assert len(meta) == len(list(meta))
        assert meta.count("a.words") == len(WORDS) and meta.count("t.u8") == 1
        assert meta.type_name("a.words") == "array of string" and meta.type_name("t.f64") == "f64"


def test_metadata_is_a_mapping(path: Path) -> None:
    with ModelFile(path) as file:
        assert "nothing" not in file.metadata and 5 not in file.metadata
        assert file.metadata.get("nothing", 7) == 7
        with pytest.raises(KeyError, match="nothing"):
            file.metadata["nothing"]
        assert file.metadata["a.words"] is file.metadata["a.words"]
        with pytest.raises(ValueError, match="read-only"):
            file.metadata["a.ints"][0] = 1


def test_a_string_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "file.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_key_value("t.text", b"\xff!", gguf.GGUFValueType.STRING)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with ModelFile(path) as file:
        assert file.metadata["t.text"] == "\ufffd!"


def test_tensors(path: Path) -> None:
    reader = gguf.GGUFReader(path)
    with ModelFile(path) as file:
        assert file.info.n_tensors == len(file.tensors) == 3
        for ours, theirs in zip(file.tensors, reader.tensors, strict=True):
            assert ours.name == theirs.name
            assert ours.type == theirs.tensor_type.name
            assert ours.shape == tuple(reversed(theirs.shape.tolist()))
            assert ours.n_bytes == theirs.n_bytes
            expected = gguf.quants.dequantize(theirs.data, theirs.tensor_type)
            found = file.dequantize(ours.name)
            assert found.dtype == np.float32 and found.shape == ours.shape
            assert np.array_equal(found, expected)
        with pytest.raises(ArgumentError, match="'nothing'"):
            file.dequantize("nothing")


def test_info(path: Path, sparse_path: Path) -> None:
    with ModelFile(path) as file:
        assert (file.info.version, file.info.is_powerinfer, file.info.n_parts) == (3, False, 1)
        assert file.info.n_bytes == path.stat().st_size
    with ModelFile(sparse_path) as file:
        assert file.info.is_powerinfer


def test_after_close(path: Path) -> None:
    file = ModelFile(path)
    words = file.metadata["a.words"]
    file.close()
    file.close()
    assert words == WORDS and file.metadata["a.words"] == WORDS
    assert "closed" in repr(file)
    with pytest.raises(ClosedError, match=r"file\.gguf"):
        file.metadata["a.ints"]
    with pytest.raises(ClosedError):
        file.dequantize("plain")


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"nothing\.gguf"):
        ModelFile(tmp_path / "nothing.gguf")
    with pytest.raises(FileError):
        ModelFile(tmp_path)
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"not a model file")
    with pytest.raises(FormatError):
        ModelFile(bad)
    with pytest.raises(ArgumentError, match="zero byte"):
        ModelFile("a\0b")


def test_odd_names(path: Path) -> None:
    odd = path.with_name("größe 🙂 \udcff.gguf")
    odd.write_bytes(path.read_bytes())
    with ModelFile(str(odd)) as file:
        assert file.metadata["t.u8"] == 200


def test_the_word_demo() -> None:
    assert find_model("demo").name == "demo.gguf"
    assert find_model("./demo") == Path("demo")
    assert find_model(Path("demo")) == Path("demo")


def test_threads_share_a_file(path: Path) -> None:
    problems: list[BaseException] = []

    def read() -> None:
        try:
            for _ in range(50):
                with ModelFile(path) as own:
                    assert own.metadata["a.words"] == WORDS
                assert file.dequantize("packed").shape == (6, 64)
        except BaseException as error:
            problems.append(error)

    with ModelFile(path) as file:
        threads = [threading.Thread(target=read) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not problems
