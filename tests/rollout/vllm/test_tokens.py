"""Tokens: where they come from, who can read them, and what they give access to; and which paths errors contain."""

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
    tell_agents,
    tokens_of_run,
)


def made(path: str) -> str:
    return given_tokens(makes_file=True, environment={CONTROL_FILE_VARIABLE: path}).control


def test_a_server_creates_a_token_file_that_only_its_owner_can_read(tmp_path: Path):
    path = tmp_path / "token"
    with pytest.raises(ConfigError, match=r"cannot be read: No such file.*a server creates it"):
        given_tokens(environment={CONTROL_FILE_VARIABLE: str(path)})
    token = made(str(path))
    assert len(token) > 40
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]
    assert given_tokens(environment={CONTROL_FILE_VARIABLE: str(path)}).control == token
    assert made(str(path)) == token, "a restarted server must keep its token"


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
        ({}, f"is not set; set {CONTROL_FILE_VARIABLE}"),
        ({CONTROL_VARIABLE: ""}, f"is not set; set {CONTROL_FILE_VARIABLE}"),
        ({CONTROL_VARIABLE: "a", CONTROL_FILE_VARIABLE: "b"}, "are both set; unset one"),
        ({CONTROL_VARIABLE: "a", ACCESS_VARIABLE: "a"}, "set two different values"),
    ],
)
def test_missing_conflicting_and_equal_tokens_are_refused(environment: dict[str, str], message: str):
    with pytest.raises(ConfigError, match=message):
        given_tokens(environment=environment)


@pytest.mark.parametrize("content", [b"a token\nand a comment\n", b"\x80\xff\n"], ids=["two lines", "not text"])
def test_a_file_that_is_not_a_token_is_refused(content: bytes, tmp_path: Path):
    """Such a token cannot be sent in a header."""
    path = tmp_path / "token"
    path.touch(mode=0o600)
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="the control token must be one line of printable ASCII"):
        given_tokens(environment={CONTROL_FILE_VARIABLE: str(path)})


def test_an_empty_file_is_refused(tmp_path: Path):
    path = tmp_path / "token"
    path.touch(mode=0o600)
    with pytest.raises(ConfigError, match="the control token is empty"):
        given_tokens(environment={CONTROL_FILE_VARIABLE: str(path)})


def test_every_run_has_tokens_of_its_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(ACCESS_VARIABLE, raising=False)
    runs = [tokens_of_run() for _ in range(2)]
    assert len({token for tokens in runs for token in (tokens.control, tokens.access)}) == 4
    monkeypatch.setenv(ACCESS_VARIABLE, "what agents are told")
    assert tokens_of_run().access == "what agents are told"
    assert len({tokens.control for tokens in (*runs, tokens_of_run())}) == 3


def test_a_run_and_its_external_servers_agree_on_the_agents_token():
    server, run = (given_tokens(environment={CONTROL_VARIABLE: "secret"}) for _ in range(2))
    assert server.access == run.access
    assert "secret" not in run.access


def test_agents_find_their_token_in_a_private_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(ACCESS_VARIABLE, raising=False)
    for _ in range(2):  # each run gets a new token
        tokens = tokens_of_run()
        path = Path(tell_agents(tmp_path / "run", tokens))
        assert path.read_text().strip() == tokens.access
        assert path.stat().st_mode & 0o777 == 0o600
        assert list(path.parent.iterdir()) == [path]
    monkeypatch.setenv(ACCESS_VARIABLE, "what agents are told")
    assert tell_agents(tmp_path / "other", tokens_of_run()) == ACCESS_VARIABLE
    assert not (tmp_path / "other").exists()


def test_the_repr_of_tokens_hides_them():
    assert repr(Tokens(control="secret", access="hidden")) == "Tokens()"


@pytest.mark.parametrize(
    ("path", "is_open_to"),
    [
        ("/health", ["control", "access", "nobody"]),
        ("/v1/chat/completions", ["control", "access"]),
        ("/metrics/", ["control", "access"]),
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
    tokens = Tokens(control="control", access="access")
    assert [token for token in ("control", "access", "nobody") if tokens.opens(path, f"Bearer {token}".encode())] == (
        is_open_to
    )


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
def test_an_error_keeps_only_the_paths_of_its_request(text: str, told: str):
    body = wire.encode({"data": {"directories": ["/data/sync/"]}, "path": "/data/adapter", "number": 3, "root": "/"})
    assert without_other_paths(text, body) == told
    assert "/data" not in without_other_paths(text, b"\xc1 no MessagePack")
