"""What the process keeps of memory that it does not use any more."""

from __future__ import annotations

import ctypes
import os
import sys
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


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """The environments of all starts."""
    found: list[dict[str, str]] = []

    def execve(path: str, words: list[str], environment: dict[str, str]) -> None:
        found.append(environment)
        raise OSError("no such file")

    monkeypatch.setattr(os, "execve", execve)
    monkeypatch.setattr("powerinfer.cli.long_lived.is_glibc", lambda: True)
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "powerinfer", "serve"])
    monkeypatch.setattr(sys, "argv", ["powerinfer", "serve"])
    return found


def test_it_starts_again_once(monkeypatch: pytest.MonkeyPatch, started: list[dict[str, str]]) -> None:
    start_for_long({"HOME": "/"})
    start_for_long({"GLIBC_TUNABLES": WANTED})
    assert [each["GLIBC_TUNABLES"] for each in started] == [WANTED]
    # The C library of a program with capabilities has taken its variable away.
    start_for_long({name: value for name, value in started[0].items() if name != "GLIBC_TUNABLES"})
    monkeypatch.setattr("powerinfer.cli.long_lived.is_glibc", lambda: False)
    start_for_long({})
    assert len(started) == 1


@pytest.mark.parametrize(
    ("words", "at_first"),
    [(["x", "serve"], ["python", "own.py"]), (["-", "serve"], ["python", "-", "serve"])],
)
def test_another_program_is_not_started_again(
    monkeypatch: pytest.MonkeyPatch, started: list[dict[str, str]], words: list[str], at_first: list[str]
) -> None:
    monkeypatch.setattr(sys, "orig_argv", at_first)
    monkeypatch.setattr(sys, "argv", words)
    start_for_long({})
    assert not started


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not is_glibc(), reason="another C library")
@pytest.mark.skipif("libasan" in os.environ.get("LD_PRELOAD", ""), reason="ASan has a malloc of its own")
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
