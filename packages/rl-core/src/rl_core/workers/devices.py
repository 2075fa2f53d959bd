"""Groups that share devices use them one after another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import attrs

from rl_core.interfaces import Offloadable
from rl_core.workers.rank import Ranks


@attrs.define(eq=False)
class Tenant:
    """One group's ranks on shared devices, and what of them lies there."""

    ranks: Ranks
    keeps_optimizer: bool = False
    """Its optimizer's state stays on the devices while another group has them (`offload_after_step=false`)."""
    has_parameters: bool = True
    has_optimizer: bool = True


class SharedDevices:
    """The devices of one placement. Whoever they are given to moves the others off first; one group at a time.

    A group whose workers cannot move stays where it is and waits for nobody. Workers that can move wait for each other
    also on a machine without accelerators, where there is nothing to move: they would only compete for the same cores.
    """

    def __init__(self) -> None:
        self._in_use = asyncio.Lock()
        self._tenants: list[Tenant] = []

    def add(self, tenant: Tenant) -> None:
        """`tenant` is on the devices with all it has."""
        self._tenants.append(tenant)

    def remove(self, tenant: Tenant) -> None:
        """`tenant` is gone; a second call does nothing."""
        if tenant in self._tenants:
            self._tenants.remove(tenant)

    @asynccontextmanager
    async def given_to(self, tenant: Tenant, *, optimizer: bool = False) -> AsyncIterator[None]:
        """`tenant` has the devices inside: its parameters are there, and with `optimizer` the optimizer's state too."""
        if not tenant.ranks.abilities.offload:
            yield
            return
        async with self._in_use:
            await self._clear_except(tenant)
            await _onload(tenant, optimizer=optimizer)
            yield

    async def clear(self) -> None:
        """Moves everyone off."""
        async with self._in_use:
            await self._clear_except(None)

    async def _clear_except(self, stays: Tenant | None) -> None:
        for tenant in self._tenants:
            if tenant is not stays and tenant.ranks.abilities.offload:
                await _offload(tenant)


async def _offload(tenant: Tenant) -> None:
    optimizer = tenant.has_optimizer and not tenant.keeps_optimizer
    if tenant.has_parameters or optimizer:
        await tenant.ranks.call(Offloadable.offload, parameters=tenant.has_parameters, optimizer=optimizer)
        tenant.has_parameters = False
        tenant.has_optimizer = tenant.has_optimizer and not optimizer


async def _onload(tenant: Tenant, *, optimizer: bool) -> None:
    optimizer = optimizer and not tenant.has_optimizer
    if not tenant.has_parameters or optimizer:
        await tenant.ranks.call(Offloadable.onload, parameters=not tenant.has_parameters, optimizer=optimizer)
        tenant.has_parameters = True
        tenant.has_optimizer = tenant.has_optimizer or optimizer
