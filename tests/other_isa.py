"""The tests of a file once more, as on a processor with another instruction set."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from powerinfer._engine import _native


def run(isa: str, file: str) -> None:
    """In a process of its own; skips the calling test where the machine lacks the set."""
    if not _native.has_isa(isa):
        pytest.skip(f"this machine has no {isa}")
    if isa == _native.isa():
        return  # that is what this process has just tested
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--no-header", file]
    env, root = os.environ | {"POWERINFER_ISA": isa}, Path(__file__).parents[1]
    done = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
