"""Files of llama.cpp, out of the source distribution of llama-cpp-python, which has all of it."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path


def fetch(folder: Path, pattern: str) -> None:
    """Unpack the files that fit `pattern` ("models/templates/*.jinja") into `folder`, without folders of
    their own. pip loads the distribution (80 MB)."""
    with tempfile.TemporaryDirectory() as temporary:
        name = "llama-cpp-python"  # its source alone: what pip builds it with may come built
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", name]
        subprocess.run([*command, "--dest", temporary, name], check=True)
        folder.mkdir(parents=True, exist_ok=True)
        with tarfile.open(next(Path(temporary).glob("*.tar.gz"))) as archive:
            for member in archive:
                path = Path(member.name)
                if path.match(f"llama.cpp/{pattern}") and member.isfile():
                    content = archive.extractfile(member)
                    assert content is not None
                    (folder / path.name).write_bytes(content.read())
