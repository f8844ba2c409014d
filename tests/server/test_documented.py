"""The code blocks of docs/server.md, run as they are printed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from powerinfer import AsyncLlama
from powerinfer.cli import build_parser
from tests.server.conftest import serving

pytest.importorskip("fastapi", reason="the extra powerinfer[server] is not installed")
pytest.importorskip("uvicorn", reason="the extra powerinfer[server] is not installed")

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "server.md").read_text("utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
ADDRESS = "http://127.0.0.1:8080"


def of_kind(kind: str, mark: str) -> list[str]:
    return [code for name, code in BLOCKS if name == kind and mark in code]


def test_there_are_blocks() -> None:
    assert len(of_kind("python", "OpenAI")) == len(of_kind("python", "AsyncLlama")) == 1
    assert len(of_kind("sh", "curl")) == 2


@pytest.mark.parametrize("code", of_kind("sh", "curl"))
def test_curl(demo: AsyncLlama, code: str) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    command = ["bash", "-c"]
    env = os.environ | {"LD_PRELOAD": ""}  # under a sanitizer's runtime curl does not start
    with serving(demo, ends_model=False) as address:
        command.append(code.replace(ADDRESS, address))
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0 and '"choices"' in done.stdout and '"error"' not in done.stdout
    assert '"completion_tokens"' in done.stdout


@pytest.mark.parametrize("code", [*of_kind("python", "OpenAI"), *of_kind("python", "AsyncLlama")])
def test_python(demo: AsyncLlama, code: str) -> None:
    if "openai" in code:
        pytest.importorskip("openai")
    with serving(demo, ends_model=False) as address:
        done = subprocess.run(
            [sys.executable, "-c", code.replace(ADDRESS, address)],
            capture_output=True,
            text=True,
            timeout=100,
            cwd=ROOT,
        )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > 20


@pytest.mark.parametrize("line", re.findall(r"^ *(powerinfer serve.*)$", PAGE, re.MULTILINE))
def test_commands(line: str) -> None:
    words = line.split()[1:]
    assert build_parser(words).parse_args(words).command == "serve"
