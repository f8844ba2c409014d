"""Shell completion, the examples of the helps, and the habits of llama.cpp that commands accept."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from importlib import import_module
from pathlib import Path

import pytest

from powerinfer.cli import COMMANDS, main, parse
from powerinfer.cli.completion import bash, commands, fish

Captured = pytest.CaptureFixture[str]


def complete(folder: Path, *words: str) -> set[str]:
    """What bash offers for the last of these words, in this folder."""
    given = " ".join(map(shlex.quote, ("powerinfer", *words)))
    show = "_powerinfer\nprintf '%s\\n' \"${COMPREPLY[@]}\""
    script = f"{bash()}\nCOMP_WORDS=({given})\nCOMP_CWORD={len(words)}\n{show}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=folder, timeout=60)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return set(done.stdout.split("\n")) - {""}


def test_bash(tmp_path: Path) -> None:
    (tmp_path / "a model.gguf").touch()
    assert complete(tmp_path, "") == set(COMMANDS)
    assert complete(tmp_path, "pr") == {"profile", "predictor"}
    assert complete(tmp_path, "--v") == {"--version"}
    assert complete(tmp_path, "run", "") == {"demo", "a model.gguf"}
    assert complete(tmp_path, "run", "--sparsity", "") == {"auto", "predicted", "exact", "dense"}
    assert complete(tmp_path, "run", "demo", "--temp") == {"--temp", "--temperature"}
    assert complete(tmp_path, "run", "-m", "a") == {"a model.gguf"}
    assert "check" in complete(tmp_path, "predictor", "")
    assert "--sweep" in complete(tmp_path, "predictor", "check", "--s")
    assert "--sweep" not in complete(tmp_path, "predictor", "train", "--s")
    assert complete(tmp_path, "completion", "") == {"bash", "zsh", "fish"}


def test_fish_names_every_option() -> None:
    script = fish()
    for command in commands():
        for option in command.options:
            for flag in option.flags:
                assert re.search(rf" -[los] {re.escape(flag.lstrip('-'))}( |$)", script, re.MULTILINE), flag
    if shell := shutil.which("fish"):
        done = subprocess.run(
            [shell, "--no-execute"], input=script, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr


def test_zsh_reads_the_script() -> None:
    shell = shutil.which("zsh")
    if shell is None:
        pytest.skip("no zsh on this machine")
    code = f"autoload -U compinit && compinit -u -D\n{bash('zsh')}\nwhence -w _powerinfer"
    done = subprocess.run([shell, "-f", "-c", code], capture_output=True, text=True, timeout=60)
    assert "function" in done.stdout, done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_are_accepted(name: str, capsys: Captured) -> None:
    """Every line of a help's examples that calls this program is one that its parser takes."""
    with pytest.raises(SystemExit):
        main([name, "--help"])
    text = capsys.readouterr().out
    head = text.split("\noptions:")[0]
    lines = re.findall(r"^ +(?:.*\| )?powerinfer (.*)$", head.replace("\\\n", " "), re.MULTILINE)
    lines += re.findall(r"Example: powerinfer (.*?)\. [A-Z]", " ".join(head.split()))
    if hasattr(import_module(f"powerinfer.cli.{name}"), "EXAMPLES"):
        assert lines
    for line in lines:
        words = shlex.split(re.split(r" {2,}| > | \|", line)[0])
        args = parse(words)
        assert args.command == words[0]


def test_llama_cpp_habits(capsys: Captured) -> None:
    answers = []
    for words in (
        ["demo", "What is 2 plus 3?", "--temperature", "0", "--max-tokens", "12", "--n-ctx", "256"],
        ["-m", "demo", "-p", "What is 2 plus 3?", "--temp", "0", "-n", "12", "-c", "256", "-t", "1"],
        ["-m", "demo", "What is 2 plus 3?", "--temp", "0", "-n", "12", "-c", "256"],
        ["demo", "--temp", "0", "-n", "12", "-c", "256", "What is 2 plus 3?"],
    ):
        assert main(["run", *words]) == 0
        answers.append(capsys.readouterr().out)
    assert answers == 4 * ["2 plus 3 is 5.\n"]


def test_two_models_or_prompts_are_refused(capsys: Captured) -> None:
    assert main(["run", "demo", "x", "-m", "demo"]) == 1
    assert "two models" in capsys.readouterr().err
    assert main(["run", "-m", "demo", "x", "-p", "y"]) == 1
    assert "two prompts" in capsys.readouterr().err
    for words in (["run"], ["run", "demo", "x", "-n", "1", "y"], ["run", "demo", "-n", "1", "x", "--odd"]):
        with pytest.raises(SystemExit) as end:
            main(words)
        assert end.value.code == 2 and re.search("MODEL|unrecognized", capsys.readouterr().err)
