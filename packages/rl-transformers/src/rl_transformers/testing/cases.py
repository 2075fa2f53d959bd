"""The test cases of `BackendConformance`: variants of a backend, a tiny model, one batch, and the reference.

All random numbers are seeded, so that two cases with the same arguments are equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import torch

from rl_core.batch import Batch
from rl_core.interfaces import Backend, LossSpec, ModelConfig, OptimizerConfig, WorkerSpec
from rl_core.workers.group import MicroBatchLimits
from rl_transformers.testing.forced_routes import routers
from rl_transformers.testing.models import make_checkpoint
from rl_transformers.testing.ranks import RankGroup
from rl_transformers.testing.reference_worker import ReferenceWorker

TEMPERATURE = 0.7
LOSS = LossSpec(name="ppo_clip", kl_coef=0.1, entropy_coef=0.05)
OPTIMIZER = OptimizerConfig(lr=1e-3, adam_betas=(0.9, 0.95), weight_decay=0.1, max_grad_norm=0.5, num_warmup_steps=2)
LIMITS = MicroBatchLimits(max_tokens=70)
"""Splits the batch's 209 tokens into at least three micro-batches on one rank, or two on each of two ranks."""
LENGTHS = (23, 61, 1, 40, 9, 33, 2, 40)
BEGINNINGS = {3: (1, 20), 6: (1, 1), 7: (3, 31)}
"""Sequence → (earlier sequence, number of first tokens that both share), for variants that share prefixes."""
STEPS = ((5, 0, 3), (1, 6), (4, 2, 7))
"""Sequences of three optimizer steps. The second step has only two, so that some of four ranks have no sequence."""


@attrs.frozen(kw_only=True)
class Variant:
    """One combination of world size, options, spec and checkpoint with which checks run."""

    world_size: int = 1
    options: Any = None
    """Options of the backend; None: the suite's options."""
    spec: Mapping[str, Any] = attrs.field(factory=dict)
    """Fields of `WorkerSpec` that differ, e.g. `{"use_sample_packing": False}`."""
    checkpoint: Mapping[str, Any] = attrs.field(factory=dict)
    """Arguments of `make_checkpoint` that differ, e.g. `{"tie_word_embeddings": False}`."""
    forced_routes: bool = False
    """For a Mixture-of-Experts checkpoint: the batch has routes (`make_routes`) that the model must follow. `options`
    must enable this in the backend."""
    parity_only: bool = False
    """Whether only the checks of the parity table run. Set for combinations of settings that other variants check one
    by one."""
    marks: tuple[str, ...] = attrs.field(default=(), eq=False)
    """Names of pytest markers for the variant's checks, with which they can be deselected."""

    def __str__(self) -> str:
        spec = {name: value.name if name == "optimizer" else value for name, value in self.spec.items()}
        changes = {**_changed(self.options), **spec, **self.checkpoint}
        size = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        routes = ["forced routes"] if self.forced_routes else []
        return ", ".join([size, *(f"{name}={value}" for name, value in changes.items()), *routes])

    def __hash__(self) -> int:
        """pytest groups checks by variant, which must be hashable."""
        return hash(str(self))

    @property
    def shares_prefixes(self) -> bool:
        """Whether sequences of the batch share prefixes that the worker must compute once."""
        return bool(self.spec.get("share_prefixes"))

    @property
    def is_tied(self) -> bool:
        """Whether the output layer shares the input embedding."""
        return self.checkpoint.get("tie_word_embeddings", True)


def _changed(options: Any) -> dict[str, Any]:
    if options is None:
        return {}
    values = {field.name: getattr(options, field.name) for field in attrs.fields(type(options))}
    plain = type(options)()
    changed = {name: value for name, value in values.items() if value != getattr(plain, name)}
    for name in [name for name, value in changed.items() if attrs.has(type(value))]:
        changed |= {f"{name}.{key}": value for key, value in _changed(changed.pop(name)).items()}
    return changed


VARIANTS = (
    Variant(),
    Variant(spec={"use_sample_packing": False}),
    Variant(spec={"gradient_checkpointing": True}),
    Variant(checkpoint={"tie_word_embeddings": False}),
)
"""The default variants of a suite, all on one rank."""


class KeptRanks:
    """Holds ranks that a check left unchanged, for the next check that needs the same ranks. Most of a check's time is
    spent on starting ranks."""

    def __init__(self) -> None:
        self._kept: RankGroup | None = None

    def take(self, spec: WorkerSpec, world_size: int) -> RankGroup | None:
        """Returns the kept ranks if they match; otherwise ends them and returns None."""
        kept, self._kept = self._kept, None
        if kept is not None and (kept.spec, kept.mesh.world_size) != (spec, world_size):
            kept.close()
            return None
        return kept

    def keep(self, group: RankGroup) -> None:
        """Keeps `group`; ends any ranks that were kept before."""
        self.close()
        self._kept = group

    def close(self) -> None:
        """Ends the kept ranks."""
        if self._kept is not None:
            self._kept.close()
            self._kept = None


@attrs.frozen(kw_only=True, eq=False)
class Case:
    """The inputs of one test."""

    backend: Backend
    spec: WorkerSpec
    world_size: int
    batch: Batch
    reference: ReferenceWorker
    """A new reference, without gradients or steps."""
    directory: Path
    """An empty directory for the test's files."""
    variant: Variant
    timeout_s: float = 240.0
    """Longest wait for the ranks."""
    kept: KeptRanks = attrs.field(factory=KeptRanks)
    """Ranks that an earlier check left unchanged."""
    started: list[RankGroup] = attrs.field(factory=list)

    def start(self, spec: WorkerSpec | None = None) -> RankGroup:
        """Returns ranks whose weights and state are as loaded: kept ranks if they match, else new ones. The ranks end
        with the case unless they are passed to `keep`."""
        spec = spec or self.spec
        group = self.kept.take(spec, self.world_size) or RankGroup(
            self.backend, spec, self.world_size, directory=self.directory, timeout_s=self.timeout_s
        )
        group.directory = self.directory
        self.started.append(group)
        return group

    def keep(self, group: RankGroup) -> None:
        """Keeps ranks that the test has not changed; the next `start` may return them."""
        self.started.remove(group)
        self.kept.keep(group)

    def new_reference(self) -> ReferenceWorker:
        """Returns another new reference of the same spec."""
        return ReferenceWorker(self.spec)


@contextmanager
def open_case(
    backend: Backend,
    options: Any,
    variant: Variant,
    directory: Path,
    *,
    checkpoint: Path | None = None,
    timeout_s: float = 240.0,
    kept: KeptRanks | None = None,
) -> Iterator[Case]:
    """Creates batch and reference of a variant. When the context exits, the case's ranks end, unless `kept` has them.

    Args:
        backend: the backend under test.
        options: the suite's options.
        variant: the variant; it may replace the options.
        directory: an existing directory, only for this case.
        checkpoint: the checkpoint that `variant.checkpoint` describes, if it exists already; it is only read.
        timeout_s: longest wait for the ranks.
        kept: holder of kept ranks that cases share; None: ranks are kept only within this case.
    """
    if checkpoint is None:
        checkpoint = make_checkpoint(directory / "model", **variant.checkpoint)
    spec = WorkerSpec(
        **{
            "role": "policy",
            "model": ModelConfig(path=str(checkpoint)),
            "optimizer": OPTIMIZER,
            "options": options if variant.options is None else variant.options,
            "bf16": False,
            "gradient_checkpointing": False,
            "use_sample_packing": True,
            "logprobs_chunk_size": 32,
            "total_optimizer_steps": None,
            "seed": 0,
            **variant.spec,
        }
    )
    (directory / "files").mkdir()
    reference = ReferenceWorker(spec)
    case = Case(
        backend=backend,
        spec=spec,
        world_size=variant.world_size,
        batch=make_batch(reference, forced_routes=variant.forced_routes, shared_beginnings=variant.shares_prefixes),
        reference=reference,
        directory=directory / "files",
        variant=variant,
        timeout_s=timeout_s,
        kept=kept or KeptRanks(),
    )
    try:
        yield case
    finally:
        for group in case.started:
            group.close()
        if kept is None:
            case.kept.close()


def make_batch(
    reference: ReferenceWorker, *, forced_routes: bool = False, shared_beginnings: bool = False, seed: int = 1
) -> Batch:
    """Makes eight sequences of 1 to 61 tokens, with prompts and observations. One sequence is a single prompt token.
    Another has sampled tokens, but no trained token.

    Old log-probs are close to the current ones, so that some ratios are clipped and others are not. Values outside the
    loss mask are large, so that a worker that reads them fails.

    Args:
        reference: scores the tokens.
        forced_routes: adds routes (`make_routes`), with which the tokens are scored.
        shared_beginnings: some sequences share prefixes with others (`BEGINNINGS`), including routes.
        seed: seed of tokens, noise and advantages.
    """
    generator = torch.Generator().manual_seed(seed)
    vocabulary = reference.model.config.vocab_size
    sequences = []
    for i, length in enumerate(LENGTHS):
        position_T = torch.arange(length)
        sampled_T = (position_T >= max(1, length // 3)) & (position_T % 11 != 7)
        mask_T = sampled_T & (i != 4)
        tokens_T = torch.randint(vocabulary, (length,), generator=generator)
        routes = make_routes(reference, length, seed=i) if forced_routes else {}
        if shared_beginnings and i in BEGINNINGS:
            other, shared = BEGINNINGS[i]
            for name, values_T in {"tokens": tokens_T, **routes}.items():
                values_T[:shared] = sequences[other][name][:shared]
        forced = (routes["routed_experts"], routes["routed"]) if routes else None
        with torch.no_grad():
            logprobs_T, _ = reference.score(tokens_T, TEMPERATURE, forced)
        noise_T, ref_noise_T, advantages_T = 0.3 * torch.randn(3, length, generator=generator)
        sequences.append(
            {
                "tokens": tokens_T,
                "sampled": sampled_T,
                "loss_mask": mask_T,
                "old_logprobs": torch.where(mask_T, logprobs_T + noise_T, -50.0),
                "ref_logprobs": torch.where(mask_T, logprobs_T + ref_noise_T, 50.0),
                "advantages": torch.where(mask_T, 2 + 10 * advantages_T, 1e3),
                "loss_weights": mask_T.float() / max(1, int(mask_T.sum())) / (i + 1),
                "group_id": i // 2,
                **routes,
            }
        )
    return Batch.from_sequences(sequences)


def with_kept_tokens(batch: Batch, vocabulary: int) -> Batch:
    """Adds random kept tokens: of every sampled token, its own id and up to all but one of the others; of every seventh
    token of the stream, none, as if nothing was excluded."""
    generator = torch.Generator().manual_seed(0)
    kept: list[torch.Tensor] = []
    for t, (token, is_sampled) in enumerate(zip(batch["tokens"].tolist(), batch["sampled"].tolist(), strict=True)):
        size = int(torch.randint(1, vocabulary, (), generator=generator)) if is_sampled and t % 7 else 0
        others = torch.randperm(vocabulary, generator=generator)
        kept.append(torch.cat([torch.tensor([token]), others[others != token][: size - 1]]) if size else others[:0])
    counts_T = torch.tensor([len(ids) for ids in kept], dtype=torch.int32)
    return batch.with_columns(kept_counts=counts_T, kept_ids=torch.cat(kept).to(torch.int32))


def make_routes(
    reference: ReferenceWorker, num_tokens: int, *, seed: int, has_gaps: bool = True
) -> dict[str, torch.Tensor]:
    """Makes `routed_experts` and `routed` of one sequence, with random experts instead of the router's choices.

    As with an engine, the last token has no route; with `has_gaps`, some other tokens have none either. Entries that
    must not be read (of these tokens, and of dense layers) are 255, which is not an expert id of the tiny models.
    """
    config = reference.model.config.get_text_config()
    generator = torch.Generator().manual_seed(seed)
    routes_TLK = torch.full((num_tokens, config.num_hidden_layers, config.num_experts_per_tok), 255)
    for layer, router in routers(reference.model).items():
        ranked_TE = torch.rand((num_tokens, router.num_experts), generator=generator).argsort(1)  # pyright: ignore[reportCallIssue, reportArgumentType]
        routes_TLK[:, layer] = ranked_TE[:, : config.num_experts_per_tok]
    position_T = torch.arange(num_tokens)
    routed_T = ((position_T % 9 != 5) | (not has_gaps)) & (position_T < num_tokens - 1)
    routes_TLK[~routed_T] = 255
    return {"routed_experts": routes_TLK.to(torch.uint8), "routed": routed_T}
