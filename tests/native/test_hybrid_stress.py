"""Hybrid sessions side by side, and without memory: the C program hybrid_stress."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests import models
from tests.core import capi
from tests.native.hybrid import DEEP, write


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("spec", "form"),
    [(DEEP, "sparse"), (models.SPECS["opt"], "dense"), (models.SPECS["falcon-40b"], "sparse")],
)
def test_stress_program(tmp_path: Path, spec: models.Spec, form: str) -> None:
    command = [*capi.program("hybrid_stress"), str(write(tmp_path, spec, form))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stderr) == (0, "")
