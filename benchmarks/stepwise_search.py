"""Token cost of step-wise search: tokens trained on, relative to their number if each conversation is one sequence.

    python -m benchmarks.stepwise_search

The environment `search` plays the same scripted conversations of several searches as text and with two chat templates:
ChatML keeps earlier turns; Qwen3's drops the thinking before the last user message. If a conversation is one sequence,
the sequence has each token once. If it is split into steps, the prompt of each later step repeats the earlier turns.
Nothing is repeated if a step continues the previous step and is merged with it (`generator.merge_stepwise_output`).
Tokens are counted, not timed, so every run gives the same figures.
"""

from __future__ import annotations

import asyncio
import copy
import json
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import trl

from rl_core.interfaces import GroupRequest, SamplingParams, Trajectory
from rl_core.testing.scripted_engine import ScriptedClient
from rl_core.trainer.update.collate import collate, merged
from rl_environments.search import SearchEnvironment
from rl_rollout.chat import TokenCodec
from rl_rollout.episode import Limits
from rl_rollout.generator import EnvironmentGenerator, Episodes
from tests.rollout.chat_templates import tokenizer_of

NUM_EPISODES = 64
MAX_SEARCHES = 4
WORDS = ("whale", "river", "stone", "light", "paper", "north", "clock", "glass", "bread", "house", "train", "cloud")
CASES = (
    ("text", None, "user"),
    ("ChatML, information from `user`", "chatml", "user"),
    ("Qwen3, information from `tool`", "qwen3", "tool"),
    ("Qwen3, information from `user`", "qwen3", "user"),
)


def measure(template: str | None, observer: str, corpus: Path) -> dict[str, float]:
    """Tokens of all sequences, with steps merged and with steps apart, divided by their number if each conversation is
    one sequence."""
    steps = asyncio.run(play(template, observer, corpus))
    apart = collate(steps)
    joined, _ = merged(apart)
    once = sum(conversation_tokens(trajectory) for trajectory in steps)
    return {"merged": len(joined["tokens"]) / once, "apart": len(apart["tokens"]) / once}


def conversation_tokens(trajectory: Trajectory) -> int:
    """Tokens of a conversation as one sequence: first prompt, all responses, and the observations between them."""
    total = len(trajectory.steps[0].tokens)
    for before, after in zip(trajectory.steps, trajectory.steps[1:], strict=False):
        said = list(before.tokens)[list(before.sampled).index(True) :]
        shown = len(after.tokens) - len(before.tokens) if _continues(before.tokens, after.tokens) else None
        if shown is None:
            # Earlier turns were rendered differently: the new text begins where the previous turn's answer ends.
            prompt = list(after.tokens)[: list(after.sampled).index(True)]
            shown = len(after.tokens) - _end_of_shared_answer(prompt, said)
        total += shown
    return total


def _continues(before: Sequence[int], after: Sequence[int]) -> bool:
    return list(after[: len(before)]) == list(before)


def _end_of_shared_answer(prompt: Sequence[int], said: Sequence[int]) -> int:
    """Position in the prompt at which the previous turn's answer ends, found by the answer's last tokens. A template
    that drops the thought keeps these tokens."""
    end = list(said)[-4:]
    places = [place for place in range(len(prompt) - len(end) + 1) if list(prompt[place : place + len(end)]) == end]
    return places[-1] + len(end)


async def play(template: str | None, observer: str, corpus: Path) -> list[Trajectory]:
    """Plays the scripted conversations; a session's turns depend only on its number."""
    tokenizer = copy.copy(tokenizer_of("chatml"))
    if template not in (None, "chatml"):
        tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / f"{template}.jinja").read_text()

    def script(request: Any) -> list[int]:
        session, _, turn = request.sample_id.rpartition("-")
        rng = random.Random(f"{session.rpartition('-')[2]} {turn}")
        thought = " ".join(rng.choices(WORDS, k=rng.randint(10, 40)))
        num_searches = random.Random(session.rpartition("-")[2]).randint(1, MAX_SEARCHES)
        kind = "search" if int(turn) < num_searches else "answer"
        text = f"<think>\n{thought}\n</think>\n\n<{kind}>{rng.choice(WORDS)}</{kind}>"
        return [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]

    options = {"corpus": str(corpus), "max_searches": MAX_SEARCHES, "observer": observer}
    generator = EnvironmentGenerator(
        ScriptedClient(script, end_tokens=[tokenizer.eos_token_id]),
        TokenCodec(tokenizer, chat_template_kwargs={}),
        Episodes(
            environment_of=lambda row: SearchEnvironment,
            environment_options=options,
            limits=Limits(max_turns=MAX_SEARCHES + 1),
            step_wise=True,
            environment_workers=4,
        ),
    )
    asked = "Which of these is it? Search as often as you like."
    prompt = asked if template is None else [{"role": "user", "content": asked}]
    request = GroupRequest(
        group_id=0,
        row={"prompt": prompt, "answer": "whale"},
        row_place="",
        num_samples=NUM_EPISODES,
        params=SamplingParams(max_tokens=4000),
        seed=0,
        start_version=0,
    )
    trajectories = list(await generator.generate(request))
    await generator.aclose()
    failed = [trajectory.failure for trajectory in trajectories if trajectory.failure]
    assert not failed, failed[0]
    return trajectories


def write_corpus(path: Path) -> Path:
    """Writes forty documents of twenty words each."""
    rng = random.Random(0)
    rows = ({"title": rng.choice(WORDS), "text": " ".join(rng.choices(WORDS, k=20))} for _ in range(40))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def main() -> None:
    """Prints one row per case."""
    with tempfile.TemporaryDirectory() as directory:
        corpus = write_corpus(Path(directory) / "documents.jsonl")
        print(f"{'conversation':<34} {'steps merged':>13} {'steps apart':>12}   (tokens, relative to one sequence)")
        for says, template, observer in CASES:
            found = measure(template, observer, corpus)
            print(f"{says:<34} {found['merged']:>13.3f} {found['apart']:>12.3f}")


if __name__ == "__main__":
    main()
