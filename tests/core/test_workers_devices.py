"""Groups that share devices take turns on them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from rl_core.batch import Batch
from rl_core.workers.devices import SharedDevices, Tenant
from rl_core.workers.rank import Abilities, Part


class RecordedRanks:
    """Ranks that record which parts of their state are offloaded and loaded."""

    def __init__(self, name: str, events: list[str], *, can_offload: bool = True):
        self.name = name
        self.events = events
        self.abilities = Abilities(offload=can_offload)

    async def call(self, method: Any, *args: Any, **kwargs: Any) -> list[Any]:
        moved = [what for what, is_moved in kwargs.items() if is_moved]
        self.events.append(f"{self.name} {method.__name__} {' '.join(moved)}")
        return []

    async def call_on_parts(
        self, method: Any, batch: Batch, parts: Sequence[Part], *args: Any, **kwargs: Any
    ) -> list[Any]:
        return []

    async def close(self) -> None:
        pass


def tenants(**policy: Any) -> tuple[SharedDevices, Tenant, Tenant, list[str]]:
    """Policy and reference, both with everything on the devices."""
    events: list[str] = []
    devices = SharedDevices()
    both = Tenant(RecordedRanks("policy", events), **policy), Tenant(RecordedRanks("reference", events))
    for tenant in both:
        devices.add(tenant)
    return devices, *both, events


async def test_a_turn_offloads_other_workers_and_loads_only_what_is_needed():
    devices, policy, reference, events = tenants()
    async with devices.given_to(policy):
        events.append("policy forward")
    async with devices.given_to(reference):
        events.append("reference forward")
    async with devices.given_to(policy):
        events.append("policy forward_backward")
    async with devices.given_to(policy, optimizer=True):
        events.append("policy optim_step")
    async with devices.given_to(policy):
        events.append("policy publish")
    assert events == [
        "reference offload parameters optimizer",
        "policy forward",
        "policy offload parameters optimizer",
        "reference onload parameters",
        "reference forward",
        "reference offload parameters",
        "policy onload parameters",
        "policy forward_backward",
        "policy onload optimizer",
        "policy optim_step",
        "policy publish",
    ]


async def test_with_keeps_optimizer_the_optimizer_state_stays_on_the_devices():
    devices, policy, reference, events = tenants(keeps_optimizer=True)
    async with devices.given_to(reference):
        pass
    async with devices.given_to(policy, optimizer=True):
        pass
    assert events == ["policy offload parameters", "reference offload parameters optimizer", "policy onload parameters"]


async def test_turns_do_not_overlap():
    devices, policy, reference, events = tenants()

    async def work(tenant: Tenant, name: str) -> None:
        async with devices.given_to(tenant):
            events.append(f"{name} begins")
            await asyncio.sleep(0.01)
            events.append(f"{name} ends")

    await asyncio.gather(work(policy, "policy"), work(reference, "reference"))
    begun = [event for event in events if event.endswith(("begins", "ends"))]
    assert begun == ["policy begins", "policy ends", "reference begins", "reference ends"]


async def test_workers_that_cannot_offload_do_not_wait_for_a_turn():
    devices, policy, reference, events = tenants()
    policy.ranks.abilities = Abilities()
    async with devices.given_to(reference), devices.given_to(policy):
        events.append("both")
    assert events == ["both"]


async def test_clearing_the_devices_offloads_all_workers_that_were_not_removed():
    devices, policy, _, events = tenants()
    devices.remove(policy)
    devices.remove(policy)
    await devices.clear()
    await devices.clear()
    assert events == ["reference offload parameters optimizer"]
