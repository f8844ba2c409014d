"""A headless Chromium, and a server that a test scripts.

These tests are for `make slow`: they are skipped where Playwright or Chromium is missing.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.page.fake_server import FakeServer

CHROMIUM = os.environ.get("CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine")
    with sync_api.sync_playwright() as playwright:
        # As root Chromium cannot make its sandbox; the pages that it is shown are ours.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def server() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def context(browser: Any) -> Iterator[Any]:
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    context.set_default_timeout(10000)
    yield context
    context.close()


@pytest.fixture
def page(context: Any, server: FakeServer) -> Iterator[Any]:
    """The page as it is first seen. A test fails if the page threw or broke its content security policy."""
    page = context.new_page()
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(f"thrown: {error}"))
    page.on("console", lambda message: "Content Security" in message.text and wrong.append(message.text))
    page.goto(server.url)
    page.wait_for_selector("#dot.ok, #dot.busy")
    yield page
    assert not wrong
