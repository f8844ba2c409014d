"""Builds the engine with CMake and puts it into the package: powerinfer/lib/libpowerinfer.so and its header.

The library is loaded with cffi in ABI mode and knows no Python version, so one wheel (py3-none) serves
them all. An editable install also builds the test library (build/testing), so that the tests need no
further step.
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


def build_engine(build_dir: Path, *, testing: bool) -> Path:
    """Configures and builds; returns the library. CMake sees CC, CXX and CFLAGS, and what CMAKE_ARGS adds."""
    # The program's path is given each time: the environment that configured a directory before may be gone.
    configure = [tool("cmake"), "-S", str(ROOT), "-B", str(build_dir), "-G", "Ninja"]
    configure += [
        f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}",
        f"-DPOWERINFER_TESTING={'ON' if testing else 'OFF'}",
    ]
    configure += shlex.split(os.environ.get("CMAKE_ARGS", ""))
    subprocess.run(configure, check=True)
    subprocess.run([tool("cmake"), "--build", str(build_dir)], check=True)
    return (build_dir / "libpowerinfer.so").resolve(strict=True)


class BuildEngine(build_ext):
    """Stands in for the compilation of extension modules."""

    def _files(self) -> list[str]:
        return [f"powerinfer/lib/{name}" for name in ("libpowerinfer.so", "powerinfer.h")]

    def run(self) -> None:
        in_place = bool(self.inplace or self.editable_mode)
        build_dir = ROOT / "build" / "testing" if in_place else Path(self.build_temp).resolve()
        library = build_engine(build_dir, testing=in_place)
        # Also into the source tree: Python started in a checkout imports the package from there.
        for base in {ROOT, ROOT if in_place else Path(self.build_lib).resolve()}:
            for source, target in zip((library, HEADER), self._files(), strict=True):
                (base / target).parent.mkdir(parents=True, exist_ok=True)
                fresh = (base / target).with_suffix(f".{os.getpid()}")
                shutil.copyfile(source, fresh)
                os.replace(fresh, base / target)  # a process that runs the old library keeps it

    def get_outputs(self) -> list[str]:
        return [] if self.inplace else [str(Path(self.build_lib) / name) for name in self._files()]

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


setup(
    version=version(),
    distclass=EngineDistribution,
    ext_modules=[Extension("powerinfer.lib.libpowerinfer", sources=[])],
    cmdclass={"build_ext": BuildEngine, "bdist_wheel": PlatformWheel},
)
