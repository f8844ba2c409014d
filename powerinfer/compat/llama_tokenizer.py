"""The tokenizer of a Llama under the names that llama-cpp-python gives it."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .._text.tokenizer import Tokenizer


class BaseLlamaTokenizer(ABC):
    """Text to tokens and back."""

    @abstractmethod
    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = True) -> list[int]:
        """Token ids of a text."""

    @abstractmethod
    def detokenize(
        self, tokens: Sequence[int], prev_tokens: Sequence[int] | None = None, special: bool = False
    ) -> bytes:
        """The bytes of tokens, prev_tokens standing before them."""


class LlamaTokenizer(BaseLlamaTokenizer):
    """What `llm.tokenizer()` gives."""

    def __init__(self, tokenizer: Tokenizer | object) -> None:
        """tokenizer: of a model, or a Llama."""
        from .._text.tokenizer import Tokenizer

        found = tokenizer if isinstance(tokenizer, Tokenizer) else getattr(tokenizer, "tokenizer", None)
        if not isinstance(found, Tokenizer):
            raise TypeError(f"{type(tokenizer).__name__} has no tokenizer")
        self.vocabulary = found

    @classmethod
    def from_ggml_file(cls, path: str | os.PathLike[str]) -> LlamaTokenizer:
        """Of a GGUF file, of which nothing else is read."""
        from .._engine.file import ModelFile
        from .._text.tokenizer import Tokenizer

        with ModelFile(path) as file:
            return cls(Tokenizer.from_metadata(file.metadata))

    def tokenize(self, text: bytes | str, add_bos: bool = True, special: bool = True) -> list[int]:
        return self.vocabulary.encode(text, add_bos=add_bos, special=special)

    def detokenize(
        self, tokens: Sequence[int], prev_tokens: Sequence[int] | None = None, special: bool = False
    ) -> bytes:
        return decode_after(self.vocabulary, tokens, prev_tokens, special)

    def encode(self, text: str, add_bos: bool = True, special: bool = True) -> list[int]:
        """Token ids of a text."""
        return self.tokenize(text, add_bos, special)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens; bytes that are no characters are left out."""
        return self.detokenize(tokens).decode("utf-8", "ignore")


def decode_after(
    tokenizer: Tokenizer, tokens: Sequence[int], before: Sequence[int] | None, special: bool
) -> bytes:
    """The bytes of tokens that stand after others. Raises ArgumentError for ids that do not exist."""
    from ..errors import ArgumentError

    ids = [int(token) for token in tokens]
    head = [] if before is None else [int(token) for token in before]
    try:
        whole = tokenizer.decode(head + ids, special=special)
        return whole[len(tokenizer.decode(head, special=special)) :] if head else whole
    except IndexError as error:
        raise ArgumentError(str(error)) from None
