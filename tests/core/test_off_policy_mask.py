"""Masking of sequences that the policy has left: which tokens, within an objective, and independent of the split."""

from __future__ import annotations

import pytest
import torch

from rl_core.algorithms import estimate_kl, off_policy_sequence_mask, ppo_clip_loss
from rl_core.errors import ConfigError
from rl_core.interfaces import LossSpec
from rl_core.rank_kit.objectives import objective_from_spec


def mini_batch(seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (12,), generator=generator)
    sequence_T = torch.arange(12).repeat_interleave(lengths)

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(len(sequence_T), generator=generator, dtype=torch.float64)

    rollout_T = -1.0 - noise(1.0).abs()
    drift_T = torch.randn(12, generator=generator, dtype=torch.float64)[sequence_T]
    columns = {
        "old_logprobs": rollout_T + noise(0.1),
        "rollout_logprobs": rollout_T,
        "ref_logprobs": rollout_T + noise(0.3),
        "advantages": torch.randn(12, generator=generator, dtype=torch.float64)[sequence_T],
        "loss_mask": torch.rand(len(sequence_T), generator=generator) < 0.8,
        "loss_weights": noise(1.0).abs(),
    }
    return columns, rollout_T + drift_T + noise(0.2), sequence_T


def kept_by_definition(columns, logprobs_T, sequence_T, delta: float) -> list[bool]:
    """DeepSeek-V3.2: M = 0 where A < 0 and the mean of log(sampling / current) over the sequence is above delta."""
    kept = []
    for t in range(len(sequence_T)):
        members = [u for u in range(len(sequence_T)) if sequence_T[u] == sequence_T[t] and columns["loss_mask"][u]]
        gaps = [float(columns["rollout_logprobs"][u] - logprobs_T[u]) for u in members]
        is_far = bool(gaps) and sum(gaps) / len(gaps) > delta
        kept.append(not (is_far and float(columns["advantages"][t]) < 0 and bool(columns["loss_mask"][t])))
    return kept


@pytest.mark.parametrize("delta", [0.0, 0.5])
def test_it_is_what_the_definition_says(delta: float):
    columns, logprobs_T, sequence_T = mini_batch()
    read = (columns["rollout_logprobs"], columns["advantages"], columns["loss_mask"], sequence_T)
    kept_T = off_policy_sequence_mask(logprobs_T, *read, delta=delta)
    assert kept_T.tolist() == kept_by_definition(columns, logprobs_T, sequence_T, delta)
    assert 0 < int((~kept_T).sum()) < int(columns["loss_mask"].sum())


def test_tokens_whose_sampling_is_not_known_do_not_count():
    logprobs_T, rollout_T = torch.tensor([-3.0, -3.0, -3.0]), torch.tensor([-1.0, float("nan"), -float("inf")])
    everywhere, sequence_T = torch.ones(3, dtype=torch.bool), torch.zeros(3, dtype=torch.int64)
    kept_T = off_policy_sequence_mask(logprobs_T, rollout_T, -torch.ones(3), everywhere, sequence_T, delta=1.9)
    assert kept_T.tolist() == [False] * 3
    unknown_T = torch.full((3,), float("nan"))
    assert off_policy_sequence_mask(logprobs_T, unknown_T, -torch.ones(3), everywhere, sequence_T, delta=0.0).all()
    with pytest.raises(ConfigError, match="delta"):
        off_policy_sequence_mask(logprobs_T, rollout_T, -torch.ones(3), everywhere, sequence_T, delta=-0.1)


def test_it_takes_the_policy_loss_and_leaves_kl_term_and_weights():
    columns, logprobs_T, sequence_T = mini_batch()
    objective = objective_from_spec(LossSpec(name="regular", kl_coef=0.3, off_policy_sequence_mask=0.5))
    current_T = logprobs_T.clone().requires_grad_()
    loss, metrics = objective(columns, sequence_T=sequence_T, logprobs_T=current_T)
    loss.backward()
    mask_T, other_T = columns["loss_mask"], logprobs_T.clone().requires_grad_()
    kept_T = torch.tensor(kept_by_definition(columns, logprobs_T, sequence_T, 0.5))
    policy_T = ppo_clip_loss(other_T, columns["old_logprobs"], columns["advantages"], mask_T).loss_T
    kl_T = estimate_kl(other_T, columns["ref_logprobs"], mask_T)
    expected = (columns["loss_weights"] * mask_T * (policy_T * kept_T + 0.3 * kl_T)).sum()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(current_T.grad, other_T.grad)
    assert metrics["off_policy_masked"][0] == int((~kept_T).sum())
    plain, _ = objective_from_spec(LossSpec(name="regular", kl_coef=0.3))(
        columns, sequence_T=sequence_T, logprobs_T=logprobs_T
    )
    assert float(plain) != pytest.approx(loss.item())


def test_a_split_between_sequences_changes_nothing():
    columns, logprobs_T, sequence_T = mini_batch(seed=1)
    objective = objective_from_spec(LossSpec(name="gspo", off_policy_sequence_mask=0.2))
    whole, _ = objective(columns, sequence_T=sequence_T, logprobs_T=logprobs_T)
    parts = torch.zeros((), dtype=torch.float64)
    for part_T in (sequence_T < 5, sequence_T >= 5):
        part = {name: values_T[part_T] for name, values_T in columns.items()}
        parts += objective(part, sequence_T=sequence_T[part_T], logprobs_T=logprobs_T[part_T])[0]
    torch.testing.assert_close(parts, whole)
