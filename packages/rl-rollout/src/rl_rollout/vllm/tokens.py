"""Who may ask a server for what: a run's control token opens every route, an agent's access token the OpenAI API alone.

Without a token nothing but `/health` answers, on loopback too, which every user of the machine reaches. No token is
ever on a command line, which every user can read too: it comes from the environment, or from a file of mode 0600.
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
ACCESS_FILE = "agents_token"
"""In the directory of a run with a router: what agents show, where ACCESS_VARIABLE does not say it."""

_NUM_BYTES = 32
_AGENTS_PREFIX = "/v1/"
_OPEN_PATH = "/health"
_AGENTS_PATHS = (_OPEN_PATH, "/ping", "/version", "/load", "/metrics", "/tokenize", "/detokenize")
_CONTROL_PATHS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
"""Of vLLM, there with VLLM_ALLOW_RUNTIME_LORA_UPDATING: they change what others are served."""


@attrs.frozen(kw_only=True)
class Tokens:
    """The tokens of one server."""

    control: str = attrs.field(repr=False)
    """Opens every route."""
    access: str = attrs.field(
        repr=False,
        default=attrs.Factory(
            lambda tokens: hmac.new(tokens.control.encode(), b"access", "sha256").hexdigest(), takes_self=True
        ),
    )
    """Opens what agents use. By default it follows from the control token, which it does not give away: a run and its
    external servers agree on it."""

    def __attrs_post_init__(self) -> None:
        if not self.control:
            raise ConfigError(f"the control token is empty; {_REMEDY}")
        if self.access == self.control:
            raise ConfigError(
                f"{ACCESS_VARIABLE}, which agents are told, is the control token too, and would let them change the "
                "policy's weights; set two different values"
            )

    def opens(self, path: str, authorization: bytes) -> bool:
        """Whether a request with this header may ask for `path`, which is decoded."""
        if path.rstrip("/") == _OPEN_PATH or is_bearer(authorization, self.control):
            return True
        return is_for_agents(path) and is_bearer(authorization, self.access)


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


def tokens_of_run() -> Tokens:
    """Of the servers that a run starts: a control token that only the run knows."""
    return _tokens(new_token(), os.environ)


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
    return _tokens(token, environment)


def _tokens(control: str, environment: Mapping[str, str]) -> Tokens:
    access = environment.get(ACCESS_VARIABLE)
    return Tokens(control=control, access=access) if access else Tokens(control=control)


def tell_agents(directory: Path, tokens: Tokens) -> str:
    """Where agents find their token, in words: in the environment, or in a file that is written into the run's
    directory, for this user alone."""
    if tokens.access == os.environ.get(ACCESS_VARIABLE):
        return ACCESS_VARIABLE
    path = directory / ACCESS_FILE
    directory.mkdir(parents=True, exist_ok=True)
    _written(tokens.access, path).replace(path)
    return str(path)


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
    """Writes a new token; of servers that start at the same time, only the first one writes."""
    unfinished = _written(new_token(), path)
    try:
        with contextlib.suppress(FileExistsError):
            os.link(unfinished, path)
    finally:
        unfinished.unlink()


def _written(token: str, path: Path) -> Path:
    """A file beside `path`, readable by this user alone from its first moment."""
    descriptor, unfinished = tempfile.mkstemp(prefix=path.name, dir=path.parent)
    with os.fdopen(descriptor, "w") as file:
        file.write(token + "\n")
    return Path(unfinished)
