#!/bin/bash
# Chat templates in the wheel of trl 1.16.0 (those of the published models), rendered by transformers 5.19.0: an
# assistant's message with text and two calls, which OpenAI's format allows. A good guess is that a template either
# renders all of it or raises an error (as Llama 3.1's does for two calls). In fact text or a call vanishes silently:
# Llama 3.1 and Muse Glimmer drop the text beside a call, and gpt-oss writes only the first of two calls.
# Seen (text and one call; two calls without text):
#   qwen2_5        text kept     both calls
#   llama3_1       text dropped  raises TemplateError
#   gptoss         text kept     second call dropped
#   muse_glimmer   text dropped  both calls
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

def rendered(name, content, *names):
    calls = [{"type": "function", "id": f"c{n}", "function": {"name": n, "arguments": {"a": 1}}} for n in names]
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": content, "tool_calls": calls}]
    template = wheel.read(f"trl/chat_templates/{name}.jinja").decode()
    try:
        return render_jinja_template([messages], chat_template=template, bos_token="<s>", eos_token="</s>")[0][0]
    except Exception as error:
        return f"raises {type(error).__name__}"

found = {}
for name in ("qwen2_5", "llama3_1", "gptoss", "muse_glimmer"):
    text, two = rendered(name, "I will look it up.", "alpha"), rendered(name, "", "alpha", "beta")
    kept = "text kept" if "I will look it up." in text else "text dropped"
    both = two if two.startswith("raises") else "both calls" if "beta" in two else "second call dropped"
    found[name] = (kept, both)
    print(f"{name:14} {kept:13} {both}")
assert found == {
    "qwen2_5": ("text kept", "both calls"),
    "llama3_1": ("text dropped", "raises TemplateError"),
    "gptoss": ("text kept", "second call dropped"),
    "muse_glimmer": ("text dropped", "both calls"),
}, found
PY
