"""Chooses a server for each request: the one that its session used before, if that is in service, else the least loaded
one."""

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
"""The parts of memory that a sleeping server frees."""
MAX_LOST = 3
"""When this many servers were lost while they had the same request, the request is not sent to another server, because
the request may be the cause. A server that was restarted counts again. Several failures of a server before it is given
up count once, because a proxy may answer 502 for as long as a server is down."""
_MAX_SESSIONS = 100_000


@attrs.frozen(kw_only=True)
class EngineFacts:
    """Facts that are the same for every server of a run."""

    vocab_size: int
    """Size of the vocabulary: token ids are smaller."""
    num_workers: int
    """Number of processes of one server that hold weights."""


@attrs.frozen(kw_only=True)
class Wanted:
    """State into which all servers are brought, including those that start later."""

    adapters: Mapping[str, str] = attrs.field(factory=dict)
    """Adapters besides the policy's: name → directory."""
    sleep_level: int | None = None
    """Sleep level of the servers; None: they are awake."""
    woken: frozenset[str] = frozenset()
    """Parts of memory that sleeping servers have allocated again."""

    def awake(self, tags: Iterable[str] | None) -> Wanted:
        """Returns a copy with these parts of memory allocated again; None: all parts."""
        woken = ALL_MEMORY if tags is None else self.woken | set(tags)
        if self.sleep_level is None or woken >= ALL_MEMORY:
            return attrs.evolve(self, sleep_level=None, woken=frozenset())
        return attrs.evolve(self, woken=woken)


@attrs.define(eq=False)
class Member:
    """The client's view of one server."""

    index: int
    connection: Connection | None = None
    """None: the server is down."""
    boot_id: str | None = None
    """Identifies the server's process, as last reported; None: no process was seen yet."""
    version: int = -1
    """Version of the server's weights, as last reported."""
    is_quarantined: bool = False
    """Whether the server may hold incomplete weights, and so gets no requests."""
    load: int = 0
    """Number of samples that were requested from the server and not yet answered. A chat completion and a request of an
    outside agent each count as one."""
    idle: IdleTime = attrs.field(factory=IdleTime)
    """Measures the time during which `load` is 0."""
    why_down: str = "it has not started"
    hung: str | None = None
    """Why the server is given up even if it still answers heartbeats: it did not finish its part of a failed weight
    sync. None: there is no such reason."""
    lost: asyncio.Event = attrs.field(factory=asyncio.Event)
    """Set when the current connection is given up; `joined` creates a new event for the next connection, so an event
    also identifies the time between two restarts."""

    def __str__(self) -> str:
        return f"vLLM server {self.index}"


@asynccontextmanager
async def while_up(member: Member) -> AsyncIterator[Connection]:
    """Yields the member's connection. Raises ServerGone as soon as the member is given up: a hung server never closes
    the connection, so the call within the context would otherwise wait for its deadline."""
    connection = member.connection
    if connection is None:
        raise ServerGone(f"{member} is down: {member.why_down}")
    block = asyncio.timeout(None)
    losing, has_ended = asyncio.ensure_future(member.lost.wait()), False
    # A deadline in the past ends the block at once. If the block has already ended, in the same iteration of the event
    # loop, `reschedule` would raise RuntimeError.
    losing.add_done_callback(lambda _: None if losing.cancelled() or has_ended else block.reschedule(0.0))
    try:
        async with block:
            try:
                yield connection
            finally:
                has_ended = True
                losing.cancel()
    except TimeoutError:
        if not block.expired():
            raise
        raise LostUnderRequest(f"{member} is down: {member.why_down}") from None


class Pool:
    """The servers of a run, and the version they should serve."""

    def __init__(self, num_servers: int) -> None:
        self.members = [Member(index) for index in range(num_servers)]
        self.facts: EngineFacts
        """Set after the first server has answered."""
        self.version = -1
        self.wanted = Wanted()
        """State into which every server is brought; weights are not part of it."""
        self.num_left = 0
        """How many times a server was given up so far; the same server may be given up several times."""
        self.num_updates = 0
        """Number of begun weight updates plus number of ended ones, so it is odd during an update. A server's report is
        ignored if this number has changed since the server was asked."""
        self._sessions: OrderedDict[str, int] = OrderedDict()
        self._changed = asyncio.Condition()

    @property
    def up(self) -> list[Member]:
        """Servers that answer, with any weights."""
        return [member for member in self.members if member.connection is not None]

    @property
    def serving(self) -> list[Member]:
        """Servers in service: they have the current version and are not quarantined."""
        return [member for member in self.up if member.version == self.version and not member.is_quarantined]

    def adopt_version(self) -> None:
        """If all servers hold the same version, makes it the current one. External servers that have served another run
        may hold any version. Does nothing if the versions differ."""
        versions = {member.version for member in self.up}
        if len(versions) == 1:
            self.version = versions.pop()

    async def joined(self, member: Member, connection: Connection, version: int, *, is_quarantined: bool) -> None:
        """Records that a server answers, and the weight version that it has reported."""
        if member.connection is None:
            member.lost = asyncio.Event()
        member.connection = connection
        member.version, member.is_quarantined = version, is_quarantined
        await self._tell()

    async def left(self, member: Member, reason: str) -> None:
        """Gives up the server; calls that wait for its answer raise LostUnderRequest."""
        self.num_left += 1
        member.connection = member.hung = None
        member.why_down = reason
        member.lost.set()
        await self._tell()

    @property
    def lacks_weights(self) -> bool:
        """Whether a server that is up lacks the current version or is quarantined; always False during a weight
        update."""
        return self.num_updates % 2 == 0 and len(self.serving) < len(self.up)

    @asynccontextmanager
    async def updating(self) -> AsyncIterator[None]:
        """Counts the beginning and the end of a weight update in `num_updates`; the update runs within the context."""
        self.num_updates += 1
        try:
            yield
        finally:
            self.num_updates += 1
            await self._tell()

    async def changed_version(self, version: int, members: Sequence[Member]) -> None:
        """Makes `version` the current one, and records that `members` hold it."""
        self.version = version
        for member in members:
            member.version, member.is_quarantined = version, False
        await self._tell()

    async def choose(self, session_id: str | None, *, timeout_s: float) -> Member:
        """Waits until a server is in service. Returns the session's server if that is in service, else the least loaded
        one. Raises DeadlineError after `timeout_s`."""
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
        """Returns when `condition()` is true, which is checked whenever a server's state changes. Raises DeadlineError
        after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(condition)
        except TimeoutError:
            raise DeadlineError(f"waited {timeout_s:g} s for {what}; {self.described()}") from None

    @contextmanager
    def carries(self, member: Member, num_samples: int) -> Iterator[None]:
        """Counts the samples as the member's load within the context. With 0 samples, the member can still be idle."""
        member.load += num_samples
        try:
            with member.idle.busy() if num_samples else nullcontext():
                yield
        finally:
            member.load -= num_samples

    def described(self) -> str:
        """Describes every server's state, for messages."""
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
