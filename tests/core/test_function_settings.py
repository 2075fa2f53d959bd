"""Which parameters of a function are settings, and how given settings are checked."""

from __future__ import annotations

import pytest

from rl_core.errors import ConfigError
from rl_core.function_settings import keyword_parameters, positional_parameters, require_settings


def tilted(scores_N, group_N, /, lengths_N, *rest, scale, power=2.0, **others):
    """A function with every kind of parameter."""


def test_columns_are_passed_by_position_and_settings_by_keyword():
    assert positional_parameters(tilted) == ["scores_N", "group_N", "lengths_N"]
    assert list(keyword_parameters(tilted)) == ["scale", "power"]


def test_settings_that_fit_pass():
    require_settings(tilted, {"scale": 1}, "tilted")
    require_settings(tilted, {"scale": 1, "power": 3}, "tilted")
    require_settings(len, {}, "len")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"scale": 1, "pover": 2},
            "^key: 'tilted' has no keyword-only parameter 'pover'; it has scale, power. Did you mean 'po",
        ),
        (
            {"scale": 1, "scores_N": 2},
            "^key: 'tilted' has no keyword-only parameter 'scores_N'; it has scale, power",
        ),
        ({}, "^key: 'tilted' needs the parameter 'scale'; add scale=2$"),
    ],
)
def test_settings_that_do_not_fit_are_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        require_settings(tilted, settings, "'tilted'", key="key", remedy="; add {setting}=2")


def test_the_error_for_a_function_without_settings_says_so():
    with pytest.raises(ConfigError, match=r"len has no keyword-only parameter 'x'; it has none\."):
        require_settings(len, {"x": 1}, "len")
