"""The generated page docs/configuration.md is up to date, and every key has a description."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest

from rl_core import plugins
from rl_core.config import Config
from rl_core.config.loading import hints, known_paths
from rl_core.config.reference import field_docs, reference_page
from rl_core.config.resolving import value_at

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_reference_page_in_docs_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == reference_page(), (
        "stale; run: python -m rl_core.config.reference > docs/configuration.md"
    )


@pytest.mark.parametrize("key", ["", *(key for key in known_paths(Config) if attrs.has(type(value_at(Config(), key))))])
def test_every_key_has_a_text_that_ends_as_a_sentence(key: str):
    cls = type(value_at(Config(), key)) if key else Config
    docs = field_docs(cls)
    for name in hints(cls):
        assert docs.get(name, "").endswith((".", "?", "`")), f"{key}.{name}: {docs.get(name)!r}"


@pytest.mark.parametrize("backend", [plugin.name for plugin in plugins.installed("rl_core.backends")])
def test_every_key_of_a_backends_section_has_a_text_that_ends_as_a_sentence(backend: str):
    classes = [plugins.load("rl_core.backends", backend).options_class]
    while classes:
        cls = classes.pop()
        for name, hint in hints(cls).items():
            assert field_docs(cls).get(name, "").endswith((".", "`")), f"{cls.__name__}.{name}"
            classes += [hint] if attrs.has(hint) else []


def test_the_page_shows_types_and_defaults_as_users_write_them():
    page = reference_page()
    assert "| `epochs` | int, at least 1 | `1` |" in page
    assert "| `bf16` | true \\| false | `true` |" in page
    assert "| `adam_betas` | list of 2 float, two numbers from 0 to below 1 | `[0.9, 0.999]` |" in page
    assert "| `trainer.ckpt_path` | `<trainer.run_dir>/checkpoints` |" in page
