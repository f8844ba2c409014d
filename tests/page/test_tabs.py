"""Two tabs of the page on one conversation: neither loses what the other has written."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.page.driving import answered, ask, saved, turns
from tests.page.fake_server import FakeServer, Reply

MERGE = """async ([ours, theirs, keep]) => {
    const { merge } = await import("./conversation.js");
    merge(ours, theirs, keep);
    return { ...ours, texts: Object.fromEntries(Object.values(ours.nodes).map(n => [n.id, n.text])) };
}"""


def conversation(nodes: dict[str, tuple[str, int]], head: str, stamps: dict[str, int]) -> dict[str, Any]:
    made = {
        id: {"id": id, "parent": None, "role": "user", "text": text, "version": version, "time": 0}
        for id, (text, version) in nodes.items()
    }
    return {"id": "c", "title": head, "updated": 1, "head": head, "nodes": made, "stamps": stamps}


def test_what_is_merged(page: Any) -> None:
    ours = conversation({"a": ("old", 1), "b": ("new", 3), "mine": ("m", 1)}, "mine", {"head": 5, "title": 9})
    theirs = conversation(
        {"a": ("newer", 2), "b": ("older", 2), "yours": ("y", 1)}, "yours", {"head": 7, "title": 8}
    )
    both = page.evaluate(MERGE, [ours, theirs, False])
    assert both["texts"] == {"a": "newer", "b": "new", "mine": "m", "yours": "y"}
    assert both["head"] == "yours" and both["title"] == "mine"
    assert page.evaluate(MERGE, [ours, theirs, True])["head"] == "mine"


@pytest.fixture
def other(page: Any, context: Any, server: FakeServer) -> Iterator[Any]:
    """A second tab, on the conversation that the first has begun."""
    ask(page, "begun")
    answered(page)
    saved(page, "You said: begun")
    tab = context.new_page()
    wrong: list[str] = []
    tab.on("pageerror", lambda error: wrong.append(str(error)))
    tab.goto(page.url)
    tab.wait_for_selector("text=You said: begun")
    yield tab
    assert not wrong


def test_both_tabs_write(page: Any, other: Any, server: FakeServer) -> None:
    ask(page, "of the first")
    answered(page, 2)
    other.wait_for_selector("text=You said: of the first")
    ask(other, "of the second")
    answered(other, 3)
    page.wait_for_selector("text=You said: of the second")
    wanted = ["begun", "of the first", "of the second"]
    for tab in (page, other):
        assert turns(tab)[::2] == wanted
    assert [m["content"] for m in server.requests[-1]["messages"]][::2] == wanted
    page.reload()
    page.wait_for_selector("text=You said: of the second")
    assert turns(page)[::2] == wanted


def test_a_tab_that_heard_nothing_loses_nothing(page: Any, other: Any, server: FakeServer) -> None:
    """As if the message between the tabs had not come yet: what is in the database counts."""
    other.evaluate(
        """async () => {
            const store = await import("./store.js");
            const [conversation] = await store.allConversations();
            const { add } = await import("./conversation.js");
            add(conversation, null, "user", "said behind the back");
            // Written without a word to anybody.
            const open = indexedDB.open("powerinfer", 1);
            await new Promise(done => { open.onsuccess = done; });
            const table = open.result.transaction("conversations", "readwrite").objectStore("conversations");
            await new Promise(done => { table.put(conversation).onsuccess = done; });
        }"""
    )
    page.locator(".conversation").hover()
    page.get_by_role("button", name="Rename begun").click()
    page.keyboard.type("renamed")
    page.keyboard.press("Enter")
    saved(page, "renamed")
    saved(page, "said behind the back")
    ask(page, "and more")
    page.wait_for_selector("text=You said: said behind the back")
    saved(page, "You said: said behind the back\\n\\nand more")


def test_one_tab_answers_at_a_time(page: Any, other: Any, server: FakeServer) -> None:
    hold = threading.Event()
    server.replies.append(Reply(["slowly ", "written"], hold=hold))
    ask(page, "long one")
    other.wait_for_selector("text=slowly")
    assert other.locator("#stop").is_visible() and not other.locator("#send").is_visible()
    assert "Stopped" not in other.locator("#messages").inner_text()
    ask(other, "not now")
    assert other.input_value("#input") == "not now"  # it is not sent, and not lost
    hold.set()
    answered(page, 2)
    other.wait_for_selector("text=slowly written")
    other.wait_for_selector("#send:visible")
    other.press("#input", "Enter")
    answered(other, 3)
    page.wait_for_selector("text=You said: not now")
    assert turns(page) == turns(other)


def test_a_message_in_the_same_moment_is_put_back(page: Any, other: Any, server: FakeServer) -> None:
    """The other tab has the right to answer, and nothing has been heard of it yet."""
    other.evaluate(
        """async () => {
            const store = await import("./store.js");
            window.give = await store.takeTurn(location.hash.slice(1));
        }"""
    )
    ask(page, "too early")
    page.wait_for_selector("text=Another tab is answering")
    assert page.input_value("#input") == "too early"
    assert turns(page) == ["begun", "You said: begun"]
    other.evaluate("window.give()")
    page.press("#input", "Enter")
    assert answered(page, 2) == "You said: too early"


def test_the_other_tab_can_stop_an_answer(page: Any, other: Any, server: FakeServer) -> None:
    server.replies.append(Reply(["never ", "ends"], hold=threading.Event()))
    ask(page, "go")
    other.wait_for_selector("text=never")
    other.click("#stop")
    page.wait_for_selector("text=Stopped.")
    other.wait_for_selector("text=Stopped.")
    assert server.gone.wait(10)


def test_a_tab_that_is_closed_leaves_a_stopped_answer(page: Any, other: Any, server: FakeServer) -> None:
    server.replies.append(Reply(["half of it ", "rest"], hold=threading.Event()))
    ask(page, "go")
    other.wait_for_selector("text=half of it")
    assert other.locator(".running").count() == 1
    page.close()
    other.wait_for_selector("text=Stopped.")
    ask(other, "go on then")
    assert answered(other, 3) == "You said: go on then"


def test_what_one_tab_deletes_stays_deleted(page: Any, other: Any, server: FakeServer) -> None:
    server.replies.append(Reply(["still ", "coming"], hold=threading.Event()))
    ask(page, "go")
    page.wait_for_selector("text=still")
    other.locator(".conversation").hover()
    other.get_by_role("button", name="Delete begun").click()
    page.wait_for_selector(".conversation", state="detached")
    assert server.gone.wait(10)
    other.wait_for_timeout(700)
    assert page.evaluate("import('./store.js').then(store => store.allConversations())") == []
