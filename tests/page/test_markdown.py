"""What answers look like, and that nothing in them, in titles or in names can run or load anything."""

from __future__ import annotations

from typing import Any

import pytest

from tests.page.driving import answered, ask
from tests.page.fake_server import FakeServer, Reply

RENDER = """async text => {
    const { renderMarkdown } = await import("./markdown.js");
    const box = document.createElement("div");
    renderMarkdown(box, text);
    return box.innerHTML.replaceAll(' dir="auto"', "");
}"""

CASES = {
    "one\ntwo\n\nthree": "<p>one<br>two</p><p>three</p>",
    "# A\n### B #": "<h3>A</h3><h5>B</h5>",
    "*a* **b** ***c*** _d_ __e__ ~~f~~": "<p><em>a</em> <strong>b</strong> "
    "<strong><em>c</em></strong> <em>d</em> <strong>e</strong> <del>f</del></p>",
    "**a *b* c** *a **b** c* **a *b***": "<p><strong>a <em>b</em> c</strong> <em>a <strong>b</strong> c</em> "
    "<strong>a <em>b</em></strong></p>",
    "2 * 3 * 4, snake_case_name, a ** b": "<p>2 * 3 * 4, snake_case_name, a ** b</p>",
    "\\*no\\* `a*b*` ``a`b``": "<p>*no* <code>a*b*</code> <code>a`b</code></p>",
    "- a\n- b\n  - c\n- d": "<ul><li>a</li><li>b<ul><li>c</li></ul></li><li>d</li></ul>",
    "3. a\n4. b": '<ol start="3"><li>a</li><li>b</li></ol>',
    "- [x] a\n- [ ] b": '<ul><li class="task">'
    '<input type="checkbox" disabled="" checked="" aria-label="done">a</li>'
    '<li class="task"><input type="checkbox" disabled="" aria-label="open">b</li></ul>',
    "1. a\n\n   more\n2. b": "<ol><li><p>a</p><p>more</p></li><li><p>b</p></li></ol>",
    "> a\n> - b": "<blockquote><p>a</p><ul><li>b</li></ul></blockquote>",
    "a\n\n---\n\nb": "<p>a</p><hr><p>b</p>",
    "<b>&lt;i&gt;</b> & <script>x</script>": "<p>"
    "&lt;b&gt;&lt;i&gt;&lt;/b&gt; &amp; &lt;script&gt;x&lt;/script&gt;</p>",
    "![cat](https://a.example/c.png)": '<p><a href="https://a.example/c.png" target="_blank" '
    'rel="noopener noreferrer nofollow">cat</a></p>',
    "(see https://a.example/x_(y)_z.)": '<p>(see <a href="https://a.example/x_(y)_z" target="_blank" '
    'rel="noopener noreferrer nofollow">https://a.example/x_(y)_z</a>.)</p>',
}


@pytest.mark.parametrize("text", CASES)
def test_markdown(page: Any, text: str) -> None:
    assert page.evaluate(RENDER, text) == CASES[text]


def test_a_table(page: Any) -> None:
    html = page.evaluate(RENDER, "| a | b\\|c |\n|:--|--:|\n| `x` | 1 |\n| y |")
    assert '<th scope="col">a</th><th class="right" scope="col">b|c</th>' in html
    assert '<tr><td><code>x</code></td><td class="right">1</td></tr>' in html
    assert '<tr><td>y</td><td class="right"></td></tr>' in html


def test_code_keeps_every_character(page: Any, context: Any, server: FakeServer) -> None:
    context.grant_permissions(["clipboard-read", "clipboard-write"], origin=server.url)
    code = 'def f(x):\n    """<b>Doc</b>"""\n    return x & 0x1F  # **not bold**'
    server.replies.append(Reply([f"Here:\n\n```python\n{code}\n```\n\n~~~\nplain ``` text\n~~~\n"]))
    ask(page, "code")
    answered(page)
    assert page.locator(".code code").all_text_contents() == [code, "plain ``` text"]
    assert page.locator(".code .t-comment").text_content() == "# **not bold**"
    page.get_by_role("button", name="Copy the code").first.click()
    page.wait_for_selector("text=Copied")
    assert page.evaluate("navigator.clipboard.readText()") == code


def test_code_that_is_still_coming_is_code(page: Any) -> None:
    assert (
        '<pre tabindex="0" role="group" aria-label="Code, c" dir="ltr"><code>a *b* c</code></pre>'
        in page.evaluate(RENDER, "```c\na *b* c")
    )


def test_finished_blocks_keep_their_elements(page: Any) -> None:
    """What a reader has selected or focused stays while more arrives."""
    kept = page.evaluate(
        """async () => {
            const { renderMarkdown } = await import("./markdown.js");
            const box = document.createElement("div");
            renderMarkdown(box, "```c\\nx\\n```\\n\\nmore");
            const [code, text] = box.children;
            renderMarkdown(box, "```c\\nx\\n```\\n\\nmore and more");
            return [box.children[0] === code, box.children[1] === text];
        }"""
    )
    assert kept == [True, False]


ATTACKS = [
    "<img src=x onerror=alert(1)><script>alert(1)</script>",
    "[click](javascript:alert(1)) [a](JaVaScRiPt:alert(1)) [c](vbscript:x)",
    "[b](data:text/html,<script>alert(1)</script>)",
    "[x](\x01javascript:alert(1)) [y](java\tscript:alert(1)) [z](//evil.example/) <javascript:alert(1)>",
    '![x](https://evil.example/pixel.png) ![y](http://evil.example/"onerror=alert(1))',
    '```"><img src=x onerror=alert(1)>\n</code></pre><img src=x onerror=alert(1)>\n```',
    "| <img src=x onerror=alert(1)> |\n|---|\n| <iframe src=//evil.example> |",
    "# <svg onload=alert(1)>\n> <style>body{display:none}</style>\n- <a href=javascript:alert(1)>x</a>",
    "&lt;img src=x onerror=alert(1)&gt; &#60;script&#62;",
    "<think><img src=x onerror=alert(1)></think><form action=//evil.example><button>x",
]


@pytest.mark.parametrize("text", ATTACKS)
def test_nothing_in_an_answer_runs(page: Any, server: FakeServer, text: str) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("dialog", lambda dialog: asked.append("dialog"))
    server.replies.append(Reply([text]))
    ask(page, text)
    answered(page)
    page.reload()
    page.wait_for_selector(".turn.assistant")
    page.get_by_role("button", name="Rename").first.wait_for(state="attached")
    foreign = "#messages :is(img, script, iframe, style, form, object, embed, [onerror], [onload], [style])"
    assert page.locator(foreign).count() == 0
    links = page.locator("#messages a").evaluate_all("links => links.map(link => link.protocol)")
    assert set(links) <= {"http:", "https:"}
    assert all(url.startswith((server.url, "data:")) for url in asked)


def test_titles_models_and_engine_are_text(page: Any, server: FakeServer) -> None:
    evil = "<img src=x onerror=alert(1)>"
    server.models = [evil, "second" + evil]
    server.engine["vram"]["device"] = evil
    server.engine["layers"][0]["where"] = evil
    asked: list[str] = []
    page.on("dialog", lambda dialog: asked.append("dialog"))
    page.reload()
    page.wait_for_selector(".heat-cell")
    ask(page, evil)
    answered(page)
    assert page.locator("#title").inner_text() == evil
    assert page.locator("img:not([src='icon.svg'])").count() == 0 and not asked
    assert server.requests[0]["model"] == evil


@pytest.mark.parametrize(
    "text",
    [
        "> " * 3000,
        "- " * 3000,
        "*" * 20000,
        "*a **b " * 4000,
        "[" * 20000,
        "`" * 9999 + "x" + "`" * 9998,
        "[a](" * 5000,
        "|" * 20000 + "\n|-|",
        "~~a " * 5000,
        "_a __b ___c " * 3000,
        "  - a\n" * 4000,
        "".join(" " * k + "- a\n" for k in range(400)),
        "<http://" * 4000,
    ],
)
def test_hostile_text_takes_little_time(page: Any, text: str) -> None:
    """Far from the default timeout if the renderer is linear; hours, or no stack, if it is not."""
    shown = page.evaluate(
        """async text => {
            const { renderMarkdown } = await import("./markdown.js");
            const box = document.createElement("div");
            renderMarkdown(box, text);
            return box.textContent.length;
        }""",
        text,
    )
    assert shown <= len(text) + 100
