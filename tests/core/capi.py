"""Calls the C core directly: the te_* functions of the test library, through cffi in ABI mode.

The declarations are cut out of the headers, so a test cannot disagree with a header about a signature.

    ffi, lib = load()
    check(lib.te_gguf_open(b"model.gguf", handle))

The library is what POWERINFER_TEST_LIB names, else build/testing/libte_testing.so (`make build-testing`).
"""

from __future__ import annotations

import functools
import os
import re
import shlex
from pathlib import Path
from typing import Any

import cffi

ROOT = Path(__file__).resolve().parents[2]
HEADER_DIRS = (ROOT / "vendor" / "core", ROOT / "vendor" / "cpu")


class CoreError(Exception):
    """A call into the core failed.

    `status` is its name ("TE_FORMAT"), `message` the core's sentence.
    """

    def __init__(self, status: str, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message


def library_path() -> Path:
    """Where the test library is. Raises FileNotFoundError with the command that builds it."""
    path = Path(os.environ.get("POWERINFER_TEST_LIB") or ROOT / "build" / "testing" / "libte_testing.so")
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing: `make build-testing` makes it, POWERINFER_TEST_LIB names another"
        )
    return path


def program(name: str) -> list[str]:
    """The command that runs a C test program of the build.

    POWERINFER_TEST_RUN is put before it: the emulator of a build for another processor, with its options.
    """
    return [*shlex.split(os.environ.get("POWERINFER_TEST_RUN", "")), str(library_path().parent / name)]


def _drop_braced(text: str, start: str) -> str:
    """Removes every piece that matches `start` and ends with the brace block that follows it."""
    while (found := re.search(start, text, re.MULTILINE)) is not None:
        at = text.index("{", found.end() - 1)
        depth = 1
        while depth:
            at += 1
            depth += {"{": 1, "}": -1}.get(text[at], 0)
        text = text[: found.start()] + text[at + 1 :]
    return text


def _declarations(text: str) -> str:
    """What is left of a header when all that a cdef cannot hold is taken out."""
    text = re.sub(r"/\*.*?\*/", " ", text, flags=re.DOTALL)
    text = re.sub(r"//[^\n]*", "", text)
    text = text.replace("\\\n", " ")
    types = re.search(r"#define TE_TYPES\(X\)(.*)", text)

    # Of conditionals only the include guard (#ifndef) is wanted: the others are for C++ and for attributes.
    kept: list[str] = []
    dropping: list[bool] = []
    for line in text.splitlines():
        word = re.match(r"\s*#\s*(\w+)", line)
        if word is None:
            if not any(dropping):
                kept.append(line)
        elif word[1] in ("if", "ifdef", "ifndef"):
            dropping.append(word[1] != "ifndef")
        elif word[1] in ("else", "elif"):
            dropping[-1] = True
        elif word[1] == "endif":
            dropping.pop()
    text = "\n".join(kept)

    text = re.sub(r"^\s*TE_STATIC_ASSERT\b.*$", "", text, flags=re.MULTILINE)
    text = _drop_braced(text, r"^static inline\b[^;{]*\{")
    text = re.sub(r"^static const\b[^;]*;", "", text, flags=re.MULTILINE)
    if types is not None:
        entries = re.findall(r"X\((\w+), (\d+),", types[1])
        text = text.replace("TE_TYPES(X)", " ".join(f"TE_{tag} = {number}," for tag, number in entries))
    return text


def declarations() -> str:
    """The declarations of all te_*.h headers, each after those that it includes."""
    headers = {path.name: path for directory in HEADER_DIRS for path in sorted(directory.glob("te_*.h"))}
    seen: set[str] = set()
    pieces: list[str] = []

    def add(name: str) -> None:
        if name in seen or name not in headers:
            return
        seen.add(name)
        text = headers[name].read_text(encoding="utf-8")
        for included in re.findall(r'#include "(?:[^"]*/)?(te_\w+\.h)"', text):
            add(included)
        pieces.append(_declarations(text))

    for name in headers:
        add(name)
    return "\n".join(pieces)


@functools.cache
def load() -> tuple[cffi.FFI, Any]:
    """The cffi object and the opened test library; the same pair every time."""
    ffi = cffi.FFI()
    ffi.cdef(declarations())
    return ffi, ffi.dlopen(str(library_path()))


def last_error() -> str:
    """The core's sentence about this thread's last failure."""
    ffi, lib = load()
    text: bytes = ffi.string(lib.te_last_error())
    return text.decode("utf-8", "replace")


def check(status: int) -> None:
    """Raises CoreError unless status is TE_OK."""
    ffi, _ = load()
    if status != 0:
        name = ffi.typeof("te_status").elements.get(status, str(status))
        raise CoreError(name, last_error())
