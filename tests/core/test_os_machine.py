"""What te_os says of machines that are laid out as files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.core import capi


def lay_out(root: Path, files: dict[str, str]) -> Any:
    """te_machine of a root with these files."""
    ffi, lib = capi.load()
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    out = ffi.new("te_machine *")
    lib.te_os_machine(os.fsencode(root), out)
    return out


def text(value: Any) -> str:
    ffi, _ = capi.load()
    found: bytes = ffi.string(value)
    return found.decode()


def test_a_machine(tmp_path: Path) -> None:
    m = lay_out(
        tmp_path,
        {
            "proc/cpuinfo": "processor\t: 0\nvendor_id\t: X\nmodel name\t: Fast (R) CPU 9000 \nmodel\t: 1\n",
            "proc/meminfo": "MemTotal:       65536000 kB\nMemFree: 1 kB\nMemAvailable:   32768000 kB\n",
            "proc/version": "Linux version 6.1 (gcc)\n",
            "sys/devices/system/cpu/online": "0-15,32-47\n",
            "sys/devices/system/cpu/cpu0/topology/thread_siblings_list": "0,32\n",
            "sys/devices/system/node/online": "0-1\n",
            "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
            "etc/os-release": 'NAME="Some"\nPRETTY_NAME="Some Linux 12"\n',
            "proc/self/cgroup": "0::/me\n",
            "sys/fs/cgroup/me/cpu.max": "250000 100000\n",
            "sys/fs/cgroup/me/memory.max": "1000000000\n",
            "sys/fs/cgroup/me/memory.current": "300000000\n",
            "sys/fs/cgroup/me/memory.stat": "anon 200000000\nactive_file 60000000\ninactive_file 40000000\n",
        },
    )
    assert text(m.cpu) == "Fast (R) CPU 9000"
    assert (m.n_online, m.threads_per_core, m.n_numa) == (32, 2, 2)
    assert (m.memory_bytes, m.memory_free_bytes) == (65536000 * 1024, 800_000_000)  # without the cache
    assert (m.cpu_quota, m.memory_limit_bytes) == (2.5, 1_000_000_000)
    assert text(m.huge_pages) == "madvise" and text(m.distribution) == "Some Linux 12"
    assert text(m.container) == ""


def test_nothing_is_known_of_an_empty_one(tmp_path: Path) -> None:
    m = lay_out(tmp_path, {})
    assert [text(m.cpu), text(m.distribution), text(m.container), text(m.huge_pages)] == [""] * 4
    assert (m.n_online, m.threads_per_core, m.n_numa, m.memory_bytes, m.memory_limit_bytes) == (0,) * 5
    assert m.cpu_quota == 0
    assert text(m.os).startswith("Linux ")  # the kernel itself is asked


@pytest.mark.parametrize(
    ("files", "container"),
    [
        ({".dockerenv": ""}, "docker"),
        ({"run/.containerenv": ""}, "podman"),
        ({"proc/1/cgroup": "0::/kubepods/burstable/pod1\n"}, "kubernetes"),
        ({"proc/1/cgroup": "1:cpu:/docker/0123\n"}, "docker"),
        ({"proc/1/cgroup": "0::/lxc/a\n"}, "lxc"),
        ({"proc/1/cgroup": "0::/init.scope\n"}, ""),
        ({"proc/version": "Linux version 5.15.0-microsoft-standard-WSL2\n"}, "WSL"),
    ],
)
def test_containers(tmp_path: Path, files: dict[str, str], container: str) -> None:
    assert text(lay_out(tmp_path, files).container) == container


@pytest.mark.parametrize(
    ("listed", "n"),
    [
        ("0", 1),
        ("0-3", 4),
        ("0,2,4-5\n", 4),
        ("", 0),
        ("x", 0),
        ("3-1", 0),
        ("0-99999999999", 0),
        ("1-", 0),
        ("-1", 0),
    ],
)
def test_lists_of_cpus(tmp_path: Path, listed: str, n: int) -> None:
    assert lay_out(tmp_path, {"sys/devices/system/cpu/online": listed}).n_online == n


def test_nonsense(tmp_path: Path) -> None:
    long = "a" * 100_000
    m = lay_out(
        tmp_path,
        {
            "proc/cpuinfo": f"model name : {long}",
            "proc/meminfo": "MemTotal: 99999999999999999999999 kB\nMemAvailable: x\n",
            "sys/kernel/mm/transparent_hugepage/enabled": f"[{long}]",
            "etc/os-release": f'PRETTY_NAME="{long}',
            "proc/1/cgroup": "\0" * 5000,
        },
    )
    assert len(text(m.cpu)) == 127 and len(text(m.distribution)) == 95
    assert text(m.huge_pages) == "" and (m.memory_bytes, m.memory_free_bytes) == (0, 0)


def test_libraries() -> None:
    ffi, lib = capi.load()
    why = ffi.new("char[]", 100)
    assert lib.te_os_library(b"libnone-of-this-name.so", why, 100) == ffi.NULL
    assert "libnone-of-this-name.so" in text(why)
    assert lib.te_os_library(b"libnone-of-this-name.so", ffi.NULL, 0) == ffi.NULL
    library = lib.te_os_library(b"libc.so.6", why, 100)
    assert library != ffi.NULL and text(why) == ""
    function = ffi.new("int (**)(int)")
    assert lib.te_os_symbol(library, b"abs", function, ffi.sizeof("void *"))
    assert function[0](-3) == 3
    assert not lib.te_os_symbol(library, b"no_such_function", function, ffi.sizeof("void *"))
    assert not lib.te_os_symbol(library, b"abs", function, 4)
