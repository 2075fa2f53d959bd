"""Compares pairwise losses, alone and on ranks of every backend, with a single autograd graph over whole pairs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import linear, logsigmoid

from rl_core.algorithms import Objective, dpo_loss, prompt_token_sum, reward_model_loss
from rl_core.algorithms.preference_losses import dpo_columns, reward_model_columns
from rl_core.batch import Batch
from rl_core.errors import ConfigError, DataError, ShapeError
from rl_core.interfaces import LossSpec
from rl_core.rank_kit.model_files import HEAD_FILE, write_head
from rl_core.rank_kit.objectives import objective_from_spec
from rl_transformers.testing.cases import LIMITS, TEMPERATURE, Case, Variant, open_case
from rl_transformers.testing.ranks import PRELOADED, RankGroup

BETA = 0.3
PRELOADED.update(dict.fromkeys(["rl_fsdp.worker", "rl_deepspeed.worker", "rl_megatron.rank.worker"]))


def random_pairs(num_pairs: int, *, seed: int = 0) -> Batch:
    """A batch of pairs with sequences of 4 to 12 tokens. The two sequences of a pair are not adjacent; some tokens are
    not trained on; the first sequence of each pair is preferred."""
    generator = torch.Generator().manual_seed(seed)
    sequences = []
    for number in range(2 * num_pairs):
        length = 4 + int(torch.randint(9, (1,), generator=generator))
        trained_T = torch.arange(length) >= 2
        old_T, ref_T = -torch.rand(2, length, generator=generator)
        rewards_T = torch.zeros(length)
        rewards_T[-1] = float(number < num_pairs)
        sequences.append(
            {
                "tokens": torch.ones(length, dtype=torch.int64),
                "sampled": trained_T,
                "loss_mask": trained_T,
                "old_logprobs": old_T,
                "ref_logprobs": ref_T,
                "values": ref_T * 3,
                "rewards": rewards_T,
                "group_id": 7 * (number % num_pairs),
            }
        )
    return Batch.from_sequences(sequences)


def weighted(batch: Batch) -> Batch:
    weights_T = prompt_token_sum(batch["loss_mask"], batch.sequence_index, batch["group_id"])
    return batch.with_columns(loss_weights=weights_T)


def slow_loss(batch: Batch, scores_T: Tensor, pair_loss: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """The mean of `pair_loss` over pairs, computed from the trained tokens of both sequences."""
    losses = []
    for group in batch["group_id"].unique().tolist():
        parts = {}
        for n in (batch["group_id"] == group).nonzero().flatten().tolist():
            tokens = slice(int(batch.offsets[n]), int(batch.offsets[n + 1]))
            parts[float(batch["rewards"][tokens].sum())] = scores_T[tokens][batch["loss_mask"][tokens]]
        losses.append(pair_loss(parts[1.0], parts[0.0]))
    return torch.stack(losses).mean()


def dpo(preferred_T: Tensor, other_T: Tensor) -> Tensor:
    return -logsigmoid(BETA * (preferred_T.sum() - other_T.sum()))


def smooth_dpo(preferred_T: Tensor, other_T: Tensor) -> Tensor:
    margin = BETA * (preferred_T.sum() - other_T.sum())
    return -0.9 * logsigmoid(margin) - 0.1 * logsigmoid(-margin)


def ipo(preferred_T: Tensor, other_T: Tensor) -> Tensor:
    return (preferred_T.mean() - other_T.mean() - 1 / (2 * BETA)).square()


def of_rewards(preferred_T: Tensor, other_T: Tensor) -> Tensor:
    return -logsigmoid(preferred_T[-1] - other_T[-1])


@pytest.mark.parametrize(
    ("settings", "pair_loss"),
    [
        ({}, dpo),
        ({"label_smoothing": 0.1}, smooth_dpo),
        ({"dpo_type": "ipo"}, ipo),
    ],
)
@pytest.mark.parametrize("num_parts", [1, 2])
def test_value_and_gradient_are_those_of_whole_pairs(num_parts: int, settings: dict[str, Any], pair_loss: Any):
    batch = weighted(random_pairs(9))
    objective = Objective(dpo_loss, {"dpo_beta": BETA, **settings})
    batch = batch.with_columns(**objective.prepare(batch.columns, batch.sequence_index, seed=0))
    logprobs_T = batch["old_logprobs"].clone().requires_grad_()
    found = 0.0
    for part in range(num_parts):
        # The sequences of a pair are 9 apart, so two parts split every pair.
        rows = torch.arange(part, batch.num_sequences, num_parts)
        micro_batch, tokens = batch.select(rows), batch.token_index(rows)
        loss, _ = objective(micro_batch.columns, sequence_T=micro_batch.sequence_index, logprobs_T=logprobs_T[tokens])
        loss.backward()
        found += loss.item()
    expected_T = batch["old_logprobs"].clone().requires_grad_()
    expected = slow_loss(batch, expected_T - batch["ref_logprobs"], pair_loss)
    expected.backward()
    assert found == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(logprobs_T.grad, expected_T.grad, rtol=1e-5, atol=1e-7)


def test_a_reward_model_reads_the_last_trained_token():
    batch = random_pairs(9)
    mask_T = batch["loss_mask"].clone()
    mask_T[batch.offsets[10:] - 1] = False  # the last tokens of the responses that are not preferred
    batch = weighted(batch.with_columns(loss_mask=mask_T))
    objective = Objective(reward_model_loss)
    batch = batch.with_columns(**objective.prepare(batch.columns, batch.sequence_index, seed=0))
    values_T = batch["values"].clone().requires_grad_()
    loss, metrics = objective(batch.columns, sequence_T=batch.sequence_index, predicted_values_T=values_T)
    loss.backward()
    expected_T = batch["values"].clone().requires_grad_()
    expected = slow_loss(batch, expected_T, of_rewards)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(values_T.grad, expected_T.grad, rtol=1e-5, atol=1e-7)
    assert {"pair_accuracy", "pair_margin", "pair_preferred", "pair_other"} < metrics.keys()


def test_metrics_are_means_over_pairs_however_long_they_are():
    batch = weighted(random_pairs(5))
    objective = Objective(dpo_loss, {"dpo_beta": BETA})
    batch = batch.with_columns(**objective.prepare(batch.columns, batch.sequence_index, seed=0))
    _, sums = objective(batch.columns, sequence_T=batch.sequence_index, logprobs_T=batch["old_logprobs"])
    metrics = {name: float(total / weight) for name, (total, weight) in sums.items()}
    ratio_T = batch["old_logprobs"] - batch["ref_logprobs"]
    margin = slow_loss(batch, ratio_T, lambda preferred_T, other_T: BETA * (preferred_T.sum() - other_T.sum()))
    right = slow_loss(batch, ratio_T, lambda preferred_T, other_T: (preferred_T.sum() > other_T.sum()).float())
    assert metrics["pair_margin"] == pytest.approx(float(margin), rel=1e-4)
    assert metrics["pair_accuracy"] == pytest.approx(float(right), rel=1e-4)
    assert metrics["pair_preferred"] - metrics["pair_other"] == pytest.approx(metrics["pair_margin"], rel=1e-4)


def test_equal_rewards_and_single_responses_have_no_loss():
    batch = random_pairs(3)
    rewards_T = batch["rewards"].clone()
    rewards_T[batch["group_id"][batch.sequence_index] == 0] = 0.0
    # Without row 4, the other response of the second pair.
    batch = weighted(batch.with_columns(rewards=rewards_T).select([0, 1, 2, 3, 5]))
    objective = Objective(dpo_loss)
    made = objective.prepare(batch.columns, batch.sequence_index, seed=0)
    group_T = batch["group_id"][batch.sequence_index]
    for name in ("x_pair_slope", "x_pair_loss"):
        assert not made[name][group_T != 14].any()
        assert made[name][group_T == 14].any()


@pytest.mark.parametrize("row", [1, 4], ids=["preferred", "other"])
@pytest.mark.parametrize("function", [dpo_loss, reward_model_loss])
def test_a_pair_with_an_untrained_response_has_no_loss(function: Any, row: int):
    batch = random_pairs(3)
    mask_T = batch["loss_mask"] & (batch.sequence_index != row)
    batch = weighted(batch.with_columns(loss_mask=mask_T, rewards=batch["rewards"] + 0.5 * (batch["rewards"] == 0)))
    made = Objective(function).prepare(batch.columns, batch.sequence_index, seed=0)
    group_T = batch["group_id"][batch.sequence_index]
    for name in ("x_pair_slope", "x_pair_loss"):
        assert not made[name][group_T == 7].any()
        assert made[name][group_T != 7].any()


def pair_columns(batch: Batch, sequence_T: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The columns of both losses, with the given index of each token's sequence."""
    group_T = batch["group_id"][batch.sequence_index]
    labels = (batch["rewards"], batch["loss_mask"], sequence_T, group_T)
    return (
        dpo_columns(batch["old_logprobs"], batch["ref_logprobs"], *labels),
        reward_model_columns(batch["values"], *labels),
    )


def test_numbers_without_tokens_are_left_out_of_the_sequences():
    batch = random_pairs(3)
    expected, left_out = (
        pair_columns(batch, sequence_T) for sequence_T in (batch.sequence_index, 3 * batch.sequence_index + 2)
    )
    for columns, same in zip(left_out, expected, strict=True):
        torch.testing.assert_close(columns, same, rtol=0, atol=0)


def test_a_batch_without_tokens_has_empty_columns():
    floats_T, mask_T, index_T = torch.zeros(0), torch.zeros(0, dtype=torch.bool), torch.zeros(0, dtype=torch.int64)
    for columns in (
        dpo_columns(floats_T, floats_T, floats_T, mask_T, index_T, index_T),
        reward_model_columns(floats_T, floats_T, mask_T, index_T, index_T),
    ):
        assert all(values_T.numel() == 0 for values_T in columns.values())


def test_tokens_out_of_order_and_rewards_that_are_not_finite_are_refused():
    batch = random_pairs(2)
    with pytest.raises(ShapeError, match="sequence_T falls from 3 to 2"):
        pair_columns(batch, batch.sequence_index.flip(0))
    with pytest.raises(DataError, match=r"rewards_T\[\d+\] is nan; expected a finite number"):
        pair_columns(batch.with_columns(rewards=batch["rewards"] * math.nan), batch.sequence_index)


def test_three_responses_to_a_prompt_are_refused():
    batch = random_pairs(2)
    batch = weighted(batch.with_columns(group_id=torch.tensor([0, 0, 0, 7])))
    with pytest.raises(ShapeError, match="n_samples_per_prompt=2"):
        Objective(dpo_loss).prepare(batch.columns, batch.sequence_index, seed=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dpo_beta": 0.0}, "dpo_beta: got 0; expected above 0"),
        ({"dpo_type": "hinge"}, "dpo_type: got 'hinge'; expected sigmoid or ipo"),
        ({"label_smoothing": 0.7}, "label_smoothing"),
        ({"dpo_beta": math.nan}, "dpo_beta"),
    ],
)
def test_settings_out_of_range_are_refused_before_a_run(settings: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        objective_from_spec(LossSpec(name="dpo", params=settings))


# --- on ranks ---------------------------------------------------------------------------------------------------------


def backend_of(name: str) -> tuple[Any, Callable[..., Any]]:
    if name.startswith("fsdp"):
        import rl_fsdp

        return getattr(rl_fsdp, name), rl_fsdp.FsdpOptions
    if name == "deepspeed":
        from rl_deepspeed import DeepSpeedOptions, ZeroOptimization, deepspeed

        return deepspeed, lambda stage=3: DeepSpeedOptions(zero_optimization=ZeroOptimization(stage=stage))
    from rl_megatron import MegatronOptions, megatron

    return megatron, MegatronOptions


@attrs.frozen
class Arrangement:
    """A backend, its mesh, and the model that it trains."""

    backend: str
    world_size: int
    options: Mapping[str, Any] = attrs.field(factory=dict)
    family: str = "qwen3"
    trains_values: bool = True


ARRANGEMENTS = {
    "FSDP, 1 rank": Arrangement("fsdp", 1),
    "FSDP, 2 ranks": Arrangement("fsdp", 2),
    "FSDP, Ulysses": Arrangement("fsdp", 2, {"sequence_parallel_size": 2}),
    "FSDP, experts": Arrangement("fsdp", 2, family="qwen3_moe"),
    "FSDP1, 2 ranks": Arrangement("fsdp1", 2, trains_values=False),
    "ZeRO-2, 2 ranks": Arrangement("deepspeed", 2, {"stage": 2}),
    "ZeRO-3, 2 ranks": Arrangement("deepspeed", 2),
    "Megatron, TP 2": Arrangement("megatron", 2, {"tensor_model_parallel_size": 2}),
    "Megatron, PP 2": Arrangement("megatron", 2, {"pipeline_model_parallel_size": 2}),
    "Megatron, CP 2": Arrangement("megatron", 2, {"context_parallel_size": 2}),
    "Megatron, EP 2": Arrangement("megatron", 2, {"expert_model_parallel_size": 2}, family="qwen3_moe"),
    "Megatron, TP 2, 4 ranks": Arrangement("megatron", 4, {"tensor_model_parallel_size": 2}),
}
IN_MAKE_TEST = ("FSDP, 1 rank", "FSDP, 2 ranks", "ZeRO-3, 2 ranks", "Megatron, TP 2", "Megatron, PP 2")


@attrs.frozen
class OnRanks:
    """A pairwise loss on ranks, and its definition."""

    loss: LossSpec
    role: Literal["policy", "critic"]
    scored: str
    """Which score of the ranks becomes the batch's `column`."""
    column: str
    pair_loss: Callable[[Tensor, Tensor], Tensor]


LOSSES = {
    "dpo": OnRanks(LossSpec(name="dpo", params={"dpo_beta": BETA}), "policy", "logprobs", "old_logprobs", dpo),
    "reward_model": OnRanks(LossSpec(name="reward_model"), "critic", "values", "values", of_rewards),
}


@pytest.fixture(
    params=[pytest.param(name, marks=() if name in IN_MAKE_TEST else pytest.mark.parity) for name in ARRANGEMENTS],
    scope="module",
)
def arranged(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], tuple[Case, RankGroup]]]:
    """A function that starts the ranks of a role. All roles have the same model and batch."""
    arrangement = ARRANGEMENTS[request.param]
    backend, options = backend_of(arrangement.backend)
    variant = Variant(checkpoint={"tie_word_embeddings": False, "family": arrangement.family})
    with open_case(backend, options(), variant, tmp_path_factory.mktemp("case"), timeout_s=120) as case:
        with_head = Path(case.spec.model.path or "")
        weight = 0.3 * torch.randn(1, 32, generator=torch.Generator().manual_seed(4))
        write_head({"value_head.weight": weight, "value_head.bias": torch.tensor([0.2])}, with_head)

        def start(role: Any) -> tuple[Case, RankGroup]:
            if role == "critic" and not arrangement.trains_values:
                pytest.skip(f"{request.param} cannot train a model with a value head")
            spec = attrs.evolve(case.spec, role=role, options=options(**arrangement.options))
            group = RankGroup(backend, spec, arrangement.world_size, directory=case.directory, timeout_s=120)
            case.started.append(group)
            return case, group

        yield start


@pytest.mark.parametrize("name", LOSSES)
def test_ranks_compute_the_gradient_of_whole_pairs(name: str, arranged: Callable[[str], tuple[Case, RankGroup]]):
    on_ranks = LOSSES[name]
    case, group = arranged(on_ranks.role)
    # Six of the suite's sequences that have a trained token. The two sequences of a pair are not adjacent.
    rows = [n for n in range(case.batch.num_sequences) if _trained(case.batch, n).any()][:6]
    batch = case.batch.select(rows).with_columns(group_id=torch.tensor([5, 6, 7, 5, 6, 7]))
    batch = batch.with_columns(rewards=_rewards(batch, preferred=[0, 1, 2]))
    scores_T = group.forward(batch, LIMITS, temperature=TEMPERATURE)[on_ranks.scored]
    batch = weighted(batch.with_columns(**{on_ranks.column: scores_T}))
    objective = objective_from_spec(on_ranks.loss)
    batch = batch.with_columns(**objective.prepare(batch.columns, batch.sequence_index, seed=0))
    metrics = group.forward_backward(batch, LIMITS, on_ranks.loss, temperature=TEMPERATURE)

    loss, wanted = _of_one_graph(on_ranks, case, batch)
    assert metrics["loss"][0] == pytest.approx(loss, rel=1e-5)
    found = group.gradients()
    assert _difference(found, wanted) <= 1e-5  # the suite's tolerance for gradients
    swapped = batch.with_columns(rewards=_rewards(batch, preferred=[0, 1, 5]))
    assert _difference(found, _of_one_graph(on_ranks, case, swapped)[1]) > 0.1


def _rewards(batch: Batch, *, preferred: Sequence[int]) -> Tensor:
    rewards_T = torch.zeros(batch.num_tokens)
    for n in preferred:
        rewards_T[batch.token_index([n])[_trained(batch, n)][-1]] = 1.0
    return rewards_T


def _of_one_graph(on_ranks: OnRanks, case: Case, batch: Batch) -> tuple[float, dict[str, Tensor]]:
    """The loss computed with transformers and autograd, and the gradients of all weights that have a gradient."""
    reference = case.new_reference()
    sequences = [batch["tokens"][batch.token_index([n])] for n in range(batch.num_sequences)]
    if on_ranks.role == "policy":
        scores_T = torch.cat([reference.score(tokens_T, TEMPERATURE)[0] for tokens_T in sequences])
        expected = slow_loss(batch, scores_T - batch["ref_logprobs"], on_ranks.pair_loss)
        expected.backward()
        return expected.item(), reference.gradients()
    head = load_file(Path(case.spec.model.path or "") / HEAD_FILE)
    weights = [head[f"value_head.{part}"].requires_grad_() for part in ("weight", "bias")]
    values = []
    for tokens_T in sequences:
        hidden_TH = reference.model.model(input_ids=tokens_T[None], use_cache=False).last_hidden_state[0]
        values.append(torch.cat([torch.zeros(1), linear(hidden_TH[:-1], *weights).squeeze(-1)]))
    expected = slow_loss(batch, torch.cat(values), on_ranks.pair_loss)
    expected.backward()
    trunk = {name: value for name, value in reference.gradients().items() if name != "lm_head.weight"}
    return expected.item(), trunk | {
        f"value_head.{part}": w.grad for part, w in zip(("weight", "bias"), weights, strict=True)
    }


def _difference(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """Relative L2 difference over all weights together. Names may omit the prefix `model.`."""
    found, wanted = ({name.removeprefix("model."): w for name, w in each.items()} for each in (found, wanted))
    assert found.keys() == wanted.keys()
    norm = torch.stack([value.norm() for value in wanted.values()]).norm()
    assert norm > 1e-3
    return float(torch.stack([(found[name] - value).norm() for name, value in wanted.items()]).norm() / norm)


def _trained(batch: Batch, n: int) -> Tensor:
    return batch["loss_mask"][batch.token_index([n])]
