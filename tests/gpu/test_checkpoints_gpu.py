"""The architectures of tests/checkpoints.py on a GPU, against the logits of transformers. Run only when asked
for: without a GPU, or in a build without the CUDA backend, they fail.

    pytest tests/gpu/test_checkpoints_gpu.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import checkpoints, reference
from tests.native.test_checkpoints import CPU_ALONE, drive_streams, file, folder, last_rows, n_ctx, on_device

__all__ = ["folder"]


@pytest.mark.parametrize("share", [0.3, 1.0])
@pytest.mark.parametrize("name", [name for name in checkpoints.CASES if name not in CPU_ALONE])
def test_on_a_gpu(name: str, share: float, folder: Path) -> None:
    golden = checkpoints.golden(name)
    with on_device(file(folder, name), share, n_ctx(name), device="cuda") as session:
        rows = last_rows(session, golden)
    assert reference.relative_error(rows, golden.logits[-4:]) < 2e-2  # prompts are multiplied in F16


def test_streams_on_a_gpu(folder: Path) -> None:
    drive_streams(file(folder, "gemma3n"), "cuda")
