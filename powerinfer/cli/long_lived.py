"""A process that lives long and has many threads keeps no memory for each of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress

# glibc gives threads heaps of their own (8 for each core), each of which keeps what it had at its fullest,
# and caches, which hold memory between what others use: 10 MiB and more in an hour. It reads how many of both
# only at the start of a process.
_WANTED = {"glibc.malloc.arena_max": "1", "glibc.malloc.tcache_count": "0"}

_STARTED = "POWERINFER_STARTED_AGAIN"
"""The number of a process that has been."""


def tunables(given: str) -> str:
    """GLIBC_TUNABLES with what is wanted here; what the user has set stays."""
    have = [each for each in given.split(":") if each]
    names = {each.partition("=")[0] for each in have}
    return ":".join(have + [f"{name}={value}" for name, value in _WANTED.items() if name not in names])


def is_glibc() -> bool:
    with suppress(AttributeError, ValueError, OSError):
        return bool(os.confstr("CS_GNU_LIBC_VERSION"))
    return False


def start_for_long(environment: Mapping[str, str]) -> None:
    """Starts this program again, as the same process, unless it has been, or its words are not those that
    Python was started with: who starts those again gets another program."""
    given = environment.get("GLIBC_TUNABLES", "")
    wanted = tunables(given)
    if wanted == given or not is_glibc() or not sys.executable:
        return
    # Of a program with capabilities (setcap) the C library takes its own variable away each time.
    process = str(os.getpid())
    words = sys.argv[1:]
    is_other = sys.argv[:1] == ["-"] or sys.orig_argv[len(sys.orig_argv) - len(words) :] != words
    if environment.get(_STARTED) == process or is_other:
        return
    with suppress(OSError):  # then without
        again = {**environment, "GLIBC_TUNABLES": wanted, _STARTED: process}
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], again)
