"""Files with facts of their headers changed at random: they open and compute, or are refused by a sentence.

In a process of their own, since what is wanted is that none crashes.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import models, next_head

NAMES = ("qwen3moe", "mixtral", "qwen2moe", "gpt-oss", "glm4moe", "llama4", "deepseek2-v3", "gemma4")
NAMES += ("lfm2", "lfm2moe", "qwen3next", "qwen35", "qwen35moe", "falcon-h1", "granitehybrid")
NAMES += ("nemotron_h", "nemotron_h_moe")


def tried(path: Path, seed: int, n: int) -> None:
    words = [sys.executable, "-m", "tests.fuzz.headers", str(path), str(seed), str(n)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, f"seed {lines[-1:]} ended with {done.returncode}: {done.stderr[-2000:]}"
    assert lines[n - 1] == str(seed + n - 1) and "computed" in lines[-1]  # some are harmless


def write(path: Path, name: str) -> Path:
    if name in next_head.NAMES:
        return next_head.write(path, name)
    return models.write_dense(path, models.SPECS[name])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", NAMES)
def test_none_crashes(name: str, tmp_path: Path) -> None:
    tried(write(tmp_path / "m.gguf", name), 0, 200)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_none_of_many_crashes(name: str, tmp_path: Path) -> None:
    tried(write(tmp_path / "m.gguf", name), 1000, 3000)
