"""The GGUF reader on good files: all that stands in them is found, by position, by name and by type."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf as gguf_package
import numpy as np
import pytest

from tests.core import capi
from tests.core.gguf_bytes import (
    ARRAY,
    BOOL,
    F32,
    F64,
    I32,
    I64,
    STRING,
    U8,
    U16,
    U32,
    U64,
    Tensor,
    array,
    every_value,
    gguf,
    header,
    pair,
    string,
)
from tests.core.gguf_file import INT64, ONE, THREE, TWO, File, good


@pytest.fixture(scope="module")
def core() -> tuple[Any, Any]:
    return capi.load()


@pytest.mark.parametrize(("magic", "version"), [(b"GGUF", 3), (b"GGUF", 2), (b"PWRI", 3), (b"PWRI", 2)])
def test_everything_in_a_file_is_found(magic: bytes, version: int) -> None:
    data = good(magic=magic, version=version)
    with File(data) as f:
        assert f.lib.te_gguf_is_powerinfer(f.handle) == (magic == b"PWRI")
        assert f.lib.te_gguf_version(f.handle) == version
        assert f.lib.te_gguf_n_parts(f.handle) == 1
        assert f.lib.te_gguf_n_bytes(f.handle) == len(data)
        assert f.keys()[0] == b"general.architecture"
        assert len(f.keys()) == len(every_value())
        assert f.find("words") == (
            ARRAY,
            STRING,
            4,
            string("a") + string("") + string("word") + string(b"\x00"),
        )
        assert f.find("halves") == (ARRAY, U16, 3, struct.pack("<3H", 1, 2, 3))
        assert f.find("flags") == (ARRAY, BOOL, 3, b"\x00\x01\x01")
        assert f.find("none") == (ARRAY, I32, 0, b"")
        assert f.find("bytes") == (STRING, -1, 1, b"\xff\x00\xfe")
        assert f.find(f"scalar.{F64}") == (F64, -1, 1, struct.pack("<d", 0.1))
        for absent in ("", "word", "wordss", "scalar"):
            assert f.find(absent) is None
        assert f.tensors() == [
            (b"one", 0, [8], ONE.data, 0),
            (b"two", 2, [32, 2], TWO.data, 0),
            (b"three", 0, [1, 2, 3, 4], THREE.data, 0),
        ]


def test_positions_outside_are_null(core: tuple[Any, Any]) -> None:
    ffi, lib = core
    with File(good()) as f:
        n_bytes = ffi.new("size_t *", 7)
        for i in (-1, 1 << 40):
            assert lib.te_gguf_kv_at(f.handle, i) == ffi.NULL
            assert lib.te_gguf_tensor_at(f.handle, i) == ffi.NULL
        assert lib.te_gguf_kv_at(f.handle, len(every_value())) == ffi.NULL
        assert lib.te_gguf_tensor_at(f.handle, 3) == ffi.NULL
        for part in (-1, 1):
            assert lib.te_gguf_mapping(f.handle, part, n_bytes) == ffi.NULL
            assert n_bytes[0] == 0
        lib.te_gguf_close(ffi.NULL)


def test_a_file_written_by_the_gguf_package_reads_the_same(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    rng = np.random.default_rng(1)
    writer = gguf_package.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 2)
    writer.add_token_list(["<s>", "ä", "b"])
    writer.add_custom_alignment(64)
    weights = {
        "a.weight": rng.standard_normal((3, 64), dtype=np.float32),
        "b.weight": rng.standard_normal(5, dtype=np.float32),
    }
    for name, weight in weights.items():
        writer.add_tensor(name, weight)
    packed = gguf_package.quants.quantize(weights["a.weight"], gguf_package.GGMLQuantizationType.Q8_0)
    writer.add_tensor("c.weight", packed, raw_dtype=gguf_package.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with File(path) as f:
        assert f.get("i64", "llama.block_count", *INT64) == 2
        assert f.find("tokenizer.ggml.tokens") == (
            ARRAY,
            STRING,
            3,
            string("<s>") + string("ä") + string("b"),
        )
        assert f.tensors() == [
            (b"a.weight", 0, [64, 3], weights["a.weight"].tobytes(), 0),
            (b"b.weight", 0, [5], weights["b.weight"].tobytes(), 0),
            (b"c.weight", 8, [64, 3], packed.tobytes(), 0),
        ]
        for i in range(3):
            assert int(f.ffi.cast("uintptr_t", f.lib.te_gguf_tensor_at(f.handle, i).data)) % 64 == 0
        n_bytes = f.ffi.new("size_t *")
        mapping = f.lib.te_gguf_mapping(f.handle, 0, n_bytes)
        assert bytes(f.ffi.buffer(mapping, n_bytes[0])) == path.read_bytes()


def test_many_names_are_each_found() -> None:
    n = 3000
    names = [f"blk.{i}.weight" for i in range(n)]
    data = gguf(
        [pair(f"key.{i}", U32, i) for i in range(n)],
        [
            Tensor(name=name, dims=(8,), data=struct.pack("<8i", *[i] * 8), kind=26)
            for i, name in enumerate(names)
        ],
    )
    with File(data) as f:
        for i in range(n):
            assert f.get("i64", f"key.{i}", 0, n) == i
            t = f.lib.te_gguf_find_tensor(f.handle, names[i].encode())
            assert t == f.lib.te_gguf_tensor_at(f.handle, i)
            assert f.text(t.name).decode() == names[i]
        assert f.find("key.3000") is None
        assert f.lib.te_gguf_find_tensor(f.handle, b"blk.3000.weight") == f.ffi.NULL
        assert f.lib.te_gguf_find_tensor(f.handle, b"") == f.ffi.NULL


def test_a_vocabulary_of_150000_words_stays_in_place() -> None:
    words = [f"word{i}" for i in range(150_000)]
    with File(gguf([array("tokenizer.ggml.tokens", STRING, words)])) as f:
        kind, element, n, raw = f.find("tokenizer.ggml.tokens")
        assert (kind, element, n) == (ARRAY, STRING, len(words))
        assert raw == b"".join(string(word) for word in words)


@pytest.mark.parametrize("alignment", [8, 32, 4096, 1 << 20])
def test_alignment_is_obeyed(alignment: int) -> None:
    data = gguf([pair("general.alignment", U32, alignment)], [ONE, TWO], alignment=alignment)
    with File(data) as f:
        assert [(t[0], t[3]) for t in f.tensors()] == [(b"one", ONE.data), (b"two", TWO.data)]


def test_a_file_without_tensors_needs_no_padding() -> None:
    with File(gguf([pair("a", U8, 1)])) as f:
        assert f.tensors() == []
        assert f.get("i64", "a", 0, 1) == 1
    with File(header()) as f:
        assert f.keys() == []


def test_tied_tensors_may_share_all_their_bytes() -> None:
    tied = Tensor(name="tied", dims=(8,), offset=0, data=b"")
    with File(gguf([], [ONE, tied])) as f:
        assert [t[3] for t in f.tensors()] == [ONE.data, ONE.data]


def test_tensors_may_stand_in_any_order() -> None:
    late = Tensor(name="late", dims=(8,), offset=32, data=b"")
    early = Tensor(name="early", dims=(8,), offset=0, data=bytes(range(64)))
    with File(gguf([], [late, early])) as f:
        assert [t[3] for t in f.tensors()] == [bytes(range(32, 64)), bytes(range(32))]


# ---- typed values ----

SCALARS = [
    pair("u8", U8, 200),
    pair("i64", I64, -(2**63)),
    pair("u64", U64, 2**63 - 1),
    pair("u64 too large", U64, 2**63),
    pair("f32", F32, 0.1),
    pair("f64", F64, 0.1),
    pair("f64 too large", F64, 1e39),
    pair("f64 infinite", F64, float("inf")),
    pair("yes", BOOL, 1),
    pair("no", BOOL, 0),
    pair("str", STRING, "a\0b"),
    array("list", U8, [1]),
]


@pytest.mark.parametrize(
    ("what", "key", "limits", "expected"),
    [
        ("i64", "u8", (0, 200), 200),
        ("i64", "u8", (200, 300), 200),
        ("i64", "i64", INT64, -(2**63)),
        ("i64", "u64", INT64, 2**63 - 1),
        ("i64", "absent", INT64, None),
        ("f32", "f32", (), np.float32(0.1)),
        ("f32", "f64", (), np.float32(0.1)),
        ("f32", "f64 infinite", (), float("inf")),
        ("f32", "absent", (), None),
        ("bool", "yes", (), True),
        ("bool", "no", (), False),
        ("bool", "absent", (), None),
        ("str", "str", (), b"a\0b"),
        ("str", "absent", (), None),
    ],
)
def test_typed_values(what: str, key: str, limits: tuple[int, ...], expected: Any) -> None:
    with File(gguf(SCALARS)) as f:
        assert f.get(what, key, *limits) == expected


@pytest.mark.parametrize("kind", [U8, 1, U16, 3, U32, I32, U64, I64])
def test_integers_of_every_width(kind: int) -> None:
    bits = {U8: 8, 1: 8, U16: 16, 3: 16, U32: 32, I32: 32, U64: 64, I64: 64}[kind]
    low, high = (0, 2**bits - 1) if kind in (U8, U16, U32, U64) else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    for value in (low, min(high, 2**63 - 1), 77):
        with File(gguf([pair("x", kind, value)])) as f:
            assert f.get("i64", "x", *INT64) == value


@pytest.mark.parametrize(
    ("what", "key", "limits", "message"),
    [
        ("i64", "u8", (0, 199), "key 'u8' is 200; 0 to 199 are possible"),
        ("i64", "u8", (201, 300), "key 'u8' is 200; 201 to 300 are possible"),
        ("i64", "u64 too large", INT64, "key 'u64 too large' is above 9223372036854775807"),
        ("i64", "f32", INT64, "key 'f32' has the type f32, not an integer"),
        ("i64", "yes", INT64, "key 'yes' has the type bool, not an integer"),
        ("i64", "list", INT64, "key 'list' has the type array, not an integer"),
        ("f32", "u8", (), "key 'u8' has the type u8, not a float"),
        ("f32", "f64 too large", (), "key 'f64 too large' is 1e+39"),
        ("bool", "u8", (), "key 'u8' has the type u8, not a bool"),
        ("str", "list", (), "key 'list' has the type array, not a string"),
    ],
)
def test_wrong_types_and_ranges_are_named(what: str, key: str, limits: tuple[int, ...], message: str) -> None:
    with File(gguf(SCALARS)) as f:
        with pytest.raises(capi.CoreError) as error:
            f.get(what, key, *limits)
        assert error.value.status == "TE_FORMAT"
        assert message in error.value.message


def test_an_absent_or_wrong_value_leaves_the_default(core: tuple[Any, Any]) -> None:
    ffi, lib = core
    with File(gguf(SCALARS)) as f:
        out = ffi.new("int64_t *", 42)
        assert lib.te_gguf_get_i64(f.handle, b"absent", 0, 9, out, ffi.NULL) == 0
        assert lib.te_gguf_get_i64(f.handle, b"u8", 0, 9, out, ffi.NULL) != 0
        assert out[0] == 42
