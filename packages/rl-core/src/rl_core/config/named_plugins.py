"""Lists the keys that name plug-ins, and checks that these plug-ins are installed, without importing them."""

from __future__ import annotations

from collections.abc import Iterable

from rl_core import plugins
from rl_core.config.resolving import value_at
from rl_core.config.tree import Config
from rl_core.errors import Mistakes

GROUPS = {
    "trainer.strategy": "rl_core.backends",
    "generator.type": "rl_core.generators",
    "environment.env_class": "rl_core.environments",
    "generator.inference_engine.backend": "rl_core.inference",
    "generator.inference_engine.weight_sync_backend": "rl_core.weight_transports",
    "trainer.ref.inference_backend": "rl_core.inference",
    "trainer.logger": "rl_core.trackers",
    "trainer.callbacks": "rl_core.callbacks",
    "trainer.algorithm.policy_loss_type": "rl_core.policy_losses",
    "trainer.algorithm.advantage_estimator": "rl_core.advantage_estimators",
}
"""Key → entry-point group of the plug-ins that the key names."""


def gather_missing(config: Config, keys: Iterable[str], mistakes: Mistakes) -> None:
    """Records every name at these keys that is not an installed plug-in. Import paths are not checked here."""
    for key in [key for key in GROUPS if key in keys and not mistakes.about(key)]:
        for name in names_at(config, key):
            if ":" not in name and name not in {plugin.name for plugin in plugins.installed(GROUPS[key])}:
                mistakes.passes(plugins.load, GROUPS[key], name, key=key)


def names_at(config: Config, key: str) -> tuple[str, ...]:
    """The names of the plug-ins that a key selects: none, one or several."""
    value = value_at(config, key)
    return () if value is None else (value,) if isinstance(value, str) else tuple(value)
