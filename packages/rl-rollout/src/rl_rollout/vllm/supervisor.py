"""Sends heartbeats to the servers; removes a dead or hung server from the pool, and restarts it or, if it is external,
waits for it.

consumes     answers to heartbeats; the client's reports that a server did not answer
produces     members that join and leave the pool
waits for    the next heartbeat; a restarted server, up to its start timeout
unblocked by time, or by `suspect`

A restarted server holds the model's initial weights. It is up, but not in service until it has received the pool's
version: at the trainer's next sync, or earlier if the trainer waits for `needs_weights` and then publishes again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import aiohttp
import attrs

from rl_core.errors import ConfigError, DeadlineError, GenerationError, RLError
from rl_core.tasks import all_of
from rl_rollout.vllm.connection import CONNECT_S, Connection, ServerGone, open_session
from rl_rollout.vllm.pool import EngineFacts, Member, Pool, Wanted
from rl_rollout.vllm.server import ServerAddress

logger = logging.getLogger(__name__)

_CONFIRM_S = 0.2
"""Seconds after which a server that did not answer is asked once more; if it fails again, it counts as dead."""
_RESTART_PAUSE_S = 1.0
_NOTICE_S = 10.0
"""Seconds after which the wait for an external server is logged."""
_MAX_RESTART_PAUSE_S = 60.0
_PREPARE_S = 120.0


class Startable(Protocol):
    """A server that the supervisor can start and end."""

    async def start(self) -> ServerAddress: ...

    def kill(self) -> None: ...

    async def stop(self) -> None: ...


@attrs.frozen(kw_only=True)
class Heartbeat:
    """How often servers are checked, and how long a server may take to answer."""

    interval_s: float
    """Seconds between two heartbeats."""
    hung_after_s: float
    """Seconds without an answer after which a server is considered hung. Choose a large value, because a machine may
    swap or be overloaded."""


class Supervisor:
    """Keeps the members of a pool alive. Call all methods on the same event loop."""

    def __init__(self, pool: Pool, servers: Sequence[Startable], heartbeat: Heartbeat, *, control_token: str) -> None:
        self._pool = pool
        self._servers = servers
        self._heartbeat = heartbeat
        self._control_token = control_token
        self._suspected = [asyncio.Event() for _ in servers]
        self._watching: list[asyncio.Task[None]] = []
        self._session: aiohttp.ClientSession

    async def start(self) -> None:
        """Starts all servers. If one does not start, stops the others and raises its error."""
        self._session = open_session(self._control_token)
        members = list(zip(self._pool.members, self._servers, strict=True))
        try:
            await all_of(self._start(member, server) for member, server in members)
        except BaseException:  # not only Exception: the run may be cancelled meanwhile
            await self.close()
            raise
        self._watching = [asyncio.create_task(self._watch(member, server)) for member, server in members]

    def suspect(self, member: Member) -> None:
        """Checks a server now instead of at its next heartbeat."""
        self._suspected[member.index].set()

    async def close(self) -> None:
        """Ends the servers and the connections to them."""
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        for member in self._pool.members:
            await self._pool.left(member, "the run ended")
        await self._session.close()
        await asyncio.gather(*(server.stop() for server in self._servers))

    async def _start(self, member: Member, server: Startable) -> None:
        address = await server.start()
        connection = Connection(self._session, address.url, str(member))
        try:
            reached: Wanted | None = None
            while reached != self._pool.wanted:
                reached = self._pool.wanted
                await self._load_adapters(connection, reached.adapters)
                if reached.sleep_level is not None:
                    # The server allocated its memory when it started, but training uses that memory now.
                    await connection.call("sleep", {"level": reached.sleep_level}, timeout_s=_PREPARE_S)
                    await connection.call("wake", {"tags": sorted(reached.woken)}, timeout_s=_PREPARE_S)
                while not await self._heard(member, connection):
                    pass  # a weight update began or ended meanwhile
        except ServerGone as error:
            raise GenerationError(f"{member} started, but was lost right away: {error}") from error

    async def _load_adapters(self, connection: Connection, adapters: Mapping[str, str]) -> None:
        """Loads the adapters. A server that lacks one still serves the policy, and refuses requests for the missing
        adapter."""
        for name, path in adapters.items():
            try:
                arguments = {"name": name, "path": path}
                await connection.call("load_adapter", arguments, timeout_s=_PREPARE_S)
            except (GenerationError, DeadlineError) as error:
                logger.error("%s no longer serves adapter %r: %s", connection.name, name, error)

    async def _heard(self, member: Member, connection: Connection) -> bool:
        """Sends one heartbeat and records the answer in the pool. Leaves the member unchanged and returns False if a
        weight update began or ended meanwhile. Raises ServerGone if a new process answers, because that process lacks
        the adapters."""
        updates = self._pool.num_updates
        health = await connection.call("health", timeout_s=self._heartbeat.hung_after_s)
        self._pool.facts = EngineFacts(vocab_size=health["vocab_size"], num_workers=health["num_workers"])
        if member.connection is not None and member.boot_id != health["boot_id"]:
            raise ServerGone("it was restarted since the last heartbeat")
        if updates != self._pool.num_updates:
            return False
        member.boot_id = health["boot_id"]
        is_quarantined = health["quarantine"] is not None
        await self._pool.joined(member, connection, health["version"], is_quarantined=is_quarantined)
        return True

    async def _watch(self, member: Member, server: Startable) -> None:
        suspected = self._suspected[member.index]
        while True:
            try:
                async with asyncio.timeout(self._heartbeat.interval_s):
                    await suspected.wait()
            except TimeoutError:
                pass
            suspected.clear()
            reason = await self._fault(member)
            if reason is not None:
                remedy = (
                    "the run waits until it answers (start it again if it has ended)"
                    if isinstance(server, ExternalServer)
                    else "it is restarted"
                )
                logger.warning("%s has failed; %s: %s", member, remedy, reason)
                await self._pool.left(member, reason)
                await self._bring_back(member, server)

    async def _fault(self, member: Member) -> str | None:
        """Checks the server. Returns why it must be restarted, or None if it is healthy."""
        connection = member.connection
        assert connection is not None
        if member.hung is not None:
            return member.hung
        try:
            try:
                await self._heard(member, connection)
            except ServerGone:
                await asyncio.sleep(_CONFIRM_S)
                await self._heard(member, connection)
        except Exception as error:  # whatever it is: if this task ended, nothing would restart the server
            return _reason(error)
        return None

    async def _bring_back(self, member: Member, server: Startable) -> None:
        """Restarts the server, as often as needed until it answers. The other servers continue to serve."""
        pause_s, began = _RESTART_PAUSE_S, time.monotonic()
        while True:
            try:
                server.kill()
                await self._start(member, server)
            except Exception as error:  # as in `_fault`
                problem = (
                    "has not been started again" if isinstance(server, ExternalServer) else "could not be restarted"
                )
                member.why_down = _reason(error)
                logger.error("%s %s: %s", member, problem, member.why_down)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _MAX_RESTART_PAUSE_S)
            else:
                logger.warning("%s is up again after %.0f s", member, time.monotonic() - began)
                return


def _reason(error: Exception) -> str:
    """Returns the error's message; an unexpected error's message begins with its type."""
    return str(error) if isinstance(error, ServerGone | RLError) else f"{type(error).__name__}: {error}"


@attrs.frozen
class ExternalServer:
    """A server that is started and ended outside the run."""

    url: str
    control_token: str = attrs.field(repr=False)
    timeout_s: float
    needs_kept_tokens: bool = False
    """Whether the run cannot use a server that does not return kept tokens."""

    async def start(self) -> ServerAddress:
        """Waits until the server answers, and ends any pause. A killed run may have left a pause behind, or a pause may
        have begun before the server became unreachable.

        Raises:
            DeadlineError: the server did not answer within `timeout_s`.
            ConfigError: the server does not return kept tokens, which the run needs.
        """
        deadline = time.monotonic() + self.timeout_s
        reason = "it did not answer"

        def say_that_it_waits() -> None:
            logger.warning("waiting for the server at %s, up to %g s in all: %s", self.url, self.timeout_s, reason)

        notice = asyncio.get_running_loop().call_later(_NOTICE_S, say_that_it_waits)
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(notice.cancel)
            session = await stack.enter_async_context(open_session(self.control_token))
            while True:
                left_s = max(0.001, deadline - time.monotonic())
                try:
                    connection = Connection(session, self.url, "the server")
                    health: Any = await connection.call("health", timeout_s=left_s)
                    if self.needs_kept_tokens and not health["returns_kept_tokens"]:
                        raise ConfigError(
                            f"the server at {self.url} does not return the tokens that top_p, top_k and min_p keep, "
                            "which training needs; start it with the run's generator.sampling_params, or remove these "
                            "keys",
                            key="generator.inference_engine.external_server_urls",
                        )
                    await connection.call("resume", timeout_s=left_s)
                    return ServerAddress(url=self.url, pid=health["pid"])
                except (ServerGone, DeadlineError) as error:
                    if isinstance(error, ServerGone):
                        reason = str(error).removeprefix(f"the server at {self.url}: ")
                    elif left_s > CONNECT_S:  # a server that does not accept the connection raises ServerGone earlier
                        reason = "it accepts connections but does not answer"
                    if time.monotonic() > deadline:
                        raise DeadlineError(
                            f"waited {self.timeout_s:g} s (generator.inference_engine.start_timeout_s) for the server "
                            f"at {self.url}: {reason}. Is it started (python -m rl_rollout.vllm.serve), and can this "
                            "machine reach it?"
                        ) from error
                    await asyncio.sleep(_RESTART_PAUSE_S)

    def kill(self) -> None:
        """Does nothing: the run did not start this server."""

    async def stop(self) -> None:
        """Does nothing: the run did not start this server."""
