"""What requests may hold. A field that is not known is refused by name, rather than left out of account."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Token = Annotated[int, Field(ge=0, le=2**31 - 1)]
Tokens = Annotated[list[Token], Field(min_length=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: bool | None = None


class Generate(Body):
    """What chat and plain completions share: OpenAI's fields, and this engine's sampling beyond them."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=1024)] | None = None
    stop: str | list[str] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Bias] | None = None

    top_k: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    typical_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repeat_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    penalty_last_n: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    mirostat_mode: Literal[0, 2] | None = None
    mirostat_tau: Annotated[float, Field(ge=0, le=100)] | None = None
    mirostat_eta: Annotated[float, Field(ge=0, le=100)] | None = None
    grammar: str | None = None

    # Accepted from clients that send them always; they change nothing here.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: Literal[False] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    cache_prompt: bool | None = None


class Message(BaseModel):
    """What else a message may hold is the business of the model's chat template."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[dict[str, Any]] | None = None


class ChatRequest(Generate):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None


class CompletionRequest(Generate):
    prompt: (
        str
        | Tokens
        | Annotated[list[str], Field(min_length=1)]
        | Annotated[list[Tokens], Field(min_length=1)]
    )
    echo: bool | None = None
    suffix: str | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: Literal[1] | None = None


class EmbeddingRequest(Body):
    input: (
        str
        | Tokens
        | Annotated[list[str], Field(min_length=1)]
        | Annotated[list[Tokens], Field(min_length=1)]
    )
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count | None = None
    user: str | None = None


class TokenizeRequest(Body):
    content: str
    add_special: bool = False
    """Begin with the BOS token if the model wants one."""
    parse_special: bool = True
    """Text that looks like a control token becomes that token."""
    with_pieces: bool = False


class DetokenizeRequest(Body):
    tokens: list[Token]


# -- answers, for the description of the interface; the shapes of completions are OpenAI's


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    error: ErrorBody


class TokenizeAnswer(BaseModel):
    tokens: list[Any]


class DetokenizeAnswer(BaseModel):
    content: str


class Health(BaseModel):
    status: Literal["ok"]


class Vram(BaseModel):
    budget_bytes: int
    used_bytes: int
    device: str


class Layer(BaseModel):
    computed: float
    """Share of the layer's neurons that were computed, 0 to 1."""
    on_device: float
    """Share of the layer's neurons that lie on the device."""
    where: Literal["cpu", "device", "both"]


class EngineView(BaseModel):
    model: str
    n_ctx: int
    n_layer: int
    n_ff: int
    tokens_per_second: float
    prompt_tokens_per_second: float
    running: int
    waiting: int
    kv_used: float
    vram: Vram | None
    layers: list[Layer]
