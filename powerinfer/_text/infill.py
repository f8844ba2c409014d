"""Filling a gap between two texts, with the marks that a model was trained with."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import UnsupportedError
from .tokenizer import Tokenizer


def infill_ids(
    tokenizer: Tokenizer, prefix: str | bytes | Sequence[int], suffix: str, *, suffix_first: bool = False
) -> list[int]:
    """The prompt whose answer stands between prefix and suffix.

    suffix_first: suffix, prefix, answer, instead of prefix, suffix, answer. Raises UnsupportedError if the
    file names no marks for it.
    """
    marks = tokenizer.fim_pre, tokenizer.fim_suf, tokenizer.fim_mid
    before, after, middle = marks
    if before is None or after is None or middle is None:
        raise UnsupportedError("suffix needs a model with fill-in-the-middle tokens, and this file has none")

    def ids(text: str | bytes | Sequence[int]) -> list[int]:
        if isinstance(text, (str, bytes)):
            return tokenizer.encode(text, add_bos=False, space_prefix=False)
        return [int(token) for token in text]

    first, second = [before, *ids(prefix)], [after, *ids(suffix)]
    if suffix_first:
        first, second = second, first
    begin = [tokenizer.bos] if tokenizer.add_bos and tokenizer.bos is not None else []
    return [*begin, *first, *second, middle]
