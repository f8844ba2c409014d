"""Asking, streaming, stopping, editing, retrying; conversations that last; errors in words."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

from tests.page.driving import answered, ask, saved, turns
from tests.page.fake_server import FakeServer, Reply


def test_an_answer_streams(page: Any, server: FakeServer) -> None:
    hold = threading.Event()
    server.replies.append(Reply(["Hello ", "**there**", ", friend."], hold=hold))
    ask(page, "Hi")
    page.wait_for_selector(".turn.assistant strong")  # the middle is shown before the end has come
    assert turns(page)[0] == "Hi"
    assert "friend" not in turns(page)[1]
    assert page.locator("#stop").is_visible() and not page.locator("#send").is_visible()
    hold.set()
    assert answered(page) == "Hello there, friend."
    assert page.locator(".stats").inner_text().startswith("3 tokens")
    request = server.requests[0]
    assert request["messages"] == [{"role": "user", "content": "Hi"}]
    assert request["stream"] is True and request["model"] == "demo"
    assert "temperature" not in request and "seed" not in request  # what is not set is the server's choice


def test_a_conversation_goes_on(page: Any, server: FakeServer) -> None:
    for k, text in enumerate(["one", "two", "three"]):
        ask(page, text)
        answered(page, k + 1)
    roles = [(message["role"], message["content"]) for message in server.requests[-1]["messages"]]
    assert roles == [
        ("user", "one"),
        ("assistant", "You said: one"),
        ("user", "two"),
        ("assistant", "You said: two"),
        ("user", "three"),
    ]


def test_stop_keeps_what_came_and_tells_the_server(page: Any, server: FakeServer) -> None:
    server.replies.append(Reply(["A beginning", "never sent"], hold=threading.Event()))
    ask(page, "Go on for ever")
    page.wait_for_selector("text=A beginning")
    page.click("#stop")
    assert answered(page) == "A beginning"
    assert "Stopped." in page.locator(".turn-note").inner_text()
    assert server.gone.wait(10)
    ask(page, "And now?")
    assert answered(page, 2) == "You said: And now?"


def test_edit_makes_a_branch_and_the_old_one_stays(page: Any, server: FakeServer) -> None:
    ask(page, "first")
    answered(page)
    ask(page, "second")
    answered(page, 2)
    page.locator(".turn.user").first.hover()
    page.locator(".turn.user").first.get_by_role("button", name="Edit the message").click()
    page.keyboard.press("End")
    page.keyboard.type(" again")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=You said: first again")
    assert turns(page) == ["first again", "You said: first again"]
    assert [m["content"] for m in server.requests[-1]["messages"]] == ["first again"]
    page.get_by_role("button", name="Earlier question").click()
    assert turns(page) == ["first", "You said: first", "second", "You said: second"]
    page.get_by_role("button", name="Later question").click()
    assert turns(page) == ["first again", "You said: first again"]


def test_leaving_an_edit_changes_nothing(page: Any, server: FakeServer) -> None:
    ask(page, "kept")
    answered(page)
    page.locator(".turn.user").hover()
    page.get_by_role("button", name="Edit the message").click()
    page.keyboard.type("thrown away")
    page.keyboard.press("Escape")
    assert turns(page) == ["kept", "You said: kept"]
    assert len(server.requests) == 1
    assert page.evaluate("document.activeElement.ariaLabel") == "Edit the message"


def test_retry_makes_another_version(page: Any, server: FakeServer) -> None:
    server.replies += [Reply(["heads"]), Reply(["tails"])]
    ask(page, "Toss a coin")
    assert answered(page) == "heads"
    page.get_by_role("button", name="Answer again").click()
    page.wait_for_selector("text=tails")
    assert answered(page) == "tails"
    assert server.requests[1]["messages"] == server.requests[0]["messages"]
    page.get_by_role("button", name="Earlier answer").click()
    assert turns(page) == ["Toss a coin", "heads"]
    assert page.get_by_role("button", name="Earlier answer").is_disabled()


def test_conversations_last(page: Any, server: FakeServer) -> None:
    ask(page, "remember me")
    answered(page)
    page.click("#new-chat")
    ask(page, "another one")
    answered(page)
    saved(page, "You said: another one")
    page.reload()
    page.wait_for_selector("text=You said: another one")  # the address names the conversation
    titles = page.locator(".conversation-title")
    assert titles.all_inner_texts() == ["another one", "remember me"]
    titles.last.click()
    assert turns(page) == ["remember me", "You said: remember me"]
    page.fill("#search", "SAID: another")
    assert titles.all_inner_texts() == ["another one"]


def test_an_answer_that_a_closed_tab_left_is_kept(page: Any, server: FakeServer) -> None:
    server.replies.append(Reply(["half of it", "rest"], hold=threading.Event()))
    ask(page, "Go")
    page.wait_for_selector("text=half of it")
    saved(page, "half of it")
    page.reload()
    page.wait_for_selector("text=half of it")
    assert "Stopped." in page.locator(".turn-note").inner_text()


def test_two_conversations_are_answered_at_once(page: Any, server: FakeServer) -> None:
    holds = [threading.Event(), threading.Event()]
    server.replies += [
        Reply(["slow one ", "done"], hold=holds[0]),
        Reply(["fast one ", "done"], hold=holds[1]),
    ]
    ask(page, "first")
    page.wait_for_selector("text=slow one")
    page.click("#new-chat")
    ask(page, "second")
    page.wait_for_selector("text=fast one")
    assert page.locator(".pulse").count() == 2
    for hold in holds:
        hold.set()
    page.wait_for_selector(".pulse", state="detached")
    assert turns(page) == ["second", "fast one done"]
    page.get_by_role("button", name="first", exact=True).click()
    assert turns(page) == ["first", "slow one done"]


def test_rename_delete_and_undo(page: Any, server: FakeServer) -> None:
    ask(page, "a question")
    answered(page)
    page.locator(".conversation").hover()
    page.get_by_role("button", name="Rename a question").click()
    page.keyboard.type("A better name")
    page.keyboard.press("Enter")
    assert page.locator("#title").inner_text() == "A better name"
    page.locator(".conversation").hover()
    page.get_by_role("button", name="Delete A better name").click()
    page.wait_for_selector(".conversation", state="detached")
    assert turns(page) == []
    page.get_by_role("button", name="Undo").click()
    assert turns(page) == ["a question", "You said: a question"]


def test_export_and_import(page: Any, server: FakeServer, tmp_path: Path) -> None:
    ask(page, "exported")
    answered(page)
    with page.expect_download() as download:
        page.get_by_role("button", name="Export all conversations").click()
    file = tmp_path / "conversations.json"
    download.value.save_as(file)
    assert json.loads(file.read_text())["format"] == "powerinfer-conversations-1"
    page.get_by_role("button", name="Delete all", exact=True).click()
    page.locator("#confirm-yes").click()
    page.wait_for_selector(".conversation", state="detached")
    page.set_input_files("#import-file", file)
    page.get_by_role("button", name="exported", exact=True).click()
    assert turns(page) == ["exported", "You said: exported"]


def test_a_conversation_of_the_terminal_is_read(page: Any, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    turn = [{"role": "user", "content": "from the terminal"}, {"role": "assistant", "content": "welcome"}]
    file.write_text(
        json.dumps({"format": "powerinfer-chat-1", "system": None, "turns": turn, "settings": {}})
    )
    page.set_input_files("#import-file", file)
    page.get_by_role("button", name="from the terminal", exact=True).click()
    assert turns(page) == ["from the terminal", "welcome"]


def test_bad_files_are_refused(page: Any, tmp_path: Path) -> None:
    loop = {
        "a": {"parent": "b", "role": "user", "text": "x"},
        "b": {"parent": "a", "role": "assistant", "text": "y"},
    }
    lost = {"a": {"parent": "nowhere", "role": "user", "text": "x"}}
    odd = {"a": {"parent": None, "role": "system", "text": "x"}}
    bodies = ["{", "[]", "null", '{"format": "other"}'] + [
        json.dumps({"format": "powerinfer-conversations-1", "conversations": [conversation]})
        for conversation in (
            None,
            {},
            {"nodes": loop},
            {"nodes": lost},
            {"nodes": odd},
            {"nodes": {"a": None}},
        )
    ]
    for k, body in enumerate(bodies):
        file = tmp_path / f"bad{k}.json"
        file.write_text(body)
        page.set_input_files("#import-file", file)
        page.wait_for_selector(f".toast:has-text('bad{k}.json was not imported')")
    assert page.locator(".conversation").count() == 0


def test_settings_are_sent_and_kept(page: Any, server: FakeServer) -> None:
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature").fill("300")
    page.get_by_label("Top p").fill("0.9")
    page.get_by_label("Longest answer").fill("64")
    page.get_by_label("Seed").fill("7")
    page.get_by_label("API key").fill("secret")
    page.get_by_role("button", name="Save").click()
    assert page.locator("#settings-error").inner_text() == "Temperature must be a number from 0 to 100."
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_role("button", name="Save").click()
    page.reload()
    ask(page, "Hi")
    answered(page)
    request = server.requests[0]
    assert request["messages"][0] == {"role": "system", "content": "Be brief."}
    wanted = {"temperature": 0.5, "top_p": 0.9, "max_tokens": 64, "seed": 7}
    assert {name: request[name] for name in wanted} == wanted
    assert server.keys == ["Bearer secret"]
    # The key was not to be remembered: it is in nothing that outlives the tab.
    assert "secret" not in page.evaluate("JSON.stringify(localStorage)")


def test_errors_are_said_and_can_be_retried(page: Any, server: FakeServer) -> None:
    server.replies.append(Reply(status=429, message="The queue is full.", headers={"Retry-After": "2"}))
    ask(page, "Hi")
    note = page.locator(".turn-note")
    answered(page)
    assert "The queue is full." in note.inner_text() and "Try again (in " in note.inner_text()
    note.get_by_role("button", name="Try again").click()
    page.wait_for_selector("text=You said: Hi")
    assert turns(page) == ["Hi", "You said: Hi"]  # the failed attempt is no version
    assert page.locator(".versions").count() == 0


def test_a_missing_key_leads_to_its_field(page: Any, server: FakeServer) -> None:
    server.replies.append(Reply(status=401, message="This server needs an API key."))
    ask(page, "Hi")
    page.get_by_role("button", name="Enter a key").click()
    assert page.evaluate("document.activeElement.id") == "set-key"
    page.keyboard.type("k1")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Try again").click()
    page.wait_for_selector("text=You said: Hi")
    assert server.keys == [None, "Bearer k1"]


def test_broken_streams_keep_what_came(page: Any, server: FakeServer) -> None:
    server.replies += [
        Reply(["half"], finish=None),
        Reply(["part"], error="The model was closed."),
        Reply(["whole"]),
    ]
    ask(page, "Hi")
    assert answered(page) == "half"
    assert "broke off" in page.locator(".turn-note").inner_text()
    page.get_by_role("button", name="Try again").click()
    page.wait_for_selector("text=The model was closed.")
    page.get_by_role("button", name="Try again").click()
    page.wait_for_selector("text=whole")
    page.get_by_role("button", name="Earlier answer").click()
    assert turns(page) == ["Hi", "part"]


def test_odd_line_ends_and_letters_over_pieces(page: Any, server: FakeServer) -> None:
    server.replies.append(Reply(list("größer 😀 ok"), newline="\r\n"))
    ask(page, "Hi")
    assert answered(page) == "größer 😀 ok"


def test_a_server_that_is_gone(page: Any, server: FakeServer) -> None:
    page.route("**/v1/chat/completions", lambda route: route.abort())
    ask(page, "Hi")
    page.wait_for_selector("text=The server does not answer")
    page.unroute("**/v1/chat/completions")
    page.get_by_role("button", name="Try again").click()
    page.wait_for_selector("text=You said: Hi")


def test_a_limit_is_told(page: Any, server: FakeServer) -> None:
    server.replies.append(Reply(["cut"], finish="length"))
    ask(page, "Hi")
    answered(page)
    assert "Cut at the longest answer" in page.locator(".turn-note").inner_text()


def test_thoughts_are_folded(page: Any, server: FakeServer) -> None:
    server.replies.append(Reply(["<think>let me ", "see</think>\n\n", "It is 4."]))
    ask(page, "2 + 2?")
    answered(page)
    assert page.locator(".turn.assistant > .prose").inner_text() == "It is 4."
    assert page.locator("details.thoughts").get_attribute("open") is None


def test_other_tabs_hear_of_changes(page: Any, context: Any, server: FakeServer) -> None:
    other = context.new_page()
    other.goto(server.url)
    other.wait_for_selector("#dot.ok, #dot.busy")
    ask(page, "said in one tab")
    answered(page)
    other.wait_for_selector(".conversation-title:has-text('said in one tab')")


def test_focus_stays_while_an_answer_comes(page: Any, server: FakeServer) -> None:
    hold = threading.Event()
    server.replies.append(Reply(["one ", "two"], hold=hold))
    ask(page, "Hi")
    page.wait_for_selector("text=one")
    copy = page.get_by_role("button", name="Copy the message")
    copy.focus()
    page.evaluate("window.focused = document.activeElement")
    hold.set()
    page.wait_for_selector("text=one two")
    answered(page)
    assert page.evaluate("window.focused.isConnected && document.activeElement === window.focused")


def test_a_reader_who_scrolled_up_is_left_alone(page: Any, server: FakeServer) -> None:
    hold = threading.Event()
    server.replies.append(Reply([f"line {k}\n\n" for k in range(80)] + ["the end"], hold=hold))
    ask(page, "Hi")
    page.wait_for_selector("text=line 79")
    page.evaluate("document.querySelector('#scroll').scrollTop = 0")
    page.wait_for_selector("#jump:visible")
    hold.set()
    answered(page)
    assert page.evaluate("document.querySelector('#scroll').scrollTop") == 0
    page.click("#jump")
    assert (
        page.evaluate(
            "(b => b.scrollHeight - b.scrollTop - b.clientHeight)(document.querySelector('#scroll'))"
        )
        < 2
    )
