"""What callers of chats give, as the engine takes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError

if TYPE_CHECKING:
    from .._text.chat_format import ChatFormat
    from .._text.grammar import LlamaGrammar
    from .._text.tool_calls import Tool


_other_formats: ContextVar[tuple[object, ChatFormat] | None] = ContextVar("other_format", default=None)


@contextmanager
def other_format(llama: object, chat_format: ChatFormat) -> Iterator[None]:
    """Within it this thread's conversations with that Llama are written by another format, without its
    chat_handler."""
    before = _other_formats.set((llama, chat_format))
    try:
        yield
    finally:
        _other_formats.reset(before)


def other_format_of(llama: object) -> ChatFormat | None:
    """What a chat_handler writes conversations with, while it has this object make an answer."""
    found = _other_formats.get()
    return found[1] if found is not None and found[0] is llama else None


def how(variables: Mapping[str, Any] | None, continue_final: bool, begin: bool) -> dict[str, Any]:
    """How ChatFormat.encode writes a conversation. Raises ArgumentError."""
    variables = dict(variables or {})
    for name in variables:
        if not isinstance(name, str) or name in _NO_VARIABLES:
            raise ArgumentError(f"chat_template_kwargs cannot set {name!r}")
    return {
        **variables,
        "continue_final": continue_final,
        "add_generation_prompt": begin and not continue_final,
    }


# What the engine itself tells a template, and what its functions call their arguments.
_NO_VARIABLES = {"messages", "tools", "bos_token", "eos_token", "bos", "eos", "add_generation_prompt"} | {
    *("tokenizer", "safe", "continue_final", "self", "name", "template")
}


def tools(tools: Any, tool_choice: Any, functions: Any, function_call: Any) -> tuple[list[Tool], bool]:
    """The tools that may be called, and whether one must be."""
    if (
        tools is None
        and functions is None
        and tool_choice in (None, "none", "auto")
        and function_call is None
    ):
        return [], False
    from .._text.tool_calls import check_tools, chosen_tools, tools_of_functions

    if functions is not None and tools is not None:
        raise ArgumentError("functions and tools cannot both be given")
    if functions is not None or function_call is not None:
        return chosen_tools(tools_of_functions(functions or []), function_call)
    return chosen_tools(check_tools(tools or []), tool_choice)


def is_about_tools(message: Any) -> bool:
    return isinstance(message, Mapping) and (
        message.get("role") in ("tool", "function")
        or bool(message.get("tool_calls") or message.get("function_call"))
    )


def one_grammar(
    grammar: LlamaGrammar | str | None, response_format: Mapping[str, Any] | None
) -> LlamaGrammar | str | None:
    if response_format is None or response_format == {"type": "text"}:
        return grammar
    if grammar is not None:
        raise ArgumentError("grammar and response_format cannot both be given")
    from .._text.grammar import grammar_of_format

    return grammar_of_format(response_format)


def chat_n_top(logprobs: bool | None, top_logprobs: int | None) -> int | None:
    if not logprobs:
        if top_logprobs is not None:
            raise ArgumentError("top_logprobs needs logprobs=True")
        return None
    return 0 if top_logprobs is None else top_logprobs
