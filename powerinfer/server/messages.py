"""Anthropic's Messages: POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any, Literal

from fastapi import Request
from fastapi.responses import Response
from pydantic import Field

from ..async_llama import AsyncStream
from .arguments import invalid
from .aside import aside_if
from .blocks import Answer, Block, answer_of, streamed
from .events import EVENTS, named_event
from .host import Add, Host
from .lenient import ignore
from .problems import json_response, problem_of
from .schemas import PART, Body, ChatRequest, Count, Mappings, made

Share = Annotated[float, Field(ge=0, le=1)]


class Turn(Body):
    role: Literal["user", "assistant", "system"]
    content: str | Mappings


class Conversation(Body):
    """What is counted."""

    model: str | None = None
    messages: Annotated[list[Turn], Field(min_length=1, fail_fast=True)]
    system: str | Mappings | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    """effort, and format: {"type": "json_schema", "schema": ...}."""

    # These change nothing here.
    cache_control: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None


class MessagesRequest(Conversation):
    max_tokens: Count | None = None
    stream: bool | None = None
    stop_sequences: Annotated[list[str], Field(fail_fast=True)] | None = None
    temperature: Share | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    inference_geo: str | None = None


def add(at: Host, post: Add, get: Add) -> None:
    """Adds the routes."""
    del get

    async def messages(request: Request, body: MessagesRequest) -> Response:
        asked = await aside_if(len(body.messages) > PART, _chat, body, at.settings.strict)
        result = await at.run_chat(request, asked)
        id = f"msg_{secrets.token_hex(12)}"
        if isinstance(result, AsyncStream):
            return at.stream(request, result, _frames(result, id, at.name(request)))
        answer = answer_of(result)
        content = [_content(block) for block in answer.without_cut_call()]
        return json_response(_message(id, at.name(request), content, _end(answer), _usage(answer)))

    async def count_tokens(request: Request, body: Conversation) -> Response:
        asked = await aside_if(len(body.messages) > PART, _chat, body, at.settings.strict)
        n = len(await at.prompt_ids(request, asked))
        return json_response({"input_tokens": n})

    post("/v1/messages", messages, streams=EVENTS)
    post("/v1/messages/count_tokens", count_tokens)


# -- requests


def _chat(body: Conversation, strict: bool) -> ChatRequest:
    """The same as a chat request."""
    system = _system(body.system)
    turns = [message for turn in body.messages for message in _turn(turn)]
    while turns and turns[0]["role"] == "system":
        system = "\n\n".join(text for text in (system, turns.pop(0)["content"]) if text)
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": [*([{"role": "system", "content": system}] if system else []), *turns],
    }
    last = body.messages[-1]
    if last.role == "assistant" and turns and not turns[-1].get("tool_calls"):
        fields["continue_final_message"] = True
    tools = [_tool(tool, strict) for tool in body.tools or ()]
    fields["tools"] = [tool for tool in tools if tool is not None] or None
    _choice(body.tool_choice or {}, fields)
    thinking = (body.thinking or {}).get("type")
    if thinking is not None:
        fields["chat_template_kwargs"] = {"enable_thinking": thinking != "disabled"}
    config = body.output_config or {}
    if config.get("effort") is not None:
        fields["reasoning_effort"] = config["effort"]
    form = config.get("format")
    if form is not None:
        if not isinstance(form, dict) or form.get("type") != "json_schema":
            raise invalid("output_config.format has another type than 'json_schema'", "output_config")
        if not isinstance(form.get("schema"), dict):
            raise invalid("output_config.format has no 'schema'", "output_config")
        fields["json_schema"] = form["schema"]
    if isinstance(body, MessagesRequest):
        for name in ("max_tokens", "stream", "temperature", "top_p", "top_k"):
            fields[name] = getattr(body, name)
        fields["stop"] = body.stop_sequences or None
    return made(ChatRequest, fields)


def _text(part: Any) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        text: str = part["text"]
        return text
    if isinstance(part, dict) and part.get("type") == "document" and isinstance(part.get("source"), dict):
        title, source = part.get("title"), part["source"]
        if source.get("type") == "text" and isinstance(source.get("data"), str):
            return f"{title}\n{source['data']}" if isinstance(title, str) else str(source["data"])
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise invalid(f"content of type {kind!r} cannot be read by this model, text can", "messages")


def _texts(content: Any) -> str:
    parts = content if isinstance(content, list) else [content] if content else []
    return "\n".join(part if isinstance(part, str) else _text(part) for part in parts)


def _system(system: Any) -> str:
    return _texts(system)


def _turn(turn: Turn) -> Iterator[dict[str, Any]]:
    """A turn's messages: what tools returned stands in the user's."""
    if isinstance(turn.content, str) or turn.role == "system":
        yield {"role": turn.role, "content": _texts(turn.content)}
        return
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for part in turn.content:
        kind = part.get("type")
        if kind == "tool_use" and turn.role == "assistant":
            made = {"name": part.get("name"), "arguments": json.dumps(part.get("input") or {})}
            calls.append({"id": part.get("id"), "type": "function", "function": made})
        elif kind in ("thinking", "redacted_thinking") and turn.role == "assistant":
            thoughts.append(str(part.get("thinking") or ""))
        elif kind == "tool_result" and turn.role == "user":
            if texts:
                yield {"role": "user", "content": "\n".join(texts)}
                texts = []
            said = _texts(part.get("content"))
            if part.get("is_error"):
                said = f"Error: {said}"
            yield {"role": "tool", "tool_call_id": part.get("tool_use_id"), "content": said}
        else:
            texts.append(_text(part))
    if texts or calls or turn.role == "assistant":
        message: dict[str, Any] = {"role": turn.role, "content": "\n".join(texts)}
        if calls:
            message |= {"tool_calls": calls, "content": message["content"] or None}
        if any(thoughts):
            message["reasoning_content"] = "\n".join(thoughts)
        yield message


def _tool(tool: dict[str, Any], strict: bool) -> dict[str, Any] | None:
    """A function; None for tools of Anthropic's own, which its servers would run."""
    kind = tool.get("type", "custom")
    if kind != "custom" and "input_schema" not in tool:
        if strict:
            raise invalid(f"there is no tool {kind!r} here", "tools")
        ignore(f"tools.{kind}")
        return None
    made = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    if tool.get("description") is not None:
        made["description"] = tool["description"]
    return {"type": "function", "function": made}


def _choice(choice: dict[str, Any], fields: dict[str, Any]) -> None:
    kind = choice.get("type")
    if choice.get("disable_parallel_tool_use"):
        fields["parallel_tool_calls"] = False
    if kind == "tool":
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    elif kind in ("auto", "any", "none"):
        fields["tool_choice"] = "required" if kind == "any" else kind
    elif kind is not None:
        raise invalid(f"tool_choice has the type {kind!r}; known are auto, any, tool and none", "tool_choice")


# -- answers


def _message(id: str, model: str, content: list[Any], end: dict[str, Any], usage: Any) -> dict[str, Any]:
    return {
        "id": id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        **end,
        "usage": usage,
    }


def _end(answer: Answer) -> dict[str, Any]:
    reasons = {"length": "max_tokens", "tool_calls": "tool_use"}
    stopped = answer.stop_reason if isinstance(answer.stop_reason, str) else None
    reason = "stop_sequence" if stopped is not None else reasons.get(answer.finish_reason, "end_turn")
    return {"stop_reason": reason, "stop_sequence": stopped}


def _usage(answer: Answer) -> dict[str, int]:
    return {
        "input_tokens": answer.n_prompt - answer.n_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": answer.n_cached,
        "output_tokens": answer.n_given,
    }


def _content(block: Block) -> dict[str, Any]:
    if block.kind == "thought":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    try:
        arguments = json.loads(block.text or "{}")
    except ValueError:  # cut off
        arguments = {}
    return {"type": "tool_use", "id": block.id, "name": block.name, "input": arguments}


async def _frames(stream: AsyncStream, id: str, model: str) -> AsyncIterator[bytes]:
    answer = Answer()
    names = {"thought": ("thinking_delta", "thinking"), "text": ("text_delta", "text")}
    names["call"] = ("input_json_delta", "partial_json")
    try:
        usage = {"input_tokens": stream.usage["prompt_tokens"], "output_tokens": 0}
        none = {"stop_reason": None, "stop_sequence": None}
        yield named_event({"type": "message_start", "message": _message(id, model, [], none, usage)})
        yield named_event({"type": "ping"})
        async for event, block, text in streamed(stream, answer):
            at = {"index": block.index}
            if event == "open":
                begin = _content(Block(block.kind, block.index, "", block.id, block.name))
                yield named_event({"type": "content_block_start", **at, "content_block": begin})
            elif event == "more":
                kind, name = names[block.kind]
                delta = {"type": kind, name: text}
                yield named_event({"type": "content_block_delta", **at, "delta": delta})
            else:
                yield named_event({"type": "content_block_stop", **at})
        yield named_event({"type": "message_delta", "delta": _end(answer), "usage": _usage(answer)})
        yield named_event({"type": "message_stop"})
    except Exception as error:
        yield named_event(problem_of(error).body)
