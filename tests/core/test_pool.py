"""The thread pool and the limits it is sized by: the C stress program, and calls through the test library."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


@pytest.mark.parametrize(
    ("n_threads", "n_cpus", "n_busy", "room"),
    [
        (16, 16, 0.1, 16),  # what is measured is not exact
        (16, 16, 2, 14),
        (15, 16, 0, 15),
        (15, 16, 1.2, 15),
        (15, 16, 2.1, 14),
        (15, 16, 3.8, 12),
        (15, 32, 8, 15),
        (15, 32, 20, 12),
        (8, 16, 2, 8),  # 8 cores with two CPUs each
        (8, 16, 9.5, 6),
        (16, 16, 16, 4),
        (2, 2, 1, 1),
        (1, 1, 1, 1),
        (8, 4, 0, 4),  # more threads than CPUs
        (8, 16, -3, 8),  # a system that counts otherwise
    ],
)
def test_a_team_has_room_beside_others(n_threads: int, n_cpus: int, n_busy: float, room: int) -> None:
    _, lib = capi.load()
    assert lib.te_team_room(n_threads, n_cpus, n_busy) == room


def test_a_team_asks_only_where_it_misses_cpus_and_changes_by_two_answers() -> None:
    ffi, lib = capi.load()
    now_ns, had_ns, asked = 10**9, 0, 0

    @ffi.callback("int64_t(void)")
    def clock() -> int:
        return now_ns

    @ffi.callback("bool(int32_t *, int64_t *)")
    def others(n_cpus: Any, busy_ns: Any) -> bool:
        nonlocal asked
        asked += 1
        n_cpus[0], busy_ns[0] = 12, had_ns
        return True

    size, window, looked = ffi.new("te_team_size *"), ffi.new("te_window *"), ffi.new("bool *")
    lib.te_team_size_begin(size, 12)
    window.n_live, window.run_ns = 12, lib.TE_WINDOW_NS

    def members(busy: float, missing: float) -> int:
        """After 0.25 s in which others had `busy` CPUs and members missed `missing`."""
        nonlocal now_ns, had_ns
        now_ns += 250_000_000
        had_ns += int(busy * 250_000_000)
        window.idle_ns = int(missing * 250_000_000)
        window.n_live = lib.te_team_size_next(size, window, looked)
        return int(window.n_live)

    before = lib.te_team_system.others, lib.te_team_system.now_ns
    lib.te_team_system.others, lib.te_team_system.now_ns = others, clock
    try:
        assert [members(2, 0) for _ in range(3)] == [12] * 3
        assert asked == 0
        assert [members(2, 2) for _ in range(3)] == [12, 10, 10]  # between two answers lies what others had
        assert [members(0.8, 0), members(2, 0), members(0.8, 0)] == [10, 10, 10]
        assert [members(0, 0), members(0, 0)] == [11, 12]
        assert [members(5, 0) for _ in range(3)] == [12] * 3  # others have them while this team has no work
        window.n_beside = 1.0  # another team of this process has one, other programs two
        assert [members(2, 2) for _ in range(3)] == [12, 9, 9]
        window.n_beside = 0.0
        assert [members(2, 0), members(2, 0)] == [9, 10]
        # The mean, 2.25, leaves room for 10.
        assert [members(2.5, 1), members(2, 1), members(2.5, 1), members(2, 1)] == [10] * 4
        assert [members(3, 1), members(3, 1), members(3, 1)] == [9, 9, 9]
        assert [members(2, 0), members(2, 0)] == [9, 10]
        assert [members(2, 1), members(4, 1), members(2, 0)] == [10, 9, 9]  # not 8: the mean is 3
    finally:
        lib.te_team_system.others, lib.te_team_system.now_ns = before


class Two:
    """Teams of two threads on two CPUs, which nobody else uses: the first, if it runs, has both of them."""

    def __init__(self) -> None:
        self.ffi, self.lib = capi.load()
        self.threads: dict[int, int] = {}  # which team's
        self.n_live = 0
        self.task = self.ffi.callback("te_task", self._task)
        self.times = self.ffi.callback("bool(te_thread_times *)", self._times)
        self.others = self.ffi.callback("bool(int32_t *, int64_t *)", self._others)
        self.pools = []
        for _ in range(2):
            pool = self.ffi.new("te_pool **")
            capi.check(self.lib.te_pool_new(2, pool))
            self.pools.append(pool[0])

    def _task(self, ctx: Any, team: Any) -> None:
        self.threads[threading.get_ident()] = which = int(self.ffi.cast("intptr_t", ctx))
        if which == 1:
            self.n_live = team.nth
        time.sleep(0.004)

    def _times(self, out: Any) -> bool:
        busy = self.threads[threading.get_ident()] == 0
        out.ran_ns, out.delay_ns, out.n_dispatched = time.monotonic_ns() if busy else 1, 0, 1
        return True

    def _others(self, n_cpus: Any, busy_ns: Any) -> bool:
        n_cpus[0], busy_ns[0] = 2, 0
        return True

    def run(self, which: int) -> None:
        self.lib.te_pool_run(self.pools[which], self.task, self.ffi.cast("void *", which))

    def runs_until(self, n_live: int) -> bool:
        """Runs the second team until it has so many members; False: not in ten seconds."""
        end = time.monotonic() + 10
        while time.monotonic() < end:
            self.run(1)
            if self.n_live == n_live:
                return True
        return False


@pytest.fixture
def two() -> Iterator[Two]:
    two = Two()
    before = two.lib.te_team_system.times, two.lib.te_team_system.others
    two.lib.te_team_system.times, two.lib.te_team_system.others = two.times, two.others
    try:
        yield two
    finally:
        two.lib.te_team_system.times, two.lib.te_team_system.others = before
        for pool in two.pools:
            two.lib.te_pool_free(pool)


def test_teams_of_two_threads_share_the_cpus(two: Two) -> None:
    is_over = threading.Event()

    def first() -> None:
        while not is_over.is_set():
            two.run(0)

    thread = threading.Thread(target=first)
    thread.start()
    try:
        assert two.runs_until(1)
    finally:
        is_over.set()
        thread.join()
    assert two.runs_until(2)


def test_teams_of_one_thread_take_turns(two: Two) -> None:
    end = time.monotonic() + 1
    while time.monotonic() < end:
        two.run(0)
        two.run(1)
        assert two.n_live == 2


STAT = """\
cpu  1000 200 300 9000 5 6 7 0 0 0
cpu0 100 20 30 900 1 2 3 4 5 6
cpu1 200 40 60 800 1 4 5 0 0 0
cpu3 400 80 120 700 1 8 9 0 0 0
cpu11 1 1 1 1 1 1 1 0 0 0
intr 12345 1 2 3
"""


@pytest.mark.parametrize(
    ("cpus", "with_nice", "ticks"),
    [
        ([0], False, 135),
        ([0], True, 155),
        ([0, 1, 3, 11], False, 135 + 269 + 537 + 4),
        ([1, 11], True, 309 + 5),
        ([0, 2], False, None),  # a container may number its CPUs otherwise
        ([12], False, None),
        ([], False, None),
    ],
)
def test_how_long_cpus_were_busy(tmp_path: Path, cpus: list[int], with_nice: bool, ticks: int | None) -> None:
    ffi, lib = capi.load()
    root = _lay_out(tmp_path, {"proc/stat": STAT})
    out = ffi.new("int64_t *")
    known = lib.te_os_busy_ticks(root, ffi.new("int32_t[]", cpus), len(cpus), with_nice, out)
    assert known == (ticks is not None)
    assert ticks is None or out[0] == ticks


def test_nothing_is_known_of_busy_cpus_without_a_list(tmp_path: Path) -> None:
    ffi, lib = capi.load()
    for text in [None, "", "cpu0 1 2 3", "cpu0 a b c\nintr 1"]:
        if text is not None:
            _lay_out(tmp_path, {"proc/stat": text})
        out = ffi.new("int64_t *")
        assert not lib.te_os_busy_ticks(os.fsencode(tmp_path), ffi.new("int32_t[]", [0]), 1, False, out)


def test_this_process_is_none_of_the_others() -> None:
    ffi, lib = capi.load()
    cpus = {f"cpu{i}" for i in os.sched_getaffinity(0)}

    def stat() -> list[list[str]]:
        return [line.split() for line in Path("/proc/stat").read_text().splitlines()]

    if not cpus <= {line[0] for line in stat()}:
        pytest.skip("the system does not list these CPUs")

    def read() -> tuple[float, float]:
        """Seconds: what the library says others had, and what all had but this process."""
        n_cpus, ns = ffi.new("int32_t *"), ffi.new("int64_t *")
        for _ in range(1000):
            began = time.monotonic()
            assert lib.te_os_others(n_cpus, ns)
            lines, own = stat(), time.process_time()
            if time.monotonic() - began < 0.1 / len(cpus):  # else others may have had much in between
                break
        assert n_cpus[0] == len(cpus)
        columns = (1, 3, 6, 7) if os.nice(0) <= 0 else (1, 2, 3, 6, 7)  # 2: what gives way, as this may
        ticks = sum(int(line[i]) for line in lines if line[0] in cpus for i in columns)
        return ns[0] / 1e9, ticks / os.sysconf("SC_CLK_TCK") - own

    before = read()
    end = time.process_time() + 0.5
    while time.process_time() < end:
        pass
    after = read()
    assert after[0] - before[0] == pytest.approx(after[1] - before[1], abs=0.2)


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
        # One that is held up from a lower limit on.
        (
            {"proc/self/cgroup": "0::/a", f"{FS}/a/memory.max": "6000", f"{FS}/a/memory.high": "4000"},
            NO_QUOTA,
            4000,
        ),
        (
            {"proc/self/cgroup": "0::/", f"{FS}/memory.max": "6000", f"{FS}/memory.high": "max"},
            NO_QUOTA,
            6000,
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


@pytest.mark.parametrize(
    ("quota_us", "n", "left"),
    [
        ("max", 16, 16),
        (400000, 16, 4),
        (400000, 3, 3),
        (1000, 16, 1),
        (149000, 16, 1),
        (150000, 16, 2),
        (150000, 1, 1),
    ],
)
def test_a_quota_leaves_the_nearest_whole(tmp_path: Path, quota_us: object, n: int, left: int) -> None:
    _, lib = capi.load()
    root = _lay_out(tmp_path, {"proc/self/cgroup": "0::/", f"{FS}/cpu.max": f"{quota_us} 100000"})
    assert lib.te_os_under_quota(root, n) == left


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
