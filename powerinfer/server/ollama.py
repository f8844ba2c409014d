"""Ollama's API: /api/chat, /generate, /embed, /embeddings, /tags, /show, /ps and /version."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections import Counter
from collections.abc import AsyncIterator
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Request
from fastapi.responses import Response
from pydantic import Field

from .. import __version__
from .._text.channels import has_channels
from .._text.reasoning import thinks
from ..async_llama import AsyncStream
from .arguments import invalid
from .aside import aside_if
from .blocks import Answer, Block, answer_of, streamed
from .host import Add, Host
from .lenient import ignore
from .models import ServedModel
from .problems import encode, json_response, problem_of
from .schemas import (
    PART,
    Body,
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    Mappings,
    made,
)
from .settings import duration

if TYPE_CHECKING:
    from .._engine.file import Metadata, ModelFile

_JSON_LINES = "application/x-ndjson"
_Float = float | None
_Int = int | None


class Options(Body):
    """Sampling, by Ollama's names."""

    num_predict: _Int = None
    temperature: _Float = None
    top_k: _Int = None
    top_p: _Float = None
    min_p: _Float = None
    typical_p: _Float = None
    repeat_penalty: _Float = None
    repeat_last_n: _Int = None
    presence_penalty: _Float = None
    frequency_penalty: _Float = None
    mirostat: _Int = None
    mirostat_tau: _Float = None
    mirostat_eta: _Float = None
    seed: _Int = None
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None


class OllamaRequest(Body):
    model: str | None = None
    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    """ "json", or a schema."""
    options: Options | None = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    keep_alive: str | float | None = None
    """How long the model stays loaded after this, at most as long as --idle-unload says."""


class OllamaChat(OllamaRequest):
    messages: Mappings | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=128, fail_fast=True)] | None = None


class OllamaGenerate(OllamaRequest):
    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    images: Annotated[list[str], Field(fail_fast=True)] | None = None
    raw: bool | None = None


class OllamaEmbed(Body):
    model: str | None = None
    input: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    truncate: bool | None = None
    dimensions: _Int = None
    options: Options | None = None
    keep_alive: str | float | None = None


class OllamaEmbedOne(Body):
    """Of /api/embeddings, which older clients ask."""

    model: str | None = None
    prompt: str | None = None
    options: Options | None = None
    keep_alive: str | float | None = None


class OllamaName(Body):
    model: str | None = None
    name: str | None = None
    verbose: bool | None = None


def add(at: Host, post: Add, get: Add) -> None:
    """Adds the routes."""

    async def chat(request: Request, body: OllamaChat) -> Response:
        await use(request, body)
        if not body.messages:
            return json_response(_loaded(at.name(request), {"message": {"role": "assistant", "content": ""}}))
        asked = await aside_if(len(body.messages) > PART, _asked, body, body.messages)
        return await answer(request, asked, _said)

    async def generate(request: Request, body: OllamaGenerate) -> Response:
        if body.images:
            raise invalid("images cannot be read by this model", "images")
        await use(request, body)
        if not body.prompt and not body.suffix:
            return json_response(_loaded(at.name(request), {"response": ""}))
        fields = _fields(body)
        if body.raw or body.suffix:
            for missing in ("chat_template_kwargs", "reasoning_effort", "top_logprobs"):
                fields.pop(missing, None)
            fields |= {"prompt": body.prompt or "", "suffix": body.suffix or None}
            if fields.pop("logprobs", None):
                ignore("logprobs")
            return await answer(request, made(CompletionRequest, fields), _written)
        system = [{"role": "system", "content": body.system}] if body.system else []
        fields["messages"] = [*system, {"role": "user", "content": body.prompt}]
        return await answer(request, made(ChatRequest, fields), _written)

    async def answer(request: Request, asked: ChatRequest | CompletionRequest, shape: Any) -> Response:
        if isinstance(asked, ChatRequest):
            result = await at.run_chat(request, asked)
        else:
            result = await at.run_completion(request, asked)
        name = at.name(request)
        is_chat = isinstance(asked, ChatRequest)
        if isinstance(result, AsyncStream):
            if asked.logprobs is not None:
                ignore("logprobs")  # they are told of whole answers
            return at.stream(request, result, _lines(result, name, shape, is_chat), _JSON_LINES)
        whole = answer_of(result) if is_chat else _answer_of_text(result)
        more = _logprobs(result["choices"][0]) if is_chat and asked.logprobs is not None else {}
        return json_response(_head(name) | shape(whole.without_cut_call()) | more | _end(whole))

    async def use(request: Request, body: OllamaRequest | OllamaEmbed | OllamaEmbedOne) -> None:
        """Takes the model, and notes how long it is to stay."""
        seconds = None if body.keep_alive is None else _seconds(body.keep_alive)
        model = await at.use(request, body.model)
        if seconds is None:
            return
        if at.models.idle_s is None:
            ignore("keep_alive")  # it stays loaded
        else:
            model.keep_s = seconds

    async def embed(request: Request, body: OllamaEmbed) -> Response:
        await use(request, body)
        name = at.name(request)
        if not body.input:
            return json_response({"model": name, "embeddings": []})
        fields = {"input": body.input, "model": body.model, "dimensions": body.dimensions}
        asked = made(EmbeddingRequest, fields)
        result = await at.vectors(request, asked)
        vectors = [_normal(item["embedding"]) for item in result["data"]]
        count = result["usage"]["prompt_tokens"]
        return json_response({"model": name, "embeddings": vectors, "prompt_eval_count": count})

    async def embed_one(request: Request, body: OllamaEmbedOne) -> Response:
        await use(request, body)
        if not body.prompt:
            return json_response({"embedding": []})
        asked = made(EmbeddingRequest, {"input": body.prompt, "model": body.model})
        return json_response({"embedding": (await at.vectors(request, asked))["data"][0]["embedding"]})

    async def tags() -> Response:
        return json_response({"models": [_tag(name, model) for name, model, _ in at.models.known]})

    async def running() -> Response:
        return json_response({"models": [_running(at, model) for model in at.models.opened]})

    async def show(body: OllamaName) -> Response:
        return json_response(_shown(at.models.find(body.model or body.name)))

    async def version() -> Response:
        return json_response({"version": __version__})

    post("/api/chat", chat, streams=_JSON_LINES)
    post("/api/generate", generate, streams=_JSON_LINES)
    post("/api/embed", embed)
    post("/api/embeddings", embed_one)
    post("/api/show", show)
    get("/api/tags", tags)
    get("/api/ps", running)
    get("/api/version", version)


# -- requests


def _asked(body: OllamaChat, messages: list[dict[str, Any]]) -> ChatRequest:
    """The same as a chat request."""
    own = [_message(message) for message in messages]
    return made(ChatRequest, _fields(body) | {"messages": own, "tools": body.tools})


def _fields(body: OllamaRequest) -> dict[str, Any]:
    """What chats and texts share."""
    fields: dict[str, Any] = {"model": body.model, "stream": body.stream is not False}
    if body.options is not None:
        own = {name: getattr(body.options, name) for name in Options.model_fields}
        limit = own.pop("num_predict")
        fields["max_tokens"] = None if limit is None else max(limit, -1)
        fields["mirostat_mode"] = own.pop("mirostat")
        seed = own.pop("seed")
        fields |= own | {"seed": None if seed is None or seed < 0 else seed}
    if body.format == "json":
        fields["response_format"] = {"type": "json_object"}
    elif isinstance(body.format, dict):
        fields["json_schema"] = body.format
    elif body.format:
        raise invalid(f"format is {body.format[:40]!r}, it must be 'json' or a schema", "format")
    if isinstance(body.think, str):
        fields["reasoning_effort"] = body.think
    elif body.think is not None:
        fields["chat_template_kwargs"] = {"enable_thinking": body.think}
    if body.logprobs:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    return fields


def _message(message: dict[str, Any]) -> dict[str, Any]:
    if message.get("images"):
        raise invalid("images cannot be read by this model", "messages")
    made = {"role": message.get("role"), "content": message.get("content") or ""}
    if message.get("thinking"):
        made["reasoning_content"] = message["thinking"]
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        made["tool_calls"] = [_call(call, i) for i, call in enumerate(calls)]
    if message.get("tool_name"):
        made["name"] = message["tool_name"]
    return made


def _call(call: Any, i: int) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise invalid("a tool call of a message has no 'function'", "messages")
    arguments = function.get("arguments") or {}
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    made = {"name": function.get("name"), "arguments": text}
    return {"id": call.get("id") or f"call_{i}", "type": "function", "function": made}


# -- answers


def _now() -> str:
    return datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")


def _head(name: str) -> dict[str, Any]:
    return {"model": name, "created_at": _now()}


def _loaded(name: str, shape: dict[str, Any]) -> dict[str, Any]:
    """The answer to a request that says nothing but to load the model."""
    return _head(name) | shape | {"done": True, "done_reason": "load"}


def _end(answer: Answer) -> dict[str, Any]:
    timings = answer.timings
    prompt, given = (int(1e6 * timings[name]) for name in ("prompt_ms", "predicted_ms"))
    return {
        "done": True,
        "done_reason": "length" if answer.finish_reason == "length" else "stop",
        "total_duration": prompt + given,
        "load_duration": 0,
        "prompt_eval_count": answer.n_prompt,
        "prompt_eval_duration": prompt,
        "eval_count": answer.n_given,
        "eval_duration": given,
    }


def _text_of(blocks: list[Block], kind: str) -> str:
    return "".join(block.text for block in blocks if block.kind == kind)


def _said(blocks: list[Block]) -> dict[str, Any]:
    """Of a chat."""
    message: dict[str, Any] = {"role": "assistant", "content": _text_of(blocks, "text")}
    thought = _text_of(blocks, "thought")
    if thought:
        message["thinking"] = thought
    calls = [_made(block) for block in blocks if block.kind == "call"]
    if calls:
        message["tool_calls"] = calls
    return {"message": message}


def _made(block: Block) -> dict[str, Any]:
    try:
        arguments = json.loads(block.text)
    except ValueError:  # cut off
        arguments = {}
    return {"id": block.id, "function": {"name": block.name, "arguments": arguments}}


def _written(blocks: list[Block]) -> dict[str, Any]:
    """Of a text."""
    thought = _text_of(blocks, "thought")
    return {"response": _text_of(blocks, "text")} | ({"thinking": thought} if thought else {})


def _answer_of_text(result: dict[str, Any]) -> Answer:
    (choice,) = result["choices"]
    blocks = [Block("text", 0, choice["text"])]
    return Answer(blocks, choice["finish_reason"], None, result["timings"], result["usage"])


def _logprobs(choice: dict[str, Any]) -> dict[str, Any]:
    return {"logprobs": choice["logprobs"]["content"]}


async def _lines(stream: AsyncStream, name: str, shape: Any, is_chat: bool) -> AsyncIterator[bytes]:
    answer = Answer()

    def line(value: dict[str, Any]) -> bytes:
        return encode(_head(name) | value) + b"\n"

    try:
        if is_chat:
            async for what, block, text in streamed(stream, answer):
                if block.kind == "call":  # whole: its arguments are no text here
                    if what == "close" and not answer.is_cut(block):
                        yield line(shape([block]) | {"done": False})
                elif what == "more":
                    yield line(shape([Block(block.kind, 0, text)]) | {"done": False})
        else:
            async for chunk in stream:
                (choice,) = chunk["choices"]
                if choice["text"]:
                    yield line(shape([Block("text", 0, choice["text"])]) | {"done": False})
                if choice["finish_reason"] is not None:
                    answer.finish_reason, answer.timings = choice["finish_reason"], chunk["timings"]
            answer.usage = stream.usage
        yield line(shape([]) | _end(answer))
    except Exception as error:
        yield encode(problem_of(error).body) + b"\n"


def _normal(vector: list[float]) -> list[float]:
    """Of length 1, as Ollama's are."""
    length = sum(x * x for x in vector) ** 0.5
    return [x / length for x in vector] if length else vector


# -- what there is


def _details(model: ServedModel) -> dict[str, Any]:
    family = str(model.file.metadata.get("general.architecture", ""))
    n_parameters = sum(math.prod(tensor.shape) for tensor in model.file.tensors)
    return {
        "parent_model": "",
        "format": "gguf",
        "family": family,
        "families": [family],
        "parameter_size": f"{n_parameters / 1e9:.1f}B",
        "quantization_level": _weights(model.file),
    }


def _weights(file: ModelFile) -> str:
    """The format of most weights."""
    sizes: Counter[str] = Counter()
    for tensor in file.tensors:
        sizes[tensor.type] += tensor.n_bytes
    return sizes.most_common(1)[0][0]


def _value(keys: Metadata, key: str) -> Any:
    """None for lists, as Ollama has it, and for what JSON has not."""
    if keys.type_name(key).startswith("array"):
        return None
    value = keys[key]
    return value if not isinstance(value, float) or math.isfinite(value) else None


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat().replace("+00:00", "Z")


def _seconds(keep_alive: str | float) -> float:
    """Of a duration, "5m" say, or a number of seconds; less than 0: for ever."""
    try:
        seconds = duration(keep_alive) if isinstance(keep_alive, str) else float(keep_alive)
    except ValueError as error:
        raise invalid(f"keep_alive: {error}", "keep_alive") from None
    return math.inf if seconds < 0 else seconds


def _running(at: Host, model: ServedModel) -> dict[str, Any]:
    """One that is loaded."""
    keep_s = at.models.kept_s(model)
    ends = "9999-12-31T23:59:59Z"
    if math.isfinite(keep_s):
        ends = _time(time.time() + max(keep_s - (time.monotonic() - model.last_used), 0))
    own = {"expires_at": ends, "size_vram": 0, "context_length": model.info.session.n_ctx}
    return _tag(at.models.name_of(model), model) | own


def _tag(name: str, model: ServedModel) -> dict[str, Any]:
    path, n_bytes = model.file.path, model.file.info.n_bytes
    return {
        "name": name,
        "model": name,
        "modified_at": _time(model.created),
        "size": n_bytes,
        "digest": hashlib.sha256(f"{path} {n_bytes}".encode()).hexdigest(),
        "details": _details(model),
    }


def _shown(model: ServedModel) -> dict[str, Any]:
    templates = (model.template, model.template_for_tools)
    capabilities = ["completion"]
    if "tools" in templates[1]:
        capabilities.append("tools")
    if any(thinks(template) is not None or has_channels(template) for template in templates):
        capabilities.append("thinking")
    if model.opened is not None and model.opened.llama.tokenizer.fim_mid is not None:
        capabilities.append("insert")
    keys = model.file.metadata
    info = {key: _value(keys, key) for key in keys if key != "tokenizer.chat_template"}
    return {
        "modelfile": f"FROM {model.file.path.name}\n",
        "parameters": "",
        "template": model.template,
        "details": _details(model),
        "model_info": info,
        "capabilities": capabilities,
        "modified_at": _time(model.created),
    }
