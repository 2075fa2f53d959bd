"""A Python function as a tool: its schema, its arguments, and the messages about mistakes."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest

from rl_core.errors import ConfigError
from rl_core.interfaces import require_tools
from rl_environments.tools import ToolFunction
from rl_environments.tools.functions import WrongArguments


def book(city: str, nights: int, *, breakfast: bool = False, rooms: list[int] | None = None, json: str = "") -> str:
    """Books a hotel
    in a city.

    Args:
        city: where,
            in English
        nights (int): how many
        json: a name that pydantic's models have already

    Returns:
        a number: of the booking
    """
    return f"{city} {nights} {breakfast} {rooms} {json}"


BOOK = ToolFunction.of(book)


def test_the_schema_has_what_hints_and_docstring_say():
    require_tools([BOOK.schema])
    function = BOOK.schema["function"]
    assert function["name"] == "book"
    assert function["description"] == "Books a hotel in a city."
    parameters = function["parameters"]
    assert parameters["required"] == ["city", "nights"]
    assert parameters["properties"] == {
        "city": {"type": "string", "description": "where, in English"},
        "nights": {"type": "integer", "description": "how many"},
        "breakfast": {"type": "boolean", "default": False},
        "rooms": {"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "null"}], "default": None},
        "json": {"type": "string", "default": "", "description": "a name that pydantic's models have already"},
    }
    assert parameters["additionalProperties"] is False


def test_the_schema_agrees_with_the_schema_of_transformers():
    from transformers.utils import get_json_schema

    def add(first: int, second: float, names: list[str], kind: Literal["a", "b"]) -> float:
        """Adds.

        Args:
            first: one
            second: two
            names: three
            kind: four
        """
        return first + second

    def kept(schema: Any) -> Any:
        """The schema's fields that both libraries write."""
        function = schema["function"]
        parameters = {key: function["parameters"][key] for key in ("type", "properties", "required")}
        return {"type": schema["type"], "name": function["name"], "text": function["description"], **parameters}

    assert kept(ToolFunction.of(add).schema) == kept(get_json_schema(add))


@pytest.mark.parametrize("is_text", [False, True])
def test_arguments_arrive_as_the_function_takes_them(is_text: bool):
    values: dict[str, Any] = {"city": "12", "nights": 2, "breakfast": True, "rooms": [1, 2], "json": "true"}
    given = {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}
    assert BOOK.checked(given if is_text else values, is_text=is_text) == values


def test_arguments_with_a_default_may_be_left_out():
    assert BOOK.checked({"city": "Oslo", "nights": 1}, is_text=False) == {"city": "Oslo", "nights": 1}
    assert BOOK.checked({"city": "Oslo", "nights": "1", "rooms": " None "}, is_text=True)["rooms"] is None


@pytest.mark.parametrize(
    ("arguments", "is_text", "said"),
    [
        ({"nights": 1}, False, "argument 'city' is missing"),
        ({"city": "Oslo", "nights": "2"}, False, "argument 'nights' is \"2\""),
        ({"city": "Oslo", "nights": 2.5}, False, "argument 'nights' is 2.5"),
        ({"city": "Oslo", "nights": True}, False, "argument 'nights' is true"),
        ({"city": None, "nights": 2}, False, "argument 'city' is null"),
        ({"city": "Oslo", "nights": 2, "pool": 1}, False, "there is no argument 'pool'"),
        ({"city": "Oslo", "nights": "two"}, True, "argument 'nights' is \"two\""),
        ({"city": "Oslo", "nights": 2, "rooms": ["a"]}, False, "argument 'rooms.0' is \"a\""),
        ({"city": "\ud800", "nights": 2}, False, "Invalid JSON"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], is_text: bool, said: str):
    with pytest.raises(WrongArguments, match=said):
        BOOK.checked(arguments, is_text=is_text)


def without_hint(a) -> int:
    """x"""
    return a


def many(*numbers: int) -> int:
    """x"""
    return sum(numbers)


def no_docstring(a: int) -> int:
    return a


def misspelt(number: int) -> int:
    """x

    Args:
        nubmer: y
    """
    return number


class Point: ...


def no_json(a: Point) -> None:
    """x"""


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (without_hint, "parameter 'a' has no type hint"),
        (many, "cannot be passed by name"),
        (no_docstring, "has no docstring"),
        (misspelt, "describes 'nubmer'.*Did you mean 'number'"),
        (no_json, "no JSON form"),
    ],
)
def test_a_function_that_cannot_be_a_tool_is_refused_by_name(function: Any, said: str):
    with pytest.raises(ConfigError, match=f"tool '{function.__name__}'.*{said}"):
        ToolFunction.of(function)
