"""A GPU that fails while the CPU waits for it: the wait ends with what CUDA says, not after its limit. What
failed stays so for a process, so that the test has one of its own.

    pytest tests/gpu/test_lost_gpu.py
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from powerinfer import DeviceError
from powerinfer._engine import machine
from powerinfer._engine.session import Model, Session
from tests.native.hybrid import DEEP, IDS, options, place, write

# Busy for half a second, so that other kernels wait, then a fault that ends the context.
PTX = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry fail() {
    .reg .u64 %now, %end;
    .reg .pred %early;
    mov.u64 %end, %globaltimer;
    add.u64 %end, %end, 500000000;
LOOP:
    mov.u64 %now, %globaltimer;
    setp.lt.u64 %early, %now, %end;
    @%early bra LOOP;
    trap;
}
"""


def break_gpu(index: int) -> None:
    """In the context that the session uses."""
    cuda = ctypes.CDLL("libcuda.so.1")
    context, module, function, stream = (ctypes.c_void_p() for _ in range(4))
    assert cuda.cuInit(0) == 0
    assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), index) == 0
    assert cuda.cuCtxSetCurrent(context) == 0
    assert cuda.cuModuleLoadData(ctypes.byref(module), PTX) == 0
    assert cuda.cuModuleGetFunction(ctypes.byref(function), module, b"fail") == 0
    assert cuda.cuStreamCreate(ctypes.byref(stream), 1) == 0
    assert cuda.cuLaunchKernel(function, 8192, 1, 1, 1024, 1, 1, 0, stream, None, None) == 0


def lose(folder: Path, index: int, n_devices: int) -> str:
    """What a session says one of whose GPUs fails in a step, and in the next one."""
    with Model(write(folder, DEEP, "sparse")) as model:
        layers = [0, -1, 0, n_devices - 1, -1, n_devices - 1]
        plan = place(model, "some", "predicted", devices=layers, head=layers[-1], n_devices=n_devices)
        names = [f"cuda:{i}" for i in range(n_devices)]
        with Session(model, plan=plan, device=names, **options("predicted")) as s:
            s.feed(IDS[:8])
            break_gpu(index)
            with pytest.raises(DeviceError) as first:
                s.feed([3])
            with pytest.raises(DeviceError) as second:
                s.feed([3])
            assert s.length() == 8
    return f"{first.value}\n{second.value}"


@pytest.mark.parametrize(("index", "n_devices"), [(0, 1), (0, 2), (1, 2)])
def test_a_gpu_that_fails_is_found_out(tmp_path: Path, index: int, n_devices: int) -> None:
    """The limit of a wait is a minute."""
    if n_devices > len(machine.gpus().gpus):
        pytest.skip("one GPU")
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path), str(index), str(n_devices)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout.splitlines()
    assert len(said) == 2 and all("cudaError" in line and "did not answer" not in line for line in said), said


if __name__ == "__main__":
    print(lose(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
