"""Conformance suites of training backends, engines and generators, and small reference implementations. Requires
`rl-transformers[testing]`.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_transformers.testing.backend import BackendConformance, Tolerances
    from rl_transformers.testing.cases import VARIANTS, Variant
    from rl_transformers.testing.generators import GeneratorConformance
    from rl_transformers.testing.inference import InferenceClientConformance
    from rl_transformers.testing.models import character_tokenizer, make_checkpoint

_MODULES = {
    "BackendConformance": "rl_transformers.testing.backend",
    "VARIANTS": "rl_transformers.testing.cases",
    "Variant": "rl_transformers.testing.cases",
    "Tolerances": "rl_transformers.testing.backend",
    "InferenceClientConformance": "rl_transformers.testing.inference",
    "GeneratorConformance": "rl_transformers.testing.generators",
    "make_checkpoint": "rl_transformers.testing.models",
    "character_tokenizer": "rl_transformers.testing.models",
}
__all__ = [
    "BackendConformance",
    "VARIANTS",
    "Variant",
    "Tolerances",
    "InferenceClientConformance",
    "GeneratorConformance",
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

        if error.name in ("pytest", "tokenizers"):
            error.add_note(f"the conformance suites need the extra: {install('rl-transformers[testing]')}")
        raise
