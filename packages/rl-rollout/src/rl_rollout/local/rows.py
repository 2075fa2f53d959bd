"""Runs the model for a batch of samples. Each sample is a row of one key-value cache, and of arrays for its other data.

A sample's row index may change while it runs (see `cache.py`). The cache holds all tokens of a row except the last
sampled one, which is the next input.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import DynamicCache

from rl_core.errors import GenerationError
from rl_core.interfaces import Completion, KeptTokens, SamplingParams, StopReason
from rl_rollout.local.cache import RowCache, rows_without
from rl_rollout.local.model import token_logprobs
from rl_rollout.local.sampling import draw, hashed_seeds, knob_array, uniforms
from rl_rollout.local.stop_strings import StopStringWatch
from rl_transformers.expert_choices import ExpertChoices

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PREFILL_TOKENS = 1 << 14
"""Maximum number of tokens of one prefill forward, to limit the memory of its activations."""
_NO_TOKEN = -1


@attrs.define(kw_only=True, eq=False)
class Sample:
    """A sample that waits or runs."""

    owner: Any
    """Any object that identifies the sample's request; samples of the same request have the same owner."""
    index: int
    """Index among the samples of the request."""
    prompt_tokens: tuple[int, ...]
    params: SamplingParams
    seed: int
    stop_tokens: tuple[int, ...]
    """All tokens that end the sample."""
    watch: StopStringWatch | None


Ended = list[tuple[Sample, Completion]]


class Rows:
    """Computes the samples that decode together. Its calls block; only one thread may use it."""

    def __init__(
        self, model: PreTrainedModel, choices: ExpertChoices | None = None, *, return_kept_tokens: bool = False
    ) -> None:
        self._model = model
        self._return_kept_tokens = return_kept_tokens
        self._kept: list[list[npt.NDArray[np.int32]]] = []
        """The kept ids of each row's sampled tokens."""
        self._samples: list[Sample] = []
        self._cache = RowCache()
        self._arrays: dict[str, npt.NDArray[Any]] = {}
        self._choices = choices
        self._routes: list[list[npt.NDArray[Any]]] = []
        """Routes of each row, as pieces [tokens, L, K]: one piece for all tokens of the prefill, then one per step."""

    def __len__(self) -> int:
        return len(self._samples)

    @torch.inference_mode()
    def join(self, samples: Sequence[Sample], version: int) -> Ended:
        """Adds samples and draws the first token of each; returns the samples that ended. Each distinct prompt is
        computed once."""
        place = {prompt: i for i, prompt in enumerate(dict.fromkeys(sample.prompt_tokens for sample in samples))}
        prompt_B = np.array([place[sample.prompt_tokens] for sample in samples])
        logits_PV, routes = self._prefill(list(place), prompt_B)
        first_new = len(self._samples)
        self._samples += samples
        self._kept += [[] for _ in samples]
        self._routes += [[routes[i]] for i in prompt_B.tolist()] if routes else []
        self._arrays = _joined(self._arrays, _new_arrays(samples))
        logits_BV = logits_PV[torch.from_numpy(prompt_B).to(logits_PV.device)]
        return self._sample(logits_BV, np.arange(first_new, len(self._samples)), version)

    @torch.inference_mode()
    def step(self, version: int) -> Ended:
        """Samples one more token for every row. Returns the samples that ended with this token."""
        rows_B = np.arange(len(self))
        inputs_B = self._arrays["tokens"][rows_B, self._arrays["num_sampled"] - 1]
        past = self._cache.with_room()
        logits_BV, routes_BQLK = self._forward(inputs_B[:, None], self._cache.pad_B, past)
        self._cache.appended()
        if routes_BQLK is not None:
            for pieces, routes_QLK in zip(self._routes, routes_BQLK, strict=True):
                pieces.append(routes_QLK)
        return self._sample(logits_BV, rows_B, version)

    @torch.inference_mode()
    def recompute(self) -> None:
        """Recomputes the cache and the routes of all rows after the weights have changed."""
        if self._samples:
            self._cache = RowCache()
            _, routes = self._prefill([self._inputs(row) for row in range(len(self))], np.arange(len(self)))
            self._routes = [[routes_TLK] for routes_TLK in routes]

    @torch.inference_mode()
    def remove(self, rows: Iterable[int]) -> Ended:
        """Removes rows whose samples have not ended. Returns the samples with the tokens sampled so far and the stop
        reason `abort`."""
        rows_F = np.array(sorted(rows), dtype=np.int64)
        reasons: list[StopReason] = ["abort"] * len(rows_F)
        return self._take(rows_F, reasons)

    def rows_of(self, owners: set[Any] | None) -> list[int]:
        """Returns the indices of the rows of these owners; None: all owners."""
        return [row for row, sample in enumerate(self._samples) if owners is None or sample.owner in owners]

    # --- one step ---------------------------------------------------------------------------------------------------

    def _sample(
        self, logits_BV: Tensor, rows_B: npt.NDArray[np.int64], version: int
    ) -> list[tuple[Sample, Completion]]:
        arrays = self._arrays
        num_sampled_B = arrays["num_sampled"][rows_B]
        numbers_B = uniforms(arrays["seed"][rows_B], num_sampled_B)
        tokens, logprobs, kept = draw(logits_BV, arrays["knobs"][rows_B], numbers_B)
        tokens_B, logprobs_B = tokens.cpu().numpy(), logprobs.cpu().numpy()
        if not np.isfinite(logprobs_B).all():
            raise GenerationError(
                f"weight version {version}: the model's logits are not finite, so its weights are damaged; use "
                "an earlier checkpoint, and a lower learning rate if this happens again"
            )
        self._ensure_columns(int(num_sampled_B.max()) + 1)
        arrays["tokens"][rows_B, num_sampled_B] = tokens_B
        arrays["logprobs"][rows_B, num_sampled_B] = logprobs_B
        arrays["versions"][rows_B, num_sampled_B] = version
        arrays["num_sampled"][rows_B] += 1
        for row, ids in zip(rows_B.tolist(), kept if self._return_kept_tokens else (), strict=False):
            self._kept[row].append(ids)
        stopped_B = (tokens_B[:, None] == arrays["stop_tokens"][rows_B]).any(axis=1)
        for b in np.flatnonzero(arrays["watched"][rows_B]):
            watch = self._samples[rows_B[b]].watch
            assert watch is not None
            stopped_B[b] |= watch.sees_stop(int(tokens_B[b]))
        ended_B = stopped_B | (num_sampled_B + 1 >= arrays["max_tokens"][rows_B])
        reasons: list[StopReason] = ["stop" if stopped else "length" for stopped in stopped_B[ended_B]]
        return self._take(rows_B[ended_B], reasons)

    def _take(self, rows_F: npt.NDArray[np.int64], reasons: Sequence[StopReason]) -> Ended:
        if not len(rows_F):
            return []
        ended = [
            (self._samples[row], self._completion(row, reason))
            for row, reason in zip(rows_F.tolist(), reasons, strict=True)
        ]
        keep_B = rows_without(len(self), rows_F)
        self._samples = [self._samples[row] for row in keep_B.tolist()]
        self._kept = [self._kept[row] for row in keep_B.tolist()]
        self._routes = [self._routes[row] for row in keep_B.tolist()] if self._routes else []
        self._arrays = {name: values[keep_B] for name, values in self._arrays.items()}
        self._cache.keep(keep_B)
        return ended

    def _completion(self, row: int, stop_reason: StopReason) -> Completion:
        count = self._arrays["num_sampled"][row]
        columns = (self._arrays[name][row, :count].tolist() for name in ("tokens", "logprobs", "versions"))
        tokens, logprobs, versions = map(tuple, columns)
        return Completion(
            tokens=tokens,
            logprobs=logprobs,
            policy_versions=versions,
            stop_reason=stop_reason,
            routed_experts=np.concatenate(self._routes[row]) if self._routes else None,
            kept_tokens=KeptTokens.of_each(self._kept[row]) if self._return_kept_tokens else None,
        )

    def _inputs(self, row: int) -> tuple[int, ...]:
        count = self._arrays["num_sampled"][row]
        return self._samples[row].prompt_tokens + tuple(self._arrays["tokens"][row, : count - 1].tolist())

    def _ensure_columns(self, num_columns: int) -> None:
        capacity = self._arrays["tokens"].shape[1]
        if num_columns > capacity:
            for name, _ in _PER_TOKEN:
                self._arrays[name] = _widened(self._arrays[name], max(num_columns, 2 * capacity))

    # --- the model --------------------------------------------------------------------------------------------------

    def _prefill(
        self, sequences: Sequence[tuple[int, ...]], sequence_M: npt.NDArray[np.int64]
    ) -> tuple[Tensor, list[npt.NDArray[Any]]]:
        """Adds M rows to the cache; row m is a copy of sequence `sequence_M[m]` of the P sequences. Each sequence is
        computed once, and sequences of similar length share a forward. Returns the logits after each sequence [P, V],
        and each sequence's routes (an empty list if routes are not requested)."""
        lengths_P = np.array([len(tokens) for tokens in sequences])
        order = np.argsort(lengths_P, kind="stable")
        first, logits, routes = self._cache.num_rows, [], []
        for chunk in _chunks(lengths_P[order].tolist(), _PREFILL_TOKENS):
            members = order[chunk.start : chunk.stop]
            width = int(lengths_P[members[-1]])
            pad_B = width - lengths_P[members]
            inputs_BS = np.array([(0,) * pad + sequences[i] for i, pad in zip(members, pad_B.tolist(), strict=True)])
            past: Any = DynamicCache()
            logits_BV, routes_BSLK = self._forward(inputs_BS, pad_B, past)
            if routes_BSLK is not None:
                routes += [routes_BSLK[b, pad:] for b, pad in enumerate(pad_B.tolist())]
            logits.append(logits_BV)
            layers = [(layer.keys, layer.values) for layer in past.layers]
            if chunk.start == 0:
                self._cache.add(len(sequence_M), int(lengths_P.max()), layers)
            row_P = np.full(len(sequences), -1)
            row_P[members] = np.arange(len(members))
            source_M = row_P[sequence_M]
            new_M = np.flatnonzero(source_M >= 0)
            self._cache.fill(first + new_M, layers, source_M[new_M], pad_B)
        inverse = np.argsort(order)
        logits_PV = torch.cat(logits)
        logits_PV = logits_PV[torch.from_numpy(inverse).to(logits_PV.device)]
        return logits_PV, [routes[i] for i in inverse.tolist()] if routes else []

    def _forward(
        self, inputs_BQ: npt.NDArray[np.int64], pad_B: npt.NDArray[np.int64], past: DynamicCache
    ) -> tuple[Tensor, npt.NDArray[Any] | None]:
        """Computes Q inputs per row and appends them to the cache `past`. Returns the logits [B, V] after the last
        input, and the routes [B, Q, L, K] (None if they are not requested)."""
        device = self._model.device
        before = past.get_seq_length()
        columns_1S = np.arange(before + inputs_BQ.shape[1])[None]
        pad_B1 = pad_B[:, None]
        mask = torch.from_numpy(columns_1S >= pad_B1).to(device) if pad_B.any() else None
        positions_BQ = np.maximum(columns_1S[:, before:] - pad_B1, 0)
        if self._choices is not None:
            self._choices.follow(None, None)
        output = self._model(
            input_ids=torch.from_numpy(inputs_BQ).to(device),
            attention_mask=mask,
            position_ids=torch.from_numpy(positions_BQ).to(device),
            past_key_values=past,
            use_cache=True,
            logits_to_keep=1,
        )
        routes_BQLK = None if self._choices is None else _routes(self._choices, len(inputs_BQ))
        return output.logits[:, -1], routes_BQLK

    def score(self, sequence: Sequence[int]) -> list[float]:
        """Returns the log-probs of a sequence's tokens, computed without a cache; the batch does not change."""
        if self._choices is not None:
            self._choices.follow(None, None)
        return token_logprobs(self._model, sequence)


def _routes(choices: ExpertChoices, num_rows: int) -> npt.NDArray[Any]:
    """Returns the routes [B, Q, L, K] of the latest forward: uint8 if every expert's index fits, else int16. A
    training batch accepts only these two dtypes."""
    dtype = torch.uint8 if choices.shape.num_experts <= 256 else torch.int16
    return choices.taken().to(dtype).unflatten(0, (num_rows, -1)).cpu().numpy()


# --- arrays ---------------------------------------------------------------------------------------------------------

_PER_TOKEN = (("tokens", np.int64), ("logprobs", np.float32), ("versions", np.int32))


def _new_arrays(samples: Sequence[Sample]) -> dict[str, npt.NDArray[Any]]:
    num_stops = max(len(sample.stop_tokens) for sample in samples)
    return {
        "seed": hashed_seeds([sample.seed for sample in samples]),
        "knobs": knob_array([sample.params for sample in samples]),
        "max_tokens": np.array([sample.params.max_tokens for sample in samples]),
        "num_sampled": np.zeros(len(samples), dtype=np.int64),
        "watched": np.array([sample.watch is not None for sample in samples]),
        "stop_tokens": np.array(
            [s.stop_tokens + (_NO_TOKEN,) * (num_stops - len(s.stop_tokens)) for s in samples], dtype=np.int64
        ),
        **{name: np.full((len(samples), 8), _NO_TOKEN, dtype=dtype) for name, dtype in _PER_TOKEN},
    }


def _joined(old: dict[str, npt.NDArray[Any]], new: dict[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    if not old:
        return new
    joined = {}
    for name in new:
        parts = [old[name], new[name]]
        if parts[0].ndim == 2:
            parts = [_widened(part, max(part.shape[1] for part in parts)) for part in parts]
        joined[name] = np.concatenate(parts)
    return joined


def _widened(values: npt.NDArray[Any], num_columns: int) -> npt.NDArray[Any]:
    return np.pad(values, ((0, 0), (0, num_columns - values.shape[1])), constant_values=_NO_TOKEN)


def _chunks(lengths: Sequence[int], max_tokens: int) -> Iterable[range]:
    """Divides sequences into consecutive ranges of at most `max_tokens` tokens each, including padding. A longer
    sequence has a range of its own. `lengths` must ascend."""
    start = 0
    for i, length in enumerate(lengths):
        if i > start and (i - start + 1) * length > max_tokens:
            yield range(start, i)
            start = i
    yield range(start, len(lengths))
