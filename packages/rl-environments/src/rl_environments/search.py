"""The environment `search`: the policy thinks, searches, reads and answers, as in Search-R1 (Jin et al. 2025, arXiv
2503.09516). Needs the extra `search`.

    policy       … <search> who wrote Emma </search>
    environment  <information> Doc 1(Title: Emma) … </information>
    policy       … <answer> Jane Austen </answer>

Row:       `prompt` that explains the tags (text or messages), `answer` (text, or a list of accepted answers) or
           `reward_spec.ground_truth` (the same, or Search-R1's `{"target": [...]}`)
Reward:    1 if the answer is one of the accepted ones, compared as SQuAD does; else 0
Options:   `corpus` (a .jsonl file of `title` and `text`, or an index folder: `rl_environments.corpora`), `top_k` (3),
           `max_searches` (4), `observer` (`user`; the role of messages with search results. With `tool`, most chat
           templates keep the policy's thinking in the prompts of later turns; see docs/environments.md)
Metrics:   `accuracy`, `searches`, `has_answer`

Set `generator.sampling_params.stop=["</search>","</answer>"]` and `generator.max_turns` to one more than
`max_searches`. With `generator.step_wise_trajectories` each turn may be a separate sequence.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from rl_core.errors import DataError
from rl_core.interfaces import Action, Environment, Prompt, Row, StepResult
from rl_environments.answers import is_exact_match, normalized, require_prompt, right_answer
from rl_environments.corpora import Document, load_corpus
from rl_environments.options import own_options, text, whole_number

NEITHER = (
    "That was neither a search nor an answer. Write <search> what to look for </search>, or <answer> your answer "
    "</answer>."
)
_MARKED = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)


@attrs.frozen(kw_only=True)
class _Settings:
    corpus: str
    top_k: int
    max_searches: int
    observer: str

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> _Settings:
        own = own_options(options, "search", [field.name for field in attrs.fields(cls)])
        return cls(
            corpus=text(own, "corpus"),
            top_k=whole_number(own, "top_k", 3),
            max_searches=whole_number(own, "max_searches", 4),
            observer=text(own, "observer", "user"),
        )


class SearchEnvironment(Environment):
    """See the module."""

    def __init__(self, row: Row, options: Mapping[str, Any]) -> None:
        own = _Settings.of(options)
        self._prompt: Prompt = row["prompt"]
        self._accepted = _accepted(row)
        self._corpus = load_corpus(own.corpus)
        self._top_k, self._max_searches, self._observer = own.top_k, own.max_searches, own.observer
        self._searches = 0

    @classmethod
    def require_options(cls, options: Mapping[str, Any]) -> None:
        """See `Environment.require_options`."""
        _Settings.of(options)

    @classmethod
    def require_row(cls, row: Row) -> None:
        """See `Environment.require_row`."""
        require_prompt(row, "search")
        _accepted(row)

    async def reset(self) -> Prompt:
        """See `Environment.reset`."""
        return self._prompt

    async def step(self, action: Action) -> StepResult:
        """See `Environment.step`. A turn that neither searches nor answers counts as a search, so that every episode
        ends."""
        said = _MARKED.search(action.answer)
        if said and said[1] == "answer":
            return self._done(reward=float(is_exact_match(said[2], self._accepted)), has_answer=True)
        if self._searches == self._max_searches:
            return self._done(reward=0.0, has_answer=False)
        self._searches += 1
        shown = self.information(self._corpus.search(said[2], self._top_k)) if said else self.neither()
        # In a text episode, the observation is appended unchanged.
        observation = shown if isinstance(self._prompt, str) else [{"role": self._observer, "content": shown.strip()}]
        return StepResult(reward=0.0, done=False, observation=observation, metrics=self._metrics(0.0, False))

    def information(self, documents: Sequence[Document]) -> str:
        """Returns the search results as the policy sees them; a subclass may format them differently."""
        lines = [
            f"Doc {number}(Title: {each.title}) {each.text}" if each.title else f"Doc {number} {each.text}"
            for number, each in enumerate(documents, start=1)
        ]
        return f"\n\n<information>{chr(10).join(lines) or 'Nothing was found.'}</information>\n\n"

    def neither(self) -> str:
        """Returns the observation after a turn with neither a search nor an answer."""
        return f"\n\n{NEITHER}\n\n"

    def _done(self, *, reward: float, has_answer: bool) -> StepResult:
        return StepResult(reward=reward, done=True, metrics=self._metrics(reward, has_answer))

    def _metrics(self, accuracy: float, has_answer: bool) -> dict[str, float]:
        return {"accuracy": accuracy, "searches": float(self._searches), "has_answer": float(has_answer)}


def _accepted(row: Row) -> list[str]:
    answer = right_answer(row)
    if isinstance(answer, Mapping):
        answer = answer.get("target")
    accepted = [answer] if isinstance(answer, str) else list(answer) if isinstance(answer, Sequence) else []
    if not accepted or not all(isinstance(each, str) and normalized(each) for each in accepted):
        columns = ", ".join(map(str, row))
        raise DataError(
            f"a row of search needs `answer` or `reward_spec.ground_truth`, text or a list of texts; got "
            f"{answer!r:.80} (the row has {columns})"
        )
    return accepted
