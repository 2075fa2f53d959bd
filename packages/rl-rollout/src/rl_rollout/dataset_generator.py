"""Implements the `dataset` generator: makes trajectories from the responses stored in the rows, without sampling."""

from __future__ import annotations

import logging

from rl_core.errors import DataError
from rl_core.interfaces import Generator, GeneratorSpec, GroupRequest, Row, Trajectory, TrajectoryStep
from rl_rollout.chat import TokenCodec, codec_of
from rl_rollout.generator_options import DatasetGeneratorOptions
from rl_rollout.supervised_tokens import RowEncoder, Supervised, text_parts
from rl_rollout.turn_ends import stop_tokens

logger = logging.getLogger(__name__)

_REWARDS = (1.0, 0.0)
"""Rewards of the two responses of a pair: first of the preferred one, then of the other."""


class DatasetGenerator(Generator):
    """Returns the responses stored in the rows: one trajectory per row, or two for a pair, the preferred one first."""

    def __init__(self, codec: TokenCodec, encoder: RowEncoder, *, of_pairs: bool) -> None:
        self._codec = codec
        self.stop_tokens = stop_tokens(codec)
        self._encoder = encoder
        self._of_pairs = of_pairs
        self._latest: tuple[Row, tuple[Supervised, ...]] | None = None
        self._named: set[str] = set()

    def prompt_length(self, row: Row) -> int:
        """Returns the number of tokens before the first trained token; for a pair, the larger of the two numbers.
        Raises DataError if the row has no response."""
        return max(sequence.prompt_length for sequence in self._sequences(row))

    def response_length(self, row: Row) -> int:
        """See `Generator.response_length`."""
        return max(len(sequence.tokens) - sequence.prompt_length for sequence in self._sequences(row))

    def may_have_unknown_tokens(self, row: Row) -> bool:
        """See `Generator.may_have_unknown_tokens`."""
        return row.get("input_ids") is not None or self._codec.may_be_unknown(row)

    def prove(self, row: Row, *, anew: bool) -> int:
        """Requires that the template renders the conversations of the row completely, and logs the names of columns
        that are not read, which may hold part of the prompt, such as Alpaca's `input`. See `Generator`."""
        if unread := [name for name in self._encoder.unread(row) if name not in self._named]:
            self._named.update(unread)
            logger.info("columns of the data that are not read: %s", ", ".join(unread))
        self._codec.proofs.anew = anew
        self._sequences(row)
        self._codec.proofs.anew = False
        return len(self._codec.proofs.kinds)

    async def generate(self, request: GroupRequest) -> tuple[Trajectory, ...]:
        """Returns one trajectory per response of the row. Raises DataError if the row has no usable response."""
        try:
            sequences = self._sequences(request.row)
        except DataError as error:
            raise DataError(f"{request.row_place}: {error}") from error
        rewards = _REWARDS if self._of_pairs else (0.0,)
        return tuple(
            self._trajectory(request, index, sequence, reward)
            for index, (sequence, reward) in enumerate(zip(sequences, rewards, strict=True))
        )

    def _sequences(self, row: Row) -> tuple[Supervised, ...]:
        # The check of lengths before a run measures the prompt and then the response of each row, so the latest row is
        # kept encoded.
        if self._latest is None or self._latest[0] is not row:
            encode = self._encoder.pair if self._of_pairs else self._response
            self._latest = row, encode(row)
        return self._latest[1]

    def _response(self, row: Row) -> tuple[Supervised]:
        return (self._encoder.response(row),)

    def _trajectory(self, request: GroupRequest, index: int, sequence: Supervised, reward: float) -> Trajectory:
        prompt, response = text_parts(self._codec, sequence)
        count = len(sequence.tokens)
        step = TrajectoryStep(
            tokens=sequence.tokens,
            sampled=sequence.trained,
            rollout_logprobs=(0.0,) * count,
            policy_version=(-1,) * count,
            reward=reward,
            stop_reason="stop",
        )
        return Trajectory(
            group_id=request.group_id,
            sample_index=index,
            steps=(step,),
            prompt_text=prompt,
            response_text=response,
            start_version=request.start_version,
        )


def create_generator(spec: GeneratorSpec) -> DatasetGenerator:
    """Creates the generator of a run. Raises ConfigError if the model has no usable tokenizer."""
    options = spec.options
    assert isinstance(options, DatasetGeneratorOptions)
    codec = codec_of(
        spec.model_path,
        chat_template_kwargs=options.chat_template_kwargs,
        add_special_tokens=spec.add_special_tokens,
    )
    encoder = RowEncoder(
        codec,
        response_key=options.response_key,
        trained_roles=options.trained_roles,
        trained_turns=options.trained_turns,
        scored_at_end=options.scored_at_end,
    )
    return DatasetGenerator(codec, encoder, of_pairs=options.responses == "pair")
