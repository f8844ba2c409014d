"""Conversations that are longer than the model's context, answers that were cut, and very many turns."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.page.driving import answered, ask, saved, turns
from tests.page.fake_server import FakeServer, Reply

REFUSED = {"status": 400, "message": "the prompt has 999 tokens", "code": "context_length_exceeded"}

MANY = """async ([n, words]) => {
    const { putConversation } = await import("./store.js");
    const { add, newConversation } = await import("./conversation.js");
    const conversation = newConversation();
    let parent = null;
    for (let k = 0; k < n; k += 1) {
        const answer = k % 2 === 1;
        const text = (answer ? "**Answer** " : "Question ") + k + " word".repeat(words);
        const node = add(conversation, parent, answer ? "assistant" : "user", text);
        if (answer) node.finish = "stop";
        parent = node.id;
    }
    await putConversation(conversation);
    return conversation.id;
}"""


def contents(request: dict[str, Any]) -> list[str]:
    return [message["content"] for message in request["messages"]]


def open_long(page: Any, server: FakeServer, n: int, words: int) -> None:
    page.goto("about:blank")
    page.goto(server.url)
    name = page.evaluate(MANY, [n, words])
    page.goto("about:blank")
    page.goto(f"{server.url}/#{name}")
    page.wait_for_selector(f".turn >> nth={n - 1}", state="attached")
    page.wait_for_selector("#dot.ok, #dot.busy")


def test_the_oldest_turns_are_left_out(page: Any, server: FakeServer) -> None:
    server.n_ctx = 400
    open_long(page, server, 20, 40)
    server.replies.append(Reply(**REFUSED))
    ask(page, "the last question")
    page.wait_for_selector("text=This is more than the model can read: the prompt has 999 tokens")
    page.get_by_role("button", name="Leave out the oldest turns").click()
    page.wait_for_selector("text=You said: the last question")
    answered(page, 11)
    sent = contents(server.requests[-1])
    assert sent[-1] == "the last question" and sent[0].startswith("Question ") and 1 < len(sent) < 10
    assert sum(map(len, sent)) <= 400 * 3  # what n_ctx tokens may be
    assert len(turns(page)) == 22  # the reader still has all of them
    cut = page.locator(".cut")
    assert cut.inner_text().startswith("The model does not read the turns above.")
    below = cut.evaluate("node => node.nextElementSibling.querySelector('.said').textContent")
    assert below == sent[0]
    ask(page, "one more")
    answered(page, 12)
    assert contents(server.requests[-1]) == [*sent, "You said: the last question", "one more"]
    saved(page, "You said: one more")
    page.reload()
    page.wait_for_selector(".cut")
    page.get_by_role("button", name="Let it read them again").click()
    page.wait_for_selector(".cut", state="detached")
    ask(page, "all of it")
    answered(page, 13)
    assert len(contents(server.requests[-1])) == 25


def test_more_is_left_out_until_it_fits(page: Any, server: FakeServer) -> None:
    server.n_ctx = 1000
    open_long(page, server, 20, 40)
    server.replies += [Reply(**REFUSED) for _ in range(3)]
    ask(page, "the last question")
    page.get_by_role("button", name="Leave out the oldest turns").click()
    page.wait_for_selector("text=You said: the last question")
    sizes = [len(contents(request)) for request in server.requests]
    assert sizes[0] == 21 > sizes[1] > sizes[2] > sizes[3]


def test_a_message_that_is_too_long_alone(page: Any, server: FakeServer) -> None:
    ask(page, "short")
    answered(page)
    server.replies += [Reply(**REFUSED) for _ in range(9)]
    ask(page, "much too long")
    page.get_by_role("button", name="Leave out the oldest turns").click()
    page.wait_for_selector("text=The last message alone is longer than the model can read.")
    assert contents(server.requests[-1]) == ["much too long"]
    assert page.get_by_role("button", name="Leave out the oldest turns").count() == 0


def test_the_earlier_part_is_summarised(page: Any, server: FakeServer) -> None:
    server.n_ctx = 500
    open_long(page, server, 20, 40)
    server.replies += [Reply(**REFUSED), Reply(["<think>hm</think>They counted, ", "part one."])]
    ask(page, "and now?")
    hold = threading.Event()
    server.replies += [Reply(["They **counted** ", "on."], hold=hold)] * 1
    page.get_by_role("button", name="Summarise the earlier part").click()
    page.wait_for_selector(".turn-note:has-text('Summarising the earlier part')")
    server.replies += [Reply(["They **counted** on."])] * 9
    hold.set()
    page.wait_for_selector(".cut")
    answered(page, 11)
    asked = [contents(request) for request in server.requests[1:-1]]
    assert len(asked) > 1 and all(len(texts) == 1 for texts in asked)
    assert "User: Question 0" in asked[0][0] and "This is a part of a conversation" in asked[0][0]
    assert all("summary of the beginning" in texts[0] and "counted" in texts[0] for texts in asked[1:])
    assert all("hm" not in texts[0] for texts in asked)
    final = contents(server.requests[-1])
    assert final[0].startswith("Summary of our conversation until now:\n\nThey **counted** on.\n\nQuestion ")
    assert final[-1] == "and now?" and len(final) < 15
    assert all("seed" not in request and request["max_tokens"] == 125 for request in server.requests[1:-1])
    page.locator(".cut summary").click()
    assert page.locator(".cut strong").inner_text() == "counted"


def test_a_stopped_summary_changes_nothing(page: Any, server: FakeServer) -> None:
    server.n_ctx = 500
    open_long(page, server, 10, 40)
    server.replies += [Reply(**REFUSED), Reply(["never ", "sent"], hold=threading.Event())]
    ask(page, "and now?")
    page.get_by_role("button", name="Summarise the earlier part").click()
    page.wait_for_selector(".turn-note:has-text('Summarising')")
    assert server.gone.is_set() is False
    page.click("#stop")
    page.wait_for_selector("text=Stopped.")
    assert page.locator(".cut").count() == 0
    page.get_by_role("button", name="Answer again").last.click()
    page.wait_for_selector("text=You said: and now?")
    assert len(contents(server.requests[-1])) == 11


@pytest.mark.parametrize("how", ["length", "stopped", "broken"])
def test_an_answer_that_was_cut_goes_on(page: Any, server: FakeServer, how: str) -> None:
    if how == "stopped":
        server.replies.append(Reply(["It begins", "never"], hold=threading.Event()))
    else:
        server.replies.append(Reply(["It begins"], finish="length" if how == "length" else None))
    ask(page, "Go")
    page.wait_for_selector("text=It begins")
    if how == "stopped":
        page.click("#stop")
    server.replies.append(Reply([" and", " ends."]))
    page.get_by_role("button", name="Continue").click()
    assert page.evaluate("document.activeElement.id") == "input"
    page.wait_for_selector("text=It begins and ends.")
    assert answered(page) == "It begins and ends."
    request = server.requests[-1]
    assert contents(request) == ["Go", "It begins"] and request["messages"][-1]["role"] == "assistant"
    assert request["continue_final_message"] is True and request["add_generation_prompt"] is False
    assert page.get_by_role("button", name="Continue").count() == 0
    assert page.locator(".turn-note").is_hidden()
    assert page.locator(".versions").count() == 0
    ask(page, "Next")
    answered(page, 2)
    assert "continue_final_message" not in server.requests[-1]


def test_a_full_context_can_be_made_room_in(page: Any, server: FakeServer) -> None:
    server.n_ctx = 8  # the stand-in counts 5 tokens of the prompt
    page.reload()
    page.wait_for_selector("#dot.ok, #dot.busy")
    ask(page, "first")
    answered(page)
    server.replies.append(Reply(["one ", "two ", "three"], finish="length"))
    ask(page, "second")
    answered(page, 2)
    assert "the model's context is full" in page.locator(".turn-note:visible").inner_text()
    server.replies.append(Reply([" four"]))
    page.get_by_role("button", name="Leave out the oldest turns").click()
    page.wait_for_selector("text=one two three four")
    assert contents(server.requests[-1]) == ["second", "one two three"]


def test_a_thousand_turns(page: Any, server: FakeServer) -> None:
    """Turns that are far away have their bare text alone; they are drawn when the reader comes near."""
    open_long(page, server, 1000, 10)
    drawn = "document.querySelectorAll('.turn.assistant strong').length"
    assert page.evaluate(drawn) < 100
    assert page.locator(".turn.assistant strong").last.inner_text() == "Answer"
    gap = "(box => box.scrollHeight - box.scrollTop - box.clientHeight)(document.querySelector('#scroll'))"
    page.wait_for_timeout(100)
    assert page.evaluate(gap) < 2
    assert "**Answer** 1 word" in page.evaluate("document.querySelectorAll('.turn')[1].textContent")
    page.evaluate("document.querySelector('#scroll').scrollTop = 0")
    page.wait_for_selector(".turn:nth-child(2) strong")
    assert page.locator(".turn:nth-child(2)").get_by_role("button", name="Copy the answer").count() == 1
    assert page.evaluate(drawn) < 200
    assert page.evaluate("document.querySelector('#scroll').scrollTop") == 0
    page.click("#jump")
    ask(page, "one more")
    assert answered(page, 501) == "You said: one more"
    assert len(server.requests[-1]["messages"]) == 1001
    assert page.evaluate(gap) < 2


def test_a_long_list_of_conversations(page: Any, server: FakeServer) -> None:
    page.evaluate(
        """async () => {
            const { putConversation } = await import("./store.js");
            const { newConversation } = await import("./conversation.js");
            for (let k = 0; k < 250; k += 1)
                await putConversation({ ...newConversation(), title: `chat ${k}`, updated: 1e12 + k });
        }"""
    )
    page.reload()
    page.wait_for_selector(".conversation >> nth=199")
    assert page.locator(".conversation").count() == 200
    page.get_by_role("button", name="Show more of 250").click()
    assert page.locator(".conversation").count() == 250
    assert page.evaluate("document.activeElement.title") == "chat 49"
    page.fill("#search", "chat 7")
    assert page.locator(".conversation").count() == 11
