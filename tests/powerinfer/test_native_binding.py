"""The binding: how the library is found, statuses and their exceptions, integers that must fit."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import powerinfer
from powerinfer import errors
from powerinfer._engine import _native

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "status, kind, builtin",
    [
        (_native.lib.PI_ERROR_IO, errors.FileError, OSError),
        (_native.lib.PI_ERROR_FORMAT, errors.FormatError, ValueError),
        (_native.lib.PI_ERROR_ARGUMENT, errors.ArgumentError, ValueError),
        (_native.lib.PI_ERROR_MEMORY, errors.OutOfMemoryError, MemoryError),
        (_native.lib.PI_ERROR_UNSUPPORTED, errors.UnsupportedError, NotImplementedError),
        (_native.lib.PI_ERROR_CONTEXT, errors.ContextError, ValueError),
    ],
)
def test_each_status_has_its_exception(status: int, kind: type[Exception], builtin: type[Exception]) -> None:
    with pytest.raises(kind) as caught:
        _native.check(status)
    assert isinstance(caught.value, builtin)
    assert isinstance(caught.value, powerinfer.PowerInferError)


def test_every_status_is_covered() -> None:
    statuses = _native.ffi.typeof("pi_status").elements
    assert len(statuses) > 6
    _native.check(_native.lib.PI_OK)
    for status in statuses:
        if status not in (_native.lib.PI_OK, _native.lib.PI_ERROR_STOPPED):
            with pytest.raises(powerinfer.PowerInferError) as caught:
                _native.check(status)
            assert type(caught.value) is not powerinfer.PowerInferError
    with pytest.raises(KeyboardInterrupt):
        _native.check(_native.lib.PI_ERROR_STOPPED)


def test_an_unknown_status_is_still_an_error() -> None:
    with pytest.raises(powerinfer.PowerInferError):
        _native.check(999)


def test_the_message_is_the_engines() -> None:
    with pytest.raises(errors.FileError, match=re.escape("/nonexistent/model.gguf")):
        powerinfer.ModelFile("/nonexistent/model.gguf")


def test_version_is_the_headers() -> None:
    header = (ROOT / "native" / "powerinfer.h").read_text(encoding="utf-8")
    assert f'#define PI_VERSION "{powerinfer.__version__}"' in header


def test_machine() -> None:
    assert _native.has_isa(_native.isa())
    assert not _native.has_isa("z80")
    assert _native.cores() >= 1
    assert _native.build_info()


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1, 2**70])
def test_fit_refuses_what_does_not_fit(value: int) -> None:
    with pytest.raises(errors.ArgumentError, match=f"^n is {value},"):
        _native.fit("n", value)


def test_fit() -> None:
    assert _native.fit("n", 2**31 - 1) == 2**31 - 1
    assert _native.fit("n", -(2**31)) == -(2**31)
    assert _native.fit("n", 2**64 - 1, 64, signed=False) == 2**64 - 1
    with pytest.raises(errors.ArgumentError):
        _native.fit("n", -1, 64, signed=False)
    with pytest.raises(TypeError):
        _native.fit("n", 1.5)  # type: ignore[arg-type]


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_missing_library_is_named() -> None:
    done = run_python("from powerinfer import Llama", POWERINFER_LIBRARY="/nonexistent/lib.so")
    assert done.returncode == 1
    assert "LibraryError" in done.stderr and "/nonexistent/lib.so" in done.stderr


def test_a_file_that_is_no_library_is_named(tmp_path: Path) -> None:
    path = tmp_path / "lib.so"
    path.write_bytes(b"no library")
    done = run_python("from powerinfer import Llama", POWERINFER_LIBRARY=str(path))
    assert done.returncode == 1
    assert "LibraryError" in done.stderr and str(path) in done.stderr


def test_importing_loads_neither_tokenizers_nor_templates() -> None:
    done = run_python(
        "import sys, powerinfer; powerinfer.Llama; print({'tokenizers', 'jinja2', 'rich'} & set(sys.modules))"
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "set()", "")


def test_quick_calls_check_their_numbers() -> None:
    """A number that does not fit is not cut."""
    rest = _native.ffi.new("pi_prompt_rest *", (0, 40, 39, 0, 0, 16, 0, 0))
    assert _native.quick("pi_chunk_end", rest) == _native.lib.pi_chunk_end(rest)
    assert _native.quick("pi_chunk_end", _native.ffi.NULL) == -1
    with pytest.raises(errors.ArgumentError, match="1099511627776"):
        _native.quick("pi_seq_drop", _native.ffi.NULL, 1 << 40)


def test_a_loaded_library_stays_while_python_ends() -> None:
    """Modules go one after the other then, and what they hold; other libraries may still call this one."""
    name = "libBrokenLocale.so.1"  # a small one of glibc's, which nobody else loads
    program = f"""
import gc
from powerinfer._engine import _native
assert not _native.load_library("libnone-of-this-name.so")
if not _native.load_library({name!r}):
    print("none")
else:
    vars(_native).clear()
    gc.collect()
    print({name!r} in open("/proc/self/maps").read())
"""
    done = run_python(program)
    if done.stdout == "none\n":
        pytest.skip("another C library")
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")
