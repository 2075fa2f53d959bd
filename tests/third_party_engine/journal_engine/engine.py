"""The engine's entry point. Does not import torch, because it is loaded to check a configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs

from rl_core.errors import ConfigError
from rl_core.interfaces import (
    Completion,
    EngineHealth,
    EnginePlugin,
    EngineSpec,
    GenerateRequest,
    InferenceClient,
    Manifest,
    Rendezvous,
    at_least,
)
from rl_rollout import LocalEnginePlugin


@attrs.frozen(kw_only=True)
class JournalOptions:
    """The local engine, with a journal of its requests."""

    journal: str = "requests.jsonl"
    """Name of the journal in the run's directory; it has one line per recorded request."""
    journal_every: int = attrs.field(default=1, validator=at_least(1))
    """Only every n-th request is recorded."""


class JournalPlugin(EnginePlugin):
    """The plug-in of the local engine with a journal."""

    name = "journal"
    options_class = JournalOptions

    def validate(self, spec: EngineSpec) -> None:
        """Refuses what the engine cannot do, and names the key to change."""
        if Path(spec.options.journal).is_absolute():
            raise ConfigError(
                f"got {spec.options.journal}; expected a name in the run's directory",
                key="generator.inference_engine.journal",
            )
        LocalEnginePlugin().validate(spec)

    async def create(self, spec: EngineSpec) -> InferenceClient:
        """Loads the model in this process."""
        self.validate(spec)
        return JournalClient(await LocalEnginePlugin().create(spec), spec.run_dir / spec.options.journal, spec.options)


class JournalClient(InferenceClient):
    """Records requests and passes them to the local engine."""

    can_score = True

    def __init__(self, engine: Any, file: Path, options: JournalOptions) -> None:
        self._engine, self._file, self._every, self._count = engine, file, options.journal_every, 0

    async def generate(self, request: GenerateRequest) -> tuple[Completion, ...]:
        if self._count % self._every == 0:
            with self._file.open("a") as lines:
                lines.write(json.dumps({"sample": request.sample_id, "max_tokens": request.params.max_tokens}) + "\n")
        self._count += 1
        return await self._engine.generate(request)

    async def update_weights(self, rendezvous: Rendezvous, version: int) -> Manifest:
        return await self._engine.update_weights(rendezvous, version)

    async def pause(self, mode: Literal["keep", "abort", "wait"] = "keep") -> None:
        await self._engine.pause(mode)

    async def resume(self) -> None:
        await self._engine.resume()

    async def abort(self, sample_ids: Sequence[str] | None = None) -> None:
        await self._engine.abort(sample_ids)

    async def health(self) -> EngineHealth:
        return await self._engine.health()

    @property
    def vocab_size(self) -> int:
        return self._engine.vocab_size

    async def score(self, sequences: Sequence[Sequence[int]]) -> Mapping[str, Sequence[Sequence[float]]]:
        return await self._engine.score(sequences)

    async def close(self) -> None:
        await self._engine.close()


journal = JournalPlugin()
