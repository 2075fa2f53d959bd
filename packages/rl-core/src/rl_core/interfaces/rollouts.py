"""Rollouts: an episode (`Environment`), what was said in it (`Trajectory`), and who plays it (`Generator`, made by a
`GeneratorPlugin`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import attrs

from rl_core.interfaces.inference import Sampler, SamplingParams, StopReason
from rl_core.interfaces.messages import Prompt, ToolSchema

if TYPE_CHECKING:
    import numpy as np

Row = Mapping[str, Any]
"""One row of a data file: `prompt` (text, or chat messages) and whatever the environment reads."""
PlacementKind = Literal["in_process", "thread", "process"]
TrajectoryEnd = Literal["done", "max_turns", "context"]
"""How an episode ended: the environment was done, `generator.max_turns` were played, or the conversation had grown too
long for another turn."""


@attrs.frozen(kw_only=True)
class Action:
    """What the policy said in one turn."""

    text: str
    """Decoded, without special tokens."""
    tokens: tuple[int, ...]
    stop_reason: StopReason
    example_call: str | None = None
    """What the model's chat template writes for `EXAMPLE_CALL`, as it would stand in `text`: the format of this model's
    calls. None where the episode has no tools, or the template shows no calls."""


@attrs.frozen(kw_only=True)
class StepResult:
    """The environment's answer to an action."""

    reward: float
    done: bool
    observation: Prompt | None = None
    """What the policy sees next; None when done. In an episode that began with messages: messages of any role but the
    assistant's, or text, which is a user's message. In one that began with text: text, appended as it is."""
    metrics: Mapping[str, float] = attrs.field(factory=dict)
    """Averaged over episodes and logged as `environment/<name>`; of several turns that give one, the last counts."""


@runtime_checkable
class Environment(Protocol):
    """One episode (entry-point group `rl_core.environments`, each a callable `(row, options) → Environment`)."""

    async def reset(self) -> Prompt:
        """The first observation."""
        ...

    async def step(self, action: Action) -> StepResult: ...

    async def close(self) -> None: ...


class EnvironmentFactory(Protocol):
    def __call__(self, row: Row, options: Mapping[str, Any]) -> Environment:
        """One environment for one episode; `options` is the configuration's `environment.options`."""
        ...


@runtime_checkable
class Tools(Protocol):
    """Of an environment whose policy may call functions. What the policy says arrives as `Action.text`, from which the
    environment reads the calls itself; it answers with messages of the role `tool`."""

    async def tools(self) -> Sequence[ToolSchema]:
        """The functions that the chat template shows the model; none: the episode has no tools. Asked once, after
        `reset`, which then gives messages: text is shown as it is, without a template."""
        ...


@runtime_checkable
class Placement(Protocol):
    """Of an `EnvironmentFactory` (a class attribute, or an attribute of a function): where its environments' code runs.

    It holds for all episodes and is read before one starts. A factory without one runs in a `thread`;
    `environment.placement` of the configuration goes before both.
    """

    @property
    def placement(self) -> PlacementKind:
        """`in_process`: beside all other episodes, so it must await whatever takes time. `thread`: each episode in a
        thread of its own, with an event loop of its own, the making of the environment included; it may block, and
        must not touch other threads' objects unguarded. `process`: in another process, one episode at a time; factory,
        row, options and answers must pickle. A generator refuses with a ConfigError what it cannot do."""
        ...


@runtime_checkable
class Snapshotable(Protocol):
    """Of an environment whose episode can be carried elsewhere: to another process or machine, or to a later time."""

    async def snapshot(self) -> bytes:
        """All that the episode has become since it was made from its row and options. Changes nothing; called
        between `reset` and the end, while no other call is running."""
        ...

    async def restore(self, state: bytes) -> None:
        """Takes over a snapshot of an environment of the same row and options; called once, in place of `reset`. The
        environment that gave it may be gone."""
        ...


@attrs.frozen(kw_only=True, eq=False)
class TrajectoryStep:
    """One sequence of a trajectory; all per-token fields have the length of `tokens`."""

    tokens: Sequence[int]
    """What the engine was given and what it sampled, token for token."""
    sampled: Sequence[bool]
    """Sampled by the policy; everything before the first sampled token is the prompt. Between the turns of one sequence
    stand the tokens of observations, not sampled."""
    rollout_logprobs: Sequence[float]
    """0.0 where not sampled."""
    policy_version: Sequence[int]
    """-1 where not sampled."""
    reward: float
    """Received for this step; the sum, where it has several turns."""
    stop_reason: StopReason
    """Of its last turn."""
    routed_experts: np.ndarray | None = None
    """[tokens − 1 or fewer, layers, experts per token]: of the first tokens; the others' are not known."""
    token_rewards: Sequence[float] | None = None
    """Where on the step's tokens `reward` was received, of a step of several turns; None: all on the last sampled
    token."""


@attrs.frozen(kw_only=True)
class Turn:
    """One turn of an episode as text, for people to read."""

    response: str
    observation: str | None
    """What the policy was shown next; None where the episode ended."""
    reward: float
    stop_reason: StopReason


@attrs.frozen(kw_only=True, eq=False)
class Trajectory:
    """One sample of a prompt. A failed one has no steps and says why."""

    group_id: int
    sample_index: int
    steps: tuple[TrajectoryStep, ...]
    prompt_text: str
    response_text: str
    """What the policy said; of several turns also what it was shown in between, each behind an arrow."""
    start_version: int
    """The policy's version when the episode was started."""
    turns: tuple[Turn, ...] = ()
    """The episode as text; empty from a generator that plays no turns."""
    end: TrajectoryEnd = "done"
    metrics: Mapping[str, float] = attrs.field(factory=dict)
    greedy_reward: float | None = None
    """Of the greedy answer to the same prompt, which the loop plays for an estimator that compares with it, and adds
    here."""
    failure: str | None = None
    """Why the rollout failed: exception type and message, with the row's place. Never a silent zero reward."""
    failure_kind: str = "unknown"
    """What failures are counted by, e.g. the exception's type; read only where there is a `failure`."""

    @property
    def reward(self) -> float:
        """Sum of the steps' rewards."""
        return sum(step.reward for step in self.steps)

    @property
    def is_cut(self) -> bool:
        """The last response was cut off by its length, or there was no room for another one."""
        return self.end == "context" or (bool(self.steps) and self.steps[-1].stop_reason == "length")


@attrs.frozen(kw_only=True)
class GroupRequest:
    """Play one prompt `num_samples` times."""

    group_id: int
    row: Row
    row_place: str
    """`file:row`, for messages."""
    num_samples: int
    params: SamplingParams
    seed: int
    start_version: int


@runtime_checkable
class Generator(Protocol):
    """Prompts in, trajectories out. Its client is a `Sampler`: pauses, aborts and new weights are the loop's."""

    def prompt_length(self, row: Row) -> int:
        """Tokens of the row's prompt. Raises DataError if the row has none that can be encoded."""
        ...

    async def generate(self, request: GroupRequest) -> tuple[Trajectory, ...]:
        """`num_samples` trajectories in sample order; a failing episode is a Trajectory with `failure`.

        A group may be asked for twice at a time: its samples, and one greedy answer (temperature 0) to compare them
        with.
        """
        ...


@runtime_checkable
class ResponseMeasuring(Protocol):
    """Of a generator whose responses are known before they are asked for, because they are the rows' own."""

    def response_length(self, row: Row) -> int:
        """Tokens of the row's longest response, counted from its first trained token. Raises DataError as
        `prompt_length`."""
        ...


@runtime_checkable
class Closable(Protocol):
    """Of a generator that holds what has to be ended, such as processes."""

    async def aclose(self) -> None:
        """Ends it; called once, when nothing is played any more."""
        ...


@attrs.frozen(kw_only=True)
class GeneratorSpec:
    """Everything that a generator is told before the first prompt; plain data."""

    options: Any
    """An instance of the plug-in's own options class (see `Configurable`); None where it has none."""
    model_path: str
    """Directory or name of the policy's model, whose tokenizer and chat template it uses."""
    max_turns: int
    """Responses of an episode."""
    max_input_length: int | None
    """Tokens of a later turn's prompt, everything said before included; None: no bound of its own."""
    step_wise: bool
    """Each turn is a step of its own; else a trajectory is one sequence."""
    engine_init_kwargs: Mapping[str, Any]
    """What the engine's library was given, for one that bounds the context there (`max_model_len`)."""
    env_class: str | None
    """The environment of all rows, an entry point's name or `package.module:Class`; None: each row's own
    `env_class`."""
    environment_options: Mapping[str, Any]
    """Passed to every environment."""
    environment_timeout_s: float
    """Longest wait for one answer of an environment."""
    environment_placement: PlacementKind | None = None
    """Where environments run, whatever they say themselves; None: where they say."""
    environment_workers: int | None = None
    """Threads or processes for environments; None: as many as the generator finds right."""
    num_samples: int = 1
    """Of each training row."""
    eval_num_samples: int = 1
    """Of each held-out row."""


@runtime_checkable
class GeneratorPlugin(Protocol):
    """Makes the generator: the object behind an entry point of `rl_core.generators`. Its module imports no torch. A
    generator with keys of its own is `Configurable` too."""

    @property
    def contract_version(self) -> int: ...

    @property
    def name(self) -> str: ...

    def validate(self, spec: GeneratorSpec) -> None:
        """Raises ConfigError before any process is started.

        A model that is not there yet is no reason: recipes may make theirs after this call.
        """
        ...

    def create(self, spec: GeneratorSpec, client: Sampler) -> Generator:
        """Called once, when the engine serves `client`. Raises ConfigError, PluginError."""
        ...


@runtime_checkable
class EngineFree(Protocol):
    """Of a `GeneratorPlugin` that samples nothing: its trajectories are the rows' own, so no engine is started, no
    weights are published, and held-out rows are judged by the training loss."""

    @property
    def needs_no_engine(self) -> bool: ...


class GeneratorFactory(Protocol):
    """What stood at the seam of generators in version 1 of the contract."""

    def __call__(self, config: Any, client: Sampler) -> Generator:
        """The generator of a run.

        Args:
            config: the run's `rl_core.config.Config`.
            client: its pauses, aborts and new weights are the loop's.
        """
        ...


@runtime_checkable
class RowChecking(Protocol):
    """An environment class that can say before a run that a row is not one of its own."""

    def require_row(self, row: Row) -> None:
        """Called on the class (a static method), for every row that it is to play; starts nothing. Raises DataError
        that says which column is missing or wrong."""
        ...
