"""Copies checkpoints to a remote address, such as `trainer.ckpt_path=s3://…`, and fetches the newest for a resume.

A checkpoint is first completed in the run's local directory. Then its files are copied. The list of the files is copied
last, and a remote copy without the list does not count as a checkpoint. A failed copy is repeated with the next
checkpoint.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Collection
from pathlib import Path

from rl_core import remote_files
from rl_core.config import Config
from rl_core.errors import ConfigError, DeadlineError, StorageError
from rl_core.tasks import OwnThread
from rl_core.trainer.state.checkpoint import (
    COMPLETE,
    PARTIAL,
    complete_checkpoints,
    is_step_name,
    remove_complete,
    step_of,
)

logger = logging.getLogger(__name__)


class CheckpointCopies:
    """Copies checkpoints to one remote address, and fetches them from there."""

    def __init__(self, address: str):
        self._address = address.rstrip("/")
        self._failure: Exception | None = None
        self._sending: OwnThread[None] | None = None

    def steps(self) -> list[str]:
        """Names of the complete remote checkpoints, oldest first. Raises ConfigError if the store cannot be accessed,
        OSError if reading fails."""
        names = [name for name in remote_files.names_in(self._address) if is_step_name(name)]
        return sorted((name for name in names if self._listing(name) is not None), key=_step)

    def send(self, root: Path, *, keep: int = -1) -> None:
        """Copies the complete checkpoints in `root` that are missing or different at the address, and removes remote
        checkpoints that `root` lacks. Remote checkpoints older than all in `root` may come from an earlier run on
        another machine, so as many of them stay as `keep` allows. Logs a failure as a warning, and keeps it for
        `require_sent`.

        Args:
            root: the directory of the run's checkpoints.
            keep: number of checkpoints to keep at the address, including those in `root`; negative: all.
        """
        try:
            here = {path.name: path for path in complete_checkpoints(root)}
            for name, path in here.items():
                if self._listing(name) != (path / COMPLETE).read_bytes():
                    copy = f"{self._address}/{name}"
                    # If the step was trained again, the list of the earlier files would make an incomplete copy of the
                    # new files count as a checkpoint.
                    if remote_files.exists(copy):
                        remote_files.remove(copy)
                    remote_files.upload(path, copy, last=COMPLETE)
            for name in self._superseded(here, keep):
                remote_files.remove(f"{self._address}/{name}")
            self._failure = None
        except (OSError, ConfigError) as error:
            self._failure = error
            logger.warning("%s: checkpoints not copied (the next checkpoint tries again): %s", self._address, error)

    def _superseded(self, here: Collection[str], keep: int) -> list[str]:
        """The remote checkpoints to remove if a run has the checkpoints `here`."""
        if not here:
            return []
        oldest, there = min(map(_step, here)), self.steps()
        earlier = [name for name in there if _step(name) < oldest]
        surplus = earlier[: max(len(here) + len(earlier) - keep, 0)] if keep >= 0 else []
        return [*surplus, *(name for name in there[len(earlier) :] if name not in here)]

    async def send_within(self, root: Path, timeout_s: float, *, keep: int = -1) -> None:
        """Runs `send` in a thread. If it has not ended within `timeout_s`, it counts as failed but continues. Until it
        has ended, later calls only warn and copy nothing."""
        if self._sending is None or self._sending.is_done:
            self._sending = OwnThread(lambda: self.send(root, keep=keep))
            try:
                await self._sending.within(timeout_s)
                return
            except TimeoutError:
                self._failure = DeadlineError(f"no answer within {timeout_s:g} s (trainer.worker_timeout_s)")
        logger.warning("%s: checkpoints not copied, the store does not answer; the run continues", self._address)

    @property
    def has_begun(self) -> bool:
        """Whether `send_within` was called."""
        return self._sending is not None

    def require_sent(self) -> None:
        """Raises StorageError if the last copy failed."""
        if self._failure is not None:
            raise StorageError(
                f"{self._address} lacks checkpoints ({self._failure}); the run's directory has them all. Copy them to "
                "this address, or resume the run when the store can be reached",
                key="trainer.ckpt_path",
            ) from self._failure

    def fetch_newest(self, root: Path) -> None:
        """Downloads the newest remote checkpoint into `root`, if it is missing there. Raises ConfigError if the store
        cannot be accessed, OSError if reading or writing fails."""
        names = self.steps()
        if not names or (root / names[-1] / COMPLETE).is_file():
            return
        partial = root / f"{names[-1]}{PARTIAL}"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        logger.info("fetching %s from %s", names[-1], self._address)
        remote_files.download(f"{self._address}/{names[-1]}", partial)
        remove_complete(root / names[-1])  # without its list of files, an earlier copy is no checkpoint
        partial.rename(root / names[-1])

    def _listing(self, name: str) -> bytes | None:
        place = f"{self._address}/{name}/{COMPLETE}"
        if not remote_files.exists(place):
            return None
        with remote_files.opened(place) as file:
            return file.read()


def _step(name: str) -> int:
    return step_of(Path(name))


def copies_of(config: Config) -> CheckpointCopies | None:
    """Returns the `CheckpointCopies` of a run; None if `trainer.ckpt_path` is a local path."""
    path = config.trainer.ckpt_path
    return CheckpointCopies(path) if path is not None and remote_files.is_remote(path) else None


async def fetch_checkpoint(config: Config) -> None:
    """With `trainer.resume_mode=latest`, downloads the newest remote checkpoint, if there is one. Called before a run
    looks for a checkpoint to resume from.

    Raises:
        ConfigError: the address holds checkpoints but `resume_mode` is not `latest`, or the store cannot be accessed.
        StorageError: downloading failed.
        DeadlineError: the store did not answer within `trainer.worker_timeout_s`.
    """
    copies = copies_of(config)
    if copies is None:
        return
    timeout_s = config.trainer.worker_timeout_s
    try:
        await OwnThread(lambda: _fetch(copies, config)).within(timeout_s)
    except TimeoutError as error:
        raise DeadlineError(
            f"{config.trainer.ckpt_path} did not answer within {timeout_s:g} s (trainer.worker_timeout_s). Is its "
            "store reachable from this machine?",
            key="trainer.ckpt_path",
        ) from error


def _fetch(copies: CheckpointCopies, config: Config) -> None:
    path = config.trainer.ckpt_path
    try:
        names = copies.steps()
    except OSError as error:  # such as a bucket that this user may not read
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}", key="trainer.ckpt_path") from error
    if config.trainer.resume_mode == "latest":
        try:
            copies.fetch_newest(config.ckpt_dir)
        except OSError as error:
            raise StorageError(
                f"the newest checkpoint of {path} could not be copied to {config.ckpt_dir} "
                f"({error.strerror or error}). Start the run again when the store can be reached",
                key="trainer.ckpt_path",
            ) from error
    elif names:
        raise ConfigError(
            f"{path} holds checkpoints ({names[-1]}), and trainer.resume_mode={config.trainer.resume_mode} does not "
            "resume from them; choose another address, or trainer.resume_mode=latest",
            key="trainer.ckpt_path",
        )
