"""Chooses the adapter for each request in the server: the one that the request names, else the policy's."""

from __future__ import annotations

from typing import Any

from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM

from rl_core.errors import GenerationError
from rl_rollout.vllm.engine_cores import answers_of_all
from rl_rollout.vllm.weights.adapters import BASE_MODEL, POLICY_ADAPTER


class EngineWithAdapter(AsyncLLM):
    """Gives the policy's adapter to every request that names no adapter, on all routes: only a request for `BASE_MODEL`
    gets the bare model."""

    async def add_request(self, *args: Any, lora_request: LoRARequest | None = None, **kwargs: Any) -> Any:
        """See `AsyncLLM.add_request`."""
        adapter = None if lora_request == BASE_MODEL else lora_request or POLICY_ADAPTER
        return await super().add_request(*args, lora_request=adapter, **kwargs)


class NamedAdapters:
    """Loads and finds the adapters that OpenAI clients name in the field `model`."""

    def __init__(self, engine: AsyncLLM, models: OpenAIServingModels) -> None:
        self._engine = engine
        self._models = models
        # The engine identifies adapters by numbers. This reserves the numbers of the policy (1) and the base model (2).
        models.lora_id_counter.inc(BASE_MODEL.lora_int_id)
        models.lora_requests[BASE_MODEL.lora_name] = BASE_MODEL

    def __getitem__(self, name: str) -> LoRARequest:
        """Returns vLLM's request for the adapter of this name. Raises GenerationError for an unknown name."""
        if name not in self._models.lora_requests:
            names = ", ".join(self._models.lora_requests) or "none"
            raise GenerationError(f"this server has no adapter {name!r} (adapters: {names})")
        return self._models.lora_requests[name]

    async def load(self, name: str, path: str) -> None:
        """Loads an adapter, or replaces the adapter of this name, after every data-parallel engine has verified that it
        can serve the new adapter.

        Raises:
            GenerationError: the name is empty or reserved for the policy or the model, or an engine cannot serve the
                adapter; nothing has changed. Or an engine failed to load the adapter after the checks; the name now has
                no adapter.
        """
        reserved = ("", POLICY_ADAPTER.lora_name, BASE_MODEL.lora_name)
        if name in reserved or self._models.is_base_model(name):
            raise GenerationError(
                f"an adapter cannot have the name {name!r}: it is empty, or the name of the policy or the model; "
                "choose another"
            )
        known = self._models.lora_requests.get(name)
        number = self._models.lora_id_counter.inc(1) if known is None else known.lora_int_id
        by_engine = await answers_of_all(self._engine, "collective_rpc", "rl_check_adapter", None, (name, path), None)
        faults = [fault for of_engine in by_engine for fault in of_engine if fault is not None]
        if faults:
            raise GenerationError(f"the adapter {name!r} at {path} cannot be served: {faults[0]}")
        try:
            await answers_of_all(self._engine, "add_lora", LoRARequest(name, number, path, load_inplace=True))
        except Exception as error:
            if self._engine.errored:
                raise
            self._models.lora_requests.pop(name, None)  # some engines may have replaced it
            raise GenerationError(
                f"the adapter {name!r} at {path} passed the checks, but could not be loaded: {error}. The name now "
                "has no adapter: load one again"
            ) from error
        # Kept without `load_inplace`: with it, vLLM 0.30 would read the file again in every engine step.
        self._models.lora_requests[name] = LoRARequest(name, number, path)
