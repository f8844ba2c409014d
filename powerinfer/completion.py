"""From tokens and text to more of them: the methods of Llama that choose, generate, complete and answer."""

from __future__ import annotations

import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from .compat import LATER_CHAT, LATER_COMPLETION, refuse
from .context import Context, Ids, Logits
from .errors import ArgumentError
from .generation import SAMPLING_NAMES, Generation, last, sampling_of
from .report import Timings
from .sampling import (
    Criteria,
    LogitsProcessorList,
    Processors,
    Sampler,
    Sampling,
    StoppingCriteriaList,
)
from .types import ChatCompletion, ChatCompletionChunk, Completion, CompletionChunk

if TYPE_CHECKING:
    from .answer import Answer
    from .chat_format import ChatFormat
    from .tokenizer import Tokenizer

RANDOM_SEEDS = (None, -1, 0xFFFFFFFF)  # the last is what llama-cpp-python calls its default seed

_HOOKS = ("seed", "logit_bias", "logits_processor", "stopping_criteria")


class Completions(ABC):
    """What stands first is the part of Llama that these methods need."""

    model_path: str
    last_n_tokens_size: int
    prompt_progress: Callable[[int, int], None] | None
    _lock: threading.RLock
    _tokenizer: Tokenizer | None
    _random: random.Random
    _sampler: Sampler | None
    _timings: Timings

    @property
    @abstractmethod
    def tokenizer(self) -> Tokenizer:
        """The vocabulary. Raises FormatError if the file has none."""

    @property
    @abstractmethod
    def _ctx(self) -> Context: ...

    @property
    @abstractmethod
    def _format(self) -> ChatFormat: ...

    @abstractmethod
    def _checked(self, tokens: Sequence[int] | Ids) -> Ids: ...

    # -- text

    @overload
    def create_completion(
        self, prompt: str | bytes | Sequence[int], *, stream: Literal[False] = False, **options: Any
    ) -> Completion: ...

    @overload
    def create_completion(
        self, prompt: str | bytes | Sequence[int], *, stream: Literal[True], **options: Any
    ) -> Iterator[CompletionChunk]: ...

    @overload
    def create_completion(
        self, prompt: str | bytes | Sequence[int], *, stream: bool, **options: Any
    ) -> Completion | Iterator[CompletionChunk]: ...

    def create_completion(
        self,
        prompt: str | bytes | Sequence[int],
        *,
        max_tokens: int | None = None,
        stop: str | Sequence[str] | None = None,
        echo: bool = False,
        stream: bool = False,
        model: str | None = None,
        **options: Any,
    ) -> Completion | Iterator[CompletionChunk]:
        """Continues a prompt.

        prompt: text (control tokens in it count as such), or token ids.
        max_tokens: None or 0 or less: until an end token, or until the context is full.
        stop: strings that end the answer and are not part of it.
        echo: begin the text with the prompt.
        stream: return an iterator of parts instead of the whole.
        model: the name that the result carries; None: the path of the file.
        options: `seed`, `logit_bias`, `logits_processor` and `stopping_criteria` as in generate(), and
            `temperature`, `top_k`, `top_p` and so on: the fields of sampling.Sampling.

        Raises ContextError before anything is computed if the prompt is longer than n_ctx.
        """
        from .answer import completion, completion_chunks

        sampling, hooks = self._options("create_completion()", options, LATER_COMPLETION)
        ids = self._prompt_ids(prompt)
        before = ""
        if echo:
            data = prompt if isinstance(prompt, (str, bytes)) else self.tokenizer.decode(ids)
            before = data if isinstance(data, str) else data.decode("utf-8", "replace")
        name = self.model_path if model is None else model
        with self._lock:
            answer = self._answer(ids, max_tokens, _strings(stop), sampling, hooks)
            if not stream:
                return completion(answer, name, before)
        return completion_chunks(answer, name, before)

    __call__ = create_completion

    @overload
    def create_chat_completion(
        self, messages: Sequence[Mapping[str, Any]], *, stream: Literal[False] = False, **options: Any
    ) -> ChatCompletion: ...

    @overload
    def create_chat_completion(
        self, messages: Sequence[Mapping[str, Any]], *, stream: Literal[True], **options: Any
    ) -> Iterator[ChatCompletionChunk]: ...

    @overload
    def create_chat_completion(
        self, messages: Sequence[Mapping[str, Any]], *, stream: bool, **options: Any
    ) -> ChatCompletion | Iterator[ChatCompletionChunk]: ...

    def create_chat_completion(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        max_tokens: int | None = None,
        stop: str | Sequence[str] | None = None,
        stream: bool = False,
        model: str | None = None,
        **options: Any,
    ) -> ChatCompletion | Iterator[ChatCompletionChunk]:
        """Answers a conversation.

        messages: mappings with "role" ("system", "user", "assistant") and "content".
        The rest as in create_completion. How the conversation becomes a prompt is said by
        `chat_format=`, else by the file's own template, else by its architecture (with a notice).
        """
        from .answer import chat_completion, chat_completion_chunks

        sampling, hooks = self._options("create_chat_completion()", options, LATER_CHAT)
        chat_format = self._format
        ids = chat_format.encode(messages, self.tokenizer)
        name = self.model_path if model is None else model
        with self._lock:
            answer = self._answer(ids, max_tokens, [*_strings(stop), *chat_format.stop], sampling, hooks)
            if not stream:
                return chat_completion(answer, name)
        return chat_completion_chunks(answer, name)

    def _prompt_ids(self, prompt: str | bytes | Sequence[int]) -> list[int]:
        if isinstance(prompt, (str, bytes)):
            return self.tokenizer.encode(prompt, add_bos=True, special=True)
        return [int(token) for token in prompt]

    def _options(
        self, where: str, given: Mapping[str, Any], later: Mapping[str, tuple[Any, ...]]
    ) -> tuple[Sampling, dict[str, Any]]:
        """Of arguments those of Sampling and of _generation. Raises for others that ask for anything."""
        sampling = {name: value for name, value in given.items() if name in SAMPLING_NAMES}
        hooks = {name: value for name, value in given.items() if name in _HOOKS}
        refuse(where, {n: v for n, v in given.items() if n not in sampling and n not in hooks}, later)
        return sampling_of(where, sampling, self.last_n_tokens_size), hooks

    def _answer(
        self,
        ids: list[int],
        max_tokens: int | None,
        stop: list[str],
        sampling: Sampling,
        hooks: Mapping[str, Any],
    ) -> Answer:
        from .answer import Answer

        prompt = self._checked(ids)
        tokens = self._generation(prompt, sampling, **hooks)
        context = self._ctx
        # The last token of an answer is never computed itself, so it may stand one beyond the end.
        room = context.n_ctx if context.shift else context.n_ctx - prompt.size + 1
        limit = (
            room
            if max_tokens is None or max_tokens <= 0
            else max_tokens
            if context.shift
            else min(room, max_tokens)
        )
        return Answer(iter(tokens), self.tokenizer, prompt=ids, stop=stop, limit=limit)

    # -- tokens

    def _seed(self, seed: int | None) -> int:
        return self._random.getrandbits(64) if seed is None or seed in RANDOM_SEEDS else seed & (2**64 - 1)

    def _allowed(self, logits: Logits) -> Logits:
        """The logits without those that pad the vocabulary of the model beyond that of the tokenizer."""
        if self._tokenizer is not None and logits.size > self._tokenizer.n_vocab:
            logits[self._tokenizer.n_vocab :] = -np.inf
        return logits

    def sample(
        self,
        *,
        logit_bias: Mapping[int, float] | None = None,
        logits_processor: Processors = None,
        idx: int | None = None,
        **sampling: Any,
    ) -> int:
        """Chooses a token after what was evaluated. It is not evaluated itself.

        idx: after which of the tokens held; None: the last. Another one needs logits_all.
        sampling: `temp` (or `temperature`), `top_k`, `top_p` and so on: the fields of sampling.Sampling.
        With mirostat the surprise bound is remembered until options change, or reset(), set_seed() or
        load_state().
        """
        options = sampling_of("sample()", sampling, self.last_n_tokens_size)
        bias = _bias(logit_bias)
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
                sampler = self._sampler = Sampler(options, context.n_vocab, logit_bias=bias)
                sampler.reset(self._seed(None))
            elif options.mirostat_mode == 0:
                sampler.reset(self._seed(None))
            if options.penalises:
                sampler.accept(*last(ids, options.penalty_last_n))
            logits = LogitsProcessorList.of(logits_processor)(ids.copy(), logits)
            return sampler.sample(self._allowed(logits))

    def generate(
        self,
        tokens: Sequence[int],
        *,
        reset: bool = True,
        seed: int | None = None,
        logit_bias: Mapping[int, float] | None = None,
        logits_processor: Processors = None,
        stopping_criteria: Criteria = None,
        **sampling: Any,
    ) -> Iterator[int]:
        """Token after token, without end: end tokens are given like others.

        tokens: the prompt. What the context holds of its beginning is reused.
        reset: False continues the context with tokens instead.
        seed: of this generation; None: the next of the object's own.
        stopping_criteria: asked after each token, with it among the ids; when one says so that token is
            the last.
        sampling: `temp` (or `temperature`), `top_k`, `top_p` and so on: the fields of sampling.Sampling.

        Raises ContextError for a prompt longer than n_ctx, and when the context is full and
        context_shift is off.
        """
        options = sampling_of("generate()", sampling, self.last_n_tokens_size)
        ids = self._checked(tokens)
        if not reset:
            with self._lock:
                ids = np.concatenate([self._ctx.ids, ids])
        hooks: dict[str, Any] = {"logits_processor": logits_processor, "stopping_criteria": stopping_criteria}
        return iter(self._generation(ids, options, seed=seed, logit_bias=logit_bias, **hooks))

    def _generation(
        self,
        prompt: Ids,
        options: Sampling,
        *,
        seed: int | None = None,
        logit_bias: Mapping[int, float] | None = None,
        logits_processor: Processors = None,
        stopping_criteria: Criteria = None,
    ) -> Generation:
        context = self._ctx
        sampler = Sampler(options, context.n_vocab, logit_bias=_bias(logit_bias))
        sampler.reset(self._seed(seed))
        return Generation(
            context,
            self._lock,
            prompt,
            sampler,
            allow=self._allowed,
            processors=LogitsProcessorList.of(logits_processor),
            criteria=StoppingCriteriaList.of(stopping_criteria),
            report=self.prompt_progress,
            note=self._note_timings,
            timings=self._timings,
        )

    def _note_timings(self, timings: Timings) -> None:
        self._timings = timings


def _bias(logit_bias: Mapping[int, float] | None) -> dict[int, float]:
    """Token ids may be strings of digits, as they are in JSON."""
    return {int(token): float(value) for token, value in (logit_bias or {}).items()}


def _strings(stop: str | Sequence[str] | None) -> list[str]:
    if stop is None:
        return []
    return [stop] if isinstance(stop, str) else list(stop)
