"""`rl journal`: counts the requests of a run."""

from __future__ import annotations

from pathlib import Path

import click

from rl_core.errors import DataError


@click.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--name", default="requests.jsonl", help="Name of the journal, as in the engine's key `journal`.")
def journal(run_dir: Path, name: str) -> None:
    """Count the requests of a run."""
    if not (run_dir / name).exists():
        raise DataError(f"{run_dir / name}: there is no journal; train with generator.inference_engine.backend=journal")
    click.echo(f"{len((run_dir / name).read_text().splitlines())} requests")
