"""Records a terminal session as a picture: runs the commands in a terminal of their own and writes an SVG.

    python scripts/record_terminal.py                     # the README's picture, docs/terminal.svg
    python scripts/record_terminal.py -o out.svg "powerinfer info demo"

What is shown is what the commands print; a command that fails ends the recording. Nothing in the picture is
fetched from elsewhere.
"""

from __future__ import annotations

import argparse
import fcntl
import io
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import DIMMED_MONOKAI
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
COLUMNS, ROWS = 92, 40
SESSION = (
    'powerinfer run demo "What are hot and cold neurons?" --seed 1 -v',
    "powerinfer info demo",
    "powerinfer plan demo --gpu 4060 --vram-budget 0.44,0.46",
)
_FONT = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


def run(command: str) -> str:
    """What a command prints in a terminal. Raises RuntimeError if it fails."""
    words = shlex.split(command)
    words[:1] = [sys.executable, "-m", "powerinfer"] if words[0] == "powerinfer" else words[:1]
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS)}
    process = subprocess.Popen(
        words, stdin=slave, stdout=slave, stderr=slave, env=environment, cwd=ROOT, start_new_session=True
    )
    os.close(slave)
    printed = b""
    while True:
        try:
            piece = os.read(master, 1 << 16)
        except OSError:  # the end of a terminal
            break
        if not piece:
            break
        printed += piece
    os.close(master)
    if process.wait() != 0:
        raise RuntimeError(f"{command} ended with {process.returncode}: {printed.decode(errors='replace')}")
    return settled(printed.decode("utf-8", "replace"))


def settled(text: str) -> str:
    """What stays of it on the screen: lines that were written over (progress) are gone, colours stay."""
    text = text.replace("\r\n", "\n")
    text = re.sub(r"\x1b\[\?25[lh]", "", text)
    while (found := re.search(r"[^\n]*\n\x1b\[1A\x1b\[2K", text)) is not None:
        text = text[: found.start()] + text[found.end() :]
    lines = [re.split(r"\r|\x1b\[2K", line)[-1] for line in text.split("\n")]
    return "\n".join(lines).strip("\n")


def picture(commands: tuple[str, ...], title: str) -> str:
    """The SVG."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), highlight=False)
    for i, command in enumerate(commands):
        console.print(Text.assemble("\n" if i else "", ("$ ", "bold green"), (command, "bold")))
        console.print(Text.from_ansi(run(command)))
    svg = console.export_svg(title=title, theme=DIMMED_MONOKAI, unique_id="powerinfer")
    return _FONT.sub("", svg).replace("Fira Code", "ui-monospace, Consolas")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("commands", nargs="*", default=SESSION)
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "docs" / "terminal.svg")
    args = parser.parse_args()
    begin = time.perf_counter()
    args.output.write_text(picture(tuple(args.commands), "powerinfer"), encoding="utf-8")
    print(f"{args.output}: {len(args.commands)} commands in {time.perf_counter() - begin:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
