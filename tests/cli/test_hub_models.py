"""A plan reads the architecture of a model on the Hub, of which it fetches small files, here from a test server."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import BaseRequestHandler, ThreadingTCPServer

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAME = "someone/model"
CONFIG = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
FILES = {"config.json": json.dumps(CONFIG), "tokenizer_config.json": json.dumps({"chat_template": "{{ messages }}"})}


class Hub(BaseHTTPRequestHandler):
    """Serves the files of one model as the Hub does."""

    paths: list[str]
    broken: bool

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.paths.append(self.path)
        name = self.path.rpartition("/")[2]
        found = FILES.get(name) if self.path.startswith(f"/{NAME}/resolve/") else None
        self.send_response(500 if self.broken else 200 if found else 404)
        body = (found or "").encode()
        headers = {"ETag": f'"{name}"', "X-Repo-Commit": COMMIT, "Content-Length": str(len(body))}
        if not found:
            headers["X-Error-Code"] = "EntryNotFound"
        for header, value in headers.items():
            self.send_header(header, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Prints nothing."""


@contextmanager
def hub(broken: bool = False) -> Iterator[tuple[str, list[str]]]:
    """The address of the server, and the paths that were requested."""
    paths: list[str] = []
    with served(type("Handler", (Hub,), {"paths": paths, "broken": broken})) as address:
        yield address, paths


@contextmanager
def served(handler: type[BaseRequestHandler]) -> Iterator[str]:
    """The address of a server whose connections have this handler."""
    with ThreadingTCPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def plan(home: Path, address: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (home / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    values = [f"data.sources.all.path={home / 'rows.jsonl'}", "reward.functions.right.fn=boxed"]
    environment = {**os.environ, "HF_ENDPOINT": address, "HF_HOME": str(home / "hf"), "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-m", "rlcore", "plan", *values, f"model.path={NAME}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)


class Mail(BaseRequestHandler):
    """Answers each connection with a line of another protocol."""

    def handle(self) -> None:
        self.request.recv(4096)
        self.request.sendall(b"220 mail.example ready\r\n")


def test_the_architecture_of_a_model_on_the_hub_is_known_before_its_weights_are_fetched(tmp_path: Path) -> None:
    with hub() as (address, paths):
        done = plan(tmp_path, address, "--on", "1xH100-80GB", "rollout.max_tokens=64")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "memory of a device in GiB" in done.stdout
    assert "by its chat template model.path is an instruct model" in done.stdout
    fetched = {path.rpartition("/")[2] for path in paths if "/resolve/" in path}
    assert fetched == {*FILES, "chat_template.jinja"}


@pytest.mark.parametrize("kind", ["an error", "no server", "not HTTP", "not a URL", "not a port"])
def test_a_plan_without_the_hub_says_what_is_unknown(tmp_path: Path, kind: str) -> None:
    addresses = {"not a URL": "hub.example", "not a port": "http://127.0.0.1:x", "no server": "http://127.0.0.1:9"}
    with hub(broken=True) as (address, _), served(Mail) as other:
        done = plan(tmp_path, (addresses | {"an error": address, "not HTTP": other})[kind])
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    [note] = [line for line in done.stdout.splitlines() if "unknown: the number of parameters of model.path" in line]
    assert note.endswith("is not a directory of this machine, so training asks the Hub for it")
