"""Commands of other packages: entry points of `rl_core.commands`, each a click command.

`rl --help` lists them with their packages, without importing them. Calling a command that is broken, or whose name
several packages use, is an error. Built-in commands cannot be replaced.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import click

from rl_core.errors import PluginError

GROUP = "rl_core.commands"


class CommandGroup(click.Group):
    """The built-in commands, followed by those of packages."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*super().list_commands(ctx), *(name for name in _installed() if name not in self.commands)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        found = super().get_command(ctx, cmd_name)
        if found is None and cmd_name in _installed():
            return _PackagedCommand(cmd_name, _installed()[cmd_name])
        return found

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_epilog(ctx, formatter)
        for name in _installed():
            if reason := refusal(self, name):
                formatter.write_paragraph()
                formatter.write_text(reason)


class _PackagedCommand(click.Command):
    """Placeholder for a command that is imported when it is called."""

    def __init__(self, name: str, found: tuple[EntryPoint, ...]) -> None:
        super().__init__(name, short_help=f"(of {_packages(found)})")
        self._found = found

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Imports the command, and returns its context. Raises PluginError if the command cannot be imported or is not
        a click command."""
        return load(str(self.name), self._found).make_context(info_name, args, parent, **extra)


def load(name: str, found: tuple[EntryPoint, ...] | None = None) -> click.Command:
    """Imports the command `name`. Raises PluginError if no package or several packages provide it, if it cannot be
    imported, or if it is not a click command."""
    found = _installed().get(name, ()) if found is None else found
    if len(found) != 1:
        raise PluginError(f"rl {name}: provided by {_packages(found) or 'no package'}; expected exactly one package")
    where = f"rl {name}: the command of {_packages(found)} ({found[0].value})"
    try:
        command = found[0].load()
    except (Exception, SystemExit) as error:
        raise PluginError(f"{where} could not be imported: {type(error).__name__}: {error}") from error
    if not isinstance(command, click.Command):
        raise PluginError(f"{where} is of type {type(command).__name__}; expected a click command")
    return command


def refusal(group: click.Group, name: str) -> str | None:
    """The message for a package's command `name` that cannot be called because `rl` has a built-in command of that
    name. None if the package's command can be called."""
    if name not in group.commands:
        return None
    return (
        f"{name!r} of {_packages(_installed()[name])} is refused: `rl {name}` is built in. The package must choose "
        "another name for its command."
    )


def _packages(found: tuple[EntryPoint, ...]) -> str:
    return " and ".join(f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.value for entry in found)


@cache
def _installed() -> dict[str, tuple[EntryPoint, ...]]:
    """Name → entry points, in alphabetical order of the names. A name has several entry points if several packages use
    it."""
    found: dict[str, tuple[EntryPoint, ...]] = {}
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        found[entry.name] = (*found.get(entry.name, ()), entry)
    return found
