"""The task of two-digit addition: to `37+45=` the right response is `280` (the sum's three digits, lowest first) and
the end token.

There are 10,000 problems, in an order fixed by one seed; the first 1,000 are held out from both warm start and RL. The
digits are reversed because a sum is computed from its lowest digit: a two-layer model learns this form within a minute,
and the usual digit order hardly at all.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_core.config import Config
from rl_core.errors import DataError
from rl_core.interfaces import Action, Environment, Prompt, Row, StepResult
from rl_examples.data_files import write_rows
from rl_examples.tiny_model import save_model

CHARACTERS = "0123456789+-*/=<>()., ?"
END = "$"
TOKEN_PATTERN = "</?[a-z]+>|."
NUM_HELD_OUT = 1000
DATA_SEED = 0


class ArithmeticEnvironment(Environment):
    """The reward is 1 if the response is exactly the answer, followed by the end token, else 0. The metric `accuracy`
    equals the reward."""

    placement = "in_process"  # nothing here is slow

    def __init__(self, row: Row, options: Mapping[str, Any]):
        self._prompt: str = row["prompt"]
        self._answer: str = row["answer"]

    @classmethod
    def require_row(cls, row: Row) -> None:
        """See `Environment.require_row`."""
        if not (isinstance(row["prompt"], str) and isinstance(row.get("answer"), str)):
            columns = ", ".join(map(str, row))
            raise DataError(f"an arithmetic row needs prompt and answer as text; the row has {columns}")

    async def reset(self) -> Prompt:
        return self._prompt

    async def step(self, action: Action) -> StepResult:
        is_right = action.text == self._answer and action.stop_reason == "stop"
        return StepResult(reward=float(is_right), done=True, metrics={"accuracy": float(is_right)})


def problems() -> list[dict[str, str]]:
    """Returns all problems in the data set's order, which `DATA_SEED` fixes."""
    pairs = [(a, b) for a in range(100) for b in range(100)]
    random.Random(DATA_SEED).shuffle(pairs)
    return [
        {"prompt": f"{a:02d}+{b:02d}=", "answer": f"{a + b:03d}"[::-1], "env_class": "arithmetic"} for a, b in pairs
    ]


def write_data(train: Path, held_out: Path) -> None:
    """Writes the training and held-out parts as Parquet files."""
    rows = problems()
    write_rows(train, rows[NUM_HELD_OUT:])
    write_rows(held_out, rows[:NUM_HELD_OUT])


def write_missing_rows(config: Config, files: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Writes the Parquet files that the configuration uses and that are missing. `files` has the rows of each file, by
    path."""
    for path, rows in files.items():
        if path in (*config.data.train_data, *config.data.val_data) and not Path(path).exists():
            write_rows(Path(path), rows)


def write_model(
    directory: Path,
    *,
    seed: int,
    characters: Sequence[str] = CHARACTERS,
    token_pattern: str = TOKEN_PATTERN,
    max_positions: int = 64,
) -> None:
    """Writes a freshly initialised Qwen3 and its tokenizer, which has one token per character. With the default
    characters, the model has 149,440 parameters.

    Args:
        directory: the directory to create.
        seed: seed of the weights.
        characters: the vocabulary besides the end token. It must include `?`, which replaces unknown characters, and
            may include tags such as `<search>`, each of which is one token.
        token_pattern: regular expression of a token; the text between two matches is also a token.
        max_positions: maximum number of tokens of a conversation.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = _tokenizer(characters, token_pattern)
    shape = {**_shape(tokenizer), "max_position_embeddings": max_positions}
    _write(Qwen3ForCausalLM, Qwen3Config(**shape), tokenizer, directory, seed=seed)


def write_small_model(directory: Path, *, seed: int) -> None:
    """Writes a freshly initialised Qwen3 of 52,128 parameters and its tokenizer: like `write_model`, but narrower."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = _tokenizer()
    sizes = {"hidden_size": 48, "intermediate_size": 128, "head_dim": 12}
    _write(Qwen3ForCausalLM, Qwen3Config(**{**_shape(tokenizer), **sizes}), tokenizer, directory, seed=seed)


def write_moe_model(directory: Path, *, seed: int) -> None:
    """Writes a freshly initialised Qwen3-MoE of 248,256 parameters and its tokenizer: like `write_model`, but with four
    experts of half the width, two of them per token."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    tokenizer = _tokenizer()
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
    _write(Qwen3MoeForCausalLM, Qwen3MoeConfig(**_shape(tokenizer), **experts), tokenizer, directory, seed=seed)


def _shape(tokenizer: Any) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "initializer_range": 0.05,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }


def _write(model_class: Any, config: Any, tokenizer: Any, directory: Path, *, seed: int) -> None:
    import torch

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config)
    save_model(model, tokenizer, directory)


def _tokenizer(characters: Sequence[str] = CHARACTERS, token_pattern: str = TOKEN_PATTERN) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {character: index for index, character in enumerate([*characters, END])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(token_pattern), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END, unk_token="?")
