"""The shapes of results, as OpenAI's API has them."""

from __future__ import annotations

from typing import Any, Literal, TypedDict

FinishReason = Literal["stop", "length", "tool_calls", "function_call"]
PromptLogprobs = list[dict[str, Any] | None]
"""For each token of the prompt, None for the first: what create_completion() says of `prompt_logprobs`."""


class Usage(TypedDict):
    """Token counts; the token that ends a generation is not counted."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionLogprobs(TypedDict):
    """One entry of each list for each token."""

    tokens: list[str]
    text_offset: list[int]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]


class ChatLogprobs(TypedDict):
    """`content`: a mapping for each token with token, bytes, logprob and top_logprobs."""

    content: list[dict[str, Any]]
    refusal: None


class ChoiceExtras(TypedDict, total=False):
    """`stop_reason` stands there only where one of the request's own stops ended the answer, `token_ids` only
    where they were asked for (`return_token_ids`)."""

    stop_reason: str | int
    token_ids: list[int]


class _CompletionChoice(TypedDict):
    text: str
    index: int
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class CompletionChoice(_CompletionChoice, ChoiceExtras, total=False):
    prompt_logprobs: PromptLogprobs
    """Of the first choice, where they were asked for."""


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


class FunctionCall(TypedDict):
    name: str
    arguments: str
    """JSON."""


class ToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: FunctionCall


class FunctionCallDelta(TypedDict, total=False):
    name: str
    arguments: str


class _ToolCallDelta(TypedDict):
    index: int


class ToolCallDelta(_ToolCallDelta, total=False):
    """A tool call in a streamed answer, or more of the arguments of the one with this index."""

    id: str
    type: Literal["function"]
    function: FunctionCallDelta


class _AssistantMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None


class AssistantMessage(_AssistantMessage, total=False):
    """`content` is None where there are only tool calls; those stand there only if there are some."""

    reasoning_content: str
    """What the model said to itself before the answer, if it did."""
    tool_calls: list[ToolCall]
    function_call: FunctionCall


class ChatChoice(ChoiceExtras):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class _ChatCompletion(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatCompletion(_ChatCompletion, total=False):
    """Result of create_chat_completion."""

    prompt_logprobs: PromptLogprobs
    """Where they were asked for."""


class ChatDelta(TypedDict, total=False):
    role: Literal["assistant"]
    content: str
    reasoning_content: str
    tool_calls: list[ToolCallDelta]
    function_call: FunctionCall


class ChatChunkChoice(ChoiceExtras):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatCompletionChunk(TypedDict):
    """One part of a streamed answer: first the role, then text, last a finish_reason."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]


class Embedding(TypedDict):
    """Of one text; without pooling a list of one vector for each token."""

    object: Literal["embedding"]
    embedding: list[float] | list[list[float]]
    index: int


class EmbeddingUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


class CreateEmbeddingResponse(TypedDict):
    """Result of create_embedding."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
