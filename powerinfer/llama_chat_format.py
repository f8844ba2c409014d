"""Chat formats under the module name that they have in llama-cpp-python."""

from typing import Any

from .compat.llama_chat_format import (
    ChatFormatter,
    ChatFormatterResponse,
    Jinja2ChatFormatter,
    chat_formatter_to_chat_completion_handler,
    register_chat_completion_handler,
    register_chat_format,
)

__all__ = [
    "ChatFormatter",
    "ChatFormatterResponse",
    "Jinja2ChatFormatter",
    "chat_formatter_to_chat_completion_handler",
    "register_chat_completion_handler",
    "register_chat_format",
]


def __getattr__(name: str) -> Any:
    if name.endswith("ChatHandler"):  # Llava15ChatHandler and its like
        raise ImportError(f"{name} is for images, which are not read here")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
