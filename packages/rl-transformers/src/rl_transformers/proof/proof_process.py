"""The process that computes a small model with transformers and with a backend, and compares the results.

    python -m rl_transformers.proof.proof_process JOB RESULT

It is a separate process, because a backend may create process groups, modify its libraries, or crash. It ends when its
stdin closes, hence also when its parent is killed. Code that already runs in a separate process calls `compare`.
"""

from __future__ import annotations

import itertools
import json
import os
import pickle
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import attrs
import torch
from torch import Tensor

from rl_core.batch import Batch
from rl_core.errors import RLError
from rl_core.held_folders import held_folder
from rl_core.interfaces import LossSpec, ModelConfig, OptimizerConfig, Worker, WorkerSpec
from rl_transformers.proof.reference_models import one_thread, random_model, reference_scores, write_model
from rl_transformers.proof.shrunken_models import MANY_TOKENS, shrunken

LOGPROB_LIMIT = 2e-5
"""Largest allowed difference of a log-prob. In correct float32 models of this size, rounding causes at most 5e-6
(measured)."""
GRADIENT_LIMIT = 1e-3
"""Largest allowed relative gradient difference of each parameter; see `_gradient_error`. Measured: 3e-6."""
ACCELERATOR_LOGPROB_LIMIT, ACCELERATOR_GRADIENT_LIMIT = 1e-2, 0.2
"""Limits on an accelerator; the log-prob limit is for the mean difference. An accelerator's kernels may round to ten
bits (TF32), which sends some tokens to other experts. This rounding has not been measured, for lack of an accelerator.
The weakest fault in tests/megatron/test_model_proof.py has a mean difference of 0.04 (and, on a CPU, a largest
difference of 0.39)."""
_MOST_CHARACTERS = 500
"""Maximum length of a reported error message."""
_LENGTHS = (MANY_TOKENS, 23, 1500)
"""Sequence lengths. The last sequence is scored but not trained on. It is long, because slow rotary frequencies matter
only at large positions."""


class Provable(Protocol):
    """A backend whose own model code can be compared with transformers."""

    @property
    def name(self) -> str: ...

    def proof_basis(self, spec: WorkerSpec) -> Mapping[str, Any]:
        """Plain data that identifies the backend's computation: options, versions of its libraries, its own code and
        the kind of device, but neither the model nor transformers. A proof is valid as long as this data does not
        change.
        """
        ...

    def proof_obstacle(self) -> str | None:
        """Returns, as readable text, why the comparison cannot run on this machine; None if it can."""
        ...

    def proof_worker(self, spec: WorkerSpec) -> Worker:
        """Creates a single rank that has `gradients` and computes in the same way as ranks with these options. Called
        in a separate process.

        Args:
            spec: a small model in float32 with the run's options, including mesh sizes.
        """
        ...


@attrs.frozen(kw_only=True)
class ProofJob:
    """The backend and the model to compare."""

    backend: Provable
    spec: WorkerSpec
    """The run's spec. The comparison uses one rank, and the small model instead of the spec's model."""
    config: Mapping[str, Any]
    """All fields of transformers' configuration of the model, before it is shrunk."""
    where: str
    """Key path of the model, for messages."""


@attrs.frozen(kw_only=True)
class Differences:
    """Differences between the results of a backend and of transformers."""

    logprob: float
    """Largest absolute difference of a log-prob."""
    mean_logprob: float
    gradient: float
    """Largest relative difference of a parameter's gradient."""
    parameter: str
    """The parameter with this difference."""
    on_accelerator: bool = False
    """Whether the backend computed on an accelerator."""

    def complaint(self) -> str | None:
        """Describes the difference if it is above a limit; else None."""
        logprob, limit, gradient_limit = self.logprob, LOGPROB_LIMIT, GRADIENT_LIMIT
        if self.on_accelerator:
            limit, gradient_limit = ACCELERATOR_LOGPROB_LIMIT, ACCELERATOR_GRADIENT_LIMIT
            logprob = self.mean_logprob
        if not logprob <= limit:
            return f"log-probs of a small copy of it differ by {logprob:.1e} from those of transformers"
        if not self.gradient <= gradient_limit:
            return f"in a small copy of it the gradient of {self.parameter} differs by {self.gradient:.1e} (relative)"
        return None


def compare(job: ProofJob) -> Differences:
    """Creates the small model, runs it with transformers and the backend, and compares the results.

    Raises:
        ConfigError: the configuration cannot be shrunk, or transformers cannot build the model.
        Exception: whatever the backend or the model's code raises.
    """
    config = shrunken(job.config, job.where)
    with one_thread(), held_folder(job.backend.name, "proof") as folder:
        model = random_model(config, job.where)
        write_model(model, config, folder)
        batch = _batch(model.config.vocab_size, min(_LENGTHS[-1], model.config.max_position_embeddings))
        offsets = batch.offsets.tolist()
        sequences = [batch["tokens"][a:b] for a, b in itertools.pairwise(offsets)]
        expected = reference_scores(model, sequences, batch["loss_weights"])
        worker = job.backend.proof_worker(_small_spec(job.spec, str(folder)))
        try:
            logprobs_T, gradients = _scores(worker, batch)
        finally:
            worker.close()
    gradient, parameter = _gradient_error(gradients, expected.gradients, expected.magnitudes)
    difference_T = (logprobs_T - expected.logprobs_T).abs().nan_to_num(float("inf"))
    return Differences(
        logprob=float(difference_T.max()),
        mean_logprob=float(difference_T.mean()),
        gradient=gradient,
        parameter=parameter,
        on_accelerator=torch.cuda.is_available(),
    )


def _small_spec(spec: WorkerSpec, folder: str) -> WorkerSpec:
    return attrs.evolve(
        spec,
        role="policy",
        model=ModelConfig(path=folder),
        optimizer=OptimizerConfig(),
        bf16=False,
        gradient_checkpointing=False,
        total_optimizer_steps=None,
        num_threads=1,
    )


def _batch(vocab_size: int, longest: int) -> Batch:
    generator = torch.Generator().manual_seed(0)
    sequences = []
    for length in (*_LENGTHS[:-1], longest):
        mask_T = (torch.arange(length) > 0) & (length < longest)
        sequences.append(
            {
                "tokens": torch.randint(vocab_size, (length,), generator=generator),
                "loss_mask": mask_T,
                "loss_weights": torch.randn(length, generator=generator) * mask_T,
            }
        )
    return Batch.from_sequences(sequences)


def _scores(worker: Worker, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Returns the log-probs of the whole batch, and the gradients of one micro-batch with all sequences but the
    last."""
    last = batch.num_sequences - 1
    logprobs_T = worker.forward(batch, [range(last), [last]], temperature=1.0)["logprobs"]
    trained = batch.select(list(range(last)))
    worker.forward_backward(trained, [range(last)], LossSpec(name="cross_entropy"), temperature=1.0)
    return logprobs_T, worker.gradients()


def _gradient_error(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], magnitudes: Mapping[str, float]
) -> tuple[float, str]:
    """The largest relative difference (L2) of a parameter's gradient, and the parameter's name.

    Each gradient is multiplied by the magnitude of its weights, which gives the effect of a relative change of the
    weights. A difference is divided by the parameter's own effect, but at least by 1 % of the effect of all parameters
    together.
    """
    if missing := sorted(expected.keys() ^ found.keys()):
        return float("inf"), missing[0]
    effects = {name: magnitudes[name] * float(gradient.norm()) for name, gradient in expected.items()}
    least = 0.01 * sum(effect**2 for effect in effects.values()) ** 0.5
    errors = {
        name: magnitudes[name] * float((found[name] - gradient).norm()) / max(effects[name], least)
        for name, gradient in expected.items()
    }
    worst = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else float("inf"))
    return errors[worst], worst


def main(job_file: str, result_file: str) -> None:
    """Reads the job, runs `compare`, and writes `{"differences": …}` or `{"error": …}` to `result_file`."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # The job is pickled separately, because unpickling it imports modules that are found only with these paths.
    paths, content = pickle.loads(Path(job_file).read_bytes())
    sys.path[:] = [*paths, *(path for path in sys.path if path not in paths)]
    try:
        result: dict[str, Any] = {"differences": attrs.asdict(compare(pickle.loads(content)))}
    except Exception as error:  # code of a model or backend may raise anything; the error is the result
        what = "" if isinstance(error, RLError) else f"{type(error).__name__}: "
        result = {"error": what + " ".join(str(error).split())[:_MOST_CHARACTERS]}
    Path(result_file).write_text(json.dumps(result), encoding="utf-8")


def _end_with_parent() -> None:
    """Ends this process when stdin closes. Its leftover folders are reclaimed later (`held_folders`)."""
    sys.stdin.buffer.read()
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    main(*sys.argv[1:])
