"""Templates in which roles must alternate, or which write white space before answers."""

from __future__ import annotations

from tools.chat_template_page import CALL, RESULT, USER, rendered, turns

MISTRAL = """\
{{- bos_token }}{%- set ns = namespace(index=0) %}
{%- for message in messages %}
    {%- if message.role != 'tool' and not message.tool_calls %}
        {%- if (message.role == 'user') != (ns.index % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{%- if tools %}{{ '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{ '[INST]' + message.content + '[/INST]' }}
    {%- elif message.role == 'tool' %}{{ '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}
    {%- elif message.tool_calls %}{{ '[TOOL_CALLS]' + (message.tool_calls | tojson) + eos_token }}
    {%- else %}{{ message.content + eos_token }}
    {%- endif %}
{%- endfor %}"""
"""As in Mistral 7B v0.3: calls and their results do not count as turns."""
GLM = """\
{%- for message in messages %}
{%- if message.role == 'assistant' %}{{ '<|assistant|>\\n' + message.content }}
{%- else %}{{ ('<|observation|>\\n' if message.role == 'tool' else '<|user|>\\n') + message.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
"""As in GLM-4: the policy samples the line break before its answer."""
ENDED = GLM.replace("message.content }}", "message.content + '<|end|>' }}")


def test_results_of_tools_follow_calls_where_a_template_lets_no_answer_follow_them_after_text():
    for step_wise in (False, True):
        turns(MISTRAL, step_wise=step_wise, tools=True)
    assert RESULT["content"] in rendered(MISTRAL, [USER, CALL, RESULT], tools=True)


def test_a_line_break_that_the_template_writes_before_an_answer_is_sampled_once():
    turns(ENDED, step_wise=False)
    for template in (GLM, ENDED):
        turns(template, step_wise=True)
