"""One rank that scores and trains a Hugging Face causal language model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_core.batch import Batch
from rl_core.columns import INPUT_COLUMNS
from rl_core.errors import WorkerError
from rl_core.interfaces import (
    LossSpec,
    Manifest,
    OptimizerStep,
    OptimizerUpdate,
    Plan,
    WeightBucket,
    WeightSender,
    Worker,
    WorkerSpec,
)
from rl_core.rank_kit.background_writer import BackgroundWriter
from rl_core.rank_kit.device_copies import on_device
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
from rl_core.rank_kit.publishing import pack_on_first, publish
from rl_core.rank_kit.route_checks import require_routes
from rl_core.rank_kit.row_moves import scatter_rows
from rl_core.rank_kit.worker_specs import require_model_path, require_optimizer
from rl_transformers.kept_tensors import copy_processors
from rl_transformers.pretrained import write_tokenizer
from rl_transformers.rank.lora import has_adapters, save_adapters
from rl_transformers.rank.micro_batch import model_input, predicted_tokens, require_own_frequencies
from rl_transformers.rank.rank_mesh import RankMesh
from rl_transformers.rank.shards import Shards
from rl_transformers.rank.state import read_state, start_writing, write_state
from rl_transformers.rank.value_head import ValueScorer
from rl_transformers.rank.weights import persistent_buffers


class ScoringWorker(Worker):
    """The `Worker` of a single rank or of one of several.

    All ranks run the same number of micro-batches, because every layer's parameters are gathered from all ranks. A rank
    that has no sequences left computes the shortest sequence of its batch and discards the result. The model runs
    without dropout, so this class uses no random numbers and does not read `spec.seed`.

    Args:
        spec: the spec of the loaded model.
        device: this rank's device.
        ranks: all ranks of the model; None for a single rank without a process group.
        shards: this rank's part of the model.
        routes_key: the key that enables router replay, for messages.
    """

    can_offload = can_save_in_background = can_perturb = True

    def __init__(
        self, spec: WorkerSpec, device: torch.device, ranks: RankMesh | None, shards: Shards, *, routes_key: str
    ):
        self.spec = spec
        self.device = device
        self.ranks = ranks
        self.shards = shards
        self.scorer = shards.scorer
        self.routes_key = routes_key
        self.steps_done = 0
        self.background: BackgroundWriter | None = None
        self._perturbation: Perturbation | None = None

    @property
    def optimizer(self) -> Any:
        """The optimizer; None if the model is not trained."""
        return self.shards.optimizer

    def forward(
        self, batch: Batch, plan: Plan, *, temperature: float, returns: Sequence[str] | None = None
    ) -> dict[str, Tensor]:
        """Returns log-probs and entropies of all tokens, or a critic's values, without gradient; if `returns` is not
        None, only the scores that it names."""
        score_names = self.scorer.score_names
        wanted = score_names if returns is None else returns
        require_scores(wanted, score_names, self.spec.role)
        scores = {name: torch.zeros(batch.num_tokens) for name in wanted}
        inputs = batch.without_columns(*(name for name in batch if name not in INPUT_COLUMNS))
        self._require_fitting_routes(inputs)
        for sequences, micro_batch in self._micro_batches(inputs, plan):
            index_S = predicted_tokens(micro_batch)
            with torch.no_grad():
                scores_S = self._score(micro_batch, index_S, temperature, with_entropy="entropies" in wanted)
            if not sequences:
                continue
            stream_index_S = batch.token_index(torch.as_tensor(sequences))[index_S]
            for name, values_T in scores.items():
                values_T[stream_index_S] = scores_S[name].float().cpu()
        if self.ranks is None:
            return scores
        self.shards.let_go()
        return scores if self.ranks.returns_results else {}

    def forward_backward(
        self, batch: Batch, plan: Plan, loss: LossSpec, *, temperature: float, returns: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Adds the gradient of `loss`. Scores only trained tokens, because no loss reads the scores of other tokens."""
        require_optimizer(self.optimizer, self.spec, "forward_backward")
        self._require_fitting_routes(batch)
        objective = objective_from_spec(loss)
        require_scores(returns, self.scorer.score_names, self.spec.role)
        with_entropy = needs_entropies(objective, loss, returns)
        parts, returned = [], {name: torch.zeros(batch.num_tokens) for name in returns}
        for sequences, micro_batch in self._micro_batches(batch, plan):
            trained_S = predicted_tokens(micro_batch, among=micro_batch["loss_mask"])
            scores_S = self._score(micro_batch, trained_S, temperature, with_entropy=with_entropy)
            index_S, num_tokens = on_device(trained_S, self.device), micro_batch.num_tokens
            scores = {name: scatter_rows(values_S, index_S, num_tokens) for name, values_S in scores_S.items()}
            weighted_sum, metrics = batch_loss(objective, micro_batch, scores, self.device)
            self.shards.backward(weighted_sum)
            parts.append(metrics)
            if sequences and returned:
                stream_index_T = batch.token_index(torch.as_tensor(sequences))
                for name, values_T in returned.items():
                    values_T[stream_index_T] = scores[name].detach().float().cpu()
        return {**total_metrics(parts), **returned}

    def optim_step(self, update: OptimizerUpdate | None = None) -> OptimizerStep:
        """Scales and clips the gradients, takes a step, advances the schedule, and clears the gradients. If the
        gradient's norm is not finite, only clears the gradients."""
        require_optimizer(self.optimizer, self.spec, "optim_step")
        config = self.spec.optimizer
        assert config is not None
        if not self.shards.has_gradients():
            raise WorkerError(f"{self.spec.role}: optim_step without a gradient; call forward_backward first")
        rate = learning_rate(self.steps_done, config, self.spec.total_optimizer_steps)
        settings = step_settings(config, update, scheduled_rate=rate)
        grad_norm = self.shards.step(settings)
        is_finite = math.isfinite(grad_norm)
        self.steps_done += is_finite
        return OptimizerStep(grad_norm=grad_norm, learning_rate=settings.learning_rate, skipped=not is_finite)

    def gradients(self) -> dict[str, Tensor]:
        """Accumulated gradients of the trained parameters under Hugging Face names, on the CPU; zeros for parameters
        without a gradient."""
        return self.shards.gradients()

    def export_weights(self, max_bucket_bytes: int, *, only_trained: bool = False) -> Iterator[WeightBucket]:
        """Yields the weights in the compute dtype, gathered and packed lazily. Only rank 0 yields buckets; other ranks
        take part in the gathering."""
        tensors = self.shards.exported(only_trained=only_trained)
        return pack_on_first(tensors, max_bucket_bytes, is_first=self._is_first)

    def export_adapter(self, max_bucket_bytes: int) -> Iterator[WeightBucket]:
        """Like `export_weights`, but only the adapter, in the same dtype."""
        tensors = self.shards.adapters(self.scorer.compute_dtype)
        return pack_on_first(tensors, max_bucket_bytes, is_first=self._is_first)

    def publish(
        self, sender: WeightSender, version: int, max_bucket_bytes: int, *, only_trained: bool = False
    ) -> Manifest:
        """Sends the buckets of `export_weights`, or of `export_adapter` if the adapter is sent alone."""
        return publish(self, sender, version, max_bucket_bytes, only_trained=only_trained)

    def perturb(self, seed: int, scale: float) -> None:
        """Adds noise to every trained parameter, after removing any earlier noise. `restore` removes it."""
        self.restore()
        self._perturbation = Perturbation.perturb(self.shards.pieces(), seed=seed, scale=scale)
        self.shards.take_pieces()

    def restore(self) -> None:
        """Removes the noise."""
        if self._perturbation is not None:
            self._perturbation.restore(self.shards.pieces())
            self.shards.take_pieces()
            self._perturbation = None

    def save_state(self, directory: Path) -> None:
        """Writes weights and, for a trained model, optimizer and schedule. Every rank writes its own shards."""
        write_state(directory, self._state(), steps_done=self.steps_done, ranks=self.ranks)

    def start_saving(self, directory: Path) -> None:
        """Like `save_state`, but in the background, from a copy in CPU memory."""
        self.background = self.background or BackgroundWriter(is_alone=self.ranks is None)
        start_writing(self.background, directory, self._state(), steps_done=self.steps_done, ranks=self.ranks)

    def has_saved(self) -> bool:
        """See `Worker.has_saved`; raises what `BackgroundWriter.is_done` raises."""
        return self.background is None or self.background.is_done()

    def load_state(self, directory: Path) -> None:
        """Reads what `save_state` wrote with any number of ranks. Checks everything before it changes anything."""
        state, is_trained = self._state(), self.optimizer is not None
        steps_done = read_state(directory, state, ranks=self.ranks)
        self.shards.take(state, with_optimizer=is_trained, steps_done=steps_done)
        if is_trained:
            self.shards.clear_gradients()
            self.steps_done = steps_done

    def save_model(self, directory: Path) -> None:
        """Writes model and tokenizer. Weights are in the compute dtype, and `config.json` names it.

        Adapters are merged, and also written separately to the folder `adapter`. A critic's head is a separate file.
        Tensors of the checkpoint that are not trained (`kept_tensors`) are copied.
        """
        scorer, model, dtype, is_first = self.scorer, self.scorer.model, self.scorer.compute_dtype, self._is_first
        # All ranks gather the head and the adapters before rank 0 writes, which may fail on rank 0 alone.
        head = self.shards.head() if isinstance(scorer, ValueScorer) else {}
        adapters = dict(self.shards.adapters(None)) if has_adapters(model) else {}
        kept, path = scorer.kept, require_model_path(self.spec)
        tensors = chain(self.shards.model_weights(), persistent_buffers(model).items(), kept.tensors())
        with writing_model(directory):
            write_weights(tensors, directory, is_first=is_first)
            if not is_first:
                return
            generation = model.generation_config if model.can_generate() else None
            write_config(
                model.config, directory, dtype=dtype, generation=generation, architectures=[type(model).__name__]
            )
            kept.write_config(directory, dtype)
            copy_processors(path, directory)
            write_tokenizer(path, directory)
            if isinstance(scorer, ValueScorer):
                write_head(head, directory)
            if has_adapters(model):
                save_adapters(model, adapters, directory / ADAPTER_FOLDER)

    def offload(self, *, parameters: bool, optimizer: bool) -> None:
        """Moves parameters (with their gradients) and optimizer state to CPU memory. Does nothing without an
        accelerator."""
        self._move(torch.device("cpu"), parameters=parameters, optimizer=optimizer)

    def onload(self, *, parameters: bool, optimizer: bool) -> None:
        """Moves parameters and optimizer state back to the device."""
        self._move(self.device, parameters=parameters, optimizer=optimizer)

    def close(self) -> None:
        """Drops model and optimizer, and leaves the process group if no background save is still using it."""
        is_busy = self.background is not None and self.background.is_busy
        was_open = self.__dict__.pop("shards", None) is not None
        self.__dict__.pop("scorer", None)
        if was_open and self.ranks is not None and not is_busy:
            self.ranks.leave()

    def _require_fitting_routes(self, batch: Batch) -> None:
        choices = self.scorer.choices
        require_routes(batch, None if choices is None else choices.shape, key=self.routes_key)

    def _state(self) -> dict[str, Any]:
        return self.shards.state(with_optimizer=self.optimizer is not None)

    def _score(
        self, micro_batch: Batch, index_S: Tensor, temperature: float, *, with_entropy: bool
    ) -> dict[str, Tensor]:
        text_config, longest = self.scorer.model.config.get_text_config(), int(micro_batch.lengths.max())
        require_own_frequencies(text_config, longest, micro_batch.num_sequences)
        inputs = model_input(
            micro_batch,
            index_S,
            use_sample_packing=self.spec.use_sample_packing,
            share_prefixes=self.spec.share_prefixes,
            device=self.device,
            ulysses=None if self.ranks is None else self.ranks.ulysses,
        )
        names, options = self.scorer.score_names, {}
        if "entropies" in names and not with_entropy:
            names, options = ("logprobs",), {"with_entropy": False}
        scores_S = inputs.scored_by(self.shards.module, temperature=temperature, **options)
        return dict(zip(names, scores_S, strict=True))

    def _micro_batches(self, batch: Batch, plan: Plan) -> Iterator[tuple[list[int], Batch]]:
        """Yields each micro-batch's sequences and the batch to compute. A single rank skips empty micro-batches. With
        several ranks, the batch of an empty micro-batch is one sequence without trained tokens, because the other ranks
        wait for this rank in every layer."""
        for sequences in plan:
            if len(sequences):
                yield list(sequences), batch.select(list(sequences))
            elif self.ranks is not None:
                shortest = batch.select([int(batch.lengths.argmin())])
                untrained_T = torch.zeros(shortest.num_tokens, dtype=torch.bool)
                yield [], shortest.with_columns(loss_mask=untrained_T) if "loss_mask" in shortest else shortest

    @property
    def _is_first(self) -> bool:
        return self.ranks is None or self.ranks.is_first

    def _move(self, device: torch.device, *, parameters: bool, optimizer: bool) -> None:
        if self.device.type != "cpu":
            self.shards.move(device, parameters=parameters, optimizer=optimizer and self.optimizer is not None)
            torch.cuda.empty_cache()
