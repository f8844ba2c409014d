"""PyTorch files: what PyTorch writes is read, what is written PyTorch reads, and nothing else is done.

Hostile pickles are written by Python's own pickle or opcode by opcode. The tests against PyTorch itself run
where it is installed.
"""

from __future__ import annotations

import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from powerinfer.errors import ArgumentError, FileError, FormatError, PowerInferError, UnsupportedError
from powerinfer.models.convert.torch_file import read_torch, write_torch


def archive(path: Path, data_pkl: bytes, storages: dict[str, bytes] | None = None, **extra: bytes) -> Path:
    """A .pt file around a pickle."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("x/data.pkl", data_pkl)
        for key, data in (storages or {}).items():
            file.writestr(f"x/data/{key}", data)
        for name, data in extra.items():
            file.writestr(f"x/{name}", data)
    return path


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def number(value: int) -> bytes:
    return b"\x8a\x09" + value.to_bytes(9, "little", signed=True)


def tuple_of(*items: bytes) -> bytes:
    return b"(" + b"".join(items) + b"t"


def storage(kind: str = "FloatStorage", key: str = "0", size: int = 6) -> bytes:
    return (
        tuple_of(text("storage"), f"ctorch\n{kind}\n".encode(), text(key), text("cpu"), number(size)) + b"Q"
    )


def tensor(source: bytes, shape: list[int], strides: list[int], offset: int = 0) -> bytes:
    """An opcode by opcode call of torch._utils._rebuild_tensor_v2."""
    sizes = [tuple_of(*map(number, values)) for values in (shape, strides)]
    hooks = b"ccollections\nOrderedDict\n)R"
    call = tuple_of(source, number(offset), *sizes, b"\x89", hooks)
    return b"ctorch._utils\n_rebuild_tensor_v2\n" + call + b"R"


SIX = np.arange(6, dtype="<f4").tobytes()


# ---- by hand


def test_a_tensor_by_hand(tmp_path: Path) -> None:
    path = archive(tmp_path / "x.pt", b"\x80\x02" + tensor(storage(), [2, 3], [3, 1]) + b".", {"0": SIX})
    np.testing.assert_array_equal(read_torch(path), [[0, 1, 2], [3, 4, 5]])


def test_strides_and_offsets(tmp_path: Path) -> None:
    """Transposed, every second, from the fourth on; one storage for all."""
    items = {
        "turned": (tensor(storage(), [3, 2], [1, 3]), [[0, 3], [1, 4], [2, 5]]),
        "second": (tensor(storage(), [3], [2], 1), [1, 3, 5]),
        "last": (tensor(storage(), [2], [1], 4), [4, 5]),
        "scalar": (tensor(storage(), [], [], 5), 5),
        "empty": (tensor(storage(), [0, 3], [3, 1]), np.zeros((0, 3))),
    }
    body = b"".join(text(name) + code for name, (code, _) in items.items())
    path = archive(tmp_path / "x.pt", b"\x80\x02}(" + body + b"u.", {"0": SIX})
    content = read_torch(path)
    assert isinstance(content, dict) and list(content) == list(items)
    for name, (_, expected) in items.items():
        np.testing.assert_array_equal(content[name], expected)
        assert content[name].shape == np.shape(expected)


def test_bf16_becomes_float32(tmp_path: Path) -> None:
    values = np.array([1.0, -2.5, 3e38], np.float32)
    bits = (values.view(np.uint32) >> 16).astype("<u2")
    body = b"\x80\x02" + tensor(storage("BFloat16Storage", size=3), [3], [1]) + b"."
    content = read_torch(archive(tmp_path / "x.pt", body, {"0": bits.tobytes()}))
    assert content.dtype == np.float32
    np.testing.assert_array_equal(content, (bits.astype(np.uint32) << 16).view(np.float32))


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (tensor(storage(size=7), [1], [1]), "24 bytes, 28 are needed"),
        (tensor(storage(), [7], [1]), "beyond its storage"),
        (tensor(storage(), [2, 3], [3, 2]), "beyond its storage"),
        (tensor(storage(), [1], [1], 6), "beyond its storage"),
        (tensor(storage(), [1], [1], -1), "damaged"),
        (tensor(storage(), [-1], [1]), "damaged"),
        (tensor(storage(), [2], [-1], 3), "damaged"),
        (tensor(storage(), [1 << 40], [0]), "beyond its storage"),
        (tensor(storage(), [1 << 40, 1 << 40], [0, 0]), "damaged"),
        (tensor(storage(), [0, 1 << 60], [1, 1]), "damaged"),
        (tensor(storage(), [1] * 9, [1] * 9), "damaged"),
        (tensor(storage(), [2, 3], [1]), "damaged"),
        # Sizes are not multiplied before it is known that there are few: of a million it would take hours.
        (
            tensor(storage(), [1] * 9, [1] * 9).replace(number(1) + b"t", text("no size") + b"t"),
            "9 dimensions",
        ),
        # Tuples of twice the same tuple: shown, this one has 2^20 parts.
        (
            tuple_of(
                text("storage"),
                b"ctorch\nFloatStorage\n",
                b")q\x00" + b"h\x00\x86q\x00" * 20,
                text("cpu"),
                number(1),
            )
            + b"Q",
            "key is not a text",
        ),
        (tensor(storage(key="1"), [1], [1]), "no storage '1'"),
        (tensor(storage("QInt8Storage"), [1], [1]), "torch.QInt8Storage, which is not allowed"),
        (
            tensor(tuple_of(text("module"), text("a"), text("b"), text("c"), number(1)) + b"Q", [1], [1]),
            "storage",
        ),
        (tensor(text("0"), [1], [1]), "damaged"),
        (storage(), "it holds a"),
        (b"N", "it holds a NoneType"),
        (b"}(" + text("a") + b"K\x01u", "'a' is a int"),
        (b"}(K\x01K\x01u", "a key that is a int"),
        # One list for many dictionaries would be gone through again for each.
        (b"ccollections\nOrderedDict\n(]tR", "damaged"),
        (b"}()K\x01u", "a dictionary has a key that is a tuple"),
        (b"}(]K\x01u", "a dictionary has a key that is a list"),
        (b"}(K\x01u", "damaged"),
        (b"ctorch._utils\n_rebuild_tensor_v2\nK\x01R", "damaged"),
        (b"ctorch._utils\n_rebuild_parameter\n)R", "damaged"),
        (b"ctorch\nFloatStorage\n)R", "damaged"),
        (b"K\x01}b", "damaged"),
        (b"0", "uses the instruction POP"),
        (b"h\x05", "damaged"),
        (b"t", "damaged"),
        (b"(R", "damaged"),
        (b"", "damaged"),
        (b"Zvielleicht", "damaged"),
        (b"\x8d" + struct.pack("<Q", 1 << 60) + b"x", "damaged"),
    ],
)
def test_bad_pickles(code: bytes, says: str, tmp_path: Path) -> None:
    path = archive(tmp_path / "x.pt", b"\x80\x02" + code + b".", {"0": SIX})
    with pytest.raises(FormatError) as caught:
        read_torch(path)
    assert says in str(caught.value) and str(path) in str(caught.value)


def test_a_pickle_without_an_end(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="damaged"):
        read_torch(archive(tmp_path / "x.pt", b"\x80\x02N"))


def test_deep_nesting(tmp_path: Path) -> None:
    """Following it, or hashing it, would overflow the C stack."""
    for code in (b")" + b"\x85" * 200_000, b"}(" + b")" + b"\x85" * 200_000 + b"K\x01u"):
        with pytest.raises(FormatError):
            read_torch(archive(tmp_path / "x.pt", b"\x80\x02" + code + b"."))


# ---- files that want to run code


class Runs:
    """Pickles as a call."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", [0, 1, 2, 4, 5])
@pytest.mark.parametrize("shape", ["alone", "entry", "key"])
def test_code_is_not_run(protocol: int, shape: str, tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    calls = (
        Runs(os.system, f"touch {proof}"),
        Runs(eval, f"open({str(proof)!r}, 'w')"),
        Runs(exec, f"open({str(proof)!r}, 'w')"),
        Runs(getattr, OrderedDict, "__subclasses__"),
        Runs(open, str(proof), "w"),
        Runs(__import__, "os"),
        np.arange(3),
        OrderedDict,
    )
    for call in calls:
        value = {"alone": call, "entry": {"a": call}, "key": [call]}[shape]
        path = archive(tmp_path / "x.pt", pickle.dumps(value, protocol))
        with pytest.raises(FormatError) as caught:
            read_torch(path)
        if protocol >= 2 and call is not OrderedDict:
            assert "not allowed" in str(caught.value)
        assert not proof.exists()


@pytest.mark.parametrize(
    "name", ["os system", "builtins eval", "torch load", "torch._utils _rebuild_tensor_v2.x"]
)
def test_functions_are_named(name: str, tmp_path: Path) -> None:
    module, function = name.split()
    for code in (f"c{module}\n{function}\n".encode(), text(module) + text(function) + b"\x93"):
        with pytest.raises(FormatError, match=f"{module}.{function}, which is not allowed"):
            read_torch(archive(tmp_path / "x.pt", b"\x80\x04" + code + b")R."))


def test_attributes_are_not_set(tmp_path: Path) -> None:
    """BUILD on a name would change an attribute of what it stands for."""
    for target in (b"ccollections\nOrderedDict\n", b"ctorch._utils\n_rebuild_tensor_v2\n"):
        code = b"\x80\x02" + target + b"}(" + text("mark") + b"K\x01ub."
        with pytest.raises(FormatError, match="damaged"):
            read_torch(archive(tmp_path / "x.pt", code))
    assert not hasattr(OrderedDict, "mark")


# ---- other files


def test_old_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "old.pt"
    path.write_bytes(pickle.dumps(0x1950A86A20F9469CFC6C, 2) + b"more")
    with pytest.raises(UnsupportedError, match=r"before version 1\.6"):
        read_torch(path)


def test_files_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    with pytest.raises(FileError):
        read_torch(path)
    for data in (b"", b"hello", b"PK\x03\x04", b"PK\x03\x04" + bytes(100)):
        path.write_bytes(data)
        with pytest.raises(FormatError):
            read_torch(path)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("x/readme", "no pickle")
    with pytest.raises(FormatError, match="0 entries"):
        read_torch(path)
    with pytest.raises(UnsupportedError, match="big-endian"):
        read_torch(archive(path, b"\x80\x02N.", byteorder=b"big"))


def test_compressed_entries_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("x/data.pkl", b"\x80\x02N." * 100)
    with pytest.raises(FormatError, match="compressed"):
        read_torch(path)


def test_archives_that_lie(tmp_path: Path) -> None:
    """Entries that are encrypted, of another size than they are, or there twice."""
    path = archive(tmp_path / "x.pt", b"\x80\x02" + tensor(storage(), [6], [1]) + b".", {"0": SIX})
    good = path.read_bytes()
    entry = good.rindex(b"PK\x01\x02")  # the directory's, of the storage
    for offset, value, says in ((8, 1, "encrypted"), (20, 8, "beyond the end"), (24, 200, "beyond the end")):
        path.write_bytes(good[: entry + offset] + bytes([value]) + good[entry + offset + 1 :])
        with pytest.raises(FormatError, match=says):
            read_torch(path)
    path.write_bytes(good)
    with zipfile.ZipFile(path, "a") as file, pytest.warns(UserWarning, match="Duplicate"):
        file.writestr("x/data/0", SIX)
    with pytest.raises(FormatError, match="two entries 'data/0'"):
        read_torch(path)


def test_every_cut_and_many_flips(tmp_path: Path) -> None:
    """A damaged file gives an error or numbers, never anything else."""
    path = tmp_path / "x.pt"
    write_torch(path, {"a": np.arange(6, dtype=np.float32), "b": np.ones((2, 2), np.float16)})
    data = path.read_bytes()
    rng = np.random.default_rng(1)
    damaged = [data[:n] for n in range(0, len(data), 7)]
    for _ in range(400):
        copy = bytearray(data)
        copy[rng.integers(len(copy))] = rng.integers(256)
        damaged.append(bytes(copy))
    n_errors = 0
    for copy in damaged:
        path.write_bytes(copy)
        try:
            read_torch(path)
        except PowerInferError:
            n_errors += 1
    assert n_errors > len(damaged) // 2


# ---- writing


TYPES = ("f4", "f2", "f8", "i8", "i4", "i2", "i1", "u1", "?")


@settings(max_examples=40)
@given(
    shape=st.lists(st.integers(0, 4), max_size=4),
    kind=st.sampled_from(TYPES),
    turned=st.booleans(),
    big=st.booleans(),
)
def test_what_is_written_is_read(
    shape: list[int], kind: str, turned: bool, big: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    array = (np.arange(np.prod(shape, dtype=int)) % 100).reshape(shape).astype((">" if big else "<") + kind)
    array = array.T if turned else array
    path = tmp_path_factory.getbasetemp() / "written.pt"
    write_torch(path, array)
    alone = read_torch(path)
    assert isinstance(alone, np.ndarray)
    write_torch(path, {"a.weight": array, "b": array[..., :1] if array.ndim else array})
    both = read_torch(path)
    assert list(both) == ["a.weight", "b"]
    for back in (alone, both["a.weight"]):
        assert back.shape == array.shape and back.dtype == np.dtype(kind)
        np.testing.assert_array_equal(back, array)
    write_torch(path, {})
    assert read_torch(path) == {}


def test_types_that_pytorch_has_not(tmp_path: Path) -> None:
    for array in (np.array(["a"]), np.zeros(2, np.complex64), np.zeros(2, np.uint16)):
        with pytest.raises(ArgumentError, match="PyTorch has no tensor"):
            write_torch(tmp_path / "x.pt", {"a": array})
    assert list(tmp_path.iterdir()) == []


def test_pytorch_reads_what_is_written(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    path = tmp_path / "x.pt"
    arrays = {kind: (np.arange(12) % 2).reshape(3, 4).astype(kind) for kind in TYPES}
    arrays |= {"turned": np.arange(6.0).reshape(2, 3).T, "scalar": np.array(2.5), "empty": np.zeros((0, 2))}
    write_torch(path, arrays)
    for options in ({}, {"mmap": True}):
        loaded = torch.load(path, weights_only=True, **options)
        assert list(loaded) == list(arrays)
        for name, array in arrays.items():
            np.testing.assert_array_equal(loaded[name].numpy(), array)
            assert loaded[name].numpy().dtype == array.dtype
    write_torch(path, np.arange(5))
    np.testing.assert_array_equal(torch.load(path, weights_only=True).numpy(), np.arange(5))


@pytest.mark.parametrize("protocol", [2, 4])
def test_what_pytorch_writes_is_read(protocol: int, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    path = tmp_path / "x.pt"
    base = torch.arange(24.0).reshape(4, 6)
    values = {
        "plain": base,
        "turned": base.t(),
        "part": base[1:, 2:5],
        "steps": base.t()[::2, ::3],
        "bf16": (base / 3).bfloat16(),
        "turned_bf16": base.bfloat16().t(),
        "parameter": torch.nn.Parameter(base.half()),
        "long": base.long(),
        "bool": base > 3,
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 4),
    }
    torch.save(values, path, pickle_protocol=protocol)
    content = read_torch(path)
    assert list(content) == list(values)
    for name, value in values.items():
        value = value.detach()
        expected = (value.float() if value.dtype == torch.bfloat16 else value).numpy()
        assert content[name].dtype == expected.dtype and content[name].shape == expected.shape
        np.testing.assert_array_equal(content[name], expected)
    layers = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    torch.save(layers.state_dict(), path, pickle_protocol=protocol)
    content = read_torch(path)
    for name, value in layers.state_dict().items():
        np.testing.assert_array_equal(content[name], value.numpy())
    torch.save(base.t(), path, pickle_protocol=protocol)
    np.testing.assert_array_equal(read_torch(path), base.t().numpy())


def test_pytorchs_old_format(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    torch.save({"a": torch.ones(2)}, tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(UnsupportedError, match=r"before version 1\.6"):
        read_torch(tmp_path / "x.pt")
