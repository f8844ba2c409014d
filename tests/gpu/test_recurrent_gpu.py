"""Models with recurrent layers on a GPU, against the float64 reference: whatever lies where, whatever was
taken back, copied or saved. Run only when asked for: without a GPU they fail.

    pytest tests/gpu/test_recurrent_gpu.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from powerinfer._engine.session import Model
from tests import models
from tests.native.hybrid import has_second_gpu
from tests.native.test_hybrid_recurrent import (
    NAMES,
    drive,
    drive_experts_without_gates,
    drive_guesses,
    drive_splits,
    place,
)


@pytest.mark.parametrize("name", NAMES)
def test_every_split_gives_the_reference_s_answer(name: str, tmp_path: Path) -> None:
    drive_splits(name, tmp_path, "cuda")


@pytest.mark.parametrize("name", NAMES)
def test_guesses_that_are_taken_back(name: str, tmp_path: Path) -> None:
    path = models.write_dense(tmp_path / "m.gguf", models.SPECS[name])
    with Model(path) as m:
        drive_guesses(path, m, "all", device="cuda")


def test_experts_without_gates(tmp_path: Path) -> None:
    drive_experts_without_gates(tmp_path, "cuda")


def test_two_gpus(tmp_path: Path) -> None:
    if not has_second_gpu():
        pytest.skip("one GPU")
    path = models.write_dense(tmp_path / "m.gguf", models.SPECS["qwen35"])
    n = models.SPECS["qwen35"].n_layer
    with Model(path) as m:
        plan = place(m, "some", 64, [0] * (n // 2) + [1] * (n - n // 2) + [1])
        drive(path, m, plan, 64, 2, "two", device=["cuda:0", "cuda:1"])
