"""FSDP1: the parameters of a unit are concatenated into one flat tensor, and every rank holds an equal piece of it.

Code that needs a parameter as a tensor gathers its unit (a decoder layer, or everything outside the layers), so only
one unit is whole at a time. FSDP1 averages gradients over the ranks; to get their sum instead, the loss is multiplied
by the number of ranks.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.api import ShardedOptimStateDictConfig, ShardedStateDictConfig
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from rl_core.interfaces import WorkerSpec
from rl_core.rank_kit.optimizer_steps import StepSettings
from rl_core.rank_kit.optimizers import make_states, move_states, set_steps, state_tensors
from rl_core.rank_kit.perturbation import Piece
from rl_core.rank_kit.trained_parameters import unit_of
from rl_fsdp.optimizers import like_sharded, optimizer_of, own_part
from rl_fsdp.options import FsdpOptions
from rl_fsdp.perturbation import trained_pieces
from rl_fsdp.sharding import DTYPES, shard_mesh
from rl_fsdp.shards import scale_gradients, step_if_finite
from rl_transformers.rank.distributing import decoder_layers, receive, require_same_structure
from rl_transformers.rank.rank_mesh import RankMesh, whole
from rl_transformers.rank.token_scorer import Scorer
from rl_transformers.rank.weights import checkpoint_tensors, trained_or_all, trained_units

_WRAPPED = "_fsdp_wrapped_module."
_SCORER = "model."
"""Prefix of a parameter's name in the scorer, which holds the model as `model`."""


def shard_fsdp1(scorer: Scorer, options: FsdpOptions, ranks: RankMesh, spec: WorkerSpec) -> Fsdp1Shards:
    """Like `sharding.shard`, but with FSDP1."""
    require_same_structure(scorer)
    device_mesh = shard_mesh(ranks, options)
    is_hybrid = device_mesh.ndim > 1
    strategy = {
        (False, True): ShardingStrategy.FULL_SHARD,
        (False, False): ShardingStrategy.SHARD_GRAD_OP,
        (True, True): ShardingStrategy.HYBRID_SHARD,
        (True, False): ShardingStrategy._HYBRID_SHARD_ZERO2,
    }[is_hybrid, options.reshard_after_forward]
    # FSDP1 pins the memory it offloads to, which needs an accelerator; without one the parameters are on the CPU
    # anyway.
    offloads = options.cpu_offload and ranks.device.type != "cpu"
    settings: dict[str, Any] = {
        "device_mesh": device_mesh,
        "device_id": ranks.device,
        "sharding_strategy": strategy,
        "mixed_precision": _mixed_precision(options) if spec.bf16 else None,
        "cpu_offload": CPUOffload(offload_params=True) if offloads else None,
        "use_orig_params": True,
    }
    layers = {id(layer) for layer in decoder_layers(scorer)}
    done: set[nn.Module] = set()
    for parent in list(scorer.modules()):
        for name, child in list(parent.named_children()):
            if id(child) in layers:
                receive(child, ranks, leave_out=done)
                done.update(child.modules())
                setattr(parent, name, FSDP(child, **settings))
    receive(scorer, ranks, leave_out=done)
    return Fsdp1Shards(scorer, FSDP(scorer, **settings), ranks, spec)


class Fsdp1Shards:
    """`Shards` of a model whose parameters FSDP1 holds in flat tensors."""

    def __init__(self, scorer: Scorer, root: FSDP, ranks: RankMesh, spec: WorkerSpec):
        self.scorer = scorer
        self._root = root
        self.module: nn.Module = root
        self._mesh: Any = root._device_mesh
        self._num_ranks = ranks.mesh.world_size
        self._stays_on_cpu: bool = spec.options.cpu_offload
        self._perturbed: dict[str, Tensor] = {}
        self._parts = {weight: part for unit in FSDP.fsdp_modules(root) for weight, part in _parts_of(unit)}
        self.optimizer = optimizer_of(
            scorer, spec.optimizer, shape_of=lambda weight: self._parts[weight].shape, on_whole=self._on_whole
        )
        with _quiet():
            FSDP.set_state_dict_type(
                root,
                StateDictType.SHARDED_STATE_DICT,
                ShardedStateDictConfig(),
                ShardedOptimStateDictConfig(),
            )

    def backward(self, loss: Tensor) -> None:
        """See `Shards`."""
        (loss * self._num_ranks).backward()

    def let_go(self) -> None:
        """See `Shards`. After every forward of FSDP1, parameters that are not in a layer stay gathered; if
        `reshard_after_forward` is false, so do the layers."""
        self._reshard()

    def has_gradients(self) -> bool:
        """See `Shards`."""
        return any(parameter.grad is not None for parameter in self.scorer.parameters())

    def step(self, settings: StepSettings) -> float:
        """See `Shards`."""
        self._reshard()
        scale_gradients(self.scorer, settings.gradient_scale)
        for weight in self._parts:
            if weight.requires_grad and weight.grad is None and not weight.numel():
                weight.grad = torch.zeros_like(weight)  # steps are collective, also for weights on other ranks
        limit = settings.max_grad_norm if settings.max_grad_norm > 0 else math.inf
        return step_if_finite(self.optimizer, settings, self._root.clip_grad_norm_(limit).item())

    def clear_gradients(self) -> None:
        """See `Shards`."""
        self.optimizer.zero_grad()

    def exported(self, *, only_trained: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yields copies of the weights, unit by unit; a gathered unit is freed before the next one is gathered."""
        dtype, trained = self.scorer.compute_dtype, trained_units(self._named())
        for weights in self._units():
            for name, weight in weights:
                if only_trained and unit_of(name) not in trained:
                    continue
                yield from checkpoint_tensors(self.scorer.model, name, weight.detach().to(dtype, copy=True))

    def model_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Same as `exported`: there is no value head, because critics are refused."""
        return self.exported()

    def adapters(self, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
        """Yields nothing: adapters are refused."""
        return iter(())

    def head(self) -> dict[str, Tensor]:
        """Returns an empty dict: critics are refused."""
        return {}

    def gradients(self) -> dict[str, Tensor]:
        """See `Shards`."""
        gradients, trained = {}, {name for name, _ in self._saved()}
        for weights in self._units(with_grads=True):
            for name, weight in weights:
                if name not in trained:
                    continue
                gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
                gradients.update(checkpoint_tensors(self.scorer.model, name, gradient.detach().cpu().clone()))
        return gradients

    def state(self, *, with_optimizer: bool) -> dict[str, Tensor]:
        """Returns DTensors made from the flat tensors; `take` writes them back."""
        with _quiet():
            names = {name for name, _ in self._saved()}
            saved = {name.removeprefix(_SCORER): tensor for name, tensor in self._root.state_dict().items()}
            tensors = {f"model/{name}": tensor for name, tensor in saved.items() if name in names}
            if with_optimizer:
                tensors |= {name: self._in_rows(weight, part) for name, weight, part in self._kept()}
        return tensors

    def take(self, state: Mapping[str, Tensor], *, with_optimizer: bool, steps_done: int) -> None:
        """See `Shards`."""
        self._put_back(state, with_optimizer=with_optimizer)
        if with_optimizer:
            set_steps(self.optimizer, steps_done)

    def pieces(self) -> list[Piece]:
        """See `Shards`."""
        self._perturbed = self.state(with_optimizer=False)
        return list(trained_pieces(self._perturbed))

    def take_pieces(self) -> None:
        """See `Shards`."""
        self._put_back(self._perturbed, with_optimizer=False)
        self._perturbed = {}

    def _put_back(self, state: Mapping[str, Tensor], *, with_optimizer: bool) -> None:
        with _quiet():
            names = {id(p): name for name, p in self._named()}
            saved = self._root.state_dict()
            for name, weight in self._root.named_parameters(remove_duplicate=False):
                key = f"model/{names[id(weight)]}"
                if key in state:
                    saved[name.replace(_WRAPPED, "")] = state[key]
            self._root.load_state_dict(saved)
        if not with_optimizer:
            return
        for name, weight, part in self._kept():
            part.copy_(whole(state[name]).view(-1).narrow(0, self._parts[weight].start, part.numel()))

    def move(self, device: torch.device, *, parameters: bool, optimizer: bool) -> None:
        """See `Shards`."""
        if self._stays_on_cpu:
            return
        if optimizer:
            move_states(self.optimizer, device)
        if not parameters:
            return
        for handle in self._root._all_handles or []:
            handle.flat_param_to(device, non_blocking=True)
            # FSDP1 restores the sharded parameter from `_local_shard` after each use.
            handle.flat_param._local_shard = handle.flat_param.data
            if handle.flat_param.grad is not None:
                handle.flat_param.grad = handle.flat_param.grad.to(device)
        torch.cuda.synchronize()

    def _reshard(self) -> None:
        """Frees units that scoring left gathered. The parameters of a gathered unit have no gradients, and the next
        forward would use them instead of the stepped weights."""
        for handle in self._root._all_handles or []:
            if handle.uses_sharded_strategy and not handle.needs_unshard():
                handle.reshard(free_unsharded_flat_param=True)
                handle.post_reshard()

    def _kept(self) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
        """Yields this rank's part of each tensor of the optimizer's state, with its name in a checkpoint."""
        make_states(self.optimizer)
        for name, weight in self._saved():
            for kind, part in state_tensors(self.optimizer.state[weight]).items():
                yield f"optimizer/{name}/{kind}", weight, part

    def _in_rows(self, weight: nn.Parameter, part: Tensor) -> Tensor:
        """A part of a flat tensor as a DTensor whose first axis is sharded, as checkpoints have it. Collective. FSDP1's
        own function requires that all parameters of a unit have the same kind of state."""
        gathered = self._gathered(weight, part)
        placements = [Replicate()] * (self._mesh.ndim - 1) + [Shard(0)]
        rows = distribute_tensor(gathered, self._mesh, placements, src_data_rank=None)
        return like_sharded(rows, own_part(rows, gathered).clone())

    def _gathered(self, weight: nn.Parameter, tensor: Tensor) -> Tensor:
        """The whole tensor of which each rank has the same part as of `weight`."""
        part = self._parts[weight]
        gathered = tensor.new_zeros(math.prod(part.shape))
        gathered.narrow(0, part.start, tensor.numel()).copy_(tensor)
        dist.all_reduce(gathered, group=part.group)
        return gathered.view(part.shape)

    def _on_whole(self, weight: nn.Parameter, tensor: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """See `OnWhole`."""
        result = function(self._gathered(weight, tensor)).reshape(-1)
        return result.narrow(0, self._parts[weight].start, tensor.numel())

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, weight in self._root.named_parameters():
            yield name.replace(_WRAPPED, "").removeprefix(_SCORER), weight

    def _saved(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters in a saved state: see `trained_or_all`."""
        return trained_or_all(self._named())

    def _units(self, *, with_grads: bool = False) -> Iterator[list[tuple[str, nn.Parameter]]]:
        """Yields the parameters of each unit, which are whole only until the next unit is requested."""
        names = {weight: name for name, weight in self._named()}
        for unit in reversed(FSDP.fsdp_modules(self._root)):  # the root, which also has the layers' parameters, is last
            own = [weight for weight in unit.parameters() if weight in names]
            with FSDP.summon_full_params(unit, recurse=False, writeback=False, with_grads=with_grads):
                yield [(names.pop(weight), weight) for weight in own]


@attrs.frozen(eq=False)
class _Part:
    """This rank's part of a parameter, a range of its elements that may be empty."""

    shape: torch.Size
    """Shape of the whole parameter."""
    start: int
    group: dist.ProcessGroup
    """The ranks that share the parameter."""


def _parts_of(unit: FSDP) -> Iterator[tuple[nn.Parameter, _Part]]:
    handle: Any = unit._handle
    if handle is not None:
        flat = handle.flat_param
        for weight, shape, place in zip(flat._params, flat._shapes, flat._shard_param_infos, strict=True):
            yield weight, _Part(shape, place.intra_param_start_idx or 0, handle.process_group)


def _mixed_precision(options: FsdpOptions) -> MixedPrecision:
    given = options.mixed_precision
    return MixedPrecision(
        param_dtype=DTYPES[given.param_dtype], reduce_dtype=DTYPES[given.reduce_dtype], buffer_dtype=None
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences torch's advice to use FSDP2, which torch repeats each time FSDP1's state is read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield
