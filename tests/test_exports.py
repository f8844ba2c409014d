"""What the library shows: exactly the functions of the public header. It needs no C++ runtime."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import cffi
import pytest

from tests.core import capi

ROOT = Path(__file__).resolve().parents[1]
HEADER = (ROOT / "native" / "powerinfer.h").read_text(encoding="utf-8")


def declared() -> set[str]:
    """The functions that the header declares: a name and a parenthesis, outside of comments."""
    code = re.sub(r"/\*.*?\*/", "", HEADER, flags=re.DOTALL)
    return set(re.findall(r"\b(pi_\w+)\s*\(", code))


def library() -> Path:
    return capi.library_path().parent / "libpowerinfer.so"


def dynamic_symbols(path: Path, *flags: str) -> list[tuple[str, str]]:
    """(kind, name without version) of a shared library's dynamic symbols."""
    out = subprocess.run(["nm", "-D", *flags, path], capture_output=True, text=True, check=True).stdout
    lines = [line.split() for line in out.splitlines()]
    return [(words[-2], words[-1].split("@")[0]) for words in lines]


def test_the_header_s_index_names_its_sections() -> None:
    index = re.search(r"In this order: (.*?)\.", HEADER.replace("\n * ", " "), re.DOTALL)
    assert index is not None
    assert index[1].split("; ") == re.findall(r"^/\* ---- (.+) ---- \*/$", HEADER, re.MULTILINE)


def test_exports_are_the_header() -> None:
    exported = {name for _, name in dynamic_symbols(library(), "--defined-only")}
    assert len(declared()) > 30
    assert exported == declared()


def test_only_the_test_library_has_devices_that_fail_on_demand() -> None:
    text = b"a fault that was asked for"
    assert text in capi.library_path().read_bytes()
    assert text not in library().read_bytes()


def test_needs_only_the_c_library() -> None:
    out = subprocess.run(["readelf", "-d", library()], capture_output=True, text=True, check=True).stdout
    needed = set(re.findall(r"\(NEEDED\).*\[(.*?)\]", out))
    if any("san" in name for name in needed):
        pytest.skip("a build with sanitizers needs their libraries")
    assert needed <= {
        "libc.so.6",
        "libm.so.6",
        "libpthread.so.0",
        "ld-linux-x86-64.so.2",
        "ld-linux-aarch64.so.1",
    }


def test_stack_is_not_executable() -> None:
    out = subprocess.run(["readelf", "-lW", library()], capture_output=True, text=True, check=True).stdout
    (stack,) = re.findall(r"GNU_STACK.*", out)
    assert "RWE" not in stack


def test_declarations_parse_and_resolve() -> None:
    ffi = cffi.FFI()
    ffi.cdef(HEADER[HEADER.index("/* cdef begin") : HEADER.index("/* cdef end */")])
    lib = ffi.dlopen(str(library()))
    for name in sorted(declared()):
        assert ffi.typeof(getattr(lib, name)).kind == "function", name
    version = re.search(r'#define PI_VERSION "([^"]+)"', HEADER)
    assert version is not None
    assert ffi.string(lib.pi_version()).decode() == version[1]


def test_header_is_c_and_cpp(tmp_path: Path) -> None:
    for compiler, name in (("cc", "use.c"), ("c++", "use.cpp")):
        source = tmp_path / name
        source.write_text('#include "powerinfer.h"\nconst char *use(void) { return pi_version(); }\n')
        done = subprocess.run(
            [
                compiler,
                "-Wall",
                "-Wextra",
                "-Wpedantic",
                "-Werror",
                "-I",
                ROOT / "native",
                "-c",
                source,
                "-o",
                tmp_path / "o",
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr


def test_instruction_sets_stay_in_their_objects() -> None:
    """An object compiled for one instruction set defines nothing but the function of its part (in builds that
    are not optimised: of its parts).

    An inline function of a shared header, compiled there as a weak symbol, could be the copy that the
    linker keeps for the whole library, and would crash older processors.
    """
    objects = sorted(capi.library_path().parent.glob("CMakeFiles/powerinfer_objects.dir/kernels/*.cpp.o"))
    if not objects:
        pytest.skip("the test library lies apart from its objects")
    together = any(path.name == "scalar.cpp.o" for path in objects)
    for path in objects:
        out = subprocess.run(
            ["nm", "--defined-only", "-g", path], capture_output=True, text=True, check=True
        ).stdout
        names = {name for line in out.splitlines() if "asan" not in (name := line.split()[-1])}
        own = f"te_{path.name.removesuffix('.cpp.o')}"
        assert names and all(name.startswith(f"{own}_") if together else name == own for name in names)
    assert any(path.name.startswith("scalar") for path in objects)
