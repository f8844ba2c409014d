"""Which kernel table a process gets: POWERINFER_ISA, and what is said of a name that cannot be had."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.core import capi
from tests.cpu.kernels import TABLES

PROGRAM = """
from tests.core import capi
ffi, lib = capi.load()
table = lib.te_cpu_kernels()
print(ffi.string(table.name).decode() if table else capi.last_error())
"""


def chosen(isa: str) -> str:
    """The name of the table, or the sentence about why there is none, in a new process."""
    env = os.environ | {"POWERINFER_ISA": isa, "POWERINFER_TEST_LIB": str(capi.library_path())}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=capi.ROOT, env=env, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.mark.parametrize("isa", TABLES)
def test_by_name(isa: str) -> None:
    assert chosen(isa) == isa


def test_the_best_without_a_name() -> None:
    assert chosen("") == list(TABLES)[-1]


def test_unknown_name() -> None:
    answer = chosen("mmx")
    start = 'POWERINFER_ISA is "mmx"; it can be scalar, '
    assert answer.startswith(start)
    named = answer.removeprefix(start).replace(" or ", ", ").split(", ")
    assert set(TABLES) - {"scalar"} <= set(named)
    assert len(named) == len(set(named)) and " or " in answer
