"""The operations of prompts against doubles, by a C++ program, as test_kernels.py runs the other one.

POWERINFER_CUBLASLT names cuBLASLt; without it only the engine's own products are checked.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("part", ["halve", "gemm", "act", "experts", "attention", "load"])
def test_prefill(part: str) -> None:
    build = Path(os.environ.get("POWERINFER_CUDA_BUILD") or ROOT / "build" / "cuda")
    program = build / "gpu_prefill_check"
    assert program.is_file(), f"{program} is missing: `scripts/gpu_kernels.sh build` makes it"
    blas = os.environ.get("POWERINFER_CUBLASLT")
    done = subprocess.run(
        [program, *([blas] if blas else []), part], capture_output=True, text=True, timeout=600, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    found = re.search(rf"^{part}: (\d+) values, 0 off$", done.stdout, re.MULTILINE)
    assert found is not None and int(found[1]) > 0
