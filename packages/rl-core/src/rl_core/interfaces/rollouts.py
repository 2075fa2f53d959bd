"""Contracts of rollouts: an episode (`Environment`), its record (`Trajectory`), the `Generator`, which runs episodes,
and the `GeneratorPlugin`, which creates the generator."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import attrs

from rl_core.interfaces.inference import KeptTokens, Sampler, SamplingParams, StopReason
from rl_core.interfaces.messages import Message, Prompt, ToolSchema
from rl_core.interfaces.thoughts import without_thought

if TYPE_CHECKING:
    import numpy as np

Row = Mapping[str, Any]
"""One row of a data file: `prompt` (text, or chat messages) and whatever the environment reads."""
PlacementKind = Literal["in_process", "thread", "process"]
TrajectoryEnd = Literal["done", "max_turns", "context"]
"""Why an episode ended: the environment was done, the episode had `generator.max_turns` responses, or the conversation
was too long for another turn."""


@attrs.frozen(kw_only=True)
class Action:
    """The policy's response in one turn."""

    text: str
    """The response as text, without special tokens."""
    tokens: tuple[int, ...]
    stop_reason: StopReason
    example_call: str | None = None
    """`EXAMPLE_CALL` as the model's chat template renders it. It shows the format of this model's calls in `text`. None
    if the episode has no tools, or the template renders no calls."""
    opening: str = ""
    """The text with which the prompt opened this response, and which the policy continued: what follows the assistant's
    marker, such as `<think>\\n` if the chat template opens the thinking."""

    @property
    def answer(self) -> str:
        """The response without its thinking (`without_thought`), also if the prompt opened the thinking. Empty if the
        thinking was cut off."""
        return without_thought(self.opening + self.text)


@attrs.frozen(kw_only=True)
class StepResult:
    """The environment's response to an action."""

    reward: float
    done: bool
    observation: Prompt | None = None
    """What the policy sees next; None if the episode is done. If the episode began with messages: messages of any role
    except assistant, or text, which becomes a user message. If the episode began with text: text, which is appended
    unchanged."""
    metrics: Mapping[str, float] = attrs.field(factory=dict)
    """Averaged over episodes and logged as `environment/<name>`, in evaluation as `eval/<name>`. If several turns
    report a metric, the last value is used."""


class Environment(Protocol):
    """One episode. An entry point of `rl_core.environments` is a class, created for each episode as
    `Class(row, options)`.

    Authors inherit this class, and define `reset` and `step`. Everything else has a default. A class that has the
    methods but does not inherit them is accepted too (`as_environment`).
    """

    placement: ClassVar[PlacementKind] = "thread"
    """Where episodes run; the key `environment.placement` overrides it. `in_process`: all episodes share one event
    loop, so the environment must never block it. `thread`: each episode has its own thread and event loop, in which the
    environment is also created. The environment may block, and must lock objects that it shares with other threads.
    `process`: each episode has its own process, which later episodes reuse; class, row, options and results must be
    picklable. A generator raises ConfigError for a placement that it does not support."""
    offers_tools: ClassVar[bool] = False
    """Whether `tools` may return functions."""
    forces_responses: ClassVar[bool] = False
    """Whether `structural_tag` may return a grammar, which the engine must then accept."""

    def __init__(self, row: Row, options: Mapping[str, Any]) -> None:
        """`options` is the configuration's `environment.options`, with a `ServedModel` in place of
        `url: inference_engine`."""

    @abstractmethod
    async def reset(self) -> Prompt:
        """Starts the episode, and returns the first observation."""
        ...

    @abstractmethod
    async def step(self, action: Action) -> StepResult:
        """Responds to the policy's next response."""
        ...

    async def close(self) -> None:
        """Releases what the episode holds. Called at its end, however it ends."""

    async def tools(self) -> Sequence[ToolSchema]:
        """Returns the functions that the policy may call, which the chat template shows to the model. Empty: the
        episode has no tools. The environment parses the calls in `Action.text` and responds with messages of the role
        `tool`. Called once, after `reset`, if `offers_tools`. An environment with tools must begin with messages,
        because text is not formatted by a template."""
        return ()

    async def structural_tag(self, example_call: str | None) -> str | None:
        """Returns `SamplingParams.structural_tag`, a grammar that forces the form of the next response, such as a tool
        call; None: the policy responds freely. The tokens of a forced response are not trained on, because the policy
        did not choose them freely. Called before every turn, after `tools`, if `forces_responses`.

        Args:
            example_call: see `Action`.
        """
        return None

    @classmethod
    def require_options(cls, options: Mapping[str, Any]) -> None:
        """Raises ConfigError if no environment can be created with these options, for example because of a misspelt
        name; the error has the key. Starts nothing; called before the run, even if no row exists yet. A `url`
        can still be `inference_engine`."""

    @classmethod
    def require_row(cls, row: Row) -> None:
        """Raises DataError if an environment cannot be created from this row. The message names the missing or wrong
        column. Leaves nothing to close; called for every row before the run, so it should be fast for most rows."""

    @classmethod
    def require_episode(cls, row: Row, options: Mapping[str, Any]) -> None:
        """Raises DataError if an environment cannot be created from this row with these options, for example because an
        option names the column of the answer. Starts nothing; called for every row before the run, if
        `require_options` and `require_row` find no mistake."""

    @classmethod
    def preview(
        cls, row: Row, options: Mapping[str, Any], example_call: Callable[[Sequence[ToolSchema]], str | None]
    ) -> tuple[Sequence[ToolSchema], Sequence[Message]] | None:
        """Returns what an episode of the row will show, as far as it is known before the run: the functions, and an
        example of a turn, which is a message of the assistant (with `tool_calls` if the calls are in the chat
        template's format) and the answer to its call. None: neither is known. Called before the run, to prove that the
        chat template shows them.

        Args:
            example_call: returns `Action.example_call` for an episode with these functions.
        """
        return None


@cache
def as_environment(found: type) -> type[Environment]:
    """Returns an environment's class itself or, if it does not inherit `Environment`, a subclass of both. The subclass
    cannot be pickled, but the class can: `vars(adapted)["adapted_from"]`."""
    if Environment in found.__mro__:
        return found
    return type(found.__name__, (found, Environment), {"__module__": found.__module__, "adapted_from": found})


@attrs.frozen(kw_only=True, eq=False)
class TrajectoryStep:
    """One sequence of a trajectory. All per-token fields have the length of `tokens`."""

    tokens: Sequence[int]
    """The tokens of the prompt, of the responses and, if there are several turns, of the observations between them."""
    sampled: Sequence[bool]
    """True for tokens that the policy sampled. All tokens before the first sampled one are the prompt. Between the
    turns of a sequence are tokens of observations, which are not sampled."""
    rollout_logprobs: Sequence[float]
    """Log-probs from the engine; 0.0 for tokens that are not sampled. NaN in forced responses
    (`Environment.structural_tag`), for which the engine reports log-probs of the constrained distribution, not the
    policy's."""
    policy_version: Sequence[int]
    """The policy's version when each token was sampled; -1 for tokens that are not sampled."""
    reward: float
    """Reward of this step: the sum over its turns."""
    stop_reason: StopReason
    """Why the last turn ended."""
    routed_experts: np.ndarray | None = None
    """[tokens − 1 or fewer, layers, experts per token]: the experts of the first tokens. The experts of the other
    tokens are unknown."""
    kept_tokens: KeptTokens | None = None
    """What sampling kept for each of `tokens`, nothing for tokens that are not sampled; None if the engine did not
    return it."""
    token_rewards: Sequence[float] | None = None
    """The share of `reward` that is assigned to each token, if the step has several turns. None: the whole reward is
    assigned to the last sampled token."""
    loss_mask: Sequence[bool] | None = None
    """The tokens that are trained on, a subset of `sampled`. None: all of `sampled`."""


@attrs.frozen(kw_only=True)
class Turn:
    """One turn of an episode as text, for human readers."""

    response: str
    observation: str | None
    """What the policy saw next; None if the episode ended."""
    reward: float
    stop_reason: StopReason


@attrs.frozen(kw_only=True, eq=False)
class Trajectory:
    """One sample of a prompt. A failed sample has no steps, but a `failure`."""

    group_id: int
    sample_index: int
    steps: tuple[TrajectoryStep, ...]
    prompt_text: str
    response_text: str
    """The policy's responses. With several turns, also the observations between them, each after an arrow."""
    start_version: int
    """The policy's version when the episode started."""
    turns: tuple[Turn, ...] = ()
    """The episode as text. Empty if the generator's episodes have no turns."""
    end: TrajectoryEnd = "done"
    metrics: Mapping[str, float] = attrs.field(factory=dict)
    greedy_reward: float | None = None
    """Reward of the greedy answer to the same prompt. If the estimator reads this field, the loop generates the answer
    and sets the field."""
    failure: str | None = None
    """Why the rollout failed: exception type and message, with file and row. A failed rollout never counts as a rollout
    with reward 0."""
    failure_kind: str = "unknown"
    """The kind of failure, such as the exception's type, by which failures are counted. Read only if `failure` is
    set."""

    @property
    def reward(self) -> float:
        """Sum of the steps' rewards."""
        return sum(step.reward for step in self.steps)

    @property
    def is_cut(self) -> bool:
        """Whether the last response was cut off at its length limit, or there was no room for another response."""
        return self.end == "context" or (bool(self.steps) and self.steps[-1].stop_reason == "length")


@attrs.frozen(kw_only=True)
class GroupRequest:
    """A request for `num_samples` episodes of one prompt."""

    group_id: int
    row: Row
    row_place: str
    """`file:row`, for messages."""
    num_samples: int
    params: SamplingParams
    seed: int
    start_version: int


class Generator(Protocol):
    """Runs the episodes of prompts, and returns them as trajectories. A generator only samples from the engine
    (`Sampler`); the loop pauses and aborts requests and updates weights. Authors inherit this class; methods with a
    body are optional."""

    stop_tokens: Sequence[int] = ()
    """Tokens that end responses in addition to the model's own. The exported model's generation configuration names
    them."""

    @abstractmethod
    def prompt_length(self, row: Row) -> int:
        """Number of tokens of the row's prompt. Raises DataError if there is no prompt, or it cannot be encoded.

        A dry run calls this only for the shortest and longest prompts, and for the rows for which
        `may_have_unknown_tokens` is true."""
        ...

    @abstractmethod
    async def generate(self, request: GroupRequest) -> tuple[Trajectory, ...]:
        """Returns `num_samples` trajectories in the order of the samples. A failed episode is a Trajectory with
        `failure`.

        The loop may make two requests for a group at the same time: one for its samples, and one for a greedy answer
        (temperature 0) with which an estimator compares them.
        """
        ...

    def response_length(self, row: Row) -> int | None:
        """Number of tokens of the row's longest stored response, counted from its first trained token. None: responses
        are sampled. Raises the same errors as `prompt_length`."""
        return None

    def may_have_unknown_tokens(self, row: Row) -> bool:
        """Whether the row's prompt may have tokens beyond the model's vocabulary."""
        return False

    def prove(self, row: Row, *, anew: bool) -> int:
        """Called for some rows before a run. Raises DataError or ConfigError if the policy would not see all of the
        row's conversation, and returns the number of kinds of conversations proved so far. With `anew`, proves the row
        even if it has proved another row of its kind."""
        return 0

    async def aclose(self) -> None:
        """Releases the generator's resources, such as processes. Called once, after the last episode."""


@attrs.frozen(kw_only=True)
class GeneratorSpec:
    """Plain data with everything that a generator needs to know before the first prompt."""

    options: Any
    """An instance of `GeneratorPlugin.options_class`; None if it has none."""
    model_path: str
    """Directory or name of the policy's model. The generator uses its tokenizer and chat template."""
    max_turns: int
    """Largest number of responses in an episode."""
    max_input_length: int | None
    """Longest prompt of a later turn in tokens, including all earlier turns; None: no limit."""
    step_wise: bool
    """Each turn is a separate step. False: a trajectory is one sequence."""
    engine_init_kwargs: Mapping[str, Any]
    """Additional arguments of the engine's library, which may limit the context (`max_model_len`)."""
    env_class: str | None
    """The environment of all rows, an entry-point name or `package.module:Class`. None: each row's own `env_class`."""
    environment_options: Mapping[str, Any]
    """The options that are passed to every environment."""
    environment_timeout_s: float
    """Longest time that one call of an environment may take."""
    environment_placement: PlacementKind | None = None
    """Where environments run. None: `Environment.placement`."""
    environment_workers: int | None = None
    """Threads or processes for environments. None: the generator decides."""
    num_samples: int = 1
    """Samples per training row."""
    eval_num_samples: int = 1
    """Samples per held-out row."""
    add_special_tokens: bool = True
    """Whether prompts of text begin with the tokens with which the tokenizer begins a text."""


class GeneratorPlugin(Protocol):
    """Creates the generator: the object of an entry point of `rl_core.generators`. Its module must not import torch.
    Authors inherit this class; methods with a body are optional."""

    name: str
    options_class: type | None = None
    """Declares the generator's own keys in `generator`
    (`rl_core.interfaces.options`). None: it has none."""
    needs_engine: bool = True
    """False: trajectories come from the rows, so nothing is sampled. No engine is started, no weights are published,
    and evaluation computes the training loss of held-out rows."""

    def validate(self, spec: GeneratorSpec) -> None:
        """Raises ConfigError if the generator cannot run as `spec` says. Called before any process is started.

        A missing model is not an error: recipes may create it after this call.
        """

    @abstractmethod
    def create(self, spec: GeneratorSpec, client: Sampler) -> Generator:
        """Creates the generator of a run. Called once, after the engine has started. Raises ConfigError or PluginError
        if the generator cannot run as `spec` says."""
        ...
