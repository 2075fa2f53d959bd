"""Random configurations: the dry run refuses a configuration or accepts it. An accepted configuration then trains
for two steps if one process can run it. No configuration hangs or causes any other error."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import types
import typing
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import attrs
import pytest

from rl_core.config import Config, load
from rl_core.config.loading import hints, own_keys
from rl_core.errors import RLError
from rl_core.interfaces import Action, Callback, Control, Environment, Prompt, StepResult
from rl_core.trainer.before.preflight import preflight
from rl_core.trainer.run import run_training
from rl_deepspeed.options import DeepSpeedOptions
from rl_fsdp.options import FsdpOptions
from rl_megatron.options import MegatronOptions
from rl_rollout.generator_options import EnvironmentGeneratorOptions
from rl_rollout.vllm.options import VLLMOptions

LIMIT_S = 90.0
NUMBERS = (-1, 0, 1, 2, 3, 4, 5, 8, 16, 100, 2**31, 2**63, 10**30)
FRACTIONS = (-1.0, 0.0, 1e-9, 0.1, 0.5, 0.99, 1.0, 1.5, 2.0, 100.0, 1e9, float("inf"))
WORDS = ("", "x", "none", "local", "fsdp", "megatron", "grpo", "gae", "rloo", "no_such:thing", "a/b", "..", "null")
SECONDS = (-1.0, 0.0, 60.0, 1e9)
UNTOUCHED = ("trainer.run_dir", "trainer.callbacks", "trainer.max_training_steps", "data.train_data", "data.val_data")
"""Keys that are never drawn: the run's directory, its end, and its data."""
NAMES = {
    "trainer.algorithm.policy_loss_type": ("regular", "gspo", "cispo", "sapo", "clip_cov", "kl_cov", "cross_entropy"),
    "trainer.algorithm.advantage_estimator": ("grpo", "rloo", "reinforce++", "gae", "maxrl", "pass_at_k", "remax"),
    "generator.inference_engine.weight_sync_backend": ("files", "shared_memory", "broadcast", "cuda_ipc"),
    "environment.env_class": (f"{__name__}:ParityEnvironment", "arithmetic", "gsm8k", "guess"),
    # 42 exceeds the number of rows. 100 would mean 50 optimizer steps and take a third of the test's time.
    "trainer.train_batch_size": (-1, 0, 1, 2, 3, 4, 5, 8, 16, 42, 2**31, 2**63, 10**30),
    "trainer.update_epochs_per_batch": (0, 1, 2, 3, 2**31),  # 100 would take a minute and prove no more
    "trainer.logger": ("console", "jsonl", "tensorboard", "nothing"),
}


class ParityEnvironment(Environment):
    """Rewards about every second answer of any policy."""

    def __init__(self, row: Mapping[str, Any], options: Mapping[str, Any]):
        self._prompt: str = row["prompt"]

    async def reset(self) -> Prompt:
        return self._prompt

    async def step(self, action: Action) -> StepResult:
        return StepResult(reward=float(sum(action.text.encode()) % 2), done=True, metrics={})


class StopsAfterTwo(Callback):
    """Ends the run after its second step."""

    steps = 0

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> Control:
        StopsAfterTwo.steps += 1
        return Control(stop=step >= 2)


def keys(cls: type = Config, above: str = "") -> Iterator[tuple[str, Any]]:
    """Every key of the core's configuration, or of a plug-in's options, with its type."""
    for name in own_keys(cls):
        hint = hints(cls)[name]
        if attrs.has(hint):
            yield from keys(hint, f"{above}{name}.")
        else:
            yield f"{above}{name}", hint


PLUGIN_KEYS = [
    *keys(FsdpOptions, "trainer.policy.fsdp_config."),
    *keys(MegatronOptions, "trainer.policy.megatron_config."),
    *keys(DeepSpeedOptions, "trainer.policy.deepspeed_config."),
    *keys(VLLMOptions, "generator.inference_engine."),
    *keys(EnvironmentGeneratorOptions, "generator."),
    ("trainer.policy.fsdp_config.no_such_key", int),
]
"""The options of plug-ins are checked even if another plug-in is chosen."""


def drawn(rng: random.Random, key: str, hint: Any) -> Any:
    """A random value, which mostly fits the key's type."""
    if rng.random() < 0.125:
        return rng.choice([None, "x", -3, 2.5, True, [], ["a"], {"a": 1}])
    if key in NAMES:
        return rng.choice(NAMES[key])
    if key.endswith("_s"):
        return rng.choice(SECONDS)
    kind = typing.get_origin(hint) or hint
    options = typing.get_args(hint)
    if kind is Literal:
        return rng.choice([*options, "other"])
    if kind in (typing.Union, types.UnionType):
        chosen = rng.choice(options)
        return None if chosen is type(None) else drawn(rng, key, chosen)
    if kind is tuple:
        fixed = options[-1] is not Ellipsis
        return [drawn(rng, key, options[0]) for _ in range(len(options) if fixed else rng.randrange(3))]
    values = {bool: (True, False), int: NUMBERS, float: FRACTIONS, str: WORDS}
    return rng.choice(values.get(kind, ({}, {"a": 1}, {"clip": 0.5})))


def overrides(rng: random.Random) -> dict[str, Any]:
    """One to four keys, each with a random value."""
    known = [(key, hint) for key, hint in (*keys(), *PLUGIN_KEYS) if key not in UNTOUCHED]
    return {key: drawn(rng, key, hint) for key, hint in rng.sample(known, rng.randint(1, 4))}


def is_of_one_process(config: Config) -> bool:
    """Whether the run fits into this process: one rank on FSDP, without vLLM. Other runs get only a dry run."""
    trainer = config.trainer
    return (
        trainer.strategy == "fsdp"
        and trainer.placement.policy_shape == trainer.placement.ref_shape == trainer.placement.critic_shape == (1, 1)
        and config.generator.inference_engine.backend == "local"
    )


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    def ring(*_: object) -> None:
        raise AssertionError(f"did not end within {seconds:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def outcome(folder: Path, start: Path, given: Mapping[str, Any]) -> str:
    """Returns `refused`, `ran`, `checked` (accepted by the dry run, but not run), or the error."""
    folder.mkdir()
    base = {
        "data.train_data": [str(start / "few.parquet")],
        "data.val_data": [str(start / "two.jsonl")],
        "environment.env_class": f"{__name__}:ParityEnvironment",
        "trainer.policy.model.path": str(start / "model"),
        "trainer.run_dir": str(folder / "run"),
        "trainer.callbacks": [f"{__name__}:StopsAfterTwo"],
        "trainer.max_training_steps": 3,
        "trainer.bf16": False,
        "trainer.num_threads": 1,
        "trainer.train_batch_size": 4,
        "trainer.policy_mini_batch_size": 2,
        "trainer.critic_mini_batch_size": 2,
        "trainer.max_prompt_length": 8,
        "generator.n_samples_per_prompt": 4,
        "generator.sampling_params.max_generate_length": 4,
    }
    (folder / "config.yaml").write_text(json.dumps({**base, **given}))  # JSON is YAML
    StopsAfterTwo.steps = 0
    try:
        # Relative paths among the drawn values end up in this folder.
        with contextlib.chdir(folder), deadline(LIMIT_S), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                config = load(str(folder / "config.yaml")).config
                preflight(config)
            except RLError as error:
                return "refused" if str(error).strip() else "refused without a word"
            if not is_of_one_process(config):
                return "checked"
            run_training(config)
            assert StopsAfterTwo.steps == 2, f"{StopsAfterTwo.steps} steps"
            return "ran"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return f"{type(error).__name__}: {error}"


def sweep(tmp_path: Path, start: Path, *, seed: int, count: int) -> dict[str, int]:
    """The number of configurations with each outcome. Fails if any configuration ends with an error other than a
    refusal, and lists all these configurations.
    """
    (start / "two.jsonl").write_text('{"prompt": "1+1="}\n{"prompt": "2+1="}\n')
    rng, counted, failures = random.Random(seed), {"refused": 0, "ran": 0, "checked": 0}, []
    for number in range(count):
        given = overrides(rng)
        found = outcome(tmp_path / str(number), start, given)
        if found in counted:
            counted[found] += 1
        else:
            failures.append(f"{number}: {given}\n     {found}")
            print(failures[-1], flush=True)
    assert not failures, f"{len(failures)} of {count} (seed {seed}):\n" + "\n".join(failures)
    return counted


def test_forty_random_configurations_are_refused_or_run(tmp_path: Path, start: Path):
    counted = sweep(tmp_path, start, seed=0, count=40)
    assert counted["refused"] >= 10
    assert counted["ran"] >= 10


@pytest.mark.soak
def test_a_thousand_random_configurations_are_refused_or_run(tmp_path: Path, start: Path):
    counted = sweep(tmp_path, start, seed=1, count=1000)
    assert counted["refused"] >= 250
    assert counted["ran"] >= 250


def test_a_configuration_that_fails_after_the_dry_run_is_noticed(
    tmp_path: Path, start: Path, monkeypatch: pytest.MonkeyPatch
):
    """Negative control: if the dry run accepts a configuration that the run refuses, `outcome` returns the error."""
    monkeypatch.setattr(f"{__name__}.preflight", lambda config: None)
    (start / "two.jsonl").write_text('{"prompt": "1+1="}\n')
    found = outcome(tmp_path / "one", start, {"trainer.max_prompt_length": 1})
    assert found.startswith("DataError: ")
    assert "trainer.max_prompt_length is 1" in found
