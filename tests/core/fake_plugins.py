"""Installs plug-ins for a test as pip would: a module and a distribution's metadata in a folder on `sys.path`."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from rl_core import plugins
from rl_core.cli import commands


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, module: str, source: str, **entry_points: str) -> None:
    """Writes `module` and registers `group__name="module:object"` entry points for the duration of the test."""
    (folder / f"{module}.py").write_text(source)
    metadata = folder / f"{module}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module.replace('_', '-')}\nVersion: 1.0\n")
    lines = []
    for key, value in entry_points.items():
        group, _, name = key.partition("__")
        lines += [f"[rl_core.{group}]", f"{name} = {value}"]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(str(folder))
    # After the test, monkeypatch restores the original functions, whose caches hold what was installed before.
    for module_of_cache in (plugins, commands):
        monkeypatch.setattr(module_of_cache, "_installed", functools.cache(module_of_cache._installed.__wrapped__))


BACKEND = """
import attrs
from rl_core import interfaces
from rl_core.errors import ConfigError
from rl_core.layout.mesh import Mesh


@attrs.frozen(kw_only=True)
class Options:
    width: int = attrs.field(default=1)
    nested: "Nested" = attrs.field(factory=lambda: Nested())

    @width.validator
    def _positive(self, attribute, value):
        if value < 1:
            raise ValueError(f"width must be at least 1, not {value}")


@attrs.frozen(kw_only=True)
class Nested:
    dtype: str | None = None


class Backend(interfaces.Backend):
    name = "{name}"
    config_section = "{name}_config"
    options_class = Options

    def mesh(self, options, world_size):
        return Mesh(world_size=world_size)

    def validate(self, spec, world_size):
        if spec.options.width == 13:
            raise ConfigError("13 does not fit", key="trainer.policy.{name}_config.width")

    def needs_own_process(self):
        return False

    def create_worker(self, spec, rank):
        raise AssertionError("this backend must not train")


backend = Backend()
"""


def install_backend(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Installs a backend that trains nothing and has its own configuration section."""
    source = BACKEND.replace("{name}", name)
    install(folder, monkeypatch, f"rl_{name}", source, **{f"backends__{name}": f"rl_{name}:backend"})
