"""The sum that training minimises. A loss function computes it from batch columns, bound to its parameters by name.

Training backends call an `Objective` once per micro-batch, so they need no code for particular losses, and losses need
none for particular backends. A function's positional parameters say what it reads:

    logprobs_T, entropies_T, predicted_values_T    scores of the current model, with gradient
    <column>_T                                     a per-token batch column, e.g. old_logprobs_T, advantages_T, values_T
    mask_T                                         the column loss_mask
    sequence_T                                     int64, non-decreasing: the sequence that a token belongs to
    group_T                                        int64: the prompt that a token belongs to; only for `prepare`
    correction_weights_T                           off-policy correction weights; 1 if there is no correction
    x_<name>_T                                     computed by the loss's `prepare` (see `token_loss.prepared_by`)

A parameter with a default is optional: it is bound if the batch has the column. A training worker gets such a column
only if another part of the objective needs it (`Objective.call_columns`). For a loss decorated with
`token_loss.chooses_columns`, the settings decide instead. Keyword-only parameters are settings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from rl_core.algorithms.checks import require_bool, require_same_length
from rl_core.algorithms.kl import UNBIASED, estimate_kl, require_kl_estimator
from rl_core.algorithms.loss_parameters import (
    CURRENT,
    column_of,
    function_name,
    positional_with_defaults,
    require_loss_parameters,
)
from rl_core.algorithms.off_policy_mask import off_policy_sequence_mask
from rl_core.algorithms.token_loss import Corrections, LossFunction, masked
from rl_core.errors import PluginError, RLError, ShapeError
from rl_core.function_settings import keyword_parameters, require_settings

SumAndWeight = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Objective:
    """The sum over the trained tokens t of loss_weights[t] · (loss[t] + kl_coef · KL[t] − entropy_coef · H[t])."""

    function: LossFunction
    """The loss function. The module's docstring explains its parameters."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """The loss's settings, passed by keyword."""
    kl_coef: float = 0.0
    """Coefficient of the KL to the reference. 0: no such term, so `ref_logprobs` is not read for it."""
    kl_estimator: str = "k3"
    """One of `kl.KL_ESTIMATORS`."""
    entropy_coef: float = 0.0
    """Coefficient of the entropy bonus. 0: no such term."""
    off_policy_sequence_mask: float | None = None
    """`delta` of `off_policy_mask.off_policy_sequence_mask`, which masks tokens of the policy loss. None: no mask."""
    old_is_current: bool = False
    """Use the current log-probs, detached, as `old_logprobs`. Correct only until the first optimizer step of the update
    has changed the weights. If True, a call does not read the column `old_logprobs`; `prepare` may still read it."""

    def __post_init__(self) -> None:
        require_kl_estimator(self.kl_estimator)
        require_settings(self.function, self.params, self.name)
        require_loss_parameters(self.function)

    @property
    def name(self) -> str:
        """The function's name, for messages."""
        return function_name(self.function)

    @cached_property
    def required_columns(self) -> tuple[str, ...]:
        """Columns that the batch must have before `prepare`, including `loss_mask` and `loss_weights`."""
        read = [*self.call_columns, *self.prepare_columns]
        made = ("sequence", "group", "correction_weights")
        return tuple(dict.fromkeys(name for name in read if name not in made and not name.startswith("x_")))

    @cached_property
    def corrections(self) -> Corrections:
        """How this loss uses off-policy correction weights. If the loss declares nothing, this is derived from its
        parameters and from `is_linear`."""
        declared = getattr(self.function, "corrections", None)
        if declared is not None:
            return declared
        columns = {column_of(name) for name in (*self._required_parameters, *self._prepare_parameters)}
        if "correction_weights_T" in (*self._parameters, *self._prepare_parameters):
            return "reads"
        if "rollout_logprobs" in columns or "advantages" not in columns:
            return "refuses"
        return "scales" if "advantages" not in self.prepare_columns and self.is_linear() else "unknown"

    @cached_property
    def prepare_columns(self) -> tuple[str, ...]:
        """Columns that the loss's `prepare` function reads; none for most losses."""
        return tuple(column_of(name) for name in self._prepare_parameters)

    @cached_property
    def call_columns(self) -> tuple[str, ...]:
        """Columns that a call reads; they must be sent to workers. Includes the `x_…` columns that `prepare`
        returns."""
        read = [column_of(name) for name in self._required_parameters]
        read += ["correction_weights"] if "correction_weights_T" in self._parameters else []
        terms = ["ref_logprobs"] if self.kl_coef else []
        terms += ["old_logprobs"] if self.kl_coef and self.kl_estimator == UNBIASED else []
        terms += [] if self.off_policy_sequence_mask is None else ["rollout_logprobs", "advantages"]
        made = (*CURRENT, "sequence", *(("old_logprobs",) if self.old_is_current else ()))
        return tuple(dict.fromkeys(n for n in ["loss_mask", "loss_weights", *read, *terms] if n not in made))

    @cached_property
    def compares_with_old(self) -> bool:
        """Whether a call reads `old_logprobs`, from the column or with `old_is_current`."""
        in_kl = bool(self.kl_coef) and self.kl_estimator == UNBIASED
        return in_kl or "old_logprobs_T" in self._required_parameters

    @cached_property
    def reads(self) -> frozenset[str]:
        """The scores of the current model (`CURRENT`) that a call needs."""
        read = {column_of(name) for name in self._required_parameters} & set(CURRENT)
        terms = {
            "logprobs": self.kl_coef or self.off_policy_sequence_mask is not None or self._takes_own,
            "entropies": self.entropy_coef,
        }
        return frozenset(read | {name for name, coef in terms.items() if coef})

    def prepare(self, columns: Mapping[str, Tensor], sequence_T: Tensor, seed: int) -> dict[str, Tensor]:
        """Returns the columns [T] to add to the mini-batch, or to replace in it, before it is split. Most losses have
        none.

        There are three kinds of such columns. The `x_…` columns are computed by the loss's own `prepare` function, from
        advantages without correction weights. `advantages` is replaced by the product with the correction weights if a
        correction scales the loss. `correction_weights` is added if the loss reads it; it is 1 without a correction.

        Args:
            columns: the mini-batch's `required_columns`, `group_id` if the loss's `prepare` function reads `group_T`,
                and `correction_weights` if there is a correction.
            sequence_T: int64, non-decreasing index of the sequence that each token belongs to.
            seed: seed of this mini-batch; the same seed and columns give the same result.
        """
        weights_T = columns.get("correction_weights")
        if self.corrections == "reads" and weights_T is None:
            weights_T = torch.ones_like(columns["loss_mask"], dtype=torch.float32)
            columns = {**columns, "correction_weights": weights_T}
        made = self._prepared(columns, sequence_T, seed)
        if self.corrections == "scales" and weights_T is not None:
            made["advantages"] = columns["advantages"] * weights_T
        if self.corrections == "reads" and weights_T is not None:
            made["correction_weights"] = weights_T
        return made

    def _prepared(self, columns: Mapping[str, Tensor], sequence_T: Tensor, seed: int) -> dict[str, Tensor]:
        function = self._prepare_function
        if function is None:
            return {}
        required = [column_of(name) for name, is_optional in self._prepare_parameters.items() if not is_optional]
        indices = {"sequence": sequence_T}
        if "group_id" in columns:
            indices["group"] = columns["group_id"][sequence_T]
        _require(self.name, "column", ["loss_mask", *required], {**columns, **indices})
        read = {name: columns[name] for name in map(column_of, self._prepare_parameters) if name in columns}
        arguments = _bound(self._prepare_parameters, {**_clean(read, columns["loss_mask"]), **indices})
        known = keyword_parameters(function)
        settings = {name: value for name, value in self.params.items() if name in known}
        made = function(**arguments, **settings, **({"seed": seed} if "seed" in known else {}))
        wanted = {column_of(name) for name in self._parameters if name.startswith("x_")}
        if set(made) != wanted:
            raise PluginError(
                f"{self.name}: its prepare function returned the columns {sorted(made)}, but the loss reads "
                f"{sorted(wanted)}; return exactly the columns that the loss reads"
            )
        return dict(made)

    def __call__(
        self,
        columns: Mapping[str, Tensor],
        *,
        sequence_T: Tensor,
        logprobs_T: Tensor | None = None,
        entropies_T: Tensor | None = None,
        predicted_values_T: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, SumAndWeight]]:
        """Computes the micro-batch's part of the sum, and its metrics. Does not synchronise with the device.

        With context parallelism, every rank of a context group calls the objective with the whole sequences, gathered
        from the group, and gets the same values. On each rank, the gradient flows only to that rank's slice. One of the
        ranks reports the metrics.

        Args:
            columns: the micro-batch's `call_columns`. Values outside `loss_mask` may be anything.
            sequence_T: int64, non-decreasing index of the sequence that each token belongs to.
            logprobs_T, entropies_T, predicted_values_T: scores of the current model with gradient; those in `reads` are
                required. If entropies are passed, their mean is a metric, even without an entropy bonus.

        Returns:
            The scalar to call `backward` on, and metrics: name → (sum over the trained tokens, number of trained
            tokens), 0-d tensors without gradient. The metric `loss` is (weighted sum, 1): summed over micro-batches, it
            is the mini-batch's loss.

        Raises:
            ShapeError: a column or a score of the current model is missing or has the wrong length.
            PluginError: the loss function returned something other than a TokenLoss of T values.
        """
        given = {"logprobs": logprobs_T, "entropies": entropies_T, "predicted_values": predicted_values_T}
        given = {name: value_T for name, value_T in given.items() if value_T is not None}
        _require(self.name, "value of the current model", self.reads, given)
        _require(self.name, "column", self.call_columns, columns)
        mask_T = columns["loss_mask"]
        read = {**{name: columns[name] for name in columns if name in self._columns_read}, **given}
        if self._takes_own:
            read["old_logprobs"] = given["logprobs"].detach()
        require_bool(mask_T=mask_T)
        require_same_length(mask_T=mask_T, sequence_T=sequence_T, **read)
        read = _clean(read, mask_T)
        result = self.function(**_bound(self._call_parameters, {**read, "sequence": sequence_T}), **self.params)
        _require_token_loss(self.name, result, mask_T)
        metrics = dict(result.metrics)
        total_T = result.loss_T
        if self.off_policy_sequence_mask is not None:
            distance = (read["logprobs"], read["rollout_logprobs"], read["advantages"])
            kept_T = off_policy_sequence_mask(*distance, mask_T, sequence_T, delta=self.off_policy_sequence_mask)
            total_T = masked(total_T, kept_T)
            metrics["off_policy_masked"] = ~kept_T
        if self.kl_coef:
            policies = (read["logprobs"], read["ref_logprobs"], mask_T, read.get("old_logprobs"))
            kl_T = estimate_kl(*policies, estimator=self.kl_estimator)
            total_T = total_T + self.kl_coef * kl_T
            metrics["kl"] = kl_T.detach()
        if self.entropy_coef:
            total_T = total_T - self.entropy_coef * read["entropies"]
        if entropies_T is not None:
            metrics["entropy"] = read["entropies"].detach()
        loss = (read["loss_weights"] * masked(total_T, mask_T)).sum()
        count = mask_T.sum()
        sums = {name: (masked(value_T, mask_T).sum(), count) for name, value_T in metrics.items()}
        return loss, {"loss": (loss.detach(), torch.ones_like(loss)), **sums}

    def try_out(self) -> None:
        """Runs the loss on four tokens of two sequences, so that a broken loss fails before the run.

        Raises:
            RLError: the loss raised it, for example a ConfigError for a setting.
            PluginError: the loss raised another error (the cause), returned something other than a TokenLoss of T
                values, or declares that corrections scale it although it is not linear in the advantages.
        """
        sequence_T = torch.tensor([0, 0, 1, 1])
        self._tried({name: _example(name) for name in self.required_columns}, sequence_T)
        if getattr(self.function, "corrections", None) == "scales" and not self.is_linear():
            raise PluginError(
                f"{self.name} declares that off-policy corrections scale it, but its loss is not proportional to its "
                "advantages; let it read correction_weights_T and declare 'reads', or declare 'refuses'"
            )

    def is_linear(self) -> bool:
        """Whether scaling each token's advantage by a factor from 0 to 50 scales its loss by the same factor.

        This is tried on twelve tokens of three sequences. Some have a probability ratio below 0.8 or above 1.2, where
        losses usually clip. The columns from `prepare` are not recomputed for the scaled advantages. If the loss fails,
        the errors are those of `try_out`.
        """
        generator = torch.Generator().manual_seed(0)
        sequence_T = torch.arange(3).repeat_interleave(4)
        columns = {name: _varied(name, generator) for name in self.required_columns}
        loss_T = self._tried(columns, sequence_T)
        for _ in range(4):
            factor_T = 50.0 * torch.rand(12, generator=generator).pow(3)
            factor_T[torch.randint(12, (1,), generator=generator)] = 0.0
            scaled_T = self._tried(columns, sequence_T, {"advantages": columns["advantages"] * factor_T})
            # The tolerance allows for the rounding of float32 losses that sum tens of terms.
            if not torch.allclose(scaled_T, loss_T * factor_T, rtol=1e-3, atol=1e-4):
                return False
        return True

    def _tried(
        self, columns: Mapping[str, Tensor], sequence_T: Tensor, changed: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """Computes the loss of each token on made-up columns. `changed` replaces some of the columns after
        `prepare`."""
        generator = torch.Generator().manual_seed(1)
        sample = _example if len(sequence_T) == 4 else lambda name: _varied(name, generator)
        current = {f"{name}_T": sample(name).requires_grad_() for name in sorted(self.reads)}
        try:
            columns = {**columns, "correction_weights": torch.ones(len(sequence_T))}
            columns["group_id"] = torch.arange(int(sequence_T[-1]) + 1) // 2
            columns |= {**self._prepared(columns, sequence_T, seed=0), **(changed or {})}
            self(columns, sequence_T=sequence_T, **current)
            read = {**columns, "sequence": sequence_T, **{name[:-2]: value_T for name, value_T in current.items()}}
            if self._takes_own:
                read["old_logprobs"] = read["logprobs"].detach()
            return self.function(**_bound(self._call_parameters, read), **self.params).loss_T.detach()
        except RLError:
            raise
        except Exception as error:
            raise PluginError(
                f"{self.name} failed on {len(sequence_T)} tokens: {type(error).__name__}: {error}"
            ) from error

    @property
    def _takes_own(self) -> bool:
        return self.old_is_current and self.compares_with_old

    @property
    def _prepare_function(self) -> Callable[..., dict[str, Tensor]] | None:
        return getattr(self.function, "prepare", None)

    @cached_property
    def _parameters(self) -> dict[str, bool]:
        return positional_with_defaults(self.function, self.name)

    @cached_property
    def _prepare_parameters(self) -> dict[str, bool]:
        return positional_with_defaults(self._prepare_function, self.name) if self._prepare_function else {}

    @cached_property
    def _required_parameters(self) -> tuple[str, ...]:
        """Parameters without a default, and the optional ones that the settings select."""
        choose = getattr(self.function, "chosen_columns", None)
        chosen = choose(**{k: v for k, v in self.params.items() if k in keyword_parameters(choose)}) if choose else ()
        return tuple(name for name, is_optional in self._parameters.items() if not is_optional or name in chosen)

    @cached_property
    def _call_parameters(self) -> tuple[str, ...]:
        return self._required_parameters if hasattr(self.function, "chosen_columns") else tuple(self._parameters)

    @cached_property
    def _columns_read(self) -> frozenset[str]:
        return frozenset([*self.call_columns, *map(column_of, self._call_parameters)])


def sum_metrics(parts: Iterable[Mapping[str, SumAndWeight]]) -> dict[str, tuple[float, float]]:
    """Sums the metrics of micro-batches as floats, with a single synchronisation with the device."""
    totals: dict[str, Tensor] = {}
    for part in parts:
        for name, pair in part.items():
            added = torch.stack([value.double() for value in pair])
            totals[name] = totals[name] + added if name in totals else added
    values = torch.stack(list(totals.values())).tolist() if totals else []
    return {name: (total, weight) for name, (total, weight) in zip(totals, values, strict=True)}


def _clean(columns: Mapping[str, Tensor], mask_T: Tensor) -> dict[str, Tensor]:
    """Sets floating-point values outside the mask to zero. Before that, they may be NaN or infinite, and user functions
    should not have to handle such values."""
    return {name: masked(v_T, mask_T) if v_T.is_floating_point() else v_T for name, v_T in columns.items()}


def _bound(parameters: Iterable[str], available: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: available[column_of(name)] for name in parameters if column_of(name) in available}


def _require(where: str, kind: str, names: Iterable[str], available: Mapping[str, Tensor]) -> None:
    for name in sorted(names):
        if name not in available:
            raise ShapeError(f"{where}: needs the {kind} {name!r}; got {', '.join(sorted(available)) or 'none'}")


def _varied(name: str, generator: torch.Generator) -> Tensor:
    """Twelve plausible values of a column, drawn so that about a third of the probability ratios are below 0.8 and a
    third above 1.2."""
    if name in ("loss_mask", "sampled", "tokens", "policy_version"):
        return _example(name).repeat(3)
    noise_T = torch.randn(12, generator=generator)
    if name.endswith("logprobs"):
        return (-1.0 + 0.3 * noise_T).clamp(max=-0.01)
    return noise_T.abs() if "entropies" in name or name in ("loss_weights", "correction_weights") else noise_T


def _example(name: str) -> Tensor:
    kinds = {"loss_mask": torch.bool, "sampled": torch.bool, "tokens": torch.int64, "policy_version": torch.int32}
    return torch.full((4,), -1.0 if name.endswith("logprobs") else 1.0).to(kinds.get(name, torch.float32))


def _require_token_loss(where: str, result: Any, mask_T: Tensor) -> None:
    if (
        not isinstance(result, tuple)
        or len(result) != 2
        or not isinstance(result[0], Tensor)
        or not isinstance(result[1], Mapping)
    ):
        raise PluginError(f"{where} returned {type(result).__name__}; expected TokenLoss(loss_T, metrics)")
    for name, value in {"loss": result[0], **result[1]}.items():
        if not isinstance(value, Tensor) or value.shape != mask_T.shape:
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise PluginError(f"{where} returned {name} of {shape}; expected one value per token, [{mask_T.numel()}]")
