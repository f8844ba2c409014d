"""Reading tokenizer.model, the vocabulary file of SentencePiece: a protocol buffer.

ModelProto: 1 repeated SentencePiece {1 piece, 2 score, 3 type}, 2 TrainerSpec {3 model_type, 40 to 43 ids of
unk, bos, eos, pad}, 3 NormalizerSpec {2 precompiled_charsmap, 3 add_dummy_prefix, 4 remove_extra_whitespaces}
(https://github.com/google/sentencepiece, sentencepiece_model.proto).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ...errors import FormatError, UnsupportedError
from .files import read_file

_UNIGRAM, _BPE = 1, 2
_NORMAL, _BYTE = 1, 6

NORMALISES = "the tokenizer normalises text (Unicode forms), the engine takes it as it is"


@dataclass(frozen=True)
class SentencePieces:
    """A vocabulary. The types are numbered as in GGUF files."""

    pieces: list[str]
    scores: list[float]
    types: list[int]
    ids: dict[str, int]
    """Of "unk", "bos", "eos" and "pad", as far as the model has them."""
    add_dummy_prefix: bool
    notes: tuple[str, ...]


def is_sentencepiece(path: Path) -> bool:
    """Whether the file begins as such files do: with the first piece."""
    try:
        with path.open("rb") as file:
            return file.read(1) == b"\x0a"
    except OSError:
        return False


def read_sentencepiece(path: Path) -> SentencePieces:
    """Raises FileError, FormatError, UnsupportedError (a unigram model)."""
    data = memoryview(read_file(path))
    try:
        return _read(data, str(path))
    except (struct.error, IndexError, TypeError, UnicodeDecodeError) as error:
        raise FormatError(f"{path} is not a sound SentencePiece model: {error}") from None


def _read(data: memoryview, where: str) -> SentencePieces:
    pieces, scores, types = [], [], []
    trainer: dict[int, int | memoryview] = {}
    normalizer: dict[int, int | memoryview] = {}
    for number, value in _fields(data):
        if number == 1:
            entry = dict(_fields(_message(value)))
            pieces.append(bytes(_message(entry.get(1, memoryview(b"")))).decode())
            scores.append(struct.unpack("<f", _message(entry.get(2, memoryview(bytes(4)))))[0])
            types.append(_varint(entry.get(3, _NORMAL)))
        elif number == 2:
            trainer.update(_fields(_message(value)))
        elif number == 3:
            normalizer.update(_fields(_message(value)))
    if not pieces:
        raise FormatError(f"{where} holds no pieces")
    wrong = next((i for i, kind in enumerate(types) if not _NORMAL <= kind <= _BYTE), None)
    if wrong is not None:
        raise FormatError(f"{where}: piece {wrong} has the type {types[wrong]}")
    kind = _varint(trainer.get(3, _UNIGRAM))
    if kind != _BPE:
        name = {_UNIGRAM: "unigram", 3: "word", 4: "character"}.get(kind, str(kind))
        raise UnsupportedError(f"{where} is a {name} model; the engine's tokenizer needs a BPE one")
    notes = []
    if _message(normalizer.get(2, memoryview(b""))):
        notes.append(NORMALISES)
    if _varint(normalizer.get(4, 1)):
        notes.append("the tokenizer removes repeated spaces, the engine keeps them")
    ids = {}
    for field, name, default in ((40, "unk", 0), (41, "bos", 1), (42, "eos", 2), (43, "pad", -1)):
        value = _varint(trainer.get(field, default))
        if 0 <= value < len(pieces):  # "none" is -1, which as a varint is 2^64 - 1
            ids[name] = value
    return SentencePieces(pieces, scores, types, ids, bool(_varint(normalizer.get(3, 1))), tuple(notes))


def _message(value: int | memoryview) -> memoryview:
    if not isinstance(value, memoryview):
        raise TypeError("a number stands where bytes must be")
    return value


def _varint(value: int | memoryview) -> int:
    if not isinstance(value, int):
        raise TypeError("bytes stand where a number must be")
    return value


def _fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Number and value of each field: numbers as such, all else as bytes."""
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
            if shift > 63:
                raise IndexError("a number has more than 64 bits")

    while at < len(data):
        tag = number()
        kind = tag & 7
        if kind == 0:
            yield tag >> 3, number()
            continue
        if kind not in (1, 2, 5):
            raise TypeError(f"a field is of the kind {kind}")
        size = number() if kind == 2 else 8 if kind == 1 else 4
        if size > len(data) - at:
            raise IndexError("a field reaches beyond the end")
        yield tag >> 3, data[at : at + size]
        at += size
