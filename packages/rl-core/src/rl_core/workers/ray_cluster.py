"""Connects to Ray and reserves a placement group for a group of ranks.

A placement group has one bundle for each node of the group. A rank reserves `CPUS` of a CPU and, if the cluster has
GPUs, one GPU. Ranks share cores, so `CPUS` only limits the number of ranks per machine. A group that shares another
group's devices reserves nothing; it uses the same bundles and GPUs.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Self

from rl_core.errors import ConfigError, DeadlineError, WorkerError, install
from rl_core.workers.ray_watch import RayWatch

if "RAY_ADDRESS" not in os.environ:
    # Ray reads this variable when it is imported. Despite the name, 0 makes Ray listen only on loopback on all systems.
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    # Ray's default niceness of 15 lets any other process on the machine starve ranks and inference servers.
    os.environ.setdefault("RAY_worker_niceness", "0")

# Ray's native handler of SIGTERM prints stack traces and aborts the process. Crashes still print their Python stack.
os.environ.setdefault("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1")

try:
    import ray
    from ray.exceptions import RayError
    from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
except ModuleNotFoundError as error:
    raise ConfigError(
        "several ranks, or a backend that needs a separate process, run on Ray, which is not installed: "
        f"{install('rl-core[ray]')}"
    ) from error

logger = logging.getLogger(__name__)

_TELL_S = 30.0
"""Longest wait in seconds for Ray to end ranks, or itself."""
CPUS = 1 / 16
"""CPU resource of a rank; a machine of two cores has room for 32 ranks."""


class RaySession:
    """The connection to Ray. Joins the cluster at RAY_ADDRESS if that is set, else starts Ray on this machine. When the
    last user has left, disconnects from the cluster or stops Ray. If this process was connected to Ray already, uses
    that connection and leaves it open."""

    def __init__(self) -> None:
        self._users = 0
        self._is_ours = False
        self._watch: RayWatch | None = None
        self._unanswered: str | None = None

    @property
    def lost(self) -> str | None:
        """Why Ray can no longer be used: one of its own processes died, or did not answer `tell`; None: Ray can be
        used."""
        return self._unanswered or (None if self._watch is None else self._watch.lost)

    def enter(self) -> None:
        if not ray.is_initialized():
            self._connect()
            self._is_ours = True
        self._users += 1

    def leave(self) -> None:
        self._users -= 1
        if self._users == 0 and self._is_ours:
            self._is_ours = False
            if self._watch is not None:
                self._watch.close()
            self.tell(ray.shutdown)
            if self.lost is not None:
                # `ray.shutdown` would hang when this process exits. The processes that Ray started end with this one.
                atexit.unregister(ray.shutdown)

    def tell(self, call: Callable[[], object]) -> None:
        """Calls Ray, and waits at most `_TELL_S`, because the call never returns while one of Ray's servers is stopped.
        Does nothing if Ray is lost, because the call would end this process."""
        if self.lost is not None:
            return
        thread = threading.Thread(target=call, name="rl-core-ray-tell", daemon=True)
        thread.start()
        thread.join(_TELL_S)
        if thread.is_alive():
            self._unanswered = f"Ray did not answer within {_TELL_S:g} s"
            logger.warning("%s; the processes that it started on this machine end with this one", self._unanswered)

    def _connect(self) -> None:
        self._unanswered = None
        common: dict[str, Any] = {"namespace": "rl", "log_to_driver": False, "logging_level": logging.WARNING}
        address = os.environ.get("RAY_ADDRESS", "local")
        if address == "local":
            self._watch = self._start_locally(common)
            return
        try:
            self._watch = _init(address, **common)
        except (ConnectionError, RayError, ValueError) as error:
            raise ConfigError(
                f"RAY_ADDRESS is {address!r}, but no Ray cluster could be joined there ({error}). Start one with "
                "`ray start --head`; if it demands a token (~/.ray/auth_token), set RAY_AUTH_MODE=token; or unset "
                "RAY_ADDRESS to use this machine alone"
            ) from error

    def _start_locally(self, common: dict[str, Any]) -> RayWatch | None:
        """Starts Ray on this machine. Ray allows its node 30 s to start. This time is not configurable and too short on
        a busy machine, so there are two attempts."""
        for is_last_try in (False, True):
            try:
                return _init("local", include_dashboard=False, **common)
            except Exception as error:
                if "AF_UNIX path length" in str(error):
                    raise ConfigError(
                        f"Ray cannot start: the path of its temporary directory is too long for sockets ({error}). "
                        "Set RAY_TMPDIR to a shorter path"
                    ) from error
                if "timed out during startup" not in str(error):
                    raise
                ray.shutdown()
                if is_last_try:
                    raise WorkerError(
                        "Ray did not start on this machine in two attempts of 30 s. The machine may be short of CPU "
                        "time or memory; Ray's own logs are in the `logs` folder of its newest session"
                    ) from error
        raise AssertionError("the last attempt returns or raises")


def _init(address: str, **options: Any) -> RayWatch | None:
    """Calls ray.init in a separate thread: in the main thread it would make SIGTERM kill the process without a
    checkpoint. Returns a watch of the servers that it started or found.

    The thread keeps running, because Ray's processes end with the thread that started them.
    """
    done: Future[Any] = Future()

    def run() -> None:
        # Ray's processes inherit the mask. A closed terminal sends SIGHUP to them too, but the run still needs them to
        # save a checkpoint. They block SIGINT themselves.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
        try:
            found = getattr(ray.init(address, **options), "address_info", None)
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(found)
            threading.Event().wait()

    log = logging.getLogger("ray._private.worker")
    log.addFilter(_is_not_about_sigterm)
    try:
        threading.Thread(target=run, name="rl-core-ray", daemon=True).start()
        found = done.result()
    finally:
        log.removeFilter(_is_not_about_sigterm)
    if found is None:  # a client of a remote cluster (`ray://`), with no server on this machine
        return None
    return RayWatch(found["raylet_socket_name"], found["gcs_address"], f"{found['session_dir']}/logs")


def _is_not_about_sigterm(record: logging.LogRecord) -> bool:
    return "SIGTERM handler is not set" not in record.getMessage()


ray_session = RaySession()
"""The session of this process; inference servers use it too."""


async def reserved(bundles: Sequence[Mapping[str, float]], strategy: str, timeout_s: float) -> PlacementGroup | None:
    """Returns a ready placement group, or None (and cancels the request) if its resources do not become free in time.

    Inference servers on Ray use it too.
    """
    group = placement_group([dict(bundle) for bundle in bundles], strategy=strategy)
    is_ready = False
    try:
        is_ready = await asyncio.to_thread(group.wait, timeout_s)
    finally:
        if not is_ready:
            remove_placement_group(group)
    return group if is_ready else None


class Reservation:
    """A placement group with one bundle per node. It is removed when the last group of ranks leaves it."""

    def __init__(self, group: PlacementGroup, shape: tuple[int, int], has_gpus: bool):
        self.group = group
        self.shape = shape
        self.has_gpus = has_gpus
        self._users = 0

    @classmethod
    async def reserve(cls, role: str, shape: tuple[int, int], timeout_s: float) -> Self:
        """Reserves the devices of a group of ranks.

        Args:
            role: the group's name, for messages.
            shape: (nodes, ranks per node).
            timeout_s: longest wait for resources that others use.

        Raises:
            ConfigError: the cluster is too small.
            DeadlineError: the resources did not become free within `timeout_s`.
        """
        num_nodes, ranks_per_node = shape
        has_gpus = ray.cluster_resources().get("GPU", 0) > 0
        bundle = {"CPU": ranks_per_node * CPUS} | ({"GPU": ranks_per_node} if has_gpus else {})
        _require_room(role, num_nodes, bundle)
        strategy = "STRICT_SPREAD" if num_nodes > 1 else "STRICT_PACK"
        group = await reserved([bundle] * num_nodes, strategy, timeout_s)
        if group is None:
            raise DeadlineError(
                f"{role}: waited {timeout_s:g} s (trainer.worker_start_timeout_s) for {num_nodes} nodes with "
                f"{_described(bundle)} each; free in Ray's cluster: {_described(ray.available_resources())}. Other "
                "groups or jobs use the rest"
            )
        return cls(group, shape, has_gpus)

    def enter(self) -> None:
        self._users += 1

    def leave(self) -> None:
        self._users -= 1
        if self._users == 0:
            remove_placement_group(self.group)


def _require_room(role: str, num_nodes: int, bundle: Mapping[str, float]) -> None:
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    fitting = [node for node in nodes if all(node.get(name, 0) >= amount for name, amount in bundle.items())]
    if len(fitting) < num_nodes:
        have = "; ".join(_described(node) for node in nodes)
        raise ConfigError(
            f"{role}: trainer.placement asks for {num_nodes} nodes with {_described(bundle)} each (a rank takes "
            f"{CPUS:g} CPU and, if Ray has GPUs, one GPU); Ray has {len(nodes)} nodes: {have}. Ask for fewer ranks, or "
            "add nodes with `ray start`"
        )


def _described(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{resources.get(name, 0):g} {name}" for name in ("CPU", "GPU"))
