"""Verifies with log-probs that the engines compute with the trainer's weights. Needs engines that can score tokens.

Manifests prove that every byte arrived, but not that an engine computes with these weights. So the trainer and each
engine score fixed tokens, and the mean |difference| of their log-probs must not exceed a limit. At the start of a run,
a proof shows that every trained tensor reaches the engines. All trained parameters get noise and are published, so an
engine that fails to load one of them computes other log-probs. Then the parameters are restored bit for bit and
published, and the comparison is repeated.

Scoring does not show everything that changes what an engine samples: it may read a quantised cache, or let another
model draft tokens, only when it samples. So the proof also lets the engines sample, and the trainer scores the samples.
"""

from __future__ import annotations

import logging
import math
import random
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from rl_core.batch import Batch
from rl_core.errors import ConfigError, WeightSyncError
from rl_core.interfaces import GenerateRequest, InferenceClient, SamplingParams
from rl_core.tasks import all_of
from rl_core.workers import MicroBatchLimits, WorkerGroup

logger = logging.getLogger(__name__)

LIMITS = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 6e-2}
"""Largest allowed mean |difference| of log-probs in nats, by the coarser dtype of trainer and engine.

Measured on random Qwen3 models: float32 at most 2e-6; bfloat16 0.02 with MoE layers, because rounding flips a router's
choice.
"""
_USUAL_LOGPROB = -5.0
"""Rounding errors are relative. So the default limit applies to mean log-probs of at least this value, and grows in
proportion for lower means. A pretrained model gives random tokens lower log-probs than a random model does:
SmolLM2-135M in bfloat16 gives -15.3, and trainer and engine differ by 0.12."""
LEAST_NOISE = 0.125
"""The first scale of noise that is tried. The scale is doubled until the log-probs change enough."""
_LARGEST_FACTOR = 8192
"""Largest multiple of `LEAST_NOISE` that is tried. A rank-1 adapter on a tiny model needs 32 or 64."""
_WANTED_EFFECT = 1.5
"""Change of the trainer's log-probs, in nats, that the noise should cause. Random Qwen3 models of 4 and 12 layers,
dense and MoE, need noise of scale 1 for this. A single stale tensor then changes the mean by at least 0.04, or by
0.01 with half the noise; the norms of queries and keys change it least. SmolLM2-135M needs 1/8: with scale 1 its output
would be only noise, and two correct bfloat16 implementations would differ by 3.7."""
_GROWTH = 1.25
"""Once the effect is large enough (`_LEAST_EFFECT`), doubling stops when it increases the effect by less than this
factor. Norms bound the effect (adapters of a tiny model: 0.12, 0.25, 0.48, 0.57, 0.59 nats), and more noise would hide
a missing tensor."""
_NOISY_LIMIT = 3.0
"""Multiple of the limit that is allowed while the model has noise: in bfloat16, rounding alone changes its log-probs by
0.12. So bfloat16 may hide the weakest tensors of a deep model; float32 hides none."""
_LEAST_EFFECT = 3.0
"""The noise must change the trainer's log-probs by at least this multiple of the proof's limit, else the proof is
meaningless."""
_SEQUENCE_TOKENS = 17
"""Number of tokens per sequence, small enough for any engine's context. The first token of each has no score."""
_NUM_SAMPLED = 8
"""How many tokens are sampled after the first tokens of each sequence."""
_USUAL_FACTOR = 2.0
"""An engine that differs more than the limit, because its options change its numbers, may later differ by this multiple
of its first difference."""


@attrs.frozen(kw_only=True)
class VerificationSettings:
    """Settings of the comparison of trainer and engines: the tokens, the limit, and when to compare."""

    prove_at_start: bool
    """Whether to prove before the first step that every tensor arrives (`WeightVerification.prove`)."""
    interval: int
    """Probes follow the first sync of a process and every version divisible by this number; 0: no sync is probed."""
    num_tokens: int
    """Least number of tokens to score."""
    limit: float
    """Largest allowed mean |difference| of log-probs in nats."""
    limit_grows: bool = False
    """Whether the limit grows in proportion if the mean log-prob is below -5."""
    is_corrected: bool = False
    """Whether training corrects for engines that sample from another distribution (`off_policy_correction`). Then a
    difference above the limit is a warning in the first comparison, and the limit of the later ones follows from it."""
    engine_options: tuple[str, ...] = ()
    """Options that were passed to the engine, for messages."""
    extra_args: Mapping[str, Any] = attrs.field(factory=dict)
    """`SamplingParams.extra_args` of training. If there are any, the proof of sampling cannot be left out."""
    seed: int
    limits: MicroBatchLimits
    """Limits of the trainer's forward passes."""


class WeightVerification:
    """Compares the log-probs of trainer and engines. `publish` sends the trainer's weights to the engines without a new
    version number."""

    def __init__(
        self,
        settings: VerificationSettings,
        policy: WorkerGroup,
        client: InferenceClient,
        publish: Callable[[], Awaitable[object]],
    ) -> None:
        self._settings = settings
        self._policy = policy
        self._client = client
        self._publish = publish
        self._sequences = _fixed_tokens(settings, client.vocab_size)
        self._has_probed = False
        self._usual: float | None = None
        """The first measured difference if it was above the limit, else 0. None: nothing was measured."""
        self._last_limit = 0.0
        """The limit of the last comparison of fixed tokens, without noise and corrections."""

    async def prove(self) -> None:
        """Proves that each trained tensor reaches every engine: adds noise, publishes and probes; then restores the
        weights, publishes and probes again. Only warns if the backend cannot perturb its weights. Then proves that the
        engines sample from the trainer's distribution, with the run's `extra_args`.

        Raises:
            WeightSyncError: an engine computes with another tensor than the trainer, or samples from another
                distribution (the message says in which phase); no noise changes the trainer's log-probs enough; or no
                engine is in service.
        """
        await self._prove_weights()
        if self._usual is not None:
            await self._prove_sampling()
        elif self._settings.extra_args:
            raise WeightSyncError(f"no engine was in service to prove that {self._arguments} leaves log-probs exact")

    async def _prove_weights(self) -> None:
        # The difference without noise must be known.
        if self._usual is None and (self._settings.is_corrected or self._settings.extra_args):
            await self._probe("the weights were published")
        if self._usual:
            logger.warning(
                "the engine's own difference (%.3g) hides whether each single tensor arrives, so this is not proved; "
                "later comparisons allow twice this difference",
                self._usual,
            )
            return
        if not self._policy.can_perturb:
            logger.warning(
                "the training backend cannot perturb its weights (Worker.can_perturb), so nothing proves that each "
                "tensor arrives; if a tensor does not arrive, rollout/logprob_diff_max grows"
            )
            return
        try:
            moved = await self._perturb()
            await self._publish()
            perturbed = await self._probe("every weight was perturbed", _NOISY_LIMIT)
        # A cancelled run does not restore: it no longer needs the weights, and a busy rank would delay its end.
        except Exception:
            await self._policy.restore()
            raise
        await self._policy.restore()
        if not perturbed:
            raise WeightSyncError("no engine was in service to prove that weights arrive")
        await self._publish()
        restored = await self._probe("every weight was restored")
        logger.info(
            "weights proved: noise moved log-probs by %.3g, and engines followed within %.3g; restored within %.3g",
            moved,
            perturbed["weight_sync/logprob_diff_mean"],
            restored.get("weight_sync/logprob_diff_mean", math.nan),
        )

    async def _prove_sampling(self) -> None:
        """Lets the engines sample, and compares the log-probs of the sampled tokens with the trainer's.

        Raises WeightSyncError if they differ more than the limit, and nothing corrects for it.
        """
        params = SamplingParams(max_tokens=_NUM_SAMPLED, ignore_eos=True, extra_args=self._settings.extra_args)
        prompts = [tuple(tokens[:-_NUM_SAMPLED]) for tokens in self._sequences]
        requests = [
            # A server that outlives a run would answer a known id with the sample of an earlier proof.
            GenerateRequest(
                sample_id=f"proof-{uuid.uuid4().hex}", prompt_tokens=prompt, params=params, seed=self._settings.seed
            )
            for prompt in prompts
        ]
        completions = [one for (one,) in await all_of(self._client.generate(request) for request in requests)]
        sequences = [[*prompt, *one.tokens] for prompt, one in zip(prompts, completions, strict=True)]
        trainer_T = torch.cat(
            [
                logprobs_T[len(prompt) :]
                for prompt, logprobs_T in zip(prompts, await self._trainer_logprobs_of(sequences), strict=True)
            ]
        )
        engine_T = torch.tensor([value for one in completions for value in one.logprobs])
        difference_T = (trainer_T - engine_T).abs()
        # The samples continue fixed tokens, of which a pretrained model finds the first as unlikely as all others. This
        # enlarges rounding errors, although the sampled tokens are likely: SmolLM2-135M in bfloat16 differs by 0.06.
        mean, limit = float(difference_T.mean()), self._last_limit
        measured = (
            f"on {len(engine_T)} sampled tokens, the engines' log-probs differ from the trainer's by {mean:.3g} on "
            f"average (limit {limit:.3g}) and at most by {float(difference_T.max()):.3g}"
        )
        if mean <= limit:
            logger.info("sampling proved: %s", measured)
        elif self._settings.is_corrected:
            logger.warning("%s; trainer.algorithm.off_policy_correction is on, so the run goes on", measured)
        else:
            raise WeightSyncError(f"the engines do not sample from the trainer's policy: {measured}. {self._remedy}")

    @property
    def _remedy(self) -> str:
        options = self._settings.engine_options
        given = f" (engine_init_kwargs sets {', '.join(options)})" if options else ""
        sampled = f"The requests had {self._arguments}; remove what changes the distribution. "
        return (
            f"{sampled if self._settings.extra_args else ''}If an option of the engine changes its numbers, such as a "
            f"quantisation or a cache of another dtype{given}, remove it, or correct for it with "
            "trainer.algorithm.off_policy_correction.tis_ratio_type=token"
        )

    @property
    def _arguments(self) -> str:
        return f"generator.sampling_params.extra_args ({', '.join(self._settings.extra_args)})"

    async def _perturb(self) -> float:
        """Adds noise of the smallest scale that changes the trainer's log-probs enough. Returns the change in nats.
        Several scales are tried, because noise on small adapters changes a model less than noise on all weights.

        Raises:
            WeightSyncError: no noise changes the log-probs enough to tell whether it arrived.
        """
        clean_T = await self._trainer_logprobs()
        factor, moved = 1, 0.0
        while True:
            await self._policy.perturb(self._settings.seed, factor * LEAST_NOISE)
            noisy_T = await self._trainer_logprobs()
            moved_before, moved = moved, float((noisy_T - clean_T).abs().mean())
            least = _LEAST_EFFECT * _NOISY_LIMIT * self._base_limit(noisy_T)
            is_enough = moved >= least
            is_saturated = is_enough and moved < _GROWTH * moved_before
            # `not <` instead of `>=`, so that a NaN ends the loop too.
            if not moved < _WANTED_EFFECT or is_saturated or factor == _LARGEST_FACTOR:
                break
            factor *= 2
        if not is_enough:
            raise WeightSyncError(
                f"noise on every trained weight, {factor * LEAST_NOISE:g} times its size, moved the trainer's own "
                f"log-probs by {moved:.3g} on average: too little to prove that weights arrive (it takes {least:.3g}). "
                "Do these weights take part in the forward pass? Adapters of a small model move it too little for "
                "bfloat16: set trainer.bf16=false and generator.inference_engine.model_dtype=float32. Or switch the "
                "proof off with generator.inference_engine.weight_verification.prove_at_start=false"
            )
        return moved

    async def after_sync(self, version: int) -> dict[str, float]:
        """Probes if a probe is due, and returns the probe's metrics; empty if none was due. Must be called after the
        sync of every version.

        The version decides when a probe is due, so that a resumed run probes at the same steps as an uninterrupted one.
        A probe is also due after the process's first sync, in which newly started engines get their weights.
        """
        interval = self._settings.interval
        if interval == 0 or (version % interval and self._has_probed):
            return {}
        self._has_probed = True
        return await self.probe(version)

    async def probe(self, version: int) -> dict[str, float]:
        """Scores the fixed tokens with the trainer and with every engine, and compares the log-probs.

        Returns:
            `weight_sync/logprob_diff_mean` and `_max`: |trainer − engine| in nats; each is the largest over all
            engines. Empty, with a warning, if no engine is in service.

        Raises:
            WeightSyncError: an engine's mean |difference| is above the limit. The message has both sides' numbers.
        """
        return await self._probe(f"weight version {version} was published")

    async def _probe(self, what: str, num_limits: float = 1.0) -> dict[str, float]:
        trainer_T = await self._trainer_logprobs()
        is_first, limit = self._usual is None, num_limits * self._limit(trainer_T)
        self._last_limit = self._base_limit(trainer_T)
        scores = await self._client.score(self._sequences)
        if not scores:
            logger.warning("after %s, no engine was in service: the weights are not verified", what)
            return {}
        worst = {"weight_sync/logprob_diff_mean": 0.0, "weight_sync/logprob_diff_max": 0.0}
        for engine, logprobs in scores.items():
            engine_T = torch.tensor([value for sequence in logprobs for value in sequence[1:]])
            difference_T = (trainer_T - engine_T).abs()
            mean = float(difference_T.mean())
            if not mean <= limit:  # a NaN fails too
                measured = (
                    f"on {len(trainer_T)} fixed tokens the trainer's mean log-prob is {float(trainer_T.mean()):.6f}, "
                    f"the engine's {float(engine_T.mean()):.6f}, their mean |difference| {mean:.3g} (limit "
                    f"{limit:.3g}), the largest {float(difference_T.max()):.3g}"
                )
                if not (is_first and self._settings.is_corrected and math.isfinite(mean)):
                    raise WeightSyncError(
                        f"after {what}, engine {engine} does not compute with the trainer's weights: {measured}"
                        + (f". {self._remedy}" if is_first or self._settings.engine_options else "")
                    )
                logger.warning(
                    "engine %s: %s; trainer.algorithm.off_policy_correction is on, so the run goes on", engine, measured
                )
                self._usual = max(self._usual or 0.0, mean)
            for name, value in (("mean", mean), ("max", float(difference_T.max()))):
                key = f"weight_sync/logprob_diff_{name}"
                worst[key] = max(worst[key], value)
        self._usual = self._usual or 0.0
        return worst

    def _limit(self, trainer_T: Tensor) -> float:
        return max(self._base_limit(trainer_T), _USUAL_FACTOR * (self._usual or 0.0))

    def _base_limit(self, trainer_T: Tensor) -> float:
        growth = float(trainer_T.mean()) / _USUAL_LOGPROB if self._settings.limit_grows else 1.0
        return self._settings.limit * max(growth, 1.0)

    async def _trainer_logprobs(self) -> Tensor:
        return torch.cat([logprobs_T[1:] for logprobs_T in await self._trainer_logprobs_of(self._sequences)])

    async def _trainer_logprobs_of(self, sequences: Sequence[Sequence[int]]) -> Sequence[Tensor]:
        """The log-probs of each sequence's tokens; that of its first token has no meaning."""
        rows = [{"tokens": tokens, "routed": [False] * len(tokens)} for tokens in sequences]
        batch = Batch.from_sequences(rows)
        logprobs_T = (await self._policy.forward(batch, self._settings.limits, temperature=1.0))["logprobs"]
        return logprobs_T.split([len(tokens) for tokens in sequences])


def verification_of(
    settings: VerificationSettings,
    policy: WorkerGroup,
    client: InferenceClient,
    publish: Callable[[], Awaitable[object]],
) -> WeightVerification | None:
    """Creates the run's verification. Returns None if the settings switch it off, or (with a warning) if the engines
    cannot score tokens.

    Raises:
        ConfigError: the run has `extra_args`, whose effect is unknown if the engines cannot score.
    """
    if not settings.prove_at_start and settings.interval == 0:
        return None
    if not client.can_score:
        if settings.extra_args:
            raise ConfigError(
                f"got {', '.join(settings.extra_args)}, but this engine cannot score tokens, so nothing shows that the "
                "trainer's log-probs stay exact; remove this key",
                key="generator.sampling_params.extra_args",
            )
        logger.warning("the inference engine cannot score tokens: its weights are not verified")
        return None
    return WeightVerification(settings, policy, client, publish)


def _fixed_tokens(settings: VerificationSettings, vocab_size: int) -> Sequence[Sequence[int]]:
    rng = random.Random(settings.seed)
    num_sequences = -(-settings.num_tokens // (_SEQUENCE_TOKENS - 1))
    return [[rng.randrange(vocab_size) for _ in range(_SEQUENCE_TOKENS)] for _ in range(num_sequences)]
