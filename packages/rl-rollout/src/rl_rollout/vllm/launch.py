"""Starts the vLLM servers of a run and a client for them, and ends both."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs

from rl_core import plugins
from rl_core.errors import ConfigError
from rl_core.interfaces import EngineSpec
from rl_core.workers.ray_cluster import ray_session
from rl_rollout.transports.receivers import receiver_of
from rl_rollout.vllm.client import RemoteInferenceClient
from rl_rollout.vllm.engine_arguments import engine_arguments, ranks_per_engine
from rl_rollout.vllm.options import VLLMOptions
from rl_rollout.vllm.placement import EnginePlace, cluster_has_gpus, num_nodes, reserve_places
from rl_rollout.vllm.pool import Pool
from rl_rollout.vllm.router import Router
from rl_rollout.vllm.server import ServerSettings
from rl_rollout.vllm.server_group import Server
from rl_rollout.vllm.supervisor import ExternalServer, Heartbeat, Startable, Supervisor
from rl_rollout.vllm.tokens import Tokens, given_tokens, tell_agents, tokens_of_run

logger = logging.getLogger(__name__)


async def create_client(spec: EngineSpec) -> RemoteInferenceClient:
    """Creates a client whose servers are ready. Servers that this call starts hold the weights of `spec.model_path`;
    external servers may hold other weights.

    Raises:
        ConfigError: Ray's cluster is too small for the servers, vLLM's CPU build does not support the options, the
            control token of external servers is missing, or the router cannot listen at its port.
        DeadlineError: resources of Ray's cluster did not become free in time.
        GenerationError, DeadlineError: a server did not start. If the run started it, the message has its last log
            lines.
    """
    options: VLLMOptions = spec.options
    if options.external_server_urls is not None:
        tokens = given_tokens()
        urls = [url.rstrip("/") for url in options.external_server_urls]
        servers = [
            ExternalServer(url, tokens.control, options.start_timeout_s, needs_kept_tokens=spec.return_kept_tokens)
            for url in urls
        ]
        return await supervised_client(servers, client_settings(spec, tokens))
    ray_session.enter()
    try:
        places = await reserve_places(
            spec.num_engines,
            ranks_per_engine(options),
            shares_devices=spec.shares_devices,
            timeout_s=options.start_timeout_s,
        )
        try:
            return await _client_of_own_servers(spec, places)
        except BaseException:
            _free(places)
            raise
    except BaseException:
        ray_session.leave()
        raise


@attrs.frozen(kw_only=True)
class ClientSettings:
    """Settings that `supervised_client` needs besides the servers."""

    tokens: Tokens
    """The control token, which the run's requests carry, and the access token, which agents' requests carry."""
    timeout_s: float
    """Deadline of a request."""
    start_timeout_s: float
    """Deadline for a server to start."""
    heartbeat: Heartbeat
    """How often servers are checked, and when a server is given up."""
    served_model_name: str
    """The model's name in vLLM's own routes."""
    run_dir: Path
    """Directory in which agents find their token."""
    router_address: tuple[str, int] | None = None
    """Host and port (0: a free port) at which outside agents are served; None: agents are not served."""


def client_settings(spec: EngineSpec, tokens: Tokens, *, host: str = "127.0.0.1") -> ClientSettings:
    """Takes a client's settings from `spec`. The router listens on `host`, if the options set its port."""
    options: VLLMOptions = spec.options
    return ClientSettings(
        tokens=tokens,
        timeout_s=spec.request_timeout_s,
        start_timeout_s=options.start_timeout_s,
        heartbeat=Heartbeat(interval_s=options.heartbeat_interval_s, hung_after_s=options.hung_after_s),
        served_model_name=options.served_model_name or spec.model_path,
        run_dir=spec.run_dir,
        router_address=None if options.router_port is None else (host, options.router_port),
    )


async def supervised_client(
    servers: Sequence[Startable], settings: ClientSettings, *, after: Callable[[], None] = lambda: None
) -> RemoteInferenceClient:
    """Starts the servers and returns a client for them. Its `close` stops the servers that the run started, then calls
    `after`. Raises the errors of `Supervisor.start`, and ConfigError if the router cannot listen at its address. Before
    raising, stops the servers that the run started."""
    pool = Pool(len(servers))
    supervisor = Supervisor(pool, servers, settings.heartbeat, control_token=settings.tokens.control)
    await supervisor.start()
    pool.adopt_version()
    router = Router(pool, token=settings.tokens.access, timeout_s=settings.timeout_s, on_failure=supervisor.suspect)
    if settings.router_address is not None:
        try:
            await _open_to_agents(router, *settings.router_address, settings)
        except BaseException:  # not only Exception: the run may be cancelled meanwhile
            await router.close()
            await supervisor.close()
            raise

    async def close() -> None:
        await router.close()
        await supervisor.close()
        after()

    return RemoteInferenceClient(
        pool,
        timeout_s=settings.timeout_s,
        start_timeout_s=settings.start_timeout_s,
        on_failure=supervisor.suspect,
        on_close=close,
        served_model_name=settings.served_model_name,
        router=router,
    )


async def _open_to_agents(router: Router, host: str, port: int, settings: ClientSettings) -> None:
    try:
        await router.start(host, port)
    except OSError as error:
        raise ConfigError(
            f"got {port}, but the router cannot listen there: {error}; set another port, or 0 for a free one",
            key="generator.inference_engine.router_port",
        ) from error
    where = tell_agents(settings.run_dir, settings.tokens)
    logger.warning(
        "an OpenAI client reaches the policy at %s, model %r; its api_key is in %s",
        router.url,
        settings.served_model_name,
        where,
    )


async def _client_of_own_servers(spec: EngineSpec, places: list[EnginePlace]) -> RemoteInferenceClient:
    host = spec.options.host or ("127.0.0.1" if num_nodes() == 1 else "0.0.0.0")
    tokens = tokens_of_run()

    def free() -> None:
        _free(places)
        ray_session.leave()

    servers = servers_of(spec, places, host=host, tokens=tokens)
    return await supervised_client(servers, client_settings(spec, tokens, host=host), after=free)


def servers_of(spec: EngineSpec, places: Sequence[EnginePlace], *, host: str, tokens: Tokens) -> list[Server]:
    """Creates the run's servers without starting them. They write their logs to the run directory."""
    gpus = cluster_has_gpus()
    options: VLLMOptions = spec.options
    arguments = engine_arguments(spec, has_gpus=gpus, spans_nodes=any(place.spans_nodes for place in places))
    receivers = receivers_of(spec)
    return [
        Server(
            index=index,
            place=place,
            settings=ServerSettings(
                engine_args=arguments,
                host=host,
                tokens=tokens,
                receivers=receivers,
                log_path=str((spec.run_dir / "logs" / f"vllm_server_{index}.log").absolute()),
            ),
            environment={} if gpus else cpu_environment(len(places) * ranks_per_engine(options)),
            start_timeout_s=options.start_timeout_s,
        )
        for index, place in enumerate(places)
    ]


def receivers_of(spec: EngineSpec) -> tuple[str, ...]:
    """Returns the receiver of the run's transport. A server of the run may load it in addition to the receivers of
    installed transports, because the run's transport may be a `package.module:object` that is not installed."""
    key = "generator.inference_engine.weight_sync_backend"
    return (receiver_of(plugins.load("rl_core.weight_transports", spec.weight_transport, key=key)),)


def cpu_environment(num_ranks: int) -> dict[str, str]:
    """Returns environment variables for engines on CPUs. If OMP_NUM_THREADS is not set, the ranks share the machine's
    cores equally, and each rank has one thread per core of its share.

    Binding of threads to cores is switched off by default, because vLLM would bind every engine's ranks to the same
    cores.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        "VLLM_CPU_OMP_THREADS_BIND": os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cores // num_ranks))),
    }


def _free(places: Sequence[EnginePlace]) -> None:
    for place in places:
        place.free()
