"""The chat: conversations and their files, commands, wrapping, pipes, and a real terminal."""

from __future__ import annotations

import errno
import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from rich.cells import cell_len

from powerinfer import FormatError, Llama, PowerInferError
from powerinfer._text.terminal import Bar, harmless, one_line
from powerinfer.chat import commands
from powerinfer.chat.chat import Chat, Work
from powerinfer.chat.conversation import Conversation
from powerinfer.chat.keys import CommandCompleter
from powerinfer.chat.ui import Ui
from powerinfer.chat.wrap import Wrap
from powerinfer.cli import main
from scripts import make_model
from tests.native import test_mixtures as mixtures
from tests.powerinfer.thinking import ANSWER, THOUGHT, thinking

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def endless_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose answers have no end."""
    path = tmp_path_factory.mktemp("models") / "endless.gguf"
    make_model.write(
        {"powerinfer": path}, make_model.SHAPES["tiny-llama"], "endless", "Q8_0", rank=96, pure=True
    )
    return path


# -- conversations


def said() -> Conversation:
    conversation = Conversation("be kind \u2603", settings={"temperature": 0.5, "seed": 7})
    conversation.add("a\nb", "c \U0001f98a")
    conversation.add("d", "")
    return conversation


def test_a_conversation_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    said().save(path)
    assert Conversation.load(path) == said()
    said().save(path)  # over itself
    assert list(tmp_path.iterdir()) == [path]


def test_save_does_not_destroy_other_files(tmp_path: Path) -> None:
    path = tmp_path / "letter.txt"
    path.write_text("dear")
    with pytest.raises(PowerInferError, match="another name"):
        said().save(path)
    assert path.read_text() == "dear"
    with pytest.raises(OSError):
        said().save(tmp_path / "missing" / "talk.json")


GOOD = {"format": "powerinfer-chat-1", "system": None, "turns": [], "settings": {}}
USER, ASSISTANT = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"null",
        b"{}",
        b"[" * 100_000,
        b'{"format": ' + b"1" * 5000 + b"}",
        json.dumps({**GOOD, "format": "powerinfer-chat-2"}).encode(),
        json.dumps({**GOOD, "system": 3}).encode(),
        json.dumps({**GOOD, "system": "\ud800"}).encode(),
        json.dumps({**GOOD, "turns": {}}).encode(),
        json.dumps({**GOOD, "turns": [USER]}).encode(),
        json.dumps({**GOOD, "turns": [ASSISTANT, USER]}).encode(),
        json.dumps({**GOOD, "turns": [USER, {"role": "assistant"}]}).encode(),
        json.dumps({**GOOD, "turns": [USER, {**ASSISTANT, "content": "\udfff"}]}).encode(),
        json.dumps({**GOOD, "turns": [USER, {**ASSISTANT, "content": ["x"]}]}).encode(),
        json.dumps({**GOOD, "turns": ["user", "assistant"]}).encode(),
        json.dumps({**GOOD, "settings": []}).encode(),
        json.dumps({**GOOD, "settings": {"stop": "x"}}).encode(),
        json.dumps({**GOOD, "settings": {"temperature": None}}).encode(),
        json.dumps({**GOOD, "settings": {"temperature": float("nan")}}).encode(),
        json.dumps({**GOOD, "settings": {"top_p": 1e300}}).encode(),
        json.dumps({**GOOD, "settings": {"max_tokens": 10**20}}).encode(),
        json.dumps({**GOOD, "settings": {"top_k": 1.5}}).encode(),
    ],
)
def test_hostile_files_are_refused(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    path.write_bytes(text)
    with pytest.raises(FormatError, match=r"talk\.json"):
        Conversation.load(path)


def test_only_files_are_read(tmp_path: Path) -> None:
    """A device, /dev/zero for one, may have no end."""
    for path in (Path("/dev/null"), tmp_path):
        with pytest.raises(FormatError, match="is no file"):
            Conversation.load(path)


def test_forgetting_halves_what_the_model_is_shown() -> None:
    conversation = Conversation("s")
    for i in range(5):
        conversation.add(f"q{i}", f"a{i}")
    shown = []
    while conversation.forget_half():
        shown.append([m["content"] for m in conversation.messages("now")])
    assert shown == [["s", "q3", "a3", "q4", "a4", "now"], ["s", "q4", "a4", "now"], ["s", "now"]]
    assert len(conversation.turns) == 10


# -- what is written to a terminal


def test_control_characters_are_taken_out() -> None:
    assert harmless("a\x1b[31mb\r\x07\x7f\x9b2Jc\td\n\u202ee\u2069 \ud800") == "a[31mb2Jc\td\ne ?"
    assert harmless("é [bold] 日本 \U0001f98a") == "é [bold] 日本 \U0001f98a"
    assert one_line("a\nb\x1b\t c") == "a b c"


def screen(written: str) -> list[str]:
    """What a terminal of unlimited width shows."""
    lines = [""]
    for part in re.findall(r"\x1b\[\d+D\x1b\[K|\n|[^\x1b\n]+", written):
        erased = re.fullmatch(r"\x1b\[(\d+)D\x1b\[K", part)
        if erased:
            cells = cell_len(lines[-1]) - int(erased[1])
            while cell_len(lines[-1]) > cells:
                lines[-1] = lines[-1][:-1]
        elif part == "\n":
            lines.append("")
        else:
            lines[-1] += part
    return lines


def wrapped(text: str, width: int, step: int) -> list[str]:
    out: list[str] = []
    wrap = Wrap(out.append, lambda: width)
    for i in range(0, len(text), step):
        wrap.push(text[i : i + step])
    return [line.rstrip() for line in screen("".join(out))]


TEXT = (
    "The quick brown fox\n\n    jumps over\tthe lazy dog, " + "x" * 50 + " und läuft davon. " + "日本語" * 9
)


@pytest.mark.parametrize("width", [10, 21, 40, 80])
def test_lines_are_broken_between_words(width: int) -> None:
    whole = wrapped(TEXT, width, len(TEXT))
    assert all(cell_len(line) < width for line in whole)
    for step in (1, 2, 3, 7):
        assert wrapped(TEXT, width, step) == whole
    assert "".join("".join(whole).split()) == "".join(TEXT.split())
    words = {word for line in whole for word in line.split()}
    short = {word for word in TEXT.split() if cell_len(word) < min(width - 1, 9)}
    assert short <= words


def test_wide_characters_fill_the_line() -> None:
    assert wrapped("日" * 9, 9, 1) == ["日" * 4, "日" * 4, "日"]
    assert wrapped("ab 日本x", 9, 1) == ["ab 日本x"]


# -- through a pipe


def chat(
    lines: str, *options: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    code = main(["chat", *options])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_answers_alone_go_to_stdout(
    endless_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    talk = tmp_path / "talk.json"
    lines = f"hello [b]you[/b]\n\n/set\n/stats\n/system be brief\n/save {talk}\nagain \\\nand again"
    model = [str(endless_path), "-t", "1", "-n", "8", "--seed", "3"]
    code, out, err = chat(lines, *model, monkeypatch=monkeypatch, capsys=capsys)
    assert code == 0
    saved = Conversation.load(talk)
    assert next(turn["content"] for turn in saved.turns) == "hello [b]you[/b]"
    assert saved.system == "be brief"
    assert out.startswith(harmless(saved.turns[1]["content"]))
    assert "\x1b" not in out + err
    for word in ("max_tokens = 8", "sparsity = predicted", "layer", f"Saved to {talk}"):
        assert word in err and word not in out
    # The same again from the file: the second question alone.
    code, second, _ = chat(
        f"/load {talk}\nagain \\\nand again\n", *model, monkeypatch=monkeypatch, capsys=capsys
    )
    assert code == 0 and second and out.endswith(second)


def test_a_mixture_s_chat_says_where_experts_were(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = mixtures.write(tmp_path / "m.gguf", "mixtral")
    options: dict[str, Any] = {"n_ctx": 256, "n_batch": 16, "n_threads": 1, "verbose": False}
    with Llama(path, devices="host", vram_budget=6.6 / 1024, **options) as llm:
        talk = Chat(llm, Ui(), Conversation(settings={"max_tokens": 6}))
        talk.answer("hi")
        work, layers = Work(), llm.experts()
        work.count(llm, llm.info().n_neurons)
        there = [step.n_routes_device for step in llm.last_step]
        assert 0 < sum(there) < work.routes == 3 * len(there)
        assert f"{sum(there) / work.routes:.0%} of the chosen experts on the GPU" in talk.status(
            work, stopped=False
        )
        assert "neurons" not in talk.status(work, stopped=False)
        commands.run(talk, "/stats")
        shown = capsys.readouterr().err
        rows = [line.split()[:4] for line in shown.splitlines() if re.match(r" +\d", line)]
        assert rows == [[str(i), "3", str(n), "0"] for i, n in enumerate(there)]
        share = sum(y.n_resident for y in layers) / sum(y.n_routes for y in layers)
        assert f"since it was opened: {share:.0%} of the chosen experts were on the GPU" in shown
    with Llama(path, vram_budget=0, **options) as llm:
        talk = Chat(llm, Ui(), Conversation(settings={"max_tokens": 6}))
        talk.answer("hi")
        work = Work()
        work.count(llm, llm.info().n_neurons)
        assert "GPU" not in talk.status(work, stopped=False)
        commands.run(talk, "/stats")
        assert "predicted" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/bogus", "no command /bogus"),
        ("/set stop x", "no setting"),
        ("/set stop", "no setting 'stop'; there are temperature"),
        ("/set temperature warm", "temperature must be a number, not 'warm'"),
        ("/set top_p 1e999", "a number"),
        ("/set top_p 7", "top_p is 7.0, it must be between 0 and 1"),
        ("/set temp -1", "temperature is -1.0, it must be between 0 and 1000"),
        ("/set sparsity some", "one of auto, predicted"),
        ("/set threshold nan", "must be a number"),
        ("/save", "FILE"),
        ("/load /nowhere/talk.json", "/nowhere/talk.json: No such file or directory"),
        ("/load ~nobody-here/x", "home"),
    ],
)
def test_a_wrong_command_is_one_line_and_the_chat_goes_on(
    line: str,
    message: str,
    endless_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = (str(endless_path), "-t", "1", "-n", "2")
    code, out, err = chat(f"{line}\nhello\n", *options, monkeypatch=monkeypatch, capsys=capsys)
    notices = [text for text in err.splitlines() if not text.startswith("powerinfer:")]
    assert code == 1 and len(notices) == 1 and message in notices[0] and "Errno" not in err
    assert out


def test_commands_change_the_chat(
    endless_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (
        "/set temperature 0\n/set max_tokens 6\nhello\n/reset\n/set sparsity dense\nhello\n/set\n/quit\nx\n"
    )
    code, out, err = chat(lines, str(endless_path), "-t", "1", monkeypatch=monkeypatch, capsys=capsys)
    assert code == 0 and "sparsity = dense" in err and "temperature = 0.0" in err
    first, second = out[: len(out) // 2], out[len(out) // 2 :]
    assert first == second and first.endswith("\n")


def test_the_last_question_again(
    endless_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Llama(endless_path, n_threads=1, n_ctx=128, verbose=False) as llm:
        talk = Chat(llm, Ui(), Conversation(settings={"max_tokens": 6, "seed": 1}))
        for command in ("/retry", "/undo"):
            with pytest.raises(PowerInferError, match="no question yet"):
                commands.run(talk, command)
        talk.answer("one")
        talk.answer("two")
        before = [dict(turn) for turn in talk.conversation.turns]
        commands.run(talk, "/retry")
        assert talk.conversation.turns == before  # with the same seed
        talk.conversation.settings["seed"] = 2
        commands.run(talk, "/regen")
        after = talk.conversation.turns
        assert after[:3] == before[:3] and len(after) == 4 and after[3] != before[3]
        kept = [dict(turn) for turn in after]
        talk.conversation.system = "word " * 200  # no longer fits
        talk.conversation.n_forgotten = 4
        with pytest.raises(PowerInferError, match="n_ctx is 128"):
            commands.run(talk, "/retry")
        assert talk.conversation.turns == kept and talk.conversation.n_forgotten == 4
        capsys.readouterr()
        commands.run(talk, "/undo")
        assert talk.conversation.turns == before[:2] and talk.conversation.n_forgotten == 2
        assert "Taken back: two" in capsys.readouterr().err


def test_a_question_may_begin_with_a_path(
    endless_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = (str(endless_path), "-t", "1", "-n", "2")
    code, out, _ = chat("/usr/bin holds what?\n", *options, monkeypatch=monkeypatch, capsys=capsys)
    assert code == 0 and out
    code, out, err = chat("/usr\n/\n", *options, monkeypatch=monkeypatch, capsys=capsys)
    assert code == 1 and out == "" and "no command /usr;" in err and "no command /;" in err
    assert commands.is_command("/help\nsee a/b") and not commands.is_command("/a/b\nc")


def test_an_input_that_cannot_be_read_ends_the_chat(
    endless_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A terminal that is gone, for one: the error came again and again."""

    class Gone(io.StringIO):
        n_reads = 0

        def readline(self, *size: Any) -> str:
            self.n_reads += 1
            assert self.n_reads < 3
            raise OSError(errno.EIO, "Input/output error")

    gone = Gone()
    monkeypatch.setattr(sys, "stdin", gone)
    assert main(["chat", str(endless_path), "-t", "1"]) == 1 and gone.n_reads == 1
    assert capsys.readouterr().err.endswith("powerinfer: Input/output error\n")


def test_settings_are_said_and_other_programs_words_known(
    endless_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = "/set temp 0.5\n/set temp\n/set threshold\n/?\n/clear\n/bye\nx\n"
    code, out, err = chat(lines, str(endless_path), "-t", "1", monkeypatch=monkeypatch, capsys=capsys)
    assert (code, out) == (0, "")
    assert err.count("temperature = 0.5\n") == 2 and err.count("threshold = ") == 1 and "top_k =" not in err
    assert "Tab completes" in err and "The conversation is forgotten." in err


def test_thoughts_are_shown_and_no_part_of_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = thinking(monkeypatch)
    talk = tmp_path / "talk.json"
    lines = f"a\n/set think off\nb\n/set think high\nc\n/set think\n/set think default\nd\n/save {talk}\n"
    code, out, err = chat(lines, "demo", "-t", "1", "--think", "on", monkeypatch=monkeypatch, capsys=capsys)
    assert (code, out) == (0, f"{ANSWER}\n" * 4) and err.count("think = high") == 2
    assert [one["chat_template_kwargs"] for one in asked] == [
        {"enable_thinking": True, "thinking": True},
        {"enable_thinking": False, "thinking": False},
        {"reasoning_effort": "high"},
        {},
    ]
    assert THOUGHT not in talk.read_text()
    thinking(monkeypatch, is_cut=True)
    code, out, err = chat("a\n", "demo", "-t", "1", monkeypatch=monkeypatch, capsys=capsys)
    assert (code, out) == (0, "") and "The answer ended within its thought" in err
    code, _, err = chat("/set think much\n", "demo", monkeypatch=monkeypatch, capsys=capsys)
    assert code == 1 and "think must be one of on, off, low, medium, high and default" in err


@pytest.mark.parametrize("wraps", [True, False])
def test_thoughts_in_a_terminal(wraps: bool, capsys: pytest.CaptureFixture[str]) -> None:
    ui = Ui(history=False)
    ui.interactive, ui._wraps = True, wraps
    dim, plain = ("\x1b[2m", "\x1b[0m") if wraps else ("", "")
    with ui.answering():
        ui.think("Well, they")
        ui.think(" ask.")
        ui.write(ANSWER)
        ui.write(" No.")
    assert capsys.readouterr().out == f"{dim}{THOUGHT}\n\n{plain}{ANSWER} No.\n"
    with ui.answering():  # Ctrl-C within the thought
        ui.think("Well")
        raise KeyboardInterrupt
    assert capsys.readouterr().out == f"{dim}Well ...\n{plain}"
    with ui.answering():
        ui.write(ANSWER)
    assert capsys.readouterr().out == f"{ANSWER}\n"


def test_what_a_narrow_terminal_shows_of_a_step(
    endless_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Llama(endless_path, n_ctx=64, n_threads=1, verbose=False) as llm:
        talk = Chat(llm, Ui(), Conversation(settings={"max_tokens": 2}))
        talk.answer("hi")
        monkeypatch.setattr(talk.ui, "interactive", True)
        monkeypatch.setattr(Ui, "width", 50)
        commands.run(talk, "/stats")
        lines = capsys.readouterr().err.splitlines()
        table = lines[lines.index("the last token, by layer:") + 1 :]
        head = " ".join(table[i] for i, line in enumerate(table) if line.startswith("layer"))
    for name in ("predicted", "computed", "active", "FFN kB", "FFN µs", "all kB", "all µs"):
        assert name in head
    assert max(map(len, table)) <= 50


def test_a_full_context_is_said(
    endless_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = (str(endless_path), "-t", "1", "-c", "64", "--seed", "1")
    code, out, err = chat("hi\nmore\n", *options, monkeypatch=monkeypatch, capsys=capsys)
    assert code == 1 and out.count("\n") >= 1
    assert "The context of 64 tokens is full, so the answer ends here. /reset" in err
    assert re.search(r"the prompt has \d+ tokens and n_ctx is 64\. /reset", err)
    options = (*options, "--context-shift", "-n", "100")
    code, out, err = chat("hi\nmore\n", *options, monkeypatch=monkeypatch, capsys=capsys)
    assert code == 0 and "older half of the conversation is forgotten" in err


@pytest.mark.parametrize("command", ["chat", "run"])
def test_long_things_report_their_progress(
    command: str,
    endless_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls: list[tuple[str, int, int]] = []

    class Recorder(Bar):
        def __call__(self, done: int, total: int) -> None:
            calls.append((self._text, done, total))

    for module in ("powerinfer.chat.chat", "powerinfer.cli.chat", "powerinfer.cli.run"):
        monkeypatch.setattr(f"{module}.Bar", Recorder)
    monkeypatch.setattr(sys, "stdin", io.StringIO("word " * 50))
    assert main([command, str(endless_path), "-t", "1", "-b", "16", "-n", "2"]) == 0
    loaded = [done for text, done, _ in calls if text.startswith("loading")]
    read = [done for text, done, _ in calls if text == "reading the prompt"]
    assert loaded and loaded == sorted(loaded)
    assert len(read) > 5 and read == sorted(read)


def test_a_pipe_of_processes() -> None:
    command = [sys.executable, "-m", "powerinfer.chat", "-t", "1", "--temperature", "0", "-n", "12"]
    done = subprocess.run(command, input=b"hi \xff\r\n", capture_output=True, cwd=ROOT, timeout=300)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.endswith(b"\n") and len(done.stdout.split()) > 1


def test_ctrl_c_through_a_pipe_is_130(endless_path: Path) -> None:
    command = [sys.executable, "-m", "powerinfer.chat", str(endless_path), "-t", "1", "-c", "128"]
    with subprocess.Popen(
        [*command, "--context-shift", "-n", "2000000000"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    ) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        process.stdin.write(b"hi\n")
        process.stdin.flush()
        assert process.stdout.read(20)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=300)
        assert process.returncode == 130
        assert b"Traceback" not in err


def test_what_is_saved_is_not_overwritten_by_chance(
    endless_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other, mine = tmp_path / "other.json", tmp_path / "mine.json"
    said().save(other)
    lines = f"/set temp 0\nhello\n/save {mine}\nagain\n/save {mine}\n/save {other}\n"
    options = (str(endless_path), "-t", "1", "-n", "2")
    code, _, err = chat(lines, *options, monkeypatch=monkeypatch, capsys=capsys)
    assert code == 1 and f"{other} holds another conversation; /save -f {other} replaces it" in err
    assert Conversation.load(other) == said() and len(Conversation.load(mine).turns) == 4
    lines = f"/load {mine}\n/save {mine}\n/save -f {other}\n/help\n"
    code, _, err = chat(lines, *options, monkeypatch=monkeypatch, capsys=capsys)
    assert code == 0 and Conversation.load(other) == Conversation.load(mine)
    assert Conversation.load(mine).settings["temperature"] == 0.0
    assert "Alt-Enter" in err and "history" not in err  # through a pipe nothing is kept


def test_what_tab_completes(tmp_path: Path) -> None:
    (tmp_path / "talk.json").touch()
    words = {f"/{name}": command.words for name, command in commands.COMMANDS.items()}
    completer = CommandCompleter(lambda: words)

    def found(text: str) -> list[str]:
        event = CompleteEvent(completion_requested=True)
        given = completer.get_completions(Document(text), event)
        return [text[: len(text) + one.start_position] + one.text for one in given]

    assert found("/s") == ["/system", "/set", "/stats", "/save"] and found("/set tem") == ["/set temperature"]
    assert "/set sparsity" in found("/set ") and found("hello /s") == [] == found("/set top_p ")
    assert found("") == [] == found("/bogus x")
    assert found(f"/load {tmp_path}/ta") == [f"/load {tmp_path}/talk.json"]


# -- in a terminal


class Terminal:
    """A program in a pseudo-terminal of 60 columns."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        self._master, self._slave = pty.openpty()
        # The first terminal that the leader of a new session opens becomes its own, and Ctrl-C goes to it.
        script = 'exec 0<>"$1" 1>&0 2>&0; shift; stty cols 60 rows 20; exec "$@"'
        self.process = subprocess.Popen(
            ["sh", "-c", script, "sh", os.ttyname(self._slave), *command],
            start_new_session=True,
            cwd=ROOT,
            env=env,
        )
        self.shown = ""  # and not yet waited for

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def wait_for(self, pattern: str) -> str:
        """Reads until the pattern is seen; returns what came before its end and forgets it."""
        limit = time.monotonic() + 120
        while True:
            self._answer_questions()
            plain = self.shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.shown)
            found = re.search(pattern, plain)
            if found:
                self.shown = plain[found.end() :]
                return plain[: found.end()]
            is_over = self.process.poll() is not None
            if not self._read() and (is_over or time.monotonic() > limit):
                raise AssertionError(f"{pattern!r} did not appear in {plain!r}")

    def _answer_questions(self) -> None:
        """Where the cursor is: without an answer no toolbar is drawn."""
        for _ in range(self.shown.count("\x1b[6n")):
            self.type("\x1b[5;1R")

    def _read(self) -> bool:
        """Takes what was written; False if that was nothing for a while."""
        ready, _, _ = select.select([self._master], [], [], 0.5)
        if ready:
            self.shown += os.read(self._master, 1 << 16).decode("utf-8", "replace")
        return bool(ready)

    def end(self) -> int:
        """Waits for the end of the program; returns its exit code."""
        while self.process.poll() is None:
            self._read()
        return self.process.returncode

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._slave)
        os.close(self._master)


@pytest.fixture
def terminal(endless_path: Path, tmp_path: Path) -> Iterator[Terminal]:
    env = {**os.environ, "TERM": "xterm", "HOME": str(tmp_path)}
    env.pop("XDG_STATE_HOME", None)
    command = [sys.executable, "-m", "powerinfer.chat", str(endless_path), "-t", "1", "-c", "512"]
    terminal = Terminal([*command, "--context-shift", "-n", "2000000000"], env)
    yield terminal
    terminal.close()


def test_ctrl_c_stops_the_answer_and_not_the_program(terminal: Terminal, tmp_path: Path) -> None:
    terminal.wait_for(r"Ctrl-D ends the chat")
    terminal.wait_for(r"context 0/512")
    terminal.type("hello\r")
    terminal.wait_for(r"w\d+ w\d+")
    terminal.type("\x03")
    terminal.wait_for(r"stopped · [\d.]+ tokens/s · [\d.]+% of neurons\s+computed ·\s+context \d+/512")
    terminal.wait_for(r"context \d+/512 · predicted")
    terminal.type("never sent\x03")
    terminal.wait_for(r"Ctrl-D or /quit ends")
    terminal.wait_for(r"context \d+/512 · predicted")
    terminal.type("x" * 70 + "\x1b\ry")  # a dot stands before lines of the question, not where one is broken
    terminal.wait_for(r"x\s+x{12}\s+\. y")
    terminal.type("\x7f" * 72)
    terminal.type("/system be\x1b\rnice\r")  # Alt-Enter
    terminal.wait_for(r"message is set")
    terminal.wait_for(r"context \d+/512 · predicted")
    terminal.type("/help\r")
    terminal.wait_for(r"kept\s+in\s[^;]*chat_history;\s--no-history")
    terminal.wait_for(r"context \d+/512 · predicted")
    terminal.type("\x04")
    assert terminal.end() == 0
    history = tmp_path / ".local" / "state" / "powerinfer" / "chat_history"
    typed = re.findall(r"^\+(.*)", history.read_text(), re.MULTILINE)
    assert typed == ["hello", "/system be", "nice", "/help"]
    assert history.stat().st_mode & 0o777 == 0o600
