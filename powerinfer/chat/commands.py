"""The slash commands. Each takes the chat and the rest of its line; what it prints goes through the ui."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import get_args

from rich.table import Table

from .._engine.session import LayerStep, Sparsity
from .._text.reasoning import THINK
from .._text.table import columns
from ..errors import ArgumentError
from .chat import Chat
from .conversation import SETTINGS, Conversation

SPARSITY: tuple[Sparsity, ...] = get_args(Sparsity)


@dataclass(frozen=True)
class Command:
    """What to call, and how /help shows it."""

    call: Callable[[Chat, str], None]
    arguments: str
    help: str
    words: Sequence[str] | None = ()
    """What may follow, for the tab key; None: a file."""


def help_(chat: Chat, rest: str) -> None:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for name, command in COMMANDS.items():
        table.add_row(f"/{name} {command.arguments}".rstrip(), command.help)
    chat.ui.note(table)
    chat.ui.note(
        "Ctrl-C stops an answer, Ctrl-D ends the chat, Ctrl-Z stops it for a while. Alt-Enter begins a new "
        "line of a question, and so does \\ at the end of one. Tab completes commands, settings and files."
    )
    if chat.ui.history is not None:
        chat.ui.note(f"What you type is kept in {chat.ui.history}; --no-history keeps nothing.")


def reset(chat: Chat, rest: str) -> None:
    chat.conversation.reset()
    chat.llm.reset()
    chat.ui.note("The conversation is forgotten.")


def retry(chat: Chat, rest: str) -> None:
    said, n_forgotten = chat.conversation, chat.conversation.n_forgotten
    last = said.turns[-2:]
    question = said.take_back()
    n_before = len(said.turns)
    try:
        chat.answer(question)
    finally:
        if len(said.turns) == n_before:  # there is no new answer: the old one stays
            said.turns += last
            said.n_forgotten = max(said.n_forgotten, n_forgotten)


def undo(chat: Chat, rest: str) -> None:
    question = chat.conversation.take_back()
    chat.ui.note(f"Taken back: {shorten(question, 60)}")


def system(chat: Chat, rest: str) -> None:
    if not rest:
        chat.ui.note(chat.conversation.system or "There is no system message.")
    elif rest == "none":
        chat.conversation.system = None
        chat.ui.note("The system message is removed.")
    else:
        chat.conversation.system = rest
        chat.ui.note("The system message is set.")


def set_(chat: Chat, rest: str) -> None:
    name, _, value = rest.partition(" ")
    name, value = "temperature" if name == "temp" else name, value.strip()
    if name and value:
        _change(chat, name, value)
    session, settings = chat.llm.session.info, chat.conversation.settings
    shown = {key: settings.get(key, "default") for key in SETTINGS}
    shown |= {"think": chat.think or "default", "sparsity": session.sparsity}
    shown |= {"threshold": f"{session.sparse_threshold:g}"}
    if name and name not in shown:
        raise ArgumentError(f"there is no setting {name!r}; there are {', '.join(shown)}")
    chat.ui.note("\n".join(f"{key} = {text}" for key, text in shown.items() if name in ("", key)))


def _change(chat: Chat, name: str, value: str) -> None:
    if name == "sparsity":
        mode = next((mode for mode in SPARSITY if mode == value), None)
        if mode is None:
            raise ArgumentError(f"sparsity must be one of {', '.join(SPARSITY)}")
        chat.llm.set_sparsity(mode)
    elif name == "think":
        if value not in (*THINK, "default"):
            raise ArgumentError(f"think must be one of {', '.join(THINK)} and default")
        chat.think = None if value == "default" else value
    elif name == "threshold":
        chat.llm.set_threshold(number(name, value))
    elif name in SETTINGS:
        changed = Conversation(settings=dict(chat.conversation.settings))
        changed.set(name, value)
        changed.check(chat.llm.n_vocab())
        chat.conversation.settings = changed.settings


def number(name: str, text: str) -> float:
    """A finite number. Raises ArgumentError."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ArgumentError(f"{name} must be a number, not {text!r}")
    return value


def stats(chat: Chat, rest: str) -> None:
    steps = chat.llm.last_step
    if not steps or not steps[0].n_tokens:
        chat.ui.note("Nothing was computed yet.")
        return
    t, n_neurons = chat.llm.timings, chat.llm.info().n_neurons
    chat.ui.note(
        f"loaded in {t.load_s:.1f} s; prompt: {t.n_prompt} tokens, {t.n_reused} of them known already, "
        f"{t.prompt_per_s:.1f} tokens/s; answer: {t.tokens_per_s:.1f} tokens/s"
    )
    chat.ui.note(
        f"the last step, {steps[0].n_tokens} tokens, by layer:"
        if steps[0].n_tokens > 1
        else "the last token, by layer:"
    )
    places = chat.uses_device and any(step.n_routes for step in steps)
    counts = ("experts", "on GPU", "copied") if places else ("predicted", "computed", "active")
    rows = [["layer", *counts, "FFN kB", "FFN µs", "all kB", "all µs"]]
    rows += [[str(i), *row(step, n_neurons, experts=places)] for i, step in enumerate(steps)]
    width = chat.ui.width if chat.ui.interactive else None
    chat.ui.note("\n".join(columns(rows, right=range(len(rows[0])), width=width)))
    if places:
        layers = chat.llm.experts()
        n_routes, n_there = sum(y.n_routes for y in layers), sum(y.n_resident for y in layers)
        chat.ui.note(
            f"since it was opened: {n_there / max(1, n_routes):.0%} of the chosen experts were on the GPU, "
            f"{sum(y.n_copies for y in layers):,} were copied there "
            f"({sum(y.copied_bytes for y in layers) / 1e6:,.0f} MB)"
        )


def row(step: LayerStep, n_neurons: int, *, experts: bool) -> list[str]:
    """A layer's cells: shares of the neurons that were computed sparsely, or counts of experts (those that
    the tokens chose, those on the GPU, those that were copied there since); kilobytes, microseconds."""
    pairs = max(1, step.n_sparse * n_neurons)
    cells = [f"{n / pairs:.1%}" for n in (step.n_predicted, step.n_computed, step.n_active)]
    if experts:
        cells = [f"{n:,}" for n in (step.n_routes, step.n_routes_device, step.n_copies)]
    cells += [f"{step.ffn_bytes / 1e3:,.0f}", f"{step.ffn_us:,.0f}"]
    return [*cells, f"{step.bytes / 1e3:,.0f}", f"{step.layer_us:,.0f}"]


def save(chat: Chat, rest: str) -> None:
    force, _, name = rest.partition(" ") if rest.startswith("-f ") else ("", "", rest)
    path = named_file(name.strip(), "save")
    if path.exists() and not force and path.resolve() != chat.file:
        Conversation.load(path)  # which says so if it is something else
        raise ArgumentError(f"{path} holds another conversation; /save -f {path} replaces it")
    chat.conversation.save(path)
    chat.file = path.resolve()
    chat.ui.note(f"Saved to {path}.")


def load(chat: Chat, rest: str) -> None:
    path = named_file(rest, "load")
    loaded = Conversation.load(path)
    loaded.check(chat.llm.n_vocab())
    chat.conversation = loaded
    chat.file = path.resolve()
    chat.llm.reset()
    chat.ui.note(f"Loaded {len(loaded.turns)} turns from {path}.")


def named_file(rest: str, command: str) -> Path:
    """The file that a command names. Raises ArgumentError."""
    if not rest:
        raise ArgumentError(f"use /{command} FILE")
    try:
        path = Path(rest).expanduser()
    except RuntimeError as error:  # ~somebody who does not exist
        raise ArgumentError(str(error)) from None
    if path.name in ("", ".."):
        raise ArgumentError(f"{rest} is not the name of a file")
    return path


def quit_(chat: Chat, rest: str) -> None:
    raise EOFError


COMMANDS = {
    "help": Command(help_, "", "this list"),
    "retry": Command(retry, "", "answer the last question once more, instead of the last answer"),
    "undo": Command(undo, "", "take back the last question and its answer"),
    "reset": Command(reset, "", "forget the conversation"),
    "system": Command(system, "[TEXT|none]", "show, set or remove the system message", ("none",)),
    "set": Command(
        set_,
        "[NAME VALUE]",
        "show the settings, or change one: temperature, top_p, max_tokens, seed, think, sparsity ...",
        (*SETTINGS, "think", "sparsity", "threshold"),
    ),
    "stats": Command(stats, "", "what the last step computed and read, layer by layer"),
    "save": Command(save, "[-f] FILE", "save the conversation as JSON; -f: over another one", None),
    "load": Command(load, "FILE", "load a saved conversation", None),
    "quit": Command(quit_, "", "end the chat"),
}

ALIASES = {"?": "help", "bye": "quit", "exit": "quit", "clear": "reset", "regen": "retry"}
"""What ollama and llama.cpp call them."""


def is_command(line: str) -> bool:
    """Whether a line is a command; a question may begin with a path: no command has a slash within."""
    return line.startswith("/") and "/" not in re.split(r"\s", line[1:], maxsplit=1)[0]


def run(chat: Chat, line: str) -> None:
    """Runs a line that begins with a slash. Raises ArgumentError for a command that does not exist or is
    misused."""
    name, _, rest = line[1:].partition(" ")
    command = COMMANDS.get(ALIASES.get(name, name))
    if command is None:
        raise ArgumentError(f"there is no command /{name}; /help lists them")
    command.call(chat, rest.strip())
