"""`powerinfer serve` as a process of its own, for tests that come from outside."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def running_server(*options: str, model: str = "demo") -> Iterator[str]:
    """Its address. Skips the test where the extra powerinfer[server] is missing."""
    for name in ("fastapi", "uvicorn"):
        pytest.importorskip(name, reason="powerinfer[server] is not installed")
    command = [sys.executable, "-m", "powerinfer", "serve", model, "--port", "0", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            said = ""
            for line in process.stderr:
                said += line
                if found := re.search(r"(http://\S+) serves", line):
                    break
            else:
                pytest.fail(f"the server did not start: {said}")
            yield found[1]
        finally:
            process.terminate()
            process.stderr.read()  # or a full pipe would hold it
            process.wait(60)
