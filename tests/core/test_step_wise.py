"""An episode gets the same advantages, returns, corrections and loss weights whether it is one sequence or one sequence
per turn: compared with each other and with slow definitions in Python floats, for every registered estimator."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rl_core.algorithms import (
    Objective,
    TokenAdvantages,
    dpo_loss,
    gae_advantages,
    gspo_loss,
    reinforce_plus_plus_advantages,
    reward_model_loss,
)
from rl_core.algorithms.reductions import REDUCTIONS
from rl_core.batch import Batch
from rl_core.errors import PluginError
from rl_core.trainer.update.batch_advantages import (
    load_estimator,
    with_advantages,
    with_kl_in_reward,
    with_loss_weights,
    with_normalized_advantages,
    with_off_policy_correction,
    with_prepared,
    with_rewards_of_chosen,
    with_summed_loss_weights,
)

ESTIMATORS = sorted(point.name for point in entry_points(group="rl_core.advantage_estimators"))
PARAMS: dict[str, dict[str, Any]] = {
    "gae": {"gamma": 0.9, "lambd": 0.8, "whiten_advantages": False},
    "reinforce++": {"gamma": 0.9},
    "turn_level": {"gamma": 0.9},
    "pass_at_k": {"k": 2},
}
PAIR_COLUMNS = ("x_pair_slope", "x_pair_loss", "x_pair_preferred", "x_pair_other", "x_pair_share")
SAMPLED = ("rewards", "values", "old_logprobs", "ref_logprobs", "rollout_logprobs", "loss_mask")


@attrs.frozen(kw_only=True)
class Turn:
    """A response, with one value per token."""

    rewards: list[float]
    values: list[float]
    old_logprobs: list[float]
    ref_logprobs: list[float]
    rollout_logprobs: list[float]
    loss_mask: list[bool]


def turn(rewards: list[float], **given: list[Any]) -> Turn:
    n = len(rewards)
    return Turn(**{name: [0.0] * n for name in SAMPLED} | {"loss_mask": [True] * n, "rewards": rewards, **given})


@st.composite
def turns(draw: Any) -> Turn:
    length = draw(st.integers(1, 3))

    def numbers(low: float, high: float) -> list[float]:
        return [draw(st.integers(int(4 * low), int(4 * high))) / 4 for _ in range(length)]

    is_forced = draw(st.integers(0, 4)) == 0
    return Turn(
        rewards=[value if draw(st.booleans()) else 0.0 for value in numbers(0, 2)],
        values=numbers(-2, 2),
        old_logprobs=numbers(-3, -0.25),
        ref_logprobs=numbers(-3, -0.25),
        rollout_logprobs=[math.nan] * length if is_forced else numbers(-3, -0.25),
        loss_mask=[not is_forced] * length,
    )


EPISODES = st.lists(st.lists(turns(), min_size=1, max_size=4), min_size=1, max_size=5)


def batch_of(episodes: list[list[Turn]], *, step_wise: bool) -> Batch:
    """Two episodes per prompt. Steps have prompts of other lengths and with other tokens than merged sequences have."""
    sequences = []
    for i, episode in enumerate(episodes):
        parts = [(turn, 3 + number) for number, turn in enumerate(episode)] if step_wise else []
        rows = [[part] for part in parts] or [[(turn, 1 + number % 2) for number, turn in enumerate(episode)]]
        for step, row in enumerate(rows):
            sampled = [is_sampled for one, before in row for is_sampled in [0] * before + [1] * len(one.rewards)]
            sequences.append(
                {
                    "tokens": [7 if step_wise else 5] * len(sampled),
                    "sampled": sampled,
                    **{name: [x for one, before in row for x in [0] * before + getattr(one, name)] for name in SAMPLED},
                    "group_id": i // 2,
                    "greedy_score": 0.5 * (i // 2),
                    "trajectory_id": 10 * i,
                    "step_index": step,
                    "is_last_step": step == len(rows) - 1,
                }
            )
    return Batch.from_sequences(sequences)


def in_both_forms(episodes: list[list[Turn]], make: Callable[[Batch], Batch], *names: str) -> list[list[Tensor]]:
    """Columns of the sampled tokens, made for episodes of one sequence each, and for their steps in order."""
    merged, steps = (make(batch_of(episodes, step_wise=step_wise)) for step_wise in (False, True))
    return [[batch[name][batch["sampled"]] for name in names] for batch in (merged, steps)]


def require_equal(forms: list[list[Tensor]]) -> None:
    # The sums are the same, in the same order, except that some pass over rows: rounding of float32.
    torch.testing.assert_close(forms[1], forms[0], rtol=1e-5, atol=1e-5)


def test_a_reward_at_the_end_is_credited_to_the_tokens_of_all_turns():
    episode = [turn([0.0, 0.0]), turn([0.0, 1.0])]
    for estimator, params in (
        (gae_advantages, {"whiten_advantages": False}),
        (reinforce_plus_plus_advantages, {}),
    ):
        batch = batch_of([episode], step_wise=True)
        made = with_advantages(batch, estimator, params)
        assert made["returns"][batch["sampled"]].tolist() == [1.0, 1.0, 1.0, 1.0]


def test_the_value_of_the_next_turns_first_token_ends_the_error_of_a_turn():
    """gamma = lambda = ½. Errors, from the end: 4 − 2 = 2, then 0 + ½ · 2 − 3 = −2, then 1 + ½ · 3 − 1 = 1.5."""
    episode = [turn([1.0], values=[1.0]), turn([0.0, 4.0], values=[3.0, 2.0])]
    batch = batch_of([episode], step_wise=True)
    made = with_advantages(batch, gae_advantages, {"gamma": 0.5, "lambd": 0.5, "whiten_advantages": False})
    assert made["advantages"][batch["sampled"]].tolist() == [1.5 + 0.25 * -1.5, -2 + 0.25 * 2, 2.0]
    assert made["returns"][batch["sampled"]].tolist() == [2.125, 1.5, 4.0]


@pytest.mark.parametrize("name", ESTIMATORS)
@settings(max_examples=25)
@given(episodes=EPISODES)
def test_every_estimator_gives_steps_the_values_of_the_merged_sequence(name: str, episodes: list[list[Turn]]):
    params = PARAMS.get(name, {})
    estimator = load_estimator(name, params)
    steps = batch_of(episodes, step_wise=True)
    columns = ("advantages", "returns") if "returns" in with_advantages(steps, estimator, params) else ("advantages",)
    require_equal(in_both_forms(episodes, lambda batch: with_advantages(batch, estimator, params), *columns))


def slow_returns(episode: list[Turn], gamma: float) -> list[float]:
    """The return of each chosen token of an episode without forced tokens."""
    rewards = [reward for one in episode for reward in one.rewards]
    return [sum(gamma ** (u - t) * rewards[u] for u in range(t, len(rewards))) for t in range(len(rewards))]


def slow_gae(episode: list[Turn], gamma: float, lambd: float) -> list[float]:
    rewards, values = ([x for one in episode for x in getattr(one, name)] for name in ("rewards", "values"))
    ends = [*values[1:], 0.0]
    errors = [r + gamma * after - v for r, v, after in zip(rewards, values, ends, strict=True)]
    return [sum((gamma * lambd) ** (u - t) * errors[u] for u in range(t, len(errors))) for t in range(len(errors))]


@given(
    episodes=EPISODES,
    gamma=st.sampled_from([0.0, 0.9, 1.0]),
    lambd=st.sampled_from([0.0, 0.9, 1.0]),
    seed=st.integers(0, 99),
)
def test_steps_in_any_order_have_the_values_of_the_slow_definitions(episodes, gamma: float, lambd: float, seed: int):
    episodes = [[attrs.evolve(one, loss_mask=[True] * len(one.rewards)) for one in turns] for turns in episodes]
    batch = batch_of(episodes, step_wise=True)
    rows = torch.randperm(batch.num_sequences, generator=torch.Generator().manual_seed(seed))
    for estimator, params, slow in (
        (
            gae_advantages,
            {"gamma": gamma, "lambd": lambd, "whiten_advantages": False},
            [slow_gae(episode, gamma, lambd) for episode in episodes],
        ),
        (reinforce_plus_plus_advantages, {"gamma": gamma}, [slow_returns(episode, gamma) for episode in episodes]),
    ):
        made = with_advantages(batch.select(rows), estimator, params)
        ordered = made.select(rows.argsort())
        column = "returns" if estimator is reinforce_plus_plus_advantages else "advantages"
        expected = torch.tensor([x for values in slow for x in values])
        torch.testing.assert_close(ordered[column][ordered["sampled"]], expected, rtol=1e-5, atol=1e-5)


CORRECTIONS: Mapping[str, dict[str, Any]] = {
    "weights of sequences": {"tis_ratio_type": "sequence", "sequence_tis_ratio_clip_high": 2.0},
    "weights of tokens": {"tis_ratio_type": "token", "token_tis_ratio_clip_high": 2.0},
    "outliers": {"outlier_token_is_threshold_low": 0.3, "outlier_token_is_threshold_high": 3.0},
    "geometric mask": {"sequence_mask_metric": "geometric", "geo_mask_low": 0.8, "geo_mask_high": 1.2},
}


@pytest.mark.parametrize("params", CORRECTIONS.values(), ids=CORRECTIONS)
@settings(max_examples=25)
@given(episodes=EPISODES)
def test_a_correction_treats_the_steps_of_an_episode_as_one_sequence(params, episodes: list[list[Turn]]):
    def make(batch: Batch) -> Batch:
        return with_off_policy_correction(batch, params)[0]

    require_equal(in_both_forms(episodes, make, "correction_weights", "loss_mask"))


def test_a_sequence_weight_is_the_product_over_all_turns():
    """Ratios exp(0.5) in one turn and exp(−0.25) in the next: the weight of all tokens is exp(0.25)."""
    first = turn([0.0], old_logprobs=[-1.0], rollout_logprobs=[-1.5])
    second = turn([1.0], old_logprobs=[-1.0], rollout_logprobs=[-0.75])
    batch = batch_of([[first, second]], step_wise=True)
    made, _ = with_off_policy_correction(batch, {"tis_ratio_type": "sequence", "sequence_tis_ratio_clip_high": 9.0})
    weights = made["correction_weights"][batch["sampled"]].tolist()
    assert weights == pytest.approx([math.exp(0.25)] * 2)


@pytest.mark.parametrize("name", REDUCTIONS)
@settings(max_examples=25)
@given(episodes=EPISODES)
def test_a_reduction_treats_the_steps_of_an_episode_as_one_sequence(name: str, episodes: list[list[Turn]]):
    params = {"max_seq_len": 7} if name == "seq_mean_token_sum_norm" else {}
    require_equal(in_both_forms(episodes, lambda batch: with_loss_weights(batch, name, params), "loss_weights"))
    divisors = {with_summed_loss_weights(batch_of(episodes, step_wise=s), name, params)[1] for s in (False, True)}
    assert len(divisors) == 1


def test_sequence_mean_gives_each_episode_the_same_weight():
    batch = batch_of([[turn([0.0]), turn([0.0, 0.0, 0.0])], [turn([1.0])]], step_wise=True)
    weights_T = with_loss_weights(batch, "sequence_mean", {})["loss_weights"]
    assert weights_T[batch["sampled"]].tolist() == [0.125, 0.125, 0.125, 0.125, 0.5]


@settings(max_examples=25)
@given(episodes=EPISODES)
def test_kl_in_the_reward_normalisation_and_rewards_of_chosen_tokens_do_not_depend_on_the_form(episodes):
    def make(batch: Batch) -> Batch:
        batch, _ = with_kl_in_reward(batch, coef=0.5, estimator="k1")
        batch = with_advantages(batch, gae_advantages, {"gamma": 0.9, "lambd": 0.9})
        return with_rewards_of_chosen(with_normalized_advantages(batch))

    # Whitening divides by a standard deviation that may be tiny; the sum of rewards has no such factor.
    merged, steps = in_both_forms(episodes, make, "rewards", "environment_rewards", "returns", "advantages")
    torch.testing.assert_close(steps[:3], merged[:3], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(steps[3], merged[3], rtol=1e-3, atol=1e-3)


def test_the_reward_of_a_forced_turn_is_moved_to_the_turn_before_it():
    forced = turn([2.0], rollout_logprobs=[math.nan], loss_mask=[False])
    batch = batch_of([[turn([0.0]), forced, turn([1.0])]], step_wise=True)
    assert with_rewards_of_chosen(batch)["rewards"][batch["sampled"]].tolist() == [2.0, 0.0, 1.0]


def own_returns(rewards_T: Tensor, mask_T: Tensor, sequence_T: Tensor, scores_N: Tensor) -> TokenAdvantages:
    """An estimator of a user's: each sampled token gets its sequence's score, and the number of tokens before it."""
    position_T = torch.stack([(mask_T & (sequence_T == index))[:i].sum() for i, index in enumerate(sequence_T)])
    return TokenAdvantages(scores_N[sequence_T] * mask_T, position_T * mask_T)


def test_a_users_estimator_gets_the_steps_of_an_episode_as_one_sequence():
    batch = batch_of([[turn([0.0]), turn([0.0, 1.0])], [turn([3.0])]], step_wise=True).select([1, 2, 0])
    made = with_advantages(batch, own_returns, {})
    assert made["advantages"][batch["sampled"]].tolist() == [1.0, 1.0, 3.0, 1.0]
    assert made["returns"][batch["sampled"]].tolist() == [1.0, 2.0, 0.0, 0.0]


def one_per_step(sequence_T: Tensor, scores_N: Tensor) -> Tensor:
    return torch.zeros(3)


def test_an_estimator_that_returns_values_of_another_length_is_refused():
    batch = batch_of([[turn([0.0]), turn([0.0, 1.0])], [turn([3.0])]], step_wise=True)
    with pytest.raises(
        PluginError, match=r"shape \(3,\); expected one per trajectory, \[2\], or one per token, \[14\]"
    ):
        with_advantages(batch, one_per_step, {})


@pytest.mark.parametrize("loss", [dpo_loss, reward_model_loss])
@settings(max_examples=25)
@given(episodes=st.lists(st.lists(turns(), min_size=1, max_size=3), min_size=2, max_size=4))
def test_a_pairwise_loss_compares_episodes_not_steps(loss, episodes: list[list[Turn]]):
    episodes = [[attrs.evolve(one, loss_mask=[True] * len(one.rewards)) for one in turns] for turns in episodes]

    def make(batch: Batch) -> Batch:
        return with_prepared(with_loss_weights(batch, "prompt_token_sum", {}), Objective(loss), seed=0)

    require_equal(in_both_forms(episodes, make, *PAIR_COLUMNS))


def test_a_single_sample_of_two_steps_is_no_pair():
    first, last = turn([0.0], old_logprobs=[-2.0]), turn([1.0], old_logprobs=[-1.0])
    weighted = with_loss_weights(batch_of([[first, last]], step_wise=True), "prompt_token_sum", {})
    assert not with_prepared(weighted, Objective(dpo_loss), seed=0)["x_pair_slope"].any()


def test_the_ratio_of_a_sequence_loss_covers_one_row():
    """The example in docs/algorithms.md: log-ratio 0.4 in a turn of one token, 0 in a turn of three."""
    current = [turn([0.0], old_logprobs=[-0.6]), turn([1.0] * 3, old_logprobs=[-1.0] * 3)]
    expected = {True: [math.exp(0.4), 1.0, 1.0, 1.0], False: [math.exp(0.1)] * 4}
    for step_wise, ratios in expected.items():
        batch = batch_of([current], step_wise=step_wise)
        logprobs_T, mask_T = batch["old_logprobs"], batch["loss_mask"]
        old_T = torch.where(mask_T, -1.0, 0.0)
        result = gspo_loss(logprobs_T, old_T, mask_T.float(), mask_T, batch.sequence_index, eps_clip_high=10.0)
        assert (-result.loss_T[mask_T]).tolist() == pytest.approx(ratios)
