"""Who may do what: control routes open to the run's token alone, receivers are known ones, errors name no path."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from transformers import AutoModelForCausalLM

from rl_core.errors import RLError, WeightSyncError
from rl_rollout.transports.files import FilesTransport
from rl_rollout.transports.receivers import installed_receivers, receiver_of
from rl_rollout.vllm import wire
from rl_rollout.vllm.connection import Connection, open_session
from tests.rollout.vllm.other_transport import other
from tests.rollout.vllm.servers import TOKENS, RunningServer, connect, publish, request

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
"""Routes of this package, and those of vLLM that change a server or are there in some of its modes."""
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


async def status_of(server: RunningServer, path: str, token: str | None = None) -> int:
    """Of a POST to exactly this path, which a client library would tidy up."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    authorization = "" if token is None else f"Authorization: Bearer {token}\r\n"
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Length: 0\r\n{authorization}\r\n"
    try:
        writer.write(head.encode())
        answer = await asyncio.wait_for(reader.read(), 60)
    finally:
        writer.close()
        await writer.wait_closed()
    return int(answer.split()[1])


# --- tokens ---------------------------------------------------------------------------------------------------------


async def test_without_the_runs_token_no_control_route_answers_on_loopback_too(dense_server: RunningServer):
    for path in CONTROL:
        assert (path, await status_of(dense_server, path)) == (path, 401)
        assert (path, await status_of(dense_server, path, "another token")) == (path, 401)
    assert await status_of(dense_server, "/rl/health", TOKENS.control) == 200


async def test_no_spelling_of_a_control_route_gets_past_the_token(dense_server: RunningServer):
    for path in DISGUISED:
        assert await status_of(dense_server, path) in (307, 401, 404), path


async def test_agents_need_no_token_of_the_run(dense_server: RunningServer):
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{dense_server.url}/v1/models") as answer:
            assert answer.status == 200
        asked = {"model": "policy", "prompt": "12", "max_tokens": 3}
        async with session.post(f"{dense_server.url}/v1/completions", json=asked) as answer:
            assert answer.status == 200


def test_no_process_of_a_server_shows_a_token_on_its_command_line(dense_server: RunningServer):
    server = psutil.Process(dense_server.pid)
    processes = [server, *server.children(recursive=True)]
    assert any("EngineCore" in " ".join(process.cmdline()) for process in processes)
    for process in [*processes, psutil.Process(os.getpid()), *server.parents()]:
        assert TOKENS.control not in " ".join(process.cmdline())


# --- receivers ------------------------------------------------------------------------------------------------------


async def answer_of(server: RunningServer, method: str, arguments: Mapping[str, Any]) -> str:
    """The error, as the run's client gets it; empty for none."""
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
async def test_a_receiver_that_no_transport_has_is_not_even_imported(
    dense_server: RunningServer, receiver: str, tmp_path: Path
):
    trace = tmp_path / "trace"
    error = await answer_of(dense_server, "update_weights", update(receiver, {"trace": str(trace)}))
    assert f"{receiver!r} is not the receiver of an installed weight transport" in error
    assert "rl_rollout.transports.files:FilesReceiver" in error
    assert not trace.exists()
    assert await answer_of(dense_server, "health", {}) == ""


def test_every_installed_transport_says_its_receiver():
    assert receiver_of(FilesTransport(timeout_s=1.0)) in installed_receivers()
    assert {path.rpartition(":")[2] for path in installed_receivers()} >= {
        "FilesReceiver",
        "SharedMemoryReceiver",
        "BroadcastReceiver",
        "CudaIpcReceiver",
    }


async def test_the_transport_of_the_run_that_started_a_server_needs_no_entry_point(dense_server: RunningServer):
    """And no attribute that names its receiver: those that were written before have none."""
    assert receiver_of(other) == "tests.rollout.vllm.other_transport:OtherReceiver"
    client = await connect(dense_server)
    model = AutoModelForCausalLM.from_pretrained(dense_server.model_path)
    version = 1 + (await client.health()).version
    tensors = {name: tensor.detach() for name, tensor in model.named_parameters()}
    assert (await publish(client, other, tensors, version)).version == version
    (completion,) = await client.generate(request(f"own-transport-{version}", max_tokens=3))
    assert set(completion.policy_versions) == {version}
    await client.close()


async def test_a_server_of_another_run_refuses_that_transport(moe_server: RunningServer):
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


async def test_an_error_names_no_path_but_those_of_its_request(dense_server: RunningServer, tmp_path: Path):
    """A manifest with a file elsewhere, one with a file that is not there, and files that no rank has written."""
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


async def test_a_body_that_a_route_does_not_take_is_refused_and_the_server_goes_on(dense_server: RunningServer):
    """`max_tokens=2.5` once reached the engine's core, whose input thread died of it."""
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


async def test_what_vllm_refuses_stays_the_callers_fault(dense_server: RunningServer):
    for asked, named in [
        ({"model": "policy", "prompt": "12", "max_tokens": 2.5}, "max_tokens"),
        ({"model": "policy", "prompt": "12", "max_tokens": 3, "temperature": -1}, "temperature"),
        ({"model": "unknown", "prompt": "12", "max_tokens": 3}, "unknown"),
        ({"model": "policy", "prompt": "1" * 1000, "max_tokens": 3}, "length"),
    ]:
        status, answer = await status_and_answer(dense_server, "/v1/completions", json.dumps(asked).encode())
        assert 400 <= status < 500, (asked, answer)
        assert named in answer, (asked, answer)
