"""The commands and their options. An `RLError` ends a command with one message, and with a traceback only on request.

Exit codes: 0 success, 1 failure, 2 a mistake in the command, configuration, plug-in or data, 130 interrupted.
"""

from __future__ import annotations

import atexit
import inspect
import io
import logging
import os
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click

from rl_core.cli.commands import CommandGroup
from rl_core.cli.messages import discard_unwritten, say
from rl_core.errors import CheckpointError, ConfigError, DataError, PluginError, RLError, StorageError

RANK_THREAD = "rl-rank-"
"""The threads of `rl_core.workers.inline` have names with this prefix. The constant is repeated here, because that
module imports torch."""

_AS_ASKED = (ConfigError, PluginError, DataError)
"""Errors after which the same command would fail again, because the user must change something."""
_NOT_RESUMED = (*_AS_ASKED, CheckpointError)
"""Errors after which resuming would fail too, except `StorageError`, a kind of `CheckpointError`."""

_Command = TypeVar("_Command", bound=Callable[..., Any])
_SOURCE_HELP = """RECIPE is a recipe's name (see `rl plugins`), a .yaml file, or package.module:recipe.
key.path=value arguments after it change single keys; docs/configuration.md lists all keys."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line and ends the process."""
    # Make modules in the current directory importable (trainer.callbacks=my_module:Class). The directory comes last, so
    # that these modules hide no others.
    sys.path.append(str(_current_directory()))
    # transformers and datasets read these when they are imported. Their progress bars would mix with a run's output.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    _escape_unwritable_characters()
    settings: dict[str, Any] = {"traceback": bool(os.environ.get("RL_DEBUG"))}
    with warnings.catch_warnings():
        _show_config_warnings_plainly()
        status = _status(arguments, settings)
    discard_unwritten()
    if (status == 130 and _has_busy_rank()) or _has_lost_ray():
        _end_without_finalising(status)
    sys.exit(status)


def _current_directory() -> Path:
    try:
        return Path.cwd()
    except OSError as error:
        say(f"error: the current directory cannot be used: {error.strerror}; change to another directory")
        sys.exit(2)


def _escape_unwritable_characters() -> None:
    """Makes the standard streams write an escape such as `\\u2192` for a character that their encoding lacks. By
    default, standard output raises an error, which would end a command whose work is done."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _has_busy_rank() -> bool:
    return any(thread.daemon and thread.name.startswith(RANK_THREAD) for thread in threading.enumerate())


def _has_lost_ray() -> bool:
    module = sys.modules.get("rl_core.workers.ray_cluster")
    return module is not None and module.ray_session.lost is not None


def _end_without_finalising(status: int) -> NoReturn:
    """Ends the process without finalising the interpreter. Finalisation would stop a busy thread inside the C++ code of
    torch or Ray, which aborts the process."""
    atexit._run_exitfuncs()
    discard_unwritten()
    os._exit(status)


def _status(arguments: Sequence[str] | None, settings: dict[str, Any]) -> int:
    try:
        result = rl.main(arguments, prog_name="rl", standalone_mode=False, obj=settings)
        return result if isinstance(result, int) else 0  # a package's command may return anything
    except click.ClickException as error:
        error.show()
        if isinstance(error, click.NoSuchOption) and "." in error.option_name:
            key = error.option_name.lstrip("-")
            say(f"A configuration key has no dashes: write {key}=value after the recipe.")
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        say("interrupted")
        return 130
    except RLError as error:
        if settings["traceback"]:
            say(traceback.format_exc(), nl=False)
        else:
            say("error: ", fg="red", bold=True, nl=False)
            say(error)
        if "resume" in settings:
            say(settings["resume"])
        return 2 if isinstance(error, _AS_ASKED) else 1


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="rl-core", prog_name="rl")
def rl() -> None:
    """Reinforcement learning post-training for language models.

    Begin with `rl doctor`, then `rl train quickstart`.
    """


def _turn_traceback_on(context: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        context.obj["traceback"] = True


def _configured(command: _Command) -> _Command:
    """Adds the arguments and options that all commands with a configuration have."""
    show = "Show the traceback of an error; so does RL_DEBUG=1."
    command = click.option("--traceback", is_flag=True, expose_value=False, callback=_turn_traceback_on, help=show)(
        command
    )
    command = click.option("--tiny", is_flag=True, help="Use the recipe's tiny variant: a minute on two CPU cores.")(
        command
    )
    command = click.argument("overrides", nargs=-1, metavar="[KEY.PATH=VALUE]...")(command)
    command = click.argument("source", metavar="RECIPE")(command)
    command.__doc__ = f"{inspect.getdoc(command)}\n\n{_SOURCE_HELP}"
    return command


@rl.command()
@_configured
@click.option("--dry-run", is_flag=True, help="Check everything that can be checked without starting anything.")
def train(source: str, overrides: tuple[str, ...], tiny: bool, dry_run: bool) -> int:
    """Train, or resume a run that was stopped."""
    from rl_core.cli import runs

    started = time.perf_counter()
    _log_to_stderr()
    loaded = runs.load(source, overrides, tiny)
    if dry_run:
        return runs.describe(loaded)
    try:
        return runs.train(loaded, started)
    except RLError as error:
        can_resume = isinstance(error, StorageError) or not isinstance(error, _NOT_RESUMED)
        if can_resume and runs.has_checkpoint(loaded):
            click.get_current_context().obj["resume"] = runs.resume_hint(loaded)
        raise


@rl.command("eval")
@_configured
def evaluate(source: str, overrides: tuple[str, ...], tiny: bool) -> int:
    """Evaluate the model on the held-out prompts.

    The model is that of the recipe, usually the one before training. For the trained model of a run, add
    trainer.policy.model.path=RUN/model.
    """
    from rl_core.cli import runs

    _log_to_stderr()
    return runs.evaluate(runs.load(source, overrides, tiny))


@rl.command()
@_configured
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    help="A new .jsonl file, one sample per line. Missing directories are created.",
)
@click.option("--limit", type=click.IntRange(min=1), help="Use only the first N prompts.")
def generate(source: str, overrides: tuple[str, ...], tiny: bool, output: Path, limit: int | None) -> int:
    """Write sampled responses and their rewards to a file."""
    from rl_core.cli import runs

    _log_to_stderr()
    return runs.generate(runs.load(source, overrides, tiny), output, limit)


@rl.command("config")
@_configured
@click.option("--yaml", "as_yaml", is_flag=True, help="Print YAML that `rl train` can read.")
def show_config(source: str, overrides: tuple[str, ...], tiny: bool, as_yaml: bool) -> None:
    """Show every value and where it comes from."""
    from rl_core.cli import listing, runs

    listing.show_config(runs.load(source, overrides, tiny), as_yaml=as_yaml)


@rl.command(short_help="Show each rank's part of the model, and its memory.")
@_configured
@click.option(
    "--gpu-memory",
    type=click.FloatRange(min=0, min_open=True),
    help="Memory of one GPU in GiB. Fail if a phase needs more.",
)
@click.option(
    "--host-memory",
    type=click.FloatRange(min=0, min_open=True),
    help="CPU memory of one machine in GiB. Fail if a phase needs more.",
)
@click.option("--context", type=click.IntRange(min=1), help="Also plan longer sequences, up to N tokens.")
def plan(
    source: str,
    overrides: tuple[str, ...],
    tiny: bool,
    gpu_memory: float | None,
    host_memory: float | None,
    context: int | None,
) -> None:
    """Show each rank's part of the model, and the memory that each phase of a run needs, without starting the run."""
    from rl_core.cli import planning, runs

    loaded = runs.load(source, overrides, tiny)
    planning.show_plan(loaded, gpu_memory_gib=gpu_memory, host_memory_gib=host_memory, context=context)


@rl.command(short_help="Measure one rank's step at full size.")
@_configured
def rehearse(source: str, overrides: tuple[str, ...], tiny: bool) -> None:
    """Run one rank's step of the full-size models on tensors without data. Show its memory in GiB, compared with
    `rl plan`, and its number of operations. Needs neither GPU nor weights."""
    from rl_core.cli import rehearsing, runs

    rehearsing.show_rehearsal(runs.load(source, overrides, tiny))


@rl.command(short_help="Upload a run's model to the hub.")
@click.argument("run", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("name")
@click.option("--public", is_flag=True, help="Create the repository as public. Default: private.")
def push(run: Path, name: str, public: bool) -> None:
    """Upload the model in RUN (a run directory or a model directory) to the Hugging Face hub as NAME, e.g.
    me/my-model."""
    from rl_core.cli.pushing import push_run

    _log_to_stderr()
    push_run(run, name, is_private=not public)


@rl.command("plugins")
def show_plugins() -> None:
    """List the installed plug-ins and the broken ones."""
    from rl_core.cli import listing

    listing.show_plugins(rl)


@rl.command()
@click.option("--run-dir", type=click.Path(path_type=Path, file_okay=False), default=Path("runs"), show_default=True)
def doctor(run_dir: Path) -> int:
    """Show what is missing and how to install it."""
    from rl_core.cli.doctor import examine

    return examine(run_dir)


class _StderrHandler(logging.Handler):
    """Writes records to the current `sys.stderr`. The logging module's own handler would keep the original stream, but
    a live display replaces `sys.stderr` while it runs."""

    def emit(self, record: logging.LogRecord) -> None:
        prefix = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        say(prefix + self.format(record))


def _log_to_stderr() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[_StderrHandler()])
    for package in (
        "rl_core",
        "rl_fsdp",
        "rl_deepspeed",
        "rl_megatron",
        "rl_rollout",
        "rl_transformers",
        "rl_environments",
        "rl_examples",
    ):
        logging.getLogger(package).setLevel(logging.INFO)


def _show_config_warnings_plainly() -> None:
    """Makes Python show every `ConfigWarning` once, as a single line that users can read. Other warnings do not
    change."""
    show_others, shown = warnings.showwarning, set[str]()

    def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if category.__name__ == "ConfigWarning":  # by name, so that `rl --help` need not import rl_core.config
            if str(message) not in shown:
                say(f"warning: {message}")
            shown.add(str(message))
        else:
            show_others(message, category, *place, **more)

    warnings.showwarning = show
    warnings.filterwarnings("always", module=r"rl_core\.(cli|config)\..*")
