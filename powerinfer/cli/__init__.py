"""The command `powerinfer`.

The answer goes to stdout, everything else to stderr. Exit codes: 1 an error (one line says which), 2 wrong
usage, 129 the terminal was closed, 130 Ctrl-C, 141 the reader of the output went away, 143 told to end.

Modules of commands have `add_arguments(parser)` and `main(args) -> exit code`. Only the one that is
asked for is imported.
"""

from __future__ import annotations

import argparse
import difflib
import io
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NoReturn

from .._text.terminal import one_line, sentence
from ..errors import PowerInferError
from .llama_cpp import llama_cpp_words
from .long_lived import start_for_long
from .options import Parser, choose_model, find_models, in_options

COMMANDS = {
    "chat": "talk with a model in the terminal",
    "run": "answer one prompt and print the answer alone",
    "serve": "answer OpenAI's HTTP requests, many at the same time, and show the chat page",
    "pull": "fetch a model from the Hugging Face Hub",
    "list": "show the models that are here",
    "rm": "delete a model that was fetched",
    "info": "show what a model file holds",
    "bench": "measure prompt and decode speed against the memory's own read rate",
    "convert": "turn a Hugging Face folder into a GGUF file, with predictors or without",
    "quantize": "write a model in a smaller weight format",
    "profile": "count how often each neuron fires over a text, and write it into the model",
    "predictor": "make, calibrate and check predictors of active neurons",
    "perplexity": "measure how well a model predicts a text, in any sparsity mode",
    "plan": "show what a budget of GPU memory would hold, and what speed to expect",
    "completion": "print the script that completes commands in bash, zsh or fish",
    "doctor": "say what this machine has, in words for a bug report",
}

EXAMPLES = """
powerinfer chat
powerinfer run model.gguf "Why is the sky blue?"
powerinfer run hf:OWNER/REPO "Why is the sky blue?"
powerinfer serve model.gguf --vram-budget 8
"""


# What ollama and others call them.
_ELSEWHERE = {"show": "info", "ls": "list", "remove": "rm", "download": "pull", "generate": "run"}


class Version(argparse.Action):
    """Asks the engine's library for the version when, and only when, it is wanted."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help="show the version and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from .. import __version__

        print(f"powerinfer {__version__}")
        parser.exit()


def _module(name: str) -> Any:
    """Of a command. One called `list` would hide Python's from this file."""
    return import_module(".list_" if name == "list" else f".{name}", __name__)


def build_parser(argv: Sequence[str]) -> Parser:
    """The parser for these arguments: only the command that they name knows its options."""
    parser = Parser(
        prog="powerinfer",
        description="Large language models on ordinary machines.",
        epilog="MODEL is a GGUF file, hf:OWNER/REPO[:FORMAT] of the Hugging Face Hub, or the word\n"
        '"demo" for the small model that comes with the package.\n'
        '"powerinfer COMMAND --help" shows the options of a command.',
    )
    parser.add_argument("--version", action=Version)
    sub = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    chosen = next((word for word in argv if not word.startswith("-")), None)
    for name, text in COMMANDS.items():
        command = sub.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        command.set_defaults(parser=command)
        if name == chosen:
            _module(name).add_arguments(command)
    parser.open_with(EXAMPLES, usage="COMMAND ...")
    return parser


def _meant(word: str) -> str | None:
    """The command that somebody may have meant."""
    near = difflib.get_close_matches(word, COMMANDS, 1, 0.75)
    return _ELSEWHERE.get(word) or (near[0] if near else None)


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The arguments; what is wrong with them ends the program."""
    parser = build_parser(words)
    named = next((word for word in words if not word.startswith("-")), None)
    if named is not None and named not in COMMANDS and (near := _meant(named)):
        parser.error(f"there is no command {named}; is {near} meant?")
    args, rest = parser.parse_known_args(words)
    # Where MODEL and PROMPT have options between them, argparse takes the second word for one too many.
    if len(rest) == 1 and getattr(args, "prompt", "") is None and (rest == ["-"] or rest[0][:1] != "-"):
        args.prompt = rest.pop()
    if isinstance(getattr(args, "model", None), list) and not any(word.startswith("-") for word in rest):
        args.model += rest  # several models, with options between them
        rest = []
    if rest:
        args.parser.refuse(rest)
    if "model_option" in args:
        choose_model(args)
    return args


@contextmanager
def _told_to_end() -> Iterator[None]:
    """Within the block, being told to end is an exception: files that are not complete are removed."""

    def end(number: int, _: object) -> NoReturn:
        raise SystemExit(128 + number)

    # Python lets only the main thread do this; what is ignored (nohup) or handled by a caller stays so.
    is_main = threading.current_thread() is threading.main_thread()
    numbers = [
        n for n in (signal.SIGTERM, signal.SIGHUP) if is_main and signal.getsignal(n) is signal.SIG_DFL
    ]
    for number in numbers:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def _warnings_in_words() -> Iterator[None]:
    """Within the block warnings are a line each, without Python's file and source line."""

    def show(message: Warning | str, *_: object, **__: object) -> None:
        print(f"powerinfer: {one_line(in_options(str(message)))}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def _open_closed_streams() -> None:
    """Standard streams that the caller closed (`>&-`), which are None here, become empty ones."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - open until the end


def program() -> int:
    """The process `powerinfer`."""
    if sys.argv[1:2] == ["serve"]:
        start_for_long(os.environ)
    return main()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code. argv: without the program's name; None: sys.argv."""
    words = llama_cpp_words(sys.argv[1:] if argv is None else argv) or ["--help"]
    _open_closed_streams()
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        # What cannot be decoded, or written in this terminal's encoding, is no reason to stop.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        args = parse(words)
        with _told_to_end(), _warnings_in_words():
            find_models(args)
            code: int = _module(args.command).main(args)
            sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader went away (`| head`): not an error; keep Python from complaining when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (PowerInferError, OSError, MemoryError) as error:
        print(f"powerinfer: {one_line(in_options(sentence(error))) or 'out of memory'}", file=sys.stderr)
        return 1
