"""FSDP1: the parameters of a unit lie end to end in one flat tensor, of which every rank holds an even piece.

Everything that needs a parameter as a tensor gathers its unit (a decoder layer, or what stands outside the layers), so
one unit at a time is whole. FSDP1 averages gradients: the loss is multiplied by the number of ranks instead.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.api import ShardedOptimStateDictConfig, ShardedStateDictConfig
from torch.optim import AdamW

from rl_fsdp.model import Scorer
from rl_fsdp.options import FsdpOptions
from rl_fsdp.rank_mesh import RankMesh
from rl_fsdp.sharding import DTYPES, decoder_layers, receive, require_same_structure
from rl_fsdp.shards import MOMENTS, moments_of
from rl_fsdp.weights import checkpoint_tensors

_WRAPPED = "_fsdp_wrapped_module."
_SCORER = "model."
"""In front of a parameter's own name, in the scorer."""


def shard_fsdp1(scorer: Scorer, options: FsdpOptions, ranks: RankMesh, *, bf16: bool) -> Fsdp1Shards:
    """As `sharding.shard`."""
    require_same_structure(scorer)
    is_hybrid = ranks.shards.ndim > 1
    strategy = {
        (False, True): ShardingStrategy.FULL_SHARD,
        (False, False): ShardingStrategy.SHARD_GRAD_OP,
        (True, True): ShardingStrategy.HYBRID_SHARD,
        (True, False): ShardingStrategy._HYBRID_SHARD_ZERO2,
    }[is_hybrid, options.reshard_after_forward]
    # It pins what it offloads, which takes an accelerator; without one the parameters are on the CPU anyway.
    offloads = options.cpu_offload and ranks.device.type != "cpu"
    settings: dict[str, Any] = {
        "device_mesh": ranks.shards,
        "device_id": ranks.device,
        "sharding_strategy": strategy,
        "mixed_precision": _mixed_precision(options) if bf16 else None,
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
    return Fsdp1Shards(scorer, FSDP(scorer, **settings), ranks)


class Fsdp1Shards:
    """See `Shards`."""

    def __init__(self, scorer: Scorer, root: FSDP, ranks: RankMesh):
        self.scorer = scorer
        self._root = root
        self.module: nn.Module = root
        self._num_ranks = ranks.mesh.world_size
        self._ranks = ranks
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
        """What `reshard_after_forward=false` keeps, the next forward uses; all that reads parameters gathers anew."""

    def clip(self, max_norm: float) -> float:
        """See `Shards`."""
        return self._root.clip_grad_norm_(max_norm if max_norm > 0 else math.inf).item()

    def exported(self) -> Iterator[tuple[str, Tensor]]:
        """One unit at a time, each tensor a copy: the unit itself is gone with the next."""
        dtype = self.scorer.compute_dtype
        for weights in self._units():
            for name, weight in weights:
                yield from checkpoint_tensors(self.scorer.model, name, weight.detach().to(dtype, copy=True))

    def model_weights(self) -> Iterator[tuple[str, Tensor]]:
        """There is no head: critics are refused."""
        return self.exported()

    def gradients(self) -> dict[str, Tensor]:
        """See `Shards`."""
        gradients = {}
        for weights in self._units(with_grads=True):
            for name, weight in weights:
                gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
                gradients.update(checkpoint_tensors(self.scorer.model, name, gradient.detach().cpu().clone()))
        return gradients

    def state(self, optimizer: AdamW | None) -> dict[str, Tensor]:
        """DTensors, made for the purpose: `take` puts them back."""
        with _quiet():
            names = {name for name, _ in self._named()}
            saved = {name.removeprefix(_SCORER): tensor for name, tensor in self._root.state_dict().items()}
            tensors = {f"model/{name}": tensor for name, tensor in saved.items() if name in names}
            if optimizer is not None:
                for weight in self._root.parameters():
                    moments_of(optimizer, weight)
                for name, moments in FSDP.optim_state_dict(self._root, optimizer)["state"].items():
                    own_name = name.removeprefix(_SCORER)
                    tensors |= {f"optimizer/{own_name}/{kind}": moments[kind] for kind in MOMENTS}
        return tensors

    def take(self, state: Mapping[str, Tensor], optimizer: AdamW | None) -> None:
        """See `Shards`."""
        with _quiet():
            names = {id(p): name for name, p in self._named()}
            saved = self._root.state_dict()
            for name, weight in self._root.named_parameters(remove_duplicate=False):
                saved[name.replace(_WRAPPED, "")] = state[f"model/{names[id(weight)]}"]
            self._root.load_state_dict(saved)
            if optimizer is None:
                return
            optimizer_state = FSDP.optim_state_dict(self._root, optimizer)
            for name, moments in optimizer_state["state"].items():
                own_name = name.removeprefix(_SCORER)
                moments.update({kind: state[f"optimizer/{own_name}/{kind}"] for kind in MOMENTS})
            optimizer.load_state_dict(FSDP.optim_state_dict_to_load(self._root, optimizer, optimizer_state))

    def move(self, device: torch.device) -> None:
        """See `Shards`."""
        for handle in self._root._all_handles or []:
            handle.flat_param_to(device, non_blocking=True)
            handle.flat_param._local_shard = handle.flat_param.data
            if handle.flat_param.grad is not None:
                handle.flat_param.grad = handle.flat_param.grad.to(device)
        torch.cuda.synchronize()

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, weight in self._root.named_parameters():
            yield name.replace(_WRAPPED, "").removeprefix(_SCORER), weight

    def _units(self, *, with_grads: bool = False) -> Iterator[list[tuple[str, nn.Parameter]]]:
        """The parameters of each unit, whole only until the next is asked for."""
        names = {weight: name for name, weight in self._named()}
        for unit in reversed(FSDP.fsdp_modules(self._root)):  # the root, which also has the layers' parameters, is last
            own = [weight for weight in unit.parameters() if weight in names]
            with FSDP.summon_full_params(unit, recurse=False, writeback=False, with_grads=with_grads):
                yield [(names.pop(weight), weight) for weight in own]


def _mixed_precision(options: FsdpOptions) -> MixedPrecision:
    given = options.mixed_precision
    return MixedPrecision(
        param_dtype=DTYPES[given.param_dtype], reduce_dtype=DTYPES[given.reduce_dtype], buffer_dtype=None
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """torch recommends FSDP2 whenever FSDP1 is asked for its state."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield
