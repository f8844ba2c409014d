"""The site: its pages, their links, the API reference's text, and the code of the pages for beginners."""

from __future__ import annotations

import importlib.util
import io
import re
import shlex
import subprocess
import sys
from pathlib import Path

import docs_site
import pytest
import record_terminal

from powerinfer._engine.file import find_model
from powerinfer.cli import main
from tests import models
from tests.convert import folders

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
NAV = re.findall(r"^ +- .*?: ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE)


def test_every_page_is_found() -> None:
    """In the navigation, or by a link of another page."""
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert len(set(NAV)) == len(NAV) and set(NAV) <= pages | set(docs_site.PAGES.values())
    assert set(docs_site.PAGES.values()) <= set(NAV)
    text = "".join(path.read_text("utf-8") for path in [ROOT / "README.md", *DOCS.rglob("*.md")])
    assert [page for page in pages - set(NAV) if f"{page})" not in text] == []
    assert all((ROOT / source).is_file() for source in docs_site.PAGES)


def test_links_of_the_site() -> None:
    text = (
        "[a](docs/server.md#limits) ![b](docs/terminal.svg) [c](ARCHITECTURE.md) [d](examples/hello.c) "
        "[e](https://x.org/y) [f](#limits)"
    )
    assert docs_site.relink(text, "index.md") == (
        "[a](server.md#limits) ![b](terminal.svg) [c](architecture.md) d [e](https://x.org/y) [f](#limits)"
    )
    assert docs_site.relink("[a](../../README.md#models) [b](h200)", "performance/gpu.md") == (
        "[a](../index.md#models) b"
    )


def test_llms_txt() -> None:
    links = re.findall(r"\]\((.*?)\)", (DOCS / "llms.txt").read_text("utf-8"))
    assert len(links) > 10 and set(links) <= set(NAV) and len(set(links)) == len(links)


def test_docstrings_as_markdown() -> None:
    pytest.importorskip("griffe")
    import docs_arguments

    text = (
        "Does it.\n\na: one; x[0] is\n    the first.\nb, c: two.\n\nwith f(1) as g:\n    g()\n\n    h = g()"
    )
    assert docs_arguments.markdown(text) == (
        "Does it.\n\n- `a`: one; `x[0]` is\n    the first.\n\n- `b, c`: two.\n\n"
        "```python\nwith f(1) as g:\n    g()\n```\n\n```python\nh = g()\n```"
    )


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    for name in ("mkdocs", "material", "mkdocstrings_handlers"):
        if importlib.util.find_spec(name) is None:
            pytest.skip("the extra powerinfer[docs] is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    api = (tmp_path / "api.html").read_text("utf-8")
    assert "create_chat_completion" in api and "<code>n_gpu_layers</code>" in api
    shown = "".join(path.read_text("utf-8") for path in tmp_path.glob("*.html"))
    assert not re.search(r'<(?:script|link rel="stylesheet")[^>]*(?:src|href)="https?:', shown)


def blocks(page: str, kind: str) -> list[str]:
    text = (DOCS / page).read_text("utf-8")
    return re.findall(rf"^```{kind}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", ["start.md", "python.md"])
def test_code_of_the_pages_for_beginners(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("llguidance")
    names: dict[str, object] = {}
    for code in blocks(page, "python"):
        exec(compile(code, page, "exec"), names)
    out = capsys.readouterr().out
    if page == "python.md":
        assert "ArgumentTypeError max_tokens is 1.5" in out and "\n2 384\n" in out


@pytest.mark.slow  # that its commands are accepted is checked every time: test_documented_commands.py
def test_commands_of_the_first_hour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.gguf").symlink_to(find_model("demo"))
    Path("corpus.txt").write_text("The fox and the dog. " * 200)
    folders.write_folder(tmp_path / "HF_DIR", models.SPECS["llama-relu-gqa"])
    n_run = 0
    for line in (line for block in blocks("start.md", "sh") for line in block.splitlines()):
        words = shlex.split(line)
        if words[0] == "powerinfer" and words[1] != "serve":
            monkeypatch.setattr(sys, "stdin", io.StringIO("/quit\n"))
            budget = words.index("--vram-budget") if words[1] == "run" and "--vram-budget" in words else 0
            words = words[:budget] if budget else words  # there may be no GPU
            assert main(words[1:]) == 0, line
            n_run += 1
    assert n_run == 12


def test_what_stays_on_the_screen() -> None:
    printed = "\x1b[?25la 1%\r\x1b[2Ka 99%\r\n\x1b[1A\x1b[2Kdone\r\n\x1b[1mbold\x1b[0m\r\n"
    assert record_terminal.settled(printed) == "done\n\x1b[1mbold\x1b[0m"
