"""The simplest implementation of the `Worker` contract: transformers, one sequence at a time, whole logits.

`BackendConformance` compares backends with it. It is also an example of the smallest correct worker. It is too slow and
needs too much memory for anything but tiny models.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rl_core.batch import Batch, field_of
from rl_core.errors import CheckpointError, ConfigError, WorkerError
from rl_core.interfaces import (
    LossSpec,
    OptimizerConfig,
    OptimizerStep,
    OptimizerUpdate,
    Plan,
    WeightBucket,
    Worker,
    WorkerSpec,
)
from rl_core.rank_kit.objectives import require_scores
from rl_core.rank_kit.trained_parameters import unit_of
from rl_core.rank_kit.weight_buckets import pack_buckets
from rl_transformers.proof.reference_models import as_in_a_checkpoint
from rl_transformers.testing.forced_routes import forced_routes


class ReferenceWorker(Worker):
    """A single-rank worker in float32. Supports `ppo_clip` and `cross_entropy` with default settings, KL k3 and
    the entropy bonus.

    If a batch has routes, the model follows them (`rl_transformers.testing.forced_routes`). If it has kept tokens, each
    token is scored among its own.
    """

    def __init__(self, spec: WorkerSpec):
        from transformers import AutoModelForCausalLM

        assert spec.model.path is not None
        self.spec = spec
        self.model = AutoModelForCausalLM.from_pretrained(
            spec.model.path, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
        ).eval()
        self.computing = self.model
        """The model that computes scores. A subclass may use a copy in another precision."""
        self.steps_done = 0
        if spec.model.trainable is not None:
            self.model.requires_grad_(False)
            for name, parameter in self.model.named_parameters(remove_duplicate=False):
                if any(re.search(one, name) for one in spec.model.trainable):
                    parameter.requires_grad_(True)
        self.optimizers = [] if spec.optimizer is None else _optimizers(self.model, spec.optimizer)

    def forward(
        self, batch: Batch, plan: Plan, *, temperature: float, returns: Sequence[str] | None = None
    ) -> dict[str, Tensor]:
        """See `Worker.forward`. Computes one sequence after the other."""
        require_scores(returns or (), ("logprobs", "entropies"), self.spec.role)
        scores = {"logprobs": torch.zeros(batch.num_tokens), "entropies": torch.zeros(batch.num_tokens)}
        with torch.no_grad():
            for tokens in self._sequences(batch, plan):
                scores["logprobs"][tokens], scores["entropies"][tokens] = self.score(
                    batch["tokens"][tokens], temperature, _routes(batch, tokens), _kept(batch, tokens)
                )
        return {name: values_T for name, values_T in scores.items() if returns is None or name in returns}

    def score(
        self,
        tokens_T: Tensor,
        temperature: float,
        routes: tuple[Tensor, Tensor] | None = None,
        kept: Sequence[Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns log-prob and entropy of each token of one sequence, both 0 at the first token.

        Args:
            tokens_T: the sequence.
            temperature: divides the logits.
            routes: (routed_experts, routed) of the sequence.
            kept: for each token, the ids to which its distribution is restricted; an empty tensor: to none.
        """
        with nullcontext() if routes is None else forced_routes(self.computing, *routes):
            logits_TV = self.computing(input_ids=tokens_T[None], use_cache=False).logits[0, :-1].float() / temperature
        all_logprobs_TV = logits_TV.log_softmax(-1)
        logprobs_T = all_logprobs_TV[range(len(tokens_T) - 1), tokens_T[1:]]
        entropies_T = -(all_logprobs_TV.exp() * all_logprobs_TV).sum(-1)
        for t, ids_K in enumerate(kept[1:] if kept is not None else ()):
            if len(ids_K):
                logprobs_K = logits_TV[t, ids_K.long()].log_softmax(-1)
                at_t = torch.arange(len(logits_TV)) == t
                logprobs_T = torch.where(at_t, logprobs_K[ids_K == tokens_T[t + 1]], logprobs_T)
                entropies_T = torch.where(at_t, -(logprobs_K.exp() * logprobs_K).sum(), entropies_T)
        return torch.cat([torch.zeros(1), logprobs_T]), torch.cat([torch.zeros(1), entropies_T])

    def forward_backward(
        self, batch: Batch, plan: Plan, loss: LossSpec, *, temperature: float, returns: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Adds the gradient of sum_t w_t · (loss_t + kl_coef · KL_t − entropy_coef · H_t) over the trained tokens."""
        if not self.optimizers:
            raise WorkerError("forward_backward: this model was started without an optimizer")
        require_scores(returns, ("logprobs", "entropies"), self.spec.role)
        total, returned = 0.0, {name: torch.zeros(batch.num_tokens) for name in returns}
        for tokens in self._sequences(batch, plan):
            mask_T = batch["loss_mask"][tokens]
            logprobs_T, entropies_T = (
                values_T[mask_T]
                for values_T in self.score(
                    batch["tokens"][tokens], temperature, _routes(batch, tokens), _kept(batch, tokens)
                )
            )
            columns = {name: batch[name][tokens][mask_T] for name in batch if field_of(name).axes[0] == "T"}
            if loss.old_is_current:
                columns["old_logprobs"] = logprobs_T.detach()
            weighted_sum = (columns["loss_weights"] * token_loss(loss, logprobs_T, entropies_T, columns)).sum()
            weighted_sum.backward()
            total += weighted_sum.item()
            for name, values_T in returned.items():
                scores_T = {"logprobs": logprobs_T, "entropies": entropies_T}[name].detach()
                values_T[tokens] = values_T[tokens].masked_scatter(mask_T, scores_T)
        return {"loss": (total, 1.0), **returned}

    def optim_step(self, update: OptimizerUpdate | None = None) -> OptimizerStep:
        """Scales the gradients. If their global norm is finite, clips them by this norm and takes a step. If
        `update` does not set the learning rate, it rises linearly during warm-up, then stays constant."""
        assert self.spec.optimizer is not None
        config, update = self.spec.optimizer, update or OptimizerUpdate()
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        for gradient in gradients:
            gradient.mul_(update.gradient_scale)
        grad_norm = sum(gradient.double().pow(2).sum().item() for gradient in gradients) ** 0.5
        rate = config.lr * min(1.0, (self.steps_done + 1) / max(config.num_warmup_steps, 1))
        rate = rate if update.learning_rate is None else update.learning_rate
        max_norm = config.max_grad_norm if update.max_grad_norm is None else update.max_grad_norm
        is_finite = grad_norm < float("inf")
        if is_finite:
            for gradient in gradients:
                gradient.mul_(min(1.0, max_norm / max(grad_norm, 1e-12)) if max_norm > 0 else 1.0)
            for optimizer in self.optimizers:
                group = optimizer.param_groups[0]
                group["lr"] = rate
                group["weight_decay"] = config.weight_decay if update.weight_decay is None else update.weight_decay
                if isinstance(optimizer, torch.optim.AdamW):
                    group["betas"] = config.adam_betas if update.adam_betas is None else update.adam_betas
                    group["eps"] = config.eps if update.eps is None else update.eps
                optimizer.step()
            self.steps_done += 1
        self.model.zero_grad()
        return OptimizerStep(grad_norm=grad_norm, learning_rate=rate, skipped=not is_finite)

    def gradients(self) -> dict[str, Tensor]:
        """Accumulated gradients of the trained parameters. A tied weight appears once, because `named_parameters` lists
        it once."""
        gradients = {
            name: torch.zeros_like(p) if p.grad is None else p.grad
            for name, p in self.model.named_parameters()
            if p.requires_grad
        }
        return {name: gradient.clone() for name, gradient in as_in_a_checkpoint(self.model, gradients).items()}

    def export_weights(self, max_bucket_bytes: int, *, only_trained: bool = False) -> Iterator[WeightBucket]:
        """Yields all parameters, or those of units with trained ones, in float32 under the names of a Hugging Face
        checkpoint."""
        units = {unit_of(name) for name, p in self.model.named_parameters() if p.requires_grad or not only_trained}
        parameters = {name: p.detach() for name, p in self.model.named_parameters() if unit_of(name) in units}
        return pack_buckets(as_in_a_checkpoint(self.model, parameters).items(), max_bucket_bytes)

    def save_state(self, directory: Path) -> None:
        """Writes weights, optimizer state and number of steps to one file."""
        directory.mkdir(parents=True, exist_ok=True)
        state: dict[str, Any] = {"model": self.model.state_dict(), "steps_done": self.steps_done}
        state["optimizers"] = [optimizer.state_dict() for optimizer in self.optimizers]
        torch.save(state, directory / "state.pt")

    def load_state(self, directory: Path) -> None:
        """Restores the state that `save_state` wrote. Raises CheckpointError if the file cannot be read."""
        try:
            state = torch.load(directory / "state.pt", weights_only=True)
        except Exception as error:  # torch's reader of a damaged file may raise anything
            raise CheckpointError(f"{directory / 'state.pt'}: missing or damaged ({error})") from error
        self.model.load_state_dict(state["model"])
        self.steps_done = state["steps_done"]
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.model.zero_grad()

    def save_model(self, directory: Path) -> None:
        """Writes model and tokenizer."""
        from transformers import AutoTokenizer

        self.model.save_pretrained(directory)
        AutoTokenizer.from_pretrained(self.spec.model.path).save_pretrained(directory)

    def close(self) -> None:
        """Does nothing: there are no resources to release."""

    def _sequences(self, batch: Batch, plan: Plan) -> list[slice]:
        bounds = batch.offsets.tolist()
        return [slice(bounds[i], bounds[i + 1]) for micro_batch in plan for i in micro_batch]


class _PlainMuon(torch.optim.Optimizer):
    """Muon with torch's default settings, Nesterov momentum and AdamW's step size, by singular values in float64: the
    Newton-Schulz iteration of U S Vᵀ iterates the polynomial a s + b s³ + c s⁵ on each singular value."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        group = self.param_groups[0]
        for weight in group["params"]:
            state = self.state[weight]
            momentum = state["momentum"] = 0.95 * state.get("momentum", 0.0) + 0.05 * weight.grad
            update = (0.95 * momentum + 0.05 * weight.grad).double()
            u, s, v = torch.linalg.svd(update, full_matrices=False)  # of each matrix of a stack
            s = s / s.norm(dim=-1, keepdim=True).clamp(min=1e-7)
            for _ in range(5):
                s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
            direction = 0.2 * max(weight.shape[-2:]) ** 0.5 * (u * s.unsqueeze(-2)) @ v
            weight.copy_((1 - group["lr"] * group["weight_decay"]) * weight - group["lr"] * direction)


def _optimizers(model: nn.Module, config: OptimizerConfig) -> list[torch.optim.Optimizer]:
    """The optimizers of this name: torch's own or, for `muon`, `_PlainMuon` for the decoder layers' matrices and
    torch's AdamW for everything else."""
    weights = list(model.parameters())
    settings: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    if config.name in ("sgd", "adafactor"):
        made = {"sgd": torch.optim.SGD, "adafactor": torch.optim.Adafactor}[config.name]
        return [made(weights, **settings, **config.params)]
    if config.name == "adamw":
        return [torch.optim.AdamW(weights, betas=config.adam_betas, **settings)]
    if config.name != "muon" or config.params:
        raise ConfigError(
            f"the reference worker has no optimizer {config.name!r} with {dict(config.params)}; use adamw, sgd or "
            "adafactor, or muon without params"
        )
    layers = [p for name, p in model.named_parameters() if ".layers." in name and p.dim() > 1]
    others = [p for p in weights if all(p is not other for other in layers)]
    return [torch.optim.AdamW(others, betas=config.adam_betas, **settings), _PlainMuon(layers, settings)]


def _routes(batch: Batch, tokens: slice) -> tuple[Tensor, Tensor] | None:
    return (batch["routed_experts"][tokens], batch["routed"][tokens]) if "routed_experts" in batch else None


def _kept(batch: Batch, tokens: slice) -> Sequence[Tensor] | None:
    if "kept_counts" not in batch:
        return None
    return batch["kept_ids"].split(batch["kept_counts"].tolist())[tokens]


def token_loss(loss: LossSpec, logprobs_T: Tensor, entropies_T: Tensor, columns: dict[str, Tensor]) -> Tensor:
    """Computes the loss of each token before weighting, directly from the formulas. All tensors contain only the
    trained tokens."""
    is_known = loss.kl_estimator == "k3" and loss.off_policy_sequence_mask is None
    if loss.params or not is_known or loss.name not in ("ppo_clip", "cross_entropy"):
        raise ConfigError(
            f"the reference worker supports only ppo_clip and cross_entropy with default settings and KL k3; got {loss}"
        )
    if loss.name == "cross_entropy":
        loss_T = -logprobs_T
    else:
        ratio_T = (logprobs_T - columns["old_logprobs"]).exp()
        advantages_T = columns["advantages"]
        loss_T = -torch.minimum(ratio_T * advantages_T, ratio_T.clamp(0.8, 1.2) * advantages_T)
    if loss.kl_coef:
        difference_T = columns["ref_logprobs"] - logprobs_T
        loss_T = loss_T + loss.kl_coef * (difference_T.exp() - difference_T - 1.0)
    return loss_T - loss.entropy_coef * entropies_T
