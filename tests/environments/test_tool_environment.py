"""The tool environment of docs/environments.md, played through the generator with calls in the template's format."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rl_core.errors import ConfigError
from rl_core.interfaces import Action, GroupRequest, SamplingParams
from rl_core.testing.environments import EnvironmentConformance
from rl_core.testing.scripted_engine import ScriptedClient
from rl_environments.tools import ToolEnvironment, tool
from rl_rollout.chat import TokenCodec
from rl_rollout.episode import Limits
from rl_rollout.generator import EnvironmentGenerator, Episodes
from tests.rollout.chat_templates import tokenizer_of

PAGE = (Path(__file__).parents[2] / "docs" / "environments.md").read_text()
ROW = {
    "prompt": [{"role": "user", "content": "Two apples?"}],
    "prices": {"apple": 0.5},
    "answer": "1.0",
}
CALL = '<tool_call>{"name": "price", "arguments": {"article": "apple", "count": 2}}</tool_call>'


def shown() -> tuple[type[ToolEnvironment], str]:
    """The class `Shop` of docs/environments.md, and its source text."""
    text = next(part.split("```")[0] for part in PAGE.split("```python\n") if "class Shop" in part)
    names: dict[str, Any] = {"__name__": "shown"}
    exec(compile(text, "docs/environments.md", "exec"), names)
    return names["Shop"], text


def test_the_environment_in_the_documentation_has_at_most_thirty_lines_and_passes_its_suite():
    shop, text = shown()
    assert len(text.splitlines()) <= 30

    class Suite(EnvironmentConformance):
        factory = shop
        row: ClassVar[dict[str, Any]] = ROW
        rewards: ClassVar[dict[Any, float]] = {(CALL, "It is 1.0."): 1.0, "2": 0.0, (CALL, CALL, "x"): 0.0}

    for check in [name for name in dir(Suite) if name.startswith("test_")]:
        with contextlib.suppress(pytest.skip.Exception):
            getattr(Suite(), check)()


async def test_the_model_sees_the_function_and_the_result_of_its_call():
    tokenizer = tokenizer_of("tool_chatml")
    said = iter([CALL, CALL.replace("apple", "pear"), "It is 1.0."])

    def script(request: Any) -> list[int]:
        return [*tokenizer(next(said), add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]

    generator = EnvironmentGenerator(
        ScriptedClient(script, end_tokens=[tokenizer.eos_token_id]),
        TokenCodec(tokenizer, chat_template_kwargs={}),
        Episodes(environment_of=lambda row: shown()[0], limits=Limits(max_turns=4)),
    )
    params = SamplingParams(max_tokens=200)
    request = GroupRequest(group_id=0, row=ROW, row_place="", num_samples=1, params=params, seed=0, start_version=0)
    (trajectory,) = await generator.generate(request)
    await generator.aclose()
    assert trajectory.failure is None
    assert '"description": "The price of an article in euros."' in trajectory.prompt_text
    assert [turn.observation for turn in trajectory.turns] == ["1.0", "Error: KeyError: 'pear'", None]
    assert (trajectory.reward, trajectory.metrics) == (1.0, {"accuracy": 1.0, "calls": 2.0, "wrong_calls": 1.0})


def test_the_tool_decorator_is_written_without_parentheses():
    with pytest.raises(ConfigError, match=r"^test_tool_environment\.py:\d+: write @tool without parentheses$"):

        class Parenthesised(ToolEnvironment):  # pyright: ignore[reportUnusedClass]
            @tool()
            def price(self, article: str) -> float: ...


def test_duplicate_tool_names_are_refused_except_in_a_subclass():
    with pytest.raises(ConfigError, match=r"Twice has two tools named 'price', so the first would be lost; rename"):

        class Twice(ToolEnvironment):  # pyright: ignore[reportUnusedClass]
            @tool
            def price(self, article: str) -> float:  # pyright: ignore[reportRedeclaration]
                """A price."""
                return 1.0

            @tool
            def price(self, article: int) -> float:  # noqa: F811
                """Another price."""
                return 2.0

    class Once(ToolEnvironment):
        @tool
        def price(self, article: str) -> float:
            """A price."""
            return 1.0

    class Replaced(Once):
        @tool
        def price(self, article: str) -> float:
            """Another price."""
            return 2.0

        async def judge(self, answer: str) -> float:
            return 0.0

    (schema,) = asyncio.run(Replaced(ROW, {}).tools())
    assert schema["function"]["description"] == "Another price."


def test_a_static_method_is_no_tool():
    with pytest.raises(
        ConfigError, match=r"\.py:\d+: @tool got an object of type staticmethod; expected a method, `def name"
    ):

        class Below(ToolEnvironment):  # pyright: ignore[reportUnusedClass]
            @tool
            @staticmethod
            def price(article: str) -> float: ...

    class Above(ToolEnvironment):
        @staticmethod
        @tool
        def price(article: str) -> float:
            """A price."""
            return 1.0

    with pytest.raises(ConfigError, match="Above: the tool 'price' is a staticmethod; expected a method"):
        Above(ROW, {})


def test_a_tool_may_not_have_the_name_of_an_attribute():
    class Row(ToolEnvironment):
        @tool
        def row(self, number: int) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
            """A row."""
            return ""

    with pytest.raises(ConfigError, match="the tool 'row' has the name of a member of ToolEnvironment"):
        Row(ROW, {})


def test_an_environment_without_tools_is_refused():
    class Empty(ToolEnvironment): ...

    with pytest.raises(ConfigError, match="Empty offers no tool: mark the methods"):
        Empty(ROW, {})


class Offers(ToolEnvironment):
    @tool
    def price(self, article: str) -> float:
        """The price of an article."""
        return 1.0


def test_an_environment_that_cannot_work_is_refused_with_the_change_to_make():
    class Renamed(Offers):
        @tool
        def reset(self, article: str) -> float:
            """The price of an article."""
            return 1.0

    class Named(Offers):
        call_format: Any = "hermes"

    for environment, options, message in (
        (Offers, {}, "Offers needs a method `async def judge"),
        (Renamed, {}, "Renamed: the tool 'reset' has the name of a member of ToolEnvironment; ren"),
        (Named, {}, r"Named.call_format: got 'hermes'; .* set environment.options.call_format"),
        (Offers, {"call_format": "x"}, "environment.options.call_format: got 'x'; expected one of hermes"),
    ):
        with pytest.raises(ConfigError, match=message):
            environment(ROW, options)
        with pytest.raises(ConfigError, match=message):
            environment.require_options(options)


async def test_a_synchronous_judge_method_is_an_error():
    class Judges(Offers):
        def judge(self, answer: str) -> Any:
            return 1.0

    with pytest.raises(ConfigError, match=r"Judges.judge returned float, expected an awaitable; define it with `async"):
        await Judges(ROW, {}).step(Action(text="1", tokens=(1,), stop_reason="stop"))
