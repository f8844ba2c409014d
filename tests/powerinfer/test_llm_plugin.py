"""The plugin for `llm`, through llm's own command line and Python interface."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

llm = pytest.importorskip("llm")
CliRunner = pytest.importorskip("click.testing").CliRunner

from llm.cli import cli  # noqa: E402
from llm.plugins import pm  # noqa: E402

import powerinfer  # noqa: E402
from powerinfer.integrations import llm_plugin  # noqa: E402

DEMO = Path(powerinfer.__file__).parent / "demo" / "demo.gguf"


@pytest.fixture(autouse=True)
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path / "llm"))
    known = pm.has_plugin("powerinfer") or llm_plugin in pm.get_plugins()
    if not known:
        pm.register(llm_plugin, "powerinfer")
    # Commands are added when llm's command line is loaded, which may have been before.
    llm_plugin.register_commands(cli)
    yield
    if not known:
        pm.unregister(llm_plugin)


def run(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(cli, list(words))
    assert result.exit_code == code, result.output
    return str(result.output)


def test_demo_answers() -> None:
    text = run("-m", "powerinfer/demo", "-o", "temperature", "0", "--no-stream", "-n", "What is 2 plus 3?")
    assert text.strip() == "2 plus 3 is 5."
    assert run("-m", "powerinfer/demo", "-o", "temperature", "0", "-n", "What is 2 plus 3?") == text


def test_conversations_are_told_whole() -> None:
    conversation = llm.get_model("powerinfer/demo").conversation()
    first = conversation.prompt("My name is Ann.", system="Be kind.", temperature=0, max_tokens=20)
    said = first.text()
    second = conversation.prompt("What is 2 plus 3?", temperature=0, max_tokens=20)
    second.text()
    assert llm_plugin.messages_of(second.prompt) == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "My name is Ann."},
        {"role": "assistant", "content": said},
        {"role": "user", "content": "What is 2 plus 3?"},
    ]
    assert second.input_tokens > first.input_tokens > 0


def test_models_are_added_and_removed() -> None:
    assert run("powerinfer", "add", str(DEMO), "--name", "mine", "--n-ctx", "256") == "powerinfer/mine\n"
    assert "n_ctx=256" in run("powerinfer", "list")
    assert "PowerInfer: powerinfer/mine" in run("models")
    model = llm.get_model("powerinfer/mine")
    assert model.prompt("Hello", temperature=0).text()
    assert llm_plugin._opened[1].n_ctx() == 256  # type: ignore[index]
    run("powerinfer", "remove", "mine")
    assert "mine" not in run("powerinfer", "list")


@pytest.mark.parametrize("words", [("remove", "demo"), ("remove", "nothing"), ("add", __file__)])
def test_refusals(words: tuple[str, ...]) -> None:
    assert "Error" in run("powerinfer", *words, code=1)


def test_a_spoilt_list_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "llm" / "powerinfer-models.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    for text in ("{", "[]", '{"a": 1}', '{"a": {}}'):
        path.write_text(text)
        assert "powerinfer-models.json" in run("powerinfer", "list", code=1)


def test_errors_are_sentences() -> None:
    message = run("-m", "powerinfer/demo", "-n", "word " * 5000, code=1)
    assert message.startswith("Error: ") and "Traceback" not in message


def test_vectors() -> None:
    vectors: Any = json.loads(run("embed", "-m", "powerinfer/demo", "-c", "a lighthouse", "-f", "json"))
    assert len(vectors) == 384
    assert math.isclose(sum(v * v for v in vectors), 1, rel_tol=1e-5)


def test_commands_as_documented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/integrations.md, with the demo in place of a large model, and without a GPU."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bamboo-7b.gguf").symlink_to(DEMO)
    page = (Path(__file__).resolve().parents[2] / "docs" / "integrations.md").read_text("utf-8")
    (block,) = re.findall(r"```sh\n(pip install llm .*?)```", page, re.DOTALL)
    lines = [shlex.split(line, comments=True)[1:] for line in block.splitlines()[1:]]
    assert [words[:2] for words in lines][:2] == [["-m", "powerinfer/demo"], ["powerinfer", "add"]]
    for words in lines:
        assert run(*("0" if word == "8" else word for word in words)) or "add" in words


def test_a_call_that_is_cut_off_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b'}}
    answer = {
        "choices": [{"message": {"role": "assistant", "content": None, "tool_calls": [call]}}],
        "usage": {"prompt_tokens": 9, "completion_tokens": 5},
    }
    monkeypatch.setattr(powerinfer.Llama, "create_chat_completion", lambda *_, **__: answer)

    def add(a: int, b: int) -> int:
        """The sum."""
        return a + b

    with pytest.raises(llm.ModelError, match="the call of add was cut off"):
        llm.get_model("powerinfer/demo").prompt("1 + 2?", tools=[add]).text()
