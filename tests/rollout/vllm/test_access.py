"""Access control: control routes require the run's control token, only known receivers load weights, and errors name
only paths that the request names.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import psutil
import pytest
from transformers import AutoModelForCausalLM

from rl_core.errors import RLError, WeightSyncError
from rl_rollout.transports.files import FilesTransport
from rl_rollout.transports.receivers import installed_receivers, receiver_of
from rl_rollout.transports.shared_memory import SharedMemoryTransport
from rl_rollout.vllm import wire
from rl_rollout.vllm.connection import Connection, open_session
from tests.rollout.vllm.other_transport import other
from tests.rollout.vllm.servers import TOKENS, RunningServer, command_line, connect, publish, request, weights_of

pytestmark = pytest.mark.slow

CONTROL = [
    *(
        f"/rl/{name}"
        for name in (
            "health",
            "generate",
            "score",
            "load_adapter",
            "cancel",
            "abort",
            "pause",
            "resume",
            "prepare_weights",
            "update_weights",
            "sleep",
            "wake",
        )
    ),
    "/scale_elastic_ep",
    "/v1/load_lora_adapter",
    "/collective_rpc",
    "/openapi.json",
]
"""Routes of this package and of vLLM that only the control token opens. Some exist only in certain modes of vLLM."""
DISGUISED = [
    "/%72l/pause",
    "/rl%2Fpause",
    "//rl/pause",
    "/v1/../rl/pause",
    "/v1/%2e%2e/rl/pause",
    "/rl/pause/",
    "/RL/pause",
    "/v1/load_lora_adapter/",
]


async def status_of(server: RunningServer, path: str, token: str | None = None, *, length: int = 0) -> int:
    """The status of a POST to exactly this path, which an HTTP client library would normalize."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    authorization = "" if token is None else f"Authorization: Bearer {token}\r\n"
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Length: {length}\r\n"
    try:
        writer.write(f"{head}{authorization}\r\n".encode())
        answer = await asyncio.wait_for(reader.read(), 120)
    finally:
        writer.close()
        await writer.wait_closed()
    return int(answer.split()[1])


# --- tokens ---------------------------------------------------------------------------------------------------------


async def test_without_a_token_no_post_route_answers_on_loopback(dense_server: RunningServer):
    """Tries every POST route without a token and with a wrong one, and the routes in `CONTROL` with the agents'
    token.
    """
    async with open_session(TOKENS.control) as session, session.get(f"{dense_server.url}/openapi.json") as answer:
        of_application = [path for path, methods in (await answer.json())["paths"].items() if "post" in methods]
    assert "/v1/completions" in of_application
    for path in {*CONTROL, *of_application}:
        for token in (None, "another token"):
            assert (path, await status_of(dense_server, path, token)) == (path, 401)
    for path in CONTROL:
        assert (path, await status_of(dense_server, path, TOKENS.access)) == (path, 401)
    assert await status_of(dense_server, "/rl/health", TOKENS.control) == 200
    async with open_session(None) as session, session.get(f"{dense_server.url}/health") as answer:
        assert answer.status == 200


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_another_user_of_the_machine_gets_nothing(dense_server: RunningServer):
    """The server answers only `/health`, and the user can read neither the server's environment nor the folders of a
    sync.
    """
    transports = FilesTransport(), SharedMemoryTransport()
    rendezvous = [transport.open(num_ranks=1, num_engines=1) for transport in transports]
    folders = [*rendezvous[0].data["directories"], rendezvous[1].data["directory"]]
    files = [f"/proc/{dense_server.pid}/environ", f"/proc/{dense_server.pid}/fd", f"/proc/{os.getpid()}/fd", *folders]
    try:
        found = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("other_user.py"))],
            input=json.dumps({"url": dense_server.url, "paths": CONTROL, "files": files}),
            capture_output=True,
            text=True,
            timeout=250,
            check=True,
        )
    finally:
        for transport, opened in zip(transports, rendezvous, strict=True):
            transport.close(opened)
    answers = json.loads(found.stdout)
    assert answers.pop("/health") == 200
    assert set(answers.pop("read").values()) == {"PermissionError"}
    assert set(answers.values()) == {401}


async def test_no_spelling_of_a_control_route_gets_past_the_token(dense_server: RunningServer):
    for path in DISGUISED:
        assert await status_of(dense_server, path) == 401, path
        assert await status_of(dense_server, path, TOKENS.access) in (401, 404), path


async def test_agents_show_a_token_of_their_own(dense_server: RunningServer):
    async with open_session(TOKENS.access) as session:
        async with session.get(f"{dense_server.url}/v1/models") as answer:
            assert answer.status == 200
        asked = {"model": "policy", "prompt": "12", "max_tokens": 3}
        async with session.post(f"{dense_server.url}/v1/completions", json=asked) as answer:
            assert answer.status == 200


async def test_no_web_page_from_elsewhere_may_read_an_answer(dense_server: RunningServer):
    asking = {"Origin": "https://example.org", "Authorization": f"Bearer {TOKENS.control}"}
    before = {"Origin": "https://example.org", "Access-Control-Request-Method": "POST"}
    async with aiohttp.ClientSession(dense_server.url) as session:
        for method, path, headers in (
            ("GET", "/v1/models", asking),
            ("POST", "/rl/health", asking),
            ("OPTIONS", "/v1/models", before),
            ("OPTIONS", "/rl/pause", before),
        ):
            async with session.request(method, path, headers=headers) as answer:
                assert "Access-Control-Allow-Origin" not in answer.headers, (method, path)
                assert answer.ok == (headers is asking)


@pytest.mark.parametrize("path", ["/rl/generate", "/v1/completions"])
async def test_a_body_that_is_too_long_is_refused_before_it_fills_the_memory(dense_server: RunningServer, path: str):
    """One body is sent in chunks and does not end; the other one declares its length."""
    url = urlsplit(dense_server.url)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    head = [f"POST {path} HTTP/1.1", "Host: x", f"Authorization: Bearer {TOKENS.control}", "Transfer-Encoding: chunked"]
    writer.write("\r\n".join([*head, "Content-Type: application/json", "", ""]).encode())
    answer, sent = asyncio.ensure_future(reader.readline()), 0
    with contextlib.suppress(ConnectionError):  # the server closes the connection while the body is being sent
        while sent < 4 * wire.MAX_BODY_BYTES and not answer.done():
            writer.write(b"100000\r\n" + b" " * 2**20 + b"\r\n")
            sent += 2**20
            await writer.drain()
    with contextlib.suppress(ConnectionError):
        assert b" 413 " in await asyncio.wait_for(answer, 120)
    writer.transport.abort()
    assert sent < 3 * wire.MAX_BODY_BYTES
    assert await status_of(dense_server, path, TOKENS.control, length=wire.MAX_BODY_BYTES + 1) == 413
    assert await status_of(dense_server, path, TOKENS.control) < 500, "the server must still serve"


def test_no_process_of_a_server_shows_a_token_on_its_command_line(dense_server: RunningServer):
    server = psutil.Process(dense_server.pid)
    processes = [server, *server.children(recursive=True)]
    assert any("EngineCore" in command_line(process) for process in processes)
    for process in [*processes, psutil.Process(os.getpid()), *server.parents()]:
        assert not any(token in command_line(process) for token in (TOKENS.control, TOKENS.access))


# --- receivers ------------------------------------------------------------------------------------------------------


async def answer_of(server: RunningServer, method: str, arguments: Mapping[str, Any]) -> str:
    """The error that the run's client gets; empty if there is none."""
    async with open_session(TOKENS.control) as session:
        try:
            await Connection(session, server.url, "the server").call(method, arguments, timeout_s=120)
        except RLError as error:
            return str(error)
    return ""


def update(receiver: str, data: Mapping[str, Any], version: int = 1) -> dict[str, Any]:
    return {"receiver": receiver, "data": dict(data), "adapter": None, "version": version, "timeout_s": 60.0}


@pytest.mark.parametrize(
    "receiver",
    [
        "tests.rollout.vllm.other_transport:leave_a_trace",
        "rl_rollout.transports.files:FilesSender",
        "rl_rollout.transports.files:FilesTransport",
        "builtins:open",
        "files",
        "",
    ],
)
async def test_a_receiver_that_no_transport_has_is_refused_and_not_called(
    dense_server: RunningServer, receiver: str, tmp_path: Path
):
    trace = tmp_path / "trace"
    error = await answer_of(dense_server, "update_weights", update(receiver, {"trace": str(trace)}))
    assert f"{receiver!r} is not the receiver of an installed weight transport" in error
    assert "rl_rollout.transports.files:FilesReceiver" in error
    assert not trace.exists()
    assert await answer_of(dense_server, "health", {}) == ""


def test_every_installed_transport_names_its_receiver():
    assert receiver_of(FilesTransport(timeout_s=1.0)) in installed_receivers()
    assert {path.rpartition(":")[2] for path in installed_receivers()} >= {
        "FilesReceiver",
        "SharedMemoryReceiver",
        "BroadcastReceiver",
        "CudaIpcReceiver",
    }


async def test_the_transport_of_the_run_that_started_a_server_needs_no_entry_point(dense_server: RunningServer):
    """The transport also lacks the attribute that names its receiver, as older transports do."""
    assert receiver_of(other) == "tests.rollout.vllm.other_transport:OtherReceiver"
    client = await connect(dense_server)
    model = AutoModelForCausalLM.from_pretrained(dense_server.model_path)
    version = 1 + (await client.health()).version
    assert (await publish(client, other, weights_of(model), version)).version == version
    (completion,) = await client.generate(request(f"own-transport-{version}", max_tokens=3))
    assert set(completion.policy_versions) == {version}
    await client.close()


async def test_a_server_of_another_run_refuses_a_transport_that_is_not_installed(moe_server: RunningServer):
    client = await connect(moe_server)
    rendezvous = other.open(num_ranks=1, num_engines=1)
    try:
        with pytest.raises(WeightSyncError, match=r"OtherReceiver' is not the receiver.*weight_sync_backend"):
            await client.update_weights(rendezvous, 1)
    finally:
        other.close(rendezvous)
        await client.resume()
        await client.close()


# --- errors ---------------------------------------------------------------------------------------------------------


async def test_an_error_names_only_the_paths_of_its_request(dense_server: RunningServer, tmp_path: Path):
    """The manifests name a file elsewhere, by an absolute path and through `..`, and a file that does not exist."""
    transport = FilesTransport(timeout_s=0.2)
    secret = tmp_path / "secret"
    secret.write_text("twelve bytes")

    async def refused(manifest: str) -> str:
        rendezvous = transport.open(num_ranks=1, num_engines=1)
        directory = Path(rendezvous.data["directories"][0])
        (directory / "rank0.json").write_text(manifest.replace("DIRECTORY", str(directory)))
        try:
            error = await answer_of(dense_server, "update_weights", update(rendezvous.receiver, rendezvous.data))
        finally:
            transport.close(rendezvous)
        return error.replace(str(directory), "DIRECTORY")

    described = '{{"version": 1, "buckets": [{{"file": "{}", "num_bytes": 1, "tensors": []}}]}}'
    for elsewhere in (secret, f"DIRECTORY/../{secret.parent.name}/{secret.name}"):
        error = await refused(described.format(elsewhere))
        assert "rank 0 names a file outside the directories of the sync" in error
        assert str(secret) not in error
        assert "12" not in error
    assert "DIRECTORY/missing.bucket cannot be read" in await refused(described.format("DIRECTORY/missing.bucket"))
    assert await answer_of(dense_server, "health", {}) == ""


# --- bodies ---------------------------------------------------------------------------------------------------------


async def status_and_answer(server: RunningServer, path: str, body: bytes) -> tuple[int, str]:
    headers = {"Authorization": f"Bearer {TOKENS.control}", "Content-Type": "application/json"}
    async with aiohttp.ClientSession(headers=headers) as session, session.post(server.url + path, data=body) as answer:
        return answer.status, (await answer.read()).decode(errors="replace")


async def test_an_invalid_body_is_refused_and_the_server_goes_on(dense_server: RunningServer):
    """If `max_tokens=2.5` reached the engine's core, it would end the core's input thread."""
    whole = wire.decode(wire.request_body(request("never-sampled", max_tokens=3)))
    for method, body, named in [
        ("generate", wire.encode({**whole, "params": {**whole["params"], "max_tokens": 2.5}}), "max_tokens"),
        ("generate", wire.encode({**whole, "num_samples": 0}), "num_samples"),
        ("generate", wire.encode([1, 2]), "object"),
        ("generate", b"\xc1 is no MessagePack", "malformed"),
        ("generate", b"", "missing required field"),
        ("pause", wire.encode({"mode": "for ever"}), "for ever"),
        ("sleep", wire.encode({"level": 3}), "3"),
        ("update_weights", wire.encode({"receiver": "x"}), "missing required field"),
        ("score", wire.encode({"sequences": [b"123"], "adapter": None}), "buffer size"),
    ]:
        status, answer = await status_and_answer(dense_server, f"/rl/{method}", body)
        assert status == 400, (method, answer)
        assert named in answer, (method, answer)
    client = await connect(dense_server)
    (completion,) = await client.generate(request("after-wrong-bodies", max_tokens=3, ignore_eos=True))
    assert len(completion.tokens) == 3
    await client.close()


async def test_requests_that_vllm_refuses_are_answered_with_4xx(dense_server: RunningServer):
    for asked, named in [
        ({"model": "policy", "prompt": "12", "max_tokens": 2.5}, "max_tokens"),
        ({"model": "policy", "prompt": "12", "max_tokens": 3, "temperature": -1}, "temperature"),
        ({"model": "unknown", "prompt": "12", "max_tokens": 3}, "unknown"),
        ({"model": "policy", "prompt": "1" * 1000, "max_tokens": 3}, "length"),
    ]:
        status, answer = await status_and_answer(dense_server, "/v1/completions", json.dumps(asked).encode())
        assert 400 <= status < 500, (asked, answer)
        assert named in answer, (asked, answer)
