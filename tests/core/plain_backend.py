"""A backend around the reference worker, on one rank or data parallel over gloo, and workers that are wrong on purpose.

Tests check that each wrong worker is detected. The classes are in a module of their own, because the processes of the
ranks import them by name.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from rl_core.errors import ConfigError
from rl_core.interfaces import Backend, RankInfo, Worker, WorkerSpec
from rl_core.layout.mesh import Mesh
from rl_core.rank_kit.route_checks import RouteShape, require_routes
from rl_transformers.proof.model_proof import require_proof
from rl_transformers.testing.forced_routes import routers
from rl_transformers.testing.reference_worker import ReferenceWorker


@attrs.frozen
class NoOptions:
    """Options of a backend that has none."""


@attrs.frozen(kw_only=True)
class PlainBackend(Backend):
    """A backend around a worker class."""

    worker_class: Callable[[WorkerSpec, RankInfo], Worker]
    name: str = "plain"
    replays_kept_tokens: bool = True
    config_section: str = "plain_config"
    options_class: type = NoOptions

    def mesh(self, options: NoOptions, world_size: int) -> Mesh:
        return Mesh(world_size=world_size)

    def validate(self, spec: WorkerSpec, world_size: int) -> None:
        if not (Path(spec.model.path or "") / "config.json").exists():
            raise ConfigError(f"{spec.model.path}: no model")

    def needs_own_process(self) -> bool:
        return False

    def create_worker(self, spec: WorkerSpec, rank: RankInfo) -> Worker:
        return self.worker_class(spec, rank)


class PlainWorker(ReferenceWorker):
    """The reference worker with the metrics `entropy` and `ratio`, which the suite needs. Each rank holds the whole
    model; gradients are summed over the ranks."""

    def __init__(self, spec: WorkerSpec, rank: RankInfo):
        super().__init__(spec)
        self.rank = rank
        if rank.world_size > 1:
            address = f"tcp://{rank.master_address}:{rank.master_port}"
            dist.init_process_group("gloo", init_method=address, rank=rank.rank, world_size=rank.world_size)

    def forward_backward(self, batch, plan, loss, *, temperature, returns=()):
        metrics = super().forward_backward(batch, plan, loss, temperature=temperature, returns=returns)
        if "old_logprobs" not in batch:
            return metrics
        computed = batch.select([i for micro_batch in plan for i in micro_batch]) if any(plan) else None
        if computed is None:
            return {**metrics, "entropy": (0.0, 0.0), "ratio": (0.0, 0.0)}
        # `super()`, not a wrong worker's own `forward`: a fault in its scoring must not change training passes.
        scores = super().forward(computed, [range(computed.num_sequences)], temperature=temperature)
        mask_T = computed["loss_mask"]
        ratio_T = (scores["logprobs"] - computed["old_logprobs"])[mask_T].exp()
        count = float(mask_T.sum())
        return {
            **metrics,
            "entropy": (scores["entropies"][mask_T].sum().item(), count),
            "ratio": (ratio_T.sum().item(), count),
        }

    def add_up(self, gradient: Tensor) -> None:
        """Sums a gradient over the ranks, in place."""
        if dist.is_initialized():
            dist.all_reduce(gradient)

    def optim_step(self, update=None):
        for parameter in (p for p in self.model.parameters() if p.requires_grad):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            self.add_up(parameter.grad)
        return super().optim_step(update)

    def gradients(self):
        gradients = super().gradients()
        for gradient in gradients.values():
            self.add_up(gradient)
        return gradients

    def export_weights(self, max_bucket_bytes, **options):
        return super().export_weights(max_bucket_bytes, **options) if self.rank.rank == 0 else iter(())

    def save_state(self, directory):
        self._on_rank_0(super().save_state, directory)

    def save_model(self, directory):
        self._on_rank_0(super().save_model, directory)

    def close(self):
        if dist.is_initialized():
            dist.destroy_process_group()

    def _on_rank_0(self, write: Callable[[Path], None], directory: Path) -> None:
        if self.rank.rank == 0:
            write(directory)
        if dist.is_initialized():
            dist.barrier()


@attrs.frozen(kw_only=True)
class ProvingBackend(PlainBackend):
    """Claims to have its own model code, so the suite compares it with transformers."""

    def prove(self, spec: WorkerSpec) -> str | None:
        return require_proof(self, spec)

    def proof_basis(self, spec: WorkerSpec) -> dict[str, Any]:
        return {"worker": repr(self.worker_class)}

    def proof_obstacle(self) -> str | None:
        return None

    def proof_worker(self, spec: WorkerSpec) -> Worker:
        return self.worker_class(spec, RankInfo())


class TakesAnotherEps(PlainWorker):
    """Doubles the epsilon of each layer's `k_norm`. Confusing the usual values, 1e-5 and 1e-6, would be a
    larger error."""

    def __init__(self, spec, rank):
        super().__init__(spec, rank)
        for name, module in self.model.named_modules():
            if name.endswith("k_norm"):
                module.variance_epsilon *= 2


class RotatesSlowly(PlainWorker):
    """Halves the lowest rotary frequency, which hardly changes the log-probs of short sequences."""

    def __init__(self, spec, rank):
        super().__init__(spec, rank)
        self.model.model.rotary_emb.inv_freq[-1] *= 0.5


class SendsNoGradientToANorm(PlainWorker):
    """The gradient of each `k_norm.weight` is 0; log-probs are right."""

    def gradients(self):
        gradients = super().gradients()
        return {name: 0 * g if name.endswith("k_norm.weight") else g for name, g in gradients.items()}


class KnowsAWeightByAnotherName(PlainWorker):
    def gradients(self):
        return {name.replace("k_norm", "key_norm"): gradient for name, gradient in super().gradients().items()}


class CannotBuildIt(PlainWorker):
    def __init__(self, spec, rank):
        raise KeyError("no such layer")


class Dies(PlainWorker):
    def __init__(self, spec, rank):
        print("cannot go on", file=sys.stderr, flush=True)
        os._exit(7)


class RoutedWorker(PlainWorker):
    """Raises if the batch has no routes, or routes that do not fit its model."""

    def forward(self, batch, plan, *, temperature, returns=None):
        self.require_fitting(batch)
        return super().forward(batch, plan, temperature=temperature, returns=returns)

    def forward_backward(self, batch, plan, loss, *, temperature, returns=()):
        self.require_fitting(batch)
        return super().forward_backward(batch, plan, loss, temperature=temperature, returns=returns)

    def require_fitting(self, batch):
        config = self.model.config
        shape = RouteShape(
            num_layers=config.num_hidden_layers,
            layers=tuple(sorted(routers(self.model))),
            num_experts=config.num_experts,
            experts_per_token=config.num_experts_per_tok,
        )
        require_routes(batch, shape, key="trainer.policy.plain_config.replay")


class OffloadableWorker(PlainWorker):
    """Moves offloaded tensors into `elsewhere`."""

    can_offload = True

    def __init__(self, spec, rank):
        super().__init__(spec, rank)
        self.elsewhere: dict[str, Any] = {}

    def offload(self, *, parameters, optimizer):
        if parameters:
            self.elsewhere["parameters"] = {name: p.detach().clone() for name, p in self.model.named_parameters()}
            for parameter in self.model.parameters():
                parameter.data.fill_(float("nan"))
        if optimizer:
            self.elsewhere["optimizers"] = [kept.state_dict() for kept in self.optimizers]
            for kept in self.optimizers:
                kept.load_state_dict({"state": {}, "param_groups": kept.state_dict()["param_groups"]})

    def onload(self, *, parameters, optimizer):
        if parameters:
            for name, parameter in self.model.named_parameters():
                parameter.data.copy_(self.elsewhere["parameters"][name])
        if optimizer:
            for kept, state in zip(self.optimizers, self.elsewhere["optimizers"], strict=True):
                kept.load_state_dict(state)


# --- more faults, most of which show only with several ranks --------------------------------------------------------


class AveragesOverRanks(PlainWorker):
    def add_up(self, gradient):
        super().add_up(gradient)
        gradient /= self.rank.world_size


class DropsARank(PlainWorker):
    def add_up(self, gradient):
        if self.rank.rank == 1:
            gradient.zero_()
        super().add_up(gradient)


class CountsMetricsOnEveryRank(PlainWorker):
    def forward_backward(self, batch, plan, loss, *, temperature, returns=()):
        metrics = super().forward_backward(batch, plan, loss, temperature=temperature, returns=returns)
        total = torch.tensor([metrics[name] for name in sorted(metrics)], dtype=torch.float64)
        self.add_up(total)
        added = {name: tuple(pair) for name, pair in zip(sorted(metrics), total.tolist(), strict=True)}
        return {**added, "loss": metrics["loss"]}


class ReportsTheWholeLossOnEveryRank(PlainWorker):
    def forward_backward(self, batch, plan, loss, *, temperature, returns=()):
        metrics = super().forward_backward(batch, plan, loss, temperature=temperature, returns=returns)
        total = torch.tensor(metrics["loss"][0])
        self.add_up(total)
        return {**metrics, "loss": (total.item(), 1.0)}


class ReturnsScoresInThePlansOrder(PlainWorker):
    def forward(self, batch, plan, *, temperature, returns=None):
        scores = super().forward(batch, plan, temperature=temperature)
        if not any(plan):
            return scores
        order = batch.token_index(torch.tensor([i for micro_batch in plan for i in micro_batch]))
        return {name: values_T[order] for name, values_T in scores.items()}


class ExportsItsShardOnly(PlainWorker):
    """Exports only the first half of the parameters, as if the other half were on another rank, which sends nothing."""

    def export_weights(self, max_bucket_bytes, **options) -> Iterator[Any]:
        from rl_core.rank_kit.weight_buckets import pack_buckets

        named = list(self.model.named_parameters())
        return (
            pack_buckets(named[: len(named) // self.rank.world_size], max_bucket_bytes)
            if not self.rank.rank
            else iter(())
        )


class EachRankExportsItsOwn(PlainWorker):
    """Each rank steps with its own gradient and exports all its weights."""

    def add_up(self, gradient):
        pass

    def export_weights(self, max_bucket_bytes, **options):
        return ReferenceWorker.export_weights(self, max_bucket_bytes, **options)


class SkipsAlone(PlainWorker):
    """Each rank checks its own gradient for non-finite values before the gradients are summed."""

    def optim_step(self, update=None):
        mine = [p.grad for p in self.model.parameters() if p.grad is not None]
        is_broken = any(not bool(gradient.isfinite().all()) for gradient in mine)
        for gradient in mine:
            gradient.nan_to_num_()
        step = super().optim_step(update)
        return attrs.evolve(step, skipped=is_broken, grad_norm=float("nan") if is_broken else step.grad_norm)


class ClipsByItsOwnNorm(PlainWorker):
    def optim_step(self, update=None):
        mine = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = sum(float(gradient.double().pow(2).sum()) for gradient in mine) ** 0.5
        assert self.spec.optimizer is not None
        for gradient in mine:
            gradient *= min(1.0, self.spec.optimizer.max_grad_norm / max(norm, 1e-12))
        return super().optim_step(update)


class OneRankKeepsItsWeights(PlainWorker):
    def optim_step(self, update=None):
        before = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        step = super().optim_step(update)
        if self.rank.rank == 1:
            for name, parameter in self.model.named_parameters():
                parameter.data.copy_(before[name])
        return step


class ReadsTheFileOfItsRank(PlainWorker):
    """Each rank saves and loads its own file, so a checkpoint of one rank cannot be loaded on two."""

    def save_state(self, directory):
        ReferenceWorker.save_state(self, directory / str(self.rank.rank))

    def load_state(self, directory):
        super().load_state(directory / str(self.rank.rank))


class LosesTheOffloadedOptimizer(OffloadableWorker):
    def onload(self, *, parameters, optimizer):
        super().onload(parameters=parameters, optimizer=False)


class LosesTheOffloadedWeightsPrecision(OffloadableWorker):
    def onload(self, *, parameters, optimizer):
        super().onload(parameters=parameters, optimizer=optimizer)
        if parameters:
            for parameter in self.model.parameters():
                parameter.data.copy_(parameter.data.bfloat16())
