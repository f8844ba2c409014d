"""`powerinfer rm hf:OWNER/REPO[:FORMAT]`: deletes a model that was fetched."""

from __future__ import annotations

import argparse
from pathlib import Path

from .. import hub
from .._text.terminal import harmless
from ..errors import ArgumentError
from .info import size
from .options import Parser

EXAMPLES = """
powerinfer rm hf:OWNER/REPO:Q4_0     a model of that repository
powerinfer rm hf:OWNER/REPO          all that is here of it
"""


def add_arguments(parser: Parser) -> None:
    parser.open_with(EXAMPLES, usage="NAME [NAME ...]")
    parser.add_argument("names", metavar="NAME", nargs="+", help="as `powerinfer list` shows it")


def main(args: argparse.Namespace) -> int:
    for name in args.names:
        if name == "demo":
            raise ArgumentError("the demo model belongs to the package and stays")
        if Path(name).exists():
            raise ArgumentError(f"{name} is a file of yours; only models of the hub are deleted here")
        gone, freed = hub.remove(name if hub.is_reference(name) else hub.PREFIX + name)
        files = f"{len(gone)} file{'s' * (len(gone) != 1)}"
        print(harmless(f"{name}: {files} deleted, {size(freed)} are free again"))
    return 0
