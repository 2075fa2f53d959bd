"""Reads and writes `samples.jsonl`, which contains the policy's responses and their rewards."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import attrs

from rl_core.errors import DataError
from rl_core.interfaces import Row, Trajectory
from rl_core.reports.jsonl import StepLog, read_rows

if TYPE_CHECKING:
    from rl_core.batch import Batch

FILE_NAME = "samples.jsonl"


@attrs.frozen(kw_only=True)
class WrittenSample:
    """One row of the file: one sample of one prompt."""

    step: int
    purpose: Literal["train", "eval"] = attrs.field(validator=attrs.validators.in_(("train", "eval")))
    group: int
    """Equal for the samples of one prompt within a step."""
    sample: int
    """Index within the group."""
    prompt: str
    """The prompt as the policy saw it, including the chat template."""
    response: str
    reward: float | None
    """None for a failed rollout, which has no reward. The file also has null for a reward that is not finite."""
    stop_reason: str | None
    """Stop reason of the last turn; None for a failed rollout."""
    end: str = "done"
    """Why the episode ended: `done`, or a limit (`max_turns`, `context`). Without meaning for a failed rollout."""
    metrics: Mapping[str, float] = attrs.field(factory=dict)
    """Metrics of the environment."""
    failure: str | None = None
    ground_truth: str | None = None
    """The row's correct answer; None if the row has none under a known name (`answer_of`)."""
    messages: Sequence[Mapping[str, Any]] | None = None
    """The row's prompt, if it consists of chat messages. Values that JSON does not have are text."""
    turns: Sequence[Mapping[str, Any]] | None = None
    """For an episode of several turns: `response`, `observation`, `reward`, `stop_reason` of each turn."""
    tokens: Sequence[Sequence[int]] | None = None
    """All tokens, including prompts and observations, of each sequence that was trained on. This field and the next two
    are None if `trainer.log_sample_logprobs` is false."""
    rollout_logprobs: Sequence[Sequence[float]] | None = None
    """Aligned with `tokens`: log-probs of the engine, 0.0 for tokens that the policy did not sample. NaN for tokens
    of forced responses, whose log-probs are not known; the file has null there."""
    trainer_logprobs: Sequence[Sequence[float]] | None = None
    """Aligned with `tokens`: the trainer's log-probs at the start of the update (`old_logprobs`)."""


def answer_of(row: Row) -> str | None:
    """The correct answer in a data row: `reward_spec.ground_truth`, `ground_truth` or `answer`."""
    spec = row.get("reward_spec")
    found = spec.get("ground_truth") if isinstance(spec, Mapping) else None
    for name in ("ground_truth", "answer"):
        found = row.get(name) if found is None else found
    return None if found is None else str(found)


def sample_of(
    trajectory: Trajectory, *, step: int, purpose: Literal["train", "eval"], row: Row | None = None
) -> WrittenSample:
    """The sample of a trajectory, without its tokens. `row` is the trajectory's data row."""
    prompt = None if row is None else row.get("prompt")
    failed = trajectory.failure is not None
    return WrittenSample(
        step=step,
        purpose=purpose,
        group=trajectory.group_id,
        sample=trajectory.sample_index,
        prompt=trajectory.prompt_text,
        response=trajectory.response_text,
        reward=None if failed else trajectory.reward,
        stop_reason=None if failed else trajectory.steps[-1].stop_reason,
        end=trajectory.end,
        metrics=dict(trajectory.metrics),
        failure=trajectory.failure,
        ground_truth=None if row is None else answer_of(row),
        messages=_as_json(prompt) if isinstance(prompt, list) else None,
        turns=[attrs.asdict(turn) for turn in trajectory.turns] if len(trajectory.turns) > 1 else None,
    )


def _as_json(messages: list[Any]) -> list[Any]:
    """The messages as JSON has them. Other values, such as the dates of messages in a Parquet file, become text."""
    return json.loads(json.dumps(messages, default=str))


def with_logprobs(sample: WrittenSample, sequences: Batch) -> WrittenSample:
    """The sample with tokens and the log-probs of engine and trainer. `sequences` are the trajectory's sequences, with
    `old_logprobs`."""

    def lists(column: str) -> list[list[Any]]:
        return [values.tolist() for values in sequences[column].split(sequences.lengths.tolist())]

    return attrs.evolve(
        sample,
        tokens=lists("tokens"),
        rollout_logprobs=lists("rollout_logprobs"),
        trainer_logprobs=lists("old_logprobs"),
    )


class SamplesWriter:
    """Appends samples to a file. Drops the rows that earlier processes wrote for `first_step` and later steps."""

    def __init__(self, path: Path, *, first_step: int, evaluates_again: bool = False) -> None:
        """
        Args:
            evaluates_again: whether the step before `first_step` is evaluated again, so that its evaluation samples are
                dropped too.
        """
        evaluated = first_step - 1 if evaluates_again else None
        self._log = StepLog(
            path,
            first_step=first_step,
            is_written_again=lambda row: row["step"] == evaluated and row["purpose"] == "eval",
        )

    def write(self, samples: Iterable[WrittenSample]) -> None:
        """Appends one row per sample and flushes. Leaves out the fields in `_LEFT_OUT_IF_NONE` that are None."""
        self._log.write([_row(sample) for sample in samples])

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        self._log.close()


def read_samples(run_dir: Path) -> Iterator[WrittenSample]:
    """The samples of a run in the order in which they were written, read lazily.

    Raises:
        DataError: the file does not exist, or a row was not written by `SamplesWriter`.
    """
    for number, row in enumerate(read_rows(run_dir / FILE_NAME), start=1):
        try:
            yield WrittenSample(**row)
        except (TypeError, ValueError) as error:
            raise DataError(
                f"{run_dir / FILE_NAME}, row {number}: not a sample of this version ({error.args[0]})"
            ) from error


_LEFT_OUT_IF_NONE = ("ground_truth", "messages", "turns", "tokens", "rollout_logprobs", "trainer_logprobs")


def _row(sample: WrittenSample) -> dict[str, Any]:
    row = attrs.asdict(sample, recurse=False)
    return {name: value for name, value in row.items() if not (name in _LEFT_OUT_IF_NONE and value is None)}
