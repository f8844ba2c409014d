"""Files that are whole or not there, and GGUF files against gguf's own writer and reader."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from powerinfer import ArgumentError, FileError, ModelFile
from powerinfer.models import writer
from powerinfer.models.writer import GGUFWriter, PartialFile, PartialFolder, check_new_dir, check_new_file

# Key: how gguf's writer adds it, its value, and our type (None: an array or a string).
KEYS: dict[str, tuple[str, Any, str | None]] = {
    "t.u8": ("uint8", 200, "u8"),
    "t.i8": ("int8", -100, "i8"),
    "t.u16": ("uint16", 60000, "u16"),
    "t.i16": ("int16", -30000, "i16"),
    "t.u32": ("uint32", 4_000_000_000, ""),
    "t.i32": ("int32", -2_000_000_000, "i32"),
    "t.u64": ("uint64", 2**63 + 5, "u64"),
    "t.i64": ("int64", -(2**62), "i64"),
    "t.f32": ("float32", 0.1, ""),
    "t.f64": ("float64", 1e300, "f64"),
    "t.bool": ("bool", True, ""),
    "t.text": ("string", "naïve 🙂 text", None),
    "a.words": ("array", ["", "a", "Größe"], None),
    "a.floats": ("array", [0.25, -1.5], None),
    "a.ints": ("array", [1, -2, 3], None),
    "a.bools": ("array", [True, False, True], None),
}
ARRAYS = {
    "a.floats": np.array([0.25, -1.5], np.float32),
    "a.ints": np.array([1, -2, 3], np.int32),
    "a.bools": np.array([True, False, True]),
}


def tensors() -> dict[str, tuple[str, np.ndarray]]:
    """Type and contents; their sizes leave paddings of several lengths."""
    numbers = np.random.default_rng(0)
    return {
        "cube": ("F32", numbers.normal(size=(3, 5, 7)).astype(np.float32)),
        "half": ("F16", numbers.normal(size=(7, 3)).astype(np.float16)),
        "packed": ("Q4_0", numbers.normal(size=(6, 64)).astype(np.float32)),
        "one": ("F32", np.ones(1, np.float32)),
    }


def data_of(type: str, array: np.ndarray) -> np.ndarray:
    """The bytes of a tensor by gguf."""
    return array if type != "Q4_0" else gguf.quants.quantize(array, gguf.GGMLQuantizationType.Q4_0)


def write_ours(path: Path, *, powerinfer: bool = False, piece: int = 1 << 20) -> None:
    with GGUFWriter(path, powerinfer=powerinfer) as out:
        out.add("general.architecture", "llama")
        for key, (_, value, type) in KEYS.items():
            out.add(key, ARRAYS.get(key, value), type or "")
        for name, (type, array) in tensors().items():
            out.add_tensor(name, type, array.shape)
        for type, array in tensors().values():
            data = data_of(type, array).tobytes()
            for at in range(0, len(data), piece):
                out.write(data[at : at + piece])


def write_theirs(path: Path) -> None:
    out = gguf.GGUFWriter(path, "llama")
    for key, (kind, value, _) in KEYS.items():
        getattr(out, f"add_{kind}")(key, value)
    for name, (type, array) in tensors().items():
        raw = gguf.GGMLQuantizationType.Q4_0 if type == "Q4_0" else None
        out.add_tensor(name, data_of(type, array), raw_dtype=raw)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def left_in(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


# ---- GGUF files ----


@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
def test_the_bytes_are_those_of_the_package(tmp_path: Path, piece: int) -> None:
    write_ours(tmp_path / "ours.gguf", piece=piece)
    write_theirs(tmp_path / "theirs.gguf")
    assert (tmp_path / "ours.gguf").read_bytes() == (tmp_path / "theirs.gguf").read_bytes()
    assert left_in(tmp_path) == ["ours.gguf", "theirs.gguf"]


def test_a_powerinfer_file_differs_in_its_magic(tmp_path: Path) -> None:
    write_ours(tmp_path / "a.gguf")
    write_ours(tmp_path / "b.gguf", powerinfer=True)
    a, b = (tmp_path / "a.gguf").read_bytes(), (tmp_path / "b.gguf").read_bytes()
    assert (a[:4], b[:4]) == (b"GGUF", b"PWRI") and a[4:] == b[4:]


def test_read_back(tmp_path: Path) -> None:
    path = tmp_path / "file.gguf"
    write_ours(path, powerinfer=True)
    with ModelFile(path) as file:
        assert file.info.is_powerinfer
        for key, (_, value, type) in KEYS.items():
            found = file.metadata[key]
            if key == "a.words":
                assert found == [word.encode() for word in value]
            elif key in ARRAYS:
                assert found.dtype == ARRAYS[key].dtype and found.tolist() == value
            else:
                assert found == (np.float32(value) if key == "t.f32" else value)
                assert file.metadata.type_name(key) == (type or {"t.text": "string"}.get(key, key[2:]))
        for tensor, (name, (type, array)) in zip(file.tensors, tensors().items(), strict=True):
            assert (tensor.name, tensor.type, tensor.shape) == (name, type, array.shape)
            assert file.raw(name).tobytes() == data_of(type, array).tobytes()


def test_a_file_without_tensors(tmp_path: Path) -> None:
    path = tmp_path / "vocabulary.gguf"
    with GGUFWriter(path, powerinfer=False) as out:
        out.add("general.architecture", "llama")
    assert path.stat().st_size % 32 == 0
    assert [f.name for f in gguf.GGUFReader(path).fields.values()][-1] == "general.architecture"
    with ModelFile(path) as file:
        assert dict(file.metadata) == {"general.architecture": "llama"} and file.tensors == ()


def test_copied_metadata_is_the_same_byte_for_byte(tmp_path: Path) -> None:
    out = gguf.GGUFWriter(tmp_path / "in.gguf", "llama")
    out.add_key_value("t.text", b"\xff not utf-8", gguf.GGUFValueType.STRING)
    out.add_array("t.words", [b"\xff", b"", b"a\0b"])
    out.add_uint16("split.no", 0)
    out.add_custom_alignment(64)
    out.add_uint32("general.file_type", 1)
    out.add_uint32("t.last", 5)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    with (
        ModelFile(tmp_path / "in.gguf") as source,
        GGUFWriter(tmp_path / "out.gguf", powerinfer=False) as copy,
    ):
        copy.copy_metadata(source, without={"general.file_type"})
        copy.add("t.words", "replaced in its place")
        expected = dict(source.raw_metadata())
    with ModelFile(tmp_path / "out.gguf") as file:
        found = dict(file.raw_metadata())
        assert list(found) == ["general.architecture", "t.text", "t.words", "t.last"]
        assert all(found[key] == expected[key] for key in found if key != "t.words")
        assert file.metadata["t.words"] == "replaced in its place"


@pytest.mark.parametrize(
    "value",
    [2**32, -1, None, [1, 2], np.zeros((2, 2)), np.zeros(2, np.complex64), np.zeros(2, np.float16), {}],
)
def test_values_that_no_key_holds(tmp_path: Path, value: object) -> None:
    with (
        pytest.raises(ArgumentError, match=r"the key t\.x cannot hold"),
        GGUFWriter(tmp_path / "x.gguf", powerinfer=False) as out,
    ):
        out.add("t.x", value)
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("value, type", [(300, "u8"), (1.5, "u32"), (1e300, "f32"), (1, "u128"), ("x", "")])
def test_numbers_that_do_not_fit(tmp_path: Path, value: object, type: str) -> None:
    with GGUFWriter(tmp_path / "x.gguf", powerinfer=False) as out:
        if isinstance(value, str):
            out.add("t.x", "half of a pair: \ud800")
        else:
            with pytest.raises(ArgumentError, match=rf"cannot hold .* as {type}"):
                out.add("t.x", value, type)
    with ModelFile(tmp_path / "x.gguf") as file:
        assert dict(file.metadata) == ({"t.x": "half of a pair: ?"} if isinstance(value, str) else {})


Mistake = Callable[[GGUFWriter], object]
MISTAKES: dict[str, tuple[str, Mistake]] = {
    "unknown type": ("not a weight format", lambda out: out.add_tensor("b", "Q9", (2,))),
    "no blocks": ("do not divide", lambda out: out.add_tensor("b", "Q4_0", (2, 40))),
    "twice": ("added before", lambda out: out.add_tensor("a", "F32", (2,))),
    "long name": ("1 to 63 bytes", lambda out: out.add_tensor("ü" * 32, "F32", (2,))),
    "no name": ("1 to 63 bytes", lambda out: out.add_tensor("", "F32", (2,))),
    "no dimensions": ("the shape", lambda out: out.add_tensor("b", "F32", ())),
    "five dimensions": ("the shape", lambda out: out.add_tensor("b", "F32", (1, 1, 1, 1, 1))),
    "zero": ("the shape", lambda out: out.add_tensor("b", "F32", (2, 0))),
    "too many bytes": ("room for 8", lambda out: out.write(bytes(9))),
    "after the end": ("room for 0", lambda out: (out.write(bytes(8)), out.write(b"x"))),
    "too late": ("too late", lambda out: (out.write(bytes(1)), out.add_tensor("b", "F32", (2,)))),
    "too few bytes": ("the tensor a is not complete", lambda out: out.write(bytes(7))),
    "no bytes": ("the tensor a is not complete", lambda out: None),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_leaves_no_file(tmp_path: Path, name: str) -> None:
    text, mistake = MISTAKES[name]
    with pytest.raises(ArgumentError, match=text), GGUFWriter(tmp_path / "x.gguf", powerinfer=False) as out:
        out.add_tensor("a", "F32", (2,))
        mistake(out)
    assert left_in(tmp_path) == []


# ---- disks ----


def test_a_full_disk_while_writing(tmp_path: Path) -> None:
    for n_bytes in (10, 100_000):  # found when the buffer is emptied at the end, and at once
        with (
            pytest.raises(FileError, match=r"x\.gguf cannot be written: the disk is full"),
            GGUFWriter(tmp_path / "x.gguf", powerinfer=False) as out,
        ):
            out._file.stream.close()
            out._file.stream = open("/dev/full", "wb")  # noqa: SIM115
            out.add_tensor("a", "Q8_0", (n_bytes, 32))
            out.write(bytes(34 * n_bytes))
        assert left_in(tmp_path) == []


def test_a_disk_that_is_too_small_is_seen_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer.shutil, "disk_usage", lambda path: writer.shutil._ntuple_diskusage(9, 9, 1000))
    with (
        pytest.raises(FileError, match=r"will have 2,000\.0 MB, but the disk has only 0\.0 MB"),
        GGUFWriter(tmp_path / "x.gguf", powerinfer=False) as out,
    ):
        out.add_tensor("a", "F32", (500_000_000,))
        out.write(bytes(4))
    assert left_in(tmp_path) == []


def test_an_error_when_the_name_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    (tmp_path / "x").write_text("old")
    monkeypatch.setattr(os, "fsync", refuse)
    with (
        pytest.raises(FileError, match="x cannot be written: Input/output error"),
        PartialFile(tmp_path / "x") as file,
    ):
        file.write(b"new")
    assert left_in(tmp_path) == ["x"] and (tmp_path / "x").read_text() == "old"


@pytest.mark.parametrize("name", ["nowhere/x", "folder", "a\0b", "x" * 300, "pipe"])
def test_names_that_no_file_can_have(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileError):
        PartialFile(tmp_path / name)
    assert left_in(tmp_path) == ["folder", "pipe"]


@pytest.mark.parametrize("name", ["new/", "folder/", "old/"])
def test_a_name_that_says_folder(tmp_path: Path, name: str) -> None:
    """A file called "new" is not what `-o new/` asks for."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "old").touch()
    with pytest.raises(FileError):
        PartialFile(f"{tmp_path}/{name}")
    assert left_in(tmp_path) == ["folder", "old"]


def test_looking_whether_a_file_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "old").write_text("old")
    for name in ("old", "new"):
        check_new_file(tmp_path / name, n_bytes=5)
    for name in ("nowhere/x", "."):
        with pytest.raises(FileError):
            check_new_file(tmp_path / name)
    monkeypatch.setattr(writer.shutil, "disk_usage", lambda path: writer.shutil._ntuple_diskusage(9, 9, 1000))
    with pytest.raises(FileError, match="MB free"):
        check_new_file(tmp_path / "new", n_bytes=1001)
    assert left_in(tmp_path) == ["old"] and (tmp_path / "old").read_text() == "old"


def test_a_protected_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").write_text("old")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write to anything
    with pytest.raises(FileError, match="x is protected against writing"):
        PartialFile(tmp_path / "x")
    assert (tmp_path / "x").read_text() == "old"


# ---- whole or not there ----


def test_the_file_appears_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("old")
    with PartialFile(path) as file:
        file.write(b"new")
        assert path.read_text() == "old"
    assert path.read_text() == "new" and left_in(tmp_path) == ["x"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_exception_leaves_what_was_there(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "x"
    path.write_text("old")
    with pytest.raises(error), PartialFile(path) as file:
        file.write(b"new")
        raise error
    assert path.read_text() == "old" and left_in(tmp_path) == ["x"]


def test_links_and_permissions_stay(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    real, link = tmp_path / "folder" / "real", tmp_path / "link"
    real.write_text("old")
    real.chmod(0o640)
    link.symlink_to(real)
    with PartialFile(link) as file:
        file.write(b"new")
    assert link.is_symlink() and real.read_text() == "new"
    assert stat.S_IMODE(real.stat().st_mode) == 0o640
    with PartialFile(tmp_path / "fresh") as file:
        file.write(b"new")
    (tmp_path / "plain").touch()
    assert (tmp_path / "fresh").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_killed_while_writing(tmp_path: Path) -> None:
    """kill -9 leaves no file of that name, only a hidden one, which the next writer of the name removes."""
    path = tmp_path / "model.gguf"
    script = (
        "import sys, time\n"
        "from powerinfer.models.writer import GGUFWriter\n"
        "with GGUFWriter(sys.argv[1], powerinfer=False) as out:\n"
        "    out.add_tensor('a', 'F32', (1 << 20,))\n"
        "    out.write(bytes(1 << 20))\n"
        "    print('half', flush=True)\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, path], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"half\n"
        while_alive = left_in(tmp_path)
        write_ours(path)  # another writer leaves the partial of a living process alone
        assert left_in(tmp_path) == sorted([*while_alive, "model.gguf"])
        path.unlink()
        process.send_signal(signal.SIGKILL)
        process.wait()
    left = left_in(tmp_path)
    assert left == while_alive and len(left) == 1
    assert left[0].startswith(".model.gguf.") and left[0].endswith(".partial")
    other = tmp_path / ".model.gguf2.1234.partial"
    other.touch()
    write_ours(path)
    assert left_in(tmp_path) == [other.name, "model.gguf"]


def test_many_writers_of_one_file(tmp_path: Path) -> None:
    """The file is always one of theirs as a whole, and nothing is left over."""
    path = tmp_path / "x"
    problems: list[object] = []

    def write(mark: int) -> None:
        try:
            for _ in range(10):
                with PartialFile(path) as file:
                    for _ in range(20):
                        file.write(bytes([mark]) * 5000)
                found = path.read_bytes()
                if len(found) != 100_000 or len(set(found)) != 1:
                    problems.append((len(found), set(found)))
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=write, args=(mark,)) for mark in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems and left_in(tmp_path) == ["x"]


def test_a_partial_that_is_swept_before_it_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, swept = writer.fcntl.flock, []

    def sweep_first(stream: Any, flags: int) -> None:
        if not swept and flags == writer.fcntl.LOCK_EX:
            swept.extend(tmp_path.iterdir())
            swept[0].unlink()
        lock(stream, flags)

    monkeypatch.setattr(writer.fcntl, "flock", sweep_first)
    with PartialFile(tmp_path / "x") as file:
        file.write(b"new")
    assert swept and (tmp_path / "x").read_bytes() == b"new" and left_in(tmp_path) == ["x"]


# ---- folders ----


def test_a_folder_appears_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "out"
    for _ in range(2):
        with PartialFolder(path) as folder:
            (folder / "a").write_text("a")
            assert not path.exists() or not any(path.iterdir())
        assert [p.name for p in path.iterdir()] == ["a"] and left_in(tmp_path) == ["out"]
        (path / "a").unlink()  # an empty one may be there
    (tmp_path / "plain").mkdir()
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_folder_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with PartialFolder(tmp_path / "link") as folder:
        (folder / "a").touch()
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / "a").exists()


def test_folders_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("full", "empty", "mounted"):
        (tmp_path / name).mkdir()
    (tmp_path / "full" / "file").touch()
    monkeypatch.chdir(tmp_path / "empty")
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path).name == "mounted")
    for name, says in (
        (tmp_path / "full", "exists already"),
        (tmp_path / "full" / "file", "exists already"),
        (tmp_path / "nowhere" / "x", "cannot be written to"),
        (".", "in use"),
        ("", "in use"),
        (tmp_path / "mounted", "in use"),
        ("a\0b", "not the name of a folder"),
    ):
        for make in (check_new_dir, PartialFolder):
            with pytest.raises(FileError, match=says):
                make(name)
    assert left_in(tmp_path) == ["empty", "full", "mounted"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, OSError(errno.ENOSPC, "No space left")])
def test_an_exception_leaves_no_folder(tmp_path: Path, error: Any) -> None:
    expected = FileError if isinstance(error, OSError) else error
    with pytest.raises(expected) as caught, PartialFolder(tmp_path / "out") as folder:
        (folder / "a").touch()
        raise error
    assert left_in(tmp_path) == []
    assert (
        expected is not FileError
        or str(caught.value) == f"{tmp_path / 'out'} cannot be written: the disk is full"
    )


def test_two_writers_of_one_folder(tmp_path: Path) -> None:
    """Neither touches the other's files: the first to finish has the name, the other says so."""
    path = tmp_path / "out"
    dead = tmp_path / ".out.0123abcd.partial"
    dead.mkdir()
    (dead / "a").touch()
    (tmp_path / ".out.mine.partial").mkdir()
    with pytest.raises(FileError, match="cannot be written"), PartialFolder(path) as one:
        assert not dead.exists()
        (one / "a").write_text("one")
        with PartialFolder(path) as other:
            (other / "a").write_text("other")
            (one / "b").write_text("one")
    assert [(p.name, p.read_text()) for p in path.iterdir()] == [("a", "other")]
    assert left_in(tmp_path) == [".out.mine.partial", "out"]


def test_sweeping_stops_at_nothing(tmp_path: Path) -> None:
    """Whatever has the name of a partial: a pipe would have kept its opener waiting for ever."""
    os.mkfifo(tmp_path / ".x.0123abcd.partial")
    (tmp_path / ".x.0123abce.partial").symlink_to("nowhere")
    with PartialFile(tmp_path / "x") as file:
        file.write(b"new")
    assert (tmp_path / "x").read_bytes() == b"new"
