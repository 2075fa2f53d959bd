"""Implements `InferenceClient` by sending requests to vLLM servers over HTTP.

consumes     requests of the generator; pauses and weight versions of the trainer
produces     completions: exactly one answer per request, from whichever server finished it
waits for    a server in service, then for its answer; each up to the request's deadline
unblocked by the answer, by the supervisor giving the server up (the request moves on), or by the deadline
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from rl_core.errors import DeadlineError, GenerationError, RLError, WeightSyncError
from rl_core.interfaces import (
    Completion,
    EngineHealth,
    GenerateRequest,
    InferenceClient,
    Manifest,
    Message,
    PauseMode,
    Rendezvous,
    ServedModel,
)
from rl_rollout.vllm import wire
from rl_rollout.vllm.connection import Connection, LostUnderRequest, ServerGone
from rl_rollout.vllm.engine_arguments import BASE_MODEL_NAME
from rl_rollout.vllm.pool import MAX_LOST, Member, Pool, while_up
from rl_rollout.vllm.router import Router

logger = logging.getLogger(__name__)

_FIRST_BACKOFF_S, _MAX_BACKOFF_S = 0.05, 2.0
_SHORT_S = 30.0
"""Deadline of calls that compute nothing. Servers also get this long to end their part of a failed weight sync."""
_VERDICT_S = 10.0
"""Longest wait for the supervisor to give up a server whose engine has died. The supervisor notices the death only when
the engine's core process ends, which can be seconds after a worker died."""
_UPDATE_SHARE = 0.5
"""Fraction of the request deadline that a weight update may take. Requests wait during an update, so a hanging update
must time out before they do."""
_TOKENIZE_CONCURRENCY = 32
_PROBE = (0, 1, 2, 3)
"""Token ids that every vocabulary has."""


class RemoteInferenceClient(InferenceClient):
    """Sends each request to a server of a pool. Call all methods on the same event loop."""

    can_sleep = True
    can_score = True
    can_prepare_weights = True

    def __init__(
        self,
        pool: Pool,
        *,
        timeout_s: float,
        start_timeout_s: float = 600.0,
        on_failure: Callable[[Member], None] = lambda member: None,
        on_close: Callable[[], Awaitable[None]] | None = None,
        served_model_name: str = "",
        router: Router | None = None,
    ) -> None:
        """
        Args:
            pool: the servers with their states; its supervisor adds and removes them.
            timeout_s: seconds until a request fails; a weight update may take half of this time.
            start_timeout_s: seconds that the restart of a server may take.
            on_failure: called with a server that did not answer, or that failed a weight update, so that it is checked
                at once.
            on_close: called by `close`; ends the router, the supervisor and the servers.
            served_model_name: the model's name in requests to vLLM's own routes.
            router: the proxy through which outside agents reach the pool; it need not listen yet.
        """
        self._pool = pool
        self._timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s
        self._on_failure = on_failure
        self._on_close = on_close
        self._model = served_model_name
        self._router = router
        self._where: dict[str, Member] = {}
        self._tokenizing = asyncio.Semaphore(_TOKENIZE_CONCURRENCY)
        self._left_before = 0
        """Number of servers that had been given up when the latest update began."""
        self._lost: list[str] = []
        """Calls that have lost their connection since the latest update began."""
        self._ending: set[asyncio.Task[None]] = set()
        """Tasks that wait for servers to end their part of a failed update."""

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary: token ids are smaller."""
        return self._pool.facts.vocab_size

    @property
    def router_url(self) -> str | None:
        """URL at which outside agents and environments reach the servers; None if no router listens."""
        return None if self._router is None else self._router.url

    def num_weight_receivers(self) -> int:
        """See `InferenceClient.num_weight_receivers`. Counts one server if all are down, because an update waits until
        one is up."""
        return self._pool.facts.num_workers * max(1, len(self._pool.up))

    def idle_lap(self) -> Mapping[str, float]:
        """See `InferenceClient.idle_lap`. A server that answers an outside agent is not idle."""
        return {str(member.index): member.idle.lap() for member in self._pool.members}

    # --- generation ---------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> tuple[Completion, ...]:
        """See `InferenceClient.generate`. If the server dies or stops serving, the request goes to another one."""
        body = wire.request_body(request)

        async def ask(connection: Connection, timeout_s: float) -> Any:
            return await connection.send("generate", body, timeout_s=timeout_s)

        what = f"sample {request.sample_id} ({request.num_samples} × up to {request.params.max_tokens} tokens)"
        session = request.session_id or request.sample_id
        answer = await self._on_some_server(
            ask, what, session_id=session, sample_id=request.sample_id, num_samples=request.num_samples
        )
        return wire.completions_of(answer)

    async def abort(self, sample_ids: Sequence[str] | None = None) -> None:
        """See `InferenceClient.abort`. Repeats the abort for requests that are still on their way to a server. Raises
        DeadlineError if some of them have not been aborted after 30 s."""
        deadline = time.monotonic() + _SHORT_S
        asked = set(self._where) if sample_ids is None else set(sample_ids) & self._where.keys()
        while asked:
            answers = await self._on_all("abort", {"sample_ids": sorted(asked)}, timeout_s=_SHORT_S)
            asked -= {sample_id for answer in answers.values() for sample_id in answer}
            asked &= self._where.keys()
            if asked and time.monotonic() > deadline:
                raise DeadlineError(f"waited {_SHORT_S:g} s for samples {sorted(asked)[:5]} to be aborted")
            await asyncio.sleep(_FIRST_BACKOFF_S if asked else 0)

    async def chat(self, messages: Sequence[Message], **options: Any) -> Mapping[str, Any]:
        """Requests a chat completion. Returns the decoded response body, in the format of OpenAI's API.

        Args:
            messages: the conversation so far, which the server converts to tokens.
            options: further fields of the request, such as `max_tokens`, or `model` to choose an adapter. `session_id`
                is not sent; it makes requests with the same value go to the same server.
        """
        session_id = options.pop("session_id", None)
        arguments = {"model": self._model, "messages": [dict(message) for message in messages], **options}

        async def ask(connection: Connection, timeout_s: float) -> Any:
            return await connection.call_json("/v1/chat/completions", arguments, timeout_s=timeout_s)

        return await self._on_some_server(ask, "a chat completion", session_id=session_id)

    async def score(
        self, sequences: Sequence[Sequence[int]], *, adapter: str | None = None
    ) -> Mapping[str, Sequence[Sequence[float]]]:
        """See `InferenceClient.score`. Scores with the policy, or with the adapter whose name is `adapter`. Each
        data-parallel engine of a server scores all sequences and has its own entry in the result."""
        arguments = {"sequences": wire.sequences_record(sequences), "adapter": adapter}
        answers = await self._on_all("score", arguments, timeout_s=self._timeout_s)
        serving = [member for member in self._pool.serving if member in answers]
        return {
            str(member) if len(answers[member]) == 1 else f"{member}, data-parallel engine {rank}": wire.float_lists(of)
            for member in serving
            for rank, of in enumerate(answers[member])
        }

    async def tokenize(self, prompt: str | Sequence[Message]) -> tuple[int, ...]:
        """Returns the token ids of a text, without adding special tokens, or of chat messages followed by the chat
        template's generation prompt."""
        arguments: dict[str, Any] = {"model": self._model}
        if isinstance(prompt, str):
            arguments |= {"prompt": prompt, "add_special_tokens": False}
        else:
            arguments |= {"messages": [dict(message) for message in prompt], "add_generation_prompt": True}
        return tuple((await self._tokenizer_call("/tokenize", arguments))["tokens"])

    async def detokenize(self, tokens: Sequence[int]) -> str:
        """Decodes token ids to text."""
        return (await self._tokenizer_call("/detokenize", {"model": self._model, "tokens": list(tokens)}))["prompt"]

    # --- pausing and weights ------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode = "keep") -> None:
        """See `InferenceClient.pause`."""
        await self._on_all("pause", {"mode": mode}, timeout_s=self._timeout_s)

    async def resume(self) -> None:
        """See `InferenceClient.resume`."""
        await self._on_all("resume", {}, timeout_s=_SHORT_S)

    async def prepare_weights(self, rendezvous: Rendezvous, version: int) -> None:
        """See `InferenceClient.prepare_weights`. A server that dies meanwhile raises no error here; the supervisor
        restarts it."""
        await self._pool.wait_for(lambda: bool(self._pool.up), "a vLLM server to be up", timeout_s=self._timeout_s)
        self._left_before, self._lost = self._pool.num_left, []
        arguments = self._update_arguments(rendezvous, version)
        await self._on_all("prepare_weights", arguments, timeout_s=arguments["timeout_s"] + _SHORT_S)

    async def update_weights(self, rendezvous: Rendezvous, version: int) -> Manifest:
        """See `InferenceClient.update_weights`. If a server dies during the sync of a staged transport, the others are
        updated, and the supervisor restarts the dead one.

        Raises:
            WeightSyncError: a live server did not get the version, servers received different weights, all servers were
                lost, or a server was lost in a sync that is not staged. In all these cases the pool's version does not
                change, so servers that loaded the new version leave service at their next heartbeat.
            DeadlineError: no server was up in time, or a server did not answer in time.
        """
        arguments = self._update_arguments(rendezvous, version)
        await self._pool.wait_for(lambda: bool(self._pool.up), "a vLLM server to be up", timeout_s=self._timeout_s)
        self._left_before, self._lost = self._pool.num_left, []
        async with self._pool.updating():
            on_servers = self._on_all if rendezvous.is_staged else self._on_all_or_none
            answers = await on_servers("update_weights", arguments, timeout_s=arguments["timeout_s"] + _SHORT_S)
            if not answers:
                reasons = "; ".join(self._lost) or "none was up"
                raise WeightSyncError(
                    f"weight version {version}: no server completed the update: {reasons}; {self._pool.described()}"
                )
            manifests = {member: wire.manifest_of(record) for member, record in answers.items()}
            first, *others = manifests.values()
            if any(other != first for other in others):
                raise WeightSyncError(f"weight version {version}: the servers received different weights")
            await self._pool.changed_version(version, list(manifests))
        return first

    def _update_arguments(self, rendezvous: Rendezvous, version: int) -> dict[str, Any]:
        return {
            "receiver": rendezvous.receiver,
            "data": dict(rendezvous.data),
            "adapter": None if rendezvous.adapter is None else dict(rendezvous.adapter),
            "delta": None if rendezvous.delta is None else dict(rendezvous.delta),
            "version": version,
            "timeout_s": _UPDATE_SHARE * self._timeout_s,
        }

    async def load_lora_from_disk(self, name: str, path: str | Path) -> None:
        """Makes every server, including servers that restart later, serve the adapter at `path` as the model `name`. If
        the name exists, its adapter is replaced in place: running requests continue with the new adapter. Waits while
        servers are paused.

        Args:
            name: the model name that OpenAI clients request; not one of the policy's names.
            path: a directory in peft's format (`adapter_config.json`, `adapter_model.safetensors`) that the servers can
                read.

        Raises:
            GenerationError: a server refused the adapter, and still serves the adapter that had this name before; a
                server failed after it had accepted the adapter, and serves nothing under this name; or the adapter
                gives log-probs that are not finite.
        """
        directory = str(Path(path).absolute())
        before = self._pool.wanted.adapters
        self._want_adapters({**before, name: directory})
        try:
            await self._on_all("load_adapter", {"name": name, "path": directory}, timeout_s=self._timeout_s)
        except RLError:
            kept = {other: at for other, at in self._pool.wanted.adapters.items() if other != name}
            self._want_adapters(kept | ({name: before[name]} if name in before else {}))
            raise
        for engine, scores in (await self.score([_PROBE], adapter=name)).items():
            if not all(math.isfinite(value) for value in scores[0]):
                raise GenerationError(
                    f"adapter {name!r} at {path}: expected finite log-probs, got {scores[0]} from {engine}"
                )

    async def serve_model(self, adapter: Path | None) -> ServedModel:
        """See `EnginePlugin.serve_model`. Requests go through the router. If the router does not listen for outside
        agents yet, it starts to listen on loopback."""
        assert self._router is not None, "a client of servers that serve adapters has a router"
        name = BASE_MODEL_NAME
        if adapter is not None:
            name = str(adapter.absolute())
            await self.load_lora_from_disk(name, adapter)
        # With this request, an unusable model (for example one without a chat template) fails now, not in every sample.
        await self.chat([{"role": "user", "content": "?"}], model=name, max_tokens=1)
        url = self._router.url or await self._router.start("127.0.0.1", 0)
        return ServedModel(url=url, name=name, key=self._router.token)

    def _want_adapters(self, adapters: Mapping[str, str]) -> None:
        self._pool.wanted = attrs.evolve(self._pool.wanted, adapters=adapters)

    @property
    def lacks_weights(self) -> bool:
        """See `InferenceClient.lacks_weights`."""
        return self._pool.lacks_weights

    async def has_lost_engines(self) -> bool:
        """See `InferenceClient.has_lost_engines`. Also returns True if a call of the update lost its connection but no
        server was given up: then something between client and server failed, such as a proxy."""
        if self._ending:
            await asyncio.wait(self._ending)
        try:
            await self._pool.wait_for(
                lambda: self._pool.num_left > self._left_before, "a server to be given up", timeout_s=_VERDICT_S
            )
        except DeadlineError:
            return bool(self._lost)
        await self._pool.wait_for(
            lambda: bool(self._pool.up), "a vLLM server to be started again", timeout_s=self._start_timeout_s + _SHORT_S
        )
        return True

    async def needs_weights(self) -> None:
        """Returns when a server that lacks the current version is up, for example after a restart."""
        await self._pool.wait_for(lambda: self._pool.lacks_weights, "a server to need weights", timeout_s=None)

    async def sleep(self, level: int = 1) -> None:
        """Makes servers free their device memory. Level 1 keeps the weights in host memory. Level 2 drops them, so the
        servers must receive new weights before they serve again. A server that starts before `wake` sleeps too."""
        self._pool.wanted = attrs.evolve(self._pool.wanted, sleep_level=level, woken=frozenset())
        await self._on_all("sleep", {"level": level}, timeout_s=self._timeout_s)

    async def wake(self, tags: Sequence[str] | None = None) -> None:
        """Makes servers allocate device memory again: all of it, or the parts in `tags` (`weights`, `kv_cache`)."""
        self._pool.wanted = self._pool.wanted.awake(tags)
        await self._on_all("wake", {"tags": None if tags is None else list(tags)}, timeout_s=self._timeout_s)

    # --- health -------------------------------------------------------------------------------------------------------

    async def health(self) -> EngineHealth:
        """See `InferenceClient.health`. The counts are sums over all servers in service. Raises GenerationError if no
        server is in service."""
        answers = await self._on_all("health", {}, timeout_s=_SHORT_S)
        serving = [answers[member] for member in self._pool.serving if member in answers]
        if not serving:
            raise GenerationError(f"no vLLM server is in service: {self._pool.described()}")
        return EngineHealth(
            version=self._pool.version,
            num_running=sum(answer["num_running"] for answer in serving),
            num_waiting=sum(answer["num_waiting"] for answer in serving),
        )

    async def close(self) -> None:
        """Ends the servers that were started for this client."""
        if self._on_close is not None:
            await self._on_close()

    # --- calls --------------------------------------------------------------------------------------------------------

    async def _on_some_server(
        self,
        ask: Callable[[Connection, float], Awaitable[Any]],
        what: str,
        *,
        session_id: str | None,
        sample_id: str | None = None,
        num_samples: int = 1,
    ) -> Any:
        """Sends a request to one server and returns the answer. If the server is gone, repeats the request, to the same
        or another server, until the deadline. `ask` must be idempotent, because a computed answer can be lost.

        Raises:
            DeadlineError: no answer in time.
            GenerationError: the request was refused, or `MAX_LOST` servers were lost while they had it.
        """
        deadline = time.monotonic() + self._timeout_s
        backoff_s, last, lost = _FIRST_BACKOFF_S, "", set[asyncio.Event]()
        while (left_s := deadline - time.monotonic()) > 0:
            try:
                member = await self._pool.choose(session_id, timeout_s=left_s)
            except DeadlineError as error:
                raise DeadlineError(f"{what}: {error}{last}") from error
            if sample_id is not None:
                self._where[sample_id] = member
            life = member.lost
            try:
                with self._pool.carries(member, num_samples):
                    return await self._until_lost(member, ask, max(deadline - time.monotonic(), 0.001))
            except ServerGone as error:
                last = f"; the last try: {error}"
                self._on_failure(member)
                if isinstance(error, LostUnderRequest):
                    lost.add(life)
                if len(lost) == MAX_LOST:
                    raise GenerationError(
                        f"{what}: {MAX_LOST} servers were lost while they processed it, so it is not sent to another; "
                        f"their logs say why they ended{last}"
                    ) from error
            except (asyncio.CancelledError, DeadlineError):
                if sample_id is not None:
                    self._forget(member, sample_id)
                raise
            finally:
                if sample_id is not None:
                    self._where.pop(sample_id, None)
            await asyncio.sleep(random.uniform(0.5, 1.0) * backoff_s)
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
        raise DeadlineError(f"waited {self._timeout_s:g} s for {what}{last}")

    async def _until_lost(
        self, member: Member, ask: Callable[[Connection, float], Awaitable[Any]], timeout_s: float
    ) -> Any:
        """Asks the member and returns its answer. Raises ServerGone if the member is given up first."""
        async with while_up(member) as connection:
            return await ask(connection, timeout_s)

    async def _on_all(self, method: str, arguments: Any, *, timeout_s: float) -> dict[Member, Any]:
        """Calls all servers that are up, and returns the answers of the servers that were not lost meanwhile. When all
        calls have ended, raises the first error that is not ServerGone."""
        asked = self._ask_all(method, arguments, timeout_s)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        for member, answer in zip(asked.values(), answers, strict=True):
            self._note(method, member, answer)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, ServerGone):
                raise answer
        pairs = zip(asked.values(), answers, strict=True)
        return {member: answer for member, answer in pairs if not isinstance(answer, ServerGone)}

    async def _on_all_or_none(self, method: str, arguments: Any, *, timeout_s: float) -> dict[Member, Any]:
        """Like `_on_all`, for a weight sync that succeeds only if all servers succeed: raises the first failure without
        waiting for the other calls. The other calls fail too once the caller aborts the sync. A server whose call is
        still running 30 s later is marked as hung, and the supervisor gives it up.

        Raises:
            WeightSyncError: a server failed or is gone.
            RLError: the failed server's own error, if no other call is still running.
        """
        asked = self._ask_all(method, arguments, timeout_s)
        running = set(asked)
        try:
            ended, running = await asyncio.wait(asked, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            if running:
                ending = _in_background(self._end(method, {task: asked[task] for task in running}))
                self._ending.add(ending)
                ending.add_done_callback(self._ending.discard)
        for task in ended:
            self._note(method, asked[task], task.exception())
        failures = [error for task in ended if (error := task.exception()) is not None]
        if not failures:
            return {asked[task]: task.result() for task in asked}
        error = next((error for error in failures if not isinstance(error, ServerGone)), failures[0])
        if isinstance(error, RLError) and not running:
            raise error
        late = "".join(f"; {asked[task]} had not finished its part of the sync" for task in running)
        raise WeightSyncError(f"{error}{late}") from error

    async def _end(self, method: str, running: Mapping[asyncio.Task[Any], Member]) -> None:
        """Waits for calls whose results are no longer needed; marks servers that do not end them as hung."""
        ended, late = await asyncio.wait(running, timeout=_SHORT_S)
        for task in ended:
            self._note(method, running[task], task.exception())
        for task in late:
            task.cancel()
            member = running[task]
            member.hung = f"it is hung: {_SHORT_S:g} s after {method} failed, it had not finished its part of the sync"
            self._on_failure(member)

    def _ask_all(self, method: str, arguments: Any, timeout_s: float) -> dict[asyncio.Task[Any], Member]:
        async def ask(connection: Connection, timeout_s: float) -> Any:
            return await connection.call(method, arguments, timeout_s=timeout_s)

        return {asyncio.create_task(self._until_lost(member, ask, timeout_s)): member for member in self._pool.up}

    def _note(self, method: str, member: Member, answer: object) -> None:
        """Updates a server's state from its answer or error."""
        if isinstance(answer, ServerGone):
            logger.warning("%s: %s", method, answer)
            self._lost.append(f"{method}: {answer}")
            self._on_failure(member)
        elif isinstance(answer, WeightSyncError):
            member.is_quarantined = True  # until its next heartbeat reports what it holds
            self._on_failure(member)

    async def _tokenizer_call(self, path: str, arguments: Mapping[str, Any]) -> Any:
        async def ask(connection: Connection, timeout_s: float) -> Any:
            return await connection.call_json(path, arguments, timeout_s=timeout_s)

        async with self._tokenizing:
            return await self._on_some_server(ask, path, session_id=None, num_samples=0)

    def _forget(self, member: Member, sample_id: str) -> None:
        """Asks the server, in the background, to cancel a request whose answer is no longer needed."""
        if member.connection is None:
            return

        async def tell(connection: Connection) -> None:
            try:
                await connection.call("cancel", {"sample_ids": [sample_id]}, timeout_s=_SHORT_S)
            except (ServerGone, RLError) as error:
                logger.info("sample %s was cancelled, but %s", sample_id, error)

        _in_background(tell(member.connection))


def _in_background(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    task = asyncio.create_task(work)
    _background.add(task)
    task.add_done_callback(_background.discard)
    return task


_background: set[asyncio.Task[None]] = set()
