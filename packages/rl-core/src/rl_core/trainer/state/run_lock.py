"""Locks a run's directories for one process. A second process gets an error that names the holder, and changes nothing.

A lock is flock(2) on a file that contains the process's id and host, and the time at which it took the lock. The kernel
releases the lock however the process ends, so the lock file of a killed run blocks no other run. A run may move an
earlier run's directory away together with all files in it. So the lock file is next to the directory, as
`.<name>.rl-lock`. It is inside the directory only if the directory cannot be moved, because the directory is a mount
point or its parent is not writable.

A host may not see the locks of another host on a shared file system, and some file systems have no locks. So a run also
touches its lock files every few seconds. The process named in a lock file may still be alive although this host sees no
lock of that process. A new run then watches the file for a touch before it takes the lock over.

Every run also looks for lock files above its directories and directly inside them, but not deeper. So a directory that
is inside another directory of the same run needs no separate lock. A run looks before and after it takes its own locks,
so two runs that start at the same time do not miss each other's locks in these places.
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
"""Seconds for which an attempt to lock is repeated, because the lock's holder may not have written its identity yet, or
may hold the lock only for a check."""
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP}
_BEAT_S, _WATCH_S = 4.0, 10.0
"""Seconds between touches of a run's lock files; and seconds without a touch after which a run counts as dead."""
_dead: set[tuple[Path, Holder]] = set()
"""Holders that this process has found dead, so that each is watched only once."""
_descriptors: set[int] = set()
"""File descriptors of this process's locks. A forked child must close them; otherwise it would hold the locks after its
parent has ended."""


@attrs.frozen(kw_only=True)
class Holder:
    """The process that holds a lock."""

    pid: int
    host: str
    started: str
    """When the process took the lock: local time with UTC offset."""


@contextmanager
def held_directories(config: Config) -> Iterator[None]:
    """Context in which only this run may use its run, checkpoint and export directories.

    Raises:
        ConfigError: another run holds one of these directories, a directory above them, or a directory directly inside
            them; or a lock file cannot be created.
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
        if os.getpid() == pid:  # a forked child runs this block too, but must not release the parent's locks
            for path, descriptor in taken.items():
                _release(path, descriptor)


def require_unused(config: Config) -> None:
    """Makes the checks of `held_directories`, but keeps no lock and writes nothing.

    Raises:
        ConfigError: another run holds one of these directories, a directory above them, or a directory directly inside
            them.
    """
    _require_unused(config, _directories(config), {})


def _directories(config: Config) -> dict[Path, str]:
    """Directory that the run writes → its configuration key. If a configured path is a link, both the path and
    the link's target are listed. Leaves out directories inside another one."""
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
    """Requires that no other process holds a lock of the directories, of a directory above one of them, or of a
    directory directly inside one of them."""
    for directory, key in directories.items():
        above = [file for place in (directory, *directory.parents) for file in (_beside(place), _inside(place))]
        for path in dict.fromkeys([*above, *_lock_files_in(directory)]):
            if path not in own:
                _require_free(config, key, path)


def _lock_files_in(directory: Path) -> list[Path]:
    try:
        return [path for path in directory.iterdir() if path.name.endswith(_SUFFIX)]
    except OSError:  # the directory is missing, or the run that holds the lock next to it is moving it away
        return []


def _require_free(config: Config, key: str, path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:  # usually the file does not exist; without read permission, the directory is another user's
        return
    try:
        has_lock = _lock(config, key, path, descriptor, fcntl.LOCK_SH)
        _require_dead(config, key, path, descriptor, has_lock=has_lock)
    finally:
        os.close(descriptor)


def _taken(config: Config, key: str, path: Path) -> int:
    """Creates a lock file if it is missing, locks it, writes this process's identity into it, and returns its
    descriptor. Warns if the file system has no locks."""
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
                    "%s: the file system of %s has no locks; only the timestamps of lock files show other live runs"
                )
                logger.warning(message, key, _directory_of(path))
            if _is_at(path, descriptor):
                _write_holder(descriptor)
                return descriptor
            _close(descriptor)  # the holder removed the file after this process opened it
    except OSError as error:
        raise ConfigError(
            f"{value_at(config, key)} cannot be locked: {path}: {error.strerror}. Choose another directory", key=key
        ) from error


def _lock(config: Config, key: str, path: Path, descriptor: int, kind: int) -> bool:
    """Takes a shared or exclusive lock (`kind`). Returns False if the file system has no locks. Raises a ConfigError
    that names the holder if another process has the lock."""
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
    """Raises ConfigError if the process named in the lock file may still run although no lock of it was found. This
    happens if that process is on another host, or if the file system has no locks."""
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
        "%s: process %d on %s, started %s, left %s and shows no sign of life; this run takes over its lock",
        key,
        holder.pid,
        holder.host,
        holder.started,
        path,
    )


def _is_touched(path: Path) -> bool:
    """Watches the file for up to `_WATCH_S`. Returns whether a process touched it. Compares only the file's timestamps
    with each other, because the clocks of two hosts may differ."""
    first, deadline = _touched_at(path), time.monotonic() + _WATCH_S
    while first is not None and time.monotonic() < deadline:
        time.sleep(0.2)
        now = _touched_at(path)
        if now != first:
            return now is not None
    return False


def _touched_at(path: Path) -> int | None:
    try:
        descriptor = os.open(path, os.O_RDONLY)  # opened again, so that a shared file system asks its server
    except FileNotFoundError:
        return None
    try:
        return os.fstat(descriptor).st_mtime_ns
    finally:
        os.close(descriptor)


@contextmanager
def _signs_of_life(descriptors: Iterable[int]) -> Iterator[None]:
    """Context in which a thread updates the timestamps of the lock files every `_BEAT_S` seconds."""
    ends, held = threading.Event(), list(descriptors)

    def touch() -> None:
        while not ends.wait(_BEAT_S):
            for descriptor in held:
                with suppress(OSError):  # if the file system is full or lost, other writes of the run report it
                    os.utime(descriptor)

    thread = threading.Thread(target=touch, name="run-lock", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()


def _in_use(config: Config, key: str, path: Path, holder: Holder | None) -> ConfigError:
    who = f"process {holder.pid} on {holder.host}, started {holder.started}," if holder else "an unknown process"
    other = f"trainer.run_name or {key}" if key == "trainer.run_dir" else key
    is_here = holder is not None and holder.host == socket.gethostname()
    gone = "that machine is gone for good" if holder else "no run uses it any more"
    if_gone = "" if is_here else f"; if {gone}, remove {path}"
    return ConfigError(
        f"{value_at(config, key)} is in use: {who} writes {_directory_of(path)}. Wait for that run or stop it, or "
        f"choose another {other}{if_gone}",
        key=key,
    )


def _is_running_here(holder: Holder | None) -> bool:
    """Whether the holder is a running process on this machine. False for an earlier holder that has ended; a lock file
    names it until the new holder has written its identity."""
    if holder is None or holder.host != socket.gethostname():
        return False
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # the process runs, but belongs to another user
        return True
    return True


def _write_holder(descriptor: int) -> None:
    started = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    holder = Holder(pid=os.getpid(), host=socket.gethostname(), started=started)
    line = json.dumps(attrs.asdict(holder)).encode() + b"\n"
    os.pwrite(descriptor, line, 0)  # a single write, so that a reader sees a complete line, either this or the old one
    os.ftruncate(descriptor, len(line))


def _read_holder(descriptor: int) -> Holder | None:
    """The identity in a lock file; None if its process has not written it yet, or another program wrote the file."""
    try:
        holder = Holder(**json.loads(os.pread(descriptor, 4096, 0).split(b"\n")[0]))
    except (ValueError, TypeError, RecursionError):
        return None
    is_whole = type(holder.pid) is int and isinstance(holder.host, str) and isinstance(holder.started, str)
    return holder if is_whole and 0 < holder.pid < 2**31 else None


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _release(path: Path, descriptor: int) -> None:
    """Removes the lock file, then unlocks it by closing it. In this order, the removed file cannot be one that another
    process has just locked."""
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
