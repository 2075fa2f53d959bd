"""A run's directories belong to one process at a time: a second one is told who has them, and changes nothing.

A lock is flock(2) on a file with the process's id, host and start in it. The kernel lifts it when the process ends,
however it ends, so a file that a killed run left keeps nobody out. The file lies beside the directory, as
`.<name>.rl-lock`: a run moves an earlier run's directory away, and a file inside would go with it, lock and all. Only
where the directory cannot be moved, because it is a mount point or the one above it cannot be written, is it inside.

Locks of one host may not be seen by another one that shares the file system, and some file systems have none. So a run
also touches its lock files every few seconds, and where a file names a process of another host, it is watched for such
a sign of life before it is taken over.

What lies inside another directory of the run needs no lock of its own: a run looks for those of others around its own
directories too, above them and directly inside. It does so once it has its locks, so of two runs whose directories
overlap at least one sees the other.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

import attrs

from rl_core.config import Config
from rl_core.config.resolving import value_at
from rl_core.errors import ConfigError

logger = logging.getLogger(__name__)

_KEYS = ("trainer.run_dir", "trainer.ckpt_path", "trainer.export_path")
_SUFFIX = ".rl-lock"
_PATIENCE_S = 2.0
"""So long a lock is asked for that somebody has who has not written yet who he is, or who only looks."""
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP}
_BEAT_S, _WATCH_S = 4.0, 10.0
"""A run touches its lock files so often; one that nobody touches for so long is a dead run's."""
_dead: set[tuple[Path, Holder]] = set()
"""Who was found dead in this process: each is watched for once."""
_descriptors: set[int] = set()
"""Of the locks of this process. A child that is forked would keep them after its parent's end."""


@attrs.frozen(kw_only=True)
class Holder:
    """The process that has a lock."""

    pid: int
    host: str
    started: str
    """When it took the lock: local time with its offset from UTC."""


@contextmanager
def held_directories(config: Config) -> Iterator[None]:
    """Inside, the run, checkpoint and export directories are this run's alone.

    Raises:
        ConfigError: another run has one of them, or one that contains it or lies in it; or a lock file cannot be made.
    """
    directories, pid = _directories(config), os.getpid()
    taken: dict[Path, int] = {}
    try:
        _require_unused(config, directories, taken)
        for directory, key in sorted(directories.items()):
            path = _lock_file(directory)
            taken[path] = _taken(config, key, path)
        _require_unused(config, directories, taken)
        with _signs_of_life(taken.values()):
            yield
    finally:
        if os.getpid() == pid:  # not in a forked child, which unwinds the same stack
            for path, descriptor in taken.items():
                _release(path, descriptor)


def require_unused(config: Config) -> None:
    """What `held_directories` would refuse now; takes and writes nothing.

    Raises:
        ConfigError: another run has one of the directories, or one that contains it or lies in it.
    """
    _require_unused(config, _directories(config), {})


def _directories(config: Config) -> dict[Path, str]:
    """What the run writes, each with its key: by its own name and, where that is a link, by what it leads to; without
    what lies in another of them."""
    found: dict[Path, str] = {}
    for key in _KEYS:
        path = str(config.ckpt_dir) if key == "trainer.ckpt_path" else value_at(config, key)
        named = Path(path).absolute()
        if named.name != "..":
            found.setdefault(Path(os.path.realpath(named.parent), named.name), key)
        found.setdefault(Path(os.path.realpath(named)), key)
    return {path: key for path, key in found.items() if not any(other in path.parents for other in found)}


def _beside(directory: Path) -> Path:
    return directory.with_name(f".{directory.name}{_SUFFIX}") if directory.name else _inside(directory)


def _inside(directory: Path) -> Path:
    return directory / _SUFFIX


def _lock_file(directory: Path) -> Path:
    cannot_move = directory.is_dir() and (directory.is_mount() or not os.access(directory.parent, os.W_OK | os.X_OK))
    return _inside(directory) if cannot_move else _beside(directory)


def _directory_of(lock_file: Path) -> Path:
    name = lock_file.name.removesuffix(_SUFFIX)
    return lock_file.with_name(name[1:]) if name else lock_file.parent


def _require_unused(config: Config, directories: Mapping[Path, str], own: Mapping[Path, int]) -> None:
    """No other process has a lock of the directories, of one above them, or of one directly inside."""
    for directory, key in directories.items():
        above = [file for place in (directory, *directory.parents) for file in (_beside(place), _inside(place))]
        for path in dict.fromkeys([*above, *_lock_files_in(directory)]):
            if path not in own:
                _require_free(config, key, path)


def _lock_files_in(directory: Path) -> list[Path]:
    try:
        return [path for path in directory.iterdir() if path.name.endswith(_SUFFIX)]
    except OSError:  # it is not there, or its holder moves it away just now, and has a lock beside it
        return []


def _require_free(config: Config, key: str, path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:  # most are not there; who may not read one may not write the directory either
        return
    try:
        has_lock = _lock(config, key, path, descriptor, fcntl.LOCK_SH)
        _require_dead(config, key, path, descriptor, has_lock=has_lock)
    finally:
        os.close(descriptor)


def _taken(config: Config, key: str, path: Path) -> int:
    """The descriptor of a new lock file, with a warning where the file system has no locks."""
    try:
        while True:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            _descriptors.add(descriptor)
            try:
                has_lock = _lock(config, key, path, descriptor, fcntl.LOCK_EX)
                _require_dead(config, key, path, descriptor, has_lock=has_lock)
            except BaseException:
                _close(descriptor)
                raise
            if not has_lock:
                message = (
                    "%s: the file system of %s has no locks, so only heartbeat files tell whether another run is alive"
                )
                logger.warning(message, key, _directory_of(path))
            if _is_at(path, descriptor):
                _write_holder(descriptor)
                return descriptor
            _close(descriptor)  # its holder removed the file after it was opened here
    except OSError as error:
        raise ConfigError(
            f"{key}: {value_at(config, key)} cannot be locked: {path}: {error.strerror}. Choose another directory"
        ) from error


def _lock(config: Config, key: str, path: Path, descriptor: int, kind: int) -> bool:
    """Takes a lock of that kind; whether the file system has any. Raises ConfigError with its holder where another
    process has one."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            return True
        except (BlockingIOError, PermissionError):
            holder = _read_holder(descriptor)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return False
            raise
        if _is_running_here(holder) or time.monotonic() > deadline:
            raise _in_use(config, key, path, holder)
        time.sleep(0.02)


def _require_dead(config: Config, key: str, path: Path, descriptor: int, *, has_lock: bool) -> None:
    """Whom the lock file names no longer runs, though nothing or no lock shows it. Raises ConfigError where it does."""
    holder = _read_holder(descriptor)
    if holder is None or (path, holder) in _dead:
        return
    is_here = holder.host == socket.gethostname()
    if is_here and (has_lock or holder.pid == os.getpid() or not _is_running_here(holder)):
        return
    if _is_touched(path):
        raise _in_use(config, key, path, holder)
    _dead.add((path, holder))
    logger.warning(
        "%s: process %d on %s, started %s, left %s and shows no sign of life; this run takes its lock over",
        key,
        holder.pid,
        holder.host,
        holder.started,
        path,
    )


def _is_touched(path: Path) -> bool:
    """Somebody does while it is watched. No clocks of two hosts are compared."""
    first, deadline = _touched_at(path), time.monotonic() + _WATCH_S
    while first is not None and time.monotonic() < deadline:
        time.sleep(0.2)
        now = _touched_at(path)
        if now != first:
            return now is not None
    return False


def _touched_at(path: Path) -> int | None:
    try:
        descriptor = os.open(path, os.O_RDONLY)  # opened anew: a shared file system asks its server then
    except FileNotFoundError:
        return None
    try:
        return os.fstat(descriptor).st_mtime_ns
    finally:
        os.close(descriptor)


@contextmanager
def _signs_of_life(descriptors: Iterable[int]) -> Iterator[None]:
    """Within the context, updates the files' timestamps every few seconds."""
    ends, held = threading.Event(), list(descriptors)

    def touch() -> None:
        while not ends.wait(_BEAT_S):
            for descriptor in held:
                with suppress(OSError):  # a full or lost disk ends the run elsewhere
                    os.utime(descriptor)

    thread = threading.Thread(target=touch, name="run-lock", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()


def _in_use(config: Config, key: str, path: Path, holder: Holder | None) -> ConfigError:
    who = f"process {holder.pid} on {holder.host}, started {holder.started}," if holder else "a process yet unknown"
    other = f"trainer.run_name or {key}" if key == "trainer.run_dir" else key
    is_here = holder is not None and holder.host == socket.gethostname()
    if_gone = "" if is_here else f"; if that machine is gone for good, remove {path}"
    return ConfigError(
        f"{key}: {value_at(config, key)} is in use: {who} writes {_directory_of(path)}. Wait for that run or stop it, "
        f"or choose another {other}{if_gone}"
    )


def _is_running_here(holder: Holder | None) -> bool:
    """A holder of this machine that still runs. Of one that does not, the file tells only until the next one writes."""
    if holder is None or holder.host != socket.gethostname():
        return False
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True


def _write_holder(descriptor: int) -> None:
    started = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    holder = Holder(pid=os.getpid(), host=socket.gethostname(), started=started)
    line = json.dumps(attrs.asdict(holder)).encode() + b"\n"
    os.pwrite(descriptor, line, 0)  # in one piece: a reader sees this line or the one before, whole
    os.ftruncate(descriptor, len(line))


def _read_holder(descriptor: int) -> Holder | None:
    try:
        return Holder(**json.loads(os.pread(descriptor, 4096, 0).split(b"\n")[0]))
    except (ValueError, TypeError):  # nothing is written yet
        return None


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _release(path: Path, descriptor: int) -> None:
    """Removes the file while it is locked, so that none is removed that another process has locked meanwhile."""
    try:
        if _is_at(path, descriptor):
            path.unlink()
    except OSError as error:
        logger.warning("%s could not be removed: %s. It does not block other runs", path, error.strerror)
    finally:
        _close(descriptor)


def _close(descriptor: int) -> None:
    _descriptors.discard(descriptor)
    os.close(descriptor)


def _close_inherited() -> None:
    for descriptor in _descriptors:
        os.close(descriptor)
    _descriptors.clear()


os.register_at_fork(after_in_child=_close_inherited)
