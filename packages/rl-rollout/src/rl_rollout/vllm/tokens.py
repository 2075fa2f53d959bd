"""Authorization: a run's control token opens every route of a server, an agent's access token only the routes for
agents.

Routes for agents are the OpenAI API and routes that only read, such as `/metrics`; they cannot change a server.

Without a token only `/health` answers, even on loopback, which every user of the machine can reach. Tokens are never on
a command line, which every user can read: they come from the environment, or from a file of mode 0600.
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
"""Name of the environment variable with the token that agents send to servers and router."""
CONTROL_VARIABLE = "RL_CONTROL_TOKEN"
"""Name of the environment variable with the control token that a run sends to servers that it did not start."""
CONTROL_FILE_VARIABLE = "RL_CONTROL_TOKEN_FILE"
"""Name of the environment variable with the path of a file that holds the control token. It is an alternative to
`CONTROL_VARIABLE`; setting both is an error."""
ACCESS_FILE = "agents_token"
"""Name of the file in the run directory that holds the token for agents, if the run has a router and ACCESS_VARIABLE is
not set."""

_NUM_BYTES = 32
_AGENTS_PREFIX = "/v1/"
_OPEN_PATH = "/health"
_AGENTS_PATHS = (_OPEN_PATH, "/ping", "/version", "/load", "/metrics", "/tokenize", "/detokenize")
_CONTROL_PATHS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
"""Routes of vLLM that need the control token, because they change what other clients are served. They exist only if
VLLM_ALLOW_RUNTIME_LORA_UPDATING is set."""


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
    """Opens the routes for agents. By default it is derived one-way from the control token, so that a run and its
    external servers agree on it."""

    def __attrs_post_init__(self) -> None:
        if not self.control:
            raise ConfigError(f"the control token is empty; {_REMEDY}")
        for name, token in (("the control token", self.control), (ACCESS_VARIABLE, self.access)):
            if not (token.isascii() and token.isprintable()):
                raise ConfigError(f"{name} must be one line of printable ASCII characters; choose another")
        if self.access == self.control:
            raise ConfigError(
                f"{ACCESS_VARIABLE}, which agents get, equals the control token, which would let them change the "
                "policy's weights; set two different values"
            )

    def opens(self, path: str, authorization: bytes) -> bool:
        """Whether a request with this header may access `path`, which is already percent-decoded."""
        if path.rstrip("/") == _OPEN_PATH or is_bearer(authorization, self.control):
            return True
        return is_for_agents(path) and is_bearer(authorization, self.access)


def is_for_agents(path: str) -> bool:
    """Whether the route belongs to the OpenAI API or is read-only. All other routes of vLLM and of this package need
    the control token."""
    path = path.rstrip("/")
    if path in _CONTROL_PATHS:
        return False
    return path.startswith(_AGENTS_PREFIX) or path in _AGENTS_PATHS


def is_bearer(authorization: bytes, token: str) -> bool:
    """Whether the header carries this token; compares in constant time."""
    return hmac.compare_digest(authorization, f"Bearer {token}".encode())


def new_token() -> str:
    """Makes a new random token that cannot be guessed."""
    return secrets.token_urlsafe(_NUM_BYTES)


def tokens_of_run() -> Tokens:
    """Makes the tokens for the servers that a run starts; only the run and its servers know the control token."""
    return _tokens(new_token(), os.environ)


def given_tokens(*, makes_file: bool = False, environment: Mapping[str, str] = os.environ) -> Tokens:
    """Reads the tokens of external servers, on their side and in the runs that use them.

    Args:
        makes_file: whether to write a new control token to the file if the file is missing; only servers do this.
        environment: the process's environment variables.

    Raises:
        ConfigError: the control token is not set, is empty or equals the access token; both variables are set; or the
            file cannot be read, or can be read by others.
    """
    token, file = environment.get(CONTROL_VARIABLE), environment.get(CONTROL_FILE_VARIABLE)
    if token and file:
        raise ConfigError(f"{CONTROL_VARIABLE} and {CONTROL_FILE_VARIABLE} are both set; unset one of them")
    if file:
        token = _token_in(Path(file).expanduser(), makes_file=makes_file)
    elif not token:
        raise ConfigError(f"the control token of the servers is not set; {_REMEDY}")
    return _tokens(token, environment)


def _tokens(control: str, environment: Mapping[str, str]) -> Tokens:
    access = environment.get(ACCESS_VARIABLE)
    return Tokens(control=control, access=access) if access else Tokens(control=control)


def tell_agents(directory: Path, tokens: Tokens) -> str:
    """Returns where agents find their token: the name of the environment variable or, if that is not set, the path of a
    file in the run's directory. In the second case, writes this file so that only this user can read it."""
    if tokens.access == os.environ.get(ACCESS_VARIABLE):
        return ACCESS_VARIABLE
    path = directory / ACCESS_FILE
    directory.mkdir(parents=True, exist_ok=True)
    _written(tokens.access, path).replace(path)
    return str(path)


_REMEDY = (
    f"set {CONTROL_FILE_VARIABLE} to a file that only you can read (a server creates it if it is missing), or "
    f"{CONTROL_VARIABLE} to the token; set the same for the server and the run"
)


def _token_in(path: Path, *, makes_file: bool) -> str:
    try:
        if makes_file and not path.exists():
            _write_new(path)
        with path.open(errors="replace") as file:
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
    """Writes a new token to `path`. If several servers do so at the same time, the first token stays."""
    unfinished = _written(new_token(), path)
    try:
        with contextlib.suppress(FileExistsError):
            os.link(unfinished, path)
    finally:
        unfinished.unlink()


def _written(token: str, path: Path) -> Path:
    """Writes the token to a new file next to `path`. The file is created so that only this user can read it."""
    descriptor, unfinished = tempfile.mkstemp(prefix=path.name, dir=path.parent)
    with os.fdopen(descriptor, "w") as file:
        file.write(token + "\n")
    return Path(unfinished)
