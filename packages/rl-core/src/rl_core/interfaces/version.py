"""Which versions of each contract this rl-core works with. docs/plugins.md says what changed from one to the next."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

CONTRACT_VERSION = 1
"""What plug-ins state that were written when all contracts had one number. It stays 1: a plug-in states the number it
was written for, since a number that it imports would be that of whatever rl-core is installed."""


@attrs.frozen(kw_only=True)
class Contract:
    """The versions of one seam. A plug-in says as `contract_version` which it was written for."""

    current: int
    """Raised when the contract changes in a way that a plug-in's author has to know of."""
    oldest: int = 1
    """Plug-ins from this version on are accepted."""
    unstated: int | None = None
    """The version of a plug-in that states none; None: every plug-in has to state it."""
    added: Mapping[str, int] = attrs.field(factory=dict)
    """Member → the version that it came with, or that changed what it must be given; it is not looked for in plug-ins
    of earlier versions."""
    adapters: Mapping[int, str] = attrs.field(factory=dict)
    """Version → `package.module:function`, which makes a plug-in of the next version out of one of this version. It is
    imported when such a plug-in is chosen. A version without one is used as it is."""


CONTRACTS: Mapping[str, Contract] = {
    "rl_core.backends": Contract(current=3),
    "rl_core.inference": Contract(current=2),
    "rl_core.weight_transports": Contract(current=1),
    "rl_core.generators": Contract(current=2, unstated=1),
    "rl_core.environments": Contract(current=1, unstated=1),
    "rl_core.trackers": Contract(current=1, unstated=1),
    "rl_core.callbacks": Contract(current=1, unstated=1),
}
"""By entry-point group. Losses and estimators are functions, whose parameters are all of their contract; a recipe is a
record of this package."""
