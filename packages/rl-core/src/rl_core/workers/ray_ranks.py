"""Ranks as Ray actors, one per rank, in a placement group: what the controller does. `ray_rank.py` is the other side.

Of rl_core only these two modules know Ray.

Consumes calls of the group; produces results by rank, or one error. Waits for all ranks; unblocked by their answers, by
the first rank that fails, or by the deadline. After an error other than a mistake that all ranks agree on, the ranks
are out of step (some may wait in a collective for one that is gone), so all of them are killed.

Resources: a node of the group is one bundle of its placement group. A rank takes one GPU of it or, where Ray has no
GPUs, only `_CPUS` of a CPU: ranks on CPUs share cores by time, so that number only bounds how many a machine takes. A
group that shares the devices of another takes nothing: it stands in the same bundles and sees the same GPUs.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Concatenate, Self

from rl_core.batch import Batch
from rl_core.errors import ConfigError, DeadlineError, WorkerError
from rl_core.interfaces import Backend, Plan, RankInfo, Worker, WorkerSpec
from rl_core.layout.mesh import Mesh
from rl_core.workers.rank import Abilities, P, Part, R

if "RAY_ADDRESS" not in os.environ:
    # Read when Ray is imported. The name speaks of two systems; on any, 0 makes Ray listen on loopback alone.
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    # Ray would run ranks and inference servers at niceness 15: any other work on the machine starves them.
    os.environ.setdefault("RAY_worker_niceness", "0")

try:
    import ray
    from ray.exceptions import RayActorError, RayError
    from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ModuleNotFoundError as error:
    raise ConfigError(
        "several ranks, or a backend that needs a process of its own, run on Ray, which is not installed: "
        "pip install 'rl-core[ray]'"
    ) from error

from rl_core.workers.ray_rank import (
    Failure,
    RankAddress,
    RankCall,
    rank_actor,
)  # it imports Ray, so what Ray reads is set by now

_CPUS = 1 / 16
"""CPU resource of a rank; a machine of two cores takes 32 ranks."""
_SETTLE_S = 3.0
"""After a failure the others have so long: a rank that lost its peer may say so before Ray says that the peer died."""
_ASK_S = 2.0
"""How long a rank that missed the deadline has to say what it is doing."""


class _Session:
    """Ray itself: joined where RAY_ADDRESS is set, else started for this process and stopped after its last group."""

    def __init__(self) -> None:
        self._users = 0
        self._is_ours = False

    def enter(self) -> None:
        if not ray.is_initialized():
            self._connect()
            self._is_ours = True
        self._users += 1

    def leave(self) -> None:
        self._users -= 1
        if self._users == 0 and self._is_ours:
            self._is_ours = False
            ray.shutdown()

    def _connect(self) -> None:
        common: dict[str, Any] = {"namespace": "rl", "log_to_driver": False, "logging_level": logging.WARNING}
        address = os.environ.get("RAY_ADDRESS", "local")
        if address == "local":
            self._start_locally(common)
            return
        try:
            ray.init(address, **common)
        except (ConnectionError, RayError, ValueError) as error:
            raise ConfigError(
                f"RAY_ADDRESS is {address!r}, but no Ray cluster could be joined there ({error}). Start one with "
                "`ray start --head`, or unset RAY_ADDRESS to use this machine alone"
            ) from error

    def _start_locally(self, common: dict[str, Any]) -> None:
        """Ray gives its own node 30 s to start, a number that cannot be set and that a busy machine exceeds: it gets a
        second try."""
        for is_last_try in (False, True):
            try:
                ray.init("local", include_dashboard=False, **common)
                return
            except Exception as error:
                if "timed out during startup" not in str(error):
                    raise
                ray.shutdown()
                if is_last_try:
                    raise WorkerError(
                        "Ray did not start on this machine within two tries of 30 s. It may be short of CPU time or "
                        "memory; Ray's own logs are in the `logs` folder of its newest session"
                    ) from error


ray_session = _Session()
"""Also for what else runs on Ray: inference servers."""


async def reserved(bundles: Sequence[Mapping[str, float]], strategy: str, timeout_s: float) -> PlacementGroup | None:
    """A placement group that has its resources; None where they were not free in time. Nothing stays asked for then.

    Also for what else runs on Ray: inference servers.
    """
    group = placement_group([dict(bundle) for bundle in bundles], strategy=strategy)
    is_ready = False
    try:
        is_ready = await asyncio.to_thread(group.wait, timeout_s)
    finally:
        if not is_ready:
            remove_placement_group(group)
    return group if is_ready else None


class _Reservation:
    """A placement group: one bundle per node. Removed when its last group leaves."""

    def __init__(self, group: PlacementGroup, shape: tuple[int, int], has_gpus: bool):
        self.group = group
        self.shape = shape
        self.has_gpus = has_gpus
        self._users = 0

    @classmethod
    async def reserve(cls, role: str, shape: tuple[int, int], timeout_s: float) -> Self:
        """Raises ConfigError if the cluster is too small, DeadlineError if it stays occupied."""
        num_nodes, ranks_per_node = shape
        has_gpus = ray.cluster_resources().get("GPU", 0) > 0
        bundle = {"CPU": ranks_per_node * _CPUS} | ({"GPU": ranks_per_node} if has_gpus else {})
        _require_room(role, num_nodes, bundle)
        strategy = "STRICT_SPREAD" if num_nodes > 1 else "STRICT_PACK"
        group = await reserved([bundle] * num_nodes, strategy, timeout_s)
        if group is None:
            raise DeadlineError(
                f"{role}: waited {timeout_s:g} s (trainer.worker_timeout_s) for {num_nodes} nodes with "
                f"{_described(bundle)} each; free in Ray's cluster: {_described(ray.available_resources())}. Other "
                "groups or jobs hold the rest"
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
            f"{role}: trainer.placement asks for {num_nodes} nodes with {_described(bundle)} each (a rank takes one "
            f"GPU or, without GPUs, {_CPUS:g} CPU); Ray has {len(nodes)} nodes: {have}. Ask for fewer ranks, or add "
            "nodes with `ray start`"
        )


def _described(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{resources.get(name, 0):g} {name}" for name in ("CPU", "GPU"))


class RayRanks:
    """All ranks of a group as Ray actors. Fulfils `Ranks`."""

    def __init__(self, role: str, mesh: Mesh, placement: _Reservation, timeout_s: float):
        self._role = role
        self._mesh = mesh
        self._timeout_s = timeout_s
        self._actors: list[Any] = []
        self._addresses: list[RankAddress] = []
        self._unanswered_calls = 0
        self._ended: str | None = None
        self.placement = placement
        self.abilities = Abilities()
        ray_session.enter()
        placement.enter()

    @classmethod
    async def start(
        cls,
        backend: Backend,
        spec: WorkerSpec,
        mesh: Mesh,
        *,
        shape: tuple[int, int],
        beside: RayRanks | None,
        timeout_s: float,
    ) -> Self:
        """Starts the actors and builds their workers.

        Args:
            backend: what the ranks build.
            spec: what they are told.
            mesh: how they are arranged.
            shape: nodes, and ranks on each.
            beside: ranks of the same shape whose devices these use too.
            timeout_s: longest wait for this start and for each later call.
        """
        ray_session.enter()
        try:
            if beside is None:
                placement = await _Reservation.reserve(spec.role, shape, timeout_s)
            else:
                placement = beside.placement
            ranks = cls(spec.role, mesh, placement, timeout_s)
        finally:
            ray_session.leave()
        try:
            ranks._create_actors(takes_devices=beside is None)
            ranks._addresses = await ranks._all("start", [actor.address.remote() for actor in ranks._actors])
            visible = ranks._addresses if beside is None else beside._addresses
            await ranks._build(backend, spec, [address.gpus for address in visible])
        except BaseException:
            ranks._end("it did not start")
            raise
        return ranks

    async def call(self, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """See `Ranks.call`."""
        self._require_alive(method.__name__)
        call = RankCall(method=method, args=args, kwargs=kwargs)
        return await self._all(method.__name__, [actor.call.remote(call) for actor in self._actors])

    async def call_on_parts(
        self,
        method: Callable[Concatenate[Any, Batch, Plan, P], R],
        batch: Batch,
        parts: Sequence[Part],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[R | None]:
        """See `Ranks.call_on_parts`. A part is put into the object store once; all its replica's ranks read that."""
        self._require_alive(method.__name__)
        try:
            sent = await asyncio.to_thread(_put, batch, parts)
        except RayError as error:
            raise WorkerError(
                f"{self._role}: {batch.num_tokens} tokens do not fit into Ray's object store ({error}): give it "
                "more memory (`ray start --object-store-memory`), or train on smaller batches"
            ) from error
        calls = []
        for rank, actor in enumerate(self._actors):
            number = self._mesh.data_rank(rank)
            call = RankCall(
                method=method,
                args=(parts[number].plan, *args),
                kwargs=kwargs,
                returns_result=self._mesh.returns_results(rank),
            )
            calls.append(actor.call_on_batch.remote(call, sent[number]))
        return await self._all(method.__name__, calls)

    async def close(self) -> None:
        """Lets the workers finish, then ends the actors. Those that are busy or failed are ended at once."""
        if self._ended is not None:
            return
        try:
            if self._unanswered_calls == 0:
                await self.call(Worker.close)
        finally:
            self._end("it was closed")

    def _create_actors(self, *, takes_devices: bool) -> None:
        for rank in range(self._mesh.world_size):
            bundle = rank // self.placement.shape[1]
            where = PlacementGroupSchedulingStrategy(self.placement.group, placement_group_bundle_index=bundle)
            options = rank_actor.options(
                scheduling_strategy=where,
                num_cpus=_CPUS if takes_devices else 0,
                num_gpus=1 if takes_devices and self.placement.has_gpus else 0,
            )
            self._actors.append(options.remote())

    async def _build(self, backend: Backend, spec: WorkerSpec, gpus: list[str | None]) -> None:
        num_nodes, per_node = self.placement.shape
        starts = []
        for rank, actor in enumerate(self._actors):
            first = rank - rank % per_node
            info = RankInfo(
                rank=rank,
                world_size=num_nodes * per_node,
                local_rank=rank % per_node,
                master_address=self._addresses[0].node,
                master_port=self._addresses[0].free_port,
            )
            starts.append(
                actor.start.remote(backend, spec, info, _environment(info, spec, gpus[first : first + per_node]))
            )
        self.abilities = (await self._all("start", starts))[0]

    async def _all(self, phase: str, refs: Sequence[Awaitable[Any]]) -> list[Any]:
        """All ranks' answers, or one error."""
        self._unanswered_calls += 1
        answers = await self._answers(refs)  # a cancelled call stays unanswered
        self._unanswered_calls -= 1
        failures = {rank: answer for rank, answer in answers.items() if isinstance(answer, Failure)}
        if len(answers) == len(refs) and not failures:
            return [answers[rank] for rank in range(len(refs))]
        silent = [rank for rank in range(len(refs)) if rank not in answers]
        error = self._error_of(phase, failures, silent) if failures else await self._missed_deadline(phase, silent)
        if not self._all_agree(failures):
            self._end(str(error).partition("\n")[0])
        raise error

    async def _answers(self, refs: Sequence[Awaitable[Any]]) -> dict[int, Any]:
        """Answers by rank, as they came: all, or those until the deadline or soon after a failure."""
        tasks = {asyncio.ensure_future(_answer_of(ref)): rank for rank, ref in enumerate(refs)}
        clock = asyncio.get_running_loop().time
        deadline, has_failed = clock() + self._timeout_s, False
        answers: dict[int, Any] = {}
        pending = set(tasks)
        try:
            while pending:
                done, pending = await asyncio.wait(
                    pending, timeout=max(0.0, deadline - clock()), return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    break
                answers |= {tasks[task]: task.result() for task in done}
                if not has_failed and any(isinstance(task.result(), Failure) for task in done):
                    has_failed, deadline = True, min(deadline, clock() + _SETTLE_S)
        finally:
            for task in pending:
                task.cancel()
        return answers

    def _all_agree(self, failures: Mapping[int, Failure]) -> bool:
        """Every rank found a mistake of the user: nobody waits for anybody, and the ranks can go on."""
        return len(failures) == len(self._actors) and all(failure.user_error for failure in failures.values())

    def _error_of(self, phase: str, failures: Mapping[int, Failure], silent: Sequence[int]) -> Exception:
        """One error: of a rank that died before one that raised (it may only have lost its peer), else of the first."""
        rank = min(failures, key=lambda rank: not failures[rank].died)
        if self._all_agree(failures):
            rank = 0
        failure = failures[rank]
        others = [f"{self._name(other)}: {failures[other].summary}" for other in failures if other != rank]
        others += [f"{self._name(other)}: no answer" for other in silent]
        where = f"{self._name(rank)} {'died' if failure.died else 'failed'} in {phase}"
        if failure.user_error is not None:
            error: Exception = pickle.loads(failure.user_error)
            error.add_note(f"{where}\n{failure.traceback}")
            return error
        lines = [f"{where}: {failure.summary}", failure.traceback.rstrip()]
        if others:
            lines.append("Other ranks: " + "; ".join(others))
        if self._addresses and failure.died:
            lines.append(
                f"Its output: /tmp/ray/session_latest/logs/worker-*-{self._addresses[rank].pid}.err on its node"
            )
        return WorkerError("\n".join(line for line in lines if line))

    async def _missed_deadline(self, phase: str, silent: Sequence[int]) -> DeadlineError:
        asked = {asyncio.ensure_future(_answer_of(self._actors[rank].doing.remote())): rank for rank in silent}
        done, pending = await asyncio.wait(asked, timeout=_ASK_S)
        for task in pending:
            task.cancel()
        doing = {rank: task.result() if task in done else "does not say" for task, rank in asked.items()}
        lines = [
            f"{self._name(rank)}: {answer.summary if isinstance(answer, Failure) else answer}"
            for rank, answer in doing.items()
        ]
        return DeadlineError(
            f"{self._role}: {len(silent)} of {len(self._actors)} ranks did not finish {phase} within "
            f"{self._timeout_s:g} s (trainer.worker_timeout_s), and all were ended:\n" + "\n".join(lines)
        )

    def _name(self, rank: int) -> str:
        address = f" ({self._addresses[rank]})" if self._addresses else ""
        return f"{self._role} rank {rank} of {self._mesh.world_size}{address}"

    def _require_alive(self, method: str) -> None:
        if self._ended is not None:
            raise WorkerError(f"{self._role}: asked to {method}, but the ranks have ended: {self._ended}")

    def _end(self, reason: str) -> None:
        """Kills every rank and gives the devices back; a second call does nothing."""
        if self._ended is not None:
            return
        self._ended = reason
        for actor in self._actors:
            ray.kill(actor)
        self.placement.leave()
        ray_session.leave()


def _put(batch: Batch, parts: Iterable[Part]) -> list[Any]:
    return [ray.put(batch.to_arrays(part.sent)) for part in parts]


async def _answer_of(ref: Awaitable[Any]) -> Any:
    """A rank's answer; a Failure where Ray reports that none will come."""
    try:
        return await ref
    except RayActorError as error:
        return Failure(summary=" ".join(str(error).split()), died=True)
    except RayError as error:
        return Failure(summary=f"{type(error).__name__}: {error}")


def _environment(info: RankInfo, spec: WorkerSpec, gpus: Sequence[str | None]) -> dict[str, str]:
    """As torchrun sets it: all GPUs of the group's ranks on the node are visible, a rank's own at its local rank.

    CPU threads: `spec.num_threads`, else the controller's OMP_NUM_THREADS, else the node's cores over its ranks.
    """
    threads = (
        spec.num_threads or int(os.environ.get("OMP_NUM_THREADS", 0)) or max(1, (os.cpu_count() or 1) // len(gpus))
    )
    environment = {
        "OMP_NUM_THREADS": str(threads),
        "RANK": str(info.rank),
        "LOCAL_RANK": str(info.local_rank),
        "WORLD_SIZE": str(info.world_size),
        "MASTER_ADDR": info.master_address,
        "MASTER_PORT": str(info.master_port),
    }
    visible = [gpu for gpu in gpus if gpu]
    return environment | ({"CUDA_VISIBLE_DEVICES": ",".join(visible)} if visible else {})
