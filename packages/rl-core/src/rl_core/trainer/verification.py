"""Do the engines compute with the trainer's weights? Asked of their log-probs, for any backend and any engine.

Manifests prove that every byte arrived, not that it was put where it computes. So fixed tokens are scored by the
trainer and by each engine, and the mean difference of their log-probs has a bound. At the start of a run the path of
every tensor is proved: all trained parameters get noise, so whichever of them an engine did not take from this sync
moves its log-probs; then they are restored, bit for bit, and proved again.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Awaitable, Callable, Sequence

import attrs
import torch
from torch import Tensor

from rl_core.batch import Batch
from rl_core.errors import WeightSyncError
from rl_core.interfaces import InferenceClient, Scoring
from rl_core.workers import MicroBatchLimits, WorkerGroup

logger = logging.getLogger(__name__)

LIMITS = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 6e-2}
"""Largest mean |difference| of log-probs in nats, by the coarser dtype of trainer and engine.

Measured on random Qwen3 models: float32 2e-6 at most; bfloat16 0.02, with MoE layers, where rounding flips a router's
choice.
"""
NOISE_SCALE = 1.0
"""Measured on random Qwen3 models of 4 and 12 layers, dense and MoE: with this noise one stale tensor moves the mean by
0.07 to 0.3 at least (weakest are the norms of queries and keys), with half of it by 0.006."""
_NOISY_LIMIT = 3.0
"""Limits that a model full of noise may differ by: in bfloat16 rounding alone moves it by 0.12. So bfloat16 may hide
the weakest tensors of a deep model; float32 hides none."""
_LEAST_EFFECT = 3.0
"""The noise must move the trainer's own log-probs by so many of the proof's limits, or the proof proves nothing."""
_SEQUENCE_TOKENS = 17
"""Few enough for any engine's context; the first is scored by nobody."""


@attrs.frozen(kw_only=True)
class VerificationSettings:
    """What is asked, and how often."""

    prove_at_start: bool
    """Noise, sync, probe; restore, sync, probe: before the first step."""
    interval: int
    """Probe after every so many syncs; 0: never."""
    num_tokens: int
    """That are scored, at least."""
    limit: float
    """Largest mean |difference| of log-probs in nats."""
    seed: int
    limits: MicroBatchLimits
    """Of the trainer's forward passes."""


class WeightVerification:
    """Compares trainer and engines. `publish` brings the engines to the trainer's weights, under the same number."""

    def __init__(
        self,
        settings: VerificationSettings,
        policy: WorkerGroup,
        client: Scoring,
        publish: Callable[[], Awaitable[object]],
    ) -> None:
        self._settings = settings
        self._policy = policy
        self._client = client
        self._publish = publish
        self._sequences = _fixed_tokens(settings, client.vocab_size)
        self._num_syncs = 0

    async def prove(self) -> None:
        """Proves that each trained tensor reaches every engine, both ways; the engines end with the trainer's weights.

        Raises:
            WeightSyncError: an engine computes with another tensor than the trainer, named by what was done.
        """
        if not await self._policy.is_perturbable():
            logger.warning("the training backend cannot perturb its weights: that each tensor arrives is not proved")
            return
        limit = _NOISY_LIMIT * self._settings.limit
        clean_T = await self._trainer_logprobs()
        await self._policy.perturb(self._settings.seed, NOISE_SCALE)
        try:
            moved = float((await self._trainer_logprobs() - clean_T).abs().mean())
            if moved < _LEAST_EFFECT * limit:
                raise WeightSyncError(
                    f"noise on every weight moved the trainer's own log-probs by {moved:.3g} on average: too little to "
                    "prove that weights arrive. Switch it off with generator.inference_engine.weight_verification"
                    ".prove_at_start=false"
                )
            await self._publish()
            perturbed = await self._probe("every weight was perturbed", limit)
        except Exception:  # not when the run is cancelled: its weights are of no use, and a busy rank would hold it up
            await self._policy.restore()
            raise
        await self._policy.restore()
        if not perturbed:
            raise WeightSyncError("no engine was in service when it was to be proved that weights arrive")
        await self._publish()
        restored = await self._probe("every weight was restored", self._settings.limit)
        logger.info(
            "weights proved: noise moved log-probs by %.3g, and engines followed within %.3g; restored within %.3g",
            moved,
            perturbed["weight_sync/logprob_diff_mean"],
            restored.get("weight_sync/logprob_diff_mean", math.nan),
        )

    async def after_sync(self, version: int) -> dict[str, float]:
        """Called after every sync: probes when it is time; the metrics, if it was."""
        self._num_syncs += 1
        interval = self._settings.interval
        if interval == 0 or (self._num_syncs - 1) % interval:
            return {}
        return await self.probe(version)

    async def probe(self, version: int) -> dict[str, float]:
        """Scores the fixed tokens on both sides.

        Returns:
            `weight_sync/logprob_diff_mean` and `_max`: |trainer − engine| in nats, of the engine that is farthest off;
            nothing, with a warning, where no engine is in service.

        Raises:
            WeightSyncError: an engine's mean is above the limit; the message has both sides' numbers.
        """
        return await self._probe(f"weight version {version} was published", self._settings.limit)

    async def _probe(self, what: str, limit: float) -> dict[str, float]:
        trainer_T = await self._trainer_logprobs()
        scores = await self._client.score(self._sequences)
        if not scores:
            logger.warning("after %s, no engine was in service: nothing is verified", what)
            return {}
        worst = {"weight_sync/logprob_diff_mean": 0.0, "weight_sync/logprob_diff_max": 0.0}
        for engine, logprobs in scores.items():
            engine_T = torch.tensor([value for sequence in logprobs for value in sequence[1:]])
            difference_T = (trainer_T - engine_T).abs()
            mean = float(difference_T.mean())
            if not mean <= limit:  # also where it is not a number
                raise WeightSyncError(
                    f"after {what}, engine {engine} does not compute with the trainer's weights: on {len(trainer_T)} "
                    f"fixed tokens the trainer's mean log-prob is {float(trainer_T.mean()):.6f}, the engine's "
                    f"{float(engine_T.mean()):.6f}, their mean |difference| {mean:.3g} (limit "
                    f"{limit:g}), the largest {float(difference_T.max()):.3g}"
                )
            for name, value in (("mean", mean), ("max", float(difference_T.max()))):
                key = f"weight_sync/logprob_diff_{name}"
                worst[key] = max(worst[key], value)
        return worst

    async def _trainer_logprobs(self) -> Tensor:
        sequences = [{"tokens": tokens, "routed": [False] * len(tokens)} for tokens in self._sequences]
        batch = Batch.from_sequences(sequences)
        logprobs_T = (await self._policy.forward(batch, self._settings.limits, temperature=1.0))["logprobs"]
        is_scored_T = torch.ones(batch.num_tokens, dtype=torch.bool)
        is_scored_T[batch.offsets[:-1]] = False
        return logprobs_T[is_scored_T]


def verification_of(
    settings: VerificationSettings,
    policy: WorkerGroup,
    client: InferenceClient,
    publish: Callable[[], Awaitable[object]],
) -> WeightVerification | None:
    """None where it is switched off, or (with a warning) where the engines cannot score."""
    if not settings.prove_at_start and settings.interval == 0:
        return None
    if not isinstance(client, Scoring):
        logger.warning("the inference engine cannot score given tokens: its weights are not verified")
        return None
    return WeightVerification(settings, policy, client, publish)


def _fixed_tokens(settings: VerificationSettings, vocab_size: int) -> Sequence[Sequence[int]]:
    rng = random.Random(settings.seed)
    num_sequences = -(-settings.num_tokens // (_SEQUENCE_TOKENS - 1))
    return [[rng.randrange(vocab_size) for _ in range(_SEQUENCE_TOKENS)] for _ in range(num_sequences)]
