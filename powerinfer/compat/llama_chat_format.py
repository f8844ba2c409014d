"""Chat formats and handlers of a user's own, under the names that llama-cpp-python gives them.

@register_chat_format("mine")
def mine(messages, **kwargs):
    return ChatFormatterResponse(prompt=..., stop=["</s>"])

Llama("model.gguf", chat_format="mine")
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from .._engine import checks
from .._text.chat_format import ChatFormat, ChatFormatError
from .._text.chat_format import register_chat_format as register
from ..errors import UnsupportedError

F = TypeVar("F", bound=Callable[..., Any])

_HANDLERS: dict[str, Callable[..., Any]] = {}


@dataclass
class ChatFormatterResponse:
    """What a formatter makes of a conversation.

    stop: texts that end the answer. added_special: has no effect, since a begin token is put before a prompt
    only where that does not begin with one.
    """

    prompt: str
    stop: str | Sequence[str] | None = None
    stopping_criteria: Any = None
    added_special: bool = False


class ChatFormatter(Protocol):
    """A function that writes a conversation as a prompt."""

    def __call__(self, *, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> ChatFormatterResponse: ...


@dataclass(frozen=True)
class _OwnFormat(ChatFormat):
    formatter: ChatFormatter | None = None

    def _write(self, messages: list[dict[str, Any]], **variables: Any) -> tuple[str, Sequence[str]]:
        assert self.formatter is not None
        made = self.formatter(messages=messages, **variables)
        if not isinstance(made, ChatFormatterResponse):
            raise ChatFormatError(
                f"the chat format {self.name!r} gave {type(made).__name__}, not ChatFormatterResponse"
            )
        if made.stopping_criteria is not None:
            raise UnsupportedError("stopping_criteria of a ChatFormatterResponse are not supported: use stop")
        return str(made.prompt), checks.stops(made.stop)


def register_chat_format(name: str) -> Callable[[F], F]:
    """Makes a formatter known as a chat_format of that name."""

    def known(formatter: F) -> F:
        register(name, _OwnFormat(name, "", formatter=formatter))
        return formatter

    return known


def register_chat_completion_handler(name: str) -> Callable[[F], F]:
    """Makes a chat_handler known as a chat_format of that name."""

    def known(handler: F) -> F:
        _HANDLERS[name] = handler
        return handler

    return known


def handler_of(name: str | None) -> Callable[..., Any] | None:
    """The handler that was registered under that name."""
    return _HANDLERS.get(name) if name is not None else None
