"""The versions of each contract that this rl-core accepts. docs/plugins.md says what each version changed."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

CONTRACT_VERSION = 1
"""Always 1. Kept for old plug-ins that import it; they were written when all contracts shared one version. Newer
plug-ins state their version as a literal, because an imported version would change with the installed rl-core."""


@attrs.frozen(kw_only=True)
class Contract:
    """The versions of one contract. A plug-in's `contract_version` states the version for which it was written."""

    current: int
    """The latest version. It increases with every change that plug-in authors must know about."""
    oldest: int = 1
    """The oldest accepted version."""
    unstated: int | None = None
    """The assumed version of a plug-in without `contract_version`. None: every plug-in must state its version."""
    added: Mapping[str, int] = attrs.field(factory=dict)
    """Member → the version that added it or changed its parameters. Plug-ins of earlier versions may lack it."""
    adapters: Mapping[int, str] = attrs.field(factory=dict)
    """Version → `package.module:function`, which adapts a plug-in of this version to the next version. The function is
    imported when such a plug-in is selected. Plug-ins of a version without an adapter are used unchanged."""


CONTRACTS: Mapping[str, Contract] = {
    "rl_core.backends": Contract(current=3),
    "rl_core.inference": Contract(current=2),
    "rl_core.weight_transports": Contract(current=1),
    "rl_core.generators": Contract(current=2, unstated=1),
    "rl_core.environments": Contract(current=1, unstated=1),
    "rl_core.trackers": Contract(current=1, unstated=1),
    "rl_core.callbacks": Contract(current=1, unstated=1),
}
"""Versions by entry-point group. Losses and estimators have none, because their parameters are their whole contract;
recipes have none, because they are instances of a class of this package."""
