"""The types of results under the names that they have in llama-cpp-python."""

from .types import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    Completion,
    CompletionChoice,
    CompletionChunk,
    CompletionLogprobs,
    CreateEmbeddingResponse,
    Embedding,
    EmbeddingUsage,
    ToolCall,
    Usage,
)

CreateCompletionResponse = Completion
CreateCompletionStreamResponse = CompletionChunk
CreateChatCompletionResponse = ChatCompletion
CreateChatCompletionStreamResponse = ChatCompletionChunk
ChatCompletionResponseMessage = AssistantMessage
ChatCompletionResponseChoice = ChatChoice
ChatCompletionStreamResponseChoice = ChatChunkChoice
ChatCompletionStreamResponseDelta = ChatDelta
ChatCompletionMessageToolCall = ToolCall
CompletionUsage = Usage

__all__ = [
    "ChatCompletionMessageToolCall",
    "ChatCompletionResponseChoice",
    "ChatCompletionResponseMessage",
    "ChatCompletionStreamResponseChoice",
    "ChatCompletionStreamResponseDelta",
    "CompletionChoice",
    "CompletionLogprobs",
    "CompletionUsage",
    "CreateChatCompletionResponse",
    "CreateChatCompletionStreamResponse",
    "CreateCompletionResponse",
    "CreateCompletionStreamResponse",
    "CreateEmbeddingResponse",
    "Embedding",
    "EmbeddingUsage",
]
