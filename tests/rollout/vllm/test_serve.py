"""Servers that a user starts with `rl_rollout.vllm.serve`: their start, their tokens, and split engines."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import psutil
import pytest

from rl_core.config import dump_yaml
from rl_core.errors import ConfigError, GenerationError
from rl_core.interfaces import EngineSpec
from rl_rollout.vllm import serve
from rl_rollout.vllm.connection import open_session
from rl_rollout.vllm.plugin import vllm
from rl_rollout.vllm.tokens import ACCESS_VARIABLE, CONTROL_FILE_VARIABLE, CONTROL_VARIABLE
from tests.rollout.vllm.servers import engine_config, make_spec, request, write_model
from tests.rollout.vllm.trainers import Trainer, policy_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

HOST = "127.0.0.2"
"""A loopback address other than the default of `--host`."""
ACCESS_TOKEN = "what agents are told"
START_S = 600.0


@attrs.frozen
class Split:
    """A model, and how its engine is split."""

    num_experts: int = 0
    num_workers: int = 2
    engine: dict[str, Any] = attrs.field(factory=dict)


TENSOR = Split(num_experts=8, engine={"tensor_parallel_size": 2, "enable_return_routed_experts": True})
DATA = Split(engine={"data_parallel_size": 2})
SPLITS = [pytest.param(TENSOR, id="tensor"), pytest.param(DATA, id="data", marks=pytest.mark.soak)]


@attrs.frozen(kw_only=True)
class Served:
    """A server, and the engine spec of a run that uses it."""

    process: subprocess.Popen[bytes]
    metrics: str
    """The answer at `/metrics` before the first request."""
    token_file: Path
    split: Split
    model_path: Path
    spec: EngineSpec


@pytest.fixture(scope="module", params=SPLITS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server started as the documentation says, but at HOST and a free port."""
    split, directory = request.param, tmp_path_factory.mktemp("served")
    model_path = write_model(directory / "model", num_experts=split.num_experts, moe_intermediate_size=64)
    (directory / "run.yaml").write_text(dump_yaml(engine_config(model_path, directory, **split.engine)))
    command = [
        sys.executable,
        "-m",
        "rl_rollout.vllm.serve",
        str(directory / "run.yaml"),
        "--host",
        HOST,
        "--port",
        "0",
    ]
    log, token_file = directory / "server.log", directory / "token"
    environment = {ACCESS_VARIABLE: ACCESS_TOKEN, CONTROL_FILE_VARIABLE: str(token_file)}
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=os.environ | environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        url = _address(process, log)
        shown = {"Authorization": f"Bearer {ACCESS_TOKEN}"}
        with urllib.request.urlopen(urllib.request.Request(f"{url}/metrics", headers=shown), timeout=60) as answer:
            metrics = answer.read().decode()
        spec = make_spec(model_path, directory, **split.engine, external_server_urls=[url])
        yield Served(
            process=process,
            metrics=metrics,
            token_file=token_file,
            split=split,
            model_path=model_path,
            spec=spec,
        )
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(150)


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + START_S
    while True:
        said = [line for line in log.read_text().splitlines() if line.startswith("serving at ")]
        if said:
            return said[0].removeprefix("serving at ").partition(",")[0]
        assert process.poll() is None, log.read_text()[-5000:]
        assert time.monotonic() < deadline, log.read_text()[-5000:]
        time.sleep(0.2)


def test_a_ready_server_has_computed_with_every_engine(served):
    """Each engine has scored a prompt and sampled from it, so that whatever is compiled at first use is compiled at the
    start.
    """
    computed = {
        (name, engine): float(value)
        for name, engine, value in re.findall(
            r'^vllm:(prompt|generation)_tokens_total\{engine="(\d+)".*\} (\S+)$', served.metrics, re.MULTILINE
        )
    }
    engines = [str(rank) for rank in range(served.split.engine.get("data_parallel_size", 1))]
    assert sorted({engine for _, engine in computed}) == engines
    for engine in engines:
        assert computed["prompt", engine] >= 2 * 4
        assert computed["generation", engine] >= 1 + 2


@pytest.mark.parametrize("transport", ["files", "shared_memory", "broadcast"])
async def test_every_rank_of_an_engine_receives_verified_weights(served, transport, monkeypatch):
    monkeypatch.setenv(CONTROL_FILE_VARIABLE, str(served.token_file))
    client = await vllm.create(served.spec)
    assert client.num_weight_receivers() == served.split.num_workers
    try:
        async with policy_of(served.model_path) as policy:
            trainer = Trainer(policy, client, transport)
            trainer.version = (await client.health()).version
            await trainer.verification.prove()
            await trainer.train()
            await trainer.publish()
            assert (await trainer.verification.probe(trainer.version))["weight_sync/logprob_diff_mean"] < 1e-4
            (completion,) = await client.generate(request(f"sample-{transport}", max_tokens=8, ignore_eos=True))
        assert completion.policy_versions == (trainer.version,) * 8
        if served.split.num_experts:
            assert completion.routed_experts.shape == (3 + 8 - 1, 2, 2)
    finally:
        await client.close()


@pytest.mark.parametrize("token", ["another token", ACCESS_TOKEN])
async def test_the_error_of_a_wrong_token_says_what_to_set(served, token, monkeypatch):
    monkeypatch.setenv(CONTROL_VARIABLE, token)
    with pytest.raises(GenerationError, match=f"requires its control token: set {CONTROL_FILE_VARIABLE}"):
        await vllm.create(served.spec)


async def test_the_agents_token_opens_the_api_only(served):
    (url,) = served.spec.options.external_server_urls

    async def status_of(method: str, path: str, token: str | None) -> int:
        async with open_session(token) as session, session.request(method, url + path) as answer:
            return answer.status

    assert await status_of("GET", "/v1/models", ACCESS_TOKEN) == 200
    assert await status_of("GET", "/v1/models", None) == 401
    for token in (ACCESS_TOKEN, None):
        assert await status_of("POST", "/rl/health", token) == 401
        assert await status_of("POST", "/scale_elastic_ep", token) == 401


def test_a_killed_server_leaves_no_process_and_has_logged_its_states(served):
    """Kills the shared server, so this must be the last test that uses it."""
    others = psutil.Process(served.process.pid).children(recursive=True)
    assert len(others) > served.split.num_workers, "expected a core per engine and its workers"
    served.process.kill()
    _, alive = psutil.wait_procs(others, timeout=100)
    assert not alive
    said = (served.model_path.parent / "server.log").read_text().splitlines()
    states = [line for line in said if line.startswith(("loading /", "warming up", "serving at "))]
    assert [line.split()[0] for line in states] == ["loading", "warming", "serving"]
    after = [re.fullmatch(r".+, (\d+) s after the start", line) for line in states]
    seconds = [int(match[1]) for match in after if match]
    assert seconds == sorted(seconds)
    assert len(seconds) == 3


async def test_a_run_without_the_control_token_does_not_start(tmp_path, monkeypatch):
    monkeypatch.delenv(CONTROL_VARIABLE, raising=False)
    monkeypatch.delenv(CONTROL_FILE_VARIABLE, raising=False)
    spec = make_spec(tmp_path / "model", tmp_path, external_server_urls=["http://127.0.0.1:1"])
    with pytest.raises(ConfigError, match=f"control token of the servers is not set; set {CONTROL_FILE_VARIABLE}"):
        await vllm.create(spec)


@pytest.mark.parametrize(
    ("given", "host", "remedy"),
    [
        ({}, "127.0.0.1", f"set {CONTROL_FILE_VARIABLE}"),
        ({ACCESS_VARIABLE: ACCESS_TOKEN}, HOST, f"set {CONTROL_FILE_VARIABLE}"),
        ({CONTROL_VARIABLE: "secret", ACCESS_VARIABLE: "secret"}, HOST, "set two different values"),
    ],
)
def test_a_server_with_missing_or_equal_tokens_does_not_start(given, host, remedy, tmp_path, monkeypatch, capsys):
    for name in (ACCESS_VARIABLE, CONTROL_VARIABLE, CONTROL_FILE_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "run.yaml").write_text(dump_yaml(engine_config(tmp_path / "model", tmp_path)))
    assert serve.main([str(tmp_path / "run.yaml"), "--host", host]) == 2
    assert remedy in capsys.readouterr().err


def test_an_engine_argument_that_vllm_does_not_have_is_refused(tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(dump_yaml(engine_config(tmp_path / "model", tmp_path)))
    unknown = "generator.inference_engine.engine_init_kwargs.max_model_length=3"
    assert serve.main([str(tmp_path / "run.yaml"), unknown]) == 2
    assert "no such engine argument. Did you mean 'max_model_len'" in capsys.readouterr().err


def test_an_impossible_port_is_refused_before_anything_starts(capsys):
    with pytest.raises(SystemExit, match="2"):
        serve.main(["quickstart", "--port", "65536"])
    assert "--port: got 65536; expected 0 (a free port) to 65535" in capsys.readouterr().err


def test_a_model_that_does_not_exist_is_refused_before_the_server_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv(CONTROL_FILE_VARIABLE, raising=False)
    monkeypatch.setenv(CONTROL_VARIABLE, "secret")
    (tmp_path / "run.yaml").write_text(dump_yaml(engine_config(tmp_path / "model", tmp_path)))
    assert serve.main([str(tmp_path / "run.yaml")]) == 2
    assert f"trainer.policy.model.path: the directory {tmp_path / 'model'} does not exist" in capsys.readouterr().err
