"""From generated tokens to answers: the end of a text, and results in OpenAI's shapes."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Literal

from .text import TextStream
from .tokenizer import Tokenizer
from .types import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    Completion,
    CompletionChunk,
    FinishReason,
    Usage,
)


class Answer:
    """The text of one generation; iterating runs it and gives parts that can be shown at once.

    It ends at an end token, a stop string or a criterion ("stop"), or after `limit` tokens ("length").
    """

    def __init__(
        self,
        tokens: Iterator[int],
        tokenizer: Tokenizer,
        *,
        prompt: list[int],
        stop: list[str],
        limit: int,
    ) -> None:
        self.prompt = prompt
        self.n_tokens = 0
        """Tokens of the answer so far, without the one that ends it."""
        self.finish_reason: FinishReason | None = None
        """None until the answer is complete."""
        self._tokens = tokens
        self._tokenizer = tokenizer
        self._stream = TextStream(tokenizer, stop, prompt=prompt)
        self._limit = limit

    def __iter__(self) -> Iterator[str]:
        reason: FinishReason = "stop"
        for token in self._tokens:
            if self._tokenizer.is_eog(token):
                break
            self.n_tokens += 1
            text = self._stream.push(token)
            if text:
                yield text
            if self._stream.stopped is not None:
                break
            if self.n_tokens >= self._limit:
                reason = "length"
                break
        rest = self._stream.finish()
        if rest:
            yield rest
        self.finish_reason = reason if self._stream.stopped is None else "stop"

    @property
    def usage(self) -> Usage:
        n_prompt = len(self.prompt)
        return {
            "prompt_tokens": n_prompt,
            "completion_tokens": self.n_tokens,
            "total_tokens": n_prompt + self.n_tokens,
        }


def _identity(kind: Literal["cmpl", "chatcmpl"]) -> tuple[str, int]:
    return f"{kind}-{uuid.uuid4()}", int(time.time())


def completion(answer: Answer, model: str, echo: str) -> Completion:
    """Runs the generation and returns the result as a whole."""
    name, created = _identity("cmpl")
    text = echo + "".join(answer)
    return {
        "id": name,
        "object": "text_completion",
        "created": created,
        "model": model,
        "choices": [
            {"text": text, "index": 0, "logprobs": None, "finish_reason": answer.finish_reason},
        ],
        "usage": answer.usage,
    }


def completion_chunks(answer: Answer, model: str, echo: str) -> Iterator[CompletionChunk]:
    """Runs the generation while it is asked for."""
    name, created = _identity("cmpl")

    def chunk(text: str) -> CompletionChunk:
        return {
            "id": name,
            "object": "text_completion",
            "created": created,
            "model": model,
            "choices": [
                {"text": text, "index": 0, "logprobs": None, "finish_reason": answer.finish_reason},
            ],
        }

    if echo:
        yield chunk(echo)
    for part in answer:
        yield chunk(part)
    yield chunk("")


def chat_completion(answer: Answer, model: str) -> ChatCompletion:
    """Runs the generation and returns the answer as a whole."""
    name, created = _identity("chatcmpl")
    text = "".join(answer)
    assert answer.finish_reason is not None
    return {
        "id": name,
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": text},
                "logprobs": None,
                "finish_reason": answer.finish_reason,
            },
        ],
        "usage": answer.usage,
    }


def chat_completion_chunks(answer: Answer, model: str) -> Iterator[ChatCompletionChunk]:
    """Runs the generation while it is asked for: the role, the text, the finish reason."""
    name, created = _identity("chatcmpl")

    def chunk(delta: ChatDelta, finish_reason: FinishReason | None = None) -> ChatCompletionChunk:
        return {
            "id": name,
            "object": "chat.completion.chunk",
            "created": created,
            "model": model,
            "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}],
        }

    yield chunk({"role": "assistant"})
    for part in answer:
        yield chunk({"content": part})
    yield chunk({}, answer.finish_reason)
