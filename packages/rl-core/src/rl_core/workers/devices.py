"""Lets groups of ranks that share devices use them in turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import attrs

from rl_core.interfaces import Worker
from rl_core.workers.rank import Ranks


@attrs.define(eq=False)
class Tenant:
    """The ranks of one group on shared devices, and a record of which parts of their state are on the devices."""

    ranks: Ranks
    keeps_optimizer: bool = False
    """Whether the optimizer state stays on the devices when the parameters leave them (`offload_after_step=false`)."""
    has_parameters: bool = True
    has_optimizer: bool = True


class SharedDevices:
    """The devices of one placement. Groups whose workers can offload use the devices one at a time: before a group
    computes, the other such groups are offloaded.

    A group whose workers cannot offload stays on the devices and does not wait. On machines without accelerators
    nothing moves, but groups still take turns, because they would otherwise compete for the same cores.
    """

    def __init__(self) -> None:
        self._in_use = asyncio.Lock()
        self._tenants: list[Tenant] = []

    def add(self, tenant: Tenant) -> None:
        """Adds a tenant. All of its state must be on the devices."""
        self._tenants.append(tenant)

    def remove(self, tenant: Tenant) -> None:
        """Removes a tenant that has ended; a second call does nothing."""
        if tenant in self._tenants:
            self._tenants.remove(tenant)

    @asynccontextmanager
    async def given_to(self, tenant: Tenant, *, optimizer: bool = False) -> AsyncIterator[None]:
        """Gives `tenant` the devices for the duration of the context. Its parameters and, if `optimizer`, its optimizer
        state are on the devices then."""
        if not tenant.ranks.abilities.offload:
            yield
            return
        async with self._in_use:
            await self._clear_except(tenant)
            await _onload(tenant, optimizer=optimizer)
            yield

    async def clear(self) -> None:
        """Offloads all groups whose workers can offload, except optimizer state that a group keeps on the devices."""
        async with self._in_use:
            await self._clear_except(None)

    async def _clear_except(self, stays: Tenant | None) -> None:
        for tenant in self._tenants:
            if tenant is not stays and tenant.ranks.abilities.offload:
                await _offload(tenant)


async def _offload(tenant: Tenant) -> None:
    optimizer = tenant.has_optimizer and not tenant.keeps_optimizer
    if tenant.has_parameters or optimizer:
        await tenant.ranks.call(Worker.offload, parameters=tenant.has_parameters, optimizer=optimizer)
        tenant.has_parameters = False
        tenant.has_optimizer = tenant.has_optimizer and not optimizer


async def _onload(tenant: Tenant, *, optimizer: bool) -> None:
    optimizer = optimizer and not tenant.has_optimizer
    if not tenant.has_parameters or optimizer:
        await tenant.ranks.call(Worker.onload, parameters=not tenant.has_parameters, optimizer=optimizer)
        tenant.has_parameters = True
        tenant.has_optimizer = tenant.has_optimizer or optimizer
