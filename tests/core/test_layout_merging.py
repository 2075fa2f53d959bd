"""Merging steps that continue each other into one sequence does not change the gradient."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from rl_core.batch import Batch
from rl_core.errors import DataError, ShapeError
from rl_core.layout import merge_prefixes, require_complete_trajectories
from rl_core.trainer.update.step_merging import merge_steps


def step(trajectory, index, prompt, response, *, last=False, **columns) -> dict:
    """One sequence: prompt tokens, then sampled ones."""
    tokens = [*prompt, *response]
    sampled = [False] * len(prompt) + [True] * len(response)
    return {
        "tokens": tokens,
        "sampled": sampled,
        "loss_mask": sampled,
        "trajectory_id": trajectory,
        "step_index": index,
        "is_last_step": last,
        **columns,
    }


def merge_of(steps):
    return merge_steps(Batch.from_sequences(steps))


# --- by hand ----------------------------------------------------------------------------------------------------------


def test_two_steps_that_continue_each_other_become_one_sequence():
    steps = [
        step(7, 1, [1, 2, 3, 4], [5], last=True, rollout_logprobs=[0, 0, 0, 0, -0.5], rewards=[0, 0, 0, 0, 1.0]),
        step(7, 0, [1], [2, 3], rollout_logprobs=[0, -0.2, -0.3], rewards=[0, 0, 0.5]),
    ]
    batch, merge = merge_of(steps)
    assert batch["tokens"].tolist() == [1, 2, 3, 4, 5]
    assert batch["sampled"].tolist() == batch["loss_mask"].tolist() == [False, True, True, False, True]
    assert batch["rollout_logprobs"].tolist() == pytest.approx([0, -0.2, -0.3, 0, -0.5])
    assert batch["rewards"].tolist() == [0, 0, 0.5, 0, 1.0]
    assert (batch["step_index"].tolist(), batch["is_last_step"].tolist()) == ([0], [True])
    assert merge.token_index.tolist() == [5, 6, 7, 3, 4]
    assert merge.input_index.tolist() == [0, 1, 2, 3, 4]
    assert merge.tokens_saved == 3 / 8


def test_a_step_that_rewrites_the_text_starts_a_new_sequence():
    steps = [
        step(7, 0, [1], [2, 3]),
        step(7, 1, [1, 2, 9], [5]),
        step(7, 2, [1, 2, 9, 5, 6], [7], last=True),
    ]
    batch, merge = merge_of(steps)
    assert batch.offsets.tolist() == [0, 3, 9]
    assert batch["step_index"].tolist() == [0, 1]
    assert batch["is_last_step"].tolist() == [False, True]
    assert merge.last_step.tolist() == [0, 2]


def test_a_step_whose_sampled_tokens_repeat_the_text_does_not_join():
    # The second step's prompt ends before the first step's last token, 3; the second step sampled a 3 of its own.
    batch, _ = merge_of([step(7, 0, [1], [2, 3]), step(7, 1, [1, 2], [3, 4], last=True)])
    assert batch.num_sequences == 2


def test_trajectories_never_merge_with_each_other():
    batch, _ = merge_of([step(7, 0, [1], [2], last=True), step(8, 0, [1, 2], [3], last=True)])
    assert batch.num_sequences == 2


def test_a_merged_sequence_has_the_routed_experts_of_its_last_step():
    def routes(first: int, count: int, known: list[bool]) -> dict:
        return {"routed_experts": np.arange(first, first + count).reshape(-1, 1, 1), "routed": known}

    steps = [
        step(7, 0, [1], [2, 3], **routes(10, 3, [True, True, False])),
        step(7, 1, [1, 2, 3, 4], [5], last=True, **routes(20, 5, [True] * 4 + [False])),
    ]
    batch = Batch.from_sequences([{k: v for k, v in s.items() if not k.startswith("routed")} for s in steps])
    batch = batch.with_columns(
        routed_experts=torch.from_numpy(np.concatenate([s["routed_experts"] for s in steps])).to(torch.uint8),
        routed=torch.tensor(steps[0]["routed"] + steps[1]["routed"]),
    )
    merged, _ = merge_steps(batch)
    assert merged["routed_experts"].flatten().tolist() == [20, 21, 22, 23, 24]
    assert merged["routed"].tolist() == [True, True, True, True, False]


# --- equality with training on the steps ------------------------------------------------------------------------------


class CausalModel(nn.Module):
    """One attention layer with positions, in float64; the output at t depends only on the tokens up to t."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 8, dtype=torch.float64)
        self.place = nn.Embedding(64, 8, dtype=torch.float64)
        self.query, self.key, self.value = (nn.Linear(8, 8, dtype=torch.float64) for _ in range(3))
        self.head = nn.Linear(8, 11, dtype=torch.float64)

    def forward(self, tokens_T: Tensor) -> Tensor:
        """log p(token t | tokens before it), 0 at the first token."""
        hidden = self.embed(tokens_T) + self.place(torch.arange(len(tokens_T)))
        scores = self.query(hidden) @ self.key(hidden).T / math.sqrt(8)
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
        hidden = torch.tanh(hidden + scores.softmax(-1) @ self.value(hidden))
        logprobs = self.head(hidden)[:-1].log_softmax(-1).gather(1, tokens_T[1:, None])[:, 0]
        return torch.cat([logprobs.new_zeros(1), logprobs])


def gradient(batch: Batch) -> Tensor:
    """Gradient of a PPO-clip loss with off-policy weights. The loss reads log-probs, advantages, weights and mask."""
    model = CausalModel()
    logprobs_T = torch.cat([model(tokens) for tokens in batch["tokens"].split(batch.lengths.tolist())])
    ratio_T = (logprobs_T - batch["old_logprobs"]).exp()
    clipped_T = ratio_T.clamp(0.8, 1.2)
    loss_T = -torch.minimum(ratio_T * batch["advantages"], clipped_T * batch["advantages"])
    loss_T = loss_T * (batch["old_logprobs"] - batch["rollout_logprobs"]).exp().clamp(max=2)
    (batch["loss_weights"] * loss_T * batch["loss_mask"]).sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def random_steps(rng: np.random.Generator, num_trajectories: int) -> Batch:
    """Steps that mostly continue and sometimes rewrite their trajectory's text, in random row order."""
    steps = []
    for trajectory in range(num_trajectories):
        text: list[int] = []
        num_steps = int(rng.integers(1, 5))
        for index in range(num_steps):
            if text and rng.random() < 0.2:
                text[int(rng.integers(len(text)))] = 10
            prompt = [*text, *rng.integers(0, 10, rng.integers(1, 5)).tolist()]
            response = rng.integers(0, 10, rng.integers(1, 5)).tolist()
            steps.append(step(trajectory, index, prompt, response, last=index == num_steps - 1))
            text = prompt + response
    batch = Batch.from_sequences([steps[i] for i in rng.permutation(len(steps))])
    model = CausalModel()
    with torch.no_grad():
        logprobs_T = torch.cat([model(tokens) for tokens in batch["tokens"].split(batch.lengths.tolist())])
    sampled_T = batch["sampled"]

    def noise() -> Tensor:
        return torch.from_numpy(rng.normal(0, 0.3, batch.num_tokens))

    return batch.with_columns(
        loss_mask=sampled_T & torch.from_numpy(rng.random(batch.num_tokens) < 0.9),
        old_logprobs=(logprobs_T + noise()) * sampled_T,
        rollout_logprobs=(logprobs_T + noise()) * sampled_T,
        advantages=noise() * sampled_T,
        loss_weights=torch.from_numpy(rng.random(batch.num_tokens)) * sampled_T,
        rewards=noise() * sampled_T,
    )


@pytest.mark.parametrize("seed", range(10))
def test_the_gradient_equals_the_gradient_of_training_on_the_steps(seed):
    batch = random_steps(np.random.default_rng(seed), 6)
    merged, merge = merge_steps(batch)
    assert merged.num_tokens < batch.num_tokens
    assert merge.num_tokens == merged.num_tokens
    apart, together = gradient(batch), gradient(merged)
    # Float64; only the order of additions differs. The largest relative difference over 60 seeds was 3e-16.
    assert (together - apart).norm() <= 1e-14 * apart.norm()


def test_the_loss_mask_of_the_last_step_gives_another_gradient():
    batch = random_steps(np.random.default_rng(0), 6)
    merged, merge = merge_steps(batch)
    tail = batch.select(torch.from_numpy(merge.last_step))
    wrong = merged.with_columns(loss_mask=tail["loss_mask"])
    assert (gradient(wrong) - gradient(batch)).norm() > 1e-2 * gradient(batch).norm()


@given(st.integers(0, 2**32 - 1), st.integers(1, 6))
def test_every_sampled_token_survives_once_with_its_reward(seed, num_trajectories):
    batch = random_steps(np.random.default_rng(seed), num_trajectories)
    merged, _ = merge_steps(batch)

    def sampled(batch: Batch) -> list[tuple[float, ...]]:
        columns = ("tokens", "rewards", "old_logprobs", "rollout_logprobs", "advantages", "loss_weights", "loss_mask")
        trajectory_T = batch["trajectory_id"][batch.sequence_index]
        values = torch.stack([trajectory_T, *(batch[name] for name in columns)], 1)[batch["sampled"]]
        return sorted(map(tuple, values.tolist()))

    assert sampled(merged) == sampled(batch)
    assert merged["is_last_step"].sum() == len(batch["trajectory_id"].unique())
    require_complete_trajectories(*(merged[n].numpy() for n in ("trajectory_id", "step_index", "is_last_step")))


@given(st.integers(0, 2**32 - 1))
def test_shuffled_rows_give_the_same_sequences(seed):
    rng = np.random.default_rng(seed)
    batch = random_steps(rng, 5)

    def contents(batch: Batch) -> list[tuple]:
        rows = [batch.select([i]) for i in range(batch.num_sequences)]
        return sorted((int(r["trajectory_id"]), int(r["step_index"]), tuple(r["rewards"].tolist())) for r in rows)

    shuffled = batch.select(torch.from_numpy(rng.permutation(batch.num_sequences)))
    assert contents(merge_steps(batch)[0]) == contents(merge_steps(shuffled)[0])


def test_a_batch_in_which_nothing_merges_stays_unchanged():
    batch = Batch.from_sequences([step(9, 0, [1], [2], last=True), step(3, 0, [4, 5], [6], last=True)])
    merged, merge = merge_steps(batch)
    assert all(torch.equal(merged[name], batch[name]) for name in batch)
    assert merge.tokens_saved == 0


def test_ten_turns_of_equal_size_save_most_of_the_tokens():
    text, steps = [], []
    for index in range(10):
        steps.append(step(0, index, [*text, 1, 2, 3], [4, 5], last=index == 9))
        text = steps[-1]["tokens"]
    _, merge = merge_of(steps)
    # 5 + 10 + … + 50 = 275 tokens become 50.
    assert merge.tokens_saved == pytest.approx(225 / 275)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step_index", "is_last", "message"),
    [
        (
            [0, 1, 2],
            [False, False, False],
            r"row 2 \(trajectory 5, step 2\) has the trajectory's highest index, but is not marked",
        ),
        ([0, 1, 2], [False, True, True], r"row 1 \(trajectory 5, step 1\) is marked as the last step, but a later"),
        ([0, 1, 2], [True, False, False], r"row 0 \(trajectory 5, step 0\) is marked as the last step"),
        ([1, 1, 2], [False, False, True], "trajectory 5: rows 0 and 1 both have step index 1"),
        ([2, 1, 0], [False, False, True], r"row 2 \(trajectory 5, step 0\) is marked as the last step"),
        (
            [0, 1, 3],
            [False, False, True],
            r"row 2 \(trajectory 5, step 3\): expected step 2, because indices run from 0",
        ),
    ],
)
def test_an_incomplete_trajectory_is_refused_with_the_row_named(step_index, is_last, message):
    with pytest.raises(DataError, match=message):
        require_complete_trajectories([5, 5, 5], step_index, is_last)


def test_columns_of_different_lengths_are_refused():
    with pytest.raises(ShapeError, match="expected equal lengths"):
        require_complete_trajectories([5, 5], [0, 1], [True])
    ids = {"trajectory_id_N": [0], "step_index_N": [0], "is_last_step_N": [True]}
    with pytest.raises(ShapeError, match="tokens_T has 2 entries and sampled_T 3"):
        merge_prefixes([0, 3], [1, 2], [False, True, True], **ids)
    with pytest.raises(ShapeError, match="2 sequences, but trajectory_id_N has 1 entries"):
        merge_prefixes([0, 1, 2], [1, 2], [False, True], **ids)


def test_a_reward_on_a_prompt_token_that_an_earlier_step_has_is_refused():
    steps = [
        step(7, 0, [1], [2, 3], rewards=[0, 0, 0.0]),
        step(7, 1, [1, 2, 3], [5], last=True, rewards=[0, 0, 1.0, 0]),
    ]
    with pytest.raises(DataError, match=r"row 1 \(trajectory 7\): rewards is not zero at token 2"):
        merge_of(steps)
