"""`Objective`: columns bound by name, the weighted sum with KL and entropy terms, metrics, and errors at start-up."""

from __future__ import annotations

import ast
import math
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core import algorithms
from rl_core.algorithms import Objective, TokenLoss, estimate_kl, ppo_clip_loss, prepared_by
from rl_core.algorithms.objective import sum_metrics
from rl_core.errors import ConfigError, PluginError, ShapeError
from rl_core.interfaces import LossSpec
from rl_core.plugins import installed, load
from rl_core.rank_kit.objectives import objective_from_spec, total_metrics

LOSSES = [plugin.name for plugin in installed("rl_core.policy_losses") if plugin.distribution.startswith("rl-core ")]


def mini_batch(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    num_tokens = sum(lengths)

    def noise():
        return torch.randn(num_tokens, generator=generator, dtype=torch.float64)

    old = -noise().abs() - 0.1
    columns = {
        "old_logprobs": old,
        "rollout_logprobs": old + 0.1 * noise(),
        "ref_logprobs": old + 0.1 * noise(),
        "advantages": noise(),
        "old_entropies": noise().abs(),
        "values": noise(),
        "returns": noise(),
        "rewards": noise(),
        "loss_mask": torch.rand(num_tokens, generator=generator) < 0.7,
        "loss_weights": torch.rand(num_tokens, generator=generator, dtype=torch.float64),
    }
    current = {
        "logprobs_T": old + 0.2 * noise(),
        "entropies_T": noise().abs(),
        "predicted_values_T": noise(),
    }
    return columns, current, torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))


def in_pairs(lengths):
    """Group ids that give every prompt two sequences; if the number of sequences is odd, the last prompt has one."""
    return {"group_id": torch.arange(len(lengths)) // 2}


def with_gradient(current):
    return {name: value_T.detach().clone().requires_grad_() for name, value_T in current.items()}


def run(objective, columns, current, sequence_T):
    leaves = with_gradient({name: v for name, v in current.items() if name.removesuffix("_T") in objective.reads})
    loss, metrics = objective(columns, sequence_T=sequence_T, **leaves)
    loss.backward()
    return loss.detach(), metrics, {name: leaf.grad for name, leaf in leaves.items()}


def test_the_sum_is_loss_plus_kl_minus_entropy_times_weight_over_trained_tokens():
    columns, current, sequence_T = mini_batch([5, 9])
    objective = Objective(ppo_clip_loss, {"eps_clip_high": 0.3}, kl_coef=0.5, kl_estimator="k2", entropy_coef=0.1)
    loss, metrics, _ = run(objective, columns, current, sequence_T)
    mask_T = columns["loss_mask"]
    token_loss = ppo_clip_loss(
        current["logprobs_T"], columns["old_logprobs"], columns["advantages"], mask_T, eps_clip_high=0.3
    )
    kl_T = estimate_kl(current["logprobs_T"], columns["ref_logprobs"], mask_T, estimator="k2")
    total_T = token_loss.loss_T + 0.5 * kl_T - 0.1 * current["entropies_T"]
    assert loss.item() == pytest.approx((columns["loss_weights"] * total_T)[mask_T].sum().item())
    means = {name: total / weight for name, (total, weight) in sum_metrics([metrics]).items()}
    assert means["loss"] == pytest.approx(loss.item())
    assert means["kl"] == pytest.approx(kl_T[mask_T].mean().item())
    assert means["entropy"] == pytest.approx(current["entropies_T"][mask_T].mean().item())
    assert means["clip_fraction"] == pytest.approx(token_loss.metrics["clip_fraction"][mask_T].double().mean().item())


def test_columns_are_those_that_the_terms_read():
    plain = Objective(ppo_clip_loss)
    assert plain.required_columns == ("loss_mask", "loss_weights", "old_logprobs", "advantages")
    assert plain.reads == {"logprobs"}
    full = Objective(ppo_clip_loss, kl_coef=0.1, entropy_coef=0.1)
    assert full.required_columns == ("loss_mask", "loss_weights", "old_logprobs", "advantages", "ref_logprobs")
    assert full.reads == {"logprobs", "entropies"}


def test_the_call_reads_prepared_columns_and_the_controller_reads_their_sources():
    objective = objective_from_spec(LossSpec(name="top_entropy"))
    assert "x_top_entropy" in objective.call_columns
    assert "old_entropies" not in objective.call_columns
    assert "old_entropies" in objective.required_columns
    assert "x_top_entropy" not in objective.required_columns


@pytest.mark.parametrize(("anchor", "other"), [("old", "rollout"), ("rollout", "old")])
def test_settings_choose_among_optional_columns(anchor, other):
    objective = objective_from_spec(LossSpec(name="cispo", params={"cispo_anchor": anchor}))
    assert f"{anchor}_logprobs" in objective.required_columns
    assert f"{other}_logprobs" not in objective.required_columns
    columns, current, sequence_T = mini_batch([5, 9])
    expected, _, _ = run(objective, columns, current, sequence_T)
    without, _, _ = run(objective, {n: v for n, v in columns.items() if n != f"{other}_logprobs"}, current, sequence_T)
    assert torch.equal(without, expected)


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=20, deadline=None)
@given(lengths=st.lists(st.integers(1, 8), min_size=2, max_size=6), seed=st.integers(0, 2**20))
def test_micro_batches_add_up_to_the_mini_batch(name, lengths, seed):
    """Loss, gradient and metrics of every loss of rl-core, for random splits in two. Columns hold NaN outside the
    mask."""
    terms = (
        {} if name in ("value_clip", "reward_model") else {"kl_coef": 0.3, "kl_estimator": "k3+", "entropy_coef": 0.2}
    )
    objective = objective_from_spec(LossSpec(name=name, **terms))
    columns, current, sequence_T = mini_batch(lengths, seed)
    poison = {n: torch.where(columns["loss_mask"], v, math.nan) for n, v in columns.items() if v.is_floating_point()}
    columns = {**columns, **poison}
    columns |= objective.prepare(columns | in_pairs(lengths), sequence_T, seed=1)
    loss, metrics, gradients = run(objective, columns, current, sequence_T)
    cut = seed % (len(lengths) - 1) + 1
    total, parts = torch.zeros((), dtype=torch.float64), []
    for part_T in (sequence_T < cut, sequence_T >= cut):
        part, part_current = ({n: v[part_T] for n, v in table.items()} for table in (columns, current))
        part_loss, part_metrics, part_gradients = run(objective, part, part_current, sequence_T[part_T])
        total += part_loss
        parts.append(part_metrics)
        for gradient_name, gradient_T in part_gradients.items():
            torch.testing.assert_close(gradient_T, gradients[gradient_name][part_T], rtol=1e-12, atol=1e-12)
            assert not gradient_T[~part["loss_mask"]].any()
    torch.testing.assert_close(total, loss, rtol=1e-12, atol=1e-12)
    whole, summed = sum_metrics([metrics]), sum_metrics(parts)
    assert {n: pair[0] for n, pair in summed.items()} == pytest.approx(
        {n: pair[0] for n, pair in whole.items()}, rel=1e-9, abs=1e-9
    )


def test_nan_at_masked_tokens_does_not_reach_a_function_that_knows_no_masks():
    def naive_loss(logprobs_T, advantages_T):
        return TokenLoss(-advantages_T * logprobs_T, {"logprob": logprobs_T.detach()})

    columns, current, sequence_T = mini_batch([5, 9])
    loss, _, gradients = run(Objective(naive_loss), columns, current, sequence_T)
    mask_T = columns["loss_mask"]
    poisoned = {n: torch.where(mask_T, v, math.nan) if v.is_floating_point() else v for n, v in columns.items()}
    current = {n: torch.where(mask_T, v, math.nan) for n, v in current.items()}
    poisoned_loss, metrics, poisoned_gradients = run(Objective(naive_loss), poisoned, current, sequence_T)
    assert torch.equal(poisoned_loss, loss)
    assert torch.equal(poisoned_gradients["logprobs_T"], gradients["logprobs_T"])
    assert all(math.isfinite(total) for total, _ in sum_metrics([metrics]).values())


def test_nan_at_a_trained_token_is_not_hidden():
    columns, current, sequence_T = mini_batch([5, 9])
    current["logprobs_T"][columns["loss_mask"].nonzero()[0]] = math.nan
    assert run(Objective(ppo_clip_loss), columns, current, sequence_T)[0].isnan()


def test_a_micro_batch_without_a_trained_token_has_zero_loss_and_gradient():
    columns, current, sequence_T = mini_batch([5])
    columns["loss_mask"] = torch.zeros(5, dtype=torch.bool)
    loss, metrics, gradients = run(
        Objective(ppo_clip_loss, kl_coef=0.1, entropy_coef=0.1), columns, current, sequence_T
    )
    assert loss.item() == 0.0
    assert not any(gradient_T.any() for gradient_T in gradients.values())
    assert sum_metrics([metrics])["ratio"] == (0.0, 0.0)


@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_of_an_empty_micro_batch_is_zero(name):
    """A rank with fewer sequences than micro-batches gets empty micro-batches."""
    objective = objective_from_spec(LossSpec(name=name))
    columns, current, sequence_T = mini_batch([5])
    columns |= objective.prepare(columns | in_pairs([5]), sequence_T, seed=0)
    empty, empty_current = ({n: v[:0] for n, v in table.items()} for table in (columns, current))
    assert run(objective, empty, empty_current, sequence_T[:0])[0].item() == 0.0


def test_the_names_that_users_know_are_installed():
    known = {"regular", "dual_clip", "gspo", "cispo", "rollout_is", "clip_cov", "kl_cov", "sapo", "dppo"}
    assert known | {"cross_entropy", "importance_sampling"} <= set(LOSSES)
    estimators = {plugin.name for plugin in installed("rl_core.advantage_estimators")}
    assert {"grpo", "gae", "rloo", "reinforce++", "maxrl"} <= estimators


@pytest.mark.parametrize("group", ["rl_core.policy_losses", "rl_core.advantage_estimators"])
def test_every_entry_point_loads_a_function_that_the_package_lists(group):
    for plugin in installed(group):
        if plugin.distribution.startswith("rl-core "):
            function = load(group, plugin.name)
            assert function is getattr(algorithms, function.__name__)
            assert function.__name__ in algorithms.__all__


def test_the_table_of_contents_is_complete():
    """Every listed name exists in its module and is among the imports for type checkers."""
    source = ast.parse(Path(algorithms.__file__).read_text())
    checked = [alias.name for node in ast.walk(source) if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert set(algorithms.__all__) <= set(checked)
    assert len(set(algorithms.__all__)) == len(algorithms.__all__)
    for name in algorithms.__all__:
        assert getattr(algorithms, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = algorithms.no_such_name


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_metrics_of_a_loss_may_be_booleans_integers_or_floats(dtype):
    def loss(logprobs_T):
        return TokenLoss(-logprobs_T, {"likely": (logprobs_T > -1.0).to(dtype)})

    columns, current, sequence_T = mini_batch([5, 9])
    _, metrics, _ = run(Objective(loss), columns, current, sequence_T)
    likely_T = current["logprobs_T"][columns["loss_mask"]] > -1.0
    assert total_metrics([metrics])["likely"] == (int(likely_T.sum()), len(likely_T))


def test_the_metrics_of_no_micro_batches_are_empty():
    assert sum_metrics([]) == {}


# --- errors at start-up ----------------------------------------------------------------------------------------------


def test_the_error_for_an_unknown_column_names_the_nearest():
    def bad_loss(logprobs_T, advantage_T): ...

    with pytest.raises(PluginError, match="Did you mean 'advantages_T'"):
        Objective(bad_loss)


def test_a_setting_that_is_not_keyword_only_is_explained():
    def bad_loss(logprobs_T, scale=1.0): ...

    with pytest.raises(PluginError, match=r"keyword-only: put it after `\*`"):
        Objective(bad_loss)


def test_variable_arguments_cannot_be_bound():
    def bad_loss(logprobs_T, **columns): ...

    with pytest.raises(PluginError, match="cannot be passed by name"):
        Objective(bad_loss)


def test_a_losss_own_columns_need_a_prepare_function():
    def bad_loss(logprobs_T, x_mark_T): ...

    with pytest.raises(PluginError, match="prepared_by"):
        Objective(bad_loss)


def test_prepare_cannot_read_the_current_model():
    def columns(logprobs_T): ...

    @prepared_by(columns)
    def bad_loss(logprobs_T, x_mark_T): ...

    with pytest.raises(PluginError, match="is computed only after this function has run"):
        Objective(bad_loss)


def test_prepare_must_make_what_the_loss_reads():
    def columns(mask_T):
        return {"x_other": mask_T}

    @prepared_by(columns)
    def bad_loss(logprobs_T, x_mark_T): ...

    with pytest.raises(PluginError, match="x_other"):
        Objective(bad_loss).try_out()


@pytest.mark.parametrize(
    ("params", "message"),
    [({"eps_clip_hihg": 0.3}, "Did you mean 'eps_clip_high'"), ({"eps_clip_low": 2.0}, "eps_clip_low")],
)
def test_settings_are_checked_before_training(params, message):
    with pytest.raises(ConfigError, match=message):
        objective_from_spec(LossSpec(name="regular", params=params))


def test_a_missing_setting_is_named():
    def needs_scale(logprobs_T, *, scale): ...

    with pytest.raises(ConfigError, match="needs the parameter 'scale'"):
        Objective(needs_scale)


def test_an_unknown_kl_estimator_is_refused():
    with pytest.raises(ConfigError, match="KL estimator"):
        objective_from_spec(LossSpec(name="regular", kl_estimator="k4"))


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda x: x, "returned Tensor"),
        (lambda x: TokenLoss(x.sum(), {}), "one value per token"),
        (lambda x: TokenLoss(x, {"mean": x.mean()}), "mean"),
        (lambda x: TokenLoss(x, {"mean": 1.0}), "float"),
        (lambda x: x / undefined, "NameError"),  # noqa: F821
    ],
)
def test_a_function_that_does_not_return_a_token_loss_fails_at_start_up(result, message):
    def bad_loss(logprobs_T):
        return result(logprobs_T)

    with pytest.raises(PluginError, match=message):
        Objective(bad_loss).try_out()


def test_a_missing_column_and_a_missing_current_value_are_named():
    columns, current, sequence_T = mini_batch([5])
    with pytest.raises(ShapeError, match="entropies"):
        Objective(ppo_clip_loss, entropy_coef=0.1)(columns, sequence_T=sequence_T, logprobs_T=current["logprobs_T"])
    del columns["advantages"]
    with pytest.raises(ShapeError, match="'advantages'"):
        Objective(ppo_clip_loss)(columns, sequence_T=sequence_T, logprobs_T=current["logprobs_T"])


def test_a_column_of_another_length_is_named():
    columns, current, sequence_T = mini_batch([5])
    columns["advantages"] = columns["advantages"][:4]
    with pytest.raises(ShapeError, match="advantages has 4 entries"):
        Objective(ppo_clip_loss)(columns, sequence_T=sequence_T, logprobs_T=current["logprobs_T"])


def test_a_users_function_works_by_its_path(tmp_path, monkeypatch):
    (tmp_path / "my_losses.py").write_text(
        textwrap.dedent(
            """
            import torch
            from rl_core.algorithms import TokenLoss, prepared_by

            def top_advantages(advantages_T, mask_T, *, share=0.5, seed=0):
                top = int(share * int(mask_T.sum()))
                return {"x_top": advantages_T >= advantages_T[mask_T].sort(descending=True).values[top]}

            @prepared_by(top_advantages)
            def my_loss(logprobs_T, advantages_T, x_top_T, *, scale=1.0):
                return TokenLoss(-scale * advantages_T * x_top_T * logprobs_T, {"top_fraction": x_top_T})
            """
        )
    )
    monkeypatch.syspath_prepend(tmp_path)
    objective = objective_from_spec(LossSpec(name="my_losses:my_loss", params={"share": 0.25, "scale": 2.0}))
    columns, current, sequence_T = mini_batch([5, 9])
    columns |= objective.prepare(columns, sequence_T, seed=0)
    loss, _, _ = run(objective, columns, current, sequence_T)
    total_T = -2.0 * columns["advantages"] * columns["x_top"] * current["logprobs_T"] * columns["loss_weights"]
    assert loss.item() == pytest.approx(total_T[columns["loss_mask"]].sum().item())
    with pytest.raises(ConfigError, match="Did you mean 'share'"):
        objective_from_spec(LossSpec(name="my_losses:my_loss", params={"shares": 0.25}))


def test_the_examples_of_the_documentation_run():
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    names: dict = {}
    for block in re.findall(r"```python\n(.*?)```", page[page.index("## Your own function") :], re.DOTALL):
        exec(block, names)
    Objective(names["my_loss"], {"power": 2.0}).try_out()
    Objective(names["best_tokens_loss"], {"share": 0.2}).try_out()


def test_importing_the_algorithms_needs_torch_alone():
    code = """
    import sys
    for name in ("attr", "attrs", "numpy", "click", "yaml", "ray", "transformers", "safetensors", "pyarrow"):
        sys.modules[name] = None  # makes its import fail
    import rl_core.algorithms as algorithms
    for name in algorithms.__all__:
        getattr(algorithms, name)
    """
    subprocess.run([sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)], check=True, timeout=250)
