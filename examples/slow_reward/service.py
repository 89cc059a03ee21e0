"""A slow, unreliable scoring service on loopback: 1 when the last number of the completion is the answer, else 0.

    python examples/slow_reward/service.py [--port 8731] [--low 0.25] [--high 10] [--fail 0.01]

Every call takes a time drawn evenly from low to high; one in a hundred is answered with 503. Only the standard library.
`Service` is the same as a reward class, for a run that brings its service along (`ci.yaml`).
"""

import argparse
import json
import random
import re
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PORT = 8731


class Handler(BaseHTTPRequestHandler):
    """Answers one sample per call."""

    protocol_version = "HTTP/1.1"
    low = 0.25
    high = 10.0
    fail = 0.01
    chance = random.Random(0)

    def do_POST(self) -> None:
        sample = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        time.sleep(self.chance.uniform(self.low, self.high))
        if self.chance.random() < self.fail:
            self._answer(503, {"error": "try again"})
            return
        numbers = re.findall(r"-?\d+", str(sample["completion"]))
        self._answer(200, {"score": float(numbers[-1:] == [str(sample["answer"])])})

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        """Say nothing."""


class Server(ThreadingHTTPServer):
    """A thread per call."""

    daemon_threads = True
    request_queue_size = 1024


def serve(port: int, low: float, high: float, fail: float) -> Server:
    """The service, listening."""
    handler = type("Configured", (Handler,), {"low": low, "high": high, "fail": fail})
    return Server(("127.0.0.1", port), handler)


class Service:
    """A reward that is always 0, and serves the other one as long as the run lasts."""

    def __init__(self, port: int = PORT, low: float = 0.25, high: float = 10.0, fail: float = 0.01) -> None:
        self._settings = (port, low, high, fail)

    def setup(self) -> None:
        self._server = serve(*self._settings)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def score(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
        return [0.0] * len(completions)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=PORT)
    parser.add_argument("--low", type=float, default=0.25)
    parser.add_argument("--high", type=float, default=10.0)
    parser.add_argument("--fail", type=float, default=0.01)
    chosen = parser.parse_args()
    server = serve(chosen.port, chosen.low, chosen.high, chosen.fail)
    print(f"scoring at http://127.0.0.1:{chosen.port}/score", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.server_close()


if __name__ == "__main__":
    main()
