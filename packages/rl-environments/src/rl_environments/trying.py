"""The command `rl try ENVIRONMENT`. Heavy imports happen only when it runs."""

from __future__ import annotations

import threading
from pathlib import Path

import click
from click.core import ParameterSource

_WITHOUT_RECIPE = {
    "row_text": "use data.val_data=[FILE] instead of --row",
    "data": "use data.val_data=[FILE] instead of --data",
    "number": "leave out --number; the first rows are played",
    "timeout_s": "use environment.timeout_s=SECONDS instead of --timeout-s",
}


def _require_deadline(_: click.Context, __: click.Parameter, seconds: float) -> float:
    if not seconds <= threading.TIMEOUT_MAX:  # true for NaN too
        raise click.BadParameter(f"got {seconds:g}; expected a number of seconds that a timer accepts, such as 86400")
    return seconds


@click.command("try", short_help="Play an environment by hand, or have a recipe's model play it.")
@click.argument("environment")
@click.argument("overrides", nargs=-1, metavar="[KEY.PATH=VALUE]...")
@click.option("--row", "row_text", help="The row to play, as JSON.")
@click.option("--data", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="A file of rows.")
@click.option("--number", type=click.IntRange(min=1), default=1, show_default=True, help="Which row of the file.")
@click.option("--with", "recipe", metavar="RECIPE", help="The recipe's model plays rows of the recipe's data.")
@click.option(
    "--timeout-s",
    type=click.FloatRange(min=0, min_open=True),
    callback=_require_deadline,
    default=300.0,
    show_default=True,
    help="Deadline of each call to the environment.",
)
@click.pass_context
def try_environment(
    context: click.Context,
    environment: str,
    overrides: tuple[str, ...],
    row_text: str | None,
    data: Path | None,
    number: int,
    recipe: str | None,
    timeout_s: float,
) -> int:
    """Play ENVIRONMENT, given as the name of an installed environment or as package.module:Class.

    By hand, you are the policy: a line of input is a response (end a line with \\ to continue it). Ctrl-D ends the
    episode. environment.options.NAME=VALUE sets an option. With --with, KEY.PATH=VALUE changes any key of the recipe.
    """
    if "=" in environment:
        raise click.UsageError(
            f"got {environment!r} where an environment is expected; write rl try ENVIRONMENT {environment}"
        )
    if recipe is not None:
        for name, instead in _WITHOUT_RECIPE.items():
            if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
                raise click.UsageError(f"--with plays the recipe's rows: {instead}")
        from rl_environments.trying_with_a_model import play_with

        return play_with(recipe, environment, overrides)
    from rl_environments.by_hand import options_of, play_by_hand, row_of

    return play_by_hand(environment, row_of(row_text, data, number), options_of(overrides), timeout_s=timeout_s)
