"""Defines the command `rl import-config FILE`. Heavy imports happen only when the command runs."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("import-config", short_help="Translate a command or YAML file of SkyRL or verl.")
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="A new .yaml file. Default: print the translation.",
)
def import_config(file: Path, output: Path | None) -> int:
    """Translate FILE, a launch script or a YAML file of SkyRL or verl, into a file for `rl train`.

    A script is not run. Variables that it does not set are read from the environment: DATA_DIR=/data rl import-config
    run.sh. If a value would have to be computed by bash, the key is left out and listed.

    Lists the keys that have another name here, that have no effect, that were added, and that could not be translated.
    A script of SkyRL that does not set the KL loss or the engine gets SkyRL's defaults for them. If a key could not be
    translated, the exit code is 1, and a comment at the top of the new file lists the key.
    """
    from rl_core.errors import ConfigError, DataError
    from rl_examples.importing.reading import read
    from rl_examples.importing.translation import translate

    if output is not None and output.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"--output: got {output}; expected a name that ends in .yaml, as rl train requires")
    if output is not None and output.exists():
        raise DataError(f"{output} already exists: choose another file, or remove it first")
    translation = translate(read(file))
    if output is None:
        click.echo(translation.as_yaml(), nl=False)
    else:
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(translation.as_yaml(), encoding="utf-8")
        except OSError as error:
            raise DataError(f"--output: {output} cannot be written: {error.strerror}. Choose another file") from error
    for remark in translation.changed:
        click.echo(f"changed          {remark}", err=True)
    for default in translation.added:
        click.echo(f"added            {default}", err=True)
    for reason in translation.left:
        click.echo(f"not translated   {reason}", err=True)
    there = output or "FILE"
    click.echo(f"{len(translation.values)} keys; rl train {there} --dry-run checks them", err=True)
    return int(bool(translation.left))
