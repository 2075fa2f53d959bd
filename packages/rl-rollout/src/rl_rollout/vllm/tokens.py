"""Who may ask a server for what: a run's control token opens every route, an agent's access token the OpenAI API alone.

Neither is ever on a command line, which every user of the machine can read: a token comes from the environment, or from
a file that nobody else can read.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

import attrs

from rl_core.errors import ConfigError

ACCESS_VARIABLE = "RL_SERVER_TOKEN"
"""Environment variable: what agents show to servers and router."""
CONTROL_VARIABLE = "RL_CONTROL_TOKEN"
"""Environment variable: what a run shows to servers that it did not start."""
CONTROL_FILE_VARIABLE = "RL_CONTROL_TOKEN_FILE"
"""Environment variable: a file with the same, in place of it."""

_NUM_BYTES = 32
_AGENTS_PREFIX = "/v1/"
_AGENTS_PATHS = ("/health", "/ping", "/version", "/load", "/metrics", "/tokenize", "/detokenize")
_CONTROL_PATHS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
"""Of vLLM, there with VLLM_ALLOW_RUNTIME_LORA_UPDATING: they change what others are served."""


@attrs.frozen(kw_only=True)
class Tokens:
    """Of one server."""

    control: str = attrs.field(repr=False)
    """Opens every route."""
    access: str | None = attrs.field(repr=False, default=None)
    """Opens what agents use; None: that is open to all who reach the server."""

    def __attrs_post_init__(self) -> None:
        if not self.control:
            raise ConfigError(f"the control token is empty; {_REMEDY}")
        if self.access == self.control:
            raise ConfigError(
                f"{ACCESS_VARIABLE}, which agents are told, is the control token too, and would let them change the "
                "policy's weights; give the two different values"
            )

    def opens(self, path: str, authorization: bytes) -> bool:
        """Whether a request with this header may ask for `path`, which is decoded."""
        if is_bearer(authorization, self.control):
            return True
        return is_for_agents(path) and (self.access is None or is_bearer(authorization, self.access))


def is_for_agents(path: str) -> bool:
    """The route is part of the OpenAI API or only looks; all others of vLLM and of this package change a server."""
    path = path.rstrip("/")
    if path in _CONTROL_PATHS:
        return False
    return path.startswith(_AGENTS_PREFIX) or path in _AGENTS_PATHS


def is_bearer(authorization: bytes, token: str) -> bool:
    """Whether the header shows this token; takes equally long for any other one."""
    return hmac.compare_digest(authorization, f"Bearer {token}".encode())


def new_token() -> str:
    """A token that nobody guesses."""
    return secrets.token_urlsafe(_NUM_BYTES)


def tokens_of_run(host: str) -> Tokens:
    """Of the servers that a run starts: a control token that only the run knows; away from loopback also an access
    token, which is `RL_SERVER_TOKEN` where agents are to know it."""
    access = os.environ.get(ACCESS_VARIABLE) or (None if is_loopback(host) else new_token())
    return Tokens(control=new_token(), access=access)


def given_tokens(*, makes_file: bool = False, environment: Mapping[str, str] = os.environ) -> Tokens:
    """Of servers and runs that are started by themselves, from the environment.

    Args:
        makes_file: the server's side, which writes a new control token into a file that is not there.
        environment: of the process.

    Raises:
        ConfigError: no control token is given, two are, or its file can be read by others.
    """
    token, file = environment.get(CONTROL_VARIABLE), environment.get(CONTROL_FILE_VARIABLE)
    if token and file:
        raise ConfigError(f"{CONTROL_VARIABLE} and {CONTROL_FILE_VARIABLE} are both set; unset one of them")
    if file:
        token = _token_in(Path(file).expanduser(), makes_file=makes_file)
    elif not token:
        raise ConfigError(f"the control token of the servers is not known; {_REMEDY}")
    return Tokens(control=token, access=environment.get(ACCESS_VARIABLE) or None)


_REMEDY = (
    f"set {CONTROL_FILE_VARIABLE} to a file that you alone can read (a server makes it where it is missing), or "
    f"{CONTROL_VARIABLE} to the token, for the server and for the run alike"
)


def _token_in(path: Path, *, makes_file: bool) -> str:
    try:
        if makes_file and not path.exists():
            _write_new(path)
        with path.open() as file:
            mode = os.fstat(file.fileno()).st_mode
            token = file.read().strip()
    except OSError as error:
        raise ConfigError(f"{CONTROL_FILE_VARIABLE}: {path} cannot be read: {error.strerror}; {_REMEDY}") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(
            f"{CONTROL_FILE_VARIABLE}: others can read {path} (mode {stat.S_IMODE(mode):04o}); remove it and start the "
            f"server again, which makes a new one, or chmod 600 {path} if nobody has read it"
        )
    return token


def _write_new(path: Path) -> None:
    """Whole and readable by this user alone from its first moment; of servers that start together one is first."""
    descriptor, unfinished = tempfile.mkstemp(prefix=path.name, dir=path.parent)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(new_token() + "\n")
        with contextlib.suppress(FileExistsError):
            os.link(unfinished, path)
    finally:
        Path(unfinished).unlink()


def is_loopback(host: str) -> bool:
    """Only this machine reaches what listens there."""
    return host in ("127.0.0.1", "::1", "localhost")
