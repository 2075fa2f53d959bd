"""Where tokens come from, who can read them, what they open; and what errors say."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from rl_core.errors import ConfigError
from rl_rollout.vllm import wire
from rl_rollout.vllm.error_texts import without_other_paths
from rl_rollout.vllm.tokens import (
    ACCESS_VARIABLE,
    CONTROL_FILE_VARIABLE,
    CONTROL_VARIABLE,
    Tokens,
    given_tokens,
    tokens_of_run,
)


def made(path: str) -> str:
    return given_tokens(makes_file=True, environment={CONTROL_FILE_VARIABLE: path}).control


def test_a_server_makes_the_file_that_its_run_reads_and_nobody_else_can(tmp_path: Path):
    path = tmp_path / "token"
    with pytest.raises(ConfigError, match=r"cannot be read: No such file.*a server makes it"):
        given_tokens(environment={CONTROL_FILE_VARIABLE: str(path)})
    token = made(str(path))
    assert len(token) > 40
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]
    assert given_tokens(environment={CONTROL_FILE_VARIABLE: str(path)}).control == token
    assert made(str(path)) == token, "a server that is started again keeps it"


def test_servers_that_start_together_have_one_token(tmp_path: Path):
    with multiprocessing.get_context("spawn").Pool(4) as servers:
        assert len(set(servers.map(made, [str(tmp_path / "token")] * 16, chunksize=1))) == 1


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644])
def test_a_file_that_others_can_read_is_refused(tmp_path: Path, mode: int):
    path = tmp_path / "token"
    path.write_text("secret")
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"others can read .*mode 0{mode:o}.*chmod 600"):
        given_tokens(environment={CONTROL_FILE_VARIABLE: str(path)})


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({}, f"is not known; set {CONTROL_FILE_VARIABLE}"),
        ({CONTROL_VARIABLE: ""}, f"is not known; set {CONTROL_FILE_VARIABLE}"),
        ({CONTROL_VARIABLE: "a", CONTROL_FILE_VARIABLE: "b"}, "are both set; unset one"),
        ({CONTROL_VARIABLE: "a", ACCESS_VARIABLE: "a"}, "give the two different values"),
    ],
)
def test_a_token_that_protects_nothing_is_refused(environment: dict[str, str], message: str):
    with pytest.raises(ConfigError, match=message):
        given_tokens(environment=environment)


def test_an_empty_file_is_refused(tmp_path: Path):
    path = tmp_path / "token"
    path.touch(mode=0o600)
    with pytest.raises(ConfigError, match="the control token is empty"):
        given_tokens(environment={CONTROL_FILE_VARIABLE: str(path)})


def test_every_run_has_a_control_token_of_its_own_that_is_not_the_agents(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(ACCESS_VARIABLE, "what agents are told")
    runs = [tokens_of_run(host) for host in ("127.0.0.1", "10.0.0.7")]
    assert len({tokens.control for tokens in runs}) == 2
    assert {tokens.access for tokens in runs} == {"what agents are told"}
    monkeypatch.delenv(ACCESS_VARIABLE)
    assert tokens_of_run("127.0.0.1").access is None
    assert tokens_of_run("10.0.0.7").access is not None


def test_tokens_are_not_shown_where_their_record_is():
    assert repr(Tokens(control="secret", access="hidden")) == "Tokens()"


@pytest.mark.parametrize(
    ("path", "is_open_to"),
    [
        ("/v1/chat/completions", ["control", "access", "nobody"]),
        ("/metrics/", ["control", "access", "nobody"]),
        ("/rl/pause", ["control"]),
        ("/rl", ["control"]),
        ("/v1/load_lora_adapter", ["control"]),
        ("/v1/unload_lora_adapter/", ["control"]),
        ("/collective_rpc", ["control"]),
        ("/v10/models", ["control"]),
        ("/", ["control"]),
    ],
)
def test_agents_get_the_api_and_nothing_that_changes_a_server(path: str, is_open_to: list[str]):
    closed = Tokens(control="control", access="access")
    opened = [token for token in ("control", "access", "nobody") if closed.opens(path, f"Bearer {token}".encode())]
    assert opened == [token for token in is_open_to if token != "nobody"]
    free = Tokens(control="control")
    opened = [token for token in ("control", "nobody") if free.opens(path, f"Bearer {token}".encode())]
    assert opened == [token for token in is_open_to if token != "access"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("/data/sync/rank0.json cannot be read", "/data/sync/rank0.json cannot be read"),
        ("no file '/data/adapter'.", "no file '/data/adapter'."),
        ("no file '/data/adapter/../key'", "no file '(a path of the server)'"),
        ("no file '/data/adapters/x'", "no file '(a path of the server)'"),
        ("[Errno 2] No such file: '/etc/x y'", "[Errno 2] No such file: '(a path of the server) y'"),
        ("in /usr/lib/a.py, line 3 (/root).", "in (a path of the server), line 3 ((a path of the server))."),
        (
            "http://10.0.0.7:80/v1, 1/2 of prompt/answer: /v2",
            "http://10.0.0.7:80/v1, 1/2 of prompt/answer: (a path of the server)",
        ),
    ],
)
def test_an_error_keeps_the_paths_of_its_request_and_loses_all_others(text: str, told: str):
    body = wire.encode({"data": {"directories": ["/data/sync/"]}, "path": "/data/adapter", "number": 3, "root": "/"})
    assert without_other_paths(text, body) == told
    assert "/data" not in without_other_paths(text, b"\xc1 no MessagePack")
