"""What a prompt opens, such as `<think>`, is known to those who read the response.

The chat templates are those of public models, which trl ships.
"""

from __future__ import annotations

from typing import Any

import pytest

from rl_core.interfaces import Action, Environment, StepResult, without_thought
from rl_core.testing.scripted_engine import ScriptedClient
from rl_rollout.chat import TokenCodec
from rl_rollout.episode import Limits
from rl_rollout.generator import EnvironmentGenerator, Episodes
from tests.rollout.requests import one_sample_of
from tests.rollout.test_turn_ends import CHATML, OWN, tokenizer_of

OPENS_PLAN = CHATML.replace("assistant\n{% endif", "assistant\n<plan>\n{% endif")
OPENS_HARMONY = "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|return|>{% endfor %}" + (
    "{% if add_generation_prompt %}<|start|>assistant<|channel|>analysis<|message|>{% endif %}"
)
OPENS_MAGISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% else %}{{ m.content }}</s>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}[THINK]{% endif %}"
)
OWN.update(opens_plan=OPENS_PLAN, opens_harmony=OPENS_HARMONY, opens_magistral=OPENS_MAGISTRAL)


async def openings(
    tokenizer: Any, prompt: Any, *responses: str, observation: Any = "and 2?", step_wise: bool = True, **settings: Any
) -> list[Action]:
    """The actions that an environment gets when the policy gives these responses."""
    seen: list[Action] = []

    class Sees(Environment):
        def __init__(self, row: Any, options: Any) -> None:
            pass

        async def reset(self) -> Any:
            return prompt

        async def step(self, action: Action) -> StepResult:
            seen.append(action)
            done = len(seen) == len(responses)
            return StepResult(reward=0.0, done=done, observation=None if done else observation)

    def script(request: Any) -> list[int]:
        return tokenizer(responses[len(seen)], add_special_tokens=False)["input_ids"]

    generator = EnvironmentGenerator(
        ScriptedClient(script, end_tokens=[tokenizer.eos_token_id]),
        TokenCodec(tokenizer, chat_template_kwargs=settings),
        Episodes(environment_of=lambda row: Sees, limits=Limits(max_turns=4), step_wise=step_wise),
    )
    request = one_sample_of({"prompt": prompt}, max_tokens=200)
    (trajectory,) = await generator.generate(request)
    await generator.aclose()
    assert trajectory.failure is None
    return seen


ASKED = [{"role": "user", "content": "Write <think> first. 1?"}]


@pytest.mark.parametrize(
    ("name", "eos", "settings", "opening"),
    [
        ("deepseek_r1_distill", "<｜end▁of▁sentence｜>", {}, "<think>\n"),
        ("qwen3", "<|im_end|>", {}, ""),
        ("qwen3", "<|im_end|>", {"enable_thinking": False}, "<think>\n\n</think>\n\n"),
        ("qwen3_5_think", "<|im_end|>", {}, "<think>\n"),
        ("nemotron_3_nano", "<|im_end|>", {}, "<think>\n"),
        ("glm4moe", "<|endoftext|>", {"enable_thinking": False}, "<think></think>"),
        ("chatml", "<|im_end|>", {}, ""),
        ("gemma3", "<eos>", {}, ""),
        ("opens_plan", "<|im_end|>", {}, "<plan>\n"),
        ("opens_harmony", "<|return|>", {}, "<|channel|>analysis<|message|>"),
        ("opens_magistral", "</s>", {}, "[THINK]"),
    ],
)
async def test_the_opening_is_what_the_template_writes_after_the_assistants_marker(
    name: str, eos: str, settings: Any, opening: str
):
    tokenizer = tokenizer_of(name, eos)
    actions = await openings(tokenizer, ASKED, "so\n</think>\n\n1" + eos, "2" + eos, **settings)
    assert [action.opening for action in actions] == [opening] * 2
    whole = tokenizer.apply_chat_template(ASKED, add_generation_prompt=True, tokenize=False, **settings)
    assert whole.endswith(opening)


async def test_a_turn_that_continues_after_a_tool_is_not_opened_by_its_own_call():
    """Gemma 4's template writes no marker of the assistant between a tool's result and the answer."""
    tokenizer = tokenizer_of("gemma4_v5", "<eos>")
    call = {"type": "function", "id": "call00001", "function": {"name": "add", "arguments": {"a": "12"}}}
    called = [
        {"role": "user", "content": "1?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "forty-two", "name": "add", "tool_call_id": "call00001"},
    ]
    for step_wise in (False, True):
        (action,) = await openings(tokenizer, called, "42<turn|>", step_wise=step_wise)
        assert (action.opening, action.answer) == ("", "42")
    (action,) = await openings(tokenizer, called, "so 41", enable_thinking=True)
    assert (action.opening, action.answer) == ("<|channel>thought\n", "")


async def test_a_thought_that_the_prompt_opened_and_the_policy_did_not_end_is_no_answer():
    tokenizer = tokenizer_of("deepseek_r1_distill", "<｜end▁of▁sentence｜>")
    cut, whole = await openings(tokenizer, ASKED, "maybe 42, but wait", "hm</think>42<｜end▁of▁sentence｜>")
    assert (cut.text, cut.answer) == ("maybe 42, but wait", "")
    assert (whole.text, whole.answer) == ("hm</think>42", "42")


@pytest.mark.parametrize(
    ("name", "eos", "said", "answer"),
    [
        ("opens_magistral", "</s>", "so 41 [/THINK]42</s>", "42"),
        ("opens_magistral", "</s>", "so 41", ""),
        ("opens_harmony", "<|return|>", "so 41<|end|><|start|>assistant<|channel|>final<|message|>42<|return|>", "42"),
        ("opens_harmony", "<|return|>", "so 41", ""),
    ],
)
async def test_marks_of_thinking_stay_in_the_text_if_they_are_special_tokens(
    name: str, eos: str, said: str, answer: str
):
    tokenizer = tokenizer_of(name, eos)
    assert {"[THINK]", "[/THINK]", "<|channel|>"} & set(tokenizer.all_special_tokens)
    (action,) = await openings(tokenizer, ASKED, said)
    assert action.answer == answer
    assert "41" in action.text
    assert eos not in action.text


@pytest.mark.parametrize(
    ("prompt", "said", "opening", "answer"),
    [
        ("Assistant: <think>\n", "so 41", "<think>\n", ""),
        ("Assistant: <think>\n", "so 41</think>42", "<think>\n", "42"),
        ("Think in <think> tags. Assistant: ", "42", "", "42"),
        ("Assistant: <think>\n</think>", "42", "", "42"),
        ("Assistant: [THINK]", "so 41", "[THINK]", ""),
    ],
)
async def test_a_text_prompt_opens_a_thought_if_it_ends_with_its_mark(
    prompt: str, said: str, opening: str, answer: str
):
    (action,) = await openings(tokenizer_of("chatml", "<|endoftext|>"), prompt, said)
    assert (action.opening, action.answer) == (opening, answer)


async def test_a_thought_stays_open_across_the_turns_of_a_text():
    tokenizer = tokenizer_of("chatml", "<|endoftext|>")
    actions = await openings(tokenizer, "<think>\n", "a", "b", "c</think>d", "e", observation=" obs ")
    assert [action.answer for action in actions] == ["", "", "d", "e"]
    assert actions[1].opening == "<think>\na obs "


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("42", "42"),
        ("<think>so</think>42", "42"),
        ("<think>so</think>42<think>again", "42"),
        ("so</think>41<think>no</think>42", "42"),
        ("[THINK]so[/THINK]42", "42"),
        ("<seed:think>so</seed:think>42", "42"),
        ("◁think▷so◁/think▷42", "42"),
        ("<|START_THINKING|>so<|END_THINKING|>42", "42"),
        ("<|channel>thought\nso<channel|>42", "42"),
        ("<|channel>thought\nso", ""),
        ("<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>final<|message|>42", "42"),
        ("<|channel|>analysis<|message|>so", ""),
        ("<|channel|>final<|message|>42", "42"),
        ("an answer with <|end|> in it", "an answer with <|end|> in it"),
        ("a < b and [x]", "a < b and [x]"),
    ],
)
def test_the_answer_is_what_stands_outside_of_thoughts(text: str, answer: str):
    assert without_thought(text) == answer
