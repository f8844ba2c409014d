"""`powerinfer doctor`: true statements about this machine, in text and in JSON, with and without a GPU."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from powerinfer import ArgumentError, DeviceError, __version__
from powerinfer._engine import _native, cuda, machine
from powerinfer.cli import main
from powerinfer.models import doctor

ROOT = Path(__file__).resolve().parents[2]
Captured = pytest.CaptureFixture[str]
GPU = machine.Gpu(
    name="NVIDIA Test 9000",
    capability_major=9,
    capability_minor=0,
    n_sm=132,
    memory_bytes=24 << 30,
    free_bytes=20 << 30,
    memory_bytes_per_s=1008e9,
    pcie_generation=4,
    pcie_lanes=16,
)
DRIVER = machine.GpuDriver(is_present=True, cuda_version=12080, version="570.10", problem="", gpus=(GPU,))
NO_DRIVER = machine.GpuDriver(is_present=False, cuda_version=0, version="", problem="no driver: x", gpus=())


def test_true_of_this_machine() -> None:
    m = machine.machine_info()
    assert m.os.startswith(f"Linux {platform.release()}"[:60]) and platform.machine() in m.os
    assert 1 <= m.n_cores <= m.n_logical <= m.n_online
    assert m.n_logical <= len(os.sched_getaffinity(0))
    assert m.n_cores == machine.cores()
    pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    assert m.memory_bytes == pytest.approx(pages * page, rel=0.01)
    assert 0 < m.memory_free_bytes <= m.memory_bytes
    assert m.libc == " ".join(platform.libc_ver()) or platform.libc_ver()[0] != "glibc"
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    assert m.memlock_bytes == (None if soft == resource.RLIM_INFINITY else soft)


def test_the_report(capsys: Captured) -> None:
    report = doctor.examine(measure=False)
    text = dict(report.rows())
    assert report.version == __version__ and __version__ in text["powerinfer"]
    assert platform.python_version() in text["python"]
    assert report.isa == machine.isa() and report.isas[report.isa] == "available"
    assert f"numpy {np.__version__}" in text["packages"]
    assert "the CPU" in text["CUDA"] and "read rate" not in text and "cuBLASLt" in text
    assert main(["doctor", "--no-measure"]) == 0
    out = capsys.readouterr()
    assert out.err == "" and out.out.count("\n") == len(report.rows())


def test_every_extra_is_told() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    table = project.split("[project.optional-dependencies]\n")[1].split("\n[")[0]
    names = {line.split(" = ")[0]: line for line in table.splitlines() if " = [" in line}
    assert set(doctor.EXTRAS) == set(names) - {"convert", "docs", "test", "dev"}
    for name, packages in doctor.EXTRAS.items():
        assert all(package in names[name] for package in packages)


def test_an_extra_of_which_half_is_there() -> None:
    assert doctor._extra("server", {"fastapi": "1", "pydantic": "2"}) == (
        "fastapi 1, pydantic 2; incomplete: pip install uvicorn (the extra powerinfer[server])"
    )
    assert "not installed: pip install 'ray[data,serve]'" in doctor._extra("ray", {})
    assert doctor._extra("ray", {"ray": "2"}) == "ray 2"


def test_json(capsys: Captured) -> None:
    assert main(["doctor", "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert table["version"] == __version__ and table["read_gb_s"] > 0.1
    assert table["machine"]["n_cores"] == machine.cores()
    assert set(table["driver"]) == {"is_present", "cuda_version", "version", "problem", "gpus"}


@pytest.mark.parametrize("isa", ["avx9000", "scalar"])
def test_a_forced_instruction_set(isa: str) -> None:
    """One that does not exist is no reason for the doctor to fail."""
    env = dict(os.environ, POWERINFER_ISA=isa, PYTHONPATH=str(ROOT))
    command = [sys.executable, "-m", "powerinfer", "doctor", "--no-measure", "--json"]
    done = subprocess.run(command, capture_output=True, env=env, timeout=100)
    assert done.returncode == 0, done.stderr
    table = json.loads(done.stdout)
    assert table["isa"] == ("scalar" if isa == "scalar" else "")
    assert ("avx9000" in table["isa_problem"]) == (isa == "avx9000")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="about x86")
def test_why_a_better_instruction_set_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "has_isa", lambda name: name in ("scalar", "avx2"))
    flags = {"avx2", "fma", "f16c", "avx512f", "amx_tile", "amx_bf16", "amx_int8", "avx512_bf16"}
    found = doctor._isas(frozenset(flags))
    assert found["avx2"] == "available"
    assert "lacks avx512dq, avx512bw, avx512vl, avx512_vnni" in found["avx512"]
    assert "operating system does not let" in found["amx"]
    assert "does not show" in doctor._isas(frozenset())["amx"]


def test_gpus_in_words() -> None:
    report = doctor.examine(measure=False)
    rows = replace(report, driver=DRIVER).rows()
    assert ("GPU driver", "570.10, serves CUDA 12.8") in rows
    (gpu,) = (text for name, text in rows if name == "GPU")
    for word in ("NVIDIA Test 9000, 24.0 GiB (20.0 GiB free) at 1,008 GB/s", "capability 9.0", "PCIe 4 x16"):
        assert word in gpu
    rows = replace(report, driver=NO_DRIVER).rows()
    assert ("GPU", "none that can be used") in rows and ("GPU driver", "none (x)") in rows
    broken = replace(DRIVER, gpus=(), problem="the driver does not start: out of order (3)")
    assert any("out of order" in text for _, text in replace(report, driver=broken).rows())


def test_other_machines_in_words() -> None:
    report = doctor.examine(measure=False)
    m = replace(
        report.machine,
        container="WSL",
        threads_per_core=2,
        n_numa=2,
        cpu_quota=1.5,
        memory_limit_bytes=1 << 30,
        memlock_bytes=None,
        huge_pages="never",
    )
    text = "\n".join(text for _, text in replace(report, machine=m, read_gb_s=12.34).rows())
    for word in (
        "under WSL",
        "; SMT; 2 NUMA nodes",
        "1.5 CPUs",
        "may use 1.0 GiB",
        "no limit",
        "never (",
        "12.3 GB/s",
    ):
        assert word in text
    unknown = replace(m, cpu="", os="", distribution="", libc="", container="", huge_pages="", n_online=0)
    assert "unknown" in "\n".join(text for _, text in replace(report, machine=unknown).rows())


FAKE_DRIVER = """
#include <stddef.h>
#include <string.h>
int cuInit(unsigned flags) { return flags + INIT; }
int cuDriverGetVersion(int *v) { *v = 12040; return 0; }
int cuDeviceGetCount(int *n) { *n = COUNT; return 0; }
int cuDeviceGet(int *d, int i) { *d = 10 + i; return 0; }
int cuDeviceGetName(char *s, int n, int d) { strncpy(s, d == 10 ? "First" : "Second", n); return 0; }
int cuDeviceTotalMem_v2(size_t *n, int d) { *n = (size_t)d << 30; return 0; }
int cuDeviceGetAttribute(int *v, int a, int d) {
    *v = a == 16 ? 80 : a == 36 ? 1000000 : a == 37 ? 256 : a == 75 ? 8 : a == 76 ? 6 : -1;
    return d < 10 ? 1 : 0;
}
int cuDeviceGetPCIBusId(char *s, int n, int d) { strncpy(s, d == 10 ? "0:1" : "0:2", n); return 0; }
int cuGetErrorString(int r, const char **s) { *s = r == 100 ? "no device is here" : "?"; return 0; }
"""
FAKE_NVML = """
static int ready;
int nvmlInit_v2(void) { ready = 1; return 0; }
int nvmlShutdown(void) { ready = 0; return 0; }
int nvmlSystemGetDriverVersion(char *s, unsigned n) { (void)n; s[0] = '7'; s[1] = 0; return !ready; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **d) {
    *d = (void *)(long)(id[2] - '0');
    return !ready;
}
int nvmlDeviceGetMemoryInfo(void *d, unsigned long long *m) {
    m[0] = 5, m[1] = (long)d << 30, m[2] = 1;
    return 0;
}
int nvmlDeviceGetMaxPcieLinkGeneration(void *d, unsigned *v) { (void)d; *v = 4; return 0; }
int nvmlDeviceGetMaxPcieLinkWidth(void *d, unsigned *v) { (void)d; *v = 8; return 0; }
"""


def probe(folder: Path, **sources: str) -> machine.GpuDriver:
    """What a process sees whose driver is made of these sources."""
    for name, text in sources.items():
        (folder / f"{name}.c").write_text(text)
        library = folder / {"cuda": "libcuda.so.1", "nvml": "libnvidia-ml.so.1"}[name]
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, folder / f"{name}.c"], check=True)
    code = "import dataclasses, json; from powerinfer._engine import machine\n"
    code += "print(json.dumps(dataclasses.asdict(machine.gpus())))"
    env = dict(os.environ, LD_LIBRARY_PATH=str(folder), PYTHONPATH=str(ROOT))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=env, timeout=100)
    assert done.returncode == 0, done.stderr
    table = json.loads(done.stdout)
    return machine.GpuDriver(**table | {"gpus": tuple(machine.Gpu(**gpu) for gpu in table["gpus"])})


def fake(init: int = 0, count: int = 2) -> str:
    return FAKE_DRIVER.replace("INIT", str(init)).replace("COUNT", str(count))


def test_what_a_driver_says(tmp_path: Path) -> None:
    found = probe(tmp_path, cuda=fake(), nvml=FAKE_NVML)
    assert (found.is_present, found.cuda_version, found.version, found.problem) == (True, 12040, "7", "")
    first, second = found.gpus
    assert (first.name, second.name) == ("First", "Second")
    assert (first.memory_bytes, second.memory_bytes) == (10 << 30, 11 << 30)
    assert (first.free_bytes, second.free_bytes) == (1 << 30, 2 << 30)
    assert (second.n_sm, second.capability_major, second.capability_minor) == (80, 8, 6)
    assert second.memory_bytes_per_s == 2 * 1e9 * 256 / 8
    assert (second.pcie_generation, second.pcie_lanes) == (4, 8)


def test_drivers_that_are_broken(tmp_path: Path) -> None:
    for name, text, says in (
        ("silent", fake(init=100), "no device is here (100)"),
        ("empty", fake(count=0), "has no device"),
        ("old", "int cuInit(unsigned f) { return f; }", "too old"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        found = probe(folder, cuda=text)
        assert found.is_present and found.gpus == () and says in found.problem
    hostile = tmp_path / "hostile"
    hostile.mkdir()
    endless = fake().replace('strncpy(s, d == 10 ? "First" : "Second", n)', "memset(s, 'A', n)")
    found = probe(hostile, cuda=endless)  # a name without an end
    assert [gpu.name for gpu in found.gpus] == ["A" * 127] * 2
    for count in ("-3", "0"):
        assert "has no device" in probe(hostile, cuda=fake(count=int(count))).problem
    assert probe(hostile, cuda=fake(init=3, count=5)).gpus == ()
    junk = tmp_path / "junk"
    junk.mkdir()
    (junk / "libcuda.so.1").write_bytes(b"not a library")
    found = probe(junk)
    assert not found.is_present and "no driver" in found.problem
    found = probe(tmp_path / "silent", cuda=fake())  # without NVML: less is known
    assert [gpu.free_bytes for gpu in found.gpus] == [0, 0] and found.version == ""


def test_memory_of_a_container(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring in a small container must not be what ends it."""
    real = machine.machine_info()
    for limit, most in ((256 << 20, 64 << 20), (512 << 20, 128 << 20), (0, 128 << 20)):
        monkeypatch.setattr(machine, "machine_info", lambda n=limit: replace(real, memory_limit_bytes=n))
        assert machine.sample_bytes(1 << 30) <= (most if limit else 1 << 30)
        assert not limit or (machine.available_bytes() or 0) <= limit


def test_misuse() -> None:
    ffi, lib = _native.ffi, _native.lib
    driver = ffi.new("pi_gpu_driver *")
    for status in (
        lib.pi_machine_get_info(ffi.NULL),
        lib.pi_gpu_probe(ffi.NULL, 0, ffi.NULL),
        lib.pi_gpu_probe(driver, 1, ffi.NULL),
        lib.pi_gpu_probe(driver, -1, ffi.NULL),
    ):
        assert status == 3 and _native.message()
    assert lib.pi_gpu_probe(driver, 0, ffi.NULL) == 0


# ---- what a GPU needs


FACTS = machine.DeviceFacts(
    name="NVIDIA Test 9000",
    memory_bytes=24 << 30,
    free_bytes=20 << 30,
    context_bytes=0,
    can_map=True,
    no_mapping="",
    read_bytes_per_s=0,
    copy_bytes_per_s=0,
    zero_copy_bytes_per_s=0,
)


def rows_of(monkeypatch: pytest.MonkeyPatch, driver: machine.GpuDriver, answer: object) -> dict[str, str]:
    """The report's rows where the engine answers so about the GPU."""

    def facts(kind: str, index: int = 0, *, measure: bool = False) -> machine.DeviceFacts:
        assert kind == "cuda" and not measure
        found = answer[index] if isinstance(answer, list) else answer
        if isinstance(found, Exception):
            raise found
        assert isinstance(found, machine.DeviceFacts)
        return found

    monkeypatch.setattr(cuda, "device_facts", facts)
    monkeypatch.setattr(machine, "gpus", lambda: driver)
    rows = doctor.examine(measure=False).rows()
    at = [name for name, _ in rows].index("CUDA")
    return dict(rows) | {"mapping": rows[at + 1][1] if rows[at + 1][0] == "" else ""}


def test_whether_cuda_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    new = replace(DRIVER, cuda_version=13000)
    text = rows_of(monkeypatch, new, FACTS)
    assert text["CUDA"].startswith("used: NVIDIA Test 9000") and "can be registered" in text["mapping"]
    text = rows_of(monkeypatch, new, replace(FACTS, can_map=False, no_mapping="limits"))
    assert "cannot be registered (limits)" in text["mapping"]
    none = DeviceError("this build has no CUDA backend: no such file")
    text = rows_of(monkeypatch, DRIVER, none)
    assert text["CUDA"].startswith("not in this build") and "plan" in text["CUDA"] and not text["mapping"]
    assert "plan" not in rows_of(monkeypatch, NO_DRIVER, none)["CUDA"]
    text = rows_of(monkeypatch, DRIVER, DeviceError("no"))  # serves CUDA 12.8
    assert "(570.10) serves CUDA 12.8, and the CUDA library needs 13.0" in text["CUDA"]
    assert "580 or later" in text["CUDA"]
    assert rows_of(monkeypatch, new, DeviceError("out of order"))["CUDA"].endswith("not used: out of order")
    assert rows_of(monkeypatch, NO_DRIVER, DeviceError("x"))["CUDA"].startswith("built; there is no GPU")
    two = replace(new, gpus=new.gpus[:1] * 2)
    text = rows_of(monkeypatch, two, [DeviceError("too old"), FACTS])
    assert text["CUDA"].startswith("used: NVIDIA Test 9000; not cuda:0: too old") and text["mapping"]


def test_cublas_is_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """First where the loader looks, then in the package of the extra."""
    loads: set[str] = set()
    asked: list[str] = []

    def load(name: str) -> bool:
        asked.append(name)
        return name in loads

    monkeypatch.setattr(_native, "load_library", load)
    library = tmp_path / "nvidia_cublas-13.1.dist-info"
    library.mkdir()
    (library / "METADATA").write_text("Metadata-Version: 2.1\nName: nvidia-cublas\nVersion: 13.1\n")
    (library / "RECORD").write_text("nvidia/cu13/lib/libcublasLt.so.13,,\n")
    file = tmp_path / "nvidia" / "cu13" / "lib" / "libcublasLt.so.13"
    cuda.load_cublas.cache_clear()
    assert cuda.load_cublas() is None and asked == ["libcublasLt.so.13", "libcublasLt.so.12"]
    assert doctor._cublas() == cuda.WITHOUT_CUBLAS and "powerinfer[cuda]" in cuda.WITHOUT_CUBLAS
    monkeypatch.syspath_prepend(str(tmp_path))
    cuda.load_cublas.cache_clear()
    assert cuda.load_cublas() is None  # the package's list names a file that is not there
    file.parent.mkdir(parents=True)
    file.touch()
    loads.add(str(file))
    cuda.load_cublas.cache_clear()
    found = cuda.load_cublas()
    assert found is not None and found.path == str(file) and found.source == "nvidia-cublas"
    assert doctor._cublas() == "libcublasLt.so.13 of the package nvidia-cublas"
    loads.add("libcublasLt.so.12")
    cuda.load_cublas.cache_clear()
    assert doctor._cublas() == "libcublasLt.so.12 of the system"
    cuda.load_cublas.cache_clear()


def test_a_library_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "no.so").write_bytes(b"no")
    assert not _native.load_library(str(tmp_path / "no.so"))
    assert _native.load_library("libm.so.6")


@pytest.mark.parametrize(
    ("before", "after", "taken"), [(9 << 30, 8704 << 20, 512 << 20), (9, 10, 0), (9 << 30, 4 << 30, 0)]
)
def test_what_other_programs_take_is_no_context(before: int, after: int, taken: int) -> None:
    assert machine.context_taken(before, after) == taken


def test_what_a_device_says() -> None:
    facts = machine.device_facts("host", 3, measure=True)
    assert facts.name and facts.can_map and facts.no_mapping == "" and facts.context_bytes == 0
    with pytest.raises(DeviceError, match=r"no CUDA backend|no NVIDIA driver"):  # as the package was built
        machine.device_facts("cuda")
    with pytest.raises(ArgumentError, match="device"):
        machine.device_facts("tpu")
