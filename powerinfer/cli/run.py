"""`powerinfer run MODEL "prompt"`: one answer on stdout, and nothing else there."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import Llama
from .._text.reasoning import template_variables
from .._text.terminal import Aside, Bar, harmless
from ..errors import ArgumentError
from .answers import (
    add_form_arguments,
    add_lora_argument,
    add_system_arguments,
    add_think_argument,
    form_of,
    lora_arguments,
    system_text,
)
from .llama_cpp import Nothing, add_instead
from .options import (
    Parser,
    add_draft_arguments,
    add_model_arguments,
    add_sampling_arguments,
    draft_arguments,
    load_arguments,
    sampling_arguments,
)

if TYPE_CHECKING:
    from .._text.grammar import LlamaGrammar

EXAMPLES = """
powerinfer run demo "Tell me a story about a fox."
powerinfer run -m model.gguf -p "Why is the sky blue?" -n 200 --temp 0
git diff | powerinfer run model.gguf --system "Write a commit message." -
powerinfer run model.gguf -f question.txt -c 8192 -t 8
powerinfer run model.gguf "What is row sparsity?" --vram-budget 8 -v
powerinfer run model.gguf "A colour, as JSON." -j '{"properties": {"name": {"type": "string"}}}'
"""


def add_arguments(parser: Parser) -> None:
    parser.open_with(EXAMPLES, usage="MODEL [PROMPT] [options]")
    add_model_arguments(parser)
    parser.add_argument(
        "prompt", metavar="PROMPT", nargs="?", help='the prompt; "-" or nothing: read it from stdin'
    )
    parser.add_argument("-p", "--prompt", dest="prompt_option", metavar="PROMPT", help="the same as PROMPT")
    parser.add_argument("-f", "--file", metavar="FILE", help="read the prompt from a file")
    parser.add_argument(
        "--raw", action="store_true", help="continue the prompt as it is, without the chat format"
    )
    add_system_arguments(parser)
    parser.add_argument(
        "-r",
        "--stop",
        "--reverse-prompt",
        dest="stop",
        action="append",
        metavar="TEXT",
        help="ends the answer, and is no part of it; may be repeated",
    )
    parser.add_argument("--ignore-eos", action="store_true", help="go on behind the end of the answer")
    parser.add_argument("-v", "--verbose", action="store_true", help="model and speed on stderr")
    add_think_argument(parser)
    add_lora_argument(parser)
    add_instead(parser, [(("-cnv", "--conversation"), 0, "`powerinfer chat MODEL` is a conversation")])
    parser.add_argument(
        "-no-cnv", "--no-conversation", dest="raw", action="store_true", help=argparse.SUPPRESS
    )
    parser.add_argument("-st", "--single-turn", nargs=0, action=Nothing)
    add_form_arguments(parser)
    add_draft_arguments(parser)
    add_sampling_arguments(parser)


def read_prompt(word: str | None, file: str | None = None) -> str:
    """The prompt as text. One line break at the end of a file is the file's, not the prompt's."""
    if file is not None:
        text = Path(file).read_text(encoding="utf-8", errors="replace").removesuffix("\n")
    elif word is None or word == "-":
        if sys.stdin.isatty():
            print("powerinfer: type the prompt; Ctrl-D on a new line ends it", file=sys.stderr)
        text = sys.stdin.read().removesuffix("\n").removesuffix("\r")
    else:
        text = os.fsencode(word).decode("utf-8", "replace")
    if not text.strip():
        raise ArgumentError("the prompt is empty")
    return text


def pieces(
    llm: Llama, args: argparse.Namespace, prompt: str, form: LlamaGrammar | None
) -> Iterator[tuple[str, str, str | None]]:
    """Parts of the thought before the answer, and of the answer, each with the reason if it is the last."""
    options: dict[str, Any] = {"grammar": form, "stop": args.stop, **sampling_arguments(args)}
    options |= {"ignore_eos": True} if args.ignore_eos else {}
    if args.raw:
        for part in llm.create_completion(prompt, stream=True, **options):
            yield "", part["choices"][0]["text"], part["choices"][0]["finish_reason"]
        return
    if variables := template_variables(args.think):
        options["chat_template_kwargs"] = variables
    system = system_text(args)
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": prompt})
    begun = False
    for chunk in llm.create_chat_completion(messages, stream=True, **options):
        choice = chunk["choices"][0]
        text = choice["delta"].get("content") or ""
        text = text if begun else text.lstrip()
        begun = begun or bool(text)
        yield choice["delta"].get("reasoning_content") or "", text, choice["finish_reason"]


def write(answer: Iterator[tuple[str, str, str | None]], bar: Bar) -> tuple[str | None, bool]:
    """Prints the answer while it is made, and a line break after it; returns why it ended, and whether it is
    a thought alone. A thought is shown to who sits at the terminal."""
    end, last, thinks = "\n", None, False
    aside = Aside()
    try:
        for thought, text, reason in answer:
            last = reason
            if thought:
                bar.close()
                aside.write(thought)
                thinks = True
            if text:
                bar.close()
                aside.close()
                thinks = False
                sys.stdout.write(harmless(text))
                sys.stdout.flush()
                end = text[-1]
    finally:
        aside.close()
        if end != "\n":
            sys.stdout.write("\n")
        sys.stdout.flush()  # before anything of stderr
    return last, thinks


def main(args: argparse.Namespace) -> int:
    if args.raw and system_text(args):
        raise ArgumentError("--system has no place in a --raw prompt")
    if args.raw and args.think:
        raise ArgumentError("--think is about chat templates, which a --raw prompt has not")
    if sum(given is not None for given in (args.prompt, args.prompt_option, args.file)) > 1:
        raise ArgumentError("two prompts: one as an argument, with -p or with -f is enough")
    prompt = read_prompt(args.prompt if args.prompt_option is None else args.prompt_option, args.file)
    form = form_of(args)
    options = load_arguments(args) | draft_arguments(args) | lora_arguments(args)
    with Bar(f"loading {args.model}") as bar:
        llm = Llama(args.model, progress=bar, **options)
    with llm, Bar("reading the prompt") as bar:
        llm.prompt_progress = bar
        if args.verbose:
            print(harmless(llm.describe()), file=sys.stderr)
        reason, thinks = write(pieces(llm, args, prompt, form), bar)
        if reason == "length" and llm.n_tokens >= llm.n_ctx():
            print(
                f"powerinfer: the context of {llm.n_ctx()} tokens is full, the answer ends here "
                "(--n-ctx, --context-shift)",
                file=sys.stderr,
            )
        elif thinks:
            print("powerinfer: the answer ended within its thought (--max-tokens, --think)", file=sys.stderr)
        if args.verbose:
            t = llm.timings
            print(
                f"prompt {t.n_prompt} tokens, {t.prompt_per_s:.1f} tokens/s; "
                f"answer {t.tokens_per_s:.1f} tokens/s; context {llm.n_tokens}/{llm.n_ctx()}"
                + ("; {1} of {0} guesses were right".format(*llm.drafted) if llm.drafted[0] else ""),
                file=sys.stderr,
            )
    return 0
