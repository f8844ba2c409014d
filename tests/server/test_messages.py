"""Anthropic's Messages: requests after its documentation, its own client, a tool loop as Claude Code's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.conftest import TOOL, Actor, named_events

pytest.importorskip("fastapi", reason="the extra powerinfer[server] is not installed")
httpx = pytest.importorskip("httpx")

BODY: dict[str, Any] = {"model": "claude", "max_tokens": 400, "messages": [{"role": "user", "content": "Hi"}]}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
WEATHER = {"name": "weather", "description": "Of a city", "input_schema": TOOL}


@pytest.fixture
def http(stage: str) -> Iterator[Any]:
    with httpx.Client(base_url=stage, timeout=120, headers={"x-api-key": "secret"}) as client:
        yield client


def post(http: Any, status: int = 200, **more: Any) -> Any:
    response = http.post("/v1/messages", json=BODY | more)
    assert response.status_code == status, response.text
    return response.json()


def assembled(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a stream's events make, with the arguments of calls as text."""
    assert events[0]["type"] == "message_start" and events[-1]["type"] == "message_stop"
    message: dict[str, Any] = events[0]["message"]
    content: list[Any] = message["content"]
    for event in events[1:-1]:
        if event["type"] == "content_block_start":
            assert event["index"] == len(content)
            content.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            delta, block = event["delta"], content[event["index"]]
            kind = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}
            name = kind[delta["type"]]
            block[name] = block.get(name, "") + delta[name]
        elif event["type"] == "message_delta":
            message |= event["delta"]
            message["usage"] |= event["usage"]
    return message


def test_half_a_call_is_none(http: Any, playing: Actor) -> None:
    playing.says = "I look. " + CALL[: CALL.index("ln")]
    whole = post(http, tools=[WEATHER], max_tokens=playing.n_said())
    assert whole["content"] == [{"type": "text", "text": "I look."}] and whole["stop_reason"] == "max_tokens"


def test_documents_of_text(http: Any, playing: Actor) -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "It was a dark night."}
    content = [{"type": "document", "source": source, "title": "A tale"}, {"type": "text", "text": "Go on"}]
    post(http, messages=[{"role": "user", "content": content}])
    assert "<|im_start|>user\nA tale\nIt was a dark night.\nGo on<|im_end|>" in playing.asked
    for other in ({"type": "base64", "media_type": "application/pdf", "data": "aa"}, {"type": "text"}, None):
        content = [{"type": "document", "source": other}]
        error = post(http, 400, messages=[{"role": "user", "content": content}])["error"]
        assert "'document' cannot be read" in error["message"]


def test_text(http: Any, playing: Actor) -> None:
    playing.says = "Hello there"
    whole = post(http, system="Be kind")
    assert whole["content"] == [{"type": "text", "text": "Hello there"}]
    assert (whole["type"], whole["role"], whole["stop_reason"]) == ("message", "assistant", "end_turn")
    usage = whole["usage"]
    assert usage["output_tokens"] > 0 and usage["input_tokens"] + usage["cache_read_input_tokens"] > 4
    assert "<|im_start|>system\nBe kind<|im_end|>\n<|im_start|>user\nHi<|im_end|>" in playing.asked
    short = post(http, max_tokens=2)
    assert short["stop_reason"] == "max_tokens" and short["usage"]["output_tokens"] == 2
    stopped = post(http, stop_sequences=["the"])
    assert stopped["stop_reason"] == "stop_sequence" and stopped["stop_sequence"] == "the"
    assert stopped["content"] == [{"type": "text", "text": "Hello "}]


def test_a_stream_is_the_same(http: Any, playing: Actor) -> None:
    playing.says = f"<think>Let me look</think>\n\nI look. {CALL}\n{CALL}"
    asked = BODY | {"tools": [WEATHER], "thinking": {"type": "enabled", "budget_tokens": 1024}}
    whole = http.post("/v1/messages", json=asked).json()
    assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert whole["content"][2]["input"] == {"city": "Köln"} and whole["stop_reason"] == "tool_use"
    response = http.post("/v1/messages", json=asked | {"stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    events = named_events(response.text)
    message = assembled(events)
    assert message["content"][0]["thinking"] == whole["content"][0]["thinking"] == "Let me look"
    assert message["content"][1]["text"].strip() == whole["content"][1]["text"] == "I look."
    assert message["content"][2]["partial_json"] == '{"city": "Köln"}' and len(message["content"]) == 4
    assert message["content"][2]["input"] == {}
    deltas = [event for event in events if event.get("delta", {}).get("type") == "input_json_delta"]
    assert len(deltas) > 4
    for name in ("stop_reason", "stop_sequence"):
        assert message[name] == whole[name]
    assert message["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def test_a_tool_loop(http: Any, playing: Actor) -> None:
    """Claude Code sends its own tools' results, a system of several texts, and marks for caches."""
    playing.says = f"I look.\n{CALL}"
    system = [{"type": "text", "text": "You are", "cache_control": {"type": "ephemeral"}}]
    system.append({"type": "text", "text": "an agent"})
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "Weather in Köln?"}]}]
    tools = [WEATHER, {"type": "web_search_20250305", "name": "web_search"}]
    more = {"system": system, "tools": tools, "metadata": {"user_id": "u"}, "betas": ["x"]}
    response = http.post("/v1/messages?beta=true", json=BODY | more | {"messages": messages})
    assert response.headers["x-ignored-fields"] == "betas, tools.web_search_20250305"
    first = response.json()
    (call,) = [block for block in first["content"] if block["type"] == "tool_use"]
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "Rain"}]}
    messages.append({"role": "assistant", "content": first["content"]})
    messages.append({"role": "user", "content": [result, {"type": "text", "text": "Go on"}]})
    playing.says = "It rains."
    last = post(http, **more | {"messages": messages})
    assert last["content"] == [{"type": "text", "text": "It rains."}] and last["stop_reason"] == "end_turn"
    asked = playing.asked
    assert "<|im_start|>system\nYou are\nan agent<|im_end|>" in asked and "web_search" not in asked
    assert '<tool_call>{"name": "weather", "arguments": {"city": "K' in asked
    assert "<|im_start|>tool\nRain<|im_end|>\n<|im_start|>user\nGo on<|im_end|>" in asked
    assert last["usage"]["cache_read_input_tokens"] > 0


def test_the_answer_can_be_begun(http: Any, playing: Actor) -> None:
    playing.says = "orld"
    begun = [*BODY["messages"], {"role": "assistant", "content": "Hello w"}]
    assert post(http, messages=begun)["content"] == [{"type": "text", "text": "orld"}]
    assert playing.asked.endswith("<|im_start|>assistant\nHello w")


def test_choices_of_tools(http: Any, playing: Actor) -> None:
    pytest.importorskip("llguidance", reason="the extra powerinfer[grammar] is not installed")
    playing.says = CALL
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        message = post(http, tools=[WEATHER], tool_choice=choice | {"disable_parallel_tool_use": True})
        assert [block["type"] for block in message["content"]] == ["tool_use"]
    playing.says = "No"
    assert post(http, tools=[WEATHER], tool_choice={"type": "none"})["stop_reason"] == "end_turn"
    assert "weather" not in playing.asked
    form = {"type": "json_schema", "schema": {"enum": ["No"]}}
    playing.says = '"No"'
    assert post(http, output_config={"format": form})["content"][0]["text"] == '"No"'


def test_tokens_are_counted(http: Any, playing: Actor) -> None:
    playing.says = "x"
    asked = {"messages": BODY["messages"], "system": "Be kind", "tools": [WEATHER]}
    n = http.post("/v1/messages/count_tokens", json=asked | {"model": "claude"}).json()
    usage = post(http, **asked)["usage"]
    assert n == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


def test_errors(http: Any, stage: str) -> None:
    image = [{"type": "image", "source": {}}]
    for more, word in (
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "queen", "content": "a"}]}, "role"),
        ({"messages": [{"role": "user", "content": image}]}, "image"),
        ({"tool_choice": {"type": "some"}}, "tool_choice"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "a b"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "schema"),
    ):
        body = post(http, 400, **more)
        assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
        assert word in body["error"]["message"]
    response = httpx.post(f"{stage}/v1/messages", json=BODY, headers={"x-api-key": "wrong"})
    assert response.status_code == 401 and response.json()["error"]["type"] == "authentication_error"
    assert httpx.get(f"{stage}/v1/messages").json()["type"] == "error"
    long = post(http, 400, messages=[{"role": "user", "content": "word " * 5000}])
    assert "n_ctx" in long["error"]["message"]


def test_anthropics_client(stage: str, playing: Actor) -> None:
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=stage, api_key="secret", max_retries=0)
    playing.says = f"<think>Hm</think>Yes. {CALL}"
    whole = client.messages.create(**BODY, tools=[WEATHER])
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use"]
    with client.messages.stream(**BODY, tools=[WEATHER]) as stream:
        text = "".join(stream.text_stream)
        last = stream.get_final_message()
    assert text.strip() == "Yes." and last.content[2].input == {"city": "Köln"}
    assert last.stop_reason == "tool_use" and last.usage.output_tokens == whole.usage.output_tokens
    assert client.messages.count_tokens(model="x", messages=BODY["messages"]).input_tokens > 3
    with pytest.raises(anthropic.BadRequestError, match="'image'"):
        client.messages.create(**BODY | {"messages": [{"role": "user", "content": [{"type": "image"}]}]})
