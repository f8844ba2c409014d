"""Whole models on every instruction set of a machine, by a C program that also runs where Python does not.

Where the engine is this machine's own, test_logits.py does more; then only the model that ships is computed.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests import models
from tests.core import capi

ROOT = Path(__file__).parents[2]
# Relative error of F16 weights and an F16 KV cache, as in test_logits.py.
TOLERANCE = 2e-3

emulated = pytest.mark.skipif("POWERINFER_TEST_RUN" not in os.environ, reason="test_logits.py does more here")


def engine_check(model: Path, golden: Path) -> None:
    command = [*capi.program("engine_check"), str(model), str(golden)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("scalar: ")


def write_golden(
    path: Path, golden: models.Golden, modes: Iterable[str], steps: Iterable[tuple[int, Any]]
) -> Path:
    """A golden as engine_check.c reads it: `steps` are the logits after so many greedy tokens."""

    def ids(name: str, tokens: Any) -> str:
        return " ".join([name, *map(str, tokens)])

    answers = [
        ids("prompt", golden.prompt),
        ids("greedy", golden.greedy),
        *(ids(f"logits {step}", (f"{i}:{x:.8g}" for i, x in enumerate(row))) for step, row in steps),
    ]
    lines = [f"tolerance {TOLERANCE}"]
    for mode in modes:
        lines += [f"case {mode} {len(golden.greedy)}", *answers]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_engine_check_of_the_demo() -> None:
    """Of a new demo model its golden is written anew: see engine_check.c.

    Activations of quantised products are rounded to 8 bits per 32 values, after which an answer may be 3e-2
    from the exact one (test_demo.py); two of them, rounded differently, are sqrt(2) times that apart.
    """
    engine_check(ROOT / "powerinfer" / "demo" / "demo.gguf", ROOT / "tests" / "golden" / "demo.txt")


@emulated
@pytest.mark.parametrize("name", models.SPECS)
def test_engine_check_of_all_architectures(tmp_path: Path, name: str) -> None:
    golden = models.golden(name)
    modes = ("dense", "exact") if golden.spec.relu else ("dense",)
    text = write_golden(tmp_path / "golden.txt", golden, modes, [(0, golden.logits[-1])])
    engine_check(golden.write(tmp_path), text)


@emulated
@pytest.mark.parametrize("name", [name for name, spec in models.SPECS.items() if spec.predictor])
def test_engine_check_of_predictors(tmp_path: Path, name: str) -> None:
    golden = models.golden(name, "decode")
    last = len(golden.logits) - 1
    steps = [(step, golden.logits[step]) for step in (0, 1, last // 2, last)]
    text = write_golden(tmp_path / "golden.txt", golden, ("predicted",), steps)
    engine_check(golden.write(tmp_path), text)
