"""scripts/bench_overhead.py on the demo model, briefly: that it runs and names every way."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench_overhead.py"


def test_every_way_is_measured() -> None:
    command = [sys.executable, str(SCRIPT), "demo", "-n", "3", "-r", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("engine ") and "3 tokens" in lines[0]
    ways = ["loop", "call", "stream", "chat", "greedy", "stops", "penalty", "logprobs", "together"]
    assert [line.split()[0] for line in lines[1:]] == ways
    assert all(float(line.split()[2]) > 0 for line in lines[1:])
