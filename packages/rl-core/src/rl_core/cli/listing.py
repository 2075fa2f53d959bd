"""The output of `rl config` and `rl plugins`: plain columns, the same on a terminal and in a pipe."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import click

from rl_core import config as configuration
from rl_core import plugins
from rl_core.cli import commands
from rl_core.cli.messages import say
from rl_core.config.checks import check_function_params
from rl_core.errors import PluginError, RLError
from rl_core.interfaces import Recipe


def show_config(loaded: configuration.Loaded, *, as_yaml: bool) -> None:
    """Prints every key with value and source, and the derived setting `scoring_pass`; with `as_yaml`, prints the
    configuration as YAML. Raises ConfigError or PluginError if the settings of the loss or of the estimator are
    invalid."""
    check_function_params(loaded.config)
    if as_yaml:
        text = configuration.dump_yaml(loaded.config)
        # As bytes, because `rl train` reads UTF-8, whatever the encoding of the terminal.
        click.echo(text.encode(), nl=False)
        if missing := sorted(path for path in loaded.makes if path in text and not Path(path).exists()):
            say(f"warning: only the recipe creates {', '.join(missing)}; run rl train RECIPE before the new file")
        return
    rows = [
        (origin.key, json.dumps(origin.value, ensure_ascii=False), origin.source)
        for origin in configuration.origins(loaded)
    ]
    for line in columns([*rows, _scoring(loaded.config)]):
        click.echo(line)


def _scoring(config: configuration.Config) -> tuple[str, str, str]:
    """The row `scoring_pass`, which is derived from several keys."""
    from rl_core.trainer.before.settings import update_settings  # imports torch

    try:
        scoring = update_settings(config).scoring
    except RLError as error:
        return "scoring_pass", "null", f"not known: {error}"
    return "scoring_pass", json.dumps(scoring.extent), f"derived: {scoring.reason}"


def show_plugins(group_of_commands: click.Group) -> None:
    """Prints every plug-in of every group. Imports each one, to find broken plug-ins.

    Args:
        group_of_commands: the `rl` command; plug-ins cannot replace its built-in commands.
    """
    for group, title in plugins.GROUPS.items():
        click.echo(f"{title} ({group})")
        found = plugins.installed(group)
        for line in columns(
            (f"  {plugin.name}", plugin.distribution, plugin.value, _state(plugin, group_of_commands))
            for plugin in found
        ):
            click.echo(line)
        if not found:
            click.echo("  none")


def _state(plugin: plugins.Plugin, group_of_commands: click.Group) -> str:
    try:
        if plugin.group == commands.GROUP:
            return commands.refusal(group_of_commands, plugin.name) or commands.load(plugin.name).get_short_help_str()
        loaded = plugins.load(plugin.group, plugin.name)
    except PluginError as error:
        return f"BROKEN: {error}"
    return loaded.summary if isinstance(loaded, Recipe) else ""


def columns(rows: Iterable[Sequence[str]]) -> list[str]:
    """Formats rows as lines with aligned columns."""
    cells = [tuple(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
