"""The shapes of results, as OpenAI's API has them."""

from __future__ import annotations

from typing import Literal, TypedDict

FinishReason = Literal["stop", "length"]


class Usage(TypedDict):
    """Token counts; the token that ends a generation is not counted."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionChoice(TypedDict):
    text: str
    index: int
    logprobs: None
    finish_reason: FinishReason | None


class Completion(TypedDict):
    """Result of create_completion."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunk(TypedDict):
    """One part of a streamed completion; the last has a finish_reason."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]


class AssistantMessage(TypedDict):
    role: Literal["assistant"]
    content: str


class ChatChoice(TypedDict):
    index: int
    message: AssistantMessage
    logprobs: None
    finish_reason: FinishReason


class ChatCompletion(TypedDict):
    """Result of create_chat_completion."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(TypedDict, total=False):
    role: Literal["assistant"]
    content: str


class ChatChunkChoice(TypedDict):
    index: int
    delta: ChatDelta
    logprobs: None
    finish_reason: FinishReason | None


class ChatCompletionChunk(TypedDict):
    """One part of a streamed answer: first the role, then text, last a finish_reason."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
