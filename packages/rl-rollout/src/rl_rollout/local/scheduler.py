"""Decides which samples wait and which run, pauses and aborts them, and changes the weight version.

All calls block and start no threads; `engine` makes them on its own thread. Between two calls, every sample is in
exactly one place: in `_held` (submitted during a pause), in `_waiting`, or in the rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from transformers import PreTrainedModel

from rl_core.interfaces import Completion, PauseMode
from rl_rollout.local.model import StagedWeights, load_weights, require_complete
from rl_rollout.local.rows import Ended, Rows, Sample
from rl_transformers.expert_choices import ExpertChoices

_JOIN_FRACTION = 8
"""Waiting samples join the running samples only when 1/8 of the rows are free, or when enough rows are free for all
waiting samples. Each join costs a prefill and a copy of the cache."""


class Scheduler:
    """Turns samples into completions, at most `max_num_seqs` at a time."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_num_seqs: int,
        choices: ExpertChoices | None = None,
        return_kept_tokens: bool = False,
    ) -> None:
        self._model = model
        self._max_num_seqs = max_num_seqs
        self._rows = Rows(model, choices, return_kept_tokens=return_kept_tokens)
        self._waiting: deque[Sample] = deque()
        self._held: deque[Sample] = deque()
        self._pause: PauseMode | None = None
        self.version = -1

    @property
    def num_running(self) -> int:
        return len(self._rows)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._held)

    @property
    def has_work(self) -> bool:
        """Whether the engine must call `step`: there are samples to advance, and no pause stops them."""
        return self._pause in (None, "wait") and bool(self._waiting or len(self._rows))

    def submit(self, samples: Iterable[Sample]) -> None:
        """Adds samples to the queue; during a pause they are held until its end."""
        (self._waiting if self._pause is None else self._held).extend(samples)

    def step(self) -> Ended:
        """Lets waiting samples join if enough rows are free, then adds one token to every row."""
        ended = []
        free = self._max_num_seqs - len(self._rows)
        if self._waiting and free >= min(len(self._waiting), -(-self._max_num_seqs // _JOIN_FRACTION)):
            joining = [self._waiting.popleft() for _ in range(min(free, len(self._waiting)))]
            ended += self._rows.join(joining, self.version)
        if len(self._rows):
            ended += self._rows.step(self.version)
        return ended

    def pause(self, mode: PauseMode) -> Ended:
        """Pauses sampling; returns the samples that the pause ended. `keep` stops all samples where they are; `abort`
        also ends them. `wait` lets the samples submitted so far finish: call `step` until `has_work` is false."""
        self._pause = mode
        return self.abort(None) if mode == "abort" else []

    def resume(self) -> None:
        self._pause = None
        self._waiting.extend(self._held)
        self._held.clear()

    def abort(self, owners: set[Any] | None) -> Ended:
        """Ends the samples of these owners (None: all), and returns each with the tokens sampled so far."""
        ended = self._rows.remove(self._rows.rows_of(owners))
        for line in (self._waiting, self._held):
            out = [sample for sample in line if owners is None or sample.owner in owners]
            ended += [(sample, _NOTHING) for sample in out]
            kept = [sample for sample in line if not (owners is None or sample.owner in owners)]
            line.clear()
            line.extend(kept)
        return ended

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """See `Scoring.score`."""
        return [self._rows.score(sequence) for sequence in sequences]

    def update_weights(self, staged: StagedWeights) -> None:
        """Loads a weight version, with which all later tokens are sampled, and recomputes the cache of running rows.
        Raises WeightSyncError if the weights do not fit the model, which then stays unchanged."""
        require_complete(self._model, staged)
        load_weights(self._model, staged)
        self.version = staged.version
        self._rows.recompute()


_NOTHING = Completion(tokens=(), logprobs=(), policy_versions=(), stop_reason="abort")
