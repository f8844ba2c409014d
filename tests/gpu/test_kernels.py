"""The CUDA kernels against doubles, by a C++ program. Run only when asked for: without a GPU they fail.

The programs are in the folder that POWERINFER_CUDA_BUILD names, else in build/cuda, where
`scripts/gpu_kernels.sh build` makes them.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def build() -> Path:
    return Path(os.environ.get("POWERINFER_CUDA_BUILD") or ROOT / "build" / "cuda")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = build() / "gpu_kernels_check"
    assert program.is_file(), f"{program} is missing: `scripts/gpu_kernels.sh build` makes it"
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.parametrize(
    "part",
    [
        *("device", "linear", "ffn", "fused", "routes", "choices", "experts", "kept", "merge", "fetches"),
        *("attention", "latent", "recurrent", "embed", "graph"),
    ],
)
def test_kernels(part: str) -> None:
    done = run(part)
    assert (done.returncode, done.stderr) == (0, "")
    found = re.search(rf"^{part}: (\d+) values, 0 off$", done.stdout, re.MULTILINE)
    assert found is not None and int(found[1]) > 0


def test_exports_its_two_tables() -> None:
    library = build() / "libpowerinfer_cuda.so"
    done = subprocess.run(
        ["nm", "-D", "--defined-only", library], capture_output=True, text=True, timeout=60, check=True
    )
    names = [line.split()[-1] for line in done.stdout.splitlines() if line.split()[-2] != "A"]
    assert sorted(names) == ["pi_device_cuda", "te_cuda_table"]
