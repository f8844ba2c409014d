"""A stand-in for the Hugging Face Hub: repositories of files, over HTTP, with the hub's ways to fail."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """What it has and what it does; everything may be changed while it runs."""

    repos: dict[str, dict[str, bytes]]
    address: str = ""
    mirror: str = ""
    """The same server under another name: where content comes from when `redirects`."""
    token: str = ""
    """That every request must send, but to the mirror, where it must not be sent."""
    redirects: bool = False
    cut_after: int = 0
    """The next answers with content end after so many bytes, n_cuts of them."""
    n_cuts: int = 0
    corrupt: bool = False
    gated: set[str] = field(default_factory=set)
    """Repositories that everybody sees and nobody gets."""
    mute: set[str] = field(default_factory=set)
    """Those for whose files it hangs up."""
    listed: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What the list says of a repository's files instead of the truth."""
    asked: list[str] = field(default_factory=list)
    """Method, path and range of each request."""
    leaked: list[str] = field(default_factory=list)

    def environment(self, home: Path) -> dict[str, str]:
        """For a process that shall use it: the client reads these when it is imported."""
        found = {**os.environ, "HF_ENDPOINT": self.address, "HF_HOME": str(home)}
        found |= {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1"}
        found |= {"NO_PROXY": "127.0.0.1,localhost"}
        for name in ("HF_HUB_OFFLINE", "HF_TOKEN", "HF_HUB_CACHE"):
            found.pop(name, None)
        return found


def _git(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _entry(path: str, data: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"rfilename": path, "size": len(data), "blobId": _git(data)}
    if path.endswith(".gguf"):
        entry["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 100}
    return entry


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_HEAD(self) -> None:
        self.answer(False)

    def do_GET(self) -> None:
        self.answer(True)

    def answer(self, with_body: bool) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        ranged = self.headers.get("Range", "")
        hub.asked.append(f"{self.command} {path} {ranged}".strip())
        given = self.headers.get("Authorization", "")
        on_mirror = path.startswith("/mirror/")
        if on_mirror and given:
            hub.leaked.append(given)
        if hub.token and not on_mirror and given != f"Bearer {hub.token}":
            return self.send(401, {"X-Error-Code": "RepoNotFound"}, b"{}", with_body)
        for repo, files in hub.repos.items():
            if path == f"/api/models/{repo}":
                about = {
                    "id": repo,
                    "sha": COMMIT,
                    "siblings": [{**_entry(n, d), **hub.listed.get(repo, {})} for n, d in files.items()],
                }
                listed = json.dumps(about).encode()
                return self.send(200, {"Content-Type": "application/json"}, listed, with_body)
            for base in (f"/{repo}/resolve/main/", f"/{repo}/resolve/{COMMIT}/", f"/mirror/{repo}/"):
                if path.startswith(base) and path.removeprefix(base) in files:
                    if repo in hub.mute:
                        self.close_connection = True
                        return
                    if repo in hub.gated:
                        return self.send(403, {"X-Error-Code": "GatedRepo"}, b"{}", with_body)
                    return self.content(repo, path.removeprefix(base), on_mirror, ranged, with_body)
        self.send(404, {"X-Error-Code": "RepoNotFound"}, b"{}", with_body)

    def content(self, repo: str, name: str, on_mirror: bool, ranged: str, with_body: bool) -> None:
        hub, data = self.hub, self.hub.repos[repo][name]
        etag = hashlib.sha256(data).hexdigest() if name.endswith(".gguf") else _git(data)
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}
        if hub.redirects and not on_mirror:
            headers |= {"Location": f"{hub.mirror}/mirror/{repo}/{name}", "X-Linked-Etag": f'"{etag}"'}
            headers |= {"X-Linked-Size": str(len(data))}
            return self.send(302, headers, b"", with_body)
        if hub.corrupt:
            data = bytes(len(data) - 1) + b"x"
        status, begin = 200, 0
        if ranged:
            begin = int(ranged.removeprefix("bytes=").partition("-")[0])
            if begin >= len(data):
                return self.send(416, {"Content-Range": f"bytes */{len(data)}"}, b"", with_body)
            status = 206
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        self.send(status, headers, data[begin:], with_body)

    def send(self, status: int, headers: dict[str, str], body: bytes, with_body: bool) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if not with_body:
            return
        if self.hub.n_cuts and len(body) > self.hub.cut_after > 0:
            self.hub.n_cuts -= 1
            self.wfile.write(body[: self.hub.cut_after])
            self.close_connection = True
            return
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


@contextmanager
def serving(repos: dict[str, dict[str, bytes]]) -> Iterator[Hub]:
    hub = Hub(repos)
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    port = server.server_address[1]
    hub.address, hub.mirror = f"http://127.0.0.1:{port}", f"http://localhost:{port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
