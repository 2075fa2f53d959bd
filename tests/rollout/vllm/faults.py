"""Faults that hit servers and weight syncs at random moments, and a trainer that publishes weights meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
import tempfile
import time
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import attrs
import psutil
import torch
from torch import Tensor

from rl_core.errors import RLError, WeightSyncError
from rl_core.interfaces import Completion, GenerateRequest, Rendezvous, WeightBucket, WeightTransport
from rl_core.rank_kit.weight_buckets import pack_buckets, with_checksums
from rl_core.trainer.publishing.publish import publish_weights
from rl_rollout.transports.broadcast import BroadcastTransport
from rl_rollout.transports.files import FilesTransport
from rl_rollout.transports.shared_memory import Segment, SharedMemoryTransport
from rl_rollout.vllm.client import RemoteInferenceClient
from rl_rollout.vllm.pool import Member
from tests.rollout.vllm.servers import command_line, request

What = Literal["kill", "freeze", "pause", "flip a byte", "stop sending"]
Whom = Literal["server", "core", "worker"]
When = Literal["generating", "idle", "pausing", "receiving", "swapping", "resuming"]
SYNC_PHASES: Sequence[When] = ("pausing", "receiving", "swapping", "resuming")
TIMEOUT_S = 300.0
"""The deadline of a request. On two free cores a server starts in a minute."""
_UPDATE_S = TIMEOUT_S / 2
_TRANSPORT_S = TIMEOUT_S / 3
"""Shorter than the engine's deadline, as in the defaults. A participant that waits in vain can then name the missing
participant before its own engine is given up.
"""
HUNG_AFTER_S = 20.0
_LATE_S = 30.0
"""How long a sync may take on a busy machine, and by how much a deadline may be exceeded."""
_POLL_S = 0.1
_CALLS: Mapping[When, tuple[str, float]] = {
    "pausing": ("pause", 0.02),
    "swapping": ("update_weights", 0.2),
    "resuming": ("resume", 0.02),
}
"""Phase of a sync → the client's call in it, and about how many seconds it takes. `receiving` has no call."""
_BACK_WITHIN_S = 900.0
_PAUSE_S = 2.0
_LIMIT = 1e-3
"""The largest allowed error of a log-prob in float32. Measured: 1e-5. Log-probs of two versions differ by 0.1 or more.
"""
_BUCKET_BYTES = 1 << 15
TRANSPORTS: Mapping[str, WeightTransport] = {
    "files": FilesTransport(timeout_s=_TRANSPORT_S),
    "shared_memory": SharedMemoryTransport(timeout_s=_TRANSPORT_S),
    "broadcast": BroadcastTransport(timeout_s=_TRANSPORT_S),
}


@attrs.frozen(kw_only=True)
class Fault:
    """One fault: what happens, when, and to whom."""

    what: What
    when: When
    """`generating`: when some of the requests are done. `idle`: before the first request. Otherwise a phase of a sync.
    """
    transport: str = "files"
    """The transport of the sync that the fault hits. If the fault hits no sync: the transport of the next sync."""
    whom: Whom = "server"
    """The process that is killed, frozen or paused. The other faults hit the sender."""
    moment: float = 0.5
    """Which share of the phase's requests, buckets or seconds comes before the fault, from 0 to 1."""

    @property
    def is_in_sync(self) -> bool:
        """Whether the fault hits a sync instead of preceding it."""
        return self.when in SYNC_PHASES

    @property
    def noticed_within_s(self) -> float:
        """How long the fault may prolong a sync: until a deadline notices it or, for a pause, until it is over."""
        if self.what == "pause":
            return _PAUSE_S
        if self.what != "freeze":
            return 0.0
        # A core that loads weights is busy and gets no heartbeats, so only the update's own deadline notices the fault.
        is_receiving = self.when == "receiving" and TRANSPORTS[self.transport].is_staged
        return _UPDATE_S if self.whom != "server" and self.is_in_sync and not is_receiving else HUNG_AFTER_S

    def __str__(self) -> str:
        if self.what in ("flip a byte", "stop sending"):
            return f"{self.what}, {self.transport} at {self.moment:.2f}"
        return f"{self.what} {self.whom} {self.when}, {self.transport} at {self.moment:.2f}"


def faults_of_shard(shard: int) -> list[Fault]:
    """Twenty faults. With each transport, a process is killed, frozen or paused once in each phase of a sync, one byte
    is flipped, and the sender stops once.

    The kind of fault changes with the phase, the transport and the shard, so that two consecutive shards kill a process
    in every phase with every transport. In each shard, the numbers of killed servers, cores and workers differ by at
    most one, and so do the numbers of frozen ones.
    """
    dice = random.Random(shard)
    whats: Sequence[What] = ("kill", "freeze", "kill", "pause")
    beside: list[tuple[What, When, str]] = [
        ("kill", "generating", dice.choice([*TRANSPORTS])),
        ("freeze", "idle", dice.choice([*TRANSPORTS])),
    ]
    hits = [
        *beside,
        *(
            (whats[(i + j + shard) % len(whats)], when, transport)
            for i, transport in enumerate(TRANSPORTS)
            for j, when in enumerate(SYNC_PHASES)
        ),
    ]
    dice.shuffle(hits)
    whoms: Sequence[Whom] = ("server", "core", "worker")
    turns = {what: itertools.cycle(dice.sample(whoms, len(whoms))) for what in ("kill", "freeze", "pause")}
    faults = [
        Fault(what=what, when=when, transport=transport, whom=next(turns[what]), moment=dice.random())
        for what, when, transport in hits
    ]
    of_sender: Sequence[What] = ("flip a byte", "stop sending")
    faults += [
        Fault(what=what, when="receiving", transport=transport, moment=dice.random())
        for what, transport in itertools.product(of_sender, TRANSPORTS)
    ]
    dice.shuffle(faults)
    return faults


class Model:
    """The engines' model in transformers; every version has different weights."""

    def __init__(self, model_path: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        self._first = {name: tensor.detach().clone() for name, tensor in self._model.named_parameters()}

    def tensors(self, version: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(version)
        return {name: t + 0.1 * torch.randn(t.shape, generator=generator) for name, t in self._first.items()}

    @torch.no_grad()
    def logprobs(self, version: int, tokens: Sequence[int]) -> Tensor:
        """[T - 1] log-prob of each token but the first, given the tokens before it."""
        self._model.load_state_dict(self.tensors(version), strict=False)
        logprobs_TV = self._model(input_ids=torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
        return logprobs_TV.gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]

    def require_versions(self, asked: GenerateRequest, completion: Completion) -> None:
        """Requires that each token has the log-prob of the version recorded for it, not that of the next version."""
        tokens = [*asked.prompt_tokens, *completion.tokens]
        said, versions = torch.tensor(completion.logprobs), torch.tensor(completion.policy_versions)
        for version in set(completion.policy_versions):
            own = versions == version
            difference = (self.logprobs(version, tokens)[-len(said) :] - said)[own].abs().max().item()
            assert difference < _LIMIT, f"{asked.sample_id}: version {version}'s tokens are off by {difference:.2g}"
            others = (self.logprobs(version + 1, tokens)[-len(said) :] - said)[own].abs().max().item()
            assert own.sum() < 8 or others > 0.1, "the two versions are too similar for this test to show anything"


class Cluster:
    """A run's servers, and a trainer with one rank."""

    def __init__(self, client: RemoteInferenceClient, model: Model) -> None:
        self.client = client
        self.model = model
        self.version = -1

    @property
    def members(self) -> list[Member]:
        return self.client._pool.members

    async def survives(self, fault: Fault, name: str) -> None:
        """Sends requests and triggers the fault. Every request must be answered once, within its deadline, by the
        weights that the answer names. Afterwards all servers must serve the current version, and nothing may be left of
        the processes that ended.
        """
        victim = random.Random(name).choice(self.members)
        processes = await self.processes(victim)
        left_by_victim = ServerResources.by(
            [victim_process for those in processes.values() for victim_process in those]
        )
        hit = FaultInjection(processes, fault)
        requests = batch_of_requests(name, 24)
        waiting: list[asyncio.Future[Completion]] = []
        try:
            if fault.when == "idle":
                hit()
            waiting = [asyncio.ensure_future(self._timed(each)) for each in requests]
            if fault.when == "generating":
                while sum(task.done() for task in waiting) < fault.moment * len(waiting) - 1:
                    await asyncio.sleep(0.001)
                hit()
            await self._publish_until_good(fault, hit)
            completions = await self._answered(waiting)
        finally:
            for task in waiting:
                task.cancel()
            hit.over()
        assert hit.has_come
        for asked, completion in zip(requests, completions, strict=True):
            assert len(completion.tokens) == asked.params.max_tokens
            self.model.require_versions(asked, completion)
        await self.whole_again()
        self._require_no_folder()
        await left_by_victim.require_nothing(but=ServerResources.by(await self.all_processes()))

    async def publish(self, transport: str = "files", hit: FaultInjection | None = None) -> None:
        """Publishes the next version, as a trainer does at the end of a step; `hit` triggers its fault in the sync."""
        self.version += 1
        buckets = pack_buckets(self.model.tensors(self.version).items(), _BUCKET_BYTES)
        rank = _OneRank(TRANSPORTS[transport], buckets if hit is None else hit.among(buckets))
        sending: Any = rank
        with contextlib.nullcontext() if hit is None else hit.in_call_of(self.client):
            await publish_weights(
                sending, self.client, TRANSPORTS[transport], self.version, max_bucket_bytes=_BUCKET_BYTES
            )

    async def _publish_until_good(self, fault: Fault, hit: FaultInjection) -> None:
        """Publishes until a sync succeeds, as a trainer does. A fault in a sync hits the first sync."""
        within_s = fault.noticed_within_s + _LATE_S
        if fault.is_in_sync:
            try:
                await self._in_time(self.publish(fault.transport, hit), within_s)
            except RLError:
                pass
            else:
                assert fault.what not in ("flip a byte", "stop sending"), "the engine took a damaged version"
                return
        await self._again(fault.transport, within_s)

    async def _again(self, transport: str, within_s: float) -> None:
        async with asyncio.timeout(_BACK_WITHIN_S):
            while True:
                await self.client._pool.wait_for(lambda: bool(self.client._pool.up), "a server", timeout_s=None)
                try:
                    return await self._in_time(self.publish(transport), within_s)
                except RLError:
                    await asyncio.sleep(0.5)

    async def _answered(self, waiting: Sequence[asyncio.Future[Completion]]) -> list[Completion]:
        """Waits for the answers and meanwhile publishes again for servers that were restarted, as a run does."""
        answers = asyncio.gather(*waiting)
        while not answers.done():
            lacking = asyncio.ensure_future(self.client.needs_weights())
            await asyncio.wait([answers, lacking], return_when=asyncio.FIRST_COMPLETED)
            # `cancel` returns False if the wait is over: a restarted server lacks weights.
            if not lacking.cancel() and not answers.done():
                await self._again("files", _LATE_S)
        return await answers

    async def _timed(self, asked: GenerateRequest) -> Completion:
        began = time.monotonic()
        try:
            (completion,) = await self.client.generate(asked)
        finally:
            assert time.monotonic() - began < TIMEOUT_S + _LATE_S
        return completion

    async def _in_time(self, sync: Coroutine[Any, Any, None], within_s: float) -> None:
        """Requires that the sync ends within `within_s`, and cancels it if it does not. Time without any server does
        not count, but must stay below TIMEOUT_S + _LATE_S.
        """
        syncing, took_s, waited_s = asyncio.ensure_future(sync), 0.0, 0.0
        try:
            while not syncing.done():
                has_server, began = bool(self.client._pool.up), time.monotonic()
                await asyncio.wait([syncing], timeout=_POLL_S)
                if has_server:
                    took_s += time.monotonic() - began
                else:
                    waited_s += time.monotonic() - began
                assert took_s < within_s, f"a sync took {took_s:.0f} s; its limit is {within_s:g} s"
                assert waited_s < TIMEOUT_S + _LATE_S, f"a sync waited {waited_s:.0f} s for a server to start"
            await syncing
        finally:
            syncing.cancel()

    async def whole_again(self) -> None:
        """Waits until all servers serve the current version; publishes a new version for servers that lack it."""
        async with asyncio.timeout(_BACK_WITHIN_S):
            while len(self.client._pool.serving) < len(self.members):
                await self.client.needs_weights()
                await self._again("files", _LATE_S)
        for member in self.members:
            assert member.connection is not None
            health = await member.connection.call("health", timeout_s=60)
            assert (health["version"], health["quarantine"]) == (self.version, None)
            assert (health["num_running"], health["num_waiting"], member.load) == (0, 0, 0)

    def _require_no_folder(self) -> None:
        for place in (Path("/dev/shm"), Path(tempfile.gettempdir())):
            left = [folder for folder in place.glob("rl-weights-*") if f"-{os.getpid()}-" in folder.name]
            assert not left, f"a sync left {left}"

    async def processes(self, member: Member) -> Mapping[str, Sequence[psutil.Process]]:
        """A server's processes by kind: itself, the cores and workers of its engine, and all others that it started."""
        assert member.connection is not None
        server = psutil.Process((await member.connection.call("health", timeout_s=60))["pid"])
        children = server.children(recursive=True)
        cores = [child for child in children if "EngineCore" in command_line(child)]
        workers = [child for child in children if "Worker" in command_line(child)]
        assert cores, [command_line(child) for child in children]
        others = [child for child in children if child not in cores and child not in workers]
        return {"server": [server], "core": cores, "worker": workers or cores, "other": others}

    async def all_processes(self) -> list[psutil.Process]:
        """The processes of all servers."""
        groups = [await self.processes(member) for member in self.members]
        return [process for group in groups for those in group.values() for process in those]


@attrs.frozen
class ServerResources:
    """The processes and files of servers, which must be gone when the servers have ended."""

    processes: frozenset[psutil.Process]
    files: frozenset[Path]
    """The sockets and the segments in /dev/shm that the processes have opened by name."""

    @classmethod
    def by(cls, processes: Iterable[psutil.Process]) -> ServerResources:
        """What these running processes have opened."""
        every, files = frozenset(processes), set[Path]()
        for process in every:
            sockets = [Path(str(one.laddr)) for one in process.net_connections("unix")]
            maps = [line.split() for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines()]
            mapped = [Path(fields[-1]) for fields in maps]
            inodes = {int(fields[4]) for fields in maps}
            files |= {path for path in sockets if path.is_absolute()}
            files |= {path for path in mapped if path.parent == Path("/dev/shm")}
            # A semaphore may get its name only after it was mapped, so it is found by its inode.
            files |= {path for path in Path("/dev/shm").glob("sem.*") if _inode(path) in inodes}
        return cls(every, frozenset(files))

    async def require_nothing(self, *, but: ServerResources | None = None) -> None:
        """Fails if a process or a file, other than those in `but`, is left after a minute."""
        processes = self.processes - (but.processes if but else set())
        files = self.files - (but.files if but else set())
        _, alive = await asyncio.to_thread(psutil.wait_procs, processes, timeout=60)
        assert not alive, f"processes are left: {[command_line(process) for process in alive]}"
        assert not (left := [path for path in files if path.exists()]), f"files are left: {left}"


def _inode(path: Path) -> int | None:
    """The file's inode; None if the file is gone."""
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None


class FaultInjection:
    """Triggers one fault and ends it."""

    def __init__(self, processes: Mapping[str, Sequence[psutil.Process]], fault: Fault) -> None:
        self._fault = fault
        self._process = random.Random(fault.moment).choice(processes[fault.whom])
        self._loop = asyncio.get_running_loop()
        self.has_come = False

    def __call__(self) -> None:
        """Triggers the fault; may be called from any thread."""
        self.has_come = True
        if self._fault.what == "kill":
            self._process.send_signal(signal.SIGKILL)
        elif self._fault.what in ("freeze", "pause"):
            self._process.send_signal(signal.SIGSTOP)
        if self._fault.what == "pause":
            self._loop.call_soon_threadsafe(self._loop.call_later, _PAUSE_S, self.over)

    @contextlib.contextmanager
    def in_call_of(self, client: RemoteInferenceClient) -> Iterator[None]:
        """Triggers the fault during the client's call in the fault's phase. Does nothing if `among` triggers it."""
        name, about_s = _CALLS.get(self._fault.when, ("", 0.0))
        if not name or self._comes_after_buckets:
            yield
            return
        call = getattr(client, name)

        async def disturbed(*arguments: Any) -> Any:
            self._loop.call_later(self._fault.moment * about_s, self)
            return await call(*arguments)

        setattr(client, name, disturbed)
        try:
            yield
        finally:
            delattr(client, name)

    def among(self, buckets: Iterator[WeightBucket]) -> Iterator[WeightBucket]:
        """Yields the buckets. A fault in a transfer is triggered before one of them or after the last."""
        every = list(buckets)
        place = round(self._fault.moment * (len(every) - 1)) if self._fault.when == "receiving" else None
        for i, bucket in enumerate(every):
            if i == place:
                self()
                if self._fault.what == "stop sending":
                    raise WeightSyncError("the rank has no memory left")
                if self._fault.what == "flip a byte" and self._fault.transport == "shared_memory":
                    _flip_byte_of_next_segment(self._fault.moment)
                elif self._fault.what == "flip a byte":
                    bucket = _with_flipped_byte(bucket, self._fault.moment)
            yield bucket
        if self._comes_after_buckets:
            self()

    @property
    def _comes_after_buckets(self) -> bool:
        """Whether the fault comes right after the last bucket. In phase `swapping` it does if versions are not staged:
        one call then receives the weights and loads them.
        """
        return self._fault.when == "swapping" and not TRANSPORTS[self._fault.transport].is_staged

    def over(self) -> None:
        """Ends the fault: lets a stopped process continue, if it still exists."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._process.send_signal(signal.SIGCONT)


@attrs.frozen
class _OneRank:
    """The attributes of a WorkerGroup that `publish_weights` uses."""

    transport: WeightTransport
    buckets: Iterator[WeightBucket]
    mesh: Any = attrs.field(factory=lambda: SimpleNamespace(world_size=1))
    adapter: None = None

    async def publish(self, rendezvous: Rendezvous, version: int, max_bucket_bytes: int) -> Any:
        del max_bucket_bytes  # the buckets are packed already
        sender = self.transport.sender(rendezvous, 0, 1)
        return await asyncio.to_thread(sender.send, self.buckets, version)


def _with_flipped_byte(bucket: WeightBucket, where: float) -> WeightBucket:
    """Flips a byte after the checksums were computed, as if it had changed on the way."""
    data = bucket.data.clone()
    data[int(where * (data.numel() - 1))] ^= 0x40
    return attrs.evolve(with_checksums(bucket), data=data)


def _flip_byte_of_next_segment(where: float) -> None:
    """Flips a byte in the next segment of shared memory after it was written and its checksums were computed."""
    write = Segment.write

    def write_and_flip(self: Segment, bucket: WeightBucket) -> WeightBucket:
        Segment.write = write
        packed = write(self, bucket)
        self.tensor[int(where * (self.num_bytes - 1))] ^= 0x40
        return packed

    Segment.write = write_and_flip


def batch_of_requests(name: str, count: int) -> list[GenerateRequest]:
    """Requests, each with a longer response than the one before, so that they end at different times."""
    return [
        request(f"{name}-{i}", (1, 2, 3 + i % 7), seed=i, max_tokens=60 + 4 * i, ignore_eos=True) for i in range(count)
    ]
