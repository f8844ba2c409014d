"""One request's view of a Llama whose session a scheduler has: the same methods, other tokens."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import ClosedError
from ..llama import Llama
from .choice import Choice
from .context import Ids, Logits
from .embedding import normalized
from .sampling import Criteria, LogitsProcessorList, Processors, Sampler, Sampling, StoppingCriteriaList
from .scheduler import Scheduler, Stream

__all__ = ["Seat"]


class Seat(Llama):
    """A Llama for one request. It shares everything with `llama` but the lock and where tokens come from, so
    that many of them can be used at the same time, each by one thread."""

    def __init__(
        self,
        llama: Llama,
        scheduler: Scheduler,
        *,
        limit: int | None = None,
        deadline: float | None = None,
        is_first: bool = True,
    ) -> None:
        """limit: no generation needs more tokens. deadline: of time.monotonic(), at which they end. is_first:
        of several answers to one prompt."""
        self.__dict__.update(llama.__dict__)
        self._lock = threading.RLock()
        self._scheduler = scheduler
        self._limit = limit
        self._deadline = deadline
        self._is_closed = False
        self.is_first = is_first
        self.streams: list[Stream] = []
        """Of its generations, in their order."""
        self._visits: list[Stream] = []

    def _generation(
        self,
        prompt: Ids,
        options: Sampling,
        *,
        seed: int | None = None,
        logit_bias: Mapping[int, float] | None = None,
        logits_processor: Processors = None,
        stopping_criteria: Criteria = None,
        **hooks: Any,
    ) -> Stream:
        sampler = Sampler(options, self.n_vocab(), logit_bias=self._bias(logit_bias))
        sampler.reset(self._seed(seed))
        choice = Choice(
            sampler=sampler,
            ends=() if self._tokenizer is None else self._tokenizer.eog,
            processors=LogitsProcessorList.of(logits_processor),
            criteria=StoppingCriteriaList.of(stopping_criteria),
            **hooks,
        )
        stream = self._scheduler.submit(prompt, choice, limit=self._limit, deadline=self._deadline)
        self.streams.append(stream)
        if self._is_closed:
            stream.cancel()
            raise ClosedError("the request was cancelled")
        return stream

    def _visit(self, ids: Ids, seen: Callable[[int, Logits], None]) -> None:
        self._scheduler.visit(ids, seen, deadline=self._deadline, begun=self._begun)

    def _begun(self, stream: Stream) -> None:
        self._visits.append(stream)
        if self._is_closed:
            stream.cancel()

    def vectors(self, texts: Sequence[Ids], *, pooling: int, normalize: bool) -> list[Any]:
        """The embedding of each text; with pooling "none" one of each token."""
        if self._is_closed:
            raise ClosedError("the request was cancelled")
        found = self._scheduler.embed_all(texts, pooling=pooling, deadline=self._deadline, begun=self._begun)
        return [(normalized(vectors) if normalize else vectors).tolist() for vectors in found]

    def close(self) -> None:
        """Cancels what is under way; the Llama below stays open. May be called from another thread."""
        self._is_closed = True
        for stream in (*self.streams, *self._visits):
            stream.cancel()

    @property
    def n_prompt(self) -> int:
        """Tokens of its prompts."""
        return sum(stream.n_prompt for stream in self.streams)

    @property
    def n_reused(self) -> int:
        """Of those, held already."""
        return sum(stream.n_reused for stream in self.streams)

    @property
    def n_given(self) -> int:
        """Tokens of its answers so far."""
        return sum(stream.n_given for stream in self.streams)
