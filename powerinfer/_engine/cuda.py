"""What a GPU needs of this machine beyond its driver: the engine's CUDA library, and cuBLASLt for prompts.

cuBLASLt is looked for where the system's loader finds it, then in the package that powerinfer[cuda] installs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path

from .._extras import how
from ..errors import PowerInferError
from . import _native
from .machine import DeviceFacts, GpuDriver, device_facts

OLDEST_CUDA = 13000
"""That a driver must serve for the CUDA library of the published wheels."""
OLDEST_DRIVER = "580"
_NAMES = ("libcublasLt.so.13", "libcublasLt.so.12")
_PACKAGES = ("nvidia-cublas", "nvidia-cublas-cu13", "nvidia-cublas-cu12")
WITHOUT_CUBLAS = (
    "not found: prompts on a GPU use the engine's own matrix products; long ones are computed faster with "
    f"it: {how('cuda')}"
)


@dataclass(frozen=True, kw_only=True)
class Cublas:
    """Where cuBLASLt is."""

    name: str
    source: str
    """"system", or the package that has it."""
    path: str
    """Of the package's file; "" for the system's."""


def packaged() -> Cublas | None:
    """The one of an installed package."""
    for package in _PACKAGES:
        try:
            files = metadata.files(package) or []
        except metadata.PackageNotFoundError:
            continue
        for name in _NAMES:
            for file in files:
                path = Path(str(file.locate()))
                if file.name == name and path.is_file():
                    return Cublas(name=name, source=package, path=str(path))
    return None


@lru_cache(maxsize=1)
def load_cublas() -> Cublas | None:
    """Loads cuBLASLt into this process, where the engine then finds it by its name. None: there is none."""
    for name in _NAMES:
        if _native.load_library(name):
            return Cublas(name=name, source="system", path="")
    found = packaged()
    return found if found is not None and _native.load_library(found.path) else None


def too_old(driver: GpuDriver) -> str:
    """A sentence about a driver that is too old for the CUDA library, or ""."""
    if not 0 < driver.cuda_version < OLDEST_CUDA:
        return ""
    serves = f"{driver.cuda_version // 1000}.{driver.cuda_version % 1000 // 10}"
    version = driver.version or "of unknown version"
    return (
        f"the driver ({version}) serves CUDA {serves}, and the CUDA library needs {OLDEST_CUDA // 1000}."
        f"{OLDEST_CUDA % 1000 // 10}: a driver of version {OLDEST_DRIVER} or later is needed"
    )


def examine_gpu(
    driver: GpuDriver, index: int = 0, *, measure: bool = False
) -> tuple[DeviceFacts | None, str]:
    """What the engine can do with a GPU; or None, and why it cannot use it."""
    try:
        return device_facts("cuda", index, measure=measure), ""
    except PowerInferError as error:
        text = str(error)
        if "no CUDA backend" not in text and too_old(driver):
            text = too_old(driver)
        return None, text
