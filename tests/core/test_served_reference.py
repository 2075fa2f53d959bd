"""A reference model served by an engine: the requests that the engine gets, and answers that are refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch

from rl_core.batch import Batch
from rl_core.config import from_mapping
from rl_core.config.checks import check_plugins
from rl_core.config.file_checks import check_files
from rl_core.errors import ConfigError, DeadlineError, GenerationError, RLError
from rl_core.trainer.update import served_reference
from rl_core.trainer.update.served_reference import ServedReference
from tests.core.virtual_time import run_virtually

Answer = Callable[[Sequence[Sequence[int]]], Mapping[str, Sequence[Sequence[float]]]]


def own_numbers(sequences: Sequence[Sequence[int]]) -> dict[str, list[list[float]]]:
    """Log-probs of −token, and 0 for the first token."""
    return {"engine": [[0.0, *(-float(token) for token in tokens[1:])] for tokens in sequences]}


class ScriptedEngine:
    """Answers with a function and records its requests."""

    vocab_size = 100

    def __init__(self, answer: Answer = own_numbers, seconds: float = 0.0):
        self.asked: list[list[list[int]]] = []
        self._answer, self._seconds = answer, seconds

    async def score(self, sequences: Sequence[Sequence[int]]) -> Mapping[str, Sequence[Sequence[float]]]:
        self.asked.append([list(tokens) for tokens in sequences])
        await asyncio.sleep(self._seconds)
        return self._answer(sequences)


def batch_of(*sequences: list[int]) -> Batch:
    return Batch.from_sequences([{"tokens": tokens} for tokens in sequences])


async def test_log_probs_are_on_their_tokens_for_any_number_of_requests(monkeypatch: pytest.MonkeyPatch):
    batch, engine = batch_of([1, 2, 3], [4, 5], [6, 7, 8, 9]), ScriptedEngine()
    whole_T = await ServedReference(engine, timeout_s=200.0).logprobs(batch)
    assert whole_T.tolist() == [0, -2, -3, 0, -5, 0, -7, -8, -9]
    assert whole_T.dtype == torch.float32
    monkeypatch.setattr(served_reference, "TOKENS_PER_REQUEST", 5)
    assert (await ServedReference(engine, timeout_s=200.0).logprobs(batch)).tolist() == whole_T.tolist()
    assert engine.asked == [[[1, 2, 3], [4, 5], [6, 7, 8, 9]], [[1, 2, 3], [4, 5]], [[6, 7, 8, 9]]]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda sequences: {}, "no engine of the reference .* is in service"),
        (lambda sequences: {"engine": [[0.0] for _ in sequences]}, "one log-prob per token"),
        (lambda sequences: {"engine": own_numbers(sequences)["engine"][:-1]}, "one log-prob per token"),
        (lambda sequences: {"engine": [[float("nan")] * len(tokens) for tokens in sequences]}, "not finite"),
    ],
    ids=["nobody", "too few numbers", "too few sequences", "no numbers"],
)
async def test_an_answer_that_cannot_be_trained_on_is_an_error(answer: Answer, message: str):
    with pytest.raises(GenerationError, match=message):
        await ServedReference(ScriptedEngine(answer), timeout_s=200.0).logprobs(batch_of([1, 2], [3]))


async def test_a_token_outside_the_references_vocabulary_is_refused_before_it_is_sent():
    engine = ScriptedEngine()
    with pytest.raises(ConfigError, match=r"trainer\.ref\.model\.path: got token 100, .* only 100 tokens"):
        await ServedReference(engine, timeout_s=200.0).logprobs(batch_of([1, 100]))
    assert not engine.asked


def test_an_engine_that_does_not_answer_is_named_at_the_deadline():
    async def wait() -> None:
        with pytest.raises(DeadlineError, match=r"waited 60 s .* reference's engine .* 2 tokens"):
            await ServedReference(ScriptedEngine(seconds=3600.0), timeout_s=60.0).logprobs(batch_of([1, 2]))

    run_virtually(wait())


async def test_the_error_of_a_deadline_of_the_engines_client_is_kept():
    def answer(_: Sequence[Sequence[int]]) -> Mapping[str, Sequence[Sequence[float]]]:
        raise DeadlineError("waited 5 s for server 0")

    with pytest.raises(DeadlineError, match=r"^waited 5 s for server 0$"):
        await ServedReference(ScriptedEngine(answer), timeout_s=200.0).logprobs(batch_of([1, 2]))


def tokenizer(directory: Path, vocabulary: object) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": []}))
    return directory


@pytest.mark.parametrize(
    ("vocabulary", "message"),
    [
        ({"a": 0, "b": 1, "c": 2}, None),
        ([["a", -1.0], ["b", -2.0]], None),
        ({"a": 1, "b": 0}, "'a' is token 0 of the policy and token 1 of the reference"),
        ({"a": 0}, "'b' is token 1 of the policy and not a token of the reference"),
        (7, "the vocabulary cannot be read"),
    ],
    ids=["more tokens", "unigram", "other ids", "fewer tokens", "unreadable"],
)
def test_a_reference_must_give_every_token_of_the_policy_the_same_id(
    vocabulary: object, message: str | None, tmp_path: Path
):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    config = from_mapping(
        {
            "data.train_data": [str(tmp_path / "rows.jsonl")],
            "trainer.run_dir": str(tmp_path / "run"),
            "trainer.policy.model.path": str(tokenizer(tmp_path / "policy", {"a": 0, "b": 1})),
            "trainer.ref.model.path": str(tokenizer(tmp_path / "reference", vocabulary)),
            "trainer.algorithm.use_kl_loss": True,
        }
    )
    if message is None:
        check_files(config)
    else:
        with pytest.raises(ConfigError, match=message):
            check_files(config)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"trainer.ref.inference_backend": "vlm"},
            r"trainer\.ref\.inference_backend: 'vlm' is not among the installed .*'vllm'",
        ),
        (
            {"trainer.ref.inference_options": {"tensor_parallel_sise": 2}, "trainer.ref.inference_backend": "vllm"},
            r"trainer\.ref\.inference_options\.tensor_parallel_sise: unknown key.*Did you mean .*tensor_parallel_size",
        ),
        (
            {"trainer.ref.inference_backend": "local", "generator.sampling_params.temperature": 0.7},
            r"trainer\.algorithm\.temperature: got 0\.7 .* at temperature 1 only",
        ),
        (
            {"trainer.ref.inference_backend": "local", "generator.sampling_params.top_p": 0.7},
            r"trainer\.ref\.inference_backend: got local, but engines score tokens in the whole distribution, .* top_p",
        ),
        (
            {"trainer.ref.inference_options": {"external_server_urls": ["http://127.0.0.1:8000"]}},
            r"trainer\.ref\.inference_options: got external_server_urls without an engine",
        ),
        (
            {
                "trainer.ref.inference_options": {"external_server_urls": ["http://a:1", "http://b:1"]},
                "trainer.ref.inference_backend": "vllm",
            },
            r"^trainer\.ref\.inference_options: the reference is served by one engine, .* got 1, but .* or list 1$",
        ),
    ],
    ids=["engine", "option", "temperature", "truncated", "options without an engine", "two servers"],
)
def test_a_reference_engine_unfit_for_the_run_is_refused_before_the_start(
    values: dict[str, object], message: str, tmp_path: Path
):
    path = str(tokenizer(tmp_path / "policy", {"a": 0}))
    config = from_mapping({"trainer.policy.model.path": path, "trainer.algorithm.use_kl_loss": True, **values})
    with pytest.raises(RLError, match=message):
        check_plugins(config)
