"""The environment `verifiers`: plays environments of verifiers 0.4 by their name, unchanged, in a process of their own.
Needs the extra `verifiers`.

Data:      python -m rl_environments.verifiers ENV --count 2000 --output train.parquet; `--skip` for held-out rows
Row:       `prompt` (messages), and `task`, the data of the task as JSON text
Options:   `env` (the package that exports the taskset, e.g. `textarena`), `config` (fields of its EnvConfig, e.g.
           `{taskset: {game: Wordle-v0}, player: {max_turns: 6}}`), `python` (an interpreter that has verifiers and the
           environment's package; by default this one), `call_format` (as in tool environments)
Reward:    the sum of the weighted rewards of the policy's trace, at the end of the episode
Metrics:   each reward's score and each metric of the trace, and `accuracy` (the reward) if none has this name

Tasks, rewards, metrics, stops, toolsets and environments of several turns run in verifiers; the policy's responses are
sampled here. Without a harness of its own, an environment is played with verifiers' `null` (a chat with the task's
tools) and the runtime `subprocess`, so its hooks run on this machine, unconfined.

Refused before the run: several agents that play the policy, an agent's own sampling parameters, token limits or
retries, tasks that need a container (unless `config` chooses one), hooks that replace responses, and tasks without a
prompt. A sample fails if a request has images, changes earlier messages or starts a second conversation, or if the
episode ends with an error. Set `generator.max_turns` to the environment's number of turns or more.
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import itertools
import json
import math
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rl_core.errors import ConfigError, DataError, GenerationError, install
from rl_core.interfaces import Action, Environment, Prompt, Row, StepResult, ToolSchema
from rl_environments.options import key_of, own_options, text
from rl_environments.tools.call_formats import MARKED, Call, format_of_example, format_of_name

_OPTIONS = ("env", "config", "python", "call_format")
_PROGRAM = Path(__file__).with_name("verifiers_process.py")
_START_S = 300.0
"""Deadline of a check, and of making rows, which includes the import of verifiers (7 s on a quiet machine)."""

_END_S = 30.0


class VerifiersEnvironment(Environment):
    """See the module."""

    offers_tools = True

    def __init__(self, row: Row, options: Mapping[str, Any]) -> None:
        own = own_options(options, "verifiers", _OPTIONS)
        self._prompt, self._task = row["prompt"], _task_of(row)
        self._format = format_of_name(own["call_format"], key_of(own, "call_format")) if "call_format" in own else None
        self._python, self._config = _python(own), _config(own)
        self._episode: _Episode | None = None
        self._messages: list[dict[str, Any]] = []
        self._tools: list[dict[str, Any]] = []
        self._num_turns = 0

    @classmethod
    def require_options(cls, options: Mapping[str, Any]) -> None:
        """See `Environment.require_options`. Loads the environment in a process that ends at once."""
        own = own_options(options, "verifiers", _OPTIONS)
        if "call_format" in own:
            format_of_name(own["call_format"], key_of(own, "call_format"))
        _require_playable(_python(own), json.dumps(_config(own)), key_of(own, "env"))

    @classmethod
    def require_row(cls, row: Row) -> None:
        """See `Environment.require_row`."""
        if isinstance(row["prompt"], str):
            raise DataError(f"prompt: got text, {row['prompt']!r:.80}; environments of verifiers start from messages")
        _task_of(row)

    async def reset(self) -> Prompt:
        """See `Environment.reset`."""
        self._episode = _process(self._python, json.dumps(self._config)).start(self._task)
        asked = await self._next()
        if "messages" not in asked:
            raise GenerationError("the environment of verifiers ended before the policy's first turn")
        self._messages, self._tools = asked["messages"], asked["tools"]
        prompt = [_message(message) for message in self._messages]
        if prompt != [_message(message) for message in self._prompt]:
            raise DataError(
                f"prompt: the row has {self._prompt!r:.200}, but the environment of verifiers begins with "
                f"{prompt!r:.200}; make the data again with the same config (python -m rl_environments.verifiers)"
            )
        return prompt

    async def tools(self) -> Sequence[ToolSchema]:
        """See `Environment.tools`."""
        return self._tools

    async def step(self, action: Action) -> StepResult:
        """See `Environment.step`.

        Raises:
            GenerationError: the episode failed in verifiers.
            DataError: a request cannot be carried here.
        """
        reply = self._reply(action)
        assert self._episode is not None, "reset was called"
        self._episode.send({"reply": reply})
        self._num_turns += 1
        answer = await self._next()
        if "messages" not in answer:
            reward = answer["reward"]
            if not math.isfinite(reward):
                raise GenerationError(f"the environment of verifiers gave the reward {reward}")
            metrics = {name: float(value) for name, value in answer["metrics"].items() if math.isfinite(value)}
            return StepResult(reward=float(reward), done=True, metrics={"accuracy": float(reward), **metrics})
        known, (said, *new) = len(self._messages), (answer["messages"][len(self._messages) :] or [{}])
        if answer["messages"][:known] != self._messages or not _is_said(said, reply) or answer["tools"] != self._tools:
            raise DataError(
                "the environment of verifiers changed earlier messages or tools, so its request does not continue the "
                "policy's tokens; expected the same messages and the policy's response, got "
                f"{answer['messages']!r:.400}"
            )
        self._messages = answer["messages"]
        observation = [_message(message) for message in new]
        if any(message["role"] == "assistant" for message in observation):
            raise DataError("the environment of verifiers wrote a message of the assistant, which was not sampled")
        return StepResult(reward=0.0, done=False, observation=observation)

    async def close(self) -> None:
        """See `Environment.close`."""
        if self._episode is not None:
            self._episode.close()

    async def _next(self) -> Mapping[str, Any]:
        assert self._episode is not None, "reset was called"
        answer = await self._episode.answers.get()
        if "error" in answer:
            raise GenerationError(f"the environment of verifiers failed: {answer['error']}")
        return answer

    def _reply(self, action: Action) -> dict[str, Any]:
        """The response as verifiers' policy gives it. A call that cannot be read stays text, as in an inference
        server."""
        answer, calls = action.answer.strip(), []
        if self._tools:
            example = action.example_call
            chosen = self._format or (MARKED if example is None else format_of_example(example))
            calls = [call for call in chosen.read(action.answer) if isinstance(call, Call)]
        if calls:
            answer = answer.partition("<tool_call>")[0].strip() if "<tool_call>" in answer else ""
        finish = "length" if action.stop_reason == "length" else "tool_calls" if calls else "stop"
        named = [
            {
                "id": f"call_{self._num_turns}_{at}",
                "name": call.name,
                "arguments": json.dumps(_arguments(call, self._tools)),
            }
            for at, call in enumerate(calls)
        ]
        return {"content": answer, "tool_calls": named, "finish": finish}


def _arguments(call: Call, tools: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The call's arguments; those that a format gives as text are read as JSON where the schema expects no text."""
    if not call.is_text:
        return call.arguments
    functions = [tool["function"] for tool in tools if tool["function"]["name"] == call.name]
    types = functions[0].get("parameters", {}).get("properties", {}) if functions else {}

    def read(name: str, value: Any) -> Any:
        if types.get(name, {}).get("type") == "string":
            return value
        try:
            return json.loads(value)
        except ValueError:
            return value

    return {name: read(name, value) for name, value in call.arguments.items()}


def _is_said(message: Mapping[str, Any], reply: Mapping[str, Any]) -> bool:
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or []]
    expected = [(call["name"], call["arguments"]) for call in reply["tool_calls"]]
    said = (message.get("content") or "").strip()
    return (message.get("role"), said, calls) == ("assistant", reply["content"], expected)


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message in the form that a chat template takes. Raises DataError for content other than text."""
    content = message["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    if any(part["type"] != "text" for part in parts):
        kinds = ", ".join(sorted({part["type"] for part in parts}))
        raise DataError(f"the environment of verifiers shows the policy {kinds}; only text can be carried here")
    name = {"name": message["name"]} if message.get("name") else {}
    return {"role": message["role"], "content": "\n".join(part["text"] for part in parts), **name}


def _task_of(row: Row) -> dict[str, Any]:
    try:
        task = json.loads(row["task"])
    except (KeyError, TypeError, ValueError):
        task = None
    if not isinstance(task, dict):
        raise DataError(
            f"task: got {row.get('task')!r:.80}; expected the task's data as JSON text, as python -m "
            "rl_environments.verifiers writes it"
        )
    return task


def _config(options: Mapping[str, Any]) -> dict[str, Any]:
    """verifiers' configuration of the environment that the options name."""
    name, given, key = text(options, "env"), options.get("config") or {}, key_of(options, "config")
    taskset = given.get("taskset", {}) if isinstance(given, Mapping) else None
    if not isinstance(given, Mapping) or not isinstance(taskset, Mapping):
        raise ConfigError(
            f"got {given!r:.80}; expected fields of verifiers' EnvConfig, such as {{taskset: …}}", key=key
        )
    if "id" in taskset:
        raise ConfigError(f"set it with {key_of(options, 'env')}", key=f"{key}.taskset.id")
    return {**given, "taskset": {**taskset, "id": name}}


def _python(options: Mapping[str, Any]) -> str:
    if "python" in options:
        return text(options, "python")
    if find_spec("verifiers") is None:
        raise ConfigError(
            f"verifiers is not installed: {install('rl-environments[verifiers]')}, or set {key_of(options, 'python')} "
            "to an interpreter that has it"
        )
    return sys.executable


def _command(python: str, arguments: Mapping[str, Any]) -> list[str]:
    # -P: the program's own folder, with this module of the same name, must not hide the package verifiers.
    return [python, "-P", str(_PROGRAM), json.dumps(arguments)]


@lru_cache
def _require_playable(python: str, config: str, key: str) -> None:
    _playable(python, {"mode": "check", "config": json.loads(config)}, key)


def _playable(python: str, arguments: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """The answers of a process that ends by itself. Raises ConfigError if verifiers cannot load the environment, or if
    it cannot be carried here."""
    try:
        ended = subprocess.run(_command(python, arguments), capture_output=True, timeout=_START_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{python} cannot load environments of verifiers: {error}", key=key) from error
    answers = [json.loads(line) for line in ended.stdout.splitlines()]
    refused = [answer["refused"] for answer in answers if "refused" in answer]
    if ended.returncode != 0:
        refused = [f"exit code {ended.returncode}: {ended.stderr.decode(errors='replace').strip()[-500:]}"]
    if refused:
        raise ConfigError(f"{arguments['config']['taskset']['id']!r} cannot be played: {refused[0]}", key=key)
    return answers


class _Episode:
    """One episode in the process, seen from the event loop that started it."""

    def __init__(self, process: _Process, name: str) -> None:
        self._process, self._name = process, name
        self._loop = asyncio.get_running_loop()
        self.answers: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    def send(self, record: Mapping[str, Any]) -> None:
        self._process.send({"id": self._name, **record})

    def deliver(self, answer: dict[str, Any]) -> None:
        """Called by the thread that reads the process's answers."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.answers.put_nowait, answer)

    def close(self) -> None:
        if self._process.episodes.pop(self._name, None) is not None:
            self._process.send({"id": self._name, "cancel": True})


class _Process:
    """The process that plays all episodes of one configuration, and the thread that reads its answers."""

    def __init__(self, python: str, config: str) -> None:
        arguments = {"mode": "serve", "config": json.loads(config)}
        self._process = subprocess.Popen(_command(python, arguments), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self.episodes: dict[str, _Episode] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def start(self, task: Mapping[str, Any]) -> _Episode:
        name = str(next(self._numbers))
        episode = self.episodes[name] = _Episode(self, name)
        episode.send({"task": task})
        return episode

    def send(self, record: Mapping[str, Any]) -> None:
        """Sends a record, unless the process has ended; then `_read` tells its episodes."""
        assert self._process.stdin is not None
        with self._lock:
            try:
                self._process.stdin.write(json.dumps(record).encode() + b"\n")
                self._process.stdin.flush()
            except (BrokenPipeError, ValueError):  # a ValueError: `_read` has closed the pipe
                if (episode := self.episodes.get(record["id"])) is not None:
                    episode.deliver({"error": "its process has ended"})

    def end(self) -> None:
        """Lets the process end its tool servers and itself; kills it if that takes too long."""
        assert self._process.stdin is not None
        with self._lock, suppress(BrokenPipeError):
            self._process.stdin.close()
        self._reader.join(_END_S)
        if self._reader.is_alive():
            self._process.kill()
            self._reader.join()

    def _read(self) -> None:
        assert self._process.stdout is not None
        why = "its process ended"
        for line in self._process.stdout:
            answer = json.loads(line)
            why = answer.get("refused", why)
            episode = self.episodes.get(answer.get("id", ""))
            if episode is not None:
                if "messages" not in answer:
                    self.episodes.pop(answer["id"], None)
                episode.deliver(answer)
        with self._lock, suppress(BrokenPipeError):
            self._process.__exit__(None, None, None)  # closes the pipes and waits
        for episode in list(self.episodes.values()):
            episode.deliver({"error": f"{why} (exit code {self._process.returncode})"})


_processes: dict[tuple[int, str, str], _Process] = {}
_starting = threading.Lock()


def _process(python: str, config: str) -> _Process:
    """The process for this configuration; starts it if it does not run."""
    key = (os.getpid(), python, config)  # a forked process starts its own
    with _starting:
        if key not in _processes or _processes[key].has_ended:
            _processes[key] = _Process(python, config)
        return _processes[key]


@atexit.register
def close_processes() -> None:
    """Ends this process's processes of verifiers; the next episode starts new ones."""
    with _starting:
        for key in [key for key in _processes if key[0] == os.getpid()]:
            _processes.pop(key).end()


def rows_of(options: Mapping[str, Any], count: int, *, skip: int = 0) -> list[dict[str, Any]]:
    """Returns rows of an environment's first tasks.

    Args:
        options: those of the environment.
        count: number of rows; fewer if the environment has fewer tasks.
        skip: number of tasks to leave out at the beginning.

    Raises:
        ConfigError: the environment cannot be played, or has no such tasks.
    """
    arguments = {"mode": "rows", "config": _config(options), "skip": skip, "count": count}
    rows = [answer["row"] for answer in _playable(_python(options), arguments, key_of(options, "env"))]
    return [{"prompt": [_message(each) for each in row["prompt"]], "task": json.dumps(row["task"])} for row in rows]


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes an environment's tasks as rows of a Parquet file."""
    import pyarrow
    import pyarrow.parquet

    parser = argparse.ArgumentParser(prog="python -m rl_environments.verifiers", description=main.__doc__)
    parser.add_argument("env")
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--skip", type=int, default=0, help="tasks to leave out at the beginning")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--config", type=json.loads, default={}, metavar="JSON", help="environment.options.config")
    parser.add_argument("--python", help="environment.options.python")
    given = parser.parse_args(arguments)
    python = {} if given.python is None else {"python": given.python}
    try:
        rows = rows_of({"env": given.env, "config": given.config, **python}, given.count, skip=given.skip)
        given.output.parent.mkdir(parents=True, exist_ok=True)
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), given.output)
    except (ConfigError, DataError, OSError) as error:  # an OSError names the file that cannot be written
        parser.error(str(error))
    print(f"{len(rows)} rows of {given.env}: {given.output}")


if __name__ == "__main__":
    main()
