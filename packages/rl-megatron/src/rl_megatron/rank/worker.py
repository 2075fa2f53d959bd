"""Scores and trains a Megatron model on one rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core.utils import unwrap_model
from torch import Tensor

from rl_core.algorithms.objective import Objective
from rl_core.batch import Batch
from rl_core.errors import WorkerError
from rl_core.interfaces import (
    LossSpec,
    Manifest,
    OptimizerStep,
    OptimizerUpdate,
    Plan,
    RankInfo,
    WeightBucket,
    WeightSender,
    Worker,
    WorkerSpec,
)
from rl_core.rank_kit.background_writer import BackgroundWriter
from rl_core.rank_kit.kept_ids import kept_ids
from rl_core.rank_kit.learning_rates import learning_rate
from rl_core.rank_kit.model_files import ADAPTER_FOLDER, write_config, write_head, write_weights, writing_model
from rl_core.rank_kit.objectives import (
    batch_loss,
    needs_entropies,
    objective_from_spec,
    require_scores,
    total_metrics,
)
from rl_core.rank_kit.optimizer_steps import step_settings
from rl_core.rank_kit.perturbation import Perturbation
from rl_core.rank_kit.process_group import from_first
from rl_core.rank_kit.publishing import pack_on_first, publish
from rl_core.rank_kit.worker_specs import SECTIONS, require_model_path, require_optimizer
from rl_megatron.model.chunks import build_chunks, open_bridge
from rl_megatron.model.export import WeightExport, gradients_as_weights
from rl_megatron.model.lora import write_adapter
from rl_megatron.model.scoring import ChunkScorer, zero_of
from rl_megatron.model.value_head import ChunkValueScorer, head_tensors
from rl_megatron.options import mesh_of
from rl_megatron.place import context_group
from rl_megatron.rank.auxiliary_losses import AuxiliaryLosses
from rl_megatron.rank.checkpoint import read_state, start_writing, write_state
from rl_megatron.rank.micro_batch import MicroBatch, micro_batches, to_stream
from rl_megatron.rank.offloading import HostCopy
from rl_megatron.rank.optimizer import Optimizer, wrap_for_training
from rl_megatron.rank.perturbation import trained_pieces
from rl_megatron.rank.routing import Routing
from rl_megatron.rank.schedule import run_schedule
from rl_megatron.rank.shard_marks import mark_shards
from rl_megatron.rank.start import join, leave
from rl_transformers.kept_tensors import copy_processors, with_rest
from rl_transformers.pretrained import read_generation, write_tokenizer


class MegatronWorker(Worker):
    """The `Worker` of one rank.

    A process can have only one Megatron model, because Megatron keeps one mesh per process.
    """

    can_offload = can_save_in_background = can_perturb = True

    def __init__(self, spec: WorkerSpec, rank: RankInfo, *, prove: Callable[[], None] | None = None):
        """
        Args:
            spec: which model to load and how to train it.
            rank: number and address of this rank.
            prove: called on rank 0 before the model is built; raises ConfigError unless Megatron is proved to compute
                the model as transformers does. None: no proof is needed.
        """
        if spec.num_threads is not None:
            torch.set_num_threads(spec.num_threads)
        self.spec = spec
        where = f"{SECTIONS[spec.role]}.megatron_config"
        self.place = join(rank, mesh_of(spec.options, rank.world_size, where), spec.seed)
        self.bridge = open_bridge(spec, rank.world_size)
        if prove is not None:
            from_first(prove)
        self.chunks: list[Any] = build_chunks(self.bridge, spec, self.place)
        self.steps_done = 0
        self._parameters_out, self._optimizer_out = HostCopy(), HostCopy()
        self._has_gradients = False
        self._background: BackgroundWriter | None = None
        self._perturbation: Perturbation | None = None
        self.scorer: ChunkScorer | ChunkValueScorer | None = None
        last = unwrap_model(self.chunks)[-1]
        if last.post_process:
            is_critic = spec.role == "critic"
            self.scorer = (
                ChunkValueScorer(last) if is_critic else ChunkScorer(last, chunk_tokens=spec.logprobs_chunk_size)
            )
        self.optimizer: Optimizer | None = None
        if spec.optimizer is not None:
            mark_shards(self.chunks, self.place.mesh.expert_tensor)
            self.chunks = list(wrap_for_training(self.chunks, spec.options))
            self.optimizer = Optimizer(self.chunks, spec)
        self.export = WeightExport(self.bridge, self.chunks)
        self.auxiliary = AuxiliaryLosses(self.chunks[0].config, self.place)
        self.routing = Routing(self.chunks, self.place, spec, self.bridge.hf_pretrained.config.to_dict())

    def forward(
        self, batch: Batch, plan: Plan, *, temperature: float, returns: Sequence[str] | None = None
    ) -> dict[str, Tensor]:
        """Computes log-probs and entropies of all tokens, or a critic's values, without gradients.

        `returns` names the scores to compute; None: all. A pass that records routes returns them too. A rank whose
        scores the controller does not read returns an empty dict.
        """
        wanted = self._score_names if returns is None else returns
        require_scores(wanted, self._score_names, self.spec.role)

        def finish(micro_batch: MicroBatch, hidden_BSH: Tensor) -> tuple[Tensor, list[Tensor]]:
            scores = self._scores(micro_batch, hidden_BSH, None, temperature, with_entropy="entropies" in wanted)
            return zero_of(hidden_BSH), [scores[name].cpu() for name in wanted]

        with self.routing.scoring(batch):
            parts = self._run(self._lay_out(batch, plan), finish, forward_only=True)
            taken = self.routing.taken(batch, plan)
        if not self.place.returns_results:
            return {}
        return {**self._on_stream(batch, plan, wanted, parts), **taken}

    def forward_backward(
        self, batch: Batch, plan: Plan, loss: LossSpec, *, temperature: float, returns: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Adds the gradient of `loss` to the accumulated gradients; returns metrics and the scores named in `returns`.

        Only tokens in the loss mask are scored, because no loss reads the others; their scores are 0. Ranks
        without sequences, and pipeline stages other than the last, return an empty dict.
        """
        require_optimizer(self.optimizer, self.spec, "forward_backward")
        self.routing.require(batch)
        objective = objective_from_spec(loss)
        require_scores(returns, self._score_names, self.spec.role)
        with_entropy = needs_entropies(objective, loss, returns)

        def finish(micro_batch: MicroBatch, hidden_BSH: Tensor) -> tuple[Tensor, Any]:
            loss, metrics, scores = self._loss(
                objective, micro_batch, hidden_BSH, temperature, with_entropy=with_entropy
            )
            return loss, (metrics, [scores[name].detach().cpu() for name in returns if scores])

        laid_out = self._lay_out(batch, plan)
        with self.auxiliary.weighted(sum(part.num_tokens for part in laid_out)):
            parts = self._run(laid_out, finish, forward_only=False)
        auxiliary = self.auxiliary.metrics(len(laid_out))
        self._has_gradients = True
        totals = total_metrics(metrics for metrics, _ in parts)
        if not totals:
            return {}
        return {**totals, **auxiliary, **self._on_stream(batch, plan, returns, [scores for _, scores in parts])}

    def optim_step(self, update: OptimizerUpdate | None = None) -> OptimizerStep:
        """Scales and clips the gradients, takes an optimizer step, advances the learning-rate schedule and clears the
        gradients. If the gradient norm is not finite, this method only clears the gradients."""
        optimizer = require_optimizer(self.optimizer, self.spec, "optim_step")
        if not self._has_gradients:
            raise WorkerError(f"{self.spec.role}: optim_step without a gradient; call forward_backward first")
        rate = learning_rate(self.steps_done, optimizer.config, self.spec.total_optimizer_steps)
        settings = step_settings(optimizer.config, update, scheduled_rate=rate)
        grad_norm = optimizer.step(settings)
        self._has_gradients = False
        is_finite = math.isfinite(grad_norm)
        self.steps_done += is_finite
        return OptimizerStep(grad_norm=grad_norm, learning_rate=settings.learning_rate, skipped=not is_finite)

    def gradients(self) -> dict[str, Tensor]:
        """Returns the accumulated gradients of the trained parameters, summed over all ranks, in float32 on the CPU,
        under Hugging Face names.

        If the model has adapters, returns only the gradients of the adapters, under peft's names, and of a critic's
        head. With `lora_type=lora`, parts of a fused matrix share A, and each part gets the whole gradient of A.
        """
        optimizer = require_optimizer(self.optimizer, self.spec, "gradients")
        is_adapted, trained = self.spec.model.lora.rank > 0, self.export.trained_names()
        of_gradients = WeightExport(self.bridge, self.chunks)  # `self.export` caches the weights' dtype
        with optimizer.whole_gradients(), gradients_as_weights(self.chunks):
            exported = self._exported(of_gradients, only_adapters=is_adapted)
            return {
                name: tensor.detach().to("cpu", copy=True)
                for name, tensor in exported
                if is_adapted or name in trained or name.startswith("value_head.")
            }

    def export_weights(self, max_bucket_bytes: int, *, only_trained: bool = False) -> Iterator[WeightBucket]:
        """Yields buckets of whole weights in the compute dtype on rank 0, and nothing on other ranks. Each weight is
        gathered only when its bucket is filled, so all ranks must drain the iterator together."""
        tensors = self._exported(self.export, only_trained=only_trained)
        return pack_on_first(tensors, max_bucket_bytes, is_first=self.place.rank == 0)

    def export_adapter(self, max_bucket_bytes: int) -> Iterator[WeightBucket]:
        """Like `export_weights`, but yields only the adapter, under peft's names."""
        tensors = self.export.adapters()
        return pack_on_first(tensors, max_bucket_bytes, is_first=self.place.rank == 0)

    def publish(
        self, sender: WeightSender, version: int, max_bucket_bytes: int, *, only_trained: bool = False
    ) -> Manifest:
        """Sends the buckets of `export_weights`, or of `export_adapter` if the spec says to send adapters alone."""
        return publish(self, sender, version, max_bucket_bytes, only_trained=only_trained)

    def route_layers(self) -> tuple[int, ...]:
        """See `Worker.route_layers`."""
        return self.routing.layers

    def perturb(self, seed: int, scale: float) -> None:
        """Adds noise to every trained parameter; `restore` removes it. The noise is the same on any mesh."""
        self.restore()
        self._perturbation = Perturbation.perturb(list(trained_pieces(self.chunks)), seed=seed, scale=scale)

    def restore(self) -> None:
        """Removes the noise that `perturb` added, if any."""
        if self._perturbation is not None:
            self._perturbation.restore(trained_pieces(self.chunks))
            self._perturbation = None

    def save_state(self, directory: Path) -> None:
        """Writes the weights, the number of optimizer steps done and, for a trained model, the optimizer's state."""
        write_state(directory, self.chunks, self.optimizer, steps_done=self.steps_done)

    def start_saving(self, directory: Path) -> None:
        """Like `save_state`, but writes a copy in CPU memory in the background."""
        self._background = self._background or BackgroundWriter(is_alone=False)
        start_writing(self._background, directory, self.chunks, self.optimizer, steps_done=self.steps_done)

    def has_saved(self) -> bool:
        """See `Worker.has_saved`; raises what `BackgroundWriter.is_done` raises."""
        return self._background is None or self._background.is_done()

    def load_state(self, directory: Path) -> None:
        """Loads what `save_state` wrote on this or any other mesh. The files are checked for completeness before
        anything changes."""
        steps_done = read_state(directory, self.chunks, self.optimizer)
        if self.optimizer is not None:
            self.steps_done = steps_done
            self._has_gradients = False

    def save_model(self, directory: Path) -> None:
        """Writes the model and its tokenizer. Weights are in the compute dtype, which is also the dtype in config.json.

        Adapters are merged into the weights, and also written to the folder `adapter`; a critic's head is written to a
        separate file.
        """
        path, is_first = require_model_path(self.spec), self.place.rank == 0
        # All ranks gather the head and the adapters before rank 0 writes, because writing may fail on rank 0 alone.
        head = dict(head_tensors(self.chunks)) if self.spec.role == "critic" else {}
        adapters = dict(self.export.adapters()) if self.spec.model.lora.rank > 0 else {}
        with writing_model(directory):
            tensors = self.export.weights(with_buffers=True)
            if is_first and self.spec.role != "critic":
                is_tied = self.chunks[0].config.share_embeddings_and_output_weights
                tensors = with_rest(tensors, path, ["lm_head.weight"] if is_tied else [])
            write_weights(tensors, directory, is_first=is_first)
            if not is_first:
                return
            dtype = torch.bfloat16 if self.spec.bf16 else torch.float32
            generation = read_generation(path)
            write_config(self.bridge.hf_pretrained.config, directory, dtype=dtype, generation=generation)
            copy_processors(path, directory)
            write_tokenizer(path, directory)
            if head:
                write_head(head, directory)
            if self.spec.model.lora.rank > 0:
                write_adapter(adapters, self.spec, directory / ADAPTER_FOLDER)

    def offload(self, *, parameters: bool, optimizer: bool) -> None:
        """Moves parameters, gradients and optimizer state to CPU memory and frees their memory on the accelerator.
        Does nothing without an accelerator, because the tensors are in CPU memory anyway."""
        if self.place.device.type == "cpu":
            return
        self.give_back(parameters=parameters, optimizer=optimizer)
        if self.spec.options.empty_cuda_cache:
            torch.cuda.empty_cache()

    def give_back(self, *, parameters: bool, optimizer: bool) -> None:
        """Copies the tensors to CPU memory and frees their storage, on any device. If the optimizer's float32
        parameters are views of the model's parameters, they are offloaded with the model's parameters."""
        models_own = {tensor.untyped_storage().data_ptr() for tensor in self._parameter_memory()}
        if parameters and not self._parameters_out.is_out:
            self._parameters_out.take_out(self._parameter_memory(), self._unused_gradient_memory())
        if optimizer and self.optimizer is not None and not self._optimizer_out.is_out:
            tensors = self.optimizer.state_tensors()
            self._optimizer_out.take_out(t for t in tensors if t.untyped_storage().data_ptr() not in models_own)

    def onload(self, *, parameters: bool, optimizer: bool) -> None:
        """Undoes `offload`."""
        if parameters:
            self._parameters_out.bring_back()
        if optimizer:
            self._optimizer_out.bring_back()

    def close(self) -> None:
        """Drops the model and the optimizer, and leaves the process groups if no background save uses them any more."""
        if self.chunks:
            self.chunks, self.optimizer, self.scorer = [], None, None
            del self.export
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

    def _exported(
        self, export: WeightExport, *, only_adapters: bool = False, only_trained: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        # Engines load the expert bias from the checkpoint; training changes it only if `transformer_config_kwargs` sets
        # an update rate.
        updates_bias = self.chunks[0].config.moe_router_bias_update_rate > 0
        if only_adapters:
            yield from export.adapters()
        else:
            yield from export.weights(with_buffers=updates_bias, only_trained=only_trained)
        if self.spec.role == "critic":
            yield from head_tensors(self.chunks)

    def _lay_out(self, batch: Batch, plan: Plan) -> list[MicroBatch]:
        return micro_batches(batch, plan, self.place, use_sample_packing=self.spec.use_sample_packing)

    def _on_stream(
        self, batch: Batch, plan: Plan, names: Sequence[str], parts: Sequence[Sequence[Tensor]]
    ) -> dict[str, Tensor]:
        """Assembles the scores of the whole batch from the scores of its micro-batches. A micro-batch without sequences
        has no scores."""
        scores = {name: torch.zeros(batch.num_tokens) for name in names}
        for sequences, part in zip(plan, parts, strict=True):
            if len(sequences):
                index_T = batch.token_index(torch.as_tensor(list(sequences), dtype=torch.int64))
                for values_T, part_T in zip(scores.values(), part, strict=True):
                    values_T[index_T] = part_T
        return scores

    def _run(self, parts: list[MicroBatch], finish: Any, *, forward_only: bool) -> list[Any]:
        return run_schedule(self.chunks, parts, finish, forward_only=forward_only, around=self.routing.around)

    @property
    def _score_names(self) -> tuple[str, ...]:
        return ChunkValueScorer.score_names if self.spec.role == "critic" else ChunkScorer.score_names

    def _scores(
        self,
        micro_batch: MicroBatch,
        hidden_BSH: Tensor,
        mask_T: Tensor | None,
        temperature: float,
        *,
        with_entropy: bool,
    ) -> dict[str, Tensor]:
        """Returns the scores of all tokens of the micro-batch, on every context rank; tokens outside the mask get 0."""
        assert self.scorer is not None
        place_S = micro_batch.scored_places(mask_T)
        index_S = micro_batch.target_index_P[place_S].to(self.place.device)
        tokens_T = torch.zeros(0, dtype=torch.int64) if micro_batch.batch is None else micro_batch.batch["tokens"]
        hidden_SH = hidden_BSH.flatten(0, 1)[place_S.to(self.place.device)]
        names, targets_S = self._score_names, tokens_T.to(self.place.device)[index_S]
        options: dict[str, Any] = {}
        if "entropies" in names and not with_entropy:
            names, options = ("logprobs",), {"with_entropy": False}
        if "logprobs" in names and micro_batch.batch is not None:
            stream_index_S = micro_batch.target_index_P[place_S]
            options["kept"] = kept_ids(micro_batch.batch, stream_index_S, self.place.device)
        scores_S = self.scorer(hidden_SH, targets_S, temperature=temperature, **options)
        group = context_group()
        return {
            name: to_stream(values_S, index_S, micro_batch.num_tokens, group)
            for name, values_S in zip(names, scores_S, strict=True)
        }

    def _loss(
        self,
        objective: Objective,
        micro_batch: MicroBatch,
        hidden_BSH: Tensor,
        temperature: float,
        *,
        with_entropy: bool,
    ) -> tuple[Tensor, Any, dict[str, Tensor]]:
        batch = micro_batch.batch
        mask_T = None if batch is None else batch["loss_mask"]
        scores = self._scores(micro_batch, hidden_BSH, mask_T, temperature, with_entropy=with_entropy)
        if batch is None:
            return zero_of(hidden_BSH), {}, {}
        return *batch_loss(objective, batch, scores, self.place.device), scores
