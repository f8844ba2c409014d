"""The types of requests and results under the names that they have in llama-cpp-python.

Those of requests are for annotations: the methods take any mapping of that shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypedDict

from .types import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
    Completion,
    CompletionChoice,
    CompletionChunk,
    CompletionLogprobs,
    CreateEmbeddingResponse,
    Embedding,
    EmbeddingUsage,
    FunctionCall,
    ToolCall,
    ToolCallDelta,
    Usage,
)

JsonType = int | str | bool | list[Any] | dict[str, Any] | None

# -- results

CreateCompletionResponse = Completion
CreateCompletionStreamResponse = CompletionChunk
CreateChatCompletionResponse = ChatCompletion
CreateChatCompletionStreamResponse = ChatCompletionChunk
ChatCompletionResponseMessage = AssistantMessage
ChatCompletionResponseFunctionCall = FunctionCall
ChatCompletionResponseChoice = ChatChoice
ChatCompletionStreamResponseChoice = ChatChunkChoice
ChatCompletionStreamResponseDelta = ChatDelta
ChatCompletionMessageToolCall = ToolCall
ChatCompletionMessageToolCalls = list[ToolCall]
ChatCompletionMessageToolCallChunk = ToolCallDelta
ChatCompletionLogprobs = ChatLogprobs
CompletionUsage = Usage
EmbeddingData = Embedding

# -- requests


class ChatCompletionRequestMessageContentPart(TypedDict):
    type: Literal["text"]
    text: str


class ChatCompletionRequestMessage(TypedDict, total=False):
    """Of any role; `role` and, but for calls of tools, `content` must be there."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ChatCompletionRequestMessageContentPart] | None
    name: str
    tool_calls: list[ToolCall]
    tool_call_id: str
    function_call: FunctionCall


class ChatCompletionFunction(TypedDict, total=False):
    name: str
    description: str
    parameters: Mapping[str, JsonType]


class ChatCompletionTool(TypedDict):
    type: Literal["function"]
    function: ChatCompletionFunction


class ChatCompletionNamedToolChoiceFunction(TypedDict):
    name: str


class ChatCompletionNamedToolChoice(TypedDict):
    type: Literal["function"]
    function: ChatCompletionNamedToolChoiceFunction


class ChatCompletionRequestResponseFormat(TypedDict, total=False):
    type: Literal["text", "json_object"]
    schema: Mapping[str, JsonType]


ChatCompletionRequestMessageContentPartText = ChatCompletionRequestMessageContentPart
ChatCompletionRequestSystemMessage = ChatCompletionRequestMessage
ChatCompletionRequestUserMessage = ChatCompletionRequestMessage
ChatCompletionRequestAssistantMessage = ChatCompletionRequestMessage
ChatCompletionRequestToolMessage = ChatCompletionRequestMessage
ChatCompletionRequestFunctionMessage = ChatCompletionRequestMessage
ChatCompletionToolFunction = ChatCompletionFunction
ChatCompletionToolChoiceOption = Literal["none", "auto", "required"] | ChatCompletionNamedToolChoice

__all__ = [
    "ChatCompletion",
    "ChatCompletionChunk",
    "ChatCompletionFunction",
    "ChatCompletionLogprobs",
    "ChatCompletionMessageToolCall",
    "ChatCompletionMessageToolCallChunk",
    "ChatCompletionMessageToolCalls",
    "ChatCompletionNamedToolChoice",
    "ChatCompletionNamedToolChoiceFunction",
    "ChatCompletionRequestAssistantMessage",
    "ChatCompletionRequestFunctionMessage",
    "ChatCompletionRequestMessage",
    "ChatCompletionRequestMessageContentPart",
    "ChatCompletionRequestMessageContentPartText",
    "ChatCompletionRequestResponseFormat",
    "ChatCompletionRequestSystemMessage",
    "ChatCompletionRequestToolMessage",
    "ChatCompletionRequestUserMessage",
    "ChatCompletionResponseChoice",
    "ChatCompletionResponseFunctionCall",
    "ChatCompletionResponseMessage",
    "ChatCompletionStreamResponseChoice",
    "ChatCompletionStreamResponseDelta",
    "ChatCompletionTool",
    "ChatCompletionToolChoiceOption",
    "ChatCompletionToolFunction",
    "Completion",
    "CompletionChoice",
    "CompletionChunk",
    "CompletionLogprobs",
    "CompletionUsage",
    "CreateChatCompletionResponse",
    "CreateChatCompletionStreamResponse",
    "CreateCompletionResponse",
    "CreateCompletionStreamResponse",
    "CreateEmbeddingResponse",
    "Embedding",
    "EmbeddingData",
    "EmbeddingUsage",
    "JsonType",
]
