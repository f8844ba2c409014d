"""What goes with a message: files, the model, the chat's system prompt, all samplers."""

from __future__ import annotations

from typing import Any

from annotated_types import Ge, Gt, Le
from pydantic.fields import FieldInfo

from powerinfer.server.arguments import _SAMPLING
from powerinfer.server.schemas import Generate
from tests.page.driving import answered, ask, saved, turns
from tests.page.fake_server import FakeServer, Reply


def attach(page: Any, name: str, body: bytes) -> None:
    page.set_input_files("#attach-file", files=[{"name": name, "mimeType": "text/plain", "buffer": body}])


def refused(page: Any, name: str, body: bytes) -> str:
    attach(page, name, body)
    page.wait_for_selector(f".toast:has-text('{name} was not attached')")
    text: str = page.locator(".toast").inner_text()
    return text


def test_files_are_sent_as_text(page: Any, server: FakeServer) -> None:
    assert page.locator("#send").is_disabled()
    attach(page, "notes.txt", "grün\r\n```x```\n".encode())
    attach(page, "<b>.py", "print(1)".encode("utf-16"))
    attach(page, "gone.txt", b"gone")
    page.get_by_role("button", name="Remove gone.txt").click()
    assert page.evaluate("document.activeElement.id") == "input"
    assert page.locator(".file").all_inner_texts() == ["notes.txt", "<b>.py"]
    ask(page, "What is in them?")
    answered(page)
    wanted = (
        "File notes.txt:\n````\ngrün\n```x```\n````\n\nFile <b>.py:\n```\nprint(1)\n```\n\nWhat is in them?"
    )
    assert server.requests[0]["messages"] == [{"role": "user", "content": wanted}]
    assert page.locator("#files").is_hidden() and turns(page)[0] == "What is in them?"
    page.locator(".attached summary").first.click()
    assert page.locator(".attached pre").first.inner_text() == "grün\n```x```\n"
    page.locator(".turn.user").hover()
    page.get_by_role("button", name="Edit the message").click()
    page.keyboard.type(" Say it.")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=2 / 2")
    answered(page)
    assert server.requests[1]["messages"][0]["content"].startswith("File notes.txt:")
    saved(page, "Say it.")
    page.reload()
    page.wait_for_selector(".attached >> nth=1")


def test_a_file_alone_is_a_message(page: Any, server: FakeServer) -> None:
    attach(page, "a.md", b"# A")
    page.click("#send")
    answered(page)
    assert server.requests[0]["messages"][0]["content"] == "File a.md:\n```\n# A\n```"
    assert page.locator("#title").inner_text() == "a.md"


def test_files_that_are_refused(page: Any, server: FakeServer) -> None:
    server.n_ctx = 100
    page.reload()
    page.wait_for_selector("#dot.ok, #dot.busy")
    assert "not a text file" in refused(page, "a.png", b"\x89PNG\r\n\x1a\n\0\0")
    assert "not a text file" in refused(page, "b.bin", b"a\0b")
    assert "it is empty" in refused(page, "c.txt", b" \n")
    assert "401 characters, the model reads at most about 400 (100 tokens)" in refused(
        page, "d.txt", b"x" * 401
    )
    assert "it has 1,601 bytes" in refused(page, "e.txt", b"x" * 1601)
    attach(page, "f.txt", b"x" * 300)
    assert "with it there would be 401 characters" in refused(page, "g.txt", b"x" * 101)
    assert page.locator(".file").all_inner_texts() == ["f.txt"]


DROP = """([kind, type]) => {
    const data = new DataTransfer();
    if (kind) data.items.add(new File(["dropped text"], "d.txt", { type: "text/plain" }));
    else data.setData("text/plain", "words");
    const event = new DragEvent(type, { dataTransfer: data, bubbles: true, cancelable: true });
    document.querySelector("#scroll").dispatchEvent(event);
    return event.defaultPrevented;
}"""


def test_files_are_dropped(page: Any) -> None:
    assert page.evaluate(DROP, [True, "dragover"]) and page.locator("#drop").is_visible()
    assert page.evaluate(DROP, [True, "drop"]) and page.locator("#drop").is_hidden()
    page.wait_for_selector(".file:has-text('d.txt')")
    assert not page.evaluate(DROP, [False, "drop"])


def test_models_are_picked(page: Any, server: FakeServer) -> None:
    server.models = ["one", "two"]
    page.reload()
    page.get_by_label("Model", exact=True).select_option("two")
    ask(page, "Hi")
    answered(page)
    assert server.requests[0]["model"] == "two"
    assert page.locator(".stats").inner_text().endswith("two")
    page.reload()
    page.wait_for_selector("#model-select:visible")
    assert page.input_value("#model-select") == "two"
    server.models = ["one"]
    page.reload()
    page.wait_for_selector("#model-name:has-text('one')")
    ask(page, "Hi again")
    answered(page, 2)
    assert server.requests[1]["model"] == "one"


def test_a_chat_has_a_system_prompt_of_its_own(page: Any, server: FakeServer) -> None:
    def set_own(text: str | None, general: str = "For all.") -> None:
        page.click("#settings-open")
        page.get_by_label("System prompt").fill(general)
        page.get_by_label("This chat has a prompt of its own").set_checked(text is not None)
        if text is not None:
            page.get_by_label("Prompt of this chat").fill(text)
        page.click("#settings-save")

    def sent() -> list[str]:
        return [m["content"] for m in server.requests[-1]["messages"] if m["role"] == "system"]

    set_own("For this one.")
    ask(page, "one")
    answered(page)
    assert sent() == ["For this one."] and page.locator("#own-prompt").is_visible()
    saved(page, "For this one.")
    page.reload()
    page.click("#own-prompt")
    assert page.evaluate("document.activeElement.id") == "set-chat"
    assert page.input_value("#set-chat") == "For this one."
    page.keyboard.press("Escape")
    page.click("#new-chat")
    ask(page, "two")
    answered(page)
    assert sent() == ["For all."] and page.locator("#own-prompt").is_hidden()
    set_own("")
    ask(page, "three")
    answered(page, 2)
    assert sent() == []
    set_own(None)
    ask(page, "four")
    answered(page, 3)
    assert sent() == ["For all."]


def limits(field: FieldInfo) -> tuple[float | None, float | None]:
    """The least and most that a field of the server takes."""
    found = [*field.metadata]
    for part in getattr(field.annotation, "__args__", ()):
        found += getattr(part, "__metadata__", ())
    found += [m for info in found if isinstance(info, FieldInfo) for m in info.metadata]
    low = [m.ge if isinstance(m, Ge) else m.gt for m in found if isinstance(m, (Ge, Gt))]
    high = [m.le for m in found if isinstance(m, Le)]
    return (low[0] if low else None), (high[0] if high else None)  # type: ignore[return-value]


def test_all_samplers_of_the_server_can_be_set(page: Any, server: FakeServer) -> None:
    fields, lists = page.evaluate(
        "import('./sampling.js').then(({ NUMBERS, LISTS }) => [NUMBERS, LISTS.map(list => list.name)])"
    )
    names = {field["name"] for field in fields} | set(lists)
    assert names == {*_SAMPLING, "max_tokens", "min_tokens", "seed", "stop"}
    for field in fields:
        low, high = limits(Generate.model_fields[field["name"]])
        assert low is not None and high is not None, field
        if field["name"] in ("seed", "max_tokens"):  # what a browser's numbers hold, what makes sense
            assert low <= field["min"] and field["max"] <= high
        else:
            assert (low, high) == (0 if field["name"] == "repeat_penalty" else field["min"], field["max"])
    page.click("#settings-open")
    page.locator("#set-more summary").click()
    wanted: dict[str, Any] = {}
    for field in fields:
        value = max(field["min"], 1) if field["whole"] else min(field["max"], max(field["min"], 0.25))
        page.fill(f"#set-{field['name']}", str(value))
        wanted[field["name"]] = value
    page.fill("#set-stop", "END\n\\n\\n\n")
    page.fill("#set-dry_sequence_breakers", '\\n\n:\n"\n\\\\')
    page.click("#settings-save")
    wanted |= {"stop": ["END", "\n\n"], "dry_sequence_breakers": ["\n", ":", '"', "\\"]}
    page.reload()
    page.wait_for_selector("#dot.ok, #dot.busy")
    server.replies.append(Reply(["ok"]))
    ask(page, "Hi")
    answered(page)
    assert {name: server.requests[0][name] for name in wanted} == wanted
    Generate.model_validate(server.requests[0])
    page.click("#settings-open")
    assert page.input_value("#set-dry_sequence_breakers") == '\\n\n:\n"\n\\\\'
    page.locator("#set-more summary").click()
    page.fill("#set-min_p", "2")
    page.locator("#set-more summary").click()
    page.click("#settings-save")
    assert page.locator("#settings-error").inner_text() == "Min p must be a number from 0 to 1."
    assert page.evaluate("document.activeElement.id") == "set-min_p"
    page.click("#settings-reset")
    page.click("#settings-save")
    ask(page, "Hi")
    answered(page, 2)
    assert not set(server.requests[1]) & set(wanted)
