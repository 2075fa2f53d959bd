"""`rl journal`: how many requests a run made."""

from __future__ import annotations

from pathlib import Path

import click

from rl_core.errors import DataError


@click.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--name", default="requests.jsonl", help="The engine's key `journal`.")
def journal(run_dir: Path, name: str) -> None:
    """Count the requests of a run."""
    if not (run_dir / name).exists():
        raise DataError(f"{run_dir / name}: there is no journal; was the run's engine `journal`?")
    click.echo(f"{len((run_dir / name).read_text().splitlines())} requests")
