"""What README and tutorial show, run line for line as it is printed, on a small random model and short texts.

Commands that would take minutes get options at their end that make them smaller.
"""

from __future__ import annotations

import importlib.util
import io
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from powerinfer._engine.file import find_model
from powerinfer.cli import main
from tests import models
from tests.convert import folders

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
TUTORIAL = (ROOT / "docs" / "bring-your-own-model.md").read_text(encoding="utf-8")
PERFORMANCE = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
SPEC = models.SPECS["llama-relu-gqa"]
TEXT_BYTES = 6000
SMALLER = {
    "bench": "-p 8 -n 0 -r 1 -t 1",
    "doctor": "--no-measure",
    "profile": "--tokens 300",
    "predictor train": "--tokens 256 --held-out 64 --steps 2 --batch 32 --rank 32 --budget 0.9",
    "predictor svd": "--tokens 256 --held-out 64 --rank 32 --budget 0.9",
    "predictor sign": "--tokens 256",
    "predictor calibrate": "--tokens 256",
    "predictor check": "--tokens 128 --single 4 --chunks 2",
    "perplexity": "--chunks 2 -c 32",
    "plan": "--cpu-gbps 40",
}


def blocks(text: str, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def section(text: str, title: str) -> str:
    return text.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def run(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that begins with `powerinfer`; what comes after two blanks is a remark."""
    words = shlex.split(re.split(r" {2,}", line.strip())[0])[1:]
    if words[:2] == ["predictor", "train"] and importlib.util.find_spec("torch") is None:
        words[1] = "svd"
    name = " ".join(words[:2]) if words[0] == "predictor" else words[0]
    if "--plot" in words and importlib.util.find_spec("matplotlib") is None:
        del words[words.index("--plot") :][:2]
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n/quit\n"))
    assert main([*words, *SMALLER.get(name, "").split()]) == 0, line


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the documents name: folders of a checkpoint and its predictors."""
    monkeypatch.chdir(tmp_path)
    for name in ("HF_DIR", "powerinfer-demo", "ReluLLaMA-7B"):
        folders.write_folder(tmp_path / name, SPEC)
    folders.write_predictors(tmp_path / "ReluLLaMA-7B-Predictor", models.draw_predictor(SPEC))
    return tmp_path


def write_texts(*names: str) -> None:
    script = ROOT / "scripts" / "demo_corpus.py"
    sizes = ("--training-bytes", str(TEXT_BYTES), "--held-out-bytes", str(TEXT_BYTES))
    subprocess.run([sys.executable, str(script), "--out", ".", *sizes], check=True, capture_output=True)
    for name, source in zip(names, ("training.txt", "held-out.txt"), strict=True):
        Path(name).write_text(Path(source).read_text(encoding="utf-8")[:TEXT_BYTES], encoding="utf-8")


def test_own_model_of_the_readme(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_texts("corpus.txt", "held-out.txt")
    lines = re.findall(r"^ {4}(powerinfer .*)$", section(README, "Your own model"), re.MULTILINE)
    assert len(lines) == 7
    for line in lines:
        run(line, monkeypatch)
    assert (place / "model.pw.gguf").exists() and (place / "small.gguf").exists()


def test_terminal_of_the_readme(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = re.findall(r"^ {4}(powerinfer .*)$", section(README, "In the terminal"), re.MULTILINE)
    assert len(lines) == 8
    for line in lines:
        if "serve" not in line and "pull" not in line:  # tests/server and test_hub.py do that
            run(line.replace("[MODEL]", "demo").replace("MODEL", "demo"), monkeypatch)


def test_python_of_the_readme(place: Path) -> None:
    """The stand-in for a GPU takes the budget."""
    for name in ("model.gguf", "model.powerinfer.gguf"):
        (place / name).symlink_to(find_model("demo"))
    code = "\n".join(blocks(README, "python"))
    code = code.replace("vram_budget=8)", 'vram_budget=8, devices=["host"])')
    assert code.count('"host"') == 1
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "LayerStep(" in done.stdout
    *_, expected, measured = done.stdout.splitlines()
    share, speed = expected.split()
    assert 0 < float(share) <= 1 and float(speed) > 0
    assert measured == "None"  # of fewer than 200 tokens


@pytest.mark.slow  # that its commands are accepted is checked every time: test_documented_commands.py
def test_tutorial(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_texts("training.txt", "held-out.txt")
    shutil.copy(find_model("demo"), "llama-7b-8l.gguf")
    lines = [line for block in blocks(TUTORIAL, "sh") for line in block.splitlines()]
    assert lines[:2] == ["pip install '.[plot,train]'", "python scripts/demo_corpus.py --out ."]
    for line in lines[2:]:
        run(line, monkeypatch)
    for line in re.findall(r"^ {4}(powerinfer .*)$", TUTORIAL, re.MULTILINE):
        run(line, monkeypatch)
    for code in blocks(TUTORIAL, "python"):
        exec(compile(code, "bring-your-own-model.md", "exec"), {})


def test_scripts_of_the_measurements() -> None:
    """They take hours or a GPU, so only their options are looked at."""
    flags: dict[str, set[str]] = {}
    for line in (line for block in blocks(PERFORMANCE, "sh") for line in block.splitlines()):
        words = shlex.split(line)
        for script in (word for word in words if word.startswith("scripts/")):
            assert (ROOT / script).exists()
            flags.setdefault(script, set()).update(
                word.split("=")[0] for word in words if word.startswith("-")
            )
    assert len(flags) >= 4
    for script in (script for script in flags if script.endswith(".py") and flags[script]):
        done = subprocess.run(
            [sys.executable, script, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=100
        )
        assert flags[script] <= set(re.findall(r"(?<![\w-])--?\w[\w-]*", done.stdout)), done.stderr
