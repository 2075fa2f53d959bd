"""A check ends as soon as it uses the value of a key that already has a mistake, and only then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest

from rl_core.config import Config, from_mapping
from rl_core.config.checking import passes, result_of
from rl_core.errors import ConfigError, Mistakes
from rl_core.interfaces import LoraConfig


def wrong(*keys: str) -> Mistakes:
    mistakes = Mistakes()
    mistakes.add(*(ConfigError("is wrong", key=key) for key in keys))
    return mistakes


def refuses(read: Callable[[Config], object]) -> Callable[[Config], None]:
    def check(config: Config) -> None:
        try:
            read(config)
        except Exception as error:  # a check may catch all its errors
            raise ConfigError("failed", key="data") from error
        raise ConfigError("refused", key="data")

    return check


READS: list[tuple[str, Callable[[Config], object]]] = [
    ("trainer.epochs", lambda config: config.trainer.epochs + 1),
    ("trainer.placement", lambda config: config.trainer.placement.colocate_all),
    ("trainer.placement.policy_num_nodes", lambda config: config.trainer.placement.policy_shape == (1, 1)),
    ("trainer.run_dir", lambda config: config.run_dir),
    ("generator.sampling_params.top_p", lambda config: config.generator.sampling_params.to_params().top_p < 1),
    ("trainer.policy.model.lora.rank", lambda config: attrs.asdict(config.trainer.policy.model.lora)["rank"] > 0),
    ("environment.options.limits.cpu_s", lambda config: dict(config.environment.options)),
    (
        "trainer.policy.fsdp_config.fsdp_size",
        lambda config: config.trainer.policy.options("fsdp_config").fsdp_size == 2,
    ),
    ("generator.max_concurrency", lambda config: config.generator.options.max_concurrency > 2),
]


@pytest.mark.parametrize(("key", "read"), READS, ids=[key for key, _ in READS])
def test_a_check_that_uses_a_key_with_a_mistake_reports_nothing(key: str, read: Callable[[Config], object]):
    mistakes = wrong(key)
    assert not passes(mistakes, refuses(read), from_mapping({}))
    assert result_of(mistakes, read, from_mapping({})) is None
    assert [error.key for error in mistakes.errors] == [key]


@pytest.mark.parametrize(("key", "read"), READS, ids=[key for key, _ in READS])
def test_a_check_that_uses_other_keys_is_reported(key: str, read: Callable[[Config], object]):
    mistakes = wrong("trainer.critic_mini_batch_size", "generator.sampling_params.min_q", "trainer.placements")
    assert not passes(mistakes, refuses(read), from_mapping({}))
    assert result_of(mistakes, read, from_mapping({})) is not None
    assert mistakes.errors[-1].text == "refused"


def test_a_check_may_yield_its_errors_and_keeps_those_before_the_key_with_a_mistake_out():
    def check(config: Config) -> Iterator[ConfigError]:
        yield ConfigError("first", key="data")
        if config.trainer.epochs == 1:
            yield ConfigError("second", key="generator")

    mistakes = wrong("trainer.seed")
    assert not passes(mistakes, check, from_mapping({}))
    assert [error.key for error in mistakes.errors] == ["trainer.seed", "data", "generator"]
    mistakes = wrong("trainer.epochs")
    assert not passes(mistakes, check, from_mapping({}))
    assert [error.key for error in mistakes.errors] == ["trainer.epochs"]


def test_a_check_may_copy_the_value_of_a_key_with_a_mistake_as_builders_of_specs_do():
    mistakes = wrong("generator.sampling_params.top_p", "trainer.epochs", "trainer.run_dir")
    assert passes(mistakes, lambda config: config.generator.sampling_params.to_params().top_k + 1, from_mapping({}))
    assert result_of(mistakes, lambda config: config.trainer.epochs, from_mapping({})) is None


@pytest.mark.parametrize(
    "use",
    [
        *(lambda x: -x, lambda x: x + 1, lambda x: 1 + x, lambda x: x // 2, lambda x: 5 % x, lambda x: x > 1),
        *(lambda x: not x, lambda x: x == 1, lambda x: x in (1, 2), lambda x: 1 in x, lambda x: {x: 1}, len, list),
        *(int, float, str, abs, round, range, open, lambda x: f"{x}", lambda x: x[0], lambda x: x.real, lambda x: x()),
        *(lambda x: isinstance(x, str), lambda x: {**x}, lambda x: divmod(x, 2)),
    ],
)
def test_every_use_of_a_value_ends_the_check(use: Callable[[Any], object]):
    mistakes = wrong("trainer.epochs")
    assert not passes(mistakes, lambda config: use(config.trainer.epochs), from_mapping({}))
    assert len(mistakes.errors) == 1


def test_a_record_that_is_read_in_a_check_equals_a_plain_one():
    def check(config: Config) -> None:
        lora = config.trainer.policy.model.lora
        assert lora == LoraConfig()
        assert isinstance(lora, LoraConfig)
        assert type(attrs.evolve(lora, rank=4)) is LoraConfig

    assert passes(wrong("trainer.epochs"), check, from_mapping({}))
