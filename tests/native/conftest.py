"""What tests in this folder are given."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest

from tests.native.faults import LIBRARY, Faults


@pytest.fixture
def faults() -> Iterator[Faults]:
    found = Faults.in_dll(ctypes.CDLL(LIBRARY), "pi_host_faults")
    yield found
    for name, _ in Faults._fields_:
        setattr(found, name, 0)
