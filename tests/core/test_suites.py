"""A conformance suite without a subject fails. The modules beside this one give each suite faulty implementations."""

from __future__ import annotations

import asyncio
from typing import ClassVar

import pytest
from _pytest.outcomes import Failed

from rl_transformers.testing.generators import GeneratorConformance
from rl_transformers.testing.inference import InferenceClientConformance

REJECTED = (AssertionError, Failed)
"""The errors of a failing check; `pytest.raises` raises `Failed` if nothing was raised."""


@pytest.mark.parametrize(
    ("suite", "begin", "message"),
    [
        (
            InferenceClientConformance,
            lambda suite: asyncio.run(suite.create_client("")),
            "^TestNothing: got neither `create_client` nor a fixture `bench`; implement one$",
        ),
        (
            GeneratorConformance,
            lambda suite: suite.create_generator(None, None),
            "^TestNothing: got no `create_generator`; implement it$",
        ),
    ],
)
def test_a_suite_without_a_subject_fails_and_is_not_skipped(suite, begin, message, request):
    class TestNothing(suite):
        row: ClassVar = {}

    module = request.node.getparent(pytest.Module)
    assert module.istestclass(TestNothing, "TestNothing"), "pytest would not collect this check"
    with pytest.raises(NotImplementedError, match=message):
        begin(TestNothing())
