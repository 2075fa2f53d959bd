"""Chooses the server for a request: the session's own if it serves, else the least loaded one."""

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
"""After this many servers were lost while they had a request, no other gets the request: it may be the cause."""
_MAX_SESSIONS = 100_000


@attrs.frozen(kw_only=True)
class EngineFacts:
    """Facts that are the same for every server of a run."""

    vocab_size: int
    """Token ids are below this."""
    num_workers: int
    """Number of processes of one engine that hold weights."""


@attrs.frozen(kw_only=True)
class Wanted:
    """State that the run wants of all servers, including those that start later."""

    adapters: Mapping[str, str] = attrs.field(factory=dict)
    """Adapters besides the policy's: name → directory."""
    sleep_level: int | None = None
    """Sleep level of the servers; None: they are awake."""
    woken: frozenset[str] = frozenset()
    """Parts of memory that sleeping servers have allocated again."""

    def awake(self, tags: Iterable[str] | None) -> Wanted:
        """A copy with these parts of memory allocated again; None: all parts."""
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
    version: int = -1
    """Version of the weights it holds, as last reported."""
    is_quarantined: bool = False
    load: int = 0
    """Number of samples requested from it and not yet answered."""
    idle: IdleTime = attrs.field(factory=IdleTime)
    """Time without such samples."""
    why_down: str = "it has not started"
    hung: str | None = None
    """Why the server must be restarted although it still answers by HTTP: its engine hangs. None: no restart is
    needed."""
    lost: asyncio.Event = attrs.field(factory=asyncio.Event)
    """Set when its current connection is given up; every connection has its own event."""

    def __str__(self) -> str:
        return f"vLLM server {self.index}"


@asynccontextmanager
async def while_up(member: Member) -> AsyncIterator[Connection]:
    """Yields the member's connection. Raises ServerGone as soon as the member is given up, because a hung server never
    breaks the connection itself."""
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
    """The servers of a run, and the version they should serve."""

    def __init__(self, num_servers: int) -> None:
        self.members = [Member(index) for index in range(num_servers)]
        self.facts: EngineFacts
        """Set after the first server has answered."""
        self.version = -1
        self.wanted = Wanted()
        """State wanted of every server, besides its weights."""
        self.num_left = 0
        """Number of servers given up so far."""
        self.num_updates = 0
        """Number of weight updates begun plus ended; a server's report is ignored if this number has changed since the
        server was asked."""
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
        """Makes the version that all servers hold the current one, because external servers may have served another
        run. Does nothing if their versions differ."""
        versions = {member.version for member in self.up}
        if len(versions) == 1:
            self.version = versions.pop()

    async def joined(self, member: Member, connection: Connection, version: int, *, is_quarantined: bool) -> None:
        """Call when the server answers and has reported its weight version."""
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
        """Whether a server is up that lacks the current version while no update is running."""
        return self.num_updates % 2 == 0 and len(self.serving) < len(self.up)

    @asynccontextmanager
    async def updating(self) -> AsyncIterator[None]:
        """Context of a weight update."""
        self.num_updates += 1
        try:
            yield
        finally:
            self.num_updates += 1
            await self._tell()

    async def changed_version(self, version: int, members: Sequence[Member]) -> None:
        """Makes `version` the one that the run serves; `members` hold it."""
        self.version = version
        for member in members:
            member.version, member.is_quarantined = version, False
        await self._tell()

    async def choose(self, session_id: str | None, *, timeout_s: float) -> Member:
        """The session's server, else the least loaded one; waits until a server is in service. Raises DeadlineError."""
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
        """Returns when `condition()` is true; it is checked whenever a server's state changes."""
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(condition)
        except TimeoutError:
            raise DeadlineError(f"waited {timeout_s:g} s for {what}; {self.described()}") from None

    @contextmanager
    def carries(self, member: Member, num_samples: int) -> Iterator[None]:
        """Counts the samples as load within the context; a request without samples is no load."""
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
