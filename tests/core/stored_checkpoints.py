"""Writes checkpoints as a run does, with one small file instead of the state of the ranks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from rl_core.trainer.state.checkpoint import RunState, begin_checkpoint, complete_checkpoint


async def write_weights(directory: Path) -> None:
    (directory / "policy").mkdir()
    (directory / "policy" / "weights.bin").write_bytes(b"x" * 1000)


async def save_checkpoint(
    root: Path, state: RunState, save_workers: Callable[[Path], Awaitable[None]] = write_weights
) -> Path:
    partial = begin_checkpoint(root, state, fingerprint={"settings": {}})
    await save_workers(partial)
    return complete_checkpoint(partial)
