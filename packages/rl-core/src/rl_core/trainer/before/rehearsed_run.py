"""Rehearses a step of each model: runs it on tensors without data, with the largest micro-batches of the run."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch

from rl_core.batch import Batch
from rl_core.columns import FIELDS
from rl_core.config import Config
from rl_core.errors import ConfigError
from rl_core.interfaces import LossSpec, Plan, RehearsedPhase, Role
from rl_core.layout.packing import padded_lengths
from rl_core.trainer.before.memory_plan import ModelOnRanks
from rl_core.trainer.before.planned_run import ArrangedModel, longest_sequence, micro_batch_size
from rl_core.trainer.before.settings import update_settings

_MICRO_BATCHES = 2
"""Largest number of micro-batches that are rehearsed. A third would need no more memory than the second: the first
leaves gradients in memory, and later ones are added to them."""


@attrs.frozen(kw_only=True)
class RehearsedModel:
    """The result of rehearsing a step of a model's first rank."""

    phases: tuple[RehearsedPhase, ...]
    num_micro_batches: int
    """Number of rehearsed micro-batches; `phases` count the operations of all of them."""
    micro_batch_tokens: int
    """Tokens of each micro-batch, before it is split over ranks."""


def rehearsed_model(config: Config, role: Role, model: ArrangedModel) -> RehearsedModel:
    """Rehearses a step of the model's first rank.

    Raises:
        ConfigError: the backend cannot rehearse, or cannot rehearse this configuration.
    """
    if not model.backend.can_rehearse:
        raise ConfigError(
            f"the backend {model.backend.name!r} cannot rehearse a step; see its planned memory with rl plan, or set "
            "trainer.strategy=fsdp, which can",
            key="trainer.strategy",
        )
    tokens, count = micro_batch_size(config, role, model.mesh)
    longest = int(padded_lengths([longest_sequence(config)], model.mesh.sequence_multiple)[0])
    per_micro_batch, num_micro_batches = max(1, tokens // longest), min(count, _MICRO_BATCHES)
    batch, plan = _fullest_batch(config, longest_sequence(config), per_micro_batch, num_micro_batches)
    phases = model.backend.rehearse(model.spec, model.mesh.world_size, batch=batch, plan=plan, loss=_loss(config, role))
    return RehearsedModel(
        phases=phases, num_micro_batches=num_micro_batches, micro_batch_tokens=per_micro_batch * longest
    )


def planned_phase(planned: ModelOnRanks, phase: str) -> Mapping[str, int]:
    """Kind of memory, as in `RehearsedPhase.parts` → bytes planned for it in this phase on the first rank's device."""
    rank = planned.ranks[0]
    held = {"parameters": rank.parameter_bytes, "gradients": rank.gradient_bytes, "optimizer": rank.optimizer_bytes}
    passing = {"gathered": rank.gathered_bytes, "activations": rank.activation_bytes}
    parts = {"train": held | passing, "step": held, "score": {"parameters": rank.parameter_bytes} | passing}[phase]
    return {name: size for name, size in parts.items() if size}


def _loss(config: Config, role: Role) -> LossSpec | None:
    if role == "reference":
        return None
    settings = update_settings(config)
    model = settings.policy if role == "policy" else settings.critic
    assert model is not None, "a run with a critic has settings for it"
    return model.loss


def _fullest_batch(config: Config, longest: int, per_micro_batch: int, num_micro_batches: int) -> tuple[Batch, Plan]:
    """Makes a batch in which every prompt and response has the largest length, with every column that a loss may read.
    Also returns the sequences of each micro-batch."""
    count = per_micro_batch * num_micro_batches
    is_sampled_T = torch.arange(longest) >= config.trainer.max_prompt_length
    masks = {"sampled": is_sampled_T, "loss_mask": is_sampled_T}
    columns = {
        name: torch.zeros(longest, dtype=getattr(torch, field.dtypes[0]))
        for name, field in FIELDS.items()
        if field.axes == "T" and name not in ("routed", "kept_counts")
    }
    batch = Batch.from_sequences([{**columns, **masks}] * count)
    return batch, [list(range(first, first + per_micro_batch)) for first in range(0, count, per_micro_batch)]
