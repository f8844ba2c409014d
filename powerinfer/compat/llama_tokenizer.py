"""The tokenizer of a Llama under the names that llama-cpp-python gives it."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from .._engine.checks import token_ids
from .._engine.file import ModelFile
from .._text.tokenizer import Tokenizer
from ..errors import ArgumentError, UnsupportedError


class BaseLlamaTokenizer(ABC):
    """Base of tokenizers: text to tokens and back."""

    @abstractmethod
    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = True) -> list[int]:
        """Token ids of a text."""

    @abstractmethod
    def detokenize(
        self, tokens: Sequence[int], prev_tokens: Sequence[int] | None = None, special: bool = False
    ) -> bytes:
        """The bytes of tokens, prev_tokens standing before them."""


class LlamaTokenizer(BaseLlamaTokenizer):
    """The tokenizer that `llm.tokenizer()` returns."""

    def __init__(self, tokenizer: Tokenizer | object) -> None:
        """tokenizer: of a model, or a Llama."""
        found = tokenizer if isinstance(tokenizer, Tokenizer) else getattr(tokenizer, "tokenizer", None)
        if not isinstance(found, Tokenizer):
            raise TypeError(f"{type(tokenizer).__name__} has no tokenizer")
        self.vocabulary = found

    @classmethod
    def from_ggml_file(cls, path: str | os.PathLike[str]) -> LlamaTokenizer:
        """Of a GGUF file, of which nothing else is read."""
        with ModelFile(path) as file:
            return cls(Tokenizer.from_metadata(file.metadata))

    def tokenize(self, text: bytes | str, add_bos: bool = True, special: bool = True) -> list[int]:
        return self.vocabulary.encode(text, add_bos=add_bos, special=special)

    def detokenize(
        self, tokens: Sequence[int], prev_tokens: Sequence[int] | None = None, special: bool = False
    ) -> bytes:
        """Raises ArgumentError for ids that do not exist."""
        ids = token_ids("tokens", tokens)
        head = [] if prev_tokens is None else token_ids("prev_tokens", prev_tokens)
        try:
            whole = self.vocabulary.decode(head + ids, special=special)
            return whole[len(self.vocabulary.decode(head, special=special)) :] if head else whole
        except IndexError as error:
            raise ArgumentError(str(error)) from None

    def encode(self, text: str, add_bos: bool = True, special: bool = True) -> list[int]:
        """Token ids of a text."""
        return self.tokenize(text, add_bos, special)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens; bytes that are no characters are left out."""
        return self.detokenize(tokens).decode("utf-8", "ignore")


class LlamaHFTokenizer(BaseLlamaTokenizer):
    """A tokenizer of transformers. A Llama itself always uses its file's own."""

    def __init__(self, hf_tokenizer: Any) -> None:
        self.hf_tokenizer = hf_tokenizer

    @classmethod
    def from_pretrained(cls, path: str) -> LlamaHFTokenizer:
        """Of a folder or a repository. Needs transformers."""
        try:
            transformers = import_module("transformers")
        except ImportError:
            raise UnsupportedError(
                "LlamaHFTokenizer needs transformers: pip install transformers; a Llama needs none"
            ) from None
        return cls(transformers.AutoTokenizer.from_pretrained(path))

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = True) -> list[int]:
        ids = self.hf_tokenizer.encode(text.decode("utf-8", "ignore"), add_special_tokens=special)
        return [int(token) for token in ids]

    def detokenize(
        self, tokens: Sequence[int], prev_tokens: Sequence[int] | None = None, special: bool = False
    ) -> bytes:
        def decoded(ids: Sequence[int]) -> bytes:
            text: str = self.hf_tokenizer.decode(ids, skip_special_tokens=not special)
            return text.encode("utf-8", "ignore")

        ids = token_ids("tokens", tokens)
        if prev_tokens is None:
            return decoded(ids)
        head = token_ids("prev_tokens", prev_tokens)
        return decoded(head + ids)[len(decoded(head)) :]


class ModelTokenizer(Tokenizer):
    """A Llama's `tokenizer`, which llama-cpp-python has as a method."""

    def __call__(self) -> LlamaTokenizer:
        """The tokenizer under llama-cpp-python's names."""
        return LlamaTokenizer(self)
