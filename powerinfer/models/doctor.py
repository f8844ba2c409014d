"""What this machine has and what of it is used, in words that a bug report can quote.

for name, text in examine().rows():
    print(name, text)
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from .._engine import _native, cuda, machine
from .._engine.machine import DeviceFacts, Gpu, GpuDriver, MachineInfo
from .._extras import EXTRAS, how
from ..errors import PowerInferError

# Sets of instructions of each kind of processor, the best last, and what /proc/cpuinfo calls the features
# they need.
_X86 = {
    "scalar": (),
    "avx2": ("avx2", "fma", "f16c"),
    "avx2_vnni": ("avx_vnni",),
    "avx512": ("avx512f", "avx512dq", "avx512bw", "avx512vl", "avx512_vnni"),
    "avx512_bf16": ("avx512_bf16",),
    "amx": ("amx_tile", "amx_bf16", "amx_int8", "avx512_bf16"),
}
_ARM = {"scalar": (), "neon": (), "neon_dot": ("asimddp",)}
_ISAS: dict[str, dict[str, tuple[str, ...]]] = {"x86_64": _X86, "aarch64": _ARM}

_PACKAGES = ("numpy", "cffi", "tokenizers", "jinja2", "rich", "prompt_toolkit")

_MEASURE_BYTES = 512 << 20
_FEW_LOCKED = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Report:
    """All that `powerinfer doctor` says."""

    version: str
    build: str
    library: str
    """What POWERINFER_LIBRARY names in place of the installed one, or ""."""
    python: str
    machine: MachineInfo
    isa: str
    """In use; "" if none can be, then isa_problem says why."""
    isa_problem: str
    isa_forced: str
    """What POWERINFER_ISA names, or ""."""
    isas: dict[str, str]
    """Each set of instructions: "available", or why it is not."""
    read_gb_s: float | None
    """Rate at which host memory is read, 10^9 bytes per second; None: not measured."""
    driver: GpuDriver
    cuda: str
    """Whether GPUs can be used, and why."""
    mapping: str
    """Whether the GPU may read host memory by zero-copy; "" where none can be used."""
    cublas: str
    """Where cuBLASLt is, or what it would gain."""
    packages: dict[str, str]
    """Installed packages that this one needs, and their versions."""
    extras: dict[str, dict[str, str]]
    """Of each extra, the installed packages and versions."""

    def rows(self) -> list[tuple[str, str]]:
        """Names and what is to be said of them."""
        m = self.machine
        rows = [
            ("powerinfer", f"{self.version}; {self.build}"),
            *([("library", f"{self.library} (POWERINFER_LIBRARY)")] if self.library else []),
            ("python", self.python),
            ("system", _system(m)),
            ("processor", m.cpu or "unknown"),
            ("cores", _cores(m)),
            ("instructions", self._instructions()),
        ]
        rows += [("", f"{name}: {text}") for name, text in self.isas.items() if text != "available"]
        rows += [("memory", _memory(m)), ("", _pages(m))]
        if self.read_gb_s is not None:
            rows.append(("read rate", f"{self.read_gb_s:.1f} GB/s with {m.n_cores} threads"))
        rows += _gpu_rows(self.driver)
        rows.append(("CUDA", self.cuda))
        rows += [("", self.mapping)] if self.mapping else []
        rows.append(("cuBLASLt", self.cublas))
        rows.append(("packages", _versions(self.packages)))
        rows += [(f"[{extra}]", _extra(extra, found)) for extra, found in self.extras.items()]
        return rows

    def _instructions(self) -> str:
        available = ", ".join(name for name, text in self.isas.items() if text == "available")
        if not self.isa:
            return f"none in use: {self.isa_problem} (available: {available})"
        forced = f", as POWERINFER_ISA says ({self.isa_forced})" if self.isa_forced else ""
        return f"{self.isa} in use{forced}; available: {available}"


def examine(*, measure: bool = True) -> Report:
    """Looks at everything. measure: also the rate at which memory is read, which takes a second and 512
    MiB."""
    isa, problem = "", ""
    try:
        isa = machine.isa()
    except PowerInferError as error:
        problem = str(error)
    driver = machine.gpus()
    cards = [cuda.examine_gpu(driver, index) for index in range(max(len(driver.gpus), 1))]
    return Report(
        version=_native.version,
        build=machine.build_info(),
        library=os.environ.get("POWERINFER_LIBRARY", ""),
        python=f"{platform.python_implementation()} {platform.python_version()}",
        machine=machine.machine_info(),
        isa=isa,
        isa_problem=problem,
        isa_forced=os.environ.get("POWERINFER_ISA", ""),
        isas=_isas(_cpu_flags()),
        read_gb_s=_read_rate() if measure else None,
        driver=driver,
        cuda=_cuda(driver, cards),
        mapping=_mapping(next((facts for facts, _ in cards if facts is not None), None)),
        cublas=_cublas(),
        packages=_installed(_PACKAGES),
        extras={extra: _installed(_names_of(extra)) for extra in EXTRAS},
    )


def _cuda(driver: GpuDriver, cards: list[tuple[DeviceFacts | None, str]]) -> str:
    """Of each GPU what the engine can do with it, or why it cannot use it."""
    names = ", ".join(facts.name for facts, _ in cards if facts is not None)
    if names:
        others = "".join(
            f"; not cuda:{i}: {problem}" for i, (facts, problem) in enumerate(cards) if not facts
        )
        return f"used: {names}{others}; vram_budget=0 computes on the CPU"
    problem = cards[0][1]
    if "no CUDA backend" in problem:
        gain = "; `powerinfer plan` says what a GPU would gain" if driver.gpus else ""
        return f"not in this build, which computes on the CPU{gain}"
    if not driver.gpus:
        return "built; there is no GPU to use it with, so that the CPU computes"
    return f"built, but not used: {problem}"


def _mapping(facts: DeviceFacts | None) -> str:
    if facts is None:
        return ""
    if facts.can_map:
        return "host memory can be registered: prompts stream the weights that stay there"
    return (
        f"host memory cannot be registered ({facts.no_mapping}): prompts stream the weights that stay there "
        "through a small buffer, which is slower"
    )


def _cublas() -> str:
    found = cuda.load_cublas()
    if found is None:
        return cuda.WITHOUT_CUBLAS
    return f"{found.name} of the {'system' if found.source == 'system' else 'package ' + found.source}"


def _cpu_flags() -> frozenset[str]:
    """Features that the kernel shows; empty where it shows none."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, words = line.partition(":")
            if name.strip() in ("flags", "Features"):
                return frozenset(words.split())
    except OSError:
        pass
    return frozenset()


def _isas(flags: frozenset[str]) -> dict[str, str]:
    """Every set of instructions that processors of this kind may have, and whether it can be used."""
    known = _ISAS.get(platform.machine(), {"scalar": ()})
    return {name: _why_not(name, needs, flags) for name, needs in known.items()}


def _why_not(name: str, needs: tuple[str, ...], flags: frozenset[str]) -> str:
    if machine.has_isa(name):
        return "available"
    missing = [flag for flag in needs if flag not in flags]
    if not flags:
        return "not available; the system does not show what the processor has"
    if missing:
        return f"not available: the processor, as the system shows it, lacks {', '.join(missing)}"
    return "not available: the processor has it, but the operating system does not let programs use it"


def _read_rate() -> float | None:
    try:
        return machine.read_rate(machine.cores(), machine.sample_bytes(_MEASURE_BYTES), 3) / 1e9
    except PowerInferError:
        return None


def _installed(names: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for name in names:
        version = _version_of(name)
        if version:
            found[name] = version
    return found


def _version_of(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


# ---- words


def gib(n_bytes: int) -> str:
    """A size as people say it."""
    return f"{n_bytes / (1 << 30):.1f} GiB" if n_bytes >= 1 << 30 else f"{n_bytes / (1 << 20):.0f} MiB"


def _system(m: MachineInfo) -> str:
    parts = [m.os, m.distribution, m.libc, f"in a container ({m.container})" if m.container else ""]
    if m.container == "WSL":
        parts[-1] = "under WSL"
    return ", ".join(part for part in parts if part)


def _cores(m: MachineInfo) -> str:
    text = f"{m.n_cores} physical, {m.n_logical} logical usable"
    if m.n_online:
        text += f" of {m.n_online} logical"
    if m.threads_per_core:
        text += "; SMT" if m.threads_per_core > 1 else "; no SMT"
    if m.n_numa:
        text += f"; {m.n_numa} NUMA node{'s' if m.n_numa > 1 else ''}"
    if m.cpu_quota:
        text += f"; the container may use {m.cpu_quota:g} CPUs"
    return text


def _memory(m: MachineInfo) -> str:
    text = f"{gib(m.memory_bytes)}, {gib(m.memory_free_bytes)} free"
    if m.memory_limit_bytes:
        text += f"; the container may use {gib(m.memory_limit_bytes)}"
    return text


def _pages(m: MachineInfo) -> str:
    text = f"huge pages: {m.huge_pages or 'unknown'}"
    if m.huge_pages == "never":
        text += " (reading is slower without them)"
    if m.memlock_bytes is None:
        return f"{text}; locking memory: no limit"
    few = " (`ulimit -l`; use_mlock needs more)" if m.memlock_bytes < _FEW_LOCKED else ""
    return f"{text}; locking memory: {gib(m.memlock_bytes)} at most{few}"


def _gpu_rows(d: GpuDriver) -> list[tuple[str, str]]:
    rows = [("GPU", _gpu(gpu)) for gpu in d.gpus]
    driver = "none"
    if d.is_present:
        serves = f"{d.cuda_version // 1000}.{d.cuda_version % 1000 // 10}"
        driver = f"{d.version or 'of unknown version'}, serves CUDA {serves}"
    if d.problem:
        driver += f" ({d.problem})" if d.is_present else f" ({d.problem.removeprefix('no driver: ')})"
    return [*(rows or [("GPU", "none that can be used")]), ("GPU driver", driver)]


def _gpu(gpu: Gpu) -> str:
    text = f"{gpu.name or 'unnamed'}, {gib(gpu.memory_bytes)}"
    if gpu.free_bytes:
        text += f" ({gib(gpu.free_bytes)} free)"
    if gpu.memory_bytes_per_s:
        text += f" at {gpu.memory_bytes_per_s / 1e9:,.0f} GB/s"
    text += f", compute capability {gpu.capability_major}.{gpu.capability_minor}, {gpu.n_sm} SMs"
    if gpu.pcie_generation and gpu.pcie_lanes:
        text += f", PCIe {gpu.pcie_generation} x{gpu.pcie_lanes}"
    return text


def _names_of(extra: str) -> tuple[str, ...]:
    return tuple(name.partition("[")[0] for name in EXTRAS[extra])


def _extra(extra: str, found: dict[str, str]) -> str:
    """Of an extra what is installed, and what is not."""
    missing = tuple(
        name for name, plain in zip(EXTRAS[extra], _names_of(extra), strict=True) if plain not in found
    )
    if not missing:
        return _versions(found)
    if not found:
        return f"not installed: {how(extra)}"
    return f"{_versions(found)}; incomplete: {how(extra, missing)}"


def _versions(packages: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in packages.items()) or "none"
