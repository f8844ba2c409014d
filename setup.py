"""Builds the engine with CMake and puts it into the package: powerinfer/lib/libpowerinfer.so and its header.

The library is loaded with cffi in ABI mode and knows no Python version, so one wheel (py3-none) serves
them all. An editable install also builds the test library (build/testing), so that the tests need no
further step.

The CUDA backend (libpowerinfer_cuda.so, beside the engine's own library) follows POWERINFER_CUDA:

    0        never
    1        for all architectures, as wheels have it; POWERINFER_CUDA_ARCHITECTURES="90-real" names others
    unset    for the GPU of this machine, if there is one and nvcc too; else CPU only

What was built is printed, and `powerinfer doctor` says it.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Distribution, Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
HEADER = ROOT / "native" / "powerinfer.h"


def version() -> str:
    """The version of the package, which is the engine's."""
    found = re.search(r'^#define PI_VERSION "([^"]+)"', HEADER.read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise SystemExit(f"{HEADER} has no PI_VERSION")
    return found[1]


def tool(name: str) -> str:
    """Path of cmake or ninja: the one in this Python's packages, else the one on PATH."""
    beside = shutil.which(name, path=str(Path(sys.executable).parent))
    found = beside or shutil.which(name)
    if found is None:
        raise SystemExit(f"{name} is needed to build the engine: pip install {name}")
    return found


def check_compilers() -> None:
    """Raises SystemExit where there is no compiler, before hundreds of lines of other output hide it."""
    for language, variable, names in (
        ("C", "CC", ("cc", "gcc", "clang")),
        ("C++", "CXX", ("c++", "g++", "clang++")),
    ):
        given = shlex.split(os.environ.get(variable, ""))[:1]
        if not any(shutil.which(name) for name in given or names):
            raise SystemExit(
                f"powerinfer: building needs a {language} compiler, and {' or '.join(given or names)} is not "
                f"here: apt-get install gcc g++ (Debian, Ubuntu), dnf install gcc gcc-c++ (Fedora); "
                f"{variable} names another"
            )


def nvcc() -> str | None:
    """Path of the CUDA compiler."""
    for name in (os.environ.get("CUDACXX"), "nvcc", "/usr/local/cuda/bin/nvcc"):
        found = shutil.which(name) if name else None
        if found:
            return found
    return None


def has_gpu() -> bool:
    """Whether this machine has an NVIDIA GPU that works."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return False
    try:
        listed = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listed.returncode == 0 and "GPU " in listed.stdout


def cuda_options() -> tuple[list[str], str]:
    """CMake's options for the CUDA backend, and a sentence about what will be built."""
    asked, compiler = os.environ.get("POWERINFER_CUDA", ""), nvcc()
    architectures = os.environ.get("POWERINFER_CUDA_ARCHITECTURES", "")
    if asked not in ("", "0", "1"):
        raise SystemExit(f"POWERINFER_CUDA is 0, 1 or unset, not {asked!r}")
    if asked == "0":
        return ["-DPOWERINFER_CUDA=OFF"], "without the CUDA backend (POWERINFER_CUDA=0)"
    if asked == "1" and compiler is None:
        raise SystemExit("POWERINFER_CUDA=1 needs nvcc, on PATH, named by CUDACXX or in /usr/local/cuda/bin")
    if compiler is None:
        return ["-DPOWERINFER_CUDA=OFF"], "without the CUDA backend (no nvcc on this machine)"
    if asked == "" and not has_gpu():
        why = "no GPU on this machine; POWERINFER_CUDA=1 builds it for all architectures"
        return ["-DPOWERINFER_CUDA=OFF"], f"without the CUDA backend ({why})"
    if not architectures and asked == "":
        architectures = "native"
    options = ["-DPOWERINFER_CUDA=ON", f"-DCMAKE_CUDA_COMPILER={compiler}"]
    if architectures:
        options.append(f"-DPOWERINFER_CUDA_ARCHITECTURES={architectures}")
    return options, f"with the CUDA backend for {architectures or 'all architectures'}"


def build_engine(build_dir: Path, *, testing: bool) -> dict[str, Path]:
    """Configures and builds; returns libraries by name. CMake sees CC, CXX, CFLAGS and CMAKE_ARGS."""
    options, sentence = cuda_options()
    print(f"powerinfer: building {sentence}", flush=True)
    # The program's path is given each time: the environment that configured a directory before may be gone.
    configure = [tool("cmake"), "-S", str(ROOT), "-B", str(build_dir), "-G", "Ninja"]
    configure += [
        f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}",
        f"-DPOWERINFER_TESTING={'ON' if testing else 'OFF'}",
    ]
    configure += options
    configure += shlex.split(os.environ.get("CMAKE_ARGS", ""))
    subprocess.run(configure, check=True)
    subprocess.run([tool("cmake"), "--build", str(build_dir)], check=True)
    names = ["libpowerinfer.so"] + (["libpowerinfer_cuda.so"] if "-DPOWERINFER_CUDA=ON" in options else [])
    return {name: (build_dir / name).resolve(strict=True) for name in names}


def put(source: Path, target: Path) -> None:
    """Copies a file; a process that uses the old one keeps it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_suffix(f".{os.getpid()}")
    shutil.copyfile(source, fresh)
    os.replace(fresh, target)


class BuildEngine(build_ext):
    """Stands in for the compilation of extension modules."""

    _built: tuple[str, ...] = ("libpowerinfer.so", "powerinfer.h")  # names in powerinfer/lib

    def run(self) -> None:
        in_place = bool(self.inplace or self.editable_mode)
        build_dir = ROOT / "build" / "testing" if in_place else Path(self.build_temp).resolve()
        files = build_engine(build_dir, testing=in_place) | {"powerinfer.h": HEADER}
        self._built = tuple(files)
        # Also into the source tree: Python started in a checkout imports the package from there.
        for base in {ROOT, ROOT if in_place else Path(self.build_lib).resolve()}:
            folder = base / "powerinfer" / "lib"
            for name, source in files.items():
                put(source, folder / name)
            if "libpowerinfer_cuda.so" not in files:  # of an earlier build, of another version perhaps
                (folder / "libpowerinfer_cuda.so").unlink(missing_ok=True)

    def get_outputs(self) -> list[str]:
        return (
            []
            if self.inplace
            else [str(Path(self.build_lib) / "powerinfer" / "lib" / n) for n in self._built]
        )

    def get_output_mapping(self) -> dict[str, str]:
        return {}

    def get_source_files(self) -> list[str]:
        return []


class PlatformWheel(bdist_wheel):
    """A wheel of this platform for any Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


class EngineDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return True


if {"bdist_wheel", "build", "build_ext", "editable_wheel", "develop", "install"} & set(sys.argv):
    check_compilers()
setup(
    version=version(),
    distclass=EngineDistribution,
    ext_modules=[Extension("powerinfer.lib.libpowerinfer", sources=[])],
    cmdclass={"build_ext": BuildEngine, "bdist_wheel": PlatformWheel},
)
