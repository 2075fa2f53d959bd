"""A prompt is trained on only if a response fits behind it; prompts that are too long are found before training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rl_core.config import Config, from_mapping, resolve
from rl_core.config.checks import gather_room
from rl_core.config.context import EVALUATION, TRAINING, context_of, require_room_for_responses
from rl_core.errors import ConfigError, DataError, Mistakes
from rl_core.interfaces import Generator, GeneratorPlugin
from rl_core.trainer.before.preflight import _gather_prompts
from rl_core.trainer.before.prompt_lengths import fitting
from rl_core.trainer.groups import DataRow


class Counts(Generator):
    """A generator whose prompts have as many tokens as their row says."""

    def prompt_length(self, row: Any) -> int:
        return row["length"]

    async def generate(self, request: object) -> Any:
        raise AssertionError


class Stored(Counts):
    """A generator whose responses are stored in the rows too."""

    def response_length(self, row: Any) -> int:
        return row["response_length"]


class StoredPlugin(GeneratorPlugin):
    name = "stored"
    needs_engine = False

    def create(self, spec: object, client: object) -> Stored:
        return Stored()


stored = StoredPlugin()


def config_of(model: Path, *, positions: dict[str, Any], **keys: Any) -> Config:
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(positions))
    given = {"trainer.policy.model.path": str(model), "trainer.max_prompt_length": 50}
    return resolve(from_mapping(given | {name.replace("__", "."): value for name, value in keys.items()}))


def rows_of(*lengths: int) -> list[DataRow]:
    return [DataRow({"length": length}, f"rows:{length}") for length in lengths]


async def kept(config: Config, sampling: str) -> list[int]:
    return [row.row["length"] for row in await fitting(rows_of(8, 9, 33, 40, 51), Counts(), config, sampling)]


async def test_a_prompt_is_left_out_if_its_response_would_exceed_the_models_positions(tmp_path, caplog):
    config = config_of(
        tmp_path / "model",
        positions={"max_position_embeddings": 40},
        data__on_long_prompt="drop",
        generator__sampling_params__max_generate_length=32,
        generator__eval_sampling_params__max_generate_length=7,
    )
    assert await kept(config, TRAINING) == [8]
    assert "dropped 4 of 5 rows whose prompts or responses are too long: trainer.max_prompt_length is 50" in caplog.text
    assert await kept(config, EVALUATION) == [8, 9, 33]


async def test_a_prompt_that_is_too_long_is_named_with_both_numbers(tmp_path):
    config = config_of(
        tmp_path / "model",
        positions={"text_config": {"max_position_embeddings": 40}},
        generator__sampling_params__max_generate_length=32,
    )
    message = (
        r"^rows:9: the prompt has 9 tokens; max_position_embeddings of .*model \(40\) less "
        r"generator\.sampling_params\.max_generate_length \(32\) leaves 8 for a prompt\. Shorten it, or leave"
    )
    with pytest.raises(DataError, match=message):
        await kept(config, TRAINING)


async def test_a_smaller_limit_of_the_engine_wins_and_unknown_models_have_no_limit(tmp_path):
    keys = {"generator__inference_engine__engine_init_kwargs": {"max_model_len": 24}}
    config = config_of(tmp_path / "model", positions={"max_position_embeddings": 40}, **keys)
    assert context_of(config) == (24, "generator.inference_engine.engine_init_kwargs.max_model_len")
    assert context_of(config_of(tmp_path / "model", positions={})) is None
    assert context_of(resolve(from_mapping({"trainer.policy.model.path": "org/model"}))) is None


async def test_the_context_of_a_model_in_the_hubs_cache_is_read_there(tmp_path, monkeypatch):
    """A look-up before the model's download finds nothing; a later look-up must find the downloaded configuration."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    keys = {"trainer.max_prompt_length": 50, "data.on_long_prompt": "drop"}
    key = f"{TRAINING}.max_generate_length"
    config = resolve(from_mapping({**keys, "trainer.policy.model.path": "some/model", key: 32}))
    assert context_of(config) is None
    snapshot, refs = (tmp_path / "models--some--model" / name for name in ("snapshots/" + "a" * 40, "refs"))
    snapshot.mkdir(parents=True)
    refs.mkdir()
    (refs / "main").write_text("a" * 40)
    (snapshot / "config.json").write_text(json.dumps({"model_type": "qwen2", "max_position_embeddings": 40}))
    assert context_of(config) == (40, "max_position_embeddings of some/model")
    assert await kept(config, TRAINING) == [8]
    mistakes = Mistakes()
    gather_room(resolve(from_mapping({"trainer.policy.model.path": "some/model", key: 40})), mistakes)
    with pytest.raises(ConfigError, match=rf"^{key}: got 40, but the model takes 40 tokens, .* at most 39$"):
        mistakes.raise_found()


@pytest.mark.parametrize("sampling", [TRAINING, EVALUATION])
def test_a_response_as_long_as_the_context_is_refused_before_the_run(tmp_path, sampling):
    def check(max_generate_length: int) -> None:
        key = sampling.replace(".", "__") + "__max_generate_length"
        keys: dict[str, Any] = {"generator__sampling_params__max_generate_length": 8, key: max_generate_length}
        require_room_for_responses(
            config_of(tmp_path / "model", positions={"max_position_embeddings": 40}, **keys), sampling
        )

    check(39)
    with pytest.raises(ConfigError, match=rf"^{sampling}\.max_generate_length: got 40, but the model takes 40 tokens"):
        check(40)


def test_rows_between_the_shortest_and_the_longest_prompts_may_be_the_only_ones_that_fit(tmp_path: Path, caplog):
    def row(prompt: str, length: int, response_length: int) -> DataRow:
        content = {"prompt": prompt, "length": length, "response_length": response_length}
        return DataRow(content, f"rows:{length}")

    config = config_of(
        tmp_path / "model", positions={}, data__on_long_prompt="drop", generator__type=f"{__name__}:stored"
    )
    rows = [*[row("?", 1, 10**6)] * 32, *[row("????", 4, 5)] * 2, *[row("?" * 99, 99, 5)] * 32]

    def errors(rows: list[DataRow]) -> list[str]:
        mistakes = Mistakes()
        _gather_prompts(config, {"data.train_data": rows}, mistakes, makes=())
        return [str(error) for error in mistakes.errors]

    assert errors(rows) == []
    assert "dropped" not in caplog.text, "before the run, not all rows are measured"
    (error,) = errors([one for one in rows if one.row["length"] != 4] * 2)
    assert error.startswith("all 128 rows have too long a prompt or response")
