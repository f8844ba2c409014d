"""`powerinfer chat [MODEL]`: a conversation in the terminal, or through a pipe, an answer for each line."""

from __future__ import annotations

import argparse

from .._text.terminal import Bar
from .answers import (
    add_lora_argument,
    add_system_arguments,
    add_think_argument,
    lora_arguments,
    system_text,
)
from .llama_cpp import add_instead
from .options import (
    Parser,
    add_draft_arguments,
    add_model_arguments,
    add_sampling_arguments,
    draft_arguments,
    load_arguments,
    sampling_arguments,
)

EXAMPLES = """
powerinfer chat
powerinfer chat model.gguf --system "You are a patient teacher." --temp 0.6
powerinfer chat -m model.gguf -c 8192 --vram-budget 8
"""


def add_arguments(parser: Parser) -> None:
    parser.open_with(EXAMPLES, usage="[MODEL] [options]")
    add_model_arguments(parser, default="demo")
    add_system_arguments(parser)
    parser.add_argument(
        "--no-history",
        dest="history",
        action="store_false",
        help="do not keep what is typed (else in ~/.local/state/powerinfer/chat_history)",
    )
    add_think_argument(parser)
    add_lora_argument(parser)
    add_instead(parser, [(("-st", "--single-turn"), 0, "`powerinfer run MODEL PROMPT` answers once")])
    parser.add_argument("-cnv", "--conversation", action="store_true", help=argparse.SUPPRESS)
    add_draft_arguments(parser)
    add_sampling_arguments(parser)


def main(args: argparse.Namespace) -> int:
    from .. import Llama
    from ..chat import repl
    from ..chat.chat import Chat
    from ..chat.conversation import Conversation
    from ..chat.ui import Ui

    ui = Ui(history=args.history)
    options = load_arguments(args) | draft_arguments(args) | lora_arguments(args)
    with Bar(f"loading {args.model}") as bar:
        llm = Llama(args.model, progress=bar, **options)
    with llm:
        conversation = Conversation(system_text(args), settings=sampling_arguments(args))
        chat = Chat(llm, ui, conversation, forgets=args.context_shift, think=args.think)
        chat.check()
        if ui.interactive:
            ui.note(f"{llm.describe()}\n/help lists the commands, Ctrl-D ends the chat.")
        return repl.run(chat)
