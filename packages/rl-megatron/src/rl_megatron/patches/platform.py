"""Runs Megatron-Core 0.16.1 on a machine without GPUs: its CUDA calls go to the CPU, its collectives to gloo.

Megatron names CUDA in many places (devices of new tensors, streams, random states, tensor types). Here the functions of
`torch.cuda` that Megatron calls are replaced, and a `TorchFunctionMode` replaces CUDA devices with the CPU in this
thread's tensor calls. Collectives that gloo lacks (gathers and reduce-scatters of unequal parts) are replaced too. The
model and its parallelism are Megatron's.

These replacements change torch for the whole process, so they are made only in a rank's own process
(`needs_own_process`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rl_megatron.patches.patching import replace

_CPU = torch.device("cpu")
_mode: TorchFunctionMode | None = None


def install_cpu() -> None:
    """Changes torch and Megatron for this process, once; must run in the thread that computes."""
    global _mode
    if _mode is not None:
        return
    # Megatron wraps functions in `torch.compile` at import, which on the CPU would call a C++ compiler in every
    # process.
    torch.compiler.set_stance("force_eager")
    _replace_cuda_functions()
    _replace_random_states()
    _replace_collectives()
    _mode = _CpuMode()
    _mode.__enter__()


class _CpuMode(TorchFunctionMode):
    """Makes tensor calls with a CUDA device use the CPU, and reports tensor types as on CUDA."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if kwargs:
            if _is_cuda(kwargs.get("device")):
                kwargs = {**kwargs, "device": _CPU}
            if kwargs.get("pin_memory"):
                kwargs = {**kwargs, "pin_memory": False}
        if func is Tensor.cuda or func is Tensor.pin_memory:
            return args[0]
        if func is Tensor.record_stream:
            return None
        if func is Tensor.type and len(args) == 1 and not kwargs:
            # Megatron's optimizers sort parameters by type names such as 'torch.cuda.FloatTensor' and refuse others.
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if func is Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        return func(*args, **(kwargs or {}))


def _is_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


class _Stream:
    """Stands in for CUDA streams and events on the CPU, where all work is already complete."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_error: object) -> None:
        pass

    def record_event(self, *_args: Any) -> _Stream:
        return self

    def query(self) -> bool:
        return True

    def _nothing(self, *_args: Any) -> None:
        pass

    wait_stream = wait_event = synchronize = record = wait = _nothing


def _replace_cuda_functions() -> None:
    def nothing(*_args: Any, **_kwargs: Any) -> None:
        pass

    def zero(*_args: Any) -> int:
        return 0

    stream = _Stream()
    for name in ("synchronize", "empty_cache", "set_device", "_lazy_init", "ipc_collect"):
        replace(torch.cuda, name, nothing)
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved"):
        replace(torch.cuda, name, zero)
    for name in ("current_stream", "default_stream"):
        replace(torch.cuda, name, lambda *_args: stream)
    for name in ("range_push", "range_pop"):
        replace(torch.cuda.nvtx, name, nothing)
    replace(torch.cuda, "current_device", lambda: _CPU)
    replace(torch.cuda, "Stream", _Stream)
    replace(torch.cuda, "Event", _Stream)
    replace(torch.cuda, "stream", lambda _stream: contextlib.nullcontext())


def _replace_random_states() -> None:
    """Replaces the random generators of devices with the CPU's."""

    def get_state(*_args: Any, **_kwargs: Any) -> Tensor:
        return torch.get_rng_state()

    def set_state(state: Tensor, *_args: Any, **_kwargs: Any) -> None:
        torch.set_rng_state(state)

    import megatron.core.tensor_parallel.random as megatron_random

    replace(torch.cuda, "get_rng_state", get_state)
    replace(torch.cuda.random, "get_rng_state", get_state)
    replace(torch.cuda, "set_rng_state", set_state)
    replace(torch.cuda, "manual_seed", lambda seed: torch.default_generator.manual_seed(seed))
    replace(megatron_random, "_get_cuda_rng_state", get_state)
    replace(megatron_random, "_set_cuda_rng_state", set_state)

    class CpuStatesTracker(megatron_random.CudaRNGStatesTracker):
        @contextlib.contextmanager
        def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
            outer = torch.get_rng_state()
            torch.set_rng_state(self.states_[name])
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()
                torch.set_rng_state(outer)

    replace(megatron_random, "CudaRNGStatesTracker", CpuStatesTracker)


def _replace_collectives() -> None:
    import megatron.core.tensor_parallel.mappings as mappings
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def to_cpu(value: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        # Megatron converts split sizes to NumPy arrays only when it moves them from a GPU. Here they are on the CPU
        # already, and the collectives do not accept tensors as sizes.
        return value.numpy() if as_numpy and isinstance(value, Tensor) else value

    replace(moe_utils, "maybe_move_tensor_to_cpu", to_cpu)
    replace(token_dispatcher, "maybe_move_tensor_to_cpu", to_cpu)
    even_gather = mappings._gather_along_first_dim
    even_reduce_scatter = mappings._reduce_scatter_along_first_dim

    def gather(input_: Tensor, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False) -> Tensor:
        if output_split_sizes is None or group.size() == 1:
            return even_gather(input_, group, output_split_sizes, use_global_buffer)
        return _uneven_all_gather(input_, group, [int(size) for size in output_split_sizes])

    def reduce_scatter(
        input_: Tensor, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> Tensor:
        if input_split_sizes is None or group.size() == 1:
            return even_reduce_scatter(input_, group, input_split_sizes, use_global_buffer)
        summed = input_.contiguous().clone()
        dist.all_reduce(summed, group=group)
        return summed.split([int(size) for size in input_split_sizes])[group.rank()].contiguous()

    replace(mappings, "_gather_along_first_dim", gather)
    replace(mappings, "_reduce_scatter_along_first_dim", reduce_scatter)


def _uneven_all_gather(input_: Tensor, group: Any, sizes: list[int]) -> Tensor:
    """All-gathers parts of different sizes. gloo gathers only equal parts, so every part is padded to the largest."""
    padded = input_.new_zeros([max(sizes), *input_.shape[1:]])
    padded[: input_.shape[0]] = input_
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
