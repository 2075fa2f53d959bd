#!/bin/bash
# Chat templates in the wheel of trl 1.16.0, rendered by transformers 5.19.0: an assistant's message that only calls a
# function. OpenAI writes `content: null` and arguments as JSON text. A good guess is that null, "" and no content mean
# the same to a template, and that a mapping is the safe form of the arguments. In fact no form suits all templates:
# deepseek_r1_distill shows the call only for null content and text (with "" the call silently vanishes), deepseekv3
# only for text, qwen2_5 encodes text twice without an error, and glm4moe writes the word None for null content.
# Seen (rows: template; columns: "" and mapping, "" and text, null and mapping, null and text):
#   deepseek_r1_distill  dropped  dropped        TypeError  shown
#   deepseekv3           TypeError  shown        TypeError  shown
#   glm4moe              shown    UndefinedError writes None  UndefinedError
#   qwen2_5              shown    encoded twice  shown      encoded twice
set -euo pipefail
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q transformers==5.19.0 jinja2==3.1.6
"$dir/venv/bin/pip" download -q --no-deps -d "$dir" trl==1.16.0
cd "$dir"
"$dir/venv/bin/python" - <<'PY'
import glob, json, zipfile
from transformers.utils.chat_template_utils import render_jinja_template
wheel = zipfile.ZipFile(glob.glob("trl-*.whl")[0])

def form(name, content, arguments):
    call = {"type": "function", "id": "call00001", "function": {"name": "add", "arguments": arguments}}
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": content, "tool_calls": [call]}]
    template = wheel.read(f"trl/chat_templates/{name}.jinja").decode()
    try:
        (text,), _ = render_jinja_template([messages], chat_template=template, bos_token="<s>", eos_token="</s>")
    except Exception as error:
        return type(error).__name__
    if "\nNone\n" in text:
        return "writes None"
    if "add" not in text:
        return "dropped"
    return "encoded twice" if '\\"' in text else "shown"
found = {}
given = {"word": "seventeen"}
for name in ("deepseek_r1_distill", "deepseekv3", "glm4moe", "qwen2_5"):
    found[name] = [form(name, content, arguments) for content in ("", None) for arguments in (given, json.dumps(given))]
    print(f"{name:20}", *(f"{one:15}" for one in found[name]))
assert found == {
    "deepseek_r1_distill": ["dropped", "dropped", "TypeError", "shown"],
    "deepseekv3": ["TypeError", "shown", "TypeError", "shown"],
    "glm4moe": ["shown", "UndefinedError", "writes None", "UndefinedError"],
    "qwen2_5": ["shown", "encoded twice", "shown", "encoded twice"],
}
assert not any(all(forms[column] == "shown" for forms in found.values()) for column in range(4))
PY
