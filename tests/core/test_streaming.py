"""Which runs may be streamed. Refusals say what to do, and advantages that depend on other groups are found by
trial."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from rl_core.algorithms.advantages import grpo_advantages
from rl_core.config import from_mapping
from rl_core.errors import ConfigError
from rl_core.trainer.before.settings import update_settings
from rl_core.trainer.before.streaming import difference_alone, require_streamable
from rl_fsdp.backend import FsdpBackend

ALGORITHM = "trainer.algorithm"
STREAMED = {
    "trainer.stream_groups": True,
    "trainer.placement.colocate_all": False,
    "trainer.policy.model.path": "nothing",
    "trainer.train_batch_size": 8,
    "trainer.policy_mini_batch_size": 8,
    "trainer.critic_mini_batch_size": 8,
    "generator.n_samples_per_prompt": 4,
    f"{ALGORITHM}.advantage_estimator": "grpo",
}
GAE = {f"{ALGORITHM}.advantage_estimator": "gae"}


class WithOwnLosses(FsdpBackend):
    """A backend with its own losses."""

    def has_own_losses(self, options: Any) -> bool:
        return True


with_own_losses = WithOwnLosses()


def centred_over_the_batch(scores_N: Tensor) -> Tensor:
    """An estimator that uses the batch's mean, which depends on the other groups."""
    return scores_N - scores_N.mean()


def by_rank(scores_N: Tensor) -> Tensor:
    """An estimator that ranks scores over the batch, which depends on the other groups."""
    return scores_N.argsort().argsort().float()


def require(changes: dict[str, Any]) -> None:
    config = from_mapping({**STREAMED, **changes})
    require_streamable(config, update_settings(config))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"trainer.max_staleness": 4},
        {f"{ALGORITHM}.off_policy_correction.sequence_mask_metric": "geometric"},
        {f"{ALGORITHM}.use_kl_in_reward": True, "trainer.placement.colocate_policy_ref": False},
        {f"{ALGORITHM}.zero_variance_filter": True, f"{ALGORITHM}.dynamic_sampling.type": "filter"},
        {**GAE, f"{ALGORITHM}.advantage_params": {"whiten_advantages": False}},
        *({f"{ALGORITHM}.advantage_estimator": name} for name in ("rloo", "maxrl", "opo", "remax", "turn_level")),
    ],
    ids=lambda changes: ",".join(f"{key.rpartition('.')[2]}={value}" for key, value in changes.items()) or "grpo",
)
def test_settings_that_treat_groups_independently_may_be_streamed(changes: dict[str, Any]):
    require(changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"generator.type": "dataset"}, r"^trainer\.stream_groups: got true with generator\.type=dataset"),
        ({"trainer.placement.colocate_all": True}, r"^trainer\.placement\.colocate_all: got true .* Set colocate_all="),
        ({f"{ALGORITHM}.use_kl_loss": True}, r"^trainer\.placement\.colocate_policy_ref: got true"),
        ({"trainer.policy_mini_batch_size": 4}, r"^trainer\.policy_mini_batch_size: got 4 of .*=8"),
        (
            {**GAE, "trainer.critic_mini_batch_size": 2, f"{ALGORITHM}.advantage_params": {"whiten_advantages": False}},
            r"^trainer\.critic_mini_batch_size: got 2 of",
        ),
        ({"trainer.update_epochs_per_batch": 2}, r"^trainer\.update_epochs_per_batch: got 2"),
        (
            {f"{ALGORITHM}.dynamic_sampling.type": "replace"},
            r"dynamic_sampling\.type: replace chooses .* Set it to filter",
        ),
        ({f"{ALGORITHM}.advantage_batch_normalize": True}, r"advantage_batch_normalize: got true"),
        *(
            ({f"{ALGORITHM}.policy_loss_type": name}, rf"policy_loss_type: '{name}' needs statistics")
            for name in ("clip_cov", "kl_cov", "top_entropy")
        ),
        *(
            ({f"{ALGORITHM}.advantage_estimator": name}, r"advantage_estimator: with .* depend on the other groups")
            for name in (
                *("gae", "reinforce++", "reinforce++_baseline"),
                *(f"{__name__}:{function.__name__}" for function in (centred_over_the_batch, by_rank)),
            )
        ),
        ({"trainer.strategy": f"{__name__}:with_own_losses"}, r"^trainer\.policy\.fsdp_config: enables auxiliary"),
    ],
)
def test_settings_that_streaming_would_change_are_refused_with_a_remedy(changes: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message) as refused:
        require(changes)
    assert "trainer.stream_groups=false" in str(refused.value)


def test_all_reasons_against_streaming_are_reported_at_once():
    with pytest.raises(ConfigError, match=r"colocate_all(.|\n)*update_epochs_per_batch"):
        require({"trainer.placement.colocate_all": True, "trainer.update_epochs_per_batch": 3})


@pytest.mark.parametrize("num_samples", [1, 2, 16])
def test_a_small_dependence_on_other_groups_is_detected(num_samples: int):
    """Each advantage of `leaking` contains a thousandth of the batch's mean score."""
    config = from_mapping({**STREAMED, "generator.n_samples_per_prompt": max(num_samples, 2)})
    settings = attrs.evolve(update_settings(config), estimator_params={})

    def leaking(scores_N: Tensor, group_N: Tensor) -> Tensor:
        return grpo_advantages(scores_N, group_N) + 1e-3 * scores_N.mean()

    assert difference_alone(settings, num_samples=num_samples) == 0.0
    assert difference_alone(attrs.evolve(settings, estimator=leaking), num_samples=num_samples) > 1e-5


def test_nan_caused_by_other_groups_counts_as_a_difference():
    config = from_mapping(STREAMED)

    def undefined(scores_N: Tensor) -> Tensor:
        return scores_N if len(scores_N) < 8 else torch.full_like(scores_N, float("nan"))

    settings = attrs.evolve(update_settings(config), estimator=undefined, estimator_params={})
    assert difference_alone(settings, num_samples=4) == float("inf")
