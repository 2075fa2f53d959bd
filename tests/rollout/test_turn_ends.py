"""The tokens that end a turn: derived from the chat template, sampled by real engines, trained on, and exported.

The chat templates are those of public models, which trl ships. The oracle of every prompt is transformers' rendering.
"""

from __future__ import annotations

import asyncio
import copy
import json
import re
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from rl_core.errors import ConfigError
from rl_core.interfaces import Environment, GenerateRequest, StepResult, Trajectory
from rl_core.testing.scripted_engine import ScriptedClient
from rl_core.trainer.run import run_training
from rl_core.trainer.update.models import Models
from rl_rollout.chat import TokenCodec
from rl_rollout.episode import Limits
from rl_rollout.generator import EnvironmentGenerator, Episodes
from rl_rollout.local.engine import LocalEngine
from rl_rollout.local.model import load_model
from rl_rollout.supervised_tokens import RowEncoder, TrainedTurns
from rl_rollout.turn_ends import find_ends
from tests.rollout.requests import one_sample_of
from tests.supervised.trained import config_of

MARKS = re.compile(
    r"<\|[^<>|\n'\"{}]{1,40}\|>|<｜[^<>｜\n]{1,40}｜>|<[a-z_]+\|>|<\|[a-z_]+>|<(?:start|end)_of_turn>|\[(?:gMASK|/?INST|/?THINK)\]"
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ALWAYS_OPENS = CHATML.replace("{% if add_generation_prompt %}", "").replace("{% endif %}", "")
LAST_ONLY = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% if loop.last and m.role == 'assistant' %}"
    "{{ eos_token }}{% endif %}\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
PLAIN = (
    "{% for m in messages %}### {{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}### assistant: {% endif %}"
)
TWO_MARKS = CHATML.replace("<|im_end|>", "<|end_text|><|im_end|>")
OWN = {"chatml": CHATML, "always_opens": ALWAYS_OPENS, "last_only": LAST_ONLY, "plain": PLAIN, "two_marks": TWO_MARKS}


@cache
def tokenizer_of(name: str, eos: str) -> Any:
    """A byte-level tokenizer to which all markers of the template are special tokens, as in the model's tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    template = OWN.get(name) or (files("trl") / "chat_templates" / f"{name}.jinja").read_text()
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = sorted(set(MARKS.findall(template)) | {"<|endoftext|>"} - {eos})
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, extra_special_tokens=special)
    fast.chat_template = template
    return fast


def ends_of(name: str, eos: str) -> tuple[Any, Any]:
    tokenizer = tokenizer_of(name, eos)
    ends = find_ends(TokenCodec(tokenizer, chat_template_kwargs={}))
    text, call = (None if end is None else tokenizer.convert_ids_to_tokens(end) for end in (ends.text, ends.call))
    return text, call


@pytest.mark.parametrize(
    ("name", "eos", "text", "call"),
    [
        ("chatml", "<|endoftext|>", "<|im_end|>", None),
        ("always_opens", "<|endoftext|>", "<|im_end|>", None),
        ("two_marks", "<|endoftext|>", "<|im_end|>", None),
        ("last_only", "<|endoftext|>", "<|endoftext|>", None),
        ("plain", "<|endoftext|>", None, None),
        ("qwen3", "<|endoftext|>", "<|im_end|>", "<|im_end|>"),
        ("phi3", "<|endoftext|>", "<|end|>", None),
        ("cohere2", "<|END_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", None),
        ("deepseekv3", "<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
        ("glm4moe", "<|endoftext|>", "<|user|>", "<|observation|>"),
        ("gemma4_v5", "<eos>", "<turn|>", "<|tool_response>"),
        # <|end|> also ends the thinking, after which the same response continues.
        ("gptoss", "<|return|>", "<|return|>", "<|call|>"),
    ],
)
def test_the_ends_of_turns_are_those_of_public_models(name: str, eos: str, text: str | None, call: str | None):
    assert ends_of(name, eos) == (text, call)


def chatting(observation: list[dict[str, Any]]) -> Any:
    class Chats(Environment):
        """Two turns; the observation follows the first."""

        def __init__(self, row: Any, options: Any) -> None:
            self.turns = 0

        async def reset(self) -> Any:
            return [{"role": "user", "content": "12+30?"}]

        async def step(self, action: Any) -> StepResult:
            self.turns += 1
            is_done = self.turns == 2
            return StepResult(reward=0.0, done=is_done, observation=None if is_done else observation)

    return Chats


async def played(tokenizer: Any, client: Any, environment: Any, **settings: Any) -> Trajectory:
    generator = EnvironmentGenerator(
        client,
        TokenCodec(tokenizer, chat_template_kwargs={}),
        Episodes(environment_of=lambda row: environment, limits=Limits(max_turns=4), **settings),
    )
    request = one_sample_of({"prompt": "12+30?"}, max_tokens=40)
    try:
        (trajectory,) = await generator.generate(request)
    finally:
        await generator.aclose()
    assert trajectory.failure is None
    return trajectory


def second_prompt(name: str, eos: str, said: str, observer: str, *, step_wise: bool = True) -> str:
    """The engine's prompt of the second turn, after the policy said this text, which ends with the sampled end."""
    tokenizer = tokenizer_of(name, eos)
    response = tokenizer(said, add_special_tokens=False)["input_ids"]
    client = ScriptedClient(lambda request: response, end_tokens=[response[-1]])
    asyncio.run(played(tokenizer, client, chatting([{"role": observer, "content": "42"}]), step_wise=step_wise))
    return tokenizer.decode(list(client.exchanges[1].request.prompt_tokens))


def rendered(name: str, eos: str, text: str, observer: str) -> str:
    messages = [
        {"role": "user", "content": "12+30?"},
        {"role": "assistant", "content": text},
        {"role": observer, "content": "42"},
    ]
    return tokenizer_of(name, eos).apply_chat_template(messages, add_generation_prompt=True, tokenize=False)


@pytest.mark.parametrize(
    ("name", "eos", "said", "end", "observer"),
    [
        ("glm4moe", "<|endoftext|>", "\n<think></think>\nhm", "<|observation|>", "tool"),
        ("glm4moe", "<|endoftext|>", "\n<think></think>\nhm", "<|user|>", "user"),
        # The policy expected another role than the one that follows, or stopped at an end that no chat has.
        ("glm4moe", "<|endoftext|>", "\n<think></think>\nhm", "<|user|>", "tool"),
        ("glm4moe", "<|endoftext|>", "\n<think></think>\nhm", "<|endoftext|>", "user"),
        ("chatml", "<|endoftext|>", "hm", "<|endoftext|>", "user"),
        ("chatml", "<|endoftext|>", "hm", "<|im_end|>", "user"),
        ("two_marks", "<|endoftext|>", "hm", "<|end_text|>", "user"),
        ("two_marks", "<|endoftext|>", "hm<|end_text|>", "<|im_end|>", "user"),
        ("phi3", "<|endoftext|>", "hm", "<|end|>", "user"),
        ("phi3", "<|endoftext|>", "hm", "<|endoftext|>", "user"),
        ("last_only", "<|endoftext|>", "hm", "<|endoftext|>", "user"),
        ("plain", "<|endoftext|>", "hm", "<|endoftext|>", "user"),
    ],
)
def test_the_next_prompt_is_what_the_template_writes_whatever_the_policy_ended_with(
    name: str, eos: str, said: str, end: str, observer: str
):
    text = said.removesuffix("<|end_text|>")
    assert second_prompt(name, eos, said + end, observer) == rendered(name, eos, text, observer)


@pytest.mark.parametrize("step_wise", [False, True])
def test_an_end_that_is_no_special_token_is_neither_shown_nor_doubled(step_wise: bool):
    tokenizer = copy.deepcopy(tokenizer_of("chatml", "<|endoftext|>"))
    tokenizer.chat_template = CHATML.replace("<|im_end|>", "<end>")
    tokenizer.add_tokens(["<end>"])
    response, seen = tokenizer("hm<end>", add_special_tokens=False)["input_ids"], []

    class Sees(chatting([{"role": "user", "content": "42"}])):
        async def step(self, action: Any) -> StepResult:
            seen.append(action.text)
            return await super().step(action)

    client = ScriptedClient(lambda request: response, end_tokens=[response[-1]])
    asyncio.run(played(tokenizer, client, Sees, step_wise=step_wise))
    assert seen == ["hm", "hm"]
    assert tokenizer.decode(list(client.exchanges[1].request.prompt_tokens)).count("hm<end>\n") == 1


def test_the_end_of_a_llama_call_takes_the_place_of_the_end_of_its_turn():
    for step_wise in (False, True):
        prompt = second_prompt("llama3_1", "<|eot_id|>", "hm<|eom_id|>", "tool", step_wise=step_wise)
        usual = rendered("llama3_1", "<|eot_id|>", "hm", "tool")
        assert "hm<|eot_id|><|start_header_id|>ipython" in usual
        assert prompt == usual.replace("hm<|eot_id|>", "hm<|eom_id|>")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("last_only", "ends the last turn with other tokens than earlier turns"),
        ("plain", "ends turns without a special token at which the engine could stop"),
    ],
)
def test_one_sequence_is_refused_where_turns_end_differently(name: str, message: str):
    with pytest.raises(Exception, match=f"{message}.*step_wise_trajectories=true"):
        second_prompt(name, "<|endoftext|>", "hm<|endoftext|>", "user", step_wise=False)


@pytest.mark.parametrize(("name", "is_refused"), [("last_only", True), ("plain", True), ("chatml", False)])
def test_differing_ends_are_refused_before_the_run_whatever_the_environment(name: str, is_refused: bool):
    tokenizer, row = tokenizer_of(name, "<|endoftext|>"), {"prompt": [QUESTION]}
    for step_wise, max_turns in ((False, 2), (True, 2), (False, 1)):
        episodes = Episodes(
            environment_of=lambda row: chatting([]), limits=Limits(max_turns=max_turns), step_wise=step_wise
        )
        client: Any = None
        generator = EnvironmentGenerator(client, TokenCodec(tokenizer, chat_template_kwargs={}), episodes)
        if is_refused and not step_wise and max_turns > 1:
            with pytest.raises(ConfigError, match="step_wise_trajectories=true"):
                generator.prove(row, anew=True)
        else:
            generator.prove(row, anew=True)


# --- engines that stop ----------------------------------------------------------------------------------------------


def model_that_says(tokenizer: Any, token: str, directory: Path) -> Path:
    """A model whose every token is `token`, and whose configurations name only the tokenizer's end of sequence."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "qwen2",
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.model.embed_tokens.weight.fill_(1.0)
        model.model.norm.weight.fill_(1.0)
        model.lm_head.weight[tokenizer.convert_tokens_to_ids(token)] = 5.0
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.mark.parametrize(
    ("name", "said", "num_tokens"), [("chatml", "<|im_end|>", 1), ("glm4moe", "<|user|>", 1), ("chatml", "x", 40)]
)
async def test_the_local_engine_stops_where_the_template_ends_a_turn(
    name: str, said: str, num_tokens: int, tmp_path: Path
):
    tokenizer = tokenizer_of(name, "<|endoftext|>")
    model = model_that_says(tokenizer, said, tmp_path / "model")

    class OneTurn(chatting([])):
        async def step(self, action: Any) -> StepResult:
            return StepResult(reward=0.0, done=True)

    client = await LocalEngine.start(
        lambda: (load_model(str(model), dtype="float32", device="cpu", model_kwargs={}), tokenizer),
        max_num_seqs=4,
        timeout_s=100.0,
        num_threads=1,
    )
    try:
        (step,) = (await played(tokenizer, client, OneTurn)).steps
    finally:
        await client.close()
    assert sum(step.sampled) == num_tokens
    assert step.stop_reason == ("stop" if num_tokens == 1 else "length")


async def test_text_prompts_end_only_at_the_end_of_sequence():
    seen: list[GenerateRequest] = []

    def script(request: GenerateRequest) -> list[int]:
        seen.append(request)
        return [1]

    class Text(chatting([])):
        async def reset(self) -> Any:
            return "12+30="

        async def step(self, action: Any) -> StepResult:
            return StepResult(reward=0.0, done=True)

    await played(tokenizer_of("chatml", "<|endoftext|>"), ScriptedClient(script, end_tokens=[1]), Text)
    assert seen[0].params.stop_token_ids == ()


# --- supervised rows ------------------------------------------------------------------------------------------------


def trained_texts(name: str, eos: str, messages: Any, trained_turns: TrainedTurns = "all") -> list[str]:
    tokenizer = tokenizer_of(name, eos)
    encoder = RowEncoder(
        TokenCodec(tokenizer, chat_template_kwargs={}),
        response_key="completion",
        trained_roles=("assistant",),
        trained_turns=trained_turns,
        scored_at_end=False,
    )
    row = encoder.response({"messages": messages})
    assert tokenizer.decode(list(row.tokens)).count("<|user|><|user|>") == 0
    marked = "".join(
        tokenizer.decode([token]) if is_trained else "\0"
        for token, is_trained in zip(row.tokens, row.trained, strict=True)
    )
    return [text for text in marked.split("\0") if text]


QUESTION, ANSWER = {"role": "user", "content": "12+30?"}, {"role": "assistant", "content": "42"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": "12"}}}],
}
RESULT = {"role": "tool", "content": "42", "name": "add"}


@pytest.mark.parametrize(
    ("name", "eos", "messages", "ends"),
    [
        ("chatml", "<|endoftext|>", [QUESTION, ANSWER, QUESTION, ANSWER], ["<|im_end|>"] * 2),
        ("phi3", "<|endoftext|>", [QUESTION, ANSWER, QUESTION, ANSWER], ["<|end|>"] * 2),
        ("glm4moe", "<|endoftext|>", [QUESTION, ANSWER, QUESTION, ANSWER], ["<|user|>"] * 2),
        ("glm4moe", "<|endoftext|>", [QUESTION, CALL, RESULT, ANSWER], ["<|observation|>", "<|user|>"]),
        ("glm4moe", "<|endoftext|>", [QUESTION, CALL], ["<|observation|>"]),
        ("gemma4_v5", "<eos>", [QUESTION, CALL], ["<|tool_response>"]),
        ("gemma4_v5", "<eos>", [QUESTION, ANSWER], ["<turn|>"]),
    ],
)
def test_every_trained_turn_ends_at_a_token_at_which_the_engine_stops(
    name: str, eos: str, messages: Any, ends: list[str]
):
    texts = trained_texts(name, eos, messages)
    assert len(texts) == len(ends)
    assert [MARKS.findall(text)[-1] for text in texts] == ends
    assert all(text.endswith(end) for text, end in zip(texts, ends, strict=True))
    assert set(ends) <= set(ends_of(name, eos))


@pytest.mark.parametrize("messages", [[QUESTION, ANSWER, QUESTION, ANSWER], [QUESTION, CALL, RESULT, ANSWER]])
def test_the_trained_text_of_glm_is_that_of_trls_own_training_template(messages: Any):
    tokenizer = tokenizer_of("glm4moe_training", "<|endoftext|>")
    made = tokenizer.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True, tokenize=True, add_generation_prompt=False
    )
    marked = "".join(
        tokenizer.decode([token]) if is_trained else "\0"
        for token, is_trained in zip(made["input_ids"], made["assistant_masks"], strict=True)
    )
    assert trained_texts("glm4moe", "<|endoftext|>", messages) == [text for text in marked.split("\0") if text]


def test_a_thoughtful_last_turn_of_glm_ends_too():
    answer = {"role": "assistant", "content": "<think>hm</think>42"}
    assert trained_texts("glm4moe", "<|endoftext|>", [QUESTION, answer]) == ["\n<think>hm</think>\n42<|user|>"]


def test_a_template_without_an_end_is_refused():
    with pytest.raises(Exception, match=r"writes no special token at the end of the assistant's message.*eos_token"):
        trained_texts("plain", "<|endoftext|>", [QUESTION, ANSWER])


# --- exports --------------------------------------------------------------------------------------------------------


@attrs.frozen
class Exports:
    """A policy whose backend wrote these files."""

    files: dict[str, Any]

    async def save_model(self, directory: Path) -> None:
        for name, fields in self.files.items():
            (directory / name).write_text(json.dumps(fields))


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (
            {"generation_config.json": {"eos_token_id": 5, "pad_token_id": 1}},
            {"eos_token_id": [5, 7], "pad_token_id": 1},
        ),
        ({"generation_config.json": {"eos_token_id": [7, 5]}}, {"eos_token_id": [7, 5]}),
        ({"generation_config.json": {}}, {"eos_token_id": [7, 5]}),
        ({"config.json": {"eos_token_id": 5, "hidden_size": 8}}, {"eos_token_id": [5, 7]}),
    ],
)
async def test_an_export_names_the_ends_of_the_run(written: dict[str, Any], expected: Any, tmp_path: Path):
    policy: Any = Exports(written)
    await Models(policy=policy, stop_tokens=(7, 5)).save_model(tmp_path)
    assert json.loads((tmp_path / "generation_config.json").read_text()) == expected


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_transformers_stops_where_the_run_stopped_with_an_exported_base_model(lora_rank: int, tmp_path: Path):
    from transformers import AutoModelForCausalLM

    tokenizer = tokenizer_of("chatml", "<|endoftext|>")
    base = model_that_says(tokenizer, "<|im_end|>", tmp_path / "base")
    rows = [{"messages": [QUESTION, {"role": "assistant", "content": ""}]}] * 2
    keys = {
        "trainer.policy.optimizer_config.lr": 1e-9,
        "trainer.policy.model.lora.rank": lora_rank,
        "generator.sampling_params.max_generate_length": 64,
        "trainer.logger": [],
        "trainer.epochs": 1,
    }
    run_training(config_of(tmp_path, base, rows, **keys))
    exported = tmp_path / "run" / "model"
    ends = [tokenizer.convert_tokens_to_ids(name) for name in ("<|endoftext|>", "<|im_end|>")]
    prompt_NT = torch.tensor([tokenizer("hm", add_special_tokens=False)["input_ids"]])
    lengths = []
    for path in (base, exported):
        model: Any = AutoModelForCausalLM.from_pretrained(path)
        lengths.append(model.generate(prompt_NT, max_new_tokens=9, do_sample=False).shape[1] - prompt_NT.shape[1])
    assert json.loads((exported / "generation_config.json").read_text())["eos_token_id"] == ends
    assert lengths == [9, 1]
