"""With `trainable`, a worker holds optimizer state, checkpoints and plans only of the trained parameters. The suite of
all backends (`test_frozen_parameters_do_not_change`) compares the training itself with transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from rl_core.errors import CheckpointError, ConfigError
from rl_core.interfaces import LossSpec, ModelConfig, RankInfo, Worker, WorkerSpec
from rl_fsdp import FsdpOptions, FsdpWorker, fsdp
from rl_fsdp.backend import FsdpBackend
from rl_transformers.rank.token_scorer import require_structure
from rl_transformers.testing.backend import PRELOADED
from rl_transformers.testing.cases import LIMITS, LOSS, TEMPERATURE, Variant, open_case
from rl_transformers.testing.models import make_checkpoint
from rl_transformers.testing.rank_process import SuiteHost
from tests.fsdp.conftest import random_batch, spec_of

PRELOADED.update(dict.fromkeys(["rl_fsdp.worker", "rl_fsdp.fsdp1", "tests.fsdp.test_trainable"]))
LAYER = (r"layers\.1\.",)
CROSS_ENTROPY = LossSpec(name="cross_entropy")


def start(path: Path, trainable: tuple[str, ...], **fields: Any) -> FsdpWorker:
    return FsdpWorker(spec_of(path, model=ModelConfig(path=str(path), trainable=trainable), **fields), RankInfo())


def step(worker: FsdpWorker, **columns: Any) -> FsdpWorker:
    batch = random_batch([23, 9])
    batch = batch.with_columns(loss_weights=batch["loss_mask"].float() / 10, **columns)
    loss = LossSpec(name="value_clip", params={"value_clip": 1.0}) if columns else CROSS_ENTROPY
    worker.forward_backward(batch, ((0, 1),), loss, temperature=1.0)
    worker.optim_step()
    return worker


def names_of(state: Path) -> set[str]:
    return set(FileSystemReader(state).read_metadata().state_dict_metadata)


def test_a_tied_embedding_named_as_the_output_layer_is_trained_alone(tmp_path: Path):
    path = make_checkpoint(tmp_path / "base")
    worker = step(start(path, ("lm_head",)))
    worker.save_state(tmp_path / "state")
    embedding = "model.embed_tokens.weight"
    moments = {f"optimizer/{embedding}/{kind}" for kind in ("exp_avg", "exp_avg_sq")}
    assert names_of(tmp_path / "state") == {f"model/{embedding}", *moments}
    worker.save_model(tmp_path / "saved")
    before, after = (
        dict(AutoModelForCausalLM.from_pretrained(p).named_parameters()) for p in (path, tmp_path / "saved")
    )
    assert {name for name in before if not after[name].equal(before[name])} == {embedding}


def test_a_state_is_refused_by_a_run_that_trains_other_parameters(tmp_path: Path):
    path = make_checkpoint(tmp_path / "base")
    step(start(path, LAYER)).save_state(tmp_path / "state")
    with pytest.raises(CheckpointError, match=r"model/model\.layers\.0.* is absent"):
        start(path, (r"layers\.",)).load_state(tmp_path / "state")


def test_a_critics_value_head_is_always_trained(tmp_path: Path):
    path = make_checkpoint(tmp_path / "base")
    values = {"values": torch.zeros(32), "returns": torch.ones(32)}
    worker = step(start(path, ("norm",), role="critic"), **values)
    worker.save_state(tmp_path / "state")
    names = {name.removeprefix("model/") for name in names_of(tmp_path / "state") if name.startswith("model/")}
    assert {"value_head.weight", "value_head.bias"} < names
    assert all("norm" in name for name in names if "value_head" not in name)
    assert worker.scorer.value_head.bias.item() != 0


@attrs.frozen(kw_only=True)
class CountingBackend(FsdpBackend):
    """A backend whose ranks report the bytes of their optimizer state."""

    def create_worker(self, spec: WorkerSpec, rank: RankInfo) -> Worker:
        class CountingWorker(FsdpWorker):
            def optimizer_bytes(self) -> int:
                kept = [t for state in self.optimizer.state.values() for t in state.values() if t.dim()]
                return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in kept)

        return CountingWorker(spec, rank, "fsdp1" if self.is_fsdp1 else "fsdp2")


@pytest.mark.parametrize("is_fsdp1", [False, True], ids=["fsdp2", "fsdp1"])
def test_ranks_hold_and_plan_optimizer_state_of_trained_parameters_only(is_fsdp1: bool, tmp_path: Path):
    counting = CountingBackend(name="fsdp1" if is_fsdp1 else "fsdp", is_fsdp1=is_fsdp1)
    variant = Variant(world_size=2, checkpoint={"num_hidden_layers": 4})
    with open_case(counting, FsdpOptions(), variant, tmp_path) as case:
        model = attrs.evolve(case.spec.model, trainable=(r"layers\.1\.mlp", r"layers\.2\."))
        spec = attrs.evolve(case.spec, model=model)
        group = case.start(spec)
        group.forward_backward(case.batch, LIMITS, LOSS, temperature=TEMPERATURE)
        group.optim_step()
        held = group.call(SuiteHost.ask, "optimizer_bytes")
        plans, of_all = (counting.plan(s, 2, micro_batch_tokens=64, num_micro_batches=1) for s in (spec, case.spec))
        trained = sum(gradient.numel() for gradient in group.gradients().values())
    assert held == [plan.optimizer_bytes for plan in plans]
    assert sum(held) == 2 * 4 * trained
    assert all(plan.gradient_bytes < other.gradient_bytes / 2 for plan, other in zip(plans, of_all, strict=True)), (
        "control: only two of four layers are trained, and no embedding"
    )


@pytest.mark.parametrize(
    ("trainable", "checkpoint", "message"),
    [
        ((r"layers\.7\.",), {}, r"'layers.*' matches no parameter.*near names are model\.layers\."),
        ((r"experts\.5\.",), {"family": "qwen3_moe"}, r"experts\.5.* is trained and .*experts\.0\..* is frozen"),
    ],
)
def test_expressions_are_compared_with_the_models_structure_before_the_run(
    trainable: tuple[str, ...], checkpoint: dict[str, Any], message: str, tmp_path: Path
):
    path = make_checkpoint(tmp_path / "base", **checkpoint)
    spec = spec_of(path, model=ModelConfig(path=str(path), trainable=trainable))
    fsdp.validate(spec, 1)
    with pytest.raises(ConfigError, match=rf"trainer\.policy\.model\.trainable: .*{message}"):
        require_structure(spec, AutoConfig.from_pretrained(path))
