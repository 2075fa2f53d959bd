#!/bin/bash
# transformers 5.19.0: `generate` looks for the end of a response only in generation_config.json. If that file exists but
# names no `eos_token_id`, the one in config.json is not used, nor is the tokenizer's: the response always runs to
# `max_new_tokens`, without a warning. Without the file, the one in config.json is used. So adding a
# generation_config.json that only sets a temperature or a padding token makes a model that stopped run on.
#
# The model below gives token 5 whatever it reads, and its config.json says "eos_token_id": 5. Seen:
#
#     no generation_config.json           1 token
#     {"eos_token_id": [0, 5]}            1 token
#     {"pad_token_id": 0}                 9 tokens
#     {"do_sample": false}                9 tokens
#
# Usage: bash generation_config_without_eos_never_stops.sh (installs torch and transformers). Exits 1 if this changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.19.0
"$folder/venv/bin/python" - "$folder/model" <<'PYTHON'
import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

model = Qwen2ForCausalLM(
    Qwen2Config(vocab_size=8, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                num_key_value_heads=2, tie_word_embeddings=False, eos_token_id=5)
)
with torch.no_grad():
    for weight in model.parameters():
        weight.zero_()
    model.model.embed_tokens.weight.fill_(1.0)
    model.model.norm.weight.fill_(1.0)
    model.lm_head.weight[5] = 5.0
model.save_pretrained(sys.argv[1])
assert json.loads(Path(sys.argv[1], "config.json").read_text())["eos_token_id"] == 5

file, lengths = Path(sys.argv[1], "generation_config.json"), []
for fields in (None, {"eos_token_id": [0, 5]}, {"pad_token_id": 0}, {"do_sample": False}):
    file.unlink(missing_ok=True) if fields is None else file.write_text(json.dumps(fields))
    loaded = AutoModelForCausalLM.from_pretrained(sys.argv[1])
    tokens = loaded.generate(torch.tensor([[1, 2]]), max_new_tokens=9, do_sample=False)
    lengths.append(tokens.shape[1] - 2)
    print(fields, lengths[-1])
sys.exit(lengths != [1, 1, 9, 9])
PYTHON
