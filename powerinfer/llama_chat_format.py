"""Chat formats under the module name that they have in llama-cpp-python."""

from .compat.llama_chat_format import (
    ChatFormatter,
    ChatFormatterResponse,
    register_chat_completion_handler,
    register_chat_format,
)

__all__ = [
    "ChatFormatter",
    "ChatFormatterResponse",
    "register_chat_completion_handler",
    "register_chat_format",
]
