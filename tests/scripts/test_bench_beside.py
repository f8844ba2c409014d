"""scripts/bench_beside.py on the demo model, briefly: that it runs and says what it measures."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench_beside.py"


def test_runs() -> None:
    import powerinfer.demo as demo

    model = Path(demo.__path__[0]) / "demo.gguf"
    options = ["--streams", "1", "3", "--prompt", "200", "--quiet", "0.1", "--prompts", "1", "-t", "1"]
    done = subprocess.run(
        [sys.executable, SCRIPT, model, *options], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("0 tokens") and len(lines) == 3
    for n, line in zip((1, 3), lines[1:], strict=True):
        found = re.search(r" (\d+) streams, prompt 1: .* s; parts ({.*})", line)
        assert found is not None and int(found[1]) == n
        parts = {int(size): int(times) for size, times in re.findall(r"(\d+): (\d+)", found[2])}
        assert sum(size * times for size, times in parts.items()) >= 199
