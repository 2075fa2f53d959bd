#!/bin/bash
# megatron-core 0.16.1 with calculate_per_token_loss=True: the losses of a mixture's routers should add the gradient of
# (loss · tokens), which the trainer divides by the number of tokens. On the same 8 tokens, split over two tensor or
# context ranks, the z-loss adds half of it. So does aux_loss, but not if a padding mask is passed, even one that masks
# nothing: reduce_from_tensor_model_parallel_region sums the counts in place, so each rank's token count is the group's.
# seq_aux_loss of a micro-batch of two sequences adds half of what two micro-batches of one sequence add.
# Seen: "z-loss 0.5000, aux_loss 0.5000, aux_loss with an empty mask 1.0000, seq_aux_loss of two rows 0.5000".
set -euo pipefail
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q torch==2.13.0 numpy==2.3.5 megatron-core==0.16.1
cat > "$dir/losses.py" <<'PY'
import sys
from types import SimpleNamespace
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

LOGITS_TE = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
def gradient(logits_TE, group, kind, rows=1, z=None, mask=False):
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=1, num_moe_experts=4, calculate_per_token_loss=True,
        moe_router_load_balancing_type=kind, moe_aux_loss_coeff=0.1, moe_z_loss_coeff=z, add_bias_linear=False,
    )
    router = TopKRouter(config, SimpleNamespace(tp=group, cp=group, tp_cp=group, tp_dp_cp=group))
    router.set_layer_number(1)
    MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(1.0))
    own_TE = logits_TE.clone().requires_grad_()
    logits_SBE = own_TE.view(rows, -1, 4).transpose(0, 1).contiguous()  # sequences are rows of the micro-batch
    mask_SB = torch.zeros(logits_SBE.shape[:2], dtype=torch.bool) if mask else None
    (router.routing(logits_SBE, padding_mask=mask_SB)[0] * 0.0).sum().backward()
    return own_TE.grad
def main(rank, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    both, alone = dist.group.WORLD, [dist.new_group([0]), dist.new_group([1])][rank]
    part = slice(4 * rank, 4 * rank + 4)
    ratios = {}
    for name, given in (("z-loss", ("none", 1, 0.1)), ("aux", ("aux_loss",)), ("masked", ("aux_loss", 1, None, True))):
        whole, split = gradient(LOGITS_TE, alone, *given)[part], gradient(LOGITS_TE[part], both, *given)
        ratios[name] = float(split.norm() / whole.norm())
    apart = torch.cat([gradient(row_TE, alone, "seq_aux_loss") for row_TE in LOGITS_TE.chunk(2)])
    ratios["two rows"] = float(gradient(LOGITS_TE, alone, "seq_aux_loss", 2).norm() / apart.norm())
    text = "z-loss {:.4f}, aux_loss {:.4f}, aux_loss with an empty mask {:.4f}, seq_aux_loss of two rows {:.4f}"
    print(text.format(*ratios.values()))
    assert [round(ratio, 3) for ratio in ratios.values()] == [0.5, 0.5, 1.0, 0.5]
if __name__ == "__main__":
    torch.multiprocessing.spawn(main, (sys.argv[1],), nprocs=2)
PY
TORCHDYNAMO_DISABLE=1 "$dir/venv/bin/python" -W ignore "$dir/losses.py" "$dir/store"
