"""All kernels of all tables, by C programs that also run where Python does not.

Nothing here loads the engine into this process: it may be one for another processor (`make cross-aarch64`).
"""

from __future__ import annotations

import subprocess

import pytest

from tests.core import capi


@pytest.mark.parametrize("name", ["kernels_check", "heads_check"])
def test_programs(name: str) -> None:
    done = subprocess.run(capi.program(name), capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    # Something was checked, of the portable kernels at least.
    assert done.stdout.startswith("scalar: ")


def test_kernels_check_refuses_an_unknown_table() -> None:
    command = [*capi.program("kernels_check"), "mmx"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (2, "no table mmx on this machine\n")
