"""llama-server's own endpoints: /completion, /infill, /embedding, /apply-template, /props, /slots,
/lora-adapters, paths without /v1."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import Request
from fastapi.responses import Response
from pydantic import Field

from .. import __version__
from ..async_llama import AsyncStream
from .arguments import invalid
from .aside import aside
from .events import EVENTS, event
from .host import Add, Host
from .models import ServedModel
from .problems import json_response, problem_of
from .schemas import (
    Body,
    ChatRequest,
    CompletionRequest,
    Count,
    EmbeddingRequest,
    Generate,
    Lora,
    ManyTokens,
    Texts,
    Tokens,
    made,
)
from .vectors import native_response

Parts = Annotated[list[str | int], Field(min_length=1, fail_fast=True)]


class Native(Generate):
    """Fields of Generate, and these."""

    n_probs: Annotated[int, Field(ge=0, le=20)] | None = None
    return_tokens: bool | None = None
    mirostat: int | None = None
    logit_bias: Any = None
    """As in Generate, or pairs of a token and a number, or false to exclude it."""

    # These change nothing here.
    id_slot: int | None = None
    n_keep: int | None = None
    min_keep: int | None = None
    n_indent: int | None = None
    return_progress: bool | None = None
    timings_per_token: bool | None = None
    post_sampling_probs: bool | None = None


class NativeCompletion(Native):
    prompt: str | Tokens | Texts | ManyTokens | Parts


class Infill(Native):
    input_prefix: str = ""
    input_suffix: str = ""
    prompt: str | None = None
    """Stands behind the prefix."""


class Embedding(Body):
    model: str | None = None
    content: str | Tokens | Texts | ManyTokens | None = None
    input: str | Tokens | Texts | ManyTokens | None = None
    embd_normalize: Literal[-1, 2] | None = None
    """2: vectors of length 1; -1: as they are; None: as the server does."""


class EmbeddingOfEither(Embedding):
    """With `content` llama-server's, with `input` OpenAI's."""

    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count | None = None
    user: str | None = None


def add(at: Host, post: Add, get: Add) -> None:
    """Adds the routes."""

    async def completion(request: Request, body: NativeCompletion) -> Response:
        prompt = body.prompt
        if isinstance(prompt, list) and len({type(part) for part in prompt}) > 1:
            parts = [part for part in prompt if not isinstance(part, list)]
            model = await at.use(request, body.model, body.lora)
            prompt = await at.mixed_ids(request, model, parts)
        return await answer(request, body, {"prompt": prompt})

    async def infill(request: Request, body: Infill) -> Response:
        return await answer(
            request, body, {"prompt": body.input_prefix + (body.prompt or ""), "suffix": body.input_suffix}
        )

    async def answer(request: Request, body: Native, more: dict[str, Any]) -> Response:
        asked = made(CompletionRequest, _fields(body) | more)
        result = await at.run_completion(request, asked)
        if isinstance(result, AsyncStream):
            return at.stream(request, result, _frames(result, asked, at.name(request)))
        whole = [_whole(result, i, asked, at.name(request)) for i in range(len(result["choices"]))]
        return json_response(whole[0] if len(whole) == 1 else whole)

    async def embedding(request: Request, body: Embedding) -> Response:
        texts = body.content if body.input is None else body.input
        if texts is None:
            raise invalid("content, or input, must be given", "content")
        asked = made(EmbeddingRequest, {"input": texts, "model": body.model})
        normalize = None if body.embd_normalize is None else body.embd_normalize == 2
        return await aside(native_response, await at.vectors(request, asked, normalize=normalize))

    async def embeddings(request: Request, body: EmbeddingOfEither) -> Response:
        if body.input is None:
            return await embedding(request, body)
        names = EmbeddingRequest.model_fields
        return await at.embeddings(
            request, made(EmbeddingRequest, {name: getattr(body, name) for name in names})
        )

    async def apply_template(request: Request, body: ChatRequest) -> Response:
        return json_response({"prompt": await at.prompt_text(request, body)})

    async def props(model: str | None = None) -> Response:
        return json_response(_props(at, at.models.one(model)))

    async def slots(model: str | None = None) -> Response:
        one = at.models.one(model)
        stats = one.llm.stats()
        n_ctx, drafts = one.info.session.n_ctx, one.llm.llama.draft_model is not None
        told = [
            {"id": i, "n_ctx": n_ctx, "speculative": drafts, "is_processing": i < stats.running}
            for i in range(stats.max_running)
        ]
        return json_response(told)

    async def lora_adapters(model: str | None = None) -> Response:
        one, _ = at.models.base(model)
        scales = dict(one.default)
        told = [
            {"id": i, "name": adapter.name, "path": adapter.path, "scale": scales.get(i, 0.0)}
            for i, adapter in enumerate(one.adapters)
        ]
        return json_response(told)

    async def set_adapters(body: Lora, model: str | None = None) -> Response:
        one, _ = at.models.base(model)
        one.default = at.models.strengths(one, [(each.id, each.scale) for each in body])
        return json_response({"success": True})

    get("/lora-adapters", lora_adapters)
    post("/lora-adapters", set_adapters)
    post("/completion", completion, streams=EVENTS)
    post("/completions", completion, streams=EVENTS)
    post("/infill", infill, streams=EVENTS)
    post("/apply-template", apply_template)
    post("/chat/completions", at.chat, streams=EVENTS)
    post("/embedding", embedding)
    post("/embeddings", embeddings)
    get("/models", at.list_models)
    get("/v1/health", at.health)
    get("/props", props)
    get("/slots", slots)


def _fields(body: Native) -> dict[str, Any]:
    fields = {name: getattr(body, name) for name in Generate.model_fields if name in body.model_fields_set}
    if body.n_predict is not None:
        fields.pop("max_tokens", None)
    if body.n_probs:
        fields["logprobs"] = body.n_probs
    if body.return_tokens is not None:
        fields["return_token_ids"] = body.return_tokens
    if body.mirostat is not None:
        fields["mirostat_mode"] = body.mirostat
    if body.seed is not None and body.seed < 0:
        del fields["seed"]  # any
    if isinstance(body.logit_bias, list):
        fields["logit_bias"] = _bias(body.logit_bias)
    return fields


def _bias(pairs: list[Any]) -> dict[str, float]:
    bias = {}
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2 or isinstance(pair[0], bool) or pair[1] is True:
            raise invalid("logit_bias is no list of pairs of a token and a number", "logit_bias")
        token, value = pair
        if not isinstance(token, int):
            raise invalid("logit_bias takes token ids here, not texts", "logit_bias")
        bias[str(token)] = -100.0 if value is False else value
    return bias


def _whole(result: dict[str, Any], i: int, asked: CompletionRequest, name: str) -> dict[str, Any]:
    choice, usage = result["choices"][i], result["usage"]
    told = {"index": i, "content": choice["text"], "prompt": asked.prompt, "model": name}
    if choice["logprobs"] is not None:
        told["completion_probabilities"] = _probabilities(choice["logprobs"])
    return told | _end(choice, usage, result["timings"])


def _end(choice: dict[str, Any], usage: dict[str, Any], timings: dict[str, Any]) -> dict[str, Any]:
    stopped = choice.get("stop_reason")
    word = stopped if isinstance(stopped, str) else ""
    return {
        "stop": True,
        "stop_type": "limit" if choice["finish_reason"] == "length" else "word" if word else "eos",
        "stopping_word": word,
        "truncated": False,
        "tokens": choice.get("token_ids", []),
        "id_slot": -1,
        "tokens_predicted": usage["completion_tokens"],
        "tokens_evaluated": usage["prompt_tokens"],
        "tokens_cached": usage["prompt_tokens_details"]["cached_tokens"],
        "timings": timings,
    }


def _probabilities(logprobs: dict[str, Any]) -> list[dict[str, Any]]:
    tops = zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
    return [
        {
            "token": token,
            "logprob": logprob,
            "top_logprobs": [{"token": t, "logprob": value} for t, value in (top or {}).items()],
        }
        for token, logprob, top in tops
    ]


async def _frames(stream: AsyncStream, asked: CompletionRequest, name: str) -> AsyncIterator[bytes]:
    try:
        async for chunk in stream:
            (choice,) = chunk["choices"]
            part = {"index": choice["index"], "content": choice["text"], "id_slot": -1}
            part["tokens"] = choice.get("token_ids", [])
            if choice["logprobs"] is not None:
                part["completion_probabilities"] = _probabilities(choice["logprobs"])
            if choice["finish_reason"] is None:
                yield event(part | {"stop": False})
            else:
                end = _end(choice, stream.usage, chunk["timings"])
                yield event(part | {"model": name, "prompt": asked.prompt} | end)
    except Exception as error:
        yield event(problem_of(error).body)


def _props(at: Host, model: ServedModel) -> dict[str, Any]:
    llama, info = model.llm.llama, model.info
    tokenizer = llama.tokenizer

    def text(token: int | None) -> str:
        return "" if token is None else tokenizer.text(token).decode("utf-8", "replace")

    return {
        "default_generation_settings": {"n_ctx": info.session.n_ctx, "params": dict(at.settings.defaults)},
        "total_slots": model.llm.n_parallel,
        "model_path": llama.model_path,
        "model_alias": at.models.name_of(model),
        "chat_template": model.template,
        "bos_token": text(tokenizer.bos),
        "eos_token": text(tokenizer.eos),
        "modalities": {"vision": False, "audio": False},
        "build_info": f"powerinfer {__version__}",
    }
