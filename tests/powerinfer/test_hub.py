"""Models from a hub: a local stand-in for it, with the real client."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from powerinfer import ArgumentError, UnsupportedError
from powerinfer.models.hub import choose, download

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = "someone/model-GGUF"
NAMES = [
    "README.md",
    "big-00001-of-00002.gguf",
    "big-00002-of-00002.gguf",
    "activation/activation_0.pt",
    "activation/activation_1.pt",
    "other/activation/x",
    "small.Q4_0.gguf",
]


@pytest.mark.parametrize(
    ("pattern", "wanted"),
    [
        ("*Q4_0.gguf", ["small.Q4_0.gguf", *NAMES[3:5]]),
        ("big*.gguf", [*NAMES[1:5]]),
        (NAMES[1], [*NAMES[1:5]]),
    ],
)
def test_choice(pattern: str, wanted: list[str]) -> None:
    assert choose(REPO, NAMES, pattern, ()) == (wanted[0], wanted)
    assert choose(REPO, NAMES, pattern, ["READ*"])[1] == [*wanted, "README.md"]


@pytest.mark.parametrize(
    "name", ["../up.gguf", "a/../../up.gguf", "/etc/up.gguf", "a\\..\\up.gguf", "a//up.gguf"]
)
def test_names_that_lead_elsewhere(name: str) -> None:
    with pytest.raises(ArgumentError, match="leads out"):
        choose(REPO, [name], None, ())


def test_choices_that_cannot_be() -> None:
    for pattern, message in ((None, "several"), ("*.bin", "small.Q4_0.gguf"), ("*", "several")):
        with pytest.raises(ArgumentError, match=message):
            choose(REPO, NAMES, pattern, ())
    with pytest.raises(ArgumentError, match="big-00002-of-00002"):
        choose(REPO, NAMES[1:2], None, ())
    with pytest.raises(ArgumentError, match="no file"):
        choose(REPO, NAMES, NAMES[-1], ["*.md5"])
    with pytest.raises(ArgumentError, match="there are none"):
        choose(REPO, [], None, ())
    assert choose(REPO, ["sub/m.gguf", "sub/activation/a", "activation/b"], None, ())[1] == [
        "sub/m.gguf",
        "sub/activation/a",
    ]


@pytest.fixture
def hub(relu_path: Path) -> Iterator[str]:
    """The address of a server with one repository."""
    files = {"tiny/relu.gguf": relu_path.read_bytes(), "tiny/activation/activation_0.pt": b"counts"}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.answer(False)

        def do_GET(self) -> None:
            self.answer(True)

        def answer(self, with_body: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            status, body, headers = 404, b"{}", {"X-Error-Code": "RepoNotFound"}
            if path == f"/api/models/{REPO}/tree/main":
                listed = [
                    {"type": "file", "path": n, "size": len(d), "oid": "0" * 40} for n, d in files.items()
                ]
                status, body, headers = 200, json.dumps(listed).encode(), {"Content-Type": "application/json"}
            name = path.removeprefix(f"/{REPO}/resolve/main/").removeprefix(f"/{REPO}/resolve/{COMMIT}/")
            if name in files:
                status, body = 200, files[name]
                headers = {"ETag": f'"{hashlib.sha1(body).hexdigest()}"', "X-Repo-Commit": COMMIT}
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


SCRIPT = """
import sys
from powerinfer import Llama, PowerInferError
kind, repo, folder = sys.argv[1:]
options = {"local_dir": folder} if kind == "folder" else {"cache_dir": folder}
options |= {"verbose": False, "n_threads": 1}
try:
    llm = Llama.from_pretrained(repo, "*.gguf" if kind == "folder" else None, **options)
    print(llm.model_path)
    print(len(llm("the", max_tokens=2, temperature=0.0)["choices"][0]["text"]) > 0)
except PowerInferError as error:
    print(type(error).__name__, error)
"""


def run(hub: str, kind: str, repo: str, folder: Path) -> list[str]:
    """In a process of its own: the client reads the hub's address when it is imported."""
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub,
        "HF_HOME": str(folder / "home"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_XET": "1",
        "NO_PROXY": "127.0.0.1",
    }
    environment.pop("HF_HUB_OFFLINE", None)
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, kind, repo, str(folder / "files")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parents[2],
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""  # verbose=False: no progress
    return result.stdout.splitlines()


@pytest.mark.parametrize("kind", ["folder", "cache"])
def test_from_pretrained(hub: str, kind: str, tmp_path: Path, relu_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    path, works = run(hub, kind, REPO, tmp_path)
    assert works == "True" and Path(path).read_bytes() == relu_path.read_bytes()
    assert (Path(path).parent / "activation" / "activation_0.pt").read_bytes() == b"counts"
    if kind == "folder":
        assert Path(path) == tmp_path / "files" / "tiny" / "relu.gguf"


def test_errors_of_the_hub(hub: str, tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    assert run(hub, "cache", "nobody/nothing", tmp_path)[0].startswith("FileError nobody/nothing: ")
    assert run(hub, "cache", "no/such/name", tmp_path)[0].startswith("ArgumentError 'no/such/name'")


def test_without_huggingface_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UnsupportedError, match=r"powerinfer\[hub\]"):
        download(REPO)
