"""Which server takes a request: the session's own if it serves, else the one with the least to do."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext

import attrs

from rl_core.errors import DeadlineError
from rl_core.tasks import IdleTime
from rl_rollout.vllm.connection import Connection, LostUnderRequest, ServerGone

ALL_MEMORY = frozenset({"weights", "kv_cache"})
"""The parts that a sleeping server gave back."""
MAX_LOST = 3
"""Servers that may be lost under one request: it may be what ends them, so it is not sent to another."""
_MAX_SESSIONS = 100_000


@attrs.frozen(kw_only=True)
class EngineFacts:
    """What is the same for every server of a run."""

    vocab_size: int
    """Token ids are below it."""
    num_workers: int
    """Processes of one engine that hold weights."""


@attrs.frozen(kw_only=True)
class Wanted:
    """What the run asked of all servers, and of those too that start later."""

    adapters: Mapping[str, str] = attrs.field(factory=dict)
    """Besides the policy's: name → directory."""
    sleep_level: int | None = None
    """How deep they sleep; None: they are awake."""
    woken: frozenset[str] = frozenset()
    """Parts of their memory that sleeping servers took again."""

    def awake(self, tags: Iterable[str] | None) -> Wanted:
        """With these parts of the memory taken again; None: with all of it."""
        woken = ALL_MEMORY if tags is None else self.woken | set(tags)
        if self.sleep_level is None or woken >= ALL_MEMORY:
            return attrs.evolve(self, sleep_level=None, woken=frozenset())
        return attrs.evolve(self, woken=woken)


@attrs.define(eq=False)
class Member:
    """One server, as far as the client knows."""

    index: int
    connection: Connection | None = None
    """None: down."""
    version: int = -1
    """Of the weights it holds, as it said last."""
    is_quarantined: bool = False
    load: int = 0
    """Samples asked of it and not answered."""
    idle: IdleTime = attrs.field(factory=IdleTime)
    """Time without any."""
    why_down: str = "it has not started"
    hung: str | None = None
    """Why it must go, whatever it says of itself: its HTTP server answers, and its engine does not."""
    lost: asyncio.Event = attrs.field(factory=asyncio.Event)
    """Set when the connection it had is given up; every connection has an event of its own."""

    def __str__(self) -> str:
        return f"vLLM server {self.index}"


@asynccontextmanager
async def while_up(member: Member) -> AsyncIterator[Connection]:
    """The member's connection. Raises ServerGone as soon as the member is given up: a hung server never breaks it."""
    connection = member.connection
    if connection is None:
        raise ServerGone(f"{member} is down: {member.why_down}")
    block = asyncio.timeout(None)
    losing = asyncio.ensure_future(member.lost.wait())
    losing.add_done_callback(lambda _: None if losing.cancelled() else block.reschedule(0.0))
    try:
        async with block:
            try:
                yield connection
            finally:
                losing.cancel()
    except TimeoutError:
        if not block.expired():
            raise
        raise LostUnderRequest(f"{member} is down: {member.why_down}") from None


class Pool:
    """The servers of a run, and the version that they are to serve."""

    def __init__(self, num_servers: int) -> None:
        self.members = [Member(index) for index in range(num_servers)]
        self.facts: EngineFacts
        """Set when the first server has answered."""
        self.version = -1
        self.wanted = Wanted()
        """Besides its weights, of every server."""
        self.num_left = 0
        """Servers given up so far."""
        self.num_updates = 0
        """Weight updates begun and ended: what was said before a change is not believed after it."""
        self._sessions: OrderedDict[str, int] = OrderedDict()
        self._changed = asyncio.Condition()

    @property
    def up(self) -> list[Member]:
        """Servers that answer, whatever weights they hold."""
        return [member for member in self.members if member.connection is not None]

    @property
    def serving(self) -> list[Member]:
        """Servers that may take requests."""
        return [member for member in self.up if member.version == self.version and not member.is_quarantined]

    def adopt_version(self) -> None:
        """Takes the version that all servers hold as the current one: external ones may have served another run."""
        versions = {member.version for member in self.up}
        if len(versions) == 1:
            self.version = versions.pop()

    async def joined(self, member: Member, connection: Connection, version: int, *, is_quarantined: bool) -> None:
        """The server answers, and said what it holds."""
        if member.connection is None:
            member.lost = asyncio.Event()
        member.connection = connection
        member.version, member.is_quarantined = version, is_quarantined
        await self._tell()

    async def left(self, member: Member, reason: str) -> None:
        """The server is given up, with all requests that wait for it."""
        self.num_left += 1
        member.connection = member.hung = None
        member.why_down = reason
        member.lost.set()
        await self._tell()

    @property
    def lacks_weights(self) -> bool:
        """A server is up that does not hold the current version, and no update is under way."""
        return self.num_updates % 2 == 0 and len(self.serving) < len(self.up)

    @asynccontextmanager
    async def updating(self) -> AsyncIterator[None]:
        """Around a weight update."""
        self.num_updates += 1
        try:
            yield
        finally:
            self.num_updates += 1
            await self._tell()

    async def changed_version(self, version: int, members: Sequence[Member]) -> None:
        """`version` is what the run serves now, and these hold it."""
        self.version = version
        for member in members:
            member.version, member.is_quarantined = version, False
        await self._tell()

    async def choose(self, session_id: str | None, *, timeout_s: float) -> Member:
        """The session's server, else the least loaded; waits until one serves. Raises DeadlineError."""
        await self.wait_for(lambda: bool(self.serving), "a vLLM server to be in service", timeout_s=timeout_s)
        serving = self.serving
        known = self._sessions.get(session_id) if session_id is not None else None
        member = next((member for member in serving if member.index == known), None)
        if member is None:
            member = min(serving, key=lambda member: member.load)
        if session_id is not None:
            self._remember(session_id, member.index)
        return member

    async def wait_for(self, condition: Callable[[], bool], what: str, *, timeout_s: float | None) -> None:
        """Returns when `condition()` holds; it is looked at whenever a server changes."""
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(condition)
        except TimeoutError:
            raise DeadlineError(f"waited {timeout_s:g} s for {what}; {self.described()}") from None

    @contextmanager
    def carries(self, member: Member, num_samples: int) -> Iterator[None]:
        """Counts samples as load while the block runs; a request that samples nothing is none."""
        member.load += num_samples
        try:
            with member.idle.busy() if num_samples else nullcontext():
                yield
        finally:
            member.load -= num_samples

    def described(self) -> str:
        """Every server's state, for messages."""
        return "; ".join(self._state(member) for member in self.members)

    def _state(self, member: Member) -> str:
        if member.connection is None:
            return f"{member} is down ({member.why_down})"
        if member.is_quarantined:
            return f"{member} is quarantined until a complete weight update"
        if member.version != self.version:
            return f"{member} holds weight version {member.version} and waits for version {self.version}"
        return f"{member} serves version {member.version}"

    def _remember(self, session_id: str, index: int) -> None:
        self._sessions[session_id] = index
        self._sessions.move_to_end(session_id)
        if len(self._sessions) > _MAX_SESSIONS:
            self._sessions.popitem(last=False)

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()
