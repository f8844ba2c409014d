"""What requests may hold. A field that is not known is left out of account and named in the answer's headers
(lenient.py), or refused where the server is strict.

Of many mistakes one is told: a list of a million wrong items would otherwise take the server minutes.
"""

from __future__ import annotations

import json
from contextlib import suppress
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
)

from .problems import Problem

B = TypeVar("B", bound="Body")

Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Limit = Annotated[int, Field(ge=-1, le=2**31 - 1)]
"""Of an answer's tokens; -1: as many as the context holds, 0: the prompt is computed and nothing more."""
Token = Annotated[int, Field(ge=0, le=2**31 - 1)]
Tokens = Annotated[list[Token], Field(min_length=1, fail_fast=True)]
Texts = Annotated[list[str], Field(min_length=1, fail_fast=True)]
ManyTokens = Annotated[list[Tokens], Field(min_length=1, fail_fast=True)]
Mappings = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]


MAX_BIASES = 1 << 16


def _few(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_BIASES:
        raise ValueError(f"at most {MAX_BIASES} tokens can have a bias")
    return value


MAX_FORM_BYTES = 1 << 16
"""Of a grammar or schema. Each is compiled in a process that is ended after some seconds (_text/grammars.py);
what is longer would not be done by then."""
MAX_TOOLS_BYTES = 1 << 18


def _small(limit: int) -> AfterValidator:
    def check(value: Any) -> Any:
        try:
            parts = value if isinstance(value, list) else [value]
            sizes = [len(part if isinstance(part, str) else json.dumps(part)) for part in parts]
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        if max(sizes, default=0) > MAX_FORM_BYTES or sum(sizes) > limit:
            raise ValueError(f"it is too long: {sum(sizes)} bytes, at most {MAX_FORM_BYTES} may be compiled")
        return value

    return AfterValidator(check)


class Body(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, protected_namespaces=())


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: bool | None = None


class StructuredOutputs(Body):
    """A form of the answer, as vLLM has it; one of these."""

    json_: Annotated[dict[str, Any] | str, _small(MAX_FORM_BYTES)] | None = Field(None, alias="json")
    regex: Annotated[str, _small(MAX_FORM_BYTES)] | None = None
    choice: Annotated[list[str], Field(min_length=1, max_length=1024, fail_fast=True)] | None = None
    grammar: Annotated[str, _small(MAX_FORM_BYTES)] | None = None
    json_object: bool | None = None


class LoraScale(Body):
    """An adapter of the model by its number in /lora-adapters."""

    id: Annotated[int, Field(ge=0, le=1 << 16)]
    scale: Annotated[float, Field(ge=-1000, le=1000)] = 1.0


Lora = Annotated[list[LoraScale], Field(max_length=64, fail_fast=True)]


class Generate(Body):
    """What chat and plain completions share: OpenAI's fields, and this engine's sampling beyond them."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Limit | None = None
    n_predict: Annotated[int, Field(ge=-2, le=2**31 - 1)] | None = None
    """llama-server's name of max_tokens; -2: until the context is full."""
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=1024)] | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[
        dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Bias] | None, BeforeValidator(_few)
    ] = None

    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    typical_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repeat_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    penalty_last_n: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    mirostat_mode: Annotated[int, Field(ge=0, le=2)] | None = None
    mirostat_tau: Annotated[float, Field(ge=0, le=100)] | None = None
    mirostat_eta: Annotated[float, Field(ge=0, le=100)] | None = None
    top_n_sigma: Annotated[float, Field(ge=-1, le=1000)] | None = None
    xtc_probability: Annotated[float, Field(ge=0, le=1)] | None = None
    xtc_threshold: Annotated[float, Field(ge=0, le=1)] | None = None
    dynatemp_range: Annotated[float, Field(ge=0, le=100)] | None = None
    dynatemp_exponent: Annotated[float, Field(ge=0, le=100)] | None = None
    dry_multiplier: Annotated[float, Field(ge=0, le=100)] | None = None
    dry_base: Annotated[float, Field(ge=1, le=100)] | None = None
    dry_allowed_length: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    dry_penalty_last_n: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    dry_sequence_breakers: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=64)]], Field(max_length=16, fail_fast=True)
        ]
        | None
    ) = None
    grammar: Annotated[
        Annotated[str, _small(MAX_FORM_BYTES)] | None,
        BeforeValidator(lambda text: None if text == "" else text),
    ] = None
    """GBNF; an empty text, as llama-server's clients send it with all their settings, is none."""

    # What llama-server and vLLM take beyond that; some are other names for the above.
    response_format: Annotated[dict[str, Any], _small(MAX_FORM_BYTES)] | None = None
    json_schema: Annotated[dict[str, Any], _small(MAX_FORM_BYTES)] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Annotated[dict[str, Any] | str, _small(MAX_FORM_BYTES)] | None = None
    guided_regex: Annotated[str, _small(MAX_FORM_BYTES)] | None = None
    guided_choice: Annotated[list[str], Field(min_length=1, max_length=1024, fail_fast=True)] | None = None
    guided_grammar: Annotated[str, _small(MAX_FORM_BYTES)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    """repeat_penalty over all tokens, unless penalty_last_n says otherwise."""
    repeat_last_n: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    """penalty_last_n."""
    stop_token_ids: Annotated[list[Token], Field(max_length=64, fail_fast=True)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    """Choices have `token_ids`, those of the answer without the one that ended it."""
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    lora: Lora | None = None
    """Adapters for this request alone; those that are not named are not used."""

    # Accepted from clients that send them always; they change nothing here.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    cache_prompt: bool | None = None


class Message(BaseModel):
    """What else a message may hold is the business of the model's chat template."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Mappings | None = None


class ChatRequest(Generate):
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Limit | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: (
        Annotated[list[dict[str, Any]], Field(max_length=128, fail_fast=True), _small(MAX_TOOLS_BYTES)] | None
    ) = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    """Handed to the chat template; "none" also as enable_thinking false."""
    chat_template_kwargs: Annotated[dict[str, Any], _small(MAX_FORM_BYTES)] | None = None
    """Variables for the chat template."""
    continue_final_message: bool | None = None
    """The answer goes on with the last message, which is the assistant's."""
    add_generation_prompt: bool | None = None


class CompletionRequest(Generate):
    prompt: str | Tokens | Texts | ManyTokens
    echo: bool | None = None
    suffix: str | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: Annotated[int, Field(ge=1, le=1024)] | None = None


PART = 128
"""Items of a list that are checked in one go, which nothing else of this process can interrupt."""


@cache
def _lists(kind: type[BaseModel]) -> dict[str, TypeAdapter[list[BaseModel]]]:
    """The fields that are lists of models."""
    return {
        name: TypeAdapter[list[BaseModel]](field.annotation)  # type: ignore[arg-type]
        for name, field in kind.model_fields.items()
        if get_origin(field.annotation) is list and _is_model(get_args(field.annotation)[0])
    }


def _is_model(item: Any) -> bool:
    """Of a list's items: not what is annotated, nor a choice of several."""
    return isinstance(item, type) and issubclass(item, BaseModel)


def validated(kind: type[B], value: dict[str, Any]) -> B:
    """The value as a model. Long lists are checked in parts, so that from a thread it holds up no others.
    Raises ValidationError, whose place of an item counts from the beginning of the list."""
    for name, adapter in _lists(kind).items():
        items = value.get(name)
        if isinstance(items, list) and len(items) > PART:
            checked = list(items)
            with suppress(
                ValidationError
            ):  # told below, where all are together: those before it cost nothing
                for i in range(0, len(items), PART):
                    checked[i : i + PART] = adapter.validate_python(items[i : i + PART])
            value = value | {name: checked}
    return kind.model_validate(value)


def made(kind: type[B], fields: dict[str, Any]) -> B:
    """A request from what another protocol says; None is not given. Raises Problem."""
    try:
        return validated(kind, {name: value for name, value in fields.items() if value is not None})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        param = ".".join(map(str, first["loc"]))
        raise Problem(422, f"{param}: {first['msg']}", code=first["type"], param=param) from None


class EmbeddingRequest(Body):
    input: str | Tokens | Texts | ManyTokens
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count | None = None
    user: str | None = None


class TokenizeRequest(Body):
    model: str | None = None
    content: str
    add_special: bool = False
    """Begin with the BOS token if the model wants one."""
    parse_special: bool = True
    """Text that looks like a control token becomes that token."""
    with_pieces: bool = False


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: Annotated[list[Token], Field(fail_fast=True)]


# -- answers, for the description of the interface; the shapes of completions are OpenAI's


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    error: ErrorBody


class AnthropicErrorBody(BaseModel):
    type: str
    message: str


class AnthropicError(BaseModel):
    type: Literal["error"]
    error: AnthropicErrorBody


class OllamaError(BaseModel):
    error: str


class LlamaServerErrorBody(BaseModel):
    code: int
    message: str
    type: str


class LlamaServerError(BaseModel):
    error: LlamaServerErrorBody


class TokenizeAnswer(BaseModel):
    tokens: list[Any]


class DetokenizeAnswer(BaseModel):
    content: str


class Health(BaseModel):
    status: Literal["ok"]
    models: dict[Literal["unloaded", "waiting", "loading", "loaded", "unloading", "failed"], int]
    """How many there are in each state; /v1/models has their names."""


class Vram(BaseModel):
    budget_bytes: int
    used_bytes: int
    device: str


class Layer(BaseModel):
    computed: float | None
    """Share of the layer's neurons that were computed, 0 to 1; null: of no token, as in the last layer while
    a prompt is read."""
    on_device: float
    """Share of the layer's neurons that lie on the device."""
    where: Literal["cpu", "device", "both"]


class Routes(BaseModel):
    device: int
    """Uses of an expert by a token, whose expert had a place on a device."""
    streamed: int
    """Those by prompts, whose expert was brought there for them."""
    zero_copy: int
    """Those whose expert a device read in host memory."""
    cpu: int


class LayerOfExperts(BaseModel):
    used: list[int]
    """Of 1,000 tokens of late, how many used each expert; 0 in layers without experts."""
    on_device: str
    """A character for each expert: 1 if it has a place on a device, else 0."""


class Experts(BaseModel):
    n_expert: int
    n_used: int
    """By a token."""
    hit_rate: float
    """Share of all uses whose expert had a place on a device."""
    routes: Routes
    copies: int
    """Experts that moved to a device."""
    copied_bytes: int
    layers: list[LayerOfExperts]


class EngineView(BaseModel):
    model: str
    n_ctx: int
    n_layer: int
    n_ff: int
    """Neurons of a layer that a token goes through."""
    tokens_per_second: float
    prompt_tokens_per_second: float
    replicas: int
    """Sessions that compute, of which `layers` shows the first."""
    running: int
    waiting: int
    kv_used: float
    vram: Vram | None
    layers: list[Layer]
    experts: Experts | None
    """Of a mixture."""
