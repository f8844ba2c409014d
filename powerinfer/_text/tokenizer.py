"""Text to token ids and back, from the metadata of a GGUF file.

Kinds of vocabulary (`tokenizer.ggml.model`):

`llama`  SentencePiece BPE. Spaces are written U+2581. Start from single characters; as long as two
         neighbours together are a token, join the pair whose token has the highest score, the left-most one
         where scores are equal. A character that is no token becomes one byte token (`<0x41>`) per byte.
`gemma4` the same, with the places of merges for scores, and no space in front of a text.
`gpt2`   byte-level BPE: `pretokenizer` cuts words, every byte is written as a printable character, and
         neighbours are joined in the order of the list `tokenizer.ggml.merges`.

First of all, added tokens (user-defined ones always, control tokens on request) are cut out of the text.

Ids are those that llama.cpp gives for the same file. Source: the GGUF specification (keys), llama.cpp's
behaviour.
"""

from __future__ import annotations

import gc
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from .merging import BYTE_OF_CHAR, SPACE, ByteLevelWords, SentencePieceWords, scores_of_merges
from .metadata import (
    TokenizerError,
    decode_all,
    get_byte_strings,
    get_number,
    get_numbers,
    get_string,
)
from .pretokenizer import PRE_BY_ARCHITECTURE, PRE_TOKENIZERS, PreTokenizer

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Tokenizer", "TokenizerError"]

# tokenizer.ggml.token_type
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

# Texts by which a token is known to end a turn, whatever its type and the id keys say. First those that can
# be the end-of-turn token where the file names none, in the order in which they are looked for.
_EOT_TEXTS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "<｜end▁of▁sentence｜>",
    "<end_of_utterance>",
)
_EOM_TEXTS = ("<|eom_id|>",)
_EOG_TEXTS = (
    *_EOT_TEXTS,
    *_EOM_TEXTS,
    "<|return|>",
    "<|call|>",
    "</s>",
    "[EOS]",
    "<eos>",
)
# Fill-in-the-middle tokens: key, texts looked for where the key is missing. The last three also end
# generation.
_FIM_TOKENS = (
    ("fim_pre", ("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>",
                 "<|code_prefix|>", "<|prefix|>")),
    ("fim_suf", ("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>",
                 "<|code_suffix|>", "<|suffix|>")),
    ("fim_mid", ("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>",
                 "<|code_middle|>", "<|middle|>")),
    ("fim_pad", ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]")),
    ("fim_rep", ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>")),
    ("fim_sep", ("<|file_sep|>",)),
)  # fmt: skip
_FIM_EOG = ("fim_pad", "fim_rep", "fim_sep")
# Markers of the "harmony" chat format, which are shown and matched like ordinary added tokens.
_HARMONY_TEXTS = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")

_LARGE_BYTES = 1 << 16
_large = threading.Lock()  # one such text at a time: it takes 200 times as much memory meanwhile

_SPACE = SPACE.encode()
_WHITESPACE = b" \t\n\v\f\r"


METASPACE_KEY = "powerinfer.tokenizer.metaspace"
"""Where a space is put before a text that begins with none: before each behind a special token ("always"), or
before the first alone ("first"). Without the key one is put before each, whatever it begins with."""


class Tokenizer:
    """The vocabulary of one model. Immutable after construction; safe to use from several threads.

    Attributes: `n_vocab`; special ids `bos eos eot eom unk sep pad mask cls nl`, None where the model has
    none; the file's wishes `add_bos`, `add_eos` and `add_space_prefix`; `model` ("llama", "gemma4" or
    "gpt2"), `pre` (the scheme in use, "" but for "gpt2"); `notice`: a sentence for the user about something
    that was guessed, or None.
    """

    def __init__(self, meta: Mapping[str, Any]) -> None:
        self.notice: str | None = None
        self.model = get_string(meta, "tokenizer.ggml.model")
        if self.model is None:
            raise TokenizerError("the file has no tokenizer: the key 'tokenizer.ggml.model' is missing")
        if self.model not in ("llama", "gpt2", "gemma4"):
            raise TokenizerError(
                f"the tokenizer model {self.model!r} is not supported (supported are 'llama', 'gemma4' and "
                "'gpt2')"
            )
        self._tokens = get_byte_strings(meta, "tokenizer.ggml.tokens")
        self.n_vocab = len(self._tokens)
        self._texts = decode_all(self._tokens)
        if not self.n_vocab:
            raise TokenizerError("the vocabulary (key 'tokenizer.ggml.tokens') is empty")
        empty = [i for i, text in enumerate(self._texts) if not text] if "" in self._texts else []
        for i in empty:
            self._texts[i] = f"[EMPTY_{i}]"
            self._tokens[i] = self._texts[i].encode()
        self._ids = dict(zip(self._texts, range(self.n_vocab), strict=True))
        if len(self._ids) != self.n_vocab:
            first = next(i for i, text in enumerate(self._texts) if self._ids[text] != i)
            second = self._ids[self._texts[first]]
            raise TokenizerError(f"tokens {first} and {second} have the same text {self._tokens[first]!r}")
        types = get_numbers(meta, "tokenizer.ggml.token_type", self.n_vocab, np.int64, default=NORMAL)
        self._types: list[int] = types.tolist()
        self._pieces: tuple[dict[int, bytes], dict[int, bytes]] = ({}, {})  # as shown, and with `special`
        self._with_text: dict[tuple[str, ...], tuple[int, ...]] = {}
        is_llama = self.model != "gpt2"
        self.pre, scheme = ("", PreTokenizer((), add_bos=True)) if is_llama else self._choose_pre(meta)
        self.add_space_prefix = is_llama and bool(
            get_number(meta, "tokenizer.ggml.add_space_prefix", self.model == "llama")
        )
        self._metaspace = get_string(meta, METASPACE_KEY) or ""
        if self._metaspace not in ("", "always", "first"):
            raise TokenizerError(f"the key {METASPACE_KEY!r} is {self._metaspace!r:.60}, not always or first")
        self.add_bos = bool(get_number(meta, "tokenizer.ggml.add_bos_token", scheme.add_bos))
        self.add_eos = bool(get_number(meta, "tokenizer.ggml.add_eos_token", False))
        self._read_special_ids(meta, scheme)
        self._words: SentencePieceWords | ByteLevelWords
        if is_llama:
            scores = get_numbers(meta, "tokenizer.ggml.scores", self.n_vocab, np.float64, default=0.0)
            if self.model == "gemma4":
                merges = decode_all(get_byte_strings(meta, "tokenizer.ggml.merges"))
                scores = np.array(scores_of_merges(self._texts, merges), np.float64)
            self._words = SentencePieceWords(self._ids, scores, self.unk or 0)
        else:
            self._words = ByteLevelWords(self._ids, get_byte_strings(meta, "tokenizer.ggml.merges"), scheme)
        newline = self._words.newline()
        self.nl = self.pad if newline is None else newline
        self._control: set[int] = set(np.flatnonzero(types == CONTROL).tolist())
        self._find_end_tokens()
        self._find_matched_tokens(get_string(meta, "general.name") or "")

    @classmethod
    def from_metadata(cls, meta: Mapping[str, Any]) -> Self:
        """The tokenizer that a GGUF file describes.

        meta: GGUF keys and their values: scalars and strings as such, arrays of numbers as sequences or numpy
        arrays, arrays of strings as list[bytes] (a file may hold invalid UTF-8).
        Raises TokenizerError with a sentence that names the key or the value.
        """
        # Hundreds of thousands of objects and no garbage among them: the collector would go through them
        # again and again, a tenth of the time.
        collecting = gc.isenabled()
        gc.disable()
        try:
            return cls(meta)
        finally:
            if collecting:
                gc.enable()

    # -- text to ids

    def encode(
        self,
        text: str | bytes,
        *,
        add_bos: bool,
        special: bool = False,
        plain: Mapping[str, str] | None = None,
        space_prefix: bool = True,
    ) -> list[int]:
        """The token ids of `text`.

        add_bos: put the BOS token before and the EOS token after the text where the model wants them
        (`add_bos`, `add_eos`). special: control tokens written in the text become those tokens; otherwise
        they are plain text. User-defined tokens are always matched. Bytes that are not valid UTF-8 become
        byte tokens ("llama") or one U+FFFD each ("gpt2"). plain: marks in the text and what they stand for,
        which is plain text also with `special`. space_prefix: False for text that goes on in the middle of a
        word: no space is put before it.
        """
        data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else bytes(text)
        output: list[int] = []
        if add_bos and self.add_bos and self.bos is not None:
            output.append(self.bos)
        after_special = space_prefix
        parts = self._partition(data, special)
        if plain:
            parts = [
                p for part in parts for p in ([part] if isinstance(part, int) else self._unmark(part, plain))
            ]
        for part in parts:
            if isinstance(part, int):
                output.append(part)
                after_special = self._metaspace != "first"
            else:
                has_space = self._metaspace and part.startswith((b" ", _SPACE))
                if self.add_space_prefix and after_special and not has_space:
                    part = b" " + part
                with _large if len(part) > _LARGE_BYTES else nullcontext():
                    output += self._words.encode(part)
                after_special = False
        if add_bos and self.add_eos and self.eos is not None:
            output.append(self.eos)
        return output

    def _unmark(self, data: bytes, plain: Mapping[str, str]) -> list[bytes | int]:
        for mark, text in plain.items():
            data = data.replace(mark.encode(), text.encode())
        return self._partition(data, special=False)

    def _partition(self, data: bytes, special: bool) -> list[bytes | int]:
        """Cut out the added tokens, longer ones first in the whole text, as llama.cpp does."""
        parts: list[bytes | int] = [data] if data else []
        for token_id, token, control, strip_right in self._matched:
            if (control and not special) or token not in data:
                continue
            cut: list[bytes | int] = []
            for part in parts:
                if isinstance(part, int):
                    cut.append(part)
                    continue
                for i, piece in enumerate(part.split(token)):
                    if i:
                        cut.append(token_id)
                        if strip_right:
                            piece = piece.lstrip(_WHITESPACE)
                    if piece:
                        cut.append(piece)
            parts = cut
        return parts

    # -- ids to text

    def piece(self, token: int, special: bool = False) -> bytes:
        """The bytes of one token; b"" for control tokens unless `special`. Raises IndexError."""
        piece = self._pieces[special].get(token)
        if piece is None:
            piece = self._pieces[special][token] = self._make_piece(token, special)
        return piece

    def _make_piece(self, token: int, special: bool) -> bytes:
        if not 0 <= token < self.n_vocab:
            raise IndexError(f"token {token} is outside of the vocabulary of {self.n_vocab} tokens")
        kind = self._types[token]
        if not special and (token in self._control or kind == UNKNOWN):
            return b""
        if token in self._control or kind in (CONTROL, UNKNOWN, USER_DEFINED):
            return self._tokens[token]
        if kind == BYTE:
            match = re.fullmatch(rb"<0x([0-9A-Fa-f]{2})>", self._tokens[token])
            return bytes([int(match[1], 16)]) if match else self._tokens[token]
        if kind != NORMAL:
            return b""
        if self.model != "gpt2":
            return self._tokens[token].replace(_SPACE, b" ")
        return b"".join(
            BYTE_OF_CHAR.get(c) or c.encode("utf-8", "surrogateescape") for c in self._texts[token]
        )

    def decode(self, ids: Iterable[int], *, special: bool = False) -> bytes:
        """The bytes of a sequence of tokens, which need not be whole characters.

        The space that `encode` puts before the text is removed where it follows the BOS token, so that
        decoding what was encoded with `add_bos` gives the text. Nothing else is cleaned up.
        """
        ids = list(ids)
        output = b"".join([self.piece(i, special) for i in ids])
        if self.strips_space(ids) and output.startswith(b" "):
            output = output[1:]
        return output

    def strips_space(self, ids: Sequence[int]) -> bool:
        """Whether `decode` drops one leading space from the text of these tokens."""
        return self.add_space_prefix and bool(ids) and ids[0] == self.bos

    def text(self, token: int) -> bytes:
        """The token as the file writes it."""
        if not 0 <= token < self.n_vocab:
            raise IndexError(f"token {token} is outside of the vocabulary of {self.n_vocab} tokens")
        return self._tokens[token]

    def id_of(self, text: str) -> int | None:
        """The token that the file writes as `text`, or None."""
        return self._ids.get(text)

    def with_text(self, texts: tuple[str, ...]) -> tuple[int, ...]:
        """The tokens whose text has one of these in it."""
        found = self._with_text.get(texts)
        if found is None:
            wanted = [text.encode() for text in texts]
            pieces = ((token, self.piece(token)) for token in range(self.n_vocab))
            found = tuple(token for token, piece in pieces if any(text in piece for text in wanted))
            if len(self._with_text) >= 16:
                self._with_text.clear()
            self._with_text[texts] = found
        return found

    def is_eog(self, token: int) -> bool:
        """Whether generation ends at this token: EOS, end of turn, and tokens known by their text."""
        return token in self.eog

    def is_control(self, token: int) -> bool:
        """Whether the token is a mark that is no part of the text."""
        return token in self._control

    @property
    def fim_pre(self) -> int | None:
        """The mark before the text that precedes a gap; None if the model has none."""
        return self._fim["fim_pre"]

    @property
    def fim_suf(self) -> int | None:
        """The mark before the text that follows a gap."""
        return self._fim["fim_suf"]

    @property
    def fim_mid(self) -> int | None:
        """The mark before what fills the gap."""
        return self._fim["fim_mid"]

    # -- construction

    def _choose_pre(self, meta: Mapping[str, Any]) -> tuple[str, PreTokenizer]:
        pre = get_string(meta, "tokenizer.ggml.pre")
        if not pre:
            architecture = get_string(meta, "general.architecture") or ""
            pre = PRE_BY_ARCHITECTURE.get(architecture, "default")
            self.notice = (
                f"the file does not name its pre-tokenizer (key 'tokenizer.ggml.pre'); using {pre!r}"
                + (f" as the architecture is {architecture!r}" if architecture in PRE_BY_ARCHITECTURE else "")
            )
        scheme = PRE_TOKENIZERS.get(pre)
        if scheme is None:
            raise TokenizerError(f"the pre-tokenizer {pre!r} (key 'tokenizer.ggml.pre') is not supported")
        return pre, scheme

    def _read_special_ids(self, meta: Mapping[str, Any], scheme: PreTokenizer) -> None:
        is_llama = self.model != "gpt2"
        bos = (1 if is_llama else 11) if scheme.default_bos else None

        def special_id(key: str, default: int | None = None, *, strict: bool = False) -> int | None:
            if default is not None and default >= self.n_vocab:
                default = None
            value = get_number(meta, f"tokenizer.ggml.{key}_token_id", None)
            if value is None or 0 <= value < self.n_vocab:
                return default if value is None else int(value)
            if strict:
                raise TokenizerError(
                    f"'tokenizer.ggml.{key}_token_id' is {value}, but there are {self.n_vocab} tokens"
                )
            return default

        self.bos = special_id("bos", bos, strict=True)
        self.eos = special_id("eos", 2 if is_llama else 11, strict=True)
        self.eot = special_id("eot", strict=True)
        self.eom = special_id("eom", strict=True)
        # Converters write nonsense (the size of the vocabulary, 2^32 - 1) for some that do not exist.
        self.unk = special_id("unknown", 0 if is_llama else None)
        self.sep = special_id("seperator")
        self.pad = special_id("padding")
        self.mask = special_id("mask")
        self.cls = special_id("cls")
        self._fim = {key: special_id(key) for key, _ in _FIM_TOKENS}

    def _find_end_tokens(self) -> None:
        """Fill in `eot`, `eom` and `eog`, and mark as control what is known to be control by its text."""

        def known(texts: Iterable[str]) -> int | None:
            token = next((self._ids[text] for text in texts if text in self._ids), None)
            if token is not None:
                self._control.add(token)
            return token

        if self.eot is None:
            self.eot = known(_EOT_TEXTS)
        if self.eom is None:
            self.eom = known(_EOM_TEXTS)
        for key, texts in _FIM_TOKENS:
            if self._fim[key] is None:
                self._fim[key] = known(texts)
        ends = {self._fim[key] for key in _FIM_EOG}
        for text in _EOG_TEXTS:
            ends.add(known([text]))
        ends |= {self.eos, self.eot, self.eom}
        shown = {self._ids[text] for text in _HARMONY_TEXTS if text in self._ids}
        # In a format that has these two, <|end|> closes only a part of an answer.
        if {"<|return|>", "<|call|>", "<|end|>"} <= self._ids.keys():
            shown.add(self._ids["<|end|>"])
            ends.discard(self._ids["<|end|>"])
        self._control -= shown
        for token in shown:
            self._types[token] = USER_DEFINED
        self.eog = frozenset(token for token in ends if token is not None)

    def _find_matched_tokens(self, name: str) -> None:
        """The tokens that are cut out of the text first: (id, bytes, control, strip space after)."""
        types = np.asarray(self._types)
        unknown = set(np.flatnonzero(types == UNKNOWN).tolist())
        hidden = self._control | unknown
        matched = hidden | set(np.flatnonzero(types == USER_DEFINED).tolist())
        strips = re.search("phi-?3", name.lower()) is not None
        keeps_space = {"<unk>", "<s>", "<|endoftext|>"}
        self._matched = [
            (i, self._tokens[i], i in hidden, strips and self._texts[i] not in keeps_space)
            for i in sorted(matched, key=lambda i: (-len(self._tokens[i]), i))
        ]
        self.control_texts = tuple(self._texts[i] for i, _, hidden, _ in self._matched if hidden)
