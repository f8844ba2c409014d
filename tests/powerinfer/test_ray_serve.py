"""Replicas behind one route and map_batches on a local Ray cluster: for `make slow`, skipped without Ray."""

from __future__ import annotations

import http.client
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from powerinfer import ArgumentError, Llama
from powerinfer.integrations import ray_serve

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = (ROOT / "docs" / "integrations.md").read_text("utf-8").split("\n## Ray\n")[1]
QUESTIONS = [
    "What is 2 plus 3?",
    "What is 4 plus 5?",
    "What is a cat?",
    "What is a river?",
    "What is 7 plus 1?",
]


def test_arguments() -> None:
    with pytest.raises(ArgumentError, match="model=FILE is missing"):
        ray_serve.app({})
    with pytest.raises(ArgumentError, match="replicas=many is not a number"):
        ray_serve.app({"model": "demo", "replicas": "many"})


def test_answers_are_those_of_one_by_one() -> None:
    import numpy as np

    answers = ray_serve.Answers(
        "demo", n_parallel=3, sampling={"temperature": 0, "max_tokens": 24}, n_ctx=256
    )
    try:
        batch = answers({"id": np.arange(5), "prompt": np.array(QUESTIONS, dtype=object)})
        with pytest.raises(ArgumentError, match="no column 'prompt'; they have 'text'"):
            answers({"text": np.array(["x"])})
    finally:
        answers.close()
    assert batch["id"].tolist() == [0, 1, 2, 3, 4]
    assert batch["answer"].tolist() == one_by_one()


def one_by_one() -> list[str]:
    with Llama.demo(n_ctx=256, verbose=False) as llm:
        return [
            str(
                llm.create_chat_completion(
                    [{"role": "user", "content": question}], temperature=0, max_tokens=24
                )["choices"][0]["message"]["content"]
            )
            for question in QUESTIONS
        ]


def need_ray() -> Any:
    ray = pytest.importorskip("ray", reason="powerinfer[ray] is not installed")
    pytest.importorskip("ray.serve", reason="powerinfer[ray] is not installed")
    pytest.importorskip("fastapi", reason="powerinfer[server] is not installed")
    return ray


def outside_of_this_process(tmp_path: Path) -> dict[str, str]:
    """The environment of a program that starts a cluster of its own.

    `ray.init` sets variables for programs that belong to its cluster, RAY_AUTH_MODE among them: a cluster
    that takes that over, with another HOME, waits in vain for a token.
    """
    others = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**others, "PYTHONPATH": path, "HOME": str(tmp_path), "RAY_ADDRESS": "local"}


def ask(port: int) -> str | None:
    """The answer to the first question; None: nobody answers yet."""
    body = {"messages": [{"role": "user", "content": QUESTIONS[0]}], "temperature": 0, "max_tokens": 24}
    try:
        status, text = post(port, body, key="secret")
    except (ConnectionError, http.client.HTTPException):
        return None
    return str(json.loads(text)["choices"][0]["message"]["content"]) if status == 200 else None


@pytest.mark.parametrize("form", ["words", "file"])
def test_serve_run_as_documented(form: str, tmp_path: Path) -> None:
    need_ray()
    document = DOCUMENT.replace("/models/bamboo-7b.gguf", "demo").replace("replicas=4", "replicas=2")
    (line,) = re.findall(r"^serve run .*$", document, re.MULTILINE)
    (config,) = re.findall(
        r"^```yaml\n(.*?)^```", document.replace("replicas: 4", "replicas: 2"), re.M | re.S
    )
    (tmp_path / "powerinfer.yaml").write_text(config)
    words = shlex.split(line if form == "words" else f"serve run {tmp_path / 'powerinfer.yaml'}")
    words[0] = str(Path(sys.executable).with_name("serve"))
    if shutil.which(words[0]) is None:
        pytest.skip("the program `serve` is not beside this Python")
    with (tmp_path / "said").open("w+b") as said:
        program = subprocess.Popen(
            words, env=outside_of_this_process(tmp_path), stdout=said, stderr=said, start_new_session=True
        )
        try:
            answer, until = None, time.monotonic() + 150
            while answer is None and program.poll() is None and time.monotonic() < until:
                time.sleep(1)
                answer = ask(8000)
            said.seek(0)
            assert answer == one_by_one()[0], said.read().decode("utf-8", "replace")
            wrong, _ = post(8000, {"messages": []}, key="wrong")
            assert wrong == (422 if form == "words" else 401)
            program.send_signal(signal.SIGINT)
            program.wait(60)
        finally:
            if program.poll() is None:
                os.killpg(program.pid, signal.SIGKILL)
                program.wait()
    assert ask(8000) is None


@pytest.mark.parametrize("name", ["deployment", "Answers"])
def test_python_as_documented(name: str, tmp_path: Path) -> None:
    need_ray()
    if name == "Answers":
        pytest.importorskip("ray.data", reason="pandas and pyarrow are not installed")
    blocks = re.findall(r"^```python\n(.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL)
    (code,) = [block for block in blocks if f"import {name}" in block]
    if name == "deployment":
        code += """
from tests.powerinfer.test_ray_serve import ask
print(ask(8000))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=outside_of_this_process(tmp_path),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0 and "2 plus 3 is 5." in done.stdout, done.stdout + done.stderr


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    ray = need_ray()
    root = str(ROOT)
    names = ("POWERINFER_LIBRARY", "POWERINFER_ISA")
    environment = {name: os.environ[name] for name in names if name in os.environ}
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    ray.init(
        num_cpus=4,  # what Ray hands out; more than there are is no harm here
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {**environment, "PYTHONPATH": path}},
    )
    yield ray
    ray.shutdown()


@pytest.fixture(scope="module")
def port(cluster: Any) -> Iterator[int]:
    from ray import serve

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    server = {"api_keys": ("k1",)}
    serve.run(
        ray_serve.deployment(
            "demo", replicas=2, num_cpus=0.5, n_parallel=2, n_ctx=512, n_threads=1, server=server
        )
    )
    yield port
    serve.shutdown()


def post(port: int, body: object, key: str = "k1") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return response.status, text


def test_replicas_answer(port: int) -> None:
    from ray import serve

    states = serve.status().applications["default"].deployments["powerinfer"].replica_states
    assert {str(getattr(state, "value", state)): n for state, n in states.items() if n} == {"RUNNING": 2}
    expected = one_by_one()
    for question, wanted in zip(QUESTIONS, expected, strict=True):
        body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 24}
        status, text = post(port, body)
        assert status == 200, text
        assert json.loads(text)["choices"][0]["message"]["content"] == wanted


def test_streams_go_through(port: int) -> None:
    body = {
        "messages": [{"role": "user", "content": QUESTIONS[0]}],
        "temperature": 0,
        "max_tokens": 24,
        "stream": True,
    }
    status, text = post(port, body)
    events = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    assert status == 200 and events[-1] == "[DONE]" and len(events) > 5
    pieces = [json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events[:-1]]
    assert "".join(pieces) == one_by_one()[0]


def test_keys_and_the_page(port: int) -> None:
    assert post(port, {"messages": []}, key="wrong")[0] == 401
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/")
    response = connection.getresponse()
    assert response.status == 200 and b"<title>PowerInfer</title>" in response.read()


def test_map_batches(cluster: Any) -> None:
    data = pytest.importorskip("ray.data", reason="pandas and pyarrow are not installed")
    rows = data.from_items([{"prompt": question} for question in QUESTIONS])
    result = rows.map_batches(
        ray_serve.Answers,
        fn_constructor_kwargs={
            "model": "demo",
            "sampling": {"temperature": 0, "max_tokens": 24},
            "n_ctx": 256,
        },
        concurrency=1,
        num_cpus=0.5,
        batch_size=3,
    )
    assert {row["prompt"]: row["answer"] for row in result.take_all()} == dict(
        zip(QUESTIONS, one_by_one(), strict=True)
    )


# -- several replicas: which of them gets a request


def test_beginnings() -> None:
    need_ray()
    from powerinfer.integrations.ray_router import beginnings

    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
    first, second = beginnings({"messages": turns[:1]}), beginnings({"messages": turns, "max_tokens": 5})
    assert len(first) == 1 and second[:1] == first and len(second) == 2
    assert beginnings({"messages": turns[:1], "system": "Be brief"})[0] != first[0]
    text = "x" * 300
    assert len(beginnings({"prompt": text})) == 3
    assert beginnings({"prompt": text + "y" * 300})[:3] == beginnings({"prompt": text})
    assert beginnings({"prompt": "short"}) != beginnings({"prompt": "other"})
    for odd in (None, 5, [], {}, {"messages": 5}, {"messages": [None]}, {"prompt": ""}):
        assert len(beginnings(odd)) <= 1


TWO_NODES = """
import http.client, json, sys, threading, time
from collections import Counter
import ray
from ray import serve
from ray.cluster_utils import Cluster
from powerinfer.ray_serve import deployment

cluster = Cluster()
for dashboard in ({"include_dashboard": False}, {}):
    cluster.add_node(num_cpus=2, **dashboard)
ray.init(address=cluster.address, log_to_driver=False)
port = int(sys.argv[1])
serve.start(http_options={"host": "127.0.0.1", "port": port})

def run(**more):
    options = {"num_cpus": 2, "n_parallel": 2, "n_ctx": 1024, "n_threads": 1}
    serve.run(deployment("demo", **options, **more))

def begin(path, body):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    return connection.getresponse()

def post(path, body):
    response = begin(path, body)
    return response.status, response.read().decode()

def n_running():
    states = serve.status().applications["default"].deployments["powerinfer"].replica_states
    return {str(getattr(state, "value", state)): n for state, n in states.items()}.get("RUNNING", 0)

# A replica fills a node: there is one on each of the two.
run(replicas=2)
assert len({node["NodeID"] for node in ray.nodes() if node["Alive"]}) == 2 and n_running() == 2
cached = []
for i in range(6):
    messages = [{"role": "user", "content": f"Story number {i}. " + "Tell me about the sea. " * 20}]
    for turn in range(3):
        body = {"messages": messages, "max_tokens": 16, "temperature": 0}
        status, text = post("/v1/chat/completions", body)
        assert status == 200, text
        answer = json.loads(text)
        usage = answer["usage"]
        cached.append((turn, usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]))
        messages += [answer["choices"][0]["message"], {"role": "user", "content": "Go on."}]
assert all(n > 0.7 * n_prompt for turn, n, n_prompt in cached if turn), cached

body = {"prompt": "Once", "max_tokens": 60, "temperature": 0, "stream": True}
status, text = post("/v1/completions", body)
assert status == 200 and text.rstrip().endswith("data: [DONE]"), text
assert post("/v1/completions", {"prompt": 5})[0] == 422
# What a client has left is not computed to its end.
begin("/v1/completions", body | {"max_tokens": 900, "ignore_eos": True}).close()
def sum_of(name):
    found = [http.client.HTTPConnection("127.0.0.1", port) for _ in range(8)]
    for connection in found:
        connection.request("GET", "/metrics")
    lines = [line for c in found for line in c.getresponse().read().decode().splitlines()]
    return max(float(line.split()[1]) for line in lines if line.startswith(name))
until = time.monotonic() + 20
while not sum_of('powerinfer_generations_total{reason="cancelled"}') and time.monotonic() < until:
    time.sleep(0.1)
assert sum_of('powerinfer_generations_total{reason="cancelled"}') == 1
serve.delete("default")

# One, and as many open requests as two can take: the second node gets a replica, and gives it back.
run(autoscaling={"min_replicas": 1, "max_replicas": 2, "upscale_delay_s": 1, "downscale_delay_s": 2,
                 "look_back_period_s": 2, "metrics_interval_s": 0.5})
assert n_running() == 1
until, most = time.monotonic() + 60, 0

def work(i):
    while time.monotonic() < until and most < 2:
        body = {"prompt": f"Once {i}", "max_tokens": 200, "ignore_eos": True}
        assert post("/v1/completions", body)[0] == 200

threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
for thread in threads:
    thread.start()
while time.monotonic() < until and most < 2:
    most = max(most, n_running())
    time.sleep(0.5)
for thread in threads:
    thread.join()
assert most == 2
until = time.monotonic() + 60
while n_running() > 1 and time.monotonic() < until:
    time.sleep(0.5)
assert n_running() == 1
print("scaled to 2 and back")
serve.shutdown()
ray.shutdown()
cluster.shutdown()
"""


def test_two_nodes(tmp_path: Path) -> None:
    """Conversations go where they were computed before, and replicas come and go with the queue."""
    need_ray()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = outside_of_this_process(tmp_path)
    del environment["RAY_ADDRESS"]
    done = subprocess.run(
        [sys.executable, "-c", TWO_NODES, str(port)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0 and "scaled to 2 and back" in done.stdout, done.stdout + done.stderr
