"""The page, the server and the demo model together. Skipped where the extra powerinfer[server] is missing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.native.test_mixtures import write
from tests.page.driving import answered, ask, turns
from tests.running_server import running_server


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with running_server("-np", "2", "--api-key", "k1", "--temperature", "0") as address:
        yield address


def test_together(context: Any, address: str) -> None:
    page = context.new_page()
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda message: "Content Security" in message.text and wrong.append(message.text))
    page.set_default_timeout(60000)
    page.goto(address)
    page.wait_for_selector("text=needs an API key")
    ask(page, "What is 2 plus 3?")
    page.get_by_role("button", name="Enter a key").click()
    page.keyboard.type("k1")
    page.keyboard.press("Enter")
    page.wait_for_selector("#model-name:has-text('demo')")
    page.get_by_role("button", name="Try again").click()
    page.wait_for_selector(".stats")
    first = answered(page)
    assert "5" in first
    page.get_by_role("button", name="Answer again").click()
    page.wait_for_selector(".versions")
    assert answered(page) == first  # temperature 0
    ask(page, "Tell me a story about a fox.")
    page.wait_for_selector(".turn.assistant:last-child .prose p")
    assert len(answered(page, 2)) > 40
    page.wait_for_function("document.querySelectorAll('.heat-cell').length === 8")
    page.wait_for_function("document.querySelector('.neurons .headline strong').textContent !== '–'")
    share = float(page.locator(".neurons .headline strong").inner_text().removesuffix("%"))
    assert 0 < share < 100  # the demo model is sparse
    before = turns(page)
    page.reload()
    page.wait_for_selector(".turn.assistant >> nth=1")
    assert turns(page) == before
    assert not wrong


def test_a_mixture(context: Any, tmp_path: Path) -> None:
    """Partly on the stand-in for a GPU: the map shows what the metrics count."""
    path = write(tmp_path / "m.gguf", "mixtral")
    budget = ("--devices", "host", "--vram-budget", str(8.4 / 1024), "-b", "16", "-c", "128", "-np", "2")
    with running_server(*budget, model=str(path)) as address:
        page = context.new_page()
        wrong: list[str] = []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda message: "Content Security" in message.text and wrong.append(message.text))
        page.goto(address)
        page.wait_for_selector("text=None was used yet")
        ask(page, "Hi")
        answered(page)
        text = page.request.get(f"{address}/metrics").text()
        values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        routes = [
            int(values[f'powerinfer_expert_routes_total{{where="{where}"}}'])
            for where in ("device", "cpu", "streamed")
        ]
        share = f"{routes[0] / sum(routes):.0%}".replace("%", " %")
        page.wait_for_selector(f"text={share} of the chosen experts were on the GPU")
        assert page.locator(".experts-map").get_attribute("aria-label") == "Experts: 5 layers by 8"
        assert not wrong
