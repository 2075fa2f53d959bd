"""Saves and loads the trained models of a run: policy and critic."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import attrs

from rl_core.errors import CheckpointError
from rl_core.trainer.update.served_reference import ServedReference
from rl_core.workers import WorkerGroup


@attrs.frozen(kw_only=True, eq=False)
class Models:
    """The handles of a run's models, through which the controller calls their ranks or engine."""

    policy: WorkerGroup
    reference: WorkerGroup | ServedReference | None = None
    """Computes log-probs for KL terms and distillation. It is never trained, so it is never saved. None: nothing reads
    its log-probs."""
    critic: WorkerGroup | None = None
    """Computes values for advantage estimators that read them; None: the estimator reads none."""
    stop_tokens: tuple[int, ...] = ()
    """The tokens that end a response of the policy, besides those that its generation configuration names."""

    async def save_state(self, checkpoint: Path) -> None:
        """Saves weights, optimizer and schedule of the trained models."""
        await self.policy.save_state(checkpoint / "policy")
        if self.critic is not None:
            await self.critic.save_state(checkpoint / "critic")

    async def start_saving(self, checkpoint: Path) -> None:
        """Saves like `save_state`, but in the background: returns when the state is copied to memory."""
        await self.policy.start_saving(checkpoint / "policy")
        if self.critic is not None:
            await self.critic.start_saving(checkpoint / "critic")

    async def has_saved(self) -> bool:
        """Whether the save begun by `start_saving` is complete. If the save of a model failed, raises the error as
        soon as no model is writing any more."""
        answers: list[bool] = []
        errors: list[CheckpointError] = []
        for group in (self.policy, self.critic):
            try:
                answers += [] if group is None else [await group.has_saved()]
            except CheckpointError as error:
                errors.append(error)
        if errors and all(answers):
            raise errors[0]
        return all(answers) and not errors

    async def load_state(self, checkpoint: Path) -> None:
        """Restores the state that `save_state` wrote. Raises CheckpointError if this fails."""
        await self.policy.load_state(checkpoint / "policy")
        if self.critic is not None:
            await self.critic.load_state(checkpoint / "critic")

    async def save_model(self, directory: Path) -> None:
        """Writes the policy in Hugging Face format, and the critic into the subfolder `critic`."""
        await self.policy.save_model(directory)
        if self.stop_tokens:
            _name_stop_tokens(directory, self.stop_tokens)
        if self.critic is not None:
            await self.critic.save_model(directory / "critic")


def _name_stop_tokens(directory: Path, stop_tokens: Sequence[int]) -> None:
    """Adds the tokens to `eos_token_id` of the exported generation configuration, so that whoever serves the model
    stops where the run's engines stopped. Engines that find no such file read `eos_token_id` of config.json."""
    if not stop_tokens:
        return
    files = [directory / name for name in ("generation_config.json", "config.json")]
    fields = next((json.loads(file.read_text()) for file in files if file.exists()), {})
    given = fields.get("eos_token_id")
    known = [given] if isinstance(given, int) else list(given or ())
    ends = list(dict.fromkeys([*known, *stop_tokens]))
    if ends != known:
        fields = fields if files[0].exists() else {}
        files[0].write_text(json.dumps({**fields, "eos_token_id": ends}, indent=2) + "\n")
