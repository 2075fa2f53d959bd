"""Base class for environments with tools: methods marked `@tool`, and `judge` for the answer that ends the episode.

    a turn with calls    ──► the calls run concurrently ──► the policy sees the answers (role `tool`) and continues
    a turn without calls ──► `judge(answer)` gives the reward ──► the episode is done

docs/environments.md#environments-with-tool-functions has an example of a few lines.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import attrs

from rl_core.errors import ConfigError
from rl_core.interfaces import EXAMPLE_CALL, Action, Environment, Message, Prompt, Row, StepResult, ToolSchema
from rl_environments.options import key_of
from rl_environments.tools.call_formats import (
    MARKED,
    Call,
    CallFormat,
    ForcibleFormat,
    format_of_example,
    format_of_name,
)
from rl_environments.tools.calling import Answer, run_calls
from rl_environments.tools.functions import ToolFunction

_Function = TypeVar("_Function", bound=Callable[..., Any])
_MARK = "_is_tool_of_a_policy"
_NO_FUNCTION: Any = None
_METHODS = "expected a method, `def name(self, …)`, without @staticmethod, @classmethod or @property"
_ATTRIBUTES = ("row", "options", "num_calls", "num_wrong_calls")
"""Attributes that `ToolEnvironment.__init__` sets."""
ToolChoice = Literal["auto", "required"]
"""`required`: the next response must be a call; `auto`: the policy decides."""


def tool(function: _Function = _NO_FUNCTION) -> _Function:
    """Marks a method of a `ToolEnvironment`, plain or async, as callable by the policy. The model sees its type hints
    and docstring. Raises ConfigError if `function` is not a method, or if the class already has a tool of this name."""
    place, names = _caller()
    marked: object = function
    if function is _NO_FUNCTION:
        raise ConfigError(f"{place}: write @tool without parentheses")
    if not inspect.isfunction(marked):
        raise ConfigError(f"{place}: @tool got an object of type {type(function).__name__}; {_METHODS}")
    if "__qualname__" in names and hasattr(names.get(marked.__name__), _MARK):  # only a class body has `__qualname__`
        raise ConfigError(
            f"{place}: {names['__qualname__']} has two tools named {marked.__name__!r}, so the first would be lost; "
            "rename one"
        )
    setattr(function, _MARK, True)
    return function


def _caller() -> tuple[str, Mapping[str, Any]]:
    """Returns the place where `tool` was applied (`file.py:line`), and the local names there."""
    frame = sys._getframe(2)
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}", frame.f_locals


class ToolEnvironment(Environment):
    """Base class: define a subclass with methods marked `@tool` and with `judge`.

    Plain methods run in their own threads, concurrently if the policy makes several calls in one turn, so they must
    guard shared state. Metrics: `accuracy` (the reward), `calls`, `wrong_calls`.
    """

    offers_tools = True
    call_format: ClassVar[CallFormat | None] = None
    """Format in which the policy writes calls. None selects `environment.options.call_format`, else the chat template's
    format, else any known format, recognised by its tags."""
    shows_schemas: ClassVar[bool] = True
    """Whether the chat template renders the functions; set it to False if the prompt describes them itself."""
    call_timeout_s: ClassVar[float] = 30.0
    """Deadline of each call; must be shorter than `environment.timeout_s`, after which the sample fails."""
    max_calls_per_turn: ClassVar[int] = 16
    max_answer_characters: ClassVar[int] = 8000

    def __init__(self, row: Row, options: Mapping[str, Any]) -> None:
        self.row = row
        self.options = options
        self.num_calls = 0
        """Number of calls so far, including wrong ones."""
        self.num_wrong_calls = 0
        self._format = self._chosen_format(options)
        known = _tool_functions(type(self))
        self._tools = {name: attrs.evolve(each, function=getattr(self, name)) for name, each in known.items()}
        self._require_judge()

    @classmethod
    def require_options(cls, options: Mapping[str, Any]) -> None:
        """See `Environment.require_options`. Also checks the tools. A subclass with options of its own may extend this
        method, to refuse unknown ones before a run."""
        cls._chosen_format(options)
        _tool_functions(cls)
        cls._require_judge()

    @classmethod
    def _chosen_format(cls, options: Mapping[str, Any]) -> CallFormat | None:
        if cls.call_format is not None and not callable(getattr(cls.call_format, "read", None)):
            raise ConfigError(
                f"{cls.__name__}.call_format: got {cls.call_format!r}; expected an object with a method `read` "
                "(rl_environments.tools.CallFormat). To select a format by name, set environment.options.call_format"
            )
        name = options.get("call_format")
        return cls.call_format or (None if name is None else format_of_name(name, key_of(options, "call_format")))

    @classmethod
    def _require_judge(cls) -> None:
        if cls.judge is ToolEnvironment.judge and cls.step is ToolEnvironment.step:
            raise ConfigError(f"{cls.__name__} needs a method `async def judge(self, answer: str) -> float`")

    @classmethod
    def preview(
        cls, row: Row, options: Mapping[str, Any], example_call: Callable[[Sequence[ToolSchema]], str | None]
    ) -> tuple[Sequence[ToolSchema], Sequence[Message]] | None:
        """See `Environment.preview`. A class that has methods of its own does not know what they show."""
        own = ("reset", "tools", "step", "observation")
        if isinstance(row["prompt"], str) or any(
            getattr(cls, name) is not getattr(ToolEnvironment, name) for name in own
        ):
            return None
        functions = _tool_functions(cls)
        tools = [each.schema for each in functions.values()] if cls.shows_schemas else []
        example = example_call(tools) if tools else None
        chosen = cls._chosen_format(options) or (MARKED if example is None else format_of_example(example))
        is_templates = example is not None and any(isinstance(call, Call) for call in chosen.read(example))
        turn: Message = {"role": "assistant", "content": "", **({"tool_calls": [EXAMPLE_CALL]} if is_templates else {})}
        return tools, [turn, {"role": "tool", "content": "the answer", "name": next(iter(functions))}]

    async def judge(self, answer: str) -> float:
        """Returns the reward for the answer that ends the episode; `self.row` is the row. The answer contains no call
        and no thinking. A subclass must define this method, unless it has its own `step`."""
        raise NotImplementedError(f"{type(self).__name__} needs a method `async def judge(self, answer: str) -> float`")

    def observation(self, answers: Sequence[Answer]) -> Prompt:
        """Returns the observation that shows the policy the answers to its calls."""
        if isinstance(self.row["prompt"], str):
            return "".join(f"\n{answer.text}\n" for answer in answers)
        named = ({} if answer.name is None else {"name": answer.name} for answer in answers)
        return [{"role": "tool", "content": answer.text, **name} for answer, name in zip(answers, named, strict=True)]

    async def reset(self) -> Prompt:
        """See `Environment.reset`."""
        return self.row["prompt"]

    async def tools(self) -> Sequence[ToolSchema]:
        """See `Environment.tools`. Empty if `shows_schemas` is False or the episode begins with text. An episode that
        begins with text uses no template, so the text must describe the tools."""
        is_text = isinstance(self.row["prompt"], str)
        return [] if is_text or not self.shows_schemas else [each.schema for each in self._tools.values()]

    async def step(self, action: Action) -> StepResult:
        """See `Environment.step`."""
        calls = self._format_of(action.example_call).read(action.answer)
        if not calls:
            judged = self.judge(action.answer.strip())
            if not inspect.isawaitable(judged):
                raise ConfigError(
                    f"{type(self).__name__}.judge returned {type(judged).__name__}, expected an awaitable; define it "
                    "with `async def judge`"
                )
            reward = await judged
            return StepResult(reward=reward, done=True, metrics=self.metrics(reward))
        answers = await run_calls(
            calls,
            self._tools,
            timeout_s=self.call_timeout_s,
            max_calls=self.max_calls_per_turn,
            max_characters=self.max_answer_characters,
        )
        self.num_calls += len(answers)
        self.num_wrong_calls += sum(answer.is_wrong for answer in answers)
        return StepResult(reward=0.0, done=False, observation=self.observation(answers), metrics=self.metrics(0.0))

    def _format_of(self, example_call: str | None) -> CallFormat:
        if self._format is None:
            self._format = MARKED if example_call is None else format_of_example(example_call)
        return self._format

    def metrics(self, reward: float) -> dict[str, float]:
        """Returns the metrics that are reported with every turn."""
        return {"accuracy": reward, "calls": float(self.num_calls), "wrong_calls": float(self.num_wrong_calls)}


class ToolChoiceEnvironment(ToolEnvironment):
    """A `ToolEnvironment` that may require a call in the next turn.

    A grammar then forces the response to be one call with valid arguments and nothing else, unless a length limit or
    stop string ends it early. Forced responses are not trained on. Needs an engine that accepts grammars
    (vllm).
    """

    forces_responses = True

    def tool_choice(self) -> ToolChoice:
        """Returns whether the next response must be a call. Called before each turn. By default, a call is required
        until the policy has made one."""
        return "auto" if self.num_calls else "required"

    async def structural_tag(self, example_call: str | None) -> str | None:
        """See `Environment.structural_tag`."""
        choice = self.tool_choice()
        if choice == "auto":
            return None
        if choice != "required":
            raise ConfigError(f"{type(self).__name__}.tool_choice: got {choice!r}; expected 'auto' or 'required'")
        found = self._format_of(example_call)
        if not isinstance(found, ForcibleFormat):
            raise ConfigError(
                f"{type(self).__name__}.tool_choice: got 'required', but the call format {found.name!r} has no "
                "grammar; set environment.options.call_format, or give your format a method `call_grammar` "
                "(rl_environments.tools.ForcibleFormat)"
            )
        calls = [found.call_grammar(each.schema) for each in self._tools.values()]
        return json.dumps({"type": "structural_tag", "format": {"type": "or", "elements": calls}})


@cache
def _tool_functions(environment: type) -> Mapping[str, ToolFunction]:
    """Returns the tools of an environment class by name, in the order of their definition. The tools of base classes
    come first."""
    names = dict.fromkeys(name for base in reversed(environment.__mro__) for name in vars(base))
    members = {name: inspect.getattr_static(environment, name) for name in names}
    for name, member in members.items():
        hidden = member.fget if isinstance(member, property) else getattr(member, "__func__", None)
        if hasattr(hidden, _MARK):
            raise ConfigError(f"{environment.__name__}: the tool {name!r} is a {type(member).__name__}; {_METHODS}")
    found = tuple(name for name, member in members.items() if getattr(member, _MARK, False))
    if not found:
        raise ConfigError(
            f"{environment.__name__} offers no tool: mark the methods that the policy may call with @tool"
        )
    taken = [name for name in found if hasattr(ToolEnvironment, name) or name in _ATTRIBUTES]
    if taken:
        raise ConfigError(
            f"{environment.__name__}: the tool {taken[0]!r} has the name of a member of ToolEnvironment; rename it"
        )
    return {name: ToolFunction.of(getattr(environment, name).__get__(object())) for name in found}
