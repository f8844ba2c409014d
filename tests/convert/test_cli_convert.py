"""`powerinfer convert` as a user sees it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from powerinfer._engine.file import ModelFile
from powerinfer.cli import main
from powerinfer.models.convert.torch_file import write_torch
from tests import models
from tests.convert import folders

SPEC = models.SPECS["llama-relu-gqa"]


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    return folders.write_folder(tmp_path / "My-Model", SPEC)


def run(*words: Any) -> int:
    return main(["convert", *map(str, words)])


def test_a_plain_file(hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(hf, "-o", tmp_path / "out.gguf") == 0
    out = capsys.readouterr().out
    assert "out.gguf: GGUF, 30 tensors" in out and "F16" in out
    assert "llama, 3 layers, 96 wide, 320 neurons a layer, relu" in out
    assert "predictors" not in out and "note" not in out
    with ModelFile(tmp_path / "out.gguf") as file:
        assert file.metadata["general.name"] == "My-Model" and not file.info.is_powerinfer


def test_everything(hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = folders.write_predictors(tmp_path / "predictors", models.draw_predictor(SPEC), 0.5)
    (tmp_path / "activation").mkdir()
    for i in range(SPEC.n_layer):
        write_torch(tmp_path / "activation" / f"activation_{i}.pt", np.arange(SPEC.n_ff))
    out = tmp_path / "out.gguf"
    words = ("--predictors", given, "--activation", tmp_path / "activation", "--type", "q8_0", "--check")
    assert run(hf, "-o", out, *words) == 0
    text = capsys.readouterr().out
    assert "PowerInfer GGUF, 36 tensors" in text and "Q8_0" in text
    assert "3, of rank 32..48, threshold 0.5" in text
    assert "counts of 3 layers" in text
    assert "blk.*.fc2.weight (2): rows that do not divide into the blocks of Q8_0" in text
    assert "the original PowerInfer cannot run this file: it computes F16 and Q4_0 only" in text
    assert "The file answers as the checkpoint does (all neurons, exact mode)." in text
    with ModelFile(out) as file:
        assert file.info.is_powerinfer


def test_the_check_on_a_terminal_of_80_columns(
    hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bound, which decides, stands last in its line."""
    monkeypatch.setattr("powerinfer.cli.convert.output_width", lambda: 80)
    assert run(hf, "-o", tmp_path / "out.gguf", "--check", "--type", "q4_0") == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80 and not any("…" in line for line in lines)
    assert next(line for line in lines if line.startswith("prompt")).endswith("bound")


def test_a_check_that_fails(
    hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A conversion that forgets to reorder q and k."""
    monkeypatch.setattr(
        "powerinfer.models.convert.layout.pairs_of_halves", lambda heads, width: np.arange(heads * width)
    )
    assert run(hf, "-o", tmp_path / "out.gguf", "--check") == 1
    assert "The file answers NOT as the checkpoint does" in capsys.readouterr().out


def test_errors_are_one_line(hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.gguf"
    assert run(tmp_path / "nothing", "-o", out) == 1
    assert run(hf, "-o", tmp_path / "no" / "such" / "folder.gguf") == 1
    assert run(hf, "-o", out, "--pre", "qwen2", "--predictors", hf, "--transpose-down") == 1
    folders.write_json(hf / "config.json", {"model_type": "evil\x1b[2J\nname"})
    assert run(hf, "-o", out) == 1
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert len(lines) == 4 and all(line.startswith("powerinfer: ") for line in lines)
    assert "\x1b" not in captured.err and captured.out == ""
    assert not out.exists()


@pytest.mark.parametrize("words", [[], ["x"], ["x", "-o", "y", "--type", "Q5_K"], ["x", "-o", "y", "--nope"]])
def test_wrong_usage(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(*words)
    assert caught.value.code == 2 and "usage:" in capsys.readouterr().err


def test_help_opens_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run("--help")
    assert "powerinfer convert ReluLLaMA-7B --predictors" in capsys.readouterr().out
