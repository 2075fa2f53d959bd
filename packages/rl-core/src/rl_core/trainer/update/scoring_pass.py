"""Decides, from the configuration, which scores of the policy a step computes before its first optimizer step.

`old_logprobs` are log-probs under the weights at the start of the update, no matter which weights sampled the tokens.
The first optimizer step on a batch computes these log-probs anyway. If nothing reads scores earlier, the step's loss
uses these log-probs, detached (`LossSpec.old_is_current`), and the first mini-batch needs no scoring pass. Later
mini-batches are scored before the first step, because this step changes the weights. Later epochs over the first
mini-batch reuse the log-probs that the first step computed.
"""

from __future__ import annotations

import attrs

from rl_core import plugins
from rl_core.config import Config, needs_critic, needs_engine
from rl_core.function_settings import positional_parameters
from rl_core.interfaces import Backend, LossSpec
from rl_core.rank_kit.objectives import objective_from_spec
from rl_core.trainer.update.batch_advantages import Estimator


@attrs.frozen(kw_only=True)
class ScoringPass:
    """Which scores the policy computes before training on a batch, and whether its first optimizer step returns
    log-probs."""

    covers_batch: bool = True
    """Whether all sequences are scored before the first optimizer step; `reason` says why."""
    first_is_own: bool = False
    """Whether the loss reads old log-probs and the first optimizer step computes them itself, so that only later
    mini-batches are scored."""
    keeps_first: bool = False
    """Whether the first optimizer step returns its log-probs, because later epochs read them or they are compared with
    the engine's."""
    scores: tuple[str, ...] | None = None
    """Names of the scores to compute; None: all that the model has."""
    extent: str = "every batch"
    """Describes, for users, which part of a batch is scored before training."""
    reason: str = ""
    """Describes, for users, why this part is scored."""

    def __str__(self) -> str:
        return f"{self.extent}: {self.reason}"


def scoring_pass(config: Config, loss: LossSpec, *, estimator: Estimator | None, is_corrected: bool) -> ScoringPass:
    """Decides which scores the policy computes in every step of a run.

    Args:
        config: a resolved configuration.
        loss: the policy's loss.
        estimator: the advantage estimator; None: the loss reads no advantages.
        is_corrected: whether an off-policy correction weights or masks tokens.
    """
    objective, trainer = objective_from_spec(loss), config.trainer
    columns = {*objective.prepare_columns, *objective.call_columns}
    backend: Backend = plugins.load("rl_core.backends", trainer.strategy, key="trainer.strategy")
    compares, samples = objective.compares_with_old, needs_engine(config)
    reader = _reader(config, objective.prepare_columns, columns, estimator, is_corrected=is_corrected)
    if reader is None:
        reader = _of_backend(config, backend)
    if reader is not None:
        names = ("logprobs", "entropies") if "old_entropies" in columns else ("logprobs",)
        scores = None if "values" in columns and not needs_critic(config) else names
        return ScoringPass(scores=scores, reason=reader)
    epochs = trainer.update_epochs_per_batch
    return ScoringPass(
        covers_batch=False,
        first_is_own=compares,
        keeps_first=samples or (compares and epochs > 1),
        scores=("logprobs",),
        extent=_extent(config) if compares else "none",
        reason=_why_less(config, loss) if compares else "nothing reads old log-probs",
    )


def _extent(config: Config) -> str:
    num_mini_batches = -(-config.trainer.train_batch_size // config.trainer.policy_mini_batch_size)
    return "none" if num_mini_batches == 1 else f"mini-batches from the second of {num_mini_batches}"


def _why_less(config: Config, loss: LossSpec) -> str:
    kept = ", kept for later epochs" if config.trainer.update_epochs_per_batch > 1 else ""
    return f"the first optimizer step computes its own old log-probs{kept} (policy_loss_type={loss.name})"


def _reader(
    config: Config,
    prepare_columns: tuple[str, ...],
    columns: set[str],
    estimator: Estimator | None,
    *,
    is_corrected: bool,
) -> str | None:
    """Describes what reads the policy's scores before the first optimizer step; None if nothing does."""
    algorithm, name = config.trainer.algorithm, config.trainer.algorithm.policy_loss_type
    if algorithm.use_kl_in_reward:
        return "the KL in the reward reads the scores (trainer.algorithm.use_kl_in_reward)"
    if is_corrected:
        return "the off-policy correction reads the scores (trainer.algorithm.off_policy_correction)"
    if estimator is not None and "old_logprobs_T" in positional_parameters(estimator):
        return f"the advantage estimator reads the scores (advantage_estimator={algorithm.advantage_estimator})"
    # With a critic, `values` are the critic's. Without one, they come from a policy with a value head.
    of_policy = {"old_entropies"} if needs_critic(config) else {"old_entropies", "values"}
    if columns & of_policy or "old_logprobs" in prepare_columns:
        return f"the loss reads the scores of the whole mini-batch (policy_loss_type={name})"
    if config.trainer.log_sample_logprobs:
        return "samples are written with the scores (trainer.log_sample_logprobs)"
    return None


def _of_backend(config: Config, backend: Backend) -> str | None:
    """Describes why the backend cannot train without the scoring pass; None if it can."""
    options = config.trainer.policy.options(backend.config_section)
    if backend.records_routes(options):
        return f"training replays the routes of the scoring pass (trainer.policy.{backend.config_section})"
    return None
