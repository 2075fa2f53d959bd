#!/bin/bash
# transformers 5.19.0 with peft 0.21.2: a directory that has the whole, already merged weights (config.json,
# model.safetensors) and, left from the LoRA run, adapter_config.json and adapter_model.safetensors. A good guess is that
# AutoModelForCausalLM.from_pretrained loads config.json and model.safetensors and ignores the adapter. In fact it loads
# the weights and then adds the adapter on top of them, so a merged adapter counts twice. The class is a plain
# LlamaForCausalLM, the loading info is empty, and nothing is raised or warned of. save_pretrained then writes only the
# adapter, without config.json and weights.
# Seen: "loading info: {}", "logits differ from the weights' own by 1.5e-02", "equal to the adapter applied twice: True",
# "saved: ['adapter_config.json', 'adapter_model.safetensors', 'generation_config.json']"; without adapter_config.json 0.
set -euo pipefail
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q torch==2.13.0 transformers==5.19.0 peft==0.21.2
cd "$dir"
HF_HUB_OFFLINE=1 "$dir/venv/bin/python" - <<'PY'
import os
import shutil
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes)).save_pretrained("base")
model = get_peft_model(AutoModelForCausalLM.from_pretrained("base"), LoraConfig(r=2, target_modules=["q_proj"]))
with torch.no_grad():
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.fill_(0.5)
model.save_pretrained("run")
merged = model.merge_and_unload()
merged.save_pretrained("run")  # the whole weights, beside the adapter
shutil.copytree("run", "clean", ignore=shutil.ignore_patterns("adapter_*"))
tokens = torch.arange(8)[None]
logits = torch.no_grad()(lambda of: of.eval()(tokens).logits)
loaded, info = AutoModelForCausalLM.from_pretrained("run", output_loading_info=True)
difference = float((logits(loaded) - logits(merged)).abs().max())
clean = float((logits(AutoModelForCausalLM.from_pretrained("clean")) - logits(merged)).abs().max())
twice = merged.state_dict()
twice["model.layers.0.self_attn.q_proj.weight"] += 8 / 2 * torch.full((16, 2), 0.5) @ torch.full((2, 16), 0.5)
merged.load_state_dict(twice)
is_twice = torch.allclose(logits(loaded), logits(merged), atol=1e-5)
loaded.save_pretrained("saved")
saved = sorted(set(os.listdir("saved")) - {"README.md"})
print(type(loaded).__name__, "loading info:", {name: found for name, found in info.items() if found})
print(f"logits differ from the weights' own by {difference:.1e}; without adapter_config.json by {clean:.1e}")
print("equal to the adapter applied twice:", is_twice)
print("saved:", saved)
assert clean == 0 and difference > 1e-3 and is_twice and not any(info.values())
assert "model.safetensors" not in saved and "config.json" not in saved
PY
