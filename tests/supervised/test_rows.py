"""Encoding of data rows that contain responses: which tokens are trained on, and which rows are refused."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from rl_core.errors import ConfigError, DataError
from rl_core.trainer.before.data import read_rows
from rl_rollout.chat import TokenCodec
from rl_rollout.dataset_generator import DatasetGenerator
from rl_rollout.generator_options import DatasetGeneratorOptions
from rl_rollout.supervised_tokens import RowEncoder, Supervised, TrainedTurns, text_parts
from rl_transformers.testing.models import character_tokenizer
from tests.supervised.trained import PAIRS, config_of, first_batch

OPENING = "{% if add_generation_prompt %}[assistant:{% endif %}"
CHAT = "{% for m in messages %}[{{ m.role }}:{{ m.content }}<eos>]{% endfor %}" + OPENING
DROPS_THOUGHTS = (
    "{% for m in messages %}[{{ m.role }}:{{ m.content if loop.last else m.content.split('!')[-1] }}<eos>]{% endfor %}"
    + OPENING
)
ALPHABET = "".join(map(chr, range(32, 127)))
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def encoder(
    template: str | None = CHAT,
    *,
    trained_roles: tuple[str, ...] = ("assistant",),
    trained_turns: TrainedTurns = "all",
    scored_at_end: bool = False,
):
    tokenizer = character_tokenizer(ALPHABET)
    tokenizer.chat_template = template
    codec = TokenCodec(tokenizer, chat_template_kwargs={})
    return codec, RowEncoder(
        codec,
        response_key="completion",
        trained_roles=trained_roles,
        trained_turns=trained_turns,
        scored_at_end=scored_at_end,
    )


def shown(codec: TokenCodec, sequence: Supervised) -> str:
    """The text of a sequence, with the trained parts in braces."""
    text, was = "", False
    for token, is_trained in zip(sequence.tokens, sequence.trained, strict=True):
        text += "{" * (is_trained and not was) + "}" * (was and not is_trained) + codec.tokenizer.decode([token])
        was = is_trained
    return text + "}" * was


def say(*contents: str) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "1+1=", "completion": "2"}, "1+1={2<eos>}"),
        ({"prompt": "1+1=", "completion": "2<eos>"}, "1+1={2<eos>}"),
        ({"messages": say("a", "b")}, "[user:a<eos>][assistant:{b<eos>}"),
        ({"messages": say("a", "b", "c", "d")}, "[user:a<eos>][assistant:{b<eos>}][user:c<eos>][assistant:{d<eos>}"),
        ({"prompt": say("a"), "completion": say("a", "b")[1:]}, "[user:a<eos>][assistant:{b<eos>}"),
        ({"prompt": say("a"), "completion": "b"}, "[user:a<eos>][assistant:{b<eos>}"),
        # Assistant messages in a prompt are not trained on.
        (
            {"prompt": say("a", "b", "c"), "completion": "d"},
            "[user:a<eos>][assistant:b<eos>][user:c<eos>][assistant:{d<eos>}",
        ),
    ],
)
def test_the_response_and_its_end_are_trained_on(row: dict[str, Any], expected: str):
    codec, encode = encoder()
    assert shown(codec, encode.response(row)) == expected


def test_a_greeting_of_the_assistant_may_precede_the_last_turn():
    greeted = [
        {"role": "assistant", "content": "hi"},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2"},
    ]
    codec, encode = encoder(trained_turns="last")
    sequence = encode.response({"messages": greeted})
    assert codec.tokenizer.decode(list(sequence.tokens[sequence.prompt_length :])) == "2<eos>"
    with pytest.raises(DataError, match="the conversation begins with the assistant's message"):
        encoder()[1].response({"messages": greeted})


def test_only_the_last_turn_can_be_trained_on_if_the_template_drops_earlier_thoughts():
    row = {"messages": say("a", "think!b", "c", "hm!d")}
    with pytest.raises(DataError, match=r"generator\.trained_turns=last"):
        encoder(DROPS_THOUGHTS)[1].response(row)
    codec, encode = encoder(DROPS_THOUGHTS, trained_turns="last")
    assert shown(codec, encode.response(row)) == "[user:a<eos>][assistant:b<eos>][user:c<eos>][assistant:{hm!d<eos>}"


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        (("assistant",), "[system:s<eos>][user:a<eos>][assistant:{b<eos>}][tool:c<eos>][assistant:{d<eos>}"),
        (("tool",), "[system:s<eos>][user:a<eos>][assistant:b<eos>]{[tool:c<eos>}"),
        (("user", "assistant"), "[system:s<eos>]{[user:a<eos>}][assistant:{b<eos>}][tool:c<eos>][assistant:{d<eos>}"),
        # The first token cannot be trained on, because nothing precedes it.
        (("system",), "[{system:s<eos>}"),
    ],
)
def test_a_configuration_says_whose_messages_are_trained_on(roles: tuple[str, ...], expected: str):
    said = [("system", "s"), ("user", "a"), ("assistant", "b"), ("tool", "c"), ("assistant", "d")]
    codec, encode = encoder(trained_roles=roles)
    row = {"messages": [{"role": role, "content": content} for role, content in said]}
    assert shown(codec, encode.response(row)) == expected


def test_at_least_one_role_is_trained_on():
    with pytest.raises(ValueError, match=r"trained_roles: got \[\]; expected at least one"):
        DatasetGeneratorOptions(trained_roles=())


@pytest.mark.parametrize(
    ("columns", "trained"),
    [
        ({}, [0, 1, 1, 1]),
        ({"loss_mask": [1, 0, 1, 1]}, [0, 0, 1, 1]),
        ({"completion_mask": [0, 0, 0, 1]}, [0, 0, 0, 1]),
        ({"assistant_masks": [0, 1, 0, 1]}, [0, 1, 0, 1]),
        ({"labels": [-100, -100, 5, 6]}, [0, 0, 1, 1]),
    ],
)
def test_token_ids_are_used_unchanged(columns: dict[str, Any], trained: list[int]):
    sequence = encoder()[1].response({"input_ids": [7, 4, 5, 6], **columns})
    assert sequence.tokens == (7, 4, 5, 6)
    assert list(sequence.trained) == [bool(value) for value in trained]


def test_a_score_is_read_at_a_token_after_the_whole_response():
    codec, encode = encoder(scored_at_end=True)
    assert shown(codec, encode.response({"prompt": "a", "completion": "b"})) == "ab<eos>{<eos>}"


def test_text_shows_gaps_between_trained_parts():
    codec, encode = encoder()
    sequence = encode.response({"messages": say("a", "b", "c", "d")})
    prompt, response = text_parts(codec, sequence)
    assert prompt == "[user:a<eos>][assistant:"
    assert response == "b<eos> → ][user:c<eos>][assistant:d<eos>"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a"}, "the row has no response: neither 'messages' nor 'input_ids' nor 'completion'"),
        ({"prompt": "a", "completion": 5}, "'completion' must be text, as the prompt is, got int"),
        ({"prompt": "", "completion": "b"}, "the prompt '' has no tokens"),
        (
            {"messages": say("a")},
            r"no message to train on: expected the role assistant \(generator\.trained_roles\), got user",
        ),
        ({"prompt": "a", "completion": "b", "tools": [TOOL]}, "its prompt is text; use messages"),
        ({"messages": say("a", "b"), "tools": {"name": "add"}}, "the row's 'tools' must be a list of"),
        ({"messages": say("a", "b"), "tools": '[{"name": "add"}]'}, "the row's 'tools' must be a list of"),
        ({"messages": say("a", "b"), "tools": "add, subtract"}, "the row's 'tools' are not JSON"),
        ({"messages": say("a", "b"), "tools": [TOOL, TOOL]}, "two of the row's 'tools' have the name 'add'"),
        ({"input_ids": [1]}, "at least two token ids"),
        ({"input_ids": [1, 2.5, 3]}, "must be a list of at least two token ids"),
        ({"input_ids": [1, 2, 3], "loss_mask": [1, 1]}, "'loss_mask' has 2 values for 3 tokens"),
        ({"input_ids": [1, 2, 3], "completion_mask": 1}, "'completion_mask' must be a list of 3 values, got 1"),
        ({"input_ids": [1, 2, 3], "labels": 1}, "'labels' must be a list of 3 values, got 1"),
        ({"completion": "b"}, "the row has no 'prompt' before its 'completion'; it has completion"),
        ({"input_ids": [1, 2, 3], "labels": [-100] * 3}, "no token of 'input_ids' is marked as trained"),
    ],
)
def test_rows_that_cannot_be_trained_on_are_refused(row: dict[str, Any], message: str):
    with pytest.raises(DataError, match=message):
        encoder()[1].response(row)


def test_a_pair_needs_both_responses_and_a_prompt():
    with pytest.raises(DataError, match="the row has no 'rejected'"):
        encoder()[1].pair({"prompt": "a", "chosen": "b"})
    with pytest.raises(DataError, match="the row has no 'prompt' before its 'chosen'; it has chosen, rejected"):
        encoder()[1].pair({"chosen": say("a", "b"), "rejected": say("a", "c")})


def test_a_tokenizer_without_an_end_is_refused():
    tokenizer = character_tokenizer(ALPHABET)
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="no eos_token"):
        RowEncoder(
            TokenCodec(tokenizer, chat_template_kwargs={}),
            response_key="completion",
            trained_roles=("assistant",),
            trained_turns="all",
            scored_at_end=False,
        )


def test_prompts_of_token_id_rows_and_preference_pairs_are_read(tmp_path: Path):
    file = tmp_path / "rows.jsonl"
    conversation = '[{"role": "user", "content": "a"}, {"role": "assistant", "content": "%s"}]'
    file.write_text(
        f'{{"input_ids": [1, 2, 3]}}\n{{"chosen": {conversation % "b"}, "rejected": {conversation % "c"}}}\n'
    )
    rows = [row.row["prompt"] for row in read_rows([file], key="data.train_data")]
    assert rows == ["3 token ids", [{"role": "user", "content": "a"}]]


def test_a_pair_becomes_two_trajectories_of_which_the_preferred_one_has_the_reward(tmp_path: Path):
    from rl_transformers.testing.models import make_checkpoint

    model = make_checkpoint(tmp_path / "model")
    rows = [{"prompt": "1+1=", "chosen": "2", "rejected": "33"}, {"prompt": "2+2=", "chosen": "4", "rejected": "5"}]
    keys = {**PAIRS, "trainer.algorithm.policy_loss_type": "dpo"}
    batch = first_batch(config_of(tmp_path, model, rows, **keys))
    assert batch["group_id"].tolist() == [0, 0, 1, 1]
    starts = batch.offsets.tolist()
    rewards = [float(batch["rewards"][a:b].sum()) for a, b in pairwise(starts)]
    assert rewards == [1.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize("of_pairs", [False, True])
def test_measuring_prompt_and_response_encodes_each_response_once(of_pairs: bool, monkeypatch: pytest.MonkeyPatch):
    codec, encode = encoder()
    encoded: list[object] = []
    joined = RowEncoder._joined
    monkeypatch.setattr(RowEncoder, "_joined", lambda self, parts: encoded.append(parts) or joined(self, parts))
    generator = DatasetGenerator(codec, encode, of_pairs=of_pairs)
    rows = [{"prompt": "1+1=", "completion": answer, "chosen": answer, "rejected": "3!"} for answer in ("2", "24")]
    measured = [(generator.prompt_length(row), generator.response_length(row)) for row in rows]
    assert measured == ([(4, 3), (4, 3)] if of_pairs else [(4, 2), (4, 3)])
    assert len(encoded) == 2 * (1 + of_pairs)
