"""The machine that the engine runs on, and how the engine was built for it."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from ._native import build_info, cores, isa, read_rate

__all__ = ["available_bytes", "build_info", "cores", "cpu_name", "isa", "read_rate"]


def cpu_name() -> str:
    """The processor's name as it says it itself."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def available_bytes() -> int | None:
    """Memory that is free, or None where the system does not say. Limits of a container are not counted."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None
