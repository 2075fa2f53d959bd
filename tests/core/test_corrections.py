"""Off-policy corrections compared with numbers computed by hand and with a loop over sequences, and in edge cases."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rl_core.algorithms.corrections import (
    geometric_log_ratios,
    masked_ratios,
    off_policy_correction,
    outlier_sequence_mask,
    ratio_mask,
    rollout_log_ratios,
    sequence_log_ratios,
    truncated_ratios,
)
from rl_core.algorithms.reductions import token_mean
from rl_core.errors import ConfigError, ShapeError
from tests.core.token_streams import Stream, reordered, streams

# Ratios 1, 2, 4 | 1/2, 1/2 | 8 (not trained), 1.
RATIOS = torch.tensor([1.0, 2.0, 4.0, 0.5, 0.5, 8.0, 1.0], dtype=torch.float64)
LOG_RATIOS = RATIOS.log()
MASK = torch.tensor([True, True, True, True, True, False, True])
SEQUENCE = torch.tensor([0, 0, 0, 1, 1, 2, 2])
ROLLOUT = torch.linspace(-2, -1, 7, dtype=torch.float64)
NAN = float("nan")


def corrected(**settings: Any) -> tuple[list[float], list[bool], dict[str, tuple[float, float]]]:
    weights_T, mask_T, metrics = off_policy_correction(LOG_RATIOS + ROLLOUT, ROLLOUT, MASK, SEQUENCE, **settings)
    return [round(weight, 9) for weight in weights_T.tolist()], mask_T.tolist(), metrics


# --- by hand --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{"tis_ratio_type": "token"}, {"sequence_mask_metric": "geometric"}])
def test_a_token_whose_old_log_prob_is_nan_is_not_dropped_silently(settings: dict[str, Any]):
    old_T = LOG_RATIOS + ROLLOUT
    old_T[3] = old_T[5] = NAN  # token 5 is not trained
    weights_T, mask_T, _ = off_policy_correction(old_T, ROLLOUT, MASK, SEQUENCE, **settings)
    assert mask_T[3]
    assert not weights_T[~mask_T].any()
    if settings.get("tis_ratio_type"):
        assert weights_T.isnan().tolist() == [False, False, False, True, False, False, False]


def test_a_ratio_outside_the_mask_may_be_nan():
    log_ratios_T = torch.where(MASK, LOG_RATIOS, NAN)
    assert truncated_ratios(log_ratios_T, MASK, high=2.0)[5] == 0


def test_sequence_ratios_equal_products_and_geometric_means_worked_by_hand():
    # Products 8, 1/4, 1 (the token outside the mask does not count); geometric means 2, 1/2, 1.
    products = sequence_log_ratios(LOG_RATIOS, MASK, SEQUENCE).exp()
    torch.testing.assert_close(products, torch.tensor([8, 8, 8, 0.25, 0.25, 1, 1], dtype=torch.float64))
    means = geometric_log_ratios(LOG_RATIOS, MASK, SEQUENCE).exp()
    torch.testing.assert_close(means, torch.tensor([2, 2, 2, 0.5, 0.5, 1, 1], dtype=torch.float64))


def test_truncation_caps_ratios_and_masking_drops_tokens():
    assert truncated_ratios(LOG_RATIOS, MASK, high=2.0).tolist() == pytest.approx([1, 2, 2, 0.5, 0.5, 0, 1])
    assert masked_ratios(LOG_RATIOS, MASK, low=0.6, high=3.0).tolist() == pytest.approx([1, 2, 0, 0, 0, 0, 1])
    assert ratio_mask(LOG_RATIOS, MASK, low=0.6).tolist() == [True, True, True, False, False, False, True]


def test_a_ratio_at_a_bound_is_kept():
    one = torch.zeros(1)
    kept = torch.ones(1, dtype=torch.bool)
    assert ratio_mask(one, kept, low=1.0, high=1.0).tolist() == [True]


def test_one_outlier_drops_its_whole_sequence():
    assert outlier_sequence_mask(LOG_RATIOS, MASK, SEQUENCE, high=3.0).tolist() == [False] * 3 + [
        True,
        True,
        False,
        True,
    ]


def test_without_settings_every_trained_token_has_weight_one():
    weights, mask, metrics = corrected()
    assert weights == [1, 1, 1, 1, 1, 0, 1]
    assert mask == MASK.tolist()
    assert metrics["off_policy/kept_tokens"] == (6, 6)
    assert metrics["off_policy/ratio"] == (pytest.approx(9.0), 6)
    assert metrics["off_policy/logprob_diff"] == (pytest.approx(5 * math.log(2)), 6)


def test_token_truncation_weights_each_token_by_its_ratio_and_counts_truncated_tokens():
    weights, mask, metrics = corrected(tis_ratio_type="token", token_tis_ratio_clip_high=3.0)
    assert weights == [1, 2, 3, 0.5, 0.5, 0, 1]
    assert mask == MASK.tolist()
    assert metrics["off_policy/truncated_tokens"] == (1, 6)


def test_sequence_truncation_weights_each_token_by_the_product_of_its_sequences_ratios():
    weights, _, metrics = corrected(tis_ratio_type="sequence", sequence_tis_ratio_clip_high=5.0)
    assert weights == [5, 5, 5, 0.25, 0.25, 0, 1]
    assert metrics["off_policy/truncated_tokens"] == (3, 6)


def test_sequence_masks_drop_sequences_by_the_geometric_mean_or_product_of_their_ratios():
    geometric = corrected(sequence_mask_metric="geometric", geo_mask_low=0.4, geo_mask_high=1.5)
    assert geometric[1] == [False] * 3 + [True, True, False, True]
    assert geometric[2]["off_policy/masked_sequences"] == (1, 3)
    assert corrected(sequence_mask_metric="product")[1] == [False] * 5 + [False, True]


def test_each_correction_step_uses_the_mask_left_by_the_previous_one():
    weights, mask, metrics = corrected(
        outlier_token_is_threshold_high=7.0,  # only the untrained token is above the bound
        token_mask_is_threshold_low=0.4,
        token_mask_is_threshold_high=3.0,  # drops the token with ratio 4
        tis_ratio_type="sequence",
        sequence_tis_ratio_clip_high=1.5,  # sequence 0 is now 1 · 2 = 2, truncated
        sequence_mask_metric="product",  # sequence 1 is 1/4, below 1/2
    )
    assert weights == [1.5, 1.5, 0, 0, 0, 0, 1]
    assert mask == [True, True, False, False, False, False, True]
    assert metrics["off_policy/outlier_sequences"] == (0, 3)
    assert metrics["off_policy/masked_tokens"] == (1, 6)
    assert metrics["off_policy/truncated_tokens"] == (2, 5)
    assert metrics["off_policy/masked_sequences"] == (1, 3)
    assert metrics["off_policy/kept_tokens"] == (3, 6)


def test_masked_importance_sampling_is_the_token_mask_with_token_weights():
    weights, _, _ = corrected(
        tis_ratio_type="token",
        token_tis_ratio_clip_high=3.0,
        token_mask_is_threshold_low=0.6,
        token_mask_is_threshold_high=3.0,
    )
    assert weights == pytest.approx(masked_ratios(LOG_RATIOS, MASK, low=0.6, high=3.0).tolist())


@pytest.mark.parametrize("missing", [NAN, float("inf"), float("-inf")])
@pytest.mark.parametrize("settings", [{}, {"tis_ratio_type": "sequence"}, {"sequence_mask_metric": "geometric"}])
def test_a_missing_engine_logprob_drops_only_its_own_token(missing: float, settings: dict[str, Any]):
    rollout_T = torch.tensor([missing, -1.0, -1.0, missing])
    old_T = torch.full((4,), -1.0)
    mask_T = torch.tensor([True, True, True, False])
    weights_T, kept_T, metrics = off_policy_correction(old_T, rollout_T, mask_T, torch.zeros(4).long(), **settings)
    assert kept_T.tolist() == [False, True, True, False]
    assert weights_T.tolist() == [0, 1, 1, 0]
    assert token_mean(kept_T).tolist() == [0, 0.5, 0.5, 0]
    assert metrics["off_policy/missing_tokens"] == (1, 3)
    assert metrics["off_policy/logprob_diff"] == (0, 2)


# --- against a loop -------------------------------------------------------------------------------------------------


def slow_correction(ratios: Tensor, stream: Stream, settings: dict[str, Any]) -> tuple[list[float], list[bool]]:
    """Computes the correction sequence by sequence, with plain ratios and Python floats."""
    weights, kept = [0.0] * len(ratios), [False] * len(ratios)
    for sequence in range(len(stream.lengths)):
        tokens = ((stream.sequence_T == sequence) & stream.mask_T).nonzero().flatten().tolist()
        ratio = {t: float(ratios[t]) for t in tokens}
        low, high = settings["outlier_token_is_threshold_low"], settings["outlier_token_is_threshold_high"]
        if any((low is not None and ratio[t] < low) or (high is not None and ratio[t] > high) for t in tokens):
            continue
        if settings["token_mask_is_threshold_low"] is not None:
            tokens = [t for t in tokens if settings["token_mask_is_threshold_low"] <= ratio[t]]
            tokens = [t for t in tokens if ratio[t] <= settings["token_mask_is_threshold_high"]]
        product = math.prod(ratio[t] for t in tokens)
        mean = product ** (1 / max(len(tokens), 1))
        if settings["sequence_mask_metric"] == "geometric" and not 0.9 <= mean <= 1.1:
            continue
        if settings["sequence_mask_metric"] == "product" and not 0.5 <= product <= 2.0:
            continue
        for t in tokens:
            kept[t] = True
            weights[t] = {
                None: 1.0,
                "token": min(ratio[t], settings["token_tis_ratio_clip_high"]),
                "sequence": min(product, settings["sequence_tis_ratio_clip_high"]),
            }[settings["tis_ratio_type"]]
    return weights, kept


SETTINGS = st.fixed_dictionaries(
    {
        "tis_ratio_type": st.sampled_from([None, "token", "sequence"]),
        "token_tis_ratio_clip_high": st.sampled_from([1.0, 1.2]),
        "sequence_tis_ratio_clip_high": st.sampled_from([1.0, 3.0]),
        "sequence_mask_metric": st.sampled_from([None, "geometric", "product"]),
        "outlier_token_is_threshold_low": st.sampled_from([None, 0.7]),
        "outlier_token_is_threshold_high": st.sampled_from([None, 1.4]),
    }
)


@given(stream=streams(max_length=30), settings=SETTINGS, token_mask=st.booleans())
def test_the_corrections_equal_a_loop_over_sequences(stream: Stream, settings: dict[str, Any], token_mask: bool):
    settings |= {"token_mask_is_threshold_low": 0.8 if token_mask else None}
    settings |= {"token_mask_is_threshold_high": 1.2 if token_mask else None}
    log_ratios_T, rollout_T = stream.normal() * 0.15, -stream.normal(salt=1).abs()
    arguments = (log_ratios_T + rollout_T, rollout_T, stream.mask_T, stream.sequence_T)
    weights_T, mask_T, _ = off_policy_correction(*arguments, geo_mask_low=0.9, geo_mask_high=1.1, **settings)
    expected_weights, expected_mask = slow_correction(log_ratios_T.exp(), stream, settings)
    assert mask_T.tolist() == expected_mask
    torch.testing.assert_close(weights_T, torch.tensor(expected_weights, dtype=torch.float64), rtol=1e-10, atol=1e-12)


# --- properties -----------------------------------------------------------------------------------------------------

EVERYTHING: list[dict[str, Any]] = [
    {"tis_ratio_type": "token", "sequence_mask_metric": "product"},
    {"tis_ratio_type": "sequence", "sequence_mask_metric": "geometric", "outlier_token_is_threshold_high": 100.0},
    {"tis_ratio_type": "sequence", "token_mask_is_threshold_low": 0.0, "token_mask_is_threshold_high": math.inf},
]


@pytest.mark.parametrize("settings", EVERYTHING)
@given(stream=streams(), extreme=st.sampled_from([50.0, -50.0, 1e30, -1e30]))
def test_extreme_ratios_stay_finite_and_bounded(settings: dict[str, Any], stream: Stream, extreme: float):
    rollout_T = torch.full((stream.mask_T.numel(),), -1.0)
    old_T = rollout_T + extreme * stream.normal(dtype=torch.float32).sign()
    weights_T, mask_T, metrics = off_policy_correction(old_T, rollout_T, stream.mask_T, stream.sequence_T, **settings)
    assert bool(weights_T.isfinite().all())
    assert bool((weights_T >= 0).all())
    assert bool((weights_T <= 5.0 * (1 + 1e-6)).all())
    assert not weights_T[~mask_T].any()
    assert math.isfinite(metrics["off_policy/ratio"][0])


@pytest.mark.parametrize("settings", EVERYTHING)
@given(stream=streams())
def test_corrections_move_with_their_sequences_in_any_order(settings: dict[str, Any], stream: Stream):
    order = torch.randperm(len(stream.lengths), generator=torch.Generator().manual_seed(stream.seed)).tolist()
    columns = (stream.normal() * 0.1 - 1, stream.normal(salt=1) * 0.1 - 1, stream.mask_T)
    sequence_T = torch.repeat_interleave(torch.arange(len(order)), torch.tensor([stream.lengths[i] for i in order]))
    plain = off_policy_correction(*columns, stream.sequence_T, **settings)
    moved = off_policy_correction(*(reordered(stream, c, order) for c in columns), sequence_T, **settings)
    assert torch.equal(moved.loss_mask_T, reordered(stream, plain.loss_mask_T, order))
    torch.testing.assert_close(moved.weights_T, reordered(stream, plain.weights_T, order), rtol=1e-12, atol=0)
    for name, (total, weight) in plain.metrics.items():
        assert moved.metrics[name] == (pytest.approx(total), weight)


@given(stream=streams(max_sequences=5), cut=st.floats(0, 1))
def test_corrections_and_metrics_of_parts_add_up_to_those_of_the_whole(stream: Stream, cut: float):
    old_T, rollout_T = stream.normal() * 0.1 - 1, stream.normal(salt=1) * 0.1 - 1
    at = sum(stream.lengths[: round(cut * len(stream.lengths))])
    settings = EVERYTHING[1]
    whole = off_policy_correction(old_T, rollout_T, stream.mask_T, stream.sequence_T, **settings)
    columns = (old_T, rollout_T, stream.mask_T, stream.sequence_T)
    parts = [off_policy_correction(*(c[p] for c in columns), **settings) for p in (slice(None, at), slice(at, None))]
    assert torch.equal(whole.loss_mask_T, torch.cat([part.loss_mask_T for part in parts]))
    torch.testing.assert_close(whole.weights_T, torch.cat([part.weights_T for part in parts]), rtol=1e-12, atol=0)
    for name, (total, weight) in whole.metrics.items():
        assert sum(part.metrics[name][0] for part in parts) == pytest.approx(total)
        assert sum(part.metrics[name][1] for part in parts) == weight


def test_weights_carry_no_gradient():
    old_T = torch.zeros(2, requires_grad=True)
    mask_T = torch.ones(2, dtype=torch.bool)
    result = off_policy_correction(old_T, torch.zeros(2), mask_T, torch.zeros(2).long(), tis_ratio_type="token")
    assert not result.weights_T.requires_grad
    assert not rollout_log_ratios(old_T, torch.zeros(2), mask_T).log_ratios_T.requires_grad


@pytest.mark.parametrize("settings", EVERYTHING)
@pytest.mark.parametrize("num_tokens", [0, 3])
def test_an_empty_mask_gives_zeros(settings: dict[str, Any], num_tokens: int):
    nothing = torch.zeros(num_tokens)
    weights_T, mask_T, metrics = off_policy_correction(
        nothing, nothing * NAN, nothing.bool(), nothing.long(), **settings
    )
    assert weights_T.tolist() == [0.0] * num_tokens
    assert not mask_T.any()
    assert all(pair == (0.0, 0.0) for pair in metrics.values())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tis_ratio_type": "tokens"}, "tis_ratio_type: 'tokens' is not one of token, sequence.*Did you mean 'token'"),
        ({"sequence_mask_metric": "mean"}, "sequence_mask_metric: 'mean' is not one of geometric, product"),
        ({"token_mask_is_threshold_low": 0.5}, "set both or neither"),
        ({"geo_mask_low": 1.2}, "geo_mask_low, geo_mask_high: no ratio lies between 1.2 and 1.01"),
        ({"token_tis_ratio_clip_high": 0.0}, "token_tis_ratio_clip_high: no ratio lies between 0 and 0"),
        ({"outlier_token_is_threshold_low": -1.0}, "outlier_token_is_threshold_low.*between -1 and inf"),
    ],
)
def test_impossible_settings_are_refused_before_any_token_is_seen(settings: dict[str, Any], message: str):
    nothing = torch.zeros(0)
    with pytest.raises(ConfigError, match=message):
        off_policy_correction(nothing, nothing, nothing.bool(), nothing.long(), **settings)


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ShapeError, match="row 3 is missing from rollout_logprobs_T"):
        off_policy_correction(ROLLOUT, ROLLOUT[:3], MASK, SEQUENCE)
    with pytest.raises(ShapeError, match="row 3 is missing from sequence_T"):
        off_policy_correction(ROLLOUT, ROLLOUT, MASK, SEQUENCE[:3])
