"""Shell completion, the examples of the helps, and the habits of llama.cpp that commands accept."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
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


NAMES = [command.name for command in commands()]  # "predictor check" among them


@pytest.mark.parametrize("name", NAMES)
def test_help_opens_with_examples_that_are_accepted(name: str, capsys: Captured) -> None:
    with pytest.raises(SystemExit):
        main([*name.split(), "--help"])
    text = capsys.readouterr().out
    examples, rest = text.split("\nusage: ", 1)
    title, *lines = examples.replace("\\\n", " ").rstrip().split("\n")
    calls = [found[1] for line in lines if (found := re.match(r"  (?:.*[|(])?(powerinfer .*)", line))]
    assert title == ("examples:" if len(lines) > 1 else "example:") and calls
    assert rest.startswith(f"powerinfer {name} ")
    assert any(call.startswith(f"powerinfer {name}") for call in calls)
    for call in calls:
        words = shlex.split(re.split(r" {2,}| > | \||\)", call)[0])[1:]
        assert parse(words).command == words[0]
    assert len(rest.split("\n\n")[0].splitlines()) == 1  # one line of usage


def test_help_of_the_whole_opens_with_examples(capsys: Captured) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    calls = re.findall(r"^  powerinfer (.*)$", text.split("\nusage: ")[0], re.MULTILINE)
    assert text.startswith("examples:\n") and len(calls) == 4
    for call in calls:
        parse(shlex.split(call))


def test_llama_cpp_habits(capsys: Captured, tmp_path: Path) -> None:
    answers = []
    question = tmp_path / "question.txt"
    question.write_text("What is 2 plus 3?\n")
    for words in (
        ["demo", "What is 2 plus 3?", "--temperature", "0", "--max-tokens", "12", "--n-ctx", "256"],
        ["-m", "demo", "-p", "What is 2 plus 3?", "--temp", "0", "-n", "12", "-c", "256", "-t", "1"],
        ["-m", "demo", "What is 2 plus 3?", "--temp", "0", "-n", "12", "-c", "256"],
        ["demo", "--temp", "0", "-n", "12", "-c", "256", "What is 2 plus 3?"],
        ["-m", "demo", "-f", str(question), "--temp", "0", "-s", "1", "-n", "12", "-c", "256"],
    ):
        assert main(["run", *words]) == 0
        answers.append(capsys.readouterr().out)
    assert answers == 5 * ["2 plus 3 is 5.\n"]


@pytest.mark.parametrize(
    "line",
    [
        "info -m demo",
        "plan -m demo --vram-budget 8 -c 512 -np 4 -b 256",
        "profile -m demo -f corpus.txt -c 256 -t 1",
        "perplexity -f corpus.txt -m demo -c 256 -t 1 -b 64",
        "bench -m demo -p 16 -n 4 -t 1 -b 64",
        "chat -m demo -c 256 -t 1 -n 4 --temp 0.5 -s 3 -sys Hello",
        "serve -c 256 -m demo -np 2 --temp 0.5",
        *(f"predictor {name} -m demo -f corpus.txt -o x.gguf -c 256" for name in ("train", "svd", "sign")),
        "predictor check -m demo -f corpus.txt -t 1",
        "quantize demo x.gguf q4_k_m -t 2",
    ],
)
def test_llama_cpp_words(line: str) -> None:
    args = parse(line.split())
    assert getattr(args, "model", "demo") in ("demo", ["demo"])  # serve takes several


def test_two_models_or_prompts_are_refused(capsys: Captured) -> None:
    assert main(["run", "demo", "x", "-m", "demo"]) == 1
    assert "two models" in capsys.readouterr().err
    assert main(["run", "-m", "demo", "x", "-p", "y"]) == 1
    assert "two prompts" in capsys.readouterr().err
    assert main(["info", "demo", "-m", "demo"]) == 1
    assert "two models" in capsys.readouterr().err
    for words in (
        ["run"],
        ["info"],
        ["predictor", "check", "--text", "x"],
        ["run", "demo", "x", "-n", "1", "y"],
        ["run", "demo", "-n", "1", "x", "--odd"],
    ):
        with pytest.raises(SystemExit) as end:
            main(words)
        assert end.value.code == 2 and re.search("MODEL|unrecognized", capsys.readouterr().err)
