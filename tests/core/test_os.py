"""Files and memory through te_os: what maps, what is refused, how memory is aligned."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.core import capi


def test_map_holds_the_file(tmp_path: Path) -> None:
    ffi, lib = capi.load()
    path = tmp_path / "file"
    for content in [b"x", os.urandom(10_000)]:
        path.write_bytes(content)
        m = ffi.new("te_mapping *")
        capi.check(lib.te_os_map(os.fsencode(path), m))
        lib.te_os_prefault(m.data, m.n_bytes)
        assert bytes(ffi.buffer(ffi.cast("char *", m.data), m.n_bytes)) == content
        lib.te_os_unmap(m)
        assert (m.data, m.n_bytes) == (ffi.NULL, 0)
        lib.te_os_unmap(m)


def test_map_of_an_empty_file(tmp_path: Path) -> None:
    ffi, lib = capi.load()
    (tmp_path / "empty").touch()
    m = ffi.new("te_mapping *")
    capi.check(lib.te_os_map(os.fsencode(tmp_path / "empty"), m))
    assert (m.data, m.n_bytes) == (ffi.NULL, 0)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("missing", "cannot open: No such file or directory"),
        ("directory", "is a directory, not a regular file"),
        ("fifo", "is a device, not a regular file"),
    ],
)
def test_map_refuses(tmp_path: Path, kind: str, reason: str) -> None:
    ffi, lib = capi.load()
    path = tmp_path / kind
    if kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)  # opening one for reading blocks until a writer comes: this must not
    m = ffi.new("te_mapping *")
    with pytest.raises(capi.CoreError) as error:
        capi.check(lib.te_os_map(os.fsencode(path), m))
    assert error.value.status == "TE_IO"
    assert error.value.message == f"{path}: {reason}"
    assert m.data == ffi.NULL


@pytest.mark.parametrize(
    "n_bytes", [0, 1, 63, 64, 65, 4097, (2 << 20) - 1, 2 << 20, (2 << 20) + 1, 5_000_001]
)
def test_memory_is_aligned_and_zero(n_bytes: int) -> None:
    ffi, lib = capi.load()
    blocks = [lib.te_os_alloc(n_bytes) for _ in range(3)]
    for p in blocks:
        assert p != ffi.NULL
        assert int(ffi.cast("uintptr_t", p)) % (2 << 20 if n_bytes >= 2 << 20 else 64) == 0
        memory = ffi.buffer(ffi.cast("char *", p), n_bytes)
        assert bytes(memory) == bytes(n_bytes)
        memory[:] = b"\xff" * n_bytes  # dirty memory that is handed out again must be zeroed
    for p in blocks:
        lib.te_os_free(p, n_bytes)
    p = lib.te_os_alloc(n_bytes)
    assert bytes(ffi.buffer(ffi.cast("char *", p), n_bytes)) == bytes(n_bytes)
    lib.te_os_free(p, n_bytes)


@pytest.mark.parametrize("n_bytes", [2**64 - 1, 2**64 - 4096, 2**63, 2**63 - 1, 2**62])
def test_absurd_sizes_give_null(n_bytes: int) -> None:
    ffi, lib = capi.load()
    assert lib.te_os_alloc(n_bytes) == ffi.NULL


def test_wait_returns() -> None:
    ffi, lib = capi.load()
    word = ffi.new("uint32_t *", 7)
    lib.te_os_wait(word, 8, -1)  # the word differs: no sleep
    before = lib.te_os_now_ns()
    while lib.te_os_now_ns() - before < 20_000_000:  # an early return is allowed, an endless sleep is not
        lib.te_os_wait(word, 7, 20_000_000)


def _slept() -> int:
    """How often this thread gave up its CPU to wait."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def test_rest_sleeps_where_others_keep_the_cpu() -> None:
    """A spinning or yielding thread would wait until the other's time is over, again and again."""
    _, lib = capi.load()
    all_cpus = os.sched_getaffinity(0)
    here = {min(all_cpus)}
    program = f"import os; os.sched_setaffinity(0, {here}); print(flush=True)\nwhile True: pass"
    other = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    try:
        assert other.stdout is not None
        other.stdout.readline()
        os.sched_setaffinity(0, here)  # of this thread
        before = _slept()
        for _ in range(1000):
            lib.te_os_rest(0)
        assert _slept() == before  # just begun: spins
        end = time.monotonic() + 60
        while _slept() < before + 10 and time.monotonic() < end:
            lib.te_os_rest(1_000_000)
        assert _slept() >= before + 10
    finally:
        os.sched_setaffinity(0, all_cpus)
        other.kill()
        other.communicate()
