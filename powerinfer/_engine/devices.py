"""Which devices a model is opened on, and how much of their memory it may take.

vram_budget, devices         what is used
0                            the CPU
8                            8 GiB of the first GPU, or of each that `devices` names
[8, 6]                       8 GiB of the first and 6 GiB of the second
None                         what is free of the GPUs, less a margin; the CPU if none can be used
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from ..errors import ArgumentError, DeviceError, PowerInferError
from . import machine
from .cuda import too_old
from .machine import DeviceFacts, GpuDriver
from .types import DEVICE, devices_of
from .warn import warn

Budget = float | Sequence[float] | None
Names = str | int | Sequence[str | int] | None

GIB = 1 << 30
_LEFT_BYTES, _LEFT_SHARE = 256 << 20, 1 / 32  # of a GPU's memory: for the display and for other programs
_warned: set[str] = set()


@dataclass(frozen=True, kw_only=True)
class Devices:
    """What was chosen: devices of one kind."""

    kind: str
    """"cuda" or "host"."""
    indices: tuple[int, ...]
    budgets: tuple[int, ...]
    """Bytes, of each."""
    automatic: bool
    """Nobody asked for them: where they cannot be used, the CPU computes."""

    @property
    def names(self) -> list[str]:
        """For Session."""
        return [f"{self.kind}:{index}" for index in self.indices]

    def first(self) -> Devices:
        """The first of them alone."""
        return replace(self, indices=self.indices[:1], budgets=self.budgets[:1])

    def without_least(self) -> Devices:
        """Without the one of least memory."""
        least = self.budgets.index(min(self.budgets))
        indices, budgets = (
            tuple(value for k, value in enumerate(values) if k != least)
            for values in (self.indices, self.budgets)
        )
        return replace(self, indices=indices, budgets=budgets)


def warn_once(reason: str, what: str = "there is a GPU, but it") -> None:
    """Warns that a GPU is not used; once for each reason."""
    if reason not in _warned:
        _warned.add(reason)
        warn(f"{what} is not used: {reason}")


_ANY_BYTES = 1 << 50  # more than a device has


def choose_for_layers(n_gpu_layers: int | None, vram_budget: Budget, names: Names) -> Devices | None:
    """As choose_devices(), but with llama-cpp-python's n_gpu_layers: 0 is the CPU, a negative number whatever
    fits. N layers are a budget that Loader works out; here all that is free is chosen. A vram_budget that is
    given counts instead. Without a GPU that can be used it warns, and the CPU computes."""
    if n_gpu_layers is not None and (isinstance(n_gpu_layers, bool) or not isinstance(n_gpu_layers, int)):
        raise ArgumentError(f"n_gpu_layers is {n_gpu_layers!r}, it must be a whole number")
    if n_gpu_layers == 0 and vram_budget is None:
        return None
    if n_gpu_layers is None or n_gpu_layers < 0 or vram_budget is not None:
        return choose_devices(vram_budget, names)
    kind, indices = _named(names, 1)
    if kind == "host":
        budgets = (_ANY_BYTES,) * len(indices)
        return Devices(kind=kind, indices=tuple(indices), budgets=budgets, automatic=True)
    try:
        found, problem = choose_devices(None, names), problem_of(machine.gpus(), [0])
    except DeviceError as error:
        found, problem = None, str(error)
    if found is None:
        warn_once(problem, f"n_gpu_layers={n_gpu_layers}: the CPU computes everything; a GPU")
        return None
    return replace(found, automatic=True)


def choose_devices(vram_budget: Budget, devices: Names) -> Devices | None:
    """What arguments stand for; None: the CPU.

    Raises ArgumentError (a name or a budget that cannot be, more than is free), DeviceError (a GPU is asked
    for, and none can be used).
    """
    if vram_budget is not None and (
        isinstance(vram_budget, (bytes, bytearray)) or not isinstance(vram_budget, (int, float, Sequence))
    ):
        raise ArgumentError(f"vram_budget is {vram_budget!r}, it must be a number of GiB or a list of them")
    given = None if vram_budget is None else list(_as_list(vram_budget))
    if given == []:
        raise ArgumentError("vram_budget is an empty list; 0 computes on the CPU, None takes what is free")
    each = None if given is None else [budget_bytes(_number(gib)) for gib in given]
    kind, indices = _named(devices, 1 if each is None else len(each))
    if each is not None and isinstance(vram_budget, (int, float)):
        each *= len(indices)
    if each is not None and len(each) != len(indices):
        raise ArgumentError(f"vram_budget has {len(each)} numbers, there are {len(indices)} devices")
    if each is not None and not any(each):
        return None
    if kind == "host":
        if each is None:
            raise ArgumentError('the device "host" needs a vram_budget')
        return Devices(kind=kind, indices=tuple(indices), budgets=tuple(each), automatic=False)
    return _gpus(each, indices, named=devices is not None)


def budget_bytes(gib: float) -> int:
    """A budget in bytes, 0 for 0 only. Raises ArgumentError unless it is a number from 0 to 2^20."""
    if isinstance(gib, int):
        gib = max(min(gib, 1 << 62), -1 << 62)  # what is beyond has no float to be shown as
    if not 0 <= gib <= 1 << 20:  # NaN as well
        raise ArgumentError(f"vram_budget is {gib:g} GiB, it must be 0 to {1 << 20}")
    return max(int(gib * GIB), int(gib > 0))


def _as_list(values: Any) -> Sequence[Any]:
    return values if isinstance(values, Sequence) and not isinstance(values, str) else [values]


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ArgumentError(f"vram_budget is {value!r}, it must be a number of GiB or a list of them")
    return value


def _named(devices: Names, n_budgets: int) -> tuple[str, list[int]]:
    """Kind and numbers of the devices."""
    if devices is None:
        return "cuda", list(range(n_budgets))
    if isinstance(devices, Sequence) and not isinstance(devices, str) and not devices:
        raise ArgumentError("devices is an empty list; vram_budget=0 computes on the CPU")
    words = [f"cuda:{d}" if isinstance(d, int) else d for d in _as_list(devices)]
    if not all(isinstance(word, str) for word in words):
        raise ArgumentError(f"devices is {devices!r}, it must be names or numbers of devices")
    number, indices = devices_of(words)
    kind = next(name for name, value in DEVICE.items() if value == number)
    if kind == "none":
        raise ArgumentError('devices cannot be "none"; vram_budget=0 computes on the CPU')
    return kind, indices


def _gpus(each: list[int] | None, indices: list[int], *, named: bool) -> Devices | None:
    driver = machine.gpus()
    automatic = each is None and not named
    if automatic:
        indices = _usable(driver)
        if not indices:
            return None
    problem = "" if automatic else problem_of(driver, indices)
    if problem:
        raise DeviceError(f"no GPU can be used as asked: {problem}; vram_budget=0 computes on the CPU")
    budgets = []
    for k, index in enumerate(indices):
        gpu = driver.gpus[index]
        free = gpu.free_bytes or gpu.memory_bytes
        if each is None:
            margin = _LEFT_BYTES + int(gpu.memory_bytes * _LEFT_SHARE)
            budgets.append(max(free - margin, 0))
        elif each[k] > free:
            raise ArgumentError(
                f"vram_budget is {each[k] / GIB:.2f} GiB, of the memory of cuda:{index} ({gpu.name}) "
                f"{free / GIB:.2f} of {gpu.memory_bytes / GIB:.2f} GiB are free"
            )
        else:
            budgets.append(each[k])
    if not any(budgets):
        free = sum(driver.gpus[index].free_bytes or driver.gpus[index].memory_bytes for index in indices)
        problem = f"no more than {free / GIB:.2f} GiB of its memory are free, which other programs may need"
        if automatic:
            warn_once(problem)
            return None
        raise DeviceError(f"no GPU can be used as asked: {problem}; vram_budget=0 computes on the CPU")
    return Devices(kind="cuda", indices=tuple(indices), budgets=tuple(budgets), automatic=automatic)


def _usable(driver: GpuDriver) -> list[int]:
    """The GPUs that can be used where nobody says which; warns of the others."""
    problems = {index: problem_of(driver, [index]) for index in range(len(driver.gpus))}
    usable = [index for index, problem in problems.items() if not problem]
    for index, problem in problems.items():
        if problem and usable:
            warn_once(problem, f"cuda:{index} ({driver.gpus[index].name})")
        elif problem:
            warn_once(problem)
    return usable


def problem_of(driver: GpuDriver, indices: Sequence[int]) -> str:
    """Why these GPUs cannot be used, or ""."""
    if not driver.gpus:
        return driver.problem or "there is none"
    beyond = [index for index in indices if index >= len(driver.gpus)]
    if beyond:
        return f"there is no cuda:{beyond[0]}, the driver shows {len(driver.gpus)}"
    try:
        for index in indices:
            facts_of("cuda", index)
    except PowerInferError as error:
        text = str(error)
        return too_old(driver) or text if "no CUDA backend" not in text else text
    return ""


@lru_cache(maxsize=64)
def facts_of(kind: str, index: int) -> DeviceFacts:
    """What a device can do, with measured rates; looked at once in a process. Raises DeviceError."""
    return machine.device_facts(kind, index, measure=True)
