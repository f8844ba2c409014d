"""What tests of failing devices share. The test library is told when stand-ins are to fail: a file that has
such tests runs once more by itself, with that library as the engine."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from powerinfer import DeviceError, OutOfMemoryError
from powerinfer._engine.session import Session
from tests.core import capi
from tests.native.hybrid import IDS, run_again

LIBRARY = str(capi.library_path())
HAS_FAULTS = os.environ.get("POWERINFER_LIBRARY") == LIBRARY


class Faults(ctypes.Structure):
    """pi_host_fault: the n-th time from now on; how late some operations are."""

    _fields_ = [
        (name, ctypes.c_int32)
        for name in (
            "alloc",
            "launch",
            "transfer",
            "fetch",
            "die",
            "hang",
            "vanish",
            "map_one",
            "map",
            "late_us",
        )
    ]


def with_faults(test: Any) -> Any:
    return test if HAS_FAULTS else None


def with_the_library(file: str) -> Any:
    """A test that runs the file's."""

    def test() -> None:
        run_again(file, POWERINFER_LIBRARY=LIBRARY)

    return None if HAS_FAULTS else test


def every_allocation_fails(faults: Faults, opened: Callable[[], Session]) -> None:
    n = 1
    while True:
        faults.alloc = n
        try:
            opened().close()
        except OutOfMemoryError as error:
            assert "out of memory" in str(error)
            n += 1
            continue
        break
    assert faults.alloc > 0 and n > 100
    faults.alloc = 0


def every_copy_fails(faults: Faults, opened: Callable[[], Session]) -> None:
    """A device that is lost while a session opens: an exception, and the next one opens."""
    n = 1
    while True:
        faults.transfer = n
        try:
            s = opened()
        except DeviceError as error:
            assert "asked for: copy" in str(error)
            n += 1
            continue
        break
    faults.transfer = 0
    with s, opened() as other:
        for one in (s, other):
            one.feed(IDS[:5])
        assert n > 10 and np.array_equal(s.logits(), other.logits())
