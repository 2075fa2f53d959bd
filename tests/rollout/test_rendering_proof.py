"""Whatever a chat template drops, repeats or changes is an error before the run that names it."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from rl_core.errors import ConfigError, DataError, RLError
from rl_core.trainer.before.conversation_proof import require_proved
from rl_core.trainer.before.preflight import NoSampler
from rl_core.trainer.groups import DataRow
from rl_environments.tools import ToolEnvironment, tool
from rl_rollout.chat import TokenCodec
from rl_rollout.conversation import start_history
from rl_rollout.dataset_generator import DatasetGenerator
from rl_rollout.episode import Limits
from rl_rollout.generator import EnvironmentGenerator, Episodes
from rl_rollout.supervised_tokens import RowEncoder, Supervised
from rl_rollout.turn_tokens import TurnTokens
from tests.rollout.chat_templates import CHATML, TOOL_CHATML
from tools.chat_template_page import TOOL
from tools.shipped_templates import shipped_templates, tokenizer_of

TEMPLATES = shipped_templates()
USER = {"role": "user", "content": "How long is it?"}
ANSWER = {"role": "assistant", "content": "It is long."}
THOUGHTFUL = {"role": "assistant", "content": "<think>\nHow long?\n</think>\n\nIt is long."}
RESULT = {"role": "tool", "content": "41 feet", "name": "convert", "tool_call_id": "call00001"}


def calling(*arguments: Mapping[str, Any], content: str = "") -> dict[str, Any]:
    calls = [
        {"type": "function", "id": f"call0000{number}", "function": {"name": "convert", "arguments": dict(each)}}
        for number, each in enumerate(arguments, start=1)
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls}


CALL = calling({"length": 12.5, "unit": "metre"})


def codec_of(template: str, **settings: Any) -> TokenCodec:
    return TokenCodec(tokenizer_of(TEMPLATES.get(template, template)), chat_template_kwargs=settings)


def encoder_of(template: str, *, turns: Any = "all", **settings: Any) -> RowEncoder:
    return encoder_with(codec_of(template, **settings), turns)


def encoder_with(codec: TokenCodec, turns: Any = "all") -> RowEncoder:
    return RowEncoder(
        codec,
        response_key="completion",
        trained_roles=("assistant",),
        trained_turns=turns,
        scored_at_end=False,
    )


def trained_text(template: str, sequence: Supervised) -> str:
    """The whole text of a sequence, with the trained parts in ⟦⟧."""
    tokenizer, text, was_trained = codec_of(template).tokenizer, "", False
    pieces: list[tuple[bool, list[int]]] = []
    for token, is_trained in zip(sequence.tokens, sequence.trained, strict=True):
        if not pieces or is_trained != was_trained:
            pieces.append((is_trained, []))
        pieces[-1][1].append(token)
        was_trained = is_trained
    for is_trained, tokens in pieces:
        decoded = tokenizer.decode(tokens)
        text += f"⟦{decoded}⟧" if is_trained else decoded
    return text


def changed(template: str, old: str, new: str) -> str:
    assert old in template
    return template.replace(old, new)


# --- planted faults ---------------------------------------------------------------------------------------------------

_CALLS = "{{- '<tool_call>' + (call.function | tojson) + '</tool_call>' }}"
_EACH = (
    "{{- '<tool_call>' + call.function.name }}{%- for name, value in call.function.arguments | items %}"
    "{%- if CONDITION %}{{ ' ' + name + '=' + (value | tojson) }}{% endif %}{% endfor %}{{- '</tool_call>' }}"
)
EACH = changed(TOOL_CHATML, _CALLS, _EACH.replace("CONDITION", "true"))
_CONTENT = "(message.content or '')"
FAULTS = {
    "drops one argument of one call": (changed(EACH, "if true", "if name != 'unit'"), "unit"),
    "drops the last argument": (changed(EACH, "if true", "if not loop.last or loop.first"), "unit"),
    "drops an argument by its value": (changed(EACH, "if true", "if value != 'metre'"), "unit"),
    "drops values that are false": (changed(EACH, "if true", "if value"), "exact"),
    "drops the second call": (changed(TOOL_CHATML, "in message.tool_calls", "in message.tool_calls[:1]"), "message 2"),
    "drops the names of arguments": (changed(EACH, "' ' + name + '=' +", "' ' +"), "the name of the argument"),
    "writes calls twice": (changed(TOOL_CHATML, _CALLS, _CALLS + _CALLS), "repeats"),
    "writes calls in the other order": (
        changed(TOOL_CHATML, "in message.tool_calls", "in message.tool_calls | reverse"),
        "behind a later one, the name of the call",
    ),
    "writes messages in the other order": (
        changed(TOOL_CHATML, "in messages[1 if has_system else 0:]", "in messages | reverse"),
        "behind a later one, ",
    ),
    "lowers the case of answers": (
        changed(TOOL_CHATML, _CONTENT, "(message.content | lower if message.role == 'assistant' else message.content)"),
        "changes the content of message 2 (assistant)",
    ),
    "escapes answers for HTML": (
        changed(TOOL_CHATML, _CONTENT, "(message.content | e if message.role == 'assistant' else message.content)"),
        "changes the content of message 4 (assistant)",
    ),
    "drops the content beside calls": (
        changed(TOOL_CHATML, _CONTENT, "('' if message.tool_calls else message.content)"),
        "the content of message 2",
    ),
    "shortens contents": (changed(TOOL_CHATML, _CONTENT, "(message.content or '')[:9]"), "the content of message"),
    "drops results": (changed(TOOL_CHATML, "'\\n' + message.content + '<|im_end|>\\n'", "'<|im_end|>\\n'"), "(tool)"),
    "escapes for HTML": (changed(TOOL_CHATML, _CONTENT, "(message.content or '') | e"), "the content of message"),
    "drops the second system message": (
        changed(
            TOOL_CHATML,
            "{%- else %}\n        {{- '<|im_start|>' + message.role",
            "{%- elif message.role != 'system' %}\n        {{- '<|im_start|>' + message.role",
        ),
        "(system)",
    ),
    "drops descriptions": (changed(TOOL_CHATML, "(tool | tojson)", "tool.function.name"), "description of the tool"),
    "drops one parameter": (
        changed(
            TOOL_CHATML,
            "(tool | tojson)",
            "tool.function.name + tool.function.description + (tool.function.parameters.properties['length'] | tojson)"
            " + 'length'",
        ),
        "the parameter",
    ),
}  # fmt: skip
CONVERSATION = [
    {"role": "user", "content": "Is 12 < 30 & true?"},
    calling({"length": 12.5, "exact": False, "unit": "metre"}, {"length": 1, "unit": "foot"}, content="I convert."),
    RESULT,
    {"role": "assistant", "content": "It is 41 feet & <long>."},
    {"role": "system", "content": "Be brief."},
]


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_and_named(name: str):
    template, what = FAULTS[name]
    codec_of(EACH).with_tools([TOOL]).prove(CONVERSATION)
    codec_of(TOOL_CHATML).with_tools([TOOL]).prove(CONVERSATION)
    with pytest.raises(RLError, match="the model's chat template") as refusal:
        codec_of(template).with_tools([TOOL]).prove(CONVERSATION)
    assert what in str(refusal.value), refusal.value


def test_a_conversation_of_a_known_kind_is_not_rendered_again(monkeypatch: pytest.MonkeyPatch):
    codec, rendered = codec_of(TOOL_CHATML).with_tools([TOOL]), []
    render = TokenCodec.render

    def counted(self: TokenCodec, messages: Sequence[Any], **settings: Any) -> str:
        rendered.append(messages)
        return render(self, messages, **settings)

    monkeypatch.setattr(TokenCodec, "render", counted)
    codec.prove([USER, CALL, RESULT])
    assert len(rendered) == 2
    codec.prove([{**USER, "content": "Another question"}, calling({"length": 3.5, "unit": "foot"}), RESULT])
    assert len(rendered) == 2
    for number, other in enumerate(({"length": 3.5}, {"length": "long"}, {"length": 0, "unit": ""}), start=2):
        codec.prove([USER, calling(other), RESULT])
        assert len(rendered) == 2 * number


# --- templates of public models ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [CHATML, "trl/lfm2", "trl/llama3", "trl/phi3", "vllm/template_chatml"])
def test_calls_that_the_template_drops_are_refused_instead_of_training_an_empty_turn(template: str):
    row = {"messages": [USER, CALL, RESULT, ANSWER]}
    with pytest.raises(DataError, match="does not show the name of the call 'convert' in message 2") as refusal:
        encoder_of(template).response(row)
    assert "write the call into the content" in str(refusal.value)


def test_the_text_beside_a_call_that_llama_3_1_drops_is_refused():
    row = {"messages": [USER, calling({"length": 1, "unit": "foot"}, content="I convert it."), RESULT, ANSWER]}
    with pytest.raises(DataError, match="does not show the content of message 2"):
        encoder_of("trl/llama3_1").response(row)


def test_thinking_beside_the_content_is_trained_or_refused():
    thoughtful = {"role": "assistant", "content": "It is long.", "reasoning_content": "How long?"}
    row = {"messages": [USER, thoughtful]}
    assert "⟦<think>\nHow long?\n</think>\n\nIt is long.<|im_end|>⟧" in trained_text(
        "trl/qwen3", encoder_of("trl/qwen3").response(row)
    )
    with pytest.raises(DataError, match="'reasoning_content' of message 2"):
        encoder_of("trl/qwen2_5").response(row)


@pytest.mark.parametrize("name", ["trl/deepseek_r1_distill", "trl/deepseekv3"])
def test_an_answer_continues_the_thinking_that_the_generation_prompt_opens(name: str):
    sequence = encoder_of(name).response({"messages": [USER, THOUGHTFUL]})
    prompt, response = "<bos><｜User｜>How long is it?<｜Assistant｜><think>\n", "How long?\n</think>\n\nIt is long."
    assert trained_text(name, sequence) == f"{prompt}⟦{response}<｜end▁of▁sentence｜>⟧"
    # What the policy sees when it samples is the tokenizer's own rendering of the prompt.
    tokenizer = codec_of(name).tokenizer
    prompt = tokenizer.apply_chat_template([USER], add_generation_prompt=True)["input_ids"]
    assert list(sequence.tokens[: sequence.prompt_length]) == list(prompt)


@pytest.mark.parametrize(
    ("template", "end"), [("trl/glm4moe", "<|user|>"), ("trl/glm4moe", "<|observation|>"), ("trl/qwen3", "<|im_end|>")]
)
def test_an_end_of_turn_within_an_answer_is_refused_instead_of_cutting_the_answer_there(template: str, end: str):
    thoughtful = {"role": "assistant", "content": "It is long.", "reasoning_content": f"Is {end} a mark?"}
    for answer in ({**ANSWER, "content": f"The mark {end} ends it."}, thoughtful, calling({"unit": f"a {end}"})):
        with pytest.raises(DataError, match=f"its text contains '{re.escape(end)}', which ends a turn"):
            encoder_of(template).response({"messages": [USER, answer]})
    other = "<|im_end|>" if template == "trl/glm4moe" else "<|user|>"
    answer = {**ANSWER, "content": f"The mark {other} ends nothing."}
    assert answer["content"] in trained_text(template, encoder_of(template).response({"messages": [USER, answer]}))


DEEPSEEK_V3_1 = """\
{{ bos_token }}{%- for message in messages %}
{%- if message.role == 'user' %}{{ '<｜User｜>' + message.content + '<｜Assistant｜>' }}
{%- else %}{{ '</think>' + message.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<think>' if thinking else '</think>' }}{% endif %}"""


def test_thinking_is_trained_where_deepseek_v3_1_writes_only_its_end():
    row = {"messages": [USER, {**THOUGHTFUL, "content": "<think>How long?</think>It is long."}]}
    sequence = encoder_of(DEEPSEEK_V3_1, thinking=True).response(row)
    text = "<bos><｜User｜>How long is it?<｜Assistant｜><think>⟦How long?</think>It is long.<｜end▁of▁sentence｜>⟧"
    assert trained_text(DEEPSEEK_V3_1, sequence) == text
    with pytest.raises(DataError, match=r"Or set generator\.chat_template_kwargs\.thinking=true$"):
        encoder_of(DEEPSEEK_V3_1).response(row)


def test_a_refused_thought_in_the_content_is_not_advised_to_move_there():
    template = changed(DEEPSEEK_V3_1, "'</think>' +", "")
    template = changed(template, "'<think>' if thinking else '</think>'", "''")
    with pytest.raises(DataError, match="does not show the thinking of message 2") as refusal:
        encoder_of(template).response({"messages": [USER, THOUGHTFUL]})
    assert "into the content" not in str(refusal.value)
    assert "give the row as text" in str(refusal.value)


REMEDIES = {
    "trl/deepseekv3": (ANSWER, {}, "Put the thinking before the answer: <think>…</think>", THOUGHTFUL, {}),
    "trl/nemotron_3_nano": (
        ANSWER,
        {},
        "Set generator.chat_template_kwargs.enable_thinking=false",
        ANSWER,
        {"enable_thinking": False},
    ),
    "trl/qwen3_5_nothink": (
        THOUGHTFUL,
        {},
        "Set generator.chat_template_kwargs.enable_thinking=true",
        THOUGHTFUL,
        {"enable_thinking": True},
    ),
    "trl/qwen3_8": (
        THOUGHTFUL,
        {},
        "Move the thinking from the content into the message's key 'reasoning_content'",
        {"role": "assistant", "content": "It is long.", "reasoning_content": "How long?"},
        {},
    ),
}


@pytest.mark.parametrize("turns", ["all", "last"])
@pytest.mark.parametrize("name", REMEDIES)
def test_the_advice_for_an_answer_that_cannot_continue_its_prompt_helps(name: str, turns: str):
    answer, settings, advice, remedied, changed_settings = REMEDIES[name]
    with pytest.raises(DataError) as refusal:
        encoder_of(name, turns=turns, **settings).response({"messages": [USER, answer]})
    assert advice in str(refusal.value)
    assert "trained_turns" not in str(refusal.value)
    sequence = encoder_of(name, turns=turns, **changed_settings).response({"messages": [USER, remedied]})
    assert "It is long." in trained_text(name, sequence)


def test_an_answer_that_contains_the_token_that_ends_it_is_refused():
    row = {"messages": [USER, {"role": "assistant", "content": "It is long.<|im_end|>"}]}
    with pytest.raises(DataError, match=r"message 2 cannot be trained on: its text contains '<\|im_end\|>'"):
        encoder_of("trl/qwen2_5").response(row)


# --- observations -----------------------------------------------------------------------------------------------------


def ending_with(codec: TokenCodec, text: str) -> tuple[int, ...]:
    return codec.encode_text(text)


def test_gemma_4_shows_a_result_behind_a_call_and_not_behind_text():
    codec = codec_of("trl/gemma4_v5").with_tools([TOOL])
    turns = TurnTokens(codec)
    call = ending_with(codec, '<|tool_call>call:convert{length:12.5,unit:<|"|>metre<|"|>}<tool_call|><|tool_response>')
    for step_wise in (False, True):
        history = start_history(turns, [USER], step_wise=step_wise)
        prompt = codec.encode([USER])
        following = history.next_prompt(prompt, call, [RESULT])
        # Transformers' own rendering of the whole conversation.
        whole = codec.tokenizer.apply_chat_template(
            [USER, CALL, RESULT], tools=[TOOL], tokenize=False, add_generation_prompt=True
        )
        assert codec.tokenizer.decode(list(following)) == whole
        with pytest.raises(ConfigError, match="only after calls in its own format"):
            start_history(turns, [USER], step_wise=step_wise).next_prompt(
                prompt, ending_with(codec, "<tool_call>{}</tool_call><turn|>"), [RESULT]
            )


def test_gpt_oss_is_refused_with_results_that_follow_no_call():
    codec = codec_of("trl/gptoss").with_tools([TOOL])
    history = start_history(TurnTokens(codec), [USER], step_wise=True)
    with pytest.raises(ConfigError, match="only after calls in its own format"):
        history.next_prompt(codec.encode([USER]), ending_with(codec, "I call.<|return|>"), [RESULT])


DROPS_THOUGHTS = """\
{%- if tools %}{{ '<|im_start|>system\\n' }}{% for t in tools %}{{ t.function | tojson }}{% endfor %}{% endif %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + (m.content or '').split('</think>')[-1].strip() }}
        {%- for call in m.tool_calls or [] %}{{ '<call>' + (call.function | tojson) + '</call>' }}{% endfor %}
    {%- else %}
        {%- if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}{{ raise_exception('text') }}{% endif %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"""
"""As MiniMax-M2's: opens the thinking, drops it from earlier turns, and shows results only after calls."""


def test_the_advice_for_results_after_calls_in_changed_turns_helps():
    codec = codec_of(DROPS_THOUGHTS).with_tools([TOOL])
    turns, prompt = TurnTokens(codec), codec.encode([USER])
    response = ending_with(codec, f"I must.\n</think>\n\n{turns.example_call}<|im_end|>")
    with pytest.raises(ConfigError, match=r"renders earlier turns differently .*: let the environment answer .* user"):
        start_history(turns, [USER], step_wise=True).next_prompt(prompt, response, [RESULT])
    answer = {"role": "user", "content": RESULT["content"]}
    following = start_history(turns, [USER], step_wise=True).next_prompt(prompt, response, [answer])
    said = {"role": "assistant", "content": turns.example_call}
    whole = codec.tokenizer.apply_chat_template(
        [USER, said, answer], tools=[TOOL], tokenize=False, add_generation_prompt=True
    )
    assert codec.tokenizer.decode(list(following)) == whole


def test_an_earlier_answer_of_gpt_oss_is_rendered_again_without_its_thinking():
    codec = codec_of("trl/gptoss")
    history = start_history(TurnTokens(codec), [USER], step_wise=True)
    thought = "<|channel|>analysis<|message|>How long?<|end|><|start|>assistant"
    said = f"{thought}<|channel|>final<|message|>It is long.<|return|>"
    again = {"role": "user", "content": "And wide?"}
    prompt = history.next_prompt(codec.encode([USER]), ending_with(codec, said), [again])
    expected = codec.tokenizer.apply_chat_template([USER, ANSWER, again], tokenize=False, add_generation_prompt=True)
    assert codec.tokenizer.decode(list(prompt)) == expected


def test_an_observation_that_the_template_drops_because_of_its_text_fails_the_sample():
    template = changed(CHATML, "message.content + '\\n</tool", "message.content[:40] + '\\n</tool")
    codec = codec_of(template)
    turns = TurnTokens(codec)
    turns.between(ending_with(codec, "I see.<|im_end|>"), [RESULT])
    with pytest.raises(DataError, match="does not show the observation 'a long"):
        turns.between(ending_with(codec, "I see.<|im_end|>"), [{**RESULT, "content": f"a long{' text' * 20}"}])


# --- before a run -----------------------------------------------------------------------------------------------------


def rows_of(*rows: Mapping[str, Any]) -> list[DataRow]:
    return [DataRow(row=row, place=f"rows.jsonl:{number}") for number, row in enumerate(rows, start=1)]


def generator_of(template: str) -> DatasetGenerator:
    codec = codec_of(template)
    return DatasetGenerator(codec, encoder_with(codec), of_pairs=False)


def test_the_proof_names_the_row_and_says_how_long_it_took(caplog: pytest.LogCaptureFixture):
    good, bad = {"messages": [USER, ANSWER]}, {"messages": [USER, CALL, RESULT, ANSWER]}
    with caplog.at_level(logging.INFO, logger="rl_core.trainer.before.conversation_proof"):
        require_proved(rows_of(*[good] * 300), generator_of(CHATML))
    (record,) = caplog.records
    assert record.getMessage().startswith("conversation proof: 0.")
    assert "60 rows" in record.getMessage()
    with pytest.raises(DataError, match=r"rows.jsonl:3: the model's chat template does not show the name of the call"):
        require_proved(rows_of(good, good, bad), generator_of(CHATML))


class Converts(ToolEnvironment):
    """An environment with one tool."""

    @tool
    def convert(self, length: float, unit: str) -> str:
        """Converts a length.

        Args:
            length: the length
            unit: its unit
        """
        return f"{length} {unit}"

    async def judge(self, answer: str) -> float:
        return 0.0


REFUSED = {
    "trl/llama3": ({}, "does not show the name of the tool 'convert'"),
    "trl/gemma4_v5": ({"call_format": "hermes"}, "only after calls in its own format"),
    "trl/gptoss": ({"call_format": "hermes"}, "ends the last turn with other tokens"),
    "trl/qwen3_6": ({}, "renders earlier turns differently"),
}


@pytest.mark.parametrize("name", [*REFUSED, "trl/qwen2_5", "trl/llama3_1"])
def test_the_tools_of_an_environment_are_proved_before_an_episode(name: str):
    options, reason = REFUSED.get(name, ({}, None))
    generator = EnvironmentGenerator(
        NoSampler(),
        codec_of(name),
        Episodes(environment_of=lambda row: Converts, environment_options=options, limits=Limits(max_turns=3)),
    )
    rows = rows_of({"prompt": [USER]})
    if reason is None:
        require_proved(rows, generator)
        return
    with pytest.raises(ConfigError, match=reason) as refusal:
        require_proved(rows, generator)
    assert str(refusal.value).startswith("rows.jsonl:1: ")
