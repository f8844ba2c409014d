"""OpenAI's Responses: requests after its documentation, its own client, a tool loop as Codex's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from powerinfer.server import responses
from tests.server.conftest import TOOL, Actor, error_of, named_events

pytest.importorskip("fastapi", reason="the extra powerinfer[server] is not installed")
httpx = pytest.importorskip("httpx")

CALL = '<tool_call>\n{"name": "shell", "arguments": {"city": "ls"}}\n</tool_call>'
SHELL = {"type": "function", "name": "shell", "description": "Runs", "strict": False, "parameters": TOOL}


@pytest.fixture
def http(stage: str) -> Iterator[Any]:
    headers = {"Authorization": "Bearer secret"}
    with httpx.Client(base_url=stage, timeout=120, headers=headers) as client:
        yield client


def post(http: Any, status: int = 200, **body: Any) -> Any:
    response = http.post("/v1/responses", json={"model": "gpt-5", "input": "Hi"} | body)
    assert response.status_code == status, response.text
    return response.json()


def said(response: dict[str, Any]) -> str:
    texts = [
        part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"]
    ]
    return "".join(texts)


def test_text(http: Any, playing: Actor) -> None:
    playing.says = "Hello there"
    whole = post(http, instructions="Be kind", metadata={"a": "b"})
    assert whole["object"] == "response" and whole["status"] == "completed" and said(whole) == "Hello there"
    assert "<|im_start|>system\nBe kind<|im_end|>\n<|im_start|>user\nHi<|im_end|>" in playing.asked
    usage = whole["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"] > 4
    assert whole["metadata"] == {"a": "b"} and whole["store"] is False
    short = post(http, max_output_tokens=2)
    assert short["status"] == "incomplete" and short["incomplete_details"] == {"reason": "max_output_tokens"}
    parts = [{"role": "developer", "content": "A"}, {"role": "system", "content": "B"}]
    parts.append({"role": "user", "content": [{"type": "input_text", "text": "C"}]})  # type: ignore[dict-item]
    post(http, input=parts)
    assert "<|im_start|>system\nA\n\nB<|im_end|>\n<|im_start|>user\nC<|im_end|>" in playing.asked


def test_a_stream_is_the_same(http: Any, playing: Actor) -> None:
    playing.says = f"<think>Let me look</think>\n\nI look. {CALL}"
    whole = post(http, tools=[SHELL])
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call"]
    asked = {"input": "Hi", "tools": [SHELL], "stream": True}
    events = named_events(http.post("/v1/responses", json=asked).text)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    last = events[-1]["response"]
    assert last["id"] == events[0]["response"]["id"] and last["usage"]["output_tokens"] > 10
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    begun = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert done == last["output"] and [item["id"] for item in begun] == [item["id"] for item in done]
    for name, wanted in (
        ("reasoning_text", "Let me look"),
        ("output_text", "I look. "),
        ("function_call_arguments", '{"city": "ls"}'),
    ):
        deltas = [event for event in events if event["type"] == f"response.{name}.delta"]
        assert "".join(event["delta"] for event in deltas) == wanted and len(deltas) > 1
        (end,) = [event for event in events if event["type"] == f"response.{name}.done"]
        assert end.get("text", end.get("arguments")) == wanted
    for ours, theirs in zip(last["output"], whole["output"], strict=True):
        same = ("type", "status", "name", "arguments")
        assert [ours.get(name) for name in same] == [theirs.get(name) for name in same]


def test_what_is_cut_off_is_incomplete(http: Any, playing: Actor) -> None:
    """A client would run half a call that is said to be whole."""
    playing.says = "I look. " * 8
    assert [item["status"] for item in post(http, max_output_tokens=4)["output"]] == ["incomplete"]
    playing.says = "I look. " + CALL[: CALL.index("ls")]
    body = {"input": "Hi", "tools": [SHELL], "stream": True, "max_output_tokens": playing.n_said()}
    events = named_events(http.post("/v1/responses", json=body).text)
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert events[-1]["type"] == "response.incomplete" and events[-1]["response"]["output"] == done
    assert [(item["type"], item["status"]) for item in done] == [
        ("message", "completed"),
        ("function_call", "incomplete"),
    ]
    assert done[1]["arguments"].startswith('{"city": "')
    items = post(http, **body | {"stream": False})["output"]
    same = ("type", "status", "name", "arguments")
    assert [[item.get(name) for name in same] for item in items] == [
        [item.get(name) for name in same] for item in done
    ]


def test_a_tool_loop(http: Any, playing: Actor) -> None:
    """Codex keeps the conversation itself, streams, and sends back what it got."""
    playing.says = f"<think>Hm</think>I look. {CALL}"
    tools = [SHELL, {"type": "web_search"}]
    body: dict[str, Any] = {
        "model": "gpt-5-codex",
        "instructions": "You are Codex",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Rules"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "List"}]},
        ],
        "tools": tools,
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "text": {"verbosity": "medium"},
    }
    response = http.post("/v1/responses", json=body)
    assert response.headers["x-ignored-fields"] == "tools.web_search"
    output = named_events(response.text)[-1]["response"]["output"]
    call = output[-1]
    body["input"] += output
    body["input"].append({"type": "function_call_output", "call_id": call["call_id"], "output": "a.txt"})
    playing.says = "There is a.txt"
    last = named_events(http.post("/v1/responses", json=body).text)[-1]["response"]
    assert said(last) == "There is a.txt" and last["usage"]["input_tokens_details"]["cached_tokens"] > 0
    asked = playing.asked
    assert "<|im_start|>system\nYou are Codex\n\nRules<|im_end|>" in asked
    assert 'I look. <tool_call>{"name": "shell", "arguments": {"city": "ls"}}</tool_call><|im_end|>' in asked
    assert "<|im_start|>tool\na.txt<|im_end|>" in asked


def test_what_is_stored(http: Any, playing: Actor, monkeypatch: pytest.MonkeyPatch) -> None:
    playing.says = "One"
    first = post(http, input="Say one", store=True)
    assert first["store"] is True and http.get(f"/v1/responses/{first['id']}").json() == first
    playing.says = "Two"
    second = post(http, input="Say two", previous_response_id=first["id"], store=True)
    assert said(second) == "Two" and second["previous_response_id"] == first["id"]
    turns = ["user\nSay one", "assistant\nOne", "user\nSay two"]
    assert "".join(f"<|im_start|>{turn}<|im_end|>\n" for turn in turns) in playing.asked
    assert http.delete(f"/v1/responses/{first['id']}").json()["deleted"] is True
    for response in (
        http.get(f"/v1/responses/{first['id']}"),
        http.delete(f"/v1/responses/{first['id']}"),
        http.get(f"/v1/responses/{post(http)['id']}"),
        http.post("/v1/responses", json={"input": "a", "previous_response_id": "resp_x"}),
    ):
        assert response.status_code == 404 and error_of(response)["code"] == "not_found"
    monkeypatch.setattr(responses, "MAX_STORED_BYTES", 3000)
    for _ in range(3):
        third = post(http, store=True)
    assert http.get(f"/v1/responses/{second['id']}").status_code == 404
    assert http.get(f"/v1/responses/{third['id']}").status_code == 200


def test_storing_stops_nobody(http: Any, playing: Actor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversation may have megabytes: it goes through JSON beside the event loop."""
    encode, threads = responses.encode, []

    def watched(value: Any) -> bytes:
        threads.append(threading.current_thread().name)
        return encode(value)

    monkeypatch.setattr(responses, "encode", watched)
    playing.says = "One"
    post(http, store=True)
    http.post("/v1/responses", json={"input": "Hi", "store": True, "stream": True})
    assert threads and all(name.startswith("powerinfer-aside") for name in threads)


def test_forms_and_choices(http: Any, playing: Actor) -> None:
    pytest.importorskip("llguidance", reason="the extra powerinfer[grammar] is not installed")
    playing.says = '"yes"'
    form = {"type": "json_schema", "name": "x", "schema": {"enum": ["yes"]}, "strict": True}
    assert said(post(http, text={"format": form})) == '"yes"'
    playing.says = CALL
    for choice in ("required", {"type": "function", "name": "shell"}):
        whole = post(http, tools=[SHELL], tool_choice=choice)
        assert [item["type"] for item in whole["output"]] == ["function_call"]


def test_errors(http: Any) -> None:
    for body, status, word in (
        ({"input": 5}, 422, "input"),
        ({"input": []}, 400, "message"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, 400, "item_reference"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, 400, "input_image"),
        ({"tool_choice": {"type": "mcp"}}, 400, "mcp"),
        ({"text": {"format": {"type": "xml"}}}, 400, "xml"),
        ({"text": {"format": "json"}}, 400, "format"),
        (
            {"input": [{"type": "reasoning", "content": 5}, {"role": "user", "content": "a"}]},
            400,
            "reasoning",
        ),
    ):
        response = http.post("/v1/responses", json={"input": "Hi"} | body)
        assert response.status_code in (status, 422) and word in error_of(response)["message"], response.text


def test_openais_client(stage: str, playing: Actor) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{stage}/v1", api_key="secret", max_retries=0)
    if not hasattr(client, "responses"):
        pytest.skip("this client has no Responses")
    playing.says = f"<think>Hm</think>Yes. {CALL}"
    whole = client.responses.create(model="x", input="Hi", tools=[SHELL])
    assert whole.output_text.strip() == "Yes." and whole.output[2].arguments == '{"city": "ls"}'
    with client.responses.stream(model="x", input="Hi", tools=[SHELL]) as stream:
        kinds = [event.type for event in stream]
        last = stream.get_final_response()
    assert "response.function_call_arguments.delta" in kinds
    assert last.output_text.strip() == "Yes." and last.output[2].name == "shell"
    kept = client.responses.create(model="x", input="Hi", store=True)
    assert client.responses.retrieve(kept.id).output_text == kept.output_text
