"""How a process ends while a model is open, answers are under way in other threads, or in a child that was
forked: with the status that was asked for, without a crash, and soon."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import models

ROOT = Path(__file__).resolve().parents[2]

BEGIN = """
import asyncio, ctypes, gc, os, signal, sys, threading, time
from powerinfer import AsyncLlama, Llama

options = {"n_ctx": 128, "n_threads": 2, "n_batch": 16, "verbose": False}
options |= {"devices": "host", "vram_budget": 1} if sys.argv[2] == "host" else {"vram_budget": 0}

def in_thread():
    llm, begun = Llama(sys.argv[1], **options), threading.Event()
    def answer():
        while True:
            for _ in llm.create_completion([1, 5], max_tokens=100, temperature=1.0, stream=True):
                begun.set()
    threading.Thread(target=answer, daemon=True).start()
    assert begun.wait(60)
    return llm

def streams():
    llm = AsyncLlama(sys.argv[1], n_parallel=4, **options)
    async def begin():
        given = {"max_tokens": 100, "temperature": 1.0, "stop": "zebra", "stream": True}
        parts = [await llm.create_completion([1, 5], **given) for _ in range(4)]
        for each in parts:
            await anext(each)
        return llm, parts
    return begin()
"""

FORK = """
child = os.fork()
if not child:
    signal.alarm(60)
    {}
    sys.exit(0)
sys.exit(3 if os.waitpid(child, 0)[1] == 0 else 1)
"""

WAYS = {
    "open": "llm = Llama(sys.argv[1], **options); llm.create_completion([1, 5], max_tokens=4); sys.exit(3)",
    "thread": "llm = in_thread(); sys.exit(3)",
    "thread, nobody else has it": "in_thread(); gc.collect(); sys.exit(3)",
    "thread, exit() of C": "llm = in_thread(); ctypes.CDLL(None).exit(3)",
    "streams": "kept = asyncio.run(streams()); sys.exit(3)",
    "streams, the loop is left": "kept = asyncio.new_event_loop().run_until_complete(streams()); sys.exit(3)",
    "streams, exit() of C": "kept = asyncio.run(streams()); ctypes.CDLL(None).exit(3)",
    "hook": """
def hook(ids, logits):
    if len(ids) > 5:
        sys.exit(3)
Llama(sys.argv[1], **options).create_completion([1, 5], max_tokens=20, logits_processor=hook)
""",
    "opening": """
def work():
    while True:
        Llama(sys.argv[1], **options).create_completion([1, 5], max_tokens=2)
        done.set()
done = threading.Event()
threading.Thread(target=work, daemon=True).start()
assert done.wait(60)
time.sleep(0.01)
sys.exit(3)
""",
    "fork": "llm = in_thread()" + FORK.format("pass"),
    "fork, the child drops it": "llm = in_thread()" + FORK.format("del llm; gc.collect()"),
    "fork, nothing under way": "llm = Llama(sys.argv[1], **options)" + FORK.format("del llm; gc.collect()"),
    "fork beside streams": "kept = asyncio.run(streams())" + FORK.format("del kept; gc.collect()"),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = models.SPECS["llama-relu"]
    out = tmp_path_factory.mktemp("end") / "m.gguf"
    return models.write_sparse(out, spec, models.draw_predictor(spec), 0.0)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("device", ["none", "host"])
@pytest.mark.parametrize("way", WAYS)
def test_a_process_ends(way: str, device: str, path: Path) -> None:
    done = subprocess.run(
        # Python 3.12 warns of a fork beside threads, which is what is tried here.
        [
            sys.executable,
            "-W",
            "ignore::DeprecationWarning",
            "-c",
            BEGIN + WAYS[way],
            str(path),
            device,
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT), "MALLOC_PERTURB_": "165"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stderr) == (3, "")
