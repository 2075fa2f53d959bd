"""Computes the log-probs of a reference or teacher with an inference engine instead of training ranks.

consumes: batches · produces: log-probs of their tokens · waits for: the engine · unblocked by: the engine's answer or
failure, or the deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from rl_core.batch import Batch
from rl_core.errors import ConfigError, DeadlineError, GenerationError
from rl_core.interfaces import InferenceClient

TOKENS_PER_REQUEST = 65_536
"""Largest number of tokens in one request. This many tokens keep an engine busy for seconds, and are less than 1 MB."""


class ServedReference:
    """Computes `ref_logprobs` with an engine, whose weights never change.

    Args:
        client: client of an engine that serves the reference model at temperature 1.
        timeout_s: longest wait for the log-probs of one batch.
    """

    def __init__(self, client: InferenceClient, *, timeout_s: float):
        self._client = client
        self._timeout_s = timeout_s

    async def logprobs(self, batch: Batch) -> Tensor:
        """Computes log p(token | previous tokens), float32 [T]. The first token of each sequence gets 0.

        Raises:
            ConfigError: a token is outside the reference's vocabulary.
            DeadlineError: the engine did not answer in time.
            GenerationError: no engine is in service, or the engine did not return one finite number per token.
        """
        largest = int(batch["tokens"].max())
        if largest >= self._client.vocab_size:
            raise ConfigError(
                f"got token {largest}, but the reference has only {self._client.vocab_size} tokens; use a reference "
                "with the policy's vocabulary",
                key="trainer.ref.model.path",
            )
        try:
            async with asyncio.timeout(self._timeout_s):
                lists = [scores for part in _parts(batch) for scores in await self._scored(part)]
        except DeadlineError:  # the client's own deadline, which its message names
            raise
        except TimeoutError as error:
            raise DeadlineError(
                f"waited {self._timeout_s:g} s (trainer.worker_timeout_s) for the reference's engine "
                f"(trainer.ref.inference_backend) to compute the log-probs of {batch.num_tokens} tokens"
            ) from error
        logprobs_T = torch.tensor([score for scores in lists for score in scores], dtype=torch.float32)
        if not logprobs_T.isfinite().all():
            raise GenerationError(
                "the reference's engine (trainer.ref.inference_backend) returned log-probs that are not finite"
            )
        return logprobs_T

    async def _scored(self, sequences: Sequence[Sequence[int]]) -> Sequence[Sequence[float]]:
        answers = await self._client.score(sequences)
        if not answers:
            raise GenerationError("no engine of the reference (trainer.ref.inference_backend) is in service")
        lists = next(iter(answers.values()))
        if [len(scores) for scores in lists] != [len(tokens) for tokens in sequences]:
            raise GenerationError(
                "the reference's engine (trainer.ref.inference_backend) did not return one log-prob per token"
            )
        return lists


def _parts(batch: Batch) -> Iterator[list[list[int]]]:
    """Splits the batch's sequences into parts of at most `TOKENS_PER_REQUEST` tokens. A longer sequence is a separate
    part."""
    part: list[list[int]] = []
    for tokens in batch["tokens"].split(batch.lengths.tolist()):
        if part and sum(map(len, part)) + len(tokens) > TOKENS_PER_REQUEST:
            yield part
            part = []
        part.append(tokens.tolist())
    yield part
