"""Faults of servers and of syncs, drawn at random, and a trainer that publishes weights meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from rl_core.trainer.publish import publish_weights
from rl_rollout.transports.broadcast import BroadcastTransport
from rl_rollout.transports.files import FilesTransport
from rl_rollout.transports.shared_memory import SharedMemoryTransport
from rl_rollout.vllm.client import RemoteInferenceClient
from rl_rollout.vllm.pool import Member
from tests.rollout.vllm.servers import request

What = Literal["kill", "freeze", "pause", "flip a byte", "stop sending"]
Whom = Literal["server", "core", "worker"]
When = Literal["generating", "syncing", "idle"]
TIMEOUT_S = 300.0
"""Of a request; an update has half of it. A server starts in a minute on two free cores."""
_TRANSPORT_S = TIMEOUT_S / 3
"""As by default: whoever waits in vain for another one's part of a sync says so before its engine is given up."""
HUNG_AFTER_S = 20.0
_LATE_S = 15.0
"""After its deadline, on a busy machine."""
_BACK_WITHIN_S = 900.0
_PAUSE_S = 2.0
_LIMIT = 1e-3
"""Of a log-prob in float32, where 1e-5 is measured; weights of another version are off by 0.1 and more."""
_BUCKET_BYTES = 1 << 15
TRANSPORTS: Mapping[str, WeightTransport] = {
    "files": FilesTransport(timeout_s=_TRANSPORT_S),
    "shared_memory": SharedMemoryTransport(timeout_s=_TRANSPORT_S),
    "broadcast": BroadcastTransport(timeout_s=_TRANSPORT_S),
}


@attrs.frozen(kw_only=True)
class Fault:
    """One thing that goes wrong."""

    what: What
    when: When
    transport: str = "files"
    """Of the sync: the one that it hits, or that comes after it."""
    whom: Whom = "server"
    """Of what the operating system does; the sender has the others."""
    moment: float = 0.5
    """From 0 to 1: of the requests, or of the buckets of the sync, how many are done."""

    def __str__(self) -> str:
        if self.what in ("flip a byte", "stop sending"):
            return f"{self.what}, {self.transport} at {self.moment:.2f}"
        return f"{self.what} {self.whom} {self.when}, {self.transport} at {self.moment:.2f}"


def drawn(seed: int) -> Fault:
    """Half of them hit a sync."""
    dice = random.Random(seed)
    when: When = dice.choice(["generating", "syncing", "syncing", "idle"])
    anytime: Sequence[What] = ("kill", "kill", "freeze", "pause")
    of_sync: Sequence[What] = ("flip a byte", "flip a byte", "stop sending")
    whom: Sequence[Whom] = ("server", "core", "worker")
    return Fault(
        what=dice.choice([*anytime, *of_sync] if when == "syncing" else anytime),
        when=when,
        transport=dice.choice(list(TRANSPORTS)),
        whom=dice.choice(whom),
        moment=dice.random(),
    )


class Model:
    """The engines' model in transformers, with weights that are different in every version."""

    def __init__(self, model_path: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        self._first = {name: tensor.detach().clone() for name, tensor in self._model.named_parameters()}

    def tensors(self, version: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(version)
        return {name: t + 0.1 * torch.randn(t.shape, generator=generator) for name, t in self._first.items()}

    @torch.no_grad()
    def logprobs(self, version: int, tokens: Sequence[int]) -> Tensor:
        """(T - 1,): of each token but the first, given those before it."""
        self._model.load_state_dict(self.tensors(version), strict=False)
        logprobs_TV = self._model(input_ids=torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
        return logprobs_TV.gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]

    def require_versions(self, asked: GenerateRequest, completion: Completion) -> None:
        """Every token has the log-prob of the version that it says it was sampled with, and of no other."""
        tokens = [*asked.prompt_tokens, *completion.tokens]
        said, versions = torch.tensor(completion.logprobs), torch.tensor(completion.policy_versions)
        for version in set(completion.policy_versions):
            own = versions == version
            difference = (self.logprobs(version, tokens)[-len(said) :] - said)[own].abs().max().item()
            assert difference < _LIMIT, f"{asked.sample_id}: version {version}'s tokens are off by {difference:.2g}"
            others = (self.logprobs(version + 1, tokens)[-len(said) :] - said)[own].abs().max().item()
            assert own.sum() < 8 or others > 0.1, "two versions cannot be told apart: the test shows nothing"


class Cluster:
    """Servers of this run, and a trainer of one rank."""

    def __init__(self, client: RemoteInferenceClient, model: Model) -> None:
        self.client = client
        self.model = model
        self.version = -1

    @property
    def members(self) -> list[Member]:
        return self.client._pool.members

    async def survives(self, fault: Fault, name: str) -> None:
        """Requests are asked for, the fault comes: each is answered once, by the weights it says, within its deadline;
        and afterwards all servers serve the current version."""
        victim = random.Random(name).choice(self.members)
        hit = Hit(await self.processes(victim), fault)
        requests = _requests(name)
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
            completions = await asyncio.gather(*waiting)
        finally:
            for task in waiting:
                task.cancel()
            hit.over()
        for asked, completion in zip(requests, completions, strict=True):
            assert len(completion.tokens) == asked.params.max_tokens
            self.model.require_versions(asked, completion)
        await self.whole_again()
        self._require_nothing_left()

    async def publish(
        self,
        transport: str = "files",
        *,
        disturbed: Callable[[Iterator[WeightBucket]], Iterator[WeightBucket]] = lambda buckets: buckets,
    ) -> None:
        """The next version, as a trainer does at the end of a step."""
        self.version += 1
        buckets = pack_buckets(self.model.tensors(self.version).items(), _BUCKET_BYTES)
        rank = _OneRank(TRANSPORTS[transport], disturbed(buckets))
        sending: Any = rank
        await publish_weights(sending, self.client, TRANSPORTS[transport], self.version, max_bucket_bytes=_BUCKET_BYTES)

    async def _publish_until_good(self, fault: Fault, hit: Hit) -> None:
        """What the trainer of a run that goes on would do; a fault of a sync is in the first."""
        if fault.when == "syncing":
            try:
                await self._in_time(self.publish(fault.transport, disturbed=hit.in_sync))
            except RLError:
                pass
            else:
                assert fault.what not in ("flip a byte", "stop sending"), "the damaged version was taken"
                return
        await self._again(fault.transport)

    async def _again(self, transport: str) -> None:
        async with asyncio.timeout(_BACK_WITHIN_S):
            while True:
                try:
                    return await self._in_time(self.publish(transport))
                except RLError:
                    await asyncio.sleep(0.5)

    async def _timed(self, asked: GenerateRequest) -> Completion:
        (completion,) = await self._in_time(self.client.generate(asked))
        return completion

    async def _in_time(self, call: Any) -> Any:
        """Its own deadline ends it, at the latest."""
        began = time.monotonic()
        try:
            return await call
        finally:
            took_s = time.monotonic() - began
            # An update waits for a server to be up before it begins.
            assert took_s < 2 * TIMEOUT_S + _LATE_S, f"waited {took_s:.0f} s, where the deadline is {TIMEOUT_S:g} s"

    async def whole_again(self) -> None:
        """Returns when all servers hold the current version, which is published again when they ask for it."""
        async with asyncio.timeout(_BACK_WITHIN_S):
            while len(self.client._pool.serving) < len(self.members):
                await self.client.needs_weights()
                await self._again("files")
        for member in self.members:
            assert member.connection is not None
            health = await member.connection.call("health", timeout_s=60)
            assert (health["version"], health["quarantine"]) == (self.version, None)
            assert (health["num_running"], health["num_waiting"], member.load) == (0, 0, 0)

    def _require_nothing_left(self) -> None:
        for place in (Path("/dev/shm"), Path(tempfile.gettempdir())):
            left = [folder for folder in place.glob("rl-weights-*") if f"-{os.getpid()}-" in folder.name]
            assert not left, f"a sync left {left}"

    async def processes(self, member: Member) -> Mapping[str, Sequence[psutil.Process]]:
        """Of a server: itself, and those of its engine by what they are."""
        assert member.connection is not None
        server = psutil.Process((await member.connection.call("health", timeout_s=60))["pid"])
        children = server.children(recursive=True)
        cores = [child for child in children if "EngineCore" in " ".join(child.cmdline())]
        workers = [child for child in children if "Worker" in " ".join(child.cmdline())]
        assert cores, [child.cmdline() for child in children]
        return {"server": [server], "core": cores, "worker": workers or cores}


class Hit:
    """A fault's moment, and its end."""

    def __init__(self, processes: Mapping[str, Sequence[psutil.Process]], fault: Fault) -> None:
        self._fault = fault
        self._process = random.Random(fault.moment).choice(processes[fault.whom])
        self._resuming: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    def __call__(self) -> None:
        """From any thread."""
        if self._fault.what == "kill":
            self._process.send_signal(signal.SIGKILL)
        elif self._fault.what in ("freeze", "pause"):
            self._process.send_signal(signal.SIGSTOP)
        if self._fault.what == "pause":
            self._loop.call_soon_threadsafe(self._loop.call_later, _PAUSE_S, self.over)

    def in_sync(self, buckets: Iterator[WeightBucket]) -> Iterator[WeightBucket]:
        """The buckets, with the fault among them."""
        every = list(buckets)
        place = round(self._fault.moment * (len(every) - 1))
        for i, bucket in enumerate(every):
            if i == place:
                self()
                if self._fault.what == "stop sending":
                    raise WeightSyncError("the rank has no memory left")
                if self._fault.what == "flip a byte":
                    bucket = _with_flipped_byte(bucket, self._fault.moment)
            yield bucket

    def over(self) -> None:
        """A frozen process goes on, if it still exists."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._process.send_signal(signal.SIGCONT)


@attrs.frozen
class _OneRank:
    """What `publish_weights` asks of a WorkerGroup."""

    transport: WeightTransport
    buckets: Iterator[WeightBucket]
    mesh: Any = attrs.field(factory=lambda: SimpleNamespace(world_size=1))
    adapter: None = None

    async def publish(self, rendezvous: Rendezvous, version: int, max_bucket_bytes: int) -> Any:
        del max_bucket_bytes  # they are packed already
        sender = self.transport.sender(rendezvous, 0, 1)
        return await asyncio.to_thread(sender.send, self.buckets, version)


def _with_flipped_byte(bucket: WeightBucket, where: float) -> WeightBucket:
    """As if a byte had changed on its way: the checksums are those of what was meant."""
    data = bucket.data.clone()
    data[int(where * (data.numel() - 1))] ^= 0x40
    return attrs.evolve(with_checksums(bucket), data=data)


def _requests(name: str) -> list[GenerateRequest]:
    """Each longer than the one before, so that they do not end together."""
    return [
        request(f"{name}-{i}", (1, 2, 3 + i % 7), seed=i, max_tokens=40 + 6 * i, ignore_eos=True) for i in range(24)
    ]
