"""One rank that scores and trains a Hugging Face causal language model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer

from rl_core.algorithms.objective import sum_metrics
from rl_core.batch import Batch
from rl_core.errors import ConfigError, WorkerError
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
from rl_core.model_files import ADAPTER_FOLDER
from rl_core.routes import require_routes
from rl_core.weights import pack_buckets
from rl_core.workers.group import INPUT_COLUMNS
from rl_core.workers.objective import objective_from_spec
from rl_core.workers.schedule import learning_rate
from rl_fsdp.attention import scatter_rows
from rl_fsdp.backend import replay_key
from rl_fsdp.checkpoint import BackgroundWriter, read_state, write_state
from rl_fsdp.lora import adapter_tensors, has_adapters, save_adapters
from rl_fsdp.micro_batch import model_input, predicted_tokens
from rl_fsdp.model import load_scorer
from rl_fsdp.perturbation import Perturbation
from rl_fsdp.ranks import Ranks
from rl_fsdp.saved_model import write_config, write_whole_weights
from rl_fsdp.shards import Shards, TensorShards
from rl_fsdp.start import Generation, start_shards
from rl_fsdp.value_head import ValueScorer, save_head
from rl_fsdp.weights import persistent_buffers

_CURRENT = {"logprobs": "logprobs_T", "entropies": "entropies_T", "values": "predicted_values_T"}
"""What a score is to a loss."""


class FsdpWorker:
    """`Worker`, `Offloadable`, `BackgroundSaver`, `Perturbable`, `Inspectable` of `rl_core.interfaces`: one rank, alone
    or of several.

    Several ranks run the same micro-batches in the same order, since every layer's parameters are gathered from all;
    one that has no sequences left computes a shortest one again and leaves its result out.
    Nothing here is random (the model runs without dropout), so `spec.seed` has nothing to fix.
    """

    def __init__(self, spec: WorkerSpec, rank: RankInfo, generation: Generation = "fsdp2"):
        if spec.num_threads is not None:
            torch.set_num_threads(spec.num_threads)
        self.spec = spec
        self.device = _device(rank)
        is_sharded = rank.world_size > 1 or (spec.options.cpu_offload and self.device.type != "cpu")
        self.ranks = Ranks.join(rank, self.device, spec.options) if is_sharded else None
        self.shards: Shards = (
            TensorShards(load_scorer(spec, self.device))
            if self.ranks is None
            else start_shards(spec, self.ranks, generation)
        )
        self.scorer = self.shards.scorer
        self.steps_done = 0
        self.background: BackgroundWriter | None = None
        self._perturbation: Perturbation | None = None
        self.optimizer: torch.optim.AdamW | None = None
        if spec.optimizer is not None:
            self.optimizer = torch.optim.AdamW(
                [parameter for parameter in self.scorer.parameters() if parameter.requires_grad],
                lr=spec.optimizer.lr,
                betas=spec.optimizer.adam_betas,
                weight_decay=spec.optimizer.weight_decay,
                fused=True,
            )

    def forward(self, batch: Batch, plan: Plan, *, temperature: float) -> dict[str, Tensor]:
        """Log-probs and entropies of the stream, or a critic's values, without gradient."""
        scores = {name: torch.zeros(batch.num_tokens) for name in self.scorer.score_names}
        inputs = batch.without_columns(*(name for name in batch if name not in INPUT_COLUMNS))
        self._require_fitting_routes(inputs)
        for sequences, micro_batch in self._micro_batches(inputs, plan):
            index_S = predicted_tokens(micro_batch)
            with torch.no_grad():
                scores_S = self._score(micro_batch, index_S, temperature)
            if not sequences:
                continue
            stream_index_S = batch.token_index(torch.as_tensor(sequences))[index_S]
            for values_T, values_S in zip(scores.values(), scores_S, strict=True):
                values_T[stream_index_S] = values_S.float().cpu()
        if self.ranks is None:
            return scores
        self.shards.let_go()
        return scores if self.ranks.returns_results else {}

    def forward_backward(self, batch: Batch, plan: Plan, loss: LossSpec, *, temperature: float) -> Metrics:
        """Adds the gradient of `loss`. Only trained tokens are scored: no loss reads the others."""
        self._require_trained("forward_backward")
        self._require_fitting_routes(batch)
        objective = objective_from_spec(loss)
        parts = []
        for _, micro_batch in self._micro_batches(batch, plan):
            trained_S = predicted_tokens(micro_batch, among=micro_batch["loss_mask"])
            scores_S = self._score(micro_batch, trained_S, temperature)
            index_S, num_tokens = trained_S.to(self.device), micro_batch.num_tokens
            weighted_sum, metrics = objective(
                {name: micro_batch[name].to(self.device) for name in objective.call_columns},
                sequence_T=micro_batch.sequence_index.to(self.device),
                **{
                    _CURRENT[name]: scatter_rows(values_S, index_S, num_tokens)
                    for name, values_S in zip(self.scorer.score_names, scores_S, strict=True)
                },
            )
            self.shards.backward(weighted_sum)
            parts.append(metrics)
        totals = sum_metrics(parts)
        # Each part weighs its loss 1; that of the whole call is their sum, however many parts it was cut into.
        return {**totals, "loss": (totals["loss"][0], 1.0)}

    def optim_step(self) -> OptimizerStep:
        """Clips, steps, advances the schedule, clears the gradients; only the last where one is not finite."""
        optimizer, config = self._require_trained("optim_step"), self.spec.optimizer
        assert config is not None
        if all(parameter.grad is None for parameter in self.scorer.parameters()):
            raise WorkerError(f"{self.spec.role}: optim_step without a gradient; call forward_backward first")
        grad_norm = self.shards.clip(config.max_grad_norm)
        rate = learning_rate(self.steps_done, config, self.spec.total_optimizer_steps)
        is_finite = math.isfinite(grad_norm)
        if is_finite:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            self.steps_done += 1
        optimizer.zero_grad()
        return OptimizerStep(grad_norm=grad_norm, learning_rate=rate, skipped=not is_finite)

    def gradients(self) -> dict[str, Tensor]:
        """Accumulated gradients under Hugging Face names, in the parameters' dtype, on the CPU; zeros where none is."""
        return self.shards.gradients()

    def export_weights(self, max_bucket_bytes: int) -> Iterator[WeightBucket]:
        """The weights in the dtype that is computed in, gathered one by one and packed lazily; rank 0 has them all."""
        return self._packed(self.shards.exported(), max_bucket_bytes)

    def export_adapter(self, max_bucket_bytes: int) -> Iterator[WeightBucket]:
        """The adapter alone, as `export_weights`; in the same dtype, which is the engine's too."""
        return self._packed(adapter_tensors(self.scorer.model, self.scorer.compute_dtype), max_bucket_bytes)

    def publish(self, sender: WeightSender, version: int, max_bucket_bytes: int) -> Manifest:
        """Sends `export_weights`, or `export_adapter` where the configuration says so."""
        export = self.export_adapter if self.spec.model.lora.is_sent_alone else self.export_weights
        return sender.send(export(max_bucket_bytes), version)

    def perturb(self, seed: int, scale: float) -> None:
        """Noise on every trained parameter, until `restore`."""
        self.restore()
        self._perturbation = Perturbation.perturb(self.shards, seed=seed, scale=scale)

    def restore(self) -> None:
        """Takes the noise away again."""
        if self._perturbation is not None:
            self._perturbation.restore(self.shards)
            self._perturbation = None

    def save_state(self, directory: Path) -> None:
        """Writes weights and, of a trained model, optimizer and schedule; every rank its own shards."""
        write_state(directory, self.shards.state(self.optimizer), steps_done=self.steps_done, ranks=self.ranks)

    def start_saving(self, directory: Path) -> None:
        """As `save_state`, from a copy in CPU memory."""
        self.background = self.background or BackgroundWriter(self.ranks)
        self.background.start(directory, self.shards.state(self.optimizer), steps_done=self.steps_done)

    def has_saved(self) -> bool:
        """See `BackgroundSaver`. Raises CheckpointError."""
        return self.background is None or self.background.is_done()

    def load_state(self, directory: Path) -> None:
        """Reads what `save_state` wrote, on any number of ranks; all is checked before anything changes."""
        state = self.shards.state(self.optimizer)
        steps_done = read_state(directory, state, ranks=self.ranks)
        self.shards.take(state, self.optimizer)
        if self.optimizer is not None:
            self.optimizer.zero_grad()
            self.steps_done = steps_done
            for moments in self.optimizer.state.values():
                moments["step"].fill_(steps_done)

    def save_model(self, directory: Path) -> None:
        """Writes model and tokenizer; weights in the dtype that is computed in, and the configuration says so.

        Adapters are merged, and stand alone in the folder `adapter`; a critic's head is a file of its own.
        """
        scorer, model, dtype, is_first = self.scorer, self.scorer.model, self.scorer.compute_dtype, self._is_first
        write_whole_weights(
            chain(self.shards.model_weights(), persistent_buffers(model).items()), directory, is_first=is_first
        )
        if is_first:
            write_config(model, dtype, directory)
            self._tokenizer().save_pretrained(directory)
        if isinstance(scorer, ValueScorer):
            save_head(scorer, directory, is_first=is_first)
        if has_adapters(model):
            save_adapters(model, directory / ADAPTER_FOLDER, is_first=is_first)

    def offload(self, *, parameters: bool, optimizer: bool) -> None:
        """Moves them (parameters with their gradients) to CPU memory; without an accelerator they are there."""
        self._move(torch.device("cpu"), parameters=parameters, optimizer=optimizer)

    def onload(self, *, parameters: bool, optimizer: bool) -> None:
        """Moves them back."""
        self._move(self.device, parameters=parameters, optimizer=optimizer)

    def close(self) -> None:
        """Drops model and optimizer, and leaves the other ranks."""
        self.optimizer = None
        # A thread that still waits for other ranks would crash without them; it ends with the process.
        is_busy = self.background is not None and self.background.is_busy
        if self.__dict__.pop("scorer", None) is not None and self.ranks is not None and not is_busy:
            self.ranks.leave()

    def _require_fitting_routes(self, batch: Batch) -> None:
        choices = self.scorer.choices
        require_routes(batch, None if choices is None else choices.shape, key=replay_key(self.spec.role))

    def _score(self, micro_batch: Batch, index_S: Tensor, temperature: float) -> tuple[Tensor, ...]:
        inputs = model_input(
            micro_batch,
            index_S,
            use_sample_packing=self.spec.use_sample_packing,
            device=self.device,
            ulysses=None if self.ranks is None else self.ranks.ulysses,
        )
        return self.shards.score(inputs, temperature=temperature)

    def _micro_batches(self, batch: Batch, plan: Plan) -> Iterator[tuple[list[int], Batch]]:
        """Each micro-batch's sequences, and what is computed: without any, one sequence of which no token is trained,
        because the others wait for this rank in every layer. One rank alone waits for nobody and leaves it out."""
        for sequences in plan:
            if len(sequences):
                yield list(sequences), batch.select(list(sequences))
            elif self.ranks is not None:
                shortest = batch.select([int(batch.lengths.argmin())])
                untrained_T = torch.zeros(shortest.num_tokens, dtype=torch.bool)
                yield [], shortest.with_columns(loss_mask=untrained_T) if "loss_mask" in shortest else shortest

    def _packed(self, tensors: Iterator[tuple[str, Tensor]], max_bucket_bytes: int) -> Iterator[WeightBucket]:
        """On rank 0; the others take part in gathering."""
        if self._is_first:
            yield from pack_buckets(tensors, max_bucket_bytes)
        else:
            for _ in tensors:
                pass

    @property
    def _is_first(self) -> bool:
        return self.ranks is None or self.ranks.is_first

    def _move(self, device: torch.device, *, parameters: bool, optimizer: bool) -> None:
        if self.device.type == "cpu" or self.spec.options.cpu_offload:
            return
        if parameters:
            self.shards.move(device)
        if optimizer and self.optimizer is not None:
            for moments in self.optimizer.state.values():
                moments.update({name: tensor.to(device) for name, tensor in moments.items()})
        torch.cuda.empty_cache()

    def _require_trained(self, call: str) -> torch.optim.AdamW:
        if self.optimizer is None:
            raise WorkerError(f"{self.spec.role}: {call} needs an optimizer, and this model was started without one")
        return self.optimizer

    def _tokenizer(self):
        path = self.spec.model.path
        try:
            return AutoTokenizer.from_pretrained(path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: has no tokenizer that could be saved with the model: {error}") from error


def _device(rank: RankInfo) -> torch.device:
    """The node's GPU of this rank; a rank that sees one GPU only takes that."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", rank.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
