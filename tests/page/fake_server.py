"""A stand-in for the server: hands out the page with its headers and streams what a test wrote down."""

from __future__ import annotations

import json
import mimetypes
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[2] / "powerinfer" / "server" / "page"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)


@dataclass
class Reply:
    """One answer to a chat completion."""

    pieces: Iterable[str] = ()
    status: int = 200
    message: str = ""
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    hold: threading.Event | None = None
    """Waited for before the last piece."""
    finish: str | None = "stop"
    """None: the stream breaks off."""
    error: str | None = None
    """An error inside the stream, after the pieces."""
    pause_s: float = 0.0
    newline: str = "\n"


class FakeServer(ThreadingHTTPServer):
    """Answers on a free port of the loopback. Replies are taken in order; when none is left it echoes."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.replies: deque[Reply] = deque()
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.models = ["demo"]
        self.n_ctx = 4096
        self.engine: dict[str, Any] = engine_state()
        self.gone = threading.Event()
        """Set when a client left in the middle of a stream."""
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def handle_error(self, *_: object) -> None:
        pass  # browsers close connections as they please


class Handler(BaseHTTPRequestHandler):
    server: FakeServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        if path == "/v1/models":
            self.send_object(
                {
                    "object": "list",
                    "data": [
                        {"id": name, "meta": {"n_ctx": self.server.n_ctx}} for name in self.server.models
                    ],
                }
            )
        elif path == "/v1/engine":
            self.send_object(self.server.engine)
        else:
            file = PAGE / ("index.html" if path == "/" else path.lstrip("/"))
            if file.parent == PAGE and file.is_file():
                kind = mimetypes.guess_type(file.name)[0] or "application/octet-stream"
                self.send_bytes(200, file.read_bytes(), kind, {"Content-Security-Policy": POLICY})
            else:
                self.send_object({"error": {"message": "Not found"}}, 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(body)
        self.server.keys.append(self.headers.get("Authorization"))
        question = body["messages"][-1]["content"]
        reply = self.server.replies.popleft() if self.server.replies else Reply([f"You said: {question}"])
        if reply.status != 200:
            error = {
                "message": reply.message,
                "type": "invalid_request_error",
                "param": None,
                "code": reply.code,
            }
            self.send_object({"error": error}, reply.status, reply.headers)
        else:
            self.stream(reply)

    def stream(self, reply: Reply) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        pieces = list(reply.pieces)
        try:
            for k, piece in enumerate(pieces):
                if reply.hold and k == len(pieces) - 1:
                    while not reply.hold.wait(0.02):
                        self.event(": still there", reply)  # a client that left is noticed by writing
                self.event(data({"delta": {"content": piece}, "finish_reason": None}), reply)
                time.sleep(reply.pause_s)
            if reply.error is not None:
                self.event("data: " + json.dumps({"error": {"message": reply.error}}), reply)
            elif reply.finish is not None:
                self.event(data({"delta": {}, "finish_reason": reply.finish}), reply)
                usage = {
                    "prompt_tokens": 5,
                    "completion_tokens": len(pieces),
                    "total_tokens": 5 + len(pieces),
                }
                self.event("data: " + json.dumps({"choices": [], "usage": usage}), reply)
                self.event("data: [DONE]", reply)
        except OSError:
            self.server.gone.set()
        self.close_connection = True

    def event(self, text: str, reply: Reply) -> None:
        self.wfile.write((text + reply.newline * 2).encode())
        self.wfile.flush()

    def send_object(self, body: object, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_bytes(status, json.dumps(body).encode(), "application/json", headers or {})

    def send_bytes(self, status: int, body: bytes, kind: str, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


def data(choice: dict[str, Any]) -> str:
    return "data: " + json.dumps({"choices": [{"index": 0, **choice}]})


def engine_state(n_layer: int = 32, device: bool = True) -> dict[str, Any]:
    """What /v1/engine may say of a model with these layers."""
    gib = 2**30
    return {
        "model": "demo",
        "n_ctx": 4096,
        "n_layer": n_layer,
        "n_ff": 14336,
        "tokens_per_second": 38.4,
        "prompt_tokens_per_second": 512.0,
        "running": 1,
        "waiting": 0,
        "kv_used": 0.23,
        "vram": {"budget_bytes": 8 * gib, "used_bytes": int(7.4 * gib), "device": "NVIDIA RTX 4090"}
        if device
        else None,
        "layers": [
            {
                "computed": 0.06 + 0.3 * (layer / n_layer) ** 2 + 0.03 * (layer % 3),
                "on_device": (0.75 - 0.5 * layer / n_layer) if device else 0.0,
                "where": "both" if device else "cpu",
            }
            for layer in range(n_layer)
        ],
        "experts": None,
    }


def expert_state(n_layer: int, n_expert: int, n_used: int, device: bool = True) -> dict[str, Any]:
    """The same of a mixture, whose experts are used unevenly; of each layer's experts the most used third is
    on the device."""
    state = engine_state(n_layer, device)
    layers = []
    for layer in range(n_layer):
        weight = [((e * 37 + layer * 11) % n_expert + 1) ** -0.7 for e in range(n_expert)]
        used = [min(1000, round(1000 * n_used * w / sum(weight))) for w in weight]
        border = sorted(used)[-max(1, n_expert // 3)]
        there = "".join(str(int(device and n >= border)) for n in used)
        layers.append({"used": used, "on_device": there})
        state["layers"][layer] |= {"computed": 1}
    state["experts"] = {
        "n_expert": n_expert,
        "n_used": n_used,
        "hit_rate": 0.76 if device else 0.0,
        "routes": {
            "device": 7600 if device else 0,
            "streamed": 400 if device else 0,
            "cpu": 2000 if device else 10000,
        },
        "copies": 812 if device else 0,
        "copied_bytes": 812 * 2654208 if device else 0,
        "layers": layers,
    }
    return state
