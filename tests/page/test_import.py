"""Conversations of other programs, and files that mean harm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.page.driving import answered, ask, turns
from tests.page.fake_server import FakeServer


def bring(page: Any, tmp_path: Path, data: object) -> str:
    """Imports this; what the page says."""
    file = tmp_path / "conversations.json"
    file.write_text(data if isinstance(data, str) else json.dumps(data))
    page.evaluate("() => document.querySelector('#toasts').replaceChildren()")
    page.set_input_files("#import-file", file)
    page.wait_for_selector(".toast")
    text: str = page.locator(".toast").inner_text()
    return text


def said(role: str, *parts: object, kind: str = "text", **more: object) -> dict[str, Any]:
    return {"author": {"role": role}, "content": {"content_type": kind, "parts": [*parts]}, **more}


def chatgpt(**more: object) -> dict[str, Any]:
    hidden = {"metadata": {"is_visually_hidden_from_conversation": True}}
    tree: dict[str, Any] = {
        "root": (None, None),
        "sys": ("root", said("system", "")),
        "q": ("sys", said("user", "What is it?", create_time=1.5e9)),
        "hidden": ("q", said("user", "profile", **hidden)),
        "thought": ("hidden", said("assistant", kind="thoughts")),
        "call": ("thought", said("assistant", "search()", recipient="browser")),
        "tool": ("call", said("tool", "found")),
        "a1": ("q", said("assistant", "The **first** one.")),
        "a2": ("tool", said("assistant", "The second one.")),
        "q2": ("a2", said("user", {"asset_pointer": "file-1"}, "And this?", kind="multimodal_text")),
        "a3": ("q2", said("assistant", "A picture.")),
    }
    mapping = {
        name: {"id": name, "message": m, "parent": up, "children": []} for name, (up, m) in tree.items()
    }
    return {"title": "Of ChatGPT", "create_time": 1.5e9, "update_time": 1.6e9, "mapping": mapping,
            "current_node": "a3"} | more  # fmt: skip


def test_chatgpt(page: Any, server: FakeServer, tmp_path: Path) -> None:
    empty = {
        "title": "nothing",
        "mapping": {"root": {"message": None, "parent": None}},
        "current_node": "root",
    }
    assert bring(page, tmp_path, [chatgpt(), empty]) == "Imported 1 conversation."
    page.get_by_role("button", name="Of ChatGPT", exact=True).click()
    picture = "[a file that is not in the export]\n\nAnd this?"
    assert turns(page) == ["What is it?", "The second one.", picture, "A picture."]
    page.get_by_role("button", name="Earlier answer").click()
    assert turns(page) == ["What is it?", "The first one."]
    assert page.locator(".conversations h2").inner_text() == "September 2020"
    ask(page, "on")
    answered(page, 2)
    assert [m["role"] for m in server.requests[0]["messages"]] == ["user", "assistant", "user"]


def webui() -> dict[str, Any]:
    thought = (
        '<details type="reasoning" done="true" duration="3">\n<summary>Thought for 3 seconds</summary>\n'
        "&gt; let me see\n</details>\n"
    )
    messages = {
        "1": {"id": "1", "parentId": None, "role": "user", "content": "Two plus two?", "timestamp": 1.7e9},
        "2": {"id": "2", "parentId": "1", "role": "assistant", "content": thought + "Four.", "model": "m"},
        "3": {"id": "3", "parentId": "1", "role": "assistant", "content": "Five."},
    }
    chat = {"title": "Of WebUI", "system": "Be right.", "history": {"messages": messages, "currentId": "2"}}
    return {"id": "x", "title": "Of WebUI", "chat": chat, "created_at": 17e8, "updated_at": 17e8}


def test_open_webui(page: Any, server: FakeServer, tmp_path: Path) -> None:
    lines = [{"role": "user", "content": "only a list"}, {"role": "assistant", "content": "well"}]
    older = {"title": "Older", "chat": {"messages": lines}}
    assert bring(page, tmp_path, [webui(), older]) == "Imported 2 conversations."
    page.get_by_role("button", name="Older", exact=True).click()
    assert turns(page) == ["only a list", "well"]
    page.get_by_role("button", name="Of WebUI", exact=True).click()
    assert turns(page) == ["Two plus two?", "Four."]
    assert page.locator("details.thoughts").text_content() == "Thoughtslet me see"
    assert page.locator(".versions span").inner_text() == "1 / 2"
    ask(page, "sure?")
    answered(page, 2)
    assert server.requests[0]["messages"][0] == {"role": "system", "content": "Be right."}


def test_what_is_wrong_is_left_out_and_told(page: Any, tmp_path: Path) -> None:
    loop = chatgpt(title="loop")
    loop["mapping"]["root"]["parent"] = "tool"
    loop["mapping"]["q"]["parent"] = "a2"
    text = bring(page, tmp_path, [chatgpt(), loop, None, {"chat": {"history": {"messages": 7}}}])
    assert text.startswith("Imported 1 conversation. 3 could not be read: a turn follows itself.")
    assert page.locator(".conversation").count() == 1


def test_hostile_files(page: Any, tmp_path: Path) -> None:
    endless = {f"n{k}": {"message": None, "parent": f"n{(k + 1) % 5000}"} for k in range(5000)}
    asked = {"message": said("user", "x"), "parent": "n0"}
    bad: list[object] = [
        [{"mapping": {}, "current_node": {}}, 3],
        [{"mapping": endless | {"q": asked}, "current_node": "q"}],
        [{"mapping": {"a": {"message": said("user", "x" * 4_000_001), "parent": None}}}],
        [{"mapping": {f"n{k}": {"message": said("user", "x"), "parent": None} for k in range(5001)}}],
        [{"chat": {"messages": "many"}}],
        "[" * 200_000,
        '{"chat": {"history": {"messages": {"__proto__": {"role": "user", "parentId": "__proto__"}}}}}}',
    ]
    for data in bad:
        assert "was not imported" in bring(page, tmp_path, data), str(data)[:80]
    # Names that mean something to the language are names; odd values are left out.
    proto = """[{"title": {"a": 1}, "create_time": 1e99, "current_node": "constructor", "mapping": {
        "__proto__": {"message": {"author": {"role": "user"},
            "content": {"content_type": "text", "parts": ["up"]}}},
        "constructor": {"parent": "__proto__", "message": {"author": {"role": "assistant"},
            "content": {"content_type": "text", "parts": ["<img src=x onerror=alert(1)>"]}}}}}]"""
    assert bring(page, tmp_path, proto) == "Imported 1 conversation."
    page.locator(".conversation-open").click()
    assert turns(page) == ["up", "<img src=x onerror=alert(1)>"]
    assert page.locator("#messages img").count() == 0
    assert page.evaluate("({}).message") is None


def test_what_is_exported_comes_back(page: Any, server: FakeServer, tmp_path: Path) -> None:
    """Files, summaries and the chat's own system prompt, too."""
    node = {"role": "user", "time": 5, "text": "one"}
    nodes = {
        "a": {**node, "parent": None, "files": [{"name": "n.txt", "text": "inside", "more": 1}]},
        "b": {**node, "parent": "a", "role": "assistant", "model": "m", "evil": 1, "thought": "t"},
        "c": {**node, "parent": "b", "context": {"from": "c", "summary": "all of it"}},
    }
    data = {
        "format": "powerinfer-conversations-1",
        "conversations": [{"system": "s", "nodes": nodes, "head": "c"}],
    }
    bring(page, tmp_path, data)
    [stored] = page.evaluate("import('./store.js').then(store => store.allConversations())")
    a, b, c = stored["nodes"].values()
    assert stored["system"] == "s" and a["files"] == [{"name": "n.txt", "text": "inside"}]
    assert b["model"] == "m" and b["thought"] == "t" and "evil" not in b and b["finish"] == "stop"
    assert c["context"] == {"from": c["id"], "summary": "all of it"}
