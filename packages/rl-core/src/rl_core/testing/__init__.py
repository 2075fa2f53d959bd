"""Conformance suites of environments and weight transports, and an engine that answers from a script. Requires
`rl-core[testing]`. The suites of training backends, engines and generators are in `rl_transformers.testing`, because
they need a model or a tokenizer.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_core.testing.environments import EnvironmentConformance
    from rl_core.testing.transports import WeightTransportConformance

_MODULES = {
    "WeightTransportConformance": "rl_core.testing.transports",
    "EnvironmentConformance": "rl_core.testing.environments",
}
__all__ = [
    "WeightTransportConformance",
    "EnvironmentConformance",
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

        if error.name == "pytest":
            error.add_note(f"the conformance suites need the extra: {install('rl-core[testing]')}")
        raise
