"""Opening files that come from anybody: ordinary ones are read, others refused at once."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from powerinfer.errors import FileError, FormatError
from powerinfer.models.convert import files

READERS = (files.read_file, files.read_text, files.map_file)


@pytest.mark.parametrize("read", READERS)
def test_what_is_no_ordinary_file(read: Callable[[Path], Any], tmp_path: Path) -> None:
    """A pipe would block for ever, a device has no end."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    for name, says in (
        ("pipe", "a device or a pipe"),
        ("device", "a device or a pipe"),
        ("nowhere", "cannot be read: No such file"),
        (".", "cannot be read: Is a directory"),
        ("a\0b", "cannot be read: embedded null"),
    ):
        with pytest.raises(FileError, match=says):
            read(tmp_path / name)


@pytest.mark.parametrize("read", READERS)
def test_a_pointer_of_git_lfs(read: Callable[[Path], Any], tmp_path: Path) -> None:
    """What a clone without LFS has in the place of weights."""
    path = tmp_path / "model.safetensors"
    path.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 9976576152\n")
    with pytest.raises(FileError, match="Git LFS's pointer"):
        read(path)


def test_ordinary_files(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes("a\r\nb\rü\n".encode())
    (tmp_path / "link").symlink_to("real")
    for name in ("real", "link"):
        assert (
            files.read_file(tmp_path / name)
            == bytes(files.map_file(tmp_path / name)[:])
            == b"a\r\nb\r\xc3\xbc\n"
        )
        assert files.read_text(tmp_path / name) == "a\nb\nü\n"
    (tmp_path / "real").write_bytes(b"")
    assert files.read_file(tmp_path / "real") == files.map_file(tmp_path / "real") == b""


def test_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"\xff" * 100)
    with pytest.raises(FormatError, match="not UTF-8"):
        files.read_text(path)
    monkeypatch.setattr(files, "_MOST_BYTES", 99)
    with pytest.raises(FormatError, match="too large"):
        files.read_file(path)
    assert len(files.map_file(path)) == 100
