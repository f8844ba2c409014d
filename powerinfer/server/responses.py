"""OpenAI's Responses: POST /v1/responses. Nothing is kept but what requests want stored: the last of these,
in memory."""

from __future__ import annotations

import json
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any

from fastapi import Request
from fastapi.responses import Response
from pydantic import Field

from ..async_llama import AsyncStream
from .arguments import invalid
from .aside import aside, aside_if
from .blocks import Answer, Block, answer_of, streamed
from .events import EVENTS, named_event
from .host import Add, Host
from .lenient import ignore
from .problems import Problem, encode, json_response, problem_of
from .schemas import PART, Body, ChatRequest, Count, Mappings, made

MAX_STORED_BYTES = 64 << 20


class ResponsesRequest(Body):
    model: str | None = None
    input: str | Mappings
    instructions: str | None = None
    stream: bool | None = None
    max_output_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    """format, as chats' response_format but flat."""
    reasoning: dict[str, Any] | None = None
    store: bool | None = None
    """Keep the answer, for previous_response_id and GET; here the default is not to."""
    previous_response_id: str | None = None

    # These change nothing here.
    metadata: dict[str, Any] | None = None
    include: Annotated[list[str], Field(fail_fast=True)] | None = None
    truncation: str | None = None
    user: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    stream_options: dict[str, Any] | None = None
    client_metadata: dict[str, Any] | None = None


class _Store:
    """The last answers that were to be kept, each with the items of its conversation, as JSON: their size is
    what they take. A conversation may be long: what goes through all of it is done beside the event loop."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[bytes, bytes]] = OrderedDict()
        self._n_bytes = 0

    async def put(self, response: dict[str, Any], items: list[Any]) -> None:
        kept = self._kept[response["id"]] = await aside(encode, response), await aside(encode, items)
        self._n_bytes += sum(map(len, kept))
        while self._n_bytes > MAX_STORED_BYTES:
            self.drop(next(iter(self._kept)))

    def response(self, id: str) -> bytes:
        """Raises Problem."""
        if id not in self._kept:
            raise Problem(404, f"there is no response {id[:100]!r} (any more)", code="not_found")
        return self._kept[id][0]

    async def items(self, id: str) -> list[Any]:
        """Raises Problem."""
        self.response(id)
        items: list[Any] = await aside(json.loads, self._kept[id][1])
        return items

    def drop(self, id: str) -> None:
        """Raises Problem."""
        self.response(id)
        self._n_bytes -= sum(map(len, self._kept.pop(id)))


def add(at: Host, post: Add, get: Add, delete: Add) -> None:
    """Adds the routes."""
    store = _Store()

    async def responses(request: Request, body: ResponsesRequest) -> Response:
        items = await _items(body, store)
        asked = await aside_if(len(items) > PART, _chat, body, items, at.settings.strict)

        async def kept(response: dict[str, Any]) -> None:
            if body.store:
                await store.put(response, [*items, *response["output"]])

        result = await at.run_chat(request, asked)
        begun = _response(body, at.name(request))
        if isinstance(result, AsyncStream):
            return at.stream(request, result, _frames(result, begun, kept))
        answer = answer_of(result)
        response = begun | _end(answer) | {"output": _output(answer, begun["id"])}
        await kept(response)
        return json_response(response)

    async def kept_response(id: str) -> Response:
        return Response(store.response(id), media_type="application/json")

    async def forget(id: str) -> Response:
        store.drop(id)
        return json_response({"id": id, "object": "response", "deleted": True})

    post("/v1/responses", responses, streams=EVENTS)
    get("/v1/responses/{id}", kept_response)
    delete("/v1/responses/{id}", forget)


# -- requests


async def _items(body: ResponsesRequest, store: _Store) -> list[Any]:
    """All of the conversation."""
    own = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    if body.previous_response_id is None:
        return list(own)
    return [*await store.items(body.previous_response_id), *own]


def _chat(body: ResponsesRequest, items: list[Any], strict: bool) -> ChatRequest:
    messages = list(_messages(items))
    first = [body.instructions] if body.instructions else []
    while messages and messages[0]["role"] in ("system", "developer"):
        first.append(messages.pop(0)["content"])
    if first:
        messages.insert(0, {"role": "system", "content": "\n\n".join(first)})
    for message in messages[1:]:
        if message["role"] == "developer":
            message["role"] = "system"
    tools = [_tool(tool, strict) for tool in body.tools or ()]
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": messages,
        "max_tokens": body.max_output_tokens,
        "tools": [tool for tool in tools if tool is not None] or None,
        "tool_choice": _choice(body.tool_choice, strict),
        "reasoning_effort": (body.reasoning or {}).get("effort"),
        "response_format": _form((body.text or {}).get("format")),
    }
    for name in ("stream", "temperature", "top_p", "parallel_tool_calls"):
        fields[name] = getattr(body, name)
    return made(ChatRequest, fields)


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
        if kind not in ("input_text", "output_text", "text", "refusal", "summary_text") or not isinstance(
            text, str
        ):
            raise invalid(f"content of type {kind!r} cannot be read by this model, text can", "input")
        texts.append(text)
    return "\n".join(texts)


def _messages(items: list[Any]) -> Iterator[dict[str, Any]]:
    """Items as messages: calls and thoughts belong to the assistant's message that they stand beside."""
    turn: dict[str, Any] | None = None  # the assistant's that is not over
    for item in items:
        kind = item.get("type", "message")
        role = item.get("role") if kind == "message" else None
        if kind == "reasoning":
            content = item.get("content") or []
            if not isinstance(content, list):
                raise invalid("the content of an item 'reasoning' is no list", "input")
            said = [part.get("text", "") for part in content if isinstance(part, dict)]
            if turn is not None:
                yield turn
            turn = {"role": "assistant", "content": ""}
            if any(said):
                turn["reasoning_content"] = "\n".join(map(str, said))
        elif kind == "function_call" or role == "assistant":
            turn = turn or {"role": "assistant", "content": ""}
            if role == "assistant":
                turn["content"] = "\n".join(
                    text for text in (turn["content"], _text(item.get("content"))) if text
                )
            else:
                made = {"name": item.get("name"), "arguments": item.get("arguments") or "{}"}
                call = {"id": item.get("call_id"), "type": "function", "function": made}
                turn.setdefault("tool_calls", []).append(call)
        else:
            if turn is not None:
                yield turn
                turn = None
            if kind == "function_call_output":
                output = _text(item.get("output"))
                yield {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
            elif role in ("user", "system", "developer"):
                yield {"role": role, "content": _text(item.get("content"))}
            else:
                raise invalid(f"an item of the input is {kind!r} with the role {role!r}", "input")
    if turn is not None:
        yield turn


def _tool(tool: dict[str, Any], strict: bool) -> dict[str, Any] | None:
    """A function; None for tools that OpenAI's servers would run."""
    kind = tool.get("type")
    if kind != "function":
        if strict:
            raise invalid(f"there is no tool {kind!r} here", "tools")
        ignore(f"tools.{kind}")
        return None
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {n: tool[n] for n in names if tool.get(n) is not None}}


def _choice(choice: Any, strict: bool) -> Any:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice.get("type") == "allowed_tools" and not strict:
        ignore("tool_choice.tools")
        return choice.get("mode")
    raise invalid(f"tool_choice has the type {choice.get('type')!r}", "tool_choice")


def _form(form: Any) -> dict[str, Any] | None:
    if form is None:
        return None
    if not isinstance(form, dict):
        raise invalid("text.format is no object", "text")
    if form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {name: v for name, v in form.items() if name != "type"}}


# -- answers


def _response(body: ResponsesRequest, model: str) -> dict[str, Any]:
    """The answer before it is made."""
    reasoning = body.reasoning or {}
    return {
        "id": f"resp_{secrets.token_hex(24)}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "store": bool(body.store),
        "temperature": body.temperature,
        "text": {"format": (body.text or {}).get("format") or {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_p": body.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
        "metadata": body.metadata or {},
    }


def _end(answer: Answer) -> dict[str, Any]:
    is_cut = answer.finish_reason == "length"
    return {
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "usage": {
            "input_tokens": answer.n_prompt,
            "input_tokens_details": {"cached_tokens": answer.n_cached},
            "output_tokens": answer.n_given,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.n_prompt + answer.n_given,
        },
        "timings": answer.timings,
    }


def _status(answer: Answer, block: Block) -> str:
    return "incomplete" if answer.is_cut(block) else "completed"


def _output(answer: Answer, response: str) -> list[dict[str, Any]]:
    return [_item(block, response, _status(answer, block)) for block in answer.blocks]


def _item(block: Block, response: str, status: str) -> dict[str, Any]:
    id = f"{response.removeprefix('resp_')}{block.index:04d}"
    if block.kind == "thought":
        said = [{"type": "reasoning_text", "text": block.text}] if status != "in_progress" else []
        return {"id": f"rs_{id}", "type": "reasoning", "summary": [], "content": said, "status": status}
    if block.kind == "text":
        content = [_part(block)] if status != "in_progress" else []
        return {
            "id": f"msg_{id}",
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }
    return {
        "id": f"fc_{id}",
        "type": "function_call",
        "call_id": block.id,
        "name": block.name,
        "arguments": block.text,
        "status": status,
    }


def _part(block: Block, text: str | None = None) -> dict[str, Any]:
    text = block.text if text is None else text
    if block.kind == "thought":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


async def _frames(stream: AsyncStream, begun: dict[str, Any], kept: Any) -> AsyncIterator[bytes]:
    answer, n = Answer(), 0

    def event(kind: str, **more: Any) -> bytes:
        nonlocal n
        n += 1
        return named_event({"type": kind, "sequence_number": n - 1, **more})

    names = {"thought": "response.reasoning_text", "text": "response.output_text"}
    names["call"] = "response.function_call_arguments"
    try:
        yield event("response.created", response=begun)
        yield event("response.in_progress", response=begun)
        async for what, block, text in streamed(stream, answer):
            output = {"output_index": block.index}
            at = {"item_id": _item(block, begun["id"], "in_progress")["id"], **output}
            inner = {} if block.kind == "call" else {"content_index": 0}
            extra: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
            if what == "open":
                item = _item(block, begun["id"], "in_progress")
                yield event("response.output_item.added", **output, item=item)
                if inner:
                    yield event("response.content_part.added", **at, **inner, part=_part(block, ""))
            elif what == "more":
                yield event(f"{names[block.kind]}.delta", **at, **inner, delta=text, **extra)
            else:
                whole = {"arguments": block.text, "name": block.name} if not inner else {"text": block.text}
                yield event(f"{names[block.kind]}.done", **at, **inner, **whole, **extra)
                if inner:
                    yield event("response.content_part.done", **at, **inner, part=_part(block))
                item = _item(block, begun["id"], _status(answer, block))
                yield event("response.output_item.done", **output, item=item)
        response = begun | _end(answer) | {"output": _output(answer, begun["id"])}
        await kept(response)
        yield event(f"response.{response['status']}", response=response)
    except Exception as error:
        problem = problem_of(error)
        said = {"code": problem.code or "server_error", "message": problem.message}
        yield event("error", **said, param=problem.param)
        yield event("response.failed", response=begun | {"status": "failed", "error": said})
