"""The machine that the engine runs on, and how the engine was built for it."""

from __future__ import annotations

import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import _native
from ._native import build_info, cores, give_back_memory, has_isa, isa, read_rate
from .types import DEVICE, number_of

if TYPE_CHECKING:
    from ..hub.names import Room

__all__ = [
    "DeviceFacts",
    "Gpu",
    "GpuDriver",
    "MachineInfo",
    "available_bytes",
    "build_info",
    "cache_bytes",
    "cores",
    "cpu_name",
    "device_facts",
    "give_back_memory",
    "gpus",
    "has_isa",
    "isa",
    "machine_info",
    "read_rate",
    "room_of",
    "sample_bytes",
]

_UNLIMITED = (1 << 64) - 1
_MOST_GPUS = 64


def cpu_name() -> str:
    """The processor's name as it says it itself, or else what kind it is."""
    return machine_info().cpu or platform.processor() or platform.machine()


def available_bytes() -> int | None:
    """Memory that this process can have, or None where the system does not say; in a container what that has
    left. Files that the system holds in memory count as free."""
    m = machine_info()
    if not m.memory_free_bytes:
        return None
    return min(m.memory_free_bytes, m.memory_limit_bytes or m.memory_free_bytes)


def cache_bytes() -> int:
    """Of the processor's largest cache; 0: unknown."""
    try:
        texts = [path.read_text() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    except OSError:
        return 0
    sizes = [re.fullmatch(r"(\d+)([KMG])\s*", text) for text in texts]
    return max((int(s[1]) << {"K": 10, "M": 20, "G": 30}[s[2]] for s in sizes if s), default=0)


def sample_bytes(most: int) -> int:
    """How much memory to read through to measure its rate: a quarter of what is free, at least 64 MiB."""
    free = available_bytes()
    return most if free is None else max(64 << 20, min(most, free // 4))


@dataclass(frozen=True, kw_only=True)
class MachineInfo:
    """What a bug report should say of a machine; "" and 0 for what the system does not tell."""

    cpu: str
    os: str
    """Kernel and architecture."""
    distribution: str
    libc: str
    container: str
    """"docker", "podman", "kubernetes", "lxc", "WSL", or ""."""
    huge_pages: str
    """Transparent ones: "always", "madvise" or "never"."""
    n_cores: int
    """Physical cores that this process may use."""
    n_logical: int
    """Logical CPUs that it may use."""
    n_online: int
    """Logical CPUs of the machine."""
    threads_per_core: int
    """2 with SMT."""
    n_numa: int
    """NUMA nodes."""
    cpu_quota: float
    """CPUs that the cgroup allows; 0: no limit."""
    memory_bytes: int
    memory_free_bytes: int
    """That this process can have."""
    memory_limit_bytes: int
    """Of the cgroup; 0: none."""
    memlock_bytes: int | None
    """Memory that this process may lock; None: no limit."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A device as its driver describes it; 0 for what it does not tell."""

    name: str
    capability_major: int
    capability_minor: int
    n_sm: int
    memory_bytes: int
    free_bytes: int
    memory_bytes_per_s: float
    """Width of the memory's bus times its clock."""
    pcie_generation: int
    pcie_lanes: int


@dataclass(frozen=True, kw_only=True)
class GpuDriver:
    """CUDA's driver, and what it found."""

    is_present: bool
    cuda_version: int
    """That it serves: 13000 is 13.0."""
    version: str
    problem: str
    """Why no device can be used, or ""."""
    gpus: tuple[Gpu, ...]


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """A device as sessions use it."""

    name: str
    memory_bytes: int
    free_bytes: int
    """Once it is open."""
    context_bytes: int
    """What opening it took, as far as that can be seen."""
    can_map: bool
    """It reads host memory by zero-copy, so that prompts can stream cold weights."""
    no_mapping: str
    """Why it cannot, or ""."""
    read_bytes_per_s: float
    """Its own memory; this and the next two measured, or 0."""
    copy_bytes_per_s: float
    """From host to device memory."""
    zero_copy_bytes_per_s: float
    """Its kernels read host memory."""


def _value(kind: str, value: Any) -> Any:
    return _native.ffi.string(value).decode("utf-8", "replace") if kind == "str" else value


def _values(cls: type, native: Any, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """A dataclass's fields from a native struct with members of the same names."""
    return {
        field.name: _value(str(field.type), getattr(native, field.name))
        for field in fields(cls)
        if field.name not in without
    }


def machine_info() -> MachineInfo:
    """Processor, system and memory, as they are now."""
    native = _native.ffi.new("pi_machine_info *")
    _native.check(_native.lib.pi_machine_get_info(native))
    values = _values(MachineInfo, native)
    if values["memlock_bytes"] == _UNLIMITED:
        values["memlock_bytes"] = None
    return MachineInfo(**values)


def gpus() -> GpuDriver:
    """Asks CUDA's driver, if there is one. Takes no device memory; the first call may take half a second.

    It starts the driver in this process: children forked later, as multiprocessing does on Linux by default,
    cannot use CUDA."""
    driver = _native.ffi.new("pi_gpu_driver *")
    found = _native.ffi.new("pi_gpu[]", _MOST_GPUS)
    _native.check(_native.lib.pi_gpu_probe(driver, _MOST_GPUS, found))
    n = min(driver.n_gpus, _MOST_GPUS)
    return GpuDriver(
        **(_values(GpuDriver, driver, ("gpus",)) | {"is_present": bool(driver.is_present)}),
        gpus=tuple(Gpu(**_values(Gpu, found[i])) for i in range(n)),
    )


def room_of(vram_budget: Any = None) -> Room:
    """What a model may take now: memory that is free, and of the GPUs what the budget allows."""
    from ..hub.names import GIB, Room

    if vram_budget is None:
        gpu_bytes = sum(gpu.free_bytes for gpu in gpus().gpus)
    else:
        each = vram_budget if isinstance(vram_budget, Sequence) else [vram_budget]
        gpu_bytes = int(sum(each) * GIB)
    return Room(available_bytes() or 0, gpu_bytes)


_MOST_CONTEXT = 1 << 30


def context_taken(free_before: int, free_after: int) -> int:
    """What opening a device took of its memory; 0 where that cannot be seen, as other programs took more
    meanwhile than a context does."""
    taken = max(free_before - free_after, 0)
    return taken if taken < _MOST_CONTEXT else 0


def device_facts(kind: str, index: int = 0, *, measure: bool = False) -> DeviceFacts:
    """Opens a device ("cuda" or "host"), looks, and closes it again.

    Raises DeviceError (no library, no driver, no such device), OutOfMemoryError.
    """
    native = _native.ffi.new("pi_device_facts *")
    number = number_of("device", DEVICE, kind)
    before = gpus().gpus[index : index + 1] if kind == "cuda" else ()
    _native.check(_native.lib.pi_device_examine(number, index, _native.ffi.NULL, measure, native))
    context = context_taken(before[0].free_bytes, native.free_bytes) if before else 0
    values = _values(DeviceFacts, native, ("context_bytes",))
    return DeviceFacts(**(values | {"can_map": bool(native.can_map), "context_bytes": context}))
