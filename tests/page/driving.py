"""What a person does with the page."""

from __future__ import annotations

from typing import Any


def ask(page: Any, text: str) -> None:
    page.fill("#input", text)
    page.press("#input", "Enter")


def answered(page: Any, n: int = 1) -> str:
    """Waits until n answers are there and none is being written; the text of the last one."""
    page.wait_for_function(
        """n => document.querySelectorAll(".turn.assistant").length === n
            && !document.querySelector(".running")""",
        arg=n,
    )
    text: str = page.locator(".turn.assistant .prose:not(details .prose)").last.inner_text()
    return text


def turns(page: Any) -> list[str]:
    """The texts that are shown, in order."""
    return [text.strip() for text in page.locator(".said, .turn.assistant > .prose").all_inner_texts()]


def saved(page: Any, text: str) -> None:
    """Waits until this text is in the browser's database."""
    read = """async () => {
        const store = await import("./store.js");
        return JSON.stringify(await store.allConversations());
    }"""
    for _ in range(200):
        if text in page.evaluate(read):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"{text!r} was not saved")
