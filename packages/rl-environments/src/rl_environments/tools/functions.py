"""Makes a tool from a Python function: derives the schema from type hints and docstring, and validates the arguments
before a call.

    def add(a: int, b: int = 1) -> int:
        \"""The sum of two numbers.

        Args:
            a: the first one
            b: the second one
        \"""

is shown as `{"name": "add", "description": "The sum of two numbers.", "parameters": {...}}`, where `a` is a required
integer. pydantic derives the schemas of types and validates values strictly: "3" is not an integer.
"""

from __future__ import annotations

import inspect
import json
import re
import typing
from collections.abc import Callable, Mapping
from typing import Any

import attrs
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from rl_core.errors import ConfigError, nearest
from rl_core.interfaces import ToolSchema

_SECTIONS = ("args", "arguments", "parameters", "returns", "return", "raises", "yields", "example", "examples", "note")
_CONSTANTS = {"true": True, "false": False, "none": None, "null": None}


class WrongArguments(Exception):
    """The arguments of a call do not fit the function's parameters. The policy sees the message."""


@attrs.frozen(kw_only=True)
class ToolFunction:
    """A function that a policy may call."""

    function: Callable[..., Any]
    """Plain or async; called with keyword arguments."""
    name: str
    description: str
    arguments: type[BaseModel]
    """pydantic model that validates the arguments; the alias of each field is a parameter's name."""
    schema: ToolSchema
    """The schema for a chat template."""

    @classmethod
    def of(cls, function: Callable[..., Any]) -> ToolFunction:
        """Makes a tool from a function or a bound method.

        Raises:
            ConfigError: a parameter has no type hint, cannot be passed by name, or has a type without JSON schema; or
                the docstring is missing or describes a nonexistent parameter.
        """
        name = function.__name__
        description, texts = _documented(inspect.getdoc(function) or "")
        if not description:
            raise ConfigError(
                f"tool {name!r} has no docstring: write one, because it tells the model what the function does"
            )
        parameters = inspect.signature(function).parameters
        if unknown := [text for text in texts if text not in parameters]:
            raise ConfigError(
                f"tool {name!r}: its docstring describes {unknown[0]!r}; its parameters are "
                f"{', '.join(parameters) or 'none'}.{nearest(unknown[0], parameters)}"
            )
        arguments = _arguments_model(name, parameters, _type_hints(name, function), texts)
        schema = _schema(name, description, arguments)
        return cls(function=function, name=name, description=description, arguments=arguments, schema=schema)

    def checked(self, arguments: Mapping[str, Any], *, is_text: bool) -> dict[str, Any]:
        """Validates the arguments of a call and returns them for the function. Arguments that the call omits are left
        out, so the function's defaults apply.

        Args:
            is_text: all values are text, as in XML, and are parsed according to the parameters' types.

        Raises:
            WrongArguments: an argument is missing, unknown or of the wrong type.
        """
        given = {name: self._from_text(name, value) for name, value in arguments.items()} if is_text else arguments
        try:
            checked = self.arguments.model_validate_json(json.dumps(given), strict=True)
        except ValidationError as error:
            raise WrongArguments("; ".join(_problem(each) for each in error.errors())) from None
        except RecursionError:
            raise WrongArguments("the arguments are nested too deeply") from None
        fields = self.arguments.model_fields
        return {str(fields[field].alias): getattr(checked, field) for field in checked.model_fields_set}

    def _from_text(self, name: str, text: Any) -> Any:
        parameter = self.schema["function"]["parameters"]["properties"].get(name, {})
        types = {part.get("type") for part in (parameter, *parameter.get("anyOf", ()))}
        word = text.strip()
        if "string" in types or "enum" in parameter:
            return None if "null" in types and word.lower() in ("none", "null") else text
        if word.lower() in _CONSTANTS:
            return _CONSTANTS[word.lower()]
        try:
            return json.loads(word)
        except (ValueError, RecursionError):
            return text


def _type_hints(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function, include_extras=True)
    except Exception as error:
        # A type hint is an expression, so evaluating it may raise any exception.
        raise ConfigError(f"tool {name!r}: its type hints cannot be read: {type(error).__name__}: {error}") from error


def _arguments_model(
    name: str, parameters: Mapping[str, inspect.Parameter], hints: Mapping[str, Any], texts: Mapping[str, str]
) -> type[BaseModel]:
    fields: dict[str, Any] = {}
    for number, (parameter_name, parameter) in enumerate(parameters.items()):
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(
                f"tool {name!r}: parameter {parameter} cannot be passed by name; give every parameter its own name"
            )
        if parameter_name not in hints:
            raise ConfigError(f"tool {name!r}: parameter {parameter_name!r} has no type hint; give it one, e.g. `int`")
        default = ... if parameter.default is parameter.empty else parameter.default
        # Fields are numbered, because pydantic forbids names such as `_x` and `json`. The model sees the alias.
        fields[f"p{number}"] = (
            hints[parameter_name],
            Field(default, alias=parameter_name, description=texts.get(parameter_name)),
        )
    try:
        return create_model(name, __config__=ConfigDict(extra="forbid", arbitrary_types_allowed=True), **fields)
    except Exception as error:
        raise ConfigError(f"tool {name!r}: its type hints cannot describe arguments: {error}") from error


def _schema(name: str, description: str, arguments: type[BaseModel]) -> ToolSchema:
    try:
        parameters = _without_titles(arguments.model_json_schema(by_alias=True))
        json.dumps(parameters, allow_nan=False)
    except Exception as error:
        # pydantic raises various errors for types without a JSON form.
        raise ConfigError(
            f"tool {name!r}: a parameter's type or default has no JSON form ({error}); use types that JSON has: text, "
            "numbers, booleans, lists, dictionaries, Literal, or pydantic models of these"
        ) from error
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def _problem(error: Any) -> str:
    """Describes one of pydantic's errors for the policy."""
    path = ".".join(map(str, error["loc"])) or "arguments"
    if error["type"] == "missing":
        return f"argument {path!r} is missing"
    if error["type"] == "extra_forbidden":
        return f"there is no argument {path!r}"
    return f"argument {path!r} is {json.dumps(error['input'], default=str):.100}: {error['msg']}"


def _documented(docstring: str) -> tuple[str, dict[str, str]]:
    """Returns the descriptions of the function and of its parameters from a Google-style docstring."""
    heads = "|".join(_SECTIONS)
    parts = re.split(rf"(?im)^({heads}):[ \t]*$", docstring)
    described: dict[str, str] = {}
    for head, body in zip(parts[1::2], parts[2::2], strict=True):
        if head.lower() in _SECTIONS[:3]:
            described |= _described(inspect.cleandoc(body))
    return " ".join(parts[0].split()), described


def _described(body: str) -> dict[str, str]:
    entries: dict[str, str] = {}
    name = ""
    for line in body.splitlines():
        if match := re.match(r"(\w+)(?: *\([^)]*\))?:[ \t]*(.*)", line):
            name, entries[match[1]] = match[1], match[2]
        elif name:
            entries[name] = f"{entries[name]} {line.strip()}".strip()
    return entries


def _without_titles(schema: Any) -> Any:
    """Removes pydantic's titles, which repeat the names and cost tokens in every prompt."""
    if isinstance(schema, list):
        return [_without_titles(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: {name: _without_titles(part) for name, part in value.items()}
        if key in ("properties", "$defs")
        else _without_titles(value)
        for key, value in schema.items()
        if key != "title"
    }
