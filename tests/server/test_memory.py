"""What the process keeps of memory that it does not use any more."""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path

import pytest

from powerinfer import AsyncLlama
from powerinfer._engine.machine import give_back_memory
from powerinfer.cli.long_lived import is_glibc, start_for_long, tunables
from tests.server.conftest import serving

WANTED = "glibc.malloc.arena_max=1:glibc.malloc.tcache_count=0"


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("", WANTED),
        (WANTED, WANTED),
        ("glibc.malloc.perturb=1", f"glibc.malloc.perturb=1:{WANTED}"),
        ("glibc.malloc.tcache_count=3:", "glibc.malloc.tcache_count=3:glibc.malloc.arena_max=1"),
    ],
)
def test_what_the_user_has_set_stays(given: str, wanted: str) -> None:
    assert tunables(given) == wanted
    assert tunables(wanted) == wanted  # it would start again and again


def test_it_starts_again_once(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []

    def execve(path: str, words: list[str], environment: dict[str, str]) -> None:
        started.append(environment["GLIBC_TUNABLES"])
        raise OSError("no such file")

    monkeypatch.setattr(os, "execve", execve)
    monkeypatch.setattr("powerinfer.cli.long_lived.is_glibc", lambda: True)
    start_for_long({"HOME": "/"})
    start_for_long({"GLIBC_TUNABLES": WANTED})
    assert started == [WANTED]
    monkeypatch.setattr("powerinfer.cli.long_lived.is_glibc", lambda: False)
    start_for_long({})
    assert len(started) == 1


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not is_glibc(), reason="another C library")
def test_what_lies_between_used_memory_goes_back() -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    blocks = [libc.malloc(16 << 10) for _ in range(2000)]
    for block in blocks:
        ctypes.memset(block, 1, 16 << 10)
    for i, block in enumerate(blocks):
        if i % 50:
            libc.free(block)
    before = resident()
    give_back_memory()
    gone = before - resident()
    for block in blocks[::50]:
        libc.free(block)
    assert gone > 16 << 20


def test_a_server_gives_it_back(demo: AsyncLlama, monkeypatch: pytest.MonkeyPatch) -> None:
    times: list[float] = []
    monkeypatch.setattr("powerinfer.server.run._TRIM_TICKS", 1)
    monkeypatch.setattr("powerinfer.server.run.give_back_memory", lambda: times.append(time.monotonic()))
    with serving(demo, ends_model=False):
        end = time.monotonic() + 30
        while len(times) < 2 and time.monotonic() < end:
            time.sleep(0.01)
    assert len(times) >= 2
