"""The Hugging Face hub: checks whether it answers, downloads models with progress lines, and uploads models.

Before huggingface_hub is used, one short request checks whether the hub answers, because the library would retry for
minutes.
"""

from __future__ import annotations

import http.client
import logging
import os
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rl_core.errors import ConfigError, install
from rl_core.stored_files import is_found

logger = logging.getLogger(__name__)

TIMEOUT_S = 10.0
LOOK_UP_S = 5.0
_LINE_EVERY_S = 5.0
_WANTED = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken")
"""Files of a model are downloaded if they match one of these patterns; weights in other formats are left out."""


def endpoint() -> str:
    """The hub's address: HF_ENDPOINT, or else the default of huggingface_hub. Raises ConfigError if HF_ENDPOINT is not
    set and huggingface_hub is not installed."""
    return os.environ.get("HF_ENDPOINT") or _library().constants.ENDPOINT


def is_offline() -> bool:
    """Whether the user has disabled requests to the hub, by a variable that huggingface_hub reads too."""
    chosen = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE", "")
    return chosen.upper() in ("1", "TRUE", "YES", "ON")


def is_name(path: str) -> bool:
    """Whether the path does not exist locally and could be the name of a model on the hub."""
    has_form = path.count("/") <= 1 and not path.startswith((".", "/", "~")) and not path.endswith("/")
    return has_form and not is_found(path)


def obstacle(kind: str, name: str) -> str | None:
    """Why requests cannot reach the hub; None if the hub answers, even with an HTTP error.

    Args:
        kind: `models` or `datasets`.
        name: the model or data set about which the hub is asked.
    """
    if is_offline():
        variable = "HF_HUB_OFFLINE" if os.environ.get("HF_HUB_OFFLINE") else "TRANSFORMERS_OFFLINE"
        return f"{variable} disables requests to the hub"
    url = f"{endpoint()}/api/{kind}/{urllib.parse.quote(name)}"
    answered: list[Exception | None] = []
    asking = threading.Thread(target=lambda: answered.append(_failure(url)), name="rl-hub", daemon=True)
    asking.start()
    # The timeout of urlopen starts with the connection. Resolving the host name before that may take minutes.
    asking.join(TIMEOUT_S + LOOK_UP_S)
    error = answered[0] if answered else TimeoutError(f"no answer within {TIMEOUT_S + LOOK_UP_S:g} s")
    return None if error is None else f"{endpoint()} cannot be reached ({error})"


def _failure(url: str) -> Exception | None:
    """The error with which the request failed; None if the server answered, even with an HTTP error."""
    try:
        urllib.request.urlopen(url, timeout=TIMEOUT_S).close()
    except urllib.error.HTTPError:
        return None  # loading the model with the user's token will report this error
    except (OSError, ValueError, http.client.HTTPException) as error:
        return error
    return None


def require_model(name: str, *, key: str) -> bool:
    """Returns True if the hub can be reached, and False if it cannot but the model is in the local cache.

    Raises ConfigError if neither is the case.
    """
    reason = obstacle("models", name)
    if reason is None:
        return True
    if is_cached(name):
        return False
    raise ConfigError(
        f"{name}: there is no such directory (current directory: {Path.cwd()}), the model is not in the local cache, "
        f"and {reason}. If this machine has no network, download the model on another machine (hf download {name} "
        "--local-dir DIRECTORY), copy it here and use that directory. Is the name spelled correctly?",
        key=key,
    )


def is_cached(name: str, file: str = "config.json") -> bool:
    """Whether a file of the model is in the local cache; other files may be missing."""
    try:
        return isinstance(_library().try_to_load_from_cache(name, file), str)
    except ValueError:  # the hub allows no such name, for example one with a blank
        return False


def fetch_model(name: str, *, key: str) -> None:
    """Downloads a model into the local cache, and logs progress every few seconds.

    Does nothing if the hub cannot be reached but the model is in the cache.

    Args:
        name: the model's name on the hub, such as `org/model`.
        key: the configuration key that names the model, for messages.

    Raises:
        ConfigError: the model does not exist, the hub refuses access, the download fails, the hub cannot be reached and
            the model is not in the cache, or huggingface_hub is not installed.
    """
    library = _library()
    if not require_model(name, key=key):
        return
    with _refusals(name, _REMEDIES, key=key):
        info = library.HfApi().model_info(name, files_metadata=True)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or () if _is_wanted(file.rfilename)}
        missing = [
            file for file in sizes if not isinstance(library.try_to_load_from_cache(name, file, revision=info.sha), str)
        ]
        if not missing:
            return
        cache = Path(library.constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}" / "blobs"
        with _progress(name, cache, sum(sizes[file] for file in missing)):
            library.snapshot_download(name, allow_patterns=list(_WANTED))


def push_model(directory: Path, name: str, *, is_private: bool) -> str:
    """Uploads a model's directory to the repository `name`, and creates the repository if necessary. Returns the
    repository's address.

    Raises ConfigError if the user is not logged in, the hub cannot be reached, or the upload fails.
    """
    library = _library()
    if library.get_token() is None:
        raise ConfigError("rl push: you are not logged in to the hub: run hf auth login, or set HF_TOKEN")
    if (reason := obstacle("models", name)) is not None:
        raise ConfigError(
            f"rl push: {name}: {reason}. Nothing was sent; run the same command again when the hub can be reached"
        )
    may_write = (
        "Use a token that may write to this repository (hf auth login, or HF_TOKEN), and a name under your own account "
        "or an organisation of yours"
    )
    with _refusals(name, dict.fromkeys((401, 403, 404), may_write), key="rl push"):
        api = library.HfApi()
        api.create_repo(name, private=is_private, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=str(directory), commit_message="Model trained with rl")
    return f"{endpoint()}/{name}"


def _is_wanted(file: str) -> bool:
    return any(Path(file).match(pattern) for pattern in _WANTED)


def _library() -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
    except ImportError as error:
        raise ConfigError(f"the hub needs the package huggingface-hub: {install('rl-core[hub]')}") from error
    return huggingface_hub


_REMEDIES = {
    401: "Is the name spelled correctly? If the repository is private or gated, log in: hf auth login",
    403: "Request access on the repository's page, and log in: hf auth login",
    404: "Is the name spelled correctly? If the repository is private, log in: hf auth login",
}
"""HTTP status of a refused download → what to do."""


@contextmanager
def _refusals(name: str, remedies: Mapping[int, str], *, key: str) -> Iterator[None]:
    """Converts errors of the hub or of the network into ConfigError. `remedies`: HTTP status → what to do."""
    try:
        yield
    except Exception as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        remedy = remedies.get(status or 0, "Run the same command again; files that were transferred are kept")
        if isinstance(error, _library().errors.HFValidationError):
            remedy = "Is the name spelled correctly?"
        first = next(iter(str(error).strip().splitlines()), "").rstrip(".")
        message = f"{name}: {endpoint()}: {type(error).__name__}: {first}. {remedy}"
        raise ConfigError(message, key=key) from error


@contextmanager
def _progress(name: str, cache: Path, num_bytes: int) -> Iterator[None]:
    """Context that logs the size of the download at the beginning. Every few seconds and at the end, it logs how much
    has arrived."""
    before, started, done = _size_of(cache), time.monotonic(), threading.Event()

    def line() -> str:
        arrived = min(max(0, _size_of(cache) - before), num_bytes)
        rate = arrived / max(time.monotonic() - started, 0.1)
        return f"downloading {name}: {_amounts([arrived, num_bytes])} ({rate / 1e6:.1f} MB/s)"

    def say() -> None:
        while not done.wait(_LINE_EVERY_S):
            logger.info("%s", line())

    logger.info("downloading %s: %s", name, _amounts([num_bytes]))
    thread = threading.Thread(target=say, name="rl-download", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    logger.info("%s", line())


def _amounts(sizes: Sequence[int]) -> str:
    unit, divisor = ("GB", 1e9) if max(sizes) >= 1e9 else ("MB", 1e6)
    return " of ".join(f"{size / divisor:.2f}" for size in sizes) + f" {unit}"


def _size_of(directory: Path) -> int:
    total = 0
    for path in directory.glob("*"):
        try:
            total += path.stat().st_size
        except OSError:
            continue  # renamed since
    return total
