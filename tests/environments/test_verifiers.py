"""Environments of verifiers, run unchanged through `VerifiersEnvironment`. Their packages are in verifiers_packages."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pyarrow.parquet
import pytest

from rl_core.errors import ConfigError, DataError, GenerationError, RLError
from rl_core.interfaces import Action, StepResult
from rl_core.reports.jsonl import read_rows
from rl_core.testing.environments import EnvironmentConformance
from rl_environments.verifiers import VerifiersEnvironment, close_processes, main, rows_of
from rl_transformers.testing.models import make_checkpoint

PACKAGES = Path(__file__).parent / "verifiers_packages"
SPELL = {
    "prompt": [{"role": "system", "content": "+"}, {"role": "user", "content": "42="}],
    "task": json.dumps({"prompt": "42=", "system_prompt": "+", "answer": "42"}),
}
CALL = '<tool_call>{{"name": "{}", "arguments": {}}}</tool_call>'


@pytest.fixture(scope="module", autouse=True)
def packages() -> Iterator[None]:
    """Processes that start during the tests find the packages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(PACKAGES))
        patch.syspath_prepend(str(PACKAGES))
        yield
    close_processes()


def played(
    row: Mapping[str, Any], options: Mapping[str, Any], responses: Sequence[str], tools: list[Any] | None = None
) -> list[StepResult]:
    """Plays an episode; `tools` gets the functions that it offers."""

    async def play() -> list[StepResult]:
        environment = VerifiersEnvironment(row, options)
        try:
            await environment.reset()
            if tools is not None:
                tools.extend(await environment.tools())
            results: list[StepResult] = []
            for response in responses:
                assert not results or not results[-1].done
                results.append(await environment.step(Action(text=response, tokens=(), stop_reason="stop")))
            return results
        finally:
            await environment.close()

    return asyncio.run(play())


class TestOneTurn(EnvironmentConformance):
    factory = VerifiersEnvironment
    row: ClassVar[dict[str, Any]] = SPELL
    options: ClassVar[dict[str, Any]] = {"env": "vf_spell"}
    rewards: ClassVar[dict[Any, float]] = {"42": 1.5, "43": 1.0, "421": 1.0, "x": 0.5}


def test_the_rewards_are_those_of_verifiers_for_the_same_conversations():
    import verifiers.v1 as vf
    from verifiers.v1 import graph
    from vf_spell import SpellData, SpellTask

    rng = random.Random(0)
    row = rows_of({"env": "vf_spell", "config": {"taskset": {"digits": 4}}}, 1, skip=1234)[0]
    data = SpellData.model_validate(json.loads(row["task"]))
    assert data.answer == "1234"

    async def reference(response: str) -> tuple[float, dict[str, Any]]:
        """The rewards of a trace that is built by hand, without a harness."""
        task = SpellTask(data)
        asked = vf.TraceTask(type="SpellTask", data=data, key=task.key, hash=task.hash)
        trace = vf.Trace(task=asked, agent=vf.AgentInfo(config=vf.AgentConfig()))
        turn = graph.prepare_turn(trace, [vf.SystemMessage(content="+"), vf.UserMessage(content="1234=")])
        message = vf.AssistantMessage(content=response)
        turn.commit(vf.Response(id="1", created=0, model="m", message=message, finish_reason="stop"))
        await task.score(trace)
        return trace.reward, {**{name: each.score for name, each in trace.rewards.items()}, **trace.metrics}

    for _ in range(8):
        response = "".join(rng.choice("1234") for _ in range(rng.randrange(1, 6)))
        (result,) = played(row, {"env": "vf_spell"}, [response])
        reward, metrics = asyncio.run(reference(response))
        assert (result.reward, result.metrics) == (reward, {"accuracy": reward, **metrics})
        assert result.done


def test_an_environment_of_several_turns_answers_each_response():
    row = {"prompt": [{"role": "user", "content": "?"}], "task": json.dumps({"prompt": "?", "number": 3})}
    options = {"env": "vf_guess"}
    first, second, last = played(row, options, ["1", "7", "3"])
    assert first.observation == [{"role": "user", "content": ">"}]
    assert second.observation == [{"role": "user", "content": "<"}]
    assert (first.reward, second.reward, last.reward, last.done) == (0.0, 0.0, 1.0, True)
    assert last.metrics == {"accuracy": 1.0, "found": 1.0, "guesses": 3.0}
    assert [result.done for result in played(row, options, ["9", "x", "4"])] == [False, False, True]
    with pytest.raises(AssertionError):  # verifiers ends the episode after three guesses
        played(row, options, ["9", "x", "4", "3"])


def test_tools_run_in_their_server_and_calls_that_cannot_be_read_stay_text():
    asked = "What do 4 apples cost?"
    row = {"prompt": [{"role": "user", "content": asked}], "task": json.dumps({"prompt": asked, "price": 12})}
    call, wrong = (CALL.format("shop_price", arguments) for arguments in ('{"count": 4}', '{"number": 4}'))
    offered: list[Any] = []
    refused, answered, told = played(row, {"env": "vf_shop"}, [wrong, f"I ask. {call}", "They cost 12."], offered)
    assert "count" in str(refused.observation), "the server's own message of the missing argument"
    assert answered.observation == [{"role": "tool", "content": "12", "name": "shop_price"}]
    assert (told.reward, told.done) == (1.0, True)
    assert [tool["function"]["name"] for tool in offered] == ["shop_price"]
    (broken,) = played(row, {"env": "vf_shop"}, ["<tool_call>{12}</tool_call>"])
    assert (broken.reward, broken.done) == (1.0, True), "the text contains the price"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"taskset": {"id": "vf_spell", "digit": 3}}, "digit"),
        ({"taskset": {"id": "vf_spell"}, "agent": {"sampling": {"temperature": 0.5}}}, "agent.sampling: got"),
        ({"taskset": {"id": "vf_spell"}, "agent": {"max_total_tokens": 9}}, "agent.max_total_tokens: tokens are"),
        ({"taskset": {"id": "vf_spell"}, "agent": {"retries": {"max_retries": 1}}}, "retries: an episode is played"),
        ({"taskset": {"id": "vf_spell"}, "agent": {"model": "m"}}, "of agent it would play none"),
        ({"taskset": {"id": "vf_spell"}, "id": "user-sim"}, "the policy can play one agent; of"),
        ({"taskset": {"id": "vf_boxed"}}, "BoxedTask needs a container; set agent.runtime"),
        ({"taskset": {"id": "vf_replaced"}}, "polite replaces responses of the policy"),
    ],
    ids=str,
)
def test_what_cannot_be_carried_is_refused(config: Mapping[str, Any], message: str):
    """In this process, because each process of its own would import verifiers again."""
    from rl_environments import verifiers_process

    verifiers_process.install()
    for right in ({"taskset": {"id": "vf_spell"}}, {"taskset": {"id": "vf_guess"}, "player": {"max_turns": 3}}):
        assert verifiers_process.loaded(right).taskset
    with pytest.raises(Exception, match=message):
        verifiers_process.loaded(config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"env": "vf_none"}, "'vf_none' cannot be played: ModuleNotFoundError: taskset 'vf_none' not found"),
        ({"env": "vf_spell", "config": {"taskset": {"id": "x"}}}, "options.config.taskset.id: set it with environ"),
        ({"env": "vf_spell", "config": 3}, "options.config: got 3; expected fields of verifiers' EnvConfig"),
        ({"env": "vf_spell", "python": "/no/python"}, "/no/python cannot load environments of verifiers"),
        ({"env": "vf_spell", "call_format": "x"}, "options.call_format: got 'x'"),
        ({"env": "vf_spell", "enviroment": "x"}, "not an option of the environment 'verifiers'"),
        ({}, "environment.options.env: got None"),
    ],
    ids=str,
)
def test_wrong_options_are_refused_before_the_run(options: Mapping[str, Any], message: str):
    with pytest.raises(ConfigError) as refused:
        VerifiersEnvironment.require_options(options)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("setup", "no disk"),
        ("reward", "no answer key"),
        ("infinite", "gave the reward inf"),
        ("pictures", "shows the policy image_url; only text"),
        ("twice", "the policy got a second conversation"),
        ("killed", "exit code -9"),
    ],
)
def test_a_failure_in_verifiers_fails_the_sample_and_the_next_episode_is_played(name: str, message: str):
    prompt = [{"role": "user", "content": "?"}]
    fine, row = ({"prompt": prompt, "task": json.dumps({"name": n, "prompt": "?"})} for n in ("fine", name))
    with pytest.raises(RLError, match=message):
        played(row, {"env": "vf_odd"}, ["yes", "again"])
    assert played(fine, {"env": "vf_odd"}, ["yes"])[-1].reward == 1.0


def test_a_task_that_a_user_opens_cannot_be_a_row():
    with pytest.raises(ConfigError, match="task 1 has no prompt, because its environment opens the conversation"):
        rows_of({"env": "vf_odd"}, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": [{"role": "user", "content": "42="}]}, "prompt: the row has .* begins with .*make the data again"),
        ({"task": "{}"}, "answer"),
    ],
)
def test_a_row_that_does_not_fit_its_task_fails_the_sample(change: dict[str, Any], message: str):
    with pytest.raises((DataError, GenerationError), match=message):
        played({**SPELL, **change}, {"env": "vf_spell"}, ["42"])


@pytest.mark.parametrize(("change", "message"), [({"prompt": "42="}, "prompt: got text"), ({"task": "x"}, "task: got")])
def test_a_row_without_its_columns_is_refused_before_the_run(change: dict[str, Any], message: str):
    VerifiersEnvironment.require_row(SPELL)
    with pytest.raises(DataError, match=message):
        VerifiersEnvironment.require_row({**SPELL, **change})


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_environment_of_verifiers_trains_two_steps(tmp_path: Path):
    from transformers import AutoTokenizer

    main(["vf_guess", "--count", "8", "--output", str(tmp_path / "train.parquet")])
    assert pyarrow.parquet.read_table(tmp_path / "train.parquet").num_rows == 8
    make_checkpoint(tmp_path / "model", family="qwen3")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    )
    tokenizer.save_pretrained(tmp_path / "model")
    settings = {
        "data.train_data": f"[{tmp_path}/train.parquet]",
        "data.val_data": "[]",
        "trainer.policy.model.path": tmp_path / "model",
        "trainer.run_dir": tmp_path / "run",
        "trainer.max_training_steps": 2,
        "trainer.eval_interval": 0,
        "trainer.train_batch_size": 4,
        "trainer.policy_mini_batch_size": 4,
        "generator.n_samples_per_prompt": 2,
        "generator.max_turns": 3,
        "generator.max_input_length": 100,
        "generator.sampling_params.max_generate_length": 2,
        "environment.env_class": "verifiers",
        "environment.options.env": "vf_guess",
    }
    command = [str(Path(sys.executable).with_name("rl")), "train", "quickstart"]
    command += [f"{key}={value}" for key, value in settings.items()]
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    steps = [row for row in read_rows(tmp_path / "run" / "metrics.jsonl") if row["step"] in (1, 2)]
    assert len(steps) == 2
    assert all(1 <= row["environment/guesses"] <= 3 for row in steps)
