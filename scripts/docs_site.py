"""A hook of mkdocs: pages of the site whose text lies elsewhere in the repository, and links between them.

Links in all pages are those of the repository, as its readers follow them; here they become the site's. One
that leads to a file that is no page becomes plain text.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "powerinfer/demo/README.md": "demo-model.md",
}
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]*)(#[^)\s]*)?\)")


def on_files(files: Any, *, config: Any) -> Any:
    """Adds the pages."""
    from mkdocs.structure.files import File

    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Links of a page."""
    return relink(markdown, page.file.src_uri)


def relink(markdown: str, page: str) -> str:
    """Links of a page as the site has them. page: its name there."""
    source = next((source for source, name in PAGES.items() if name == page), f"docs/{page}")

    def link(found: re.Match[str]) -> str:
        mark, text, name, part = found[1], found[2], found[3], found[4] or ""
        if not name or re.match(r"[a-z]+:", name):
            return found[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), name))
        target = PAGES.get(target, target.removeprefix("docs/") if target.startswith("docs/") else "")
        if not target or not (target in PAGES.values() or (ROOT / "docs" / target).is_file()):
            return text
        return f"{mark}[{text}]({posixpath.relpath(target, posixpath.dirname(page) or '.')}{part})"

    return _LINK.sub(link, markdown)
