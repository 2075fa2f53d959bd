"""Models are downloaded and uploaded with the hub's own library; the hub is a local test server."""

from __future__ import annotations

import base64
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

FILES = {"config.json": b'{"model_type": "qwen2"}', "model.safetensors": b"w" * 3_000_000, "pytorch_model.bin": b"old"}
SHA = "a" * 40


class Hub(BaseHTTPRequestHandler):
    """Serves the model `org/model`; committed files are stored in `received`."""

    received: dict[str, bytes]

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if re.fullmatch(r"/api/models/org/model(/revision/\w+)?", path):
            files = [{"rfilename": name, "size": len(content)} for name, content in FILES.items()]
            self.answer({"id": "org/model", "sha": SHA, "siblings": files, "private": False, "tags": []})
        elif path.startswith("/api/models/org/model/tree/"):
            self.answer(
                [
                    {"type": "file", "path": name, "size": len(content), "oid": f"{len(content):040x}"}
                    for name, content in FILES.items()
                ]
            )
        elif (name := path.rpartition("/")[2]) in FILES and "/resolve/" in path:
            self.send_response(200)
            self.send_header("ETag", f'"{len(FILES[name]):040x}"')
            self.send_header("X-Repo-Commit", SHA)
            self.send_header("Content-Length", str(len(FILES[name])))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(FILES[name])
        else:
            self.answer({"error": "Repository not found"}, 404)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = self.path.partition("?")[0]
        if path == "/api/repos/create" and json.loads(body).get("organization") == "theirs":
            self.answer({"error": 'You don\'t have the rights to create a model under the namespace "theirs"'}, 403)
        elif path == "/api/repos/create":
            self.answer({"url": f"http://{self.headers['Host']}/me/mine", "name": "me/mine"})
        elif "/preupload/" in path:
            files = [file["path"] for file in json.loads(body)["files"]]
            self.answer({"files": [{"path": file, "uploadMode": "regular", "shouldIgnore": False} for file in files]})
        elif "/commit/" in path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.received[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            url = f"http://{self.headers['Host']}/me/mine/commit/{SHA}"
            self.answer({"success": True, "commitOid": SHA, "commitUrl": url, "hookOutput": "", "pullRequestUrl": None})
        else:
            self.answer({}, 404)

    def answer(self, content: Any, status: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[ThreadingHTTPServer]:
    Hub.received = {}
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


BEGIN = """
import logging
logging.basicConfig(level="INFO", format="%(message)s")
from rl_core import hub
shipped_s = hub.TIMEOUT_S + hub.LOOK_UP_S
hub.TIMEOUT_S = hub.LOOK_UP_S = 100.0
"""
"""On a busy machine, the test's server may answer later than the deadlines in `rl_core.hub`."""


def python(code: str, home: Path, address: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a new process, because the hub's library reads its settings only at import."""
    settings = {
        name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING", "TRANSFORMERS_"))
    }
    settings |= {"HF_ENDPOINT": address, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    settings |= {"HF_HUB_ETAG_TIMEOUT": "200", "HF_HUB_DOWNLOAD_TIMEOUT": "200", **variables}
    code = BEGIN + code
    return subprocess.run([sys.executable, "-c", code], env=settings, capture_output=True, text=True, timeout=250)


def address_of(server: ThreadingHTTPServer) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}"


FETCH = "hub.fetch_model('org/model', key='trainer.policy.model.path')"


def test_a_model_is_downloaded_once_with_a_line_of_progress(hub: ThreadingHTTPServer, tmp_path: Path):
    first = python(FETCH, tmp_path, address_of(hub))
    assert first.returncode == 0, first.stderr
    assert "downloading org/model: 3.00 MB" in first.stderr
    assert re.search(r"downloading org/model: 3\.00 of 3\.00 MB \(\d+\.\d MB/s\)", first.stderr)
    stored = {path.name for path in tmp_path.rglob("*") if path.is_symlink() or path.suffix in (".json", ".bin")}
    assert {"config.json", "model.safetensors"} <= stored
    assert "pytorch_model.bin" not in stored
    again = python(FETCH, tmp_path, address_of(hub))
    assert again.returncode == 0, again.stderr
    assert "downloading" not in again.stderr
    # Nothing listens at this address, so the model must come from the cache.
    assert python(FETCH, tmp_path, "http://127.0.0.1:9").returncode == 0


CHECK = """
from rl_core.config.file_checks import check_files
from rl_core.config import from_mapping
check_files(from_mapping({"data.train_data": ["org/rows"], "trainer.policy.model.path": "org/model"}))
"""


def test_an_adapter_beside_a_cached_models_weights_is_named(tmp_path: Path):
    stored = tmp_path / "hub" / "models--org--model"
    (stored / "snapshots" / "0").mkdir(parents=True)
    (stored / "refs").mkdir()
    (stored / "refs" / "main").write_text("0")
    (stored / "snapshots" / "0" / "config.json").write_text("{}")
    offline = {"address": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "1"}
    assert python(CHECK, tmp_path, **offline).returncode == 0
    (stored / "snapshots" / "0" / "adapter_config.json").write_text("{}")
    assert "trainer.policy.model.path: org/model has a LoRA adapter" in python(CHECK, tmp_path, **offline).stderr


def test_the_user_can_disable_requests(hub: ThreadingHTTPServer, tmp_path: Path):
    variables = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    for variable in variables:
        absent = python(FETCH, tmp_path, address_of(hub), **{variable: "1"})
        assert f"the model is not in the local cache, and {variable} disables requests to the hub" in absent.stderr
    assert python(FETCH, tmp_path, address_of(hub)).returncode == 0
    for variable in variables:
        cached = python(FETCH, tmp_path, address_of(hub), **{variable: "1"})
        assert cached.returncode == 0, (variable, cached.stderr)


def test_without_a_network_the_error_says_how_to_get_the_model(tmp_path: Path):
    result = python(FETCH, tmp_path, "http://127.0.0.1:9")
    assert "ConfigError: trainer.policy.model.path: org/model: there is no such directory" in result.stderr
    assert "http://127.0.0.1:9 cannot be reached" in result.stderr
    assert "hf download org/model --local-dir DIRECTORY" in result.stderr


def test_a_name_that_the_hub_does_not_allow_counts_as_not_cached(tmp_path: Path):
    result = python("hub.fetch_model('my model', key='k')", tmp_path, "http://127.0.0.1:9", HF_HUB_OFFLINE="1")
    assert "ConfigError: k: my model: there is no such directory" in result.stderr
    assert "the model is not in the local cache, and HF_HUB_OFFLINE disables requests" in result.stderr


def test_for_a_name_that_the_hub_does_not_allow_the_error_asks_about_spelling(hub: ThreadingHTTPServer, tmp_path: Path):
    result = python("hub.fetch_model('my model', key='k')", tmp_path, address_of(hub))
    assert "ConfigError: k: my model: " in result.stderr
    assert result.stderr.rstrip().endswith("Is the name spelled correctly?")


def test_a_request_ends_at_its_deadline_if_the_hub_never_answers(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        code = f"hub.TIMEOUT_S = 0.2\n{FETCH}"
        result = python(code, tmp_path, f"http://127.0.0.1:{silent.getsockname()[1]}")
    # urllib wraps the error if the deadline passes during the connection.
    assert re.search(r"cannot be reached \((<urlopen error )?timed out", result.stderr)


def test_a_server_that_does_not_speak_http_is_reported_at_once(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"220 a mail server\r\n")

        threading.Thread(target=answer, daemon=True).start()
        result = python(FETCH, tmp_path, f"http://127.0.0.1:{server.getsockname()[1]}")
    assert "cannot be reached (220 a mail server" in result.stderr


SILENT_NAMES = """
import socket, threading
socket.getaddrinfo = lambda *_, **__: threading.Event().wait()
assert shipped_s < 20
hub.TIMEOUT_S, hub.LOOK_UP_S = 0.2, 0.3
"""


def test_a_request_ends_at_its_deadline_if_the_name_server_never_answers(tmp_path: Path):
    """If the download waited for the name server, `python` would fail at its deadline."""
    result = python(SILENT_NAMES + FETCH, tmp_path, "http://hub.invalid")
    assert "http://hub.invalid cannot be reached (no answer within 0.5 s)" in result.stderr


def test_a_name_that_the_hub_does_not_have_is_reported(hub: ThreadingHTTPServer, tmp_path: Path):
    result = python(FETCH.replace("org/model", "org/other"), tmp_path, address_of(hub))
    assert "trainer.policy.model.path: org/other: " in result.stderr
    assert "Is the name spelled correctly?" in result.stderr


PUSH = """
from rl_core.cli.app import main
main(["push", {run!r}, {name!r}])
"""


def push(run: Path, name: str, home: Path, address: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return python(PUSH.format(run=str(run), name=name), home, address, **variables)


def test_a_runs_model_is_pushed(hub: ThreadingHTTPServer, tmp_path: Path):
    model = tmp_path / "run" / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"weights")
    result = push(tmp_path / "run", "me/mine", tmp_path / "home", address_of(hub), HF_TOKEN="hf_secret")
    assert result.returncode == 0, result.stderr
    assert f"{model} is at {address_of(hub)}/me/mine" in result.stdout
    assert Hub.received == {"config.json": b"{}", "model.safetensors": b"weights"}
    assert "hf_secret" not in result.stdout + result.stderr


def test_the_error_of_a_failed_push_says_why(hub: ThreadingHTTPServer, tmp_path: Path):
    (tmp_path / "run").mkdir()
    nothing = push(tmp_path / "run", "me/mine", tmp_path, address_of(hub), HF_TOKEN="x")
    assert (nothing.returncode, "has no model (config.json and *.safetensors" in nothing.stderr) == (2, True)
    model = tmp_path / "run" / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"weights")
    assert "expected a name such as me/my-model" in push(tmp_path / "run", "mine", tmp_path, address_of(hub)).stderr
    assert "hf auth login, or set HF_TOKEN" in push(tmp_path / "run", "me/mine", tmp_path, address_of(hub)).stderr
    away = push(tmp_path / "run", "me/mine", tmp_path, "http://127.0.0.1:9", HF_TOKEN="x")
    assert "http://127.0.0.1:9 cannot be reached" in away.stderr
    assert "Nothing was sent" in away.stderr


def test_the_error_of_a_push_to_a_repository_of_others_says_which_name_and_token_to_use(
    hub: ThreadingHTTPServer, tmp_path: Path
):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    result = push(tmp_path, "theirs/mine", tmp_path / "home", address_of(hub), HF_TOKEN="read_only")
    assert result.returncode == 2
    assert "error: rl push: theirs/mine: " in result.stderr
    assert "Use a token that may write to this repository" in result.stderr
    assert "and a name under your own account or an organisation of yours" in result.stderr
    assert "Request access" not in result.stderr
