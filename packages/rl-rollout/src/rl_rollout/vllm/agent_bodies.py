"""Refuses bodies of the OpenAI API with values that vLLM accepts at first and fails on later.

With vllm 0.30, an integer that does not fit into signed 64 bits, a lone surrogate, or `structured_outputs` that is not
an object leads to status 500. The first two also leave a request in vLLM that is never computed and never removed.
"""

from __future__ import annotations

from typing import Any

import msgspec

_SIGNED_64 = range(-(2**63), 2**63)
_MAX_DEPTH = 200


def require_sound(body: bytes) -> None:
    """Raises ValueError for a JSON body that no route can handle; the message says what is wrong."""
    try:
        fields = msgspec.json.decode(body)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    _require_values(fields, 0)
    if isinstance(fields, dict) and not isinstance(fields.get("structured_outputs"), dict | None):
        raise ValueError(f"structured_outputs: expected an object, got {type(fields['structured_outputs']).__name__}")


def _require_values(value: Any, depth: int) -> None:
    if depth > _MAX_DEPTH:
        raise ValueError(f"it is nested more than {_MAX_DEPTH} deep")
    if isinstance(value, int) and value not in _SIGNED_64:
        raise ValueError("an integer in it does not fit into 64 bits (signed)")
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            _require_values(item, depth + 1)
