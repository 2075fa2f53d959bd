"""Megatron backends with one fix removed or one fault added in the ranks' processes, which a test must detect."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import attrs

from rl_core.interfaces import RankInfo, Worker, WorkerSpec
from rl_megatron.backend import MegatronBackend


@attrs.frozen(kw_only=True)
class ChangedBackend(MegatronBackend):
    """`MegatronBackend` whose ranks first call the function of this module that `change` names."""

    change: str

    def create_worker(self, spec: WorkerSpec, rank: RankInfo) -> Worker:
        globals()[self.change]()
        return super().create_worker(spec, rank)


@attrs.frozen(kw_only=True)
class UncheckedBackend(MegatronBackend):
    """`MegatronBackend` that accepts any model. Its ranks first call the function of this module named by `change`."""

    change: str = "_nothing"

    def validate(self, spec: WorkerSpec, world_size: int) -> None:
        pass

    def create_worker(self, spec: WorkerSpec, rank: RankInfo) -> Worker:
        self._prepare()
        return super().create_worker(spec, rank)

    def proof_worker(self, spec: WorkerSpec) -> Worker:
        self._prepare()
        return super().proof_worker(spec)

    def _prepare(self) -> None:
        from rl_megatron.model import chunks as model

        model.refuse = lambda *_: None
        globals()[self.change]()


def _nothing() -> None:
    pass


def leave_out_scatter() -> None:
    from rl_megatron.patches import fixes_bridge

    fixes_bridge.fix_scatter = _nothing


def leave_out_expert_gathering() -> None:
    from rl_megatron.patches import fixes_bridge

    fixes_bridge.fix_expert_gathering = _nothing


def leave_out_expert_names() -> None:
    from rl_megatron.patches import fixes_bridge

    fixes_bridge.fix_expert_names = _nothing


def leave_out_router_gating() -> None:
    from rl_megatron.patches import fixes_megatron

    fixes_megatron.fix_router_gating = _nothing


def leave_out_latent_attention() -> None:
    from rl_megatron.patches import fixes_megatron

    fixes_megatron.fix_latent_attention = _nothing


def leave_out_balancing_without_tokens() -> None:
    from rl_megatron.patches import fixes_megatron

    fixes_megatron.fix_balancing_without_tokens = _nothing


def leave_out_loading_of_torch_adam() -> None:
    from rl_megatron.patches import fixes_megatron

    fixes_megatron.fix_loading_of_torch_adam = _nothing


def leave_out_gradient_kernel_check() -> None:
    """Does not disable the fused gradient kernel, which Bridge enables for DeepSeek even if the kernel is missing."""
    from rl_megatron.model import chunks as model

    fields = model._provider_fields

    def without_it(*args):
        return {name: value for name, value in fields(*args).items() if name != "gradient_accumulation_fusion"}

    model._provider_fields = without_it


def use_transformer_engines_attention() -> None:
    """Builds layers as if Transformer Engine were installed. Its attention raises an error, as if it had no
    kernel."""
    from rl_megatron.model import layers

    block_spec, local = layers.get_gpt_decoder_block_spec, layers._local

    class WithoutKernel(layers.CoreAttention):
        def forward(self, *args, **kwargs):
            raise RuntimeError("no kernel of Transformer Engine")

    def engines(config, use_transformer_engine, vp_stage):
        assert use_transformer_engine
        block = block_spec(config, use_transformer_engine=False, vp_stage=vp_stage)
        specs = [local(spec) for spec in block.layer_specs]
        for spec in specs:
            spec.submodules.self_attention.submodules.core_attention = WithoutKernel
        return type(block)(layer_specs=specs, layer_norm=layers.RmsNorm)

    layers.get_gpt_decoder_block_spec = engines
    layers.HAS_TRANSFORMER_ENGINE = True


def use_fused_adam() -> None:
    """Makes Megatron use `FusedAdam`, as if Transformer Engine were installed."""
    import megatron.core.optimizer as optimizers
    from megatron.core.optimizer import distrib_optimizer

    from tests.megatron.fused_adam import FusedAdam

    optimizers.Adam, optimizers.USING_PYTORCH_OPTIMIZER = FusedAdam, False
    distrib_optimizer.Adam = FusedAdam
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_TE_OPTIMIZER = True


def use_fused_adam_without_steps() -> None:
    use_fused_adam()
    leave_out_steps()


def use_fused_adam_without_states() -> None:
    from rl_megatron.rank.optimizer import Optimizer

    use_fused_adam()
    Optimizer._make_states = lambda self: None


def write_to_two_bad_disks() -> None:
    """Rank 0 cannot write Megatron's common file into a directory named `full`; rank 1 cannot create a directory whose
    parent is named `lost`."""
    import torch.distributed as dist
    from megatron.core.dist_checkpointing.strategies.common import TorchCommonSaveStrategy

    mkdir, save_common = Path.mkdir, TorchCommonSaveStrategy.save_common

    def make(self, *args, **settings):
        if self.parent.name == "lost" and dist.is_initialized() and dist.get_rank() == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return mkdir(self, *args, **settings)

    def save(self, common, directory):
        if Path(directory).name == "full" and dist.get_rank() == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return save_common(self, common, directory)

    Path.mkdir, TorchCommonSaveStrategy.save_common = make, save


def leave_out_steps() -> None:
    """Does not restore the optimizer's number of steps."""
    from rl_megatron.rank.optimizer import Optimizer

    Optimizer.set_steps = lambda self, steps_done: None  # pyright: ignore[reportAttributeAccessIssue]


def mark_as_transformer_engine() -> None:
    """Gives weights the marks that Transformer Engine sets if it gets Megatron's arguments: experts are marked as not
    sharded, replicated weights as sharded over tensor ranks."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from rl_megatron.model.linear import ReplicatedLinear
    from rl_megatron.rank import worker

    build = worker.build_chunks

    def marked(*args):
        chunks = build(*args)
        for module in [module for chunk in chunks for module in chunk.modules()]:
            if isinstance(module, ReplicatedLinear):
                module.parallel_mode, module.weight.tensor_model_parallel = None, True  # pyright: ignore
            if isinstance(module, MoELayer):
                for parameter in module.experts.parameters():
                    parameter.tensor_model_parallel = False  # pyright: ignore
        return chunks

    worker.build_chunks = marked


def keep_transformer_engines_marks() -> None:
    from rl_megatron.rank import worker

    mark_as_transformer_engine()
    worker.mark_shards = lambda *_: None


def leave_out_rotary_base() -> None:
    from rl_megatron.model import chunks as model

    model.rotary_fields = lambda config, is_latent: {}


def leave_out_frequencies() -> None:
    from rl_megatron.model import chunks as model

    model.set_frequencies = lambda models, config: None


def leave_out_rotary() -> None:
    """Leaves the rotary embedding to Bridge and Megatron, except for its base."""
    from rl_megatron.model import chunks as model

    model.rotary_fields = lambda config, is_latent: {"rotary_base": config.rope_parameters["rope_theta"]}
    leave_out_frequencies()


def leave_out_group_scores() -> None:
    """Uses Megatron's own choice of experts."""
    from megatron.core.transformer.moe.moe_utils import group_limited_topk

    from rl_megatron.rank import router_replay

    def megatrons(scores_SE, count, *, num_groups, best_groups, summed_per_group):
        if not best_groups:
            return scores_SE.topk(count, dim=1).indices
        return group_limited_topk(scores_SE, count, *scores_SE.shape, num_groups, best_groups)[1]

    router_replay.best_experts = megatrons


def recompute_by_own_choice() -> None:
    """During recomputation, routers choose experts again instead of repeating the choices of the forward pass."""
    from rl_megatron.rank.router_replay import RouterChoices

    choose = RouterChoices.get_replay_topk

    def choose_again(self, scores, topk, *groups, **settings):
        if not self.in_schedule or self.current is not None:
            return choose(self, scores, topk, *groups, **settings)
        self.kept.popleft()
        return scores.topk(topk, dim=1)

    RouterChoices.get_replay_topk = choose_again


def count_layers_within_chunks() -> None:
    """Routers read the wrong layer's routes: they take a layer's index within its model chunk for its index in the
    model."""
    _count_layers(lambda chunks, choices: next(of.index(choices) for of in chunks if choices in of))


def count_layers_with_experts() -> None:
    """Routers read the wrong layer's routes: they skip dense layers when they count."""
    _count_layers(lambda chunks, choices: choices.layer - 1)


def _count_layers(layer_of) -> None:
    from rl_megatron.rank.router_replay import RoutedChunks

    make = RoutedChunks.__init__

    def miscounted(self, *args, **settings) -> None:
        make(self, *args, **settings)
        self.layers = [layer_of(list(self._by_chunk.values()), choices) for choices in self._all]

    RoutedChunks.__init__ = miscounted


def declare_layers_within_chunks() -> None:
    """Ranks request the wrong layers' routes: they use layer indices within each model chunk."""
    from rl_megatron.rank.worker import MegatronWorker

    MegatronWorker.route_layers = lambda self: sorted(
        {place for of in self.routing._chunks._by_chunk.values() for place in range(len(of))}
    )


def leave_out_latent_norm() -> None:
    from rl_megatron.model import layers

    layers.LatentNorm = layers.RmsNorm


def leave_out_model_fields() -> None:
    from rl_megatron.model import chunks as model

    model._model_fields = lambda config: {}


def leave_out_initialisation() -> None:
    """Weights lack Megatron's marks that say which of them are split over tensor ranks."""
    from rl_megatron.model import chunks as model

    fields = model._provider_fields
    model._provider_fields = lambda *args: fields(*args) | {"perform_initialization": False}


def leave_out_padding_token() -> None:
    from rl_megatron.model import chunks as model

    model._exclude_padding_token = lambda chunks, pad_token_id: None


def leave_out_norm_mark() -> None:
    from rl_megatron.model.norm import RmsNorm

    make = RmsNorm.__init__

    def without_mark(self, *args, **kwargs) -> None:
        make(self, *args, **kwargs)
        del self.weight.sequence_parallel

    RmsNorm.__init__ = without_mark


def split_contiguously() -> None:
    """Context ranks take contiguous parts of each sequence, although attention expects mirrored chunks."""
    from itertools import pairwise

    import numpy as np

    from rl_megatron.rank import micro_batch

    def contiguous(boundaries, rank: int, size: int):
        parts = [np.arange(a, b).reshape(size, -1)[rank] for a, b in pairwise(boundaries)]
        return np.concatenate(parts)

    micro_batch.context_positions = contiguous
