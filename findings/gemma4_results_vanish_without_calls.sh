#!/bin/bash
# Gemma 4's chat templates in the wheel of trl 1.16.0 (successive revisions of google/gemma-4-E2B-it), rendered by
# transformers 5.19.0: a tool's result after an assistant's message whose call stands in its text, as agents that parse
# calls themselves keep it. A good guess is that the result is written (as by Qwen's, Llama's and GLM's templates) or an
# error raised (as by gpt-oss's). In fact it vanishes silently in all revisions but the second, which wrote results as
# turns of their own; the others write them only while rendering a message with `tool_calls`.
# Seen: gemma4 vanishes, gemma4_v2 written, gemma4_v3 vanishes, gemma4_v4 vanishes, gemma4_v5 vanishes; with
# `tool_calls` in the message: written by all.
set -euo pipefail
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q transformers==5.19.0 jinja2==3.1.6
"$dir/venv/bin/pip" download -q --no-deps -d "$dir" trl==1.16.0
cd "$dir"
"$dir/venv/bin/python" - <<'PY'
import glob, zipfile
from transformers.utils.chat_template_utils import render_jinja_template
wheel = zipfile.ZipFile(glob.glob("trl-*.whl")[0])
call = {"type": "function", "id": "c1", "function": {"name": "add", "arguments": {"a": 1}}}

def state(name, **said):
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", **said}]
    messages.append({"role": "tool", "name": "add", "tool_call_id": "c1", "content": "forty-two"})
    template = wheel.read(f"trl/chat_templates/{name}.jinja").decode()
    texts, _ = render_jinja_template([messages], chat_template=template, bos_token="<bos>", add_generation_prompt=True)
    return "written" if "forty-two" in texts[0] else "vanishes"

found = {}
for name in ("gemma4", "gemma4_v2", "gemma4_v3", "gemma4_v4", "gemma4_v5"):
    found[name] = state(name, content="add(a=1)"), state(name, content="", tool_calls=[call])
    print(f"{name:10} after text: {found[name][0]:9} after tool_calls: {found[name][1]}")
assert [one for one, _ in found.values()] == ["vanishes", "written", "vanishes", "vanishes", "vanishes"], found
assert {one for _, one in found.values()} == {"written"}, found
PY
