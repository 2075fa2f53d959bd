"""Writes docs/chat_templates.md: what a run does with the chat templates that installed packages ship.

python -m tools.chat_template_page > docs/chat_templates.md

Each cell plays or encodes a conversation with the product, and compares the result with transformers' own rendering of
the whole conversation.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from typing import Any

from rl_core.errors import RLError
from rl_core.interfaces import Environment, GroupRequest, SamplingParams, StepResult
from rl_core.testing.scripted_engine import ScriptedClient
from rl_rollout.chat import TokenCodec
from rl_rollout.episode import Limits
from rl_rollout.generator import EnvironmentGenerator, Episodes
from rl_rollout.supervised_tokens import RowEncoder, Supervised
from rl_rollout.turn_ends import stop_tokens
from tools.shipped_templates import shipped_templates, tokenizer_of

Messages = list[dict[str, Any]]
TOOL = {
    "type": "function",
    "function": {
        "name": "convert",
        "description": "Converts a length.",
        "parameters": {
            "type": "object",
            "properties": {
                "length": {"type": "number", "description": "The length."},
                "unit": {"type": "string", "enum": ["metre", "foot"], "description": "Its unit."},
            },
            "required": ["length", "unit"],
        },
    },
}
USER: dict[str, Any] = {"role": "user", "content": "How long is it?"}
AGAIN: dict[str, Any] = {"role": "user", "content": "And in feet?"}
ANSWERS: Messages = [
    {"role": "assistant", "content": "It is 12.5 metres long."},
    {"role": "assistant", "content": "It is 41 feet long."},
]
_FUNCTION = {"name": "convert", "arguments": {"length": 12.5, "unit": "m"}}
CALL: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "id": "call00001", "function": _FUNCTION}],
}
RESULT: dict[str, Any] = {"role": "tool", "content": "41 feet exactly", "name": "convert", "tool_call_id": "call00001"}
EXACT = "exact"
_THOUGHT = "Is it 12.5 metres?"


class Wrong(Exception):
    """The product did something else than transformers, without an error."""


def rendered(template: str, messages: Messages, *, tools: bool = False, opens: bool = False) -> str:
    """Transformers' own rendering."""
    options: dict[str, Any] = {"tools": [TOOL]} if tools else {}
    return str(
        tokenizer_of(template).apply_chat_template(messages, tokenize=False, add_generation_prompt=opens, **options)
    )


def _require(is_right: bool, *what: object) -> None:
    if not is_right:
        raise Wrong(" | ".join(map(repr, what)))


# --- conversations that are played ------------------------------------------------------------------------------------


def _played(
    template: str,
    prompt: Messages,
    said: Sequence[str],
    observations: Sequence[Messages],
    *,
    step_wise: bool,
    tools: bool,
) -> list[str]:
    """Plays an episode in which the policy says `said`; returns the prompts that the engine got, and for the last turn
    the prompt and the response."""
    tokenizer = tokenizer_of(template)
    codec = TokenCodec(tokenizer, chat_template_kwargs={})

    class Episode(Environment):
        offers_tools = True

        def __init__(self, row: Mapping[str, Any], options: Mapping[str, Any]) -> None:
            self.turn = 0

        async def reset(self) -> Any:
            return prompt

        async def tools(self) -> Any:
            return [TOOL] if tools else []

        async def step(self, action: Any) -> StepResult:
            self.turn += 1
            done = self.turn == len(said)
            return StepResult(reward=0.0, done=done, observation=None if done else observations[self.turn - 1])

        async def close(self) -> None: ...

    def script(request: Any) -> Sequence[int]:
        return codec.encode_text(said[len(client.exchanges)])

    # The engine stops at the tokens that the product gives it, and at no other.
    client = ScriptedClient(script, end_tokens=stop_tokens(codec))
    episodes = Episodes(environment_of=lambda row: Episode, limits=Limits(max_turns=4), step_wise=step_wise)
    request = GroupRequest(
        group_id=0,
        row={"prompt": prompt},
        row_place="row",
        num_samples=1,
        params=SamplingParams(max_tokens=500),
        seed=0,
        start_version=0,
    )
    (played,) = asyncio.run(EnvironmentGenerator(client, codec, episodes).generate(request))
    if played.failure is not None:
        raise RLError(played.failure)
    _require(all(exchange.completion.stop_reason == "stop" for exchange in client.exchanges), "no stop")
    prompts = [tokenizer.decode(list(exchange.request.prompt_tokens)) for exchange in client.exchanges]
    last = client.exchanges[-1]
    return [*prompts, tokenizer.decode([*last.request.prompt_tokens, *last.completion.tokens])]


def _response(template: str, before: Messages, message: dict[str, Any], after: Messages, *, tools: bool = False) -> str:
    """What the policy samples for a message: what transformers renders between the generation prompt and the token that
    ends the turn."""
    codec = TokenCodec(tokenizer_of(template), chat_template_kwargs={})
    try:
        prompt = rendered(template, before, tools=tools, opens=True)
        whole = rendered(template, [*before, message, *after], tools=tools, opens=bool(after))
    except Exception:  # the template refuses the conversation, so the product has to refuse it whatever the policy says
        return f"{_text_of(message)}{codec.tokenizer.eos_token}"
    if not whole.startswith(prompt):
        prompt = prompt.removesuffix("<think>\n")
        if not whole.startswith(prompt):
            # The rendered answer continues another text; the policy says the answer and its end.
            return f"{_text_of(message)}{codec.tokenizer.decode(list(stop_tokens(codec))[:1])}"
    tokens, ends = codec.encode_text(whole[len(prompt) :]), {*stop_tokens(codec)}
    end = next((number for number, token in enumerate(tokens, start=1) if token in ends), None)
    if end is None and after:
        return _response(template, before, message, [], tools=tools)
    if end is None:
        return f"{_text_of(message)}{codec.tokenizer.decode(list(stop_tokens(codec))[:1])}"
    return str(codec.tokenizer.decode(list(tokens[:end])))


def _text_of(message: Mapping[str, Any]) -> str:
    return str(message["content"] or "I convert it.")


def one_turn(template: str) -> None:
    said = _response(template, [USER], ANSWERS[0], [])
    prompt, whole = _played(template, [USER], [said], [], step_wise=False, tools=False)
    _require(prompt == rendered(template, [USER], opens=True), prompt)
    _require(whole == prompt + said, whole)


def turns(template: str, *, step_wise: bool, tools: bool = False) -> None:
    first, seen = (CALL, RESULT) if tools else (ANSWERS[0], AGAIN)
    said = [
        _response(template, [USER], first, [seen], tools=tools),
        _response(template, [USER, first, seen], ANSWERS[1], [], tools=tools),
    ]
    prompts = _played(template, [USER], said, [[seen]], step_wise=step_wise, tools=tools)
    _require(prompts[0] == rendered(template, [USER], tools=tools, opens=True), prompts[0])
    expected = rendered(template, [USER, first, seen], tools=tools, opens=True)
    # What the policy sampled may have stayed in the prompt as it was, or its text is in the rendering, calls included.
    text = TokenCodec(tokenizer_of(template), chat_template_kwargs={}).response_text(_tokens(template, said[0]))
    as_text = ""
    with suppress(Exception):  # a template may refuse a text with tokens of its own
        as_text = rendered(template, [USER, {"role": "assistant", "content": text}, seen], tools=tools, opens=True)
    _require(prompts[1] in (expected, _continued(prompts[0] + said[0], expected), as_text), prompts[1], expected)
    for part in re.split(r"<[^<>]*>", said[0]):
        _require(
            prompts[1].removeprefix(prompts[0]).count(part.strip()) == 1 or len(part.strip()) < 4, part, prompts[1]
        )
    _require(prompts[2] == prompts[1] + said[1], prompts[2])
    _require(str(seen["content"]) in prompts[1].removeprefix(prompts[0] + said[0]), prompts[1])


def _tokens(template: str, text: str) -> list[int]:
    return tokenizer_of(template)(text, add_special_tokens=False)["input_ids"]


def _continued(before: str, rendering: str) -> str:
    """The text before, continued by what the rendering has after the same end."""
    tail = before[-12:]
    return before + rendering.rpartition(tail)[2] if tail in rendering else ""


# --- rows that are encoded --------------------------------------------------------------------------------------------


def _encoder(template: str) -> RowEncoder:
    return RowEncoder(
        TokenCodec(tokenizer_of(template), chat_template_kwargs={}),
        response_key="completion",
        trained_roles=("assistant",),
        trained_turns="all",
        scored_at_end=False,
    )


def _require_rendered(template: str, sequence: Supervised, messages: Messages, *, tools: bool = False) -> None:
    """Requires that a sequence is transformers' rendering up to the end of the last turn, and that each answer is
    trained with an end."""
    tokenizer = tokenizer_of(template)
    text, expected = tokenizer.decode(list(sequence.tokens)), rendered(template, messages, tools=tools)
    codec = TokenCodec(tokenizer, chat_template_kwargs={})
    ends = [tokenizer.decode([token]) for token in stop_tokens(codec)]
    shared = next((i for i, pair in enumerate(zip(text, expected, strict=False)) if len({*pair}) > 1), len(text))
    behind = text[min(shared, len(expected)) :]
    _require(behind in ("", *ends) or text[: len(expected)] == expected, text, expected)
    _require(not expected[len(text) :].strip() or text.endswith(tuple(ends)), text, expected)
    trained, parts = False, []
    for token, is_trained in zip(sequence.tokens, sequence.trained, strict=True):
        if is_trained and not trained:
            parts.append([])
        if is_trained:
            parts[-1].append(token)
        trained = is_trained
    answers = [message for message in messages if message["role"] == "assistant"]
    _require(len(parts) == len(answers), len(parts), text)
    for part, answer in zip(parts, answers, strict=True):
        said = tokenizer.decode(part)
        wanted = [answer["content"]]
        for call in answer.get("tool_calls", ()):
            wanted += [call["function"]["name"], *map(str, call["function"]["arguments"].values())]
        _require(all(each in said for each in wanted), said, wanted)
        _require(said.endswith(tuple(ends)), said, ends)


def rows(template: str, *, tools: bool = False, thinks: bool = False) -> None:
    messages = [USER, CALL, RESULT, ANSWERS[1]] if tools else [USER, ANSWERS[0], AGAIN, ANSWERS[1]]
    if thinks:
        answer = {"role": "assistant", "content": f"<think>\n{_THOUGHT}\n</think>\n\n{ANSWERS[0]['content']}"}
        sequence = _encoder(template).response({"messages": [USER, answer]})
        trained = [token for token, is_trained in zip(sequence.tokens, sequence.trained, strict=True) if is_trained]
        prompt = rendered(template, [USER], opens=True)
        text = tokenizer_of(template).decode(list(sequence.tokens))
        _require(text.startswith(prompt), text, prompt)
        said = tokenizer_of(template).decode(trained)
        _require(said.count(_THOUGHT) == 1 and said.count(ANSWERS[0]["content"]) == 1, said)
        _require(text.count("</think>") == 1 and said.index(_THOUGHT) < said.index("</think>"), text)
        return
    row: dict[str, Any] = {"messages": messages, **({"tools": [TOOL]} if tools else {})}
    _require_rendered(template, _encoder(template).response(row), messages, tools=tools)


def pairs(template: str) -> None:
    row = {"prompt": [USER], "chosen": ANSWERS[:1], "rejected": ANSWERS[1:]}
    for sequence, answer in zip(_encoder(template).pair(row), ANSWERS, strict=True):
        _require_rendered(template, sequence, [USER, answer])


COLUMNS: dict[str, Callable[[str], None]] = {
    "RL, one turn": one_turn,
    "RL, turns": partial(turns, step_wise=False),
    "step-wise": partial(turns, step_wise=True),
    "tools": partial(turns, step_wise=False, tools=True),
    "tools, step-wise": partial(turns, step_wise=True, tools=True),
    "SFT": rows,
    "SFT, thinking": partial(rows, thinks=True),
    "SFT, calls": partial(rows, tools=True),
    "preferences": pairs,
}


def outcome(template: str, column: str) -> str:
    """`exact`, or the error with which the product refuses. Raises Wrong if it does something else."""
    try:
        COLUMNS[column](template)
    except RLError as error:
        return _reason(str(error))
    return EXACT


_PHRASES = {
    "Earlier turns are rendered again from their text": "renders earlier turns differently once later turns follow, "
    "and shows the results of tools only after calls in its own format, which the text of an earlier turn does not "
    "have; environments that answer with messages of the role user can be used",
    "before the text of an answer": "writes a header with special tokens before answers, which a turn with calls lacks",
    "does not show the name of the tool": "does not show `tools`",
    "does not show the name of the call": "does not show `tool_calls`",
    "does not show the content of message 1": "shows only content in parts, as for images",
    "refuses the messages": "raises an error of its own, such as that roles must alternate",
    "renders earlier turns differently": "renders earlier turns differently once later turns follow; "
    "`generator.step_wise_trajectories=true` begins a new sequence there",
    "changes earlier turns": "renders earlier turns differently once later turns follow; "
    "`generator.trained_turns=last` trains on the last one",
    "drops the thinking of earlier turns": "drops the thinking of earlier turns; "
    "`generator.step_wise_trajectories=true` begins a new sequence there",
    "ends the last turn with other tokens": "ends the last turn with another token than earlier turns; "
    "`generator.step_wise_trajectories=true` begins a new sequence there",
    "writes no special token at the end": "writes no special token at the end of an answer, so the policy would not "
    "learn to end its turn",
    "ends turns without a special token": "writes no special token at the end of an answer at which engines could stop",
    "does not show the thinking": "does not show the thinking of an answer",
    "does not show the observation": "does not show the results of tools unchanged",
    "cannot be trained on": "begins the policy's turn with other text than it renders for this answer: the thinking is "
    "opened or closed by the generation prompt; the error names the setting or the change of the row that helps",
}


def _reason(error: str) -> str:
    return next((phrase for start, phrase in _PHRASES.items() if start in error), error)


_INTRODUCTION = """\
# Chat templates

What a run does with the chat templates that the installed packages trl {trl} and vllm ship. `make docs` generates this
page: each cell plays or encodes a conversation with the product, with a byte-level tokenizer that knows the template's
special tokens, and compares it with the rendering of the whole conversation by transformers.

- **exact**: the policy sees, and is trained on, what transformers renders, and its turns end where the engine stops.
- A number: the run is refused before it starts, because the template does what stands [below](#why-a-run-is-refused).
  With tools of a general environment, which are known only in its first episode, it ends there.

Rows are `package/template`; `(+)` stands for the same template and trl's `_training` variant of it. "RL, turns" and
"tools" play two turns in one sequence, "step-wise" columns with `generator.step_wise_trajectories=true`. "tools" shows
a function, calls it and shows the result. "SFT" has two answers, "SFT, thinking" one answer with `<think>…</think>` in
its content, and "SFT, calls" a call and its result; preferences have one answer each.
[environments.md](environments.md#what-the-template-must-show) says what is checked.

| template | {columns} |
|---|{dashes}|
"""


def page() -> str:
    """The whole page. Raises Wrong if a template is neither exact nor refused."""
    templates, reasons, lines = shipped_templates(), {}, {}
    for name, template in templates.items():
        cells = []
        for column in COLUMNS:
            what = outcome(template, column)
            cells.append(what if what == EXACT else str(reasons.setdefault(what, len(reasons) + 1)))
        lines[name] = " | ".join(cells)
    written = []
    for name, line in lines.items():
        if lines.get(f"{name}_training") == line:
            written.append(f"| {name} (+) | {line} |")
        elif not (name.endswith("_training") and lines.get(name.removesuffix("_training")) == line):
            written.append(f"| {name} | {line} |")
    columns = list(COLUMNS)
    head = _INTRODUCTION.format(
        trl=version("trl"), columns=" | ".join(columns), dashes="|".join(["---"] * len(columns))
    )
    below = "\n".join(f"{number}. {_upper(reason)}." for reason, number in reasons.items())
    return f"{head}{chr(10).join(written)}\n\n## Why a run is refused\n\nThe template:\n\n{below}\n"


def _upper(reason: str) -> str:
    return reason[0].upper() + reason[1:]


if __name__ == "__main__":
    print(page(), end="")
