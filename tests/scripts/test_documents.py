"""What documents name is there: files behind links, the README's commands and extras, make's targets."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from powerinfer.cli import build_parser

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "powerinfer" / "demo" / "README.md"]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^ {4}powerinfer (predictor \w+|\S+)(.*)$", README, re.MULTILINE)


def anchor(title: str) -> str:
    """A heading's name in links."""
    return re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-")


def headings(page: Path) -> set[str]:
    return {
        anchor(title) for title in re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if re.match(r"https?:", link):
            continue
        name, _, part = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert not part or part in headings(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_sources_that_pages_name(page: Path) -> None:
    folders = ("vendor", "native", "powerinfer", "tests", "scripts", "examples")
    known = [f"/{path}" for folder in folders for path in (ROOT / folder).rglob("*.*")]
    named = re.findall(
        r"`([\w/.-]+\.(?:c|h|hpp|cpp|cuh?|py|sh))(?:::\w+)?`", page.read_text(encoding="utf-8")
    )
    for name in named:
        of_another_program = re.match(r"(user_data/)?extensions/", name)
        assert of_another_program or "NAME" in name or any(path.endswith(f"/{name}") for path in known), name


@pytest.mark.parametrize(("name", "rest"), COMMANDS, ids=[name for name, _ in COMMANDS])
def test_commands_of_the_readme(name: str, rest: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        words = [*name.split(), "--help"]
        build_parser(words).parse_args(words)
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert [word for word in re.findall(r"--[a-z][\w-]*", rest) if word not in text] == []


def test_extras_of_the_readme() -> None:
    table = README[README.index("| extra | for |") :].split("\n\n", 1)[0]
    named = re.findall(r"`([a-z]+)`", "".join(line.split("|")[1] for line in table.splitlines()))
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = project[project.index("[project.optional-dependencies]") :].split("\n\n", 1)[0]
    extras = set(re.findall(r"^(\w+) = \[", section, re.MULTILINE))
    assert set(named) == extras - {"convert", "test", "dev"}


def test_targets_of_make() -> None:
    targets = set(
        re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    )
    for page in PAGES:
        named = re.findall(r"(?:`|^ {4}|^)make ([a-z][\w-]*)", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert set(named) <= targets, page
