"""`powerinfer doctor`: what this machine has and what of it is used, in words for a bug report."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from .._text.table import facts, output_width
from .._text.terminal import one_line
from ..models.doctor import examine
from .options import Parser

EXAMPLES = """
powerinfer doctor
powerinfer doctor --no-measure --json
"""


def add_arguments(parser: Parser) -> None:
    parser.open_with(EXAMPLES, usage="[options]", more="Its answer, quoted, makes a bug report complete.")
    parser.add_argument("--no-measure", action="store_true", help="do not measure how fast memory is read")
    parser.add_argument("--json", action="store_true", help="print JSON")


def main(args: argparse.Namespace) -> int:
    report = examine(measure=not args.no_measure)
    if args.json:
        print(json.dumps(asdict(report)))
        return 0
    rows = [(name, one_line(text)) for name, text in report.rows()]
    for line in facts(rows, width=output_width()):
        print(line)
    return 0
