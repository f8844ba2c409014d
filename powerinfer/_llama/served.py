"""One request's view of a Llama that serves many: it completes and answers, and a scheduler computes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from .._engine.arrays import Ids, Logits
from .._engine.embedding import normalized
from .._engine.replicas import Replicas
from .._engine.request import Stream, taken
from .._engine.sampling import Criteria, Processors, Sampling
from .._engine.scheduler import Scheduler
from ..errors import ClosedError, UnsupportedError
from .completions import Completions, _Request

if TYPE_CHECKING:
    from .._text.answer import Answer
    from .._text.chat_format import ChatFormat
    from .._text.grammar import Constraint, LlamaGrammar
    from .._text.grammars import Grammars, RemoteConstraint
    from .._text.tokenizer import Tokenizer
    from ..llama import Llama

__all__ = ["Served"]

Reads = Literal["each", "whole", "ready"]
"""How an answer is read: waiting for each token, at its end, or what is there: then None stands between
tokens where no more are."""

_TICK_S = 0.1  # how often one that waits looks whether it still should

# What belongs to the context of a Llama that is used alone.
_OF_THE_CONTEXT = frozenset(
    [
        "eval",
        "reset",
        "sample",
        "scores",
        "n_tokens",
        "input_ids",
        "eval_tokens",
        "eval_logits",
        "save_state",
        "load_state",
        "set_cache",
        "embed",
        "create_embedding",
        "close",
    ]
)


class Served(Completions):
    """The methods of Completions for one request, used by one thread; many of them go on at the same time.
    The rest of `llama` is there as well, but its context."""

    def __init__(
        self,
        llama: Llama,
        scheduler: Scheduler | Replicas,
        *,
        limit: int | None = None,
        grammars: Grammars | None = None,
        preparing: threading.Semaphore | None = None,
        deadline: float | None = None,
        is_first: bool = True,
        reads: Reads = "each",
    ) -> None:
        """limit: no generation needs more tokens; 0: only the prompt counts. grammars: where its grammars are
        compiled; None: here. preparing: held while a prompt is made of text. deadline: of time.monotonic(),
        at which generations end. is_first: of several answers to one prompt. reads: how its answers are
        read."""
        self._llama = llama
        self.model_path = llama.model_path
        self.chat_handler = llama.chat_handler
        self.spm_infill = llama.spm_infill
        self.last_n_tokens_size = llama.last_n_tokens_size
        self._tokenizer = llama._tokenizer
        self._random = llama._random
        self._lock = threading.RLock()
        self._scheduler = scheduler
        self._grammars = grammars
        self._preparing = preparing or threading.Semaphore()
        self._limit = limit
        self._deadline = deadline
        self._is_closed = False
        self.is_first = is_first
        self._reads = reads
        self._is_whole = False
        self.streams: list[Stream] = []
        """Of its generations, in their order."""
        self._texts: list[Stream] = []

    def __getattr__(self, name: str) -> Any:
        if name in _OF_THE_CONTEXT:
            raise UnsupportedError(
                f"{name} belongs to the context of a Llama, which many requests share here"
            )
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._llama, name)

    @property
    def tokenizer(self) -> Tokenizer:
        return self._llama.tokenizer

    @property
    def _format(self) -> ChatFormat:
        return self._llama._format

    def n_vocab(self) -> int:
        return self._llama.n_vocab()

    def n_ctx(self) -> int:
        return self._llama.n_ctx()

    @property
    def _shifts(self) -> bool:
        return self._llama._shifts

    def _checked(self, tokens: Sequence[int] | Ids) -> Ids:
        return self._llama._checked(tokens)

    def _held_ids(self) -> Ids:
        raise UnsupportedError(
            "reset=False goes on with the context of a Llama, which many requests share here"
        )

    def _generation(
        self,
        prompt: Ids,
        options: Sampling,
        *,
        seed: int | None = None,
        logit_bias: Mapping[int, float] | None = None,
        logits_processor: Processors = None,
        stopping_criteria: Criteria = None,
        is_continued: bool = False,
        ends: Set[int] = frozenset(),
        **hooks: Any,
    ) -> Iterable[int]:
        if self._tokenizer is not None:
            ends = self._tokenizer.eog | ends if ends else self._tokenizer.eog
        constraint: Constraint | RemoteConstraint | None = hooks.get("constraint")
        try:
            choice = self._choice(
                options, seed, logit_bias, logits_processor, stopping_criteria, ends=ends, **hooks
            )
            stream = self._scheduler.submit(
                prompt, choice, limit=self._limit, deadline=self._deadline, is_whole=self._is_whole
            )
        except BaseException:
            if constraint is not None:
                constraint.close()
            raise
        self.streams.append(stream)
        if self._is_closed:
            stream.cancel()
            raise ClosedError("the request was cancelled")
        return taken(stream) if self._reads == "ready" else stream  # type: ignore[return-value]

    def _answer(self, ids: list[int], request: _Request) -> Answer:
        self._is_whole = self._reads == "whole" and not request.stop  # which are looked for in each token
        return super()._answer(ids, request)

    def watch(self, more: Callable[[], object]) -> None:
        """more: called when its generations, which have all begun, have more, in another thread."""
        for stream in self.streams:
            stream.on_more = more

    @contextmanager
    def _in_turn(self) -> Iterator[None]:
        """More threads than a few that make prompts would only take Python's lock from the scheduler's."""
        while not self._preparing.acquire(timeout=_TICK_S):
            self.check_open()
        try:
            yield
        finally:
            self._preparing.release()

    def _chat_ids(self, *args: Any, **options: Any) -> Any:
        with self._in_turn():
            return super()._chat_ids(*args, **options)

    def _prompt_ids(self, *args: Any, **options: Any) -> list[int]:
        with self._in_turn():
            return super()._prompt_ids(*args, **options)

    def ids_of(self, text: str | Sequence[int], *, add_bos: bool = True) -> Ids:
        """Checked token ids of a text."""
        if not isinstance(text, str):
            return self._checked(text)
        with self._in_turn():
            return self._checked(self._llama.tokenize(text, add_bos, special=True))

    def _constraint(
        self, grammar: LlamaGrammar | str | Constraint | None
    ) -> Constraint | RemoteConstraint | None:
        from .._text.grammar import LlamaGrammar

        if self._grammars is None or not isinstance(grammar, (LlamaGrammar, str)):
            return super()._constraint(grammar)
        return self._grammars.constraint(
            grammar,
            deadline=self._deadline,
            is_gone=lambda: self._is_closed or self._scheduler.is_closing,
        )

    def _score(self, ids: Ids, seen: Callable[[int, Logits], None]) -> None:
        self._scheduler.score(ids, seen, deadline=self._deadline, begun=self._begun)

    def _begun(self, stream: Stream) -> None:
        self._texts.append(stream)
        if self._is_closed:
            stream.cancel()

    def vectors(self, texts: Sequence[Ids], *, pooling: int, normalize: bool) -> list[Any]:
        """The embedding of each text; with pooling "none" one of each token."""
        self.check_open()
        found = self._scheduler.embed_all(texts, pooling=pooling, deadline=self._deadline, begun=self._begun)
        return [(normalized(vectors) if normalize else vectors).tolist() for vectors in found]

    def check_open(self) -> None:
        """Raises ClosedError after cancel()."""
        if self._is_closed:
            raise ClosedError("the request was cancelled")

    def cancel(self) -> None:
        """Ends what is under way; the Llama below stays open. May be called from another thread."""
        self._is_closed = True
        for stream in (*self.streams, *self._texts):
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
        return 0 if self._limit == 0 else sum(stream.n_given for stream in self.streams)
