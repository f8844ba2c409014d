"""The thread pool and the limits it is sized by: the C stress program, and calls through the test library."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.core import capi


def test_stress_program() -> None:
    command = [*capi.program("pool_stress"), "100"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("n_threads", [1, 2, 5])
def test_every_member_runs_once(n_threads: int) -> None:
    ffi, lib = capi.load()
    seen: list[tuple[int, int]] = []

    @ffi.callback("te_task")
    def task(_ctx: object, team: object) -> None:
        lib.te_barrier(team)
        seen.append((team.ith, team.nth))  # type: ignore[attr-defined]

    pool = ffi.new("te_pool **")
    capi.check(lib.te_pool_new(n_threads, pool))
    try:
        assert lib.te_pool_n_threads(pool[0]) == n_threads
        for _ in range(3):
            seen.clear()
            lib.te_pool_run(pool[0], task, ffi.NULL)
            assert sorted(seen) == [(i, n_threads) for i in range(n_threads)]
    finally:
        lib.te_pool_free(pool[0])


@pytest.mark.parametrize("n_threads", [0, -1, 1025, 2**31 - 1])
def test_bad_number_of_threads(n_threads: int) -> None:
    ffi, lib = capi.load()
    with pytest.raises(capi.CoreError, match=f"n_threads is {n_threads}, must be 1 to 1024") as error:
        capi.check(lib.te_pool_new(n_threads, ffi.new("te_pool **")))
    assert error.value.status == "TE_ARGUMENT"


def _lay_out(root: Path, files: dict[str, str]) -> bytes:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text + "\n")
    return os.fsencode(root)


def test_smt_siblings_count_once(tmp_path: Path) -> None:
    ffi, lib = capi.load()
    siblings = {0: "0,4", 1: "1,5", 2: "2-3", 3: "2-3", 4: "0,4", 5: "1,5"}
    sys_cpu = "sys/devices/system/cpu"
    root = _lay_out(
        tmp_path, {f"{sys_cpu}/cpu{i}/topology/thread_siblings_list": text for i, text in siblings.items()}
    )
    for cpus, n_cores in [
        ([0, 1, 2, 3, 4, 5], 3),
        ([4, 5], 2),
        ([0, 4], 1),
        ([3], 1),
        ([0, 9, 10], 3),
        ([], 1),
    ]:
        assert lib.te_os_cores_of(root, ffi.new("int32_t[]", cpus), len(cpus)) == n_cores, cpus


NO_QUOTA = 2**63 - 1
NO_LIMIT = 2**64 - 1
FS = "sys/fs/cgroup"


@pytest.mark.parametrize(
    ("files", "quota_milli", "memory"),
    [
        ({}, NO_QUOTA, NO_LIMIT),
        ({"proc/self/cgroup": "0::/"}, NO_QUOTA, NO_LIMIT),
        (
            {"proc/self/cgroup": "0::/", f"{FS}/cpu.max": "150000 100000", f"{FS}/memory.max": "1073741824"},
            1500,
            2**30,
        ),
        (
            {"proc/self/cgroup": "0::/a", f"{FS}/a/cpu.max": "max 100000", f"{FS}/a/memory.max": "max"},
            NO_QUOTA,
            NO_LIMIT,
        ),
        # A parent's limit holds for its children; the smallest counts.
        (
            {
                "proc/self/cgroup": "0::/a/b",
                f"{FS}/a/b/cpu.max": "800000 100000",
                f"{FS}/a/cpu.max": "50000 25000",
                f"{FS}/a/memory.max": "5000",
                f"{FS}/a/b/memory.max": "6000",
            },
            2000,
            5000,
        ),
        # In a container the group's path may be the host's; the mount's root is then the container's group.
        ({"proc/self/cgroup": "0::/host/only", f"{FS}/cpu.max": "400000 100000"}, 4000, NO_LIMIT),
        (
            {
                "proc/self/cgroup": "7:memory:/m\n4:cpuset:/s\n3:cpu,cpuacct:/c/d\n1:name=systemd:/x",
                f"{FS}/cpu/c/cpu.cfs_quota_us": "300000",
                f"{FS}/cpu/c/cpu.cfs_period_us": "100000",
                f"{FS}/cpu/c/d/cpu.cfs_quota_us": "-1",
                f"{FS}/cpu/c/d/cpu.cfs_period_us": "100000",
                f"{FS}/memory/m/memory.limit_in_bytes": "777",
                f"{FS}/cpu/s/cpu.cfs_quota_us": "1",
                f"{FS}/cpu/s/cpu.cfs_period_us": "1",
            },
            3000,
            777,
        ),
        (
            {"proc/self/cgroup": "0::/", f"{FS}/cpu.max": "nonsense", f"{FS}/memory.max": ""},
            NO_QUOTA,
            NO_LIMIT,
        ),
        ({"proc/self/cgroup": "0::/", f"{FS}/cpu.max": "5 0"}, NO_QUOTA, NO_LIMIT),
    ],
)
def test_cgroup_limits(tmp_path: Path, files: dict[str, str], quota_milli: int, memory: int) -> None:
    _, lib = capi.load()
    root = _lay_out(tmp_path, files)
    assert lib.te_os_quota_milli(root) == quota_milli
    assert lib.te_os_memory_limit(root) == memory


MEMINFO = "MemTotal:  9000 kB\nMemFree: 1 kB\nMemAvailable:   4000 kB\n"
V1 = f"{FS}/memory/m"


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({}, NO_LIMIT),
        ({"proc/meminfo": MEMINFO}, 4000 * 1024),
        # What the group uses counts, its cache of files does not.
        (
            {
                "proc/meminfo": MEMINFO,
                "proc/self/cgroup": "0::/a",
                f"{FS}/a/memory.max": "1000000",
                f"{FS}/a/memory.current": "900000",
                f"{FS}/a/memory.stat": "anon 1\nfile 9\ninactive_file 300000\nactive_file 50000\nslab 7\n",
            },
            450000,
        ),
        # The parent has less left than its child.
        (
            {
                "proc/self/cgroup": "0::/a/b",
                f"{FS}/a/b/memory.max": "1000",
                f"{FS}/a/b/memory.current": "10",
                f"{FS}/a/memory.max": "5000",
                f"{FS}/a/memory.current": "4800",
            },
            200,
        ),
        (
            {"proc/self/cgroup": "0::/", f"{FS}/memory.max": "100", f"{FS}/memory.current": "300"},
            0,
        ),
        ({"proc/self/cgroup": "0::/", f"{FS}/memory.max": "100"}, 100),
        (
            {"proc/self/cgroup": "0::/", f"{FS}/memory.max": "max", f"{FS}/memory.current": "5"},
            NO_LIMIT,
        ),
        (
            {
                "proc/meminfo": MEMINFO,
                "proc/self/cgroup": "7:memory:/m",
                f"{V1}/memory.limit_in_bytes": "777000",
                f"{V1}/memory.usage_in_bytes": "700000",
                f"{V1}/memory.stat": "inactive_file 1\ntotal_inactive_file 20000\ntotal_active_file 3000\n",
            },
            100000,
        ),
    ],
)
def test_memory_that_is_left(tmp_path: Path, files: dict[str, str], left: int) -> None:
    _, lib = capi.load()
    assert lib.te_os_memory_left(_lay_out(tmp_path, files)) == left


def test_this_machine_has_cores_and_memory() -> None:
    _, lib = capi.load()
    assert 0 < lib.te_os_memory_available() <= lib.te_os_memory_bytes()
    n_allowed = len(os.sched_getaffinity(0))
    assert 1 <= lib.te_os_n_cores() <= lib.te_os_n_logical() <= n_allowed
    assert 0 < lib.te_os_memory_bytes() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_affinity_limits_the_cores() -> None:
    _, lib = capi.load()
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert lib.te_os_n_cores() == 1
        assert lib.te_os_n_logical() == 1
    finally:
        os.sched_setaffinity(0, before)
