#!/bin/bash
# transformers 5.19.0: Gemma 2 selects sdpa by default, and sdpa ignores attn_logit_softcapping without a message,
# although the model's configuration sets it (50.0 by default). With scores near the cap, the default model's log-probs
# differ from those of attn_implementation="eager", in evaluation mode, on one sequence without padding.
# Not a rounding matter: without the cap both agree to 1e-5. gpt-oss, whose sinks sdpa cannot compute, is not affected,
# because transformers refuses sdpa for it.
# Seen: "cap None: sdpa, largest difference of log-probs 7.6e-06", "cap 50.0: sdpa, ... 8.7e-01".
set -euo pipefail
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q torch==2.13.0 transformers==5.19.0
cd "$dir"
HF_HUB_OFFLINE=1 "$dir/venv/bin/python" - <<'PY'
import copy

import torch
from transformers import AutoModelForCausalLM, Gemma2Config

differences = {}
for cap in (None, 50.0):
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, query_pre_attn_scalar=16, attn_logit_softcapping=cap, initializer_range=0.5,
    )
    assert cap is None or cap == Gemma2Config().attn_logit_softcapping
    default = AutoModelForCausalLM.from_config(copy.deepcopy(config)).eval()
    eager = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    eager.load_state_dict(default.state_dict())
    tokens = torch.arange(48)[None]
    with torch.no_grad():
        logprobs = [model(tokens).logits.log_softmax(-1) for model in (default, eager)]
    differences[cap] = float((logprobs[0] - logprobs[1]).abs().max())
    print(f"cap {cap}: {default.config._attn_implementation}, largest difference of log-probs {differences[cap]:.1e}")
assert differences[None] < 1e-4 and differences[50.0] > 0.05
PY
