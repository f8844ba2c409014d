"""From generated tokens to answers: the end of a text, and results in OpenAI's shapes.

`Answer` needs an iterator of tokens and nothing of Llama: whoever makes tokens can use it.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Generator, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..types import (
    AssistantMessage,
    ChatCompletion,
    ChatCompletionChunk,
    ChatLogprobs,
    Completion,
    CompletionChoice,
    CompletionChunk,
    CompletionLogprobs,
    FinishReason,
    Usage,
)
from .logprobs import TokenLogprob, chat_logprobs, completion_logprobs
from .parts import CallPart, Thought
from .text import TextStream
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from .channels import ChannelParser
    from .reasoning import ReasoningParser
    from .tool_calls import ToolCallParser

    AnswerParser = ChannelParser | ReasoningParser | ToolCallParser


# What can be shown at once: text, and if asked for the logprobs of the tokens that begin in it or before it,
# and where they begin, in characters from the beginning of the answer.
Part = tuple[str, Sequence[TokenLogprob], Sequence[int]]

PAUSE: Part = ("", (), ())
"""Stands between parts where the tokens have a None: no more are there at the moment."""


class Answer:
    """The text of one generation; iterating runs it and gives parts that can be shown at once.

    It ends at an end token, a stop string or where the tokens end ("stop"), or after `limit` tokens
    ("length").
    """

    def __init__(
        self,
        tokens: Iterable[int | None],
        tokenizer: Tokenizer,
        *,
        prompt: list[int],
        stop: list[str],
        limit: int,
        logprobs: list[TokenLogprob] | None = None,
        special: Set[int] = frozenset(),
        ends: Set[int] = frozenset(),
        tells_ids: bool = False,
    ) -> None:
        """
        tokens: a generator of them is closed at the end.
        logprobs: where the maker of tokens appends an entry before it gives a token; None: not wanted.
        special: control tokens that are part of the text.
        ends: tokens that end it, beside the tokenizer's.
        tells_ids: whether results have the answer's token ids.
        """
        self.prompt = prompt
        self.tokenizer = tokenizer
        self.n_tokens = 0
        """Tokens of the answer so far, without the one that ends it."""
        self.finish_reason: FinishReason | None = None
        """None until the answer is complete."""
        self.stop_reason: str | int | None = None
        """The stop string, or the token of `ends`, that ended it."""
        self.wants_logprobs = logprobs is not None
        self._tokens = tokens
        self._stream = TextStream(tokenizer, stop, prompt=prompt, special=special)
        self._limit = limit
        self._ends = ends
        self._entries = logprobs
        self.tells_ids = tells_ids
        self._ids: list[int] = []
        self._offsets: list[int] = []
        self._n_told = 0

    def __iter__(self) -> Iterator[str]:
        return (text for text, _, _ in self.parts() if text)

    def parts(self) -> Iterator[Part]:
        """The same with what is known about the tokens."""
        reason: FinishReason = "stop"
        eog, limit, ends = self.tokenizer.eog, self._limit, self._ends
        try:
            for token in self._tokens:
                if token is None:
                    yield PAUSE
                    continue
                if limit == 0:
                    reason = "length"
                    break
                if token in ends:
                    self.stop_reason = token
                    break
                if token in eog:
                    break
                self.n_tokens += 1
                if self.tells_ids:
                    self._ids.append(token)
                if self._entries is not None:
                    self._offsets.append(self._stream.position)
                text = self._stream.push(token)
                if text:
                    yield self._part(text)
                if self._stream.stopped is not None:
                    break
                if self.n_tokens >= limit:
                    reason = "length"
                    break
        finally:
            if isinstance(self._tokens, Generator):
                self._tokens.close()
        rest = self._stream.finish()
        last = self._part(rest, is_last=self._stream.stopped is None)
        self.finish_reason = reason if self._stream.stopped is None else "stop"
        self.stop_reason = self._stream.stopped or self.stop_reason
        if rest or last[1]:
            yield last

    def _part(self, text: str, is_last: bool = False) -> Part:
        """With the entries of tokens that begin within what was given out so far."""
        if self._entries is None:
            return text, (), ()
        end = self._n_told
        while end < self.n_tokens and (is_last or self._offsets[end] < self._stream.n_emitted):
            end += 1
        part = slice(self._n_told, end)
        self._n_told = end
        return text, self._entries[part], self._offsets[part]

    def new_ids(self) -> dict[str, list[int]]:
        """For a choice: the ids of the tokens that came since the last call."""
        ids, self._ids = self._ids, []
        return {"token_ids": ids}

    @property
    def usage(self) -> Usage:
        n_prompt = len(self.prompt)
        return {
            "prompt_tokens": n_prompt,
            "completion_tokens": self.n_tokens,
            "total_tokens": n_prompt + self.n_tokens,
        }


def _head(kind: str, prefix: str, model: str) -> dict[str, Any]:
    return {"id": f"{prefix}-{uuid.uuid4()}", "object": kind, "created": int(time.time()), "model": model}


def _with(head: dict[str, Any], **rest: Any) -> Any:
    return {**head, **rest}


def _why(answer: Answer) -> Any:
    """What ended an answer, as vLLM tells it, where it was one of the request's own stops."""
    return {} if answer.stop_reason is None else {"stop_reason": answer.stop_reason}


# -- several answers to one prompt


def together(results: list[Any]) -> Any:
    """Whole results as one. The prompt counts once, every answer counts."""
    whole = dict(results[0])
    whole["choices"] = [{**result["choices"][0], "index": i} for i, result in enumerate(results)]
    usage = dict(whole["usage"])
    usage["completion_tokens"] = sum(result["usage"]["completion_tokens"] for result in results)
    usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
    whole["usage"] = usage
    return whole


def best(results: list[Any], n: int, *, echo: bool, tell: bool) -> Any:
    """Of whole results with logprobs the n answers whose tokens are the likeliest on average, as one; all of
    them count. echo: the logprobs begin with the prompt's. tell: leave them in it."""

    def likelihood(result: Any) -> float:
        given = result["choices"][0]["logprobs"]["token_logprobs"]
        # Not counted from the end: of a stop string's tokens there are none.
        own = given[result["usage"]["prompt_tokens"] :] if echo else given
        return sum(own) / len(own) if own else -math.inf

    chosen = together(sorted(results, key=likelihood, reverse=True)[:n])
    if not tell:
        chosen["choices"] = [{**choice, "logprobs": None} for choice in chosen["choices"]]
    return {**chosen, "usage": together(results)["usage"]}


def numbered(streams: list[Iterator[Any]]) -> Iterator[Any]:
    """The parts of several answers, one after the other, as those of one result."""
    return streams[0] if len(streams) == 1 else _numbered(streams)


def _numbered(streams: list[Iterator[Any]]) -> Iterator[Any]:
    first: dict[str, Any] = {}
    for i, chunks in enumerate(streams):
        for chunk in chunks:
            first = first or {name: chunk[name] for name in ("id", "created")}
            yield {**chunk, **first, "choices": [{**choice, "index": i} for choice in chunk["choices"]]}


# -- text


@dataclass
class Echo:
    """The prompt, where an answer begins with it; `text` is "" and nothing else is told where not."""

    text: str = ""
    before: int = 0
    """Characters of the prompt: where the answer's own text begins."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)


def _told(answer: Answer, part: Part, before: int) -> CompletionLogprobs | None:
    """The logprobs of a part behind so many characters; None where they are not wanted."""
    if not answer.wants_logprobs:
        return None
    _, entries, offsets = part
    return completion_logprobs(entries, [before + offset for offset in offsets], answer.tokenizer)


def _choice(
    answer: Answer, text: str, logprobs: CompletionLogprobs | None, reason: FinishReason | None
) -> list[CompletionChoice]:
    choice: Any = {"text": text, "index": 0, "logprobs": logprobs, "finish_reason": reason}
    return [choice | answer.new_ids() if answer.tells_ids else choice]


def completion(answer: Answer, model: str, echo: Echo) -> Completion:
    """Runs the generation and returns the result as a whole."""
    head = _head("text_completion", "cmpl", model)
    texts, entries, offsets = [echo.text], list(echo.logprobs), list(echo.offsets)
    for text, its_entries, its_offsets in answer.parts():
        texts.append(text)
        entries += its_entries
        offsets += [echo.before + offset for offset in its_offsets]
    whole = "".join(texts)
    choices = _choice(answer, whole, _told(answer, (whole, entries, offsets), 0), answer.finish_reason)
    choices[0] |= _why(answer)
    result: Completion = _with(head, choices=choices, usage=answer.usage)
    return result


def completion_chunks(answer: Answer, model: str, echo: Echo) -> Iterator[CompletionChunk | None]:
    """Runs the generation while it is asked for. None: no more is there at the moment."""
    head = _head("text_completion", "cmpl", model)
    if echo.text or echo.logprobs:
        begin = (echo.text, echo.logprobs, echo.offsets)
        yield _with(head, choices=_choice(answer, echo.text, _told(answer, begin, 0), None))
    for part in answer.parts():
        if part is PAUSE:
            yield None
            continue
        told = _told(answer, part, echo.before) if answer.wants_logprobs else None
        yield _with(head, choices=_choice(answer, part[0], told, None))
    choices = _choice(answer, "", None, answer.finish_reason)
    choices[0] |= _why(answer)
    yield _with(head, choices=choices)


# -- chat


def _chat_parts(answer: Answer, parser: AnswerParser | None) -> Iterator[tuple[Any, ChatLogprobs | None]]:
    """Texts, thoughts, tool calls and parts of these, in order, and None for a pause; where there are tool
    calls `finish_reason` becomes "tool_calls"."""
    n_calls = 0
    for part in answer.parts():
        if part is PAUSE:
            yield None, None
            continue
        text, entries, _ = part
        told = chat_logprobs(entries, answer.tokenizer) if answer.wants_logprobs else None
        if parser is None:
            yield text, told
            continue
        found = parser.push(text)
        if told is not None and not found:
            yield "", told
        for item in found:
            n_calls += isinstance(item, dict)
            yield item, told
            told = None if told is None else {"content": [], "refusal": None}
    for item in [] if parser is None else parser.finish(is_cut=answer.finish_reason == "length"):
        n_calls += isinstance(item, dict)
        yield item, None
    if n_calls and answer.finish_reason == "stop":
        answer.finish_reason = "tool_calls"


def chat_completion(
    answer: Answer, model: str, parser: AnswerParser | None = None, legacy: bool = False
) -> ChatCompletion:
    """Runs the generation and returns the answer as a whole.

    parser: finds tool calls in the text, and what of it is for the reader. legacy: tell the first one as
    `function_call`.
    """
    head = _head("chat.completion", "chatcmpl", model)
    parts = list(_chat_parts(answer, parser))
    text = "".join(item for item, _ in parts if isinstance(item, str))
    thought = "".join(item.text for item, _ in parts if isinstance(item, Thought))
    made: list[Any] = [item for item, _ in parts if isinstance(item, dict)]
    message: AssistantMessage = {"role": "assistant", "content": text}
    if thought:
        message["reasoning_content"] = thought
    if made:
        message["content"] = text.strip() or None
        if legacy:
            message["function_call"] = made[0]["function"]
        else:
            message["tool_calls"] = made
    logprobs: ChatLogprobs | None = None
    if answer.wants_logprobs:
        entries = [entry for _, told in parts if told is not None for entry in told["content"]]
        logprobs = {"content": entries, "refusal": None}
    assert answer.finish_reason is not None
    reason = _reason(answer.finish_reason, legacy)
    choice = {"index": 0, "message": message, "logprobs": logprobs, "finish_reason": reason}
    choice |= (answer.new_ids() if answer.tells_ids else {}) | _why(answer)
    result: ChatCompletion = _with(head, choices=[choice], usage=answer.usage)
    return result


def _reason(reason: FinishReason, legacy: bool) -> FinishReason:
    return "function_call" if legacy and reason == "tool_calls" else reason


def chat_completion_chunks(
    answer: Answer, model: str, parser: AnswerParser | None = None, legacy: bool = False
) -> Iterator[ChatCompletionChunk | None]:
    """Runs the generation while it is asked for: the role, what it says, the finish reason. None: no more is
    there at the moment."""
    head = _head("chat.completion.chunk", "chatcmpl", model)

    def chunk(
        delta: Any, logprobs: ChatLogprobs | None = None, reason: FinishReason | None = None
    ) -> ChatCompletionChunk:
        choice: Any = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        if answer.tells_ids:
            choice |= answer.new_ids()
        if reason is not None:
            choice |= _why(answer)
        result: ChatCompletionChunk = _with(head, choices=[choice])
        return result

    yield chunk({"role": "assistant"})
    n_calls = 0
    for item, logprobs in _chat_parts(answer, parser):
        if item is None:
            yield None
        elif isinstance(item, str):
            yield chunk({"content": item}, logprobs)
        elif isinstance(item, Thought):
            yield chunk({"reasoning_content": item.text}, logprobs)
        elif isinstance(item, CallPart):
            more = {"index": n_calls - 1, "function": {"arguments": item.text}}
            yield chunk({"tool_calls": [more]}, logprobs)
        else:
            if not legacy:
                yield chunk({"tool_calls": [{"index": n_calls, **item}]}, logprobs)
            elif not n_calls:
                yield chunk({"function_call": item["function"]}, logprobs)
            n_calls += 1
    assert answer.finish_reason is not None
    yield chunk({}, None, _reason(answer.finish_reason, legacy))
