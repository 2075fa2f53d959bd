"""The process in which the environment `verifiers` plays its episodes. It needs only the standard library and
verifiers, so it can run in an interpreter of its own. The policy is a client of verifiers whose responses come over
stdin.

arguments   a JSON object: `mode` (`serve`, `check` or `rows`), `config` (verifiers' EnvConfig), `skip` and `count`
stdin       `{id, task}` starts an episode, `{id, reply}` answers the policy's turn, `{id, cancel}` ends the episode
stdout      first `{refused}` or `{ready}`, or in the mode `rows` `{row}` for each task; then
            `{id, messages, tools}`: the policy's turn; `{id, reward, metrics}`: the end; `{id, error}`
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.clients.train import serialize_completion
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.harnesses.null.harness import NullHarness
from verifiers.v1.harnesses.utils.launch import CHAT_PROGRAM_SOURCE
from verifiers.v1.interception import server as interception
from verifiers.v1.session import hook_boundary
from verifiers.v1.utils.loaders import default_harness_id, env_config_type

_HARNESS = "rl_chat"
_CHAT = compile(CHAT_PROGRAM_SOURCE, "verifiers' chat program", "exec")
_TOKEN_LIMITS = ("max_input_tokens", "max_output_tokens", "max_total_tokens")
_POLICY = vf.TrainClientConfig.model_validate({"base_url": "http://policy", "api_key_var": "RL_POLICY"})
_NO_RETRIES = vf.RetryConfig.model_validate({})


class Refused(Exception):
    """The environment cannot be played here."""


# --- one episode ------------------------------------------------------------------------------------------------------


class VerifiersEpisode:
    """One episode, and the answers that it waits for."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.trace_ids: list[str] = []
        """The conversations of the policy, in their order."""
        self.replied: asyncio.Future[Mapping[str, Any]] | None = None
        self.task: asyncio.Task[None] | None = None

    async def ask(self, messages: list[Any], tools: list[Any]) -> Mapping[str, Any]:
        """Returns the policy's response to a conversation."""
        self.replied = asyncio.get_running_loop().create_future()
        send({"id": self.name, "messages": messages, "tools": tools})
        return await self.replied


class Policy(vf.Client):
    """Answers the model's requests with the policy's responses."""

    def __init__(self) -> None:
        self.playing: dict[str, VerifiersEpisode] = {}
        """Trace id → episode."""

    async def get_response(
        self,
        dialect: Any,
        body: dict[str, Any],
        sampling: Any,
        session_id: str | None = None,
        turn: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> vf.Response:
        assert session_id is not None, "requests of rollouts have it"
        if not isinstance(dialect, ChatDialect):
            raise TypeError(f"the harness asks in the dialect {type(dialect).__name__}; expected chat completions")
        episode = self.playing[session_id]
        if session_id not in episode.trace_ids:
            episode.trace_ids.append(session_id)
        if len(episode.trace_ids) > 1:
            raise ValueError("the policy got a second conversation, but an episode here has one")
        reply = await episode.ask(body["messages"], body.get("tools") or [])
        calls = [vf.ToolCall(**call) for call in reply["tool_calls"]] or None
        response = vf.Response(
            id=f"{session_id}-{time.monotonic_ns()}",
            created=int(time.time()),
            model=body.get("model", ""),
            message=vf.AssistantMessage(content=reply["content"], tool_calls=calls),
            finish_reason=reply["finish"],
        )
        response.raw = serialize_completion(response, response.model)
        return response

    async def close(self) -> None:
        """Nothing is open."""


POLICY = Policy()


class ChatHarness(NullHarness):
    """verifiers' harness `null`, whose chat program runs in this process: verifiers would install a script with uv, and
    start a process for each segment."""

    async def setup(self, runtime: Any) -> None:
        """Nothing is installed."""

    async def launch(self, ctx: Any, trace: Any, runtime: Any, *args: Any, **kwargs: Any) -> Any:
        here: Any = _ProgramHere()
        return await super().launch(ctx, trace, here, *args, **kwargs)


class _ProgramHere:
    """The part of a runtime that starts the chat program."""

    async def write(self, path: str, data: bytes) -> None:
        Path(tempfile.gettempdir(), path).write_bytes(data)

    async def prepare_uv_script(self, *_: Any, **__: Any) -> list[str]:
        return []

    async def run_program(self, arguments: list[str], env: Mapping[str, str]) -> Any:
        key = "--initial-messages-file="
        there = [
            f"{key}{tempfile.gettempdir()}/{each.removeprefix(key)}" if each.startswith(key) else each
            for each in arguments
        ]
        program: dict[str, Any] = {"__name__": _HARNESS}
        exec(_CHAT, program)
        given, sys.argv = sys.argv, [_HARNESS, *there]
        try:
            parsed: argparse.Namespace = program["parse_args"]()
        finally:
            sys.argv = given
        program["parse_args"] = lambda: parsed
        try:
            await program["main"]()
        except SystemExit as error:
            return vf.ProgramResult(exit_code=int(error.code or 0), stdout="", stderr="the chat program exited")
        except Exception:
            return vf.ProgramResult(exit_code=1, stdout="", stderr=traceback.format_exc())
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


def install() -> None:
    """Makes verifiers find the harness, and ask the policy here."""
    module: Any = types.ModuleType(_HARNESS)
    module.ChatHarness, module.__all__ = ChatHarness, ["ChatHarness"]
    sys.modules[_HARNESS] = module
    # verifiers 0.4.0 makes clients only from its own configurations. Shown by tests/environments/test_verifiers.py.
    made = interception.resolve_client
    interception.resolve_client = lambda config: POLICY if config.api_key_var == _POLICY.api_key_var else made(config)


# --- the environment --------------------------------------------------------------------------------------------------


def loaded(given: Mapping[str, Any]) -> vf.Env:
    """The environment with the harness and the runtime of this process, where the configuration chooses no other.

    Raises:
        Refused: it needs something that cannot be carried here.
        Exception: verifiers refuses the configuration.
    """
    config = json.loads(json.dumps(given))
    name = config["taskset"]["id"]
    roles = agent_config_fields(env_config_type(name, config.get("id", "")).model_construct())
    for role, default in roles.items():
        chosen = config.setdefault(role, {})
        if "runtime" not in default.model_fields_set:
            chosen.setdefault("runtime", {"type": "subprocess"})
        harness = chosen.get("harness") or (default.harness and default.harness.model_dump())
        if harness is None and default_harness_id(name) == "bash":  # it has none of its own
            harness = {}
        if harness is not None and harness.get("id", "null") == "null":
            chosen["harness"] = {**harness, "id": _HARNESS}
    env = vf.load_environment(vf.resolve_env_config(config))
    _require_playable(env)
    return env


def _require_playable(env: vf.Env) -> None:
    roles = agent_config_fields(env.config)
    played = [role for role, agent in roles.items() if agent.client is None and agent.model is None]
    if len(played) != 1:
        raise Refused(
            f"the policy can play one agent; of {', '.join(roles)} it would play {', '.join(played) or 'none'}. Set "
            "<agent>.client and <agent>.model of all others"
        )
    role, agent = played[0], roles[played[0]]
    if agent.sampling is not None:
        raise Refused(f"{role}.sampling: got {agent.sampling}; set generator.sampling_params instead")
    for limit in _TOKEN_LIMITS:
        if getattr(agent, limit) is not None:
            raise Refused(f"{role}.{limit}: tokens are counted outside verifiers; set the keys of `generator` instead")
    if agent.retries != _NO_RETRIES or env.config.retries != _NO_RETRIES:
        raise Refused("retries: an episode is played once; a failed one is left out of training")
    task = type(env.taskset).task_type()
    if task.NEEDS_CONTAINER and agent.runtime.type == "subprocess":
        raise Refused(f"{task.__name__} needs a container; set {role}.runtime, such as {{type: docker}}")
    hidden = [name for name, field in task.data_type().model_fields.items() if field.exclude]
    if hidden:
        raise Refused(f"{task.data_type().__name__} leaves {', '.join(hidden)} out of its rows (exclude=True)")
    for kind in task.__mro__:
        for hook in vars(kind).values():
            if callable(hook) and hasattr(hook, "intercept") and hook_boundary(hook, allow_trace=False) is vf.Response:
                raise Refused(f"{hook.__name__} replaces responses of the policy, which are trained on as sampled")


# --- the protocol -----------------------------------------------------------------------------------------------------


def send(record: Mapping[str, Any]) -> None:
    _answers.write(json.dumps(record).encode() + b"\n")
    _answers.flush()


async def play(env: vf.Env, episode: VerifiersEpisode, data: Mapping[str, Any]) -> None:
    """Plays an episode and reports its end."""

    def remember(trace: Any) -> None:
        POLICY.playing[trace.id] = episode

    context = vf.ModelContext(model="policy", client=_POLICY)
    seen: list[str] = []
    try:
        kind = type(env.taskset).task_type()
        task = kind(kind.data_type().model_validate(data), env.config.taskset.task)
        (slot,) = env.slots(task)
        played = await env.run_slot(slot, context, on_trace=lambda trace: (seen.append(trace.id), remember(trace))[1])
        errors = [*played.errors, *(error for trace in played.traces for error in trace.errors)]
        if errors or not played.ok:
            raise Refused("; ".join(f"{error.type}: {error.message}" for error in errors) or "the episode failed")
        traces = [trace for trace in played.traces if trace.id in episode.trace_ids]
        if len(traces) != 1:
            raise Refused("the episode ended before the policy was asked")
        (trace,) = traces
        metrics = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
        metrics |= {name: value for name, value in trace.metrics.items() if value is not None}
        send({"id": episode.name, "reward": trace.reward, "metrics": metrics})
    except Exception as error:
        said = str(error) if isinstance(error, Refused) else f"{type(error).__name__}: {error}"
        send({"id": episode.name, "error": said})
    finally:
        for trace_id in seen:
            POLICY.playing.pop(trace_id, None)


async def serve(env: vf.Env) -> None:
    """Plays episodes until stdin ends."""
    reader = asyncio.StreamReader(limit=2**30)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    episodes: dict[str, VerifiersEpisode] = {}
    async with env.serving():
        send({"ready": True})
        while line := await reader.readline():
            record = json.loads(line)
            name = record["id"]
            if "task" in record:
                episode = episodes[name] = VerifiersEpisode(name)
                episode.task = asyncio.create_task(play(env, episode, record["task"]))
                episode.task.add_done_callback(lambda _, name=name: episodes.pop(name, None))
            elif name in episodes and "reply" in record:
                replied = episodes[name].replied
                if replied is not None and not replied.done():
                    replied.set_result(record["reply"])
            elif name in episodes and (task := episodes[name].task) is not None:
                task.cancel()
        playing = [episode.task for episode in episodes.values() if episode.task is not None]
        for task in playing:
            task.cancel()
        await asyncio.gather(*playing, return_exceptions=True)


def rows(env: vf.Env, skip: int, count: int) -> None:
    """Sends the first request and the data of each task."""
    for task in env.taskset.skip(skip).take(count):
        data = task.data
        if data.prompt is None:
            raise Refused(f"task {data.idx} has no prompt, because its environment opens the conversation")
        system = [] if data.system_prompt is None else [{"role": "system", "content": data.system_prompt}]
        said = data.prompt
        messages = (
            [{"role": "user", "content": said}] if isinstance(said, str) else [m.model_dump(mode="json") for m in said]
        )
        prompt = [{"role": m["role"], "content": m["content"]} for m in (*system, *messages)]
        send({"row": {"prompt": prompt, "task": data.model_dump(mode="json", exclude_none=True)}})


def main() -> None:
    """Reads the arguments; see the module."""
    given = json.loads(sys.argv[1])
    try:
        install()
        env = loaded(given["config"])
        if given["mode"] == "rows":
            rows(env, given["skip"], given["count"])
        elif given["mode"] == "check":
            send({"ready": True})
        else:
            asyncio.run(serve(env))
    except Exception as error:
        send({"refused": str(error) if isinstance(error, Refused) else f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    # What tasks print must not get between the answers.
    _answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    main()
