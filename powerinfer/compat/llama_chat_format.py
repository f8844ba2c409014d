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
from .._engine.chat_options import other_format
from .._text.chat_format import ChatFormat, ChatFormatError
from .._text.chat_format import register_chat_format as register
from .._text.chat_template import render_template
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


class _ByFormat:
    """A chat_handler that answers as a Llama does, with another format."""

    def __init__(self, chat_format: ChatFormat) -> None:
        self._format = chat_format

    def __call__(self, *, llama: Any, messages: Any, **options: Any) -> Any:
        with other_format(llama, self._format):  # a stream has its prompt when it is returned
            return llama.create_chat_completion(messages, **options)


def chat_formatter_to_chat_completion_handler(formatter: ChatFormatter) -> Callable[..., Any]:
    """What a formatter is as a chat_handler."""
    template = str(getattr(formatter, "template", ""))
    return _ByFormat(_OwnFormat(type(formatter).__name__, template, formatter=formatter))


class Jinja2ChatFormatter:
    """A chat template of one's own.

    formatter = Jinja2ChatFormatter(template, eos_token="</s>", bos_token="<s>")
    Llama("model.gguf", chat_handler=formatter.to_chat_handler())
    """

    def __init__(
        self,
        template: str,
        eos_token: str,
        bos_token: str,
        add_generation_prompt: bool = True,
        stop_token_ids: Sequence[int] | None = None,
    ) -> None:
        """eos_token, bos_token: texts for the template; the first also ends answers. stop_token_ids is not
        supported: give them to create_chat_completion()."""
        if stop_token_ids is not None:
            raise UnsupportedError("stop_token_ids are an argument of create_chat_completion() here")
        self.template = template
        self.eos_token = eos_token
        self.bos_token = bos_token
        self.add_generation_prompt = add_generation_prompt

    def __call__(self, *, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> ChatFormatterResponse:
        own: dict[str, Any] = {"eos_token": self.eos_token, "bos_token": self.bos_token}
        own |= {"add_generation_prompt": self.add_generation_prompt}
        prompt = render_template(
            type(self).__name__, self.template, **{**kwargs, **own, "messages": messages}
        )
        return ChatFormatterResponse(prompt=prompt, stop=self.eos_token, added_special=True)

    def to_chat_handler(self) -> Callable[..., Any]:
        return chat_formatter_to_chat_completion_handler(self)
