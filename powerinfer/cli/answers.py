"""Options of `run` and `chat` about answers: system messages, adapters, thoughts, and the form of one."""

from __future__ import annotations

import argparse
import json
import math
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._text.reasoning import THINK
from ..errors import ArgumentError
from .llama_cpp import add_instead

if TYPE_CHECKING:
    from .._text.grammar import LlamaGrammar


def add_system_arguments(parser: argparse.ArgumentParser) -> None:
    """`system_text` reads them."""
    parser.add_argument(
        "-sys", "--system", "--system-prompt", dest="system", metavar="TEXT", help="a system message"
    )
    parser.add_argument(
        "-sysf", "--system-file", "--system-prompt-file", metavar="FILE", help="the same from a file"
    )


def system_text(args: argparse.Namespace) -> str | None:
    """The system message. Raises ArgumentError, OSError."""
    text: str | None = args.system
    if args.system_file is None:
        return text
    if text is not None:
        raise ArgumentError("--system and --system-file: one of them is enough")
    return Path(args.system_file).read_text(encoding="utf-8", errors="replace").removesuffix("\n")


def add_lora_argument(parser: argparse.ArgumentParser) -> None:
    """`lora_arguments` has the arguments."""
    parser.add_argument(
        "--lora",
        action="append",
        default=[],
        metavar="FILE[:SCALE]",
        help="an adapter (GGUF) that the model is used with; may be repeated",
    )
    instead = "--lora FILE:SCALE has the scale behind the file"
    add_instead(parser, [(("--lora-scaled",), 2, instead)])


def lora_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments for Llama. Raises ArgumentError."""
    if not args.lora:
        return {}
    adapters = [with_scale(text, f"--lora {text}") for text in args.lora]
    return {"lora_path": [path for path, _ in adapters], "lora_scale": [scale for _, scale in adapters]}


def with_scale(text: str, where: str) -> tuple[str, float]:
    """FILE or FILE:SCALE. where: for messages."""
    path, scale = text, 1.0
    head, _, tail = text.rpartition(":")
    if head:
        with suppress(ValueError):
            path, scale = head, float(tail)
    if not math.isfinite(scale):
        raise ArgumentError(f"{where}: the scale is no number")
    return path, scale


def add_think_argument(parser: argparse.ArgumentParser) -> None:
    """`reasoning.template_variables` makes variables of it."""
    parser.add_argument(
        "--think",
        choices=THINK,
        help="whether, or how much, a model thinks that can choose (default: as its chat template does)",
    )
    instead = "--think off lets a model answer without a thought"
    add_instead(parser, [(("--reasoning-budget",), 1, instead)])


def add_form_arguments(parser: argparse.ArgumentParser) -> None:
    """`form_of` makes a grammar of them."""
    group = parser.add_argument_group("form of the answer").add_mutually_exclusive_group()
    group.add_argument("--grammar", metavar="GBNF", help="a grammar that it follows")
    group.add_argument("--grammar-file", metavar="FILE", help="the same from a file")
    group.add_argument("-j", "--json-schema", metavar="SCHEMA", help="JSON that a schema accepts; {}: any")
    group.add_argument("-jf", "--json-schema-file", metavar="FILE", help="the same from a file")


def form_of(args: argparse.Namespace) -> LlamaGrammar | None:
    """Raises ArgumentError, OSError, UnsupportedError where llguidance is not installed."""
    given = (args.grammar, args.grammar_file, args.json_schema, args.json_schema_file)
    if all(one is None for one in given):
        return None
    from .._text.grammar import LlamaGrammar

    if args.grammar is not None:
        return LlamaGrammar.from_string(args.grammar)
    if args.grammar_file is not None:
        return LlamaGrammar.from_file(args.grammar_file)
    text = args.json_schema
    if text is None:
        text = Path(args.json_schema_file).read_text(encoding="utf-8", errors="replace")
    with suppress(ValueError):  # which the grammar says
        if json.loads(text) == {}:
            text = '{"type": "object"}'
    return LlamaGrammar.from_json_schema(text)
