"""GRPO with a search engine: a small model learns to look things up, on two CPU cores, in a few minutes.

Asked for a person's number, `kro?`, it either says `<answer>417</answer>` directly, or searches `<search>kro</search>`,
is shown `<information>kro 417</information>`, and then answers; a tag such as `<search>` is one token. The numbers are
in documents that the environment `search` finds by BM25, as for a model that writes sentences. Held-out names have
documents, but occur in no demonstration or training problem, so their numbers can only be found by searching. The model
is warm-started on demonstrations; one in four of their searches is for another person, and half of their answers are
guesses.
Deliberately omitted: a reference model and a KL term, a reward for searching.

Run:      rl train look_up       (see what it plays: rl generate look_up --output episodes.jsonl)
Control:  rl train look_up environment.env_class=mixed_up_look_up      (each search finds somebody else)
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from rl_core.config import Config, from_mapping
from rl_core.interfaces import Recipe
from rl_environments.corpora import Document
from rl_environments.search import SearchEnvironment

NUM_NAMES = 2000
NUM_HELD_OUT = 400

_DIRECTORY = "runs/look_up_data"
_TRAIN = f"{_DIRECTORY}/train.parquet"
_HELD_OUT = f"{_DIRECTORY}/held_out.parquet"
_CORPUS = f"{_DIRECTORY}/documents.jsonl"
_START_MODEL = f"{_DIRECTORY}/start_model_seed${{trainer.seed}}"

recipe = Recipe(
    summary="a small model learns to search before it answers, on two CPU cores, in a few minutes",
    config={
        "data.train_data": [_TRAIN],
        "data.val_data": [_HELD_OUT],
        "environment.env_class": "look_up",
        "environment.options.corpus": _CORPUS,
        "environment.options.top_k": 1,
        "environment.options.max_searches": 1,
        "trainer.run_name": "look_up",
        "trainer.resume_mode": "none",
        "trainer.policy.model.path": _START_MODEL,
        "trainer.policy.optimizer_config.lr": 1e-3,
        "trainer.policy.optimizer_config.adam_betas": [0.9, 0.95],
        "trainer.policy.optimizer_config.weight_decay": 0.0,
        "trainer.policy.optimizer_config.num_warmup_steps": 5,
        "trainer.algorithm.eps_clip_high": 0.28,
        "trainer.seed": 0,
        "trainer.bf16": False,
        "trainer.gradient_checkpointing": False,
        "trainer.num_threads": 1,
        "trainer.max_training_steps": 40,
        "trainer.train_batch_size": 32,
        "trainer.policy_mini_batch_size": 32,
        "trainer.update_epochs_per_batch": 2,
        "trainer.micro_train_batch_size_per_gpu": 256,
        "trainer.micro_forward_batch_size_per_gpu": 256,
        "trainer.logprobs_chunk_size": 16384,
        "trainer.eval_interval": 10,
        "trainer.ckpt_interval": -1,
        "generator.max_turns": 2,
        "generator.max_input_length": 40,
        "generator.n_samples_per_prompt": 8,
        "generator.sampling_params.max_generate_length": 7,
        "generator.sampling_params.stop": ["</search>", "</answer>"],
        "generator.eval_sampling_params.temperature": 1.0,
        "generator.eval_sampling_params.stop": ["</search>", "</answer>"],
    },
    prepare="rl_examples.look_up:prepare",
    makes=(_TRAIN, _HELD_OUT, _CORPUS, _START_MODEL),
)

START_ACCURACY = 0.12
MARKS = ("<search>", "</search>", "<information>", "</information>", "<answer>", "</answer>")
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 ?-"
END = "$"


class LookUp(SearchEnvironment):
    """The environment `search`, with observations that a model with a few characters can read."""

    placement = "in_process"  # a search of this corpus takes a tenth of a millisecond

    def information(self, documents: Sequence[Document]) -> str:
        """See `SearchEnvironment.information`."""
        return f"<information>{documents[0].text if documents else '-'}</information>"

    def neither(self) -> str:
        """See `SearchEnvironment.neither`."""
        return "<information>?</information>"


class MixedUpLookUp(LookUp):
    """The negative control: whichever name is searched for, the number shown is another person's."""

    def information(self, documents: Sequence[Document]) -> str:
        """See `SearchEnvironment.information`."""
        rng = random.Random("".join(document.text for document in documents))
        return super().information([attrs.evolve(each, text=f"{each.text[:4]}{_number(rng)}") for each in documents])


def entries() -> list[tuple[str, str]]:
    """Three-letter names and their numbers, in an order fixed by one seed; the first ones are held out."""
    rng = random.Random(0)
    names = ["".join(letters) for letters in itertools.product("bdfgklmnprstvz", "aeiouy", CHARACTERS[:26])]
    findable = [name for name in names if name not in ("but", "for", "not")]  # stop words of BM25
    return [(name, _number(rng)) for name in rng.sample(findable, NUM_NAMES)]


def prepare(config: Config) -> None:
    """Creates the recipe's data and warm-started model if the configuration uses them and they are missing."""
    from rl_examples.arithmetic import write_rows
    from rl_examples.whole_models import is_to_be_made

    known = entries()
    rows = [{"prompt": f"{name}?", "answer": number, "env_class": "look_up"} for name, number in known]
    for path, part in ((_TRAIN, rows[NUM_HELD_OUT:]), (_HELD_OUT, rows[:NUM_HELD_OUT])):
        if path in (*config.data.train_data, *config.data.val_data) and not Path(path).exists():
            write_rows(Path(path), part)
    if config.environment.options.get("corpus") == _CORPUS and not Path(_CORPUS).exists():
        write_corpus(Path(_CORPUS), known)
    directory = Path(_START_MODEL.replace("${trainer.seed}", str(config.trainer.seed)))
    if config.policy_model_path == str(directory) and is_to_be_made(directory):
        _write_start_model(directory, rows[NUM_HELD_OUT:], seed=config.trainer.seed)


def write_corpus(path: Path, known: Sequence[tuple[str, str]]) -> None:
    """Writes one document per name, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.writing")
    unfinished.write_text("".join(json.dumps({"text": f"{name} {number}"}) + "\n" for name, number in known))
    unfinished.replace(path)


def write_model(directory: Path, *, seed: int) -> None:
    """Writes a freshly initialised Qwen3 of about 150,000 parameters, and its tokenizer of characters and tags."""
    from rl_examples.arithmetic import write_model as write_character_model

    write_character_model(directory, seed=seed, characters=[*CHARACTERS, *MARKS])


def _write_start_model(directory: Path, rows: Sequence[dict[str, str]], *, seed: int) -> None:
    """Warm-starts the model on demonstrations, until enough of its samples are right."""
    from rl_core.trainer.data import DataRow
    from rl_examples.warm_start import WarmStart, warm_start
    from rl_examples.whole_models import make_whole

    untrained = directory.with_name(directory.name + ".untrained")
    make_whole(untrained, lambda partial: write_model(partial, seed=seed))
    config = from_mapping({**recipe.config, "trainer.seed": seed, "trainer.policy.model.path": str(untrained)})
    rng = random.Random(seed)
    shown = [DataRow(demonstrated(rows, rng), f"demonstration {number}") for number in range(20_000)]
    played = [DataRow(row, f"problem {number}") for number, row in enumerate(rows)]
    # With the quick start's 3e-3, one seed in two did not learn to copy within 700 updates.
    settings = WarmStart(target_accuracy=START_ACCURACY, temperature=1.0, lr=2e-3, updates_per_check=25)
    make_whole(directory, lambda partial: warm_start(config, shown, partial, settings, check_rows=played))


def demonstrated(rows: Sequence[dict[str, str]], rng: random.Random) -> dict[str, Any]:
    """One turn of the policy: a guess, a search, or the answer after a search. A quarter of searches is for another
    person."""
    row, other = rng.choice(rows), rng.choice(rows)
    found = other if rng.random() < 0.25 else row
    search = f"<search>{found['prompt'][:-1]}</search>"
    shown = f"{row['prompt']}{search}<information>{found['prompt'][:-1]} {found['answer']}</information>"
    turns = [
        {**row, "answer": f"<answer>{_number(rng)}</answer>"},
        {**row, "answer": search},
        {**row, "prompt": shown, "answer": f"<answer>{found['answer']}</answer>"},
    ]
    return rng.choice(turns)


def _number(rng: random.Random) -> str:
    return f"{rng.randrange(1000):03d}"
