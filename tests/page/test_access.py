"""The page without a mouse, for screen readers, on small screens, in both colours; the view of the engine."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from tests.page.driving import answered, ask, turns
from tests.page.fake_server import FakeServer, Reply, engine_state, expert_state

AUDIT = Path(__file__).with_name("audit.js").read_text(encoding="utf-8")

SAMPLE = """# Head

Text `code` [link](https://a.example) $\\frac{1}{x}$ $\\unknown$

```python
x = 1  # one
s = 'two'
return s
```

> said

- a
- b"""


def show_everything(page: Any, server: FakeServer) -> None:
    server.replies += [Reply([SAMPLE]), Reply(status=429, message="Busy.", headers={"Retry-After": "9"})]
    ask(page, "Hello")
    answered(page)
    file = {"name": "notes.txt", "mimeType": "text/plain", "buffer": b"notes"}
    page.set_input_files("#attach-file", files=[file])
    page.wait_for_selector(".file")
    ask(page, "More")
    answered(page, 2)
    page.locator(".attached summary").click()
    page.set_input_files("#attach-file", files=[file])
    page.wait_for_selector(".file")


@pytest.mark.parametrize("colours", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_rules(page: Any, server: FakeServer, colours: str, width: int) -> None:
    page.emulate_media(color_scheme=colours)
    page.set_viewport_size({"width": width, "height": 800})
    assert page.evaluate(AUDIT) == []
    show_everything(page, server)
    assert page.evaluate(AUDIT) == []
    for name in ("side", "engine"):
        if not page.locator(f"#{name}").is_visible():
            page.click(f"#{name}-toggle")
            page.wait_for_selector(f"#{name}:visible")
            assert page.evaluate(AUDIT) == []
            page.keyboard.press("Escape")
    page.click("#settings-open")
    page.locator(".shortcuts summary").click()
    page.locator("#set-more summary").click()
    page.get_by_label("This chat has a prompt of its own").check()
    assert page.evaluate(AUDIT) == []


@pytest.mark.parametrize("width", [320, 360, 860, 1180, 1920])
def test_nothing_is_wider_than_the_screen(page: Any, server: FakeServer, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 640})
    long = "a" * 300
    server.replies.append(
        Reply([f"{SAMPLE}\n\n```\n{long}\n```\n\n{long}\n\n" + "|x" * 40 + "|\n" + "|-" * 40 + "|\n"])
    )
    ask(page, long)
    answered(page)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate("(box => box.scrollWidth <= box.clientWidth)(document.querySelector('#scroll'))")
    for name in ("#settings-open", "#theme", "#side-toggle", "#engine-toggle", "#input", "#send"):
        box = page.locator(name).bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= width


def test_keyboard_only(page: Any, server: FakeServer) -> None:
    assert page.evaluate("document.activeElement.id") == "input"  # one may begin to write at once
    page.keyboard.type("line one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("line two")
    page.keyboard.press("Enter")
    answered(page)
    assert turns(page)[0] == "line one\nline two"
    assert page.evaluate("document.activeElement.id") == "input"
    seen = set()
    for _ in range(60):  # every control can be reached, and there is no trap
        page.keyboard.press("Tab")
        seen.add(
            page.evaluate("(node => node.ariaLabel || node.id || node.className)(document.activeElement)")
        )
    assert {"Answer again", "Edit the message", "Copy the answer", "Settings", "theme", "search"} & seen >= {
        "Answer again",
        "Edit the message",
        "Copy the answer",
        "Settings",
        "search",
    }
    page.keyboard.press("Alt+n")
    assert turns(page) == [] and page.evaluate("document.activeElement.id") == "input"
    page.keyboard.press("Alt+o")
    assert page.locator("#settings").is_visible()
    for _ in range(30):  # focus stays inside
        page.keyboard.press("Tab")
        assert page.evaluate(
            "document.activeElement === document.body || !!document.activeElement.closest('#settings')"
        )
    page.keyboard.press("Escape")
    assert not page.locator("#settings").is_visible()


def test_escape_stops(page: Any, server: FakeServer) -> None:
    server.replies.append(Reply(["begun", "rest"], hold=threading.Event()))
    ask(page, "Go")
    page.wait_for_selector("text=begun")
    page.keyboard.press("Escape")
    assert answered(page) == "begun"
    assert page.evaluate("document.activeElement.id") == "input"


def test_panels_on_a_small_screen(page: Any, server: FakeServer) -> None:
    page.set_viewport_size({"width": 390, "height": 800})
    page.wait_for_selector("#side", state="hidden")
    page.wait_for_selector("#engine", state="hidden")
    page.click("#side-toggle")
    assert page.evaluate("document.querySelector('#chat').inert")
    assert page.evaluate("!!document.activeElement.closest('#side')")
    page.keyboard.press("Escape")
    assert not page.locator("#side").is_visible()
    assert page.evaluate("document.activeElement.id") == "side-toggle"
    page.click("#engine-toggle")
    page.mouse.click(10, 400)  # beside the panel
    assert not page.locator("#engine").is_visible()


def test_screen_readers_hear_sentences(page: Any, server: FakeServer) -> None:
    page.evaluate(
        """() => {
            window.heard = [];
            const hear = change => change.addedNodes.forEach(node => heard.push(node.textContent));
            new MutationObserver(list => list.forEach(hear))
                .observe(document.querySelector("#spoken"), { childList: true });
        }"""
    )
    server.replies.append(Reply(["The first ", "sentence. And ", "**more**"], pause_s=0.15))
    ask(page, "Hi")
    answered(page)
    assert page.evaluate("heard") == [
        "Answering",
        "The first sentence.",
        "And more",
        "The answer is complete",
    ]
    assert page.locator("#spoken").get_attribute("aria-live") == "polite"


def test_colours(page: Any) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    page.emulate_media(color_scheme="dark")
    dark = page.evaluate(ground)
    page.emulate_media(color_scheme="light")
    light = page.evaluate(ground)
    assert dark != light
    page.get_by_role("button", name="Colours: as the system").click()
    page.get_by_role("button", name="Colours: light").click()
    assert page.evaluate(ground) == dark
    page.reload()
    assert page.evaluate(ground) == dark


def test_the_engine_is_shown(page: Any, server: FakeServer) -> None:
    page.wait_for_selector(".heat-cell")
    assert page.locator(".heat-cell").count() == 32
    assert page.locator(".now").inner_text() == "38"
    assert (
        page.get_by_role("meter", name="GPU memory").get_attribute("aria-valuetext") == "7.4 GiB of 8.0 GiB"
    )
    layer = server.engine["layers"][30]
    label = page.locator(".heat-cell").nth(30).get_attribute("aria-label")
    shares = (100 * layer["computed"], 100 * layer["on_device"])
    assert label == "Layer 30: {:.0f} % computed on both, {:.0f} % held on the GPU".format(*shares)
    heat = page.locator(".heat-share").evaluate_all(
        "cells => cells.map(cell => getComputedStyle(cell).backgroundColor)"
    )
    assert len(set(heat)) > 10
    page.locator(".heat-cell").first.focus()
    page.keyboard.press("ArrowRight")
    assert page.locator(".tip").inner_text().startswith("Layer 1:")
    page.locator(".table-view summary:visible").click()
    assert page.locator(".table-view:visible tbody tr").count() == 32
    server.engine = engine_state(8, device=False)
    page.wait_for_selector("text=No GPU in use")
    assert page.locator(".heat-cell").count() == 8
    *others, last = server.engine["layers"]
    for layer in others:
        layer["computed"] = 1
    last["computed"] = None
    page.wait_for_selector("text=All of them")


# The colour in the middle of a field of the map of experts, as red, green, blue.
FIELD = """(canvas, [layer, expert, layers, columns]) => {
    const [x, y] = [(expert + 0.5) / columns * canvas.width, (layer + 0.5) / layers * canvas.height];
    return [...canvas.getContext("2d").getImageData(Math.floor(x), Math.floor(y), 1, 1).data.slice(0, 3)];
}"""


def colour(page: Any, layer: int, expert: int, shape: tuple[int, int]) -> list[int]:
    found: list[int] = page.locator(".experts-map").evaluate(FIELD, [layer, expert, *shape])
    return found


def test_the_experts_of_a_mixture_are_shown(page: Any, server: FakeServer) -> None:
    shape = 4, 16
    server.engine = expert_state(*shape, 4)
    layers = server.engine["experts"]["layers"]
    page.wait_for_selector(".experts:visible")
    assert page.locator(".experts .headline strong").inner_text() == "76 %"
    assert not page.locator(".heat").is_visible()  # all neurons of these experts are computed
    places = sum(layer["on_device"].count("1") for layer in layers)
    assert (
        page.get_by_text(f"{places} of 64 have a place there; 812 moved there since the start").count() == 1
    )
    canvas = page.locator(".experts-map")
    assert canvas.get_attribute("aria-label") == "Experts: 4 layers by 16"
    for k, layer in enumerate(layers):  # blue on the GPU, orange on the CPU
        for e, there in enumerate(layer["on_device"]):
            red, _, blue = colour(page, k, e, shape)
            assert (blue > red) == (there == "1")
    _, _, blue = colour(page, 0, layers[0]["used"].index(min(layers[0]["used"])), shape)
    layers[0]["used"] = [900] * 16  # the more it is used, the stronger the colour
    page.wait_for_function(
        "row => document.querySelector('.experts tbody tr td:nth-child(4)').textContent === '90 %'"
    )
    assert colour(page, 0, layers[0]["on_device"].index("0"), shape)[2] < blue
    canvas.focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "ArrowLeft"):
        page.keyboard.press(key)
    one, there = layers[1]["used"][1], layers[1]["on_device"][1]
    said = page.locator(".experts-tip").inner_text()
    assert said.startswith(f"Layer 1, expert 1, on the {'GPU' if there == '1' else 'CPU'}: used by ")
    assert float(said.split("used by ")[1].split(" %")[0]) == pytest.approx(one / 10, abs=0.5)
    assert page.locator(".experts [aria-live]").inner_text() == said
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowUp")  # at the border it stays
    assert page.locator(".experts-tip").inner_text().startswith("Layer 0, expert 1,")
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 15.5 / 16, box["y"] + box["height"] * 2.5 / 4)
    assert page.locator(".experts-tip").inner_text().startswith("Layer 2, expert 15,")
    page.locator(".experts summary").click()
    assert page.locator(".experts tbody tr").count() == 4
    assert page.evaluate(AUDIT) == []


def test_a_mixture_without_a_gpu(page: Any, server: FakeServer) -> None:
    server.engine = expert_state(32, 8, 2, device=False)
    page.wait_for_selector(".experts:visible")
    assert page.locator(".experts .headline").inner_text() == "2 of 8 experts are used by a token"
    assert "GPU" not in page.locator(".experts .legend").inner_text()
    page.locator(".experts-map").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator(".experts-tip").inner_text().startswith("Layer 0, expert 1: used by")
    server.engine["layers"][3]["computed"] = 0.4  # of ReLU experts, whose silent neurons are not read
    page.wait_for_selector(".heat:visible")


@pytest.mark.parametrize("shape", [(48, 128), (94, 512), (2, 2)])
@pytest.mark.parametrize("width", [320, 1280])
def test_maps_of_any_size_fit(page: Any, server: FakeServer, shape: tuple[int, int], width: int) -> None:
    page.set_viewport_size({"width": width, "height": 700})
    server.engine = expert_state(*shape, 2)
    if not page.locator("#engine").is_visible():
        page.click("#engine-toggle")
    canvas = page.locator(".experts-map")
    canvas.wait_for()
    page.wait_for_function("document.querySelector('.experts-map').clientWidth > 100")
    box, panel = canvas.bounding_box(), page.locator("#engine-body").bounding_box()
    assert box["x"] >= panel["x"] and box["x"] + box["width"] <= panel["x"] + panel["width"]
    assert page.evaluate("document.querySelector('#engine-body').scrollWidth <= innerWidth")
    canvas.focus()
    for key, n in (("ArrowDown", shape[0]), ("ArrowRight", shape[1])):
        for _ in range(min(n, 60)):
            page.keyboard.press(key)
    last = min(shape[0] - 1, 60), min(shape[1] - 1, 60)
    assert page.locator(".experts-tip").inner_text().startswith("Layer {}, expert {},".format(*last))


def test_the_map_follows_the_colours(page: Any, server: FakeServer) -> None:
    server.engine = expert_state(4, 16, 4)
    page.emulate_media(color_scheme="light")
    page.wait_for_selector(".experts:visible")
    unused = server.engine["experts"]["layers"][0]["used"].index(
        min(server.engine["experts"]["layers"][0]["used"])
    )
    light = colour(page, 0, unused, (4, 16))
    page.emulate_media(color_scheme="dark")
    page.wait_for_timeout(200)
    assert sum(colour(page, 0, unused, (4, 16))) < sum(light) / 2


@pytest.mark.parametrize(
    "state",
    [
        {},
        [],
        None,
        "x",
        {"layers": [{}, None, 3], "vram": {}, "tokens_per_second": "fast", "kv_used": 9e99},
        {"layers": [{}], "experts": {"n_expert": 1e12, "layers": [{}, None, {"used": "x", "on_device": 7}]}},
        {"experts": {"n_expert": 8, "layers": 3, "routes": 5}},
        {"experts": {"n_expert": 8, "layers": [{"used": [1e9, -1, None]}], "routes": {"cpu": "many"}}},
    ],
)
def test_an_odd_engine_breaks_nothing(page: Any, server: FakeServer, state: object) -> None:
    server.engine = state  # type: ignore[assignment]
    page.reload()
    ask(page, "Hi")
    assert answered(page) == "You said: Hi"
