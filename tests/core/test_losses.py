"""Losses compared with numbers worked by hand and with a slow version, and properties that hold for all of them."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from rl_core import algorithms
from rl_core.algorithms import Objective, minibatch_losses
from rl_core.errors import ConfigError, ShapeError

# `mini_batch` draws ratios below, between and above these bounds.
CLIP = {"eps_clip_low": 0.2, "eps_clip_high": 0.3}
CASES = {
    "ppo_clip": ("ppo_clip_loss", CLIP),
    "dual_clip": ("dual_clip_loss", {**CLIP, "clip_ratio_c": 1.5}),
    "cispo_old": ("cispo_loss", {"cispo_eps_clip_low": 0.3, "cispo_eps_clip_high": 0.4}),
    "cispo_rollout": ("cispo_loss", {"cispo_eps_clip_low": 0.3, "cispo_anchor": "rollout"}),
    "sapo": ("sapo_loss", {"tau_pos": 1.0, "tau_neg": 2.0}),
    "importance_sampling": ("importance_sampling_loss", {}),
    "dro": ("dro_loss", {"dro_beta": 0.3}),
    "reinforce": ("reinforce_loss", {}),
    "cross_entropy": ("cross_entropy_loss", {}),
    "rollout_is": ("rollout_is_loss", {"eps_clip_low": 0.4, "eps_clip_high": 0.5}),
    "dppo_tv": ("dppo_loss", {"delta_low": 0.1, "delta_high": 0.05}),
    "dppo_kl": ("dppo_loss", {"dppo_type": "binary_kl", "delta_low": 0.02, "delta_high": 0.01}),
    "decoupled_ppo": ("decoupled_ppo_loss", {**CLIP, "behav_imp_weight_cap": 1.4}),
    "gspo": ("gspo_loss", {"eps_clip_low": 0.1, "eps_clip_high": 0.1}),
    "gspo_token": ("gspo_token_loss", {"eps_clip_low": 0.1, "eps_clip_high": 0.1}),
    "gmpo": ("gmpo_loss", {"gmpo_log_clip_low": 0.2, "gmpo_log_clip_high": 0.3}),
    "clip_cov": ("clip_cov_loss", {**CLIP, "clip_ratio": 0.2, "clip_cov_lb": 0.1, "clip_cov_ub": 5.0}),
    "kl_cov": ("kl_cov_loss", {"kl_cov_frac": 0.3, "ppo_kl_coef": 0.7}),
    "top_entropy": ("top_entropy_loss", {**CLIP, "top_entropy_fraction": 0.4}),
    "value_clip": ("value_clip_loss", {"value_clip": 0.2}),
}
STOPPED_GRADIENT = ("cispo_old", "cispo_rollout", "gspo_token")


def mini_batch(
    seed: int, lengths: list[int], dtype: torch.dtype = torch.float64, trained: float = 0.8
) -> dict[str, torch.Tensor]:
    """Columns by parameter name; advantages are equal within a sequence."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens = sum(lengths)
    sequence_T = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(num_tokens, generator=generator, dtype=torch.float64)

    old_T = -0.05 - 2.0 * torch.rand(num_tokens, generator=generator, dtype=torch.float64)
    columns = {
        "old_logprobs_T": old_T,
        "rollout_logprobs_T": (old_T + noise(0.3)).clamp(max=-0.01),
        "logprobs_T": (old_T + noise(0.3)).clamp(max=-0.01),
        "ref_logprobs_T": old_T + noise(0.2),
        "advantages_T": torch.randn(len(lengths), generator=generator, dtype=torch.float64)[sequence_T],
        "old_entropies_T": noise(1.0).abs(),
        "values_T": noise(1.0),
        "returns_T": noise(1.0),
    }
    columns["predicted_values_T"] = columns["values_T"] + noise(0.4)
    columns = {name: values_T.to(dtype) for name, values_T in columns.items()}
    columns["mask_T"] = torch.rand(num_tokens, generator=generator) < trained
    columns["sequence_T"] = sequence_T
    return columns


def with_prepared(case: str, columns: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    function, settings = loss_of(case)
    named = {("loss_mask" if name == "mask_T" else name[:-2]): values_T for name, values_T in columns.items()}
    made = Objective(function, settings).prepare(named, columns["sequence_T"], seed=3)
    return {**columns, **{f"{name}_T": values_T for name, values_T in made.items()}}


def loss_of(case: str):
    name, settings = CASES[case]
    return getattr(algorithms, name), settings


def call(case: str, columns: dict[str, torch.Tensor]):
    function, settings = loss_of(case)
    known = inspect.signature(function).parameters.values()
    positional = [p.name for p in known if p.kind is p.POSITIONAL_OR_KEYWORD and p.name in columns]
    return function(**{name: columns[name] for name in positional}, **settings)


def current_name(case: str) -> str:
    return "predicted_values_T" if case == "value_clip" else "logprobs_T"


def loss_and_gradient(case: str, columns: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    current_T = columns[current_name(case)].detach().clone().requires_grad_()
    loss_T = call(case, {**columns, current_name(case): current_T}).loss_T
    (gradient_T,) = torch.autograd.grad(loss_T.sum(), current_T)
    return loss_T.detach(), gradient_T


# --- by hand ---------------------------------------------------------------------------------------------------------

TWO = math.log(2.0)


def by_hand(case_function, **lists) -> list[float]:
    tensors = {name: torch.tensor(values, dtype=torch.float64) for name, values in lists.items() if name.endswith("_T")}
    tensors = {n: v.bool() if n in ("mask_T",) or n.startswith("x_") else v for n, v in tensors.items()}
    if "sequence_T" in tensors:
        tensors["sequence_T"] = tensors["sequence_T"].long()
    settings = {name: value for name, value in lists.items() if not name.endswith("_T")}
    return case_function(**tensors, **settings).loss_T.tolist()


def test_ppo_clips_only_high_ratios_of_positive_and_low_ratios_of_negative_advantages():
    # ratios 2, ½, 2, ½ with A = 1, 1, −1, −1: −min(2, 1.3), −min(½, 0.8), −min(−2, −1.3), −min(−½, −0.8)
    losses = by_hand(
        algorithms.ppo_clip_loss,
        logprobs_T=[TWO, -TWO, TWO, -TWO],
        old_logprobs_T=[0.0] * 4,
        advantages_T=[1.0, 1.0, -1.0, -1.0],
        mask_T=[1] * 4,
        **CLIP,
    )
    assert losses == pytest.approx([-1.3, -0.5, 2.0, 0.8])


def test_dual_clip_bounds_the_loss_of_bad_tokens():
    arguments = {"logprobs_T": [math.log(9.0), TWO], "old_logprobs_T": [0.0, 0.0], "mask_T": [1, 1]}
    assert by_hand(
        algorithms.dual_clip_loss, advantages_T=[-2.0, -2.0], clip_ratio_c=3.0, **arguments
    ) == pytest.approx([6.0, 4.0])


def test_cispo_weights_the_log_prob_by_the_clipped_ratio():
    arguments = {"logprobs_T": [TWO, -TWO], "old_logprobs_T": [0.0, 0.0], "advantages_T": [3.0, 3.0], "mask_T": [1, 1]}
    losses = by_hand(algorithms.cispo_loss, cispo_eps_clip_low=0.4, cispo_eps_clip_high=0.5, **arguments)
    assert losses == pytest.approx([-1.5 * 3.0 * TWO, 0.6 * 3.0 * TWO])


def test_sapo_at_ratio_one_is_half_the_gates_height():
    arguments = {"logprobs_T": [0.0, 0.0], "old_logprobs_T": [0.0, 0.0], "advantages_T": [1.0, -1.0], "mask_T": [1, 1]}
    assert by_hand(algorithms.sapo_loss, tau_pos=1.0, tau_neg=2.0, **arguments) == pytest.approx([-2.0, 1.0])


def test_sapos_temperature_has_the_precision_of_the_log_probs():
    logprobs_T = torch.tensor([-1.0], dtype=torch.float64)
    loss_T, _ = algorithms.sapo_loss(logprobs_T, logprobs_T, -torch.ones_like(logprobs_T), torch.tensor([True]))
    assert loss_T.item() == pytest.approx(2.0 / 1.05, rel=1e-14)


def test_rollout_importance_sampling_drops_tokens_outside_the_open_interval():
    arguments = {
        "logprobs_T": [0.0, TWO, 0.1],
        "rollout_logprobs_T": [0.0] * 3,
        "advantages_T": [2.0] * 3,
        "mask_T": [1] * 3,
    }
    assert by_hand(algorithms.rollout_is_loss, **arguments) == pytest.approx([-2.0, 0.0, -2.0 * math.exp(0.1)])
    assert by_hand(algorithms.rollout_is_loss, eps_clip_high=0.0, **arguments) == [0.0] * 3  # the first is on the bound


def test_dppo_drops_only_updates_that_increase_a_divergence_above_its_bound():
    # |p − q| = 0.3 exceeds the bound 0.2. The second token keeps its loss: its negative advantage moves p towards q.
    p, q = math.log(0.8), math.log(0.5)
    arguments = {
        "logprobs_T": [p, p, q],
        "rollout_logprobs_T": [q, q, p],
        "advantages_T": [1.0, -1.0, -1.0],
        "mask_T": [1] * 3,
    }
    assert by_hand(algorithms.dppo_loss, **arguments) == pytest.approx([0.0, 1.6, 0.0])
    # KL(0.5 ‖ 0.8) = 0.5 ln(0.5/0.8) + 0.5 ln(0.5/0.2) = 0.2231
    assert by_hand(algorithms.dppo_loss, dppo_type="binary_kl", delta_high=0.224, **arguments)[0] == pytest.approx(-1.6)
    assert by_hand(algorithms.dppo_loss, dppo_type="binary_kl", delta_high=0.223, **arguments)[0] == 0.0


def test_decoupled_ppo_weights_tokens_by_the_behaviour_ratio_and_drops_those_above_the_cap():
    losses = by_hand(
        algorithms.decoupled_ppo_loss,
        logprobs_T=[-1.0, -1.0],
        old_logprobs_T=[-1.0, -1.0],
        rollout_logprobs_T=[-1.0 - TWO, -1.0 - 2 * TWO],
        advantages_T=[1.0, 1.0],
        mask_T=[1, 1],
        behav_imp_weight_cap=3.0,
    )
    assert losses == pytest.approx([-2.0, 0.0])


def test_gspo_clips_the_geometric_mean_of_a_sequences_ratios():
    # sequence 0: log-ratios 0.2 and 0.4, mean 0.3 > log 1.1; sequence 1: its one trained token has 0.05.
    arguments = {
        "logprobs_T": [0.2, 0.4, 0.05, 9.0],
        "old_logprobs_T": [0.0] * 4,
        "advantages_T": [1.0] * 4,
        "mask_T": [1, 1, 1, 0],
        "sequence_T": [0, 0, 1, 1],
    }
    expected = [-1.1, -1.1, -math.exp(0.05), 0.0]
    for function in (algorithms.gspo_loss, algorithms.gspo_token_loss):
        assert by_hand(function, eps_clip_low=0.1, eps_clip_high=0.1, **arguments) == pytest.approx(expected)


def test_gmpo_clips_tokens_before_the_geometric_mean():
    arguments = {"logprobs_T": [1.0, 0.1], "old_logprobs_T": [0.0] * 2, "mask_T": [1, 1], "sequence_T": [5, 5]}
    assert by_hand(algorithms.gmpo_loss, advantages_T=[2.0, 2.0], **arguments) == pytest.approx(
        [-2 * math.exp(0.25)] * 2
    )
    assert by_hand(algorithms.gmpo_loss, advantages_T=[-2.0, -2.0], **arguments) == pytest.approx(
        [2 * math.exp(0.55)] * 2
    )


def test_clip_cov_and_kl_cov_act_on_the_chosen_tokens_only():
    arguments = {"logprobs_T": [TWO, TWO], "old_logprobs_T": [0.0, 0.0], "advantages_T": [1.0, 1.0], "mask_T": [1, 1]}
    assert by_hand(algorithms.clip_cov_loss, x_cov_clipped_T=[1, 0], **arguments) == pytest.approx([0.0, -1.2])
    assert by_hand(algorithms.kl_cov_loss, x_cov_top_T=[1, 0], ppo_kl_coef=0.5, **arguments) == pytest.approx(
        [-2.0 + 0.5 * TWO, -2.0]
    )


def test_value_loss_takes_the_larger_of_plain_and_clipped_error():
    # prediction 1, clipped to 0.2, target 1: errors 0 and 0.8; prediction −1, clipped to −0.2, target 1: 2 and 1.2.
    losses = by_hand(
        algorithms.value_clip_loss,
        predicted_values_T=[1.0, -1.0],
        values_T=[0.0, 0.0],
        returns_T=[1.0, 1.0],
        mask_T=[1, 1],
    )
    assert losses == pytest.approx([0.5 * 0.64, 0.5 * 4.0])


def test_rounding_never_removes_the_gradient_of_a_value_that_is_not_clipped():
    """Prediction v, return R, earlier value V. Where nothing is clipped, the clipped error (v − R) − (v − V) + (v − V)
    often differs from the error v − R in float32. A loss that only compared these two errors would count one token in
    thirty as clipped."""
    generator = torch.Generator().manual_seed(0)
    values_T, returns_T, move_T = torch.randn(3, 1000, generator=generator)
    predicted_T = (values_T + 0.1 * move_T.tanh()).requires_grad_()
    loss_T, metrics = algorithms.value_clip_loss(predicted_T, values_T, returns_T, torch.ones(1000, dtype=torch.bool))
    loss_T.sum().backward()
    torch.testing.assert_close(predicted_T.grad, (predicted_T - returns_T).detach())
    assert not metrics["value_clip_fraction"].any()


def test_covariance_columns_equal_values_worked_by_hand():
    # log-probs −1, −2, −3 (mean −2), advantages 2, 0, −2 (mean 0): covariances 2, 0, 2; the fourth is not trained.
    columns = {
        "old_logprobs_T": torch.tensor([-1.0, -2.0, -3.0, 50.0]),
        "advantages_T": torch.tensor([2.0, 0.0, -2.0, 50.0]),
        "mask_T": torch.tensor([True, True, True, False]),
    }
    covariances_T = algorithms.token_covariances(columns["old_logprobs_T"], columns["advantages_T"], columns["mask_T"])
    assert covariances_T.tolist() == [2.0, 0.0, 2.0, 0.0]
    assert minibatch_losses.kl_cov_columns(**columns, kl_cov_frac=0.7)["x_cov_top"].tolist() == [
        True,
        False,
        True,
        False,
    ]
    drawn = {
        tuple(minibatch_losses.clip_cov_columns(**columns, seed=seed)["x_cov_clipped"].tolist()) for seed in range(20)
    }
    assert drawn == {(True, False, False, False), (False, False, True, False)}
    none = minibatch_losses.clip_cov_columns(**columns, clip_cov_lb=2.0)["x_cov_clipped"]
    assert not none.any()


def test_top_entropy_mask_keeps_the_share_of_trained_tokens():
    mask_T = torch.tensor([True, True, True, True, True, False])
    entropies_T = torch.tensor([0.5, 3.0, 1.0, 2.0, 0.1, 99.0])
    kept_T = algorithms.top_entropy_mask(entropies_T, mask_T, top_entropy_fraction=0.4)
    assert kept_T.tolist() == [False, True, False, True, False, False]


# --- against a slow version ------------------------------------------------------------------------------------------


def slow_losses(case: str, columns: dict[str, torch.Tensor]) -> list[float]:
    """The losses one token at a time, with Python floats."""
    settings = CASES[case][1]
    rows = {name: values_T.tolist() for name, values_T in columns.items()}
    return [slow_loss(case, t, rows, settings) if rows["mask_T"][t] else 0.0 for t in range(len(rows["mask_T"]))]


def slow_loss(case: str, t: int, rows: dict[str, list], settings: dict) -> float:
    row = {name: values[t] for name, values in rows.items()}
    advantage, logprob = row["advantages_T"], row["logprobs_T"]
    ratio = math.exp(logprob - row["old_logprobs_T"])
    rollout_ratio = math.exp(logprob - row["rollout_logprobs_T"])
    members = [u for u, s in enumerate(rows["sequence_T"]) if s == row["sequence_T"] and rows["mask_T"][u]]
    log_ratios = [rows["logprobs_T"][u] - rows["old_logprobs_T"][u] for u in members]

    def clip(value, low, high):
        return min(max(value, low), high)

    def surrogate(r, a):
        return -min(r * a, clip(r, 1 - settings["eps_clip_low"], 1 + settings["eps_clip_high"]) * a)

    if case in ("ppo_clip", "dual_clip"):
        loss = surrogate(ratio, advantage)
        return min(loss, -settings["clip_ratio_c"] * advantage) if case == "dual_clip" and advantage < 0 else loss
    if case.startswith("cispo"):
        anchored = ratio if case == "cispo_old" else rollout_ratio
        high = 1 + settings.get("cispo_eps_clip_high", 4.0)
        return -clip(anchored, 1 - settings["cispo_eps_clip_low"], high) * advantage * logprob
    if case == "sapo":
        tau = settings["tau_pos"] if advantage > 0 else settings["tau_neg"]
        return -advantage * 4 / tau / (1 + math.exp(-tau * (ratio - 1)))
    if case == "importance_sampling":
        return -ratio * advantage
    if case == "dro":
        return -advantage * logprob + settings["dro_beta"] / 2 * (logprob - row["old_logprobs_T"]) ** 2
    if case == "reinforce":
        return -logprob * advantage
    if case == "cross_entropy":
        return -logprob
    if case == "rollout_is":
        inside = 1 - settings["eps_clip_low"] < rollout_ratio < 1 + settings["eps_clip_high"]
        return -rollout_ratio * advantage if inside else 0.0
    if case.startswith("dppo"):
        p, q = math.exp(logprob), math.exp(row["rollout_logprobs_T"])
        divergence = abs(p - q) if case == "dppo_tv" else q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
        too_high = advantage > 0 and p > q and divergence > settings["delta_high"]
        too_low = advantage < 0 and p < q and divergence > settings["delta_low"]
        return 0.0 if too_high or too_low else -rollout_ratio * advantage
    if case == "decoupled_ppo":
        weight = math.exp(row["old_logprobs_T"] - row["rollout_logprobs_T"])
        return weight * surrogate(ratio, advantage) if weight <= settings["behav_imp_weight_cap"] else 0.0
    if case.startswith("gspo"):
        return surrogate(math.exp(sum(log_ratios) / len(log_ratios)), advantage)
    if case == "gmpo":
        low, high = settings["gmpo_log_clip_low"], settings["gmpo_log_clip_high"]
        bounded = [min(d, high) if advantage > 0 else max(d, -low) for d in log_ratios]
        return -advantage * math.exp(sum(bounded) / len(bounded))
    if case == "clip_cov":
        return 0.0 if row["x_cov_clipped_T"] else surrogate(ratio, advantage)
    if case == "kl_cov":
        return -ratio * advantage + (settings["ppo_kl_coef"] * abs(math.log(ratio)) if row["x_cov_top_T"] else 0.0)
    if case == "top_entropy":
        return surrogate(ratio, advantage) if row["x_top_entropy_T"] else 0.0
    assert case == "value_clip"
    value, old, target = row["predicted_values_T"], row["values_T"], row["returns_T"]
    held = old + clip(value - old, -settings["value_clip"], settings["value_clip"])
    return 0.5 * max((value - target) ** 2, (held - target) ** 2)


@pytest.mark.parametrize("case", CASES)
def test_loss_equals_the_slow_version(case):
    columns = with_prepared(case, mini_batch(1, [7, 1, 12, 30, 5, 45]))
    fast = call(case, columns).loss_T
    assert fast.tolist() == pytest.approx(slow_losses(case, columns), rel=1e-12, abs=1e-12)
    assert fast.count_nonzero() > 0


# --- properties of all losses ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [case for case in CASES if case not in STOPPED_GRADIENT])
def test_gradient_equals_finite_differences_of_the_loss(case):
    columns = with_prepared(case, mini_batch(2, [4, 6, 3]))
    current_T = columns[current_name(case)].requires_grad_()
    assert torch.autograd.gradcheck(lambda x: call(case, {**columns, current_name(case): x}).loss_T, (current_T,))


@pytest.mark.parametrize("case", ["cispo_old", "cispo_rollout"])
def test_cispo_gradient_is_the_weighted_policy_gradient(case):
    columns = mini_batch(2, [4, 6, 3])
    loss_T, gradient_T = loss_and_gradient(case, columns)
    torch.testing.assert_close(gradient_T, loss_T / columns["logprobs_T"])


def test_dro_has_the_gradient_of_the_papers_squared_loss():
    """Richemond et al. 2024: ½ (A − beta · log(policy / old))², divided by beta. A log-ratio of −60 is not clamped."""
    columns = mini_batch(2, [4, 6, 3])
    columns["logprobs_T"][0] = columns["old_logprobs_T"][0] - 60.0
    _, gradient_T = loss_and_gradient("dro", columns)
    logprobs_T = columns["logprobs_T"].clone().requires_grad_()
    residual_T = columns["advantages_T"] - 0.3 * (logprobs_T - columns["old_logprobs_T"])
    (0.5 * residual_T.square()[columns["mask_T"]].sum() / 0.3).backward()
    torch.testing.assert_close(gradient_T, logprobs_T.grad)


def test_gspo_token_has_the_gradient_of_gspo_under_equal_advantages():
    columns = mini_batch(4, [8, 5, 20, 1])
    for expected, actual in zip(
        loss_and_gradient("gspo", columns), loss_and_gradient("gspo_token", columns), strict=True
    ):
        torch.testing.assert_close(actual, expected)


def test_gspo_token_gives_each_token_its_own_advantage():
    columns = mini_batch(4, [3])
    columns["mask_T"][:] = True
    columns["advantages_T"] = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    columns["old_logprobs_T"] = columns["logprobs_T"].clone()
    assert loss_and_gradient("gspo_token", columns)[1].tolist() == pytest.approx([-1.0, 0.0, 0.0])
    assert loss_and_gradient("gspo", columns)[1].tolist() == pytest.approx([-1 / 3] * 3)


@pytest.mark.parametrize("case", CASES)
def test_masked_tokens_have_no_loss_no_gradient_and_no_influence(case):
    columns = with_prepared(case, mini_batch(5, [6, 9, 4]))
    clean = loss_and_gradient(case, columns)
    for poison in (math.nan, math.inf, -math.inf):
        dirty = {
            name: torch.where(columns["mask_T"], values_T, poison) if values_T.is_floating_point() else values_T
            for name, values_T in columns.items()
        }
        for expected, actual in zip(clean, loss_and_gradient(case, dirty), strict=True):
            assert torch.equal(actual, expected)
    for result in clean:
        assert not result[~columns["mask_T"]].any()


@pytest.mark.parametrize("case", CASES)
def test_empty_mask_gives_zeros(case):
    columns = mini_batch(6, [5, 3])
    columns["mask_T"] = torch.zeros(8, dtype=torch.bool)
    loss_T, gradient_T = loss_and_gradient(case, with_prepared(case, columns))
    assert not loss_T.any()
    assert not gradient_T.any()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_extreme_ratios_stay_finite(case, dtype):
    columns = mini_batch(7, [10, 10], dtype)
    for shift in (50.0, -50.0):
        columns["logprobs_T"] = columns["old_logprobs_T"] + shift
        columns["rollout_logprobs_T"] = columns["old_logprobs_T"] - shift
        for result in loss_and_gradient(case, with_prepared(case, columns)):
            assert result.isfinite().all()
        metrics = call(case, with_prepared(case, columns)).metrics
        assert all(metric_T.isfinite().all() for metric_T in metrics.values())


def test_importance_ratios_are_clamped_at_exp_20():
    columns = mini_batch(7, [10])
    columns["mask_T"][:] = True
    columns["logprobs_T"] = columns["old_logprobs_T"] + 50.0
    loss_T, gradient_T = loss_and_gradient("importance_sampling", columns)
    torch.testing.assert_close(loss_T, -columns["advantages_T"] * math.exp(20.0))
    assert not gradient_T.any()


def test_ratios_of_bfloat16_log_probs_are_compared_in_float32():
    # The ratio is exp(2^-9) = 1.00196. The two bfloat16 numbers nearest to it are 1 and 1.0078.
    old_T = torch.tensor([-0.5], dtype=torch.bfloat16)
    mask_T, sequence_T = torch.tensor([True]), torch.tensor([0])
    loss = algorithms.gspo_loss(old_T + 2**-9, old_T, torch.ones(1), mask_T, sequence_T)
    assert loss.metrics["ratio"].item() == pytest.approx(math.exp(2**-9))
    assert loss.metrics["clip_fraction"].item()
    ratio_T = algorithms.ppo_clip_loss(old_T + 2**-9, old_T, torch.ones(1), mask_T).metrics["ratio"]
    assert ratio_T.item() == pytest.approx(math.exp(2**-9))


@pytest.mark.parametrize("function", ["gspo_loss", "gspo_token_loss", "gmpo_loss"])
@pytest.mark.parametrize(("outlier", "mean"), [(-50.0, -5.0), (150.0, 15.0), (-1000.0, -20.0), (-math.inf, -20.0)])
def test_one_far_token_moves_its_sequences_mean_as_in_the_papers(function, outlier, mean):
    """Ten tokens, one with a log-ratio of −50: the papers' ratio is exp(−5) = 0.0067. With each token clamped to ±20,
    it would be exp(−2) = 0.135. Only the mean is clamped to ±20."""
    logprobs_T = torch.zeros(10, dtype=torch.float64)
    logprobs_T[3] = outlier
    settings = {"eps_clip_low": 1.0, "eps_clip_high": 1e9}
    if function == "gmpo_loss":
        settings = {"gmpo_log_clip_low": math.inf, "gmpo_log_clip_high": math.inf}
    columns = {
        "logprobs_T": logprobs_T.requires_grad_(),
        "old_logprobs_T": torch.zeros(10, dtype=torch.float64),
        "advantages_T": torch.ones(10, dtype=torch.float64),
        "mask_T": torch.ones(10, dtype=torch.bool),
        "sequence_T": torch.zeros(10, dtype=torch.int64),
    }
    loss_T, metrics = getattr(algorithms, function)(**columns, **settings)
    assert loss_T.tolist() == pytest.approx([-math.exp(mean)] * 10, rel=1e-12)
    loss_T.sum().backward()
    # Each of the ten losses adds −exp(mean) / 10 to a token's gradient, or 0 if the mean is clamped.
    expected = -math.exp(mean) if abs(mean) < 20 else 0.0
    assert logprobs_T.grad.tolist() == pytest.approx([expected] * 10, rel=1e-12)
    assert all(metric_T.isfinite().all() for metric_T in metrics.values())


@pytest.mark.parametrize("case", CASES)
@hypothesis_settings(max_examples=20, deadline=None)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6), seed=st.integers(0, 2**20))
def test_order_of_the_sequences_changes_nothing(case, lengths, seed):
    columns = with_prepared(case, mini_batch(seed, lengths))
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(seed)).tolist()
    index_T = torch.cat([(columns["sequence_T"] == i).nonzero().squeeze(-1) for i in order])
    moved = {name: values_T[index_T] for name, values_T in columns.items()}
    moved["sequence_T"] = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)[order])
    for expected, actual in zip(loss_and_gradient(case, columns), loss_and_gradient(case, moved), strict=True):
        torch.testing.assert_close(actual, expected[index_T], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", CASES)
@hypothesis_settings(max_examples=20, deadline=None)
@given(lengths=st.lists(st.integers(1, 9), min_size=2, max_size=6), seed=st.integers(0, 2**20))
def test_splitting_the_mini_batch_changes_nothing(case, lengths, seed):
    columns = with_prepared(case, mini_batch(seed, lengths))
    whole = loss_and_gradient(case, columns)
    cut = seed % (len(lengths) - 1) + 1
    for part_T in (columns["sequence_T"] < cut, columns["sequence_T"] >= cut):
        part = {name: values_T[part_T] for name, values_T in columns.items()}
        for expected, actual in zip(whole, loss_and_gradient(case, part), strict=True):
            torch.testing.assert_close(actual, expected[part_T], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", ["clip_cov", "kl_cov", "top_entropy"])
def test_statistics_of_a_part_would_choose_other_tokens(case):
    """Negative control: without `prepare` on the whole mini-batch, the split would change the result."""

    def differs(seed):
        columns = mini_batch(seed, [20, 20])
        whole = with_prepared(case, columns)
        (name,) = (name for name in whole if name.startswith("x_"))
        first_T = columns["sequence_T"] == 0
        part = with_prepared(case, {n: values_T[first_T] for n, values_T in columns.items()})
        return not torch.equal(part[name], whole[name][first_T])

    assert any(differs(seed) for seed in range(5))


@pytest.mark.parametrize("case", CASES)
def test_lengths_that_differ_are_refused(case):
    columns = with_prepared(case, mini_batch(9, [4, 4]))
    columns[current_name(case)] = columns[current_name(case)][:-1]
    with pytest.raises(ShapeError, match="entries"):
        call(case, columns)


@pytest.mark.parametrize("case", CASES)
def test_only_scores_of_the_current_model_may_carry_gradient(case):
    columns = with_prepared(case, mini_batch(9, [4, 4]))
    columns[current_name(case)].requires_grad_()
    call(case, columns)
    function, _ = loss_of(case)
    read = set(inspect.signature(function).parameters) & set(columns) - {"mask_T", "sequence_T", current_name(case)}
    for name in {"old_logprobs_T", "advantages_T", "values_T", "returns_T"} & read:
        copied_T = columns[name].detach().clone().requires_grad_()
        refused = {**columns, name: copied_T}
        if case == "cispo_rollout" and name == "old_logprobs_T":
            call(case, refused)  # this loss does not read it
            continue
        with pytest.raises(ShapeError, match=rf"{name}: carries a gradient, .* pass {name}\.detach\(\)"):
            call(case, refused)
        with torch.no_grad():
            call(case, refused)


def test_the_reference_of_a_kl_estimate_may_not_carry_gradient():
    logprobs_T, mask_T = torch.tensor([-1.0], requires_grad=True), torch.tensor([True])
    with pytest.raises(ShapeError, match="ref_logprobs_T: carries a gradient"):
        algorithms.estimate_kl(logprobs_T, logprobs_T * 2, mask_T)


@pytest.mark.parametrize("case", ["gspo", "gspo_token", "gmpo"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.float32])
def test_a_sequence_index_of_another_dtype_is_refused(case, dtype):
    columns = mini_batch(9, [4, 4])
    with pytest.raises(ShapeError, match=r"sequence_T: expected torch.int64, got .*\.long\(\)"):
        call(case, {**columns, "sequence_T": columns["sequence_T"].to(dtype)})


@pytest.mark.parametrize(
    ("case", "setting", "value"),
    [
        ("ppo_clip", "eps_clip_low", 1.5),
        ("ppo_clip", "eps_clip_high", -0.1),
        ("dual_clip", "clip_ratio_c", 0.5),
        ("cispo_old", "cispo_anchor", "new"),
        ("ppo_clip", "eps_clip_high", torch.tensor(0.2)),
        ("sapo", "tau_neg", 0.0),
        ("sapo", "tau_neg", math.nan),
        ("dppo_tv", "dppo_type", "tv"),
        ("decoupled_ppo", "behav_imp_weight_cap", 0.0),
        ("gmpo", "gmpo_log_clip_low", -0.1),
        ("kl_cov", "ppo_kl_coef", -1.0),
        ("value_clip", "value_clip", -0.1),
    ],
)
def test_settings_out_of_range_are_refused(case, setting, value):
    function, settings = loss_of(case)
    columns = with_prepared(case, mini_batch(9, [4, 4]))
    known = inspect.signature(function).parameters
    with pytest.raises(ConfigError, match=rf"\b{setting}\b"):
        function(**{name: columns[name] for name in columns if name in known}, **{**settings, setting: value})
