"""Runs one rank's step with the worker's own code on tensors without data, to measure peak memory.

Tensors on the rank's device are `FakeTensor`s: shapes and dtypes without values. The batch, its layout and everything
else in host memory are real. Collectives do nothing (torch's process group `fake`), so this rank's values are used in
place of other ranks' values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]  for a single rank

from rl_core.batch import Batch
from rl_core.errors import ConfigError
from rl_core.interfaces import LossSpec, Plan, RankInfo, RehearsedPhase, WorkerSpec
from rl_core.layout.mesh import Mesh
from rl_core.rank_kit.optimizer_steps import StepSettings
from rl_core.rank_kit.worker_specs import SECTIONS
from rl_transformers.rank.attention import PACKED_ATTENTION
from rl_transformers.rank.memory_tracker import MemoryTracker
from rl_transformers.rank.micro_batch import ModelInput
from rl_transformers.rank.rank_mesh import RankMesh
from rl_transformers.rank.shards import Shards
from rl_transformers.rank.token_scorer import Scorer, load_scorer
from rl_transformers.rank.ulysses import require_heads
from rl_transformers.rank.worker import ScoringWorker

_DEVICE = torch.device("cpu")
"""Device of the fake tensors. It is not CUDA, because FSDP would ask for a device handle, which a torch build without
CUDA does not have."""


def rehearse(
    spec: WorkerSpec,
    mesh: Mesh,
    shard: Callable[[Scorer, RankMesh], Shards],
    batch: Batch,
    plan: Plan,
    loss: LossSpec | None,
    *,
    section: str,
) -> tuple[RehearsedPhase, ...]:
    """Measures the peak memory of the first rank, which has the largest shard if the shards are uneven.

    Args:
        spec: the model and its settings. Of the model's files, only `config.json` is read.
        mesh: the mesh of all ranks.
        shard: as in `start.start_shards`, but called with the scorer and the ranks.
        batch: the rank's sequences, with the columns that the loss reads.
        plan: the micro-batches of `batch`.
        loss: the loss of a training step; None: the batch is only scored.
        section: the backend's section of the configuration, for messages.

    Returns:
        With a loss, the phases `train` and `step`, measured with the optimizer state that exists from the second step
        on. Without a loss, only the phase `score`.

    Raises:
        ConfigError: the model cannot be built or sharded, or this process has already joined a process group.
    """
    # The largest batch of a run is one in which no two sequences share a prefix.
    spec = attrs.evolve(spec, share_prefixes=False)
    fake_mode = _FakeDevice(allow_non_fake_inputs=True)
    with _rank_alone(mesh.world_size):
        ranks = RankMesh.join(RankInfo(world_size=mesh.world_size), _DEVICE, mesh)
        shards = _shards(spec, ranks, shard, fake_mode, section)
        rehearsed = cast(Shards, _FakeShards(shards, fake_mode))
        worker = ScoringWorker(spec, _DEVICE, ranks, rehearsed, routes_key="")
        tracker = MemoryTracker(fake_mode)
        if loss is None:
            return (_scored(worker, tracker, batch, plan),)
        return _trained(worker, shards, tracker, batch, plan, loss)


def _scored(worker: ScoringWorker, tracker: MemoryTracker, batch: Batch, plan: Plan) -> RehearsedPhase:
    tracker.name([*worker.scorer.parameters(), *worker.scorer.buffers()], "parameters")
    with tracker:
        worker.forward(batch, plan, temperature=1.0)
        return RehearsedPhase(phase="score", parts=tracker.fullest(), flops=tracker.flops)


def _trained(
    worker: ScoringWorker, shards: Shards, tracker: MemoryTracker, batch: Batch, plan: Plan, loss: LossSpec
) -> tuple[RehearsedPhase, ...]:
    parameters = list(worker.scorer.parameters())
    state = shards.state(with_optimizer=True)  # this also creates the optimizer's state
    tracker.name([tensor for name, tensor in state.items() if name.startswith("optimizer/")], "optimizer")
    tracker.name([*parameters, *worker.scorer.buffers()], "parameters")
    del state
    with tracker:
        worker.forward_backward(batch, plan, loss, temperature=1.0)
        tracker.name([parameter.grad for parameter in parameters if parameter.grad is not None], "gradients")
        train = RehearsedPhase(phase="train", parts=tracker.fullest(), flops=tracker.flops)
        start, flops = tracker.mark(), tracker.flops
        worker.optim_step()
        step = RehearsedPhase(phase="step", parts=tracker.fullest(start), flops=tracker.flops - flops)
    return train, step


def _shards(
    spec: WorkerSpec,
    ranks: RankMesh,
    shard: Callable[[Scorer, RankMesh], Shards],
    fake_mode: FakeTensorMode,
    section: str,
) -> Shards:
    """Like `start.start_shards`, for a model without weights. Does not compare scores, because the tensors have no
    values."""
    scorer = load_scorer(spec, torch.device("meta"))
    if ranks.ulysses is not None:
        num_heads = scorer.model.config.get_text_config().num_attention_heads
        require_heads(num_heads, ranks.ulysses, f"{SECTIONS[spec.role]}.{section}")
        scorer.model.set_attn_implementation(PACKED_ATTENTION)
    _replace_tensors(scorer, fake_mode)
    with torch.no_grad():
        return shard(scorer, ranks)


def _replace_tensors(scorer: Scorer, fake_mode: FakeTensorMode) -> None:
    """Replaces the scorer's tensors with fake ones on the rank's device; tied tensors share one fake."""
    # The tensors are kept alive with their fakes, because a freed tensor's id may be used again.
    fakes: dict[int, tuple[Tensor, Tensor]] = {}
    for module in scorer.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    kept = fakes.setdefault(id(tensor), (tensor, _fake_of(tensor, fake_mode)))
                    cast(dict[str, Any], tensors)[name] = kept[1]


def _fake_of(tensor: Tensor, fake_mode: FakeTensorMode) -> Tensor:
    with fake_mode:
        made = torch.empty_like(tensor, device=_DEVICE)
    is_parameter = isinstance(tensor, nn.Parameter)
    return nn.Parameter(made, requires_grad=tensor.requires_grad) if is_parameter else made


class _FakeDevice(FakeTensorMode):
    """Fake mode in which the host reads the value 1 from every tensor, so that norms and losses are finite."""

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            dtype = args[0].dtype
            return 1.0 if dtype.is_floating_point else dtype == torch.bool or 1
        return super().dispatch(func, types, args, kwargs)


class _FakeShards:
    """The part of `Shards` that a step uses. All tensors created on the device are fake, even if no fake tensor is an
    input of the operation."""

    def __init__(self, shards: Shards, fake_mode: FakeTensorMode):
        self._shards = shards
        self._fake_mode = fake_mode
        self.scorer = shards.scorer
        self.optimizer = shards.optimizer

    def module(self, inputs: ModelInput, *, temperature: float, **options: bool) -> tuple[Tensor, ...]:
        with self._fake_mode:
            return self._shards.module(_on_device(inputs, self._fake_mode), temperature=temperature, **options)

    def backward(self, loss: Tensor) -> None:
        with self._fake_mode:
            self._shards.backward(loss)

    def let_go(self) -> None:
        self._shards.let_go()

    def has_gradients(self) -> bool:
        return self._shards.has_gradients()

    def step(self, settings: StepSettings) -> float:
        # Outside the mode: DTensor infers shapes with its own fake tensors of whole parameters, which must not count as
        # memory.
        return self._shards.step(settings)


def _on_device(value: Any, fake_mode: FakeTensorMode) -> Any:
    """Returns a copy of a record in which every tensor is replaced with a fake tensor on the rank's device."""
    if isinstance(value, Tensor):
        return value if isinstance(value, FakeTensor) else fake_mode.from_tensor(value)
    if attrs.has(type(value)):
        fields = attrs.fields(type(value))
        return attrs.evolve(value, **{f.name: _on_device(getattr(value, f.name), fake_mode) for f in fields})
    return value


@contextmanager
def _rank_alone(world_size: int) -> Iterator[None]:
    if dist.is_initialized():
        raise ConfigError("a rehearsal needs a separate process: this one has already joined a process group")
    dist.init_process_group("fake", store=HashStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
