"""Joining symbols to tokens: the two kinds of BPE that GGUF files have.

`SentencePieceWords` joins the neighbours whose token has the highest score, `ByteLevelWords` those that come
first in a list of merges. The library's BPE ranks merges by their place in a list; it has no equal scores,
and the list would have to be derived from all tokens, which takes longer than opening a model may take. So
the first kind is joined here.
"""

from __future__ import annotations

import codecs
import heapq
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import tokenizers

from .metadata import TokenizerError, decode_all, is_valid
from .pretokenizer import PreTokenizer

SPACE = "\u2581"  # how a SentencePiece vocabulary writes a space

_CACHED_WORD = 64  # words longer than this are joined anew each time, so that the cache stays small
_LONG = 4096  # characters
_CACHED_WORDS = 1 << 15
_ESCAPED = "\udc00-\udcff"  # in regular expressions: the surrogates that stand for bytes

_NO_SEPARATOR = bytes(set(range(256)) - set(b" \0"))

# Bytes of a character, by the upper half of its first byte.
_UTF8_LENGTH = (1,) * 12 + (2, 2, 3, 4)


def _byte_characters() -> dict[str, bytes]:
    """Of each printable character the byte that it stands for in a byte-level vocabulary, as GPT-2 has it."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): bytes([b]) for b in printable} | {chr(256 + i): bytes([b]) for i, b in enumerate(others)}


BYTE_OF_CHAR = _byte_characters()


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


def _escape_whole_character(error: UnicodeError) -> tuple[str, int]:
    """Bytes that are no character become lone surrogates, as many as the first of them announces."""
    assert isinstance(error, UnicodeDecodeError)
    first = error.object[error.start]
    escaped = error.object[error.start : error.start + _UTF8_LENGTH[first >> 4]]
    return "".join(chr(0xDC00 + b) for b in escaped), error.start + len(escaped)


# What llama.cpp does with bytes that are not UTF-8, in its two kinds of vocabulary.
_REPLACE_EACH_BYTE = "powerinfer.replace-each-byte"
_ESCAPE_WHOLE_CHARACTER = "powerinfer.escape-whole-character"
codecs.register_error(_REPLACE_EACH_BYTE, _replace_each_byte)
codecs.register_error(_ESCAPE_WHOLE_CHARACTER, _escape_whole_character)


def scores_of_merges(texts: Sequence[str], merges: Sequence[str]) -> list[float]:
    """Scores that join as "left right" merges in their order do; tokens that no merge makes are single
    characters, or never made."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault(merge.replace(" ", "", 1), rank)
    return [-float(ranks.get(text, len(merges))) for text in texts]


class SentencePieceWords:
    """The merges of a SentencePiece BPE vocabulary."""

    def __init__(self, ids: dict[str, int], scores: np.ndarray[Any, Any], unknown: int) -> None:
        if np.isnan(scores).any():
            raise TokenizerError(f"the score of token {int(np.isnan(scores).argmax())} is not a number")
        self._ids = ids
        self._costs: list[float] = (-scores).tolist()
        self._byte_ids = [ids.get(f"<0x{b:02X}>", ids.get(chr(b), unknown)) for b in range(256)]
        self._newline = ids.get("<0x0A>", ids.get("\n"))
        # Where no token has a space after another character, nothing is ever joined across such a place, and
        # the text can be merged word by word, most of which have been seen before.
        crosses = re.search(f"[^{SPACE}\0]{SPACE}", "\0".join(ids))
        word = f"[^{_ESCAPED}]+" if crosses else f"{SPACE}*[^{SPACE}{_ESCAPED}]+|{SPACE}+"
        self._words = re.compile(f"{word}|[{_ESCAPED}]+")
        self._cached_merge = lru_cache(maxsize=_CACHED_WORDS)(self._merge)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_cached_merge"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._cached_merge = lru_cache(maxsize=_CACHED_WORDS)(self._merge)

    def newline(self) -> int | None:
        return self._newline

    def encode(self, data: bytes) -> list[int]:
        output: list[int] = []
        text = data.replace(b" ", SPACE.encode()).decode("utf-8", _ESCAPE_WHOLE_CHARACTER)
        # One word at a time: who finds all of a long text at once keeps every other thread waiting.
        for found in self._words.finditer(text):
            word = found[0]
            output += self._cached_merge(word) if len(word) <= _CACHED_WORD else self._merge(word)
        return output

    def _merge(self, word: str) -> tuple[int, ...]:
        ids, costs = self._ids, self._costs
        if "\udc00" <= word[0] <= "\udcff":
            return tuple(self._byte_ids[ord(c) - 0xDC00] for c in word)
        # Symbols are a linked list: a symbol that was joined to the one on its left becomes "".
        symbols = list(word)
        after = [*range(1, len(symbols)), -1]
        before = list(range(-1, len(symbols) - 1))
        queue: list[tuple[float, int, int]] = []

        def offer(left: int, right: int) -> None:
            joined = symbols[left] + symbols[right]
            token = ids.get(joined)
            if token is not None:
                heapq.heappush(queue, (costs[token], left, len(joined)))

        for i in range(len(symbols) - 1):
            offer(i, i + 1)
        while queue:
            _, left, length = heapq.heappop(queue)
            right = after[left]
            # Symbols only grow: an offer made before one of the two was joined to another has another length.
            if not symbols[left] or right < 0 or len(symbols[left]) + len(symbols[right]) != length:
                continue
            symbols[left] += symbols[right]
            symbols[right] = ""
            after[left] = after[right]
            if after[left] >= 0:
                before[after[left]] = left
                offer(left, after[left])
            if before[left] >= 0:
                offer(before[left], left)
        return tuple(token for symbol in symbols if symbol for token in self._symbol_ids(symbol))

    def _symbol_ids(self, symbol: str) -> tuple[int, ...]:
        token = self._ids.get(symbol)
        return (token,) if token is not None else tuple(self._byte_ids[b] for b in symbol.encode())


class ByteLevelWords:
    """A byte-level BPE vocabulary on the `tokenizers` library."""

    def __init__(self, ids: dict[str, int], merges: list[bytes], scheme: PreTokenizer) -> None:
        self._n_vocab = len(ids)
        # The library wants valid UTF-8. Without a token for a byte it would join what stands around it.
        vocab = ids if is_valid(ids) else {text: i for text, i in ids.items() if is_valid([text])}
        missing = [c for c in BYTE_OF_CHAR if c not in vocab]
        self._filter = bool(missing)
        if missing:
            vocab = vocab | {c: self._n_vocab + i for i, c in enumerate(missing)}
        pairs = _pairs(merges)
        if len(set(merges)) != len(merges):
            pairs = list(dict.fromkeys(pairs))  # the first place counts
        try:
            model = tokenizers.models.BPE(vocab, pairs, ignore_merges=scheme.ignore_merges)
        except Exception as error:  # the library raises its errors as plain Exception
            raise TokenizerError(
                _explain_merges(vocab, pairs) or f"the merges do not fit the tokens: {error}"
            ) from error
        self._tokenizer = tokenizers.Tokenizer(model)
        self._tokenizer.pre_tokenizer = scheme.build()

    def newline(self) -> int | None:
        return next(iter(self.encode(b"\n")), None)

    def encode(self, data: bytes) -> list[int]:
        text = data.decode("utf-8", _REPLACE_EACH_BYTE)
        if len(text) <= _LONG:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        else:  # a batch of one lets other threads run meanwhile
            ids = self._tokenizer.encode_batch([text], add_special_tokens=False)[0].ids
        return [i for i in ids if i < self._n_vocab] if self._filter else ids


def _pairs(merges: list[bytes]) -> list[Any]:
    """The two tokens of each merge. Raises TokenizerError for one that is not two tokens."""
    if not merges:
        return []
    # All at once is several times faster than one by one. Two parts each: a space in each and nowhere else.
    joined = b"\0".join(merges)
    if joined.translate(None, _NO_SEPARATOR) == (b" \0" * len(merges))[:-1]:
        try:
            parts = joined.decode().replace(" ", "\0").split("\0")
            return list(zip(parts[::2], parts[1::2], strict=True))
        except UnicodeDecodeError:
            pass
    pairs = [tuple(text.split(" ")) for text in decode_all(merges)]
    wrong = next((i for i, pair in enumerate(pairs) if len(pair) != 2), None)
    if wrong is not None:
        raise TokenizerError(f"merge {wrong} is {merges[wrong]!r}, not two tokens with a space between")
    return pairs


def _explain_merges(vocab: Mapping[str, int], pairs: Sequence[tuple[str, ...]]) -> str | None:
    for i, (left, right) in enumerate(pairs):
        for text in (left, right, left + right):
            if text not in vocab:
                return f"merge {i} ({left!r} and {right!r}) needs the token {text!r}, which does not exist"
    return None
