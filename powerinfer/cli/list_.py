"""`powerinfer list`: the models that are here, by the names that commands take."""

from __future__ import annotations

import argparse
import json
import time

from .. import hub
from .._engine.file import DEMO, find_model
from .._text.table import columns, output_width
from .._text.terminal import harmless
from ..errors import FileError, UnsupportedError
from .info import size
from .options import Parser

EXAMPLES = """
powerinfer list
powerinfer list --json
"""


def add_arguments(parser: Parser) -> None:
    parser.open_with(EXAMPLES, usage="[options]")
    parser.add_argument("--json", action="store_true", help="print JSON, with paths")


def main(args: argparse.Namespace) -> int:
    found = []
    try:
        path = find_model(DEMO)
        found.append(hub.Stored(DEMO, path, path.stat().st_size, path.stat().st_mtime))
    except FileError:
        pass  # this installation came without it
    note = ""
    try:
        found += hub.stored()
    except UnsupportedError as error:
        note = str(error)
    if args.json:
        shown = [
            {"name": m.name, "path": str(m.path), "bytes": m.n_bytes, "used": m.last_used} for m in found
        ]
        print(json.dumps(shown, indent=2))
        return 0
    rows = [["size", "used", "name"]]
    for model in found:
        day = time.strftime("%Y-%m-%d", time.localtime(model.last_used))
        rows.append([size(model.n_bytes), "" if model.name == DEMO else day, harmless(model.name)])
    for line in columns(rows, right=range(1), width=output_width()):
        print(line)
    if note or len(found) < 2:
        print(f"\n{note or 'powerinfer pull hf:OWNER/REPO brings more'}")
    return 0
