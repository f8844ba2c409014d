"""The commands: what goes to stdout and what to stderr, exit codes, and info."""

from __future__ import annotations

import io
import json
import math
import os
import shlex
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from powerinfer import Llama, __version__
from powerinfer._text.table import columns, facts
from powerinfer._text.terminal import Aside
from powerinfer.cli import COMMANDS, main, parse
from powerinfer.cli.answers import lora_arguments, system_text
from powerinfer.cli.llama_cpp import llama_cpp_words
from powerinfer.cli.options import sampling_arguments
from tests import models
from tests.powerinfer.thinking import thinking

ROOT = Path(__file__).resolve().parents[2]
Captured = pytest.CaptureFixture[str]


def run_module(*words: str, **options: object) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "powerinfer", *words]
    return subprocess.run(command, capture_output=True, cwd=ROOT, timeout=300, **options)  # type: ignore[call-overload, no-any-return]


# -- usage and errors


def test_version_and_help(capsys: Captured) -> None:
    for words in (["--version"], ["--help"], [], *([name, "--help"] for name in COMMANDS)):
        with pytest.raises(SystemExit) as end:
            main(words)
        assert end.value.code == 0
        out = capsys.readouterr().out
        assert out
        assert (f"powerinfer {__version__}\n" == out) == (words == ["--version"])


@pytest.mark.parametrize(
    ("closed", "words", "code", "out", "err"),
    [
        ("0<&-", "run demo", 1, "", "powerinfer: the prompt is empty\n"),
        ("0<&-", "chat demo", 0, "", None),
        ("1>&-", "run demo hi -n 3", 0, "", ""),
        ("1>&-", "info demo", 0, "", ""),
        ("2>&-", "run nosuch.gguf hi", 1, "", ""),
        ("0<&- 1>&- 2>&-", "run demo hi -n 3", 0, "", ""),
    ],
)
def test_closed_streams(closed: str, words: str, code: int, out: str, err: str | None) -> None:
    command = f"exec {shlex.quote(sys.executable)} -m powerinfer {words} {closed}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert (done.returncode, done.stdout) == (code, out)
    assert err is None or done.stderr == err


def test_help_of_the_whole_imports_no_command() -> None:
    code = """if 1:
        import sys
        from powerinfer.cli import main
        try:
            main(["--help"])
        except SystemExit:
            pass
        print(*(name for name in ("rich", "prompt_toolkit", "jinja2", "tokenizers") if name in sys.modules),
              file=sys.stderr)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=ROOT, timeout=300)
    assert done.stderr == b"\n" and b"bench" in done.stdout


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["fly"], "powerinfer: error: argument COMMAND: invalid choice: 'fly'"),
        (["show", "demo"], "powerinfer: error: there is no command show; is info meant?"),
        (["serv"], "there is no command serv; is serve meant?"),
        (["run"], "powerinfer run: error: the following arguments are required: MODEL"),
        (["run", "demo", "x", "--n-ctx", "many"], "'many' is not a number of tokens, nor auto"),
        (["run", "demo", "x", "-ngl", "4x"], "'4x' is not a number of layers, nor all or auto"),
        (["serve", "demo", "--vram-budget", "a=much"], "'a=much' is not a list like a=6,b=2"),
        (["chat", "--sparsity", "most"], "powerinfer chat: error: argument --sparsity: invalid choice"),
        (["info"], "powerinfer info: error: the following arguments are required: MODEL"),
        (
            ["bench", "demo", "--top-k", "3"],
            "powerinfer bench: error: unrecognized arguments: --top-k 3; powerinfer bench --help lists",
        ),
        (
            ["predictor", "svd", "demo", "--x"],
            "powerinfer predictor svd: error: unrecognized arguments: --x;",
        ),
        (["run", "demo", "why", "is", "it"], "unrecognized arguments: is it (put the prompt in quotes);"),
        (["run", "demo", "x", "--temprature", "3"], "--temprature 3 (is --temperature meant?);"),
    ],
)
def test_wrong_usage_is_2(words: list[str], says: str, capsys: Captured) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "usage: powerinfer" in captured.err and says in captured.err


def test_what_llama_cpp_calls_them() -> None:
    words = (
        "-m m.gguf -p hi -ngl 99 -fa on --ctx-size 64 -ub 8 -ctk q8_0 -ctv f16 --mlock --predict 3 --jinja"
    )
    args = parse(llama_cpp_words(["run", *words.split()]))
    assert (args.model, args.prompt_option, args.n_gpu_layers, args.n_ctx) == ("m.gguf", "hi", 99, 64)
    assert (args.n_ubatch, args.type_k, args.type_v, args.use_mlock) == (8, "q8_0", "f16", True)
    assert args.max_tokens == 3 and parse(["run", "m.gguf", "x", "--n-predict", "4"]).max_tokens == 4
    assert parse(["run", "-hf", "a/b:Q4_0", "hi"]).model == "hf:a/b:Q4_0"
    assert [parse(["run", "m", "x", "-ngl", n]).n_gpu_layers for n in ("all", "0")] == [-1, 0]


def test_commands_of_llama_cpp_are_understood() -> None:
    served = (
        "-m m.gguf -cb --cont-batching --metrics --slots --props --embeddings --reranking --no-warmup --mmap "
        "-dev CUDA0,cuda:1 -to 30 --repeat-last-n 9 --presence-penalty 1 --frequency-penalty .5 --typical .9 "
        "--mirostat 2 --mirostat-ent 4 --mirostat-lr 0.2"
    )
    args = parse(["serve", *served.split()])
    assert (args.model, args.devices, args.timeout) == (["m.gguf"], ["cuda:0", "cuda:1"], 30)
    expected = {"penalty_last_n": 9, "presence_penalty": 1, "frequency_penalty": 0.5, "typical_p": 0.9}
    expected |= {"mirostat_mode": 2, "mirostat_tau": 4, "mirostat_eta": 0.2}
    chosen = sampling_arguments(args)
    assert {name: chosen[name] for name in expected} == expected
    args = parse(["run", "m.gguf", "-st", "--no-display-prompt", "-r", "x", "-r", "y", "--ignore-eos", "hi"])
    assert (args.stop, args.ignore_eos, args.prompt) == (["x", "y"], True, "hi")
    assert parse(["chat", "m.gguf", "--system-prompt", "a", "--color"]).system == "a"


def test_words_of_llama_bench_and_llama_quantize(capsys: Captured) -> None:
    words = "bench -m m.gguf -p 64 -n 8 -fa 1 -mmp 0"
    args = parse(llama_cpp_words(words.split()))
    assert (args.model, args.n_gen, args.use_mmap) == ("m.gguf", ["8"], False)
    assert parse(["bench", "m.gguf", "-mmp", "1"]).use_mmap and parse(["bench", "m.gguf"]).use_mmap
    with pytest.raises(SystemExit):
        parse(["bench", "m.gguf", "-mmp", "yes"])
    assert "'yes' is neither 0 nor 1" in capsys.readouterr().err
    args = parse(["quantize", "a.gguf", "b.gguf", "Q4_K_M", "8"])
    assert (args.type, args.n_threads_last) == ("Q4_K_M", 8)


def test_where_answers_end(capsys: Captured) -> None:
    words = ["run", "demo", "Once upon", "--raw", "--temp", "0", "-t", "1", "-n"]
    assert main([*words, "8"]) == 0
    whole = capsys.readouterr().out.rstrip("\n")
    assert main([*words, "8", "-r", whole[9:12]]) == 0
    assert capsys.readouterr().out.rstrip("\n") == whole[: whole.index(whole[9:12])]
    words = ["run", "demo", "Hi", "--temp", "0", "-t", "1", "-n", "60", "-v"]
    context = []
    for more in ([], ["--ignore-eos"]):
        assert main([*words, *more]) == 0
        context.append(int(capsys.readouterr().err.rpartition("context ")[2].partition("/")[0]))
    assert context[0] < context[1]


def test_the_chat_template_of_a_file(tmp_path: Path, capsys: Captured) -> None:
    file = tmp_path / "t.jinja"
    file.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    words = ["run", "demo", "Once upon", "--temp", "0", "-t", "1", "-n", "8"]
    assert main([*words, "--raw"]) == 0
    text = capsys.readouterr().out
    assert main([*words, "--chat-template-file", str(file)]) == 0
    assert capsys.readouterr().out == text.lstrip()
    for content, more, says in (
        ("{% if %}", [], f"the chat template 'of {file}' is broken"),
        (" ", [], "is empty"),
        ("x", ["--chat-format", "chatml"], "one of them is enough"),
    ):
        file.write_text(content)
        assert main([*words, "--chat-template-file", str(file), *more]) == 1
        assert says in capsys.readouterr().err
    file.unlink()
    assert main([*words, "--chat-template-file", str(file)]) == 1
    assert "No such file" in capsys.readouterr().err


def test_the_system_message_of_a_file(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "s.txt").write_text("Be kind.\n")
    for command in (["run", "demo", "hi"], ["chat"]):
        assert system_text(parse([*command, "-sysf", str(tmp_path / "s.txt")])) == "Be kind."
        assert system_text(parse([*command, "-sys", "Be brief."])) == "Be brief."
        assert main([*command, "-sysf", str(tmp_path / "none")]) == 1
        assert main([*command, "-sysf", "a", "-sys", "b"]) == 1
        err = capsys.readouterr().err
        assert "No such file" in err and "one of them is enough" in err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("run m x -cnv", "`powerinfer chat MODEL` is a conversation"),
        ("serve m --n-cpu-moe 4", "experts beyond it stay with the CPU by themselves"),
        ("chat m --cpu-moe", "a small one leaves the experts to the CPU"),
        ("run m x -ot exps=CPU", "`powerinfer plan` shows what goes there"),
        ("run m x -ts 3,1", "--vram-budget 8,6"),
        ("serve m -tb 4", "-t is for prompts, too"),
        ("serve m -ngld 9", "gets a part of --vram-budget by itself"),
        ("serve m --rope-freq-base 10000", "what the model's file says is used"),
        ("serve m --chat-template chatml", "--chat-format NAME"),
        ("serve m --reasoning-budget 0", "reasoning_effort"),
        ("run m x -hff x.gguf", "-hf OWNER/REPO:NAME.gguf"),
        ("chat m --lora-scaled a.gguf 0.5", "--lora FILE:SCALE"),
        ("run m x --reasoning-budget 0", "--think off"),
        ("serve m --cache-ram 100", "--kv-tokens"),
        ("bench m -ngl 99", "--vram-budget GIB"),
        ("bench m -o json", "--json"),
        ("bench m -sm none", "--vram-budget 8,8"),
        ("quantize a b Q4_0 --imatrix x.dat", "rounded for their own sake"),
    ],
)
def test_what_to_use_instead(words: str, says: str, capsys: Captured) -> None:
    with pytest.raises(SystemExit) as end:
        main(words.split())
    err = capsys.readouterr().err
    assert end.value.code == 2 and "is not an option here: " in err and says in err


@pytest.mark.parametrize("words", [["chat"], ["chat", "-m"], ["run", "-p", "hi", "-m"], ["info"]])
def test_an_empty_name_is_no_model(words: list[str], capsys: Captured) -> None:
    """A variable that is not set: the demo is not what was asked for."""
    assert main([*words, ""]) == 1
    assert "the model's path is empty" in capsys.readouterr().err
    assert parse(["serve", "-m", ""]).model == [""] and parse(["serve"]).model == ["demo"]


def test_nothing_at_all_is_help(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    with pytest.raises(SystemExit) as end:
        main([])
    captured = capsys.readouterr()
    assert end.value.code == 0 and "usage: powerinfer COMMAND" in captured.out and captured.err == ""
    typed = io.StringIO("hi")
    monkeypatch.setattr(typed, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", typed)
    assert main(["run", "nowhere.gguf"]) == 1
    assert capsys.readouterr().err.startswith("powerinfer: type the prompt; Ctrl-D on a new line ends it\n")


@pytest.mark.parametrize(
    "words",
    [
        ["run", "nowhere.gguf", "x"],
        ["chat", "nowhere.gguf"],
        ["info", "nowhere.gguf"],
        ["bench", "nowhere.gguf"],
        ["info", "."],
        ["info", "bad\x1b[31m.gguf"],
        ["run", "demo", " "],
        ["run", "demo", "x", "--vram-budget", "8"],
        ["run", "demo", "x", "--vram-budget", "8,8", "--devices", "cuda:0,cuda:1"],
        ["run", "demo", "x", "--vram-budget", "1", "--devices", "tpu"],
        ["run", "demo", "x", "--n-ctx", "-3"],
        ["run", "demo", "x", "--top-p", "nan"],
        ["run", "demo", "x", "--chat-format", "nonsense"],
        ["run", "demo", "x", "--raw", "--system", "y"],
        ["run", "demo", "word " * 3000],
        ["chat", "demo", "--min-p", "nan"],
        ["serve", "demo", "--presence-penalty", "nan"],
        ["serve", "demo", "--typical", "5"],
        ["run", "demo", "x", "--repeat-last-n", "-5"],
        ["bench", "demo", "-p", "0", "-n", "0"],
        ["bench", "demo", "-r", "0"],
        ["bench", "demo", "-p", "-1"],
        ["bench", "demo", "-p", "12,x"],
        ["bench", "demo", "-n", "1,,2"],
        ["bench", "demo", "-pg", "512"],
        ["bench", "demo", "-pg", "512,0"],
        ["bench", "demo", "-d", "1_0"],
        ["bench", "demo", "-t", "0"],
        ["bench", "demo", "-p", "9999999999"],
        ["bench", "demo", "--sparsity", "dense,most"],
    ],
)
def test_an_error_is_one_line_and_1(
    words: list[str], capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
    assert main(words) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("powerinfer: ") and captured.err.count("\n") == 1
    assert "\x1b" not in captured.err


def test_a_file_that_is_no_model(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "letter.gguf"
    path.write_text("dear reader")
    for words in (["run", str(path), "x"], ["info", str(path)], ["bench", str(path)]):
        assert main(words) == 1
        captured = capsys.readouterr()
        assert captured.out == "" and "letter.gguf" in captured.err and captured.err.count("\n") == 1


# -- run


def test_run_prints_the_answer_alone(llama_answer: tuple[str, str], capsys: Captured) -> None:
    prompt, answer = llama_answer
    assert main(["run", "demo", prompt, "--temperature", "0", "-n", "24", "-t", "1"]) == 0
    captured = capsys.readouterr()
    assert captured.out == answer and captured.err == ""


@pytest.fixture(scope="module")
def llama_answer() -> tuple[str, str]:
    """A prompt, and what the demo says to it."""
    prompt = "Hello! Who are you?"
    with Llama.demo(n_threads=1, n_batch=128) as llm:
        messages = [{"role": "user", "content": prompt}]
        result = llm.create_chat_completion(messages, temperature=0, max_tokens=24)
    text = str(result["choices"][0]["message"]["content"]).lstrip()
    return prompt, text if text.endswith("\n") else text + "\n"


def test_run_reads_a_prompt_from_a_pipe(llama_answer: tuple[str, str]) -> None:
    prompt, answer = llama_answer
    words = ("run", "demo", "--temperature", "0", "-n", "24", "-t", "1", "-v")
    env = {**os.environ, "NO_COLOR": "1", "PYTHONIOENCODING": "ascii"}
    done = run_module(*words, input=prompt.encode() + b"\n", env=env)
    assert done.returncode == 0
    assert done.stdout == answer.encode("ascii", "replace")
    assert b"tokens/s" in done.stderr and b"\x1b" not in done.stderr


class InATerminal(Aside):
    def __init__(self) -> None:
        self._enabled, self._is_open = True, False


def test_run_shows_thoughts_beside_the_answer(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    asked = thinking(monkeypatch)
    words = ["run", "demo", "hi", "-t", "1", "-n", "9"]
    assert main([*words, "--think", "off"]) == 0
    assert capsys.readouterr() == ("Yes.\n", "")  # no terminal, no thought
    monkeypatch.setattr("powerinfer.cli.run.Aside", InATerminal)
    assert main([*words, "--think", "low"]) == 0
    assert capsys.readouterr() == ("Yes.\n", "\x1b[2mWell, they ask.\x1b[0m\n\n")
    assert [one.get("chat_template_kwargs") for one in asked] == [
        {"enable_thinking": False, "thinking": False},
        {"reasoning_effort": "low"},
    ]
    thinking(monkeypatch, is_cut=True)
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert out == "" and "the answer ended within its thought" in err
    assert main(["run", "demo", "hi", "--raw", "--think", "on"]) == 1
    assert "--think is about chat templates" in capsys.readouterr().err


def test_the_form_of_an_answer(tmp_path: Path, capsys: Captured) -> None:
    pytest.importorskip("llguidance", reason="the extra powerinfer[grammar] is not installed")
    schema = '{"type": "object", "properties": {"a": {"enum": [7]}}, "required": ["a"], "maxProperties": 1}'
    (tmp_path / "g.gbnf").write_text('root ::= "left" | "right"')
    (tmp_path / "s.json").write_text(schema)
    words = ["run", "demo", "Where?", "-t", "1", "-n", "60", "-s", "1"]
    for options, expected in (
        (["--grammar", 'root ::= "left"'], ("left",)),
        (["--grammar-file", str(tmp_path / "g.gbnf"), "--raw"], ("left", "right")),
    ):
        assert main([*words, *options]) == 0
        assert capsys.readouterr().out.strip() in expected
    for options in (["-j", schema], ["-jf", str(tmp_path / "s.json")]):
        assert main([*words, *options]) == 0
        assert json.loads(capsys.readouterr().out) == {"a": 7}
    assert main([*words, "-j", "{}", "-n", "5"]) == 0
    assert capsys.readouterr().out.startswith("{")
    for options, says in (
        (["--grammar", 'root ::= "a'], "the grammar is not valid"),
        (["-j", "{"], "the JSON schema is not valid"),
        (["-jf", str(tmp_path / "none")], "No such file"),
    ):
        assert main([*words, *options]) == 1
        captured = capsys.readouterr()
        assert says in captured.err and captured.out == ""


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], {}),
        (["--lora", "a.gguf"], {"lora_path": ["a.gguf"], "lora_scale": [1.0]}),
        (
            ["--lora", "a.gguf:0.5", "--lora", "C:b"],
            {"lora_path": ["a.gguf", "C:b"], "lora_scale": [0.5, 1.0]},
        ),
    ],
)
def test_adapters(words: list[str], expected: dict[str, object]) -> None:
    for command in (["run", "demo", "hi"], ["chat"]):
        assert lora_arguments(parse([*command, *words])) == expected


def test_adapters_that_cannot_be(capsys: Captured) -> None:
    for command in (["run", "demo", "hi"], ["chat"]):
        for value, says in (("none.gguf", "none.gguf: cannot open"), ("a:nan", "the scale is no number")):
            assert main([*command, "--lora", value]) == 1
            assert says in capsys.readouterr().err


def test_run_raw_continues_the_prompt(relu_path: Path, capsys: Captured) -> None:
    with Llama(relu_path, n_threads=1) as llm:
        text = llm("a b", temperature=0, max_tokens=5)["choices"][0]["text"]
    assert main(["run", str(relu_path), "a b", "--raw", "--temperature", "0", "-n", "5", "-t", "1"]) == 0
    shown = "".join(c for c in text if c in "\t\n" or (ord(c) >= 0x20 and not 0x7F <= ord(c) < 0xA0))
    assert capsys.readouterr().out.removesuffix("\n") == shown.removesuffix("\n")


def test_a_reader_that_goes_away_is_no_error() -> None:
    command = (
        f"{sys.executable} -m powerinfer info demo --keys --tensors | head -n 1; echo ${{PIPESTATUS[0]}}"
    )
    done = subprocess.run(["bash", "-c", command], capture_output=True, cwd=ROOT, timeout=300)
    assert done.stderr == b""
    assert done.stdout.startswith(b"file ") and done.stdout.split()[-1] in (b"0", b"141")


# -- info


def test_info_says_what_runs(relu_path: Path, sparse_path: Path, bpe_path: Path, capsys: Captured) -> None:
    said = {}
    for name, path in (("relu", relu_path), ("sparse", sparse_path), ("silu", bpe_path)):
        assert main(["info", str(path), "--keys", "--tensors"]) == 0
        said[name] = capsys.readouterr().out
    assert "exact by default; silent neurons' up and down rows are skipped" in said["relu"]
    assert "predicted by default; silent neurons' up and down" in said["sparse"]
    assert "PowerInfer GGUF v3" in said["sparse"] and "predictor" in said["sparse"]
    assert "dense: no neuron is ever silent" in said["silu"]
    assert "blk.0.ffn_down.weight" in said["relu"] and "general.architecture" in said["relu"]


def test_info_as_json(sparse_path: Path, capsys: Captured) -> None:
    assert main(["info", str(sparse_path), "--json", "--keys", "--tensors"]) == 0
    out = json.loads(capsys.readouterr().out)
    spec = models.SPECS["llama-relu"]
    assert out["model"]["n_layer"] == spec.n_layer and out["model"]["n_ff"] == spec.n_ff
    assert out["file"]["is_powerinfer"] and out["cannot_run"] is None
    assert sum(out["bytes_by_type"].values()) == sum(t["n_bytes"] for t in out["tensors"])
    assert out["keys"]["general.architecture"] == {"type": "string", "value": "llama"}


def test_info_of_a_file_that_cannot_run(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(path, "nobody\x1b[2Jknows")
    writer.add_name("a\x1b]0;title\x07 [bold]name[/bold]\nline")
    writer.add_float32("strange", math.inf)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert main(["info", str(path), "--keys"]) == 0
    out = capsys.readouterr().out
    assert "cannot run" in out and "[bold]name[/bold]\\nline" in out
    assert not any(ord(c) < 0x20 and c != "\n" for c in out)
    assert main(["info", str(path), "--json"]) == 0
    out = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name))
    assert out["model"] is None and "nobody" in out["cannot_run"]


def test_info_of_a_split_file(tmp_path: Path, capsys: Captured) -> None:
    writer = gguf.GGUFWriter(tmp_path / "parts.gguf", "nobody", split_max_tensors=2)
    for i in range(5):
        writer.add_tensor(f"tensor {i}", np.zeros((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    parts = sorted(tmp_path.iterdir())
    assert len(parts) == 3
    for part in parts:
        assert main(["info", str(part), "--tensors"]) == 0
        out = capsys.readouterr().out
        assert "in 3 parts, 5 tensors" in out and "tensor 4" in out


def test_columns_and_facts_fit_the_width() -> None:
    rows = [["a", "1"], ["日本語", "22"], ["long " * 9, "3"]]
    assert list(columns(rows[:2], right=(1,))) == ["a        1", "日本語  22"]
    assert list(columns([["a", "b"], ["x", "long long words are wrapped"]], width=20)) == [
        *("a  b", "x  long long words", "   are wrapped")
    ]
    parts = [["budget", "tokens/s", "gain"], ["4 GiB", "12.5", "3.1"]]
    for width, wanted in (
        (24, ["budget  tokens/s  gain", "4 GiB       12.5   3.1"]),
        (20, ["budget  tokens/s", "4 GiB       12.5", "", "budget  gain", "4 GiB    3.1"]),
    ):
        assert list(columns(parts, right=range(1, 3), width=width)) == wanted
    assert list(facts([("a", "b c"), ("long", "x" * 30)])) == ["a     b c", "long  " + "x" * 30]
    assert list(facts([("name", "one two three four five")], width=26)) == [
        "name  one two three four",
        "      five",
    ]
