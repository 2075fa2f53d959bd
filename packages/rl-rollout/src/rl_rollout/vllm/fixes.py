"""Works around bugs of vLLM and tqdm: in weight reloads, in seeds and AMX on CPUs, in adapters, and in shared memory.

Every worker calls `apply` before it loads its model, and `repack_tied_heads_on_cpu` after every reload. The three fixes
for shared memory are applied in all processes that a server starts (`orphans.end_with_parent`). The docstring of each
fix names the version and the bug, the tests that show the bug, and when to remove the fix. A fix raises an error if
vLLM no longer has the function that it wraps.
"""

from __future__ import annotations

import functools
import logging
import threading
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from rl_core.errors import WeightSyncError

logger = logging.getLogger(__name__)

_MARK = "_rl_fixed"


def apply() -> None:
    """Applies the fixes that a worker needs before it loads its model. A second call changes nothing."""
    repack_moe_experts_on_cpu()
    rewind_generators_on_cpu()
    keep_adapters_off_vocabularies()
    return_kept_tokens()
    request_amx()


def repack_moe_experts_on_cpu() -> None:
    """Makes every reload on CPU pack the experts of a Mixture of Experts again.

    vllm 0.30.0, fused_moe/unquantized_fused_moe_method.py: on CPU every reload leaves the old experts in place. The CPU
    kernel computes with a packed copy of the experts, which `_setup_kernel` makes only on the first load. So a reload
    reports success, but the log-probs are wrong by several nats. Remove the fix when its test fails:
    tests/rollout/vllm/test_weights.py::test_five_syncs_of_a_moe_model_pass_and_the_proof_fails_without_the_moe_fix.
    """
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    original = getattr(UnquantizedFusedMoEMethod, "_setup_kernel", None)
    if original is None:
        raise WeightSyncError(
            "this version of vLLM has no UnquantizedFusedMoEMethod._setup_kernel, so it is unknown whether it packs "
            "MoE experts again when weights are reloaded; use vllm 0.30"
        )
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def setup_kernel(self: Any, layer: Any, w13: Any, w2: Any) -> None:
        is_reload = self.moe_kernel is not None
        original(self, layer, w13, w2)
        if is_reload and self.unquantized_backend == UnquantizedMoeBackend.CPU:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    setattr(setup_kernel, _MARK, True)
    UnquantizedFusedMoEMethod._setup_kernel = setup_kernel


def repack_tied_heads_on_cpu(model: Any) -> None:
    """Packs a tied output layer again on CPU; call this after every reload.

    vllm 0.30.0, model_loader/reload: on CPU every reload leaves a tied output layer with the old weights. The layer
    shares the embedding's tensor, so no weight arrives for it, and a reload skips it. But the CPU kernel computes with
    a packed copy, made only on the first load. Remove the fix when this test, which uses a tied model, passes without
    it: tests/rollout/vllm/test_server_conformance.py::TestVLLMServer::test_new_weights_are_served_and_named.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    layers: list[Any] = [layer for layer in model.modules() if isinstance(layer, VocabParallelEmbedding)]
    heads: list[Any] = [layer for layer in layers if isinstance(layer, ParallelLMHead)]
    embeddings = {layer.weight.data_ptr() for layer in layers if layer not in heads}
    for head in heads:
        if head.weight.data_ptr() in embeddings:
            head.quant_method.process_weights_after_loading(head)


def rewind_generators_on_cpu() -> None:
    """Makes seeded requests work on CPU if their prompts are computed in several steps.

    vllm 0.30.0, v1/worker/gpu_model_runner.py: on CPU a seeded request whose prompt takes two steps kills the engine.
    vLLM discards a token sampled after only a part of the prompt, and then rewinds the request's generator by an offset
    that only CUDA generators have. The fix restores the generator's earlier state instead. Remove it when this test
    passes without it: tests/rollout/vllm/test_client.py::test_prompts_that_take_several_steps_keep_their_seeds.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    sample, keep_books = CPUModelRunner._sample, CPUModelRunner._bookkeeping_sync
    if hasattr(sample, _MARK):
        return

    def has_part_of_prompt(self: Any, row: int) -> bool:
        return bool(self.discard_request_mask.np[row])

    @functools.wraps(sample)
    def sample_and_rewind(self: Any, logits: Any, spec_decode_metadata: Any) -> Any:
        generators = self.input_batch.generators.items()
        before = [(g, g.get_state()) for row, g in generators if has_part_of_prompt(self, row)]
        sampled = sample(self, logits, spec_decode_metadata)
        for generator, state in before:
            generator.set_state(state)
        return sampled

    @functools.wraps(keep_books)
    def keep_books_without_rewinding(self: Any, *args: Any, **kwargs: Any) -> Any:
        generators = self.input_batch.generators
        self.input_batch.generators = {row: g for row, g in generators.items() if not has_part_of_prompt(self, row)}
        try:
            return keep_books(self, *args, **kwargs)
        finally:
            self.input_batch.generators = generators

    setattr(sample_and_rewind, _MARK, True)
    CPUModelRunner._sample = sample_and_rewind
    CPUModelRunner._bookkeeping_sync = keep_books_without_rewinding


def keep_adapters_off_vocabularies() -> None:
    """Disables adapters on output layers and embeddings, where no trainer here puts them.

    vllm 0.30.0, lora/layers/logits_processor.py: an engine with adapters dies if it scores two prompts in one step. The
    output layer's code for adapters expects one row per sampled token, but for prompt log-probs gets one per prompt
    token. On GPUs, where the bug does not occur, the fix saves memory and two matrix products per token. Remove the fix
    when tests/rollout/vllm/test_adapters.py, which scores several sequences, passes without it.
    """
    from vllm.lora import model_manager

    name = "get_supported_lora_modules"
    original = getattr(model_manager, name, None)
    if original is None:
        raise WeightSyncError(
            "this version of vLLM has no lora.model_manager.get_supported_lora_modules, so it is unknown whether its "
            "output layer with adapters scores prompts; use vllm 0.30"
        )
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def supported_modules(model: Any) -> list[str]:
        vocabularies = [getattr(module, "embedding_modules", None) or () for module in model.modules()]
        return [name for name in original(model) if not any(name in names for names in vocabularies)]

    setattr(supported_modules, _MARK, True)
    setattr(model_manager, name, supported_modules)


def return_kept_tokens() -> None:
    """Makes an engine with `return_sampling_mask` return the ids that top-p, top-k and min-p kept, on CPU too, and no
    ids if they kept all.

    vllm 0.30.0: the CPU's model runner never fills `ModelRunnerOutput.sampling_masks`; only Model Runner V2, which has
    no CPU version, does. Everything behind it (scheduler, output processor) is the same for both. Model Runner V2
    returns the whole vocabulary, 600 kB per token of a model with 151,936 ids, for requests that are not truncated,
    such as those of a greedy evaluation. Remove the first part of the fix when this test passes without it, and the
    second part when vLLM omits whole vocabularies:
    tests/rollout/vllm/test_server_conformance.py::TestVLLMServer::test_kept_tokens_are_those_that_the_filters_keep.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        _collect_kept_tokens_on_cpu()
    else:
        _omit_whole_vocabularies()


def allow_sampling_masks_on_cpu() -> None:
    """Makes the checks of vLLM's configuration accept `return_sampling_mask` on CPU, where `return_kept_tokens`
    implements it. Its other checks (no speculative decoding, for example) stay.

    vllm 0.30.0, config/vllm.py: `return_sampling_mask` requires Model Runner V2. Remove the fix with the first part of
    `return_kept_tokens`.
    """
    from vllm.config import VllmConfig
    from vllm.platforms import current_platform

    original = VllmConfig._verify_sampling_replay_config
    if not current_platform.is_cpu() or hasattr(original, _MARK):
        return

    class AsV2:
        use_v2_model_runner = True

        def __init__(self, config: Any) -> None:
            self._config = config

        def __getattr__(self, name: str) -> Any:
            return getattr(self._config, name)

    @functools.wraps(original)
    def verify(self: Any) -> None:
        original(cast(Any, AsV2(self)))

    setattr(verify, _MARK, True)
    VllmConfig._verify_sampling_replay_config = verify


def _collect_kept_tokens_on_cpu() -> None:
    import numpy as np
    from vllm.v1.outputs import SamplingMaskLists
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    runner: Any = CPUModelRunner
    sample, sample_tokens = Sampler.sample, runner.sample_tokens
    if hasattr(sample, _MARK):
        return

    @functools.wraps(sample)
    def sample_and_note(self: Any, *args: Any, **kwargs: Any) -> Any:
        sampled, processed_logprobs = sample(self, *args, **kwargs)
        self.rl_logprobs = processed_logprobs
        return sampled, processed_logprobs

    @functools.wraps(sample_tokens)
    def sample_tokens_with_masks(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.sampler.rl_logprobs = None
        output = sample_tokens(self, *args, **kwargs)
        logprobs_BV = self.sampler.rl_logprobs
        if self.model_config.return_sampling_mask and logprobs_BV is not None:
            is_kept_BV = logprobs_BV > float("-inf")
            is_kept_BV[is_kept_BV.all(dim=-1)] = False
            ends_B = is_kept_BV.sum(dim=-1).cumsum(0).numpy()
            ids = is_kept_BV.nonzero()[:, 1].numpy().astype(np.int32)
            masks = SamplingMaskLists(ids, np.concatenate([[0], ends_B]))
            # With asynchronous scheduling, the output is a wrapper that returns this record later.
            getattr(output, "_model_runner_output", output).sampling_masks = masks
        return output

    setattr(sample_and_note, _MARK, True)
    Sampler.sample = sample_and_note
    runner.sample_tokens = sample_tokens_with_masks


def _omit_whole_vocabularies() -> None:
    import torch
    from vllm.v1.worker.gpu.sample.output import SamplingMaskTensors

    original: Any = SamplingMaskTensors.tolists
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def lists_without_whole(self: Any) -> Any:
        is_whole_B = self.counts == self.vocab_size
        return original(self._replace(counts=torch.where(is_whole_B, 0, self.counts)))

    setattr(lists_without_whole, _MARK, True)
    SamplingMaskTensors.tolists = lists_without_whole


def request_amx() -> None:
    """Requests the use of AMX for this process, and logs a warning if the operating system refuses.

    vllm 0.30.0, v1/attention/backends/cpu_attn.py: a bfloat16 model on a CPU with AMX kills its worker with SIGILL.
    Linux gives a process the tile registers on request (arch_prctl, ARCH_REQ_XCOMP_PERM). vLLM's own kernels never
    request them. These kernels work only if a oneDNN kernel that requests the registers ran before, which depends on
    the model's sizes. Remove the fix when this test passes without it on a CPU with AMX:
    tests/rollout/vllm/test_router_replay.py::test_replay_brings_the_trainer_closer_to_a_bf16_engine.
    """
    import torch

    if torch.cpu._is_amx_tile_supported() and not torch.cpu._init_amx():
        logger.warning(
            "this CPU has AMX, but the operating system does not let this process use it: an engine with "
            "generator.inference_engine.model_dtype=bfloat16 ends at its first request; use float32"
        )


def unlink_message_queues() -> None:
    """Makes the writer of a message queue unlink its shared memory as soon as all readers have mapped it.

    vllm 0.30.0, distributed/device_communicators/shm_broadcast.py: an engine that dies leaves 160 MB in /dev/shm. The
    writer of a queue between core and workers unlinks the queue's segment in `__del__`, which does not run if the
    process is killed or ended by a signal. With the fix, the kernel frees the segment when the last process that uses
    it ends. Remove the fix when tests/rollout/vllm/test_faults.py passes without it.
    """
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    original: Any = MessageQueue.wait_until_ready
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def wait_and_unlink(self: Any) -> None:
        original(self)
        if self._is_writer and self.buffer is not None and self.buffer.is_creator:
            self.buffer.shared_memory.unlink()
            self.buffer.is_creator = False  # so that `__del__` does not unlink it again

    setattr(wait_and_unlink, _MARK, True)
    MessageQueue.wait_until_ready = wait_and_unlink


def lock_progress_bars_by_threads() -> None:
    """Gives the progress bars of tqdm a lock for threads instead of one for processes.

    tqdm 4: an engine that dies leaves a semaphore of 32 bytes in /dev/shm for each process that showed a bar. The first
    bar creates a lock for several processes. In a spawned process only exit handlers remove the lock's name, and a
    killed process runs none. No other process writes to an engine process's bars, so a lock for threads is enough.
    Remove the fix when tests/rollout/vllm/test_faults.py passes without it.
    """
    import_module("tqdm").tqdm.set_lock(threading.RLock())  # tqdm is installed, because vllm depends on it


def unlink_shared_memory_on_cpu() -> None:
    """Makes a rank on CPU unlink its shared memory as soon as all other ranks have mapped it.

    vllm 0.30.0, device_communicators/cpu_communicator.py: ranks ended by a signal leave 4 MB each in /dev/shm. Remove
    the fix when tests/rollout/vllm/test_faults.py, which ends a tensor-parallel engine, passes without it.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    original: Any = _CPUSHMDistributed._init_cpu_shm
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def init_and_unlink(self: Any) -> Any:
        handle = original(self)
        Path("/dev/shm", f"{self.group_name}_{self.communicator.rank}").unlink(missing_ok=True)
        return handle

    setattr(init_and_unlink, _MARK, True)
    _CPUSHMDistributed._init_cpu_shm = init_and_unlink
