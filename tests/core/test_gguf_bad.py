"""The GGUF reader on bad files and split ones: every fault is an error that names the fact, never a crash."""

from __future__ import annotations

import contextlib
import dataclasses
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.core import capi
from tests.core.gguf_bytes import (
    ARRAY,
    BOOL,
    I32,
    STRING,
    U8,
    U16,
    U32,
    U64,
    Tensor,
    array,
    gguf,
    header,
    pair,
    string,
)
from tests.core.gguf_file import ONE, THREE, TWO, File, good

HUGE = 2**64 - 1


def swap(tensor: Tensor, **changes: Any) -> bytes:
    """A file whose second tensor has these fields changed."""
    return gguf([], [ONE, dataclasses.replace(tensor, **changes)])


def raw_pair(kind: int, value: bytes) -> bytes:
    return gguf([string("k") + struct.pack("<I", kind) + value])


BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "the file is empty"),
    "three bytes": (b"GGU", "the magic takes 4 bytes at byte 0, but only 3 are left"),
    "old ggml": (b"tjgg" + bytes(60), "not a GGUF file: it begins with 'tjgg'"),
    "unprintable magic": (b"\x80\x01\nA" + bytes(60), "it begins with '???A'"),
    "version 0": (good(version=0), "GGUF version 0 is not read"),
    "version 1": (good(version=1), "GGUF version 1 is not read"),
    "version 4": (good(version=4), "GGUF version 4 is not read"),
    "big endian 3": (good(version=3 << 24), "a big-endian GGUF file"),
    "big endian 2": (good(version=2 << 24), "a big-endian GGUF file"),
    "no counts": (header()[:8], "the number of tensors takes 8 bytes at byte 8"),
    "n_kv overflows": (gguf([pair("a", U8, 1)], n_kv=HUGE), "promises 18446744073709551615 keys"),
    "n_kv too large": (gguf([pair("a", U8, 1)], n_kv=2), "promises 2 keys, more than 14 bytes can hold"),
    "n_kv beyond the pairs": (gguf([pair("a", STRING, "x" * 90)], n_kv=2), "the name of a key takes 8 bytes"),
    "n_tensors overflows": (good(n_tensors=HUGE), "promises 18446744073709551615 tensors"),
    "n_tensors 2^60": (good(n_tensors=2**60), "promises 1152921504606846976 tensors"),
    "n_tensors one more": (gguf([], [ONE], n_tensors=3), "promises 3 tensors"),
    "key length overflows": (
        header(n_kv=1) + string("key", length=HUGE) + bytes(20),
        "is 18446744073709551615 bytes long; 1 to 65535",
    ),
    "key length 0": (gguf([pair("", U32, 1)]), "the name of a key at byte 24 is 0 bytes long"),
    "key length 65536": (gguf([pair("k" * 65536, U8, 1)]), "is 65536 bytes long; 1 to 65535"),
    "key longer than the file": (
        header(n_kv=1) + string("key", length=400) + bytes(20),
        "the name of a key takes 400 bytes",
    ),
    "key with a zero": (gguf([pair("a\0b", U8, 1)]), "the name of a key at byte 24 holds a zero byte"),
    "key twice": (gguf([pair("a", U8, 1), pair("b", U8, 1), pair("a", U8, 2)]), "duplicate key 'a'"),
    "key type 13": (raw_pair(13, bytes(8)), "key 'k' has the unknown value type 13"),
    "key type huge": (raw_pair(2**32 - 1, bytes(8)), "key 'k' has the unknown value type 4294967295"),
    "value cut": (raw_pair(U64, bytes(7)), "the value of a key takes 8 bytes"),
    "bool of 2": (raw_pair(BOOL, b"\x02"), "key 'k' holds a bool of value 2"),
    "bool of 255 in an array": (gguf([array("k", BOOL, [0, 1, 255])]), "key 'k' holds a bool of value 255"),
    "string length overflows": (
        raw_pair(STRING, string("abc", length=HUGE)),
        "the value of a key takes 18446744073709551615 bytes",
    ),
    "string length wraps to its start": (
        raw_pair(STRING, string("abc", length=HUGE - 44)),
        "the value of a key takes",
    ),
    "array of arrays": (
        raw_pair(ARRAY, struct.pack("<IQ", ARRAY, 1) + bytes(32)),
        "key 'k' is an array of arrays",
    ),
    "array of type 13": (
        raw_pair(ARRAY, struct.pack("<IQ", 13, 1) + bytes(32)),
        "key 'k' is an array of the unknown type 13",
    ),
    "array count overflows": (
        gguf([array("k", U32, [1, 2], count=HUGE)]),
        "an array of 18446744073709551615 elements",
    ),
    "array count times size wraps": (
        gguf([array("k", U32, [1, 2], count=2**62)]),
        "an array of 4611686018427387904 elements",
    ),
    "array one too long": (
        gguf([array("k", U32, [1, 2], count=3)]),
        "an array of 3 elements, but only 8 bytes are left",
    ),
    "strings one too many": (
        gguf([array("k", STRING, ["a", "b" * 8], count=3)]),
        "string 2 of key 'k' at byte 74 runs past",
    ),
    "string count overflows": (
        gguf([array("k", STRING, ["a"], count=HUGE)]),
        "an array of 18446744073709551615 elements",
    ),
    "string in an array overflows": (
        raw_pair(ARRAY, struct.pack("<IQQ", STRING, 1, HUGE) + b"abc"),
        "string 0 of key 'k'",
    ),
    "tensor name empty": (swap(TWO, name=""), "the name of a tensor at byte 59 is 0 bytes long"),
    "tensor name too long": (swap(TWO, name="n" * 128), "is 128 bytes long; 1 to 127 are possible"),
    "tensor name with a zero": (swap(TWO, name="a\0"), "the name of a tensor at byte 59 holds a zero byte"),
    "tensor twice": (swap(ONE), "duplicate tensor name 'one'"),
    "no dimension": (swap(TWO, dims=(), data=b""), "tensor 'two' has 0 dimensions"),
    "five dimensions": (swap(TWO, dims=(1, 1, 1, 1, 1), kind=0), "tensor 'two' has 5 dimensions"),
    "2^32-1 dimensions": (swap(TWO, n_dims=2**32 - 1), "tensor 'two' has 4294967295 dimensions"),
    "dimension 0": (swap(TWO, dims=(32, 0)), "dimension 1 of tensor 'two' is 0"),
    "dimension 2^63": (
        swap(TWO, dims=(2**63,)),
        "dimension 0 of tensor 'two' is 9223372036854775808, more weights than can be counted",
    ),
    "product overflows": (swap(TWO, dims=(2**32, 2**31)), "dimension 1 of tensor 'two' is 2147483648"),
    "product wraps to small": (
        swap(TWO, dims=(2**32, 2**32, 32)),
        "dimension 1 of tensor 'two' is 4294967296",
    ),
    "bytes overflow": (swap(TWO, dims=(2**62,), kind=0), "tensor 'two' has more bytes than can be counted"),
    "type 4": (swap(TWO, kind=4), "tensor 'two' has the unknown type 4"),
    "type 36": (swap(TWO, kind=36), "tensor 'two' is of the type I2_S (36) of bitnet.cpp, which is not read"),
    "type 63": (swap(TWO, kind=63), "tensor 'two' has the unknown type 63"),
    "type 64": (swap(TWO, kind=64), "tensor 'two' has the unknown type 64"),
    "type huge": (swap(TWO, kind=2**32 - 1), "tensor 'two' has the unknown type 4294967295"),
    "half a block": (
        swap(TWO, dims=(16, 4)),
        "tensor 'two' has rows of 16 weights, not a multiple of 32 as Q4_0 needs",
    ),
    "half a K block": (
        swap(TWO, dims=(128, 2), kind=12),
        "rows of 128 weights, not a multiple of 256 as Q4_K needs",
    ),
    "offset not aligned": (
        swap(TWO, offset=33),
        "tensor 'two' has offset 33, not a multiple of the alignment 32",
    ),
    "offset overflows": (
        swap(TWO, offset=2**64 - 32),
        "tensor 'two' takes 36 bytes at offset 18446744073709551584",
    ),
    "offset behind the data": (
        swap(TWO, offset=96),
        "tensor 'two' takes 36 bytes at offset 96, but the file has only 68",
    ),
    "data cut": (
        good()[:-1],
        "tensor 'three' takes 96 bytes at offset 96, but the file has only 191 bytes of data",
    ),
    "no data": (gguf([], [dataclasses.replace(ONE, data=b"")]), "but the file has only 0 bytes of data"),
    "tensors overlap": (
        gguf(
            [],
            [Tensor(name="a", dims=(16,), data=bytes(96)), Tensor(name="b", dims=(16,), offset=32, data=b"")],
        ),
        "tensors 'a' and 'b' overlap: 64 bytes at offset 0, and 64 at 32",
    ),
    "a tensor within another": (
        gguf(
            [],
            [
                Tensor(name="a", dims=(8,), offset=0, data=b""),
                Tensor(name="b", dims=(16,), offset=0, data=bytes(64)),
            ],
        ),
        "tensors 'a' and 'b' overlap: 32 bytes at offset 0, and 64 at 0",
    ),
    "alignment 0": (gguf([pair("general.alignment", U32, 0)], [ONE]), "key 'general.alignment' is 0"),
    "alignment 4": (
        gguf([pair("general.alignment", U32, 4)], [ONE]),
        "key 'general.alignment' is 4; 8 to 1048576",
    ),
    "alignment 48": (
        gguf([pair("general.alignment", U32, 48)], [ONE]),
        "general.alignment is 48, not a power of two",
    ),
    "alignment 2^31": (
        gguf([pair("general.alignment", U32, 2**31)], [ONE]),
        "key 'general.alignment' is 2147483648",
    ),
    "alignment a string": (
        gguf([pair("general.alignment", STRING, "32")], [ONE]),
        "'general.alignment' has the type string",
    ),
    "alignment not as laid out": (
        gguf([pair("general.alignment", U32, 64)], [ONE, TWO]),
        "has offset 32, not a multiple of the alignment 64",
    ),
    "split in memory": (
        gguf([pair("split.count", U16, 2), pair("split.no", U16, 0)]),
        "buffer: part 1 of 2 of a split model",
    ),
    "split count negative": (gguf([pair("split.count", I32, -1)]), "key 'split.count' is -1"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_named_errors(name: str) -> None:
    data, message = BAD[name]
    with pytest.raises(capi.CoreError) as error:
        File(data)
    assert error.value.status == "TE_FORMAT"
    assert message in error.value.message


@pytest.mark.parametrize("name", BAD)
def test_bad_files_on_disk_name_the_path_and_stay_closed(name: str, tmp_path: Path) -> None:
    data, _ = BAD[name]
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(capi.CoreError) as error:
        File(path)
    assert error.value.status == "TE_FORMAT"
    assert str(path) in error.value.message
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_a_file_cut_anywhere_is_an_error() -> None:
    data = good()
    for n in range(len(data)):
        with pytest.raises(capi.CoreError) as error:
            File(data[:n])
        assert error.value.status == "TE_FORMAT"
    with File(data):
        pass


def walk(f: File) -> None:
    """Reads every byte that a handle gives out."""
    for i in range(f.lib.te_gguf_n_kv(f.handle)):
        kv = f.lib.te_gguf_kv_at(f.handle, i)
        bytes(f.ffi.buffer(kv.data, kv.n_bytes))
    f.tensors()


@pytest.mark.parametrize("value", [0x00, 0x01, 0x7F, 0x80, 0xFF])
def test_any_byte_changed_is_read_or_refused(value: int) -> None:
    data = good()
    n_opened = 0
    for at in range(len(data) - 200):
        changed = data[:at] + bytes([value]) + data[at + 1 :]
        with contextlib.suppress(capi.CoreError), File(changed) as f:
            walk(f)
            n_opened += 1
    assert n_opened > 0


def test_odd_names_are_shown_safely() -> None:
    with pytest.raises(capi.CoreError) as error:
        File(gguf([pair(b"\x1b[2J%s%n\xff" + b"k" * 500, BOOL, 7)]))
    assert "key '?[2J%s%n?kkk" in error.value.message
    assert "kkk...'" in error.value.message
    assert len(error.value.message) < 200


def test_what_is_no_file_is_an_io_error(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent.gguf", Path("/dev/null")):
        with pytest.raises(capi.CoreError) as error:
            File(path)
        assert error.value.status == "TE_IO"
        assert str(path) in error.value.message


def test_a_very_long_path_keeps_its_end_and_the_reason(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 200) / ("y" * 200)
    folder.mkdir(parents=True)
    path = folder / "empty.gguf"
    path.write_bytes(b"")
    with pytest.raises(capi.CoreError) as error:
        File(path)
    assert error.value.message.endswith("yyy/empty.gguf: the file is empty")


# ---- split files ----


def part_bytes(
    no: int,
    count: int,
    tensors: list[Tensor],
    *,
    total: int | None = None,
    magic: bytes = b"GGUF",
    count_kind: int = U16,
) -> bytes:
    pairs = [pair("split.no", U16, no), pair("split.count", count_kind, count)]
    if total is not None:
        pairs.append(pair("split.tensors.count", I32, total))
    if no == 0:
        pairs.append(pair("general.architecture", STRING, "llama"))
    return gguf(pairs, tensors, magic=magic)


def part_path(folder: Path, no: int, count: int) -> Path:
    return folder / f"model-{no + 1:05d}-of-{count:05d}.gguf"


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Callable[..., list[Path]]]:
    """Writes a set of three parts with one tensor each, some of them replaced, and returns the paths."""

    def write(replaced: dict[int, bytes | None] | None = None, *, total: int = 3) -> list[Path]:
        paths = [part_path(tmp_path, no, 3) for no in range(3)]
        for no, (path, tensor) in enumerate(zip(paths, (ONE, TWO, THREE), strict=True)):
            data = (replaced or {}).get(no, part_bytes(no, 3, [tensor], total=total))
            if data is not None:
                path.write_bytes(data)
        return paths

    yield write
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("opened", [0, 1, 2])
def test_any_part_opens_all(parts: Callable[..., list[Path]], opened: int) -> None:
    paths = parts()
    with File(paths[opened]) as f:
        assert f.lib.te_gguf_n_parts(f.handle) == 3
        assert f.lib.te_gguf_n_bytes(f.handle) == sum(path.stat().st_size for path in paths)
        assert f.get("str", "general.architecture") == b"llama"
        assert f.get("i64", "split.no", 0, 9) == 0
        assert [(t[0], t[3], t[4]) for t in f.tensors()] == [
            (b"one", ONE.data, 0),
            (b"two", TWO.data, 1),
            (b"three", THREE.data, 2),
        ]
        for i, tensor in enumerate((b"one", b"two", b"three")):
            assert f.lib.te_gguf_find_tensor(f.handle, tensor) == f.lib.te_gguf_tensor_at(f.handle, i)
            n_bytes = f.ffi.new("size_t *")
            mapping = f.lib.te_gguf_mapping(f.handle, i, n_bytes)
            assert bytes(f.ffi.buffer(mapping, n_bytes[0])) == paths[i].read_bytes()


@pytest.mark.parametrize("count", [0, 1])
def test_a_merged_set_is_one_file(tmp_path: Path, count: int) -> None:
    path = tmp_path / "merged.gguf"
    path.write_bytes(part_bytes(0, count, [ONE]))
    with File(path) as f:
        assert f.lib.te_gguf_n_parts(f.handle) == 1


NUMBERED_WRONG: dict[str, tuple[dict[int, bytes | None], int, str, str]] = {
    "part missing": ({1: None}, 0, "TE_IO", "part 2 of 3: "),
    "first missing": ({0: None}, 2, "TE_IO", "part 1 of 3: "),
    "part empty": ({2: b""}, 0, "TE_FORMAT", "part 3 of 3: "),
    "part cut": ({2: part_bytes(2, 3, [THREE])[:-1]}, 0, "TE_FORMAT", "only 95 bytes of data"),
    "wrong number": (
        {1: part_bytes(2, 3, [TWO])},
        0,
        "TE_FORMAT",
        "holds part 3 of 3, where part 2 of 3 is expected",
    ),
    "a copy of the first": (
        {1: part_bytes(0, 3, [TWO])},
        0,
        "TE_FORMAT",
        "holds part 1 of 3, where part 2 of 3 is expected",
    ),
    "another count": (
        {1: part_bytes(1, 4, [TWO])},
        0,
        "TE_FORMAT",
        "holds part 2 of 4, where part 2 of 3 is expected",
    ),
    "opened names another count": (
        {0: part_bytes(0, 4, [ONE])},
        0,
        "TE_FORMAT",
        "must end in -00001-of-00004.gguf",
    ),
    "opened names another number": (
        {0: part_bytes(1, 3, [ONE])},
        0,
        "TE_FORMAT",
        "must end in -00002-of-00003.gguf",
    ),
    "not a part at all": (
        {1: gguf([], [TWO])},
        0,
        "TE_FORMAT",
        "holds part 1 of 1, where part 2 of 3 is expected",
    ),
    "number beyond the count": (
        {0: part_bytes(3, 3, [ONE])},
        0,
        "TE_FORMAT",
        "key 'split.no' is 3; 0 to 2 are possible",
    ),
    "count huge": (
        {0: part_bytes(0, 65535, [ONE])},
        0,
        "TE_FORMAT",
        "key 'split.count' is 65535; 0 to 1024 are possible",
    ),
    "count overflows": (
        {0: part_bytes(0, 2**64 - 1, [ONE], count_kind=U64)},
        0,
        "TE_FORMAT",
        "key 'split.count' is above",
    ),
    "no number": (
        {0: gguf([pair("split.count", U16, 3)], [ONE])},
        0,
        "TE_FORMAT",
        "split.count is 3, but split.no is missing",
    ),
    "another magic": ({2: part_bytes(2, 3, [THREE], magic=b"PWRI")}, 0, "TE_FORMAT", "its magic differs"),
    "tensor in two parts": (
        {2: part_bytes(2, 3, [ONE])},
        0,
        "TE_FORMAT",
        "-00003-of-00003.gguf: duplicate tensor name 'one'",
    ),
    "too few tensors": (
        {2: part_bytes(2, 3, [])},
        1,
        "TE_FORMAT",
        "split.tensors.count is 3, but the parts hold 2 tensors",
    ),
}


@pytest.mark.parametrize("name", NUMBERED_WRONG)
def test_bad_sets_are_named_errors(parts: Callable[..., list[Path]], name: str) -> None:
    replaced, opened, status, message = NUMBERED_WRONG[name]
    paths = parts(replaced)
    with pytest.raises(capi.CoreError) as error:
        File(paths[opened])
    assert error.value.status == status
    assert message in error.value.message


def test_a_set_linked_to_itself_is_an_error(parts: Callable[..., list[Path]]) -> None:
    paths = parts()
    paths[1].unlink()
    paths[1].symlink_to(paths[0])
    with pytest.raises(capi.CoreError, match="holds part 1 of 3, where part 2 of 3 is expected"):
        File(paths[0])
    with pytest.raises(capi.CoreError, match=r"must end in -00001-of-00003\.gguf"):
        File(paths[1])


def test_a_set_whose_links_run_in_a_circle_is_an_io_error(parts: Callable[..., list[Path]]) -> None:
    paths = parts()
    paths[1].unlink()
    paths[2].unlink()
    paths[1].symlink_to(paths[2])
    paths[2].symlink_to(paths[1])
    with pytest.raises(capi.CoreError) as error:
        File(paths[0])
    assert error.value.status == "TE_IO"


@pytest.mark.parametrize("name", ["model.gguf", "x", "model-00001-of-00003.bin", "model-1-of-3.gguf"])
def test_a_part_with_another_name_is_an_error(parts: Callable[..., list[Path]], name: str) -> None:
    first = parts()[0]
    renamed = first.rename(first.with_name(name))
    with pytest.raises(capi.CoreError, match=r"must end in -00001-of-00003\.gguf"):
        File(renamed)
