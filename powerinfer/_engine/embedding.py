"""Vectors of texts: pooling, and the methods of Llama that make embeddings."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import ArgumentError, ArgumentTypeError, UnsupportedError
from ..types import CreateEmbeddingResponse
from .arrays import Ids, as_int32
from .context import Context
from .engine import Engine
from .file import ModelFile
from .ranking import Classifier
from .request import Request, text_request

Vectors = npt.NDArray[np.float32]

# llama.cpp's numbers, and what its files and its command line call them.
POOLING = {"none": 0, "mean": 1, "cls": 2, "last": 3}
_RANK = 4


def pooling_number(value: int | str | None) -> int:
    """A pooling type by name or number; -1 and None: what the file says. Raises ArgumentError."""
    if value is None or value == -1:
        return -1
    if value in (_RANK, "rank"):
        raise UnsupportedError("pooling_type 'rank' makes no vectors: rank() gives the scores of a reranker")
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


def embedding_request(
    engine: Engine, ids: Ids, pooling: int, rows: list[Vectors], *, deadline: float | None = None
) -> Request:
    """A request that appends to rows the final hidden states that pool() needs of a text. Raises what
    check() raises."""

    def note(_: int, row: int) -> None:
        rows.append(engine.session.hidden(row))

    engine.check(ids)
    return text_request(ids, needed(ids.size, pooling), note, engine.cancel, deadline=deadline)


def hidden_states(engine: Engine, texts: Iterable[Ids], pooling: int = 0) -> list[Vectors]:
    """Final hidden states [n, n_embd] of the tokens of each text that pool() needs.

    As many texts are computed together as the engine has sequences and blocks of K and V for; on the CPU each
    gets the bits that it gets alone.
    """
    all_rows, requests = [], []
    for ids in texts:
        all_rows.append(list[Vectors]())
        if ids.size:
            requests.append(embedding_request(engine, ids, pooling, all_rows[-1]))
    engine.run(requests)
    empty = np.empty((0, engine.session.model.info.n_embd), np.float32)
    return [np.stack(rows) if rows else empty for rows in all_rows]


class Embeddings(ABC):
    """What stands first is the part of Llama that these methods need."""

    model_path: str
    file: ModelFile
    _embedding: bool
    _pooling: int
    _lock: threading.RLock

    @property
    @abstractmethod
    def _ctx(self) -> Context: ...

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
        """Computes the vector of a text, or of each of several texts. The context is forgotten.

        input: one text, or several, which are computed together.
        normalize: scale vectors to length 1.
        truncate: cut texts to n_ctx tokens. False: a longer one is an error.
        return_count: return (vectors, number of tokens computed).
        pooling: "none", "mean", "cls" or "last", instead of the object's own.

        Returns n_embd floats as a list, or for several texts a list of such lists. Without pooling a text
        has a vector for each token: [n_tokens, n_embd].

        Raises ArgumentError unless the object was made with embedding=True, and for a text that is too long.
        """
        if not self._embedding:
            raise ArgumentError("embed() needs Llama(..., embedding=True)")
        kind = self._pooling if pooling is None else pooling_number(pooling)
        if not isinstance(input, (str, Sequence)) or isinstance(input, (bytes, bytearray)):
            raise ArgumentTypeError(f"the input is {type(input).__name__}, it must be a text or several")
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
            states = hidden_states(self._ctx.engine, arrays, kind)
        pooled = [pool(rows, kind) for rows in states]
        vectors = [(normalized(rows) if normalize else rows).tolist() for rows in pooled]
        result = vectors[0] if isinstance(input, str) else vectors
        return (result, sum(min(len(ids), n_ctx) for ids in all_ids)) if return_count else result

    def rank(self, query: str, documents: Sequence[str]) -> list[float]:
        """How well each of several documents answers a query, by a reranker: a model with a classifier, such
        as Qwen3-Reranker's. Its scores are between 0 and 1. The context is forgotten.

        Raises UnsupportedError for another model, ContextError for a text that n_ctx does not hold.
        """
        with self._lock:
            texts = self._classifier.ids([(query, document) for document in documents], self.tokenize)
            for ids in texts:
                self._ctx.engine.check(ids)
            self.reset()
            states = hidden_states(self._ctx.engine, texts, POOLING["last"])
            return self._classifier.scores([rows[-1] for rows in states]) if texts else []

    @cached_property
    def _classifier(self) -> Classifier:
        return Classifier(self.file)

    def create_embedding(
        self, input: str | Sequence[str], model: str | None = None
    ) -> CreateEmbeddingResponse:
        """Computes embeddings and returns them in OpenAI's shape.

        input: one text, or several.
        model: the name that the result carries. None: the path of the file.

        Returns a dict: the vector of text i, as embed() gives it, is result["data"][i]["embedding"]. Token
        counts are in result["usage"]. Raises what embed() raises.

            llm = Llama("model.gguf", embedding=True, pooling_type="mean")
            vector = llm.create_embedding("Hello")["data"][0]["embedding"]
        """
        vectors, n_tokens = self.embed([input] if isinstance(input, str) else input, return_count=True)
        return {
            "object": "list",
            "data": [{"object": "embedding", "embedding": v, "index": i} for i, v in enumerate(vectors)],
            "model": self.model_path if model is None else model,
            "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens},
        }
