"""Every endpoint of the server against its OpenAPI description, with requests that schemathesis makes up.

    python scripts/check_openapi.py [--examples 100] [--model demo]

Needs schemathesis. Ends with its exit code: 0 if no answer was a server's error, none had a status, type or
shape that the description does not have, and nothing that the description forbids was accepted.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# Not asked: that whatever the description allows is accepted. A prompt may be too long, a model not exist.
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "missing_required_header",
    "unsupported_method",
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--examples", type=int, default=100)
    parser.add_argument("--model", default="demo")
    args = parser.parse_args()
    program = shutil.which("schemathesis", path=str(Path(sys.executable).parent)) or "schemathesis"
    # Answers are short, and those that ask for more are refused, so that many requests take little time.
    words = ["serve", args.model, "--port", "0", "-c", "256", "-n", "16", "-a", "demo", "--timeout", "20"]
    # Not a pipe, which would be full one day and hold the server.
    log = tempfile.NamedTemporaryFile("w+")  # noqa: SIM115  (closed below, after the server)
    server = subprocess.Popen([sys.executable, "-m", "powerinfer", *words], stderr=log)
    try:
        while not (line := Path(log.name).read_text()).endswith("\n") and server.poll() is None:
            time.sleep(0.05)
        if "http://" not in line:
            print(line, file=sys.stderr)
            return 1
        address = line.split()[1]
        options = ["--max-examples", str(args.examples), "--seed", "1", "--checks", ",".join(CHECKS)]
        # Its examples database and reports go where nobody looks.
        with tempfile.TemporaryDirectory() as folder:
            code = subprocess.run(
                [program, "run", f"{address}/openapi.json", *options], cwd=folder, check=False
            ).returncode
        server.send_signal(signal.SIGTERM)
        server.wait()
        # Headers that no HTTP client would send are refused by the HTTP layer, which says so.
        said = (
            Path(log.name)
            .read_text()
            .partition("\n")[2]
            .replace("WARNING:  Invalid HTTP request received.\n", "")
        )
        # And names of fields that nobody knows are many here.
        said = "".join(line for line in said.splitlines(True) if "are left out of account" not in line)
        if said:
            print(f"the server said:\n{said[-3000:]}")
        return code or int(bool(said))
    finally:
        server.kill()
        server.wait()
        log.close()


if __name__ == "__main__":
    sys.exit(main())
