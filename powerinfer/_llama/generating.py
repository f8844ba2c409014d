"""From tokens to more of them: the methods of Llama that generate and sample, and its prompt cache."""

from __future__ import annotations

import math
import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence, Set
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from .._engine.arrays import Ids, Logits, common_prefix
from .._engine.checks import whole
from .._engine.choice import Choice
from .._engine.context import Context
from .._engine.drafting import Drafter
from .._engine.report import LlamaState, Timings
from .._engine.request import Draft
from .._engine.sampling import (
    Criteria,
    LogitsProcessorList,
    Processors,
    Sampler,
    Sampling,
    StoppingCriteriaList,
    last,
    sampling_of,
)
from ..errors import ArgumentError, ArgumentTypeError, ClosedError, ContextError, FormatError
from .generation import Generation
from .options import SamplingOptions, spelled

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .._text.grammar import Constraint, LlamaGrammar
    from .._text.grammars import RemoteConstraint
    from .._text.tokenizer import Tokenizer
    from ..compat.llama_cache import BaseLlamaCache

Watch = Callable[[Logits, int], None]

RANDOM_SEEDS = (None, -1, 0xFFFFFFFF)  # the last is what llama-cpp-python calls its default seed


def nth_seed(seed: int | None, i: int) -> int | None:
    """The seed of the i-th of several answers: those after the first follow it. None of them is random
    unless the first is, for a number of more than 64 bits stands for its last 64."""
    return seed if not i or seed in RANDOM_SEEDS else (seed + i) % 2**64 + 2**64


class Generating(ABC):
    """Generating, whatever computes the tokens. What stands first is the part of a Llama that it needs."""

    last_n_tokens_size: int
    _lock: threading.RLock
    _tokenizer: Tokenizer | None
    _random: random.Random

    @property
    @abstractmethod
    def tokenizer(self) -> Tokenizer:
        """The vocabulary. Raises FormatError if the file has none."""

    @abstractmethod
    def n_vocab(self) -> int: ...

    @abstractmethod
    def _checked(self, tokens: Sequence[int] | Ids) -> Ids: ...

    @abstractmethod
    def _held_ids(self) -> Ids:
        """A copy of the ids that the context holds."""

    @abstractmethod
    def _generation(
        self,
        prompt: Ids,
        options: Sampling,
        *,
        seed: int | None = None,
        logit_bias: Mapping[int, float] | None = None,
        logits_processor: Processors = None,
        stopping_criteria: Criteria = None,
        constraint: Constraint | RemoteConstraint | None = None,
        watch: Watch | None = None,
        is_continued: bool = False,
        ends: Set[int] = frozenset(),
    ) -> Iterable[int]:
        """The tokens that follow a prompt. ends: after which nothing is wanted, beside end tokens. Raises
        ContextError for a prompt that is too long."""

    def _choice(
        self,
        options: Sampling,
        seed: int | None,
        logit_bias: Mapping[int, float] | None,
        processors: Processors,
        criteria: Criteria,
        **hooks: Any,
    ) -> Choice:
        sampler = self._new_sampler(options, self._bias(logit_bias))
        sampler.reset(self._seed(seed))
        return Choice(
            sampler=sampler,
            processors=LogitsProcessorList.of(processors),
            criteria=StoppingCriteriaList.of(criteria),
            **hooks,
        )

    def _new_sampler(self, options: Sampling, bias: Mapping[int, float]) -> Sampler:
        breakers: Sequence[int] = ()
        if options.dry_multiplier > 0:
            breakers = self.tokenizer.with_text(options.dry_sequence_breakers)
        return Sampler(options, self.n_vocab(), logit_bias=bias, breakers=breakers)

    def _seed(self, seed: int | None) -> int:
        if seed is None or seed in RANDOM_SEEDS:
            return self._random.getrandbits(64)
        return whole("seed", seed) & (2**64 - 1)

    def _bias(self, logit_bias: Mapping[int, float] | None) -> dict[int, float]:
        """What is added to logits: -inf to those that pad the vocabulary of the model beyond that of the
        tokenizer. Token ids may be strings of digits, as they are in JSON."""
        try:
            bias = {int(token): float(value) for token, value in (logit_bias or {}).items()}
        except (TypeError, ValueError, AttributeError):
            raise ArgumentError("logit_bias must map token ids to numbers") from None
        if self._tokenizer is not None:
            bias |= dict.fromkeys(range(self._tokenizer.n_vocab, self.n_vocab()), -math.inf)
        return bias

    def _constraint(
        self, grammar: LlamaGrammar | str | Constraint | None
    ) -> Constraint | RemoteConstraint | None:
        if grammar is None:
            return None
        from .._text.grammar import Constraint, LlamaGrammar

        if isinstance(grammar, Constraint):
            return grammar
        if isinstance(grammar, str):
            grammar = LlamaGrammar.from_string(grammar)
        if not isinstance(grammar, LlamaGrammar):
            raise ArgumentError(f"grammar is {type(grammar).__name__}, not LlamaGrammar")
        return grammar.constraint(self.tokenizer)

    @spelled(SamplingOptions)
    def generate(
        self,
        tokens: Sequence[int],
        *,
        reset: bool = True,
        seed: int | None = None,
        logit_bias: Mapping[int, float] | None = None,
        logits_processor: Processors = None,
        stopping_criteria: Criteria = None,
        grammar: LlamaGrammar | str | None = None,
        penalize_nl: bool = True,
        **sampling: Unpack[SamplingOptions],
    ) -> Generator[int, Sequence[int] | None, None]:
        """Generates token after token, without end: end tokens are yielded like others.

        Tokens that are sent to the generator are appended to those that it yielded.

        tokens: the prompt. What the context holds of its beginning is reused.
        reset: False continues the context with tokens instead.
        seed: of this generation; None: the next of the object's own.
        stopping_criteria: asked after each token, with it among the ids; when one says so that token is
            the last.
        grammar: what the tokens must follow; the last one is that after which nothing may come.
        sampling: `temp` (or `temperature`), `top_k`, `top_p` and so on: those of create_completion().

        Raises ContextError for a prompt longer than n_ctx, and when the context is full and
        context_shift is off.
        """
        options = sampling_of("generate()", sampling, self.last_n_tokens_size, penalize_nl)
        ids = self._checked(tokens)
        if not reset:
            ids = np.concatenate([self._held_ids(), ids])
        generation: Any = self._generation(
            ids,
            options,
            is_continued=not reset,
            seed=seed,
            logit_bias=logit_bias,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            constraint=self._constraint(grammar),
        )
        return iter(generation)  # type: ignore[no-any-return]


class ContextGenerating(Generating):
    """Generating and sampling with the context of a Llama."""

    prompt_progress: Callable[[int, int], None] | None
    cache: BaseLlamaCache | None
    _sampler: Sampler | None
    _timings: Timings

    @property
    @abstractmethod
    def _ctx(self) -> Context: ...

    @property
    @abstractmethod
    def _draft(self) -> Draft | Drafter | None: ...

    @abstractmethod
    def save_state(self) -> LlamaState: ...

    @abstractmethod
    def load_state(self, state: LlamaState) -> None: ...

    @abstractmethod
    def _model_identity(self) -> str: ...

    @abstractmethod
    def _between_requests(self) -> None:
        """What is put off until nothing is computed."""

    @spelled(SamplingOptions)
    def sample(
        self,
        *,
        logit_bias: Mapping[int, float] | None = None,
        logits_processor: Processors = None,
        grammar: LlamaGrammar | str | Constraint | None = None,
        idx: int | None = None,
        penalize_nl: bool = True,
        **sampling: Unpack[SamplingOptions],
    ) -> int:
        """Chooses a token after what was evaluated. It is not evaluated itself.

        idx: after which of the tokens held; None: the last. Another one needs logits_all.
        grammar: a LlamaGrammar or GBNF, of which this token is the first; or what LlamaGrammar.constraint()
            returned, which goes on from the tokens before.
        sampling: `temp` (or `temperature`), `top_k`, `top_p` and so on: those of create_completion().
        With mirostat the surprise bound is remembered until options change, or reset(), set_seed() or
        load_state().
        """
        options = sampling_of("sample()", sampling, self.last_n_tokens_size, penalize_nl)
        bias = self._bias(logit_bias)
        constraint = self._constraint(grammar)
        with self._lock:
            context = self._ctx
            ids, logits = context.ids, context.logits
            if idx is not None and idx not in (-1, ids.size - 1):
                if not context.keeps_all:
                    raise ArgumentError(f"idx is {idx}: without logits_all only the last token has logits")
                if not -ids.size <= idx < ids.size:
                    raise ArgumentError(f"idx is {idx}: {ids.size} tokens are held")
                logits, ids = context.scores[idx].copy(), ids[: idx % ids.size + 1]
            sampler = self._sampler
            if sampler is None or sampler.options != options or sampler.logit_bias != bias:
                sampler = self._sampler = self._new_sampler(options, bias)
                sampler.reset(self._seed(None))
            elif options.mirostat_mode == 0:
                sampler.reset(self._seed(None))
            if options.penalises:
                sampler.accept(*last(ids, options.lookback))
            logits = LogitsProcessorList.of(logits_processor)(ids.copy(), logits)
            if constraint is None:
                return sampler.sample(logits)
            constraint.mask(logits := logits.copy())
            token = sampler.sample(logits)
            constraint.accept(token)
            return token

    def _generation(
        self,
        prompt: Ids,
        options: Sampling,
        *,
        seed: int | None = None,
        logit_bias: Mapping[int, float] | None = None,
        logits_processor: Processors = None,
        stopping_criteria: Criteria = None,
        constraint: Constraint | RemoteConstraint | None = None,
        watch: Watch | None = None,
        is_continued: bool = False,
        ends: Set[int] = frozenset(),
    ) -> Iterable[int]:
        del ends  # who reads the tokens knows
        self._between_requests()
        choice = self._choice(
            options, seed, logit_bias, logits_processor, stopping_criteria, constraint=constraint, watch=watch
        )
        with self._lock:
            request = self._ctx.generation(
                prompt,
                choice,
                is_continued=is_continued,
                report=self.prompt_progress,
                draft=self._draft,
            )
        generation = Generation(
            self._ctx.engine, self._lock, request, note=self._note_timings, load_s=self._timings.load_s
        )
        return generation if self.cache is None else self._through(self.cache, prompt, generation)

    def _held_ids(self) -> Ids:
        with self._lock:
            ids: Ids = self._ctx.ids.copy()
            return ids

    def _note_timings(self, timings: Timings) -> None:
        self._timings = timings

    # -- the cache of prompts

    def set_cache(self, cache: BaseLlamaCache | None) -> None:
        """Keeps what the create_ methods computed, and looks there for the beginning of their prompts.

        cache: a LlamaRAMCache or LlamaDiskCache, which several objects may share; None: no longer.
        """
        if cache is not None and not hasattr(cache, "lookup"):
            raise ArgumentTypeError(
                f"the cache is {type(cache).__name__}, it must be a LlamaRAMCache or LlamaDiskCache"
            )
        self.cache = cache

    def _through(
        self, cache: BaseLlamaCache, prompt: Ids, generation: Generation
    ) -> Generator[int, None, None]:
        """The same tokens, with a look into the cache before the first and a copy for it after the last."""
        with self._lock:
            n_held = common_prefix(self._ctx.ids, prompt)
            # One id is always computed anew, so a state that is longer by that alone helps nothing.
            with suppress(KeyError, FormatError, ContextError):
                state = cache.lookup(prompt.tolist(), self._model_identity())
                if common_prefix(state.context.ids, prompt) > n_held < prompt.size - 1:
                    chosen = self._random.getstate()
                    self.load_state(state)
                    self._random.setstate(chosen)
        try:
            with closing(iter(generation)) as tokens:
                yield from tokens
        finally:
            with self._lock, suppress(ClosedError):
                ids = self._ctx.ids
                if ids.size:
                    cache[ids.tolist()] = self.save_state()
