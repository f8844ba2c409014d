"""Continuing prompts and answering conversations: the methods of Llama that go from text to text."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from .compat import LATER_CHAT, LATER_COMPLETION, refuse
from .context import Context, Ids
from .generation import Generation
from .sampling import Criteria, Processors, Sampling
from .types import ChatCompletion, ChatCompletionChunk, Completion, CompletionChunk

if TYPE_CHECKING:
    from .answer import Answer
    from .chat_format import ChatFormat
    from .tokenizer import Tokenizer


class Completions(ABC):
    """What stands here is the part of Llama that these methods need."""

    model_path: str
    last_n_tokens_size: int
    _lock: threading.RLock

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

    @abstractmethod
    def _generation(
        self,
        prompt: Ids,
        options: Sampling,
        seed: int | None,
        logit_bias: Mapping[int, float] | None,
        logits_processor: Processors,
        stopping_criteria: Criteria,
    ) -> Generation: ...

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
        temperature: float = 0.8,
        top_p: float = 0.95,
        top_k: int = 40,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        repeat_penalty: float = 1.0,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        mirostat_mode: int = 0,
        mirostat_tau: float = 5.0,
        mirostat_eta: float = 0.1,
        stop: str | Sequence[str] | None = None,
        echo: bool = False,
        stream: bool = False,
        seed: int | None = None,
        logit_bias: Mapping[int, float] | None = None,
        logits_processor: Processors = None,
        stopping_criteria: Criteria = None,
        model: str | None = None,
        **unsupported: Any,
    ) -> Completion | Iterator[CompletionChunk]:
        """Continues a prompt.

        prompt: text (control tokens in it count as such), or token ids.
        max_tokens: None or 0 or less: until an end token, or until the context is full.
        stop: strings that end the answer and are not part of it.
        echo: begin the text with the prompt.
        stream: return an iterator of parts instead of the whole.
        seed: makes this answer repeatable; None: the next of the object's own.
        logit_bias: added to the logits of tokens; -inf excludes one.
        logits_processor, stopping_criteria: see LogitsProcessorList and StoppingCriteriaList.
        model: the name that the result carries; None: the path of the file.
        The other arguments are those of sampling.Sampling.

        Raises ContextError before anything is computed if the prompt is longer than n_ctx.
        """
        refuse("create_completion()", unsupported, LATER_COMPLETION)
        ids = self._prompt_ids(prompt)
        options = Sampling(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            typical_p=typical_p,
            repeat_penalty=repeat_penalty,
            frequency_penalty=frequency_penalty,
            presence_penalty=presence_penalty,
            penalty_last_n=self.last_n_tokens_size,
            mirostat_mode=mirostat_mode,
            mirostat_tau=mirostat_tau,
            mirostat_eta=mirostat_eta,
        )
        from .answer import completion, completion_chunks

        before = ""
        if echo:
            data = prompt if isinstance(prompt, (str, bytes)) else self.tokenizer.decode(ids)
            before = data if isinstance(data, str) else data.decode("utf-8", "replace")
        name = self.model_path if model is None else model
        with self._lock:
            answer = self._answer(
                ids, options, max_tokens, stop, seed, logit_bias, logits_processor, stopping_criteria
            )
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
        temperature: float = 0.8,
        top_p: float = 0.95,
        top_k: int = 40,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        repeat_penalty: float = 1.0,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        mirostat_mode: int = 0,
        mirostat_tau: float = 5.0,
        mirostat_eta: float = 0.1,
        stop: str | Sequence[str] | None = None,
        stream: bool = False,
        seed: int | None = None,
        logit_bias: Mapping[int, float] | None = None,
        logits_processor: Processors = None,
        stopping_criteria: Criteria = None,
        model: str | None = None,
        **unsupported: Any,
    ) -> ChatCompletion | Iterator[ChatCompletionChunk]:
        """Answers a conversation.

        messages: mappings with "role" ("system", "user", "assistant") and "content".
        The rest as in create_completion. How the conversation becomes a prompt is said by
        `chat_format=`, else by the file's own template, else by its architecture (with a notice).
        """
        refuse("create_chat_completion()", unsupported, LATER_CHAT)
        options = Sampling(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            typical_p=typical_p,
            repeat_penalty=repeat_penalty,
            frequency_penalty=frequency_penalty,
            presence_penalty=presence_penalty,
            penalty_last_n=self.last_n_tokens_size,
            mirostat_mode=mirostat_mode,
            mirostat_tau=mirostat_tau,
            mirostat_eta=mirostat_eta,
        )
        from .answer import chat_completion, chat_completion_chunks

        chat_format = self._format
        ids = chat_format.encode(messages, self.tokenizer)
        stops = [*_strings(stop), *chat_format.stop]
        name = self.model_path if model is None else model
        with self._lock:
            answer = self._answer(
                ids, options, max_tokens, stops, seed, logit_bias, logits_processor, stopping_criteria
            )
            if not stream:
                return chat_completion(answer, name)
        return chat_completion_chunks(answer, name)

    def _prompt_ids(self, prompt: str | bytes | Sequence[int]) -> list[int]:
        if isinstance(prompt, (str, bytes)):
            return self.tokenizer.encode(prompt, add_bos=True, special=True)
        return [int(token) for token in prompt]

    def _answer(
        self,
        ids: list[int],
        options: Sampling,
        max_tokens: int | None,
        stop: str | Sequence[str] | None,
        seed: int | None,
        logit_bias: Mapping[int, float] | None,
        logits_processor: Processors,
        stopping_criteria: Criteria,
    ) -> Answer:
        from .answer import Answer

        prompt = self._checked(ids)
        tokens = self._generation(prompt, options, seed, logit_bias, logits_processor, stopping_criteria)
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
        return Answer(iter(tokens), self.tokenizer, prompt=ids, stop=_strings(stop), limit=limit)


def _strings(stop: str | Sequence[str] | None) -> list[str]:
    if stop is None:
        return []
    return [stop] if isinstance(stop, str) else list(stop)
