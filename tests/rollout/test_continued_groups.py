"""A run that generates ahead and is killed continues its responses from the tokens in its checkpoint.

The loop, the buffer, the rollouts and the `environment` generator are real and run in virtual time; the scripted engine
samples one token at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest

from rl_core.errors import DeadlineError, ForeignCodeError
from rl_core.interfaces import (
    Action,
    Completion,
    Environment,
    GenerateRequest,
    Generator,
    GroupRequest,
    SamplingParams,
    StepResult,
    Trajectory,
)
from rl_core.seeds import seed_of
from rl_core.trainer.state.checkpoint import list_checkpoints, load_state
from rl_core.trainer.state.recorded_answers import GroupAnswers, RecordingSampler, request_key
from rl_core.trainer.state.stored_groups import StartedGroup, read_groups, read_started_groups
from rl_rollout.chat import TokenCodec
from rl_rollout.episode import Limits
from rl_rollout.generator import EnvironmentGenerator, Episodes, sample_seed
from rl_transformers.testing.models import character_tokenizer
from tests.core.loop_checks import require_nothing_is_lost
from tests.core.scripted_run import Script, ScriptedEngine, ScriptedRun
from tests.core.test_loop_stops import ended_after

TOKENIZER = character_tokenizer()
LENGTH = 21
"""The length of a sequence: the prompt, which is one token, and the response."""
Sampled = list[tuple[int, float, int]]
"""The token, log-prob and version of each sampled token."""


class Parity(Environment):
    """One turn; the reward is 1 if the sum of the response's token ids is odd."""

    placement = "in_process"

    def __init__(self, row: Any, options: Any) -> None:
        pass

    async def reset(self) -> str:
        return "?"

    async def step(self, action: Action) -> StepResult:
        return StepResult(reward=float(sum(action.tokens) % 2), done=True)


def generator_of(client: Any, environment: Any = Parity, *, max_turns: int = 1) -> EnvironmentGenerator:
    return EnvironmentGenerator(
        client,
        TokenCodec(TOKENIZER, chat_template_kwargs={}),
        Episodes(environment_of=lambda row: environment, limits=Limits(max_turns=max_turns)),
    )


def logprob_of(token: int, version: int) -> float:
    return -(token + 1) / (version + 3)


class TokenEngine(ScriptedEngine):
    """Samples one token for each request every one to five seconds. Seed, position and version determine the token."""

    num_aborted = 0

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._aborted: dict[str, asyncio.Event] = {}

    async def generate(self, request: GenerateRequest) -> tuple[Completion, ...]:
        sampled: Sampled = []
        aborted = self._aborted[request.sample_id] = asyncio.Event()
        while len(request.prompt_tokens) + len(sampled) < LENGTH and not aborted.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(aborted.wait(), 1.0 + request.seed % 5)
            await self.serves.wait()
            if not aborted.is_set():
                token = seed_of(request.seed, len(request.prompt_tokens) + len(sampled), self.version) % 40
                sampled.append((token, logprob_of(token, self.version), self.version))
        del self._aborted[request.sample_id]
        if aborted.is_set():
            await asyncio.sleep(0.25)  # the answer takes this long to arrive
        tokens, logprobs, versions = zip(*sampled, strict=True) if sampled else ((), (), ())
        stop_reason = "abort" if aborted.is_set() else "stop"
        return (
            Completion(tokens=tokens, logprobs=logprobs, policy_versions=versions, stop_reason=stop_reason),
        )  # fmt: skip

    async def abort(self, sample_ids: Sequence[str] | None = None) -> None:
        assert sample_ids, "only training requests may be aborted"
        for sample_id in sample_ids:
            self._aborted[sample_id].set()
            self.num_aborted += 1

    def generator(self) -> Generator:
        return LoggedGenerator(self)


class LoggedGenerator(Generator):
    """The `environment` generator; it logs the start of each group as the scripted generator does."""

    def __init__(self, engine: TokenEngine) -> None:
        self._engine = engine
        self._generator = generator_of(RecordingSampler(engine))

    def prompt_length(self, row: object) -> int:
        return 1

    async def generate(self, request: GroupRequest) -> tuple[Trajectory, ...]:
        self._engine.log(f"start {request.group_id} at {request.start_version}")
        return await self._generator.generate(request)


SCRIPT = Script(steps=5, max_staleness=3, pipeline_depth=2, train_s=10.0, settings={"ckpt_interval": 1})


def run_of(
    directory: Path, script: Script = SCRIPT, *, engine_class: type[TokenEngine] = TokenEngine, **parts: Any
) -> ScriptedRun:
    return ScriptedRun(directory, script, engine_class=engine_class, **parts)


def started_in(directory: Path) -> tuple[StartedGroup, ...]:
    return read_started_groups(list_checkpoints(directory / "checkpoints")[-1])


def sampled_of(trajectory: Trajectory) -> Sampled:
    (step,) = trajectory.steps
    tokens = zip(step.tokens, step.rollout_logprobs, step.policy_version, strict=True)
    return [token for token, is_sampled in zip(tokens, step.sampled, strict=True) if is_sampled]


def stored_of(started: StartedGroup, sample_index: int) -> Sampled:
    """The tokens of one sample in the checkpoint. A response may span several requests, looked up one by one."""
    seed, params = sample_seed(0, started.group_id, sample_index), SamplingParams()
    found: Sampled = []
    for part in range(100):
        request = GenerateRequest(
            sample_id="",
            prompt_tokens=(*TOKENIZER("?")["input_ids"], *(token for token, _, _ in found)),
            params=attrs.evolve(params, max_tokens=params.max_tokens - len(found)),
            seed=seed_of(seed, part) if part else seed,
        )
        answer = started.answers.get(request_key(request))
        if answer is None:
            break
        found += zip(answer[0].tokens, answer[0].logprobs, answer[0].policy_versions, strict=True)
    return found


def trained_by(*runs: ScriptedRun) -> dict[tuple[int, int], Trajectory]:
    """The trained trajectory of each group and sample. If two runs trained the same step, the later run's is used."""
    steps = {step: trajectories for run in runs for step, trajectories in run.reports.groups.items()}
    return {(one.group_id, one.sample_index): one for trajectories in steps.values() for one in trajectories}


def require_continued(started: Sequence[StartedGroup], trained: dict[tuple[int, int], Trajectory]) -> None:
    """Fails unless each sample has its group's start version and begins with its stored tokens, log-probs and
    versions."""
    for group in started:
        for index in range(2):
            trajectory, stored = trained[group.group_id, index], stored_of(group, index)
            assert sampled_of(trajectory)[: len(stored)] == stored, f"group {group.group_id}, sample {index}"
            assert trajectory.start_version == group.start_version


def require_sound(run: ScriptedRun) -> None:
    """Fails unless each token has the log-prob of its version, no version is older than the group's start version, and
    the staleness bound holds."""
    for step, trajectories in run.reports.groups.items():
        for trajectory in trajectories:
            sampled = sampled_of(trajectory)
            versions = [version for _, _, version in sampled]
            assert len(sampled) == LENGTH - 1
            assert [logprob_of(token, version) for token, _, version in sampled] == [one for _, one, _ in sampled]
            assert versions == sorted(versions)
            assert trajectory.start_version <= versions[0] <= versions[-1] <= step - 1
            assert step - 1 - trajectory.start_version <= run.script.max_staleness


def test_a_killed_run_continues_from_the_tokens_in_its_checkpoint(tmp_path: Path):
    run = run_of(tmp_path)
    ended_after(run, 112.0)
    started, checkpoint = started_in(tmp_path), list_checkpoints(tmp_path / "checkpoints")[-1]
    stored = [stored_of(group, index) for group in started for index in range(2)]
    assert any(0 < len(one) < LENGTH - 1 for one in stored), "some responses must be half done"
    state = load_state(checkpoint)
    assert {group.group_id for group in started} <= set(state.restart_groups)
    assert any(group.start_version < state.step for group in started)
    # Negative control: resume without the stored answers.
    again = run_of(tmp_path / "again", state=state, stored=read_groups(checkpoint)).go()
    with pytest.raises(AssertionError, match=r"group \d+, sample \d"):
        require_continued(started, trained_by(again))
    resumed = run.resumed()
    require_nothing_is_lost(run, resumed)
    require_continued(started, trained_by(resumed))
    require_sound(resumed)
    assert max(row["rollout/staleness_max"] for row in resumed.reports.rows.values()) <= SCRIPT.max_staleness


def test_a_stopped_run_saves_the_tokens_of_its_running_requests(tmp_path: Path):
    run = run_of(tmp_path, attrs.evolve(SCRIPT, settings={}))
    run.log.when("train 1", run.loop.stop)
    run.go()
    started = started_in(tmp_path)
    assert any(0 < len(stored_of(group, index)) < LENGTH - 1 for group in started for index in range(2))
    resumed = run.resumed()
    require_nothing_is_lost(run, resumed)
    require_continued(started, trained_by(resumed))


@pytest.mark.parametrize("streams", [False, True])
def test_a_run_that_is_killed_at_random_moments_continues_and_loses_nothing(tmp_path: Path, streams: bool):
    num_continued = [num_continued_after_kills(tmp_path / str(seed), seed, streams=streams) for seed in range(6)]
    assert sum(num > 0 for num in num_continued) > 3, num_continued


def num_continued_after_kills(directory: Path, seed: int, *, streams: bool) -> int:
    """Kills a run three times at random moments. Returns the number of groups that the resumed runs continued."""
    dice = random.Random(seed)
    depth, bound = dice.choice([(1, 3), (2, 2), (2, 4), (3, 3)])
    settings = {"ckpt_interval": dice.choice([1, 2]), "saves_in_background": dice.random() < 0.5}
    script = attrs.evolve(SCRIPT, pipeline_depth=depth, max_staleness=bound, streams=streams, settings=settings)
    runs, started = [run_of(directory, script)], []
    for _ in range(3):
        ended_after(runs[-1], dice.uniform(50.0, 110.0))
        is_saved = bool(list_checkpoints(directory / "checkpoints"))
        started += started_in(directory) if is_saved else ()
        runs.append(runs[-1].resumed() if is_saved else run_of(directory, script))
    runs[-1].go()
    trained = trained_by(*runs)
    assert sorted(trained) == [(group, sample) for group in range(10) for sample in range(2)], f"seed {seed}"
    require_continued(started, trained)
    for run in runs:
        require_sound(run)
    return len(started)


class Refuses(TokenEngine):
    """Its `abort` fails."""

    async def abort(self, sample_ids: Sequence[str] | None = None) -> None:
        raise DeadlineError("no server answers")


class Breaks(TokenEngine):
    """An engine whose plug-in does not implement `abort`."""

    async def abort(self, sample_ids: Sequence[str] | None = None) -> None:
        raise NotImplementedError("not written yet")


class Ignores(TokenEngine):
    """Its `abort` returns without aborting anything, as for requests that have moved to another server."""

    async def abort(self, sample_ids: Sequence[str] | None = None) -> None:
        pass


@pytest.mark.parametrize(
    ("engine_class", "seconds", "warning"),
    [
        (Refuses, 0.0, "may lack tokens of groups in progress: no server answers"),
        (Breaks, 0.0, "may lack tokens of groups in progress: not written yet"),
        (Ignores, 10.0, "requests: they did not end within 10 s of being aborted"),
    ],
)
def test_a_checkpoint_is_written_even_if_the_engine_aborts_nothing(
    tmp_path: Path, engine_class: type[TokenEngine], seconds: float, warning: str, caplog: pytest.LogCaptureFixture
):
    run = run_of(tmp_path, engine_class=engine_class)
    run.log.when("save 1", run.loop.stop)
    run.go()
    assert run.time_of("save 1") == run.time_of("row 1") + seconds
    stored = [stored_of(group, index) for group in started_in(tmp_path) for index in range(2)]
    assert {len(one) for one in stored} <= {0, LENGTH - 1}, "only whole responses may be stored"
    assert warning in caplog.text
    require_nothing_is_lost(run, run.resumed())


def test_a_synchronous_run_aborts_nothing_and_stores_nothing(tmp_path: Path):
    run = run_of(tmp_path, attrs.evolve(SCRIPT, max_staleness=0, pipeline_depth=0))
    run.log.when("train 2", run.loop.stop)
    run.go()
    assert run.engine.num_aborted == 0  # pyright: ignore[reportAttributeAccessIssue]
    assert not list(tmp_path.glob("**/started_groups.*"))


# --- several turns ---------------------------------------------------------------------------------------------------


class Echo(Environment):
    """Two turns; the second prompt depends on the row."""

    placement = "in_process"

    def __init__(self, row: Any, options: Any) -> None:
        self._row = row
        self._turn = 0

    async def reset(self) -> str:
        return "?"

    async def step(self, action: Action) -> StepResult:
        self._turn += 1
        done = self._turn == 2
        return StepResult(reward=1.0, done=done, observation=None if done else self._row["observation"])


class TwoTurns:
    """Answers each request with three tokens drawn at random, and marks the second answer as aborted."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        self.num_asked = 0

    async def generate(self, request: GenerateRequest) -> tuple[Completion, ...]:
        self.num_asked += 1
        tokens = tuple(self._dice.randrange(10) for _ in range(3))
        stop_reason = "abort" if self.num_asked == 2 else "stop"
        return (Completion(tokens=tokens, logprobs=(-1.0,) * 3, policy_versions=(7,) * 3, stop_reason=stop_reason),)


@pytest.mark.parametrize(("observation", "num_known"), [(",", 6), (";", 3)])
async def test_a_later_turn_is_continued_if_the_environment_answers_as_before(observation: str, num_known: int):
    async def play(client: TwoTurns, answers: GroupAnswers, observation: str) -> list[int]:
        request = GroupRequest(
            group_id=3,
            row={"observation": observation},
            row_place="rows:1",
            num_samples=1,
            params=SamplingParams(max_tokens=9),
            seed=0,
            start_version=7,
        )
        with answers.recording():
            (trajectory,) = await generator_of(RecordingSampler(client), Echo, max_turns=2).generate(request)
        (step,) = trajectory.steps
        return [token for token, is_sampled in zip(step.tokens, step.sampled, strict=True) if is_sampled]

    before = GroupAnswers(7)
    first = await play(TwoTurns(1), before, ",")
    # The first turn's answer and the unfinished part of the second turn; the rest of the second turn is unknown.
    known = dict(list(before.so_far.items())[:2])
    client = TwoTurns(2)
    client.num_asked = 5
    second = await play(client, GroupAnswers(7, recorded=known), observation)
    assert second[:num_known] == first[:num_known]
    assert second[num_known:] != first[num_known : len(second)]
    assert client.num_asked == 6, "only one request may be sampled"


async def test_a_forced_response_is_not_aborted_for_a_checkpoint():
    class Waits(TwoTurns):
        async def generate(self, request: GenerateRequest) -> tuple[Completion, ...]:
            await released.wait()
            return await super().generate(request)

    released, answers, sampler = asyncio.Event(), GroupAnswers(2), RecordingSampler(Waits(1))
    free = GenerateRequest(sample_id="free", prompt_tokens=(1,), params=SamplingParams(), seed=3)
    forced = attrs.evolve(free, sample_id="forced", params=SamplingParams(structural_tag="{}"))
    with answers.recording():
        running = [asyncio.create_task(sampler.generate(request)) for request in (free, forced)]
    await asyncio.sleep(0)
    assert [*answers.running] == ["free"]
    released.set()
    await asyncio.gather(*running)
    assert not answers.running
    assert answers.so_far.keys() == {request_key(free), request_key(forced)}, "both finished responses must be recorded"


async def test_an_error_names_the_engine_client_instead_of_its_recorder():
    class Leaves(TwoTurns):
        async def generate(self, request: GenerateRequest) -> tuple[Completion, ...]:
            raise SystemExit(1)

    request = GenerateRequest(sample_id="a", prompt_tokens=(1,), params=SamplingParams(), seed=3)
    with GroupAnswers(2).recording(), pytest.raises(ForeignCodeError, match=r"engine client Leaves raised SystemExit"):
        await RecordingSampler(Leaves(1)).generate(request)


async def test_a_recorded_answer_is_returned_once():
    request = GenerateRequest(sample_id="a", prompt_tokens=(1,), params=SamplingParams(), seed=3)
    client, answer = TwoTurns(1), (Completion(tokens=(5,), logprobs=(-1.0,), policy_versions=(2,), stop_reason="stop"),)
    answers = GroupAnswers(2, recorded={request_key(request): answer})
    assert dict(answers.so_far) == {request_key(request): answer}
    sampler = RecordingSampler(client)
    with answers.recording():
        assert await sampler.generate(attrs.evolve(request, sample_id="b", session_id="s")) == answer
        assert dict(answers.so_far) == {request_key(request): answer}
        again = await sampler.generate(request)
    assert again != answer
    assert client.num_asked == 1
    await sampler.generate(attrs.evolve(request, seed=4))
    assert dict(answers.so_far) == {request_key(request): again}, "nothing may be recorded outside `recording()`"
    waiting = Completion(tokens=(), logprobs=(), policy_versions=(), stop_reason="abort")
    assert not GroupAnswers(2, recorded={"request": (waiting,)}).so_far, "an answer without tokens must not be kept"
