"""The Python blocks of docs/integrations.md against a server; skipped where a package is missing."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.running_server import running_server

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "integrations.md").read_text(encoding="utf-8")
SECTIONS = {
    section.split("\n", 1)[0]: re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    for section in TEXT.split("\n## ")[1:]
}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with running_server("-np", "2", "--api-key", "secret", "--temperature", "0") as address:
        yield address


def run(code: str, address: str = "") -> str:
    for name in re.findall(r"^(?:import|from) (\w+)", code, re.MULTILINE):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    code = code.replace("http://127.0.0.1:8080", address or "http://127.0.0.1:8080")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "name", ["OpenAI's client", "Anthropic's client", "Ollama's client", "LangChain", "LlamaIndex"]
)
def test_clients(name: str, address: str) -> None:
    (code,) = SECTIONS[name]
    out = run(code, address)
    assert out.startswith("2 plus 3 is 5.")
    assert ("384" in out) == ("Embeddings" in code or ".embed(" in code)


def test_extension_of_text_generation_webui(address: str) -> None:
    (code,) = SECTIONS["text-generation-webui"]
    prompt = "<|im_start|>user\nWhat is 2 plus 3?<|im_end|>\n<|im_start|>assistant\n"
    state = {"temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0, "max_new_tokens": 40}
    use = f"""
print(custom_tokenized_length("hello there"))
*_, last = custom_generate_reply({prompt!r}, "", {state!r}, ["<|im_end|>"], True)
print(last)
"""
    assert run(code + use, address).split("\n")[1:] == ["2 plus 3 is 5.", ""]


def test_every_section_of_the_table_is_there() -> None:
    for anchor in re.findall(r"\(#([\w-]+)\)", TEXT):
        assert anchor in {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in SECTIONS}
