"""Vectors and scores of texts, beside what an AsyncLlama answers."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from .._engine import checks
from .._engine.arrays import Ids
from .._engine.embedding import POOLING
from ..errors import ArgumentError
from .async_stream import Chunk
from .served import Served

if TYPE_CHECKING:
    from ..llama import Llama

T = TypeVar("T")


class AsyncVectors(ABC):
    """The methods of AsyncLlama that compute vectors. What stands first is the part of it that they need."""

    llama: Llama
    pooling: int

    @abstractmethod
    def _begin(self, *, deadline: float | None = None) -> Served: ...

    @abstractmethod
    def _end(self, request: Served) -> None: ...

    @abstractmethod
    def _in_thread(self, function: Callable[..., T], *arguments: Any) -> asyncio.Future[T]: ...

    async def embed(
        self, input: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]], *, normalize: bool = False
    ) -> list[Any]:
        """Computes the vector of a text, or of each of several texts.

        input: a text or its token ids, or a list of either.
        normalize: scale vectors to length 1.

        Returns n_embd floats, or for a list of texts a list of vectors. With pooling "none" a text has a
        vector for each token: [n_tokens, n_embd]. Raises ArgumentError for a text that is too long,
        BusyError, ClosedError.
        """
        one, texts = _texts(input)
        vectors, _ = await self._vectors(texts, normalize=normalize)
        return vectors[0] if one else vectors

    async def create_embedding(
        self,
        input: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
        *,
        model: str | None = None,
        normalize: bool = False,
        max_tokens: int | None = None,
        timeout_s: float | None = None,
    ) -> Chunk:
        """Computes embeddings and returns them in OpenAI's shape.

        input, normalize: as in embed().
        model: the name that the result carries. None: the path of the file.
        max_tokens: that all of them may have together, else ArgumentError is raised. None: no limit.
        timeout_s: seconds after which DeadlineError is raised. None: no limit.

        Returns a dict: the vector of text i is result["data"][i]["embedding"], token counts are in
        result["usage"].
        """
        _, texts = _texts(input)
        vectors, n_tokens = await self._vectors(
            texts, normalize=normalize, max_tokens=max_tokens, timeout_s=timeout_s
        )
        data = [{"object": "embedding", "index": i, "embedding": v} for i, v in enumerate(vectors)]
        return {
            "object": "list",
            "data": data,
            "model": self.llama.model_path if model is None else model,
            "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens},
        }

    async def _vectors(
        self,
        texts: Sequence[str | Sequence[int]],
        *,
        normalize: bool,
        max_tokens: int | None = None,
        timeout_s: float | None = None,
    ) -> tuple[list[Any], int]:
        return await self._of_texts(
            texts,
            lambda request, ids: request.vectors(ids, pooling=self.pooling, normalize=normalize),
            max_tokens=max_tokens,
            timeout_s=timeout_s,
        )

    async def rank(
        self,
        pairs: Sequence[tuple[str, str]],
        *,
        max_tokens: int | None = None,
        timeout_s: float | None = None,
    ) -> tuple[list[float], int]:
        """How well documents answer queries, as Llama.rank().

        pairs: (query, document).
        max_tokens, timeout_s: as in create_embedding().

        Returns the score of each pair, and how many tokens they have together.
        """
        classifier = await self._in_thread(lambda: self.llama._classifier)

        def scores(request: Served, ids: list[Ids]) -> list[float]:
            states = request.vectors(ids, pooling=POOLING["last"], normalize=False)
            return classifier.scores(states) if states else []

        return await self._of_texts(
            (classifier.text(*pair) for pair in pairs),
            scores,
            add_bos=False,
            max_tokens=max_tokens,
            timeout_s=timeout_s,
        )

    async def _of_texts(
        self,
        texts: Iterable[str | Sequence[int]],
        work: Callable[[Served, list[Ids]], list[Any]],
        *,
        add_bos: bool = True,
        max_tokens: int | None,
        timeout_s: float | None,
    ) -> tuple[list[Any], int]:
        """What `work` gives for texts, and how many tokens they have."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        request = self._begin(deadline=deadline)

        def compute() -> tuple[list[Any], int]:
            try:
                all_ids: list[Ids] = []
                left = max_tokens
                for text in texts:
                    all_ids.append(request.ids_of(text, add_bos=add_bos))
                    if left is not None and (left := left - all_ids[-1].size) < 0:
                        raise ArgumentError(f"the texts have more than {max_tokens} tokens together")
                    request.check_open()
                return work(request, all_ids), sum(ids.size for ids in all_ids)
            finally:
                self._end(request)

        try:
            return await self._in_thread(compute)
        except asyncio.CancelledError:
            self._end(request)
            raise


def _texts(input: Any) -> tuple[bool, Sequence[str | Sequence[int]]]:
    """Whether it is one text, and the texts, each of which may be token ids."""
    if checks.are_several(input):
        return False, input
    if isinstance(input, str):
        return True, [input]
    ids = checks.token_ids("the input", input)
    if not ids:
        raise ArgumentError("input is empty")
    return True, [ids]
