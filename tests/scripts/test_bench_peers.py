"""The comparison with llama-cpp-python, which a small stand-in plays here."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts import make_mixture, make_model

ROOT = Path(__file__).resolve().parents[2]

STAND_IN = """
import os, signal, sys, time
__version__ = "9.9"
print("noise on stdout")

def llama_print_system_info():
    return b"CPU : NONE = 1 "

def llama_synchronize(ctx):
    assert ctx == "ctx"

class Llama:
    ctx = "ctx"
    def __init__(self, path, *, n_ctx, n_batch, n_ubatch, n_threads, n_threads_batch, verbose, crash=""):
        assert os.path.exists(path) and n_threads == n_threads_batch == 1 and not verbose
        if crash == "start":
            raise ValueError("no such architecture")
        self.crash, self.n_ctx, self.held = crash, n_ctx, 0
    def n_vocab(self):
        return 512
    def reset(self):
        self.held = 0
    def eval(self, tokens):
        assert all(type(token) is int and 0 <= token < 512 for token in tokens)
        self.held += len(tokens)
        assert self.held <= self.n_ctx
        if self.crash == "prompt" and len(tokens) > 1:
            print("something about tiles", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.crash == "decode" and len(tokens) == 1:
            raise RuntimeError("llama_decode returned -1")
        time.sleep(0.001 * len(tokens))
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    paths = {"gguf": folder / "m.gguf", "powerinfer": folder / "m.powerinfer.gguf"}
    make_model.write(paths, make_model.SHAPES["tiny-llama"], "m", "F16", rank=96)
    return paths


@pytest.fixture
def peer(tmp_path: Path) -> Path:
    folder = tmp_path / "stand-in"
    folder.mkdir()
    (folder / "llama_cpp.py").write_text(STAND_IN, encoding="utf-8")
    return folder


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "bench_peers.py"), *map(str, words)]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


SMALL = ("-p", "8", "-n", "4", "-r", "2", "-t", "1", "--no-ceiling")


def test_rounds_ratios_and_what_they_were_made_with(models: dict[str, Path], peer: Path) -> None:
    words = ("--peer-built-with=-DX=1", "--sparsity", "dense,exact", "--json")
    done = run(models["gguf"], "--peer-path", peer, *SMALL, *words)
    assert done.returncode == 0 and done.stdout.count("\n") == 1, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert [(r["test"], r["mode"]) for r in report["results"]] == [
        ("pp8", "dense"),
        ("tg4", "dense"),
        ("tg4", "exact"),
    ]
    assert report["powerinfer"]["model_digest"] and report["powerinfer"]["architecture"] == "llama"
    described = report["peers"]["stand-in"]
    assert (described["version"], described["built_with"]) == ("9.9", "-DX=1")
    assert described["system_info"] == "CPU : NONE = 1" and described["failures"] == {}
    for r in report["results"]:
        mine, theirs = r["powerinfer"]["samples"], r["peers"]["stand-in"]["samples"]
        assert len(mine) == len(theirs) == 2
        assert 0 < max(theirs) <= 1000  # tokens/s: each takes at least a millisecond
        ratios = [a / b for a, b in zip(mine, theirs, strict=True)]
        assert r["peers"]["stand-in"]["ratio"] == pytest.approx(sum(ratios) / 2)
    dense, exact = report["results"][1:]
    assert dense["bytes_per_token"] > exact["bytes_per_token"]
    # The peer knows one mode: it was measured once, and stands beside each of ours.
    assert dense["peers"]["stand-in"]["samples"] == exact["peers"]["stand-in"]["samples"]
    assert report["idle_cpu"] < 0.5


@pytest.mark.parametrize(
    ("crash", "failed", "said"),
    [
        pytest.param(
            "prompt",
            {"pp8"},
            "SIGSEGV: something about tiles",
            marks=pytest.mark.skipif(
                "asan" in os.environ.get("LD_PRELOAD", ""), reason="the sanitizer answers that signal itself"
            ),
        ),
        pytest.param("decode", {"tg4"}, "returned -1", marks=pytest.mark.slow),
        pytest.param("start", {"pp8", "tg4"}, "no such architecture", marks=pytest.mark.slow),
    ],
)
def test_a_peer_that_fails_is_named(
    crash: str, failed: set[str], said: str, models: dict[str, Path], peer: Path
) -> None:
    words = (models["gguf"], "--peer-path", peer, "--peer-option", f"crash={crash}", *SMALL)
    done = run(*words, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    failures = report["peers"]["stand-in"]["failures"]
    assert set(failures) == failed and all(said in why for why in failures.values())
    for r in report["results"]:
        assert len(r["powerinfer"]["samples"]) == 2
        assert bool(r["peers"]) == (r["test"] not in failed)
    shown = run(*words)
    assert shown.returncode == 0 and "failed in" in shown.stdout and said.split(":")[0] in shown.stdout
    assert all(len(line) <= 80 for line in shown.stdout.splitlines())


def test_a_powerinfer_file_beside_its_plain_twin(models: dict[str, Path], peer: Path) -> None:
    alone = run(models["powerinfer"], "--peer-path", peer, *SMALL)
    assert alone.returncode == 1 and "--peer-model" in alone.stderr and "Traceback" not in alone.stderr
    both = run(models["powerinfer"], "--peer-model", models["gguf"], "--peer-path", peer, *SMALL, "--json")
    report = json.loads(both.stdout)
    assert [r["mode"] for r in report["results"]] == ["dense", "dense", "exact", "predicted"]
    assert report["powerinfer"]["model"] != report["peers"]["stand-in"]["model"] == "m.gguf"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--peer-option", "crash"), "KEY=VALUE"),
        (("-p", "x"), "'x'"),
        (("-p", "0", "-n", "0"), "nothing to measure"),
        (("-r", "0"), "nothing to measure"),
        (("--sparsity", "most"), "most"),
        (("--sparsity", "predicted"), "predictor"),
    ],
)
def test_what_is_refused(words: tuple[str, ...], said: str, models: dict[str, Path], peer: Path) -> None:
    done = run(models["gguf"], "--peer-path", peer, *SMALL, *words)
    assert done.returncode == 1 and said in done.stderr and done.stdout == ""
    assert done.stderr.count("\n") == 1


def test_the_pip_line_where_it_is_missing(models: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "llama_cpp.py").write_text("raise ImportError('not here')", encoding="utf-8")
    done = run(models["gguf"], "--peer-path", tmp_path, *SMALL)
    assert done.returncode == 1 and "pip install llama-cpp-python" in done.stderr
    assert "Traceback" not in done.stderr


def test_bytes_of_experts_are_told(peer: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    make_mixture.write(path, make_mixture.SHAPES["tiny-qwen3moe"], "m", "Q8_0", make_mixture.Law())
    done = run(path, "--peer-path", peer, *SMALL)
    assert done.returncode == 0, done.stderr
    # 3 layers, 4 of 32 experts, 3 matrices of 256 x 256 in 34 bytes of 32 weights
    assert re.search(
        r"a decoded token uses 3 MB of experts \(4 of 32\) of the [34] MB that are read", done.stdout
    )


BENCH = """#!{python}
import json, sys
words = sys.argv[1:]
given = dict(zip(words[::2], words[1::2]))
if given["-fa"] == "2":
    sys.exit("no such attention")
tests = [(int(given["-p"]), 0), (0, int(given["-n"]))]
rate = 100 * (1 + int(given["-fa"]))
print(json.dumps([
    {{"build_commit": "abc", "backends": "CUDA", "gpu_info": "a card", "n_prompt": p, "n_gen": n,
      "samples_ns": [int(1e9 * (p + n) / rate)] * int(given["-r"])}} for p, n in tests]))
"""


@pytest.mark.skipif(os.name == "nt", reason="the stand-in is a script")
def test_llama_bench_in_several_ways_and_our_budget(models: dict[str, Path], tmp_path: Path) -> None:
    program = tmp_path / "llama-bench"
    program.write_text(BENCH.format(python=sys.executable), encoding="utf-8")
    program.chmod(0o755)
    ways = [f"--peer-arguments= -fa {n}" for n in range(3)]
    words = ("--peer-bench", program, *ways, *SMALL, "--sparsity", "dense")
    done = run(models["gguf"], *words, "--vram-budget", "0.5", "--devices", "host", "--json")
    report = json.loads(done.stdout)
    assert report["powerinfer"]["plan"].startswith("plan: ")
    slow, fast, wrong = (report["peers"][f"llama-bench -fa {n}"] for n in range(3))
    assert slow["system_info"] == "CUDA a card" and fast["arguments"] == ["-fa", "1"]
    assert set(wrong["failures"]) == {"pp8", "tg4"} and "no such attention" in wrong["failures"]["pp8"]
    for r in report["results"]:
        speeds = [r["peers"][f"llama-bench -fa {n}"]["samples"] for n in range(2)]
        assert speeds == [pytest.approx([100] * 2), pytest.approx([200] * 2)]
    modes = run(models["gguf"], *words[:-1], "dense,exact", "--vram-budget", "1", "--devices", "host")
    assert modes.returncode == 1 and "one mode" in modes.stderr
