"""Sessions of one model in several threads: the C program session_stress, on a small model of each kind."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests import models
from tests.core import capi


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "sign"),
    [(name, False) for name in ("llama-relu", "falcon-7b", "opt", "qwen3")]
    + [(name, True) for name in ("llama-relu", "falcon-7b", "opt")],
)
def test_sessions_side_by_side(tmp_path: Path, name: str, sign: bool) -> None:
    spec = models.SPECS[name]
    path = tmp_path / "model.gguf"
    if sign:
        meta = models.metadata(spec) | {"powerinfer.predictor": "sign"}
        models.write(path, meta, models.file_tensors(spec, models.draw(spec)))
    elif spec.predictor:
        models.write_sparse(path, spec, models.draw_predictor(spec))
    else:
        models.write_dense(path, spec)
    command = [*capi.program("session_stress"), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stderr) == (0, "")
