#!/bin/bash
# peft 0.21.2 with transformers 5.19.0: an adapter saved for gate_proj, up_proj and down_proj of a mixture-of-experts
# model loads exactly if every layer is a mixture. If one layer is dense (Qwen3-MoE's mlp_only_layers, DeepSeek's first
# layers and shared experts), from_pretrained drops that layer's adapter: peft rewrites the three target_modules as
# target_parameters of the stacked experts (gate and up with twice the rank and alpha), and the names of the dense layer
# then match nothing. Nothing is raised, and the only warning (rank_pattern keys that match no module) comes both times.
# Seen: "all layers sparse: error 0.0e+00", "first layer dense: error 8.2e-01", and no dense adapter in the loaded model.
set -euo pipefail
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q torch==2.13.0 transformers==5.19.0 peft==0.21.2
cd "$dir"
HF_HUB_OFFLINE=1 "$dir/venv/bin/python" - <<'PY'
import warnings

import peft
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

warnings.simplefilter("ignore")
NAMES = ["gate_proj", "up_proj", "down_proj"]
errors = {}
for kind, dense in (("all layers sparse", []), ("first layer dense", [0])):
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=64)
    config = Qwen3MoeConfig(
        **sizes, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        mlp_only_layers=dense, initializer_range=0.1,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained("base")
    AutoModelForCausalLM.from_config(config).save_pretrained("merged")
    weights, adapter = load_file("base/model.safetensors"), {}
    for name in [name for name in weights if name.split(".")[-2] in NAMES]:
        rows, columns = weights[name].shape
        a, b = torch.randn(4, columns) * 0.1, torch.randn(rows, 4) * 0.1
        stem = "base_model.model." + name.removesuffix(".weight")
        adapter |= {f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": b}
        weights[name] = weights[name] + 2.0 * b @ a
    save_file(weights, "merged/model.safetensors", {"format": "pt"})
    peft.LoraConfig(r=4, lora_alpha=8, target_modules=NAMES, task_type="CAUSAL_LM").save_pretrained("adapter")
    save_file(adapter, "adapter/adapter_model.safetensors", {"format": "pt"})
    loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("base"), "adapter").eval()
    tokens = torch.arange(16)[None]
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained("merged").eval()(tokens).logits
        errors[kind] = float((loaded(tokens).logits - expected).abs().max())
    print(f"{kind}: error {errors[kind]:.1e}")
    print("  layers with adapters:", sorted({n.split(".lora_")[0] for n, _ in loaded.named_parameters() if "lora" in n}))
assert errors["all layers sparse"] < 1e-4 < 0.1 < errors["first layer dense"]
PY
