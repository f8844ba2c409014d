"""`powerinfer serve`: a process that listens, answers, and ends when it is told to."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from powerinfer import ArgumentError
from powerinfer._engine.embedding import POOLING
from powerinfer.cli import main, parse
from powerinfer.cli.long_lived import is_glibc
from powerinfer.cli.serve import read_origins
from powerinfer.compat.llama_speculative import LlamaPromptLookupDecoding
from tests import models

pytest.importorskip("fastapi", reason="the extra powerinfer[server] is not installed")
pytest.importorskip("uvicorn", reason="the extra powerinfer[server] is not installed")


from powerinfer.server.models import Models


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_process(number: signal.Signals, code: int) -> None:
    words = ["serve", "-m", "demo", "--port", "0", "-c", "256", "-np", "2", "-a", "tiny,small", "-t", "1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "powerinfer", *words], stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert line.startswith("powerinfer: http://127.0.0.1:") and line.endswith(" serves tiny, small\n")
        address = line.split()[1]
        body = json.dumps({"prompt": "Once", "max_tokens": 3}).encode()
        request = urllib.request.Request(
            f"{address}/v1/completions", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            assert json.load(response)["model"] == "tiny"
        if is_glibc():  # it has started itself again
            assert b"glibc.malloc.tcache_count=0" in Path(f"/proc/{process.pid}/environ").read_bytes()
        process.send_signal(number)
        assert process.wait(30) == code
        assert process.stderr.read() == ""
    finally:
        process.kill()
        process.wait()
        process.stderr.close()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--port", "99999"], "--port is 99999"),
        (["-m", "a.gguf"], "two models"),
        (["--draft-max", "-1"], "--draft-max must be 0 or more"),
        (["--draft-max", "3", "--draft-ngram", "0"], "--draft-ngram at least 1"),
        (["--context-shift", "--keep", "-1"], "--keep is -1"),
        (["--keep", "4"], "--keep is for --context-shift"),
        (["--api-key", " "], "an API key is empty"),
        (["--api-key-file", "/nothing"], "cannot read the keys"),
        (["-np", "0"], "--parallel is 0"),
        (["--max-waiting", "-1"], "--max-waiting is -1"),
        (["--replicas", "0"], "--replicas is 0"),
        (["--cors", "https://example.org/"], "--cors https://example.org/: it must be an origin"),
        (["--cors", "example.org"], "it must be an origin"),
        (["--shutdown-timeout", "inf"], "--shutdown-timeout is inf"),
        (["--shutdown-timeout", "nan"], "--shutdown-timeout is nan"),
        (["--timeout", "inf"], "--timeout is inf"),
        (["--timeout", "0"], "--timeout is 0, it must be more than 0"),
        (["--max-body", "0"], "--max-body is 0, it must be more than 0"),
        (["--per-address", "-1"], "--per-address is -1"),
        (["--max-inputs", "0"], "--max-inputs is 0"),
        (["-a", "a", "-a", "b"], "2 times -a, and 1 models"),
        (["--vram-budget", "a=1"], "no model is called 'a'"),
        (["demo", "-a", "a", "-a", "a"], "two models are called 'a'"),
        (["demo", "-a", "a", "-a", "b", "--vram-budget", "a=1"], "'b' has none"),
        (["--lora", "poet"], "--lora poet: it must be NAME=FILE"),
        (["--lora", "poet=/nothing"], "/nothing"),
        (["--lora", "poet=demo"], "is no LoRA adapter: 'general.type' is 'model'"),
        (["--trusted-proxies", "10.0.0.1,proxy"], "--trusted-proxies: 'proxy'"),
        (["--host", ""], "--host is empty"),
        (["-m", ""], "two models"),
        (["--host", "192.0.2.1"], "cannot listen on 192.0.2.1"),
        (["--ssl-cert-file", __file__, "--ssl-key-file", __file__], "err: powerinfer: the certificate"),
        (["--ssl-cert-file", "/nothing"], "err: powerinfer: the certificate"),
    ],
)
def test_wrong_options(capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    model = "b.gguf" if "-m" in words else "demo"
    assert main(["serve", model, "-c", "256", "--port", "0", *words]) == 1
    err = "err: " + capsys.readouterr().err
    assert said in err and "Errno" not in err


def test_origins() -> None:
    given = [
        "*",
        "null",
        "http://localhost:3000",
        "https://Example.org",
        "chrome-extension://abc",
        "app://x.y",
    ]
    assert read_origins(given) == tuple(origin.lower() for origin in given)
    for wrong in ("", "x", "https://", "https://a/b", "https://a/", "https://a b", "https://u@a", "//a"):
        with pytest.raises(ArgumentError, match="it must be an origin"):
            read_origins([wrong])


def test_how_answers_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[tuple[int | None, object, int, bool]] = []

    def serve(given: Models, _: object) -> None:
        llm = given.first.llm
        own = llm.scheduler
        n_guesses = own.engine.measure_guesses() if own._draft else 0
        served.append((own.engine.n_keep, own._draft, n_guesses, own._improve is not None))
        llm.close()

    monkeypatch.setattr("powerinfer.server.run.serve", serve)
    common = ["serve", "demo", "-c", "64", "-t", "1"]
    assert main(common) == 0
    assert main([*common, "--context-shift", "--keep", "9", "--draft-max", "3", "--draft-ngram", "1"]) == 0
    assert main([*common, "--context-shift", "--draft", "2", "--online-statistics"]) == 0
    assert served[0] == (None, None, 0, False)
    assert served[1][0] == 9 and served[1][2] > 0
    assert served[2][0] == 1 and served[2][3]
    for (_, draft, *_), sizes in zip(served[1:], [(1, 3), (2, 2)], strict=True):
        assert isinstance(draft, LlamaPromptLookupDecoding)
        assert (draft.max_ngram_size, draft.num_pred_tokens) == sizes


def test_how_embeddings_are_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = models.SPECS["llama-relu"]
    meta = {**models.metadata(spec), "llama.pooling_type": POOLING["last"]}
    path = models.write(tmp_path / "last.gguf", meta, models.file_tensors(spec, models.draw(spec)))
    served: list[int] = []

    def serve(given: Models, _: object) -> None:
        served.append(given.first.llm.pooling)
        given.close()

    monkeypatch.setattr("powerinfer.server.run.serve", serve)
    for words in (["demo"], [str(path)], [str(path), "--pooling", "cls"]):
        assert main(["serve", *words, "-c", "64", "-t", "1"]) == 0
    assert served == [POOLING[name] for name in ("mean", "last", "cls")]


def test_several_models(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served: list[Models] = []

    def serve(given: Models, _: object) -> None:
        served.append(given)
        given.close()

    monkeypatch.setattr("powerinfer.server.run.serve", serve)
    adapter = tmp_path / "poet:1.gguf"
    meta = {"general.architecture": "llama", "general.type": "adapter", "adapter.type": "lora"}
    models.write(adapter, meta, {})  # its matrices are looked at when it is asked for
    words = ["serve", "demo", "-c", "64", "-t", "1", "-a", "a,b", "demo", "-a", "c", "--idle-unload", "1h"]
    lora = ["--lora", f"c:poet={adapter}", "--lora", f"c:cook={adapter}:0.5"]
    assert main([*words, *lora, "--vram-budget", "a=0,c=1"]) == 0
    (found,) = served
    assert found.names == ["a", "b", "c", "c:poet", "c:cook"] and found.idle_s == 3600
    first, second = found.all
    assert first.n_loads == 1 and second.n_loads == 0 and first.max_requests == 72
    assert first.group is None and second.group is not None and second.group.most == 1
    assert [(one.name, one.path, one.scale) for one in second.adapters] == [
        ("poet", str(adapter), 1.0),
        ("cook", str(adapter), 0.5),
    ]
    assert main([*words, "--vram-budget", "0"]) == 0
    assert [model.group for model in served[1].all] == [None, None]


def test_who_shares_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from powerinfer.cli.serve import served_models

    monkeypatch.setattr("powerinfer.async_llama.may_use_gpu", lambda _: True)
    args = parse(["serve", "demo", "demo"])
    one, two = served_models(args, [("a",), ("b",)])
    assert one.group is two.group is not None and one.group.most == 1


def test_keys_of_a_file(tmp_path: Path) -> None:
    import argparse

    from powerinfer.cli.serve import read_keys

    file = tmp_path / "keys"
    file.write_text("# of the team\n one \n\ntwo\n")
    assert read_keys(argparse.Namespace(api_key=["zero"], api_key_file=file)) == ("zero", "one", "two")


def test_help_begins_with_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    text = capsys.readouterr().out
    assert text.index("examples:") < text.index("positional arguments")
