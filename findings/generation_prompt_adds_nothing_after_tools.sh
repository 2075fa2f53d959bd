#!/bin/bash
# trl 1.16.0 ships the chat templates of public models. In those of Gemma 4, `add_generation_prompt=True` adds nothing
# after the result of a tool, because the model's turn goes on: whoever looks for the assistant's marker at the end of
# the prompt finds the one before the call. In `gemma4_v5` the rendered answer follows this prompt directly. In
# `diffusion_gemma`, whose generation prompt is empty there too, the rendered answer begins with the header
# `<|turn>model\n`: a model that is trained on rendered conversations sees a header that its prompt never has.
#
# Seen: what the generation prompt adds after the tool's result, and what the rendered conversation then has before the
# answer `42`:
#
#     gemma4_v5         ''                          ''
#     diffusion_gemma   ''                          '<|turn>model\n'
#     qwen3             '<|im_start|>assistant\n'   '<think>\n\n</think>\n\n'
#
# Usage: bash generation_prompt_adds_nothing_after_tools.sh. Exits 1 if this changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q transformers==5.19.0 jinja2==3.1.6
"$folder/venv/bin/pip" install -q --no-deps --target "$folder/trl" trl==1.16.0
"$folder/venv/bin/python" - "$folder/trl/trl/chat_templates" <<'PYTHON'
import sys
from pathlib import Path

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

function = {"name": "add", "arguments": {"a": "12"}}
asked = [
    {"role": "user", "content": "12+30?"},
    {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "id": "call00001", "function": function}]},
    {"role": "tool", "content": "RESULT", "name": "add", "tool_call_id": "call00001"},
]
answered = [*asked, {"role": "assistant", "content": "42"}]
seen = {}
for name in ("gemma4_v5", "diffusion_gemma", "qwen3"):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), bos_token="<bos>", eos_token="<eos>")
    tokenizer.chat_template = Path(sys.argv[1], f"{name}.jinja").read_text()
    without, prompt = (
        tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=adds) for adds in (False, True)
    )
    whole = tokenizer.apply_chat_template(answered, tokenize=False)
    assert prompt.startswith(without) and whole.startswith(prompt)
    seen[name] = prompt[len(without) :], whole[len(prompt) :].partition("42")[0]
    print(name, seen[name])
sys.exit(
    seen["gemma4_v5"] != ("", "")
    or seen["diffusion_gemma"] != ("", "<|turn>model\n")
    or seen["qwen3"][0] != "<|im_start|>assistant\n"
)
PYTHON
