"""The sampler agrees with slow reference definitions, and its random numbers are uniform and uncorrelated."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_core.interfaces import SamplingParams
from rl_rollout.local import sampling
from rl_rollout.local.sampling import draw, hashed_seeds, knob_array, uniforms
from rl_transformers.testing.reference_engine import slow_distribution

knobs = st.builds(
    SamplingParams,
    temperature=st.floats(0.2, 3.0),
    top_k=st.sampled_from([-1, 1, 2, 5, 100]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
)


def draw_with(logits_BV, params, uniforms_B):
    tokens, logprobs, _ = draw(logits_BV, knob_array([params] * len(logits_BV)), np.asarray(uniforms_B, np.float64))
    return tokens, logprobs


@given(params=knobs, seed=st.integers(0, 2**32))
def test_logprobs_are_those_of_the_slow_definition_and_dropped_tokens_are_never_drawn(params, seed):
    generator = torch.Generator().manual_seed(seed)
    logits_V = 2 * torch.randn(30, generator=generator)
    slow_V = slow_distribution(logits_V, params)
    tokens, logprobs = draw_with(logits_V.expand(64, -1), params, np.linspace(0, 1, 64, endpoint=False))
    torch.testing.assert_close(logprobs.double(), slow_V[tokens], atol=1e-5, rtol=0)


@given(seed=st.integers(0, 2**32))
def test_sampling_inverts_the_cumulative_distribution(seed):
    generator = torch.Generator().manual_seed(seed)
    logits_V = 3 * torch.randn(12, generator=generator)
    cumulative = np.cumsum(logits_V.log_softmax(-1).exp().double().numpy())
    numbers = np.random.default_rng(seed).random(50)
    tokens, _ = draw_with(logits_V.expand(50, -1), SamplingParams(), numbers)
    slow = [next(i for i, reached in enumerate(cumulative) if reached > u * cumulative[-1]) for u in numbers]
    assert tokens.tolist() == slow


@pytest.mark.parametrize("number", [0.0, 1 - 2.0**-52])
def test_the_ends_of_the_unit_interval_give_tokens_that_have_a_probability(number):
    logits_V = torch.tensor([-torch.inf, 0.0, 1.0, -torch.inf, -200.0])
    tokens, logprobs = draw_with(logits_V[None], SamplingParams(), [number])
    assert tokens.item() in (1, 2)
    assert torch.isfinite(logprobs).all()


def test_greedy_rows_ignore_filters_and_share_a_batch_with_sampled_ones():
    logits_V = torch.tensor([0.0, 1.0, 3.0, 2.0])
    params = [SamplingParams(temperature=0.0, top_k=1), SamplingParams(top_k=2), SamplingParams(temperature=0.0)]
    tokens, logprobs, kept = draw(logits_V.expand(3, -1), knob_array(params), np.array([0.9, 0.999, 0.1]))
    assert [len(ids) for ids in kept] == [0, 2, 0]
    own_V = logits_V.log_softmax(-1)
    assert tokens.tolist()[::2] == [2, 2]
    torch.testing.assert_close(logprobs[[0, 2]], own_V[[2, 2]])
    torch.testing.assert_close(logprobs[1], logits_V[2:].log_softmax(-1)[tokens[1] - 2])


def test_top_k_keeps_exactly_k_tokens_even_if_all_logits_are_equal():
    tokens, logprobs = draw_with(torch.zeros(100, 8), SamplingParams(top_k=3), np.linspace(0, 1, 100, endpoint=False))
    assert set(tokens.tolist()) == {0, 1, 2}
    torch.testing.assert_close(logprobs, torch.full((100,), 1 / 3).log())


def test_a_large_batch_sampled_in_pieces_gives_the_same_tokens(monkeypatch):
    logits_BV = torch.randn(33, 50, generator=torch.Generator().manual_seed(0))
    numbers = np.random.default_rng(0).random(33)
    whole = draw_with(logits_BV, SamplingParams(top_p=0.9), numbers)
    monkeypatch.setattr(sampling, "_MAX_CHUNK_ELEMENTS", 200)
    pieces = draw_with(logits_BV, SamplingParams(top_p=0.9), numbers)
    assert torch.equal(whole[0], pieces[0])
    torch.testing.assert_close(whole[1], pieces[1])


# --- random numbers -------------------------------------------------------------------------------------------------


def numbers_of(seeds, positions):
    return uniforms(hashed_seeds(seeds), np.array(positions, dtype=np.int64))


def test_a_random_number_depends_only_on_its_own_seed_and_position():
    crowd = numbers_of([5, 6, 7, -1, 2**70], [0, 3, 9, 2, 1])
    alone = [numbers_of([seed], [position])[0] for seed, position in [(5, 0), (6, 3), (7, 9), (-1, 2), (2**70, 1)]]
    assert crowd.tolist() == alone
    assert len(set(crowd.tolist())) == 5


@pytest.mark.parametrize("direction", ["seeds", "positions"])
def test_neighbouring_seeds_and_positions_give_uniform_uncorrelated_numbers(direction):
    count = 100_000
    run, same = list(range(count)), [3] * count
    numbers = numbers_of(run, same) if direction == "seeds" else numbers_of(same, run)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    histogram, _ = np.histogram(numbers, bins=100, range=(0, 1))
    # With 99 degrees of freedom, chi-squared has mean 99 and standard deviation 14.
    assert ((histogram - count / 100) ** 2 / (count / 100)).sum() < 99 + 5 * 14
    for lag in (1, 2, 16):
        # The sample correlation of independent numbers has standard deviation 1/sqrt(count).
        assert abs(np.corrcoef(numbers[:-lag], numbers[lag:])[0, 1]) < 5 / count**0.5
