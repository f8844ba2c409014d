"""An answer as those protocols see it that tell its parts apart: thoughts, texts and calls in a row."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Literal

from ..async_llama import AsyncStream

Event = Literal["open", "more", "close"]


@dataclass
class Block:
    kind: Literal["thought", "text", "call"]
    index: int
    text: str = ""
    """Of a call, its arguments as JSON."""
    id: str = ""
    name: str = ""


@dataclass
class Answer:
    """What is known when it is over."""

    blocks: list[Block] = field(default_factory=list)
    finish_reason: str = "stop"
    stop_reason: str | int | None = None
    """The request's own stop that ended it."""
    timings: dict[str, Any] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def n_prompt(self) -> int:
        return int(self.usage["prompt_tokens"])

    @property
    def n_cached(self) -> int:
        return int(self.usage["prompt_tokens_details"]["cached_tokens"])

    @property
    def n_given(self) -> int:
        return int(self.usage["completion_tokens"])

    def is_cut(self, block: Block) -> bool:
        """Whether the end of the answer came before the end of this block, which is over."""
        if self.finish_reason != "length" or block is not self.blocks[-1]:
            return False
        if block.kind != "call":
            return True
        try:
            json.loads(block.text)
        except ValueError:
            return True
        return False

    def without_cut_call(self) -> list[Block]:
        """The blocks, for protocols that have no half calls."""
        return [block for block in self.blocks if block.kind != "call" or not self.is_cut(block)]

    def text(self, kind: str) -> str:
        """All that is of this kind."""
        return "".join(block.text for block in self.blocks if block.kind == kind)


def answer_of(result: dict[str, Any]) -> Answer:
    """Of a whole chat completion."""
    (choice,) = result["choices"]
    message = choice["message"]
    answer = Answer(
        finish_reason=choice["finish_reason"],
        stop_reason=choice.get("stop_reason"),
        timings=result["timings"],
        usage=result["usage"],
    )
    if message.get("reasoning_content"):
        answer.blocks.append(Block("thought", 0, message["reasoning_content"]))
    if message.get("content"):
        answer.blocks.append(Block("text", len(answer.blocks), message["content"]))
    for call in message.get("tool_calls") or ():
        made = call["function"]
        block = Block("call", len(answer.blocks), made["arguments"], call["id"], made["name"])
        answer.blocks.append(block)
    return answer


async def streamed(stream: AsyncStream, answer: Answer) -> AsyncIterator[tuple[Event, Block, str]]:
    """The beginnings, pieces of text and ends of an answer's blocks, and the rest into `answer`. Spaces alone
    are no text."""
    last: Block | None = None
    spaces = ""
    async for chunk in stream:
        (choice,) = chunk["choices"]
        for kind, id, name, text in _parts(choice["delta"]):
            if kind == "text" and (last is None or last.kind != "text"):
                text = spaces + text
                if not text.strip():
                    spaces = text
                    continue
            if last is None or last.kind != kind or id:
                if last is not None:
                    yield "close", last, ""
                last = Block(kind, len(answer.blocks), "", id, name)
                answer.blocks.append(last)
                yield "open", last, ""
            spaces = ""
            if text:
                last.text += text
                yield "more", last, text
        if choice["finish_reason"] is not None:
            answer.finish_reason = choice["finish_reason"]
            answer.stop_reason = choice.get("stop_reason")
            answer.timings = chunk["timings"]
    if last is not None:
        yield "close", last, ""
    answer.usage = stream.usage


def _parts(delta: dict[str, Any]) -> list[tuple[Any, str, str, str]]:
    """(kind, id, name, text) of what a chunk adds; an id begins a call."""
    parts: list[tuple[Any, str, str, str]] = []
    if delta.get("reasoning_content"):
        parts.append(("thought", "", "", delta["reasoning_content"]))
    if delta.get("content"):
        parts.append(("text", "", "", delta["content"]))
    for call in delta.get("tool_calls") or ():
        made = call["function"]
        parts.append(("call", call.get("id", ""), made.get("name", ""), made.get("arguments", "")))
    return parts
