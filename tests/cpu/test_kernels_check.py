"""All kernels of all tables, by a C program that also runs where Python does not."""

from __future__ import annotations

import subprocess

from tests.core import capi


def test_kernels_check() -> None:
    done = subprocess.run(
        capi.program("kernels_check"), capture_output=True, text=True, timeout=600, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    # Something was checked, of the portable kernels at least.
    assert done.stdout.startswith("scalar: ")


def test_kernels_check_refuses_an_unknown_table() -> None:
    command = [*capi.program("kernels_check"), "mmx"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (2, "no table mmx on this machine\n")
