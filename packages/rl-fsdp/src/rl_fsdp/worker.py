"""One rank that scores and trains a Hugging Face causal language model."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
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
from rl_core.weights import pack_buckets
from rl_core.workers.objective import objective_from_spec
from rl_fsdp.attention import scatter_rows
from rl_fsdp.checkpoint import read_optimizer, read_weights, write_state
from rl_fsdp.micro_batch import model_input, predicted_tokens
from rl_fsdp.model import checkpoint_tensors, load_scorer, no_progress_bars
from rl_fsdp.schedule import learning_rate


class FsdpWorker:
    """`Worker` and `Inspectable` of `rl_core.interfaces`, on one rank.

    Nothing here is random (the model runs without dropout), so `spec.seed` has nothing to fix.
    """

    def __init__(self, spec: WorkerSpec, rank: RankInfo):
        if spec.num_threads is not None:
            torch.set_num_threads(spec.num_threads)
        self.spec = spec
        self.device = torch.device("cuda", rank.local_rank) if torch.cuda.is_available() else torch.device("cpu")
        self.scorer = load_scorer(spec, self.device)
        self.steps_done = 0
        self.optimizer: torch.optim.AdamW | None = None
        if spec.optimizer is not None:
            self.optimizer = torch.optim.AdamW(
                self.scorer.parameters(),
                lr=spec.optimizer.lr,
                betas=spec.optimizer.adam_betas,
                weight_decay=spec.optimizer.weight_decay,
                fused=True,
            )

    def forward(self, batch: Batch, plan: Plan, *, temperature: float) -> dict[str, Tensor]:
        """Log-probs and entropies of the stream, without gradient."""
        scores = {name: torch.zeros(batch.num_tokens) for name in ("logprobs", "entropies")}
        tokens = batch.without_columns(*(name for name in batch if name != "tokens"))
        for sequences in _non_empty(plan):
            micro_batch = tokens.select(sequences)
            index_S = predicted_tokens(micro_batch)
            with torch.no_grad():
                scores_S = self._score(micro_batch, index_S, temperature)
            stream_index_S = batch.token_index(torch.as_tensor(sequences))[index_S]
            for values_T, values_S in zip(scores.values(), scores_S, strict=True):
                values_T[stream_index_S] = values_S.float().cpu()
        return scores

    def forward_backward(self, batch: Batch, plan: Plan, loss: LossSpec, *, temperature: float) -> Metrics:
        """Adds the gradient of `loss`. Only trained tokens are scored: no loss reads the others."""
        self._require_trained("forward_backward")
        objective = objective_from_spec(loss)
        parts = []
        for sequences in _non_empty(plan):
            micro_batch = batch.select(sequences)
            trained_S = predicted_tokens(micro_batch, among=micro_batch["loss_mask"])
            logprobs_S, entropies_S = self._score(micro_batch, trained_S, temperature)
            index_S, num_tokens = trained_S.to(self.device), micro_batch.num_tokens
            weighted_sum, metrics = objective(
                {name: micro_batch[name].to(self.device) for name in objective.call_columns},
                sequence_T=micro_batch.sequence_index.to(self.device),
                logprobs_T=scatter_rows(logprobs_S, index_S, num_tokens),
                entropies_T=scatter_rows(entropies_S, index_S, num_tokens),
            )
            weighted_sum.backward()
            parts.append(metrics)
        totals = sum_metrics(parts)
        # Each part weighs its loss 1; that of the whole call is their sum, however many parts it was cut into.
        return {**totals, "loss": (totals["loss"][0], 1.0)}

    def optim_step(self) -> OptimizerStep:
        """Clips, steps, advances the schedule, clears the gradients; only the last where one is not finite."""
        optimizer, config = self._require_trained("optim_step"), self.spec.optimizer
        assert config is not None
        parameters = [p for p in self.scorer.parameters() if p.grad is not None]
        if not parameters:
            raise WorkerError(f"{self.spec.role}: optim_step without a gradient; call forward_backward first")
        norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
        rate = learning_rate(self.steps_done, config, self.spec.total_optimizer_steps)
        grad_norm = norm.item()
        is_finite = math.isfinite(grad_norm)
        if is_finite:
            if config.max_grad_norm > 0:
                clip_grads_with_norm_(parameters, config.max_grad_norm, norm)
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            self.steps_done += 1
        optimizer.zero_grad()
        return OptimizerStep(grad_norm=grad_norm, learning_rate=rate, skipped=not is_finite)

    def gradients(self) -> dict[str, Tensor]:
        """Accumulated gradients under Hugging Face names, in the parameters' dtype, on the CPU; zeros where none is."""
        gradients = {}
        for name, weight in self.scorer.named_weights():
            gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
            gradients.update(checkpoint_tensors(self.scorer.model, name, gradient.detach().cpu().clone()))
        return gradients

    def export_weights(self, max_bucket_bytes: int) -> Iterator[WeightBucket]:
        """The weights in the dtype that is computed in, packed lazily."""
        return pack_buckets(self.scorer.exported_weights(), max_bucket_bytes)

    def publish(self, sender: WeightSender, version: int, max_bucket_bytes: int) -> Manifest:
        """Sends `export_weights`."""
        return sender.send(self.export_weights(max_bucket_bytes), version)

    def save_state(self, directory: Path) -> None:
        """Writes weights and, of a trained model, optimizer and schedule."""
        state = (
            None if self.optimizer is None else {"adamw": self.optimizer.state_dict(), "steps_done": self.steps_done}
        )
        write_state(directory, dict(self.scorer.named_weights()), state)

    def load_state(self, directory: Path) -> None:
        """Reads what `save_state` wrote; all files are read before anything changes."""
        weights = dict(self.scorer.named_weights())
        saved_weights = read_weights(directory, weights)
        state = None if self.optimizer is None else read_optimizer(directory)
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(saved_weights[name])
        if self.optimizer is not None and state is not None:
            self.optimizer.load_state_dict(state["adamw"])
            self.optimizer.zero_grad()
            self.steps_done = state["steps_done"]

    def save_model(self, directory: Path) -> None:
        """Writes model and tokenizer; weights in the dtype that is computed in, and the configuration says so."""
        model, dtype = self.scorer.model, self.scorer.compute_dtype
        weights = {name: weight.to(dtype) for name, weight in model.state_dict().items()}
        with no_progress_bars():
            model.save_pretrained(directory, state_dict=weights)
        config_file = directory / "config.json"
        config = json.loads(config_file.read_text())
        config["dtype"] = str(dtype).removeprefix("torch.")
        config_file.write_text(json.dumps(config, indent=2) + "\n")
        self._tokenizer().save_pretrained(directory)

    def close(self) -> None:
        """Drops model and optimizer."""
        self.optimizer = None
        self.__dict__.pop("scorer", None)

    def _score(self, micro_batch: Batch, index_S: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        inputs = model_input(micro_batch, index_S, use_sample_packing=self.spec.use_sample_packing, device=self.device)
        return self.scorer(inputs, temperature=temperature)

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


def _non_empty(plan: Plan) -> Iterator[list[int]]:
    """Micro-batches that hold a sequence; the plan of a rank with few sequences ends with empty ones."""
    return (list(sequences) for sequences in plan if len(sequences))
