"""Vectors of texts: pooling, and the methods of Llama that make embeddings."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import ArgumentError, UnsupportedError
from ..types import CreateEmbeddingResponse
from ._native import chunk_end
from .arrays import as_int32
from .context import VISIT_PART, Ids, visits
from .file import ModelFile
from .held import blocks
from .session import Session, Want

Vectors = npt.NDArray[np.float32]

# llama.cpp's numbers, and what its files and its command line call them.
POOLING = {"none": 0, "mean": 1, "cls": 2, "last": 3}
_RANK = 4


def pooling_number(value: int | str | None) -> int:
    """A pooling type by name or number; -1 and None: what the file says. Raises ArgumentError."""
    if value is None or value == -1:
        return -1
    if value in (_RANK, "rank"):
        raise UnsupportedError("pooling_type 'rank' is for rerankers, which this version cannot run")
    number = POOLING.get(value, -1) if isinstance(value, str) else value
    if number not in POOLING.values() or isinstance(value, bool):
        raise ArgumentError(f"pooling_type is {value!r}; known are {', '.join(POOLING)}, 0 to 3 and -1")
    return number


def pooling_of_file(file: ModelFile) -> int:
    """What the file says about itself; 0 (none) if it says nothing."""
    meta = file.metadata
    value = meta.get(f"{meta.get('general.architecture')}.pooling_type")
    return value if isinstance(value, int) and value in POOLING.values() else 0


def pool(rows: Vectors, pooling: int) -> Vectors:
    """One vector [n_embd] of those of all tokens [n, n_embd], or the rows themselves for 0."""
    if pooling == 0:
        return rows
    if not len(rows):
        return np.zeros(rows.shape[1:], np.float32)
    if pooling == 1:
        mean: Vectors = rows.mean(axis=0, dtype=np.float64).astype(np.float32)
        return mean
    chosen: Vectors = rows[0] if pooling == 2 else rows[-1]
    return chosen


def normalized(vectors: Vectors) -> Vectors:
    """Vectors of length 1; a vector of zeros stays."""
    length = np.linalg.norm(vectors, axis=-1, keepdims=True)
    result: Vectors = vectors / np.maximum(length, 1e-12)
    return result


def needed(n: int, pooling: int) -> range:
    """Of which of a text's n tokens the hidden states are needed."""
    return {2: range(min(n, 1)), 3: range(max(n - 1, 0), n)}.get(pooling, range(n))


@dataclass(eq=False)
class _Text:
    ids: Ids
    wanted: range
    seq: int = 0
    n: int = 0  # tokens computed
    rows: list[Vectors] = field(default_factory=list)


def hidden_states(
    session: Session, texts: Iterable[Ids], pooling: int = 0, *, sequences: Sequence[int] = (0,)
) -> list[Vectors]:
    """Final hidden states [n, n_embd] of the tokens of each text that pool() needs.

    As many texts are computed together as there are sequences, which must be empty and are dropped, and
    blocks of K and V; on the CPU each gets the bits that it gets alone.
    """
    all_texts = [_Text(ids, needed(ids.size, pooling)) for ids in texts]
    waiting, running, free = deque(all_texts), list[_Text](), list(sequences)
    try:
        while waiting or running:
            _begin(session, waiting, running, free)
            _step(session, running)
            for text in [text for text in running if text.n == text.ids.size]:
                running.remove(text)
                session.drop(text.seq)
                free.append(text.seq)
    finally:
        for text in running:
            session.drop(text.seq)
    empty = np.empty((0, session.model.info.n_embd), np.float32)
    return [np.stack(text.rows) if text.rows else empty for text in all_texts]


def _begin(session: Session, waiting: deque[_Text], running: list[_Text], free: list[int]) -> None:
    """Gives sequences to those that wait, in their order."""
    n_blocks = session.info.n_blocks_free - sum(blocks(text.ids.size) - blocks(text.n) for text in running)
    while waiting and free and (not running or blocks(waiting[0].ids.size) <= n_blocks):
        text = waiting.popleft()
        text.seq = free.pop()
        running.append(text)
        n_blocks -= blocks(text.ids.size)


def _step(session: Session, running: list[_Text]) -> None:
    """One feed with a part of each text, as far as there is room."""
    room, n_visits = session.info.n_batch, 2 * VISIT_PART  # their logits are computed too, and take memory
    ids, owners, wants, shown = [], list[int](), list[Want](), list[_Text]()
    for text in running:
        end = chunk_end(text.n, text.ids.size, room, scored=text.wanted, max_scored=n_visits)
        own = visits(text.wanted, text.n, end)
        ids.append(text.ids[text.n : end])
        owners += [text.seq] * len(own)
        wants += own
        shown += [text] * np.count_nonzero(own)
        room -= len(own)
        n_visits -= np.count_nonzero(own)
        text.n = end
    if owners:
        session.feed(np.concatenate(ids), seq=owners, want_logits=wants)
    for row, text in enumerate(shown):
        text.rows.append(session.hidden(row))


class Embeddings(ABC):
    """What stands first is the part of Llama that these methods need."""

    model_path: str
    _embedding: bool
    _pooling: int
    _lock: threading.RLock
    _embedding_sequences: Sequence[int]

    @property
    @abstractmethod
    def session(self) -> Session:
        """The session below; sequence 0 is this object's context."""

    @abstractmethod
    def tokenize(self, text: bytes | str, add_bos: bool = True, special: bool = False) -> list[int]: ...

    @abstractmethod
    def n_ctx(self) -> int: ...

    @abstractmethod
    def reset(self) -> None: ...

    def pooling_type(self) -> int:
        """How embed() makes one vector of a text: 0 not at all, 1 mean, 2 the first token's, 3 the last."""
        return self._pooling

    def embed(
        self,
        input: str | Sequence[str],
        normalize: bool = False,
        truncate: bool = True,
        return_count: bool = False,
        *,
        pooling: int | str | None = None,
    ) -> Any:
        """The vector of a text as a list of floats, or of each of several texts, which are computed together.
        The context is forgotten.

        Without pooling there is a vector for each token: [n_tokens, n_embd].

        normalize: vectors of length 1.
        truncate: cut texts to n_ctx tokens; False refuses longer ones.
        return_count: return (vectors, tokens computed).
        pooling: instead of the object's own.

        Raises ArgumentError unless the object was made with embedding=True, and for a text that is too long.
        """
        if not self._embedding:
            raise ArgumentError("embed() needs Llama(..., embedding=True)")
        kind = self._pooling if pooling is None else pooling_number(pooling)
        texts = [input] if isinstance(input, str) else list(input)
        if not all(isinstance(text, (str, bytes)) for text in texts):
            raise ArgumentError("the input of embed() must be a text or several")
        all_ids = [self.tokenize(text, special=True) for text in texts]
        n_ctx = self.n_ctx()
        for ids in all_ids:
            if len(ids) > n_ctx and not truncate:
                raise ArgumentError(f"a text has {len(ids)} tokens and n_ctx is {n_ctx}")
        with self._lock:
            self.reset()
            arrays = [as_int32("tokens", ids[:n_ctx]) for ids in all_ids]
            states = hidden_states(self.session, arrays, kind, sequences=self._embedding_sequences)
        pooled = [pool(rows, kind) for rows in states]
        vectors = [(normalized(rows) if normalize else rows).tolist() for rows in pooled]
        result = vectors[0] if isinstance(input, str) else vectors
        return (result, sum(min(len(ids), n_ctx) for ids in all_ids)) if return_count else result

    def create_embedding(
        self, input: str | Sequence[str], model: str | None = None
    ) -> CreateEmbeddingResponse:
        """embed() in OpenAI's shape."""
        texts = [input] if isinstance(input, str) else list(input)
        vectors, n_tokens = self.embed(texts, return_count=True)
        return {
            "object": "list",
            "data": [{"object": "embedding", "embedding": v, "index": i} for i, v in enumerate(vectors)],
            "model": self.model_path if model is None else model,
            "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens},
        }
