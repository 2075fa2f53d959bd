"""One rank. Each rank has the whole model, and ranks only add up their gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl_core.algorithms.logprobs import chunked_logprobs
from rl_core.batch import Batch
from rl_core.errors import CheckpointError, ConfigError
from rl_core.interfaces import (
    LossSpec,
    OptimizerStep,
    OptimizerUpdate,
    Plan,
    RankInfo,
    WeightBucket,
    Worker,
    WorkerSpec,
)
from rl_core.rank_kit import (
    batch_loss,
    learning_rate,
    objective_from_spec,
    pack_buckets,
    require_optimizer,
    require_scores,
    step_settings,
    total_metrics,
)


class PlainDdpWorker(Worker):
    """A rank."""

    def __init__(self, spec: WorkerSpec, rank: RankInfo):
        self.spec, self.rank, self.steps_done = spec, rank, 0
        if not Path(spec.model.path or "", "config.json").is_file():
            raise ConfigError(f"got {spec.model.path!r}; expected a Hugging Face model directory", key="model.path")
        if spec.num_threads is not None:
            torch.set_num_threads(spec.num_threads)
        if rank.world_size > 1:
            address = f"tcp://{rank.master_address}:{rank.master_port}"
            dist.init_process_group("gloo", init_method=address, rank=rank.rank, world_size=rank.world_size)
        self.model = AutoModelForCausalLM.from_pretrained(spec.model.path, dtype=torch.float32).eval()
        self.optimizer: torch.optim.AdamW | None = None
        if spec.optimizer is not None:
            config = spec.optimizer
            self.optimizer = torch.optim.AdamW(
                self.model.parameters(), lr=config.lr, betas=config.adam_betas, weight_decay=config.weight_decay
            )

    def forward(
        self, batch: Batch, plan: Plan, *, temperature: float, returns: Sequence[str] | None = None
    ) -> dict[str, Tensor]:
        """Scores of this rank's part of the stream. Computes both, because one of them costs as much."""
        require_scores(returns or (), ("logprobs", "entropies"), self.spec.role)
        scores = {name: torch.zeros(batch.num_tokens) for name in ("logprobs", "entropies")}
        with torch.no_grad():
            for sequences in filter(len, plan):
                positions = batch.token_index(torch.tensor(sequences))
                for column_T, part_T in zip(
                    scores.values(), self._score(batch.select(sequences), temperature), strict=True
                ):
                    column_T[positions] = part_T
        return {name: scores[name] for name in (scores if returns is None else returns)}

    def forward_backward(
        self, batch: Batch, plan: Plan, loss: LossSpec, *, temperature: float, returns: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Accumulates the gradient of this rank's part. `optim_step` and `gradients` sum it over the ranks."""
        require_optimizer(self.optimizer, self.spec, "forward_backward")
        require_scores(returns, ("logprobs", "entropies"), self.spec.role)
        objective, parts, returned = objective_from_spec(loss), [], {n: torch.zeros(batch.num_tokens) for n in returns}
        for sequences in filter(len, plan):
            part = batch.select(sequences)
            scores = dict(zip(("logprobs", "entropies"), self._score(part, temperature), strict=True))
            weighted_sum, metrics = batch_loss(objective, part, scores, torch.device("cpu"))
            for name, values_T in returned.items():
                values_T[batch.token_index(torch.tensor(sequences))] = torch.where(
                    part["loss_mask"], scores[name].detach(), 0.0
                )
            weighted_sum.backward()
            parts.append(metrics)
        return {"loss": (0.0, 1.0), **total_metrics(parts), **returned}

    def optim_step(self, update: OptimizerUpdate | None = None) -> OptimizerStep:
        """Adds up the ranks' gradients; then every rank takes the same step."""
        optimizer, config = require_optimizer(self.optimizer, self.spec, "optim_step"), self.spec.optimizer
        assert config is not None
        rate = learning_rate(self.steps_done, config, self.spec.total_optimizer_steps)
        settings = step_settings(config, update, scheduled_rate=rate)
        for parameter in self.model.parameters():
            parameter.grad = self._summed(parameter) * settings.gradient_scale
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])
        is_finite = math.isfinite(norm.item())
        if is_finite:
            if settings.max_grad_norm > 0:
                torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), settings.max_grad_norm, norm)
            settings.put_into(optimizer.param_groups)
            optimizer.step()
            self.steps_done += 1
        optimizer.zero_grad()
        return OptimizerStep(grad_norm=norm.item(), learning_rate=settings.learning_rate, skipped=not is_finite)

    def gradients(self) -> dict[str, Tensor]:
        """The gradients, added up over all ranks."""
        return {name: self._summed(parameter) for name, parameter in self.model.named_parameters()}

    def export_weights(self, max_bucket_bytes: int, *, only_trained: bool = False) -> Iterator[WeightBucket]:
        """Rank 0 exports all weights, the other ranks none."""
        return pack_buckets(self.model.named_parameters() if self.rank.rank == 0 else (), max_bucket_bytes)

    def save_state(self, directory: Path) -> None:
        """Rank 0 writes the state as one file."""
        state = {"model": self.model.state_dict(), "steps_done": self.steps_done}
        if self.optimizer is not None:
            state["optimizer"] = self.optimizer.state_dict()
        self._on_rank_0(lambda: torch.save(state, directory / "state.pt"), directory)

    def load_state(self, directory: Path) -> None:
        """Every rank reads the file that rank 0 wrote."""
        try:
            state = torch.load(directory / "state.pt", weights_only=True)
        except (OSError, RuntimeError) as error:
            raise CheckpointError(f"{directory / 'state.pt'}: missing or incomplete ({error})") from error
        self.model.load_state_dict(state["model"])
        if self.optimizer is not None:
            self.optimizer.load_state_dict(state["optimizer"])
            self.optimizer.zero_grad()
            self.steps_done = state["steps_done"]

    def save_model(self, directory: Path) -> None:
        """Rank 0 writes model and tokenizer."""

        def write() -> None:
            self.model.save_pretrained(directory)
            AutoTokenizer.from_pretrained(self.spec.model.path).save_pretrained(directory)

        self._on_rank_0(write, directory)

    def close(self) -> None:
        """Leaves the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _score(self, batch: Batch, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies, [T] each. Rows are padded on the right: in causal layers, no token attends to the
        padding after it."""
        rows = torch.nn.utils.rnn.pad_sequence(batch["tokens"].split(batch.lengths.tolist()), batch_first=True)
        hidden_NWH = self.model.base_model(input_ids=rows, use_cache=False).last_hidden_state
        is_token_NW = torch.arange(rows.shape[1]) < batch.lengths[:, None]
        is_first_T = torch.zeros(batch.num_tokens, dtype=torch.bool)
        is_first_T[batch.offsets[:-1]] = True
        # Without padding, rows are the stream's tokens in order. A token is predicted by the hidden state before it.
        hidden_TH = hidden_NWH[is_token_NW].roll(1, 0)
        logprobs_T, entropies_T = chunked_logprobs(
            hidden_TH,
            self.model.get_output_embeddings().weight,
            batch["tokens"],
            temperature=temperature,
            chunk_tokens=self.spec.logprobs_chunk_size,
        )
        assert entropies_T is not None
        return logprobs_T.masked_fill(is_first_T, 0.0), entropies_T.masked_fill(is_first_T, 0.0)

    def _summed(self, parameter: torch.nn.Parameter) -> Tensor:
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        if not dist.is_initialized():
            return gradient
        total = gradient.double() if self.spec.options.reduce_in_float64 else gradient
        dist.all_reduce(total)
        return total.to(gradient.dtype)

    def _on_rank_0(self, write: Callable[[], object], directory: Path) -> None:
        if self.rank.rank == 0:
            directory.mkdir(parents=True, exist_ok=True)
            write()
        if dist.is_initialized():
            dist.barrier()
