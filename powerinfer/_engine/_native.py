"""The engine's shared library through cffi; the only module that knows about it.

The declarations are cut out of the library's own header, so Python and C cannot disagree. The library
and its header lie in `powerinfer/lib/`; in a source checkout the header may also be
`native/powerinfer.h`. The environment variable `POWERINFER_LIBRARY` names another library file (a build
with sanitizers, say).

Calls release the GIL, but those of `quick`.
"""

from __future__ import annotations

import ctypes
import operator
import os
import re
from functools import cache
from pathlib import Path
from typing import Any

import cffi

from ..errors import (
    ArgumentError,
    ArgumentTypeError,
    ContextError,
    DeviceError,
    FileError,
    FormatError,
    LibraryError,
    OutOfMemoryError,
    PowerInferError,
    UnsupportedError,
)

_PACKAGE = Path(__file__).resolve().parents[1]

# Statuses of the C interface (enum pi_status).
_ERRORS: dict[int, type[BaseException]] = {
    1: FileError,
    2: FormatError,
    3: ArgumentError,
    4: OutOfMemoryError,
    5: UnsupportedError,
    6: ContextError,
    7: DeviceError,
    8: DeviceError,
    9: KeyboardInterrupt,  # where interrupt.py could not note what a handler raised
}


def _library_path() -> Path:
    named = os.environ.get("POWERINFER_LIBRARY")
    path = Path(named) if named else _PACKAGE / "lib" / "libpowerinfer.so"
    if not path.is_file():
        source = "named by POWERINFER_LIBRARY " if named else ""
        raise LibraryError(
            f"the engine's library {path} {source}does not exist: install the package, or build it first"
        )
    return path


def _header_text() -> str:
    beside = _PACKAGE / "lib" / "powerinfer.h"
    source = _PACKAGE.parent / "native" / "powerinfer.h"
    # The header that was installed with a library describes it. A library named by the environment comes
    # from a checkout.
    order = (source, beside) if os.environ.get("POWERINFER_LIBRARY") else (beside, source)
    for path in order:
        if path.is_file():
            return path.read_text(encoding="utf-8")
    raise LibraryError(f"the engine's header {beside} does not exist: the installation is incomplete")


def _load() -> tuple[Any, Any, str]:
    text = _header_text()
    version = re.search(r'^#define PI_VERSION "([^"]+)"', text, re.MULTILINE)
    begin, end = text.find("/* cdef begin"), text.find("/* cdef end */")
    if version is None or not 0 <= begin < end:
        raise LibraryError(
            "the engine's header powerinfer.h lacks its version or the marks around its declarations"
        )
    handle = cffi.FFI()
    handle.cdef(text[begin:end])
    path = _library_path()
    try:
        library = handle.dlopen(str(path))
        found = handle.string(library.pi_version()).decode()
    except (OSError, AttributeError) as error:
        raise LibraryError(f"the engine's library {path} cannot be loaded: {error}") from error
    if found != version[1]:
        raise LibraryError(
            f"the engine's library {path} is version {found}, but this package is version {version[1]}"
        )
    return handle, library, found


ffi, lib, version = _load()


_held = ctypes.PyDLL(str(_library_path()))
U64 = ctypes.c_uint64


def quick(name: str, *arguments: Any) -> int:
    """Calls a function of the library with the GIL held, and returns its int32_t. For what takes a few
    microseconds: a thread that gives the GIL away for that may have to wait for it a thousand times as long.

    Nothing that may wait, or call Python: a session's lock is free for whoever has that of its Session, which
    all calls of it have. arguments: ints that fit int32_t, U64s, and pointers of cffi.
    """
    return int(getattr(_held, name)(*map(_argument, arguments)))


def quick_void(name: str, *arguments: Any) -> None:
    """The same of a function that returns nothing."""
    quick(name, *arguments)  # what is in the register


def _argument(value: Any) -> Any:
    if isinstance(value, U64):
        return value
    if isinstance(value, int):
        return ctypes.c_int32(fit("an argument", value))
    return ctypes.c_void_p(int(ffi.cast("uintptr_t", value)))


def message() -> str:
    """The engine's sentence about this thread's last error."""
    text: bytes = ffi.string(lib.pi_error_message())
    return text.decode("utf-8", "replace")


def check(status: int) -> None:
    """Raises the exception of a status; returns for 0."""
    if status != 0:
        raise _ERRORS.get(status, PowerInferError)(message())


def fit(name: str, value: int, bits: int = 32, signed: bool = True) -> int:
    """The value as an int that fits a C integer of that width. Raises ArgumentError."""
    try:
        number = operator.index(value)
    except TypeError:
        raise ArgumentTypeError(f"{name} is {value!r}, it must be a whole number") from None
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
    if not low <= number <= high:
        raise ArgumentError(f"{name} is {number}, it must lie between {low} and {high}")
    return number


def load_library(name: str) -> bool:
    """Loads another shared library for as long as the process lives, where the engine finds it by its name;
    False if there is none that can be loaded."""
    # Not by cffi, which unloads it with the module: while Python ends, other libraries may still call it.
    try:
        ctypes.CDLL(name, os.RTLD_NOW | os.RTLD_GLOBAL)
    except OSError:
        return False
    return True


@cache
def _trim() -> Any:
    system = cffi.FFI()
    system.cdef("int malloc_trim(size_t);")
    library = system.dlopen(None)
    return getattr(library, "malloc_trim", None)  # None: another C library


def give_back_memory() -> None:
    """Gives the system what C's heap has free between what is used; takes about a millisecond."""
    if (trim := _trim()) is not None:
        trim(0)


def isa() -> str:
    """The set in use: "scalar", "avx2", "avx2_vnni", "avx512", "avx512_bf16", "amx", "neon", "neon_dot".

    Raises ArgumentError if POWERINFER_ISA names one that cannot run here.
    """
    name = lib.pi_cpu_isa()
    if name == ffi.NULL:
        raise ArgumentError(message())
    text: bytes = ffi.string(name)
    return text.decode()


def has_isa(name: str) -> bool:
    """Whether the named instruction set can run here."""
    return bool(lib.pi_cpu_has_isa(name.encode()))


def cores() -> int:
    """Physical cores that this process may use."""
    return int(lib.pi_cpu_cores())


def build_info() -> str:
    """What the library was built with, one line."""
    text: bytes = ffi.string(lib.pi_build_info())
    return text.decode("utf-8", "replace")


def read_rate(n_threads: int, n_bytes: int, n_repeat: int) -> float:
    """Bytes per second that `n_threads` read from `n_bytes` of fresh memory, best of `n_repeat` passes."""
    rate = ffi.new("double *")
    check(lib.pi_cpu_read_rate(n_threads, n_bytes, n_repeat, rate))
    return float(rate[0])


KV_BLOCK: int = lib.PI_KV_BLOCK
"""Positions that share a block of the KV pool."""


def chunk_end(
    first: int,
    end: int,
    size: int,
    *,
    generated_from: int | None = None,
    scored: range = range(0),
    max_scored: int = 0,
    branch: int = 0,
) -> int:
    """Where the next part of tokens first..end-1 ends, which should have `size` of them.

    It may have up to 30 more, because a prompt keeps its bits only where it is cut in certain places; it is
    empty if there is no room. generated_from: from there on they are fed as generated ones (None: none is).
    scored: those with logits, of which the part should have at most max_scored. branch: where the part may
    end so that other prompts can go on from there; 0: nowhere.
    """
    begins = end if generated_from is None else generated_from
    rest = (first, end, begins, scored.start, scored.stop, size, max_scored, branch)
    return quick("pi_chunk_end", ffi.new("pi_prompt_rest *", rest))
