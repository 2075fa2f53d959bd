"""Plays an environment in the terminal: you are the policy.

consumes     lines of standard input, each a response
produces     the environment's observations, and its reward for each response
waits for    the next line (no deadline), the environment's answers (`timeout_s` each)
unblocked by the end of the input, Ctrl-C, an environment that is done
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from rl_core import plugins
from rl_core.config.layers import merge, nested, override_layer, plain
from rl_core.errors import ConfigError, DataError, DeadlineError, Mistakes, RLError, nearest, raised_at
from rl_core.interfaces import (
    Action,
    Environment,
    StepResult,
    require_awaitable,
    require_messages,
    require_observed_messages,
    require_observed_text,
    require_step_result,
    require_tools,
)

_OPTIONS = "environment.options"
_REWARDS = ("environment.reward_functions", "environment.reward_weights")
"""Keys whose values the environment `reward_functions` gets as options. A single value means a list with this value."""
_BLOCKED_S = 1.0
"""After its deadline, a call has this many seconds to react to its cancellation before its thread is interrupted."""


class _Blocked(KeyboardInterrupt):
    """A call to the environment blocks. An `except Exception` in the environment or in asyncio does not catch this
    exception."""


class EnvironmentRaised(RLError, RuntimeError):
    """The environment raised an exception; in a training run, its sample would fail."""


def row_of(row: str | None, data: Path | None, number: int) -> dict[str, Any]:
    """Returns the row to play: parsed from the JSON text `row`, or else row `number` of the file `data`.

    Raises:
        ConfigError: both or neither of `row` and `data` are given.
        DataError: the file has too few rows or cannot be read, or `row` is not a JSON object with a prompt.
    """
    if row is not None and data is not None:
        raise ConfigError(f"got both --row and --data {data}; pass only one of them")
    if row is None and data is None:
        raise ConfigError("name the row to play: pass either --data FILE --number N or --row '{\"prompt\": …}'")
    from rl_core.trainer.before.data import checked_row, read_rows

    if data is not None:
        rows = read_rows([data], key="--data")
        if number > len(rows):
            raise DataError(f"--number: got {number}, but {data} has {len(rows)} rows")
        return dict(rows[number - 1].row)
    try:
        found = json.loads(str(row))
    except ValueError as error:
        raise DataError(f"--row: {row!r:.80} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise DataError(f'--row: got {row!r:.80}; expected a JSON object, such as {{"prompt": "2+2="}}')
    return dict(checked_row(found, "--row").row)


def options_of(overrides: Sequence[str]) -> dict[str, Any]:
    """Parses arguments such as `environment.options.NAME=VALUE` as a run does, into a mapping from option to value. The
    keys of reward functions are options too. Raises ConfigError for any other key and for invalid YAML."""
    for word in overrides:
        key, equals, _ = word.partition("=")
        if not equals or not (key in (*_REWARDS, _OPTIONS) or key.removeprefix(f"{_OPTIONS}.") not in ("", key)):
            raise ConfigError(
                f"{word!r}: without --with, only {_OPTIONS}.NAME=VALUE and the keys of reward functions are allowed; "
                f"other keys need --with.{nearest(key, (*_REWARDS, _OPTIONS))}"
            )
    mistakes = Mistakes()
    given = merge([override_layer(overrides, mistakes)])
    mistakes.raise_found()
    found: dict[str, Any] = plain(nested(given))["environment"] if given else {}
    options = found.pop("options", None)
    if not isinstance(options, dict | None):
        raise ConfigError(f"got {options!r:.80}; expected a mapping, such as {{NAME: VALUE}}", key=_OPTIONS)
    listed = {name: value if isinstance(value, list | None) else [value] for name, value in found.items()}
    return {**(options or {}), **listed}


def play_by_hand(name: str, row: Mapping[str, Any], options: Mapping[str, Any], *, timeout_s: float) -> int:
    """Plays one episode; returns the exit code.

    Raises:
        PluginError: there is no such environment.
        ConfigError: the environment refuses the options.
        DataError: the row is invalid, or the environment returned an invalid prompt, observation or result.
        EnvironmentRaised: the environment raised an exception.
        DeadlineError: the environment did not answer within `timeout_s`.
    """
    factory: type[Environment] = plugins.load("rl_core.environments", name)
    from rl_core.trainer.before.environment_checks import gather_unplayable
    from rl_core.trainer.groups import DataRow

    mistakes = Mistakes()
    gather_unplayable(name, factory, options, [DataRow(row, "the row")], mistakes)
    mistakes.raise_found()
    with asyncio.Runner() as runner:

        def call(method: Callable[..., Any], *arguments: Any, is_async: bool = True) -> Any:
            # Not `runner.run`, which loses a Ctrl-C that arrives just after the coroutine has returned.
            with _interrupted(_name(method), timeout_s):
                return runner.get_loop().run_until_complete(_answer(method, arguments, timeout_s, is_async=is_async))

        environment: Environment = call(factory, row, options, is_async=False)
        try:
            prompt = call(environment.reset)
            _show_prompt(prompt, text_is="prompt")
            if environment.offers_tools:
                _show_tools(call(environment.tools))
            return _play(lambda action: call(environment.step, action), begins_with_text=isinstance(prompt, str))
        finally:
            call(environment.close)


def _play(step: Callable[[Action], Any], *, begins_with_text: bool) -> int:
    total, turns = 0.0, 0
    while True:
        response = _read_response()
        if response is None:
            click.echo(f"\nended by you after {_turns(turns)}: reward {total:g} so far")
            return 0
        turns += 1
        # There is no tokenizer here, so each character is a token, as in the conformance suite.
        result = require_step_result(step(Action(text=response, tokens=tuple(map(ord, response)), stop_reason="stop")))
        if not result.done:
            (require_observed_text if begins_with_text else require_observed_messages)(result.observation)
        total += result.reward
        _show_result(result)
        if result.done:
            click.echo(f"done after {_turns(turns)}: reward {total:g}")
            return 0


def _turns(count: int) -> str:
    return "1 turn" if count == 1 else f"{count} turns"


def _read_response() -> str | None:
    """Reads a response: one line, or several if all but the last end with a backslash. Returns None at the end of the
    input. Prints input that does not come from a terminal, because nothing else shows it. Raises DataError if the input
    is not text."""
    lines: list[str] = []
    click.echo(click.style("you", bold=True) + "          ", nl=False)
    while True:
        try:
            line = sys.stdin.readline()
        except UnicodeDecodeError as error:
            raise DataError(f"the input is not {sys.stdin.encoding} text: {error}") from error
        if not line:
            return "\n".join(lines) if lines else None
        line = line.rstrip("\r\n")
        if not sys.stdin.isatty():
            click.echo(f"{'':13}{line}" if lines else line)
        if not line.endswith("\\"):
            return "\n".join([*lines, line])
        lines.append(line.removesuffix("\\"))


@contextlib.contextmanager
def _interrupted(what: str, timeout_s: float) -> Iterator[None]:
    """Interrupts a call that blocks this thread, and raises DeadlineError: a blocked event loop cannot enforce the
    deadline. This thread must be the main thread."""
    is_over, has_returned = threading.Event(), False

    def interrupt() -> None:
        is_over.set()
        # A real signal also ends a blocking system call, as in `time.sleep`.
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def received(_: int, __: object) -> None:
        if not is_over.is_set():
            if before != signal.SIG_IGN:
                raise KeyboardInterrupt
        elif not has_returned:
            raise _Blocked

    timer = threading.Timer(min(timeout_s + _BLOCKED_S, threading.TIMEOUT_MAX), interrupt)
    timer.daemon = True
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, received)
    timer.start()
    try:
        try:
            yield
        finally:
            has_returned = True
    except _Blocked:
        raise DeadlineError(f"the environment's {what} did not answer within {timeout_s:g} s: it blocks") from None
    finally:
        timer.cancel()
        timer.join()  # after this, the timer sends no signal to the earlier handler
        signal.signal(signal.SIGINT, before)


def _name(method: Callable[..., Any]) -> str:
    return getattr(method, "__name__", str(method))


async def _answer(method: Callable[..., Any], arguments: Sequence[Any], timeout_s: float, *, is_async: bool) -> Any:
    what = _name(method)
    deadline = asyncio.timeout(timeout_s)
    try:
        async with deadline:
            found = method(*arguments)
            return await require_awaitable(found, what) if is_async else found
    except RLError:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, TimeoutError) and deadline.expired():
            raise DeadlineError(f"the environment's {what} did not answer within {timeout_s:g} s") from error
        raised = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise EnvironmentRaised(f"the environment's {what} raised {raised} {raised_at(error)}".rstrip()) from error


def _show_prompt(prompt: Any, *, text_is: str) -> None:
    if isinstance(prompt, str):
        _show(text_is, prompt)
        return
    for message in require_messages(prompt, "the environment's prompt"):
        calls = message.get("tool_calls")
        _show(message["role"], message.get("content") or (json.dumps(calls, default=str) if calls else ""))


def _show_tools(tools: Any) -> None:
    for offered in require_tools(tools):
        function = offered["function"]
        parameters = (function.get("parameters") or {}).get("properties", {})
        _show("tool", f"{function['name']}({', '.join(parameters)}): {function.get('description', '')}")


def _show_result(result: StepResult) -> None:
    if result.observation is not None:
        _show_prompt(result.observation, text_is="environment")
    metrics = "".join(f", {name} {value:g}" for name, value in result.metrics.items())
    click.secho(f"{'':12} reward {result.reward:g}{metrics}", dim=True)


def _show(who: str, text: str) -> None:
    for number, line in enumerate(text.splitlines() or [""]):
        click.echo(click.style(f"{who if not number else '':12} ", bold=True) + line)
