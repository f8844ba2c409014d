"""`powerinfer pull hf:OWNER/REPO[:FORMAT]`: fetches a model from the Hugging Face Hub."""

from __future__ import annotations

import argparse

from .. import hub
from .._engine.machine import room_of
from .._text.terminal import one_line
from .options import Parser, vram_budget

EXAMPLES = """
powerinfer pull hf:OWNER/REPO                a format that this machine's memory holds
powerinfer pull hf:OWNER/REPO:Q4_0           that format
powerinfer pull hf:OWNER/REPO:model.gguf     that file
powerinfer pull hf:OWNER/REPO --vram-budget 8
"""

MORE = """
The same names stand wherever a command takes a MODEL. Files lie in
huggingface_hub's cache, where HF_HOME says; HF_TOKEN opens what is private, and
HF_ENDPOINT names another hub. What was interrupted is gone on with.
"""


def add_arguments(parser: Parser) -> None:
    parser.open_with(EXAMPLES, usage="hf:OWNER/REPO[:FORMAT or FILE] [options]", more=MORE)
    parser.add_argument("name", metavar="NAME", help="hf:OWNER/REPO, hf:OWNER/REPO:Q4_0, hf:OWNER/REPO:FILE")
    parser.add_argument(
        "--vram-budget",
        type=vram_budget,
        metavar="GIB",
        help="GPU memory that the model will have, for the choice of a format (default: what is free)",
    )


def main(args: argparse.Namespace) -> int:
    name = args.name if hub.is_reference(args.name) else hub.PREFIX + args.name
    print(one_line(str(hub.pull(name, room=room_of(args.vram_budget)))))
    return 0
