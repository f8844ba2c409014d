"""Conversion of all formats to and from floats: the same bits on every machine, by a C program."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.core import capi

GOLDEN = Path(__file__).parents[1] / "golden" / "formats.txt"


def test_formats_check() -> None:
    """A new format or way of rounding belongs into the golden: `formats_check > tests/golden/formats.txt`."""
    command = [*capi.program("formats_check"), str(GOLDEN)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")
