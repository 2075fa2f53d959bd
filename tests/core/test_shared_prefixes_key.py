"""`trainer.share_prefixes`: which backends compute shared prefixes once, and the error for those that cannot."""

from __future__ import annotations

from typing import Any

import pytest

from rl_core.config import from_mapping, resolve
from rl_core.errors import ConfigError
from rl_core.interfaces import Role
from rl_core.trainer.before.settings import worker_spec


def shares(strategy: str, role: Role = "policy", **trainer: Any) -> bool:
    """The value of `share_prefixes` in the ranks' spec."""
    values = {"trainer.policy.model.path": "model", "trainer.strategy": strategy}
    config = resolve(from_mapping({**values, **{f"trainer.{key}": value for key, value in trainer.items()}}))
    return worker_spec(config, role, num_training_steps=None)[1].share_prefixes


@pytest.mark.parametrize("role", ["policy", "reference", "critic"])
def test_auto_shares_prefixes_only_if_the_backend_can_and_micro_batches_are_packed(role: Role):
    assert [shares(strategy, role) for strategy in ("fsdp", "fsdp1", "deepspeed", "megatron")] == [
        True,
        True,
        True,
        False,
    ]
    assert not shares("fsdp", role, use_sample_packing=False)
    assert not shares("fsdp", role, share_prefixes=False)
    assert shares("deepspeed", role, share_prefixes=True)


@pytest.mark.parametrize(
    ("strategy", "trainer", "reason"),
    [
        (
            "megatron",
            {},
            r"the backend 'megatron' computes .*; choose another backend, or trainer\.share_prefixes=auto",
        ),
        ("fsdp", {"use_sample_packing": False}, r"the rows of a padded .*set trainer\.use_sample_packing=true"),
    ],
)
def test_share_prefixes_true_is_refused_where_it_is_impossible(strategy: str, trainer: dict[str, Any], reason: str):
    with pytest.raises(ConfigError, match=rf"^trainer\.share_prefixes: {reason}"):
        shares(strategy, share_prefixes=True, **trainer)
    assert not shares(strategy, share_prefixes=False, **trainer)
