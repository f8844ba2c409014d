"""Texts to measure a model on: files as one run of tokens.

corpus = read_corpus(file, ["a.txt", "b.txt"])
corpus.tokens  # int32 [n], no BOS among them
corpus.bos     # the token that this vocabulary begins a text with, or None
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .._engine.file import ModelFile
from .._engine.warn import warn
from ..errors import ArgumentError, FileError

STDIN = "-"


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The tokens of a text, and what begins a text."""

    tokens: npt.NDArray[np.int32]
    """[n], without BOS and EOS."""
    bos: int | None
    """None where the vocabulary begins texts with nothing."""

    @property
    def with_bos(self) -> npt.NDArray[np.int32]:
        """The tokens with the BOS, if there is one, before them."""
        head = [] if self.bos is None else [self.bos]
        return np.concatenate([np.asarray(head, np.int32), self.tokens])


def read_texts(paths: Sequence[str | os.PathLike[str]]) -> bytes:
    """The contents of the files one after the other, with nothing between them; "-" is standard input.

    One line break at the very end belongs to the file, not to the text. Raises FileError.
    """
    return b"".join(map(_read, paths)).removesuffix(b"\n").removesuffix(b"\r")


def _read(path: str | os.PathLike[str]) -> bytes:
    name = os.fspath(path)
    try:
        if name == STDIN:
            text = sys.stdin.buffer.read()
        else:
            with open(name, "rb") as file:
                text = file.read()
    except (OSError, ValueError) as error:  # ValueError: a path with a zero byte
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise FileError(f"{name!r} cannot be read: {reason}") from error
    if not text.isascii():
        try:
            text.decode()
        except UnicodeDecodeError as error:
            warn(
                f"{name} is not UTF-8 (byte {error.start:,} is 0x{text[error.start]:02x}): its bytes are "
                "read as they are"
            )
    return text


def encode_corpus(file: ModelFile, text: str | bytes, *, special: bool = False) -> Corpus:
    """The tokens of a text by the vocabulary of a file.

    special: control tokens that the text spells out (`<|im_end|>`) become those tokens; otherwise they are
    text like any other. Raises TokenizerError, ArgumentError for a text of no tokens.
    """
    from .._text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_metadata(file.metadata)
    tokens = np.asarray(tokenizer.encode(text, add_bos=False, special=special), np.int32)
    if not tokens.size:
        raise ArgumentError("the text is empty")
    return Corpus(tokens=tokens, bos=tokenizer.bos if tokenizer.add_bos else None)


def read_corpus(file: ModelFile, paths: Sequence[str | os.PathLike[str]], *, special: bool = False) -> Corpus:
    """`encode_corpus` of `read_texts`."""
    return encode_corpus(file, read_texts(paths), special=special)
