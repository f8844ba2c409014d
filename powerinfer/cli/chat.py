"""`powerinfer chat [MODEL]`: a conversation in the terminal, or through a pipe, an answer for each line."""

from __future__ import annotations

import argparse

from .options import add_model_arguments, add_sampling_arguments, load_arguments, sampling_arguments
from .terminal import Bar


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser, default="demo")
    parser.add_argument("--system", metavar="TEXT", help="a system message")
    add_sampling_arguments(parser)


def main(args: argparse.Namespace) -> int:
    from .. import Llama
    from ..chat.conversation import Conversation
    from ..chat.repl import Chat
    from ..chat.ui import Ui

    ui = Ui()
    with Bar(f"loading {args.model}") as bar:
        llm = Llama(args.model, progress=bar, **load_arguments(args))
    with llm:
        conversation = Conversation(args.system, settings=sampling_arguments(args))
        chat = Chat(llm, ui, conversation, forgets=args.context_shift)
        chat.check()
        if ui.interactive:
            ui.note(f"{llm.describe()}\n/help lists the commands, Ctrl-D ends the chat.")
        return chat.run()
