"""GRPO with a search engine: a small model learns to look things up, on two CPU cores, in a few minutes.

Asked for a person's number, `kro?`, the model either answers `<answer>417</answer>` directly, or it searches with
`<search>kro</search>`, receives `<information>kro 417</information>`, and then answers. A tag such as `<search>` is one
token. The numbers are in documents that the environment `search` finds by BM25, as it does for large models. Held-out
names have documents, but occur in no demonstration or training problem, so their numbers can only be found by
searching. The model is warm-started on demonstrations. In these, one in four searches is for another person, and half
of the answers are guesses.
Deliberately omitted: a reference model and a KL term, a reward for searching.

Run:      rl train look_up       (see what it plays: rl generate look_up --output episodes.jsonl)
Control:  rl train look_up environment.env_class=mixed_up_look_up      (each search shows a random number)
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from rl_core.config import Config
from rl_core.interfaces import Recipe
from rl_environments.corpora import Document
from rl_environments.search import SearchEnvironment
from rl_examples.data_files import write_whole
from rl_examples.small_runs import SmallRun, write_problems, write_start_model

NUM_NAMES = 2000
NUM_HELD_OUT = 400

_RUN = SmallRun(name="look_up")
_CORPUS = f"{_RUN.directory}/documents.jsonl"

recipe = Recipe(
    summary="a small model learns to search before it answers, on two CPU cores, in a few minutes",
    config={
        **_RUN.settings,
        "environment.env_class": "look_up",
        "environment.options.corpus": _CORPUS,
        "environment.options.top_k": 1,
        "environment.options.max_searches": 1,
        "generator.max_turns": 2,
        "generator.sampling_params.max_generate_length": 7,
        "generator.sampling_params.stop": ["</search>", "</answer>"],
        "generator.eval_sampling_params.stop": ["</search>", "</answer>"],
    },
    prepare="rl_examples.look_up:prepare",
    makes=(_RUN.train, _RUN.held_out, _CORPUS, _RUN.start_model),
)

START_ACCURACY = 0.12
MARKS = ("<search>", "</search>", "<information>", "</information>", "<answer>", "</answer>")
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 ?-"
END = "$"


class LookUp(SearchEnvironment):
    """The environment `search` with shorter observations, which consist of the model's few characters and tags."""

    placement = "in_process"  # a search of this corpus takes a tenth of a millisecond

    def information(self, documents: Sequence[Document]) -> str:
        """See `SearchEnvironment.information`."""
        return f"<information>{documents[0].text if documents else '-'}</information>"

    def neither(self) -> str:
        """See `SearchEnvironment.neither`."""
        return "<information>?</information>"


class MixedUpLookUp(LookUp):
    """The negative control: every search shows the name with a random number instead of the person's."""

    def information(self, documents: Sequence[Document]) -> str:
        """See `SearchEnvironment.information`."""
        rng = random.Random("".join(document.text for document in documents))
        return super().information([attrs.evolve(each, text=f"{each.text[:4]}{_number(rng)}") for each in documents])


def entries() -> list[tuple[str, str]]:
    """Returns three-letter names with their numbers, in an order fixed by one seed; the first ones are held out."""
    rng = random.Random(0)
    names = ["".join(letters) for letters in itertools.product("bdfgklmnprstvz", "aeiouy", CHARACTERS[:26])]
    findable = [name for name in names if name not in ("but", "for", "not")]  # stop words of BM25
    return [(name, _number(rng)) for name in rng.sample(findable, NUM_NAMES)]


def prepare(config: Config) -> None:
    """Creates the recipe's data and warm-started model if the configuration uses them and they are missing."""
    known = entries()
    rows = [{"prompt": f"{name}?", "answer": number, "env_class": "look_up"} for name, number in known]
    trained = rows[NUM_HELD_OUT:]
    write_problems(config, _RUN, rows, num_held_out=NUM_HELD_OUT)
    if config.environment.options.get("corpus") == _CORPUS and not Path(_CORPUS).exists():
        write_corpus(Path(_CORPUS), known)
    write_start_model(
        config,
        _RUN,
        recipe,
        problems=trained,
        demonstrate=lambda rng: demonstrated(trained, rng),
        write_model=write_model,
        target_accuracy=START_ACCURACY,
        updates_per_check=25,
        lr=2e-3,  # with the default of 3e-3, one seed in two did not learn to copy within 700 updates
    )


def write_corpus(path: Path, known: Sequence[tuple[str, str]]) -> None:
    """Writes a file of documents atomically, with one document per name."""
    lines = "".join(json.dumps({"text": f"{name} {number}"}) + "\n" for name, number in known)
    write_whole(path, lambda unfinished: unfinished.write_text(lines))


def write_model(directory: Path, *, seed: int) -> None:
    """Writes a freshly initialised Qwen3 of about 150,000 parameters, and its tokenizer of characters and tags."""
    from rl_examples.arithmetic import write_model as write_character_model

    write_character_model(directory, seed=seed, characters=[*CHARACTERS, *MARKS])


def demonstrated(rows: Sequence[dict[str, str]], rng: random.Random) -> dict[str, Any]:
    """Returns one turn of the policy as a demonstration: a guess, a search, or the answer after a search. A quarter of
    the searches are for another person."""
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
