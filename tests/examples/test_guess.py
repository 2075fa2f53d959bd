"""The guessing game of several turns: its rules, and a few steps of training on it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import attrs
import pytest

from rl_core.batch import Batch
from rl_core.cli.episodes import show_episodes
from rl_core.config import Config, from_mapping
from rl_core.interfaces import Action, GenerateRequest, GroupRequest, SamplingParams, StepResult
from rl_core.reports.jsonl import read_rows
from rl_core.reports.samples import read_samples
from rl_core.testing.environments import EnvironmentConformance
from rl_core.testing.scripted_engine import ScriptedClient
from rl_core.trainer.run import run_generation, run_training
from rl_core.trainer.update.collate import collate
from rl_examples.arithmetic import write_rows
from rl_examples.guess import GuessEnvironment, numbers, recipe, write_model
from rl_rollout.chat import TokenCodec, load_tokenizer
from rl_rollout.episode import Limits
from rl_rollout.generator import EnvironmentGenerator, Episodes

TRUNCATED = {"generator__sampling_params__top_p": 0.6}


class TestGuessEnvironment(EnvironmentConformance):
    factory = GuessEnvironment
    row: ClassVar[dict[str, Any]] = {"prompt": "?", "number": 3}
    rewards: ClassVar[dict[Any, float]] = {
        "3": 1.0,
        ("5", "2", "3"): 1.0,
        ("9", "8", "7", "3"): 1.0,
        ("9", "8", "7", "6", "3"): 0.0,
        "x": 0.0,
        "33": 0.0,
    }


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("guess")
    write_rows(directory / "numbers.parquet", numbers())
    write_model(directory / "model", seed=0)
    return directory


def config_of(start: Path, run_dir: Path, **overrides: Any) -> Config:
    return from_mapping(
        {
            **recipe.config,
            "data.train_data": [str(start / "numbers.parquet")],
            "data.val_data": [str(start / "numbers.parquet")],
            "trainer.policy.model.path": str(start / "model"),
            "trainer.run_dir": str(run_dir),
            "trainer.max_training_steps": 2,
            "trainer.eval_interval": 2,
            "generator.n_samples_per_prompt": 4,
            "environment.env_class": "tests.examples.environments:Patient",
            "trainer.log_sample_logprobs": True,
            **{key.replace("__", "."): value for key, value in overrides.items()},
        }
    )


@pytest.mark.parametrize(
    ("overrides", "num_sequences", "is_merged"),
    [
        ({}, 1, False),
        ({"generator__step_wise_trajectories": True}, 1, True),
        ({"generator__step_wise_trajectories": True, "generator__merge_stepwise_output": False}, 4, False),
        ({"trainer__max_staleness": 2}, 1, False),
        ({**TRUNCATED}, 1, False),
        ({**TRUNCATED, "generator__step_wise_trajectories": True}, 1, True),
        (
            {
                **TRUNCATED,
                "generator__step_wise_trajectories": True,
                "generator__merge_stepwise_output": False,
                "trainer__share_prefixes": True,
            },
            4,
            False,
        ),
    ],
    ids=["one sequence", "merged steps", "steps", "asynchronous", "top_p", "top_p, merged", "top_p, shared prefixes"],
)
def test_a_run_trains_on_episodes_of_several_turns(
    start: Path, tmp_path: Path, overrides: dict[str, Any], num_sequences: int, is_merged: bool
):
    run_training(config_of(start, tmp_path / "run", **overrides))
    rows = list(read_rows(tmp_path / "run" / "metrics.jsonl"))
    # In an asynchronous run a step may have no tokens of the version that it trains; its row then lacks the metric.
    differences = [row["rollout/logprob_diff_max"] for row in rows[1:] if "rollout/logprob_diff_max" in row]
    assert max(differences) < 1e-4
    for row in rows[1:]:
        assert row["rollout/turns"] == 4.0
        assert row["rollout/sampled_tokens"] == pytest.approx(row["rollout/response_length"] * 20 * 4)
        assert (row.get("rollout/merged_tokens", 0.0) > 0.3) == is_merged
    for sample in read_samples(tmp_path / "run"):
        assert sample.turns is not None
        assert len(sample.turns) == 4
        if sample.purpose == "train":
            assert sample.tokens is not None
            assert len(sample.tokens) == num_sequences


def test_the_gradient_is_the_same_whether_or_not_steps_are_merged(start: Path, tmp_path: Path):
    norms = []
    for is_merged in (True, False):
        changes: dict[str, Any] = {
            "trainer__max_training_steps": 1,
            "trainer__algorithm__advantage_estimator": "reinforce++",
            "trainer__algorithm__gamma": 0.9,
            "trainer__algorithm__loss_reduction": "sequence_mean",
            "generator__step_wise_trajectories": True,
            "generator__merge_stepwise_output": is_merged,
        }
        run_training(config_of(start, tmp_path / str(is_merged), **changes))
        norms.append(list(read_rows(tmp_path / str(is_merged) / "metrics.jsonl"))[-1]["policy/grad_norm"])
    # The attention of float32 sums longer sequences in another order.
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_generated_episodes_are_shown_turn_by_turn(start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    output = tmp_path / "samples.jsonl"
    assert run_generation(config_of(start, tmp_path / "run"), output) == 40
    show_episodes(output)
    shown = capsys.readouterr().out
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert shown.startswith(f"prompt 0, sample 0: reward {rows[0]['reward']:g}, 4 turns\n  prompt        ?=\n")
    assert shown.count("  policy") == 3 * 4
    assert shown.count("  environment   ") == 3 * 3


# --- docs/environments.md -------------------------------------------------------------------------------------------

PAGE = (Path(__file__).parents[2] / "docs" / "environments.md").read_text()


def table(heading_row: str, number: int = 0) -> dict[str, list[str]]:
    """First cell of each row → the row's other cells, for one table of the page. `number` counts, from 0, the tables
    that begin with `heading_row`."""
    text = [part for part in PAGE.split("\n\n") if part.startswith(heading_row)][number]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    return {name: cells for name, *cells in rows}


async def two_guesses(start: Path, *, max_tokens: int) -> Batch:
    """An episode for the number 2: the policy answers `5` with weight version 7, then `2` with version 8."""
    tokenizer = load_tokenizer(str(start / "model"))

    def script(request: GenerateRequest) -> list[int]:
        client.version += 1
        return tokenizer("5$" if client.version == 7 else "2$")["input_ids"]

    class Lenient(GuessEnvironment):
        # Plays on after a response that `max_tokens` cut off, so that the trajectory has both turns.
        async def step(self, action: Action) -> StepResult:
            return await super().step(attrs.evolve(action, stop_reason="stop"))

    client = ScriptedClient(script, end_tokens=[tokenizer.eos_token_id])
    client.version = 6
    generator = EnvironmentGenerator(
        client,
        TokenCodec(tokenizer, chat_template_kwargs={}),
        Episodes(environment_of=lambda row: Lenient, limits=Limits(max_turns=4)),
    )
    params = SamplingParams(max_tokens=max_tokens)
    request = GroupRequest(
        group_id=0, row={"number": 2}, row_place="", num_samples=1, params=params, seed=0, start_version=7
    )
    return collate(list(await generator.generate(request)))


async def test_the_masks_in_the_documentation_are_those_of_a_game(start: Path):
    batch, shown = await two_guesses(start, max_tokens=2), table("| token |")
    tokenizer = load_tokenizer(str(start / "model"))
    assert [f"`{tokenizer.decode([token])}`" for token in batch["tokens"].tolist()] == shown["token"]
    for column in ("sampled", "loss_mask"):
        assert batch[column].int().tolist() == [int(cell) for cell in shown["`sampled`, `loss_mask`"]]
    assert batch["rewards"].tolist() == [float(cell) for cell in shown["`rewards`"]]
    assert batch["policy_version"].tolist() == [int(cell.replace("−", "-")) for cell in shown["`policy_version`"]]


async def test_the_masks_of_a_response_that_was_cut_are_as_documented(start: Path):
    batch, shown = await two_guesses(start, max_tokens=1), table("| token |", 1)
    expected = [int(cell) for cell in shown["`sampled`, `loss_mask`"]]
    # In the test the second response is cut too, so the end of sequence in the table's last column is missing.
    for column in ("sampled", "loss_mask"):
        assert batch[column].int().tolist() == expected[:-1]


def test_the_environment_in_the_documentation_passes_its_suite():
    names: dict[str, Any] = {"__name__": "shown"}
    exec(compile(PAGE.split("```python\n")[1].split("```")[0], "docs/environments.md", "exec"), names)

    class Suite(EnvironmentConformance):
        factory = names["HigherLower"]
        row: ClassVar[dict[str, Any]] = {"number": 3}
        rewards: ClassVar[dict[Any, float]] = {("5", "2", "3"): 1.0, "9": 0.0, "x": 0.0}

    for check in [name for name in dir(Suite) if name.startswith("test_")]:
        getattr(Suite(), check)()
