"""One rank that scores and trains a Megatron model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core.utils import unwrap_model
from safetensors.torch import save_file
from torch import Tensor

from rl_core.algorithms.objective import Objective, sum_metrics
from rl_core.batch import Batch
from rl_core.errors import WorkerError
from rl_core.interfaces import (
    LossSpec,
    Manifest,
    Metrics,
    OptimizerStep,
    Plan,
    RankInfo,
    WeightBucket,
    WeightSender,
    WorkerSpec,
)
from rl_core.model_files import ADAPTER_FOLDER, write_weights
from rl_core.weights import pack_buckets
from rl_core.workers.objective import objective_from_spec
from rl_core.workers.schedule import learning_rate
from rl_megatron.auxiliary_losses import AuxiliaryLosses
from rl_megatron.checkpoint import BackgroundWriter, read_state, write_state
from rl_megatron.export import exported, gradients_as_weights
from rl_megatron.groups import context_group
from rl_megatron.lora import adapter_tensors, write_adapter
from rl_megatron.micro_batch import MicroBatch, micro_batches, to_stream
from rl_megatron.model import build_chunks, open_bridge
from rl_megatron.offloading import HostCopy
from rl_megatron.optimizer import Optimizer, wrap_for_training
from rl_megatron.options import SECTIONS, mesh_of
from rl_megatron.perturbation import Perturbation
from rl_megatron.routing import Routing
from rl_megatron.saved_model import write_config
from rl_megatron.schedule import run_schedule
from rl_megatron.scoring import TokenScorer, zero_of
from rl_megatron.start import join, leave
from rl_megatron.value_head import HEAD_FILE, ValueScorer, head_tensors

_CURRENT = {"logprobs": "logprobs_T", "entropies": "entropies_T", "values": "predicted_values_T"}
"""What a score is to a loss."""


class MegatronWorker:
    """`Worker`, `Offloadable`, `BackgroundSaver`, `Perturbable` and `Inspectable` of `rl_core.interfaces`.

    Its process has no other Megatron model that is trained: the mesh is the process's own.
    """

    def __init__(self, spec: WorkerSpec, rank: RankInfo):
        if spec.num_threads is not None:
            torch.set_num_threads(spec.num_threads)
        self.spec = spec
        where = f"{SECTIONS[spec.role]}.megatron_config"
        self.place = join(rank, mesh_of(spec.options, rank.world_size, where), spec.seed)
        self.bridge = open_bridge(spec, rank.world_size)
        self.chunks: list[Any] = build_chunks(self.bridge, spec, self.place)
        self.steps_done = 0
        self._parameters_out, self._optimizer_out = HostCopy(), HostCopy()
        self._has_gradients = False
        self._background: BackgroundWriter | None = None
        self._perturbation: Perturbation | None = None
        self.scorer: TokenScorer | ValueScorer | None = None
        last = unwrap_model(self.chunks)[-1]
        if last.post_process:
            is_critic = spec.role == "critic"
            self.scorer = ValueScorer(last) if is_critic else TokenScorer(last, chunk_tokens=spec.logprobs_chunk_size)
        self.optimizer: Optimizer | None = None
        if spec.optimizer is not None:
            self.chunks = list(wrap_for_training(self.chunks, spec.options))
            self.optimizer = Optimizer(self.chunks, spec)
        self.auxiliary = AuxiliaryLosses(self.chunks[0].config, self.place)
        self.routing = Routing(self.chunks, self.place, spec, self.bridge.hf_pretrained.config.to_dict())

    def forward(self, batch: Batch, plan: Plan, *, temperature: float) -> dict[str, Tensor]:
        """Log-probs and entropies of the stream, or a critic's values, without gradient."""

        def finish(micro_batch: MicroBatch, hidden_BSH: Tensor) -> tuple[Tensor, list[Tensor]]:
            scores = self._scores(micro_batch, hidden_BSH, None, temperature)
            return zero_of(hidden_BSH), [values_T.cpu() for values_T in scores]

        with self.routing.scoring(batch):
            parts = self._run(self._lay_out(batch, plan), finish, forward_only=True)
            taken = self.routing.taken(batch, plan)
        if not self.place.returns_results:
            return {}
        assert self.scorer is not None
        scores = {name: torch.zeros(batch.num_tokens) for name in self.scorer.score_names}
        for sequences, part in zip(plan, parts, strict=True):
            index_T = batch.token_index(torch.as_tensor(list(sequences), dtype=torch.int64))
            for values_T, part_T in zip(scores.values(), part, strict=True):
                values_T[index_T] = part_T
        return {**scores, **taken}

    def forward_backward(self, batch: Batch, plan: Plan, loss: LossSpec, *, temperature: float) -> Metrics:
        """Adds the gradient of `loss`. Only trained tokens are scored: no loss reads the others."""
        self._require_trained("forward_backward")
        self.routing.require(batch)
        objective = objective_from_spec(loss)

        def finish(micro_batch: MicroBatch, hidden_BSH: Tensor) -> tuple[Tensor, Any]:
            return self._loss(objective, micro_batch, hidden_BSH, temperature)

        laid_out = self._lay_out(batch, plan)
        with self.auxiliary.weighted(sum(part.num_tokens for part in laid_out)):
            parts = self._run(laid_out, finish, forward_only=False)
        auxiliary = self.auxiliary.metrics(len(laid_out))
        self._has_gradients = True
        totals = sum_metrics(parts)
        # Each part weighs its loss 1; that of the whole call is their sum, however many parts it was cut into.
        return {**totals, **auxiliary, "loss": (totals["loss"][0], 1.0)} if totals else {}

    def optim_step(self) -> OptimizerStep:
        """Clips, steps, advances the schedule, clears the gradients; only the last where one is not finite."""
        optimizer = self._require_trained("optim_step")
        if not self._has_gradients:
            raise WorkerError(f"{self.spec.role}: optim_step without a gradient; call forward_backward first")
        rate = learning_rate(self.steps_done, optimizer.config, self.spec.total_optimizer_steps)
        grad_norm = optimizer.step(rate)
        self._has_gradients = False
        is_finite = math.isfinite(grad_norm)
        self.steps_done += is_finite
        return OptimizerStep(grad_norm=grad_norm, learning_rate=rate, skipped=not is_finite)

    def gradients(self) -> dict[str, Tensor]:
        """Accumulated gradients, summed over all ranks, under Hugging Face names, float32 on the CPU."""
        optimizer = self._require_trained("gradients")
        with optimizer.whole_gradients(), gradients_as_weights(self.chunks):
            return {name: tensor.detach().to("cpu", copy=True) for name, tensor in self._exported()}

    def export_weights(self, max_bucket_bytes: int) -> Iterator[WeightBucket]:
        """The weights in the dtype that is computed in, gathered one by one and packed lazily; rank 0 has them all."""
        return self._packed(self._exported(), max_bucket_bytes)

    def export_adapter(self, max_bucket_bytes: int) -> Iterator[WeightBucket]:
        """The adapter alone, as `export_weights`."""
        return self._packed(adapter_tensors(self.bridge, self.chunks), max_bucket_bytes)

    def publish(self, sender: WeightSender, version: int, max_bucket_bytes: int) -> Manifest:
        """Sends `export_weights`, or `export_adapter` where the configuration says so."""
        export = self.export_adapter if self.spec.model.lora.is_sent_alone else self.export_weights
        return sender.send(export(max_bucket_bytes), version)

    def perturb(self, seed: int, scale: float) -> None:
        """Noise on every trained parameter, until `restore`; the same on any mesh."""
        self.restore()
        self._perturbation = Perturbation.perturb(self.chunks, seed=seed, scale=scale)

    def restore(self) -> None:
        """Takes the noise away again."""
        if self._perturbation is not None:
            self._perturbation.restore()
            self._perturbation = None

    def save_state(self, directory: Path) -> None:
        """Writes weights and, of a trained model, optimizer and schedule."""
        write_state(directory, self.chunks, self.optimizer, steps_done=self.steps_done)

    def start_saving(self, directory: Path) -> None:
        """As `save_state`, from a copy in CPU memory."""
        self._background = self._background or BackgroundWriter()
        self._background.start(directory, self.chunks, self.optimizer, steps_done=self.steps_done)

    def has_saved(self) -> bool:
        """See `BackgroundSaver`. Raises CheckpointError."""
        return self._background is None or self._background.is_done()

    def load_state(self, directory: Path) -> None:
        """Reads what `save_state` wrote, on any mesh; completeness is checked before anything changes."""
        steps_done = read_state(directory, self.chunks, self.optimizer)
        if self.optimizer is not None:
            self.steps_done = steps_done
            self._has_gradients = False

    def save_model(self, directory: Path) -> None:
        """Writes model and tokenizer; weights in the dtype that is computed in, and the configuration says so.

        Adapters are merged, and stand alone in the folder `adapter`; a critic's head is a file of its own.
        """
        head = dict(head_tensors(self.chunks)) if self.spec.role == "critic" else {}
        tensors = exported(self.bridge, self.chunks, with_buffers=True)
        if self.place.rank == 0:
            dtype = "bfloat16" if self.spec.bf16 else "float32"
            write_weights(tensors, directory)
            write_config(self.bridge.hf_pretrained.config, str(self.spec.model.path), dtype, directory)
            if head:
                save_file(
                    {name: tensor.cpu() for name, tensor in head.items()}, directory / HEAD_FILE, {"format": "pt"}
                )
        else:
            for _ in tensors:
                pass
        if self.spec.model.lora.rank > 0:
            adapters = dict(adapter_tensors(self.bridge, self.chunks))
            if self.place.rank == 0:
                write_adapter(adapters, self.spec, directory / ADAPTER_FOLDER)

    def offload(self, *, parameters: bool, optimizer: bool) -> None:
        """Gives the device's memory back, keeping parameters, gradients and optimizer state in CPU memory; without an
        accelerator they are there."""
        if self.place.device.type == "cpu":
            return
        if parameters and not self._parameters_out.is_out:
            self._parameters_out.take_out(self._parameter_memory(), self._unused_gradient_memory())
        if optimizer and self.optimizer is not None and not self._optimizer_out.is_out:
            self._optimizer_out.take_out(self.optimizer.state_tensors())
        if self.spec.options.empty_cuda_cache:
            torch.cuda.empty_cache()

    def onload(self, *, parameters: bool, optimizer: bool) -> None:
        """Gets it back."""
        if parameters:
            self._parameters_out.bring_back()
        if optimizer:
            self._optimizer_out.bring_back()

    def close(self) -> None:
        """Drops model and optimizer, and leaves the other ranks."""
        if self.chunks:
            self.chunks, self.optimizer, self.scorer = [], None, None
            # A thread that still waits for other ranks would crash without them; it ends with the process.
            if self._background is None or not self._background.is_busy:
                leave()

    def _parameter_memory(self) -> list[Tensor]:
        models = unwrap_model(self.chunks)
        kept = [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]
        return kept + (self._gradient_memory() if self._has_gradients else [])

    def _unused_gradient_memory(self) -> list[Tensor]:
        return [] if self._has_gradients else self._gradient_memory()

    def _gradient_memory(self) -> list[Tensor]:
        return [] if self.optimizer is None else [buffer.grad_data for buffer in self.optimizer.buffers]

    def _exported(self) -> Iterator[tuple[str, Tensor]]:
        # An engine has the expert bias of the checkpoint; it changes only where a pass-through section asks for that.
        updates_bias = self.chunks[0].config.moe_router_bias_update_rate > 0
        yield from exported(self.bridge, self.chunks, with_buffers=updates_bias)
        if self.spec.role == "critic":
            yield from head_tensors(self.chunks)

    def _packed(self, tensors: Iterator[tuple[str, Tensor]], max_bucket_bytes: int) -> Iterator[WeightBucket]:
        if self.place.rank == 0:
            yield from pack_buckets(tensors, max_bucket_bytes)
        else:
            for _ in tensors:
                pass

    def _lay_out(self, batch: Batch, plan: Plan) -> list[MicroBatch]:
        return micro_batches(batch, plan, self.place, use_sample_packing=self.spec.use_sample_packing)

    def _run(self, parts: list[MicroBatch], finish: Any, *, forward_only: bool) -> list[Any]:
        return run_schedule(self.chunks, parts, finish, forward_only=forward_only, around=self.routing.around)

    def _scores(
        self, micro_batch: MicroBatch, hidden_BSH: Tensor, mask_T: Tensor | None, temperature: float
    ) -> list[Tensor]:
        """Of the micro-batch's stream, on every context rank."""
        assert self.scorer is not None
        place_S = micro_batch.scored_places(mask_T)
        index_S = micro_batch.target_index_P[place_S].to(self.place.device)
        tokens_T = torch.zeros(0, dtype=torch.int64) if micro_batch.batch is None else micro_batch.batch["tokens"]
        hidden_SH = hidden_BSH.flatten(0, 1)[place_S.to(self.place.device)]
        scores_S = self.scorer(hidden_SH, tokens_T.to(self.place.device)[index_S], temperature=temperature)
        group = context_group()
        return [to_stream(values_S, index_S, micro_batch.num_tokens, group) for values_S in scores_S]

    def _loss(
        self, objective: Objective, micro_batch: MicroBatch, hidden_BSH: Tensor, temperature: float
    ) -> tuple[Tensor, Any]:
        assert self.scorer is not None
        batch = micro_batch.batch
        mask_T = None if batch is None else batch["loss_mask"]
        scores = self._scores(micro_batch, hidden_BSH, mask_T, temperature)
        if batch is None:
            return zero_of(hidden_BSH), {}
        weighted_sum, metrics = objective(
            {name: batch[name].to(self.place.device) for name in objective.call_columns},
            sequence_T=batch.sequence_index.to(self.place.device),
            **{_CURRENT[name]: values_T for name, values_T in zip(self.scorer.score_names, scores, strict=True)},
        )
        return weighted_sum, metrics

    def _require_trained(self, call: str) -> Optimizer:
        if self.optimizer is None:
            raise WorkerError(f"{self.spec.role}: {call} needs an optimizer, and this model was started without one")
        return self.optimizer
