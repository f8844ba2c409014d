"""Every `powerinfer` command in documents and scripts is one that the program accepts."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from powerinfer.cli import build_parser

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    "docs/bring-your-own-model.md",
    "scripts/make_demo.sh",
    "powerinfer/demo/README.md",
    "docs/get-a-model.md",
    "docs/integrations.md",
    "docs/performance.md",
    "docs/start.md",
    "docs/small-gpu.md",
    "docs/mixtures.md",
    "docs/troubleshooting.md",
)


def commands(page: str) -> list[list[str]]:
    """The words after `powerinfer` of each line that begins with it; lines that end with \\ go on."""
    text = (ROOT / page).read_text(encoding="utf-8").replace("\\\n", " ")
    text = re.sub(r'"?\$\{?(\w+)\}?', r"\1", text).replace('"', "") if page.endswith(".sh") else text
    out = []
    for line in text.splitlines():
        words = shlex.split(line, comments=True) if line.strip().startswith("powerinfer ") else []
        if words:
            end = next((i for i, word in enumerate(words) if word in (">", "|", ";")), len(words))
            out.append(words[1:end])
    return out


@pytest.mark.parametrize("words", [words for page in PAGES for words in commands(page)], ids=" ".join)
def test_commands_are_accepted(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        build_parser(words).parse_args(words)
    except SystemExit:
        pytest.fail(capsys.readouterr().err)


def test_the_tutorial_shows_every_step() -> None:
    names = [words[0] for words in commands(PAGES[0])]
    assert {"convert", "profile", "predictor", "quantize", "perplexity", "plan", "chat"} <= set(names)
    assert [words[0] for words in commands("scripts/make_demo.sh")] == [
        "convert",
        "profile",
        "predictor",
        "quantize",
        "predictor",
        "predictor",
        "perplexity",
    ]
