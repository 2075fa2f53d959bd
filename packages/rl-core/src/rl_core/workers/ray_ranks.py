"""The controller's side of ranks that run as Ray actors in a placement group. `ray_rank.py` is the other side. In
rl_core only these two modules and `ray_cluster.py` use Ray.

A call returns the results by rank or raises one error. It waits until all ranks have answered, a rank has failed, ranks
are found dead, one of Ray's servers has died, or the deadline has passed. After an error the ranks are out of step
(some may wait in a collective for a dead rank), so all of them are killed. The ranks are kept in only two cases:
every rank raised a user's mistake; or the call does not change the training state, some ranks raised a user's mistake,
and all others returned.
"""

from __future__ import annotations

import asyncio
import os
import pickle
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Concatenate, Self

from rl_core.batch import Batch
from rl_core.errors import DeadlineError, WorkerError
from rl_core.interfaces import Backend, Plan, RankInfo, Worker, WorkerSpec
from rl_core.layout.mesh import Mesh
from rl_core.rank_kit.process_group import JOINS_OPEN_STORE
from rl_core.rank_kit.route_layers import with_routes_of
from rl_core.tasks import OwnThread
from rl_core.workers.rank import Abilities, P, Part, R, RankHost
from rl_core.workers.ray_cluster import CPUS, Reservation, ray_session  # sets variables that `import ray` reads

# isort: split
import ray
from ray.exceptions import ObjectStoreFullError, OutOfDiskError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from rl_core.workers.heartbeat import Heartbeats, Pulse, pulse_of
from rl_core.workers.ray_rank import (
    Failure,
    RankAddress,
    RankCall,
    rank_actor,
)

_SETTLE_S = 3.0
"""Seconds to wait for other answers after a failure: a rank may report a lost peer before Ray reports the peer's
death."""
_ONLY_READ: frozenset[Callable[..., Any]] = frozenset({RankHost.publish, Worker.save_state, Worker.save_model})
"""Calls that do not change the training state. The ranks remain usable after a user's mistake in such a call if all of
them have answered."""
_PULSE_S, _DOING_S = 2.0, 5.0
"""Seconds that a rank has to send its pulse, and to say what it is doing."""
_NO_ANSWER = "did not answer when asked what it was doing"
_BEAT_S = 10.0
"""Longest pause in seconds before the ranks are asked for their pulses again during a call."""
_LOST_POLL_S = 0.2
"""Pause in seconds before the session is asked again whether one of Ray's servers died."""
_OBSERVER_S = 60.0
"""Seconds for an observer process to start on the node of a rank that does not answer, and to read its pulse."""
_Reader = tuple[int, tuple[int, ...] | None]
"""What a rank reads: the number of its part, and the layers of its routes (None: all)."""
_ROUTES = ("routed_experts", "route_layers")
_observer: Any = ray.remote(num_cpus=0, max_retries=0)(pulse_of)


class RayRanks:
    """All ranks of a group as Ray actors. Implements `Ranks`."""

    def __init__(self, role: str, mesh: Mesh, placement: Reservation, timeout_s: float, silence_s: float):
        self._role = role
        self._mesh = mesh
        self._timeout_s = timeout_s
        self._timeout_key = "trainer.worker_start_timeout_s"
        self._silence_s = silence_s
        self._actors: list[Any] = []
        self._addresses: list[RankAddress] = []
        self._route_layers: list[tuple[int, ...] | None] = [None] * mesh.world_size
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
        start_timeout_s: float,
        silence_s: float,
    ) -> Self:
        """Starts the actors and builds their workers.

        Args:
            backend: the training backend.
            spec: the spec of each rank.
            mesh: the mesh of the ranks.
            shape: (nodes, ranks per node).
            beside: ranks of the same shape whose devices these ranks share. None: they reserve their own.
            timeout_s: longest wait for each later call.
            start_timeout_s: longest wait for each phase of this start.
            silence_s: ranks that neither answer nor work for this long count as dead (see `Heartbeats`).
        """
        ray_session.enter()  # keeps Ray connected until the new object has entered the session itself
        try:
            if beside is None:
                placement = await Reservation.reserve(spec.role, shape, start_timeout_s)
            else:
                placement = beside.placement
            ranks = cls(spec.role, mesh, placement, start_timeout_s, silence_s)
        finally:
            ray_session.leave()
        try:
            ranks._create_actors(takes_devices=beside is None)
            ranks._addresses = await ranks._all("start", [actor.address.remote() for actor in ranks._actors])
            visible = ranks._addresses if beside is None else beside._addresses
            await ranks._build(backend, spec, [address.gpus for address in visible])
            ranks._route_layers = await ranks.call(Worker.route_layers)
            ranks._timeout_s, ranks._timeout_key = timeout_s, "trainer.worker_timeout_s"
        except BaseException:
            ranks._end("their start failed")
            raise
        return ranks

    async def call(self, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """See `Ranks.call`."""
        self._require_alive(method.__name__)
        call = RankCall(method=method, args=args, kwargs=kwargs)
        refs = [actor.call.remote(call) for actor in self._actors]
        return await self._all(method.__name__, refs, only_reads=method in _ONLY_READ)

    async def call_on_parts(
        self,
        method: Callable[Concatenate[Any, Batch, Plan, P], R],
        batch: Batch,
        parts: Sequence[Part],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[R | None]:
        """See `Ranks.call_on_parts`. A part is put into the object store once, for all ranks of its model replica; its
        routes are put once for all ranks that read the same layers. A node fetches an object once."""
        self._require_alive(method.__name__)
        readers = [(self._mesh.data_rank(rank), layers) for rank, layers in enumerate(self._route_layers)]
        try:
            sent = await OwnThread(lambda: _put(batch, parts, readers)).within(self._silence_s)
        except TimeoutError as error:
            reason = (
                f"{self._role}: Ray's object store did not take the batch for {method.__name__} within "
                f"{self._silence_s:g} s (trainer.worker_silence_s). Is Ray's node manager (raylet) on this machine "
                "stopped, or is the machine short of memory?"
            )
            self._end(reason)
            raise DeadlineError(reason) from error
        except (ObjectStoreFullError, OutOfDiskError) as error:
            raise WorkerError(
                f"{self._role}: {batch.num_tokens} tokens do not fit into Ray's object store ({error}): give it "
                "more memory (`ray start --head --object-store-memory=BYTES`, then RAY_ADDRESS=auto), or train on "
                "smaller batches"
            ) from error
        except RayError as error:
            raise WorkerError(
                f"{self._role}: {method.__name__} cannot start, because Ray failed to store the batch ({error}); check "
                "with `ray status` whether Ray is still running"
            ) from error
        calls = []
        for rank, (number, _) in enumerate(readers):
            call = RankCall(
                method=method,
                args=(parts[number].plan, *args),
                kwargs=kwargs,
                returns_result=self._mesh.returns_results(rank),
            )
            calls.append(self._actors[rank].call_on_batch.remote(call, *sent[rank]))
        return await self._all(method.__name__, calls)

    async def close(self) -> None:
        """Closes the workers, then ends the actors. If a call is unanswered, the actors are killed at once."""
        if self._ended is not None:
            return
        try:
            if self._unanswered_calls == 0:
                await self.call(Worker.close)
        finally:
            self._end("they were closed")

    def _create_actors(self, *, takes_devices: bool) -> None:
        for rank in range(self._mesh.world_size):
            bundle = rank // self.placement.shape[1]
            where = PlacementGroupSchedulingStrategy(self.placement.group, placement_group_bundle_index=bundle)
            options = rank_actor.options(
                scheduling_strategy=where,
                num_cpus=CPUS if takes_devices else 0,
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
                master_port=self._addresses[0].store_port,
            )
            starts.append(
                actor.start.remote(backend, spec, info, _environment(info, spec, gpus[first : first + per_node]))
            )
        self.abilities = (await self._all("start", starts))[0]

    async def _all(self, phase: str, refs: Sequence[Awaitable[Any]], *, only_reads: bool = False) -> list[Any]:
        """Returns the answers of all ranks, or raises one error. After an error the ranks are either usable or ended.

        Args:
            phase: name of the call, for messages.
            refs: futures of the answers, by rank.
            only_reads: whether the call leaves the training state unchanged, so that ranks can go on after some failed.
        """
        self._unanswered_calls += 1
        answers, dead = await self._answers(refs)  # a cancelled call stays counted, because its ranks are still busy
        self._unanswered_calls -= 1
        failures = {rank: answer for rank, answer in answers.items() if isinstance(answer, Failure)}
        if len(answers) == len(refs) and not failures:
            return [answers[rank] for rank in range(len(refs))]
        silent = [rank for rank in range(len(refs)) if rank not in answers]
        if ray_session.lost is not None:
            error = WorkerError(f"{self._role}: {phase} cannot be finished: {ray_session.lost}. All ranks were ended")
        elif failures:
            error = self._error_of(phase, failures, silent)
        elif dead:
            error = await self._no_heartbeat(phase, dead)
        else:
            error = await self._missed_deadline(phase, silent)
        can_go_on = self._all_agree(failures) or (only_reads and not silent and _are_user_errors(failures))
        if not can_go_on:
            self._end(str(error).partition("\n")[0])
        raise error

    async def _answers(self, refs: Sequence[Awaitable[Any]]) -> tuple[dict[int, Any], Mapping[int, str]]:
        """Waits until all answers are there, the deadline has passed, a failure is `_SETTLE_S` old, ranks are found
        dead, or one of Ray's servers has died. Returns the answers by rank, and the dead ranks."""
        tasks = {asyncio.ensure_future(_answer_of(ref)): rank for rank, ref in enumerate(refs)}
        clock = asyncio.get_running_loop().time
        deadline, has_failed = clock() + self._timeout_s, False
        answers: dict[int, Any] = {}
        pending = set(tasks)
        watching = asyncio.create_task(self._dead())
        losing = asyncio.create_task(_server_lost())
        try:
            while pending:
                done, _ = await asyncio.wait(
                    {*pending, watching, losing},
                    timeout=max(0.0, deadline - clock()),
                    return_when=asyncio.FIRST_COMPLETED,
                )
                pending -= done
                if not done or done <= {watching, losing}:
                    return answers, watching.result() if watching in done else {}
                done -= {watching, losing}
                answers |= {tasks[task]: task.result() for task in done}
                if not has_failed and any(isinstance(task.result(), Failure) for task in done):
                    has_failed, deadline = True, min(deadline, clock() + _SETTLE_S)
        finally:
            for task in (*pending, watching, losing):
                task.cancel()
        return answers, {}

    async def _dead(self) -> Mapping[int, str]:
        """Waits until ranks are found dead. Returns them, each with what is wrong."""
        clock = asyncio.get_running_loop().time
        heartbeats = Heartbeats(len(self._actors), self._silence_s, clock())
        while not (dead := heartbeats.dead(clock())):
            await asyncio.sleep(min(_BEAT_S, self._silence_s / 4))
            own = await self._asked("pulse", range(len(self._actors)), _PULSE_S)
            silent = [rank for rank in range(len(self._actors)) if not isinstance(own.get(rank), Pulse)]
            seen = await self._observed(silent)
            for rank in range(len(self._actors)):
                pulse = seen.get(rank) or own.get(rank)
                heartbeats.note(
                    rank,
                    pulse if isinstance(pulse, Pulse) else None,
                    has_answered=rank not in silent,
                    now_s=clock(),
                )
        return dead

    async def _asked(self, question: str, ranks: Sequence[int], timeout_s: float) -> dict[int, Any]:
        """Asks the ranks' second threads. Returns the answers that come in time."""
        refs = {rank: getattr(self._actors[rank], question).remote() for rank in ranks}
        return await _in_time(refs, timeout_s)

    async def _observed(self, ranks: Sequence[int]) -> dict[int, Any]:
        """Pulses of ranks that do not answer, read by observer processes on their nodes."""
        if not self._addresses:
            return {}
        refs = {
            rank: _observer.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(self._addresses[rank].node_id, soft=False)
            ).remote(self._addresses[rank].pid)
            for rank in ranks
        }
        return await _in_time(refs, _OBSERVER_S)

    def _all_agree(self, failures: Mapping[int, Failure]) -> bool:
        """Whether every rank raised a user's mistake. Then no rank waits for another, and the ranks remain usable."""
        return len(failures) == len(self._actors) and _are_user_errors(failures)

    def _error_of(self, phase: str, failures: Mapping[int, Failure], silent: Sequence[int]) -> Exception:
        """Returns one error for all failures. If all ranks raised a user's mistake, it is rank 0's error. Otherwise it
        is the error of the first rank that died, because a rank that raised may only have lost its peer. If none died,
        it is the error of the first rank that failed."""
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
                f"Its output: worker-*-{self._addresses[rank].pid}.err in the `logs` folder of Ray's session on its "
                "node, by default /tmp/ray/session_latest/logs"
            )
        return WorkerError("\n".join(line for line in lines if line))

    async def _missed_deadline(self, phase: str, silent: Sequence[int]) -> DeadlineError:
        lines = [f"{self._name(rank)}: {doing}" for rank, doing in (await self._doing(silent)).items()]
        return DeadlineError(
            f"{self._role}: {len(silent)} of {len(self._actors)} ranks did not finish {phase} within "
            f"{self._timeout_s:g} s ({self._timeout_key}), and all were ended:\n" + "\n".join(lines)
        )

    async def _no_heartbeat(self, phase: str, dead: Mapping[int, str]) -> WorkerError:
        doing = await self._doing(range(len(self._actors)))
        lines = [f"{self._name(rank)}: {what}" for rank, what in dead.items()]
        lines += [f"{self._name(rank)}: {what}" for rank, what in doing.items()]
        return WorkerError(
            f"{self._role}: {len(dead)} of {len(self._actors)} ranks showed no sign of work in {phase} for "
            f"{self._silence_s:g} s (trainer.worker_silence_s), and all were ended:\n" + "\n".join(lines)
        )

    async def _doing(self, ranks: Sequence[int]) -> dict[int, str]:
        answers = await self._asked("doing", ranks, _DOING_S)
        said = {rank: answers.get(rank, _NO_ANSWER) for rank in ranks}
        return {rank: what.summary if isinstance(what, Failure) else what for rank, what in said.items()}

    def _name(self, rank: int) -> str:
        address = f" ({self._addresses[rank]})" if self._addresses else ""
        return f"{self._role} rank {rank} of {self._mesh.world_size}{address}"

    def _require_alive(self, method: str) -> None:
        if ray_session.lost is not None:
            self._end(ray_session.lost)
        if self._ended is not None:
            raise WorkerError(f"{self._role}: cannot run {method}, because the ranks have ended: {self._ended}")

    def _end(self, reason: str) -> None:
        """Kills every rank and releases the devices; a second call does nothing."""
        if self._ended is not None:
            return
        self._ended = reason
        ray_session.tell(self._kill)
        ray_session.leave()

    def _kill(self) -> None:
        for actor in self._actors:
            ray.kill(actor)
        self.placement.leave()


async def _server_lost() -> None:
    while ray_session.lost is None:
        await asyncio.sleep(_LOST_POLL_S)


def _are_user_errors(failures: Mapping[int, Failure]) -> bool:
    return bool(failures) and all(failure.user_error for failure in failures.values())


def _put(batch: Batch, parts: Sequence[Part], readers: Sequence[_Reader]) -> list[list[Any]]:
    """Puts the parts of a batch into the object store. Returns references to the arrays that each reader gets: its part
    without routes and, if there are any, its routes."""
    rest = batch.without_columns(*_ROUTES)
    shared = [ray.put(rest.to_arrays(part.sent)) for part in parts]
    if "routed_experts" not in batch:
        return [[shared[number]] for number, _ in readers]
    by_layers = {layers: with_routes_of(batch, layers) for _, layers in readers}
    routes: dict[_Reader, Any] = {}
    for number, layers in dict.fromkeys(readers):
        names = [name for name in _ROUTES if name in by_layers[layers]]
        routes[number, layers] = ray.put(by_layers[layers].to_arrays(parts[number].sent, names))
    return [[shared[number], routes[number, layers]] for number, layers in readers]


async def _in_time(refs: Mapping[int, Awaitable[Any]], timeout_s: float) -> dict[int, Any]:
    """The answers that come in time."""
    if not refs:
        return {}
    asked = {asyncio.ensure_future(_answer_of(ref)): rank for rank, ref in refs.items()}
    try:
        done, _ = await asyncio.wait(asked, timeout=timeout_s)
        return {asked[task]: task.result() for task in done}
    finally:
        for task in asked:
            task.cancel()


async def _answer_of(ref: Awaitable[Any]) -> Any:
    """Returns the rank's answer, or a Failure if Ray reports that the rank will not answer."""
    try:
        return await ref
    except RayActorError as error:
        # Ray's list of possible causes is the same for every death.
        return Failure(summary=" ".join(str(error).split()).partition(" Some common causes include:")[0], died=True)
    except RayError as error:
        return Failure(summary=f"{type(error).__name__}: {error}")


def _environment(info: RankInfo, spec: WorkerSpec, gpus: Sequence[str | None]) -> dict[str, str]:
    """Environment variables as torchrun sets them. All GPUs of the group's ranks on the node are visible; a rank's own
    GPU has the index of its local rank.

    CPU threads: `spec.num_threads`, else the controller's OMP_NUM_THREADS, else the number of cores of the controller's
    machine divided by the ranks per node.
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
        **JOINS_OPEN_STORE,
    }
    visible = [gpu for gpu in gpus if gpu]
    return environment | ({"CUDA_VISIBLE_DEVICES": ",".join(visible)} if visible else {})
