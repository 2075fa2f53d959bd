"""Conformance suites for plug-in authors, and small reference implementations. Requires `rl-core[testing]`."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_core.testing.backend import BackendConformance, Tolerances
    from rl_core.testing.cases import VARIANTS, Variant
    from rl_core.testing.environments import EnvironmentConformance
    from rl_core.testing.generators import GeneratorConformance
    from rl_core.testing.inference import InferenceClientConformance
    from rl_core.testing.models import character_tokenizer, make_checkpoint
    from rl_core.testing.scripted_engine import ScriptedClient
    from rl_core.testing.transports import WeightTransportConformance

_MODULES = {
    "BackendConformance": "rl_core.testing.backend",
    "VARIANTS": "rl_core.testing.cases",
    "Variant": "rl_core.testing.cases",
    "Tolerances": "rl_core.testing.backend",
    "InferenceClientConformance": "rl_core.testing.inference",
    "WeightTransportConformance": "rl_core.testing.transports",
    "EnvironmentConformance": "rl_core.testing.environments",
    "GeneratorConformance": "rl_core.testing.generators",
    "ScriptedClient": "rl_core.testing.scripted_engine",
    "make_checkpoint": "rl_core.testing.models",
    "character_tokenizer": "rl_core.testing.models",
}
__all__ = [
    "BackendConformance",
    "VARIANTS",
    "Variant",
    "Tolerances",
    "InferenceClientConformance",
    "WeightTransportConformance",
    "EnvironmentConformance",
    "GeneratorConformance",
    "ScriptedClient",
    "make_checkpoint",
    "character_tokenizer",
]

if "pytest" in sys.modules:
    # pytest shows the values of a failed assertion only in registered modules. Processes without pytest also import
    # this package.
    sys.modules["pytest"].register_assert_rewrite(*_MODULES.values())


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(_MODULES[name]), name)
    except ModuleNotFoundError as error:
        from rl_core.errors import install

        if error.name in ("pytest", "tokenizers", "transformers"):
            error.add_note(f"the conformance suites need the extra: {install('rl-core[testing]')}")
        raise
