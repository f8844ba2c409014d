"""scripts/bench_server.py on the demo model, briefly, with hostile clients beside those that are measured."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from bench_server import while_all_stream

pytest.importorskip("uvicorn", reason="the extra powerinfer[server] is not installed")

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench_server.py"


def test_what_is_measured() -> None:
    words = "--clients 2 --warm 0.1 --tokens 4 --hostile idle,unread,cancelled --rude 1 --json"
    for seconds in (0.5, 5, 50):  # a busy machine answers less in a second
        command = [sys.executable, str(SCRIPT), *words.split(), "--seconds", str(seconds)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        said = json.loads(done.stdout)
        (row,) = said["rows"]
        if row["answers"] and row["hostile"]["cancelled"]:
            break
    assert row["clients"] == 2 and row["wrong"] == [] and set(row["statuses"]) == {"200"}
    # Two answers may have begun before the time that counts, and two end behind it.
    assert 0 < row["tokens_per_s"] <= 4 * (row["answers"] + 4) / seconds
    assert 0 <= row["steady_s"] <= seconds and (row["steady_tokens_per_s"] is None) == (row["steady_s"] == 0)
    for name in ("first_ms", "between_ms"):
        assert 0 < row[name][0] <= row[name][1]
    assert row["hostile"]["cancelled"] > 0 and said["machine"]["cores"] > 0


def test_what_comes_while_all_stream() -> None:
    """Two answers of two, with a pause between two of one of them; the third begins before the time, and the
    last part of the fourth is behind it."""
    answers = [
        [(0.0, 1.0), (2.0, 2.0), (5.0, 1.0)],
        [(1.0, 1.0), (3.0, 4.0), (9.0, 1.0)],
        [(6.0, 1.0), (7.0, 1.0), (8.0, 8.0)],
        [(10.0, 1.0), (12.0, 1.0)],
    ]
    assert while_all_stream(answers, 2, 0.5, 11.0) == (2 + 4 + 1 + 1 + 8, (5 - 1) + (8 - 6))
    assert while_all_stream(answers, 1, 0.5, 11.0) == (2 + 1 + 1 + 4 + 1 + 1 + 8 + 1, 8.5 + 1)
    assert while_all_stream(answers, 3, 0.5, 11.0) == (0, 0)


def test_a_server_that_is_wrong_is_told() -> None:
    """Nothing listens there."""
    words = "--clients 1 --seconds 0.2 --warm 0 --url http://127.0.0.1:9"
    done = subprocess.run([sys.executable, str(SCRIPT), *words.split()], capture_output=True, text=True)
    assert done.returncode == 1 and "WRONG ConnectionRefusedError" in done.stdout


def test_a_server_may_close_between_two_answers() -> None:
    """As llama-server does, and without saying so."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            parts = [{"choices": [{"text": "a"}]}, {"choices": [], "usage": {"completion_tokens": 1}}]
            data = "".join(f"data: {said}\n\n" for said in [*map(json.dumps, parts), "[DONE]"]).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
            self.close_connection = True

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        words = f"--clients 2 --seconds 0.3 --warm 0 --json --url http://127.0.0.1:{server.server_port}"
        command = [sys.executable, str(SCRIPT), *words.split()]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    (row,) = json.loads(done.stdout)["rows"]
    assert row["wrong"] == [] and row["answers"] > 2
